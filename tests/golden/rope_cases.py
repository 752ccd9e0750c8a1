"""The configs of make_ropes.py and of the test that reads its numbers: one small base per family,
and combinations of the keys that say something about RoPE. ABSENT is a key that is not there."""

import itertools

ABSENT = '(absent)'
SIZES = dict(
    vocab_size=44,
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=256,
    num_key_value_heads=4,
    intermediate_size=48,
)
MOE = dict(num_experts_per_tok=2, moe_intermediate_size=16)
BASES = {  # by model_type
    'llama': {},
    'mistral': {},
    'qwen2': {},
    'qwen3': {'head_dim': 16},
    'qwen3_moe': dict(MOE, num_experts=4),
    'phi3': {},
    'smollm3': {},
    'olmo2': {},
    'olmo3': {},
    'gemma2': {'head_dim': 16},
    'gemma3_text': {'head_dim': 16, 'sliding_window_pattern': 2},
    'gpt_oss': dict(num_local_experts=4, num_experts_per_tok=2, head_dim=16),
    'deepseek_v3': dict(
        MOE,
        n_routed_experts=16,  # two for each of the 8 groups that are the default
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=16,
        v_head_dim=8,
    ),
    'llama4_text': dict(
        num_local_experts=4, num_experts_per_tok=1, head_dim=16, intermediate_size_mlp=40
    ),
}

