"""Turns the name of a topology into devices to compile for."""
import ctypes
import importlib.util
import math
import os
import re
from pathlib import Path

import jax

from jax_flags import UserError

# The usable memory of each kind of device, in bytes. The process's own CPUs have no limit.
DEVICE_MEMORY = {'h100': 84.9e9, 'v5e': 15.75 * 2**30, 'cpu': None}

# The target of XLA's CUDA compiler, as XLA writes it.
H100 = '''gpu_device_info {
    threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
    shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
    shared_memory_per_core: 233472 core_count: 132 fpus_per_core: 128
    block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
    memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
    device_memory_size: 84929347584 cuda_compute_capability { major: 9 }
    registers_per_core_limit: 65536 registers_per_block_limit: 65536 }
platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"'''


def topology_devices(topology):
    """Returns the devices to compile for. topology: 'v5e:4x4' (a slice of TPUs), 'h100:2x8' (hosts
    x GPUs) or 'cpu:1x8' (the CPU devices of this process). Raises UserError if the compiler is not
    installed."""
    kind, _, shape = topology.partition(':')
    sizes = shape.split('x')
    are_numbers = all(re.fullmatch('[1-9][0-9]*', size) for size in sizes)
    if kind not in DEVICE_MEMORY or not are_numbers:
        raise UserError('topology must be like v5e:4x4 (a TPU slice), h100:2x8 (hosts x GPUs) or '
                        f'cpu:1x8 (CPU devices of this process), not {topology!r}: only '
                        f'{", ".join(DEVICE_MEMORY)} are known')
    if kind == 'cpu':
        n_devices = math.prod(int(size) for size in sizes)
        return cpu_devices(topology, n_devices)

    # The compiler is a package of its own.
    compilers = {'v5e': ('libtpu', 'tpu'), 'h100': ('jax_cuda12_plugin', 'cuda12')}
    package, extra = compilers[kind]
    if importlib.util.find_spec(package) is None:
        raise UserError(f'compiling for {kind} needs its compiler: pip install '
                        f'"jax[{extra}]=={jax.__version__}"')

    # It has to work without the device.
    if kind == 'v5e':
        prepare_tpu_compiler()
        options = {'platform': 'tpu', 'topology_name': topology}
    else:
        prepare_cuda_compiler()
        name_gpus_cuda()
        options = {
            'platform': 'cuda', 'topology_name': '', 'target_config': H100,
            'topology': f'1x{shape}'}
    from jax.experimental import topologies
    try:
        return tuple(topologies.get_topology_desc(**options).devices)
    except Exception as error:  # its types vary
        raise UserError(f'{topology}: {" ".join(str(error).split())[:200]}') from error


def cpu_devices(topology, n_devices):
    """Returns the first n_devices CPU devices of this process. Raises UserError if the process has
    fewer. topology: its name, for the message."""
    devices = tuple(jax.devices('cpu'))
    if len(devices) < n_devices:
        raise UserError(f'{topology} needs JAX_NUM_CPU_DEVICES={n_devices}; this process has '
                        f'{len(devices)} CPU devices')
    return devices[:n_devices]


def prepare_tpu_compiler():
    """Sets environment variables from which libtpu learns what kind of TPU slice to compile for.
    Without these variables, libtpu would ask the cloud's metadata server, which this machine may
    not have. Call this function before libtpu is loaded."""
    os.environ['TPU_SKIP_MDS_QUERY'] = '1'
    os.environ['TPU_WORKER_HOSTNAMES'] = 'localhost'
    os.environ['ALLOW_MULTIPLE_LIBTPU_LOAD'] = '1'
    os.environ['TPU_ACCELERATOR_TYPE'] = 'v5litepod-16'


def prepare_cuda_compiler():
    """Lets XLA find the CUDA tools among the Python packages, and compile without a GPU."""
    nvidia = Path(importlib.util.find_spec('nvidia').submodule_search_locations[0])
    flags = f'--xla_gpu_autotune_level=0 --xla_gpu_cuda_data_dir={nvidia}/cuda_nvcc '
    os.environ['CUDA_VISIBLE_DEVICES'] = '-1'
    os.environ['JAX_SKIP_CUDA_CONSTRAINTS_CHECK'] = '1'
    os.environ['PATH'] = f'{nvidia}/cuda_nvcc/bin:{os.environ["PATH"]}'
    os.environ['XLA_FLAGS'] = flags + os.environ.get('XLA_FLAGS', '')
    for library in nvidia.glob('nvjitlink/lib/libnvJitLink.so*'):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def name_gpus_cuda():
    """Makes 'gpu' mean CUDA in jax. On a machine without a GPU, jax does not know the name 'gpu'
    (jax-ml/jax#23971)."""
    from jax._src import xla_bridge
    canonical = xla_bridge.canonicalize_platform

    def canonicalize(name):
        return 'cuda' if name == 'gpu' else canonical(name)

    xla_bridge.canonicalize_platform = canonicalize
