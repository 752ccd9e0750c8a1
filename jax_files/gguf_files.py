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
import operator
import os
import re
import shutil
import tempfile
from typing import NamedTuple

import numpy as np

from jax_files.tokenizer_classes import AS_FILED, GGUF_PATH
from jax_files.tokenizer_library import GPT2_SPLIT, LLAMA3_SPLIT, QWEN2_SPLIT
from jax_files.tokenizers import write_char_tokenizer
from jax_flags import UserError, printable, write_json

GGUF_DTYPES = ('float32', 'float16', 'q8_0')

# {model_type of config.json: architecture of llama.cpp}. It computes a Mistral as a Llama.
ARCHITECTURES = {
    'gpt2': 'gpt2',
    'llama': 'llama',
    'mistral': 'llama',
    'qwen2': 'qwen2',
    'qwen3': 'qwen3',
    'qwen3_moe': 'qwen3moe',
}

# {key of GGUF without the architecture: (field or property of GPTConfig, key of config.json)}
GPT2_SETTINGS = {
    'context_length': ('block_size', 'n_positions'),
    'embedding_length': ('n_embd', 'n_embd'),
    'block_count': ('n_layer', 'n_layer'),
    'feed_forward_length': ('mlp_width', 'n_inner'),
    'attention.head_count': ('n_head', 'n_head'),
    'attention.layer_norm_epsilon': ('norm_eps', 'layer_norm_epsilon'),
}
LLAMA_SETTINGS = {
    'context_length': ('block_size', 'max_position_embeddings'),
    'embedding_length': ('n_embd', 'hidden_size'),
    'block_count': ('n_layer', 'num_hidden_layers'),
    'feed_forward_length': ('mlp_width', 'intermediate_size'),
    'attention.head_count': ('n_head', 'num_attention_heads'),
    'attention.head_count_kv': ('kv_heads', 'num_key_value_heads'),
    'attention.key_length': ('head_width', 'head_dim'),
    'attention.value_length': ('head_width', 'head_dim'),
    'rope.dimension_count': ('head_width', 'head_dim'),
    'rope.freq_base': ('rope_theta', 'rope_theta'),
    'attention.layer_norm_rms_epsilon': ('norm_eps', 'rms_norm_eps'),
}
QWEN3_MOE_SETTINGS = {
    **LLAMA_SETTINGS,
    'expert_count': ('moe.n_expert', 'num_experts'),
    'expert_used_count': ('moe.n_used', 'num_experts_per_tok'),
    'expert_feed_forward_length': ('moe.width', 'moe_intermediate_size'),
}
SETTINGS = {'gpt2': GPT2_SETTINGS, 'qwen3moe': QWEN3_MOE_SETTINGS}  # the others have Llama's

REQUIRED = (
    'context_length', 'embedding_length', 'block_count', 'feed_forward_length',
    'attention.head_count')
REQUIRED_OF_EXPERTS = ('expert_count', 'expert_used_count')

# The other keys of an architecture. A key that is in none of these tables is refused by name: it
# may change numbers.
WITHOUT_EFFECT = (  # whatever their value is
    'vocab_size',  # llama.cpp counts the tokens
    'tensor_data_layout', 'rope.scaling.finetuned',
    'rope.scaling.original_context_length')  # only kinds of scaling that are refused read it
OFF_AT_0 = (
    'attention.clamp_kqv', 'attention.max_alibi_bias', 'attention.scale',
    'attention.sliding_window', 'attn_logit_softcapping', 'embedding_scale', 'expert_count',
    'expert_feed_forward_length', 'expert_gating_func', 'expert_group_count',
    'expert_group_used_count', 'expert_shared_count', 'expert_shared_feed_forward_length',
    'expert_used_count', 'expert_weights_norm', 'expert_weights_scale', 'final_logit_softcapping',
    'leading_dense_block_count', 'logit_scale', 'nextn_predict_layers', 'pooling_type',
    'residual_scale', 'rope.scale_linear', 'rope.scaling.factor', 'use_parallel_residual')
OFF_AT_1 = (
    'attention.causal', 'embedding_scale', 'expert_weights_scale', 'logit_scale',
    'residual_scale', 'rope.scale_linear', 'rope.scaling.attn_factor', 'rope.scaling.factor')
# Linear scaling divides by rope.scaling.factor, which is a key of its own.
OFF_AT_TEXT = {'rope.scaling.type': ('none', 'linear')}

