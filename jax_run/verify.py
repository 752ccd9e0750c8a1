"""Implements --verify: trains again from one kept checkpoint of a run to the next, and compares the
result with what the run has kept. Compares every bit of the weights and of the optimizer's state,
and each loss in metrics.jsonl."""
import dataclasses
import hashlib
import math
import statistics
from typing import NamedTuple

import jax
import numpy as np

from jax_flags import UserError
from jax_run.checkpoints import (
    ITEMS, checkpoint_steps, comparable_since, open_checkpoint, opt_state_item, run_folder)
from jax_run.load import OnHost
from jax_run.log import flat_losses, read_metrics
from jax_run.manifest import (
    WITHOUT_EFFECT, describe_file, find_change, find_changed, find_machine, list_changes,
    make_manifest)
from jax_run.minutes import first_batch
from jax_run.restore import restore_run
from jax_run.start import schedule_end, start_state, with_schedule

# The largest difference of losses that is accepted on another machine (see find_machine). It is some
# ten times what was measured over 200 iterations, because it grows with them (docs/runs.md, Verify).
BOUND = 0.02


ENDS = ('lr_decay_iters', 'earlier_ends')  # the flags that schedule_end reads


class Interval(NamedTuple):
    """The iterations from one kept checkpoint to the next. A `first` of 0 is the start of the
    run."""
    first: int
    last: int

    def __str__(self):
        return f'iterations {self.first} to {self.last}'


class Found(NamedTuple):
    """The differences between a run and a repeated training of one Interval of this run."""
    weights: str  # the first array that differs, and by how much; '' if all bits are the same
    logged: list  # a Logged for each value that differs from metrics.jsonl
    n_compared: int  # the number of losses that metrics.jsonl has, too

    @property
    def largest(self):
        """The largest difference between a loss of the repeated training and the same loss in
        metrics.jsonl, as an absolute value. It is 0 if no loss differs, and infinity if a loss of
        the repeated training is not finite."""
        gaps = [abs(one.value - one.kept) for one in self.logged if 'loss' in one.name]
        return max((gap if math.isfinite(gap) else math.inf for gap in gaps), default=0.0)

    @property
    def is_within_bound(self):
        """Whether losses were compared, and differ by at most BOUND."""
        return self.n_compared > 0 and self.largest <= BOUND


class Logged(NamedTuple):
    """A difference in a metric: the value in the log, and the other value that the repeated
    training gave."""
    iter: int
    name: str
    value: float  # of the repeated training
    kept: float  # of metrics.jsonl

    def __str__(self):
        return (f'{self.name} of iteration {self.iter} is {self.value:.9g}, and {self.kept:.9g} in '
                'metrics.jsonl')


def verify_run(run, data, program, make_batch, evaluate):
    """Trains the last N intervals of a run again, for --verify=N, and compares the results with the
    kept checkpoints and with metrics.jsonl. An interval is the iterations from one kept checkpoint
    to the next. Prints which files, versions and flags differ from those of the run, and then a
    line for each interval. Writes nothing.

    run: the Run, opened with --init_from=resume. data, program: what open_data and open_program
    return. make_batch, evaluate: functions of train_jax.py.

    Returns the exit code: 1 if the data or an interval differ, else 0. On another machine, an
    interval counts as different only if a loss differs by more than BOUND. Raises UserError if
    the run cannot be verified."""
    if jax.process_count() > 1:
        raise UserError('--verify is for one process; JAX_NUM_CPU_DEVICES=2 gives it two devices '
                        'of the CPU')
    folder = run_folder(run.flags['out_dir'])
    intervals = find_intervals(run, folder)
    chosen = intervals[-run.flags['verify']:]
    records = list(read_metrics(folder.files))
    print(f'{len(intervals)} intervals between checkpoints can be verified; training the last '
          f'{len(chosen)} again, {describe_seconds(chosen, records)}')

    # what differs by name: data, source files, flags, versions, machine
    known = run.resumed.get('manifest') or {}
    now = make_manifest(run, data, program.config)
    differences = find_differences(known, now, data)
    for line in differences.lines:
        print(line)

    # train again
    has_failed = bool(differences.data)
    step = None
    for interval in chosen:
        state, _ = start_state(run_at(run, folder, interval.first), program)
        if step is None:
            step = program.step.lower(state, first_batch(make_batch, interval.first)).compile()
        state, differing, n_compared = train_again(
            run, program.layout, interval, state, step, make_batch, evaluate, records)
        kept, _ = start_state(run_at(run, folder, interval.last), program)
        found = Found(compare_states(state, kept), differing, n_compared)
        is_near = differences.machine and found.is_within_bound
        print(describe(interval, found, is_near))
        has_failed |= bool(found.weights or found.logged) and not is_near
    return 1 if has_failed else 0


