"""The costs of a compiled program."""
import importlib.metadata
import importlib.util
import json
import re
from tests.common import assert_refused, run_script

import pytest

from tools.hlo import collectives_in, count_kernels, loops_of_unknown_length, memory_traffic, parse_hlo

# -----------------------------------------------------------------------------
# sampling, tracing, scaling

PLAN = ['--mode=compile', '--n_layer=1', '--n_head=4', '--n_embd=64', '--block_size=32', '--vocab_size=64',
        '--batch_size=8', '--gradient_accumulation_steps=16']


@pytest.mark.slow
def test_the_plan_of_a_run_counts_what_each_axis_sends_through_loops():
    result = run_script('bench_jax.py', *PLAN, '--topology=cpu:1x8', '--fsdp=4')
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])['results']
    sent = {(row['kind'], row['axis']): row for row in report['collectives'] if row['dtype'] == 'f32'}
    assert sent['all-gather', 'fsdp']['n'] == 4
    # embedding, in 2 micro-steps forward and backward: a quarter of the columns of 4 x 8 sequences
    assert sent['all-to-all', 'fsdp']['bytes'] == 2 * 2 * 4 * (4 * 8 * 32 * 64 / 4) * 3 / 4
    assert sent['all-to-all', 'fsdp']['exposed'] == sent['all-to-all', 'fsdp']['bytes']  # a CPU's are synchronous
    # every kernel is gathered at least once forward (XLA:CPU moves that out of the loop) and once backward
    assert sent['all-gather', 'fsdp']['bytes'] >= 4 * (2 * 12 * 64**2 + (64 + 32) * 64) * 3 / 4
    matrices, replicated = 12 * 64**2 + (64 + 32) * 64, 15 * 64
    assert report['n_params'] == matrices + replicated
    assert report['parameters_gb'] * 1e9 == 4 * (matrices / 4 + replicated)
    assert report['optimizer_gb'] == pytest.approx(2 * report['parameters_gb'], rel=0.01)
    assert report['peak_gb'] > report['parameters_gb'] + report['optimizer_gb']


@pytest.mark.slow
def test_the_plan_of_a_decode_step_counts_weights_cache_and_collectives():
    flags = ['--plan=decode', '--topology=cpu:1x8', '--tensor=4', '--batch_size=3', '--prompt_len=8',
             '--max_new_tokens=8']
    reports = []
    for more in ([], ['--quantize=int8', '--cache_dtype=int8']):
        result = run_script('bench_jax.py', *PLAN, *flags, *more)
        assert result.returncode == 0, result.stderr
        assert '4 x cpu, compiled, not run' in result.stdout
        reports.append(json.loads(result.stdout.splitlines()[-1])['results'])
    full, quantized = reports
    assert full['cache_gb'] * 1e9 == pytest.approx(2 * 3 * 32 * 64 * 4 / 4)  # k and v, 32 slots, float32, a quarter
    assert quantized['cache_gb'] * 1e9 == pytest.approx(2 * 3 * 32 * (64 + 4 * 4) / 4)  # and a scale per vector
    assert quantized['parameters_gb'] < full['parameters_gb'] / 2
    moved = sum(row['bytes'] for row in full['collectives'])
    assert full['sent_gb'] * 1e9 == pytest.approx(moved)
    assert 0 < moved < 4 * 20 * 3 * 64  # activations of a token, no weights
    assert_refused(run_script('bench_jax.py', *PLAN, '--plan=prefill'), 'plan must be one of train, decode')


def test_a_plan_for_a_device_without_its_compiler_says_what_to_install():
    for topology, package, extra in (('v5e:4x4', 'libtpu', 'tpu'), ('h100:1x8', 'jax_cuda12_plugin', 'cuda12')):
        if importlib.util.find_spec(package) is None:
            result = run_script('bench_jax.py', *PLAN, f'--topology={topology}')
            assert_refused(result, re.escape(f'needs its compiler: pip install "jax[{extra}]=='))
    for topology, message in (('abacus:8', 'topology must be like v5e:4x4'), ('cpu:1x0', 'topology must be like'),
                              ('cpu:2x8', 'cpu:2x8 needs JAX_NUM_CPU_DEVICES=16; this process has 8 CPU devices')):
        assert_refused(run_script('bench_jax.py', *PLAN, f'--topology={topology}'), message)


