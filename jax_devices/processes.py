"""Several processes: how they find each other and agree; the signals that stop one."""
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
    """Calls jax.distributed.initialize, if several processes train together. Call it before JAX
    initializes its backends.

    coordinator_address: host:port of process 0, to which the others connect. 'auto' lets JAX detect
    all three options (on a TPU pod). JAX also detects them where coordinator_address is empty and
    Slurm, Open MPI or an indexed Kubernetes job has started several processes; the variables of
    torchrun and SkyPilot are understood too. JAX_COORDINATOR_ADDRESS stands for an empty one.
    num_processes: the number of processes. 1 starts alone, also where the environment speaks of
    several (a Kubernetes job of one pod).
    process_id: the number of this process, from 0.

    Raises UserError if the flags do not go together, or if the processes do not find each other."""
    # One process, by name.
    if num_processes == 1 and not coordinator_address and process_id < 1:
        return

    # The address may be in the environment, beside the flags or what JAX detects.
    is_in_env = not coordinator_address and 'JAX_COORDINATOR_ADDRESS' in os.environ
    if is_in_env and (num_processes or process_id >= 0):
        coordinator_address = os.environ['JAX_COORDINATOR_ADDRESS']

    # The flags: all three or none.
    is_detected = coordinator_address in ('', 'auto')
    if num_processes or process_id >= 0:
        host, _, port = coordinator_address.rpartition(':')
        is_address = host and port.isdecimal()
        if not is_address or not 0 <= process_id < num_processes:
            raise UserError('several processes need --coordinator_address=host:port of process 0, '
                            '--num_processes=N and --process_id=0 to N-1; got '
                            f'{coordinator_address!r}, {num_processes}, {process_id}')
    elif not is_detected:
        raise UserError(f'--coordinator_address={coordinator_address} needs --num_processes and '
                        '--process_id')
    elif not coordinator_address and has_several('WORLD_SIZE') and 'RANK' in os.environ:
        join_torchrun()
        return
    elif not coordinator_address and has_several('SKYPILOT_NUM_NODES') and not is_in_env:
        join_skypilot()
        return

    # The environment: does it speak of several processes?
    in_slurm = has_several('SLURM_NTASKS') and 'SLURM_STEP_NODELIST' in os.environ
    in_open_mpi = has_several('OMPI_COMM_WORLD_SIZE')
    in_pod = {'KUBERNETES_SERVICE_HOST', 'JOB_COMPLETION_INDEX'} <= os.environ.keys()
    if not coordinator_address and not (in_slurm or in_open_mpi or in_pod or is_in_env):
        return

    # Join, as JAX detects it or as the flags say.
    if is_detected:
        join_detected(in_pod)
        return
    if process_id == 0:
        check_port_is_free(int(port))
    join(coordinator_address=coordinator_address, num_processes=num_processes,
         process_id=process_id)


def has_several(variable):
    """Returns whether a variable of the environment is a number above 1."""
    return int(os.environ.get(variable) or 1) > 1


def check_port_is_free(port):
    """Raises UserError if another program listens where process 0 is to: mostly another process 0.
    Two of them can listen on one port, and each would wait for the others for 5 minutes."""
    with socket.socket() as listener:
        # Connections of an earlier run that are still closing do not count.
        if os.name == 'posix':
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(('', port))
        except (OSError, OverflowError) as error:
            raise UserError(f'process 0 cannot listen on port {port} ({error}): is there another '
                            'one with --process_id=0? Each process needs its own; or choose '
                            'another port in --coordinator_address') from error


def join_torchrun():
    """Joins the processes that torchrun started, each with the one GPU that LOCAL_RANK names.

    MASTER_PORT is torchrun's own, so the coordinator listens on the next one. Raises UserError for
    variables that are missing or not numbers."""
    env = os.environ
    try:
        port = int(env['MASTER_PORT']) + 1
        join(coordinator_address=f"{env['MASTER_ADDR']}:{port}",
             num_processes=int(env['WORLD_SIZE']), process_id=int(env['RANK']),
             local_device_ids=int(env['LOCAL_RANK']) if 'LOCAL_RANK' in env else None)
    except (KeyError, ValueError) as error:
        raise UserError("torchrun's variables RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are "
                        f'incomplete ({error}); set them all, or unset WORLD_SIZE to train in one '
                        'process') from error


