"""Is a model any good? Bits per byte of texts, accuracy in tasks.

$ python eval_jax.py --out_dir=out-pystdlib-char --text=README.md
$ python eval_jax.py --init_from=gpt2 --text=a.txt,b.txt --tasks=questions.jsonl,eval_bundle

A task is a file of JSON lines: {"query", "choices", "gold"} (multiple choice; gold is the index of the right one),
{"context_options", "continuation", "gold"} (schema) or {"context", "continuation"} (language modeling, right if every
token is the likeliest), with a space between the parts. Accuracy and accuracy_norm are lm-eval's acc and acc_norm: by
the log-probability, and by that per character of the choice. A folder is a bundle in the form of DCLM's CORE: the
accuracy of its tasks is by the log-probability per token, and centered such that guessing gets 0.
"""
import collections
import csv
import functools
import json
import math
import os
import random
import sys
import time
from pathlib import Path

from jax_flags import (
    UserError, check_needs, check_source, read_flags, read_text, regular_file, start_script, write_text)

# -----------------------------------------------------------------------------
init_from = 'resume' # 'resume' (from out_dir), 'gpt2' (-medium ...), a Hugging Face folder, owner/name, ckpt.pt, .gguf
out_dir = 'out' # the run to evaluate; nothing else is needed
checkpoint = 'best' # 'best' (lowest validation loss) or 'latest'
base = '' # of a LoRA run or an adapter of peft: where the pretrained model is now, if it has moved
dataset = '' # the folder under data/ whose meta.json describes the tokenizer of a ckpt.pt, which does not hold it
text = '' # files whose bits per byte are measured, with commas between them
tasks = '' # files of JSON lines, and folders in the form of the CORE bundle, with commas between them
logprobs = '' # file to which a line per item of the tasks is written: {"task", "item", "logprobs", "best"}
max_length = 0 # most tokens of context; 0 is as many as the model knows
batch_size = 16 # rows (a choice each) of up to 512 tokens that are computed together, fewer of longer ones
quantize = '' # 'int8': weights with a scale per output channel, 4x smaller than float32
cache_dtype = 'auto' # of the KV cache: 'float32', 'bfloat16', 'float16', 'int8', 'float8'; auto is the compute dtype
device = 'auto' # 'auto' (the best there is), 'cpu', 'cuda', 'tpu', 'cuda:1'
dtype = 'auto' # 'float32', 'bfloat16', 'float16'; auto is bfloat16 where the hardware is fast at it
tensor = 1 # shard heads (with their KV cache), MLP width and vocabulary over this many devices (tensor parallelism)
expert = 1 # shard the experts over this many devices
coordinator_address = '' # host:port of process 0 of several that evaluate together, as in train_jax.py
num_processes = 0 # number of processes that evaluate together, on tensor x expert devices
process_id = -1 # number of this process, from 0
# -----------------------------------------------------------------------------
KINDS = {  # of items, with their keys: what precedes, what is scored, the index of the right option
    'multiple_choice': ('query', 'choices', 'gold'), 'schema': ('context_options', 'continuation', 'gold'),
    'language_modeling': ('context', 'continuation')}
start_script()
flags, given = read_flags(__file__, globals())  # all flags of the block above, and those that the user gave
globals().update(flags)
check_source(flags, given)
check_needs('eval_jax', flags, given)
if not (text + tasks).strip(', '):
    raise UserError('there is nothing to evaluate: name --text=FILE or --tasks=FILE')


def at(place, function, *args):
    """function(*args), with the place before the message of a UserError."""
    try:
        return function(*args)
    except UserError as error:
        raise UserError(f'{place}: {error}') from None


def read_items(path, kind=''):
    """The items of a file of JSON lines with 'kind', 'index' and 'place'. kind: of all items, which may then have more
    keys. Raises UserError, with the line, for what is not an item."""
    items = []
    for number, line in enumerate(read_text(path).split('\n'), 1):
        place = f'{path}, line {number}'
        if line.strip():
            items.append(at(place, read_item, line, kind) | {'index': len(items), 'place': place})
    if not items:
        raise UserError(f'{path} has no items')
    return items


