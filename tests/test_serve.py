"""jax_apps/serve.py: a page and OpenAI's API, sample_jax.py --serve."""
import contextlib
import http.client
import json
import queue
import random
import re
import signal
import socket
import struct
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import jax
import numpy as np
import pytest

import jax_apps.serve
import jax_text
from jax_flags import TextSampling
from jax_generate import Decoder
from jax_hub.chats import SECONDS
from jax_apps.serve import Server, describe_logprobs, find_ends
from jax_text import Generation, load
from tests.common import (
    GOLDEN, ROOT, assert_as_alone, assert_refused, edit_json, free_port, generate_alone, long, random_request,
    run_script, sample, samples_of, slow, start, succeeded, wait_for)
import tools.clients
from tools.clients import Answer, speed_while_busy

openai = pytest.importorskip('openai')

N_NEW = 40  # the longest answer
SAMPLING = TextSampling(max_new_tokens=N_NEW, temperature=0.8, top_k=200)
ASKED = {'role': 'user', 'content': 'ab'}


@contextlib.contextmanager
def serving(source, system='', sampling=SAMPLING, **options):
    """Yields a Server of the model, named tiny, that runs in a thread."""
    model = load(str(source), device='cpu:0')
    messages = [{'role': 'system', 'content': system}] if system else []
    server = Server('127.0.0.1', 0, **options)
    arguments = (model, sampling, messages, 'tiny')
    thread = threading.Thread(target=server.run, args=arguments)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(60)
        assert not thread.is_alive()
        for handler in threading.enumerate():  # one that frees arrays when Python ends would abort the process
            if 'process_request_thread' in handler.name:
                handler.join(1)


@pytest.fixture(scope='module')
def of_run(finished):
    """A server of a run, which has no chat template."""
    with serving(finished[0]) as server:
        yield server


LETTERS = GOLDEN / 'letters'  # which chats


@pytest.fixture(scope='module')
def of_chats():
    """A server of a model with a chat template."""
    with serving(LETTERS) as server:
        yield server


@contextlib.contextmanager
def client_of(server):
    with openai.DefaultHttpxClient(trust_env=False) as http_client:
        yield openai.OpenAI(base_url=f'{server.url}/v1', api_key='none', max_retries=0, timeout=60,
                            http_client=http_client)


def complete(server, prompt='the fox', **options):
    with client_of(server) as client:
        return client.completions.create(model='tiny', prompt=prompt, **options)


def complete_streamed(server, **options):
    """(the text, the last chunk) of a stream."""
    with client_of(server) as client:
        chunks = list(client.completions.create(model='tiny', prompt='the fox', stream=True, **options))
    return ''.join(chunk.choices[0].text for chunk in chunks if chunk.choices), chunks[-1]


def ask(server, messages=(ASKED,), **options):
    with client_of(server) as client:
        answer = client.chat.completions.create(model='tiny', messages=messages, **options)
        return list(answer) if options.get('stream') else answer


def send(server, method, path, body=None, **headers):
    """(status, what the server has sent) of a request; a body that is no text is sent as JSON."""
    connection = http.client.HTTPConnection('127.0.0.1', server.server_port, timeout=60)
    if body is not None:
        headers = {'Content-Type': 'application/json', **headers}
        body = body if isinstance(body, str) else json.dumps(body)
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text


def post(server, body, path='/v1/completions', **headers):
    return send(server, 'POST', path, body, **headers)


def open_request(server, **body):
    """The socket of a client that has asked and does not read."""
    content = json.dumps({'prompt': 'the fox', **body})
    client = socket.create_connection(('127.0.0.1', server.server_port), timeout=60)
    client.sendall(f'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n'
                   f'Content-Length: {len(content)}\r\n\r\n{content}'.encode())
    return client


def is_well(server):
    """Whether the server answers."""
    return post(server, {'prompt': 'a', 'max_tokens': 1})[0] == 200

# -----------------------------------------------------------------------------
# the API, through the package openai


@pytest.mark.parametrize('given, more', [
    ([], {}),
    slow(['--temperature=1.5', '--top_p=0.9', '--stop=o'],
         {'temperature': 1.5, 'top_p': 0.9, 'stop': ['o', 'never comes']})])
def test_a_completion_is_the_text_of_sample_jax_with_the_same_seed_streamed_or_not(of_run, finished, given, more):
    flags = ['--start=the fox', '--num_samples=1', '--max_new_tokens=30', '--seed=5', *given]
    text, = samples_of(sample(finished[0], *flags))
    options = {'max_tokens': 30, 'seed': 5, **more}
    assert 'the fox' + complete(of_run, **options).choices[0].text == text
    assert 'the fox' + complete_streamed(of_run, **options)[0] == text


def test_a_chat_is_the_answer_of_sample_jax_with_the_same_seed_streamed_or_not(of_chats):
    said, = samples_of(sample('none', f'--init_from={LETTERS}', '--chat=True', '--start=ab', '--num_samples=1',
                              '--max_new_tokens=20', '--seed=5'))
    answer = ask(of_chats, seed=5, max_completion_tokens=20)
    assert f'> ab\n{answer.choices[0].message.content}' == said
    assert answer.choices[0].message.role == 'assistant'
    options = {'seed': 5, 'max_tokens': 20, 'stream_options': {'include_usage': True}}
    *chunks, end, usage = ask(of_chats, stream=True, **options)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert ''.join(delta.content for delta in deltas) == answer.choices[0].message.content
    assert [delta.role for delta in deltas] == ['assistant'] + [None] * (len(deltas) - 1)
    assert end.choices[0].finish_reason == answer.choices[0].finish_reason
    assert usage.usage == answer.usage and usage.choices == []


def test_answers_and_chunks_say_what_they_are(of_run, of_chats):
    with client_of(of_run) as client:
        streamed = list(client.completions.create(model='tiny', prompt='the fox', stream=True, max_tokens=3))
    for found, kind, prefix in (
            ([complete(of_run, max_tokens=3)], 'text_completion', 'cmpl-'),
            (streamed, 'text_completion', 'cmpl-'),
            ([ask(of_chats, max_tokens=3)], 'chat.completion', 'chatcmpl-'),
            (ask(of_chats, max_tokens=3, stream=True), 'chat.completion.chunk', 'chatcmpl-')):
        assert {(part.object, part.model) for part in found} == {(kind, 'tiny')}
        assert len({part.id for part in found}) == 1 and found[0].id.startswith(prefix)
        assert abs(found[0].created - time.time()) < 60


def test_an_answer_under_way_is_completed_after_stop(finished):
    with serving(finished[0]) as server, client_of(server) as client:
        whole = complete(server, max_tokens=60, seed=3).choices[0].text
        chunks = client.completions.create(model='tiny', prompt='the fox', stream=True, max_tokens=60, seed=3)
        texts = [next(chunks).choices[0].text]
        server.stop()
        reader = threading.Thread(target=lambda: texts.extend(chunk.choices[0].text for chunk in chunks), daemon=True)
        reader.start()
        reader.join(60)
        assert ''.join(texts) == whole


def test_a_connection_is_closed_after_its_answer(of_run):
    with socket.create_connection(('127.0.0.1', of_run.server_port), timeout=60) as client:
        client.sendall(b'GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n')
        answer = b''.join(iter(lambda: client.recv(2**16), b''))  # to the end of the connection
    assert answer.startswith(b'HTTP/1.1 200 ') and b'Connection: close' in answer


