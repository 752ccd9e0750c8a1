"""Trains a GPT on all devices it finds, from one CPU upwards.

$ python train_jax.py config/train_pystdlib_char.py
$ python train_jax.py config/train_shakespeare_char.py --batch_size=32 --device=cpu
$ python train_jax.py --init_from=resume --out_dir=out-pystdlib-char   # goes on where that run stopped, bit for bit
"""
import dataclasses
import json
import math
import os
import sys
import time
from pathlib import Path

import flax
import jax
import jaxlib
import numpy as np

from jax_ops import UserError
from jax_pretrained import load_pretrained
from jax_train_utils import (
    MODEL_FLAGS, MetricsLog, StopSignal, all_finite, check_flags, choose_attention, config_from_flags,
    create_learning_rate_schedule, create_optimizer_with_schedule, device_peak_flops, duration, estimate_loss_jax,
    exit_on_user_error, finish_checkpoints, flags_from_config, get_batch_jax, join_processes, leave_without_peers,
    load_checkpoint, load_dataset, load_meta, make_eval_step, make_train_step, open_checkpoints, plot_losses,
    prepare_jax, progress_bar, read_flags, save_checkpoint, setup_distributed_training, setup_jax_environment,
    split_rows, start_wandb, write_text)
from jax_transformer import GPTConfig, count_params, create_train_state, estimate_mfu, initial_loss_scale

