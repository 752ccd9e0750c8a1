"""Decoding throughput of Hugging Face's generate(): GPT-2 with random weights, with its KV cache. The peer of
`bench_jax.py --mode=decode`; needs torch and transformers. The last line on stdout is a JSON object.

$ python peers/torch_generate.py --dtype=bfloat16 --batch_size=1
"""
import argparse
import json
import statistics
import time

import torch
import transformers

parser = argparse.ArgumentParser()
parser.add_argument('--folder', default='', help='a Hugging Face folder instead of GPT-2 with random weights')
parser.add_argument('--dtype', default='float32')
parser.add_argument('--device', default='cpu')
parser.add_argument('--batch_size', type=int, default=1)
parser.add_argument('--prompt_len', type=int, default=16)
parser.add_argument('--max_new_tokens', type=int, default=128)
parser.add_argument('--top_k', type=int, default=0, help='0: greedy; else draw from the top_k most likely tokens at '
                    "temperature 0.8, sample_jax.py's default")
parser.add_argument('--repeats', type=int, default=3)
args = parser.parse_args()

torch.manual_seed(1337)
dtype = getattr(torch, args.dtype)
if args.folder:
    model = transformers.AutoModelForCausalLM.from_pretrained(args.folder, dtype=dtype)
else:
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config()).to(dtype)
model = model.to(args.device).eval()
prompt = torch.randint(model.config.vocab_size, (args.batch_size, args.prompt_len), device=args.device)
sampling = {'do_sample': True, 'temperature': 0.8, 'top_k': args.top_k} if args.top_k else {'do_sample': False}
seconds = []
for _ in range(args.repeats + 1):  # the first one warms up
    start = time.perf_counter()
    ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), use_cache=True, pad_token_id=0, **sampling,
                         min_new_tokens=args.max_new_tokens, max_new_tokens=args.max_new_tokens)
    ids.cpu()  # waits for the device
    seconds.append(time.perf_counter() - start)
assert ids.shape == (args.batch_size, args.prompt_len + args.max_new_tokens)
results = {'tokens_per_sec': args.batch_size * args.max_new_tokens / statistics.median(seconds[1:])}
print(json.dumps({'program': 'torch_generate', 'settings': vars(args), 'results': results,
                  'environment': {'torch': torch.__version__, 'transformers': transformers.__version__}}))
