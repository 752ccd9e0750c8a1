"""Conversations about the names of a library: what data/pychat/prepare.py makes, and that a model learns them."""
import collections
import importlib.util
import json
import sys

import pytest

from jax_text import load
from tests.common import GOLDEN, ROOT, assert_refused, prepare, run_script, succeeded, train

CODE = '''"""{module} holds small things.

More about it, which is not asked."""


def {first}(a):
    """Returns the {first} of a. It is fast."""


def {second}():
    """{second}() -> value

    Finds {second} in a file of the folder {module}."""


class {kind}:
    """A {kind} that is kept."""

    def close(self):
        """Closes the {kind} for good"""

    def _hidden(self):
        """Is not public."""


def undocumented():
    pass
'''


@pytest.fixture(scope='module')
def pychat():
    """The modules names and questions of data/pychat."""
    folder = ROOT / 'data' / 'pychat'
    modules = {}
    for name in ('names', 'questions'):
        spec = importlib.util.spec_from_file_location(name, folder / f'{name}.py')
        modules[name] = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(modules[name])
    yield modules
    for name in modules:
        del sys.modules[name]


@pytest.fixture(scope='module')
def package(tmp_path_factory):
    """A package with documented names, which must not be run."""
    folder = tmp_path_factory.mktemp('code') / 'shop'
    folder.mkdir()
    (folder / '__init__.py').write_text('"""A shop with many modules."""\nraise SystemExit("it was run")\n')
    for i, module in enumerate(['apples', 'pears', 'plums', 'nuts', 'figs', 'dates']):
        (folder / f'{module}.py').write_text(CODE.format(
            module=module, first=f'weigh_{module}', second=f'find_{i}', kind=f'Box{module.title()}'))
    return folder


@pytest.mark.filterwarnings('ignore:.*deprecated:DeprecationWarning')
def test_the_names_of_the_library_have_their_first_sentence(pychat):
    names, every = pychat['names'].read_names()
    assert len(names) > 3000 and every > names.keys()
    expected = {
        'len': 'Return the number of items in a container.',  # a builtin
        'math.sqrt': 'Return the square root of x.',  # in C
        'shutil.copyfile': 'Copy data from src to dst in the most efficient way possible.',
        'os.path.join': "Join two or more pathname components, inserting '/' as needed."}
    assert {name: names[name].sentence for name in expected} == expected
    assert {names[name].kind for name in ('shutil', 'list.append', 'collections.Counter', 'len')} == {
        'module', 'method', 'class', 'function'}
    assert not [name for name in names if name.startswith('_') or name.startswith(('test.', 'tkinter'))]
    assert all(12 <= len(named.sentence) <= 200 and named.sentence[-1] in '.!?' for named in names.values())


@pytest.mark.parametrize('doc, sentence', [
    ('Return it.', ''), ('Return the number. More of it.', 'Return the number.'),
    ('Return e.g. the\n  number of  all', 'Return e.g. the number of all.'),
    ('f(x) -> y\n\nReturns the y of x.', 'Returns the y of x.'), ('>>> f(1)\n2', ''),
    ('Gibt die Größe zurück.', ''), (None, ''), ('x' * 300, ''), ('Has these properties:\n\n- a', '')])
def test_a_first_sentence_is_one_line_of_ascii(pychat, doc, sentence):
    assert pychat['names'].first_sentence(doc) == sentence


def test_a_package_is_read_and_not_run(pychat, package):
    names, every = pychat['names'].read_names(package)
    assert names['shop.apples.weigh_apples'] == (
        'shop.apples.weigh_apples', 'function', 'Returns the weigh_apples of a.')
    assert names['shop.pears.BoxPears.close'].sentence == 'Closes the BoxPears for good.'
    assert names['shop.plums.find_2'].sentence == 'Finds find_2 in a file of the folder plums.'
    assert 'shop.nuts.undocumented' in every - names.keys() and not any('_hidden' in name for name in every)


@pytest.mark.parametrize('n_modules, n_functions', [(1, 100), (6, 100)])
def test_a_package_of_many_functions_has_enough_names_that_do_not_exist(pychat, tmp_path, n_modules, n_functions):
    """Of a verb and a noun there are 400 for each module."""
    folder = tmp_path / 'large'
    folder.mkdir()
    (folder / '__init__.py').write_text('')
    for i in range(n_modules):
        (folder / f'part{i}.py').write_text(''.join(
            f'def function_{i}_{j}():\n    """Returns the number {j} of part {i}."""\n' for j in range(n_functions)))
    names, every = pychat['names'].read_names(folder)
    maker = pychat['questions'].Maker(names, every, 'large', seed=1)
    for split in ('train', 'val'):
        maker.make(split, 2 * len(names))
        assert len(maker.invented) > 2 * len(names)


