"""Text becomes ids and back; chat templates."""
import json
import re
from tests.common import GOLDEN, assert_refused, edit_json, refusal, run_script, slow, succeeded, train

import numpy as np
import pytest

from jax_files import tokenizer_library
from jax_files.tokenizers import (
    HFTokenizer, copy_tokenizer, describe_tokenizer, load_token_bytes, load_tokenizer, locate_tokenizer,
    strip_partial_utf8, write_char_tokenizer)
from jax_files.metrics import read_metrics
from jax_files.weight_files import write_tokenizer_files
from jax_flags import UserError
from tests.common import CONVERSATION, PADDED, TUNE, prepare

# -----------------------------------------------------------------------------
# data

def test_characters_the_vocabulary_lacks_are_named():
    tokenizer = load_tokenizer({'kind': 'char', 'chars': '\nabc'})
    assert tokenizer.decode(tokenizer.encode('cab\n')) == 'cab\n'
    assert tokenizer.vocab_size == 4
    with pytest.raises(UserError, match="does not know: 'd' 'x'"):
        tokenizer.encode('axd')
    with pytest.raises(UserError, match='unknown kind'):
        load_tokenizer({'kind': 'words'})


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


def test_a_broken_character_leaves_those_beside_it_where_bytes_are_tokens(tmp_path):
    from tokenizers import Tokenizer, decoders, models
    vocab = {token: i for i, token in enumerate([*(f'<0x{i:02X}>' for i in range(256)), '\u2581', 'h', '<', '0', '>'])}
    bpe = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    bpe.decoder = decoders.Sequence([decoders.Replace('\u2581', ' '), decoders.ByteFallback(), decoders.Fuse()])
    bpe.save(str(tmp_path / 'tokenizer.json'))
    tokenizer = HFTokenizer(tmp_path)
    text = 'h\u2581😂😂<0h'
    ids = tokenizer.encode(text)
    assert len(ids) == 13 and tokenizer.decode(ids) == text.replace('\u2581', ' ')
    shown = [strip_partial_utf8(tokenizer.decode(ids[:n])) for n in range(len(ids) + 1)]
    assert all(shown[-1].startswith(part) for part in shown) and len(set(shown)) == len(text) + 1
    assert tokenizer.decode([*ids[:8], vocab['h']]) == 'h 😂\ufffdh'
    assert tokenizer.token_bytes()[:258] == [1] * 258


def test_a_link_of_a_tokenizers_folder_is_not_copied(speaking, tmp_path):
    (speaking / 'special_tokens_map.json').symlink_to('/etc/passwd')
    message = refusal(copy_tokenizer, {'kind': 'folder', 'path': speaking}, tmp_path / 'copy')
    assert 'special_tokens_map.json is not read: it leads out of its folder, to /etc/passwd' in message
    assert not (tmp_path / 'copy').exists()


def test_half_a_character_of_a_prompt_is_a_replacement_character(speaking):
    tokenizer = HFTokenizer(speaking)
    assert tokenizer.encode('a\ud83db') == tokenizer.encode('a\ufffdb')
    with pytest.raises(UserError, match="has no token, .*: '\ufffd'; write"):
        tokenizer.encode_chat([{'role': 'user', 'content': 'a\udcffb'}])


def test_an_exported_vocabulary_of_characters_names_those_it_lacks(tmp_path):
    write_char_tokenizer('\nabc', tmp_path)
    tokenizer = HFTokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode('cab\n')) == 'cab\n'
    with pytest.raises(UserError, match="does not know: 'd' 'x'"):
        tokenizer.encode('axd')


def test_gpt2_bpe_without_a_network_says_what_to_do(monkeypatch):
    import tiktoken

    def fail(name):
        raise ConnectionError('no route')
    monkeypatch.setattr(tiktoken, 'get_encoding', fail)
    with pytest.raises(UserError, match='TIKTOKEN_CACHE_DIR'):
        load_tokenizer({'kind': 'gpt2'})

# -----------------------------------------------------------------------------
# newer models

@pytest.mark.parametrize('template, text', [
    ([{'name': 'tool', 'template': 'x'}, {'name': 'default', 'template': '{{ messages[0].content }}'}], 'ab'),
    ('{% generation %}{{ messages[0].content }}{% endgeneration %}c', 'abc'),
    ('{{ "a" if messages[0].content|tojson(ensure_ascii=False, indent=1)|length == 4 }}', 'a')])
def test_chat_templates_may_be_a_list_mark_what_is_generated_and_write_json(speaking, template, text):
    edit_json(speaking / 'tokenizer_config.json', chat_template=template)
    tokenizer = HFTokenizer(speaking)
    assert tokenizer.decode(tokenizer.encode_chat([{'role': 'user', 'content': 'ab'}])) == text


