"""RoPE in a config.json: which of its keys count, and what they mean as fields of GPTConfig.

Reference: transformers 5, modeling_rope_utils.py and the config class of each family. The keys are
`rope_parameters` (transformers 5), `rope_scaling`, `rope_theta`, `partial_rotary_factor` and
`original_max_position_embeddings`. Where several are there, they count as they do in transformers,
which tests/golden/make_ropes.py asks about the combinations. What transformers refuses, and what
GPT does not compute, is a UserError."""

import math

from jax_files.config_json import JsonConfig, OrNull, shown
from jax_flags import UserError

LENGTH = 'original_max_position_embeddings'  # the context length of pretraining
WITH_LENGTH = ('llama3', 'yarn', 'longrope')  # kinds that depend on it

# -----------------------------------------------------------------------------
# which keys count


def read_rope(hf, theta, head_width, default=None):
    """Returns the fields of GPTConfig for a model whose layers all have the same RoPE.

    hf: JsonConfig. theta: the family's default of rope_theta. head_width: channels that RoPE
    rotates.
    default: the family's rope_parameters where the config has none."""
    rope = shared_parameters(hf, theta, default)
    refuse_partial_rotation(hf, rope)
    if rope['rope_type'] in WITH_LENGTH:
        rope.setdefault(LENGTH, hf.get('max_position_embeddings'))
        if LENGTH in hf.values and rope[LENGTH] is not None:  # the one beside the parameters wins
            rope[LENGTH] = hf.values[LENGTH]
    return rope_fields(hf, rope, head_width)


def read_phi3_rope(hf, theta, head_width):
    """Returns the fields of GPTConfig for a Phi 3, which may rotate a part of each head and has
    names for longrope.

    Parameters as those of read_rope."""
    rope = shared_parameters(hf, theta)
    rope.setdefault('partial_rotary_factor', hf.values.get('partial_rotary_factor', 1.0))
    length = hf.get(LENGTH, 4096)
    kind = rope['rope_type']
    if kind not in ('default', 'longrope', 'yarn', 'su'):
        refuse_kind(hf, kind, ('default', 'longrope'))
    if kind == 'su' and LENGTH not in rope:  # where transformers looks for it first
        raise UserError(
            f"{hf.source}: rope_type 'su' needs {LENGTH} beside it; 'longrope' does not"
        )
    if kind != 'default':
        rope['rope_type'] = 'longrope'
        rope[LENGTH] = length  # the family's default wins over the one among the parameters
    part = JsonConfig(rope, hf.source, what='RoPE').get('partial_rotary_factor', kind=float)
    rotated = int(head_width * part) if part <= 1 else 0
    if rotated < 2 or rotated % 2:
        raise UserError(
            f'{hf.source}: partial_rotary_factor={part} of {head_width} channels should be an even '
            f'number of 2 to {head_width} channels'
        )
    fields = rope_fields(hf, rope, rotated)
    fields['rope_width'] = rotated if rotated < head_width else 0
    return fields


def read_ropes_by_layer_type(hf, theta, window_theta, head_width):
    """Returns the fields of GPTConfig for a model whose layers with a window have another RoPE than
    the others.

    hf, head_width: as those of read_rope. theta, window_theta: what rope_theta of these layers is
    if it is not among their parameters."""
    given = hf.values.get('rope_parameters')
    if given is None:
        given = {
            'full_attention': {'rope_type': 'default'},
            'sliding_attention': {'rope_type': 'default'},
        }
    ropes = copy_of_object(hf, 'rope_parameters', given)
    scaling = hf.values.get('rope_scaling')
    if scaling is not None:  # it changes the parameters of the layers without a window
        full = copy_of_object(hf, 'full_attention of rope_parameters', ropes.get('full_attention'))
        full.update(copy_of_object(hf, 'rope_scaling', scaling))
        ropes['full_attention'] = full
    for name, default_theta in (('full_attention', theta), ('sliding_attention', window_theta)):
        rope = ropes.get(name)
        rope = copy_of_object(hf, name, {'rope_type': 'default'} if rope is None else rope)
        rope.setdefault('rope_theta', default_theta)
        add_kind(rope)
        refuse_partial_rotation(hf, rope)
        ropes[name] = rope
    full, sliding = ropes['full_attention'], ropes['sliding_attention']
    if sliding['rope_type'] != 'default':
        found = shown(sliding['rope_type'])
        raise UserError(
            f'{hf.source}: rope_type={found} of sliding_attention is not supported, only "default"'
        )
    full.setdefault(LENGTH, hf.values.get('max_position_embeddings'))
    # transformers looks for it beside the layer types, not among their parameters
    full['truncate'] = ropes.get('truncate', True)
    fields = rope_fields(hf, full, head_width)
    fields['window_rope_theta'] = rope_fields(hf, sliding, head_width)['rope_theta']
    return fields


def shared_parameters(hf, theta, default=None):
    """Returns the one object of RoPE's parameters that counts, with its rope_theta and rope_type.

    Parameters as those of read_rope."""
    given = hf.values.get('rope_parameters')
    if given is None:
        given = default
    name = 'rope_parameters'
    if hf.values.get('rope_scaling'):  # it replaces rope_parameters, rope_theta among them
        name = 'rope_scaling'
        given = hf.values['rope_scaling']
    rope = copy_of_object(hf, name, given or {})
    nested = [key for key, value in rope.items() if isinstance(value, dict)]
    if nested:
        raise UserError(
            f'{hf.source}: {name} of each layer type ({", ".join(map(shown, nested))}) is not '
            f'supported for this family'
        )
    rope.setdefault('rope_theta', hf.values.get('rope_theta', theta))
    add_kind(rope)
    return rope


