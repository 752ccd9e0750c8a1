# The Python packages of an environment as a text, 137 million characters with those of this project: 20 minutes on two
# CPU cores.
#   python data/pystdlib/prepare.py .venv/lib/python3.11/site-packages --tokenizer=bpe:8192 --out_dir=data/packages
#   python train_jax.py config/train_packages.py
# With a GPU, a model as large as GPT-2 (not run yet): the same with these flags behind it
#   --n_layer=12 --n_head=12 --n_embd=768 --n_inner=2048 --block_size=1024 --batch_size=32 --learning_rate=3e-3

out_dir = 'out-packages'
minutes = 20.0
eval_interval = 1000
eval_iters = 50
log_interval = 100
sample_prompt = 'def '

dataset = 'packages'
gradient_accumulation_steps = 1
batch_size = 4
block_size = 256

n_layer = 6
n_head = 4
n_embd = 256
dropout = 0.0 # of so much text 20 minutes read a part
bias = False
norm = 'rms'
position = 'rope'
qk_norm = 'learned'
mlp = 'swiglu'
n_inner = 688

optimizer = 'muon'
learning_rate = 6e-3
lr_schedule = 'linear'
min_lr = 0.0
warmup_iters = 100
beta2 = 0.99
