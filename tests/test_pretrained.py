"""Reading and writing GPT-2's weights. tests/golden/make_golden.py made the checkpoints, and the logits that torch
computes from them."""
import dataclasses
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from safetensors.numpy import load_file

from jax_hub.folders import keep_config_json, kept_config_json
from jax_hub.tokenizer_files import write_char_tokenizer
from jax_hub.tokenizers import HFTokenizer
from jax_pretrained import load_pretrained, save_pretrained
from jax_transformer import GPT, GPTConfig, generate
from tests.common import (
    FAMILIES, GOLDEN, apply, copy_folder, edit_json, edit_tensors, long, random_params, refusal, slow, start)


LOGITS = dict(np.load(GOLDEN / 'logits.npz'))
IDX = LOGITS.pop('idx')


def logits_of(config, params):
    return np.asarray(apply(config, params, IDX))

# -----------------------------------------------------------------------------
# what is read is right

@pytest.mark.parametrize('name', sorted(LOGITS))
def test_every_kind_of_checkpoint_gives_the_logits_of_torch(name):
    config, params = load_pretrained(GOLDEN / name)
    np.testing.assert_allclose(logits_of(config, params), LOGITS[name], atol=1e-4, rtol=0)


@pytest.mark.parametrize('name', sorted(LOGITS))
def test_params_have_the_tree_that_init_makes(name):
    config, params = load_pretrained(str(GOLDEN / name))
    init = lambda: GPT(config).init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))['params']
    shape_and_dtype = lambda x: (x.shape, str(x.dtype))
    assert jax.tree.map(shape_and_dtype, params) == jax.tree.map(shape_and_dtype, jax.eval_shape(init))


def test_config_is_read():
    config, _ = load_pretrained(GOLDEN / 'hf_bin')
    assert (config.block_size, config.vocab_size, config.n_layer, config.n_head, config.n_embd) == (24, 41, 2, 2, 16)
    assert (config.activation, config.norm_eps, config.bias, config.dropout) == ('gelu', 0.05, True, 0.0)
    config, _ = load_pretrained(GOLDEN / 'nanogpt_no_bias')
    assert (config.activation, config.norm_eps, config.bias, config.dropout) == ('gelu', 1e-5, False, 0.0)


@pytest.mark.parametrize('name', ['hf', 'nanogpt'])
def test_the_config_has_the_dtype_that_was_asked_for(name):
    config, params = load_pretrained(GOLDEN / name, 'bfloat16')
    assert config.dtype == 'bfloat16'
    assert params['wte'].dtype == 'bfloat16'


@pytest.mark.parametrize('name', ['hf', 'nanogpt'])
def test_an_unknown_dtype_is_refused(name):
    assert refusal(load_pretrained, GOLDEN / name, 'int4') == (
        "dtype must be one of float32, bfloat16, float16, stored, not 'int4'")


@pytest.mark.parametrize('path', ['nanogpt/ckpt.pt', 'hf/model.safetensors', 'hf_bin/pytorch_model.bin'])
def test_the_weight_file_may_be_given_instead_of_its_folder(path):
    _, params = load_pretrained(GOLDEN / path)
    jax.tree.map(np.testing.assert_array_equal, params, load_pretrained((GOLDEN / path).parent)[1])


@pytest.mark.parametrize('theirs, ours', [
    ('gelu_new', 'gelu_tanh'), ('gelu_pytorch_tanh', 'gelu_tanh'), ('gelu', 'gelu'), (None, 'gelu_tanh')])
def test_activations_by_their_name_in_transformers(theirs, ours, tmp_path):
    folder = copy_folder(GOLDEN / 'hf', tmp_path)
    edit_json(folder / 'config.json', activation_function=theirs)
    assert load_pretrained(folder)[0].activation == ours


def test_bfloat16_weights_are_read(tmp_path):
    folder = copy_folder(GOLDEN / 'hf', tmp_path)
    tensors = {name: x.astype(jnp.bfloat16) for name, x in load_file(folder / 'model.safetensors').items()}
    edit_tensors(folder, tensors)
    _, params = load_pretrained(folder)
    assert params['wte'].dtype == np.float32
    np.testing.assert_array_equal(params['wte'], tensors['transformer.wte.weight'].astype(np.float32))

# -----------------------------------------------------------------------------
# what cannot be read is refused with one line

