"""The flags of the scripts, how a script ends, and tools for all modules: UserError, JSON and text
files.

This file imports no jax, so that --help and a wrong flag are answered at once: importing jax takes
a second."""
import ast
import atexit
import contextlib
import dataclasses
import difflib
import errno
import functools
import hashlib
import importlib.util
import inspect
import json
import math
import os
import platform
import re
import runpy
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from traceback import extract_tb
from typing import NamedTuple, TypeVar

# checked before any syntax that an older Python cannot read
IS_OLD = sys.version_info < (3, 11)
ENVIRONMENT = ('activate the environment of this project, or make one, as with: python3.'
               f'{12 if IS_OLD else sys.version_info.minor} -m venv .venv && . .venv/bin/activate && '
               'pip install -r requirements_jax.txt')
if IS_OLD:
    print(f'error: {sys.executable} is Python {platform.python_version()}, and JAX takes 3.11 or '
          f'newer: {ENVIRONMENT}', file=sys.stderr)
    sys.exit(2)  # the code of a mistake, after which no loop starts the command again

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

ROOT = Path(__file__).resolve().parent
INSTALLED = ROOT / 'nanogpt_jax'  # config/ and data/ of an installation, see pyproject.toml

# The compute dtypes.
DTYPES = ('float32', 'bfloat16', 'float16')

Function = TypeVar('Function', bound=Callable)


class UserError(ValueError):
    """A mistake that the user can correct. The scripts print it as one line, and exit with 2."""

    def _render_traceback_(self):
        """Returns the lines that a notebook shows in place of a traceback."""
        return [one_line(self)]


class TryAgain(UserError):
    """An error whose cause may soon be over, such as a network that is down. The scripts exit with
    75, because a script that is started again later may succeed."""


def refuse(refusals):
    """Raises UserError if a condition is true, with the message of the first such condition.
    refusals: pairs (condition, message)."""
    for is_wrong, message in refusals:
        if is_wrong:
            raise UserError(message)


def one_line(error):
    """Returns the text of an error for the user, on one line."""
    return f'error: {" ".join(str(error).split())}'


def check_choice(name, value, choices):
    """Raises UserError unless the value of the flag or option `name` is one of the choices. The
    choice '' means off; the error's message does not list ''."""
    if value not in choices:
        named = [choice for choice in choices if choice]
        raise UserError(f'{name} must be one of {", ".join(named)}, not {value!r}')

# -----------------------------------------------------------------------------
# files


def read_text(path, *, newline=None):
    """Returns the text of a UTF-8 file without its byte-order mark. newline: see open(). Raises
    UserError if the file cannot be read."""
    try:
        with open(path, encoding='utf-8-sig', newline=newline) as file:
            return file.read()
    except OSError as error:
        raise UserError(f'cannot read {path}: {error.strerror}') from None
    except UnicodeDecodeError as error:
        raise UserError(f'cannot read {path}: it is not UTF-8 ({error})') from None


def printable(name):
    """Returns a name from an untrusted file in a form that fits on one line of a message: escaped
    if it is not printable, and truncated after 200 characters."""
    shown = name if name.isprintable() else repr(name)
    if len(shown) > 200:
        return f'{shown[:200]}...'
    return shown


def whole_characters(text):
    """Returns the text with U+FFFD for each unpaired surrogate. An unpaired surrogate comes from
    "\\ud83d" in JSON, or from a byte that is not UTF-8."""
    return text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')


def find_shipped(kind, name):
    """Returns the path of a file or folder `name` of config/ or data/. Looks in the current folder
    first, then in this program's checkout, then in its installation. If `name` is in none of these
    three places, returns its path in the checkout or, without a checkout, in the current folder.

    kind: 'config' or 'data'."""
    for place in (Path(kind), ROOT / kind, INSTALLED / kind):
        if (place / name).exists():
            return place / name
    # found nowhere: the path in the checkout, or without one beside the caller
    return (ROOT if (ROOT / kind).is_dir() else Path()) / kind / name


def write_text(path, text):
    """Writes a text file atomically: at every moment, the file at `path` is either the earlier one
    (if any) or the complete new one. Makes the folder of the file. Writes directly to a pipe or a
    device."""
    path = Path(os.path.realpath(path))  # a link stays a link

    # A pipe or /dev/null is written directly. A folder raises OSError.
    if path.exists() and not path.is_file():
        path.write_text(text, encoding='utf-8')
        return

    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path) as unfinished:
        Path(unfinished).write_text(text, encoding='utf-8')


@contextlib.contextmanager
def new_file(path):
    """Yields the path of a temporary file to write. At the end of the with block, renames the
    temporary file to `path`; if the block fails, deletes the temporary file. So a file at `path` is
    always complete."""
    unfinished = f'{path}.tmp-{os.getpid()}'
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        Path(unfinished).unlink(missing_ok=True)


