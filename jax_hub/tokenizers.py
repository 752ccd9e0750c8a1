"""Converts text to token ids and back. meta.json and every checkpoint have a dict that describes a
tokenizer."""
import functools
import json
import os
import re
import sys

import numpy as np

from jax_flags import (
    CONTROLS, UserError, digest, read_json, whole_characters)
from jax_hub.folders import (
    import_transformers, path_inside, read_config_json, telling_warnings, text_config)

# the class of transformers that reads tokenizer.json as it is, and adds nothing
AS_FILED = 'PreTrainedTokenizerFast'
TEMPLATE_REMEDY = 'data/chat/prepare.py --template=plain makes data from which it learns one'
LARGEST_ID = 2**22  # the largest vocabularies that are known have a million ids

# files of a Hugging Face folder that define its tokenizer
VOCABULARIES = ('tokenizer.json', 'vocab.json', 'merges.txt', 'tokenizer.model')
TEMPLATES = ('chat_template.jinja', 'additional_chat_templates')
READ_FILES = (
    *VOCABULARIES, 'tokenizer_config.json', 'special_tokens_map.json', 'added_tokens.json',
    'chat_template.jinja', 'additional_chat_templates/*.jinja', 'generation_config.json',
    'config.json')


def import_chats():
    """Imports jax_hub.chats and returns the module. Only chats need this module."""
    from jax_hub import chats
    return chats


class CharTokenizer:
    """A tokenizer with a token per character. The other classes have the same methods, and the
    attributes below."""
    stop_tokens = ()  # ids that end a text
    stop_texts = ()  # texts that end a text
    # put before a text that is scored: the token that begins a document, else the one that ends it
    start_token = None
    start_text = None  # how start_token is written, which may be at the beginning of a text
    chat_template = None  # how a chat is written as a text
    sampling = {}  # the sampling defaults of the model's authors, {'temperature': 0.6, ...}

    def __init__(self, chars):
        """Makes a tokenizer of `chars`, a text of the characters in the order of their ids."""
        self.chars = chars
        self.vocab_size = len(chars)
        self.ids = {c: i for i, c in enumerate(chars)}

    def encode(self, text, begin=True):
        """Returns the ids of a text. begin: has no effect here, see HFTokenizer.encode. Raises
        UserError for unknown characters."""
        check_characters(text, self.ids)
        return [self.ids[c] for c in text]

    def decode(self, ids):
        return ''.join(self.chars[i] for i in ids)

    def token_bytes(self):
        """Returns the number of UTF-8 bytes of each token, a list in the order of the ids, 0 for
        special tokens. Returns None if these numbers are not known."""
        return [len(c.encode()) for c in self.chars]


def check_characters(text, known):
    """Raises UserError if a text has characters that are not in `known`."""
    unknown = sorted(set(text) - set(known))
    if unknown:
        raise UserError('the text has characters that the model does not know: '
                        f'{" ".join(map(repr, unknown))}; it knows {"".join(sorted(known))!r}')


def check_template(tokenizer):
    """Raises UserError for a tokenizer without a chat template."""
    if tokenizer.chat_template is None:
        raise UserError(f'the model has no chat template; {TEMPLATE_REMEDY}')


class GPT2Tokenizer:
    """GPT-2's BPE, of tiktoken."""
    stop_tokens = ()
    stop_texts = ()
    start_text = '<|endoftext|>'
    chat_template = None
    sampling = {}

    def __init__(self):
        import tiktoken
        try:
            self.bpe = tiktoken.get_encoding('gpt2')
        except Exception as error:  # the first use downloads two files
            raise UserError(
                f"tiktoken cannot load GPT-2's BPE ({type(error).__name__}); without a network set "
                'TIKTOKEN_CACHE_DIR to the tiktoken cache of a machine that has used it (see '
                '"Troubleshooting" in README.md)') from None
        self.vocab_size = self.bpe.n_vocab
        self.start_token = self.bpe.eot_token

    def encode(self, text, begin=True):
        return self.bpe.encode(text, allowed_special={'<|endoftext|>'})

    def decode(self, ids):
        return self.bpe.decode(ids)

    def token_bytes(self):
        n_bytes = [len(self.bpe.decode_single_token_bytes(id)) for id in range(self.start_token)]
        return [*n_bytes, 0]


