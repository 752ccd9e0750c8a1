"""Dropout masks that do not depend on how many devices, micro-batches or tiles compute them.

An element is kept or dropped by the key of its sequence, which dropout_keys makes of the seed, the
layer and seq_id, the number of the sequence in the run (make_batch in train_jax.py), and by its
index in the array that one device would have. A shard has the same keys, and the indices of its
part: XLA shards flat_index with the array, and kernels of attention number their elements from the
first of their tile (count_probs in attention.py)."""
import jax
import jax.numpy as jnp


def dropout(module, x, call):
    """nn.Dropout of x [B, ...] in a module, where the Call has it on."""
    key_B = dropout_keys(module, call)
    if key_B is None:
        return x
    return hash_dropout(x, module.config.dropout, key_B, flat_index(x.shape[1:]))


def dropout_keys(module, call):
    """One dropout key per sequence, fold_in(key, seq_id_B[b]); None where dropout is off. Masks do
    not depend on micro-batching or sharding, so 1 and 8 devices give the same loss curve."""
    if call is None or call.seq_id_B is None or module.config.dropout == 0:
        return None
    # made of the seed and the path of the module; the iteration enters through the ids
    key = module.make_rng('dropout')
    return jax.vmap(jax.random.fold_in, (None, 0))(key, call.seq_id_B)


def hash_dropout(x, rate, key_B, counter):
    """jnp.where(bernoulli(1 - rate), x / (1 - rate), 0) for x [B, ...], from a counter-based hash.

    The mask is a hash of (the sequence's key, counter), so tiling and sharding do not change it;
    counter numbers the elements, uint32 [...], usually flat_index(x.shape[1:]). See
    docs/lab_log.md#dropout."""
    # the two words of each sequence's key, hashed with the counter, are 32 bits for each element
    axes_of_x = (1,) * (x.ndim - 1)
    words = jax.random.key_data(key_B).reshape(len(x), -1, *axes_of_x)
    bits = mix_bits(mix_bits(counter + words[:, 0]) ^ words[:, 1])

    # a share 1 - rate of all numbers of 32 bits is below this one; bfloat16 would round
    # 1 / (1 - rate) by up to 0.2%
    scaled = x.astype(jnp.float32) / (1 - rate)
    end = jnp.uint32(min(round((1 - rate) * 2**32), 2**32 - 1))
    return jnp.where(bits < end, scaled, 0).astype(x.dtype)


def mix_bits(x):
    """Hashes uint32 to uint32, bijectively (lowbias32, https://nullprogram.com/blog/2018/07/31)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7feb352d)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846ca68b)
    return x ^ (x >> 16)


def flat_index(shape):
    """jnp.arange(prod(shape)).reshape(shape) in uint32, modulo 2**32."""
    index = jnp.uint32(0)
    for axis, size in enumerate(shape):
        index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    return index