def test_what_a_request_leaves_out_is_what_the_server_was_started_with(finished):
    model, options = load(finished[0], device='cpu:0'), {'temperature': 0, 'max_new_tokens': 30}
    whole = model.generate('the fox', **options)
    stop = whole[-8]
    text = model.generate('the fox', **options, stop=stop)
    assert text != whole
    with serving(finished[0], sampling=TextSampling(**options, stop=stop)) as server:
        assert 'the fox' + complete(server).choices[0].text == text
        assert 'the fox' + complete(server, stop='never comes').choices[0].text == whole


def test_without_a_seed_each_answer_is_another_one(of_run):
    assert len({choice.text for n in (1, 3, 1) for choice in complete(of_run, n=n).choices}) == 5


def test_an_answer_says_how_many_tokens_it_has_and_why_it_ends(of_run):
    free = complete(of_run, seed=1)
    assert free.choices[0].finish_reason == 'length'
    assert free.usage.to_dict() == {'prompt_tokens': 7, 'completion_tokens': N_NEW, 'total_tokens': 7 + N_NEW}
    text = free.choices[0].text
    stopped = complete(of_run, seed=1, stop=text[10:13])
    found = text.find(text[10:13])
    assert stopped.choices[0].text == text[:found]
    assert stopped.choices[0].finish_reason == 'stop' and stopped.usage.completion_tokens == found


@pytest.mark.parametrize('stop', [None, slow('o')])
def test_logprobs_are_those_that_sample_jax_adds_up(of_run, finished, tmp_path, stop):
    output = tmp_path / 'samples.jsonl'
    sample(finished[0], '--start=the fox', '--num_samples=1', '--max_new_tokens=20', '--seed=5', f'--stop={stop or ""}',
           f'--output={output}')
    expected = json.loads(output.read_text())
    options = {'max_tokens': 20, 'seed': 5, 'logprobs': 0, 'stop': stop}
    choice = complete(of_run, **options).choices[0]
    assert sum(choice.logprobs.token_logprobs) == pytest.approx(expected['logprob'], abs=1e-4)
    assert ''.join(choice.logprobs.tokens) == choice.text == expected['text']
    assert choice.logprobs.text_offset == list(range(len(choice.text)))
    _, end = complete_streamed(of_run, **options)
    assert end.choices[0].logprobs == choice.logprobs


def test_a_chat_has_the_logprob_of_each_token(of_chats):
    choice = ask(of_chats, logprobs=True, seed=5).choices[0]
    assert ''.join(token.token for token in choice.logprobs.content) == choice.message.content
    assert all(token.logprob < 0 for token in choice.logprobs.content)
    assert ask(of_chats, logprobs=False).choices[0].logprobs is None


def test_the_models_are_the_one_that_is_served(of_run, of_chats):
    for server, has_template in ((of_run, False), (of_chats, True)):
        with client_of(server) as client:
            model, = client.models.list()
        assert (model.id, model.has_chat_template) == ('tiny', has_template)
        assert 'parameters, context of' in model.description


def test_a_chat_goes_on_from_what_was_computed_before_it(of_chats):
    first = ask(of_chats, seed=3, max_tokens=5).choices[0].message.content
    messages = [ASKED, {'role': 'assistant', 'content': first}, {'role': 'user', 'content': 'c'}]
    held = ask(of_chats, messages, seed=4).choices[0].message.content
    ask(of_chats, [{'role': 'user', 'content': 'd'}])
    assert ask(of_chats, messages, seed=4).choices[0].message.content == held


def test_the_system_prompt_of_the_server_is_in_front_of_chats_that_have_none():
    with serving(LETTERS, system='be brief') as server:
        assert ask(server).usage.prompt_tokens == 14
        assert ask(server, [{'role': 'system', 'content': 'a'}, ASKED]).usage.prompt_tokens == 7


def test_a_developer_is_the_system_unless_the_chat_template_knows_both(speaking):
    chats = [[{'role': role, 'content': 'be brief'}, ASKED] for role in ('system', 'developer')]
    with serving(LETTERS, system='a') as server:  # the server's own system prompt is not added either
        texts = [ask(server, chat, seed=1).choices[0].message.content for chat in chats]
        assert texts[0] == texts[1] != ask(server, seed=1).choices[0].message.content
    template = '{% for m in messages %}{{ "ab" if m.role == "developer" else "c" }}{{ m.content }}{% endfor %}'
    edit_json(speaking / 'tokenizer_config.json', chat_template=template)
    with serving(speaking, system='a') as server:
        assert [ask(server, chat).usage.prompt_tokens for chat in chats] == [12, 13]


def test_a_message_that_the_chat_template_leaves_out_is_refused(speaking):
    template = '{% for m in messages if m.role in ["user", "assistant"] %}{{ m.content }}{% endfor %}'
    edit_json(speaking / 'tokenizer_config.json', chat_template=template)
    with serving(speaking) as server:
        for role in ('system', 'developer', 'tool', 'narrator'):
            name = 'system' if role == 'developer' else role
            with pytest.raises(openai.BadRequestError, match=f'leaves out messages of the role "{name}"'):
                ask(server, [ASKED, {'role': 'assistant', 'content': 'a'}, {'role': role, 'content': 'b'}])
        assert ask(server).usage.prompt_tokens == 2
    refused = sample('none', f'--init_from={speaking}', '--chat=True', '--start=a', '--system=be brief')
    assert_refused(refused, 'leaves out messages of the role "system"')


def test_a_prompt_longer_than_the_context_is_continued_at_its_end_if_the_request_says_so(of_run):
    long = 'the quick brown fox jumps over the lazy dog'
    with pytest.raises(openai.BadRequestError, match='the prompt has 43 tokens, the context 16') as refused:
        complete(of_run, long)
    assert refused.value.code == 'context_length_exceeded'
    texts = [complete(of_run, prompt, seed=1, extra_body={'truncate_prompt_tokens': keep}).choices[0].text
             for prompt, keep in ((long[-16:], None), (long, -1), (long, 99), (long[3:], 16))]
    assert len(set(texts)) == 1


# -----------------------------------------------------------------------------
# mistakes

