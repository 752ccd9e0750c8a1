"""Generates text from a trained model.

$ python sample_jax.py --out_dir=out-pystdlib-char
$ python sample_jax.py --init_from=gpt2-xl --start="The answer to life, the universe and everything is" --num_samples=5
"""
import dataclasses
import functools
import sys
from pathlib import Path

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

from jax_ops import UserError
from jax_pretrained import load_pretrained, local_path
from jax_train_utils import (
    Stopwatch, exit_on_user_error, load_dataset_meta, load_run, load_tokenizer, measure_bandwidth, read_flags,
    setup_distributed_training, setup_jax_environment, whole_characters)
from jax_transformer import cache_bytes, decoding_params, generate_in_chunks, weight_bytes

# -----------------------------------------------------------------------------
init_from = 'resume' # 'resume' (from out_dir), 'gpt2' (-medium, ...), a Hugging Face folder or 'owner/name', a ckpt.pt
out_dir = 'out' # the run to sample from; nothing else is needed
checkpoint = 'best' # 'best' (lowest validation loss) or 'latest'
dataset = '' # the folder under data/ whose meta.json describes the tokenizer, for a ckpt.pt, which does not
start = '\n' # the prompt, or 'FILE:prompt.txt' to take it from a file; '<|endoftext|>' is a token to GPT-2's BPE
each_line = False # each line of the FILE is a prompt of its own; all are continued at once
num_samples = 10 # how many samples to draw of each prompt, all in one batch
max_new_tokens = 500 # number of tokens generated in each sample
temperature = 0.8 # below 1.0 is less random, above 1.0 more so; 0 always takes the likeliest token
top_k = 200 # choose among the top_k likeliest tokens; 0 is all
top_p = 1.0 # choose among the likeliest tokens that together have this probability; 1.0 is all
min_p = 0.0 # choose among the tokens at least this times as likely as the likeliest; 0.0 is all
repetition_penalty = 1.0 # above 1.0 makes tokens less likely that are there already
stop = '' # end a sample before this text
quantize = '' # 'int8': weights of a quarter of float32's size, a scale per output channel; sooner done, nearly the same
cache_dtype = 'auto' # of the KV cache: 'float32', 'bfloat16', 'float16', 'int8', 'float8'; auto is the compute dtype
n_draft = 0 # tokens to guess and check per step: the same samples, sooner where guesses are right; 0 is off, 3 or 7 a good start
draft = '' # who guesses: out_dir of a small model with the same tokens, or as init_from; '' looks up what came before
stream = False # show the text while it is made, one sample after the other
interactive = False # ask for prompts, as a chat if the model has a template for it; /clear forgets, Ctrl-D leaves
seed = 1337 # of the samples; need not be the training's
device = 'auto' # 'auto' (the best there is), 'cpu', 'cuda', 'tpu', 'cuda:1'
dtype = 'auto' # 'float32', 'bfloat16', 'float16'; auto is bfloat16 where the hardware is fast at it
tensor = 1 # share out heads (and the KV cache with them), MLP width and vocabulary over this many devices
expert = 1 # share out the experts over this many devices
compile = True # of no effect, JAX always compiles
# -----------------------------------------------------------------------------
sys.excepthook = exit_on_user_error
config, given = read_flags(__file__, globals())
globals().update(config)
if 'compile' in given:
    print(f'--compile={compile} has no effect here: JAX always compiles')
if num_samples < 1 or top_k < 0 or seed < 0:
    raise UserError(f'num_samples must be at least 1, top_k and seed at least 0; got {num_samples}, {top_k}, {seed}')
if seed >= 2**32:
    raise UserError(f'seed must be below 2**32, not {seed}')
if not 0 < top_p <= 1 or not 0 <= min_p <= 1 or not 0 < repetition_penalty < float('inf'):
    raise UserError(f'top_p must be in (0, 1], min_p in [0, 1], repetition_penalty above 0; got {top_p}, {min_p}, '
                    f'{repetition_penalty}')
devices, dtype, reason = setup_jax_environment(device, dtype)
n_devices = tensor * expert
if not 1 <= n_devices <= len(devices):
    raise UserError(f'tensor={tensor} x expert={expert}, and there are {len(devices)} devices')
parallel = setup_distributed_training(devices[:n_devices], tensor=tensor, expert=expert)

