"""RoPE as transformers reads it: refused where GPT does not compute it, wherever the keys stand."""
import functools
import json

import jax
import numpy as np
import pytest

from jax_flags import UserError
from jax_generate import generate
from jax_hub.families import read_config
from jax_pretrained import load_pretrained, read_config_json_of
from jax_run.model import with_block_size
from jax_transformer import GPTConfig, apply_positions, rope_of_layer
from tests.common import GOLDEN, apply, assert_refused, train, write_dataset

SIZES = dict(
    vocab_size=44, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
    intermediate_size=48, max_position_embeddings=256)
BASES = {  # by model_type
    'llama': {}, 'phi3': {}, 'olmo3': {}, 'gpt_oss': dict(num_local_experts=4, num_experts_per_tok=2, head_dim=16),
    'gemma3_text': dict(head_dim=16)}


def read(family, **keys):
    return read_config(dict(SIZES, **BASES[family], model_type=family, **keys), 'config.json')[0]


def refusal_of(family, **keys):
    with pytest.raises(UserError) as error:
        read(family, **keys)
    return str(error.value)


@pytest.mark.parametrize('family', BASES)
def test_what_is_not_computed_is_refused_by_name_wherever_it_stands(family):
    dynamic = parameters = {'rope_type': 'dynamic', 'factor': 4.0}
    if family in ('olmo3', 'gemma3_text'):
        parameters = {'full_attention': dynamic, 'sliding_attention': {'rope_type': 'default'}}
    assert 'dynamic' in refusal_of(family, rope_parameters=parameters)
    assert 'dynamic' in refusal_of(family, rope_scaling=dynamic)
    if family != 'phi3':
        assert 'partial_rotary_factor=0.5' in refusal_of(family, partial_rotary_factor=0.5)


@pytest.mark.parametrize('keys', [
    dict(rope_theta=5e5, rope_scaling=dict(type='yarn', factor=4.0), original_max_position_embeddings=64),
    dict(rope_parameters=dict(
        rope_type='yarn', factor=4.0, rope_theta=5e5, original_max_position_embeddings=64))])
def test_the_older_and_the_newer_keys_mean_the_same(keys):
    config = read('llama', **keys)
    assert config.rope_theta == 5e5
    assert (config.rope_scaling.kind, config.rope_scaling.original_length) == ('yarn', 64)
    assert config.rope_scaling.amplitude == pytest.approx(0.1 * np.log(4) + 1)


def test_longrope_is_read_up_to_the_length_of_pretraining():
    factors = [1.0 + i / 4 for i in range(8)]
    longrope = dict(type='longrope', short_factor=factors, long_factor=[3 * x for x in factors])
    config = read('phi3', rope_scaling=longrope, original_max_position_embeddings=64)
    assert config.block_size == 64  # of 256: beyond it transformers computes all positions again
    assert config.rope_scaling.pair_factors == tuple(factors)
    assert 'must have length 8' in refusal_of('phi3', rope_scaling=dict(longrope, short_factor=factors[:3]))


LINEAR = dict(rope_type='linear', factor=4.0, rope_theta=5e5)
YARN = dict(rope_type='yarn', factor=4.0, rope_theta=5e5)


@pytest.mark.parametrize('family, keys', [
    ('llama', dict(rope_theta=5e5, rope_scaling=dict(type='yarn', factor=4.0))),
    ('llama', dict(rope_theta=5e5, rope_scaling=dict(type='yarn', factor=4.0), original_max_position_embeddings=64)),
    ('llama', dict(rope_parameters=YARN)),
    ('llama', dict(rope_theta=5e5, rope_scaling=dict(type='linear', factor=4.0))),
    ('olmo3', dict(rope_parameters={'full_attention': YARN, 'sliding_attention': {'rope_type': 'default'}})),
    ('gemma3_text', dict(rope_parameters={'full_attention': LINEAR, 'sliding_attention': {'rope_type': 'default'}}))])
