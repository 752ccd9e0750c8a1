"""Trains a GPT on all devices it finds, from one CPU upwards.

$ python train_jax.py config/train_pystdlib_char.py
$ python train_jax.py config/train_shakespeare_char.py --batch_size=32 --device=cpu
$ python train_jax.py --init_from=resume --out_dir=out-pystdlib-char   # resumes that run, bit for bit
"""
import math
import os
import sys
import time
from pathlib import Path

from jax_flags import (
    UserError, check_flags, check_given, exit_if_peer_died, read_flags, start_script)

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
init_from = 'scratch' # 'resume', 'auto' (resume or scratch), another run's out_dir, 'gpt2', Hugging Face folder or name
checkpoint = 'best' # of another run to start from: 'best' (lowest validation loss) or 'latest'
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
minutes = 0.0 # end after this long, all included: sets max_iters, lr_decay_iters, warmup_iters by the speed; 0 is off
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
# all flags of the block above, and those that the user gave
flags, given = read_flags(__file__, globals())
check_flags(flags)
if flags['init_from'] not in ('resume', 'auto'):
    check_given(flags, given)

# jax is imported after the flags, so that --help and a wrong flag are answered at once
import flax
import jax
import jaxlib
import numpy as np

from jax_devices.parallel import setup_distributed_training, split_batch
from jax_devices.processes import StopSignal, initialize_distributed, signal_name
from jax_devices.setup import Profile, Stopwatch, configure_process, is_synchronous
from jax_files.checkpoints import (
    add_val_loss, checkpoint_steps, run_folder, save_checkpoint)
from jax_files.data import DataChanged
from jax_files.sources import open_data
from jax_log import IterationLog, progress_bar, start_wandb
from jax_minutes import fit_to_minutes, say_if_few
from jax_start import (
    OutDir, check_fits, open_run, open_sampler, optimizer_from_flags, start_state, training_config)
from jax_train_utils import (
    all_finite, choose_objective, count_trained, estimate_losses, make_eval_step, make_train_step,
    mfu_estimator)

files = run_folder(flags['out_dir']).files  # out_dir itself, or of a bucket a copy on this disk
configure_process(flags['device'], flags['deterministic'], flags['init_from'], files)
clock = Stopwatch()
imports_s = clock.start - started
initialize_distributed(
    flags['coordinator_address'], flags['num_processes'], flags['process_id'])
# Until the loop begins, a signal ends a single process at once: there is nothing to save yet.
# Several processes stop together, in the loop.
stop = StopSignal(nothing_to_save=jax.process_count() == 1)
master = jax.process_index() == 0  # the process that prints and writes the logs
if not master:
    sys.stdout = open(os.devnull, 'w')

# -----------------------------------------------------------------------------
# choose the model: of the checkpoint, from scratch, or pretrained
run = open_run(flags, given, data_root=Path(__file__).parent / 'data')
# The names of the config block now have the values of this run, and are read-only from here on.
# --minutes changes max_iters, lr_decay_iters and warmup_iters later, in run.flags only: read
# n_iters, not max_iters.
globals().update(run.flags)
devices = run.devices
parallel = setup_distributed_training(devices, fsdp, tensor, expert, context, zero)
n_micro, micro_batch = split_batch(
    gradient_accumulation_steps, batch_size, parallel.n_data_shards)

# check that the model and the data fit
check_fits(run, micro_batch)

# open the data; what cannot be evaluated is refused before anything is written or compiled
data = open_data(run.shares, run.data, block_size=block_size, seed=seed,
                 length_normalized=length_normalized)
data.check(eval_iters * batch_size)
sampler = open_sampler(run)

# what is computed, and how
config = training_config(run, data, parallel)
objective = choose_objective(run.has_pairs, beta)
eval_step = parallel.eval_step(make_eval_step(config, objective, parallel, loss_chunk=loss_chunk))

# out_dir: eval_only writes nothing, and an earlier run is never overwritten by mistake
out = None if eval_only else OutDir(run)


def make_step(schedule):
    """Makes the compiled train_step(state, batch): forward and backward of all micro-steps,
    clipping and the update."""
    return parallel.train_step(make_train_step(
        config, objective, parallel, schedule, seed=seed, grad_clip=grad_clip,
        loss_chunk=loss_chunk))


def make_batch(iter_num):
    """Draws the sequences of one iteration onto the devices: numbers iter_num * n_rows to
    (iter_num + 1) * n_rows - 1 of the run's endless shuffled stream, so that (seed, iter_num) alone
    say where the run is in its data. None if no token counts."""
    n_rows = gradient_accumulation_steps * batch_size
    numbers = iter_num * n_rows + np.arange(n_rows)
    rows = parallel.local_rows(n_rows)  # those that this process loads
    batch = data.train.draw(numbers, rows)
    if batch is None:
        return None
    batch['seq_id'] = numbers[rows].astype(np.uint32)
    return parallel.shard_batch(batch, (n_micro, micro_batch))


