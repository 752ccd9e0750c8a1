"""Decides where a run starts, from its flags: from scratch, from a pretrained model, or where an
earlier run ended.

What a resume restores, from where, and by which function (out_dir/ckpt/<iteration> holds the
checkpoint; `meta` is its JSON part):

| what | from | by |
|---|---|---|
| flags except NOT_RESUMED; those given now win | meta | `merge_resumed_flags` |
| which checkpoint: the latest that is intact | out_dir | `choose_checkpoint` |
| --deterministic, before jax starts | out_dir/config.json | `configure_process` |
| the sizes of the mesh; other sizes if these do not fit the present devices | flags | `fit_sizes` |
| the model's config; dropout, dtype and expert_balance are from the flags | meta | `for_this_run` |
| the tokenizer; UserError if the data set has other tokens | meta | `continued_model` |
| LoRA's base (or --base), rank, alpha and checksum | meta | `continued_model` |
| iteration, best validation loss, wandb's id | meta | `Run` |
| parameters, or LoRA's updates | checkpoint | `start_state` |
| the mean of --ema; if it is missing, it starts at the parameters | checkpoint | `start_state` |
| the optimizer's state and the number of updates | checkpoint | `start_state` |
| float16's loss scale; if it is missing, the initial scale | checkpoint | `start_state` |
| LoRA's frozen weights; UserError if their checksum has changed | the base | `start_state` |
| metrics.jsonl up to that iteration | out_dir | `MetricsLog` |
| the data: those of the manifest, unless --dataset is given | meta | `open_manifest` |
| the learning rate | nothing | a function of the number of updates |
| data order, dropout | nothing | functions of seed and iteration |
| dtype=auto, attention=auto | nothing | chosen for the present devices |

A resume leaves out damaged checkpoints. `lock_out_dir` renames them to <iteration>.damaged.
"""
import dataclasses
import math
import os

import jax
import jax.numpy as jnp

from jax_devices.layout import MeshSizes
from jax_devices.processes import check_agreement, in_all_processes
from jax_devices.setup import setup_jax_environment
from jax_flags import (
    UserError, ceil_div, check_flags, check_given, check_needs, decays_learning_rate,
    did_you_mean, is_in_bucket, is_on_command_line, read_ends, refuse, rising_learning_rate, warn)
from jax_hub.folders import PUBLISHED, is_hub_name
from jax_run.checkpoints import (
    checkpoint_steps, choose_checkpoint, load_checkpoint, run_folder)
from jax_run.data import (
    load_mixture_meta, remedy_for_tokens, same_tokens, with_template_of)
from jax_run.model import (
    MODEL_FLAGS, Model, config_from_flags, flags_from_config, for_this_run, with_block_size)
from jax_run.program import Options, assemble
from jax_train_utils import (
    create_learning_rate_schedule, create_train_state, fitting_warmup, initial_loss_scale)
from jax_transformer import WEIGHTS, GPTConfig

# the flags that a resumed run does not take from its checkpoint
NOT_RESUMED = (
    'device', 'overwrite', 'eval_only', 'verify', 'out_dir', 'coordinator_address', 'num_processes',
    'process_id', 'profile', 'base')

# removed flags of earlier versions, and their values for off; LAST_COMMIT is the last commit that
# has them
REMOVED = {'embedding_lr': 1.0, 'head_lr': 1.0, 'vector_lr': 1.0}
REMOVED_OPTIMIZERS = ('normuon',)
LAST_COMMIT = 'af04d36'

NO_LOSS = 1e9  # the best validation loss before the first evaluation

# the flags that --minutes sets, by the measured speed
FIXED_BY_MINUTES = ('max_iters', 'lr_decay_iters', 'warmup_iters', 'earlier_ends')


