"""What is saved is complete or absent, and comes back as it was."""
import builtins
import dataclasses
import errno
import io
import os
import re
import shutil
import time
import jax_run.checkpoints

import jax
import pytest

from jax_flags import TryAgain, UserError
from jax_run.checkpoints import (
    FORMAT, add_val_loss, checkpoint_steps, choose_checkpoint, finish_checkpoints, load_checkpoint, open_checkpoints,
    read_meta, read_val_loss, run_folder, save_checkpoint)
from jax_run.out_dir import lock_out_dir, see_lock
from jax_train_utils import create_optimizer_with_schedule, create_train_state
from tests.common import META, TINY, edit_json, refusal, start

# -----------------------------------------------------------------------------
# checkpoints


def state_of(config):
    return create_train_state(jax.random.key(0), config, create_optimizer_with_schedule(lambda step: 0.1))


@pytest.fixture(scope='module')
def tiny_state():
    return state_of(TINY)


@pytest.mark.parametrize('keep, kept', [(1, [3, 8]), (3, [3, 6, 7, 8])])
def test_the_latest_checkpoints_and_the_best_one_are_kept(tmp_path, tiny_state, keep, kept):
    manager = open_checkpoints(tmp_path, keep)
    for i, val_loss in enumerate([3.0, 2.0, 1.0, None, 1.5, None, 1.2, 1.3], start=1):
        save_checkpoint(manager, i, tiny_state, META, val_loss)
    finish_checkpoints(manager)
    assert sorted(int(path.name) for path in (tmp_path / 'ckpt').iterdir()) == kept
    assert choose_checkpoint(tmp_path, 'best')[0] == 3
    assert choose_checkpoint(tmp_path, 'latest')[0] == 8


def test_a_checkpoint_of_a_later_version_is_refused(three_checkpoints):
    step = three_checkpoints / 'ckpt' / '3'
    assert read_meta(step)['iter_num'] == 3
    edit_json(step / 'meta' / 'metadata', format=FORMAT + 1)
    with pytest.raises(ValueError, match=f'it has format {FORMAT + 1}, of a later version; this one reads {FORMAT}'):
        read_meta(step)


def test_of_equal_losses_the_latest_is_the_best(tmp_path, tiny_state):
    manager = open_checkpoints(tmp_path, keep=1)
    for i, val_loss in enumerate([1.0, 1.0, 2.0], start=1):
        save_checkpoint(manager, i, tiny_state, META, val_loss)
    finish_checkpoints(manager)
    assert checkpoint_steps(tmp_path) == [3, 2] and choose_checkpoint(tmp_path, 'best')[0] == 2


def test_without_an_evaluation_the_latest_is_the_best(tmp_path, tiny_state):
    manager = open_checkpoints(tmp_path)
    save_checkpoint(manager, 4, tiny_state, META)
    finish_checkpoints(manager)
    assert choose_checkpoint(tmp_path, 'best')[0] == 4


def test_an_incomplete_checkpoint_does_not_count(tmp_path, tiny_state):
    manager = open_checkpoints(tmp_path)
    save_checkpoint(manager, 4, tiny_state, META)
    finish_checkpoints(manager)
    (tmp_path / 'ckpt' / '9.orbax-checkpoint-tmp').mkdir()
    assert choose_checkpoint(tmp_path)[0] == 4


@pytest.fixture
def three_checkpoints(tmp_path, tiny_state):
    manager = open_checkpoints(tmp_path, keep=3)
    for i in (1, 2, 3):
        save_checkpoint(manager, i, tiny_state, META, val_loss=1.0 / i)
    finish_checkpoints(manager)
    return tmp_path