# -----------------------------------------------------------------------------
# The defaults train GPT-2 (124M) on OpenWebText. A config file and --name=value override them, in the order given.
# I/O
out_dir = 'out' # checkpoints, config.json, metrics.jsonl and loss.png go here
overwrite = False # delete the checkpoints that a run from scratch finds in out_dir, instead of refusing to start
eval_interval = 2000 # evaluate (and save) every so many iterations, and at the end
log_interval = 1 # print and record every so many iterations
eval_iters = 200 # batches per evaluation and split, the same ones every time
eval_only = False # if True, evaluate once and leave; nothing is written
always_save_checkpoint = True # if False, an evaluation only saves when the validation loss has improved
save_interval = 0 # save every so many iterations as well; 0 is off
init_from = 'scratch' # 'scratch', 'resume', 'gpt2' (-medium, -large, -xl), a Hugging Face folder, a nanoGPT ckpt.pt
# wandb logging
wandb_log = False # log to Weights & Biases; with WANDB_MODE=offline it needs no account
wandb_project = 'owt' # where the run goes there
wandb_run_name = 'gpt2' # what it is called
# data
dataset = 'openwebtext' # the folder under data/ whose prepare.py has been run
gradient_accumulation_steps = 5 * 8 # micro-batches per update, all devices together
batch_size = 12 # sequences per micro-batch
block_size = 1024 # tokens per sequence
# model
n_layer = 12 # transformer blocks
n_head = 12 # attention heads
n_embd = 768 # width
dropout = 0.0 # on embeddings, attention and residuals; 0 for pretraining, 0.1 or more where data is scarce
bias = False # in LayerNorm and Dense layers; GPT-2 has it, without is a bit faster
# what newer models do otherwise, one by one; config/train_llama_char.py has them together
norm = 'layer' # 'layer', or 'rms' as in Llama
position = 'learned' # 'learned' table, or 'rope'
n_kv_head = 0 # heads of keys and values, shared by several of queries; 0 is n_head
qk_norm = '' # 'learned' normalizes queries and keys, as Qwen3 does
layer_types = 'full' # 'full', 'window' of each layer, as in 'window,window,full'; a short pattern repeats
window = 0 # keys that a query sees in 'window' layers
mlp = 'gelu' # 'gelu' with two matrices, or 'swiglu' with three
n_inner = 0 # width of the MLP, or of each expert; 0 is 4 * n_embd
tied_head = True # the head is the embedding; False is a matrix of its own
n_expert = 0 # MLPs per layer of which a token uses n_expert_used; 0 is one for all
n_expert_used = 2 # experts per token
expert_balance = 0.01 # weight of the loss that keeps the experts equally busy
# optimizer
optimizer = 'adamw' # or 'muon', for the blocks' matrices: often as good in half of the iterations
learning_rate = 6e-4 # the highest, reached after warmup_iters
max_iters = 600000 # updates in all
weight_decay = 1e-1 # on matrices and embeddings, not on biases and norms
beta1 = 0.9 # decay of AdamW's mean of gradients
beta2 = 0.95 # decay of AdamW's mean of squared gradients
grad_clip = 1.0 # longest global norm of the gradients; 0 does not clip
# learning rate schedule
decay_lr = True # warm up, then follow lr_schedule; False is learning_rate throughout
lr_schedule = 'cosine' # 'linear', 'wsd' (falls in the last fifth only), 'constant'
warmup_iters = 2000 # iterations of linear warm-up
lr_decay_iters = 600000 # where the schedule reaches min_lr: max_iters, as a rule
min_lr = 6e-5 # lowest learning rate: learning_rate / 10, as a rule
# system
seed = 1337 # of weights, batches and dropout
device = 'auto' # 'auto' (the best there is), 'cpu', 'cuda', 'tpu': all of the kind; 'cuda:1': one of them
dtype = 'auto' # 'float32', 'bfloat16', 'float16' (with loss scaling); auto is bfloat16 where the hardware is fast at it
attention = 'auto' # 'cudnn' (NVIDIA GPUs), 'chunked' (a piece at a time), 'xla' (plain); auto picks, and says why
loss_chunk = 0 # positions whose logits exist at a time, to save memory where the vocabulary is large; 0 is all
scan_layers = False # compile one block and loop over it: compiles faster
remat = 'none' # 'dots', 'full': compute anew for the gradients what is not kept, to save memory; jax 0.10 on a CPU: with scan_layers
fsdp = 1 # share out the parameters over this many devices; sequences are shared out by all that tensor leaves
tensor = 1 # share out heads, MLP width and vocabulary over this many devices
expert = 1 # share out the experts, and sequences with them, over this many devices
coordinator_address = '' # host:port of process 0 of several; 'auto' on a TPU pod; Slurm and Open MPI need neither
num_processes = 0 # how many there are
process_id = -1 # which one this is, from 0
profile = False # trace some iterations after the first ones, for TensorBoard or Perfetto, into out_dir/profile
compile = True # of no effect, JAX always compiles
backend = 'nccl' # of no effect, JAX picks its own
# -----------------------------------------------------------------------------
sys.excepthook = exit_on_user_error
config, given = read_flags(__file__, globals())
globals().update(config)
prepare_jax(device)
join_processes(coordinator_address, num_processes, process_id)
master = jax.process_index() == 0  # this process talks and writes logs
if not master:
    sys.stdout = open(os.devnull, 'w')

# a resumed run keeps the flags it had, but for those that are given now
iter_num, resumed_at, best_val_loss, wandb_id = 0, None, 1e9, None
if config['init_from'] == 'resume':
    resumed_at, resumed = load_meta(config['out_dir'])
    not_kept = ('device', 'overwrite', 'eval_only', 'out_dir', 'coordinator_address', 'num_processes', 'process_id',
                'profile')
    own = {name: value for name, value in resumed['flags'].items() if name in config and name not in not_kept}
    if given.get('optimizer', own.get('optimizer', 'adamw')) != own.get('optimizer', 'adamw'):
        raise UserError(f"cannot resume with another optimizer: {config['out_dir']} holds the state of "
                        f"{own.get('optimizer', 'adamw')}")
    for name in MODEL_FLAGS & given.keys():
        trained_with = own.get(name, globals()[name])
        if given[name] != trained_with:
            raise UserError(f"cannot resume with another architecture: {config['out_dir']} was trained with "
                            f"{name}={trained_with}, not {name}={given[name]}")
    config = {**config, **own, **given}
    iter_num, best_val_loss, wandb_id = resumed_at, resumed['best_val_loss'], resumed['wandb_id']