class HFTokenizer:
    """The tokenizer of a Hugging Face folder: its tokenizer.json, the tokens that transformers adds
    to it, and the stop tokens and the sampling defaults from the folder's other files. A prompt may
    contain special tokens; decoding leaves them out."""

    def __init__(self, folder, is_copy=False):
        """Reads the tokenizer of a folder. is_copy: whether copy_tokenizer has written the
        folder."""
        self.tokenizer, self.special, self.hf = read_folder(folder, is_copy)
        self.chat_template = self.hf and self.hf.chat_template
        self.ids = self.tokenizer.get_vocab()  # with the added tokens
        self.vocab_size = 1 + max(self.ids.values(), default=-1)  # ids may have holes
        if self.vocab_size > LARGEST_ID:
            raise UserError(f'the tokenizer in {folder} has a token with the id '
                            f'{self.vocab_size - 1:,}, and none above {LARGEST_ID:,} is supported')
        generation = read_json(path_inside(folder, 'generation_config.json'), optional=True)
        config = read_config_json(folder)
        self.sampling = read_sampling(generation)
        self.stop_texts = read_stop_texts(generation)
        size = text_config(config).get('vocab_size') or self.vocab_size
        self.read_ends([generation, config, text_config(config)], size)
        limit_vocabulary(self, size)

        # whether write_char_tokenizer made it: then encode refuses characters that it lacks, which
        # the Tokenizer would leave out
        is_plain = self.tokenizer.normalizer is None and self.tokenizer.pre_tokenizer is None
        self.has_letters_only = is_plain and all(len(token) == 1 for token in self.ids)

    def read_ends(self, configs, size):
        """Sets the attributes about the tokens that begin and end a text: start_token, start_text,
        end_token, stop_tokens and special_ids.

        There are two sources: bos_token and eos_token of the tokenizer, and the ids bos_token_id
        and eos_token_id in `configs`.
        - end_token, which ends a document: eos_token, or else the first eos_token_id.
        - start_token: the first of bos_token, eos_token, bos_token_id and eos_token_id. start_text
          is its text.
        - For end_token and start_token, tokens that the tokenizer lacks and ids of `size` or more
          are passed over. If nothing is left, the attribute is None.
        - stop_tokens: all end tokens of both sources.
        - special_ids: the tokens that decoding leaves out.

        configs: the contents of generation_config.json, config.json and its text_config. size: the
        number of rows of the model's embedding."""
        begin, end = (self.ids.get(self.special.get(name)) for name in ('bos_token', 'eos_token'))
        begin_ids = [id for config in configs for id in as_list(config.get('bos_token_id'))]
        end_ids = [*as_list(end), *(
            id for config in configs for id in as_list(config.get('eos_token_id')))]
        known = {id for id in self.ids.values() if id < size}

        def first_known(ids):
            return next((id for id in ids if id in known), None)

        self.end_token = first_known(end_ids)  # ends a document
        self.start_token = first_known([begin, end, *begin_ids, *end_ids])
        self.start_text = None
        if self.start_token is not None:
            self.start_text = self.tokenizer.id_to_token(self.start_token)
        self.stop_tokens = tuple(sorted({id for id in end_ids if 0 <= id <= LARGEST_ID}))

        # tokens that decoding leaves out. The tokens that begin and end a text are among them even
        # if tokenizer.json takes them for text: else they would be shown, saved, and doubled in the
        # next prompt
        added = self.tokenizer.get_added_tokens_decoder()
        self.special_ids = {id for id, token in added.items() if token.special}
        self.special_ids |= added.keys() & {begin, end, *self.stop_tokens}

    def encode(self, text, begin=True):
        """Returns the ids of a text. If `begin`, the ids include the tokens that the tokenizer puts
        before a text. The tokens that the tokenizer puts after a text are always left out, because
        the text goes on: further tokens are scored or generated."""
        self.check_characters(text)
        ids = self.tokenizer.encode(whole_characters(text), add_special_tokens=begin).ids
        return ids[:len(ids) - self.n_behind] if begin else ids

    def check_characters(self, text):
        """Raises UserError if the vocabulary consists of single characters and lacks a character of
        the text, because the tokenizer would drop this character silently."""
        if self.has_letters_only:
            check_characters(text, self.ids)

    @functools.cached_property
    def n_behind(self):
        """The number of tokens that the tokenizer puts after each text."""
        is_added = self.tokenizer.encode('a').special_tokens_mask
        return is_added[::-1].index(0) if 0 in is_added else 0

    def decode(self, ids):
        """Returns the text of ids, without special tokens. A model of gpt-oss writes special tokens
        into its answers, so for such a model only stop tokens are left out."""
        if '<|channel|>' in self.ids:
            # gpt-oss separates its channels by special tokens: they stay, see final_answer
            ids = [id for id in ids if id not in self.stop_tokens]
            return self.tokenizer.decode(ids, skip_special_tokens=False)
        return self.tokenizer.decode([id for id in ids if id not in self.special_ids])

    def token_bytes(self):
        """Returns the number of UTF-8 bytes of each token, see CharTokenizer.token_bytes."""
        kinds = decoder_kinds(self.tokenizer)
        if not kinds & {'ByteLevel', 'ByteFallback', 'Metaspace', 'Fuse'}:
            return None
        n_bytes = [0] * (max(self.ids.values(), default=-1) + 1)
        for token, id in self.ids.items():
            if 'ByteLevel' in kinds:  # a character stands for each byte
                n_bytes[id] = len(token)
            elif 'ByteFallback' in kinds and re.fullmatch('<0x[0-9A-F]{2}>', token):
                n_bytes[id] = 1
            else:
                n_bytes[id] = len(token.replace('\u2581', ' ').encode())
        for id, token in self.tokenizer.get_added_tokens_decoder().items():
            n_bytes[id] = 0 if id in self.special_ids else len(token.content.encode())
        return n_bytes

    def render_chat(self, messages, *, add_generation_prompt, tools=None, variables=None):
        """Returns the text of the messages of a chat. add_generation_prompt: see chats.render.
        tools, variables: see Chat. Raises UserError if there is no template, or if the template
        fails or refuses the messages."""
        check_template(self)
        chats = import_chats()
        chat = chats.with_arguments(self, chats.read_chat(messages, tools, variables))
        return chats.render(self, chat, add_generation_prompt=add_generation_prompt)

    def encode_chat(self, messages, *, tools=None, variables=None):
        """Returns one list of ids: the chat, then the template's generation prompt, which opens the
        answer. All special tokens are the template's; none are added. tools, variables: see
        Chat."""
        text = self.render_chat(messages, add_generation_prompt=True, tools=tools,
                                variables=variables)
        return self.encode(text, begin=False)

    def encode_training_chat(self, messages, *, counted=None, tools=None, variables=None):
        """Returns a conversation as Encoded, see jax_hub.chats.encode_training_chat. tools,
        variables: see Chat."""
        check_template(self)
        chats = import_chats()
        chat = chats.with_arguments(self, chats.read_chat(messages, tools, variables))
        return chats.encode_training_chat(self, chat, counted)

    def find_lost(self, messages, ids, *, counted, tools=None, variables=None):
        """Returns a list of warnings about training on a conversation. Each warning is a sentence.
        It names a kind of content that the chat template leaves out, or says that the tokens before
        the last answer are not the prompt that sampling would use. See jax_hub.chats.find_lost.

        messages: the conversation. ids: the token ids of the conversation. counted: the indices of
        the answers that count in the loss, at least one. tools, variables: see Chat."""
        chats = import_chats()
        chat = chats.with_arguments(self, chats.read_chat(messages, tools, variables))
        return chats.find_lost(self, chat, ids, counted)


