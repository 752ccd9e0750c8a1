"""Writes the meta.json of a data set of characters from its meta.pkl, nanoGPT's. A pickle can run programs: only for
data that you trust.

$ python data/convert_meta.py FOLDER
"""
import json
import pickle
import sys
from pathlib import Path

from common import fail

if len(sys.argv) != 2 or not Path(sys.argv[1], 'meta.pkl').exists():
    fail('name the folder that has the meta.pkl: python data/convert_meta.py FOLDER')
folder = Path(sys.argv[1])
try:
    itos = pickle.loads((folder / 'meta.pkl').read_bytes())['itos']
    chars = ''.join(itos[i] for i in range(len(itos)))
except Exception as e: # a damaged pickle may raise any
    fail(f'{folder / "meta.pkl"} has no characters, "itos", or is damaged ({type(e).__name__}: {e})')
meta = {'vocab_size': len(chars), 'dtype': 'uint16', 'tokenizer': {'kind': 'char', 'chars': chars}}
(folder / 'meta.json').write_text(json.dumps(meta), encoding='utf-8')
