"""Measures how good a model is: bits per byte of texts, accuracy in tasks.

$ python eval_jax.py --out_dir=out-pystdlib-char --text=README.md
$ python eval_jax.py --init_from=gpt2 --text=a.txt,b.txt --tasks=questions.jsonl,eval_bundle

A task is a file of JSON lines, of one of these kinds (gold is the index of the right option):
- {"query", "choices", "gold"}, multiple choice;
- {"context_options", "continuation", "gold"}, a Winograd schema: which context makes the
  continuation likeliest;
- {"context", "continuation"}, language modeling: right if every token is the likeliest;
- {"messages"}, a chat that ends with the answer: right if the model gives exactly this answer with
  --temperature=0.
A query or context is joined with its choice or continuation by a space. accuracy and accuracy_norm
are lm-eval's acc and acc_norm: accuracy chooses the option with the highest log-probability;
accuracy_norm chooses the option with the highest log-probability per character.

If --tasks names a folder, the folder is a bundle of tasks in the form of DCLM's CORE. A bundle may
join texts by another delimiter than a space. For the tasks of a bundle, accuracy chooses the option
with the highest log-probability per token. The tasks of a bundle have one more result, centered. It
is the accuracy on another scale: 0 is the accuracy of guessing, 1 means that every item is
right."""
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
    JSON_LINES, UserError, check_needs, check_source, digest, parse_json, read_flags, read_text,
    start_script, warn, write_text)
from jax_hub.folders import path_inside

# -----------------------------------------------------------------------------
init_from = 'resume' # 'resume' (from out_dir), 'gpt2' (-medium ...), a Hugging Face folder, owner/name, ckpt.pt
out_dir = 'out' # the run to evaluate; nothing else is needed
checkpoint = 'best' # 'best' (lowest validation loss) or 'latest'
base = '' # where the pretrained model of a LoRA run is now, if it has moved
dataset = '' # the folder under data/ whose meta.json describes the tokenizer of a ckpt.pt, which does not hold it
text = '' # files to measure in bits per byte, with commas between them
tasks = '' # files of JSON lines, and folders in the form of the CORE bundle, with commas between them
output = '' # file for all results, a line of JSON; a pipe gets that line as its last one, too
logprobs = '' # file for a line per item of the tasks: {"task", "item", "logprobs", "best"}
max_length = 0 # most tokens of context; 0 is as many as the model knows
batch_size = 16 # rows (a choice each) of up to 512 tokens that are computed together, fewer of longer ones
quantize = '' # 'int8': weights with a scale per output channel, 4x smaller than float32
cache_dtype = 'auto' # KV cache in 'float32', 'bfloat16', 'float16', 'int8', 'float8'; auto is the compute dtype
device = 'auto' # 'auto' (the best there is), 'cpu', 'cuda', 'tpu', 'cuda:1'
dtype = 'auto' # 'float32', 'bfloat16', 'float16'; auto is bfloat16 where the hardware is fast at it
tensor = 1 # shard heads (with their KV cache), MLP width and vocabulary over this many devices (tensor parallelism)
expert = 1 # shard the experts over this many devices
coordinator_address = '' # host:port of process 0 of several that evaluate together, as in train_jax.py
num_processes = 0 # number of processes that evaluate together, on tensor x expert devices
process_id = -1 # number of this process, from 0
# -----------------------------------------------------------------------------
KINDS = {  # {kind of item: keys of the prefix, the scored text, and the index of the right option}
    'multiple_choice': ('query', 'choices', 'gold'),
    'schema': ('context_options', 'continuation', 'gold'),
    'language_modeling': ('context', 'continuation'),
    'chat': ('messages',)}
start_script()
# all flags of the block above, and those that the user gave
flags, given = read_flags(__file__, globals())
globals().update(flags)
check_source(flags, given)
check_needs('eval_jax', flags, given)
if not (text + tasks).strip(', '):
    raise UserError('there is nothing to evaluate: name --text=FILE or --tasks=FILE')
