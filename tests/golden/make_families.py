"""Writes the folders in families/ beside it: small random models of every family in the formats in which they are
published, with the logits, the greedy continuation and one gradient that transformers computes from them. Run by hand;
needs torch and transformers:

    python tests/golden/make_families.py

Every feature is active: sequences longer than windows and chunks, positions beyond the original length of a scaled
rope, groups of experts of which some are left out, random gains, biases and sinks.
"""
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent / 'families'
T, PROMPT, NEW = 40, 29, 12  # beyond every window (5), chunk (8) and original length (16)
SIZES = dict(vocab_size=44, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64,
             bos_token_id=None, eos_token_id=None, pad_token_id=None, attn_implementation='eager')
YARN = dict(rope_type='yarn', factor=4.0, original_max_position_embeddings=16)
MLA = dict(q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6,
           num_key_value_heads=4, moe_intermediate_size=16, intermediate_size=40, n_routed_experts=8,
           num_experts_per_tok=3)

FAMILIES = {  # name: (config class, settings beyond SIZES)
    'llama': ('Llama', dict(
        num_key_value_heads=2, intermediate_size=48, rms_norm_eps=1e-5, rope_parameters=dict(
            rope_type='llama3', rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=16))),
    'qwen3': ('Qwen3', dict(
        num_key_value_heads=2, head_dim=12, intermediate_size=48, tie_word_embeddings=True, num_hidden_layers=3,
        use_sliding_window=True, sliding_window=5, max_window_layers=1,
        rope_parameters=YARN | dict(rope_theta=1e6))),
    'qwen3_moe': ('Qwen3Moe', dict(
        num_key_value_heads=1, head_dim=12, intermediate_size=40, moe_intermediate_size=16, num_experts=8,
        num_experts_per_tok=3, norm_topk_prob=True, mlp_only_layers=[0], num_hidden_layers=3)),
    'gpt_oss': ('GptOss', dict(
        num_key_value_heads=2, head_dim=8, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2,
        sliding_window=5, swiglu_limit=1.5, rope_parameters=YARN | dict(rope_theta=1.5e5, truncate=False))),
    'deepseek_v3': ('DeepseekV3', MLA | dict(
        n_group=4, topk_group=2, first_k_dense_replace=1, routed_scaling_factor=2.5, n_shared_experts=2,
        rope_parameters=YARN | dict(rope_theta=1e4, mscale=1.0, mscale_all_dim=0.8))),
    'kimi_k2': ('DeepseekV3', MLA | dict(  # no groups, and as the small DeepSeek models no compression of queries
        n_group=1, topk_group=1, first_k_dense_replace=0, routed_scaling_factor=2.827, n_shared_experts=1,
        num_hidden_layers=1, q_lora_rank=None,
        rope_parameters=YARN | dict(rope_theta=5e4, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0))),
    'llama4': ('Llama4Text', dict(
        num_key_value_heads=2, head_dim=8, intermediate_size=24, intermediate_size_mlp=40, num_local_experts=4,
        num_hidden_layers=4, interleave_moe_layer_step=2, attention_chunk_size=8, floor_scale=8,
        rope_parameters=dict(rope_type='llama3', rope_theta=5e5, factor=16.0, low_freq_factor=1.0,
                             high_freq_factor=1.0, original_max_position_embeddings=16))),
    'mistral': ('Mistral', dict(
        num_key_value_heads=2, intermediate_size=48, sliding_window=5, rope_parameters=dict(
            rope_type='default', rope_theta=1e6))),
    'qwen2': ('Qwen2', dict(
        num_key_value_heads=2, intermediate_size=48, num_hidden_layers=3, tie_word_embeddings=True,
        use_sliding_window=True, sliding_window=5, max_window_layers=1, rope_parameters=YARN | dict(rope_theta=1e6))),
    'smollm3': ('SmolLM3', dict(
        num_key_value_heads=2, intermediate_size=48, no_rope_layer_interval=2, num_hidden_layers=3,
        tie_word_embeddings=True, rope_parameters=dict(rope_type='default', rope_theta=2e6))),
    'phi3': ('Phi3', dict(
        num_key_value_heads=2, intermediate_size=48, sliding_window=5, rope_parameters=dict(
            rope_type='default', rope_theta=1e4))),
    'olmo2': ('Olmo2', dict(
        num_key_value_heads=2, intermediate_size=48, rope_parameters=dict(rope_type='default', rope_theta=5e5))),
    'gemma3': ('Gemma3Text', dict(
        num_key_value_heads=2, head_dim=12, intermediate_size=48, num_hidden_layers=3, query_pre_attn_scalar=16,
        sliding_window=5, sliding_window_pattern=3, rope_parameters=dict(
            full_attention=dict(rope_type='linear', rope_theta=1e6, factor=8.0),
            sliding_attention=dict(rope_type='default', rope_theta=1e4)))),
    'gemma2': ('Gemma2', dict(
        num_key_value_heads=2, head_dim=12, intermediate_size=48, num_hidden_layers=3, query_pre_attn_scalar=16,
        sliding_window=5, attn_logit_softcapping=1.5, final_logit_softcapping=3.0, rope_parameters=dict(
            rope_type='default', rope_theta=1e4))),
    'olmo3': ('Olmo3', dict(
        num_key_value_heads=2, intermediate_size=48, num_hidden_layers=4, sliding_window=5, rope_parameters=dict(
            full_attention=YARN | dict(rope_theta=5e5),
            sliding_attention=dict(rope_type='default', rope_theta=5e5)))),
}


