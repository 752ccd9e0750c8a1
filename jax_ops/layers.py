"""Runs all layers as one loop, with gradient checkpointing, and maps a function over chunks of
positions."""
import functools

import jax
import jax.numpy as jnp

from jax_ops.sharding import current_mesh, gather_positions

# how experts.py computes mixtures of experts. loop: one block of rows of an expert after the other.
# batched: all blocks in batched matmuls, with the weights of each block materialized
EXPERT_WAYS = ('loop', 'batched')

# what jax.checkpoint saves for the backward pass: with 'dots' the outputs of linear(), with 'full'
# nothing
REMAT_POLICIES = {
    'dots': jax.checkpoint_policies.save_only_these_names('dense'),
    'full': jax.checkpoint_policies.nothing_saveable}


def scan_blocks(gpt, stream, call):
    """Computes `for block in gpt.h: stream, _ = block(stream, call)` as one compiled loop, and
    returns the last stream. Each time it is called, scan_blocks stacks the parameters of all
    layers, because the state and checkpoints keep the layers apart, as h_0, h_1, ..."""
    cfg = gpt.config
    block = gpt.h[0].clone(parent=None)
    layers = [gpt.variables['params'][f'h_{i}'] for i in range(cfg.n_layer)]
    key = None
    if gpt.has_rng('dropout'):
        key = gpt.make_rng('dropout')

    def body(stream, layer):
        params, i = layer
        rngs = None
        if key is not None:
            rngs = {'dropout': jax.random.fold_in(key, i)}
        (stream, _), sown = block.apply(
            {'params': params}, stream, call, rngs=rngs, mutable=['losses'])
        return stream, sum(jax.tree.leaves(sown), jnp.float32(0))

    # the loop over the stacked parameters; the balance losses of experts are added up
    if cfg.remat != 'none':
        body = jax.checkpoint(body, policy=REMAT_POLICIES[cfg.remat], prevent_cse=False)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    stream, losses = jax.lax.scan(body, stream, (stacked, jnp.arange(cfg.n_layer)))
    gpt.sow('losses', 'balance', losses.sum())
    return stream


def map_sequence_chunks(f, chunk, *xs_BxT):
    """Computes f(*xs) in chunks, `chunk` of the T positions at a time. Returns an array [B, T], or
    a tree of such arrays. The backward pass computes f again, so that the intermediate values of f
    (logits) exist for one chunk only.

    f: a function of arrays [B, chunk, ...] that returns [B, chunk], or a tree of such arrays.
    chunk: a divisor of T. xs_BxT: arrays [B, T, ...]. On a mesh each context rank has a part of
    each chunk."""
    B, T = xs_BxT[0].shape[:2]
    mesh = current_mesh()
    n = 1
    if mesh and chunk % mesh.shape['context'] == 0:
        n = mesh.shape['context']

    def split(x):
        # [B, T, ...] -> [chunks, B, chunk, ...]; a chunk has a part of each of the n ranks
        x = gather_positions(x).reshape(B, n, T // chunk, chunk // n, *x.shape[2:])
        return jnp.moveaxis(x, 2, 0).reshape(T // chunk, B, chunk, *x.shape[4:])

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def f_recomputed(xs):
        return f(*xs)

    chunks = tuple(split(x) for x in xs_BxT)
    y = jax.lax.map(f_recomputed, chunks)

    def join(y):
        # [chunks, B, chunk] -> [B, T]
        y = y.reshape(T // chunk, B, n, chunk // n)
        return jnp.moveaxis(y, 0, 2).reshape(B, T)

    return jax.tree.map(join, y)
