"""Writes peft/logits.npz: the logits of models with the adapters of make_adapters.py, as peft loads them.

    python make_peft.py  # needs torch, transformers and peft
"""
import json
import warnings
from pathlib import Path

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent


def logits_of(model):
    with torch.no_grad():
        idx = torch.arange(model.config.vocab_size)[None, :24]
        return model(idx).logits.numpy()


def load(folder):
    """The logits of a model with an adapter that was written here; a warning of peft's is an error."""
    named = json.loads((folder / 'adapter_config.json').read_text())['base_model_name_or_path']
    base = HERE / named if named == 'hf' else HERE / 'families' / named
    model = AutoModelForCausalLM.from_pretrained(base)
    with warnings.catch_warnings():
        warnings.filterwarnings('error', message='.*(adapter|pattern).* keys')
        return logits_of(PeftModel.from_pretrained(model, folder))


logits = {}
for folder in sorted((HERE / 'peft' / 'written').iterdir()):
    logits[f'written/{folder.name}'] = load(folder)
np.savez(HERE / 'peft' / 'logits.npz', **logits)
