"""The manifest of a run: data, tokenizer, source files, versions, and the choices made for the
devices.

Every checkpoint keeps the manifest in its metadata. A resume compares the checkpoint's manifest
with its own (find_changes for the data, find_changed for the rest). If a run has several
processes, they compare their manifests before they train, in the form that flatten returns. The
manifest holds no host name and no user name. Its only paths are the keys of `sources`, which are
relative to the program's folder.

| key | |
|---|---|
| `format` | 1 |
| `data` | a list of the data sets: `name`, `fraction`, `files`, see `describe_file` |
| `earlier_data` | [{'until': iteration, 'data': earlier `data`}], for each resume that changed it |
| `earlier` | [{'until': iteration, **find_changed(...)}], for each resume that changed something |
| `tokenizer` | digest of the data's tokenizer |
| `start` | 'scratch', 'pretrained', or 'lora' of a pretrained model |
| `sources` | {path: digest} of this program's source files |
| `commit` | of the git checkout, with `+` if files have been changed; None outside of a checkout |
| `versions` | the versions of Python and of the libraries that compute |
| `settings` | the settings of jax that change computed numbers; `XLA_FLAGS` without paths |
| `devices` | {'kind', 'cpu', 'number', 'processes'}, see below |
| `flags` | the flags of the run, except NOT_IN_MANIFEST (paths, names and others) |
| `dtype`, `attention`, `experts` | as chosen for the present devices |

An entry of `earlier` also has 'losses', what find_other_losses returns, unless that is empty. The
entry `devices` has 'kind', the kind of the devices; 'cpu', the features by which kernels for a
CPU are chosen (find_cpu); 'number', the number of devices; 'processes', the number of
processes."""
import contextlib
import functools
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import zlib
from pathlib import Path

import jax
import numpy as np

from jax_devices.processes import check_agreement, in_all_processes
from jax_flags import UserError, digest, is_on_command_line
from jax_run.data import check_not_cut, read_soon

FORMAT = 1

# A file of up to N_BLOCKS * BLOCK bytes (8 MB) is read as a whole. Of a larger file, blocks that are
# spread evenly are read, as many bytes: a network disk reads them within a second.
N_BLOCKS = 128
BLOCK = 2**16  # bytes

# Settings of jax from the environment that change numbers.
SETTINGS = (
    'jax_default_prng_impl', 'jax_default_matmul_precision', 'jax_threefry_partitionable',
    'jax_enable_x64')

# Flags that name places or people, or do not change numbers.
NOT_IN_MANIFEST = {
    'out_dir', 'dataset', 'init_from', 'base', 'coordinator_address', 'num_processes', 'process_id',
    'wandb_log', 'wandb_project', 'wandb_run_name', 'sample_prompt', 'overwrite', 'profile',
    'device', 'verify'}

# flags that say when a run is evaluated, logged, saved or ended: the iterations are the same
WITHOUT_EFFECT = NOT_IN_MANIFEST | {
    'eval_interval', 'eval_iters', 'log_interval', 'save_interval', 'keep', 'max_iters', 'minutes',
    'always_save_checkpoint', 'checkpoint', 'eval_only'}

# Flags without which a validation loss means something else, beside the number of its sequences
OF_LOSSES = ('block_size', 'beta', 'length_normalized')

# Features of a CPU that decide which instructions XLA and our kernels use.
CPU_FEATURES = ('avx2', 'avx512f', 'avx512_vnni', 'avx512_bf16', 'amx_bf16', 'amx_int8', 'asimd',
                'sve')

LIBRARIES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy')


def open_manifest(run, data, config):
    """Makes the manifest of a run, checks it, and returns it. run: a Run. data: what open_data
    returns. config: the GPTConfig of the run's Program.

    Raises UserError if the processes have different code, versions or data.

    In a resume, compares the data with the data of the checkpoint. If they differ, raises
    UserError. There is one exception: a command line with both --init_from=resume and --dataset
    shows that the user wants other data. The run then goes on, but ignores the checkpoint's best
    validation loss."""
    manifest = make_manifest(run, data, config)
    check_agreement('code, versions or data', flatten(manifest))
    if run.resumed:
        with in_all_processes():
            manifest['earlier_data'] = continue_data(run, manifest['data'])
        known = run.resumed.get('manifest') or {}
        manifest['start'] = known.get('start')
        manifest['earlier'] = known.get('earlier', [])
        changed = find_changed(known, manifest)
        losses = find_other_losses(known, manifest)
        if losses:
            changed['losses'] = losses
        if changed:
            manifest['earlier'] = [*manifest['earlier'], {'until': run.iter_num, **changed}]
        say_what_differs(changed)
        for name, (before, now) in losses.items():
            print(f'{name}: {now} from iteration {run.iter_num} on, {before} before: the best '
                  'validation loss begins anew')
    return manifest


