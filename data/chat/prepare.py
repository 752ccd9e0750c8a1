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
import json
import os
import sys
from typing import NamedTuple

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from common import UserError, create_parser, fail, load_model_tokenizer, positive, save_documents
from forms import read_example
from jax_flags import whole_characters
from reading import read_rows, read_text

here = os.path.dirname(os.path.abspath(__file__))


class Told(NamedTuple):
    """What a user must know about the rows of a file: how many there are of each kind."""
    forms: collections.Counter  # forms of rows
    left_out: collections.Counter  # reasons for which rows are left out
    columns: collections.Counter  # columns that were not read
    lost: collections.Counter  # what the template leaves out, or writes otherwise for a prompt


def read_examples(path, enc):
    """Returns ([[(ids, mask)]], Told): the conversations of each row of a file, one or a pair. Rows
    whose answers all have the weight 0, and pairs of equal answers, are left out. Raises
    UserError."""
    examples = []
    told = Told(*(collections.Counter() for _ in Told._fields))
    for where, row in read_rows(path):
        try:
            # half a character has no token
            text = json.dumps(row, ensure_ascii=False, default=str)
            example = read_example(json.loads(whole_characters(text)))
            told.forms[example.form] += 1
            told.columns.update(example.unread)
            reason = why_left_out(example)
            if reason:
                told.left_out[reason] += 1
                continue
            examples.append(encode_example(example, enc, told))
            if len(examples[-1]) != len(examples[0]):
                fail('has one answer where those before have "chosen" and "rejected", or the '
                     'reverse')
        except UserError as e:
            fail(f'{path}, {where}: {e}')
    return examples, told


def why_left_out(example):
    """Returns why an Example teaches nothing, '' if it does."""
    if not all(example.counted):
        return 'no answer in them counts'
    if len(example.conversations) == 2 and example.conversations[0] == example.conversations[1]:
        return '"chosen" and "rejected" are the same'
    return ''


def encode_example(example, enc, told):
    """Returns [(ids, mask)] of the conversations of an Example, and counts in a Told what the
    template makes of them. Raises UserError."""
    encoded = []
    for messages, counted in zip(example.conversations, example.counted):
        ids, mask = enc.encode_training_chat(
            messages, counted=counted, tools=example.tools, variables=example.variables)
        if not mask.any():
            answer = messages[counted[-1]].get('content')
            fail(f'has an answer of which the template writes nothing: {answer!r:.100}')
        encoded.append((ids, mask))
        told.lost.update(enc.find_lost(messages, ids, counted=counted, tools=example.tools,
                                       variables=example.variables))
    return encoded


def check_ends(ids, mask, enc):
    """Returns what a user must know about the tokens that end the answers, '' if nothing. Raises
    UserError if none ends one: a model that learns from these answers would never stop.

    ids, mask: the arrays of all conversations in a row."""
    # The tokens with which answers end.
    counts = mask == 1
    counts_next = np.append(counts[1:], False)
    last = set(ids[counts & ~counts_next].tolist())
    if not last & (enc.special_ids | set(enc.stop_tokens)):
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
    """Returns (ids, mask, what to say of it): rows of `size` tokens.

    They have whole conversations, the longest first, each in the row with the least room for it.
    Only those longer than a row are cut; those of which no token counts then are left out. The mask
    is 2 where a conversation or the padding starts."""
    kept = [(ids[:size], mask[:size]) for ids, mask in chats if mask[1:size].any()]
    if not kept:
        fail(f'no token of a part counts within --rows={size - 1}: use a larger one')

    # which conversations are in which row
    rows = []
    free = []  # (tokens left, row), sorted
    for ids, mask in sorted(kept, key=length_of, reverse=True):
        at = bisect.bisect_left(free, (len(ids), 0))
        if at == len(free):
            free.append((size, len(rows)))
            rows.append([])
        room, row = free.pop(at)
        rows[row].append((ids, mask))
        bisect.insort(free, (room - len(ids), row))

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
    n_cut = sum(len(ids) > size for ids, _ in chats)
    said = (f', in {len(rows):,} rows; {n_cut:,} longer than a row were cut, '
            f'{len(chats) - len(kept):,} left out')
    return tokens.ravel(), masks.ravel(), said


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
    parser.add_argument('--rows', type=positive, metavar='BLOCK_SIZE',
                        help='pack whole conversations into rows of this block_size')
    parser.add_argument('--template', metavar='FILE',
                        help="a chat template in place of the model's, one with {%% generation %%}")
    args = parser.parse_args()

    # The conversations of all rows, as ids with their masks.
    enc, vocabulary = load_model_tokenizer(args.tokenizer)
    if args.template:
        enc.set_template(read_text(args.template))
    examples, told = read_examples(args.input, enc)
    n_train = min(len(examples) - 1, int(len(examples)*0.9))  # the last tenth is for validation
    if n_train < 1:
        fail(f'{args.input} has {len(examples)} conversations, too few for a train and a val part; '
             'give it at least 2')
    kind = 'chats' if len(examples[0]) == 1 else 'pairs'
    if kind == 'pairs' and args.rows:
        fail('--rows packs conversations, not pairs')

    # The two splits: their ids, masks and, of pairs, ends.
    said = [f'{n:,} rows read as {form}' for form, n in told.forms.items() if form]
    said += [f'{n:,} rows left out: {reason}' for reason, n in told.left_out.items()]
    documents = {}
    files = {}
    for split, part in (('train', examples[:n_train]), ('val', examples[n_train:])):
        chats = [chat for example in part for chat in example]
        ids = np.concatenate([ids for ids, _ in chats])
        mask = np.concatenate([mask for _, mask in chats])
        if split == 'train':
            warning = check_ends(ids, mask, enc)
        packed = ''
        if args.rows:
            ids, mask, packed = pack(chats, args.rows + 1)
        if kind == 'pairs':
            files[f'{split}_ends.bin'] = np.cumsum([len(ids) for ids, _ in chats], dtype=np.int64)
        documents[split] = [ids]
        files[f'{split}_mask.bin'] = mask
        name = 'pairs' if kind == 'pairs' else 'conversations'
        said.append(f'{split} has {len(part):,} {name}, {len(ids):,} tokens, '
                    f"{(mask == 1).sum():,} of them the assistant's{packed}")

    # Write all of it, then say what it is.
    row_length = {'row_length': args.rows + 1} if args.rows else {}
    save_documents(args.out_dir, documents, vocabulary, files=files, kind=kind, **row_length)
    said += [warning, *(f'{what}: {n:,} conversations' for what, n in told.lost.items())]
    columns = [f'"{name}" of {n:,}' for name, n in sorted(told.columns.items())]
    if columns:
        said.append(f'columns of rows that were not read: {", ".join(columns)}')
    print('\n'.join(filter(None, said)))


if __name__ == '__main__':
    main()
