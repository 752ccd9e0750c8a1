"""Text becomes ids and back, by characters, by GPT-2's BPE, by any folder's tokenizer; chat templates."""
import itertools
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from jax_flags import UserError, digest
from jax_hub.tokenizer_files import copy_tokenizer, write_char_tokenizer, write_gpt2_tokenizer
from jax_hub.tokenizers import (
    GPT2_PROBE, PROBE, HFTokenizer, describe_tokenizer, load_token_bytes, load_tokenizer, locate_tokenizer,
    strip_partial_utf8, tokens_digest)
from jax_run.data import same_tokens
from jax_run.log import read_metrics
from tests.common import MODEL, ROOT, SHORT, assert_refused, edit_json, prepare, refusal, succeeded, train

ASK = [{'role': 'user', 'content': 'ab'}]

# -----------------------------------------------------------------------------
# characters and GPT-2

@pytest.mark.parametrize('make', [
    lambda folder: load_tokenizer({'kind': 'char', 'chars': '\nabc'}),
    lambda folder: write_char_tokenizer('\nabc', folder) or HFTokenizer(folder)])
def test_characters_the_vocabulary_lacks_are_named(make, tmp_path):
    tokenizer = make(tmp_path)
    assert tokenizer.decode(tokenizer.encode('cab\n')) == 'cab\n'
    assert tokenizer.vocab_size == 4
    with pytest.raises(UserError, match="does not know: 'd' 'x'"):
        tokenizer.encode('axd')


def test_text_that_ends_within_a_character_is_shown_up_to_it():
    import tiktoken
    ranks = {bytes([i]): i for i in range(256)}
    byte_tokens = tiktoken.Encoding('bytes', pat_str='.', mergeable_ranks=ranks, special_tokens={})
    text = 'é 10 € 😀!'
    data = text.encode()
    shown = [strip_partial_utf8(byte_tokens.decode(list(data[:n]))) for n in range(len(data) + 1)]
    assert all(text.startswith(part) for part in shown)
    assert shown[-1] == text
    assert len(set(shown)) == len(text) + 1


def test_gpt2_bpe_without_a_network_says_what_to_do(monkeypatch):
    import tiktoken

    def fail(name):
        raise ConnectionError('no route')
    monkeypatch.setattr(tiktoken, 'get_encoding', fail)
    with pytest.raises(UserError, match='TIKTOKEN_CACHE_DIR'):
        load_tokenizer({'kind': 'gpt2'})


def test_gpt2s_bpe_is_exported_from_the_two_files_that_tiktoken_has(tmp_path, monkeypatch):
    letters = {'h': 0, 'e': 1, 'y': 2, '\u0120': 3, 'he': 4, 'hey': 5, '\u0120he': 6}
    files = {'encoder.json': json.dumps(letters).encode(), 'vocab.bpe': b'#version: 0.2\nh e\nhe y\n\xc4\xa0 he\n'}
    monkeypatch.setattr('tiktoken.load.read_file_cached', lambda url: files[url.rsplit('/')[-1]])
    monkeypatch.setattr('tiktoken.get_encoding', lambda name: type('Stub', (), dict(n_vocab=8, eot_token=7)))
    write_gpt2_tokenizer(tmp_path)
    tokenizer = HFTokenizer(tmp_path)
    assert tokenizer.encode('hey he') == [5, 6] and tokenizer.decode([5, 6, 7]) == 'hey he'
    assert tokenizer.stop_tokens == (7,)


@pytest.mark.parametrize('description', [
    None, [], 'gpt2', {'kind': 'char'}, {'kind': 'char', 'chars': ['a']}, {'kind': 'folder', 'path': 3},
    {'kind': 'words'}])
def test_what_describes_no_tokenizer_is_refused(description):
    assert 'does not describe a tokenizer' in refusal(load_tokenizer, description)


