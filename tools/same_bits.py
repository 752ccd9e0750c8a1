"""Compares what this tree computes with what a commit computes, on this machine, bit for bit.

$ python tools/same_bits.py HEAD~1            # all cases, in some three minutes
$ python tools/same_bits.py HEAD~1 --only=gpt,chat

Use this script to check that a change of the code keeps all results. Each case runs a few commands
twice: with the code of the commit, and with the code of this tree. Both times, the case collects
values under names: the losses of 20 iterations, sampled texts, digests of data sets and of exported
tensors. The last case resumes runs that the commit's code has trained. The script prints the names
with two different values. The exit code is 1 if there are any, else 0.

Each call runs the commit's code again, instead of comparing with stored values, because the bits of
a result differ between CPUs and between versions of jax.
"""
import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
SHORT = (
    '--device=cpu --max_iters=20 --lr_decay_iters=20 --warmup_iters=4 --eval_interval=10 '
    '--eval_iters=2 --log_interval=1 --batch_size=4 --gradient_accumulation_steps=2 '
    '--learning_rate=1e-2').split()
GPT = '--n_layer=2 --n_head=2 --n_embd=32 --block_size=32 --dropout=0.1 --bias=True'.split()
QWEN = (
    '--n_layer=2 --n_head=4 --n_kv_head=2 --n_embd=32 --block_size=32 --norm=rms --position=rope '
    '--qk_norm=learned --mlp=swiglu --n_inner=48 --dtype=float32').split()
SHARDED = '--fsdp=2 --tensor=2 --dtype=bfloat16'.split()
CHAT_TEMPLATE = (
    '{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}'
    '{% if m.role == "assistant" %}</s>{% endif %}{% endfor %}'
    '{% if add_generation_prompt %}<assistant>{% endif %}')
QUESTIONS = ('2 + 2?', 'who was Bach?', 'say hello', 'and then?')


class Tree:
    """The source code of one of the two sides that are compared, and a folder for its results.

    path: the folder of the source code, either this repository's working tree or a checkout of the
    commit to compare with. work: the folder for the results of this side's scripts; the constructor
    makes it."""

    def __init__(self, path, work):
        self.path = path
        self.work = work
        work.mkdir()

    def run(self, script, *args, devices=1):
        """Runs one of the tree's scripts, with the work folder as the current folder. args: the
        script's arguments. devices: the number of CPU devices that JAX shows to the script. Ends
        this program if the script fails."""
        env = {**os.environ, 'JAX_NUM_CPU_DEVICES': str(devices), 'JAX_PLATFORMS': 'cpu'}
        command = [sys.executable, str(self.path / script), *map(str, args)]
        done = subprocess.run(command, cwd=self.work, env=env, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f'{self.path}: {" ".join(command[1:])}\n{done.stderr[-3000:]}')

    def train(self, out, *flags, devices=1):
        self.run('train_jax.py', f'--out_dir={out}', *SHORT, *flags, devices=devices)

    def data(self, name):
        return f'--dataset={self.work / name}'


def write_text(folder):
    """Writes the inputs of the data sets into `folder`: text.txt, 100,000 characters of this
    repository's docs as they are now; rows.jsonl, paragraphs of these docs; chats.jsonl, 40 short
    conversations."""
    text = ''.join(
        path.read_text(encoding='utf-8') for path in sorted((ROOT / 'docs').glob('*.md')))
    (folder / 'text.txt').write_text(text[:100_000] + 'é 漢 🙂\n', encoding='utf-8')
    rows = [json.dumps({'text': part}) for part in text[:60_000].split('\n\n')]
    (folder / 'rows.jsonl').write_text('\n'.join(rows) + '\n', encoding='utf-8')
    chats = []
    for i in range(40):
        question = QUESTIONS[i % len(QUESTIONS)] + ' please' * (i % 3)
        messages = [{'role': 'user', 'content': question},
                    {'role': 'assistant', 'content': f'{question} is {i}'}]
        chats.append(json.dumps({'messages': messages * (1 + i % 2)}))
    (folder / 'chats.jsonl').write_text('\n'.join(chats) + '\n', encoding='utf-8')


