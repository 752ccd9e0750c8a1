"""Helpers that several test modules share; fixtures are in conftest.py."""
import contextlib
import dataclasses
import functools
import io
import json
import os
import random
import re
import runpy
import shutil
import signal
import socket
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
import tokenizers
from safetensors.numpy import load_file, save_file

import jax_generate
from jax_devices.layout import setup_distributed_training
from jax_flags import TextSampling, UserError
from jax_ops.decode_weights import convert_params_for_decoding
from jax_run.checkpoints import choose_checkpoint, run_folder
from jax_run.log import read_metrics
from jax_text import Generation, load
from jax_train_utils import create_train_state, language_model, make_train_step
from jax_transformer import GPT, GPTConfig, MLAConfig, MoEConfig

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / 'tests' / 'golden'
FAMILIES = GOLDEN / 'families'
TINY = GPTConfig(block_size=16, vocab_size=37, n_layer=2, n_head=2, n_embd=16)
TEXT = 'the quick brown fox jumps over the lazy dog and runs away\n'
MODEL = ['--n_layer=1', '--n_head=2', '--n_embd=16', '--block_size=16']
SHORT = ['--batch_size=4', '--gradient_accumulation_steps=2', '--dropout=0.1', '--learning_rate=1e-2', '--max_iters=20',
         '--lr_decay_iters=20', '--warmup_iters=2', '--eval_interval=10', '--eval_iters=2', '--device=cpu:0']
MODELS = {
    'learned positions': TINY,
    'windows': dataclasses.replace(TINY, position='rope', layer_types=('window', 'full'), window=5, n_kv_head=1),
    'experts': dataclasses.replace(TINY, position='rope', mlp='swiglu', moe=MoEConfig(n_expert=4, n_used=2, width=24)),
    'latent attention': dataclasses.replace(TINY, position='rope', mla=MLAConfig(0, 8, 8, 4, 8))}
META = {'model': dataclasses.asdict(TINY), 'best_val_loss': 1.0, 'tokenizer': {}, 'flags': {},
        'wandb_id': None}  # of a checkpoint, as train_jax.py writes it
RESUME = ['--init_from=resume', '--device=cpu:0']
# the prepare script sys.argv[1], which ends before it makes the files of its data set
INTERRUPTED_PREPARE = '''
import os, runpy, sys
script = sys.argv.pop(1)
sys.path.insert(0, os.path.dirname(script))
main = runpy.run_path(script)['main']
main.__globals__['finish_data_set'] = lambda *args, **options: sys.exit(3)
main()
'''

slow = functools.partial(pytest.param, marks=pytest.mark.slow)  # one case of a test
long = functools.partial(pytest.param, marks=(pytest.mark.slow, pytest.mark.long))
needs_hangup = pytest.mark.skipif(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, reason='under nohup')


@functools.cache
def random_params(config, seed=0):
    """Parameters far from their small initial values, so that every part of the model matters to its output. They
    depend on the shapes and the seed alone: configs that differ in execution options get the same ones."""
    config = GPTConfig(**config.architecture())
    tree = jax.eval_shape(lambda: create_train_state(jax.random.key(0), config, optax.identity()).params)
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        mean = 1 if path[-1].key == 'scale' else 0  # the gain of a norm
        return jnp.asarray((mean + 0.3 * rng.normal(size=leaf.shape)).astype(np.float32))

    return jax.tree.map_with_path(draw, tree)


def guess(monkeypatch, tokens_BxN):
    """Makes speculative decoding draft these tokens of the row with the same beginning, behind its own ones."""
    def draft(row_N, length, n_draft):
        rows_BxN = jnp.asarray(tokens_BxN)
        n = min(len(row_N), rows_BxN.shape[1])
        is_own = (rows_BxN[:, :n] == row_N[:n]) | (jnp.arange(n) >= length)
        return rows_BxN[is_own.all(1).argmax()][length + jnp.arange(n_draft)]

    monkeypatch.setattr(jax_generate, 'prompt_lookup_draft', draft)
    monkeypatch.setattr(jax_generate, 'decode', jax.jit(
        jax_generate.decode.__wrapped__, static_argnames=('config', 'n_draft', 'use_cache')))


def random_tokens(*shape, seed=0, config=TINY):
    return np.random.default_rng(seed).integers(config.vocab_size, size=shape)


@functools.partial(jax.jit, static_argnames=('config', 'deterministic', 'method'))
def apply(config, params, *args, **options):
    """What the model returns, compiled: the logits [B, T, V] of ids [B, T], unless a method is named."""
    return GPT(config).apply({'params': params}, *args, **options)


def random_request(rng, letters, longest=30):
    """A request of TextModel.serve with a prompt, a length, a seed and controls of its own. rng: a random.Random."""
    request = {'prompt': ''.join(rng.choices(letters, k=rng.randint(1, longest))), 'seed': rng.randrange(1000),
               'max_new_tokens': rng.randint(1, longest), 'temperature': rng.choice([0, 0.5, 1, 1.5]),
               'top_k': rng.choice([0, 5, 200])}
    for name, value in {'top_p': 0.9, 'min_p': 0.05, 'repetition_penalty': 1.2, 'stop': rng.choice(letters)}.items():
        if rng.random() < 0.25:
            request[name] = value
    return request


