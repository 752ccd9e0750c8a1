"""Flags to the run to start from: from scratch, from a pretrained model, or where a run ended.

What a resume restores, and where from (out_dir/ckpt/<iteration> holds the checkpoint, of which
`meta` is the JSON part):

| what | from | by |
|---|---|---|
| flags except NOT_RESUMED; those given now win | meta | `merge_resumed_flags` |
| which checkpoint: the latest that is intact | out_dir | `choose_checkpoint` |
| --deterministic, before jax starts | out_dir/config.json | `configure_process` |
| the sizes of the mesh, if they fit the devices that are here | flags | `fit_sizes` |
| the model's config; dropout, dtype, expert_balance are those of the flags | meta | `for_this_run` |
| the tokenizer, if the data set still has it | meta | `continued_model` |
| LoRA's base (or --base), rank, alpha and checksum | meta | `continued_model` |
| iteration, best validation loss, wandb's id | meta | `open_run` |
| parameters, or LoRA's updates | checkpoint | `start_state` |
| the mean of --ema; without one in the checkpoint it begins anew | checkpoint | `start_state` |
| the optimizer's state and the number of updates | checkpoint | `start_state` |
| float16's loss scale; another dtype begins anew | checkpoint | `start_state` |
| LoRA's frozen weights, if their checksum is the same | the base | `start_state` |
| metrics.jsonl up to that iteration | out_dir | `MetricsLog` |
| the data are those of its manifest, or --dataset is given | meta | `open_manifest` |
| damaged later checkpoints are renamed to <iteration>.damaged | out_dir | `lock_out_dir` |
| the learning rate | nothing | a function of the number of updates |
| data order, dropout | nothing | functions of seed and iteration |
| dtype=auto, attention=auto | nothing | chosen anew for the devices that are here |
"""
import dataclasses
import os

import jax
import jax.numpy as jnp

from jax_devices.choose import choose_attention, choose_experts
from jax_devices.layout import fit_sizes
from jax_devices.processes import check_agreement, in_all_processes
from jax_devices.setup import setup_jax_environment
from jax_flags import (
    UserError, ceil_div, check_flags, check_given, check_needs, decays_learning_rate,
    did_you_mean, is_in_bucket, rising_learning_rate)
from jax_hub.folders import PUBLISHED, is_hub_name, local_path
from jax_hub.tokenizers import check_tokens, describe_tokenizer, remedy_for_tokens, same_tokens
from jax_pretrained import load_config
from jax_run.checkpoints import (
    MODEL_ITEMS, checkpoint_steps, choose_checkpoint, is_run, load_checkpoint, run_folder)
from jax_run.data import load_mixture_meta
from jax_run.load import full_path, load_frozen, load_start_weights, move_base
from jax_text import create_sampler, sample_while_training
from jax_train_utils import (
    WEIGHTS, create_learning_rate_schedule, create_train_state, fitting_warmup, initial_loss_scale)
from jax_transformer import GPTConfig

# the flags that say what the model is. A resume may not change them, but for block_size where
# positions are not learned.
MODEL_FLAGS = {
    'n_layer', 'n_head', 'n_embd', 'block_size', 'bias', 'norm', 'position', 'n_kv_head', 'qk_norm',
    'layer_types', 'window', 'mlp', 'n_inner', 'tied_head', 'n_expert', 'n_expert_used'}

# the flags that a resumed run does not take from its checkpoint
NOT_RESUMED = (
    'device', 'overwrite', 'eval_only', 'out_dir', 'coordinator_address', 'num_processes',
    'process_id', 'profile', 'base')

# flags of earlier versions that are gone, and the values with which they were off; LAST_COMMIT is
# the last that has them
REMOVED = {'embedding_lr': 1.0, 'head_lr': 1.0, 'vector_lr': 1.0}
REMOVED_OPTIMIZERS = ('normuon',)
LAST_COMMIT = 'af04d36'

# the flags that --minutes sets, by the measured speed
FIXED_BY_MINUTES = ('max_iters', 'lr_decay_iters', 'warmup_iters')


