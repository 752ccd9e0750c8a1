# finetunes a chat model on conversations; first: python data/chat/prepare.py mychats.jsonl --tokenizer=MODEL
# python train_jax.py config/finetune_chat.py --init_from=MODEL
out_dir = 'out-chat'
dataset = 'chat'
eval_interval = 10
eval_iters = 8
always_save_checkpoint = False

# 4 sequences x 256 tokens = 1,024 tokens per iteration; a RoPE model keeps its full context
batch_size = 2
gradient_accumulation_steps = 2
block_size = 256
max_iters = 40

# constant, low learning rate: the model has learned already
learning_rate = 2e-5
decay_lr = False
weight_decay = 0.0
