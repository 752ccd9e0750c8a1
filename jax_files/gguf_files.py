"""GGUF, llama.cpp's files of weights, settings and tokenizer in one.

References:
1) the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
2) llama.cpp's converter: https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py
"""
import atexit
import functools
import json
import logging
import os
import re
import shutil
import tempfile
from typing import NamedTuple

import numpy as np

from jax_files.tokenizers import write_char_tokenizer
from jax_flags import UserError, write_json

GGUF_DTYPES = ('float32', 'float16', 'q8_0')
GGUF_PATH = 'gguf_path'  # a file in the folder of open_gguf: the path of the weights
# model_type: llama.cpp's architecture. It computes a Mistral as a Llama
ARCHITECTURES = {'gpt2': 'gpt2', 'llama': 'llama', 'mistral': 'llama', 'qwen2': 'qwen2', 'qwen3': 'qwen3'}

# key of GGUF without the architecture: (field or property of GPTConfig, key of config.json)
GPT2_SETTINGS = {
    'context_length': ('block_size', 'n_positions'), 'embedding_length': ('n_embd', 'n_embd'),
    'block_count': ('n_layer', 'n_layer'), 'feed_forward_length': ('mlp_width', 'n_inner'),
    'attention.head_count': ('n_head', 'n_head'), 'attention.layer_norm_epsilon': ('norm_eps', 'layer_norm_epsilon')}
LLAMA_SETTINGS = {
    'context_length': ('block_size', 'max_position_embeddings'), 'embedding_length': ('n_embd', 'hidden_size'),
    'block_count': ('n_layer', 'num_hidden_layers'), 'feed_forward_length': ('mlp_width', 'intermediate_size'),
    'attention.head_count': ('n_head', 'num_attention_heads'),
    'attention.head_count_kv': ('kv_heads', 'num_key_value_heads'), 'attention.key_length': ('head_width', 'head_dim'),
    'attention.value_length': ('head_width', 'head_dim'), 'rope.dimension_count': ('head_width', 'head_dim'),
    'rope.freq_base': ('rope_theta', 'rope_theta'), 'attention.layer_norm_rms_epsilon': ('norm_eps', 'rms_norm_eps')}

GPT2_TENSORS = {  # Hugging Face's name, in a layer or outside: GGUF's
    'wte': 'token_embd', 'wpe': 'position_embd', 'ln_f': 'output_norm', 'lm_head': 'output', 'ln_1': 'attn_norm',
    'attn.c_attn': 'attn_qkv', 'attn.c_proj': 'attn_output', 'ln_2': 'ffn_norm', 'mlp.c_fc': 'ffn_up',
    'mlp.c_proj': 'ffn_down'}
LLAMA_TENSORS = {
    'embed_tokens': 'token_embd', 'norm': 'output_norm', 'lm_head': 'output', 'input_layernorm': 'attn_norm',
    'self_attn.q_proj': 'attn_q', 'self_attn.k_proj': 'attn_k', 'self_attn.v_proj': 'attn_v',
    'self_attn.o_proj': 'attn_output', 'self_attn.q_norm': 'attn_q_norm', 'self_attn.k_norm': 'attn_k_norm',
    'post_attention_layernorm': 'ffn_norm', 'mlp.gate_proj': 'ffn_gate', 'mlp.up_proj': 'ffn_up',
    'mlp.down_proj': 'ffn_down'}

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                r'|\s*[\r\n]+|\s+(?!\S)|\s+')
QWEN2_SPLIT = LLAMA3_SPLIT.replace('{1,3}', '')  # that of bpe:N, too
# llama.cpp's tokenizer.ggml.pre: the patterns at which it splits text before BPE, and ignore_merges of tokenizer.json
SPLITS = {'gpt-2': ((GPT2_SPLIT,), False), 'smollm': ((r'\p{N}', GPT2_SPLIT), False),
          'llama-bpe': ((LLAMA3_SPLIT,), True), 'qwen2': ((QWEN2_SPLIT,), False)}
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # types of tokens


def import_gguf():
    """The module gguf, imported where it is used: only some users need it."""
    try:
        import gguf
    except ImportError:
        raise UserError('GGUF files need the package gguf: pip install gguf') from None
    logging.getLogger('gguf').setLevel(logging.ERROR)
    return gguf


