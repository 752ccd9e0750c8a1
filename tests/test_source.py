"""What holds for the source code itself: the direction of imports, and measures of how it reads."""
import ast
import collections
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path

import numpy as np
import pytest

import jax_generate
import jax_train_utils
import jax_transformer
from tests.common import MODEL, ROOT, SHORT, write_dataset
from tools import mutants

# imports go down: a module imports those of its own layer and of layers before it, without a circle
LAYERS = [
    ('jax_flags',), ('jax_ops',), ('jax_devices',), ('jax_transformer',), ('jax_generate',),
    ('jax_hub', 'jax_pretrained'), ('jax_run', 'jax_train_utils'), ('jax_apps.batching',), ('jax_text',),
    ('jax_run.pretrained', 'jax_run.start', 'jax_run.verify'), ('jax_run.notebook', 'jax_apps'), ('tools',)]
SCRIPTS = ('nano_jax', 'train_jax', 'sample_jax', 'eval_jax', 'export_jax', 'bench_jax', 'plot_jax')
FOLDERS = ('jax_ops', 'jax_run', 'jax_hub', 'jax_devices', 'jax_apps', 'tools')
PRIVATE = ('jaxlib.', 'jax._src.', 'jax.interpreters.', 'jax.extend.', 'jax.lib.')  # of jax: may change in any version


def source_files():
    """All Python files of the repository: those that git tracks, and new ones that it does not
    ignore."""
    command = ['git', 'ls-files', '-z', '--cached', '--others', '--exclude-standard', '*.py']
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip('not a git checkout')
    paths = [ROOT / name for name in sorted(set(done.stdout.split('\0'))) if name]
    return [path for path in paths if path.exists()]


def product_files():
    """{path from the root: path} of the scripts and modules, without data, tests, peers, config."""
    files = {path.relative_to(ROOT).as_posix(): path for path in source_files()}
    return {name: path for name, path in files.items()
            if name.split('/')[0] in FOLDERS or '/' not in name and not name.startswith(('test_', 'conftest'))}


def module_name(name):
    return name.removesuffix('.py').replace('/', '.')


def imported_modules(tree):
    """The names of the modules that a syntax tree imports anywhere, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f'{node.module}.{alias.name}' for alias in node.names)


def level(module):
    """The number of a module's layer, that of the longest name in LAYERS that it begins with."""
    found = [(len(name), i) for i, layer in enumerate(LAYERS) for name in layer if f'{module}.'.startswith(f'{name}.')]
    return max(found)[1] if found else None


def own_imports():
    """{module: the modules of the product that it imports, but in a __getattr__}."""
    modules = {module_name(name): path for name, path in product_files().items()}
    imports = {}
    for module, path in modules.items():
        tree = ast.parse(path.read_text(encoding='utf-8'))
        tree.body = [node for node in tree.body if getattr(node, 'name', '') != '__getattr__']
        imports[module] = set(imported_modules(tree)) & modules.keys()
    return imports


def test_at_most_thirteen_modules_are_at_the_top_and_each_has_a_layer():
    modules = [module for module in own_imports() if module.split('.')[-1] != '__init__']
    assert sum('.' not in module for module in modules) <= 13, 'a new module goes into a package, see CONTRIBUTING.md'
    unlisted = [module for module in modules if level(module) is None and module not in SCRIPTS]
    assert not unlisted, 'a new package: add it to LAYERS (tests/test_source.py), and to CONTRIBUTING.md'


def test_imports_go_down():
    for module, imported in own_imports().items():
        assert not imported & {*SCRIPTS}, f'{module} imports a script: move what it needs to a module'
        above = [name for name in imported if module not in SCRIPTS and level(name) > level(module)]
        assert not above, (f'{module} imports {above}, which are above it: see "Where does X go" in CONTRIBUTING.md, '
                           'and move the function to the lower layer')


def test_no_module_imports_itself_by_way_of_others():
    left = own_imports()
    while left:
        free = [module for module, imported in left.items() if not imported & left.keys()]
        assert free, f'a circle of imports among {sorted(left)}'
        for module in free:
            del left[module]


def test_a_folder_is_one_paragraph_and_exports_nothing():
    for folder in FOLDERS:
        tree = ast.parse((ROOT / folder / '__init__.py').read_text())
        assert len(tree.body) == 1 and ast.get_docstring(tree), f'{folder}/__init__.py is a docstring and nothing else'


def test_names_are_exported_again_by_modules_of_which_users_import_them_only():
    """A name imported and not used is an export. Pyflakes finds the others."""
    exporting = {name for name, path in product_files().items() if 'noqa: F401' in path.read_text(encoding='utf-8')}
    allowed = {'jax_transformer.py', 'jax_train_utils.py', 'jax_generate.py', 'jax_text.py'}  # jax_text.py: readline
    assert exporting <= allowed, 'import a name from the module that defines it, not through another one'


def test_no_private_name_of_jax_is_imported_at_the_top_of_a_file():
    for path in source_files():
        for node in ast.parse(path.read_text(encoding='utf-8')).body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = set(imported_modules(ast.Module([node], []))) - {'jaxlib', 'jaxlib.__version__'}
                private = [name for name in names if f'{name}.'.startswith(PRIVATE)]
                assert not private, (f'{path}:{node.lineno}: {private} may be gone in another version of jax: import '
                                     'it in the function that uses it, with a fallback')


