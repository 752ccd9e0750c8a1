"""The model of a run: a config from flags, flags from the config of a trained model, and the
changes that a run may make."""
import dataclasses

from jax_flags import UserError
from jax_transformer import GPTConfig

# the flags of the architecture. A resume may not change them, except block_size if positions are
# not learned.
MODEL_FLAGS = {
    'n_layer', 'n_head', 'n_embd', 'block_size', 'bias', 'norm', 'position', 'n_kv_head', 'qk_norm',
    'layer_types', 'window', 'mlp', 'n_inner', 'tied_head', 'n_expert', 'n_expert_used'}


@dataclasses.dataclass(frozen=True)
class Model:
    """The model that a run starts from. new_model, continued_model and pretrained_model return
    it."""
    config: GPTConfig
    tokenizer: dict  # its description
    lora: dict | None = None  # {'base', 'rank', 'alpha', 'quantize', 'checksum'}
    # where a new run's weights come from: the folder of a pretrained model, or of another run's
    # checkpoint
    source: str | None = None


def with_block_size(config, block_size, source):
    """Returns `config`, the config of a trained model, changed for sequences of `block_size`
    tokens. source: the name of the model, for messages.

    With learned positions, config.block_size becomes `block_size`, because the table of positions
    is truncated. Raises UserError if the table is shorter than `block_size`. With RoPE,
    config.block_size is raised to `block_size` if it is smaller, and a line says so; if it is
    larger, the config is returned unchanged. Raises UserError if it is smaller and RoPE is scaled
    by LongRoPE, because only its factors for short texts are known."""
    if config.position == 'learned':
        if block_size > config.block_size:
            raise UserError(f'block_size={block_size}, but {source} knows only {config.block_size} '
                            'positions, which it has learned: it cannot read longer sequences')
        return dataclasses.replace(config, block_size=block_size)
    if block_size <= config.block_size:
        return config
    if config.rope_scaling and config.rope_scaling.kind == 'longrope':
        raise UserError(f'block_size={block_size}, but {source} was trained with sequences of '
                        f'{config.block_size} tokens, and LongRoPE has other factors for longer '
                        'ones, which are not supported')
    scaling = 'no scaling'
    if config.rope_scaling:
        scaling = f"its scaling '{config.rope_scaling.kind}'"
    print(f'{source} was trained with sequences of {config.block_size} tokens and learns to read '
          f'{block_size}: RoPE keeps theta={config.rope_theta:g} and {scaling}')
    return dataclasses.replace(config, block_size=block_size)


def config_from_flags(flags, **more):
    """Makes a GPTConfig from the flags of the model. The flag n_inner is the width of the MLP, or
    of each expert in a model with experts. more: values of fields without a flag. Raises UserError
    for flags that do not go together."""
    names = (MODEL_FLAGS | {'dropout'}) - {'n_expert', 'n_expert_used'}
    fields = {name: flags[name] for name in names}
    layer_types = flags['layer_types'].split(',')
    fields['layer_types'] = tuple(layer_type.strip() for layer_type in layer_types)
    if flags['n_expert']:
        fields['moe'] = {
            'n_expert': flags['n_expert'],
            'n_used': flags['n_expert_used'],
            'width': flags['n_inner'] or 4 * flags['n_embd'],
            'balance': flags['expert_balance']}
    config = GPTConfig(**fields, **more)
    if config.window and 'window' not in config.layer_types:
        raise UserError(f'window={config.window} needs window layers, as in '
                        '--layer_types=window,full')
    return config


def flags_from_config(config, given=None):
    """Returns the flags that describe the model of a config. Leaves out fields without a flag.
    Raises UserError if a model flag in `given`, the user's flags, has another value; block_size may
    have another value."""
    names = MODEL_FLAGS - {'n_expert', 'n_expert_used'}
    flags = {name: getattr(config, name) for name in names}
    flags['layer_types'] = ','.join(config.layer_types)
    flags['n_expert'] = config.moe.n_expert if config.moe else 0
    flags['n_expert_used'] = config.moe.n_used if config.moe else 2
    if config.moe:
        flags['expert_balance'] = config.moe.balance
    for name in sorted((MODEL_FLAGS - {'block_size'}) & (given or {}).keys()):
        if given[name] != flags[name]:
            raise UserError(f'this model has {name}={flags[name]}, not {name}={given[name]}: leave '
                            'the flag out')
    return flags


def for_this_run(config, flags, given, dtype):
    """Returns the config of a trained model with this run's dropout and dtype. If the flag
    expert_balance is given, a model with experts gets this run's expert_balance, too."""
    moe = config.moe
    if moe and 'expert_balance' in given:
        moe = dataclasses.replace(moe, balance=flags['expert_balance'])
    return dataclasses.replace(config, dropout=flags['dropout'], dtype=dtype, moe=moe)
