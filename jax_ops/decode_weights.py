"""Weights as decoding reads them: cast once, quantized, transposed, in the order of tensor ranks.

A decode step reads every weight once for each token, so how they lie in memory decides its speed.
linear() in matmul.py takes each of these forms in the place of an array [I, O].
"""
import functools

import jax
import jax.numpy as jnp

from jax_flags import check_choice
from jax_ops.cpu import cpu_multiplies_uint8
from jax_ops.matmul import as_kernel, is_kernel
from jax_ops.sharding import current_mesh


def convert_params_for_decoding(params: dict, dtype: str, quantize: str = '') -> dict:
    """Returns the parameters as decoding reads them: matrices in `dtype`, or Int8 if quantize is
    'int8'.

    On one GPU kernels become Transposed, except experts'; on one CPU device kernels in float32 and
    bfloat16 do. Removes each block from the dict `params` as it is converted, so that
    memory need not hold the model twice."""
    check_choice('quantize', quantize, ('', 'int8'))
    converted = {}
    for name in list(params):
        part = {name: params.pop(name)}
        devices = devices_of(part)
        is_one_device = len(devices) == 1
        platform = next(iter(devices)).platform  # all have the same
        on_cpu = platform == 'cpu'
        if is_one_device:  # without a mesh of one device, see commit in jax_generate.py
            part = jax.tree.map(lambda x: jnp.asarray(x).addressable_data(0), part)

        # values in dtype or int8, then the order in memory
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
    """Returns the set of devices that hold the first leaf of a tree."""
    return jnp.asarray(jax.tree.leaves(tree)[0]).devices()


def map_kernels(change, params):
    """Returns the parameters with change(path, kernel) of each, arrays as Plain. path: of names."""
    def change_leaf(path, p):
        return change(tuple(part.key for part in path), as_kernel(p))

    return jax.tree.map_with_path(change_leaf, params, is_leaf=is_kernel)


def quantize_params(params, stored_as=jnp.int8):
    """Returns the parameters with Int8 matrices, see quantize_param: a quarter of
    float32's bytes."""
    return map_kernels(functools.partial(quantize_param, stored_as=stored_as), params)


def quantize_param(path, p, stored_as=jnp.int8):
    """Returns a matrix (kernel, wte, lm_head) as Int8, with one scale per output, and other
    parameters as they are: wpe, kv_b and the router are small, and routing is sensitive.

    stored_as: the dtype of its values, int8 or uint8, see Int8."""
    kernel = as_kernel(p)
    if path[-1] not in ('kernel', 'wte', 'lm_head') or 'router' in path:
        return kernel.stored()
    return kernel.quantize(path[-1] != 'kernel', stored_as)


def cast_matrices(params, dtype):
    """Returns the parameters with matrices in the compute dtype, cast once instead of in every
    step."""
    return map_kernels(lambda path, kernel: kernel.cast(dtype), params)


def transpose_kernels(params, with_experts=False):
    """Returns the parameters with every kernel [I, O] as Transposed, with_experts also experts'
    kernels [E, I, O]; the router stays as it is."""
    def transpose(path, kernel):
        is_matrix = path[-1] == 'kernel' and 'router' not in path
        if is_matrix and (with_experts or kernel.values.ndim == 2):
            return kernel.transpose()
        return kernel.stored()

    return map_kernels(transpose, params)


def order_columns_by_rank(params, config):
    """Returns the parameters of convert_params_for_decoding with c_attn's columns in the order of
    the current mesh's tensor ranks (order_by_rank): each rank has its own, so that no decode step
    moves them. Replaces one layer after the other in place."""
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
    """Returns an array [I, O] or Int8 with its columns in the order of n_ranks, as Transposed or
    Int8."""
    return as_kernel(kernel).order_columns(widths, n_ranks)