def copy_of_object(hf, name, values):
    """Returns a copy of the object that a config.json has under this name. Raises UserError if it
    is none."""
    if not isinstance(values, dict):
        raise UserError(f'{hf.source}: {name} should be an object, not {shown(values)}')
    return dict(values)


def add_kind(rope):
    """Adds the key rope_type, which older files call type."""
    rope.setdefault('rope_type', rope.get('type', 'default'))


def refuse_partial_rotation(hf, rope):
    """Raises UserError for a partial_rotary_factor beside or among the parameters: these families
    rotate all."""
    beside = hf.values.get('partial_rotary_factor')
    part = rope.get('partial_rotary_factor', 1.0 if beside is None else beside)
    if part != 1.0:
        found = shown(part)
        raise UserError(
            f'{hf.source}: partial_rotary_factor={found} is not supported for this family, only 1.0'
        )


def refuse_kind(hf, kind, supported):
    """Raises the UserError for a rope_type that is not computed."""
    raise UserError(
        f'{hf.source}: rope scaling {shown(kind)} is not supported; '
        f'supported: {", ".join(supported)}'
    )


# -----------------------------------------------------------------------------
# what they mean


def rope_fields(hf, rope, width):
    """Returns the fields rope_theta and rope_scaling of GPTConfig, and block_size where RoPE limits
    it.

    hf: JsonConfig of the model. rope: its parameters. width: channels that are rotated."""
    values = JsonConfig(rope, hf.source, what='a scaled RoPE')
    fields = {'rope_theta': values.get('rope_theta', kind=float)}
    kind = rope['rope_type']
    if kind == 'default':
        return fields
    if not isinstance(kind, str) or kind not in SCALINGS:
        refuse_kind(hf, kind, SCALINGS)
    fields['rope_scaling'] = SCALINGS[kind](hf, values, width)
    if kind == 'yarn' and fields['rope_theta'] == 1:
        raise UserError(f'{hf.source}: rope_theta=1 cannot be scaled by yarn')
    if kind == 'longrope':
        fields['block_size'] = min(hf.get('max_position_embeddings'), values.get(LENGTH))
    return fields


def linear(hf, values, width):
    """Returns RopeScaling's values: all pairs turn more slowly by a factor."""
    return {
        'kind': 'linear',
        'factor': values.get('factor', kind=float),
        'original_length': hf.get('max_position_embeddings'),
    }


def llama3(hf, values, width):
    """Returns RopeScaling's values for Llama 3.1."""
    return {
        'kind': 'llama3',
        'factor': values.get('factor', kind=float),
        'original_length': values.get(LENGTH),
        'low': values.get('low_freq_factor', kind=float),
        'high': values.get('high_freq_factor', kind=float),
    }


def yarn(hf, values, width):
    """Returns RopeScaling's values for YaRN. A factor of null is that of the context lengths."""
    original_length = values.get(LENGTH)
    factor = extension(hf, values, original_length, required=True)
    mscale = values.values.get('mscale')
    mscale_all_dim = values.values.get('mscale_all_dim')
    amplitude = values.get('attention_factor', OrNull(None), kind=float)
    if amplitude is None:
        amplitude = yarn_mscale(factor)
        if mscale and mscale_all_dim:
            amplitude = yarn_mscale(factor, values.get('mscale', kind=float))
            amplitude /= yarn_mscale(factor, values.get('mscale_all_dim', kind=float))
    truncate = values.get('truncate', OrNull(True))  # null is false
    # null and 0 mean the defaults
    low = values.get('beta_slow', kind=float) if values.values.get('beta_slow') else 1.0
    high = values.get('beta_fast', kind=float) if values.values.get('beta_fast') else 32.0
    return {
        'kind': 'yarn',
        'factor': factor,
        'original_length': original_length,
        'low': low,
        'high': high,
        'truncate': bool(truncate),
        'amplitude': amplitude,
    }


def longrope(hf, values, width):
    """Returns RopeScaling's values for LongRoPE up to the context length of pretraining: a factor
    for each pair.

    Beyond it transformers turns all positions by other factors, also the ones that it has computed
    already, which a KV cache cannot do: the context of the model ends there."""
    original_length = values.get(LENGTH)
    factors = values.get_list('short_factor', kind=float)
    long_factors = values.get_list('long_factor', kind=float)
    if (
        len(factors) != width // 2
        or len(long_factors) != width // 2
        or min(factors + long_factors) <= 0
    ):
        raise UserError(
            f'{hf.source}: short_factor and long_factor should list {width // 2} numbers above 0'
        )
    factor = extension(hf, values, original_length)
    amplitude = values.get('attention_factor', OrNull(None), kind=float)
    if amplitude is None:
        amplitude = 1.0
        if factor > 1:
            if original_length < 2:
                raise UserError(f'{hf.source}: {LENGTH} should be 2 or more, not {original_length}')
            amplitude = math.sqrt(1 + math.log(factor) / math.log(original_length))
    return {
        'kind': 'longrope',
        'factor': factor,
        'original_length': original_length,
        'pair_factors': factors,
        'amplitude': amplitude,
    }


SCALINGS = {'linear': linear, 'llama3': llama3, 'yarn': yarn, 'longrope': longrope}


def extension(hf, values, original_length, required=False):
    """Returns by which factor the context has been extended. required: the key has to be there, if
    only as null."""
    if required and 'factor' not in values.values:
        raise UserError(f'{hf.source} lacks factor, so it is not that of {values.what}')
    factor = values.get('factor', OrNull(None), kind=float)
    if factor is None:
        return hf.get('max_position_embeddings') / original_length
    return factor


def yarn_mscale(factor, mscale=1.0):
    """Returns YaRN's factor on queries and keys for a context that is extended `factor` times
    (arXiv:2309.00071)."""
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0
