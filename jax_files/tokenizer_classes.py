"""What transformers 5 makes of a tokenizer's folder by the name of a class: which class that is, and
how the class splits text, regardless of tokenizer.json."""
import os
from typing import Any, NamedTuple

from jax_files.tokenizer_library import QWEN2_SPLIT, QWEN3_5_SPLIT, describe_part, steps_of
from jax_flags import UserError

AS_FILED = 'PreTrainedTokenizerFast'  # the class that reads tokenizer.json as it is
# The file in the folder of open_gguf that says where the weights are. The folder's tokenizer is what
# the GGUF file says, which has no classes.
GGUF_PATH = 'gguf_path'
END = '<|endoftext|>'
# what a class names its tokens where no file does
GPT2_NAMES = {'unk_token': END, 'bos_token': END, 'eos_token': END}
LLAMA_NAMES = {'unk_token': '<unk>', 'bos_token': '<s>', 'eos_token': '</s>'}
QWEN_NAMES = {'unk_token': END, 'eos_token': END, 'pad_token': END}
CLASS_NAMES = {
    'GPT2Tokenizer': GPT2_NAMES,
    'CodeGenTokenizer': GPT2_NAMES,
    'GPTNeoXTokenizer': {**GPT2_NAMES, 'pad_token': '<|padding|>'},
    'Qwen2Tokenizer': QWEN_NAMES,
    'Qwen3_5Tokenizer': QWEN_NAMES,
    'LlamaTokenizer': LLAMA_NAMES,
    'CodeLlamaTokenizer': {
        **LLAMA_NAMES, 'prefix_token': '\u2581<PRE>', 'middle_token': '\u2581<MID>',
        'suffix_token': '\u2581<SUF>', 'eot_token': '\u2581<EOT>', 'fill_token': '<FILL_ME>'},
    'GemmaTokenizer': {'unk_token': '<unk>', 'bos_token': '<bos>', 'eos_token': '<eos>',
                       'pad_token': '<pad>', 'mask_token': '<mask>'},
    'CohereTokenizer': {'unk_token': '<UNK>', 'bos_token': '<BOS_TOKEN>',
                        'eos_token': '<|END_OF_TURN_TOKEN|>',
                        'pad_token': '<PAD>', 'cls_token': '<CLS>', 'sep_token': '<SEP>',
                        'mask_token': '<MASK_TOKEN>'}}
# those that have a pad_token of their own, or none; the others take that of tokenizer.json's padding
WITH_PADDING = (
    'GPT2Tokenizer', 'CodeGenTokenizer', 'GPTNeoXTokenizer', 'Qwen2Tokenizer', 'Qwen3_5Tokenizer',
    'GemmaTokenizer', 'CohereTokenizer')
# the class of the families (model_type of config.json) whose files name none
FAMILIES = {
    'GPT2Tokenizer': 'gpt2 codegen dbrx gpt_neo gptj jais2 opt phi starcoder2',
    'GPTNeoXTokenizer': 'gpt_neox falcon_mamba mamba mamba2 mpt olmo olmoe rwkv xlstm',
    'Qwen2Tokenizer': (
        'qwen2 qwen2_moe qwen2_vl qwen2_5_vl qwen2_audio qwen2_5_omni qwen3 qwen3_moe qwen3_next '
        'qwen3_vl qwen3_vl_moe qwen3_omni_moe internvl'),
    'Qwen3_5Tokenizer': 'qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen4_exp',
    'CodeLlamaTokenizer': 'code_llama',
    'GemmaTokenizer': (
        'gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text recurrent_gemma shieldgemma2'),
    'CohereTokenizer': 'cohere cohere2 aya_vision',
    # no class of their own, regardless of the files
    'generic': (
        'mistral mistral3 mixtral ministral ministral3 pixtral voxtral phi3 phi3_v phimoe olmo2 '
        'olmo3 olmo_hybrid flex_olmo glm glm4 glm4_moe glm4_moe_lite glm4v glm4v_moe gpt_bigcode '
        'granite granitemoe granitemoehybrid granitemoeshared stablelm persimmon kimi_linear '
        'kimi_k25 mimo_v2_flash nemotron jamba internlm2 internlm3 minicpm3 minimax_m2 ernie4_5 '
        'ernie4_5_moe arctic hyperclovax llava llava_next vipllava smolvlm molmo molmo2 iquestcoder')}
