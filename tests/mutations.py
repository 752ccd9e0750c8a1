"""Mutations of files: other bytes, other values, other headers, attacks.

Pure functions of a random.Random and the content. What is read, and what counts as a finding, is in
tests/hostile.py.
"""
import csv
import io
import json
import math
import pickle
import pickletools
import struct
import zipfile
import zlib

MARKER = 'RUN_BY_A_HOSTILE_FILE'  # the file that the attacks try to make

# -----------------------------------------------------------------------------
# mutations of bytes


def mutate_bytes(rng, content):
    """The content after 1 to 50 changes: bytes flipped, deleted, added, repeated, zeroed."""
    content = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 5, 50])):
        at = rng.randrange(len(content) + 1)
        length = rng.choice([1, 1, 2, 8, 100, 5000])
        match rng.choice(['flip', 'flip', 'delete', 'insert', 'repeat', 'cut', 'zero', 'fill']):
            case 'flip':
                content[at:at + 1] = bytes(
                    byte ^ 1 << rng.randrange(8) for byte in content[at:at + 1]
                )
            case 'delete':
                del content[at:at + length]
            case 'insert':
                content[at:at] = rng.randbytes(length)
            case 'repeat':
                content[at:at] = content[at:at + length] * rng.choice([1, 1, 100])
            case 'cut':
                del content[at:]
            case 'zero':
                content[at:at + length] = bytes(len(content[at:at + length]))
            case 'fill':
                n_bytes = len(content[at:at + 4])
                content[at:at + 4] = bytes([rng.choice([0, 255, 10, 34, 91, 123, 128])]) * n_bytes
    return bytes(content)

# -----------------------------------------------------------------------------
# mutations of values: what is in a JSON or YAML file

NUMBERS = [
    0, 1, 2, 3, -1, -2, 5, 100, 10**5, 10**9, 10**18, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63,
    2**64, -(2**63), 10**30, 10**400, 0.0, 0.5, -0.5, 1e-300, 1e300, math.nan, math.inf, -math.inf]
OTHER_TEXTS = [
    '', ' ', 'x', '0', 'nan', 'null', 'é☃', '😀', '\ud800', 'a\udfffb', '\0', 'a\nb', '\r\n',
    '\x1b[2J', '\u202e', '\u2028', '%s', '{0}', '{{ 1/0 }}', '<|endoftext|>', '</s>', '▁',
    'float99', 'x' * 300, 'x' * 10**5]
PATHS = [
    '..', '../..', '../secret', '../secret/secret.json', '/etc/passwd', '/dev/zero', '/dev/stdin',
    '.', '/', '~', 'a/../../secret', 'x' * 300, 'a\0b', f'../{MARKER}', '\\\\x\\y', 'C:\\x',
    'file:///etc/passwd', 's3://x/y']
TEXTS = OTHER_TEXTS + PATHS


def deep(n):
    """A list of n levels."""
    value = []
    for _ in range(n):
        value = [value]
    return value


OTHERS = [
    None, True, False, [], {}, [None], [[]], [0], ['x'], {'': {}}, {'x': 1}, {'type': 'x'},
    deep(50), deep(900)]


def any_value(rng):
    """A value of any type."""
    return rng.choice(rng.choice([NUMBERS, TEXTS, OTHERS]))


def changed_number(rng, number):
    """Another number, near to this one or far from it."""
    near = [number + 1, number - 1, -number, number * 2, str(number), [number], bool(number)]
    if abs(number) < 2**53:  # another integer may be too large for a float
        near += [number / 2, float(number)]
    return rng.choice([rng.choice(near), rng.choice(NUMBERS)])


def changed_text(rng, text):
    """Another text, near to this one or far from it."""
    at = rng.randrange(len(text) + 1)
    added = rng.choice(OTHER_TEXTS[:-2])
    near = [
        text + 'x',
        text[:at],
        text[:at] + added + text[at:],
        text * 2,
        [text],
        {'content': text},
        text.upper(),
    ]
    return rng.choice([rng.choice(near), rng.choice(TEXTS)])


def changed_list(rng, values):
    """A list of another length or order, or with another element."""
    at = rng.randrange(len(values) + 1)
    added = any_value(rng)
    near = [
        values[:at],
        values[at:],
        values * 2,
        [*values[:at], added, *values[at:]],
        values[::-1],
        [values],
        [added] * len(values),
        dict(enumerate(values[:9])),
        values[:1] * 1000,
    ]
    return rng.choice([rng.choice(near), any_value(rng)])


