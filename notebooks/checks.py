"""The checks of gpt_from_scratch.ipynb. Each compares what a cell defines with nano_jax.py, or with the numbers of
PyTorch in tests/golden, and says what is wrong."""
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import nano_jax
from jax_pretrained import load_pretrained

GOLDEN = Path(__file__).parent.parent / 'tests' / 'golden'


class NotYet(Exception):
    """What a cell computes is wrong. A notebook shows the message alone."""

    def _render_traceback_(self):
        return [f'not yet: {self}']


def require(condition, message):
    if not condition:
        raise NotYet(message)


def call(function, *args):
    """Returns what a function of a cell returns. Raises NotYet if it fails, or still has its hole."""
    hole = f'{function.__name__} still has its hole: replace the ...'
    try:
        result = function(*args)
    except Exception as error:
        if 'ellipsis' in str(error).lower():
            raise NotYet(hole) from error
        first_line = (str(error).splitlines() or [''])[0]
        raise NotYet(f'{function.__name__} fails: {type(error).__name__}: {first_line}') from error
    require(not any(part is ... for part in jax.tree.leaves(result)), hole)
    return result


def agree(found, expected, tolerance=1e-4):
    return np.shape(found) == np.shape(expected) and np.allclose(found, expected, rtol=0, atol=tolerance)


def require_agreement(found, expected, what, tolerance=1e-4):
    require(np.shape(found) == np.shape(expected),
            f'{what} should have the shape {np.shape(expected)}, not {np.shape(found)}')
    difference = np.abs(np.asarray(found) - np.asarray(expected)).max()
    require(difference <= tolerance, f'{what} differ by up to {difference:.2g} from what they should be')


def say(message):
    print(f'right: {message}')


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def tiny(**flags):
    """(cfg, params) of a small model with random weights, far from their small initial values."""
    sizes = dict(block_size=24, n_layer=2, n_head=2, n_embd=16, vocab_size=41)
    cfg = nano_jax.Config(**nano_jax.DEFAULTS | sizes | flags)
    params = nano_jax.init_params(jax.random.key(1), cfg)
    return cfg, jax.tree.map(lambda p: p if p.ndim == 1 else 15 * p, params)


def golden(name):
    """(cfg, params) of a model that PyTorch has computed."""
    config, params = load_pretrained(GOLDEN / name / 'ckpt.pt')
    return tiny(bias=config.bias, beta2=0.95)[0], jax.tree.map(jnp.asarray, params)


# -----------------------------------------------------------------------------
# one check for each cell

def batch(read_windows):
    tokens = np.arange(100)  # each token is its own position
    x, y = call(read_windows, tokens, [0, 30], 8)
    require(not agree(y, x), 'y is x: the target at each position is the token that follows, not the token itself')
    require(not agree(y, x - 1), 'y is the token before: the target is the token that follows')
    require_agreement(x, [np.arange(8), np.arange(30, 38)], 'x', tolerance=0)
    require_agreement(y, [np.arange(1, 9), np.arange(31, 39)], 'y', tolerance=0)
    say('at each position y is the token that follows x')


def bigram(bigram_logits):
    table_VxV, x_BxT = random(5, 5), np.array([[0, 4, 2], [1, 1, 3]])
    found = call(bigram_logits, table_VxV, x_BxT)
    require(not agree(found, table_VxV.T[x_BxT]),
            'you take columns: the row of a token has the logits of the tokens that follow it')
    require_agreement(found, [[table_VxV[i] for i in row] for row in x_BxT], 'the logits')
    say('the logits of a token are its row of the table')


