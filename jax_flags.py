"""The flags of the scripts, how a script ends, and what all modules use: UserError, JSON and text files. This file
imports no jax, so that --help and a wrong flag are answered at once: importing jax takes a second."""
import ast
import atexit
import dataclasses
import difflib
import errno
import json
import math
import os
import re
import runpy
import select
import signal
import stat
import sys
import time
from pathlib import Path
from typing import NamedTuple

DTYPES = ('float32', 'bfloat16', 'float16')  # of computation


class UserError(ValueError):
    """A mistake that the user can correct. The scripts print it as one line and exit with code 2."""


def check_choice(name, value, choices):
    """Raises UserError unless the value of the flag or option `name` is one of the choices; '' may stand for off."""
    if value not in choices:
        raise UserError(f'{name} must be one of {", ".join(filter(None, choices))}, not {value!r}')


def read_text(path, *, newline=None):
    """The text of a UTF-8 file without its byte-order mark; newline as for open(). UserError if it cannot be read."""
    try:
        with open(path, encoding='utf-8-sig', newline=newline) as file:
            return file.read()
    except OSError as error:
        raise UserError(f'cannot read {path}: {error.strerror}') from None
    except UnicodeDecodeError as error:
        raise UserError(f'cannot read {path}: it is not UTF-8 ({error})') from None


def path_inside(folder, name):
    """The path of the file or folder `name` of a folder that may be a stranger's; there need not be any.

    A link may lead to another place in the folder. In Hugging Face's cache, where a snapshot consists of links, it may
    lead to the files of the same model. Raises UserError for a name or a link that leads out of the folder."""
    path = os.path.join(folder, name)
    if '\0' in str(name):
        raise UserError(f'{folder} names a file {name!r}, and no file has such a name')
    target = Path(os.path.realpath(path))
    if not target.is_relative_to(folder_of_model(Path(os.path.realpath(folder)))):
        raise UserError(f'{printable(path)} is not read: it leads out of its folder, to {printable(str(target))}; if '
                        'you trust it, put a copy into the folder')
    return path


def regular_file(folder, name):
    """The path_inside of a file. Every reader of a folder that may be a stranger's asks for its files here.

    Raises UserError as path_inside and plain_file do."""
    return plain_file(path_inside(folder, name))


def plain_file(path):
    """The path of a file, to which a link may lead; there need not be any.

    Raises UserError for what is there but no regular file: a folder, a pipe, which a reader would wait for without an
    end, or a device, which has no end."""
    try:
        mode = os.stat(path).st_mode
    except OSError:  # not there, or out of reach: its reader knows what that means
        return path
    if not stat.S_ISREG(mode):
        raise UserError(f'{path} is not a regular file; put the file itself there')
    return path


def folder_of_model(folder):
    """The folder in which links of a model's folder may end: of models--NAME/snapshots/REVISION, the first."""
    for snapshots in folder.parents:
        if snapshots.name == 'snapshots' and snapshots.parent.name.startswith('models--'):
            return snapshots.parent
    return folder


def printable(name):
    """A name from a stranger's file, for a message of one line: what does not fit one is escaped, or left out."""
    shown = name if name.isprintable() else repr(name)
    return shown if len(shown) <= 200 else f'{shown[:200]}...'


def whole_characters(text):
    """The text with U+FFFD for each half of a character, as "\\ud83d" in JSON or a byte that is not UTF-8 leaves it."""
    return text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')


def write_text(path, text):
    """Writes a file atomically, it is complete or not there, and makes its folder."""
    path = os.path.realpath(path)  # a link stays one
    if os.path.exists(path) and not os.path.isfile(path):
        return Path(path).write_text(text, encoding='utf-8')  # a pipe or /dev/null; a folder is an OSError
    partial = Path(path).with_name(f'{Path(path).name}.tmp-{os.getpid()}')
    partial.parent.mkdir(parents=True, exist_ok=True)
    try:
        partial.write_text(text, encoding='utf-8')
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_json(path, *, optional=False):
    """The object in a JSON file. optional: {} if there is no such file. Raises UserError if it cannot be read."""
    if optional and not os.path.exists(path):
        return {}
    text = read_text(plain_file(path))
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f'{path} is not JSON ({error}); copy or download it again') from None
    if not isinstance(values, dict):
        raise UserError(f'{path} is not a JSON object; copy or download it again')
    return values


def write_json(path, values):
    """Writes JSON as write_text does."""
    write_text(path, json.dumps(values, indent=2) + '\n')