def changed_object(rng, values):
    """An object with other keys, or something else."""
    keys = [*values] or ['x']
    key, other = rng.choice(keys), rng.choice(keys)
    without = {name: value for name, value in values.items() if name != key}
    renamed = {rng.choice(TEXTS) if name == key else name: value for name, value in values.items()}
    swapped = dict(values)
    swapped[key] = values.get(other)
    added = dict(values)
    added[rng.choice(TEXTS)] = any_value(rng)
    return rng.choice(
        [without, without, renamed, swapped, added, [*values.values()][:20], any_value(rng)]
    )


def changed_value(rng, value):
    """Another value in place of this one."""
    if rng.random() < 0.3:
        return any_value(rng)
    if isinstance(value, dict):
        return changed_object(rng, value)
    if isinstance(value, list):
        return changed_list(rng, value)
    if isinstance(value, str):
        return changed_text(rng, value)
    if isinstance(value, (int, float)):
        return changed_number(rng, value)
    return any_value(rng)


def change_somewhere(rng, values):
    """The values with another one in place of one of them, at any depth."""
    is_inner = isinstance(values, (dict, list)) and values
    if not is_inner or rng.random() < 0.1:
        return changed_value(rng, values)
    # a copy: values that are drawn are shared, and a value may be in two places
    changed = dict(values) if isinstance(values, dict) else list(values)
    key = rng.choice([*values] if isinstance(values, dict) else range(len(values)))
    changed[key] = change_somewhere(rng, values[key])
    return changed


def mutate_values(rng, values):
    """The values of a JSON or YAML file after 1 to 4 changes."""
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        values = change_somewhere(rng, values)
    return values


NOT_JSON = [
    '', ' ', 'null', '[]', '{}', '3', '"x"', '{', '[' * 100_000, '{"a":' * 100_000, '\0',
    '{"a": 1} x', '\ufeff{}', 'NaN', '{"a": 1e999999}', '1' * 10_000, '{"a": 1, "a": [1]}',
    '"' + 'x' * 10**6 + '"']


def write_json_text(rng, values):
    """JSON of the values, in UTF-8, with characters as they are or escaped."""
    text = json.dumps(values, ensure_ascii=rng.random() < 0.7)
    return text.encode(errors='surrogatepass')


def mutate_json(rng, content):
    """A JSON file with other values or other bytes."""
    how = rng.random()
    if how < 0.05:
        return rng.choice(NOT_JSON).encode()
    if how < 0.15:
        return mutate_bytes(rng, content)
    try:
        values = json.loads(content)
    except (ValueError, RecursionError):  # an earlier change has spoiled it
        return mutate_bytes(rng, content)
    return write_json_text(rng, mutate_values(rng, values))


def mutate_lines(rng, content):
    """JSON lines with some lines changed, as mutate_json does."""
    lines = content.strip().split(b'\n')
    for _ in range(rng.choice([1, 1, 3])):
        at = rng.randrange(len(lines))
        lines[at] = mutate_json(rng, lines[at]) if lines[at] else b''
        if not lines[at].strip():
            lines[at:at + 1] = rng.choice([[], [b''], [b'null'], [b'{}']])
        if not lines:
            return b''
    return rng.choice([b'\n', b'\n', b'\n', b'\r\n', b'\n\n']).join(lines)


YAML_ATTACKS = [
    f'!!python/object/apply:os.system ["touch {MARKER}"]', '!!python/name:os.system', '[' * 5000,
    'a: &a [*a, *a]\n', '&a [&b [*a]]', '{' * 3000, 'a: ' * 500, '- ' * 5000 + 'x', '!!int "x"',
    '2001-99-99', '!!binary "x"',
    'a: &a ["x","x"]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b]\n'
    'd: &d [*c,*c,*c,*c,*c,*c,*c,*c]\nicl_tasks: [*d,*d,*d,*d]\n',
    '? [a]\n: b\n', '%YAML 9.9\n---\n', '--- a\n--- b\n', '<<: [1]\n', '!!set {a, b}',
    '0x' + 'f' * 9999, '1e999999', '1:60:60:60:60' * 99]


