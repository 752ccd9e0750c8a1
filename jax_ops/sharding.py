"""The mesh and how parameters and activations are sharded over it."""
import math
import re

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as Spec

from jax_flags import UserError

AXES = ('data', 'fsdp', 'tensor', 'expert', 'context')
BATCH = ('data', 'fsdp', 'expert')
EXPERTS = ('expert', 'tensor')

# How each parameter (and its optimizer state) is stored, by the end of its path; parameters not
# listed are replicated. c_attn stores [q | k | v], so column shards would not align with heads. It
# is stored row-sharded and all-gathered per use. That moves 3 D^2 / tensor elements, which is less
# than moving q, k and v (3 B T D / tensor) if there are more tokens than channels
# (docs/parallelism.md#partition-rules).
PARTITION_RULES = (
    ('(wte|lm_head)', Spec('tensor', 'fsdp')),
    ('wpe', Spec(None, 'fsdp')),
    ('c_attn/kernel', Spec(('fsdp', 'tensor'), None)),
    ('(c_fc|c_gate)/kernel', Spec('fsdp', 'tensor')),
    ('(c_fc|c_gate)/bias', Spec('tensor')),
    ('c_proj/kernel', Spec('tensor', 'fsdp')),
    (r'experts_\w+/kernel', Spec(EXPERTS, 'fsdp', None)),
    (r'experts_\w+/bias', Spec(EXPERTS, None)),
)

# (storage, compute) sharding of the kernels of column-parallel and row-parallel layers
# (Megatron-LM, arXiv:1909.08053)
COLUMN_PARALLEL = ('fsdp', 'tensor'), (None, 'tensor')
ROW_PARALLEL = ('tensor', 'fsdp'), ('tensor', None)


