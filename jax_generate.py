"""How the model speaks: cached generation with prefill, decode, sampling, speculative decoding and streaming.

`generate` is all that most users need; `generate_stream` yields while the texts grow. The KV cache's slot of a token is
its position (see jax_transformer.py), so prompts of different lengths and rejected drafts need no bookkeeping.

Letters of the shapes are jax_transformer.py's; in addition N is the width of the token buffer, J the number of drafts.
"""
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jax_ops import Int8, Transposed, UserError, quantize, shard
from jax_transformer import CACHE_DTYPES, GPT, PAD, attention_span

NGRAM = 3  # longest sequence of last tokens that prompt lookup searches for
MAX_DRAFT = 16


# -----------------------------------------------------------------------------
# weights and cache

def convert_params_for_decoding(params, dtype, quantize=''):
    """The parameters as decoding reads them: matrices in `dtype`, or Int8 if quantize is 'int8'. On one CPU device
    float32 kernels become Transposed.

    Removes each block from the dict `params` as it is converted, so that memory need not hold the model twice. Raises
    UserError for an unknown quantize."""
    if quantize not in ('', 'int8'):
        raise UserError(f"quantize must be int8 or '' (off), not {quantize!r}")
    converted = {}
    for name in list(params):
        part = {name: params.pop(name)}
        devices = jnp.asarray(jax.tree.leaves(part)[0]).devices()
        if quantize:
            part = quantize_params(part)
        part = cast_matrices(part, dtype)
        if dtype == 'float32' and [device.platform for device in devices] == ['cpu']:
            part = transpose_kernels(part)
        converted |= jax.block_until_ready(part)  # so that the old buffers are freed before the next conversion
    return converted


def quantize_params(params):
    """The parameters with Int8 matrices (kernel, wte, lm_head), one scale per output: a quarter of float32's bytes. The
    router stays in float: it is tiny, and routing is sensitive."""
    quantized = {}
    for name, p in params.items():
        if isinstance(p, dict):
            quantized[name] = p if name == 'router' else quantize_params(p)
        elif name in ('kernel', 'wte', 'lm_head'):
            quantized[name] = quantize_matrix(p, transpose=name == 'kernel')
        else:
            quantized[name] = p
    return quantized


@functools.partial(jax.jit, static_argnames='transpose')  # one pass: no temporaries as large as the matrix
def quantize_matrix(p, transpose):
    return Int8(*quantize(p.swapaxes(-1, -2) if transpose else p, jnp.int8))


def cast_matrices(params, dtype):
    """The parameters with matrices in the compute dtype, cast once instead of in every step."""
    def cast(p):
        return p.astype(dtype) if not isinstance(p, Int8) and p.ndim >= 2 else p

    return jax.tree.map(cast, params, is_leaf=lambda p: isinstance(p, Int8))


def transpose_kernels(params):
    """The parameters with every kernel [I, O] as Transposed; the router and experts stay as they are."""
    transposed = {}
    for name, p in params.items():
        if isinstance(p, dict):
            transposed[name] = p if name == 'router' else transpose_kernels(p)
        elif name == 'kernel' and isinstance(p, jax.Array) and p.ndim == 2:
            transposed[name] = Transposed(p.T)
        else:
            transposed[name] = p
    return transposed


def bytes_read_per_step(params):
    """Bytes of weights read per decode step: everything except embedding lookups. Overcounts inactive experts."""
    tables = ('wpe', 'wte') if 'lm_head' in params else ('wpe',)
    return sum(x.nbytes for name, part in params.items() if name not in tables for x in jax.tree.leaves(part))


def cache_entry_shapes(config):
    """{name: (heads, width)} of what a layer's KV cache holds per token."""
    if config.mla:
        return {'latent': (1, config.mla.kv_rank), 'rope': (1, config.mla.rope_dim)}
    return {name: (config.kv_heads, config.head_width) for name in ('k', 'v')}