@pytest.mark.parametrize('body, param', [
    ({}, 'prompt'), ({'prompt': None}, 'prompt'), ({'prompt': []}, 'prompt'), ({'prompt': ['a', 1]}, 'prompt'),
    ({'prompt': {'a': 1}}, 'prompt'), ({'prompt': 'a', 'temperature': 'hot'}, 'temperature'),
    ({'prompt': 'a', 'temperature': True}, 'temperature'), ({'prompt': 'a', 'temperature': 10**400}, 'temperature'),
    ({'prompt': 'a', 'temperature': 2.1}, 'temperature'), ({'prompt': 'a', 'logit_bias': {'1': 9}}, 'logit_bias'),
    ({'prompt': 'a', 'response_format': {'type': 'json_object'}}, 'response_format'),
    ({'prompt': 'a', 'max_tokens': 0}, 'max_tokens'), ({'prompt': 'a', 'max_tokens': 1e99}, 'max_tokens'),
    ({'prompt': [99999]}, 'prompt'), ({'prompt': [-1]}, 'prompt'), ({'prompt': 'a', 'seed': 1.5}, 'seed'),
    ({'prompt': 'a', 'stop_token_ids': ['x']}, 'stop_token_ids'), ({'prompt': 'a', 'ignore_eos': True}, 'ignore_eos'),
    ({'prompt': 'a', 'stop_token_ids': [99999]}, 'stop_token_ids'),
    ({'prompt': 'a', 'min_tokens': 3}, 'min_tokens'), ({'prompt': 'a', 'grammar': 'root ::= x'}, 'grammar'),
    ({'prompt': 'a', 'stop': [1]}, 'stop'), ({'prompt': 'a', 'stop': ['a'] * 5}, 'stop'),
    ({'prompt': 'a', 'n': 65}, 'n'), ({'prompt': 'a', 'n': 0.5}, 'n'), ({'prompt': 'a', 'n': 0}, 'n'),
    ({'prompt': 'a', 'repeat_penalty': 1.1}, 'repeat_penalty'), ({'prompt': 'a', 'n_predict': 3}, 'n_predict'),
    ({'prompt': 'a', 'tool_choice': 'required'}, 'tool_choice'), ({'prompt': 'a', 'verbosity': 'low'}, 'verbosity'),
    ({'prompt': 'a', 'prompt_logprobs': 1}, 'prompt_logprobs'), ({'prompt': 'a', 'num_beams': 4}, 'num_beams'),
    ({'prompt': 'a', 'logprobs': 5}, 'logprobs'), ({'prompt': 'a', 'stream': 1}, 'stream'),
    ({'prompt': 'a', 'echo': True}, 'echo'), ({'prompt': 'a', 'tools': [{}]}, 'tools'),
    ({'prompt': 'a', 'stream_options': []}, 'stream_options'), ({'prompt': 'a', 'seed': 2**32}, 'seed'),
    ({'prompt': 'a', 'repetition_penalty': 10**400}, 'repetition_penalty'), ({'prompt': 'a', 'top_p': 0}, None),
    ({'prompt': 'a', 'top_k': -2}, None), ({'prompt': ''}, None),
    ({'prompt': 'X'}, None), ({'prompt': '\ud800'}, None), ({'prompt': 'a', 'repetition_penalty': -1}, None),
    ({'prompt': 'a', 'add_generation_prompt': False}, 'add_generation_prompt'),
    ({'prompt': 'a', 'n': 2, 'stream': True}, 'stream'), ({'prompt': ['a', 'b'], 'stream': True}, 'stream'),
    ({'prompt': 'a', 'truncate_prompt_tokens': -2}, None)])
def test_a_field_that_makes_no_sense_is_refused_by_name_streamed_or_not(of_run, body, param):
    for more in ({}, {} if 'stream' in body else {'stream': True}):
        status, text = post(of_run, {**body, **more})
        error = json.loads(text)['error']
        assert status == 400 and error['param'] == param and error['type'] == 'invalid_request_error', text
        assert set(error) == {'message', 'type', 'param', 'code'}
        assert (param or '') in error['message']


def test_a_field_that_is_not_supported_may_have_the_value_that_changes_nothing(of_run):
    for choice in ('none', 'auto'):
        body = {'prompt': 'a', 'max_tokens': 1, 'tool_choice': choice, 'tools': [], 'repeat_penalty': 1.0,
                'n_predict': -1, 'typ_p': 1.0, 'skip_special_tokens': True, 'prediction': None, 'num_beams': 1}
        assert post(of_run, body)[0] == 200


def test_a_request_may_be_as_hot_and_as_large_as_the_documents_say(of_run):
    body = {'prompt': 'a', 'max_tokens': 1, 'temperature': 2, 'stop': ['w', 'x', 'y', 'z']}
    content = json.dumps(body).ljust(2**20)
    assert post(of_run, content)[0] == 200
    assert post(of_run, content + ' ')[0] == 413


def test_the_length_of_an_answer_has_three_names(of_run):
    for name in ('max_tokens', 'max_completion_tokens', 'max_new_tokens'):
        status, text = post(of_run, {'prompt': 'the', name: 3})
        assert json.loads(text)['usage']['completion_tokens'] == 3


@pytest.mark.parametrize('messages', [
    None, 'ab', [], [1], ['ab'], [{}], [{'role': 'user'}], [{'role': 1, 'content': 'a'}],
    [{'role': 'user', 'content': 1}], [{'role': 'user', 'content': {'a': 'b'}}], [ASKED] * 4])
def test_messages_that_are_no_chat_are_refused(of_chats, messages):
    status, text = post(of_chats, {'messages': messages}, '/v1/chat/completions')
    assert status == 400 and any(name in text for name in ('messages', 'message 0', 'too long'))


def test_other_mistakes_have_the_errors_of_the_package(of_run):
    with client_of(of_run) as client, pytest.raises(openai.NotFoundError, match='the model here is tiny') as refused:
        client.completions.create(model='gpt-4', prompt='a')
    assert refused.value.code == 'model_not_found'
    with pytest.raises(openai.BadRequestError, match='no chat template'):
        ask(of_run)
    assert post(of_run, {'prompt': 'a', 'max_tokens': 1}, '/v1/completions?chat=1')[0] == 200
    with client_of(of_run) as client, pytest.raises(openai.NotFoundError):
        client.embeddings.create(model='tiny', input='a')
    assert post(of_run, '{"prompt": "a"}', **{'Content-Type': 'text/plain'})[0] == 415
    assert post(of_run, '{"prompt": "a"}', **{'Content-Encoding': 'gzip'})[0] == 415
    assert post(of_run, '{"prompt": "a"}', **{'Transfer-Encoding': 'chunked'})[0] == 411
    assert post(of_run, '[' * 100_000)[0] == 400


def test_an_error_of_the_model_is_the_answer_and_the_server_goes_on(of_run, monkeypatch, capsys):
    def fail(*args, **options):
        raise RuntimeError('out of something')

    monkeypatch.setattr(jax_apps.serve, 'Generation', fail)
    with pytest.raises(openai.InternalServerError, match='RuntimeError: out of something'):
        complete(of_run)
    monkeypatch.undo()
    assert is_well(of_run)
    assert 'out of something' in capsys.readouterr().err


def malformed_request(rng):
    """The bytes of a request that is none."""
    head = 'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n'
    values = ['', 'x', -1, 10**400, 1e308, -0.5, [], {}, [[]], '\0', True, [None], {'a': {'a': []}}]

    def with_body(body, path='/v1/completions'):
        return head.replace('/v1/completions', path) + f'Content-Length: {len(body.encode())}\r\n\r\n{body}'

    def cut(text):
        return text[:rng.randrange(len(text))]

    local = 'Host: localhost'
    good = with_body('{"prompt": "a"}')

    def wrong(**known):
        name = rng.choice(['temperature', 'top_p', 'max_tokens', 'stream_options', 'n', 'logit_bias'])
        bad = {'temperature': values[:4], 'top_p': values[:5], 'stream_options': values[:4] + values[6:7]}
        return json.dumps({**known, name: rng.choice(bad.get(name, values[:5])), 'echo': 'yes'})

    def with_head(line, *headers):
        return '\r\n'.join([line, *headers, '', ''])

    kinds = [
        lambda: rng.randbytes(rng.randrange(1, 3000)).lstrip(b'\r\n') or b'x',
        lambda: rng.choice('ABC') * rng.choice([10, 70_000]),
        lambda: with_body(cut('{"prompt": "a", "max_tokens": 1}')),
        lambda: with_body(rng.choice(['NaN', '{"prompt": "a", "temperature": Infinity}', '[]', '3', '"a"', 'null',
                                      '{"a":' * 20_000, '1' * 10_000, '{"prompt": "a", "seed": ' + '9' * 5000 + '}'])),
        lambda: with_body(wrong(prompt='a')),
        lambda: with_body(json.dumps({'prompt': rng.choice(values[2:])})),
        lambda: with_body(json.dumps({'messages': rng.choice(values)}), '/v1/chat/completions'),
        lambda: with_body('{"prompt": "a"}', rng.choice(['/v1', '/../page.html', '//', '/jax_run', '/[', '*'])),
        lambda: with_head(rng.choice(['PUT', 'DELETE', 'OPTIONS', 'POST', 'get', 'x']) + ' / HTTP/1.1', local),
        lambda: with_head(f'GET {rng.choice(["/v1/completions", "/page.html", "/%2e%2e/a"])} HTTP/1.1', local),
        lambda: with_head(f'GET / HTTP/{rng.choice(["9.9", "2.0", "x", "1", "1.1.1", "-1.0"])}', local),
        lambda: with_head('GET / HTTP/1.1', rng.choice(['a: b', 'Host: evil.example', 'Host: [', 'x' * 70_000])),
        lambda: with_head('GET / HTTP/1.1', local, *['a: b'] * 200),
        lambda: head + rng.choice(['', 'Content-Length: -1\r\n', 'Content-Length: x\r\n', 'Content-Length: 1e3\r\n',
                                   'Content-Length: 99999999\r\n', 'Transfer-Encoding: chunked\r\n']) + '\r\n{}',
        lambda: good.replace('application/json', rng.choice(['text/plain', '', 'a/b/c', '\xff'])),
        lambda: good.replace(local, f'{local}\r\nOrigin: {rng.choice(["null", "http://evil.example", "x"])}')]
    request = rng.choice(kinds)()
    return request if isinstance(request, bytes) else request.encode('latin-1', 'replace')


