"""The names that README, docs and other people's programs import, with their options: moving a package keeps them."""
import ast
import dataclasses
import importlib
import inspect
import re

import pytest

from tests.common import ROOT

# {module: {name: its options, in any order}}
PUBLIC = {
    'jax_transformer': {
        'LayerNorm': '', 'CausalSelfAttention': '', 'MLP': '', 'Block': '', 'GPT': '', 'VocabParallelEmbedding': '',
        'ParallelLMHead': '', 'create_train_state': 'rng config tx', 'count_params': 'params non_embedding',
        'estimate_mfu': '',
        'generate': 'params config idx_BxT max_new_tokens rng prompt_lengths_B temperature top_k top_p min_p '
                    'repetition_penalty n_vocab stop_tokens cache_dtype n_draft logprobs as_result'},
    'jax_train_utils': {
        'setup_jax_environment': '', 'check_device_availability': '', 'get_batch_jax': '', 'clip_gradients': '',
        'create_learning_rate_schedule': 'learning_rate warmup_iters lr_decay_iters min_lr lr_schedule decay_lr',
        'create_optimizer_with_schedule': 'schedule beta1 beta2 weight_decay optimizer',
        'setup_distributed_training': '', 'pmap_train_step': '', 'estimate_loss_jax': '', 'save_checkpoint': '',
        'load_checkpoint': ''},
    'jax_pretrained': {'load_pretrained': 'path_or_name', 'save_pretrained': 'params config folder'},
    'jax_text': {'load': 'source checkpoint base dataset device dtype quantize tensor expert'},
    'jax_generate': {'generate': '', 'generate_stream': '', 'convert_params_for_decoding': ''}}

SAMPLING = ('num_samples first_sample max_new_tokens stop seed temperature top_k top_p min_p repetition_penalty '
            'cache_dtype n_draft')
METHODS = {
    'generate': f'texts {SAMPLING}', 'stream': f'prompt {SAMPLING}'.replace('num_samples ', ''),
    'chat': f'messages tools chat_template_kwargs {SAMPLING}'.replace('num_samples ', ''),
    'logprobs': 'texts max_length batch_size cache_dtype', 'logits': 'text', 'hidden_states': 'text',
    'attention': 'text', 'serve': f'requests batch_size {SAMPLING}'.replace('num_samples first_sample ', '')}


@pytest.mark.parametrize('module', PUBLIC)
def test_public_names_are_importable_and_have_their_options(module):
    for name, options in PUBLIC[module].items():
        value = getattr(importlib.import_module(module), name)
        assert set(options.split()) <= set(inspect.signature(value).parameters), name


def functions_of(tree, *, method=False):
    """Yields the functions and methods of a module's tree, without those inside of functions, each with whether its
    first parameter is self."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield node, method
        else:
            yield from functions_of(node, method=isinstance(node, ast.ClassDef) or method)


def test_all_parameters_and_results_have_types_in_the_files_that_the_readme_says_to_read():
    names = re.findall(r'^\d\. `(\w+(?:/\w+)*\.py)`', (ROOT / 'README.md').read_text(encoding='utf-8'), re.M)
    assert len(names) == 5
    for name in names:
        for node, is_method in functions_of(ast.parse((ROOT / name).read_text(encoding='utf-8'))):
            of = node.args
            parameters = [*of.posonlyargs, *of.args, *of.kwonlyargs, of.vararg, of.kwarg][is_method:]
            missing = [one.arg for one in parameters if one and not one.annotation]
            assert not missing, f'{name}:{node.lineno} {node.name}: {missing}'
            assert node.returns or node.name == '__init__', f'{name}:{node.lineno} {node.name}: its result'


@pytest.mark.parametrize('module', PUBLIC)
def test_public_functions_have_types(module):
    for name in PUBLIC[module]:
        function = getattr(importlib.import_module(module), name)
        if inspect.isclass(function):
            function = function.__call__
        function = inspect.unwrap(function)
        code, types = function.__code__, inspect.get_annotations(function)
        parameters = {*code.co_varnames[:code.co_argcount + code.co_kwonlyargcount]} - {'self'}
        assert parameters <= types.keys() and 'return' in types, name


def test_the_methods_of_a_model_have_their_options():
    model = importlib.import_module('jax_text').TextModel
    for name, options in METHODS.items():
        assert set(options.split()) <= set(inspect.signature(getattr(model, name)).parameters), name


def test_the_config_begins_with_nanogpts_fields():
    config = importlib.import_module('jax_transformer').GPTConfig
    names = [field.name for field in dataclasses.fields(config)]
    assert names[:7] == 'block_size vocab_size n_layer n_head n_embd dropout bias'.split()
    assert all(field.default is not dataclasses.MISSING for field in dataclasses.fields(config))
    assert config.__dataclass_params__.frozen


def test_what_the_docs_import_is_there():
    documents = [*ROOT.glob('*.md'), *ROOT.glob('docs/*.md'), *ROOT.glob('data/*/readme.md')]
    imports = set()
    for path in documents:
        imports |= set(re.findall(r'^from (jax_[\w.]+) import ([\w, ]+)', path.read_text(encoding='utf-8'), re.M))
    assert len(imports) >= 3
    for module, names in imports:
        for name in names.split(', '):
            assert hasattr(importlib.import_module(module), name), f'{module}.{name}'
