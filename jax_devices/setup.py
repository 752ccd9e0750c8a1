"""Sets up this process: the devices, the compute dtype, malloc and the compilation cache."""
import contextlib
import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
import time
import zlib
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from jax_flags import DTYPES, UserError, ceil_div, check_choice, read_json

# Dense bfloat16 FLOP/s of one device, from the vendors' data sheets. The first name that is found
# in jax's device_kind counts, so 'H100 PCIe' comes before 'H100'; 'H200' is also in 'GH200'.
PEAK_FLOPS = {
    'H200': 989e12,
    'H100 PCIe': 756e12,
    'H100': 989e12,
    'B200': 2250e12,
    'A100': 312e12,
    'L40S': 362e12,
    'RTX 4090': 165e12,
    'RTX 3090': 71e12,
    'V100': 125e12,
    'Tesla T4': 65e12,
    'TPU v2': 45e12,
    'TPU v3': 123e12,
    'TPU v4': 275e12,
    'TPU v5 lite': 197e12,
    'TPU v5e': 197e12,
    'TPU v5': 459e12,
    'TPU v6': 918e12,
}


def device_peak_flops(device):
    """Returns the peak FLOP/s of a device for the MFU, or None if PEAK_FLOPS lacks the device."""
    kind = device.device_kind.lower()
    for name, peak in PEAK_FLOPS.items():
        if name.lower() in kind:
            return peak
    return None


# -----------------------------------------------------------------------------
# devices and dtype

def check_device_availability(device: str = 'auto') -> list[jax.Device]:
    """Returns the list of jax devices that the flag `device` means.

    'cpu', 'tpu', 'gpu' and 'cuda' (the same as 'gpu') each mean all devices of that kind. 'auto'
    means all devices of the best kind that is there. 'cuda:1' means the GPU with number 1. Raises
    UserError for another value, and for a device that is not there."""
    kind, _, index = device.partition(':')
    is_known = kind in ('auto', 'cpu', 'gpu', 'cuda', 'tpu')
    if not is_known or (index and not index.isdigit()):
        hint = ''
        if kind == 'mps':
            hint = '; the plugin jax-mps, which was not tried here, is --device=auto'
        raise UserError('device must be auto, cpu, cuda, tpu, or one of several as in cuda:0, '
                        f'not {device!r}{hint}')

    # All devices of the kind.
    backends = {'auto': None, 'cuda': 'gpu'}
    try:
        devices = jax.devices(backends.get(kind, kind))
    except RuntimeError:
        raise UserError(f'jax sees no {kind} here, only {jax.devices()[0].platform}; for an NVIDIA '
                        'GPU install jax[cuda13] (or jax[cuda12]), for a TPU jax[tpu]') from None
    if not index:
        return devices

    # One of them. If configure_process has hidden the other GPUs, it is the only one.
    if jax.process_count() > 1:
        raise UserError(f'device={device}, but several processes share all devices; leave out the '
                        'number')
    if kind != 'cpu' and jax.config.jax_cuda_visible_devices == index:
        return devices
    if int(index) >= len(devices):
        raise UserError(f'there is no device {device}; there are {len(devices)} of the kind, '
                        'counted from 0')
    return [devices[int(index)]]


# Settings of jax that the environment may have for other programs, with the values that this one
# needs. In float64 a run would not be what its log says, strict promotion refuses additions of the
# model, and without compilation a step cannot be lowered to a program.
OWN_SETTINGS = {
    'jax_disable_jit': False,
    'jax_enable_x64': False,
    'jax_numpy_rank_promotion': 'allow',
    'jax_numpy_dtype_promotion': 'standard',
}