def test_the_bytes_of_tokens_add_up_to_the_text(speaking, tmp_path, monkeypatch):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    tiktoken = pytest.importorskip('tiktoken')
    bytes_only = tiktoken.Encoding('bytes', pat_str=r'\S+|\s+', mergeable_ranks={bytes([i]): i for i in range(256)},
                                   special_tokens={'<|endoftext|>': 256})
    monkeypatch.setattr(tiktoken, 'get_encoding', lambda name: bytes_only)  # GPT-2's needs a network
    text = 'hello, \u00e9 \u20ac \U0001f600 world'
    byte_level = Tokenizer(models.BPE())
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    byte_level.train_from_iterator([text] * 3, trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=['<end>']))
    byte_level.add_tokens([AddedToken('wor')])
    (tmp_path / 'bytes').mkdir()
    byte_level.save(str(tmp_path / 'bytes' / 'tokenizer.json'))
    pieces = {'<s>': 0, '\u2581': 1, 'a': 2, '\u2581b': 3} | {f'<0x{i:02X}>': 4 + i for i in range(256)}
    sentencepiece = Tokenizer(models.BPE(pieces, [], byte_fallback=True))
    parts = [decoders.Replace('\u2581', ' '), decoders.ByteFallback(), decoders.Fuse()]
    sentencepiece.decoder = decoders.Sequence(parts)
    sentencepiece.add_special_tokens(['<s>'])
    (tmp_path / 'pieces').mkdir()
    sentencepiece.save(str(tmp_path / 'pieces' / 'tokenizer.json'))
    for description, content in (({'kind': 'char', 'chars': 'a\u00e9'}, 'a\u00e9a'), ({'kind': 'gpt2'}, text),
                                 ({'kind': 'folder', 'path': str(speaking)}, 'hello, again'),
                                 ({'kind': 'folder', 'path': str(tmp_path / 'bytes')}, text)):
        tokenizer, n_bytes = load_tokenizer(description), load_token_bytes(description, 60000)
        assert sum(n_bytes[id] for id in tokenizer.encode(content)) == len(content.encode())
    assert n_bytes[byte_level.token_to_id('<end>')] == 0
    n_bytes = load_token_bytes({'kind': 'folder', 'path': str(tmp_path / 'pieces')}, 4)
    assert n_bytes[:5].tolist() == [0, 1, 1, 2, 1]

# -----------------------------------------------------------------------------
# folders, as transformers reads them