def free_name(path):
    """Returns the first of <path>.damaged, <path>.damaged1, ... that does not exist."""
    names = [f'{path}.damaged', *[f'{path}.damaged{n}' for n in range(1, 100)]]
    return next(Path(name) for name in names if not os.path.exists(name))


def note(line):
    """Prints a line on stdout. If the line cannot be printed, does nothing."""
    with contextlib.suppress(OSError, ValueError):
        print(line, flush=True)


def warn(line):
    """Prints a line on stderr. If the line cannot be printed, does nothing, because a message must
    not end a run."""
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


def lock_file(file, *, wait=False):
    """Locks an open file for this process until the file is closed or the process ends. Returns
    whether this process has the lock.

    If another process has the lock, wait=True waits until the lock is free, and wait=False returns
    False. Where there are no locks (Windows, some file systems), nothing is locked, and the result
    is True."""
    try:
        if fcntl:
            # not lockf: its lock is lost when this process reads the file and closes it
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        pass  # a file system without locks
    return True


JSON_LINES = ('.jsonl', '.jsonlines', '.ndjson')  # the endings of files of JSON lines


def parse_json(text, name, remedy=''):
    """Returns the value of a JSON text. Raises UserError if the text is not JSON; the message
    begins with `name` and ends with `remedy`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f'{name} is not JSON ({error}){remedy}') from None


def read_json(path, *, optional=False):
    """Returns the object in a JSON file. optional: whether a missing file gives {}. Raises
    UserError if the file cannot be read or holds no object."""
    if optional and not os.path.exists(path):
        return {}
    remedy = '; copy or download it again'
    values = parse_json(read_text(path), path, remedy)
    if not isinstance(values, dict):
        raise UserError(f'{path} is not a JSON object{remedy}')
    return values


def write_json(path, values):
    """Writes a JSON file, atomically."""
    write_text(path, json.dumps(values, indent=2) + '\n')


def digest(value):
    """Returns the SHA-256, in hex, of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def shows_fields(kind: type) -> Callable[[Function], Function]:
    """Returns a decorator that makes help() and editors show the fields of the dataclass `kind` in
    place of **changes."""
    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        shown = {name: parameter for name, parameter in signature.parameters.items()
                 if parameter.kind is not parameter.VAR_KEYWORD}
        for field in dataclasses.fields(kind):
            shown.setdefault(field.name, inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default,
                annotation=field.type))
        function.__signature__ = signature.replace(parameters=list(shown.values()))
        return function

    return decorate


