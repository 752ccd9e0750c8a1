"""
Prepare conversations for finetuning a chat model. The conversations are a file of rows (JSON lines,
a JSON array, CSV or parquet), each with "messages" of "role" and "content". ShareGPT, Alpaca and
other forms are read too, see readme.md. The chat template of the model writes the conversations as
text, and only the assistant's tokens count in the loss:
$ python data/chat/prepare.py mychats.jsonl --tokenizer=Qwen/Qwen3-0.6B --out_dir data/mychats
Rows with a question in "messages" and two answers, "chosen" and "rejected", make pairs for DPO; see
config/finetune_dpo.py. With --rows=1024, whole conversations are packed into sequences of 1024
tokens for training, and the conversations in a sequence do not see each other. Without --rows, all
conversations are one long text, from which training cuts windows. If no file is named, the script
reads example.jsonl beside itself. Saves train.bin and val.bin with the ids, train_mask.bin and
val_mask.bin with a byte for each id, meta.json that says how to read them, and a copy of the
tokenizer.
"""
import bisect
import collections
import contextlib
import functools
import itertools
import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from common import (
    CHAT_TOKENS, PARTS, UserError, create_parser, fail, finish_data_set, load_model_tokenizer, locked_folder,
    positive, remove)
from forms import read_example
from jax_hub.chats import OTHER_PROMPT
from jax_flags import digest, read_json, whole_characters, write_json
from reading import read_rows, read_text

import numpy as np

here = os.path.dirname(os.path.abspath(__file__))
OWN_TEMPLATES = ('plain', 'chatml')  # files beside this script
PLAIN_STOP = '\n---'  # ends an answer by plain.jinja if the model has no token that does


class Told(NamedTuple):
    """What main() tells the user about the rows of a file: four Counters, {text: how often}."""
    forms: collections.Counter  # forms of rows
    left_out: collections.Counter  # reasons for which rows are left out
    columns: collections.Counter  # columns that were not read
    lost: collections.Counter  # what the template leaves out, or writes otherwise for a prompt

    def update(self, row):
        """Adds a line of the journal to the Counters. read_examples writes the journal, with one
        line for each row of the input file.

        row: the content of the line, {name of a Counter: list of texts}. Each text adds 1 to its
        count in this Counter. For example, {'forms': ['"prompt" and "completion"'], 'columns':
        ['id', 'date']} adds 1 to one count in `forms`, and 1 to each of two counts in `columns`."""
        for name in self._fields:
            getattr(self, name).update(row.get(name, ()))


class Read(NamedTuple):
    """The conversations of a file, in the order of its rows."""
    ids: np.ndarray  # the tokens of all conversations, one after the other, on the disk
    mask: np.ndarray  # 1 for each token that counts in the loss
    n_bytes: np.ndarray  # number of bytes of the text that each token stands for
    ends: np.ndarray  # conversation i ends before index ends[i] of the arrays above
    n_each: int  # conversations of a row: 1, or 2 if the rows are pairs
    told: Told

    def slice(self, i):
        """Returns the place of conversation i in `ids`, as a Python slice."""
        return slice(self.ends[i - 1] if i else 0, self.ends[i])


