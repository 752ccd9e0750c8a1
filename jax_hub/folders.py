"""Finds the folder of a model on this disk or on the hub, reads its config.json, and imports the
library transformers. The configs, tokenizers and chat templates of transformers are used, but none
of its models.

A folder may be untrusted. So path_inside refuses a name or a link that leads out of the folder, and
read_config_json refuses sizes that would fill the memory."""
import contextlib
import logging
import os
import re
import shutil
import sys
from pathlib import Path

from jax_flags import UserError, printable, read_json

# Models on the Hugging Face hub that have a short name: openai-community/<name>.
PUBLISHED = ('gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl')

# The files of a folder that hold or list its weights; the first one that is there counts.
WEIGHT_FILES = (
    'model.safetensors', 'model.safetensors.index.json',
    'pytorch_model.bin', 'pytorch_model.bin.index.json')

# The files of a model to download.
HUB_FILES = ('*.json', '*.safetensors', '*.jinja', 'merges.txt', '*.model')
# The files of a model without safetensors.
HUB_FILES_OF_TORCH = (*HUB_FILES, 'pytorch_model*.bin')

# The largest values of the keys of a config.json that become the length of a list or table before
# any weight is read. Published models have up to 576 features in a head and a width of 18,432.
LENGTHS = {
    'num_hidden_layers': 10_000, 'n_layer': 10_000, 'num_labels': 2**16,
    'hidden_size': 2**20, 'n_embd': 2**20, 'num_attention_heads': 2**16, 'n_head': 2**16,
    **dict.fromkeys(('head_dim', 'qk_rope_head_dim', 'qk_nope_head_dim', 'v_head_dim',
                     'kv_lora_rank', 'q_lora_rank'), 2**16),
    **dict.fromkeys(('num_experts', 'num_local_experts', 'n_routed_experts'), 10_000)}


# Words of transformers' warnings that need no attention here: its class splits text otherwise than
# tokenizer.json, which counts; Mistral's split, see mend_mistral_split; keys of RoPE that nothing
# reads, and deprecated names of its own keys; Llama 4's published factors of RoPE.
SETTLED_WARNINGS = (
    '`tokenizer.json` is ByteLevel', 'incorrect regex pattern',
    'The tokenizer class you load from this checkpoint', 'Unrecognized keys in `rope_parameters`',
    'is deprecated! Use', "high_freq_factor field must be greater than low_freq_factor")
shown_warnings = set()  # lines; each is printed once in a process


@contextlib.contextmanager
def telling_warnings(folder):
    """Collects the warnings that transformers gives during the `with` block, and prints them on
    stderr after the block. Each warning is one line, printed once in a process. Leaves out
    SETTLED_WARNINGS. Prints nothing if the block fails. folder: the folder that the block reads."""
    logger = logging.getLogger('transformers')
    handlers, level = logger.handlers, logger.level
    found = Collected()
    logger.handlers = [found]
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.handlers = handlers
        logger.setLevel(level)
    for message in found.messages:
        line = printable(f'transformers on {folder}: {" ".join(message.split())}')
        is_settled = any(words in message for words in SETTLED_WARNINGS)
        if not is_settled and line not in shown_warnings:
            shown_warnings.add(line)
            print(line, file=sys.stderr)


class Collected(logging.Handler):
    """A logging handler that collects the messages of a logger in a list, instead of printing
    them."""

    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def import_transformers():
    """Returns the package transformers, with all its messages silenced except in telling_warnings.

    If PyTorch is installed, transformers imports it, which takes seconds. Therefore this function
    is called only to read or write a folder that needs transformers. (render_marked of chats.py
    imports it, too, and runs after this one.) Raises UserError if transformers is not installed."""
    os.environ.setdefault('TRANSFORMERS_VERBOSITY', 'critical')
    try:
        import transformers
    except ImportError:
        raise UserError('a Hugging Face folder is read by the package transformers: '
                        'pip install "transformers>=5.23,<6"') from None
    return transformers


