"""What the documents and messages say of each other exists: files, sections, snippets of Python."""
import ast
import json
import re
import shutil
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jax_flags import config_block
from tests.common import GOLDEN, ROOT, prepare, run_script, succeeded, train

DOCUMENTS = sorted({*ROOT.glob('*.md'), *ROOT.glob('docs/*.md'), *ROOT.glob('data/*/*.md')})
TO_H = 'abcdefgh'
TINY = ['--device=cpu:0', '--n_layer=1', '--n_head=2', '--n_embd=16', '--block_size=16', '--batch_size=4',
        '--gradient_accumulation_steps=1', '--max_iters=1', '--eval_iters=1', '--warmup_iters=0']


def split_code(text):
    """The text of a document without its fenced blocks, and these: [(info string, code)]."""
    fence = re.compile(r'^ *```(\w*)\n(.*?)^ *```$', re.DOTALL | re.MULTILINE)
    return fence.sub('', text), fence.findall(text)


def titles(document):
    prose, _ = split_code(document.read_text(encoding='utf-8'))
    return re.findall(r'^#+ (.+)$', prose, re.MULTILINE)


def anchors(document):
    """The anchors that GitHub gives to the sections of a document."""
    return {re.sub(r'[^\w\- ]', '', title.lower()).replace(' ', '-') for title in titles(document)}


def assert_link_leads_somewhere(link, document):
    """link: a relative path, an anchor, or both, as they stand in `document`."""
    path, _, anchor = link.partition('#')
    target = (document.parent / path).resolve() if path else document
    assert target.exists(), f'{document.name}: {link}'
    if anchor:
        assert anchor in anchors(target), f'{document.name}: {link}'


