"""Saves a trained model as a Hugging Face folder with a model card, or as a GGUF file for
llama.cpp; or saves the updates of a LoRA run as an adapter for peft.

$ python export_jax.py --out_dir=out-mine --folder=my-model --dtype=bfloat16
$ python export_jax.py --init_from=nanogpt/out/ckpt.pt --folder=my-model
$ python export_jax.py --out_dir=out-mine --gguf=my-model.gguf --dtype=q8_0
$ python export_jax.py --out_dir=out-lora --adapter=my-adapter"""
import os
import signal
import shlex
import string
import sys
import tempfile
from pathlib import Path

from jax_flags import (
    DTYPES, INSTALLED, UserError, check_choice, check_needs, check_source, is_read, read_flags,
    read_json, require_package, start_script, warn, write_text)

# -----------------------------------------------------------------------------
init_from = 'resume' # 'resume' (from out_dir), a Hugging Face folder or 'owner/name', a nanoGPT ckpt.pt
out_dir = 'out' # the run to export
checkpoint = 'best' # 'best' (lowest validation loss) or 'latest'
base = '' # where the pretrained model of a LoRA run is now, if it has moved
folder = '' # the new folder
gguf = '' # or a new file, model.gguf
adapter = '' # or a new folder for peft, with the updates of a LoRA run
dtype = 'float32' # dtype of the weights: 'float32', 'bfloat16', 'float16'; in a GGUF file 'float32', 'float16', 'q8_0'
shard_gb = 5.0 # weights that need more are split into several files
# -----------------------------------------------------------------------------
start_script()
flags, given = read_flags(__file__, globals())
globals().update(flags)
check_source(flags, given)
if len([path for path in (folder, gguf, adapter) if path]) != 1:
    raise UserError('name one new folder or file: --folder=my-model, --gguf=model.gguf or '
                    '--adapter=my-adapter')
check_needs('export_jax', flags, given)
if gguf and not gguf.endswith('.gguf'):
    raise UserError(f'the name of a GGUF file ends in .gguf, not {gguf!r}')
if adapter and init_from != 'resume':
    raise UserError(f'adapter exports what a LoRA run has trained, but init_from={init_from} is a '
                    'model: name the run with --out_dir')
if not gguf:
    check_choice('dtype', dtype, DTYPES)
if shard_gb <= 0:
    raise UserError(f'shard_gb must be more than 0, not {shard_gb}')

if gguf:
    require_package('gguf')

# jax is imported after the flags, so that --help and a wrong flag are answered at once
from jax_devices.setup import setup_jax_environment
from jax_hub.folders import (
    find_config_json, is_on_hub, kept_config_json, local_path, name_on_hub)
from jax_hub.gguf_files import why_no_gguf
from jax_hub.tokenizer_files import write_tokenizer
from jax_hub.tokenizers import HFTokenizer, describe_tokenizer, load_tokenizer
from jax_pretrained import open_pretrained, public_name, save_adapter, save_pretrained
from jax_run.checkpoints import run_folder
from jax_run.compare import count_tokens
from jax_run.load import load_run, load_updates
from jax_run.log import read_metrics
from jax_transformer import count_params

# from here on Ctrl-C raises an exception, so that unfinished files are removed
signal.signal(signal.SIGINT, signal.default_int_handler)

# The flags of training that a model card lists, if the run read them.
RECIPE = (
    'init_from', 'max_iters', 'gradient_accumulation_steps', 'batch_size', 'block_size',
    'optimizer', 'dtype', 'learning_rate', 'min_lr', 'lr_schedule', 'warmup_iters',
    'lr_decay_iters', 'earlier_ends', 'weight_decay', 'beta1', 'beta2', 'grad_clip', 'dropout',
    'lora_rank', 'lora_alpha', 'quantize', 'beta', 'length_normalized', 'seed')

# The flags of RECIPE that have no effect with decay_lr=False.
SCHEDULE = ('min_lr', 'lr_schedule', 'warmup_iters', 'lr_decay_iters', 'earlier_ends')


