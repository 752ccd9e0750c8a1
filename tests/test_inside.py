"""Logits, hidden states and attention of a text, beside those of transformers (tests/golden/make_inside.py)."""

import jax
import numpy as np
import pytest

from jax_devices.layout import setup_distributed_training
from jax_flags import UserError
from jax_ops.decode_weights import convert_params_for_decoding
from jax_pretrained import load_pretrained
from jax_run.inside import look_inside
from jax_text import TextModel, load
from jax_transformer import GPT
from tests.common import FAMILIES, GOLDEN, TINY, random_params, random_tokens

EXPECTED = np.load(GOLDEN / 'inside.npz')
FOLDERS = {'gpt2': GOLDEN / 'hf'} | {
    name: FAMILIES / name for name in ('llama', 'qwen3', 'gpt_oss', 'deepseek_v3')}


@pytest.mark.parametrize('name', FOLDERS)
def test_what_a_model_computes_on_the_way_is_what_transformers_computes(name):
    config, params = load_pretrained(FOLDERS[name])
    params = convert_params_for_decoding(params, 'float32')
    model = TextModel(params, config, None, setup_distributed_training(jax.devices()[:1]))
    for part in ('logits', 'hidden_states', 'attention'):
        found, expected = look_inside(model, EXPECTED['ids'], part), EXPECTED[f'{name}/{part}']
        assert found.dtype == np.float32 and found.shape == expected.shape
        np.testing.assert_allclose(found, expected, atol=1e-4)
    sums = found.sum(-1)
    assert (sums < 0.999).all() if name == 'gpt_oss' else np.allclose(sums, 1)  # a sink takes a part


def test_attention_of_a_text_is_causal_and_the_parts_fit_together(finished):
    model, text = load(finished[0], device='cpu:0'), 'the quick'
    attention, states, logits = model.attention(text), model.hidden_states(text), model.logits(text)
    T, config = len(text), model.config
    assert attention.shape == (config.n_layer, config.n_head, T, T)
    assert states.shape == (config.n_layer + 1, T, config.n_embd)
    assert not np.triu(attention, 1).any()
    np.testing.assert_allclose(attention.sum(-1), 1, rtol=1e-5)
    np.testing.assert_allclose(states[-1] @ np.asarray(model.params['wte']).T, logits[:, :config.vocab_size], atol=1e-4)
    ids = model.encode(text)
    of_text = jax.nn.log_softmax(logits)[np.arange(T - 1), ids[1:]]
    np.testing.assert_allclose(of_text, model.logprobs([text])[0][1], atol=1e-5)


def test_it_is_refused_on_several_devices_and_beyond_the_context(finished):
    with pytest.raises(UserError, match='attention is for a model on one device'):
        load(finished[0], device='cpu', tensor=2).attention('the')
    with pytest.raises(UserError, match='the text has 17 tokens; it may have 1 to 16, the context'):
        load(finished[0], device='cpu:0').logits('the quick brown f')


def test_a_model_that_nobody_looks_into_computes_no_probabilities_twice():
    def count_softmaxes(**options):
        lowered = jax.jit(lambda params, idx: GPT(TINY).apply({'params': params}, idx, **options)).lower(
            random_params(TINY), random_tokens(1, 8))
        return lowered.as_text().count('stablehlo.exponential')

    assert count_softmaxes(mutable=['intermediates']) == 2 * count_softmaxes() == 2 * TINY.n_layer