def test_names_that_are_defined_above_are_imported_on_first_use():
    from jax_train_utils import create_train_state, save_checkpoint
    from jax_transformer import generate
    assert generate is jax_generate.generate and create_train_state is jax_train_utils.create_train_state
    assert save_checkpoint.__module__ == 'jax_run.checkpoints'
    for module in (jax_transformer, jax_train_utils):
        with pytest.raises(AttributeError, match='no_such_name'):
            module.no_such_name


def test_nothing_is_imported_with_a_star():
    for path in source_files():
        for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
            if isinstance(node, ast.ImportFrom):
                assert '*' not in [alias.name for alias in node.names], f'{path}:{node.lineno}'


def test_test_modules_share_code_through_common_only():
    for path in [ROOT / 'test_jax_transformer.py', *(ROOT / 'tests').glob('*.py')]:
        names = set(imported_modules(ast.parse(path.read_text(encoding='utf-8'))))
        assert not [name for name in names if name.removeprefix('tests.').startswith('test_')], path


# -----------------------------------------------------------------------------
# guidelines (CONTRIBUTING.md): printed, and failing for gross values only. `python -m pytest -n 0
# -s tests/test_source.py -k printed` shows them.

GROSS = {'lines of a function': 120, 'parameters of a function': 20, 'columns': 120}


def test_lines_have_at_most_120_columns():
    long = [f'{path.relative_to(ROOT)}:{number}' for path in source_files()
            for number, line in enumerate(path.read_text(encoding='utf-8').splitlines(), start=1)
            if len(line) > GROSS['columns']]
    assert not long, 'lines of more than 120 columns: give a part of the line a name, or wrap it at 100'


def functions_of(path):
    """(name with place, lines, parameters) of every function of a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        if isinstance(node, ast.FunctionDef):
            n_parameters = len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs)
            yield f'{path.name}:{node.lineno} {node.name}', node.end_lineno - node.lineno + 1, n_parameters


def test_long_functions_are_printed():
    warm = []
    for path in product_files().values():
        for name, n_lines, n_parameters in functions_of(path):
            if n_lines > 60 or n_parameters > 8:
                warm.append(name)
                print(f'{name}: {n_lines} lines, {n_parameters} parameters')
            assert n_lines <= GROSS['lines of a function'], f'{name} has {n_lines} lines: split it at its comments'
            assert n_parameters <= GROSS['parameters of a function'], (
                f'{name} has {n_parameters} parameters: those that travel together are one object')
    print(f'{len(warm)} functions are longer than 60 lines or have more than 8 parameters (public functions that list '
          'their options count, too)')


def test_the_length_of_lines_is_printed():
    lines = []
    for path in product_files().values():
        lines += [line for line in path.read_text(encoding='utf-8').splitlines() if line.strip()]
    n_comments = sum(line.strip().startswith('#') for line in lines)
    n_long = sum(len(line) > 100 for line in lines)
    mean = sum(map(len, lines)) / len(lines)
    print(f'{len(lines):,} lines, {mean:.1f} columns on average, {n_comments / len(lines):.1%} comments, '
          f'{n_long} of more than 100 columns')
    assert mean < 70, 'the code is pressed into columns: one statement a line, and a comment before a step'


def count_tokens(path):
    """The number of Python's tokens in a file, without comments, docstrings, ends of lines, and the
    types of parameters and results."""
    text = path.read_text(encoding='utf-8')
    nodes = list(ast.walk(ast.parse(text)))
    docs = [node for node in nodes
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None]
    types = [node.returns for node in nodes if isinstance(node, ast.FunctionDef) and node.returns]
    types += [node.annotation for node in nodes if isinstance(node, ast.arg) and node.annotation]
    n_types = sum(1 + len(tokens_of(ast.unparse(node))) for node in types)  # with its colon or arrow
    return len(tokens_of(text)) - len(docs) - n_types


def tokens_of(text):
    """The tokens of a source text that do something. An f-string is one token in every Python: from
    3.12 on, tokenize splits it into its parts."""
    ignored = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    found = []
    depth = 0  # of f-strings
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind == 'FSTRING_END':
            depth -= 1
        elif depth == 0 and token.type not in ignored:
            found.append(token)
        if kind == 'FSTRING_START':
            depth += 1
    return found


RELATIVE = re.compile(
    r'\b((of|for|by|in|to|at|from|on|with|into|behind) which|of whom|whose|those (that|of)|that (of|which)|'
    r'what (it|is|has|an?|the|they|was)|which is|where (it|they|there))\b', re.IGNORECASE)


def prose_of(path):
    """The comments and docstrings of a file."""
    text = path.read_text(encoding='utf-8')
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            yield ast.get_docstring(node) or ''


def test_the_relative_clauses_of_comments_and_docstrings_are_printed():
    n_words = n_clauses = 0
    for path in product_files().values():
        for prose in prose_of(path):
            n_words += len(prose.split())
            n_clauses += len(RELATIVE.findall(prose))
    print(f'{100 * n_clauses / n_words:.2f} relative clauses per 100 words of comments and docstrings')
    assert n_clauses / n_words < 0.02, 'write main clauses: the noun of the field first, one idea a sentence'


def test_the_tokens_of_each_package_are_printed():
    sizes = collections.Counter()
    for path in source_files():
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(('tests/', 'test_', 'conftest', 'peers/', 'config/')):
            sizes[name.split('/')[0].removesuffix('.py')] += count_tokens(path)
    for package, n_tokens in sizes.most_common():
        print(f'{package}: {n_tokens:,} tokens')
    print(f'all together: {sizes.total():,} tokens')
    assert sizes.total() < 160_000


# {a name: (most lines, most files) of the product that name it}: what a change of it costs
PRICES = {
    'min_p': (7, 3), 'repetition_penalty': (7, 3), 'qk_norm': (15, 6), 'n_draft': (32, 5), 'is_kernel': (13, 5),
    'start_BxT': (25, 3), 'choose_attention': (3, 2), 'choose_experts': (2, 1)}


def test_the_prices_of_features_are_printed():
    for name, (most_lines, most_files) in PRICES.items():
        places = collections.Counter()
        for file, path in product_files().items():
            lines = {token.start[0] for token in tokens_of(path.read_text(encoding='utf-8'))
                     if token.type in (tokenize.NAME, tokenize.STRING) and token.string.strip('\'"') == name}
            places[file] = len(lines)
        n_lines, files = places.total(), [file for file, n in places.items() if n]
        print(f'{name}: {n_lines} lines in {len(files)} files (at most {most_lines} in {most_files})')
        assert n_lines <= most_lines and len(files) <= most_files, (name, +places)


TRACE = """
import runpy, sys
seen = set()
root, sys.argv = sys.argv[1], sys.argv[2:]
sys.path.insert(0, root)
def trace(frame, event, argument):
    code = frame.f_code
    # no class body, lambda, comprehension, nor the annotations that Python 3.14 computes when they are read
    is_function = code.co_flags & 2 and not code.co_name.startswith(('<', '__annotate'))
    if event == 'call' and code.co_filename.startswith(root) and is_function:
        seen.add((code.co_filename, code.co_qualname))
