# Evaluates OpenAI's gpt2 (124M parameters: 12 layers, 12 heads, 768 wide) on OpenWebText.
# 500 batches * 8 sequences * 1024 tokens = 4.1M tokens of each split

init_from = 'gpt2'
eval_only = True
eval_iters = 500
batch_size = 8
dataset = 'openwebtext'
wandb_log = False