# {Hugging Face's name of a tensor, in a layer or outside of the layers: GGUF's name}
GPT2_TENSORS = {
    'wte': 'token_embd',
    'wpe': 'position_embd',
    'ln_f': 'output_norm',
    'lm_head': 'output',
    'ln_1': 'attn_norm',
    'attn.c_attn': 'attn_qkv',
    'attn.c_proj': 'attn_output',
    'ln_2': 'ffn_norm',
    'mlp.c_fc': 'ffn_up',
    'mlp.c_proj': 'ffn_down',
}
LLAMA_TENSORS = {
    'embed_tokens': 'token_embd',
    'norm': 'output_norm',
    'lm_head': 'output',
    'input_layernorm': 'attn_norm',
    'self_attn.q_proj': 'attn_q',
    'self_attn.k_proj': 'attn_k',
    'self_attn.v_proj': 'attn_v',
    'self_attn.o_proj': 'attn_output',
    'self_attn.q_norm': 'attn_q_norm',
    'self_attn.k_norm': 'attn_k_norm',
    'post_attention_layernorm': 'ffn_norm',
    'mlp.gate_proj': 'ffn_gate',
    'mlp.up_proj': 'ffn_up',
    'mlp.down_proj': 'ffn_down',
}
# The experts of a layer are one tensor, which has no name on Hugging Face: 'stacked' in LAYOUTS.
QWEN3_MOE_TENSORS = {
    **LLAMA_TENSORS,
    'mlp.gate': 'ffn_gate_inp',
    'mlp.experts.gate_proj': 'ffn_gate_exps',
    'mlp.experts.up_proj': 'ffn_up_exps',
    'mlp.experts.down_proj': 'ffn_down_exps',
}
TENSORS = {'gpt2': GPT2_TENSORS, 'qwen3moe': QWEN3_MOE_TENSORS}  # the others have Llama's

# {tokenizer.ggml.pre of llama.cpp: (the patterns at which it splits text before BPE,
# ignore_merges of tokenizer.json)}
SPLITS = {
    'gpt-2': ((GPT2_SPLIT,), False),
    'smollm': ((r'\p{N}', GPT2_SPLIT), False),
    'llama-bpe': ((LLAMA3_SPLIT,), True),
    'qwen2': ((QWEN2_SPLIT,), False),
}
# {another name of a split: its name in SPLITS}
SAME_SPLITS = {
    'llama3': 'llama-bpe', 'llama-v3': 'llama-bpe', 'deepseek-r1-qwen': 'qwen2', 'mpt': 'gpt-2',
    'starcoder': 'smollm', 'refact': 'smollm', 'command-r': 'smollm'}
# The splits with which llama.cpp puts the beginning token, unless add_bos_token says otherwise.
BEGINS_BY_DEFAULT = ('llama-bpe',)

# The types of tokens in GGUF.
NORMAL = 1
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5


def import_gguf():
    """Imports the module gguf and returns it. Only some users need it, so it may be missing."""
    try:
        import gguf
    except ImportError:
        raise UserError('GGUF files need the package gguf: pip install gguf') from None
    logging.getLogger('gguf').setLevel(logging.ERROR)
    return gguf