# -----------------------------------------------------------------------------
# what can be verified


def find_intervals(run, folder):
    """Returns the Intervals of a run that can be trained again, in their order. Leaves out
    intervals that were trained with other flags or other data than the run has now. folder: the
    DiskRun or BucketRun. Raises UserError if no interval is left."""
    manifest = run.resumed.get('manifest') or {}
    since = comparable_since(manifest)
    others = set()
    for change in manifest.get('earlier', ()):
        names = [*change.get('flags', ()), *change.get('devices', ()), *change.get('chosen', ()),
                 *change.get('losses', ())]
        if names:
            since = max(since, change['until'])
            others.update(names)
    steps = sorted(checkpoint_steps(run.flags['out_dir']))
    starts = [0, *steps] if can_start(run) else steps
    intervals = []
    for first, last in zip(starts, starts[1:]):
        flags = open_checkpoint(folder, last)['flags']
        flags = {'earlier_ends': '', **flags}  # not there in an earlier version
        changed = [name for name, value in flags.items()
                   if name in run.flags and value != run.flags[name]
                   and name not in {*WITHOUT_EFFECT, *ENDS}]
        if any(schedule_end(flags, i) != schedule_end(run.flags, i) for i in range(first, last)):
            changed += ENDS
        others.update(changed)
        if first >= since and not changed:
            intervals.append(Interval(first, last))
    if not intervals:
        why = f'; earlier iterations had another {", ".join(sorted(others))}' if others else ''
        raise UserError(f"{run.flags['out_dir']} has no two checkpoints between which it could be "
                        f'trained again{why}: save more of them with --save_interval and --keep')
    return intervals


def can_start(run):
    """Returns whether the first state of a run can be made again, from the seed or from the base
    model of LoRA. Returns False for a run from a pretrained model without LoRA, because a resumed
    Run does not know which model that was."""
    start = (run.resumed.get('manifest') or {}).get('start')
    return start == 'scratch' or bool(run.model.lora)


def run_at(run, folder, step):
    """Returns a copy of the Run `run` that starts at checkpoint `step`, or from the seed if step is
    0. folder: the DiskRun or BucketRun with the checkpoints."""
    if not step:
        model = dataclasses.replace(run.model, source=None)
        return dataclasses.replace(run, resumed=None, model=model)
    meta = open_checkpoint(folder, step, ITEMS)
    return dataclasses.replace(run, resumed={**meta, 'iter_num': step})


def describe_seconds(intervals, records):
    """Returns a text that tells the user how long --verify may take, such as '20 iterations, which
    took about 5 s by its log'. intervals: the Intervals to train again. records: the records of
    metrics.jsonl.

    The first number of the text is the number of iterations in all `intervals`. The seconds are
    this number times the median time of an iteration in `records`. If no record has a time, the
    text has only the number of iterations."""
    times = [record['time_ms'] for record in records if record.get('time_ms')]
    n = sum(last - first for first, last in intervals)
    if not times:
        return f'{n:,} iterations'
    seconds = n * statistics.median(times) / 1000
    return f'{n:,} iterations, which took about {seconds:,.0f} s by its log'


# -----------------------------------------------------------------------------
# what differs by name


class Differences(NamedTuple):
    """What differs between two manifests."""
    data: list  # texts on the data
    lines: list  # texts on everything, with those on the data
    machine: str  # '' if it is the same, see find_machine


def find_differences(known, now, data):
    """Compares `known`, the manifest of a checkpoint, with `now`, the manifest of this process.
    Also compares the data files with `known`. Returns the Differences.

    data: what open_data returns. Reads each data file as a whole to compute its SHA-256, because
    the SHA-256 in `now` is only copied from meta.json."""
    of_data = []
    for one, before in zip(data.sets, known.get('data', ())):
        for name, array in one.files.items():
            change = compare_file(before['files'].get(name), array)
            if change:
                of_data.append(f'data {name}: {change}')
    lines = [*of_data, *list_changes(find_changed(known, now), 'the run')]
    for change in known.get('earlier', ()):
        for part, shown in (('sources', 'source'), ('versions', 'version'), ('settings', 'setting')):
            for name, (before, after) in change.get(part, {}).items():
                lines.append(f'{shown} {name}: {before or "none"} until iteration '
                             f'{change["until"]}, then {after or "none"}')
    machine = ''
    if known and find_machine(known) != find_machine(now):
        machine = f'{find_machine(known)} in the run, {find_machine(now)} here'
        lines.append(f'machine: {machine}')
    if not known:
        lines.append('the run is of an earlier version: its manifest does not say what it is made of')
    return Differences(of_data, lines, machine)