def damage(path, how):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content if how == 'flip a bit' else content[:len(content) // 2])


@pytest.mark.parametrize('which', ['latest', 'best'])
@pytest.mark.parametrize('how', ['flip a bit', 'cut in half'])
def test_damage_to_any_file_of_a_checkpoint_is_named_and_the_newest_intact_one_is_taken(
        three_checkpoints, capsys, which, how):
    folder = three_checkpoints / 'ckpt' / '3'
    for path in [path for path in folder.glob('*/**/*') if path.is_file()]:
        content = path.read_bytes()
        damage(path, how)
        assert choose_checkpoint(three_checkpoints, which)[0] == 2
        said = capsys.readouterr().err
        assert 'ckpt/3 is damaged' in said and path.name in said and 'taking checkpoint 2 instead' in said
        assert said.count('\n') == 1
        path.write_bytes(content)
    assert choose_checkpoint(three_checkpoints, which)[0] == 3
    assert capsys.readouterr().err == ''
    damage(folder / 'checksums.json', how)
    assert choose_checkpoint(three_checkpoints, which)[0] == 2


def test_who_takes_the_best_checkpoint_is_told_of_a_later_one(tiny_state, tmp_path, capsys):
    manager = open_checkpoints(tmp_path, keep=3)
    for i in (1, 2, 3):
        save_checkpoint(manager, i, tiny_state, META, val_loss=float(i))
    finish_checkpoints(manager)
    capsys.readouterr()
    assert choose_checkpoint(tmp_path, 'best')[0] == 1
    said = 'taking the best checkpoint, iteration 1; a later one, 3, is there: --checkpoint=latest\n'
    assert capsys.readouterr().err == said
    assert choose_checkpoint(tmp_path, 'latest')[0] == 3
    assert capsys.readouterr().err == ''


def test_a_checkpoint_that_may_not_be_read_is_not_damaged(three_checkpoints, monkeypatch):
    def forbidden(path):
        raise PermissionError(errno.EACCES, 'Permission denied', str(path))

    monkeypatch.setattr(jax_run.checkpoints, 'checksum', forbidden)
    with pytest.raises(PermissionError, match='ckpt/3/'):
        choose_checkpoint(three_checkpoints)


def test_a_checkpoint_whose_metrics_may_not_be_read_is_not_set_aside(three_checkpoints, monkeypatch):
    metrics, real = three_checkpoints / 'ckpt' / '1' / 'metrics' / 'metrics', io.open

    def forbidden(path, *args, **options):
        if path == metrics:
            raise PermissionError(errno.EACCES, 'Permission denied', str(path))
        return real(path, *args, **options)

    for module in (io, builtins):
        monkeypatch.setattr(module, 'open', forbidden)
    with pytest.raises(PermissionError, match='ckpt/1/metrics/metrics'):
        lock_out_dir(three_checkpoints, 3)
    assert checkpoint_steps(three_checkpoints) == [3, 2, 1]


def test_in_place_of_a_damaged_best_checkpoint_the_newest_is_taken_not_the_second_best(tmp_path, tiny_state):
    manager = open_checkpoints(tmp_path, keep=3)
    for i, val_loss in ((1, 0.2), (2, 0.1), (3, 0.3)):
        save_checkpoint(manager, i, tiny_state, META, val_loss=val_loss)
    finish_checkpoints(manager)
    damage(tmp_path / 'ckpt' / '2' / 'params' / '_METADATA', 'flip a bit')
    assert choose_checkpoint(tmp_path, 'best')[0] == 3


def test_the_best_checkpoint_has_the_data_and_the_length_of_sequences_that_the_run_has_now(tmp_path, tiny_state):
    for number, change in enumerate(({'earlier_data': [{'until': 1, 'data': []}]},
                                     {'earlier': [{'until': 1, 'flags': {'block_size': [8, 16]}}]},
                                     {'earlier': [{'until': 1, 'flags': {'batch_size': [8, 16]}}]})):
        manager = open_checkpoints(tmp_path / str(number), keep=3)
        for i, val_loss in ((1, 0.1), (2, 0.2), (3, 0.3)):
            save_checkpoint(manager, i, tiny_state, {**META, 'manifest': change}, val_loss=val_loss)
        finish_checkpoints(manager)
        assert choose_checkpoint(tmp_path / str(number), 'best')[0] == (1 if number == 2 else 2)


@pytest.mark.parametrize('anew, best, kept', [(0.1, 1, [1, 3]), (0.25, 2, [1, 2, 3])])
def test_the_checkpoint_from_which_losses_begin_anew_competes_with_its_new_loss(tmp_path, tiny_state, anew, best, kept):
    for i, val_loss in ((1, 5.0), (2, 0.2), (3, 0.3)):
        manager = open_checkpoints(tmp_path, keep=1, since=1 if i > 1 else 0)
        if i == 2:  # the resume evaluates the checkpoint with its own data
            add_val_loss(manager, 1, anew, since=1)
        changes = {'earlier_data': [{'until': 1, 'data': []}]} if i > 1 else {}
        save_checkpoint(manager, i, tiny_state, {**META, 'manifest': changes}, val_loss=val_loss)
        finish_checkpoints(manager)
    assert sorted(checkpoint_steps(tmp_path)) == kept
    assert choose_checkpoint(tmp_path, 'best')[0] == best
    if best == 1:  # in the run that ended with it, it has the loss of then
        assert read_val_loss(tmp_path / 'ckpt' / '1') == 5.0


def test_without_an_intact_checkpoint_one_line_says_so(three_checkpoints):
    for path in three_checkpoints.glob('ckpt/*/params/_METADATA'):
        damage(path, 'flip a bit')
    said = refusal(choose_checkpoint, three_checkpoints)
    assert all(f'ckpt/{i} is damaged' in said for i in (1, 2, 3)) and 'there is no intact one' in said


def test_damaged_checkpoints_are_renamed_so_that_training_can_save_again(three_checkpoints, tiny_state, capsys):
    damage(three_checkpoints / 'ckpt' / '3' / 'params' / '_METADATA', 'flip a bit')
    damage(three_checkpoints / 'ckpt' / '1' / 'metrics' / 'metrics', 'cut in half')  # Orbax cannot read it
    step, _ = choose_checkpoint(three_checkpoints)
    lock_out_dir(three_checkpoints, step)
    names = sorted(path.name for path in (three_checkpoints / 'ckpt').iterdir())
    assert names == ['1.damaged', '2', '3.damaged']
    assert [line.partition(' is damaged: ')[2] for line in capsys.readouterr().out.splitlines()] == [
        'renamed to 3.damaged', 'renamed to 1.damaged']
    manager = open_checkpoints(three_checkpoints, keep=1)
    save_checkpoint(manager, 3, tiny_state, META, val_loss=0.1)
    finish_checkpoints(manager)
    assert checkpoint_steps(three_checkpoints) == [3]
    assert choose_checkpoint(three_checkpoints)[0] == 3


def test_a_checkpoint_that_another_run_saves_while_a_command_starts_is_not_taken_for_damaged(three_checkpoints):
    """The command has chosen checkpoint 1; before it has the lock, another run saves 2 and 3 and ends."""
    damage(three_checkpoints / 'ckpt' / '3' / 'params' / '_METADATA', 'flip a bit')
    with pytest.raises(TryAgain, match='another run has saved checkpoint 2 .* start the command again'):
        lock_out_dir(three_checkpoints, 1)
    assert checkpoint_steps(three_checkpoints) == [3, 2, 1]
    lock_out_dir(three_checkpoints, 2).close()  # the refused command has given the lock back
    assert checkpoint_steps(three_checkpoints) == [2, 1]


def test_a_checkpoint_that_a_run_deletes_while_it_is_read_is_not_called_damaged(three_checkpoints, tiny_state):
    step, _ = choose_checkpoint(three_checkpoints, 'best')
    shutil.rmtree(three_checkpoints / 'ckpt' / str(step))
    with pytest.raises(TryAgain, match=f'ckpt/{step} was deleted by its run: start again'):
        load_checkpoint(three_checkpoints, step, tiny_state)


@pytest.mark.parametrize('text', ['[]', '{"val_loss": "x"}', '{"val_loss": NaN}', '{'])
def test_a_checkpoint_whose_metrics_are_none_is_damaged_whatever_its_checksums_say(three_checkpoints, capsys, text):
    step = three_checkpoints / 'ckpt' / '3'
    (step / 'checksums.json').write_text('{}')
    (step / 'metrics' / 'metrics').write_text(text)
    assert choose_checkpoint(three_checkpoints)[0] == 2  # lock_out_dir sets 3 aside
    assert 'ckpt/3 is damaged' in capsys.readouterr().err


def test_a_folder_of_checkpoints_that_has_gone_ends_the_run_with_a_line(tmp_path, tiny_state):
    (tmp_path / 'out').mkdir()
    manager = open_checkpoints(tmp_path / 'out')
    shutil.rmtree(tmp_path / 'out')
    (tmp_path / 'out').write_text('')  # nothing can be made in it, as in a read-only folder
    said = refusal(save_checkpoint, manager, 3, tiny_state, META)
    assert 'cannot write checkpoint 3, or the one before it, to' in said and 'which is not there any more' in said


def test_a_checkpoint_of_an_earlier_version_without_checksums_is_read(three_checkpoints):
    latest = three_checkpoints / 'ckpt' / '3'
    (latest / 'checksums.json').unlink()
    edit_json(latest / 'meta' / 'metadata', checksums=None, wandb_id='none')
    assert choose_checkpoint(three_checkpoints)[0] == 3


def test_a_checkpoint_that_has_lost_its_checksums_is_damaged(three_checkpoints, capsys):
    (three_checkpoints / 'ckpt' / '3' / 'checksums.json').unlink()
    assert choose_checkpoint(three_checkpoints)[0] == 2
    assert 'checksums.json is missing' in capsys.readouterr().err


def test_a_checkpoint_in_a_folder_of_another_number_is_damaged(three_checkpoints, capsys):
    """Else its number would be of a run that has saved meanwhile, and every resume would end with "start again"."""
    (three_checkpoints / 'ckpt' / '2').rename(three_checkpoints / 'ckpt' / '9')
    assert choose_checkpoint(three_checkpoints)[0] == 3
    assert 'ckpt/9 is damaged' in (said := capsys.readouterr().err) and 'it is checkpoint 2' in said
    lock_out_dir(three_checkpoints, 3).close()
    assert checkpoint_steps(three_checkpoints) == [3, 1]


@pytest.mark.parametrize('path', ['../secret', '/etc', 'link', '~'])
def test_a_checkpoint_whose_tokenizer_is_outside_of_its_run_is_none_of_ours(path, three_checkpoints, capsys):
    latest = three_checkpoints / 'ckpt' / '3'
    (latest / 'checksums.json').unlink()
    (three_checkpoints / 'link').symlink_to('..')
    tokenizer = {'kind': 'folder', 'path': path}
    edit_json(latest / 'meta' / 'metadata', checksums=None, wandb_id='none', tokenizer=tokenizer)
    assert choose_checkpoint(three_checkpoints)[0] == 2
    assert 'leads out of its folder' in capsys.readouterr().err


def test_only_folders_with_a_number_as_their_name_are_checkpoints(tmp_path):
    for name in ('3', '\u00b2', '\uff19', '4.damaged'):
        (tmp_path / 'ckpt' / name).mkdir(parents=True)
    (tmp_path / 'ckpt' / '5').touch()
    assert checkpoint_steps(tmp_path) == [3]


def test_a_save_without_checksums_fails_and_leaves_no_checkpoint(tmp_path, tiny_state, monkeypatch):
    monkeypatch.setattr(jax_run.checkpoints, 'UNFINISHED', '*.another-name')  # of what Orbax has yet to complete
    manager = open_checkpoints(tmp_path)
    with pytest.raises(UserError, match='cannot write .*checksums.json'):
        save_checkpoint(manager, 4, tiny_state, META)
        finish_checkpoints(manager)
    assert checkpoint_steps(tmp_path) == []


def test_out_dir_is_locked_by_one_process_until_that_ends(tmp_path):
    hold = f'import time; from jax_run.out_dir import lock_out_dir; lock = lock_out_dir({str(tmp_path)!r}); ' \
           'print("held", flush=True); time.sleep(60)'
    holder = start('-c', hold)
    assert holder.stdout.readline() == 'held\n'
    assert f'is in use by process {holder.pid} on ' in refusal(lock_out_dir, tmp_path)
    holder.kill()
    holder.communicate()
    lock_out_dir(tmp_path).close()


def test_other_processes_wait_for_the_holder_of_the_lock_which_is_synced_for_network_disks(tmp_path, monkeypatch):
    path, synced, fsync = tmp_path / 'lock', [], os.fsync

    def record(descriptor):
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            synced.append(path.read_text())
        fsync(descriptor)

    monkeypatch.setattr(os, 'fsync', record)
    lock = lock_out_dir(tmp_path)
    holder = path.read_text()
    assert synced == [holder] != ['']  # written first, while the file is open
    monkeypatch.undo()

    # another machine sees the file empty, then with its holder; or never
    path.write_text('')
    asked = []

    def show_later(seconds):
        asked.append(seconds)
        if len(asked) == 300:  # 30 s
            path.write_text(holder)

    monkeypatch.setattr(time, 'sleep', show_later)
    see_lock(run_folder(tmp_path), tmp_path, holder)
    assert len(asked) == 300
    said = refusal(see_lock, run_folder(tmp_path), tmp_path, 'process 1 on another machine')
    assert f'{tmp_path} is not the folder of process 0' in said and len(asked) == 700
    lock.close()


def test_a_folder_is_not_the_hint_for_its_own_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'out-a' / 'ckpt').mkdir(parents=True)
    assert 'did you mean' not in refusal(choose_checkpoint, 'out-a')
    assert '(did you mean out-a?)' in refusal(choose_checkpoint, 'out-b')