@contextlib.contextmanager
def reading(path):
    """Makes one UserError of whatever a damaged file raises. It stands around every call of gguf,
    and around the code that meets the values of the file."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = printable(str(error)) or type(error).__name__
        raise UserError(f'cannot read {path} ({reason}); if it is damaged, copy or download it '
                        'again') from None


# -----------------------------------------------------------------------------
# writing

def why_no_gguf(config, family):
    """Returns '' if write_gguf can write this model, else the kind of models that it belongs to and
    that write_gguf does not write."""
    # A window that is as long as the longest text hides nothing.
    kinds = {config.layer(i)[0] for i in range(config.n_layer)}
    has_idle_windows = kinds == {'window'} and config.window >= config.block_size
    has_other_layers = bool(kinds - {'full'}) and not has_idle_windows
    if config.rope_scaling or has_other_layers:
        return 'a model with sliding windows, layers without RoPE or rope scaling'
    if family not in ARCHITECTURES:
        return f'a {family}, only of {", ".join(ARCHITECTURES)}'
    # llama.cpp's Qwen3-MoE
    has_experts_alone = all(config.layer(i)[1] for i in range(config.n_layer))
    if config.moe and not (has_experts_alone and config.moe.normalize):
        return ('a mixture of experts with layers without experts, or with weights of experts that '
                'do not sum to 1')
    return ''


def write_gguf(path, config, family, names_on_disk, make_tensor, dtype, tokenizer):
    """Writes a model and its tokenizer as a new GGUF file, which appears when it is complete.

    config: the model's GPTConfig. family: its model_type. names_on_disk: Hugging Face's names of
    its tensors. make_tensor(name): returns the tensor of that name, with its rows in the order of
    GGUF. dtype: the type of matrices, one of GGUF_DTYPES; vectors and positions stay in float32.
    tokenizer: an HFTokenizer or a CharTokenizer.

    Raises UserError for a model or tokenizer that llama.cpp does not have, and for a file that is
    there."""
    gguf = import_gguf()
    reason = why_no_gguf(config, family)
    if reason:
        raise UserError(f'no GGUF is written of {reason}; save a folder for '
                        "llama.cpp's convert_hf_to_gguf.py")
    if os.path.exists(path):
        raise UserError(f'{path} exists; remove it or choose another')

    # The tables of this architecture.
    architecture = ARCHITECTURES[family]
    settings = SETTINGS.get(architecture, LLAMA_SETTINGS)
    names = TENSORS.get(architecture, LLAMA_TENSORS)

    # The temporary file holds the tensors until the end: memory need not hold all of them.
    unfinished = f'{path}.tmp-{os.getpid()}'
    writer = gguf.GGUFWriter(unfinished, architecture, use_temp_file=True)
    try:
        # The settings, each with its type.
        for key, (field, _) in settings.items():
            value = operator.attrgetter(field)(config)
            if isinstance(value, float):
                writer.add_float32(f'{architecture}.{key}', value)
            else:
                writer.add_uint32(f'{architecture}.{key}', value)

        add_tokenizer(writer, tokenizer, config.vocab_size)

        # The tensors, one after the other.
        for name in names_on_disk:
            theirs = gguf_name(name, names)
            x = make_tensor(name)
            kind = tensor_type(theirs, x.shape, dtype, gguf.GGMLQuantizationType)
            blocks = gguf.quantize(np.ascontiguousarray(x, np.float32), kind)
            writer.add_tensor(theirs, blocks, raw_dtype=kind)

        # All of it goes into the unfinished file, which then gets its name.
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
    """Returns GGUF's name of a tensor: blk.0.attn_q.weight for
    model.layers.0.self_attn.q_proj.weight.

    names: {Hugging Face's name: GGUF's name}, as LLAMA_TENSORS."""
    pattern = r'(transformer\.h\.|model\.layers\.)?(?(1)(\d+)\.)(.+)\.(weight|bias)'
    _, layer, stem, leaf = re.fullmatch(pattern, name).groups()
    theirs = names[re.sub(r'^(transformer|model)\.', '', stem)]
    if layer:
        return f'blk.{layer}.{theirs}.{leaf}'
    return f'{theirs}.{leaf}'


def tensor_type(name, shape, dtype, types):
    """Returns the type of a tensor in GGUF, one of `types`, which is gguf.GGMLQuantizationType.

    Rows that are not whole blocks of 32 are in float16 instead of q8_0, as llama.cpp has them; so
    are the tensors that stay in float32, the router of experts among them."""
    is_vector = len(shape) < 2
    is_kept = name == 'position_embd.weight' or name.endswith('.ffn_gate_inp.weight')
    if dtype == 'float32' or is_vector or is_kept:
        return types.F32
    has_whole_blocks = shape[-1] % 32 == 0
    if dtype == 'q8_0' and has_whole_blocks:
        return types.Q8_0
    return types.F16


def add_tokenizer(writer, tokenizer, vocab_size):
    """Adds the tokens, merges, end tokens and chat template of a tokenizer to a GGUFWriter.

    A vocabulary of characters is written as one of RWKV: of llama.cpp's tokenizers that take the
    longest match, it is the one that needs no end token."""
    if hasattr(tokenizer, 'chars'):
        texts = [escape_char(c) for c in tokenizer.chars]
        types = [NORMAL] * len(texts)
        special = {}
        writer.add_tokenizer_model('rwkv')
    else:
        texts, types, merges, split, special = read_bpe(tokenizer)
        writer.add_tokenizer_model('gpt2')
        writer.add_tokenizer_pre(split)
        writer.add_token_merges(merges)

    # The embedding may have more rows than there are tokens.
    texts += [f'[PAD{i}]' for i in range(len(texts), vocab_size)]
    types = types + [UNUSED] * (vocab_size - len(types))
    writer.add_token_list(texts)
    writer.add_token_types(types)

    # What begins and ends a text, and how a chat is written.
    for name, id in special.items():
        writer.add_uint32(f'tokenizer.ggml.{name}_token_id', id)
    writer.add_add_bos_token(bool(getattr(tokenizer, 'begins', False)))
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def escape_char(c):
    """Returns a character as a token of RWKV: \\x and its bytes, if it is not printable."""
    if c.isprintable() and c != '\\':
        return c
    return ''.join(f'\\x{byte:02x}' for byte in c.encode())


def read_bpe(tokenizer):
    """Returns what a GGUF file says about an HFTokenizer: (texts, types, merges,
    tokenizer.ggml.pre, {'eos': id, ...}). texts and types have one entry for each id.

    Raises UserError for a tokenizer that llama.cpp does not have."""
    description = json.loads(tokenizer.tokenizer.to_str())
    model = description['model']
    split = known_split(description)
    if split is None:
        raise UserError('llama.cpp has no equivalent of this tokenizer.json, which would be split '
                        'differently: a GGUF needs a byte-level BPE that splits text as '
                        f'{", ".join(SPLITS)} do')

    # The vocabulary; an id that it leaves out is padding.
    texts = [f'[PAD{i}]' for i in range(tokenizer.vocab_size)]
    types = [UNUSED] * len(texts)
    for text, id in model['vocab'].items():
        texts[id] = text
        types[id] = NORMAL

    # Added tokens are found in the text before it is split.
    for token in description['added_tokens']:
        if token['lstrip'] or token['rstrip'] or token['single_word']:
            raise UserError("llama.cpp has no equivalent of the tokenizer's "
                            f"{token['content']!r}, which takes the spaces beside it")
        is_special = token['special'] or token['id'] in tokenizer.special_ids
        texts[token['id']] = token['content']
        types[token['id']] = CONTROL if is_special else USER_DEFINED

    # GGUF has three places for tokens that end a text.
    ends = [] if tokenizer.end_token is None else [tokenizer.end_token]
    ends += [id for id in tokenizer.stop_tokens if id not in ends]
    if not 1 <= len(ends) <= 3:
        raise UserError(f'the tokenizer has {len(ends)} end tokens, and a GGUF needs 1 to 3: name '
                        'one as eos_token in its tokenizer_config.json')
    special = dict(zip(('eos', 'eot', 'eom'), ends))

    # It has one token with which a text begins.
    bos = tokenizer.ids.get(tokenizer.special.get('bos_token'), ends[0])
    special['bos'] = bos
    tokenizer.begins = tokenizer.encode('')
    if tokenizer.begins not in ([], [bos]):
        raise UserError(f'llama.cpp cannot begin each text with {tokenizer.begins}, as this '
                        'tokenizer does')

    # A merge is a text, or the list of its two parts.
    merges = [merge if isinstance(merge, str) else ' '.join(merge) for merge in model['merges']]
    return texts, types, merges, split, special


def known_split(description):
    """Returns the name in SPLITS with which llama.cpp does the same as a tokenizer.json, or None.

    description: the object in the tokenizer.json."""
    # llama.cpp has none of these options of a BPE, and normalizes as NFC at most.
    model = description['model']
    options = (
        'dropout', 'unk_token', 'continuing_subword_prefix', 'end_of_word_suffix', 'byte_fallback')
    is_plain = model['type'] == 'BPE' and not any(model.get(key) for key in options)
    normalizer = (description['normalizer'] or {}).get('type')
    if not is_plain or normalizer not in (None, 'NFC'):
        return None

    # Its patterns are known by name.
    wanted = (split_patterns(description['pre_tokenizer']), model.get('ignore_merges', False))
    for name, known in SPLITS.items():
        if known == wanted:
            return name
    return None


def split_patterns(pre_tokenizer):
    """Returns the patterns at which a tokenizer.json splits text before a byte-level BPE, or None
    if it does anything else. pre_tokenizer: the object of that name in the tokenizer.json."""
    steps = (pre_tokenizer or {}).get('pretokenizers', [pre_tokenizer])
    patterns = []
    for step in steps:
        is_last = step is steps[-1]

        # Each step is a split at a pattern; the last one turns bytes into letters.
        match step:
            case {'type': 'ByteLevel', 'add_prefix_space': False,
                  'use_regex': uses_regex} if is_last:
                if uses_regex:
                    patterns.append(GPT2_SPLIT)
                return tuple(patterns)
            case {'type': 'Digits', 'individual_digits': True}:
                patterns.append(r'\p{N}')
            case {'type': 'Split', 'behavior': 'Isolated', 'invert': False,
                  'pattern': {'Regex': pattern}}:
                patterns.append(pattern)
            case _:
                return None
    return None


# -----------------------------------------------------------------------------
# reading

class Quantized(NamedTuple):
    """A tensor in GGUF's blocks, which dequantizes when it is indexed."""
    rows: np.ndarray  # uint8 [..., bytes]
    kind: int  # one of gguf.GGMLQuantizationType
    shape: tuple
    path: str  # the file that it is from

    dtype = np.dtype(np.float32)

    def __getitem__(self, index):
        with reading(self.path):
            if isinstance(index, int):  # one expert of a stack
                return import_gguf().dequantize(self.rows[index], self.kind)
            return import_gguf().dequantize(self.rows, self.kind)[index]


