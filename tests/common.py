"""Helpers that several test modules share: small models and their parameters, compiled training steps, the scripts run
inside the test process, and edits of checkpoint folders. Fixtures are in conftest.py."""
import contextlib
import dataclasses
import functools
import io
import json
import math
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file, save_file

from jax_devices.layout import setup_distributed_training, split_batch
from jax_flags import UserError
from jax_ops.cpu import cpu_multiplies_uint8
from jax_ops.matmul import as_uint8, quantize
from jax_ops.vocabulary import cross_entropy
from jax_run.checkpoints import choose_checkpoint
from jax_run.log import read_metrics
from jax_run.sources import get_batch_jax, open_source
from jax_train_utils import (
    create_learning_rate_schedule, create_optimizer_with_schedule, create_train_state, language_model, make_eval_step,
    make_train_step)
from jax_transformer import GPT, GPTConfig

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / 'tests' / 'golden'
FAMILIES = GOLDEN / 'families'
TEXT = 'the quick brown fox jumps over the lazy dog and runs away\n'


# under nohup, as on Windows, a closed terminal says nothing to a process
hangs_up = hasattr(signal, 'SIGHUP') and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
needs_hangup = pytest.mark.skipif(not hangs_up, reason='SIGHUP is ignored here')

slow = functools.partial(pytest.param, marks=pytest.mark.slow)  # one case of a test


def source_files():
    """All Python files of the repository: those that git tracks, and new ones that it does not ignore."""
    command = ['git', 'ls-files', '-z', '--cached', '--others', '--exclude-standard', '*.py']
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip('not a git checkout')
    paths = [ROOT / name for name in sorted(set(done.stdout.split('\0'))) if name]
    return [path for path in paths if path.exists()]


def skip_without_matmul_of(dtype):
    """Skips a test of int8 weights stored as uint8 where XLA has no matmul for them: decoding then stores int8."""
    if dtype == 'uint8' and not cpu_multiplies_uint8():
        pytest.skip('XLA has no matmul of uint8 by int8 for this CPU')


def write_dataset(folder, train, val, vocab_size=37, dtype='uint16', chars=None):
    """Makes a data set of the token ids `train` and `val`, whose vocabulary is `chars` or any vocab_size characters."""
    folder.mkdir(parents=True, exist_ok=True)
    np.asarray(train, dtype).tofile(folder / 'train.bin')
    np.asarray(val, dtype).tofile(folder / 'val.bin')
    chars = chars or ''.join(chr(48 + i) for i in range(vocab_size))
    meta = {'vocab_size': len(chars), 'dtype': dtype, 'tokenizer': {'kind': 'char', 'chars': chars}}
    (folder / 'meta.json').write_text(json.dumps(meta))


def write_rows(folder, n, row_length=17, **meta):
    """A data set of n rows in train, whose tokens are the row's number, and 5 in val."""
    for_each = lambda n: np.repeat(np.arange(n), row_length)
    write_dataset(folder, for_each(n), for_each(5))
    edit_json(folder / 'meta.json', row_length=row_length, **meta)


def sources_of(splits, block_size, masks=None):
    """{split: source} of arrays {split: tokens} and, if given, their masks."""
    sources = {}
    for split, tokens in splits.items():
        mask = masks[split] if masks else None
        sources[split] = open_source(tokens, mask, block_size=block_size, seed=0, split=split)
    return sources


def write_text_dataset(folder):
    """Makes a data set of TEXT, and returns the folder."""
    chars = ''.join(sorted(set(TEXT)))
    ids = [chars.index(c) for c in TEXT * 40]
    write_dataset(folder, ids[:-400], ids[-400:], chars=chars)
    return folder


# -----------------------------------------------------------------------------
# models

TINY = GPTConfig(block_size=16, vocab_size=37, n_layer=2, n_head=2, n_embd=16)


