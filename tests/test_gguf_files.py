"""GGUF files, written and read. What compares with llama.cpp needs its binding, pip install llama-cpp-python."""
import dataclasses
import json

import jax
import numpy as np
import pytest

from jax_files.gguf_files import read_bpe
from jax_files.tokenizers import CharTokenizer, HFTokenizer
from jax_files.weight_files import local_path
from jax_flags import UserError
from jax_generate import generate
from jax_pretrained import load_pretrained, save_pretrained
from jax_transformer import GPTConfig
from tests.common import (
    CHAT_TEMPLATE, FAMILIES, TUNE, apply, assert_refused, edit_json, prepare, random_params, run_script, sample,
    samples_of, succeeded, train)

gguf = pytest.importorskip('gguf')  # of requirements_jax.txt
CHARS = '\n !,.\\abcdefghijklmnopqrstuvwxyz\u00e4\u00e9\u4e2d\U0001f642'
GPT2 = GPTConfig(block_size=64, vocab_size=len(CHARS), n_layer=2, n_head=2, n_embd=64, activation='gelu_tanh')
LLAMA = GPTConfig(block_size=64, vocab_size=len(CHARS), n_layer=2, n_head=4, n_kv_head=2, n_embd=64, n_inner=96,
                  norm='rms', position='rope', mlp='swiglu', bias=False, tied_head=False)
QWEN3 = dataclasses.replace(LLAMA, qk_norm='learned')
CONFIGS = {'gpt2': GPT2, 'gpt2 without biases': dataclasses.replace(GPT2, bias=False),
           'gpt2 with a head': dataclasses.replace(GPT2, tied_head=False), 'llama': LLAMA, 'qwen3': QWEN3}
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
    assert values['general.architecture'] == family
    assert values[f'{family}.context_length'] == 64 and values[f'{family}.block_count'] == 2
    np.testing.assert_array_equal(tensors['token_embd.weight'], params['wte'])
    kernel = params['h_1']['mlp']['c_fc']['kernel']
    np.testing.assert_array_equal(tensors['blk.1.ffn_up.weight'], np.asarray(kernel).T)
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
    succeeded(run_script('export_jax.py', f'--init_from={speaking}', f'--gguf={path}', '--dtype=float16'))
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
    with pytest.raises(UserError, match='dtype must be one of float32, float16, q8_0'):
        save_pretrained(random_params(LLAMA), LLAMA, tmp_path / 'model.gguf', dtype='bfloat16')
    assert_refused(run_script('export_jax.py', '--gguf=model.gguf', '--folder=model'), 'name the new folder or file')


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


def rewrite(path, to, kind=None, rename=None, **changed):
    """Copies a GGUF file of a llama; its matrices get this quantization, its tensors other names, its keys values."""
    values, tensors = read(path)
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
                   "a.gguf: the architecture 'rwkv7' is not supported; supported: gpt2, llama, qwen2, qwen3")
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
    succeeded(run_script('export_jax.py', f'--init_from={speaking}', f'--gguf={path}'))
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
