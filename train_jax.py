"""Trains a GPT on all devices it finds, from one CPU upwards.

$ python train_jax.py config/train_pystdlib_char.py
$ python train_jax.py config/train_shakespeare_char.py --batch_size=32 --device=cpu
$ python train_jax.py --init_from=resume --out_dir=out-pystdlib-char   # resumes that run, bit for bit
"""
import dataclasses
import functools
import math
import os
import sys
import time
from pathlib import Path

from jax_flags import (
    UserError, ceil_div, check_flags, check_given, check_needs, exit_if_peer_died, read_flags, start_script, write_json)

# -----------------------------------------------------------------------------
# The defaults train GPT-2 (124M) on OpenWebText. A config file and --name=value override them, in the order given.
# I/O
out_dir = 'out' # checkpoints, config.json, metrics.jsonl and loss.png go here
overwrite = False # delete the checkpoints that a run from scratch finds in out_dir, instead of refusing to start
eval_interval = 2000 # evaluate (and save) every this many iterations, and at the end
log_interval = 1 # print and record every this many iterations
eval_iters = 200 # batches per evaluation and split, the same batches every time
sample_prompt = '' # continue this text at every evaluation, as sample_jax.py would from that checkpoint; '' is off
eval_only = False # if True, evaluate once and stop; nothing is written
always_save_checkpoint = True # if False, an evaluation only saves when the validation loss has improved
save_interval = 0 # also save every this many iterations; 0 is off
keep = 2 # keep the latest this many checkpoints, and the best
init_from = 'scratch' # 'resume', 'auto' (resume, or scratch), 'gpt2', Hugging Face folder or name, ckpt.pt, .gguf
# wandb logging
wandb_log = False # log to Weights & Biases; with WANDB_MODE=offline it needs no account
wandb_project = 'owt' # name of the project at wandb
wandb_run_name = 'gpt2' # name of the run at wandb
# data
dataset = 'openwebtext' # the folder under data/ whose prepare.py has been run; 'web:0.7,code:0.3' mixes some
gradient_accumulation_steps = 5 * 8 # micro-batches per update, all devices together
batch_size = 12 # sequences per micro-batch
block_size = 1024 # tokens per sequence
# model
n_layer = 12 # transformer blocks
n_head = 12 # attention heads
n_embd = 768 # width
dropout = 0.0 # on embeddings, attention and residuals; 0 for pretraining, 0.1 or more where data is scarce
bias = False # in LayerNorm and Dense layers; True is GPT-2, False a bit faster
# what newer models do differently, one by one; config/train_llama_char.py combines them
norm = 'layer' # 'layer' (LayerNorm), or 'rms' (RMSNorm) as in Llama
position = 'learned' # 'learned' position embedding, or 'rope'
n_kv_head = 0 # heads of keys and values (GQA if fewer than n_head); 0 is n_head
qk_norm = '' # 'learned' normalizes queries and keys, as Qwen3 does
layer_types = 'full' # 'full' or 'window' attention of each layer, as in 'window,window,full'; a short pattern repeats
window = 0 # sliding-window size of the 'window' layers, the current token included
mlp = 'gelu' # 'gelu' with two matrices, or 'swiglu' or 'geglu' with three
n_inner = 0 # width of the MLP, or of each expert; 0 is 4 * n_embd
tied_head = True # the head is the token embedding (weight tying); False is a matrix of its own
n_expert = 0 # MLPs per layer of which a token uses n_expert_used (mixture of experts); 0 is one MLP for all
n_expert_used = 2 # experts per token
expert_balance = 0.01 # weight of the loss that keeps the experts equally busy
# LoRA, for a pretrained model
lora_rank = 0 # freeze the weights, train updates of this rank of the matrices of attention and MLPs; 0 trains all
lora_alpha = 16.0 # an update counts lora_alpha / lora_rank times
base = '' # where the pretrained model of a LoRA run that is resumed is now, if it has moved
quantize = '' # 'int8': the frozen weights, in a quarter of the memory
# preferences, for a data set of pairs: DPO, of which LoRA's base is the reference
beta = 0.1 # how much the margin between chosen and rejected answers counts; higher stays closer to the base
length_normalized = False # compare log probabilities per token of an answer, not of answers
# optimizer
optimizer = 'adamw' # or 'muon', for the blocks' matrices: often as good in half of the iterations
learning_rate = 6e-4 # the highest, reached after warmup_iters
max_iters = 600000 # total number of updates
minutes = 0.0 # end after this long, all included: sets max_iters and lr_decay_iters by the measured speed; 0 is off
weight_decay = 1e-1 # on matrices and embeddings, not on biases and norms
beta1 = 0.9 # decay of AdamW's mean of gradients
beta2 = 0.95 # decay of AdamW's mean of squared gradients
grad_clip = 1.0 # maximum global norm of the gradients; 0 does not clip
# learning rate schedule
decay_lr = True # warm up, then follow lr_schedule; False is learning_rate throughout
lr_schedule = 'cosine' # or 'linear', 'wsd' (decays in the last fifth only), 'constant'
warmup_iters = 2000 # iterations of linear warm-up
lr_decay_iters = 600000 # iteration at which the schedule reaches min_lr; usually max_iters
min_lr = 6e-5 # lowest learning rate; usually learning_rate / 10
# system
seed = 1337 # of weights, batches and dropout
device = 'auto' # 'auto' (the best there is), 'cpu', 'cuda', 'tpu': all of the kind; 'cuda:1': one of them
dtype = 'auto' # 'float32', 'bfloat16', 'float16' (with loss scaling); auto is bfloat16 where the hardware is fast at it
attention = 'auto' # 'cudnn' (NVIDIA), 'splash' (TPU), 'chunked' (some queries at a time), 'xla' (plain); auto says why
loss_chunk = 0 # positions whose logits are materialized at a time, to save memory with a large vocabulary; 0 is all
scan_layers = False # compile one block and loop over it: compiles faster; dropout draws other masks
remat = 'none' # gradient checkpointing: 'dots' saves matmul outputs, 'full' nothing; CPUs need scan_layers (jax 0.10)
fsdp = 1 # shard parameters and optimizer state over this many devices (ZeRO-3)
zero = 0 # shard over all replicas: 1 the optimizer state (ZeRO-1), 2 the gradients in addition (ZeRO-2)
tensor = 1 # shard heads, MLP width and vocabulary over this many devices (tensor parallelism)
expert = 1 # shard the experts, and the batch with them, over this many devices
context = 1 # shard each sequence over this many devices (context parallelism), for a long block_size
coordinator_address = '' # host:port of process 0 of several; 'auto' on a TPU pod; Slurm and Open MPI need neither
num_processes = 0 # number of processes that train together
process_id = -1 # number of this process, from 0
deterministic = False # GPUs give the same bits in every run, which makes them slower; CPUs do so anyway
profile = False # trace three iterations after the first ones into out_dir/profile, for TensorBoard or Perfetto
compile = True # has no effect: JAX always compiles
backend = 'nccl' # has no effect: JAX picks its own
# -----------------------------------------------------------------------------
started = time.perf_counter()
start_script()
flags, given = read_flags(__file__, globals())  # all flags of the block above, and those that the user gave
check_flags(flags)
if init_from not in ('resume', 'auto'):
    check_given(flags, given)

