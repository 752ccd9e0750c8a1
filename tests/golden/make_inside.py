"""Writes inside.npz beside it: hidden states and attention probabilities that transformers computes for small models of
hf/ and families/. Run by hand; needs torch and transformers:

    python tests/golden/make_inside.py

GPT-2; a Llama with grouped keys; layers with and without sliding windows; attention sinks; latent attention. 12 tokens
are more than a window (5).
"""
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
FOLDERS = {'gpt2': 'hf', 'llama': 'families/llama', 'qwen3': 'families/qwen3', 'gpt_oss': 'families/gpt_oss',
           'deepseek_v3': 'families/deepseek_v3'}
T = 12

results = {'ids': np.random.default_rng(0).integers(37, size=T)}
for name, folder in FOLDERS.items():
    model = AutoModelForCausalLM.from_pretrained(HERE / folder, attn_implementation='eager', dtype=torch.float32).eval()
    with torch.no_grad():
        found = model(torch.tensor(results['ids'])[None], output_hidden_states=True, output_attentions=True)
    results[f'{name}/logits'] = found.logits[0].numpy()
    results[f'{name}/hidden_states'] = torch.cat(found.hidden_states).numpy()
    results[f'{name}/attention'] = torch.cat(found.attentions).numpy()
    print(name, *[results[f'{name}/{part}'].shape for part in ('logits', 'hidden_states', 'attention')])
np.savez_compressed(HERE / 'inside.npz', **results)