def test_a_folder_without_a_usable_checkpoint_is_refused(tmp_path, tiny_state):
    with pytest.raises(UserError, match='no complete checkpoint in .*name the out_dir of a run'):
        choose_checkpoint(tmp_path)
    assert not list(tmp_path.iterdir())  # the check itself creates no files
    (tmp_path / 'ckpt').mkdir()
    with pytest.raises(UserError, match='no complete checkpoint'):
        choose_checkpoint(tmp_path)
    manager = open_checkpoints(tmp_path)
    save_checkpoint(manager, 1, tiny_state, {'some': 'thing'})
    finish_checkpoints(manager)
    with pytest.raises(UserError, match='damaged or not a checkpoint of this program'):
        choose_checkpoint(tmp_path)
    with pytest.raises(UserError, match='does not fit'):
        load_checkpoint(tmp_path, 1, state_of(dataclasses.replace(TINY, n_embd=32)))


def test_a_disk_that_is_full_is_reported_in_one_line_and_the_old_checkpoint_stays(tmp_path, tiny_state, monkeypatch):
    import orbax.checkpoint as ocp
    manager = open_checkpoints(tmp_path)
    save_checkpoint(manager, 1, tiny_state, META)
    manager.wait_until_finished()

    def full(*args, **options):
        raise OSError(28, 'No space left on device')
    monkeypatch.setattr(ocp.CheckpointManager, 'save', full)
    said = refusal(save_checkpoint, manager, 2, tiny_state, META)
    assert re.search('cannot write checkpoint 2, .* MB are free; what it holds is complete.*No space left', said)
    assert '\n' not in said
    assert choose_checkpoint(tmp_path)[0] == 1
    shutil.rmtree(tmp_path / 'ckpt' / '1')
    said = refusal(save_checkpoint, manager, 2, tiny_state, META)
    assert 'there is no checkpoint yet' in said and 'resume' not in said


