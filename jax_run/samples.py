"""Writes the file of samples of sample_jax.py. If a command was killed, the same command continues
the file."""
import contextlib
import json
import os

from jax_flags import UserError, digest, read_text, write_text

# flags that do not change the texts; `start` does, and the digest has the prompts that it gives
WITHOUT_EFFECT = {
    'output', 'batch_size', 'start', 'each_line', 'device', 'compile', 'stream', 'speed', 'host', 'allow', 'serve',
    'coordinator_address', 'num_processes', 'process_id'}
BEGINNING = '{"prompt": '  # of each line


def digest_flags(flags, title, prompts):
    """Returns a digest of what the samples depend on: the flags, the title of the model, and the
    ids of the prompts. A file of samples with another digest is not continued."""
    values = {name: value for name, value in flags.items() if name not in WITHOUT_EFFECT}
    return digest([values, title, prompts])[:16]


def is_printed_to(path):
    """Returns whether a file is this process's stdout or stderr, as /dev/stdout with > file."""
    with contextlib.suppress(OSError):  # stdout is closed
        return any(os.path.samestat(os.stat(path), os.fstat(number)) for number in (1, 2))
    return False


class SampleFile:
    """A file of samples, one JSON object per line. append() adds the lines of a batch.

    `done` holds the lines that an earlier command with the same flags had written before it was
    killed: {(index of the prompt, index of its sample): line, a dict}. digest: what digest_flags
    returns. Raises UserError if the file was written with other flags."""

    def __init__(self, path, digest):
        self.path = path
        self.digest = digest
        self.done = {}
        if os.path.isfile(path):
            if is_printed_to(path):
                raise UserError(f'output={path} is where the texts are printed: name another file')
            *lines, rest = read_text(path, newline='').split('\n')
            is_incomplete = rest.startswith(BEGINNING) or BEGINNING.startswith(rest)
            for line in lines if is_incomplete else [*lines, rest]:
                self.keep(line)
        elif os.path.exists(path):
            return  # a pipe, or /dev/stdout
        write_text(path, ''.join(f'{json.dumps(line, ensure_ascii=False)}\n'
                                 for line in self.done.values()))

    def keep(self, text):
        """Puts `text`, a line of the file that an earlier command wrote, into `done`. Raises
        UserError if that command had other flags."""
        try:
            line = json.loads(text)
            is_ours = line['flags'] == self.digest
            row = line['number'], line['index']
        except (ValueError, KeyError, TypeError, RecursionError):
            is_ours = False
        if not is_ours:
            raise UserError(f'output={self.path} holds samples of other flags, prompts or another '
                            'model: delete it, or name another file')
        self.done[row] = line

    def append(self, lines):
        """Appends the lines of a batch, {(index of the prompt, index of its sample): line}. Adds
        three values to each line: the two indices, and the digest of the flags (see the class)."""
        with open(self.path, 'a', encoding='utf-8') as file:
            for (number, index), line in lines.items():
                line = {**line, 'index': index, 'number': number, 'flags': self.digest}
                file.write(json.dumps(line, ensure_ascii=False) + '\n')

    def finish(self):
        """Sorts the lines of the file by prompt, then by sample. Call this method when the file has
        all samples."""
        if not os.path.isfile(self.path):
            return
        lines = {}
        for text in read_text(self.path, newline='').split('\n')[:-1]:
            line = json.loads(text)
            lines[line['number'], line['index']] = text
        write_text(self.path, ''.join(f'{lines[row]}\n' for row in sorted(lines)))
