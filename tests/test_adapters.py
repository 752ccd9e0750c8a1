"""What LoRA has trained, as adapters that peft reads; tests/golden/make_adapters.py has their logits in peft."""
import json
from functools import partial

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file

from jax_flags import UserError
from jax_hub.adapters import Halves, make_adapter
from jax_pretrained import load_pretrained, module_in_transformers, save_adapter
from jax_run.load import merge_updates
from tests.common import FAMILIES, GOLDEN, apply, copy_folder, refusal

PEFT = GOLDEN / 'peft'
LOGITS = np.load(PEFT / 'logits.npz')

# bases of the adapters in golden/peft/written: GPT-2, separate q, k and v, one tensor for each of them, RoPE in pairs
WRITTEN = {'hf': GOLDEN / 'hf', 'llama': FAMILIES / 'llama', 'phi3': FAMILIES / 'phi3', 'llama4': FAMILIES / 'llama4'}


def random_updates(params, rank=2):
    """LoRA's updates of the parameters of a model, as create_updates makes them, far from zero."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return (0.3 * rng.normal(size=shape)).astype(np.float32)

    updates = {}
    for path, x in sorted(flatten_dict(params).items()):
        if path[-1] == 'kernel' and x.ndim == 2 and path[-2] != 'router':
            updates[*path, 'a'] = draw(x.shape[0], rank)
            updates[*path, 'b'] = draw(rank, x.shape[1])
    return unflatten_dict(updates)


@pytest.mark.parametrize('name', sorted(WRITTEN))
def test_an_adapter_that_is_saved_has_the_logits_that_it_has_in_peft(name, tmp_path):
    base = copy_folder(WRITTEN[name], tmp_path)
    config, params = load_pretrained(base)
    updates = random_updates(params)
    save_adapter(updates, config, tmp_path / 'saved', base=str(base), rank=2, alpha=3.0)
    golden = PEFT / 'written' / name
    settings = json.loads((golden / 'adapter_config.json').read_text())
    saved = json.loads((tmp_path / 'saved' / 'adapter_config.json').read_text())
    assert saved == settings | {'base_model_name_or_path': base.name}
    tensors = load_file(golden / 'adapter_model.safetensors')
    jax.tree.map(np.testing.assert_array_equal, load_file(tmp_path / 'saved' / 'adapter_model.safetensors'), tensors)

    merged = merge_updates(params, {'rank': 2, 'alpha': 3.0}, updates)
    logits = apply(config, merged, np.arange(min(24, config.vocab_size))[None])
    np.testing.assert_allclose(logits, LOGITS[f'written/{name}'], atol=1e-4)


def test_what_peft_would_take_for_something_else_is_not_saved(tmp_path):
    config, params = load_pretrained(FAMILIES / 'deepseek_v3')
    options = {'base': str(FAMILIES / 'deepseek_v3'), 'rank': 2, 'alpha': 3.0}
    message = refusal(partial(save_adapter, random_updates(params), config, tmp_path / 'a', **options))
    assert 'peft takes an update of down_proj for one of the experts' in message
    with pytest.raises(UserError, match='peft cannot load'):
        save_adapter({}, config, tmp_path / 'a', **options | {'base': str(GOLDEN / 'nanogpt')})
    assert not (tmp_path / 'a').exists()


def test_modules_of_a_model_that_sees_are_named_as_transformers_names_them():
    name = 'model.layers.0.self_attn.q_proj'
    assert module_in_transformers(f'language_model.{name}', 'llama4') == name
    theirs = module_in_transformers(f'language_model.{name}', 'gemma3')
    assert theirs == 'model.language_model.layers.0.self_attn.q_proj'
    half = Halves(np.ones((2, 3)), np.ones((4, 2)))
    settings, _ = make_adapter({theirs: half}, rank=2, alpha=0.5, base='b', model_type='gemma3')
    assert settings['target_modules'] == [theirs] and settings['lora_alpha'] == 0.5