sys.setprofile(trace)
try:
    runpy.run_path(f'{root}/{sys.argv[0]}', run_name='__main__')
finally:
    sys.setprofile(None)
    print('\\nfiles:', len({file for file, _ in seen}), 'functions:', len(seen))
    loaded = {getattr(module, '__file__', None) or '' for module in sys.modules.values()}
    print('loaded:', *(file for file in loaded if file.startswith(root + '/')), sep='\\n')
"""


def trace(script, *args):
    """(the files, the functions, without lambdas and comprehensions, that a run of a script
    executes; the tokens of the modules of the product that are loaded then, the script's own
    included)."""
    done = subprocess.run([sys.executable, '-c', TRACE, str(ROOT), script, *map(str, args)], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed, _, loaded = done.stdout.rpartition('loaded:\n')
    _, files, _, functions = printed.split('\n')[-2].split()
    return int(files), int(functions), sum(map(count_tokens, map(Path, {*loaded.split(), str(ROOT / script)})))


@pytest.mark.slow
def test_the_files_that_a_run_goes_through_are_printed(tmp_path):
    write_dataset(tmp_path / 'data', np.arange(900) % 37, np.arange(90) % 37)
    out = f'--out_dir={tmp_path / "out"}'
    way = ['two iterations of training', *trace(
        'train_jax.py', *MODEL, *SHORT, f'--dataset={tmp_path / "data"}', out, '--max_iters=2')]
    assert_way(*way, at_most=(24, 259, 60_400), goal=(20, 200, 62_000))
    way = ['a sample of four tokens', *trace(
        'sample_jax.py', out, '--device=cpu', '--max_new_tokens=4', '--num_samples=1', '--start=ABC')]
    assert_way(*way, at_most=(21, 210, 54_000), goal=(18, 165, 54_000))


def assert_way(name, *found, at_most, goal):
    """Prints (files, functions, tokens that are loaded) of a way through the product."""
    print(f'{name}: files, functions, tokens loaded {found} (at most {at_most}, goal {goal})')
    assert all(n <= most for n, most in zip(found, at_most)), (name, found)


def test_the_extras_of_pyproject_are_the_requirements_of_the_tests():
    lines = (ROOT / 'requirements_dev.txt').read_text().splitlines()
    names = [line.split('#')[0].strip() for line in lines if not line.startswith(('#', '-r'))]
    assert tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['optional-dependencies'] == {'dev': names}


@pytest.mark.parametrize('module', mutants.MODULES)
def test_what_a_mutant_changes_is_there_once(module):
    file, tests, changes = mutants.MODULES[module]
    source = (ROOT / file).read_text()
    assert [old for old, new in changes if source.count(old) != 1 or new == old] == []
    assert all((ROOT / 'tests' / f'test_{name}.py').is_file() or name == mutants.START for name in tests.split())