def configure_process(device, deterministic=False, init_from='', out_dir=''):
    """Sets, for this process, what JAX reads when JAX initializes its backends, and OWN_SETTINGS.
    Call this function first.

    device: the flag --device. deterministic: whether GPUs compute the same bits in every run, at a
    cost; CPUs do so anyway. init_from: the flag of training. If it is 'resume' or 'auto', the
    config.json in out_dir, the folder of the run on this disk, may ask for deterministic, too."""
    if init_from in ('resume', 'auto'):
        # a damaged file says nothing; all flags are in the checkpoint, too
        with contextlib.suppress(UserError):
            saved = read_json(Path(out_dir, 'config.json'), optional=True)
            deterministic |= saved.get('deterministic') is True

    for name, value in OWN_SETTINGS.items():
        theirs = getattr(jax.config, name)
        if theirs != value:
            print(f'{name.upper()}={theirs} is not used here: it is {value}', file=sys.stderr)
            jax.config.update(name, value)

    # Do not initialize a GPU that is not used: it would reserve the GPU's memory.
    kind, _, index = device.partition(':')
    if kind == 'cpu':
        jax.config.update('jax_platforms', 'cpu')
    if kind in ('cuda', 'gpu') and index:
        jax.config.update('jax_cuda_visible_devices', index)
        jax.config.update('jax_rocm_visible_devices', index)

    if deterministic:
        xla_flags = os.environ.get('XLA_FLAGS', '')
        os.environ['XLA_FLAGS'] = xla_flags + ' --xla_gpu_deterministic_ops=true'
    if kind == 'cpu' or kind == 'auto' and not finds_accelerator():
        configure_malloc()
    jax.config.update('jax_cpu_enable_async_dispatch', False)  # see is_synchronous


def is_synchronous(device):
    """Returns whether this device is synchronous: when a call returns, the computation is done and
    its temporaries are freed.

    configure_process makes CPUs synchronous. Without this, a call often allocates its temporaries
    before the temporaries of the previous call are freed (docs/lab_log.md#synchronous-dispatch)."""
    return device.platform == 'cpu'


def finds_accelerator(dev=Path('/dev')):
    """Returns whether --device=auto probably means a GPU or TPU. This is so if a plugin of JAX for
    a GPU or TPU is installed and Linux has such a device. dev: the folder of Linux's devices.

    JAX itself knows this only after its backends are initialized, which is too late for
    configure_malloc."""
    patterns = ('nvidia[0-9]*', 'kfd', 'accel[0-9]*', 'vfio/[0-9]*')
    has_device = any(list(dev.glob(pattern)) for pattern in patterns)
    if jax.config.jax_platforms == 'cpu' or not has_device:
        return False
    # reading what all installed packages say takes milliseconds
    plugins = importlib.metadata.entry_points(group='jax_plugins')
    return bool(plugins) or importlib.util.find_spec('libtpu') is not None


def setup_jax_environment(device: str = 'auto',
                          dtype: str = 'auto') -> tuple[list[jax.Device], str, str]:
    """Picks the devices and the compute dtype. Call this function before anything except
    configure_process() uses jax.

    Returns (devices; dtype; reason for the dtype). dtype='auto' is bfloat16 if the hardware
    multiplies bfloat16 fast, else float32. With float32, GPUs and TPUs also compute matmuls in
    float32, not in TF32 or bfloat16 as by JAX's default. Raises UserError for a device that is not
    there and for an unknown dtype."""
    # The devices.
    configure_process(device)
    devices = check_device_availability(device)
    platform = devices[0].platform
    if device == 'auto' and platform == 'cpu' and finds_accelerator():
        print(f'warning: {lost_accelerator()}', file=sys.stderr)
    enable_compilation_cache(platform)
    if platform == 'cpu' and jax.process_count() == 1:
        # silence XLA's alarm when a compilation takes long, and all else that it logs on stderr,
        # except fatal errors. Not with several processes: the coordination service logs there why
        # it fails
        with contextlib.suppress(ImportError):  # then the alarm is printed
            from jaxlib.utils import absl_set_min_log_level
            absl_set_min_log_level(3)  # fatal

    # The dtype.
    check_choice('dtype', dtype, ('auto', *DTYPES))
    if dtype == 'auto':
        dtype, reason = default_dtype(devices[0])
    else:
        reason = 'as asked'
    if dtype == 'float32' and platform != 'cpu':
        jax.config.update('jax_default_matmul_precision', 'highest')
        reason += '; matmuls in full float32, not TF32 or bfloat16'
    return devices, dtype, reason


