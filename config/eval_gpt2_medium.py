# Evaluates OpenAI's gpt2-medium (350M parameters: 24 layers, 16 heads, 1024 wide) on OpenWebText.
# 500 batches * 8 sequences * 1024 tokens = 4.1M tokens of each split

init_from = 'gpt2-medium'
eval_only = True
eval_iters = 500
batch_size = 8
dataset = 'openwebtext'
wandb_log = False
