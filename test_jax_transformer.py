"""What jax_transformer.py promises. `python test_jax_transformer.py` runs this file, `python -m pytest` all tests."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_transformer
from jax_ops import (
    Knobs, Sampling, UserError, cast_matrices, look_up, matmul, matmul_int8, matmul_rows, penalize_repetition, pick_token,
    quantize, quantize_params)
from jax_transformer import (
    GPT, GPTConfig, count_params, create_train_state, decoding_params, estimate_mfu, generate, generate_in_chunks, init_cache)

TINY = GPTConfig(block_size=16, vocab_size=37, n_layer=2, n_head=2, n_embd=16)


@functools.cache
def random_params(config, seed=0):
    """Parameters far from their small initial values, so that every part of the model matters to its output."""
    params = create_train_state(jax.random.key(seed), config, optax.identity()).params
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    return tree.unflatten([x + 0.3 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys)])


@functools.partial(jax.jit, static_argnames=('config', 'deterministic'))
def apply(params, idx, config, **how):
    return GPT(config).apply({'params': params}, idx, **how)


def logits_of(config, idx, **how):
    return apply(random_params(config), jnp.asarray(idx), config, **how)


def tokens(*shape, seed=0, config=TINY):
    return np.random.default_rng(seed).integers(config.vocab_size, size=shape)


# -----------------------------------------------------------------------------
# the model


@pytest.mark.parametrize('shape, total', [((12, 12, 768), 124_439_808), ((24, 16, 1024), 354_823_168),
                                          ((36, 20, 1280), 774_030_080), ((48, 25, 1600), 1_557_611_200)])
def test_gpt2_sizes_have_the_published_number_of_parameters(shape, total):
    n_layer, n_head, n_embd = shape
    config = GPTConfig(vocab_size=50257, n_layer=n_layer, n_head=n_head, n_embd=n_embd)
    params = jax.eval_shape(lambda: create_train_state(jax.random.key(0), config, optax.identity())).params
    assert count_params(params, non_embedding=False) == total
    assert count_params(params) == total - 1024 * n_embd


def test_a_position_depends_on_itself_and_the_past_only():
    config = TINY

    def output(wpe, at):
        params = random_params(config) | {'wpe': wpe}
        return GPT(config).apply({'params': params}, tokens(1, 16))[0, at].sum()

    for at in (0, 7, 15):
        moved = np.abs(jax.grad(output)(random_params(config)['wpe'], at)).sum(-1) > 0
        assert moved.tolist() == [position <= at for position in range(16)]


def test_initial_weights_are_gpt2s():
    config = GPTConfig(block_size=256, vocab_size=512, n_layer=8, n_head=4, n_embd=256)
    params = create_train_state(jax.random.key(0), config, optax.identity()).params
    block = params['h_3']
    for weight, std in ((params['wte'], 0.02), (params['wpe'], 0.02), (block['attn']['c_attn']['kernel'], 0.02),
                        (block['mlp']['c_fc']['kernel'], 0.02), (block['attn']['c_proj']['kernel'], 0.02 / 4),
                        (block['mlp']['c_proj']['kernel'], 0.02 / 4)):
        assert abs(weight.mean()) < std / 50 and weight.std() == pytest.approx(std, rel=0.02)
    assert (block['ln_1']['scale'] == 1).all() and (block['ln_1']['bias'] == 0).all() and (block['mlp']['c_fc']['bias'] == 0).all()
    # the first loss is that of guessing: ln(512)
    idx = tokens(8, 256, config=config)
    loss = optax.softmax_cross_entropy_with_integer_labels(GPT(config).apply({'params': params}, idx[:, :-1]), idx[:, 1:]).mean()
    assert loss == pytest.approx(np.log(512), abs=0.1)


def test_without_bias_there_is_none():
    names = jax.tree_util.tree_leaves_with_path(random_params(GPTConfig(**TINY.__dict__ | {'bias': False})))
    assert not [path for path, _ in names if 'bias' in jax.tree_util.keystr(path)]


def test_head_and_embedding_are_one_parameter_and_its_gradient_is_the_sum_of_both():
    params, idx, config = random_params(TINY), tokens(2, 8), TINY
    loss = lambda params: jnp.sin(GPT(config).apply({'params': params}, idx)).sum()
    grad = jax.grad(loss)(params)['wte']
    step = jax.random.normal(jax.random.key(3), grad.shape) * 1e-3
    difference = loss(params | {'wte': params['wte'] + step}) - loss(params | {'wte': params['wte'] - step})
    assert difference / 2 == pytest.approx(float((grad * step).sum()), rel=2e-2)


@pytest.mark.parametrize('dtype, tolerance', [('bfloat16', 0.2), ('float16', 0.03)])
def test_low_precision_computes_in_it_but_parameters_and_logits_are_float32(dtype, tolerance):
    low = GPTConfig(**TINY.__dict__ | {'dtype': dtype})
    assert all(p.dtype == jnp.float32 for p in jax.tree.leaves(create_train_state(jax.random.key(0), low, optax.identity()).params))
    exact, rounded = logits_of(TINY, tokens(2, 16)), apply(random_params(TINY), tokens(2, 16), low)
    assert rounded.dtype == jnp.float32
    assert 1e-5 < np.abs(exact - rounded).max() < tolerance * np.abs(exact).max()


def test_matmul_has_the_gradients_of_the_plain_product():
    x, kernel = jax.random.normal(jax.random.key(0), (3, 5, 7)), jax.random.normal(jax.random.key(1), (7, 11))
    plain = jax.grad(lambda x, k: jnp.sin(x @ k).sum(), (0, 1))(x, kernel)
    ours = jax.grad(lambda x, k: jnp.sin(matmul(x, k)).sum(), (0, 1))(x, kernel)
    for a, b in zip(plain, ours):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_dropout_of_a_sequence_depends_on_its_row_number_alone():
    config = GPTConfig(**TINY.__dict__ | {'dropout': 0.5})
    idx = tokens(4, 8)
    run = lambda rows: logits_of(config, idx[rows], deterministic=False, row_B=jnp.asarray(rows) + 100, rngs={'dropout': jax.random.key(5)})
    together, alone = run([0, 1, 2, 3]), run([2])
    np.testing.assert_allclose(together[2], alone[0], atol=1e-4)
    other = logits_of(config, idx[[2]], deterministic=False, row_B=jnp.array([7]), rngs={'dropout': jax.random.key(5)})
    assert np.abs(alone - other).max() > 0.1
    np.testing.assert_array_equal(logits_of(config, idx), logits_of(TINY, idx))  # off by default


def test_dropout_zeroes_its_share_and_keeps_the_mean():
    class Bare(jax_transformer.nn.Module):
        @jax_transformer.nn.compact
        def __call__(self, x):
            return jax_transformer.dropout(self, x, 0.2, jnp.arange(len(x)))

    y = Bare().apply({}, jnp.ones((50, 2000)), rngs={'dropout': jax.random.key(0)})
    assert (y == 0).mean() == pytest.approx(0.2, abs=0.01) and y.mean() == pytest.approx(1, abs=0.01)
    assert np.unique(y).tolist() == [0, 1.25]


@pytest.mark.parametrize('bad, message', [(dict(n_head=3), r'n_head=3 does not divide n_embd=16.*\[1, 2, 4, 8, 16\]'),
                                          (dict(dropout=1.0), 'dropout'), (dict(dtype='int8'), 'dtype'),
                                          (dict(activation='relu'), 'activation'), (dict(n_layer=0), 'n_layer')])
def test_a_config_that_makes_no_model_is_refused(bad, message):
    with pytest.raises(UserError, match=message):
        GPTConfig(**TINY.__dict__ | bad)


def test_mfu_is_the_palm_formula():
    config = GPTConfig()  # 6 * 124M + 12 * 12 * 768 * 1024 = 0.857 GFLOPs per token
    assert estimate_mfu(124e6, config, 1e6, 989e12) == pytest.approx((6 * 124e6 + 12 * 12 * 768 * 1024) * 1e6 / 989e12)


# -----------------------------------------------------------------------------
# the cache


@pytest.mark.parametrize('dtype, tolerance', [('float32', 1e-5), ('bfloat16', 0.05), ('float16', 0.01)])
def test_cached_logits_equal_uncached_ones_at_every_position(dtype, tolerance):
    config = GPTConfig(**TINY.__dict__ | {'dtype': dtype})
    idx, params = tokens(3, 16), random_params(TINY)
    full = apply(params, idx, config)
    cache, steps = init_cache(config, 3, 20), []
    for first, end in ((0, 5), (5, 6), (6, 7), (7, 11), (11, 16)):  # prefill, single tokens, several at once
        logits, cache = apply(params, idx[:, first:end], config, cache=cache, position_BxT=jnp.arange(first, end)[None])
        steps.append(logits)
    np.testing.assert_allclose(np.concatenate(steps, 1), full, rtol=0, atol=tolerance * np.abs(full).max())


@pytest.mark.parametrize('dtype, bytes_per_value, tolerance', [
    ('float32', 4, 1e-5), ('bfloat16', 2, 0.02), ('float16', 2, 0.002), ('int8', 1, 0.03), ('float8', 1, 0.15)])
def test_a_cache_of_any_dtype_gives_the_logits_within_its_precision_and_takes_its_bytes(dtype, bytes_per_value, tolerance):
    idx, params = tokens(2, 16), random_params(TINY)
    cache = init_cache(TINY, 2, 16, dtype)
    n_values = 2 * TINY.n_layer * 2 * 16 * TINY.n_embd
    scales = 0 if bytes_per_value > 1 else 4 * n_values // (TINY.n_embd // TINY.n_head)
    assert sum(x.nbytes for x in jax.tree.leaves(cache)) == n_values * bytes_per_value + scales
    steps = []
    for first, end in ((0, 7), (7, 8), (8, 16)):
        logits, cache = apply(params, idx[:, first:end], TINY, cache=cache, position_BxT=jnp.arange(first, end)[None])
        steps.append(logits)
    full = apply(params, idx, TINY)
    error = np.abs(np.concatenate(steps, 1) - full).max() / np.abs(full).max()
    assert tolerance / 1e4 < error + (dtype == 'float32') and error < tolerance


def test_generation_takes_the_cache_dtype():
    with pytest.raises(UserError, match='cache_dtype'):
        generated(tokens(1, 4), 3, cache_dtype='int4')
    assert generated(tokens(2, 4), 20, cache_dtype='int8').shape == (2, 24)


# -----------------------------------------------------------------------------
# int8 weights


def test_quantization_rounds_to_the_nearest_of_255_steps_of_each_row():
    x = jnp.array([[0.0, 0.5, -1.27, 0.004], [0.0, 0.0, 0.0, 0.0], [1e4, -254.0, 1.0, 0.0]])
    values, scale = quantize(x, jnp.int8)
    assert values.tolist() == [[0, 50, -127, 0], [0, 0, 0, 0], [127, -3, 0, 0]]
    np.testing.assert_allclose(np.abs(values * scale[:, None] - x).max(-1) <= scale / 2 * 1.0001, True)


@pytest.mark.parametrize('rows', [1, 3, 4, 5, 16, 17, 40])
@pytest.mark.parametrize('width', [24, 256, 1536])  # what a single row is multiplied by: as four rows, 32 sums of 8 terms, 64 of 24
def test_int8_products_equal_those_of_what_was_quantized(rows, width):
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((rows, width), (40, width)))
    weights, scale = quantize(w, jnp.int8)
    inputs, x_scale = quantize(x, jnp.int8)
    expected = np.float64(inputs) @ np.float64(weights).T * np.float64(x_scale)[:, None] * np.float64(scale)
    product = jax.jit(matmul_int8)
    got = product(x, weights, scale)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)
    np.testing.assert_array_equal(got[:1], product(x[:1], weights, scale))  # alone as among others
    np.testing.assert_allclose(expected, x @ w.T, rtol=0, atol=0.03 * np.abs(x @ w.T).max())
    assert not product(0 * x, weights, scale).any()


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_int8_weights_take_a_quarter_and_give_nearly_the_same_logits(dtype):
    config, params = GPTConfig(**TINY.__dict__ | {'dtype': dtype}), random_params(TINY)
    int8 = cast_matrices(quantize_params(params), dtype)
    matrices = [p for p in jax.tree.leaves(int8) if p.dtype == jnp.int8]
    assert sum(p.size for p in matrices) == sum(p.size for p in jax.tree.leaves(params) if p.ndim == 2) - params['wpe'].size
    full = apply(params, tokens(2, 16), TINY)
    near = apply(int8, tokens(2, 16), config)
    assert 1e-4 < np.abs(full - near).max() / np.abs(full).max() < 0.05
    assert generate(int8, config, tokens(2, 4), 30, rng=jax.random.key(0), cache_dtype='float8').shape == (2, 34)


@pytest.mark.parametrize('dtype, tolerance', [('float32', 2e-6), ('bfloat16', 0.01)])
def test_products_with_weights_as_rows_are_products_whatever_the_number_of_rows(dtype, tolerance):
    w = jax.random.normal(jax.random.key(1), (1000, 96))
    for n_rows in (1, 2, 4, 5, 16, 64, 65):
        x = jax.random.normal(jax.random.key(0), (n_rows, 96))
        got = jax.jit(matmul_rows)(x.astype(dtype), w)
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, np.float64(x) @ np.float64(w).T, rtol=0, atol=tolerance * np.abs(got).max())


def test_decoding_in_float32_on_a_cpu_has_kernels_as_rows_and_the_same_logits():
    params = dict(random_params(TINY))
    rows = decoding_params(params, 'float32')
    assert params == {}  # the memory of one block is free before the next one is converted
    kernel = random_params(TINY)['h_0']['mlp']['c_fc']['kernel']
    np.testing.assert_array_equal(rows['h_0']['mlp']['c_fc']['kernel_rows'], kernel.T)
    assert rows['h_0']['mlp']['c_fc'].keys() == {'kernel_rows', 'bias'}
    np.testing.assert_allclose(apply(rows, tokens(2, 16), TINY), logits_of(TINY, tokens(2, 16)), rtol=0, atol=1e-5)
    assert 'kernel' in decoding_params(dict(random_params(TINY)), 'bfloat16')['h_0']['mlp']['c_fc']


def test_gpt2_in_int8_takes_at_most_170_mb():
    shapes = jax.eval_shape(lambda: quantize_params(create_train_state(jax.random.key(0), GPTConfig(vocab_size=50257), optax.identity()).params))
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes)) < 130e6


# -----------------------------------------------------------------------------
# speculative decoding


REPETITIVE = np.array([[5, 6, 7, 8, 9, 5, 6, 7], [1, 2, 1, 2, 1, 2, 1, 0]])


@pytest.mark.parametrize('draft, how', [
    (None, dict(temperature=0)), (None, dict(temperature=0, repetition_penalty=1.5)),
    (None, dict(temperature=0.3, stop_tokens=[3, 4])), ('itself', dict(temperature=0)),
    ('itself', dict(temperature=0.7, top_k=5, top_p=0.9)), ('another', dict(temperature=1.0)),
    ('another', dict(temperature=0.3, stop_tokens=[3, 4]))])
def test_speculative_decoding_gives_the_same_tokens(draft, how):
    config = GPTConfig(**TINY.__dict__ | {'block_size': 48})
    params = random_params(config)
    small = GPTConfig(**config.__dict__ | {'n_layer': 1})
    how |= dict(rng=jax.random.key(0), prompt_lengths_B=[8, 7])
    plain = generate(params, config, REPETITIVE, 50, **how)  # past block_size, too
    drafts = {None: None, 'itself': (params, config), 'another': (random_params(small), small)}[draft]
    *_, fast = generate_in_chunks(params, config, REPETITIVE, 50, n_draft=3, draft=drafts, chunk=9, **how)
    np.testing.assert_array_equal(fast.tokens, plain)
    if draft == 'itself':  # then all are right
        assert fast.accepted == fast.drafted > 0


def test_look_up_continues_the_latest_longest_match():
    find = lambda text, n: ''.join(map(chr, look_up(jnp.array([ord(c) for c in text + '....']), len(text), n)))
    assert find('abcX abcY abc', 1) == 'Y'  # the latest of equals
    assert find('abcX bcY abc', 1) == 'X'  # the longer one before the later one
    assert find('abcdefgh abc', 3) == 'def'
    assert find('xyxyxy', 5) == 'xyxyx' and find('aaa', 3) == 'aaa'  # goes round what repeats
    assert len(find('a', 2)) == 2 and len(find('ab', 2)) == 2  # nothing to find, no error


def test_right_guesses_save_steps(monkeypatch):
    config = GPTConfig(**TINY.__dict__ | {'block_size': 64})
    params = random_params(config)
    *_, fast = generate_in_chunks(params, config, tokens(1, 4), 41, rng=jax.random.key(0), temperature=0, n_draft=4, draft=(params, config))
    assert fast.accepted == 32 and fast.drafted == 32  # 40 tokens after the first, 5 a step


@pytest.mark.parametrize('how, message', [
    (dict(n_draft=-1), 'n_draft'), (dict(n_draft=17), 'n_draft'),
    (dict(n_draft=2, draft=({}, GPTConfig(**TINY.__dict__ | {'vocab_size': 7}))), 'vocabulary of 7'),
    (dict(n_draft=2, draft=({}, GPTConfig(**TINY.__dict__ | {'block_size': 4}))), 'knows 4 positions')])
def test_drafts_that_cannot_be_are_refused(how, message):
    with pytest.raises(UserError, match=message):
        generated(tokens(2, 4), 3, **how)


# -----------------------------------------------------------------------------
# generate


def uncached_greedy(config, prompt, n):
    """nanoGPT's loop: the last block_size tokens anew for each token."""
    row = list(prompt)
    for _ in range(n):
        last = row[-config.block_size:]
        idx = np.pad(last, (0, config.block_size - len(last)))[None]  # padding on the right changes nothing; one compilation
        row.append(int(logits_of(config, idx)[0, len(last) - 1].argmax()))
    return row


