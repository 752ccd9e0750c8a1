"""What people have as conversations: their forms, tools, weights, and untrusted templates."""
import datetime
import itertools
import json
import lzma
import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from jax_devices.layout import setup_distributed_training
from jax_flags import UserError
from jax_hub.chats import bytes_of_spans
from jax_hub.tokenizer_files import copy_tokenizer
from jax_hub.tokenizers import GPT2Tokenizer, HFTokenizer
from jax_run.data import load_mixture_meta, same_tokens
from jax_text import TextModel
from jax_transformer import GPTConfig
from tests.common import (
    GOLDEN, RESUME, ROOT, TEXT, assert_refused, edit_json, prepare, random_params, refusal, run_script, sample, slow,
    succeeded, train, write_byte_tokenizer)

sys.path[:0] = [str(ROOT / 'data'), str(ROOT / 'data' / 'chat')]
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
    ids, mask, _ = tokenizer.encode_training_chat(messages, **options)
    tokens = [tokenizer.tokenizer.decode([id], skip_special_tokens=False) for id in ids]
    marked = ''.join(token if counts else '\n' for token, counts in zip(tokens, mask))
    return ''.join(tokens), '|'.join(filter(None, re.split('\n+', marked)))


# -----------------------------------------------------------------------------
# templates

@pytest.mark.parametrize('template, tools, text', [
    ({'default': 'd', 'tool_use': 't'}, None, 'd'), ({'default': 'd', 'tool_use': 't'}, [TOOL], 't'),
    ([{'name': 'tool_use', 'template': 't'}, {'name': 'default', 'template': 'd'}], [TOOL], 't'),
    ({'default': 'd'}, [TOOL], 'd'), ('d', [TOOL], 'd')])
def test_the_template_for_tools_is_taken_when_tools_are_given(made, template, tools, text):
    assert made(template).render_chat([ASK], add_generation_prompt=True, tools=tools) == text


def test_template_files_take_the_place_of_those_in_the_settings_and_are_in_the_copies(made, tmp_path):
    made({'default': 'settings', 'tool_use': 'settings'})
    (tmp_path / 'chat_template.jinja').write_text('file')
    assert HFTokenizer(tmp_path).render_chat([ASK], add_generation_prompt=True, tools=[TOOL]) == 'file'
    more = tmp_path / 'additional_chat_templates'
    more.mkdir()
    (more / 'tool_use.jinja').write_text('more')
    copy_tokenizer({'kind': 'folder', 'path': str(tmp_path)}, tmp_path / 'copy')
    for folder in (tmp_path, tmp_path / 'copy'):
        texts = [HFTokenizer(folder).render_chat([ASK], add_generation_prompt=True, tools=tools)
                 for tools in (None, [TOOL])]
        assert texts == ['file', 'more']
    (more / 'tool_use.jinja').unlink()
    copy_tokenizer({'kind': 'folder', 'path': str(tmp_path)}, tmp_path / 'copy')
    assert HFTokenizer(tmp_path / 'copy').render_chat([ASK], add_generation_prompt=True, tools=[TOOL]) == 'file'
    os.remove(tmp_path / 'chat_template.jinja')
    os.rmdir(more)
    edit_json(tmp_path / 'tokenizer_config.json', chat_template=None)
    assert 'no chat template' in refusal(HFTokenizer(tmp_path).encode_chat, [ASK])


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


def test_calls_that_are_written_otherwise_at_the_end_of_a_chat_are_refused_and_never_cut(made):
    template = ('{% for m in messages %}{% set is_last = loop.last and m.role == "assistant" %}<{{ m.role }}>'
                '{{ m.content or "" }}{% for c in m.tool_calls or [] %}({{ c.function.name }}'
                '{{ c.function.arguments|tojson }}NUMBER){% endfor %}{{ "</s>" if is_last else "" }}{% endfor %}'
                '{{ "<assistant>" if add_generation_prompt else "" }}')
    chat = [ASK, {'role': 'assistant', 'tool_calls': [CALL]}, ASK, ANSWER]
    assert counted_text(made(template.replace('NUMBER', '')), chat)[1] == '(add{"a": 1})|cd</s>'
    numbered = made(template.replace('NUMBER', '{{ "" if is_last else "1" }}'))
    assert 'writes the calls of answer 1 in another way' in refusal(numbered.encode_training_chat, chat)


@pytest.mark.parametrize('condition', ['m.content is defined', 'm.content == ""'])
def test_a_call_without_text_is_written_by_a_template_that_wants_a_certain_content(made, condition):
    strict = made(QWEN.replace('m.tool_calls or []', f'(m.tool_calls if {condition} else [])'))
    whole = counted_text(made(QWEN), [ASK, {'role': 'assistant', 'tool_calls': [CALL]}])[1]
    for content in ({}, {'content': None}, {'content': ''}):
        call = {'role': 'assistant', 'tool_calls': [CALL]} | content
        assert counted_text(strict, [ASK, call])[1] == whole
    fails = made(QWEN.replace('{% for m in messages %}', '{% for m in messages %}{{ m.content.strip()[:0] }}'))
    assert counted_text(fails, [ASK, {'role': 'assistant', 'tool_calls': [CALL]}])[1] == whole


def test_an_answer_ends_with_the_stop_token_of_its_turn_also_behind_other_special_tokens(made):
    template = ('{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == "assistant" %}</call>b<call>'
                '{% endif %}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}')
    assert counted_text(made(template), [ASK, ANSWER, ASK, ANSWER])[1] == 'cd</call>b<call></s>|cd</call>b<call></s>'
    without = made(template, stop=('<user>',), eos='<user>')
    assert counted_text(without, [ASK, ANSWER, ASK, ANSWER])[1] == 'cd</call>|cd</call>'


def test_a_greeting_that_the_template_takes_only_with_a_question_is_left_out_by_its_weight(made):
    asks = made('{% if messages|selectattr("role", "equalto", "user")|list == [] %}{{ raise_exception("no query") }}'
                '{% endif %}' + QWEN)
    chat = [ANSWER, ASK, ANSWER]
    said = refusal(asks.encode_training_chat, chat)
    assert 'refuses: no query (in a conversation that ends with answer 0; with "weight": 0' in said
    assert counted_text(asks, chat, counted=[2])[1] == 'cd</s>'


def test_documents_reach_the_template(made):
    tokenizer = made('{% for d in documents %}<document>{{ d.text }}{% endfor %}' + QWEN)
    variables = {'documents': [{'title': 'a', 'text': 'b'}, {'text': 'c'}]}
    assert '<document>b<document>c' in tokenizer.render_chat([ASK], add_generation_prompt=True, variables=variables)
    encoded = tokenizer.encode_training_chat([ASK, ANSWER], variables=variables)
    assert '<document>b<document>c' in tokenizer.tokenizer.decode(encoded.ids, skip_special_tokens=False)


