"""What people have as conversations: their forms, tools, weights, and templates of strangers."""
import json
import os
import re
import sys
import time

import numpy as np
import pytest

from jax_files.chats import PROCESS, encode_training_chats, read_chat
from jax_files.tokenizers import HFTokenizer, copy_tokenizer
from jax_files.weight_files import write_folder
from jax_flags import UserError
from tests.common import ROOT, assert_refused, edit_json, prepare, refusal, succeeded

sys.path.insert(0, str(ROOT / 'data' / 'chat'))
from forms import read_example  # noqa: E402

ASK = {'role': 'user', 'content': 'ab'}
ANSWER = {'role': 'assistant', 'content': 'cd'}
CALL = {'type': 'function', 'function': {'name': 'add', 'arguments': {'a': 1}}}
TOOL = {'type': 'function', 'function': {'name': 'add', 'parameters': {}}}

GLM = (  # an answer has no end of its own: the next message begins with the token at which a model stops
    '{% for m in messages %}{% if m.role == "user" %}<user>{{ m.content }}{% elif m.role == "tool" %}<tool>'
    '{{ m.content }}{% else %}<model>{{ m.content or "" }}'
    '{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}</call>{% endfor %}{% endif %}{% endfor %}'
    '{% if add_generation_prompt %}<model>{% endif %}')
QWEN = (
    '{% if tools %}<system>{{ tools|tojson }}</s>{% endif %}{% if think %}t{% endif %}'
    '{% for m in messages %}<{{ m.role }}>{{ m.content or "" }}'
    '{% for c in m.tool_calls or [] %}<call>{"name": "{{ c.function.name }}", "arguments": '
    '{{ c.function.arguments|tojson }}}</call>{% endfor %}</s>{% endfor %}'
    '{% if add_generation_prompt %}<assistant>{% endif %}')


