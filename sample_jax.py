"""Generates text from a trained model.

$ python sample_jax.py --out_dir=out-pystdlib-char
$ python sample_jax.py --init_from=gpt2-xl --start="The answer to life, the universe and everything is" --num_samples=5
"""
import argparse
import dataclasses
import functools
import json
import os
import signal
import sys
import time

from jax_flags import (
    JSON_LINES, TextSampling, UserError, check_needs, check_ranges, check_source, digest,
    read_flags, read_text, start_script)

# -----------------------------------------------------------------------------
init_from = 'resume' # 'resume' (from out_dir), 'gpt2' (-medium ...), a Hugging Face folder, owner/name, ckpt.pt
out_dir = 'out' # the run to sample from; nothing else is needed
checkpoint = 'best' # 'best' (lowest validation loss) or 'latest'
base = '' # where the pretrained model of a LoRA run is now, if it has moved
dataset = '' # the folder under data/ whose meta.json describes the tokenizer of a ckpt.pt, which does not hold it
start = '\n' # the prompt, 'FILE:prompt.txt' to read it from a file, or 'FILE:prompts.jsonl', a prompt in each line
each_line = False # each line of the FILE is a prompt of its own
chat = False # the prompts are questions, asked in the form of the model's chat template; prints the answers
system = '' # system prompt of a chat
num_samples = 10 # number of samples to draw for each prompt
batch_size = 16 # rows (samples of prompts, or answers of --serve) that are generated together; more need more memory
max_new_tokens = 500 # number of tokens generated in each sample
temperature = 0.8 # 1.0 = no change, < 1.0 = less random, > 1.0 = more random; 0 is greedy
top_k = 200 # sample from the top_k most likely tokens only; 0 is all
top_p = 1.0 # sample from the most likely tokens that together have this probability only (nucleus); 1.0 is all
min_p = 0.0 # sample from the tokens at least min_p times as likely as the most likely one only; 0.0 is all
repetition_penalty = 1.0 # above 1.0 makes tokens that have already occurred less likely
stop = '' # end a sample before this text, or before the first of several, as in '["The end", "Q:"]'
output = '' # file for the samples, a line of JSON each; the same command continues it after a kill
quantize = '' # 'int8': weights with a scale per output channel, 4x smaller than float32; faster, logits differ slightly
cache_dtype = 'auto' # KV cache in 'float32', 'bfloat16', 'float16', 'int8', 'float8'; auto is the compute dtype
n_draft = 0 # speculative decoding: draft tokens per step, 3 or 7; pays with temperature=0, where a text repeats itself
speed = False # also print what took the time: imports, compilation, prefill, the bytes that decoding reads
stream = False # print the text while it is generated, one sample after the other
interactive = False # ask for prompts, as a chat if the model has a chat template: /help lists its commands
serve = 0 # port of a page to talk to the model and of OpenAI's API, until Ctrl-C, as 8000; 0 is off
host = '127.0.0.1' # the address that --serve listens on; 0.0.0.0 lets other machines in
allow = '' # more names of hosts, and origins of pages, that may ask --serve: 'my.lan,http://localhost:3000'
seed = 1337 # seeds the samples; need not be the training's
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
flags, given = read_flags(__file__, globals())  # all flags, and those that the user gave
cfg = argparse.Namespace(**flags)
if 'compile' in given:
    print(f'--compile={cfg.compile} has no effect here: JAX always compiles')

# refuse flags that are out of range, or cannot be combined
check_ranges(flags)
check_source(flags, given)
sampling = TextSampling.from_flags(flags)
sampling.check()
facts = {
    **flags,
    'has_file': cfg.start.startswith('FILE:'),
    'is_chat': cfg.chat or cfg.interactive or cfg.serve,
    'takes_prompts': not (cfg.interactive or cfg.serve),
    'has_batches': not cfg.interactive,
    'is_alone': not cfg.serve}
check_needs('sample_jax', facts, given)
if os.path.isdir(cfg.output):
    raise UserError(f'output={cfg.output} is a folder; name a file')

# jax is imported after the flags, so that --help and a wrong flag are answered at once
import jax

from jax_devices.processes import (
    check_agreement, exit_at_signals, gather_texts, initialize_distributed)
from jax_devices.setup import configure_process
from jax_generate import PrefixCache
from jax_hub.tokenizers import check_template
from jax_run.speed import report_speed
from jax_text import Generation, load, rendered_prompt, split_rows, warn_if_too_long


