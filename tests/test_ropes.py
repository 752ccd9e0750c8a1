"""RoPE of every family from every combination of keys, as transformers computes it
(tests/golden/make_ropes.py)."""

import functools
import json

import jax
import numpy as np
import pytest

from jax_families import read_config
from jax_flags import UserError
from jax_generate import generate
from jax_pretrained import load_pretrained
from jax_transformer import rope_of_layer
from tests.common import GOLDEN, apply
from tests.golden.rope_cases import ABSENT, BASES, LENGTH, cases, config_of, scaled

HEAD = 16  # channels of a head in all cases
NAMES = {'full': 'full_attention', 'window': 'sliding_attention', 'chunk': 'full_attention'}


@functools.cache
def golden():
    return json.loads((GOLDEN / 'ropes.json').read_text())


def may_be_refused(family, case, expected):
    """Whether GPT refuses a config that transformers computes: what it does not compute, wherever
    it stands."""
    kinds = {kind for kind, _, _ in expected['layers'].values()}
    sliding = expected['layers'].get('sliding_attention', ['default'])
    has_partial = '"partial_rotary_factor"' in json.dumps(case) and family != 'phi3'
    return 'dynamic' in kinds or sliding[0] != 'default' or has_partial


@pytest.mark.parametrize('family', BASES)
def test_rope_is_that_of_transformers_for_every_combination_of_keys(family):
    n_same = 0
    indices = golden()['families'][family]
    all_cases = list(cases(family))
    assert len(indices) == len(all_cases)
    for case, index in zip(all_cases, indices):
        expected = golden()['results'][index]
        try:
            config, _ = read_config(config_of(family, case), 'config.json')
        except UserError:
            assert expected is None or may_be_refused(family, case, expected), case
            continue
        assert expected is not None, case
        for layer_type in set(config.layer_types) - {'nope'}:
            name = NAMES[layer_type] if family in ('olmo3', 'gemma3_text') else 'full_attention'
            _, frequencies, amplitude = expected['layers'][name]
            got, got_amplitude = rope_of_layer(config, layer_type, HEAD)
            np.testing.assert_allclose(got, frequencies, rtol=2e-6, err_msg=str(case))
            np.testing.assert_allclose(got_amplitude, amplitude, rtol=1e-6, err_msg=str(case))
        if family == 'deepseek_v3':
            width = config.mla.nope_dim + config.mla.rope_dim
            np.testing.assert_allclose(
                config.attention_scale * width**0.5, expected['scores'], rtol=1e-6
            )
        n_same += 1
    assert n_same > len(indices) / 5


def read(family, **case):
    return read_config(config_of(family, case), 'config.json')[0]


def refusal_of(family, **case):
    with pytest.raises(UserError) as error:
        read(family, **case)
    return str(error.value)


@pytest.mark.parametrize('family', BASES)
def test_what_is_not_computed_is_refused_by_name_wherever_it_stands(family):
    dynamic = scaled('type', 'dynamic')
    parameters = dynamic
    if family in ('olmo3', 'gemma3_text'):
        parameters = {'full_attention': dynamic, 'sliding_attention': {'rope_type': 'default'}}
        dynamic = scaled(
            'rope_type', 'dynamic'
        )  # the older name does not count there, as in transformers
    assert 'dynamic' in refusal_of(family, rope_parameters=parameters)
    assert 'dynamic' in refusal_of(family, rope_parameters=ABSENT, rope_scaling=dynamic)
    if family != 'phi3':
        assert 'partial_rotary_factor=0.5' in refusal_of(family, partial_rotary_factor=0.5)


def test_longrope_is_read_up_to_the_length_of_pretraining():
    longrope = scaled('type', 'longrope')
    config = read('phi3', rope_scaling=longrope, **{LENGTH: 64})
    assert config.block_size == 64  # of 256: beyond it transformers computes all positions again
    assert config.rope_scaling.pair_factors == tuple(longrope['short_factor'])


@pytest.mark.parametrize('part, rotated', [(0.75, 12), (0.5, 8), (1.0, 0)])
def test_phi3_rotates_a_part_of_each_head_wherever_the_key_stands(part, rotated):
    assert read('phi3', partial_rotary_factor=part).rope_width == rotated
    assert (
        read(
            'phi3', rope_parameters={'rope_type': 'default', 'partial_rotary_factor': part}
        ).rope_width
        == rotated
    )


@pytest.mark.parametrize('theta', [0, -1.0, float('nan'), float('inf'), True, '500000', 10**400])
def test_a_base_that_no_rope_has_is_refused(theta):
    assert 'rope_theta' in refusal_of('llama', rope_theta=theta)
    assert 'rope_theta' in refusal_of('gemma3_text', rope_theta=theta)


@pytest.mark.slow
def test_a_phi4_has_the_logits_of_transformers_up_to_the_length_of_pretraining():
    """With a part of each head rotated, by longrope: tests/golden/make_phi4.py."""
    expected = np.load(GOLDEN / 'phi4' / 'expected.npz')
    config, params = load_pretrained(GOLDEN / 'phi4')
    np.testing.assert_allclose(
        apply(config, params, expected['idx']), expected['logits'], atol=1e-4
    )
    tokens = generate(
        params, config, expected['idx'][:, :30], 8, rng=jax.random.key(0), temperature=0
    )
    again = apply(config, params, tokens[:, :-1]).argmax(-1)[:, 29:]
    np.testing.assert_array_equal(again, tokens[:, 30:])  # through the cache
