"""The values of a stranger's config.json, each checked where it is read: its type, its size,
whether it may be null."""

import json
import math
from typing import Any, NamedTuple

from jax_flags import MOST, MOST_FLOAT, UserError

# A key of config.json: the field of GPTConfig, or of its groups, whose largest value in MOST is
# also that of the key
FIELD_OF_KEY = {
    'n_positions': 'block_size',
    'max_position_embeddings': 'block_size',
    'original_max_position_embeddings': 'block_size',
    'sliding_window': 'window',
    'attention_chunk_size': 'chunk',
    'vocab_size': 'vocab_size',
    'n_layer': 'n_layer',
    'num_hidden_layers': 'n_layer',
    'n_head': 'n_head',
    'num_attention_heads': 'n_head',
    'num_key_value_heads': 'n_kv_head',
    'n_embd': 'n_embd',
    'hidden_size': 'n_embd',
    'head_dim': 'head_dim',
    'intermediate_size': 'n_inner',
    'intermediate_size_mlp': 'n_inner',
    'moe_intermediate_size': 'width',
    'num_experts': 'n_expert',
    'num_local_experts': 'n_expert',
    'n_routed_experts': 'n_expert',
    'n_shared_experts': 'n_expert',
    'num_experts_per_tok': 'n_used',
    'n_group': 'n_group',
    'topk_group': 'n_group_used',
    'q_lora_rank': 'q_rank',
    'kv_lora_rank': 'kv_rank',
    'qk_nope_head_dim': 'nope_dim',
    'qk_rope_head_dim': 'rope_dim',
    'v_head_dim': 'v_dim',
}
MAY_BE_ZERO = (
    'max_window_layers',
    'first_k_dense_replace',
    'n_shared_experts',
)  # the other whole numbers are sizes
MOST_LISTED = 100_000  # entries of a list

KIND_NAMES = {
    int: 'a whole number',
    float: 'a number like 1e-05',
    bool: 'true or false',
    list: 'a list',
    dict: 'an object',
    str: 'a text',
}
REQUIRED = object()


class OrNull(NamedTuple):
    """The default of a key that may also be null, which then means something of its own."""

    value: Any


class JsonConfig:
    """The values of a config.json. A missing, unsupported, oversized or wrongly typed one is a
    UserError that names it.

    values: {key: value}. source: where they come from, for error messages. defaults: {key: what a
    config without the key means}, an OrNull where the key may be null. what: of what it is the
    config, for error messages."""

    def __init__(self, values, source, defaults=None, what=''):
        self.values = values
        self.source = source
        self.defaults = defaults or {}
        self.what = what

    def get(self, key, default=REQUIRED, kind=int):
        """Returns the checked value of `key`, or None where it is null and may be.

        default: what a missing key means; if not given, that of self.defaults. Without one, a
        missing key is an error.
        kind: the type of the value where there is no default that has it; an int is a valid
        float."""
        # What a missing key means, and what type it has by that.
        if default is REQUIRED:
            default = self.defaults.get(key, REQUIRED)
        may_be_null = isinstance(default, OrNull)
        default = default.value if may_be_null else default
        if default not in (REQUIRED, None):
            kind = type(default)
        value = self.values.get(key, default)
        if value is None and may_be_null:
            return None
        if value is REQUIRED or value is None and default is REQUIRED:
            raise UserError(f'{self.source} lacks {key}, so it is not that of {self.what}')
        if kind is float and type(value) is int:
            value = as_float(value)
        if type(value) is not kind:
            raise UserError(
                f'{self.source}: {key} should be {KIND_NAMES[kind]}, not {shown(value)}'
            )
        self.check_size(key, value)
        return value

    def check_size(self, key, value):
        """Raises UserError for a number that is too large for its key, not positive, infinite or
        NaN."""
        # A whole number in the range of its field.
        if type(value) is int:
            least = 0 if key in MAY_BE_ZERO else 1
            most = MOST[FIELD_OF_KEY[key]] if key in FIELD_OF_KEY else 2**31 - 1
            if not least <= value <= most:
                raise UserError(
                    f'{self.source}: {key} should be {least} to {most}, not {shown(value)}'
                )

        # A number that is finite, and a list of a length that a model may have.
        least = 0.0 if key in MAY_BE_ZERO else 1e-300
        if type(value) is float and not least <= value < MOST_FLOAT:
            raise UserError(
                f'{self.source}: {key} should be above 0 and finite, not {shown(value)}'
            )
        if type(value) is list and len(value) > MOST_LISTED:
            raise UserError(
                f'{self.source}: {key} has {len(value)} entries, more than {MOST_LISTED}'
            )

    def get_list(self, key, default=REQUIRED, kind=int):
        """Returns the list at `key`, or None where it is null and may be. kind: the type of its
        entries; numbers are finite."""
        values = self.get(key, default, kind=list)
        if values is None:
            return None
        if kind is float:
            values = [as_float(value) if type(value) is int else value for value in values]
        for value in values:
            is_number = type(value) is not float or math.isfinite(value)
            if type(value) is not kind or not is_number or kind is int and abs(value) > MOST_LISTED:
                raise UserError(
                    f'{self.source}: {key} should list {KIND_NAMES[kind]} each, not {shown(value)}'
                )
        return values

    def require_value(self, **supported):
        """Raises UserError for a key that is there with another value than the one that is
        computed.

        Null is another value, unless the default of the key is an OrNull."""
        for key, value in supported.items():
            if key not in self.values:
                continue
            found = self.values[key]
            may_be_null = isinstance(self.defaults.get(key), OrNull)
            is_truth = isinstance(found, bool) == isinstance(value, bool)  # 1 is not true
            if found is None and may_be_null or found == value and is_truth:
                continue
            raise UserError(
                f'{self.source}: {key}={shown(found)} is not supported, only {json.dumps(value)}'
            )


def as_float(number):
    """Returns an int as a float; infinite if it has more digits than a float can have."""
    try:
        return float(number)
    except OverflowError:
        return math.inf


def shown(value):
    """Returns the start of a value of a JSON file, as it is written there, for an error message."""
    if (
        type(value) is int and value.bit_length() > 200
    ):  # Python refuses to print more than 4,300 digits
        return f'a number of {value.bit_length()} bits'
    if isinstance(value, (list, dict)) and len(value) > 20:
        return f'{KIND_NAMES[type(value)]} of {len(value)} entries'
    text = json.dumps(value, default=repr)
    return text if len(text) <= 80 else f'{text[:80]}...'