def read_examples(path, enc, vocabulary, folder, source):
    """Encodes the rows of a file. A row holds one conversation, or a pair of conversations. Returns
    a Read. Leaves out a row if one of its conversations has no answer that counts in the loss, or
    if the two answers of a pair are equal.

    Writes the tokens to files in `folder` while it reads, and a line in a journal for each row. If
    an earlier call with the same source was interrupted, continues after the rows in the journal.
    enc: an HFTokenizer. vocabulary: its Vocabulary. folder: the folder of the data set. source: a
    dict with the input file and the options that change the tokens. If a row is not valid, removes
    the files and raises UserError."""
    paths = [Path(folder, name) for name in (
        'chats.part.bin', 'chats_mask.part.bin', 'chats_bytes.part.bin')]
    dtypes = vocabulary.dtype, np.dtype(np.uint8), np.dtype(np.uint32)
    journal_path = Path(folder, 'journal.part.jsonl')
    with contextlib.ExitStack() as stack:
        journal = stack.enter_context(open(journal_path, 'ab'))
        if read_json(Path(folder, 'source.part.json'), optional=True) != source:
            journal.truncate(0)
            write_json(Path(folder, 'source.part.json'), source)
        files = [stack.enter_context(open(path, 'ab')) for path in paths]
        told, lengths, n_done = cut_back(
            journal, files, [dtype.itemsize for dtype in dtypes])
        if n_done:
            print(f'continuing after {n_done:,} rows', file=sys.stderr)
        try:
            for where, row in itertools.islice(read_rows(path), n_done, None):
                try:
                    encoded, line = encode_row(row, enc)
                    if encoded and lengths and len(encoded) != len(lengths[0]):
                        fail('has one answer where those before have "chosen" and "rejected", or '
                             'the reverse')
                except UserError as e:
                    fail(f'{path}, {where}: {e}')
                # the tokens first, then the line
                for chat in encoded:
                    for file, array, dtype in zip(files, chat, dtypes):
                        file.write(np.asarray(array, dtype))
                if encoded:
                    lengths.append(line['lengths'])
                for file in files:
                    file.flush()
                journal.write(json.dumps(line).encode() + b'\n')
                journal.flush()
                told.update(line)
        except UserError:
            give_up(folder)
            raise
    n_each = len(lengths[0]) if lengths else 1
    ends = np.cumsum(np.array(lengths, np.int64).ravel(), dtype=np.int64)
    if not lengths:
        return Read(*(np.zeros(0, dtype) for dtype in dtypes), ends, n_each, told)
    arrays = [np.memmap(path, dtype, 'r') for path, dtype in zip(paths, dtypes)]
    return Read(*arrays, ends, n_each, told)


def give_up(folder):
    """Removes the unfinished files of a data set after an error. Then removes the folder if nothing
    else is in it."""
    remove(folder, PARTS)
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def cut_back(journal, files, widths):
    """Truncates the files that an interrupted run of this script has left, so that they end with
    the last finished row. read_examples can then go on with the next row. The journal has a line
    for each finished row. If one of `files` has fewer tokens than the journal lists, as after a
    power failure, empties all files and the journal: no row is finished.

    Returns (told; lengths; n_rows) of the finished rows. told: a Told, counts that main() prints.
    lengths: for each row a list with the number of tokens of each of its conversations; rows
    that are left out of the data set are missing here. n_rows: the number of finished rows,
    including the rows that are left out of the data set.

    files: the files of ids, masks and bytes. widths: the number of bytes per token in each of
    `files`."""
    lines = []
    for line in Path(journal.name).read_bytes().splitlines(keepends=True):
        try:
            lines.append((len(line), json.loads(line) if line.endswith(b'\n') else None))
        except ValueError:
            break
        if lines[-1][1] is None:  # the last one, cut short
            lines.pop()
    lengths = [line['lengths'] for _, line in lines if line['lengths']]
    n_tokens = sum(map(sum, lengths))
    ends = [width * n_tokens for width in widths]
    if any(os.path.getsize(file.name) < end for file, end in zip(files, ends)):
        lines, lengths, ends = [], [], [0] * len(files)
    for file, end in zip(files, ends):
        file.truncate(end)
    journal.truncate(sum(n for n, _ in lines))
    told = Told(*(collections.Counter() for _ in Told._fields))
    for _, line in lines:
        told.update(line)
    return told, lengths, len(lines)


def encode_row(row, enc):
    """Encodes a row of the file. Returns (encoded; line).

    encoded: a list with the Encoded of each conversation of the row. It is empty if the row is left
    out. line: a dict with the number of tokens of each conversation, and with notes for the user,
    such as the form of the row. read_examples writes `line` to the journal, the file of the rows
    that are done. Told.update counts how often each of the notes occurs. enc: an HFTokenizer.
    Raises UserError if the row is not valid."""
    # half a character has no token
    text = json.dumps(row, ensure_ascii=False, default=without_bytes)
    example = read_example(json.loads(whole_characters(text)))
    line = {'lengths': [], 'forms': [example.form], 'columns': list(example.unread)}
    reason = why_left_out(example)
    if reason:
        return [], {**line, 'left_out': [reason]}
    encoded, lost = encode_example(example, enc)
    return encoded, {**line, 'lengths': [len(chat.ids) for chat in encoded], 'lost': lost}


def without_bytes(value):
    """Returns a value of parquet that JSON lacks in a form that JSON has: a date as a text, bytes as
    an object, which is refused where a text is needed."""
    return {'bytes': len(value)} if isinstance(value, bytes) else str(value)


