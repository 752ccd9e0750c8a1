# Evaluates OpenAI's gpt2-xl (1558M parameters: 48 layers, 25 heads, 1600 wide) on OpenWebText.
# 500 batches * 8 sequences * 1024 tokens = 4.1M tokens of each split

init_from = 'gpt2-xl'
eval_only = True
eval_iters = 500
batch_size = 8
dataset = 'openwebtext'
wandb_log = False
