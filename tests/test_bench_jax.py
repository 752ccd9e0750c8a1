"""The benchmark script."""
import json
import sys

import jax_devices.setup
import jax_generate
from jax_run.checkpoints import choose_checkpoint

import pytest
from tests.common import GOLDEN, assert_refused, run_script, succeeded


def report_of(result):
    """The JSON line with which bench_jax.py ends."""
    return json.loads(succeeded(result).stdout.splitlines()[-1])

# -----------------------------------------------------------------------------
# the benchmark

BENCH = ['--n_layer=1', '--n_head=2', '--n_embd=16', '--block_size=32', '--vocab_size=40', '--batch_size=2',
         '--repeats=2', '--device=cpu:0']


@pytest.mark.slow
def test_the_training_benchmark_ends_with_one_json_line():
    report = report_of(run_script('bench_jax.py', '--mode=train', *BENCH, '--gradient_accumulation_steps=2'))
    assert report['settings']['n_embd'] == 16
    assert report['settings']['dtype'] == 'float32'
    assert report['environment']['jax']
    figures = report['results']
    tokens_per_iter = 2 * 2 * 32
    assert figures['tokens_per_sec'] == pytest.approx(tokens_per_iter / figures['ms_per_iter'] * 1e3, rel=1e-3)
    assert figures['compile_s'] > 0


@pytest.mark.slow
def test_the_decoding_benchmark_ends_with_one_json_line():
    report = report_of(run_script('bench_jax.py', '--mode=decode', *BENCH, '--prompt_len=4', '--max_new_tokens=8'))
    assert report['settings']['n_embd'] == 16
    assert report['settings']['dtype'] == 'float32'
    assert report['environment']['jax']
    figures = report['results']
    assert figures['tokens_per_sec_decode'] == pytest.approx(2 / figures['ms_per_iter'] * 1e3, rel=1e-3)
    seconds = figures['prefill_ms'] / 1e3 + 2 * 7 / figures['tokens_per_sec_decode']
    assert figures['tokens_per_sec'] == pytest.approx(2 * 8 / seconds, rel=1e-3)
    assert figures['compile_s'] > 0
    n_params = 40 * 16 + 12 * 16**2 + 13 * 16 + 2 * 16
    assert figures['weights_mb'] * 1e6 == pytest.approx(4 * n_params, rel=1e-3)
    assert figures['cache_mb'] * 1e6 == 2 * 4 * 2 * 16 * 32  # slots: at most block_size
    assert figures['expected_experts'] is None


@pytest.mark.slow
def test_the_decoding_benchmark_takes_a_ckpt_pt_of_characters_with_its_data_set(dataset):
    flags = ['--mode=decode', f'--out_dir={GOLDEN / "nanogpt" / "ckpt.pt"}', '--prompt_len=4', '--max_new_tokens=8',
             '--repeats=1', '--device=cpu:0']
    assert report_of(run_script('bench_jax.py', *flags, f'--dataset={dataset}'))['results']['ms_per_iter'] > 0
    assert_refused(run_script('bench_jax.py', *flags), 'name the data set')


@pytest.mark.slow
def test_the_decoding_benchmark_counts_the_experts_that_a_step_is_expected_to_read():
    experts = ['--n_expert=4', '--n_expert_used=2', '--n_inner=8', '--mlp=swiglu', '--bias=False']
    result = run_script('bench_jax.py', '--mode=decode', *BENCH, *experts, '--prompt_len=4', '--max_new_tokens=8')
    figures = report_of(result)['results']
    assert figures['expected_experts'] == pytest.approx(3)  # of two tokens: 4 (1 - (1 - 2 / 4)^2)
    matrices = 40 * 16 + 4 * 16**2 + 3 * (3 * 16 * 8)  # the head, attention, three experts
    router_and_norms = 4 * 16 + 3 * 16
    assert figures['weights_mb'] * 1e6 == pytest.approx(4 * (matrices + router_and_norms))


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


