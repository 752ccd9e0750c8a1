"""config.json of strangers: what a missing key and null mean in each family, and sizes that no
model has."""

import json
import math

import numpy as np
import pytest

from jax_families import FAMILIES as READERS, read_config
from jax_files.config_json import JsonConfig
from jax_flags import UserError
from jax_pretrained import meaning, open_model
from jax_transformer import GPTConfig
from tests.common import FAMILIES, GOLDEN, copy_folder, edit_json, refusal

DEFAULTS = json.loads((GOLDEN / 'defaults.json').read_text())
FOLDERS = {'gpt2': GOLDEN / 'hf'}
for name in (
    'llama',
    'qwen3_moe',
    'gpt_oss',
    'deepseek_v3',
    'llama4',
    'smollm3',
    'olmo3',
    'gemma3',
    'phi3',
):
    FOLDERS[name] = FAMILIES / name

# -----------------------------------------------------------------------------
# missing keys, and null


def config_of(family, values):
    return read_config(dict(values, model_type=family), 'config.json')[0]


@pytest.mark.parametrize('family', DEFAULTS)
def test_a_missing_key_means_what_it_does_in_transformers(family):
    case = DEFAULTS[family]
    assert meaning(config_of(family, case['sizes'])) == meaning(config_of(family, case['all']))


@pytest.mark.parametrize('family', DEFAULTS)
def test_null_means_what_it_does_in_transformers_or_is_refused(family):
    case = DEFAULTS[family]
    for key, changed in case['null'].items():
        try:
            config = config_of(family, dict(case['sizes'], **{key: None}))
        except UserError:
            assert changed != {} or key == 'head_dim', (
                key
            )  # where null is as good as no key, it is no error
            continue
        assert changed is not None, key  # transformers raises
        assert meaning(config) == meaning(config_of(family, dict(case['all'], **changed))), key


def test_smollm3_without_the_key_has_a_tied_head():
    assert config_of('smollm3', DEFAULTS['smollm3']['sizes']).tied_head


@pytest.mark.parametrize(
    'outer, inner, tied',
    [
        ({}, {}, True),
        ({}, {'tie_word_embeddings': False}, True),
        ({'tie_word_embeddings': False}, {}, False),
    ],
)
def test_the_head_of_a_gemma3_that_sees_is_tied_as_the_outer_config_says(outer, inner, tied):
    text = dict(DEFAULTS['gemma3_text']['sizes'], **inner)
    assert config_of('gemma3', dict(outer, text_config=text)).tied_head == tied


# -----------------------------------------------------------------------------
# sizes


def size_keys(values):
    """The keys of a config.json whose value is a whole number."""
    return [
        key for key, value in values.items() if type(value) is int and not key.endswith('_token_id')
    ]


NOT_READ = {
    'num_key_value_heads',
    'pretraining_tp',
    'num_mtp_layers',
    'num_nextn_predict_layers',
    'n_ctx',
    'n_special',
    'output_past',
    'qk_head_dim',
    '_sliding_window_pattern',
    'num_labels',
    'max_window_layers',
}


@pytest.mark.parametrize('name', FOLDERS)
@pytest.mark.parametrize('size', [10**9, 10**18, 2**40, -2, 10**400, True, 1.5, '8', [8], {}, None])
def test_a_size_that_no_model_has_is_refused_before_anything_of_it_is_made(name, size, tmp_path):
    folder = copy_folder(FOLDERS[name], tmp_path)
    text = (folder / 'config.json').read_text()
    values = json.loads(text)
    n_refused = 0
    for key in size_keys(values):
        if size in (10**9, None) and key not in (
            'num_hidden_layers',
            'n_layer',
            'hidden_size',
            'n_embd',
            'vocab_size',
        ):
            continue  # a window and a chunk of 10^9 positions are harmless
        (folder / 'config.json').write_text(json.dumps(dict(values, **{key: size})))
        try:
            open_model(folder)
        except UserError as error:
            assert '\n' not in str(error)
            n_refused += 1
            continue
        assert key in NOT_READ, key
    assert n_refused >= 3


