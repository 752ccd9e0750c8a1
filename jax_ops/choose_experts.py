"""The one place where the way to compute a mixture of experts is chosen: by device, model and number
of rows, with its reason."""
import functools

import jax
import jax.numpy as jnp

from jax_devices.setup import nvidia_capability
from jax_ops.grouped import STEP, Blocks, grouped_matmul
from jax_ops.matmul import Int8, Transposed, can_be_chosen
from jax_ops.sharding import current_mesh

# loop: one block of rows of an expert after the other. batched: all blocks in batched matmuls, with
# the weights of each block materialized. triton, ragged: one kernel for all experts, see grouped.py
EXPERT_WAYS = ('loop', 'batched', 'triton', 'ragged')


def choose_experts(config, device):
    """Returns (one of EXPERT_WAYS, reason) for a model's mixtures of experts on `device`; without
    experts ('loop', 'no experts')."""
    if config.moe is None:
        return 'loop', 'no experts'
    if device.platform == 'cpu':
        return 'loop', "a block of rows stays in the CPU's cache"
    few = f'; batched for fewer than {config.moe.n_expert} rows'
    if device.platform == 'tpu':
        return 'ragged', 'a kernel for all experts' + few
    refusal = why_not_triton(config, device)
    if refusal:
        return 'batched', f'no loop over experts; not triton: {refusal}'
    return 'triton', 'a kernel for all experts' + few


def way_for_rows(way, weights, n_rows):
    """Returns the way for n_rows rows of the experts that a device has, given the one that
    choose_experts chose: one of EXPERT_WAYS, or 'one by one' for few rows in decoding on a CPU."""
    # on a mesh a device has only some experts
    if way == 'loop' and current_mesh() is None:
        are_for_rows = [can_be_chosen(matrix, n_rows) for matrix in matrices(weights)]
        return 'one by one' if all(are_for_rows) else 'loop'
    leaves = jax.tree.leaves(weights)
    # fewer rows than experts: of the chosen ones the weights are read, and nothing is padded
    are_few = n_rows < len(leaves[0])
    are_int8 = any(jnp.issubdtype(w.dtype, jnp.integer) for w in leaves)
    if way in ('triton', 'ragged') and (are_few or are_int8):
        return 'batched'
    return way


def is_stack(x):
    """Tells whether x is a stack of matrices as decoding has them."""
    return isinstance(x, (Int8, Transposed))


def matrices(weights):
    """Returns the stacks of matrices, without the biases [E, O], in a tree of weights."""
    leaves = jax.tree.leaves(weights, is_leaf=is_stack)
    return [leaf for leaf in leaves if is_stack(leaf) or leaf.ndim > 2]


def why_not_triton(config, device):
    """Returns why the Triton kernels cannot compute the experts of this model on this device, or
    None if they can. The last check compiles them."""
    capability = nvidia_capability(device)
    if device.platform != 'gpu' or not capability:
        return 'it is for NVIDIA GPUs'
    if capability < 8:
        return f'it needs compute capability 8.0, this is {capability}'
    if config.dtype not in ('bfloat16', 'float16'):
        return f'it computes in 16 bits, not in {config.dtype}'
    for width in (config.n_embd, config.moe.width):
        if width % STEP:
            return f'{STEP} does not divide the width {width}'
    try:
        compile_triton(config.dtype, config.n_embd, config.moe.width, device)
    except Exception as error:  # of many types, with messages of many lines
        return f'{type(error).__name__}: {" ".join(str(error).split())[:150]}'
    return None


@functools.cache  # a run asks for training and for its samples
def compile_triton(dtype, width, hidden_width, device):
    """Compiles the product of two blocks of 128 rows with two matrices [width, hidden_width], and
    its gradients. Raises an exception of XLA's if a kernel cannot be compiled."""
    here = jax.sharding.SingleDeviceSharding(device)

    def array(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=here)

    def total(x, w, blocks):
        return grouped_matmul(x, w, blocks).astype(jnp.float32).sum()

    blocks = Blocks(array(2, dtype=jnp.int32), array(3, dtype=jnp.int32), 'triton')
    x = array(2, 128, width)
    w = array(2, width, hidden_width, dtype='float32')
    jax.jit(jax.grad(total, (0, 1))).lower(x, w, blocks).compile()