def join_detected(in_pod):
    """Joins the processes that JAX detects; in_pod: whether that may be by the pods of a Kubernetes
    job. Raises UserError if it cannot."""
    # On a TPU slice of GKE, JAX finds the pods in this variable, otherwise by the package.
    is_slice = 'TPU_WORKER_HOSTNAMES' in os.environ
    if in_pod and not is_slice and importlib.util.find_spec('kubernetes') is None:
        raise UserError('JAX finds the pods of a Kubernetes job with the package kubernetes: pip '
                        'install "jax[k8s]"; for a job of one pod add --num_processes=1')
    try:
        join()
    except UserError as error:
        if 'JAX_COORDINATOR_ADDRESS' not in os.environ:
            raise
        raise UserError(f'JAX_COORDINATOR_ADDRESS is set: {error}; add --num_processes=N and '
                        '--process_id=0 to N-1, or unset it') from None


SKYPILOT_PORT = 12355  # where process 0 listens, on its own machine


def join_skypilot():
    """Joins the processes that SkyPilot started, one on each node. Raises UserError for variables
    that are missing or not numbers."""
    env = os.environ
    try:
        first = env['SKYPILOT_NODE_IPS'].split()[0]
        process_id = int(env['SKYPILOT_NODE_RANK'])
        num_processes = int(env['SKYPILOT_NUM_NODES'])
    except (KeyError, ValueError, IndexError) as error:
        raise UserError("SkyPilot's variables SKYPILOT_NODE_IPS, SKYPILOT_NODE_RANK, "
                        f'SKYPILOT_NUM_NODES are incomplete ({error}); set them all, or unset '
                        'SKYPILOT_NUM_NODES to train in one process') from error
    join(coordinator_address=f'{first}:{SKYPILOT_PORT}', num_processes=num_processes,
         process_id=process_id)


def join(**cluster):
    """Joins the other processes. cluster: what jax.distributed.initialize shall not detect."""
    # Ctrl-C ends the wait for the others, which is up to 5 minutes.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        jax.distributed.initialize(**cluster, heartbeat_timeout_seconds=PEER_TIMEOUT,
                                   shutdown_timeout_seconds=PEER_TIMEOUT)
    except (ValueError, RuntimeError) as error:
        raise UserError(f'the processes do not find each other: {str(error)[:300]}') from error


def gather_texts(text):
    """Returns the texts of all processes, each of at most 64 kB, in the order of the processes. All
    processes have to call it."""
    if jax.process_count() == 1:
        return [text]
    from jax.experimental import multihost_utils

    # JAX gathers arrays, of the same shape in all processes: bytes, filled up with zeros.
    mine = np.zeros(2**16, np.uint8)
    encoded = text.encode()[:len(mine)]
    mine[:len(encoded)] = list(encoded)
    texts = []
    for row in multihost_utils.process_allgather(mine):
        encoded = bytes(row).rstrip(b'\0')
        texts.append(encoded.decode(errors='ignore'))
    return texts


def in_all_processes(function, *args):
    """Returns function(*args), called in all processes: a UserError in one of them is raised in
    all, so that none waits."""
    result = None
    message = ''
    try:
        result = function(*args)
    except UserError as error:
        message = str(error)

    messages = gather_texts(message)
    are_same = len(set(messages)) == 1
    for i, message in enumerate(messages):
        if message and are_same:
            raise UserError(message)
        if message:
            raise UserError(f'process {i}: {message}')
    return result


def in_first_process(function, *args):
    """Returns function(*args) in process 0 and None in the others, which wait for it: a UserError
    is raised in all."""
    def call():
        return function(*args) if jax.process_index() == 0 else None

    return in_all_processes(call)


def check_agreement(what, values):
    """Raises UserError in all processes if `values`, {name: JSON value}, are not the same in all of
    them."""
    texts = gather_texts(json.dumps(values))
    first, *others = [json.loads(text) for text in texts]
    for i, other in enumerate(others, start=1):
        different = []
        for name in {**first, **other}:
            if first.get(name) != other.get(name):
                different.append(f'{name} is {first.get(name)} and {other.get(name)}')
        if different:
            raise UserError(f'processes 0 and {i} have different {what}, all must have the same: '
                            f'{", ".join(different)}')

# -----------------------------------------------------------------------------
# signals


# The signals that stop a run. When a terminal closes, or a login ends, a process gets SIGHUP, from
# the shell and from the system, and perhaps SIGTERM beside it.
HANGUP = getattr(signal, 'SIGHUP', None)  # Windows has none
STOP_SIGNALS = [signal.SIGTERM, signal.SIGINT]
if HANGUP is not None:
    STOP_SIGNALS.append(HANGUP)
