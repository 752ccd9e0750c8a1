"""Adapters of peft are merged as peft merges them; tests/golden/make_peft.py made them, and the logits."""
import json
import pickle
import shutil
from functools import partial

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jax_files.adapters import KNOWN_SETTINGS, Halves, find_tensor, make_adapter
from jax_files.tokenizers import HFTokenizer, describe_tokenizer, write_char_tokenizer
from jax_files.weight_files import find_config_json, local_path, open_adapter
from jax_flags import UserError
from jax_lora import merge_updates
from jax_pretrained import load_pretrained, module_in_transformers, save_adapter, save_pretrained
from tests.common import (
    FAMILIES, GOLDEN, TINY, TUNE, WRITTEN, apply, assert_refused, copy_folder, edit_json, random_params,
    random_updates, refusal, run_script, sample, samples_of, succeeded, train, write_dataset)

PEFT = GOLDEN / 'peft'
LOGITS = np.load(PEFT / 'logits.npz')
BASES = {'plain': FAMILIES / 'llama', 'patterns': FAMILIES / 'llama', 'transposed': GOLDEN / 'hf'}
Q_PROJ = 'base_model.model.model.layers.0.self_attn.q_proj'


@pytest.fixture
def adapter(tmp_path):
    """The adapter `plain`, to be changed, with its base beside it."""
    copy_folder(FAMILIES / 'llama', tmp_path)
    return copy_folder(PEFT / 'plain', tmp_path)


def edit_adapter(folder, changes):
    """Sets tensors {name: array} of an adapter; None removes one."""
    tensors = load_file(folder / 'adapter_model.safetensors') | changes
    save_file({name: x for name, x in tensors.items() if x is not None}, folder / 'adapter_model.safetensors')


@pytest.mark.parametrize('name', sorted(BASES))
def test_an_adapter_has_the_logits_that_it_has_in_peft(name, tmp_path):
    base, folder = copy_folder(BASES[name], tmp_path), copy_folder(PEFT / name, tmp_path)
    config, params = load_pretrained(folder)
    logits = apply(config, params, np.arange(min(24, config.vocab_size))[None])
    np.testing.assert_allclose(logits, LOGITS[name], atol=1e-4)
    plain = apply(*load_pretrained(base), np.arange(min(24, config.vocab_size))[None])
    assert np.abs(plain - LOGITS[name]).max() > 0.05


@pytest.mark.parametrize('name', sorted(WRITTEN))
def test_an_adapter_that_is_saved_has_the_logits_that_it_has_in_peft(name, tmp_path):
    base = copy_folder(WRITTEN[name], tmp_path)
    config, params = load_pretrained(base)
    updates = random_updates(params)
    save_adapter(updates, config, tmp_path / 'saved', base=str(base), rank=2, alpha=3.0)
    golden = PEFT / 'written' / name
    settings = json.loads((golden / 'adapter_config.json').read_text())
    saved = json.loads((tmp_path / 'saved' / 'adapter_config.json').read_text())
    assert saved == settings | {'base_model_name_or_path': str(base)}
    tensors = load_file(golden / 'adapter_model.safetensors')
    jax.tree.map(np.testing.assert_array_equal, load_file(tmp_path / 'saved' / 'adapter_model.safetensors'), tensors)

    merged = merge_updates(params, {'rank': 2, 'alpha': 3.0}, updates)
    read_again = load_pretrained(tmp_path / 'saved')[1]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), read_again, merged)
    logits = apply(config, merged, np.arange(min(24, config.vocab_size))[None])
    np.testing.assert_allclose(logits, LOGITS[f'written/{name}'], atol=1e-4)


def test_what_peft_would_take_for_something_else_is_not_saved(tmp_path):
    config, params = load_pretrained(FAMILIES / 'deepseek_v3')
    options = {'base': str(FAMILIES / 'deepseek_v3'), 'rank': 2, 'alpha': 3.0}
    message = refusal(partial(save_adapter, random_updates(params), config, tmp_path / 'a', **options))
    assert 'peft takes an update of down_proj for one of the experts' in message
    for base in (GOLDEN / 'nanogpt', PEFT / 'plain'):
        with pytest.raises(UserError, match='peft cannot load|which does not exist'):
            save_adapter({}, config, tmp_path / 'a', **options | {'base': str(base)})
    assert not (tmp_path / 'a').exists()


def test_modules_of_a_model_that_sees_are_named_as_transformers_names_them(adapter, tmp_path):
    name = 'model.layers.0.self_attn.q_proj'
    assert module_in_transformers(f'language_model.{name}', 'llama4') == name
    theirs = module_in_transformers(f'language_model.{name}', 'gemma3')
    assert theirs == 'model.language_model.layers.0.self_attn.q_proj'
    on_disk = f'language_model.{name}.weight'
    assert find_tensor(f'{theirs}.weight', {on_disk: None}, theirs, 'source') == on_disk
    half = Halves(np.ones((2, 3)), np.ones((4, 2)))
    settings, _ = make_adapter({theirs: half}, rank=2, alpha=0.5, base='b', model_type='gemma3')
    assert settings['target_modules'] == [theirs] and settings['lora_alpha'] == 0.5