globals().update(config)
for name, value in (('compile', compile), ('backend', backend)):
    if name in given:
        print(f'--{name}={value} has no effect here: JAX always compiles, and picks its own communication')
check_flags(config)

devices, dtype, reason = setup_jax_environment(device, dtype)
config['dtype'] = dtype
parallel = setup_distributed_training(devices, fsdp, tensor, expert)
n_micro, micro_batch = split_rows(gradient_accumulation_steps, batch_size, parallel.n_shares)
print(f'{len(devices)} x {devices[0].device_kind}, compute in {dtype} ({reason})')

# the model: a new one, the checkpoint's, or somebody else's, of which block_size may be cut short; dropout is free
if init_from == 'resume':
    model_config = dataclasses.replace(GPTConfig(**resumed['model']), dropout=dropout, dtype=dtype)
    print(f'resuming {out_dir} at iteration {iter_num}, best val loss {best_val_loss:.4f}')
elif init_from != 'scratch':
    model_config, params = load_pretrained(init_from)
    if block_size > model_config.block_size and 'block_size' in given:
        raise UserError(f'block_size={block_size}, but {init_from} knows only {model_config.block_size} positions')
    block_size = min(block_size, model_config.block_size)
    if 'wpe' in params:
        params['wpe'] = params['wpe'][:block_size]
    model_config = dataclasses.replace(model_config, block_size=block_size, dropout=dropout, dtype=dtype)
    config.update(flags_from_config(model_config))  # for a resume, which reads the flags
    print(f'initializing from {init_from}, dropout {dropout}, block_size {block_size}')