def lost_accelerator():
    """Returns the text of a warning that the machine has a GPU or TPU, but JAX sees only the CPU.
    The caller must have checked that this is so (finds_accelerator). The text names JAX's plugins
    and the command that reinstalls JAX."""
    plugins = importlib.metadata.entry_points(group='jax_plugins')
    names = [f'{plugin.dist.name} {plugin.dist.version}' for plugin in plugins if plugin.dist]
    extra = 'tpu'
    for generation in ('cuda13', 'cuda12', 'rocm'):
        if any(generation in name for name in names):
            extra = generation
    return (f'a GPU or TPU and {", ".join(names) or "libtpu"} are here, but with jaxlib '
            f'{jaxlib.__version__} only the CPU came up: pip install '
            f'"jax[{extra}]=={jax.__version__}", and start Python again')


def default_dtype(device):
    """Returns (dtype; reason) for --dtype=auto on this device."""
    if device.platform == 'tpu':
        return 'bfloat16', 'TPUs multiply bfloat16'
    if device.platform != 'gpu':
        return 'float32', 'the CPU default'
    capability = getattr(device, 'compute_capability', '0')
    if not nvidia_capability(device):
        return 'bfloat16', f'AMD GPU {capability}'
    if nvidia_capability(device) >= 8:
        return 'bfloat16', f'compute capability {capability}; from 8.0 on bfloat16 is fast'
    return 'float32', (f'compute capability {capability}, where bfloat16 is slow; --dtype=float16 '
                       'is fast from 7.0 on')


def nvidia_capability(device):
    """Returns the compute capability of an NVIDIA GPU as a float, such as 8.0. Returns 0.0 for
    other devices (an AMD GPU has 'gfx90a')."""
    try:
        return float(getattr(device, 'compute_capability', None) or 0)
    except ValueError:
        return 0.0


# -----------------------------------------------------------------------------
# memory of the CPU

@functools.cache  # one call is enough
def configure_malloc():
    """Tells glibc never to return memory to the system, and tells Linux to use huge pages for this
    memory. XLA:CPU allocates its temporaries in every step, and page faults took half of the step
    or more (docs/lab_log.md#malloc).

    Call this function before jax starts its threads. A thread that already has its own arena (64
    MiB) keeps this arena. Memory that does not fit into the arena comes from the system each
    time."""
    libc = ctypes.CDLL(None) if sys.platform == 'linux' else None
    if not hasattr(libc, 'mallopt'):  # only glibc has it
        return

    # Keep memory. The numbers are malloc.h's.
    M_TRIM_THRESHOLD = -1
    M_MMAP_MAX = -4
    M_ARENA_MAX = -8
    libc.mallopt(M_ARENA_MAX, 1)  # all threads use the main heap, the only one without a size limit
    libc.mallopt(M_MMAP_MAX, 0)  # large blocks come from the heap too
    libc.mallopt(M_TRIM_THRESHOLD, -1)  # free memory at the end of the heap is kept
    mark_huge_pages(libc)


def mark_huge_pages(libc):
    """Makes Linux use huge pages for the next part of the heap. This part is half as large as the
    machine's memory; reserving it costs nothing until it is written to. libc: the C library, a
    ctypes.CDLL."""
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    MADV_HUGEPAGE = 14  # mman.h
    page = os.sysconf('SC_PAGE_SIZE')
    size = os.sysconf('SC_PHYS_PAGES') // 2 * page
    block = libc.malloc(size)
    if block:
        first_page = ceil_div(block, page) * page
        libc.madvise(first_page, size - page, MADV_HUGEPAGE)
        libc.free(block)


def trim_malloc():
    """Gives freed memory back to the system. After configure_malloc, glibc does so only when told
    to."""
    libc = ctypes.CDLL(None) if sys.platform == 'linux' else None
    if hasattr(libc, 'malloc_trim'):
        libc.malloc_trim(0)
        mark_huge_pages(libc)  # the end of the heap has lost its mark


# -----------------------------------------------------------------------------
# compiled programs

