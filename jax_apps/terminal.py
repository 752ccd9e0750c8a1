"""A conversation in a terminal: sample_jax.py --interactive=True."""
import contextlib
import importlib
import json
import os
import re
import select
import sys
from pathlib import Path

from jax_flags import UserError
from jax_generate import PrefixCache
from jax_hub.chats import check_is_written, final_answer
from jax_text import Generation, warn_if_too_long

COMMANDS = '/retry, /clear, /save FILE, /help, /exit; Ctrl-C ends an answer, Ctrl-D leaves'


def read_turn():
    """Returns the line that the user types. If the user pastes several lines, returns them as one
    text."""
    text = input('> ')
    while has_more_input():
        text += '\n' + input()
    return text


def has_more_input():
    """Returns whether a terminal has another line within 0.05 s, which is faster than anyone
    types."""
    if os.name != 'posix' or not sys.stdin.isatty():
        return False
    ready, _, _ = select.select([sys.stdin], [], [], 0.05)
    return bool(ready)


class Chat:
    """Holds a conversation. Each line gets an answer, and the lines and answers so far are the
    context of the next answer.

    model: a TextModel. system: the text of the system prompt, '' for none. sampling: a
    TextSampling. The constructor raises UserError if the chat template leaves the system prompt
    out."""

    def __init__(self, model, system, sampling):
        self.model = model
        self.sampling = sampling
        self.system = []
        if system:
            self.system = [{'role': 'system', 'content': system}]
            check_is_written(model.tokenizer, [*self.system, {'role': 'user', 'content': 'x'}])
        self.messages = []  # the user's and the model's, in turn
        self.saved_to = ''  # the file that /save has made of this conversation
        self.n_answers = 0
        self.prefix_cache = PrefixCache()

    def run(self):
        """Asks for lines until the user leaves."""
        with contextlib.suppress(ImportError):
            importlib.import_module('readline')  # line editing and history for input()

        # Each round takes a line, until there is none.
        while True:
            try:
                line = read_turn()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print('\n(Ctrl-D leaves)')
                continue

            # A command, or a line that the model answers.
            if line in ('/exit', '/quit'):
                return
            if re.fullmatch(r'/\w+( .*)?', line):
                self.obey(line)
            elif line:
                self.answer(self.messages, line)

    def obey(self, line):
        """Executes a line that begins with '/', one of COMMANDS. Prints a message for an unknown
        command."""
        if line == '/help':
            print(f'({COMMANDS})')
        elif line == '/clear':
            self.messages = []
            self.saved_to = ''
        elif line == '/save':
            print('(/save needs the name of a file)')
        elif line.startswith('/save '):
            self.save(line.removeprefix('/save ').strip())
        elif line == '/retry' and not self.messages:
            print('(there is no answer yet)')
        elif line == '/retry':
            self.answer(self.messages[:-2], self.messages[-2]['content'])
        else:
            print(f'(there is no command {line}; {COMMANDS})')

    def encode(self, messages):
        """Returns the token ids of the messages. They are encoded as a chat if the tokenizer has a
        chat template, else as plain text in which each message of the user begins a new line."""
        if self.model.tokenizer.chat_template is not None:
            return self.model.encode([*self.system, *messages])
        text = ''
        for i, message in enumerate(messages):
            if message['role'] == 'user' and i > 0:
                text += '\n'
            text += message['content']
        return self.model.encode(text)

    def forget_oldest(self, messages):
        """Leaves out the oldest turns until the remaining messages and an answer fit into the
        context, and prints how many turns these are. Returns the remaining messages. A turn is a
        question and its answer; the last question always stays. The answer counts as max_new_tokens
        tokens, or half the context if that is less."""
        block_size = self.model.config.block_size
        room = block_size - min(self.sampling.max_new_tokens, block_size // 2)

        # Without the oldest turn, until the rest fits.
        kept = messages
        while len(kept) > 1 and len(self.encode(kept)) > room:
            kept = kept[2:]

        # Nothing is forgotten silently.
        n_forgotten = (len(messages) - len(kept)) // 2
        if n_forgotten:
            forgotten = 'turn is' if n_forgotten == 1 else f'{n_forgotten} turns are'
            print(f'(the context of {block_size:,} tokens is full: the oldest {forgotten} '
                  'forgotten)')
        return kept

    def answer(self, messages, line):
        """Prints the answer to `line`, which follows `messages`. Ctrl-C ends the answer. The
        conversation becomes the messages, the line and the answer. If the line cannot be answered,
        or Ctrl-C comes before the first word, the conversation stays as it was."""
        answer = ''
        try:
            # the prompt, within the context
            messages = self.forget_oldest([*messages, {'role': 'user', 'content': line}])
            prompt = self.encode(messages)
            warn_if_too_long(self.model, [prompt])

            # the answer, printed as it grows; each has a random key of its own
            generation = Generation(
                self.model, [prompt], self.sampling, first_sample=self.n_answers, streaming=True,
                prefix_cache=self.prefix_cache)
            with contextlib.closing(generation.pieces(with_prompt=False)) as pieces:
                for piece in pieces:
                    answer += piece
                    print(piece, end='', flush=True)
            print()
            if generation.was_cut(0):
                print(f'(cut at max_new_tokens={self.sampling.max_new_tokens})')
        except KeyboardInterrupt:
            print('\n(interrupted)')
            if not answer:
                return
        except Exception as error:  # whatever it is, the conversation goes on
            name = '' if isinstance(error, UserError) else f'{type(error).__name__}: '
            print(f'error: {name}{error}')
            return
        finally:
            self.n_answers += 1
        self.messages = [*messages, {'role': 'assistant', 'content': final_answer(answer)}]

    def save(self, path):
        """Writes the conversation as one line of JSON, {"messages": [{"role": ..., "content":
        ...}]}. Overwrites no file but that of an earlier /save of this conversation."""
        if path != self.saved_to and os.path.isfile(path):
            print(f'error: {path} exists; name another file')
            return
        n_turns = len(self.messages) // 2
        try:
            text = json.dumps({'messages': self.system + self.messages}, ensure_ascii=False)
            Path(path).write_text(f'{text}\n', encoding='utf-8')
            turns = '1 turn' if n_turns == 1 else f'{n_turns} turns'
            print(f'({turns} in {path})')
            self.saved_to = path
        except (OSError, ValueError) as error:  # ValueError: a name with a NUL
            print(f'error: cannot write {path}: {error}')
