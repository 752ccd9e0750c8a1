"""What data/reading.py promises: the rows and texts of a file, by its ending."""
import bz2
import gzip
import importlib
import json
import lzma
import sys

import numpy as np
import pytest

from jax_flags import UserError
from tests.common import ROOT

TEXTS = ['one', 'two\nlines', 'a "quoted", text; with | all\tof it', '4', '007', 'NA', 'null', '2020-01-01',
         '\u00e9\u4e16\U0001f600\u2028']
OBJECTS = [{'id': str(i), 'text': text} for i, text in enumerate(TEXTS)]


@pytest.fixture
def reading(monkeypatch):
    monkeypatch.setattr(sys, 'path', [str(ROOT / 'data'), *sys.path])
    return importlib.import_module('reading')


def json_lines(objects):
    return ''.join(json.dumps(row, ensure_ascii=False) + '\n' for row in objects)


def table(delimiter):
    rows = [['id', 'text'], *([row['id'], row['text']] for row in OBJECTS)]
    fields = [[f'''"{field.replace('"', '""')}"''' for field in row] for row in rows]
    return ''.join(delimiter.join(row) + '\n' for row in fields)


def zstd(content):
    pyarrow = pytest.importorskip('pyarrow')
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, 'zstd') as file:
        file.write(content)
    return sink.getvalue().to_pybytes()


FORMS = {
    'lines.jsonl': json_lines(OBJECTS), 'LINES.NDJSON': json_lines(OBJECTS)[:-1], 'lines.json': json_lines(OBJECTS),
    'bom.jsonl': '\ufeff' + json_lines(OBJECTS), 'blank.jsonl': '\n\n' + json_lines(OBJECTS).replace('\n', '\r\n \r\n'),
    'array.json': json.dumps(OBJECTS), 'pretty array.JSON': '\n' + json.dumps(OBJECTS, indent=4, ensure_ascii=False),
    'array.jsonl': '[\n' + ',\n'.join(map(json.dumps, OBJECTS)) + '\n]\n', 'no ending': json_lines(OBJECTS),
    'table.csv': table(','), 'TABLE.CSV': '\n' + table(',').replace('\n"', '\r\n"'), 'table.tsv': table('\t')}


@pytest.mark.parametrize('name', FORMS)
def test_rows_of_every_form_are_read_as_they_are(tmp_path, reading, name):
    (tmp_path / name).write_text(FORMS[name], newline='', encoding='utf-8')
    assert [row for _, row in reading.read_rows(str(tmp_path / name), ['text'])] == OBJECTS


@pytest.mark.parametrize('end, compress', [
    ('.gz', gzip.compress), ('.BZ2', bz2.compress), ('.XZ', lzma.compress), ('.ZST', zstd)])
def test_compressed_files_are_read_whole_or_refused(tmp_path, reading, end, compress):
    content = json_lines(OBJECTS).encode()
    packed = compress(content[:99]) + compress(content[99:])  # as parallel compressors write it
    for name in ('a.jsonl', 'a.txt'):
        path = tmp_path / f'{name}{end}'
        path.write_bytes(packed)
        assert reading.ending(str(path)) == name[1:]
        assert reading.read_text(str(path)).encode() == content
        path.write_bytes(packed[:-3])
        with pytest.raises(UserError, match='cannot read .*complete'):
            list(reading.read_rows(str(path)))


@pytest.mark.parametrize('end, compress', [('.gz', gzip.compress), ('.bz2', bz2.compress), ('.xz', lzma.compress)])
def test_what_python_decompresses_needs_no_pyarrow(tmp_path, reading, monkeypatch, end, compress):
    monkeypatch.setitem(sys.modules, 'pyarrow', None)  # its import fails
    (tmp_path / f'a.txt{end}').write_bytes(compress(b'text'))
    assert reading.read_text(str(tmp_path / f'a.txt{end}')) == 'text'


def test_parquet_is_read_a_few_rows_at_a_time_and_the_columns_asked_for(tmp_path, reading):
    pa, pq = pytest.importorskip('pyarrow'), pytest.importorskip('pyarrow.parquet')
    rng = np.random.default_rng(0)
    texts = [rng.integers(32, 127, 2**14, np.uint8).tobytes().decode() for _ in range(2000)]
    pq.write_table(pa.table({'id': range(2000), 'text': texts}), tmp_path / 'a.parquet', row_group_size=100)
    before = pa.total_allocated_bytes()
    held = []
    for i, (where, row) in enumerate(reading.read_rows(str(tmp_path / 'a.parquet'), ['text'])):
        assert (where, row) == (f'row {i + 1}', {'text': texts[i]})
        held.append(pa.total_allocated_bytes() - before)
    assert len(held) == 2000 and max(held) < 2000 * 2**14 // 4
    assert next(reading.read_rows(str(tmp_path / 'a.parquet'), ['body']))[1].keys() == {'id', 'text'}  # to name them


def test_a_row_has_its_line_or_its_number(tmp_path, reading):
    for name, content, places in (
            ('a.jsonl', '{"text": "a"}\n\n{"text": "b"}', ['line 1', 'line 3']),
            ('blank.jsonl', '\n \n{"text": "a"}\n', ['line 3']),
            ('a.json', '[\n{"text": "a"},\n\n{"text": "b"}]', ['row 1', 'row 2']),
            ('a.csv', 'text\n"a\nb"\nc\n', ['row 1', 'row 2'])):
        (tmp_path / name).write_text(content)
        assert [where for where, _ in reading.read_rows(str(tmp_path / name))] == places


@pytest.mark.parametrize('name, content, said', [
    ('a.jsonl', '{"text": "a"}\n{"text": "b"', 'a.jsonl, line 2 is not JSON'),
    ('a.json', '[{"text": "a"},\n{"text" "b"}]', 'a.json is not JSON .*line 2'),
    ('a.csv', 'text\n"a', 'cannot read .*a.csv .unexpected end of data'),
    ('a.parquet', 'no parquet', 'cannot read .*a.parquet'), ('a.jsonl.gz', 'not packed', 'cannot read .*a.jsonl.gz'),
    ('a.jsonl', '{"text": "\u00e9"}'.encode('latin1'), 'cannot read .*utf-8.*in UTF-8'),
    ('a.jsonl', '{"text": "a"}'.encode('utf-16'), 'cannot read .*utf-8.*in UTF-8')])
def test_what_cannot_be_read_is_refused_in_one_line(tmp_path, reading, name, content, said):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=said) as refused:
        list(reading.read_rows(str(tmp_path / name)))
    assert '\n' not in str(refused.value).strip()


def test_a_row_of_a_table_with_another_number_of_fields_is_a_list(tmp_path, reading):
    (tmp_path / 'a.csv').write_text('id, text\n1,a\n2,b, and more\n\n3\n4,c\n')
    rows = [row for _, row in reading.read_rows(str(tmp_path / 'a.csv'))]
    assert rows == [{'id': '1', 'text': 'a'}, ['2', 'b', ' and more'], ['3'], {'id': '4', 'text': 'c'}]