def write_model(folder):
    """Makes `folder`, a Hugging Face folder of a small Llama with random weights and a chat
    template."""
    from safetensors.numpy import save_file
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(name, special=True) for name in ('<s>', '</s>', '<user>', '<assistant>')]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator(QUESTIONS, trainer)
    folder.mkdir()
    tokenizer.save(str(folder / 'tokenizer.json'))
    settings = {'tokenizer_class': 'PreTrainedTokenizerFast', 'bos_token': '<s>',
                'eos_token': '</s>', 'chat_template': CHAT_TEMPLATE}
    (folder / 'tokenizer_config.json').write_text(json.dumps(settings))
    d, width, n_vocab = 32, 48, tokenizer.get_vocab_size()
    config = {
        'model_type': 'llama', 'vocab_size': n_vocab, 'hidden_size': d,
        'intermediate_size': width, 'num_hidden_layers': 2, 'num_attention_heads': 4,
        'num_key_value_heads': 2, 'max_position_embeddings': 64, 'rms_norm_eps': 1e-5,
        'rope_theta': 1e4, 'tie_word_embeddings': False, 'bos_token_id': 0, 'eos_token_id': 1}
    (folder / 'config.json').write_text(json.dumps(config))
    shapes = {'model.embed_tokens': (n_vocab, d), 'model.norm': (d,), 'lm_head': (n_vocab, d)}
    for i in range(2):
        layer = f'model.layers.{i}'
        shapes |= {
            f'{layer}.input_layernorm': (d,), f'{layer}.post_attention_layernorm': (d,),
            f'{layer}.self_attn.q_proj': (d, d), f'{layer}.self_attn.k_proj': (d // 2, d),
            f'{layer}.self_attn.v_proj': (d // 2, d), f'{layer}.self_attn.o_proj': (d, d),
            f'{layer}.mlp.gate_proj': (width, d), f'{layer}.mlp.up_proj': (width, d),
            f'{layer}.mlp.down_proj': (d, width)}
    rng = np.random.default_rng(0)
    tensors = {f'{name}.weight': rng.normal(0, 0.2, shape).astype(np.float32)
               for name, shape in shapes.items()}
    save_file(tensors, folder / 'model.safetensors')


# -----------------------------------------------------------------------------
# what is kept

def digest(data):
    """Returns the beginning of the SHA-256 of bytes."""
    return hashlib.sha256(data).hexdigest()[:16]


def losses(out):
    """Returns everything that a run has logged, except times: {name: value}, for example {'loss at
    3': 2.5}. out: the run's folder, a Path."""
    found = {}
    for line in (out / 'metrics.jsonl').read_text().splitlines():
        row = json.loads(line)
        for name, value in row.items():
            if name not in ('time_ms', 'tokens_per_sec', 'mfu', 'iter'):
                found[f'{name} at {row["iter"]}'] = value
    return found


def files(folder):
    """Returns {path relative to the folder: digest} of all files in and below a folder."""
    paths = sorted(path for path in folder.rglob('*') if path.is_file())
    return {str(path.relative_to(folder)): digest(path.read_bytes()) for path in paths}


def samples(tree, *args):
    """Generates two samples with a Tree's sample_jax.py. Returns {name: value}, the values that
    sample_jax.py writes for each sample, such as its text. args: further flags of
    sample_jax.py."""
    path = tree.work / 'samples.jsonl'
    path.unlink(missing_ok=True)  # sample_jax.py refuses a file of other flags
    tree.run('sample_jax.py', '--device=cpu', f'--output={path}', '--num_samples=2',
             '--max_new_tokens=24', '--seed=5', *args)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {f'sample {i} {name}': value for i, row in enumerate(rows)
            for name, value in row.items() if name not in ('number', 'flags')}


def tensors(path):
    """Returns {name: digest} of the tensors of an exported folder or GGUF file. For a folder, the
    result also has the content of config.json and of tokenizer.json, as it is. For a GGUF file, the
    result also has the digest of each field."""
    if path.is_dir():
        from safetensors.numpy import load_file
        found = {}
        for file in sorted(path.glob('*.safetensors')):
            found |= load_file(file)
        found = {name: digest(array.tobytes()) for name, array in found.items()}
        for name in ('config.json', 'tokenizer.json'):
            if (path / name).exists():
                found[name] = json.loads((path / name).read_text())
        return found
    from gguf import GGUFReader
    reader = GGUFReader(path)
    found = {tensor.name: digest(tensor.data.tobytes()) for tensor in reader.tensors}
    for name, field in reader.fields.items():
        found[name] = digest(repr(field.contents()).encode())
    return found


# -----------------------------------------------------------------------------
# The cases. Each takes the Tree to run and the folder of the inputs, and returns the values to
# compare, {name: value}.

def data_sets(tree, inputs):
    """Makes five data sets in the work folder of a Tree:
    - chars: of text.txt, with a token for each character;
    - bpe: of text.txt, with a BPE that is trained on it;
    - rows: of rows.jsonl, JSON lines with a text each, with the model's tokenizer;
    - chats: of chats.jsonl, all conversations as one long text, with the model's tokenizer;
    - packed: of chats.jsonl with --rows=64, whole conversations packed into rows for block_size 64.
    Returns {path: digest} of the .bin files and tokenizers of the five data sets. inputs: the
    folder with text.txt, rows.jsonl, chats.jsonl and the model (in model/)."""
    text, out = inputs / 'text.txt', tree.work
    commands = {
        'chars': ['text', text, '--tokenizer=char'],
        'bpe': ['text', text, '--tokenizer=bpe:400'],
        'rows': ['text', inputs / 'rows.jsonl', f'--tokenizer={inputs / "model"}'],
        'chats': ['chat', inputs / 'chats.jsonl', f'--tokenizer={inputs / "model"}'],
        'packed': ['chat', inputs / 'chats.jsonl', f'--tokenizer={inputs / "model"}', '--rows=64']}
    found = {}
    for name, (kind, *args) in commands.items():
        tree.run(f'data/{kind}/prepare.py', *args, '--out_dir', out / name)
        for path, value in files(out / name).items():
            if path.endswith(('.bin', 'tokenizer.json')):
                found[f'{name}/{path}'] = value
    return found


def gpt(tree, inputs):
    """Trains a GPT-2 with dropout, and samples from it in four ways: in float32; in int8; with
    drafts; greedily. Returns the losses and samples, {name: value}. tree: the Tree with the code to
    run. inputs: unused; every test case is called with (tree, inputs)."""
    out = tree.work / 'out-gpt'
    tree.train(out, *GPT, tree.data('chars'))
    found = losses(out)
    ways = {'float32': [], 'int8': ['--quantize=int8'], 'drafts': ['--n_draft=3'],
            'greedy': ['--temperature=0']}
    for way, flags in ways.items():
        for name, value in samples(tree, f'--out_dir={out}', '--start=the ', *flags).items():
            found[f'{way} {name}'] = value
    return found


def resumed(tree, inputs):
    """Trains the same model as gpt(), but stops after ten iterations and resumes. Returns the
    losses, {name: value}. tree: the Tree with the code to run. inputs: unused; every test case is
    called with (tree, inputs)."""
    out = tree.work / 'out-resumed'
    tree.train(out, *GPT, tree.data('chars'), '--max_iters=10')
    tree.train(out, '--init_from=resume')
    return losses(out)


def float16(tree, inputs):
    """Trains the same model as gpt(), but in float16 with a loss scale. Returns the losses, {name:
    value}. tree: the Tree with the code to run. inputs: unused; every test case is called with
    (tree, inputs)."""
    out = tree.work / 'out-float16'
    tree.train(out, *GPT, tree.data('chars'), '--dtype=float16')
    return losses(out)


def qwen(tree, inputs):
    """Trains a Qwen3 with Muon, on the data set with a BPE. Samples from the model, and exports the
    model as a folder and as a GGUF file. Returns the losses, samples and exported tensors, {name:
    value}. tree: the Tree with the code to run. inputs: unused; every test case is called with
    (tree, inputs)."""
    out = tree.work / 'out-qwen'
    tree.train(out, *QWEN, tree.data('bpe'), '--optimizer=muon')
    found = losses(out)
    found |= samples(tree, f'--out_dir={out}', '--start=the ')
    source = f'--out_dir={out}'
    tree.run('export_jax.py', source, f'--folder={tree.work / "folder"}')
    tree.run('export_jax.py', source, f'--gguf={tree.work / "m.gguf"}', '--dtype=q8_0')
    for path in (tree.work / 'folder', tree.work / 'm.gguf'):
        found |= {f'{path.name}/{name}': value for name, value in tensors(path).items()}
    return found


def chat(tree, inputs):
    """Finetunes a Llama by LoRA on packed chats, and samples answers. Returns the losses and
    samples, {name: value}. tree: the Tree with the code to run. inputs: the folder of the input
    files, with the Llama in model/."""
    out = tree.work / 'out-chat'
    tree.train(out, tree.data('packed'), f'--init_from={inputs / "model"}', '--block_size=64',
               '--lora_rank=4', '--quantize=int8')
    found = losses(out)
    found |= samples(tree, f'--out_dir={out}', '--chat=True', '--start=who was Bach?')
    return found


def sharded(tree, inputs):
    """Trains the same model as qwen(), but with AdamW, on eight devices (data=2, fsdp=2, tensor=2)
    and in bfloat16. Returns the losses, {name: value}. tree: the Tree with the code to run. inputs:
    unused; every test case is called with (tree, inputs)."""
    out = tree.work / 'out-sharded'
    tree.train(out, *QWEN, *SHARDED, tree.data('bpe'), devices=8)
    return losses(out)


def old_runs_go_on(tree, inputs):
    """Copies three runs that gpt(), qwen() and chat() have trained with the old code, resumes the
    copies with the code of `tree` up to iteration 30, and samples from them. Returns the losses and
    samples, {name: value}. tree: a Tree. inputs: unused; every test case is called with (tree,
    inputs)."""
    found = {}
    for name, data, question in (
            ('gpt', 'chars', []), ('qwen', 'bpe', []), ('chat', 'packed', ['--chat=True'])):
        out = tree.work / f'old-{name}'
        shutil.copytree(tree.work.parent / 'old' / f'out-{name}', out)
        tree.train(out, '--init_from=resume', tree.data(data), '--max_iters=30')
        of_run = losses(out) | samples(tree, f'--out_dir={out}', '--start=the ', *question)
        found |= {f'{name}: {key}': value for key, value in of_run.items()}
    return found


CASES = (data_sets, gpt, resumed, float16, qwen, chat, sharded, old_runs_go_on)
# the cases whose files a case reads, beside those of data_sets
READS = {'old_runs_go_on': ['gpt', 'qwen', 'chat']}


def compare(old, new):
    """Returns a list of lines, one for each name with different values in `old` and `new`. old:
    {name: value}, computed by the code of the commit to compare with. new: the same, computed by
    the code of this repository's working tree."""
    lines = []
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            lines.append(f'    {name}: {str(old.get(name))[:70]} -> {str(new.get(name))[:70]}')
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('commit', help='the commit to compare with')
    known = [case.__name__ for case in CASES]
    parser.add_argument('--only', default='', help=f'names of cases, out of {", ".join(known)}')
    args = parser.parse_args()
    names = args.only.split(',') if args.only else known
    if not set(names) <= set(known):
        parser.error(f'--only: the cases are {", ".join(known)}')
    names = {'data_sets', *names, *(read for name in names for read in READS.get(name, []))}
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        inputs = folder / 'inputs'
        inputs.mkdir()
        write_text(inputs)
        write_model(inputs / 'model')
        checkout = folder / 'checkout'
        archive = subprocess.run(['git', 'archive', args.commit], cwd=ROOT, capture_output=True)
        if archive.returncode:
            parser.error(f'git cannot read {args.commit}: {archive.stderr.decode().strip()}')
        checkout.mkdir()
        subprocess.run(['tar', '-x', '-C', checkout], input=archive.stdout, check=True)
        trees = [Tree(checkout, folder / 'old'), Tree(ROOT, folder / 'new')]

        # each case in both
        n_different = 0
        for case in CASES:
            if case.__name__ not in names:
                continue
            old, new = [case(tree, inputs) for tree in trees]
            lines = compare(old, new)
            n_different += len(lines)
            print(f'{case.__name__}: {len(old)} values, {len(lines)} differ', flush=True)
            for line in lines[:20]:
                print(line)
    sys.exit(1 if n_different else 0)


if __name__ == '__main__':
    main()
