"""What the scripts share, section by section: config and flags, devices and parallelism, data, tokenizers, optimizer
and schedule, train and eval steps, checkpoints, logging."""
import ast
import atexit
import contextlib
import ctypes
import dataclasses
import difflib
import errno
import functools
import json
import logging
import math
import os
import re
import runpy
import select
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jax_ops import BATCH, UserError, batch_axes, create_mesh, partition, partition_specs, shard
from jax_transformer import ATTENTION, DTYPES, GPT, GPTConfig, create_train_state

# -----------------------------------------------------------------------------
# config and flags


def exit_on_user_error(kind, error, traceback):
    """A sys.excepthook: a UserError, or a disk or memory that does not do, becomes one line on stderr and exit code 2; a
    reader of stdout that has gone away, as `head -1` does, a quiet end; everything else stays a traceback."""
    if isinstance(error, BrokenPipeError) and drop_unread_output():
        sys.exit(128 + signal.SIGPIPE)  # as a shell says it
    disk = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.EEXIST)
    if isinstance(error, MemoryError) or 'RESOURCE_EXHAUSTED' in str(error)[:100]:
        error = f'out of memory: use a smaller batch_size or model ({str(error)[:200]})'
    elif not isinstance(error, UserError) and not (isinstance(error, OSError) and error.errno in disk):
        return sys.__excepthook__(kind, error, traceback)
    print(f'error: {" ".join(str(error).split())}', file=sys.stderr)
    sys.exit(2)


@atexit.register  # before the interpreter writes what is left, and complains
def drop_unread_output():
    """Whether stdout is a pipe that nobody reads any more. What is still to be written to it is then dropped."""
    try:
        print(end='', flush=True)
        watch = select.poll()  # the write that has failed may have left nothing to flush
        watch.register(sys.stdout, 0)  # errors only
        if not watch.poll(0):
            return False
    except BrokenPipeError:
        pass
    except Exception:  # no poll (Windows), or stdout is no file
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def config_block(script):
    """The knobs of a script, {name: comment}: the assignments between its first two rulers (lines of dashes)."""
    source = Path(script).read_text(encoding='utf-8')
    block = re.split(r'^# -{20,}\n', source, maxsplit=2, flags=re.M)[1]
    return {m[1]: m[2] for m in re.finditer(r'^(\w+) = .*# (.*)$', block, flags=re.M)}


def read_flags(script, namespace, argv=None):
    """The script's config, {name: value}, and the names that the user gave: config files (Python files of assignments)
    and --name=value are applied in the order given. --help prints the block and exits.

    namespace: the script's globals(), which hold the defaults.
    Raises UserError for an unknown name or a value of another type; an int is a fine float."""
    argv = sys.argv[1:] if argv is None else argv
    comments = config_block(script)
    config, given = {name: namespace[name] for name in comments}, {}
    if '--help' in argv or '-h' in argv:
        print(f'usage: python {Path(script).name} [config/file.py ...] [--name=value ...]\n')
        for name, comment in comments.items():
            print(f'  --{name}={config[name]!r}  # {comment}')
        sys.exit(0)

    def override(name, value, text=None):
        if name not in config:
            near = difflib.get_close_matches(name, config, n=3, cutoff=0.6)
            raise UserError(f'unknown flag --{name}; ' + (f'did you mean --{" or --".join(near)}?' if near else
                                                          f'python {Path(script).name} --help lists all flags'))
        kind = type(namespace[name])
        if kind is str and text is not None:
            value = text  # what was typed: --start=123 is a prompt
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise UserError(f'--{name} takes a value of type {kind.__name__}, as in --{name}={namespace[name]!r}; '
                            f'got {value!r}')
        config[name] = given[name] = value

    for arg in argv:
        if not arg.startswith('--'):
            if not Path(arg).is_file():
                raise UserError(f'there is no config file {arg}; flags are written --name=value')
            try:
                tree = ast.parse(Path(arg).read_text(encoding='utf-8'))
                values = runpy.run_path(arg, init_globals=config)
            except Exception as error:
                raise UserError(f'config file {arg}: {type(error).__name__}: {error}') from error
            for node in ast.walk(tree):  # what the file assigns, also where that is the default
                assigned = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in values
                if assigned and not node.id.startswith('_'):
                    override(node.id, values[node.id])
            continue
        name, equals, text = arg[2:].partition('=')
        if not equals:
            raise UserError(f'flags are written --name=value; got {arg}')
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = text
        override(name, value, text)
    return config, given


MODEL_FLAGS = {'n_layer', 'n_head', 'n_embd', 'block_size', 'bias', 'norm', 'position', 'n_kv_head', 'qk_norm',
               'layer_types', 'window', 'mlp', 'n_inner', 'tied_head', 'n_expert', 'n_expert_used'}  # a checkpoint fixes


def config_from_flags(flags, **more):
    """The GPTConfig that the model's flags mean, and `more` of its fields. n_inner is the width of each expert, too."""
    own = {name: flags[name] for name in (*MODEL_FLAGS, 'dropout') if name not in ('n_expert', 'n_expert_used')}
    if flags['n_expert']:
        own['moe'] = {'n_expert': flags['n_expert'], 'n_used': flags['n_expert_used'],
                      'width': flags['n_inner'] or 4 * flags['n_embd'], 'balance': flags['expert_balance']}
    own['layer_types'] = tuple(kind.strip() for kind in flags['layer_types'].split(','))
    return GPTConfig(**own, **more)


def flags_from_config(config):
    """The model's flags as they would be for a config that came from elsewhere; what has no flag is left out."""
    own = {name: getattr(config, name) for name in MODEL_FLAGS if name not in ('n_expert', 'n_expert_used')}
    experts = (config.moe.n_expert, config.moe.n_used) if config.moe else (0, 2)
    return own | {'layer_types': ','.join(config.layer_types)} | dict(zip(('n_expert', 'n_expert_used'), experts))


def check_flags(config):
    """Raises UserError for training flags that are out of range."""
    for name in ('eval_interval', 'log_interval', 'eval_iters', 'gradient_accumulation_steps', 'batch_size',
                 'block_size'):
        if config[name] < 1:
            raise UserError(f'{name} must be at least 1, not {config[name]}')
    for name in ('max_iters', 'save_interval', 'warmup_iters', 'seed', 'learning_rate', 'min_lr', 'weight_decay',
                 'grad_clip', 'loss_chunk'):
        if not 0 <= config[name] < math.inf:
            raise UserError(f'{name} must be at least 0, not {config[name]}')
    if config['seed'] >= 2**32:
        raise UserError(f"seed must be below 2**32, not {config['seed']}")
    if not config['out_dir']:
        raise UserError('out_dir is empty; name a folder')
    for name in ('beta1', 'beta2'):
        if not 0 <= config[name] < 1:
            raise UserError(f'{name} must be in [0, 1), not {config[name]}')


# -----------------------------------------------------------------------------
# devices and parallelism

# dense bfloat16 FLOP/s of one device, from the vendors' data sheets; found by substring of jax's device_kind, in order
PEAK_FLOPS = {
    'H200': 989e12, 'H100 PCIe': 756e12, 'H100': 989e12, 'GH200': 989e12, 'B200': 2250e12, 'A100': 312e12,
    'L40S': 362e12, 'RTX 4090': 165e12, 'RTX 3090': 71e12, 'V100': 125e12, 'T4': 65e12,
    'TPU v2': 45e12, 'TPU v3': 123e12, 'TPU v4': 275e12, 'TPU v5 lite': 197e12, 'TPU v5e': 197e12, 'TPU v5': 459e12,
    'TPU v6': 918e12,
}