def status_of(server, request):
    """The status that a server answers to these bytes."""
    with socket.create_connection(('127.0.0.1', server.server_port), timeout=60) as client:
        with contextlib.suppress(ConnectionError):  # it may be refused before all is sent
            client.sendall(request)
            if b'\r\n\r\n' not in request:  # it has no end that can be seen
                client.shutdown(socket.SHUT_WR)
        answer = b''
        while part := client.recv(2**16):
            answer += part
    assert answer.startswith((b'HTTP/1.0 ', b'HTTP/1.1 ')), (request[:300], answer[:300])
    assert b'"error"' in answer, (request[:300], answer[:300])
    return int(answer.split()[1])


@pytest.mark.slow
def test_a_thousand_malformed_requests_are_refused_and_the_server_lives(of_run, capsys):
    rng = random.Random(0)
    for _ in range(1000):
        request = malformed_request(rng)
        status = status_of(of_run, request)
        assert 400 <= status < 500, (status, request[:300])
    assert is_well(of_run)
    assert capsys.readouterr().err == ''


# -----------------------------------------------------------------------------
# the page, and whose requests are answered

def test_the_page_is_the_only_file_and_loads_nothing_from_elsewhere(of_run):
    status, page = send(of_run, 'GET', '/')
    assert status == 200 and page == (ROOT / 'jax_apps/page.html').read_text(encoding='utf-8')
    assert 'http' not in page and 'innerHTML' not in page and 'viewport' in page
    for path in ('/page.html', '/jax_apps/page.html', '/../README.md', '/%2e%2e/README.md', '//a', '/.git/config'):
        assert send(of_run, 'GET', path)[0] == 404


@pytest.mark.parametrize('headers, status', [
    ({}, 200), ({'Host': 'LocalHost'}, 200), ({'Host': f'{socket.gethostname()}:8000'}, 200),
    ({'Host': '192.168.1.7:8000'}, 200), ({'Host': '[::1]:8000'}, 200),
    ({'Host': 'localhost:8000', 'Origin': 'http://localhost:8000'}, 200), ({'Host': 'evil.example:8000'}, 403),
    ({'Host': 'localhost.evil.example'}, 403), ({'Host': ''}, 403), ({'Host': 'a b'}, 403),
    ({'Host': 'localhost:8000', 'Origin': 'http://evil.example'}, 403), ({'Origin': 'null'}, 403),
    ({'Host': 'localhost:8000', 'Origin': 'http://localhost:3000'}, 403),
    ({'Host': 'evil.example', 'Origin': 'http://evil.example'}, 403)])
def test_requests_of_another_sites_page_are_refused(of_run, headers, status):
    assert send(of_run, 'GET', '/', **headers)[0] == status
    assert send(of_run, 'GET', '/v1/models', **headers)[0] == status
    assert post(of_run, {'prompt': 'a', 'max_tokens': 1}, **headers)[0] == status


def test_the_address_of_a_server_on_ipv6_has_brackets():
    at = types.SimpleNamespace(host='::1', server_port=8000)
    assert jax_apps.serve.Server.url.fget(at) == 'http://[::1]:8000'


# -----------------------------------------------------------------------------
# what clients send by default

def test_a_stream_that_is_cut_off_is_an_error_for_its_client(of_run, monkeypatch):
    send_part = jax_apps.serve.Handler.send_part
    sent = []

    def cut_off(handler, text):
        sent.append(text)
        if len(sent) == 3:
            handler.connection.shutdown(socket.SHUT_RDWR)  # as when the server is killed
        send_part(handler, text)

    monkeypatch.setattr(jax_apps.serve.Handler, 'send_part', cut_off)
    with pytest.raises((openai.APIConnectionError, httpx.RemoteProtocolError)):
        complete_streamed(of_run, seed=7)
    monkeypatch.undo()
    assert is_well(of_run)


def test_a_client_of_http_1_0_gets_a_stream_without_chunks(of_run):
    content = json.dumps({'prompt': 'the fox', 'stream': True, 'max_tokens': 3})
    with socket.create_connection(('127.0.0.1', of_run.server_port), timeout=60) as client:  # as nginx asks
        client.sendall(f'POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n'
                       f'Content-Length: {len(content)}\r\n\r\n{content}'.encode())
        head, _, body = client.makefile().read().partition('\n\n')
    assert 'Transfer-Encoding' not in head
    assert body.startswith('data: {') and body.endswith('\n\ndata: [DONE]\n\n')


def test_more_tokens_than_the_server_makes_are_as_many_as_it_makes(of_run):
    answer = complete(of_run, max_tokens=65_536, seed=3)
    assert answer.usage.completion_tokens == N_NEW and answer.choices[0].finish_reason == 'length'


def test_of_two_names_for_the_length_of_an_answer_the_newer_counts(of_run):
    answer = complete(of_run, max_tokens=5, extra_body={'max_completion_tokens': 2})
    assert answer.usage.completion_tokens == 2


def test_several_prompts_and_samples_are_one_batch_with_the_texts_that_each_has_alone(of_run):
    texts = ['the fox', 'a dog']
    alone = [complete(of_run, prompt=text, seed=5, max_tokens=9).choices[0].text for text in texts]
    together = complete(of_run, prompt=texts, seed=5, max_tokens=9)
    assert [choice.text for choice in together.choices] == alone
    assert [choice.index for choice in together.choices] == [0, 1]
    assert together.usage.completion_tokens == 18 and together.usage.prompt_tokens == len('the foxa dog')
    ids = [of_run.model.encode(text) for text in texts]
    assert [choice.text for choice in complete(of_run, prompt=ids, seed=5, max_tokens=9).choices] == alone
    assert complete(of_run, prompt=ids[0], seed=5, max_tokens=9).choices[0].text == alone[0]
    answer = complete(of_run, seed=5, max_tokens=9, n=3)
    samples = answer.choices
    assert answer.usage.prompt_tokens == len('the fox')  # once, for all samples
    assert [choice.text for choice in samples] == [
        text.removeprefix('the fox') for text in of_run.model.generate(
            ['the fox'], num_samples=3, seed=5, max_new_tokens=9, temperature=0.8, top_k=200)]
    assert len({choice.text for choice in samples}) == 3