def mutate_yaml(rng, content):
    """A YAML file with other values or bytes, or with tags that a reader must not follow."""
    import yaml

    how = rng.random()
    if how < 0.15:
        return rng.choice(YAML_ATTACKS).encode()
    if how < 0.25:
        text = content.decode()
        at = rng.randrange(len(text))
        return (text[:at] + rng.choice(YAML_ATTACKS) + text[at:]).encode()
    if how < 0.4:
        return mutate_bytes(rng, content)
    # JSON is YAML, too, and can be written however deep it is
    return write_json_text(rng, mutate_values(rng, yaml.safe_load(content)))


def mutate_csv(rng, content):
    """A CSV file with other cells or other bytes."""
    if rng.random() < 0.3:
        return mutate_bytes(rng, content)
    rows = [*csv.reader(content.decode().split('\n'))]
    for _ in range(rng.choice([1, 1, 3])):
        row = rng.choice(rows)
        at = rng.randrange(len(row) + 1)
        cell = str(any_value(rng)).replace('\0', '')
        row[at:at + 1] = rng.choice([[], [cell], [cell], [cell, cell], [cell] * 1000])
    file = io.StringIO()
    csv.writer(file, lineterminator='\n').writerows(rows)
    text = file.getvalue()
    at = rng.randrange(len(text) + 1)
    text = text[:at] + rng.choice(['', '', '', '"', '\n"', '\r', 'x' * 200_000]) + text[at:]
    return text.encode(errors='surrogatepass')


COLUMNS = [
    [None] * 9, [1] * 9, [b'\xff'] * 9, ['a', None] * 9, [['a']] * 9, [{'a': 1}] * 9,
    [1.5, math.nan] * 9, ['é☃' * 50] * 30, [], ['']]


