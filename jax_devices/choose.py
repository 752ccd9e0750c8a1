"""Chooses the implementations of attention and of experts for a device. A choice depends on the
flags, the device, the model and the sizes. Each choice comes with its reason, a text."""
import dataclasses

import jax
import jax.numpy as jnp

from jax_devices.setup import nvidia_capability
from jax_flags import UserError, check_choice
from jax_ops.attention import ATTENTION, Scores, span_limits

# The least block_size that takes chunked attention: on a CPU because it is then faster
# (docs/lab_log.md), on GPUs and TPUs without flash attention because the scores would take
# most of the memory (docs/parallelism.md#attention)
CHUNKED_FROM = {'cpu': 128, 'gpu': 2048, 'tpu': 2048}

# attention was measured on accelerators with these in their names (docs/performance.md#on-a-gpu)
MEASURED = ('H100',)


def choose_attention(attention, config, device, *, tensor=1, context=1, deterministic=False,
                     packed=False):
    """Chooses the implementation of attention for training on `device`. Returns (one of ATTENTION;
    a text that gives the reason).

    attention: the flag --attention. tensor: the number of devices that share the heads. context:
    the number of devices that share a sequence.

    'auto' is the device's flash attention (cuDNN or splash), if that can compute this model.
    Otherwise 'auto' is chunked attention if context > 1 or block_size is at least CHUNKED_FROM,
    else plain XLA.
    deterministic: whether a step has to give the same bits each time. If so, on a GPU the flag
    'cudnn' is impossible, because cuDNN's attention is not deterministic. All other flags then give
    'xla' on a GPU, even 'chunked', and even for a long block_size.
    packed: whether a row has several conversations (see GPT.loss).
    Raises UserError for an unknown or impossible attention."""
    check_choice('attention', attention, ('auto', *ATTENTION))
    if deterministic and device.platform == 'gpu':
        if attention == 'cudnn':
            raise UserError('attention=cudnn is not deterministic; use --attention=auto, or '
                            '--deterministic=False')
        return 'xla', 'deterministic'
    if attention in ('xla', 'chunked'):
        return attention, '--attention says so'

    # flash attention, if it is asked for or the device has one
    is_auto = attention == 'auto'
    flash = attention
    if is_auto:
        flash = {'gpu': 'cudnn', 'tpu': 'splash'}.get(device.platform)
    why_not = ''
    if flash:
        refuses = {'cudnn': why_not_cudnn, 'splash': why_not_splash}[flash]
        refusal = refuses(config, device, tensor=tensor, context=context)
        if packed and (flash == 'cudnn' or 'chunk' in config.layer_types):
            refusal = 'it does not keep the conversations of a row apart'
        if not refusal and is_auto:
            is_measured = any(name in device.device_kind for name in MEASURED)
            return flash, 'flash attention' + ('' if is_measured else ', not measured on this card')
        if not refusal:
            return flash, '--attention says so'
        if not is_auto:
            raise UserError(f'attention={attention} does not work here: {refusal}; use '
                            '--attention=auto')
        why_not = f'; not {flash}: {refusal}'

    # else by the size of the scores
    least = CHUNKED_FROM.get(device.platform, 128)
    if config.block_size < least and context == 1:
        return 'xla', f'a block below {least} has small scores{why_not}'
    if device.platform == 'cpu':
        return 'chunked', "keeps the probabilities in the CPU's cache"
    return 'chunked', f'never stores the scores{why_not}'


def why_not_flash(config):
    """Returns why neither cuDNN nor splash attention can train this model, or None."""
    if config.mla:
        return 'latent attention has keys and values of different widths'
    if config.dropout:
        return 'it has no dropout'
    return None


