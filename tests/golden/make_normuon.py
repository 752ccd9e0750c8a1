"""Makes normuon.npz with the authors' code: https://github.com/zichongli5/NorMuon, which needs torch.

$ python tests/golden/make_normuon.py path/to/NorMuon

What it normalizes is taken as orthogonal, without momentum: those have tests of their own."""
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, sys.argv[1])
import normuon

normuon.zeropower_via_newtonschulz5 = lambda update, steps: update
generator = torch.Generator().manual_seed(0)
saved = {}
for name, (n_out, n_in) in {'wide': (4, 6), 'tall': (7, 3)}.items():
    squares = torch.zeros(n_out, 1)
    for step in range(4):
        update = torch.randn(n_out, n_in, generator=generator) * torch.arange(1, n_out + 1)[:, None]
        saved[f'{name}_{step}'] = update.T.numpy().copy()
        scale = max(1, n_out / n_in)**0.5  # which this project has in another form
        result = normuon.normuon_update(update, torch.zeros_like(update), squares, beta=0.0, nesterov=False)
        saved[f'{name}_{step}_normalized'] = (result / scale).T.numpy().copy()
np.savez(Path(__file__).parent / 'normuon.npz', **saved)