def ceil_div(a, b):
    """ceil(a / b) of integers."""
    return -(-a // b)

# -----------------------------------------------------------------------------
# flags

def config_block(script):
    """The flags of a script, {name: comment}: the assignments between its first two rulers (lines of dashes). Raises
    UserError for a flag without a trailing comment, because --help prints the comments."""
    source = Path(script).read_text(encoding='utf-8')
    block = re.split(r'^# -{20,}\n', source, maxsplit=2, flags=re.M)[1]
    comments = {}
    for name, rest in re.findall(r'^(\w+) *=(.*)$', block, flags=re.M):
        _, mark, comment = rest.rpartition('# ')
        if not mark:
            raise UserError(f'{Path(script).name}: the flag {name} has no comment; write {name} = ... # what it does')
        comments[name] = comment
    return comments


def read_flags(script, namespace, argv=None, *, ignored=()):
    """(flags, given): all flags of the script, {name: value}, and the ones that the user gave. Config files (Python
    files of assignments) and --name=value are applied in the order given. --help prints the block and exits.

    A config file gives the flags that it assigns at its top level, also those whose value stays the default, and all
    others whose value it changes, with `from base import *` or exec(open('base.py').read()).

    namespace: the script's globals(), which hold the defaults. ignored: names that are accepted without effect.
    Raises UserError for an unknown name or a value of another type; an int is accepted as a float."""
    argv = sys.argv[1:] if argv is None else argv
    comments = config_block(script)
    flags = {name: namespace[name] for name in comments}
    given = {}
    if '--help' in argv or '-h' in argv:
        print(f'usage: python {Path(script).name} [config/file.py ...] [--name=value ...]\n')
        for name, comment in comments.items():
            print(f'  --{name}={flags[name]!r}  # {comment}')
        sys.exit(0)

    def override(name, value):
        if name not in flags:
            if name in ignored:
                return
            near = difflib.get_close_matches(name, flags, n=3, cutoff=0.6)
            hint = f'python {Path(script).name} --help lists all flags'
            if near:
                hint = f'did you mean --{" or --".join(near)}?'
            raise UserError(f'unknown flag --{name}; {hint}')
        default = namespace[name]
        if type(default) is float and type(value) is int:
            value = float(value)
        if type(value) is not type(default):
            raise UserError(f'--{name} takes a value of type {type(default).__name__}, as in --{name}={default!r}; '
                            f'got {value!r}')
        if type(value) is int and abs(value) >= 2**31 and name != 'seed':
            raise UserError(f'--{name} must be below 2**31')
        flags[name] = given[name] = value

    for arg in argv:
        if not arg.startswith('--'):
            if not Path(arg).is_file():
                raise UserError(f'there is no config file {arg}; flags are written --name=value')
            try:
                tree = ast.parse(Path(arg).read_text(encoding='utf-8'))
                values = runpy.run_path(arg, init_globals=flags)
            except Exception as error:
                raise UserError(f'config file {arg}: {type(error).__name__}: {error}') from error
            assigned = [name for name in assigned_names(tree) if name in values and not name.startswith('_')]
            changed = [name for name, before in flags.items() if repr(values.get(name, before)) != repr(before)]
            for name in [*assigned, *changed]:
                override(name, values[name])
            continue
        name, equals, text = arg[2:].partition('=')
        if not equals:
            raise UserError(f'flags are written --name=value; got {arg}')
        try:
            value = ast.literal_eval(text)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # all that literal_eval documents
            value = text
        if isinstance(namespace.get(name), str):
            value = text  # as typed: --start=123 is a prompt
        override(name, value)
    return flags, given


def assigned_names(tree):
    """The names that the syntax tree of a module assigns, outside of functions, classes and comprehensions."""
    scopes = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp,
              ast.GeneratorExp)
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif not isinstance(node, scopes):
            yield from assigned_names(node)


# The largest value of each size of a model, by its field in GPTConfig or in a group of it: far above every model that
# is known, and low enough that a file's wrong number is refused before anything of that size is made
MOST = {
    'n_layer': 10_000, 'block_size': 2**30 - 1, 'window': 2**31 - 1, 'chunk': 2**31 - 1, 'vocab_size': 2**27,
    'n_embd': 2**20, 'n_head': 2**16, 'n_kv_head': 2**16, 'head_dim': 2**16, 'rope_width': 2**16, 'n_inner': 2**24,
    'n_expert': 2**16, 'n_used': 2**16, 'width': 2**24, 'shared_width': 2**24, 'n_group': 2**16, 'n_group_used': 2**16,
    'q_rank': 2**20, 'kv_rank': 2**20, 'nope_dim': 2**16, 'rope_dim': 2**16, 'v_dim': 2**16,
    'query_growth_every': 2**31 - 1, 'original_length': 2**30 - 1}