def read_prompts(start, each_line, chat):
    """Returns the list of the prompts that the flag `start` gives: the text itself, or the prompts
    in a file. A prompt is a text; in a chat, it may also be a dict (see read_prompt). each_line:
    whether each line of a text file is a prompt. chat: whether the prompts are for a chat. Raises
    UserError if the file has no prompts, or has a line that is not a prompt."""
    if not start.startswith('FILE:'):
        return [start]
    # a file of JSON lines, of a prompt in each line, or of a single prompt
    path = os.path.expanduser(start.removeprefix('FILE:'))
    text = read_text(path)
    if path.lower().endswith(JSON_LINES):
        prompts = [read_prompt(path, number, line, chat)
                   for number, line in enumerate(text.split('\n'), start=1) if line.strip()]
    elif each_line:
        prompts = [line for line in text.split('\n') if line]
    else:
        prompts = [text]
    if not prompts:
        raise UserError('the file has no prompts, only empty lines')
    return prompts


def read_prompt(path, number, line, chat):
    """Returns the prompt in a line of a .jsonl file. A line "some text" or {"prompt": "some text"}
    gives the text. If `chat`, a line may also be {"messages": [...]}, with "tools" and
    "chat_template_kwargs"; it gives the dict with one more key, 'where': the file and line. Raises
    UserError for any other line. path, number: the file and the number of the line, for error
    messages."""
    # a line that is not JSON is refused below, like everything else that is not a prompt
    try:
        prompt = json.loads(line)
    except (ValueError, RecursionError):
        prompt = None
    # messages go to the chat template unchanged
    messages = None
    if isinstance(prompt, dict):
        messages = prompt.get('messages')
    if chat and messages and isinstance(messages, list):
        if isinstance(messages[-1], dict) and messages[-1].get('role') == 'assistant':
            raise UserError(f'{path}, line {number}: the messages end with an answer; leave it out')
        if prompt.keys() - {'messages', 'tools', 'chat_template_kwargs'}:
            note_once(f'of the lines of {path} only "messages", "tools" and '
                      '"chat_template_kwargs" are read')
        return {**prompt, 'where': f'{path}, line {number}'}
    if isinstance(prompt, dict):
        if len(prompt) > 1:
            note_once(f'of the lines of {path} only "prompt" is read')
        prompt = prompt.get('prompt')
    if not isinstance(prompt, str) or not prompt:
        hint = '; "messages" need --chat=True' if messages else ''
        raise UserError(
            f'{path}, line {number}: neither "a text" nor {{"prompt": "a text"}}{hint}')
    return prompt


def encode_prompt(model, prompt, conversation):
    """Returns the token ids of a prompt. Outside a chat, a prompt is a text, and the result has the
    ids of this text.

    In a chat, the result has the ids of the system message (if --system gives one) and of the
    prompt's messages. A prompt that is a text is one message of the user. A prompt that is a dict
    contains its messages.

    prompt: an element of the list that read_prompts returns. conversation: the Chat
    (jax_apps/terminal.py), which has the message of --system; None outside a chat. Raises UserError
    for messages that the chat template refuses."""
    # a question of a chat; a prompt; or messages, which follow --system
    if isinstance(prompt, str) and conversation:
        return conversation.encode([{'role': 'user', 'content': prompt}])
    if isinstance(prompt, str):
        return model.encode(prompt)
    try:
        return model.encode([*conversation.system, *prompt['messages']], tools=prompt.get('tools'),
                            chat_template_kwargs=prompt.get('chat_template_kwargs'))
    except UserError as error:
        raise UserError(f'{prompt["where"]}: {error}') from None


def note(line):
    """Prints a line on stderr, in process 0 only. The samples are on stdout."""
    if is_master:
        print(line, file=sys.stderr)


note_once = functools.cache(note)  # a line is printed once

# the devices and processes
configure_process(cfg.device)
initialize_distributed(cfg.coordinator_address, cfg.num_processes, cfg.process_id)
is_master = jax.process_index() == 0  # the process that prints; all run the same program
if not cfg.interactive:  # in a chat, Ctrl-C only ends an answer
    exit_at_signals(is_said=cfg.serve > 0)
else:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if not is_master:
    sys.stdout = open(os.devnull, 'w')
if jax.process_count() > 1:
    check_agreement('flags', flags, {'process_id'})
    if cfg.interactive or cfg.serve:
        raise UserError(f'{"serve" if cfg.serve else "interactive"} takes one process')
if cfg.serve:
    from jax_apps.serve import Server
    server = Server(  # before the model is loaded, so that a port in use is reported at once
        cfg.host, cfg.serve, allow=cfg.allow, batch_size=cfg.batch_size)
imports_s = time.perf_counter() - started

# load the model
source, of_run = cfg.init_from, ''
if cfg.init_from == 'resume':
    source, of_run = cfg.out_dir, cfg.checkpoint
