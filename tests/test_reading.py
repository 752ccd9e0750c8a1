"""What data/reading.py promises: the rows of a file, by its content."""
import bz2
import gzip
import importlib
import json
import lzma
import os
import sys
from pathlib import Path

import pytest

from jax_flags import UserError

DATA = Path(__file__).resolve().parent.parent / 'data'
TEXTS = ['one', 'two\nlines', 'a "quoted", text; with | all\tof it', '4', 'NA', '\u00e9\u4e16\U0001f600\u2028']
OBJECTS = [{'id': i, 'text': text} for i, text in enumerate(TEXTS)]


@pytest.fixture
def reading(monkeypatch):
    monkeypatch.setattr(sys, 'path', [str(DATA), *sys.path])
    return importlib.import_module('reading')


def json_lines(objects):
    return ''.join(json.dumps(row, ensure_ascii=False) + '\n' for row in objects)


def quoted(delimiter):
    rows = [['id', 'text'], *([str(row['id']), row['text']] for row in OBJECTS)]
    fields = [[f'''"{field.replace('"', '""')}"''' for field in row] for row in rows]
    return ''.join(delimiter.join(row) + '\n' for row in fields)


FORMS = {
    'lines.jsonl': json_lines(OBJECTS),
    'LINES.JSONL': json_lines(OBJECTS),
    'lines.ndjson': json_lines(OBJECTS),
    'lines.json': json_lines(OBJECTS),
    'blank.jsonl': '\n\n' + json_lines(OBJECTS).replace('\n', '\n \n\n'),
    'crlf.jsonl': json_lines(OBJECTS).replace('\n', '\r\n'),
    'no newline at the end.jsonl': json_lines(OBJECTS)[:-1],
    'strings.jsonl': json_lines(TEXTS),
    'array.json': json.dumps(OBJECTS),
    'array.jsonl': json.dumps(OBJECTS) + '\n',
    'pretty.JSON': json.dumps(OBJECTS, indent=4, ensure_ascii=False),
    'array of strings.json': json.dumps(TEXTS, indent=1),
    'one object per line of an array.json': '[\n' + ',\n'.join(map(json.dumps, OBJECTS)) + '\n]\n',
    'pretty objects.json': '\n'.join(json.dumps(row, indent=2) for row in OBJECTS),
    'list in an object.json': json.dumps({'version': 1, 'names': [1, 2], 'data': OBJECTS}, indent=2),
    'list in a line.json': json.dumps({'rows': TEXTS}),
    'columns.json': json.dumps({'id': [0, 1, 2, 3, 4, 5], 'text': TEXTS}),
    'columns of pandas.json': json.dumps({'text': {str(i): text for i, text in enumerate(TEXTS)}}),
    'table.csv': quoted(','), 'TABLE.CSV': quoted(',').replace('\n"', '\r\n"'), 'semicolons.csv': '\n' + quoted(';'),
    'table.tsv': quoted('\t'), 'tabs.csv': quoted('\t'), 'no ending': json_lines(OBJECTS),
    'lines.txt': json_lines(OBJECTS),
}


def texts_of(reading, path):
    assert reading.kind_of_file(str(path), ['text']) != 'text'
    rows = [row for _, row in reading.read_rows(str(path), ['text'], ['text'])]
    return [row['text'] if isinstance(row, dict) else row for row in rows]


@pytest.mark.parametrize('name', FORMS)
def test_rows_of_every_form_are_read_by_content(tmp_path, reading, name):
    path = tmp_path / name
    path.write_text(FORMS[name], newline='', encoding='utf-8')
    assert texts_of(reading, path) == TEXTS


@pytest.mark.parametrize('name', ['lines.jsonl', 'pretty.JSON', 'table.csv', 'strings.jsonl'])
@pytest.mark.parametrize('encoding', ['utf-8-sig', 'utf-16', 'utf-16-le', 'utf-16-be', 'utf-32'])
def test_rows_in_other_encodings_are_read(tmp_path, reading, name, encoding):
    path = tmp_path / name
    path.write_text(FORMS[name], newline='', encoding=encoding)
    assert texts_of(reading, path) == TEXTS


