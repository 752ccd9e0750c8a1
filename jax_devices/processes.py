"""Lets several processes find each other and agree, and handles the signals that stop a process."""
import contextlib
import errno
import json
import os
import signal
import socket
import stat
import sys
import threading
import time

import jax
import numpy as np

from jax_flags import TryAgain, UserError, warn

AGAIN = '\x1a'  # begins the text of a TryAgain, from one process to another
PEER_TIMEOUT = 60  # seconds of silence after which a process counts as dead
SAID_AFTER = 10  # seconds of waiting for the other processes
ECHO = 0.2  # seconds in which a second signal counts as the first: nobody sends two so fast


def initialize_distributed(coordinator_address='', num_processes=0, process_id=-1):
    """Calls jax.distributed.initialize if several processes train together, else does nothing. Call
    this function before JAX initializes its backends.

    coordinator_address: host:port of process 0, to which the other processes connect. '' takes
    JAX_COORDINATOR_ADDRESS, if that is set. 'auto' lets JAX detect all three options (on a TPU
    pod).
    num_processes: the number of processes. With 1 and no address, the process starts alone,
    whatever the environment says.
    process_id: the number of this process, from 0.

    If all three options are left out ('', 0 and -1), JAX detects them under Slurm, Open MPI and in
    an indexed Kubernetes job. Under Slurm and Open MPI, it does so only if there are several
    processes.

    Raises UserError if the flags do not go together, if the processes do not find each other, or if
    they have different numbers of devices."""
    is_alone = num_processes == 1 and not coordinator_address and process_id < 1
    has_flags = coordinator_address or num_processes or process_id >= 0
    if is_alone or not has_flags and not launcher_started_several():
        return

    # Without a port, or with a second process 0, JAX aborts or waits for 5 minutes.
    address = coordinator_address or os.environ.get('JAX_COORDINATOR_ADDRESS') or 'auto'
    if address != 'auto':
        host, _, port = address.rpartition(':')
        if not host or not port.isdecimal():
            raise UserError(f'--coordinator_address={address} is not host:port of process 0')
        if process_id == 0:
            check_port_is_free(int(port))

    # Ctrl-C and SIGTERM end the wait for the others. Without the setting, JAX would handle SIGTERM
    # from here on, and StopSignal would not get one that comes before it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    jax.config.update('jax_enable_preemption_service', False)
    waiting = threading.Timer(SAID_AFTER, warn, [
        f'waiting for the other processes, for up to 5 minutes: process 0 is at {address}'])
    waiting.daemon = True
    waiting.start()
    try:
        jax.distributed.initialize(
            None if address == 'auto' else address,
            num_processes or None,
            process_id if process_id >= 0 else None,
            heartbeat_timeout_seconds=PEER_TIMEOUT,
            shutdown_timeout_seconds=PEER_TIMEOUT)
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f'the processes do not find each other ({str(error)[:300]}): name them with '
            '--coordinator_address=host:port of process 0, --num_processes=N and --process_id=0 to '
            'N-1, or train in one process with --num_processes=1') from error
    finally:
        waiting.cancel()
    if jax.local_device_count() * jax.process_count() != jax.device_count():
        raise UserError(
            f'process {jax.process_index()} has {jax.local_device_count()} of the '
            f'{jax.device_count()} devices: {jax.process_count()} processes need equal numbers')


def launcher_started_several():
    """Returns whether the environment names several processes that JAX can detect. This is true
    under Slurm or Open MPI with several processes, in an indexed Kubernetes job, and if
    JAX_COORDINATOR_ADDRESS is set. Raises UserError for torchrun, SkyPilot or MPICH with several
    processes, because JAX does not detect these processes, and each would train alone."""
    numbers = {name: os.environ.get(name, '') for name in (
        'SLURM_NTASKS', 'OMPI_COMM_WORLD_SIZE', 'WORLD_SIZE', 'PMI_SIZE', 'SKYPILOT_NUM_NODES')}
    several = {name for name, n in numbers.items() if n.isdecimal() and int(n) > 1}

    # A shell inside of an allocation has the variables of its job, but not of a step.
    in_slurm = 'SLURM_NTASKS' in several and 'SLURM_STEP_NODELIST' in os.environ
    in_open_mpi = 'OMPI_COMM_WORLD_SIZE' in several
    in_indexed_job = {'KUBERNETES_SERVICE_HOST', 'JOB_COMPLETION_INDEX'} <= os.environ.keys()
    if in_slurm or in_open_mpi or in_indexed_job or os.environ.get('JAX_COORDINATOR_ADDRESS'):
        return True

    in_torchrun = 'WORLD_SIZE' in several and 'RANK' in os.environ
    if in_torchrun or several & {'PMI_SIZE', 'SKYPILOT_NUM_NODES'}:
        raise UserError(
            'JAX does not detect the processes of torchrun, SkyPilot or MPICH, and each would '
            'train alone: name them as in docs/parallelism.md, or add --num_processes=1')
    return False


