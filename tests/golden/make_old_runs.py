"""Writes tests/golden/runs/COMMIT.tar.xz: what an earlier commit of this repository has left behind, two data sets, two
runs, an exported folder, and in expected.json what that commit makes of them.

$ python tests/golden/make_old_runs.py 4ff2f2c     # a commit of this repository; some minutes

Needs the packages of requirements_jax.txt in versions that the commit runs with. Made once, when a commit is released:
tests/test_old_runs.py goes on with each archive."""
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
TEXT = 'the quick brown fox jumps over the lazy dog and runs away\n' * 40
MODEL = '--n_layer=1 --n_head=2 --n_embd=16 --block_size=16 --dropout=0.1'.split()
SHORT = ('--device=cpu --batch_size=4 --gradient_accumulation_steps=2 --learning_rate=3e-2 --lr_decay_iters=30 '
         '--warmup_iters=2 --eval_interval=10 --eval_iters=2 --log_interval=1 --dtype=float32').split()
PROMPT = ['--device=cpu', '--start=the quick', '--num_samples=1', '--max_new_tokens=30', '--temperature=0']
RUNS = {'out-letters': 'letters', 'out-words': 'words'}


def main(commit):
    with tempfile.TemporaryDirectory() as work:
        work = Path(work)
        tree = work / 'tree'
        subprocess.run(['git', '-C', ROOT, 'worktree', 'add', '-q', '--detach', tree, commit], check=True)
        try:
            made = make(tree, work)
        finally:
            subprocess.run(['git', '-C', ROOT, 'worktree', 'remove', '--force', tree], check=True)
        target = ROOT / 'tests' / 'golden' / 'runs' / f'{commit}.tar.xz'
        target.parent.mkdir(exist_ok=True)
        with tarfile.open(target, 'w:xz') as archive:
            for path in made:
                archive.add(work / path, path, filter=without_picture)


def without_picture(member):
    return None if member.name.endswith('.png') else member


def make(tree, work):
    """Runs the scripts of the tree. Returns the names of what they have left in the folder `work`."""
    def run(script, *args):
        env = {**os.environ, 'JAX_NUM_CPU_DEVICES': '1', 'JAX_PLATFORMS': 'cpu'}
        done = subprocess.run([sys.executable, tree / script, *map(str, args)], cwd=work, env=env, capture_output=True,
                              text=True)
        if done.returncode:
            sys.exit(f'{script} {args}: {done.stderr[-2000:]}')
        return done.stdout

    def losses(out):
        lines = map(json.loads, (work / out / 'metrics.jsonl').read_text().splitlines())
        return {line['iter']: line['loss'] for line in lines if 'loss' in line}

    (work / 'text.txt').write_text(TEXT)
    run('data/text/prepare.py', 'text.txt', '--tokenizer=char', '--out_dir=letters')
    run('data/text/prepare.py', 'text.txt', '--tokenizer=bpe:300', '--out_dir=words')
    expected = {}
    for out, dataset in RUNS.items():
        flags = [f'--dataset={work / dataset}', *MODEL, *SHORT]
        run('train_jax.py', f'--out_dir={out}', *flags, '--max_iters=20')
        run('train_jax.py', f'--out_dir={out}-whole', *flags, '--max_iters=30')
        expected[out] = {'dataset': dataset, 'losses': losses(f'{out}-whole'),
                         'text': run('sample_jax.py', f'--out_dir={out}', '--checkpoint=latest', *PROMPT)}
    run('export_jax.py', '--out_dir=out-words', '--folder=exported', '--checkpoint=latest')
    expected['exported'] = {'text': run('sample_jax.py', '--init_from=exported', *PROMPT)}
    (work / 'expected.json').write_text(json.dumps(expected, indent=1))
    return ['expected.json', 'exported', *RUNS, *RUNS.values()]


if __name__ == '__main__':
    main(sys.argv[1])
