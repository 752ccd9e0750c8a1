"""Trains from Python, in a notebook or another program, by running train_jax.py in this process.

    from jax_run.notebook import compare, train
    model, metrics = train('config/train_pystdlib.py', dataset='mine', out_dir='out-mine')
    compare(['out-mine', 'out-other'])
"""
import contextlib
import logging
import os
import runpy
import sys
import threading
from pathlib import Path

import jax

from jax_devices.processes import StopSignal
from jax_flags import UserError
from jax_run import log
from jax_run.checkpoints import checkpoint_steps, run_folder
from jax_run.compare import compare_runs
from jax_run.log import read_metrics
from jax_text import load

SCRIPT = Path(__file__).parent.parent / 'train_jax.py'


def train(config='', **flags):
    """Trains as `python train_jax.py CONFIG --name=value ...` does. config: the path CONFIG, or ''
    for none. flags: name=value. Returns (model, as jax_text.load returns; records of
    metrics.jsonl). Returns None with eval_only.

    In a notebook, shows loss.png, drawn again at each evaluation. An interrupt ends the training
    and saves a checkpoint; train() then returns the model of the latest checkpoint, or raises
    KeyboardInterrupt if there is none. A second interrupt ends the training at once, without
    saving, and raises KeyboardInterrupt. Raises UserError for everything that the script refuses,
    and for flags that this process cannot follow (see check_process)."""
    check_process(flags)
    arguments = [str(config)] if config else []
    arguments += [f'--{name}={value}' for name, value in flags.items()]
    with settings_kept(), watched() as runs:
        try:
            sys.argv = [SCRIPT.name, *arguments]
            runpy.run_path(str(SCRIPT), run_name='__main__')
        except SystemExit as error:  # a signal, or eval_only
            if not error.code:
                return None
            has_saved = runs and checkpoint_steps(runs[-1].flags['out_dir'])
            if not has_saved:
                raise KeyboardInterrupt from None
        flags = runs[-1].flags
        model = load(flags['out_dir'], checkpoint='latest', base=flags['base'],
                     device=flags['device'])
        return model, list(read_metrics(run_folder(flags['out_dir']).files))


def compare(folders, x='iterations'):
    """Prints a table of runs, the best run first, and returns a figure of the runs' curves, which
    the notebook shows. See compare_runs."""
    shell = notebook()
    if shell:
        from IPython.core.pylabtools import select_figure_formats
        select_figure_formats(shell, {'png'})
    return compare_runs(folders, x)


def check_process(flags):
    """Raises UserError outside of the main thread, and for flags that this process cannot follow:
    verify; the flags for several processes; deterministic=True after JAX has started a GPU or
    TPU."""
    if flags.get('verify'):
        raise UserError('verify trains nothing new: run train_jax.py --verify')
    if threading.current_thread() is not threading.main_thread():
        raise UserError('train() runs in the main thread, which alone sees an interrupt')
    if flags.get('deterministic') and is_initialized() and jax.default_backend() != 'cpu':
        raise UserError('deterministic=True is read when JAX starts, and here it has: restart the '
                        'kernel and train first, or run train_jax.py')
    several = {'coordinator_address', 'num_processes', 'process_id'} & flags.keys()
    if several:
        raise UserError(f'{min(several)} is for several processes: run train_jax.py in each')


def is_initialized():
    """Returns whether JAX has looked for its devices. Returns True if this version of JAX does not
    say."""
    try:
        from jax._src.xla_bridge import backends_are_initialized
    except ImportError:
        return True
    return backends_are_initialized()


def notebook():
    """Returns IPython's shell in a notebook, else None."""
    if 'ipykernel' not in sys.modules:
        return None
    from IPython import get_ipython
    return get_ipython()


@contextlib.contextmanager
def watched():
    """Yields a list and puts into it the Run that begins inside the with block. In a notebook, also
    shows the run's loss.png."""
    runs = []
    shown = None

    def watch(run):
        nonlocal shown
        runs[:] = [run]
        picture = run_folder(run.flags['out_dir']).files / 'loss.png'
        if not notebook() or not picture.exists():
            return
        from IPython.display import Image, display
        image = Image(data=picture.read_bytes())
        if shown is None:
            shown = display(image, display_id=True)
        else:
            shown.update(image)

    log.watchers.append(watch)
    try:
        yield runs
    finally:
        log.watchers.remove(watch)


@contextlib.contextmanager
def settings_kept():
    """Restores, at the end of the with block, the settings of this process that train_jax.py
    changes: hooks, arguments, output, levels of logging, XLA_FLAGS. A notebook needs this, because
    its process lives on after train_jax.py has ended. Within the block, a second interrupt raises
    KeyboardInterrupt instead of ending the process, unless a checkpoint is being saved (see
    StopSignal)."""
    names = ('argv', 'excepthook', 'unraisablehook', 'stdout')
    saved = {name: getattr(sys, name) for name in names}
    output = {name: getattr(sys.stdout, name, None) for name in ('line_buffering', 'errors')}
    loggers = [logging.getLogger(name) for name in ('absl', 'asyncio')]
    levels = [logger.level for logger in loggers]
    xla_flags = os.environ.get('XLA_FLAGS')
    StopSignal.owns_process = False
    try:
        yield
    finally:
        StopSignal.owns_process = True
        for name, value in saved.items():
            setattr(sys, name, value)
        if hasattr(sys.stdout, 'reconfigure'):
            sys.stdout.reconfigure(**output)
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)
        if xla_flags is None:
            os.environ.pop('XLA_FLAGS', None)
        else:
            os.environ['XLA_FLAGS'] = xla_flags