# The most numbers and texts that a header may have. A vocabulary of 262,144 tokens with as many
# merges takes half of them.
MAX_READS = 2**22


def read_gguf(path):
    """Returns gguf's reader of a file, with limits.

    gguf takes any size for what the header says it is, and reads what lies past the end of the file
    as nothing: a list of 2^40 numbers has no end. Here both raise a ValueError."""
    gguf = import_gguf()

    class Reader(gguf.GGUFReader):
        n_reads = 0

        def _get(self, offset, dtype, count=1, override_order=None):
            self.n_reads += 1
            if self.n_reads > MAX_READS:
                raise ValueError('its header is longer than that of any model')
            end = int(offset) + int(count) * np.dtype(dtype).itemsize
            if end > len(self.data):
                raise ValueError('a size in its header is larger than the file')
            return super()._get(offset, dtype, count, override_order)

    # Read the header.
    if not os.path.isfile(path):
        raise UserError(f'cannot read {path}: there is no such file')
    reader = Reader(path)
    if reader.byte_order != 'I':
        raise UserError(f"{path} has numbers in another byte order than this machine's; convert "
                        'the model again')
    return reader


# {a folder of open_gguf: {name: array}}. A folder that a stranger made is none of them.
made_folders = {}


def gguf_tensors(folder):
    """Returns {name: array} of the GGUF file for which open_gguf made this folder."""
    if folder not in made_folders:
        raise UserError(f'{os.path.join(folder, GGUF_PATH)} is not of this program; give the path '
                        'of the .gguf file')
    return made_folders[folder]


