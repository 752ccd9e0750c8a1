"""GGUF files for llama.cpp. What compares with llama.cpp needs its binding, pip install llama-cpp-python."""
import dataclasses
import json

import jax
import numpy as np
import pytest

from jax_flags import UserError
from jax_generate import generate
from jax_hub.gguf_files import split_of
from jax_hub.tokenizer_files import write_tokenizer
from jax_hub.tokenizers import CharTokenizer, HFTokenizer
from jax_pretrained import load_pretrained, save_pretrained
from jax_transformer import GPTConfig, MoEConfig
from tests.common import FAMILIES, assert_refused, edit_json, prepare, random_params, refusal, run_script, succeeded

gguf = pytest.importorskip('gguf')
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


def test_rows_beyond_the_vocabulary_are_tokens_that_nothing_uses(tmp_path):
    n = len(CHARS)
    config = dataclasses.replace(LLAMA, vocab_size=n + 2)
    save_pretrained(random_params(config), config, tmp_path / 'model.gguf', tokenizer=CHAR_TOKENIZER)
    values, _ = read(tmp_path / 'model.gguf')
    assert values['tokenizer.ggml.tokens'][n:] == [f'[PAD{n}]', f'[PAD{n + 1}]']
    kinds = gguf.TokenType
    assert values['tokenizer.ggml.token_type'] == [kinds.NORMAL] * n + [kinds.UNUSED] * 2


def test_q8_0_is_within_one_part_in_127_of_the_largest_of_its_block(tmp_path):
    params = random_params(LLAMA)
    save_pretrained(params, LLAMA, tmp_path / 'model.gguf', dtype='q8_0', tokenizer=CHAR_TOKENIZER)
    _, tensors = read(tmp_path / 'model.gguf')
    want = np.asarray(params['h_0']['mlp']['c_gate']['kernel']).T
    error = np.abs(tensors['blk.0.ffn_gate.weight'] - want).reshape(-1, 32).max(1)
    assert (0 < error).any() and (error <= np.abs(want).reshape(-1, 32).max(1) / 127).all()
    assert tensors['blk.0.attn_norm.weight'].dtype == np.float32


def test_experts_in_q8_0_keep_their_router_exact(tmp_path):
    params = random_params(QWEN3_MOE)
    save_pretrained(params, QWEN3_MOE, tmp_path / 'model.gguf', dtype='q8_0', tokenizer=CHAR_TOKENIZER)
    _, tensors = read(tmp_path / 'model.gguf')
    router = np.asarray(params['h_1']['mlp']['router']['kernel']).T
    np.testing.assert_array_equal(tensors['blk.1.ffn_gate_inp.weight'], router)
    down = tensors['blk.1.ffn_down_exps.weight'].swapaxes(1, 2)
    np.testing.assert_allclose(down, params['h_1']['mlp']['experts_c_proj']['kernel'], atol=0.02)


def test_a_vocabulary_that_prepare_has_learned_is_split_by_llama_cpp_too(tmp_path):
    (tmp_path / 'a.txt').write_text('def add(a, b):\n    return a + b  # 123 \'s\n' * 40)
    succeeded(prepare('text', tmp_path / 'a.txt', '--tokenizer=bpe:300', '--out_dir', tmp_path / 'data'))
    tokenizer = HFTokenizer(tmp_path / 'data' / 'tokenizer')
    assert split_of(json.loads(tokenizer.tokenizer.to_str())) == 'qwen2'


BYTES = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True, 'use_regex': False}
# as in the tokenizer.json of Llama 3
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r'|\s+(?!\S)|\s+')


@pytest.mark.parametrize('name, steps, ignore_merges', [
    ('gpt-2', [BYTES | {'use_regex': True}], False),
    ('smollm', [{'type': 'Digits', 'individual_digits': True}, BYTES | {'use_regex': True}], False),
    ('llama-bpe', [{'type': 'Split', 'pattern': {'Regex': LLAMA3}, 'behavior': 'Isolated', 'invert': False}, BYTES],
     True),
    ('qwen2', [{'type': 'Split', 'pattern': {'Regex': LLAMA3.replace('{1,3}', '')}, 'behavior': 'Isolated',
                'invert': False}, BYTES], False)])
