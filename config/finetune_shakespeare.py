# Fine-tunes GPT-2 XL on tiny Shakespeare; choose a smaller init_from for a smaller machine.

out_dir = 'out-shakespeare'
eval_interval = 5
eval_iters = 40
wandb_log = False
wandb_project = 'shakespeare'
wandb_run_name = 'ft-gpt2-xl'

dataset = 'shakespeare'
init_from = 'gpt2-xl'

always_save_checkpoint = False # only when the validation loss improves

# 32 micro-batches * 1 sequence * 1024 tokens = 32,768 tokens per iteration;
# train.bin has 301,966 tokens, so an epoch is 9.2 iterations and 20 iterations are 2.2 epochs
batch_size = 1
gradient_accumulation_steps = 32
max_iters = 20

learning_rate = 3e-5 # constant: just nudge the weights
decay_lr = False