@dataclasses.dataclass
class Run:
    """What a run starts from, filled in by open_run. Later only fit_to_minutes changes its flags,
    start_state the checksum of LoRA's base, and open_manifest the best validation loss."""
    flags: dict  # all of them, as the checkpoints of this run hold them
    given: dict  # those that the user gave
    devices: list
    dtype: str  # dtype of computation; flags['dtype'] may be 'auto'
    resumed: dict | None  # the metadata of the checkpoint that is continued
    shares: dict  # {folder of a data set: fraction}
    meta: dict  # what meta.json says of the first data set, see load_dataset_meta
    bpb_bytes: str = 'tokens'  # whose bytes bits per byte count, see Data.bpb_bytes
    iter_num: int = 0  # iterations made when it starts
    has_fitted: bool = False  # fit_to_minutes has set the number of iterations
    best_val_loss: float = 1e9
    wandb_id: str | None = None
    manifest: dict | None = None  # of open_manifest
    # the model
    config: GPTConfig | None = None
    tokenizer: dict | None = None
    lora: dict | None = None  # {'base', 'rank', 'alpha', 'quantize', 'checksum'}
    # folder of the pretrained model whose weights a new run starts from, or of another run's
    # checkpoint
    source: str | None = None

    @property
    def has_pairs(self):
        """Whether the data set has pairs of answers."""
        return self.meta['kind'] == 'pairs'

    @property
    def is_timed(self):
        """Whether --minutes has yet to set the number of iterations: that of a new run, or of one
        that an earlier version stopped while it measured."""
        is_known = self.resumed and self.flags['max_iters']
        return self.flags['minutes'] > 0 and not is_known and not self.has_fitted


def open_run(flags, given, data_root):
    """Decides what the run starts from: scratch, a pretrained model, LoRA on one, or a checkpoint.

    flags, given: of read_flags. data_root: the folder of the data sets. Returns a Run. Nothing is
    written; all processes call it, and must agree. Raises UserError for flags that are out of
    range, or ask for another architecture or optimizer than the checkpoint's; for devices that are
    not here; for a model or a data set that is missing or does not fit the other."""
    # the flags; those of a resumed run are its checkpoint's, but for those that are given now
    flags = {**flags, 'init_from': choose_init_from(flags)}
    resumed = None
    if flags['init_from'] == 'resume':
        _, resumed = choose_checkpoint(flags['out_dir'])
        # flags that are newer than the checkpoint are as its model says
        model_flags = flags_from_config(GPTConfig(**resumed['model']))
        flags = merge_resumed_flags(flags, given, {**model_flags, **resumed['flags']})
    if resumed or not flags['minutes']:
        flags = with_whole_schedule(flags)
    check_training_flags(flags, given)

    # the devices; a resumed run takes a layout that fits them
    with in_all_processes():
        devices, dtype, reason = setup_jax_environment(flags['device'], flags['dtype'])
    if resumed:
        sizes = {name: flags[name] for name in ('fsdp', 'tensor', 'expert', 'context')}
        fitting = fit_sizes(sizes, given, len(devices), resumed['model']['n_embd'])
        if fitting != sizes:
            print(f'{sizes} of the resumed run do not fit {len(devices)} devices: taking '
                  f'{fitting}')
        flags = {**flags, **fitting}
    print(f'{len(devices)} x {devices[0].device_kind}, compute in {dtype} ({reason})')

    # the data, then the model
    with in_all_processes():
        if flags['init_from'] not in ('scratch', 'resume'):
            check_init_from(flags['init_from'])
        shares, meta = load_mixture_meta(flags['dataset'], data_root)
    run = Run(flags, given, devices, dtype, resumed, shares, meta)
    if resumed:
        run.iter_num = resumed['iter_num']
        run.best_val_loss = resumed['best_val_loss']
        run.wandb_id = resumed['wandb_id']
        continued_model(run)
    elif flags['init_from'] == 'scratch':
        new_model(run)
    else:
        pretrained_model(run)
    return run


def check_init_from(source):
    """Raises UserError for a word, file or folder that is not there, before the data is opened."""
    words = ('scratch', 'resume', 'auto')
    is_there = is_in_bucket('init_from', source) or os.path.exists(os.path.expanduser(source))
    if source in words or is_hub_name(source) or is_there:
        return
    known = [*words, *PUBLISHED]
    folder = os.path.dirname(source)
    if os.path.isdir(folder or '.'):
        known += [os.path.join(folder, name) for name in os.listdir(folder or '.')]
    raise UserError(f'init_from: {source} does not exist{did_you_mean(source, known)}; it takes '
                    f"{', '.join(words)}, a run's out_dir, a folder or name of Hugging Face, "
                    f"ckpt.pt, or one of {', '.join(PUBLISHED)}")


