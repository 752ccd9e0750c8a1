"""Reading what people have: texts, and files of rows. What a file is, its content decides: JSON
lines, a JSON array, CSV or parquet, in UTF-8 or UTF-16, plain or compressed, whatever the case of
its ending."""
import bz2
import codecs
import contextlib
import csv
import gzip
import io
import itertools
import json
import lzma
import os
import re
import stat
import zlib
from typing import NamedTuple

from jax_flags import UserError

JSON_ENDINGS = ('.json', '.jsonl', '.ndjson', '.jsonlines')
CSV_ENDINGS = ('.csv', '.tsv')
PARQUET_ENDINGS = ('.parquet', '.pq')
ROW_ENDINGS = JSON_ENDINGS + CSV_ENDINGS + PARQUET_ENDINGS
COMPRESSED_ENDINGS = ('.gz', '.zst', '.bz2', '.xz')
MAGIC = {  # how a compressed file begins
    'gzip': b'\x1f\x8b', 'zstd': b'\x28\xb5\x2f\xfd', 'xz': b'\xfd7zXZ\0', 'bz2': b'BZh'}
BLOCK = 2**20  # characters that are read at a time
HEAD = 2**20  # characters that tell JSON lines from other JSON
MAX_ROW = 2**28  # characters of a row: a damaged or hostile file does not fill the memory
REMEDY = 'mend that file or leave it out'
BATCH_ROWS = 100  # of parquet, at most
BATCH_BYTES = 2**24  # of parquet, about


# -----------------------------------------------------------------------------
# bytes and characters

def ending(path):
    """Returns the ending of a file's name in small letters, without that of its compression:
    '.jsonl' of A.JSONL.GZ."""
    name = path.lower()
    for compressed in COMPRESSED_ENDINGS:
        name = name.removesuffix(compressed)
    return os.path.splitext(name)[1]


def open_regular(path):
    """Opens a regular file, or a link to one, for its bytes. A pipe would be waited for, and can be
    read only once. Raises UserError for anything else, OSError."""
    flags = os.O_RDONLY
    for name in ('O_NONBLOCK', 'O_BINARY'):  # a pipe is not waited for; of Windows
        flags |= getattr(os, name, 0)
    descriptor = os.open(path, flags)
    file = open(descriptor, 'rb')
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise UserError(f'{path} is no regular file; save what it gives as one first')
    return file


def open_bytes(path):
    """Opens a file for its bytes, decompressed. Raises UserError for an archive, which holds
    several files."""
    file = open_regular(path)
    start = file.peek(265)[:265]

    # How it is packed, by its first bytes.
    kind = None
    for name, magic in MAGIC.items():
        if start.startswith(magic):
            kind = name

    # zip and tar hold several files: which of them are meant is not known.
    if start.startswith((b'PK\3\4', b'PK\5\6')) or start[257:262] == b'ustar':
        file.close()
        raise UserError(f'{path} is an archive; unpack it, and name the folder')

    # A reader of the bytes before packing.
    if kind == 'gzip':
        return gzip.GzipFile(fileobj=file)
    if kind == 'xz':
        return lzma.LZMAFile(file)
    if kind == 'bz2' and start[4:10] == b'1AY&SY':  # a text may begin with BZh
        return bz2.BZ2File(file)
    if kind == 'zstd':
        import pyarrow
        return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(file), 'zstd'))
    return file


def find_encoding(start, are_rows):
    """Returns the encoding of a text that begins with these bytes: what its byte-order mark says,
    else UTF-8. Rows may lack the mark, because they begin with ASCII: there the zeros tell UTF-16
    and UTF-32."""
    if start.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return 'utf-32'
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return 'utf-16'
    if are_rows and start:
        found = json.detect_encoding(start[:4])
        return 'utf-8-sig' if found == 'utf-8' else found
    return 'utf-8-sig'