@functools.cache  # gguf takes seconds to read a vocabulary
def open_gguf(path):
    """Opens a GGUF file and returns a folder with its config.json and its tokenizer, which is there
    until this process ends.

    gguf_tensors(folder) returns its tensors by Hugging Face's names, memory-mapped, with rows in
    the order of GGUF. Raises UserError for a file that is damaged, or of an architecture,
    quantization or tokenizer that is not known."""
    import_gguf()

    # The folder has the name of the file, because messages name it.
    made = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    folder = os.path.join(made, os.path.basename(path).removesuffix('.gguf'))
    os.mkdir(folder)

    with reading(path):
        reader = read_gguf(path)
        values = {key: field.contents() for key, field in reader.fields.items()}
        architecture = check_kind(values, path)
        files = write_tokenizer(values, path, folder)
        tensors, factors = read_gguf_tensors(reader, architecture, path)
        config = read_settings(values, architecture, path)

        # What the tensors say about the config: whether there is a head, and factors of RoPE.
        config['tie_word_embeddings'] = 'lm_head.weight' not in tensors
        if factors is not None:
            config['rope_scaling'] = read_rope_factors(factors, config, path)

    files['config.json'] = config
    files[GGUF_PATH] = {'path': path}
    for name, content in files.items():
        write_json(os.path.join(folder, name), content)
    made_folders[folder] = tensors
    return folder


def check_kind(values, path):
    """Returns the architecture of a GGUF file, given its {key: value}. Raises UserError unless it
    is a whole model that GPT knows."""
    architecture = values.get('general.architecture')
    known = list(dict.fromkeys(ARCHITECTURES.values()))
    if architecture not in known:
        raise UserError(f'{path}: the architecture {architecture!r} is not supported; supported: '
                        f'{", ".join(known)}')
    kind = values.get('general.type', 'model')
    if kind != 'model':
        raise UserError(f"{path} is no model but of the kind {kind!r}; give the model's file")
    n_parts = values.get('split.count', 0)
    if n_parts > 1:
        raise UserError(f"{path} is one of {n_parts} parts; join them with llama.cpp's "
                        'llama-gguf-split --merge')
    return architecture