def test_transformers_is_not_imported_for_what_the_library_tokenizers_reads_by_itself(tmp_path):
    """An own vocabulary is trained with, sampled and evaluated; so are characters and GPT-2's BPE, by other tests."""
    (tmp_path / 'a.txt').write_text('hello again, hello world. ' * 90)
    succeeded(prepare('text', tmp_path / 'a.txt', '--tokenizer=bpe:270', f'--out_dir={tmp_path / "data"}'))
    flags = [*MODEL, *SHORT, '--max_iters=2', '--device=cpu:0']
    commands = [
        ['train_jax.py', f'--dataset={tmp_path / "data"}', f'--out_dir={tmp_path / "out"}', *flags],
        ['sample_jax.py', f'--out_dir={tmp_path / "out"}', '--max_new_tokens=2', '--num_samples=1', '--start=he'],
        ['eval_jax.py', f'--out_dir={tmp_path / "out"}', f'--text={tmp_path / "a.txt"}']]
    code = ('import runpy, sys\nfor sys.argv in eval(sys.argv[1]):\n'
            '    runpy.run_path(sys.argv[0], run_name="__main__")\nassert "transformers" not in sys.modules')
    done = subprocess.run([sys.executable, '-c', code, repr(commands)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_link_out_of_a_folder_is_not_read(speaking):
    (speaking / 'special_tokens_map.json').symlink_to('/etc/passwd')
    message = 'special_tokens_map.json is not read: it leads out of its folder, to /etc/passwd'
    assert message in refusal(HFTokenizer, speaking)


def test_code_of_a_folder_is_not_run_and_nothing_is_asked(speaking, monkeypatch):
    (speaking / 'mine.py').write_text('raise SystemExit("it was run")')
    code = {'AutoTokenizer': [None, 'mine.Mine']}
    edit_json(speaking / 'tokenizer_config.json', tokenizer_class='Mine', auto_map=code)
    edit_json(speaking / 'config.json', model_type='mine', auto_map={'AutoConfig': 'mine.Config'})
    asked = []
    monkeypatch.setattr('builtins.input', asked.append)
    assert 'custom code' in refusal(HFTokenizer, speaking)
    assert asked == []


@pytest.mark.parametrize('name, content', [
    ('tokenizer.json', '{'), ('tokenizer.json', '{"model": null}'), ('tokenizer_config.json', '[]'),
    ('tokenizer_config.json', '{"eos_token": [1]}'), ('config.json', '{"num_labels": 1000000000}')])
def test_a_damaged_folder_is_one_line(name, content, speaking, capfd):
    (speaking / name).write_text(content)
    assert str(speaking) in refusal(HFTokenizer, speaking)
    assert capfd.readouterr().err == ''


def test_a_vocabulary_reaches_up_to_its_largest_id_which_has_a_limit(speaking):
    values = json.loads((speaking / 'tokenizer.json').read_text())
    values['model']['vocab']['D'] = 43
    (speaking / 'tokenizer.json').write_text(json.dumps(values))
    tokenizer = HFTokenizer(speaking)
    assert tokenizer.vocab_size == 44
    assert tokenizer.encode('D')[-1:] == [43]
    values['model']['vocab']['D'] = 2**30
    (speaking / 'tokenizer.json').write_text(json.dumps(values))
    assert 'the id 1,073,741,824' in refusal(HFTokenizer, speaking)


def test_truncation_and_padding_of_a_tokenizer_json_are_ignored(speaking):
    expected = HFTokenizer(speaking).encode('hello, again.')
    padded = Tokenizer.from_file(str(speaking / 'tokenizer.json'))
    padded.enable_truncation(2)
    padded.enable_padding(length=99)
    padded.save(str(speaking / 'tokenizer.json'))
    assert HFTokenizer(speaking).encode('hello, again.') == expected and 2 < len(expected) < 99


def test_half_a_character_of_a_prompt_is_a_replacement_character(speaking):
    tokenizer = HFTokenizer(speaking)
    assert tokenizer.encode('a\ud83db') == tokenizer.encode('a\ufffdb')


@pytest.mark.parametrize('generation, config, ends, start', [
    ({'bos_token_id': 35, 'eos_token_id': [36, 37]}, {'eos_token_id': 1}, (1, 36, 37), 35),
    ({}, {'bos_token_id': 35, 'eos_token_id': 36}, (36,), 35), ({}, {'eos_token_id': [36]}, (36,), 36),
    ({'eos_token_id': -1}, {'eos_token_id': 2**40}, (), None)])
def test_ends_that_have_only_an_id_are_taken_from_the_model(speaking, generation, config, ends, start):
    (speaking / 'tokenizer_config.json').unlink()
    (speaking / 'generation_config.json').write_text(json.dumps(generation))
    (speaking / 'config.json').write_text(json.dumps({'model_type': 'llama'} | config))
    tokenizer = HFTokenizer(speaking)
    assert (tokenizer.stop_tokens, tokenizer.start_token) == (ends, start)
    assert tokenizer.end_token == (generation.get('eos_token_id') or ends or [None])[0] if ends else (
        tokenizer.end_token is None)
    # a run's copy has them, too
    copy_tokenizer({'kind': 'folder', 'path': str(speaking)}, speaking / 'copy')
    assert HFTokenizer(speaking / 'copy', is_copy=True).stop_tokens == ends


@pytest.mark.parametrize('declared', [{'eos_token': '<user>'}, {'added_tokens_decoder': {'38': {
    'content': '<user>', 'special': True}}}, None])
def test_an_end_token_is_special_whatever_tokenizer_json_says(speaking, declared):
    values = json.loads((speaking / 'tokenizer.json').read_text())
    for token in values['added_tokens']:
        token['special'] = token['content'] != '<user>'
    id = values['added_tokens'][2]['id']
    (speaking / 'tokenizer.json').write_text(json.dumps(values))
    assert HFTokenizer(speaking).decode([0, id]) == 'a<user>'
    if declared is None:
        edit_json(speaking / 'generation_config.json', eos_token_id=[id])
    else:
        edit_json(speaking / 'tokenizer_config.json', **declared)
    tokenizer = HFTokenizer(speaking)
    assert tokenizer.decode([0, id]) == 'a' and id in tokenizer.special_ids
    assert tokenizer.token_bytes()[id] == 0


def test_what_a_tokenizer_puts_behind_a_text_is_left_out(speaking):
    from tokenizers import Tokenizer, processors
    raw = Tokenizer.from_file(str(speaking / 'tokenizer.json'))
    begin, end = ((name, raw.token_to_id(name)) for name in ('<s>', '</s>'))
    bare = raw.encode('hello', add_special_tokens=False).ids
    around = processors.TemplateProcessing('<s> $0 </s>', special_tokens=[begin, end])
    for processor, before in (
            (around, [begin[1]]), (processors.TemplateProcessing('$0 </s> </s>', special_tokens=[end]), []),
            (processors.Sequence([processors.ByteLevel(), around]), [begin[1]]),
            (processors.RobertaProcessing(end, begin), [begin[1]]),
            (processors.BertProcessing(end, begin), [begin[1]])):
        raw.post_processor = processor
        raw.save(str(speaking / 'tokenizer.json'))
        tokenizer = HFTokenizer(speaking)
        assert tokenizer.encode('hello') == before + bare and tokenizer.encode('') == before
        assert tokenizer.encode('hello</s>') == [*before, *bare, end[1]]  # what the text says stays
        assert tokenizer.encode('hello', begin=False) == bare


def test_a_vocabulary_as_large_as_gpt2s_is_not_gpt2s_if_another_tokenizer_is_there(tmp_path):
    assert describe_tokenizer(str(tmp_path), 50257) == {'kind': 'gpt2'}
    assert describe_tokenizer(str(tmp_path), 400) is None
    (tmp_path / 'tokenizer.model').write_text('')
    assert describe_tokenizer(str(tmp_path), 50257)['kind'] == 'folder'


@pytest.mark.parametrize('name', ['LlamaTokenizer', 'Qwen2Tokenizer', 'GPT2TokenizerFast'])
def test_the_copy_of_a_tokenizer_has_the_ids_that_its_class_gives(name, speaking, tmp_path):
    """The class may split text by its own code, regardless of tokenizer.json."""
    edit_json(speaking / 'tokenizer_config.json', tokenizer_class=name)
    (speaking / 'added_tokens.json').write_text('{"<more>": 50}')
    tokenizer = HFTokenizer(speaking)
    copy_tokenizer({'kind': 'folder', 'path': str(speaking)}, tmp_path / 'copy')
    copied = HFTokenizer(tmp_path / 'copy')
    for text in ('hello, again.', ' a  b<more>c', 'ab</s>'):
        assert copied.encode(text) == tokenizer.encode(text)
        assert copied.decode(copied.encode(text)) == tokenizer.decode(tokenizer.encode(text))
    assert (copied.ids, copied.stop_tokens, copied.start_token, copied.special_ids, copied.chat_template) == (
        tokenizer.ids, tokenizer.stop_tokens, tokenizer.start_token, tokenizer.special_ids, tokenizer.chat_template)
    saved = json.loads((tmp_path / 'copy' / 'tokenizer_config.json').read_text())
    assert saved['tokenizer_class'] == 'PreTrainedTokenizerFast'  # which older versions of transformers know


def test_an_old_vocabulary_of_sentencepiece_is_read_where_that_is_installed(tmp_path):
    spm = pytest.importorskip('sentencepiece')
    (tmp_path / 'a.txt').write_text('hello again\nhello world\n' * 50)
    spm.SentencePieceTrainer.train(input=str(tmp_path / 'a.txt'), model_prefix=str(tmp_path / 'tokenizer'),
                                   vocab_size=40, model_type='bpe', minloglevel=9)
    (tmp_path / 'config.json').write_text('{"model_type": "llama"}')
    tokenizer = HFTokenizer(describe_tokenizer(str(tmp_path), 40)['path'])
    assert tokenizer.decode(tokenizer.encode('hello world')) == 'hello world'


@pytest.mark.parametrize('value, expected', [(-1, {'top_k': 0}), (0, {'top_k': 0}), (None, {}), ('x', {}), (True, {})])
def test_a_top_k_that_is_off_may_be_written_in_many_ways(speaking, value, expected):
    edit_json(speaking / 'generation_config.json', top_k=value)
    assert HFTokenizer(speaking).sampling == expected


# -----------------------------------------------------------------------------
# chat templates

@pytest.mark.parametrize('template, text', [
    ([{'name': 'tool', 'template': 'x'}, {'name': 'default', 'template': '{{ messages[0].content }}'}], 'ab'),
    ('{% generation %}{{ messages[0].content }}{% endgeneration %}c', 'abc'),
    ('{{ documents[0].text if documents else "a" }}', 'a'),
    ('{{ "a" if messages[0].content|tojson(ensure_ascii=False, indent=1)|length == 4 }}', 'a')])
def test_chat_templates_may_be_a_list_mark_what_is_generated_and_write_json(speaking, template, text):
    edit_json(speaking / 'tokenizer_config.json', chat_template=template)
    tokenizer = HFTokenizer(speaking)
    assert tokenizer.decode(tokenizer.encode_chat(ASK)) == text
    documents = {'documents': [{'title': 'b', 'text': 'c'}]}
    assert 'documents' not in str(template) or tokenizer.render_chat(
        ASK, add_generation_prompt=True, variables=documents) == 'c'


@pytest.mark.parametrize('template, said', [
    ('{{ messages[0].content + 1 }}', 'fails: TypeError'), ('{% for %}', 'fails: TemplateSyntaxError'),
    ('{{ raise_exception("not so") }}', 'refuses: not so'), ('{{ messages.nothing.at_all }}', 'fails: UndefinedError'),
    ('{{ "".__class__.__mro__ }}', 'fails: SecurityError'),
    ('{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}', 'does not end within 5 s')])
def test_a_chat_template_that_fails_says_so_in_one_line(speaking, template, said):
    edit_json(speaking / 'tokenizer_config.json', chat_template=template)
    message = refusal(HFTokenizer(speaking).encode_chat, ASK)
    assert message.startswith("the model's chat template ") and said in message and len(message) < 400


CONVERSATION = {'messages': [{'role': 'user', 'content': 'ab'}, {'role': 'assistant', 'content': 'c'},
                             {'role': 'user', 'content': 'd'}, {'role': 'assistant', 'content': ' ef '}]}


@pytest.mark.slow
def test_only_the_assistants_tokens_count(chatting, tmp_path):
    (tmp_path / 'chats.jsonl').write_text((json.dumps(CONVERSATION) + '\n') * 10)
    data = tmp_path / 'data'
    succeeded(prepare('chat', tmp_path / 'chats.jsonl', f'--tokenizer={chatting}', f'--out_dir={data}'))
    assert np.fromfile(data / 'val.bin', np.uint16).tolist() == [38, 0, 1, 39, 2, 37, 38, 3, 39, 4, 5, 37]
    assert np.fromfile(data / 'val_mask.bin', np.uint8).tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1]
    flags = [f'--init_from={chatting}', f'--dataset={data}', *SHORT, '--block_size=8', '--dropout=0.0',
             '--decay_lr=False', '--max_iters=30']
    succeeded(train(tmp_path / 'out', *flags))
    losses = [record['val_loss'] for record in read_metrics(tmp_path / 'out') if 'val_loss' in record]
    assert losses[-1] < 0.3 < losses[0]  # what the user says, at random for the model, would stay above it
    (data / 'val_mask.bin').write_bytes(b'1')
    assert_refused(train(tmp_path / 'other', *flags), 'the masks of .* are missing or of other tokens')


@pytest.mark.parametrize('line, message', [
    ('{', 'line 2:? is not JSON'), ('null', 'line 2: has no "messages"'), ('[]', 'line 2: has no "messages"'),
    ('{"messages": [{"content": "a"}]}', 'line 2: message 0 is not'),
    ('{"messages": [{"role": "user", "content": "a"}]}', 'line 2: has no message with the role "assistant"')])
def test_a_conversation_that_cannot_be_used_is_named(chatting, line, message, tmp_path):
    (tmp_path / 'chats.jsonl').write_text(json.dumps(CONVERSATION) + '\n' + line + '\n')
    result = prepare('chat', tmp_path / 'chats.jsonl', f'--tokenizer={chatting}', f'--out_dir={tmp_path / "data"}')
    assert_refused(result, message)
    assert not (tmp_path / 'data').exists()


def test_a_conversation_with_half_a_character_is_read(chatting, tmp_path):
    half = {'messages': [{'role': 'user', 'content': '\ud800'}, *CONVERSATION['messages'][1:]]}
    (tmp_path / 'chats.jsonl').write_text((json.dumps(half) + '\n') * 2)
    succeeded(prepare('chat', tmp_path / 'chats.jsonl', f'--tokenizer={chatting}', f'--out_dir={tmp_path / "data"}'))


# -----------------------------------------------------------------------------
# tokenizer.json against transformers' classes

SENTENCE = 'def add(x, y):\n    return x + y  # 12 + 345\n'


def save_spaced(folder, spaced=True):
    """A tokenizer.json in the manner of SentencePiece, with a mark for each space, or in that of GPT-2, of bytes."""
    from tokenizers import decoders, models, pre_tokenizers, trainers
    tokenizer = Tokenizer(models.BPE())
    if spaced:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme='never', split=False)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme='never', split=False)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    alphabet = [] if spaced else pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([SENTENCE] * 3, trainers.BpeTrainer(
        vocab_size=330, special_tokens=['<s>', '</s>'], show_progress=False, initial_alphabet=alphabet))
    tokenizer.save(str(folder / 'tokenizer.json'))
    return tokenizer


