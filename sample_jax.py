"""Generates text from a trained model.

$ python sample_jax.py --out_dir=out-pystdlib-char
$ python sample_jax.py --init_from=gpt2-xl --start="The answer to life, the universe and everything is" --num_samples=5
"""
import contextlib
import dataclasses
import functools
import json
import os
import re
import select
import sys
import time
from pathlib import Path

from jax_flags import UserError, read_flags, start_script

# -----------------------------------------------------------------------------
init_from = 'resume' # 'resume' (from out_dir), 'gpt2' (-medium, ...), a Hugging Face folder or 'owner/name', a ckpt.pt
out_dir = 'out' # the run to sample from; nothing else is needed
checkpoint = 'best' # 'best' (lowest validation loss) or 'latest'
base = '' # of a LoRA run: where the pretrained model is now, if it has moved
dataset = '' # the folder under data/ whose meta.json describes the tokenizer of a ckpt.pt, which does not hold it
start = '\n' # the prompt, or 'FILE:prompt.txt' to read it from a file; '<|endoftext|>' is a token in GPT-2's BPE
each_line = False # each line of the FILE is a prompt of its own; all are generated in one batch
chat = False # the prompts are questions, asked in the form of the model's chat template; prints the answers
system = '' # system prompt of a chat
num_samples = 10 # number of samples to draw for each prompt, all in one batch
max_new_tokens = 500 # number of tokens generated in each sample
temperature = 0.8 # 1.0 = no change, < 1.0 = less random, > 1.0 = more random; 0 is greedy
top_k = 200 # sample from the top_k most likely tokens only; 0 is all
top_p = 1.0 # sample from the most likely tokens that together have this probability only (nucleus); 1.0 is all
min_p = 0.0 # sample from the tokens at least min_p times as likely as the most likely one only; 0.0 is all
repetition_penalty = 1.0 # above 1.0 makes tokens that have already occurred less likely
stop = '' # end a sample before this text
quantize = '' # 'int8': weights with a scale per output channel, 4x smaller than float32; faster, logits differ slightly
cache_dtype = 'auto' # of the KV cache: 'float32', 'bfloat16', 'float16', 'int8', 'float8'; auto is the compute dtype
n_draft = 0 # speculative decoding: draft tokens per step, 3 or 7; pays with temperature=0, where a text repeats itself
draft = '' # draft model with the same tokenizer: its out_dir, or as init_from; '' drafts from the text so far
stream = False # print the text while it is generated, one sample after the other
interactive = False # ask for prompts, as a chat if the model has a chat template: /help lists its commands
seed = 1337 # of the samples; need not be the training's
device = 'auto' # 'auto' (the best there is), 'cpu', 'cuda', 'tpu', 'cuda:1'
dtype = 'auto' # 'float32', 'bfloat16', 'float16'; auto is bfloat16 where the hardware is fast at it
tensor = 1 # shard heads (with their KV cache), MLP width and vocabulary over this many devices (tensor parallelism)
expert = 1 # shard the experts over this many devices
coordinator_address = '' # host:port of process 0 of several that sample together, as in train_jax.py
num_processes = 0 # number of processes that sample together, on tensor x expert devices
process_id = -1 # number of this process, from 0
compile = True # has no effect: JAX always compiles
# -----------------------------------------------------------------------------
started = time.perf_counter()
start_script()
flags, given = read_flags(__file__, globals())  # all flags of the block above, and those that the user gave
globals().update(flags)
if 'compile' in given:
    print(f'--compile={compile} has no effect here: JAX always compiles')
if num_samples < 1 or top_k < 0 or seed < 0:
    raise UserError(f'num_samples must be at least 1, top_k and seed at least 0; got {num_samples}, {top_k}, {seed}')
if seed >= 2**32:
    raise UserError(f'seed must be below 2**32, not {seed}')
if not 0 < top_p <= 1 or not 0 <= min_p <= 1 or not 0 < repetition_penalty < float('inf'):
    raise UserError(f'top_p must be in (0, 1], min_p in [0, 1], repetition_penalty above 0; got {top_p}, {min_p}, '
                    f'{repetition_penalty}')

# jax is imported after the flags, so that --help and a wrong flag are answered at once
import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jax_generate import (
    PrefixCache, bytes_read_per_step, cache_bytes, convert_params_for_decoding, drafts_are_useless, generate_stream,
    order_columns_by_rank, transpose_kernels)