def test_variables_reach_the_template_and_parts_of_text_are_joined(made):
    tokenizer = made(QWEN)
    parts = {'role': 'user', 'content': [{'type': 'text', 'text': 'a'}, {'type': 'text', 'text': 'b'}]}
    assert tokenizer.render_chat([parts], add_generation_prompt=False, variables={'think': True}) == 't<user>ab</s>'
    for variables in ([1], 3, {'tokenize': True}, {'tools': []}):
        assert 'chat_template_kwargs must be' in refusal(
            lambda: tokenizer.encode_chat([parts], variables=variables))
    assert 'tools must be a list' in refusal(lambda: tokenizer.encode_chat([parts], tools={'a': 1}))
    for messages, message in (
            ([], 'messages must be a list'), ([{'content': 'a'}], 'message 0 is not'),
            ([{'role': 'user', 'content': [{'type': 'image'}]}], 'message 0 has no "content" that is a text'),
            ([ASK, {'role': 'assistant', 'content': None}], 'message 1 has no "content"'),
            ([ASK, {'role': 'assistant', 'tool_calls': [{'id': 1}]}], 'message 1 has a call of a tool'),
            ([ASK, {'role': 'assistant', 'tool_calls': 'ab'}], 'message 1 has a call of a tool'),
            ([ASK, {'role': 'assistant', 'tool_calls': {'a': 1}}], 'message 1 has a call of a tool'),
            ([ASK, {'role': 'assistant', 'tool_calls': [{'function': 'f'}]}], 'message 1 has a call of a tool')):
        assert message in refusal(tokenizer.encode_chat, messages)


# -----------------------------------------------------------------------------
# forms of rows

TURNS = [ASK, ANSWER]
WORSE = {'role': 'assistant', 'content': 'e'}
PLAIN = [{'from': 'human', 'value': 'ab'}, {'from': 'gpt', 'value': 'cd'}]


@pytest.mark.parametrize('row', [
    {'messages': TURNS}, {'messages': json.dumps(TURNS), 'tools': ''}, {'conversations': TURNS},
    {'conversations': PLAIN}, {'instruction': 'ab', 'input': '', 'output': 'cd'},
    {'instruction': 'ab', 'response': 'cd', 'system': None}, {'prompt': 'ab', 'completion': 'cd'},
    {'prompt': [ASK], 'completion': [ANSWER]}, {'question': 'ab', 'answer': 'cd'}])
def test_the_forms_of_conversations_are_one(row):
    example = read_example(row)
    assert example.conversations == [TURNS] and example.counted == [[1]] and example.tools is None
    assert (example.form == '') == ('messages' in row)


def test_the_extras_of_the_forms_are_read():
    example = read_example({'system': 's', 'instruction': 'a', 'input': 'b', 'output': 'c'})
    assert [m['content'] for m in example.conversations[0]] == ['s', 'a\nb', 'c'] and example.counted == [[2]]
    turns = [{'from': 'human', 'value': 'a'}, {'from': 'function_call', 'value': '{"name": "f", "arguments": {}}'},
             {'from': 'observation', 'value': '3'}, {'from': 'gpt', 'value': 'b', 'weight': 0}]
    row = {'conversations': turns, 'tools': json.dumps([TOOL]), 'chat_template_kwargs': {'think': True}}
    example = read_example(row)
    assert [m['role'] for m in example.conversations[0]] == ['user', 'assistant', 'tool', 'assistant']
    assert (example.counted, example.tools, example.variables) == ([[1]], [TOOL], {'think': True})
    assert 'weight' not in example.conversations[0][3]
    turns = [{'from': who, 'value': who} for who in ('system', 'user', 'assistant', 'tool', 'gpt')]
    example = read_example({'conversations': turns})
    assert [m['role'] for m in example.conversations[0]] == ['system', 'user', 'assistant', 'tool', 'assistant']
    # "functions", which are refused elsewhere, beside "tools"
    assert read_example({'messages': TURNS, 'functions': [TOOL['function']], 'tools': [TOOL]}).tools == [TOOL]


@pytest.mark.parametrize('row', [
    {'messages': [ASK], 'chosen': 'cd', 'rejected': 'e'}, {'prompt': 'ab', 'chosen': 'cd', 'rejected': 'e'},
    {'prompt': [ASK], 'chosen': [ANSWER], 'rejected': [WORSE]}, {'chosen': TURNS, 'rejected': [ASK, WORSE]},
    {'prompt': 'ab', 'messages': TURNS, 'chosen': TURNS, 'rejected': [ASK, WORSE]},
    {'conversations': PLAIN[:1], 'chosen': PLAIN[1], 'rejected': {'from': 'gpt', 'value': 'e'}}])
def test_the_forms_of_pairs_are_one(row):
    example = read_example(row)
    assert example.conversations == [TURNS, [ASK, WORSE]] and example.counted == [[1], [1]]


def test_of_two_whole_conversations_the_answers_to_the_same_question_count():
    start = [ASK, ANSWER, ASK]
    example = read_example({'chosen': [*start, ANSWER], 'rejected': [*start, WORSE, ASK, WORSE], 'system': 's'})
    assert [len(messages) for messages in example.conversations] == [5, 7] and example.counted == [[4], [4, 6]]


@pytest.mark.parametrize('row, message', [
    ([1], r'it is no object \(a row of a table has another number of fields'), (1, 'it is no object$'),
    ({'conversations': [{'from': ['human'], 'value': 'a'}]}, 'from one of human, user'),
    ({'instruction': 'a', 'context': ['b', 'c'], 'output': 'd'}, 'has "context", which is no text'),
    ({'instruction': 'a', 'input': {'b': 'c'}, 'output': 'd'}, 'has "input", which is no text'),
    ({'text': 'ab'}, 'has no "messages"; other forms'), ({'messages': [ASK]}, 'nothing to'),
    ({'messages': [{'role': 'user'}, 'cd']}, 'message 1 is not'), ({'messages': '['}, '"messages" is not JSON'),
    ({'conversations': [{'from': 'me', 'value': 'a'}]}, 'from one of human, user'),
    ({'chosen': 'cd', 'rejected': 'e'}, 'no question in front'), ({'prompt': 'a', 'chosen': 'b'}, 'no "rejected"'),
    ({'prompt': 'a', 'chosen': TURNS, 'rejected': 'e'}, 'must both begin with the question')])
def test_what_is_no_conversation_is_refused_by_what_it_lacks(row, message):
    with pytest.raises(UserError, match=message):
        read_example(row)


@pytest.mark.parametrize('name', ['weight', 'train', 'loss'])
def test_an_answer_without_weight_does_not_count(name):
    for off in (0, False, 0.0):
        assert read_example({'messages': [*TURNS, ASK, ANSWER | {name: off}]}).counted == [[1]]
    assert read_example({'messages': [ASK | {name: 0}, ANSWER | {name: 1}]}).counted == [[1]]
    for message, turns in (('must be 0 or 1', [ASK, ANSWER | {name: 0.5}]), ('can count', [ASK | {name: 1}, ANSWER])):
        with pytest.raises(UserError, match=f'message . has "{name}": .*{message}'):
            read_example({'messages': turns})


