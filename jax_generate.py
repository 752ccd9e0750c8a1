"""Extends prompts by new token ids, and computes the log-probabilities of given token ids. Has
prefill and decode with a KV cache, sampling, speculative decoding and streaming.

`generate` returns all tokens. `generate_stream` yields tokens while they are made. `score` returns
log-probabilities. jax_text.py generates and scores texts. From top to bottom this file has: the
sampling of a token; the compiled functions, which are prefill and decode (decode has three kinds of
steps); the Decoder, which calls the compiled functions; `generate`, `generate_stream`, and
start_rows, which makes a Decoder; `score`; the sizes of compiled arrays.

The letters of shapes are those of jax_transformer.py. In addition, N is the width of the token
buffer, and J is the number of drafts. In `score`, R is the number of rows, P is the number of
tokens that all rows of an item have in common, and M is the number of a row's remaining tokens."""
import contextlib
import dataclasses
import functools
import os
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from flax.traverse_util import flatten_dict
from jax import Array
from numpy.typing import ArrayLike

from jax_flags import (
    CONTROLS, Sampling, UserError, ceil_div, check_choice, check_ranges, shows_fields)
from jax_ops.decode_weights import (  # noqa: F401, but for devices_of: public here
    convert_params_for_decoding, devices_of, order_columns_by_rank)
from jax_ops.sampling import (  # noqa: F401, but for keep_largest: public here
    NO_TOKEN, draw_by_noise, draw_of_candidates, find_candidates, keep_largest)
from jax_ops.sharding import shard
from jax_ops.vocabulary import cross_entropy
from jax_transformer import (
    CACHE_DTYPES, GPT, PAD, PIECE, Block, GPTConfig, Stream, create_call, grow_cache, select_rows)

SCORED_AT_ONCE = 1024  # positions whose logits are materialized at a time
NGRAM = 3  # prompt lookup searches for the last tokens of a row, at most this many
MAX_DRAFT = 16

# The KV cache may be in 8 bits if no head has a bias with a larger norm. With norms of 0, 20, 60
# and 600, log-probabilities changed by 0.010, 0.019, 0.035 and 0.34 nats in int8, and by 0.06,
# 0.08, 0.23 and 0.73 nats in float8 (means; two layers of random weights). Qwen2.5-7B is reported
# to have norms of 605 and 921 (ggml-org/llama.cpp#21385).
LARGEST_BIAS = 32


# -----------------------------------------------------------------------------
# sampling

class Controls(struct.PyTreeNode):
    """The values of a Sampling that compiled functions take as arguments. A changed value does not
    recompile these functions, except a changed n_vocab. A control that is None is off, and its
    computation is not compiled. If the rows of a batch have different values, a control is an array
    [B, 1]."""
    n_vocab: int = struct.field(pytree_node=False)  # only ids below it
    stop_tokens: Any = ()  # int32 [n] or [B, n]; another n recompiles
    temperature: Any = None  # None is greedy
    is_greedy: Any = None  # bool [B, 1]: rows that are greedy, whatever the temperature
    top_k: Any = None
    top_p: Any = None
    min_p: Any = None
    repetition_penalty: Any = None


def create_controls(config: GPTConfig, sampling: Sampling) -> Controls:
    """Returns the Controls of a Sampling. Raises UserError for values out of range."""
    sampling.check()
    n_vocab = config.vocab_size if sampling.n_vocab is None else sampling.n_vocab
    if not 0 < n_vocab <= config.vocab_size:
        raise UserError(f'n_vocab must be between 1 and {config.vocab_size}, not {n_vocab}')
    controls: dict[str, Any] = {'temperature': np.float32(1)}
    for name, control in CONTROLS.items():
        value = getattr(sampling, name)
        if value == control.off:
            controls.pop(name, None)
        elif value is not None:
            controls[name] = np.float32(value)
    if np.size(sampling.stop_tokens):
        controls['stop_tokens'] = np.ravel(sampling.stop_tokens).astype(np.int32)
    return Controls(n_vocab, **controls)


def stack_controls(rows: list[Controls | None]) -> Controls:
    """Returns the Controls of a batch. rows: the Controls of each row, all with the same n_vocab;
    None for a free place.

    The result has every control, whatever the rows have, so that all batches share one program.
    where_any skips the costly controls that no row has."""
    stacked = {}
    for name, control in CONTROLS.items():
        # rows without the control get a value that is off exactly. For top_p that is 0, for which
        # keep_largest keeps all tokens; with 1, rounding of the sum could drop the last token
        off = 0 if name == 'top_p' else control.off
        values = [getattr(row, name, None) for row in rows]
        filled_in = [off if value is None else value for value in values]
        stacked[name] = np.array(filled_in, np.float32)[:, None]
    is_greedy = stacked['temperature'] == 0
    stacked['temperature'] = np.where(is_greedy, np.float32(1), stacked['temperature'])

    # the stop tokens of each row, padded with -1, which is no token id
    known = [row for row in rows if row]
    most = max(len(row.stop_tokens) for row in known)
    stop_tokens = np.full((len(rows), power_of_two(max(4, most))), -1, np.int32)
    for b, row in enumerate(rows):
        if row:
            stop_tokens[b, :len(row.stop_tokens)] = row.stop_tokens
    return Controls(
        known[0].n_vocab, stop_tokens=stop_tokens, is_greedy=is_greedy, **stacked)


def draw(logits_BxV: Array, key_B: Array, controls: Controls,
         candidate_BxC: Array | None = None) -> tuple[Array, Array]:
    """Draws a token for each row. Returns (the logits that the token is drawn from, see
    sampling_logits; the tokens, int32 [B]). candidate_BxC: see sample_token."""
    logits_BxV = sampling_logits(logits_BxV, controls, candidate_BxC)
    return logits_BxV, sample_token(logits_BxV, key_B, controls, candidate_BxC).astype(jnp.int32)


def draw_on_cpu(logits_BxV: Array, key_B: Array, controls: Controls) -> tuple[Array, Array]:
    """Computes the same as draw(), but faster on a CPU. If there is a control such as top_k, first
    finds the likeliest tokens (find_candidates). If the control excludes all other tokens, random
    noise is computed for the likeliest tokens only."""
    candidate_BxC = None
    narrowing = controls.top_k, controls.top_p, controls.min_p
    if controls.temperature is not None and any(control is not None for control in narrowing):
        candidate_BxC = find_candidates(shard(logits_BxV, None, None)[:, :controls.n_vocab], key_B)
    return draw(logits_BxV, key_B, controls, candidate_BxC)


def sample_token(logits_BxV: Array, key_B: Array, controls: Controls,
                 candidate_BxC: Array | None = None) -> Array:
    """Returns one token id per row, [B]. The token of row b is drawn from the softmax of the row's
    logits, with the key key_B[b]. A greedy row gets its likeliest token, and a row of NaN gets
    NO_TOKEN.

    logits_BxV: the result of sampling_logits, float32. candidate_BxC: the result of
    find_candidates. A token is drawn by adding random noise to the logits. If the controls exclude
    all tokens but the candidates, noise is computed for the candidates only. With None, noise is
    computed for all tokens."""
    def draw_of_all():
        noise_BxV = jnp.zeros_like(logits_BxV)
        if controls.temperature is not None:
            # jax's default noise has 23 random bits: it would never draw a token with a probability
            # of 1e-7 beside a likely one
            gumbel = functools.partial(jax.random.gumbel, shape=(controls.n_vocab,), mode='high')
            # no noise is computed if all rows are greedy
            is_drawn = True if controls.is_greedy is None else ~controls.is_greedy
            noise_BxV = where_any(is_drawn, lambda _: jax.vmap(gumbel)(key_B), noise_BxV)
        id_V = jnp.arange(controls.n_vocab)
        return draw_by_noise(logits_BxV, noise_BxV, id_V, controls.is_greedy)

    if candidate_BxC is None:
        return draw_of_all()
    return draw_of_candidates(
        logits_BxV, key_B, candidate_BxC, controls.is_greedy, otherwise=draw_of_all)


