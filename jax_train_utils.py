"""What the scripts share, section by section: the model's flags, devices and parallelism, data, tokenizers, optimizer
and schedule, train and eval steps, checkpoints, logging."""
import array
import contextlib
import ctypes
import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import logging
import math
import operator
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import NamedTuple

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jax_flags import UserError, check_flags, exit_if_peer_died, read_json
from jax_generate import quantize_params
from jax_ops import (
    AXES, BATCH, Int8, LowRank, batch_axes, ceil_div, create_mesh, current_mesh, fused_causal_attention,
    partition_specs, shard, shard_params)
from jax_pretrained import load_pretrained, local_path
from jax_transformer import (
    ATTENTION, DTYPES, GPT, GPTConfig, count_params, create_train_state, span_limits)

# -----------------------------------------------------------------------------
# the model's flags

# the flags that a checkpoint fixes
MODEL_FLAGS = {'n_layer', 'n_head', 'n_embd', 'block_size', 'bias', 'norm', 'position', 'n_kv_head', 'qk_norm',
               'layer_types', 'window', 'mlp', 'n_inner', 'tied_head', 'n_expert', 'n_expert_used'}
# the flags that a resumed run does not take from its checkpoint
NOT_RESUMED = ('device', 'overwrite', 'eval_only', 'out_dir', 'coordinator_address', 'num_processes', 'process_id',
               'profile', 'base')


def merge_resumed_flags(flags, given, saved):
    """The flags of a resumed run: those `saved` in its checkpoint, overridden by those `given` now.

    flags: what read_flags returned; used where the checkpoint has no value or one that is not resumed.
    Raises UserError if the given flags ask for another optimizer or architecture."""
    saved = {name: value for name, value in saved.items() if name in flags and name not in NOT_RESUMED}
    optimizer = saved.get('optimizer', 'adamw')
    if given.get('optimizer', optimizer) != optimizer:
        raise UserError(f"cannot resume with another optimizer: {flags['out_dir']} holds the state of {optimizer}")
    saved = {'lora_rank': 0} | saved
    for name in (MODEL_FLAGS | {'lora_rank', 'lora_alpha', 'quantize'}) & given.keys() & saved.keys():
        if given[name] != saved[name]:
            raise UserError(f"cannot resume with another architecture: {flags['out_dir']} was trained with "
                            f"{name}={saved[name]}, not {name}={given[name]}")
    return {**flags, **saved, **given}


def resolve_flags(flags, given):
    """(the flags of this run, the metadata of the checkpoint that it resumes or None, its devices, its compute dtype),
    from what read_flags returned: init_from=auto becomes 'resume' or 'scratch', a resumed run keeps its flags except
    for those given now, and takes a layout that fits the devices. All processes must agree. Raises UserError for flags
    that are out of range, ask for another architecture or optimizer than the checkpoint's, or for devices not here."""
    own = ('process_id', 'out_dir', 'dataset')  # each process may have its own, if the content is the same
    check_agreement('flags', {name: value for name, value in flags.items() if name not in own} | {
        'the list of given flags': sorted(given.keys() - own)})
    out_dir = flags['out_dir']
    steps = checkpoint_steps(out_dir)
    if flags['init_from'] == 'auto':
        init_from = 'resume' if steps else 'scratch'
        flags, given = flags | {'init_from': init_from}, given | {'init_from': init_from}
    check_agreement('out_dir', {'init_from': flags['init_from'], 'checkpoints': steps})
    resumed = None
    if flags['init_from'] == 'resume':
        _, resumed = choose_checkpoint(out_dir)
        flags = merge_resumed_flags(flags, given, resumed['flags'])
    for name in ('compile', 'backend'):
        if name in given:
            print(f'--{name}={flags[name]} has no effect here: JAX always compiles, and picks its own communication')
    check_flags(flags)
    devices, dtype, reason = in_all_processes(setup_jax_environment, flags['device'], flags['dtype'])
    if resumed:
        layout = {name: flags[name] for name in ('fsdp', 'tensor', 'expert', 'context')}
        fitting = fit_layout(layout, given, len(devices), resumed['model']['n_embd'])
        if fitting != layout:
            print(f'{layout} of the resumed run does not fit {len(devices)} devices: taking {fitting}')
        flags = flags | fitting
    print(f'{len(devices)} x {devices[0].device_kind}, compute in {dtype} ({reason})')
    return flags, resumed, devices, dtype


def config_from_flags(flags, **more):
    """The GPTConfig that the model's flags mean, with `more` of its fields. n_inner is the width of each expert too."""
    fields = {name: flags[name] for name in (*MODEL_FLAGS, 'dropout') if name not in ('n_expert', 'n_expert_used')}
    fields['layer_types'] = tuple(layer_type.strip() for layer_type in flags['layer_types'].split(','))
    if flags['n_expert']:
        fields['moe'] = {'n_expert': flags['n_expert'], 'n_used': flags['n_expert_used'],
                         'width': flags['n_inner'] or 4 * flags['n_embd'], 'balance': flags['expert_balance']}
    return GPTConfig(**fields, **more)


def flags_from_config(config):
    """The model's flags for a config that did not come from flags; fields without a flag are left out."""
    flags = {name: getattr(config, name) for name in MODEL_FLAGS if name not in ('n_expert', 'n_expert_used')}
    flags['layer_types'] = ','.join(config.layer_types)
    flags['n_expert'] = config.moe.n_expert if config.moe else 0
    flags['n_expert_used'] = config.moe.n_used if config.moe else 2
    if config.moe:
        flags['expert_balance'] = config.moe.balance
    return flags


def for_this_run(config, flags, given, dtype):
    """The config of a trained model with the dropout, the compute dtype and, if it is given, the expert_balance of this
    run."""
    moe = config.moe
    if moe and 'expert_balance' in given:
        moe = dataclasses.replace(moe, balance=flags['expert_balance'])
    return dataclasses.replace(config, dropout=flags['dropout'], dtype=dtype, moe=moe)


# -----------------------------------------------------------------------------
# devices and parallelism

# dense bfloat16 FLOP/s of one device, from the vendors' data sheets; the first name found in jax's device_kind counts
PEAK_FLOPS = {
    'H200': 989e12, 'H100 PCIe': 756e12, 'H100': 989e12, 'GH200': 989e12, 'B200': 2250e12, 'A100': 312e12,
    'L40S': 362e12, 'RTX 4090': 165e12, 'RTX 3090': 71e12, 'V100': 125e12, 'T4': 65e12,
    'TPU v2': 45e12, 'TPU v3': 123e12, 'TPU v4': 275e12, 'TPU v5 lite': 197e12, 'TPU v5e': 197e12, 'TPU v5': 459e12,
    'TPU v6': 918e12,
}


def device_peak_flops(device):
    """Peak FLOP/s of a device for the MFU, or None if the device is not in PEAK_FLOPS."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name.lower() in device.device_kind.lower()), None)


def check_device_availability(device='auto'):
    """The list of jax devices that the flag `device` means: all of 'cpu', 'gpu' or 'cuda', 'tpu', or 'auto' (the best
    of these); 'cuda:1' is one of them. Raises UserError if it is not there."""
    kind, _, index = device.partition(':')
    if kind not in ('auto', 'cpu', 'gpu', 'cuda', 'tpu') or (index and not index.isdigit()):
        hint = '; JAX has no MPS, use cpu' if kind == 'mps' else ''
        raise UserError(f"device must be auto, cpu, cuda, tpu, or one of several as in cuda:0, not {device!r}{hint}")
    try:
        devices = jax.devices(None if kind == 'auto' else {'cuda': 'gpu'}.get(kind, kind))
    except RuntimeError:
        raise UserError(f'jax sees no {kind} here, only {jax.devices()[0].platform}; for an NVIDIA GPU install '
                        'jax[cuda13] (or jax[cuda12]), for a TPU jax[tpu]') from None
    if not index:
        return devices
    if jax.process_count() > 1:
        raise UserError(f'device={device}, but several processes share all devices; leave out the number')
    if kind != 'cpu' and jax.config.jax_cuda_visible_devices == index:  # set by configure_process
        return devices
    if int(index) >= len(devices):
        raise UserError(f'there is no device {device}; there are {len(devices)} of the kind, counted from 0')
    return [devices[int(index)]]


def configure_process(device, deterministic=False):
    """Process settings that must precede the initialization of JAX's backends: call it first.

    deterministic: GPUs compute the same bits in every run, at a cost; CPUs do so anyway."""
    kind, _, index = device.partition(':')
    if kind == 'cpu':
        jax.config.update('jax_platforms', 'cpu')  # do not initialize a GPU, which would reserve its memory
    if kind in ('cuda', 'gpu') and index:  # nor the other GPUs
        jax.config.update('jax_cuda_visible_devices', index)
        jax.config.update('jax_rocm_visible_devices', index)
    if deterministic:
        os.environ['XLA_FLAGS'] = os.environ.get('XLA_FLAGS', '') + ' --xla_gpu_deterministic_ops=true'
    if kind == 'cpu' or kind == 'auto' and not finds_accelerator():
        configure_malloc()
    jax.config.update('jax_cpu_enable_async_dispatch', False)  # see is_synchronous


def is_synchronous(device):
    """Whether a computation of this device alone is done, and its temporaries are freed, when its call returns. With
    asynchronous dispatch on a CPU, the next call often allocates its own before that: 3.8 to 9.1 GB for GPT-2 124M,
    instead of 3.8 (docs/performance.md#malloc)."""
    return device.platform == 'cpu'


def finds_accelerator(dev=Path('/dev')):
    """Whether --device=auto probably means a GPU or TPU: a plugin of JAX for one is installed, and Linux has such a
    device. JAX itself knows only once its backends are initialized, too late for configure_malloc."""
    plugins = importlib.metadata.entry_points(group='jax_plugins') or importlib.util.find_spec('libtpu')
    devices = [name for pattern in ('nvidia[0-9]*', 'kfd', 'accel[0-9]*', 'vfio/[0-9]*') for name in dev.glob(pattern)]
    return jax.config.jax_platforms != 'cpu' and bool(plugins and devices)


def setup_jax_environment(device='auto', dtype='auto'):
    """Picks the devices and the compute dtype. Call it, or configure_process() and then it, before anything uses jax.

    Returns (devices, dtype, reason): bfloat16 where the hardware multiplies it fast, float32 elsewhere. With float32,
    matmuls are computed in float32 on GPUs and TPUs too; JAX's default there is TF32 and bfloat16.
    Raises UserError for a device that is not there and for an unknown dtype."""
    configure_process(device)
    devices = check_device_availability(device)
    platform = devices[0].platform
    enable_compilation_cache(platform)
    if dtype not in ('auto', *DTYPES):
        raise UserError(f'dtype must be auto, {", ".join(DTYPES)}, not {dtype!r}')
    dtype, reason = (dtype, 'as asked') if dtype != 'auto' else default_dtype(devices[0])
    if dtype == 'float32' and platform != 'cpu':
        jax.config.update('jax_default_matmul_precision', 'highest')
        reason += '; matmuls in full float32, not TF32 or bfloat16'
    return devices, dtype, reason


def default_dtype(device):
    """(dtype, reason): what --dtype=auto is on this device."""
    if device.platform == 'tpu':
        return 'bfloat16', 'TPUs multiply bfloat16'
    if device.platform != 'gpu':
        return 'float32', 'the CPU default'
    capability = getattr(device, 'compute_capability', '0')
    if not nvidia_capability(device):
        return 'bfloat16', f'AMD GPU {capability}'
    if nvidia_capability(device) >= 8:
        return 'bfloat16', f'compute capability {capability}; from 8.0 on bfloat16 is fast'
    return 'float32', f'compute capability {capability}, where bfloat16 is slow; --dtype=float16 is fast from 7.0 on'


def nvidia_capability(device):
    """The compute capability of an NVIDIA GPU, 8.0 for '8.0'; 0.0 for other devices (an AMD GPU has 'gfx90a')."""
    try:
        return float(getattr(device, 'compute_capability', None) or 0)
    except ValueError:
        return 0.0


PEER_TIMEOUT = 60  # seconds of silence after which a process counts as dead


def initialize_distributed(coordinator_address='', num_processes=0, process_id=-1):
    """jax.distributed.initialize, if several processes train together. Call it before JAX initializes its backends.

    coordinator_address: host:port of process 0, to which the others connect, with num_processes and process_id; 'auto'
        lets JAX detect all three (a TPU pod). JAX also detects them where coordinator_address is empty and Slurm,
        Open MPI or an indexed Kubernetes job has started several processes; torchrun's variables are understood too.
    num_processes=1 starts alone, also where the environment speaks of several (a Kubernetes job of one pod).
    Raises UserError if the flags do not go together or the processes do not find each other."""
    if num_processes == 1 and not coordinator_address and process_id < 1:
        return
    if num_processes or process_id >= 0:
        if ':' not in coordinator_address or not 0 <= process_id < num_processes:
            raise UserError('several processes need --coordinator_address=host:port of process 0, --num_processes=N '
                            f'and --process_id=0 to N-1; got {coordinator_address!r}, {num_processes}, {process_id}')
    elif coordinator_address not in ('', 'auto'):
        raise UserError(f'--coordinator_address={coordinator_address} needs --num_processes and --process_id')
    elif not coordinator_address and int(os.environ.get('WORLD_SIZE', 1)) > 1 and 'RANK' in os.environ:
        return join_torchrun()
    in_pod = {'KUBERNETES_SERVICE_HOST', 'JOB_COMPLETION_INDEX'} <= os.environ.keys()
    several = (int(os.environ.get('SLURM_NTASKS', 1)) > 1 and 'SLURM_STEP_NODELIST' in os.environ
               or int(os.environ.get('OMPI_COMM_WORLD_SIZE', 1)) > 1 or in_pod)
    if not coordinator_address and not several:
        return
    if in_pod and coordinator_address in ('', 'auto') and importlib.util.find_spec('kubernetes') is None:
        raise UserError('JAX finds the pods of a Kubernetes job with the package kubernetes: pip install "jax[k8s]"; '
                        'for a job of one pod add --num_processes=1')
    cluster = {}  # JAX detects it
    if coordinator_address not in ('', 'auto'):
        cluster = dict(coordinator_address=coordinator_address, num_processes=num_processes, process_id=process_id)
    join(**cluster)


def join_torchrun():
    """Joins the processes that torchrun started, each with the one GPU that LOCAL_RANK names. MASTER_PORT is torchrun's
    own, the coordinator listens on the next one. Raises UserError for variables that are missing or not numbers."""
    env = os.environ
    try:
        join(coordinator_address=f"{env['MASTER_ADDR']}:{int(env['MASTER_PORT']) + 1}",
             num_processes=int(env['WORLD_SIZE']), process_id=int(env['RANK']),
             local_device_ids=int(env['LOCAL_RANK']) if 'LOCAL_RANK' in env else None)
    except (KeyError, ValueError) as error:
        raise UserError(f"torchrun's variables RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are incomplete ({error}); "
                        'set them all, or unset WORLD_SIZE to train in one process') from error


def join(**cluster):
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the wait for the others, up to 5 minutes
    try:
        jax.distributed.initialize(**cluster, heartbeat_timeout_seconds=PEER_TIMEOUT,
                                   shutdown_timeout_seconds=PEER_TIMEOUT)
    except (ValueError, RuntimeError) as error:
        raise UserError(f'the processes do not find each other: {str(error)[:300]}') from error


def gather_texts(text):
    """The texts of all processes, each of at most 64 kB, in the order of the processes."""
    if jax.process_count() == 1:
        return [text]
    from jax.experimental import multihost_utils
    mine = np.zeros(2**16, np.uint8)
    encoded = text.encode()[:len(mine)]
    mine[:len(encoded)] = list(encoded)
    return [bytes(row).rstrip(b'\0').decode(errors='ignore') for row in multihost_utils.process_allgather(mine)]


def in_all_processes(function, *args):
    """function(*args), called in all processes: a UserError in one of them is raised in all, so that none waits."""
    result = None
    message = ''
    try:
        result = function(*args)
    except UserError as error:
        message = str(error)
    messages = gather_texts(message)
    if len(set(messages)) == 1:
        messages = messages[:1]
    else:
        messages = [f'process {i}: {message}' for i, message in enumerate(messages) if message]
    if messages[0]:
        raise UserError(messages[0])
    return result


def check_agreement(what, values):
    """Raises UserError in all processes if `values`, {name: JSON value}, are not the same in all of them."""
    first, *others = [json.loads(text) for text in gather_texts(json.dumps(values))]
    for i, other in enumerate(others, start=1):
        different = [f'{name} is {first.get(name)} and {other.get(name)}' for name in first | other
                     if first.get(name) != other.get(name)]
        if different:
            raise UserError(f'processes 0 and {i} have different {what}, all must have the same: '
                            f'{", ".join(different)}')


@functools.cache  # one call is enough
def configure_malloc():
    """Tells glibc never to return memory to the system, and Linux to use huge pages for it. XLA:CPU allocates its
    temporaries in every step; the page faults, one per 4 kB, took half of a training step or more.

    Call it before jax starts its threads: a thread that already has its own arena keeps it, and takes what does not
    fit into that (64 MiB) from the system each time."""
    libc = ctypes.CDLL(None) if sys.platform == 'linux' else None
    if not hasattr(libc, 'mallopt'):  # only glibc has it
        return
    M_TRIM_THRESHOLD = -1  # these three: malloc.h
    M_MMAP_MAX = -4
    M_ARENA_MAX = -8
    libc.mallopt(M_ARENA_MAX, 1)  # all threads use the main heap, the only one without a size limit
    libc.mallopt(M_MMAP_MAX, 0)  # large blocks come from the heap too
    libc.mallopt(M_TRIM_THRESHOLD, -1)  # free memory at the end of the heap is kept
    # Mark half of the machine's memory as huge pages. Reserving it costs nothing until it is written to.
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    MADV_HUGEPAGE = 14  # mman.h
    page = os.sysconf('SC_PAGE_SIZE')
    size = os.sysconf('SC_PHYS_PAGES') // 2 * page
    block = libc.malloc(size)
    if block:
        libc.madvise(ceil_div(block, page) * page, size - page, MADV_HUGEPAGE)
        libc.free(block)


def trim_malloc():
    """Returns freed memory to the system, which after configure_malloc glibc does only when told to."""
    libc = ctypes.CDLL(None) if sys.platform == 'linux' else None
    if hasattr(libc, 'malloc_trim'):
        libc.malloc_trim(0)


def enable_compilation_cache(platform):
    """Keeps compiled programs in a folder that only this user can read, so that a second run starts at once. Each
    version of jaxlib, each platform and each kind of CPU has its own folder, because programs of others may not load.
    The environment's JAX_COMPILATION_CACHE_DIR takes precedence."""
    if jax.config.jax_compilation_cache_dir is not None or (platform == 'cpu' and not can_cache_on_cpu()):
        return
    name = cpu_name() if platform == 'cpu' else platform
    home = os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'
    folder = Path(home) / 'jax_transformer' / f'{name}-jaxlib-{jaxlib.__version__}'
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # programs in it are executed: keep others out
    except OSError:
        return  # the home folder is read-only: compile in every run
    jax.config.update('jax_compilation_cache_dir', str(folder))
    if platform == 'cpu':  # many small programs, which take 2 s to compile and 0.2 s to load
        jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)