def find_other_losses(known, now):
    """Returns {name: [value in known, value in now]} of what keeps the validation losses of two
    manifests from being compared: the number and the length of the sequences of an evaluation, and
    the flags of the loss of preference pairs."""
    values = []
    for manifest in known, now:
        flags = manifest.get('flags', {})
        of_losses = {name: flags[name] for name in OF_LOSSES if name in flags}
        if {'eval_iters', 'batch_size'} <= flags.keys():
            of_losses['sequences of an evaluation'] = flags['eval_iters'] * flags['batch_size']
        values.append(of_losses)
    before, after = values
    return {name: [value, after[name]] for name, value in before.items()
            if after.get(name, value) != value}


def make_manifest(run, data, config):
    """Returns the manifest of a run that begins now (see the head of this file). run, data, config:
    see open_manifest."""
    start = 'pretrained' if run.model.source else 'scratch'
    tokenizer = {name: value for name, value in run.meta['tokenizer'].items() if name != 'path'}
    return {
        'format': FORMAT,
        'data': describe_data(data.sets),
        'earlier_data': [],
        'earlier': [],
        'tokenizer': digest(tokenizer)[:16],
        'start': 'lora' if run.model.lora else start,
        'sources': dict(digest_sources()),
        'commit': find_commit(),
        'versions': find_versions(),
        'settings': find_settings(),
        'devices': {
            'kind': run.devices[0].device_kind, 'cpu': find_cpu(run.devices[0]),
            'number': len(run.devices), 'processes': jax.process_count()},
        'flags': flags_of(run),
        'dtype': run.dtype,
        'attention': config.attention,
        'experts': config.experts if config.moe else None}


def flags_of(run):
    """Returns {name: value}, the flags of a Run without those in NOT_IN_MANIFEST."""
    return {name: value for name, value in run.flags.items() if name not in NOT_IN_MANIFEST}


def flatten(manifest):
    """Returns {description: value} of what all processes must have in common (data, source files,
    versions and so on), so that a message can name what differs. A data file is described as in
    '1,024 bytes, 0a1b2c3d, sha256 4e5f6a7b', see describe_file. Leaves out the names of the data
    sets, because a process may have the same data in a folder of another name."""
    values = {}
    for i, one in enumerate(manifest['data']):
        number = f' of data set {i}' if len(manifest['data']) > 1 else ''
        values[f'the fraction{number}'] = one['fraction']
        for name, file in one['files'].items():
            known = f", sha256 {file['sha256'][:8]}" if 'sha256' in file else ''
            values[f'{name}{number}'] = f"{file['bytes']:,} bytes, {file['samples']}{known}"
    values['the tokenizer'] = manifest['tokenizer']
    values.update(manifest['sources'])
    for name, version in manifest['versions'].items():
        values[f'the version of {name}'] = version
    values.update(manifest['settings'])
    for name in ('dtype', 'attention', 'experts'):
        values[name] = manifest[name]
    return values


def find_machine(manifest):
    """Returns a text on the machine of a manifest: the number and kind of its devices, and the
    features of the CPU. Runs have the same bits only on the same machine: sums over other devices
    have another order."""
    devices = manifest['devices']
    kind = f"{devices['number']} x {devices['kind']}"
    return ' '.join(filter(None, [kind, devices.get('cpu', '')]))


def find_cpu(device):
    """Returns the architecture and the CPU_FEATURES of a CPU, such as 'x86_64 avx2 avx512f', or ''
    for another device. Features that XLA_FLAGS forbids are listed, too: the manifest records
    XLA_FLAGS separately (see find_settings)."""
    if device.platform != 'cpu':
        return ''
    features = []
    with contextlib.suppress(OSError):  # only Linux has this file
        words = set(Path('/proc/cpuinfo').read_text().partition('\n\n')[0].split())
        features = [name for name in CPU_FEATURES if name in words]
    return ' '.join([platform.machine(), *features])