@contextlib.contextmanager
def open_text(path, are_rows=False):
    """Opens a file for its characters, decompressed and without a byte-order mark. Raises
    UserError, in the block that reads too, for one that cannot be read, is damaged, or is no
    text."""
    try:
        with open_bytes(path) as file:
            start = file.peek(4)[:4]
            # newline='' because Python would turn \r\n into \n: the same bytes must give the same
            # tokens everywhere
            yield io.TextIOWrapper(file, find_encoding(start, are_rows), newline='')
    except UnicodeDecodeError as e:
        encoding = e.encoding.upper()
        reason = f'{e.reason}: {e.object[e.start]:#04x}'
        raise UserError(f'{path} is not {encoding} text ({reason}); convert it to UTF-8 '
                        'first') from None
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as e:
        raise UserError(f'{path} is damaged ({e}); copy or download it again') from None
    except OSError as e:
        raise UserError(f'cannot read {path} ({e.strerror or e}); name a text file that '
                        'exists') from None


def read_blocks(path, are_rows=False, size=BLOCK):
    """Yields a text in blocks of `size` characters. Raises UserError as open_text does."""
    with open_text(path, are_rows) as file:
        while True:
            block = file.read(size)
            if not block:
                return
            yield block


def read_text(path):
    return ''.join(read_blocks(path))


def read_lines(blocks, path):
    """Yields the lines of a text that comes in blocks. They end at a newline only: JSON may have
    U+2028 in a string. Raises UserError for one of more than MAX_ROW characters."""
    parts = []  # of a line: adding each block to a string would take quadratic time
    n = 0
    for block in blocks:
        first, *others = block.split('\n')
        parts.append(first)
        n += len(first)
        if n > MAX_ROW:
            raise UserError(f'{path} has a row of more than {MAX_ROW:,} characters; {REMEDY}')
        for line in others:
            yield ''.join(parts)
            parts = [line]
            n = len(line)
    yield ''.join(parts)


# -----------------------------------------------------------------------------
# rows

def read_rows(path, keys=(), columns=None):
    """Yields (where, row) of each row of a file, `where` as in 'line 7' or 'row 7', counted from 1.
    A row is a dict or a text. What else a JSON file may have in the place of a row is given as it
    is, for the caller to judge; so is a BadRow, of a table.

    keys: the names that a row is known by, such as ['text']. A table without a column of such a
    name is refused; a JSON object with one is a row itself, and another object is one that holds a
    list of rows. columns: those of a parquet file that are read; None for all. Raises UserError for
    a file that cannot be read or is damaged."""
    kind = kind_of_rows(path)
    if kind == 'parquet':
        yield from read_parquet_rows(path, keys, columns)
    elif kind == 'csv':
        yield from read_csv(path, keys)
    else:
        yield from read_json_rows(path, keys)


def has_parquet(path):
    """Whether the content of a file is parquet's."""
    try:
        with open_regular(path) as file:
            return file.read(4) == b'PAR1'
    except (OSError, UserError):
        return False


def kind_of_rows(path):
    """Returns 'parquet', 'csv' or 'json', for a file of rows."""
    if has_parquet(path) or ending(path) in PARQUET_ENDINGS:
        return 'parquet'
    if ending(path) in CSV_ENDINGS and peek_json(path) is None:
        return 'csv'
    return 'json'


def kind_of_file(path, keys):
    """Returns 'text', or what kind_of_rows says. A file has rows by its ending; .txt, or a file
    without an ending, by its content, if that begins with JSON that has a text by one of the keys.
    A program or a Markdown file with JSON in it is a text; without keys, all but parquet is."""
    if has_parquet(path):
        return 'parquet'
    if not keys:
        return 'text'
    if ending(path) not in ROW_ENDINGS:
        first = peek_json(path) if ending(path) in ('', '.txt') else None
        if isinstance(first, list) and first:
            first = first[0]
        if not isinstance(first, dict):
            return 'text'
        if not any(isinstance(first.get(key), str) for key in keys):
            return 'text'
    return kind_of_rows(path)


