"""Hostile files: every kind of file that is read, mutated by seed, and what must become of it.

tests/test_hostile_files.py reads 20 of each kind, the section `files` of tests/campaign.py as many
as a night allows. A reader has to end within LIMIT_S with success or a UserError: see READERS for
what is read, and read_input for what counts as a finding. The mutations are in tests/mutations.py.
"""

import contextlib
import csv
import functools
import json
import os
import random
import resource
import runpy
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jax_files.checkpoints import checksum
from jax_files.data import load_mixture_meta
from jax_files.metrics import MetricsLog, plot_losses
from jax_files.sources import open_data
from jax_files.tokenizers import (
    copy_tokenizer,
    describe_tokenizer,
    load_tokenizer,
    same_tokens,
    write_char_tokenizer,
)
from jax_files.weight_files import local_path
from jax_flags import SamplingOptions, UserError
from jax_lora import load_run
from jax_pretrained import load_pretrained, save_pretrained
from jax_transformer import GPTConfig
from tests.common import (
    CHAT_TEMPLATE,
    FAMILIES,
    GOLDEN,
    MODEL,
    ROOT,
    TEXT,
    random_params,
    run_script,
    signals_restored,
    succeeded,
    write_speaking_llama,
    write_text_dataset,
)
from tests.mutations import (
    MARKER,
    mutate_bytes,
    mutate_csv,
    mutate_gguf,
    mutate_json,
    mutate_lines,
    mutate_numbers,
    mutate_parquet,
    mutate_safetensors,
    mutate_template,
    mutate_text,
    mutate_torch,
    mutate_yaml,
)

TINY_RUN = [
    *MODEL,
    '--max_iters=2',
    '--lr_decay_iters=2',
    '--warmup_iters=1',
    '--eval_interval=1',
    '--eval_iters=1',
    '--device=cpu:0',
]
LIMIT_S = 12  # of an input, by the clock on the wall: two chats, of which a template may take 5 s each
HANG_S = 3 * LIMIT_S  # with that
LIMIT_BYTES = 2 * 2**30  # of memory that an input may take
SECRET = 'a text outside of the folder'  # what the paths of the attacks lead to

# -----------------------------------------------------------------------------
# honest folders, of which one file is mutated


def write_bpe_tokenizer(folder):
    """Makes `folder` a byte-level BPE with a chat template and all other files."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        processors,
        trainers,
    )

    from jax_files.gguf_files import QWEN2_SPLIT

    folder.mkdir(parents=True)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), 'isolated'),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    bpe.train_from_iterator([TEXT] * 9, trainer)
    special = ['<s>', '</s>', '<user>', '<model>']
    bpe.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    begin = bpe.token_to_id('<s>')
    bpe.post_processor = processors.TemplateProcessing('<s> $0', special_tokens=[('<s>', begin)])
    bpe.save(str(folder / 'tokenizer.json'))
    write_settings(folder, bpe)


def write_settings(folder, tokenizer):
    """Writes the files that lie beside a tokenizer.json, with a chat template."""
    ids = {token: tokenizer.token_to_id(token) for token in ('<s>', '</s>', '<user>', '<model>')}
    added = {
        str(id): {
            'content': token,
            'special': True,
            'lstrip': False,
            'rstrip': False,
            'normalized': False,
            'single_word': False,
        }
        for token, id in ids.items()
    }
    names = {'bos_token': '<s>', 'eos_token': {'content': '</s>', 'special': True}}
    extra = {'additional_special_tokens': ['<user>', '<model>']}
    contents = {
        'tokenizer_config.json': names
        | extra
        | {
            'added_tokens_decoder': added,
            'tokenizer_class': 'PreTrainedTokenizerFast',
            'add_bos_token': True,
            'clean_up_tokenization_spaces': False,
            'model_max_length': 64,
            'extra_special_tokens': {'user_token': '<user>'},
        },
        'special_tokens_map.json': names | extra,
        'added_tokens.json': ids,
        'generation_config.json': {
            'bos_token_id': ids['<s>'],
            'eos_token_id': [ids['</s>']],
            'do_sample': True,
            'temperature': 0.7,
            'top_k': 20,
            'top_p': 0.9,
            'min_p': 0.05,
            'repetition_penalty': 1.1,
        },
        'config.json': {
            'model_type': 'llama',
            'vocab_size': tokenizer.get_vocab_size(),
            'eos_token_id': ids['</s>'],
        },
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content))
    (folder / 'chat_template.jinja').write_text(CHAT_TEMPLATE)


def write_unigram_tokenizer(folder):
    """Makes `folder` a Unigram model with byte fallback, as SentencePiece's become."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    folder.mkdir(parents=True)
    texts = ['▁', '▁the', '▁quick', 'fox', *'abcdefghijklmnopqrstuvwxyz']
    pieces = [('<unk>', 0.0)] + [(f'<0x{byte:02X}>', -20.0) for byte in range(256)]
    pieces += [(text, -1.0 - i) for i, text in enumerate(texts)]
    unigram = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    unigram.normalizer = normalizers.Replace(' ', '▁')
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.decoder = decoders.Sequence(
        [
            decoders.Replace('▁', ' '),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(' ', 1, 0),
        ]
    )
    unigram.add_special_tokens(
        [AddedToken(token) for token in ('<s>', '</s>', '<user>', '<model>')]
    )
    unigram.save(str(folder / 'tokenizer.json'))
    write_settings(folder, unigram)


