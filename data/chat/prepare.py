"""
Prepare conversations for finetuning a chat model: a file of rows, each with "messages" of "role"
and "content". JSON lines, a JSON array, CSV or parquet; ShareGPT, Alpaca and other forms are read
too, see readme.md. They are written by the chat template of the model, and only the assistant's
tokens count in the loss:
$ python data/chat/prepare.py mychats.jsonl --tokenizer=Qwen/Qwen3-0.6B --out_dir data/mychats
Rows of "messages" that ask, "chosen" and "rejected", two answers, make pairs for DPO; see
config/finetune_dpo.py. With --rows=1024 each row of training holds whole conversations, which do
not see each other; without it, windows of that length are cut from all of them in a row. Without a
file, example.jsonl beside this script. Saves train.bin and val.bin with the ids, train_mask.bin and
val_mask.bin with a byte for each of them, meta.json that says how to read them, and a copy of the
tokenizer.
"""
import bisect
import collections
import itertools
import json
import os
import sys

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from common import UserError, create_parser, fail, load_model_tokenizer, row_length, save_tokens
from forms import KEYS, read_example
from jax_files.chats import encode_training_chats
from jax_flags import whole_characters
from reading import BadRow, read_rows

here = os.path.dirname(os.path.abspath(__file__))


def with_whole_characters(row):
    """Returns the row with U+FFFD for each half of a character in its texts. Raises UserError for
    what is not JSON."""
    try:
        text = json.dumps(row, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as e:
        raise UserError(f'has values that are not JSON ({e})') from None
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.loads(whole_characters(text))
    return row


def read_chats(path, forms):
    """Yields (where, Example) of each row of a file, and counts the rows by form. Raises
    UserError."""
    n_chats = 0
    for where, row in read_rows(path, KEYS):
        try:
            if isinstance(row, BadRow):
                raise UserError(row.reason)
            example = read_example(with_whole_characters(row))
            if n_chats and len(example.chats) != n_chats:
                raise UserError('has one answer where those before have "chosen" and "rejected", '
                                'or the reverse')
        except UserError as e:
            fail(f'{path}, {where}: {e}')
        n_chats = len(example.chats)
        forms[example.form] += 1
        yield where, example


def encode_examples(path, found, enc):
    """Yields [(ids, mask)] of the conversations of each (where, Example). Raises UserError."""
    ahead = collections.deque() # what is asked for, and not encoded yet

    def ask():
        for where, example in found:
            ahead.append((where, example))
            yield from zip(example.chats, example.counted)

    # Conversations are rendered ahead, in another process; their rows wait in `ahead`.
    results = encode_training_chats(enc, ask())
    for result in results:
        where, example = ahead.popleft()
        encoded = [result, *itertools.islice(results, len(example.chats) - 1)]

        # Refuse what the template refuses, and answers of which nothing is learned.
        for chat, counted, result in zip(example.chats, example.counted, encoded):
            if isinstance(result, UserError):
                fail(f'{path}, {where}: {result}')
            if not result[1].any():
                answer = chat.messages[counted[-1]].get('content')
                fail(f'{path}, {where}: has an answer of which the template writes nothing: '
                     f'{answer!r:.100}')
        yield encoded


def read_examples(path, enc):
    """Returns ([[(ids, mask)]], numbers of rows by form, number left out): the conversations of
    each row of a file, one or a pair. Rows whose answers all have the weight 0 are left out. Raises
    UserError."""
    forms = collections.Counter()
    left_out = []

    def are_counted():
        for where, example in read_chats(path, forms):
            if all(example.counted):
                yield where, example
            else:
                left_out.append(where)

    # Generators: memory holds the ids, not the rows.
    examples = list(encode_examples(path, are_counted(), enc))
    return examples, forms, len(left_out)


def check_ends(ids, mask, enc):
    """Returns what a user must know about the tokens that end the answers, '' if nothing. Raises
    UserError if none ends one: a model that learns from these answers would never stop.

    ids, mask: the arrays of all conversations in a row."""
    # The tokens with which answers end.
    counts = mask == 1
    counts_next = np.append(mask[1:], 0) == 1
    last = {int(id) for id in np.unique(ids[counts & ~counts_next])}
    ends = enc.special_ids | set(enc.stop_tokens)
    if not last & ends:
        fail('no answer ends with a token that ends it, so the model would not learn to stop: its '
             'chat template must write one, and the tokenizer must know it ("eos_token" in '
             'tokenizer_config.json, or "eos_token_id" in generation_config.json)')

    # Sampling stops at some of them, or at none.
    if last & set(enc.stop_tokens):
        return ''
    names = ' '.join(sorted(str(enc.tokenizer.id_to_token(id)) for id in last & enc.special_ids))
    return (f'answers end with {names}, at which sampling will not stop: add its id to '
            '"eos_token_id" in generation_config.json')


def pack(chats, size):
    """Returns (ids, mask, numbers of rows, of conversations that were cut, and left out).

    The rows of `size` tokens have whole conversations, the longest first, each in the row with the
    least room for it. Only those longer than a row are cut; those of which no token counts then are
    left out. The mask is 2 where a conversation or the padding starts."""
    kept = [(ids[:size], mask[:size]) for ids, mask in chats if mask[1:size].any()]
    n_cut = sum(len(ids) > size for ids, _ in chats)
    n_left_out = len(chats) - len(kept)

    # which conversations are in which row
    rows = []
    free = [] # (tokens left, row), sorted
    for ids, mask in sorted(kept, key=length_of, reverse=True):
        at = bisect.bisect_left(free, (len(ids), 0))
        if at == len(free):
            free.append((size, len(rows)))
            rows.append([])
        room, row = free.pop(at)
        rows[row].append((ids, mask))
        bisect.insort(free, (room - len(ids), row))
    if not rows:
        fail(f'no token of a part counts within --rows={size - 1}: use a larger one')

    # the rows
    tokens = np.zeros((len(rows), size), np.int64)
    masks = np.zeros((len(rows), size), np.uint8)
    for row, to, mask_to in zip(rows, tokens, masks):
        at = 0
        for ids, mask in row:
            end = at + len(ids)
            to[at:end] = ids
            mask_to[at:end] = mask
            mask_to[at] = 2
            at = end
        mask_to[at:at + 1] = 2
    return tokens.ravel(), masks.ravel(), len(rows), n_cut, n_left_out


def length_of(chat):
    """Returns the number of tokens of (ids, mask)."""
    return len(chat[0])


def main():
    """Prepares the data set that the flags ask for."""
    parser = create_parser(__doc__, here)
    parser.add_argument('input', nargs='?', default=os.path.join(here, 'example.jsonl'),
                        help='a file of rows: JSON lines, a JSON array, CSV or parquet')
    parser.add_argument('--tokenizer', required=True,
                        help='the model: a Hugging Face folder or owner/name')
    parser.add_argument('--rows', type=int, default=0,
                        help='pack whole conversations into rows of this block_size')
    args = parser.parse_args()

    # The conversations of all rows, as ids with their masks.
    enc, vocabulary = load_model_tokenizer(args.tokenizer)
    examples, forms, n_left_out = read_examples(args.input, enc)
    n_train = min(len(examples) - 1, int(len(examples)*0.9)) # the last tenth is for validation
    if n_train < 1:
        fail(f'{args.input} has {len(examples)} conversations, too few for a train and a val part; '
             'give it at least 2')
    is_pairs = len(examples[0]) == 2
    if args.rows < 0 or is_pairs and args.rows:
        fail('--rows packs conversations, not pairs, into rows of at least 1 token')

    # What is said at the end, once the files are there.
    said = [f'{n:,} rows read as {form}' for form, n in forms.items() if form]
    if n_left_out:
        said.append(f'{n_left_out:,} rows left out: no answer in them counts')

    # The two splits: their ids, masks and, of pairs, ends.
    tokens = {}
    files = {}
    warning = ''
    for split, part in (('train', examples[:n_train]), ('val', examples[n_train:])):
        chats = [chat for example in part for chat in example]
        ids = np.concatenate([ids for ids, _ in chats])
        mask = np.concatenate([mask for _, mask in chats])
        if split == 'train':
            warning = check_ends(ids, mask, enc)
        packed = ''
        if args.rows:
            ids, mask, n_rows, n_cut, n_without = pack(chats, args.rows + 1)
            packed = (f', in {n_rows:,} rows; {n_cut:,} longer than a row were cut, '
                      f'{n_without:,} left out')
        tokens[split] = ids
        files[f'{split}_mask.bin'] = mask.tobytes()
        if is_pairs:
            ends = np.cumsum([len(ids) for ids, _ in chats], dtype=np.int64)
            files[f'{split}_ends.bin'] = ends.tobytes()
        kind = 'pairs' if is_pairs else 'conversations'
        said.append(f'{split} has {len(part):,} {kind}, {len(ids):,} tokens, '
                    f"{(mask == 1).sum():,} of them the assistant's{packed}")
    if warning:
        said.append(warning)

    # Write all of it, then say what it is.
    meta = {'kind': 'pairs' if is_pairs else 'chats', **row_length(args.rows)}
    save_tokens(args.out_dir, tokens['train'], tokens['val'], vocabulary, files, **meta)
    print('\n'.join(said))


if __name__ == '__main__':
    main()