def cache_bytes(config, n_positions, dtype='auto'):
    """Bytes of the KV cache for one sequence of n_positions."""
    itemsize = CACHE_DTYPES[config.dtype if dtype == 'auto' else dtype].dtype.itemsize
    scale_bytes = 4 if itemsize == 1 else 0
    per_token = sum(heads * (width * itemsize + scale_bytes) for heads, width in cache_entry_shapes(config).values())
    layer_types = [config.layer(i)[0] for i in range(config.n_layer)]
    return per_token * sum(min(n_positions, attention_span(config, layer_type)) for layer_type in layer_types)


def init_cache(config, batch_size, n_slots, dtype='auto', n_draft=0):
    """An empty KV cache, {layer: {name: [B, G, S, K]}}: the token at position p of its sequence has slot p.

    Layers with a limited attention span have fewer slots, a ring (see update_ring_cache); they cannot take padding that
    is not marked as PAD. dtype: one of CACHE_DTYPES, or 'auto' for the config's; int8 and float8 have a scale per
    vector. n_draft: tokens per step that may be rejected and fed again. Heads come before slots, as attention's matmuls
    read them: with slots first XLA:CPU transposed the cache in every step (31 ms instead of 8 ms,
    docs/performance.md#kv-cache)."""
    dtype = CACHE_DTYPES[config.dtype if dtype == 'auto' else dtype]

    def init_layer(layer_type):
        n = n_slots
        if layer_type in ('window', 'chunk'):
            n = min(attention_span(config, layer_type), n_slots) + n_draft
        cache = {}
        for name, (heads, width) in cache_entry_shapes(config).items():
            cache[name] = jnp.zeros((batch_size, heads, n, width), dtype)
            if dtype.dtype.itemsize == 1:
                cache[f'{name}_scale'] = jnp.zeros((batch_size, heads, n), jnp.float32)
        heads_axis = None if config.mla else 'tensor'  # on a mesh a device keeps its own heads; latents are replicated
        return {name: shard(x, None, heads_axis, *[None] * (x.ndim - 2)) for name, x in cache.items()}

    return {f'h_{i}': init_layer(config.layer(i)[0]) for i in range(config.n_layer)}


# -----------------------------------------------------------------------------
# sampling

class SamplingConfig(NamedTuple):
    """How tokens are sampled; static: a change recompiles. The numbers in SamplingParams do not."""
    greedy: bool
    top_k: int | None
    top_p: bool
    min_p: bool
    penalize: bool
    n_vocab: int  # only ids below it are sampled
    stop_tokens: tuple


class SamplingParams(NamedTuple):
    temperature: float
    top_p: float
    min_p: float
    repetition_penalty: float


def sample_token(logits_BxV, key_B, sampling, sampling_params):
    """One token id per row of float32 logits, [B]."""
    logits_BxV = shard(logits_BxV, None, None)[:, :sampling.n_vocab]  # all-gathered over the vocabulary
    if sampling.greedy:  # argmax; on XLA:CPU two plain reductions are faster
        is_max_BxV = logits_BxV == logits_BxV.max(-1, keepdims=True)
        return jnp.where(is_max_BxV, jnp.arange(sampling.n_vocab), sampling.n_vocab - 1).min(-1)
    logits_BxV /= sampling_params.temperature
    if sampling.top_k is not None:
        kth_Bx1 = jax.lax.top_k(logits_BxV, min(sampling.top_k, sampling.n_vocab))[0][:, -1:]
        logits_BxV = jnp.where(logits_BxV < kth_Bx1, -jnp.inf, logits_BxV)
    if sampling.top_p:  # keep the likeliest tokens until their probabilities reach top_p (arXiv:1904.09751)
        sorted_BxV = jnp.sort(logits_BxV, axis=-1, descending=True)
        probs_BxV = jax.nn.softmax(sorted_BxV)
        before_BxV = jnp.cumsum(probs_BxV, axis=-1) - probs_BxV  # 0 for the first, which is therefore always kept
        least_Bx1 = jnp.where(before_BxV < sampling_params.top_p, sorted_BxV, jnp.inf).min(-1, keepdims=True)
        logits_BxV = jnp.where(logits_BxV < least_Bx1, -jnp.inf, logits_BxV)
    if sampling.min_p:  # keep tokens of at least min_p times the likeliest one's probability (arXiv:2407.01082)
        least_Bx1 = logits_BxV.max(-1, keepdims=True) + jnp.log(sampling_params.min_p)
        logits_BxV = jnp.where(logits_BxV < least_Bx1, -jnp.inf, logits_BxV)
    return jax.vmap(jax.random.categorical)(key_B, logits_BxV)