def generate_alone(model, request):
    """The finished Generation of a request of TextModel.serve."""
    options = {name: value for name, value in request.items() if name != 'prompt'}
    return Generation(model, [model.encode(request['prompt'])], TextSampling(**options), logprobs=True).finish()


def lead(generation, n):
    """By how much the n-th new token of a Generation led, in the logits of which the largest was taken."""
    model, sampling, row = generation.model, generation.sampling, generation.result.tokens[:1]
    end = generation.lengths[0] + n
    first = max(0, end - model.config.block_size)
    logits = apply(model.config, model.params, row[:, first:end])[:, -1]
    controls = jax_generate.create_controls(model.config, sampling)
    if controls.repetition_penalty is not None:
        logits = jax_generate.penalize_repetition(logits, row, jnp.array([end]), controls.repetition_penalty)
    logits = jax_generate.sampling_logits(logits, controls)
    if controls.temperature is not None:
        prompts = generation.start.args[2]
        key = jax.random.fold_in(jax.random.fold_in(prompts.rng[0], prompts.sample_index_B[0]), n)
        logits += jax.random.gumbel(key, logits.shape[1:], mode='high')
    second, likeliest = np.sort(logits[0])[-2:]
    return float(likeliest - second)


def assert_as_alone(alone, text, logprobs=None, is_whole=True):
    """A text, or the beginning of one, is that of a Generation alone, unless two tokens are a tie where they part; its
    log-probabilities are equal within 1e-4."""
    expected = alone.texts[0][len(alone.prompt_texts[0]):]
    n = len(os.path.commonprefix([text, expected]))
    if n == len(text) and (n == len(expected) or not is_whole):
        if logprobs is not None:
            new = slice(alone.lengths[0], alone.lengths[0] + len(logprobs))
            np.testing.assert_allclose(logprobs, alone.result.logprobs[0, new], atol=1e-4)
        return
    n_tokens = next(i for i in range(len(expected) + 1) if len(alone.model.tokenizer.decode(
        alone.result.tokens[0, :alone.lengths[0] + i + 1].tolist())) > len(alone.prompt_texts[0]) + n)
    assert lead(alone, n_tokens) < 1e-5, (text, expected)


def cached_logits(config, params, idx_BxT, cache, ends):
    """(logits [B, T, V], new KV cache) of several calls; call i feeds the tokens between ends[i - 1] and ends[i]."""
    parts = []
    for first, end in zip((0, *ends), ends):
        at = np.arange(first, end, dtype=np.int32)[None]
        logits, cache = apply(config, params, idx_BxT[:, first:end], cache, position_BxT=at, method='with_cache')
        parts.append(logits)
    return np.concatenate(parts, axis=1), cache


def make_step(config, parallel=None, objective=language_model, *, seed=3, grad_clip=1.0, **options):
    """make_train_step, by default of a language model on one device; not compiled."""
    parallel = parallel or setup_distributed_training(jax.devices()[:1])
    return make_train_step(config, objective, parallel, seed=seed, grad_clip=grad_clip, **options)


def random_model(run):
    """A model of random weights with the tokenizer of a run, whose next token is hard to guess."""
    model = load(run, device='cpu:0')
    params = convert_params_for_decoding(dict(random_params(model.config)), 'float32')
    return dataclasses.replace(model, params=params)


def write_dataset(folder, train, val, vocab_size=37, dtype='uint16', chars=None, **meta):
    """Makes a data set of the token ids `train` and `val`, whose vocabulary is `chars` or any vocab_size characters."""
    folder.mkdir(parents=True, exist_ok=True)
    np.asarray(train, dtype).tofile(folder / 'train.bin')
    np.asarray(val, dtype).tofile(folder / 'val.bin')
    chars = chars or ''.join(chr(48 + i) for i in range(vocab_size))
    meta = {'vocab_size': len(chars), 'dtype': dtype, 'tokenizer': {'kind': 'char', 'chars': chars}} | meta
    (folder / 'meta.json').write_text(json.dumps(meta))


def write_random_data(folder, kind, row_length, seed):
    """A data set of random tokens: a text, rows of documents, chats in windows or packed into rows, of which some
    tokens count."""
    rng = np.random.default_rng(seed)
    sizes = {'train': 40, 'val': 6}  # rows
    splits = {split: rng.integers(37, size=n * row_length) for split, n in sizes.items()}
    more = {'row_length': row_length} if kind in ('rows', 'packed') else {}
    if kind in ('chats', 'packed'):
        more['kind'] = 'chats'
    write_dataset(folder, splits['train'], splits['val'], **more)
    if 'kind' in more:
        for split, tokens in splits.items():
            mask = rng.choice([0, 1], size=(sizes[split], row_length))  # 1: it counts
            if kind == 'packed':
                mask[:, 0] = 2  # a conversation starts
                mask[:, rng.integers(1, row_length - 1)] = 2
            mask[:, -1] = 1
            mask.astype(np.uint8).tofile(folder / f'{split}_mask.bin')


