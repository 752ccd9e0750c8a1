"""Writes the files of tokenizers, such as tokenizer.json."""
import json
import os
import shutil

from jax_flags import read_json, write_json, write_text
from jax_hub.folders import import_transformers
from jax_hub.tokenizers import AS_FILED, TEMPLATES, GPT2Tokenizer, HFTokenizer

# settings of transformers' tokenizer that a copy keeps: they change no ids here
KEPT_SETTINGS = ('split_special_tokens', 'padding_side', 'truncation_side', 'model_max_length')


def write_char_tokenizer(chars, folder):
    """Writes tokenizer.json and tokenizer_config.json for a vocabulary of characters. The tokenizer
    is a BPE without merges. chars: the characters in the order of their ids."""
    from tokenizers import Tokenizer, decoders, models
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(chars)}, []))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(os.path.join(folder, 'tokenizer.json'))
    settings = {'tokenizer_class': AS_FILED, 'clean_up_tokenization_spaces': False}
    write_json(os.path.join(folder, 'tokenizer_config.json'), settings)


def write_gpt2_tokenizer(folder):
    """Writes tokenizer.json and tokenizer_config.json of GPT-2's BPE, from the two files that
    tiktoken has downloaded."""
    from tiktoken.load import read_file_cached
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    GPT2Tokenizer()
    url = 'https://openaipublic.blob.core.windows.net/gpt-2/encodings/main'
    vocab = json.loads(read_file_cached(f'{url}/encoder.json'))
    lines = read_file_cached(f'{url}/vocab.bpe').decode().splitlines()
    merges = [tuple(line.split()) for line in lines[1:]]  # the first is a comment
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.add_special_tokens([AddedToken('<|endoftext|>', special=True, normalized=False)])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(os.path.join(folder, 'tokenizer.json'))
    settings = {'tokenizer_class': AS_FILED, 'eos_token': '<|endoftext|>'}
    write_json(os.path.join(folder, 'tokenizer_config.json'), settings)


def write_tokenizer(description, folder):
    """Writes the files of a tokenizer, such as tokenizer.json, to `folder`. Makes these files for a
    tokenizer of characters and for GPT-2's BPE, which have none. Calls copy_tokenizer for a
    tokenizer of the kind 'folder'. description: see load_tokenizer."""
    match description:
        case {'kind': 'char', 'chars': chars}:
            write_char_tokenizer(chars, folder)
        case {'kind': 'gpt2'}:
            write_gpt2_tokenizer(folder)
        case _:
            copy_tokenizer(description, folder)


def write_template(folder, template):
    """Writes a chat template, a text, into a folder that write_tokenizer has filled, in place of
    the templates there."""
    remove_templates(folder)
    path = os.path.join(folder, 'tokenizer_config.json')
    settings = read_json(path)
    settings.pop('chat_template', None)
    write_json(path, settings)
    write_text(os.path.join(folder, 'chat_template.jinja'), template)


def remove_templates(folder):
    """Removes the files of chat templates from a tokenizer's folder, if there are any."""
    for name in TEMPLATES:
        path = os.path.join(folder, name)
        if os.path.isdir(path):
            shutil.rmtree(path)
        elif os.path.exists(path):
            os.remove(path)


def copy_tokenizer(description, folder):
    """Writes the files of a Hugging Face tokenizer to `folder`. description: that of a tokenizer of
    the kind 'folder', see load_tokenizer. The new tokenizer.json has all tokens, also those that
    tokenizer_config.json or the tokenizer's class in transformers adds. The new
    generation_config.json has all end tokens."""
    source = description['path']
    if os.path.realpath(source) == os.path.realpath(folder):
        return
    tokenizer = HFTokenizer(source, is_copy=description.get('is_copy', False))
    os.makedirs(folder, exist_ok=True)
    remove_templates(folder)  # left by an earlier tokenizer
    if tokenizer.hf is None:
        for name in ('tokenizer.json', 'tokenizer_config.json'):
            shutil.copyfile(os.path.join(source, name), os.path.join(folder, name))
    else:
        kept = {name: getattr(tokenizer.hf, name) for name in KEPT_SETTINGS}
        import_transformers().PreTrainedTokenizerFast(
            tokenizer_object=tokenizer.tokenizer, chat_template=tokenizer.chat_template, **kept,
            **tokenizer.special).save_pretrained(folder)
        path = os.path.join(folder, 'tokenizer_config.json')  # transformers 4 knows the older name
        write_json(path, {**read_json(path), 'tokenizer_class': AS_FILED})
    generation = read_json(os.path.join(source, 'generation_config.json'), optional=True)
    if tokenizer.stop_tokens:
        generation['eos_token_id'] = list(tokenizer.stop_tokens)
    if generation:
        write_json(os.path.join(folder, 'generation_config.json'), generation)
