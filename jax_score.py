"""Token ids -> the log-probabilities of given tokens: what evaluations and TextModel.logprobs are
made of.

Letters of the shapes are jax_transformer.py's; in addition R is rows of some items, N tokens after
those that the rows of an item share, P tokens that they share.
"""
import functools
import os
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_cache import CACHE_DTYPES, PAD, grow_caches, select_rows
from jax_flags import UserError, ceil_div, check_choice, check_ranges
from jax_generate import commit, prefill, prefill_pieces
from jax_ops.decode_weights import devices_of
from jax_ops.sharding import shard
from jax_ops.vocabulary import lm_logits
from jax_sizes import PIECE, filled, power_of_two, row_width
from jax_transformer import GPT, cross_entropy

SCORED_AT_ONCE = 1024  # positions whose logits are materialized at a time


class Row(NamedTuple):
    """A sequence of which ids[start:] are scored."""
    ids: list
    start: int  # at least 1
    logprobs: np.ndarray  # float32 [len(ids) - start], to be written
    is_likeliest: np.ndarray  # bool, likewise


def score(params, config, items, *, max_length=0, batch_size=16, cache_dtype='auto'):
    """Returns the natural log-probabilities of given tokens: for each item a list of (float32 [n],
    bool [n]: no token is likelier), one pair per row.

    params: as decoding reads them.
    items: lists of rows (ids, start), of which ids[start:] are scored, start at least 1. What the
    rows of an item begin with in common is computed once, and they share its KV cache.
    max_length: the most tokens of context, the config's block_size if 0; a longer row is split by
    windows().
    batch_size: rows of up to PIECE tokens that are computed together, fewer of longer ones.
    Raises UserError for what makes no sense."""
    max_length = max_length or config.block_size
    if not 1 <= max_length <= config.block_size:
        raise UserError(f'max_length must be between 1 and {config.block_size}, the context of the '
                        f'model, not {max_length}')
    check_ranges({'batch_size': batch_size})
    check_choice('cache_dtype', cache_dtype, ('auto', *CACHE_DTYPES))

    # groups of rows that share their beginning: those of an item, unless it has rows in several
    # windows
    results, groups = [], []
    for item in items:
        item_results, group = [], []
        for ids, start in item:
            logprobs = np.zeros(len(ids) - start, np.float32)
            is_likeliest = np.zeros(len(ids) - start, bool)
            item_results.append((logprobs, is_likeliest))
            for first, scored, end in windows(len(ids), start, max_length):
                part = slice(scored - start, end - start)  # views: written in place
                group.append(Row(
                    list(ids[first:end]), scored - first, logprobs[part], is_likeliest[part]))
        results.append(item_results)
        has_one_window_per_row = len(group) == len(item)
        if has_one_window_per_row:
            groups.append(group)
        else:
            groups += [[row] for row in group]

    # the longest first, so that a batch has rows of about equal lengths
    groups.sort(key=longest_row, reverse=True)
    while groups:
        most = max(1, min(batch_size, batch_size * PIECE // longest_row(groups[0])))
        score_groups(params, config, groups[:most], most, cache_dtype)
        groups = groups[most:]
    return results


def longest_row(group):
    """Returns the number of tokens of the longest row of a group."""
    return max(len(row.ids) for row in group)


def windows(n_tokens, start, max_length):
    """Yields (first, scored, end): tokens scored .. end - 1 are predicted from those from `first`
    on, at most max_length. Each token from `start` on is predicted once, and the last window is
    full, as in lm-eval."""
    while start < n_tokens:
        end = min(n_tokens, start + max_length)
        yield max(0, end - max_length - 1), start, end
        start = end


def score_groups(params, config, groups, most, cache_dtype):
    """Writes the results of at most `most` groups of Rows.

    The tokens that the rows of a group share are prefilled once. Then `most` rows at a time, those
    with equally many other tokens together, are fed, and scored from their starts on."""
    # A cache for the longest row, in one of few sizes.
    longest = max(longest_row(group) for group in groups)
    n_slots = min(config.block_size, max(64, power_of_two(longest - 1)))
    on_cpu = all(device.platform == 'cpu' for device in devices_of(params))

    def new_cache(n_rows):
        caches = grow_caches((), configs=(config,), batch_size=n_rows, n_slots=n_slots,
                             dtype=cache_dtype, n_draft=0, as_bits=on_cpu)
        return commit(caches, params)[0]

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

    # (group, tokens that the cache holds, row), those with the most other tokens first
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
        score_rows(params, config, row_cache, held, chosen)


def score_rows(params, config, cache, held, rows):
    """Writes the results of Rows of which the cache holds the first held[r] tokens each."""
    # counted from the tokens that the cache holds: how many are fed, all but a row's last one, and
    # the first that predicts a scored one
    held_R = np.array(held, np.int32)
    fed_R = np.array([len(row.ids) - 1 - n for n, row in zip(held, rows)])
    first_R = np.array([row.start - 1 - n for n, row in zip(held, rows)])

    # the tokens that are fed, in pieces of one width, and one more as the last target
    n_fed = int(fed_R.max())
    width = row_width(n_fed)
    tails = [row.ids[n:] for n, row in zip(held, rows)]
    tail_RxN = right_padded(tails, width * ceil_div(n_fed, width) + 1)

    # what turns the last layer's output into logits
    tables = {name: p for name, p in params.items() if not name.startswith('h_')}
    n_scored = max(1, SCORED_AT_ONCE // len(rows))
    logprob_RxN = np.zeros(tail_RxN.shape, np.float32)
    likeliest_RxN = np.zeros(tail_RxN.shape, bool)
    for i in range(0, n_fed, width):
        # feed a piece of all rows
        index_T = i + np.arange(width)
        position_RxT = np.where(index_T < fed_R[:, None], held_R[:, None] + index_T, PAD)
        x_RxTxD, cache = prefill(params, cache, tail_RxN[:, i:i + width],
                                 position_RxT.astype(np.int32), config=config, with_output=True)
        # score it, some positions at a time, from the first scored token on
        for j in range(i, min(i + width, n_fed), n_scored):
            if first_R.min() >= j + n_scored:
                continue
            end = min(j + n_scored, i + width)
            scores = score_targets(tables, x_RxTxD[:, j - i:j - i + n_scored],
                                   tail_RxN[:, j + 1:end + 1], config=config)
            logprob_RxN[:, j:end], likeliest_RxN[:, j:end] = jax.device_get(scores)
        jax.block_until_ready(cache)  # as in prefill_pieces

    # each row has its part of them
    for r, row in enumerate(rows):
        row.logprobs[:] = logprob_RxN[r, first_R[r]:fed_R[r]]
        row.is_likeliest[:] = likeliest_RxN[r, first_R[r]:fed_R[r]]


@functools.partial(jax.jit, static_argnames='config')
def score_targets(tables, x_BxTxD, target_BxT, *, config):
    """Returns (the log-probability of each target [B, T]; whether no token is likelier), from the
    last layer's output."""
    def head(model, x_BxTxD):
        return lm_logits(model.ln_f(x_BxTxD), model.lm_head_VxD, config.logit_cap)

    # Logits of all tokens, of which those of the targets are taken.
    logits_BxTxV = GPT(config).apply({'params': tables}, x_BxTxD, method=head)
    target_logit_BxT = jnp.take_along_axis(logits_BxTxV, target_BxT[..., None], axis=-1)[..., 0]
    logprob_BxT = -cross_entropy(logits_BxTxV, target_BxT)
    is_likeliest_BxT = target_logit_BxT >= logits_BxTxV.max(-1)
    return shard(logprob_BxT, None, None), shard(is_likeliest_BxT, None, None)


def right_padded(rows, width=0):
    """Returns lists of tokens as int32 [B, T], with zeros at their ends; T is the length of the
    longest, at least width."""
    lengths = [len(row) for row in rows]
    padded = np.zeros((len(rows), max([width, *lengths])), np.int32)
    for b, row in enumerate(rows):
        padded[b, :len(row)] = row
    return padded