def why_left_out(example):
    """Returns a text, the reason why an Example is left out of the data set; '' if it is kept. An
    Example is left out if one of its conversations has no answer that counts in the loss, or if the
    two conversations of a pair are equal. A model would learn nothing from such an Example."""
    if not all(example.counted):
        return 'no answer in them counts, by their "weight" or a "label" of 0'
    if len(example.conversations) == 2 and example.conversations[0] == example.conversations[1]:
        return '"chosen" and "rejected" are the same'
    return ''


def encode_example(example, enc):
    """Returns (a list with the Encoded of each conversation of an Example; a list of warnings:
    those of find_lost, and one about names of special tokens in a text). enc: an HFTokenizer.
    Raises UserError if the chat template refuses a conversation or leaves out an answer."""
    encoded = []
    lost = []
    for messages, counted in zip(example.conversations, example.counted):
        chat = enc.encode_training_chat(
            messages, counted=counted, tools=example.tools, variables=example.variables)
        if not chat.mask.any():
            answer = messages[counted[-1]].get('content')
            fail(f'has an answer that the chat template leaves out: {answer!r:.100}')
        encoded.append(chat)
        lost += enc.find_lost(messages, chat.ids, counted=counted, tools=example.tools,
                              variables=example.variables)
        contents = [message.get('content') for message in messages]
        texts = [text for text in contents if isinstance(text, str)]
        if any(name in text for name in special_names(enc) for text in texts):
            lost.append('a message has the name of a special token, which becomes that token')
    return encoded, lost


@functools.cache
def special_names(enc):
    """Returns the names of the special tokens of an HFTokenizer, such as <|endoftext|>."""
    added = enc.tokenizer.get_added_tokens_decoder().values()
    return [token.content for token in added if token.special]


def check_ends(ids, mask, enc):
    """Checks whether sampling will stop at the end of an answer. Returns a warning, or '' if
    sampling will stop. White space at the end of an answer is ignored.

    Returns '' if some answers end with a stop token, or if a stop text occurs in the answers of the
    first 65,536 ids. (Sampling stops at a stop text, see read_stop_texts in jax_hub/tokenizers.py.)
    Otherwise:
    - If some answers end with other special tokens, returns a warning that names these tokens,
      because sampling will not stop at them.
    - If no answer ends with a special token, raises UserError, because a model that learns from
      these answers would never stop.

    ids, mask: the arrays of all conversations, one after the other. enc: an HFTokenizer."""
    # Where a text ends answers, the first of them have it.
    if enc.stop_texts:
        first = enc.tokenizer.decode(ids[:2**16][mask[:2**16] == 1].tolist(),
                                     skip_special_tokens=False)
        if any(text in first for text in enc.stop_texts):
            return ''

    # The last tokens of answers, a part of the ids at a time. White space is left out, because many
    # templates with marks let white space behind an answer count.
    texts = enc.tokenizer.decode_batch([[id] for id in range(enc.vocab_size)],
                                       skip_special_tokens=False)
    spaces = [id for id, text in enumerate(texts) if not text.strip()]
    last = set()
    for start in range(0, len(ids), 2**20):
        end = start + 2**20 + 64  # what follows the last token of a part is seen, too
        is_text = ~np.isin(ids[start:end], spaces)
        counts = (mask[start:end] == 1)[is_text]
        counts_next = np.append(counts[1:], end < len(ids))
        last.update(ids[start:end][is_text][counts & ~counts_next].tolist())
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


