# A character-level Llama on the Python standard library: RMSNorm, RoPE, GQA, SwiGLU. Needs no network, takes minutes
# on two CPU cores. With --qk_norm=learned it is a Qwen3, with --n_expert=8 --n_inner=172 as well a Qwen3-MoE.

out_dir = 'out-llama-char'
eval_interval = 500
eval_iters = 20
log_interval = 50

dataset = 'pystdlib_char'
# as config/train_pystdlib_char.py: 1 * 12 * 64 = 768 characters per iteration, 6000 iterations are 4.6M characters
gradient_accumulation_steps = 1
batch_size = 12
block_size = 64

n_layer = 4
n_head = 4
n_embd = 128
dropout = 0.0
bias = False

norm = 'rms'
position = 'rope'
n_kv_head = 2 # half the KV cache
mlp = 'swiglu'
n_inner = 344 # 3 * 128 * 344 = 132,096 weights, about the 2 * 128 * 512 of GPT-2's MLP
tied_head = False

learning_rate = 2e-3
max_iters = 6000
min_lr = 2e-4 # a tenth of learning_rate
beta2 = 0.99 # few tokens per iteration make noisy gradients: average over more of them
warmup_iters = 100
