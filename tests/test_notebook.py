"""jax_run/notebook.py: training from Python, by the script, in a process that lives on."""
import os
import signal
import sys
import threading

import jax
import pytest

from jax_flags import UserError
from jax_run import log, notebook
from jax_run.notebook import compare, train
from tests.common import MODEL, SHORT

# the flags of a short run, as keywords
SETTINGS = dict(flag.removeprefix('--').split('=') for flag in MODEL + SHORT) | {
    'device': 'cpu:0', 'max_iters': 4, 'eval_interval': 2, 'lr_decay_iters': 0}


@pytest.fixture
def short(dataset, tmp_path):
    return {**SETTINGS, 'dataset': dataset, 'out_dir': tmp_path / 'out'}


def settings():
    """What a script sets for its process."""
    handlers = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    return (handlers, sys.argv, sys.excepthook, sys.unraisablehook, sys.stdout, sys.modules['__main__'],
            os.environ.get('XLA_FLAGS'), log.watchers[:], signal.set_wakeup_fd(-1),
            [thread.name for thread in threading.enumerate() if 'answer' in thread.name])


def test_training_returns_the_model_and_its_metrics_and_leaves_the_process_as_it_was(short):
    before = settings()
    model, metrics = train(**short)
    model, more = train(init_from='resume', out_dir=short['out_dir'], max_iters=6)
    assert settings() == before
    assert [record['iter'] for record in metrics if 'val_loss' in record] == [0, 2, 4]
    assert [record['iter'] for record in more if 'val_loss' in record] == [0, 2, 4, 6]
    assert f"{short['out_dir']}, checkpoint of iteration 6" in repr(model)
    assert model.generate('the', max_new_tokens=3, seed=1) == model.generate(['the'], max_new_tokens=3, seed=1)[0]


def test_a_config_file_and_a_mistake_are_those_of_the_script(short, tmp_path):
    config = tmp_path / 'mine.py'
    config.write_text('n_layer = 2\n')
    short.pop('n_layer')
    model, _ = train(config, **short)
    assert model.config.n_layer == 2
    before = settings()
    with pytest.raises(UserError, match='did you mean --learning_rate') as refused:
        train(config, lerning_rate=1e-3)
    assert settings() == before
    assert refused.value._render_traceback_() == [f'error: {refused.value}']
    with pytest.raises(UserError, match='holds a run at iteration 4; continue it'):
        train(config, **short)


def interrupt_when(n_evaluations, times=1):
    """A watcher that sends SIGINT to this process after so many evaluations."""
    seen = []

    def watch(run):
        seen.append(run)
        if len(seen) == n_evaluations + 1:  # the first is the beginning
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)

    return watch


def test_an_interrupt_saves_and_returns_what_has_been_trained(short, monkeypatch, capfd):
    monkeypatch.setattr(log, 'watchers', [interrupt_when(2)])
    before = settings()
    model, metrics = train(**{**short, 'max_iters': 100})
    assert settings() == before
    said = capfd.readouterr()
    assert 'stopping after this iteration, then saving' in said.err
    assert 'stopped by Ctrl-C at iteration 3, saved; continue with --init_from=resume' in said.out
    assert 'checkpoint of iteration 3' in repr(model) and metrics[-1]['iter'] == 2


def test_a_second_interrupt_ends_the_run_and_not_the_process(short, monkeypatch):
    monkeypatch.setattr(log, 'watchers', [interrupt_when(2, times=2)])
    before = settings()
    with pytest.raises(KeyboardInterrupt):
        train(**{**short, 'max_iters': 100})
    assert settings() == before


def test_an_interrupt_with_nothing_to_save_is_one_of_the_cell(short, monkeypatch):
    monkeypatch.setattr(log, 'watchers', [interrupt_when(0)])
    with pytest.raises(KeyboardInterrupt):
        train(**short)


def test_what_a_living_process_cannot_set_is_refused(short, monkeypatch):
    monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
    with pytest.raises(UserError, match='deterministic=True is read when JAX starts'):
        train(**short, deterministic=True)
    monkeypatch.undo()
    with pytest.raises(UserError, match='num_processes is for several processes'):
        train(**short, num_processes=2)
    with pytest.raises(UserError, match='verify trains nothing new'):
        train(**short, verify=1)
    with pytest.raises(UserError, match='cuda'):
        train(**{**short, 'device': 'cuda'})
    found = []

    def in_a_thread():
        try:
            train(**short)
        except UserError as error:
            found.append(str(error))

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert found == ['train() runs in the main thread, which alone sees an interrupt']


def test_runs_are_compared_in_a_table_and_a_figure(short, tmp_path, capsys):
    train(**short)
    train(**{**short, 'out_dir': tmp_path / 'other', 'learning_rate': 3e-2})
    capsys.readouterr()
    figure = compare([short['out_dir'], tmp_path / 'other'])
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ['run', 'learning_rate', 'best'] and len(rows) == 2
    axes, = figure.axes
    assert len(axes.lines) == 5 and axes.get_xlabel() == 'iterations'


def test_a_notebook_shows_the_curve_and_draws_it_anew(short, monkeypatch):
    display = pytest.importorskip('IPython.display')
    shown = []

    class Handle:
        def update(self, image):
            shown.append(image.data[:4])

    def show(image, display_id):
        shown.append(image.data[:4])
        return Handle()

    monkeypatch.setattr(notebook, 'notebook', lambda: True)
    monkeypatch.setattr(display, 'display', show)
    monkeypatch.setattr(log, 'plot_losses', lambda out_dir: (out_dir / 'loss.png').write_bytes(b'\x89PNG'))
    train(**short)
    assert len(shown) == 3 and set(shown) == {b'\x89PNG'}
