# finetunes a chat model with LoRA; first: python data/chat/prepare.py mychats.jsonl --tokenizer=MODEL
# python train_jax.py config/finetune_lora.py --init_from=MODEL
out_dir = 'out-lora'
dataset = 'chat'
eval_interval = 10
eval_iters = 8
always_save_checkpoint = False

# A kernel [I, O] has I x O weights, its update rank x (I + O). SmolLM2-135M, per layer: 576 x 960 + 576 x 576 +
# 3 x 576 x 1536 = 3,538,944, with rank 8: 8 x (1536 + 1152 + 3 x 2112) = 72,192. In 30 layers: 2.17M of 134.5M.
# float32: weights 538 MB, or 136 MB with quantize = 'int8'; updates, gradients and AdamW's moments 4 x 8.7 MB,
# where training all weights takes 4 x 538 MB. A checkpoint has 26 MB.
lora_rank = 8
lora_alpha = 16

# 4 sequences x 256 tokens = 1,024 tokens per iteration; a RoPE model keeps its full context
batch_size = 2
gradient_accumulation_steps = 2
block_size = 256
max_iters = 40
# On data/chat's twelve conversations (block_size = 96, 384 tokens per iteration; two shared CPU cores, jax 0.10.2):
# train loss 3.22 -> 1.98 after 10 iterations -> 1.15 after 20, val 2.68 -> 2.49 -> 2.52; 3 s per iteration

# ten times that of finetune_chat.py: b starts at zero, and an update is the product of two matrices
learning_rate = 2e-4
decay_lr = False
weight_decay = 0.0