HANGUP_SECONDS = 1.0  # the time within which the signals of one closed terminal come


class StopSignal:
    """Catches SIGTERM, SIGINT and SIGHUP, so that the loop can save and stop.

    A second signal ends the process at once, but not while it saves, and not if it comes from the
    same closed terminal. With nothing_to_save the first one ends the process. SIGHUP stays ignored
    where it is, as nohup wants it.

    Each signal is answered by one line on stderr, at once: by a thread, because Python runs the
    handlers of signals only between two steps of the main thread, and a training step, a
    compilation or loading the weights is one. What is printed after the terminal has closed is
    discarded: see AfterHangup."""

    def __init__(self, nothing_to_save=False):
        self.nothing_to_save = nothing_to_save
        self.saving = lambda: False  # replaced by a function: whether a save is under way
        self.signum = 0  # the first signal; 0 before it
        self.came_at = math.inf  # time.monotonic() of the first signal
        self.answered = threading.Event()

        # A process that was started with >&- has no stdout.
        if sys.stdout is not None:
            sys.stdout = AfterHangup(sys.stdout, self)
        if sys.stderr is not None:
            sys.stderr = AfterHangup(sys.stderr, self)

        # Python writes the number of each signal as a byte into a socket, which the thread reads.
        received, sender = socket.socketpair()
        sender.setblocking(False)
        signal.set_wakeup_fd(sender.detach())
        threading.Thread(target=self.answer, args=(received,), daemon=True).start()

        for signum in STOP_SIGNALS:
            is_nohup = signum == HANGUP and signal.getsignal(signum) == signal.SIG_IGN
            if not is_nohup:
                signal.signal(signum, self.receive)

    def receive(self, signum, frame):
        """Is called in the main thread for each signal, between two steps of Python."""
        if self.nothing_to_save:
            self.answered.wait(5)
            sys.exit(128 + signum)

    def answer(self, received):
        """Answers the signals, in a thread of its own, until the socket is closed."""
        while True:
            number = received.recv(1)
            if not number:
                return
            signum = number[0]
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
                say(f'stopping after this iteration, then saving; {name} again ends at once, '
                    'without saving')
            return

        # Bash and the system both send SIGHUP, and systemd sends SIGTERM beside it: they are one
        # event.
        is_soon = time.monotonic() - self.came_at < HANGUP_SECONDS
        is_same_hangup = self.signum == HANGUP and is_soon
        if signum == HANGUP or is_same_hangup:
            return

        # A second signal: the user does not want to wait.
        if self.saving():
            say(f'{name} has to wait: a checkpoint is being written')
            return
        say(f'ended by {name}')
        os._exit(128 + signum)


class AfterHangup:
    """A text stream, in the place of sys.stdout or sys.stderr, that discards what is written after
    its terminal has closed: an error of print must not cost the run that is to be saved.

    A reader that goes away without SIGHUP, as `head -1` does, raises BrokenPipeError as ever.
    stream: the stream that is written to. stop: the StopSignal that sees SIGHUP."""

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
        """Sends this and all later output to os.devnull, if the terminal has closed; raises the
        error if not."""
        is_closed_terminal = self.was_terminal and error.errno == errno.EIO
        is_closed_pipe = not is_closed_terminal and error.errno == errno.EPIPE
        is_hangup = is_closed_terminal or is_closed_pipe and self.sees_hangup()
        if not is_hangup:
            raise error
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.stream.fileno())
        os.close(null)

    def sees_hangup(self):
        """Returns whether SIGHUP has come. It waits a moment for it: the reader of a pipe may have
        got it earlier."""
        deadline = time.monotonic() + HANGUP_SECONDS
        while not self.stop.signum and time.monotonic() < deadline:
            time.sleep(0.01)
        return HANGUP is not None and self.stop.signum == HANGUP


def signal_name(signum):
    """Returns the name by which users know a signal: Ctrl-C, or SIGTERM."""
    if signum == signal.SIGINT:
        return 'Ctrl-C'
    return signal.Signals(signum).name


def say(text):
    """Prints a line on stderr. On a terminal it is below a progress bar."""
    line = f'\n{text}' if sys.stderr.isatty() else text
    print(line, file=sys.stderr, flush=True)