def new_model(run):
    """Sets the config and the tokenizer of a model that is trained from scratch."""
    run.tokenizer = run.meta['tokenizer']
    vocab_size = run.meta['vocab_size']
    if run.tokenizer['kind'] != 'char':
        # as nanoGPT pads GPT-2's 50257 to 50304, for efficiency
        vocab_size = ceil_div(vocab_size, 64) * 64
    run.config = config_from_flags(run.flags, vocab_size=vocab_size, dtype=run.dtype)
    print(f'initializing a new model from scratch, vocab_size {vocab_size}')


def continued_model(run):
    """Sets the config, the tokenizer and LoRA of a run that is resumed."""
    flags, resumed = run.flags, run.resumed
    out_dir = flags['out_dir']

    # the model; only without learned positions may block_size be another
    config = GPTConfig(**resumed['model'])
    if config.position != 'learned':
        config = with_block_size(config, flags['block_size'], out_dir)
    run.config = for_this_run(config, flags, run.given, run.dtype)
    run.lora = resumed.get('lora')
    if flags['base']:
        run.lora = move_base(run.lora, flags['base'])

    # its tokenizer, of which the data set may have more text by now
    run.tokenizer = resumed['tokenizer']
    if not same_tokens(run.meta['tokenizer'], run.tokenizer):
        remedy = remedy_for_tokens(run.tokenizer, os.path.join(out_dir, 'tokenizer'))
        raise UserError(f'{out_dir} was trained with other tokens than those of dataset '
                        f"{flags['dataset']}: their ids mean something else; {remedy}")
    if run.dtype != resumed['model']['dtype']:
        print(f"this run has computed in {resumed['model']['dtype']} so far, and continues in "
              f'{run.dtype}')
    print(f'resuming {out_dir} at iteration {run.iter_num}, best val loss {run.best_val_loss:.4f}')
    print_what_is_left(run)


def print_what_is_left(run):
    """Says of a resumed run that has no iterations left what makes it longer, and of one that was
    made longer without its schedule that the learning rate stays low."""
    flags = run.flags
    max_iters, decay_iters = flags['max_iters'], flags['lr_decay_iters']
    decays = decays_learning_rate(flags)
    if run.iter_num >= max_iters:
        longer = f'--max_iters={2 * max_iters}'
        if decays:
            longer += f' --lr_decay_iters={2 * max_iters}'
        print(f'already at max_iters={max_iters}; a longer run: {longer}')
    elif decays and decay_iters < max_iters and 'lr_decay_iters' not in run.given:
        first = max(decay_iters, run.iter_num)
        print(f"iterations {first} to {max_iters} train at min_lr={flags['min_lr']:g}, because the "
              f'schedule ends at lr_decay_iters={decay_iters}; a longer one: '
              f'--lr_decay_iters={max_iters}')


def pretrained_model(run):
    """Sets the config, the tokenizer and LoRA of a run that starts from another model's weights:
    those of a run, or of a pretrained model."""
    flags, given = run.flags, run.given
    source = os.path.expanduser(flags['init_from'])

    # the model and its tokenizer
    if is_run(source):
        with in_all_processes():
            step, meta = choose_checkpoint(source, flags['checkpoint'], MODEL_ITEMS)
        run.source = os.path.join(source, 'ckpt', str(step))
        config, known = GPTConfig(**meta['model']), meta['tokenizer']
        name = os.path.join(source, 'tokenizer')
        base = full_path(run.source)
        source = f'{source}, iteration {step}'
    else:
        if 'checkpoint' in given:
            raise UserError(f'checkpoint is of a run, and {source} is another model: leave it out')
        run.source = local_path(source)
        with in_all_processes():
            config = load_config(run.source)
        known = describe_tokenizer(run.source, config.vocab_size)
        name = source
        base = full_path(source)
    run.tokenizer = check_tokens(run.meta['tokenizer'], flags['dataset'], known, name,
                                 config.vocab_size)

    # the sequences of this run may be shorter, and with RoPE longer than those of the model
    block_size = flags['block_size']
    if 'block_size' not in given:
        block_size = min(block_size, config.block_size)
    config = with_block_size(config, block_size, source)
    run.config = for_this_run(config, flags, given, run.dtype)
    run.flags = {**flags, **flags_from_config(run.config, given), 'block_size': block_size}
    if flags['lora_rank']:
        run.lora = {'base': base, 'rank': flags['lora_rank'], 'alpha': flags['lora_alpha'],
                    'quantize': flags['quantize'], 'checksum': None}
    print(f"initializing from {source}, dropout {flags['dropout']}, block_size {block_size}")