def generated(idx, n, config=TINY, seed=0, **how):
    return np.asarray(generate(random_params(TINY), config, idx, n, rng=jax.random.key(seed), **how))


@pytest.mark.parametrize('length', [1, 5, 16, 23])
def test_greedy_equals_the_uncached_loop_within_and_past_block_size(length):
    prompt = tokens(length)
    assert generated(prompt[None], 25, temperature=0).tolist() == [uncached_greedy(TINY, prompt, 25)]


def test_each_of_different_prompts_gives_what_it_gives_alone():
    lengths = [3, 1, 9, 16]
    idx = tokens(4, 16)
    together = generated(idx, 20, temperature=0, prompt_lengths_B=lengths)
    for row, prompt, length in zip(together, idx, lengths):
        assert row.tolist() == uncached_greedy(TINY, prompt[:length], 20) + [0] * (16 - length)


def test_padding_much_wider_than_the_prompts_changes_nothing():
    config = GPTConfig(**TINY.__dict__ | {'block_size': 128})
    idx = tokens(2, 64)
    run = lambda idx, **how: generate(random_params(config), config, idx, 120, rng=jax.random.key(0), temperature=0, **how)
    np.testing.assert_array_equal(run(idx, prompt_lengths_B=[20, 12])[0, :140], run(idx[:1, :20])[0])