from jax_pretrained import load_pretrained, local_path
from jax_train_utils import (
    Stopwatch, check_agreement, checkpoint_steps, configure_process, describe_tokenizer, final_answer,
    initialize_distributed, load_dataset_meta, load_run, load_tokenizer, measure_bandwidth, same_tokens,
    setup_distributed_training, setup_jax_environment, strip_partial_utf8, trim_malloc)

configure_process(device)
initialize_distributed(coordinator_address, num_processes, process_id)
master = jax.process_index() == 0  # the process that prints; all run the same program
if not master:
    sys.stdout = open(os.devnull, 'w')
check_agreement('flags', flags | {'process_id': 'its own'})
devices, dtype, reason = setup_jax_environment(device, dtype)
clock = Stopwatch()
imports_s = clock.start - started
n_devices = tensor * expert
if not 1 <= n_devices <= len(devices):
    raise UserError(f'tensor={tensor} x expert={expert}, and there are {len(devices)} devices')
if jax.process_count() > 1 and n_devices < len(devices):
    raise UserError(f'tensor={tensor} x expert={expert} must be {len(devices)}, all devices of the '
                    f'{jax.process_count()} processes')
if jax.process_count() > 1 and interactive:
    raise UserError('interactive takes one process')
parallel = setup_distributed_training(devices[:n_devices], tensor=tensor, expert=expert)

# -----------------------------------------------------------------------------
# model and tokenizer


def place(path, array):
    """Moves one parameter to its devices, sharded and as decoding reads it, before the next one is read: no memory ever
    holds the model in float32 that is to be int8."""
    part = unflatten_dict({path: array})
    if n_devices == 1 and devices[0].platform == 'cpu':
        part = transpose_kernels(part)  # views: the device takes over kernels that the file stores [out, in]
    part = parallel.device_put(part)
    return flatten_dict(convert_params_for_decoding(part, dtype, quantize))[path]


def load_weights(path_or_name):
    return load_pretrained(path_or_name, 'stored' if quantize else dtype, place)


def load_draft_model():
    """(params, config) of the draft model."""
    if not n_draft:
        raise UserError('draft needs to know how many tokens to guess per step: add --n_draft=4')
    if Path(draft, 'ckpt').is_dir():
        draft_config, draft_params, draft_meta = load_run(draft, 'best', parallel)
        if not same_tokens(draft_meta['tokenizer'], description):
            raise UserError(f'{draft} was trained with other tokens than {source}: it cannot draft for it')
        draft_params = convert_params_for_decoding(draft_params, dtype, quantize)
    else:
        draft_config, draft_params = load_weights(draft)
    return ready_for_mesh(draft_params, draft_config), dataclasses.replace(draft_config, dtype=dtype)


def ready_for_mesh(params, config):
    """The parameters for decoding on the mesh. Raises UserError for a model that the mesh cannot split."""
    parallel.validate(config)
    with parallel.mesh_context():
        return order_columns_by_rank(params, config)


if init_from == 'resume':
    config, params, meta = load_run(out_dir, checkpoint, parallel, base)
    params = convert_params_for_decoding(params, dtype, quantize)
    description = meta['tokenizer']
    source = f"{out_dir}, checkpoint of iteration {meta['iter_num']}"
    latest = checkpoint_steps(out_dir)[0]
    if checkpoint == 'best' and latest > meta['iter_num'] and master:
        print(f"taking the best checkpoint, iteration {meta['iter_num']}; a later one, {latest}, is there: "
              '--checkpoint=latest', file=sys.stderr)
else:
    path = local_path(init_from)
    config, params = load_weights(path)
    source = init_from
    if dataset:
        description = load_dataset_meta(Path(__file__).parent / 'data' / dataset)['tokenizer']
    else:
        description = describe_tokenizer(path, config.vocab_size)
    if description is None:
        raise UserError(f"{init_from} has a vocabulary of {config.vocab_size}, which is not GPT-2's: put its "
                        'tokenizer.json beside it, or name the data set that it was trained on, --dataset=...')
params = ready_for_mesh(params, config)
config = dataclasses.replace(config, dtype=dtype)
tokenizer = load_tokenizer(description)
if tokenizer.vocab_size > config.vocab_size:
    raise UserError(f'the tokenizer has {tokenizer.vocab_size} tokens, the model only {config.vocab_size}')
draft_model = load_draft_model() if draft else None
if (chat or system) and tokenizer.chat_template is None:
    raise UserError(f'{source} has no chat template, which --chat and --system need')
defaults = {name: value for name, value in tokenizer.sampling.items() if name not in given}
globals().update(defaults)


