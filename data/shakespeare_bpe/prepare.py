"""
Prepare Tiny Shakespeare, split as nanoGPT splits it, with a BPE of 1,024 tokens that is learned from its train part:
$ python data/shakespeare_bpe/prepare.py
Saves train.bin and val.bin with the ids, meta.json that says how to read them, and the folder tokenizer. This script is
data/shakespeare/prepare.py with other defaults. Your flags override these defaults.
"""
import os
import runpy
import sys

here = os.path.dirname(os.path.abspath(__file__))
sys.argv[1:1] = ['--tokenizer=bpe:1024', f'--out_dir={here}']
runpy.run_path(os.path.join(os.path.dirname(here), 'shakespeare', 'prepare.py'), run_name='__main__')
