"""Generates text from a trained model.

$ python sample_jax.py --out_dir=out-pystdlib-char
$ python sample_jax.py --init_from=gpt2-xl --start="The answer to life, the universe and everything is" --num_samples=5
"""
import contextlib
import json
import os
import re
import select
import sys
import time
from pathlib import Path

from jax_flags import (
    SamplingOptions, UserError, check_needs, check_ranges, check_source, read_flags, read_text, start_script,
    write_text)

# -----------------------------------------------------------------------------
init_from = 'resume' # 'resume' (from out_dir), 'gpt2' (-medium ...), a Hugging Face folder, owner/name, ckpt.pt, .gguf
out_dir = 'out' # the run to sample from; nothing else is needed
checkpoint = 'best' # 'best' (lowest validation loss) or 'latest'
base = '' # of a LoRA run or an adapter of peft: where the pretrained model is now, if it has moved
dataset = '' # the folder under data/ whose meta.json describes the tokenizer of a ckpt.pt, which does not hold it
start = '\n' # the prompt, 'FILE:prompt.txt' to read it from a file, or 'FILE:prompts.jsonl', a prompt in each line
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
stop = '' # end a sample before this text, or before the first of several, as in '["The end", "Q:"]'
output = '' # file to which each sample is written as a line of JSON, with its finish reason and log-probability
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
check_ranges(flags)
check_source(flags, given)
SamplingOptions(temperature, top_k, top_p, min_p, repetition_penalty).check()
check_needs('sample_jax', flags | {
    'has_file': start.startswith('FILE:'), 'is_chat': chat or interactive, 'takes_prompts': not interactive}, given)
if start.startswith('FILE:') and start.endswith('.jsonl'):
    each_line = True
if stop.startswith('['):
    try:
        stop = json.loads(stop)
    except (ValueError, RecursionError) as error:
        raise UserError(f'stop begins with [ and is not a list in JSON ({error})') from None
    if not all(isinstance(text, str) for text in stop):
        raise UserError(f'stop must be a list of texts, not {stop}')
if os.path.isdir(output):
    raise UserError(f'output={output} is a folder; name a file')

# jax is imported after the flags, so that --help and a wrong flag are answered at once
import jax
import numpy as np

from jax_devices.processes import check_agreement, initialize_distributed
from jax_devices.setup import configure_process, measure_bandwidth, trim_malloc
from jax_files.chats import final_answer
from jax_cache import cache_bytes
from jax_generate import PrefixCache, bytes_read_per_step, drafts_are_useless
from jax_text import Generation, load

configure_process(device)
initialize_distributed(coordinator_address, num_processes, process_id)
master = jax.process_index() == 0  # the process that prints; all run the same program
if not master:
    sys.stdout = open(os.devnull, 'w')
check_agreement('flags', flags | {'process_id': 'its own'})
if jax.process_count() > 1 and interactive:
    raise UserError('interactive takes one process')
imports_s = time.perf_counter() - started


def warn_if_too_long(prompts):
    """Says so if a prompt has more tokens than the context of the model."""
    longest, block_size = max(map(len, prompts)), model.config.block_size
    if longest > block_size and master:
        print(f'the prompt has {longest:,} tokens, the context of the model {block_size:,}: the text is continued from '
              f'the last {block_size:,}', file=sys.stderr)


def read_prompt(number, line):
    """The prompt in a line of prompts.jsonl: "a text" or {"prompt": "a text"}."""
    try:
        prompt = json.loads(line)
    except (ValueError, RecursionError):
        prompt = None
    prompt = prompt.get('prompt') if isinstance(prompt, dict) else prompt
    if not isinstance(prompt, str) or not prompt:
        raise UserError(f'{start[5:]}, line {number}: neither "a text" nor {{"prompt": "a text"}}')
    return prompt


