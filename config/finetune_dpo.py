# teaches a chat model by pairs of answers (DPO, with LoRA); first, with lines of "messages", "chosen" and "rejected":
# python data/chat/prepare.py pairs.jsonl --tokenizer=MODEL --out_dir data/pairs
# python train_jax.py config/finetune_dpo.py --init_from=MODEL
out_dir = 'out-dpo'
dataset = 'pairs'
eval_interval = 10
eval_iters = 8
always_save_checkpoint = False

# the reference is the frozen base itself, without its update
lora_rank = 8
lora_alpha = 16
beta = 0.1
length_normalized = False # True: answers of different lengths count alike; beta is then 5 to 10

# 4 pairs = 8 sequences x 256 tokens per iteration; longer pairs are left out
batch_size = 4
gradient_accumulation_steps = 2
block_size = 256
max_iters = 40

learning_rate = 1e-4
decay_lr = False
weight_decay = 0.0
