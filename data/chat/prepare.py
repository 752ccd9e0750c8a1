"""
Prepare conversations for finetuning a chat model: JSON lines, each with "messages" of "role" and "content".
They are written by the chat template of the model, and only the assistant's tokens count in the loss:
$ python data/chat/prepare.py mychats.jsonl --tokenizer=Qwen/Qwen3-0.6B --out_dir data/mychats
Without a file, example.jsonl beside this script. Saves train.bin and val.bin with the ids, train_mask.bin and
val_mask.bin with a byte for each of them, meta.json that says how to read them, and a copy of the tokenizer.
"""
import json
import os
import sys

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from common import UserError, create_parser, fail, load_model_tokenizer, read_text, save_tokens

here = os.path.dirname(os.path.abspath(__file__))

def read_messages(line):
    """The messages of a line. Raises UserError if they are not a conversation with an answer."""
    try:
        messages = json.loads(line)['messages']
    except ValueError as e:
        raise UserError(f'is not JSON ({e})') from None
    except (KeyError, TypeError):
        raise UserError('has no "messages"') from None

    def is_text(m):
        return isinstance(m, dict) and isinstance(m.get('role'), str) and isinstance(m.get('content'), str)

    if not isinstance(messages, list) or not all(map(is_text, messages)):
        raise UserError('has messages that are not a list of {"role": ..., "content": text}')
    if not any(m['role'] == 'assistant' for m in messages):
        raise UserError('has no message with the role "assistant", so there is nothing to learn')
    return messages

parser = create_parser(__doc__, here)
parser.add_argument('input', nargs='?', default=os.path.join(here, 'example.jsonl'), help='a file of JSON lines')
parser.add_argument('--tokenizer', required=True, help='the model: a Hugging Face folder or owner/name')
args = parser.parse_args()

lines = read_text(args.input).split('\n') # not splitlines(), which splits at what JSON allows in a string
enc, vocabulary = load_model_tokenizer(args.tokenizer)
chats = []
for number, line in enumerate(lines, 1):
    if line.strip():
        try:
            chats.append(enc.encode_training_chat(read_messages(line)))
        except UserError as e:
            fail(f'{args.input}, line {number}: {e}')
n_train = min(len(chats) - 1, int(len(chats)*0.9)) # the last tenth is for validation
if n_train < 1:
    fail(f'{args.input} has {len(chats)} conversations, too few for a train and a val part; give it at least 2')

tokens, masks, said = {}, {}, []
for split, part in (('train', chats[:n_train]), ('val', chats[n_train:])):
    tokens[split] = ids = np.concatenate([ids for ids, _ in part])
    mask = np.concatenate([mask for _, mask in part])
    masks[f'{split}_mask.bin'] = mask.tobytes()
    said.append(f'{split} has {len(part):,} conversations, {len(ids):,} tokens, '
                f"{mask.sum():,} of them the assistant's")
save_tokens(args.out_dir, tokens['train'], tokens['val'], vocabulary, masks)
print('\n'.join(said))
