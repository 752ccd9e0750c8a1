"""The text of a compiled program (HLO) -> its memory traffic and its collectives."""
import math
import re

import numpy as np

from jax_flags import ceil_div

# The operations that send something.
COLLECTIVES = (
    'all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all', 'collective-permute',
    'ragged-all-to-all')

# The operations that compute something while a collective is under way.
COMPUTING = ('fusion', 'custom-call', 'dot', 'convolution', 'while', 'call')

# The operations that read and write nothing themselves.
WITHOUT_TRAFFIC = (
    'parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'while', 'call',
    'after-all', 'copy-done')

# {type in HLO: bytes of an element}
DTYPE_BYTES = {
    'pred': 1, 's8': 1, 'u8': 1,
    'bf16': 2, 'f16': 2, 's16': 2, 'u16': 2,
    'f32': 4, 's32': 4, 'u32': 4,
    's64': 8, 'u64': 8, 'f64': 8}


def bytes_of(shapes):
    """Returns the bytes of all arrays in a piece of HLO text, as in '(f32[8,2], bf16[])'."""
    total = 0
    for dtype, dims in re.findall(r'(\w+)\[([\d,]*)\]', shapes):
        sizes = [int(size) for size in dims.split(',') if size]  # none: a number
        total += DTYPE_BYTES.get(dtype, 0) * math.prod(sizes)
    return total


def parse_hlo(text):
    """Parses the text of a compiled program and returns {computation: [(name, shapes of the result,
    operation, rest of the line)]}; 'ENTRY' is the main one."""
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


def known_length(computations, rest):
    """Returns how often a loop is executed, by its attributes or its condition; None if the data
    decide. rest: the rest of the loop's line."""
    # XLA may have written it there.
    known = re.search(r'known_trip_count\D*(\d+)', rest)
    if known:
        return int(known[1])

    # Else the condition compares a counter with a constant.
    condition = computations[re.search(r'condition=%?([\w.\-]+)', rest)[1]]
    limits = []
    for *_, operation, value in condition:
        number = re.match(r'\d+', value)
        if operation == 'constant' and number:
            limits.append(int(number[0]))
    if limits:
        limit = max(limits)
        does_two_steps = 'windowed_dot_general' in rest
        return ceil_div(limit, 2) if does_two_steps else limit
    return None


def trip_count(computations, rest):
    """Returns how often a loop is counted. rest: the rest of its line."""
    known = known_length(computations, rest)
    if known is not None:
        return known

    # Without a constant the data decide, and the worst case is counted.
    name, most = unknown_length(rest)
    if name == 'more_rounds':  # of exchange_tokens: none if routing is balanced
        return 0
    return most or 1


def unknown_length(rest):
    """Returns (name, most iterations) of a loop whose length the data decide, which has a scope
    NAME_at_most_N; without it the name that XLA gives it, and None.

    rest: the rest of the loop's line."""
    scopes = re.findall(r'(\w+)_at_most_(\d+)', rest)
    if scopes:
        name, most = scopes[-1]  # the innermost
        return name, int(most)
    return re.search(r'body=%?([\w.\-]+)', rest)[1], None


def loops_of_unknown_length(computations):
    """Returns {name: (iterations counted, most iterations or None, times executed)} of the loops of
    a program whose length the data decide."""
    loops = {}
    for name, i, times in executed(computations):
        _, _, operation, rest = computations[name][i]
        if operation != 'while' or known_length(computations, rest) is not None:
            continue
        loop, most = unknown_length(rest)
        _, _, times_before = loops.get(loop, (0, 0, 0))
        loops[loop] = (trip_count(computations, rest), most, times_before + times)
    return loops


def executed(computations, name='ENTRY', times=1):
    """Returns [(computation, index in it, times executed)] of the instructions of a program,
    through its loops and calls."""
    found = []
    for i, (_, _, operation, rest) in enumerate(computations[name]):
        found.append((name, i, times))
        if operation in ('while', 'call', 'async-start'):
            called = re.search(r'(?:body|to_apply|calls)=%?([\w.\-]+)', rest)[1]
            n = trip_count(computations, rest) if operation == 'while' else 1
            found += executed(computations, called, times * n)
    return found


def replica_group(rest, n_devices):
    """Returns the numbers of the devices of the first group of a collective.

    rest: the rest of the collective's line, which writes its groups in one of three ways."""
    # 1) The axes of a mesh.
    mesh = re.search(r'mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? ?'
                     r'\{([^}]*)\}', rest)
    if mesh:
        return mesh_group(n_devices, *mesh.groups())

    # 2) A shape of groups, of numbers that count up.
    groups = re.search(r'replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?', rest)
    if groups:
        ids = iota(n_devices, groups[3], groups[4])
        return ids.reshape(int(groups[1]), int(groups[2]))[0]

    # 3) A list of groups; none is a group of all devices.
    listed = re.search(r'(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}', rest)
    if listed:
        return np.array(listed[1].split(','), int)
    return np.arange(n_devices)


