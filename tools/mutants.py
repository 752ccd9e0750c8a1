"""Makes small changes to the code, one at a time, and says whether the tests notice each change
(mutation testing):

    python tools/mutants.py                     # all of MODULES, about 40 minutes on two cores
    python tools/mutants.py cache sources       # only these keys of MODULES
    python tools/mutants.py step --against=HEAD~20    # with the tests of an earlier commit

A changed copy of the code is called a mutant. If a mutant survives, it changes a behaviour that no
test checks. For each mutant, the script runs all test files of its module that MODULES names, also
the slow tests, in a copy of HEAD. The tests of a mutant stop at the first failure, and the script
goes on with the next mutant. Where a bug was found, add a mutant to MODULES."""
import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
START = 'test_jax_transformer.py'
# {key: (the file to change; its test files; [(old text, which occurs once in the file; new text)])}
MODULES = {
    'model': ('jax_transformer.py', f'{START} pretrained attention layers experts families', [
        ('jnp.square(x - mean).mean', 'jnp.square(x).mean'),
        ('sinks_GxTQ = jnp.tile(sinks_H.reshape(G, Q), T)', 'sinks_GxTQ = jnp.repeat(sinks_H.reshape(G, Q), T, 1)'),
        ('jax.lax.top_k(rank_by_group, 2)', 'jax.lax.top_k(rank_by_group, 1)'),
        ('score_BxTxE *= is_text_BxTx1', 'pass')]),
    'cache': ('jax_transformer.py', f'{START} generate', [
        ("limits = {'window': config.block_size}", 'limits = {}'),
        ('if T - 1 + span <= S or S < span:', 'if T - 2 + span <= S or S < span:'),
        ('(position_BxT > last_Bx1 - S)', '(position_BxT > last_Bx1 - S - 1)'),
        ('count_slots(config, layer_type, n_slots) + n_draft', 'count_slots(config, layer_type, n_slots)')]),
    'generation': ('jax_generate.py', f'{START} generate text', [
        ('fold_in_each(state.key_B, state.n_generated_B)', 'fold_in_each(state.key_B, state.length_B)'),
        ('jnp.clip(room_B - 1, 0, n_draft)', 'jnp.clip(room_B, 0, n_draft)'),
        ('(accepted < 0.3 * drafted)', '(accepted < 0.03 * drafted)'),
        ('(state.length_B > n_slots)', '(state.length_B > n_slots + 1)')]),
    'step': ('jax_train_utils.py', 'train_utils parallel', [
        ('g / (n_micro * scale)', 'g / n_micro'),
        ('decay_iters = ceil_div(decay_iters, 5)', 'decay_iters = ceil_div(decay_iters, 4)'),
        ('good_steps == 2000, 2.0', 'good_steps == 2000, 1.0'),
        ('total / n_rows / evaluation.share', 'total / n_rows'),
        ('is_row = (rows < n_rows).astype', 'is_row = (rows > -1).astype')]),
    'optimizer': ('jax_train_utils.py', 'optimizers train_utils', [
        ('optax.trace(0.95, nesterov=True)', 'optax.trace(0.95)')]),
    'muon': ('jax_ops/muon.py', 'optimizers train_utils', [
        ('(n_query + kernel.shape[1]) // 2', 'n_query + 1')]),
    'sources': ('jax_run/sources.py', 'sources data train_utils', [
        ('n_offsets=n_tokens - n * block_size', 'n_offsets=0'),
        ('return is_last & ~has_counts', 'return is_last'),
        ('2 * self.fitting[self.order.locate(pair)]', '2 * self.order.locate(pair)'),
        ('last // max(1, n_rows - 1)', 'last // n_rows')]),
    'checkpoints': ('jax_run/checkpoints.py', 'checkpoints', [
        ('steps = [best, *sorted(others, reverse=True)]', 'steps = [best, *others]'),
        ('if must_have_checksums and not', 'if False and not')]),
    'layout': ('jax_devices/layout.py', 'parallel compiled', [
        ("if not hasattr(tree, 'opt_state')", 'if True'),
        ('if config.block_size % context**2:', 'if config.block_size % context:')]),
    'start': ('jax_run/start.py', 'parallel', [
        ("fitting['fsdp'] = math.gcd(left, n_embd)", "fitting['fsdp'] = left")]),
    'sharding': ('jax_ops/sharding.py', 'parallel compiled', [
        ("axes = (*axes, 'data', 'context')", "axes = (*axes, 'data')"),
        ("('c_proj/kernel', Spec('tensor', 'fsdp'))", "('c_proj/kernel', Spec('fsdp', 'tensor'))")]),
    'tokenizers': ('jax_hub/tokenizers.py', 'tokenizers', [
        ('ids[:len(ids) - self.n_behind] if begin else ids', 'ids'),
        ('self.special_ids |= added.keys() & {begin, end, *self.stop_tokens}', 'pass')]),
    'chats': ('jax_hub/chats.py', 'chats conversations', [
        ('~(is_special & (starts < start))', 'True'),
        ('return ids[:n_spaces + 1] if is_stop else []', 'return ids[:n_spaces] if is_stop else []')]),
    'families': ('jax_hub/families.py', 'families ropes', [
        ('hf.attn_logit_softcapping or 0.0', '0.0'),
        ("rope['mscale_all_dim']) ** 2", "rope['mscale_all_dim'])"),
        ("'truncate': hf.rope_parameters.get('truncate', True)", "'truncate': True")]),
    'weights': ('jax_hub/weights.py', 'weight_files families', [
        ('// self.block[1]', '// self.block[0]'),
        ('get_storage_size=lambda shape: math.prod(shape) * itemsize', 'get_storage_size=math.prod')])}


