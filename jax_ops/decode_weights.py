"""Weights in the forms that decoding reads: cast once, quantized or transposed. With tensor
parallelism, the columns of c_attn (q, k and v) are also reordered: the columns of each tensor rank
are side by side.

A decode step reads every weight once for each token. Therefore the order of the weights in memory
decides the speed of the step. linear() in matmul.py takes each of these forms in place of an array
[I, O]."""
import functools

import jax
import jax.numpy as jnp

from jax_flags import check_choice
from jax_ops.cpu import cpu_multiplies_uint8
from jax_ops.matmul import as_kernel, is_kernel
from jax_ops.sharding import current_mesh


def convert_params_for_decoding(params: dict, dtype: str, quantize: str = '') -> dict:
    """Returns the parameters as decoding reads them: matrices are cast to `dtype`, or become Int8
    if quantize is 'int8'.

    Kernels that are not Int8 become Transposed in two cases: on a single GPU, except those of
    experts and routers; and on a single CPU device, if `dtype` is float32 or bfloat16, except those
    of routers. Empties the dict `params`: each entry is removed before its conversion, so that
    memory need not hold the model twice. Raises UserError for an unknown `quantize`."""
    check_choice('quantize', quantize, ('', 'int8'))
    converted = {}
    for name in list(params):
        part = {name: params.pop(name)}
        devices = devices_of(part)
        is_one_device = len(devices) == 1
        platform = next(iter(devices)).platform  # the same for all devices
        on_cpu = platform == 'cpu'
        if is_one_device:  # take arrays off a mesh of one device, see commit in jax_generate.py
            part = jax.tree.map(lambda x: jnp.asarray(x).addressable_data(0), part)

        # first the values, in dtype or int8, then their order in memory
        if quantize:
            stored_as = jnp.uint8 if on_cpu and cpu_multiplies_uint8() else jnp.int8
            part = quantize_params(part, stored_as)
        part = cast_matrices(part, dtype)
        reads_rows_faster = platform == 'gpu' or on_cpu and dtype in ('float32', 'bfloat16')
        if is_one_device and reads_rows_faster:
            part = transpose_kernels(part, with_experts=on_cpu)

        # wait, so that the old buffers are freed before the next conversion
        converted[name] = jax.block_until_ready(part)[name]
    return converted


def devices_of(tree):
    """Returns the set of devices of the first leaf of a tree of dicts. All parameters of a model
    are on the same devices."""
    while isinstance(tree, dict):  # to flatten the whole tree takes 0.4 ms for 30 layers
        tree = next(iter(tree.values()))
    return jnp.asarray(jax.tree.leaves(tree)[0]).devices()


def map_kernels(change, params):
    """Returns the parameters with each leaf replaced by change(path, kernel). kernel: a Kernel; an
    array is passed as a Plain. path: a tuple of names."""
    def change_leaf(path, p):
        return change(tuple(part.key for part in path), as_kernel(p))

    return jax.tree.map_with_path(change_leaf, params, is_leaf=is_kernel)


def quantize_params(params, stored_as=jnp.int8):
    """Returns the parameters with matrices as Int8, which has a quarter of float32's bytes.
    stored_as: see quantize_param."""
    return map_kernels(functools.partial(quantize_param, stored_as=stored_as), params)


def quantize_param(path, p, stored_as=jnp.int8):
    """Returns the parameter p as Int8, with one scale per output, if p is named kernel, wte or
    lm_head, and does not belong to a router. Returns all other parameters unchanged. In a router,
    rounding could change the choice of experts. The matrices named wpe and kv_b stay unchanged
    because they are small.

    path: the parameter's path in the tree, a tuple of names. stored_as: jnp.int8 or jnp.uint8, the
    dtype in which the Int8 object stores its values."""
    kernel = as_kernel(p)
    if path[-1] not in ('kernel', 'wte', 'lm_head') or 'router' in path:
        return kernel.stored()
    return kernel.quantize(path[-1] != 'kernel', stored_as)


def cast_matrices(params, dtype):
    """Returns the parameters with matrices in `dtype`, the compute dtype, so that no step has to
    cast the matrices again."""
    return map_kernels(lambda path, kernel: kernel.cast(dtype), params)


def transpose_kernels(params, with_experts=False):
    """Returns the parameters with every kernel [I, O] as Transposed, except the router's kernel.
    with_experts: whether kernels of experts [E, I, O] become Transposed, too. An Int8 is
    unchanged."""
    def transpose(path, kernel):
        is_matrix = path[-1] == 'kernel' and 'router' not in path
        if is_matrix and (with_experts or kernel.values.ndim == 2):
            return kernel.transpose()
        return kernel.stored()

    return map_kernels(transpose, params)


def order_columns_by_rank(params, config):
    """Puts the columns of each c_attn kernel into the order of the current mesh's tensor ranks
    (order_by_rank). Each rank then has its own columns, so that no decode step moves them. Without
    tensor ranks, or with config.mla, changes nothing.

    params: the result of convert_params_for_decoding; its kernels are replaced in place, layer by
    layer. Returns params."""
    mesh = current_mesh()
    if mesh is None or mesh.shape['tensor'] == 1 or config.mla:
        return params
    kv_width = config.kv_heads * config.head_width
    widths = (config.n_head * config.head_width, kv_width, kv_width)
    for i in range(config.n_layer):
        c_attn = params[f'h_{i}']['attn']['c_attn']
        c_attn['kernel'] = order_kernel(c_attn['kernel'], widths, mesh.shape['tensor'])
    return params


@functools.partial(jax.jit, static_argnums=(1, 2))
def order_kernel(kernel, widths, n_ranks):
    """Puts the columns of a kernel of c_attn into the order of order_by_rank: first the columns of
    q, k and v that tensor rank 0 computes, then those of rank 1, and so on up to n_ranks. kernel:
    an array [I, O], which becomes Transposed, or an Int8, which stays Int8. Returns the kernel,
    sharded over the tensor ranks. widths: the numbers of columns of q, k and v."""
    return as_kernel(kernel).order_columns(widths, n_ranks)
