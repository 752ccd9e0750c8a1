"""Text becomes ids and back; chat templates."""
import json
from tests.common import assert_refused, edit_json, refusal, succeeded, train

import numpy as np
import pytest

from jax_files.tokenizers import (
    HFTokenizer, copy_tokenizer, load_token_bytes, load_tokenizer, strip_partial_utf8, write_char_tokenizer)
from jax_files.metrics import read_metrics
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
    assert tokenizer.encode_chat([{'role': 'user', 'content': 'a\udcffb'}])


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
    ('{', 'line 2: is not JSON'), ('[]', 'line 2: has no "messages"'),
    ('{"messages": [{"content": "a"}]}', 'line 2: has messages that are not'),
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
