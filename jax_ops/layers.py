"""All layers as one loop, and gradient checkpointing."""
import jax
import jax.numpy as jnp


def scan_blocks(gpt, x_BxTxD, position_BxT, seq_id_B, start_BxT):
    """for block in gpt.h: x = block(x, ...), compiled as one loop over parameters that are stacked in every call; the
    state and checkpoints keep h_0, h_1, ..."""
    cfg = gpt.config
    block = gpt.h[0].clone(parent=None)
    layers = [gpt.variables['params'][f'h_{i}'] for i in range(cfg.n_layer)]
    key = gpt.make_rng('dropout') if gpt.has_rng('dropout') else None

    def body(x, layer):
        params, i = layer
        rngs = None if key is None else {'dropout': jax.random.fold_in(key, i)}
        (x, _), sown = block.apply({'params': params}, x, position_BxT, None, seq_id_B, start_BxT, rngs=rngs,
                                   mutable=['losses'])
        return x, sum(jax.tree.leaves(sown), jnp.float32(0))

    if cfg.remat != 'none':
        body = jax.checkpoint(body, policy=remat_policy(cfg.remat), prevent_cse=False)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    x_BxTxD, losses = jax.lax.scan(body, x_BxTxD, (stacked, jnp.arange(cfg.n_layer)))
    gpt.sow('losses', 'balance', losses.sum())
    return x_BxTxD


def remat_policy(remat):
    """Which activations are saved for the backward pass: 'dots' saves the outputs of linear(), 'full' nothing."""
    policies = jax.checkpoint_policies
    return {'dots': policies.save_only_these_names('dense'), 'full': policies.nothing_saveable}[remat]