def test_the_base_is_where_the_settings_say_beside_the_adapter_or_where_base_says(adapter, tmp_path):
    want = load_pretrained(adapter)[1]
    shutil.move(tmp_path / 'llama', adapter / 'llama')
    places = [None, str(adapter / 'llama'), 'llama']
    for named in places:
        edit_json(adapter / 'adapter_config.json', base_model_name_or_path=named or '/gone/llama')
        jax.tree.map(np.testing.assert_array_equal, load_fresh(adapter), want)
    shutil.move(adapter / 'llama', tmp_path / 'moved')
    assert 'does not exist; name its place with --base' in refusal(load_fresh_of, adapter, '/gone/llama')
    assert 'does not say which model it updates' in refusal(load_fresh_of, adapter, None)
    jax.tree.map(np.testing.assert_array_equal, load_fresh(adapter, str(tmp_path / 'moved')), want)
    assert 'is for a LoRA run or an adapter' in refusal(lambda: local_path(tmp_path / 'moved', base='llama'))


def load_fresh(adapter, base=''):
    """The parameters of an adapter whose files have changed since it was opened."""
    open_adapter.cache_clear()
    return load_pretrained(local_path(adapter, base=base))[1]


def load_fresh_of(adapter, named):
    edit_json(adapter / 'adapter_config.json', base_model_name_or_path=named)
    return load_fresh(adapter)


def test_weights_beside_an_adapter_are_its_base_only_if_base_says_so(adapter, tmp_path):
    want = load_pretrained(adapter)[1]
    for file in ('config.json', 'model.safetensors'):
        shutil.copyfile(tmp_path / 'llama' / file, adapter / file)
    assert 'holds an adapter and model.safetensors' in refusal(load_fresh, adapter)
    jax.tree.map(np.testing.assert_array_equal, load_fresh(adapter, str(adapter)), want)


@pytest.mark.parametrize('key, value', [
    ('peft_type', 'LOHA'), ('peft_type', None), ('use_dora', True), ('lora_bias', True),
    ('layer_replication', [[0, 1]]), ('target_parameters', ['experts.gate_up_proj']),
    ('trainable_token_indices', [1]), ('alora_invocation_tokens', [1]),
    ('use_qalora', True), ('init_lora_weights', 'pissa'), ('init_lora_weights', 'olora'), ('init_lora_weights', [1]),
    ('loftq_config', {'loftq_bits': 4}), ('revision', 'v2'), ('something_new', 1), ('rank_pattern', {'(a+)+': 2}),
    ('rank_pattern', {'a*a*a*a*a*': 2}), ('rank_pattern', {'(': 2}), ('rank_pattern', [1]), ('use_rslora', 1)])
def test_a_setting_that_is_not_computed_is_refused_by_its_name(key, value, adapter):
    edit_json(adapter / 'adapter_config.json', **{key: value})
    message = refusal(load_pretrained, adapter)
    assert f'adapter_config.json: {key}=' in message and 'is not supported' in message


@pytest.mark.parametrize('key', ['r', 'lora_alpha'])
@pytest.mark.parametrize('value', [None, 0, -1, True, '8', 10**30])
def test_a_number_of_the_settings_that_makes_no_sense_is_refused(key, value, adapter):
    edit_json(adapter / 'adapter_config.json', **{key: value})
    assert f'{key} should be a number above 0' in refusal(load_pretrained, adapter)


def test_settings_that_are_off_or_known_are_read_over(adapter):
    settings = json.loads((adapter / 'adapter_config.json').read_text())
    assert 'r' in KNOWN_SETTINGS and settings['use_dora'] is False
    edit_json(adapter / 'adapter_config.json', something_new=None, another={}, init_lora_weights='gaussian')
    load_pretrained(adapter)


@pytest.mark.parametrize('changes, message', [
    ({f'{Q_PROJ}.lora_A.weight': None}, 'one of lora_A and lora_B of model.layers.0.self_attn.q_proj, but not both'),
    ({f'{Q_PROJ}.lora_A.weight': np.ones((3, 32), np.float32)}, 'its rank should be 2'),
    ({f'{Q_PROJ}.lora_B.weight': np.ones((32, 3), np.float32)}, 'does not fit its lora_A'),
    ({f'{Q_PROJ}.lora_A.weight': np.ones((2, 31), np.float32)}, 'does not fit its weight'),
    ({f'{Q_PROJ}.lora_A.weight': np.ones((2, 32), np.int8)}, 'not floating point of 16 bits'),
    ({f'{Q_PROJ}.lora_magnitude_vector': np.ones(32, np.float32)}, "lora_magnitude_vector' is not supported"),
    ({f'{Q_PROJ}.lora_B.bias': np.ones(32, np.float32)}, "lora_B.bias' is not supported"),
    ({'model.x.weight': np.ones(32, np.float32)}, "'model.x.weight' is not supported"),
    ({Q_PROJ.replace('q_proj', 'w_proj') + '.lora_A.weight': np.ones((2, 32), np.float32)}, 'does not have'),
    ({'base_model.model.lm_head.weight': np.ones((3, 32), np.float32)}, 'lm_head.weight should have shape')])