@pytest.mark.parametrize('key, value, named', [
    ('model_type', 'bert', 'model_type'),
    ('model_type', ['gpt2'], 'model_type'),
    ('model_type', 'bert', "'bert'"),
    ('model_type', 'bert', 'supported: gpt2'),
    ('activation_function', 'relu', 'activation_function'),
    ('activation_function', ['gelu'], 'activation_function'),
    ('n_inner', 'wide', 'n_inner'),
    ('scale_attn_by_inverse_layer_idx', True, 'scale_attn_by_inverse_layer_idx'),
    ('reorder_and_upcast_attn', True, 'reorder_and_upcast_attn'),
    ('scale_attn_weights', False, 'scale_attn_weights'),
    ('add_cross_attention', True, 'add_cross_attention'),
    ('layer_norm_epsilon', 'small', 'layer_norm_epsilon'),
    ('n_embd', '16', 'n_embd'),
    ('n_head', 3, 'n_head=3'),
    ('n_layer', 0, 'n_layer')])
def test_a_config_that_we_do_not_compute_is_refused_by_name(key, value, named, tmp_path):
    folder = copy_folder(GOLDEN / 'hf', tmp_path)
    edit_json(folder / 'config.json', **{key: value})
    message = refusal(load_pretrained, folder)
    assert named in message
    assert 'config.json' in message


@pytest.mark.parametrize('key, value, named', [
    ('rope_parameters', [1], 'malformed'), ('num_attention_heads', 0, 'malformed'), ('text_config', 7, 'text_config'),
    ('quantization_config', 1.5, 'malformed'), ('num_hidden_layers', 10**9, 'num_hidden_layers must be at most'),
    ('num_labels', 10**9, 'num_labels must be at most'), ('head_dim', 10**9, 'head_dim must be at most 65,536'),
    ('vocab_size', 2**40, 'vocab_size must be'),
    ('vocab_size', 10**8, 'should have shape'), ('num_hidden_layers', 3, 'lacks')])
def test_a_config_with_values_of_another_kind_or_size_is_refused(key, value, named, tmp_path):
    folder = copy_folder(FAMILIES / 'llama', tmp_path)
    edit_json(folder / 'config.json', **{key: value})
    assert named in refusal(load_pretrained, folder)


LARGE = r"""
import json, re, sys
from pathlib import Path
from jax_flags import UserError
from jax_pretrained import load_pretrained

path = Path(sys.argv[1], 'config.json')
config = json.loads(path.read_text())
keys = [key for key, value in config.items() if type(value) in (int, float)]
for key in keys:
    changed = {**config, key: 10**9}
    if key == 'hidden_size':  # heads as wide as this says
        changed.pop('head_dim', None)
    path.write_text(json.dumps(changed))
    try:
        load_pretrained(sys.argv[1])
    except UserError:
        pass
    # in kB; ru_maxrss would begin with that of the process of the tests
    peak = int(re.search(r'VmHWM:\s*(\d+)', Path('/proc/self/status').read_text())[1])
    assert peak < 500_000, (key, peak)
print(len(keys))
"""


@pytest.mark.skipif(not os.path.exists('/proc/self/status'), reason='Linux only')
@pytest.mark.parametrize('family', [
    'llama', *map(slow, ('deepseek_v3', 'gpt_oss')), *map(long, ('gemma3', 'phi3', 'qwen3_moe'))])
def test_no_size_in_a_config_takes_memory_before_it_is_refused(family, tmp_path):
    folder = copy_folder(FAMILIES / family, tmp_path)
    child = start('-c', f"import resource; resource.setrlimit(resource.RLIMIT_AS, (8 << 30,) * 2){LARGE}", folder)
    said, error = child.communicate()
    assert child.returncode == 0 and int(said) > 10, error


@pytest.mark.parametrize('content', ['', '{"model_type": "gp', '[]', '3', b'\xff\xfe'])
def test_a_config_that_is_no_json_object_is_refused(content, tmp_path):
    folder = copy_folder(GOLDEN / 'hf', tmp_path)
    (folder / 'config.json').write_bytes(content if isinstance(content, bytes) else content.encode())
    assert 'config.json' in refusal(load_pretrained, folder)


def test_weights_without_config_are_refused(tmp_path):
    folder = copy_folder(GOLDEN / 'hf', tmp_path)
    (folder / 'config.json').unlink()
    assert 'config.json' in refusal(load_pretrained, folder)


def test_missing_and_unknown_tensors_are_named(tmp_path):
    folder = copy_folder(GOLDEN / 'hf', tmp_path)
    edit_tensors(folder, {'transformer.h.0.ln_1.bias': None, 'transformer.h.1.attn.c_attn.weight': None,
                          'score.weight': np.ones((2, 16), np.float32)})
    message = refusal(load_pretrained, folder)
    for part in ('h.0.ln_1.bias', 'h.1.attn.c_attn.weight', 'unknown score.weight'):
        assert part in message


def test_a_wrong_shape_is_named_with_what_was_expected(tmp_path):
    folder = copy_folder(GOLDEN / 'hf', tmp_path)
    edit_tensors(folder, {'transformer.h.1.attn.c_attn.weight': np.ones((48, 16), np.float32)})
    message = refusal(load_pretrained, folder)
    for part in ('h.1.attn.c_attn.weight', '(16, 48)', '(48, 16)'):
        assert part in message


