"""Writes tokenizers.json beside it: folders of tokenizers as they lie in the wild, and what transformers makes of them.
Run by hand; needs transformers 5:

    python tests/golden/make_tokenizers.py

A case is {name: {'files': {file: content}, 'ids': [ids of each text], 'names': special_tokens_map, 'bos', 'eos'}}. A
class is a case whose tokenizer.json is one of 'bases', with other texts and, besides, what the ids decode to and where
the tokens are in the text.
"""
import json
import tempfile
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
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

# -----------------------------------------------------------------------------
# classes that split text by their own code, whatever tokenizer.json says

CLASS_TEXTS = [
    '', ' ', '   ', 'a', ' ab', '  ab  cd', 'ab\n\n cd\n', '\n\nab\t', '12 345a', '\u00e9 \u20ac \U0001f600!',
    'e\u0301', '<s>ab', '<s> ab</s>cd', '</s>  <s>', 'a <tool> b', '<tool>a', '\u2581ab', '[INST] ab [/INST]cd',
    "don't . , !", '\u65e5']
BYTES = [f'<0x{byte:02X}>' for byte in range(256)]
FUSE = [decoders.Replace('\u2581', ' '), decoders.ByteFallback(), decoders.Fuse()]


def with_byte_fallback(special, normalizer, decoder, **options):
    """A BPE as Llama 2's and Gemma's: pieces, and tokens for the bytes of other characters; it begins each text."""
    letters_ = ["\u2581", *"abcdINST[]/.!'", 'ab', 'cd', '\u2581ab', '\u2581\u2581', '[I']
    vocab = {token: i for i, token in enumerate([*special, *BYTES, *letters_])}
    merges = [('a', 'b'), ('c', 'd'), ('\u2581', 'ab'), ('\u2581', '\u2581'), ('[', 'I')]
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, **options))
    tokenizer.normalizer = normalizer
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    begin = special[1]
    tokenizer.post_processor = processors.TemplateProcessing(
        f'{begin} $A', f'{begin} $A {begin} $B', [(begin, vocab[begin])])
    return json.loads(tokenizer.to_str())


LLAMA_2 = with_byte_fallback(
    ['<unk>', '<s>', '</s>'], normalizers.Sequence([normalizers.Prepend('\u2581'), normalizers.Replace(' ', '\u2581')]),
    decoders.Sequence([*FUSE, decoders.Strip(' ', 1, 0)]), unk_token='<unk>', fuse_unk=True)
GEMMA = with_byte_fallback(
    ['<pad>', '<bos>', '<eos>', '<unk>', '<mask>'], normalizers.Replace(' ', '\u2581'), decoders.Sequence(FUSE),
    unk_token='<unk>', fuse_unk=True)
