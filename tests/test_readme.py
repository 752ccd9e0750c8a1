"""Every command of README and of the tutorials runs, but for openwebtext's 54 GB and --serve, in its order, in a copy
of the repository: on small models, for two iterations, with folders of this disk for names of the Hugging Face hub."""
import io
import json
import re
import shlex
import shutil
import sys

import pytest

from jax_pretrained import save_pretrained
from jax_transformer import GPTConfig
from tests import common
from tests.common import ROOT, edit_json, long, prepare, random_params, run_script, succeeded

NEEDS_NETWORK = {'data/openwebtext/prepare.py'}
TEMPLATE = ('{% for m in messages %}{{ m.content }}{% if m.role == "assistant" %}<|endoftext|>{% endif %}{% endfor %}')
LLAMA = GPTConfig(block_size=64, vocab_size=300, n_layer=1, n_head=2, n_embd=32, n_inner=64, norm='rms', mlp='swiglu',
                  position='rope', bias=False, tied_head=False)
FOREVER = {'--serve=8000'}  # runs until it is stopped: tests/test_serve.py

SMALL = ['--n_layer=1', '--n_head=4', '--n_embd=32', '--n_inner=0', '--overwrite=True']
SHORT = ['--max_iters=2', '--lr_decay_iters=0', '--warmup_iters=0', '--eval_interval=2', '--eval_iters=1',
         '--batch_size=8', '--gradient_accumulation_steps=2', '--block_size=16', '--minutes=0',
         '--wandb_log=False']
MORE = {  # {script: flags behind those of README}
    'sample_jax.py': ['--max_new_tokens=4', '--device=cpu:0'],
    'eval_jax.py': ['--device=cpu:0'],
    'data/pystdlib/prepare.py': ['jax_ops'],
    'data/chat/prepare.py': ['--rows=64'],
    'nano_jax.py': ['--max_iters=2', '--eval_iters=1', '--batch_size=8', '--block_size=16', '--max_new_tokens=4'],
    'data/shakespeare/prepare.py': ['--tokenizer=my/folder'],  # instead of OpenAI's BPE, which would be downloaded
}


def flags_behind(script, arguments):
    """The flags behind those of README, which make a command small."""
    if script == 'data/pychat/prepare.py':
        is_of_package = not arguments[0].startswith('--')
        return ['--rows=64'] if is_of_package else ['jax_ops', '--rows=64']
    if script != 'train_jax.py':
        return MORE.get(script, [])
    given = ' '.join(arguments)
    device = '--device=cpu' if re.search('--(zero|fsdp|context)', given) else '--device=cpu:0'
    if '--init_from=resume' in given:
        return [device, '--max_iters=3', '--lr_decay_iters=0']
    flags = [*SHORT, device]
    if re.search('chat|lora', given):  # whole conversations, and what the model starts from is in the config file
        return [*flags, '--block_size=64', '--overwrite=True']
    if '--context' in given:
        flags += ['--block_size=64']  # the square of 8 devices
    return flags if '--init_from' in given or 'eval_gpt2' in given else [*flags, *SMALL]


def commands_of(document):
    """[[script, arguments ...]] of all commands `python SCRIPT ...` in a document, in its order, loops unrolled."""
    text = (ROOT / document).read_text(encoding='utf-8')
    commands = []
    for block, inline in re.findall(r'```sh\n(.*?)```|`(python \w[^`]*)`', text, re.DOTALL):
        block = block or inline
        block = block.replace('\\\n', ' ').replace('&&\n', '&& ')
        loop = re.search(r'for (\w+) in (.*?); do\n(.*?)done\n', block, re.DOTALL)
        if loop:
            name, values, body = loop.groups()
            rounds = [body.replace(f'${name}', value) for value in values.split()]
            block = block.replace(loop[0], ''.join(rounds))
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            for part in ' '.join(map(shlex.quote, words)).split(" '&&' "):
                python, *arguments = shlex.split(part)
                if python == 'python':
                    commands.append(arguments)
    return commands


