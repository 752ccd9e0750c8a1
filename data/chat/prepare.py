"""
Prepare conversations for finetuning a chat model: JSON lines, each with "messages" of "role" and "content".
They are written by the chat template of the model, and only the assistant's tokens count in the loss:
$ python data/chat/prepare.py mychats.jsonl --tokenizer=Qwen/Qwen3-0.6B --out_dir data/mychats
Without a file, example.jsonl beside this script. Saves train.bin and val.bin with the ids, train_mask.bin and
val_mask.bin with a byte for each of them, meta.json that says how to read them, and a copy of the tokenizer.
"""
import argparse
import json
import os
import sys
import tempfile

import numpy as np

here = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(here, '..', '..'))
from jax_ops import UserError
from jax_pretrained import local_path
from jax_train_utils import TOKENIZER_FILES, copy_tokenizer, load_tokenizer

def fail(message):
    print(f'error: {" ".join(message.split())}', file=sys.stderr)
    sys.exit(2)

def save(folder, files):
    """Write the files aside, then rename them, meta.json last: an interrupted run leaves no half data set."""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix='tmp-', dir=folder) as tmp:
            for name, content in files.items():
                with open(os.path.join(tmp, name), 'wb') as f:
                    f.write(content)
            if os.path.exists(os.path.join(folder, 'meta.json')):
                os.remove(os.path.join(folder, 'meta.json')) # an older set's, which the new .bin files do not fit
            for name in files:
                os.replace(os.path.join(tmp, name), os.path.join(folder, name))
    except OSError as e:
        fail(f'cannot write to {folder} ({e.strerror}); free some space or choose another folder with --out_dir')

def read_messages(line):
    """The messages of a line. Raises UserError if they are not a conversation with an answer."""
    try:
        messages = json.loads(line)['messages']
    except ValueError as e:
        raise UserError(f'is not JSON ({e})')
    except (KeyError, TypeError):
        raise UserError('has no "messages"')
    is_text = lambda m: isinstance(m, dict) and isinstance(m.get('role'), str) and isinstance(m.get('content'), str)
    if not isinstance(messages, list) or not all(map(is_text, messages)):
        raise UserError('has messages that are not a list of {"role": ..., "content": text}')
    if not any(m['role'] == 'assistant' for m in messages):
        raise UserError('has no message with the role "assistant", so there is nothing to learn')
    return messages

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument('input', nargs='?', default=os.path.join(here, 'example.jsonl'), help='a file of JSON lines')
parser.add_argument('--tokenizer', required=True, help='the model: a Hugging Face folder or owner/name')
parser.add_argument('--out_dir', default=here, help="where the files go (default: this script's folder)")
parser.error = fail # one line instead of the usage
args = parser.parse_args()

try:
    with open(args.input, encoding='utf-8-sig') as f:
        lines = f.read().split('\n') # splitlines() would cut strings, too: JSON may have U+2028 in them
except OSError as e:
    fail(f'cannot read {args.input} ({e.strerror}); name a file of JSON lines')
except UnicodeDecodeError as e:
    fail(f'{args.input} is not UTF-8 text ({e.reason}: {e.object[e.start]:#04x}); convert it to UTF-8 first')
try:
    tokenizer = {'kind': 'folder', 'path': local_path(args.tokenizer, TOKENIZER_FILES)}
    enc = load_tokenizer(tokenizer)
except UserError as e:
    fail(str(e))
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

dtype = np.dtype(np.uint16 if enc.vocab_size <= 2**16 else np.uint32)
files, counts = {}, {}
for split, part in (('train', chats[:n_train]), ('val', chats[n_train:])):
    ids = np.concatenate([ids for ids, _ in part]).astype(dtype)
    mask = np.concatenate([mask for _, mask in part])
    files |= {f'{split}.bin': ids.tobytes(), f'{split}_mask.bin': mask.tobytes()}
    counts[f'{split}_tokens'] = len(ids)
    print(f"{split} has {len(part):,} conversations, {len(ids):,} tokens, {mask.sum():,} of them the assistant's")
meta = {'vocab_size': enc.vocab_size, 'dtype': dtype.name, 'tokenizer': {'kind': 'folder', 'path': 'tokenizer'},
        **counts, 'max_id': max(max(ids) for ids, _ in chats)}
copy_tokenizer(tokenizer, os.path.join(args.out_dir, 'tokenizer'))
save(args.out_dir, files | {'meta.json': json.dumps(meta).encode()})
