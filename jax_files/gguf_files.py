"""GGUF, llama.cpp's files of weights, settings and tokenizer in one.

References:
1) the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
2) llama.cpp's converter: https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py
"""
import atexit
import contextlib
import functools
import itertools
import json
import logging
import math
import os
import re
import shutil
import tempfile
from typing import NamedTuple

import numpy as np

from jax_files.tokenizer_library import GPT2_SPLIT, LLAMA3_SPLIT, QWEN2_SPLIT
from jax_files.tokenizers import write_char_tokenizer
from jax_flags import UserError, printable, write_json

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

REQUIRED = ('context_length', 'embedding_length', 'block_count', 'feed_forward_length', 'attention.head_count')
# The other keys of an architecture. What is in none of these tables is refused by name: it may change numbers.
WITHOUT_EFFECT = (  # whatever their value
    'vocab_size',  # llama.cpp counts the tokens
    'tensor_data_layout', 'rope.scaling.finetuned',
    'rope.scaling.original_context_length')  # of kinds of scaling that are refused
OFF_AT_0 = (
    'attention.clamp_kqv', 'attention.max_alibi_bias', 'attention.scale', 'attention.sliding_window',
    'attn_logit_softcapping', 'embedding_scale', 'expert_count', 'expert_feed_forward_length', 'expert_gating_func',
    'expert_group_count', 'expert_group_used_count', 'expert_shared_count', 'expert_shared_feed_forward_length',
    'expert_used_count', 'expert_weights_norm', 'expert_weights_scale', 'final_logit_softcapping',
    'leading_dense_block_count', 'logit_scale', 'nextn_predict_layers', 'pooling_type', 'residual_scale',
    'rope.scale_linear', 'rope.scaling.factor', 'use_parallel_residual')
OFF_AT_1 = ('attention.causal', 'embedding_scale', 'expert_weights_scale', 'logit_scale', 'residual_scale',
            'rope.scale_linear', 'rope.scaling.attn_factor', 'rope.scaling.factor')
OFF_AT_TEXT = {'rope.scaling.type': ('none', 'linear')}  # linear is by the factor, which is a key of its own

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

# llama.cpp's tokenizer.ggml.pre: the patterns at which it splits text before BPE, and ignore_merges of tokenizer.json
SPLITS = {'gpt-2': ((GPT2_SPLIT,), False), 'smollm': ((r'\p{N}', GPT2_SPLIT), False),
          'llama-bpe': ((LLAMA3_SPLIT,), True), 'qwen2': ((QWEN2_SPLIT,), False)}
SAME_SPLITS = {'llama3': 'llama-bpe', 'llama-v3': 'llama-bpe', 'deepseek-r1-qwen': 'qwen2'}  # other names of them
BEGINS_BY_DEFAULT = ('llama-bpe',)  # where llama.cpp puts the beginning token unless add_bos_token says otherwise
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # types of tokens


def import_gguf():
    """The module gguf, imported where it is used: only some users need it."""
    try:
        import gguf
    except ImportError:
        raise UserError('GGUF files need the package gguf: pip install gguf') from None
    logging.getLogger('gguf').setLevel(logging.ERROR)
    return gguf


