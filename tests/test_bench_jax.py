"""The benchmark script."""
import json
import sys
import jax_devices.setup
from tests.common import assert_refused, run_script, succeeded

import pytest


def report_of(result):
    """The JSON line with which bench_jax.py ends."""
    return json.loads(succeeded(result).stdout.splitlines()[-1])

# -----------------------------------------------------------------------------
# the benchmark

BENCH = ['--n_layer=1', '--n_head=2', '--n_embd=16', '--block_size=32', '--vocab_size=40', '--batch_size=2',
         '--repeats=2', '--device=cpu:0']


def test_the_training_benchmark_ends_with_one_json_line():
    report = report_of(run_script('bench_jax.py', '--mode=train', *BENCH, '--gradient_accumulation_steps=2'))
    assert report['settings']['n_embd'] == 16
    assert report['settings']['dtype'] == 'float32'
    assert report['environment']['jax']
    figures = report['results']
    tokens_per_iter = 2 * 2 * 32
    assert figures['tokens_per_sec'] == pytest.approx(tokens_per_iter / figures['ms_per_iter'] * 1e3, rel=1e-3)
    assert figures['compile_s'] > 0


def test_the_decoding_benchmark_ends_with_one_json_line():
    report = report_of(run_script('bench_jax.py', '--mode=decode', *BENCH, '--prompt_len=4', '--max_new_tokens=8'))
    assert report['settings']['n_embd'] == 16
    assert report['settings']['dtype'] == 'float32'
    assert report['environment']['jax']
    figures = report['results']
    assert figures['tokens_per_sec_decode'] == pytest.approx(2 / figures['ms_per_iter'] * 1e3, rel=1e-3)
    assert figures['compile_s'] > 0
    n_params = 40 * 16 + 12 * 16**2 + 13 * 16 + 2 * 16
    assert figures['weights_mb'] * 1e6 == pytest.approx(4 * n_params, rel=1e-3)
    assert figures['cache_mb'] * 1e6 == 2 * 4 * 2 * 16 * 32  # slots: at most block_size


def test_alternated_programs_are_compared_round_by_round(tmp_path, monkeypatch):
    monkeypatch.setattr(jax_devices.setup, 'measure_bandwidth', lambda device: 10.0)
    count = f"import pathlib; path = pathlib.Path({str(tmp_path / 'runs')!r}); path.open('a').write('x'); "
    report = "import json; print(json.dumps({'results': {'tokens_per_sec': len(path.read_text())}}))"
    program = f'{sys.executable} -c "{count}{report}"'  # the n-th run of either reports n tokens per second
    table = succeeded(run_script('peers/alternate.py', '--rounds=2', f'ours={program}', f'peer={program}')).stdout
    assert '| ours | 2.00 (1.00 to 3.00) | 0.625 (0.500 to 0.750) |' in table  # 1 / 2 and 3 / 4
    assert '| peer | 3.00 (2.00 to 4.00) | 1.00 (1.00 to 1.00) |' in table
    decodes = program.replace("'tokens_per_sec'", "'tokens_per_sec': 0, 'tokens_per_sec_decode'")
    table = succeeded(run_script('peers/alternate.py', '--rounds=1', '--metric=tokens_per_sec_decode',
                                 f'ours={decodes}', f'peer={program}')).stdout  # runs 5 and 6
    assert '| ours | 5.00 (5.00 to 5.00) | 0.833 (0.833 to 0.833) |' in table
    assert_refused(run_script('peers/alternate.py', f'broken={sys.executable} -c 1/0'), 'ZeroDivisionError')


def test_a_benchmark_that_cannot_be_is_refused():
    assert_refused(run_script('bench_jax.py', '--mode=sleep'), "mode must be train, decode or compile, not 'sleep'")
    too_many = run_script('bench_jax.py', '--mode=decode', *BENCH, '--max_new_tokens=100')
    assert_refused(too_many, 'at most block_size=32')
    too_few = run_script('bench_jax.py', '--mode=decode', *BENCH, '--max_new_tokens=1')
    assert_refused(too_few, 'max_new_tokens must be at least 2')
    assert_refused(run_script('bench_jax.py', '--preset=huge'),
                   "preset must be one of nanogpt_cpu, baby, gpt2, not 'huge'")


def test_the_decoding_ablation_measures_every_choice_and_its_quality(finished, dataset, monkeypatch):
    monkeypatch.setattr(jax_devices.setup, 'measure_bandwidth', lambda device: 10.0)
    result = run_script(
        'bench_jax.py', '--mode=decode', f'--out_dir={finished[0]}', f'--dataset={dataset}', '--prompt_len=4',
        '--max_new_tokens=4', '--batch_size=2', '--repeats=1', '--ablate=True', '--device=cpu:0')
    table = report_of(result)['ablation']
    assert table.keys() == {
        'baseline', 'dtype=bfloat16', 'quantize=int8', 'cache_dtype=bfloat16', 'cache_dtype=int8',
        'cache_dtype=float8', 'n_draft=4', 'batch_size=1', 'batch_size=8', 'quantize=int8, n_draft=4'}
    assert all(row['ms_per_iter'] > 0 for row in table.values())
    plain, int8, float8_cache = table['baseline'], table['quantize=int8'], table['cache_dtype=float8']
    assert plain['agreement'] == 1
    assert int8['agreement'] > 0.5
    assert float8_cache['agreement'] > 0.5
    assert int8['perplexity'] == pytest.approx(plain['perplexity'], rel=0.2)
    assert int8['perplexity'] != plain['perplexity']
    assert float8_cache['perplexity'] == pytest.approx(plain['perplexity'], rel=0.2)
    assert int8['weights_mb'] < 0.6 * plain['weights_mb']
    assert float8_cache['cache_mb'] < plain['cache_mb']
    assert 0 <= table['n_draft=4']['accepted'] <= 1


def test_the_benchmark_takes_presets_and_changes_one_choice_at_a_time():
    report = report_of(run_script('bench_jax.py', '--preset=baby', *BENCH, '--repeats=1', '--ablate=True'))
    assert report['settings']['dropout'] == 0.2  # from the preset
    assert report['settings']['n_embd'] == 16  # from the flag
    table = report['ablation']
    assert table.keys() == {
        'baseline', 'attention=chunked', 'scan_layers=True', 'remat=dots', 'remat=full', 'loss_chunk=4',
        'dtype=bfloat16', "JAX's matmul gradients"}
    for row in table.values():
        assert row['ms_per_iter'] > 0
        assert row['temporary_gb'] > 0