def device_peak_flops(device):
    """Peak FLOP/s of a device for the MFU, or None where we do not know it."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name.lower() in device.device_kind.lower()), None)


def check_device_availability(device='auto'):
    """The list of jax devices that the flag `device` means: 'auto' (the best kind there is), 'cpu', 'gpu' or 'cuda',
    'tpu'; one of them as 'cuda:1'. Raises UserError if it is not there."""
    kind, _, index = device.partition(':')
    if kind not in ('auto', 'cpu', 'gpu', 'cuda', 'tpu') or (index and not index.isdigit()):
        hint = '; JAX has no MPS, use cpu' if kind == 'mps' else ''
        raise UserError(f"device must be auto, cpu, cuda, tpu, or one of several as in cuda:0, not {device!r}{hint}")
    try:
        devices = jax.devices(None if kind == 'auto' else {'cuda': 'gpu'}.get(kind, kind))
    except RuntimeError:
        raise UserError(f'jax sees no {kind} here, only {jax.devices()[0].platform}; for an NVIDIA GPU install '
                        'jax[cuda13] (or jax[cuda12]), for a TPU jax[tpu]') from None
    if index and jax.process_count() > 1:
        raise UserError(f'device={device}, but several processes share all devices; leave out the number')
    if index and int(index) >= len(devices):
        raise UserError(f'there is no device {device}; there are {len(devices)} of the kind, counted from 0')
    return [devices[int(index)]] if index else devices


def prepare_jax(device):
    """What has to be said before jax starts its devices and threads: call it first."""
    kind = device.partition(':')[0]
    if kind == 'cpu':
        jax.config.update('jax_platforms', 'cpu')  # do not even start (and reserve the memory of) a GPU
    if kind in ('auto', 'cpu'):  # once jax has found out what auto is, it is too late
        keep_freed_memory()


def setup_jax_environment(device='auto', dtype='auto'):
    """Picks the devices and the compute dtype. Call before anything else touches jax, or prepare_jax() before that.

    Returns (devices, dtype, reason): bfloat16 where the hardware multiplies it fast, float32 elsewhere."""
    prepare_jax(device)
    devices = check_device_availability(device)
    if devices[0].platform != 'cpu':
        keep_compiled_programs(devices[0].platform)
    if dtype != 'auto':
        if dtype not in DTYPES:
            raise UserError(f'dtype must be auto, {", ".join(DTYPES)}, not {dtype!r}')
        return devices, dtype, 'as asked'
    platform = devices[0].platform
    if platform == 'tpu':
        return devices, 'bfloat16', 'TPUs multiply bfloat16'
    if platform == 'gpu':
        capability = getattr(devices[0], 'compute_capability', '0')
        fast = float(capability) >= 8
        reason = f'compute capability {capability}; from 8.0 on bfloat16 is fast'
        return devices, 'bfloat16' if fast else 'float32', reason
    return devices, 'float32', 'the CPU default'


def join_processes(coordinator_address='', num_processes=0, process_id=-1):
    """Makes this process one of those that train together, if there are several. Call before anything touches jax.

    coordinator_address: host:port of process 0, to which the others connect, with num_processes and process_id; 'auto'
        lets JAX find all three out (a TPU pod). Where it is empty and Slurm, Open MPI or an indexed Kubernetes job has
        started several processes, JAX finds them out as well.
    Raises UserError if the flags do not go together or the processes do not find each other."""
    if num_processes or process_id >= 0:
        if ':' not in coordinator_address or not 0 <= process_id < num_processes:
            raise UserError('several processes need --coordinator_address=host:port of process 0, --num_processes=N '
                            f'and --process_id=0 to N-1; got {coordinator_address!r}, {num_processes}, {process_id}')
    elif coordinator_address not in ('', 'auto'):
        raise UserError(f'--coordinator_address={coordinator_address} needs --num_processes and --process_id')
    several = (int(os.environ.get('SLURM_NTASKS', 1)) > 1 and 'SLURM_STEP_NODELIST' in os.environ
               or int(os.environ.get('OMPI_COMM_WORLD_SIZE', 1)) > 1
               or {'KUBERNETES_SERVICE_HOST', 'JOB_COMPLETION_INDEX'} <= os.environ.keys())
    if not coordinator_address and not several:
        return
    where = {} if coordinator_address in ('', 'auto') else dict(
        coordinator_address=coordinator_address, num_processes=num_processes, process_id=process_id)
    try:
        jax.distributed.initialize(**where, heartbeat_timeout_seconds=PEER_TIMEOUT,
                                   shutdown_timeout_seconds=PEER_TIMEOUT)
    except (ValueError, RuntimeError) as error:
        raise UserError(f'the processes do not find each other: {str(error)[:300]}') from error


PEER_TIMEOUT = 60  # seconds of silence after which a process counts as dead


def leave_without_peers(error):
    """Ends this process at once, with a line that says why, if `error` is what the death of another process looks like
    from here: all that comes later (the end of a checkpoint, of jax.distributed) would wait for the dead. Else it
    returns."""
    lost = isinstance(error, jax.errors.JaxRuntimeError) or isinstance(error.__cause__, jax.errors.JaxRuntimeError)
    if lost and jax.process_count() > 1 and 'RESOURCE_EXHAUSTED' not in str(error):
        print(f'error: process {jax.process_index()} of {jax.process_count()} has lost the others; start all of them '
              f'again, with --init_from=resume ({" ".join(str(error).split())[:300]})', file=sys.stderr, flush=True)
        os._exit(1)


@functools.cache  # once is enough
def keep_freed_memory():
    """Tells glibc never to give memory back to the system, and the system to use huge pages for it. XLA:CPU allocates its
    temporaries anew in every step; they would come with a page fault for every 4 kB, and these were half of the
    time of a training step and more. Call before jax starts its threads: one that has a heap of its own by then keeps to
    it, and takes what does not fit into that (64 MiB) from the system each time."""
    libc = ctypes.CDLL(None) if sys.platform == 'linux' else None
    if not hasattr(libc, 'mallopt'):  # only glibc has it
        return
    M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # malloc.h
    libc.mallopt(M_ARENA_MAX, 1)  # all threads share the one heap that can grow without limit
    libc.mallopt(M_MMAP_MAX, 0)  # large blocks come from it too
    libc.mallopt(M_TRIM_THRESHOLD, -1)  # and what is free at its end stays there
    # reserve half of the memory there is, which takes none as long as nobody writes to it, to say that it be huge pages
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes, libc.madvise.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    page, MADV_HUGEPAGE = os.sysconf('SC_PAGE_SIZE'), 14  # mman.h
    size = os.sysconf('SC_PHYS_PAGES') // 2 * page
    if block := libc.malloc(size):
        libc.madvise(-(-block // page) * page, size - page, MADV_HUGEPAGE)
        libc.free(block)


def keep_compiled_programs(platform):
    """Keeps what XLA compiles in a folder of the user's own, so that a second run starts at once; a folder per version
    and kind of device, because programs of others may not load. A JAX_COMPILATION_CACHE_DIR of the user's is left alone. Not for
    the CPU, where jax 0.10 finds nothing again on AVX-512 machines (jax-ml/jax#38445)."""
    if jax.config.jax_compilation_cache_dir is None:
        home = os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'
        folder = Path(home) / 'jax_transformer' / f'{platform}-jaxlib-{jax.lib.__version__}'
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # what lies there is run: nobody else's business
        except OSError:
            return  # a home that cannot be written to: compile every time
        jax.config.update('jax_compilation_cache_dir', str(folder))


# Blocks of this size and longer gain from attention in chunks on a CPU, see README.md
CHUNKED_FROM = 128


def choose_attention(asked, config, device, on_mesh=False):
    """(implementation, reason) for the flag --attention and training on `device`: 'auto' is cuDNN's flash attention where it
    works, in chunks on a CPU unless the block is short, else plain XLA. Raises UserError for an unknown or impossible one."""
    if asked not in ('auto', *ATTENTION):
        raise UserError(f'attention must be auto, {", ".join(ATTENTION)}, not {asked!r}')
    if asked == 'chunked' and on_mesh:
        raise UserError('attention=chunked goes sequence by sequence, which a mesh shares out; use --attention=auto')
    if asked in ('xla', 'chunked'):
        return asked, 'as asked'
    if asked == 'auto' and not config.plain_attention:
        return 'xla', 'the others do not compute windows, shared key heads, sinks, latents'
    if asked == 'auto' and device.platform == 'cpu':
        if on_mesh:
            return 'xla', 'chunks go by the sequence, which a mesh shares out'
        if config.block_size >= CHUNKED_FROM:
            return 'chunked', "keeps the probabilities in the CPU's cache"
        return 'xla', f'a block below {CHUNKED_FROM} fits into the cache'
    refusal = why_not_cudnn(config, device)
    if refusal and asked == 'cudnn':
        raise UserError(f'attention=cudnn does not work here: {refusal}; use --attention=auto')
    return ('xla', f'not cudnn: {refusal}') if refusal else ('cudnn', 'flash attention')


def why_not_cudnn(config, device):
    """Why cuDNN's attention cannot train this model on this device, or None if it can; the last condition is that a small
    case compiles."""
    width, capability = config.head_width, float(getattr(device, 'compute_capability', None) or 0)
    if device.platform != 'gpu' or 'cuda' not in device.client.platform_version:
        return 'it is for NVIDIA GPUs'
    if capability < 8:
        return f'it needs compute capability 8.0, this is {capability}'
    if config.dtype not in ('bfloat16', 'float16'):
        return f'it computes in 16 bits, not in {config.dtype}'
    if width % 8 or width > (256 if capability >= 9 else 128):
        return f'heads of {width} are not a multiple of 8 or too wide'
    if config.dropout:
        return 'it has no dropout'
    try:
        compile_cudnn(config, device)
    except Exception as error:  # of many kinds, and a message of many lines
        return f'{type(error).__name__}: {" ".join(str(error).split())[:150]}'
    return None


def compile_cudnn(config, device):
    """Compiles attention and its gradient for one sequence. It raises where cuDNN is missing, too old, or unwilling."""
    x = jax.ShapeDtypeStruct((1, config.block_size, config.n_head, config.head_width), config.dtype,
                             sharding=jax.sharding.SingleDeviceSharding(device))
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation='cudnn')
    jax.jit(jax.grad(lambda x: attend(x, x, x).astype(jnp.float32).sum())).lower(x).compile()


