"""GGUF files, written and read. What compares with llama.cpp needs its binding, pip install llama-cpp-python."""
import dataclasses
import json
import re
import shutil
import struct

import jax
import numpy as np
import pytest

from jax_files import gguf_files
from jax_files.config_json import JsonConfig
from jax_files.gguf_files import read_bpe, read_rope_factors, write_tokenizer
from jax_files.tokenizers import CharTokenizer, HFTokenizer
from jax_files.weight_files import local_path
from jax_flags import UserError
from jax_generate import generate
from jax_pretrained import load_pretrained, save_pretrained
from jax_ropes import read_rope
from jax_transformer import GPTConfig, MoEConfig, RopeScaling, rope_inv_freq
from tests.common import (
    CHAT_TEMPLATE, FAMILIES, GOLDEN, TUNE, apply, assert_refused, edit_json, prepare, random_params, refusal,
    run_next, run_script, sample, samples_of, succeeded, train)

gguf = pytest.importorskip('gguf')  # of requirements_jax.txt
CHARS = '\n !,.\\abcdefghijklmnopqrstuvwxyz\u00e4\u00e9\u4e2d\U0001f642'
GPT2 = GPTConfig(block_size=64, vocab_size=len(CHARS), n_layer=2, n_head=2, n_embd=64, activation='gelu_tanh')
LLAMA = GPTConfig(block_size=64, vocab_size=len(CHARS), n_layer=2, n_head=4, n_kv_head=2, n_embd=64, n_inner=96,
                  norm='rms', position='rope', mlp='swiglu', bias=False, tied_head=False)
QWEN3 = dataclasses.replace(LLAMA, qk_norm='learned')
QWEN3_MOE = dataclasses.replace(QWEN3, moe=MoEConfig(n_expert=8, n_used=3, width=32, layers=(True, True)))
CONFIGS = {'gpt2': GPT2, 'gpt2 without biases': dataclasses.replace(GPT2, bias=False),
           'gpt2 with a head': dataclasses.replace(GPT2, tied_head=False), 'llama': LLAMA, 'qwen3': QWEN3,
          'qwen3_moe': QWEN3_MOE}
CHAR_TOKENIZER = {'kind': 'char', 'chars': CHARS}


def read(path):
    """({key: value}, {name: array}) of a GGUF file."""
    reader = gguf.GGUFReader(path)
    return ({key: field.contents() for key, field in reader.fields.items()},
            {x.name: gguf.dequantize(x.data, x.tensor_type) for x in reader.tensors})


@pytest.mark.parametrize('family', CONFIGS)
def test_a_gguf_file_holds_the_weights_and_the_settings(family, tmp_path):
    config, family = CONFIGS[family], family.split()[0]
    params = random_params(config)
    save_pretrained(params, config, tmp_path / 'model.gguf', tokenizer=CHAR_TOKENIZER)
    values, tensors = read(tmp_path / 'model.gguf')
    architecture = family.replace('_', '')
    assert values['general.architecture'] == architecture
    assert values[f'{architecture}.context_length'] == 64 and values[f'{architecture}.block_count'] == 2
    np.testing.assert_array_equal(tensors['token_embd.weight'], params['wte'])
    ours, theirs = ('experts_c_fc', 'ffn_up_exps') if config.moe else ('c_fc', 'ffn_up')
    kernel = params['h_1']['mlp'][ours]['kernel']
    np.testing.assert_array_equal(tensors[f'blk.1.{theirs}.weight'], np.asarray(kernel).swapaxes(-1, -2))
    if config.moe:
        experts = [values[f'qwen3moe.expert_{key}'] for key in ('count', 'used_count', 'feed_forward_length')]
        assert experts == [8, 3, 32]
    q = np.asarray(params['h_0']['attn']['c_attn']['kernel']).T[:64]
    if family == 'llama':  # RoPE rotates neighbours there
        q = q.reshape(4, 2, 8, 64).swapaxes(1, 2).reshape(64, 64)
    name = 'attn_qkv' if family == 'gpt2' else 'attn_q'
    np.testing.assert_array_equal(tensors[f'blk.0.{name}.weight'][:64], q)


