"""Generations -> what they have cost: seconds, tokens per second, share of the memory bandwidth."""
import time

import numpy as np

from jax_cache import cache_bytes
from jax_devices.setup import measure_bandwidth, trim_malloc
from jax_generate import bytes_read_per_step, drafts_are_useless


def report_speed(model, generations, *, n_prompts, started, imports_s, cache_dtype):
    """Returns lines on the time of compilation, prefill and decoding, and on the bandwidth: a
    decode step reads all weights and the KV cache.

    started: time.perf_counter() when the script started. imports_s: seconds that its imports took.
    Empties model.params: the bandwidth is measured in their memory."""
    laps = [lap for generation in generations for lap in generation.laps]
    n_new = sum(int(np.sum(generation.result.lengths - generation.lengths)) for generation in generations)
    n_samples = sum(len(generation.prompts) for generation in generations)
    prefill_s = sum(generation.laps[0].running for generation in generations)
    report = (f'{n_samples:,} samples of {n_prompts:,} prompts, {n_new:,} tokens, in '
              f'{time.perf_counter() - started:.1f} s\n'
              f'first token: imports {imports_s:.2f} s, weights {model.loading.running:.2f} s, '
              f'compiling {model.loading.compiling + laps[0].compiling:.2f} s, running {laps[0].running:.2f} s\n'
              f'compiled in {sum(lap.compiling for lap in laps):.1f} s, prefill {prefill_s * 1000:.1f} ms')
    report += report_decoding(model, generations, n_new)
    longest = max(max(generation.lengths) for generation in generations)
    length = min(model.config.block_size, longest + generations[0].max_new_tokens)
    kv_bytes = cache_bytes(model.config, length, cache_dtype)
    return report + (f'\nKV cache: {kv_bytes:,} bytes for a sequence of {length:,} tokens, '
                     f'{kv_bytes / length:,.0f} per token')


def report_decoding(model, generations, n_new):
    """Returns the lines on decoding, '' if all ended with their first tokens. n_new: tokens
    generated in all."""
    results = [generation.result for generation in generations]
    decode_s = sum(lap.running for generation in generations for lap in generation.laps[1:])
    if not decode_s:
        return ''
    batch_size = len(generations[0].prompts)
    # without the tokens of the first laps
    tokens_per_sec = (n_new - batch_size * len(generations)) / decode_s
    weight_bytes = bytes_read_per_step(model.params)
    gb_read = sum(result.steps * (weight_bytes + result.cache_bytes) for result in results) / 1e9
    model.params.clear()
    trim_malloc()
    devices = model.parallel.devices
    # each device reads its own shard
    bandwidth = measure_bandwidth(devices[0], 2**27) * len(devices)
    report = (f', then {tokens_per_sec:,.0f} tok/s ({tokens_per_sec / batch_size:,.0f} per sequence) '
              f'for {n_new:,} tokens\n'
              f'weights {weight_bytes / 1e6:,.4g} MB, {gb_read / decode_s:.1f} GB/s, which is '
              f'{gb_read / decode_s / bandwidth:.0%} of the {bandwidth:.1f} GB/s that this machine reads')
    drafted = sum(result.drafted for result in results)
    accepted = sum(result.accepted for result in results)
    if drafted:
        report += f'\ndrafts: {accepted:,} of {drafted:,} tokens accepted, {accepted / drafted:.0%}'
        if any(drafts_are_useless(result.drafted, result.accepted, batch_size) for result in results):
            report += '; too few, so they were switched off'
    return report
