"""Writes rope_freqs.json: the frequencies that transformers computes for Llama 3's RoPE scaling, and the factors that
llama.cpp's converter stores in place of its settings, in the tensor rope_freqs.weight.

    python make_rope_freqs.py  # needs torch and transformers
"""
import json
import math
from pathlib import Path

import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

CASES = {  # name: (theta, width of a head, factor, low_freq_factor, high_freq_factor, original length)
    'llama-3.1': (500000.0, 128, 8.0, 1.0, 4.0, 8192),
    'llama-3.2': (500000.0, 64, 32.0, 1.0, 4.0, 8192),
    'small': (10000.0, 16, 8.0, 1.0, 4.0, 64),
    'between': (10000.0, 16, 4.0, 1.5, 3.0, 100)}  # no published model has these settings


def converted(frequencies, factor, low, high, original):
    """What a frequency is divided by, as convert_hf_to_gguf.py describes it, in float32."""
    factors = []
    for frequency in frequencies:
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(factors, dtype=torch.float32).tolist()


golden = {}
for name, (theta, width, factor, low, high, original) in CASES.items():
    scaling = {'rope_type': 'llama3', 'factor': factor, 'low_freq_factor': low, 'high_freq_factor': high,
               'original_max_position_embeddings': original, 'rope_theta': theta}
    config = LlamaConfig(hidden_size=4 * width, num_attention_heads=4, head_dim=width, rope_parameters=scaling,
                         max_position_embeddings=8 * original)
    inv_freq, amplitude = ROPE_INIT_FUNCTIONS['llama3'](config, 'cpu')
    assert amplitude == 1.0
    plain = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    golden[name] = {'rope_theta': theta, 'head_dim': width, 'rope_scaling': scaling,
                    'inv_freq': inv_freq.tolist(), 'factors': converted(plain.tolist(), factor, low, high, original)}
Path(__file__).with_name('rope_freqs.json').write_text(json.dumps(golden, indent=1) + '\n')