# model and tokenizer
place = lambda name, array: jax.tree.leaves(parallel.put(unflatten_dict({name: array})))[0]
load_weights = functools.partial(load_pretrained, dtype='float32' if quantize else dtype, place=place)
if init_from == 'resume':
    model_config, params, meta = load_run(out_dir, checkpoint, parallel)
    description = meta['tokenizer']
    source = f"{out_dir}, checkpoint of iteration {meta['iter_num']}"
else:
    source, path = init_from, local_path(init_from)
    model_config, params = load_weights(path)
    description = {'kind': 'gpt2'}
    if dataset:
        description = load_dataset_meta(Path(__file__).parent / 'data' / dataset)['tokenizer']
    elif Path(path, 'tokenizer.json').exists():
        description = {'kind': 'folder', 'path': path}
    elif not 50257 <= model_config.vocab_size <= 50304:
        raise UserError(f"{init_from} has a vocabulary of {model_config.vocab_size}, which is not GPT-2's: put its "
                        'tokenizer.json beside it, or name the data set that it was trained on, --dataset=...')
parallel.check(model_config)
model_config = dataclasses.replace(model_config, dtype=dtype)
params = decoding_params(params, dtype, quantize)
tokenizer = load_tokenizer(description)
if tokenizer.vocab_size > model_config.vocab_size:
    raise UserError(f'the tokenizer has {tokenizer.vocab_size} tokens, the model only {model_config.vocab_size}')
draft_model = None
if draft:
    if not n_draft:
        raise UserError('draft needs to know how many tokens to guess per step: add --n_draft=4')
    if Path(draft, 'ckpt').is_dir():
        draft_config, draft_params, draft_meta = load_run(draft, 'best', parallel)
        if draft_meta['tokenizer'] != description:
            raise UserError(f'{draft} was trained with other tokens than {source}: it cannot draft for it')
    else:
        draft_config, draft_params = load_weights(draft)
    parallel.check(draft_config)
    draft_model = decoding_params(draft_params, dtype, quantize), dataclasses.replace(draft_config, dtype=dtype)


def encode(text):
    ids = tokenizer.encode(text)
    if not ids:
        raise UserError('the prompt is empty; give at least one character, as in --start="A"')
    return ids


def until_stop(text, prompt):
    """The text up to the stop text, if that comes after the prompt; and whether it does."""
    end = text.find(stop, len(prompt)) if stop else -1
    return (text, False) if end < 0 else (text[:end], True)


def generate_texts(prompts, sample_index, show=None):
    """Continues the prompts (lists of token ids) together and returns their texts. show(text) is called with the first
    one while it grows: whole characters only, and nothing that may turn out to be the beginning of the stop text."""
    lengths = [len(prompt) for prompt in prompts]
    idx = np.zeros((len(prompts), max(lengths)), np.int32)
    for row, prompt in zip(idx, prompts):
        row[:len(prompt)] = prompt
    prompt_texts = [tokenizer.decode(prompt) for prompt in prompts]
    chunks = generate_in_chunks(
        params, model_config, idx, max_new_tokens, rng=jax.random.key(seed), temperature=temperature, top_k=top_k or None,
        top_p=top_p if top_p < 1 else None, min_p=min_p or None, n_vocab=tokenizer.vocab_size,
        repetition_penalty=repetition_penalty if repetition_penalty != 1 else None,
        prompt_lengths_B=lengths, sample_index_B=sample_index, stop_tokens=tokenizer.stop_tokens,
        chunk=8 if show else 64 if stop else None, cache_dtype=cache_dtype, n_draft=n_draft, draft=draft_model)
    stages = []
    clock.lap()
    with parallel.entered():
        for made in chunks:
            stages.append(clock.lap())  # the first chunk is the prefill with its one token
            texts, stopped = zip(*(until_stop(tokenizer.decode(row[:end]), prompt)
                                   for row, end, prompt in zip(made.tokens.tolist(), made.lengths, prompt_texts)))
            if show:
                sure = whole_characters(texts[0])
                show(texts[0] if stopped[0] else sure[:len(sure) - len(stop)])
            if all(stopped):
                break
    if show:
        show(texts[0])
    timings.append((stages, lengths, made))
    return texts


def printer(shown=0):
    """show() for generate_texts: prints what is new since the last call."""
    def show(text):
        nonlocal shown
        print(text[shown:], end='', flush=True)
        shown = max(shown, len(text))
    return show


