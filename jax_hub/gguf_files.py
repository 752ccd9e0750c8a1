"""Writes a model and its tokenizer as a GGUF file, llama.cpp's format: one file holds weights,
settings and tokens. The package gguf has the names of tensors and of settings.

Reference: https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py"""
import contextlib
import json
import logging
import os

import numpy as np

from jax_flags import UserError, new_file
from jax_hub.tokenizers import LLAMA3_SPLIT

GGUF_DTYPES = ('float32', 'float16', 'q8_0')

# {model_type of config.json: architecture of llama.cpp}. llama.cpp computes a Mistral as a Llama.
ARCHITECTURES = {
    'gpt2': 'gpt2',
    'llama': 'llama',
    'mistral': 'llama',
    'qwen2': 'qwen2',
    'qwen3': 'qwen3',
    'qwen3_moe': 'qwen3moe',
}

# patterns that split a text before BPE
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2_SPLIT = LLAMA3_SPLIT.replace('{1,3}', '')
# {tokenizer.ggml.pre of llama.cpp: (its patterns, ignore_merges of tokenizer.json)}
SPLITS = {
    'gpt-2': ((GPT2_SPLIT,), False),
    'smollm': ((r'\p{N}', GPT2_SPLIT), False),
    'llama-bpe': ((LLAMA3_SPLIT,), True),
    'qwen2': ((QWEN2_SPLIT,), False),
}


def why_no_gguf(config, family):
    """Returns '' if write_gguf can write this model. Otherwise returns the kind of the model, for a
    message, such as 'a mixture of experts with ...'. family: the model_type."""
    # a window that is as long as the longest text hides nothing
    kinds = {config.layer(i)[0] for i in range(config.n_layer)}
    has_idle_windows = kinds == {'window'} and config.window >= config.block_size
    has_other_layers = bool(kinds - {'full'}) and not has_idle_windows
    if config.rope_scaling or has_other_layers:
        return 'a model with sliding windows, layers without RoPE or rope scaling'
    if family not in ARCHITECTURES:
        return f'a {family}, only of {", ".join(ARCHITECTURES)}'
    # llama.cpp's Qwen3-MoE has experts in all layers, with weights that sum to 1
    has_experts_alone = all(config.layer(i)[1] for i in range(config.n_layer))
    if config.moe and not (has_experts_alone and config.moe.normalize):
        return ('a mixture of experts with layers without experts, or with weights of experts that '
                'do not sum to 1')
    return ''


def write_gguf(path, config, family, names_on_disk, make_tensor, dtype, tokenizer):
    """Writes a model and its tokenizer as a new GGUF file, which appears when it is complete.

    config: the model's GPTConfig. family: the model's model_type. names_on_disk: Hugging Face's
    names of the model's tensors. make_tensor: a function that returns the tensor of a name, with
    its rows in the order of GGUF. dtype: the type of matrices, one of GGUF_DTYPES; for the
    exceptions see tensor_type. tokenizer: an HFTokenizer or a CharTokenizer.

    Raises UserError for a model or tokenizer that llama.cpp does not have, and if the file
    exists."""
    try:
        import gguf
    except ImportError:
        raise UserError('GGUF files need the package gguf: pip install gguf') from None
    logging.getLogger('gguf').setLevel(logging.ERROR)
    reason = why_no_gguf(config, family)
    if reason:
        raise UserError(f'no GGUF is written of {reason}; save a folder for '
                        "llama.cpp's convert_hf_to_gguf.py")
    if os.path.exists(path):
        raise UserError(f'{path} exists; remove it or choose another')

    # a temporary file holds the tensors until the end: memory need not hold all of them
    architecture = ARCHITECTURES[family]
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[architecture], config.n_layer)
    try:
        with new_file(path) as unfinished:
            writer = gguf.GGUFWriter(unfinished, architecture, use_temp_file=True)
            with contextlib.closing(writer):
                add_settings(writer, config, family)
                add_tokenizer(writer, gguf.TokenType, tokenizer, config.vocab_size)
                for name in names_on_disk:
                    theirs = names.get_name(name, try_suffixes=('.weight', '.bias'))
                    x = np.ascontiguousarray(make_tensor(name), np.float32)
                    kind = tensor_type(theirs, x.shape, dtype, gguf.GGMLQuantizationType)
                    check_range(name, x, kind.name)
                    writer.add_tensor(theirs, gguf.quantize(x, kind), raw_dtype=kind)
                writer.write_header_to_file()
                writer.write_kv_data_to_file()
                writer.write_tensors_to_file()
    except OSError as error:
        raise UserError(f'cannot write {path}: {error}') from None