def write_byte_tokenizer(folder, special=(), **settings):
    """A Hugging Face tokenizer with a token for each byte, and special ones."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in special])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / 'tokenizer.json'))
    (folder / 'tokenizer_config.json').write_text(json.dumps(settings | {
        'tokenizer_class': 'PreTrainedTokenizerFast'}))


def copy_folder(folder, tmp_path):
    return Path(shutil.copytree(folder, tmp_path / folder.name))


def edit_json(path, **changes):
    """Sets keys of a JSON file; None removes the key."""
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def edit_tensors(folder, changes):
    """Sets tensors {name: array} of a folder's model.safetensors; None removes the tensor."""
    tensors = load_file(folder / 'model.safetensors') | changes
    save_file({name: x for name, x in tensors.items() if x is not None}, folder / 'model.safetensors')


@contextlib.contextmanager
def restored_handlers():
    """The signal handlers of this process are afterwards as they were: those that a script sets, and its pipe."""
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        if (pipe := signal.set_wakeup_fd(-1)) >= 0:
            os.close(pipe)  # ends the thread that reads it


def run_script(script, *args):
    """Runs a script in this process, which saves the start of another one. Returns what a shell would see of it."""
    out, err = io.StringIO(), io.StringIO()
    with (restored_handlers(), pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out),
          contextlib.redirect_stderr(err), pytest.raises(SystemExit) as end):
        patch.setattr(sys, 'argv', [script, *map(str, args)])
        patch.setattr(os, '_exit', sys.exit)
        patch.setattr(sys, 'excepthook', sys.excepthook)
        patch.syspath_prepend((ROOT / script).parent)  # as the interpreter does
        for name in ('common', 'forms', 'reading'):  # of data/, whose import installs the hook
            patch.delitem(sys.modules, name, raising=False)
        try:
            runpy.run_path(str(ROOT / script), run_name='__main__')
        except Exception:
            sys.excepthook(*sys.exc_info())  # as the interpreter would; the script has installed its own hook
            sys.exit(1)
        sys.exit()
    return subprocess.CompletedProcess([script, *args], end.value.code or 0, out.getvalue(), err.getvalue())


def train(out_dir, *args):
    return run_script('train_jax.py', f'--out_dir={out_dir}', *args)


def sample(out_dir, *args):
    source = [] if out_dir == 'none' else [f'--out_dir={out_dir}']  # args have --init_from
    return run_script('sample_jax.py', *source, '--device=cpu:0', *args)


def prepare(script, *args):
    return run_script(f'data/{script}/prepare.py', *args)


def start(*command, seconds=600, **options):
    """A process of Python on one device, with pipes, killed after `seconds`: nothing waits longer."""
    options = dict(env=dict(os.environ, JAX_NUM_CPU_DEVICES='1'), cwd=ROOT, text=True, stdout=subprocess.PIPE,
                   stderr=subprocess.PIPE) | options
    process = subprocess.Popen([sys.executable, *map(str, command)], **options)
    timer = threading.Timer(seconds, process.kill)
    timer.daemon = True
    timer.start()
    return process


def free_port():
    """A port below those that Linux gives to connections: none of them takes it before process 0 listens."""
    while True:
        with socket.socket() as s:
            port = random.randrange(20000, 30000)
            if s.connect_ex(('127.0.0.1', port)):
                return port


def wait_for(what, condition, *processes, seconds=300):
    """Waits until condition() is true or one of the processes has ended; fails after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition() and all(process.poll() is None for process in processes):
        assert time.monotonic() < deadline, f'waited {seconds} s for {what}'
        time.sleep(0.01)


def succeeded(result):
    assert result.returncode == 0, result.stderr
    return result


def assert_refused(result, message):
    """The script has ended with one line on stderr, which matches the message, and with exit code 2."""
    assert result.returncode == 2, result.stderr
    assert re.fullmatch(f'error: .*{message}.*\n', result.stderr), result.stderr


def refusal(function, *args):
    """The message of the UserError that the call raises, which must be one line."""
    with pytest.raises(UserError) as error:
        function(*args)
    assert '\n' not in str(error.value)
    return str(error.value)


def samples_of(result):
    *samples, end = succeeded(result).stdout.split('\n---------------\n')
    assert end == ''
    return samples


def records_of(out_dir, name='iter'):
    """The records of metrics.jsonl that have this key, without what depends on the clock."""
    return [{key: x for key, x in record.items() if key not in ('time_ms', 'tokens_per_sec', 'mfu')}
            for record in read_metrics(out_dir) if name in record]


def final_state(out_dir):
    """{path: bytes} of the parameters and the optimizer's state of the latest checkpoint."""
    folder = run_folder(out_dir).checkpoints / str(choose_checkpoint(out_dir)[0])
    with ocp.StandardCheckpointer() as checkpointer:
        restored = [checkpointer.restore(folder / name) for name in ('params', 'opt_state')]
    return {jax.tree_util.keystr(path): np.asarray(x).tobytes() for path, x in jax.tree.leaves_with_path(restored)}