def sampling_logits(logits_BxV: Array, controls: Controls,
                    candidate_BxC: Array | None = None) -> Array:
    """Returns the logits that a token is drawn from, [B, n_vocab], after temperature, top_k, top_p
    and min_p. Excluded tokens have -inf. Greedy sampling takes the largest of these logits.
    candidate_BxC: see sample_token."""
    # all-gathered over the vocabulary
    logits_BxV = shard(logits_BxV, None, None)[:, :controls.n_vocab]
    if controls.temperature is None:
        return logits_BxV
    # the controls, in the order of transformers; each acts on the result of the one before
    logits_BxV /= controls.temperature
    if controls.top_k is not None:
        logits_BxV = where_any(controls.top_k, lambda logits_BxV: keep_largest(
            logits_BxV, jnp.ones_like(logits_BxV, jnp.int32), controls.top_k, candidate_BxC),
            logits_BxV)
    # keep the likeliest until their probabilities reach top_p (arXiv:1904.09751)
    if controls.top_p is not None:
        logits_BxV = where_any(controls.top_p, lambda logits_BxV: keep_largest(
            logits_BxV, jax.nn.softmax(logits_BxV), controls.top_p, candidate_BxC), logits_BxV)
    # keep those that are at least min_p times as likely as the likeliest (arXiv:2407.01082)
    if controls.min_p is not None:
        least_Bx1 = logits_BxV.max(-1, keepdims=True) + jnp.log(controls.min_p)
        logits_BxV = jnp.where(logits_BxV < least_Bx1, -jnp.inf, logits_BxV)
    return logits_BxV


def where_any(control: Any, change: Callable[[Array], Array], x_BxV: Array) -> Array:
    """Returns change(x_BxV) if a control is on, else x_BxV unchanged. x_BxV: the logits, or their
    noise.

    control: the value of a setting of sampling, such as top_k. A scalar is always on, because
    callers do not call this function for a setting that is off. An array [B, 1] is on if at least
    one row is nonzero. The compiled program checks this at run time."""
    if np.ndim(control) == 0:
        return change(x_BxV)
    return jax.lax.cond((control != 0).any(), change, lambda x_BxV: x_BxV, x_BxV)


# fold_in(key_B[b], number_B[b]) for each row b; it would take 1 ms if it were not compiled
fold_in_each = jax.jit(jax.vmap(jax.random.fold_in))


def log_probability(logits_BxV: Array, token_B: Array) -> Array:
    """Computes the natural log of each token's probability in the softmax of its row, float32
    [B]."""
    logit_B = jnp.take_along_axis(logits_BxV, token_B[:, None], axis=-1)[:, 0]
    return logit_B - jax.nn.logsumexp(logits_BxV, axis=-1)


def penalize_repetition(logits_BxV: Array, tokens_BxN: Array, length_B: Array,
                        penalty: Array) -> Array:
    """Returns the logits with the repetition penalty (arXiv:1909.05858). The penalty changes the
    logits of the tokens that row b already has, tokens_BxN[b, :length_B[b]]: positive logits are
    divided by `penalty`, and negative logits are multiplied by `penalty`."""
    # which tokens of the vocabulary each row has, up to its length
    is_filled_BxN = jnp.arange(tokens_BxN.shape[1]) < length_B[:, None]
    rows_Bx1 = jnp.arange(len(tokens_BxN))[:, None]
    present_BxV = jnp.zeros(logits_BxV.shape, bool).at[rows_Bx1, tokens_BxN].max(is_filled_BxN)
    penalized_BxV = jnp.where(logits_BxV > 0, logits_BxV / penalty, logits_BxV * penalty)
    return jnp.where(present_BxV, penalized_BxV, logits_BxV)

# -----------------------------------------------------------------------------
# prefill and decode

class DecodeState(struct.PyTreeNode):
    """The state of a generation. Row b of tokens_BxN holds length_B[b] tokens; the last
    n_generated_B[b] of them were generated."""
    tokens_BxN: Array
    length_B: Array
    n_generated_B: Array
    done_B: Array  # the row has met a stop token, or the caller has ended it
    key_B: Array
    cache: dict | None = None  # KV cache; None until the prompts are read
    steps: Any = 0  # decode steps so far
    drafted: Any = 0  # drafts proposed so far, of all active rows
    accepted: Any = 0  # drafts accepted so far
    # log-probabilities of the generated tokens, see GenerationResult; None where they are not asked
    # for, which leaves the compiled program without them
    logprob_BxN: Array | None = None
    sampling_logprob_BxN: Array | None = None


def sample_and_append(state: DecodeState, logits_BxV: Array, active_B: Array,
                      controls: Controls) -> tuple[DecodeState, Array]:
    """Samples a token for each row, and appends it to the rows where active_B is True. Returns (the
    new state; the sampled tokens of all rows, int32 [B])."""
    plain_BxV = logits_BxV
    if controls.repetition_penalty is not None:
        def penalize(logits_BxV):
            return penalize_repetition(
                logits_BxV, state.tokens_BxN, state.length_B, controls.repetition_penalty)

        logits_BxV = where_any(controls.repetition_penalty - 1, penalize, logits_BxV)
    # the n-th token of a row is drawn by its own key, whatever else is in the batch
    key_B = fold_in_each(state.key_B, state.n_generated_B)
    logits_BxV, token_B = jax.lax.platform_dependent(
        logits_BxV, key_B, controls, cpu=draw_on_cpu, default=draw)
    is_stop_B = (token_B[:, None] == jnp.array(controls.stop_tokens, jnp.int32)).any(-1)

    # append the token after the row's last one; a row that is not active does not change
    index_N = jnp.arange(state.tokens_BxN.shape[1])
    is_next_BxN = (index_N == state.length_B[:, None]) & active_B[:, None]
    if state.logprob_BxN is not None:
        state = append_logprobs(state, plain_BxV, logits_BxV, token_B, is_next_BxN, controls)
    state = state.replace(
        tokens_BxN=jnp.where(is_next_BxN, token_B[:, None], state.tokens_BxN),
        length_B=state.length_B + active_B,
        n_generated_B=state.n_generated_B + active_B,
        done_B=state.done_B | (active_B & is_stop_B))
    return state, token_B


def append_logprobs(state: DecodeState, plain_BxV: Array, logits_BxV: Array, token_B: Array,
                    is_next_BxN: Array, controls: Controls) -> DecodeState:
    """Writes two log-probabilities of each token in token_B into the state: logprob_BxN, by the
    model's logits plain_BxV; and sampling_logprob_BxN, by logits_BxV, the logits that the token was
    drawn from. Returns the new state. is_next_BxN: True where the token of each row is written."""
    logprob_B = log_probability(shard(plain_BxV, None, None), token_B)
    if controls.temperature is None:  # the likeliest token is certain
        sampling_logprob_B = jnp.zeros_like(logprob_B)
    else:
        sampling_logprob_B = log_probability(logits_BxV, token_B)
        if controls.is_greedy is not None:
            sampling_logprob_B = jnp.where(controls.is_greedy[:, 0], 0, sampling_logprob_B)
    return state.replace(
        logprob_BxN=jnp.where(is_next_BxN, logprob_B[:, None], state.logprob_BxN),
        sampling_logprob_BxN=jnp.where(
            is_next_BxN, sampling_logprob_B[:, None], state.sampling_logprob_BxN))


def prefill(params: dict, cache: dict, idx_BxT: np.ndarray, position_BxT: np.ndarray, *,
            config: GPTConfig, with_output: bool = False) -> Any:
    """Adds one piece of the prompts, T tokens of each row, to the KV cache. Returns the new cache.
    If with_output, returns (the last layer's output [B, T, D]; the new cache). idx_BxT: the tokens
    of the piece. position_BxT: their positions, PAD for padding.

    Each layer is a call of its own, because XLA then compiles one layer of each kind instead of all
    layers."""
    # the input of the first layer needs the embeddings only
    tables = {name: p for name, p in params.items() if not name.startswith('h_')}
    stream = commit(embed_prompts(tables, idx_BxT, position_BxT, config=config), params)
    # layer after layer; the output of the last one is computed only with with_output
    new_cache = {}
    for i in range(config.n_layer):
        name = f'h_{i}'
        is_last = i == config.n_layer - 1 and not with_output
        stream, new_cache[name] = prefill_layer(
            params[name], cache[name], stream, idx_BxT, position_BxT, config=config,
            layer=config.layer(i), is_last=is_last)
    if with_output:
        return stream.x_BxTxD, new_cache
    return new_cache