def scores(scores):
    q_BxTxHxK, k_BxSxHxK = random(2, 5, 3, 4), random(2, 5, 3, 4, seed=1)
    found = call(scores, q_BxTxHxK, k_BxSxHxK)
    # by hand: each query, each key
    expected = np.zeros((2, 3, 5, 5))
    for b, h, t, s in np.ndindex(*expected.shape):
        expected[b, h, t, s] = q_BxTxHxK[b, t, h] @ k_BxSxHxK[b, s, h] / 4**0.5
    require(not agree(found, 4**0.5 * expected), 'your scores grow with the width of a head: divide them by K**0.5')
    require(not agree(found, expected.swapaxes(2, 3)),
            'your scores are transposed: rows are queries (T), columns are keys (S)')
    require_agreement(found, expected, 'the scores')
    say('each score is the product of a query and a key, divided by K**0.5')


def mask(probabilities):
    q_BxTxHxK, k_BxSxHxK = random(1, 6, 1, 4), random(1, 6, 1, 4, seed=1)
    for first, T in ((0, 6), (3, 2)):
        probs_TxS = np.asarray(call(probabilities, q_BxTxHxK[:, :T], k_BxSxHxK, first))[0, 0]
        for t, s in np.ndindex(T, 6):
            position, is_seen = first + t, probs_TxS[t, s] > 0
            after = f', where {first} tokens came before' if first else ''
            require(not is_seen or s <= position, f'your mask lets position {position} see {s}{after}')
            require(is_seen or s > position, f'your mask hides {s} from position {position}{after}')
        require_agreement(probs_TxS.sum(1), np.ones(T), 'the sums of the probabilities of a query')
    say('each position sees itself and those before it')


def heads(attention):
    cfg, params = tiny()
    p, x_BxTxD = params['h_0']['attn'], random(2, 7, 16)
    found, _ = call(attention, p, x_BxTxD, cfg)
    # a later token changes nothing that was before
    changed = x_BxTxD.copy()
    changed[:, -1] += 1
    other, _ = call(attention, p, changed, cfg)
    moved = np.abs(np.asarray(found) - np.asarray(other)).max((0, 2))[:-1] > 1e-6
    require(not moved.any(), f'the output at position {moved.argmax()} changes with the token at position 6: the axis '
            'T has to stay whole when the channels are split into heads')
    require_agreement(found, nano_jax.attention(p, x_BxTxD, cfg)[0], 'the outputs')
    say('each head has its own K channels of every token')


def block(forward):
    cfg, params = golden('nanogpt')
    pytorch = np.load(GOLDEN / 'logits.npz')
    # an MLP that answers 0 changes nothing
    silent = {**params}
    for name in ('h_0', 'h_1'):
        c_proj = jax.tree.map(jnp.zeros_like, params[name]['mlp']['c_proj'])
        silent[name] = {**params[name], 'mlp': {**params[name]['mlp'], 'c_proj': c_proj}}
    idx_BxT = pytorch['idx']
    found, expected = call(forward, silent, idx_BxT, cfg)[0], nano_jax.forward(silent, idx_BxT, cfg)[0]
    require(agree(found, expected), 'an MLP whose output is 0 changes x: its output is added to x, it does not '
            'replace it')
    found = call(forward, params, idx_BxT, cfg)[0]
    difference = np.abs(np.asarray(found) - pytorch['nanogpt']).max()
    require(difference < 1e-4 or difference > 0.1,
            f'the logits are nearly those of PyTorch (within {difference:.1g}): your GELU is the approximate one')
    require_agreement(found, pytorch['nanogpt'], 'the logits')
    say("the logits are PyTorch's")


def loss(loss_fn):
    cfg, params = golden('train')
    pytorch = np.load(GOLDEN / 'train' / 'steps.npz')
    x_BxT, y_BxT, expected = pytorch['x'][0], pytorch['y'][0], pytorch['losses'][0]
    found = call(loss_fn, params, x_BxT, y_BxT, cfg)
    require(np.ndim(found) == 0, f'the loss should be one number, not an array of the shape {np.shape(found)}')
    require(not agree(found, -expected), 'your loss grows with the probability of the target: it needs a minus')
    require(not agree(found / y_BxT.size, expected), 'your loss is a sum: take the mean over all targets')
    require_agreement(found, expected, 'the losses')
    say(f"the loss is PyTorch's, {expected:.4f}")