MOST_FLOAT = 3e38  # of other numbers: they are float32 where they are computed with

RANGES = {  # of flags: (the lowest value, what the value is below)
    **dict.fromkeys(('eval_interval', 'log_interval', 'eval_iters', 'gradient_accumulation_steps', 'batch_size',
                     'block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'keep', 'num_samples', 'prompt_len',
                     'repeats'), (1, math.inf)),
    **dict.fromkeys(('max_iters', 'minutes', 'save_interval', 'warmup_iters', 'learning_rate', 'min_lr', 'weight_decay',
                     'lora_rank', 'grad_clip', 'loss_chunk', 'n_inner', 'n_kv_head', 'n_expert', 'expert_balance',
                     'window', 'max_new_tokens'), (0, math.inf)),
    **dict.fromkeys(('beta1', 'beta2', 'dropout'), (0, 1)), 'seed': (0, 2**32)}


def check_ranges(flags):
    """Raises UserError for flags that are not in RANGES."""
    for name, (low, high) in RANGES.items():
        if name in flags and not low <= flags[name] < high:
            allowed = f'in [{low}, {high})' if high < math.inf else f'at least {low}'
            raise UserError(f'{name} must be {allowed}, not {flags[name]}')


class Need(NamedTuple):
    """What a flag needs, because nothing reads it otherwise."""
    switch: str  # the name of another flag, or of a fact that the script adds to the flags
    remedy: str  # follows "nothing reads NAME=VALUE without"
    values: tuple = ()  # of the switch, with which the flag is read; () is all but 0, '' and False


EXPERTS = Need('n_expert', 'experts: add --n_expert=8')
LORA = Need('lora_rank', 'LoRA: add --lora_rank=8')
PAIRS = Need('is_pairs', 'a data set of pairs of answers')
CHAT = Need('is_chat', 'a chat: add --chat=True or --interactive=True')
PROMPTS = Need('takes_prompts', 'prompts that are given: leave out --interactive')
# of bench_jax.py: the steps that read a flag
TRAINED = Need('step', 'a training step: --mode=train, or --mode=compile', ('train', 'compile train'))
DECODED = Need('step', 'decoding: --mode=decode, or --mode=compile --plan=decode', ('decode', 'compile decode'))
SHARDED = Need('step', '--mode=train or --mode=compile', ('train', 'compile train', 'compile decode'))
COMPILED = Need('step', '--mode=compile', ('compile train', 'compile decode'))
DECODED_HERE = Need('step', '--mode=decode', ('decode',))
MEASURED = Need('step', '--mode=train or --mode=decode', ('train', 'decode'))

# {script: {flag: what it needs}}. Not here are flags that nanoGPT has too, of which it accepts any combination, as
# wandb_project without wandb_log; nor what needs a switch that is on unless it is named, as lr_schedule needs decay_lr.
NEEDS = {
    'train_jax': {
        'n_expert_used': EXPERTS, 'expert_balance': EXPERTS, 'lora_alpha': LORA, 'quantize': LORA,
        'beta': PAIRS, 'length_normalized': PAIRS},
    'sample_jax': {
        'each_line': Need('has_file', 'a file of prompts: add --start=FILE:prompts.txt'),
        'system': CHAT, 'draft': Need('n_draft', 'the number of tokens to guess per step: add --n_draft=3'),
        'start': PROMPTS, 'num_samples': PROMPTS, 'output': PROMPTS},
    'eval_jax': {
        'logprobs': Need('tasks', 'tasks: add --tasks=items.jsonl')},
    'export_jax': {
        'shard_gb': Need('folder', '--folder: a GGUF file is one file')},
    'bench_jax': {
        'n_expert_used': EXPERTS, 'expert_balance': EXPERTS,
        **dict.fromkeys(('optimizer', 'attention', 'loss_chunk', 'scan_layers', 'remat', 'fsdp', 'zero', 'context'),
                        TRAINED),
        **dict.fromkeys(('prompt_len', 'max_new_tokens', 'quantize', 'cache_dtype'), DECODED),
        **dict.fromkeys(('n_draft', 'out_dir', 'dataset'), DECODED_HERE),
        **dict.fromkeys(('tensor', 'expert'), SHARDED), **dict.fromkeys(('plan', 'topology'), COMPILED),
        'repeats': MEASURED},
}


