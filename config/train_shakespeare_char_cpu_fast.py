# Tiny Shakespeare below the loss of nanoGPT's CPU recipe in 400 iterations instead of its 2000:
#   python data/shakespeare_char/prepare.py && python train_jax.py config/train_shakespeare_char_cpu_fast.py
# A Qwen3 with a quarter of the parameters of nanoGPT's model, 0.2M. What counts is the loss after a few seconds: in a
# given time a smaller model sees more text (docs/lab_log.md, A smaller model for the short run).

out_dir = 'out-shakespeare-char-cpu-fast'
device = 'cpu'
eval_interval = 400 # at the start and at the end
eval_iters = 20 # as in the recipe that this is compared with: 240 windows
log_interval = 10

dataset = 'shakespeare_char'
# 12 * 64 = 768 characters per iteration; 400 iterations are 307,200, a third of the 1,003,854 of train.bin
gradient_accumulation_steps = 1
batch_size = 12
block_size = 64

n_layer = 2
n_head = 4
n_embd = 96
dropout = 0.0 # nothing is seen twice
bias = False
norm = 'rms'
position = 'rope'
qk_norm = 'learned'
mlp = 'swiglu'
n_inner = 256 # 3 * 96 * 256 = 73,728 weights, the 2 * 96 * 384 of GPT-2's MLP

optimizer = 'muon'
learning_rate = 8e-3 # 1e-2 ends 0.02 higher
lr_schedule = 'linear'
max_iters = 400
min_lr = 0.0
warmup_iters = 20
beta2 = 0.99
