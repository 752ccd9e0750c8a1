"""Fixtures that several test modules share. A run that no test changes is made once in each test process."""
import pytest

from tests.common import MODEL, QWEN, SHORT, TUNE, copy_folder, edit_json, prepare, succeeded, train


@pytest.fixture(scope='session')
def flags(dataset):
    """Those of a short training run."""
    return [f'--dataset={dataset}', *MODEL, *SHORT]


@pytest.fixture(scope='session')
def finished(tmp_path_factory, flags):
    """(the out_dir of a run of 20 iterations, what it printed)."""
    out = tmp_path_factory.mktemp('finished') / 'out'
    return out, succeeded(train(out, *flags)).stdout


@pytest.fixture
def run_copy(finished, tmp_path):
    """A copy of the finished run, to be changed."""
    return copy_folder(finished[0], tmp_path)


@pytest.fixture(scope='session')
def qwen(tmp_path_factory, flags):
    """The out_dir of a small Qwen3-MoE that was trained for 20 iterations."""
    out = tmp_path_factory.mktemp('qwen') / 'out'
    succeeded(train(out, *flags, *QWEN))
    return out


@pytest.fixture
def tuned(speaking, tmp_path):
    """(folder of a data set with the tokens of the model `speaking`, out_dir of a run that trained it further)."""
    for name in ('a', 'b'):
        (tmp_path / f'{name}.txt').write_text(f'{name} hello, again and again. <s> ' * 20)
    succeeded(prepare('shakespeare', tmp_path / 'a.txt', tmp_path / 'b.txt', f'--tokenizer={speaking}', '--out_dir',
                      tmp_path / 'data'))
    succeeded(train(tmp_path / 'out', f'--dataset={tmp_path / "data"}', f'--init_from={speaking}', *TUNE))
    return tmp_path / 'data', tmp_path / 'out'


@pytest.fixture
def chatting(speaking):
    template = ('{% for m in messages %}{% if m.role == "user" %}<user>{{ m.content }}{% else %}<model>'
                '{% generation %}{{ m.content|trim }}</s>{% endgeneration %}{% endif %}{% endfor %}'
                '{% if add_generation_prompt %}<model>{% endif %}')
    edit_json(speaking / 'tokenizer_config.json', chat_template=[{'name': 'default', 'template': template}])
    return speaking
