"""Training throughput of PyTorch: GPT-2's architecture (transformers' modules, SDPA attention), clipping and fused
AdamW on random tokens. The peer of `bench_jax.py --mode=train`; needs torch and transformers. The last line on stdout
is a JSON object.

$ python peers/torch_train.py --preset=nanogpt_cpu --repeats=100
"""
import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F
import transformers

PRESETS = {  # the same as bench_jax.py's
    'nanogpt_cpu': dict(n_layer=4, n_head=4, n_embd=128, n_positions=64, vocab_size=65, dropout=0.0, batch_size=12),
    'baby': dict(n_layer=6, n_head=6, n_embd=384, n_positions=256, vocab_size=65, dropout=0.2, batch_size=64),
    'gpt2': dict(n_layer=12, n_head=12, n_embd=768, n_positions=1024, vocab_size=50304, dropout=0.0, batch_size=12),
}
parser = argparse.ArgumentParser()
parser.add_argument('--preset', default='gpt2', choices=PRESETS)
parser.add_argument('--batch_size', type=int, help="the preset's if not given")
parser.add_argument('--dtype', default='float32')
parser.add_argument('--device', default='cpu')
parser.add_argument('--compile', type=int, default=1, help='0: without torch.compile')
parser.add_argument('--repeats', type=int, default=20)
args = parser.parse_args()

torch.manual_seed(1337)
shape = dict(PRESETS[args.preset])
batch_size, dropout = shape.pop('batch_size'), shape.pop('dropout')
batch_size = args.batch_size or batch_size
config = transformers.GPT2Config(**shape, embd_pdrop=dropout, attn_pdrop=dropout, resid_pdrop=dropout, use_cache=False,
                                 activation_function='gelu', attn_implementation='sdpa', bos_token_id=0, eos_token_id=0)
model = transformers.GPT2LMHeadModel(config).to(args.device).train()
decayed = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW([{'params': decayed, 'weight_decay': 0.1}, {'params': others, 'weight_decay': 0.0}],
                              lr=6e-4, betas=(0.9, 0.95), fused=True)
tokens = torch.randint(config.vocab_size, (batch_size, config.n_positions + 1), device=args.device)
x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def compute_loss(x, y):
    logits = model(x).logits.float()
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), y.view(-1))


if args.compile:
    compute_loss = torch.compile(compute_loss)
seconds, running = [], None
for _ in range(args.repeats + 3):  # the first three compile and warm up
    start = time.perf_counter()
    with torch.autocast(args.device, torch.bfloat16, enabled=args.dtype == 'bfloat16'):
        loss = compute_loss(x, y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if running is not None:
        running.item()  # waits for the step before: a GPU keeps one step in flight, as in train_jax.py
    running = loss.detach()
    seconds.append(time.perf_counter() - start)
median = statistics.median(seconds[3:])
results = {'ms_per_iter': median * 1e3, 'tokens_per_sec': x.numel() / median}
print(json.dumps({'program': 'torch_train', 'settings': vars(args), 'results': results,
                  'environment': {'torch': torch.__version__, 'transformers': transformers.__version__}}))
