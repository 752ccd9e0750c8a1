"""What the files of a Hugging Face folder say of a tokenizer, as transformers 5 reads them: which
tokens are added, and which of them begin and end a text."""
import functools
import json
import os
from typing import NamedTuple

from jax_files.tokenizer_classes import (
    BUILT_CLASSES, CLASS_NAMES, GGUF_PATH, WITH_PADDING, build_pieces, check_class, class_of,
    describe_with_pieces, has_code, has_pieces, is_byte_level, may_take_pieces, take_pieces)
from jax_files.tokenizer_library import SafeTokenizer
from jax_flags import UserError, read_json, regular_file

NAMES = ('bos_token', 'eos_token', 'unk_token', 'sep_token', 'pad_token', 'cls_token', 'mask_token')
# of tokenizers without a tokenizer.json
OTHER_FILES = ('vocab.json', 'merges.txt', 'tokenizer.model', 'vocab.txt', 'spiece.model',
               'sentencepiece.bpe.model',
               'spm.model', 'tiktoken.model', 'tekken.json', 'vocab.bpe', 'encoder.json')
OTHER_ENDINGS = ('.tiktoken', '.spm')


class TokenizerFolder(NamedTuple):
    """A tokenizer and what else its folder says."""
    tokenizer: SafeTokenizer
    names: dict  # {'bos_token': text, ...} of the special tokens that have a name
    settings: dict  # tokenizer_config.json
    generation: dict  # generation_config.json
    config: dict  # config.json
    is_as_filed: bool  # whether tokenizer.json says all of it, and the names are in the settings


def read_tokenizer_folder(folder):
    """Returns the TokenizerFolder of a folder with a tokenizer.json, or vocab.json and merges.txt.

    Raises UserError if a file cannot be read or is malformed."""
    settings = read_json(regular_file(folder, 'tokenizer_config.json'), optional=True)
    generation = read_json(regular_file(folder, 'generation_config.json'), optional=True)
    config = read_json(regular_file(folder, 'config.json'), optional=True)
    path = regular_file(folder, 'tokenizer.json')
    is_filed = os.path.exists(path) or not has_vocab_and_merges(folder)
    try:
        kind = class_of(settings, config)
        check_class(kind, folder)
        if os.path.exists(os.path.join(folder, GGUF_PATH)):
            kind = 'generic'
        if kind == 'LlamaTokenizer' and not has_code(settings) and is_byte_level(path):
            kind = 'generic'
        filed = None
        if is_filed:
            filed = SafeTokenizer.from_file(path)
            before = describe_added_tokens(filed)
        defaults = dict(CLASS_NAMES.get(kind, {}))
        if filed is not None and filed.pad_token and kind not in WITH_PADDING:
            defaults['pad_token'] = filed.pad_token
        declared = read_declared_tokens(folder, filed, settings, defaults)
        pieces = build_pieces(kind, settings, text_of(declared.names.get('unk_token')))
        if not is_filed:
            tokenizer, is_changed = build_tokenizer(folder, kind, pieces), True
        elif pieces:
            tokenizer, is_changed = with_pieces(filed, path, pieces, declared)
        else:
            tokenizer, is_changed = filed, False
        names = add_declared_tokens(tokenizer, declared, kind)
        if not is_filed:
            add_ends(tokenizer, names, settings)
        elif pieces and pieces.ends is not None:
            add_ends(tokenizer, names, pieces.ends)
        tokenizer.raw.encode_special_tokens = bool(settings.get('split_special_tokens'))
    except (TypeError, KeyError, AttributeError, ValueError, OverflowError) as error:
        raise UserError(f"the tokenizer's settings in {folder} are malformed "
                        f'({type(error).__name__}: {error}); copy or download them '
                        'again') from None
    tokenizer.check_ids()

    # whether a copy of tokenizer.json and the settings says the same
    is_as_filed = not is_changed and before == describe_added_tokens(tokenizer)
    if pieces and pieces.ends is not None:
        is_as_filed = False
    for name in defaults:
        if name in names and text_of(settings.get(name)) != names[name]:
            is_as_filed = False
    return TokenizerFolder(tokenizer, names, settings, generation, config, is_as_filed)


def describe_added_tokens(tokenizer):
    """Returns a text that tells all added tokens of a SafeTokenizer."""
    return repr(sorted(tokenizer.get_added_tokens_decoder().items()))


def has_vocab_and_merges(folder):
    """Whether a folder has the two files of an older byte-level BPE."""
    return all(os.path.exists(os.path.join(folder, name)) for name in ('vocab.json', 'merges.txt'))


def other_tokenizer_files(folder):
    """Returns the names of the files in a folder that may hold a tokenizer of another form than
    tokenizer.json."""
    try:
        found = sorted(os.listdir(folder or '.'))
    except OSError:
        return []
    return [name for name in found if name in OTHER_FILES or name.endswith(OTHER_ENDINGS)]