@pytest.mark.parametrize('document', DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_of_a_document_leads_to_a_file_and_a_section(document):
    prose, _ = split_code(document.read_text(encoding='utf-8'))
    links = re.findall(r'\]\(([^)\s]+)\)', prose)
    for link in links:
        if not re.match(r'[a-z]+:', link):
            assert_link_leads_somewhere(link, document)


def test_every_section_that_the_code_names_exists():
    tracked = subprocess.run(['git', 'ls-files', '--cached', '--others', '--exclude-standard', '*.py'], cwd=ROOT,
                             capture_output=True, text=True).stdout.splitlines() or pytest.skip('not a git checkout')
    for path in map(ROOT.joinpath, tracked):
        if path.name == 'test_docs.py' or not path.exists():
            continue
        text = path.read_text(encoding='utf-8')
        for link in re.findall(r'(?:docs/)?\w+\.md(?:#[\w-]+)?', text):
            if (ROOT / link.partition('#')[0]).exists() or '#' in link:
                assert_link_leads_somewhere(link, ROOT / 'README.md')
        strings = [node.value for node in ast.walk(ast.parse(text))
                   if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        for title, document in re.findall(r'"([^"\n]+)" in ((?:docs/)?\w+\.md)', '\n'.join(strings)):
            assert any(found.startswith(title) for found in titles(ROOT / document)), f'{path.name}: {title!r}'


@pytest.fixture(scope='module')
def folder_with_a_run(tmp_path_factory, dataset):
    """A folder that holds out-mine, as README's commands would leave it, and my/folder, a chat model."""
    folder = tmp_path_factory.mktemp('docs')
    succeeded(train(folder / 'out-mine', f'--dataset={dataset}', *TINY))
    shutil.copytree(GOLDEN / 'letters', folder / 'my/folder')
    return folder


SNIPPETS = [pytest.param(code, id=f'{path.stem}-{number}') for path in DOCUMENTS for number, (info, code) in
            enumerate(split_code(path.read_text(encoding='utf-8'))[1]) if info == 'python']


@pytest.mark.slow
@pytest.mark.parametrize('code', SNIPPETS)
def test_every_snippet_of_python_runs_or_says_that_it_is_not_run(code, folder_with_a_run, monkeypatch):
    if re.match(r'# (.*\bnot run|\w+\.py)$', code.partition('\n')[0]):  # a file is run by a test of its section
        return
    monkeypatch.chdir(folder_with_a_run)
    exec(compile(code, 'snippet', 'exec'), {'__name__': 'snippet'})


def run_commands(block, more):
    """Runs the commands of a fenced block, each with the flags that `more` has for its script. Returns what those that
    are no script of the repository have printed."""
    said = ''
    for line in block.replace('\\\n', ' ').splitlines():
        python, script, *args = shlex.split(line)
        assert python == 'python'
        if (ROOT / script).name == 'prepare.py':
            succeeded(prepare((ROOT / script).parent.name, *args))
        elif (ROOT / script).exists():
            succeeded(run_script(script, *args, *more[script]))
        else:
            command = [sys.executable, script, *args]
            said += subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return said


@pytest.mark.slow
def test_a_model_learns_from_its_own_right_answers_as_the_section_on_them_says(chatting, tmp_path, monkeypatch):
    text = (ROOT / 'data/chat/readme.md').read_text(encoding='utf-8')
    section = text.split('## Learn from answers that a program can check')[1].split('\n## ')[0]
    (_, keep), (_, learn), (_, measure) = split_code(section)[1]
    monkeypatch.chdir(tmp_path)
    Path('config').symlink_to(ROOT / 'config')
    Path('my').mkdir()
    chatting.rename('my/folder')

    # Of a model with random weights a few of a hundred samples end, and begin with a letter of `want`.
    pairs = [first + second for first in TO_H for second in TO_H]
    questions = [{'messages': [{'role': 'user', 'content': pair}], 'want': 'abcdefghijklm'} for pair in pairs]
    for name, part in (('questions', questions[:48]), ('held_out', questions[48:])):
        Path(f'{name}.jsonl').write_text('\n'.join(map(json.dumps, part)))
    condition = "answer.strip() == question['want']"
    assert condition in keep
    Path('keep.py').write_text(keep.replace(condition, "answer[:1] and answer[0] in question['want']"))

    # a round, its measurement, and another round, which only has to begin to train
    more = {'sample_jax.py': ['--max_new_tokens=24', '--device=cpu:0'],
            'train_jax.py': ['--block_size=32', '--eval_iters=1', '--learning_rate=1e-2', '--device=cpu:0']}
    learn = learn.replace('--rows=256', '--rows=32')
    learn = learn.replace('--dataset=right', f'--dataset={tmp_path / "data/right"} --max_iters=20')
    again = learn.replace('--out_dir=out-right', '--out_dir=out-again').replace('--max_iters=20', '--max_iters=2')
    again = again.replace('--seed=1', '--seed=2').replace('samples.jsonl', 'samples_2.jsonl')
    again = again.replace('sample_jax.py --init_from=my/folder', 'sample_jax.py --out_dir=out-right')
    again = again.replace('finetune_chat.py --init_from=my/folder', 'finetune_chat.py --init_from=out-right')
    said = [run_commands(commands, more) for commands in (learn, measure, again)]
    sampled, greedy, sampled_again = [int(line.split()[0]) for line in said]
    assert 4 <= sampled < 96 and sampled_again > 2 * sampled, said  # of 384
    assert greedy >= 12, said  # of 16 held-out questions
    assert len(Path('right.jsonl').read_text().splitlines()) == int(said[-1].split('are right, ')[1].split()[0])
    assert (tmp_path / 'out-again' / 'config.json').exists()


def test_every_function_of_the_code_index_is_in_a_file_that_its_row_names():
    text = (ROOT / 'docs' / 'code.md').read_text(encoding='utf-8')
    index = text.split('## Code index')[1].split('\n## ')[0]
    assert index.count('\n| ') <= 1 + 20, 'the index has at most 20 rows: a name is found by grep'
    for row in index.splitlines():
        files = [name for name in re.findall(r'`([\w/]+\.py)`', row)]
        if not files:
            continue
        sources = ''.join((ROOT / name).read_text(encoding='utf-8') for name in files)
        _, _, _, functions, _ = row.split('|')
        for name in re.findall(r'`(?:\w+\.)?([A-Za-z_]\w+)`', functions):
            assert re.search(rf'\b{name}\b', sources), f'the row "{row}" names {name}, which is in none of its files'


def commands_of(document):
    """The commands `python SCRIPT.py ...` in a document's blocks of sh, also those that are quoted arguments of other
    commands: (script, the text behind it without what is quoted)."""
    _, blocks = split_code(document.read_text(encoding='utf-8'))
    for language, code in blocks:
        lines = code.replace('\\\n', ' ') if language == 'sh' else ''
        for text in (re.sub(r'"[^"\n]*"', '""', lines), *re.findall(r'"([^"\n]*)"', lines)):
            yield from re.findall(r'\bpython ([\w/]+\.py)\b([^\n#&|]*)', text)


def options_of(script):
    """The names of the options that a script in a folder adds to its parser, itself or by a module beside it."""
    shared = ROOT / 'data' / 'common.py' if script.startswith('data/') else ROOT / script
    return {name for path in (ROOT / script, shared)
            for name in re.findall(r"'--(\w+)'", path.read_text(encoding='utf-8'))}


@pytest.mark.parametrize('document', DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_of_a_document_names_scripts_configs_and_flags_that_exist(document):
    for script, args in commands_of(document):
        if script in ('convert.py', 'keep.py'):  # of the document itself
            continue
        assert (ROOT / script).exists(), script
        for config in re.findall(r'config/\w+\.py', args):
            assert (ROOT / config).exists(), config
        known = config_block(ROOT / script).keys() if '/' not in script else options_of(script)
        assert {*re.findall(r'--(\w+)', args)} <= known, (script, args)
