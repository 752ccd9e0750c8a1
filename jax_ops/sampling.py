"""Keeps the largest logits, and draws tokens from a large vocabulary on CPUs.

On a CPU, random noise for all tokens can take as long as several layers (docs/lab_log.md#sampling).
Usually top_k or another control excludes all tokens but some of the likeliest ones, the candidates.
Then only the candidates get noise. The tokens that are drawn are the same, because the noise of a
token depends only on the key and on the token's id.

The letters of shapes are those of jax_generate.py. In addition, C is N_CANDIDATES, the number of
candidates of a row."""
import jax
import jax.numpy as jnp
import numpy as np
NO_TOKEN = np.iinfo(np.int32).max  # sampled in place of a token id if the logits are NaN
N_CANDIDATES = 256
LARGE = 16 * N_CANDIDATES  # a smaller vocabulary has no candidates


def keep_largest(logits_BxV, weight_BxV, amount, candidate_BxC=None):
    """Keeps the largest logits of each row and sets all others to -inf.

    Every token has a weight, weight_BxV: 1 for top-k, its probability for top-p. Going from the
    largest logit down, tokens are kept until the weights of the kept tokens sum to at least
    `amount` (k, or p). Tokens with the same logit as the last kept token are kept, too.

    amount: a number, or an array [B, 1] with 0 for rows that keep all tokens. candidate_BxC: the
    result of find_candidates. If the candidates include the last kept token of every row, the
    threshold is searched among the candidates only, which is faster."""
    def search():
        return least_kept(logits_BxV, weight_BxV, amount)

    if candidate_BxC is None:
        least_Bx1 = search()
    else:
        logits_BxC, weight_BxC = (
            jnp.take_along_axis(x_BxV, candidate_BxC, axis=1) for x_BxV in (logits_BxV, weight_BxV))
        least_Bx1 = least_kept(logits_BxC, weight_BxC, amount)
        is_found_Bx1 = (amount == 0) | (logits_BxC[:, -1:] < least_Bx1)
        least_Bx1 = jax.lax.cond(is_found_Bx1.all(), lambda: least_Bx1, search)
    return jnp.where(logits_BxV < least_Bx1, -jnp.inf, logits_BxV)


def least_kept(logits_BxV, weight_BxV, amount):
    """Returns the least logit of each row that keep_largest keeps, [B, 1]; NaN, below which no
    logit is, if it keeps all.

    A sort would find this threshold, but is slow on XLA:CPU (docs/lab_log.md#sampling). Instead the
    threshold's 32 bits are found one after the other, from the highest. For that, floats become
    unsigned integers in the same order. Each bit is set in the threshold found so far, as a trial.
    The bit stays set if the weights of all tokens at or above this trial threshold sum to at least
    `amount`."""
    # integers in the order of the floats: the bits of a positive float grow with it, and get the
    # highest bit; those of a negative float shrink when it grows, and are inverted
    sign = jnp.uint32(1 << 31)
    bits_BxV = jax.lax.bitcast_convert_type(logits_BxV, jnp.uint32)
    order_BxV = jnp.where(bits_BxV >= sign, ~bits_BxV, bits_BxV | sign)

    # the threshold: t is the largest integer so far that keeps enough weight, i its next lower bit
    def find_bit(i, t_Bx1):
        higher_Bx1 = t_Bx1 | (sign >> jnp.uint32(i))
        weight_Bx1 = jnp.where(order_BxV >= higher_Bx1, weight_BxV, 0).sum(-1, keepdims=True)
        return jnp.where(weight_Bx1 >= amount, higher_Bx1, t_Bx1)

    t_Bx1 = jax.lax.fori_loop(0, 32, find_bit, jnp.zeros((len(logits_BxV), 1), jnp.uint32))
    # back to a float; if all together weigh less than `amount` (rounding), t stays 0, and its float
    # is NaN
    least_bits_Bx1 = jnp.where(t_Bx1 >= sign, t_Bx1 ^ sign, ~t_Bx1)
    return jax.lax.bitcast_convert_type(least_bits_Bx1, jnp.float32)