FAMILY_CLASSES = {family: name for name, families in FAMILIES.items() for family in families.split()}
# families whose files often name a wrong class, which transformers ignores
WRONGLY_DECLARED = (
    'qwen2', 'qwen3_5', 'qwen3_5_moe', 'qwen3_5_moe_text', 'qwen4_exp')
# other classes that do not read tokenizer.json as it is
UNKNOWN_CLASSES = frozenset(
    'Albert Bart Barthez Bartpho BertGeneration BertJapanese Bert Bertweet BigBird BioGpt '
    'BlenderbotSmall Blenderbot ByT5 CLIP CTRL Camembert Canine Clvp CpmAnt Cpm DPRContextEncoder '
    'DPRQuestionEncoder DPRReader Deberta DebertaV2 Dia DistilBert Esm Esmc FSMT '
    'FastSpeech2Conformer Flaubert Funnel GPTNeoXJapanese GPTSw3 Herbert LED Lasr LayoutLMv2 '
    'LayoutLMv3 LayoutXLM Luke Lxmert M2M100 MBart50 MBart MLuke MPNet Marian MarkupLM Mgpstr '
    'MobileBert Mvp MyT5 Nllb Nougat OpenAIGPT PLBart Pegasus Perceiver Phobert Pop2Piano '
    'ProphetNet Rag Reformer RemBert RoCBert RoFormer Roberta SeamlessM4T Siglip2 Siglip '
    'Speech2Text SpeechT5 Splinter SqueezeBert T5 Tapas Tipsv2 Udop VideoPrism Vits Wav2Vec2CTC '
    'Wav2Vec2PhonemeCTC Whisper XGLM XLMRoberta XLM XLNet'.split())
# those that transformers makes of vocab.json and merges.txt, too
BUILT_CLASSES = ('GPT2Tokenizer', 'GPTNeoXTokenizer', 'Qwen2Tokenizer')
SPACE = '\u2581'  # stands for a space in Llama's and Gemma's tokens


def class_of(settings, config):
    """Returns the name of the class that transformers makes of a folder, without Fast; 'generic'
    for one that reads tokenizer.json as it is.

    settings, config: the contents of tokenizer_config.json and config.json.
    A byte-level tokenizer.json that is declared as Llama's is generic, too: see is_byte_level."""
    family = config.get('model_type')
    of_family = None
    if isinstance(family, str):
        of_family = FAMILY_CLASSES.get(family)
    declared = settings.get('tokenizer_class') or config.get('tokenizer_class')
    is_ignored = family in WRONGLY_DECLARED or of_family == 'generic'
    if declared is None or is_ignored and not has_code(settings):
        return of_family or 'generic'
    name = str(declared).removesuffix('Fast')
    is_code = name in CLASS_NAMES or name.removesuffix('Tokenizer') in UNKNOWN_CLASSES
    return name if is_code else 'generic'


def has_code(settings):
    """Whether a folder has code for its tokenizer, which is not run: transformers then takes the
    declared class, without a look at the family."""
    auto_map = settings.get('auto_map')
    if isinstance(auto_map, dict):
        auto_map = auto_map.get('AutoTokenizer')
    return auto_map is not None


def check_class(kind, folder):
    """Raises UserError for a class_of a folder that splits text in a way that is not known."""
    if kind != 'generic' and kind not in CLASS_NAMES:
        raise UserError(
            f'{folder}: {kind}, its tokenizer_class, splits text by code of transformers, whatever '
            'tokenizer.json says, and is not known here; load and save the tokenizer with '
            f"transformers 5, then write '{AS_FILED}' in its place")