def read_gguf_tensors(reader, architecture, path):
    """Returns the tensors of a GGUF file as ({name: array} by Hugging Face's names, the array
    rope_freqs.weight or None)."""
    gguf = import_gguf()
    is_gpt2 = architecture == 'gpt2'
    table = TENSORS.get(architecture, LLAMA_TENSORS)
    names = {theirs: ours for ours, theirs in table.items()}
    tensors = {}
    factors = None
    for tensor in reader.tensors:
        if not tensor.name.isprintable() or not tensor.n_elements:
            raise UserError(f'{path}: the tensor {tensor.name!r} of the shape '
                            f'{tensor.shape.tolist()} is none of a model; copy or download the '
                            'file again')

        # The factors of RoPE are a setting of config.json.
        if tensor.name == 'rope_freqs.weight':
            factors = gguf.dequantize(tensor.data, tensor.tensor_type)
            continue

        # One row tells how many numbers the blocks of a row hold.
        try:
            row_shape = gguf.dequantize(tensor.data[:1], tensor.tensor_type).shape
        except NotImplementedError as error:
            raise UserError(f'{path}: {tensor.name} cannot be dequantized: {error}') from None

        # Floating point is taken as it is in the file, other types dequantize when they are read.
        name = hf_name(tensor.name, names, is_gpt2)
        is_plain = tensor.data.dtype != np.uint8
        if is_plain:
            tensors[name] = tensor.data
        else:
            shape = (*tensor.data.shape[:-1], row_shape[-1])
            tensors[name] = Quantized(tensor.data, tensor.tensor_type, shape, path)

    # GPT-2's head is its embedding. llama.cpp's converter writes it too, and a quantized file may
    # have it in another type; then it is a head of its own.
    head = tensors.get('lm_head.weight')
    if is_gpt2 and head is not None:
        embedding = tensors.get('wte.weight', head)
        if np.array_equal(head[...], embedding[...]):
            del tensors['lm_head.weight']
    return tensors, factors


def hf_name(name, names, is_gpt2):
    """Returns Hugging Face's name of a tensor in a GGUF file:
    model.layers.0.self_attn.q_proj.weight for blk.0.attn_q.weight.

    names: {GGUF's name: Hugging Face's name}."""
    pattern = r'(?:blk\.(\d+)\.)?(.*?)(\.weight|\.bias|)'
    block, stem, leaf = re.fullmatch(pattern, name).groups()
    prefix = '' if is_gpt2 or stem == 'output' else 'model.'
    layers = 'h' if is_gpt2 else 'layers'
    layer = f'{layers}.{block}.' if block else ''
    return f'{prefix}{layer}{names.get(stem, stem)}{leaf}'


