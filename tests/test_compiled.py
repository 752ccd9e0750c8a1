"""What XLA's compilers for H100 GPUs and v5e TPUs make of the step: the claims of docs/parallelism.md, on smaller
models. Nothing runs, and no device is needed; where a compiler is not installed its tests are skipped."""
import functools
import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.common import ROOT


def needs(package, extra):
    reason = f"needs XLA's compiler for it: pip install \"jax[{extra}]\""
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=reason)


on_h100, on_v5e = needs('jax_cuda12_plugin', 'cuda12'), needs('libtpu', 'tpu')
D, T = 512, 256
MODEL = ['--n_layer=1', f'--n_embd={D}', '--n_head=8', f'--block_size={T}', '--vocab_size=512', '--bias=False']
ACCUMULATED = ['--batch_size=2', '--gradient_accumulation_steps=32']  # 4 micro-steps on each of 8 devices


@functools.cache
def plan(topology, *flags):
    """What bench_jax.py --mode=compile reports; the flags override MODEL."""
    command = [sys.executable, ROOT / 'bench_jax.py', '--mode=compile', f'--topology={topology}', *MODEL, *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900, env=os.environ | {'XLA_FLAGS': ''})
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])['results']


def rows(report, **values):
    """The rows of the table of collectives with these values, as in kind='all-gather'."""
    return [row for row in report['collectives'] if values.items() <= row.items()]


def sent(report, **values):
    """Bytes that a device sends in these collectives."""
    return sum(row['bytes'] for row in rows(report, **values))


@on_h100
@pytest.mark.parametrize('flags', [['--n_layer=2'], ['--n_layer=4', '--scan_layers=True']], ids=['layers', 'scan'])
def test_h100s_prefetch_the_backward_gathers_of_fsdp(flags):
    report = plan('h100:1x8', '--fsdp=8', '--batch_size=16', *flags)
    gathers = rows(report, kind='all-gather', axis='fsdp', dtype='bf16')
    assert sum(row['exposed'] for row in gathers) < sum(row['bytes'] for row in gathers) / 4


@on_h100
def test_h100s_reduce_gradients_over_data_once_per_step():
    report = plan('h100:1x8', '--fsdp=4', '--vocab_size=8192', *ACCUMULATED)
    a_step = 4 * report['n_params'] / 4  # of float32, a quarter per device: a ring of two sends it once
    over_data = [row for row in report['collectives'] if 'data' in row['axis'] and 'reduce' in row['kind']]
    assert 0 < sum(row['bytes'] for row in over_data) < 1.3 * a_step


@on_h100
def test_h100s_move_the_weights_of_c_attn_between_tensor_ranks_once_in_bfloat16():
    report = plan('h100:1x8', '--tensor=4', '--batch_size=8', '--block_size=16')
    once = 2 * 3 * D**2 / 4 * 3 / 4
    assert sent(report, kind='all-to-all', axis='tensor', dtype='bf16') == once
    assert sent(report, kind='all-to-all', axis='tensor', dtype='f32') == 2 * once  # the gradient, on its way back


@on_h100
@pytest.mark.parametrize('flags', [[], ['--tensor=2', '--fsdp=4']], ids=['one', 'mesh'])
def test_h100s_store_the_gradient_of_the_logits_in_bfloat16_only(flags):
    n_devices = 8 if flags else 1
    report = plan(f'h100:1x{n_devices}', '--vocab_size=32768', f'--batch_size={8 * n_devices}', *flags)
    logits = 4 * 8 * T * 32768
    assert logits < 1e9 * report['temporary_gb'] < 2 * logits  # float32 logits and their gradient, half as large


@on_h100
def test_h100s_return_the_results_of_experts_in_bfloat16():
    report = plan('h100:1x8', '--expert=4', '--n_expert=8', '--batch_size=16')
    tokens = 2 * 4 * 2 * T * D * 3 / 4  # bytes sent in bfloat16 for those of a group of 4 devices
    assert sent(report, kind='reduce-scatter', axis='expert', dtype='bf16') == pytest.approx(2 * tokens)
    assert sent(report, kind='reduce-scatter', axis='expert', dtype='f32') < tokens / 2


EXPERTS = ['--n_expert=8', '--n_inner=256', '--mlp=swiglu', '--batch_size=16']


@on_h100
def test_h100s_compute_all_experts_in_kernels_without_a_loop_over_blocks():
    report = plan('h100:1x1', *EXPERTS)
    assert report['loops_of_unknown_length'] == 0
    assert report['kernels'] < 300  # the loop over blocks of 64 rows: 6,000


