"""Writes the meta.json of a data set of characters from nanoGPT's meta.pkl. A pickle can run
programs: use it only for data that you trust.

$ python data/convert_meta.py FOLDER
"""
import json
import pickle
import sys
from pathlib import Path

if len(sys.argv) != 2 or not Path(sys.argv[1], 'meta.pkl').is_file():
    print('error: name the folder that has the meta.pkl', file=sys.stderr)
    sys.exit(2)
folder = Path(sys.argv[1])
try:
    itos = pickle.loads((folder / 'meta.pkl').read_bytes())['itos']
    chars = ''.join(itos[i] for i in range(len(itos)))
except Exception as error:  # pickle raises exceptions of many types
    print(f"error: {folder / 'meta.pkl'} is not nanoGPT's ({type(error).__name__}: {error})",
          file=sys.stderr)
    sys.exit(2)
meta = {'vocab_size': len(chars), 'dtype': 'uint16', 'tokenizer': {'kind': 'char', 'chars': chars}}
(folder / 'meta.json').write_text(json.dumps(meta), encoding='utf-8')