def test_published_ways_to_split_have_llama_cpps_name(name, steps, ignore_merges):
    model = {'type': 'BPE', 'ignore_merges': ignore_merges}
    description = {'model': model, 'normalizer': None,
                   'pre_tokenizer': {'type': 'Sequence', 'pretokenizers': steps} if len(steps) > 1 else steps[0]}
    assert split_of(description) == name
    other = model | {'ignore_merges': not ignore_merges}
    assert 'no equivalent of this tokenizer.json' in refusal(split_of, description | {'model': other})


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
    assert f'saved {path}, weights in float16, {path.stat().st_size:,} bytes\n' in said.stdout
    values, _ = read(path)
    settings = json.loads((speaking / 'tokenizer_config.json').read_text())
    assert values['tokenizer.chat_template'] == settings['chat_template']
    assert values['tokenizer.ggml.tokens'][values['tokenizer.ggml.eos_token_id']] == '</s>'
    assert values['tokenizer.ggml.pre'] == 'gpt-2'
    assert values['tokenizer.ggml.add_bos_token']
    assert values['tokenizer.ggml.tokens'][:3] == ['a', 'b', 'c']
    assert len(values['tokenizer.ggml.tokens']) == load_pretrained(speaking)[0].vocab_size
    assert_refused(run_script('export_jax.py', f'--init_from={speaking}', f'--gguf={path}'), 'model.gguf exists')

    # several templates by name, as Hermes 2 Pro and Command R have them
    named = [{'name': 'default', 'template': 'plain'}, {'name': 'tool_use', 'template': 'with tools'}]
    edit_json(speaking / 'tokenizer_config.json', chat_template=named)
    succeeded(run_script('export_jax.py', f'--init_from={speaking}', f'--gguf={tmp_path / "named.gguf"}'))
    values, _ = read(tmp_path / 'named.gguf')
    assert values['tokenizer.chat_template'] == 'plain'
    assert values['tokenizer.chat_template.tool_use'] == 'with tools'

    # another token that ends an answer, which tokenizer.json takes for text
    user = next(token for token in tokenizer['added_tokens'] if token['content'] == '<user>')
    user['special'] = False
    (speaking / 'tokenizer.json').write_text(json.dumps(tokenizer))
    end = values['tokenizer.ggml.eos_token_id']
    edit_json(speaking / 'generation_config.json', eos_token_id=[end, user['id']])
    succeeded(run_script('export_jax.py', f'--init_from={speaking}', f'--gguf={tmp_path / "ends.gguf"}'))
    values, _ = read(tmp_path / 'ends.gguf')
    assert (values['tokenizer.ggml.eos_token_id'], values['tokenizer.ggml.eot_token_id']) == (end, user['id'])
    assert values['tokenizer.ggml.token_type'][user['id']] == gguf.TokenType.CONTROL

    # a token that llama.cpp would find elsewhere
    user['lstrip'] = True
    (speaking / 'tokenizer.json').write_text(json.dumps(tokenizer))
    refused = run_script('export_jax.py', f'--init_from={speaking}', f'--gguf={tmp_path / "refused.gguf"}')
    assert_refused(refused, "no equivalent of the tokenizer's '<user>', which takes the spaces beside it")


@pytest.mark.parametrize('dtype, largest', [('float16', 7e4), ('q8_0', 9e6)])
def test_weights_that_a_gguf_file_would_make_infinite_are_refused(dtype, largest, tmp_path):
    params = jax.tree.map(np.array, random_params(LLAMA))
    params['h_1']['mlp']['c_fc']['kernel'][3, 5] = largest
    options = dict(tokenizer=CHAR_TOKENIZER)
    said = refusal(lambda: save_pretrained(params, LLAMA, tmp_path / 'model.gguf', dtype=dtype, **options))
    assert 'model.layers.1.mlp.up_proj.weight' in said and 'float32' in said
    assert not list(tmp_path.iterdir())
    save_pretrained(params, LLAMA, tmp_path / 'model.gguf', **options)


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


def test_an_exported_folder_of_characters_makes_the_gguf_file_of_its_run(tmp_path):
    """The model card in the folder names this command."""
    params = random_params(LLAMA)
    save_pretrained(params, LLAMA, tmp_path / 'run.gguf', tokenizer=CHAR_TOKENIZER)
    save_pretrained(params, LLAMA, tmp_path / 'folder')
    write_tokenizer(CHAR_TOKENIZER, tmp_path / 'folder')
    succeeded(run_script('export_jax.py', f'--init_from={tmp_path / "folder"}', f'--gguf={tmp_path / "folder.gguf"}'))
    (expected, _), (found, _) = read(tmp_path / 'run.gguf'), read(tmp_path / 'folder.gguf')
    keys = [key for key in expected if key.startswith('tokenizer.')]
    assert keys and all(found[key] == expected[key] for key in keys)


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


def test_a_gguf_file_and_an_adapter_are_refused_as_models_with_what_to_do(tmp_path):
    (tmp_path / 'adapter_config.json').write_text('{}')
    for source, message in ((tmp_path / 'model.gguf', 'GGUF files are written, not read'),
                            (tmp_path, 'is an adapter of peft: merge it')):
        assert message in refusal(load_pretrained, source)