def test_a_sample_depends_on_seed_and_row_and_on_nothing_else_in_the_batch():
    idx = np.tile(tokens(4), (3, 1))
    three, one = generated(idx, 30), generated(idx[:1], 30)
    np.testing.assert_array_equal(three[0], one[0])
    np.testing.assert_array_equal(three, generated(idx, 30))
    assert len({tuple(row) for row in three.tolist()}) == 3
    assert not np.array_equal(three, generated(idx, 30, seed=1))
    np.testing.assert_array_equal(three[:, :14], generated(idx, 10))  # asking for more changes nothing before


def picks(logits, n=4000, greedy=False, top_k=None, top_p=None, min_p=None, temperature=1.0, n_vocab=None):
    sampling = Sampling(greedy, top_k, top_p is not None, min_p is not None, False, n_vocab or len(logits), ())
    rows = jnp.tile(jnp.asarray(logits, jnp.float32), (n, 1))
    ids = pick_token(rows, jax.random.split(jax.random.key(0), n), sampling, Knobs(temperature, top_p, min_p, None))
    return np.bincount(ids, minlength=len(logits)) / n


def test_tokens_are_drawn_with_their_probabilities():
    p = np.array([0.1, 0.4, 0.2, 0.3])
    np.testing.assert_allclose(picks(np.log(p)), p, atol=0.03)
    np.testing.assert_allclose(picks(np.log(p), temperature=0.5), p**2 / (p**2).sum(), atol=0.03)
    np.testing.assert_allclose(picks(np.log(p), top_k=2), [0, 4 / 7, 0, 3 / 7], atol=0.03)
    np.testing.assert_allclose(picks(np.log(p), top_k=100), p, atol=0.03)  # clamped to the vocabulary
    np.testing.assert_allclose(picks(np.log(p), top_p=0.65), [0, 4 / 7, 0, 3 / 7], atol=0.03)
    np.testing.assert_allclose(picks(np.log(p), top_p=0.75), [0, 4 / 9, 2 / 9, 3 / 9], atol=0.03)
    np.testing.assert_allclose(picks(np.log(p), top_p=0.01), [0, 1, 0, 0])
    np.testing.assert_allclose(picks(np.log(p), min_p=0.7), [0, 4 / 7, 0, 3 / 7], atol=0.03)
    np.testing.assert_allclose(picks(np.log(p), min_p=1.0), [0, 1, 0, 0])
    np.testing.assert_allclose(picks(np.log(p), greedy=True), [0, 1, 0, 0])
    np.testing.assert_allclose(picks(np.log(p), n_vocab=1), [1, 0, 0, 0])


