"""Writes tokenizers.json beside it: folders of tokenizers as they lie in the wild, and what transformers makes of them.
Run by hand; needs transformers 5:

    python tests/golden/make_tokenizers.py

A case is {name: {'files': {file: content}, 'ids': [ids of each text], 'names': special_tokens_map, 'bos', 'eos'}}.
"""
import json
import tempfile
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

HERE = Path(__file__).parent
TEXTS = ['ab <x> cd', 'a<tool> b<tool>', '<|im_end|>ab</s> d', '<s>ab <|end|>', 'd <x>  <image>a']
PLAIN = {'lstrip': False, 'rstrip': False, 'normalized': False, 'single_word': False}


def letters(*added):
    """A tokenizer of letters with these AddedTokens."""
    vocab = {c: i for i, c in enumerate(['<s>', '</s>', *'abcd <>/|_xstolimgenpr'])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens(list(added))
    return json.loads(tokenizer.to_str())


def pieces():
    """A Unigram tokenizer."""
    vocab = ['<unk>', '<s>', '</s>', '\u2581', *'abcd<>/|_xstolimgenpr', 'ab', '\u2581ab']
    tokenizer = Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(vocab)], 0, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return json.loads(tokenizer.to_str())


def byte_level():
    """A byte-level BPE that keeps digits apart, as those of DeepSeek do."""
    tokenizer = Tokenizer(models.BPE(VOCAB, [('a', 'b')]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken('<|endoftext|>', special=True, normalized=False)])
    return json.loads(tokenizer.to_str())


def token(content, **options):
    return PLAIN | {'content': content} | options


