"""Trains a GPT on all devices it finds, from one CPU upwards.

$ python train_jax.py config/train_pystdlib_char.py
$ python train_jax.py config/train_shakespeare_char.py --batch_size=32 --device=cpu
$ python train_jax.py --init_from=resume --out_dir=out-pystdlib-char  # resumes that run bit for bit
"""
import argparse
import contextlib
import functools
import os
import shlex
import sys
import time
from pathlib import Path

from jax_flags import INSTALLED, check_flags, check_given, read_flags, start_script

# -----------------------------------------------------------------------------
# The defaults train GPT-2 (124M) on OpenWebText. A config file and --name=value override them, in
# the order given.
# I/O
out_dir = 'out' # checkpoints, config.json, metrics.jsonl and loss.png go here
overwrite = False # delete the checkpoints that a run from scratch finds in out_dir, instead of refusing to start
eval_interval = 2000 # evaluate (and save) every this many iterations, and at the end
log_interval = 1 # print and record every this many iterations
eval_iters = 200 # batches per evaluation and split, the same batches every time
sample_prompt = '' # continue this text at every evaluation but a new model's first, as sample_jax.py would; '' is off
eval_only = False # if True, evaluate once and stop; nothing is written
verify = 0 # train a run's last N intervals between checkpoints again, and compare; nothing is written; 0 is off
always_save_checkpoint = True # if False, an evaluation only saves when the validation loss has improved
save_interval = 0 # also save every this many iterations; 0 is off
keep = 2 # keep the latest this many checkpoints, and the best
init_from = 'scratch' # 'resume', 'auto' (resume or scratch), another run's out_dir, 'gpt2', Hugging Face folder or name
checkpoint = 'best' # which one of another run to start from: 'best' (lowest validation loss) or 'latest'
# wandb logging
wandb_log = False # log to Weights & Biases; with WANDB_MODE=offline it needs no account
wandb_project = 'owt' # name of the project at wandb
wandb_run_name = 'gpt2' # name of the run at wandb
# data
dataset = 'openwebtext' # a prepared folder: its name under data/, or its path; 'web:0.7,code:0.3' mixes some
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
n_expert = 0 # MLPs per layer; a token uses n_expert_used of them (mixture of experts); 0 is one MLP for all
n_expert_used = 2 # experts per token
expert_balance = 0.01 # weight of the loss that keeps the experts equally busy
# LoRA, for a pretrained model
lora_rank = 0 # freeze the weights, train updates of this rank of the matrices of attention and MLPs; 0 trains all
lora_alpha = 16.0 # an update counts lora_alpha / lora_rank times
base = '' # where the pretrained model of a LoRA run that is resumed is now, if it has moved
quantize = '' # 'int8': the frozen weights, in a quarter of the memory
# preferences, for a data set of pairs: DPO; LoRA's base is the reference
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
ema = 0.0 # decay of a running mean of the weights, used to evaluate, sample and export; 0 is off
grad_clip = 1.0 # maximum global norm of the gradients; 0 does not clip
# learning rate schedule
decay_lr = True # warm up, then follow lr_schedule; False is learning_rate throughout
lr_schedule = 'cosine' # or 'linear', 'wsd' (decays in the last fifth only), 'constant'
warmup_iters = 2000 # iterations of linear warm-up; a tenth of max_iters if lr_decay_iters is 0 and it does not fit
lr_decay_iters = 0 # the schedule reaches min_lr at this iteration; 0 is max_iters
earlier_ends = '' # '300:900': before iteration 300 it ended at 900; --minutes writes this where it moves the end
min_lr = 6e-5 # lowest learning rate; usually learning_rate / 10
# system
seed = 1337 # seeds weights, batches and dropout
device = 'auto' # 'auto' (the best there is), 'cpu', 'cuda', 'tpu': all of the kind; 'cuda:1': one of them
dtype = 'auto' # 'float32', 'bfloat16', 'float16' (with loss scaling); auto is bfloat16 where the hardware is fast at it
attention = 'auto' # 'cudnn' (NVIDIA), 'splash' (TPU), 'chunked' (some queries at a time), 'xla' (plain); auto says why
loss_chunk = 0 # materialize the logits of this many positions at a time, to save memory; 0 is all
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
start_script()  # from here on, a user's mistake ends the script with one line
# all flags of the block above, and those that the user gave
flags, given = read_flags(__file__, globals())
for name, why in (('compile', 'JAX always compiles'), ('backend', 'JAX picks its own')):
    if name in given:
        print(f'--{name}={flags[name]} has no effect here: {why}')