def add_settings(writer, config, family):
    """Adds the settings of a model to a GGUFWriter: its sizes and the epsilon of its norms; for
    families other than gpt2 also the sizes of heads, and the settings of RoPE and of experts."""
    writer.add_context_length(config.block_size)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(config.mlp_width)
    writer.add_head_count(config.n_head)
    if family == 'gpt2':
        writer.add_layer_norm_eps(config.norm_eps)
        return
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_width)
    writer.add_value_length(config.head_width)
    writer.add_rope_dimension_count(config.head_width)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    if config.moe:
        writer.add_expert_count(config.moe.n_expert)
        writer.add_expert_used_count(config.moe.n_used)
        writer.add_expert_feed_forward_length(config.moe.width)


def tensor_type(name, shape, dtype, types):
    """Returns the GGUF type in which a tensor is stored, a member of `types`.

    name: the tensor's name in GGUF. shape: the tensor's shape. dtype: the dtype of the file as the
    user chose it, one of GGUF_DTYPES. types: the enum gguf.GGMLQuantizationType.

    As in llama.cpp, q8_0 needs rows of a multiple of 32 elements; a matrix with other rows becomes
    float16. Vectors, learned positions and the router of experts stay float32."""
    is_vector = len(shape) < 2
    is_kept = name == 'position_embd.weight' or name.endswith('.ffn_gate_inp.weight')
    if dtype == 'float32' or is_vector or is_kept:
        return types.F32
    has_whole_blocks = shape[-1] % 32 == 0
    if dtype == 'q8_0' and has_whole_blocks:
        return types.Q8_0
    return types.F16


def check_range(name, x, kind):
    """Raises UserError if the tensor x has weights that are infinite in the GGUF type `kind`, such
    as 'F16'. In 'Q8_0' the scale can overflow: 32 weights share a scale in float16, which is the
    largest of them divided by 127. name: the tensor's name, for the message."""
    limits = {'F16': 65504, 'Q8_0': 127 * 65504}
    if kind in limits and np.abs(x).max(initial=0) > limits[kind]:
        raise UserError(f'{name} has weights above {limits[kind]:,}, which are infinite in {kind}; '
                        'choose --dtype=float32')


def add_tokenizer(writer, types, tokenizer, vocab_size):
    """Adds the tokens, merges, end tokens and chat template of a tokenizer to a GGUFWriter.

    A vocabulary of characters is written as a tokenizer of RWKV: of llama.cpp's tokenizers, only
    RWKV's takes the longest match and needs no end token. types: gguf.TokenType. vocab_size: the
    size of the model's vocabulary; [PAD...] tokens are added up to this size. Raises UserError
    for a tokenizer that llama.cpp does not have."""
    if tokenizer.stop_texts:
        raise UserError('a GGUF file has no place for texts that end an answer, "stop_strings" in '
                        f'generation_config.json ({tokenizer.stop_texts[0]!r}): export a --folder')
    chars = getattr(tokenizer, 'chars', '')
    if not chars:
        description = json.loads(tokenizer.tokenizer.to_str())
        chars = find_chars(description, tokenizer)
    if chars:
        writer.add_tokenizer_model('rwkv')
        texts = [escape_char(c) for c in chars]
        kinds = [types.NORMAL] * len(texts)
        begins = []
    else:
        merges = description['model']['merges']
        writer.add_tokenizer_model('gpt2')
        writer.add_tokenizer_pre(split_of(description))
        writer.add_token_merges(
            [merge if isinstance(merge, str) else ' '.join(merge) for merge in merges])
        texts, kinds = read_tokens(description, tokenizer, types)
        begins = add_ends(writer, tokenizer)

    # the embedding may have more rows than there are tokens
    writer.add_token_list(texts + [f'[PAD{i}]' for i in range(len(texts), vocab_size)])
    writer.add_token_types(kinds + [types.UNUSED] * (vocab_size - len(kinds)))
    writer.add_add_bos_token(bool(begins))
    templates = tokenizer.chat_template
    if isinstance(templates, dict):  # {name: template}, the one for tools apart
        templates = [{'name': name, 'template': text} for name, text in templates.items()]
    if templates:
        writer.add_chat_template(templates)


def find_chars(description, tokenizer):
    """Returns the characters of a tokenizer.json in the order of their ids, or '' if its tokens are
    not single characters. An exported folder has characters as a BPE without merges
    (write_char_tokenizer).

    description: the content of the tokenizer.json, parsed. tokenizer: its HFTokenizer."""
    model = description['model']
    has_steps = any(description[key] for key in ('normalizer', 'pre_tokenizer', 'added_tokens'))
    if model['type'] != 'BPE' or model['merges'] or has_steps or tokenizer.encode(''):
        return ''
    texts = sorted(model['vocab'], key=model['vocab'].get)
    are_single = len(''.join(texts)) == len(texts) == tokenizer.vocab_size
    return ''.join(texts) if are_single else ''