def zstd(content):
    pyarrow = pytest.importorskip('pyarrow')
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, 'zstd') as file:
        file.write(content)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize('compress', [gzip.compress, bz2.compress, lzma.compress, zstd])
@pytest.mark.parametrize('name', ['lines.jsonl.gz', 'LINES.JSONL.ZST', 'lines.jsonl', 'lines.txt'])
def test_compressed_rows_are_read_whatever_they_are_called(tmp_path, reading, compress, name):
    path = tmp_path / name
    path.write_bytes(compress(json_lines(OBJECTS).encode()))
    assert texts_of(reading, path) == TEXTS
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=r'damaged|cannot read'):
        list(reading.read_rows(str(path), ['text']))
    with pytest.raises(UserError, match=r'damaged|cannot read'):
        reading.read_text(path)


@pytest.mark.parametrize('name', ['rows.parquet', 'ROWS.PARQUET', 'rows', 'rows.jsonl'])
def test_parquet_is_read_whatever_it_is_called(tmp_path, reading, name):
    pa, pq = pytest.importorskip('pyarrow'), pytest.importorskip('pyarrow.parquet')
    pq.write_table(pa.Table.from_pylist(OBJECTS), tmp_path / name)
    assert texts_of(reading, tmp_path / name) == TEXTS
    assert [row for _, row in reading.read_rows(str(tmp_path / name), ['text'])] == OBJECTS


def test_a_parquet_file_whose_rows_are_larger_than_it_says_is_read_row_by_row(tmp_path, reading):
    pa, pq = pytest.importorskip('pyarrow'), pytest.importorskip('pyarrow.parquet')
    uncompressed = {'compression': 'none', 'dictionary_pagesize_limit': 2**30}
    for values, options in (
            (['x' * 2**20], {'compression': 'gzip'}), ([os.urandom(2**21).hex() * 2], uncompressed)):
        table = pa.table({'text': pa.DictionaryArray.from_arrays(pa.array([0] * 50, pa.int32()), pa.array(values))})
        pq.write_table(table, tmp_path / 'a.parquet', store_schema=False, **options)
        before, held = pa.total_allocated_bytes(), []
        for _, row in reading.read_rows(str(tmp_path / 'a.parquet'), ['text'], ['text']):
            assert row == {'text': values[0]}
            held.append(pa.total_allocated_bytes() - before)
        assert len(held) == 50 and max(held) < 10 * len(values[0])


@pytest.mark.parametrize('name, content', [
    ('notes.md', json_lines(OBJECTS)), ('data.js', json.dumps(OBJECTS)), ('data.py', json_lines(OBJECTS)),
    ('notes.txt', '{ is a brace }\n'), ('log.txt', json_lines([{'level': 1}])), ('list.txt', '[1, 2]'),
    ('verse.txt', '["text"]\n'), ('BZh.txt', 'BZh9 is a word\n'), ('config', json.dumps({'text': {'a': 1}}, indent=2))])
def test_a_text_that_only_looks_like_json_stays_a_text(tmp_path, reading, name, content):
    (tmp_path / name).write_text(content)
    assert reading.kind_of_file(str(tmp_path / name), ['text']) == 'text'
    assert reading.read_text(tmp_path / name) == content


@pytest.mark.parametrize('name', ['lines.jsonl', 'array.json', 'pretty objects.json', 'table.csv', 'crlf.jsonl'])
def test_rows_do_not_depend_on_where_a_block_ends(tmp_path, reading, monkeypatch, name):
    path = tmp_path / name
    objects = [{'text': 'x' * (i % 9), 'n': 10 * i, 'more': {'a': [None, True, 1.5e-3, '\\"']}} for i in range(60)]
    content = {'lines.jsonl': json_lines(objects), 'array.json': json.dumps(objects),
               'pretty objects.json': '\n'.join(json.dumps(row, indent=1) for row in objects)}
    path.write_text(content.get(name, FORMS[name]), newline='', encoding='utf-8')
    whole = list(reading.read_rows(str(path), ['text']))
    assert len(whole) in (60, 6)
    for size in (1, 2, 3, 7, 64):
        monkeypatch.setattr(reading, 'BLOCK', size)
        monkeypatch.setattr(reading.read_blocks, '__defaults__', (False, size))
        assert list(reading.read_rows(str(path), ['text'])) == whole