def encode(text):
    ids = tokenizer.encode(text)
    if not ids:
        raise UserError('the prompt is empty; give at least one character, as in --start="A"')
    return ids


# -----------------------------------------------------------------------------
# generation

STREAM_CHUNK = 8  # tokens generated between two updates of a text that is shown while it grows
SLOW_TOKEN = 0.05  # seconds: a text with slower tokens is updated after each
STOP_CHUNK = 64  # tokens generated between two searches for the stop text
loading = clock.lap()
calls = []  # (laps, prompt lengths, GenerationResult) of each call of generate_texts, for report_speed


def generate_texts(prompts, sample_index, show=None, prefix_cache=None):
    """Continues the prompts (lists of token ids) in one batch. Returns (their texts, whether each met the stop text).

    sample_index: number of the random stream of each sample.
    show(text): called with the first text while it grows. prefix_cache: see generate_stream."""
    lengths = [len(prompt) for prompt in prompts]
    if max(lengths) > config.block_size and master:
        print(f'the prompt has {max(lengths):,} tokens, the context of the model {config.block_size:,}: the text is '
              f'continued from the last {config.block_size:,}', file=sys.stderr)
    idx = np.zeros((len(prompts), max(lengths)), np.int32)  # right-padded
    for row, prompt in zip(idx, prompts):
        row[:len(prompt)] = prompt
    prompt_texts = [tokenizer.decode(prompt) for prompt in prompts]
    laps = []
    results = generate_stream(
        params, config, idx, max_new_tokens, rng=jax.random.key(seed), temperature=temperature, top_k=top_k or None,
        top_p=top_p if top_p < 1 else None, min_p=min_p or None,
        repetition_penalty=repetition_penalty if repetition_penalty != 1 else None, n_vocab=tokenizer.vocab_size,
        prompt_lengths_B=lengths, sample_index_B=sample_index, stop_tokens=tokenizer.stop_tokens,
        chunk=functools.partial(stream_chunk, laps) if show else STOP_CHUNK if stop else None,  # None: all
        cache_dtype=cache_dtype, n_draft=n_draft, draft=draft_model, prefix_cache=prefix_cache)
    clock.lap()
    with parallel.mesh_context(), contextlib.closing(results):
        for result in results:
            laps.append(clock.lap())  # the first lap is the prefill and the first decode step
            texts, stopped = texts_until_stop(result, prompt_texts)
            if show:
                show(texts[0] if stopped[0] else settled_part(texts[0]))
            if all(stopped):
                break
    if show:
        show(texts[0])
    calls.append((laps, lengths, result))
    return texts, stopped


def texts_until_stop(result, prompt_texts):
    """The text of each sample, up to the stop text if that occurs after the prompt, and whether it does."""
    texts, stopped = [], []
    for row, length, prompt_text in zip(result.tokens.tolist(), result.lengths, prompt_texts):
        text = tokenizer.decode(row[:length])
        end = text.find(stop, len(prompt_text)) if stop else -1
        texts.append(text if end < 0 else text[:end])
        stopped.append(end >= 0)
    return texts, stopped


def stream_chunk(laps):
    """Number of tokens to generate before the text is shown again: 1, until one took less than SLOW_TOKEN. Several
    processes, whose clocks differ, generate STREAM_CHUNK."""
    fastest = min((lap.running for lap in laps[1:]), default=SLOW_TOKEN)
    return STREAM_CHUNK if fastest < SLOW_TOKEN or jax.process_count() > 1 else 1


def settled_part(text):
    """The text without what later tokens may still change: an incomplete character at its end, and the last characters,
    which may be the beginning of the stop text."""
    text = strip_partial_utf8(text)
    return text[:max(0, len(text) - len(stop))]


def make_printer(n_shown=0):
    """A show() for generate_texts that prints what is new since its last call, without the first n_shown characters."""
    def show(text):
        nonlocal n_shown
        print(text[n_shown:], end='', flush=True)
        n_shown = max(n_shown, len(text))
    return show


