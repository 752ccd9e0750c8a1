"""Text <-> token ids. A dict in meta.json and in every checkpoint describes a tokenizer."""
import functools
import itertools
import operator
import os
import re
import shutil
from pathlib import Path

import numpy as np

from jax_files.chats import (
    MORE_TEMPLATES, ChatTemplate, copy_more_templates, encode_training_chat, read_chat,
    read_chat_templates,
)
from jax_files.tokenizer_classes import AS_FILED
from jax_files.tokenizer_folders import other_tokenizer_files, read_tokenizer_folder, unread_files
from jax_files.tokenizer_library import LARGEST_ID, name_characters
from jax_flags import SAMPLING_NAMES, UserError, read_json, regular_file, write_json, write_text

# files of a Hugging Face folder that are copied; all but the first may be missing
TOKENIZER_FILES = ('tokenizer.json', 'tokenizer_config.json', 'chat_template.jinja',
                   'special_tokens_map.json', 'generation_config.json')
# patterns of the files that tell of a tokenizer
READ_FILES = (
    *TOKENIZER_FILES, f'{MORE_TEMPLATES}/*.jinja', 'config.json', 'added_tokens.json', 'vocab.json',
    'merges.txt')


class CharTokenizer:
    """A token per character. The other classes have the same attributes and methods."""
    stop_tokens = ()  # ids that end a text
    # before a text that is scored: the token that begins a document, else the one that ends it
    start_token = None
    start_text = None  # its name, which may be at the beginning of a text
    chat_template = None  # how a chat is written as a text
    sampling = {}  # what the model's makers sample with, {'temperature': 0.6, ...}

    def __init__(self, chars):
        """chars: a text of the characters in the order of their ids."""
        self.chars = chars
        self.vocab_size = len(chars)
        self.ids = {c: i for i, c in enumerate(chars)}

    def encode(self, text, begin=True):
        """Returns the ids of a text. Raises UserError for unknown characters."""
        check_characters(text, self.ids)
        return [self.ids[c] for c in text]

    def count_dropped(self, text):
        return {}

    def decode(self, ids):
        return ''.join(self.chars[i] for i in ids)

    def token_bytes(self):
        """Returns the number of UTF-8 bytes of each token, 0 for special tokens; None if it is not
        known."""
        return [len(c.encode()) for c in self.chars]


def check_characters(text, known):
    """Raises UserError if a text has others than the known characters."""
    unknown = sorted(set(text) - set(known))
    if unknown:
        raise UserError('the prompt has characters that the model does not know: '
                        f'{" ".join(map(repr, unknown))}; it knows {"".join(known)!r}')


def write_char_tokenizer(chars, folder):
    """Writes the tokenizer.json of a vocabulary of characters: a BPE without merges."""
    from tokenizers import Tokenizer, decoders, models
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(chars)}, []))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(os.path.join(folder, 'tokenizer.json'))


def write_gpt2_tokenizer(folder):
    """Writes the tokenizer.json of GPT-2's BPE, with the merges that tiktoken's ranks imply."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    bpe = GPT2Tokenizer().bpe
    ranks = bpe._mergeable_ranks
    letters = byte_letters()

    def spell(token):
        return ''.join(letters[b] for b in token)

    # the last merge that makes each token
    merges = []
    for token in sorted(ranks, key=ranks.get):
        parts = split_last_merge(token, ranks)
        if len(parts) == 2:
            merges.append(tuple(spell(part) for part in parts))
    tokens = {spell(token): id for token, id in ranks.items()}
    tokens['<|endoftext|>'] = bpe.eot_token
    tokenizer = Tokenizer(models.BPE(tokens, merges))
    tokenizer.add_special_tokens([AddedToken('<|endoftext|>', special=True, normalized=False)])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(os.path.join(folder, 'tokenizer.json'))
    settings = {'tokenizer_class': AS_FILED, 'eos_token': '<|endoftext|>'}
    write_json(os.path.join(folder, 'tokenizer_config.json'), settings)


def byte_letters():
    """Returns {byte: the character that stands for it in a byte-level BPE}."""
    letters = {}
    n_others = 0
    for byte in range(256):
        stands_for_itself = chr(byte).isprintable() and byte != 32
        if stands_for_itself:
            letters[byte] = chr(byte)
        else:
            letters[byte] = chr(256 + n_others)
            n_others += 1
    return letters


def split_last_merge(token, ranks):
    """Returns the two parts that a token is merged from last, or its byte.

    token: bytes. ranks: {token: rank}; the lowest rank is merged first."""
    parts = [bytes([b]) for b in token]
    while len(parts) > 2:
        pair_ranks = [ranks.get(a + b, len(ranks)) for a, b in itertools.pairwise(parts)]
        i = pair_ranks.index(min(pair_ranks))
        parts[i:i + 2] = [parts[i] + parts[i + 1]]
    return parts


class GPT2Tokenizer:
    """GPT-2's BPE, of tiktoken."""
    stop_tokens = ()
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

    def count_dropped(self, text):
        return {}

    def decode(self, ids):
        return self.bpe.decode(ids)

    def token_bytes(self):
        n_bytes = [len(self.bpe.decode_single_token_bytes(id)) for id in range(self.start_token)]
        return [*n_bytes, 0]


