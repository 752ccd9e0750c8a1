"""
Prepare questions and answers about the modules, classes, functions and methods of Python's standard
library, such as "What does shutil.copyfile do?". A small model can learn the answers, and a program
can check them. No network is needed. The questions are written in the tokens of the model that you
will finetune. --tokenizer names one of these: the out_dir of this model; the data set that it was
trained on; a Hugging Face folder; a Hugging Face owner/name:
$ python data/pystdlib/prepare.py
$ python data/pychat/prepare.py --tokenizer=data/pystdlib
To prepare questions about a package of your own, from its docstrings (it is read, not run):
$ python data/pychat/prepare.py path/to/package --tokenizer=out-mine --out_dir data/mychat
Saves what data/chat/prepare.py saves, and the conversations (chats.jsonl). Also writes questions
for eval_jax.py into the folder tasks. Their wording differs from all questions of the train part.
"""
import json
import math
import os
import platform
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from common import create_parser, fail, load_model_tokenizer, positive
from names import read_names
from questions import Maker

here = os.path.dirname(os.path.abspath(__file__))


def write_rows(path, conversations):
    """Writes conversations as JSON lines. A conversation is a list of texts: a question, its
    answer, the next question, its answer, and so on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, 'w') as f:
        for turns in conversations:
            messages = []
            for i, content in enumerate(turns):
                messages.append({'role': 'assistant' if i % 2 else 'user', 'content': content})
            f.write(json.dumps({'messages': messages}) + '\n')


def main():
    """Prepares the data set that the flags ask for."""
    parser = create_parser(__doc__, here)
    parser.add_argument('input', nargs='?',
                        help="a folder of Python code (default: this Python's library)")
    parser.add_argument('--tokenizer', required=True,
                        help='the model: a run, a data set, a Hugging Face folder or owner/name')
    parser.add_argument('--template', default=Path(here) / 'prompt.jinja',
                        metavar='plain|chatml|FILE',
                        help="as of data/chat/prepare.py (default: prompt.jinja beside this file, "
                             "Python's own prompt, 4 tokens for a question where plain has 11)")
    parser.add_argument('--rows', type=positive, default=256, metavar='BLOCK_SIZE',
                        help='as of data/chat/prepare.py (default: 256)')
    parser.add_argument('--seed', type=int, default=1337, help='draws forms and invented names')
    args = parser.parse_args()
    if args.input and not os.path.isdir(args.input):
        fail(f'{args.input} is not a folder; name a folder of Python code')

    # the names, and conversations about them
    names, every = read_names(args.input)
    if len(names) < 20:
        fail(f'{args.input} has {len(names)} names with a docstring of a sentence in ASCII, too few')
    # refuse, before a minute's work, what is no tokenizer or does not fit the template
    enc, _ = load_model_tokenizer(args.tokenizer)
    if enc.end_token is None and args.template == parser.get_default('template'):
        fail(f'{args.tokenizer} has no token that ends a text: add --template=plain')
    library = Path(args.input).resolve().name if args.input else "Python's library"
    maker = Maker(names, every, library, args.seed)
    n_invented = 2 * len(names)
    train = maker.make('train', n_invented)
    # data/chat/prepare.py takes the last tenth for validation
    val = maker.make('val', n_invented)[:math.ceil(len(train) / 9)]
    folder = Path(args.out_dir)
    if (folder / 'chats.jsonl').exists() and not (folder / 'tasks').exists():
        fail(f"{folder / 'chats.jsonl'} is not of this script; choose another --out_dir")

    # the questions for eval_jax.py; and the conversations last, because tasks/ says whose they are
    for split, prefix in (('val', 'val_'), ('test', '')):
        for name, conversations in maker.make_tasks(split).items():
            write_rows(folder / 'tasks' / f'{prefix}{name}.jsonl', conversations)
    write_rows(folder / 'chats.jsonl', train + val)
    n_characters = sum(len(named.sentence) for named in names.values())
    source = args.input or f'the library of Python {platform.python_version()}'
    print(f'{len(names):,} names of {source}, {n_characters:,} characters of docstrings',
          flush=True)

    # the data set
    chat = Path(here).parent / 'chat' / 'prepare.py'
    command = [sys.executable, chat, folder / 'chats.jsonl', '--tokenizer', args.tokenizer,
               '--template', args.template, '--rows', str(args.rows), '--out_dir', folder]
    sys.exit(subprocess.run(command).returncode)


if __name__ == '__main__':
    main()
