"""Makes trl_masks.json.xz: conversations as transformers writes and masks them by templates of TRL (Apache-2.0), which
have the marks of what an assistant writes, and the same templates without marks as their models have them. Needs
transformers and jinja2.

$ pip download --no-deps trl==1.16.0
$ python tests/golden/make_trl_masks.py trl-1.16.0-py3-none-any.whl
"""
import datetime
import json
import lzma
import re
import sys
import tempfile
import zipfile
from pathlib import Path

from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.common import write_byte_tokenizer

SYSTEM = {'role': 'system', 'content': 'You are SYS.'}
TOOLS = [{'type': 'function', 'function': {'name': 'add', 'description': 'adds', 'parameters': {
    'type': 'object', 'properties': {'x': {'type': 'integer'}}, 'required': ['x']}}}]
CALL = {'id': 'abcdefghi', 'type': 'function', 'function': {'name': 'add', 'arguments': {'x': 2}}}


def user(text):
    return {'role': 'user', 'content': text}


def answer(text, **more):
    return {'role': 'assistant', 'content': text, **more}


CHATS = {
    'one turn': {'messages': [user('hi'), answer('hi there')]},
    'a system message': {'messages': [SYSTEM, user('What?'), answer('Four.')]},
    'two equal answers': {'messages': [user('One'), answer('Two'), user('Three'), answer('Two')]},
    'two turns': {'messages': [SYSTEM, user('One'), answer('Two'), user('Three'), answer('Four')]},
    'reasoning': {'messages': [user('q'), answer('A', reasoning_content='THINK')]},
    'a tool': {'tools': TOOLS, 'messages': [
        user('2+2'), answer('', tool_calls=[CALL]),
        {'role': 'tool', 'content': '4', 'name': 'add', 'tool_call_id': 'abcdefghi'}, answer('It is 4.')]}}


def spans_of(mask):
    """[first, last + 1] of each run of ones."""
    edges = [i for i, (a, b) in enumerate(zip([0, *mask], [*mask, 0])) if a != b]
    return list(map(list, zip(edges[::2], edges[1::2])))


def special_tokens(template):
    """The special tokens of a model, as far as its template writes them. <think> is text in most."""
    pattern = r'<\|?[A-Za-z_/][\w/ ]*\|?>|\[/?[A-Z_]+\]|<[a-z_]+>|<｜[^<>]*?｜>'
    return sorted({*re.findall(pattern, template)} - {'<think>', '</think>'})


def open_tokenizer(special, **settings):
    with tempfile.TemporaryDirectory() as folder:
        write_byte_tokenizer(Path(folder), special, **settings)
        return PreTrainedTokenizerFast.from_pretrained(folder)


def render_all(tokenizer, template):
    """{chat: its ids, and the spans of those that count} of the chats that the template takes."""
    rendered = {}
    for chat, fields in CHATS.items():
        try:
            result = tokenizer.apply_chat_template(
                fields['messages'], tools=fields.get('tools'), chat_template=template, return_dict=True,
                return_assistant_tokens_mask=True)
        except Exception as error:  # the template refuses it
            print(chat, error)
            continue
        rendered[chat] = {'ids': result['input_ids'], 'spans': spans_of(result['assistant_masks'])}
    return rendered


wheel = zipfile.ZipFile(sys.argv[1])
templates = {Path(name).stem: wheel.read(name).decode() for name in wheel.namelist() if name.endswith('.jinja')}
found = {}
for name, marked in sorted(templates.items()):
    if not name.endswith('_training'):
        continue
    name = name.removesuffix('_training')
    special = special_tokens(marked)
    # the token that ends an answer is the last special one that counts
    tokenizer = open_tokenizer(special)
    first = next(iter(render_all(tokenizer, marked).values()), None)
    counted = first['ids'][:first['spans'][-1][1]] if first else []
    ends = [name for name in tokenizer.convert_ids_to_tokens(counted) if name in special][-1:]
    settings = {name: ends[0] for name in ('bos_token', 'eos_token') if ends}
    found[name] = {
        'marked': marked, 'plain': templates.get(name), 'special': special, 'settings': settings,
        'rendered': render_all(open_tokenizer(special, **settings), marked)}

path = Path(__file__).with_name('trl_masks.json.xz')
content = {'date': str(datetime.date.today()), 'chats': CHATS, 'templates': found}  # some templates write the date
path.write_bytes(lzma.compress(json.dumps(content).encode(), preset=9))
print(f'{len(found)} templates, {path.stat().st_size:,} bytes')