@pytest.mark.parametrize('template', ['{{ messages[0].content + 1 }}', '{% for %}', '{{ messages.nothing.at_all }}'])
def test_a_chat_template_that_fails_says_so_in_one_line(speaking, template):
    edit_json(speaking / 'tokenizer_config.json', chat_template=template)
    message = refusal(HFTokenizer(speaking).encode_chat, [{'role': 'user', 'content': 'ab'}])
    assert 'chat template cannot be rendered: ' in message


@pytest.mark.parametrize('name, settings', [
    ('config.json', {'eos_token_id': [[1]]}), ('generation_config.json', {'eos_token_id': [1, 'x']}),
    ('tokenizer_config.json', {'eos_token': {'id': 1}}), ('tokenizer_config.json', {'eos_token': [1]}),
    ('tokenizer_config.json', {'chat_template': [3]})])
def test_settings_of_a_tokenizer_that_are_malformed_are_refused(speaking, name, settings):
    edit_json(speaking / name, **settings)
    assert "the tokenizer's settings in" in refusal(HFTokenizer, speaking)


def test_a_vocabulary_reaches_up_to_its_largest_id(speaking):
    values = json.loads((speaking / 'tokenizer.json').read_text())
    values['model']['vocab']['D'] = 43
    (speaking / 'tokenizer.json').write_text(json.dumps(values))
    tokenizer = HFTokenizer(speaking)
    assert tokenizer.vocab_size == 44
    assert tokenizer.encode('D')[-1:] == [43]


def test_truncation_and_padding_of_a_tokenizer_json_are_ignored(speaking):
    expected = HFTokenizer(speaking).encode('hello, again.')
    edit_json(speaking / 'tokenizer.json', **PADDED)
    assert HFTokenizer(speaking).encode('hello, again.') == expected and 2 < len(expected) < 99