def mutate_parquet(rng, content):
    """A parquet file with other bytes, mostly in its metadata, or with a column of another type."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if rng.random() < 0.5:
        tail = rng.choice([len(content), 600, 100, 8])
        return content[:-tail] + mutate_bytes(rng, content[-tail:])
    names = rng.choice([['text'], ['text'], ['text', 'text'], ['x'], ['']])
    table = pa.Table.from_arrays([pa.array(rng.choice(COLUMNS))] * len(names), names)
    file = io.BytesIO()
    pq.write_table(table, file, compression=rng.choice(['none', 'snappy', 'gzip', 'zstd']))
    changed = file.getvalue()
    return mutate_bytes(rng, changed) if rng.random() < 0.3 else changed


def mutate_text(rng, content):
    """A file of lines with other lines or other bytes."""
    if rng.random() < 0.3:
        return mutate_bytes(rng, content)
    lines = content.decode().split('\n')
    for _ in range(rng.choice([1, 1, 3, 10])):
        at = rng.randrange(len(lines) + 1)
        line = rng.choice([*TEXTS, 'a b', 'a  b', 'a b c', ' ', *lines[:5]])
        lines[at : at + rng.choice([0, 1, 1, 9])] = rng.choice([[], [line], [line] * 2])
    return '\n'.join(lines).encode(errors='surrogatepass')

# -----------------------------------------------------------------------------
# chat templates

ENDLESS = [
    '{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}',
    '{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}',
    "{{ 'x' * 10**10 }}", "{{ 'x'.center(10**10) }}", "{{ 'x'.ljust(10**10) }}",
    "{{ 'x'.zfill(10**10) }}", "{{ '\t'.expandtabs(10**10) }}", "{{ '%10000000000d' % 1 }}",
    "{{ '{:10000000000}'.format(1) }}", "{{ '%.1000000000f' % 1 }}", '{{ 7 ** (7 ** (7 ** 7)) }}',
    '{{ 10 ** 10 ** 8 }}', '{{ (10 ** 5000)|string }}', '{{ [0] * 10**10 }}',
    '{{ range(10**9)|list }}', '{{ range(99999)|list|string * 99999 }}', '{{ lipsum(n=10**9) }}',
    '{{ messages|tojson(indent=10**9) }}', '{{ messages|string|indent(10**10) }}',
    "{{ ('x\n' * 9999)|indent(10**6) }}", "{{ 'x'|replace('', 'y' * 10**6) * 10**4 }}",
    "{{ ('x' * 10**5).replace('', 'y' * 10**6) }}", "{{ messages|batch(10**9, 'x')|list }}",
    '{{ messages|slice(10**9)|list }}', "{{ 'x'|wordwrap(0) }}",
    "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    '{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}',
    '{% for m in messages recursive %}{{ loop([m]) }}{% endfor %}',
    "{{ messages|map(attribute='content')|join('x' * 10**9) }}",
    "{{ strftime_now('%9999999999d') }}", "{{ strftime_now('%Y' * 10**6) }}",
    "{{ ','.join(range(99999)|map('string')) * 10**5 }}", "{{ ('a' * 30 + '!')|urlize }}",
    "{{ ('<' * 10**6)|striptags }}", "{{ ('x' * 10**6)|truncate(-10**9) }}",
    '{{ cycler(*range(99999)) }}', '{{ range(99999)|groupby(0)|list }}', "{{ 'x'|xmlattr }}"]
ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    f"{{{{ cycler.__init__.__globals__.os.system('touch {MARKER}') }}}}",
    f"{{{{ self.__init__.__globals__.__builtins__.open('{MARKER}', 'w') }}}}",
    f"{{{{ lipsum.__globals__['os'].popen('touch {MARKER}').read() }}}}",
    "{{ '{0.__class__}'.format(messages) }}", "{{ (messages|attr('__class__'))|string }}",
    "{% include '/etc/passwd' %}", "{% import 'x' as y %}", "{% extends 'x' %}",
    '{{ raise_exception.__globals__ }}', '{{ messages.append(1) }}',
    "{{ messages[0].update({'role': 3}) }}", '{{ config }}', '{{ namespace.__init__ }}',
    '{% set messages = none %}', "{{ ''.join.__self__ }}"]
FAILING = [
    '{{ 1 / 0 }}', '{{ messages[10**18] }}', "{{ 'x'.encode('utf-16') }}", "{{ '\\ud800' }}",
    '{{ raise_exception(1) }}', '{{ raise_exception() }}', "{{ raise_exception('a\\nb' * 9999) }}",
    '{{ messages|tojson(sort_keys=3) }}', '{{ x|tojson }}', '{{ x.y.z }}', '{{ messages() }}',
    '{{ messages|unknown }}', '{% unknown %}', '{% generation %}', '{% endgeneration %}',
    '{% generation %}{% generation %}x{% endgeneration %}{% endgeneration %}', '{% break %}', '{{',
    '{%', '{#', '}}', '{% if %}', '{' * 9999, '{{ ' + '(' * 3000 + ')' * 3000 + ' }}',
    '{{ ' + '-' * 9999 + '1 }}', '{{ ' + '1+' * 9999 + '1 }}', '{% if x %}' * 500,
    '{% for m in messages %}' * 30, '{{ "' + 'x' * 10**6 + '" }}', '\ufdd0', '\ufdd1\ufdd0', '\0',
    "{{ '\ufdd0' * 9 }}", '{{ messages[0].content|int / 0 }}', "{% set x = 'a' %}{{ x.y() }}",
    '{{ 2**64 }}', '{{ tools|length }}', '{% do 1 %}', '{% raw %}', '{{ loop }}', '{{ super() }}',
    '{{ caller() }}', '{% call(x) m() %}{% endcall %}']

TEMPLATES = ENDLESS + ESCAPES + FAILING


def mutate_template(rng, content):
    """A chat template with an attack in it or in place of it, or with other bytes."""
    text = content.decode()
    attack = rng.choice(TEMPLATES)
    how = rng.random()
    if how < 0.3:
        return attack.encode(errors='surrogatepass')
    if how < 0.7:
        at = rng.choice([0, len(text), text.index('%}') + 2, rng.randrange(len(text))])
        return (text[:at] + attack + text[at:]).encode(errors='surrogatepass')
    return mutate_bytes(rng, content)

# -----------------------------------------------------------------------------
# headers of binary files

SAFETENSORS_TYPES = [
    'F64', 'F16', 'BF16', 'F8_E4M3', 'F8_E5M2', 'I64', 'U8', 'BOOL', 'U64', 'F4', 'x', 3]


def mutate_safetensors(rng, content):
    """A safetensors file with other values in its header, another length of it, or other bytes."""
    size = int.from_bytes(content[:8], 'little')
    if rng.random() < 0.2:
        return mutate_bytes(rng, content)
    values = json.loads(content[8:8 + size])
    for _ in range(rng.choice([1, 1, 2])):
        name = rng.choice([name for name in values if name != '__metadata__'] or [''])
        if not isinstance(values.get(name), dict):
            break
        match rng.randrange(6):
            case 0:
                values[name]['dtype'] = rng.choice(SAFETENSORS_TYPES)
            case 1:
                values[name]['shape'] = changed_value(rng, values[name].get('shape', []))
            case 2:
                offsets = values[name].get('data_offsets', [])
                values[name]['data_offsets'] = changed_value(rng, offsets)
            case 3:
                values[rng.choice(TEXTS)] = values.pop(name)
            case 4:
                values['__metadata__'] = any_value(rng)
            case 5:
                values = mutate_values(rng, values)
                if not isinstance(values, dict):
                    break
    header = write_json_text(rng, values)
    size = rng.choice([len(header)] * 8 + [0, 2**63, 2**64 - 1, len(header) - 1, len(header) + 100])
    data = content[8 + int.from_bytes(content[:8], 'little') :]
    data = rng.choice([data, data, data, data, b'', data[:-1], data + bytes(64)])
    return size.to_bytes(8, 'little') + header + data


def gguf_fields(content):
    """[(offset, bytes, 'number' or 'text')] of the fields in the header of a GGUF file."""
    fields = []
    at = 4
    sizes = {
        0: 1,
        1: 1,
        2: 2,
        3: 2,
        4: 4,
        5: 4,
        6: 4,
        7: 1,
        10: 8,
        11: 8,
        12: 8,
    }  # bytes of each type of value

    def number(n_bytes):
        nonlocal at
        fields.append((at, n_bytes, 'number'))
        at += n_bytes
        return int.from_bytes(content[at - n_bytes:at], 'little')

    def text():
        nonlocal at
        length = number(8)
        fields.append((at, length, 'text'))
        at += length

    def value(kind):
        if kind == 8:
            text()
        elif kind == 9:
            kind, length = number(4), number(8)
            for _ in range(length):
                value(kind)
        else:
            number(sizes[kind])

    number(4)
    n_tensors, n_values = number(8), number(8)
    for _ in range(n_values):
        text()
        value(number(4))
    for _ in range(n_tensors):
        text()
        n_dimensions = number(4)
        for _ in range(n_dimensions):
            number(8)
        number(4)
        number(8)
    return fields


GGUF_NUMBERS = [0, 1, 2, 3, 7, 8, 9, 13, 255, 10**9, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1]


def mutate_gguf(rng, content):
    """A GGUF file with other numbers and texts in its header, or other bytes."""
    if rng.random() < 0.2:
        return mutate_bytes(rng, content)
    fields = gguf_fields(content)
    # most fields are of arrays: the first ones and the last, of tensors, are drawn as often
    parts = [fields, fields[:40], fields[-60:]]
    chosen = {rng.choice(rng.choice(parts)) for _ in range(rng.choice([1, 1, 1, 2, 4]))}
    for at, n_bytes, what in sorted(chosen, reverse=True):
        if what == 'number':
            old = int.from_bytes(content[at:at + n_bytes], 'little')
            new = rng.choice([rng.choice(GGUF_NUMBERS), old + 1, old - 1, old * 2])
            changed = (new % 2 ** (8 * n_bytes)).to_bytes(n_bytes, 'little')
            content = content[:at] + changed + content[at + n_bytes:]
        else:
            text = content[at:at + n_bytes].decode(errors='replace')
            new = str(changed_text(rng, text)).encode(errors='surrogatepass')
            content = (
                content[: at - 8] + len(new).to_bytes(8, 'little') + new + content[at + n_bytes:]
            )
    return content


GLOBALS = [
    'posix\nsystem', 'builtins\neval', 'os\nsystem', 'torch\nSize', 'torch\nFloatStorage',
    'collections\nOrderedDict', 'torch._utils\n_rebuild_tensor_v2', 'builtins\nbytearray', 'x\ny',
    'a\n' + 'b' * 9999]


def mutate_pickle(rng, data):
    """A pickle in which some constants and names are others, or other bytes."""
    if rng.random() < 0.2:
        return mutate_bytes(rng, data)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        try:
            steps = [*pickletools.genops(data)]
        except Exception:  # an earlier change has spoiled it
            return data
        ends = [position for _, _, position in steps[1:]] + [len(data)]
        constants = [
            i
            for i, (opcode, argument, _) in enumerate(steps)
            if isinstance(argument, (int, str)) and 'PUT' not in opcode.name
        ]
        i = rng.choice(constants)
        opcode, argument, at = steps[i]
        if opcode.name == 'GLOBAL':
            name = rng.choice(GLOBALS)
            new = b'c' + name.encode() + b'\n'
        elif opcode.name in ('BINGET', 'LONG_BINGET', 'PROTO', 'FRAME'):
            new = bytes([data[at]]) + rng.randbytes(ends[i] - at - 1)
        else:
            new = pickled_value(changed_value(rng, argument))
        data = data[:at] + new + data[ends[i] :]
    return data


def pickled_value(value):
    """The steps of a pickle that push this value, or None for one that is too deep."""
    try:
        pickled = pickle.dumps(value, 2)
    except RecursionError:
        pickled = pickle.dumps(None, 2)
    return pickletools.optimize(pickled)[2:-1]


BOMB_BYTES = 3 * 2**30  # of a zip bomb, once it is unpacked


def bomb():
    """A deflated stream of BOMB_BYTES zeros: one block of them, repeated."""
    compressor = zlib.compressobj(9, wbits=-15)
    block = compressor.compress(bytes(2**24)) + compressor.flush(zlib.Z_FULL_FLUSH)
    return block * (BOMB_BYTES >> 24) + compressor.flush(zlib.Z_FINISH)


def rewrite_zip(content, change, bombs=()):
    """The zip file with the entries that change({name: content}) leaves.

    bombs: names of entries that become zip bombs."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    change(entries)
    file = io.BytesIO()
    with zipfile.ZipFile(file, 'w') as archive:
        for name, data in entries.items():
            archive.writestr(name, bomb() if name in bombs else data)
        infos = {info.filename: info for info in archive.infolist()}
    changed = bytearray(file.getvalue())
    for name in bombs:
        # the same header twice: before the entry and in the directory at the end
        places = [
            infos[name].header_offset,
            changed.rindex(b'PK\1\2', 0, changed.rindex(name.encode())),
        ]
        for at, method, size in zip(places, (8, 10), (22, 24)):
            struct.pack_into('<H', changed, at + method, zipfile.ZIP_DEFLATED)
            struct.pack_into('<I', changed, at + size, BOMB_BYTES)
    return bytes(changed)


