"""The KV cache: which token is in which slot, how it is written, read, made and enlarged.

THE SLOT RULE. A layer's cache has S slots. The token at position p is in slot p, or, where
has_ring_cache, in slot p % S: a ring buffer, which is the same until the ring is full. So a slot
tells the position that it holds, and the mask that training has (attention_mask: causal, and the
layer's window) hides what a query must not see: slots that are not written yet hold later
positions than any query.

    position     0  1  2  3  4  5  6  7  8           S = 4, a ring; the newest token is at 8
    slot         0  1  2  3  0  1  2  3  0           slots hold the positions 8 5 6 7

Prompts of different lengths are padded on the right and need no bookkeeping: a padding token has
the position PAD, which is later than every query (masked) and outside of the cache (not written).

A layer's cache is a dict {name: array [B, G, S, K]}, usually of 'k' and 'v'; latent attention has
'latent' and 'rope'. int8 and float8 caches have a scale per vector, {name_scale: [B, G, S]}. Heads
come before slots, because a head's keys are then one piece of memory (docs/lab_log.md#kv-cache).

Letters of the shapes are those of jax_transformer.py. `config` is a GPTConfig.
"""
import functools

import jax
import jax.numpy as jnp

from jax_ops.matmul import quantize
from jax_ops.sharding import shard
from jax_sizes import PIECE

CACHE_DTYPES = {
    'float32': jnp.float32, 'bfloat16': jnp.bfloat16, 'float16': jnp.float16,
    'int8': jnp.int8, 'float8': jnp.float8_e4m3fn}
# On CPUs floats of these dtypes are stored as their bits: XLA:CPU would compute with copies in
# float32 of the whole cache (docs/lab_log.md#kv-cache)
STORED_AS = {'bfloat16': 'uint16', 'float8_e4m3fn': 'uint8'}
PAD = 2**30  # position of a padding token: after every query, and outside of every cache


# -----------------------------------------------------------------------------
# one layer's cache in a forward pass

def has_ring_cache(config, layer_type):
    """Tells whether a layer's cache is a ring of its attention span.

    It is where positions may exceed the span, so that keys are overwritten: in layers with a
    window or chunks, and with RoPE, whose positions continue past block_size."""
    return bool(config.span_limits(layer_type)) or config.position == 'rope'


def update_kv_cache(config, layer_type, cache, new_kv, position_BxT):
    """Writes the keys and values of this call, new_kv {name: [B, T, G, K]}, to a layer's cache.

    Returns (what the queries attend to, {name: [B, S, G, K]}; the positions of these keys [B, S];
    the new cache). Without a cache the queries attend to the keys of this call."""
    if cache is None:
        return new_kv, position_BxT, None
    if has_ring_cache(config, layer_type):
        return update_ring_cache(config, layer_type, cache, new_kv, position_BxT)
    # slot == position
    cache = write_cache(cache, new_kv, position_BxT)
    n_slots = cache[next(iter(new_kv))].shape[2]
    return read_cache(cache, config.dtype), jnp.arange(n_slots)[None], cache


def update_ring_cache(config, layer_type, cache, new_kv, position_BxT):
    """Does the same as update_kv_cache in a ring: slot == position % S.

    A token is overwritten once it is out of the attention span. A cache of fewer slots than the
    span holds the first S positions only."""
    B, T = next(iter(new_kv.values())).shape[:2]
    S = next(iter(cache.values())).shape[2]
    span = config.attention_span(layer_type)
    position_BxT = jnp.broadcast_to(position_BxT, (B, T))

    def positions_held(last_Bx1):
        """The position in each slot when the newest token is at `last`, [B, S]; PAD if empty."""
        p_BxS = last_Bx1 - (last_Bx1 - jnp.arange(S)) % S
        return jnp.where(p_BxS < 0, PAD, p_BxS)

    # of a call longer than the ring, only the last S tokens are written
    last_Bx1 = jnp.where(position_BxT < PAD, position_BxT, -1).max(1, keepdims=True)
    stays_BxT = (position_BxT < PAD) & (position_BxT > last_Bx1 - S)
    out_of_range = S
    new_cache = write_cache(cache, new_kv, jnp.where(stays_BxT, position_BxT % S, out_of_range))

    # one token, or enough slots to spare: no query needs a key that this call has overwritten
    if T - 1 + span <= S or S < span:
        return read_cache(new_cache, config.dtype), positions_held(last_Bx1), new_cache

    # else earlier queries of this call may need keys that its later tokens have overwritten:
    # they attend to the old cache and the new keys, side by side
    kv = {}
    for name, x_BxSxGxK in read_cache(cache, config.dtype).items():
        kv[name] = jnp.concatenate([x_BxSxGxK, new_kv[name]], axis=1)
    old_position_BxS = positions_held(position_BxT[:, :1] - 1)
    return kv, jnp.concatenate([old_position_BxS, position_BxT], axis=1), new_cache