def create_mesh(devices, tp_size=1, fsdp=1, expert=1, context=1):
    """Returns the mesh of `devices` with the axes AXES. The other arguments are the sizes of the
    axes tensor, fsdp, expert and context. The axis named data, over the replicas, gets the
    remaining factor of the number of devices. The ranks of a tensor group are neighbours, because
    they communicate most.

    Raises UserError if the sizes do not divide the number of devices."""
    n_devices = len(devices)
    size = tp_size * fsdp * expert * context
    if min(tp_size, fsdp, expert, context) < 1 or n_devices % size:
        valid = [n for n in range(1, n_devices + 1) if n_devices % n == 0]
        raise UserError(f'fsdp={fsdp} x tensor={tp_size} x expert={expert} x context={context} '
                        f'does not divide {n_devices} devices; the product may be one of {valid}')

    # laid out with tensor last, so that its ranks are neighbours; then in the order of AXES
    shape = (n_devices // size, fsdp, expert, context, tp_size)
    if devices[0].platform == 'tpu':  # neighbours on the torus of links
        from jax.experimental import mesh_utils
        devices = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    devices = np.moveaxis(np.reshape(devices, shape), -1, AXES.index('tensor'))
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def current_mesh():
    """Returns the mesh that the caller has set (jax.set_mesh), or None if there is none. Returns
    None also inside shard_map, where code is for one device, and under pmap, whose mesh has other
    axes than AXES."""
    mesh = jax.sharding.get_abstract_mesh()
    is_inside_shard_map = AxisType.Manual in mesh.axis_types
    if mesh.axis_names != AXES or is_inside_shard_map:
        return None
    return mesh


def shard(x, *spec):
    """Shards x on the current mesh by `spec`, and returns x. Without a mesh, returns x unchanged.
    spec: for each dimension the name of a mesh axis, a tuple of names, or None (replicated)."""
    if not current_mesh():
        return x
    return jax.lax.with_sharding_constraint(x, Spec(*spec))


def position_axes(n_positions, *axes):
    """Returns the axes over which n_positions are sharded on the mesh. Starts with all of `axes`,
    and drops the last axis until the product of the sizes of the axes divides n_positions. Without
    a mesh, returns ()."""
    mesh = current_mesh()
    if mesh is None:
        return ()
    while n_positions % count_shards(mesh, axes):
        axes = axes[:-1]
    return axes


def count_shards(mesh, axes):
    """Returns the product of the sizes of some axes of a mesh; 1 if there are no axes."""
    return math.prod(mesh.shape[axis] for axis in axes)


def shard_positions(x, axes=('context', 'tensor')):
    """Shards the positions of x [B, T, ...] over the mesh axes `axes`, and returns x. Without a
    mesh, returns x unchanged. This sharding is for x between attention and MLP. The operations
    there, norms and residual additions, treat each position independently of the others (sequence
    parallelism, arXiv:2205.05198)."""
    return shard(x, BATCH, position_axes(x.shape[1], *axes))


def gather_positions(x):
    """All-gathers the positions of x [B, T, ...] over the mesh axis 'tensor', and returns x. The
    positions stay sharded over the mesh axis 'context'. Without a mesh, returns x unchanged. This
    function undoes shard_positions for the axis 'tensor'."""
    x = shard_positions(x)  # else XLA would gather x before a cast
    return shard_positions(x, ('context',))


def batch_axes(n_rows):
    """Returns the axes over which n_rows rows are sharded: BATCH. Returns () if there is no mesh,
    or if the number of shards does not divide n_rows."""
    mesh = current_mesh()
    if not mesh or n_rows % count_shards(mesh, BATCH):
        return ()
    return BATCH


def partition_specs(tree, mesh, *, over_replicas=False):
    """Returns the tree of partition specs of a parameter tree or TrainState, by PARTITION_RULES. A
    rule has an entry for each of the trailing dimensions of a leaf: the axes of the mesh over which
    the dimension is sharded. The number of shards of a dimension is the product of the sizes of its
    axes. If this number does not divide the size of the dimension, the last axes are left out, as
    many as necessary.

    over_replicas: if True, a dimension that has the axis fsdp in its rule is also sharded over the
    axes data and context, even if fsdp has size 1. If False, only over the axes in its rule."""
    def spec_of(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        rule = rule_of(name)
        shape = np.shape(leaf)
        n_leading = len(shape) - len(rule)
        if n_leading < 0:
            return Spec()

        # the axes of each dimension
        spec = [None] * n_leading
        for size, axes in zip(shape[n_leading:], rule):
            if axes is None:
                axes = ()
            elif isinstance(axes, str):
                axes = (axes,)
            if over_replicas and 'fsdp' in axes:
                # last, so that a device's part lies inside its shard without these axes
                axes = (*axes, 'data', 'context')
            while size % count_shards(mesh, axes):
                axes = axes[:-1]
            spec.append(axes or None)

        # without Nones at the end, because jax writes the specs of its results so
        while spec and spec[-1] is None:
            spec.pop()
        return Spec(*spec)

    return jax.tree_util.tree_map_with_path(spec_of, tree)


def rule_of(name):
    """Returns the spec of PARTITION_RULES for a parameter, Spec() if no rule applies. name: the
    parameter's path, with slashes."""
    for end, spec in PARTITION_RULES:
        if re.search(rf'(^|/){end}$', name):
            return spec
    return Spec()


def shard_params(tree, *, over_replicas=False):
    """Shards `tree`, a tree of parameters, gradients or optimizer state, on the current mesh by
    partition_specs, and returns it. Without a mesh, returns `tree` as it is. over_replicas: see
    partition_specs."""
    mesh = current_mesh()
    if mesh is None:
        return tree
    specs = partition_specs(tree, mesh, over_replicas=over_replicas)
    return jax.lax.with_sharding_constraint(tree, specs)


def run_on_mesh(function, mesh):
    """Compiles function(table, ...) to run on a mesh, and returns the compiled function, which has
    the same arguments. table: an array such as an embedding matrix. The compiled function first
    shards the rows of the table over the mesh axis 'tensor'."""
    @jax.jit
    def run(table, *args):
        table = jax.lax.with_sharding_constraint(table, NamedSharding(mesh, Spec('tensor')))
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(table, *args)

    return run
