"""Throughput of llama.cpp, of its own benchmark program: the peer of `bench_jax.py --mode=decode --out_dir=folder` on a
CPU. The last line on stdout is a JSON object.

llama-bench is built from llama.cpp's sources (`cmake -B build && cmake --build build --target llama-bench`), and
a model in GGUF is made by its convert_hf_to_gguf.py, `--outtype=f32`, `bf16` or `q8_0`, or by export_jax.py. The
program of the fork ik_llama.cpp, built likewise, takes the same flags.

$ python peers/llama_bench.py --program=build/bin/llama-bench --model=model-q8_0.gguf
"""
import argparse
import json
import os
import shutil
import subprocess

parser = argparse.ArgumentParser()
parser.add_argument('--program', default='llama-bench')
parser.add_argument('--model', required=True, help='a GGUF file')
parser.add_argument('--prompt_len', type=int, default=0, help='time a prompt of this length instead of decoding')
parser.add_argument('--max_new_tokens', type=int, default=128)
parser.add_argument('--n_cached', type=int, default=0, help='tokens in the KV cache before the first new one')
parser.add_argument('--threads', type=int, default=os.cpu_count())
parser.add_argument('--repeats', type=int, default=3)
args = parser.parse_args()

if shutil.which(args.program) is None:
    parser.error(f'there is no program {args.program}')
n_decoded = 0 if args.prompt_len else args.max_new_tokens
command = [args.program, '-m', args.model, '-p', args.prompt_len, '-n', n_decoded, '-t', args.threads,
           '-r', args.repeats, '-o', 'json']
if args.n_cached:  # a flag that ik_llama.cpp's does not have
    command += ['-d', args.n_cached]
run = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, text=True, check=True)
record = json.loads(run.stdout)[0]
print(json.dumps({'program': 'llama_bench', 'settings': vars(args), 'results': {'tokens_per_sec': record['avg_ts']},
                  'environment': {'llama.cpp': record['build_commit'], 'type': record['model_type']}}))