@pytest.mark.parametrize('spaced', [True, False])
@pytest.mark.parametrize('model_type', ['qwen2', 'llama', 'gemma2'])
@pytest.mark.parametrize('name', [None, 'PreTrainedTokenizerFast', 'Qwen2Tokenizer', 'GPT2Tokenizer', 'LlamaTokenizer'])
def test_ids_and_texts_are_those_of_tokenizer_json_whatever_the_class(tmp_path, capfd, name, model_type, spaced):
    filed = save_spaced(tmp_path, spaced)
    settings = {'eos_token': '</s>'} | ({'tokenizer_class': name} if name else {})
    (tmp_path / 'tokenizer_config.json').write_text(json.dumps(settings))
    (tmp_path / 'config.json').write_text(json.dumps({'model_type': model_type}))
    tokenizer = HFTokenizer(tmp_path)
    ids = filed.encode(SENTENCE).ids
    assert tokenizer.encode(SENTENCE, begin=False) == ids and tokenizer.decode(ids) == SENTENCE
    assert tokenizer.vocab_size >= filed.get_vocab_size()
    assert capfd.readouterr().err == ''


@pytest.mark.parametrize('named', [
    {'extra_special_tokens': ['<one>', '<two>']}, {'additional_special_tokens': ['<one>', '<two>']},
    {'pad_token': '<one>', 'image_token': '<two>'}])