def test_q8_0_is_within_one_part_in_127_of_the_largest_of_its_block(tmp_path):
    params = random_params(LLAMA)
    save_pretrained(params, LLAMA, tmp_path / 'model.gguf', dtype='q8_0', tokenizer=CHAR_TOKENIZER)
    _, tensors = read(tmp_path / 'model.gguf')
    want = np.asarray(params['h_0']['mlp']['c_gate']['kernel']).T
    error = np.abs(tensors['blk.0.ffn_gate.weight'] - want).reshape(-1, 32).max(1)
    assert (0 < error).any() and (error <= np.abs(want).reshape(-1, 32).max(1) / 127).all()
    assert tensors['blk.0.attn_norm.weight'].dtype == np.float32


def test_the_experts_of_a_q8_0_file_are_read_as_they_are_dequantized_and_its_router_is_exact(tmp_path):
    params = random_params(QWEN3_MOE)
    save_pretrained(params, QWEN3_MOE, tmp_path / 'model.gguf', dtype='q8_0', tokenizer=CHAR_TOKENIZER)
    _, tensors = read(tmp_path / 'model.gguf')
    mlp = load_pretrained(tmp_path / 'model.gguf')[1]['h_1']['mlp']
    np.testing.assert_array_equal(mlp['router']['kernel'], params['h_1']['mlp']['router']['kernel'])
    down = tensors['blk.1.ffn_down_exps.weight'].swapaxes(1, 2)
    np.testing.assert_array_equal(mlp['experts_c_proj']['kernel'], down)
    assert (down != params['h_1']['mlp']['experts_c_proj']['kernel']).any()


def test_a_vocabulary_that_prepare_has_learned_is_split_by_llama_cpp_too(tmp_path):
    (tmp_path / 'a.txt').write_text('def add(a, b):\n    return a + b  # 123 \'s\n' * 40)
    succeeded(prepare('text', tmp_path / 'a.txt', '--tokenizer=bpe:300', '--out_dir', tmp_path / 'data'))
    tokenizer = HFTokenizer(tmp_path / 'data' / 'tokenizer')
    assert read_bpe(tokenizer)[3] == 'qwen2'


def test_a_gguf_file_has_the_chat_template_and_the_end_tokens(speaking, tmp_path):
    tokenizer = json.loads((speaking / 'tokenizer.json').read_text())
    tokenizer['pre_tokenizer'] = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True,
                                  'use_regex': True}
    path = tmp_path / 'model.gguf'
    edit_json(speaking / 'config.json', rope_parameters={'rope_type': 'default', 'rope_theta': 10000.0})
    refused = run_script('export_jax.py', f'--init_from={speaking}', f'--gguf={path}')
    assert_refused(refused, 'llama.cpp has no equivalent of this tokenizer.json')
    assert not list(tmp_path.glob('model.gguf*'))
    (speaking / 'tokenizer.json').write_text(json.dumps(tokenizer))
    said = succeeded(run_script('export_jax.py', f'--init_from={speaking}', f'--gguf={path}', '--dtype=float16'))
    assert f'saved {path}, weights in float16, {path.stat().st_size:,} bytes\nnext: python ' in said.stdout
    values, _ = read(path)
    assert values['tokenizer.chat_template'] == CHAT_TEMPLATE
    assert values['tokenizer.ggml.tokens'][values['tokenizer.ggml.eos_token_id']] == '</s>'
    assert values['tokenizer.ggml.pre'] == 'gpt-2'
    assert values['tokenizer.ggml.add_bos_token']
    assert values['tokenizer.ggml.tokens'][:3] == ['a', 'b', 'c']
    assert len(values['tokenizer.ggml.tokens']) == load_pretrained(speaking)[0].vocab_size
    assert_refused(run_script('export_jax.py', f'--init_from={speaking}', f'--gguf={path}'), 'model.gguf exists')


def test_what_llama_cpp_does_not_have_is_refused(tmp_path):
    config, params = load_pretrained(FAMILIES / 'olmo2')
    with pytest.raises(UserError, match='no GGUF is written of a olmo2'):
        save_pretrained(params, config, tmp_path / 'model.gguf', config_json=FAMILIES / 'olmo2' / 'config.json',
                        tokenizer=CHAR_TOKENIZER)
    no_sum = dataclasses.replace(QWEN3_MOE, moe=dataclasses.replace(QWEN3_MOE.moe, normalize=False))
    with pytest.raises(UserError, match='no GGUF is written of a mixture of experts with'):
        save_pretrained(random_params(no_sum), no_sum, tmp_path / 'model.gguf', tokenizer=CHAR_TOKENIZER)
    with pytest.raises(UserError, match='dtype must be one of float32, float16, q8_0'):
        save_pretrained(random_params(LLAMA), LLAMA, tmp_path / 'model.gguf', dtype='bfloat16')
    assert_refused(run_script('export_jax.py', '--gguf=model.gguf', '--folder=model'), 'name one new folder or file')