BASE = letters(AddedToken('</s>', special=True))
END_AS_TEXT = letters(AddedToken('<|im_end|>', special=False, normalized=False))
DECODER = {'22': token('<tool>', special=True), '40': token('<x>', lstrip=True, special=False)}
VOCAB = {c: i for i, c in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), '<|endoftext|>', 'ab'])}
MERGES = '#version: 0.2\na b\n'
FOLDERS = {
    'names in special_tokens_map': {
        'tokenizer.json': BASE, 'special_tokens_map.json': {'bos_token': '<s>', 'eos_token': '</s>'}},
    'names as objects in special_tokens_map': {
        'tokenizer.json': BASE, 'special_tokens_map.json': {
            'bos_token': token('<s>'), 'eos_token': token('<|im_end|>', rstrip=True), 'unk_token': '<x>'}},
    'special_tokens_map before tokenizer_config': {
        'tokenizer.json': BASE, 'special_tokens_map.json': {'eos_token': '<|end|>'},
        'tokenizer_config.json': {'bos_token': '<s>', 'eos_token': '</s>'}},
    'special_tokens_map after added_tokens_decoder': {
        'tokenizer.json': BASE, 'special_tokens_map.json': {'bos_token': '<s>', 'eos_token': '<|end|>'},
        'tokenizer_config.json': {'eos_token': '</s>', 'added_tokens_decoder': DECODER}},
    'added_tokens_decoder': {
        'tokenizer.json': BASE, 'tokenizer_config.json': {'eos_token': '</s>', 'added_tokens_decoder': DECODER}},
    'added_tokens': {
        'tokenizer.json': BASE, 'added_tokens.json': {'<tool>': 31, '<x>': 30},
        'tokenizer_config.json': {'pad_token': '<x>'}},
    'extra_special_tokens': {
        'tokenizer.json': BASE, 'tokenizer_config.json': {'extra_special_tokens': ['<tool>', '<x>']}},
    'extra_special_tokens with names': {
        'tokenizer.json': BASE, 'tokenizer_config.json': {
            'extra_special_tokens': {'image_token': '<image>'}, 'audio_token': '<x>', 'eos_token': '<|im_end|>'}},
    'additional_special_tokens': {
        'tokenizer.json': BASE, 'tokenizer_config.json': {'additional_special_tokens': [
            '<tool>', {'__type': 'AddedToken', **token('<x>', lstrip=True, rstrip=True)}]}},
    'additional_special_tokens in special_tokens_map': {
        'tokenizer.json': BASE, 'special_tokens_map.json': {'additional_special_tokens': ['<tool>', '<x>']}},
    'both kinds': {
        'tokenizer.json': BASE, 'special_tokens_map.json': {'extra_special_tokens': ['<image>']},
        'tokenizer_config.json': {'extra_special_tokens': ['<tool>'], 'additional_special_tokens': ['<x>']}},
    'everywhere': {
        'tokenizer.json': BASE, 'added_tokens.json': {'<image>': 50, '<x>': 49},
        'special_tokens_map.json': {'bos_token': '<s>', 'additional_special_tokens': ['<|end|>']},
        'tokenizer_config.json': {'eos_token': '<|im_end|>', 'extra_special_tokens': ['<tool>']}},
    'an end that tokenizer.json takes for text': {
        'tokenizer.json': END_AS_TEXT, 'tokenizer_config.json': {'eos_token': '<|im_end|>'}},
    'an end that only the decoder takes for special': {
        'tokenizer.json': END_AS_TEXT, 'tokenizer_config.json': {
            'added_tokens_decoder': {'24': token('<|im_end|>', special=True)}}},
    'a Unigram': {
        'tokenizer.json': pieces(), 'added_tokens.json': {'<tool>': 40},
        'special_tokens_map.json': {'bos_token': '<s>', 'eos_token': token('</s>', rstrip=True)}},
    'the names of a class': {
        'tokenizer.json': letters(AddedToken('<unk>', special=True)),
        'tokenizer_config.json': {'tokenizer_class': 'LlamaTokenizerFast'}},
    'a byte-level BPE that is declared as LlamaTokenizer': {
        'tokenizer.json': byte_level(), 'tokenizer_config.json': {
            'tokenizer_class': 'LlamaTokenizerFast', 'bos_token': '<|endoftext|>', 'eos_token': '<|im_end|>',
            'legacy': True, 'add_bos_token': True}},
    'vocab.json of GPT-2': {
        'vocab.json': VOCAB, 'merges.txt': MERGES, 'config.json': {'model_type': 'gpt2'}},
    'vocab.json with a space before': {
        'vocab.json': VOCAB, 'merges.txt': MERGES, 'config.json': {'model_type': 'gpt2'},
        'tokenizer_config.json': {'add_prefix_space': True, 'add_bos_token': True, 'eos_token': '<|im_end|>'}},
    'vocab.json of Qwen2': {
        'vocab.json': VOCAB, 'merges.txt': MERGES, 'config.json': {'model_type': 'qwen2'},
        'added_tokens.json': {'<|im_end|>': 258}, 'special_tokens_map.json': {'eos_token': '<|im_end|>'}},
    'vocab.json of a Llama with a class': {
        'vocab.json': VOCAB, 'merges.txt': MERGES, 'config.json': {'model_type': 'llama'},
        'tokenizer_config.json': {'tokenizer_class': 'GPT2Tokenizer', 'additional_special_tokens': ['<x>']}}}

cases = {}
for name, files in FOLDERS.items():
    files = {'config.json': {'model_type': 'llama'}} | files
    with tempfile.TemporaryDirectory() as folder:
        for file, content in files.items():
            Path(folder, file).write_text(content if isinstance(content, str) else json.dumps(content))
        tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer.encode(text) for text in TEXTS]
    if name == 'the names of a class':  # LlamaTokenizer builds a tokenizer of its own, whatever tokenizer.json says
        ids = None
    cases[name] = {'files': files, 'ids': ids, 'names': tokenizer.special_tokens_map,
                   'bos': tokenizer.bos_token_id, 'eos': tokenizer.eos_token_id}
(HERE / 'tokenizers.json').write_text(json.dumps({'texts': TEXTS, 'cases': cases}) + '\n')