def with_block_size(config, block_size, source):
    """Returns the config of a trained model for sequences of block_size tokens. A table of learned
    positions is cut. A model with RoPE keeps its context if that is longer, and gets a longer one
    otherwise, which is printed. Raises UserError if the table is too short.

    source: the name of the model, for messages."""
    if config.position == 'learned':
        if block_size > config.block_size:
            raise UserError(f'block_size={block_size}, but {source} knows only {config.block_size} '
                            'positions, which it has learned: it cannot read longer sequences')
        return dataclasses.replace(config, block_size=block_size)
    if block_size <= config.block_size:
        return config
    scaling = 'no scaling'
    if config.rope_scaling:
        scaling = f"its scaling '{config.rope_scaling.kind}'"
    print(f'{source} was trained with sequences of {config.block_size} tokens and learns to read '
          f'{block_size}: RoPE keeps theta={config.rope_theta:g} and {scaling}')
    return dataclasses.replace(config, block_size=block_size)


def check_fits(run, micro_batch):
    """Raises UserError if the model and the data do not fit, before the data is read.

    micro_batch: the number of sequences that a device computes at a time."""
    flags = run.flags
    dataset, batch_size = flags['dataset'], flags['batch_size']
    vocab_size = run.meta['vocab_size']
    if vocab_size > run.config.vocab_size:
        raise UserError(f'dataset {dataset} has a vocabulary of {vocab_size}, the model only '
                        f'{run.config.vocab_size}')
    if not run.is_timed:
        schedule_from_flags(flags)  # refuses one that cannot be
    if flags['quantize'] and run.config.moe:
        raise UserError('quantize=int8 does not train models with experts; use --quantize=')
    check_needs('train_jax', {**flags, 'is_pairs': run.has_pairs}, run.given)
    if not run.has_pairs:
        return
    if not run.lora:
        raise UserError(f'dataset {dataset} has pairs of answers, which LoRA learns from: see '
                        'config/finetune_dpo.py')
    if micro_batch % 2:
        raise UserError('the two sequences of a pair go to one device: '
                        f'batch_size={batch_size} must be a multiple of '
                        f'{2 * batch_size // micro_batch}')


def training_config(run, data, layout):
    """Returns the config as training executes it: for sequences of block_size, with the chosen
    attention and way of computing experts, which are printed. Raises UserError for what the devices
    cannot split or compute.

    Checkpoints hold run.config.architecture(): a RoPE model keeps its context."""
    flags = run.flags
    config = dataclasses.replace(run.config, block_size=flags['block_size'])
    attention, reason = choose_attention(
        flags['attention'], config, run.devices[0], tensor=flags['tensor'],
        context=flags['context'], deterministic=flags['deterministic'],
        packed=data.train.is_packed)
    config = dataclasses.replace(
        config, attention=attention, scan_layers=flags['scan_layers'], remat=flags['remat'])
    print(f'attention: {attention} ({reason})')
    if config.moe:
        experts, reason = choose_experts(config, run.devices[0])
        config = dataclasses.replace(config, experts=experts)
        print(f'experts: {experts} ({reason})')
    layout.validate(config)
    return config


def open_sampler(run):
    """Makes a function of a TrainState that continues --sample_prompt, as sample_jax.py would from
    its checkpoint; '' of a model that has learned nothing yet. Raises UserError for a prompt that
    cannot be continued."""
    prompt = run.flags['sample_prompt']
    with in_all_processes():
        sampler = create_sampler(prompt, run.config, run.tokenizer, run.devices[0])

    def sample(state):
        if run.source is None and int(state.step) == 0:
            return ''
        return sample_while_training(sampler, state, run.lora, prompt, run.flags['seed'])

    return sample


def state_without_params(*args):
    """create_train_state(*args) without the parameters: under jit they are then not computed."""
    return create_train_state(*args).replace(params=None)


