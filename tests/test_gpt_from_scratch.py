"""notebooks/gpt_from_scratch.ipynb: its solutions pass its checks, and its holes and planted mistakes do not."""
import json
import re
import sys

import matplotlib
import pytest

from tests.common import ROOT

PATH = ROOT / 'notebooks' / 'gpt_from_scratch.ipynb'

# {check: [(what a reader may write in place of the hole, what the check says of it)]}
MISTAKES = {
    'batch': [
        ('return windows[:, :-1], windows[:, :-1]', 'y is x'),
        ('return windows[:, 1:], windows[:, :-1]', 'y is the token before'),
        ('return windows[:, :-1], windows', 'y should have the shape')],
    'bigram': [
        ('return table_VxV[:, x_BxT].transpose(1, 2, 0)', 'you take columns'),
        ('return table_VxV', 'should have the shape')],
    'scores': [
        ("scores_BxHxTxS = jnp.einsum('bthk,bshk->bhts', q_BxTxHxK, k_BxSxHxK)", 'divide them by K'),
        ("scores_BxHxTxS = jnp.einsum('bthk,bshk->bhst', q_BxTxHxK, k_BxSxHxK) / K**0.5", 'transposed'),
        ("scores_BxHxTxS = jnp.einsum('bthk,bshk->bhts', q_BxTxHxK, k_BxSxHxK) / K", 'scores differ')],
    'mask': [
        ('is_seen_TxS = jnp.arange(k_BxSxHxK.shape[1]) <= 1 + first + jnp.arange(T)[:, None]', 'lets position 0 see 1'),
        ('is_seen_TxS = jnp.arange(k_BxSxHxK.shape[1]) >= first + jnp.arange(T)[:, None]', 'lets position 0 see 1'),
        ('is_seen_TxS = jnp.arange(k_BxSxHxK.shape[1]) <= jnp.arange(T)[:, None]', 'hides 1 from position 3, where 3'),
        ('is_seen_TxS = jnp.arange(k_BxSxHxK.shape[1]) < first + jnp.arange(T)[:, None]', 'hides 0 from position 0'),
        ('is_seen_TxS = True', 'lets position 0 see 1')],
    'heads': [
        ("a.reshape(B, H, T, K).swapaxes(1, 2) for a in jnp.split(linear(p['c_attn'], x_BxTxD), 3, axis=-1)]",
         'the axis T has to stay whole'),
        ("a.reshape(B, T, K, H).swapaxes(2, 3) for a in jnp.split(linear(p['c_attn'], x_BxTxD), 3, axis=-1)]",
         'outputs differ'),
        ("a.reshape(B, T, H, K) for a in jnp.split(linear(p['c_attn'], x_BxTxD), 3, axis=-1)[::-1]]",
         'outputs differ')],
    'block': [
        ("x_BxTxD = linear(p['mlp']['c_proj'], jax.nn.gelu(h_BxTxF, approximate=False))", 'it does not replace it'),
        ("x_BxTxD += linear(p['mlp']['c_proj'], jax.nn.gelu(h_BxTxF))", 'GELU is the approximate one'),
        ("x_BxTxD += linear(p['mlp']['c_proj'], jax.nn.relu(h_BxTxF))", 'logits differ'),
        ("x_BxTxD += linear(p['mlp']['c_proj'], h_BxTxD)", 'NameError')],
    'loss': [
        ('return jnp.take_along_axis(log_probs_BxTxV, y_BxT[..., None], axis=-1).mean()', 'needs a minus'),
        ('return -jnp.take_along_axis(log_probs_BxTxV, y_BxT[..., None], axis=-1).sum()', 'is a sum'),
        ('return -jnp.take_along_axis(log_probs_BxTxV, y_BxT[..., None], axis=-1)', 'one number'),
        ('return -log_probs_BxTxV.mean()', 'losses differ')],
    'optimizer': [
        ('step = m / (jnp.sqrt(v) + 1e-8)', 'divide them by 1'),
        ('step = (m / (1 - cfg.beta1**n)) / (v / (1 - cfg.beta2**n) + 1e-8)', 'divide by the root of v'),
        ('step = (m / (1 - cfg.beta1)) / (jnp.sqrt(v / (1 - cfg.beta2)) + 1e-8)', 'after 2 updates')],
    'loop': [
        ('loss_grads = jax.value_and_grad(loss_fn)(params, y_BxT, x_BxT, cfg)', 'you predict x from y'),
        ('loss_grads = loss_fn(params, *xy, cfg), jax.tree.map(jnp.zeros_like, params)', 'losses of batch 1'),
        ('loss_grads = jax.grad(loss_fn)(params, *xy, cfg)', 'fails: ValueError')],
    'sampling': [
        ('logits_1xTxV, cache = forward(params, np.array([ids[n_cached:]]), cfg, cache)', 'another one from its token'),
        ('logits_1xTxV, cache = forward(params, np.array([ids]), cfg, cache, 0)', 'tokens were computed'),
        ('logits_1xTxV, cache = forward(params, np.array([ids[n_cached:]]), cfg, cache, n_cached + 1)',
         'another one from its token')],
}