@pytest.mark.parametrize('template', [{}, {'chat_template': 'x'}])
def test_tokens_that_only_the_settings_name_are_tokens_as_in_transformers(tmp_path, named, template):
    from transformers import AutoTokenizer
    save_spaced(tmp_path)
    settings = {'tokenizer_class': 'PreTrainedTokenizerFast', 'eos_token': '</s>'} | named | template
    (tmp_path / 'tokenizer_config.json').write_text(json.dumps(settings))
    expected = AutoTokenizer.from_pretrained(tmp_path)('x<one>y<two>').input_ids
    tokenizer = HFTokenizer(tmp_path)
    assert tokenizer.encode('x<one>y<two>') == expected and len(expected) == 4
    assert tokenizer.decode(expected) == 'xy'


@pytest.mark.parametrize('add_bos', [True, False, None])
@pytest.mark.parametrize('add_eos', [True, False, None])
def test_the_flags_of_begin_and_end_do_what_they_do_in_transformers(speaking, add_bos, add_eos):
    from transformers import AutoTokenizer
    flags = {name: value for name, value in (('add_bos_token', add_bos), ('add_eos_token', add_eos))
             if value is not None}
    edit_json(speaking / 'tokenizer_config.json', tokenizer_class='LlamaTokenizer', **flags)
    tokenizer = HFTokenizer(speaking)
    expected = AutoTokenizer.from_pretrained(speaking)('</s>').input_ids  # a text that no split changes
    assert tokenizer.tokenizer.encode('</s>').ids == expected


