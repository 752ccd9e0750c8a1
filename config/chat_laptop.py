# A small model that answers questions about Python's own library, without a network. On two quiet cores this takes
# some 22 minutes, and the model before it 6 (docs/lab_log.md, A chat on a laptop):
#   python data/pystdlib/prepare.py && python train_jax.py config/train_pystdlib.py
#   python data/pychat/prepare.py --tokenizer=data/pystdlib
#   python train_jax.py config/chat_laptop.py
#   python sample_jax.py --out_dir=out-chat-laptop --serve=8000

init_from = 'out-pystdlib' # the model that config/train_pystdlib.py makes
out_dir = 'out-chat-laptop'
dataset = 'pychat'
eval_interval = 1000
eval_iters = 40
log_interval = 100

# 768 tokens per iteration in rows of whole conversations, as data/pychat/prepare.py packs them
gradient_accumulation_steps = 1
batch_size = 3
block_size = 256
attention = 'xla'

# it learns five thousand sentences by heart: the rate of a training from scratch, not of a finetuning
optimizer = 'muon'
learning_rate = 4e-3
lr_schedule = 'linear'
min_lr = 0.0
warmup_iters = 100
beta2 = 0.99
max_iters = 20000
dropout = 0.0