def why_not_cudnn(config, device, *, tensor=1, context=1):
    """Returns why cuDNN's attention cannot train this model on this device, a text; None if it can.
    The last check compiles the attention. tensor, context: as in choose_attention."""
    if context > 1:
        return 'it does not shard a sequence'

    # the device; for a plan it is not present, and its version names NVIDIA
    capability = nvidia_capability(device)
    version = ''
    if device.platform == 'gpu':
        version = device.client.platform_version
    if 'cuda' not in version and 'NVIDIA' not in version:
        return 'it is for NVIDIA GPUs'
    if capability < 8:
        return f'it needs compute capability 8.0, this is {capability}'

    # the model
    width = config.head_width
    widest = 256 if capability >= 9 else 128
    if config.dtype not in ('bfloat16', 'float16'):
        return f'it computes in 16 bits, not in {config.dtype}'
    if width % 8 or width > widest:
        return f'heads of {width} are not a multiple of 8 or too wide'
    if config.sinks or config.attention_cap:
        return 'it has neither sinks nor a cap of scores'
    has_chunks = 'chunk' in config.layer_types and config.chunk < config.block_size
    if has_chunks and config.block_size % config.chunk:
        return f'chunks of {config.chunk} do not divide block_size={config.block_size}'
    reason = why_not_flash(config)
    if reason:
        return reason

    # whatever else cuDNN refuses, it says when it is compiled
    try:
        for layer_type in sorted(set(config.layer_types)):
            compile_cudnn(config, device, layer_type, tensor)
    except Exception as error:  # types and messages vary
        return f'{type(error).__name__}: {" ".join(str(error).split())[:150]}'
    return None


def compile_cudnn(config, device, layer_type='full', tensor=1):
    """Compiles the attention of a layer and the gradient of this attention, for one sequence and
    the heads of one device (`tensor` devices share the layer's heads). Raises an exception of XLA
    if cuDNN refuses."""
    from jax_ops.fused_attention import Qkv, fused_causal_attention  # imported when compiled
    here = jax.sharding.SingleDeviceSharding(device)

    def heads(n_heads):
        shape = 1, config.block_size, n_heads // tensor, config.head_width
        return jax.ShapeDtypeStruct(shape, config.dtype, sharding=here)

    q, k = heads(config.n_head), heads(config.kv_heads)

    scores = Scores(config.attention_scale, **span_limits(config, layer_type))

    def total(q, k, v):
        y = fused_causal_attention('cudnn', Qkv(q, k, v), scores)
        return y.astype(jnp.float32).sum()

    jax.jit(jax.grad(total, (0, 1, 2))).lower(q, k, k).compile()


def why_not_splash(config, device, *, tensor=1, context=1):
    """Returns why TPUs' splash attention cannot train this model on this device, a text; None if it
    can. context: as in choose_attention. tensor: not used."""
    if device.platform != 'tpu':
        return 'it is for TPUs'
    if config.head_width not in (64, 128):
        return f'heads are {config.head_width} wide, not 64 or 128'
    if config.block_size % (128 * context):
        return f'{128 * context} does not divide block_size={config.block_size}'
    return why_not_flash(config)


def choose_experts(device):
    """Returns (one of EXPERT_WAYS; reason) for the mixtures of experts of a model on `device`."""
    if device.platform == 'cpu':
        return 'loop', "a block of rows stays in the CPU's cache"
    return 'batched', 'no loop over experts'


def with_experts(config, layout):
    """Returns (the config with its field `experts` set to the choice of choose_experts;
    {'experts': the reason}). layout: a Layout; its first device decides. For a model without
    experts, returns (the config unchanged; {})."""
    if not config.moe:
        return config, {}
    experts, reason = choose_experts(layout.devices[0])
    return dataclasses.replace(config, experts=experts), {'experts': reason}


def config_for_decoding(config, layout, dtype):
    """Returns the config for decoding on a Layout: with `dtype`, and with the way of computing
    experts that suits the devices. Raises UserError for a model that the devices cannot split."""
    layout.validate(config)
    config = dataclasses.replace(config, dtype=dtype)
    return with_experts(config, layout)[0]