def write_letters(folder):
    """Makes `folder` a tokenizer of letters with a chat template, without weights."""
    write_speaking_llama(folder)
    (folder / 'model.safetensors').unlink()
    settings = json.loads((folder / 'tokenizer_config.json').read_text())
    end = "{{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}"
    settings['chat_template'] = CHAT_TEMPLATE.replace('{{ m.content }}', end)
    (folder / 'tokenizer_config.json').write_text(json.dumps(settings))
    (folder / 'chats.jsonl').write_text('\n'.join(json.dumps(chat) for chat in CHATS * 3))
    (folder / 'forms.jsonl').write_text('\n'.join(json.dumps(row) for row in FORMS * 2))
    (folder / 'pairs.jsonl').write_text('\n'.join(json.dumps(pair) for pair in PAIRS * 3))


def write_old_bpe(folder):
    """Makes `folder` a BPE as older versions of transformers wrote it."""
    write_bpe_tokenizer(folder)
    model = json.loads((folder / 'tokenizer.json').read_text())['model']
    merges = [merge if isinstance(merge, str) else ' '.join(merge) for merge in model['merges']]
    (folder / 'vocab.json').write_text(json.dumps(model['vocab']))
    (folder / 'merges.txt').write_text('#version: 0.2\n' + '\n'.join(merges) + '\n')
    (folder / 'tokenizer.json').unlink()
    settings = json.loads((folder / 'tokenizer_config.json').read_text())
    settings['tokenizer_class'] = 'GPT2Tokenizer'
    (folder / 'tokenizer_config.json').write_text(json.dumps(settings))


def write_char_folder(folder):
    """Makes `folder` a vocabulary of characters as a tokenizer.json."""
    folder.mkdir(parents=True)
    write_char_tokenizer(sorted(set(TEXT)), folder)
    (folder / 'tokenizer_config.json').write_text(json.dumps({'eos_token': '\n'}))


def write_gguf_file(folder, tokenizer):
    """Makes `folder` hold model.gguf, a Llama with the tokenizer that a description means."""
    folder.mkdir(parents=True)
    config = GPTConfig(
        block_size=32,
        vocab_size=load_tokenizer(tokenizer).vocab_size,
        n_layer=1,
        n_head=2,
        n_kv_head=1,
        n_embd=32,
        n_inner=32,
        norm='rms',
        position='rope',
        mlp='swiglu',
        bias=False,
        tied_head=False,
    )
    save_pretrained(
        random_params(config), config, folder / 'model.gguf', tokenizer=tokenizer, dtype='q8_0'
    )


def write_gguf_bpe(folder):
    """Makes `folder` hold a GGUF file with a BPE."""
    with tempfile.TemporaryDirectory() as made:
        write_bpe_tokenizer(Path(made, 'bpe'))
        write_gguf_file(folder, {'kind': 'folder', 'path': str(Path(made, 'bpe'))})


def write_gguf_chars(folder):
    """Makes `folder` hold a GGUF file with a vocabulary of characters."""
    write_gguf_file(folder, {'kind': 'char', 'chars': ''.join(sorted(set(TEXT)))})