BASES = {'llama 2': LLAMA_2, 'gemma': GEMMA, 'digits': byte_level(), 'unigram': pieces()}
CLASSES = {
    'LlamaTokenizer of a Llama 2': ('llama 2', {'tokenizer_class': 'LlamaTokenizer'}, 'llama'),
    'LlamaTokenizerFast, legacy': ('llama 2', {'tokenizer_class': 'LlamaTokenizerFast', 'legacy': True}, 'llama'),
    'LlamaTokenizer without a first space': (
        'llama 2', {'tokenizer_class': 'LlamaTokenizer', 'add_prefix_space': False, 'legacy': None}, 'llama'),
    'LlamaTokenizer with an end': (
        'llama 2', {'tokenizer_class': 'LlamaTokenizer', 'add_eos_token': True, 'add_bos_token': False}, 'llama'),
    'LlamaTokenizer of a Mistral': ('llama 2', {'tokenizer_class': 'LlamaTokenizer'}, 'mistral'),
    'LlamaTokenizer of a Phi 3': ('llama 2', {'tokenizer_class': 'LlamaTokenizerFast'}, 'phi3'),
    'LlamaTokenizer of a Mistral with code': (
        'llama 2', {'tokenizer_class': 'LlamaTokenizer', 'auto_map': {'AutoTokenizer': [None, 'a.B']}}, 'mistral'),
    'LlamaTokenizer without a config.json': ('llama 2', {'tokenizer_class': 'LlamaTokenizer'}, None),
    'LlamaTokenizer of some added tokens': ('llama 2', {
        'tokenizer_class': 'LlamaTokenizer', 'added_tokens_decoder': {
            '1': token('<s>', special=True), '290': token('<tool>', lstrip=True, special=True)}}, 'llama'),
    'LlamaTokenizer of a Unigram': ('unigram', {'tokenizer_class': 'LlamaTokenizer'}, 'llama'),
    'LlamaTokenizer of a byte-level BPE': ('digits', {'tokenizer_class': 'LlamaTokenizer'}, 'llama'),
    'LlamaTokenizer that splits special tokens': (
        'llama 2', {'tokenizer_class': 'LlamaTokenizer', 'split_special_tokens': True}, 'llama'),
    'no class of a Llama 2': ('llama 2', {}, 'llama'),
    'CodeLlamaTokenizer': ('llama 2', {'tokenizer_class': 'CodeLlamaTokenizerFast'}, 'llama'),
    'GemmaTokenizer': ('gemma', {'tokenizer_class': 'GemmaTokenizer'}, 'gemma3_text'),
    'GemmaTokenizer of a Llama 2': ('llama 2', {}, 'gemma2'),
    'PreTrainedTokenizerFast of a Gemma': ('llama 2', {'tokenizer_class': 'PreTrainedTokenizerFast'}, 'gemma2'),
    'GPT2Tokenizer of a SmolLM': ('digits', {'tokenizer_class': 'GPT2Tokenizer'}, 'llama'),
    'GPT2Tokenizer by its family': ('digits', {'add_prefix_space': True}, 'gpt2'),
    'GPTNeoXTokenizer': ('digits', {'tokenizer_class': 'GPTNeoXTokenizer'}, 'llama'),
    'Qwen2Tokenizer': ('digits', {'tokenizer_class': 'Qwen2Tokenizer', 'pad_token': '<tool>'}, 'qwen3'),
    'Qwen2Tokenizer instead of what is declared': ('digits', {'tokenizer_class': 'PreTrainedTokenizerFast'}, 'qwen2'),
    'a class that is not known': ('digits', {'tokenizer_class': 'TikTokenTokenizer'}, 'kimi_k2'),
    'a padded Llama 2': ('padded', {'tokenizer_class': 'LlamaTokenizer'}, 'llama')}
BASES['padded'] = {**LLAMA_2, 'padding': {
    'strategy': 'BatchLongest', 'direction': 'Right', 'pad_to_multiple_of': None, 'pad_id': 0, 'pad_type_id': 0,
    'pad_token': '<tool>'}}


def load(files):
    """The tokenizer that transformers makes of a folder with these files."""
    with tempfile.TemporaryDirectory() as folder:
        for file, content in files.items():
            Path(folder, file).write_text(content if isinstance(content, str) else json.dumps(content))
        return AutoTokenizer.from_pretrained(folder)


def names_of(tokenizer):
    return {'names': tokenizer.special_tokens_map, 'bos': tokenizer.bos_token_id, 'eos': tokenizer.eos_token_id}


cases = {}
for name, files in FOLDERS.items():
    files = {'config.json': {'model_type': 'llama'}} | files
    tokenizer = load(files)
    cases[name] = {'files': files, 'ids': [tokenizer.encode(text) for text in TEXTS], **names_of(tokenizer)}
classes = {}
for name, (base, settings, family) in CLASSES.items():
    files = {'tokenizer_config.json': settings}
    if family:
        files['config.json'] = {'model_type': family}
    tokenizer = load({**files, 'tokenizer.json': BASES[base]})
    found = [tokenizer(text, return_offsets_mapping=True) for text in CLASS_TEXTS]
    classes[name] = {
        'base': base, 'files': files, 'ids': [each['input_ids'] for each in found],
        'offsets': [each['offset_mapping'] for each in found],
        'decoded': [tokenizer.decode(each['input_ids']) for each in found], **names_of(tokenizer)}
(HERE / 'tokenizers.json').write_text(json.dumps({
    'texts': TEXTS, 'cases': cases, 'class_texts': CLASS_TEXTS, 'bases': BASES, 'classes': classes}) + '\n')