def can_cache_on_cpu():
    """Whether compiled programs of this CPU load again: not for certain before jaxlib 0.10.2, which prints two lines
    about SIGILL for each program loaded where there is AVX-512 (jax-ml/jax#38445), nor tested elsewhere than on Linux,
    nor for several processes, of which only the first writes."""
    version = tuple(int(part) for part in jaxlib.__version__.split('.')[:3])
    return version >= (0, 10, 2) and sys.platform == 'linux' and jax.process_count() == 1


def cpu_name():
    """'cpu-' and a hash of what XLA compiles for: the CPU's model and instruction sets, and the number of threads."""
    fields = {line for line in Path('/proc/cpuinfo').read_text().splitlines()
              if re.match('(vendor_id|model name|flags|CPU implementer|CPU part|Features)\\b', line)}
    threads = os.environ.get('NPROC'), len(os.sched_getaffinity(0))  # XLA:CPU reads both
    return f'cpu-{zlib.crc32(repr((sorted(fields), threads)).encode()):08x}'


# Blocks of this size and longer take chunked attention: on a CPU because it is faster (docs/performance.md), on GPUs
# and TPUs without flash attention because the scores would take most of the memory (docs/parallelism.md#attention)
CHUNKED_FROM = {'cpu': 128, 'gpu': 2048, 'tpu': 2048}


def choose_attention(attention, config, device, *, tensor=1, context=1):
    """(implementation, reason) for the flag --attention and training on `device`, one of `tensor` that share the heads
    and `context` that share a sequence.

    'auto' is the device's flash attention (cuDNN or splash) where it computes this model, otherwise chunked attention
    for blocks of CHUNKED_FROM tokens and longer, otherwise plain XLA. Raises UserError for an unknown or impossible
    one."""
    if attention not in ('auto', *ATTENTION):
        raise UserError(f'attention must be auto, {", ".join(ATTENTION)}, not {attention!r}')
    if attention in ('xla', 'chunked'):
        return attention, 'as asked'
    refusals = {'cudnn': why_not_cudnn, 'splash': why_not_splash}
    if context > 1:
        refusals['cudnn'] = lambda *_: 'it does not shard a sequence'
        refusals['splash'] = functools.partial(why_not_splash, context=context)
    if attention != 'auto':
        refusal = refusals[attention](config, device, tensor)
        if refusal:
            raise UserError(f'attention={attention} does not work here: {refusal}; use --attention=auto')
        return attention, 'as asked'
    why_not = ''
    flash = {'gpu': 'cudnn', 'tpu': 'splash'}.get(device.platform)
    if flash:
        refusal = refusals[flash](config, device, tensor)
        if not refusal:
            return flash, 'flash attention'
        why_not = f'; not {flash}: {refusal}'
    least = CHUNKED_FROM.get(device.platform, 128)
    if config.block_size < least and context == 1:
        return 'xla', f'a block below {least} has small scores{why_not}'
    if device.platform == 'cpu':
        return 'chunked', "keeps the probabilities in the CPU's cache"
    return 'chunked', f'never stores the scores{why_not}'


def why_not_flash(config):
    """Why neither cuDNN nor splash attention can train this model, or None."""
    if config.mla:
        return 'latent attention has keys and values of different widths'
    if config.dropout:
        return 'it has no dropout'
    return None


def why_not_cudnn(config, device, tensor=1):
    """Why cuDNN's attention cannot train this model on this device, or None if it can. The last check compiles it."""
    width = config.head_width
    capability = nvidia_capability(device)
    version = device.platform == 'gpu' and device.client.platform_version
    if not version or not ('cuda' in version or 'NVIDIA' in version):  # NVIDIA: compiled ahead of time
        return 'it is for NVIDIA GPUs'
    if capability < 8:
        return f'it needs compute capability 8.0, this is {capability}'
    if config.dtype not in ('bfloat16', 'float16'):
        return f'it computes in 16 bits, not in {config.dtype}'
    if width % 8 or width > (256 if capability >= 9 else 128):
        return f'heads of {width} are not a multiple of 8 or too wide'
    if config.sinks:
        return 'it has no sinks'
    if 'chunk' in config.layer_types and config.chunk < config.block_size and config.block_size % config.chunk:
        return f'chunks of {config.chunk} do not divide block_size={config.block_size}'
    if reason := why_not_flash(config):
        return reason
    try:
        for layer_type in sorted(set(config.layer_types)):
            compile_cudnn(config, device, layer_type, tensor)
    except Exception as error:  # of many types, with messages of many lines
        return f'{type(error).__name__}: {" ".join(str(error).split())[:150]}'
    return None


def compile_cudnn(config, device, layer_type='full', tensor=1):
    """Compiles a layer's attention and its gradient for one sequence and one device's heads. Raises if cuDNN is
    missing, too old, or refuses."""
    here = jax.sharding.SingleDeviceSharding(device)
    q, k = (jax.ShapeDtypeStruct((1, config.block_size, n // tensor, config.head_width), config.dtype, sharding=here)
            for n in (config.n_head, config.kv_heads))

    def total(q, k, v):
        y = fused_causal_attention('cudnn', q, k, v, scale=config.attention_scale, **span_limits(config, layer_type))
        return y.astype(jnp.float32).sum()

    jax.jit(jax.grad(total, (0, 1, 2))).lower(q, k, k).compile()


def why_not_splash(config, device, tensor=1, context=1):
    """Why TPUs' splash attention cannot train this model on this device, or None if it can."""
    if device.platform != 'tpu':
        return 'it is for TPUs'
    if config.head_width not in (64, 128):
        return f'heads are {config.head_width} wide, not 64 or 128'
    if config.block_size % (128 * context):
        return f'{128 * context} does not divide block_size={config.block_size}'
    return why_not_flash(config)


@dataclasses.dataclass(frozen=True)
class DataParallel:
    """Replicated data parallelism over `devices`: the same step function, under jit on one device, pmap on several.

    The global batch is split into n_data_shards contiguous shards; a process loads the shards of its own devices."""
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
        return [i for i, device in enumerate(self.devices) if device.process_index == jax.process_index()]

    def shardings(self, tree):
        """The sharding of each leaf of a tree of parameters, or of a TrainState."""
        return jax.tree.map(lambda _: NamedSharding(self.mesh, P()), tree)

    def device_put(self, tree):
        """A tree of host arrays (the same in every process) -> device arrays, sharded as shardings() says."""
        put = lambda x, sharding: jax.make_array_from_callback(np.shape(x), sharding, np.asarray(x).__getitem__)
        return jax.tree.map(put, tree, self.shardings(tree))

    def init_sharded(self, make, *args):
        """make(*args) under jit with sharded outputs: no device materializes the full tree."""
        tree = jax.eval_shape(lambda: make(*args))
        leaves = jax.jit(lambda: jax.tree.leaves(make(*args)), out_shardings=jax.tree.leaves(self.shardings(tree)))()
        return jax.tree.unflatten(jax.tree.structure(tree), leaves)

    def abstract_state(self, make, *args):
        """The ShapeDtypeStructs, with shardings, of init_sharded(make, *args), which is not run."""
        tree = jax.eval_shape(lambda: make(*args))
        abstract = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        return jax.tree.map(abstract, tree, self.shardings(tree))

    def local_rows(self, n_rows):
        """Which of the n_rows sequences of an iteration this process loads, for shard_batch()."""
        each = n_rows // self.n_data_shards
        return np.concatenate([i * each + np.arange(each) for i in self.local_data_shards])

    def shard_batch(self, batch, shape):
        """This process's sequences [n, ...] -> device arrays [*shape, ...], with a leading device axis if several."""
        if len(self.devices) == 1:
            return jax.device_put(jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), batch), self.devices[0])
        sharding = NamedSharding(self.mesh, P('data'))

        def put(x):
            local = dict(zip(self.local_data_shards, x.reshape(-1, *shape, *x.shape[1:])))
            return jax.make_array_from_callback((self.n_data_shards, *shape, *x.shape[1:]), sharding,
                                                lambda index: local[index[0].start][None])
        return jax.tree.map(put, batch)

    def max_over_processes(self, number):
        """The maximum of `number` over all processes: an int, or with several processes a device array, not awaited."""
        if jax.process_count() == 1:
            return number
        sharding = NamedSharding(Mesh(np.array(self.devices), ('data',)), P('data'))
        return global_max(jax.make_array_from_callback((len(self.devices),), sharding, lambda _: np.array([number])))

    def mesh_context(self):
        """The context to run compiled functions in: on a mesh, jax.set_mesh."""
        return contextlib.nullcontext()

    def validate(self, config):
        """Raises UserError for a model that the mesh cannot split."""

    def train_step(self, step):
        return jax.jit(step, donate_argnums=0) if len(self.devices) == 1 else pmap_train_step(step, self.devices)

    def eval_step(self, step):
        return jax.jit(step) if len(self.devices) == 1 else pmap_step(step, self.devices)