def test_token_ids_end_an_answer_and_minus_one_is_off(of_run):
    free = complete(of_run, seed=5, max_tokens=9).choices[0].text
    ids = of_run.model.encode(free)
    ended = complete(of_run, seed=5, max_tokens=9, extra_body={'stop_token_ids': [ids[3]]}).choices[0]
    assert ended.finish_reason == 'stop' and free.startswith(ended.text) and len(ended.text) <= 4
    assert complete(of_run, seed=5, max_tokens=9, extra_body={'top_k': 0}).choices[0].text == complete(
        of_run, seed=5, max_tokens=9, extra_body={'top_k': -1}).choices[0].text
    texts = {complete(of_run, seed=-1, max_tokens=9).choices[0].text for _ in range(2)}
    assert len(texts) == 2  # drawn anew


def test_echo_has_the_log_probabilities_of_the_prompts_and_the_likeliest_tokens(of_run):
    model = of_run.model
    texts = ['the fox', 'a lazy dog']
    answer = complete(of_run, prompt=texts, echo=True, logprobs=1, max_tokens=1, temperature=0)
    for text, choice in zip(texts, answer.choices):
        expected = np.asarray(jax.nn.log_softmax(model.logits(text)))
        ids = model.encode(text)
        found = choice.logprobs
        assert found.token_logprobs[0] is None and found.tokens[:len(ids)] == list(text)
        np.testing.assert_allclose(
            found.token_logprobs[1:len(ids)], expected[np.arange(len(ids) - 1), ids[1:]], atol=1e-4)
        likeliest = expected[:-1].argmax(-1)
        for top, token, row in zip(found.top_logprobs[1:], likeliest, expected):
            assert top == {model.tokenizer.decode([token]): pytest.approx(row[token], abs=1e-4)}
        assert choice.text.startswith(text) and len(choice.text) == len(text) + 1
        assert found.text_offset == list(range(len(choice.text)))
    status, text = post(of_run, {'prompt': 'a', 'echo': True})
    assert status == 400 and json.loads(text)['error']['param'] == 'echo'


def test_echo_scores_a_text_that_is_longer_than_the_context_in_windows(of_run):
    choice, = complete(of_run, echo=True, logprobs=0, max_tokens=20, temperature=0).choices
    ids, expected = of_run.model.logprobs(choice.text)
    assert len(ids) > of_run.model.config.block_size
    np.testing.assert_allclose(choice.logprobs.token_logprobs[1:], expected, atol=1e-4)


def test_echo_without_new_tokens_scores_the_prompts_alone(of_run):
    options = dict(prompt=['the fox', 'a'], echo=True, logprobs=1, temperature=0)
    longer = complete(of_run, **options, max_tokens=1).choices
    answer = complete(of_run, **options, max_tokens=0)
    assert [choice.text for choice in answer.choices] == options['prompt']
    assert answer.usage.completion_tokens == 0 and answer.usage.prompt_tokens == len('the foxa')
    for choice, other in zip(answer.choices, longer):
        assert choice.finish_reason == 'length'
        assert choice.logprobs.tokens == other.logprobs.tokens[:-1] == list(choice.text)
        assert choice.logprobs.text_offset == list(range(len(choice.text)))
        np.testing.assert_allclose(choice.logprobs.token_logprobs[1:], other.logprobs.token_logprobs[1:-1], atol=1e-5)
        assert len(choice.logprobs.top_logprobs) == len(choice.text)
    status, text = post(of_run, {**options, 'max_tokens': -1})
    assert status == 400 and json.loads(text)['error']['param'] == 'max_tokens'


def test_echo_has_no_tokens_after_a_stop_text(of_run):
    options = dict(prompt='the fox', max_tokens=30, temperature=0)
    whole, = complete(of_run, **options).choices
    stop = whole.text[5:7]
    answer = complete(of_run, **options, echo=True, logprobs=1, stop=stop)
    choice, = answer.choices
    assert choice.text == 'the fox' + whole.text[:whole.text.index(stop)]
    assert ''.join(choice.logprobs.tokens) == choice.text
    assert len(choice.logprobs.token_logprobs) == answer.usage.total_tokens == len(choice.text)


def test_the_offset_of_a_character_of_several_tokens_is_that_of_its_last():
    def decode(ids):  # each byte is a token
        return bytes(ids).decode(errors='replace')

    ids = list('h\u00e9 \U0001f600 and\ufffd \u65e5\u672c'.encode())
    expected = [len(decode(ids[:n]).rstrip('\ufffd')) for n in range(len(ids) + 1)]
    assert find_ends(decode, ids) == expected

    def decode_strictly(ids):  # as Llama's byte tokens: U+FFFD for each, if one is incomplete
        try:
            return bytes(ids).decode()
        except UnicodeDecodeError:
            return '\ufffd' * len(ids)

    assert find_ends(decode_strictly, list('h\u00e9\u00e9\U0001f600'.encode())) == [0, 1, 1, 2, 2, 3, 3, 3, 3, 4]


@pytest.mark.parametrize('prompt', ['Hi', 'Hi \U0001f603', '\u0e44'])
def test_log_probabilities_have_the_texts_of_their_tokens_behind_any_prompt(prompt):
    smiles = '\U0001f604', '\U0001f60e'
    n_prompt = len(prompt.encode())
    tokens = list((prompt + ''.join(smiles) + 'ab').encode())

    def described(end):
        ids = tokens[:end]
        generation = types.SimpleNamespace(
            lengths=[n_prompt], prompt_texts=[prompt], texts=[bytes(ids).decode('utf-8', 'replace')],
            model=types.SimpleNamespace(tokenizer=types.SimpleNamespace(
                decode=lambda ids: bytes(ids).decode('utf-8', 'replace'))),
            result=types.SimpleNamespace(tokens=np.array([ids]), logprobs=np.zeros((1, end))))
        return describe_logprobs(types.SimpleNamespace(is_chat=False), generation, 0, end)

    found = described(len(tokens))
    assert found['tokens'] == ['', '', '', smiles[0], '', '', '', smiles[1], 'a', 'b']
    assert found['text_offset'] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 3]
    # cut inside of the second character
    assert described(n_prompt + 6)['tokens'] == ['', '', '', smiles[0], '', '\ufffd']


def test_another_answer_begins_while_the_prompts_of_an_echo_are_scored(of_run, monkeypatch):
    order = []
    score_in_pieces, encode = jax_text.score_in_pieces, Server.encode
    with ThreadPoolExecutor() as pool:
        def pieces(*args, **options):
            for results in score_in_pieces(*args, **options):
                order.append('piece')
                if len(order) == 1:
                    pool.submit(complete, of_run, max_tokens=2)
                    wait_for('a job', lambda: of_run.jobs)
                yield results

        def told(self, job, prompt):
            if not job.echo:
                order.append('other')
            return encode(self, job, prompt)

        monkeypatch.setattr('jax_text.score_in_pieces', pieces)
        monkeypatch.setattr(Server, 'encode', told)
        prompts = [letter * 9 for letter in 'abcdefgh']
        assert len(complete(of_run, prompt=prompts, echo=True, logprobs=1, max_tokens=1).choices) == 8
    # two pieces of four prompts, then all results
    assert order == ['piece', 'other', 'piece', 'piece']


def test_health_a_model_and_other_methods_have_their_answers(of_run):
    assert send(of_run, 'GET', '/health') == (200, '{"status": "ok"}')
    with client_of(of_run) as client:
        model = client.models.retrieve('tiny')
        assert model.max_model_len == of_run.model.config.block_size and '/' not in model.description
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve('other')
    assert send(of_run, 'HEAD', '/health') == (200, '')
    assert send(of_run, 'GET', f'http://localhost:{of_run.server_port}/health')[0] == 200  # as a proxy asks
    connection = http.client.HTTPConnection('127.0.0.1', of_run.server_port, timeout=60)
    connection.request('DELETE', '/v1/models')
    assert connection.getresponse().status in (405, 501)
    connection = http.client.HTTPConnection('127.0.0.1', of_run.server_port, timeout=60)
    connection.request('GET', '/v1/completions')
    response = connection.getresponse()
    assert response.status == 405 and response.headers['Allow'] == 'POST'