@torch.no_grad()
def randomize(model, seed):
    """Random weights, gains, biases, sinks: one that is lost, transposed or misplaced shows in the logits."""
    generator = torch.Generator().manual_seed(seed)
    is_gemma = 'Gemma' in type(model).__name__
    for name, p in [*model.named_parameters(), *model.named_buffers()]:
        if 'inv_freq' in name or 'embed_scale' in name:
            continue
        gain = 1.0 if 'norm' in name and not is_gemma else 0.0  # Gemma's gain is 1 + p
        wide = re.search('bias|norm|sinks|router' if is_gemma else 'embed_tokens|bias|norm|sinks|router', name)
        std = 0.5 if wide else 0.7 * p.shape[-1]**-0.5 * 1.4
        p.copy_(gain + std * torch.randn(p.shape, generator=generator))
        if is_gemma and 'norm' in name:
            p.copy_(torch.round(256 * p) / 256)  # so that 1 + p is exact
    return model.float().eval()


def write(folder, config, tensors):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / 'config.json').write_text(json.dumps(config, indent=1) + '\n')
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / 'model.safetensors', {'format': 'pt'})


def published(config):
    """config.json as the published files have it (transformers 4), from what transformers 5 writes."""
    config = dict(config)
    rope = dict(config.pop('rope_parameters'))
    if config['model_type'] == 'gemma3_text':
        config['rope_local_base_freq'] = rope['sliding_attention']['rope_theta']
        del config['layer_types']
    if 'full_attention' in rope:
        rope = dict(rope['full_attention'])
    if config['model_type'] == 'gemma2':
        del config['layer_types']
        config['hidden_act'] = config['hidden_activation']
    config['rope_theta'] = rope.pop('rope_theta')
    config['torch_dtype'] = config.pop('dtype', 'float32')
    config['rope_scaling'] = None if rope['rope_type'] == 'default' else rope
    if config['model_type'] == 'qwen3_moe':
        config['num_experts'] = config.pop('num_local_experts')
    if config['model_type'] == 'deepseek_v3':
        for key in ('head_dim', 'qk_head_dim', 'rope_interleave'):
            config.pop(key, None)
        config['rope_scaling']['type'] = config['rope_scaling'].pop('rope_type')
    if config['model_type'] == 'gpt_oss':
        del config['swiglu_alpha']
        config['experts_per_token'] = config['num_experts_per_tok']
    if config['model_type'] == 'llama4_text':
        del config['layer_types'], config['moe_layers']
        config['no_rope_layers'] = []
        config = {'model_type': 'llama4', 'architectures': ['Llama4ForConditionalGeneration'], 'text_config': config,
                  'vision_config': {'model_type': 'llama4_vision_model', 'hidden_size': 8}}
    return config


FP4 = torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6])


def mxfp4(x):
    """[E, in, out] -> blocks uint8 [E, out, in / 32, 16], scales uint8 [E, out, in / 32], and the values they mean."""
    rows = x.transpose(1, 2).unflatten(-1, (-1, 32))
    exponent = torch.ceil(torch.log2(rows.abs().amax(-1) / 6))
    nibbles = (rows[..., None] / 2**exponent[..., None, None] - FP4).abs().argmin(-1).to(torch.uint8)
    values = (FP4[nibbles.long()] * 2**exponent[..., None]).flatten(-2).transpose(1, 2)
    return nibbles[..., 0::2] | nibbles[..., 1::2] << 4, (exponent + 127).to(torch.uint8), values


def fp8(x, block=16):
    """[out, in] -> float8_e4m3fn, its scales per block (partial ones at the ends), and the values they mean."""
    out, inner = x.shape
    padded = F.pad(x, (0, -inner % block, 0, -out % block))
    scale = padded.unflatten(0, (-1, block)).unflatten(2, (-1, block)).abs().amax((1, 3)) / 448
    whole = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)[:out, :inner]
    low = (x / whole).to(torch.float8_e4m3fn)
    return low, scale, low.float() * whole


