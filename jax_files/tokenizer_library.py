"""Calls of the tokenizers library: what a stranger's tokenizer.json makes of them is a result or
one line."""
import collections
import contextlib
import functools
import json
import os
import re
import sys
import threading

from jax_flags import UserError, whole_characters

LARGEST_ID = 2**22  # of a token: the largest vocabularies that are known have a million
LARGEST_GROWTH = 1000  # of a text while it is normalized or decoded, per character
# seconds that a call may take with patterns that are not known, and one more per
# CHARACTERS_PER_SECOND of the text
SECONDS = 5
CHARACTERS_PER_SECOND = 20_000  # a hundredth of what honest patterns reach

# patterns at which a text is split before BPE
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+')
QWEN2_SPLIT = LLAMA3_SPLIT.replace('{1,3}', '')  # that of bpe:N, too
QWEN3_5_SPLIT = QWEN2_SPLIT.replace(r'?\p{L}+', r'?[\p{L}\p{M}]+').replace(
    r'[^\s\p{L}\p{N}]', r'[^\s\p{L}\p{M}\p{N}]')
UPPER, LOWER = r'[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]', r'[\p{Ll}\p{Lm}\p{Lo}\p{M}]'
ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K_SPLIT = '|'.join([  # that of gpt-oss
    rf'[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDINGS}',
    rf'[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDINGS}',
    r'\p{N}{1,3}', r' ?[^\s\p{L}\p{N}]+[\r\n/]*', r'\s*[\r\n]+', r'\s+(?!\S)', r'\s+'])
TEKKEN_SPLIT = O200K_SPLIT.replace(ENDINGS, '').replace('{1,3}', '')  # that of newer Mistrals
# those of DeepSeek V3, of which the last has line ends where others have escapes for them
DEEPSEEK_SPLITS = (r'\p{N}{1,3}', '[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+', '|'.join([
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
    '[^\r\n' r'\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+',
    r' ?[\p{P}\p{S}]+' '[\r\n]*', r'\s*' '[\r\n]+', r'\s+(?!\S)', r'\s+']))
KNOWN_PATTERNS = {GPT2_SPLIT, LLAMA3_SPLIT, QWEN2_SPLIT, QWEN3_5_SPLIT, O200K_SPLIT, TEKKEN_SPLIT,
                  *DEEPSEEK_SPLITS, r'\p{N}', r'\p{N}{1,3}', r'\s+', r'\d', ' ', ' {2,}',
                  '\\A\u2581'}  # the last one is of SentencePiece models, as transformers 5 saves them