def write_cache(cache, new_kv, slot_BxT):
    """Returns a layer's cache with new_kv {name: [B, T, G, K]} in the given slots.

    Slots that are out of range are ignored. int8 and float8 caches are quantized vector by
    vector."""
    new_cache = {}
    for name, x_BxTxGxK in new_kv.items():
        slots = jnp.broadcast_to(slot_BxT, x_BxTxGxK.shape[:2])
        scale_name = f'{name}_scale'
        if scale_name in cache:
            x_BxTxGxK, scale_BxTxG = quantize(x_BxTxGxK, held_dtype(cache[name]))
            new_cache[scale_name] = scatter_to_slots(cache[scale_name], scale_BxTxG, slots)
        new_cache[name] = scatter_to_slots(cache[name], x_BxTxGxK, slots)
    return new_cache


def read_cache(cache, dtype):
    """Returns all slots of a layer's cache, {name: [B, S, G, K]}, in dtype."""
    kv = {}
    for name, x_BxGxSxK in cache.items():
        if name.endswith('_scale'):
            continue
        x_BxGxSxK = jax.lax.bitcast_convert_type(x_BxGxSxK, held_dtype(x_BxGxSxK))
        if f'{name}_scale' in cache:
            x_BxGxSxK = x_BxGxSxK.astype(jnp.float32) * cache[f'{name}_scale'][..., None]
        kv[name] = x_BxGxSxK.astype(dtype).swapaxes(1, 2)
    return kv


def held_dtype(cache):
    """Returns the dtype of what an array of the cache holds: that of floats stored as bits."""
    for held, stored in STORED_AS.items():
        if stored == cache.dtype:
            return jnp.dtype(held)
    return jnp.dtype(cache.dtype)


def scatter_to_slots(cache_BxGxS, x_BxTxG, slot_BxT):
    """Computes cache.at[b, :, slot].set(x) in the cache's dtype; K may follow the last axis of
    both.

    Slots out of range are ignored. Two things are for the compilers:
    - Each head is indexed, too: otherwise XLA:TPU stores the cache with heads next to K, and copies
      all of it before and after a loop of decoding.
    - XLA:CPU lowers a scatter to one slot to an update that is fused into every reader and copies
      the cache. Writing the vector twice, once out of range, keeps it a scatter."""
    x_BxTxG = x_BxTxG.astype(held_dtype(cache_BxGxS))
    x_BxTxG = jax.lax.bitcast_convert_type(x_BxTxG, cache_BxGxS.dtype)
    if slot_BxT.size == 1:
        x_BxTxG = jnp.concatenate([x_BxTxG, x_BxTxG], axis=1)
        out_of_range = jnp.full_like(slot_BxT, cache_BxGxS.shape[2])
        slot_BxT = jnp.concatenate([slot_BxT, out_of_range], axis=1)
    slot_BxTxG = jnp.broadcast_to(slot_BxT[..., None], x_BxTxG.shape[:3])

    def write(cache_S, x_T, slot_T):
        return cache_S.at[slot_T].set(x_T, mode='drop')

    write_heads = jax.vmap(write, (0, 1, 1))
    return jax.vmap(write_heads)(cache_BxGxS, x_BxTxG, slot_BxTxG)


