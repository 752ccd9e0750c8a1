# Tiny Shakespeare below the loss of nanoGPT's CPU recipe in 300 iterations instead of its 2000:
#   python train_jax.py config/train_shakespeare_char_cpu_fast.py
# Its model has nanoGPT's size and a Qwen3's parts. Validation loss after 300 iterations with Muon: GPT-2's parts 2.08,
# with RoPE 1.98, with RMSNorm and QK norm, too, 1.88, with SwiGLU 1.86 (docs/lab_log.md, Muon in four steps).

out_dir = 'out-shakespeare-char-cpu-fast'
device = 'cpu'
eval_interval = 300 # at the start and at the end
eval_iters = 20 # as in the recipe that this is compared with: 240 windows
log_interval = 10

dataset = 'shakespeare_char'
# 12 * 64 = 768 characters per iteration; 300 iterations are 230,400, a quarter of the 1,003,854 of train.bin
gradient_accumulation_steps = 1
batch_size = 12
block_size = 64

n_layer = 4
n_head = 4
n_embd = 128
dropout = 0.0 # nothing is seen twice
bias = False
norm = 'rms'
position = 'rope'
qk_norm = 'learned'
mlp = 'swiglu'
n_inner = 344 # 3 * 128 * 344 = 132,096 weights, about the 2 * 128 * 512 of GPT-2's MLP

optimizer = 'muon'
learning_rate = 8e-3 # 1.2e-2 ends 0.01 higher
lr_schedule = 'linear'
max_iters = 300
lr_decay_iters = 300 # as max_iters
min_lr = 0.0
warmup_iters = 20
beta2 = 0.99
