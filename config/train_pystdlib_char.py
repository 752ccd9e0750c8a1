# A character-level GPT on the Python standard library: needs no network, takes about 3 minutes on two CPU cores.

out_dir = 'out-pystdlib-char'
eval_interval = 250
eval_iters = 20
log_interval = 25

dataset = 'pystdlib_char'
# 1 * 12 * 64 = 768 characters per iteration
gradient_accumulation_steps = 1
batch_size = 12
block_size = 64

# 12 * n_layer * n_embd**2 = 0.79M parameters in the blocks
n_layer = 4
n_head = 4
n_embd = 128
dropout = 0.0 # it sees every character about once: no overfitting to prevent

learning_rate = 1e-3
max_iters = 3000
lr_decay_iters = 3000 # as max_iters
min_lr = 1e-4 # a tenth of learning_rate
beta2 = 0.99 # few tokens per iteration make noisy gradients: average over more of them
warmup_iters = 100