def enable_compilation_cache(platform):
    """Keeps compiled programs on disk. A second run then starts at once, because it need not
    compile the programs again. The folder of the programs is made with the permissions 0700, so
    only this user can read it.

    Each version of jaxlib, each platform and each kind of CPU has its own folder, because one
    version, platform or CPU may not be able to load the programs of another. The environment's
    JAX_COMPILATION_CACHE_DIR takes precedence. On a CPU, does nothing if can_cache_on_cpu() is
    false."""
    if jax.config.jax_compilation_cache_dir is not None:
        return
    if platform == 'cpu' and not can_cache_on_cpu():
        return
    name = cpu_name() if platform == 'cpu' else platform
    home = os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'
    folder = Path(home) / 'jax_transformer' / f'{name}-jaxlib-{jaxlib.__version__}'
    try:
        # Programs in it are executed: keep others out.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return  # the home folder is read-only: compile in every run
    jax.config.update('jax_compilation_cache_dir', str(folder))

    # On a CPU many small programs take 2 s to compile and 0.2 s to load: keep all of them.
    if platform == 'cpu':
        jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)


def can_cache_on_cpu():
    """Returns whether programs that are compiled for a CPU are cached. This needs jaxlib 0.10.2 or
    later, Linux and a single process.

    Earlier versions of jaxlib print two lines about SIGILL for each program that they load on a CPU
    with AVX-512 (jax-ml/jax#38445). Other systems were not tested. Of several processes only the
    first one would write programs to the cache."""
    version = tuple(int(part) for part in jaxlib.__version__.split('.')[:3])
    return version >= (0, 10, 2) and sys.platform == 'linux' and jax.process_count() == 1


def cpu_name():
    """Returns 'cpu-' followed by a hash. The hash covers what XLA compiles for: the CPU's model,
    its instruction sets and the number of threads."""
    known = r'(vendor_id|model name|flags|CPU implementer|CPU part|Features)\b'
    lines = Path('/proc/cpuinfo').read_text().splitlines()
    fields = {line for line in lines if re.match(known, line)}
    threads = (os.environ.get('NPROC'), len(os.sched_getaffinity(0)))  # XLA:CPU reads both
    described = repr((sorted(fields), threads))
    return f'cpu-{zlib.crc32(described.encode()):08x}'


# -----------------------------------------------------------------------------
# measuring

def describe_environment(devices):
    """Returns {name: value} of the devices and software that a measurement uses, for the JSON
    document of the measurement."""
    return {
        'device': devices[0].device_kind,
        'n_devices': len(devices),
        'machine': platform.machine(),
        'python': platform.python_version(),
        'jax': jax.__version__,
        'jaxlib': jaxlib.__version__,
    }


def measure_bandwidth(device, n_bytes=2**29):
    """Returns the bandwidth of reading a device's memory, in GB/s: the median of ten timings of
    sums over n_bytes bytes (512 MiB are larger than any cache).

    The result is the median, not the best, because on a shared machine the sustained bandwidth is
    lower than the peak."""
    x = jax.device_put(jnp.ones(n_bytes // 4, jnp.float32), device)
    total = jax.jit(jnp.sum)

    # An H100 reads the array in 0.2 ms, about the time of a call: several calls are timed together.
    n_calls = 1 if is_synchronous(device) else 16
    seconds = []
    for _ in range(11):
        start = time.perf_counter()
        jax.block_until_ready([total(x) for _ in range(n_calls)])
        seconds.append(time.perf_counter() - start)
    median = np.median(seconds[1:])  # the first one compiles
    return n_calls * x.nbytes / median / 1e9


class Lap(NamedTuple):
    """The seconds between two calls of Stopwatch.lap."""
    compiling: float
    running: float  # all other time


class Stopwatch:
    """Measures compilation and all other time separately.

    started: the time.perf_counter() of the script's start, before its imports."""

    def __init__(self, started=None):
        self.compiling = 0.0
        self.start = time.perf_counter()
        self.started = self.start if started is None else started
        self.imports_s = self.start - self.started

        # jax reports the duration of tracing, of lowering and of compiling as separate events.
        jax.monitoring.register_event_duration_secs_listener(self.count)

    def count(self, event, seconds, **attributes):
        """Receives the timing events of jax. Adds the seconds of a compilation event to the time of
        compilation, `compiling`. Ignores all other events."""
        if event.startswith('/jax/core/compile/'):
            self.compiling += seconds

    def lap(self):
        """Returns the Lap since the last call. Before you call this method, wait for the device."""
        compiling = self.compiling
        running = max(0.0, time.perf_counter() - self.start - compiling)
        self.compiling = 0.0
        self.start = time.perf_counter()
        return Lap(compiling, running)