@pytest.mark.parametrize('family', CONFIGS)
def test_llama_cpp_reads_the_same_ids_and_continues_alike(family, tmp_path):
    llama_cpp = pytest.importorskip('llama_cpp')
    config = CONFIGS[family]
    params = random_params(config)
    save_pretrained(params, config, tmp_path / 'model.gguf', tokenizer=CHAR_TOKENIZER)
    model = llama_cpp.Llama(str(tmp_path / 'model.gguf'), n_ctx=64, n_threads=1, verbose=False,
                            type_k=0, type_v=0, flash_attn=False)  # keys and values in float32
    tokenizer, random = CharTokenizer(CHARS), np.random.default_rng(0)
    for _ in range(1000):
        ids = random.integers(len(CHARS), size=random.integers(1, 60)).tolist()
        assert model.tokenize(tokenizer.decode(ids).encode(), add_bos=True, special=True) == ids
    prompts = random.integers(len(CHARS), size=(20, 10)).astype(np.int32)
    tokens = np.asarray(generate(params, config, prompts, 50, rng=jax.random.key(0), temperature=0.0))
    alike = 0
    for prompt, want in zip(prompts.tolist(), tokens[:, 10:].tolist()):
        model.reset()
        found = model.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0)
        alike += [next(found) for _ in range(50)] == want
    # random weights have near ties, and llama.cpp takes GELU from a table in float16
    assert alike >= (18 if family.startswith('gpt2') else 20)


# -----------------------------------------------------------------------------
# reading

@pytest.mark.parametrize('family', CONFIGS)
def test_what_was_written_is_read_back(family, tmp_path):
    config, params = CONFIGS[family], random_params(CONFIGS[family])
    save_pretrained(params, config, tmp_path / 'model.gguf', tokenizer=CHAR_TOKENIZER)
    read_config, read_params = load_pretrained(tmp_path / 'model.gguf')
    assert read_config == dataclasses.replace(config, bias=read_config.bias, **(
        {} if family.startswith('gpt2') else {'n_inner': config.mlp_width, 'head_dim': config.head_width}))
    tokens = np.arange(len(CHARS))[None]
    np.testing.assert_array_equal(apply(read_config, read_params, tokens), apply(config, params, tokens))
    tokenizer = HFTokenizer(local_path(str(tmp_path / 'model.gguf')))
    assert tokenizer.encode(CHARS) == list(range(len(CHARS))) and tokenizer.decode(range(len(CHARS))) == CHARS
    assert tokenizer.ids == CharTokenizer(CHARS).ids  # so that a data set of these characters is one of this model