def penalize_repetition(logits_BxV, tokens_BxN, length_B, penalty):
    """Divides positive logits of tokens that the row already has by `penalty`, multiplies negative ones (CTRL,
    arXiv:1909.05858)."""
    def tokens_present(logits_V, tokens_N, is_filled_N):
        return jnp.zeros(logits_V.shape, bool).at[tokens_N].max(is_filled_N)

    is_filled_BxN = jnp.arange(tokens_BxN.shape[1]) < length_B[:, None]
    present_BxV = jax.vmap(tokens_present)(logits_BxV, tokens_BxN, is_filled_BxN)
    penalized_BxV = jnp.where(logits_BxV > 0, logits_BxV / penalty, logits_BxV * penalty)
    return jnp.where(present_BxV, penalized_BxV, logits_BxV)


# -----------------------------------------------------------------------------
# prefill and decode

class DecodeState(struct.PyTreeNode):
    """State of a generation: row b of tokens_BxN holds length_B[b] tokens, of which n_generated_B[b] were generated."""
    tokens_BxN: jax.Array
    length_B: jax.Array
    n_generated_B: jax.Array
    done_B: jax.Array  # the row has met a stop token
    key_B: jax.Array
    cache: Any
    draft_cache: Any = None  # of the draft model
    steps: Any = 0  # of decode so far
    drafted: Any = 0  # drafts proposed so far, of all active rows
    accepted: Any = 0  # drafts accepted so far


def sample_and_append(state, logits_BxV, active_B, sampling, sampling_params):
    """Samples each row's next token and appends it to the active rows. Returns (state, token_B)."""
    if sampling.penalize:
        penalty = sampling_params.repetition_penalty
        logits_BxV = penalize_repetition(logits_BxV, state.tokens_BxN, state.length_B, penalty)
    key_B = jax.vmap(jax.random.fold_in)(state.key_B, state.n_generated_B)
    token_B = sample_token(logits_BxV, key_B, sampling, sampling_params).astype(jnp.int32)
    is_next_BxN = (jnp.arange(state.tokens_BxN.shape[1]) == state.length_B[:, None]) & active_B[:, None]
    is_stop_B = (token_B[:, None] == jnp.array(sampling.stop_tokens, jnp.int32)).any(-1)
    state = state.replace(
        tokens_BxN=jnp.where(is_next_BxN, token_B[:, None], state.tokens_BxN), length_B=state.length_B + active_B,
        n_generated_B=state.n_generated_B + active_B, done_B=state.done_B | (active_B & is_stop_B))
    return state, token_B


@functools.partial(jax.jit, donate_argnames='state', static_argnames=(
    'config', 'sampling', 'width', 'n_slots', 'cache_dtype', 'n_draft', 'draft_config'))
def prefill(params, draft_params, state, sampling_params, *, config, sampling, width, n_slots, cache_dtype, n_draft,
            draft_config):
    """Writes the prompts, which end before column `width`, to a new cache of n_slots, and generates the first token."""
    idx_BxT = state.tokens_BxN[:, :width]
    position_BxT = jnp.where(jnp.arange(width) < state.length_B[:, None], jnp.arange(width), PAD)

    def fill(params, config):
        cache = init_cache(config, len(idx_BxT), n_slots, cache_dtype, n_draft)
        return GPT(config).apply({'params': params}, idx_BxT, cache, position_BxT=position_BxT,
                                 logit_position_B=state.length_B - 1, method='with_cache')

    logits_Bx1xV, cache = fill(params, config)
    draft_cache = fill(draft_params, draft_config)[1] if draft_config else None
    state = state.replace(cache=cache, draft_cache=draft_cache)
    return sample_and_append(state, logits_Bx1xV[:, 0], ~state.done_B, sampling, sampling_params)[0]