def mutate_torch(rng, content):
    """A file of torch.save with another pickle, other entries, a zip bomb, or other bytes."""
    how = rng.random()
    if how < 0.15:
        return mutate_bytes(rng, content)
    names = zipfile.ZipFile(io.BytesIO(content)).namelist()
    pickled = next(name for name in names if name.endswith('data.pkl'))
    name = rng.choice(names)
    if how < 0.2:
        return rewrite_zip(content, lambda entries: None, bombs=[rng.choice([pickled, name])])
    if how < 0.35:

        def change(entries):
            data = entries.pop(name)
            new = rng.choice(
                [
                    name,
                    name,
                    rng.choice(TEXTS[:-20]).replace('\0', '') or 'x',
                    f'../{name}',
                    f'x/{name}',
                ]
            )
            entries[new.encode(errors='replace').decode()] = rng.choice(
                [data, mutate_bytes(rng, data), b'', data * 2]
            )

        return rewrite_zip(content, change)

    def change_pickle(entries):
        entries[pickled] = mutate_pickle(rng, entries[pickled])

    return rewrite_zip(content, change_pickle)


def mutate_numbers(rng, content):
    """A file of binary integers with other ones, or of another length."""
    how = rng.random()
    if how < 0.5:
        return mutate_bytes(rng, content)
    width = rng.choice([1, 2, 4, 8])
    at = rng.randrange(len(content) // width) * width
    number = rng.choice([0, 1, 2, 3, 100, 2**7, 2**15, 2**31, 2**63, 2**64 - 1, 2**64 - 2]) % 2 ** (
        8 * width
    )
    count = rng.choice([1, 1, 2, 1000])
    changed = (
        content[:at] + number.to_bytes(width, 'little') * count + content[at + width * count:]
    )
    return rng.choice(
        [changed, changed, changed + bytes(width), b'', content[:width], content * 2, content[::-1]]
    )