def report_speed():
    """Prints the time of compilation, prefill and decoding, and the bandwidth: a decode step reads all weights and the
    KV cache."""
    compile_s = sum(lap.compiling for laps, _, _ in calls for lap in laps)
    prefill_s = sum(laps[0].running for laps, _, _ in calls)
    decode_s = sum(lap.running for laps, _, _ in calls for lap in laps[1:])
    first = calls[0][0][0]
    report = (f'first token: imports {imports_s:.2f} s, weights {loading.running:.2f} s, '
              f'compiling {loading.compiling + first.compiling:.2f} s, running {first.running:.2f} s\n'
              f'compiled in {compile_s:.1f} s, prefill {prefill_s * 1000:.1f} ms')
    if decode_s:
        batch_size = len(calls[0][1])
        n_tokens = sum(int(np.sum(result.lengths - lengths)) for _, lengths, result in calls)
        n_first = sum(len(lengths) for _, lengths, _ in calls)  # tokens made in the first lap
        tokens_per_sec = (n_tokens - n_first) / decode_s
        weight_bytes = bytes_read_per_step(params)
        gb_read = sum(result.steps * (weight_bytes + result.cache_bytes) for _, _, result in calls) / 1e9
        params.clear()  # this is the end of the script: the bandwidth is measured in the memory of the weights
        trim_malloc()
        bandwidth = measure_bandwidth(devices[0], 2**27) * n_devices  # each device reads its own shard
        report += (f', then {tokens_per_sec:,.0f} tok/s ({tokens_per_sec / batch_size:,.0f} per sequence) '
                   f'for {n_tokens:,} tokens\n'
                   f'weights {weight_bytes / 1e6:,.4g} MB, {gb_read / decode_s:.1f} GB/s, which is '
                   f'{gb_read / decode_s / bandwidth:.0%} of the {bandwidth:.1f} GB/s that this machine reads')
        drafted = sum(result.drafted for _, _, result in calls)
        if drafted:
            accepted = sum(result.accepted for _, _, result in calls)
            report += f'\ndrafts: {accepted:,} of {drafted:,} tokens accepted, {accepted / drafted:.0%}'
            if any(drafts_are_useless(result.drafted, result.accepted, batch_size) for _, _, result in calls):
                report += '; too few, so they were switched off'
    longest_prompt = max(max(lengths) for _, lengths, _ in calls)
    length = min(config.block_size, longest_prompt + max_new_tokens)
    kv_bytes = cache_bytes(config, length, cache_dtype)
    report += f'\nKV cache: {kv_bytes:,} bytes for a sequence of {length:,} tokens, {kv_bytes / length:,.0f} per token'
    print(report, file=sys.stderr)


# -----------------------------------------------------------------------------
# interactive mode

COMMANDS = '/retry, /clear, /save FILE, /help, /exit; Ctrl-C ends an answer, Ctrl-D leaves'


def chat_messages(turns):
    """The messages of a conversation, for a chat template. turns: [(line, answer)]."""
    messages = [{'role': 'system', 'content': system}] if system else []
    for asked, answered in turns:
        messages += [{'role': 'user', 'content': asked}, {'role': 'assistant', 'content': answered}]
    return messages


def encode_chat(turns, line):
    """Token ids of a conversation and the line that continues it: a chat if the model has a template, else plain
    text."""
    if tokenizer.chat_template is None:
        return encode('\n'.join([*(asked + answered for asked, answered in turns), line]))
    return tokenizer.encode_chat([*chat_messages(turns), {'role': 'user', 'content': line}])