@dataclasses.dataclass(frozen=True)
class Run:
    """The settings with which a run starts: its flags, devices, model and data sets, and the
    checkpoint that it resumes. A Run holds neither weights nor data. open_run makes it."""
    flags: dict  # all of them, as the checkpoints of this run hold them
    given: dict  # the flags that the user gave
    devices: list
    dtype: str  # dtype of computation; flags['dtype'] may be 'auto'
    resumed: dict | None  # the metadata of the checkpoint that is continued
    shares: dict  # {folder of a data set: fraction}
    meta: dict  # what load_mixture_meta returns
    model: Model
    has_length: bool  # whether the number of iterations is known; if not, --minutes measures it

    @property
    def iter_num(self):
        """The number of iterations made before this run starts."""
        return self.resumed['iter_num'] if self.resumed else 0

    @property
    def best_val_loss(self):
        """The lowest validation loss in the checkpoint that is resumed, NO_LOSS for a new run."""
        return self.resumed['best_val_loss'] if self.resumed else NO_LOSS

    @property
    def has_pairs(self):
        """Whether the data set has pairs of answers."""
        return self.meta['kind'] == 'pairs'

    def with_iterations(self, n):
        """Returns the Run with max_iters n, a schedule that ends after n iterations, and a warm-up
        that fits."""
        warmup = fitting_warmup(self.flags['warmup_iters'], n)
        flags = {**self.flags, 'max_iters': n, 'lr_decay_iters': n, 'warmup_iters': warmup,
                 'earlier_ends': ''}
        return dataclasses.replace(self, flags=flags, has_length=True)

    def with_end(self, n, iter_num):
        """Returns the Run with max_iters = n, counted from the start of the run. The schedule of
        the learning rate changes from iteration iter_num on, and then ends at iteration n, or just
        after the warm-up if n is not beyond it. The iterations before iter_num keep the schedule
        that they had."""
        decay_iters = max(n, self.flags['warmup_iters'] + 1)
        earlier = f"{iter_num}:{self.flags['lr_decay_iters']}"
        ends = ','.join(filter(None, [self.flags['earlier_ends'], earlier]))
        flags = {**self.flags, 'max_iters': n, 'lr_decay_iters': decay_iters, 'earlier_ends': ends}
        return dataclasses.replace(self, flags=flags)

    def with_lora(self, lora):
        """Returns the Run with another description of LoRA. lora: as in Model."""
        return dataclasses.replace(self, model=dataclasses.replace(self.model, lora=lora))


def open_run(flags, given):
    """Decides what the run starts from: scratch, a pretrained model, LoRA on one, or a checkpoint.

    flags, given: what read_flags returns. Returns a Run. Writes nothing. All processes call this
    function, and must see the same checkpoints. Raises UserError for: flags that are out of range;
    flags that ask for another architecture or optimizer than the checkpoint has; missing devices; a
    missing model or data set; a model and a data set that do not fit each other."""
    # the flags; a resumed run has its checkpoint's, overridden by the flags given now
    flags = {**flags, 'init_from': choose_init_from(flags)}
    resumed = None
    if flags['init_from'] == 'resume':
        _, resumed = choose_checkpoint(flags['out_dir'])
        # flags that the checkpoint does not have yet get their values from its model
        model_flags = flags_from_config(GPTConfig(**resumed['model']))
        flags = merge_resumed_flags(flags, given, {**model_flags, **resumed['flags']})
    if resumed or not flags['minutes']:
        flags = with_whole_schedule(flags)
    check_flags(flags)
    check_given(flags, given)
    warning = rising_learning_rate(flags)
    if warning:
        print(f'warning: {warning}')

    # the devices; a resumed run takes a layout that fits them
    with in_all_processes():
        devices, dtype, reason = setup_jax_environment(flags['device'], flags['dtype'])
    if resumed:
        sizes = {name: flags[name] for name in MeshSizes._fields}
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
        shares, meta = load_mixture_meta(flags['dataset'])
    if resumed:
        model = continued_model(flags, given, resumed, meta, dtype)
        if not flags['verify']:
            print_what_is_left(flags, given, resumed['iter_num'])
    elif flags['init_from'] == 'scratch':
        model = new_model(flags, meta, dtype)
    else:
        from jax_run.pretrained import pretrained_model  # scratch needs none of it
        model, flags = pretrained_model(flags, given, meta, dtype)

    # with --minutes, the length of a new run has yet to be measured; also that of a run that an
    # earlier version saved before it was measured
    is_known = bool(resumed and resumed['flags']['max_iters'])
    has_length = is_known or not flags['minutes']
    return Run(flags, given, devices, dtype, resumed, shares, meta, model, has_length)