@pytest.mark.parametrize('name', FOLDERS)
def test_more_layers_than_the_file_holds_are_refused_before_they_are_made(
    name, tmp_path, monkeypatch
):
    folder = copy_folder(FOLDERS[name], tmp_path)
    key = 'n_layer' if name == 'gpt2' else 'num_hidden_layers'
    edit_json(
        folder / 'config.json',
        **{key: 9999},
        layer_types=None,
        no_rope_layers=None,
        moe_layers=None,
    )
    monkeypatch.setattr('jax_pretrained.family_tensor_maps', None)
    message = refusal(open_model, folder)
    assert 'layers, but its config says 9999' in message


@pytest.mark.parametrize(
    'name, key, value, named',
    [
        ('qwen3_moe', 'num_local_experts', 60_000, 'n_expert'),
        ('deepseek_v3', 'n_routed_experts', 12, '8 experts'),
        ('gpt_oss', 'num_local_experts', 60_000, 'n_expert'),
        ('llama', 'vocab_size', 10**8, 'vocab_size'),
        ('llama', 'head_dim', 60_000, 'head_dim'),
        ('gpt2', 'n_positions', 2**29, 'block_size'),
    ],
)
def test_more_numbers_than_the_file_holds_are_refused_before_shapes_are_made(
    name, key, value, named, tmp_path
):
    folder = copy_folder(FOLDERS[name], tmp_path)
    edit_json(folder / 'config.json', **{key: value})
    message = refusal(open_model, folder)
    assert named in message
    assert 'holds' in message


@pytest.mark.parametrize('name', FOLDERS)
@pytest.mark.parametrize('value', [math.nan, math.inf, -math.inf, -1.0, 0.0, 10**400, 'x', True])
def test_a_number_that_is_not_positive_and_finite_is_refused(name, value, tmp_path):
    values = json.loads((FOLDERS[name] / 'config.json').read_text())
    keys = [
        key
        for key, x in values.items()
        if type(x) is float
        and key not in ('attn_scale', 'initializer_range')
        and 'drop' not in key
        and 'router' not in key
    ]
    assert keys
    for key in keys:
        with pytest.raises(UserError, match=key):
            read_config(dict(values, **{key: value}), 'config.json')


@pytest.mark.parametrize('block', [[0, 128], [128], [-1, 2], 'x', {}, [10**400, 1], None])
def test_blocks_of_fp8_that_do_not_exist_are_refused(block, tmp_path):
    folder = copy_folder(FAMILIES / 'deepseek_v3_packed', tmp_path)
    values = json.loads((folder / 'config.json').read_text())
    values['quantization_config']['weight_block_size'] = block
    (folder / 'config.json').write_text(json.dumps(values))
    assert 'weight_block_size' in refusal(open_model, folder)


@pytest.mark.parametrize(
    'field, value',
    [
        ('n_layer', 10**9),
        ('n_layer', True),
        ('n_layer', 2.0),
        ('n_embd', 10**18),
        ('vocab_size', -1),
        ('head_dim', 10**9),
        ('block_size', 2**30),
        ('norm_eps', math.nan),
        ('rope_theta', -1.0),
        ('dropout', '0'),
        ('embed_scale', math.inf),
    ],
)
def test_a_config_of_a_size_that_no_model_has_is_refused(field, value):
    with pytest.raises(UserError, match=field):
        GPTConfig(**{field: value})


@pytest.mark.parametrize(
    'name, key, value, named',
    [
        ('deepseek_v3', 'n_group', 8, '8 equal groups'),
        ('deepseek_v3', 'qk_rope_head_dim', 7, 'rope_dim'),
    ],
)
def test_experts_and_heads_that_cannot_be_computed_are_refused(name, key, value, named, tmp_path):
    folder = copy_folder(FOLDERS[name], tmp_path)
    edit_json(folder / 'config.json', head_dim=None, **{key: value})
    assert named in refusal(open_model, folder)


def test_a_huge_value_is_shown_in_part():
    with pytest.raises(UserError) as error:
        JsonConfig({'n': list(range(10**5))}, 'config.json').get('n')
    assert len(str(error.value)) < 200


def test_every_family_has_a_case():
    assert set(READERS) - set(DEFAULTS) == {
        'gemma3',
        'kimi_k2',
        'llama4',
    }  # other names of three of them
    assert np.all([case['null'] for case in DEFAULTS.values()])