def ceil_div(a, b):
    """Returns the quotient a / b of two integers, rounded up."""
    return -(-a // b)

# -----------------------------------------------------------------------------
# flags

def config_block(script):
    """Returns {flag: comment} of a script's flags. The flags are the assignments between the
    script's first two rulers (lines of dashes).

    Raises UserError for a flag without a trailing comment, because --help prints the comments."""
    source = Path(script).read_text(encoding='utf-8')
    block = re.split(r'^# -{20,}\n', source, maxsplit=2, flags=re.M)[1]
    comments = {}
    for name, rest in re.findall(r'^(\w+) *=(.*)$', block, flags=re.M):
        _, mark, comment = rest.rpartition('# ')
        if not mark:
            raise UserError(f'{Path(script).name}: the flag {name} has no comment; write {name} = '
                            '... # what it does')
        comments[name] = comment
    return comments


TEXTS = ('start', 'system', 'stop', 'sample_prompt')  # flags that take any text


def read_flags(script, namespace, argv=None, *, ignored=(), others='[config/file.py ...]'):
    """Reads the flags of a script. Returns two dicts {name: value}: all flags of the script, and
    the flags that the user gave.

    Config files (Python files of assignments) and --name=value are applied in the order given.
    --help prints the flags and exits. The flags that a config file assigns at its top level count
    as given by the user, even if the value is the default. A config file can run another file, by
    `from config.base import *` (config/base.py) or exec(open('base.py').read()). A flag that only
    this other file assigns counts as given if its value changes. For example, if batch_size is 12
    before the config file runs, and base.py assigns 12 again, batch_size does not count as given.

    script: the path of the script. namespace: the script's globals(), which hold the defaults.
    argv: the arguments, by default those of the command line. ignored: names that are accepted
    without effect. others: the script's other arguments, for --help. Raises UserError for an
    unknown name, a value of another type (an int is accepted as a float), an int that is too large,
    and an argument that is neither --name=value nor a config file."""
    argv = sys.argv[1:] if argv is None else argv
    comments = config_block(script)
    defaults = {name: namespace[name] for name in comments}
    if '--help' in argv or '-h' in argv:
        command = f'python {Path(script).name}'
        if INSTALLED.is_dir():
            command = Path(script).stem.replace('_', '-')
        print(f'usage: {command} {others} [--name=value ...]\n')
        for name, comment in comments.items():
            print(f'  --{name}={defaults[name]!r}  # {comment}')
        sys.exit(0)

    flags = dict(defaults)
    given = {}
    for arg in argv:
        if arg.startswith('--'):
            name, value = parse_flag(arg, defaults)
            values = {name: value}
        else:
            values = run_config_file(arg, flags)
        for name, value in values.items():
            if name not in defaults and name in ignored:
                continue
            if name not in defaults:
                raise UserError(f'unknown flag --{name}; {hint_for(name, flags, script)}')

            # a shell does not expand the ~ of --name=~/path
            if str(value).startswith('~/') and name not in TEXTS:
                value = os.path.expanduser(value)

            # the value must have the type of the default, and an int must fit in 32 bits
            default = defaults[name]
            if type(default) is float and type(value) is int:
                value = float(value)
            if type(value) is not type(default):
                raise UserError(f'--{name} takes a value of type {type(default).__name__}, as in '
                                f'--{name}={default!r}; got {value!r}')
            if type(value) is int and abs(value) >= 2**31 and name != 'seed':
                raise UserError(f'--{name} must be below 2**31')
            flags[name] = given[name] = value
    return flags, given


def parse_flag(arg, defaults):
    """Returns (name, value) of an argument --name=value. Raises UserError if `arg` has no '='.

    The value is a Python literal, or else a string. If the flag's default is a string, the value is
    the text as typed, so that --start=123 is a prompt."""
    name, equals, text = arg[2:].partition('=')
    if not equals and name in defaults:
        example = True if isinstance(defaults[name], bool) else defaults[name]
        raise UserError(f'flags are written --name=value, as --{name}={example}; got {arg}')
    if not equals:
        raise UserError(f'flags are written --name=value; got {arg}')
    if isinstance(defaults.get(name), str):
        return name, text
    try:
        return name, ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # as documented
        return name, text


def is_on_command_line(name):
    """Returns whether the command line itself gives the flag `name`. A flag that only a config file
    gives does not count."""
    return any(arg.startswith(f'--{name}=') for arg in sys.argv[1:])


def run_config_file(path, flags):
    """Runs a config file and returns the flags that it gives (see read_flags), {name: value}.

    flags: {name: value} of all flags so far, which the file may read. Raises UserError if the file
    is missing or raises an exception."""
    kind, _, name = path.replace(os.sep, '/').partition('/')
    shipped = find_shipped(kind, name) if kind == 'config' else Path(path)
    if not Path(path).is_file() and shipped.is_file():
        path = str(shipped)
    if not Path(path).is_file():
        raise UserError(f'there is no config file {path}{meant_by(path, flags)}; flags are written '
                        '--name=value')
    try:
        tree = ast.parse(Path(path).read_text(encoding='utf-8-sig'))  # Notepad's begins with a mark
        values = runpy.run_path(path, init_globals=flags)
    except Exception as error:
        raise UserError(f'config file {path}: {type(error).__name__}: {error}') from error

    # The file's own assignments.
    given = {}
    for name in assigned_names(tree):
        if name in values and not name.startswith('_'):
            given[name] = values[name]
    # What other files that it runs have assigned: changes of flags, and mistyped flags.
    for name, value in values.items():
        if name in flags:
            is_theirs = repr(value) != repr(flags[name])
        else:
            is_number_or_text = isinstance(value, int | float | str) and not name.startswith('_')
            is_theirs = is_number_or_text and nearest_names(name, flags)
        if is_theirs:
            given[name] = value
    return given


def meant_by(path, flags):
    """Returns a hint ' (did you mean ...?)' for an argument `path` that names no config file.
    Returns '' if nothing similar is known."""
    if os.path.isdir(os.path.join(path, 'ckpt')) and 'out_dir' in flags:
        return f' (did you mean --out_dir={path}?)'
    folders = [Path(path).parent]
    if os.sep not in path:
        folders = [Path('config'), Path()]
    known = [str(file) for folder in folders for file in folder.glob('*.py')]
    name = Path(path).stem
    same = [file for file in known if Path(file).stem == name]
    return f' (did you mean {same[0]}?)' if same else did_you_mean(path, known)


# {the name of a flag in other programs: ours}, because nearest_names only compares spellings
ALIASES = {
    'epochs': 'max_iters',
    'model': 'init_from',
    'n': 'num_samples',
    'lr': 'learning_rate',
    'wd': 'weight_decay',
    'bs': 'batch_size',
    'steps': 'max_iters',
    'max_steps': 'max_iters',
    'seq_len': 'block_size',
    'context_length': 'block_size',
    'depth': 'n_layer',
    'd_model': 'n_embd',
    'resume': 'init_from',
    'prompt': 'start',
    'max_tokens': 'max_new_tokens',
}


def nearest_names(name, known):
    """Returns the known names that the user may have meant by a mistyped `name`, the nearest first,
    at most three."""
    return difflib.get_close_matches(name, known, n=3, cutoff=0.6)


def did_you_mean(name, known):
    """Returns ' (did you mean NAME?)' with the nearest known name, or '' if none is near."""
    near = nearest_names(name, known)
    return f' (did you mean {near[0]}?)' if near else ''


def hint_for(name, flags, script):
    """Returns a hint for the user about the unknown flag `name`, such as 'did you mean --n_layer?'.
    flags: the known flags, by name. script: the path of the script."""
    if name == 'config':
        return f'a config file is given by its path alone: python {Path(script).name} config/FILE.py'
    near = nearest_names(name, flags)
    if ALIASES.get(name) in flags:
        near = [ALIASES[name]]
    if near:
        return f'did you mean --{" or --".join(near)}?'
    return (f'python {Path(script).name} --help lists all flags (other variables of a config file '
            'begin with _)')


def assigned_names(tree):
    """Yields the names that a module's syntax tree assigns outside of functions, classes and
    comprehensions."""
    scopes = (
        ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda,
        ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif not isinstance(node, scopes):
            yield from assigned_names(node)


AT_LEAST_1 = (
    'eval_interval', 'log_interval', 'eval_iters', 'gradient_accumulation_steps', 'batch_size',
    'block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'keep', 'num_samples', 'prompt_len',
    'repeats')
AT_LEAST_0 = (
    'max_iters', 'minutes', 'save_interval', 'verify', 'warmup_iters', 'lr_decay_iters',
    'learning_rate', 'min_lr', 'weight_decay', 'lora_rank', 'grad_clip', 'loss_chunk', 'n_inner', 'n_kv_head',
    'n_expert', 'expert_balance', 'window', 'max_new_tokens')
# {flag: (the lowest value, the first value that is too high)}
RANGES = {
    **dict.fromkeys(AT_LEAST_1, (1, math.inf)),
    **dict.fromkeys(AT_LEAST_0, (0, math.inf)),
    **dict.fromkeys(('beta1', 'beta2', 'ema', 'dropout'), (0, 1)),
    'seed': (0, 2**32),
    'serve': (0, 2**16),
}


def check_ranges(flags):
    """Raises UserError for a flag outside its range in RANGES."""
    for name, (low, high) in RANGES.items():
        if name in flags and not low <= flags[name] < high:
            allowed = f'at least {low}'
            if high < math.inf:
                allowed = f'in [{low}, {high})'
            raise UserError(f'{name} must be {allowed}, not {flags[name]}')


class Need(NamedTuple):
    """The condition under which a flag is read."""
    switch: str  # the name of another flag, or of a fact that the script adds to the flags
    remedy: str  # follows "nothing reads NAME=VALUE without"
    values: tuple = ()  # the values of the switch that meet the condition; () is all true values


EXPERTS = Need('n_expert', 'experts: add --n_expert=8')
LORA = Need('lora_rank', 'LoRA: add --lora_rank=8')
PAIRS = Need('is_pairs', 'a data set of pairs of answers')
CHAT = Need('is_chat', 'a chat: add --chat=True, --interactive=True or --serve=8000')
PROMPTS = Need('takes_prompts', 'prompts that are given: leave out --interactive and --serve')
SERVED = Need('serve', 'a server: add --serve=8000')
NO_SERVER = Need('is_alone', 'prompts of this command: leave out --serve')
# The steps of bench_jax.py that read a flag.
TRAINED = Need(
    'step', 'a training step: --mode=train, or --mode=compile', ('train', 'compile train'))
DECODED = Need(
    'step', 'decoding: --mode=decode, or --mode=compile --plan=decode',
    ('decode', 'compile decode'))
SHARDED = Need(
    'step', '--mode=train or --mode=compile', ('train', 'compile train', 'compile decode'))
COMPILED = Need('step', '--mode=compile', ('compile train', 'compile decode'))
DECODED_HERE = Need('step', '--mode=decode', ('decode',))
MEASURED = Need('step', '--mode=train or --mode=decode', ('train', 'decode'))

# {script: {flag: its condition}}. Flags of nanoGPT are not here, because it accepts any combination
# of them (wandb_project without wandb_log); nor are flags that need a switch with the default True
# (lr_schedule needs decay_lr).
NEEDS = {
    'train_jax': {
        'n_expert_used': EXPERTS,
        'expert_balance': EXPERTS,
        'lora_alpha': LORA,
        'quantize': LORA,
        'beta': PAIRS,
        'length_normalized': PAIRS},
    'sample_jax': {
        'each_line': Need('has_file', 'a file of prompts: add --start=FILE:prompts.txt'),
        'system': CHAT,
        'start': PROMPTS,
        'num_samples': PROMPTS,
        'output': PROMPTS,
        'batch_size': Need('has_batches', 'several answers at a time: leave out --interactive'),
        'chat': NO_SERVER,
        'stream': NO_SERVER,
        'interactive': NO_SERVER,
        'host': SERVED,
        'allow': SERVED},
    'eval_jax': {
        'logprobs': Need('tasks', 'tasks: add --tasks=items.jsonl')},
    'export_jax': {
        'shard_gb': Need('folder', '--folder: a GGUF file and an adapter are one file')},
    'bench_jax': {
        'n_expert_used': EXPERTS,
        'expert_balance': EXPERTS,
        'optimizer': TRAINED,
        'attention': TRAINED,
        'loss_chunk': TRAINED,
        'scan_layers': TRAINED,
        'remat': TRAINED,
        'fsdp': TRAINED,
        'zero': TRAINED,
        'context': TRAINED,
        'prompt_len': DECODED,
        'max_new_tokens': DECODED,
        'quantize': DECODED,
        'cache_dtype': DECODED,
        'temperature': DECODED_HERE,
        'top_k': Need('temperature', 'a temperature: add --temperature=0.8'),
        'n_draft': DECODED_HERE,
        'out_dir': DECODED_HERE,
        'dataset': DECODED_HERE,
        'tensor': SHARDED,
        'expert': SHARDED,
        'plan': COMPILED,
        'topology': COMPILED,
        'repeats': MEASURED},
}


def is_read(script, name, flags):
    """Returns whether the flag `name` of this script has an effect. A flag without a condition in
    NEEDS always has one. A flag with a condition has an effect only if the condition is met.

    A condition tests one other flag or fact. The condition's attribute `switch` is the name of that
    flag or fact. flags: {name: value} of all flags, and of the facts that the script knows so far.
    If the name is not in `flags`, the value is not known yet, and the result is True."""
    need = NEEDS[script].get(name)
    if need is None or need.switch not in flags:
        return True
    value = flags[need.switch]
    if need.values:
        return value in need.values
    return bool(value)


def check_needs(script, flags, given):
    """Raises UserError for a flag in `given` that nothing reads, because its condition in NEEDS is
    not met. Example: --lora_alpha=8 alone, because lora_alpha is read only if lora_rank is above 0.

    Such a flag is accepted in two cases: its value means off (0, '', False), or the user has also
    given the flag that its condition tests, with any value. An example of the second case is
    --lora_rank=0 --lora_alpha=8.

    flags: {name: value} of all flags, and of facts that the script knows. given: the flags that the
    user gave."""
    for name, need in NEEDS[script].items():
        # A flag that is off itself (0, '', False) asks for nothing.
        value = given.get(name)
        if not value or is_read(script, name, flags):
            continue
        # A user who turns a switch off (--lora_rank=0) may have a config file that sets other flags
        # of the switch.
        if need.switch not in given:
            raise UserError(f'nothing reads {name}={value} without {need.remedy}; or leave {name} '
                            'out')


def decays_learning_rate(flags):
    """Returns whether these training flags make the learning rate decay to min_lr."""
    return flags['decay_lr'] and flags['lr_schedule'] != 'constant'


def rising_learning_rate(flags):
    """Returns a warning if these training flags make the learning rate rise to min_lr (it should
    fall), else ''."""
    highest = flags['learning_rate']
    lowest = flags['min_lr']
    if lowest <= highest or not decays_learning_rate(flags):
        return ''
    return (f'min_lr={lowest:g} is above learning_rate={highest:g}, which would rise to it: '
            f'add --min_lr={highest / 10:g}, or --decay_lr=False')


def check_given(flags, given):
    """Raises UserError in two cases:
    - the user has given min_lr, and the learning rate would rise to it instead of fall;
    - the run starts from scratch, and the user has given a flag that nothing reads (check_needs).

    flags: the flags of the run. For a resumed run, they come from its checkpoint. given: the flags
    that the user gave."""
    # nanoGPT's default of min_lr may be above learning_rate, too: that is only a warning.
    if 'min_lr' in given:
        warning = rising_learning_rate(flags)
        if warning:
            raise UserError(warning)

    # A run from other weights does not know the flags of its model yet.
    if flags['init_from'] == 'scratch':
        check_needs('train_jax', flags, given)


# the flags of sampling, evaluation and export that name what is written: a path on this disk
OUTPUTS = ('output', 'logprobs', 'folder', 'gguf', 'adapter')
NOT_HERE = 'is not on this disk; name a path here, and copy what is written'  # of a URL


def check_source(flags, given):
    """Raises UserError if init_from is not 'resume' but the user gave out_dir or checkpoint,
    because both would be ignored. Raises UserError for an output that is a URL. flags: the flags of
    sampling, evaluation or export. given: the flags that the user gave."""
    for name in OUTPUTS:
        if URL.match(flags.get(name, '')):
            raise UserError(f'{name}={flags[name]} {NOT_HERE}')
    # `base` is not here, because it is refused when the model is loaded
    ignored = {'out_dir', 'checkpoint'} & given.keys()
    if flags['init_from'] != 'resume' and ignored:
        raise UserError(f"{min(ignored)} is for a run, but init_from={flags['init_from']} is "
                        'another model: give only one of them')


# The values of training flags that are known without another module.
CHOICES = {
    'optimizer': ('adamw', 'muon'),
    'lr_schedule': ('cosine', 'linear', 'wsd', 'constant'),
    'dtype': ('auto', *DTYPES),
    'quantize': ('', 'int8'),
}


def check_flags(flags):
    """Raises UserError for training flags that are out of range or cannot be combined."""
    check_ranges(flags)
    for name, choices in CHOICES.items():
        check_choice(name, flags[name], choices)
    read_ends(flags['earlier_ends'])  # refuses what it cannot read
    if not flags['out_dir']:
        raise UserError('out_dir is empty; name a folder')
    is_in_bucket('out_dir', flags['out_dir'])  # refuses other URLs
    for name in ('lora_alpha', 'beta'):
        if not 0 < flags[name] < math.inf:
            raise UserError(f'{name} must be above 0, not {flags[name]}')

    # LoRA. The base and the rank of a resumed run are in its checkpoint.
    is_new = flags['init_from'] not in ('resume', 'auto')
    has_lora = flags['lora_rank'] > 0
    refuse([
        (flags['verify'] and flags['init_from'] != 'resume',
         'verify needs an existing run: --init_from=resume --out_dir=...'),
        (flags['verify'] and flags['eval_only'],
         'verify trains and eval_only does not: give only one of them'),
        (has_lora and flags['init_from'] == 'scratch',
         'LoRA trains updates of a pretrained model: name it with --init_from'),
        (has_lora and flags['zero'],
         'zero shards what is trained, and the updates of LoRA are small: leave zero at 0'),
        (has_lora and flags['optimizer'] != 'adamw',
         'muon is for whole matrices, and LoRA trains updates of them: leave optimizer at adamw'),
        (flags['base'] and is_new,
         'base is for a LoRA run that is resumed, sampled or exported; a new run takes init_from')])


@functools.cache
def read_ends(text):
    """Parses the flag earlier_ends, which lists former planned ends of the learning rate schedule.
    (--minutes can change the planned end while a run trains.) Returns {until: end}, in ascending
    order: before iteration `until`, the schedule was planned to end at iteration `end`.

    Example: '300:900,600:1000' gives {300: 900, 600: 1000}. Before iteration 300, the schedule was
    planned to end at iteration 900. From iteration 300 to 599, it was planned to end at 1000.
    Raises UserError for a text of another form or order."""
    if not re.fullmatch(r'(\d+:\d+(,\d+:\d+)*)?', text):
        raise UserError(f'earlier_ends is a list such as 300:900,600:1000, not {text}')
    pairs = [pair.split(':') for pair in text.split(',') if pair]
    ends = {int(until): int(end) for until, end in pairs}
    if list(ends) != sorted(ends) or len(ends) != len(pairs):
        raise UserError(f'earlier_ends: {text} is not in ascending order')
    return ends


class Control(NamedTuple):
    """The allowed values of a control. A control is a number that changes the distribution from
    which tokens are drawn, such as temperature or top_p."""
    off: float  # the value that switches it off, as None does
    low: float
    high: float
    allowed: str  # the allowed range, in words for the user


# numbers that float32, in which controls are applied, has; with a temperature or penalty below 1e-6
# the logits would overflow
LEAST, MOST = 1e-37, 1e38
CONTROLS = {
    'temperature': Control(0, 1e-6, MOST, '0 (greedy), or from 1e-6 to 1e38'),
    'top_k': Control(0, 1, MOST, 'at least 0'),
    'top_p': Control(1, LEAST, 1, 'in (0, 1]'),
    'min_p': Control(0, 0, 1, 'in [0, 1]'),
    'repetition_penalty': Control(1, 1e-6, MOST, 'from 1e-6 to 1e38')}


# {type of a field: (its name in messages, the method by which Python, numpy and JAX have it)}
KINDS_OF_NUMBERS = {
    int: ('a whole number', '__index__'),
    int | None: ('a whole number', '__index__'),
    float | None: ('a number', '__float__')}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """The options for generating token ids.

    The options temperature, top_k, top_p, min_p and repetition_penalty are called controls (see
    CONTROLS). Each control may be None. In jax_generate, a control that is None is not applied; for
    the temperature, that is the same as 1. Before jax_text calls jax_generate, it replaces each
    control that is None by the model's default (see TextModel.defaults)."""
    # how a token is drawn
    temperature: float | None = None  # 0 is greedy
    top_k: int | None = None  # only this many likeliest tokens, clamped to the vocabulary
    top_p: float | None = None  # only the likeliest tokens that together have this probability
    min_p: float | None = None  # only tokens at least min_p times as likely as the likeliest
    repetition_penalty: float | None = None  # above 1: tokens in the row become less likely
    n_vocab: int | None = None  # only ids below it, for a padded vocabulary; None is all
    # where a row ends
    max_new_tokens: int = 500
    stop_tokens: Sequence[int] = ()  # a row ends with the first of these that it generates
    # how it is computed
    cache_dtype: str = 'auto'  # of the KV cache, one of CACHE_DTYPES; 'auto' is the config's dtype
    n_draft: int = 0  # drafts per step: the same tokens, faster where drafts are accepted

    def check(self):
        """Raises UserError for a value that is no number where the field is one, or that is out of
        range."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            kind, method = KINDS_OF_NUMBERS.get(field.type, ('', ''))
            may_be_none = field.type is not int
            if kind and not hasattr(value, method) and not (may_be_none and value is None):
                raise UserError(f'{field.name} must be {kind}, not {value!r:.60}')
        check_ranges({'max_new_tokens': self.max_new_tokens})
        for name, control in CONTROLS.items():
            value = getattr(self, name)
            is_off = value in (None, control.off)
            if not is_off and not control.low <= float(value) <= control.high:
                raise UserError(f'{name} must be {control.allowed}, not {value}')


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextSampling(Sampling):
    """The options for generating text."""
    stop: str | Sequence[str] = ()  # a text ends before the first of these
    seed: int | None = 1337  # None draws a seed

    def check(self):
        """Raises UserError for a value of another type or out of range."""
        super().check()
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, Sequence) or not all(isinstance(text, str) for text in stop):
            raise UserError(f'stop must be a text or a list of texts, not {self.stop!r:.60}')
        if self.seed is not None:
            check_ranges({'seed': self.seed})

    @classmethod
    def from_flags(cls, flags):
        """Returns the TextSampling of sample_jax.py's flags. A `stop` that begins with [ must be a
        list of texts in JSON. Raises UserError if such a `stop` is anything else."""
        names = [field.name for field in dataclasses.fields(cls)]
        values = {name: flags[name] for name in names if name in flags}
        if values['stop'].startswith('['):
            values['stop'] = parse_json(values['stop'], 'stop begins with [ and')
            if not all(isinstance(text, str) for text in values['stop']):
                raise UserError(f'stop must be a list of texts, not {values["stop"]}')
        return cls(**values)


# how URLs begin; a single letter is a drive of Windows, not a scheme
URL = re.compile('[A-Za-z][A-Za-z0-9+.-]+:/')


def is_url(path):
    """Returns whether a path is a URL such as gs://bucket/run."""
    return URL.match(path) is not None


def is_in_bucket(flag, path):
    """Returns whether a path is gs://bucket/folder. Raises UserError for a URL that does not begin
    with gs://, because this program cannot use it. flag: the name of the flag that gives the
    path."""
    if not URL.match(str(path)):
        return False
    if str(path).startswith('gs://'):
        return True
    why = 'gs:// is the only address that is supported'
    if str(path).startswith('s3://'):
        why = ('Orbax 0.12, which writes the checkpoints, takes s3:// for a folder on this disk '
               '(google/orbax#359)')
    raise UserError(f'{flag}={path} cannot be used: {why}; name a folder, or gs://bucket/folder')

# -----------------------------------------------------------------------------
# how a script starts and ends


def start_script():
    """Prepares a script. From then on, an error ends the script as in exit_on_user_error. Ctrl-C
    ends the script at once, until the script sets its own handler. Each printed line is written at
    once, also to a pipe or file."""
    sys.excepthook = exit_on_user_error

    # If the shell has closed an output (2>&-), open os.devnull in its place: else the next file
    # that is opened, such as metrics.jsonl, would get its number, and the prints of libraries.
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or open(os.devnull, 'w')
    sys.stderr = sys.stderr or open(os.devnull, 'w')

    # Until the script handles Ctrl-C itself, there is nothing to save: exit at once, without a
    # traceback of the imports. A notebook has imported jax already; its handler stays.
    if 'jax' not in sys.modules and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, exit_now)

    # Replace characters that the terminal cannot show. A StringIO has no such settings.
    if hasattr(sys.stdout, 'reconfigure'):
        sys.stdout.reconfigure(line_buffering=True, errors='replace')


def exit_now(signum, frame):
    """Ends the process at once, as a signal handler. The exit code is 130 for Ctrl-C."""
    os._exit(128 + signum)


# The errors of a disk that its user can do something about. Windows has no ESTALE.
DISK_ERRORS = (
    errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR,
    errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.EIO, errno.EFBIG,
    getattr(errno, 'ESTALE', None))


JAX_SETTINGS = os.path.join('jax', '_src', 'config.py')


def exit_on_user_error(kind, error, traceback):
    """Ends the script. Serves as sys.excepthook. A UserError, a missing package, an error in
    DISK_ERRORS, and a lack of memory each become one line on stderr. The exit code is 75 for a
    TryAgain, else 2.

    The script ends quietly after Ctrl-C, or if the reader of stdout has closed stdout, as `head -1`
    does. For the death of another process see exit_if_peer_died. Any other error prints a
    traceback."""
    # Ctrl-C: the usual exit may crash while a thread of jax computes.
    if issubclass(kind, KeyboardInterrupt):
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(128 + signal.SIGINT)

    # Nobody reads the output any more, or another process has died.
    if isinstance(error, BrokenPipeError) and discard_unread_output():
        sys.exit(128 + signal.SIGPIPE)  # the exit code that a shell reports
    exit_if_peer_died(error)

    # A package is missing: Python runs in no environment, or not in this project's.
    if isinstance(error, ModuleNotFoundError) and error.name and not is_own_module(error.name):
        error = missing_package(error.name.partition('.')[0])

    # JAX refuses a value of one of its environment variables, such as JAX_DEBUG_NANS=x.
    frames = extract_tb(traceback)
    if isinstance(error, ValueError) and frames and frames[-1].filename.endswith(JAX_SETTINGS):
        error = UserError(f'JAX refuses its settings: {error}')

    is_memory = isinstance(error, MemoryError) or 'RESOURCE_EXHAUSTED' in str(error)[:100]
    is_disk = isinstance(error, OSError) and error.errno in DISK_ERRORS
    if is_memory:
        error = f'out of memory: use a smaller batch_size or model ({str(error)[:200]})'
    elif is_disk and not error.filename and discard_unread_output():
        error = f'cannot print: {error.strerror}'
    elif not isinstance(error, UserError) and not is_disk:
        sys.__excepthook__(kind, error, traceback)
        exit_before_others(1)
        return
    code = START_AGAIN if isinstance(error, TryAgain) else 2
    warn(one_line(error))
    exit_before_others(code)
    sys.exit(code)


# packages that are not in requirements_jax.txt, because only some commands need them
EXTRA_PACKAGES = ('datasets', 'gguf', 'pyarrow', 'gcsfs', 'google')


def missing_package(name):
    """Returns the UserError for a package that this Python lacks."""
    remedy = ENVIRONMENT
    if name in EXTRA_PACKAGES:
        remedy = 'pip install -r requirements_dev.txt' if name == 'google' else f'pip install {name}'
    return UserError(f'{sys.executable} has no package {name}: {remedy}')


def require_package(name):
    """Raises UserError if the package `name` is missing. Is called before the program imports the
    package."""
    if importlib.util.find_spec(name) is None:
        raise missing_package(name)


def is_own_module(name):
    """Returns whether a module belongs to this project. If the import of such a module fails, that
    is a bug of ours. If the import of any other module fails, a package is not installed."""
    top = name.partition('.')[0]
    return top.startswith('jax_') or top in ('data', 'tools', 'tests')


@atexit.register  # before the interpreter flushes stdout, which would fail with exit code 120
def discard_unread_output():
    """Sends stdout and stderr to os.devnull if their readers have closed them, or if their disk is
    full. Returns whether that is true of stdout."""
    discard_if_unread(sys.stderr)
    return discard_if_unread(sys.stdout)


def discard_if_unread(stream):
    """Sends a stream to os.devnull if its reader has closed it, or if its disk is full. Returns
    whether that is so."""
    try:
        poll = select.poll()
        poll.register(stream, 0)  # errors only
        is_gone = bool(poll.poll(0))
    except Exception:  # no poll (Windows), or the stream is not a file
        return False
    try:
        stream.flush()
    except OSError:
        is_gone = True
    if is_gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return is_gone


def exit_before_others(code):
    """Ends this process with exit code `code` after a short sleep, if JAX runs in several
    processes. Does nothing in a single process.

    Call this function instead of a usual exit if this process has failed. A usual exit would wait
    until the other processes end, too. The other processes may still run, and after 60 s JAX would
    abort all processes (exit code 134).

    The sleep takes 3 s in process 0, and 0.5 s in any other process. The sleep is longer in process
    0, because JAX aborts the other processes when process 0 ends. In these 3 s, other processes
    that have failed can still print their errors."""
    jax = sys.modules.get('jax')  # None: the script has not come that far
    if jax and jax.distributed.is_initialized() and jax.process_count() > 1:
        sys.stdout.flush()
        time.sleep(3 if jax.process_index() == 0 else 0.5)
        os._exit(code)


# The exit code that means: start all processes again. It is EX_TEMPFAIL of sysexits.h.
START_AGAIN = 75

# How JAX's messages about other processes begin. JAX raises them as ValueErrors, too.
PEER_STATUS = r'(ABORTED|CANCELLED|DEADLINE_EXCEEDED|INTERNAL|UNAVAILABLE|UNKNOWN): '


def exit_if_peer_died(error):
    """Ends this process at once, with one line on stderr and exit code START_AGAIN, if the death of
    another process has caused `error`; else does nothing. The usual exit, which completes a
    checkpoint and shuts down jax.distributed, would wait for the dead process."""
    jax = sys.modules.get('jax')  # None: the script has not come that far

    # The text of the error, and of the errors behind it.
    text = ' '.join(str(error).split())
    is_lost = 'barrier' in text
    for cause in (error, error.__cause__, error.__context__):
        is_runtime_error = type(cause).__name__ == 'JaxRuntimeError'
        if is_runtime_error or re.match(PEER_STATUS, str(cause)):
            is_lost = True

    if is_lost and jax and jax.process_count() > 1 and 'RESOURCE_EXHAUSTED' not in text:
        print(f'error: process {jax.process_index()} of {jax.process_count()} has lost the others; '
              f'start all of them again, a training with --init_from=resume ({text[:300]})',
              file=sys.stderr, flush=True)
        os._exit(START_AGAIN)