def write_counted_dataset(folder):
    """Makes `folder` a data set of text as prepare.py writes it, with its counts in meta.json."""
    write_text_dataset(folder)
    meta = json.loads((folder / 'meta.json').read_text())
    for split in ('train', 'val'):
        meta[f'{split}_tokens'] = (folder / f'{split}.bin').stat().st_size // 2
    meta['max_id'] = meta['vocab_size'] - 1
    (folder / 'meta.json').write_text(json.dumps(meta))


def write_folder_dataset(folder):
    """Makes `folder` a data set with the ids of a tokenizer.json beside it."""
    write_counted_dataset(folder)
    write_char_folder(folder / 'tokenizer')
    meta = json.loads((folder / 'meta.json').read_text())
    meta['tokenizer'] = {'kind': 'folder', 'path': 'tokenizer'}
    (folder / 'meta.json').write_text(json.dumps(meta))


def write_masked_dataset(folder, **keys):
    """Makes `folder` a data set of 16 rows with masks, and these keys in its meta.json."""
    folder.mkdir(parents=True)
    n_rows = 16
    rng = np.random.default_rng(0)
    for split in ('train', 'val'):
        rng.integers(20, size=17 * n_rows).astype(np.uint16).tofile(folder / f'{split}.bin')
        mask = np.tile(np.uint8([2] + [0] * 4 + [1] * 12), n_rows)
        (mask if 'row_length' in keys else np.minimum(mask, 1)).tofile(folder / f'{split}_mask.bin')
        np.arange(17, 17 * n_rows + 1, 17, dtype=np.int64).tofile(folder / f'{split}_ends.bin')
    meta = {
        'vocab_size': 20,
        'dtype': 'uint16',
        'tokenizer': {'kind': 'char', 'chars': 'abcdefghijklmnopqrst'},
        'train_tokens': 17 * n_rows,
        'val_tokens': 17 * n_rows,
        'max_id': 19,
    }
    (folder / 'meta.json').write_text(json.dumps(meta | keys))


def write_run(folder):
    """Makes `folder` the out_dir of a short run of train_jax.py."""
    dataset = write_text_dataset(folder.with_name(f'{folder.name}_data'))
    succeeded(run_script('train_jax.py', f'--dataset={dataset}', f'--out_dir={folder}', *TINY_RUN))
    shutil.rmtree(dataset)


def write_kept_config(folder):
    """Makes `folder` what export_jax.py reads of a run that trained a Llama."""
    shutil.copytree(FAMILIES / 'llama', folder)
    (folder / 'out' / 'tokenizer').mkdir(parents=True)
    shutil.copyfile(folder / 'config.json', folder / 'out' / 'tokenizer' / 'config.json')


def write_bin_shards(folder):
    """Makes `folder` a model whose pytorch_model.bin has an index."""
    shutil.copytree(GOLDEN / 'hf_bin', folder)
    shard = 'pytorch_model-00001-of-00001.bin'
    (folder / 'pytorch_model.bin').rename(folder / shard)
    header = (GOLDEN / 'hf' / 'model.safetensors').read_bytes()
    size = int.from_bytes(header[:8], 'little')
    names = [name for name in json.loads(header[8:8 + size]) if name != '__metadata__']
    index = {'metadata': {}, 'weight_map': dict.fromkeys(names, shard)}
    (folder / 'pytorch_model.bin.index.json').write_text(json.dumps(index))


def write_adapter(folder):
    """Makes `folder` an adapter of peft with its base in it."""
    shutil.copytree(GOLDEN / 'peft' / 'plain', folder)
    shutil.copytree(FAMILIES / 'llama', folder / 'llama')


def write_metrics(folder):
    """Makes `folder` hold the metrics.jsonl of a run."""
    folder.mkdir(parents=True)
    records = [
        {'iter': i, 'loss': 3.0 - i / 20, 'lr': 1e-3, 'grad_norm': 1.0, 'time_ms': 3.5}
        for i in range(20)
    ]
    records.insert(
        10, {'iter': 10, 'train_loss': 2.5, 'val_loss': 2.6, 'val_bpb': 3.7, 'train_bpb': 3.6}
    )
    records.append({'iter': 20, 'train_loss': 2.0, 'val_loss': 2.1, 'val_bpb': None})
    (folder / 'metrics.jsonl').write_text('\n'.join(map(json.dumps, records)) + '\n')


