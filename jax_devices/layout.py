"""Runs a step on the devices: on one, replicated (pmap), or sharded over a mesh (jit).

A Layout defines how everything is sharded. It shards the arrays that stay on the devices between
two steps. It also shards the arrays within a step, except inside pmap and shard_map, where the code
is for one device. The table has the shardings for each choice of flags.

| flags | Layout | parameters | optimizer state | gradients | batch | the gradients are summed by |
|---|---|---|---|---|---|---|
| none, one device | Layout | whole | whole | whole | whole | nobody |
| none | Replicas | whole | whole | whole | data | pmean under pmap, once an update |
| fsdp, tensor, ... | Sharded | by rules | by rules | by rules | BATCH, context | XLA, where needed |
| zero=1 | Zero1 | whole | over replicas | over replicas | data | psum_scatter in shard_map, once |
| zero=2 | Zero2 | by rules | over replicas | over replicas | BATCH | XLA, after each micro-batch |

BATCH: over the axes data, fsdp and expert. "By rules": PARTITION_RULES of jax_ops/sharding.py.
"Over replicas": by rules, but a dimension with the axis fsdp in its rule is sharded over the axes
fsdp, data and context together. Without --fsdp, fsdp has size 1, and the dimension is sharded over
data and context."""
import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jax_flags import UserError
from jax_ops.sharding import (
    AXES, BATCH, create_mesh, current_mesh, partition_specs, shard, shard_params)

global_max = jax.jit(jnp.max)  # maximum of an array that is sharded over processes


class MeshSizes(NamedTuple):
    """The sizes of those mesh axes that flags set. The mesh has one more axis, `data`. Its size is
    the number of devices divided by the product of these sizes."""
    fsdp: int = 1
    tensor: int = 1
    expert: int = 1
    context: int = 1