def test_a_save_may_take_longer_by_the_clock_than_the_20_minutes_of_orbax(tmp_path, tiny_state, monkeypatch):
    assert jax_run.checkpoints.SAVE_SECONDS > 10 * 24 * 3600  # what it may take by that clock, 20 minutes by default
    monkeypatch.setattr(jax_run.checkpoints, 'SAVE_SECONDS', 1e-9)
    manager = open_checkpoints(tmp_path)
    with pytest.raises(UserError, match='cannot write the last checkpoint'):
        save_checkpoint(manager, 1, tiny_state, META)
        finish_checkpoints(manager)
    assert checkpoint_steps(tmp_path) == []


def test_checkpoints_that_have_lost_their_checksums_only_are_resumed(three_checkpoints, capsys):
    folders = [path for path in (three_checkpoints / 'ckpt').iterdir() if path.name.isdecimal()]
    newest = max(int(path.name) for path in folders)
    for path in folders:
        (path / 'checksums.json').write_text('')
    assert choose_checkpoint(three_checkpoints)[0] == newest
    assert f'taking checkpoint {newest} unchecked' in capsys.readouterr().err
    (three_checkpoints / 'ckpt' / str(newest) / 'meta' / 'metadata').write_text('')
    assert choose_checkpoint(three_checkpoints)[0] < newest


def test_every_file_of_a_checkpoint_is_on_the_disk_before_it_gets_its_name(tmp_path, tiny_state, monkeypatch):
    metrics, synced, fsync = tmp_path / 'metrics.jsonl', set(), os.fsync
    metrics.write_text('')

    def record(descriptor):
        if not (tmp_path / 'ckpt' / '1').exists():
            synced.add(os.fstat(descriptor).st_ino)  # which a rename leaves as it is
        fsync(descriptor)

    monkeypatch.setattr(os, 'fsync', record)
    with open_checkpoints(tmp_path) as manager:
        save_checkpoint(manager, 1, tiny_state, META)
    step = tmp_path / 'ckpt' / '1'
    unsynced = {path.name for path in (metrics, step.parent, step, *step.rglob('*'))
                if path.stat().st_ino not in synced}
    assert unsynced <= {'_CHECKPOINT_METADATA', 'commit_success.txt'}