global_max = jax.jit(jnp.max)


@dataclasses.dataclass(frozen=True)
class MeshParallel(DataParallel):
    """jit over a mesh: parameters and optimizer state are sharded by jax_ops.PARTITION_RULES, sequences over the axes
    BATCH. XLA's SPMD partitioner inserts the collectives."""
    fsdp: int = 1
    tensor: int = 1
    expert: int = 1
    context: int = 1
    zero: int = 0  # 1 shards the optimizer state over the replicas of the parameters in addition, see make_train_step

    @functools.cached_property
    def mesh(self):
        return create_mesh(self.devices, self.tensor, self.fsdp, self.expert, self.context)

    @functools.cached_property
    def n_data_shards(self):
        return math.prod(self.mesh.shape[axis] for axis in BATCH)

    @functools.cached_property
    def local_data_shards(self):
        devices = np.moveaxis(self.mesh.devices, [AXES.index('tensor'), AXES.index('context')], [-2, -1])
        local = []
        for i, group in enumerate(devices.reshape(self.n_data_shards, -1)):  # its devices have the same sequences
            if any(device.process_index == jax.process_index() for device in group):
                local.append(i)
        return local

    def shardings(self, tree):
        specs = partition_specs(tree, self.mesh)
        if self.zero and hasattr(tree, 'opt_state'):
            specs = specs.replace(opt_state=partition_specs(tree.opt_state, self.mesh, over_replicas=True))
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)

    def shard_batch(self, batch, shape):
        """As DataParallel's, with the shards side by side on the last axis of `shape`, and positions over context."""
        axis = len(shape) - 1
        each = shape[-1]

        def put(x):
            local = dict(zip(self.local_data_shards, x.reshape(-1, *shape, *x.shape[1:])))
            sharding = NamedSharding(self.mesh, P(*[None] * axis, BATCH, *['context'] * (x.ndim - 1)))
            part = lambda index: local[(index[axis].start or 0) // each][..., *index[axis + 1:]]
            return jax.make_array_from_callback(
                (*shape[:-1], self.n_data_shards * each, *x.shape[1:]), sharding, part)
        return jax.tree.map(put, batch)

    def on_mesh(self, step):
        def step_on_mesh(state, batch):
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                return step(state, batch)
        return step_on_mesh

    def train_step(self, step):
        def sharded_step(state, batch):
            state, metrics = step(state, batch)
            return jax.lax.with_sharding_constraint(state, self.shardings(state)), jax.tree.map(shard, metrics)
        return jax.jit(self.on_mesh(sharded_step), donate_argnums=0)

    def eval_step(self, step):
        return jax.jit(self.on_mesh(lambda params, batch: shard(step(params, batch))))

    def mesh_context(self):
        return jax.set_mesh(self.mesh)

    def validate(self, config):
        n_devices = len(self.devices)
        n_expert = config.moe.n_expert if config.moe else 1
        for flag, name, size in (('tensor', 'n_head', config.n_head), ('tensor', 'n_kv_head', config.kv_heads),
                                 ('fsdp', 'n_embd', config.n_embd), ('expert', 'n_expert', n_expert)):
            n = getattr(self, flag)
            if size % n:
                valid = [m for m in range(1, n_devices + 1) if size % m == 0 and n_devices % m == 0]
                raise UserError(f'{flag}={n} does not divide {name}={size}; on {n_devices} devices it may be one of '
                                f'{valid}')
        if config.block_size % self.context**2:
            raise UserError(f'context={self.context}: its square must divide block_size={config.block_size}')
        if self.context > 1 and config.attention not in ('chunked', 'splash'):
            raise UserError(f'attention={config.attention} does not shard a sequence: use attention=auto with context')


def setup_distributed_training(devices, fsdp=1, tensor=1, expert=1, context=1, zero=0):
    """How training runs on these devices: replicated, or on a mesh if fsdp, tensor, expert or context is more than 1,
    or zero more than 0. Raises UserError if their product does not divide the number of devices."""
    if zero not in (0, 1, 2):
        raise UserError(f'zero must be 0, 1 (ZeRO-1) or 2 (ZeRO-2), not {zero}; ZeRO-3 is --fsdp')
    is_replicated = fsdp == tensor == expert == context == 1
    if zero == 1 and not is_replicated:
        raise UserError('zero=1 goes without fsdp, tensor, expert and context; with them use --zero=2')
    if is_replicated and not zero:
        return DataParallel(tuple(devices))
    create_mesh(devices, tensor, fsdp, expert, context)  # raises
    return MeshParallel(tuple(devices), fsdp, tensor, expert, context, zero)


def fit_layout(layout, given, n_devices, n_embd):
    """The layout {'fsdp', 'tensor', 'expert', 'context'} of a resumed run on n_devices: `layout` if it fits. Otherwise
    the sizes that are not among the flags `given` now are replaced: fsdp becomes as large as it can, the others 1."""
    if not n_devices % max(1, math.prod(layout.values())):
        return layout
    fitting = {name: size if name in given else 1 for name, size in layout.items()}
    if 'fsdp' not in given and layout['fsdp'] > 1:
        fitting['fsdp'] = math.gcd(n_devices // math.gcd(n_devices, math.prod(fitting.values())), n_embd)
    return fitting


def pmap_step(step, devices, donate_argnums=()):
    """step(state, batch, axis_name) over several devices: the state and all results are replicated (not stacked), the
    batch has a leading device axis. `step` all-reduces over the axis, so that every device has the same result."""
    return jax.pmap(functools.partial(step, axis_name='data'), axis_name='data', in_axes=(None, 0), out_axes=None,
                    devices=devices, donate_argnums=donate_argnums)


def pmap_train_step(step, devices):
    """pmap_step with a donated state."""
    return pmap_step(step, devices, donate_argnums=0)


def split_batch(gradient_accumulation_steps, batch_size, n_devices):
    """(micro-steps, micro-batch size) of each device. Devices split the micro-steps first, then the micro-batch: no
    device ever holds more than batch_size sequences. Raises UserError if they do not divide."""
    step_shards = math.gcd(gradient_accumulation_steps, n_devices)
    batch_shards = n_devices // step_shards
    if batch_size % batch_shards:
        divides = lambda n: batch_size % (n // math.gcd(gradient_accumulation_steps, n)) == 0
        valid = [n for n in range(1, n_devices + 1) if divides(n)]
        raise UserError(f'gradient_accumulation_steps={gradient_accumulation_steps} x batch_size={batch_size} '
                        f'sequences cannot be shared equally by {n_devices} devices; these numbers of devices can: '
                        f'{valid}; or make batch_size a multiple of {batch_shards}')
    return gradient_accumulation_steps // step_shards, batch_size // batch_shards


# -----------------------------------------------------------------------------
# data: files of tokens, contiguous uint16 or uint32 without a header, memory-mapped


def relative_path(path):
    """The path from the current folder, short in messages; unchanged if it is on another drive (Windows)."""
    try:
        return Path(os.path.relpath(path))
    except ValueError:
        return Path(path)


def remedy_for(data_dir):
    """What to do about a data set that is missing or damaged."""
    prepare = data_dir / 'prepare.py'
    if prepare.exists():
        return f'run: python {prepare}'
    return f'there is no {prepare} to make it; see "Your own text" in README.md'


# writes the meta.json of a data set of characters from nanoGPT's meta.pkl
CONVERT_META = """import json, pickle, sys; folder = sys.argv[1]; \
itos = pickle.load(open(folder + '/meta.pkl', 'rb'))['itos']; chars = ''.join(itos[i] for i in range(len(itos))); \
meta = {'vocab_size': len(chars), 'dtype': 'uint16', 'tokenizer': {'kind': 'char', 'chars': chars}}; \
json.dump(meta, open(folder + '/meta.json', 'w'))"""


def load_dataset_meta(data_dir):
    """{'vocab_size', 'dtype', 'tokenizer', 'max_id', 'train_tokens', 'val_tokens'} of a data set, from its meta.json,
    the last three None if it lacks them. A folder without a meta.json is nanoGPT's: uint16 tokens of GPT-2's BPE.
    Raises UserError for a missing data set and a damaged meta.json."""
    data_dir = relative_path(data_dir)
    remedy = remedy_for(data_dir)
    meta = {'vocab_size': 50257, 'dtype': 'uint16', 'tokenizer': {'kind': 'gpt2'}}
    checked = {'max_id': None, 'train_tokens': None, 'val_tokens': None}  # as prepare.py has counted them
    if (data_dir / 'meta.json').exists():
        try:
            found = json.loads((data_dir / 'meta.json').read_text(encoding='utf-8'))
            meta = {key: found[key] for key in meta}
            checked = {key: found.get(key) for key in checked}
            vocab_size = meta['vocab_size']
            tokenizer = meta['tokenizer']
            if meta['dtype'] not in ('uint16', 'uint32'):
                raise ValueError(f'dtype {meta["dtype"]!r} is not uint16 or uint32')
            if type(vocab_size) is not int or vocab_size < 1:
                raise ValueError(f'vocab_size {vocab_size!r} is not a number of tokens')
            if tokenizer['kind'] not in ('char', 'gpt2', 'folder') or (
                    tokenizer['kind'] == 'char' and len(tokenizer['chars']) != vocab_size):
                raise ValueError('tokenizer is none of {"kind": "gpt2"}, {"kind": "char", "chars": all characters}, '
                                 '{"kind": "folder", "path": where its tokenizer.json is}')
            meta['tokenizer'] = locate_tokenizer(tokenizer, data_dir)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f'{data_dir / "meta.json"} is damaged ({error}); {remedy}') from None
    elif (data_dir / 'meta.pkl').exists():
        raise UserError(f'{data_dir / "meta.pkl"} is a pickle, which can run programs and is not loaded; if you trust '
                        f'it, convert it once: {sys.executable} -c "{CONVERT_META}" {data_dir}')
    elif not token_files(data_dir, 'train'):
        raise UserError(f'there is no {data_dir / "train.bin"}; {remedy}')
    return meta | checked


def token_files(data_dir, name):
    """[data_dir/name.bin], or name_000.bin, name_001.bin, ... in order; [] if there are none. Raises UserError if one
    of these is missing, or both forms are there."""
    one = data_dir / f'{name}.bin'
    several = sorted(data_dir.glob(f'{name}_[0-9]*.bin'), key=lambda path: int(path.stem[len(name) + 1:]))
    numbers = [int(path.stem[len(name) + 1:]) for path in several]
    if numbers != list(range(len(numbers))):
        raise UserError(f'{data_dir} has the files {name}_*.bin of the numbers {numbers}, not 0 to {len(numbers) - 1}')
    if several and one.exists():
        raise UserError(f'{data_dir} has both {one.name} and {several[0].name}: remove one of these forms')
    return several or ([one] if one.exists() else [])


class TokenFiles:
    """Several files of tokens, memory-mapped and read as one array: len(tokens), tokens[slice], tokens[indices]."""

    def __init__(self, paths, dtype):
        self.files = [np.memmap(path, dtype, mode='r') for path in paths if path.stat().st_size]
        self.ends = np.cumsum([len(file) for file in self.files])

    def __len__(self):
        return int(self.ends[-1])

    def __getitem__(self, index):
        if isinstance(index, slice):
            index = np.arange(*index.indices(len(self)))
        tokens = np.empty(index.shape, self.files[0].dtype)
        file_of = np.searchsorted(self.ends, index, side='right')
        for i in np.unique(file_of):
            here = file_of == i
            tokens[here] = self.files[i][index[here] - (self.ends[i] - len(self.files[i]))]
        return tokens


def open_tokens(paths, dtype):
    return np.memmap(paths[0], dtype, mode='r') if len(paths) == 1 else TokenFiles(paths, dtype)


def load_dataset(data_dir, block_size):
    """Opens data_dir/{train,val}.bin as prepare.py wrote them; each may be several files, see token_files. Where
    meta.json holds the largest id, max_id, and the numbers of tokens, only the sizes are checked; otherwise all tokens
    are read, each process its share.

    Returns ({'train': memmap or TokenFiles, 'val': the same}, vocab_size, tokenizer description), see
    load_dataset_meta. Raises UserError for missing, short or damaged files and for token ids outside the vocabulary."""
    data_dir = relative_path(data_dir)
    meta = load_dataset_meta(data_dir)
    remedy = remedy_for(data_dir)
    width = np.dtype(meta['dtype']).itemsize
    splits = {}
    for split in ('train', 'val'):
        path = data_dir / f'{split}.bin'
        paths = token_files(data_dir, split)
        if not paths:
            raise UserError(f'there is no {path}; {remedy}')
        for file in paths:
            if file.stat().st_size % width:
                raise UserError(f'{file} has {file.stat().st_size} bytes, not a multiple of {width} ({meta["dtype"]}): '
                                f'it is cut short or of another type; {remedy}')
        size = sum(file.stat().st_size for file in paths)
        if size // width <= block_size:
            raise UserError(f'{path} has {size // width} tokens, and block_size={block_size} needs {block_size + 1}; '
                            'use more text or a smaller --block_size')
        n_tokens = meta[f'{split}_tokens']
        if n_tokens not in (None, size // width):
            raise UserError(f'{path} has {size // width} tokens, its meta.json says {n_tokens}: the file is damaged or '
                            f'of another data set; {remedy}')
        splits[split] = open_tokens(paths, meta['dtype'])
        largest = meta['max_id']
        if type(largest) is not int or n_tokens is None:  # a wrong id would train silently: read every token
            starts = range(0, size // width, 10**7)[jax.process_index()::jax.process_count()]
            largest = max((int(splits[split][i:i + 10**7].max()) for i in starts), default=0)
        if largest >= meta['vocab_size']:
            raise UserError(f"{path} has token id {largest}, outside the vocabulary of {meta['vocab_size']}; {remedy}")
    return splits, meta['vocab_size'], meta['tokenizer']


def load_masks(data_dir, splits):
    """{split: tokens} of data_dir/{train,val}_mask.bin, a byte for each token: 1 where it counts in the loss, as an
    assistant's tokens do, else 0. {} for a data set without masks, in which all tokens count. Raises UserError for a
    mask of another length than its tokens."""
    masks = {}
    for split, tokens in splits.items():
        paths = token_files(relative_path(data_dir), f'{split}_mask')
        if paths:
            masks[split] = open_tokens(paths, np.uint8)
    if masks and {split: len(tokens) for split, tokens in splits.items()} != {s: len(m) for s, m in masks.items()}:
        raise UserError(f'the masks in {data_dir} do not belong to its tokens; {remedy_for(Path(data_dir))}')
    return masks


def describe_data(splits, tokenizer):
    """A fingerprint of the data, {name: number}, from the tokenizer, the sizes, the first and the last million
    tokens."""
    values = {'the tokenizer': zlib.crc32(json.dumps(tokenizer).encode())}
    for split, tokens in splits.items():
        values[f'tokens in {split}.bin'] = len(tokens)
        values[f'content of {split}.bin'] = zlib.crc32(tokens[-10**6:], zlib.crc32(tokens[:10**6]))
    return values


def check_ids(x, y, vocab_size, split):
    """Raises UserError if windows of a split hold an id that is not below vocab_size: load_dataset trusts meta.json."""
    if max(x.view(np.uint32).max(), y.view(np.uint32).max()) >= vocab_size:
        raise UserError(f'the {split} tokens have an id outside the vocabulary of {vocab_size}, which meta.json '
                        'denies: they have been changed; run the prepare.py of the data set again')


DATA, DROPOUT = range(2)  # RNG stream ids


SHUFFLED_IN_MEMORY = 2**24  # windows; an epoch of more is shuffled by a function of the index, without memory


def epoch_windows(n_tokens, block_size, seed, epoch, index):
    """The starts of the windows numbered `index` of an epoch: a random offset, then contiguous windows of block_size
    tokens, shuffled."""
    n_windows = count_windows(n_tokens, block_size)
    if n_windows <= SHUFFLED_IN_MEMORY:
        return shuffled_windows(n_tokens, block_size, seed, epoch)[index]
    rng = np.random.default_rng([seed, DATA, epoch])
    offset = rng.integers(n_tokens - n_windows * block_size)
    return offset + block_size * permute_index(index, n_windows, rng.integers(2**32, size=6, dtype=np.uint64))


@functools.lru_cache(maxsize=4)
def shuffled_windows(n_tokens, block_size, seed, epoch):
    """epoch_windows of all indices."""
    n_windows = count_windows(n_tokens, block_size)
    rng = np.random.default_rng([seed, DATA, epoch])
    offset = rng.integers(n_tokens - n_windows * block_size)
    return offset + block_size * rng.permutation(n_windows)


def permute_index(index, n, keys):
    """The places of the indices in a permutation of range(n) that `keys`, uint64 of 32 bits, choose: a Feistel network
    over the next power of four, applied again to what is not below n (cycle walking; Black and Rogaway 2002,
    doi:10.1007/3-540-45760-7_9)."""
    half = np.uint64(ceil_div(int(n - 1).bit_length(), 2))
    low = np.uint64((1 << int(half)) - 1)
    x = np.asarray(index, np.uint64).copy()
    outside = np.ones(x.shape, bool)
    while outside.any():
        left, right = x[outside] >> half, x[outside] & low
        for key in keys:
            mixed = (right ^ key) * np.uint64(0x9e3779b97f4a7c15)  # modulo 2**64
            mixed ^= mixed >> np.uint64(29)
            mixed *= np.uint64(0xbf58476d1ce4e5b9)
            left, right = right, left ^ (mixed >> np.uint64(32) & low)
        x[outside] = left << half | right
        outside = x >= n
    return x.astype(np.int64)


def count_windows(n_tokens, block_size):
    """Windows in an epoch: one less than fit (if several do), which leaves at least block_size offsets to draw from."""
    return max(1, (n_tokens - 1) // block_size - 1)


def get_windows(tokens, start, block_size):
    """x and y, int32 [len(start), block_size]: the windows of `tokens` at `start`, and these shifted by one token."""
    window = tokens[start[:, None] + np.arange(block_size + 1)].astype(np.int32)
    return window[:, :-1], window[:, 1:]


def get_batch_jax(tokens, block_size, n_rows, seed, iteration, rows=None):
    """The sequences of one iteration, x and y, int32 [n_rows, block_size]; only those numbered `rows`, if given.
    A pure function of its arguments: sequences iteration * n_rows and following of an endless shuffled stream, in which
    an epoch holds every window once. (nanoGPT draws windows at random: an epoch's worth misses 1/e of the tokens.)
    With another n_rows the same iteration means other sequences."""
    rows = np.arange(n_rows) if rows is None else rows
    epoch, index = np.divmod(iteration * n_rows + rows, count_windows(len(tokens), block_size))
    start = np.empty(len(rows), np.int64)
    for e in np.unique(epoch):
        start[epoch == e] = epoch_windows(len(tokens), block_size, seed, int(e), index[epoch == e])
    return get_windows(tokens, start, block_size)


def get_loss_weights(mask, block_size, n_rows, seed, iteration, rows):
    """The weight of each target of get_batch_jax(tokens, ...), float32 [len(rows), block_size]: 0 where the mask of the
    tokens is 0, and a mean of 1 over all n_rows sequences, so that the mean of the weighted losses is that of the
    tokens that count, however the sequences are split into micro-batches and over devices. None if no token of the
    iteration counts."""
    _, counts = get_batch_jax(mask, block_size, n_rows, seed, iteration)
    if not counts.any():
        return None
    return (counts[rows] * (counts.size / counts.sum())).astype(np.float32)


def evaluated_windows(tokens, block_size, n_rows):
    """The starts of the n_rows windows of a split that every evaluation reads, spread evenly over the split."""
    last = len(tokens) - block_size - 1  # the start of the last window
    return np.arange(n_rows) * last // max(1, n_rows - 1)


def counted_share(mask, block_size, n_rows, split):
    """The share of the tokens of evaluated_windows that count in the loss. Raises UserError if none does."""
    share = get_windows(mask, evaluated_windows(mask, block_size, n_rows), block_size)[1].mean()
    if not share:
        raise UserError(f'none of the {n_rows} {split} windows of an evaluation has a token that counts, such as an '
                        "assistant's: use more eval_iters or a larger block_size")
    return share


# -----------------------------------------------------------------------------
# tokenizers, described by a small dict that is stored in meta.json and in every checkpoint


TOKENIZER_FILES = ('tokenizer.json', 'tokenizer_config.json', 'chat_template.jinja', 'special_tokens_map.json',
                   'generation_config.json')  # of a Hugging Face folder; all but the first may be missing


class CharTokenizer:
    stop_tokens = ()  # ids that end a text
    chat_template = None  # how a chat is written as a text
    sampling = {}  # what the model's makers sample with, {'temperature': 0.6, ...}

    def __init__(self, chars):
        self.chars = chars
        self.vocab_size = len(chars)
        self.ids = {c: i for i, c in enumerate(chars)}

    def encode(self, text):
        unknown = sorted(set(text) - self.ids.keys())
        if unknown:
            raise UserError(f'the prompt has characters that the model does not know: {" ".join(map(repr, unknown))}; '
                            f'it knows {self.chars!r}')
        return [self.ids[c] for c in text]

    def decode(self, ids):
        return ''.join(self.chars[i] for i in ids)


def write_char_tokenizer(chars, folder):
    """Writes the tokenizer.json of a vocabulary of characters: a BPE without merges."""
    from tokenizers import Tokenizer, decoders, models
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(chars)}, []))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(os.path.join(folder, 'tokenizer.json'))


class GPT2Tokenizer:
    stop_tokens = ()
    chat_template = None
    sampling = {}

    def __init__(self):
        import tiktoken
        try:
            self.bpe = tiktoken.get_encoding('gpt2')
        except Exception as error:  # the first use downloads two files
            raise UserError(f"tiktoken cannot load GPT-2's BPE ({type(error).__name__}); without a network set "
                            'TIKTOKEN_CACHE_DIR to the tiktoken cache of a machine that has used it '
                            '(see "Troubleshooting" in README.md)') from None
        self.vocab_size = self.bpe.n_vocab

    def encode(self, text):
        return self.bpe.encode(text, allowed_special={'<|endoftext|>'})

    def decode(self, ids):
        return self.bpe.decode(ids)


MARKS = '\ufdd0\ufdd1'  # around what the assistant says in a rendered chat: noncharacters, which no text has


class HFTokenizer:
    """The tokenizer of a Hugging Face folder: tokenizer.json, with the stop tokens, the chat template and the sampling
    defaults from the folder's other files. A prompt may contain special tokens; decoding leaves them out."""

    def __init__(self, folder):
        from tokenizers import Tokenizer
        folder = Path(folder)
        try:
            self.tokenizer = Tokenizer.from_file(str(folder / 'tokenizer.json'))
        except Exception as error:  # tokenizers raises plain Exceptions
            raise UserError(f'cannot read {folder / "tokenizer.json"} ({error}); copy or download it again') from None
        self.ids = self.tokenizer.get_vocab()
        self.vocab_size = max(self.ids.values(), default=-1) + 1  # not their number: ids may have holes
        try:
            self.read_settings(folder)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise UserError(f"the tokenizer's settings in {folder} are malformed ({type(error).__name__}: {error}); "
                            'copy or download them again') from None

    def read_settings(self, folder):
        settings = read_json(folder / 'tokenizer_config.json', optional=True)
        self.generation = read_json(folder / 'generation_config.json', optional=True)
        config = read_json(folder / 'config.json', optional=True)
        tokens = {name: settings.get(name) or '' for name in ('bos_token', 'eos_token')}
        self.special = {name: token['content'] if isinstance(token, dict) else token for name, token in tokens.items()}
        self.end_token = self.tokenizer.token_to_id(self.special['eos_token'])  # of a document
        stop_tokens = {self.end_token}
        for found in (self.generation, config, config.get('text_config') or {}):
            ids = found.get('eos_token_id')
            stop_tokens |= set(ids) if isinstance(ids, (list, tuple)) else {ids}
        self.stop_tokens = tuple(sorted(map(operator.index, stop_tokens - {None})))
        names = ('temperature', 'top_k', 'top_p', 'min_p', 'repetition_penalty')
        self.sampling = {name: x for name in names if isinstance(x := self.generation.get(name), (int, float))}
        self.chat_template = settings.get('chat_template')
        if isinstance(self.chat_template, list):  # several, by name
            templates = {each['name']: each['template'] for each in self.chat_template}
            self.chat_template = templates.get('default', next(iter(templates.values()), None))
        template = folder / 'chat_template.jinja'
        if template.exists():
            self.chat_template = template.read_text(encoding='utf-8')

    def encode(self, text):
        return self.tokenizer.encode(text).ids

    def encode_document(self, text):
        """The ids of a training text, with the first token that the model expects, if any, and the end token. The names
        of special tokens in the text are ordinary text."""
        if self.end_token is None:
            raise UserError('the tokenizer has no end token: name one, "eos_token", in its tokenizer_config.json')
        self.tokenizer.encode_special_tokens = True
        ids = self.tokenizer.encode(text).ids
        self.tokenizer.encode_special_tokens = False
        return ids if ids[-1:] == [self.end_token] else [*ids, self.end_token]

    def decode(self, ids):
        if '<|channel|>' not in self.ids:
            return self.tokenizer.decode(ids)
        # gpt-oss separates its channels by special tokens: they stay, see final_answer
        ids = [id for id in ids if id not in self.stop_tokens]
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    @functools.cached_property
    def compiled_template(self):
        """The folder's chat template. What it marks by {% generation %} ... {% endgeneration %} as the assistant's is
        rendered between the characters MARKS."""
        import jinja2.ext
        import jinja2.sandbox

        class Generation(jinja2.ext.Extension):
            tags = {'generation'}

            def parse(self, parser):
                next(parser.stream)
                begin, end = (jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)]) for mark in MARKS)
                return [begin, *parser.parse_statements(['name:endgeneration'], drop_needle=True), end]

        def raise_exception(message):
            raise UserError(f"the model's chat template refuses: {message}")

        def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
            return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

        jinja = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=['jinja2.ext.loopcontrols', Generation])
        jinja.filters['tojson'] = tojson
        jinja.globals |= {'raise_exception': raise_exception, 'strftime_now': time.strftime}
        return jinja.from_string(self.chat_template)

    def render_chat(self, messages, *, add_generation_prompt, marked=False):
        """The text of messages [{'role': 'system', 'user' or 'assistant', 'content': text}] by the folder's chat
        template, followed by the beginning of the next answer if add_generation_prompt, and with MARKS around what the
        template marks as the assistant's if marked. Raises UserError if the template refuses them or fails."""
        if self.chat_template is None:
            raise UserError('the model has no chat template: there is none beside its tokenizer.json')
        try:
            text = self.compiled_template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self.special)
        except UserError:
            raise
        except Exception as error:  # a template is a program
            raise UserError(f"the model's chat template cannot be rendered: {type(error).__name__}: {error}") from None
        return text if marked else re.sub(f'[{MARKS}]', '', text)

    def encode_chat(self, messages):
        """The ids of render_chat, with the beginning of the answer."""
        text = self.render_chat(messages, add_generation_prompt=True)
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def encode_training_chat(self, messages):
        """(ids, mask) of a conversation by the folder's chat template; the mask, as long as the ids, is 1 for the
        assistant's tokens. Those are what the template marks by {% generation %}; without such marks each answer, from
        the end of the request for it (the generation prompt) to the special token that ends it.

        Raises UserError if the template refuses the messages, or writes an answer differently from where it asks for
        one."""
        pieces = re.split(f'[{MARKS}]', self.render_chat(messages, add_generation_prompt=False, marked=True))
        text = ''.join(pieces)
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        starts, ends = np.array(encoding.offsets).reshape(-1, 2).T
        added = self.tokenizer.get_added_tokens_decoder()
        special = {id for id, token in added.items() if token.special}.union(self.stop_tokens)
        is_special = np.isin(encoding.ids, list(special))
        bounds = np.cumsum([len(piece) for piece in pieces]).tolist()
        spans = list(zip(bounds[:-1:2], bounds[1::2]))
        if not spans:
            special_spans = list(zip(starts[is_special], ends[is_special]))
            spans = [self.find_answer(messages, i, text, special_spans)
                     for i, message in enumerate(messages) if message['role'] == 'assistant']
        mask = np.zeros(len(starts), np.uint8)
        for start, end in spans:  # a special token that takes in the spaces after it belongs to what it follows
            mask[(starts < end) & (ends > start) & ~(is_special & (starts < start))] = 1
        return encoding.ids, mask

    def find_answer(self, messages, i, text, special_spans):
        """(start, end) of answer i, as it counts in training, in `text`, the rendering of all messages, whose special
        tokens have the (start, end) of special_spans. Other renderings, with a mark in place of the answer, tell what
        the template writes around it, whatever it says and whatever the template rewrites of earlier turns."""
        refusal = UserError(f"the model's chat template does not write answer {i} where it asks for it; mark what the "
                            'assistant says in it by {% generation %} ... {% endgeneration %}')
        marked = [*messages[:i], messages[i] | {'content': MARKS[0]}]
        around, around_last = (
            self.render_chat(chat, add_generation_prompt=False, marked=True).split(MARKS[0])
            for chat in (marked + messages[i + 1:], marked))
        if not len(around) == len(around_last) == 2 or not text.endswith(around[1]):
            raise refusal
        (before, after), (before_last, after_last) = around, around_last
        content_end = len(text) - len(after)
        request = self.render_chat(messages[:i], add_generation_prompt=True)

        start = len(request)
        if not text.startswith(request):  # the template writes earlier turns differently when others follow
            prompt = request.removeprefix(self.render_chat(messages[:i], add_generation_prompt=False))
            introduction = before_last.removeprefix(request)  # what the template writes between request and answer
            if not text.startswith(before) or not before.endswith(prompt + introduction):
                raise refusal
            start = len(before) - len(introduction)
        if start > content_end:
            raise refusal

        shared = len(os.path.commonprefix([after, after_last]))
        for special_start, special_end in special_spans:
            if special_start >= start and special_end > content_end:
                if special_end <= content_end + shared:
                    return start, special_end
                if shared < len(after_last) and not text[content_end:special_start].strip():
                    return start, special_end  # another one than at the end of a conversation: gpt-oss
                break
        return start, content_end + (shared if shared == len(after_last) else 0)


