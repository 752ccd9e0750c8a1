"""Finds the names of Python's library, or of a package, each with the first sentence of its
docstring."""
import ast
import importlib.machinery
import importlib.util
import inspect
import re
import sys
import sysconfig
import types
from pathlib import Path
from typing import NamedTuple

# Not the library itself: installed packages, tests, applications; windows and turtles, with 800
# names of their own; what newer versions lack.
SKIPPED = {'site-packages', 'dist-packages', '__pycache__', 'test', 'tests', 'idle_test', 'idlelib',
           'turtledemo', 'ensurepip', 'pydoc_data', 'encodings', 'tkinter', 'turtle', 'lib2to3',
           'distutils', 'msilib', 'posix', 'nt', 'antigravity', 'this'}
# modules in Python that take functions from C
WITH_C = ('os', 'io', 'collections', 'datetime', 'functools', 'operator', 'random', 're', 'socket',
          'struct', 'json', 'bisect', 'heapq', 'decimal', 'string', 'copy')
# functions that programs replace: the one found would depend on the program
HOOKS = {'excepthook', 'displayhook', 'unraisablehook', 'breakpointhook'}
# what people call the modules that hold these functions
SPOKEN = {'posixpath': 'os.path', 'genericpath': 'os.path'}


class Named(NamedTuple):
    """A module, class, function or method that has a public name."""
    name: str  # with its module: os.path.join; of a builtin, len
    kind: str  # 'module', 'class', 'function' or 'method'
    sentence: str  # the first of its docstring, '' if there is none

    @property
    def parent(self):
        """The module or class that holds the name: the name without its last part, or '' for a
        builtin."""
        return self.name.rpartition('.')[0]

    @property
    def last(self):
        """The last part of the name."""
        return self.name.rpartition('.')[2]


def first_sentence(doc):
    """Returns the first sentence of a docstring, '' if it is not usable: too short, too long, a
    signature, the title of a list, or with letters beyond ASCII."""
    paragraphs = [re.sub(r'\s*\n\s*', ' ', text)
                  for text in re.split(r'\n\s*\n', (doc or '').strip())]
    text = next((text for text in paragraphs if not is_signature(text)), '')
    sentence = re.match(r'.+?[.!?](?=\s+[A-Z]|\s\s|$)|.*', text)[0]
    sentence = ' '.join(sentence.split())
    is_whole = sentence[-1:] not in ('', ':', ',')
    if not is_whole or not 12 <= len(sentence) <= 200 or not sentence.isascii():
        return ''
    return sentence if sentence[-1] in '.!?' else f'{sentence}.'


def is_signature(text):
    """Returns whether a text is the signature of a function, such as "sleep(seconds)" or "max(a, b)
    -> value"."""
    return '->' in text or re.match(r'[\w.]+\(|>>>', text) is not None


def from_source(root, package=''):
    """Yields a Named for each public name of the Python files under the folder `root`. The files
    are parsed, not run. package: the name of a package, such as 'numpy', with which all names
    begin; '' for Python's own library."""
    for path in sorted(Path(root).rglob('*.py')):
        parts = path.relative_to(root).with_suffix('').parts
        is_hidden = any(part.startswith('_') and part != '__init__' for part in parts)
        if SKIPPED.intersection(parts) or is_hidden or not path.is_file():
            continue
        module = '.'.join(filter(None, [package, *parts])).removesuffix('.__init__')
        module = SPOKEN.get(module, module)
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        yield Named(module, 'module', first_sentence(ast.get_docstring(tree)))
        yield from from_tree(tree, module, 'function')


def from_tree(tree, holder, kind):
    """Yields a Named for each public class, function and method in the syntax tree of a module or a
    class. holder: the full name of this module or class. kind: the kind of its functions,
    'function' for a module or 'method' for a class."""
    for node in tree.body:
        is_class = isinstance(node, ast.ClassDef)
        if not is_class and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if node.name.startswith('_'):
            continue
        name = f'{holder}.{node.name}'
        yield Named(name, 'class' if is_class else kind, first_sentence(ast.get_docstring(node)))
        if is_class:
            yield from from_tree(node, name, 'method')


def from_c():
    """Yields a Named for each public function, class and method of Python's library that is
    implemented in C, and for each module that has some of them.

    There are two kinds of modules: those without Python source, for example builtins and math; and
    those in WITH_C, for example os, which are Python and import some of their names from C."""
    for module in sorted(sys.stdlib_module_names):
        is_public = not module.startswith('_') and module not in SKIPPED
        if module in WITH_C or (is_public and is_c(module)):
            yield from from_module(module)


def is_c(module):
    """Returns whether the module with the name `module` is written in C: it is built into Python,
    or is an extension."""
    spec = importlib.util.find_spec(module)
    c_endings = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    return spec is not None and (spec.origin == 'built-in' or str(spec.origin).endswith(c_endings))


def from_module(module):
    """Yields several Named: one for the module itself, one for each of its functions and classes
    that are written in C (the language), and one for each method of these classes."""
    holder = importlib.import_module(module)
    prefix = '' if module == 'builtins' else f'{module}.'
    yield Named(module, 'module', first_sentence(holder.__doc__))
    for name, value in sorted(vars(holder).items()):
        is_error = isinstance(value, type) and issubclass(value, BaseException)
        if name.startswith('_') or name in HOOKS or is_error:
            continue
        if isinstance(value, (types.BuiltinFunctionType, types.MethodType)):
            yield Named(prefix + name, 'function', first_sentence(inspect.getdoc(value)))
        elif isinstance(value, type) and not hasattr(value, '__slots__') and in_c(value):
            yield Named(prefix + name, 'class', first_sentence(value.__doc__))
            for method, function in sorted(vars(value).items()):
                if not method.startswith('_') and callable(function):
                    doc = first_sentence(inspect.getdoc(function))
                    yield Named(f'{prefix}{name}.{method}', 'method', doc)


def in_c(value):
    """Returns whether `value`, a class, is written in C."""
    try:
        inspect.getsource(value)
    except (OSError, TypeError):
        return True
    return False


def read_names(package=None):
    """Returns ({name: Named}; {all names}) of Python's library, or of a package. The dict has only
    the names with a usable sentence, see first_sentence. If several objects have the same name, the
    dict has the first of them that has a sentence. package: the folder of the package."""
    if package:
        root = Path(package).resolve()
        found = from_source(root, root.name)
    else:
        found = [*from_c(), *from_source(sysconfig.get_path('stdlib'))]
    names = {}
    every = set()
    for named in found:
        every.add(named.name)
        if named.sentence and named.name not in names:
            names[named.name] = named
    return names, every