# jax is imported after the flags, so that --help and a wrong flag are answered at once
import flax
import jax
import jaxlib
import numpy as np

from jax_devices.parallel import setup_distributed_training, split_batch
from jax_devices.processes import StopSignal, check_agreement, in_all_processes, initialize_distributed, signal_name
from jax_devices.setup import Profile, Stopwatch, TimeBudget, configure_process, device_peak_flops, is_synchronous
from jax_files.checkpoints import (
    add_val_loss, checkpoint_steps, finish_checkpoints, load_checkpoint, lock_out_dir, open_checkpoints,
    save_checkpoint)
from jax_files.data import (
    DataChanged, counted_share, describe_data, draw_batch, load_mixture, load_mixture_meta, load_pairs)
from jax_files.metrics import MetricsLog, plot_losses
from jax_files.tokenizers import check_tokens, copy_tokenizer, describe_tokenizer, load_token_bytes, same_tokens
from jax_files.weight_files import find_config_json, keep_config_json, local_path
from jax_lora import count_frozen, create_lora_state, full_path, load_frozen, load_weights, model_params, move_base
from jax_log import IterationLog, progress_bar, start_wandb
from jax_ops.choose_attention import choose_attention
from jax_pretrained import open_model
from jax_text import create_sampler, sample_while_training
from jax_train_utils import (
    all_finite, config_from_flags, dpo, estimate_losses, flags_from_config, for_this_run, language_model,
    make_eval_step, make_train_step, optimizer_from_flags, resolve_flags)
from jax_transformer import GPTConfig, count_params, create_train_state, estimate_mfu, initial_loss_scale

