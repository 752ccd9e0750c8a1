"""How a step runs on the devices: replicated (pmap) or sharded over a mesh (jit)."""
import contextlib
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jax_flags import UserError
from jax_ops.sharding import (
    AXES, BATCH, create_mesh, current_mesh, partition_specs, shard, shard_params)

global_max = jax.jit(jnp.max)  # of an array that is sharded over processes


@dataclasses.dataclass(frozen=True)
class DataParallel:
    """Replicated data parallelism over `devices`: the same step function, under jit on one device,
    under pmap on several.

    The global batch is split into n_data_shards contiguous shards; a process loads the shards of
    its own devices."""
    devices: tuple

    @functools.cached_property
    def mesh(self):
        return Mesh(np.array(self.devices), ('data',))

    @functools.cached_property
    def n_data_shards(self):
        return len(self.devices)

    @functools.cached_property
    def local_data_shards(self):
        """The numbers of the batch shards that this process loads, ascending."""
        own = jax.process_index()
        return [i for i, device in enumerate(self.devices) if device.process_index == own]

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
        """Computes make(*args) under jit with sharded outputs: no device materializes the full
        tree."""
        tree = jax.eval_shape(lambda: make(*args))
        shardings = jax.tree.leaves(self.shardings(tree))
        make_leaves = jax.jit(lambda: jax.tree.leaves(make(*args)), out_shardings=shardings)
        return jax.tree.unflatten(jax.tree.structure(tree), make_leaves())

    def abstract_state(self, make, *args):
        """Returns the ShapeDtypeStructs, with shardings, of init_sharded(make, *args), which is not
        run."""
        def abstract(x, sharding):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        tree = jax.eval_shape(lambda: make(*args))
        return jax.tree.map(abstract, tree, self.shardings(tree))

    def local_rows(self, n_rows):
        """Returns which of the n_rows sequences of an iteration this process loads, for
        shard_batch()."""
        each = n_rows // self.n_data_shards
        return np.concatenate([i * each + np.arange(each) for i in self.local_data_shards])

    def shard_batch(self, batch, shape):
        """Moves this process's sequences [n, ...] to the devices, as [*shape, ...], with a leading
        axis of devices if there are several."""
        if len(self.devices) == 1:
            batch = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), batch)
            return jax.device_put(batch, self.devices[0])

        # Each device gets one shard, from the process that has loaded it.
        sharding = NamedSharding(self.mesh, P('data'))

        def put(x):
            shards = x.reshape(-1, *shape, *x.shape[1:])
            local = dict(zip(self.local_data_shards, shards))
            return jax.make_array_from_callback(
                (self.n_data_shards, *shards.shape[1:]), sharding,
                lambda index: local[index[0].start][None])

        return jax.tree.map(put, batch)

    def max_over_processes(self, number):
        """Returns the maximum of `number` over all processes: as it is if there is one process,
        else a device array, which is not awaited: int() of it is."""
        if jax.process_count() == 1:
            return number
        # An array with a number for each device, of which the maximum is an all-reduce.
        sharding = NamedSharding(Mesh(np.array(self.devices), ('data',)), P('data'))
        numbers = jax.make_array_from_callback(
            (len(self.devices),), sharding, lambda _: np.array([number]))
        return global_max(numbers)

    def mesh_context(self):
        """Returns the context to run compiled functions in: on a mesh, jax.set_mesh."""
        return contextlib.nullcontext()

    def validate(self, config):
        """Raises UserError for a model that the devices cannot split: replicas split none."""

    @property
    def n_losses(self):
        """Number of devices of which each takes the mean loss of its own sequences: under pmap
        all of them."""
        return len(self.devices)

    def shard_gradients(self, grads):
        """Shards the gradients of a micro-batch. Replicas keep them whole."""
        return grads

    def reduce_gradients(self, sum_gradients):
        """Makes a function like sum_gradients(params, frozen, batch, scale) -> (gradients,
        metrics) of the sequences of all devices, of that of a device's own sequences."""
        if len(self.devices) == 1:
            return sum_gradients

        def mean_gradients(*args):
            total = sum_gradients(*args)
            with jax.named_scope('all_reduce'):
                return jax.lax.pmean(total, 'data')
        return mean_gradients

    def shard_update(self, grads, params):
        """Shards (gradients, parameters) for the optimizer's update. Replicas keep them whole."""
        return grads, params

    def sum_over_devices(self, sums):
        """Adds up the sums of an evaluation's batch, each of a device's own sequences."""
        return sums if len(self.devices) == 1 else jax.lax.psum(sums, 'data')

    def train_step(self, step):
        """Compiles the step of make_train_step; the state that it is given is donated."""
        if len(self.devices) == 1:
            return jax.jit(step, donate_argnums=0)
        return pmap_train_step(step, self.devices)

    def eval_step(self, step):
        """Compiles the step of make_eval_step."""
        if len(self.devices) == 1:
            return jax.jit(step)
        return pmap_step(step, self.devices)


