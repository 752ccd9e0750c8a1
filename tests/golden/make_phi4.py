"""Writes the folder phi4/ beside it: a small random Phi 3 that rotates a part of each head by
longrope, as Phi-4-mini does, with the logits that transformers computes at the length of
pretraining. Run by hand; needs torch and transformers:

    python tests/golden/make_phi4.py
"""

from pathlib import Path

import numpy as np
import torch
from make_families import SIZES, randomize
from transformers import AutoModelForCausalLM, Phi3Config

FOLDER = Path(__file__).parent / 'phi4'
LENGTH = 40  # of pretraining


def main():
    rope = dict(
        rope_type='longrope',
        rope_theta=1e4,
        partial_rotary_factor=0.75,
        short_factor=[1.0, 1.5, 2.5],
        long_factor=[1.0, 4.0, 8.0],
    )
    sizes = dict(
        SIZES,
        num_hidden_layers=1,
        num_key_value_heads=2,
        intermediate_size=24,
        tie_word_embeddings=True,
        max_position_embeddings=4 * LENGTH,
        original_max_position_embeddings=LENGTH,
    )
    config = Phi3Config(**sizes, rope_parameters=rope)
    model = randomize(AutoModelForCausalLM.from_config(config, attn_implementation='eager'), 3)
    model.save_pretrained(FOLDER)
    (FOLDER / 'generation_config.json').unlink(missing_ok=True)
    idx = torch.from_numpy(np.random.default_rng(0).integers(0, SIZES['vocab_size'], (2, LENGTH)))
    with torch.no_grad():
        logits = model(idx).logits
    arrays = dict(idx=idx.numpy().astype(np.int32), logits=logits.numpy())
    np.savez_compressed(FOLDER / 'expected.npz', **arrays)


if __name__ == '__main__':
    main()