def fit_sizes(sizes, given, n_devices, n_embd):
    """Returns the sizes of the mesh's axes, {'fsdp', 'tensor', 'expert', 'context'}, for a resumed
    run on n_devices devices. If the product of `sizes` divides n_devices, returns `sizes`.
    Otherwise:
    - a size with its name in `given` stays;
    - an fsdp above 1 that is not in `given` becomes the greatest common divisor of two numbers: the
      width n_embd, and n_devices divided by the sizes that stay;
    - every other size becomes 1.

    sizes: the sizes that the flags of the run ask for. given: the flags that the user gave with the
    command to resume. Example: fsdp=4, tensor=2 on two devices, with nothing given, becomes fsdp=2,
    tensor=1."""
    if n_devices % max(1, math.prod(sizes.values())) == 0:
        return sizes
    fitting = {name: size if name in given else 1 for name, size in sizes.items()}
    # fsdp takes the remaining devices, as far as it divides the width
    if 'fsdp' not in given and sizes['fsdp'] > 1:
        left = n_devices // math.gcd(n_devices, math.prod(fitting.values()))
        fitting['fsdp'] = math.gcd(left, n_embd)
    return fitting


def check_init_from(source):
    """Raises UserError if `source`, the flag init_from, is none of these: a known word; a possible
    name on the hub; a gs:// URL; a file or folder that exists. Is called before the data is
    opened."""
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


def new_model(flags, meta, dtype):
    """Returns a new Model, to be trained from scratch on the data set that `meta` describes. dtype:
    the dtype of computation."""
    tokenizer = meta['tokenizer']
    vocab_size = meta['vocab_size']
    if tokenizer['kind'] != 'char':
        # as nanoGPT pads GPT-2's 50257 to 50304, for efficiency
        vocab_size = ceil_div(vocab_size, 64) * 64
    print(f'initializing a new model from scratch, vocab_size {vocab_size}')
    return Model(config_from_flags(flags, vocab_size=vocab_size, dtype=dtype), tokenizer)


def continued_model(flags, given, resumed, meta, dtype):
    """Returns the Model of a run that is resumed. given: the flags that the user gave. resumed: the
    metadata of the run's checkpoint. meta: what load_mixture_meta returns. dtype: the dtype of
    computation. Raises UserError if the tokenizer of the data set gives other ids than the run's
    tokenizer."""
    out_dir = flags['out_dir']

    # the model; only without learned positions may block_size be another
    config = GPTConfig(**resumed['model'])
    if config.position != 'learned':
        config = with_block_size(config, flags['block_size'], out_dir)
    config = for_this_run(config, flags, given, dtype)
    lora = resumed.get('lora')
    if flags['base']:
        from jax_run.restore import move_base
        lora = move_base(lora, flags['base'])

    # its tokenizer; the data set may have more text by now
    tokenizer = resumed['tokenizer']
    if not same_tokens(meta['tokenizer'], tokenizer):
        remedy = remedy_for_tokens(tokenizer, os.path.join(out_dir, 'tokenizer'))
        raise UserError(f'{out_dir} was trained with other tokens than those of dataset '
                        f"{flags['dataset']}: their ids mean something else; {remedy}")
    if 'dataset' in given:
        tokenizer = with_template_of(meta, tokenizer, flags['dataset'])
    if dtype != resumed['model']['dtype']:
        print(f"this run has computed in {resumed['model']['dtype']} so far, and continues in "
              f'{dtype}')
    print(f"resuming {out_dir} at iteration {resumed['iter_num']}, best val loss "
          f"{resumed['best_val_loss']:.4f}")
    return Model(config, tokenizer, lora)