@functools.partial(jax.jit, static_argnames='config')
def embed_prompts(tables: dict, idx_BxT: Array, position_BxT: Array, *,
                  config: GPTConfig) -> Stream:
    call = create_call(idx_BxT, position_BxT)
    return GPT(config).bind({'params': tables}).embed(idx_BxT, call)


@functools.partial(jax.jit, donate_argnames='cache', static_argnames=('config', 'layer', 'is_last'))
def prefill_layer(params: dict, cache: dict, stream: Stream, idx_BxT: Array, position_BxT: Array, *,
                  config: GPTConfig, layer: tuple, is_last: bool) -> tuple[Stream | None, dict]:
    """Adds one piece of the prompts to the cache of one layer. Returns (the Stream into the next
    layer; the layer's new cache). params, cache: those of the layer. stream: the Stream into the
    layer. idx_BxT, position_BxT: as in prefill. layer: the tuple that config.layer(i) returns for
    this layer, layer i. is_last: whether to return None in place of the Stream; then only the
    layer's keys and values are computed."""
    call = create_call(idx_BxT, position_BxT)
    stream, cache = Block(config, *layer).bind({'params': params})(stream, call, cache)
    return None if is_last else stream, cache


@functools.partial(
    jax.jit, static_argnames=('config', 'n_draft', 'use_cache'), donate_argnames='state')
def decode(params: dict, state: DecodeState, controls: Controls, n_end: Array, max_length: Array,
           n_slots: Array, *, config: GPTConfig, n_draft: int, use_cache: bool) -> DecodeState:
    """Generates tokens in one compiled loop, until every row is finished.

    A row is finished when it has n_end new tokens (a number, or [B]), when it is longer than
    max_length, or when state.done_B says so: it has met a stop token, or the caller has ended it.
    The loop ends early, with unfinished rows, in two cases: such a row no longer fits into the
    n_slots slots of the cache, or drafts_are_useless returns True. Decoder.decode_until then goes
    on with a larger cache, or without drafts.

    If use_cache is False, a step of the loop is step_uncached. Otherwise a step is step_cached if
    n_draft is 0, else step_speculative."""
    def room(state):
        """Returns the number of tokens that each row may still get, [B]."""
        new_tokens_B = n_end - state.n_generated_B
        positions_B = max_length + 1 - state.length_B
        return jnp.where(state.done_B, 0, jnp.minimum(new_tokens_B, positions_B))

    def should_continue(state):
        active_B = room(state) > 0
        is_full = (active_B & (state.length_B > n_slots)).any()
        useless = n_draft > 0 and drafts_are_useless(state.drafted, state.accepted, len(active_B))
        return active_B.any() & ~(is_full | useless)

    def step(state):
        state = state.replace(steps=state.steps + 1)
        if not use_cache:
            return step_uncached(params, state, room(state) > 0, config, controls)
        if n_draft == 0:
            return step_cached(params, state, room(state) > 0, config, controls)
        return step_speculative(params, state, room(state), config, controls, n_draft)

    return jax.lax.while_loop(should_continue, step, state)


def drafts_are_useless(drafted: Any, accepted: Any, batch_size: int) -> Any:
    """Returns whether drafts cost more than they save: at least 64 drafts per row were proposed,
    and fewer than 30% of them accepted. drafted, accepted: the numbers of drafts that were proposed
    and accepted, of all batch_size rows together."""
    return (drafted >= 64 * batch_size) & (accepted < 0.3 * drafted)


def step_uncached(params: dict, state: DecodeState, active_B: Array, config: GPTConfig,
                  controls: Controls) -> DecodeState:
    """Decodes one token per active row without a cache: recomputes the row's last block_size
    tokens, as nanoGPT does for every token."""
    # each row's last block_size tokens; a shorter row is padded on the right
    start_B = jnp.maximum(state.length_B - config.block_size, 0)

    def window(tokens_N, start):
        return jax.lax.dynamic_slice(tokens_N, (start,), (config.block_size,))

    model = GPT(config).bind({'params': params})
    logits_Bx1xV = model(
        jax.vmap(window)(state.tokens_BxN, start_B),
        logit_position_B=state.length_B - start_B - 1)
    return sample_and_append(state, logits_Bx1xV[:, 0], active_B, controls)[0]


def step_cached(params: dict, state: DecodeState, active_B: Array, config: GPTConfig,
                controls: Controls) -> DecodeState:
    """Decodes one token per active row: feeds the row's last token through the KV cache."""
    # the last token is in the buffer, but not yet in the cache: this call writes it there
    position_Bx1 = state.length_B[:, None] - 1
    last_Bx1 = jnp.take_along_axis(state.tokens_BxN, position_Bx1, axis=1)
    model = GPT(config).bind({'params': params})
    logits_Bx1xV, cache = model.with_cache(last_Bx1, state.cache, position_BxT=position_Bx1)
    state = state.replace(cache=cache)
    return sample_and_append(state, logits_Bx1xV[:, 0], active_B, controls)[0]


def step_speculative(params: dict, state: DecodeState, room_B: Array, config: GPTConfig,
                     controls: Controls, n_draft: int) -> DecodeState:
    """Decodes from 1 to n_draft + 1 tokens in each row, but at most room_B (speculative decoding).

    One forward pass reads the last token and the drafts. A draft is accepted if it equals the token
    that the model samples at its position. At the first draft that differs, the row gets the
    sampled token instead, and its step ends. So the tokens are the same as with n_draft=0, in fewer
    steps. (The paper, arXiv:2211.17192, accepts a draft with a probability. Its rule keeps the
    distribution of the tokens, but not the tokens.)"""
    # the drafts: the tokens that followed the row's last tokens earlier in the row
    active_B = room_B > 0
    position_Bx1 = state.length_B[:, None] - 1
    last_Bx1 = jnp.take_along_axis(state.tokens_BxN, position_Bx1, axis=1)
    look_up = jax.vmap(prompt_lookup_draft, (0, 0, None))
    drafts_BxJ = look_up(state.tokens_BxN, state.length_B, n_draft)
    # the model adds one token itself, so that a row with room for n tokens can use n - 1 drafts
    usable_B = jnp.clip(room_B - 1, 0, n_draft)

    # the last token and the drafts in one forward pass
    model = GPT(config).bind({'params': params})
    logits_BxTxV, cache = model.with_cache(
        jnp.concatenate([last_Bx1, drafts_BxJ], axis=1), state.cache,
        position_BxT=position_Bx1 + jnp.arange(1 + n_draft))
    state = state.replace(cache=cache, drafted=state.drafted + usable_B.sum())
    # sample after each token, as without drafts; the logits after a wrong draft are never used
    for t in range(1 + n_draft):
        state, token_B = sample_and_append(state, logits_BxTxV[:, t], active_B, controls)
        # accept draft t only if it equals the sampled token; otherwise this row stops here
        if t < n_draft:
            active_B &= (token_B == drafts_BxJ[:, t]) & (t < usable_B)
            state = state.replace(accepted=state.accepted + active_B.sum())
            active_B &= ~state.done_B
    return state


def prompt_lookup_draft(tokens_N: Array, length: Array, n_draft: int) -> Array:
    """Returns drafts [n_draft] for the row tokens_N[:length]: the tokens after an earlier
    occurrence of the row's last tokens (prompt lookup,
    https://github.com/apoorvumang/prompt-lookup-decoding). Takes the occurrence that agrees in the
    most tokens, up to NGRAM; of several such occurrences, the latest. If fewer than n_draft tokens
    follow the occurrence, these tokens are repeated."""
    # for each index, how many tokens up to it equal the last tokens of the row
    i_N = jnp.arange(len(tokens_N))
    last = length - 1
    matches_N = i_N < last
    match_length_N = jnp.zeros(len(tokens_N), jnp.int32)
    for n in range(NGRAM):
        matches_N &= (i_N >= n) & (jnp.roll(tokens_N, n) == tokens_N[last - n])
        match_length_N += matches_N
    # the drafts follow the longest match, or the latest of several
    best = jnp.argmax(jnp.where(i_N < last, match_length_N * len(tokens_N) + i_N, -1))
    return tokens_N[best + 1 + jnp.arange(n_draft) % jnp.maximum(last - best, 1)]


# -----------------------------------------------------------------------------
# the Decoder calls the compiled functions

