"""GGUF, llama.cpp's files of weights, settings and tokenizer in one.

References:
1) the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
2) llama.cpp's converter: https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py
"""
import json
import logging
import os
import re

import numpy as np

from jax_flags import UserError

GGUF_DTYPES = ('float32', 'float16', 'q8_0')
# model_type: llama.cpp's architecture. It computes a Mistral as a Llama
ARCHITECTURES = {'gpt2': 'gpt2', 'llama': 'llama', 'mistral': 'llama', 'qwen2': 'qwen2', 'qwen3': 'qwen3'}

GPT2_SETTINGS = {  # key of GGUF without the architecture: field or property of GPTConfig
    'context_length': 'block_size', 'embedding_length': 'n_embd', 'block_count': 'n_layer',
    'feed_forward_length': 'mlp_width', 'attention.head_count': 'n_head', 'attention.layer_norm_epsilon': 'norm_eps'}
LLAMA_SETTINGS = {
    'context_length': 'block_size', 'embedding_length': 'n_embd', 'block_count': 'n_layer',
    'feed_forward_length': 'mlp_width', 'attention.head_count': 'n_head', 'attention.head_count_kv': 'kv_heads',
    'attention.key_length': 'head_width', 'attention.value_length': 'head_width', 'rope.dimension_count': 'head_width',
    'rope.freq_base': 'rope_theta', 'attention.layer_norm_rms_epsilon': 'norm_eps'}

GPT2_TENSORS = {  # Hugging Face's name, in a layer or outside: GGUF's
    'wte': 'token_embd', 'wpe': 'position_embd', 'ln_f': 'output_norm', 'ln_1': 'attn_norm', 'attn.c_attn': 'attn_qkv',
    'attn.c_proj': 'attn_output', 'ln_2': 'ffn_norm', 'mlp.c_fc': 'ffn_up', 'mlp.c_proj': 'ffn_down'}
LLAMA_TENSORS = {
    'embed_tokens': 'token_embd', 'norm': 'output_norm', 'lm_head': 'output', 'input_layernorm': 'attn_norm',
    'self_attn.q_proj': 'attn_q', 'self_attn.k_proj': 'attn_k', 'self_attn.v_proj': 'attn_v',
    'self_attn.o_proj': 'attn_output', 'self_attn.q_norm': 'attn_q_norm', 'self_attn.k_norm': 'attn_k_norm',
    'post_attention_layernorm': 'ffn_norm', 'mlp.gate_proj': 'ffn_gate', 'mlp.up_proj': 'ffn_up',
    'mlp.down_proj': 'ffn_down'}

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                r'|\s*[\r\n]+|\s+(?!\S)|\s+')
# llama.cpp's tokenizer.ggml.pre: the patterns at which it splits text before BPE, and ignore_merges of tokenizer.json
SPLITS = {'gpt-2': ((GPT2_SPLIT,), False), 'smollm': ((r'\p{N}', GPT2_SPLIT), False),
          'llama-bpe': ((LLAMA3_SPLIT,), True), 'qwen2': ((LLAMA3_SPLIT.replace('{1,3}', ''),), False)}
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # types of tokens


def import_gguf():
    """The module gguf, imported where it is used: only some users need it."""
    try:
        import gguf
    except ImportError:
        raise UserError('GGUF files need the package gguf: pip install gguf') from None
    logging.getLogger('gguf').setLevel(logging.ERROR)
    return gguf


def arrange(name, array, architecture, n_head, n_kv_head):
    """A tensor of Hugging Face as GGUF has it, by its name there. GPT-2's kernels are [in, out] in Hugging Face and
    [out, in] in GGUF; RoPE rotates rows (j, j + width / 2) of a Llama's heads in Hugging Face, (2j, 2j + 1) in GGUF."""
    if architecture == 'gpt2' and re.search(r'(attn_qkv|attn_output|ffn_up|ffn_down)\.weight$', name):
        return array.T
    if architecture == 'llama' and (which := re.search(r'attn_([qk])\.weight$', name)):
        pairs = array.reshape(n_head if which[1] == 'q' else n_kv_head, 2, -1, array.shape[1])
        return pairs.swapaxes(1, 2).reshape(array.shape)
    return array