def test_quantized_weights_are_refused(tmp_path):
    folder = copy_folder(GOLDEN / 'hf', tmp_path)
    edit_tensors(folder, {'transformer.wte.weight': np.ones((41, 16), np.int8)})
    assert 'wte.weight is int8' in refusal(load_pretrained, folder)


def test_a_head_is_accepted_only_if_it_is_the_embedding(tmp_path):
    folder = copy_folder(GOLDEN / 'hf', tmp_path)
    wte = load_file(folder / 'model.safetensors')['transformer.wte.weight']
    edit_tensors(folder, {'lm_head.weight': wte})
    np.testing.assert_allclose(logits_of(*load_pretrained(folder)), LOGITS['hf'], atol=1e-4, rtol=0)
    edit_tensors(folder, {'lm_head.weight': wte + 1})
    assert 'lm_head.weight' in refusal(load_pretrained, folder)


def test_a_path_without_weights_is_refused(tmp_path):
    assert 'model.safetensors' in refusal(load_pretrained, tmp_path)
    assert 'does not exist' in refusal(load_pretrained, tmp_path / 'gpt3')
    assert 'gpt2-xl' in refusal(load_pretrained, 'gpt3')


def test_a_torch_file_that_is_not_of_nanogpt_is_refused():
    assert 'model' in refusal(load_pretrained, GOLDEN / 'tensors.pt')

# -----------------------------------------------------------------------------
# writing

@pytest.mark.parametrize('name', ['hf', 'hf_bin', 'nanogpt'])
def test_what_is_saved_loads_again_unchanged(name, tmp_path):
    config, params = load_pretrained(GOLDEN / name)
    save_pretrained(jax.tree.map(jnp.asarray, params), config, tmp_path / 'exports' / 'model')
    config_again, params_again = load_pretrained(tmp_path / 'exports' / 'model')
    assert config_again == config
    jax.tree.map(np.testing.assert_array_equal, params_again, params)
    assert os.listdir(tmp_path / 'exports') == ['model']


@pytest.mark.slow
def test_a_model_without_biases_is_saved_with_zeros_and_keeps_its_logits(tmp_path):
    config, params = load_pretrained(GOLDEN / 'nanogpt_no_bias')
    save_pretrained(params, config, tmp_path / 'model')
    config_again, params_again = load_pretrained(tmp_path / 'model')
    assert config_again.bias
    assert not params_again['h_0']['mlp']['c_fc']['bias'].any()
    np.testing.assert_array_equal(logits_of(config_again, params_again), logits_of(config, params))


@pytest.mark.slow
@pytest.mark.parametrize('name', ['hf', 'hf_bin'])
def test_what_is_saved_is_what_transformers_saves(name, tmp_path):
    config, params = load_pretrained(GOLDEN / name)
    save_pretrained(params, config, tmp_path / 'model')
    ours = json.loads((tmp_path / 'model' / 'config.json').read_text())
    theirs = json.loads((GOLDEN / name / 'config.json').read_text())
    theirs |= {'attn_pdrop': 0.0, 'embd_pdrop': 0.0, 'resid_pdrop': 0.0, 'architectures': ['GPT2LMHeadModel']}
    assert ours == {key: theirs[key] for key in ours}
    if name == 'hf':
        tensors = load_file(tmp_path / 'model' / 'model.safetensors')
        jax.tree.map(np.testing.assert_array_equal, tensors, load_file(GOLDEN / 'hf' / 'model.safetensors'))
    with safetensors.safe_open(tmp_path / 'model' / 'model.safetensors', 'np') as f:
        assert f.metadata() == {'format': 'pt'}


def test_of_a_gpt2_with_fewer_positions_the_config_json_comes_back_with_their_number(tmp_path):
    folder = copy_folder(GOLDEN / 'hf', tmp_path)
    edit_json(folder / 'config.json', n_ctx=24, task_specific_params={'text-generation': {'max_length': 50}})
    config, params = load_pretrained(folder)
    config = dataclasses.replace(config, block_size=20, dropout=0.1)
    params['wpe'] = params['wpe'][:20]
    save_pretrained(params, config, tmp_path / 'model', config_json=folder / 'config.json')
    theirs = json.loads((folder / 'config.json').read_text()) | {'n_positions': 20, 'n_ctx': 20}
    assert json.loads((tmp_path / 'model' / 'config.json').read_text()) == theirs
    assert load_pretrained(tmp_path / 'model')[1]['wpe'].shape == (20, 16)


def test_a_run_without_a_config_json_removes_that_of_an_earlier_run(tmp_path):
    for _ in range(2):
        keep_config_json(GOLDEN / 'hf' / 'config.json', tmp_path)
        assert Path(kept_config_json(tmp_path)).read_text() == (GOLDEN / 'hf' / 'config.json').read_text()
        keep_config_json(None, tmp_path)
        assert not os.path.exists(kept_config_json(tmp_path))
        keep_config_json(None, tmp_path)