configure_process(flags['device'], flags['deterministic'], flags['init_from'], flags['out_dir'])
clock = Stopwatch()
imports_s = clock.start - started
initialize_distributed(flags['coordinator_address'], flags['num_processes'], flags['process_id'])
stop = StopSignal(nothing_to_save=jax.process_count() == 1)  # several processes stop together, in the loop
master = jax.process_index() == 0  # the process that prints and writes the logs
if not master:
    sys.stdout = open(os.devnull, 'w')

flags, resumed, devices, compute_dtype = resolve_flags(flags, given)
globals().update(flags)
dtype = compute_dtype  # flags, which the checkpoints hold, may say auto
resumed_at = resumed['iter_num'] if resumed else None
iter_num = resumed_at or 0
best_val_loss = resumed['best_val_loss'] if resumed else 1e9
wandb_id = resumed['wandb_id'] if resumed else None
parallel = setup_distributed_training(devices, fsdp, tensor, expert, context, zero)
n_micro, micro_batch = split_batch(gradient_accumulation_steps, batch_size, parallel.n_data_shards)

# model: of the checkpoint, from scratch, or pretrained (block_size may be less than the model's)
shares, data = in_all_processes(load_mixture_meta, dataset, Path(__file__).parent / 'data')
lora = None  # saved in the checkpoints, which hold the updates alone
if resumed:
    config = for_this_run(GPTConfig(**resumed['model']), flags, given, dtype)
    tokenizer = resumed['tokenizer']
    lora = move_base(resumed.get('lora'), base)
    if not same_tokens(data['tokenizer'], tokenizer):
        raise UserError(f'{out_dir} was trained with other tokens than those of dataset {dataset}: '
                        'their ids mean something else')
    if dtype != resumed['model']['dtype']:
        print(f"this run has computed in {resumed['model']['dtype']} so far, and continues in {dtype}")
    print(f'resuming {out_dir} at iteration {iter_num}, best val loss {best_val_loss:.4f}')
elif init_from == 'scratch':
    tokenizer = data['tokenizer']
    vocab_size = data['vocab_size']
    if tokenizer['kind'] != 'char':
        vocab_size = ceil_div(vocab_size, 64) * 64  # as nanoGPT pads GPT-2's 50257 to 50304, for efficiency
    config = config_from_flags(flags, vocab_size=vocab_size, dtype=dtype)
    print(f'initializing a new model from scratch, vocab_size {vocab_size}')
else:
    path = local_path(init_from)
    config = in_all_processes(open_model, path)[0]
    if block_size > config.block_size and 'block_size' in given:
        raise UserError(f'block_size={block_size}, but {init_from} knows only {config.block_size} positions')
    block_size = min(block_size, config.block_size)
    if config.position == 'learned':
        config = dataclasses.replace(config, block_size=block_size)
    config = for_this_run(config, flags, given, dtype)
    flags.update(flags_from_config(config, given) | {'block_size': block_size})  # in the checkpoints, for a resume
    known = describe_tokenizer(path, config.vocab_size)
    tokenizer = check_tokens(data['tokenizer'], dataset, known, init_from, config.vocab_size)
    if lora_rank:
        lora = {'base': full_path(init_from), 'rank': lora_rank, 'alpha': lora_alpha, 'quantize': quantize,
                'checksum': None}
    print(f'initializing from {init_from}, dropout {dropout}, block_size {block_size}')
if data['vocab_size'] > config.vocab_size:
    raise UserError(f"dataset {dataset} has a vocabulary of {data['vocab_size']}, the model only {config.vocab_size}")
if quantize and config.moe:
    raise UserError('quantize=int8 does not train models with experts; use --quantize=')
is_pairs = data['kind'] == 'pairs'
check_needs('train_jax', flags | {'is_pairs': is_pairs}, given)
if is_pairs and not lora:
    raise UserError(f'dataset {dataset} has pairs of answers, which LoRA learns from: see config/finetune_dpo.py')
if is_pairs and micro_batch % 2:
    raise UserError(f'the two sequences of a pair go to one device: batch_size={batch_size} must be a multiple of '
                    f'{2 * batch_size // micro_batch}')
sets = in_all_processes(load_mixture, shares, 0 if is_pairs else block_size)
sampler = in_all_processes(create_sampler, sample_prompt, config, tokenizer, devices[0])
token_bytes = load_token_bytes(data['tokenizer'], data['vocab_size'])
if is_pairs or int(parallel.max_over_processes(int(token_bytes is None))):  # no process has any then
    token_bytes = None