def find_commit():
    """Returns the commit of the checkout that this file is in, followed by '+' if files of the
    checkout have been changed. Returns None outside a checkout."""
    root = Path(__file__).parents[1]

    def git(*words):
        done = subprocess.run(['git', '-C', root, *words], capture_output=True, text=True,
                              timeout=20, check=True)
        return done.stdout.strip()

    try:
        git('ls-files', '--error-unmatch', 'train_jax.py')  # not of a project around it
        return git('rev-parse', 'HEAD') + '+' * bool(git('status', '--porcelain', '-uno'))
    except (OSError, subprocess.SubprocessError):
        return None


def find_settings():
    """Returns the settings of JAX and XLA that can change a result's numbers, {name: value}. The
    values are strings, and paths are left out of XLA_FLAGS."""
    settings = {name: str(getattr(jax.config, name)) for name in SETTINGS}
    words = [word for word in os.environ.get('XLA_FLAGS', '').split() if '/' not in word]
    settings['XLA_FLAGS'] = ' '.join(words)
    return settings


def find_changed(known, now):
    """Compares a manifest `known` with a later manifest `now`. Returns what differs as {part:
    {name: [value in known, value in now]}}, such as {'versions': {'jax': ['0.9', '0.10']}}. A part
    without differences is missing.

    The parts 'flags', 'devices', 'versions', 'settings' and 'sources' are entries of the manifest,
    each a dict {name: value}. Names that are in only one of the two manifests are left out, and so
    are the flags in WITHOUT_EFFECT. The part 'chosen' is not an entry of the manifest. Its names
    are 'dtype', 'attention' and 'experts', which are entries with a single value each.

    Does not compare the data; find_changes does that."""
    changed = {}
    for part in ('flags', 'devices', 'versions', 'settings', 'sources'):
        before, after = known.get(part, {}), now[part]
        names = [name for name in before if name in after and before[name] != after[name]]
        if part == 'flags':
            names = [name for name in names if name not in WITHOUT_EFFECT]
        if names:
            changed[part] = {name: [before[name], after[name]] for name in names}
    chosen = [name for name in ('dtype', 'attention', 'experts') if name in known]
    others = {name: [known[name], now[name]] for name in chosen if known[name] != now[name]}
    return {**changed, 'chosen': others} if others else changed


def list_changes(changed, there):
    """Returns a list of lines such as 'version jax: 0.9 in the run, 0.10 here', one for each
    difference in `changed` except differences of devices. changed: what find_changed returns.
    there: what the lines call the place of the earlier manifest, for example 'the run'."""
    return [f'{shown}{name}: {before or "none"} in {there}, {after or "none"} here'
            for part, shown in (('sources', 'source '), ('versions', 'version '),
                                ('settings', 'setting '), ('flags', 'flag '), ('chosen', ''))
            for name, (before, after) in changed.get(part, {}).items()]


def say_what_differs(changed):
    """Prints a line on the flags that differ between a resumed run and the same run before the
    resume, and a line on its versions, settings and kind of device. With such a difference, the run
    may get other bits than a run in which nothing has changed. changed: what find_changed
    returns."""
    flags = [f'{name} {before!r} -> {now!r}' for name, (before, now)
             in changed.get('flags', {}).items() if name not in ('max_iters', 'lr_decay_iters')]
    if flags:
        print(f'other flags than so far: {", ".join(flags)}')
    changes = []
    for part in ('versions', 'settings', 'devices'):
        for name, (before, now) in changed.get(part, {}).items():
            if name not in ('number', 'processes'):
                changes.append(f'{name}: {before or "none"} before, {now or "none"} now')
    if changes:
        print(f'this resume differs from the run so far, so its bits may differ, too '
              f'({"; ".join(changes)})')


# -----------------------------------------------------------------------------
# data


def describe_data(sets):
    """Returns the entry `data` of a manifest (see the head of this file). sets: a list of
    DataSets."""
    described = []
    for one in sets:
        files = {}
        for name, array in one.files.items():
            files[name] = describe_file(array, one.digests.get(name))
        described.append({'name': one.name, 'fraction': one.fraction, 'files': files})
    return described


def describe_file(array, sha256=None):
    """Returns {'bytes', 'samples', 'sha256'}, the description of a data file that is open as
    `array`.

    samples: the CRC-32 of blocks of bytes that are spread evenly over the file. sha256: the digest
    of the whole file, from meta.json. If it is None, the key is left out."""
    check_not_cut(array)
    content = array.reshape(-1).view(np.uint8)
    crc = 0
    starts = spread_blocks(len(content))
    read_soon(array, starts, BLOCK)
    for start in starts:
        crc = zlib.crc32(content[start:start + BLOCK].tobytes(), crc)
    described = {'bytes': len(content), 'samples': f'{crc:08x}'}
    if sha256:
        described['sha256'] = sha256
    return described