def is_read(script, name, flags):
    """Whether something reads the flag `name` of this script, given the other flags, {name: value}, and the facts among
    them. True if what it needs is not among them: it is not known yet."""
    need = NEEDS[script].get(name)
    if need is None or need.switch not in flags:
        return True
    value = flags[need.switch]
    return value in need.values if need.values else bool(value)


def check_needs(script, flags, given):
    """Raises UserError for a given flag that nothing reads: see NEEDS. What is off itself (0, '', False) is not asked
    for, and a switch that is turned off by name (--lora_rank=0) may follow a config file that has more flags for it.

    flags: all flags, {name: value}, with the facts that the script knows. given: those that the user gave."""
    for name, value in given.items():
        if not value or is_read(script, name, flags):
            continue
        need = NEEDS[script][name]
        if need.switch not in given:
            raise UserError(f'nothing reads {name}={value} without {need.remedy}; or leave {name} out')


def rising_learning_rate(flags):
    """A warning if the learning rate of these training flags rises to min_lr instead of falling to it, else ''."""
    decays = flags['decay_lr'] and flags['lr_schedule'] != 'constant'
    if not decays or flags['min_lr'] <= flags['learning_rate']:
        return ''
    return (f"min_lr={flags['min_lr']:g} is above learning_rate={flags['learning_rate']:g}, which would rise to it: "
            f"add --min_lr={flags['learning_rate'] / 10:g}, or --decay_lr=False")


def check_given(flags, given):
    """Raises UserError for training flags that the user gave and that cannot be meant so. Call it with the flags of the
    run: of one that is resumed, with those of its checkpoint."""
    if 'min_lr' in given and rising_learning_rate(flags):  # nanoGPT's default may be above, and is only said
        raise UserError(rising_learning_rate(flags))
    if flags['init_from'] == 'scratch':  # others know their model, and its flags, later
        check_needs('train_jax', flags, given)


def check_source(flags, given):
    """Raises UserError if flags of sampling, evaluation or export were given that init_from leaves without effect."""
    ignored = {'out_dir', 'checkpoint'} & given.keys()  # local_path refuses base where there is no adapter
    if flags['init_from'] != 'resume' and ignored:
        raise UserError(f"{min(ignored)} is of a run, and init_from={flags['init_from']} is another model: give either")


CHOICES = {  # of training flags whose values need no module to be known
    'optimizer': ('adamw', 'muon'), 'lr_schedule': ('cosine', 'linear', 'wsd', 'constant'),
    'dtype': ('auto', *DTYPES), 'quantize': ('', 'int8')}


def check_flags(flags):
    """Raises UserError for training flags that are out of range."""
    check_ranges(flags)
    for name, choices in CHOICES.items():
        check_choice(name, flags[name], choices)
    if not flags['out_dir']:
        raise UserError('out_dir is empty; name a folder')
    if is_url(flags['out_dir']):
        raise UserError(f"out_dir={flags['out_dir']} is a URL; name a folder, such as one where the bucket is mounted")
    is_new = flags['init_from'] not in ('resume', 'auto')  # the rank of a resumed run is in its checkpoint
    for name in ('lora_alpha', 'beta'):
        if not 0 < flags[name] < math.inf:
            raise UserError(f'{name} must be above 0, not {flags[name]}')
    if flags['lora_rank'] and flags['zero']:
        raise UserError('zero shards what is trained, and the updates of LoRA are small: leave zero at 0')
    if flags['lora_rank'] and flags['optimizer'] == 'muon':
        raise UserError('muon is for whole matrices, and LoRA trains updates of them: leave optimizer at adamw')
    if flags['base'] and is_new:
        raise UserError('base is for a LoRA run that is resumed, sampled or exported; a new run takes init_from')
    if flags['lora_rank'] and flags['init_from'] == 'scratch':
        raise UserError('LoRA trains updates of a pretrained model: name it with --init_from')


@dataclasses.dataclass(frozen=True)
class SamplingOptions:
    """The controls of sampling. None is off, as is 0 for top_k and min_p, and 1 for the others."""
    temperature: float = 1.0  # 0 is greedy
    top_k: int | None = None  # only this many likeliest tokens
    top_p: float | None = None  # only the likeliest tokens that together have this probability
    min_p: float | None = None  # only tokens at least this times as likely as the likeliest
    repetition_penalty: float | None = None  # above 1 makes tokens that are already there less likely

    def check(self):
        """Raises UserError for controls that make no sense."""
        # a temperature below 1e-6 would overflow float32
        if self.temperature != 0 and not 1e-6 <= self.temperature < math.inf:
            raise UserError(f'temperature must be 0 (greedy) or at least 1e-6, not {self.temperature}')
        if self.top_k is not None and self.top_k < 0:
            raise UserError(f'top_k must be at least 0, not {self.top_k}')
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f'top_p must be in (0, 1], not {self.top_p}')
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise UserError(f'min_p must be in [0, 1], not {self.min_p}')
        penalty = self.repetition_penalty
        if penalty is not None and not 0 < penalty < math.inf:
            raise UserError(f'repetition_penalty must be above 0, not {penalty}')


