# A character-level GPT on tiny Shakespeare, nanoGPT's "baby GPT": minutes on a GPU, a few hours on two CPU cores.
# For a CPU make it smaller, see README.md.
#   python data/shakespeare_char/prepare.py && python train_jax.py config/train_shakespeare_char.py

out_dir = 'out-shakespeare-char'
eval_interval = 250 # a million characters are soon known by heart: look often
eval_iters = 200
log_interval = 10

always_save_checkpoint = False # it overfits; keep the checkpoint with the best validation loss

wandb_log = False
wandb_project = 'shakespeare-char'
wandb_run_name = 'mini-gpt'

dataset = 'shakespeare_char'
# 1 * 64 * 256 = 16,384 characters per iteration; 5000 iterations are 82M characters, 82 epochs of train.bin (1,003,854)
gradient_accumulation_steps = 1
batch_size = 64
block_size = 256

# 12 * n_layer * n_embd**2 = 10.6M parameters in the blocks
n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.2

learning_rate = 1e-3 # small models bear more than the 6e-4 of GPT-2
max_iters = 5000
lr_decay_iters = 5000 # as max_iters
min_lr = 1e-4 # a tenth of learning_rate
beta2 = 0.99 # few tokens per iteration make noisy gradients: average over more of them
warmup_iters = 100
