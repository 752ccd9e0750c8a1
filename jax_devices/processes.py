"""Several processes: how they find each other, and agree; the signals that stop one."""
import errno
import importlib.util
import json
import math
import os
import signal
import socket
import sys
import threading
import time

import jax
import numpy as np

from jax_flags import UserError

PEER_TIMEOUT = 60  # seconds of silence after which a process counts as dead


def initialize_distributed(coordinator_address='', num_processes=0, process_id=-1):
    """jax.distributed.initialize, if several processes train together. Call it before JAX initializes its backends.

    coordinator_address: host:port of process 0, to which the others connect, with num_processes and process_id; 'auto'
        lets JAX detect all three (a TPU pod). JAX also detects them where coordinator_address is empty and Slurm,
        Open MPI or an indexed Kubernetes job has started several processes; torchrun's variables are understood too.
    num_processes=1 starts alone, also where the environment speaks of several (a Kubernetes job of one pod).
    Raises UserError if the flags do not go together or the processes do not find each other."""
    if num_processes == 1 and not coordinator_address and process_id < 1:
        return
    if num_processes or process_id >= 0:
        host, _, port = coordinator_address.rpartition(':')
        if not host or not port.isdecimal() or not 0 <= process_id < num_processes:
            raise UserError('several processes need --coordinator_address=host:port of process 0, --num_processes=N '
                            f'and --process_id=0 to N-1; got {coordinator_address!r}, {num_processes}, {process_id}')
    elif coordinator_address not in ('', 'auto'):
        raise UserError(f'--coordinator_address={coordinator_address} needs --num_processes and --process_id')
    elif not coordinator_address and int(os.environ.get('WORLD_SIZE') or 1) > 1 and 'RANK' in os.environ:
        return join_torchrun()
    in_pod = {'KUBERNETES_SERVICE_HOST', 'JOB_COMPLETION_INDEX'} <= os.environ.keys()
    several = (int(os.environ.get('SLURM_NTASKS') or 1) > 1 and 'SLURM_STEP_NODELIST' in os.environ
               or int(os.environ.get('OMPI_COMM_WORLD_SIZE') or 1) > 1 or in_pod)
    if not coordinator_address and not several:
        return
    if in_pod and coordinator_address in ('', 'auto') and importlib.util.find_spec('kubernetes') is None:
        raise UserError('JAX finds the pods of a Kubernetes job with the package kubernetes: pip install "jax[k8s]"; '
                        'for a job of one pod add --num_processes=1')
    cluster = {}  # JAX detects it
    if coordinator_address not in ('', 'auto'):
        cluster = dict(coordinator_address=coordinator_address, num_processes=num_processes, process_id=process_id)
        if process_id == 0:
            check_port_is_free(int(port))
    join(**cluster)


def check_port_is_free(port):
    """Raises UserError if another program listens where process 0 is to: mostly another process 0. Two of them can
    listen on one port, and each would wait for the others for 5 minutes."""
    with socket.socket() as listener:
        if os.name == 'posix':
            # connections of an earlier run that are still closing do not count
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(('', port))
        except (OSError, OverflowError) as error:
            raise UserError(
                f'process 0 cannot listen on port {port} ({error}): is there another one with --process_id=0? '
                'Each process needs its own; or choose another port in --coordinator_address') from error


def join_torchrun():
    """Joins the processes that torchrun started, each with the one GPU that LOCAL_RANK names. MASTER_PORT is torchrun's
    own, the coordinator listens on the next one. Raises UserError for variables that are missing or not numbers."""
    env = os.environ
    try:
        join(coordinator_address=f"{env['MASTER_ADDR']}:{int(env['MASTER_PORT']) + 1}",
             num_processes=int(env['WORLD_SIZE']), process_id=int(env['RANK']),
             local_device_ids=int(env['LOCAL_RANK']) if 'LOCAL_RANK' in env else None)
    except (KeyError, ValueError) as error:
        raise UserError(f"torchrun's variables RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are incomplete ({error}); "
                        'set them all, or unset WORLD_SIZE to train in one process') from error


def join(**cluster):
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the wait for the others, up to 5 minutes
    try:
        jax.distributed.initialize(**cluster, heartbeat_timeout_seconds=PEER_TIMEOUT,
                                   shutdown_timeout_seconds=PEER_TIMEOUT)
    except (ValueError, RuntimeError) as error:
        raise UserError(f'the processes do not find each other: {str(error)[:300]}') from error


def gather_texts(text):
    """The texts of all processes, each of at most 64 kB, in the order of the processes."""
    if jax.process_count() == 1:
        return [text]
    from jax.experimental import multihost_utils
    mine = np.zeros(2**16, np.uint8)
    encoded = text.encode()[:len(mine)]
    mine[:len(encoded)] = list(encoded)
    return [bytes(row).rstrip(b'\0').decode(errors='ignore') for row in multihost_utils.process_allgather(mine)]


def in_all_processes(function, *args):
    """function(*args), called in all processes: a UserError in one of them is raised in all, so that none waits."""
    result, message = None, ''
    try:
        result = function(*args)
    except UserError as error:
        message = str(error)
    messages = gather_texts(message)
    for i, message in enumerate(messages):
        if message:
            raise UserError(message if len(set(messages)) == 1 else f'process {i}: {message}')
    return result