class Layout:
    """The sharding of parameters, optimizer state, gradients and batch over `devices`; see the
    table at the top of the file. setup_distributed_training makes a Layout. The global batch is
    split into n_data_shards contiguous shards. A process loads the shards of its own devices.

    This class is the layout on one device: everything is whole, and nothing is reduced. Its
    subclasses replace what is different on several devices."""
    has_own_losses = False  # whether each device returns the mean loss of its own sequences

    def __init__(self, devices: Sequence[jax.Device], sizes: MeshSizes = MeshSizes(),
                 mesh: Mesh | None = None):
        self.devices = tuple(devices)
        self.sizes = sizes
        if mesh is None:  # all devices on the axis data, in their order, as pmap has them
            mesh = Mesh(np.expand_dims(self.devices, [*range(1, len(AXES))]), AXES)
        self.mesh = mesh
        # the shards of the batch; devices along tensor and context share sequences
        self.n_data_shards = math.prod(mesh.shape[axis] for axis in BATCH)
        sharing = [AXES.index('tensor'), AXES.index('context')]
        groups = np.moveaxis(mesh.devices, sharing, [-2, -1]).reshape(self.n_data_shards, -1)
        # the shards that this process loads, ascending
        self.local_data_shards = [
            i for i, group in enumerate(groups)
            if any(device.process_index == jax.process_index() for device in group)]

    def validate(self, config):
        """Raises UserError for a model that the devices cannot split."""
        n_devices = len(self.devices)

        # each axis of the mesh must divide the dimensions that it shards
        sizes = [
            ('tensor', 'n_head', config.n_head),
            ('tensor', 'n_kv_head', config.kv_heads),
            ('fsdp', 'n_embd', config.n_embd),
            ('expert', 'n_expert', config.moe.n_expert if config.moe else 1)]
        for flag, name, size in sizes:
            n = getattr(self.sizes, flag)
            if size % n:
                valid = [m for m in range(1, n_devices + 1) if size % m == 0 and n_devices % m == 0]
                raise UserError(f'{flag}={n} does not divide {name}={size}; on {n_devices} devices '
                                f'it may be one of {valid}')

        # attention splits the part of each device again, so that all devices have equal work
        context = self.sizes.context
        if config.block_size % context**2:
            raise UserError(f'context={context}: its square must divide '
                            f'block_size={config.block_size}')
        if context > 1 and config.attention not in ('chunked', 'splash'):
            raise UserError(f'attention={config.attention} does not shard a sequence: use '
                            'attention=auto with context')

    # --- between two steps: the state

    def shardings(self, tree):
        """Returns the sharding of each leaf of a tree of parameters, or of a TrainState."""
        return jax.tree.map(lambda _: NamedSharding(self.mesh, P()), tree)

    def device_put(self, tree):
        """Moves a tree of host arrays, the same in every process, to the devices, sharded as
        shardings() says."""
        def put(x, sharding):
            values = np.asarray(x)
            return jax.make_array_from_callback(values.shape, sharding, values.__getitem__)

        return jax.tree.map(put, tree, self.shardings(tree))

    def init_sharded(self, make, *args):
        """Computes make(*args) under jit with sharded outputs, so that no device materializes the
        full tree."""
        shardings = self.shardings(jax.eval_shape(lambda: make(*args)))
        return jax.jit(lambda: make(*args), out_shardings=shardings)()

    def abstract_state(self, make, *args):
        """Returns the ShapeDtypeStructs, with shardings, of the result of init_sharded(make,
        *args). Does not run `make`."""
        def abstract(x, sharding):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        tree = jax.eval_shape(lambda: make(*args))
        return jax.tree.map(abstract, tree, self.shardings(tree))

    # --- the batch

    def local_rows(self, n_rows):
        """Returns the indices, an int array, of the sequences that this process loads for
        shard_batch(). n_rows: the number of sequences of an iteration, in all processes
        together."""
        each = n_rows // self.n_data_shards
        return np.concatenate([i * each + np.arange(each) for i in self.local_data_shards])

    def whole_batch(self, shape, rest):
        """Returns (shape of the global array; its PartitionSpec) for one array of the batch, such
        as the inputs 'x'. The array has a shard [*shape, *rest] for each device, or for each group
        of devices that share sequences.

        shape: (micro-steps, sequences) of a shard, as split_batch returns it, or (sequences,).
        rest: the axes of one sequence, () or (positions,). Example: with 8 shards, the shape (2, 3)
        and the rest (64,) give [8, 2, 3, 64] under pmap, and [2, 24, 64] on a mesh."""
        return (*shape, *rest), P()

    def shard_batch(self, batch, shape):
        """Moves this process's sequences to the devices. Returns the batch as global arrays, in the
        shapes of whole_batch.

        batch: {name: array [n, *rest]} of n sequences, those of local_rows(). shape: (micro-steps,
        sequences) of a shard, or (sequences,), see whole_batch."""
        batch = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), batch)
        return jax.device_put(batch, self.devices[0])

    def max_over_processes(self, number):
        """Returns the maximum of `number` over all processes. If there are several processes, the
        maximum is a device array, and only int() of this array waits for the result."""
        if jax.process_count() == 1:
            return number
        # an array with a number for each device; its maximum is an all-reduce
        sharding = NamedSharding(Mesh(np.array(self.devices), ('data',)), P('data'))
        numbers = jax.make_array_from_callback(
            (len(self.devices),), sharding, lambda _: np.array([number]))
        return global_max(numbers)

    # --- within a step

    @property
    def n_losses(self):
        """The number of mean losses that the devices compute for a micro-batch: one on each device
        if has_own_losses, else one for all devices together.

        Each of N devices computes the mean over its own 1 / N of the sequences. In this mean, a
        sequence has N times the weight that it has in the mean over all sequences. In float16, the
        training step divides the loss scale by N, which undoes this. Otherwise the scaled gradients
        would be N times as large as on one device, and could overflow float16."""
        return len(self.devices) if self.has_own_losses else 1

    def all_reduced(self, compute):
        """Wraps compute(params, frozen, batch, scale), which returns the gradients and metrics of
        the sequences that it gets. The wrapped function returns the means of these gradients and
        metrics over the replicas. Returns `compute` unchanged where there is nothing to reduce."""
        return compute

    def shard_gradients(self, grads):
        """Returns the gradients of a micro-batch, sharded for the sum over the micro-batches. The
        layouts Sharded and Zero2 shard the gradients; the others return them unchanged."""
        return grads

    def shard_update(self, grads, params):
        """Returns (gradients; parameters), sharded as the update needs them. With ZeRO, both are
        sharded over the replicas, and each device then updates only its own shard. Without ZeRO,
        both are returned unchanged."""
        return grads, params

    # --- compiled steps

    def jit_step(self, step):
        """Puts the step of make_train_step under jit or pmap. The resulting function is compiled
        when it is called or lowered, and donates its state."""
        return jax.jit(step, donate_argnums=0)

    def jit_eval_step(self, step):
        """Puts the step of make_eval_step under jit or pmap."""
        return jax.jit(step)

    def on_mesh(self, step):
        """Wraps `step`, a function of (state, batch), so that it is traced on the mesh. Without a
        mesh, returns `step` unchanged."""
        return step

    def mesh_context(self):
        """Returns the context manager in which decoding and scoring run. With a mesh, it is
        jax.set_mesh(mesh). Without a mesh, it does nothing."""
        return contextlib.nullcontext()