@pytest.fixture
def made(tmp_path):
    """A function of (chat template, stop tokens, characters that the tokenizer lacks) that makes a tokenizer of
    characters with the special tokens of GLM and QWEN above."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    def make(template, stop=('</s>',), without='', eos='</s>'):
        chars = [chr(c) for c in range(32, 127) if chr(c) not in without] + ['\n']
        tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(chars)}, []))
        tokenizer.decoder = decoders.Fuse()
        special = '<user> <model> <tool> <system> <assistant> </s> <call> </call>'.split()
        tokenizer.add_special_tokens([AddedToken(token) for token in special])
        tokenizer.save(str(tmp_path / 'tokenizer.json'))
        (tmp_path / 'tokenizer_config.json').write_text(json.dumps({'eos_token': eos, 'chat_template': template}))
        ids = [tokenizer.token_to_id(token) for token in stop]
        (tmp_path / 'generation_config.json').write_text(json.dumps({'eos_token_id': ids}))
        return HFTokenizer(tmp_path)
    return make


def counted_text(tokenizer, messages, **options):
    """(the text of the ids, what of it counts, with | between the parts)."""
    ids, mask = tokenizer.encode_training_chat(messages, **options)
    tokens = [tokenizer.tokenizer.decode([id], skip_special_tokens=False) for id in ids]
    marked = ''.join(token if counts else '\n' for token, counts in zip(tokens, mask))
    return ''.join(tokens), '|'.join(filter(None, re.split('\n+', marked)))


# -----------------------------------------------------------------------------
# templates of strangers

@pytest.mark.parametrize('template', [
    '{% for a in range(9999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}',  # 5 s
    "{{ 'x' * 10**10 }}", "{{ 'x'.center(10**10) }}", "{{ '%10000000000d' % 1 }}", "{{ '{:>10000000000}'.format(1) }}",
    "{{ 'a\nb'|indent(10**10) }}", '{{ [[1]]|tojson(indent=10**10) }}', "{{ [1]|batch(10**9, 'x')|list }}",
    '{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}', '{{ ([1] * 10**9)|length }}', "{{ '1'.zfill(3 * 10**9) }}",
    '{{ range(10**9)|list }}', '{{ ' + '(' * 5000 + '1' + ')' * 5000 + ' }}', "{{ 'ab' * 10**7 }}", 'x' * 2**21])
def test_a_template_without_limits_is_refused(made, template):
    tokenizer = made(template)
    started = time.perf_counter()
    message = refusal(tokenizer.encode_chat, [ASK])
    assert message.startswith("the model's chat template ") and len(message) < 700
    assert time.perf_counter() - started < 20  # on a busy machine: 5 s, and the start of the process
    assert made('{{ messages[0].content }}').render_chat([ASK], add_generation_prompt=True) == 'ab'


def test_of_many_conversations_only_the_one_whose_template_does_not_end_is_refused(made):
    template = '{% if messages[0].content == "x" %}{{ "x" * 10**10 }}{% endif %}' + QWEN
    tokenizer = made(template)
    chats = [read_chat([{'role': 'user', 'content': text}, ANSWER]) for text in ('a', 'x', 'c')]
    first, second, third = encode_training_chats(tokenizer, [(chat, None) for chat in chats])
    assert isinstance(second, UserError) and 'more than 1,024 MB' in str(second)
    assert len(first[0]) == len(third[0]) and first[0] != third[0]


def test_the_process_of_the_templates_starts_again_when_it_was_killed(made):
    tokenizer = made('{{ messages[0].content }}')
    tokenizer.encode_chat([ASK])
    PROCESS.process.kill()
    PROCESS.process.wait()
    assert 'does not end within 5 s' in refusal(tokenizer.encode_chat, [ASK])
    assert tokenizer.render_chat([ASK], add_generation_prompt=False) == 'ab'


@pytest.mark.parametrize('template, tools, text', [
    ({'default': 'd', 'tool_use': 't'}, None, 'd'), ({'default': 'd', 'tool_use': 't'}, [TOOL], 't'),
    ([{'name': 'tool_use', 'template': 't'}, {'name': 'default', 'template': 'd'}], [TOOL], 't'),
    ({'default': 'd'}, [TOOL], 'd'), ('d', [TOOL], 'd')])
def test_the_template_for_tools_is_taken_when_tools_are_given(made, template, tools, text):
    assert made(template).render_chat([ASK], add_generation_prompt=True, tools=tools) == text


def test_template_files_take_the_place_of_those_in_the_settings(made, tmp_path):
    made({'default': 'settings', 'tool_use': 'settings'})
    (tmp_path / 'chat_template.jinja').write_text('file')
    assert HFTokenizer(tmp_path).render_chat([ASK], add_generation_prompt=True, tools=[TOOL]) == 'file'
    (tmp_path / 'additional_chat_templates').mkdir()
    (tmp_path / 'additional_chat_templates' / 'tool_use.jinja').write_text('more')
    assert HFTokenizer(tmp_path).render_chat([ASK], add_generation_prompt=True, tools=[TOOL]) == 'more'
    os.remove(tmp_path / 'chat_template.jinja')
    message = refusal(HFTokenizer(tmp_path).encode_chat, [ASK])
    assert 'none that is named default' in message


def test_template_files_are_in_the_copies_of_a_folder_and_an_earlier_tokenizers_are_not(made, tmp_path):
    made('settings')
    more = tmp_path / 'additional_chat_templates'
    more.mkdir()
    (more / 'default.jinja').write_text(QWEN)
    (more / 'tool_use.jinja').write_text('more')
    chats = tmp_path / 'chats.jsonl'
    chats.write_text((json.dumps({'messages': TURNS}) + '\n') * 3)
    run = prepare('chat', str(chats), f'--tokenizer={tmp_path}', f'--out_dir={tmp_path / "data"}')
    assert run.returncode == 0, run.stderr
    write_folder(str(tmp_path / 'export'), {}, {}, None, 'float32', str(tmp_path), 2**20)
    copy_tokenizer({'kind': 'folder', 'path': str(tmp_path)}, tmp_path / 'copy')
    for folder in (tmp_path / 'data' / 'tokenizer', tmp_path / 'export', tmp_path / 'copy'):
        texts = [HFTokenizer(folder).render_chat([ASK], add_generation_prompt=True, tools=tools)
                 for tools in (None, [TOOL])]
        assert texts == ['<user>ab</s><assistant>', 'more']
    (more / 'tool_use.jinja').unlink()
    copy_tokenizer({'kind': 'folder', 'path': str(tmp_path)}, tmp_path / 'copy')
    assert os.listdir(tmp_path / 'copy' / 'additional_chat_templates') == ['default.jinja']
    (more / 'tool_use.jinja').symlink_to('/etc/hostname')
    with pytest.raises(UserError, match='leads out of its folder'):
        copy_tokenizer({'kind': 'folder', 'path': str(tmp_path)}, tmp_path / 'copy')
    assert os.listdir(tmp_path / 'copy' / 'additional_chat_templates') == ['default.jinja']


# -----------------------------------------------------------------------------
# what counts

@pytest.mark.parametrize('stop', [('<user>', '<tool>', '</s>'), ('</s>', '<tool>', '<user>')])
def test_a_stop_token_that_begins_the_next_message_counts_and_the_last_answer_gets_one(made, stop):
    tokenizer = made(GLM, stop)
    text, counted = counted_text(tokenizer, [ASK, ANSWER, ASK, ANSWER])
    assert text == '<user>ab<model>cd<user>ab<model>cd<user>'
    assert counted == 'cd<user>|cd<user>'
    calling = [ASK, {'role': 'assistant', 'tool_calls': [CALL]}]
    assert counted_text(tokenizer, calling)[1] == '<call>add</call><tool>'
    result = {'role': 'tool', 'content': '3'}
    assert counted_text(tokenizer, [*calling, result, ANSWER])[1] == '<call>add</call><tool>|cd<user>'
    assert counted_text(made(GLM, ['</s>']), [ASK, ANSWER]) == ('<user>ab<model>cd', 'cd')


@pytest.mark.parametrize('marks', [False, True])
@pytest.mark.parametrize('counted, text', [([1], 'cd</s>'), ([3], 'e</s>'), (None, 'cd</s>|e</s>')])
def test_only_the_answers_count_that_are_named(made, marks, counted, text):
    template = ('{% for m in messages %}<{{ m.role }}>{% if m.role == "assistant" %}{% generation %}{{ m.content }}'
                '</s>{% endgeneration %}{% else %}{{ m.content }}</s>{% endif %}{% endfor %}') if marks else QWEN
    messages = [ASK, ANSWER, ASK, {'role': 'assistant', 'content': 'e'}]
    assert counted_text(made(template), messages, counted=counted)[1] == text


def test_calls_of_tools_count_to_the_end_of_the_turn(made):
    tokenizer = made(QWEN)
    for extra in ({}, {'content': None}, {'content': 'x'}):
        call = {'role': 'assistant', 'tool_calls': [CALL, CALL]} | extra
        text, counted = counted_text(tokenizer, [ASK, call, {'role': 'tool', 'content': 'add'}, ANSWER], tools=[TOOL])
        each = '<call>{"name": "add", "arguments": {"a": 1}}</call>'
        assert counted == f'{extra.get("content") or ""}{each}{each}</s>|cd</s>'
        assert text.startswith('<system>[{"type": "function", "function": {"name": "add"')


def test_variables_reach_the_template_and_parts_of_text_are_joined(made):
    tokenizer = made(QWEN)
    parts = {'role': 'user', 'content': [{'type': 'text', 'text': 'a'}, {'type': 'text', 'text': 'b'}]}
    assert tokenizer.render_chat([parts], add_generation_prompt=False, variables={'think': True}) == 't<user>ab</s>'
    for messages, message in (
            ([{'role': 'user', 'content': [{'type': 'image'}]}], "message 0 has a part of the type 'image'"),
            ([ASK, {'role': 'assistant', 'content': None}], 'message 1 has no "content"'),
            ([ASK, {'role': 'assistant', 'tool_calls': [{'id': 1}]}], 'message 1 has a call of a tool'),
            ([ASK, {'role': 'user', 'content': 3}], 'message 1 has a "content" that is no text')):
        assert message in refusal(tokenizer.encode_chat, messages)
    assert '"tools" must be a list' in refusal(lambda: tokenizer.encode_chat([ASK], tools=[len]))
    assert 'has a place of its own' in refusal(lambda: tokenizer.encode_chat([ASK], variables={'messages': []}))


def test_an_answer_that_the_tokenizer_does_not_keep_is_refused(made):
    tokenizer = made(QWEN, without='|')
    answer = {'role': 'assistant', 'content': 'a|b'}
    message = refusal(tokenizer.encode_training_chat, [ASK, answer])
    assert 'does not keep an answer' in message and "no token for '|'" in message
    asked = {'role': 'user', 'content': 'a|b'}
    assert counted_text(tokenizer, [asked, ANSWER])[1] == 'cd</s>'


# -----------------------------------------------------------------------------
# forms of rows

TURNS = [ASK, ANSWER]


@pytest.mark.parametrize('row', [
    {'messages': TURNS}, {'conversations': TURNS},
    {'conversations': [{'from': 'human', 'value': 'ab'}, {'from': 'gpt', 'value': 'cd'}]},
    {'instruction': 'ab', 'input': '', 'output': 'cd'}, {'instruction': 'ab', 'response': 'cd'},
    {'prompt': 'ab', 'completion': 'cd'}, {'prompt': [ASK], 'completion': [ANSWER]},
    {'question': 'ab', 'answer': 'cd'}])
def test_the_forms_of_conversations_are_one(row):
    example = read_example(row)
    assert [chat.messages for chat in example.chats] == [TURNS] and example.counted == [[1]]
    assert (example.form == '') == ('messages' in row)


def test_the_extras_of_the_forms_are_read():
    row = {'system': 's', 'history': [['h', 'i']], 'instruction': 'a', 'input': 'b', 'output': 'c'}
    example = read_example(row)
    assert [m['content'] for m in example.chats[0].messages] == ['s', 'h', 'i', 'a\nb', 'c']
    assert example.counted == [[4]]
    turns = [{'from': 'human', 'value': 'a'}, {'from': 'function_call', 'value': '{"name": "f", "arguments": {}}'},
             {'from': 'observation', 'value': '3'}, {'from': 'gpt', 'value': 'b', 'weight': 0}]
    example = read_example({'conversations': turns, 'tools': json.dumps([TOOL])})
    assert [m['role'] for m in example.chats[0].messages] == ['user', 'assistant', 'tool', 'assistant']
    assert example.counted == [[1]] and example.chats[0].tools == [TOOL]
    assert 'weight' not in example.chats[0].messages[3]


@pytest.mark.parametrize('row', [
    {'messages': [ASK], 'chosen': 'cd', 'rejected': 'e'}, {'prompt': 'ab', 'chosen': 'cd', 'rejected': 'e'},
    {'prompt': [ASK], 'chosen': [ANSWER], 'rejected': [ANSWER | {'content': 'e'}]},
    {'prompt': 'ab', 'messages': TURNS, 'chosen': TURNS, 'rejected': [ASK, ANSWER | {'content': 'e'}]},
    {'chosen': TURNS, 'rejected': [ASK, ANSWER | {'content': 'e'}]},
    {'conversations': [{'from': 'human', 'value': 'ab'}], 'chosen': {'from': 'gpt', 'value': 'cd'},
     'rejected': {'from': 'gpt', 'value': 'e'}},
    {'messages': TURNS, 'rejected_response': 'e'}, {'query': 'ab', 'response': 'cd', 'rejected_response': 'e'},
    {'messages': TURNS, 'rejected_messages': [ASK, ANSWER | {'content': 'e'}]},
    {'chosen': '\n\nHuman: ab\n\nAssistant: cd', 'rejected': '\n\nHuman: ab\n\nAssistant: e'}])
def test_the_forms_of_pairs_are_one(row):
    example = read_example(row)
    assert [chat.messages for chat in example.chats] == [TURNS, [ASK, ANSWER | {'content': 'e'}]]
    assert example.counted == [[1], [1]]


def test_transcripts_of_several_turns_share_their_question():
    start = '\n\nHuman: a\n\nstill a\n\nAssistant: b\n\nHuman: c'
    example = read_example({'chosen': f'{start}\n\nAssistant: d', 'rejected': f'{start}\n\nAssistant: e'})
    assert [[m['content'] for m in chat.messages] for chat in example.chats] == [
        ['a\n\nstill a', 'b', 'c', 'd'], ['a\n\nstill a', 'b', 'c', 'e']]
    assert example.counted == [[3], [3]] and 'Human:' in example.form
    asked = read_example({'prompt': 'ab', 'chosen': '\n\nHuman: ab\n\nAssistant: cd', 'rejected': 'e'})
    assert asked.chats[0].messages[1]['content'] == '\n\nHuman: ab\n\nAssistant: cd'  # an answer, given the question


@pytest.mark.parametrize('row, message', [
    ({'messages': [ASK], 'rejected_response': 'e'}, 'beside "messages" that do not end with an answer'),
    ({'rejected_response': 'e'}, 'neither "response" nor "messages"'),
    ({'response': 'cd', 'rejected_response': 'e'}, 'no question in front'),
    ({'messages': TURNS, 'rejected_response': ''}, 'no "rejected", or an empty one'),
    ({'chosen': 'Human: a\n\nAssistant: b', 'rejected': 'Human: a\n\nAssistant:'}, 'a transcript in "rejected"'),
    ({'chosen': 'Human: a\n\nAssistant: b', 'rejected': 'c'}, 'no question in front')])
def test_other_forms_of_pairs_are_refused_by_what_they_lack(row, message):
    with pytest.raises(UserError, match=message):
        read_example(row)


@pytest.mark.parametrize('name', ['weight', 'train', 'training', 'train_on_turn', 'loss', 'loss_mask'])
def test_an_answer_without_weight_does_not_count(name):
    for off in (0, False, 0.0):
        assert read_example({'messages': [*TURNS, ASK, ANSWER | {name: off}]}).counted == [[1]]
    assert read_example({'messages': [ASK | {name: 0}, ANSWER | {name: 1}]}).counted == [[1]]
    for message, turns in (('must be 0 or 1', [ASK, ANSWER | {name: 0.5}]), ('can count', [ASK | {name: 1}, ANSWER])):
        with pytest.raises(UserError, match=f'message . has "{name}": .*{message}'):
            read_example({'messages': turns})


def test_a_file_of_any_form_becomes_the_same_data_and_the_script_says_so(made, tmp_path):
    made(QWEN)
    turns = [{'from': 'human', 'value': 'ab'}, {'from': 'gpt', 'value': 'cd'}]
    rows = {'sharegpt.json': [{'conversations': turns}] * 3, 'chats.jsonl': [{'messages': TURNS}] * 3}
    found = []
    for name, content in rows.items():
        text = json.dumps(content) if name.endswith('.json') else '\n'.join(map(json.dumps, content))
        (tmp_path / name).write_text(text)
        out = tmp_path / name.partition('.')[0]
        said = succeeded(prepare('chat', tmp_path / name, f'--tokenizer={tmp_path}', f'--out_dir={out}')).stdout
        assert ('3 rows read as ShareGPT' in said) == (name == 'sharegpt.json')
        found.append([np.fromfile(out / file, np.uint8).tolist() for file in ('train.bin', 'train_mask.bin')])
    assert found[0] == found[1]


def test_rows_without_an_answer_that_counts_are_left_out_and_answers_without_an_end_refused(made, tmp_path):
    made(QWEN)
    lines = [{'messages': TURNS}] * 2 + [{'messages': [ASK, ANSWER | {'weight': 0}]}]
    (tmp_path / 'a.jsonl').write_text('\n'.join(map(json.dumps, lines)))
    said = succeeded(prepare('chat', tmp_path / 'a.jsonl', f'--tokenizer={tmp_path}', f'--out_dir={tmp_path / "a"}'))
    assert '1 rows left out: no answer in them counts' in said.stdout
    edit_json(tmp_path / 'tokenizer_config.json', chat_template=GLM)
    result = prepare('chat', tmp_path / 'a.jsonl', f'--tokenizer={tmp_path}', f'--out_dir={tmp_path / "b"}')
    assert_refused(result, 'no answer ends with a token that ends it')
