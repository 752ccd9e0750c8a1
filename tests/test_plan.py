"""What a compiled program needs, as XLA says it: bench_jax.py --mode=compile."""
import importlib.util
import json
import re

import pytest

from tools.plan import count_collectives
from tests.common import assert_refused, run_script, succeeded

MODEL = ['--mode=compile', '--n_layer=1', '--n_head=4', '--n_embd=64', '--block_size=32', '--vocab_size=64',
         '--batch_size=8', '--gradient_accumulation_steps=16']


def plan(*flags):
    """What the plan for eight CPU devices reports."""
    result = succeeded(run_script('bench_jax.py', *MODEL, '--topology=cpu:1x8', *flags))
    return json.loads(result.stdout.splitlines()[-1])['results']


@pytest.mark.slow
def test_the_plan_of_a_run_says_what_a_device_holds_and_counts_collectives():
    report = plan('--fsdp=4')
    matrices, replicated = 12 * 64**2 + (64 + 32) * 64, 15 * 64
    assert report['n_params'] == matrices + replicated
    assert report['parameters_gb'] * 1e9 == 4 * (matrices / 4 + replicated)
    assert report['optimizer_gb'] == pytest.approx(2 * report['parameters_gb'], rel=0.01)
    assert report['peak_gb'] > report['parameters_gb'] + report['optimizer_gb']
    assert report['tflop'] > 0 and report['accessed_gb'] > 0
    # the embedding of 4 x 8 sequences, forward and backward: a quarter of the columns
    assert report['all_to_all_count'] == 2
    assert report['all_to_all_mb'] * 1e6 == 2 * 4 * (4 * 8 * 32 * 64 / 4)
    assert report['all_gather_mb'] * 1e6 >= 4 * matrices  # of every matrix, once at least


@pytest.mark.slow
def test_the_plan_of_a_decode_step_counts_weights_and_cache():
    flags = ['--plan=decode', '--tensor=4', '--batch_size=3', '--prompt_len=8', '--max_new_tokens=8']
    full, quantized = plan(*flags), plan(*flags, '--quantize=int8', '--cache_dtype=int8')
    assert full['cache_gb'] * 1e9 == pytest.approx(2 * 3 * 32 * 64 * 4 / 4)  # k and v, 32 slots, float32, a quarter
    assert quantized['cache_gb'] * 1e9 == pytest.approx(2 * 3 * 32 * (64 + 4 * 4) / 4)  # and a scale per vector
    assert quantized['parameters_gb'] < full['parameters_gb'] / 2
    sent = sum(value for name, value in full.items() if name.endswith('_mb'))
    assert 0 < sent * 1e6 < 4 * 20 * 3 * 64  # activations of a token, no weights
    assert_refused(run_script('bench_jax.py', *MODEL, '--plan=prefill'), 'plan must be one of train, decode')


PROGRAM = '''
  %sum = f32[8,4]{1,0} all-reduce(%x), channel_id=1, replica_groups={{0,1}}, to_apply=%add
  %sent = (s8[16]{0}, pred[4]{0}) all-to-all(%y, %z), channel_id=1
  %start = (bf16[2,4]{1,0}, bf16[8,4]{1,0}) all-gather-start(%w), channel_id=2
  %done = bf16[8,4]{1,0} all-gather-done(%start)
  %piece = bf16[64]{0} all-gather(%v), channel_id=3, frontend_attributes={chain_id="0"}
  %next_piece = bf16[64]{0:S(1)} all-gather(%v), channel_id=3, frontend_attributes={chain_id="0"}
  %scattered = f32[4] reduce-scatter(%u), channel_id=1
  %scattered_too = f32[4] reduce-scatter(%u), channel_id=1
'''


def test_a_collective_counts_once_with_the_bytes_of_its_results():
    assert count_collectives(PROGRAM) == {
        'all_reduce_count': 1, 'all_reduce_mb': 128e-6, 'all_to_all_count': 1, 'all_to_all_mb': 20e-6,
        'all_gather_count': 2, 'all_gather_mb': 64e-6 + 128e-6,
        'reduce_scatter_count': 2, 'reduce_scatter_mb': 2 * 16e-6}


def test_a_plan_for_a_device_without_its_compiler_says_what_to_install():
    for topology, package, extra in (('v5e:4x4', 'libtpu', 'tpu'), ('h100:1x8', 'jax_cuda12_plugin', 'cuda12')):
        if importlib.util.find_spec(package) is None:
            result = run_script('bench_jax.py', *MODEL, f'--topology={topology}')
            assert_refused(result, re.escape(f'needs its compiler: pip install "jax[{extra}]=='))
    for topology, message in (('abacus:8', 'topology must be like v5e:4x4'), ('cpu:1x0', 'topology must be like'),
                              ('cpu:2x8', 'cpu:2x8 needs JAX_NUM_CPU_DEVICES=16; this process has 8 CPU devices')):
        assert_refused(run_script('bench_jax.py', *MODEL, f'--topology={topology}'), message)