def prompt_of(turns, line):
    """The ids of a conversation and the line that continues it: one text, or a chat where the model has a template."""
    if tokenizer.chat_template is None:
        return encode('\n'.join([*(asked + answered for asked, answered in turns), line]))
    said = [text for turn in turns for text in turn] + [line]
    roles = ('user', 'assistant')
    return tokenizer.encode_chat([{'role': roles[i % 2], 'content': text} for i, text in enumerate(said)])


def converse():
    """A prompt loop. What was said so far is the context of what follows."""
    try:
        import readline  # noqa: F401, line editing and the history of prompts for input()
    except ImportError:
        pass
    turns = []  # what was asked and what was answered
    while True:
        try:
            line = input('> ')
        except (EOFError, KeyboardInterrupt):
            return print()
        if line == '/clear':
            turns = []
        elif line:
            try:
                prompt = prompt_of(turns, line)
                before = len(tokenizer.decode(prompt))
                turns = [*turns, (line, generate_texts([prompt], [0], printer(before))[0][before:])]
            except UserError as error:
                print(f'error: {error}', end='')
            except KeyboardInterrupt:
                pass
            print()


clock, timings = Stopwatch(), []
header = f'{source}; {tensor} x {devices[0].device_kind}, compute in {dtype} ({reason})'
if hasattr(sys.stdout, 'reconfigure'):
    sys.stdout.reconfigure(errors='replace')  # a terminal may lack characters that the model knows
if interactive:
    print(header, file=sys.stderr)
    converse()
    sys.exit()

if start.startswith('FILE:'):
    try:
        start = Path(start[5:]).read_text(encoding='utf-8')
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f'cannot read the prompt: {error}') from None
    prompts = [encode(line) for line in start.splitlines() if line] if each_line else [encode(start)]
elif each_line:
    raise UserError('each_line takes its prompts from a file: --start=FILE:prompts.txt')
else:
    prompts = [encode(start)]
if not prompts:
    raise UserError('the file has no prompts, only empty lines')

sample_index = list(range(num_samples)) * len(prompts)  # a sample is the same whatever other prompts there are
prompts = [prompt for prompt in prompts for _ in range(num_samples)]
if stream:
    for prompt, index in zip(prompts, sample_index):
        generate_texts([prompt], [index], printer())
        print('\n---------------')
else:
    for text in generate_texts(prompts, sample_index):
        print(text)
        print('---------------')

# what it took: compilation, the prompts, the steps that follow, each of which reads all weights and the cache
compile_s = sum(stage.compiling for stages, _, _ in timings for stage in stages)
prefill_s = sum(stages[0].running for stages, _, _ in timings)
decode_s = sum(stage.running for stages, _, _ in timings for stage in stages[1:])
report = f'compiled in {compile_s:.1f} s, prefill {prefill_s * 1000:.1f} ms'
if decode_s:
    n_tokens, batch = sum(int(np.sum(made.lengths - lengths)) for _, lengths, made in timings), len(timings[0][1])
    per_s = (n_tokens - len(prompts)) / decode_s
    gb = sum(made.steps * (weight_bytes(params) + made.cache_bytes) for _, _, made in timings) / 1e9
    bandwidth = measure_bandwidth(devices[0]) * n_devices  # each device reads its part
    report += (f', then {per_s:,.0f} tok/s ({per_s / batch:,.0f} per sequence) for {n_tokens:,} tokens\n'
               f'weights {weight_bytes(params) / 1e6:,.4g} MB, {gb / decode_s:.1f} GB/s, which is {gb / decode_s / bandwidth:.0%} '
               f'of the {bandwidth:.1f} GB/s that this machine reads')
    if drafted := sum(made.drafted for _, _, made in timings):
        accepted = sum(made.accepted for _, _, made in timings)
        report += f'\ndrafts: {accepted:,} of {drafted:,} tokens accepted, {accepted / drafted:.0%}'
length = min(model_config.block_size, max(max(lengths) for _, lengths, _ in timings) + max_new_tokens)
kept = cache_bytes(model_config, length, cache_dtype)
report += f'\nKV cache: {kept:,} bytes for a sequence of {length:,} tokens, {kept / length:,.0f} per token'
print(header, report, sep='\n', file=sys.stderr)
