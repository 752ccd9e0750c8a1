"""The samples of sample_jax.py: rows to batches, and a file that a killed command continues."""
import hashlib
import json
import os

from jax_flags import UserError, read_text, write_text

# the flags that no text depends on; what `start` gives is in the prompts
WITHOUT_EFFECT = {
    'output', 'batch_size', 'start', 'each_line', 'device', 'compile', 'stream', 'speed', 'host', 'allow', 'serve',
    'coordinator_address', 'num_processes', 'process_id'}


def digest_flags(flags, title, prompts):
    """Returns a digest of the flags, the title of the model, and the ids of the prompts: the texts
    depend on these."""
    values = {name: value for name, value in flags.items() if name not in WITHOUT_EFFECT}
    content = json.dumps([values, title, prompts], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def split_rows(prompts, num_samples, batch_size, done=()):
    """Returns batches of at most batch_size rows (number of the prompt, number of its sample) that
    are not done. Rows of similar length share a batch; within it they are in order."""
    rows = [(number, index) for number in range(len(prompts)) for index in range(num_samples)]
    rows = [row for row in rows if row not in done]
    rows.sort(key=lambda row: len(prompts[row[0]]))  # stable
    return [sorted(rows[i:i + batch_size]) for i in range(0, len(rows), batch_size)]


class SampleFile:
    """A file of samples, a line of JSON each; each batch is appended.

    done: {(number of the prompt, number of the sample): the line} that an earlier command with the
    same flags had written before it was killed. Raises UserError for a file of other flags."""

    def __init__(self, path, digest):
        self.path = path
        self.digest = digest
        self.done = {}
        if os.path.exists(path) and not os.path.isfile(path):
            return  # a pipe, or /dev/stdout
        if os.path.exists(path):
            *lines, _ = read_text(path, newline='').split('\n')  # the last one is not whole
            for line in lines:
                self.keep(line)
        write_text(path, ''.join(f'{json.dumps(line, ensure_ascii=False)}\n'
                                 for line in self.done.values()))

    def keep(self, text):
        """Keeps a line of an earlier command."""
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
        """Writes {(number, index): line} of a batch."""
        texts = []
        for (number, index), line in lines.items():
            line = {**line, 'index': index, 'number': number, 'flags': self.digest}
            texts.append(json.dumps(line, ensure_ascii=False) + '\n')
        with open(self.path, 'a', encoding='utf-8') as file:
            file.write(''.join(texts))

    def finish(self):
        """Sorts the lines by prompt when all are there."""
        if not os.path.isfile(self.path):
            return
        lines = {}
        for text in read_text(self.path, newline='').split('\n')[:-1]:
            line = json.loads(text)
            lines[line['number'], line['index']] = text
        write_text(self.path, ''.join(f'{lines[row]}\n' for row in sorted(lines)))