def read_settings(values, architecture, path):
    """Returns the config.json of a GGUF file, given its {key: value}. Raises UserError for a key
    that is missing, and for one that this program does not compute with."""
    settings = SETTINGS.get(architecture, LLAMA_SETTINGS)
    prefix = f'{architecture}.'
    found = {}
    for key, value in values.items():
        if key.startswith(prefix):
            found[key.removeprefix(prefix)] = value

    # What every model has to say.
    epsilon = next(key for key in settings if key.endswith('epsilon'))
    of_experts = [key for key in REQUIRED_OF_EXPERTS if key in settings]
    for key in (*REQUIRED, epsilon, *of_experts):
        if key not in found:
            raise UserError(f'{path} lacks {architecture}.{key}; convert the model again')

    n_tokens = len(values.get('tokenizer.ggml.tokens', ()))
    family = next(key for key, name in ARCHITECTURES.items() if name == architecture)
    config = {'model_type': family, 'vocab_size': n_tokens}
    for key, value in found.items():
        # A list has one value for each layer; one that is the same for all is a number.
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]

        # float32 0.00001 is 9.999999747378752e-06 in Python; config.json says 1e-05.
        if isinstance(value, float):
            value = float(str(np.float32(value)))
            if not math.isfinite(value):
                raise UserError(f'{path}: {architecture}.{key}={value} is no number; convert the '
                                'model again')

        # Keys that mean the same setting have to agree.
        if key in settings:
            _, name = settings[key]
            is_known = not isinstance(value, list) and config.setdefault(name, value) == value
        else:
            is_known = has_no_effect(key, value, found)
        if not is_known:
            raise UserError(f'{path}: {architecture}.{key}={value} is not supported')

    # llama.cpp's defaults, where those of config.json are others.
    if architecture != 'gpt2':
        config.setdefault('num_key_value_heads', config['num_attention_heads'])
        config.setdefault('head_dim', config['hidden_size'] // config['num_attention_heads'])
        config.setdefault('rope_theta', 10000.0)
    if of_experts:
        width = config['intermediate_size'] // config['num_experts_per_tok']
        config.setdefault('moe_intermediate_size', width)
        config['norm_topk_prob'] = True  # the weights of the chosen experts sum to 1
    return config


def has_no_effect(key, value, found):
    """Returns whether llama.cpp computes the same without this key of the architecture.

    found: {key: value} of all keys of the architecture."""
    # A window that is as long as the longest text hides nothing.
    if key == 'attention.sliding_window' and value >= found['context_length']:
        return True
    if key in WITHOUT_EFFECT:
        return True
    if value == 0 and key in OFF_AT_0:
        return True
    if value == 1 and key in OFF_AT_1:
        return True
    return value in OFF_AT_TEXT.get(key, ())


def read_rope_factors(factors, config, path):
    """Returns the rope_scaling of config.json that divides the frequency of each pair of a head by
    its factor, as llama.cpp does with rope_freqs.weight; None if all factors are 1.

    It is Llama 3's rope_scaling where settings of it make these factors, else longrope's, which
    lists them. factors: the array rope_freqs.weight."""
    theta = config['rope_theta']
    width = config['head_dim']
    length = config['max_position_embeddings']
    are_positive = np.isfinite(factors).all() and not (factors <= 0).any()
    if factors.shape != (width // 2,) or not are_positive:
        raise UserError(f'{path}: rope_freqs.weight {factors.shape} is not a positive factor for '
                        f'each of the {width // 2} pairs of a head')
    if (factors == 1).all():
        return None

    # Llama 3 has four settings. The factor is the largest one in the file; the others are searched
    # among those of published models first, and among powers of 2.
    frequencies = theta ** (-np.arange(0, width, 2) / width)
    factor = float(factors.max())
    originals = [8192, *(2**n for n in range(4, 21))]
    lows = (1.0, 2.0)
    highs = (4.0, 2.0, 8.0, 16.0)
    for original, low, high in itertools.product(originals, lows, highs):
        # Pairs that rotate often are kept, those that rotate seldom are divided by the factor.
        rotations = frequencies * original / (2 * np.pi)
        keep = np.clip((rotations - low) / max(high - low, 1e-9), 0, 1)
        made = 1 / (keep + (1 - keep) / factor)
        if np.allclose(made, factors, rtol=1e-5, atol=0):
            return {
                'rope_type': 'llama3',
                'factor': factor,
                'low_freq_factor': low,
                'high_freq_factor': high,
                'original_max_position_embeddings': original,
            }

    # No settings make them: longrope has a list for short and one for long texts.
    listed = [float(factor) for factor in factors]
    return {
        'rope_type': 'longrope',
        'short_factor': listed,
        'long_factor': listed,
        'factor': 1.0,
        'attention_factor': 1.0,
        'original_max_position_embeddings': length,
    }


def write_tokenizer(values, path, folder):
    """Writes the tokenizer.json that a GGUF file's {key: value} describes, and returns
    {file: content} of the files that belong to it.

    path: the GGUF file, for messages. folder: where the tokenizer.json goes. Raises UserError for a
    tokenizer that is not known."""
    found = {key.removeprefix('tokenizer.ggml.'): value for key, value in values.items()}
    model = found.get('model')
    texts = found.get('tokens')
    if model is None or not texts:
        raise UserError(f'{path} holds no tokenizer: it lacks tokenizer.ggml.model or '
                        'tokenizer.ggml.tokens')
    types = found.get('token_type') or [NORMAL] * len(texts)
    if len(types) != len(texts):
        raise UserError(f'{path}: {len(texts)} tokens have {len(types)} types; convert the model '
                        'again')

    # The tokens that are used, {text: (id, type)}.
    tokens = {}
    for id, (text, kind) in enumerate(zip(texts, types)):
        if kind == UNUSED:
            continue
        text = text or f'[EMPTY_{id}]'  # llama.cpp's name for it
        if text in tokens:
            raise UserError(f'{path}: its vocabulary has {text!r} twice; convert the model again')
        tokens[text] = (id, kind)

    # RWKV's vocabulary is one of characters, if all of its tokens are.
    if model == 'rwkv':
        chars = [unescape_char(text) for text in tokens]
        if all(len(c) == 1 for c in chars):
            write_char_tokenizer(''.join(chars), folder)
            return {'tokenizer_config.json': {'tokenizer_class': AS_FILED}}

    # Every other one has to be a BPE that splits text in a known way.
    split = SAME_SPLITS.get(found.get('pre'), found.get('pre'))
    if model != 'gpt2' or split not in SPLITS:
        raise UserError(f'{path}: its tokenizer, {model} with pre={split}, is not supported; '
                        f'supported: gpt2 with {", ".join(SPLITS)}')
    if 'merges' not in found:
        raise UserError(f'{path}: its vocabulary, a BPE of the kind {model}, lacks its merges '
                        '(tokenizer.ggml.merges), without which text cannot be split; convert the '
                        'model again')
    return write_bpe_tokenizer(values, found, split, tokens, path, folder)


def unescape_char(text):
    """Returns the text of a token of RWKV: \\x and bytes stand for what is not printable."""
    if text[0] == '\\':
        return bytes.fromhex(text.replace('\\x', '')).decode()
    return text


def write_bpe_tokenizer(values, found, split, tokens, path, folder):
    """Does the work of write_tokenizer for a byte-level BPE.

    found: {key without tokenizer.ggml: value}. split: its name in SPLITS. tokens: {text: (id,
    type)}."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    # The BPE, with the patterns at which text is split before it.
    patterns, ignore_merges = SPLITS[split]
    vocab = {text: id for text, (id, _) in tokens.items()}
    merges = [tuple(merge.split(' ')) for merge in found['merges']]
    bpe = Tokenizer(models.BPE(vocab, merges, ignore_merges=ignore_merges))
    steps = [pre_tokenizers.Split(Regex(pattern), 'isolated') for pattern in patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(steps)
    bpe.decoder = decoders.ByteLevel()

    # The tokens that are found in the text before it is split.
    added = []
    for text, (_, kind) in tokens.items():
        if kind in (CONTROL, USER_DEFINED):
            added.append(AddedToken(text, normalized=False, special=kind == CONTROL))
    bpe.add_tokens(added)

    # The tokens with a role, by their roles.
    ids = {name: found.get(f'{name}_token_id') for name in ('bos', 'eos', 'eot', 'eom')}
    texts = {}
    for name, id in ids.items():
        texts[name] = None if id is None else bpe.id_to_token(id)
        if id is not None and texts[name] is None:
            raise UserError(f'{path}: tokenizer.ggml.{name}_token_id={id} is none of its tokens')
    ends = []
    for name in ('eos', 'eot', 'eom'):
        id = ids[name]
        if id is not None and id not in ends:
            ends.append(id)

    # Those that are put around each text.
    adds = {
        'bos': found.get('add_bos_token', split in BEGINS_BY_DEFAULT),
        'eos': found.get('add_eos_token', False),
    }
    if adds['bos'] or adds['eos']:
        bpe.post_processor = add_around(adds, ids, texts, path)
    bpe.save(os.path.join(folder, 'tokenizer.json'))

    # write_gguf names a beginning token in any case: an end token that is not added is none.
    is_bos = adds['bos'] or ids['bos'] not in ends
    settings = {
        'tokenizer_class': AS_FILED,
        'clean_up_tokenization_spaces': False,
        'bos_token': texts['bos'] if is_bos else None,
        'eos_token': texts['eos'],
        'chat_template': values.get('tokenizer.chat_template'),
    }
    return {'generation_config.json': {'eos_token_id': ends}, 'tokenizer_config.json': settings}


def add_around(adds, ids, texts, path):
    """Returns the post-processor that puts tokens around each text.

    adds: {'bos': whether it is put before, 'eos': whether it is put after}. ids, texts: {role: id,
    text}. Raises UserError for a token that the file does not name, in whose place llama.cpp takes
    token 11."""
    from tokenizers import processors
    for name in adds:
        if adds[name] and ids[name] is None:
            raise UserError(f'{path}: add_{name}_token is true, and there is no {name}_token_id; '
                            'convert the model again')

    template = ['$A']  # the text
    special = []
    if adds['bos']:
        template.insert(0, texts['bos'])
        special.append((texts['bos'], ids['bos']))
    if adds['eos']:
        template.append(texts['eos'])
        special.append((texts['eos'], ids['eos']))
    unique = list(dict.fromkeys(special))  # one token may have both roles
    return processors.TemplateProcessing(template, special_tokens=unique)