def iota(n_devices, dims, permutation):
    """Returns the numbers 0 ... n_devices - 1 in the shape `dims`, transposed. dims, permutation:
    texts such as '4,2' and '1,0', or None."""
    ids = np.arange(n_devices)
    if dims:
        ids = ids.reshape([int(n) for n in dims.split(',')])
    if permutation:
        ids = ids.transpose([int(n) for n in permutation.split(',')])
    return ids


def mesh_group(n_devices, sizes, dims, permutation, axes):
    """Returns the numbers of the devices of the first group along axes of a mesh.

    sizes: the mesh, as "'data'=4, 'tensor'=2". dims, permutation: how its devices are numbered, for
    iota. axes: the group's, as "'tensor'"; a part of an axis is written 'axis':(number of parts
    before it)size."""
    parts = {}
    for axis, first, size in re.findall(r"'(\w+)':\((\d+)\)(\d+)", axes):
        parts[axis] = (int(first), int(size))

    # Each axis of the mesh becomes three: what is before the part, the part, what is after it.
    shape = []
    inner = []  # the numbers of those that are the group's
    for axis, size in re.findall(r"'(\w+)'=(\d+)", sizes):
        first, part = parts.get(axis, (1, int(size)))
        if f"'{axis}'" in axes:
            inner.append(len(shape) + 1)
        shape += [first, part, int(size) // (first * part)]

    # The group's axes go last, and the first row is the first group.
    ids = iota(n_devices, dims, permutation).reshape(shape)
    ids = np.moveaxis(ids, inner, range(-len(inner), 0))
    group_size = math.prod(shape[i] for i in inner)
    return ids.reshape(-1, group_size)[0]


def collectives_in(computations):
    """Returns [(kind, shapes of the result, attributes, times executed, exposed)] of the
    collectives of a compiled step.

    A collective is exposed if XLA's schedule has no computation between its start and its end."""
    found = []
    fused = {}  # {channel: the pieces of a collective that is fused with computations}
    for name, i, times in executed(computations):
        result, shapes, operation, rest = computations[name][i]
        kind = operation.removesuffix('-start')
        if kind in COLLECTIVES:
            exposed = True
            if operation != kind:
                exposed = is_exposed(result, computations[name][i + 1:])
                shapes = started_shapes(kind, shapes)
            found.append((kind, shapes, rest, times, exposed))
        elif operation == 'fusion':
            called = re.search(r'calls=%?([\w.\-]+)', rest)[1]
            for piece in fused_collectives(computations[called], called):
                channel = re.search(r'channel_id=(\d+)|$', piece[2])[1]
                fused.setdefault(channel, []).append((*piece, times))

    # A TPU's asynchronous collective is a start, computations beside it, and an end: each is a
    # fusion with a piece of it. Two pieces have no computations between them.
    for pieces in fused.values():
        found.append((*pieces[0], len(pieces) <= 2))
    return found


def is_exposed(result, later):
    """Returns whether nothing is computed between the start of a collective and its end.

    result: the name of the start. later: the instructions after it."""
    uses = rf'%?{re.escape(result)}\b'
    for _, _, operation, operands in later:
        if re.match(uses, operands):
            return True
        if operation in COMPUTING:
            return False
    raise ValueError(f'{result} is started and does not end')


def started_shapes(kind, shapes):
    """Returns the shapes of a collective's results, given those of its start: (operands, results).
    An all-reduce has only results; a permutation's start has counters, too."""
    if kind == 'all-reduce':
        return shapes
    arrays = re.findall(r'\w+\[[\d,]*\]', shapes)
    if kind == 'collective-permute':
        arrays = [array for array in arrays if not array.endswith('[]')]
    return ' '.join(arrays[len(arrays) // 2:])


def fused_collectives(computation, called):
    """Yields (kind, shapes, rest) of the collectives in a fusion. called: the name of its
    computation, which tells a reduce-scatter."""
    for _, shapes, kind, rest in computation:
        if kind in COLLECTIVES:
            if 'all-reduce-scatter' in called:
                kind = 'reduce-scatter'
            yield kind, shapes, rest


def collective_table(computations, mesh, n_steps=1):
    """Returns what a device sends per step, [{kind, axis, n, dtype, count, bytes, exposed, hosts}],
    one row for each kind, axes and dtype.

    Collectives are counted as rings. n: the devices of a group. exposed: how many of the bytes are.
    hosts: whether a group spans several. n_steps: how many steps the program makes."""
    table = {}
    for kind, shapes, rest, times, exposed in collectives_in(computations):
        # The axes of the mesh along which the devices of a group differ.
        group = replica_group(rest, mesh.devices.size)
        n = len(group)
        places = np.unravel_index(group, mesh.devices.shape)
        axes = [name for name, place in zip(mesh.axis_names, places) if len(set(place)) > 1]
        axis = '+'.join(axes) or '-'
        times /= n_steps

        # The whole array. A reduce-scatter's result is a part of it, but not that of the all-reduce
        # which a TPU's fusion wraps.
        size = bytes_of(shapes)
        if kind == 'reduce-scatter' and 'dimensions=' in rest:
            size *= n
        sent = times * size * share_sent(kind, n)

        # Add it to its row.
        dtypes = '+'.join(sorted(set(re.findall(r'(\w+)\[', shapes))))
        hosts = {device.process_index for device in mesh.devices.ravel()[group]}
        new_row = {
            'kind': kind, 'axis': axis, 'n': n, 'dtype': dtypes, 'count': 0, 'bytes': 0,
            'exposed': 0, 'hosts': len(hosts) > 1}
        row = table.setdefault((kind, axis, dtypes), new_row)
        row['count'] += times * len(re.findall(r'\w+\[', shapes))
        row['bytes'] += sent
        row['exposed'] += sent if exposed else 0.0
    return sorted(table.values(), key=lambda row: -row['bytes'])


def share_sent(kind, n):
    """Returns the share of an array that each of n devices sends, in a ring."""
    if kind == 'all-reduce':
        return 2 * (n - 1) / n  # a reduce-scatter and an all-gather
    if kind == 'collective-permute':
        return 1
    return (n - 1) / n


def count_kernels(computations):
    """Returns how many operations that read or write something a step executes, each of which an
    accelerator starts as a kernel of its own."""
    total = 0
    for name, i, times in executed(computations):
        operation = computations[name][i][2]
        if operation not in WITHOUT_TRAFFIC and not operation.endswith('-done'):
            total += times
    return total


def memory_traffic(computations):
    """Returns the bytes that the operations of a step read and write, each operand and result once,
    as if there were no cache."""
    total = 0
    sizes = {}  # {computation: {name of an instruction: bytes of its result}}
    for name, i, times in executed(computations):
        if name not in sizes:
            sizes[name] = {result: bytes_of(shapes) for result, shapes, _, _ in computations[name]}
        result, _, operation, rest = computations[name][i]
        if operation in WITHOUT_TRAFFIC or operation.endswith('-done'):
            continue
        n_bytes = sizes[name][result]
        for operand in operands_of(rest):
            n_bytes += sizes[name].get(operand, 0)
        if operation == 'fusion':
            n_bytes -= bytes_left_alone(computations[re.search(r'calls=%?([\w.\-]+)', rest)[1]])
        total += times * n_bytes
    return total


def operands_of(rest):
    """Returns the names of the operands of an operation. rest: the rest of its line."""
    return re.findall(r'%([\w.\-]+)', rest.split(')')[0])


def bytes_left_alone(fusion):
    """Returns the bytes of the arguments and results of a fusion that it does not touch: of an
    array of which it only reads slices, all but these; of one that it updates in place, all but the
    update, in the argument and in the result. In a loop these are the other iterations' parts.

    fusion: the instructions of its computation."""
    sizes = {}
    arguments = {}  # {name of an argument, or of a bitcast of it: name of the argument}
    touched = {}  # {argument: bytes}; infinite if an operation needs it whole
    updated = 0
    for name, shapes, operation, rest in fusion:
        sizes[name] = bytes_of(shapes)
        operands = operands_of(rest)
        if operation == 'parameter':
            arguments[name] = name
            touched[name] = 0
            continue
        if operation == 'bitcast' and operands[0] in arguments:
            arguments[name] = arguments[operands[0]]
            continue
        for position, operand in enumerate(operands):
            if operand not in arguments:
                continue
            argument = arguments[operand]
            if operation == 'dynamic-slice' and position == 0:
                touched[argument] += sizes[name]
            elif operation == 'dynamic-update-slice' and position == 0:
                updated += sizes[argument] - sizes.get(operands[1], 0)
            else:
                touched[argument] = math.inf
    return updated + sum(max(0, sizes[name] - n_bytes) for name, n_bytes in touched.items())