def test_a_vocabulary_without_an_end_token_needs_a_template_without_it(tmp_path, package):
    (tmp_path / 'a.txt').write_text('the weather there ' * 50)
    prepare('text', tmp_path / 'a.txt', '--tokenizer=char', '--out_dir', tmp_path / 'chars')
    result = run_script(
        'data/pychat/prepare.py', package, '--tokenizer', tmp_path / 'chars', '--out_dir', tmp_path / 'x')
    assert_refused(result, 'has no token that ends a text: add --template=plain')
    assert not (tmp_path / 'x').exists()  # it is refused at once


def test_forms_are_divided_and_names_that_do_not_exist_are_new_in_each_split(pychat, package):
    questions = pychat['questions']
    for forms in (questions.FOLLOW_UP, questions.HOLDS, questions.HELLO, questions.WHO, questions.THANKS):
        parts = [set(forms[split]) for split in ('train', 'val', 'test')]
        assert not parts[0] & parts[1] and not parts[1] & parts[2] and not parts[0] & parts[2]
    names, every = pychat['names'].read_names(package)
    maker = questions.Maker(names, every, 'shop', seed=1)
    made = {split: maker.make(split, 100) for split in ('train', 'val')}
    tasks = maker.make_tasks('test')
    # each name is asked for in many forms, and never in those of val and test
    of_name = collections.defaultdict(set)
    for turns in made['train']:
        for question, answer in zip(turns[::2], turns[1::2]):
            if answer in {named.sentence for named in names.values()}:
                of_name[answer].add(question)
    assert min(map(len, of_name.values())) > 2 and sum(map(len, of_name.values())) > 6 * len(of_name)
    kept = [form.format(name).casefold().strip('.?') for form in questions.WHAT['val'] + questions.WHAT['test']
            for name in names]
    asked = ' '.join(turn.casefold() for turns in made['train'] for turn in turns[::2])
    assert not [question for question in kept if question in asked]
    invented = {}
    for split, conversations in {**made, 'test': tasks['invented']}.items():
        answers = {turn for turns in conversations for turn in turns if turn.startswith('There is no ')}
        invented[split] = {answer.removeprefix('There is no ').removesuffix(' in shop.') for answer in answers}
        assert invented[split] and not invented[split] & every
    assert not invented['train'] & invented['test'] and not invented['train'] & invented['val']
    sentences = {named.sentence for named in names.values()}
    assert all(turns[-1] in sentences for turns in tasks['forms'] + tasks['follow_ups'])
    assert all(len(turns) == 4 for turns in tasks['follow_ups'])
    # many conversations go on with something else, none is longer than a row, and those of the test are long
    n_questions = collections.Counter(len(turns) // 2 for turns in made['train'])
    assert min(n_questions[n] for n in (1, 2, 3, 4)) > 10
    assert max(sum(map(len, turns)) for turns in made['train']) <= questions.MAX_CHARACTERS
    assert {len(turns) // 2 for turns in tasks['conversations']} <= {3, 4, 5, 6}
    last = collections.Counter(turns[-1][:12] for turns in tasks['conversations'])
    assert last['There is no '] == 25


def test_a_name_is_asked_for_by_its_last_part_only_if_no_other_name_ends_so(pychat, package):
    maker = pychat['questions'].Maker(*pychat['names'].read_names(package), 'shop', seed=1)
    alone = {named.last for named in maker.known_alone}
    assert 'weigh_apples' in alone and 'BoxPears' in alone
    assert 'close' not in alone  # a method of six classes


def test_joined_conversations_fit_into_a_row(pychat):
    maker = pychat['questions'].Maker({}, set(), 'shop', seed=1)
    joined = maker.join([['q' * 150, 'a' * 150]] * 300)
    assert {sum(map(len, turns)) for turns in joined} == {300, 600}
    assert [turn for turns in joined for turn in turns] == ['q' * 150, 'a' * 150] * 300


@pytest.fixture(scope='module')
def taught(package, tmp_path_factory):
    """(the out_dir of a small model that has learned the package's names, the file of the test's questions)."""
    folder = tmp_path_factory.mktemp('taught')
    text = ' '.join(path.read_text() for path in package.glob('*.py')) * 3
    (folder / 'text.txt').write_text(text)
    succeeded(prepare('text', folder / 'text.txt', '--tokenizer=bpe:400', f'--out_dir={folder / "text"}'))
    made = succeeded(prepare('pychat', package, f'--tokenizer={folder / "text" / "tokenizer"}', '--rows=128',
                             f'--out_dir={folder / "chat"}'))
    assert '31 names of ' in made.stdout
    succeeded(train(folder / 'out', f'--dataset={folder / "chat"}', '--n_layer=2', '--n_head=2', '--n_embd=64',
                    '--block_size=128', '--batch_size=8', '--gradient_accumulation_steps=1', '--optimizer=muon',
                    '--learning_rate=1e-2', '--lr_schedule=linear', '--min_lr=0', '--max_iters=160',
                    '--warmup_iters=10', '--position=rope', '--norm=rms', '--bias=False', '--mlp=swiglu',
                    '--eval_interval=160', '--eval_iters=4', '--device=cpu:0'))
    return folder / 'out', folder / 'chat' / 'tasks' / 'forms.jsonl'


def read_questions(tasks):
    return [json.loads(line)['messages'] for line in tasks.read_text().splitlines()]


def test_the_last_tenth_and_the_tasks_have_the_words_of_their_split(pychat, taught):
    """data/chat/prepare.py takes the last tenth for validation: it must be the conversations that
    are not in the words of the train part."""
    _, tasks = taught
    questions = pychat['questions']
    forms = {split: [form.partition('{}')[0] for kind in (
        questions.HOLDS, questions.HELLO, questions.WHO, questions.THANKS, questions.ELSEWHERE, questions.WHAT)
        for form in kind[split]] for split in ('val', 'test')}
    first = [chat[0]['content'] for chat in read_questions(tasks.parent.parent / 'chats.jsonl')]
    n_train = int(len(first) * 0.9)
    assert all(question.startswith(tuple(forms['val'])) for question in first[n_train:])
    assert not [question for question in first[:n_train] if question.startswith(tuple(forms['val'] + forms['test']))]
    for name, split in (('forms', 'test'), ('val_forms', 'val'), ('invented', 'test'), ('val_invented', 'val')):
        asked = [chat[0]['content'] for chat in read_questions(tasks.parent / f'{name}.jsonl')]
        assert asked and all(question.startswith(tuple(forms[split])) for question in asked)


def test_a_model_learns_to_answer_and_eval_counts_what_it_says(taught):
    """About a package with a few names, all of them, in forms that it has not seen in training."""
    out, tasks = taught
    done = succeeded(run_script('eval_jax.py', f'--out_dir={out}', '--device=cpu:0', f'--tasks={tasks}'))
    accuracy = json.loads(done.stdout.strip().split('\n')[-1])['results']['tasks']['forms']['accuracy']
    assert accuracy > 0.5

    # the same share of answers as the model gives
    model = load(out, device='cpu:0')
    items = read_questions(tasks)
    right = [model.chat(item[:-1], temperature=0, max_new_tokens=60) == item[-1]['content'] for item in items]
    assert sum(right) / len(right) == pytest.approx(accuracy)


@pytest.mark.slow
def test_transformers_answers_alike_from_an_export(request, tmp_path):
    """Where PyTorch is installed; docs/models.md has the figures of the model of config/chat_laptop.py."""
    torch = pytest.importorskip('torch')
    transformers = pytest.importorskip('transformers')
    out, tasks = request.getfixturevalue('taught')
    succeeded(run_script('export_jax.py', f'--out_dir={out}', f'--folder={tmp_path / "model"}'))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'model')
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / 'model')
    model = load(out, device='cpu:0')
    for item in read_questions(tasks):
        ids = tokenizer.apply_chat_template(item[:-1], add_generation_prompt=True, return_tensors='pt')['input_ids']
        with torch.no_grad():
            made = theirs.generate(ids, do_sample=False, max_new_tokens=60)
        answer = tokenizer.decode(made[0, ids.shape[1]:], skip_special_tokens=True)
        assert model.chat(item[:-1], temperature=0, max_new_tokens=60) == answer


def test_what_cannot_be_prepared_is_one_line(tmp_path, package):
    assert_refused(prepare('pychat', f'--tokenizer={tmp_path / "none"}'), 'cannot read the tokenizer')
    assert_refused(prepare('pychat', tmp_path / 'none', f'--tokenizer={package}'), 'is not a folder')
    (tmp_path / 'empty').mkdir()
    assert_refused(prepare('pychat', tmp_path / 'empty', f'--tokenizer={package}'), 'has 0 names with a docstring')
    (tmp_path / 'chats.jsonl').write_text('mine')
    refused = prepare('pychat', package, f'--tokenizer={GOLDEN / "letters"}', f'--out_dir={tmp_path}')
    assert_refused(refused, 'is not of this script')
    assert (tmp_path / 'chats.jsonl').read_text() == 'mine'