def extract(folder, revision, *paths):
    """Writes files of a git revision into a folder: the files at or below `paths`, or all files if
    no paths are given."""
    done = subprocess.run(['git', 'archive', revision, *paths], cwd=ROOT, capture_output=True)
    if done.returncode:
        sys.exit(f'error: {done.stderr.decode().strip()}')
    subprocess.run(['tar', '-x', '-C', folder], input=done.stdout, check=True)


def passes(folder, names):
    """Runs test files in a folder, up to the first failure. Returns (True, '') if they pass, else
    (False, the name of the first failure or 'no end after 15 minutes'). names: the names of the
    test files, separated by spaces, such as 'data sources' for tests/test_data.py and
    tests/test_sources.py."""
    files = [name if name == START else f'tests/test_{name}.py' for name in names.split()]
    command = [sys.executable, '-m', 'pytest', '-x', '-n', '2', '-m', '', *files]
    run = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        out, _ = run.communicate(timeout=900)
    except subprocess.TimeoutExpired:  # a mutant may loop without end
        return False, 'no end after 15 minutes'
    finally:
        if run.poll() is None:
            os.killpg(run.pid, 9)
    failed = [line.split(' - ')[0] for line in out.splitlines() if line.startswith(('FAILED', 'ERROR'))]
    if run.returncode and not failed:
        sys.exit(f'error: pytest could not run {names}\n{out[-2000:]}')
    return run.returncode == 0, failed[0] if failed else ''


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('modules', nargs='*', default=list(MODULES))
    parser.add_argument('--against', default='')
    args = parser.parse_args()
    unknown = set(args.modules) - MODULES.keys()
    if unknown:
        parser.error(f'there is no {min(unknown)}; there are {", ".join(MODULES)}')
    n_killed = n_all = 0
    with tempfile.TemporaryDirectory(prefix='mutants_') as temporary:
        tree = Path(temporary) / 'tree'
        tree.mkdir()
        extract(tree, 'HEAD')
        if args.against:
            shutil.rmtree(tree / 'tests')
            extract(tree, args.against, 'tests', 'conftest.py', START, 'pyproject.toml')
        os.environ['JAX_COMPILATION_CACHE_DIR'] = f'{temporary}/cache'  # what one mutant has compiled serves the next
        os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
        for module in args.modules:
            file, names, mutants = MODULES[module]
            path, text = tree / file, (tree / file).read_text()
            wrong = [old for old, _ in mutants if text.count(old) != 1]
            if wrong:
                sys.exit(f'error: {file} does not have exactly once: {wrong}')
            passed, why = passes(tree, names)
            if not passed:
                sys.exit(f'error: the tests of {module} fail without a mutant: {why}')
            for old, new in mutants:
                path.write_text(text.replace(old, new))
                passed, why = passes(tree, names)
                print(f'{"SURVIVED" if passed else "killed"}  {module}: {old}  ->  {new}  {why}', flush=True)
                n_killed += not passed
                n_all += 1
            path.write_text(text)
    print(f'{n_killed} of {n_all} mutants are killed')


if __name__ == '__main__':
    main()