def rewrite(path, to, kind=None, rename=None, more=None, **changed):
    """Copies a GGUF file of a llama; its matrices get this quantization, its tensors other names, its keys values
    (None: the key is left out). more: {name: array} of further tensors."""
    values, tensors = read(path)
    tensors |= more or {}
    writer = gguf.GGUFWriter(to, changed.pop('architecture', 'llama'))
    for key, value in (values | changed).items():
        if not key.startswith('GGUF.') and key != 'general.architecture' and value is not None:
            add = {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string, list: writer.add_array,
                   bool: writer.add_bool}[type(value)]
            add(key, value)
    for name, x in tensors.items():
        quantized = gguf.quantize(x, kind) if kind is not None and x.ndim > 1 else x
        writer.add_tensor((rename or {}).get(name, name), quantized, raw_dtype=None if quantized is x else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


def test_a_gpt2_whose_head_is_a_copy_of_its_embedding_has_one_matrix_and_else_two(tmp_path):
    params = random_params(GPT2)
    with_head = dataclasses.replace(GPT2, tied_head=False)
    for factor, config in ((1, GPT2), (2, with_head)):
        path = tmp_path / f'{factor}.gguf'
        save_pretrained(params | {'lm_head': factor * params['wte']}, with_head, path, tokenizer=CHAR_TOKENIZER)
        found, read_params = load_pretrained(path)
        assert found == config and ('lm_head' in read_params) == (factor == 2)
        tokens = np.arange(len(CHARS))[None]
        np.testing.assert_array_equal(apply(found, read_params, tokens), factor * apply(GPT2, params, tokens))


@pytest.fixture
def written(tmp_path):
    """A llama as a GGUF file."""
    save_pretrained(random_params(LLAMA), LLAMA, tmp_path / 'model.gguf', tokenizer=CHAR_TOKENIZER)
    return tmp_path / 'model.gguf'


@pytest.mark.parametrize('kind', ['F16', 'Q8_0', 'Q4_0', 'Q4_1'])
def test_a_quantized_file_gives_the_weights_that_gguf_dequantizes(kind, written, tmp_path):
    kind = gguf.GGMLQuantizationType[kind]
    config, params = load_pretrained(rewrite(written, tmp_path / 'quantized.gguf', kind))
    assert config == load_pretrained(written)[0]
    mlp = random_params(LLAMA)['h_1']['mlp']
    dequantized = lambda x: gguf.dequantize(gguf.quantize(np.ascontiguousarray(x), kind), kind)
    for name, module in mlp.items():
        np.testing.assert_array_equal(params['h_1']['mlp'][name]['kernel'].T, dequantized(module['kernel'].T))
        assert (params['h_1']['mlp'][name]['kernel'] != module['kernel']).any()
    np.testing.assert_array_equal(params['wte'], dequantized(random_params(LLAMA)['wte']))


def test_a_file_of_another_kind_is_one_line(written, tmp_path):
    def refused(message, path):
        with pytest.raises(UserError, match=message):
            load_pretrained(path)

    other = rewrite(written, tmp_path / 'a.gguf', architecture='rwkv7')
    assert_refused(run_script('sample_jax.py', f'--init_from={other}'),
                   "a.gguf: the architecture 'rwkv7' is not supported; supported: gpt2, llama, qwen2, qwen3, qwen3moe")
    int8 = tmp_path / 'int8.gguf'
    writer = gguf.GGUFWriter(int8, 'llama')
    writer.add_token_list(['a'])
    writer.add_tokenizer_model('rwkv')
    writer.add_tensor('token_embd.weight', np.ones((1, 64), np.int8))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused('int8.gguf: token_embd.weight cannot be dequantized', int8)
    refused('its vocabulary, a BPE of the kind gpt2, lacks its merges',
            rewrite(written, tmp_path / 'm.gguf', **{'tokenizer.ggml.model': 'gpt2', 'tokenizer.ggml.pre': 'gpt-2'}))
    refused('one of 3 parts; join them', rewrite(written, tmp_path / 'p.gguf', **{'split.count': 3}))
    refused("no model but of the kind 'adapter'", rewrite(written, tmp_path / 'k.gguf', **{'general.type': 'adapter'}))
    refused('tokenizer, llama with pre=None, is not supported; supported: gpt2 with gpt-2, smollm',
            rewrite(written, tmp_path / 'b.gguf', **{'tokenizer.ggml.model': 'llama'}))
    refused('llama.rope.scaling.type=yarn is not supported',
            rewrite(written, tmp_path / 'c.gguf', **{'llama.rope.scaling.type': 'yarn'}))
    refused('llama.rope.dimension_count=8 is not supported',
            rewrite(written, tmp_path / 'rope.gguf', **{'llama.rope.dimension_count': 8}))
    refused('/d/.* has unknown model.layers.1.ffn_gate_exps.weight', rewrite(
        written, tmp_path / 'd.gguf', rename={'blk.1.ffn_gate.weight': 'blk.1.ffn_gate_exps.weight'}))
    (tmp_path / 'e.gguf').write_bytes(written.read_bytes()[:5000])
    refused('cannot read .*e.gguf', tmp_path / 'e.gguf')
    refused('cannot read .*f.gguf', tmp_path / 'f.gguf')


@pytest.mark.parametrize('key, value', [
    ('attention.causal', False), ('attention.causal', None), ('attention.scale', 0.125),
    ('attention.sliding_window', 32), ('rope.scaling.factor', 4.0), ('rope.scale_linear', 2.0),
    ('rope.scaling.attn_factor', 1.2), ('rope.scaling.attn_factor', 0.0),
    ('rope.scaling.type', 'yarn'), ('rope.scaling.yarn_beta_fast', 16.0),
    ('rope.dimension_count', 8), ('rope.freq_base_swa', 0.0), ('final_logit_softcapping', 30.0),
    ('attn_logit_softcapping', 50.0), ('logit_scale', 0.5), ('residual_scale', 0.25), ('embedding_scale', 12.0),
    ('expert_count', 8), ('expert_weights_scale', 2.5), ('pooling_type', 3), ('use_parallel_residual', True),
    ('something.new', 0), ('rope.freq_base', float('nan')), ('attention.head_count_kv', [2, 4])])
def test_a_key_that_changes_numbers_is_refused_by_its_name(key, value, written, tmp_path):
    if value is None:
        value = [True, False]  # of each layer
    with pytest.raises(UserError, match=f'a.gguf: llama.{key}='):
        load_pretrained(rewrite(written, tmp_path / 'a.gguf', **{f'llama.{key}': value}))


def test_keys_that_change_nothing_are_read_over(written, tmp_path):
    neutral = {
        'attention.causal': True, 'attention.scale': 0.0, 'attention.sliding_window': 64, 'rope.scaling.factor': 1.0,
        'rope.scale_linear': 0.0, 'rope.scaling.type': 'none', 'rope.scaling.attn_factor': 1.0,
        'rope.scaling.original_context_length': 32, 'rope.scaling.finetuned': True, 'expert_count': 0,
        'logit_scale': 1.0, 'embedding_scale': 0.0, 'vocab_size': 7, 'tensor_data_layout': 'Meta AI original pth',
        'attention.head_count_kv': [2, 2]}
    other = rewrite(written, tmp_path / 'a.gguf', **{f'llama.{key}': value for key, value in neutral.items()})
    config, params = load_pretrained(other)
    want_config, want = load_pretrained(written)
    assert config == want_config
    jax.tree.map(np.testing.assert_array_equal, params, want)


def test_what_llama_cpp_takes_where_a_key_is_missing(written, tmp_path):
    optional = ('attention.head_count_kv', 'attention.key_length', 'attention.value_length', 'rope.dimension_count',
                'rope.freq_base')
    save_pretrained(random_params(QWEN3), QWEN3, tmp_path / 'qwen3.gguf', tokenizer=CHAR_TOKENIZER)
    values, _ = read(tmp_path / 'qwen3.gguf')
    changed = {f'qwen3.{key}': None for key in optional if f'qwen3.{key}' in values}
    with pytest.raises(UserError, match='k_proj.weight should have shape'):  # as many key heads as there are heads
        load_pretrained(rewrite(tmp_path / 'qwen3.gguf', tmp_path / 'a.gguf', architecture='qwen3', **changed))
    del changed['qwen3.attention.head_count_kv']
    config = load_pretrained(rewrite(tmp_path / 'qwen3.gguf', tmp_path / 'b.gguf', architecture='qwen3', **changed))[0]
    assert config == load_pretrained(tmp_path / 'qwen3.gguf')[0]
    assert (config.head_width, config.rope_theta) == (16, 10000.0)
    save_pretrained(random_params(QWEN3_MOE), QWEN3_MOE, tmp_path / 'moe.gguf', tokenizer=CHAR_TOKENIZER)
    width = {'qwen3moe.expert_feed_forward_length': None, 'qwen3moe.feed_forward_length': 96}
    config = load_pretrained(rewrite(tmp_path / 'moe.gguf', tmp_path / 'c.gguf', architecture='qwen3moe', **width))[0]
    assert config.moe == load_pretrained(tmp_path / 'moe.gguf')[0].moe  # 96 / 3 are 32
    with pytest.raises(UserError, match='lacks qwen3moe.expert_used_count'):
        load_pretrained(rewrite(tmp_path / 'moe.gguf', tmp_path / 'd.gguf', architecture='qwen3moe',
                                **{'qwen3moe.expert_used_count': None}))
    for key in ('attention.layer_norm_rms_epsilon', 'context_length'):
        with pytest.raises(UserError, match=f'lacks llama.{key}'):
            load_pretrained(rewrite(written, tmp_path / f'{key}.gguf', **{f'llama.{key}': None}))


ROPE_FREQS = json.loads((GOLDEN / 'rope_freqs.json').read_text())


@pytest.mark.parametrize('case', ['llama-3.1', 'llama-3.2', 'small'])
def test_factors_of_ropes_frequencies_are_llama_3s_settings(case):
    """tests/golden/make_rope_freqs.py asked transformers for the frequencies."""
    golden = ROPE_FREQS[case]
    config = {'rope_theta': golden['rope_theta'], 'head_dim': golden['head_dim'], 'max_position_embeddings': 131072}
    scaling = read_rope_factors(np.float32(golden['factors']), config, 'a.gguf')
    hf = JsonConfig(dict(config, rope_scaling=scaling), 'a.gguf')
    fields = read_rope(hf, 10000.0, config['head_dim'])
    frequencies = rope_inv_freq(fields['rope_theta'], config['head_dim'], RopeScaling(**fields['rope_scaling']))
    np.testing.assert_allclose(frequencies, golden['inv_freq'], rtol=1e-6)
    if case != 'small':  # of which several settings give the same factors
        assert scaling == {key: x for key, x in golden['rope_scaling'].items() if key != 'rope_theta'}


def test_other_factors_of_ropes_frequencies_are_listed_and_senseless_ones_refused():
    golden = ROPE_FREQS['between']
    config = {'rope_theta': golden['rope_theta'], 'head_dim': golden['head_dim'], 'max_position_embeddings': 800}
    factors = np.float32(golden['factors'])
    scaling = read_rope_factors(factors, config, 'a.gguf')
    assert scaling['rope_type'] == 'longrope' and scaling['attention_factor'] == 1.0
    assert scaling['short_factor'] == scaling['long_factor'] == factors.tolist()
    assert read_rope_factors(np.ones(8, np.float32), config, 'a.gguf') is None
    for bad in (factors[:-1], factors * 0, factors * np.nan, -factors):
        with pytest.raises(UserError, match='rope_freqs.weight .* is not a positive factor'):
            read_rope_factors(bad, config, 'a.gguf')


def test_a_llama_3_1_has_the_logits_of_its_folder(written, tmp_path):
    golden = ROPE_FREQS['small']
    config = dataclasses.replace(LLAMA, rope_scaling={
        'kind': 'llama3', 'factor': 8.0, 'original_length': 64, 'low': 1.0, 'high': 4.0})
    factors = {'rope_freqs.weight': np.float32(golden['factors'])}
    found, params = load_pretrained(rewrite(written, tmp_path / 'a.gguf', more=factors))
    tokens = np.arange(len(CHARS))[None]
    want = apply(config, random_params(LLAMA), tokens)
    np.testing.assert_allclose(apply(found, params, tokens), want, atol=1e-5)
    assert np.abs(apply(LLAMA, random_params(LLAMA), tokens) - want).max() > 1e-2


@pytest.mark.parametrize('pre, begins', [('gpt-2', False), ('qwen2', False), ('llama-bpe', True), ('llama3', True)])
@pytest.mark.parametrize('add_bos', [None, False, True])
@pytest.mark.parametrize('add_eos', [None, False, True])
def test_the_tokens_around_a_text_are_llama_cpps(pre, begins, add_bos, add_eos, tmp_path):
    values = {'tokenizer.ggml.model': 'gpt2', 'tokenizer.ggml.pre': pre, 'tokenizer.ggml.merges': ['a b'],
              'tokenizer.ggml.tokens': ['a', 'b', 'ab', '<s 1>', '</s>'], 'tokenizer.ggml.token_type': [1, 1, 1, 3, 3],
              'tokenizer.ggml.bos_token_id': 3, 'tokenizer.ggml.eos_token_id': 4}
    for name, adds in (('bos', add_bos), ('eos', add_eos)):
        if adds is not None:
            values[f'tokenizer.ggml.add_{name}_token'] = adds
    write_tokenizer(values, 'a.gguf', tmp_path)
    before = [3] if add_bos or add_bos is None and begins else []
    after = [4] if add_eos else []
    assert HFTokenizer(tmp_path).tokenizer.encode('aba').ids == [*before, 2, 0, *after]
    for name, adds in (('bos', before), ('eos', after)):
        without = {key: x for key, x in values.items() if key != f'tokenizer.ggml.{name}_token_id'}
        if adds:
            with pytest.raises(UserError, match=f'add_{name}_token is true, and there is no {name}_token_id'):
                write_tokenizer(without, 'a.gguf', tmp_path)


@pytest.mark.parametrize('pre, ids', [('mpt', [2]), *((pre, [0, 1]) for pre in ('starcoder', 'refact', 'command-r'))])
def test_splits_of_other_names_set_digits_apart_where_llama_cpp_does(pre, ids, tmp_path):
    values = {'tokenizer.ggml.model': 'gpt2', 'tokenizer.ggml.pre': pre, 'tokenizer.ggml.merges': ['1 2'],
              'tokenizer.ggml.tokens': ['1', '2', '12', '</s>'], 'tokenizer.ggml.token_type': [1, 1, 1, 3],
              'tokenizer.ggml.eos_token_id': 3}
    write_tokenizer(values, 'a.gguf', tmp_path)
    assert HFTokenizer(tmp_path).tokenizer.encode('12').ids == ids


@pytest.mark.parametrize('changed, message', [
    ({'tokens': ['a', 'b', 'a', '<s>', '</s>']}, "has 'a' twice"),
    ({'token_type': [1, 1]}, '5 tokens have 2 types'),
    ({'eos_token_id': 5}, 'eos_token_id=5 is none of its tokens'),
    ({'tokens': None}, 'holds no tokenizer'), ({'model': None}, 'holds no tokenizer'),
    ({'pre': None}, 'gpt2 with pre=None, is not supported'), ({'merges': None}, 'lacks its merges')])
def test_a_vocabulary_that_lacks_something_is_refused_by_its_name(changed, message, tmp_path):
    values = {'model': 'gpt2', 'pre': 'gpt-2', 'merges': ['a b'], 'tokens': ['a', 'b', 'ab', '<s>', '</s>'],
              'token_type': [1, 1, 1, 3, 3], 'bos_token_id': 3, 'eos_token_id': 4} | changed
    values = {f'tokenizer.ggml.{key}': value for key, value in values.items() if value is not None}
    with pytest.raises(UserError, match=message):
        write_tokenizer(values, 'a.gguf', tmp_path)


# -----------------------------------------------------------------------------
# hostile files

def text(string):
    content = string if isinstance(string, bytes) else string.encode()
    return struct.pack('<Q', len(content)) + content


def hostile(path, keys=(), tensors=(), counts=None):
    """A GGUF file of these keys [(name, type, bytes)] and tensors [(name, shape, type, offset)], whatever they say."""
    content = b'GGUF' + struct.pack('<IQQ', 3, *(counts or (len(tensors), 1 + len(keys))))
    for name, kind, value in (('general.architecture', 8, text('llama')), *keys):
        content += text(name) + struct.pack('<I', kind) + value
    for name, shape, kind, offset in tensors:
        content += text(name) + struct.pack(f'<I{len(shape)}QIQ', len(shape), *shape, kind, offset)
    path.write_bytes(content + bytes(256))
    return path


TOKENS = [('tokenizer.ggml.model', 8, text('rwkv')), ('tokenizer.ggml.tokens', 9, struct.pack('<IQ', 8, 1) + text('a'))]


@pytest.mark.parametrize('keys, tensors, counts, message', [
    (TOKENS, [('a\nb', (4,), 0, 0)], None, r"the tensor 'a\\nb' of the shape \[4\] is none of a model"),
    (TOKENS, [('a', (0, 4), 0, 0)], None, 'of the shape .* is none of a model'),
    (TOKENS, [('a', (), 0, 0)], None, 'cannot read'),
    (TOKENS, [('a', (2**40,), 0, 0)], None, 'a size in its header is larger than the file'),
    (TOKENS, [('a', (2**33, 2**33), 0, 0)], None, 'cannot read'),
    (TOKENS, [('a', (4,), 0, 2**50)], None, 'a size in its header is larger than the file'),
    (TOKENS, [('a', (4,), 999, 0)], None, 'cannot read'),
    ([('x', 9, struct.pack('<IQ', 0, 2**40))], [], None, 'a size in its header is larger than the file'),
    ([('x', 9, struct.pack('<IQ', 8, 2**40))], [], None, 'a size in its header is larger than the file'),
    ([('x', 9, struct.pack('<IQ', 9, 1) * 2000)], [], None, 'cannot read'),
    ([('x', 8, struct.pack('<Q', 2**62))], [], None, 'a size in its header is larger than the file'),
    ([('x', 77, b'')], [], None, 'cannot read'),
    ([], [], (2**60, 2**60), 'cannot read'), ([], [], (2**60, 1), 'cannot read'),
    ([], [], (0, 1), 'holds no tokenizer')])
def test_a_header_that_lies_is_one_line(keys, tensors, counts, message, tmp_path):
    path = hostile(tmp_path / 'a.gguf', keys, tensors, counts)
    assert re.search(message, refusal(load_pretrained, path))


def test_a_list_that_is_longer_than_any_vocabulary_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_files, 'MAX_READS', 1000)
    path = hostile(tmp_path / 'a.gguf', [('x', 9, struct.pack('<IQ', 0, 2000) + bytes(2000))])
    assert 'its header is longer than that of any model' in refusal(load_pretrained, path)