def test_top_k_1_and_tiny_top_p_are_greedy():
    greedy = generated(tokens(2, 4), 20, temperature=0)
    np.testing.assert_array_equal(generated(tokens(2, 4), 20, top_k=1), greedy)
    np.testing.assert_array_equal(generated(tokens(2, 4), 20, top_p=1e-6), greedy)


def test_the_repetition_penalty_is_ctrls_and_counts_what_the_row_holds_only():
    logits = jnp.array([[2.0, -2.0, 2.0, -2.0]])
    penalized = penalize_repetition(logits, jnp.array([[0, 1, 0, 2, 3]]), jnp.array([3]), 4.0)
    assert penalized.tolist() == [[0.5, -8.0, 2.0, -2.0]]
    prompt = np.array([[1, 2, 3, 4]])
    free, punished = (generated(prompt, 20, temperature=0, repetition_penalty=penalty)[0] for penalty in (None, 1e6))
    assert len(set(punished.tolist())) == 24 > len(set(free.tolist()))


@pytest.mark.parametrize('chunk', [1, 7, 100])
def test_chunks_add_up_to_what_one_call_gives(chunk):
    idx, lengths = tokens(2, 9), [9, 4]
    whole = generated(idx, 20, prompt_lengths_B=lengths)
    stream = list(generate_in_chunks(random_params(TINY), TINY, idx, 20, rng=jax.random.key(0), prompt_lengths_B=lengths, chunk=chunk))
    np.testing.assert_array_equal(stream[-1][0], whole)
    assert stream[-1][1].tolist() == [29, 24] and [s[1].tolist()[0] - 9 for s in stream][:2] == [1, min(8, 1 + chunk)]
    for so_far, length, *_ in stream:
        for row, n, full in zip(np.asarray(so_far), length, whole):
            np.testing.assert_array_equal(row[:n], full[:n])