for name, path in (('output', output), ('logprobs', logprobs)):
    if os.path.isdir(path):
        raise UserError(f'{name}={path} is a folder; name a file')
    parent = os.path.dirname(path) or '.'
    try:
        os.makedirs(parent, exist_ok=True)
    except OSError as error:
        raise UserError(f'cannot write {name}={path}: {error.strerror}') from None
    if path and not os.access(parent, os.W_OK):
        raise UserError(f'cannot write {name}={path}: the folder is read-only')


def list_paths(paths):
    """Returns the list of the paths in a text, in which commas are between them. Each may begin with
    ~."""
    return [os.path.expanduser(path.strip()) for path in paths.split(',') if path.strip()]


def at(place, function, *args):
    """Returns function(*args). If it raises a UserError, puts `place` before the message."""
    try:
        return function(*args)
    except UserError as error:
        raise UserError(f'{place}: {error}') from None


# -----------------------------------------------------------------------------
# files of tasks

def read_items(path, kind=''):
    """Returns the items of a file of JSON lines, a list of dicts. Adds three keys to each item:
    'kind', a key of KINDS; 'index', the item's index in the file; 'place', the file and line, for
    messages.

    kind: the kind of all items; keys that this kind does not have are ignored. If it is '', the
    kind of each item is found from its keys. Raises UserError if a line is not an item, and names
    the line; also if the file has no items."""
    items = []
    for number, line in enumerate(read_text(path).split('\n'), 1):
        if not line.strip():
            continue
        place = f'{path}, line {number}'
        item = at(place, read_item, line, kind)
        item['index'] = len(items)
        item['place'] = place
        items.append(item)
    if not items:
        raise UserError(f'{path} has no items')
    return items


def read_item(line, kind):
    """Returns the item in a line of JSON, with its kind added under 'kind'. kind: see read_items.
    Raises UserError if the line is not an item."""
    item = parse_json(line, 'it')
    kind = find_kind(item, kind)
    keys = KINDS[kind]
    if kind == 'chat':
        check_chat(item['messages'])
        return {'kind': kind, 'messages': item['messages']}

    # the prefix and the scored text: each is one text, or several to choose from
    for name in keys[:2]:
        is_list = name in ('choices', 'context_options')
        values = item[name] if is_list else [item[name]]
        are_texts = (isinstance(values, list) and bool(values)
                     and all(isinstance(value, str) for value in values))
        if not are_texts:
            raise UserError(f'{name} must be {"a list of texts" if is_list else "a text"}')
        if name in ('choices', 'continuation') and '' in values:
            raise UserError(f'{name}: a text is empty')

    # the index of the right option
    item = {name: item[name] for name in keys}
    item['kind'] = kind
    n_options = len(pairs(item, ''))
    if 'gold' in keys:
        gold = item['gold']
        if type(gold) is not int or not 0 <= gold < n_options:
            raise UserError(f'gold must be an index below {n_options}, not {gold!r}')
    return item


def check_chat(messages):
    """Checks that `messages` is a list of at least two messages, and that the last message is an
    answer. Raises UserError otherwise. The contents of messages are checked later, by the chat
    template."""
    is_list = isinstance(messages, list) and len(messages) > 1
    last = messages[-1] if is_list else None
    if not isinstance(last, dict) or last.get('role') != 'assistant':
        raise UserError('messages must be a list that ends with an answer of the role "assistant"')


def find_kind(item, kind):
    """Returns the kind of an item: `kind`, if the item has the keys of that kind. If `kind` is '',
    returns the kind that has exactly the item's keys. Raises UserError if no kind fits."""
    found = set(item) if isinstance(item, dict) else set()
    for name, keys in KINDS.items():
        has_all = found >= set(keys)
        has_no_other = found == set(keys)
        if (kind == name and has_all) or (not kind and has_no_other):
            return name
    names = [kind] if kind else KINDS
    allowed = ' or '.join(str(KINDS[name]) for name in names)
    raise UserError(f'an item has the keys {allowed}, not {sorted(found)}')


def pairs(item, delimiter):
    """Returns [(context, delimiter + continuation)] of an item, one pair for each option. A chat
    has one pair: the list of the messages before the answer, and the answer."""
    if item['kind'] == 'chat':
        *before, answer = item['messages']
        return [(before, str(answer.get('content', '')) or ' ')]

    # Each of the two is one text, or several to choose from.
    parts = []
    for name in KINDS[item['kind']][:2]:
        value = item[name]
        parts.append(value if isinstance(value, list) else [value])
    contexts, continuations = parts
    return [(context, delimiter + continuation)
            for context in contexts for continuation in continuations]


