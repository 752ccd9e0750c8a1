# GPT-2 (124M) on OpenWebText, as nanoGPT reproduces it. The run is the same on any number of devices that divides 480.
#   python train_jax.py config/train_gpt2.py

wandb_log = True
wandb_project = 'owt'
wandb_run_name = 'gpt2-124M'

# 40 micro-batches * 12 sequences * 1024 tokens = 491,520 tokens per iteration, shared by all devices
batch_size = 12
block_size = 1024
gradient_accumulation_steps = 5 * 8

# 600,000 iterations * 491,520 tokens = 295B tokens, 33 times the 9.0B of OpenWebText
max_iters = 600000
lr_decay_iters = 600000 # as max_iters

eval_interval = 1000
eval_iters = 200
log_interval = 10

weight_decay = 1e-1