def measure_losses(state):
    """Evaluates a state: {'train', 'val', ...}, see estimate_losses; None if a signal comes."""
    return estimate_losses(
        eval_step, state, data.sets, parallel, batch_size=batch_size, eval_iters=eval_iters,
        token_bytes=data.token_bytes, metrics=objective.metrics,
        stop_signal=lambda: parallel.max_over_processes(stop.signum))


# --minutes: how many iterations fit is measured before the run
if run.is_timed and not eval_only:
    run.flags = fit_to_minutes(
        run, config, parallel, started=started, clock=clock, make_step=make_step,
        make_batch=make_batch, evaluate=measure_losses, get_signal=lambda: stop.signum)
    say_if_few(run.flags, data.train)
n_iters = run.flags['max_iters']

# optimizer and state
schedule, tx = optimizer_from_flags(run.flags)
train_step = make_step(schedule)
state = start_state(run, config, parallel, tx)
n_params, n_frozen = count_trained(state)
of_updates = ''
if run.lora:
    of_updates = f" of LoRA's updates, of {n_frozen / 1e6:.2f}M frozen ones"
print(f'number of parameters: {n_params / 1e6:.2f}M{of_updates}')
tokens_per_iter = gradient_accumulation_steps * batch_size * block_size
print(f'tokens per iteration will be: {tokens_per_iter:,}')

# checkpoints and logs
if out:
    checkpoints = out.open()
wandb_id = run.wandb_id
if wandb_log and master:  # after all that can be refused, before out.begin deletes an earlier run
    wandb_run = start_wandb(project=wandb_project, name=wandb_run_name, id=wandb_id,
                            config=run.flags)
    wandb_id = wandb_run.id
metrics_log = None  # of process 0
if out:
    metrics_log = out.begin(checkpoints)
    stop.saving = checkpoints.is_saving_in_progress
versions = {'python': sys.version.split()[0]}
for package in (jax, jaxlib, flax):
    versions[package.__name__] = package.__version__


# The next three functions read the loop's variables, below: iter_num, best_val_loss, bar, log.

def evaluate():
    """Logs the losses, and returns the validation loss; None if a signal comes. Raises UserError
    if they are not finite."""
    losses = measure_losses(state)
    if losses is None:
        return None
    more = {}
    for name, value in losses.items():
        if name.startswith('val_') or name == 'train_bpb':
            more[name] = value
    in_line = ''
    for name, value in more.items():
        if name != 'train_bpb':
            in_line += f', {name.replace("_", " ", 2)} {value:.4f}'
    bar.write(f"step {iter_num}: train loss {losses['train']:.4f}, "
              f"val loss {losses['val']:.4f}{in_line}")
    if not math.isfinite(sum(losses.values())):
        raise UserError(f'the loss is not finite at iteration {iter_num}; {out_dir} has '
                        'checkpoints from before')
    is_untrained = iter_num == 0 and run.path is None
    if sampler and not is_untrained:
        more['sample'] = sampler(state)
        bar.write(f"{more['sample']}\n---------------")
    if metrics_log:
        metrics_log.write({'iter': iter_num, 'train_loss': losses['train'],
                           'val_loss': losses['val'], **more})
        metrics_log.plot()
        out.folder.upload()
    if master and wandb_log:
        wandb_run.log({
            'iter': iter_num, 'train/loss': losses['train'], 'val/loss': losses['val'], **more,
            'lr': float(schedule(int(state.step))),
            'mfu': log.mfu and 100 * log.mfu})  # percent
    return losses['val']


def evaluate_or_save():
    """Returns what evaluate() does. If it fails unexpectedly, because memory runs out or wandb is
    not reached, what was trained since the last checkpoint is saved before the error ends the run.
    Several processes cannot: the others wait in the evaluation for the one that has failed."""
    try:
        return evaluate()
    except UserError:
        raise
    except Exception:
        is_new = iter_num > 0 and iter_num != run.resumed_at
        if is_new and out and jax.process_count() == 1:
            save(None)
            bar.write(f'the evaluation at iteration {iter_num} has failed; the model is saved')
        raise


def save(val_loss):
    """Saves a checkpoint of this iteration. Raises UserError if the parameters are not finite."""
    if not all_finite(state.params):  # an update can spoil them after a finite loss
        raise UserError(f'parameters are not finite at iteration {iter_num}; {out_dir} has '
                        'checkpoints from before')
    tokenizer = dict(run.tokenizer)
    if 'path' in tokenizer:
        tokenizer['path'] = 'tokenizer'  # beside the checkpoints, see OutDir
    meta = {
        'model': run.config.architecture(), 'iter_num': iter_num, 'best_val_loss': best_val_loss,
        'tokenizer': tokenizer, 'flags': run.flags, 'versions': versions, 'wandb_id': wandb_id,
        'lora': run.lora}
    save_checkpoint(checkpoints, iter_num, state, val_loss=val_loss, meta=meta)