def why_no_gguf(config, family):
    """Of which models write_gguf does not write this one, or ''."""
    kinds = {config.layer(i)[0] for i in range(config.n_layer)}
    if config.rope_scaling or kinds - {'full'} and not (kinds == {'window'} and config.window >= config.block_size):
        return 'a model with sliding windows, layers without RoPE or rope scaling'
    return '' if family in ARCHITECTURES else f'a {family}, only of {", ".join(ARCHITECTURES)}'


def write_gguf(path, config, family, names_on_disk, make_tensor, dtype, tokenizer):
    """Writes a model and its tokenizer as a new GGUF file, which appears when it is complete.

    config: its GPTConfig. family: its model_type. make_tensor(name): its tensors by Hugging Face's names, rows in the
    order of GGUF. dtype: of matrices, one of GGUF_DTYPES; vectors and positions stay in float32. tokenizer: HFTokenizer
    or CharTokenizer.
    Raises UserError for a model or tokenizer that llama.cpp does not have, and for a file that is there."""
    gguf = import_gguf()
    if reason := why_no_gguf(config, family):
        raise UserError(f"no GGUF is written of {reason}; save a folder for llama.cpp's convert_hf_to_gguf.py")
    if os.path.exists(path):
        raise UserError(f'{path} exists; remove it or choose another')
    architecture = ARCHITECTURES[family]
    settings, names = (GPT2_SETTINGS, GPT2_TENSORS) if architecture == 'gpt2' else (LLAMA_SETTINGS, LLAMA_TENSORS)
    unfinished = f'{path}.tmp-{os.getpid()}'
    writer = gguf.GGUFWriter(unfinished, architecture, use_temp_file=True)  # not all tensors in memory
    try:
        for key, (field, _) in settings.items():
            value = getattr(config, field)
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(f'{architecture}.{key}', value)
        add_tokenizer(writer, tokenizer, config.vocab_size)
        for name in names_on_disk:
            theirs = gguf_name(name, names)
            x = make_tensor(name)
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
    """Tokens, merges, end tokens and chat template. Characters are written as RWKV's, which needs no end token."""
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
    """(texts, types, merges, tokenizer.ggml.pre, {'eos': id, ...}) of an HFTokenizer, or UserError."""
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


# -----------------------------------------------------------------------------
# reading

class Quantized(NamedTuple):
    """A tensor in GGUF's blocks, which dequantizes when it is indexed."""
    rows: np.ndarray  # uint8 [..., bytes]
    kind: int  # one of gguf.GGMLQuantizationType
    shape: tuple

    dtype = np.dtype(np.float32)

    def __getitem__(self, index):
        return import_gguf().dequantize(self.rows, self.kind)[index]