def print_what_is_left(flags, given, iter_num):
    """Prints how to make a resumed run longer, if the run has no iterations left. If max_iters is
    beyond the end of the schedule, and the user has not given lr_decay_iters, prints that the
    learning rate stays at min_lr. given: the flags that the user gave. iter_num: the iteration of
    the resume."""
    max_iters, decay_iters = flags['max_iters'], flags['lr_decay_iters']
    decays = decays_learning_rate(flags)
    if iter_num >= max_iters:
        longer = f'--max_iters={2 * iter_num}'
        if decays:
            longer += f' --lr_decay_iters={2 * iter_num}'
        print(f'already at iteration {iter_num} (max_iters={max_iters}); a longer run: {longer}')
    elif decays and decay_iters < max_iters and 'lr_decay_iters' not in given:
        first = max(decay_iters, iter_num)
        print(f"iterations {first} to {max_iters} train at min_lr={flags['min_lr']:g}, because the "
              f'schedule ends at lr_decay_iters={decay_iters}; a longer one: '
              f'--lr_decay_iters={max_iters}')


def check_fits(run, micro_batch):
    """Raises UserError if the model, the data and the flags do not fit each other. Is called before
    the data is read.

    micro_batch: the number of sequences that a device computes at a time."""
    flags, config = run.flags, run.model.config
    dataset, batch_size = flags['dataset'], flags['batch_size']
    # a tokenizer may have tokens that the model lacks, if the data do not use them. For example,
    # Gemma 3's tokenizer has a token for images, and its text models have none
    largest = run.meta['max_id']
    n_needed = run.meta['vocab_size'] if largest is None else largest + 1
    if run.has_length:
        for until in [0, *read_ends(flags['earlier_ends'])]:
            schedule_from_flags(flags, until)  # refuses one that cannot be
    check_needs('train_jax', {**flags, 'is_pairs': run.has_pairs}, run.given)
    refuse([
        (n_needed > config.vocab_size,
         f'dataset {dataset} needs {n_needed} tokens, the model has only {config.vocab_size}'),
        (flags['quantize'] and config.moe,
         'quantize=int8 does not train models with experts; use --quantize='),
        (run.has_pairs and not run.model.lora,
         f'dataset {dataset} has pairs of answers, which LoRA learns from: see '
         'config/finetune_dpo.py'),
        (run.has_pairs and micro_batch % 2,
         'the two sequences of a pair go to one device: '
         f'batch_size={batch_size} must be a multiple of {2 * batch_size // micro_batch}')])


def open_program(run, data, layout, objective):
    """Builds the Program of a run from its flags, its data, its model and the devices. Raises
    UserError if the devices cannot split or compute the model. objective: see assemble.

    The Program trains with sequences of flags['block_size'] tokens. A pretrained or resumed model
    with RoPE may support longer sequences. Then run.model.config.block_size is larger than the
    flag. Checkpoints store run.model.config, so training with shorter sequences does not reduce the
    block_size of the model."""
    config = dataclasses.replace(run.model.config, block_size=run.flags['block_size'])
    program = assemble(
        config, layout, Options.from_flags(run.flags), objective, packed=data.train.is_packed)
    for kind, reason in program.reasons.items():
        print(f'{kind}: {getattr(program.config, kind)} ({reason})')
    return program


def state_without_params(*args):
    """Returns create_train_state(*args) without the parameters. Under jit, the parameters are then
    not computed at all."""
    return create_train_state(*args).replace(params=None)


