"""
Prepare conversations for finetuning a chat model: JSON lines, each with "messages" of "role" and "content".
They are written by the chat template of the model, and only the assistant's tokens count in the loss:
$ python data/chat/prepare.py mychats.jsonl --tokenizer=Qwen/Qwen3-0.6B --out_dir data/mychats
Lines of "messages" that ask, "chosen" and "rejected", two answers, make pairs for DPO; see config/finetune_dpo.py.
With --rows=1024 each row of training holds whole conversations, which do not see each other; without it, windows
of that length are cut from all of them in a row. Without a file, example.jsonl beside this script. Saves train.bin and
val.bin with the ids, train_mask.bin and val_mask.bin with a byte for each of them, meta.json that says how to read
them, and a copy of the tokenizer.
"""
import bisect
import json
import os
import sys

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from common import UserError, create_parser, fail, load_model_tokenizer, read_text, row_length, save_tokens
from jax_flags import whole_characters

here = os.path.dirname(os.path.abspath(__file__))

def read_chats(line):
    """The conversations of a line: one, or a pair, of which the first has the answer that was chosen. Raises UserError
    if they are not conversations with an answer."""
    try:
        record = json.loads(whole_characters(json.dumps(json.loads(line), ensure_ascii=False)))
        messages = record['messages']
    except (ValueError, RecursionError) as e:
        raise UserError(f'is not JSON ({e})') from None
    except (KeyError, TypeError):
        raise UserError('has no "messages"') from None

    def is_text(m):
        return isinstance(m, dict) and isinstance(m.get('role'), str) and isinstance(m.get('content'), str)

    if not isinstance(messages, list) or not all(map(is_text, messages)):
        raise UserError('has messages that are not a list of {"role": ..., "content": text}')
    answers = {name: record[name] for name in ('chosen', 'rejected') if name in record}
    if not answers:
        if not any(m['role'] == 'assistant' for m in messages):
            raise UserError('has no message with the role "assistant", so there is nothing to learn')
        return [messages]
    if not messages or messages[-1]['role'] == 'assistant':
        raise UserError('has "messages" without a question at their end, which "chosen" and "rejected" answer')
    for name in ('chosen', 'rejected'):
        answer = answers.get(name)
        if not isinstance(answer, str) or not answer.strip():
            raise UserError(f'has no "{name}", or one that is not a text or is empty')
    return [[*messages, {'role': 'assistant', 'content': answer}] for answer in answers.values()]

def encode_chats(chats):
    """[(ids, mask)] of the conversations of a line; of a pair only the last answers count."""
    encoded = [enc.encode_training_chat(chat) for chat in chats]
    if len(chats) == 2:
        for chat, (_, mask) in zip(chats, encoded):
            if not mask.any():
                raise UserError(f'has an answer of which the template writes nothing: {chat[-1]["content"]!r:.100}')
            mask[:np.flatnonzero(np.diff(mask, prepend=0) == 1)[-1]] = 0
    return encoded

def pack(chats, size):
    """(ids, mask, numbers of rows, of conversations that were cut, and left out): rows of `size` tokens with whole
    conversations, the longest first, each in the row with the least room for it. Only those longer than a row are cut;
    of which no token counts then, those are left out. The mask is 2 where a conversation or the padding starts."""
    rows, free = [], [] # free: (tokens left, row), sorted
    kept = [(ids[:size], mask[:size]) for ids, mask in chats if mask[1:size].any()]
    for ids, mask in sorted(kept, key=lambda chat: -len(chat[0])):
        at = bisect.bisect_left(free, (len(ids), 0))
        if at == len(free):
            free.append((size, len(rows)))
            rows.append([])
        room, row = free.pop(at)
        rows[row].append((ids, mask))
        bisect.insort(free, (room - len(ids), row))
    if not rows:
        fail(f'no token of a part counts within --rows={size - 1}: use a larger one')
    tokens, masks = np.zeros((len(rows), size), np.int64), np.zeros((len(rows), size), np.uint8)
    for row, to, mask_to in zip(rows, tokens, masks):
        at = 0
        for ids, mask in row:
            to[at:at + len(ids)], mask_to[at:at + len(ids)] = ids, mask
            mask_to[at] = 2
            at += len(ids)
        mask_to[at:at + 1] = 2
    return tokens.ravel(), masks.ravel(), len(rows), sum(len(ids) > size for ids, _ in chats), len(chats) - len(kept)

parser = create_parser(__doc__, here)
parser.add_argument('input', nargs='?', default=os.path.join(here, 'example.jsonl'), help='a file of JSON lines')
parser.add_argument('--tokenizer', required=True, help='the model: a Hugging Face folder or owner/name')
parser.add_argument('--rows', type=int, default=0, help='pack whole conversations into rows of this block_size')
args = parser.parse_args()

lines = read_text(args.input).split('\n') # not splitlines(), which splits at what JSON allows in a string
enc, vocabulary = load_model_tokenizer(args.tokenizer)
examples = []
for number, line in enumerate(lines, 1):
    if line.strip():
        try:
            chats = read_chats(line)
            if examples and len(chats) != len(examples[0]):
                raise UserError('has one answer where the lines before have "chosen" and "rejected", or the reverse')
            examples.append(encode_chats(chats))
        except UserError as e:
            fail(f'{args.input}, line {number}: {e}')
n_train = min(len(examples) - 1, int(len(examples)*0.9)) # the last tenth is for validation
if n_train < 1:
    fail(f'{args.input} has {len(examples)} conversations, too few for a train and a val part; give it at least 2')

is_pairs = len(examples[0]) == 2
if args.rows < 0 or is_pairs and args.rows:
    fail('--rows packs conversations, not pairs, into rows of at least 1 token')
tokens, files, said = {}, {}, []
for split, part in (('train', examples[:n_train]), ('val', examples[n_train:])):
    chats = [chat for example in part for chat in example]
    ids, mask = (np.concatenate(arrays) for arrays in zip(*chats))
    packed = ''
    if args.rows:
        ids, mask, n_rows, n_cut, n_left_out = pack(chats, args.rows + 1)
        packed = f', in {n_rows:,} rows; {n_cut:,} longer than a row were cut, {n_left_out:,} left out'
    tokens[split] = ids
    files[f'{split}_mask.bin'] = mask.tobytes()
    if is_pairs:
        files[f'{split}_ends.bin'] = np.cumsum([len(ids) for ids, _ in chats], dtype=np.int64).tobytes()
    said.append(f'{split} has {len(part):,} {"pairs" if is_pairs else "conversations"}, {len(ids):,} tokens, '
                f"{(mask == 1).sum():,} of them the assistant's{packed}")
meta = {'kind': 'pairs' if is_pairs else 'chats'} | row_length(args.rows)
save_tokens(args.out_dir, tokens['train'], tokens['val'], vocabulary, files, **meta)
print('\n'.join(said))