def check_port_is_free(port):
    """Raises UserError if another program listens on `port`, the port of process 0. Usually the
    other program was started as process 0, too. Without this check both could listen on the port,
    and each would wait for the remaining processes."""
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


def gather_texts(text):
    """Returns a list of the texts of all processes, in the order of the processes. A text is cut at
    64 kB. All processes have to call this function."""
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


@contextlib.contextmanager
def in_all_processes():
    """Raises a UserError in all processes, at the end of the with block, if one process raises it
    in the block. Without this, the other processes would continue, and wait in their next
    collective for the process that has ended. All processes must run the block."""
    message = ''
    try:
        yield
    except TryAgain as error:
        message = f'{AGAIN}{error}'
    except UserError as error:
        message = str(error)

    messages = gather_texts(message)
    are_same = len(set(messages)) == 1
    for i, message in enumerate(messages):
        kind = TryAgain if message.startswith(AGAIN) else UserError
        text = message.removeprefix(AGAIN)
        if message and are_same:
            raise kind(text)
        if message:
            raise kind(f'process {i}: {text}')


def check_agreement(what, values, own=()):
    """Raises UserError in all processes if `values`, {name: JSON value}, are not the same in all
    processes. what: what the message calls the values. own: names that are not compared, because
    their values may differ."""
    shared = {name: value for name, value in values.items() if name not in own}
    texts = gather_texts(json.dumps(shared))
    first, *others = [json.loads(text) for text in texts]
    for i, other in enumerate(others, start=1):
        different = []
        for name in {**first, **other}:
            pair = [values.get(name, 'missing') for values in (first, other)]
            if pair[0] != pair[1]:
                different.append(f'{name} is {pair[0]} and {pair[1]}')
        if different:
            raise UserError(f'processes 0 and {i} have different {what}, but all processes must have '
                            f'the same: {", ".join(different)}')

# -----------------------------------------------------------------------------
# signals


# The signals that stop a run. When a terminal closes, a process gets SIGHUP, from the shell and
# from the system.
HANGUP = getattr(signal, 'SIGHUP', None)  # Windows has none
STOP_SIGNALS = [signal.SIGTERM, signal.SIGINT]
if HANGUP is not None:
    STOP_SIGNALS.append(HANGUP)


def hear_signals(answer, receive):
    """Calls two functions at each of STOP_SIGNALS: answer(signum) at once, in a thread of its own,
    and receive(signum, frame) in the main thread. Returns a function that puts back the handlers
    and ends the thread. Under nohup, SIGHUP stays ignored.

    Python calls `receive`, a handler, only between two bytecode instructions of the main thread. So
    it has to wait until a long call in compiled code, such as a compilation or loading the weights,
    has returned."""
    # Python writes the number of each signal as a byte into a socket, which the thread reads.
    received, sender = socket.socketpair()
    sender.setblocking(False)
    fd = sender.detach()
    fd_before = signal.set_wakeup_fd(fd)

    def read_signals():
        with received:
            for number in iter(lambda: received.recv(1), b''):
                if number[0] in STOP_SIGNALS:
                    answer(number[0])

    thread = threading.Thread(target=read_signals, daemon=True)
    thread.start()

    handlers_before = {}
    for signum in STOP_SIGNALS:
        is_nohup = signum == HANGUP and signal.getsignal(signum) == signal.SIG_IGN
        if not is_nohup:
            handlers_before[signum] = signal.signal(signum, receive)

    def put_back():
        for signum, handler in handlers_before.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(fd_before)
        os.close(fd)
        thread.join()

    return put_back