def escape_char(c):
    """Escapes a character in the way of RWKV's vocabulary. A backslash or a character that is not
    printable becomes \\x and two hex digits for each of its bytes. Any other character is returned
    unchanged."""
    if c.isprintable() and c != '\\':
        return c
    return ''.join(f'\\x{byte:02x}' for byte in c.encode())


def read_tokens(description, tokenizer, types):
    """Returns two lists, the texts and the types of a tokenizer's tokens, in the order of their
    ids.

    description: the content of tokenizer.json, parsed. tokenizer: the HFTokenizer of the same file.
    types: gguf.TokenType. Raises UserError for an added token with lstrip, rstrip or single_word,
    which llama.cpp does not support."""
    # an id that the vocabulary leaves out is padding
    texts = [f'[PAD{i}]' for i in range(tokenizer.vocab_size)]
    kinds = [types.UNUSED] * len(texts)
    for text, id in description['model']['vocab'].items():
        texts[id] = text
        kinds[id] = types.NORMAL
    # added tokens are found in the text before it is split
    for token in description['added_tokens']:
        if token['lstrip'] or token['rstrip'] or token['single_word']:
            raise UserError("llama.cpp has no equivalent of the tokenizer's "
                            f"{token['content']!r}, which takes the spaces beside it")
        is_special = token['special'] or token['id'] in tokenizer.special_ids
        texts[token['id']] = token['content']
        kinds[token['id']] = types.CONTROL if is_special else types.USER_DEFINED
    return texts, kinds


def add_ends(writer, tokenizer):
    """Adds to a GGUFWriter the ids of the tokens that begin a text and of those that end a text.
    Returns the ids that the tokenizer puts before each text: [] or one id. Raises UserError if
    llama.cpp does not support these tokens."""
    ends = [] if tokenizer.end_token is None else [tokenizer.end_token]
    ends += [id for id in tokenizer.stop_tokens if id not in ends]
    if not 1 <= len(ends) <= 3:
        raise UserError(f'the tokenizer has {len(ends)} end tokens, and a GGUF needs 1 to 3: name '
                        'one as eos_token in its tokenizer_config.json')
    for add, id in zip((writer.add_eos_token_id, writer.add_eot_token_id,
                        writer.add_eom_token_id), ends):
        add(id)

    # it begins a text with one token
    bos = tokenizer.ids.get(tokenizer.special.get('bos_token'), ends[0])
    writer.add_bos_token_id(bos)
    begins = tokenizer.encode('')
    if begins not in ([], [bos]):
        raise UserError(f'llama.cpp cannot begin each text with {begins}, as this tokenizer does')
    return begins


def split_of(description):
    """Returns llama.cpp's name for how a tokenizer.json splits text before BPE, such as 'llama-bpe'
    (a key of SPLITS). Raises UserError if llama.cpp has no name for it.

    description: the content of the tokenizer.json, parsed."""
    # llama.cpp has none of these options of a BPE, and normalizes as NFC at most
    model = description['model']
    options = (
        'dropout', 'unk_token', 'continuing_subword_prefix', 'end_of_word_suffix', 'byte_fallback')
    is_plain = model['type'] == 'BPE' and not any(model.get(key) for key in options)
    normalizer = (description['normalizer'] or {}).get('type')
    patterns = split_patterns(description['pre_tokenizer'])
    for name, known in SPLITS.items():
        is_known = known == (patterns, model.get('ignore_merges', False))
        if is_known and is_plain and normalizer in (None, 'NFC'):
            return name
    raise UserError('llama.cpp has no equivalent of this tokenizer.json, which would be split '
                    'differently: a GGUF needs a byte-level BPE that splits text as '
                    f'{", ".join(SPLITS)} do')


def split_patterns(pre_tokenizer):
    """Returns the regular expressions at which `pre_tokenizer` splits a text before a byte-level
    BPE encodes the parts. Returns None if pre_tokenizer has a step that is neither such a split nor
    the byte-level step. pre_tokenizer: the object of that name in a tokenizer.json."""
    steps = (pre_tokenizer or {}).get('pretokenizers', [pre_tokenizer])
    patterns = []
    for step in steps:
        is_last = step is steps[-1]
        # each step is a split at a pattern; the last one turns bytes into letters
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