@dataclasses.dataclass(frozen=True)
class DataParallel:
    """Replicated data parallelism over `devices`: jit on one device, pmap on several, the same step function.

    The rows of an iteration are cut into n_shares equal shares, in order; a process reads those of its own devices."""
    devices: tuple

    @functools.cached_property
    def mesh(self):
        return Mesh(np.array(self.devices), ('data',))

    @functools.cached_property
    def n_shares(self):
        return math.prod(n for axis, n in self.mesh.shape.items() if axis in BATCH)

    @functools.cached_property
    def local_shares(self):
        shares = np.arange(self.n_shares).reshape([n if axis in BATCH else 1 for axis, n in self.mesh.shape.items()])
        here = np.vectorize(lambda d: d.process_index == jax.process_index())(self.mesh.devices)
        return sorted(set(np.broadcast_to(shares, self.mesh.devices.shape)[here].tolist()))

    def shardings(self, tree):
        """Where the leaves of a tree of parameters, or of a TrainState, lie."""
        return jax.tree.map(lambda _: NamedSharding(self.mesh, P()), tree)

    def put(self, tree):
        """A tree of arrays of this host (the same in every process), placed where shardings() says."""
        put = lambda x, where: jax.make_array_from_callback(np.shape(x), where, np.asarray(x).__getitem__)
        return jax.tree.map(put, tree, self.shardings(tree))

    def create(self, make, *args):
        """make(*args) where it will lie: no device ever holds more than its part."""
        tree = jax.eval_shape(lambda: make(*args))
        leaves = jax.jit(lambda: jax.tree.leaves(make(*args)), out_shardings=jax.tree.leaves(self.shardings(tree)))()
        return jax.tree.unflatten(jax.tree.structure(tree), leaves)

    def abstract(self, make, *args):
        """Shapes and placement of what create(make, *args) would be, without making it."""
        tree = jax.eval_shape(lambda: make(*args))
        return jax.tree.map(lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree,
                            self.shardings(tree))

    def local_rows(self, n_rows):
        """Which of the n_rows rows of an iteration this process has to read, for place()."""
        each = n_rows // self.n_shares
        return np.concatenate([share * each + np.arange(each) for share in self.local_shares])

    def place(self, batch, shape):
        """The local rows [R, ...] -> device arrays: a share is [*shape, ...], and several are stacked on a new axis."""
        if len(self.devices) == 1:
            return jax.device_put(jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), batch), self.devices[0])
        where = NamedSharding(self.mesh, P('data'))

        def put(x):
            share = dict(zip(self.local_shares, x.reshape(-1, *shape, *x.shape[1:])))
            return jax.make_array_from_callback((self.n_shares, *shape, *x.shape[1:]), where,
                                                lambda index: share[index[0].start][None])
        return jax.tree.map(put, batch)

    def largest(self, number):
        """The largest of the numbers that the processes give: an int, or a device array that comes to be one."""
        if jax.process_count() == 1:
            return number
        where = NamedSharding(Mesh(np.array(self.devices), ('data',)), P('data'))
        return largest(jax.make_array_from_callback((len(self.devices),), where, lambda index: np.array([number])))

    def entered(self):
        """A context in which what is compiled is compiled for this layout, by name of the mesh's axes."""
        return contextlib.nullcontext()

    def check(self, config):
        """Raises UserError for a model that does not fit this layout."""

    def train_step(self, step):
        return jax.jit(step, donate_argnums=0) if len(self.devices) == 1 else pmap_train_step(step, self.devices)

    def eval_step(self, step):
        return jax.jit(step) if len(self.devices) == 1 else pmap_step(step, self.devices)


largest = jax.jit(jnp.max)


