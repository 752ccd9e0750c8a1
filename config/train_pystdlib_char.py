# A character-level GPT on the Python standard library: needs no network, takes about 3 minutes on two CPU cores.

out_dir = 'out-pystdlib-char'
eval_interval = 500
eval_iters = 20
log_interval = 50

dataset = 'pystdlib_char'
# 1 * 12 * 64 = 768 characters per iteration, 6000 iterations are 4.6M characters
gradient_accumulation_steps = 1
batch_size = 12
block_size = 64

# 12 * n_layer * n_embd**2 = 0.79M parameters in the blocks
n_layer = 4
n_head = 4
n_embd = 128
dropout = 0.0 # 4.6M of the 7.5M characters are seen, each once: no overfitting to prevent

learning_rate = 2e-3
max_iters = 6000
min_lr = 2e-4 # a tenth of learning_rate
beta2 = 0.99 # few tokens per iteration make noisy gradients: average over more of them
warmup_iters = 100