def read_item(line, kind):
    try:
        item = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f'not JSON ({error})') from None
    found = set(item) if isinstance(item, dict) else set()
    fitting = [name for name, keys in KINDS.items()
               if (name == kind and found >= set(keys)) or (not kind and found == set(keys))]
    if not fitting:
        allowed = ' or '.join(str(KINDS[name]) for name in ([kind] if kind else KINDS))
        raise UserError(f'an item has the keys {allowed}, not {sorted(found)}')
    for name in KINDS[fitting[0]][:2]:
        values = item[name] if name in ('choices', 'context_options') else [item[name]]
        if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
            raise UserError(f'{name} must be {"a list of texts" if values is item[name] else "a text"}')
        if name in ('choices', 'continuation') and '' in values:
            raise UserError(f'{name}: a text is empty')
    item = {name: item[name] for name in KINDS[fitting[0]]} | {'kind': fitting[0]}
    n_options = len(pairs(item, ''))
    if 'gold' in KINDS[fitting[0]] and (type(item['gold']) is not int or not 0 <= item['gold'] < n_options):
        raise UserError(f'gold must be an index below {n_options}, not {item["gold"]!r}')
    return item


def pairs(item, delimiter):
    """[(context, continuation)] of an item, one for each option."""
    contexts, continuations = (
        item[name] if isinstance(item[name], list) else [item[name]] for name in KINDS[item['kind']][:2])
    return [(context, delimiter + continuation) for context in contexts for continuation in continuations]


def encode_item(items, index, n_examples, delimiter, in_bundle):
    """The rows of items[index], in tokens as by lm-eval; in a bundle after examples, other items with their answers,
    all as by nanochat: what differs between the options is scored, in a schema what they end with in common."""
    def prompts_of(item):
        strip = str.strip if item['kind'] == 'language_modeling' else str
        return [strip(context) + continuation for context, continuation in pairs(item, delimiter)]

    if not in_bundle:
        return [model.encode_pair(*pair) for pair in pairs(items[index], delimiter)]
    item, others = items[index], items[:index] + items[index + 1:]
    if n_examples > len(others):
        raise UserError(f'the task takes {n_examples} other items as examples, and there are {len(others)}')
    before = ''.join(prompts_of(other)[other.get('gold', 0)] + '\n\n'
                     for other in random.Random(1234 + index).sample(others, n_examples))
    rows = [model.encode_document(before + prompt) for prompt in prompts_of(item)]
    starts = [len(os.path.commonprefix(rows))] * len(rows)
    if item['kind'] == 'schema':
        n_scored = len(os.path.commonprefix([ids[::-1] for ids in rows]))
        starts = [len(ids) - n_scored for ids in rows]
    elif item['kind'] == 'language_modeling':
        context = model.encode_document((before + item['context'].strip() + delimiter).strip())
        starts = [len(os.path.commonprefix([rows[0], context]))]
    return [(ids, max(1, min(start, len(ids) - 1))) for ids, start in zip(rows, starts)]


def evaluate_task(name, items, n_examples, delimiter, guessing):
    """{'accuracy', 'accuracy_norm', 'n'} of a task. guessing: of a bundle's, the accuracy of guessing, for 'centered';
    its accuracy is by the log-probability per token, and as by nanochat, prompts are cut to max_length tokens."""
    in_bundle = guessing is not None
    rows = [at(item['place'], encode_item, items, i, n_examples, delimiter, in_bundle) for i, item in enumerate(items)]
    dropped = collections.Counter()
    for item in items:
        for pair in pairs(item, delimiter):
            dropped.update(model.tokenizer.count_dropped(''.join(pair)))
    warn_of_dropped(dropped, name)
    cut = {'max_length': max(1, (max_length or model.config.block_size) - 1)} if in_bundle else {}  # of context
    right, right_norm = [], []
    for item, scores in zip(items, model.score(rows, **options | cut)):
        sums = np.array([found.sum(dtype=np.float64) for found, _ in scores])
        best = int(np.argmax(sums / [len(found) for found, _ in scores] if in_bundle else sums))
        best_norm = int(np.argmax(sums / [len(continuation) for _, continuation in pairs(item, '')]))
        gold = item.get('gold', 0 if scores[0][1].all() else None)  # a continuation is right if it is the likeliest
        right.append(best == gold)
        right_norm.append(best_norm == gold)
        lines.append({'task': name, 'item': item['index'], 'logprobs': sums.tolist(), 'best': best})
    found = {'accuracy': float(np.mean(right)), 'accuracy_norm': float(np.mean(right_norm)), 'n': len(items)}
    return found | {'centered': (found['accuracy'] - guessing) / (1 - guessing)} if in_bundle else found


