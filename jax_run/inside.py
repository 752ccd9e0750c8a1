"""Computes intermediate results of a model. flax collects the outputs of the model's modules, and
record_attention (jax_transformer.py) adds the attention probabilities. L is the number of
layers."""
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jax_flags import UserError
from jax_generate import power_of_two
from jax_transformer import GPT, Block, create_call

COLLECTION = 'intermediates'  # flax's name for the collected outputs


def look_inside(model, ids, part):
    """Computes an intermediate result of a TextModel for the T tokens `ids` and returns it as a
    float32 array. V is the size of the vocabulary, D the width, H the number of heads. part:
    - 'logits' [T, V], for the token after each token;
    - 'hidden_states' [L + 1, T, D]: the input of the first block, then the output of each block,
      where the last one has passed the final norm, as transformers' output_hidden_states;
    - 'attention' [L, H, T, T]: the attention probabilities of a head at each position (third axis)
      for each key (last axis), as transformers' output_attentions. With a sink, a row adds up to
      less than 1.

    Raises UserError if `ids` is empty or longer than the context, or if the model is on several
    devices."""
    if len(model.layout.devices) > 1:
        raise UserError(f'{part} is for a model on one device: load it without tensor and expert')
    config = model.config
    n_tokens = len(ids)
    if not 1 <= n_tokens <= config.block_size:
        raise UserError(f'the text has {n_tokens:,} tokens; it may have 1 to {config.block_size:,}, '
                        'the context of the model')

    # few lengths, because each is a compilation; no token attends to the padding behind it
    width = min(config.block_size, power_of_two(n_tokens))
    idx_1xT = np.zeros((1, width), np.int32)
    idx_1xT[0, :n_tokens] = ids

    # layers by the plain formula, one after the other
    config = dataclasses.replace(config, attention='xla', scan_layers=False, remat='none')
    result = np.asarray(compute_part(model.params, idx_1xT, config=config, part=part))
    if part == 'attention':
        return result[:, :, :n_tokens, :n_tokens]
    if part == 'hidden_states':
        return result[:, :n_tokens]
    return result[:n_tokens]


@functools.partial(jax.jit, static_argnames=('config', 'part'))
def compute_part(params, idx_1xT, *, config, part):
    """Computes what look_inside returns, but also for the positions of the padding. idx_1xT: int32
    [1, T], the ids of one text, padded at the end. params: the model's parameters. part: see
    look_inside."""
    model = GPT(config)
    if part == 'logits':
        return model.apply({'params': params}, idx_1xT)[0]

    def is_kept(module, method):
        is_block = isinstance(module, Block) and method == '__call__'
        return is_block or method in ('embed', 'hidden')

    _, found = model.apply(
        {'params': params}, idx_1xT, create_call(idx_1xT), method='hidden', mutable=[COLLECTION],
        capture_intermediates=is_kept)
    found = found[COLLECTION]
    layers = [found[f'h_{i}'] for i in range(config.n_layer)]
    if part == 'attention':
        return jnp.stack([layer['attn']['probs'][0][0].swapaxes(0, 1) for layer in layers])

    # each call of a method is one entry; a block returns its output and its cache
    states = [found['embed'][0].x_BxTxD]
    for layer in layers[:-1]:
        output, _ = layer['__call__'][0]
        states.append(output.x_BxTxD)
    last, _ = found['hidden'][0]
    return jnp.concatenate([*states, last.x_BxTxD]).astype(jnp.float32)