@pytest.mark.parametrize('document, n_in_loops', [('README.md', 0), ('docs/tutorials.md', 2)])
def test_the_commands_of_a_document_are_found(document, n_in_loops):
    """So that the next test leaves none out. n_in_loops: how many more a loop makes of its line."""
    text = re.sub('```text.*?```', '', (ROOT / document).read_text(encoding='utf-8'), flags=re.DOTALL)
    assert len(commands_of(document)) == len(re.findall(r'python \w\S*\.py', text)) + n_in_loops


@pytest.fixture
def clone(tmp_path_factory):
    """A copy of the repository, with the texts, models and questions that README's commands name."""
    clone = tmp_path_factory.mktemp('readme') / 'clone'
    for path in [*ROOT.glob('*.py'), *(ROOT / 'data').glob('*.py'), *(ROOT / 'data').glob('*/*.py'),
                 *(ROOT / 'data').glob('*/*.jinja')]:
        copy = clone / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    for folder in ('config', 'jax_devices', 'jax_hub', 'jax_ops', 'jax_run'):
        (clone / folder).symlink_to(ROOT / folder)
    text = 'Once upon a time the quick brown fox jumped over a lazy dog, and def is a word.\n' * 40
    for name in ('my.txt', 'a.txt', 'b.txt', 'data/shakespeare_char/input.txt', 'data/shakespeare/input.txt'):
        (clone / name).write_text(text)
    (clone / 'prompts.txt').write_text('one\ntwo\n')
    # a small Llama with a vocabulary of its own
    succeeded(prepare('text', clone / 'my.txt', '--tokenizer=bpe:300', f'--out_dir={clone / "data/words"}'))
    model = clone / 'my' / 'folder'
    model.parent.mkdir()
    save_pretrained(random_params(LLAMA), LLAMA, model)
    shutil.copytree(clone / 'data/words/tokenizer', model, dirs_exist_ok=True)
    edit_json(model / 'tokenizer_config.json', chat_template=TEMPLATE)
    shutil.copytree(ROOT / 'jax_ops', clone / 'path' / 'to' / 'package')
    for name in ('gpt2', 'Qwen/Qwen3-0.6B'):
        shutil.copytree(model, clone / name)
    succeeded(prepare('shakespeare', clone / 'my.txt', f'--tokenizer={clone / "gpt2"}', '--out_dir',
                      clone / 'data' / 'openwebtext'))
    chat = {'messages': [{'role': 'user', 'content': 'hello'}, {'role': 'assistant', 'content': 'hi there'}]}
    (clone / 'chats.jsonl').write_text((json.dumps(chat) + '\n') * 40)
    item = {'query': 'the fox', 'choices': [' jumps', ' sleeps'], 'gold': 0}
    (clone / 'mine.jsonl').write_text(json.dumps(item) + '\n')
    bundle = clone / 'eval_bundle' / 'eval_data'
    bundle.mkdir(parents=True)
    (bundle / 'a.jsonl').write_text(json.dumps({'context': 'the fox', 'continuation': ' jumps'}) + '\n')
    (bundle.parent / 'core.yaml').write_text('icl_tasks:\n- {label: a, dataset_uri: a.jsonl, num_fewshot: [0], '
                                             'icl_task_type: language_modeling}\n')
    (bundle.parent / 'eval_meta_data.csv').write_text('Eval Task,Random baseline\na,0\n')
    return clone


@pytest.mark.slow
@pytest.mark.parametrize('document', ['README.md', long('docs/tutorials.md')])
def test_every_command_of_a_document_runs_in_its_order(document, clone, monkeypatch):
    monkeypatch.chdir(clone)
    monkeypatch.setattr(common, 'ROOT', clone)
    for script, *arguments in commands_of(document):
        if script in NEEDS_NETWORK or FOREVER & set(arguments):
            continue
        monkeypatch.setattr(sys, 'stdin', io.StringIO('a\n'))
        succeeded(run_script(script, *arguments, *flags_behind(script, arguments)))