def test_a_model_with_scaled_rope_that_has_learned_longer_sequences_is_saved_with_its_scaling(family, keys, tmp_path):
    path = tmp_path / 'config.json'
    path.write_text(json.dumps(dict(SIZES, **BASES[family], model_type=family, **keys)))
    config = read_config(json.loads(path.read_text()), path)[0]
    longer = with_block_size(config, 1024, 'it')
    saved = read_config_json_of(longer, path)
    again = read_config(saved, 'saved')[0]
    assert saved['max_position_embeddings'] == again.block_size == 1024
    for layer_type in ('full', 'window'):
        ropes = [rope_of_layer(each, layer_type, config.head_width) for each in (config, again)]
        (before, amplitude), (after, amplitude_after) = ropes
        np.testing.assert_array_equal(after, before)
        assert amplitude_after == amplitude


def test_a_model_with_longrope_learns_no_longer_sequences():
    factors = [1.0] * 8
    config = read('phi3', rope_scaling=dict(type='longrope', short_factor=factors, long_factor=factors),
                  original_max_position_embeddings=64)
    assert with_block_size(config, 64, 'it') is config
    with pytest.raises(UserError, match='block_size=65, but it was trained with .* 64 tokens, and LongRoPE'):
        with_block_size(config, 65, 'it')


@pytest.mark.parametrize('part, rotated', [(0.75, 12), (0.5, 8), (1.0, 0)])
def test_phi3_rotates_a_part_of_each_head_wherever_the_key_stands(part, rotated):
    assert read('phi3', partial_rotary_factor=part).rope_width == rotated
    parameters = {'rope_type': 'default', 'partial_rotary_factor': part}
    assert read('phi3', rope_parameters=parameters).rope_width == rotated


def test_a_family_that_is_no_text_is_refused():
    with pytest.raises(UserError, match=r"model_type \['llama'\] is not supported"):
        read_config(dict(SIZES, model_type=['llama']), 'config.json')


@pytest.mark.parametrize('theta', [0, -1.0, float('nan'), float('inf'), True, '500000', 10**400])
def test_a_base_that_no_rope_has_is_refused(theta):
    assert 'rope_theta' in refusal_of('llama', rope_theta=theta)
    assert 'rope_theta' in refusal_of('gemma3_text', rope_theta=theta)


@pytest.mark.slow
def test_a_phi4_has_the_logits_of_transformers_up_to_the_length_of_pretraining():
    """With a part of each head rotated, by longrope: tests/golden/make_phi4.py."""
    expected = np.load(GOLDEN / 'phi4' / 'expected.npz')
    config, params = load_pretrained(GOLDEN / 'phi4')
    np.testing.assert_allclose(apply(config, params, expected['idx']), expected['logits'], atol=1e-4)
    tokens = generate(params, config, expected['idx'][:, :30], 8, rng=jax.random.key(0), temperature=0)
    again = apply(config, params, tokens[:, :-1]).argmax(-1)[:, 29:]
    np.testing.assert_array_equal(again, tokens[:, 30:])  # through the cache


def test_a_layer_computes_the_cosines_of_queries_and_keys_once():
    config = GPTConfig(position='rope', n_head=4, n_kv_head=2, n_embd=32)
    q, k = np.zeros((1, 8, 4, 8), np.float32), np.zeros((1, 8, 2, 8), np.float32)
    rotate = jax.jit(functools.partial(apply_positions, config, 'full'))
    program = rotate.lower(q, k, np.arange(8)[None]).compile().as_text()
    assert program.count(' cosine(') == 1


def test_a_run_from_a_model_with_longrope_is_refused_longer_sequences_at_the_start(tmp_path):
    n = json.loads((GOLDEN / 'phi4' / 'config.json').read_text())['vocab_size']
    write_dataset(tmp_path / 'data', [1] * 600, [1] * 600, vocab_size=n)
    result = train(tmp_path / 'out', f'--init_from={GOLDEN / "phi4"}', f'--dataset={tmp_path / "data"}',
                   '--block_size=128', '--max_iters=1', '--device=cpu:0')
    assert_refused(result, 'LongRoPE has other factors for longer ones')
    assert not (tmp_path / 'out').exists()