def is_byte_level(path):
    """Whether there is a tokenizer.json with byte-level pieces, as transformers finds it out: it
    then ignores the class LlamaTokenizer."""
    if not os.path.exists(path):
        return False
    with open(path, 'rb') as f:
        return b'"ByteLevel"' in f.read()


# -----------------------------------------------------------------------------
# pieces

class Pieces(NamedTuple):
    """What a class builds itself: of tokenizer.json it takes the vocabulary, the merges, the added
    tokens and, unless it has ends, the post-processor."""
    normalizer: Any
    pre_tokenizer: Any
    decoder: Any
    options: dict  # of the BPE, those that are not the library's defaults
    ends: dict | None  # {'add_bos_token': whether it begins each text}


def build_pieces(kind, settings, unk_token):
    """Returns the Pieces of a class; None for a generic one.

    settings: the content of tokenizer_config.json. unk_token: the text of that token, or None.
    Raises TypeError for an add_prefix_space that is no bool."""
    adds_space = settings.get('add_prefix_space')
    if adds_space not in (None, True, False):
        raise TypeError(f'add_prefix_space is {adds_space!r}')
    match kind:
        case 'LlamaTokenizer':
            return llama_pieces(adds_space is not False, bool(settings.get('legacy')))
        case 'CodeLlamaTokenizer':
            return code_llama_pieces(adds_space is not False, str(unk_token))
        case 'GemmaTokenizer':
            return gemma_pieces(str(unk_token))
        case 'Qwen2Tokenizer':
            return qwen_pieces(QWEN2_SPLIT, bool(adds_space))
        case 'Qwen3_5Tokenizer':
            return qwen_pieces(QWEN3_5_SPLIT, bool(adds_space))
        case 'GPT2Tokenizer' | 'CodeGenTokenizer' | 'GPTNeoXTokenizer' | 'CohereTokenizer':
            return byte_level_pieces(kind, bool(adds_space))
    return None


def llama_pieces(adds_space, is_legacy):
    """Returns the Pieces of LlamaTokenizer. adds_space: whether a text begins with a space;
    is_legacy: whether one behind an added token does, too."""
    from tokenizers import decoders, pre_tokenizers
    scheme = 'never'
    steps = [decoders.Replace(SPACE, ' '), decoders.ByteFallback(), decoders.Fuse()]
    if adds_space:
        scheme = 'always' if is_legacy else 'first'
        steps.append(decoders.Strip(content=' ', left=1))
    return Pieces(
        normalizer=None,
        pre_tokenizer=pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=False),
        decoder=decoders.Sequence(steps),
        options={'fuse_unk': True, 'byte_fallback': True},
        ends=None)


def code_llama_pieces(adds_space, unk_token):
    """Returns the Pieces of CodeLlamaTokenizer; parameters as of llama_pieces and build_pieces."""
    pieces = llama_pieces(adds_space, is_legacy=False)
    return pieces._replace(
        decoder=llama_pieces(True, is_legacy=False).decoder,
        options={**pieces.options, 'unk_token': unk_token},
        ends={'add_bos_token': True})


def gemma_pieces(unk_token):
    """Returns the Pieces of GemmaTokenizer."""
    from tokenizers import decoders, normalizers, pre_tokenizers
    return Pieces(
        normalizer=normalizers.Replace(' ', SPACE),
        pre_tokenizer=pre_tokenizers.Split(' ', 'merged_with_previous'),
        decoder=decoders.Sequence(
            [decoders.Replace(SPACE, ' '), decoders.ByteFallback(), decoders.Fuse()]),
        options={'fuse_unk': True, 'byte_fallback': True, 'unk_token': unk_token},
        ends=None)


def qwen_pieces(pattern, adds_space):
    """Returns the Pieces of Qwen2Tokenizer and Qwen3_5Tokenizer, which split at a pattern."""
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers
    steps = [
        pre_tokenizers.Split(Regex(pattern), 'isolated'),
        pre_tokenizers.ByteLevel(add_prefix_space=adds_space, use_regex=False)]
    return Pieces(
        normalizer=normalizers.NFC(),
        pre_tokenizer=pre_tokenizers.Sequence(steps),
        decoder=decoders.ByteLevel(),
        options={},
        ends=None)