def start_state(run, config, layout, tx):
    """Makes the TrainState to start from: that of the checkpoint, or a new one, with the
    parameters of the pretrained model if there is one. With LoRA, that model's are frozen, and
    their checksum is remembered in run.lora.

    config: the run's, as training executes it. tx: the optimizer."""
    flags = run.flags
    key = jax.random.key(flags['seed'])
    lora_rank = run.lora['rank'] if run.lora else 0
    means = [name for name in WEIGHTS[1:] if flags[name]]

    # the state of a checkpoint, in the form that it was saved in: of float16, with a loss scale
    if run.resumed:
        saved = dataclasses.replace(run.config, dtype=run.resumed['model']['dtype'])
        abstract = layout.abstract_state(create_train_state, key, saved, tx, lora_rank)
        saved_sets = [name for name in means if name in run.resumed.get('weights', ())]
        abstract = abstract.replace(**{name: abstract.params for name in saved_sets})
        state = load_checkpoint(flags['out_dir'], run.iter_num, abstract)
        if run.dtype != 'float16':
            state = state.replace(loss_scale=None)
        elif state.loss_scale is None:
            state = state.replace(loss_scale=layout.device_put(initial_loss_scale()))

    # a pretrained model: its parameters are loaded, and none are initialized
    elif run.source and not run.lora:
        with in_all_processes():
            params, _ = load_start_weights(run.source, config, layout)
        state = layout.init_sharded(state_without_params, key, config, tx).replace(params=params)

    # or new ones
    else:
        state = layout.init_sharded(create_train_state, key, config, tx, lora_rank)

    # the frozen weights of LoRA
    if run.lora:
        with in_all_processes():
            frozen, checksum = load_frozen(run.lora, config, layout)
        run.lora = {**run.lora, 'checksum': checksum}
        state = state.replace(frozen=frozen)

    # a running mean begins where training, or its flag, begins
    for name in means:
        if getattr(state, name) is None:
            state = state.replace(**{name: jax.tree.map(jnp.copy, state.params)})

    if run.is_timed:  # --minutes: the numbers follow later
        flags = {**flags, 'lr_decay_iters': flags['warmup_iters'] + 1}
    schedule = layout.device_put(schedule_from_flags(flags))
    # apply_fn is a new object in every state, and a compiled step accepts only the one that it was
    # compiled with
    return state.replace(schedule=schedule, apply_fn=None)


# -----------------------------------------------------------------------------
# flags

def choose_init_from(flags):
    """Returns the flag init_from, for 'auto' 'resume' or 'scratch'. All processes must see the same
    checkpoints."""
    out_dir, init_from = flags['out_dir'], flags['init_from']
    may_resume = init_from in ('resume', 'auto') and not flags['eval_only']
    with in_all_processes():
        # a run that died may be about to save a checkpoint until its lock is free
        if may_resume and jax.process_index() == 0:
            run_folder(out_dir).wait_until_free()
    with in_all_processes():
        steps = checkpoint_steps(out_dir)
    if init_from == 'auto':
        init_from = 'resume' if steps else 'scratch'
    check_agreement('out_dir', {'init_from': init_from, 'checkpoints': steps})
    return init_from


def check_training_flags(flags, given):
    """Raises UserError for flags that are out of range, and says what has no effect, or is odd."""
    for name in ('compile', 'backend'):
        if name in given:
            print(f'--{name}={flags[name]} has no effect here: JAX always compiles, and picks its '
                  'own communication')
    check_flags(flags)
    check_given(flags, given)
    warning = rising_learning_rate(flags)
    if warning:
        print(f'warning: {warning}')


def with_whole_schedule(flags):
    """Returns the flags of a run with lr_decay_iters=0 resolved: the schedule ends at max_iters,
    with a warm-up that fits. So --max_iters alone is a full schedule."""
    if flags['lr_decay_iters']:
        return flags
    n = max(1, flags['max_iters'])
    warmup = fitting_warmup(flags['warmup_iters'], n)
    if warmup != flags['warmup_iters'] and flags['decay_lr']:
        print(f"warmup_iters={flags['warmup_iters']} does not fit into max_iters="
              f"{flags['max_iters']}: taking {warmup}")
    return {**flags, 'lr_decay_iters': n, 'warmup_iters': warmup}