check_agreement('data', describe_data(sets, data['tokenizer']))
if is_pairs:
    pairs = in_all_processes(load_pairs, *shares, *sets[0][2:], block_size, length_normalized)
    sets = [sets[0]._replace(splits=pairs, masks={})]
masks = [item for one in sets for item in one.masks.items()]
for split, mask in masks:
    counted_share(mask, block_size, eval_iters * batch_size, split)  # before anything is written or compiled
is_packed = any(mask.ndim == 2 for _, mask in masks)
architecture = config.architecture()  # saved in the checkpoints: a RoPE model keeps its context
config = dataclasses.replace(config, block_size=block_size)  # training sees sequences of this length only
implementation, attention_reason = choose_attention(attention, config, devices[0], tensor=tensor, context=context,
                                                    deterministic=deterministic, packed=is_packed)
config = dataclasses.replace(config, attention=implementation, scan_layers=scan_layers, remat=remat)
print(f'attention: {implementation} ({attention_reason})')
parallel.validate(config)

# optimizer and state
budget = TimeBudget(minutes, started) if minutes and not max_iters else None  # until fix_iterations sets max_iters
schedule, lrs, tx = optimizer_from_flags(flags)
objective = dpo(beta) if is_pairs else language_model
train_step = parallel.train_step(make_train_step(
    config, objective, parallel, schedule, seed=seed, grad_clip=grad_clip, loss_chunk=loss_chunk))
eval_step = parallel.eval_step(make_eval_step(config, objective, parallel, loss_chunk=loss_chunk))

# out_dir: eval_only writes nothing, and an earlier run is never overwritten by mistake
if not eval_only:
    earlier = () if resumed else checkpoint_steps(out_dir)
    if earlier and not overwrite:
        raise UserError(f'{out_dir} holds a run at iteration {earlier[0]}; continue it with --init_from=resume, choose '
                        'another --out_dir, or delete its checkpoints with --overwrite=True')
    lock = lock_out_dir(out_dir, resumed_at)


def build_state():
    """The state to start from: the checkpoint's, or new, with the parameters of the pretrained model if there is one;
    with LoRA, that model's are frozen, and their checksum is remembered."""
    key = jax.random.key(seed)
    create = functools.partial(create_lora_state, rank=lora['rank']) if lora else create_train_state
    if resumed:
        saved = GPTConfig(**resumed['model'])
        state = load_checkpoint(out_dir, iter_num, parallel.abstract_state(create, key, saved, tx))
        if (dtype == 'float16') != (saved.dtype == 'float16'):
            state = state.replace(loss_scale=parallel.device_put(initial_loss_scale(dtype)))
    elif init_from == 'scratch' or lora:
        state = parallel.init_sharded(create, key, config, tx)
    else:
        params, _ = in_all_processes(load_weights, path, config, parallel)
        without_params = lambda *args: create(*args).replace(params=None)  # compiled, it does not compute them
        state = parallel.init_sharded(without_params, key, config, tx).replace(params=params)
    if lora:
        frozen, lora['checksum'] = in_all_processes(load_frozen, lora, config, parallel)
        state = state.replace(frozen=frozen)
    return state


state = build_state()
n_params = count_params(state.params)
n_frozen = count_frozen(state.frozen) if lora else 0
of_updates = f" of LoRA's updates, of {n_frozen / 1e6:.2f}M frozen ones" if lora else ''
print(f'number of parameters: {n_params / 1e6:.2f}M{of_updates}')
tokens_per_iter = gradient_accumulation_steps * batch_size * block_size
print(f'tokens per iteration will be: {tokens_per_iter:,}')

mfu = None
if peak_flops := device_peak_flops(devices[0]):
    mfu = functools.partial(estimate_mfu, n_params, config, peak_flops=peak_flops * len(devices), n_frozen=n_frozen)

if not eval_only:
    checkpoints = open_checkpoints(out_dir, keep)
if wandb_log and master:  # after all that can be refused, before an earlier run is deleted
    wandb_run = start_wandb(project=wandb_project, name=wandb_run_name, id=wandb_id, config=flags)
    wandb_id = wandb_run.id
if not eval_only:
    for step in earlier:
        checkpoints.delete(step)
    stop.saving = checkpoints.is_saving_in_progress
    if master:
        write_json(Path(out_dir, 'config.json'), flags | {'dtype': dtype})
        copy_tokenizer(tokenizer, Path(out_dir, 'tokenizer'))
        if not resumed:
            keep_config_json(None if init_from == 'scratch' else find_config_json(path), out_dir)
