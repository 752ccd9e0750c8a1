# config/train_pystdlib.py's recipe (a Qwen3 with Muon) at GPT-2's size, 124M, for accelerators. It has not been run at
# scale: no loss, no speed, and the learning rate comes from a rule; at 11M parameters it needs little more than half of
# AdamW's tokens (git show fb10e26~1:docs/lab_log.md, The recipe beside AdamW). Any number of devices that divides 480:
#   python train_jax.py config/train_gpt2_fast.py
# Compiled at 27b83e3, whose tool printed more, not run: for 8 H100 (bench_jax.py --mode=compile --topology=h100:1x8,
# jax 0.10.2, bfloat16, cuDNN's attention): peak 9.99 of 84.90 GB per device, 865 MB sent per iteration (51 MB of it
# exposed); the bounds of an iteration are 53 ms and 96 ms. For 8 v5e (--topology=v5e:2x4, libtpu 0.0.42) add
# --scan_layers=True --loss_chunk=256: peak 16.54 of 16.91 GB per device (without loss_chunk 19.16: does not fit), as
# many bytes sent, bounds of 267 ms and 3,805 ms

out_dir = 'out-gpt2-fast'
eval_interval = 250
eval_iters = 200
log_interval = 10

dataset = 'openwebtext'
# 40 micro-batches * 12 sequences * 1024 tokens = 491,520 tokens per iteration, shared by all devices
gradient_accumulation_steps = 5 * 8
batch_size = 12
block_size = 1024

# a Qwen3: export_jax.py makes a folder of it that transformers reads
n_layer = 12
n_head = 12
n_embd = 768
bias = False
norm = 'rms'
position = 'rope'
qk_norm = 'learned'
mlp = 'swiglu'
n_inner = 2048 # 3 * 768 * 2048 = 4.7M weights, the 2 * 768 * 3072 of GPT-2's MLP

optimizer = 'muon'
# An update of Muon has the spectral norm 0.2 sqrt(longer side) * learning_rate here (orthogonalize). For the same
# change of the features at every width, that of a matrix between layers of equal width must not grow with it (spectral
# condition, arXiv:2310.17813), so the learning rate goes with 1 / sqrt(width): 8e-3 sqrt(128 / 768), from the width and
# the learning rate of config/train_pystdlib.py
learning_rate = 3.3e-3
lr_schedule = 'linear'
max_iters = 5000 # 2.5B tokens, 20 per parameter (arXiv:2203.15556)
min_lr = 0.0
warmup_iters = 170 # 3.4% of max_iters