def find_candidates(logits_BxV, key_B):
    """Returns the ids of each row's N_CANDIDATES largest logits, int32 [B, C], largest first.
    Returns None if the vocabulary is small, or if gumbel_of cannot compute the noise of keys such
    as key_B."""
    is_known = (jax.random.key_impl(key_B) == 'threefry2x32'
                and jax.config.jax_threefry_partitionable and threefry() is not None)
    if not is_known or logits_BxV.shape[1] < LARGE:
        return None
    return jax.lax.top_k(logits_BxV, N_CANDIDATES)[1]


def draw_by_noise(logits_BxC, noise_BxC, id_BxC, is_greedy):
    """Returns one id of each row, int32 [B]: that of the largest sum of logit and noise, or of the
    largest logit in a greedy row. With Gumbel noise this draws from the softmax of the row's
    logits. A row of NaN gets NO_TOKEN.

    id_BxC: the id of each logit, or [C] if all rows have the same ids.
    is_greedy: bool [B, 1], or None if all rows get their noise."""
    noisy_BxC = logits_BxC + noise_BxC
    if is_greedy is not None:
        noisy_BxC = jnp.where(is_greedy, logits_BxC, noisy_BxC)
    # argmax, by two plain reductions, which are faster on XLA:CPU
    is_max_BxC = noisy_BxC == noisy_BxC.max(-1, keepdims=True)
    return jnp.where(is_max_BxC, id_BxC, NO_TOKEN).min(-1)


def draw_of_candidates(logits_BxV, key_B, candidate_BxC, is_greedy, *, otherwise):
    """Draws a token for each row from the row's candidates, if this is possible in every row: if
    all other tokens are excluded, or the row is greedy. Otherwise returns otherwise() for all rows.
    Returns int32 [B].

    logits_BxV: -inf for excluded tokens. is_greedy: bool [B, 1], or None if no row is greedy."""
    logits_BxC = jnp.take_along_axis(logits_BxV, candidate_BxC, axis=1)
    is_enough_Bx1 = logits_BxC[:, -1:] == -jnp.inf
    if is_greedy is not None:
        is_enough_Bx1 |= is_greedy

    def draw():
        noise_BxC = jax.vmap(gumbel_of, (0, 0, None))(key_B, candidate_BxC, logits_BxV.shape[1])
        return draw_by_noise(logits_BxC, noise_BxC, candidate_BxC, is_greedy)

    return jax.lax.cond(is_enough_Bx1.all(), draw, otherwise)


def threefry():
    """Returns the hash function of jax's random bits; None if this jax does not have it."""
    try:
        from jax.extend.random import threefry2x32_p
    except ImportError:
        return None
    return threefry2x32_p.bind


def gumbel_of(key, id_C, n):
    """Returns jax.random.gumbel(key, [n], mode='high')[id_C], without computing the other
    elements."""
    # jax draws uniform numbers [2, n]. The random bits of an element are a hash of its index
    index_2xC = jnp.stack([id_C, id_C + n]).astype(jnp.uint32)
    first, second = threefry()(*jax.random.key_data(key), jnp.zeros_like(index_2xC), index_2xC)
    # 23 bits are the mantissa of a number from 1 to 2
    mantissa_2xC = (first ^ second) >> 9
    bits_of_one = jnp.uint32(0x3f800000)
    high_C, low_C = jax.lax.bitcast_convert_type(bits_of_one | mantissa_2xC, jnp.float32) - 1
    # a small number gets 23 more bits
    limits = jnp.finfo(jnp.float32)
    x_C = jnp.where(high_C >= 0.5, high_C, high_C + 2.0 ** -limits.nmant * low_C + limits.tiny)
    return -jnp.log(-jnp.log1p(-x_C))