@contextlib.contextmanager
def reading(path):
    """Makes one UserError of whatever a damaged file raises, around every call of gguf and of what its values meet."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = printable(str(error)) or type(error).__name__
        raise UserError(f'cannot read {path} ({reason}); if it is damaged, copy or download it again') from None


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
        is_special = token['special'] or token['id'] in tokenizer.special_ids
        texts[token['id']], types[token['id']] = token['content'], CONTROL if is_special else USER_DEFINED
    ends = [tokenizer.end_token] if tokenizer.end_token is not None else []
    ends += [id for id in tokenizer.stop_tokens if id not in ends]
    if not 1 <= len(ends) <= 3:
        raise UserError(f'the tokenizer has {len(ends)} end tokens, and a GGUF needs 1 to 3: name one as eos_token in '
                        'its tokenizer_config.json')
    bos = tokenizer.ids.get(tokenizer.special.get('bos_token'), ends[0])
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
    path: str  # of the file

    dtype = np.dtype(np.float32)

    def __getitem__(self, index):
        with reading(self.path):
            return import_gguf().dequantize(self.rows, self.kind)[index]


MAX_READS = 2**22  # of numbers and texts: a vocabulary of 262,144 tokens with as many merges takes half of them


def read_gguf(path):
    """gguf's reader of a file. It takes any size for what the header says it is, and reads what lies past the end as
    nothing: a list of 2^40 numbers has no end. Here both raise a ValueError."""
    gguf = import_gguf()

    class Reader(gguf.GGUFReader):
        n_reads = 0

        def _get(self, offset, dtype, count=1, override_order=None):
            self.n_reads += 1
            if self.n_reads > MAX_READS:
                raise ValueError('its header is longer than that of any model')
            if int(offset) + int(count) * np.dtype(dtype).itemsize > len(self.data):
                raise ValueError('a size in its header is larger than the file')
            return super()._get(offset, dtype, count, override_order)

    if not os.path.isfile(path):
        raise UserError(f'cannot read {path}: there is no such file')
    reader = Reader(path)
    if reader.byte_order != 'I':
        raise UserError(f"{path} has numbers in another byte order than this machine's; convert the model again")
    return reader


made_folders = {}  # {the folder of a GGUF file: {name: array}}: a stranger's folder is none of them


def gguf_tensors(folder):
    """{name: array} of the GGUF file whose config.json and tokenizer open_gguf has put into a folder."""
    if folder not in made_folders:
        raise UserError(f'{os.path.join(folder, GGUF_PATH)} is not of this program; give the path of the .gguf file')
    return made_folders[folder]


@functools.cache  # gguf takes seconds to read a vocabulary
def open_gguf(path):
    """The folder with the config.json and the tokenizer of a GGUF file, until this process ends; gguf_tensors(folder)
    are its tensors by Hugging Face's names, memory-mapped, rows in the order of GGUF.

    Raises UserError for a file that is damaged, or of an architecture, quantization or tokenizer that is not known."""
    import_gguf()
    made = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    folder = os.path.join(made, os.path.basename(path).removesuffix('.gguf'))  # which messages name
    os.mkdir(folder)
    with reading(path):
        reader = read_gguf(path)
        values = {key: field.contents() for key, field in reader.fields.items()}
        architecture = check_kind(values, path)
        files = write_tokenizer(values, path, folder)
        tensors, factors = read_gguf_tensors(reader, architecture, path)
        config = read_settings(values, architecture, path)
        config['tie_word_embeddings'] = 'lm_head.weight' not in tensors
        if factors is not None:
            config['rope_scaling'] = read_rope_factors(factors, config, path)
    for name, content in (files | {'config.json': config, GGUF_PATH: {'path': path}}).items():
        write_json(os.path.join(folder, name), content)
    made_folders[folder] = tensors
    return folder


def check_kind(values, path):
    """The architecture of a GGUF file, given its {key: value}. UserError unless it is a whole model that GPT knows."""
    architecture = values.get('general.architecture')
    if architecture not in list(ARCHITECTURES.values()):
        raise UserError(f'{path}: the architecture {architecture!r} is not supported; supported: '
                        f'{", ".join(dict.fromkeys(ARCHITECTURES.values()))}')
    kind, n_parts = values.get('general.type', 'model'), values.get('split.count', 0)
    if kind != 'model':
        raise UserError(f"{path} is no model but of the kind {kind!r}; give the model's file")
    if n_parts > 1:
        raise UserError(f"{path} is one of {n_parts} parts; join them with llama.cpp's llama-gguf-split --merge")
    return architecture


def read_gguf_tensors(reader, architecture, path):
    """({name: array} by Hugging Face's names, the array rope_freqs.weight or None) of a GGUF file."""
    gguf = import_gguf()
    is_gpt2 = architecture == 'gpt2'
    names = {theirs: ours for ours, theirs in (GPT2_TENSORS if is_gpt2 else LLAMA_TENSORS).items()}
    tensors, factors = {}, None
    for tensor in reader.tensors:
        if not tensor.name.isprintable() or not tensor.n_elements:
            raise UserError(f'{path}: the tensor {tensor.name!r} of the shape {tensor.shape.tolist()} is none of a '
                            'model; copy or download the file again')
        if tensor.name == 'rope_freqs.weight':
            factors = gguf.dequantize(tensor.data, tensor.tensor_type)
            continue
        try:
            shape = gguf.dequantize(tensor.data[:1], tensor.tensor_type).shape
        except NotImplementedError as error:
            raise UserError(f'{path}: {tensor.name} cannot be dequantized: {error}') from None
        block, stem, leaf = re.fullmatch(r'(?:blk\.(\d+)\.)?(.*?)(\.weight|\.bias|)', tensor.name).groups()
        prefix = '' if is_gpt2 or stem == 'output' else 'model.'
        layer = f'{"h" if is_gpt2 else "layers"}.{block}.' if block else ''
        is_plain = tensor.data.dtype != np.uint8
        tensors[f'{prefix}{layer}{names.get(stem, stem)}{leaf}'] = tensor.data if is_plain else Quantized(
            tensor.data, tensor.tensor_type, (*tensor.data.shape[:-1], shape[-1]), path)

    head = tensors.get('lm_head.weight')  # llama.cpp's converter writes GPT-2's, too, which may be quantized otherwise
    if is_gpt2 and head is not None and np.array_equal(head[...], tensors.get('wte.weight', head)[...]):
        del tensors['lm_head.weight']
    return tensors, factors


def read_settings(values, architecture, path):
    """The config.json of a GGUF file, given its {key: value}. Raises UserError for a key that is missing, and for one
    that this program does not compute with."""
    settings = GPT2_SETTINGS if architecture == 'gpt2' else LLAMA_SETTINGS
    found = {key.removeprefix(f'{architecture}.'): value for key, value in values.items()
             if key.startswith(f'{architecture}.')}
    epsilon = next(key for key in settings if key.endswith('epsilon'))
    for key in (*REQUIRED, epsilon):
        if key not in found:
            raise UserError(f'{path} lacks {architecture}.{key}; convert the model again')
    config = {'model_type': architecture, 'vocab_size': len(values.get('tokenizer.ggml.tokens', ()))}
    for key, value in found.items():
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]  # one for each layer
        if isinstance(value, float):
            value = float(str(np.float32(value)))  # 1e-05, not 9.999999747378752e-06
            if not math.isfinite(value):
                raise UserError(f'{path}: {architecture}.{key}={value} is no number; convert the model again')
        if key in settings:
            is_known = not isinstance(value, list) and config.setdefault(settings[key][1], value) == value
        else:
            is_known = has_no_effect(key, value, found)
        if not is_known:
            raise UserError(f'{path}: {architecture}.{key}={value} is not supported')
    if architecture != 'gpt2':  # llama.cpp's defaults, where config.json has others
        config.setdefault('num_key_value_heads', config['num_attention_heads'])
        config.setdefault('head_dim', config['hidden_size'] // config['num_attention_heads'])
        config.setdefault('rope_theta', 10000.0)
    return config


def has_no_effect(key, value, found):
    """Whether llama.cpp computes the same without a key of the architecture, among all that are `found`."""
    if key == 'attention.sliding_window' and value >= found['context_length']:
        return True
    return (key in WITHOUT_EFFECT or value == 0 and key in OFF_AT_0 or value == 1 and key in OFF_AT_1
            or value in OFF_AT_TEXT.get(key, ()))


def read_rope_factors(factors, config, path):
    """The rope_scaling of config.json that divides the frequency of each pair of a head by its factor, as llama.cpp
    does with rope_freqs.weight: Llama 3's where its settings make these factors, else longrope's, which lists them."""
    theta, width, length = config['rope_theta'], config['head_dim'], config['max_position_embeddings']
    if factors.shape != (width // 2,) or not np.isfinite(factors).all() or (factors <= 0).any():
        raise UserError(f'{path}: rope_freqs.weight {factors.shape} is not a positive factor for each of the '
                        f'{width // 2} pairs of a head')
    if (factors == 1).all():
        return None
    frequencies = theta ** (-np.arange(0, width, 2) / width)
    originals = [8192, *(2**n for n in range(4, 21))]
    for original, low, high in itertools.product(originals, (1.0, 2.0), (4.0, 2.0, 8.0, 16.0)):
        factor = float(factors.max())
        rotations = frequencies * original / (2 * np.pi)
        keep = np.clip((rotations - low) / max(high - low, 1e-9), 0, 1)
        if np.allclose(1 / (keep + (1 - keep) / factor), factors, rtol=1e-5, atol=0):
            return {'rope_type': 'llama3', 'factor': factor, 'low_freq_factor': low, 'high_freq_factor': high,
                    'original_max_position_embeddings': original}
    listed = [float(factor) for factor in factors]
    return {'rope_type': 'longrope', 'short_factor': listed, 'long_factor': listed, 'factor': 1.0,
            'attention_factor': 1.0, 'original_max_position_embeddings': length}


def write_tokenizer(values, path, folder):
    """Writes the tokenizer.json of a GGUF file's metadata, and returns {file: content} of what belongs to it."""
    found = {key.removeprefix('tokenizer.ggml.'): value for key, value in values.items()}
    model, texts = found.get('model'), found.get('tokens')
    if model is None or not texts:
        raise UserError(f'{path} holds no tokenizer: it lacks tokenizer.ggml.model or tokenizer.ggml.tokens')
    types = found.get('token_type') or [NORMAL] * len(texts)
    if len(types) != len(texts):
        raise UserError(f'{path}: {len(texts)} tokens have {len(types)} types; convert the model again')
    tokens = {}
    for id, (text, kind) in enumerate(zip(texts, types)):
        if kind == UNUSED:
            continue
        text = text or f'[EMPTY_{id}]'  # as llama.cpp calls it
        if text in tokens:
            raise UserError(f'{path}: its vocabulary has {text!r} twice; convert the model again')
        tokens[text] = (id, kind)
    if model == 'rwkv':
        chars = [bytes.fromhex(text.replace('\\x', '')).decode() if text[0] == '\\' else text for text in tokens]
        if all(len(c) == 1 for c in chars):
            write_char_tokenizer(''.join(chars), folder)
            return {}
    split = SAME_SPLITS.get(found.get('pre'), found.get('pre'))
    if model != 'gpt2' or split not in SPLITS:
        raise UserError(f'{path}: its tokenizer, {model} with pre={split}, is not supported; supported: gpt2 with '
                        f'{", ".join(SPLITS)}')
    if 'merges' not in found:
        raise UserError(f'{path}: its vocabulary, a BPE of the kind {model}, lacks its merges (tokenizer.ggml.merges), '
                        'without which text cannot be split; convert the model again')
    return write_bpe_tokenizer(values, found, split, tokens, path, folder)


def write_bpe_tokenizer(values, found, split, tokens, path, folder):
    """write_tokenizer of a byte-level BPE. found: {key without tokenizer.ggml: value}. tokens: {text: (id, type)}."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    patterns, ignore_merges = SPLITS[split]
    vocab, merges = {text: i for text, (i, _) in tokens.items()}, [tuple(m.split(' ')) for m in found['merges']]
    bpe = Tokenizer(models.BPE(vocab, merges, ignore_merges=ignore_merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence([
        *(pre_tokenizers.Split(Regex(pattern), 'isolated') for pattern in patterns),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    bpe.decoder = decoders.ByteLevel()
    bpe.add_tokens([AddedToken(text, normalized=False, special=kind == CONTROL)
                    for text, (_, kind) in tokens.items() if kind in (CONTROL, USER_DEFINED)])
    ids = {name: found.get(f'{name}_token_id') for name in ('bos', 'eos', 'eot', 'eom')}
    for name, id in ids.items():
        if id is not None and bpe.id_to_token(id) is None:
            raise UserError(f'{path}: tokenizer.ggml.{name}_token_id={id} is none of its tokens')
    texts = {name: None if id is None else bpe.id_to_token(id) for name, id in ids.items()}
    ends = list(dict.fromkeys(id for name, id in ids.items() if name != 'bos' and id is not None))
    adds = {'bos': found.get('add_bos_token', split in BEGINS_BY_DEFAULT), 'eos': found.get('add_eos_token', False)}
    if any(adds.values()):
        bpe.post_processor = add_around(adds, ids, texts, path)
    bpe.save(os.path.join(folder, 'tokenizer.json'))
    is_bos = adds['bos'] or ids['bos'] not in ends  # write_gguf names one in any case
    return {'generation_config.json': {'eos_token_id': ends}, 'tokenizer_config.json': {
        'tokenizer_class': 'PreTrainedTokenizerFast', 'clean_up_tokenization_spaces': False,
        'bos_token': texts['bos'] if is_bos else None, 'eos_token': texts['eos'],
        'chat_template': values.get('tokenizer.chat_template')}}


def add_around(adds, ids, texts, path):
    """The post-processor that puts the tokens `adds`, {'bos': whether, 'eos': whether}, around each text. UserError for
    one that the file does not name, in whose place llama.cpp takes token 11."""
    from tokenizers import processors
    for name in adds:
        if adds[name] and ids[name] is None:
            raise UserError(f'{path}: add_{name}_token is true, and there is no {name}_token_id; convert the model '
                            'again')
    template = [texts['bos']] * bool(adds['bos']) + ['$A'] + [texts['eos']] * bool(adds['eos'])
    return processors.TemplateProcessing(template, special_tokens=list(dict.fromkeys(
        (texts[name], ids[name]) for name in adds if adds[name])))