def final_answer(text):
    """What of an answer belongs to the conversation. gpt-oss writes <|channel|>analysis<|message|>...<|end|> first,
    which its template takes for an error in a message. (<think>...</think> is for the other models' templates to drop.)
    """
    if '<|channel|>' not in text:
        return text
    return text.partition('<|channel|>final<|message|>')[2].partition('<|end|>')[0]


def strip_partial_utf8(text):
    """The text without an incomplete character at its end: a token may end within one, which decodes to U+FFFD."""
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
        return HFTokenizer(description['path'])
    raise UserError(f'unknown kind of tokenizer {kind!r}')


def describe_tokenizer(model_path, vocab_size):
    """The description of the tokenizer of a pretrained model: its folder's tokenizer.json, or GPT-2's if the size of
    the vocabulary is GPT-2's; None if it is unknown."""
    folder = model_path if os.path.isdir(model_path) else os.path.dirname(model_path)
    if os.path.exists(os.path.join(folder, 'tokenizer.json')):
        return {'kind': 'folder', 'path': os.path.abspath(folder)}
    return {'kind': 'gpt2'} if 50257 <= vocab_size <= 50304 else None


def locate_tokenizer(description, folder):
    """The description with its path, if it has one, relative to the current folder instead of relative to `folder`."""
    if description.get('kind') != 'folder':
        return description
    return description | {'path': os.path.join(folder, os.path.expanduser(description['path']))}