def path_inside(folder, name):
    """Returns the path of the file or folder `name` in a folder that may be untrusted. The path
    need not exist.

    A link may lead to another place in the folder. In Hugging Face's cache, where a snapshot
    consists of links, it may lead to the files of the same model. Raises UserError for a name or a
    link that leads out of the folder."""
    path = os.path.join(folder, name)
    target = Path(os.path.realpath(path))
    # in the cache, models--NAME of models--NAME/snapshots/REVISION
    allowed = Path(os.path.realpath(folder))
    for snapshots in allowed.parents:
        if snapshots.name == 'snapshots' and snapshots.parent.name.startswith('models--'):
            allowed = snapshots.parent
            break
    if not target.is_relative_to(allowed):
        raise UserError(f'{printable(path)} is not read: it leads out of its folder, to '
                        f'{printable(str(target))}; if you trust it, put a copy into the folder')
    return path


# -----------------------------------------------------------------------------
# the config.json of a model

def read_config_json(folder):
    """Returns the content of the config.json of a folder, {} without one. Raises UserError if a
    size in it, such as the number of layers, is above its limit in LENGTHS. Otherwise a wrong size
    could fill the memory: later code makes lists and tables of these sizes."""
    path = path_inside(folder, 'config.json')
    config = read_json(path, optional=True)
    for part in (config, text_config(config)):
        for key, most in LENGTHS.items():
            if isinstance(part.get(key), (int, float)) and part[key] > most:
                raise UserError(f'{path}: {key} must be at most {most:,}, not {part[key]:,}')
    return config


def text_config(config):
    """Returns the language model's part of a config.json: its text_config, or all of it."""
    part = config.get('text_config')
    return part if isinstance(part, dict) else config


def find_config_json(path):
    """Returns the path of the config.json of a model; None if its weights are in nanoGPT's ckpt.pt.
    path: a folder, or the file of the weights in it."""
    folder, name = os.path.split(weight_file(path))
    if name not in WEIGHT_FILES:
        return None
    return path_inside(folder, 'config.json')


def kept_config_json(out_dir):
    """Returns the path at which a run in out_dir keeps the config.json of the Hugging Face model
    that it trains further. The file need not exist."""
    return path_inside(out_dir, os.path.join('tokenizer', 'config.json'))


def keep_config_json(source, out_dir):
    """Copies a config.json to kept_config_json(out_dir).

    source: the path of the config.json, or None if the model has none. With None, the config.json
    of an earlier run is removed."""
    kept = kept_config_json(out_dir)
    if source:
        os.makedirs(os.path.dirname(kept), exist_ok=True)
        shutil.copyfile(source, kept)
    elif os.path.exists(kept):
        os.remove(kept)


@contextlib.contextmanager
def new_folder(folder):
    """Yields the path of a temporary folder to fill. If the `with` block succeeds, the temporary
    folder is renamed to `folder` at the end of the block. Raises UserError if `folder` cannot be
    written, or exists and is not empty."""
    folder = os.path.abspath(os.path.expanduser(folder))
    unfinished = f'{folder}.tmp-{os.getpid()}'
    try:
        is_empty_folder = os.path.isdir(folder) and not os.listdir(folder)
        if os.path.exists(folder) and not is_empty_folder:
            raise UserError(f'{folder} exists and is not an empty folder; remove it or choose '
                            'another')
        os.makedirs(unfinished)
        yield unfinished

        # The folder gets its name. Windows does not replace one, not even an empty one.
        if os.path.isdir(folder):
            os.rmdir(folder)
        os.replace(unfinished, folder)
    except OSError as error:
        raise UserError(f'cannot write {folder}: {error}') from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


# -----------------------------------------------------------------------------
# where a model is