def report_speed(model, generations):
    """Prints the time of compilation, prefill and decoding, and the bandwidth: a decode step reads all weights and the
    KV cache. Empties model.params: the bandwidth is measured in their memory."""
    results, laps = [g.result for g in generations], [lap for g in generations for lap in g.laps]
    prefill_s = sum(g.laps[0].running for g in generations)
    decode_s = sum(lap.running for g in generations for lap in g.laps[1:])
    n_new = sum(int(np.sum(g.result.lengths - g.lengths)) for g in generations)
    n_samples = sum(len(g.prompts) for g in generations)
    report = (f'{n_samples:,} samples of {len(lines):,} prompts, {n_new:,} tokens, in '
              f'{time.perf_counter() - started:.1f} s\n'
              f'first token: imports {imports_s:.2f} s, weights {model.loading.running:.2f} s, '
              f'compiling {model.loading.compiling + laps[0].compiling:.2f} s, running {laps[0].running:.2f} s\n'
              f'compiled in {sum(lap.compiling for lap in laps):.1f} s, prefill {prefill_s * 1000:.1f} ms')
    if decode_s:
        batch_size = len(generations[0].prompts)
        tokens_per_sec = (n_new - batch_size * len(generations)) / decode_s  # without the tokens of the first laps
        weight_bytes = bytes_read_per_step(model.params)
        gb_read = sum(result.steps * (weight_bytes + result.cache_bytes) for result in results) / 1e9
        model.params.clear()
        trim_malloc()
        devices = model.parallel.devices
        bandwidth = measure_bandwidth(devices[0], 2**27) * len(devices)  # each device reads its own shard
        report += (f', then {tokens_per_sec:,.0f} tok/s ({tokens_per_sec / batch_size:,.0f} per sequence) '
                   f'for {n_new:,} tokens\n'
                   f'weights {weight_bytes / 1e6:,.4g} MB, {gb_read / decode_s:.1f} GB/s, which is '
                   f'{gb_read / decode_s / bandwidth:.0%} of the {bandwidth:.1f} GB/s that this machine reads')
        drafted, accepted = sum(result.drafted for result in results), sum(result.accepted for result in results)
        if drafted:
            report += f'\ndrafts: {accepted:,} of {drafted:,} tokens accepted, {accepted / drafted:.0%}'
            if any(drafts_are_useless(result.drafted, result.accepted, batch_size) for result in results):
                report += '; too few, so they were switched off'
    length = min(model.config.block_size, max(max(g.lengths) for g in generations) + max_new_tokens)
    kv_bytes = cache_bytes(model.config, length, cache_dtype)
    report += f'\nKV cache: {kv_bytes:,} bytes for a sequence of {length:,} tokens, {kv_bytes / length:,.0f} per token'
    print(report, file=sys.stderr)

# -----------------------------------------------------------------------------
# interactive mode

COMMANDS = '/retry, /clear, /save FILE, /help, /exit; Ctrl-C ends an answer, Ctrl-D leaves'


def read_turn():
    """What the user types; lines that are pasted together are one turn."""
    text = input('> ')
    while os.name == 'posix' and sys.stdin.isatty() and select.select([sys.stdin], [], [], 0.05)[0]:
        text += '\n' + input()
    return text