def build_tokenizer(folder, kind, pieces):
    """Returns the SafeTokenizer of vocab.json and merges.txt, with the Pieces of the class `kind`.

    Raises UserError if the files are damaged, or the class is not in BUILT_CLASSES."""
    from tokenizers import Tokenizer, models
    if kind not in BUILT_CLASSES:
        raise UserError(unread_files(folder, ['merges.txt', 'vocab.json']))
    vocab = regular_file(folder, 'vocab.json')
    merges = regular_file(folder, 'merges.txt')

    def build():
        return take_pieces(Tokenizer(models.BPE.from_file(vocab, merges)), pieces)

    return SafeTokenizer(build, folder)


def with_pieces(filed, path, pieces, declared):
    """Returns (SafeTokenizer, whether it is another one than the file's) with the vocabulary and
    merges of a tokenizer.json and with Pieces.

    filed: what the file says by itself, which is changed if it is a BPE with the declared tokens
    and no others; else the result is new, and has no added tokens yet."""
    from tokenizers import Tokenizer
    by_id = {id: repr(token) for id, token in declared.by_id.items()}
    added = {id: repr(token) for id, token in filed.get_added_tokens_decoder().items()}
    if added == by_id and has_pieces(filed.raw, pieces):
        return filed, False
    if added == by_id and may_take_pieces(filed.raw):
        filed.call(take_pieces, filed.raw, pieces)
        filed.check_parts()
        return filed, True
    content = json.dumps(describe_with_pieces(read_json(path), pieces))
    return SafeTokenizer(functools.partial(Tokenizer.from_str, content), path), True


def add_ends(tokenizer, names, settings):
    """Lets a tokenizer that was built put tokens around each text, as add_bos_token and
    add_eos_token say; beside a tokenizer.json transformers ignores both."""
    from tokenizers import processors
    parts = ['$A']
    if settings.get('add_bos_token') and names.get('bos_token'):
        parts.insert(0, names['bos_token'])
    if settings.get('add_eos_token') and names.get('eos_token'):
        parts.append(names['eos_token'])
    special = [(text, tokenizer.token_to_id(text)) for text in {*parts} - {'$A'}]
    tokenizer.raw.post_processor = tokenizer.call(
        processors.TemplateProcessing, single=parts, special_tokens=special)


def unread_files(folder, names):
    """Returns the message that these files of a folder are not read, and what to do."""
    return (f'{folder} has no tokenizer.json, and {", ".join(names)} beside the weights, which is '
            'not read; make a tokenizer.json with transformers: '
            f"AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')")


# -----------------------------------------------------------------------------
# declared tokens

class DeclaredTokens(NamedTuple):
    """The tokens that the files of a folder declare; a token is a text or an AddedToken."""
    by_id: dict  # {id: AddedToken}
    names: dict  # {'bos_token': token, ...}
    extra: list  # the other special ones


def read_declared_tokens(folder, filed, settings, defaults):
    """Returns the DeclaredTokens of a folder.

    filed: the SafeTokenizer of its tokenizer.json, or None.
    settings: the content of tokenizer_config.json.
    defaults: {name: text} of the tokens that no file names.
    The other files are read only if the settings have no added_tokens_decoder. Raises TypeError,
    KeyError, ValueError or UserError for malformed ones."""
    from tokenizers import AddedToken
    values = {key: value for key, value in settings.items() if key != 'chat_template'}
    if values.get('additional_special_tokens') and not values.get('extra_special_tokens'):
        values['extra_special_tokens'] = values.pop('additional_special_tokens')

    # tokens by their ids, which other files have if the settings do not
    named = take_names(values, str)
    by_id = {}
    if 'added_tokens_decoder' in settings:
        for id, token in settings['added_tokens_decoder'].items():
            by_id[int(id)] = make_token(token)
    else:
        merge_special_tokens_map(folder, values, named)
        by_id = legacy_tokens(folder, values, filed)
    values = {key: as_tokens(value) for key, value in values.items()}
    named = {**take_names(values, (str, AddedToken)), **named}  # in this order
    extra = values.get('extra_special_tokens', values.get('additional_special_tokens')) or []
    if isinstance(extra, dict):
        named.update(extra)
        extra = []

    # tokens by their names; those that have an id, too, are the same
    by_text = {token.content: token for token in by_id.values()}
    names = {}
    for name in NAMES:
        token = values.get(name)
        if name not in values:
            token = defaults.get(name)
        if token is not None:
            names[name] = by_text.get(text_of(token), token)
    own = {name: token for name, token in defaults.items() if name not in NAMES}
    for name, token in {**own, **named}.items():
        names[name] = make_special_token(token)
    return DeclaredTokens(by_id, names, [make_special_token(token) for token in extra])