model = load(
    source, checkpoint=of_run, base=cfg.base, dataset=cfg.dataset,
    device=cfg.device, dtype=cfg.dtype, quantize=cfg.quantize, tensor=cfg.tensor, expert=cfg.expert)
if cfg.chat or cfg.system:
    check_template(model.tokenizer)

# how to sample: the model's authors may have defaults for flags that were not given
header = model.title
makers = {name: value for name, value in model.tokenizer.sampling.items() if name not in given}
sampling = dataclasses.replace(sampling, **makers)
if makers:
    described = ', '.join(f'{name}={value}' for name, value in makers.items())
    header += f'; {described} (its generation_config.json)'

# a conversation
conversation = None
if cfg.chat or cfg.interactive or cfg.serve:
    from jax_apps.terminal import COMMANDS, Chat
    conversation = Chat(model, cfg.system, sampling)
if cfg.interactive:
    print(f'{header}\n{COMMANDS}', file=sys.stderr)
    conversation.run()
    # not sys.exit: the chunk of an answer that Ctrl-C has ended may still be computed, and Python's
    # cleanup would free its memory
    sys.stdout.flush()
    os._exit(0)

# a server, until it is stopped
if cfg.serve:
    print(f'{header}\n{server.url} is the page, {server.url}/v1 the API; Ctrl-C ends it')
    server.run(model, sampling, conversation.system, name=os.path.basename(os.path.abspath(source)))

# encode the prompts
questions = read_prompts(cfg.start, cfg.each_line, cfg.chat)
num_samples = cfg.num_samples
if sampling.temperature == 0 and num_samples > 1:
    note(f'at temperature=0 the {num_samples} samples of a prompt are equal: one is made')
    num_samples = 1
prompts = [encode_prompt(model, question, conversation) for question in questions]
if jax.process_count() > 1:
    check_agreement('prompts', {'the digest of their tokens': digest(prompts)})
# the part of a prompt to print: of a conversation, its last message
lines = [question if isinstance(question, str) else question['messages'][-1].get('content')
         for question in questions]

# the file of samples; a command that was killed has left some samples there
file = None
done = {}
if cfg.output and is_master:
    from jax_run.samples import SampleFile, digest_flags
    file = SampleFile(cfg.output, digest_flags(flags, model.title, prompts))
    done = file.done
if jax.process_count() > 1 and int(gather_texts(str(len(done)))[0]):
    raise UserError(f'output={cfg.output} is there: several processes do not continue it, delete it')
if is_master:
    warn_if_too_long(model, prompts)
if done:
    note(f'{len(done)} samples are in {cfg.output} already')


def describe_row(generation, i, number):
    """Returns the record of row i of a Generation for --output, a dict. number: the index of the
    row's prompt."""
    sample = generation.describe(i)
    if cfg.chat:
        # the question as it was given, and as the chat template writes it
        sample['prompt'] = lines[number]
        sample['rendered'] = rendered_prompt(model, generation.prompts[i])
    return sample


# generate and print: each sample while it grows, or a batch of rows of similar length at a time
generations = []
batch_size = 1 if cfg.stream else cfg.batch_size
stream_cache = PrefixCache() if cfg.stream else None  # the samples of a prompt share its prefill
batches = split_rows(prompts, num_samples, batch_size, done)
waiting = {}  # {(number of prompt, number of sample): text}, to print in order
to_print = sorted(row for rows in batches for row in rows)
if cfg.stream:
    batches.sort()
for rows in batches:
    generation = Generation(
        model, [prompts[number] for number, _ in rows], sampling,
        first_sample=[index for _, index in rows], streaming=cfg.stream,
        prefix_cache=stream_cache, logprobs=bool(cfg.output))
    generations.append(generation)
    if cfg.stream:
        if cfg.chat:
            print(f'> {lines[rows[0][0]]}')
        for piece in generation.pieces(with_prompt=not cfg.chat):
            print(piece, end='', flush=True)
        print('\n---------------')
    else:
        generation.finish()
        for row, text, prompt_text in zip(rows, generation.texts, generation.prompt_texts):
            waiting[row] = f'> {lines[row[0]]}\n{text[len(prompt_text):]}' if cfg.chat else text
        while to_print and to_print[0] in waiting:
            print(waiting.pop(to_print.pop(0)))
            print('---------------')
    if file:
        file.append({row: describe_row(generation, i, row[0]) for i, row in enumerate(rows)})

if file:
    file.finish()

# the cost
if is_master and generations:
    print(header, file=sys.stderr)
    print(report_speed(model, generations, n_prompts=len(lines), started=started,
                       imports_s=imports_s, cache_dtype=cfg.cache_dtype, is_detailed=cfg.speed),
          file=sys.stderr)