class StopSignal:
    """Catches SIGTERM, SIGINT and SIGHUP until close(), so that the loop can save and stop.

    The first signal asks the loop to save and stop. If nothing_to_save is True, the first signal
    ends the script instead, by SystemExit. A second signal is handled by the first of these rules
    that applies:
    - During a save, the signal has no effect.
    - In a notebook, where the process must live on, the signal raises KeyboardInterrupt, or
      SystemExit if nothing_to_save is True. (The SystemExit of the first signal may still be
      waiting for compiled code to return.)
    - If the first or the second signal is SIGHUP, the second has no effect, because a closed
      terminal sends several signals.
    - Within ECHO seconds after the first, the second has no effect.
    - Otherwise, the signal ends the process at once.
    Under nohup, SIGHUP stays ignored. A thread answers each signal with a line on stderr.

    nothing_to_save: whether there is nothing to save yet. train_jax.py sets this attribute to False
    before its loop begins."""

    owns_process = True  # whether the process ends with the run

    def __init__(self, nothing_to_save=False):
        self.nothing_to_save = nothing_to_save
        self.saves = []  # functions that say whether a save is under way, see waits_while
        self.signum = 0  # the first signal; 0 before it
        self.n_received = 0
        self.answered = threading.Event()
        self.streams = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = [
            Terminal(stream) if stream and stream.isatty() else stream for stream in self.streams]
        self.put_back = hear_signals(self.answer, self.receive)

    def close(self):
        """Puts back the handlers of the signals, stdout and stderr as they were."""
        self.put_back()
        sys.stdout, sys.stderr = self.streams

    @contextlib.contextmanager
    def waits_while(self, is_saving):
        """Lets a save finish. Within the `with` block, a second signal has no effect while
        is_saving() returns True. See the class for the effect of a second signal at other times."""
        self.saves.append(is_saving)
        try:
            yield
        finally:
            self.saves.remove(is_saving)

    def saving(self):
        """Returns whether a save is under way."""
        return any(is_saving() for is_saving in self.saves)

    def receive(self, signum, frame):
        """Handles a signal in the main thread. After SIGHUP, discards all output. If
        nothing_to_save is True, ends the script. In a notebook, a second signal raises
        KeyboardInterrupt, unless a save is under way at that time.

        This may be long after the signal (see hear_signals). What must happen at once is done by
        answer()."""
        if signum == HANGUP:
            discard_output()
        if self.nothing_to_save:
            self.answered.wait(5)
            # JAX's callback of the garbage collector, in which Python may call this method, ignores
            # exceptions: exit_if_stopped() raises this one again
            if self.owns_process:
                sys.unraisablehook = lambda error: None
            self.exit_if_stopped()
        self.n_received += 1
        if not self.owns_process and self.n_received > 1 and not self.saving():
            raise KeyboardInterrupt

    def exit_if_stopped(self):
        """Ends the script if a signal has come and there is nothing to save."""
        if self.nothing_to_save and self.signum:
            sys.exit(128 + self.signum)

    def answer(self, signum):
        """Answers a signal, in a thread of its own. The first signal is recorded, a second one ends
        the process. Both times, prints a line that says what the script does next."""
        name = signal_name(signum)
        is_first = not self.signum
        if is_first:
            self.signum = signum
            self.first_at = time.monotonic()
        if HANGUP in (signum, self.signum):
            discard_output()
        elif is_first and self.nothing_to_save:
            say(f'stopping: there is nothing to save; {name} again ends at once')
        elif is_first:
            say(f'stopping after this iteration, then saving; {name} again ends at once, without '
                'saving')
        elif time.monotonic() - self.first_at < ECHO:
            pass  # the same signal: `timeout` sends each to the process and to its group
        elif self.saving():
            say(f'{name} has to wait: a checkpoint is being written')
        else:
            say(f'ended by {name}')
            if self.owns_process:
                os._exit(128 + signum)
        self.answered.set()


def exit_at_signals(is_said=False):
    """Makes each of STOP_SIGNALS end the script at once, from this call on, even in the middle of a
    compiled program. The exit code is 128 + signal. For scripts that have nothing to save. The exit
    skips Python's cleanup (os._exit), because the cleanup frees memory that the compiled program
    still uses, which could crash. is_said: whether to print a line on stderr before the exit."""
    def answer(signum):
        if is_said:
            warn(f'stopped by {signal_name(signum)}: there is nothing to save')
        os._exit(128 + signum)

    hear_signals(answer, lambda *_: None)


class Terminal:
    """Replaces sys.stdout or sys.stderr on a terminal. Once the terminal has closed, discards all
    output. SIGHUP, at which the run is saved, comes a moment later than the terminal closes. An
    error from print in this moment would end the run before it is saved."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        with until_closed():
            self.stream.write(text)
        return len(text)

    def flush(self):
        with until_closed():
            self.stream.flush()


@contextlib.contextmanager
def until_closed():
    """Runs the block of a with statement. If writing output in the block fails because the terminal
    has closed, the block ends there, and all output from then on is discarded."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        discard_output()


def discard_output():
    """Redirects stdout and stderr to os.devnull, unless they are files. Call this function when the
    terminal has closed. Pipes are redirected too, because the program that reads them may have
    ended with the terminal."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.__stdout__, sys.__stderr__):
        # A process that was started with >&- has none.
        if stream and not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            os.dup2(null, stream.fileno())
    os.close(null)


def signal_name(signum):
    """Returns the usual name of a signal, such as Ctrl-C or SIGTERM."""
    if signum == signal.SIGINT:
        return 'Ctrl-C'
    return signal.Signals(signum).name


def say(text):
    """Prints a line on stderr. On a terminal, prints a newline first, because the cursor may be
    behind a progress bar."""
    line = f'\n{text}' if sys.stderr.isatty() else text
    warn(line)
