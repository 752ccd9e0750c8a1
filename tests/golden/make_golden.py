"""Writes the files beside it: small random checkpoints with the logits that transformers or torch computes from them,
and five training steps of torch. Run by hand; needs torch and transformers:

    python tests/golden/make_golden.py
"""
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

HERE = Path(__file__).parent
SIZES = dict(n_layer=2, n_head=2, n_embd=16, vocab_size=41)
BLOCK_SIZE = 24


# -----------------------------------------------------------------------------
# nanoGPT's model as we understand it, with its parameter names

class LayerNorm(nn.Module):
    def __init__(self, width, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class Attention(nn.Module):
    def __init__(self, width, n_head, bias):
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(width, 3 * width, bias=bias)
        self.c_proj = nn.Linear(width, width, bias=bias)

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = (a.view(B, T, self.n_head, -1).transpose(1, 2) for a in self.c_attn(x).chunk(3, dim=-1))
        scores = q @ k.transpose(-2, -1) / q.shape[-1]**0.5
        scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), float('-inf'))
        return self.c_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, D))


class Block(nn.Module):
    def __init__(self, width, n_head, bias):
        super().__init__()
        self.ln_1, self.attn = LayerNorm(width, bias), Attention(width, n_head, bias)
        self.ln_2 = LayerNorm(width, bias)
        self.mlp = nn.ModuleDict(dict(c_fc=nn.Linear(width, 4 * width, bias=bias),
                                      c_proj=nn.Linear(4 * width, width, bias=bias)))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp['c_proj'](F.gelu(self.mlp['c_fc'](self.ln_2(x))))


class NanoGPT(nn.Module):
    def __init__(self, n_layer, n_head, n_embd, vocab_size, block_size, bias):
        super().__init__()
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(vocab_size, n_embd), wpe=nn.Embedding(block_size, n_embd),
            h=nn.ModuleList(Block(n_embd, n_head, bias) for _ in range(n_layer)), ln_f=LayerNorm(n_embd, bias)))
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.lm_head.weight = self.transformer['wte'].weight

    def forward(self, idx):
        t = self.transformer
        x = t['wte'](idx) + t['wpe'](torch.arange(idx.shape[1]))
        for block in t['h']:
            x = block(x)
        return self.lm_head(t['ln_f'](x))

# -----------------------------------------------------------------------------

@torch.no_grad()
def randomize(model, seed, std=0.5):
    """Large random weights, gains and biases, so that one that is lost, transposed or misplaced shows in the logits."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        gain = 1.0 if re.search(r'ln_\w+\.weight', name) else 0.0
        p.copy_(gain + std * torch.randn(p.shape, generator=generator))
    return model


def clean(name):
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def save_hf(model, name, **how):
    model.save_pretrained(clean(name), **how)
    (HERE / name / 'generation_config.json').unlink()


def save_nanogpt(name, model, model_args, optimizer=None, prefix=''):
    state = model.state_dict()
    for key in list(state):
        state[prefix + key] = state.pop(key)
    torch.save({
        'model': state, 'optimizer': optimizer and optimizer.state_dict(), 'model_args': model_args, 'iter_num': 5,
        'best_val_loss': torch.tensor(3.5), 'config': {'out_dir': 'out', 'learning_rate': 6e-4, 'compile': True},
    }, clean(name) / 'ckpt.pt')


def train(name, bias, x, y, lrs):
    """Five steps of nanoGPT's recipe. Returns the arrays of the golden file; the initial weights go to a ckpt.pt."""
    torch.manual_seed(1)
    args = dict(SIZES, block_size=BLOCK_SIZE, bias=bias)
    model = NanoGPT(**args)
    randomize(model, 11, std=0.1)
    save_nanogpt(name, model, dict(args, dropout=0.0))
    params = list(model.parameters())  # the tied table comes once
    optimizer = torch.optim.AdamW(
        [{'params': [p for p in params if p.dim() >= 2], 'weight_decay': 0.1},
         {'params': [p for p in params if p.dim() < 2], 'weight_decay': 0.0}], betas=(0.9, 0.95), eps=1e-8)
    losses, grad_norms = [], []
    for x_BxT, y_BxT, lr in zip(torch.from_numpy(x), torch.from_numpy(y), lrs):
        for group in optimizer.param_groups:
            group['lr'] = float(lr)
        loss = F.cross_entropy(model(x_BxT).flatten(0, 1), y_BxT.flatten())
        optimizer.zero_grad()
        loss.backward()
        grad_norms.append(nn.utils.clip_grad_norm_(params, 1.0).item())  # as it was before clipping
        losses.append(loss.item())
        optimizer.step()
    with torch.no_grad():
        logits = model(torch.from_numpy(x[0])).numpy()
    print(name, 'losses', losses, 'grad norms', grad_norms)
    np.savez(HERE / name / 'steps.npz', x=x, y=y, lrs=lrs, losses=np.float32(losses),
             grad_norms=np.float32(grad_norms), logits_after=logits)
    return model, optimizer