def test_a_file_of_any_form_becomes_the_same_data_and_the_script_says_so(made, tmp_path):
    pa, pq = pytest.importorskip('pyarrow'), pytest.importorskip('pyarrow.parquet')
    made(QWEN)
    (tmp_path / 'chats.jsonl').write_text((json.dumps({'messages': TURNS}) + '\n') * 3)
    (tmp_path / 'sharegpt.json').write_text(json.dumps([{'conversations': PLAIN}] * 3))
    (tmp_path / 'table.csv').write_text('prompt,completion\n' + 'ab,cd\n' * 3)
    pq.write_table(pa.table({'messages': [TURNS] * 3, 'tools': [None, '', None]}), tmp_path / 'chats.parquet')
    found = []
    for name, said in {'chats.jsonl': '', 'sharegpt.json': '3 rows read as "conversations"', 'chats.parquet': '',
                       'table.csv': '3 rows read as "prompt" and "completion"'}.items():
        out = tmp_path / name.partition('.')[0]
        printed = succeeded(prepare('chat', tmp_path / name, f'--tokenizer={tmp_path}', f'--out_dir={out}')).stdout
        warning, lines = printed.split('\n', 1)
        assert warning.startswith('the tokenizer leaves out characters that it does not know')
        assert lines.startswith(said or 'train has 2 conversations')
        found.append([np.fromfile(out / file, np.uint8).tolist() for file in ('train.bin', 'train_mask.bin')])
    assert found[0] == found[1] == found[2] == found[3]
    pq.write_table(pa.table({'prompt': [b'ab'] * 3, 'completion': ['cd'] * 3}), tmp_path / 'bytes.parquet')
    refused = prepare('chat', tmp_path / 'bytes.parquet', f'--tokenizer={tmp_path}', f'--out_dir={tmp_path / "b"}')
    assert_refused(refused, 'row 1: "prompt" must be a list')


def test_rows_of_other_forms_become_messages_by_the_functions_in_the_readme(tmp_path):
    readme = (ROOT / 'data' / 'chat' / 'readme.md').read_text(encoding='utf-8')
    code = readme.split('## Other forms')[1].split('```python\n')[1].split('```')[0]
    transcript = '\n\nHuman: a\n\nstill a\n\nAssistant: b\n\nHuman: c\n\nAssistant: '
    rows = {  # the form, and what becomes of it: the contents of each conversation, and which of them count
        'from_swift': ({'messages': TURNS, 'rejected_response': 'e', 'tools': [TOOL]},
                       [['ab', 'cd'], ['ab', 'e']], [1]),
        'from_transcripts': ({'chosen': transcript + 'd', 'rejected': transcript + 'e'},
                             [['a\n\nstill a', 'b', 'c', 'd'], ['a\n\nstill a', 'b', 'c', 'e']], [3]),
        'from_history': ({'history': [['h', 'i']], 'instruction': 'a', 'input': 'c', 'output': 'b', 'system': 's'},
                         [['s', 'h', 'i', 'a\nc', 'b']], [2, 4]),
        'from_functions': ({'messages': TURNS, 'functions': [{'name': 'add'}]}, [['ab', 'cd']], [1]),
        'from_weights': ({'messages': [*TURNS, ASK, WORSE | {'trainable': 0}], 'tools': [TOOL]},
                         [['ab', 'cd', 'ab', 'e']], [1])}
    assert len(rows) == code.count('def from_')
    for name, (row, texts, counted) in rows.items():
        (tmp_path / 'convert.py').write_text(code.replace('from_swift(json', f'{name}(json'))
        done = subprocess.run([sys.executable, tmp_path / 'convert.py'], input=json.dumps(row) + '\n',
                              capture_output=True, text=True, check=True)
        example = read_example(json.loads(done.stdout))
        assert [[m['content'] for m in each] for each in example.conversations] == texts
        assert example.counted == [counted] * len(texts)
        assert bool(example.tools) == (name == 'from_functions' or 'tools' in row)