def test_tensors_that_are_not_of_this_model_are_refused_by_name(changes, message, adapter):
    edit_adapter(adapter, changes)
    assert message in refusal(load_pretrained, adapter)


def test_bfloat16_updates_are_added_in_float32(adapter):
    tensors = load_file(adapter / 'adapter_model.safetensors')
    edit_adapter(adapter, {name: x.astype(ml_dtypes.bfloat16) for name, x in tensors.items()})
    config, params = load_pretrained(adapter)
    assert params['wte'].dtype == np.float32
    logits = apply(config, params, np.arange(24)[None])
    assert 0 < np.abs(logits - LOGITS['plain']).max() < 0.1


def test_an_adapter_without_its_tensors_and_hostile_ones_are_one_line(adapter, tmp_path):
    (adapter / 'adapter_model.safetensors').unlink()
    assert 'none of adapter_model.safetensors, adapter_model.bin' in refusal(load_pretrained, adapter)
    (adapter / 'adapter_model.bin').write_bytes(pickle.dumps({}))
    assert 'adapter_model.bin' in refusal(load_pretrained, adapter)
    (adapter / 'adapter_model.safetensors').symlink_to(tmp_path / 'elsewhere')
    open_adapter.cache_clear()
    assert 'leads out of its folder' in refusal(load_pretrained, adapter)
    with pytest.raises(UserError, match='adapter_path is not of this program'):
        stranger = copy_folder(FAMILIES / 'llama', tmp_path / 'other')
        (stranger / 'model.safetensors').unlink()
        (stranger / 'adapter_path').write_text('{}')
        load_pretrained(stranger)


def test_the_tokenizer_is_the_adapters_or_else_the_bases(adapter, tmp_path):
    write_char_tokenizer('abc', str(tmp_path / 'llama'))
    edit = tmp_path / 'llama' / 'generation_config.json'
    edit.write_text(json.dumps({'eos_token_id': 2}))
    tokenizer = HFTokenizer(describe_tokenizer(local_path(adapter), 44)['path'])
    assert tokenizer.ids == {'a': 0, 'b': 1, 'c': 2} and tokenizer.stop_tokens == (2,)
    open_adapter.cache_clear()
    write_char_tokenizer('xyz', str(adapter))
    tokenizer = HFTokenizer(describe_tokenizer(local_path(adapter), 44)['path'])
    assert tokenizer.ids == {'x': 0, 'y': 1, 'z': 2} and tokenizer.stop_tokens == (2,)
    assert find_config_json(local_path(adapter)).endswith('config.json')


def test_an_adapter_of_a_gguf_file_or_a_ckpt_is_refused(adapter, tmp_path):
    pytest.importorskip('gguf')
    chars = {'kind': 'char', 'chars': ''.join(chr(48 + i) for i in range(TINY.vocab_size))}
    save_pretrained(random_params(TINY), TINY, tmp_path / 'a.gguf', tokenizer=chars)
    for base in (tmp_path / 'a.gguf', GOLDEN / 'nanogpt'):
        assert 'no folder of Hugging Face' in refusal(load_fresh, adapter, str(base))


@pytest.mark.slow
def test_an_adapter_is_a_start_for_every_script(adapter, tmp_path):
    chars = ''.join(chr(48 + i) for i in range(44))
    write_char_tokenizer(chars, str(tmp_path / 'llama'))
    write_dataset(tmp_path / 'data', np.arange(2000) % 44, np.arange(400) % 44, chars=chars)
    flags = ['--num_samples=1', '--max_new_tokens=10', '--start=AB']
    want = samples_of(sample('none', f'--init_from={adapter}', *flags))
    succeeded(run_script('export_jax.py', f'--init_from={adapter}', f'--folder={tmp_path / "merged"}'))
    assert not (tmp_path / 'merged' / 'adapter_path').exists()
    assert samples_of(sample('none', f'--init_from={tmp_path / "merged"}', *flags)) == want
    shutil.move(tmp_path / 'llama', tmp_path / 'moved')
    open_adapter.cache_clear()
    assert_refused(sample('none', f'--init_from={adapter}', *flags), 'name its place with --base')
    assert samples_of(sample('none', f'--init_from={adapter}', f'--base={tmp_path / "moved"}', *flags)) == want
    (tmp_path / 'a.txt').write_text('ABAB' * 20)
    score = run_script('eval_jax.py', f'--init_from={adapter}', f'--base={tmp_path / "moved"}',
                       f'--text={tmp_path / "a.txt"}')
    assert 'bits_per_byte' in succeeded(score).stdout
    shutil.move(tmp_path / 'moved', tmp_path / 'llama')
    for more in ([], ['--lora_rank=2']):
        out = tmp_path / f'out{len(more)}'
        succeeded(train(out, f'--dataset={tmp_path / "data"}', f'--init_from={adapter}', *TUNE, *more))
        assert samples_of(sample(out, *flags))