def read_bundle(folder):
    """Returns the tasks of a folder in the form of DCLM's CORE bundle: [(name; items; number of
    few-shot examples; delimiter between context and continuation; accuracy of guessing)]. Raises
    UserError if the folder has another form."""
    import yaml
    read = []
    try:
        # How often a guess is right, by task.
        table = csv.DictReader(read_text(path_inside(folder, 'eval_meta_data.csv')).split('\n'))
        guessing = {row['Eval Task']: float(row['Random baseline']) / 100 for row in table}
        if not all(0 <= accuracy < 1 for accuracy in guessing.values()):
            raise ValueError('a random baseline is not in [0, 100)')

        # The tasks, each with the file of its items.
        for task in yaml.safe_load(read_text(path_inside(folder, 'core.yaml')))['icl_tasks']:
            label = text_of(task, 'label')
            counts = task['num_fewshot']
            if len(counts) != 1 or type(counts[0]) is not int or counts[0] < 0:
                raise ValueError('num_fewshot must be a list of one number')
            path = path_inside(folder, f"eval_data/{text_of(task, 'dataset_uri')}")
            items = read_items(path, text_of(task, 'icl_task_type'))
            # as nanochat does, because examples are drawn from the shuffled items
            random.Random(1337).shuffle(items)
            delimiter = text_of(task, 'continuation_delimiter', ' ')
            read.append((label, items, counts[0], delimiter, guessing[label]))
        if not read:
            raise ValueError('icl_tasks is empty')
    except UserError:
        raise
    except (yaml.YAMLError, csv.Error, LookupError, AttributeError, TypeError, ValueError,
            ArithmeticError, RecursionError) as error:
        reason = f'{type(error).__name__}: {str(error)[:300]}'
        raise UserError(f'{folder} is not in the form of the CORE bundle ({reason})') from None
    return read


def text_of(task, name, default=None):
    """Returns the text in field `name` of a task of a bundle, or `default` if the field is missing.
    Raises ValueError for a value of another type. The value is not converted, because a few bytes
    of YAML (aliases) can expand to gigabytes of text."""
    value = task.get(name, default)
    if not isinstance(value, str):
        raise ValueError(f'{name} must be a text')
    return value


def read_tasks(path):
    """Returns a list of tasks in the form of read_bundle: (name; items; number of solved examples
    in a prompt; delimiter; accuracy of guessing). If `path` is a folder, these are the tasks of the
    bundle. If `path` is a file, there is one task: the file's name without its suffix, its items, 0
    examples, a space, and None as the accuracy of guessing."""
    if os.path.isdir(path):
        return read_bundle(path)
    return [(Path(path).stem, read_items(path), 0, ' ', None)]


# -----------------------------------------------------------------------------
# evaluation

def encode_item(items, index, n_examples, delimiter, in_bundle):
    """Returns the rows (ids, start) of items[index], one for each option; ids[start:] are scored.
    n_examples, delimiter: see read_bundle. in_bundle: whether the task is of a bundle.

    If not in_bundle, encodes the item as lm-eval does, see encode_pair and encode_answer in
    jax_text.py. If in_bundle, encodes it as nanochat does: n_examples other items with their
    answers come first, and the kind of the item decides which tokens are scored:
    - multiple choice: the tokens after the common beginning of all options;
    - schema: the common end of all options;
    - language modeling: the continuation."""
    item = items[index]
    if item['kind'] == 'chat':
        return [model.encode_answer(item['messages'])]
    if not in_bundle:
        return [model.encode_pair(*pair) for pair in pairs(item, delimiter)]

    # the examples, then the prompts of all options
    others = items[:index] + items[index + 1:]
    if n_examples > len(others):
        raise UserError(f'the task takes {n_examples} other items as examples, but there are '
                        f'only {len(others)}')
    before = ''
    for other in random.Random(1234 + index).sample(others, n_examples):
        right = other.get('gold', 0)
        before += prompts_of(other, delimiter)[right] + '\n\n'
    prompts = prompts_of(item, delimiter)
    rows = [model.encode_document(before + prompt) for prompt in prompts]

    # the index of the first scored token of each row
    starts = [len(os.path.commonprefix(rows))] * len(rows)
    if item['kind'] == 'schema':
        n_scored = len(os.path.commonprefix([ids[::-1] for ids in rows]))
        starts = [len(ids) - n_scored for ids in rows]
    elif item['kind'] == 'language_modeling':
        context = model.encode_document((before + item['context'].strip() + delimiter).strip())
        starts = [len(os.path.commonprefix([rows[0], context]))]
    # at least one token is context, and at least one is scored
    return [(ids, max(1, min(start, len(ids) - 1))) for ids, start in zip(rows, starts)]


