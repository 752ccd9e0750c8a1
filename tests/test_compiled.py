"""What XLA's compilers for H100 GPUs and v5e TPUs make of a step: the memory that docs/parallelism.md claims, on
smaller models. Nothing runs, and no device is needed; where a compiler is not installed its tests are skipped."""
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


@functools.cache
def plan(topology, *flags):
    """What bench_jax.py --mode=compile reports; the flags override MODEL."""
    command = [sys.executable, ROOT / 'bench_jax.py', '--mode=compile', f'--topology={topology}', *MODEL, *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900, env=os.environ | {'XLA_FLAGS': ''})
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])['results']


@on_h100
def test_zero_1_stores_an_eighth_of_the_optimizer_state_on_h100s():
    flags = ['h100:1x8', '--batch_size=2', '--gradient_accumulation_steps=32']
    replicas, zero_1 = plan(*flags), plan(*flags, '--zero=1')
    assert replicas['fits'] and replicas['memory_gb'] == 84.9
    assert zero_1['optimizer_gb'] == pytest.approx(replicas['optimizer_gb'] / 8, rel=0.02)
    assert zero_1['peak_gb'] < replicas['peak_gb']


@on_h100
@pytest.mark.parametrize('flags', [[], ['--tensor=2', '--fsdp=4']], ids=['one', 'mesh'])
def test_h100s_store_the_gradient_of_the_logits_in_bfloat16_only(flags):
    n_devices = 8 if flags else 1
    report = plan(f'h100:1x{n_devices}', '--vocab_size=32768', f'--batch_size={8 * n_devices}', *flags)
    logits = 4 * 8 * T * 32768
    assert logits < 1e9 * report['temporary_gb'] < 2 * logits  # float32 logits and their gradient, half as large


@on_h100
def test_h100s_decode_few_rows_without_the_weights_of_all_experts():
    report = plan('h100:1x1', '--n_expert=8', '--n_inner=256', '--mlp=swiglu', '--plan=decode', '--batch_size=1',
                  '--max_new_tokens=16')
    weights_of_an_expert = 2 * 3 * D * 256
    assert report['temporary_gb'] * 1e9 < 8 * weights_of_an_expert


@on_h100
def test_attention_without_scores_takes_a_fraction_of_the_temporary_memory_on_h100s():
    flags = ['--fsdp=8', '--n_kv_head=2', '--position=rope', '--block_size=4096', '--batch_size=8']
    temporary = {name: plan('h100:1x8', *flags, f'--attention={name}')['temporary_gb']
                 for name in ('xla', 'cudnn', 'chunked')}
    assert temporary['cudnn'] < temporary['xla'] / 5
    assert temporary['chunked'] < temporary['xla'] / 2


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


@on_v5e
def test_a_step_that_does_not_fit_says_so():
    report = plan('v5e:2x4', '--n_layer=48', '--n_embd=4096', '--n_head=32', '--batch_size=8', '--scan_layers=True')
    assert report['fits'] is False
