"""The text of a compiled program (HLO) -> its memory traffic and its collectives."""
import math
import re

import numpy as np

COLLECTIVES = ('all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all', 'collective-permute', 'ragged-all-to-all')
DTYPE_BYTES = {'pred': 1, 's8': 1, 'u8': 1, 'bf16': 2, 'f16': 2, 's16': 2, 'u16': 2, 'f32': 4, 's32': 4, 'u32': 4,
               's64': 8, 'u64': 8, 'f64': 8}


def bytes_of(shapes):
    """Bytes of all arrays in a piece of HLO text, as in '(f32[8,2], bf16[])'."""
    arrays = re.findall(r'(\w+)\[([\d,]*)\]', shapes)
    return sum(DTYPE_BYTES.get(dtype, 0) * math.prod(map(int, filter(None, dims.split(',')))) for dtype, dims in arrays)


def parse_hlo(text):
    """{computation: [(name, shapes of the result, operation, rest of the line)]}; 'ENTRY' is the
    main one."""
    computations = {}
    for line in text.splitlines():
        header = re.match(r'(ENTRY )?%?([\w.\-]+) .*\{$', line)
        instruction = re.match(r'\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)', line)
        if header:
            instructions = computations[header[2]] = []
            if header[1]:
                computations['ENTRY'] = instructions
        elif instruction:
            instructions.append(instruction.groups())
    return computations


def trip_count(computations, rest):
    """How often a loop is executed, from its attributes or its condition."""
    known = re.search(r'known_trip_count\D*(\d+)', rest)
    if known:
        return int(known[1])
    condition = computations[re.search(r'condition=%?([\w.\-]+)', rest)[1]]
    limits = []
    for *_, operation, value in condition:
        number = re.match(r'\d+', value)
        if operation == 'constant' and number:
            limits.append(int(number[0]))
    # the data decide: the blocks of experts, or the rounds of exchange_tokens after the first
    if not limits:
        body = executed(computations, re.search(r'body=%?([\w.\-]+)', rest)[1])
        return 0 if any(computations[name][i][2].startswith(COLLECTIVES) for name, i, _ in body) else 1
    limit = max(limits)
    # these do two steps at a time
    return -(-limit // 2) if 'windowed_dot_general' in rest else limit


def executed(computations, name='ENTRY', times=1):
    """[(computation, index in it, times executed)] of the instructions of a program, through its
    loops and calls."""
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

    mesh = re.search(r"mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? ?\{([^}]*)\}", rest)
    if mesh:
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
    groups = re.search(r'replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?', rest)
    if groups:
        return iota(groups[3], groups[4]).reshape(int(groups[1]), int(groups[2]))[0]
    listed = re.search(r'(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}', rest)
    return np.array(listed[1].split(','), int) if listed else np.arange(n_devices)


def collectives_in(computations):
    """[(kind, shapes of the result, attributes, times executed, exposed)] of the collectives of a
    compiled step.
    Exposed: XLA's schedule has no computation between the start and the end."""
    found = []
    # a TPU's asynchronous collective is fused with others: a start, computations beside it, an end
    fused = {}
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
    """[{kind, axis, n, dtype, count, bytes, exposed, hosts}]: what a device sends per step of a
    program of n_steps, in rings, by kind, axes and dtype; how many bytes of it are exposed; whether
    a group spans hosts."""
    table = {}
    for kind, shapes, rest, times, exposed in collectives_in(computations):
        group = replica_group(rest, mesh.devices.size)
        n = len(group)
        places = np.unravel_index(group, mesh.devices.shape)
        axis = '+'.join(name for name, place in zip(mesh.axis_names, places) if len(set(place)) > 1) or '-'
        times /= n_steps
        size = bytes_of(shapes)
        # not in the all-reduce that a TPU's fusion wraps
        if kind == 'reduce-scatter' and 'dimensions=' in rest:
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
    """Bytes that the operations of a step read and write, each operand and result once, as if there
    were no cache."""
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