def agree_on_tokens(ids):
    """Raises UserError if the processes have other token ids, because their tokenizers differ."""
    check_agreement('tokenizers', {'the digest of the tokens': digest(ids)})


def prompts_of(item, delimiter):
    """Returns one text for each option of an item: the context, the delimiter and the
    continuation. item: a row of a task in a bundle (a folder of tasks, see above)."""
    prompts = []
    for context, continuation in pairs(item, delimiter):
        if item['kind'] == 'language_modeling':
            context = context.strip()
        prompts.append(context + continuation)
    return prompts


def evaluate_task(name, items, n_examples, delimiter, guessing):
    """Returns {'accuracy', 'accuracy_norm', 'n'} of a task. For a task of a CORE bundle (see
    read_bundle), the result also has 'centered': 0 is as good as guessing, 1 is every item right.

    'accuracy' chooses the option with the highest log-probability, 'accuracy_norm' the option with
    the highest log-probability per character. A task of a bundle is evaluated as in nanochat:
    'accuracy' chooses the option with the highest log-probability per token, and prompts are cut to
    the number of tokens that the flag max_length gives.

    The parameters are those of a task, see read_tasks. guessing: the accuracy of guessing in a task
    of a bundle; None for any other task."""
    # The rows of all items: one for each option.
    in_bundle = guessing is not None
    rows = []
    for i, item in enumerate(items):
        rows.append(at(item['place'], encode_item, items, i, n_examples, delimiter, in_bundle))
    agree_on_tokens(rows)

    # The length to which prompts are cut.
    task_options = dict(options)
    if in_bundle:
        task_options['max_length'] = max(1, (max_length or model.config.block_size) - 1)

    # For each item: the likeliest option by both kinds of accuracy, and whether it is right.
    right = []
    right_norm = []
    for item, scores in zip(items, model.score(rows, **task_options)):
        sums = np.array([found.sum(dtype=np.float64) for found, _ in scores])
        n_tokens = [len(found) for found, _ in scores]
        n_characters = [len(continuation) for _, continuation in pairs(item, '')]
        best = int(np.argmax(sums / n_tokens if in_bundle else sums))
        best_norm = int(np.argmax(sums / n_characters))
        if 'gold' in item:
            gold = item['gold']
        else:  # a continuation is right if each of its tokens is the likeliest
            are_likeliest = scores[0][1]
            gold = 0 if are_likeliest.all() else None
        right.append(best == gold)
        right_norm.append(best_norm == gold)
        lines.append({'task': name, 'item': item['index'], 'logprobs': sums.tolist(),
                      'best': best})

    # The means; 'centered' is 0 for guessing and 1 for all right.
    found = {'accuracy': float(np.mean(right)), 'accuracy_norm': float(np.mean(right_norm)),
             'n': len(items)}
    if in_bundle:
        found['centered'] = (found['accuracy'] - guessing) / (1 - guessing)
    return found


def note(line):
    """Prints a line on stderr, in process 0 only. The results are on stdout."""
    if master:
        warn(line)