def spread_blocks(n_bytes):
    """Returns the offsets in bytes at which the blocks of describe_file start. n_bytes: the size of
    the file. The first block is at the start of the file, the last block at the end of the file."""
    if n_bytes <= N_BLOCKS * BLOCK:
        return range(0, n_bytes, BLOCK)
    last = n_bytes - BLOCK
    return [i * last // (N_BLOCKS - 1) for i in range(N_BLOCKS)]


def find_changes(before, now):
    """Compares the entries `data` of two manifests, the earlier `before` and the present `now`.
    Returns the differences as a list of texts. The names of the data sets are not compared."""
    if len(before) != len(now):
        return [f'{len(before)} data sets before, {len(now)} now']
    changes = []
    for one, other in zip(before, now):
        where = f" of {other['name']}" if len(now) > 1 else ''
        if one['fraction'] != other['fraction']:
            changes.append(f"fraction{where}: {one['fraction']:g} before, {other['fraction']:g} now")
        for name in {**one['files'], **other['files']}:
            change = find_change(one['files'].get(name), other['files'].get(name))
            if change:
                changes.append(f'{name}{where}: {change}')
    return changes


def find_change(before, now):
    """Returns a text on how a file has changed, or '' if no change is known. before, now: the
    earlier and the present result of describe_file, or None where there is no file."""
    if not before or not now:
        return 'not there now' if before else 'not there before'
    if before['bytes'] != now['bytes']:
        return f"{before['bytes']:,} bytes before, {now['bytes']:,} now"
    for key in ('sha256', 'samples'):
        is_known = before.get(key) and now.get(key)
        if is_known and before[key] != now[key]:
            return 'other content'
    return ''


def continue_data(run, data):
    """Returns the list `earlier_data` for the manifest of a resumed run: the data sets that the run
    used before its present one, [{'until': last iteration, 'data': description}]. If the present
    data set differs from the one in the checkpoint's manifest, appends the latter to the list, and
    prints a line.

    data: the description of the present data set, from describe_data. Raises UserError if the
    data differ and the user did not ask for it (see open_manifest)."""
    known = run.resumed.get('manifest')
    if not known:
        print('an earlier version wrote the checkpoint, which does not name its data: they are taken '
              'to be the same')
        return []
    changes = find_changes(known['data'], data)
    if not changes:
        return known['earlier_data']

    # Other data. A config file and a restart loop name a data set too, without meaning a new one.
    flags = run.flags
    what = '; '.join(changes[:3])
    is_asked = run.given.get('init_from') == 'resume' and is_on_command_line('dataset')
    if not is_asked:
        raise UserError(
            f"dataset {flags['dataset']} is not the data of {flags['out_dir']} ({what}): to train "
            f"on with it, give --init_from=resume --dataset={flags['dataset']}, and the best "
            'validation loss begins anew')
    print(f'other data from iteration {run.iter_num} on ({what}): the best validation loss begins '
          'anew')
    return [*known['earlier_data'], {'until': run.iter_num, 'data': known['data']}]


def val_digest(manifest):
    """Returns a digest of the validation data. Losses of two runs can be compared if the runs'
    digests are equal. manifest: a run's manifest.

    The digest is made from each data set's share in the mixture. It is also made from two values of
    each validation file (see describe_file): the size, and `samples`, the CRC-32 of some blocks of
    the file's bytes. The SHA-256 of a file is left out, because only some data sets have it in
    their meta.json."""
    files = []
    for one in manifest['data']:
        of_val = {name: (file['bytes'], file['samples']) for name, file in one['files'].items()
                  if name.startswith('val')}
        files.append([one['fraction'], of_val])
    return digest(files)[:16]


# -----------------------------------------------------------------------------
# code

@functools.cache
def digest_sources():
    """Returns {path: digest} of this program's source files: train_jax.py, jax_*.py and jax_*/*.py.
    The line ends of a checkout do not matter."""
    root = Path(__file__).parents[1]
    paths = [*root.glob('train_jax.py'), *root.glob('jax_*.py'), *root.glob('jax_*/*.py')]
    sources = {}
    for path in sorted(paths):
        content = path.read_bytes().replace(b'\r\n', b'\n')
        sources[path.relative_to(root).as_posix()] = hashlib.sha256(content).hexdigest()[:16]
    return sources


def find_versions():
    """Returns {name: version} of Python and of the libraries that compute the numbers of a run."""
    versions = {'python': platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # it was not installed by a package manager
            versions[name] = 'unknown'
    return versions