@functools.cache  # gguf takes seconds to read a vocabulary
def open_gguf(path):
    """(a folder with the config.json and the tokenizer of a GGUF file, until this process ends; {name: array} of its
    tensors by Hugging Face's names, memory-mapped, rows in the order of GGUF).

    Raises UserError for a file that is damaged, or of an architecture, quantization or tokenizer that is not known."""
    gguf = import_gguf()
    made = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    folder = os.path.join(made, os.path.basename(path).removesuffix('.gguf'))  # which messages name
    os.mkdir(folder)
    try:
        reader = gguf.GGUFReader(path)
        values = {key: field.contents() for key, field in reader.fields.items()}
        architecture = values.get('general.architecture')
        if architecture not in ARCHITECTURES.values():
            raise UserError(f'{path}: the architecture {architecture!r} is not supported; supported: '
                            f'{", ".join(dict.fromkeys(ARCHITECTURES.values()))}')
        files = write_tokenizer(values, path, folder)
    except UserError:
        raise
    except Exception as error:  # a damaged file can raise anything
        raise UserError(f'cannot read {path} ({error}); if it is damaged, copy or download it again') from None
    is_gpt2 = architecture == 'gpt2'
    names = {v: k for k, v in (GPT2_TENSORS if is_gpt2 else LLAMA_TENSORS).items()}
    tensors = {}
    for tensor in reader.tensors:
        try:
            shape = gguf.dequantize(tensor.data[:1], tensor.tensor_type).shape
        except NotImplementedError as error:
            raise UserError(f'{path}: {tensor.name} cannot be dequantized: {error}') from None
        block, stem, leaf = re.fullmatch(r'(?:blk\.(\d+)\.)?(.*?)(\.weight|\.bias|)', tensor.name).groups()
        prefix = '' if is_gpt2 or stem == 'output' else 'model.'
        layer = f'{"h" if is_gpt2 else "layers"}.{block}.' if block else ''
        is_plain = tensor.data.dtype != np.uint8
        tensors[f'{prefix}{layer}{names.get(stem, stem)}{leaf}'] = tensor.data if is_plain else Quantized(
            tensor.data, tensor.tensor_type, (*tensor.data.shape[:-1], shape[-1]))

    head = tensors.get('lm_head.weight')  # llama.cpp's converter writes GPT-2's, too, which may be quantized otherwise
    if is_gpt2 and head is not None and np.array_equal(head[...], tensors.get('wte.weight', head)[...]):
        del tensors['lm_head.weight']
    config = {'model_type': architecture, 'tie_word_embeddings': 'lm_head.weight' not in tensors,
              'vocab_size': len(values.get('tokenizer.ggml.tokens', ()))}
    settings = GPT2_SETTINGS if is_gpt2 else LLAMA_SETTINGS
    for name, value in values.items():
        key = name.removeprefix(f'{architecture}.')
        if key == name or key in ('vocab_size', 'tensor_data_layout') or value in (0, 'none'):
            continue
        if isinstance(value, float):
            value = float(str(np.float32(value)))  # 1e-05, not 9.999999747378752e-06
        if key not in settings or config.setdefault(settings[key][1], value) != value:
            raise UserError(f'{path}: {name}={value} is not supported')
    for name, content in (files | {'config.json': config, GGUF_PATH: {'path': path}}).items():
        write_json(os.path.join(folder, name), content)
    return folder, tensors


def write_tokenizer(values, path, folder):
    """Writes the tokenizer.json of a GGUF file's metadata, and returns {file: content} of what belongs to it."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    found = {key.removeprefix('tokenizer.ggml.'): value for key, value in values.items()}
    model, split, texts = found.get('model'), found.get('pre'), found.get('tokens', ())
    types = found.get('token_type') or [NORMAL] * len(texts)
    tokens = {text: (i, kind) for i, (text, kind) in enumerate(zip(texts, types)) if kind != UNUSED}
    if model == 'rwkv':
        chars = [bytes.fromhex(text.replace('\\x', '')).decode() if text[0] == '\\' else text for text in tokens]
        if all(len(c) == 1 for c in chars):
            write_char_tokenizer(''.join(chars), folder)
            return {}
    if model != 'gpt2' or split not in SPLITS:
        raise UserError(f'{path}: its tokenizer, {model} with pre={split}, is not supported; supported: gpt2 with '
                        f'{", ".join(SPLITS)}')
    patterns, ignore_merges = SPLITS[split]
    vocab, merges = {text: i for text, (i, _) in tokens.items()}, [tuple(m.split(' ')) for m in found['merges']]
    bpe = Tokenizer(models.BPE(vocab, merges, ignore_merges=ignore_merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence([
        *(pre_tokenizers.Split(Regex(pattern), 'isolated') for pattern in patterns),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    bpe.decoder = decoders.ByteLevel()
    bpe.add_tokens([AddedToken(text, normalized=False, special=kind == CONTROL)
                    for text, (_, kind) in tokens.items() if kind in (CONTROL, USER_DEFINED)])
    ids = [found.get(f'{name}_token_id') for name in ('bos', 'eos', 'eot', 'eom')]
    texts, ends = [None if id is None else bpe.id_to_token(id) for id in ids], [id for id in ids[1:] if id is not None]
    begins = found.get('add_bos_token', split == 'llama-bpe')
    if begins and texts[0]:
        bpe.post_processor = processors.TemplateProcessing(f'{texts[0]} $0', special_tokens=[(texts[0], ids[0])])
    bpe.save(os.path.join(folder, 'tokenizer.json'))
    return {'generation_config.json': {'eos_token_id': ends}, 'tokenizer_config.json': {
        'tokenizer_class': 'PreTrainedTokenizerFast', 'clean_up_tokenization_spaces': False,
        'bos_token': texts[0] if begins or ids[0] not in ends else None,  # write_gguf names one in any case
        'eos_token': texts[1], 'chat_template': values.get('tokenizer.chat_template')}}