CLASSES = ['PreTrainedTokenizerFast', 'LlamaTokenizer', 'GPT2Tokenizer', 'Qwen2Tokenizer', 'GemmaTokenizer',
           'CodeLlamaTokenizer', 'CohereTokenizer']
AROUND = {'none': '', 'begin': '<s> $A', 'both': '<s> $A </s>'}


@pytest.mark.slow
@pytest.mark.parametrize('around', AROUND)
@pytest.mark.parametrize('name', CLASSES)
def test_flags_of_begin_and_end_of_every_class_do_what_they_do_in_transformers(tmp_path, name, around):
    """189 combinations with what tokenizer.json itself puts around a text, and the flags of its settings."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer
    filed = save_spaced(tmp_path, name in ('LlamaTokenizer', 'GemmaTokenizer', 'CodeLlamaTokenizer'))
    if AROUND[around]:
        filed.post_processor = TemplateProcessing(single=AROUND[around], special_tokens=[('<s>', 0), ('</s>', 1)])
        filed.save(str(tmp_path / 'tokenizer.json'))
    for add_bos, add_eos in itertools.product([None, True, False], repeat=2):
        flags = {key: value for key, value in (('add_bos_token', add_bos), ('add_eos_token', add_eos))
                 if value is not None}
        (tmp_path / 'tokenizer_config.json').write_text(json.dumps({
            'tokenizer_class': name, 'bos_token': '<s>', 'eos_token': '</s>', 'unk_token': '<s>', **flags}))
        expected = AutoTokenizer.from_pretrained(tmp_path)('</s>').input_ids  # a text that no split changes
        tokenizer = HFTokenizer(tmp_path)
        assert tokenizer.tokenizer.encode('</s>').ids == expected, flags
        # the suffix is left out, because a text goes on
        assert tokenizer.encode('</s>') == expected[:len(expected) - tokenizer.n_behind], flags


@pytest.mark.slow
@pytest.mark.parametrize('name', CLASSES)
@pytest.mark.parametrize('added', [
    {'added_tokens.json': {'<one>': 330, '<two>': 331}}, {'extra_special_tokens': ['<one>', '<two>']},
    {'additional_special_tokens': ['<one>', '<two>']}, {'pad_token': '<one>', 'mask_token': '<two>'},
    {'added_tokens_decoder': {str(330 + i): {
        'content': content, 'lstrip': False, 'rstrip': False, 'normalized': False, 'single_word': False,
        'special': True} for i, content in enumerate(['<one>', '<two>'])}}], ids=lambda added: next(iter(added)))
def test_tokens_that_are_added_beside_tokenizer_json_have_transformers_ids(tmp_path, name, added):
    from transformers import AutoTokenizer
    save_spaced(tmp_path, False)
    settings = {'tokenizer_class': name, 'bos_token': '<s>', 'eos_token': '</s>', 'unk_token': '<s>'}
    if 'added_tokens.json' in added:
        (tmp_path / 'added_tokens.json').write_text(json.dumps(added['added_tokens.json']))
    else:
        settings |= added
    (tmp_path / 'tokenizer_config.json').write_text(json.dumps(settings))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer = HFTokenizer(tmp_path)
    for token in ('<one>', '<two>', '</s>'):
        assert tokenizer.ids.get(token) == theirs.get_vocab().get(token)
        assert tokenizer.tokenizer.encode(token).ids == theirs(token).input_ids


def mistral_folder(folder, split, n_fillers=None, first='filler', **config):
    """A folder of Mistral with a tokenizer of as many tokens as theirs, without merges of its words."""
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from jax_hub.tokenizers import MISTRAL_SIZE
    words = ['Na', 'OH', 'NaOH', '20', '202', '2026']
    vocab = {token: i for i, token in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), *words])}
    n_fillers = MISTRAL_SIZE if n_fillers is None else n_fillers
    vocab |= {first: len(vocab)} | {f'filler{i}': len(vocab) + i for i in range(1, n_fillers)}
    merges = [('N', 'a'), ('O', 'H'), ('Na', 'OH'), ('2', '0'), ('20', '2'), ('202', '6')]
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(split), 'isolated'),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    folder.mkdir()
    tokenizer.save(str(folder / 'tokenizer.json'))
    (folder / 'tokenizer_config.json').write_text('{"tokenizer_class": "LlamaTokenizerFast"}')
    config = {'model_type': 'mistral', 'transformers_version': '4.49.0'} | config
    (folder / 'config.json').write_text(json.dumps(config))
    return folder


def tokens_of(folder, **options):
    tokenizer = HFTokenizer(folder, **options)
    return [tokenizer.tokenizer.id_to_token(id) for id in tokenizer.encode('NaOH2026')]


def test_mistrals_wrong_split_is_mended_and_said_but_a_run_keeps_its_own(tmp_path, capfd):
    from jax_hub.tokenizers import MISTRAL_SPLIT, LLAMA3_SPLIT
    wrong = mistral_folder(tmp_path / 'wrong', LLAMA3_SPLIT)
    assert tokens_of(wrong) == ['Na', 'OH', '2', '0', '2', '6']
    said, = capfd.readouterr().err.splitlines()
    assert str(wrong) in said and 'the right split is used' in said
    copy_tokenizer({'kind': 'folder', 'path': str(wrong)}, tmp_path / 'copy')
    capfd.readouterr()
    assert tokens_of(tmp_path / 'copy') == ['Na', 'OH', '2', '0', '2', '6']

    # A run that was trained with the wrong one keeps it; so do others' folders in which it is right.
    as_it_is = ['NaOH', '202', '6']
    assert tokens_of(wrong, is_copy=True) == as_it_is
    for name, config in (('new', {'transformers_version': '5.1.0'}), ('llama', {'model_type': 'llama'}),
                         ('llama 3', {'first': '<|begin_of_text|>'}), ('small', {'n_fillers': 1})):
        assert tokens_of(mistral_folder(tmp_path / name, LLAMA3_SPLIT, **config)) == as_it_is
    edit_json(wrong / 'tokenizer_config.json', fix_mistral_regex=False)
    assert tokens_of(wrong) == as_it_is
    assert tokens_of(mistral_folder(tmp_path / 'right', MISTRAL_SPLIT)) == ['Na', 'OH', '2', '0', '2', '6']
    assert capfd.readouterr().err == ''


def test_an_export_of_a_run_keeps_the_ids_of_the_copy_in_the_run(tmp_path, capfd):
    """An older copy, in which nothing says that it is one, of a tokenizer with Mistral's wrong split."""
    from jax_hub.tokenizers import LLAMA3_SPLIT
    from jax_pretrained import save_pretrained
    from jax_transformer import GPTConfig
    from tests.common import random_params
    out = tmp_path / 'out'
    out.mkdir()
    copy = mistral_folder(out / 'tokenizer', LLAMA3_SPLIT)
    edit_json(copy / 'tokenizer_config.json', tokenizer_class='PreTrainedTokenizerFast')
    description = locate_tokenizer({'kind': 'folder', 'path': 'tokenizer'}, out)
    in_run = load_tokenizer(description)
    ids = in_run.encode('NaOH2026')
    assert [in_run.tokenizer.id_to_token(id) for id in ids] == ['NaOH', '202', '6']
    config = GPTConfig(vocab_size=in_run.vocab_size, block_size=8, n_layer=1, n_head=2, n_embd=4)
    save_pretrained(random_params(config), config, tmp_path / 'exported', tokenizer=description)
    shutil.copyfile(copy / 'config.json', tmp_path / 'exported' / 'config.json')  # as of a Mistral that was trained on
    assert HFTokenizer(tmp_path / 'exported').encode('NaOH2026') == ids
    assert 'the right split is used' not in capfd.readouterr().err