def test_a_stream_that_waits_says_so_and_ends_whole(of_run, monkeypatch):
    monkeypatch.setattr(jax_apps.serve, 'WAITING', 0.05)
    monkeypatch.setattr(jax_apps.serve, 'Generation', Slow)
    Slow.allowed.clear()
    status, text = post(of_run, {'prompt': 'the fox', 'stream': True, 'max_tokens': 3})
    assert status == 200 and ': waiting\n\n' in text and text.endswith('data: [DONE]\n\n')


def test_a_step_without_new_text_sends_nothing(of_run):
    job = types.SimpleNamespace(is_chat=False, events=queue.Queue())
    assert [of_run.show(job, 'the', 0), of_run.show(job, 'the', 3), of_run.show(job, 'the fox', 3)] == [3, 3, 7]
    assert [job.events.get_nowait(), job.events.get_nowait()] == ['the', ' fox'] and job.events.empty()


def test_a_name_and_an_origin_that_are_allowed_come_in(finished):
    with serving(finished[0], allow='chat.example.org, http://localhost:3000') as server:
        assert send(server, 'GET', '/health', Host='chat.example.org')[0] == 200
        status, text = send(server, 'GET', '/health', Host='other.example.org:80')
        assert status == 403
        assert "'other.example.org:80', which is no name of this server: --allow=other.example.org" in text
        status, text = send(server, 'GET', '/health', Host='')
        assert status == 403 and "the host '', which is no name of this server: send the header Host" in text
        connection = http.client.HTTPConnection('127.0.0.1', server.server_port, timeout=60)
        headers = {'Host': 'localhost', 'Origin': 'http://localhost:3000', 'Access-Control-Request-Method': 'POST'}
        connection.request('OPTIONS', '/v1/completions', headers=headers)
        response = connection.getresponse()
        assert response.status == 204
        assert response.headers['Access-Control-Allow-Origin'] == 'http://localhost:3000'
        assert 'Content-Type' in response.headers['Access-Control-Allow-Headers']
        # the browser shows an answer to the page, too, and keeps it for no other one
        connection.request('GET', '/health', headers=headers)
        response = connection.getresponse()
        assert response.headers['Access-Control-Allow-Origin'] == 'http://localhost:3000'
        assert response.headers['Vary'] == 'Origin'
        assert send(server, 'OPTIONS', '/v1/completions', Host='localhost', Origin='http://evil.example')[0] == 403
        # behind a proxy that speaks https
        assert send(server, 'GET', '/health', Host='localhost:8443', Origin='https://localhost:8443')[0] == 200


def test_an_answer_that_was_cut_goes_on(of_chats):
    whole = ask(of_chats, temperature=0, max_tokens=8).choices[0].message.content
    begun = ask(of_chats, temperature=0, max_tokens=4).choices[0].message.content
    rest = ask(of_chats, [ASKED, {'role': 'assistant', 'content': begun}], temperature=0, max_tokens=4,
               extra_body={'continue_final_message': True}).choices[0].message.content
    assert begun + rest == whole
    ask(of_chats, [ASKED, {'role': 'assistant', 'content': begun}], max_tokens=1,
        extra_body={'continue_final_message': True, 'add_generation_prompt': False})  # as vLLM wants it
    with pytest.raises(openai.BadRequestError, match='needs an answer as the last message'):
        ask(of_chats, extra_body={'continue_final_message': True})


# -----------------------------------------------------------------------------
# many clients

class Slow(Generation):
    """A Generation that waits for `allowed` before each piece."""
    made = 0
    made_by = []
    allowed = threading.Event()

    def pieces(self, **options):
        for piece in super().pieces(**options):
            Slow.made += 1
            Slow.made_by.append(self)
            Slow.allowed.wait(0.05)
            yield piece


@pytest.fixture
def slowly(monkeypatch):
    monkeypatch.setattr(jax_apps.serve, 'Generation', Slow)
    monkeypatch.setattr('jax_text.STREAM_CHUNK', 1)
    monkeypatch.setattr(Slow, 'made', 0)
    monkeypatch.setattr(Slow, 'made_by', [])
    Slow.allowed.clear()
    yield Slow
    Slow.allowed.set()


def test_a_client_that_hangs_up_frees_the_model_within_a_token(of_run, slowly):
    for is_stream in (True, False):
        client = open_request(of_run, stream=is_stream)
        before = slowly.made
        wait_for('the first tokens', lambda: slowly.made > before + 3)
        client.close()
        n_made = slowly.made
        assert is_well(of_run)  # which makes two pieces itself
        assert slowly.made - n_made <= 4


def test_a_full_queue_is_429_until_a_client_in_it_hangs_up(finished, slowly):
    assert jax_apps.serve.QUEUED < jax_apps.serve.CONNECTIONS  # else the connection is closed instead
    with serving(finished[0], n_queued=2, batch_size=1) as server, contextlib.ExitStack() as clients:
        first = clients.enter_context(open_request(server))
        wait_for('the first token', lambda: slowly.made)
        waiting = [clients.enter_context(open_request(server, max_tokens=3)) for _ in range(2)]
        wait_for('the queue', lambda: len(server.jobs) == 2)
        with pytest.raises(openai.RateLimitError, match='2 requests are waiting already'):
            complete(server)
        waiting[0].close()
        last = clients.enter_context(open_request(server, max_tokens=3))
        wait_for('a place', lambda: len(server.jobs) == 2 and server.jobs[0].connection.getpeername()
                 == waiting[1].getsockname())
        slowly.allowed.set()
        for client in (first, waiting[1], last):
            assert client.recv(100).startswith(b'HTTP/1.1 200')


def test_of_eight_clients_half_hang_up_and_the_others_have_their_answers(of_run):
    expected = complete(of_run, seed=7).choices[0].text
    answers, errors = [], []

    def be_client(i):
        try:
            if i % 2:
                with open_request(of_run, seed=i, stream=i % 4 == 1) as client:
                    client.settimeout(0.02 * i)
                    with contextlib.suppress(TimeoutError):
                        client.recv(10)
            elif i % 4:
                answers.append(complete_streamed(of_run, seed=7)[0])
            else:
                answers.append(complete(of_run, seed=7).choices[0].text)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=be_client, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == [] and answers == [expected] * 4
    assert is_well(of_run)


def waiting_job(name):
    return types.SimpleNamespace(name=name, has_own_batch=False, has_tokens=False, is_gone=lambda: False)


def test_clients_that_ask_again_at_once_are_waited_for(monkeypatch):
    monkeypatch.setattr(jax_apps.serve, 'RETURN', 30)
    server = Server('127.0.0.1', 0)
    events, jobs = [], []

    def enter(name, seconds):
        job = waiting_job(name)
        threading.Timer(seconds, server.enter, [job]).start()

    def answer(job):
        events.append(f'{job.name} begins')
        jobs.append(job)
        yield True
        for n_left in [1, 0] if job.name == 'long' else [0]:
            if not job.has_tokens:  # a chunk for all answers
                for other in jobs:
                    other.has_tokens = True
            job.has_tokens = False
            if n_left:
                yield True
        if job.name in 'ab':
            enter(2 * job.name, {'a': 0.05, 'b': 0.1}[job.name])
        events.append(f'{job.name} ends')
        if job.name == 'long':
            server.stop()

    monkeypatch.setattr(server, 'answer', answer)
    for name in ('a', 'b', 'long'):
        server.jobs.append(waiting_job(name))
    server.take_turns()
    server.server_close()
    assert events == ['a begins', 'b begins', 'long begins', 'a ends', 'b ends', 'aa begins', 'bb begins', 'aa ends',
                      'bb ends', 'long ends']