# -----------------------------------------------------------------------------
# the tokenizer of a folder

def read_folder(folder, is_copy=False):
    """Returns (Tokenizer; special tokens; transformers' tokenizer or None) of a folder.

    The Tokenizer is of the library tokenizers. The special tokens are {'bos_token': text, ...}.
    transformers' tokenizer is loaded only if it is needed, that is, in three cases:
    - there is no tokenizer.json;
    - tokenizer.json does not describe the tokenizer completely (is_as_filed), for example in a
      folder with a chat template;
    - tokenizer.json lacks tokens that tokenizer_config.json names (adds_none). A copy is not
      checked for this.

    is_copy: whether copy_tokenizer has written the folder. Raises UserError if the folder is
    missing or its files cannot be read, and for a link out of the folder."""
    if not os.path.isdir(folder):  # transformers would look for a model of this name on the hub
        raise UserError(f'cannot read the tokenizer in {folder}: the folder is missing; copy it '
                        'from the data set or the model')
    paths = {name: path_inside(folder, name) for name in READ_FILES if '*' not in name}
    settings = read_json(paths['tokenizer_config.json'], optional=True)
    is_copy = is_copy or is_own_copy(settings)
    file = paths['tokenizer.json']
    try:
        from tokenizers import Tokenizer
        tokenizer = Tokenizer.from_file(file) if os.path.exists(file) else None
        hf = None
        if tokenizer and is_as_filed(folder, settings) and (is_copy or adds_none(settings, tokenizer)):
            names = {name: text for name, text in settings.items()
                     if name.endswith('_token') and isinstance(text, str)}
        else:
            hf = open_with_transformers(folder)
            names = hf.special_tokens_map
            if tokenizer is None:
                tokenizer = hf.backend_tokenizer
            elif not is_copy:
                complete(tokenizer, hf)
                mend_mistral_split(tokenizer, folder, settings)
            tokenizer.encode_special_tokens = hf.split_special_tokens
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode('a')  # a pattern may fail only now
    except (UserError, MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # PanicException of the library is no Exception
        reason = ' '.join(str(error).split())[:300]
        raise UserError(f'cannot read the tokenizer in {folder} ({type(error).__name__}: {reason}); '
                        'copy or download it again') from None
    return tokenizer, names, hf


def open_with_transformers(folder):
    """Returns transformers' tokenizer of a folder. Raises what transformers raises."""
    read_config_json(folder)  # transformers reads it, too
    transformers = import_transformers()
    with telling_warnings(folder):
        return transformers.AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True, mistral_format=False)


