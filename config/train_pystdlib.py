# A small Qwen3 on the Python standard library, with a BPE of its own: needs no network, takes 3 to 6 minutes on two
# CPU cores, and ends at 1.24 bits per byte over all of val, config/train_pystdlib_char.py at 1.91 (docs/performance.md,
# Loss; what each part gains: docs/lab_log.md, The recipe, part by part).
#   python data/pystdlib/prepare.py && python train_jax.py config/train_pystdlib.py

out_dir = 'out-pystdlib'
eval_interval = 500
eval_iters = 20
log_interval = 50
sample_prompt = 'def ' # what the model makes of it, at every evaluation but the first

dataset = 'pystdlib'
# 1 * 3 * 256 = 768 tokens of the BPE, about 2,500 characters, per iteration; 5000 iterations are 1.6 epochs
gradient_accumulation_steps = 1
batch_size = 3
block_size = 256 # an earlier form ended 0.08 bits per byte higher with 12 sequences of 64, 0.05 with 6 of 128

attention = 'xla' # sequences this short fit into a CPU's cache: 0.96 of the time of 'auto' there, chunked

# a Qwen3: export_jax.py makes a folder of it that transformers reads
n_layer = 4
n_head = 4
n_embd = 128
dropout = 0.0
bias = False
norm = 'rms'
position = 'rope'
qk_norm = 'learned'
mlp = 'swiglu'
n_inner = 344 # 3 * 128 * 344 = 132,096 weights, about the 2 * 128 * 512 of GPT-2's MLP

optimizer = 'muon'
learning_rate = 8e-3
lr_schedule = 'linear'
max_iters = 5000
min_lr = 0.0
warmup_iters = 100
beta2 = 0.99
