"""Dropout masks that do not depend on the number of devices, micro-batches or tiles.

Whether an element is dropped depends on the key of its sequence, and on the element's index in the
whole array of the sequence. dropout_keys makes the key from the seed, the layer and seq_id. (seq_id
is the number of the sequence in the run, see make_batch in train_jax.py.) On several devices, a
sequence has the same key as on one device, and each element has the same index. Most indices come
from flat_index, which XLA shards together with the array. Chunked attention computes its
probabilities in tiles. For each element of a tile, count_probs (fused_attention.py) computes the
index in the whole array."""
import jax
import jax.numpy as jnp


def dropout(module, x, call):
    """Computes nn.Dropout of x [B, ...] in the flax module `module`, with the rate
    module.config.dropout. call: a Call or None. Dropout is off, and x is returned unchanged, if the
    rate is 0, if `call` is None, or if call.seq_id_B is None, as in evaluation."""
    key_B = dropout_keys(module, call)
    if key_B is None:
        return x
    return hash_dropout(x, module.config.dropout, key_B, flat_index(x.shape[1:]))


def dropout_keys(module, call):
    """Returns one dropout key per sequence, fold_in(key, call.seq_id_B[b]). `key` is the module's
    own; it depends on the seed and the module's path. Returns None if dropout is off, see
    dropout(). Masks do not depend on micro-batching or sharding, so 1 and 8 devices give the same
    loss curve."""
    if call is None or call.seq_id_B is None or module.config.dropout == 0:
        return None
    # the key depends on the seed and the module's path; the ids differ from iteration to iteration
    key = module.make_rng('dropout')
    return jax.vmap(jax.random.fold_in, (None, 0))(key, call.seq_id_B)


def hash_dropout(x, rate, key_B, counter):
    """Computes jnp.where(bernoulli(1 - rate), x / (1 - rate), 0) for x [B, ...], from a
    counter-based hash.

    The mask is a hash of (the sequence's key, counter), so tiling and sharding do not change it.
    counter: the number of each element, uint32 [...], usually flat_index(x.shape[1:]). See
    docs/lab_log.md#dropout."""
    # hash the two words of each sequence's key with the counter: 32 bits for each element
    axes_of_x = (1,) * (x.ndim - 1)
    words = jax.random.key_data(key_B).reshape(len(x), -1, *axes_of_x)
    bits = mix_bits(mix_bits(counter + words[:, 0]) ^ words[:, 1])

    # a share 1 - rate of all 32-bit numbers is below `end`. In bfloat16 the factor 1 / (1 - rate)
    # would be rounded by up to 0.2%
    scaled = x.astype(jnp.float32) / (1 - rate)
    end = jnp.uint32(min(round((1 - rate) * 2**32), 2**32 - 1))
    return jnp.where(bits < end, scaled, 0).astype(x.dtype)


def mix_bits(x):
    """Hashes uint32 to uint32, bijectively (lowbias32, https://nullprogram.com/blog/2018/07/31)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7feb352d)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846ca68b)
    return x ^ (x >> 16)


def flat_index(shape):
    """Returns jnp.arange(prod(shape)).reshape(shape) in uint32, modulo 2**32."""
    index = jnp.uint32(0)
    for axis, size in enumerate(shape):
        index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    return index