@on_h100
def test_h100s_decode_few_rows_with_their_experts_in_batched_matmuls():
    report = plan('h100:1x1', *EXPERTS, '--plan=decode', '--batch_size=1', '--max_new_tokens=16')
    assert report['loops_of_unknown_length'] == 0
    weights_of_an_expert = 2 * 3 * D * 256
    assert report['temporary_gb'] * 1e9 < 8 * weights_of_an_expert  # not those of all experts


@on_v5e
def test_v5es_compute_all_experts_in_kernels_without_a_loop_over_blocks():
    report = plan('v5e:2x4', '--fsdp=8', *EXPERTS)
    assert report['loops_of_unknown_length'] == 0
    # every expert for every row would be 8 hidden rows for each of the 2 x 256 x 2
    assert report['temporary_gb'] * 1e9 < 8 * 2 * (2 * T * 2) * 8 * 256 * 2


def sends_tokens_to_their_experts_only(topology):
    report = plan(topology, '--expert=16', '--n_expert=64', '--n_inner=128', '--batch_size=32')
    rows_of_tokens = 16 * 2 * (2 * T) * 2 // 16  # 2 sequences per device, 2 experts per token, twice the balanced share
    exchange = 2 * rows_of_tokens * D * 15 / 16  # bytes in bfloat16
    assert sent(report, kind='all-to-all', axis='expert', dtype='bf16') == 4 * exchange
    all_gather = 2 * 15 * 2 * T * D
    assert exchange == all_gather / 4
    assert sent(report, kind='all-gather', axis='expert', dtype='bf16') < all_gather / 8
    assert sent(report, kind='reduce-scatter', axis='expert', dtype='bf16') < all_gather / 8


@on_h100
def test_h100s_send_tokens_to_their_experts_only():
    sends_tokens_to_their_experts_only('h100:2x8')


@on_v5e
def test_v5es_send_tokens_to_their_experts_only():
    sends_tokens_to_their_experts_only('v5e:4x4')


@on_h100
def test_zero_1_sends_as_much_as_replicas_on_h100s_and_stores_an_eighth_of_the_optimizer_state():
    replicas, zero_1 = plan('h100:1x8', *ACCUMULATED), plan('h100:1x8', *ACCUMULATED, '--zero=1')
    assert zero_1['sent_gb'] == pytest.approx(replicas['sent_gb'], rel=0.02)
    assert zero_1['optimizer_gb'] == pytest.approx(replicas['optimizer_gb'] / 8, rel=0.02)
    assert zero_1['peak_gb'] < replicas['peak_gb']


@on_h100
def test_h100s_shard_activations_between_blocks_over_tensor():
    report = plan('h100:1x8', '--tensor=8', '--batch_size=4', '--n_layer=2')
    activations = 2 * 4 * T * D * 7 / 8  # bytes sent for one [B, T, D] in bfloat16
    for kind in ('all-gather', 'reduce-scatter'):
        assert sent(report, kind=kind, dtype='bf16') >= 8 * activations  # 2 forward and 2 backward in each layer
    assert sent(report, kind='all-reduce', dtype='bf16') < activations


@on_h100
def test_attention_without_scores_takes_a_fraction_of_the_temporary_memory_on_h100s():
    flags = ['--fsdp=8', '--n_kv_head=2', '--position=rope', '--block_size=4096', '--batch_size=8']
    temporary = {name: plan('h100:1x8', *flags, f'--attention={name}')['temporary_gb']
                 for name in ('xla', 'cudnn', 'chunked')}
    assert temporary['cudnn'] < temporary['xla'] / 5
    assert temporary['chunked'] < temporary['xla'] / 2


@on_h100
def test_h100s_reduce_scatter_the_gradients_of_keys_and_values_over_context():
    report = plan('h100:1x8', '--context=8', '--block_size=1024', '--batch_size=1')
    assert sent(report, kind='reduce-scatter', axis='context') == pytest.approx(2 * 2 * 1024 * D * 7 / 8)


@on_v5e
def test_splash_attention_on_v5e_takes_no_memory_for_scores():
    report = plan('v5e:2x4', '--fsdp=8', '--block_size=8192', '--batch_size=8')
    scores = 4 * 8 * 8192**2  # bytes of [H, T, T] in float32
    assert report['temporary_gb'] * 1e9 < scores / 8


@on_v5e
def test_decoding_on_v5e_does_not_copy_the_kv_cache():
    report = plan('v5e:2x4', '--plan=decode', '--tensor=4', '--n_layer=2', '--n_embd=1024', '--position=rope',
                  '--batch_size=8', '--block_size=2048', '--prompt_len=1024', '--max_new_tokens=1024')
    assert report['temporary_gb'] < report['cache_gb'] / 2