def pack(read, chosen, size, folder, split):
    """Packs conversations into rows of `size` tokens. Writes the rows to {split}.part.bin and
    {split}_mask.part.bin in `folder`. read: the Read with the conversations. chosen: the
    indices in `read` of the conversations to pack. split: 'train' or 'val'.

    Returns (ids; mask; n_bytes; a message for the user). ids, mask: the arrays that were written,
    flattened. n_bytes: the number of bytes of the text that is in the loss.

    Goes through the conversations from the longest to the shortest. Puts each conversation into the
    fullest row that has space for it. A conversation that is longer than a row is cut to its first
    `size` tokens. A conversation is left out if no token of it, after this cut, counts in the loss.
    The first token of a conversation never counts. The mask is 2 where a conversation or the
    padding starts. Raises UserError if all conversations are left out."""
    lengths = np.diff(read.ends, prepend=0)[chosen]
    counts = [read.mask[read.slice(i)][1:size].any() for i in chosen]
    kept = np.flatnonzero(counts)
    if not len(kept):
        fail(f'no token of a part counts within --rows={size - 1}: use a larger one')

    # which conversations are in which row
    rows = []
    free = []  # (tokens left, row), sorted
    for at in kept[np.argsort(-np.minimum(lengths[kept], size), kind='stable')].tolist():
        n = min(int(lengths[at]), size)
        place = bisect.bisect_left(free, (n, 0))
        if place == len(free):
            free.append((size, len(rows)))
            rows.append([])
        room, row = free.pop(place)
        rows[row].append(chosen[at])
        bisect.insort(free, (room - n, row))

    # the rows
    shape = len(rows), size
    tokens = np.memmap(Path(folder, f'{split}.part.bin'), read.ids.dtype, 'w+', shape=shape)
    masks = np.memmap(Path(folder, f'{split}_mask.part.bin'), np.uint8, 'w+', shape=shape)
    n_bytes = 0
    for row, to, mask_to in zip(rows, tokens, masks):
        at = 0
        for i in row:
            ids, mask = read.ids[read.slice(i)][:size], read.mask[read.slice(i)][:size]
            end = at + len(ids)
            to[at:end] = ids
            mask_to[at:end] = mask
            mask_to[at] = 2
            n_bytes += int(read.n_bytes[read.slice(i)][:size][mask_to[at:end] == 1].sum())
            at = end
        mask_to[at:at + 1] = 2
    tokens.flush()
    masks.flush()
    said = (f', in {len(rows):,} rows; {(lengths > size).sum():,} longer than a row were cut, '
            f'{len(lengths) - len(kept):,} left out')
    return tokens.reshape(-1), masks.reshape(-1), n_bytes, said


def copy_chats(read, chosen, folder, split):
    """Copies conversations to the files of a split in `folder`, one after the other: their token
    ids to {split}.part.bin, their masks to {split}_mask.part.bin. read: the Read with the
    conversations. chosen: the indices in `read`, a range. split: 'train' or 'val'.

    Returns (ids; mask; n_bytes; ''), the same four values as pack. ids, mask: the arrays that were
    written. n_bytes: the number of bytes of the text that counts in the loss. '': the message for
    the user, which is empty because nothing is cut or left out."""
    part = slice(read.slice(chosen[0]).start, read.ends[chosen[-1]])
    found = []
    for array, name in ((read.ids, split), (read.mask, f'{split}_mask')):
        array[part].tofile(Path(folder, f'{name}.part.bin'))
        found.append(array[part])
    n_bytes = sum(int(read.n_bytes[read.slice(i)][read.mask[read.slice(i)] == 1].sum())
                  for i in chosen)
    return *found, n_bytes, ''


def read_template(name):
    """Returns the text of a chat template, given as --template; None for ''."""
    if not name:
        return None
    own = os.path.join(here, f'{name}.jinja')
    return read_text(own if name in OWN_TEMPLATES else os.path.expanduser(name))


def check_template_tokens(name, enc):
    """Raises UserError if --template=chatml is given and the vocabulary lacks this template's
    tokens."""
    if name == 'chatml' and not set(CHAT_TOKENS) <= enc.tokenizer.get_vocab().keys():
        fail(f'--template=chatml needs the tokens {" ".join(CHAT_TOKENS)}: make the vocabulary with '
             'data/text/prepare.py --chat, or take --template=plain')


def check_prompts(told, n, enc):
    """Raises UserError if all n conversations got the warning OTHER_PROMPT. The warning says that
    the template's generation prompt differs from the tokens before the answer in the training data.
    told: the Told that counts the warnings. enc: an HFTokenizer."""
    if told.lost[OTHER_PROMPT] < n:
        return
    ids = enc.encode_chat([{'role': 'user', 'content': 'a'}])
    prompt = enc.tokenizer.decode(ids, skip_special_tokens=False)
    why = 'let it end with a newline or a special token'
    if prompt.endswith(' '):
        why = f'it ends with a space, which becomes a part of the first word in training: {why}'
    elif prompt.endswith('\n') or ids[-1] in enc.special_ids:
        why = ('the answers of these data begin otherwise; the template may write them with their '
               'reasoning ("reasoning_content"), or without it where a row has '
               '"chat_template_kwargs": {"enable_thinking": false}; or take a template with '
               '{% generation %} as --template=FILE')
    fail(f'no conversation begins with the tokens that ask for its answer, so the model would '
         f'answer badly: the generation prompt of the chat template is {prompt[-20:]!r}; {why}')