@functools.cache
def random_params(config, seed=0):
    """Parameters far from their small initial values, so that every part of the model matters to its output.

    They depend on the shapes and the seed alone: configs that differ in execution options get the same ones."""
    config = GPTConfig(**config.architecture())
    tree = jax.eval_shape(lambda: create_train_state(jax.random.key(0), config, optax.identity()).params)
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        mean = 1 if path[-1].key == 'scale' else 0  # the gain of a norm
        return jnp.asarray((mean + 0.3 * rng.normal(size=leaf.shape)).astype(np.float32))

    return jax.tree.map_with_path(draw, tree)


# bases of the adapters in golden/peft/written: GPT-2, q, k and v apart, one tensor for each of them, RoPE in pairs
WRITTEN = {'hf': GOLDEN / 'hf', 'llama': FAMILIES / 'llama', 'phi3': FAMILIES / 'phi3', 'llama4': FAMILIES / 'llama4'}


def random_updates(params, rank=2):
    """LoRA's updates of the parameters of a model, as create_lora_state makes them, far from zero."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return (0.3 * rng.normal(size=shape)).astype(np.float32)

    updates = {}
    for path, x in sorted(flatten_dict(params).items()):
        if path[-1] == 'kernel' and x.ndim == 2 and path[-2] != 'router':
            updates[*path, 'a'] = draw(x.shape[0], rank)
            updates[*path, 'b'] = draw(rank, x.shape[1])
    return unflatten_dict(updates)


def random_tokens(*shape, seed=0, config=TINY):
    return np.random.default_rng(seed).integers(config.vocab_size, size=shape)


@functools.partial(jax.jit, static_argnames=('config', 'deterministic'))
def apply(config, params, idx_BxT, **options):
    """The logits [B, T, V] of the model, compiled."""
    return GPT(config).apply({'params': params}, idx_BxT, **options)


@functools.partial(jax.jit, static_argnames='config')
def apply_with_cache(config, params, idx_BxT, cache, position_BxT):
    """(logits [B, T, V], new KV cache), compiled."""
    return GPT(config).apply({'params': params}, idx_BxT, cache, position_BxT=position_BxT, method='with_cache')


def cached_logits(config, params, idx_BxT, cache, ends):
    """(logits [B, T, V], new KV cache) of several calls; call i feeds the tokens between ends[i - 1] and ends[i]."""
    parts = []
    for first, end in zip((0, *ends), ends):
        position_BxT = np.arange(first, end, dtype=np.int32)[None]
        logits, cache = apply_with_cache(config, params, idx_BxT[:, first:end], cache, position_BxT)
        parts.append(logits)
    return np.concatenate(parts, axis=1), cache


# -----------------------------------------------------------------------------
# training

SCHEDULE = create_learning_rate_schedule(1e-2, decay_lr=False)
ADAMW = create_optimizer_with_schedule(SCHEDULE)


def make_step(config, parallel=None, objective=language_model, *, seed=3, grad_clip=1.0, **options):
    """make_train_step, by default of a language model on one device; not compiled."""
    parallel = parallel or setup_distributed_training(jax.devices()[:1])
    return make_train_step(config, objective, parallel, seed=seed, grad_clip=grad_clip, **options)


def train_step_of(parallel, config, *args, **options):
    return parallel.compile_step(make_step(config, parallel, *args, **options))


def eval_step_of(parallel, config, **options):
    return parallel.compile_eval_step(make_eval_step(config, language_model, parallel, **options))


@functools.cache
def compiled_once(layout, config):
    """(parallel, make, step) of training `config` on the layout (devices, fsdp, tensor, expert, context,
    zero), of which the last may be left out. make() returns the initial TrainState."""
    n_devices, *axes = layout
    parallel = setup_distributed_training(jax.devices()[:n_devices], *axes)

    def make():  # without apply_fn, which differs from call to call: each would have a training step of its own
        return create_train_state(jax.random.key(0), config, ADAMW).replace(apply_fn=None, schedule=SCHEDULE)

    return parallel, make, train_step_of(parallel, config)


@functools.cache
def initial_state(config):
    """The initial TrainState of all layouts as numpy arrays."""
    parallel, make, _ = compiled_once((1,), config)
    return jax.tree.map(np.asarray, parallel.init_sharded(make))


def fresh_run(layout, config):
    """(parallel, a new initial state, step) of training on the layout."""
    parallel, _, step = compiled_once(layout, config)
    return parallel, parallel.device_put(initial_state(config)), step


def host_batch(parallel, n_rows, iteration, config):
    """The sequences of an iteration that this process reads: numpy arrays {'x', 'y', 'seq_id'}."""
    tokens = np.random.default_rng(0).integers(8, size=4000).astype(np.uint16)  # only 8 kinds: quick to learn
    rows = parallel.local_rows(n_rows)
    x, y = get_batch_jax(tokens, config.block_size, n_rows, 0, iteration, rows)
    return {'x': x, 'y': y, 'seq_id': (iteration * n_rows + rows).astype(np.uint32)}


def device_batch(parallel, g, b, iteration, config):
    """The batch of an iteration of g micro-batches of b sequences on the devices of the layout."""
    shape = split_batch(g, b, parallel.n_data_shards)
    return parallel.shard_batch(host_batch(parallel, g * b, iteration, config), shape)


def run_steps(layout, n_iters, config, g=2, b=8, state=None, first=0):
    """(state after n_iters iterations of g micro-batches of b sequences, [metrics of each iteration as floats])."""
    parallel, _, step = compiled_once(layout, config)
    if state is None:
        state = parallel.device_put(initial_state(config))
    log = []
    for i in range(first, first + n_iters):
        state, metrics = step(state, device_batch(parallel, g, b, i, config))
        log.append({name: float(value) for name, value in metrics.items()})
    return state, log


def column(log, name):
    """The values of one metric, in the order of the iterations."""
    return [metrics[name] for metrics in log]


def meta_of(config):
    """Checkpoint metadata as train_jax.py writes it."""
    return {'model': dataclasses.asdict(config), 'iter_num': 0, 'best_val_loss': 1.0, 'tokenizer': {}, 'flags': {},
            'wandb_id': None}


CHAT_TEMPLATE = (
    '{{ bos_token }}'
    '{% for m in messages %}{% if m.role == "user" %}<user>{% else %}<model>{% endif %}{{ m.content }}{% endfor %}'
    '{% if messages|length > 3 %}{{ raise_exception("too long") }}{% endif %}'
    '{% if add_generation_prompt %}<model>{% endif %}')


def write_speaking_llama(folder):
    """Makes `folder` a Llama with a tokenizer of letters and a chat template, and returns it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors
    shutil.copytree(FAMILIES / 'llama', folder)
    vocab = {c: i for i, c in enumerate('abcdefghijklmnopqrstuvwxyz ,.!?:ABCD')}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token=None))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token) for token in ('<s>', '</s>', '<user>', '<model>')])
    begin, end = tokenizer.token_to_id('<s>'), tokenizer.token_to_id('</s>')
    tokenizer.post_processor = processors.TemplateProcessing('<s> $0', special_tokens=[('<s>', begin)])
    tokenizer.save(str(folder / 'tokenizer.json'))
    settings = {'bos_token': '<s>', 'eos_token': '</s>', 'chat_template': CHAT_TEMPLATE}
    (folder / 'tokenizer_config.json').write_text(json.dumps(settings))
    (folder / 'generation_config.json').write_text(json.dumps({'eos_token_id': [end]}))
    return folder