def merge_resumed_flags(flags, given, saved):
    """Returns the flags of a resumed run: those `saved` in its checkpoint, overridden by those
    `given` now. Another batch_size continues elsewhere in the data.

    flags: of read_flags, for what the checkpoint lacks and for NOT_RESUMED. Raises UserError if
    the given flags ask for another optimizer or architecture."""
    out_dir = flags['out_dir']
    check_removed_flags(out_dir, saved)
    kept = {'lora_rank': 0, 'quantize': ''}  # what the first versions did not save
    for name, value in saved.items():
        if name not in flags or name in NOT_RESUMED:
            continue
        is_int_for_float = type(value) is int and type(flags[name]) is float
        if type(value) is not type(flags[name]) and not is_int_for_float:
            raise UserError(
                f'the checkpoint in {out_dir} says {name}={str(value)[:100]!r}, which is no value '
                'of this flag: it is damaged, or of another program')
        kept[name] = value
    if given.get('minutes'):
        # the command that started the run; what was fixed then stays
        if given['minutes'] != kept.get('minutes'):
            raise UserError(
                f'minutes is for a new run: leave it out, and {out_dir} continues to its '
                f"max_iters={kept['max_iters']}, or give --minutes=0 with another max_iters")
        given = {name: value for name, value in given.items() if name not in FIXED_BY_MINUTES}
    optimizer = kept.get('optimizer', 'adamw')
    if given.get('optimizer', optimizer) != optimizer:
        raise UserError(f'cannot resume with another optimizer: {out_dir} holds the state of '
                        f'{optimizer}')
    fixed = MODEL_FLAGS | {'lora_rank', 'lora_alpha', 'quantize'}
    if kept.get('position', 'learned') != 'learned':
        fixed = fixed - {'block_size'}
    for name in fixed & given.keys() & kept.keys():
        if given[name] != kept[name]:
            raise UserError(
                f'cannot resume with another architecture: {out_dir} was trained with '
                f'{name}={kept[name]!r}, not {name}={given[name]!r}')
    return {**flags, **kept, **given, 'init_from': 'resume'}


def check_removed_flags(out_dir, saved):
    """Raises UserError if a run was trained with what this version no longer has."""
    used = [name for name, off in REMOVED.items() if saved.get(name, off) != off]
    if saved.get('optimizer') in REMOVED_OPTIMIZERS:
        used.append('optimizer')
    for name in used:
        raise UserError(f'{out_dir} was trained with {name}={saved[name]}, which this version does '
                        f'not have: continue it with commit {LAST_COMMIT}')


def config_from_flags(flags, **more):
    """Makes the GPTConfig that the model's flags mean, with `more` of its fields. n_inner is the
    width of each expert too. Raises UserError for flags that do not go together."""
    names = (MODEL_FLAGS | {'dropout'}) - {'n_expert', 'n_expert_used'}
    fields = {name: flags[name] for name in names}
    layer_types = flags['layer_types'].split(',')
    fields['layer_types'] = tuple(layer_type.strip() for layer_type in layer_types)
    if flags['n_expert']:
        fields['moe'] = {
            'n_expert': flags['n_expert'],
            'n_used': flags['n_expert_used'],
            'width': flags['n_inner'] or 4 * flags['n_embd'],
            'balance': flags['expert_balance']}
    config = GPTConfig(**fields, **more)
    if config.window and 'window' not in config.layer_types:
        raise UserError(f'window={config.window} needs window layers, as in '
                        '--layer_types=window,full')
    return config


def flags_from_config(config, given=None):
    """Returns the model's flags for a config that did not come from flags; fields without a flag
    are left out. Raises UserError if flags `given` by the user, but for block_size, are others."""
    names = MODEL_FLAGS - {'n_expert', 'n_expert_used'}
    flags = {name: getattr(config, name) for name in names}
    flags['layer_types'] = ','.join(config.layer_types)
    flags['n_expert'] = config.moe.n_expert if config.moe else 0
    flags['n_expert_used'] = config.moe.n_used if config.moe else 2
    if config.moe:
        flags['expert_balance'] = config.moe.balance
    for name in sorted((MODEL_FLAGS - {'block_size'}) & (given or {}).keys()):
        if given[name] != flags[name]:
            raise UserError(f'{name}={given[name]} is not of this model, which has '
                            f'{name}={flags[name]}: leave it out')
    return flags


def for_this_run(config, flags, given, dtype):
    """Returns the config of a trained model with the dropout, the dtype and, if it is given, the
    expert_balance of this run."""
    moe = config.moe
    if moe and 'expert_balance' in given:
        moe = dataclasses.replace(moe, balance=flags['expert_balance'])
    return dataclasses.replace(config, dropout=flags['dropout'], dtype=dtype, moe=moe)


def schedule_from_flags(flags):
    """Makes the Schedule of the learning rate that the flags mean. Raises UserError if there is
    none."""
    return create_learning_rate_schedule(
        flags['learning_rate'], decay_lr=flags['decay_lr'], warmup_iters=flags['warmup_iters'],
        lr_decay_iters=flags['lr_decay_iters'], min_lr=flags['min_lr'],
        lr_schedule=flags['lr_schedule'])
