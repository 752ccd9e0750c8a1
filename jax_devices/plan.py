"""A compiled program -> its costs: memory, traffic and collectives, read from the text of its HLO."""
import ctypes
import importlib.util
import math
import os
import re
from pathlib import Path

import jax
import numpy as np

from jax_flags import UserError

# Data sheets, per device: usable memory in bytes; bytes/s to memory, to devices of the host (NVLink, or all links of a
# TPU) and to other hosts
DATA_SHEETS = {'h100': (84.9e9, 3350e9, 450e9, 50e9), 'v5e': (15.75 * 2**30, 819e9, 200e9, 200e9),
               'cpu': (math.inf, None, None, None)}
# Target of XLA's CUDA compiler
H100 = '''gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
    shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
    block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000
    l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84929347584 shared_memory_per_block_optin: 232448
    cuda_compute_capability { major: 9 } registers_per_core_limit: 65536 registers_per_block_limit: 65536 }
platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 } runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"'''
COLLECTIVES = ('all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all', 'collective-permute', 'ragged-all-to-all')
DTYPE_BYTES = {'pred': 1, 's8': 1, 'u8': 1, 'bf16': 2, 'f16': 2, 's16': 2, 'u16': 2, 'f32': 4, 's32': 4, 'u32': 4,
               's64': 8, 'u64': 8, 'f64': 8}


def topology_devices(topology):
    """Devices to compile for: 'v5e:4x4' (a slice of TPUs), 'h100:2x8' (hosts x GPUs) or 'cpu:1x8' (the CPU devices of
    this process). Raises UserError if the compiler is not installed."""
    kind, _, shape = topology.partition(':')
    if kind not in DATA_SHEETS or not all(re.fullmatch('[1-9][0-9]*', size) for size in shape.split('x')):
        raise UserError(f'topology must be like v5e:4x4 (a TPU slice) or h100:2x8 (hosts x GPUs), not {topology!r}')
    if kind == 'cpu':
        devices = tuple(jax.devices('cpu'))[:(n := math.prod(map(int, shape.split('x'))))]
        if len(devices) < n:
            raise UserError(f'{topology} needs JAX_NUM_CPU_DEVICES={n}; this process has {len(devices)} CPU devices')
        return devices
    from jax.experimental import topologies
    package, extra = {'v5e': ('libtpu', 'tpu'), 'h100': ('jax_cuda12_plugin', 'cuda12')}[kind]
    if importlib.util.find_spec(package) is None:
        raise UserError(f'compiling for {kind} needs its compiler: pip install "jax[{extra}]=={jax.__version__}"')
    if kind == 'v5e':
        os.environ.update(TPU_SKIP_MDS_QUERY='1', TPU_WORKER_HOSTNAMES='localhost', ALLOW_MULTIPLE_LIBTPU_LOAD='1',
                          TPU_ACCELERATOR_TYPE='v5litepod-16')
        options = dict(platform='tpu', topology_name=topology)
    else:
        nvidia = Path(importlib.util.find_spec('nvidia').submodule_search_locations[0])
        os.environ.update(CUDA_VISIBLE_DEVICES='-1', JAX_SKIP_CUDA_CONSTRAINTS_CHECK='1')
        os.environ['PATH'] = f'{nvidia}/cuda_nvcc/bin:{os.environ["PATH"]}'
        os.environ['XLA_FLAGS'] = (f'--xla_gpu_autotune_level=0 --xla_gpu_cuda_data_dir={nvidia}/cuda_nvcc '
                                   + os.environ.get('XLA_FLAGS', ''))
        for library in nvidia.glob('nvjitlink/lib/libnvJitLink.so*'):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        from jax._src import xla_bridge
        canonical = xla_bridge.canonicalize_platform  # without a GPU 'gpu' means nothing to it (jax-ml/jax#23971)
        xla_bridge.canonicalize_platform = lambda name: 'cuda' if name == 'gpu' else canonical(name)
        options = dict(platform='cuda', topology_name='', target_config=H100, topology=f'1x{shape}')
    try:
        return tuple(topologies.get_topology_desc(**options).devices)
    except Exception as error:  # of many types
        raise UserError(f'{topology}: {" ".join(str(error).split())[:200]}') from error