def start_state(run, program):
    """Makes the first TrainState of a run. program: the run's Program. A resumed run has the state
    of its checkpoint. Any other run has a new state, with the parameters of the pretrained model if
    there is one. With LoRA, the parameters of the base model are in the state as frozen parameters.

    Returns (state; run). The returned Run differs from `run` only with LoRA: its model.lora has the
    checksum of the base model."""
    flags, model = run.flags, run.model
    config, layout, tx = program.config, program.layout, program.tx
    key = jax.random.key(flags['seed'])
    lora_rank = model.lora['rank'] if model.lora else 0
    means = [name for name in WEIGHTS[1:] if flags[name]]

    # the state of a checkpoint, in the form that it was saved in: float16 has a loss scale
    if run.resumed:
        saved = dataclasses.replace(model.config, dtype=run.resumed['model']['dtype'])
        abstract = layout.abstract_state(create_train_state, key, saved, tx, lora_rank)
        saved_sets = [name for name in means if name in run.resumed.get('weights', ())]
        abstract = abstract.replace(**{name: abstract.params for name in saved_sets})
        state = load_checkpoint(flags['out_dir'], run.iter_num, abstract)
        if run.dtype != 'float16':
            state = state.replace(loss_scale=None)
        elif state.loss_scale is None:
            state = state.replace(loss_scale=layout.device_put(initial_loss_scale()))

    # a pretrained model: its parameters are loaded, and none are initialized
    elif model.source and not model.lora:
        from jax_run.load import load_start_weights
        with in_all_processes():
            params, checksum = load_start_weights(model.source, config, layout)
        check_agreement('weights', {'their checksum': checksum})
        state = layout.init_sharded(state_without_params, key, config, tx).replace(params=params)

    # or new ones
    else:
        state = layout.init_sharded(create_train_state, key, config, tx, lora_rank)

    # the frozen weights of LoRA
    if model.lora:
        from jax_run.load import load_frozen
        with in_all_processes():
            frozen, checksum = load_frozen(model.lora, config, layout)
        check_agreement('weights', {'their checksum': checksum})
        run = run.with_lora({**model.lora, 'checksum': checksum})
        state = state.replace(frozen=frozen)

    # a running mean (--ema) that the state lacks begins with the present parameters
    for name in means:
        if getattr(state, name) is None:
            state = state.replace(**{name: jax.tree.map(jnp.copy, state.params)})

    if not run.has_length:  # --minutes: a valid schedule, until the length is measured
        flags = {**flags, 'lr_decay_iters': flags['warmup_iters'] + 1}
    schedule = layout.device_put(schedule_from_flags(flags, run.iter_num))
    return state.replace(schedule=schedule), run


# -----------------------------------------------------------------------------
# flags

def choose_init_from(flags):
    """Returns the flag init_from. 'auto' becomes 'resume' if out_dir has a checkpoint, else
    'scratch'. Raises UserError if the processes do not see the same checkpoints.

    If out_dir is in a bucket and the run may be resumed, first waits for the lock of out_dir,
    because the run that holds the lock may still save a checkpoint. The wait ends when that run
    frees the lock, or when the lock of a dead run expires. If the lock is renewed instead, that run
    still trains, and UserError is raised."""
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


def with_whole_schedule(flags):
    """Returns the flags of a run, in which an lr_decay_iters of 0 (its default) has become
    max_iters. So --max_iters alone gives a full schedule. A warm-up that does not fit into this
    schedule becomes shorter. Returns flags with another lr_decay_iters unchanged."""
    if flags['lr_decay_iters']:
        return flags
    n = max(1, flags['max_iters'])
    warmup = fitting_warmup(flags['warmup_iters'], n)
    if warmup != flags['warmup_iters'] and flags['decay_lr']:
        print(f"warmup_iters={flags['warmup_iters']} does not fit into max_iters="
              f"{flags['max_iters']}: taking {warmup}")
    return {**flags, 'lr_decay_iters': n, 'warmup_iters': warmup}