def add_declared_tokens(tokenizer, declared, kind):
    """Adds DeclaredTokens to a SafeTokenizer, in transformers' order, new ones with the next ids;
    returns their names {'bos_token': text, ...}. kind: the name of the class."""
    from tokenizers import AddedToken
    add_missing_tokens(tokenizer, declared.by_id, declared.names, declared.extra)
    texts = {name: text_of(token) for name, token in declared.names.items()}
    special = dict.fromkeys([*texts.values(), *map(text_of, declared.extra)])
    if kind == 'Qwen2Tokenizer':
        tokenizer.add_tokens([AddedToken(text, special=True) for text in special])
    if kind == 'CohereTokenizer':
        tokens = [*declared.names.values(), *declared.extra]
        for i, token in enumerate(tokens):
            if isinstance(token, str):
                tokens[i] = AddedToken(token, special=True, normalized=False)
        tokenizer.call(tokenizer.raw.add_special_tokens, tokens)
    return texts


def take_names(values, kinds):
    """Returns {name: token} of the tokens with names that only some models have, as image_token,
    removed from the values."""
    names = [key for key, value in values.items()
             if key.endswith('_token') and key not in NAMES and isinstance(value, kinds)]
    named = {name: values.pop(name) for name in names}
    if isinstance(values.get('extra_special_tokens'), dict):
        named.update(values.pop('extra_special_tokens'))
    return named


def merge_special_tokens_map(folder, values, named):
    """Overwrites values of tokenizer_config.json with those of special_tokens_map.json, as
    transformers does."""
    path = regular_file(folder, 'special_tokens_map.json')
    for key, value in read_json(path, optional=True).items():
        if key == 'extra_special_tokens' and isinstance(value, list):
            known = list(values.get(key) or [])
            tokens = [make_special_token(token) for token in value]
            value = known + [token for token in tokens if token not in known]
        elif isinstance(value, dict) and key != 'extra_special_tokens':
            value = make_special_token(value)
        values[key] = value
    if isinstance(values.get('extra_special_tokens'), dict):
        named.update(values.pop('extra_special_tokens'))


def legacy_tokens(folder, values, filed):
    """Returns {id: AddedToken} of added_tokens.json and a tokenizer.json; the former are special if
    the others name them, in tokenizer_config.json as a text, not as an object."""
    from tokenizers import AddedToken
    declared = [values.get(name) for name in NAMES] + list(values.get('extra_special_tokens') or [])
    special = {text_of(token) for token in declared if isinstance(token, (str, AddedToken))}
    by_id = {}
    for text, id in read_json(regular_file(folder, 'added_tokens.json'), optional=True).items():
        if type(id) is not int:
            raise TypeError(f'the id of {text!r} is {id!r}')
        is_special = text in special
        by_id[id] = AddedToken(text, normalized=not is_special, special=is_special)
    if filed is not None:
        by_id.update(filed.get_added_tokens_decoder())
    return by_id


def add_missing_tokens(tokenizer, by_id, names, extra):
    """Adds the tokens that are new or declared otherwise, in transformers' order: those by id,
    those with a name, the others. Those with a name become special, which decoding leaves out."""
    from tokenizers import AddedToken
    added = tokenizer.get_added_tokens_decoder().values()
    tokens = [token for _, token in sorted(by_id.items(), key=first_of)]
    texts = {token.content for token in [*added, *tokens]}
    for token in [*names.values(), *extra]:
        if text_of(token) not in texts and token not in tokens:
            tokens.append(token)
    named = set(map(text_of, names.values()))
    for i, token in enumerate(tokens):
        if isinstance(token, str):
            tokens[i] = AddedToken(token, special=True)
        elif token.content in named:
            token.special = True
    if tokens:
        tokenizer.add_tokens(tokens)


def first_of(pair):
    return pair[0]


def text_of(token):
    """Returns the text of a token that is given as a text, an AddedToken or an object in JSON; None
    for None.

    Raises TypeError for anything else."""
    if token is None or isinstance(token, str):
        return token
    if isinstance(token, dict):
        token = make_token(token)
    if not hasattr(token, 'content'):
        raise TypeError(f'a token is {token!r}')
    return token.content


def make_token(token, **options):
    """Returns the AddedToken of an object in JSON; a text stays one. Raises TypeError for anything
    else."""
    from tokenizers import AddedToken
    if isinstance(token, (str, AddedToken)):
        return token
    if not isinstance(token, dict) or not isinstance(token.get('content'), str):
        raise TypeError(f'a token is {token!r}')
    values = {}
    for key in ('content', 'single_word', 'lstrip', 'rstrip', 'normalized', 'special'):
        if key in token:
            values[key] = token[key]
    values.update(options)
    return AddedToken(**values)


def make_special_token(token):
    """Returns make_token's result, as a special token."""
    return make_token(token, special=True)


def as_tokens(value):
    """Returns a value of tokenizer_config.json with AddedTokens for the objects that are such."""
    is_token = isinstance(value, dict) and isinstance(value.get('content'), str)
    if is_token:
        return make_special_token(value) if '__type' not in value else make_token(value)
    if isinstance(value, list):
        return [as_tokens(each) for each in value]
    return value