# -----------------------------------------------------------------------------
# scripts

@contextlib.contextmanager
def signals_restored():
    """Undoes what StopSignal sets."""
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        wakeup = signal.set_wakeup_fd(-1)
        if wakeup >= 0:
            os.close(wakeup)  # ends the thread that reads it


def run_script(script, *args):
    """Runs a script in this process, which saves the start of another one. Returns what a shell would see of it."""
    argv, hook, path = sys.argv, sys.excepthook, sys.path[:]
    sys.argv = [script, *map(str, args)]
    sys.path.insert(0, str((ROOT / script).parent))  # as the interpreter does
    out, err, code = io.StringIO(), io.StringIO(), 0
    try:
        with signals_restored(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                try:
                    runpy.run_path(str(ROOT / script), run_name='__main__')
                except Exception:
                    sys.excepthook(*sys.exc_info())  # as the interpreter would; the script has installed its own hook
                    code = 1
            except SystemExit as exit:
                code = exit.code or 0
    finally:
        sys.argv, sys.excepthook, sys.path[:] = argv, hook, path
        for name in [*sys.modules]:  # what the scripts that prepare data share installs a hook when it is imported
            if str(getattr(sys.modules[name], '__file__', None)).startswith(f'{ROOT / "data"}{os.sep}'):
                del sys.modules[name]
    return subprocess.CompletedProcess(sys.argv, code, out.getvalue(), err.getvalue())


def run_next(result):
    """Runs the command that an export prints last."""
    command = shlex.split(result.stdout.strip().split('\n')[-1].removeprefix('next: '))
    assert command[0] == 'python'
    return run_script(*command[1:])


RESUME = ['--init_from=resume', '--device=cpu:0']


def succeeded(result):
    assert result.returncode == 0, result.stderr
    return result


def train(out_dir, *args):
    return run_script('train_jax.py', f'--out_dir={out_dir}', *args)


def sample(out_dir, *args):
    source = [] if out_dir == 'none' else [f'--out_dir={out_dir}']  # args have --init_from
    return run_script('sample_jax.py', *source, '--device=cpu:0', *args)


def start_training(out_dir, *args):
    """train_jax.py in a process of its own, on one device."""
    return subprocess.Popen(
        [sys.executable, ROOT / 'train_jax.py', f'--out_dir={out_dir}', *map(str, args)],
        env=dict(os.environ, JAX_NUM_CPU_DEVICES='1'), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def wait_for(what, condition, *processes, seconds=300):
    """Waits until condition() is true or one of the processes has ended; fails after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition() and all(process.poll() is None for process in processes):
        assert time.monotonic() < deadline, f'waited {seconds} s for {what}'
        time.sleep(0.01)


def wait_for_iteration(out_dir, iteration, *processes):
    def is_logged():
        return any(record['iter'] >= iteration for record in read_metrics(out_dir))

    wait_for(f'iteration {iteration} in {out_dir}', is_logged, *processes)


def next_line(stream, process, start='', seconds=300):
    """The next line of this pipe of the process that begins so; fails if there is none after so many seconds."""
    timer = threading.Timer(seconds, process.kill)  # ends the pipe
    timer.start()
    try:
        for line in iter(stream.readline, ''):
            if line.startswith(start):
                return line
    finally:
        timer.cancel()
    pytest.fail(f'no line that begins with {start!r} before the end of {process.args}, which is killed after '
                f'{seconds} s')


def output_of(process, seconds=300):
    """(stdout, stderr) of a process when it has ended; fails if it has not after so many seconds."""
    try:
        return process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate(timeout=20)
        pytest.fail(f'waited {seconds} s for the end of {process.args}; stdout: {out}\nstderr: {err}')


def records_without_times(out_dir):
    """The records of metrics.jsonl without what depends on the clock."""
    clock = ('time_ms', 'tokens_per_sec', 'mfu')
    return [{name: x for name, x in record.items() if name not in clock} for record in read_metrics(out_dir)]


def final_state(out_dir):
    """[(path, bytes)] of the parameters and the optimizer's state of the latest checkpoint."""
    step, _ = choose_checkpoint(out_dir)
    folder = (out_dir / 'ckpt' / str(step)).absolute()
    with ocp.StandardCheckpointer() as checkpointer:
        restored = [checkpointer.restore(folder / name) for name in ('params', 'opt_state')]
    leaves = jax.tree_util.tree_leaves_with_path(restored)
    return [(jax.tree_util.keystr(path), np.asarray(x).tobytes()) for path, x in leaves]


def assert_same_run(one, other):
    assert records_without_times(one) == records_without_times(other)
    assert final_state(one) == final_state(other)


def assert_refused(result, message):
    """The script has ended with one line on stderr, which matches the message, and with exit code 2."""
    assert result.returncode == 2, result.stderr
    assert re.fullmatch(f'error: .*{message}.*\n', result.stderr), result.stderr


# -----------------------------------------------------------------------------
# checkpoint folders

def copy_folder(folder, tmp_path):
    return Path(shutil.copytree(folder, tmp_path / folder.name))


def refusal(function, *args):
    """The message of the UserError that the call raises, which must be one line."""
    with pytest.raises(UserError) as error:
        function(*args)
    assert '\n' not in str(error.value)
    return str(error.value)


PADDED = {  # keys of a tokenizer.json that transformers ignores
    'truncation': {'direction': 'Right', 'max_length': 2, 'strategy': 'LongestFirst', 'stride': 0},
    'padding': {'strategy': {'Fixed': 99}, 'direction': 'Right', 'pad_to_multiple_of': None, 'pad_id': 0,
                'pad_type_id': 0, 'pad_token': 'x'}}


def edit_json(path, **changes):
    """Sets keys of a JSON file; None removes the key."""
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def read_tensors(folder):
    return load_file(folder / 'model.safetensors')


def edit_tensors(folder, changes):
    """Sets tensors {name: array} of a folder's model.safetensors; None removes the tensor."""
    tensors = read_tensors(folder) | changes
    save_file({name: x for name, x in tensors.items() if x is not None}, folder / 'model.safetensors')


def mean_loss(config, params, x, y):
    return cross_entropy(apply(config, params, x), y).mean()


MODEL = ['--n_layer=1', '--n_head=2', '--n_embd=16', '--block_size=16', '--batch_size=4',
         '--gradient_accumulation_steps=2']

SHORT = ['--max_iters=20', '--eval_interval=10', '--eval_iters=2', '--warmup_iters=2', '--lr_decay_iters=20',
         '--learning_rate=1e-2', '--dropout=0.1', '--device=cpu:0']
END = '\n---------------\n'  # after each sample


def records_with(out_dir, name):
    """The records of metrics.jsonl that have this key."""
    return [record for record in read_metrics(out_dir) if name in record]


def samples_of(result):
    *samples, end = succeeded(result).stdout.split(END)
    assert end == ''
    return samples


QWEN = ['--norm=rms', '--position=rope', '--n_kv_head=1', '--qk_norm=learned', '--mlp=swiglu', '--n_inner=24',
        '--tied_head=False', '--bias=False', '--n_expert=4', '--n_expert_used=2']
TUNE = ['--block_size=16', '--batch_size=4', '--gradient_accumulation_steps=1', *SHORT, '--max_iters=2']


def prepare(script, *args):
    return run_script(f'data/{script}/prepare.py', *args)


CONVERSATION = {'messages': [{'role': 'user', 'content': 'ab'}, {'role': 'assistant', 'content': 'c'},
                             {'role': 'user', 'content': 'd'}, {'role': 'assistant', 'content': ' ef '}]}

# 160 positions: one full chunk of attention and a shorter one
LONG_BLOCK = GPTConfig(block_size=160, vocab_size=37, n_layer=1, n_head=2, n_embd=16)


@functools.cache
def compiled(config, loss_chunk=0):
    """(the compiled loss and gradients of a batch of two sequences, its arguments)."""
    def mean_loss(params, idx):
        return GPT(config).apply(
            {'params': params}, idx[:, :-1], idx[:, 1:], loss_chunk=loss_chunk, deterministic=False,
            seq_id_B=jnp.array([5, 9]), rngs={'dropout': jax.random.key(1)}, method='loss').mean()

    args = random_params(config), random_tokens(2, config.block_size + 1, config=config)
    return jax.jit(jax.value_and_grad(mean_loss)).lower(*args).compile(), args


@functools.cache
def loss_and_gradients(config, loss_chunk=0):
    step, args = compiled(config, loss_chunk)
    return step(*args)


def temporary_bytes(config, loss_chunk=0):
    step, _ = compiled(config, loss_chunk)
    return step.memory_analysis().temp_size_in_bytes


def assert_same_loss_and_gradients(one, other, tolerance):
    """The tolerance is relative: for the loss to its value, for a gradient to the largest of its parameter."""
    def check(path, a, b):
        np.testing.assert_allclose(
            a, b, rtol=0, atol=tolerance * np.abs(a).max(), err_msg=jax.tree_util.keystr(path))

    np.testing.assert_allclose(one[0], other[0], rtol=tolerance)
    jax.tree.map_with_path(check, one[1], other[1])


def operands(rows, width):
    """x [rows, width] with an outlier, as the activations of real models have them, and w [40, width] in int8."""
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((rows, width), (40, width)))
    x[:, 3] *= 100
    return x, *jax.jit(quantize, static_argnums=1)(w, jnp.int8)


def stored(weights, dtype):
    skip_without_matmul_of(dtype)
    return as_uint8(weights) if dtype == 'uint8' else weights


# no tensor axis divides the vocabulary
CONFIG = GPTConfig(block_size=16, vocab_size=37, n_layer=1, n_head=4, n_embd=16, dropout=0.2)

# layouts: (devices, fsdp, tensor, expert, context, zero), of which the last may be left out
ONE, PMAP, FSDP, TENSOR, BOTH, ALL = (1,), (8,), (2, 2), (2, 1, 2), (4, 2, 2), (8, 4, 2)
ZERO_1, ZERO_2, ZERO_2_ON_MESH = (8, 1, 1, 1, 1, 1), (8, 1, 1, 1, 1, 2), (8, 2, 2, 1, 1, 2)


def collectives(program):
    """[(name, number of elements of each result)] of all collectives in a compiled program."""
    text = program if isinstance(program, str) else program.as_text()
    names = 'all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute'
    found = []
    for shapes, name in re.findall(rf'= (.*?) ({names})(?:-start)?\(', text):
        dimensions = re.findall(r'\w\[([\d,]*)\]', shapes)
        found.append((name, [math.prod(map(int, filter(None, dims.split(',')))) for dims in dimensions]))
    return found


def sizes_of(found, *names):
    """The numbers of elements of the collectives of these names."""
    return [size for name, sizes in found if name in names for size in sizes]


def compile_step(layout, config, b=8):
    """(the compiled training step of one micro-batch of b sequences per data shard, the abstract state)."""
    parallel, make, step = compiled_once(layout, config)
    state = parallel.abstract_state(make)
    x = np.zeros((b * parallel.n_data_shards, config.block_size), np.int32)
    batch = parallel.shard_batch({'x': x, 'y': x, 'seq_id': np.zeros(len(x), np.uint32)}, (1, b))
    return step.lower(state, batch).compile(), state


FLAGS = ['--n_layer=1', '--n_head=2', '--n_embd=16', '--block_size=16', '--batch_size=4',
         '--gradient_accumulation_steps=2', '--dropout=0.1', '--max_iters=100', '--eval_interval=100',
         '--eval_iters=2', '--warmup_iters=2', '--lr_decay_iters=30', '--learning_rate=1e-2', '--device=cpu']
