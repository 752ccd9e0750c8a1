"""The one place where training's attention is chosen: by device, model and sizes, with its
reason."""
import jax
import jax.numpy as jnp

from jax_devices.setup import nvidia_capability
from jax_flags import UserError, check_choice
from jax_ops.attention import ATTENTION, fused_causal_attention

# Blocks of this size and longer take chunked attention: on a CPU because it is faster
# (docs/performance.md), on GPUs and TPUs without flash attention because the scores would take most
# of the memory (docs/parallelism.md#attention)
CHUNKED_FROM = {'cpu': 128, 'gpu': 2048, 'tpu': 2048}


def choose_attention(attention, config, device, *, tensor=1, context=1, deterministic=False, packed=False):
    """(implementation, reason) for the flag --attention and training on `device`, one of `tensor`
    that share the heads and `context` that share a sequence. deterministic: of a GPU, that of plain
    XLA alone. packed: see GPT.loss.

    'auto' is the device's flash attention (cuDNN or splash) where it computes this model, else
    chunked attention for blocks of CHUNKED_FROM tokens and longer, else plain XLA. Raises UserError
    for an unknown or impossible one."""
    check_choice('attention', attention, ('auto', *ATTENTION))
    if deterministic and device.platform == 'gpu':
        if attention == 'cudnn':
            raise UserError('attention=cudnn is not deterministic; use --attention=auto, or --deterministic=False')
        return 'xla', 'deterministic'
    if attention in ('xla', 'chunked'):
        return attention, 'as asked'
    flash = {'gpu': 'cudnn', 'tpu': 'splash'}.get(device.platform) if attention == 'auto' else attention
    why_not = ''
    if flash:
        refuses = {'cudnn': why_not_cudnn, 'splash': why_not_splash}[flash]
        refusal = refuses(config, device, tensor=tensor, context=context)
        if packed and (flash == 'cudnn' or 'chunk' in config.layer_types):
            refusal = 'it does not keep the conversations of a row apart'
        if not refusal:
            return flash, 'flash attention' if attention == 'auto' else 'as asked'
        if attention != 'auto':
            raise UserError(f'attention={attention} does not work here: {refusal}; use --attention=auto')
        why_not = f'; not {flash}: {refusal}'
    least = CHUNKED_FROM.get(device.platform, 128)
    if config.block_size < least and context == 1:
        return 'xla', f'a block below {least} has small scores{why_not}'
    if device.platform == 'cpu':
        return 'chunked', "keeps the probabilities in the CPU's cache"
    return 'chunked', f'never stores the scores{why_not}'


def why_not_flash(config):
    """Why neither cuDNN nor splash attention can train this model, or None."""
    if config.mla:
        return 'latent attention has keys and values of different widths'
    if config.dropout:
        return 'it has no dropout'
    return None


def why_not_cudnn(config, device, *, tensor=1, context=1):
    """Why cuDNN's attention cannot train this model on this device, or None if it can. The last
    check compiles it."""
    if context > 1:
        return 'it does not shard a sequence'
    width = config.head_width
    capability = nvidia_capability(device)
    version = device.platform == 'gpu' and device.client.platform_version
    # NVIDIA: compiled ahead of time
    if not version or not ('cuda' in version or 'NVIDIA' in version):
        return 'it is for NVIDIA GPUs'
    if capability < 8:
        return f'it needs compute capability 8.0, this is {capability}'
    if config.dtype not in ('bfloat16', 'float16'):
        return f'it computes in 16 bits, not in {config.dtype}'
    if width % 8 or width > (256 if capability >= 9 else 128):
        return f'heads of {width} are not a multiple of 8 or too wide'
    if config.sinks or config.attention_cap:
        return 'it has neither sinks nor a cap of scores'
    if 'chunk' in config.layer_types and config.chunk < config.block_size and config.block_size % config.chunk:
        return f'chunks of {config.chunk} do not divide block_size={config.block_size}'
    reason = why_not_flash(config)
    if reason:
        return reason
    try:
        for layer_type in sorted(set(config.layer_types)):
            compile_cudnn(config, device, layer_type, tensor)
    except Exception as error:  # of many types, with messages of many lines
        return f'{type(error).__name__}: {" ".join(str(error).split())[:150]}'
    return None


def compile_cudnn(config, device, layer_type='full', tensor=1):
    """Compiles a layer's attention and its gradient for a sequence and a device's heads. Raises if
    cuDNN refuses."""
    here = jax.sharding.SingleDeviceSharding(device)
    q, k = (jax.ShapeDtypeStruct((1, config.block_size, n // tensor, config.head_width), config.dtype, sharding=here)
            for n in (config.n_head, config.kv_heads))

    def total(q, k, v):
        y = fused_causal_attention('cudnn', q, k, v, scale=config.attention_scale, **config.span_limits(layer_type))
        return y.astype(jnp.float32).sum()

    jax.jit(jax.grad(total, (0, 1, 2))).lower(q, k, k).compile()


def why_not_splash(config, device, *, tensor=1, context=1):
    """Why TPUs' splash attention cannot train this model on this device, or None if it can."""
    if device.platform != 'tpu':
        return 'it is for TPUs'
    if config.head_width not in (64, 128):
        return f'heads are {config.head_width} wide, not 64 or 128'
    if config.block_size % (128 * context):
        return f'{128 * context} does not divide block_size={config.block_size}'
    return why_not_flash(config)