def is_own_copy(settings):
    """Returns whether copy_tokenizer has written the folder of a tokenizer. settings: the content
    of tokenizer_config.json in that folder. Only copy_tokenizer writes both the key "backend" and
    the class AS_FILED; transformers 5 writes "backend" with another class."""
    return settings.get('tokenizer_class') == AS_FILED and 'backend' in settings


def is_as_filed(folder, settings):
    """Returns whether tokenizer.json and `settings`, the content of tokenizer_config.json, describe
    the tokenizer of a folder completely.

    Three things must hold:
    - The tokenizer_class in `settings` is AS_FILED, a class that adds nothing to tokenizer.json.
    - `settings` has no chat template, no added token and no auto_map.
    - The folder has no other file that could change the tokenizer. config.json is such a file, so
      the result is False for the folder of a whole model."""
    others = ('config.json', 'special_tokens_map.json', 'added_tokens.json', *TEMPLATES)
    return (settings.get('tokenizer_class') == AS_FILED
            and not settings.keys() & {'chat_template', 'added_tokens_decoder', 'auto_map'}
            and not any(os.path.exists(os.path.join(folder, name)) for name in others))


def adds_none(settings, tokenizer):
    """Returns True if transformers would certainly add no tokens to the vocabulary of a Tokenizer.
    transformers adds each token that is in `settings` and not in the Tokenizer. This function does
    not read lists of tokens (extra_special_tokens, additional_special_tokens), nor a token that is
    a JSON object. If `settings` have one of these, returns False. settings: the content of
    tokenizer_config.json."""
    if settings.get('extra_special_tokens') or settings.get('additional_special_tokens'):
        return False
    named = [value for name, value in settings.items() if name.endswith('_token')]
    return all(tokenizer.token_to_id(value) is not None if isinstance(value, str)
               else not isinstance(value, dict) for value in named)


def complete(tokenizer, hf):
    """Adds to a Tokenizer what only transformers knows: added tokens, their flags, and the tokens
    that are put before and after a text. tokenizer: the Tokenizer of a tokenizer.json, which is
    changed. hf: transformers' tokenizer of the same folder. The normalizer, split, model and
    decoder stay those of the file, even where transformers uses different ones."""
    # in one call: a call per token takes 20 s for Gemma 3's 6,415 tokens
    added = hf.backend_tokenizer.get_added_tokens_decoder()
    tokenizer.add_tokens([added[number] for number in sorted(added)])
    tokenizer.post_processor = hf.backend_tokenizer.post_processor


# Llama 3's split, which an early converter gave Mistral's tokenizer by mistake, and Mistral's
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+')
MISTRAL_SPLIT = (
    r'[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+'
    r'|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*'
    r'|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+')
# as in transformers' check
MISTRALS = ('mistral', 'mistral3', 'voxtral', 'ministral', 'pixtral')
MISTRAL_SIZE = 100_000  # tokens; smaller vocabularies are SentencePiece's