class HFTokenizer:
    """The tokenizer of a Hugging Face folder, as transformers 5 reads it: tokenizer.json (or
    vocab.json and merges.txt) with the special tokens, the stop tokens, the chat template and the
    sampling defaults from the folder's other files. A prompt may contain special tokens; decoding
    leaves them out."""

    def __init__(self, folder):
        folder = Path(folder)
        found = read_tokenizer_folder(folder)
        self.tokenizer = found.tokenizer
        self.special = found.names
        self.generation = found.generation
        try:
            self.read_ends(found)
            self.sampling = read_sampling(found.generation)
            templates = read_chat_templates(folder, found.settings)
            first = next(iter(templates.values()), None)
            self.chat_template = templates.get('default', first)
            self.template = ChatTemplate(templates, self.special)
            size = text_config(found.config).get('vocab_size') or self.vocab_size
            limit_vocabulary(self, operator.index(size))
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise UserError(f"the tokenizer's settings in {folder} are malformed "
                            f'({type(error).__name__}: {error}); copy or download them '
                            'again') from None
        self.is_as_filed = found.is_as_filed

    def read_ends(self, found):
        """Sets the tokens that begin and end a text. Those without a name are as the ids in
        generation_config.json, or else config.json, say."""
        begin_ids = []
        end_ids = []
        for source in (found.generation, found.config, text_config(found.config)):
            begin_ids += token_ids(source.get('bos_token_id'))
            end_ids += token_ids(source.get('eos_token_id'))
        vocab = self.tokenizer.get_vocab()
        begin_token = vocab.get(self.special.get('bos_token'))
        end_token = vocab.get(self.special.get('eos_token'))
        known = set(vocab.values())
        size = text_config(found.config).get('vocab_size')
        if size:  # a token past the model's embedding is none
            known = {id for id in known if id < operator.index(size)}
        self.end_token = first_known([end_token, *end_ids], known)  # of a document
        self.start_token = first_known([begin_token, end_token, *begin_ids, *end_ids], known)
        self.start_text = None
        if self.start_token is not None:
            self.start_text = self.tokenizer.id_to_token(self.start_token)
        stop_tokens = {id for id in (end_token, *end_ids) if id is not None}
        self.stop_tokens = tuple(sorted(id for id in stop_tokens if 0 <= id <= LARGEST_ID))
        self.ids = vocab
        # not their number: ids may have holes
        self.vocab_size = max(vocab.values(), default=-1) + 1

        # tokens that decoding leaves out; those that begin and end a text also if tokenizer.json
        # takes them for text: they would be shown, saved, and doubled in the next prompt
        added = self.tokenizer.get_added_tokens_decoder()
        self.special_ids = {id for id, token in added.items() if token.special}
        self.special_ids |= added.keys() & {begin_token, end_token, *self.stop_tokens}

        self.byte_of = {}  # {id: its byte} where tokens stand for single bytes of characters
        if 'ByteFallback' in self.tokenizer.decoder_kinds():
            self.byte_of = {id: int(token[1:-1], 16) for token, id in vocab.items()
                            if re.fullmatch('<0x[0-9A-F]{2}>', token)}
        raw = self.tokenizer.raw
        is_plain = raw.normalizer is None and raw.pre_tokenizer is None
        # whether write_char_tokenizer made it
        self.has_letters_only = is_plain and all(len(token) == 1 for token in vocab)

    def encode(self, text, begin=True):
        """Returns the ids of a text, with those that the tokenizer puts before each text unless
        begin is False, but without those that it puts behind: what follows here is scored or
        generated."""
        if self.has_letters_only:  # it would leave out what it lacks
            check_characters(text, self.ids)
        ids = self.tokenizer.encode(text, add_special_tokens=begin).ids
        if begin:
            _, behind = self.added_tokens
            ids = ids[:len(ids) - len(behind)]
        return ids

    @functools.cached_property
    def added_tokens(self):
        """Returns (ids, ids) that the tokenizer puts before and behind each text."""
        for probe in ('a', *itertools.islice(self.ids, 100)):
            encoding = self.tokenizer.encode(probe)
            is_added = encoding.special_tokens_mask
            if 0 in is_added:
                n_begin = is_added.index(0)
                n_end = is_added[::-1].index(0)
                return encoding.ids[:n_begin], encoding.ids[len(is_added) - n_end:]
        return [], []

    def count_dropped(self, text):
        """Returns {character: how often} of the characters in a text that become no token, because
        the tokenizer lacks them and has no token for what it does not know; the ids do not decode
        to the text then."""
        if self.has_letters_only:
            return {}
        return self.tokenizer.count_dropped(text)

    def decode(self, ids):
        """Returns the text of ids, without special tokens."""
        if '<|channel|>' in self.ids and not self.byte_of:
            # gpt-oss separates its channels by special tokens: they stay, see final_answer
            ids = [id for id in ids if id not in self.stop_tokens]
            return self.tokenizer.decode(ids, skip_special_tokens=False)
        ids = [id for id in ids if id not in self.special_ids]
        if not self.byte_of or self.tokenizer.is_strange:
            return self.tokenizer.decode(ids)
        # the library turns all characters beside a broken one into U+FFFD
        parts = []
        for are_bytes, run in itertools.groupby(ids, self.byte_of.__contains__):
            if are_bytes:
                parts.append(bytes(self.byte_of[id] for id in run).decode(errors='replace'))
                continue
            for id in run:
                token = self.tokenizer.id_to_token(id)
                if token:
                    parts.append(token)
        return self.tokenizer.decode_parts(parts)

    def token_bytes(self):
        """Returns the number of UTF-8 bytes of each token, see CharTokenizer."""
        kinds = self.tokenizer.decoder_kinds()
        if not kinds & {'ByteLevel', 'ByteFallback', 'Metaspace', 'Fuse'}:
            return None
        n_bytes = [0] * (max(self.ids.values(), default=-1) + 1)
        for token, id in self.ids.items():
            if 'ByteLevel' in kinds:  # a character stands for each byte
                n_bytes[id] = len(token)
            elif id in self.byte_of:
                n_bytes[id] = 1
            else:
                n_bytes[id] = len(token.replace('\u2581', ' ').encode())
        for id, token in self.tokenizer.get_added_tokens_decoder().items():
            n_bytes[id] = 0 if id in self.special_ids else len(token.content.encode())
        return n_bytes

    def render_chat(self, messages, *, add_generation_prompt, tools=None, variables=None):
        """Returns the text of the messages of a chat; tools, variables: see
        jax_files.chats.read_chat. Raises UserError."""
        chat = read_chat(messages, tools, variables)
        return self.template.render(chat, add_generation_prompt=add_generation_prompt)

    def encode_chat(self, messages, *, tools=None, variables=None):
        """Returns the ids of render_chat, with the beginning of the answer; the template writes all
        special tokens."""
        text = self.render_chat(messages, add_generation_prompt=True, tools=tools,
                                variables=variables)
        refuse_dropped(self.count_dropped(text))
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def encode_training_chat(self, messages, *, counted=None, tools=None, variables=None):
        """Returns (ids, mask) of a conversation, see jax_files.chats.encode_training_chat."""
        return encode_training_chat(self, read_chat(messages, tools, variables), counted)