def peek_json(path):
    """Returns the first value of a JSON text, [its first element] of an array; None if it does not
    begin with one, or with one of more than BLOCK characters."""
    size = 2**12
    try:
        with contextlib.closing(read_blocks(path, are_rows=True, size=size)) as blocks:
            head = next(blocks, '')
            if not head.lstrip().startswith(('[', '{')):
                return None  # most texts
            rest = itertools.islice(blocks, BLOCK // size)
            stream = JsonStream(itertools.chain([head], rest), path)
            is_array = stream.peek() == '['
            stream.at += is_array
            first = stream.value()
            return [first] if is_array else first
    except UserError:
        return None


class JsonStream:
    """The values of a JSON text that comes in blocks, one after the other; an array's may be larger
    than the memory."""

    def __init__(self, blocks, path):
        self.blocks, self.path = iter(blocks), path
        self.text, self.at = '', 0  # what is in memory, and where the next value begins in it
        self.line = 1  # of text[self.counted]
        self.counted = 0
        self.is_whole = False  # whether `text` reaches to the end
        self.decode = json.JSONDecoder().raw_decode

    def read(self):
        """Reads at least as much as is in memory already, so that the time stays linear, but drops
        what is done."""
        self.number()
        parts = [self.text[self.at:]]
        wanted = max(BLOCK, len(parts[0]))
        if wanted > MAX_ROW:
            raise UserError(f'{self.path} has a row of more than {MAX_ROW:,} characters, in line '
                            f'{self.line}; {REMEDY}')
        self.is_whole = True
        for block in self.blocks:
            parts.append(block)
            wanted -= len(block)
            if wanted <= 0:
                self.is_whole = False
                break
        self.text = ''.join(parts)
        self.at = self.counted = 0

    def number(self):
        """Returns the number of the line in which the next value begins."""
        self.line += self.text.count('\n', self.counted, self.at)
        self.counted = self.at
        return self.line

    def peek(self):
        """Returns the next character that is no space; '' at the end."""
        while True:
            self.at = NO_SPACE.match(self.text, self.at).end()
            if self.at < len(self.text):
                return self.text[self.at]
            if self.is_whole:
                return ''
            self.read()

    def value(self):
        """Returns the next value. Raises UserError if it is not JSON."""
        while True:
            try:
                value, end = self.decode(self.text, self.at)
                is_cut = end == len(self.text)  # a number may go on
                error = None
            except json.JSONDecodeError as e:
                is_cut = e.msg.startswith('Unterminated') or e.pos > len(self.text) - 16
                error = e.msg
            except (ValueError, RecursionError) as e:
                is_cut = False
                error = e

            # It may end in what is not read yet.
            if is_cut and not self.is_whole:
                self.read()
                continue
            if error:
                self.refuse(error)
            self.at = end
            return value

    def refuse(self, reason):
        raise UserError(f'{self.path}, line {self.number()} is not JSON ({reason}); {REMEDY}')

    def values(self):
        """Yields (where, value) of each value, which may take many lines."""
        while self.peek():
            line = self.number()
            yield f'line {line}', self.value()

    def elements(self):
        """Yields (where, value) of each element of an array."""
        self.at += 1
        number = 0
        while self.peek() != ']':
            if number:
                if self.peek() != ',':
                    self.refuse("expected ',' or ']' in the array")
                self.at += 1
                self.peek()
            number += 1
            yield f'row {number}', self.value()
        self.at += 1
        if self.peek():
            self.refuse('something follows the array')


NO_SPACE = re.compile(r'[ \t\n\r]*')


def take(blocks, size):
    """Returns the first characters of a text, at least `size` if there are so many."""
    parts = []
    for block in blocks:
        parts.append(block)
        size -= len(block)
        if size <= 0:
            break
    return ''.join(parts)


def are_json_lines(head):
    """Whether a JSON text that begins so has a value in each line: its first line is one, and
    others follow."""
    line, newline, others = head.lstrip().partition('\n')
    if not newline:
        return len(head) >= HEAD and line.startswith(('{', '"'))  # the first line is long
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return bool(others.strip())


def read_json_lines(blocks, path):
    """Yields (where, value) of each line that is not blank."""
    number = 0
    for line in read_lines(blocks, path):
        number += 1
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise UserError(f'{path}, line {number} is not JSON ({e}); {REMEDY}') from None
        yield f'line {number}', value


def read_json_rows(path, keys):
    """Yields (where, row) of JSON lines, of an array, or of values that take several lines."""
    with contextlib.closing(read_blocks(path, are_rows=True)) as blocks:
        # Rows in lines, elements of an array, or values one after the other.
        head = take(blocks, HEAD)
        whole = itertools.chain([head], blocks)
        if are_json_lines(head):
            rows = read_json_lines(whole, path)
        else:
            stream = JsonStream(whole, path)
            if stream.peek() == '[':
                yield from stream.elements()
                return
            rows = stream.values()

        # A single value may hold all rows.
        first_two = list(itertools.islice(rows, 2))
        if len(first_two) == 1:
            yield from rows_of_object(*first_two[0], path, keys)
            return
        yield from first_two
        yield from rows


def rows_of_object(where, value, path, keys):
    """Yields (where, row) of the only value of a JSON file: a row, an object that holds a list of
    rows, or one that holds columns, as pandas writes them. Raises UserError if it is not clear
    which list has the rows."""
    found = [key for key in keys if isinstance(value, dict) and key in value]

    # It has a key of a row: it is one, unless there is a column under that key.
    if found:
        column = value[found[0]]
        if isinstance(column, dict):
            column = list(column.values())
        texts = []
        if isinstance(column, list):
            texts = [text for text in column if isinstance(text, str)]
        if texts and len(texts) + column.count(None) == len(column):
            for number, text in enumerate(column, 1):
                yield f'row {number}', {found[0]: text}
            return
    elif isinstance(value, dict):
        # Else a list in it has the rows, if only one can.
        lists = {}
        for name, rows in value.items():
            if isinstance(rows, list) and any(isinstance(row, (dict, str)) for row in rows):
                lists[name] = rows
        if len(lists) > 1:
            raise UserError(f'{path} is an object with several lists, {name_some(lists)}; save the '
                            'one that has the rows as a file of its own')
        for rows in lists.values():
            for number, row in enumerate(rows, 1):
                yield f'row {number}', row
            return
    yield where, value


class BadRow(NamedTuple):
    """What stands in the place of a row that cannot be read."""
    reason: str  # as in 'row 7 <reason>'


def read_csv(path, keys):
    """Yields (where, {column: text}) of a table with a header; fields may be quoted, and hold
    newlines then. Which character separates them, the header says. A row with another number of
    fields is a BadRow."""
    csv.field_size_limit(MAX_ROW)
    with contextlib.closing(read_blocks(path, are_rows=True)) as blocks:
        lines = (line + '\n' for line in read_lines(blocks, path))

        # The first line with anything in it is the header.
        header = ''
        before = 0
        for header in lines:
            if header.strip():
                break
            before += 1
        names, delimiter = read_header(header, path, keys)

        # Its fields give the names, and those of each row that follows the values.
        rows = csv.reader(itertools.chain([header], lines), delimiter=delimiter, strict=True)
        try:
            next(rows, None)
            number = rows.line_num
            for fields in rows:
                where = f'line {before + number + 1}'
                number = rows.line_num
                if len(fields) == len(names):
                    yield where, dict(zip(names, fields))
                elif fields and fields != ['']:
                    yield where, BadRow(f'has {len(fields)} fields, the header {len(names)}')
        except csv.Error as e:
            line = before + number + 1
            raise UserError(f'{path}, line {line} is not CSV ({e}); {REMEDY}') from None


def read_header(header, path, keys):
    """Returns (names, delimiter) of a table: the one with which its header has one of the keys."""
    tables = {}
    for delimiter in ',\t;|':
        try:
            names = next(csv.reader([header], delimiter=delimiter, strict=True), [])
        except csv.Error:
            continue
        names = [name.strip() for name in names]
        tables[delimiter] = names
        if set(keys) & set(names):
            return names, delimiter
    delimiter = max(tables, key=lambda delimiter: len(tables[delimiter]), default=',')
    names = tables.get(delimiter, [])
    if keys:
        refuse_columns(path, keys, names)
    return names, delimiter


def refuse_columns(path, keys, names):
    wanted = ' or '.join(f'"{key}"' for key in keys)
    raise UserError(f'{path} has no column {wanted}, only {name_some(names)}; name one with --key '
                    'of data/text/prepare.py')


def name_some(names):
    """Returns a list of names for a message, not longer than a line."""
    text = ', '.join(str(name) for name in names)
    return text if len(text) <= 200 else text[:200] + ' ...'


def read_parquet(path, keys, columns=None):
    """Yields {column: value} of each row of a parquet file, of these columns, or of all. Raises
    UserError if it has none of the keys, and whatever pyarrow raises."""
    import pyarrow.parquet
    # it would read a column at once without a buffer, and keep what it has read with pre_buffer
    with open_regular(path) as opened, \
            pyarrow.parquet.ParquetFile(opened, buffer_size=2**20, pre_buffer=False) as file:
        names = file.schema_arrow.names
        if keys and not set(keys) & set(names):
            refuse_columns(path, keys, names)
        wanted = [name for name in names if columns is None or name in columns]
        for batch in file.iter_batches(count_rows(file, wanted), columns=wanted):
            values = [column_values(column) for column in batch.columns]
            for row in zip(*values):
                yield dict(zip(batch.schema.names, row))


def count_rows(file, columns):
    """Returns how many rows of these columns of an open parquet file to read at a time: fewer where
    they are large, one where a dictionary may make any of them larger than the file says."""
    n_bytes = 0
    for i in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(i)
        for j in range(group.num_columns):
            chunk = group.column(j)
            if chunk.path_in_schema.split('.')[0] in columns:
                n_bytes += chunk.total_uncompressed_size
                if has_large_dictionary(chunk):
                    return 1
    rows = file.metadata.num_rows * BATCH_BYTES // max(1, n_bytes)
    return min(BATCH_ROWS, max(1, rows))


def has_large_dictionary(chunk):
    """Whether a column chunk of parquet has a dictionary that is larger than writers make them, 1
    MB, or shrinks as no text does."""
    if not chunk.has_dictionary_page:
        return False
    n_bytes = chunk.data_page_offset - chunk.dictionary_page_offset
    return n_bytes > 2**22 or chunk.total_uncompressed_size > 100 * chunk.total_compressed_size


def column_values(column):
    """Returns the values of a column, as Python has them; bytes for a text that is not UTF-8."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        pass
    values = []
    for value in column:
        try:
            values.append(value.as_py())
        except UnicodeDecodeError:
            values.append(value.as_buffer().to_pybytes())
    return values


def read_parquet_rows(path, keys, columns):
    """Yields (where, row) as read_rows does."""
    number = 0
    try:
        for row in read_parquet(path, keys, columns):
            number += 1
            yield f'row {number}', row
    except (UserError, MemoryError):
        raise
    except Exception as e:  # whatever pyarrow raises
        raise UserError(f'cannot read {path} ({type(e).__name__}: {e}); {REMEDY}') from None


def read_column(path, key):
    """Yields row[key] of each row of a parquet file. Raises UserError if it has no such column."""
    for row in read_parquet(path, [key], [key]):
        yield row[key]