def read_cells():
    """[(kind, text)] of the notebook; an exercise is followed by its solution, a line."""
    cells = []
    for cell in json.loads(PATH.read_text(encoding='utf-8'))['cells']:
        kind = 'exercise' if 'exercise' in cell['metadata'].get('tags', ()) else cell['cell_type']
        text = ''.join(cell['source'])
        if text.startswith('<details>'):
            kind, text = 'solution', re.search('```python\n(.*)\n```', text)[1]
        cells.append((kind, text))
    return cells


def fill(exercise, line):
    """The exercise with a line in place of that with the hole."""
    hole, = [found for found in exercise.splitlines() if '...' in re.sub("'[^']*'|#.*|\"\"\".*", '', found)]
    indent = hole[:len(hole) - len(hole.lstrip())]
    return exercise.replace(hole, indent + line.strip())


def exercises():
    """{check: (the exercise, its solution)}."""
    cells, found = read_cells(), {}
    for (kind, text), (_, solution) in zip(cells, cells[1:]):
        if kind == 'exercise':
            found[re.search(r'^check\.(\w+)', text, re.MULTILINE)[1]] = text, solution
    return found


def test_there_are_ten_exercises_each_with_mistakes_and_a_solution():
    found = exercises()
    assert len(found) == 10 and found.keys() == MISTAKES.keys()
    for exercise, solution in found.values():
        compile(fill(exercise, solution), 'exercise', 'exec')


def test_solutions_are_lines_of_nano_jax():
    lines = {line.strip() for line in (ROOT / 'nano_jax.py').read_text(encoding='utf-8').splitlines()}
    for check, (_, solution) in exercises().items():
        assert check == 'bigram' or solution.strip() in lines, solution


@pytest.mark.slow
@pytest.mark.long
def test_solutions_pass_and_every_hole_and_mistake_is_caught(monkeypatch, capsys):
    matplotlib.use('Agg')
    monkeypatch.chdir(ROOT / 'notebooks')
    monkeypatch.setattr(sys, 'path', sys.path[:])
    monkeypatch.setenv('NOTEBOOK_ITERS', '60')
    namespace, n_right = {'__name__': 'notebook'}, 0
    cells = read_cells()
    for (kind, text), (_, solution) in zip(cells, [*cells[1:], (None, None)]):
        if kind == 'code':
            exec(text, namespace)
        if kind != 'exercise':
            continue
        checks, name = namespace['check'], re.search(r'^check\.(\w+)', text, re.MULTILINE)[1]
        with pytest.raises(checks.NotYet, match='still has its hole') as hole:
            exec(text, namespace)
        assert len(hole.value._render_traceback_()) == 1
        for line, message in MISTAKES[name]:
            with pytest.raises(checks.NotYet, match=re.escape(message)):
                exec(fill(text, line), namespace)
        exec(fill(text, solution), namespace)
        n_right += 1
    said = capsys.readouterr().out
    assert n_right == said.count('right: ') == 10
    assert '--- before' in said and '--- after' in said
    assert namespace['losses'][-1] < namespace['losses'][0] - 1


def test_the_notebook_is_stored_with_its_pictures_and_holes_and_small():
    cells = json.loads(PATH.read_text(encoding='utf-8'))['cells']
    assert PATH.stat().st_size < 300_000
    outputs = [output for cell in cells for output in cell.get('outputs', [])]
    assert sum('image/png' in output.get('data', {}) for output in outputs) == 2  # the loss curve, a head
    text = ''.join(''.join(output.get('text', '')) for output in outputs)
    assert '--- before' in text and '--- after' in text