metrics_log = MetricsLog(out_dir, iter_num) if master and not eval_only else None
versions = {'python': sys.version.split()[0]} | {p.__name__: p.__version__ for p in (jax, jaxlib, flax)}


def make_batch(iter_num):
    """The sequences of one iteration, on the devices: iter_num * n_rows and following of an endless shuffled stream, so
    that (seed, iter_num) are the place in the data. None if no token counts."""
    n_rows = gradient_accumulation_steps * batch_size
    rows = parallel.local_rows(n_rows)
    if (batch := draw_batch(sets, block_size, n_rows, seed, iter_num, rows, data['vocab_size'])) is None:
        return None
    batch['seq_id'] = (iter_num * n_rows + rows).astype(np.uint32)
    if minutes:
        batch['lr'] = np.full(len(rows), lrs[min(iter_num, len(lrs) - 1)])
    return parallel.shard_batch(batch, (n_micro, micro_batch))


def evaluate():
    """The validation loss, after logging both losses; None if a signal comes. UserError if they are not finite."""
    params = model_params(state.params, state.frozen)
    losses = estimate_losses(eval_step, params, sets, parallel, block_size=block_size, batch_size=batch_size,
                             eval_iters=eval_iters, vocab_size=data['vocab_size'], token_bytes=token_bytes,
                             metrics=objective.metrics,
                             stop_signal=lambda: parallel.max_over_processes(stop.signum))
    if losses is None:
        return None
    more = {name: value for name, value in losses.items() if name.startswith('val_') or name == 'train_bpb'}
    said = ''.join(f', {name.replace("_", " ", 2)} {value:.4f}' for name, value in more.items() if name != 'train_bpb')
    bar.write(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}{said}")
    if not math.isfinite(sum(losses.values())):
        raise UserError(f'the loss is not finite at iteration {iter_num}; {out_dir} has checkpoints from before')
    if sampler:
        more['sample'] = sample_while_training(sampler, state, lora, sample_prompt, seed)
        bar.write(f"{more['sample']}\n---------------")
    if metrics_log:
        metrics_log.write({'iter': iter_num, 'train_loss': losses['train'], 'val_loss': losses['val']} | more)
        plot_losses(out_dir)
    if master and wandb_log:
        wandb_run.log({'iter': iter_num, 'train/loss': losses['train'], 'val/loss': losses['val'], **more,
                       'lr': float(schedule(int(state.step))), 'mfu': log.mfu and 100 * log.mfu})  # percent
    return losses['val']


def evaluate_or_save():
    """What evaluate() returns. If it fails unexpectedly, because memory runs out or wandb is not reached, what was
    trained since the last checkpoint is saved before the error ends the run. Several processes cannot: the others wait
    in the evaluation for the one that has failed."""
    try:
        return evaluate()
    except UserError:
        raise
    except Exception:
        is_new = iter_num > 0 and iter_num != resumed_at
        if is_new and not eval_only and jax.process_count() == 1:
            save(None)
            bar.write(f'the evaluation at iteration {iter_num} has failed; the model is saved')
        raise


def save(val_loss):
    """Saves a checkpoint of this iteration. Raises UserError if the parameters are not finite."""
    if not all_finite(state.params):  # an update can spoil them after a finite loss
        raise UserError(f'parameters are not finite at iteration {iter_num}; {out_dir} has checkpoints from before')
    save_checkpoint(checkpoints, iter_num, state, val_loss=val_loss, meta={
        'model': architecture, 'iter_num': iter_num, 'best_val_loss': best_val_loss,
        'tokenizer': tokenizer | ({'path': 'tokenizer'} if 'path' in tokenizer else {}), 'flags': flags,
        'versions': versions, 'wandb_id': wandb_id, 'lora': lora})