def evaluate_text(path):
    """Returns {'bits_per_byte', 'nats_per_token', 'perplexity', 'tokens', 'bytes'} of the text of a
    file. Warns if the text spells special tokens, because a data set has other tokens there. Warns
    if the file has rows, because a data set has only their texts."""
    content = texts[path]
    if jax.process_count() > 1:
        agree_on_tokens(at(path, model.encode_document, content))
    log = functools.partial(model.logprobs, **options)
    (ids, found), = at(path, log, [content])
    special = getattr(model.tokenizer, 'special_ids', {model.tokenizer.start_token})
    n_special = sum(id in special for id in ids)
    if n_special:
        note(f'{path}: {n_special:,} of {len(ids):,} tokens are special tokens that the text '
             'spells out, such as <|endoftext|>; in a data set they would be plain text')
    if path.lower().endswith((*JSON_LINES, '.json', '.csv', '.tsv')):
        note(f'{path}: the file is scored as it is, with the keys and marks of its rows')
    # count the bytes of scored tokens: the first one is scored only after a token that begins a
    # document
    if model.tokenizer.start_token is None:
        n_bytes = len(model.tokenizer.decode(ids).encode())
    else:
        n_bytes = len(content.encode())

    # All tokens together, in nats; as bits, divided by the bytes of the tokens.
    nats = -float(found.sum(dtype=np.float64))
    return {'bits_per_byte': nats / math.log(2) / n_bytes, 'nats_per_token': nats / len(ids),
            'perplexity': math.exp(nats / len(ids)), 'tokens': len(ids), 'bytes': n_bytes}


def report(group, name, evaluate, *args):
    """Calls evaluate(*args), which evaluates a text or a task and returns a dict of figures. Keeps
    the dict as results[group][name], and prints it with the seconds that the evaluation took.
    group: 'texts' or 'tasks'. name: the name of the text or task."""
    started = time.perf_counter()
    found = evaluate(*args)
    results[group][name] = found
    values = []
    for key, value in found.items():
        values.append(f'{key} {value:,.4f}' if isinstance(value, float) else f'{key} {value:,}')
    print(f"{name}: {', '.join(values)}; {time.perf_counter() - started:.1f} s")


# -----------------------------------------------------------------------------
# jax is imported after the flags and files are read, so that --help and their errors come at once
texts = {path: read_text(path, newline='') for path in list_paths(text)}
all_tasks = []
for path in list_paths(tasks):
    all_tasks += read_tasks(path.rstrip('/'))
if len({name for name, *_ in all_tasks}) < len(all_tasks):
    raise UserError('two of the tasks have the same name: evaluate them one after the other')
import jax
import numpy as np

from jax_devices.processes import check_agreement, initialize_distributed
from jax_devices.setup import configure_process, describe_environment
from jax_text import load

configure_process(device)
initialize_distributed(coordinator_address, num_processes, process_id)
master = jax.process_index() == 0  # the process that prints; all run the same program
if not master:
    sys.stdout = open(os.devnull, 'w')
contents = {'the digest of texts': digest(texts), 'the digest of tasks': digest(all_tasks)}
check_agreement('flags, texts or tasks', {**flags, **contents}, {'process_id'})

# the model
is_run = init_from == 'resume'
model = load(
    out_dir if is_run else init_from, checkpoint=checkpoint if is_run else '', base=base,
    dataset=dataset, device=device, dtype=dtype, quantize=quantize, tensor=tensor, expert=expert)
note(model.title)

# texts and tasks, one after the other
options = {'max_length': max_length, 'batch_size': batch_size, 'cache_dtype': cache_dtype}
results = {'texts': {}, 'tasks': {}}
lines = []  # the lines of the file for --logprobs
for path in texts:
    report('texts', path, evaluate_text, path)
for task in all_tasks:
    report('tasks', task[0], evaluate_task, *task)
centered = [task['centered'] for task in results['tasks'].values() if 'centered' in task]
if centered:
    results['core'] = float(np.mean(centered))
    print(f"CORE: {results['core']:.4f}")

# a line of JSON with all results, for programs: to a file, and to stdout unless it is a terminal
everything = json.dumps({
    'program': 'eval_jax', 'checkpoint': model.about, 'settings': {**flags, 'dtype': model.config.dtype},
    'environment': describe_environment(model.layout.devices), 'results': results})
if not sys.stdout.isatty():
    print(everything)
if master:
    if output:
        write_text(output, everything + '\n')
    if logprobs:
        write_text(logprobs, ''.join(json.dumps(line) + '\n' for line in lines))