def commit(tree: Any, params: dict) -> Any:
    """Returns the tree of arrays `tree` on the device of `params`, committed to it in jax's sense.
    Results of compiled functions are committed, too, and become the input of the next call. Without
    this function, decode and prefill would be compiled twice: for an uncommitted first input, and
    for the later ones. If `params` are on several devices, returns the tree unchanged."""
    devices = devices_of(params)
    return jax.device_put(tree, *devices) if len(devices) == 1 else tree


class Unread(NamedTuple):
    """Prompts that a Decoder has yet to prefill."""
    tokens_BxT: np.ndarray
    length_B: np.ndarray
    n_held: int = 0  # the number of first tokens that the cache holds already


class Decoder:
    """A batch of rows, the model that continues them, and their KV cache.

    start_rows() makes a Decoder. advance() adds tokens to the rows. The DecodeState `state` holds
    the rows and the cache. read_prompts() prefills the cache, and grow() enlarges the cache when
    the rows need more slots. end_rows() ends some rows, and close() gives the cache back to its
    PrefixCache."""

    def __init__(self, params: dict, config: GPTConfig, state: DecodeState, controls: Controls,
                 sampling: Sampling, *, longest: int, n_columns: int):
        """Makes a Decoder that has no cache yet.

        state: a DecodeState without a cache. controls: the Controls of `sampling`.
        longest: the most tokens that a row may have at the end, prompt and new tokens together.
        grow() uses this number to choose the size of the cache.
        n_columns: the number of columns of the array `tokens` in a GenerationResult. The columns
        hold the padded prompts and the new tokens."""
        self.params = params
        self.config = config
        self.state = commit(state, params)
        self.controls = controls
        self.sampling = sampling
        self.n_end = 0  # number of new tokens that each row has now, unless it has ended
        self.n_columns = n_columns
        self.prefix_cache: PrefixCache | None = None
        self.n_draft = sampling.n_draft  # 0 once drafts turn out to be useless
        self.longest = longest
        # the longest row that the KV cache can continue: learned positions end at block_size,
        # RoPE's do not end
        self.max_cached = config.block_size if config.position == 'learned' else PAD
        self.n_slots = 0  # slots of the cache; 0: there is none yet
        self.unread: Unread | None = None  # the prompts, until read_prompts()
        # n_draft stays here if drafts are dropped, because the cache keeps their slots
        on_cpu = all(device.platform == 'cpu' for device in devices_of(params))
        self.cache_options: dict[str, Any] = {
            'config': config, 'dtype': sampling.cache_dtype, 'n_draft': sampling.n_draft,
            'as_bits': on_cpu}

    def continue_from(self, prefix_cache: 'PrefixCache', tokens_T: np.ndarray) -> int:
        """Takes the KV cache out of prefix_cache and makes it this Decoder's cache. close() gives
        it back. Returns how many of the first tokens of tokens_T the cache holds; the slots after
        them are overwritten later."""
        self.prefix_cache = prefix_cache
        if prefix_cache.drafts_are_useless:
            self.drop_drafts()
        cache, self.n_slots, n_held = prefix_cache.take(
            tokens_T, self.params, self.cache_options)
        self.state = self.state.replace(cache=cache)
        return n_held

    def drop_drafts(self) -> None:
        """Switches to one token per row and step, without drafts."""
        self.n_draft = 0

    def grow(self, needed: int, batch_size: int) -> None:
        """Enlarges the cache to at least `needed` slots (block_size is always enough). If there is
        no cache yet, makes one for batch_size rows."""
        if self.n_slots >= min(needed, self.config.block_size):
            return
        self.n_slots = choose_slots(needed, self.longest, self.config.block_size)
        cache = grow_cache(
            self.state.cache, batch_size=batch_size, n_slots=self.n_slots, **self.cache_options)
        self.state = self.state.replace(cache=commit(cache, self.params))

    def read_prompts(self) -> None:
        """Prefills the cache with the prompts in `unread`, each without its last token, which the
        first decode step feeds. A row that is too long for the cache is left out. Equal prompts are
        computed once."""
        assert self.unread is not None
        tokens_BxT, length_B, n_held = self.unread
        self.unread = None
        # where each row's prefilled tokens end: at 0 if it is too long for a cache
        fits_B = length_B <= self.max_cached
        if not fits_B.any():
            self.state = self.state.replace(cache=None)
            return
        end_B = np.where(fits_B, length_B - 1, 0)
        # equal prompts once
        chosen, row_B = unique_prompts(tokens_BxT, end_B)
        is_shared = len(chosen) < len(tokens_BxT)
        self.grow(end_B.max() + 1, len(chosen))
        # the cache of the distinct prompts, then a copy for each row
        width = piece_length(int(end_B.max()) - n_held)
        cache = prefill_pieces(
            self.params, self.config, self.state.cache, tokens_BxT[chosen], n_held, end_B[chosen],
            width)
        if is_shared:
            cache = select_rows(cache, row_B)
        self.state = self.state.replace(cache=cache)

    def advance(self, n_new: int) -> 'GenerationResult':
        """Adds up to n_new tokens to each row that has not ended. All calls together add at most
        max_new_tokens to a row. Returns the GenerationResult so far."""
        self.n_end = min(self.n_end + n_new, self.sampling.max_new_tokens)
        self.decode_until(self.n_end)
        return copy_result(self.state, self.n_columns, self.sampling.max_new_tokens)

    def decode_until(self, n_end: int | np.ndarray) -> None:
        """Continues each row that has not ended until the row has n_end new tokens in all. n_end: a
        number or int32 [B].

        This takes several compiled loops if the cache grows, rows become too long for the cache, or
        drafts turn out useless."""
        B = len(self.state.tokens_BxN)
        while True:
            # the lengths of the rows that go on
            is_active_B = np.array(self.state.n_generated_B) < n_end
            length_B = np.array(self.state.length_B)[is_active_B & ~np.array(self.state.done_B)]
            if len(length_B) == 0:
                return
            # rows that are too long for the cache wait until no other row is left
            cached_B = length_B[length_B <= self.max_cached]
            use_cache = len(cached_B) > 0
            n_slots = PAD  # without a limit
            max_length = PAD
            if use_cache:
                self.grow(cached_B.max(), B)
                max_length = self.max_cached
                if self.n_slots < self.config.block_size:
                    n_slots = self.n_slots
            # useless drafts end a compiled loop, and the next loop has no drafts
            drafted, accepted = int(self.state.drafted), int(self.state.accepted)
            if self.n_draft and drafts_are_useless(drafted, accepted, B):
                self.drop_drafts()
            # one compiled loop; it may end before the rows do
            self.state = decode(
                self.params, self.state, self.controls, np.asarray(n_end, np.int32),
                np.int32(max_length), np.int32(n_slots), config=self.config,
                n_draft=self.n_draft if use_cache else 0, use_cache=use_cache)

    def end_rows(self, is_over_B: ArrayLike) -> None:
        """Ends the rows where is_over_B, bool [B], is True, because the caller wants no more of
        their tokens."""
        self.state = self.state.replace(done_B=self.state.done_B | np.asarray(is_over_B))

    @property
    def is_over(self) -> bool:
        """Returns whether the batch is finished: no row gets another token."""
        return self.n_end == self.sampling.max_new_tokens or bool(self.state.done_B.all())

    def close(self) -> None:
        """Gives the cache back to the PrefixCache. Does nothing if the Decoder has no PrefixCache,
        or has not read the prompt yet."""
        if self.prefix_cache is not None and self.unread is None:
            self.prefix_cache.keep(self)