def main():
    torch.use_deterministic_algorithms(True)
    rng = np.random.default_rng(0)
    idx = rng.integers(0, SIZES['vocab_size'], (2, BLOCK_SIZE))
    logits = {}

    hf_config = GPT2Config(n_positions=BLOCK_SIZE, bos_token_id=None, eos_token_id=None, **SIZES)
    hf = randomize(GPT2LMHeadModel(hf_config).eval(), 1)
    save_hf(hf, 'hf')
    save_hf(hf, 'hf_sharded', max_shard_size='12KB')

    # as the published openai-community/gpt2: no prefix, causal masks among the tensors
    folder = clean('hf_published')
    state = {k.removeprefix('transformer.'): v.contiguous() for k, v in hf.transformer.state_dict().items()}
    for i in range(SIZES['n_layer']):
        state[f'h.{i}.attn.bias'] = torch.ones(BLOCK_SIZE, BLOCK_SIZE).tril()[None, None]
        state[f'h.{i}.attn.masked_bias'] = torch.tensor(-1e4)
    save_file(state, folder / 'model.safetensors', metadata={'format': 'pt'})
    config = json.loads((HERE / 'hf' / 'config.json').read_text())
    (folder / 'config.json').write_text(json.dumps(config | {'n_ctx': BLOCK_SIZE, 'n_positions': BLOCK_SIZE}, indent=2))
    assert torch.equal(GPT2LMHeadModel.from_pretrained(folder)(torch.from_numpy(idx)).logits,
                       hf(torch.from_numpy(idx)).logits)

    # the other activation and another epsilon, in a pickle, with the tied head stored as well
    hf_config.activation_function, hf_config.layer_norm_epsilon = 'gelu', 0.05
    hf_bin = randomize(GPT2LMHeadModel(hf_config).eval(), 2)
    hf_bin.config.save_pretrained(clean('hf_bin'))
    torch.save(hf_bin.state_dict(), HERE / 'hf_bin' / 'pytorch_model.bin')

    x = rng.integers(0, SIZES['vocab_size'], (5, 4, BLOCK_SIZE))
    y = (3 * x + 1) % SIZES['vocab_size']  # something to learn
    lrs = np.float32([2e-3, 4e-3, 6e-3, 8e-3, 1e-2])
    train('train', True, x, y, lrs)
    _, optimizer = train('train_no_bias', False, x, y, lrs)

    for name, seed, bias, opt, prefix in (('nanogpt', 3, True, None, ''), ('nanogpt_no_bias', 4, False, optimizer, ''),
                                          ('nanogpt_compiled', 5, True, None, '_orig_mod.')):
        args = dict(SIZES, block_size=BLOCK_SIZE, bias=bias)
        model = randomize(NanoGPT(**args), seed)
        save_nanogpt(name, model, dict(args, dropout=0.2), opt, prefix)
        logits[name] = model
    logits |= {'hf': lambda i: hf(i).logits, 'hf_bin': lambda i: hf_bin(i).logits}
    with torch.no_grad():
        logits = {name: model(torch.from_numpy(idx)).numpy() for name, model in logits.items()}
    logits['hf_sharded'] = logits['hf_published'] = logits['hf']
    np.savez(HERE / 'logits.npz', idx=idx, **logits)

    # what a torch checkpoint may hold besides contiguous float32
    base = torch.arange(24.).reshape(4, 6) - 7
    tensors = {
        'transposed': base.T, 'sliced': base[1:, ::2], 'broadcast': base[0].expand(3, 6), 'scalar': torch.tensor(2.5),
        'empty': torch.zeros(0, 3), 'parameter': nn.Parameter(base[2]),
        'uint8': (base + 7).to(torch.uint8)}
    for name in ('float64', 'float16', 'bfloat16', 'int64', 'int32', 'int16', 'int8', 'bool'):
        tensors[name] = base.to(getattr(torch, name))
    torch.save({'tensors': tensors, 'shape': base.shape, 'nested': [1, 2.5, None, ('a', True)]}, HERE / 'tensors.pt')
    torch.save({'tensors': tensors}, HERE / 'legacy.pt', _use_new_zipfile_serialization=False)
    np.savez(HERE / 'tensors.npz', **{  # numpy has no bfloat16
        k: (t.float() if t.dtype == torch.bfloat16 else t).detach().numpy() for k, t in tensors.items()})
    print(sum(os.path.getsize(f) for f in HERE.rglob('*') if f.is_file()), 'bytes in all')


if __name__ == '__main__':
    main()