def merge_resumed_flags(flags, given, saved):
    """Returns the flags of a resumed run: `saved`, overridden by `given`. The place in the data is
    computed from the iteration and batch_size. So if `given` has another batch_size, the run
    continues at another place than where it stopped.

    flags: all flags, as read_flags returns them; used for the names in NOT_RESUMED and for flags
    that the checkpoint lacks. given: the flags of the command line and the config file. saved: the
    flags in the checkpoint. Raises UserError if `given` changes the optimizer, the architecture or
    minutes, or if `saved` has flags that were removed or a value of a wrong type."""
    out_dir = flags['out_dir']
    check_removed_flags(out_dir, saved)
    kept = {'lora_rank': 0, 'quantize': ''}  # not saved by the first versions
    for name, value in saved.items():
        if name not in flags or name in NOT_RESUMED:
            continue
        is_int_for_float = type(value) is int and type(flags[name]) is float
        if type(value) is not type(flags[name]) and not is_int_for_float:
            raise UserError(
                f'the checkpoint in {out_dir} says {name}={str(value)[:100]!r}, which is no value '
                'of this flag: it is damaged, or of another program')
        kept[name] = value
    if is_on_command_line('checkpoint') and given['checkpoint'] == 'best':
        warn('checkpoint=best has no effect: a resume continues from the latest checkpoint')
    if given.get('minutes'):
        # the command that started the run; its choices stay
        if given['minutes'] != kept.get('minutes'):
            raise UserError(
                f'minutes is for a new run: leave it out, and {out_dir} continues to its '
                f"max_iters={kept['max_iters']}, or give --minutes=0 with another max_iters")
        for name in FIXED_BY_MINUTES:
            if is_on_command_line(name) and given[name] != kept.get(name):
                warn(f'{name}={given[name]} has no effect: --minutes has set {kept.get(name)}; add '
                     '--minutes=0 to change it')
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
    """Raises UserError if a run was trained with a flag or an optimizer that this version lacks.
    saved: the flags in the run's checkpoint."""
    used = [name for name, off in REMOVED.items() if saved.get(name, off) != off]
    if saved.get('optimizer') in REMOVED_OPTIMIZERS:
        used.append('optimizer')
    for name in used:
        raise UserError(f'{out_dir} was trained with {name}={saved[name]}, which this version does '
                        f'not have: continue it with commit {LAST_COMMIT}')


def schedule_from_flags(flags, iter_num):
    """Makes the learning rate Schedule that applies at iteration iter_num. It is the same for all
    iterations, unless --minutes moved the end of the schedule while the run trained, see
    schedule_end. Raises UserError if the flags are not valid."""
    return create_learning_rate_schedule(
        flags['learning_rate'], decay_lr=flags['decay_lr'], warmup_iters=flags['warmup_iters'],
        lr_decay_iters=schedule_end(flags, iter_num), min_lr=flags['min_lr'],
        lr_schedule=flags['lr_schedule'])


def schedule_end(flags, iter_num):
    """Returns the iteration at which the learning rate schedule ends, as it was planned when
    iteration iter_num was trained.

    The end is lr_decay_iters, unless --minutes moved the end while the run trained. An iteration
    before a move keeps the end that was valid at that time. For example, earlier_ends='300:900' and
    lr_decay_iters=1200 say that --minutes moved the end from 900 to 1200 at iteration 300. Then the
    end is 900 for iterations 0 to 299, and 1200 from iteration 300 on."""
    for until, end in read_ends(flags['earlier_ends']).items():
        if iter_num < until:
            return end
    return flags['lr_decay_iters']


def with_schedule(state, run, iter_num, layout):
    """Returns the TrainState `state` with the learning rate schedule that applies from iteration
    iter_num on. Returns `state` unchanged, except at the iterations at which --minutes has changed
    the end of the schedule (see schedule_end)."""
    if iter_num not in read_ends(run.flags['earlier_ends']):
        return state
    return state.replace(schedule=layout.device_put(schedule_from_flags(run.flags, iter_num)))
