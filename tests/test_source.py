"""What holds for the source code itself: the direction of imports, and the sizes that keep it readable."""
import ast

import pytest

import jax_generate
import jax_transformer
from tests.common import ROOT, source_files

# a module imports only those of lower levels; the scripts are above all of them
LEVELS = {'jax_flags': 0, 'jax_ops': 1, 'jax_transformer': 2, 'jax_generate': 3, 'jax_pretrained': 4,
          'jax_train_utils': 5, 'jax_text': 6}
SCRIPTS = ('train_jax', 'sample_jax', 'export_jax', 'bench_jax')


def imported_modules(tree):
    """The names of the modules that a syntax tree imports anywhere, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            yield node.module
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ('__import__', 'importlib.import_module'):
            yield ast.literal_eval(node.args[0])


def is_lazy_import(node):
    return isinstance(node, ast.FunctionDef) and node.name == '__getattr__'


@pytest.mark.parametrize('module', LEVELS)
def test_a_module_imports_only_what_is_below_it(module):
    tree = ast.parse((ROOT / f'{module}.py').read_text())
    if module == 'jax_transformer':  # the one exception: `from jax_transformer import generate`
        tree.body = [node for node in tree.body if not is_lazy_import(node)]
    imported = set(imported_modules(tree))
    assert not imported & {*SCRIPTS}
    for name in imported & LEVELS.keys():
        assert LEVELS[name] < LEVELS[module], f'{module} imports {name}'


def test_the_lazy_import_is_jax_generates():
    tree = ast.parse((ROOT / 'jax_transformer.py').read_text())
    lazy = [name for node in tree.body if is_lazy_import(node) for name in imported_modules(node)]
    assert set(lazy) == {'jax_generate'}
    from jax_transformer import generate
    assert generate is jax_generate.generate
    with pytest.raises(AttributeError, match='no_such_name'):
        jax_transformer.no_such_name


@pytest.mark.parametrize('script', SCRIPTS)
def test_a_script_imports_no_other_script(script):
    tree = ast.parse((ROOT / f'{script}.py').read_text())
    assert not set(imported_modules(tree)) & {*SCRIPTS}


def test_nothing_is_imported_with_a_star():
    for path in source_files():
        for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
            if isinstance(node, ast.ImportFrom):
                assert '*' not in [alias.name for alias in node.names], f'{path}:{node.lineno}'


def test_test_modules_share_code_through_common_only():
    for path in [ROOT / 'test_jax_transformer.py', *(ROOT / 'tests').glob('*.py')]:
        names = set(imported_modules(ast.parse(path.read_text(encoding='utf-8'))))
        assert not [name for name in names if name.removeprefix('tests.').startswith('test_')], path


def test_lines_have_at_most_120_characters():
    long = [f'{path.relative_to(ROOT)}:{number}' for path in source_files()
            for number, line in enumerate(path.read_text(encoding='utf-8').splitlines(), start=1) if len(line) > 120]
    assert not long


def test_the_model_can_be_read_in_an_evening():
    lines = (ROOT / 'jax_transformer.py').read_text().splitlines()
    assert len(lines) <= 850
    gpt2_part = next(i for i, line in enumerate(lines) if line.startswith('# other models'))
    assert gpt2_part <= 500