class SeveralDevices(Layout):
    """The base class of the layouts on several devices. Each device receives only its own part of a
    batch."""

    def shard_batch(self, batch, shape):
        def put(x):
            whole, spec = self.whole_batch(shape, x.shape[1:])
            local = dict(zip(self.local_data_shards, x.reshape(-1, *shape, *x.shape[1:])))
            return jax.make_array_from_callback(
                whole, NamedSharding(self.mesh, spec),
                functools.partial(self.find_part, local, shape))

        return jax.tree.map(put, batch)

    def find_part(self, local, shape, index):
        """Returns the part of a global array that belongs on a device. This part is the device's
        whole shard of the batch, with a leading axis of size 1: [1, *shape, *rest]. The global
        array is [n_data_shards, *shape, *rest], see whole_batch.

        local: the shards of the batch that this process has, {index of the shard: array [*shape,
        *rest]}, where rest is () or (positions,). shape: only Sharded.find_part reads it. index:
        for each axis of the global array, the slice that the device holds. The start of the first
        slice is the index of the device's shard. A start of None means 0."""
        return local[index[0].start or 0][None]


class Replicas(SeveralDevices):
    """Data parallelism by pmap. Each of several devices has the full state, and some of the
    sequences of a batch."""

    has_own_losses = True

    def whole_batch(self, shape, rest):
        """Returns (shape of the global array; its PartitionSpec). The array is [n_data_shards,
        *shape, *rest]. The first axis has an element for each device. shape, rest: as in
        Layout.whole_batch."""
        return (self.n_data_shards, *shape, *rest), P('data')

    def all_reduced(self, compute):
        def mean(*inputs):
            found = compute(*inputs)
            with jax.named_scope('all_reduce'):
                return jax.lax.pmean(found, 'data')

        return mean

    def jit_step(self, step):
        return pmap_train_step(step, self.devices)

    def jit_eval_step(self, step):
        def step_of_all(params, batch):  # each device sums over its own sequences
            return jax.lax.psum(step(params, batch), 'data')

        return pmap_step(step_of_all, self.devices)


class Sharded(SeveralDevices):
    """The layout in which everything is sharded over a mesh. Steps run under jit, and XLA inserts
    the communication."""

    def __init__(self, devices, sizes):
        mesh = create_mesh(devices, sizes.tensor, sizes.fsdp, sizes.expert, sizes.context)
        super().__init__(devices, sizes, mesh)

    def shardings(self, tree):
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.specs(tree))

    def specs(self, tree):
        """Returns the PartitionSpec of each leaf of a tree of parameters, or of a TrainState."""
        return partition_specs(tree, self.mesh)

    def whole_batch(self, shape, rest):
        """Returns (shape of the global array; its PartitionSpec). The array is [micro-steps,
        n_data_shards * sequences, *rest], or without the first axis if `shape` has no micro-steps.
        The axis of sequences is sharded over BATCH. `rest` is () or (positions,), and the positions
        are sharded over the mesh axis 'context'. shape, rest: as in Layout.whole_batch."""
        *first, each = shape
        spec = P(*[None] * len(first), BATCH, *['context'] * len(rest))
        return (*first, self.n_data_shards * each, *rest), spec

    def find_part(self, local, shape, index):
        """Returns the part of a global array that belongs on a device: all sequences of the
        device's shard of the batch. If the positions are sharded over the mesh axis 'context', the
        part has only some positions of these sequences.

        local: the shards of the batch that this process has, {number of the shard: array [*shape,
        *rest]}. shape: (micro-steps, sequences) of a shard, or (sequences,). The global array is
        the result of whole_batch, [micro-steps, n_data_shards * sequences, *rest] or [n_data_shards
        * sequences, *rest]. index: for each axis of the global array, the slice that the device
        holds. If s is the slice of the axis of the sequences, the device's shard has the number
        (s.start or 0) // sequences."""
        axis = len(shape) - 1  # of the sequences
        shard_number = (index[axis].start or 0) // shape[-1]
        return local[shard_number][..., *index[axis + 1:]]

    def shard_gradients(self, grads):
        return shard_params(grads)

    def jit_step(self, step):
        def sharded_step(state, batch):
            state, metrics = step(state, batch)
            # with ZeRO, this all-gathers the parameters again
            state = jax.lax.with_sharding_constraint(state, self.shardings(state))
            return state, jax.tree.map(shard, metrics)

        return jax.jit(self.on_mesh(sharded_step), donate_argnums=0)

    def jit_eval_step(self, step):
        return jax.jit(self.on_mesh(
            lambda params, batch: jax.tree.map(shard, step(params, batch))))

    def on_mesh(self, step):
        def step_on_mesh(state, batch):
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                return step(state, batch)
        return step_on_mesh

    def mesh_context(self):
        return jax.set_mesh(self.mesh)