def bytes_of(shapes):
    """Bytes of all arrays in a piece of HLO text, as in '(f32[8,2], bf16[])'."""
    arrays = re.findall(r'(\w+)\[([\d,]*)\]', shapes)
    return sum(DTYPE_BYTES.get(dtype, 0) * math.prod(map(int, filter(None, dims.split(',')))) for dtype, dims in arrays)


def parse_hlo(text):
    """{computation: [(name, shapes of the result, operation, rest of the line)]}; 'ENTRY' is the main one."""
    computations = {}
    for line in text.splitlines():
        if header := re.match(r'(ENTRY )?%?([\w.\-]+) .*\{$', line):
            instructions = computations[header[2]] = []
            if header[1]:
                computations['ENTRY'] = instructions
        elif found := re.match(r'\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)', line):
            instructions.append(found.groups())
    return computations


def trip_count(computations, rest):
    """How often a loop is executed, from its attributes or its condition."""
    if known := re.search(r'known_trip_count\D*(\d+)', rest):
        return int(known[1])
    condition = computations[re.search(r'condition=%?([\w.\-]+)', rest)[1]]
    limits = [int(found[0]) for *_, operation, rest in condition
              if operation == 'constant' and (found := re.match(r'\d+', rest))]
    if not limits:  # the data decide: the blocks of experts, or the rounds of exchange_tokens after the first
        body = executed(computations, re.search(r'body=%?([\w.\-]+)', rest)[1])
        return 0 if any(computations[name][i][2].startswith(COLLECTIVES) for name, i, _ in body) else 1
    limit = max(limits)
    return -(-limit // 2) if 'windowed_dot_general' in rest else limit  # these do two steps at a time


def executed(computations, name='ENTRY', times=1):
    """[(computation, index in it, times executed)] of the instructions of a program, through its loops and calls."""
    found = []
    for i, (_, _, operation, rest) in enumerate(computations[name]):
        found.append((name, i, times))
        if operation in ('while', 'call', 'async-start'):
            called = re.search(r'(?:body|to_apply|calls)=%?([\w.\-]+)', rest)[1]
            n = trip_count(computations, rest) if operation == 'while' else 1
            found += executed(computations, called, times * n)
    return found


def replica_group(rest, n_devices):
    """The numbers of the devices of the first group of a collective, from its attributes."""
    def iota(dims, permutation):
        ids = np.arange(n_devices).reshape([int(n) for n in dims.split(',')])
        return ids.transpose([int(n) for n in permutation.split(',')]) if permutation else ids

    if mesh := re.search(r"mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? ?\{([^}]*)\}", rest):
        sizes, dims, permutation, axes = mesh.groups()
        # a part of an axis is written 'axis':(number of parts before it)size
        parts = {axis: (int(first), int(size)) for axis, first, size in re.findall(r"'(\w+)':\((\d+)\)(\d+)", axes)}
        shape, inner = [], []
        for axis, size in re.findall(r"'(\w+)'=(\d+)", sizes):
            first, part = parts.get(axis, (1, int(size)))
            if f"'{axis}'" in axes:
                inner.append(len(shape) + 1)
            shape += [first, part, int(size) // (first * part)]
        ids = (iota(dims, permutation) if dims else np.arange(n_devices)).reshape(shape)
        ids = np.moveaxis(ids, inner, range(-len(inner), 0))
        return ids.reshape(-1, math.prod(shape[i] for i in inner))[0]
    if groups := re.search(r'replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?', rest):
        return iota(groups[3], groups[4]).reshape(int(groups[1]), int(groups[2]))[0]
    listed = re.search(r'(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}', rest)
    return np.array(listed[1].split(','), int) if listed else np.arange(n_devices)


def collectives_in(computations):
    """[(kind, shapes of the result, attributes, times executed, exposed)] of the collectives of a compiled step.
    Exposed: XLA's schedule has no computation between the start and the end."""
    found = []
    fused = {}  # a TPU's asynchronous collective is fused with others: a start, computations beside it, an end
    computing = ('fusion', 'custom-call', 'dot', 'convolution', 'while', 'call')
    for name, i, times in executed(computations):
        result, shapes, operation, rest = computations[name][i]
        kind = operation.removesuffix('-start')
        if kind in COLLECTIVES:
            exposed = True
            if operation != kind:
                later = computations[name][i + 1:]
                uses = rf'%?{re.escape(result)}\b'
                end = next(j for j, (*_, operands) in enumerate(later) if re.match(uses, operands))
                exposed = not any(other in computing for _, _, other, _ in later[:end])
                if kind != 'all-reduce':  # (operands, results, ...)
                    arrays = [array for array in re.findall(r'\w+\[[\d,]*\]', shapes)
                              if kind != 'collective-permute' or not array.endswith('[]')]
                    shapes = ' '.join(arrays[len(arrays) // 2:])
            found.append((kind, shapes, rest, times, exposed))
        elif operation == 'fusion':
            called = re.search(r'calls=%?([\w.\-]+)', rest)[1]
            for _, shapes, kind, rest in computations[called]:
                if kind in COLLECTIVES:
                    kind = 'reduce-scatter' if 'all-reduce-scatter' in called else kind
                    channel = re.search(r'channel_id=(\d+)|$', rest)[1]
                    fused.setdefault(channel, []).append((kind, shapes, rest, times))
    for pieces in fused.values():
        found.append((*pieces[0], len(pieces) <= 2))
    return found


def collective_table(computations, mesh, n_steps=1):
    """[{kind, axis, n, dtype, count, bytes, exposed, hosts}]: what a device sends per step of a program of n_steps, in
    rings, by kind, axes and dtype; how many bytes of it are exposed; whether a group spans hosts."""
    table = {}
    for kind, shapes, rest, times, exposed in collectives_in(computations):
        group = replica_group(rest, mesh.devices.size)
        n = len(group)
        places = np.unravel_index(group, mesh.devices.shape)
        axis = '+'.join(name for name, place in zip(mesh.axis_names, places) if len(set(place)) > 1) or '-'
        times /= n_steps
        size = bytes_of(shapes)
        if kind == 'reduce-scatter' and 'dimensions=' in rest:  # not in the all-reduce that a TPU's fusion wraps
            size *= n
        sent = times * size * {'all-reduce': 2 * (n - 1) / n, 'collective-permute': 1}.get(kind, (n - 1) / n)
        dtypes = '+'.join(sorted(set(re.findall(r'(\w+)\[', shapes))))
        row = table.setdefault((kind, axis, dtypes), dict(
            kind=kind, axis=axis, n=n, dtype=dtypes, count=0, bytes=0, exposed=0,
            hosts=len({device.process_index for device in mesh.devices.ravel()[group]}) > 1))
        row['count'] += times * len(re.findall(r'\w+\[', shapes))
        row['bytes'] += sent
        row['exposed'] += sent * exposed
    return sorted(table.values(), key=lambda row: -row['bytes'])


def memory_traffic(computations):
    """Bytes that the operations of a step read and write, each operand and result once, as if there were no cache."""
    free = ('parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'while', 'call', 'after-all', 'copy-done')
    total, sizes = 0, {}
    for name, i, times in executed(computations):
        if name not in sizes:
            sizes[name] = {result: bytes_of(shapes) for result, shapes, _, _ in computations[name]}
        result, _, operation, rest = computations[name][i]
        if operation not in free and not operation.endswith('-done'):
            operands = re.findall(r'%([\w.\-]+)', rest.split(')')[0])
            total += times * (sizes[name][result] + sum(sizes[name].get(operand, 0) for operand in operands))
    return total


def shard_bytes(tree):
    """Bytes of one device's shards of a tree of ShapeDtypeStructs."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
               if hasattr(x, 'shape') and not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key))


def print_collectives(table):
    print(f'{"collective":>20} {"axis":>14} {"devices":>8} {"dtype":>10} {"arrays":>7} {"MB sent":>10} {"exposed":>10}')
    for row in table:
        print(f'{row["kind"]:>20} {row["axis"]:>14} {row["n"]:>8} {row["dtype"]:>10} {row["count"]:>7.4g} '
              f'{row["bytes"] / 1e6:>10,.2f} {row["exposed"] / 1e6:>10,.2f}')
    if any(row['kind'] == 'all-to-all' and row['axis'] == 'expert' for row in table):
        print('tokens are sent to experts in one round, as when routing is balanced; others send more')