@functools.partial(jax.jit, static_argnames=('config', 'sampling', 'n_draft', 'draft_config'), donate_argnames='state')
def decode(params, draft_params, state, sampling_params, n_end, *, config, sampling, n_draft, draft_config):
    """Generates until every row has n_end new tokens or is done: one compiled loop over one of the three steps
    below."""
    def is_active(state):
        return ~state.done_B & (state.n_generated_B < n_end)

    def step(state):
        state = state.replace(steps=state.steps + 1)
        if state.cache is None:
            return step_uncached(params, state, is_active(state), sampling_params, config, sampling)
        if n_draft == 0:
            return step_cached(params, state, is_active(state), sampling_params, config, sampling)
        return step_speculative(params, draft_params, state, is_active(state), sampling_params, n_end, config, sampling,
                                n_draft, draft_config)

    return jax.lax.while_loop(lambda state: is_active(state).any(), step, state)


def step_uncached(params, state, active_B, sampling_params, config, sampling):
    """One token per active row from its last block_size tokens, recomputed, as nanoGPT does for every token."""
    start_B = jnp.maximum(state.length_B - config.block_size, 0)
    window = jax.vmap(lambda tokens_N, start: jax.lax.dynamic_slice(tokens_N, (start,), (config.block_size,)))
    logits_Bx1xV = GPT(config).apply({'params': params}, window(state.tokens_BxN, start_B),
                                     logit_position_B=state.length_B - start_B - 1)
    return sample_and_append(state, logits_Bx1xV[:, 0], active_B, sampling, sampling_params)[0]


def step_cached(params, state, active_B, sampling_params, config, sampling):
    """One token per active row: feeds its last token through the KV cache."""
    position_Bx1 = state.length_B[:, None] - 1
    last_Bx1 = jnp.take_along_axis(state.tokens_BxN, position_Bx1, axis=1)
    logits_Bx1xV, cache = GPT(config).apply(
        {'params': params}, last_Bx1, state.cache, position_BxT=position_Bx1, method='with_cache')
    return sample_and_append(state.replace(cache=cache), logits_Bx1xV[:, 0], active_B, sampling, sampling_params)[0]


def step_speculative(params, draft_params, state, active_B, sampling_params, n_end, config, sampling, n_draft,
                     draft_config):
    """Up to 1 + n_draft tokens per active row (speculative decoding, arXiv:2211.17192): drafts are fed along with the
    last token, and accepted as long as they equal the tokens that the model samples.

    Draft model and model draw with the same random numbers, so the result is that of n_draft=0, in fewer steps."""
    position_Bx1 = state.length_B[:, None] - 1
    last_Bx1 = jnp.take_along_axis(state.tokens_BxN, position_Bx1, axis=1)
    if draft_config:
        drafts_BxJ, state = draft_tokens(draft_params, state, n_draft, draft_config, sampling, sampling_params)
    else:
        drafts_BxJ = jax.vmap(prompt_lookup_draft, (0, 0, None))(state.tokens_BxN, state.length_B, n_draft)
    usable_B = jnp.minimum(n_draft, n_end - state.n_generated_B - 1)
    logits_BxTxV, cache = GPT(config).apply(
        {'params': params}, jnp.concatenate([last_Bx1, drafts_BxJ], axis=1), state.cache,
        position_BxT=position_Bx1 + jnp.arange(1 + n_draft), method='with_cache')
    state = state.replace(cache=cache, drafted=state.drafted + jnp.where(active_B, usable_B, 0).sum())
    for t in range(1 + n_draft):
        state, token_B = sample_and_append(state, logits_BxTxV[:, t], active_B, sampling, sampling_params)
        if t < n_draft:  # accept draft t only if it equals the sampled token; otherwise this row stops here
            active_B &= (token_B == drafts_BxJ[:, t]) & (state.n_generated_B < n_end)
            state = state.replace(accepted=state.accepted + active_B.sum())
            active_B &= ~state.done_B
    return state