def check_agreement(what, values):
    """Raises UserError in all processes if `values`, {name: JSON value}, are not the same in all of them."""
    first, *others = [json.loads(text) for text in gather_texts(json.dumps(values))]
    for i, other in enumerate(others, start=1):
        different = [f'{name} is {first.get(name)} and {other.get(name)}' for name in first | other
                     if first.get(name) != other.get(name)]
        if different:
            raise UserError(f'processes 0 and {i} have different {what}, all must have the same: '
                            f'{", ".join(different)}')


# The signals that stop a run. When a terminal closes, or a login ends, a process gets SIGHUP, from the shell and from
# the system, and perhaps SIGTERM beside it.
HANGUP = getattr(signal, 'SIGHUP', None)  # Windows has none
STOP_SIGNALS = [signum for signum in (signal.SIGTERM, signal.SIGINT, HANGUP) if signum is not None]
HANGUP_SECONDS = 1.0  # within which the signals of one closed terminal come


class StopSignal:
    """Catches SIGTERM, SIGINT and SIGHUP so that the loop can save and stop. A second one ends the process at once, but
    not while it saves, and not if it is of the same closed terminal. With nothing_to_save the first one ends the
    process. SIGHUP stays ignored where it is, as nohup wants it.

    Each signal is answered by one line on stderr, at once: by a thread, because Python runs the handlers of signals
    only between two steps of the main thread, and a training step, a compilation or loading the weights is one.
    What is printed after the terminal has closed is discarded: see AfterHangup."""

    def __init__(self, nothing_to_save=False):
        self.nothing_to_save = nothing_to_save
        self.saving = lambda: False  # whether a save is under way
        self.signum = 0  # none yet
        self.came_at = math.inf  # time.monotonic() of the first signal
        self.answered = threading.Event()
        if sys.stdout is not None:  # python train_jax.py >&- has none
            sys.stdout = AfterHangup(sys.stdout, self)
        if sys.stderr is not None:
            sys.stderr = AfterHangup(sys.stderr, self)
        received, sender = socket.socketpair()
        sender.setblocking(False)
        signal.set_wakeup_fd(sender.detach())  # gets the number of each signal as a byte
        threading.Thread(target=self.answer, args=(received,), daemon=True).start()
        for signum in STOP_SIGNALS:
            if signum != HANGUP or signal.getsignal(signum) != signal.SIG_IGN:
                signal.signal(signum, self.receive)

    def receive(self, signum, frame):
        if self.nothing_to_save:
            self.answered.wait(5)
            sys.exit(128 + signum)

    def answer(self, received):
        while received_byte := received.recv(1):
            signum = received_byte[0]
            if signum in STOP_SIGNALS:
                self.answer_one(signum)
                self.answered.set()

    def answer_one(self, signum):
        """Keeps the first signal, says what follows, and ends the process for a second one."""
        name = signal_name(signum)
        is_first = not self.signum
        if is_first:
            self.signum = signum
            self.came_at = time.monotonic()
            if self.nothing_to_save:
                say(f'stopping: there is nothing to save; {name} again ends at once')
            elif signum == HANGUP:
                say('stopping after this iteration, then saving: the terminal has closed (SIGHUP)')
            else:
                say(f'stopping after this iteration, then saving; {name} again ends at once, without saving')
            return
        # Bash and the system both send SIGHUP, and systemd sends SIGTERM beside it: they are one event
        is_of_same_hangup = self.signum == HANGUP and time.monotonic() - self.came_at < HANGUP_SECONDS
        if signum == HANGUP or is_of_same_hangup:
            return
        if self.saving():
            say(f'{name} has to wait: a checkpoint is being written')
            return
        say(f'ended by {name}')
        os._exit(128 + signum)


class AfterHangup:
    """A text stream, sys.stdout or sys.stderr, that discards what is written after its terminal has closed: an error of
    print must not cost the run that is to be saved. A reader that goes away without SIGHUP, as `head -1` does, raises
    BrokenPipeError as ever.

    stream: what is written to. stop: the StopSignal that sees SIGHUP."""

    def __init__(self, stream, stop):
        self.stream = stream
        self.stop = stop
        self.was_terminal = stream.isatty()

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        try:
            return self.stream.write(text)
        except OSError as error:
            self.discard(error)
        return len(text)

    def flush(self):
        try:
            self.stream.flush()
        except OSError as error:
            self.discard(error)
            self.stream.flush()

    def discard(self, error):
        """Sends this and all later output to os.devnull, if the terminal has closed; raises the error if not."""
        is_closed_terminal = self.was_terminal and error.errno == errno.EIO
        if not is_closed_terminal and not (error.errno == errno.EPIPE and self.sees_hangup()):
            raise error
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.stream.fileno())
        os.close(null)

    def sees_hangup(self):
        """Whether SIGHUP has come, for which it waits a moment: the reader of a pipe may have got it earlier."""
        deadline = time.monotonic() + HANGUP_SECONDS
        while not self.stop.signum and time.monotonic() < deadline:
            time.sleep(0.01)
        return HANGUP is not None and self.stop.signum == HANGUP


def signal_name(signum):
    """As users know the signal: Ctrl-C, or SIGTERM."""
    return 'Ctrl-C' if signum == signal.SIGINT else signal.Signals(signum).name


def say(text):
    """Prints a line on stderr, below a progress bar."""
    print(f'\n{text}' if sys.stderr.isatty() else text, file=sys.stderr, flush=True)
