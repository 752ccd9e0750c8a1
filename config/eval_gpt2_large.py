# Evaluates OpenAI's gpt2-large (774M parameters: 36 layers, 20 heads, 1280 wide) on OpenWebText.
# 500 batches * 8 sequences * 1024 tokens = 4.1M tokens of each split

init_from = 'gpt2-large'
eval_only = True
eval_iters = 500
batch_size = 8
dataset = 'openwebtext'
wandb_log = False