def same_tokens(a, b):
    """Whether the ids of two tokenizers, given by their descriptions, mean the same tokens."""
    kinds = {a['kind'], b['kind']}
    if 'gpt2' not in kinds:
        return load_tokenizer(a).ids == load_tokenizer(b).ids
    if kinds == {'gpt2', 'folder'}:  # without loading GPT-2's BPE, which may need a network
        ids = load_tokenizer(a if a['kind'] == 'folder' else b).ids
        return all(ids.get(token) == id for token, id in (('the', 1169), ('\u0120the', 262), ('<|endoftext|>', 50256)))
    return kinds == {'gpt2'}


def check_tokens(data, dataset, model, model_name, vocab_size):
    """The description of the tokenizer of a run that trains a pretrained model with a data set, given those of both,
    the model's None if it is unknown. Raises UserError unless their ids mean the same tokens: the data set would train
    the model on nonsense."""
    if model and same_tokens(data, model):
        return model
    if not model and data['kind'] == 'char' and len(data['chars']) == vocab_size:
        return data
    remedy = f'make it with: python data/shakespeare/prepare.py my.txt --tokenizer={model_name} --out_dir=data/mine'
    if not model:
        remedy = f'put the tokenizer.json of {model_name} beside its weights'
    raise UserError(f'dataset {dataset} has other tokens than {model_name}, their ids mean something else; {remedy}')


def copy_tokenizer(description, folder):
    """Copies the files of a tokenizer of the kind 'folder' into `folder`, generation_config.json with all end tokens.
    Raises UserError if they cannot be read."""
    if description['kind'] != 'folder' or os.path.realpath(description['path']) == os.path.realpath(folder):
        return
    tokenizer = HFTokenizer(description['path'])
    os.makedirs(folder, exist_ok=True)
    for name in TOKENIZER_FILES:
        if os.path.exists(os.path.join(description['path'], name)):
            shutil.copyfile(os.path.join(description['path'], name), os.path.join(folder, name))
        elif os.path.exists(os.path.join(folder, name)):
            os.remove(os.path.join(folder, name))  # an earlier tokenizer's
    generation = tokenizer.generation | {'eos_token_id': list(tokenizer.stop_tokens)}
    write_text(os.path.join(folder, 'generation_config.json'), json.dumps(generation, indent=2) + '\n')


# -----------------------------------------------------------------------------
# optimizer and schedule


SCHEDULES = ('cosine', 'linear', 'wsd', 'constant')
OPTIMIZERS = ('adamw', 'muon')


def create_learning_rate_schedule(learning_rate, *, decay_lr=True, warmup_iters=0, lr_decay_iters=0, min_lr=0.0,
                                  lr_schedule='cosine'):
    """step -> learning rate: linear warm-up from learning_rate / (warmup_iters + 1), then nanoGPT's cosine to min_lr at
    lr_decay_iters, and min_lr after that. lr_schedule: 'linear' decays linearly instead; 'wsd' (warm-up, stable, decay;
    arXiv:2404.06395) decays linearly in the last fifth; 'constant' never. decay_lr=False: learning_rate throughout,
    without a warm-up. Raises UserError for an unknown schedule or a decay that ends within the warm-up."""
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
        decay_iters = ceil_div(decay_iters, 5)
    decay = optax.linear_schedule(learning_rate, min_lr, decay_iters)
    return optax.join_schedules([warm_up, stable, decay], [warmup_iters, lr_decay_iters - decay_iters])


@optax.stateless
def orthogonalize(updates, params=None):
    """Replaces every matrix, with the singular value decomposition U S V^T, by about U V^T: five steps of a quintic
    Newton-Schulz iteration (https://kellerjordan.github.io/posts/muon). The result is scaled by 0.2 sqrt(longer side),
    to the size of AdamW's updates (arXiv:2502.16982).

    Matrices of the same shape are stacked: half the time of optax.contrib.muon, which takes them one by one, on a CPU.
    On a mesh the stack is sharded over the devices, if their number divides it. A leaf [E, I, O] holds E matrices.
    Shapes here: M matrices of I rows and O columns; I is the shorter side."""
    leaves, tree = jax.tree.flatten(updates)
    for shape in dict.fromkeys(leaf.shape for leaf in leaves):
        indices = [i for i, leaf in enumerate(leaves) if leaf.shape == shape]
        tall = shape[-2] > shape[-1]
        x_MxIxO = jnp.stack([leaves[i] for i in indices]).astype(jnp.float32).reshape(-1, *shape[-2:])
        x_MxIxO = shard(x_MxIxO, batch_axes(len(x_MxIxO)), None, None)
        if tall:
            x_MxIxO = x_MxIxO.swapaxes(1, 2)
        x_MxIxO /= jnp.linalg.norm(x_MxIxO, axis=(1, 2), keepdims=True) + 1e-8
        for _ in range(5):
            gram_MxIxI = x_MxIxO @ x_MxIxO.swapaxes(1, 2)
            x_MxIxO = 3.4445 * x_MxIxO + (-4.7750 * gram_MxIxI + 2.0315 * gram_MxIxI @ gram_MxIxI) @ x_MxIxO
        if tall:
            x_MxIxO = x_MxIxO.swapaxes(1, 2)
        for i, x in zip(indices, (0.2 * max(shape[-2:])**0.5 * x_MxIxO).reshape(-1, *shape)):
            leaves[i] = x.astype(leaves[i].dtype)
    return jax.tree.unflatten(tree, leaves)


def is_decayed(path, p):
    """Matrices and embeddings are; biases, which have 2 dimensions in experts, and norms are not."""
    return p.ndim >= 2 and path[-1].key != 'bias'


def optimizer_of(path, p):
    return 'muon' if path[-1].key == 'kernel' and path[-2].key != 'router' else 'adamw'


