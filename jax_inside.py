"""Token ids -> what a model computes on the way: logits, hidden states, attention probabilities.

TextModel has a method for each. The model is the one that generates; flax collects what its modules
return, and record_attention in jax_transformer.py adds the probabilities.

Letters of the shapes are jax_transformer.py's; L is the number of layers.
"""
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jax_flags import UserError
from jax_sizes import power_of_two
from jax_transformer import GPT, Block

COLLECTION = 'intermediates'  # flax's name of what is collected
PARTS = ('logits', 'hidden_states', 'attention')


def look_inside(params, config, ids, part):
    """Returns one of PARTS of the tokens `ids`, float32:
    - 'logits' [T, V], of the token after each;
    - 'hidden_states' [L + 1, T, D]: the input of the first block, then the output of each block,
      the last after the final norm, as transformers' output_hidden_states;
    - 'attention' [L, H, T, T]: the probability with which a head at each position (third axis)
      attends to each key (last axis), as transformers' output_attentions. A row adds up to less
      than 1 where there is a sink.

    params: as decoding reads them, on one device. Raises UserError for no tokens or too many."""
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
    result = np.asarray(compute_part(params, idx_1xT, config=config, part=part))
    if part == 'attention':
        return result[:, :, :n_tokens, :n_tokens]
    if part == 'hidden_states':
        return result[:, :n_tokens]
    return result[:n_tokens]


@functools.partial(jax.jit, static_argnames=('config', 'part'))
def compute_part(params, idx_1xT, *, config, part):
    """look_inside of one padded row."""
    model = GPT(config)
    if part == 'logits':
        return model.apply({'params': params}, idx_1xT)[0]

    def is_kept(module, method):
        is_block = isinstance(module, Block) and method == '__call__'
        return is_block or method in ('embed', 'hidden')

    _, found = model.apply(
        {'params': params}, idx_1xT, method='hidden', mutable=[COLLECTION],
        capture_intermediates=is_kept)
    found = found[COLLECTION]
    layers = [found[f'h_{i}'] for i in range(config.n_layer)]
    if part == 'attention':
        return jnp.stack([layer['attn']['probs'][0][0].swapaxes(0, 1) for layer in layers])

    # each call of a method is one entry; a block returns its output and its cache
    states = [found['embed'][0]]
    for layer in layers[:-1]:
        output, _ = layer['__call__'][0]
        states.append(output)
    last, _ = found['hidden'][0]
    return jnp.concatenate([*states, last]).astype(jnp.float32)