check_flags(flags)
if flags['init_from'] not in ('resume', 'auto'):  # else most flags come from the checkpoint
    check_given(flags, given)

# jax is imported after the flags, so that --help and a wrong flag are answered at once
import jax
import numpy as np

from jax_devices.layout import setup_distributed_training
from jax_devices.processes import (
    StopSignal, check_agreement, initialize_distributed, signal_name)
from jax_devices.setup import Stopwatch, configure_process, device_peak_flops, is_synchronous
from jax_run.checkpoints import checkpoint_steps, comparable_since, read_val_loss, run_folder
from jax_run.log import Profile, RunLog
from jax_run.manifest import flags_of, open_manifest
from jax_run.minutes import Deadline, first_batch, iterations_that_fit, say_if_few_iterations
from jax_run.out_dir import OutDir
from jax_run.sources import open_data
from jax_run.start import NO_LOSS, check_fits, open_program, open_run, start_state, with_schedule
from jax_train_utils import count_frozen, dpo, estimate_losses, language_model, split_batch
from jax_transformer import count_params, estimate_mfu

# settings that JAX reads when it starts; a resumed run has --deterministic in its config.json
files = run_folder(flags['out_dir']).files  # out_dir itself, or for a bucket a copy on this disk
configure_process(flags['device'], flags['deterministic'], flags['init_from'], files)
clock = Stopwatch(started)
initialize_distributed(
    flags['coordinator_address'], flags['num_processes'], flags['process_id'])
# all processes must have the same flags, and the same given flags, because these override those of
# a checkpoint; each process may have paths of its own, if their content is the same
own = {'process_id', 'out_dir', 'dataset'}
check_agreement('flags', {**flags, **{f'--{name}': 'given' for name in given.keys() - own}}, own)
is_master = jax.process_index() == 0  # the process that prints and writes the logs
if not is_master:
    sys.stdout = open(os.devnull, 'w')