def test_a_row_ends_with_its_first_stop_token():
    free = generated(tokens(3, 4), 24)
    stop = int(free[0, 10])
    stopped = generated(tokens(3, 4), 24, stop_tokens=[stop])
    for row, full in zip(stopped, free):
        ends = [i for i in range(4, 28) if full[i] == stop]
        end = ends[0] + 1 if ends else 28
        np.testing.assert_array_equal(row[:end], full[:end])
        assert (row[end:] == 0).all()


def test_padding_ids_of_the_vocabulary_are_never_generated():
    assert generated(tokens(4, 4) % 20, 40, n_vocab=20, temperature=5.0).max() < 20


def test_no_new_tokens_returns_the_prompts():
    np.testing.assert_array_equal(generated(tokens(2, 5), 0), tokens(2, 5))


def test_prompts_of_one_bucket_share_one_compilation():
    config = GPTConfig(**TINY.__dict__ | {'block_size': 64})
    params = create_train_state(jax.random.key(0), config, optax.identity()).params
    run = lambda length: generate(params, config, tokens(2, length), 8, rng=jax.random.key(0))
    run(17)
    before = jax_transformer.prefill._cache_size(), jax_transformer.decode._cache_size()
    for length in (18, 25, 32):
        run(length)
    assert (jax_transformer.prefill._cache_size(), jax_transformer.decode._cache_size()) == before
    run(33)
    assert jax_transformer.prefill._cache_size() == before[0] + 1