def write_gguf(path, config, family, names_on_disk, make_tensor, dtype, tokenizer):
    """Writes a model and its tokenizer as a new GGUF file, which appears when it is complete.

    config: its GPTConfig. family: its model_type. make_tensor(name): its tensors, by Hugging Face's names. dtype: of
    matrices, one of GGUF_DTYPES; vectors and positions stay in float32. tokenizer: HFTokenizer or CharTokenizer.
    Raises UserError for a model or tokenizer that llama.cpp does not have, and for a file that is there."""
    gguf = import_gguf()
    if family not in ARCHITECTURES:
        raise UserError(f'no GGUF is written of a {family}, only of {", ".join(ARCHITECTURES)}; save a folder, which '
                        "llama.cpp's convert_hf_to_gguf.py may take")
    kinds = {config.layer(i)[0] for i in range(config.n_layer)}
    if config.rope_scaling or kinds - {'full'} and not (kinds == {'window'} and config.window >= config.block_size):
        raise UserError('no GGUF is written of a model with sliding windows, layers without RoPE or rope scaling; save '
                        "a folder, which llama.cpp's convert_hf_to_gguf.py may take")
    if os.path.exists(path):
        raise UserError(f'{path} exists; remove it or choose another')
    architecture = ARCHITECTURES[family]
    settings, names = (GPT2_SETTINGS, GPT2_TENSORS) if architecture == 'gpt2' else (LLAMA_SETTINGS, LLAMA_TENSORS)
    unfinished = f'{path}.tmp-{os.getpid()}'
    writer = gguf.GGUFWriter(unfinished, architecture, use_temp_file=True)  # not all tensors in memory
    try:
        for key, field in settings.items():
            value = getattr(config, field)
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(f'{architecture}.{key}', value)
        add_tokenizer(writer, tokenizer, config.vocab_size)
        for name in names_on_disk:
            theirs = gguf_name(name, names)
            x = arrange(theirs, make_tensor(name), architecture, config.n_head, config.kv_heads)
            kind = tensor_type(theirs, x.shape, dtype, gguf.GGMLQuantizationType)
            writer.add_tensor(theirs, gguf.quantize(np.ascontiguousarray(x, np.float32), kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(unfinished, path)
    except OSError as error:
        raise UserError(f'cannot write {path}: {error}') from None
    finally:
        writer.close()
        if os.path.exists(unfinished):
            os.remove(unfinished)


def gguf_name(name, names):
    """GGUF's name of a tensor: blk.0.attn_q.weight is model.layers.0.self_attn.q_proj.weight."""
    _, layer, stem, leaf = re.fullmatch(r'(transformer\.h\.|model\.layers\.)?(?(1)(\d+)\.)(.+)\.(weight|bias)',
                                        name).groups()
    stem = names[re.sub(r'^(transformer|model)\.', '', stem)]
    return f'blk.{layer}.{stem}.{leaf}' if layer else f'{stem}.{leaf}'


def tensor_type(name, shape, dtype, types):
    """Of a tensor in GGUF. Rows that are not whole blocks of 32 are in float16 instead of q8_0, as in llama.cpp."""
    if dtype == 'float32' or len(shape) < 2 or name == 'position_embd.weight':
        return types.F32
    return types.Q8_0 if dtype == 'q8_0' and shape[-1] % 32 == 0 else types.F16


def add_tokenizer(writer, tokenizer, vocab_size):
    """Tokens, merges, end tokens and chat template. A vocabulary of characters is one of RWKV for llama.cpp: of those
    with the longest match, the one that needs no end token."""
    if hasattr(tokenizer, 'chars'):
        texts = [c if c.isprintable() and c != '\\' else ''.join(f'\\x{byte:02x}' for byte in c.encode())
                 for c in tokenizer.chars]
        writer.add_tokenizer_model('rwkv')
        special, types = {}, [NORMAL] * len(texts)
    else:
        texts, types, merges, split, special = read_bpe(tokenizer)
        writer.add_tokenizer_model('gpt2')
        writer.add_tokenizer_pre(split)
        writer.add_token_merges(merges)
    texts += [f'[PAD{i}]' for i in range(len(texts), vocab_size)]  # rows of the embedding without a token
    writer.add_token_list(texts)
    writer.add_token_types(types + [UNUSED] * (vocab_size - len(types)))
    for name, id in special.items():
        writer.add_uint32(f'tokenizer.ggml.{name}_token_id', id)
    writer.add_add_bos_token(bool(getattr(tokenizer, 'begins', False)))
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def read_bpe(tokenizer):
    """(texts, types, merges, tokenizer.ggml.pre, {'eos': id, ...}) of an HFTokenizer. Raises UserError for one that
    llama.cpp does not have."""
    description = json.loads(tokenizer.tokenizer.to_str())
    model = description['model']
    split = next((name for name, known in SPLITS.items() if known == (
        split_patterns(description['pre_tokenizer']), model.get('ignore_merges', False))), None)
    plain = not any(model.get(key) for key in (
        'dropout', 'unk_token', 'continuing_subword_prefix', 'end_of_word_suffix', 'byte_fallback'))
    normalizer = (description['normalizer'] or {}).get('type')
    if model['type'] != 'BPE' or not plain or split is None or normalizer not in (None, 'NFC'):
        raise UserError('llama.cpp has no equivalent of this tokenizer.json, which would be split differently: a GGUF '
                        f'needs a byte-level BPE that splits text as {", ".join(SPLITS)} do')
    texts = [f'[PAD{i}]' for i in range(tokenizer.vocab_size)]
    types = [UNUSED] * len(texts)
    for text, id in model['vocab'].items():
        texts[id], types[id] = text, NORMAL
    for token in description['added_tokens']:
        if token['lstrip'] or token['rstrip'] or token['single_word']:
            raise UserError(f"llama.cpp has no equivalent of the tokenizer's {token['content']!r}, which takes the "
                            'spaces beside it')
        texts[token['id']], types[token['id']] = token['content'], CONTROL if token['special'] else USER_DEFINED
    ends = [tokenizer.end_token] if tokenizer.end_token is not None else []
    ends += [id for id in tokenizer.stop_tokens if id not in ends]
    if not 1 <= len(ends) <= 3:
        raise UserError(f'the tokenizer has {len(ends)} end tokens, and a GGUF needs 1 to 3: name one as eos_token in '
                        'its tokenizer_config.json')
    bos = tokenizer.ids.get(tokenizer.special['bos_token'], ends[0])
    tokenizer.begins = tokenizer.encode('')
    if tokenizer.begins not in ([], [bos]):
        raise UserError(f'llama.cpp cannot begin each text with {tokenizer.begins}, as this tokenizer does')
    merges = [merge if isinstance(merge, str) else ' '.join(merge) for merge in model['merges']]
    return texts, types, merges, split, dict(zip(('eos', 'eot', 'eom'), ends)) | {'bos': bos}


def split_patterns(pre_tokenizer):
    """The patterns at which a tokenizer.json splits text before a byte-level BPE; None if it does anything else."""
    steps = (pre_tokenizer or {}).get('pretokenizers', [pre_tokenizer])
    patterns = []
    for step in steps:
        match step:
            case {'type': 'ByteLevel', 'add_prefix_space': False, 'use_regex': uses_regex} if step is steps[-1]:
                return (*patterns, GPT2_SPLIT) if uses_regex else tuple(patterns)
            case {'type': 'Digits', 'individual_digits': True}:
                patterns.append(r'\p{N}')
            case {'type': 'Split', 'behavior': 'Isolated', 'invert': False, 'pattern': {'Regex': pattern}}:
                patterns.append(pattern)
            case _:
                return None