def test_a_row_has_its_line_or_its_number(tmp_path, reading):
    for name, content, places in (
            ('a.jsonl', '\n{"text": "a"}\n\n{"text": "b"}', ['line 2', 'line 4']),
            ('a.json', '[\n{"text": "a"},\n\n{"text": "b"}]', ['row 1', 'row 2']),
            ('b.json', '{\n"text": "a"}\n{"text":\n"b"}', ['line 1', 'line 3']),
            ('a.csv', '\ntext\n"a\nb"\nc\n', ['line 3', 'line 5'])):
        (tmp_path / name).write_text(content)
        assert [where for where, _ in reading.read_rows(str(tmp_path / name), ['text'])] == places


@pytest.mark.parametrize('name, content, said', [
    ('a.jsonl', '{"text": "a"}\n{"text": "b"', 'a.jsonl, line 2 is not JSON'),
    ('a.jsonl', '{"text": "a"\n{"text": "b"}', 'a.jsonl, line 1 is not JSON'),
    ('a.json', '[{"text": "a"},\n{"text" "b"}]', 'a.json, line 2 is not JSON'),
    ('a.json', '[{"text": "a"}\n{"text": "b"}]', "expected ',' or ']'"),
    ('a.json', '[{"text": "a"}] [1]', 'something follows'),
    ('a.json', '[{"text": "a"},]', 'is not JSON'), ('a.json', '[{"text": "a"}', 'is not JSON'),
    ('a.json', 'text', 'line 1 is not JSON'), ('a.json', '[' * 10**5, 'line 1 is not JSON'),
    ('a.json', '{"a": [{}], "b": ["c"]}', 'several lists, a, b; save'),
    ('a.csv', 'id,content\n1,a\n', 'has no column "text", only id, content; name one with --key'),
    ('a.csv', 'text\n"a', 'line 2 is not CSV'), ('a.csv', '', 'has no column "text"'),
    ('a.csv', '1,a\n2,b\n', 'has no column "text", only 1, a'),
    ('a.parquet', 'no parquet', 'cannot read .*a.parquet'), ('a.jsonl', b'{"text": "\xe9"}', 'is not UTF-8 text'),
    ('a.jsonl', b'PK\3\4', 'is an archive; unpack it')])
def test_what_is_no_file_of_rows_is_refused_in_one_line(tmp_path, reading, name, content, said):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=said) as refused:
        list(reading.read_rows(str(tmp_path / name), ['text'], ['text']))
    assert name in str(refused.value) and '\n' not in str(refused.value)


def test_a_line_of_a_table_with_more_fields_is_no_row(tmp_path, reading):
    (tmp_path / 'a.csv').write_text('id,text\n1,a\n2,b, and more\n\n3,c\n')
    rows = list(reading.read_rows(str(tmp_path / 'a.csv'), ['text']))
    assert rows[1] == ('line 3', reading.BadRow('has 3 fields, the header 2'))
    assert [row for where, row in rows if where != 'line 3'] == [{'id': '1', 'text': 'a'}, {'id': '3', 'text': 'c'}]


def test_a_row_without_an_end_does_not_fill_the_memory(tmp_path, reading, monkeypatch):
    monkeypatch.setattr(reading, 'MAX_ROW', 3 * reading.BLOCK)
    for name, start in (('a.jsonl', '{"text": "'), ('a.json', '[{"text": "'), ('a.csv', 'text\n"')):
        (tmp_path / name).write_text(start + 'x' * 20 * reading.BLOCK)
        with pytest.raises(UserError, match='more than|larger than'):
            list(reading.read_rows(str(tmp_path / name), ['text']))


def test_a_pipe_is_refused_at_once(tmp_path, reading):
    if not hasattr(os, 'mkfifo'):
        pytest.skip('needs named pipes')
    os.mkfifo(tmp_path / 'pipe.jsonl')
    with pytest.raises(UserError, match='is no regular file'):
        list(reading.read_rows(str(tmp_path / 'pipe.jsonl'), ['text']))