# at_end closes signals, lock and log below, in reverse order, however the run ends
with contextlib.ExitStack() as at_end:
    # until the loop begins there is nothing to save, so a signal ends the process at once; several
    # processes wait for the loop instead, and stop there together
    stop = StopSignal(nothing_to_save=jax.process_count() == 1)
    at_end.callback(stop.close)

    # -----------------------------------------------------------------------------
    # what the run starts from: a checkpoint, a pretrained model, or nothing. cfg: its flags; in a
    # resumed run those of the checkpoint, except those given now (--minutes sets max_iters later)
    run = open_run(flags, given)
    cfg = argparse.Namespace(**run.flags)
    layout = setup_distributed_training(
        run.devices, cfg.fsdp, cfg.tensor, cfg.expert, cfg.context, cfg.zero)
    # each device gets n_micro micro-batches of micro_batch sequences; with one device these are the
    # values of the flags
    n_micro, micro_batch = split_batch(
        cfg.gradient_accumulation_steps, cfg.batch_size, layout.n_data_shards)
    check_fits(run, micro_batch)  # whether the model, the data and the flags fit each other

    # the data; refused before anything is written, if no token of an evaluation counts in the loss
    # (in chats only the assistant's tokens count)
    data = open_data(run.shares, run.meta, block_size=cfg.block_size, seed=cfg.seed,
                     length_normalized=cfg.length_normalized)
    data.check(cfg.eval_iters * cfg.batch_size)

    # the computation: the model with its kernels chosen, the optimizer, and one function
    # step(state, batch): forward and backward of all micro-steps, clipping and the update
    objective = dpo(cfg.beta) if run.has_pairs else language_model
    program = open_program(run, data, layout, objective)

    # the manifest of the run; it refuses data other than the checkpoint's, and processes with
    # different code
    manifest = None if cfg.verify else open_manifest(run, data, program.config)
    sampler = None
    if cfg.sample_prompt:
        from jax_run.pretrained import open_sampler
        sampler = open_sampler(run)

    # out_dir: an earlier run is never overwritten by mistake
    if not cfg.eval_only and not cfg.verify:
        out = OutDir(run)
        at_end.callback(out.close)

    def make_batch(iter_num: int) -> dict[str, jax.Array] | None:
        """Draws the sequences of one iteration onto the devices. Returns None if no token counts.

        The sequences have the numbers iter_num * n_rows to (iter_num + 1) * n_rows - 1 in the run's
        endless shuffled stream, so that (seed, iter_num) alone determine the position in the
        data."""
        n_rows = cfg.gradient_accumulation_steps * cfg.batch_size
        numbers = iter_num * n_rows + np.arange(n_rows)
        here = layout.local_rows(n_rows)  # the rows that this process loads
        batch = data.train.draw(numbers, here)
        if batch is None:
            return None
        batch['seq_id'] = numbers[here].astype(np.uint32)  # dropout draws by it
        return layout.shard_batch(batch, (n_micro, micro_batch))

    def agree_on_signal() -> int | jax.Array:
        """Returns the number of the signal that stops all processes, or 0 if there is none. With
        several processes, the result is an array on the devices, and int(result) waits for all
        processes."""
        return layout.max_over_processes(stop.signum)

    # evaluate(state) -> {'train': {'loss', ...}, 'val': ...}, or None if a signal comes
    evaluate = functools.partial(
        estimate_losses, eval_step=program.eval_step, sets=data.sets, layout=layout,
        batch_size=cfg.batch_size, eval_iters=cfg.eval_iters, token_bytes=data.token_bytes,
        stop_signal=agree_on_signal)

    # verify only: train again from checkpoint to checkpoint, and compare
    if cfg.verify:
        from jax_run.verify import verify_run
        sys.exit(verify_run(run, data, program, make_batch, evaluate))

    # the state: parameters, optimizer state, and the schedule of the learning rate
    state, run = start_state(run, program)
    n_params = count_params(state.params)
    n_frozen = count_frozen(state.frozen)  # with LoRA
    of_updates = f" in LoRA's updates of {n_frozen / 1e6:.2f}M frozen ones" if n_frozen else ''
    print(f'number of parameters: {n_params / 1e6:.2f}M{of_updates}')
    tokens_per_iter = cfg.gradient_accumulation_steps * cfg.batch_size * cfg.block_size
    print(f'tokens per iteration will be: {tokens_per_iter:,}')

    # evaluate only
    if cfg.eval_only:
        log = RunLog(run, tokens_per_iter=tokens_per_iter)
        at_end.callback(log.close)
        losses = evaluate(state)
        if losses:
            log.evaluation(run.iter_num, losses, sampler(state) if sampler else '')
        sys.exit(128 + stop.signum if stop.signum else 0)

    # compile the step for the shapes of a batch: the first batch with a token that counts
    batch = make_batch(run.iter_num)
    print('compiling the training step ...')
    compiled_before = clock.compiling  # seconds of compilation so far, as jax reports them
    train_step = program.step.lower(state, batch or first_batch(make_batch)).compile()
    print(f'compiled the training step in {clock.compiling - compiled_before:.1f} s')

    # --minutes: measure how many iterations fit; this uses up the state, so that it is made again
    deadline = None
    if not run.has_length:
        n = iterations_that_fit(run, state, train_step, layout, make_batch=make_batch,
                                evaluate=evaluate, clock=clock, stop=stop)
        run = run.with_iterations(n)
        cfg = argparse.Namespace(**run.flags)
        manifest['flags'] = flags_of(run)
        say_if_few_iterations(run.flags, data.train, time.perf_counter() - started)
        state, run = start_state(run, program)
        deadline = Deadline(run, layout, started)

    # checkpoints and logs; here an earlier run is deleted, with --overwrite
    stop.exit_if_stopped()
    at_end.enter_context(stop.waits_while(out.is_saving))  # even a second signal waits for a save
    out.begin(run, manifest, data.bpb_bytes)
    at_end.enter_context(out.writing())
    mfu = None  # a function of the tokens per second, where the peak of the devices is known
    peak_flops = device_peak_flops(run.devices[0])
    if peak_flops:
        mfu = functools.partial(estimate_mfu, n_params, program.config, n_frozen=n_frozen,
                                peak_flops=peak_flops * len(run.devices))
    log = RunLog(run, out.metrics_log, out.wandb_run, tokens_per_iter=tokens_per_iter, mfu=mfu,
                 is_synchronous=is_synchronous(run.devices[0]), started=started,
                 imports_s=clock.imports_s, printed=objective.metrics[1:])  # all but the loss
    at_end.callback(log.close)
    tracer = None
    if cfg.profile and is_master:
        tracer = Profile(Path(files, 'profile'), f'{cfg.out_dir}/profile', log, run.iter_num,
                         cfg.max_iters)
        at_end.callback(tracer.close)

    # -----------------------------------------------------------------------------
    # training loop
    iter_num = run.iter_num
    since = comparable_since(manifest)  # validation losses from here on can be compared
    best_val_loss = NO_LOSS if since == iter_num else run.best_val_loss
    stop.nothing_to_save = False  # from here on a signal has something to save
    stop_signal = int(agree_on_signal())  # a signal that came while the step was compiled
    while True:
        # --minutes: if the speed has changed, move the end of the run; the schedule's moves with it
        if deadline and deadline.has_moved(iter_num, log):
            run = run.with_end(deadline.max_iters, iter_num)
            cfg = argparse.Namespace(**run.flags)
            out.move_end(run, {**manifest, 'flags': flags_of(run)})
            log.move_end(run, iter_num)
        if cfg.earlier_ends:
            state = with_schedule(state, run, iter_num, layout)
        is_last = iter_num >= cfg.max_iters or stop_signal > 0

        # every eval_interval, and at the end: evaluate the loss on train and val. If that fails,
        # the trained state is saved first
        val_loss = None
        is_best = False
        if not stop_signal and (is_last or iter_num % cfg.eval_interval == 0):
            log.pause()
            with out.saved_on_failure('the evaluation', iter_num, state, best_val_loss):
                losses = evaluate(state)
                if losses:
                    log.evaluation(iter_num, losses, sampler(state) if sampler else '')
            if losses is None:  # a signal has come during the evaluation: stop at this iteration
                stop_signal = int(agree_on_signal())
                continue
            val_loss = losses['val']['loss']
            is_best = val_loss < best_val_loss
            if is_best:
                best_val_loss = val_loss
            out.record_val_loss(iter_num, val_loss)

        # save a checkpoint: after an evaluation, if it is the best or always_save_checkpoint; every
        # save_interval; and at the end, where a second signal waits for it. At the iteration where
        # the run began there is nothing new
        is_due = cfg.save_interval > 0 and iter_num % cfg.save_interval == 0
        was_evaluated = val_loss is not None
        if is_last or is_due or is_best or was_evaluated and cfg.always_save_checkpoint:
            log.pause()
            out.save(iter_num, state, best_val_loss, val_loss, is_last=is_last)
        if is_last:
            break
        log.resume()

        # forward, backward and update; the call returns before the devices are done, except on CPUs
        if tracer:
            tracer.start(iter_num)
        # all processes stop after the same iteration: they start to agree on it before the step,
        # and read the answer after it, so that the exchange takes place meanwhile
        agreeing = agree_on_signal()
        metrics = None  # no update, if no token of the batch counts
        if batch is not None:
            state, metrics = train_step(state, batch)

        # the next batch, while the devices compute, timing and logging; if that fails, this
        # iteration is saved first
        with out.saved_on_failure('the batch or the log', iter_num + 1, state, best_val_loss):
            try:
                batch = make_batch(iter_num + 1)
            finally:
                log.iteration(iter_num, metrics)
        iter_num += 1
        if tracer:
            tracer.stop(iter_num, state)
        stop_signal = int(agreeing)

    if stop_signal and iter_num:
        out.plot()  # loss.png again: there may be iterations after the last evaluation

# what was saved, and the next command
folder = shlex.quote(cfg.out_dir)
if not stop_signal and not iter_num:
    print('saved nothing: there was no iteration')
elif not stop_signal:
    best = f', best val loss {best_val_loss:.4f}' if best_val_loss < NO_LOSS else ''
    kept = [read_val_loss(files / 'ckpt' / str(step), since)
            for step in checkpoint_steps(cfg.out_dir)]
    if best and best_val_loss not in kept:  # that of the model before its first update
        best += ' before training: no checkpoint is better'
    sample = 'sample-jax' if INSTALLED.is_dir() else 'python sample_jax.py'
    print(f'saved {cfg.out_dir} (iteration {iter_num}{best}); next: {sample} --out_dir={folder}')
else:
    saved = ''
    if iter_num:
        saved = f', saved; continue with --init_from=resume --out_dir={folder}'
    print(f'stopped by {signal_name(stop_signal)} at iteration {iter_num}{saved}')
    sys.exit(128 + stop_signal)