def write_texts(folder):
    """Makes `folder` hold documents as files of every kind that data/text reads."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True)
    rows = [{'text': f'{TEXT.strip()} {i} é☃', 'id': i} for i in range(24)]
    (folder / 'text.jsonl').write_text('\n'.join(map(json.dumps, rows)) + '\n')
    (folder / 'text.json').write_text(json.dumps(rows))
    with open(folder / 'text.csv', 'w', encoding='utf-8', newline='') as file:
        writer = csv.DictWriter(file, ['id', 'text'])
        writer.writeheader()
        writer.writerows(rows)
    pq.write_table(pa.Table.from_pylist(rows), folder / 'text.parquet', row_group_size=8)


def write_tasks(folder):
    """Makes `folder` a bundle of tasks, and a file of items beside them."""
    kinds = {
        'multiple_choice': {'query': 'the fox', 'choices': ['runs', 'jumps'], 'gold': 1},
        'schema': {
            'context_options': ['the fox', 'the dog'],
            'continuation': 'runs away',
            'gold': 0,
        },
        'language_modeling': {'context': 'the quick', 'continuation': 'fox'},
    }
    (folder / 'eval_data').mkdir(parents=True)
    tasks, table = [], 'Eval Task,Task Category,Random baseline\n'
    for kind, item in kinds.items():
        (folder / 'eval_data' / f'{kind}.jsonl').write_text(f'{json.dumps(item)}\n' * 4)
        tasks.append(
            f'- label: my_{kind}\n  dataset_uri: {kind}.jsonl\n  num_fewshot:\n  - 1\n'
            f"  icl_task_type: {kind}\n  continuation_delimiter: ' '\n"
        )
        table += f'my_{kind},a,25\n'
    (folder / 'core.yaml').write_text('icl_tasks:\n' + ''.join(tasks))
    (folder / 'eval_meta_data.csv').write_text(table)
    (folder / 'task.jsonl').write_text('\n'.join(map(json.dumps, kinds.values())) + '\n')


def copied(source):
    """The function that makes a folder a copy of this one."""
    return lambda folder: shutil.copytree(source, folder)


HONEST = {  # name: the function that makes the folder
    'gpt2': copied(GOLDEN / 'hf'),
    'sharded': copied(GOLDEN / 'hf_sharded'),
    'bin': copied(GOLDEN / 'hf_bin'),
    'bin shards': write_bin_shards,
    'nanogpt': copied(GOLDEN / 'nanogpt'),
    'gguf bpe': write_gguf_bpe,
    'gguf char': write_gguf_chars,
    **{path.name: copied(path) for path in sorted(FAMILIES.iterdir()) if path.is_dir()},
    'bpe': write_bpe_tokenizer,
    'unigram': write_unigram_tokenizer,
    'char': write_char_folder,
    'letters': write_letters,
    'old bpe': write_old_bpe,
    'kept': write_kept_config,
    'adapter': write_adapter,
    'data': write_counted_dataset,
    'folder data': write_folder_dataset,
    'masked': functools.partial(write_masked_dataset, kind='chats'),
    'rows': functools.partial(write_masked_dataset, kind='chats', row_length=17),
    'pairs': functools.partial(write_masked_dataset, kind='pairs'),
    'metrics': write_metrics,
    'texts': write_texts,
    'tasks': write_tasks,
    'run': write_run,
}


def make_honest(folder, names=HONEST):
    """Makes the honest folders of these names in `folder`, those that are not there yet."""
    for name in names:
        if not (folder / name).exists():
            HONEST[name](folder / name)

# -----------------------------------------------------------------------------
# readers: what the scripts do with a folder

MESSAGES = [{'role': 'user', 'content': 'abc'}, {'role': 'assistant', 'content': 'defg'}]
TOOLS = [{'type': 'function', 'function': {'name': 'f', 'parameters': {'type': 'object'}}}]
PARTS = [{'type': 'text', 'text': 'ab'}, {'type': 'text', 'text': 'c'}]
CHATS = [
    {'messages': MESSAGES},
    {'messages': [{'role': 'system', 'content': 'be kind'}, *MESSAGES]},
    {'messages': [MESSAGES[0], MESSAGES[1] | {'weight': 1}], 'tools': TOOLS},
    {'messages': [MESSAGES[0] | {'content': PARTS}, MESSAGES[1]], 'chat_template_kwargs': {'x': 1}},
]
FORMS = [
    {'conversations': [{'from': 'human', 'value': 'abc'}, {'from': 'gpt', 'value': 'def'}]},
    {'instruction': 'say it', 'input': 'abc', 'output': 'def'},
    {'prompt': 'abc', 'completion': 'def'},
    {'prompt': MESSAGES[:1], 'completion': MESSAGES[1:]},
    {'messages': [MESSAGES[0], MESSAGES[1] | {'train': True}], 'tools': json.dumps(TOOLS)},
]
PAIRS = [
    {'messages': MESSAGES[:1], 'chosen': 'yes', 'rejected': 'no'},
    {'messages': MESSAGES[:1], 'chosen': 'ab', 'rejected': 'cd'},
]


def read_model(folder):
    """Reads the weights of a model, as sample_jax.py does."""
    load_pretrained(next(folder.glob('*.gguf'), folder))


def read_adapter(folder):
    """Reads a model that an adapter changes."""
    load_pretrained(local_path(folder))


def read_gguf(folder):
    """Reads the weights and the tokenizer of a GGUF file."""
    path = local_path(folder / 'model.gguf')
    config, _ = load_pretrained(path)
    description = describe_tokenizer(path, config.vocab_size)
    if description:
        use_tokenizer(description)


def use_tokenizer(description):
    """Loads a tokenizer and calls what the scripts call."""
    tokenizer = load_tokenizer(description)
    ids = tokenizer.encode('the fox')
    tokenizer.decode(ids)
    tokenizer.token_bytes()
    SamplingOptions(**tokenizer.sampling).check()
    if tokenizer.chat_template is not None:
        tokenizer.encode_chat(MESSAGES[:1])
        tokenizer.encode_training_chat(MESSAGES)


def read_tokenizer(folder):
    """Reads a tokenizer and the files beside it, and copies them as a run does."""
    description = describe_tokenizer(str(folder), 300)
    if description is None:
        return
    use_tokenizer(description)
    same_tokens(description, {'kind': 'char', 'chars': 'ab'})
    copy_tokenizer(description, str(folder / 'copy'))


def read_chats(file, *flags):
    """A reader of a file of conversations: data/chat/prepare.py."""
    return lambda folder: run_program(
        'data/chat/prepare.py',
        folder / file,
        f'--tokenizer={folder}',
        f'--out_dir={folder / "data"}',
        *flags,
    )


def read_texts(file):
    """A reader of a file of documents: data/text/prepare.py."""
    return lambda folder: run_program(
        'data/text/prepare.py',
        folder / file,
        '--tokenizer=char',
        f'--out_dir={folder / "data"}',
        '--num_proc=1',
        main='main',
    )


def run_program(script, *args, main=''):
    """Runs a script in this process, or only its function `main`; its exceptions pass."""
    argv, hook, path = sys.argv, sys.excepthook, list(sys.path)
    sys.argv = [script, *map(str, args)]
    sys.path.insert(0, str((ROOT / script).parent))  # as the interpreter does
    try:
        names = runpy.run_path(str(ROOT / script), run_name='hostile' if main else '__main__')
        if main:
            names[main]()
    finally:
        sys.argv, sys.excepthook, sys.path[:] = argv, hook, path


def read_data(folder):
    """Reads a data set and its first batch, as train_jax.py does."""
    shares, meta = load_mixture_meta(str(folder), folder.parent)
    data = open_data(shares, meta, block_size=16, seed=0)
    data.check(8)
    data.train.draw(np.arange(8))


def read_metrics_file(folder):
    """Reads the metrics of a run that resumes, and draws them."""
    MetricsLog(folder, 15).file.close()
    plot_losses(folder)


def run_until(message, script, *args):
    """Runs a script up to this UserError: what it was to read has been read by then."""
    try:
        run_program(script, *args)
    except UserError as error:
        if message not in str(error):
            raise


def read_task_files(name):
    """A reader of tasks: eval_jax.py, up to the model, which is not there."""
    return lambda folder: run_until(
        'there is no complete checkpoint',
        'eval_jax.py',
        f'--out_dir={folder / "none"}',
        f'--tasks={folder / name}',
        '--device=cpu:0',
    )


def read_run(folder):
    """Reads the checkpoint of a run to sample from it, and to resume it without data."""
    load_run(folder)
    run_until(
        'train.bin; ',
        'train_jax.py',
        f'--out_dir={folder}',
        '--init_from=resume',
        '--dataset=none',
        '--device=cpu:0',
    )


def seal_run(folder):
    """Makes the checksums of a run fit: whoever changes a file can change them, too."""
    for path in folder.glob('ckpt/*/checksums.json'):
        names = json.loads(path.read_text())
        sums = {
            name: checksum(path.parent / name) for name in names if (path.parent / name).is_file()
        }
        path.write_text(json.dumps(sums))


def read_kept_config(folder):
    """Reads the config.json that a run has kept, as export_jax.py does."""
    config, params = load_pretrained(folder)
    save_pretrained(
        params,
        config,
        folder / 'exported',
        config_json=str(folder / 'out' / 'tokenizer' / 'config.json'),
    )


class Reader(NamedTuple):
    """How a kind of file is mutated and read."""

    folders: str  # of HONEST, with commas between several, of which the seed draws one
    file: str  # in that folder; '*' stands for any text within a name
    mutate: Callable  # (rng, content) -> content
    read: Callable  # folder -> None; raises UserError
    is_named: bool = False  # whether the user names this file itself
    seal: Callable | None = None  # folder -> None: makes the checksums of the folder fit again


MOE = (
    'qwen3_moe,gpt_oss,gpt_oss_packed,deepseek_v3,deepseek_v3_packed,llama4,llama4_published,kimi_k2'
)
OTHER_FAMILIES = 'gemma2,gemma3,mistral,olmo2,olmo3,phi3,qwen2,qwen3,smollm3'
READERS = {
    'safetensors': Reader('gpt2,llama', 'model.safetensors', mutate_safetensors, read_model),
    'safetensors packed': Reader(
        'gpt_oss_packed,deepseek_v3_packed', 'model.safetensors', mutate_safetensors, read_model
    ),
    'config.json gpt2': Reader('gpt2', 'config.json', mutate_json, read_model),
    'config.json llama': Reader('llama', 'config.json', mutate_json, read_model),
    'config.json moe': Reader(MOE, 'config.json', mutate_json, read_model),
    'config.json others': Reader(OTHER_FAMILIES, 'config.json', mutate_json, read_model),
    'index.json': Reader('sharded', 'model.safetensors.index.json', mutate_json, read_model),
    'index.json of bin': Reader(
        'bin shards', 'pytorch_model.bin.index.json', mutate_json, read_model
    ),
    'gguf bpe': Reader('gguf bpe', 'model.gguf', mutate_gguf, read_gguf),
    'gguf char': Reader('gguf char', 'model.gguf', mutate_gguf, read_gguf),
    'ckpt.pt': Reader('nanogpt', 'ckpt.pt', mutate_torch, read_model),
    'pytorch_model.bin': Reader('bin', 'pytorch_model.bin', mutate_torch, read_model),
    'adapter_config.json': Reader('adapter', 'adapter_config.json', mutate_json, read_adapter),
    'adapter_model.safetensors': Reader(
        'adapter', 'adapter_model.safetensors', mutate_safetensors, read_adapter
    ),
    'tokenizer.json bpe': Reader('bpe', 'tokenizer.json', mutate_json, read_tokenizer),
    'tokenizer.json unigram': Reader('unigram', 'tokenizer.json', mutate_json, read_tokenizer),
    'tokenizer.json char': Reader('char', 'tokenizer.json', mutate_json, read_tokenizer),
    'tokenizer_config.json': Reader(
        'bpe,unigram', 'tokenizer_config.json', mutate_json, read_tokenizer
    ),
    'special_tokens_map.json': Reader(
        'bpe,unigram', 'special_tokens_map.json', mutate_json, read_tokenizer
    ),
    'added_tokens.json': Reader('bpe,unigram', 'added_tokens.json', mutate_json, read_tokenizer),
    'generation_config.json': Reader(
        'bpe,unigram', 'generation_config.json', mutate_json, read_tokenizer
    ),
    'vocab.json': Reader('old bpe', 'vocab.json', mutate_json, read_tokenizer),
    'merges.txt': Reader('old bpe', 'merges.txt', mutate_text, read_tokenizer),
    'chat_template': Reader('bpe', 'chat_template.jinja', mutate_template, read_tokenizer),
    'meta.json': Reader('data', 'meta.json', mutate_json, read_data),
    'meta.json folder': Reader('folder data', 'meta.json', mutate_json, read_data),
    'meta.json masked': Reader('masked', 'meta.json', mutate_json, read_data),
    'meta.json rows': Reader('rows', 'meta.json', mutate_json, read_data),
    'meta.json pairs': Reader('pairs', 'meta.json', mutate_json, read_data),
    'train.bin': Reader('data,rows,pairs', 'train.bin', mutate_numbers, read_data),
    'mask.bin': Reader('masked,rows,pairs', 'train_mask.bin', mutate_numbers, read_data),
    'ends.bin': Reader('pairs', 'train_ends.bin', mutate_numbers, read_data),
    'metrics.jsonl': Reader('metrics', 'metrics.jsonl', mutate_lines, read_metrics_file),
    'chats.jsonl': Reader(
        'letters', 'chats.jsonl', mutate_lines, read_chats('chats.jsonl'), is_named=True
    ),
    'forms.jsonl': Reader(
        'letters', 'forms.jsonl', mutate_lines, read_chats('forms.jsonl'), is_named=True
    ),
    'pairs.jsonl': Reader(
        'letters', 'pairs.jsonl', mutate_lines, read_chats('pairs.jsonl'), is_named=True
    ),
    'text.jsonl': Reader(
        'texts', 'text.jsonl', mutate_lines, read_texts('text.jsonl'), is_named=True
    ),
    'text.json': Reader('texts', 'text.json', mutate_json, read_texts('text.json'), is_named=True),
    'text.csv': Reader('texts', 'text.csv', mutate_csv, read_texts('text.csv'), is_named=True),
    'text.parquet': Reader(
        'texts', 'text.parquet', mutate_parquet, read_texts('text.parquet'), is_named=True
    ),
    'task.jsonl': Reader(
        'tasks', 'task.jsonl', mutate_lines, read_task_files('task.jsonl'), is_named=True
    ),
    'bundle task': Reader(
        'tasks', 'eval_data/multiple_choice.jsonl', mutate_lines, read_task_files('')
    ),
    'core.yaml': Reader('tasks', 'core.yaml', mutate_yaml, read_task_files('')),
    'eval_meta_data.csv': Reader('tasks', 'eval_meta_data.csv', mutate_csv, read_task_files('')),
    'ckpt metadata': Reader('run', 'ckpt/*/meta/metadata', mutate_json, read_run, seal=seal_run),
    'ckpt checksums': Reader('run', 'ckpt/*/checksums.json', mutate_json, read_run),
    'ckpt metrics': Reader('run', 'ckpt/*/metrics/metrics', mutate_json, read_run, seal=seal_run),
    'ckpt params/_METADATA': Reader(
        'run', 'ckpt/*/params/_METADATA', mutate_json, load_run, seal=seal_run
    ),
    'ckpt params/manifest': Reader(
        'run', 'ckpt/*/params/manifest.ocdbt', mutate_bytes, load_run, seal=seal_run
    ),
    'ckpt params/data': Reader('run', 'ckpt/*/params/d/*', mutate_bytes, load_run, seal=seal_run),
    'out_dir config.json': Reader(
        'kept', 'out/tokenizer/config.json', mutate_json, read_kept_config
    ),
}

# -----------------------------------------------------------------------------
# one input


def write_input(name, seed, number, honest, folder):
    """Makes `folder` input `number` of a reader: a copy of an honest folder with one hostile file.

    honest: the folder that make_honest has filled. What hostile paths lead to is made, too."""
    reader = READERS[name]
    rng = random.Random(f'{seed} {name} {number}')
    shutil.copytree(honest / rng.choice(reader.folders.split(',')), folder)
    secret = folder.with_name('secret')
    secret.mkdir(exist_ok=True)
    (secret / 'secret.json').write_text(json.dumps({'secret': SECRET}))
    path = rng.choice(sorted(folder.glob(reader.file)))
    content = path.read_bytes()
    if rng.random() < 0.04:
        replace_file(rng, path, secret / 'secret.json', reader.is_named)
    else:
        path.write_bytes(reader.mutate(rng, content))
    if reader.seal and rng.random() < 0.8:
        reader.seal(folder)


def replace_file(rng, path, secret, is_named):
    """Puts something else in the place of a file. is_named: by the user, maybe a pipe."""
    kinds = ['nothing', 'empty', 'folder'] + (
        [] if is_named else ['pipe', 'zeros', 'secret', 'loop', 'dangling']
    )
    kind = rng.choice(kinds)
    path.unlink()
    match kind:
        case 'empty':
            path.write_bytes(b'')
        case 'folder':
            path.mkdir()
        case 'pipe':
            os.mkfifo(path)
        case 'zeros':
            path.symlink_to('/dev/zero')
        case 'secret':
            path.symlink_to(secret)
        case 'loop':
            path.symlink_to(path.name)
        case 'dangling':
            path.symlink_to('nothing')


class Finding(NamedTuple):
    """What is wrong with how an input was read."""

    kind: str  # the type of an exception; 'time', 'memory', 'crash', 'code', 'outside'
    place: str  # the innermost line of the project
    said: str

    def key(self):
        """What findings of the same cause have in common."""
        return self.kind, self.place


def read_input(name, folder):
    """(Finding or None, 'read' or what the UserError says) of an input, read in this process.

    A finding is any exception but a UserError, a lack of memory that a UserError hides, more than
    LIMIT_S, or a file that the input has made outside of its folder. The process should have little
    memory to spare: see limit_memory."""
    read = READERS[name].read
    around = set(os.listdir(folder.parent))
    started = time.monotonic() - seconds_in_queue()
    error = None
    with quiet(folder):
        try:
            read(folder)
        except KeyboardInterrupt:
            raise
        except BaseException as raised:  # a PanicException of Rust is no Exception
            error = raised
    seconds = time.monotonic() - seconds_in_queue() - started
    is_mistake = isinstance(error, UserError)
    said = (
        'read' if error is None else f'{type(error).__name__}: {" ".join(str(error).split())[:300]}'
    )
    finding = None
    if find_marker(folder):
        finding = Finding('code', place_of(error), said)
    elif set(os.listdir(folder.parent)) != around:
        finding = Finding(
            'outside', place_of(error), f'{set(os.listdir(folder.parent)) - around}: {said}'
        )
    elif error is not None and lacks_memory(error):
        finding = Finding('memory', place_of(error), said)
    elif seconds > LIMIT_S:
        finding = Finding('time', place_of(error), f'{seconds:.1f} s: {said}')
    elif error is not None and not is_mistake:
        finding = Finding(type(error).__name__, place_of(error), said)
    return finding, said


def seconds_in_queue():
    """The time that this thread could have run if others had not; 0 where the system does not say."""
    path = Path('/proc/self/schedstat')
    return int(path.read_text().split()[1]) / 1e9 if path.exists() else 0.0


def find_marker(folder):
    """Whether an attack has made its file, in this folder or where it was started."""
    return (folder / MARKER).exists() or folder.with_name(MARKER).exists() or Path(MARKER).exists()


def lacks_memory(error):
    """Whether an exception, or one that it was raised in place of, is a lack of memory."""
    seen = []
    while error is not None and error not in seen:
        if isinstance(error, MemoryError):
            return True
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False


def place_of(error):
    """The innermost line of the project that an exception passed, or ''."""
    if error is None:
        return ''
    frames = traceback.extract_tb(error.__traceback__)
    inner = [frame for frame in frames if is_of_project(frame.filename)]
    return f'{Path(inner[-1].filename).name}:{inner[-1].lineno} {inner[-1].name}' if inner else ''


def is_of_project(path):
    """Whether a source file is one of the project, but no test."""
    return path.startswith(str(ROOT)) and not path.startswith(str(ROOT / 'tests'))


@contextlib.contextmanager
def quiet(folder):
    """What is printed goes nowhere, temporary files go into `folder`."""
    temporary, tempfile.tempdir = tempfile.tempdir, str(folder)
    hook = sys.unraisablehook
    try:
        with (
            signals_restored(),
            open(os.devnull, 'w') as nowhere,
            contextlib.redirect_stdout(nowhere),
            contextlib.redirect_stderr(nowhere),
        ):
            yield
    finally:
        tempfile.tempdir, sys.unraisablehook = temporary, hook


@contextlib.contextmanager
def limit_memory():
    """This process can take LIMIT_BYTES more than it has, where the system can limit that."""
    old = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path('/proc/self/statm').read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + LIMIT_BYTES, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old)