def test_what_transformers_warns_of_is_shown_in_one_line(speaking, monkeypatch, capfd):
    from transformers import AutoTokenizer, logging

    def warn(*args, **options):
        logging.get_logger('transformers.x').warning('odd\nthings')
        return original(*args, **options)
    original = AutoTokenizer.from_pretrained
    edit_json(speaking / 'tokenizer_config.json', chat_template='x')
    monkeypatch.setattr(AutoTokenizer, 'from_pretrained', warn)
    for _ in range(2):
        HFTokenizer(speaking)
    assert capfd.readouterr().err == f'transformers on {speaking}: odd things\n'


def test_a_copy_keeps_the_settings_that_change_no_ids(speaking, tmp_path):
    kept = {'padding_side': 'left', 'truncation_side': 'left', 'model_max_length': 77}
    edit_json(speaking / 'tokenizer_config.json', tokenizer_class='LlamaTokenizer', **kept)
    copy_tokenizer({'kind': 'folder', 'path': str(speaking)}, tmp_path / 'a')
    copy_tokenizer({'kind': 'folder', 'path': str(tmp_path / 'a')}, tmp_path / 'b')
    for name in 'ab':
        saved = json.loads((tmp_path / name / 'tokenizer_config.json').read_text())
        assert saved | kept == saved