def fix_iterations(save_due):
    """Sets max_iters, and what follows from it, as soon as `budget` knows how many iterations fit."""
    global budget, schedule, lrs, max_iters, batch
    n = budget.iterations(iter_num, state, save_due, eval_s, eval_interval) if master else 0
    if n := int(parallel.max_over_processes(n)):  # after a short warm-up, the learning rate has stayed the highest
        warmup = max(flags['warmup_iters'] if flags['warmup_iters'] < n else n // 10, iter_num)
        bar.write(f'minutes={minutes:g}: max_iters={n}, also lr_decay_iters, warmup_iters={warmup} ({budget.said})')
        flags.update(max_iters=n, lr_decay_iters=n, warmup_iters=warmup)
        schedule, lrs, _ = optimizer_from_flags(flags)
        budget, max_iters, bar.total, log.max_iters = None, n, n, n
        batch = make_batch(iter_num)  # with the learning rate that a resumed run gives it
        if master:
            write_json(Path(out_dir, 'config.json'), flags | {'dtype': dtype})


# training loop
first_iter = iter_num
bar = progress_bar(iter_num, max_iters)
stop.nothing_to_save &= eval_only
stop_signal = int(parallel.max_over_processes(stop.signum))  # the signal that all processes stop for; 0 is none
tracer = Profile(Path(out_dir, 'profile') if profile and master else None, bar, first_iter, max_iters or 8)
compile_s, eval_s = None, 0.0  # seconds for compiling the training step and for an evaluation, once they are known
batch = make_batch(iter_num)
log = IterationLog(bar, clock, metrics_log, out_dir=out_dir, log_interval=log_interval, max_iters=max_iters,
                   tokens_per_iter=tokens_per_iter, mfu=mfu, imports_s=imports_s, in_line=objective.metrics[1:])
try:
    while True:
        save_due = save_interval and iter_num % save_interval == 0
        if budget and iter_num > first_iter:
            fix_iterations(save_due or iter_num % eval_interval == 0)
        is_last = iter_num >= max_iters and not budget
        eval_due = not stop_signal and (iter_num % eval_interval == 0 or is_last or eval_only)
        val_loss = None
        if eval_due:
            log.flush()
            eval_started = time.perf_counter() - clock.compiling
            val_loss = evaluate_or_save()
            eval_s = time.perf_counter() - clock.compiling - eval_started
            if val_loss is None:
                stop_signal = int(parallel.max_over_processes(stop.signum))
            else:
                save_due = save_due or always_save_checkpoint or val_loss < best_val_loss
                best_val_loss = min(best_val_loss, val_loss)
                if iter_num == resumed_at and not eval_only:
                    add_val_loss(checkpoints, iter_num, val_loss)
        if finished := is_last or stop_signal:
            stop.saving = lambda: True  # a second signal does not spoil the last save
        if finished or save_due:
            log.flush()
        if (finished or save_due) and iter_num > 0 and iter_num != resumed_at and not eval_only:
            save(val_loss)
        if finished or eval_only:
            break
        if eval_due or save_due:
            log.restart_clock()  # evaluating and saving do not count as an iteration's time

        tracer.start(iter_num)
        stop_requested = parallel.max_over_processes(stop.signum)  # all processes stop after the same iteration
        # forward, backward, gradient accumulation, clipping and the update are one compiled function: make_train_step
        compiled_before = clock.compiling
        metrics = None
        if batch:  # else none of its tokens counts
            state, metrics = train_step(state, batch)  # dispatched only, unless is_synchronous
        if metrics and compile_s is None:  # this call has compiled it
            compile_s = clock.compiling - compiled_before
            log.start += compile_s  # does not count as the iteration's time
            bar.write(f'compiled the training step in {compile_s:.1f} s')
        batch = make_batch(iter_num + 1)
        if metrics is None:
            log.skip(iter_num)
        else:
            log.add(iter_num, metrics, wait=is_synchronous(devices[0]))
        iter_num += 1
        tracer.stop(iter_num, state, is_end=False)
        stop_signal = int(stop_requested)
except DataChanged as error:
    if not eval_only:
        checkpoints.wait_until_finished()
    steps = checkpoint_steps(out_dir)
    kept = 'there is no checkpoint yet'
    if steps:
        kept = f'{out_dir} has the checkpoint of iteration {steps[0]}: continue with --init_from=resume'
    raise UserError(f'{error}; make the data set again; {kept}') from None
except Exception as error:
    exit_if_peer_died(error)
    raise
finally:  # however the run ends, the checkpoints saved so far are completed on disk
    tracer.stop(iter_num, state)
    bar.close()
    if not eval_only:
        finish_checkpoints(checkpoints)

if stop_signal:
    if master and iter_num and not eval_only:
        plot_losses(out_dir)
    saved = f', saved; continue with --init_from=resume --out_dir={out_dir}' if iter_num and not eval_only else ''
    print(f'stopped by {signal_name(stop_signal)} at iteration {iter_num}{saved}')
    sys.exit(128 + stop_signal)