def test_a_file_in_another_byte_order_is_refused(tmp_path):
    content = b'GGUF' + struct.pack('>IQQ', 3, 0, 0)
    (tmp_path / 'a.gguf').write_bytes(content)
    assert 'another byte order' in refusal(load_pretrained, tmp_path / 'a.gguf')


def test_a_folder_of_someone_elses_cannot_name_a_gguf_file(written, tmp_path):
    (tmp_path / 'model').mkdir()
    (tmp_path / 'model' / 'gguf_path').write_text(json.dumps({'path': str(written)}))
    shutil.copyfile(FAMILIES / 'llama' / 'config.json', tmp_path / 'model' / 'config.json')
    assert 'gguf_path is not of this program' in refusal(load_pretrained, tmp_path / 'model')


@pytest.mark.slow
def test_a_file_with_a_tokenizer_is_a_start_for_every_script(speaking, tmp_path):
    tokenizer = json.loads((speaking / 'tokenizer.json').read_text())
    tokenizer['pre_tokenizer'] = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True,
                                  'use_regex': True}
    tokenizer['model']['merges'] = [['a', 'b']]
    tokenizer['model']['vocab']['ab'] = tokenizer['model']['vocab'].pop('D')
    (speaking / 'tokenizer.json').write_text(json.dumps(tokenizer))
    edit_json(speaking / 'config.json', rope_parameters={'rope_type': 'default', 'rope_theta': 10000.0})
    path = tmp_path / 'model.gguf'
    said = succeeded(run_script('export_jax.py', f'--init_from={speaking}', f'--gguf={path}'))
    assert len(samples_of(run_next(said))) == 1
    ours, theirs = HFTokenizer(local_path(path)), HFTokenizer(speaking)
    assert ours.encode('ab, cab.abba<user>b') == theirs.encode('ab, cab.abba<user>b')
    assert 35 in ours.encode('ab') and ours.ids == theirs.ids
    for name in ('stop_tokens', 'special', 'chat_template', 'start_token'):
        assert getattr(ours, name) == getattr(theirs, name)

    flags = ['--num_samples=2', '--max_new_tokens=10', '--start=ab,']
    assert samples_of(sample('none', f'--init_from={path}', *flags)) == samples_of(
        sample('none', f'--init_from={speaking}', *flags))
    for name in ('a', 'b'):
        (tmp_path / f'{name}.txt').write_text(f'{name} hello, again and again.' * 20)
    succeeded(prepare('shakespeare', tmp_path / 'a.txt', tmp_path / 'b.txt', f'--tokenizer={path}', '--out_dir',
                      tmp_path / 'data'))
    succeeded(train(tmp_path / 'out', f'--dataset={tmp_path / "data"}', f'--init_from={path}', *TUNE, '--lora_rank=2'))
    path.rename(tmp_path / 'moved.gguf')
    base = f'--base={tmp_path / "moved.gguf"}'
    tuned = samples_of(sample(tmp_path / 'out', base, *flags))
    succeeded(run_script('export_jax.py', f'--out_dir={tmp_path / "out"}', base, f'--folder={tmp_path / "folder"}'))
    assert samples_of(sample('none', f'--init_from={tmp_path / "folder"}', *flags)) == tuned
    assert not (tmp_path / 'folder' / 'gguf_path').exists()
    score = run_script('eval_jax.py', f'--init_from={tmp_path / "moved.gguf"}', f'--text={tmp_path / "a.txt"}')
    assert 'bits_per_byte' in succeeded(score).stdout


@pytest.mark.parametrize('key, value, named', [
    ('block_count', 9999, 'its config says 9999'), ('block_count', 10**9, 'num_hidden_layers'),
    ('embedding_length', 2**31, 'hidden_size'), ('feed_forward_length', 2**31, 'intermediate_size')])
def test_a_size_that_no_model_has_is_refused_before_anything_of_it_is_made(key, value, named, written, tmp_path):
    assert named in refusal(load_pretrained, rewrite(written, tmp_path / 'a.gguf', **{f'llama.{key}': value}))