def pack(name, tensors, config):
    """The packed format in which the family is published: (tensors of the file, their values, config)."""
    if name == 'gpt_oss':
        packed, values = {}, {}
        for key, x in tensors.items():
            if re.search(r'experts\.(gate_up|down)_proj$', key):
                packed[key + '_blocks'], packed[key + '_scales'], values[key] = mxfp4(x)
            else:
                packed[key] = values[key] = x
        return packed, values, config | {'quantization_config': {'quant_method': 'mxfp4'}}
    packed, values = {}, {}
    for key, x in tensors.items():
        if x.dim() == 2 and not re.search(r'embed_tokens|lm_head|mlp\.gate\.weight', key):
            packed[key], packed[key + '_scale_inv'], values[key] = fp8(x)
        else:
            packed[key] = values[key] = x
    packed['model.layers.2.eh_proj.weight'] = torch.ones(3, 5)  # the multi-token-prediction layer, which is ignored
    return packed, values, config | {'quantization_config': {
        'quant_method': 'fp8', 'fmt': 'e4m3', 'weight_block_size': [16, 16], 'activation_scheme': 'dynamic'}}


def reference(model, idx):
    """What the tests compare with."""
    model = model.eval()
    embedding = model.get_input_embeddings().weight
    logits = model(idx).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), idx[:, 1:].flatten())
    (grad,) = torch.autograd.grad(loss, embedding)
    row = idx[:, :PROMPT]
    with torch.no_grad():
        for _ in range(NEW):
            row = torch.cat([row, model(row, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return dict(logits=logits.detach().numpy(), grad=grad.numpy(), greedy=row.numpy().astype(np.int32))


def main():
    idx = torch.from_numpy(np.random.default_rng(0).integers(0, SIZES['vocab_size'], (2, T)))
    arrays = {'idx': idx.numpy().astype(np.int32)}
    for seed, (name, (kind, settings)) in enumerate(FAMILIES.items()):
        config = getattr(transformers, kind + 'Config')(**SIZES | settings)
        model = randomize(AutoModelForCausalLM.from_config(config, attn_implementation='eager'), seed)
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        model.save_pretrained(folder)
        config_5, tensors = json.loads((folder / 'config.json').read_text()), load_file(folder / 'model.safetensors')
        (folder / 'generation_config.json').unlink(missing_ok=True)
        results = reference(model, idx)
        arrays |= {f'{name}/{key}': value for key, value in results.items()}
        config_4 = published(config_5)
        if name == 'kimi_k2':
            config_4 = dict(config_4, model_type='kimi_k2')
        if name == 'llama4':  # with the prefix and the neighbours that the published files have
            tensors = {('language_model.' + key): x for key, x in tensors.items()} | {
                'vision_model.class_embedding': torch.ones(8),
                'multi_modal_projector.linear_1.weight': torch.ones(8, 8)}
        if name in ('gpt_oss', 'deepseek_v3'):
            packed, values, config_4 = pack(name, tensors, config_4)
            if name == 'gpt_oss':  # the rest of the file is bfloat16
                packed = {k: x if x.dtype == torch.uint8 else x.bfloat16() for k, x in packed.items()}
                values = {k: x.bfloat16().float() for k, x in values.items()}
            low = AutoModelForCausalLM.from_config(config, attn_implementation='eager').eval()
            folder_packed = HERE / f'{name}_packed'
            write(HERE / 'tmp', config_5, values)
            low = AutoModelForCausalLM.from_pretrained(HERE / 'tmp', attn_implementation='eager', dtype=torch.float32)
            shutil.rmtree(HERE / 'tmp')
            arrays |= {f'{name}_packed/{key}': value for key, value in reference(low, idx).items()}
            write(folder_packed, config_4, packed)
        else:  # config.json in the other style beside it
            write(HERE / f'{name}_published', config_4, tensors) if name == 'llama4' else (
                (folder / 'config_published.json').write_text(json.dumps(config_4, indent=1) + '\n'))
        gaps = torch.from_numpy(results['logits']).topk(2).values
        print(f'{name}: logits std {results["logits"].std():.2f}, gap {(gaps[..., 0] - gaps[..., 1]).mean():.2f}, '
              f'grad {np.abs(results["grad"]).max():.1e}')
    np.savez_compressed(HERE / 'expected.npz', **arrays)
    print(sum(os.path.getsize(f) for f in HERE.rglob('*') if f.is_file()), 'bytes in all')


if __name__ == '__main__':
    main()