def create_optimizer_with_schedule(schedule, *, beta1=0.9, beta2=0.95, weight_decay=0.1, optimizer='adamw'):
    """AdamW (arXiv:1711.05101) with weight decay for tensors of 2 or more dimensions: matrices and embeddings, but not
    biases (which have 2 in experts) and norms. 'muon' updates every `kernel` of the blocks except the router's, each
    expert's by itself, with Muon instead (see orthogonalize), at AdamW's learning rate and weight decay. Clipping is
    separate: clip_gradients. Raises UserError for any other optimizer."""
    adamw = optax.adamw(schedule, b1=beta1, b2=beta2, eps=1e-8, weight_decay=weight_decay,
                        mask=lambda params: jax.tree.map_with_path(is_decayed, params))
    if optimizer == 'adamw':
        return adamw
    if optimizer != 'muon':
        raise UserError(f'optimizer must be one of {", ".join(OPTIMIZERS)}, not {optimizer!r}')
    muon = optax.chain(optax.trace(0.95, nesterov=True), orthogonalize, optax.add_decayed_weights(weight_decay),
                       optax.scale_by_learning_rate(schedule))
    return optax.partition({'muon': muon, 'adamw': adamw}, lambda params: jax.tree.map_with_path(optimizer_of, params))


def clip_gradients(grads, max_norm):
    """Scales grads down to a global norm of max_norm, as torch.nn.utils.clip_grad_norm_ does; max_norm 0 does not clip.
    Returns (grads, norm before clipping)."""
    norm = optax.tree.norm(grads)
    if max_norm:
        scale = jnp.minimum(1, max_norm / (norm + 1e-6))
        grads = jax.tree.map(lambda g: g * scale, grads)
    return grads, norm


# -----------------------------------------------------------------------------
# pretrained weights to train, and LoRA (arXiv:2106.09685): low-rank updates of frozen weights


def unchanged(path, array):
    return array


def load_weights(source, config, parallel, change=unchanged):
    """(parameters of a pretrained model, sharded as `parallel` says; a checksum of them).

    change(path in the tree, array): what becomes of each float32 parameter before it is moved to its devices, and
    before the next one is read. Of a position table, the first block_size rows are taken."""
    crc = 0

    def place(path, array):
        nonlocal crc
        crc = zlib.crc32(np.ascontiguousarray(array), crc)
        if path == ('wpe',):
            array = array[:config.block_size]
        return flatten_dict(parallel.device_put(unflatten_dict({path: change(path, array)})))[path]

    return load_pretrained(local_path(source), place=place)[1], crc


def quantized(path, array):
    """A parameter in int8 if it is a matrix that int8 models have in int8, for load_weights."""
    return flatten_dict(quantize_params(unflatten_dict({path: array})))[path]


def create_lora_state(rng, config, tx, rank):
    """TrainState whose params are the updates {'a': [I, rank], 'b': [rank, O]} of every kernel [I, O] of attention and
    MLPs, not of experts: a is random, b zero. Its `frozen`, {'weights', 'scale'}, is filled in by load_frozen. Call it
    compiled, where the model's own initial parameters are not computed."""
    state = create_train_state(rng, config, optax.identity())
    updates = {}
    for i, (path, kernel) in enumerate(flatten_dict(state.params).items()):
        if path[-1] == 'kernel' and path[-2] != 'router' and kernel.ndim == 2:
            a = jax.random.normal(jax.random.fold_in(rng, i), (len(kernel), rank)) * len(kernel)**-0.5
            updates[path] = {'a': a, 'b': jnp.zeros((rank, kernel.shape[1]))}
    updates = unflatten_dict(updates)
    return state.replace(params=updates, tx=tx, opt_state=tx.init(updates))


def model_params(params, frozen):
    """The parameters of the model, given those of a TrainState and its `frozen`: a LowRank for each kernel that LoRA
    trains."""
    if frozen is None:
        return params

    def join(weights, updates):
        if updates.keys() == {'a', 'b'}:
            return LowRank(weights, **updates, scale=frozen['scale'])
        return {name: join(part, updates[name]) if name in updates else part for name, part in weights.items()}

    return join(frozen['weights'], params)


def count_frozen(frozen):
    """Number of parameters of the model that LoRA updates, as count_params; scales of int8 do not count."""
    is_int8 = lambda x: isinstance(x, Int8)
    return count_params(jax.tree.map(lambda x: x.values if is_int8(x) else x, frozen['weights'], is_leaf=is_int8))


def load_frozen(lora, config, parallel):
    """({'weights', 'scale'}, checksum) for TrainState.frozen, from what a checkpoint says of LoRA. Raises UserError if
    the base has changed."""
    weights, crc = load_base(lora, config, parallel, quantized if lora['quantize'] else unchanged)
    return {'weights': weights, 'scale': parallel.device_put(np.float32(lora['alpha'] / lora['rank']))}, crc


def load_merged(lora, config, parallel, updates):
    """The parameters of a LoRA run with its updates added to the weights, in float32. Raises UserError if the base has
    changed."""
    updates = flatten_dict(updates)

    def merge(path, array):
        if lora['quantize']:
            array = quantized(path, array)
        if isinstance(array, Int8):
            array = np.asarray(array.values, np.float32) * np.asarray(array.scale)[..., None]
            array = array.swapaxes(-1, -2) if path[-1] == 'kernel' else array
        if (*path, 'a') in updates:
            a, b = (np.asarray(updates[*path, name]) for name in 'ab')
            array = array + lora['alpha'] / lora['rank'] * (a @ b)
        return np.asarray(array, np.float32)

    return load_base(lora, config, parallel, merge)[0]


def load_base(lora, config, parallel, change=unchanged):
    """load_weights of the model that LoRA updates. Raises UserError if it has moved or changed."""
    if os.path.isabs(lora['base']) and not os.path.exists(lora['base']):
        raise UserError(f"{lora['base']}, the model that LoRA has updated, does not exist; name its new place with "
                        '--base=FOLDER')
    params, crc = load_weights(lora['base'], config, parallel, change)
    if lora['checksum'] not in (None, crc):
        raise UserError(f"{lora['base']} has other weights than those that LoRA was trained with; put these back, or "
                        'name where they are with --base=FOLDER')
    return params, crc


def move_base(lora, base):
    """What a checkpoint says of LoRA, with the place where its base is now; '' is the same place. Raises UserError
    for a run without LoRA."""
    if base and not lora:
        raise UserError('base is for a LoRA run, and this one is not')
    return lora | {'base': full_path(base)} if base else lora


def full_path(source):
    """The absolute path of a model's folder or file, which a checkpoint can remember; a hub's name as it is."""
    on_disk = os.path.expanduser(source)
    return os.path.abspath(on_disk) if os.path.exists(on_disk) else source


# -----------------------------------------------------------------------------
# train and eval steps


def make_train_step(config, seed, grad_clip, schedule, loss_chunk=0, zero=0):
    """The one train_step(state, batch, axis_name=None) -> (state, metrics): jit it, or wrap it with pmap_train_step.

    batch: x and y [M, B, T], seq_id [M, B]: M micro-batches, whose gradients are averaged into one update; weight
    [M, B, T], if given, multiplies the loss. seq_id numbers the sequences of the run; dropout depends on (seed, seq_id)
    alone.
    loss_chunk: logits are materialized for this many positions at a time; 0 is all. Raises UserError if it does not
    divide block_size.
    zero: on a mesh, 1 (ZeRO-1, arXiv:1910.02054) reduce-scatters the gradients over data; each device updates its shard
    of the parameters, which are all-gathered again. 2 (ZeRO-2) reduce-scatters after each micro-batch already.
    metrics: float32 scalars loss (mean over micro-batches and devices), grad_norm (before clipping), lr, loss_scale
    (float16 only)."""
    if 0 < loss_chunk < config.block_size and config.block_size % loss_chunk:
        raise UserError(f'loss_chunk={loss_chunk} does not divide block_size={config.block_size}; '
                        f'it may be one of {[n for n in range(1, config.block_size) if config.block_size % n == 0]}')

    reduce_once = zero == 1  # after the last micro-batch
    shard_each_micro_batch = zero > 1

    def loss_fn(params, frozen, micro_batch, scale):
        loss_BxT, sown = GPT(config).apply(
            {'params': model_params(params, frozen)}, micro_batch['x'], micro_batch['y'], loss_chunk=loss_chunk,
            deterministic=False, seq_id_B=micro_batch['seq_id'], mutable=['losses'], method='loss',
            rngs={'dropout': jax.random.fold_in(jax.random.key(seed), DROPOUT)})
        if 'weight' in micro_batch:
            loss_BxT *= micro_batch['weight']
        loss = loss_BxT.mean()
        return (loss + sum(jax.tree.leaves(sown))) * scale, loss  # sown: the experts' balancing losses, not reported

    def gradients(params, frozen, micro_batch, scale):
        grads, loss = jax.grad(loss_fn, has_aux=True)(params, frozen, micro_batch, scale)
        return shard_params(grads, over_replicas=shard_each_micro_batch), loss

    def sum_gradients(params, batch, scale, frozen=None):
        """(gradients, loss), each the sum over the micro-batches."""
        def micro_step(total, micro_batch):
            return jax.tree.map(jnp.add, total, gradients(params, frozen, micro_batch, scale)), None

        if len(batch['x']) == 1:  # skip accumulation: it would cost another pass over the gradients
            return gradients(params, frozen, jax.tree.map(lambda x: x[0], batch), scale)
        zeros = shard_params(jax.tree.map(jnp.zeros_like, params), over_replicas=shard_each_micro_batch)
        return jax.lax.scan(micro_step, (zeros, jnp.float32(0)), batch)[0]

    def train_step(state, batch, axis_name=None):
        scale = 1.0 if state.loss_scale is None else state.loss_scale['scale']
        n_micro = len(batch['x'])
        if reduce_once:  # without LoRA, see check_flags
            total = reduce_over_replicas(sum_gradients)(state.params, batch, scale)
        else:
            total = sum_gradients(state.params, batch, scale, state.frozen)
        if axis_name:
            with jax.named_scope('all_reduce'):
                total = jax.lax.pmean(total, axis_name)
        grads, loss = total
        if reduce_once or shard_each_micro_batch:
            grads, params = shard_params((grads, state.params), over_replicas=True)
            state = state.replace(params=params)
        with jax.named_scope('clip'):
            grads, grad_norm = clip_gradients(jax.tree.map(lambda g: g / (n_micro * scale), grads), grad_clip)
        metrics = {'loss': loss / n_micro, 'grad_norm': grad_norm, 'lr': jnp.float32(schedule(state.step))}
        with jax.named_scope('optimizer'):
            updated = state.apply_gradients(grads=grads)
        if state.loss_scale is not None:
            metrics['loss_scale'] = scale
            updated = skip_overflow(state, updated, grad_norm)
        return updated, metrics

    return train_step


def reduce_over_replicas(sum_gradients):
    """sum_gradients(params, batch, scale) of the sequences of all devices, on a mesh whose only axis is data: each
    device computes it for its own sequences; then the gradients are reduce-scattered, once."""
    def reduced(params, batch, scale):
        specs = partition_specs(params, current_mesh(), over_replicas=True)

        def mean_shard(spec, grad):
            dims = [dim for dim, axes in enumerate(spec) if 'data' in (axes or ())]
            if not dims:
                return jax.lax.pmean(grad, 'data')
            return jax.lax.psum_scatter(grad, 'data', scatter_dimension=dims[0], tiled=True) / jax.lax.axis_size('data')

        def of_own_sequences(params, batch, scale):
            grads, loss = sum_gradients(params, batch, scale)
            with jax.named_scope('reduce_scatter'):
                return jax.tree.map(mean_shard, specs, grads), jax.lax.pmean(loss, 'data')

        return jax.shard_map(of_own_sequences, in_specs=(P(), P(None, 'data'), P()), out_specs=(specs, P()),
                             check_vma=False)(params, batch, scale)
    return reduced


def skip_overflow(state, updated, grad_norm):
    """float16's dynamic loss scaling, as torch.amp.GradScaler: an update whose gradients overflow is skipped and halves
    the scale; 2000 good updates in a row double it. state.step counts the updates made."""
    finite = jnp.isfinite(grad_norm)
    updated = jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated, state)
    good_steps = jnp.where(finite, state.loss_scale['good_steps'] + 1, 0)
    factor = jnp.where(finite, jnp.where(good_steps == 2000, 2.0, 1.0), 0.5)
    return updated.replace(loss_scale={'scale': state.loss_scale['scale'] * factor, 'good_steps': good_steps % 2000})


def make_eval_step(config, loss_chunk=0):
    """eval_step(params, batch, axis_name=None) -> sum over the sequences of weight * mean loss, or mean weight * loss
    if each token has a weight; batch: x, y, weight [B] or [B, T]."""
    def eval_step(params, batch, axis_name=None):
        loss_BxT = GPT(config).apply({'params': params}, batch['x'], batch['y'], loss_chunk=loss_chunk, method='loss')
        if batch['weight'].ndim == 2:
            total = (loss_BxT * batch['weight']).mean(-1).sum()
        else:
            total = (loss_BxT.mean(-1) * batch['weight']).sum()
        return jax.lax.psum(total, axis_name) if axis_name else total

    return eval_step