def test_nothing_is_overwritten(tmp_path):
    config, params = load_pretrained(GOLDEN / 'hf')
    (tmp_path / 'notes.txt').write_text('mine')
    assert 'not an empty folder' in refusal(save_pretrained, params, config, tmp_path)
    assert 'not an empty folder' in refusal(save_pretrained, params, config, tmp_path / 'notes.txt')
    assert 'cannot write' in refusal(save_pretrained, params, config, tmp_path / 'notes.txt' / 'model')
    assert os.listdir(tmp_path) == ['notes.txt']
    assert (tmp_path / 'notes.txt').read_text() == 'mine'


def test_a_save_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def disk_full(*args, **kwargs):
        raise OSError(28, 'No space left on device')

    config, params = load_pretrained(GOLDEN / 'hf')
    monkeypatch.setattr('jax_hub.weights.write_safetensors', disk_full)
    assert 'No space left' in refusal(save_pretrained, params, config, tmp_path / 'model')
    assert os.listdir(tmp_path) == []


def test_params_of_another_model_are_not_saved(tmp_path):
    config, _ = load_pretrained(GOLDEN / 'nanogpt_no_bias')
    _, params = load_pretrained(GOLDEN / 'nanogpt')
    assert 'unknown' in refusal(save_pretrained, params, config, tmp_path / 'model')
    assert os.listdir(tmp_path) == []


LLAMA = dict(norm='rms', position='rope', mlp='swiglu')

ARCHITECTURES = {
    'gpt2': dict(bias=True),
    'gpt2 without biases': dict(),
    'gpt2 with a head': dict(bias=True, tied_head=False),
    'llama': dict(**LLAMA, tied_head=False, n_kv_head=1),
    'mistral': dict(**LLAMA, layer_types=('window',), window=5),
    'qwen3': dict(**LLAMA, qk_norm='learned'),
    'qwen3 with windows': dict(**LLAMA, qk_norm='learned', layer_types=('window', 'full'), window=5),
    'qwen3_moe': dict(**LLAMA, qk_norm='learned', moe={'n_expert': 4, 'n_used': 2, 'width': 16}),
}


@pytest.mark.slow
@pytest.mark.parametrize('name', ARCHITECTURES)
def test_an_exported_character_model_reads_and_answers_alike_in_transformers(name, tmp_path):
    chars = '\n !,.:ABEHMORabcdehlmnoprstuvw\u00e9\u2014\u4e16'
    config = GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=32, vocab_size=len(chars), **{
        'bias': False, **ARCHITECTURES[name]})
    params = random_params(config)
    (tmp_path / 'tokenizer').mkdir()
    write_char_tokenizer(chars, tmp_path / 'tokenizer')
    save_pretrained(params, config, tmp_path / 'model', tokenizer=tmp_path / 'tokenizer')
    settings = json.loads((tmp_path / 'model' / 'tokenizer_config.json').read_text())
    assert settings['tokenizer_class'] == 'PreTrainedTokenizerFast'
    text = 'ROME:\nA b  \u00e9\u2014\u4e16 , \n'
    ids = [chars.index(c) for c in text]
    assert HFTokenizer(tmp_path / 'model').encode(text) == ids

    transformers = pytest.importorskip('transformers')
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / 'model')
    assert tokenizer(text).input_ids == ids
    assert tokenizer.decode(ids) == text
    torch = pytest.importorskip('torch')
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'model')
    assert model.config.model_type == name.split()[0]
    theirs = model(torch.tensor([ids])).logits.detach().numpy()
    np.testing.assert_allclose(apply(config, params, jnp.array([ids])), theirs, rtol=1e-4, atol=1e-4)
    answer = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0].tolist()
    tokens = generate(params, config, jnp.array([ids]), 12, rng=jax.random.key(0), temperature=0)[0].tolist()
    assert tokenizer.decode(tokens) == ''.join(chars[i] for i in tokens) == tokenizer.decode(answer)


def test_an_exported_tokenizer_keeps_its_end_token_and_its_split(tmp_path):
    config = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=2)
    write_char_tokenizer('ab', tmp_path)
    (tmp_path / 'tokenizer_config.json').write_text('{"eos_token": "b"}')
    save_pretrained(random_params(config), config, tmp_path / 'model', tokenizer=tmp_path)
    # without a class transformers would split text as GPT-2 does
    settings = json.loads((tmp_path / 'model' / 'tokenizer_config.json').read_text())
    assert (settings['eos_token'], settings['tokenizer_class']) == ('b', 'PreTrainedTokenizerFast')
    assert HFTokenizer(tmp_path / 'model').stop_tokens == (1,)