@dataclasses.dataclass(frozen=True)
class MeshParallel(DataParallel):
    """jit over a mesh: parameters and optimizer state are sharded by PARTITION_RULES, sequences
    over the axes BATCH. XLA's SPMD partitioner inserts the collectives.

    zero: 1 (ZeRO-1, arXiv:1910.02054) shards the optimizer state over all replicas: the gradients
    are reduce-scattered once per update, each device updates its shard of the parameters, which
    are all-gathered again at the end of the step. It goes without other axes than data. 2
    (ZeRO-2) reduce-scatters after each micro-batch already."""
    fsdp: int = 1
    tensor: int = 1
    expert: int = 1
    context: int = 1
    zero: int = 0

    @functools.cached_property
    def mesh(self):
        return create_mesh(self.devices, self.tensor, self.fsdp, self.expert, self.context)

    @functools.cached_property
    def n_data_shards(self):
        return math.prod(self.mesh.shape[axis] for axis in BATCH)

    @functools.cached_property
    def local_data_shards(self):
        # along these axes devices share sequences
        sharing = [AXES.index('tensor'), AXES.index('context')]
        devices = np.moveaxis(self.mesh.devices, sharing, [-2, -1])
        local = []
        for i, group in enumerate(devices.reshape(self.n_data_shards, -1)):
            if any(device.process_index == jax.process_index() for device in group):
                local.append(i)
        return local

    def shardings(self, tree):
        specs = partition_specs(tree, self.mesh)
        # ZeRO shards the optimizer state alone; the parameters are whole between two steps.
        if self.zero and hasattr(tree, 'opt_state'):
            over_replicas = partition_specs(tree.opt_state, self.mesh, over_replicas=True)
            specs = specs.replace(opt_state=over_replicas)
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)

    def shard_batch(self, batch, shape):
        """Moves this process's sequences to the devices as DataParallel's does, with the shards
        side by side on the last axis of `shape`, and positions sharded over context."""
        axis = len(shape) - 1
        each = shape[-1]

        def put(x):
            # The whole array, as all devices together hold it: [..., shards * each, positions].
            spec = P(*[None] * axis, BATCH, *['context'] * (x.ndim - 1))
            whole = (*shape[:-1], self.n_data_shards * each, *x.shape[1:])
            local = dict(zip(self.local_data_shards, x.reshape(-1, *shape, *x.shape[1:])))

            # What one device holds of it: its positions of the sequences of one shard.
            def part(index):
                shard_number = (index[axis].start or 0) // each
                return local[shard_number][..., *index[axis + 1:]]

            return jax.make_array_from_callback(whole, NamedSharding(self.mesh, spec), part)

        return jax.tree.map(put, batch)

    @property
    def n_losses(self):
        """Number of devices of which each takes the mean loss of its own sequences: with zero=1
        all of them. Otherwise XLA takes one mean over all sequences."""
        return len(self.devices) if self.zero == 1 else 1

    def shard_gradients(self, grads):
        return shard_params(grads, over_replicas=self.zero == 2)

    def reduce_gradients(self, sum_gradients):
        return reduce_over_replicas(sum_gradients) if self.zero == 1 else sum_gradients

    def shard_update(self, grads, params):
        if self.zero:
            return shard_params((grads, params), over_replicas=True)
        return grads, params

    def sum_over_devices(self, sums):
        return sums  # XLA takes one sum over all sequences

    def on_mesh(self, step):
        """Makes a function like step(state, batch) that is traced on the mesh."""
        def step_on_mesh(state, batch):
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                return step(state, batch)
        return step_on_mesh

    def train_step(self, step):
        """Compiles the step of make_train_step; the state that it is given is donated."""
        def sharded_step(state, batch):
            state, metrics = step(state, batch)
            # with zero, this all-gathers the parameters again
            state = jax.lax.with_sharding_constraint(state, self.shardings(state))
            return state, jax.tree.map(shard, metrics)
        return jax.jit(self.on_mesh(sharded_step), donate_argnums=0)

    def eval_step(self, step):
        """Compiles the step of make_eval_step."""
        return jax.jit(self.on_mesh(lambda params, batch: shard(step(params, batch))))

    def mesh_context(self):
        return jax.set_mesh(self.mesh)

    def validate(self, config):
        """Raises UserError for a model that the mesh cannot split."""
        n_devices = len(self.devices)

        # Each axis of the mesh divides what it shards.
        sizes = [
            ('tensor', 'n_head', config.n_head),
            ('tensor', 'n_kv_head', config.kv_heads),
            ('fsdp', 'n_embd', config.n_embd),
            ('expert', 'n_expert', config.moe.n_expert if config.moe else 1)]
        for flag, name, size in sizes:
            n = getattr(self, flag)
            if size % n:
                valid = [m for m in range(1, n_devices + 1) if size % m == 0 and n_devices % m == 0]
                raise UserError(f'{flag}={n} does not divide {name}={size}; on {n_devices} devices '
                                f'it may be one of {valid}')

        # Attention splits the part of each device again, so that all have as much work.
        if config.block_size % self.context**2:
            raise UserError(f'context={self.context}: its square must divide '
                            f'block_size={config.block_size}')
        if self.context > 1 and config.attention not in ('chunked', 'splash'):
            raise UserError(f'attention={config.attention} does not shard a sequence: use '
                            'attention=auto with context')


