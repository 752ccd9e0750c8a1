"""What holds for the source code itself: the direction of imports, and thermometers of how it reads."""
import ast

import pytest

import jax_generate
import jax_transformer
from tests.common import ROOT, source_files

# a module imports only those of lower levels; the scripts are above all of them
LEVELS = {
    'jax_flags': 0,
    'jax_devices.setup': 1, 'jax_devices.processes': 1, 'tools.topologies': 1, 'tools.hlo': 1, 'tools.plan': 12,
    'jax_files.chat_worker': 0, 'jax_files.buckets': 1,
    'jax_files.metrics': 1, 'jax_files.chats': 1, 'jax_files.torch_files': 1, 'jax_files.adapters': 1,
    'jax_files.tokenizer_library': 1,
    'jax_files.tokenizer_classes': 2, 'jax_files.tokenizer_folders': 3, 'jax_files.tokenizers': 4,
    'jax_files.data': 6, 'jax_files.gguf_files': 6,
    'jax_files.sources': 7, 'jax_files.checkpoints': 6,
    'jax_files.weight_files': 7,
    'jax_ops.sharding': 1, 'jax_ops.dropout': 1, 'jax_ops.cpu': 2, 'jax_ops.grouped': 2, 'jax_ops.matmul': 3,
    'jax_ops.attention': 4, 'jax_ops.experts': 5, 'jax_ops.vocabulary': 4, 'jax_ops.layers': 4,
    'jax_files.config_json': 1, 'jax_ropes': 2, 'jax_families': 8,
    'jax_ops.choose_attention': 5, 'jax_ops.choose_experts': 4, 'jax_ops.decode_weights': 4,
    'jax_sizes': 1, 'jax_cache': 4,
    'jax_transformer': 6, 'jax_inside': 7, 'jax_generate': 7, 'jax_devices.parallel': 8,
    'jax_optimizers': 6, 'jax_log': 1, 'jax_pretrained': 9, 'jax_lora': 10,
    'jax_train_utils': 11, 'jax_score': 8, 'jax_speed': 8, 'jax_text': 11, 'jax_chat': 12, 'jax_start': 12,
    'jax_minutes': 13,
}
SCRIPTS = ('train_jax', 'sample_jax', 'eval_jax', 'export_jax', 'bench_jax', 'plot_jax')
FOLDERS = ('jax_ops', 'jax_files', 'jax_devices', 'tools')
PRIVATE = ('jaxlib.', 'jax._src.', 'jax.interpreters.', 'jax.extend.', 'jax.lib.')  # of jax: may change in any version


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
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ('__import__', 'importlib.import_module'):
            yield ast.literal_eval(node.args[0])


def is_lazy_import(node):
    return isinstance(node, ast.FunctionDef) and node.name == '__getattr__'


def test_every_module_has_a_level_and_is_there():
    modules = {module_name(name) for name in product_files()}
    packages = {f'{folder}.__init__' for folder in FOLDERS}
    known = LEVELS.keys() | set(SCRIPTS)
    assert not modules - packages - known, (
        'a new module: give it a level in LEVELS (tests/test_source.py), one above the modules that it imports')
    assert not known - modules, 'a module that is gone: take it out of LEVELS or SCRIPTS (tests/test_source.py)'


@pytest.mark.parametrize('module', LEVELS)
def test_a_module_imports_only_what_is_below_it(module):
    tree = ast.parse((ROOT / f'{module.replace(".", "/")}.py').read_text())
    if module == 'jax_transformer':  # the one exception: `from jax_transformer import generate`
        tree.body = [node for node in tree.body if not is_lazy_import(node)]
    imported = set(imported_modules(tree))
    assert not imported & {*SCRIPTS}, f'{module} imports a script: move what it needs to a module'
    for name in imported & LEVELS.keys():
        assert LEVELS[name] < LEVELS[module], (
            f'{module} imports {name}, which is not below it: see "Where does X go" in CONTRIBUTING.md; move the '
            'function to the lower room, or give the modules other levels if no circle comes of it')


@pytest.mark.parametrize('module', [module for module in LEVELS if module.startswith('jax_files.')])
def test_what_is_on_disk_knows_no_model(module):
    tree = ast.parse((ROOT / f'{module.replace(".", "/")}.py').read_text())
    own = {name for name in imported_modules(tree) if name in LEVELS}
    allowed = {name for name in LEVELS if name.startswith('jax_files.')} | {
        'jax_flags', 'jax_devices.setup', 'jax_devices.processes'}
    assert own <= allowed, (
        f'{module} imports {own - allowed}: what reads or writes a file takes plain values; move what knows the model '
        'to the module that calls it')


def test_a_folder_is_one_paragraph_and_exports_nothing():
    for folder in FOLDERS:
        tree = ast.parse((ROOT / folder / '__init__.py').read_text())
        assert len(tree.body) == 1 and ast.get_docstring(tree), f'{folder}/__init__.py is a docstring and nothing else'


def test_names_are_exported_again_by_modules_of_which_users_import_them_only():
    """A name imported and not used is an export. Pyflakes finds the others."""
    exporting = {name for name, path in product_files().items() if 'noqa: F401' in path.read_text(encoding='utf-8')}
    documented = {'jax_train_utils.py', 'jax_transformer.py', 'jax_generate.py'}
    allowed = documented | {'jax_chat.py'}  # jax_chat.py: readline
    assert exporting <= allowed, 'import a name from the module that defines it, not through another one'


def test_no_private_name_of_jax_is_imported_at_the_top_of_a_file():
    for path in source_files():
        for node in ast.parse(path.read_text(encoding='utf-8')).body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = set(imported_modules(ast.Module([node], []))) - {'jaxlib', 'jaxlib.__version__'}
                private = [name for name in names if f'{name}.'.startswith(PRIVATE)]
                assert not private, (f'{path}:{node.lineno}: {private} may be gone in another version of jax: import '
                                     'it in the function that uses it, with a fallback')


def test_the_lazy_import_is_jax_generates():
    tree = ast.parse((ROOT / 'jax_transformer.py').read_text())
    lazy = [name for node in tree.body if is_lazy_import(node) for name in imported_modules(node)]
    assert set(lazy) == {'jax_generate', 'jax_generate.generate'}
    from jax_transformer import generate
    assert generate is jax_generate.generate
    with pytest.raises(AttributeError, match='no_such_name'):
        jax_transformer.no_such_name


@pytest.mark.parametrize('script', SCRIPTS)
def test_a_script_imports_no_other_script(script):
    if (ROOT / f'{script}.py').exists():
        tree = ast.parse((ROOT / f'{script}.py').read_text())
        imported = set(imported_modules(tree))
        assert not imported & {*SCRIPTS}, f'{script} imports a script: move what it needs to a module'


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
# thermometers (CONTRIBUTING.md): printed, and failing for gross values only. `python -m pytest -n 0 -s
# tests/test_source.py -k thermometer` shows them.

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


def test_a_thermometer_of_functions_is_printed():
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


def test_a_thermometer_of_lines_is_printed():
    lines = []
    for path in product_files().values():
        lines += [line for line in path.read_text(encoding='utf-8').splitlines() if line.strip()]
    n_comments = sum(line.strip().startswith('#') for line in lines)
    n_long = sum(len(line) > 100 for line in lines)
    mean = sum(map(len, lines)) / len(lines)
    print(f'{len(lines):,} lines, {mean:.1f} columns on average, {n_comments / len(lines):.1%} comments, '
          f'{n_long} of more than 100 columns')
    assert mean < 70, 'the code is pressed into columns: one statement a line, and a comment before a step'