@pytest.mark.parametrize('n_requests', [15, long(None)])
def test_mixed_requests_at_random_times_have_the_texts_that_each_has_alone(of_chats, batches, n_requests, pytestconfig):
    n_requests = n_requests or pytestconfig.getoption('--requests')
    rng = random.Random(5)
    requests = [random_request(rng, 'abcdefgh') for _ in range(n_requests)]
    patience = [rng.uniform(0, 0.3) if rng.random() < 0.2 else None for _ in requests]  # a fifth hang up
    pauses = [rng.expovariate(20) for _ in requests]

    def be_client(i):
        time.sleep(pauses[i])
        body = {'max_tokens': requests[i]['max_new_tokens'], **requests[i]}
        if patience[i] is None:
            status, text = post(of_chats, {**body, 'logprobs': 0})
            assert status == 200, text
            choice = json.loads(text)['choices'][0]
            return choice['text'], choice['logprobs']['token_logprobs']
        with open_request(of_chats, stream=True, **body) as client:
            client.settimeout(patience[i])
            with contextlib.suppress(TimeoutError):
                client.recv(1000)

    with ThreadPoolExecutor(16) as clients:
        answers = list(clients.map(be_client, range(n_requests)))
    assert max(batches) > 4
    for request, answer in zip(requests, answers):
        if answer:
            assert_as_alone(generate_alone(of_chats.model, request), *answer)


@pytest.mark.parametrize('n', [1, 2])
def test_a_new_answer_waits_for_at_most_one_chunk(of_run, monkeypatch, n):
    n_chunks, at_entry, at_first_chunk = [0], [], {}
    decode_until, enter, iterate = Decoder.decode_until, Server.enter, Generation.__iter__

    def count_chunk(self, n_end):
        n_chunks[0] += 1
        time.sleep(0.02)  # most requests come while a chunk is decoded
        return decode_until(self, n_end)

    def record_entry(self, job):
        with self.changed:
            at_entry.append(n_chunks[0])
            enter(self, job)

    def record_chunk(self):
        for chunk in iterate(self):
            at_first_chunk.setdefault(self, n_chunks[0])
            yield chunk

    monkeypatch.setattr(Decoder, 'decode_until', count_chunk)
    monkeypatch.setattr(Server, 'enter', record_entry)
    monkeypatch.setattr(Generation, '__iter__', record_chunk)
    monkeypatch.setattr('jax_text.STREAM_CHUNK', 1)
    monkeypatch.setattr('jax_apps.batching.CHUNK', 1)
    waited = []
    with contextlib.ExitStack() as clients:
        for _ in range(2):
            clients.enter_context(open_request(of_run))
        clients.enter_context(open_request(of_run, n=n))
        wait_for('three answers', lambda: len(at_first_chunk) == 3)
        for _ in range(8):
            complete(of_run, max_tokens=1)
            waited.append(list(at_first_chunk.values())[-1] - at_entry[-1])
    # the chunk that was decoded when the request came is counted at its entry; its own is the last
    assert max(waited) <= 2, f'{waited}'


@pytest.mark.parametrize('is_stream', [False, True])
def test_an_answer_that_has_ended_makes_room_at_once(of_run, is_stream):
    model = of_run.model
    generation = Generation(model, [model.encode('the fox')], TextSampling(max_new_tokens=20), streaming=True)
    job = types.SimpleNamespace(is_gone=lambda: False, is_stream=is_stream, is_chat=False, events=queue.Queue())
    turns = [generation.decoder.is_over for _ in of_run.make_pieces(job, generation)]
    assert turns and not any(turns)  # the turn after the last chunk is another answer's
    assert generation.decoder.is_over


def test_a_failure_of_the_batch_ends_its_answers_and_the_server_goes_on(of_run, monkeypatch, capsys):
    expected = complete(of_run, seed=7).choices[0].text

    def fail(*args):
        raise MemoryError('no more')

    with monkeypatch.context() as patch, ThreadPoolExecutor(4) as clients:
        patch.setattr('jax_apps.batching.put_row', fail)
        answers = list(clients.map(lambda seed: post(of_run, {'prompt': 'the fox', 'seed': seed}), range(4)))
    assert 500 in {status for status, _ in answers} <= {200, 500}
    assert 'MemoryError' in capsys.readouterr().err
    assert complete(of_run, seed=7).choices[0].text == expected


def test_connections_that_say_nothing_are_bounded_and_end(finished, monkeypatch):
    assert (jax_apps.serve.Handler.timeout, jax_apps.serve.SILENCE, jax_apps.serve.PATIENCE) == (5, 5, 30)  # seconds
    monkeypatch.setattr(jax_apps.serve.Handler, 'timeout', 0.5)
    monkeypatch.setattr(jax_apps.serve, 'PATIENCE', 0.5)
    accepted, verify = [], Server.verify_request
    monkeypatch.setattr(Server, 'verify_request', lambda *args: accepted.append(verify(*args)) or accepted[-1])
    with serving(finished[0]) as server, contextlib.ExitStack() as clients:
        wait_for('the thread that listens', lambda: is_well(server))
        n_threads = threading.active_count()
        monkeypatch.setattr(jax_apps.serve, 'CONNECTIONS', n_threads + 4)
        silent = [clients.enter_context(socket.create_connection(('127.0.0.1', server.server_port), timeout=60))
                  for _ in range(8)]
        silent[0].sendall(b'GET /health HTTP/1.1\r\n')  # and then nothing
        assert [client.recv(1) for client in silent] == [b''] * 8
        assert True in accepted[-8:] and False in accepted[-8:]  # which were closed at once
        clients.close()
        wait_for('the end of their threads', lambda: threading.active_count() <= n_threads)
        assert is_well(server)


def test_a_client_that_has_begun_to_speak_may_be_slow(of_run, monkeypatch):
    monkeypatch.setattr(jax_apps.serve.Handler, 'timeout', 0.3)
    with socket.create_connection(('127.0.0.1', of_run.server_port), timeout=60) as client:
        client.sendall(b'GET /health HTTP/1.1\r\n')
        time.sleep(0.6)
        client.sendall(b'Host: localhost\r\n\r\n')
        assert client.recv(12) == b'HTTP/1.1 200'


# -----------------------------------------------------------------------------
# the command

def start_serving(*flags):
    """(sample_jax.py --serve in a process of its own, its port)."""
    port = free_port()
    process = start('sample_jax.py', f'--serve={port}', '--device=cpu:0', *flags)
    line = next(line for line in process.stdout if line.startswith('http://'))
    assert line == f'http://127.0.0.1:{port} is the page, http://127.0.0.1:{port}/v1 the API; Ctrl-C ends it\n'
    return process, port


@pytest.mark.slow
@pytest.mark.parametrize('is_busy', [False, True])
def test_ctrl_c_ends_the_server_with_one_line(finished, is_busy):
    process, port = start_serving(f'--out_dir={finished[0]}', '--max_new_tokens=100_000')
    if is_busy:
        client = socket.create_connection(('127.0.0.1', port), timeout=60)
        client.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n'
                       b'Content-Length: 31\r\n\r\n{"prompt": "the","stream":true}')
        assert client.recv(9) == b'HTTP/1.1 '
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert err == 'stopped by Ctrl-C: there is nothing to save\n'


