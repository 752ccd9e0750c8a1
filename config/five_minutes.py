# Tiny Shakespeare in five minutes of wall time, start and compilation included, on any device:
#   python data/shakespeare_bpe/prepare.py && python train_jax.py config/five_minutes.py
# The last line's val bpb is of all of val.bin; the line "minutes=5: max_iters=N" names the iterations, and with
# --minutes=0 --max_iters=N the same seed gives the same bits. python tools/five_minutes.py runs three seeds and prints
# a row (docs/lab_log.md, Five minutes). The settings are those of config/train_pystdlib.py, chosen on another text.
# One earlier trial, on val, chose dropout and the size of the vocabulary. To tune further, use prepare.py --tune, which
# leaves val out.

out_dir = 'out-five-minutes'
minutes = 5.0
eval_interval = 1000000 # at the start and at the end
eval_iters = 60 # 60 * 3 windows of 256 tokens: all of val.bin
log_interval = 100
sample_prompt = '\n'

dataset = 'shakespeare_bpe'
gradient_accumulation_steps = 1
batch_size = 3
block_size = 256

attention = 'xla' # sequences this short fit into a CPU's cache

n_layer = 4
n_head = 4
n_embd = 128
dropout = 0.1 # the text is read a dozen times
bias = False
norm = 'rms'
position = 'rope'
qk_norm = 'learned'
mlp = 'swiglu'
n_inner = 344

optimizer = 'muon'
learning_rate = 8e-3
lr_schedule = 'linear'
min_lr = 0.0
warmup_iters = 100
beta2 = 0.99