def text_config(config):
    """Returns the part of a config.json that is of the language model."""
    return config.get('text_config') or config


def token_ids(value):
    """Returns the ids of a value of a config, an id, several or None. Raises TypeError for anything
    else."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return [operator.index(id) for id in values if id is not None]


def first_known(ids, known):
    """Returns the first of the ids that is known; None if none is."""
    return next((id for id in ids if id in known), None)


def read_sampling(generation):
    """Returns what the model's makers sample with, {'temperature': 0.6, ...}, by
    generation_config.json."""
    found = {}
    for name in SAMPLING_NAMES:
        value = generation.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            found[name] = value
    if found.get('top_k', 0) < 0:  # many write -1 for off
        found['top_k'] = 0
    return found


def refuse_dropped(counts):
    """Raises UserError if a prompt has characters that become no token, see
    HFTokenizer.count_dropped."""
    if counts:
        raise UserError('the prompt has characters for which the tokenizer has no token, and which '
                        f'it would leave out: {name_characters(counts)}; write the prompt without '
                        'them')


def limit_vocabulary(tokenizer, size):
    """Leaves out special tokens past the `size` of a model's embedding: Gemma 3's text models have
    one, for images."""
    if getattr(tokenizer, 'special_ids', set()).issuperset(range(size, tokenizer.vocab_size)):
        tokenizer.vocab_size = min(tokenizer.vocab_size, size)


def strip_partial_utf8(text):
    """Returns the text without an incomplete character at its end: a token may end within one,
    which decodes to U+FFFD."""
    return text.rstrip('\ufffd')


def load_tokenizer(description):
    """Returns the tokenizer, an object like CharTokenizer, of a description {'kind': 'char',
    'chars': ...}, {'kind': 'gpt2'} or {'kind': 'folder', 'path': ...}. Raises UserError for any
    other."""
    check_description(description)
    kind = description.get('kind')
    if kind == 'char':
        return CharTokenizer(description['chars'])
    if kind == 'gpt2':
        return GPT2Tokenizer()
    if kind == 'folder':
        return HFTokenizer(description['path'])
    raise UserError(f'unknown kind of tokenizer {kind!r}')


def check_description(description):
    """Raises UserError for what cannot be the description of a tokenizer, as a damaged meta.json
    has it."""
    is_description = isinstance(description, dict)
    if is_description:
        kind = description.get('kind')
        if kind == 'char':
            is_description = isinstance(description.get('chars'), str)
        elif kind == 'folder':
            is_description = isinstance(description.get('path'), str)
    if not is_description:
        raise UserError(f'{description!r:.100} does not describe a tokenizer, as meta.json should; '
                        'prepare the data set again')


def load_token_bytes(description, vocab_size):
    """Returns token_bytes of the tokenizer that a description means, as an array [vocab_size]; None
    if it cannot be loaded."""
    try:
        n_bytes = load_tokenizer(description).token_bytes()
    except UserError:
        return None
    if not n_bytes:
        return n_bytes
    n_missing = max(0, vocab_size - len(n_bytes))
    return np.pad(np.array(n_bytes), (0, n_missing))


def describe_tokenizer(model_path, vocab_size):
    """Returns the description of the tokenizer of a pretrained model: its folder's tokenizer.json,
    or vocab.json and merges.txt, or GPT-2's if the size of the vocabulary is GPT-2's; None if it is
    unknown.

    Raises UserError if the folder has a tokenizer that cannot be read: the model's is not GPT-2's
    then."""
    folder = model_path if os.path.isdir(model_path) else os.path.dirname(model_path)
    if os.path.exists(os.path.join(folder, 'tokenizer.json')):
        return {'kind': 'folder', 'path': os.path.abspath(folder)}
    others = other_tokenizer_files(folder)
    if {'vocab.json', 'merges.txt'} <= set(others):
        return {'kind': 'folder', 'path': os.path.abspath(folder)}
    if others:
        raise UserError(unread_files(folder, others))
    return {'kind': 'gpt2'} if 50257 <= vocab_size <= 50304 else None


def locate_tokenizer(description, folder):
    """Returns the description with its path, if it has one, relative to the current folder instead
    of relative to `folder`."""
    check_description(description)
    if description.get('kind') != 'folder':
        return description
    path = os.path.join(folder, os.path.expanduser(description['path']))
    return {**description, 'path': path}


def same_tokens(a, b):
    """Whether the ids of two tokenizers, given by their descriptions, mean the same tokens."""
    kinds = {a['kind'], b['kind']}
    if 'gpt2' not in kinds:
        return load_tokenizer(a).ids == load_tokenizer(b).ids
    if kinds == {'gpt2', 'folder'}:  # without loading GPT-2's BPE, which may need a network
        ids = load_tokenizer(a if a['kind'] == 'folder' else b).ids
        of_gpt2 = {'the': 1169, '\u0120the': 262, '<|endoftext|>': 50256}
        return all(ids.get(token) == id for token, id in of_gpt2.items())
    return kinds == {'gpt2'}


def check_tokens(data, dataset, model, model_name, vocab_size):
    """Returns the description of the tokenizer of a run that trains a pretrained model with a data
    set, given those of both, the model's None if it is unknown. Raises UserError unless their ids
    mean the same tokens."""
    if model and same_tokens(data, model):
        return model
    if not model and data['kind'] == 'char' and len(data['chars']) == vocab_size:
        return data
    remedy = f'put the tokenizer.json of {model_name} beside its weights'
    if model:
        remedy = remedy_for_tokens(model, model_name)
    raise UserError(f'dataset {dataset} has other tokens than {model_name}, their ids mean '
                    f'something else; {remedy}')


def remedy_for_tokens(description, name):
    """Returns what makes a data set with the tokens of this tokenizer, for messages. name: of the
    model or the folder that has it."""
    if description['kind'] == 'char':
        return 'the model knows characters: take a data set with the same ones'
    if description['kind'] == 'gpt2':
        name = 'gpt2'
    return (f'make it with: python data/text/prepare.py my.txt --tokenizer={name} '
            '--out_dir=data/mine')


def copy_tokenizer(description, folder):
    """Copies the files of a tokenizer of the kind 'folder' to `folder`: tokenizer.json with all
    tokens, also those that other files declare, and generation_config.json with all end tokens."""
    if description['kind'] != 'folder':
        return
    source_folder = description['path']
    if os.path.realpath(source_folder) == os.path.realpath(folder):
        return
    tokenizer = HFTokenizer(source_folder)
    sources = {name: regular_file(source_folder, name) for name in TOKENIZER_FILES}

    # the files as they are
    os.makedirs(folder, exist_ok=True)
    for name, source in sources.items():
        if os.path.exists(source):
            shutil.copyfile(source, os.path.join(folder, name))
        elif os.path.exists(os.path.join(folder, name)):
            os.remove(os.path.join(folder, name))  # an earlier tokenizer's
    copy_more_templates(source_folder, folder)

    # what they do not say, or what only files say that are not copied
    path = os.path.join(folder, 'tokenizer_config.json')
    settings = read_json(path, optional=True)
    if not tokenizer.is_as_filed:
        write_text(os.path.join(folder, 'tokenizer.json'), tokenizer.tokenizer.to_str())
        settings = {**tokenizer.special, **settings}
        if 'added_tokens_decoder' in settings:
            added = tokenizer.tokenizer.get_added_tokens_decoder()
            by_id = {id: token.__getstate__() for id, token in added.items()}
            settings['added_tokens_decoder'] = by_id
    # the class whose code splits text was followed; now tokenizer.json says it all
    write_json(path, {**settings, 'tokenizer_class': AS_FILED})
    generation = {**tokenizer.generation, 'eos_token_id': list(tokenizer.stop_tokens)}
    write_json(os.path.join(folder, 'generation_config.json'), generation)