class SafeTokenizer:
    """A Tokenizer of the tokenizers library with those of its methods that are used here. Whatever
    fails in them is a UserError of one line: the library raises plain Exceptions, and
    PanicException, which is none.

    A regular expression of a stranger may take centuries, and nothing stops the library: with a
    pattern that is not in KNOWN_PATTERNS a call is made in a thread of its own, and left behind
    when its time is over."""

    def __init__(self, raw, source):
        """raw: a function without arguments that makes the library's Tokenizer. source: the file or
        folder that messages name."""
        self.source = str(source)
        self.raw = self.call(raw)
        # transformers writes what the last call set into the file, and ignores it but for the name
        # of the token
        self.pad_token = (self.call(getattr, self.raw, 'padding') or {}).get('pad_token')
        self.call(self.raw.no_truncation)
        self.call(self.raw.no_padding)
        self.check_ids()
        self.check_parts()
        self.dropped = {}  # {character: whether it is}, of those that count_dropped has met

    @classmethod
    def from_file(cls, path):
        """Reads a tokenizer.json. Raises UserError if that fails."""
        from tokenizers import Tokenizer
        return cls(functools.partial(Tokenizer.from_file, str(path)), path)

    @classmethod
    def from_str(cls, content):
        """Reads the content of a tokenizer.json. Raises UserError if that fails."""
        from tokenizers import Tokenizer
        return cls(functools.partial(Tokenizer.from_str, content), 'a tokenizer.json')

    def call(self, function, *args, **options):
        """Returns the result of a function of the library. Raises UserError if it fails."""
        try:
            return function(*args, **options)
        except (UserError, MemoryError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # PanicException is a BaseException
            raise UserError(f'cannot use {self.source}: the tokenizers library fails with it '
                            f'({describe(error)}); copy or download it again') from None

    def call_in_time(self, n_characters, function, *args, **options):
        """Returns the result of a function that lets other threads run. Raises UserError if it
        fails or takes too long."""
        seconds = SECONDS + n_characters / CHARACTERS_PER_SECOND
        found, errors = [], []

        def run():
            try:
                found.append(function(*args, **options))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        with silent_stderr():  # a panic prints several lines
            thread.start()
            thread.join(seconds)
        if thread.is_alive():
            raise UserError(f'cannot use {self.source}: a pattern in it takes more than '
                            f'{seconds:.0f} s for a text of {n_characters:,} characters; use '
                            'another tokenizer')
        if errors:
            self.call(raise_error, errors[0])
        return found[0]

    def check_ids(self):
        """Raises UserError for ids that no vocabulary reaches: a table of all tokens would fill the
        memory."""
        largest = max(self.get_vocab().values(), default=0)
        if largest > LARGEST_ID:
            raise UserError(f'{self.source} has a token with the id {largest:,}, and none above '
                            f'{LARGEST_ID:,} is supported; copy or download it again')

    def check_parts(self):
        """Finds out whether this tokenizer is_strange. Raises UserError for one that blows up a
        text."""
        self.is_strange = False
        for part in (self.raw.normalizer, self.raw.pre_tokenizer, self.raw.decoder):
            growth = 1
            for step in steps_of(describe_part(part)):
                pattern = step.get('Regex')
                is_strange_pattern = isinstance(pattern, str) and pattern not in KNOWN_PATTERNS
                # may panic
                is_strange_strip = 'stop' in step and (step.get('start', 0) > 1 or step['stop'] > 0)
                self.is_strange = self.is_strange or is_strange_pattern or is_strange_strip
                for key in ('content', 'prepend'):
                    added = step.get(key)
                    growth *= max(1, len(added)) if isinstance(added, str) else 1
            if growth > LARGEST_GROWTH:
                raise UserError(f'{self.source} makes each character of a text up to {growth:,}; '
                                'use another tokenizer')

    def encode(self, text, add_special_tokens=True):
        """Returns the library's Encoding of a text: its ids, tokens, offsets. Half a character
        counts as U+FFFD."""
        text = whole_characters(text)
        if not self.is_strange:
            return self.call(self.raw.encode, text, add_special_tokens=add_special_tokens)
        encoding, = self.call_in_time(
            len(text), self.raw.encode_batch, [text], add_special_tokens=add_special_tokens)
        return encoding

    def encode_fast(self, text):
        """Returns the ids of a text without special tokens, in half the time: the Encoding has no
        offsets."""
        call = functools.partial(self.call_in_time, len(text)) if self.is_strange else self.call
        return call(self.raw.encode_batch_fast, [text], add_special_tokens=False)[0].ids

    def decode(self, ids, skip_special_tokens=True):
        """Returns the text of token ids."""
        ids = list(ids)
        if not self.is_strange:
            return self.call(self.raw.decode, ids, skip_special_tokens=skip_special_tokens)
        text, = self.call_in_time(
            len(ids), self.raw.decode_batch, [ids], skip_special_tokens=skip_special_tokens)
        return text

    def decode_parts(self, parts):
        """Returns the text of tokens that are given as texts, by the decoder; with spaces between
        them if there is none."""
        decoder = self.raw.decoder
        return ' '.join(parts) if decoder is None else self.call(decoder.decode, list(parts))

    def get_vocab(self):
        """Returns {token: id} with the added tokens."""
        return self.call(self.raw.get_vocab)

    def get_added_tokens_decoder(self):
        """Returns {id: AddedToken}."""
        return self.call(self.raw.get_added_tokens_decoder)

    def add_tokens(self, tokens):
        """Adds AddedTokens, each with the next id if it is new, and changes those that are there
        already."""
        self.call(self.raw.add_tokens, tokens)

    def token_to_id(self, token):
        """Returns the id of a token, given as a text; None if there is no such token."""
        return self.call(self.raw.token_to_id, token)

    def id_to_token(self, id):
        """Returns the text of the token with this id; None if there is no such token."""
        return self.call(self.raw.id_to_token, id)

    def to_str(self):
        """Returns the content of a tokenizer.json."""
        return self.call(self.raw.to_str)

    def decoder_kinds(self):
        """Returns the types of the decoder's steps, a set: 'ByteLevel', 'Fuse'."""
        return {step.get('type') for step in steps_of(describe_part(self.raw.decoder))}

    # -------------------------------------------------------------------------
    # characters that are left out

    def count_dropped(self, text):
        """Returns {character: how often} of the characters in a text that become no token, because
        the tokenizer lacks them and has no token for what it does not know; the ids do not decode
        to the text then."""
        if not self.may_drop:
            return {}
        text = whole_characters(text)
        added = [token.content for token in self.get_added_tokens_decoder().values()
                 if token.content and not (token.special and self.raw.encode_special_tokens)]
        if added:
            longest_first = sorted(added, key=len, reverse=True)
            text = re.sub('|'.join(map(re.escape, longest_first)), '', text)
        counts = collections.Counter(text)
        for character in counts:
            if character not in self.dropped:
                self.dropped[character] = self.drops(character)
        return {character: n for character, n in sorted(counts.items()) if self.dropped[character]}

    @functools.cached_property
    def may_drop(self):
        """Whether there can be characters that become no token: a BPE that lacks them, and has no
        unknown token."""
        from tokenizers import models, pre_tokenizers
        model = self.raw.model
        if not isinstance(model, models.BPE) or model.unk_token is not None:
            return False  # the others raise an error
        vocab = self.get_vocab()
        parts = [describe_part(part) for part in (self.raw.normalizer, self.raw.pre_tokenizer)]
        by_byte = any(step.get('type') == 'ByteLevel' for part in parts for step in steps_of(part))
        if by_byte:
            return not all(letter in vocab for letter in pre_tokenizers.ByteLevel.alphabet())
        return not (model.byte_fallback and all(f'<0x{byte:02X}>' in vocab for byte in range(256)))

    def drops(self, character):
        """Whether a character reaches the BPE and becomes no token there, or for a part of its
        bytes none."""
        with silent_stderr() if self.is_strange else contextlib.nullcontext():
            return self.call(self.loses_a_part, whole_characters(character))

    def loses_a_part(self, text):
        raw, model = self.raw, self.raw.model
        if raw.normalizer is not None:
            text = raw.normalizer.normalize_str(text)
        pieces = [text]
        if raw.pre_tokenizer is not None:
            pieces = [piece for piece, _ in raw.pre_tokenizer.pre_tokenize_str(text)]
        for piece in pieces:
            length = sum(len(token.value) for token in model.tokenize(piece))
            # with an affix a character may be a token within a word only
            is_inside = bool(model.tokenize(piece + piece)) and (
                model.continuing_subword_prefix or model.end_of_word_suffix)
            if length < len(piece) and not is_inside:
                return True
        return False


def name_characters(counts, most=20):
    """Returns the characters of {character: how often} in a message, the most frequent ones
    first."""
    names = [repr(character) for character in sorted(counts, key=counts.get, reverse=True)]
    text = ' '.join(names[:most])
    if len(names) > most:
        text += f' and {len(names) - most} others'
    return text


def warn_of_dropped(counts, place):
    """Prints a line on stderr that says which characters of a text became no token, if there are
    any."""
    if counts:
        n = sum(counts.values())
        characters = 'character' if n == 1 else 'characters'
        print(f'warning: {place}: {n:,} {characters} left out, for which the tokenizer has no '
              f'token: {name_characters(counts)}', file=sys.stderr)


def describe_part(part):
    """Returns a part of a Tokenizer as tokenizer.json has it; {} for None."""
    return {} if part is None else json.loads(part.__getstate__())


def steps_of(value):
    """Yields all objects in a JSON value."""
    if isinstance(value, dict):
        yield value
    children = ()
    if isinstance(value, dict):
        children = value.values()
    elif isinstance(value, list):
        children = value
    for child in children:
        yield from steps_of(child)


def describe(error):
    """Returns the kind and the first words of an error, for a message."""
    return f'{type(error).__name__}: {" ".join(str(error).split())[:200]}'


def raise_error(error):
    raise error


@contextlib.contextmanager
def silent_stderr():
    """While it lasts, what this process writes to stderr is discarded, also from other languages
    than Python."""
    try:
        kept = os.dup(2)
    except OSError:  # there is no stderr
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
