"""Decoding throughput of PyTorch: GPT-2 with random weights, with a KV cache. The peer of `bench_jax.py --mode=decode`;
needs torch and transformers. The last line on stdout is a JSON object.

$ python peers/torch_generate.py --dtype=bfloat16 --compile
$ python peers/torch_generate.py --dtype=bfloat16             # Hugging Face's generate() as it is, not compiled

--compile is gpt-fast's way: a static cache, one step under torch.compile(mode='reduce-overhead'), which on a GPU
replays CUDA graphs; the loop does nothing but call it. Greedy tokens are compared with those of generate().
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
parser.add_argument('--compile', action='store_true', help='a static cache and torch.compile')
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


def choose(logits):
    """The next token of each sequence [B, 1], drawn or the most likely."""
    if not args.top_k:
        return logits.argmax(-1, keepdim=True)
    values, tokens = torch.topk(logits.float(), args.top_k)
    noise = torch.empty_like(values).exponential_()  # the Gumbel trick, without a synchronization
    drawn = (torch.softmax(values / 0.8, -1) / noise).argmax(-1, keepdim=True)
    return tokens.gather(-1, drawn)


def eager():
    """Hugging Face's generate()."""
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), use_cache=True, pad_token_id=0, **sampling,
                          min_new_tokens=args.max_new_tokens, max_new_tokens=args.max_new_tokens)


def forward(token, position, cache):
    """One step: the token that follows `token` at `position`."""
    logits = model(token, past_key_values=cache, cache_position=position, position_ids=position[None],
                   use_cache=True).logits
    return choose(logits[:, -1])


step = torch.compile(forward, mode='reduce-overhead', fullgraph=True) if args.compile else None
cache = transformers.StaticCache(model.config, max_cache_len=args.prompt_len + args.max_new_tokens)


def compiled():
    """A prefill as it is, then the compiled step."""
    cache.reset()
    ids = torch.empty(args.batch_size, args.prompt_len + args.max_new_tokens, dtype=torch.long, device=args.device)
    ids[:, :args.prompt_len] = prompt
    position = torch.arange(args.prompt_len, device=args.device)
    token = forward(prompt, position, cache)
    position = position[-1:]
    for i in range(args.prompt_len, ids.shape[1]):
        ids[:, i:i + 1] = token
        position = position + 1
        if i + 1 < ids.shape[1]:
            torch.compiler.cudagraph_mark_step_begin()
            token = step(token.clone(), position, cache)
    return ids


generate = compiled if args.compile else eager
seconds = []
with torch.inference_mode():
    for _ in range(args.repeats + 2):  # the first two compile, record and warm up
        start = time.perf_counter()
        ids = generate()
        ids.cpu()  # waits for the device
        seconds.append(time.perf_counter() - start)
    if args.compile and not args.top_k:
        same = (ids == eager()).float().mean().item()
        print(f'{same:.1%} of the tokens are those of generate()')
seconds = seconds[2:]
assert ids.shape == (args.batch_size, args.prompt_len + args.max_new_tokens)
results = {'tokens_per_sec': args.batch_size * args.max_new_tokens / statistics.median(seconds)}
print(json.dumps({'program': 'torch_generate', 'settings': vars(args), 'results': results,
                  'environment': {'torch': torch.__version__, 'transformers': transformers.__version__}}))