def compare_file(before, array):
    """Returns a text on how `array`, an open file of data, differs from `before`, the file's entry
    in a manifest. Returns '' if there is no difference."""
    content = array.reshape(-1).view(np.uint8)
    digest = hashlib.sha256()
    for start in range(0, len(content), 2**24):
        digest.update(content[start:start + 2**24])
    described = {'bytes': len(content), 'sha256': digest.hexdigest()}
    if before and 'sha256' not in before:  # made by hand, or by an earlier version: compare blocks
        described = describe_file(array)
    return find_change(before, described)


# -----------------------------------------------------------------------------
# training again


def train_again(run, layout, interval, state, step, make_batch, evaluate, records):
    """Trains an interval again. Returns (the TrainState at the end; a list of a Logged for each
    value that differs from the log; the number of losses that the log has, too).

    state: the TrainState of the interval's first checkpoint. step: the compiled step.
    make_batch(iteration), evaluate(state): functions of train_jax.py. records: the records of
    metrics.jsonl."""
    logged = {}
    for record in records:
        kind = 'evaluation' if 'val_loss' in record else 'iteration'
        logged[kind, record['iter']] = record
    differing = []
    n_compared = 0

    def compare(record, values):
        nonlocal n_compared
        for name, value in values.items():
            kept = record.get(name)
            n_compared += kept is not None and 'loss' in name
            if kept is not None and kept != value:
                differing.append(Logged(record['iter'], name, value, kept))

    for i in range(interval.first, interval.last + 1):
        record = logged.get(('evaluation', i))
        if record and (i > interval.first or not i):
            compare(record, flat_losses(evaluate(state) or {}))
        if i == interval.last:
            break
        state = with_schedule(state, run, i, layout)
        batch = make_batch(i)
        if batch is None:
            continue
        state, metrics = step(state, batch)
        if ('iteration', i) in logged:
            compare(logged['iteration', i], {name: float(value) for name, value in metrics.items()})
    return state, differing, n_compared


def compare_states(state, kept):
    """Compares two TrainStates bit for bit. Returns a text with the number of arrays that differ,
    the first of them, and its largest difference. Returns '' if all bits are the same."""
    ours, theirs = (
        jax.tree_util.tree_leaves_with_path({**s.weight_sets(), **opt_state_item(s)})
        for s in (state, kept))
    differing = []
    for (path, a), (_, b) in zip(ours, theirs, strict=True):
        a, b = np.atleast_1d(np.asarray(a)), np.atleast_1d(np.asarray(b))
        if a.tobytes() != b.tobytes():
            gap = np.abs(a.astype(np.float64) - b.astype(np.float64)).max()
            differing.append(f'{jax.tree_util.keystr(path)} by up to {gap:.3g}')
    if not differing:
        return ''
    return f'{len(differing)} of {len(ours)} arrays differ, first {differing[0]}'


def digest_weights(out_dir):
    """Returns a digest of the weights in the latest checkpoint of a run. With LoRA, the digest
    covers only the LoRA matrices a and b, not the base model. The digest is the same for every
    layout of the devices."""
    _, params, _, _ = restore_run(out_dir, 'latest', OnHost, '')
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        digest.update(jax.tree_util.keystr(path).encode())
        digest.update(np.ascontiguousarray(leaf))
    return digest.hexdigest()[:16]


def describe(interval, found, is_near):
    """Returns the line to print on an Interval. found: the Found of this interval. is_near: True if
    the machine is another one and the losses differ by at most BOUND. Differences are then
    accepted."""
    if not found.weights and not found.logged:
        return f'{interval}: the same bits'
    if is_near:
        return (f'{interval}: another machine, losses within {found.largest:.2g} (at most '
                f'{BOUND:g} is expected)')
    parts = [found.weights or 'the same weights, bit for bit']
    if found.logged:
        parts.append(f'{len(found.logged)} values of the log differ, first: {found.logged[0]}')
    return f'{interval}: {"; ".join(parts)}'