def byte_level_pieces(kind, adds_space):
    """Returns the Pieces of a class that splits as GPT-2 does."""
    from tokenizers import decoders, normalizers, pre_tokenizers
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=adds_space)
    if kind == 'CohereTokenizer':
        digits = pre_tokenizers.Digits(individual_digits=True)
        pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizer])
    return Pieces(
        normalizer=normalizers.NFC() if kind in ('GPTNeoXTokenizer', 'CohereTokenizer') else None,
        pre_tokenizer=pre_tokenizer,
        decoder=decoders.ByteLevel(),
        options={},
        ends={} if kind == 'GPTNeoXTokenizer' else None)


DEFAULT_OPTIONS = {
    'dropout': None, 'unk_token': None, 'continuing_subword_prefix': None,
    'end_of_word_suffix': None, 'fuse_unk': False, 'byte_fallback': False, 'ignore_merges': False}


def has_pieces(raw, pieces):
    """Whether a Tokenizer of the library splits text as Pieces do, and is a BPE."""
    from tokenizers import models
    if not isinstance(raw.model, models.BPE):
        return False
    options = {name: getattr(raw.model, name) or DEFAULT_OPTIONS[name] for name in DEFAULT_OPTIONS}
    if not options['unk_token'] and 'unk_token' not in pieces.options:
        options['fuse_unk'] = pieces.options.get('fuse_unk', False)  # which has no effect then
    if options != {**DEFAULT_OPTIONS, **pieces.options}:
        return False
    names = ('normalizer', 'pre_tokenizer', 'decoder')
    return all(effect_of(getattr(raw, name)) == effect_of(getattr(pieces, name)) for name in names)


def effect_of(part):
    """Returns the description of a part of a Tokenizer without what has no effect there: the
    offsets of ByteLevel are up to the post-processor."""
    from tokenizers import decoders
    if isinstance(part, decoders.ByteLevel):
        return {'type': 'ByteLevel'}
    description = describe_part(part)
    for step in steps_of(description):
        if step.get('type') == 'ByteLevel':
            step.pop('trim_offsets', None)
    return description


def may_take_pieces(raw):
    """Whether a Tokenizer of the library is a BPE of which all options can be changed."""
    from tokenizers import models
    is_bpe = isinstance(raw.model, models.BPE)
    return is_bpe and not (raw.model.continuing_subword_prefix or raw.model.end_of_word_suffix)


def take_pieces(raw, pieces):
    """Gives Pieces to a Tokenizer that may_take_pieces, and returns it."""
    for name, value in {**DEFAULT_OPTIONS, **pieces.options}.items():
        setattr(raw.model, name, value)
    raw.normalizer = pieces.normalizer
    raw.pre_tokenizer = pieces.pre_tokenizer
    raw.decoder = pieces.decoder
    return raw


def describe_with_pieces(description, pieces):
    """Returns the content of a tokenizer.json with Pieces instead of its own, and without added
    tokens.

    description: the object in tokenizer.json. Raises KeyError, TypeError or ValueError if it has no
    vocabulary."""
    model = description['model']
    vocab = model['vocab']
    if isinstance(vocab, list):  # of a Unigram: pieces with their scores
        tokens = [token[0] if isinstance(token, list) else token for token in vocab]
        vocab = {token: id for id, token in enumerate(tokens)}
    bpe = {
        'type': 'BPE', **DEFAULT_OPTIONS, **pieces.options, 'vocab': vocab,
        'merges': model.get('merges', [])}
    parts = {name: describe_part(getattr(pieces, name)) or None
             for name in ('normalizer', 'pre_tokenizer', 'decoder')}
    return {**description, **parts, 'model': bpe, 'added_tokens': []}