def read_bundle(folder):
    """The tasks of a bundle: [(name, items, number of examples, delimiter, accuracy of guessing)]."""
    import yaml
    read = []

    def text_of(task, name, default=None):
        """The text `name` of a task. Raises ValueError for another type: a few letters of YAML may mean gigabytes."""
        value = task.get(name, default)
        if not isinstance(value, str):
            raise ValueError(f'{name} must be a text')
        return value

    try:
        table = csv.DictReader(read_text(regular_file(folder, 'eval_meta_data.csv')).split('\n'))
        guessing = {row['Eval Task']: float(row['Random baseline']) / 100 for row in table}
        if not all(0 <= accuracy < 1 for accuracy in guessing.values()):
            raise ValueError('a random baseline is not in [0, 100)')
        for task in yaml.safe_load(read_text(regular_file(folder, 'core.yaml')))['icl_tasks']:
            label = text_of(task, 'label')
            n_examples = task['num_fewshot'][0]
            if type(n_examples) is not int or n_examples < 0:
                raise ValueError('num_fewshot must be a list of one number')
            path = regular_file(folder, f"eval_data/{text_of(task, 'dataset_uri')}")
            items = read_items(path, text_of(task, 'icl_task_type'))
            # as nanochat, which draws examples by the new order
            random.Random(1337).shuffle(items)
            delimiter = text_of(task, 'continuation_delimiter', ' ')
            read.append((label, items, n_examples, delimiter, guessing[label]))
    except UserError:
        raise
    except (yaml.YAMLError, csv.Error, LookupError, AttributeError, TypeError, ValueError, ArithmeticError,
            RecursionError) as error:
        reason = f'{type(error).__name__}: {str(error)[:300]}'
        raise UserError(f'{folder} is not in the form of the CORE bundle ({reason})') from None
    return read


# jax is imported after the flags and the files, so that --help and a mistake in these are answered at once
texts = {path: read_text(path, newline='') for path in text.split(',') if path}
names = [path.rstrip('/') for path in tasks.split(',') if path]
all_tasks = [task for path in names for task in
             (read_bundle(path) if os.path.isdir(path) else [(Path(path).stem, read_items(path), 0, ' ', None)])]
if len({name for name, *_ in all_tasks}) < len(all_tasks):
    raise UserError('two of the tasks have the same name: evaluate them one after the other')
import jax
import numpy as np

from jax_devices.processes import check_agreement, initialize_distributed
from jax_devices.setup import configure_process, describe_environment
from jax_files.tokenizer_library import warn_of_dropped
from jax_text import load

configure_process(device)
initialize_distributed(coordinator_address, num_processes, process_id)
master = jax.process_index() == 0  # the process that prints; all run the same program
if not master:
    sys.stdout = sys.stderr = open(os.devnull, 'w')
check_agreement('flags', flags | {'process_id': 'its own'})
is_run = init_from == 'resume'
model = load(out_dir if is_run else init_from, checkpoint=checkpoint if is_run else '', base=base, dataset=dataset,
             device=device, dtype=dtype, quantize=quantize, tensor=tensor, expert=expert)
print(*filter(None, (model.warning, model.title)), sep='\n', file=sys.stderr)
options = dict(max_length=max_length, batch_size=batch_size, cache_dtype=cache_dtype)
results = {'texts': {}, 'tasks': {}}
lines = []  # of the file that logprobs names


def report(group, name, evaluate, *args):
    """Keeps and prints the results of a text or a task, and the seconds that it took."""
    started = time.perf_counter()
    found = results[group][name] = evaluate(*args)
    values = [f'{key} {value:,.4f}' if isinstance(value, float) else f'{key} {value:,}' for key, value in found.items()]
    print(f"{name}: {', '.join(values)}; {time.perf_counter() - started:.1f} s")


def evaluate_text(path):
    (ids, found), = at(path, functools.partial(model.logprobs, **options), [texts[path]])
    is_whole = model.tokenizer.start_token is not None  # or else its first token is not scored
    dropped = model.tokenizer.count_dropped(texts[path])
    warn_of_dropped(dropped, path)
    n_bytes = len((texts[path] if is_whole else model.tokenizer.decode(ids)).encode())
    if is_whole:  # what is not scored does not count
        n_bytes -= sum(n * len(character.encode()) for character, n in dropped.items())
    nats = -float(found.sum(dtype=np.float64))
    return {'bits_per_byte': nats / math.log(2) / n_bytes, 'nats_per_token': nats / len(ids),
            'perplexity': math.exp(nats / len(ids)), 'tokens': len(ids), 'bytes': n_bytes}


for path in texts:
    report('texts', path, evaluate_text, path)
for task in all_tasks:
    report('tasks', task[0], evaluate_task, *task)
if centered := [task['centered'] for task in results['tasks'].values() if 'centered' in task]:
    results['core'] = float(np.mean(centered))
    print(f"CORE: {results['core']:.4f}")
print(json.dumps({'program': 'eval_jax', 'settings': flags | {'dtype': model.config.dtype},
                  'environment': describe_environment(model.parallel.devices), 'results': results}))
if logprobs and master:
    write_text(logprobs, ''.join(json.dumps(line) + '\n' for line in lines))