def local_path(path_or_name, files=HUB_FILES):
    """Returns the local path of a model. A path is returned unchanged. For a name on the hub,
    returns the model's folder in the hub's cache, and downloads the model if the cache lacks it.

    files: patterns of the files that are downloaded. Raises UserError if the model cannot be
    downloaded."""
    if not is_on_hub(path_or_name):
        return os.path.expanduser(path_or_name)
    repo = name_on_hub(path_or_name)
    try:
        return download(repo, files)
    except Exception as error:  # no network, no such package, full disk, ...
        reason = str(error).split('\n')[0]
        here = '' if path_or_name in PUBLISHED else f'there is no folder {path_or_name} here, and '
        raise UserError(f'{here}cannot download {path_or_name} ({type(error).__name__}: {reason}). Put '
                        f'config.json and model.safetensors of {repo}, Hugging Face hub, into a '
                        'folder by hand and give its path instead') from None


def name_on_hub(name):
    """Returns the full name of a model on the hub: 'openai-community/gpt2' for 'gpt2'; a name that
    is not in PUBLISHED unchanged."""
    return f'openai-community/{name}' if name in PUBLISHED else name


def is_hub_name(name):
    """Returns whether `name` may be the name of a model on Hugging Face's hub."""
    return name in PUBLISHED or re.fullmatch(r'\w[\w.-]*/[\w.-]+', str(name)) is not None


def is_on_hub(name):
    """Returns whether `name` names a model on the hub, and nothing on this disk."""
    return is_hub_name(name) and not os.path.exists(os.path.expanduser(name))


def download(repo, files):
    """Returns the folder of a model in the hub's cache. Downloads the model if the cache lacks it.

    repo: the full name on the hub. files: patterns of the files that are wanted. If files is
    HUB_FILES and the model has no safetensors, pytorch_model*.bin is downloaded, too."""
    from huggingface_hub import snapshot_download
    logging.getLogger('huggingface_hub').setLevel(logging.ERROR)  # it would report every retry
    try:
        folder = snapshot_download(repo, allow_patterns=files, local_files_only=True)
    except FileNotFoundError:
        folder = snapshot_download(repo, allow_patterns=files)
    if files != HUB_FILES or has_weights(folder):
        return folder

    # The cache lacks the weights: an earlier call asked for the tokenizer alone.
    folder = snapshot_download(repo, allow_patterns=files)
    if has_weights(folder):
        return folder

    # Or the model has no safetensors.
    return snapshot_download(repo, allow_patterns=HUB_FILES_OF_TORCH)


def has_weights(folder):
    """Returns whether a folder has files of weights."""
    return any(name.endswith(('.safetensors', '.bin')) for name in os.listdir(folder))


def weight_file(path):
    """Returns the file that holds or lists the weights of the folder `path`: the first of
    WEIGHT_FILES and ckpt.pt that is there. If `path` is a file, returns it unchanged. Raises
    UserError if `path` does not exist or has none of these files, and if its name ends in .gguf,
    because GGUF files cannot be read."""
    if str(path).endswith('.gguf'):
        raise UserError(f'{path}: GGUF files are written, not read; transformers reads them where '
                        'PyTorch is installed, see "GGUF and adapters" in docs/models.md')
    if os.path.isfile(path):
        return path
    if not os.path.isdir(path):
        raise UserError(f'{path} does not exist; give a folder, a nanoGPT ckpt.pt, or one of '
                        f'{", ".join(PUBLISHED)}')
    for name in (*WEIGHT_FILES, 'ckpt.pt'):
        file = path_inside(path, name)
        if os.path.exists(file):
            return file
    if os.path.exists(os.path.join(path, 'adapter_config.json')):
        raise UserError(f'{path} is an adapter of peft: merge it into its model where peft is '
                        'installed, see "GGUF and adapters" in docs/models.md')
    raise UserError(f'{path} holds no weights that can be read: none of '
                    f'{", ".join(WEIGHT_FILES)}, ckpt.pt')