# a loop over the blocks of experts, which the data end, in one of three layers; and the rounds of exchange_tokens
LOOPS = """
%blocks (b: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %b = (s32[], f32[8,4]) parameter(0)
  %y = f32[8,4] get-tuple-element(%b), index=1
  %a = f32[8,4] add(%y, %y)
  ROOT %t = (s32[], f32[8,4]) tuple(%i, %a)
}
%rounds (b: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %b = (s32[], f32[8,4]) parameter(0)
  %y = f32[8,4] get-tuple-element(%b), index=1
  ROOT %sent = f32[8,4] all-to-all(%y), replica_groups={{0,1}}
}
%layers (b: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %b = (s32[], f32[8,4]) parameter(0)
  ROOT %inner = (s32[], f32[8,4]) while(%b), condition=%ended, body=%blocks, metadata={op_name="EXPERTS"}
}
%ended (b: (s32[], f32[8,4])) -> pred[] {
  %b = (s32[], f32[8,4]) parameter(0)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}
ENTRY %main (x: f32[8,4]) -> f32[8,4] {
  %x = f32[8,4] parameter(0)
  %all = (s32[], f32[8,4]) while(%x), body=%layers, backend_config={"known_trip_count":{"n":"3"}}
  %more = (s32[], f32[8,4]) while(%x), condition=%ended, body=%rounds, metadata={op_name="ROUNDS"}
  ROOT %other = (s32[], f32[8,4]) while(%x), condition=%ended, body=%blocks
}
""".replace('EXPERTS', 'jit(step)/more_rounds_at_most_3/blocks_of_experts_at_most_400/while').replace(
    'ROUNDS', 'jit(step)/transpose(more_rounds_at_most_3)/while')


def test_loops_whose_length_the_data_decide_are_named_and_counted_at_their_worst_case():
    program = parse_hlo(LOOPS)
    assert loops_of_unknown_length(program) == {
        'blocks_of_experts': (400, 400, 3), 'more_rounds': (0, 3, 1), 'blocks': (1, None, 1)}
    additions = 3 * 400 + 1
    assert memory_traffic(program) == additions * (2 + 1) * 4 * 8 * 4
    assert count_kernels(program) == additions
    assert [times for *_, times, _ in collectives_in(program)] == [0]  # with balanced routing one round is enough


# an iteration of a loop: of eight blocks, one is read, and its place in the results written
SLICES = """
%fused (p0: f32[8,4], p1: f32[8,4], p2: s32[], p3: f32[4]) -> f32[8,4] {
  %p0 = f32[8,4] parameter(0)
  %p1 = f32[8,4] parameter(1)
  %p2 = s32[] parameter(2)
  %p3 = f32[4] parameter(3)
  %same = f32[8,4] bitcast(%p0)
  %block = f32[1,4] dynamic-slice(%same, %p2), dynamic_slice_sizes={1,4}
  %y = f32[1,4] add(%block, %p3)
  ROOT %updated = f32[8,4] dynamic-update-slice(%p1, %y, %p2)
}
ENTRY %main (x: f32[8,4], y: f32[8,4], i: s32[], z: f32[4]) -> f32[8,4] {
  %x = f32[8,4] parameter(0)
  %y = f32[8,4] parameter(1)
  %i = s32[] parameter(2)
  %z = f32[4] parameter(3)
  ROOT %fusion = f32[8,4] fusion(%x, %y, %i, %z), kind=kLoop, calls=%fused
}
"""


def test_memory_traffic_counts_the_slices_of_arrays_that_a_fusion_reads_and_updates_in_place():
    block = 4 * 4
    index = 4
    assert memory_traffic(parse_hlo(SLICES)) == block + block + block + index  # of x, in y; z
    whole = SLICES.replace('add(%block, %p3)', 'add(%block, %p0)')  # x is needed whole, and z not at all
    assert memory_traffic(parse_hlo(whole)) == 8 * block + block + index