# -----------------------------------------------------------------------------
# training loop
iter_num = run.iter_num
best_val_loss = run.best_val_loss
bar = progress_bar(iter_num, n_iters)
if not eval_only:
    stop.nothing_to_save = False  # from here on a signal has something to save
# the signal that all processes stop for; 0 is none
stop_signal = int(parallel.max_over_processes(stop.signum))
trace_folder = Path(files, 'profile') if profile and master else None
tracer = Profile(trace_folder, f'{out_dir}/profile', bar, iter_num, n_iters)
compile_s = None  # seconds for compiling the training step, once they are known
batch = make_batch(iter_num)
log = IterationLog(
    bar, metrics_log, out_dir=out_dir, log_interval=log_interval, max_iters=n_iters,
    tokens_per_iter=tokens_per_iter, mfu=mfu_estimator(state, config, devices), started=started,
    imports_s=imports_s, in_line=objective.metrics[1:])
try:
    while True:
        # what is to be done at this iteration, before it is made
        must_stop = iter_num >= n_iters or stop_signal > 0
        is_interval = iter_num % eval_interval == 0
        must_evaluate = stop_signal == 0 and (is_interval or must_stop or eval_only)
        must_save = save_interval > 0 and iter_num % save_interval == 0

        # evaluate the loss on train and val
        val_loss = None
        if must_evaluate:
            log.pause()
            val_loss = evaluate_or_save()
            if val_loss is None:  # a signal has come meanwhile
                stop_signal = int(parallel.max_over_processes(stop.signum))
                must_stop = True
            else:
                must_save = must_save or always_save_checkpoint or val_loss < best_val_loss
                best_val_loss = min(best_val_loss, val_loss)
                # a signal may have saved that checkpoint without an evaluation; now it can be best
                if out and iter_num == run.resumed_at:
                    add_val_loss(checkpoints, iter_num, val_loss)

        # save a checkpoint, at the end always
        if must_stop:
            must_save = True
            stop.saving = lambda: True  # a second signal does not spoil the last save
        if must_save:
            log.pause()
            is_new = iter_num > 0 and iter_num != run.resumed_at
            if is_new and out:
                save(val_loss)

        # termination conditions
        if must_stop or eval_only:
            break
        log.resume()

        # forward, backward and update: one compiled function, see make_step. The call returns
        # before the devices are done, except on CPUs (is_synchronous).
        tracer.start(iter_num)
        # All processes stop after the same iteration: they agree before the step and read the
        # answer after it, so that the exchange takes place meanwhile.
        stop_requested = parallel.max_over_processes(stop.signum)
        metrics = None
        if batch is not None:
            is_first_call = compile_s is None
            if is_first_call:
                bar.write('compiling the training step ...')
                compiled_before = clock.compiling
            state, metrics = train_step(state, batch)
            if is_first_call:
                compile_s = clock.compiling - compiled_before
                log.exclude(compile_s)
                bar.write(f'compiled the training step in {compile_s:.1f} s')

        # the next batch, while the devices compute
        batch = make_batch(iter_num + 1)

        # timing and logging: on a CPU this iteration is logged, elsewhere the one before, so that
        # nobody waits for the step that has just begun
        if metrics is None:
            log.skip(iter_num)
        else:
            log.add(iter_num, metrics, wait=is_synchronous(devices[0]))
        iter_num += 1
        tracer.stop(iter_num, state, is_end=False)
        stop_signal = int(stop_requested)
except DataChanged as error:
    if out:
        checkpoints.wait_until_finished()
    steps = checkpoint_steps(out_dir)
    kept = 'there is no checkpoint yet'
    if steps:
        kept = (f'{out_dir} has the checkpoint of iteration {steps[0]}: continue with '
                '--init_from=resume')
    raise UserError(f'{error}; make the data set again; {kept}') from None
except Exception as error:
    exit_if_peer_died(error)
    raise
finally:  # however the run ends, the checkpoints saved so far are completed on disk
    tracer.stop(iter_num, state)
    bar.close()
    if out:
        out.finish(checkpoints)

if stop_signal and metrics_log and iter_num:
    metrics_log.plot()
if out:
    out.close()
if stop_signal:
    saved = ''
    if iter_num and out:
        saved = f', saved; continue with --init_from=resume --out_dir={out_dir}'
    print(f'stopped by {signal_name(stop_signal)} at iteration {iter_num}{saved}')
    sys.exit(128 + stop_signal)