splits, data_vocab_size, tokenizer = load_dataset(Path(__file__).parent / 'data' / dataset, block_size)
if init_from == 'scratch':
    # BPE vocabularies are padded to a multiple of 64 for efficiency, 50257 to 50304 as in nanoGPT
    vocab_size = data_vocab_size if tokenizer['kind'] == 'char' else -(-data_vocab_size // 64) * 64
    model_config = config_from_flags(config, vocab_size=vocab_size, dtype=dtype)
    print(f'initializing a new model from scratch, vocab_size {vocab_size}')
implementation, reason = choose_attention(attention, model_config, devices[0], fsdp * tensor * expert > 1)
model_config = dataclasses.replace(model_config, attention=implementation, scan_layers=scan_layers, remat=remat)
print(f'attention: {implementation} ({reason})')
if data_vocab_size > model_config.vocab_size:
    raise UserError(f'dataset {dataset} has a vocabulary of {data_vocab_size}, the model only {model_config.vocab_size}')
parallel.check(model_config)
if init_from == 'resume' and tokenizer != resumed['tokenizer']:
    raise UserError(f'{out_dir} was trained with other tokens than those of dataset {dataset}: their ids mean something else')

# optimizer and state
schedule = create_learning_rate_schedule(learning_rate, decay_lr=decay_lr, warmup_iters=warmup_iters,
                                         lr_decay_iters=lr_decay_iters, min_lr=min_lr, lr_schedule=lr_schedule)
tx = create_optimizer_with_schedule(schedule, beta1=beta1, beta2=beta2, weight_decay=weight_decay,
                                    optimizer=optimizer)
if init_from == 'resume':
    saved_config = GPTConfig(**resumed['model'])
    state = parallel.abstract(create_train_state, jax.random.key(seed), saved_config, tx)
    state = load_checkpoint(out_dir, iter_num, state)
    if (dtype == 'float16') != (saved_config.dtype == 'float16'):
        state = state.replace(loss_scale=parallel.put(initial_loss_scale(dtype)))
else:
    state = parallel.create(create_train_state, jax.random.key(seed), model_config, tx)
    if init_from != 'scratch':
        state = state.replace(params=parallel.put(params))
n_params = count_params(state.params)
print(f'number of parameters: {n_params / 1e6:.2f}M')
tokens_per_iter = gradient_accumulation_steps * batch_size * block_size
print(f'tokens per iteration will be: {tokens_per_iter:,}')

train_step = parallel.train_step(make_train_step(model_config, seed, grad_clip, schedule, loss_chunk))
eval_step = parallel.eval_step(make_eval_step(model_config, loss_chunk))
peak_flops = device_peak_flops(devices[0])

if wandb_log and master:
    wandb_run = start_wandb(project=wandb_project, name=wandb_run_name, id=wandb_id, config=config)
    wandb_id = wandb_run.id
# out_dir: nothing is written under eval_only, and no earlier run is lost by mistake
if not eval_only:
    checkpoints = open_checkpoints(out_dir)
    if init_from != 'resume' and checkpoints.all_steps():
        if not overwrite:
            raise UserError(f'{out_dir} holds a run at iteration {checkpoints.latest_step()}; go on with '
                            '--init_from=resume, choose another --out_dir, or delete its checkpoints with --overwrite=True')
        for step in checkpoints.all_steps():
            checkpoints.delete(step)
    if master:
        write_text(Path(out_dir, 'config.json'), json.dumps(config, indent=2) + '\n')
        metrics_log = MetricsLog(out_dir, iter_num)
versions = {'python': sys.version.split()[0]} | {p.__name__: p.__version__ for p in (jax, jaxlib, flax)}


def make_batch(iter_num):
    """The sequences of one iteration, on the devices: a pure function of (seed, iter_num)."""
    n_rows = gradient_accumulation_steps * batch_size
    rows = parallel.local_rows(n_rows)
    x, y = get_batch_jax(splits['train'], block_size, n_rows, seed, iter_num, rows)
    row = (iter_num * n_rows + rows).astype(np.uint32)
    return parallel.place({'x': x, 'y': y, 'row': row}, (n_micro, micro_batch))


def report(iter_num, metrics):
    """Reads (and thereby waits for) the metrics of an iteration, and logs them; stops if they are not finite."""
    global clock, clocked, mfu
    metrics = {name: float(value) for name, value in jax.device_get(metrics).items()}
    loss, grad_norm = metrics['loss'], metrics['grad_norm']
    skipped = metrics.get('loss_scale', 0) >= 1  # float16: a gradient that overflows is not applied, unless all do
    if not math.isfinite(loss) or not (math.isfinite(grad_norm) or skipped):
        raise UserError(f'iteration {iter_num} has loss {loss}, gradient norm {grad_norm}: stopping; the checkpoints in '
                        f'{out_dir} are from before; try a lower learning_rate, longer warmup_iters or dtype=float32')
    clocked += 1
    bar.update()
    if iter_num % log_interval or not master:
        return
    seconds = (time.perf_counter() - clock) / clocked  # per iteration, over those since the last line
    clock, clocked = time.perf_counter(), 0
    tokens_per_sec = tokens_per_iter / seconds
    mfu = peak_flops and estimate_mfu(n_params, model_config, tokens_per_sec, peak_flops * len(devices))
    eta = duration((max_iters - iter_num - 1) * seconds)
    bar.write(f'iter {iter_num}: loss {loss:.4f}, time {seconds * 1000:.2f}ms, mfu {f"{mfu:.2%}" if mfu else "n/a"}, '
              f'{tokens_per_sec:,.0f} tok/s, grad norm {grad_norm:.3f}, eta {eta}')
    metrics_log.write({'iter': iter_num, **metrics, 'time_ms': seconds * 1000, 'tokens_per_sec': tokens_per_sec,
                       'mfu': mfu})


def evaluate():
    """The losses on both splits, logged."""
    losses = estimate_loss_jax(eval_step, state.params, splits, parallel, block_size=block_size, batch_size=batch_size,
                               eval_iters=eval_iters)
    if master:
        bar.write(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
    if not math.isfinite(sum(losses.values())):
        raise UserError(f'the loss is not finite at iteration {iter_num}: stopping; the checkpoints in {out_dir} are '
                        'from before')
    if master and not eval_only:
        metrics_log.write({'iter': iter_num, 'train_loss': losses['train'], 'val_loss': losses['val']})
        plot_losses(out_dir)
    if master and wandb_log:
        wandb_run.log({'iter': iter_num, 'train/loss': losses['train'], 'val/loss': losses['val'],
                       'lr': float(schedule(int(state.step))), 'mfu': mfu})
    return losses['val']


def save(val_loss):
    if not all_finite(state.params):  # an update can spoil them after a finite loss
        raise UserError(f'the parameters are not finite after {iter_num} iterations: stopping; the checkpoints in '
                        f'{out_dir} are from before')
    save_checkpoint(checkpoints, iter_num, state, val_loss=val_loss, meta={
        'model': model_config.architecture(), 'iter_num': iter_num, 'best_val_loss': best_val_loss,
        'tokenizer': tokenizer, 'flags': config, 'versions': versions, 'wandb_id': wandb_id})


# training loop
stop, signum = StopSignal(), 0  # the signal that this process has met, and the one that all of them stop for
first_iter = iter_num
bar = progress_bar(iter_num, max_iters)
mfu, compiled = None, False
pending = None  # the iteration before and its metrics, which are read once the next one is on its way
batch = make_batch(iter_num)
clock, clocked = time.perf_counter(), 0  # since when, and how many iterations were read since
try:
    while True:
        last = iter_num >= max_iters or signum
        eval_due = iter_num % eval_interval == 0 or iter_num >= max_iters or eval_only
        save_due = last or (save_interval and iter_num % save_interval == 0)
        if pending and (eval_due or save_due):
            report(*pending)
            pending = None
        val_loss = None
        if eval_due:
            val_loss = evaluate()
            save_due = save_due or always_save_checkpoint or val_loss < best_val_loss
            if iter_num != resumed_at:  # that checkpoint is there, and the best or not
                best_val_loss = min(best_val_loss, val_loss)
        if save_due and iter_num > 0 and iter_num != resumed_at and not eval_only:
            save(val_loss)
        if last or eval_only:
            break
        if eval_due or save_due:
            clock, clocked = time.perf_counter(), 0  # neither is part of an iteration's time

        if profile and master and iter_num == first_iter + 5:
            jax.profiler.start_trace(os.path.join(out_dir, 'profile'))
        started = time.perf_counter()
        asked = parallel.largest(stop.signum)  # all processes stop after the same iteration
        state, metrics = train_step(state, batch)  # returns at once, the device works on
        if not compiled:  # this first call returned after compiling
            compiled, clock = True, time.perf_counter()
            bar.write(f'compiled the training step in {clock - started:.1f} s')
        batch = make_batch(iter_num + 1)
        if pending:
            report(*pending)
        pending = iter_num, metrics
        if profile and master and iter_num == first_iter + 7:
            jax.block_until_ready(metrics)
            jax.profiler.stop_trace()
            bar.write(f'traced iterations {first_iter + 5} to {iter_num} into {out_dir}/profile')
        iter_num += 1
        signum = int(asked)
except Exception as error:
    leave_without_peers(error)
    raise
finally:  # however the run ends, what has been saved gets onto the disk
    bar.close()
    if not eval_only:
        finish_checkpoints(checkpoints)

if signum:
    print(f'stopped by signal {signum} at iteration {iter_num}' +
          (f', saved; go on with --init_from=resume --out_dir={out_dir}' if iter_num and not eval_only else ''))
    sys.exit(128 + signum)