@pytest.mark.slow
def test_a_benchmark_that_cannot_be_is_refused():
    assert_refused(run_script('bench_jax.py', '--mode=sleep'), 'mode must be one of train, decode, compile, not ')
    too_many = run_script('bench_jax.py', '--mode=decode', *BENCH, '--prompt_len=16', '--max_new_tokens=17')
    assert_refused(too_many, 'at most block_size=32')
    too_few = run_script('bench_jax.py', '--mode=decode', *BENCH, '--max_new_tokens=1')
    assert_refused(too_few, 'max_new_tokens must be at least 2')
    assert_refused(run_script('bench_jax.py', '--seed=-1'), 'seed must be in')
    assert_refused(run_script('bench_jax.py', '--mode=compile', '--quantize=int4'), 'quantize must be one of int8')
    assert_refused(run_script('bench_jax.py', '--preset=huge'),
                   "preset must be one of nanogpt_cpu, baby, gpt2, not 'huge'")
    assert_refused(run_script('bench_jax.py', '--mode=train', '--compile=False', '--max_iters=3'),
                   'bench_jax.py does not read max_iters, a flag of train_jax.py')


@pytest.mark.slow
def test_the_decoding_benchmark_takes_no_weights_and_prompts_of_a_config_file(tmp_path):
    """A config file of train_jax.py names where the training goes and which data it reads."""
    config = tmp_path / 'config.py'
    config.write_text("out_dir = 'out-none'; dataset = 'none'; n_layer = 1; n_head = 2; n_embd = 16; block_size = 16")
    report = report_of(run_script(
        'bench_jax.py', config, '--mode=decode', '--prompt_len=4', '--max_new_tokens=4', '--batch_size=2',
        '--repeats=1', '--device=cpu:0'))
    assert report['settings']['n_embd'] == 16


@pytest.mark.slow
def test_the_decoding_benchmark_takes_a_run_and_its_text(finished, dataset, monkeypatch):
    monkeypatch.setattr(jax_devices.setup, 'measure_bandwidth', lambda *args: 1e-6)  # less than is read
    reports = [report_of(run_script(
        'bench_jax.py', '--mode=decode', f'--out_dir={finished[0]}', f'--dataset={dataset}', '--prompt_len=4',
        '--max_new_tokens=4', '--batch_size=2', '--repeats=1', '--device=cpu:0', *options))
        for options in ([], ['--quantize=int8', '--cache_dtype=float8', '--n_draft=2'])]
    plain, small = (report['results'] for report in reports)
    model = choose_checkpoint(finished[0])[1]['model']
    for name in ('n_layer', 'n_embd', 'vocab_size', 'bias'):
        assert reports[0]['settings'][name] == model[name]
    wrong = run_script('bench_jax.py', '--mode=decode', f'--out_dir={finished[0]}', '--n_layer=7')
    assert_refused(wrong, 'not n_layer=7: leave the flag out')
    assert plain['share_of_bandwidth'] == small['share_of_bandwidth'] == 1
    assert small['weights_mb'] < 0.6 * plain['weights_mb']
    assert small['cache_mb'] < plain['cache_mb']
    assert plain['accepted'] is None
    assert 0 <= small['accepted'] <= 1


@pytest.mark.slow
def test_the_decoding_benchmark_finds_a_data_set_by_its_path(finished, dataset, monkeypatch):
    monkeypatch.chdir(dataset.parent)
    succeeded(run_script(
        'bench_jax.py', '--mode=decode', f'--out_dir={finished[0]}', f'--dataset={dataset.name}', '--prompt_len=4',
        '--max_new_tokens=4', '--batch_size=2', '--repeats=1', '--device=cpu:0'))


@pytest.mark.slow
def test_the_decoding_benchmark_is_greedy_unless_a_temperature_is_given(monkeypatch):
    seen = []

    def start_rows(params, config, prompts, sampling, **options):
        seen.append((sampling.temperature, sampling.top_k))
        return start(params, config, prompts, sampling, **options)

    start = jax_generate.start_rows
    monkeypatch.setattr(jax_generate, 'start_rows', start_rows)
    small = ['--mode=decode', *BENCH, '--prompt_len=4', '--max_new_tokens=4', '--repeats=1']
    for options in ([], ['--temperature=0.8'], ['--temperature=1', '--top_k=3']):
        succeeded(run_script('bench_jax.py', *small, *options))
    assert seen[::2] == [(0, 200), (0.8, 200), (1, 3)]
    assert_refused(run_script('bench_jax.py', *small, '--top_k=3'), 'nothing reads top_k=3 without a temperature')


@pytest.mark.slow
def test_the_benchmark_takes_presets_and_flags_override_them():
    report = report_of(run_script('bench_jax.py', '--preset=baby', *BENCH, '--repeats=1'))
    assert report['settings']['dropout'] == 0.2  # from the preset
    assert report['settings']['n_embd'] == 16  # from the flag
    assert report['results']['ms_per_iter'] > 0
    assert report['results']['temporary_gb'] > 0
