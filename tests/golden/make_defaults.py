"""Writes defaults.json beside it: what transformers makes of a config.json that has nothing but its
sizes, and of one in which a further key is null. Run by hand; needs torch and transformers:

    python tests/golden/make_defaults.py

{model_type: {'sizes': config.json, 'all': the same with every key, 'null': {key: what is different
in 'all' if that key is null, or null where transformers raises}}}."""

import json
import warnings
from pathlib import Path

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

HERE = Path(__file__).parent
SIZES = dict(
    vocab_size=44,
    hidden_size=256,
    num_hidden_layers=8,
    num_attention_heads=128,
    max_position_embeddings=64,
    intermediate_size=48,
)
MOE = dict(num_experts_per_tok=2, moe_intermediate_size=16)
FAMILIES = {
    'gpt2': dict(vocab_size=44, n_positions=64, n_embd=16, n_layer=2, n_head=2),
    'llama': SIZES,
    'mistral': SIZES,
    'qwen2': SIZES,
    'qwen3': SIZES,
    'qwen3_moe': dict(SIZES, **MOE, num_experts=4),
    'phi3': dict(SIZES, pad_token_id=0),
    'smollm3': dict(SIZES, pad_token_id=0),
    'olmo2': SIZES,
    'olmo3': SIZES,
    'gemma2': SIZES,
    'gemma3_text': SIZES,
    'gpt_oss': dict(SIZES, num_local_experts=4, num_experts_per_tok=2),
    'deepseek_v3': dict(
        SIZES, **MOE, n_routed_experts=16, kv_lora_rank=16, qk_nope_head_dim=8,
        qk_rope_head_dim=16, v_head_dim=8),
    'llama4_text': dict(
        SIZES, num_local_experts=4, num_experts_per_tok=1, intermediate_size_mlp=40),
}
# keys that say nothing about what is computed without dropout
OTHER = (
    'token_id', 'pdrop', 'dropout', 'summary', 'router_', 'initializer', 'use_cache', 'dtype',
    'transformers_version', 'output_', 'architectures', 'id2label', 'label2id', 'return_dict',
    'problem_type', 'chunk_size', 'is_encoder', 'pretraining_tp', 'num_mtp', 'num_nextn', 'jitter',
    'model_type', '_sliding_window_pattern', '_name_or_path')


def resolve(family, values):
    """All keys of a config.json, as transformers completes it."""
    config = CONFIG_MAPPING[family].from_dict(json.loads(json.dumps(values)))
    everything = json.loads(config.to_json_string(use_diff=False))
    return {
        key: value
        for key, value in everything.items()
        if not any(part in key for part in OTHER)
    }


def run(family, values):
    """Computes logits of a few tokens with few layers. Raises what transformers raises."""
    n_layer = 'n_layer' if family == 'gpt2' else 'num_hidden_layers'
    few = 4 if family == 'deepseek_v3' else 2  # the fourth has experts
    config = CONFIG_MAPPING[family].from_dict(dict(values, **{n_layer: few}))
    model = AutoModelForCausalLM.from_config(config, attn_implementation='eager').eval()
    with torch.no_grad():
        model(torch.arange(6)[None], use_cache=False)


def main():
    warnings.simplefilter('ignore')
    transformers.logging.set_verbosity(50)
    result = {}
    for family, sizes in FAMILIES.items():
        run(family, sizes)
        everything = resolve(family, sizes)
        differences = {}
        for key in everything.keys() - sizes.keys() | {'head_dim', 'rope_theta'}:
            values = dict(sizes, **{key: None})
            try:
                run(family, values)
                changed = resolve(family, values)
            except Exception:  # any of its own, of torch and of Python
                differences[key] = None
                continue
            differences[key] = {
                name: changed.get(name)
                for name in everything.keys() | changed.keys()
                if changed.get(name) != everything.get(name)
            }
        result[family] = {'sizes': sizes, 'all': everything, 'null': dict(sorted(differences.items()))}
        print(family, {key: 'raises' if d is None else d for key, d in differences.items()})
    (HERE / 'defaults.json').write_text(json.dumps(result, indent=1) + '\n')


if __name__ == '__main__':
    main()
