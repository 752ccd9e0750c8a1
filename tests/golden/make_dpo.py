"""Writes dpo.npz beside it: the loss, margin, accuracy and gradients of DPO with LoRA on the GPT-2 in hf/, by torch.
Run by hand; needs torch and transformers:

    python tests/golden/make_dpo.py
"""
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F
from transformers import GPT2LMHeadModel

HERE = Path(__file__).parent
MATRICES = ('attn/c_attn', 'attn/c_proj', 'mlp/c_fc', 'mlp/c_proj')
RANK, SCALE, BETA = 3, 2.0, 0.3
PAIRS = [(5, 4, 9), (3, 8, 2), (7, 1, 6), (2, 10, 10)]  # tokens of prompt, chosen and rejected answer


def answer_log_probs(logits_TxV, ids, n_prompt):
    """The log probability of each token of the answer, which follows n_prompt tokens."""
    return F.log_softmax(logits_TxV[:-1], dim=-1)[torch.arange(len(ids) - 1), ids[1:]][n_prompt - 1:]


def main():
    model = GPT2LMHeadModel.from_pretrained(HERE / 'hf').eval()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    rng = np.random.default_rng(0)
    draw = lambda *shape: torch.tensor(0.2 * rng.standard_normal(shape), dtype=torch.float32, requires_grad=True)
    updates = {}
    for i in range(model.config.n_layer):
        for matrix in MATRICES:
            n_in, n_out = weights[f'transformer.h.{i}.{matrix.replace("/", ".")}.weight'].shape
            updates[f'h_{i}/{matrix}/kernel/a'] = draw(n_in, RANK)
            updates[f'h_{i}/{matrix}/kernel/b'] = draw(RANK, n_out)
    updated = dict(weights)
    for path in updates:
        if path.endswith('a'):
            name = f'transformer.{path.removesuffix("/kernel/a").replace("h_", "h.", 1).replace("/", ".")}.weight'
            updated[name] = weights[name] + SCALE * updates[path] @ updates[f'{path[:-1]}b']

    arrays = {f'update/{path}': x.detach().numpy() for path, x in updates.items()}
    margins = {'sum': [], 'mean': []}
    for i, (n_prompt, *lengths) in enumerate(PAIRS):
        prompt = rng.integers(model.config.vocab_size, size=n_prompt)
        gains = {'sum': [], 'mean': []}
        for name, length in zip(('chosen', 'rejected'), lengths):
            ids = np.concatenate([prompt, rng.integers(model.config.vocab_size, size=length)])
            arrays[f'{name}/{i}'] = ids
            ids = torch.tensor(ids)
            policy, reference = (torch.func.functional_call(model, params, (ids[None],), {'use_cache': False}).logits[0]
                                 for params in (updated, weights))
            gain = answer_log_probs(policy, ids, n_prompt) - answer_log_probs(reference, ids, n_prompt)
            gains['sum'].append(gain.sum())
            gains['mean'].append(gain.mean())
        for kind, (chosen, rejected) in gains.items():
            margins[kind].append(BETA * (chosen - rejected))
    for kind, margin in margins.items():
        margin = torch.stack(margin)
        loss = -F.logsigmoid(margin).mean()
        grads = torch.autograd.grad(loss, list(updates.values()), retain_graph=True)
        arrays |= {f'{kind}/grad/{path}': grad.numpy() for path, grad in zip(updates, grads)}
        arrays[f'{kind}/metrics'] = np.array([loss.item(), margin.mean().item(), (margin > 0).float().mean().item()])
    arrays['prompt_lengths'] = np.array([n_prompt for n_prompt, *_ in PAIRS])
    arrays['rank_scale_beta'] = np.array([RANK, SCALE, BETA])
    np.savez_compressed(HERE / 'dpo.npz', **arrays)


if __name__ == '__main__':
    main()