def draft_tokens(params, state, n_draft, config, sampling, sampling_params):
    """Drafts [B, n_draft] by a smaller model, token by token, and the state with its cache. The draft model draws with
    the random numbers that the model will draw with, so both sample the same token wherever they agree."""
    drafts = []
    cache = state.draft_cache
    # re-feed the second-to-last token: if every draft was accepted, the draft model has not cached it yet
    position_BxT = jnp.maximum(state.length_B[:, None] - jnp.array([2, 1]), 0)
    idx_BxT = jnp.take_along_axis(state.tokens_BxN, position_BxT, axis=1)
    for n in range(n_draft):
        logits_BxTxV, cache = GPT(config).apply(
            {'params': params}, idx_BxT, cache, position_BxT=position_BxT, method='with_cache')
        key_B = jax.vmap(jax.random.fold_in)(state.key_B, state.n_generated_B + n)
        drafts.append(sample_token(logits_BxTxV[:, -1], key_B, sampling, sampling_params).astype(jnp.int32))
        idx_BxT = drafts[-1][:, None]
        position_BxT = state.length_B[:, None] + n
    return jnp.stack(drafts, axis=1), state.replace(draft_cache=cache)


def prompt_lookup_draft(tokens_N, length, n_draft):
    """Drafts [n_draft]: what followed the most recent earlier occurrence of the row's last tokens, up to NGRAM of them
    (prompt lookup, https://github.com/apoorvumang/prompt-lookup-decoding). A continuation that reaches the end of the
    row wraps around to its start, as a text that repeats itself does."""
    i_N = jnp.arange(len(tokens_N))
    last = length - 1
    matches_N = i_N < last
    match_length_N = jnp.zeros(len(tokens_N), jnp.int32)
    for n in range(NGRAM):
        matches_N &= (i_N >= n) & (jnp.roll(tokens_N, n) == tokens_N[last - n])
        match_length_N += matches_N
    best = jnp.argmax(jnp.where(i_N < last, match_length_N * len(tokens_N) + i_N, -1))
    return tokens_N[best + 1 + jnp.arange(n_draft) % jnp.maximum(last - best, 1)]


def bucket_length(n):
    """The next power of two, 16 at least: prompts of one bucket share one compilation."""
    return max(16, 1 << (n - 1).bit_length())


# -----------------------------------------------------------------------------
# generate

class GenerationResult(NamedTuple):
    """What there is so far: numpy int32 arrays of tokens [B, N] and of the length of each row [B]; the decode steps,
    and the bytes of KV cache that each of them reads; the number of drafts and of those accepted."""
    tokens: np.ndarray
    lengths: np.ndarray
    steps: int = 0
    cache_bytes: int = 0
    drafted: int = 0
    accepted: int = 0


def generate(params, config, idx_BxT, max_new_tokens, *, rng, temperature=1.0, top_k=None, top_p=None, min_p=None,
             repetition_penalty=None, stop_tokens=(), prompt_lengths_B=None, n_vocab=None, sample_index_B=None,
             cache_dtype='auto', n_draft=0, draft=None):
    """Continues each prompt by max_new_tokens tokens. Returns all tokens, int32 [B, T + max_new_tokens], 0 after a
    row's last token. The arguments and errors are those of generate_stream."""
    for result in generate_stream(
            params, config, idx_BxT, max_new_tokens, rng=rng, temperature=temperature, top_k=top_k, top_p=top_p,
            min_p=min_p, repetition_penalty=repetition_penalty, stop_tokens=stop_tokens,
            prompt_lengths_B=prompt_lengths_B, n_vocab=n_vocab, sample_index_B=sample_index_B, cache_dtype=cache_dtype,
            n_draft=n_draft, draft=draft):
        pass
    return result.tokens