def mend_mistral_split(tokenizer, folder, settings):
    """Replaces the split before BPE in a Mistral tokenizer if this split is LLAMA3_SPLIT, the
    mistake of an early converter. The new split is MISTRAL_SPLIT, as with transformers'
    fix_mistral_regex. Prints a line when it replaces the split. tokenizer: the Tokenizer, which is
    changed. folder: its folder. settings: the content of tokenizer_config.json;
    "fix_mistral_regex": false there forbids the replacement.

    Does not change the tokenizer of Llama 3, even if the model has Mistral's architecture, because
    LLAMA3_SPLIT is right for that tokenizer."""
    config = read_config_json(folder)
    version = re.match(r'\d+', str(config.get('transformers_version')))
    is_old = version is None or int(version[0]) < 5
    is_mistral = config.get('model_type') in MISTRALS and is_old
    is_large = tokenizer.get_vocab_size() > MISTRAL_SIZE
    is_llama = tokenizer.token_to_id('<|begin_of_text|>') is not None
    if not is_mistral or not is_large or is_llama or settings.get('fix_mistral_regex') is False:
        return
    from tokenizers import Regex, pre_tokenizers
    steps = tokenizer.pre_tokenizer
    if not isinstance(steps, pre_tokenizers.Sequence):
        return
    first = json.loads(steps.__getstate__())['pretokenizers'][0]
    if first.get('pattern') == {'Regex': LLAMA3_SPLIT}:
        steps[0] = pre_tokenizers.Split(Regex(MISTRAL_SPLIT), 'isolated')
        print(f'{folder}: its tokenizer.json has the wrong split of an early converter of '
              "Mistral's tokenizers; the right split is used instead, as by fix_mistral_regex",
              file=sys.stderr)


def as_list(value):
    """Returns the list of the ids in `value`. value: one id, a list of ids, or None, from a
    config."""
    ids = value if isinstance(value, list) else [value]
    return [id for id in ids if type(id) is int]


def read_sampling(generation):
    """Returns the sampling defaults of the model's authors, such as {'temperature': 0.6}.
    generation: the content of generation_config.json."""
    found = {name: generation[name] for name in CONTROLS
             if type(generation.get(name)) in (int, float)}
    if found.get('top_k', 0) < 0:  # many write -1 for off
        found['top_k'] = 0
    return found


def read_stop_texts(generation):
    """Returns a tuple of the texts that end an answer. They are read from the key "stop_strings",
    which holds one text or a list of texts. Without this key, the tuple is empty. generation: the
    content of generation_config.json."""
    found = generation.get('stop_strings') or ()
    return tuple(text for text in ([found] if isinstance(found, str) else found)
                 if isinstance(text, str))


def decoder_kinds(tokenizer):
    """Returns the set of the types of a Tokenizer's decoder steps, such as {'ByteLevel',
    'Fuse'}."""
    decoder = json.loads(tokenizer.to_str())['decoder'] or {}
    return {step['type'] for step in (decoder, *decoder.get('decoders', ())) if step}


def limit_vocabulary(tokenizer, size):
    """Reduces vocab_size of a tokenizer to `size`, if vocab_size is larger than `size` and all
    tokens with ids of `size` or more are special tokens. size: the number of rows of the model's
    embedding. Example: Gemma 3's text models have a token for images, and no row for it."""
    if getattr(tokenizer, 'special_ids', set()).issuperset(range(size, tokenizer.vocab_size)):
        tokenizer.vocab_size = min(tokenizer.vocab_size, size)


def strip_partial_utf8(text):
    """Returns the text without an incomplete character at its end. A token may end inside a
    character, which then decodes to U+FFFD."""
    return text.rstrip('\ufffd')


# -----------------------------------------------------------------------------
# descriptions

def load_tokenizer(description):
    """Returns the tokenizer, an object like CharTokenizer, of a description: {'kind': 'char',
    'chars': ...}, {'kind': 'gpt2'} or {'kind': 'folder', 'path': ...}. Raises UserError for any
    other description. Raises UserError also if the description has the digest of other tokens than
    the folder has."""
    match description:
        case {'kind': 'char', 'chars': str(chars)}:
            return CharTokenizer(chars)
        case {'kind': 'gpt2'}:
            return GPT2Tokenizer()
        case {'kind': 'folder', 'path': str(path)}:
            tokenizer = HFTokenizer(path, is_copy=description.get('is_copy', False))
            if description.get('digest', '') not in ('', tokens_digest(tokenizer.tokenizer)):
                raise UserError(f'{path} has been replaced: it has other tokens than the run or '
                                'the data set was made with; put the right tokenizer there')
            return tokenizer
    raise UserError(f'{description!r:.100} does not describe a tokenizer, as meta.json should; '
                    'prepare the data set again')