class Chat:
    """A conversation: each line is answered, and the lines and answers so far are the context of the next answer."""

    def __init__(self, model, system, options):
        self.model, self.options = model, options
        self.system = [{'role': 'system', 'content': system}] if system else []
        self.messages = []  # of the user and the model, in turn
        self.n_answers = 0
        self.prefix_cache = PrefixCache()

    def run(self):
        """Asks for lines until the user leaves."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401, line editing and history for input()
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
                self.messages = []
            elif line == '/save':
                print('(/save needs the name of a file)')
            elif line.startswith('/save '):
                self.save(line[6:].strip())
            elif line == '/retry' and not self.messages:
                print('(there is no answer yet)')
            elif line == '/retry':
                self.answer(self.messages[:-2], self.messages[-2]['content'])
            elif re.fullmatch(r'/\w+( .*)?', line):
                print(f'(there is no command {line}; {COMMANDS})')
            elif line:
                self.answer(self.messages, line)

    def encode(self, messages):
        """The token ids of the messages: a chat if the model has a template, else plain text, a line for each turn."""
        if self.model.tokenizer.chat_template is not None:
            return self.model.encode([*self.system, *messages])
        lines = ['\n' * (m['role'] == 'user') + m['content'] for m in messages]
        return self.model.encode(''.join(lines)[1:])

    def forget_oldest(self, messages):
        """The messages without the oldest turns, if not all of them fit into the context with an answer."""
        block_size = self.model.config.block_size
        room = block_size - min(self.options['max_new_tokens'], block_size // 2)
        kept = messages
        while len(kept) > 1 and len(self.encode(kept)) > room:
            kept = kept[2:]
        if n_forgotten := (len(messages) - len(kept)) // 2:
            forgotten = 'turn is' if n_forgotten == 1 else f'{n_forgotten} turns are'
            print(f'(the context of {block_size:,} tokens is full: the oldest {forgotten} forgotten)')
        return kept

    def answer(self, messages, line):
        """Prints the answer to a line that follows the messages; Ctrl-C ends the answer. The conversation is then these
        messages, line and answer, or stays as it was if the line cannot be answered."""
        answer = ''
        try:
            messages = self.forget_oldest([*messages, {'role': 'user', 'content': line}])
            prompt = self.encode(messages)
            warn_if_too_long([prompt])
            generation = Generation(self.model, [prompt], first_sample=self.n_answers, streaming=True,
                                    prefix_cache=self.prefix_cache, **self.options)
            with contextlib.closing(generation.pieces(with_prompt=False)) as pieces:
                for piece in pieces:
                    answer += piece
                    print(piece, end='', flush=True)
            print(f"\n(cut at max_new_tokens={self.options['max_new_tokens']})" if generation.was_cut(0) else '')
        except KeyboardInterrupt:
            print('\n(interrupted)')
        except Exception as error:  # whatever it is, the conversation goes on
            name = '' if isinstance(error, UserError) else f'{type(error).__name__}: '
            return print(f'error: {name}{error}')
        finally:
            self.n_answers += 1
        self.messages = [*messages, {'role': 'assistant', 'content': final_answer(answer)}]

    def save(self, path):
        """Writes the conversation as one line of JSON, {"messages": [{"role": ..., "content": ...}]}."""
        n_turns = len(self.messages) // 2
        try:
            text = json.dumps({'messages': self.system + self.messages}, ensure_ascii=False)
            Path(path).write_text(f'{text}\n', encoding='utf-8')
            print(f"({n_turns} turn{'s' * (n_turns != 1)} in {path})")
        except (OSError, ValueError) as error:  # ValueError: a name with a NUL
            print(f'error: cannot write {path}: {error}')

# -----------------------------------------------------------------------------
# load and sample

is_run = init_from == 'resume'
model = load(out_dir if is_run else init_from, checkpoint=checkpoint if is_run else '', base=base, dataset=dataset,
             draft=draft, device=device, dtype=dtype, quantize=quantize, tensor=tensor, expert=expert)
if model.warning and master:
    print(model.warning, file=sys.stderr)
if (chat or system) and model.tokenizer.chat_template is None:
    raise UserError('the model has no chat template, which --chat and --system need')
header = model.title
if defaults := {name: value for name, value in model.tokenizer.sampling.items() if name not in given}:
    header += f"; {', '.join(f'{name}={value}' for name, value in defaults.items())} (its generation_config.json)"
options = dict(
    max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, stop=stop,
    repetition_penalty=repetition_penalty, cache_dtype=cache_dtype, n_draft=n_draft) | defaults
conversation = Chat(model, system, options)
if interactive:
    print(f'{header}\n{COMMANDS}', file=sys.stderr)
    conversation.run()
    sys.exit(0)

# encode the prompts
lines = [start]
if start.startswith('FILE:'):
    text = read_text(start[5:])
    lines = [line for line in text.split('\n') if line] if each_line else [text]
    if start.endswith('.jsonl'):
        lines = [read_prompt(number, line) for number, line in enumerate(text.split('\n'), 1) if line.strip()]
    if not lines:
        raise UserError('the file has no prompts, only empty lines')
if options['temperature'] == 0 and num_samples > 1:
    if master:
        print(f'at temperature=0 the {num_samples} samples of a prompt are equal: one is made', file=sys.stderr)
    num_samples = 1
prompts = [conversation.encode([{'role': 'user', 'content': line}]) if chat else model.encode(line) for line in lines]

# generate and print
generations = []
if stream:
    stream_cache = PrefixCache()  # the samples of a prompt share its prefill
    for line, prompt in zip(lines, prompts):
        warn_if_too_long([prompt])
        for i in range(num_samples):
            if chat:
                print(f'> {line}')
            generations.append(Generation(
                model, [prompt], first_sample=i, streaming=True, prefix_cache=stream_cache, **options))
            for piece in generations[-1].pieces(with_prompt=not chat):
                print(piece, end='', flush=True)
            print('\n---------------')
else:
    warn_if_too_long(prompts)
    generations.append(Generation(model, prompts, num_samples=num_samples, **options).finish())
    for i, (text, prompt_text) in enumerate(zip(generations[0].texts, generations[0].prompt_texts)):
        print(f'> {lines[i // num_samples]}\n{text[len(prompt_text):]}' if chat else text)
        print('---------------')
if output:
    samples = [g.describe(i) for g in generations for i in range(len(g.prompts))]
    rows = [json.dumps(sample | {'index': i % num_samples}, ensure_ascii=False) for i, sample in enumerate(samples)]
    if master:
        write_text(output, '\n'.join(rows) + '\n')
if master:
    print(header, file=sys.stderr)
    report_speed(model, generations)