@pytest.mark.parametrize('how, message', [
    (dict(temperature=-1), 'temperature'), (dict(temperature=float('nan')), 'temperature'), (dict(top_k=0), 'top_k'),
    (dict(top_p=0.0), 'top_p'), (dict(top_p=1.1), 'top_p'), (dict(min_p=0.0), 'min_p'), (dict(repetition_penalty=0.0), 'repetition_penalty'),
    (dict(temperature=float('inf')), 'temperature'), (dict(n_vocab=0), 'n_vocab'),
    (dict(prompt_lengths_B=[0, 3]), 'between 1 and 4'), (dict(prompt_lengths_B=[1, 5]), 'between 1 and 4'), (dict(prompt_lengths_B=[1]), '2 lengths'), (dict(prompt_lengths_B=[1.5, 2.0]), '2 lengths'),
    (dict(temperature=1e-40), 'temperature')])
def test_controls_that_make_no_sense_are_refused(how, message):
    with pytest.raises(UserError, match=message):
        generated(tokens(2, 4), 3, **how)


def test_prompts_that_make_no_sense_are_refused():
    with pytest.raises(UserError, match='at least one token'):
        generated(np.zeros((1, 0)), 3)
    with pytest.raises(UserError, match='token id 37'):
        generated([[3, 37]], 3)
    with pytest.raises(UserError, match='max_new_tokens'):
        generated([[3]], -1)


if __name__ == '__main__':
    raise SystemExit(pytest.main([__file__]))
