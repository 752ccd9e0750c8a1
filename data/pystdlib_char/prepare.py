"""
Prepare Python's own standard library for character-level language modeling: a few MB of code that is
on every machine that can run this, so no network is needed. Or train on a code base of your own:
$ python data/pystdlib_char/prepare.py path/to/code --out_dir data/mycode
Saves train.bin and val.bin with the ids, and meta.json with the vocabulary.
"""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from pystdlib.prepare import main

main(__doc__, os.path.dirname(os.path.abspath(__file__)), 'char')