def test_a_copy_is_read_as_it_lies_there_though_its_config_names_a_class_with_another_split(tmp_path):
    """As a run of an older version that trains a qwen2 further: its tokenizer.json is Qwen's, whatever the source's."""
    filed = save_spaced(tmp_path)
    settings = {'tokenizer_class': 'PreTrainedTokenizerFast', 'eos_token': '</s>', 'extra_special_tokens': ['<one>'],
                'chat_template': 'x'}
    (tmp_path / 'tokenizer_config.json').write_text(json.dumps(settings))
    (tmp_path / 'config.json').write_text('{"model_type": "qwen2"}')
    tokenizer = load_tokenizer(locate_tokenizer({'kind': 'folder', 'path': 'tokenizer'}, tmp_path)
                               | {'path': str(tmp_path)})
    assert tokenizer.ids == filed.get_vocab()
    assert tokenizer.encode(SENTENCE + '<one>') == filed.encode(SENTENCE + '<one>').ids
    edit_json(tmp_path / 'tokenizer_config.json', backend='tokenizers')  # as transformers 5 writes
    assert HFTokenizer(tmp_path).ids == filed.get_vocab()


def test_tokenizers_with_the_same_vocabulary_and_other_splits_are_not_the_same(tmp_path):
    from tokenizers import pre_tokenizers
    described = []
    for name in 'abcd':
        (tmp_path / name).mkdir()
        tokenizer = save_spaced(tmp_path / name, spaced=False)
        if name == 'd':  # a special token takes the space before it
            tokenizer.add_special_tokens([AddedToken('</s>', lstrip=True)])
            tokenizer.save(str(tmp_path / name / 'tokenizer.json'))
        if name == 'c':
            digits = pre_tokenizers.Digits(individual_digits=True)
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, tokenizer.pre_tokenizer])
            tokenizer.save(str(tmp_path / name / 'tokenizer.json'))
        described.append({'kind': 'folder', 'path': str(tmp_path / name)})
    a, b, c, d = described
    assert same_tokens(a, b) and not same_tokens(a, c) and not same_tokens(a, d)
    known = a | {'digest': tokens_digest(HFTokenizer(tmp_path / 'a').tokenizer)}
    assert same_tokens(known, b) and not same_tokens(known, c)
    split = HFTokenizer(tmp_path / 'a').tokenizer
    split.encode_special_tokens = True  # a setting, which stays
    assert tokens_digest(split) == known['digest'] and split.encode_special_tokens
    assert not same_tokens(a | {'digest': 'of other ids'}, b)  # the data are older than the tokenizer beside them


def test_gpt2s_ids_of_the_probe_are_tiktokens():
    import tiktoken
    try:
        gpt2 = tiktoken.get_encoding('gpt2')
    except Exception:
        pytest.skip('needs the files of GPT-2\'s BPE')
    assert digest(gpt2.encode_ordinary(PROBE)) == GPT2_PROBE


def test_a_folder_of_a_tokenizer_that_has_gone_is_named(tmp_path):
    message = refusal(load_tokenizer, {'kind': 'folder', 'path': str(tmp_path / 'tokenizer')})
    assert f'cannot read the tokenizer in {tmp_path / "tokenizer"}: the folder is missing' in message


def test_a_model_learns_from_data_that_do_not_use_the_tokens_that_it_lacks(speaking, tmp_path):
    """As Gemma 3's text models, whose tokenizer has a token for images."""
    tokenizer = Tokenizer.from_file(str(speaking / 'tokenizer.json'))
    n = json.loads((speaking / 'config.json').read_text())['vocab_size']
    tokenizer.add_special_tokens([AddedToken(f'<{i}>') for i in range(tokenizer.get_vocab_size(), n + 1)])
    tokenizer.save(str(speaking / 'tokenizer.json'))
    (tmp_path / 'a.txt').write_text('hello again, hello world. ' * 90)
    for name in ('without', 'with'):
        succeeded(prepare('text', tmp_path / 'a.txt', f'--tokenizer={speaking}', f'--out_dir={tmp_path / name}'))
    edit_json(tmp_path / 'with' / 'meta.json', max_id=n)
    flags = f'--init_from={speaking}', *SHORT
    succeeded(train(tmp_path / 'out', f'--dataset={tmp_path / "without"}', *flags))
    for data in (tmp_path / 'with', f'{tmp_path / "without"}:0.5,{tmp_path / "with"}:0.5'):
        done = train(tmp_path / 'out2', f'--dataset={data}', *flags)
        assert_refused(done, f'needs {n + 1} tokens, the model has only {n}')


def test_data_with_other_ids_than_the_models_are_refused_with_what_makes_them_anew(speaking, tmp_path):
    """As data of an older version, in which transformers' class had its own split."""
    (tmp_path / 'a.txt').write_text('hello again, hello world. ' * 90)
    made = prepare('text', tmp_path / 'a.txt', f'--tokenizer={speaking}', f'--out_dir={tmp_path / "data"}')
    succeeded(made)
    meta = json.loads((tmp_path / 'data' / 'meta.json').read_text())
    meta['tokenizer']['digest'] = 'of other ids'
    (tmp_path / 'data' / 'meta.json').write_text(json.dumps(meta))
    done = train(tmp_path / 'out', f'--dataset={tmp_path / "data"}', f'--init_from={speaking}', *SHORT)
    assert_refused(done, f'has other tokens than {speaking}, .*prepare.py my.txt --tokenizer={speaking}')