SAMPLING_NAMES = tuple(field.name for field in dataclasses.fields(SamplingOptions))


def is_url(path):
    """Whether a path is a URL such as gs://bucket/run: a scheme of one letter is a drive of Windows."""
    return bool(re.match('[A-Za-z][A-Za-z0-9+.-]+://', path))

# -----------------------------------------------------------------------------
# how a script starts and ends


def start_script():
    """Called first by every script: from here on its errors end it as exit_on_user_error says, and a line is written
    when it is printed, into a pipe or a file as on a terminal."""
    sys.excepthook = exit_on_user_error
    if hasattr(sys.stdout, 'reconfigure'):  # not a StringIO
        sys.stdout.reconfigure(line_buffering=True, errors='replace')  # a terminal may lack characters of a sample


def exit_on_user_error(kind, error, traceback):
    """A sys.excepthook: a UserError, a disk error or a lack of memory becomes one line on stderr and exit code 2.
    If the reader of stdout has closed it, as `head -1` does, the script ends quietly. Others print a traceback."""
    if isinstance(error, BrokenPipeError) and discard_unread_output():
        sys.exit(128 + signal.SIGPIPE)  # the exit code that a shell reports
    exit_if_peer_died(error)
    disk = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR,
            errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.EIO, errno.EFBIG, getattr(errno, 'ESTALE', None))
    if isinstance(error, MemoryError) or 'RESOURCE_EXHAUSTED' in str(error)[:100]:
        error = f'out of memory: use a smaller batch_size or model ({str(error)[:200]})'
    elif not isinstance(error, UserError) and not (isinstance(error, OSError) and error.errno in disk):
        sys.__excepthook__(kind, error, traceback)
        return exit_before_others(1)
    print(f'error: {" ".join(str(error).split())}', file=sys.stderr, flush=True)
    exit_before_others(2)
    sys.exit(2)


@atexit.register  # runs before the interpreter flushes stdout, which would fail and print a message
def discard_unread_output():
    """Redirects stdout to os.devnull if its reader has closed it, and returns whether it has."""
    try:
        poll = select.poll()
        poll.register(sys.stdout, 0)  # errors only
        is_gone = bool(poll.poll(0))
    except Exception:  # no poll (Windows), or stdout is not a file
        return False
    if is_gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return is_gone


def exit_before_others(code):
    """Ends this process with this exit code, if it is one of several: the usual way out waits for the others, which may
    not have failed, and after 60 s JAX aborts them all (134). Those that have failed too have 3 s to say so: with
    process 0 ends JAX's coordination service, and then JAX aborts the others."""
    jax = sys.modules.get('jax')
    if jax and jax.distributed.is_initialized() and jax.process_count() > 1:
        sys.stdout.flush()
        time.sleep(3 if jax.process_index() == 0 else 0.5)
        os._exit(code)


PEER_DIED = 75  # exit code, EX_TEMPFAIL of sysexits.h: start all processes again


def exit_if_peer_died(error):
    """Ends this process at once, with one line on stderr, if `error` is caused by the death of another process: the
    usual way out (completing a checkpoint, shutting down jax.distributed) would wait for the dead process."""
    jax = sys.modules.get('jax')  # None: the script has not come that far
    causes = error, error.__cause__, error.__context__
    text = ' '.join(str(error).split())
    status = 'ABORTED|CANCELLED|DEADLINE_EXCEEDED|INTERNAL|UNAVAILABLE|UNKNOWN'  # JAX raises ValueErrors for these too
    lost = any(type(cause).__name__ == 'JaxRuntimeError' or re.match(f'({status}): ', str(cause)) for cause in causes)
    lost = lost or 'barrier' in text
    if lost and jax and jax.process_count() > 1 and 'RESOURCE_EXHAUSTED' not in text:
        print(f'error: process {jax.process_index()} of {jax.process_count()} has lost the others; start all of them '
              f'again, with --init_from=resume ({text[:300]})', file=sys.stderr, flush=True)
        os._exit(PEER_DIED)