def make_data_set(args, enc, vocabulary, source):
    """Writes the data set of the flags `args`, and prints what it has. enc, vocabulary, source: see
    read_examples. Raises UserError, and removes the unfinished files, if a row cannot be read or
    there are too few."""
    # The conversations of all rows, as ids with their masks.
    folder = args.out_dir
    read = read_examples(args.input, enc, vocabulary, folder, source)
    told = read.told
    n_examples = len(read.ends) // read.n_each
    n_train = int(n_examples * 0.9)  # the last tenth is for validation
    kind = 'chats' if read.n_each == 1 else 'pairs'
    try:
        left_out = [f'{n:,} rows left out: {reason}' for reason, n in told.left_out.items()]
        if n_train < 1:
            fail('; '.join([f'{args.input} has {n_examples} conversations, too few for a train and '
                            'a val part; give it at least 2', *left_out]))
        check_prompts(told, n_examples * read.n_each, enc)
        if kind == 'pairs' and args.rows:
            fail('--rows packs conversations, not pairs')

        # The two splits: their ids, masks and, of pairs, ends.
        said = [f'{n:,} rows read as {form}' for form, n in told.forms.items() if form]
        said += left_out
        files = {}
        n_bytes = {}
        for split, first, end in (('train', 0, n_train), ('val', n_train, n_examples)):
            chosen = range(first * read.n_each, end * read.n_each)
            if split == 'train':
                n_tokens = read.ends[chosen[-1]]
                warning = check_ends(read.ids[:n_tokens], read.mask[:n_tokens], enc)
            if args.rows:
                ids, mask, n_bytes[split], packed = pack(read, chosen, args.rows + 1, folder, split)
            else:
                ids, mask, n_bytes[split], packed = copy_chats(read, chosen, folder, split)
            if kind == 'pairs':
                start = read.slice(chosen[0]).start
                files[f'{split}_ends.bin'] = read.ends[chosen[0]:chosen[-1] + 1] - start
            files[f'{split}_mask.bin'] = Path(folder, f'{split}_mask.part.bin')
            name = 'pairs' if kind == 'pairs' else 'conversations'
            said.append(f'{split} has {end - first:,} {name}, {len(ids):,} tokens, '
                        f"{(mask == 1).sum():,} of them the assistant's{packed}")
    except UserError:
        give_up(folder)
        raise

    # Write all of it, then say what it is.
    row_length = {'row_length': args.rows + 1} if args.rows else {}
    finish_data_set(folder, vocabulary, files=files, kind=kind,
                    n_bytes=n_bytes if kind == 'chats' else None, **row_length)
    said += [warning, *(f'{what}: {n:,} conversations' for what, n in told.lost.items())]
    columns = [f'"{name}" of {n:,}' for name, n in sorted(told.columns.items())]
    if columns:
        said.append(f'columns of rows that were not read: {", ".join(columns)}')
    print('\n'.join(filter(None, said)))


def main():
    """Prepares the data set that the flags ask for."""
    parser = create_parser(__doc__, here)
    parser.add_argument('input', nargs='?', default=os.path.join(here, 'example.jsonl'),
                        help='a file of rows: JSON lines, a JSON array, CSV or parquet')
    parser.add_argument('--tokenizer', required=True,
                        help='the model: a run, a data set, a Hugging Face folder or owner/name, '
                             "or gpt2 for GPT-2's BPE")
    parser.add_argument('--rows', type=positive, metavar='BLOCK_SIZE',
                        help='pack whole conversations into rows of this block_size')
    parser.add_argument('--template', metavar='plain|chatml|FILE',
                        help="a chat template in place of the model's: plain, for any tokenizer; "
                             'chatml, for those of data/text/prepare.py --chat; or a '
                             'file, one with {%% generation %%}. Runs keep it')
    args = parser.parse_args()

    template = read_template(args.template)
    enc, vocabulary = load_model_tokenizer(
        args.tokenizer, template, PLAIN_STOP if args.template == 'plain' else None)
    check_template_tokens(args.template, enc)
    state = os.stat(args.input) if os.path.isfile(args.input) else None
    source = {'input': os.path.abspath(args.input),
              'size': state and state.st_size, 'changed': state and state.st_mtime_ns,
              'tokenizer': digest(vocabulary.files),  # with its template
              'version': 1}  # of this script: a higher one if a row gets other tokens
    with locked_folder(args.out_dir):
        make_data_set(args, enc, vocabulary, source)


if __name__ == '__main__':
    main()