def reduce_over_replicas(sum_gradients):
    """Makes a function like sum_gradients(params, frozen, batch, scale) of the sequences of all
    devices, on a mesh whose only axis is data: each device computes the gradients of its own
    sequences; then they are reduce-scattered, once."""
    # A gradient is scattered along the dimension along which the optimizer state is sharded.
    def mean_shard(spec, grad):
        n_devices = jax.lax.axis_size('data')
        for dimension, axes in enumerate(spec):
            if 'data' in (axes or ()):
                total = jax.lax.psum_scatter(grad, 'data', scatter_dimension=dimension, tiled=True)
                return total / n_devices
        return jax.lax.pmean(grad, 'data')  # no dimension is divisible

    def reduced(params, frozen, batch, scale):
        specs = partition_specs(params, current_mesh(), over_replicas=True)

        # inside shard_map jax_ops sees no mesh, and computes as on one device
        def of_own_sequences(params, frozen, batch, scale):
            grads, metrics = sum_gradients(params, frozen, batch, scale)
            with jax.named_scope('reduce_scatter'):
                return jax.tree.map(mean_shard, specs, grads), jax.lax.pmean(metrics, 'data')

        in_specs = P(), P(), P(None, 'data'), P()
        run = jax.shard_map(of_own_sequences, in_specs=in_specs, out_specs=(specs, P()),
                            check_vma=False)
        return run(params, frozen, batch, scale)
    return reduced


def setup_distributed_training(devices, fsdp=1, tensor=1, expert=1, context=1, zero=0):
    """Chooses how a model runs on these devices: replicated, or on a mesh if fsdp, tensor, expert
    or context is more than 1, or zero more than 0.

    Raises UserError if their product does not divide the number of devices."""
    if zero not in (0, 1, 2):
        raise UserError(f'zero must be 0, 1 (ZeRO-1) or 2 (ZeRO-2), not {zero}; ZeRO-3 is --fsdp')
    is_replicated = fsdp == tensor == expert == context == 1
    if zero == 1 and not is_replicated:
        raise UserError('zero=1 goes without fsdp, tensor, expert and context; with them use '
                        '--zero=2')
    if is_replicated and not zero:
        return DataParallel(tuple(devices))
    create_mesh(devices, tensor, fsdp, expert, context)  # raises
    return MeshParallel(tuple(devices), fsdp, tensor, expert, context, zero)


def fit_layout(layout, given, n_devices, n_embd):
    """Returns the layout {'fsdp', 'tensor', 'expert', 'context'} of a resumed run on n_devices:
    `layout` if it fits. Otherwise the sizes that are not among the flags `given` now are replaced:
    fsdp becomes as large as it can, the others 1."""
    if n_devices % max(1, math.prod(layout.values())) == 0:
        return layout
    fitting = {name: size if name in given else 1 for name, size in layout.items()}
    # fsdp takes what the given sizes leave, as far as it divides the width.
    if 'fsdp' not in given and layout['fsdp'] > 1:
        left = n_devices // math.gcd(n_devices, math.prod(fitting.values()))
        fitting['fsdp'] = math.gcd(left, n_embd)
    return fitting


def pmap_step(step, devices, donate_argnums=()):
    """Runs step(state, batch) over several devices: the state and all results are replicated (not
    stacked), the batch has a leading device axis. `step` reduces over the axis 'data', so that
    every device has the same result."""
    return jax.pmap(step, axis_name='data', in_axes=(None, 0), out_axes=None, devices=devices,
                    donate_argnums=donate_argnums)


def pmap_train_step(step, devices):
    """pmap_step with a donated state: the training step of replicated data parallelism."""
    return pmap_step(step, devices, donate_argnums=0)


def split_batch(gradient_accumulation_steps, batch_size, n_devices):
    """Returns (micro-steps, micro-batch size) of each device. Devices split the micro-steps first,
    then the micro-batch: no device ever holds more than batch_size sequences.

    Raises UserError if they do not divide."""
    def batch_shards_of(n):
        return n // math.gcd(gradient_accumulation_steps, n)

    # Some devices compute different micro-steps, the others different sequences of a micro-step.
    step_shards = math.gcd(gradient_accumulation_steps, n_devices)
    batch_shards = batch_shards_of(n_devices)
    if batch_size % batch_shards:
        valid = [n for n in range(1, n_devices + 1) if batch_size % batch_shards_of(n) == 0]
        raise UserError(
            f'gradient_accumulation_steps={gradient_accumulation_steps} x batch_size={batch_size} '
            f'sequences cannot be shared equally by {n_devices} devices; these numbers of devices '
            f'can: {valid}; or make batch_size a multiple of {batch_shards}')
    return gradient_accumulation_steps // step_shards, batch_size // batch_shards
