"""Writes peft/written/: adapters of random updates, as export_jax.py --adapter writes them. make_peft.py then adds the
logits that peft gives with them to peft/logits.npz.

    PYTHONPATH=. python tests/golden/make_adapters.py  # needs this project, and no torch
"""
import shutil

from jax_pretrained import load_pretrained, save_adapter
from tests.common import GOLDEN, edit_json
from tests.test_adapters import WRITTEN, random_updates

for name, base in WRITTEN.items():
    config, params = load_pretrained(base)
    folder = GOLDEN / 'peft' / 'written' / name
    shutil.rmtree(folder, ignore_errors=True)
    save_adapter(random_updates(params), config, folder, base=str(base), rank=2, alpha=3.0)
    edit_json(folder / 'adapter_config.json', base_model_name_or_path=base.name)  # no path of this machine
