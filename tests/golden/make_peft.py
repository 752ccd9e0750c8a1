"""Writes peft/: LoRA adapters of the models in families/llama and hf, saved by peft, and the logits of those models
with them (logits.npz), merged as peft merges them; and the logits with the adapters of make_adapters.py, as peft loads
them.

    python make_peft.py  # needs torch, transformers and peft
"""
import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
ATTENTION = ['q_proj', 'v_proj']
CASES = {  # name: (folder of the base, settings, whether as safetensors)
    'plain': ('families/llama', dict(r=2, lora_alpha=6, target_modules=ATTENTION), True),
    'patterns': ('families/llama', dict(
        r=2, lora_alpha=6, use_rslora=True, target_modules=[*ATTENTION, 'down_proj', 'embed_tokens'],
        modules_to_save=['lm_head'], rank_pattern={'layers.1.self_attn.v_proj': 3, r'^model.layers.[0]\..*q_proj': 4},
        alpha_pattern={'down_proj': 5, 'v_proj': 1}), True),
    'transposed': ('hf', dict(r=2, lora_alpha=3, target_modules=['c_attn', 'c_proj'], fan_in_fan_out=True), False)}


def make(name, base, settings, as_safetensors):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(HERE / base)
    model = get_peft_model(model, LoraConfig(task_type='CAUSAL_LM', **settings))
    generator = torch.Generator().manual_seed(0)
    for _, parameter in sorted(model.named_parameters()):  # peft's order is that of a set
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data = parameter.data + 0.3 * noise
    folder = HERE / 'peft' / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder, safe_serialization=as_safetensors)
    if not as_safetensors and (folder / 'adapter_model.safetensors').exists():  # later versions save nothing else
        from safetensors.torch import load_file
        torch.save(load_file(folder / 'adapter_model.safetensors'), folder / 'adapter_model.bin')
        (folder / 'adapter_model.safetensors').unlink()
    (folder / 'README.md').unlink(missing_ok=True)
    settings = json.loads((folder / 'adapter_config.json').read_text())
    settings['base_model_name_or_path'] = Path(base).name  # no path of this machine
    settings['target_modules'].sort()
    (folder / 'adapter_config.json').write_text(json.dumps(settings, indent=1, sort_keys=True) + '\n')
    return logits_of(model.merge_and_unload())


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


logits = {name: make(name, *case) for name, case in CASES.items()}
for folder in sorted((HERE / 'peft' / 'written').iterdir()):
    logits[f'written/{folder.name}'] = load(folder)
np.savez(HERE / 'peft' / 'logits.npz', **logits)