def load_token_bytes(description, vocab_size):
    """Returns the number of UTF-8 bytes of each token of a tokenizer, an int array with 0 for
    special tokens and for ids without a token. Its length is vocab_size, or the number of tokens if
    that is larger. Returns None if the bytes are not known or the tokenizer cannot be loaded.
    description: see load_tokenizer."""
    try:
        n_bytes = load_tokenizer(description).token_bytes()
    except UserError:
        return None
    if not n_bytes:
        return n_bytes
    return np.pad(np.array(n_bytes), (0, max(0, vocab_size - len(n_bytes))))


def describe_tokenizer(model_path, vocab_size):
    """Returns the description (see load_tokenizer) of the tokenizer of a pretrained model. This is
    the tokenizer in the model's folder; or GPT-2's, if the folder has none and the vocabulary has
    GPT-2's size. Returns None if the tokenizer is unknown. model_path: the model's folder, or a
    file in it."""
    folder = model_path if os.path.isdir(model_path) else os.path.dirname(model_path)
    if any(os.path.exists(os.path.join(folder, name)) for name in VOCABULARIES):
        return {'kind': 'folder', 'path': os.path.abspath(folder)}
    return {'kind': 'gpt2'} if 50257 <= vocab_size <= 50304 else None


def locate_tokenizer(description, folder):
    """Returns a copy of a tokenizer's description in which the path, which is relative to `folder`,
    has become folder/path. Returns a description without a path unchanged.

    Also sets "is_copy" (see HFTokenizer). It is true if the relative path is "tokenizer", because a
    run or a data set keeps its copy of a tokenizer in its folder "tokenizer"."""
    if description.get('kind') != 'folder':
        return description
    path = os.path.join(folder, os.path.expanduser(description['path']))
    return {**description, 'path': path, 'is_copy': description['path'] == 'tokenizer'}


# a text that tokenizers split in different ways: spaces, lines, digits, case, accents, scripts
PROBE = (
    'def add(x, y):\n    return x + y  # 12 + 345\n\n\n\tif a:\r\n        pass \n  '
    "It's IT'S, we'll don\u2019t; NaOH eBay mL pH camelCaseHTTPServer HELLO\u00c9t\u00e9 2026 1234567 "
    '3.14e-10 a_b __init__ http://x.org/?q=1&r=2#z ... !? -- \u2014 (a) [b] {c} <d> $5 100% @me #1 '
    '\u00bd \ufb01 \u212b e\u0301 na\u00efve \u4e2d\u6587\u5b57 \u65e5\u672c\u8a9e\u30ab\u30bf\u30ab\u30ca '
    '\ud55c\uad6d\uc5b4 \u0440\u0443\u0441\u0441\u043a\u0438\u0439 \u0627\u0644\u0639\u0631\u0628\u064a\u0629 '
    '\u0e44\u0e17\u0e22 \u0939\u093f\u0928\u094d\u0926\u0940 \U0001f600\U0001f468\u200d\U0001f469  two   three '
    '\u00a0\u3000\u2028end')
N_PROBED = 20  # tokens_digest looks at so many added tokens


GPT2_PROBE = 'ca9ae9970c63f5b0083078aff076afb78ea0b2316d961e9d3a5dd77f278ddd35'  # digest(probe_ids()) of GPT-2's BPE


def probe_ids(tokenizer):
    """Encodes PROBE with a tokenizers.Tokenizer, and returns the ids, without special tokens."""
    return tokenizer.encode(PROBE, add_special_tokens=False).ids


def tokens_digest(tokenizer):
    """Returns a digest of a Tokenizer of the library tokenizers. Two tokenizers with the same
    digest are taken for the same. The digest covers the vocabulary, the ids of PROBE, and the ids
    of a text with the first N_PROBED added tokens. In this text, each added token stands once
    directly before a word and once between spaces, because an added token may include the spaces
    around it."""
    added = sorted(tokenizer.get_added_tokens_decoder().items())[:N_PROBED]
    is_plain = tokenizer.encode_special_tokens
    tokenizer.encode_special_tokens = False
    text = ''.join(f'{token.content}ab {token.content} cd\n' for _, token in added)
    around = tokenizer.encode(text, add_special_tokens=False).ids
    tokenizer.encode_special_tokens = is_plain
    return digest([sorted(tokenizer.get_vocab().items()), probe_ids(tokenizer), around])