FACTORS = [1.0 + i / 4 for i in range(8)]  # of longrope, for a head of 16
KINDS = {  # parameters without the name of the kind
    'linear': {'factor': 4.0},
    'dynamic': {'factor': 4.0},
    'llama3': {'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0},
    'yarn': {'factor': 4.0},
    'longrope': {'short_factor': FACTORS, 'long_factor': [3 * x for x in FACTORS]},
}
LENGTH = 'original_max_position_embeddings'


def scaled(name, kind, **more):
    """The parameters of a kind, which is called by the key `name`."""
    return dict(KINDS.get(kind, {}), **{name: kind}, **more)


def several():
    """Yields what may stand for rope_parameters or rope_scaling in a family of one RoPE."""
    yield from (
        ABSENT,
        None,
        {},
        {'rope_type': 'default'},
        {'rope_theta': 3e5},
        {'rope_type': 'default', 'rope_theta': 3e5},
        {'rope_type': 'default', 'rope_theta': None},
        {'type': None},
        {'rope_type': None},
    )
    for kind in KINDS:
        yield scaled('rope_type', kind)
        yield scaled('type', kind, rope_theta=2e5)
        yield dict(scaled('type', kind), rope_type='default')
        yield dict(scaled('rope_type', kind, **{LENGTH: 64}), type='default')


def details():
    """Yields parameters of scaled kinds with more, fewer or other values of their own keys."""
    yarn, llama3 = scaled('rope_type', 'yarn'), scaled('rope_type', 'llama3')
    for original in (32, 64, 256):
        for kind in ('yarn', 'llama3', 'longrope'):
            yield scaled('rope_type', kind, **{LENGTH: original})
    yarn[LENGTH] = 64
    for more in (
        {'truncate': False},
        {'truncate': None},
        {'beta_fast': 8, 'beta_slow': 2},
        {'beta_fast': None},
        {'beta_slow': 0},
        {'beta_fast': 1.0, 'beta_slow': 4.0},
        {'attention_factor': 1.5},
        {'attention_factor': None},
        {'mscale': 0.7},
        {'mscale': 0.7, 'mscale_all_dim': 1.0},
        {'mscale': 1, 'mscale_all_dim': 0},
        {'mscale_all_dim': 1.0},
        {'factor': None},
        {'factor': 4},
        {'factor': 1.0},
        {LENGTH: None},
        {'rope_theta': 1e6},
    ):
        yield dict(yarn, **more)
    for key in ('factor', LENGTH):
        yield {name: value for name, value in yarn.items() if name != key}
    llama3[LENGTH] = 64
    for more in (
        {'high_freq_factor': 1.0},
        {'high_freq_factor': 0.5},
        {'factor': 2},
        {'factor': None},
        {'low_freq_factor': None},
    ):
        yield dict(llama3, **more)
    for key in ('factor', 'low_freq_factor', 'high_freq_factor', LENGTH):
        yield {name: value for name, value in llama3.items() if name != key}
    yield from (
        {'rope_type': 'linear'},
        {'rope_type': 'linear', 'factor': None},
        {'rope_type': 'linear', 'factor': 2},
    )
    longrope = scaled('rope_type', 'longrope', **{LENGTH: 64})
    for more in (
        {'factor': 4.0},
        {'attention_factor': 1.25},
        {'factor': 0.5},
        {'short_factor': [1.0]},
        {'type': 'su'},
        {'rope_type': 'su'},
    ):
        yield dict(longrope, **more)
    for key in ('short_factor', 'long_factor', LENGTH):
        yield {name: value for name, value in longrope.items() if name != key}
    yield {'rope_type': 'su', **KINDS['longrope']}
    yield {'rope_type': 'unknown', 'factor': 2.0}


def by_layer_type():
    """Yields rope_parameters of a family in which layers with a window have their own."""
    default = {'rope_type': 'default', 'rope_theta': 4e5}
    for full in (
        ABSENT,
        None,
        {},
        default,
        {'rope_type': 'default'},
        scaled('rope_type', 'linear'),
        scaled('type', 'linear'),
        scaled('rope_type', 'yarn', truncate=False),
        scaled('rope_type', 'yarn', **{LENGTH: 64}),
        scaled('rope_type', 'llama3', **{LENGTH: 64}),
        scaled('rope_type', 'dynamic'),
    ):
        for sliding in (ABSENT, None, default, {'rope_theta': 2e4}, scaled('rope_type', 'linear')):
            both = {'full_attention': full, 'sliding_attention': sliding}
            yield {name: rope for name, rope in both.items() if rope != ABSENT}
    yield {
        'full_attention': scaled('rope_type', 'yarn'),
        'sliding_attention': default,
        'truncate': False,
    }
    yield from (
        ABSENT,
        None,
        {},
        {'rope_type': 'default', 'rope_theta': 3e5},
        scaled('rope_type', 'linear'),
    )


def cases(family):
    """Yields {key: value} of the keys about RoPE, for a config of this model_type."""
    thetas = (ABSENT, None, 700000)
    if family in ('olmo3', 'gemma3_text'):
        scalings = (
            ABSENT,
            None,
            {},
            scaled('rope_type', 'linear'),
            scaled('type', 'linear'),
            scaled('type', 'yarn'),
            scaled('rope_type', 'yarn', **{LENGTH: 64}),
            {'rope_theta': 6e5},
            'linear',
        )
        keys = ('rope_theta', 'rope_parameters', 'rope_scaling', 'rope_local_base_freq')
        local = (ABSENT, 3e4) if family == 'gemma3_text' else (ABSENT,)
        yield from (
            dict(zip(keys, values))
            for values in itertools.product(thetas, by_layer_type(), scalings, local)
        )
    else:
        keys = ('rope_theta', 'rope_parameters', 'rope_scaling')
        few = (
            ABSENT,
            None,
            {'rope_type': 'default', 'rope_theta': 3e5},
            scaled('rope_type', 'linear'),
            scaled('type', 'yarn', rope_theta=2e5),
        )
        pairs = [*itertools.product(few, several()), *itertools.product(several(), few)]
        yield from (
            {keys[0]: theta, keys[1]: parameters, keys[2]: scaling}
            for theta in thetas
            for parameters, scaling in pairs
        )
    keys = ('rope_scaling', LENGTH, 'partial_rotary_factor')
    beside = [(original, ABSENT) for original in (ABSENT, None, 32, 128)]
    beside += [(ABSENT, part) for part in (None, 1.0, 0.5)]
    yield from (
        dict(zip(keys, (rope, *more)), rope_theta=5e5) for rope in details() for more in beside
    )
    # partial rotation among the parameters; its longrope has fewer pairs
    for part in (1.0, 0.5, 0.75, 0.3, None):
        for kind in ('default', *KINDS):
            rope = scaled('rope_type', kind, partial_rotary_factor=part)
            for key in ('rope_scaling', 'rope_parameters'):
                yield {key: rope}
        for n in (4, 6):
            rope = scaled('rope_type', 'longrope', partial_rotary_factor=part)
            rope['short_factor'], rope['long_factor'] = (
                rope['short_factor'][:n],
                rope['long_factor'][:n],
            )
            yield {'rope_parameters': rope, 'rope_theta': 1e4, LENGTH: 64}
            whole = {key: value for key, value in rope.items() if key != 'partial_rotary_factor'}
            yield {'rope_scaling': whole, 'partial_rotary_factor': part, LENGTH: 64}


def config_of(family, case):
    """The config.json of a case."""
    config = dict(SIZES, **BASES[family], **case, model_type=family)
    return {
        key: value for key, value in config.items() if not isinstance(value, str) or value != ABSENT
    }