# -----------------------------------------------------------------------------
# the caches of all layers: their sizes, new ones, larger ones

def cache_entry_shapes(config):
    """Returns {name: (heads, width)} of what a layer's cache holds per token."""
    if config.mla:
        return {'latent': (1, config.mla.kv_rank), 'rope': (1, config.mla.rope_dim)}
    return {'k': (config.kv_heads, config.head_width), 'v': (config.kv_heads, config.head_width)}


def count_slots(config, layer_type, n_slots):
    """Returns the number of slots of a layer's cache: n_slots, at most its attention span.

    A ring of 2,048 slots or more has PIECE more: for a piece of a prompt update_ring_cache would
    otherwise put the old cache and the new keys side by side, a copy of the cache."""
    span = config.attention_span(layer_type)
    if has_ring_cache(config, layer_type) and n_slots >= span >= 2048:
        return span + PIECE
    return min(span, n_slots)


def cache_bytes(config, n_positions, dtype='auto'):
    """Returns the bytes of the KV cache for one sequence of n_positions."""
    itemsize = CACHE_DTYPES[config.dtype if dtype == 'auto' else dtype].dtype.itemsize
    scale_bytes = 4 if itemsize == 1 else 0
    bytes_per_token = 0
    for heads, width in cache_entry_shapes(config).values():
        bytes_per_token += heads * (width * itemsize + scale_bytes)
    total_slots = 0
    for i in range(config.n_layer):
        layer_type, _ = config.layer(i)
        total_slots += count_slots(config, layer_type, n_positions)
    return bytes_per_token * total_slots


def init_cache(config, batch_size, n_slots, dtype='auto', n_draft=0, *, as_bits=False):
    """Returns an empty KV cache, {layer: {name: [B, G, S, K]}}; see the slot rule.

    A layer has as many slots as count_slots says; padding must be marked as PAD.
    dtype: one of CACHE_DTYPES, or 'auto' for the config's.
    n_draft: the number of tokens per step that may be rejected and fed again. A ring has as many
    slots more: a rejected draft would otherwise overwrite a key that is still in the window.
    as_bits: whether to store bfloat16 and float8 as unsigned integers, see STORED_AS."""
    dtype = CACHE_DTYPES[config.dtype if dtype == 'auto' else dtype]
    stored = STORED_AS.get(dtype.dtype.name, dtype) if as_bits else dtype
    is_quantized = dtype.dtype.itemsize == 1
    # on a mesh a device keeps its own heads; latents, which all heads share, are replicated
    heads_axis = None if config.mla else 'tensor'

    def init_layer(layer_type):
        n = count_slots(config, layer_type, n_slots) + n_draft
        cache = {}
        for name, (heads, width) in cache_entry_shapes(config).items():
            cache[name] = jnp.zeros((batch_size, heads, n, width), stored)
            if is_quantized:
                cache[f'{name}_scale'] = jnp.zeros((batch_size, heads, n), jnp.float32)
        for name, x in cache.items():
            cache[name] = shard(x, None, heads_axis, *[None] * (x.ndim - 2))
        return cache

    return {f'h_{i}': init_layer(config.layer(i)[0]) for i in range(config.n_layer)}


@functools.partial(
    jax.jit, static_argnames=('configs', 'batch_size', 'n_slots', 'dtype', 'n_draft', 'as_bits'))
def grow_caches(caches, *, configs, batch_size, n_slots, dtype, n_draft, as_bits):
    """Returns copies of KV caches, one per config, with n_slots slots; new ones for ().

    The caches have not wrapped around yet, so that every token keeps its slot."""
    larger = tuple(
        init_cache(config, batch_size, n_slots, dtype, n_draft, as_bits=as_bits)
        for config in configs)
    if not caches:
        return larger

    def copy(to, cache):
        return jax.lax.dynamic_update_slice(to, cache, [0] * cache.ndim)

    return jax.tree.map(copy, larger, caches)


@jax.jit
def select_rows(cache, rows_B):
    """Returns a cache with rows_B of its sequences."""
    return jax.tree.map(lambda x: x[rows_B], cache)