class Zero2(Sharded):
    """The layout of ZeRO-2 (arXiv:1910.02054). Everything is sharded as in Sharded, and in addition
    the gradients and the optimizer state are sharded over the replicas. Each device updates its own
    shard of the parameters. At the end of a step, the parameters are all-gathered over the
    replicas."""

    def specs(self, tree):
        specs = partition_specs(tree, self.mesh)
        if not hasattr(tree, 'opt_state'):
            return specs
        over_replicas = partition_specs(tree.opt_state, self.mesh, over_replicas=True)
        return specs.replace(opt_state=over_replicas)

    def shard_gradients(self, grads):
        return shard_params(grads, over_replicas=True)

    def shard_update(self, grads, params):
        return shard_params((grads, params), over_replicas=True)


class Zero1(Zero2):
    """The layout of ZeRO-1. The optimizer state is sharded as in Zero2. But each device sums the
    full gradients of its own micro-batches, and shards the gradients only once in a step."""

    has_own_losses = True

    def shard_gradients(self, grads):
        return grads

    def all_reduced(self, compute):
        def mean_shards(params, frozen, batch, scale):
            specs = partition_specs(params, current_mesh(), over_replicas=True)

            def on_each_replica(*inputs):
                grads, metrics = compute(*inputs)
                with jax.named_scope('reduce_scatter'):
                    return jax.tree.map(mean_shard, specs, grads), jax.lax.pmean(metrics, 'data')

            run = jax.shard_map(
                on_each_replica, in_specs=(P(), P(), P(None, 'data'), P()), out_specs=(specs, P()),
                check_vma=False)
            return run(params, frozen, batch, scale)

        return mean_shards


def mean_shard(spec, grad):
    """Returns this device's shard of the mean of a gradient over the replicas. spec: the
    parameter's PartitionSpec. The result is sharded along the dimension that has the axis 'data';
    if no dimension has this axis, the result is the whole mean."""
    n_devices = jax.lax.axis_size('data')
    for dimension, axes in enumerate(spec):
        if 'data' in (axes or ()):
            total = jax.lax.psum_scatter(grad, 'data', scatter_dimension=dimension, tiled=True)
            return total / n_devices
    return jax.lax.pmean(grad, 'data')  # no dimension is divisible


def setup_distributed_training(devices: Sequence[jax.Device], fsdp: int = 1, tensor: int = 1,
                               expert: int = 1, context: int = 1, zero: int = 0) -> Layout:
    """Chooses how a model is laid out on these devices, and returns this Layout. The table at the
    top of the file lists the Layouts, and the sizes that lead to each.

    fsdp, tensor, expert, context: the sizes of the mesh's axes. zero: 0, 1 (ZeRO-1,
    arXiv:1910.02054) or 2 (ZeRO-2). Raises UserError if `zero` is not 0, 1 or 2; if zero=1 and one
    of the sizes is not 1; and if the product of the sizes does not divide the number of devices."""
    sizes = MeshSizes(fsdp, tensor, expert, context)
    has_axes = sizes != MeshSizes()
    if zero not in (0, 1, 2):
        raise UserError(f'zero must be 0, 1 (ZeRO-1) or 2 (ZeRO-2), not {zero}; ZeRO-3 is --fsdp')
    if zero == 1 and has_axes:
        raise UserError('zero=1 does not work with fsdp, tensor, expert or context: with them use '
                        '--zero=2')
    if zero:
        return {1: Zero1, 2: Zero2}[zero](devices, sizes)
    if has_axes:
        return Sharded(devices, sizes)
    return Layout(devices) if len(devices) == 1 else Replicas(devices)


def pmap_step(step, devices, donate_argnums=()):
    """Returns step(state, batch) as a pmap over several devices. The state and all results are
    replicated, not stacked. The batch has a leading device axis. `step` reduces over the axis
    'data', so that every device has the same result."""
    return jax.pmap(step, axis_name='data', in_axes=(None, 0), out_axes=None, devices=devices,
                    donate_argnums=donate_argnums)


def pmap_train_step(step: Callable, devices: Sequence[jax.Device]) -> Callable:
    """Returns the training step step(state, batch) as a pmap over `devices`, with a donated state;
    see pmap_step. This is data parallelism with the whole state on each device."""
    return pmap_step(step, devices, donate_argnums=0)