def generate_stream(params, config, idx_BxT, max_new_tokens, *, rng, temperature=1.0, top_k=None, top_p=None,
                    min_p=None, repetition_penalty=None, stop_tokens=(), prompt_lengths_B=None, n_vocab=None,
                    sample_index_B=None, cache_dtype='auto', n_draft=0, draft=None, chunk=None):
    """Yields a GenerationResult with tokens [B, T + max_new_tokens] after the first token, then after every `chunk`
    tokens (all at once if not given).

    idx_BxT: prompts, right-padded; prompt_lengths_B: their lengths, T each if not given. Every row continues right
        after its own prompt.
    rng: a jax.random key. Row b draws its n-th token from fold_in(fold_in(rng, sample_index_B[b]), n), independent of
        the rest of the batch; sample_index_B is 0, 1, 2, ... if not given.
    temperature: 0 is greedy. top_k: only the k likeliest tokens (clamped to the vocabulary). top_p: only the likeliest
        tokens that together reach this probability, in (0, 1]. min_p: only tokens at least this times as likely as the
        likeliest, in (0, 1]. repetition_penalty: above 1 makes tokens that are already there less likely. n_vocab: only
        ids below it, for padded vocabularies.
    stop_tokens: a row ends with the first of these that it generates.
    cache_dtype: of the KV cache, one of CACHE_DTYPES; 'auto' is the config's dtype.
    n_draft: number of drafts per step: the same tokens, faster where drafts are accepted. draft: (params, config) of a
        draft model with the same vocabulary; without it the row itself is searched, see prompt_lookup_draft.

    Up to block_size positions every token costs one position (KV cache). Past it a token is conditioned on the last
    block_size tokens, as in nanoGPT, which costs block_size positions: the learned position of every token changes.

    Raises UserError for prompts or controls that make no sense."""
    draft_params, draft_config = draft if draft and n_draft else (None, None)
    n_vocab = config.vocab_size if n_vocab is None else n_vocab
    tokens_BxT, length_B = check_prompts(config, idx_BxT, prompt_lengths_B)
    check_controls(config, max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, n_vocab, cache_dtype,
                   n_draft, draft_config)
    if max_new_tokens == 0:
        yield GenerationResult(tokens_BxT, length_B)
        return

    sampling = SamplingConfig(temperature == 0, top_k, top_p is not None, min_p is not None,
                              repetition_penalty is not None, n_vocab, tuple(int(t) for t in np.ravel(stop_tokens)))
    controls = (temperature, top_p, min_p, repetition_penalty)
    sampling_params = SamplingParams(*(np.float32(1 if x is None else x) for x in controls))
    static = dict(config=config, sampling=sampling, n_draft=n_draft, draft_config=draft_config)
    B, T = tokens_BxT.shape
    longest = int(length_B.max())
    n_cached = min(max_new_tokens, config.block_size + 1 - longest)  # tokens that can be generated through the cache
    N = bucket_length(T) + max_new_tokens  # columns for prefill and for the result
    if n_cached < max_new_tokens:
        N = max(N, config.block_size)  # the window that step_uncached slices
    sample_index_B = np.arange(B) if sample_index_B is None else np.asarray(sample_index_B)
    state = DecodeState(
        tokens_BxN=jnp.asarray(np.pad(tokens_BxT, ((0, 0), (0, N - T)))), length_B=jnp.asarray(length_B),
        n_generated_B=jnp.zeros(B, jnp.int32), done_B=jnp.zeros(B, bool), cache=None, steps=jnp.int32(0),
        drafted=jnp.int32(0), accepted=jnp.int32(0), key_B=jax.vmap(jax.random.fold_in, (None, 0))(rng, sample_index_B))

    def result_of(state):  # copies, because the next step donates the state
        return GenerationResult(
            np.array(state.tokens_BxN)[:, :T + max_new_tokens], np.array(state.length_B), int(state.steps),
            sum(x.nbytes for x in jax.tree.leaves(state.cache)), int(state.drafted), int(state.accepted))

    n = 0  # tokens generated per row
    if n_cached > 0:
        width = min(bucket_length(longest), config.block_size)
        n_slots = min(width + max_new_tokens, config.block_size)
        if draft_config and n_slots > draft_config.block_size:
            raise UserError(f'the draft model knows {draft_config.block_size} positions, this takes {n_slots}: use '
                            'fewer max_new_tokens or no draft')
        state = prefill(params, draft_params, state, sampling_params, width=width, n_slots=n_slots,
                        cache_dtype=cache_dtype, **static)
        n = 1
        yield result_of(state)
    while n < max_new_tokens:
        if n >= n_cached:  # past block_size
            state = state.replace(cache=None, draft_cache=None)
        n = min(max_new_tokens if n >= n_cached else n_cached, n + (chunk or max_new_tokens))
        state = decode(params, draft_params, state, sampling_params, np.int32(n), **static)
        yield result_of(state)
        if chunk and bool(state.done_B.all()):
            return


