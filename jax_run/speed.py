"""Reports what generations have cost: seconds, tokens per second, share of the memory bandwidth."""
import time

import jax
import numpy as np

from jax_devices.setup import measure_bandwidth
from jax_generate import drafts_are_useless, power_of_two
from jax_ops.attention import LEAST_SLOTS
from jax_transformer import cache_bytes, without_tables


def report_speed(model, generations, *, n_prompts, started, imports_s, cache_dtype, is_detailed):
    """Returns lines, as a text, on the time of compilation, prefill and decoding. The lines compare
    decoding with the memory bandwidth, because a step reads all weights and the KV cache.

    model: the TextModel. generations: the Generations that it has made, a list. n_prompts: the
    number of prompts. started: time.perf_counter() when the script started. imports_s: the seconds
    that the script's imports took. cache_dtype: the dtype of the KV cache. is_detailed: whether to
    return all lines. If not, returns the first line, and the line on drafts if there were
    drafts."""
    # sums over all generations
    laps = []
    n_new, n_samples, prefill_s = 0, 0, 0
    for generation in generations:
        laps += generation.laps
        n_new += int(np.sum(generation.result.lengths - generation.lengths))
        n_samples += len(generation.prompts)
        prefill_s += generation.laps[0].running

    # the whole, up to the first token, and before the decode steps
    total_s = time.perf_counter() - started
    compiled_s = sum(lap.compiling for lap in laps)
    first_compiled_s = model.loading.compiling + laps[0].compiling
    decode_s = sum(lap.running for lap in laps)
    report = (f'{n_samples:,} samples of {n_prompts:,} prompts, {n_new:,} tokens, in '
              f'{total_s:.1f} s, {n_new / max(decode_s, 1e-9):,.0f} tok/s once compiled')
    # a row, its prompt included, that is longer than the context
    n_tokens = max(int(generation.result.lengths.max()) for generation in generations)
    if model.config.position == 'learned' and n_tokens > model.config.block_size:
        report += (f'; beyond the context of {model.config.block_size:,} tokens, each token computes '
                   'all of them again, because positions are learned')
    if not is_detailed:
        return report + describe_drafts(generations)
    report += (f'\nfirst token: imports {imports_s:.2f} s, weights {model.loading.running:.2f} s, '
              f'compiling {first_compiled_s:.2f} s, running {laps[0].running:.2f} s\n'
              f'compiled in {compiled_s:.1f} s, prefill {prefill_s * 1000:.1f} ms')

    # the decode steps
    report += report_decoding(model, generations, n_new, cache_dtype)

    # the KV cache of the longest sequence
    longest = max(max(generation.lengths) for generation in generations)
    length = min(model.config.block_size, longest + generations[0].sampling.max_new_tokens)
    kv_bytes = cache_bytes(model.config, length, cache_dtype)
    report += (f'\nKV cache: {kv_bytes:,} bytes for a sequence of {length:,} tokens, '
               f'{kv_bytes / length:,.0f} per token')
    return report


def report_decoding(model, generations, n_new, cache_dtype):
    """Returns the lines on decoding, as a text: tokens per second, bytes read per second, drafts.
    Returns '' if all generations ended with their first token. model, generations, cache_dtype: see
    report_speed. n_new: the number of tokens generated in all."""
    # the first lap of a generation is its prefill and first step, and does not count
    decode_s = sum(lap.running for generation in generations for lap in generation.laps[1:])
    if not decode_s:
        return ''

    # tokens, without those of the first laps
    batch_size = len(generations[0].prompts)
    n_first = sum(len(generation.prompts) for generation in generations)
    tokens_per_sec = (n_new - n_first) / decode_s

    # bytes read
    devices = model.layout.devices
    weight_bytes = bytes_read_per_step(model.params, model.config, batch_size)
    bytes_read = 0
    for generation in generations:
        result = generation.result
        step_bytes = bytes_read_per_step(model.params, model.config, tokens_per_step(result))
        step_bytes += cache_bytes_read(result, model.config, cache_dtype, devices[0])
        bytes_read += result.steps * step_bytes
    gb_per_s = bytes_read / 1e9 / decode_s

    # the bandwidth; each device reads its own shard. What decoding has read measures the bandwidth,
    # too: it is at least that
    bandwidth = max(measure_bandwidth(devices[0], 2**27) * len(devices), gb_per_s)

    what = 'weights'
    if model.config.moe:
        what = 'weights, with the experts that tokens choose on average,'
    report = (f', then {tokens_per_sec:,.0f} tok/s ({tokens_per_sec / batch_size:,.0f} per '
              f'sequence) for {n_new:,} tokens\n'
              f'{what} {weight_bytes / 1e6:,.4g} MB, {gb_per_s:.1f} GB/s, which is '
              f'{gb_per_s / bandwidth:.0%} of the {bandwidth:.1f} GB/s that this machine reads')
    return report + describe_drafts(generations)


def describe_drafts(generations):
    """Returns the line that says how many drafted tokens were accepted in a list of Generations.
    Returns '' if no tokens were drafted."""
    results = [generation.result for generation in generations]
    drafted = sum(result.drafted for result in results)
    accepted = sum(result.accepted for result in results)
    if not drafted:
        return ''
    were_useless = any(
        drafts_are_useless(result.drafted, result.accepted, len(result.lengths)) for result in results)
    useless = '; too few, so they were switched off' if were_useless else ''
    return f'\ndrafts: {accepted:,} of {drafted:,} tokens accepted, {accepted / drafted:.0%}{useless}'


def bytes_read_per_step(params, config, n_tokens):
    """Returns the number of bytes of parameters that a decode step reads. n_tokens: the number of
    tokens of the step, of all rows together. Embedding tables are not counted, because a step reads
    only single rows of them (without_tables says which tables these are). Experts count by their
    expected number (see expected_experts)."""
    share = 1.0
    if config.moe:
        share = expected_experts(config.moe, n_tokens) / config.moe.n_expert
    n_bytes = 0.0
    for path, leaf in jax.tree_util.tree_leaves_with_path(without_tables(params)):
        is_expert = any(str(getattr(key, 'key', '')).startswith('experts_') for key in path)
        n_bytes += leaf.nbytes * (share if is_expert else 1)
    return round(n_bytes)


def cache_bytes_read(result, config, cache_dtype, device):
    """Returns the number of bytes of the KV cache that the last step of a GenerationResult read. On
    a CPU, a step reads the slots that are in use, see attend_to_used_slots. On other devices, it
    reads all slots."""
    if device.platform != 'cpu':
        return result.cache_bytes
    n_slots = max(LEAST_SLOTS, power_of_two(result.lengths.max()))
    of_used = len(result.lengths) * cache_bytes(config, n_slots, cache_dtype)
    return min(of_used, result.cache_bytes)


def tokens_per_step(result):
    """Returns the average number of tokens that a decode step of a GenerationResult computed: one
    for each row, plus the drafted tokens."""
    return len(result.lengths) + result.drafted / max(1, result.steps)


def expected_experts(moe, n_tokens):
    """Returns the expected number of distinct experts that n_tokens tokens choose, if each token
    takes n_used different experts, and all experts are equally likely. moe: GPTConfig.moe. A
    trained router prefers some experts, so the actual number is lower."""
    unused = (1 - moe.n_used / moe.n_expert) ** n_tokens
    return moe.n_expert * (1 - unused)