def model_card(family, name):
    """Returns the README.md of the exported folder: the model, its data, recipe and figures, and
    how to load it.

    family: model_type in the model's config.json. name: the folder's name."""
    # The origin of the weights.
    base = ''
    origin = f'Converted from {public_name(init_from)}.'
    if init_from == 'resume':
        check_run(meta['flags'])
        run = {**meta['flags'], 'init_from': meta.get('origin', meta['flags']['init_from'])}
        base = base_on_hub(run['init_from'])
        origin = describe_run(run, meta['iter_num'])

    # How to use it: as a chat or to continue a text, and as a GGUF file.
    has_tokenizer = os.path.exists(os.path.join(folder, 'tokenizer.json'))
    if not has_tokenizer:
        origin += '\n\nIts tokenizer is missing: put its tokenizer.json into this folder first.'
    prompt = "'Once upon a time'"
    if has_tokenizer and HFTokenizer(folder).chat_template:
        prompt = "[{'role': 'user', 'content': 'Hello'}]"
    to_gguf = f'export_jax.py --init_from={name} --gguf={name}.gguf'
    if why_no_gguf(config, family):
        to_gguf = f'convert_hf_to_gguf.py {name} --outfile {name}.gguf'

    template = Path(__file__).parent / 'jax_hub' / 'model_card.md'
    card = template.read_text(encoding='utf-8')
    return card.format(
        family=family, base=base, name=name, dtype=dtype, config=config, origin=origin,
        to_gguf=to_gguf, n_params=count_params(params, non_embedding=False),
        n_new=min(50, config.block_size // 2), prompt=prompt)


def check_run(run):
    """Checks that `run`, the flags in a checkpoint, has the flags of train_jax.py that a model card
    needs. Raises UserError otherwise."""
    numbers = ('gradient_accumulation_steps', 'batch_size', 'block_size')
    texts = ('dataset', 'init_from')
    has_numbers = all(type(run.get(name)) is int for name in numbers)
    has_texts = all(type(run.get(name)) is str for name in texts)
    if not has_numbers or not has_texts:
        raise UserError(f'{out_dir} was not written by train_jax.py: the flags of its checkpoint '
                        'are incomplete')


def base_on_hub(source):
    """Returns the card's line about the model on the hub that a run started from; '' if the run
    started from no such model. source: the run's init_from."""
    return f'\nbase_model: {name_on_hub(source)}' if is_on_hub(source) else ''


def describe_run(run, iteration):
    """Returns the part of the model card about the training: how long the training was, then a
    table of losses and settings.

    run: the flags of the run, {name: value}. iteration: the iteration of the checkpoint."""
    records = list(read_metrics(run_folder(out_dir).files))

    # The losses of the checkpoint's evaluation.
    table = {}
    for row in records:
        if row['iter'] == iteration and 'val_loss' in row:
            table = {key: f'{x:.4f}' for key, x in row.items() if isinstance(x, float)}
            break

    # The settings that the run read.
    read = dict(run)
    if not run.get('decay_lr', True):
        for key in SCHEDULE:
            read.pop(key, None)
    facts = dict(read)
    facts['is_pairs'] = any('margin' in row for row in records)
    for key in RECIPE:
        if read.get(key) and is_read('train_jax', key, facts):
            table[key] = read[key]
    if 'init_from' in table and table['init_from'] != 'scratch':
        table['init_from'] = public_name(table['init_from'])

    # The length of the training, then the table.
    n_tokens = count_tokens(run, iteration, meta.get('manifest') or {})
    text = (f"Trained for {iteration:,} iterations, {n_tokens:,} tokens, on the data set "
            f"{os.path.basename(run['dataset'])}.\n\n| figure, setting | |\n|---|---|")
    for key, x in table.items():
        text += f'\n| {key} | {x} |'
    return text


# -----------------------------------------------------------------------------
# the message at the end

def report(path, description):
    """Prints the names and sizes of the files that were written, and, for a folder with a
    config.json, a command that samples from it.

    path: the new folder or file. description: the description of the model's tokenizer, see
    load_tokenizer; {} if the tokenizer is unknown."""
    # The sizes of the folder's files, or of the GGUF file.
    written = Path(path).expanduser()
    is_folder = written.is_dir()
    files = sorted(written.iterdir()) if is_folder else [written]
    sizes = {file.name: file.stat().st_size for file in files if file.is_file()}
    print(f'saved {path}, weights in {dtype}, {readable(sum(sizes.values()))}')
    if is_folder:
        for name, size in sizes.items():
            print(f'  {name}, {readable(size)}')

    if not description:
        print('its tokenizer is unknown: put its tokenizer.json there before you sample')
    if 'config.json' in sizes:  # this project can read the folder, too
        print(f'next: {sample_command(path, description)}')


def readable(n_bytes):
    """Returns a number of bytes as a text, in bytes or MB."""
    if n_bytes < 1e5:
        return f'{n_bytes:,} bytes'
    return f'{n_bytes / 1e6:,.1f} MB'


def sample_command(path, description):
    """Returns a shell command that samples from the export. The prompt in the command is a text
    that the tokenizer encodes and decodes unchanged. If first_known finds no such text, the command
    has no prompt. path, description: see report."""
    # a text, or a question for a chat; GPT-2's tokenizer can encode any text, so it need not be
    # loaded (it may have to be downloaded)
    kind = description.get('kind')
    text = 'Once upon a time'
    flags = f'--init_from={shlex.quote(path)} --num_samples=1'
    if kind in ('char', 'folder'):
        tokenizer = load_tokenizer(description)
        if tokenizer.chat_template:
            text = 'Hello'
            flags += ' --chat=True'
        text = first_known(tokenizer, (text, *string.ascii_letters))
    if text:
        flags += f' --start={shlex.quote(text)}'
    if INSTALLED.is_dir():
        return f'sample-jax {flags}'
    script = os.path.join(os.path.dirname(sys.argv[0]), 'sample_jax.py')
    return f'python {shlex.quote(script)} {flags}'


def first_known(tokenizer, texts):
    """Returns the first of the texts that the tokenizer encodes and decodes unchanged, or '' if
    there is none."""
    for candidate in texts:
        try:
            ids = tokenizer.encode(candidate)
        except UserError:  # the text has unknown characters
            continue
        if ids and tokenizer.decode(ids) == candidate:
            return candidate
    return ''


# -----------------------------------------------------------------------------
# load, save, describe

setup_jax_environment('cpu')

# The model, the description of its tokenizer, and its config.json, which a run keeps from the model
# that it started from. For an adapter, the updates of the LoRA run alone.
if adapter:
    config, updates, lora, meta = load_updates(out_dir, checkpoint, base)
    description = meta['tokenizer']
elif init_from == 'resume':
    config, params, meta = load_run(out_dir, checkpoint, base=base)
    description = meta['tokenizer']
    kept = kept_config_json(run_folder(out_dir).files)
    config_json = kept if os.path.exists(kept) else None
else:
    if base:
        raise UserError(f'base is for a LoRA run, and {init_from} is none')
    path = local_path(init_from)
    config, params = open_pretrained(path)
    config_json = find_config_json(path)
    description = describe_tokenizer(path, config.vocab_size) or {}

# A folder gets the files of the tokenizer; a GGUF file contains the tokenizer.
tokenizer = description
with tempfile.TemporaryDirectory() as made:
    if gguf and not tokenizer:
        raise UserError("a GGUF file holds the tokenizer, and this model's is unknown: put its "
                        'tokenizer.json beside the weights')
    kind = tokenizer.get('kind')
    try:
        if kind == 'gpt2' or kind == 'char' and not gguf:
            write_tokenizer(tokenizer, made)
            tokenizer = {'kind': 'folder', 'path': made}
        elif not tokenizer:
            print('without a tokenizer.json, because the tokenizer is unknown')
            tokenizer = None
    except UserError as error:  # GPT-2's tokenizer cannot be downloaded
        if gguf:
            raise
        warn(f'without a tokenizer.json: {error}')
        tokenizer = None
    if adapter:
        save_adapter(updates, config, adapter, base=lora['base'], rank=lora['rank'],
                     alpha=lora['alpha'], dtype=dtype, tokenizer=tokenizer)
    else:
        save_pretrained(params, config, gguf or folder, config_json=config_json, dtype=dtype,
                        tokenizer=tokenizer, shard_bytes=int(shard_gb * 1e9))

# The model card of a folder.
target = folder or gguf or adapter
if folder:
    folder = os.path.abspath(os.path.expanduser(folder))
    family = read_json(os.path.join(folder, 'config.json'))['model_type']
    card = model_card(family, os.path.basename(folder))
    try:
        write_text(os.path.join(folder, 'README.md'), card)
    except OSError as error:
        raise UserError(f'cannot write the README.md of {folder} ({error.strerror}); the model '
                        'there is complete') from None
if adapter:
    print(f"an update of rank {lora['rank']} for {lora['base']}; adapter_config.json names it "
          f"{public_name(lora['base'])}")
    if lora['quantize']:
        print(f"the run has trained with that model in {lora['quantize']}; on its weights as they "
              'are, the logits differ slightly')
report(target, description)