@dataclasses.dataclass(frozen=True)
class MeshParallel(DataParallel):
    """jit over a mesh: parameters and the optimizer's state are cut as jax_ops.PARTITION says, the sequences over the
    axes BATCH. XLA puts the communication in."""
    fsdp: int = 1
    tensor: int = 1
    expert: int = 1

    @functools.cached_property
    def mesh(self):
        return create_mesh(self.devices, self.tensor, self.fsdp, self.expert)

    def shardings(self, tree):
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), partition_specs(tree, self.mesh))

    def place(self, batch, shape):
        """As DataParallel's, with the shares side by side on the last axis of shape."""
        axis, each = len(shape) - 1, shape[-1]
        where = NamedSharding(self.mesh, P(*[None] * axis, BATCH))

        def put(x):
            share = dict(zip(self.local_shares, x.reshape(-1, *shape, *x.shape[1:])))
            return jax.make_array_from_callback((*shape[:-1], self.n_shares * each, *x.shape[1:]), where,
                                                lambda index: share[(index[axis].start or 0) // each])
        return jax.tree.map(put, batch)

    def on_mesh(self, step):
        def step_on_mesh(state, batch):
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                return step(state, batch)
        return step_on_mesh

    def train_step(self, step):
        def partitioned(state, batch):
            state, metrics = step(state, batch)
            return partition(state), jax.tree.map(shard, metrics)
        return jax.jit(self.on_mesh(partitioned), donate_argnums=0)

    def eval_step(self, step):
        return jax.jit(self.on_mesh(lambda params, batch: shard(step(params, batch))))

    def entered(self):
        return jax.set_mesh(self.mesh)

    def check(self, config):
        n_devices, n_expert = len(self.devices), config.moe.n_expert if config.moe else 1
        for flag, name, size in (('tensor', 'n_head', config.n_head), ('tensor', 'n_kv_head', config.kv_heads),
                                 ('fsdp', 'n_embd', config.n_embd), ('expert', 'n_expert', n_expert)):
            if size % (n := getattr(self, flag)):
                valid = [m for m in range(1, n_devices + 1) if size % m == 0 and n_devices % m == 0]
                raise UserError(f'{flag}={n} does not divide {name}={size}; on {n_devices} devices it may be one of '
                                f'{valid}')


def setup_distributed_training(devices, fsdp=1, tensor=1, expert=1):
    """How training runs on these devices: replicated, or on a mesh where one of the others is more than 1."""
    if fsdp == tensor == expert == 1:
        return DataParallel(tuple(devices))
    create_mesh(devices, tensor, fsdp, expert)  # refuses what does not divide
    return MeshParallel(tuple(devices), fsdp, tensor, expert)


def pmap_step(step, devices, donate_argnums=()):
    """step(state, batch, axis_name) over several devices: the state and all results are replicated (not stacked), the
    batch has a leading device axis. `step` reduces over the axis itself, so that every device has the same result."""
    return jax.pmap(functools.partial(step, axis_name='data'), axis_name='data', in_axes=(None, 0), out_axes=None,
                    devices=devices, donate_argnums=donate_argnums)


def pmap_train_step(step, devices):
    """train_step over several devices, see pmap_step; the state is donated."""
    return pmap_step(step, devices, donate_argnums=0)


def split_rows(gradient_accumulation_steps, batch_size, n_devices):
    """(micro-steps, micro-batch) of each device, for gradient_accumulation_steps * batch_size sequences per iteration
    whatever the number of devices. Micro-steps are shared out first, then the micro-batch is cut, so that no device
    ever holds more than batch_size sequences. Raises UserError if they do not divide."""
    shared = math.gcd(gradient_accumulation_steps, n_devices)
    if batch_size % (n_devices // shared):
        valid = [n for n in range(1, n_devices + 1) if batch_size % (n // math.gcd(gradient_accumulation_steps, n)) == 0]
        raise UserError(f'gradient_accumulation_steps={gradient_accumulation_steps} x batch_size={batch_size} sequences '
                        f'cannot be shared equally by {n_devices} devices; these numbers of devices can: {valid}; '
                        f'or make batch_size a multiple of {n_devices // shared}')
    return gradient_accumulation_steps // shared, batch_size // (n_devices // shared)


# -----------------------------------------------------------------------------
# data: files of tokens, nothing but uint16 or uint32 one after the other, memory-mapped


def remedy_for(data_dir):
    """What to do about a data set that is not there or damaged."""
    prepare = data_dir / 'prepare.py'
    return f'run: python {prepare}' if prepare.exists() else (
        f'there is no {prepare} to make it; see "Your own text" in README.md')


def load_dataset_meta(data_dir):
    """{'vocab_size', 'dtype', 'tokenizer'} of a data set, from its meta.json. A folder without one is nanoGPT's: uint16
    tokens of GPT-2's BPE. Raises UserError for a missing data set and a damaged meta.json."""
    data_dir = Path(os.path.relpath(data_dir))
    remedy = remedy_for(data_dir)
    meta = {'vocab_size': 50257, 'dtype': 'uint16', 'tokenizer': {'kind': 'gpt2'}}
    if (data_dir / 'meta.json').exists():
        try:
            found = json.loads((data_dir / 'meta.json').read_text(encoding='utf-8'))
            meta = {key: found[key] for key in meta}
            vocab_size, tokenizer = meta['vocab_size'], meta['tokenizer']
            if meta['dtype'] not in ('uint16', 'uint32'):
                raise ValueError(f'dtype {meta["dtype"]!r} is not uint16 or uint32')
            if type(vocab_size) is not int or vocab_size < 1:
                raise ValueError(f'vocab_size {vocab_size!r} is not a number of tokens')
            if tokenizer['kind'] not in ('char', 'gpt2') or (
                    tokenizer['kind'] == 'char' and len(tokenizer['chars']) != vocab_size):
                raise ValueError('tokenizer is neither {"kind": "gpt2"} nor {"kind": "char", "chars": all characters}')
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f'{data_dir / "meta.json"} is damaged ({error}); {remedy}') from None
    elif (data_dir / 'meta.pkl').exists():
        raise UserError(f'{data_dir / "meta.pkl"} is a pickle, which we do not load; {remedy}, which writes meta.json')
    elif not (data_dir / 'train.bin').exists():
        raise UserError(f'there is no {data_dir / "train.bin"}; {remedy}')
    return meta


def load_dataset(data_dir, block_size):
    """Opens data_dir/{train,val}.bin as prepare.py wrote them.

    Returns ({'train': memmap, 'val': memmap}, vocab_size, tokenizer description), see load_dataset_meta.
    Raises UserError for missing, short or damaged files and for token ids outside the vocabulary."""
    data_dir = Path(os.path.relpath(data_dir))
    meta, remedy = load_dataset_meta(data_dir), remedy_for(data_dir)
    splits = {}
    for split in ('train', 'val'):
        path, width = data_dir / f'{split}.bin', np.dtype(meta['dtype']).itemsize
        if not path.exists():
            raise UserError(f'there is no {path}; {remedy}')
        size = path.stat().st_size
        if size % width:
            raise UserError(f'{path} has {size} bytes, not a multiple of {width} ({meta["dtype"]}): it is cut short or '
                            f'of another type; {remedy}')
        if size // width <= block_size:
            raise UserError(f'{path} has {size // width} tokens, and block_size={block_size} needs {block_size + 1}; '
                            'use more text or a smaller --block_size')
        splits[split] = np.memmap(path, dtype=meta['dtype'], mode='r')
        # all of it: 10**10 tokens (20 GB) take some seconds from memory, and a wrong id would train silently
        largest = max(int(splits[split][i:i + 10**7].max()) for i in range(0, size // width, 10**7))
        if largest >= meta['vocab_size']:
            raise UserError(f"{path} has token id {largest}, outside the vocabulary of {meta['vocab_size']}; {remedy}")
    return splits, meta['vocab_size'], meta['tokenizer']


DATA, DROPOUT = range(2)  # what a random draw is for: keeps the streams of one seed apart


@functools.lru_cache(maxsize=4)
def epoch_windows(n_tokens, block_size, seed, epoch):
    """Where the windows of one epoch start: a random offset, then all windows of block_size behind it, shuffled."""
    rng = np.random.default_rng([seed, DATA, epoch])
    n_windows = count_windows(n_tokens, block_size)
    offset = rng.integers(n_tokens - n_windows * block_size)
    return offset + block_size * rng.permutation(n_windows)


def count_windows(n_tokens, block_size):
    """Windows in an epoch. One less than fit (if several do) leaves block_size or more offsets to choose from."""
    return max(1, (n_tokens - 1) // block_size - 1)


def get_windows(tokens, start, block_size):
    """x and y, int32 [len(start), block_size]: the windows of `tokens` at `start`, and these shifted by one token."""
    window = tokens[start[:, None] + np.arange(block_size + 1)].astype(np.int32)
    return window[:, :-1], window[:, 1:]


def get_batch_jax(tokens, block_size, n_rows, seed, iteration, rows=None):
    """The windows of one iteration, x and y, int32 [n_rows, block_size]: rows iteration * n_rows and following of an
    endless shuffled stream in which an epoch shows every window once. A pure function of its arguments, wherever a run
    starts. (nanoGPT draws every window at random; one epoch's worth of those misses 1/e of the tokens.)
    rows: only these of the n_rows."""
    rows = np.arange(n_rows) if rows is None else rows
    epoch, place = np.divmod(iteration * n_rows + rows, count_windows(len(tokens), block_size))
    start = np.empty(len(rows), np.int64)
    for e in np.unique(epoch):
        start[epoch == e] = epoch_windows(len(tokens), block_size, seed, int(e))[place[epoch == e]]
    return get_windows(tokens, start, block_size)


# -----------------------------------------------------------------------------
# tokenizers, described by the small dict that travels in meta.json and in every checkpoint


class CharTokenizer:
    stop_tokens, chat_template = (), None  # ids that end a text; how a chat is written as a text

    def __init__(self, chars):
        self.chars, self.vocab_size = chars, len(chars)
        self.ids = {c: i for i, c in enumerate(chars)}

    def encode(self, text):
        if unknown := sorted(set(text) - self.ids.keys()):
            raise UserError(f'the prompt has characters that the model does not know: {" ".join(map(repr, unknown))}; '
                            f'it knows {self.chars!r}')
        return [self.ids[c] for c in text]

    def decode(self, ids):
        return ''.join(self.chars[i] for i in ids)


class GPT2Tokenizer:
    stop_tokens, chat_template = (), None

    def __init__(self):
        import tiktoken
        try:
            self.bpe = tiktoken.get_encoding('gpt2')
        except Exception as error:  # the first use downloads two files
            raise UserError(f"tiktoken cannot load GPT-2's BPE ({type(error).__name__}); without a network set "
                            'TIKTOKEN_CACHE_DIR to the tiktoken cache of a machine that has used it '
                            '(see "When it fails" in README.md)') from None
        self.vocab_size = self.bpe.n_vocab

    def encode(self, text):
        return self.bpe.encode(text, allowed_special={'<|endoftext|>'})

    def decode(self, ids):
        return self.bpe.decode(ids)


class FolderTokenizer:
    """The tokenizer of a Hugging Face folder: tokenizer.json, and what its other files say about the ends of texts and
    about chats. Special tokens can be written in a prompt, and are not shown in what is decoded."""

    def __init__(self, folder):
        from tokenizers import Tokenizer
        folder = Path(folder)
        try:
            self.tokenizer = Tokenizer.from_file(str(folder / 'tokenizer.json'))
        except Exception as error:  # its own class is Exception
            raise UserError(f'cannot read {folder / "tokenizer.json"} ({error}); copy or download it again') from None
        self.vocab_size = self.tokenizer.get_vocab_size()
        settings, ends, config = (read_json_object(folder / f'{name}.json') for name in (
            'tokenizer_config', 'generation_config', 'config'))
        ends = [found.get('eos_token_id') for found in (ends, config, config.get('text_config') or {})]
        ends = next((end for end in ends if end is not None), ())
        self.stop_tokens = tuple(ends) if isinstance(ends, (list, tuple)) else (ends,)
        template, self.chat_template = folder / 'chat_template.jinja', settings.get('chat_template')
        if template.exists():
            self.chat_template = template.read_text(encoding='utf-8')
        tokens = {name: settings.get(name) or '' for name in ('bos_token', 'eos_token')}
        self.special = {name: token['content'] if isinstance(token, dict) else token for name, token in tokens.items()}

    def encode(self, text):
        return self.tokenizer.encode(text).ids

    def decode(self, ids):
        return self.tokenizer.decode(ids)

    def encode_chat(self, messages):
        """The ids of messages [{'role': 'user' or 'assistant', 'content': text}] and of the beginning of the answer, as
        the folder's template writes them."""
        import jinja2.sandbox

        def raise_exception(message):
            raise UserError(f"the model's chat template refuses: {message}")

        jinja = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=['jinja2.ext.loopcontrols'])
        jinja.filters['tojson'] = lambda x, indent=None: json.dumps(x, ensure_ascii=False, indent=indent)
        jinja.globals |= {'raise_exception': raise_exception, 'strftime_now': time.strftime}
        try:
            text = jinja.from_string(self.chat_template).render(
                messages=messages, add_generation_prompt=True, **self.special)
        except jinja2.TemplateError as error:
            raise UserError(f"the model's chat template cannot be rendered: {error}") from None
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def read_json_object(path):
    """The object in a JSON file; {} if there is no such file. Raises UserError for other content."""
    try:
        values = json.loads(path.read_text(encoding='utf-8')) if path.exists() else {}
    except ValueError as error:
        raise UserError(f'{path} is not JSON ({error}); copy or download it again') from None
    if not isinstance(values, dict):
        raise UserError(f'{path} is not a JSON object; copy or download it again')
    return values


def whole_characters(text):
    """A text whose last token may have ended within a character (decoded as U+FFFD), without what is incomplete."""
    return text.rstrip('\ufffd')


def load_tokenizer(description):
    """The tokenizer that a description {'kind': 'char', 'chars': ...}, {'kind': 'gpt2'} or {'kind': 'folder', 'path':
    ...} means: it has encode(text), decode(ids), vocab_size, stop_tokens, chat_template. UserError for any other."""
    kind = description.get('kind')
    if kind == 'char':
        return CharTokenizer(description['chars'])
    if kind == 'gpt2':
        return GPT2Tokenizer()
    if kind == 'folder':
        return FolderTokenizer(description['path'])
    raise UserError(f'unknown kind of tokenizer {kind!r}')


# -----------------------------------------------------------------------------
# optimizer and schedule


SCHEDULES = ('cosine', 'linear', 'wsd', 'constant')
OPTIMIZERS = ('adamw', 'muon')


def create_learning_rate_schedule(learning_rate, *, decay_lr=True, warmup_iters=0, lr_decay_iters=0, min_lr=0.0,
                                  lr_schedule='cosine'):
    """step -> learning rate: linear warm-up from learning_rate / (warmup_iters + 1), then, as nanoGPT, a cosine down to min_lr
    at lr_decay_iters, and min_lr after it. lr_schedule: 'linear' is a straight line instead; 'wsd' (warm-up, stable, decay;
    arXiv:2404.06395) stays at learning_rate and only falls, in a line, in the last fifth; 'constant' never falls.
    decay_lr=False is learning_rate throughout, without a warm-up. Raises UserError for what makes no schedule."""
    if lr_schedule not in SCHEDULES:
        raise UserError(f'lr_schedule must be one of {", ".join(SCHEDULES)}, not {lr_schedule!r}')
    if not decay_lr:
        return optax.constant_schedule(learning_rate)
    warm_up = optax.linear_schedule(learning_rate / (warmup_iters + 1), learning_rate, warmup_iters)
    stable = optax.constant_schedule(learning_rate)
    if lr_schedule == 'constant':
        return optax.join_schedules([warm_up, stable], [warmup_iters])
    decay_iters = lr_decay_iters - warmup_iters
    if decay_iters <= 0:
        raise UserError(f'lr_decay_iters={lr_decay_iters} must be more than warmup_iters={warmup_iters}')
    if lr_schedule == 'cosine':
        return optax.warmup_cosine_decay_schedule(learning_rate / (warmup_iters + 1), learning_rate, warmup_iters,
                                                  lr_decay_iters, min_lr)
    if lr_schedule == 'wsd':
        decay_iters = -(-decay_iters // 5)
    return optax.join_schedules([warm_up, stable, optax.linear_schedule(learning_rate, min_lr, decay_iters)],
                                [warmup_iters, lr_decay_iters - decay_iters])


@optax.stateless
def orthogonalize(updates, params=None):
    """Replaces every matrix by about U V^T of its singular value decomposition U S V^T, by five steps of a quintic
    Newton-Schulz iteration (https://kellerjordan.github.io/posts/muon), times 0.2 sqrt(its longer side), which makes the
    elements as large as AdamW's updates (arXiv:2502.16982).

    optax.contrib.muon takes the matrices one by one. Those of the same shape in one batch take half the time on a CPU;
    the devices of a mesh share them out, if their number divides."""
    leaves, tree = jax.tree.flatten(updates)
    for shape in dict.fromkeys(leaf.shape for leaf in leaves):
        numbers = [i for i, leaf in enumerate(leaves) if leaf.shape == shape]
        x_NxRxC = jnp.stack([leaves[i] for i in numbers]).astype(jnp.float32)
        x_NxRxC = shard(x_NxRxC, batch_axes(len(numbers)), None, None)
        tall = shape[0] > shape[1]
        x_NxRxC = x_NxRxC.swapaxes(1, 2) if tall else x_NxRxC  # the products are of the size of the shorter side
        x_NxRxC /= jnp.linalg.norm(x_NxRxC, axis=(1, 2), keepdims=True) + 1e-8
        for _ in range(5):
            gram_NxRxR = x_NxRxC @ x_NxRxC.swapaxes(1, 2)
            x_NxRxC = 3.4445 * x_NxRxC + (-4.7750 * gram_NxRxR + 2.0315 * gram_NxRxR @ gram_NxRxR) @ x_NxRxC
        x_NxRxC = x_NxRxC.swapaxes(1, 2) if tall else x_NxRxC
        for i, x_RxC in zip(numbers, 0.2 * max(shape)**0.5 * x_NxRxC):
            leaves[i] = x_RxC.astype(leaves[i].dtype)
    return jax.tree.unflatten(tree, leaves)


def create_optimizer_with_schedule(schedule, *, beta1=0.9, beta2=0.95, weight_decay=0.1, optimizer='adamw'):
    """AdamW (arXiv:1711.05101) that decays tensors of 2 or more dimensions: matrices and embeddings, but no biases and
    norms. 'muon' moves the blocks' matrices by Muon instead, which makes their updates orthogonal (see orthogonalize);
    AdamW's learning rate and decay fit them.
    Clipping is not in it, see clip_gradients."""
    adamw = optax.adamw(schedule, b1=beta1, b2=beta2, eps=1e-8, weight_decay=weight_decay,
                        mask=lambda params: jax.tree.map(lambda p: p.ndim >= 2, params))
    if optimizer == 'adamw':
        return adamw
    if optimizer != 'muon':
        raise UserError(f'optimizer must be one of {", ".join(OPTIMIZERS)}, not {optimizer!r}')
    kind = lambda path, p: 'muon' if path[-1].key == 'kernel' and p.ndim == 2 else 'adamw'
    muon = optax.chain(optax.trace(0.95, nesterov=True), orthogonalize, optax.add_decayed_weights(weight_decay),
                       optax.scale_by_learning_rate(schedule))
    return optax.partition({'muon': muon, 'adamw': adamw}, lambda params: jax.tree.map_with_path(kind, params))


def clip_gradients(grads, max_norm):
    """Scales grads down to a global norm of max_norm, as torch.nn.utils.clip_grad_norm_ does; max_norm 0 does not clip.
    Returns (grads, norm before clipping)."""
    norm = optax.tree.norm(grads)
    if max_norm:
        scale = jnp.minimum(1, max_norm / (norm + 1e-6))
        grads = jax.tree.map(lambda g: g * scale, grads)
    return grads, norm


# -----------------------------------------------------------------------------
# train and eval steps


def cross_entropy(logits_BxTxV, targets_BxT):
    """-log softmax(logits)[target], [B, T]. It works on logits whose vocabulary is shared out over a mesh: XLA makes
    maximum, sum and the look-up of the target (each device looks in its own range) local ones and adds up [B, T]
    numbers; nothing of [B, T, V] moves, which a test of the compiled program shows."""
    with jax.named_scope('cross_entropy'):
        return optax.softmax_cross_entropy_with_integer_labels(logits_BxTxV, targets_BxT)


def make_train_step(config, seed, grad_clip, schedule, loss_chunk=0):
    """The one train_step(state, batch, axis_name=None) -> (state, metrics): jit it, or wrap it with pmap_train_step.

    batch: x and y [G, B, T] and row [G, B]; G micro-steps are accumulated and averaged into one update. `row` numbers
    the sequences of the whole run, and dropout depends on (seed, row) alone.
    loss_chunk: logits only ever exist for so many positions of a micro-batch at a time; 0 is all. Raises UserError if it
    does not divide the block.
    metrics: float32 scalars loss (the mean over all micro-steps and devices), grad_norm (before clipping), lr.
    float16: the loss is scaled to keep small gradients representable; an update with an overflow is skipped and
    the scale halved, 2000 good ones double it (as torch.amp.GradScaler). state.step counts the updates made."""
    if 0 < loss_chunk < config.block_size and config.block_size % loss_chunk:
        raise UserError(f'loss_chunk={loss_chunk} does not divide block_size={config.block_size}; '
                        f'it may be one of {[n for n in range(1, config.block_size) if config.block_size % n == 0]}')

    def loss_fn(params, micro, scale):
        loss, sown = GPT(config).apply(
            {'params': params}, micro['x'], deterministic=False, row_B=micro['row'], mutable=['losses'],
            rngs={'dropout': jax.random.fold_in(jax.random.key(seed), DROPOUT)},
            targets_BxT=micro['y'], loss=cross_entropy, loss_chunk=loss_chunk)
        loss = loss.mean()
        return (loss + sum(jax.tree.leaves(sown))) * scale, loss  # sown: what keeps experts balanced; not reported

    def train_step(state, batch, axis_name=None):
        scale = 1.0 if state.loss_scale is None else state.loss_scale['scale']

        def micro_step(total, micro):
            grads, loss = jax.grad(loss_fn, has_aux=True)(state.params, micro, scale)
            return jax.tree.map(jnp.add, total, (partition(grads), loss)), None

        n_micro = len(batch['x'])
        if n_micro == 1:  # no sum, no loop: they would pass over all gradients again
            grads, loss = jax.grad(loss_fn, has_aux=True)(state.params, jax.tree.map(lambda x: x[0], batch), scale)
            total = partition(grads), loss
        else:
            total = (partition(jax.tree.map(jnp.zeros_like, state.params)), jnp.float32(0))
            total, _ = jax.lax.scan(micro_step, total, batch)
        if axis_name:
            with jax.named_scope('all_reduce'):
                total = jax.lax.pmean(total, axis_name)
        grads, loss = total[0], total[1] / n_micro
        with jax.named_scope('clip'):
            grads, grad_norm = clip_gradients(jax.tree.map(lambda g: g / (n_micro * scale), grads), grad_clip)
        metrics = {'loss': loss, 'grad_norm': grad_norm, 'lr': jnp.float32(schedule(state.step))}
        with jax.named_scope('optimizer'):
            updated = state.apply_gradients(grads=grads)
        if state.loss_scale is not None:
            finite = jnp.isfinite(grad_norm)
            updated = jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated, state)
            good_steps = jnp.where(finite, state.loss_scale['good_steps'] + 1, 0)
            factor = jnp.where(finite, jnp.where(good_steps == 2000, 2.0, 1.0), 0.5)
            updated = updated.replace(loss_scale={'scale': scale * factor, 'good_steps': good_steps % 2000})
            metrics['loss_scale'] = scale
        return updated, metrics

    return train_step


def make_eval_step(config, loss_chunk=0):
    """eval_step(params, batch, axis_name=None) -> sum over the batch's rows of weight * mean loss of the row."""
    def eval_step(params, batch, axis_name=None):
        loss_BxT = GPT(config).apply({'params': params}, batch['x'], targets_BxT=batch['y'], loss=cross_entropy,
                                     loss_chunk=loss_chunk)
        total = (loss_BxT.mean(-1) * batch['weight']).sum()
        return jax.lax.psum(total, axis_name) if axis_name else total

    return eval_step


def estimate_loss_jax(eval_step, params, splits, parallel, *, block_size, batch_size, eval_iters):
    """{'train': loss, 'val': loss}, each the mean over eval_iters * batch_size windows spread evenly over the split:
    the same ones at every evaluation, whatever the seed or the number of devices, so that curves can be compared.

    eval_step: parallel.eval_step(make_eval_step(config)), which evaluates batch_size rows per device and call."""
    losses, n_rows = {}, eval_iters * batch_size
    per_call = batch_size * parallel.n_shares
    for split, tokens in splits.items():
        last, total = len(tokens) - block_size - 1, 0.0  # the last window's start
        for first in range(0, n_rows, per_call):
            rows = first + parallel.local_rows(per_call)  # those past the end only fill the last call, with weight 0
            x, y = get_windows(tokens, rows % n_rows * last // max(1, n_rows - 1), block_size)
            batch = {'x': x, 'y': y, 'weight': (rows < n_rows).astype(np.float32)}
            total += eval_step(params, parallel.place(batch, (batch_size,)))
        losses[split] = float(total) / n_rows
    return losses


# -----------------------------------------------------------------------------
# checkpoints: out_dir/ckpt/<iteration>, written by Orbax in the background, each complete or absent


def open_checkpoints(out_dir, read_only=False):
    """Orbax's manager of out_dir/ckpt: it keeps the latest checkpoint and the one with the lowest validation loss.
    Raises UserError if out_dir cannot be written."""
    import orbax.checkpoint as ocp
    from orbax.checkpoint import checkpoint_managers as policies
    for name in ('absl', 'asyncio'):  # Orbax logs what we ask for, and what we report ourselves
        logging.getLogger(name).setLevel(logging.CRITICAL)
    sys.unraisablehook = hide_closed_loops
    val_loss = lambda metrics: metrics['val_loss']
    options = ocp.CheckpointManagerOptions(
        preservation_policy=policies.AnyPreservationPolicy([
            policies.LatestN(1),
            # reverse: for Orbax the highest is the best. Saves between evaluations have no metrics, LatestN keeps them
            policies.BestN(get_metric_fn=val_loss, reverse=True, n=1, keep_checkpoints_without_metrics=False)]),
        best_fn=val_loss, best_mode='min',
        cleanup_tmp_directories=not read_only, read_only=read_only, create=not read_only)
    try:
        return ocp.CheckpointManager(os.path.abspath(os.path.join(out_dir, 'ckpt')), options=options,
                                     item_names=('params', 'opt_state', 'meta'))
    except OSError as error:
        raise UserError(f'cannot write to {out_dir}: {error.strerror}; choose another --out_dir') from error


def hide_closed_loops(unraisable):
    """A sys.unraisablehook. After a write failed, Orbax's other writes find their event loop closed, and say so at length."""
    if str(unraisable.exc_value) != 'Event loop is closed':
        sys.__unraisablehook__(unraisable)


def save_checkpoint(manager, iter_num, state, meta, val_loss=None):
    """Saves the state after iter_num iterations; returns once the values are copied, writing goes on in the background.

    meta: JSON metadata, see train_jax.py. val_loss: makes the checkpoint a candidate for the best.
    Raises UserError if this save or the one before it cannot be written (a full disk)."""
    import orbax.checkpoint as ocp
    state = jax.tree.map(everywhere, state)
    try:
        saved = manager.save(
            iter_num, metrics=None if val_loss is None else {'val_loss': val_loss},
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(state.params),
                opt_state=ocp.args.StandardSave(optimizer_item(state)),
                meta=ocp.args.JsonSave(meta)))
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(cannot_write(f'checkpoint {iter_num}', manager, error)) from error
    if not saved:
        raise UserError(f'{manager.directory} refuses checkpoint {iter_num}: it holds later ones, '
                        f'{manager.all_steps()}')


def everywhere(x):
    """With several processes, pmap's results are arrays of this one's devices; Orbax wants them as what they are,
    replicas on all devices."""
    if jax.process_count() == 1 or not isinstance(x, jax.Array) or not x.is_fully_addressable:
        return x
    shards = [shard.data for shard in x.addressable_shards]
    mesh = Mesh(np.array(jax.devices(shards[0].device.platform)), ('data',))
    return jax.make_array_from_single_device_arrays(x.shape, NamedSharding(mesh, P()), shards)


def cannot_write(what, manager, error):
    free = shutil.disk_usage(manager.directory).free / 1e6
    return (f'cannot write {what} to {manager.directory}, where {free:,.0f} MB are free; what it holds is complete, go on '
            f'with --init_from=resume ({str(error)[:200]})')


def finish_checkpoints(manager):
    """Waits until all that was saved is on disk. Raises UserError if it cannot be written."""
    try:
        manager.wait_until_finished()
        manager.close()
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(cannot_write('the last checkpoint', manager, error)) from error


def optimizer_item(state):
    """All of the state but the parameters, which are an item of their own so that sampling can restore them alone."""
    return {'step': state.step, 'opt_state': state.opt_state, 'loss_scale': state.loss_scale}


def load_meta(out_dir, which='latest'):
    """(iteration, metadata) of the 'latest' or 'best' checkpoint in out_dir. Raises UserError if there is none."""
    import orbax.checkpoint as ocp
    if which not in ('latest', 'best'):
        raise UserError(f'checkpoint must be latest or best, not {which!r}')
    nothing = UserError(f'there is no complete checkpoint in {os.path.join(out_dir, "ckpt")}; '
                        f'train one with: python train_jax.py --out_dir={out_dir}')
    if not os.path.isdir(os.path.join(out_dir, 'ckpt')):
        raise nothing
    with open_checkpoints(out_dir, read_only=True) as manager:
        step = manager.latest_step() if which == 'latest' else manager.best_step()
        if step is None:
            step = manager.latest_step()  # no evaluation yet
        if step is None:
            raise nothing
        try:
            meta = manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))['meta']
            GPTConfig(**meta['model'])
            if missing := {'iter_num', 'best_val_loss', 'tokenizer', 'flags', 'wandb_id'} - meta.keys():
                raise ValueError(f'its metadata lacks {sorted(missing)}')
        except Exception as error:
            raise UserError(f'{manager.directory / str(step)} is damaged or not a checkpoint of this program: '
                            f'{type(error).__name__}: {error}') from error
    return step, meta


def restore_items(out_dir, step, items):
    """Restores items {name: abstract tree} of checkpoint `step`; the leaves' shardings say where the values go."""
    import orbax.checkpoint as ocp
    with open_checkpoints(out_dir, read_only=True) as manager:
        try:
            return manager.restore(step, args=ocp.args.Composite(
                **{name: ocp.args.StandardRestore(tree) for name, tree in items.items()}))
        except Exception as error:
            raise UserError(f'{manager.directory / str(step)} does not fit the model or is damaged: '
                            f'{type(error).__name__}: {error}') from error


def load_run(out_dir, which='best', parallel=None):
    """(config, params, metadata) of the best or latest checkpoint in out_dir, params where `parallel` has them (on the
    first device, if not given). Nothing but the checkpoint is read. Raises UserError if there is none."""
    step, meta = load_meta(out_dir, which)
    config = GPTConfig(**meta['model'])
    parallel = parallel or setup_distributed_training(jax.devices()[:1])
    state = parallel.abstract(create_train_state, jax.random.key(0), config, optax.identity())
    return config, restore_items(out_dir, step, {'params': state.params})['params'], meta


def load_checkpoint(out_dir, step, state):
    """The whole TrainState of checkpoint `step`; `state` is its abstract tree. Raises UserError if it does not fit."""
    restored = restore_items(out_dir, step, {'params': state.params, 'opt_state': optimizer_item(state)})
    return state.replace(params=restored['params'], **restored['opt_state'])


@jax.jit
def all_finite(tree):
    return jnp.array([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all()


# -----------------------------------------------------------------------------
# logging


def write_text(path, text):
    """Writes a file that is complete or not there."""
    partial = Path(path).with_suffix('.tmp')
    try:
        partial.write_text(text, encoding='utf-8')
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


class MetricsLog:
    """out_dir/metrics.jsonl, one JSON object a line. Opening it for iteration `iter_num` drops what an earlier run
    logged from there on, and a line that was cut short: after a resume every iteration is there once."""

    def __init__(self, out_dir, iter_num=0):
        path = Path(out_dir) / 'metrics.jsonl'
        kept = [record for record in read_metrics(out_dir) if record['iter'] < iter_num]
        write_text(path, ''.join(json.dumps(record) + '\n' for record in kept))
        self.path, self.file = path, open(path, 'a', buffering=1)  # a line is in the file as soon as it is written

    def write(self, record):
        record = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        try:
            self.file.write(json.dumps(record) + '\n')
        except OSError as error:
            raise UserError(f'cannot write {self.path}: {error.strerror}; the checkpoints in its folder are complete, go on '
                            'with --init_from=resume') from error


def read_metrics(out_dir):
    """The records of out_dir/metrics.jsonl, without a last line that a kill cut short."""
    path, records = Path(out_dir) / 'metrics.jsonl', []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def plot_losses(out_dir):
    """Draws out_dir/loss.png from out_dir/metrics.jsonl: the loss of every logged iteration, train and val of every
    evaluation."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    records = read_metrics(out_dir)
    figure = Figure(figsize=(7, 4.5), layout='constrained')
    axes = FigureCanvasAgg(figure).figure.subplots()
    for key, label, style in (('loss', 'train, iterations', dict(color='0.8', lw=0.8)),
                              ('train_loss', 'train', dict(marker='.')), ('val_loss', 'val', dict(marker='.'))):
        points = [(r['iter'], r[key]) for r in records if r.get(key) is not None]
        if points:
            axes.plot(*zip(*points), label=label, **style)
    axes.set(xlabel='iteration', ylabel='loss (nats per token)')
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(Path(out_dir) / 'loss.tmp.png', dpi=120)
    os.replace(Path(out_dir) / 'loss.tmp.png', Path(out_dir) / 'loss.png')


def duration(seconds):
    """h:mm:ss"""
    minutes, seconds = divmod(round(seconds), 60)
    return f'{minutes // 60}:{minutes % 60:02}:{seconds:02}'


def measure_bandwidth(device):
    """Bytes per second / 1e9 that the device reads from its memory: the median of ten sums over half a GB, which no cache
    holds. The best would be what the machine can; beside neighbours, nothing that takes longer ever gets that much."""
    x = jax.device_put(jnp.ones(2**27, jnp.float32), device)
    total, seconds = jax.jit(jnp.sum), []
    for _ in range(11):
        start = time.perf_counter()
        total(x).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return x.nbytes / np.median(seconds[1:]) / 1e9  # the first one compiles


class Lap(NamedTuple):
    compiling: float
    running: float


class Stopwatch:
    """Tells the seconds that compiling took from the rest."""

    def __init__(self):
        self.compiling, self.start = 0.0, time.perf_counter()
        # jax reports the duration of tracing, lowering and compiling, each apart
        jax.monitoring.register_event_duration_secs_listener(self.count)

    def count(self, event, seconds, **how):
        if event.startswith('/jax/core/compile/'):
            self.compiling += seconds

    def lap(self):
        """Seconds since the last lap. Wait for the device before you ask."""
        seconds, compiling = time.perf_counter() - self.start, self.compiling
        self.compiling, self.start = 0.0, time.perf_counter()
        return Lap(compiling, max(0.0, seconds - compiling))


def progress_bar(done, total):
    """A tqdm bar that lives on a terminal only; its write() prints a line above it, or just prints."""
    from tqdm import tqdm
    return tqdm(initial=done, total=total, unit='iter', leave=False, disable=not sys.stderr.isatty())


def start_wandb(**settings):
    """A wandb run; given the id of an earlier one it continues that. Raises UserError if wandb is not to be had."""
    try:
        import wandb
        return wandb.init(resume='allow', **settings)
    except Exception as error:
        raise UserError(f'wandb does not start: {error}; log in (wandb login), set WANDB_MODE=offline, or leave it out '
                        '(--wandb_log=False)') from error


class StopSignal:
    """Catches SIGTERM and SIGINT so that the loop can save and leave; a second one kills at once."""

    def __init__(self):
        self.signum = 0  # none yet
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self.receive)

    def receive(self, signum, frame):
        self.signum = signum
        for caught in (signal.SIGTERM, signal.SIGINT):
            signal.signal(caught, signal.SIG_DFL)
