"""Reads text files and files of rows (JSON lines, a JSON array, CSV with a header, parquet), in
UTF-8, plain or compressed. The ending of a file's name gives its format."""
import bz2
import contextlib
import csv
import gzip
import io
import itertools
import lzma
import os
import zlib

from jax_flags import JSON_LINES, UserError, parse_json

ROW_ENDINGS = (*JSON_LINES, '.json', '.csv', '.tsv', '.parquet')
TABLE_ENDINGS = ('.csv', '.tsv')
OPENERS = {'.gz': gzip.open, '.bz2': bz2.open, '.xz': lzma.open}
PACKED_ENDINGS = (*OPENERS, '.zst')  # pyarrow reads .zst


def ending(path):
    """Returns the ending of a file's name in lower case, without the ending of a compression:
    '.jsonl' for A.JSONL.GZ."""
    name, end = os.path.splitext(path.lower())
    return os.path.splitext(name)[1] if end in PACKED_ENDINGS else end


@contextlib.contextmanager
def reading(path):
    """Turns an exception of the `with` block, which reads the file `path`, into a UserError that
    names `path`. The exceptions are those of csv, lzma, pyarrow and others that read files."""
    try:
        yield
    except UserError:
        raise
    except ImportError:
        raise UserError(f'{path} is read by the package pyarrow: pip install pyarrow') from None
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise UserError(f'cannot read {path}: {error.strerror}') from None
    except (OSError, EOFError, ValueError, csv.Error, lzma.LZMAError, zlib.error) as error:
        raise UserError(f'cannot read {path} ({error}); is it complete, and in UTF-8?') from None


@contextlib.contextmanager
def open_text(path):
    """Opens a file as UTF-8 text, decompressed and without a byte order mark; lines end at \\n
    only. Raises UserError if the file cannot be opened, or if the `with` block fails to read it."""
    packed = os.path.splitext(path.lower())[1]
    with reading(path):
        if packed in OPENERS:
            raw = OPENERS[packed](path)
        elif packed == '.zst':
            import pyarrow
            raw = io.BufferedReader(pyarrow.input_stream(path, compression='zstd'))
        else:
            raw = open(path, 'rb')
        with io.TextIOWrapper(raw, 'utf-8-sig', newline='\n') as file:
            yield file


def read_blocks(path):
    """Yields a text in blocks of a million characters. Raises UserError if it cannot be read."""
    with open_text(path) as file:
        while block := file.read(2**20):
            yield block


def read_text(path):
    return ''.join(read_blocks(path))


def read_rows(path, columns=None):
    """Yields (where; row) for each row of a file. `where` is 'line 7' in JSON lines, else 'row 7'.
    A row is usually a dict. In a JSON file a row may be anything else. In a table, a row with
    another number of fields than the header is a list. columns: the columns of a parquet file to
    read; if the file has none of them, all columns are read. Raises UserError if the file cannot be
    read."""
    if ending(path) == '.parquet':
        yield from numbered('row', read_parquet(path, columns))
    elif ending(path) in TABLE_ENDINGS:
        yield from numbered('row', read_table(path))
    else:
        yield from read_json_rows(path)


def numbered(kind, rows):
    """Yields (place, row) for each row. The place is 'row 1' for kind='row' or 'line 1' for
    kind='line', and so on."""
    for number, row in enumerate(rows, 1):
        yield f'{kind} {number}', row


def read_json_rows(path):
    """Yields (where, row) for each element of a JSON array, or for each line of JSON lines. Blank
    lines are left out. where: the place of the row in the file, a text for error messages, such as
    'row 7' of an array or 'line 7' of JSON lines."""
    with open_text(path) as file:
        beginning = []  # the lines up to the first that is not blank
        for line in file:
            beginning.append(line)
            if line.strip():
                break
        first = beginning[-1] if beginning else ''
        if first.lstrip().startswith('['):
            rest = file.read()
            if not (rest.strip() and is_json(first)):
                yield from numbered('row', parse_json(first + rest, path))
                return
            file = io.StringIO(rest)  # an array in each line
        for where, line in numbered('line', itertools.chain(beginning, file)):
            if line.strip():
                yield where, parse_json(line, f'{path}, {where}')


def is_json(text):
    """Returns whether a text is a JSON value."""
    try:
        parse_json(text, '')
    except UserError:
        return False
    return True


def read_table(path):
    """Yields the rows of a table with a header, {column: text}. A row with another number of fields
    than the header is yielded as a list. A quoted field may hold newlines. Raises UserError if two
    columns have the same name."""
    csv.field_size_limit(2**28)
    with open_text(path) as file:
        delimiter = '\t' if ending(path) == '.tsv' else ','
        rows = filter(None, csv.reader(file, delimiter=delimiter, strict=True))
        names = [name.strip() for name in next(rows, [])]
        twice = {name for name in names if name and names.count(name) > 1}
        if twice:
            raise UserError(f'{path} has two columns with the name {min(twice)}')
        for fields in rows:
            yield dict(zip(names, fields)) if len(fields) == len(names) else fields


def read_parquet(path, columns):
    """Yields the rows of a parquet file, {column: value}. Reads 100 rows at a time. columns: see
    read_rows."""
    with reading(path):
        import pyarrow.parquet
    # without these options pyarrow would hold whole columns in memory
    with reading(path), pyarrow.parquet.ParquetFile(
            path, buffer_size=2**20, pre_buffer=False) as file:
        names = file.schema_arrow.names
        wanted = [name for name in names if columns is None or name in columns]
        for batch in file.iter_batches(100, columns=wanted or names):
            yield from batch.to_pylist()