def unique_prompts(tokens_BxT: np.ndarray, end_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Chooses one row of each distinct prompt, to prefill equal prompts once. The prompt of row b
    is its first end_B[b] tokens.

    Returns two arrays. `rows` has the indices of the chosen rows. `row_B` has for each row b the
    place in `rows` of the row with the same prompt. Example: for the prompts a a a b a, returns
    ([0, 3]; [0, 0, 0, 1, 0]).

    So that few programs are compiled, `rows` is filled up to a power of two, with copies of its
    first index. If it would then be as long as the list of all rows, or longer, all rows are chosen
    instead, and nothing is filled up."""
    # the first row of each distinct prompt; padding and a row's last token make no difference
    rows = np.where(np.arange(tokens_BxT.shape[1]) < end_B[:, None], tokens_BxT, -1)
    _, chosen, row_B = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    all_rows = np.arange(len(rows))
    if power_of_two(len(chosen)) >= len(rows):
        return all_rows, all_rows
    # in the order of tokens_BxT
    order = np.argsort(chosen)
    return np.array(filled(chosen[order].tolist(), len(rows))), np.argsort(order)[row_B.ravel()]


def prefill_pieces(params: dict, config: GPTConfig, cache: dict, tokens_BxT: np.ndarray, first: int,
                   end_B: np.ndarray, width: int) -> dict:
    """Adds the tokens tokens_BxT[b, first:end_B[b]] of each row b to the KV cache, in pieces of at
    most `width` tokens. Returns the new cache."""
    n_tokens = int(end_B.max()) - first
    # a row that has ended before a piece is padded there, with the position PAD
    width = min(config.block_size, width)
    for start in range(first, first + n_tokens, width):
        position = start + np.arange(width)
        idx_BxT = tokens_BxT[:, np.minimum(position, tokens_BxT.shape[1] - 1)]
        position_BxT = np.where(position < end_B[:, None], position, PAD).astype(np.int32)
        cache = prefill(params, cache, idx_BxT, position_BxT, config=config)
        # pieces in flight would have their temporaries allocated side by side
        jax.block_until_ready(cache)
    return cache


class PrefixCache:
    """Keeps the KV cache of one text between Decoders of one row, of the same model. A Decoder
    computes only the tokens after the prefix that its text shares with the cached text, as in a
    chat. A Decoder with other parameters, another n_draft or another dtype of the cache starts with
    an empty cache."""

    def __init__(self):
        self.params: list[weakref.ref] = []  # those that have computed the cache
        self.tokens = np.zeros(0, np.int32)  # the cache has their keys and values
        self.cache = None
        self.options = None  # a Decoder's cache_options
        self.n_slots = 0
        self.has_wrapped = False  # whether a ring may have overwritten its first tokens
        self.drafts_are_useless = False

    def take(self, tokens_T: np.ndarray, params: dict,
             options: dict) -> tuple[dict | None, int, int]:
        """Returns (the cache; its number of slots; how many of the first tokens of tokens_T the
        cache holds). Returns (None, 0, 0) if no cache is kept, or if the kept cache has other
        options, or is of other parameters. options: a Decoder's cache_options."""
        cache, self.cache = self.cache, None
        is_gone = cache is None or any(x.is_deleted() for x in jax.tree.leaves(cache))
        kept = [reference() for reference in self.params]
        is_same_model = list(map(id, kept)) == list(map(id, jax.tree.leaves(params)))
        if is_gone or options != self.options or not is_same_model:
            return None, 0, 0
        # the number of tokens that both texts begin with; a ring that has lost its first tokens can
        # be continued only at its end
        n = min(len(self.tokens), len(tokens_T))
        n_common = int(np.cumprod(self.tokens[:n] == tokens_T[:n]).sum())
        if n_common < len(self.tokens) and self.has_wrapped:
            n_common = 0
        return cache, self.n_slots, n_common

    def keep(self, decoder: Decoder) -> None:
        """Keeps the cache and the tokens of a Decoder for the next take(). Keeps nothing if the
        Decoder was interrupted, because its cache is then deleted."""
        self.cache = None
        state = decoder.state
        if any(x.is_deleted() for x in jax.tree.leaves(state)):  # interrupted
            return
        self.cache, self.n_slots = state.cache, decoder.n_slots
        self.params = [weakref.ref(x) for x in jax.tree.leaves(decoder.params)]
        self.options = decoder.cache_options
        n_tokens = min(int(state.length_B[0]) - 1, decoder.max_cached)
        self.tokens = np.array(state.tokens_BxN)[0, :n_tokens]
        # a cache with fewer slots than tokens is a ring that has overwritten some
        n_draft = decoder.cache_options['n_draft']
        n_positions = min((x.shape[2] for x in jax.tree.leaves(self.cache)), default=0) - n_draft
        self.has_wrapped = len(self.tokens) > n_positions
        drafted, accepted = int(state.drafted), int(state.accepted)
        self.drafts_are_useless |= bool(drafts_are_useless(drafted, accepted, 1))


# -----------------------------------------------------------------------------
# generate

class GenerationResult(NamedTuple):
    """The tokens so far, why rows have ended, and statistics."""
    tokens: np.ndarray  # int32 [B, N], 0 after a row's last token
    lengths: np.ndarray  # int32 [B]: tokens[b, :lengths[b]] are the tokens of row b
    steps: int = 0  # decode steps after the first token
    cache_bytes: int = 0  # bytes of the KV cache, with the slots that are not in use
    drafted: int = 0  # number of drafts that were proposed
    accepted: int = 0  # number of drafts that were accepted
    # why each row ended: 'stop' (a stop token, or the caller), 'length' (max_new_tokens), or '' if
    # it goes on
    finish_reasons: tuple = ()
    # natural log-probabilities of the generated tokens, float32 [B, N], 0 elsewhere; None if they
    # were not asked for. logprobs: by the model, softmax(logits). sampling_logprobs: by the
    # distribution that was sampled from, after all controls; 0 if greedy
    logprobs: np.ndarray | None = None
    sampling_logprobs: np.ndarray | None = None


class Prompts(NamedTuple):
    """Rows of tokens to be continued, each with random numbers of its own."""
    idx_BxT: ArrayLike  # right-padded
    rng: Array  # a jax.random key, or one for each row
    # lengths of the prompts; T if not given. A row continues right after its own prompt
    lengths_B: ArrayLike | None = None
    # row b draws its n-th token from fold_in(fold_in(rng, sample_index_B[b]), n), independent of
    # the rest of the batch; 0, 1, 2, ... if not given
    sample_index_B: ArrayLike | None = None


@shows_fields(Sampling)
def generate(params: dict, config: GPTConfig, idx_BxT: ArrayLike, max_new_tokens: int | None = None,
             *, rng: Array, prompt_lengths_B: ArrayLike | None = None,
             sample_index_B: ArrayLike | None = None, sampling: Sampling = Sampling(),
             as_result: bool = False, logprobs: bool = False,
             **changes: Any) -> np.ndarray | GenerationResult:
    """Continues each prompt until it has max_new_tokens new tokens or a stop token. Returns all
    tokens, int32 [B, T + max_new_tokens], 0 after a row's last token. With as_result or logprobs,
    returns a GenerationResult instead.

    params: the parameters in the form for decoding, see convert_params_for_decoding.
    idx_BxT, rng, prompt_lengths_B, sample_index_B: the fields of Prompts.
    sampling: a Sampling. max_new_tokens, changes: new values for fields of `sampling`, by name,
        such as temperature=0.
    as_result: whether to return a GenerationResult, to see which tokens belong to a row (0 may be a
        token), and why the row ended.
    logprobs: whether to return a GenerationResult with the log-probabilities of generated tokens.

    The prompts are prefilled in pieces; equal prompts are computed once. The last token of a prompt
    is not prefilled: the first decode step feeds it. Each new token costs the computation of one
    position, with one exception. With learned positions, nanoGPT's rule holds past block_size: a
    token is conditioned on the last block_size tokens. Then each new token changes the positions of
    these block_size tokens, and so costs block_size positions. With RoPE, positions continue past
    block_size, and a layer attends to the last block_size keys at most.

    Raises UserError for invalid prompts or options."""
    prompts = Prompts(idx_BxT, rng, prompt_lengths_B, sample_index_B)
    sampling = with_changes(sampling, max_new_tokens, changes)
    decoder = start_rows(params, config, prompts, sampling, logprobs=logprobs)
    result = decoder.advance(sampling.max_new_tokens)
    if as_result or logprobs:
        return result
    return result.tokens


@shows_fields(Sampling)
def generate_stream(
        params: dict, config: GPTConfig, idx_BxT: ArrayLike, max_new_tokens: int | None = None, *,
        rng: Array, prompt_lengths_B: ArrayLike | None = None,
        sample_index_B: ArrayLike | None = None, sampling: Sampling = Sampling(),
        logprobs: bool = False, chunk: int | Callable | None = None,
        prefix_cache: PrefixCache | None = None,
        **changes: Any) -> Generator[GenerationResult, Any, None]:
    """Yields a GenerationResult when the rows have their first token, and then again after every
    `chunk` more tokens. The array `tokens` of each result is [B, T + max_new_tokens], with 0 where
    a row has no token. To end rows early, the caller sends (generator.send) bool [B], True for
    these rows.

    chunk: the number of tokens between two results, or a function that is called before each chunk
    and returns this number. If it is not given, all tokens after the first come at once.
    prefix_cache: a PrefixCache, for a batch of one row. If this row begins with the same tokens as
    the row of the last call, these tokens are not computed again.
    The other parameters are those of generate."""
    prompts = Prompts(idx_BxT, rng, prompt_lengths_B, sample_index_B)
    sampling = with_changes(sampling, max_new_tokens, changes)
    decoder = start_rows(
        params, config, prompts, sampling, logprobs=logprobs, prefix_cache=prefix_cache)
    choose_chunk = chunk if callable(chunk) else lambda: chunk or sampling.max_new_tokens
    with contextlib.closing(decoder):
        n_new = 1
        while True:
            is_over_B = yield decoder.advance(n_new)
            if is_over_B is not None:
                decoder.end_rows(is_over_B)
            if decoder.is_over:
                return
            n_new = choose_chunk()


def with_changes(sampling: Sampling, max_new_tokens: int | None, changes: dict) -> Sampling:
    """Returns the Sampling with the fields in `changes` replaced, and also max_new_tokens if the
    argument is not None."""
    if max_new_tokens is not None:
        changes = {**changes, 'max_new_tokens': max_new_tokens}
    return dataclasses.replace(sampling, **changes)


def check_cache_dtype(params: dict, config: GPTConfig, cache_dtype: str) -> None:
    """Raises UserError for an unknown cache_dtype. Raises UserError also for a cache_dtype of 8
    bits if the bias of c_attn (the bias of queries, keys and values) has a norm above LARGEST_BIAS
    in some head. Rounding a vector with such a large bias to 8 bits loses the rest of the
    vector."""
    check_choice('cache_dtype', cache_dtype, ('auto', *CACHE_DTYPES))
    if cache_dtype not in ('int8', 'float8'):
        return
    for path, bias in flatten_dict(params).items():
        if path[-2:] != ('c_attn', 'bias'):
            continue
        heads = np.asarray(bias, np.float32).reshape(-1, config.head_width)
        norm = np.linalg.norm(heads, axis=1).max()
        if norm > LARGEST_BIAS:
            raise UserError(f'cache_dtype={cache_dtype} would change the numbers of this model: '
                            f'{path[0]} has a bias of the attention with norm {norm:.0f}, beside '
                            'which 8 bits round the rest away; take bfloat16')


def start_rows(params: dict, config: GPTConfig, prompts: Prompts, sampling: Sampling, *,
               logprobs: bool = False, prefix_cache: PrefixCache | None = None,
               reads: bool = True) -> Decoder:
    """Returns a Decoder that has prefilled the Prompts. With reads=False, the Prompts stay in
    Decoder.unread instead. If max_new_tokens is 0, nothing is prefilled. The other parameters are
    those of generate_stream. Raises UserError for invalid prompts or options."""
    # refuse what makes no sense, before anything is computed
    controls = create_controls(config, sampling)
    tokens_BxT, length_B = check_prompts(config, prompts.idx_BxT, prompts.lengths_B)
    B, T = tokens_BxT.shape
    max_new_tokens = sampling.max_new_tokens
    n_total = int(length_B.max()) + max_new_tokens
    check_cache_dtype(params, config, sampling.cache_dtype)
    if prefix_cache is not None and B != 1:
        raise UserError(f'a prefix cache is for one row, not {B}')
    most = min(MAX_DRAFT, config.block_size - 1)
    if not 0 <= sampling.n_draft <= most:
        raise UserError(f'n_draft must be between 0 (no speculation) and {most}, not '
                        f'{sampling.n_draft}')

    # the state: one row of tokens for each prompt, with a random key of its own
    longest = n_total
    if prefix_cache is not None:  # a chat goes on: its sizes stay the same from call to call
        longest = max(n_total, config.block_size + max_new_tokens)
    is_learned = config.position == 'learned'
    N = round_up_slots(max(longest, T, config.block_size if is_learned else 0))
    sample_index_B = prompts.sample_index_B
    if sample_index_B is None:
        sample_index_B = np.arange(B)
    rng_B = jnp.broadcast_to(prompts.rng, B)
    key_B = fold_in_each(rng_B, np.asarray(sample_index_B))
    state = create_decode_state(tokens_BxT, length_B, key_B, N, logprobs=logprobs)

    # prefill
    decoder = Decoder(
        params, config, state, controls, sampling, longest=longest, n_columns=T + max_new_tokens)
    if max_new_tokens == 0:
        return decoder
    decoder.unread = Unread(tokens_BxT, length_B)
    if prefix_cache is not None:
        n_prompt = int(length_B[0]) - 1
        n_held = decoder.continue_from(prefix_cache, tokens_BxT[0, :n_prompt])
        # held tokens that save no time are computed again: the prompt can then be prefilled
        # together with others
        n_left = n_prompt - n_held
        width = piece_length(n_prompt)
        is_one_piece = n_prompt <= width
        if n_left and is_one_piece and piece_length(n_left) == width:
            n_held = 0
        decoder.unread = decoder.unread._replace(n_held=n_held)
    if reads:
        decoder.read_prompts()
    return decoder


def create_decode_state(tokens_BxT: np.ndarray, length_B: np.ndarray, key_B: Array, n_columns: int,
                        *, logprobs: bool = False) -> DecodeState:
    """Returns the DecodeState of prompts, with space for n_columns tokens per row. With `logprobs`,
    it also has space for the tokens' log-probabilities. key_B: the random key of each row."""
    B, T = tokens_BxT.shape
    tokens_BxN = np.pad(tokens_BxT, ((0, 0), (0, n_columns - T)))
    state = DecodeState(
        tokens_BxN=jnp.asarray(tokens_BxN),
        length_B=jnp.asarray(length_B),
        n_generated_B=jnp.zeros(B, jnp.int32),
        done_B=jnp.zeros(B, bool),
        key_B=key_B,
        steps=jnp.int32(-1),  # the first token's step is not counted
        drafted=jnp.int32(0),
        accepted=jnp.int32(0))
    if not logprobs:
        return state
    # two arrays, because the compiled loop updates each in place
    return state.replace(
        logprob_BxN=jnp.zeros((B, n_columns)), sampling_logprob_BxN=jnp.zeros((B, n_columns)))


def copy_result(state: DecodeState, n_columns: int, max_new_tokens: int) -> GenerationResult:
    """Returns the GenerationResult of a state, with arrays that are cut to n_columns tokens per
    row. The arrays are copies, because the next step donates the state. max_new_tokens: a row with
    this many new tokens has ended. Raises UserError if the logits were NaN."""
    tokens_BxN = np.array(state.tokens_BxN)[:, :n_columns]
    refuse_nan(tokens_BxN == NO_TOKEN)

    # why each row has ended; 'stop' wins if the last possible token is a stop token
    finish_reasons = []
    for is_done, n_generated in zip(np.array(state.done_B), np.array(state.n_generated_B)):
        if is_done:
            finish_reasons.append('stop')
        elif n_generated == max_new_tokens:
            finish_reasons.append('length')
        else:
            finish_reasons.append('')

    logprobs = sampling_logprobs = None
    if state.logprob_BxN is not None:
        logprobs = np.array(state.logprob_BxN)[:, :n_columns]
        sampling_logprobs = np.array(state.sampling_logprob_BxN)[:, :n_columns]
    return GenerationResult(
        tokens=tokens_BxN,
        lengths=np.array(state.length_B),
        steps=max(0, int(state.steps)),
        cache_bytes=sum(x.nbytes for x in jax.tree.leaves(state.cache)),
        drafted=int(state.drafted),
        accepted=int(state.accepted),
        finish_reasons=tuple(finish_reasons),
        logprobs=logprobs,
        sampling_logprobs=sampling_logprobs)


def refuse_nan(is_nan: np.ndarray) -> None:
    """Raises UserError if an element of is_nan is True. is_nan: whether the model computed NaN."""
    if is_nan.any():
        raise UserError('the model computes NaN: its weights are damaged, or its numbers are too '
                        "large for the dtype (as Gemma 3's for float16); try --dtype=bfloat16 or "
                        '--dtype=float32')


def check_prompts(config: GPTConfig, idx_BxT: ArrayLike,
                  prompt_lengths_B: ArrayLike | None) -> tuple[np.ndarray, np.ndarray]:
    """Returns (tokens, int32 [B, T] with 0 for padding; lengths, int32 [B]). If prompt_lengths_B is
    None, all lengths are T. Raises UserError for a wrong shape, a wrong length, or a token id
    outside the vocabulary."""
    tokens_BxT = np.asarray(idx_BxT)
    if tokens_BxT.ndim != 2 or 0 in tokens_BxT.shape or tokens_BxT.dtype.kind not in 'iu':
        raise UserError('prompts must be token ids [batch, tokens] with at least one token, not '
                        f'{tokens_BxT.dtype} of shape {tokens_BxT.shape}')
    # the lengths; T for all rows if they are not given
    B, T = tokens_BxT.shape
    length_B = np.full(B, T) if prompt_lengths_B is None else np.asarray(prompt_lengths_B)
    are_whole = length_B.shape == (B,) and length_B.dtype.kind in 'iu'
    if not are_whole or length_B.min() < 1 or length_B.max() > T:
        raise UserError(f'prompt_lengths_B must be {B} lengths between 1 and {T}, '
                        f'not {length_B.tolist()}')
    # the values in the padding do not matter
    tokens_BxT = np.where(np.arange(T) < length_B[:, None], tokens_BxT, 0)
    if tokens_BxT.min() < 0 or tokens_BxT.max() >= config.vocab_size:
        wrong = tokens_BxT.min() if tokens_BxT.min() < 0 else tokens_BxT.max()
        raise UserError(f'the prompt has token id {wrong}; the model knows 0 to '
                        f'{config.vocab_size - 1}')
    return tokens_BxT.astype(np.int32), length_B.astype(np.int32)


# -----------------------------------------------------------------------------
# log-probabilities of given ids

class Row(NamedTuple):
    """A sequence of token ids for score_groups, and the arrays into which score_groups writes its
    results. The tokens ids[start:] are scored, and each array has one element for each of them. The
    arrays are views of the arrays that `score` returns."""
    ids: list
    start: int  # at least 1
    logprobs: np.ndarray  # float32 [len(ids) - start], to be written
    is_likeliest: np.ndarray  # bool: no token is likelier; written, too
    top: np.ndarray  # int32: the likeliest token; written with with_top only
    top_logprobs: np.ndarray  # float32: log-probability of `top`; written with with_top only


def score(params: dict, config: GPTConfig, items: list, *, max_length: int = 0,
          batch_size: int = 16, cache_dtype: str = 'auto',
          with_top: bool = False) -> list[list[tuple]]:
    """Scores given tokens. An item is a list of rows. A row is (ids, start), and its n tokens
    ids[start:] are scored; start is at least 1.

    Returns a list with one list for each item, with one pair for each row of the item: (the natural
    log-probabilities of the n tokens, float32 [n]; whether each token is a likeliest token at its
    position, bool [n]).

    params: the parameters in the form for decoding.
    items: the list of items. The beginning that all rows of an item have in common is computed
    once, and the rows share its KV cache.
    max_length: the most tokens of context; 0 is the config's block_size. A longer row is split by
    windows(); the rows of its item then share nothing.
    batch_size: how many rows of up to PIECE tokens are computed together; fewer if rows are longer.
    cache_dtype: as in Sampling.
    with_top: whether each row has two more arrays after the pair: the likeliest tokens, int32 [n];
    their log-probabilities, float32 [n].
    Raises UserError for a max_length, batch_size or cache_dtype that is out of range."""
    *_, results = score_in_pieces(params, config, items, max_length, batch_size, cache_dtype,
                                  with_top)
    return results


def score_in_pieces(params: dict, config: GPTConfig, items: list, max_length: int = 0,
                    batch_size: int = 16, cache_dtype: str = 'auto',
                    with_top: bool = False) -> Iterator[list[list[tuple]]]:
    """Computes the same as score(), one call of the model after the other. After each call, yields
    the list of results, one for each item. Results that are not computed yet are zeros. The list
    that is yielded last is complete. Between two calls, the caller can do other work."""
    max_length = max_length or config.block_size
    if not 1 <= max_length <= config.block_size:
        raise UserError(f'max_length must be between 1 and {config.block_size}, the context of the '
                        f'model, not {max_length}')
    check_ranges({'batch_size': batch_size})
    check_cache_dtype(params, config, cache_dtype)

    # groups of rows that share their beginning: the rows of an item, unless one of them has several
    # windows; then each window is a group of its own
    results, groups = [], []
    for item in items:
        item_results, group = [], []
        for ids, start in item:
            if not 1 <= start <= len(ids) or min(ids) < 0 or max(ids) >= config.vocab_size:
                raise UserError(f'a row is (ids, start), with ids below {config.vocab_size} and a '
                                f'start from 1 to {len(ids)}, not {start}')
            arrays = [np.zeros(len(ids) - start, dtype)
                      for dtype in (np.float32, bool, np.int32, np.float32)]
            item_results.append(tuple(arrays if with_top else arrays[:2]))
            for first, scored, end in windows(len(ids), start, max_length):
                part = slice(scored - start, end - start)  # views: written in place
                group.append(Row(
                    list(ids[first:end]), scored - first, *[array[part] for array in arrays]))
        results.append(item_results)
        has_one_window_per_row = len(group) == len(item) > 0
        if has_one_window_per_row:
            groups.append(group)
        else:
            groups += [[row] for row in group]

    # the longest first, so that a batch has rows of about equal lengths
    groups.sort(key=longest_row, reverse=True)
    while groups:
        most = max(1, min(batch_size, batch_size * PIECE // longest_row(groups[0])))
        for _ in score_groups(params, config, groups[:most], most, cache_dtype, with_top):
            yield results
        groups = groups[most:]
    yield results


def longest_row(group: list[Row]) -> int:
    """Returns the number of tokens of the longest row of a group."""
    return max(len(row.ids) for row in group)


def windows(n_tokens: int, start: int, max_length: int) -> Iterator[tuple[int, int, int]]:
    """Yields the indices (first, scored, end) of each window of a text of n_tokens tokens. In a
    window the model reads tokens[first:end - 1], at most max_length tokens, and predicts
    tokens[scored:end]. Each of tokens[start:] is predicted in exactly one window. The last window
    begins earlier where it would otherwise be shorter than max_length (as in lm-eval). Example:
    windows(4, 1, 2) yields (0, 1, 3) and (1, 3, 4)."""
    while start < n_tokens:
        end = min(n_tokens, start + max_length)
        yield max(0, end - max_length - 1), start, end
        start = end


def score_groups(params: dict, config: GPTConfig, groups: list[list[Row]], most: int,
                 cache_dtype: str, with_top: bool) -> Iterator[None]:
    """Scores all rows of the groups, and writes the results into the Rows. Yields None after each
    piece of computation, so that the caller can do other work.

    groups: at most `most` groups. A group is a list of Rows. In each Row the tokens ids[start:] are
    scored. most: the largest number of rows that are computed together.

    First, the tokens that the rows of a group share are prefilled once for each group. Then the
    remaining tokens of the rows are fed in batches of at most `most` rows. The rows with the most
    remaining tokens come first. cache_dtype, with_top: as in score."""
    # a cache for the longest row, in one of few sizes
    longest = max(longest_row(group) for group in groups)
    n_slots = min(config.block_size, max(64, power_of_two(longest - 1)))
    on_cpu = all(device.platform == 'cpu' for device in devices_of(params))

    def new_cache(n_rows):
        cache = grow_cache(None, config=config, batch_size=n_rows, n_slots=n_slots,
                           dtype=cache_dtype, n_draft=0, as_bits=on_cpu)
        return commit(cache, params)

    # the shared tokens of each group; the last token before a scored one is fed with its row
    shared = []
    for group in groups:
        n_common = len(os.path.commonprefix([row.ids for row in group]))
        shared.append(min(n_common, min(row.start for row in group) - 1))
    cache = None
    if any(shared):
        held_B = np.array(filled(shared, most), np.int32)
        prefixes = [group[0].ids[:n] for group, n in zip(filled(groups, most), held_B)]
        tokens_BxP = right_padded(prefixes, 1)
        width = row_width(max(shared))
        cache = prefill_pieces(
            params, config, new_cache(len(held_B)), tokens_BxP, 0, held_B, width)

    # (group, number of tokens that the cache holds, row), the rows with the most other tokens first
    rows = []
    for b, group in enumerate(groups):
        for row in group:
            rows.append((b, shared[b], row))
    rows.sort(key=lambda item: item[1] - len(item[2].ids))

    # some rows at a time, each with a copy of its group's cache
    for i in range(0, len(rows), most):
        group_of_row, held, chosen = zip(*filled(rows[i:i + most], most))
        if cache:
            row_cache = select_rows(cache, np.array(group_of_row))
        else:
            row_cache = new_cache(len(chosen))
        yield from score_rows(params, config, row_cache, held, chosen, with_top)


def score_rows(params: dict, config: GPTConfig, cache: dict, held: tuple, rows: tuple,
               with_top: bool) -> Iterator[None]:
    """Computes the log-probability of each scored token of each Row. The tokens are fed to the
    model in pieces. Yields None after each piece, so that the caller can do other work. Writes the
    results into the arrays of the Rows at the end, after the last piece.

    held[r]: the number of tokens of row r that the cache already has; only the later tokens are
    fed. with_top: also writes the likeliest token at each position. Raises UserError if a
    log-probability is NaN."""
    # counted after the tokens that the cache holds: the number of tokens that are fed (all but the
    # row's last one), and the index of the first that predicts a scored token
    held_R = np.array(held, np.int32)
    fed_R = np.array([len(row.ids) - 1 - n for n, row in zip(held, rows)])
    first_R = np.array([row.start - 1 - n for n, row in zip(held, rows)])

    # the tokens that are fed, in pieces of one width, and one more as the last target
    n_fed = int(fed_R.max())
    width = row_width(n_fed)
    tails = [row.ids[n:] for n, row in zip(held, rows)]
    tail_RxM = right_padded(tails, width * ceil_div(n_fed, width) + 1)

    # the parameters that turn the last layer's output into logits
    tables = {name: p for name, p in params.items() if not name.startswith('h_')}
    n_scored = max(1, SCORED_AT_ONCE // len(rows))
    found = [np.zeros(tail_RxM.shape, dtype)
             for dtype in (np.float32, bool, np.int32, np.float32)]
    for i in range(0, n_fed, width):
        # feed a piece of all rows
        index_T = i + np.arange(width)
        position_RxT = np.where(index_T < fed_R[:, None], held_R[:, None] + index_T, PAD)
        x_RxTxD, cache = prefill(params, cache, tail_RxM[:, i:i + width],
                                 position_RxT.astype(np.int32), config=config, with_output=True)
        # score it, some positions at a time, from the first scored token on
        for j in range(i, min(i + width, n_fed), n_scored):
            if first_R.min() >= j + n_scored:
                continue
            end = min(j + n_scored, i + width)
            scores = score_targets(tables, x_RxTxD[:, j - i:j - i + n_scored],
                                   tail_RxM[:, j + 1:end + 1], config=config, with_top=with_top)
            for array_RxM, part in zip(found, jax.device_get(scores)):
                array_RxM[:, j:end] = part
        jax.block_until_ready(cache)  # as in prefill_pieces
        yield

    # write each row's part of the results
    for r, row in enumerate(rows):
        to = row.logprobs, row.is_likeliest, row.top, row.top_logprobs
        for array, array_RxM in zip(to, found):
            array[:] = array_RxM[r, first_R[r]:fed_R[r]]
        refuse_nan(np.isnan(row.logprobs))


@functools.partial(jax.jit, static_argnames=('config', 'with_top'))
def score_targets(tables: dict, x_BxTxD: Array, target_BxT: Array, *, config: GPTConfig,
                  with_top: bool = False) -> tuple:
    """Returns (the log-probability of each target, float32 [B, T]; whether the target is a
    likeliest token, bool [B, T]). With with_top, the tuple has two more elements: (the likeliest
    token, int32 [B, T]; its log-probability, float32 [B, T]).

    tables: the parameters outside of the layers. x_BxTxD: the last layer's output at the positions
    before the targets."""
    # the logits of all tokens, then those of the targets
    model = GPT(config).bind({'params': tables})
    logits_BxTxV = model.head(model.ln_f(x_BxTxD), training=False)
    target_logit_BxT = jnp.take_along_axis(logits_BxTxV, target_BxT[..., None], axis=-1)[..., 0]
    logprob_BxT = -cross_entropy(logits_BxTxV, target_BxT)
    is_likeliest_BxT = target_logit_BxT >= logits_BxTxV.max(-1)
    scores: tuple[Array, ...] = logprob_BxT, is_likeliest_BxT
    if with_top:
        top_BxT = logits_BxTxV.argmax(-1).astype(jnp.int32)
        scores = *scores, top_BxT, -cross_entropy(logits_BxTxV, top_BxT)
    return tuple(shard(score_BxT, None, None) for score_BxT in scores)


def right_padded(rows: list, width: int = 0) -> np.ndarray:
    """Returns lists of tokens as int32 [B, T], padded with zeros at the end. T is the length of the
    longest list, or `width` if that is more."""
    lengths = [len(row) for row in rows]
    padded = np.zeros((len(rows), max([width, *lengths])), np.int32)
    for b, row in enumerate(rows):
        padded[b, :len(row)] = row
    return padded


# -----------------------------------------------------------------------------
# sizes of arrays: only a few different ones, because each shape compiles a program of its own

def power_of_two(n: int) -> int:
    """Returns the least power of two that is at least n."""
    return 1 << (int(n) - 1).bit_length()


def four_per_octave(n: int, least: int) -> int:
    """Returns the smallest allowed size that is at least n. The allowed sizes are multiples of
    `least`, a power of two. From one power of two to the next there are at most four of these
    sizes. With least=4 they are 4, 8, 12, ..., 32, 40, 48, 56, 64, 80, 96, ..."""
    step = max(least, power_of_two(n) // 8)
    return ceil_div(n, step) * step


def piece_length(n_tokens: int) -> int:
    """Returns the width of the pieces in which prompts are prefilled: 8, 16, 32, 64, 128 or PIECE.
    Short prompts have narrow pieces, because padding is computed, too. There are only six widths,
    because a program is compiled for each.

    n_tokens: the length of the longest prompt, without the tokens that the cache holds already."""
    if n_tokens > 256:
        return PIECE
    return min(128, max(8, power_of_two(n_tokens)))


def row_width(n_tokens: int) -> int:
    """Returns the width of the pieces in which score() feeds rows to the model. All pieces of a row
    have the same width, at most PIECE.

    n_tokens: how many tokens of the longest row are fed. These tokens are divided into as few
    pieces as PIECE allows. The width of the pieces is rounded up to a size of four_per_octave. Only
    a few such sizes exist, so few programs are compiled, one for each width. Rounding up to the
    next power of two instead could double the work for a short row."""
    # as few pieces as PIECE allows, of equal widths, rounded up to the sizes
    return four_per_octave(ceil_div(n_tokens, ceil_div(n_tokens, PIECE)), least=4)


def filled(rows: list, most: int) -> list:
    """Returns the list `rows` with copies of its first element appended. The number of elements is
    then a power of two, or `most` if that is less."""
    n_rows = min(most, power_of_two(len(rows)))
    return rows + rows[:1] * (n_rows - len(rows))


def round_up_slots(n: int) -> int:
    """Returns a size for a KV cache or a token buffer: the first of 512, 2048, 8192, ... that is at
    least n."""
    n_slots = 512
    while n_slots < n:
        n_slots *= 4
    return n_slots


def choose_slots(needed: int, longest: int, block_size: int) -> int:
    """Returns the number of slots to give to a KV cache. needed: the number of slots that the cache
    needs now. longest: the number of slots that it needs at the end.

    Rounds up `longest` by four_per_octave, and `needed` by round_up_slots. If the rounded `longest`
    is at most twice the rounded `needed`, returns the rounded `longest`, so that the cache never
    has to grow. Otherwise returns the rounded `needed`, and the cache grows later. The result is at
    most block_size."""
    # a cache that never grows need not be a power of two
    n_slots = round_up_slots(needed)
    at_end = four_per_octave(min(longest, block_size), least=32)
    if at_end <= 2 * n_slots:
        n_slots = at_end
    return min(block_size, n_slots)