@pytest.mark.slow
def test_a_template_without_end_is_refused_and_the_server_goes_on(speaking):
    endless = '{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}'
    template = f'{{% if messages|length > 1 %}}{endless}{{% endif %}}ab'
    edit_json(speaking / 'tokenizer_config.json', chat_template=template)
    process, port = start_serving(f'--init_from={speaking}', '--max_new_tokens=5')
    connection = http.client.HTTPConnection('127.0.0.1', port, timeout=60)
    for n, status in ((1, 200), (2, 400), (1, 200)):
        started = time.perf_counter()
        connection.request('POST', '/v1/chat/completions', json.dumps({'messages': [ASKED] * n}),
                           {'Content-Type': 'application/json'})
        response = connection.getresponse()
        assert response.status == status and ('does not end' in response.read().decode()) == (n == 2)
        assert n == 1 or time.perf_counter() - started < SECONDS + 20
        connection.close()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM


def usage(process):
    """(threads, descriptors, MB of memory) of a process, on Linux."""
    proc = Path(f'/proc/{process.pid}')
    pages = int((proc / 'statm').read_text().split()[1])
    return len(list((proc / 'task').iterdir())), len(list((proc / 'fd').iterdir())), pages * 4096 / 1e6


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(not Path('/proc/self/statm').exists(), reason='reads /proc')
def test_after_many_requests_and_hang_ups_a_server_has_what_it_had_before(finished, pytestconfig):
    process, port = start_serving(f'--out_dir={finished[0]}', f'--max_new_tokens={N_NEW}')
    server = types.SimpleNamespace(server_port=port)

    def be_client(i):
        """Half of the clients hang up: in the middle of the request, at once, or later, some by a reset."""
        rng = random.Random(i)
        body = {'prompt': 'the fox'[:1 + i % 7], 'seed': i % 50, 'stream': i % 3 > 0}
        if i % 2:
            status, text = post(server, body)
            assert status == 200 and (not body['stream'] or text.endswith('data: [DONE]\n\n'))
            return
        with socket.create_connection(('127.0.0.1', port), timeout=60) as client:
            content = json.dumps(body).encode()
            client.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n'
                           b'Content-Length: %d\r\n\r\n%s' % (len(content), content[:None if i % 4 else 9]))
            time.sleep(rng.choice([0, rng.uniform(0, 0.3)]))
            if i % 3 == 0:  # closing resets the connection
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))

    def comes_in():
        with contextlib.suppress(OSError):  # a connection too many is closed
            return is_well(server)

    def send_all(numbers):
        with ThreadPoolExecutor(12) as clients:
            list(clients.map(be_client, numbers))

    n_requests = pytestconfig.getoption('--requests')
    # until all programs are compiled: some numbers of rows are seldom met
    memory = 0
    for _ in range(10):
        before = memory
        send_all(range(n_requests))
        wait_for('the end of the answers', lambda: is_well(server), process)
        time.sleep(1)
        threads, descriptors, memory = usage(process)
        if memory < before + 5:
            break
    send_all(range(n_requests))
    # 200 connections that say nothing: others come in again after SILENCE
    with contextlib.ExitStack() as silent:
        for _ in range(200):
            silent.enter_context(socket.create_connection(('127.0.0.1', port), timeout=60))
        time.sleep(0.5)
        started = time.monotonic()
        wait_for('an answer', comes_in, process, seconds=60)
        assert time.monotonic() - started < jax_apps.serve.SILENCE + 2
    wait_for('the end of the threads', lambda: usage(process)[0] <= threads, process, seconds=60)
    wait_for('the end of the sockets', lambda: usage(process)[1] <= descriptors, process, seconds=60)
    print(f'{n_requests} requests: {threads} threads, {descriptors} descriptors, {memory:.0f} MB; '
          f'afterwards {usage(process)}')
    assert usage(process)[2] < memory * 1.05 + 10
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM and 'Traceback' not in err


def test_a_server_that_cannot_be_is_refused(finished):
    for flags, message in [
            (['--serve=70000'], r'serve must be in \[0, 65536\), not 70000'), (['--serve=-1'], 'serve must be in'),
            (['--serve=8000', '--interactive=True'], 'nothing reads interactive=True without .* leave out --serve'),
            (['--serve=8000', '--output=a.jsonl'], 'nothing reads output=a.jsonl without .* leave out .* --serve'),
            (['--serve=8000', '--start=a'], 'nothing reads start=a'),
            (['--serve=8000', '--chat=True'], 'nothing reads chat'),
            (['--serve=8000', '--stream=True'], 'nothing reads stream'),
            (['--host=a'], 'nothing reads host=a without a server'),
            ([f'--serve={free_port()}', '--host=999.1.1.1'], 'cannot listen on 999.1.1.1'),
            ([f'--serve={free_port()}', '--host=8.8.8.8'], 'cannot listen on 8.8.8.8'),
            ([f'--serve={free_port()}', '--system=a'], 'no chat template')]:
        assert_refused(sample(finished[0], *flags), message)


def test_a_port_in_use_is_told_before_the_model_is_loaded():
    with socket.create_server(('127.0.0.1', 0)) as listener:
        port = listener.getsockname()[1]
        refused = sample('nowhere', f'--serve={port}')
        assert_refused(refused, f'cannot listen on 127.0.0.1:{port} .*in use')


def test_a_server_that_counts_no_tokens_is_one_line(monkeypatch, capsys):
    answers = [Answer('', 0, 0, 0.5, 2), Answer('', 0, 0, 0.5, 3)]
    monkeypatch.setattr(tools.clients, 'ask_all', lambda *args: answers)
    monkeypatch.setattr(sys, 'argv', ['clients.py', 'http://localhost:1', '--clients=1', '--requests=2'])
    with pytest.raises(SystemExit) as ended:
        tools.clients.main()
    assert ended.value.code == 2 and 'reports no usage' in capsys.readouterr().err


def test_the_speed_of_several_clients_ends_when_the_first_has_no_request_left():
    # two clients, three answers of 10 tokens; from 3 s on only the third is under way, half done
    answers = [Answer('', 10, 0, 0.5, 2), Answer('', 10, 0, 0.5, 3), Answer('', 10, 2, 2, 4)]
    assert speed_while_busy(answers) == pytest.approx((10 + 10 + 5) / 3)
    # a later answer without a text, which has no first piece, counts nothing
    assert speed_while_busy([*answers, Answer('', 1, 1, 5, 5)]) == pytest.approx((10 + 10 + 5) / 3)
    # a client that is alone is busy to the end
    assert speed_while_busy([Answer('', 10, 0, 0.5, 2), Answer('', 10, 2, 2.5, 5)]) == pytest.approx(20 / 5)


def test_a_table_of_several_clients_is_measured_and_mistakes_are_one_line(of_run):
    url = f'http://127.0.0.1:{of_run.server_port}'
    measured = ['--prompt=the fox', '--clients=1,2', '--requests=2', '--max_tokens=3']
    table = succeeded(run_script('tools/clients.py', url, *measured))
    assert re.fullmatch(r'clients .*\n +1 .* 1\.00 .* 0 of 2\n +2 .* 0 of 2\n', table.stdout), table.stdout

    for arguments, message in [
            (['http://127.0.0.1:1'], 'http://127.0.0.1:1 does not answer: .*refused.*'),
            (['localhost'], 'localhost does not answer: unknown url type.*'),
            ([url, '--prompt=a', '--temperature=9'], f'{url} answers HTTP Error 400: .*temperature must be .*'),
            ([url, '--clients=8', '--requests=2'], '--requests=2 leaves some of 8 clients without one'),
            ([url, '--clients=0'], 'argument --clients: 0 is no whole number from 1 on')]:
        result = run_script('tools/clients.py', *arguments)
        assert result.returncode == 2
        assert re.search(f'^clients.py: error: {message}$', result.stderr, re.MULTILINE), result.stderr