def check_prompts(config, idx_BxT, prompt_lengths_B):
    """(tokens int32 [B, T] with 0 for padding, lengths int32 [B]). Raises UserError for prompts that make no sense."""
    tokens_BxT = np.asarray(idx_BxT, np.int32)
    if tokens_BxT.ndim != 2 or 0 in tokens_BxT.shape:
        raise UserError(f'prompts must be [batch, tokens] with at least one token, not of shape {tokens_BxT.shape}')
    B, T = tokens_BxT.shape
    length_B = np.full(B, T) if prompt_lengths_B is None else np.asarray(prompt_lengths_B)
    if length_B.shape != (B,) or length_B.dtype.kind not in 'iu' or length_B.min() < 1 or length_B.max() > T:
        raise UserError(f'prompt_lengths_B must be {B} lengths between 1 and {T}, not {length_B.tolist()}')
    tokens_BxT = np.where(np.arange(T) < length_B[:, None], tokens_BxT, 0)
    if tokens_BxT.min() < 0 or tokens_BxT.max() >= config.vocab_size:
        wrong = tokens_BxT.min() if tokens_BxT.min() < 0 else tokens_BxT.max()
        raise UserError(f'the prompt has token id {wrong}; the model knows 0 to {config.vocab_size - 1}')
    return tokens_BxT, length_B.astype(np.int32)


def check_controls(config, max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, n_vocab, cache_dtype,
                   n_draft, draft_config):
    """Raises UserError for arguments of generate_stream that make no sense."""
    if max_new_tokens < 0:
        raise UserError(f'max_new_tokens must be at least 0, not {max_new_tokens}')
    if temperature != 0 and not 1e-6 <= temperature < float('inf'):  # less would overflow float32
        raise UserError(f'temperature must be 0 (greedy) or at least 1e-6, not {temperature}')
    if top_k is not None and top_k < 1:
        raise UserError(f'top_k must be at least 1, not {top_k}')
    for name, value in (('top_p', top_p), ('min_p', min_p)):
        if value is not None and not 0 < value <= 1:
            raise UserError(f'{name} must be in (0, 1], not {value}')
    if repetition_penalty is not None and not 0 < repetition_penalty < float('inf'):
        raise UserError(f'repetition_penalty must be above 0, not {repetition_penalty}')
    if not 0 < n_vocab <= config.vocab_size:
        raise UserError(f'n_vocab must be between 1 and {config.vocab_size}, not {n_vocab}')
    if cache_dtype not in ('auto', *CACHE_DTYPES):
        raise UserError(f'cache_dtype must be one of {", ".join(CACHE_DTYPES)}, not {cache_dtype!r}')
    if not 0 <= n_draft <= MAX_DRAFT:
        raise UserError(f'n_draft must be between 0 (no speculation) and {MAX_DRAFT}, not {n_draft}')
    if draft_config and draft_config.vocab_size < n_vocab:
        raise UserError(f'the draft model has a vocabulary of {draft_config.vocab_size}, the model {n_vocab}')