def estimate_loss_jax(eval_step, params, splits, parallel, *, block_size, batch_size, eval_iters,
                      masks=None, vocab_size=2**32, stop_signal=lambda: 0):
    """{'train': loss, 'val': loss}, each the mean over eval_iters * batch_size windows spread evenly over the split:
    the same windows at every evaluation, for any seed and number of devices, so that curves can be compared.
    eval_step: parallel.eval_step(make_eval_step(config)), which evaluates batch_size sequences per device and call.
    masks: see load_masks; the mean is that over the tokens that count. Raises UserError if there is none.
    vocab_size: of the data set. Raises UserError for a token id that is not below it.
    stop_signal(): a number, the same in all processes; None is returned as soon as it is not 0."""
    losses = {}
    stop = 0
    n_rows = eval_iters * batch_size
    per_call = batch_size * parallel.n_data_shards
    for split, tokens in splits.items():
        windows = evaluated_windows(tokens, block_size, n_rows)
        total = 0.0
        share = counted_share(masks[split], block_size, n_rows, split) if masks else 1.0
        for first in range(0, n_rows, per_call):
            if int(stop):  # one call late: reading it waits for the device
                return None
            stop = stop_signal()
            rows = first + parallel.local_rows(per_call)  # rows past the end have weight 0 and fill up the last call
            start = windows[rows % n_rows]
            x, y = get_windows(tokens, start, block_size)
            check_ids(x, y, vocab_size, split)
            batch = {'x': x, 'y': y, 'weight': (rows < n_rows).astype(np.float32)}
            if masks:
                batch['weight'] = batch['weight'][:, None] * get_windows(masks[split], start, block_size)[1]
            total += eval_step(params, parallel.shard_batch(batch, (batch_size,)))
        losses[split] = float(total) / n_rows / share
    return losses


# -----------------------------------------------------------------------------
# checkpoints: out_dir/ckpt/<iteration>, written by Orbax in the background, each complete or absent


def open_checkpoints(out_dir, keep=2):
    """Orbax's manager of out_dir/ckpt: it keeps the latest `keep` checkpoints and the one with the lowest validation
    loss. Raises UserError if out_dir cannot be written."""
    import orbax.checkpoint as ocp
    from orbax.checkpoint import checkpoint_managers as policies
    quiet_orbax()
    val_loss = lambda metrics: metrics['val_loss']
    folder = Path(out_dir, 'ckpt').absolute()
    options = ocp.CheckpointManagerOptions(
        preservation_policy=policies.AnyPreservationPolicy([
            policies.LatestN(keep),
            # reverse: Orbax prefers the highest. Saves between evaluations have no metrics; only LatestN keeps them
            policies.BestN(get_metric_fn=val_loss, reverse=True, n=1, keep_checkpoints_without_metrics=False)]),
        best_fn=val_loss, best_mode='min', cleanup_tmp_directories=True, create=True,
        atomicity_options=ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.ATOMIC_RENAME),
        async_options=ocp.options.AsyncOptions(
            timeout_secs=10**6,  # 20 minutes by default: too little for slow disks, and for a clock that is set
            create_directories_asynchronously=False,  # else threads wait 5 minutes for one that cannot be made
            post_finalization_callback=lambda: write_checksums(folder)))
    try:
        folder.mkdir(parents=True, exist_ok=True)  # Orbax would take a file in its place
        return ocp.CheckpointManager(folder, options=options, item_names=('params', 'opt_state', 'meta'))
    except OSError as error:
        raise UserError(f'cannot write to {out_dir}: {error.strerror}; choose another --out_dir') from error


def quiet_orbax():
    for name in ('absl', 'asyncio'):  # Orbax's log messages; failures are reported below
        logging.getLogger(name).setLevel(logging.CRITICAL)
    sys.unraisablehook = silence_closed_event_loop


UNFINISHED = '*.orbax-checkpoint-tmp'  # the checkpoint that Orbax is writing, in ATOMIC_RENAME


def write_checksums(folder):
    """Writes checksums.json, {file: CRC-32}, into the one checkpoint in `folder` that is complete but for its name.
    Orbax calls it in one process, before it renames the checkpoint, and gives the checkpoint up if this fails. Raises
    RuntimeError if there is none."""
    steps = list(folder.glob(UNFINISHED))
    if not steps:
        raise RuntimeError(f'there is no {UNFINISHED} to write checksums.json into: another version of Orbax?')
    for step in steps:
        # of params, opt_state, meta, metrics; Orbax has yet to change the files in `step` itself
        files = sorted(path for path in step.glob('*/**/*') if path.is_file())
        sums = {path.relative_to(step).as_posix(): checksum(path) for path in files}
        (step / 'checksums.json').write_text(json.dumps(sums, indent=0))


def checksum(path):
    crc = 0
    with open(path, 'rb') as file:
        while block := file.read(2**24):
            crc = zlib.crc32(block, crc)
    return crc


ITEMS = 'params', 'opt_state', 'meta', 'metrics'  # the folders of a checkpoint


def find_damage(step, items=ITEMS):
    """The first file among these items of the checkpoint folder `step` that is not as it was written, or ''. Several
    processes each read some of the files. A checkpoint without checksums.json is not checked: see read_meta."""
    damaged = ''
    try:
        sums = json.loads((step / 'checksums.json').read_text()) if (step / 'checksums.json').exists() else {}
        names = sorted(name for name in sums if name.split('/')[0] not in set(ITEMS) - set(items))
        for name in names[jax.process_index()::jax.process_count()]:
            if not (step / name).is_file() or checksum(step / name) != sums[name]:
                damaged = name
                break
    except (OSError, ValueError, AttributeError, RecursionError):
        damaged = 'checksums.json'
    return next(filter(None, gather_texts(damaged)), '')


def checkpoint_steps(out_dir):
    """The iterations of the complete checkpoints in out_dir, the latest first."""
    folder = Path(out_dir, 'ckpt')
    if not folder.is_dir():
        return []
    return sorted((int(path.name) for path in folder.iterdir() if path.name.isdigit()), reverse=True)


def lock_out_dir(out_dir, resumed_at=None):
    """Locks out_dir for this run until the process ends, however it ends; out_dir/lock says who holds it. Several
    processes lock it together, which shows that all of them see the same folder. Damaged checkpoints, newer than
    `resumed_at` or with unreadable metrics, are renamed to <iteration>.damaged, out of Orbax's sight.
    Returns the open file. Raises UserError if another run holds the lock."""
    path = Path(out_dir, 'lock')
    me = f'process {os.getpid()} on {socket.gethostname()} since {time.strftime("%F %T")}'
    file = None

    def lock():
        nonlocal file
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(path, 'a')
        except OSError as error:
            raise UserError(f'cannot write to {out_dir}: {error.strerror}; choose another --out_dir') from error
        try:
            if fcntl:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise UserError(f'{out_dir} is in use by {path.read_text()}; choose another --out_dir') from None
        except OSError:
            pass  # a file system without locks
        file.truncate(0)
        file.write(me)
        file.flush()
        set_damaged_aside(Path(out_dir, 'ckpt'), resumed_at)

    def see_lock(expected):
        deadline = time.time() + 3  # what another machine has written may take a moment to be seen
        while True:
            found = os.listdir(path.parent) if path.parent.is_dir() else ()  # makes NFS look again
            if path.name in found and path.read_text() == expected:
                return
            if time.time() > deadline:
                raise UserError(f'{out_dir} is not the folder of process 0: it has to be on a file system that all '
                                'processes share')
            time.sleep(0.1)

    master = jax.process_index() == 0
    in_all_processes(lock if master else lambda: None)
    held = gather_texts(me)[0]
    in_all_processes((lambda: None) if master else functools.partial(see_lock, held))
    return file


def set_damaged_aside(folder, resumed_at):
    for step in checkpoint_steps(folder.parent):
        try:
            read_val_loss(folder / str(step))
            damaged = resumed_at is not None and step > resumed_at
        except ValueError:
            damaged = True
        if damaged:
            free = next(name for n in range(100) if not (name := folder / f'{step}.damaged{n or ""}').exists())
            os.rename(folder / str(step), free)
            print(f'{folder / str(step)} is damaged: renamed to {free.name}')


def read_val_loss(step):
    """The validation loss of the checkpoint in the folder `step`; infinity if it was not evaluated. Raises ValueError
    if the file is damaged."""
    path = step / 'metrics' / 'metrics'
    if not path.exists():
        return math.inf
    try:
        return float(json.loads(path.read_text())['val_loss'])
    except (KeyError, TypeError, OSError, RecursionError) as error:
        raise ValueError(f'{path} is damaged') from error


def silence_closed_event_loop(unraisable):
    """A sys.unraisablehook: after a failed write, Orbax's other writes complain at length that their event loop is
    closed."""
    if str(unraisable.exc_value) != 'Event loop is closed':
        sys.__unraisablehook__(unraisable)


def save_checkpoint(manager, iter_num, state, meta, val_loss=None):
    """Saves the state after iter_num iterations. Returns once the values are copied; writing is asynchronous.

    meta: JSON metadata, see train_jax.py. val_loss: makes the checkpoint a candidate for the best.
    Raises UserError if this checkpoint or the one before it cannot be written (a full disk)."""
    import orbax.checkpoint as ocp
    state = jax.tree.map(as_replicated_global_array, state)
    try:
        saved = manager.save(
            iter_num, metrics=None if val_loss is None else {'val_loss': val_loss},
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(state.params),
                opt_state=ocp.args.StandardSave(opt_state_item(state)),
                meta=ocp.args.JsonSave(meta | {'checksums': True})))
    except (OSError, ValueError, RuntimeError) as error:
        exit_if_peer_died(error)
        raise UserError(cannot_write(f'checkpoint {iter_num}', manager, error)) from error
    if not saved:
        raise UserError(f'{manager.directory} refuses checkpoint {iter_num}: it holds later ones, '
                        f'{manager.all_steps()}')


def as_replicated_global_array(x):
    """With several processes, pmap's results are arrays of this process's devices. Returns them as global arrays,
    replicated over the devices of all processes, as Orbax expects."""
    if jax.process_count() == 1 or not isinstance(x, jax.Array) or not x.is_fully_addressable:
        return x
    copies = [copy.data for copy in x.addressable_shards]
    mesh = Mesh(np.array(jax.devices(copies[0].device.platform)), ('data',))
    return jax.make_array_from_single_device_arrays(x.shape, NamedSharding(mesh, P()), copies)


def cannot_write(what, manager, error):
    free = shutil.disk_usage(manager.directory).free / 1e6
    return (f'cannot write {what} to {manager.directory}, where {free:,.0f} MB are free; what it holds is complete, '
            f'continue with --init_from=resume ({str(error)[:200]})')


def finish_checkpoints(manager):
    """Waits until all checkpoints are on disk. Raises UserError if the last one cannot be written."""
    try:
        manager.wait_until_finished()
        manager.close()
    except (OSError, ValueError, RuntimeError) as error:
        exit_if_peer_died(error)
        raise UserError(cannot_write('the last checkpoint', manager, error)) from error


def opt_state_item(state):
    """All of the state but the parameters, which are a separate item so that sampling can restore them alone."""
    return {'step': state.step, 'opt_state': state.opt_state, 'loss_scale': state.loss_scale}


def choose_checkpoint(out_dir, which='latest', items=ITEMS):
    """(iteration, metadata) of the 'latest' or 'best' checkpoint in out_dir. One of which one of these items is damaged
    is named on stderr, and the newest intact one is taken instead. Raises UserError if there is none."""
    if which not in ('latest', 'best'):
        raise UserError(f'checkpoint must be latest or best, not {which!r}')
    folder = Path(out_dir, 'ckpt')
    steps = checkpoint_steps(out_dir)
    if not steps:
        raise UserError(f'there is no complete checkpoint in {folder}; train one with: python train_jax.py '
                        f'--out_dir={out_dir}')
    if which == 'best':
        steps.sort(key=lambda step: best_first(folder / str(step)))  # stable: the latest first, if none is evaluated
        steps[1:] = sorted(steps[1:], reverse=True)
    problems = []
    for step in steps:
        problem = find_damage(folder / str(step), items)
        try:
            if not problem:
                meta = read_meta(folder / str(step))
        except Exception as error:  # of an earlier version, without checksums
            problem = f'{type(error).__name__}: {" ".join(str(error).split())}'
        if problem:
            problems.append(f'{folder / str(step)} is damaged or not a checkpoint of this program ({problem})')
            continue
        if problems and jax.process_index() == 0:
            print(f'{"; ".join(problems)}; taking checkpoint {step} instead', file=sys.stderr)
        return step, meta
    raise UserError(f'{"; ".join(problems)}; there is no intact one')


def best_first(step):
    """The validation loss of the checkpoint in the folder `step`; a damaged one comes first, to be named."""
    try:
        return read_val_loss(step)
    except ValueError:
        return -math.inf


def read_meta(step):
    """The metadata of the checkpoint in the folder `step`. Raises an exception if it is not one of this program."""
    meta = json.loads((step / 'meta' / 'metadata').read_text(encoding='utf-8'))
    GPTConfig(**meta['model'])
    missing = {'iter_num', 'best_val_loss', 'tokenizer', 'flags', 'wandb_id'} - meta.keys()
    if missing:
        raise ValueError(f'its metadata lacks {sorted(missing)}')
    if meta.pop('checksums', False) and not (step / 'checksums.json').exists():  # earlier versions wrote none
        raise ValueError('its checksums.json is missing')
    meta['tokenizer'] = locate_tokenizer(meta['tokenizer'], step.parent.parent)
    return meta