@pytest.mark.slow
def test_only_the_assistants_tokens_count(chatting, tmp_path):
    (tmp_path / 'chats.jsonl').write_text((json.dumps(CONVERSATION) + '\n') * 10)
    data = tmp_path / 'data'
    succeeded(prepare('chat', tmp_path / 'chats.jsonl', f'--tokenizer={chatting}', f'--out_dir={data}'))
    assert np.fromfile(data / 'val.bin', np.uint16).tolist() == [38, 0, 1, 39, 2, 37, 38, 3, 39, 4, 5, 37]
    assert np.fromfile(data / 'val_mask.bin', np.uint8).tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1]
    flags = [f'--init_from={chatting}', f'--dataset={data}', *TUNE, '--block_size=8', '--dropout=0.0',
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
# folders of others, against transformers

TRANSFORMERS = json.loads((GOLDEN / 'tokenizers.json').read_text())


def write_files(folder, files):
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.mark.parametrize('name', TRANSFORMERS['cases'])
def test_tokens_that_any_file_declares_have_the_ids_of_transformers(name, tmp_path):
    case = TRANSFORMERS['cases'][name]
    folder = write_files(tmp_path / 'model', case['files'])
    tokenizer = HFTokenizer(folder)
    assert tokenizer.special == case['names']
    assert (tokenizer.ids.get(tokenizer.special.get('bos_token')), tokenizer.end_token) == (case['bos'], case['eos'])
    assert [tokenizer.encode(text) for text in TRANSFORMERS['texts']] == case['ids']
    copy_tokenizer({'kind': 'folder', 'path': str(folder)}, tmp_path / 'copy')
    copied = HFTokenizer(tmp_path / 'copy')  # which has no config.json and no vocab.json
    assert (copied.special, copied.ids, copied.start_token) == (tokenizer.special, tokenizer.ids, tokenizer.start_token)
    assert [copied.encode(text) for text in TRANSFORMERS['texts']] == [
        tokenizer.encode(text) for text in TRANSFORMERS['texts']]
    assert copied.special_ids == tokenizer.special_ids


def read_all(folder):
    """What a folder's tokenizer makes of the texts of the classes: ids, offsets, what they decode to."""
    tokenizer = HFTokenizer(folder).tokenizer
    found = [tokenizer.encode(text) for text in TRANSFORMERS['class_texts']]
    return ([encoding.ids for encoding in found], [[list(offset) for offset in encoding.offsets] for encoding in found],
            [tokenizer.decode(encoding.ids, skip_special_tokens=False) for encoding in found])


@pytest.mark.parametrize('name', TRANSFORMERS['classes'])
def test_a_class_that_splits_text_by_its_own_code_gives_the_ids_of_transformers(name, tmp_path):
    case = TRANSFORMERS['classes'][name]
    files = {**case['files'], 'tokenizer.json': TRANSFORMERS['bases'][case['base']]}
    folder = write_files(tmp_path / 'model', files)
    assert read_all(folder) == (case['ids'], case['offsets'], case['decoded'])
    tokenizer = HFTokenizer(folder)
    assert tokenizer.special == case['names']
    assert (tokenizer.ids.get(tokenizer.special.get('bos_token')), tokenizer.end_token) == (case['bos'], case['eos'])
    copy_tokenizer({'kind': 'folder', 'path': str(folder)}, tmp_path / 'copy')  # which has no config.json
    assert read_all(tmp_path / 'copy') == (case['ids'], case['offsets'], case['decoded'])


@pytest.mark.parametrize('family, exported_as', [
    ('gpt2', 'llama'), ('llama', 'gpt2'), ('llama', 'qwen3'), ('llama', 'llama')])
def test_an_export_of_another_family_splits_text_as_before(family, exported_as, tmp_path):
    files = {'tokenizer.json': TRANSFORMERS['bases']['digits'], 'config.json': {'model_type': family}}
    source = write_files(tmp_path / 'source', {**files, 'tokenizer_config.json': {'eos_token': '<|endoftext|>'}})
    folder = write_files(tmp_path / 'folder', {'config.json': {'model_type': exported_as}})
    write_tokenizer_files(source, folder, {'model_type': exported_as})
    assert read_all(folder) == read_all(source)


def test_a_class_whose_code_is_not_known_is_refused(speaking):
    edit_json(speaking / 'tokenizer_config.json', tokenizer_class='T5TokenizerFast')
    assert "T5Tokenizer, its tokenizer_class, splits text by code of transformers" in refusal(HFTokenizer, speaking)


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


@pytest.mark.parametrize('names', [['tokenizer.model'], ['vocab.txt'], ['spiece.model'], ['qwen.tiktoken'],
                                   ['vocab.json'], ['tekken.json', 'params.json']])
def test_a_vocabulary_as_large_as_gpt2s_is_not_gpt2s_if_another_tokenizer_is_there(names, tmp_path):
    assert describe_tokenizer(str(tmp_path), 50257) == {'kind': 'gpt2'}
    for name in names:
        (tmp_path / name).write_text('{}')
    assert f'{names[0]} beside the weights' in refusal(describe_tokenizer, str(tmp_path), 50257)
    (tmp_path / 'tokenizer.json').write_text('{}')
    assert describe_tokenizer(str(tmp_path), 50257)['kind'] == 'folder'


def test_vocab_and_merges_of_a_class_that_is_not_known_are_named(tmp_path):
    for name, content in (('vocab.json', '{}'), ('merges.txt', ''), ('config.json', '{"model_type": "llama"}')):
        (tmp_path / name).write_text(content)
    message = refusal(HFTokenizer, describe_tokenizer(str(tmp_path), 50257)['path'])
    assert 'merges.txt, vocab.json' in message and 'save_pretrained' in message


def test_characters_that_a_tokenizer_would_leave_out_are_named(speaking):
    tokenizer = HFTokenizer(speaking)
    assert tokenizer.count_dropped('a|b|</s> \u00e9<user>') == {'|': 2, '\u00e9': 1}
    assert tokenizer.count_dropped('hello, again.') == {}
    values = json.loads((speaking / 'tokenizer.json').read_text())
    values['model']['unk_token'] = 'D'
    (speaking / 'tokenizer.json').write_text(json.dumps(values))
    assert HFTokenizer(speaking).count_dropped('a|b') == {}


def test_bytes_that_a_tokenizer_lacks_are_characters_that_it_leaves_out(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    for lacking, expected in (('\u00a9', {'\u00e9': 1}), ('', {})):  # the second byte of an e acute
        kept = [letter for letter in letters if letter != lacking]
        raw = Tokenizer(models.BPE({letter: i for i, letter in enumerate(kept)}, []))
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        raw.decoder = decoders.ByteLevel()
        raw.save(str(tmp_path / 'tokenizer.json'))
        assert HFTokenizer(tmp_path).count_dropped('ab \u00e9') == expected


@pytest.mark.parametrize('n_processes', [1, slow(2)])
def test_characters_that_a_data_set_lacks_are_counted_and_named(n_processes, speaking, tmp_path):
    (tmp_path / 'a.txt').write_text('hello | again | é</s>.\n' * 10)
    done = succeeded(prepare('text', tmp_path / 'a.txt', f'--tokenizer={speaking}', f'--out_dir={tmp_path / "data"}',
                             f'--num_proc={n_processes}'))
    assert 'a.txt: 70 characters left out, for which the tokenizer has no token: ' in done.stderr
    assert set(done.stderr.split('no token: ')[1].split()[:6]) == {"'|'", "'\\n'", "'/'", "'<'", "'>'", "'é'"}


def test_characters_that_an_evaluation_cannot_score_are_counted_and_named(speaking, tmp_path):
    text, task = tmp_path / 'a.txt', tmp_path / 'b.jsonl'
    text.write_text('hello | again')
    task.write_text(json.dumps({'context': 'a|', 'continuation': 'bé'}) + '\n')
    done = succeeded(run_script('eval_jax.py', f'--init_from={speaking}', '--device=cpu', f'--text={text}',
                                f'--tasks={task}'))
    assert "a.txt: 1 character left out, for which the tokenizer has no token: '|'" in done.stderr
    assert "b: 2 characters left out, for which the tokenizer has no token: '|' 'é'" in done.stderr
    results = json.loads(done.stdout.strip().split('\n')[-1])['results']
    assert results['texts'][str(text)]['bytes'] == len('hello  again')

# -----------------------------------------------------------------------------
# strangers' files


@pytest.mark.parametrize('description', [
    None, [], 'gpt2', {'kind': 'char'}, {'kind': 'char', 'chars': ['a']}, {'kind': 'folder', 'path': 3},
    {'kind': ['char']}])
def test_what_describes_no_tokenizer_is_refused(description):
    assert re.search('does not describe a tokenizer|unknown kind', refusal(load_tokenizer, description))
    if not isinstance(description, dict) or description['kind'] == 'folder':
        assert 'does not describe a tokenizer' in refusal(locate_tokenizer, description, '.')


@pytest.mark.parametrize('pattern, is_strange', [
    (tokenizer_library.O200K_SPLIT, False), (tokenizer_library.QWEN2_SPLIT, False), ('a+', True),
    *[(pattern, False) for pattern in tokenizer_library.DEEPSEEK_SPLITS]])
def test_patterns_of_the_published_families_are_called_directly(pattern, is_strange, speaking):
    edit_json(speaking / 'tokenizer.json', pre_tokenizer={
        'type': 'Split', 'pattern': {'Regex': pattern}, 'behavior': 'Isolated', 'invert': False})
    tokenizer = HFTokenizer(speaking)
    assert tokenizer.tokenizer.is_strange == is_strange
    assert tokenizer.decode(tokenizer.encode('hello, again.')) == 'hello, again.'


@pytest.mark.parametrize('change, message', [
    ({'model': {'vocab': {'a': 0, 'b': 2**30}}}, 'the id 1,073,741,824'),
    ({'pre_tokenizer': {'type': 'Split', 'pattern': {'Regex': '(a+)+$'}, 'behavior': 'Isolated', 'invert': False}},
     'the tokenizers library fails with it .PanicException: Onig'),
    ({'decoder': {'type': 'Strip', 'content': 'a', 'start': 1, 'stop': 1}},
     'the tokenizers library fails with it .PanicException: slice'),
    ({'normalizer': {'type': 'Sequence', 'normalizers': [
        {'type': 'Replace', 'pattern': {'String': 'a'}, 'content': 'a' * 100}] * 9}}, 'makes each character'),
    ({'model': {'unk_token': 'none'}}, 'the tokenizers library fails with it'), ({'model': None}, 'copy or download')])
def test_what_fails_in_the_library_is_one_line(speaking, change, message, capfd):
    values = json.loads((speaking / 'tokenizer.json').read_text())
    for key, value in change.items():
        values[key] = values[key] | value if isinstance(value, dict) and values[key] else value
    (speaking / 'tokenizer.json').write_text(json.dumps(values))

    def use():
        tokenizer = HFTokenizer(speaking)
        tokenizer.decode([0])
        tokenizer.encode('a' * 40 + '!|')

    assert re.search(message, refusal(use))
    assert capfd.readouterr().err == ''


def test_a_pattern_without_an_end_is_left_behind(speaking, monkeypatch):
    monkeypatch.setattr(tokenizer_library, 'SECONDS', 0.2)
    edit_json(speaking / 'tokenizer.json', pre_tokenizer={
        'type': 'Split', 'pattern': {'Regex': 'a*a*a*b'}, 'behavior': 'Isolated', 'invert': False})
    tokenizer = HFTokenizer(speaking)
    assert tokenizer.encode('ab') == HFTokenizer(speaking).encode('ab')
    assert 'a pattern in it takes more than' in refusal(tokenizer.encode, 'a' * 1000 + '!b')


def test_a_tokenizer_without_a_decoder_works(speaking):
    edit_json(speaking / 'tokenizer.json', decoder=None)
    tokenizer = HFTokenizer(speaking)
    assert tokenizer.decode(tokenizer.encode('ab')) == 'a b' and tokenizer.token_bytes() is None


@pytest.mark.parametrize('value, expected', [(-1, {'top_k': 0}), (0, {'top_k': 0}), (None, {}), ('x', {}), (True, {})])
def test_a_top_k_that_is_off_may_be_written_in_many_ways(speaking, value, expected):
    edit_json(speaking / 'generation_config.json', top_k=value)
    assert HFTokenizer(speaking).sampling == expected