def encode_what_fits(turns, line):
    """encode_chat without the oldest turns, if not all of them fit into the context with an answer. Returns (ids,
    turns)."""
    room = config.block_size - min(max_new_tokens, config.block_size // 2)
    for n_dropped in range(len(turns) + 1):
        prompt = encode_chat(turns[n_dropped:], line)
        if len(prompt) <= room:
            break
    if n_dropped:
        forgotten = 'turn is' if n_dropped == 1 else f'{n_dropped} turns are'
        print(f'(the context of {config.block_size:,} tokens is full: the oldest {forgotten} forgotten)')
    return prompt, turns[n_dropped:]


def read_turn():
    """What the user types; lines that are pasted together are one turn."""
    text = input('> ')
    while os.name == 'posix' and sys.stdin.isatty() and select.select([sys.stdin], [], [], 0.05)[0]:
        text += '\n' + input()
    return text


def save_chat(turns, path):
    """Writes the conversation as one line of JSON, {"messages": [{"role": ..., "content": ...}]}."""
    text = json.dumps({'messages': chat_messages(turns)}, ensure_ascii=False)
    try:
        Path(path).write_text(f'{text}\n', encoding='utf-8')
        print(f"({len(turns)} turn{'s' if len(turns) != 1 else ''} in {path})")
    except OSError as error:
        print(f'error: cannot write {path}: {error.strerror}')


def run_chat():
    """Asks for lines and answers each; the conversation so far is the context of the next answer."""
    try:
        import readline  # noqa: F401, line editing and history for input()
    except ImportError:
        pass
    turns, n_answers, prefix_cache = [], 0, PrefixCache()
    while True:
        try:
            line = read_turn()
        except EOFError:
            return print()
        except KeyboardInterrupt:
            print('\n(Ctrl-D leaves)')
            continue
        if line in ('/exit', '/quit'):
            return
        if line == '/help':
            print(f'({COMMANDS})')
        elif line == '/clear':
            turns = []
        elif line == '/save':
            print('(/save needs the name of a file)')
        elif line.startswith('/save '):
            save_chat(turns, line[6:].strip())
        elif line == '/retry' and turns:
            turns = answer(turns[:-1], turns[-1][0], n_answers, prefix_cache) or turns
            n_answers += 1
        elif line == '/retry':
            print('(there is no answer yet)')
        elif re.fullmatch(r'/\w+( .*)?', line):
            print(f'(there is no command {line}; {COMMANDS})')
        elif line:
            turns = answer(turns, line, n_answers, prefix_cache) or turns
            n_answers += 1


def answer(turns, line, sample_index, prefix_cache):
    """Prints the answer to a line, which Ctrl-C ends. Returns the conversation with this turn; None if the line cannot
    be asked."""
    answered = ''

    def show(text):
        nonlocal answered
        print(text[n_prompt + len(answered):], end='', flush=True)
        answered = text[n_prompt:]

    try:
        prompt, turns = encode_what_fits(turns, line)
        n_prompt = len(tokenizer.decode(prompt))
        _, [has_stopped] = generate_texts([prompt], [sample_index], show, prefix_cache)
        *_, result = calls[-1]
        is_full = result.lengths[0] == len(prompt) + max_new_tokens
        was_cut = is_full and not has_stopped and result.tokens[0, -1] not in tokenizer.stop_tokens
        print(f'\n(cut at max_new_tokens={max_new_tokens})' if was_cut else '')
    except KeyboardInterrupt:
        print('\n(interrupted)')
    except Exception as error:  # whatever it is, the conversation goes on
        name = '' if isinstance(error, UserError) else f'{type(error).__name__}: '
        print(f'error: {name}{error}')
        return None
    return [*turns, (line, final_answer(answered))]


# -----------------------------------------------------------------------------
# sample

header = f'{source}; {tensor} x {devices[0].device_kind}, compute in {dtype} ({reason})'
if defaults:
    header += f"; {', '.join(f'{name}={value}' for name, value in defaults.items())} (its generation_config.json)"
if hasattr(sys.stdout, 'reconfigure'):
    sys.stdout.reconfigure(errors='replace')  # a terminal may lack characters that the model knows
if interactive:
    print(f'{header}\n{COMMANDS}', file=sys.stderr)
    run_chat()
    sys.exit(0)

# encode the prompts
lines = [start]
if start.startswith('FILE:'):
    try:
        text = Path(start[5:]).read_text(encoding='utf-8-sig')
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f'cannot read the prompt: {error}') from None
    lines = [line for line in text.split('\n') if line] if each_line else [text]
    if not lines:
        raise UserError('the file has no prompts, only empty lines')
elif each_line:
    raise UserError('each_line takes its prompts from a file: --start=FILE:prompts.txt')
encode_prompt = (lambda line: encode_chat([], line)) if chat else encode
if temperature == 0 and num_samples > 1:
    if master:
        print(f'at temperature=0 the {num_samples} samples of a prompt are equal: one is made', file=sys.stderr)
    num_samples = 1
prompts = [prompt for prompt in map(encode_prompt, lines) for _ in range(num_samples)]
questions = [line for line in lines for _ in range(num_samples)]
sample_index = list(range(num_samples)) * len(lines)  # a sample does not depend on the other prompts in the batch
n_hidden = [len(tokenizer.decode(prompt)) if chat else 0 for prompt in prompts]  # characters that are not printed

# generate and print
if stream:
    stream_cache = PrefixCache()  # the samples of a prompt share its prefill
    for prompt, index, question, n in zip(prompts, sample_index, questions, n_hidden):
        if chat:
            print(f'> {question}')
        generate_texts([prompt], [index], make_printer(n), stream_cache)
        print('\n---------------')
else:
    for text, question, n in zip(generate_texts(prompts, sample_index)[0], questions, n_hidden):
        if chat:
            print(f'> {question}')
        print(text[n:])
        print('---------------')
if master:
    print(header, file=sys.stderr)
    report_speed()