def optimizer(adamw):
    cfg, params = golden('train')
    # the first update of gradients of any size is a step of lr
    zeros, grads = {'p': jnp.zeros(2)}, {'p': jnp.array([0.1, 0.4])}
    moved, _ = call(adamw, zeros, grads, {'m': zeros, 'v': zeros, 'n': 0.0}, 0.1, cfg)
    small, large = -np.asarray(moved['p']) / 0.1
    require(abs(large - small) < 1e-3, f'a gradient that is 4 times as large makes a first step that is '
            f'{large / small:.2g} times as large: divide by the root of v')
    require(abs(small - 1) < 1e-3, f'the first step is {small:.2f} lr, and should be 1 lr: m and v began at 0; divide '
            'them by 1 - beta**n')
    pytorch = np.load(GOLDEN / 'train' / 'steps.npz')
    zeros = jax.tree.map(jnp.zeros_like, params)
    moments = {'m': zeros, 'v': zeros, 'n': 0.0}
    for i, (x, y, lr, expected) in enumerate(zip(pytorch['x'], pytorch['y'], pytorch['lrs'], pytorch['losses'])):
        found, grads = jax.value_and_grad(nano_jax.loss_fn)(params, x, y, cfg)
        require(abs(found - expected) < 1e-4, f"after {i} updates the loss is {found:.4f}, PyTorch's is {expected:.4f}")
        params, moments = call(adamw, params, grads, moments, lr, cfg)
    say("five updates have PyTorch's losses")


def loop(train_step):
    cfg, params = tiny(batch_size=4)
    zeros = jax.tree.map(jnp.zeros_like, params)
    ours = theirs = params, {'m': zeros, 'v': zeros, 'n': jnp.zeros(())}
    rng = np.random.default_rng(0)
    mesh = Mesh(np.array(jax.devices()[:1]), ('data',))
    step = nano_jax.make_train_step(cfg, mesh)
    theirs = jax.tree.map(jnp.copy, theirs)  # they are donated
    for i in range(3):
        x_BxT, y_BxT = rng.integers(41, size=(2, 4, 24)).astype(np.int32)
        swapped = nano_jax.loss_fn(ours[0], y_BxT, x_BxT, cfg)
        *ours, found = call(train_step, *ours, x_BxT, y_BxT, 1e-2, cfg)
        *theirs, expected = step(*theirs, x_BxT, y_BxT, 1e-2)
        require(not agree(found, swapped), 'you predict x from y')
        require_agreement(found, expected, f'the losses of batch {i}')
    say('three updates have the losses of nano_jax.py')


def sampling(generate):
    cfg, params = tiny(temperature=0.0, max_new_tokens=12)
    prompt = [3, 1, 4]
    # without a cache: all tokens again for each new one
    expected = list(prompt)
    for _ in range(12):
        logits_1xTxV, _ = nano_jax.forward(params, np.array([expected]), cfg)
        expected.append(int(logits_1xTxV[0, -1].argmax()))
    # the tokens that generate computes are counted
    namespace, n_computed = generate.__globals__, 0
    forward = namespace['forward']

    def counted(params, idx_BxT, *args):
        nonlocal n_computed
        n_computed += np.size(idx_BxT)
        return forward(params, idx_BxT, *args)

    namespace['forward'] = counted
    try:
        found = call(generate, params, prompt, cfg)
    finally:
        namespace['forward'] = forward
    require(len(found) == len(expected), f'{len(found) - 3} tokens came, not 12')
    wrong = [i for i in range(len(found)) if found[i] != expected[i]]
    require(not wrong, f'without a cache the text is another one from its token {(wrong or [0])[0]} on: which tokens '
            'are not in the cache yet, and at which position is the first of them?')
    require(n_computed == len(expected) - 1, f'{n_computed} tokens were computed, and {len(expected) - 1} are enough: '
            'feed only those that are not in the cache yet')
    say('the text is the one without a cache, and each token was computed once')