def test_a_message_that_names_a_special_token_is_said(made, tmp_path):
    made(QWEN)
    named = [ASK | {'content': 'what is </s>?'}, ANSWER]
    rows = [{'messages': TURNS}] * 3 + [{'messages': named}, {'messages': [*TURNS, *named]}]
    (tmp_path / 'a.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    said = succeeded(prepare('chat', tmp_path / 'a.jsonl', f'--tokenizer={tmp_path}', f'--out_dir={tmp_path / "a"}'))
    assert 'a message has the name of a special token, which becomes that token: 2 conversations' in said.stdout


def test_rows_without_an_answer_that_counts_are_left_out_and_answers_without_an_end_refused(made, tmp_path):
    made(QWEN)
    lines = [{'messages': TURNS}] * 2 + [{'messages': [ASK, ANSWER | {'weight': 0}]}]
    (tmp_path / 'a.jsonl').write_text('\n'.join(map(json.dumps, lines)))
    said = succeeded(prepare('chat', tmp_path / 'a.jsonl', f'--tokenizer={tmp_path}', f'--out_dir={tmp_path / "a"}'))
    assert '1 rows left out: no answer in them counts, by their "weight" or a "label" of 0' in said.stdout
    edit_json(tmp_path / 'tokenizer_config.json', chat_template=GLM)
    result = prepare('chat', tmp_path / 'a.jsonl', f'--tokenizer={tmp_path}', f'--out_dir={tmp_path / "b"}')
    assert_refused(result, 'no answer ends with a token that ends it')


# -----------------------------------------------------------------------------
# which tokens count, as transformers counts them

CHAT_MASKS = json.loads((ROOT / 'tests' / 'golden' / 'chat_masks.json').read_text(encoding='utf-8'))


@pytest.fixture
def made_tokenizer(tmp_path):
    """A function of (chat template, kind of tokenizer) that makes the HFTokenizer with the golden cases' special
    tokens: 'characters', 'bytes' as GPT-2's, 'newlines', the same with a token for two of them, or 'greedy',
    characters with special tokens that take in the spaces after them, as Phi 3's."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    def make(template, kind='characters'):
        if kind in ('bytes', 'newlines'):
            vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
            merges = [('l', 'o'), ('H', 'e'), ('He', 'l'), ('Hel', 'lo'), ('\u0120', 'Y')]
            merges += [('\u010a', '\u010a')] * (kind == 'newlines')
            vocab |= {a + b: len(vocab) + i for i, (a, b) in enumerate(merges)}
            tokenizer = Tokenizer(models.BPE(vocab, merges))
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
            tokenizer.decoder = decoders.ByteLevel()
        else:
            chars = sorted(set(str(CHAT_MASKS) + ''.join(sum((case['pieces'] for case in CHAT_MASKS['cases']), []))))
            tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(chars)}, []))
            tokenizer.decoder = decoders.Fuse()
        tokenizer.add_special_tokens([AddedToken(token, rstrip=kind == 'greedy') for token in CHAT_MASKS['special']])
        tokenizer.save(str(tmp_path / 'tokenizer.json'))
        settings = {'bos_token': '<s>', 'eos_token': '</s>', 'chat_template': template}
        (tmp_path / 'tokenizer_config.json').write_text(json.dumps(settings))
        return HFTokenizer(tmp_path)
    return make


def counted_pieces(tokenizer, messages, **options):
    """The text in pieces that in turn do not count and count."""
    ids, mask, _ = tokenizer.encode_training_chat(messages, **options)
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1), len(ids)]
    assert mask[0] == 0
    return [tokenizer.tokenizer.decode(ids[a:b], skip_special_tokens=False) for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize('template', CHAT_MASKS['templates'])
def test_every_answer_counts_to_its_end_token_as_transformers_counts(made_tokenizer, template):
    cases = [case for case in CHAT_MASKS['cases'] if case['template'] == template]
    assert len(cases) >= 10
    for kind, templates in (('characters', 'templates'), ('characters', 'marked'), ('bytes', 'templates')):
        tokenizer = made_tokenizer(CHAT_MASKS[templates][template], kind)
        for case in cases:
            assert counted_pieces(tokenizer, case['messages']) == case['pieces']


@pytest.mark.parametrize('template', CHAT_MASKS['tool_templates'])
def test_tools_and_calls_are_written_and_count_as_in_transformers(made_tokenizer, template):
    cases = [case for case in CHAT_MASKS['tool_cases'] if case['template'] == template]
    assert len(cases) == 5
    for templates in ('tool_templates', 'tool_marked'):
        tokenizer = made_tokenizer(CHAT_MASKS[templates][template])
        for case in cases:
            options = {'tools': case['tools'], 'variables': case['variables']}
            prompt = tokenizer.render_chat(case['messages'][:1], add_generation_prompt=True, **options)
            assert prompt == case['prompt']
            assert counted_pieces(tokenizer, case['messages'], **options) == case['pieces']


def test_a_token_counts_if_some_of_it_is_the_answers_unless_it_is_a_special_token_of_the_request(made_tokenizer):
    messages = [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': '\n\nYes'}]
    for kind, pieces in (
            ('newlines', ['<|user|>\nHi<|end|>\n<|assistant|>', '\n\n\nYes<|end|>', '\n<|endoftext|>']),
            ('greedy', ['<|user|>Hi<|end|><|assistant|>', 'Yes<|end|>', '<|endoftext|>'])):  # with their newlines
        for templates in ('templates', 'marked'):
            tokenizer = made_tokenizer(CHAT_MASKS[templates]['phi3'], kind)
            assert counted_pieces(tokenizer, messages) == pieces


def test_the_bytes_of_a_character_of_several_tokens_count_once():
    text = 'a\u00e9\u6f22\U0001f600b'
    spans = [(0, 1), (1, 2), (1, 3), (3, 4), (3, 4), (4, 4), (4, 5)]  # a token may also have the end of a character
    starts, ends = np.array(spans).T
    assert bytes_of_spans(text, starts, ends).tolist() == [1, 2, 3, 4, 0, 0, 1]


@pytest.mark.parametrize('request_end, answer', [
    ('<|Assistant|><think>\n', "'<|Assistant|>' + m.content + '</s>'"),  # DeepSeek-R1's
    ('<|Assistant|>', "'<|Assistant|>' + (m.content + m.content) + '</s>'"),
    ('<|Assistant|>', "'</s>'"), ('<|Assistant|>', "'Answer: ' + m.content + '</s>'")])
def test_a_template_that_writes_answers_elsewhere_than_it_asks_for_them_is_refused(made_tokenizer, request_end, answer):
    template = ('{% for m in messages %}{% if m.role == "user" %}{{ m.content }}{% else %}{{ ANSWER }}{% endif %}'
                '{% endfor %}{% if add_generation_prompt %}REQUEST{% endif %}')
    tokenizer = made_tokenizer(template.replace('ANSWER', answer).replace('REQUEST', request_end))
    said = ('user', 'ab'), ('assistant', 'c'), ('user', 'd'), ('assistant', ' ef ')
    message = refusal(tokenizer.encode_training_chat, [{'role': role, 'content': text} for role, text in said])
    assert 'does not write answer 1 where it asks for it; mark' in message


# -----------------------------------------------------------------------------
# nothing of a row is lost

def texts(example):
    return [message['content'] for message in example.conversations[0]]


def test_a_context_and_a_system_prompt_are_part_of_the_question():
    row = {'instruction': 'a', 'context': 'b', 'response': 'c', 'category': 'qa', 'id': ''}
    example = read_example(row)
    assert texts(example) == ['a\nb', 'c'] and example.unread == {'category'}
    assert texts(read_example({'question': 'a', 'context': 'b', 'answer': 'c'})) == ['a\nb', 'c']
    example = read_example({'system_prompt': 's', 'question': 'a', 'response': 'c', 'id': 7})
    assert texts(example) == ['s', 'a', 'c'] and example.unread == {'id'}
    assert texts(read_example({'messages': TURNS, 'system_prompt': 's'})) == ['s', 'ab', 'cd']
    with_system = [{'role': 'system', 'content': 's'}, *TURNS]
    assert texts(read_example({'messages': with_system, 'system': 's'})) == ['s', 'ab', 'cd']  # the same one


@pytest.mark.parametrize('row, message', [
    ({'history': [['a', 'b']], 'instruction': 'a', 'output': 'b'}, '"history", which is not read; .*readme'),
    ({'messages': TURNS, 'functions': [{'name': 'f'}]}, '"functions", which is not read'),
    ({'messages': TURNS, 'rejected_response': 'e'}, '"rejected_response", which is not read'),
    ({'messages': TURNS, 'context': 'e'}, '"context" beside what is read'),
    ({'instruction': 'i', 'question': 'a', 'answer': 'b'}, '"instruction" beside what is read'),
    ({'messages': [{'role': 'system', 'content': 's'}, *TURNS], 'system': 't'}, 'begin with another one'),
    ({'messages': TURNS, 'system': 's', 'system_prompt': 't'}, 'system and system_prompt with different texts')])
def test_what_belongs_to_a_question_and_is_not_read_is_refused_by_name(row, message):
    with pytest.raises(UserError, match=message):
        read_example(row)


@pytest.mark.parametrize('label, counted', [
    (False, []), ('False', []), (0, []), (0.0, []), (True, [1]), ('true', [1]), (1, [1]), (1.0, [1])])
def test_an_answer_that_is_labelled_bad_does_not_count(label, counted):
    for row in ({'prompt': 'ab', 'completion': 'cd', 'label': label}, {'messages': TURNS, 'label': label}):
        example = read_example(row)
        assert example.counted == [counted] and not example.unread


def test_a_label_of_another_kind_is_named_among_the_columns_that_were_not_read():
    example = read_example({'messages': TURNS, 'label': 'mathematics'})
    assert example.counted == [[1]] and example.unread == {'label'}


@pytest.mark.parametrize('name', ['train_on_turn', 'training'])
def test_other_names_of_a_weight_are_read(name):
    assert read_example({'messages': [*TURNS, ASK, WORSE | {name: False}]}).counted == [[1]]


def test_the_script_says_which_columns_it_did_not_read_and_leaves_out_equal_pairs(made, tmp_path):
    made(QWEN)
    pair = {'prompt': 'ab', 'chosen': 'cd', 'rejected': 'e', 'score': 3}
    rows = [pair, pair | {'rejected': 'cd'}, pair, pair | {'source': 'x'}]
    (tmp_path / 'a.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    lines = succeeded(prepare('chat', tmp_path / 'a.jsonl', f'--tokenizer={tmp_path}',
                              f'--out_dir={tmp_path / "a"}')).stdout.splitlines()
    assert '1 rows left out: "chosen" and "rejected" are the same' in lines
    assert lines[-1] == 'columns of rows that were not read: "score" of 4, "source" of 1'
    assert 'train has 2 pairs' in '\n'.join(lines)
    (tmp_path / 'b.jsonl').write_text((json.dumps(pair | {'rejected': 'cd'}) + '\n') * 3)
    said = prepare('chat', tmp_path / 'b.jsonl', f'--tokenizer={tmp_path}', f'--out_dir={tmp_path / "b"}')
    assert_refused(said, 'has 0 conversations, .*; 3 rows left out: "chosen" and "rejected" are the same')


def test_lines_that_are_arrays_of_messages_are_conversations(made, tmp_path):
    made(QWEN)
    for name, row in (('a', TURNS), ('b', {'messages': TURNS})):
        path = tmp_path / f'{name}.jsonl'
        path.write_text((json.dumps(row) + '\n') * 3)
        succeeded(prepare('chat', path, f'--tokenizer={tmp_path}', f'--out_dir={tmp_path / name}'))
    assert (tmp_path / 'a' / 'train.bin').read_bytes() == (tmp_path / 'b' / 'train.bin').read_bytes()


def test_parts_of_another_type_than_text_are_refused(made):
    parts = [{'type': 'text', 'text': 'It is '}, {'type': 'python', 'text': '1+1'}]
    message = refusal(made(QWEN).encode_chat, [ASK, {'role': 'assistant', 'content': parts}, ASK])
    assert 'message 1 has no "content" that is a text' in message


# -----------------------------------------------------------------------------
# calls of tools as OpenAI's API has them

def called(arguments):
    function = {'name': 'add', 'arguments': arguments}
    return {'role': 'assistant', 'tool_calls': [{'type': 'function', 'function': function}]}


ITERATES = ('{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}'
            '{% for k, v in c.function.arguments.items() %}{{ k + "=" + v|string }}{% endfor %}{% endfor %}'
            '{% endfor %}')
CONCATENATES = ('{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}'
                '{{ "(" + c.function.arguments + ")" }}'
                '{% endfor %}{% endfor %}')


@pytest.mark.parametrize('template, text', [
    (ITERATES, 'aba=1'), (CONCATENATES, 'ab({"a": 1})'), (CONCATENATES.replace('+', '~'), 'ab({"a": 1})'),
    (CONCATENATES.replace('c.function.arguments', 'c.function.arguments|tojson'), 'ab({"a": 1})')])
def test_arguments_as_a_text_of_json_are_written_as_those_that_are_an_object(made, template, text):
    tokenizer = made(template.replace('{{ m.content }}', '{{ m.content or "" }}'))
    for arguments in ('{"a": 1}', {'a': 1}):
        assert tokenizer.render_chat([ASK, called(arguments)], add_generation_prompt=False) == text


def test_arguments_are_written_as_an_object_where_a_tool_returns_them_as_python_writes_them(made):
    calls = ('{% for m in messages %}{{ m.content or "" }}{% for c in m.tool_calls %}{{ c.function.arguments|tojson }}'
             '{% endfor %}{% endfor %}')
    checks = calls.replace('{{ c.', '{% if c.function.arguments is mapping %}{% for k in c.function.arguments %}'
                           '{{ tools[0][k].type }}{% endfor %}{% endif %}{{ c.')
    messages = [ASK, called('{"a": 1}'), {'role': 'tool', 'content': "made {'a': 1}"}]
    assert made(calls).render_chat(messages, add_generation_prompt=False) == """ab{"a": 1}made {'a': 1}"""
    # a template that looks the arguments up among the tool's parameters
    tools = [{'a': {'type': 'x'}}]
    assert made(checks).render_chat(messages[:2], add_generation_prompt=False, tools=tools) == 'abx{"a": 1}'


def test_nulls_of_a_table_are_not_in_tools_and_calls():
    parameters = {'a': {'type': 'x'}, 'b': None}
    tool = {'type': 'function', 'function': {'name': 'add', 'strict': None, 'parameters': parameters}}
    example = read_example({'messages': [ASK, called({'a': 1, 'b': None})], 'tools': [tool]})
    assert example.tools == [{'type': 'function', 'function': {'name': 'add', 'parameters': {'a': {'type': 'x'}}}}]
    assert example.conversations[0][1]['tool_calls'] == called({'a': 1})['tool_calls']
    thinking = read_example({'messages': TURNS, 'chat_template_kwargs': {'enable_thinking': None, 'a': False}})
    assert thinking.variables == {'a': False}


# -----------------------------------------------------------------------------
# masks of templates that write a message elsewhere, or leave it out

# In the manner of Mistral-Nemo's: the system message stands in the last turn of a user, if that is the last message.
NEMO = ('{% if messages[0].role == "system" %}{% set system = messages[0].content %}{% set rest = messages[1:] %}'
        '{% else %}{% set rest = messages %}{% endif %}{{ bos_token }}{% for m in rest %}{% if m.role == "user" %}'
        '{{ "<user>" }}{% if loop.last and system is defined %}{{ system + "|" }}{% endif %}{{ m.content + "<model>" }}'
        '{% else %}{{ m.content + "</s>" }}{% endif %}{% endfor %}')
SYSTEM = {'role': 'system', 'content': 'gh'}


def test_only_answers_count_where_a_system_message_is_written_into_the_last_turn(made):
    tokenizer = made(NEMO)
    text, counted = counted_text(tokenizer, [SYSTEM, *TURNS, ASK, {'role': 'assistant', 'content': 'ef'}])
    assert counted == 'cd</s>|ef</s>'
    assert counted_text(tokenizer, [SYSTEM, *TURNS])[1] == 'cd</s>'


def test_a_message_of_another_in_an_answer_is_an_error_but_the_same_words_are_not(made):
    stray = ('{% for m in messages %}{% if m.role == "user" %}{{ "<user>" + m.content }}'
             '{% elif m.role == "assistant" %}{% generation %}'
             '{{ "<model>" + messages[0].content + m.content + "</s>" }}{% endgeneration %}{% endif %}'
             '{% endfor %}')
    tokenizer = made(stray)
    message = refusal(tokenizer.encode_training_chat, [SYSTEM, *TURNS])
    assert 'writes message 0, of the role "system", into an answer' in message
    # also into one of several answers
    tokenizer = made(stray.replace('messages[0].content', '(messages[0].content if loop.last else "")'))
    assert 'into an answer' in refusal(tokenizer.encode_training_chat, [SYSTEM, *TURNS, *TURNS])
    same = [ASK, {'role': 'assistant', 'content': 'abcd'}]
    assert counted_text(made(QWEN), same)[1] == 'abcd</s>'


def lines_of(tokenizer, rows, tmp_path):
    (tmp_path / 'rows.jsonl').write_text('\n'.join(json.dumps({'messages': row}) for row in rows))
    return succeeded(prepare('chat', tmp_path / 'rows.jsonl', f'--tokenizer={tmp_path}',
                             f'--out_dir={tmp_path / "out"}')).stdout.splitlines()


def test_messages_that_a_template_leaves_out_are_counted_and_said(made, tmp_path):
    lines = lines_of(made(NEMO), [[SYSTEM, *TURNS]] * 2 + [TURNS] * 2, tmp_path)
    assert 'the template leaves out messages of the role "system": 2 conversations' in lines
    thinks = QWEN.replace('m.content', '(m.content or "").split("</think>")[-1]')
    think = {'role': 'assistant', 'content': '<think>ef</think>cd'}
    for answer in (think, ANSWER | {'reasoning_content': 'ef'}):
        found = made(thinks).find_lost([ASK, answer], [], counted=[1])
        assert 'the template leaves out the reasoning of answers' in found
    assert lines_of(made(QWEN), [TURNS] * 2, tmp_path)[-1].startswith('val has')


def test_answers_that_a_template_leaves_out_are_said(made):
    turns = [ASK, {'role': 'assistant', 'content': 'ef', 'tool_calls': [CALL]}]
    no_answers = QWEN.replace('{{ m.content or "" }}', '{% if m.role == "user" %}{{ m.content }}{% endif %}')
    found = made(no_answers).find_lost([ASK, ANSWER, *turns], [], counted=[1])
    assert [f'the template leaves out messages of the role "assistant"{beside}' in found
            for beside in ('', ' beside a call')] == [True, True]
    assert not any('leaves out' in said for said in made(QWEN).find_lost([ASK, ANSWER, *turns], [], counted=[1]))


def test_calls_of_tools_that_a_template_leaves_out_are_refused_and_their_descriptions_said(made):
    turns = [ASK, {'role': 'assistant', 'tool_calls': [CALL]}, {'role': 'tool', 'content': 'ab'}, ANSWER]
    assert not any('leaves out' in said for said in made(QWEN).find_lost(turns, [], counted=[1, 3], tools=[TOOL]))
    no_calls = made('{% for m in messages %}<{{ m.role }}>{% generation %}{{ m.content or "" }}</s>'
                    '{% endgeneration %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}')
    with pytest.raises(UserError, match='the chat template does not write each call of message 1: '):
        no_calls.find_lost(turns, [], counted=[1, 3])
    assert 'the template leaves out the calls of tools' in no_calls.find_lost(turns, [], counted=[3])
    assert 'the template leaves out the descriptions of tools' in no_calls.find_lost(
        TURNS, [], counted=[1], tools=[TOOL])


@pytest.mark.parametrize('template', ['plain', 'chatml'])
def test_our_templates_refuse_calls_of_tools(template, made):
    tokenizer = made((ROOT / 'data' / 'chat' / f'{template}.jinja').read_text())
    assert 'ab' in tokenizer.render_chat([ASK], add_generation_prompt=True)
    for message in ({'role': 'assistant', 'tool_calls': [CALL]},
                    {'role': 'assistant', 'content': 'ab', 'tool_calls': [CALL]}):
        assert 'refuses: it writes no calls of tools' in refusal(tokenizer.encode_training_chat, [ASK, message])


def test_what_is_lost_of_a_long_conversation_is_found_by_few_renderings(made, monkeypatch):
    from jax_hub import chats
    tokenizer = made(QWEN)
    turns = [ASK, ANSWER] * 50
    ids, _, _ = tokenizer.encode_training_chat(turns)
    rendered = []
    render = chats.render
    monkeypatch.setattr(chats, 'render', lambda *args, **options: rendered.append(1) or render(*args, **options))
    assert tokenizer.find_lost(turns, ids, counted=[99]) == [] and len(rendered) == 2


def test_a_generation_prompt_that_is_not_how_training_begins_is_counted_and_said(made):
    tokenizer = made(QWEN)
    ids, _, _ = tokenizer.encode_training_chat(TURNS)
    assert tokenizer.find_lost(TURNS, ids, counted=[1]) == []
    tokenizer = made(QWEN + '{% if add_generation_prompt %}{{ "e" }}{% endif %}')
    said, = tokenizer.find_lost(TURNS, ids, counted=[1])
    assert 'differ from those before it in training' in said


# -----------------------------------------------------------------------------
# the time limit of a template

ENDLESS = '{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}'


def test_a_template_that_does_not_end_is_ended_in_every_thread(made, monkeypatch):
    import concurrent.futures
    monkeypatch.setattr('jax_hub.chats.SECONDS', 0.3)
    tokenizer = made(ENDLESS)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        messages = list(pool.map(lambda _: refusal(tokenizer.encode_chat, [ASK]), range(2)))
    messages.append(refusal(tokenizer.encode_chat, [ASK]))
    assert all('does not end within 0.3 s' in message for message in messages)


def test_neither_waiting_nor_other_threads_count_for_the_limit():
    import threading
    import time

    from jax_hub.chats import time_limit
    stop = threading.Event()

    def work():
        while not stop.is_set():
            sum(range(1000))
    others = [threading.Thread(target=work) for _ in range(2)]
    for thread in others:
        thread.start()
    try:
        with time_limit(0.3):
            time.sleep(0.8)
    finally:
        stop.set()
        for thread in others:
            thread.join()
    with pytest.raises(TimeoutError, match='0.2 s'), time_limit(0.2):
        while True:
            sum(range(1000))


@pytest.mark.skipif(not hasattr(__import__('signal'), 'SIGSTOP'), reason='needs SIGSTOP')
def test_a_process_that_is_stopped_for_longer_goes_on():
    import signal
    import time
    code = ('import time\nfrom jax_hub.chats import time_limit\nwith time_limit(0.5):\n'
            '    print("begins", flush=True)\n    end = time.thread_time() + 0.25\n'
            '    while time.thread_time() < end:\n        sum(range(100))\nprint("ends")')
    process = subprocess.Popen([sys.executable, '-c', code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == 'begins\n'
    process.send_signal(signal.SIGSTOP)
    time.sleep(1)
    process.send_signal(signal.SIGCONT)
    assert process.communicate()[0] == 'ends\n' and process.returncode == 0


# -----------------------------------------------------------------------------
# templates of TRL with the marks of what an assistant writes, and without (tests/golden/make_trl_masks.py)

TRL = json.loads(lzma.decompress((GOLDEN / 'trl_masks.json.xz').read_bytes()))


@pytest.fixture
def on_its_day(monkeypatch):
    """Templates write the date on which the golden values were made."""
    class Day(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls.fromisoformat(TRL['date'])

    monkeypatch.setattr('transformers.utils.chat_template_utils.datetime', Day)


def conversations_of(name, form, tmp_path):
    """Yields (name of the chat, ids and mask of transformers, ids and mask here, None where it is refused)."""
    template = TRL['templates'][name]
    write_byte_tokenizer(tmp_path, template['special'], chat_template=template[form], **template['settings'])
    tokenizer = HFTokenizer(tmp_path)
    for chat, expected in template['rendered'].items():
        mask = np.zeros(len(expected['ids']), int)
        for first, end in expected['spans']:
            mask[first:end] = 1
        fields = TRL['chats'][chat]
        try:
            ids, found, _ = tokenizer.encode_training_chat(fields['messages'], tools=fields.get('tools'))
        except UserError:
            yield chat, expected['ids'], mask, None, None
            continue
        yield chat, expected['ids'], mask, list(ids), found.astype(int)


@pytest.mark.parametrize('name', [slow(name) if i % 4 else name for i, name in enumerate(TRL['templates'])])
def test_ids_and_masks_are_transformers_where_a_template_has_marks(name, tmp_path, on_its_day):
    for chat, expected_ids, expected, ids, mask in conversations_of(name, 'marked', tmp_path):
        assert ids == expected_ids and mask.tolist() == expected.tolist(), chat


# templates that write earlier answers otherwise than their generation prompt asks for them (<think>), or leave answers
# or calls out: refused without marks
REFUSED = {
    **dict.fromkeys(('deepseek_r1_distill', 'deepseekv3', 'idefics3', 'smolvlm'), {*TRL['chats']}),
    **dict.fromkeys(('lfm2', 'llama3', 'phi3', 'phi3_5', 'qwen2_5_vl'), {'a tool'}),
    **{f'nemotron_3_{name}': {*TRL['chats']} - {'reasoning'} for name in ('5_lightning', 'nano', 'super', 'ultra')},
    **dict.fromkeys(('qwen3_5_think', 'qwen3_6'), {'two equal answers', 'two turns'}),
    'qwen3_5_nothink': {'two equal answers', 'two turns', 'reasoning'}}
# TRL's template keeps the <think></think> of earlier answers, that of the model does not
OTHER_TEXT = {('qwen3', chat) for chat in ('two equal answers', 'two turns', 'a tool')}
# what marks let count in addition: what the prompt writes, so that no model has to; white space behind the end, and the
# end that Phi 3 writes behind a conversation once more
IN_ADDITION = {'<|start|>assistant', '<think>', '<think></think>', '<|end|>', ''}
# What the marks leave out, but a model must write: the token at which it stops to get a result, and the header of an
# answer behind one, which the generation prompt does not write.
NOT_MARKED = {('diffusion_gemma', 'a tool'): {'<|tool_response>', '<|turn>model'}}
STOP_TOKENS = {'diffusion_gemma': ['<turn|>', '<|tool_response>'], 'glm4moe': ['<|user|>', '<|observation|>']}


@pytest.mark.slow
@pytest.mark.parametrize('name', [name for name, template in TRL['templates'].items() if template['plain']])
def test_without_marks_the_same_counts_but_for_what_no_model_writes(name, tmp_path, on_its_day):
    special = TRL['templates'][name]['special']
    stop_ids = [256 + special.index(token) for token in STOP_TOKENS.get(name, ())]  # behind those of the bytes
    (tmp_path / 'generation_config.json').write_text(json.dumps({'eos_token_id': stop_ids}))
    refused = set()
    other_text = set()
    for chat, expected_ids, expected, ids, mask in conversations_of(name, 'plain', tmp_path):
        if ids is None:
            refused.add(chat)
            continue
        if ids[:len(expected_ids)] != expected_ids:
            other_text.add((name, chat))
            continue
        tokenizer = HFTokenizer(tmp_path).tokenizer
        found = {1: set(), -1: set()}  # texts that count here alone, and in the marked template alone
        differences = mask[:len(expected)] - expected
        for sign, run in itertools.groupby(zip(differences, expected_ids), key=lambda item: item[0]):
            text = tokenizer.decode([token for _, token in run], skip_special_tokens=False)
            if sign:
                found[sign].add(re.sub(r'\s', '', text))
        assert found[1] == NOT_MARKED.get((name, chat), set()), chat
        assert found[-1] <= IN_ADDITION, chat
    assert refused == REFUSED.get(name, set()) & {*TRL['templates'][name]['rendered']}
    assert other_text == {each for each in OTHER_TEXT if each[0] == name}


@pytest.mark.slow
def test_a_template_with_marks_that_is_given_as_a_file_makes_the_data(tmp_path):
    template = TRL['templates']['qwen3_5_think']
    chats = ['two equal answers', 'two turns']
    write_byte_tokenizer(tmp_path / 'model', template['special'], chat_template=template['plain'],
                         **template['settings'])
    (tmp_path / 'marked.jinja').write_text(template['marked'])
    (tmp_path / 'chats.jsonl').write_text('\n'.join(json.dumps(TRL['chats'][chat]) for chat in chats))
    command = ['chat', tmp_path / 'chats.jsonl', f'--tokenizer={tmp_path / "model"}', f'--out_dir={tmp_path}']
    assert_refused(prepare(*command), 'give that file as --template=FILE')
    succeeded(prepare(*command, f'--template={tmp_path / "marked.jinja"}'))
    for split, chat in zip(('train', 'val'), chats):
        expected = template['rendered'][chat]
        assert np.fromfile(tmp_path / f'{split}.bin', np.uint16).tolist() == expected['ids']
        mask = np.fromfile(tmp_path / f'{split}_mask.bin', np.uint8)
        counted = {i for first, end in expected['spans'] for i in range(first, end)}
        assert set(np.flatnonzero(mask)) == counted


# -----------------------------------------------------------------------------
# a chat with a model of one's own vocabulary

CHATTER = ['--n_layer=1', '--n_head=2', '--n_embd=16', '--block_size=32', '--batch_size=4', '--max_iters=4',
           '--lr_decay_iters=4', '--warmup_iters=1', '--eval_interval=4', '--eval_iters=1', '--device=cpu:0',
           '--gradient_accumulation_steps=1']


@pytest.mark.parametrize('vocabulary, template, end', [
    ('bpe:300', 'plain', '<|endoftext|>'), slow('bpe:300', 'chatml', '<|end|>'), slow('char', 'plain', '\n---')])
def test_a_model_that_was_trained_here_can_be_talked_to(vocabulary, template, end, tmp_path):
    (tmp_path / 'fox.txt').write_text((TEXT + 'User:\nAssistant:\n---?.0123456789') * 60)
    (tmp_path / 'chats.jsonl').write_text('\n'.join(
        json.dumps({'messages': [{'role': 'user', 'content': f'what does number {i} do?'},
                                 {'role': 'assistant', 'content': f'the quick brown fox {i}.'}]}) for i in range(20)))
    data, chats, first, second = (tmp_path / name for name in ('data', 'chats', 'first', 'second'))
    more = ['--chat'] if template == 'chatml' else []
    succeeded(prepare('text', tmp_path / 'fox.txt', f'--tokenizer={vocabulary}', f'--out_dir={data}', *more))
    succeeded(train(first, f'--dataset={data}', *CHATTER))
    assert_refused(sample(first, '--chat=True', '--start=hi'), 'the model has no chat template; .*--template=plain.*')
    succeeded(prepare('chat', tmp_path / 'chats.jsonl', f'--tokenizer={first}', f'--out_dir={chats}',
                      f'--template={template}'))
    started = succeeded(train(second, f'--dataset={chats}', f'--init_from={first}', *CHATTER)).stdout
    assert 'the chat template is that of dataset' in started
    # the answers count, and the token at which sampling stops
    tokenizer = HFTokenizer(second / 'tokenizer')
    ids, mask = np.fromfile(chats / 'train.bin', np.uint16), np.fromfile(chats / 'train_mask.bin', np.uint8)
    counted = tokenizer.tokenizer.decode(ids[mask == 1].tolist(), skip_special_tokens=False)
    assert counted.startswith(f'the quick brown fox 0.{end}the quick brown fox 1.{end}')
    if vocabulary == 'char':
        assert tokenizer.stop_texts == (end,)
    else:  # a line in an answer does not end it
        assert tokenizer.tokenizer.token_to_id(end) in tokenizer.stop_tokens and tokenizer.stop_texts == ()
    # what asks for an answer is how training begins
    asked = tokenizer.encode_chat([{'role': 'user', 'content': 'what does number 0 do?'}])
    assert ids[:len(asked)].tolist() == asked and mask[len(asked)] == 1 and not mask[:len(asked)].any()
    answer = succeeded(sample(second, '--chat=True', '--start=what does number 3 do?', '--num_samples=1',
                              '--max_new_tokens=4'))
    assert answer.stdout.startswith('> what does number 3 do?\n')
    # the run and its export keep the template
    succeeded(run_script('export_jax.py', f'--out_dir={second}', f'--folder={tmp_path / "model"}'))
    assert HFTokenizer(tmp_path / 'model').chat_template == tokenizer.chat_template
    succeeded(train(second, *RESUME, '--max_iters=5'))
    if vocabulary == 'char':
        unknown = json.dumps({'messages': [{'role': 'user', 'content': 'a %'},
                                           {'role': 'assistant', 'content': 'fox'}]})
        (tmp_path / 'unknown.jsonl').write_text('\n'.join([unknown] * 4))
        assert_refused(prepare('chat', tmp_path / 'unknown.jsonl', f'--tokenizer={first}', '--template=plain',
                               f'--out_dir={tmp_path / "none"}'), "has characters that the model does not know: '%'")
        assert_refused(sample(second, '--chat=True', '--start=a %'), "characters that the model does not know: '%'")
        assert_refused(run_script('export_jax.py', f'--out_dir={second}', f'--gguf={tmp_path / "m.gguf"}'),
                       'a GGUF file has no place for texts that end an answer')


def test_an_answer_ends_where_generation_config_says_a_text_ends_it(tmp_path):
    write_byte_tokenizer(tmp_path, chat_template='{% for m in messages %}{{ m.content }}\n{% endfor %}')
    config = GPTConfig(vocab_size=256, block_size=64, n_layer=1, n_head=2, n_embd=16)
    layout = setup_distributed_training(jax.devices()[:1])

    def answer():
        model = TextModel(random_params(config), config, HFTokenizer(tmp_path), layout)
        return model.chat('hi', temperature=1.0, seed=1, max_new_tokens=12)

    whole = answer()
    for stop_strings in ([whole[4:6]], whole[4:6]):
        (tmp_path / 'generation_config.json').write_text(json.dumps({'stop_strings': stop_strings}))
        assert answer() == whole[:whole.index(whole[4:6])] != whole


@pytest.mark.slow
def test_gpt2s_vocabulary_has_a_plain_template(tmp_path):
    try:
        gpt2 = GPT2Tokenizer()
    except UserError:
        pytest.skip("without GPT-2's BPE files")
    rows = [json.dumps({'messages': [{'role': 'user', 'content': f'a {i}'},
                                     {'role': 'assistant', 'content': f'the fox {i}'}]}) for i in range(4)]
    (tmp_path / 'chats.jsonl').write_text('\n'.join(rows))
    succeeded(prepare('chat', tmp_path / 'chats.jsonl', '--tokenizer=gpt2', '--template=plain',
                      f'--out_dir={tmp_path / "chats"}'))
    ids = np.fromfile(tmp_path / 'chats' / 'train.bin', np.uint16).tolist()
    assert gpt2.decode(ids).startswith('User:\na 0\nAssistant:\nthe fox 0<|endoftext|>\n')
    assert same_tokens({'kind': 'gpt2'}, {'kind': 'folder', 'path': str(tmp_path / 'chats' / 'tokenizer')})


def test_a_template_whose_prompt_ends_in_a_space_is_refused(tmp_path):
    (tmp_path / 'fox.txt').write_text(TEXT * 60)
    row = json.dumps({'messages': [{'role': 'user', 'content': 'ab'}, {'role': 'assistant', 'content': 'the fox'}]})
    (tmp_path / 'chats.jsonl').write_text('\n'.join([row] * 4))
    succeeded(prepare('text', tmp_path / 'fox.txt', '--tokenizer=bpe:300', f'--out_dir={tmp_path / "data"}'))
    (tmp_path / 'space.jinja').write_text(
        '{% for m in messages %}{% if m.role == "user" %}Q: {{ m.content }} {% else %}A: {% generation %}{{ m.content '
        '+ eos_token }}{% endgeneration %}{% endif %}{% endfor %}{% if add_generation_prompt %}A: {% endif %}')
    arguments = [tmp_path / 'chats.jsonl', f'--tokenizer={tmp_path / "data" / "tokenizer"}',
                 f'--out_dir={tmp_path / "c"}']
    result = prepare('chat', *arguments, f'--template={tmp_path / "space.jinja"}')
    assert_refused(result, "is 'Q: a A: '; it ends with a space, which becomes a part of the first word in training")
    assert not (tmp_path / 'c').exists()
    assert_refused(prepare('chat', *arguments, '--template=chatml'), 'make the vocabulary with .*/prepare.py --chat')


def test_a_run_keeps_the_template_of_the_chats_it_is_trained_on_in_any_order_and_after_a_resume(tmp_path, capsys):
    (tmp_path / 'fox.txt').write_text((TEXT + 'User:\nAssistant:\n---?.0123456789') * 60)
    (tmp_path / 'chats.jsonl').write_text('\n'.join(
        json.dumps({'messages': [{'role': 'user', 'content': f'what does number {i} do?'},
                                 {'role': 'assistant', 'content': f'the quick brown fox {i}.'}]}) for i in range(20)))
    data, chats, others = (tmp_path / name for name in ('data', 'chats', 'others'))
    succeeded(prepare('text', tmp_path / 'fox.txt', '--tokenizer=char', f'--out_dir={data}'))
    for out in (chats, others):
        succeeded(prepare('chat', tmp_path / 'chats.jsonl', f'--tokenizer={data}', f'--out_dir={out}',
                          '--template=plain'))
    template = (chats / 'tokenizer' / 'chat_template.jinja').read_text()
    (others / 'tokenizer' / 'chat_template.jinja').write_text(template + '{# another #}')

    def kept(out):
        return (out / 'tokenizer' / 'chat_template.jinja').read_text()

    result = succeeded(train(tmp_path / 'mixed', f'--dataset={data}:0.5,{chats}:0.5', *CHATTER))
    assert kept(tmp_path / 'mixed') == template and 'another chat template' not in result.stderr
    result = succeeded(train(tmp_path / 'both', f'--dataset={chats}:0.5,{others}:0.5', *CHATTER))
    assert kept(tmp_path / 'both') == template
    assert 'others has another chat template than the data sets before it, which is kept' in result.stderr
    capsys.readouterr()
    load_mixture_meta(f'{chats}:0.5,{data}:0.5')
    assert capsys.readouterr().err == ''  # a text has none
    succeeded(train(tmp_path / 'first', f'--dataset={data}', *CHATTER))
    assert not (tmp_path / 'first' / 'tokenizer').exists()
    resumed = train(tmp_path / 'first', '--init_from=resume', f'--dataset={chats}', '--max_iters=6', '--device=cpu:0')
    assert 'the chat template is that of dataset' in succeeded(resumed).stdout
    assert kept(tmp_path / 'first') == template
    succeeded(train(tmp_path / 'first', '--init_from=resume', '--max_iters=8', '--device=cpu:0'))
    assert kept(tmp_path / 'first') == template