def restore_items(out_dir, step, items):
    """Restores items {name: abstract tree} of checkpoint `step`, sharded as the leaves of the abstract trees. Raises
    UserError if they do not fit."""
    import orbax.checkpoint as ocp
    quiet_orbax()
    folder = Path(out_dir, 'ckpt', str(step)).absolute()
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            return {name: checkpointer.restore(folder / name, tree) for name, tree in items.items()}
    except Exception as error:
        exit_if_peer_died(error)
        raise UserError(f'{folder} does not fit the model or is damaged: {type(error).__name__}: {error}') from error


def load_run(out_dir, which='best', parallel=None, base=''):
    """(config, params, metadata) of the best or latest checkpoint in out_dir, params sharded as `parallel` says (by
    default, on the first device; LoRA's updates merged, with those weights in `base`, if it has moved). Raises
    UserError if there is none."""
    step, meta = choose_checkpoint(out_dir, which, ('params', 'meta', 'metrics'))
    config, lora = GPTConfig(**meta['model']), move_base(meta.get('lora'), base)
    parallel = parallel or setup_distributed_training(jax.devices()[:1])
    create = functools.partial(create_lora_state, rank=lora['rank']) if lora else create_train_state
    state = parallel.abstract_state(create, jax.random.key(0), config, optax.identity())
    params = restore_items(out_dir, step, {'params': state.params})['params']
    return config, load_merged(lora, config, parallel, params) if lora else params, meta


def load_checkpoint(out_dir, step, state):
    """The TrainState of checkpoint `step`; `state` is its abstract tree. Raises UserError if it does not fit."""
    restored = restore_items(out_dir, step, {'params': state.params, 'opt_state': opt_state_item(state)})
    return state.replace(params=restored['params'], **restored['opt_state'])


@jax.jit
def all_finite(tree):
    return jnp.array([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all()


# -----------------------------------------------------------------------------
# logging


def write_text(path, text):
    """Writes a file atomically: it is complete or not there."""
    partial = Path(path).with_suffix('.tmp')
    try:
        partial.write_text(text, encoding='utf-8')
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


class MetricsLog:
    """out_dir/metrics.jsonl, one JSON object per line. Opening it for iteration `iter_num` drops the records of an
    earlier run from there on, and an incomplete last line: after a resume every iteration is there once. An evaluation
    at iter_num is kept, and not written again."""

    def __init__(self, out_dir, iter_num=0):
        self.path = Path(out_dir) / 'metrics.jsonl'
        records = read_metrics(out_dir) if iter_num else []
        kept = [r for r in records if r['iter'] < iter_num or (r['iter'] == iter_num and 'val_loss' in r)]
        self.evaluated = kept[-1]['iter'] if kept and 'val_loss' in kept[-1] else None
        write_text(self.path, ''.join(json.dumps(record) + '\n' for record in kept))
        self.file = open(self.path, 'a', buffering=1)  # flushed after every line

    def write(self, record):
        """Appends a record; a float that is not finite becomes null. Raises UserError if it cannot be written."""
        if 'val_loss' in record and record['iter'] == self.evaluated:
            return
        if not os.fstat(self.file.fileno()).st_nlink:  # deleted under the running process
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(self.path, 'a', buffering=1)
        record = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        try:
            self.file.write(json.dumps(record) + '\n')
        except OSError as error:
            raise UserError(f'cannot write {self.path}: {error.strerror}; the checkpoints in its folder are complete, '
                            'continue with --init_from=resume') from error


def iterate_metrics(out_dir):
    """Yields the records of out_dir/metrics.jsonl up to an incomplete or damaged line, as a killed run may leave it."""
    path = Path(out_dir) / 'metrics.jsonl'
    if not path.exists():
        return
    with open(path, encoding='utf-8', errors='replace') as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                return
            if not isinstance(record, dict) or type(record.get('iter')) is not int:
                return
            yield record


def read_metrics(out_dir):
    return list(iterate_metrics(out_dir))


@functools.cache
def loss_figure():
    """(figure, {key of metrics.jsonl: line}) without points, the same in every call: matplotlib's figures are full of
    reference cycles, so a new one for every evaluation would keep 1.4 MB each until a full garbage collection."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    figure = FigureCanvasAgg(Figure(figsize=(7, 4.5))).figure
    axes = figure.add_axes((0.09, 0.11, 0.89, 0.86))
    axes.set(xlabel='iteration', ylabel='loss (nats per token)')
    axes.grid(alpha=0.3)
    lines = {'loss': axes.plot([], [], label='train, iterations', color='0.8', lw=0.8)[0],
             'train_loss': axes.plot([], [], label='train', marker='.')[0],
             'val_loss': axes.plot([], [], label='val', marker='.')[0]}
    return figure, lines


def plot_losses(out_dir):
    """Draws out_dir/loss.png from out_dir/metrics.jsonl: the loss of the logged iterations, of at most 5,000 of them,
    and train and val of every evaluation. Holds 16 bytes per record, so that a long run does not take more and more
    memory."""
    figure, lines = loss_figure()
    curves = {key: array.array('d') for key in lines}
    for record in iterate_metrics(out_dir):
        for key, points in curves.items():
            if isinstance(record.get(key), (int, float)):
                points.extend((record['iter'], record[key]))
    for key, line in lines.items():
        points = np.asarray(curves[key]).reshape(-1, 2)
        line.set_data(points[::ceil_div(max(len(points), 1), 5000)].T)
    axes, = figure.axes
    axes.relim()
    axes.autoscale_view()
    axes.legend(handles=[line for line in lines.values() if len(line.get_xdata())])
    figure.savefig(Path(out_dir) / 'loss.tmp.png', dpi=120)
    os.replace(Path(out_dir) / 'loss.tmp.png', Path(out_dir) / 'loss.png')


class IterationLog:
    """Logs the iterations, on accelerators each after the next step is dispatched, because fetching metrics waits for
    the device.

    bar: of progress_bar. clock: a Stopwatch. metrics_log: a MetricsLog, or None in processes that do not log.
    mfu(tokens per second): the model FLOPs utilization; None if the peak of the device is unknown. imports_s: seconds
    that the start of the script took."""

    def __init__(self, bar, clock, metrics_log, *, out_dir, log_interval, max_iters, tokens_per_iter, mfu, imports_s):
        self.bar, self.clock, self.metrics_log, self.out_dir = bar, clock, metrics_log, out_dir
        self.log_interval, self.max_iters, self.tokens_per_iter = log_interval, max_iters, tokens_per_iter
        self.estimate_mfu, self.imports_s = mfu, imports_s
        self.pending = None  # (iter_num, metrics) of the latest iteration, until they are fetched
        self.mfu = None  # the latest
        self.first = True  # no iteration fetched yet
        self.restart_clock()

    def restart_clock(self):
        self.start = time.perf_counter()
        self.n_timed = 0  # iterations fetched since

    def add(self, iter_num, metrics, *, wait):
        """Logs the previous iteration and, if `wait`, this one. metrics: of the training step, or None if the iteration
        was skipped."""
        self.flush()
        self.pending = iter_num, metrics
        if wait:
            self.flush()

    def flush(self):
        """Fetches the pending metrics and logs them. Raises UserError if they are not finite."""
        if self.pending is None:
            return
        iter_num, metrics = self.pending
        self.pending = None
        self.bar.update()
        if metrics is None:
            self.bar.write(f'iter {iter_num}: skipped, none of its tokens counts in the loss')
            if self.metrics_log:
                self.metrics_log.write({'iter': iter_num, 'loss': None, 'grad_norm': None, 'lr': None})
            return
        metrics = {name: float(value) for name, value in jax.device_get(metrics).items()}
        loss = metrics['loss']
        grad_norm = metrics['grad_norm']
        skipped = metrics.get('loss_scale', 0) >= 1  # float16: overflows are skipped, until the scale is below 1
        if not math.isfinite(loss) or not (math.isfinite(grad_norm) or skipped):
            raise UserError(f'iteration {iter_num} has loss {loss}, gradient norm {grad_norm}: stopping; the '
                            f'checkpoints in {self.out_dir} are from before; try a lower learning_rate, longer '
                            'warmup_iters or dtype=float32')
        if self.first:
            self.first = False
            lap = self.clock.lap()
            self.bar.write(f'first iteration: imports {self.imports_s:.2f} s, compiling {lap.compiling:.2f} s, '
                           f'running {lap.running:.2f} s')
        self.n_timed += 1
        if iter_num % self.log_interval or not self.metrics_log:
            return
        seconds = (time.perf_counter() - self.start) / self.n_timed  # per iteration, the mean since the last line
        self.restart_clock()
        tokens_per_sec = self.tokens_per_iter / seconds
        self.mfu = self.estimate_mfu and self.estimate_mfu(tokens_per_sec)
        mfu = f'{self.mfu:.2%}' if self.mfu else 'n/a'
        eta = duration((self.max_iters - iter_num - 1) * seconds)
        self.bar.write(f'iter {iter_num}: loss {loss:.4f}, time {seconds * 1000:.2f}ms, mfu {mfu}, '
                       f'{tokens_per_sec:,.0f} tok/s, grad norm {grad_norm:.3f}, eta {eta}')
        self.metrics_log.write({'iter': iter_num, **metrics, 'time_ms': seconds * 1000,
                                'tokens_per_sec': tokens_per_sec, 'mfu': self.mfu})


def duration(seconds):
    """h:mm:ss"""
    minutes, seconds = divmod(round(seconds), 60)
    return f'{minutes // 60}:{minutes % 60:02}:{seconds:02}'


def measure_bandwidth(device, n_bytes=2**29):
    """Memory bandwidth of the device in GB/s, reading: the median of ten reductions over n_bytes (512 MiB are larger
    than any cache). The median, not the best: on a shared machine the sustained bandwidth is lower than the peak."""
    x = jax.device_put(jnp.ones(n_bytes // 4, jnp.float32), device)
    total = jax.jit(jnp.sum)
    seconds = []
    for _ in range(11):
        start = time.perf_counter()
        total(x).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return x.nbytes / np.median(seconds[1:]) / 1e9  # the first one compiles


class Lap(NamedTuple):
    compiling: float  # seconds
    running: float


class Stopwatch:
    """Measures compilation and all other time separately."""

    def __init__(self):
        self.compiling = 0.0
        self.start = time.perf_counter()
        # jax reports the duration of tracing, of lowering and of compiling as separate events
        jax.monitoring.register_event_duration_secs_listener(self.count)

    def count(self, event, seconds, **attributes):
        if event.startswith('/jax/core/compile/'):
            self.compiling += seconds

    def lap(self):
        """The seconds since the last lap. Block until the device is done before calling it."""
        compiling = self.compiling
        running = max(0.0, time.perf_counter() - self.start - compiling)
        self.compiling = 0.0
        self.start = time.perf_counter()
        return Lap(compiling, running)


def progress_bar(done, total):
    """A tqdm bar, shown on a terminal only; its write() prints a line above the bar, or just prints."""
    from tqdm import tqdm
    return tqdm(initial=done, total=total, unit='iter', leave=False, disable=not sys.stderr.isatty())


def start_wandb(**settings):
    """A wandb run; with the id of an earlier run it continues that one. Raises UserError if wandb does not start."""
    try:
        import wandb
        return wandb.init(resume='allow', **settings)
    except Exception as error:
        raise UserError(f'wandb does not start: {error}; log in (wandb login), set WANDB_MODE=offline, or leave it out '
                        '(--wandb_log=False)') from error


class StopSignal:
    """Catches SIGTERM and SIGINT so that the loop can save and stop. A second one ends the process at once, but not
    while it saves. With nothing_to_save the first one ends the process.

    Each signal is answered by one line on stderr, at once: by a thread, because Python runs the handlers of signals
    only between two steps of the main thread, and a training step, a compilation or loading the weights is one."""

    def __init__(self, nothing_to_save=False):
        self.nothing_to_save = nothing_to_save
        self.saving = lambda: False  # whether a save is under way
        self.signum = 0  # none yet
        self.answered = threading.Event()
        received, sender = socket.socketpair()
        sender.setblocking(False)
        signal.set_wakeup_fd(sender.detach())  # gets the number of each signal as a byte
        threading.Thread(target=self.answer, args=(received,), daemon=True).start()
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self.receive)

    def receive(self, signum, frame):
        if self.nothing_to_save:
            self.answered.wait(5)
            sys.exit(128 + signum)

    def answer(self, received):
        while received_byte := received.recv(1):
            signum = received_byte[0]
            if signum not in (signal.SIGTERM, signal.SIGINT):
                continue
            name = signal_name(signum)
            is_first, self.signum = not self.signum, self.signum or signum
            if not is_first and not self.saving():
                say(f'ended by {name}')
                os._exit(128 + signum)
            if not is_first:
                say(f'{name} has to wait: a checkpoint is being written')
            elif self.nothing_to_save:
                say(f'stopping: there is nothing to save; {name} again ends at once')
            else:
                say(f'stopping after this iteration, then saving; {name} again ends at once, without saving')
            self.answered.set()


def signal_name(signum):
    """As users know the signal: Ctrl-C, or SIGTERM."""
    return 'Ctrl-C' if signum == signal.SIGINT else signal.Signals(signum).name


def say(text):
    """Prints a line on stderr, below a progress bar."""
    print(f'\n{text}' if sys.stderr.isatty() else text, file=sys.stderr, flush=True)
