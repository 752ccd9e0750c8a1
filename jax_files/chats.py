"""Conversations as text and token ids: chat templates, and what of a conversation counts in
training."""
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import unicodedata
from pathlib import Path

import numpy as np

from jax_files import chat_worker
from jax_flags import UserError, read_text, regular_file

# keys of a message, the first is what most templates read
REASONING = ('reasoning_content', 'thinking', 'reasoning')

MORE_TEMPLATES = 'additional_chat_templates'  # a folder in a Hugging Face folder
MAX_SOURCE = 2**20  # characters of a chat template: published ones have 20,000 at most


def read_chat_templates(folder, settings):
    """Returns the chat templates of a Hugging Face folder with these settings, of
    tokenizer_config.json, as {name: source}, as transformers 5 reads them: chat_template.jinja is
    'default', and takes the place of all in the settings, as does
    additional_chat_templates/NAME.jinja. Raises TypeError for what is no template."""
    # Files of templates, which take the place of the settings.
    templates = {}
    path = Path(regular_file(folder, 'chat_template.jinja'))
    if path.exists():
        templates['default'] = read_text(path, newline='')
    for name in more_template_files(folder):
        templates[Path(name).stem] = read_text(regular_file(folder, name), newline='')
    if templates:
        return templates

    # The settings: one template, or several by their names.
    found = settings.get('chat_template')
    if found is None:
        return {}
    if isinstance(found, str):
        return {'default': found}
    if isinstance(found, list):
        found = {each['name']: each['template'] for each in found}
    for name, source in found.items():
        if not isinstance(source, str):
            raise TypeError(f'chat template {name!r} is no text')
    return found


def more_template_files(folder):
    """Returns the names additional_chat_templates/NAME.jinja of the files in a folder, sorted."""
    paths = Path(folder, MORE_TEMPLATES).glob('*.jinja')
    return sorted(f'{MORE_TEMPLATES}/{path.name}' for path in paths)


def copy_more_templates(source, folder):
    """Copies the files of more_template_files to another folder, and removes others that are there.

    Raises UserError for what is no regular file of the folder `source`."""
    files = {name: regular_file(source, name) for name in more_template_files(source)}
    for name in more_template_files(folder):
        if name not in files:
            os.remove(os.path.join(folder, name))
    if files:
        os.makedirs(os.path.join(folder, MORE_TEMPLATES), exist_ok=True)
    for name, path in files.items():
        shutil.copyfile(path, os.path.join(folder, name))


# -----------------------------------------------------------------------------
# messages

@dataclasses.dataclass(frozen=True)
class Chat:
    """A conversation as a chat template takes it."""
    messages: list  # [{'role': ..., 'content': text, 'tool_calls': [...]}], see read_messages
    tools: list | None = None  # JSON schemas of the functions that the assistant may call
    # others of the template, as {'enable_thinking': False}
    variables: dict = dataclasses.field(default_factory=dict)


def read_chat(messages, tools=None, variables=None):
    """Returns the Chat of what a user gives: messages, tools and more variables of the template.
    Raises UserError."""
    # What a template gets in addition to the messages.
    if tools is not None:
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise UserError('"tools" must be a list of JSON schemas, [{"type": "function", '
                            '"function": {...}}]')
    if variables is not None and not isinstance(variables, dict):
        raise UserError('"chat_template_kwargs" must be an object, {"name": value}')

    # Variables do not take the names that have a meaning already.
    taken = {'messages', 'tools', 'add_generation_prompt'}.intersection(variables or {})
    if taken:
        raise UserError(f'"chat_template_kwargs" has {min(taken)!r}, which has a place of its own')
    return Chat(read_messages(messages), tools, variables or {})


def read_messages(messages):
    """Returns the messages of a chat as its template takes them. As in transformers 5, keys without
    a value are left out, and the reasoning of a message has all its names; contents in parts of
    text are joined. Raises UserError."""
    if not isinstance(messages, list) or not messages:
        raise UserError('messages must be a list of {"role": ..., "content": text} with at least '
                        'one')
    return [read_message(i, message) for i, message in enumerate(messages)]


def read_message(i, message):
    """Message number i as a chat template takes it, see read_messages. Raises UserError."""
    if not isinstance(message, dict) or not isinstance(message.get('role'), str):
        raise UserError(f'message {i} is not {{"role": ..., "content": text}}')
    message = {key: value for key, value in message.items() if value is not None}

    # Calls of tools, of which a message may consist.
    calls = message.get('tool_calls')
    if calls is not None:
        check_tool_calls(i, calls)

    # What it says: a text, or parts of one.
    content = message.get('content')
    if isinstance(content, list):
        message['content'] = join_parts(i, content)
    elif content is None and not calls:
        raise UserError(f'message {i} has no "content", and no "tool_calls"')
    elif content is not None and not isinstance(content, str):
        raise UserError(f'message {i} has a "content" that is no text')

    # Templates know the reasoning by different names.
    reasoning = [message[key] for key in REASONING if key in message]
    if reasoning:
        message = {'thinking': reasoning[0], **message, 'reasoning_content': reasoning[0]}
    return message


def check_tool_calls(i, calls):
    """Raises UserError unless these are calls of functions, with names, of message i."""
    if not isinstance(calls, list):
        raise UserError(f'message {i} has "tool_calls" that are not a list')
    for call in calls:
        function = call.get('function', call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get('name'), str):
            raise UserError(f'message {i} has a call of a tool that is not {{"type": "function", '
                            '"function": {"name": ..., "arguments": ...}}')
        if not isinstance(function.get('arguments', {}), (dict, str)):
            raise UserError(f'message {i} has a call of a tool whose "arguments" are no object')


def join_parts(i, parts):
    """Returns the text of the content of message i that is given in parts. Raises UserError for
    parts that are no text."""
    texts = []
    for part in parts:
        if isinstance(part, dict) and part.get('type', 'text') != 'text':
            raise UserError(f'message {i} has a part of the type {part["type"]!r}, and only text '
                            'is read')
        text = part.get('text') if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise UserError(f'message {i} has a part that is not {{"type": "text", "text": ...}}')
        texts.append(text)
    return ''.join(texts)


# -----------------------------------------------------------------------------
# the process of the templates

class TemplateProcess:
    """The process that runs all chat templates of this one, see jax_files/chat_worker.py. It starts
    with the first request, and again after one that has ended it."""

    def __init__(self):
        self.process = None
        self.owner = None  # the process that started it: a fork of that must not use its pipes
        self.lock = threading.Lock()

    def ask(self, requests):
        """Returns the answers of chat_worker.answer to requests, in order. In the place of an
        answer is a UserError if there is none: because of the request, or because its template does
        not keep the limits."""
        answers = [None] * len(requests)
        lines = {}
        for i, request in enumerate(requests):
            try:
                lines[i] = encode_request(request)
            except UserError as error:
                answers[i] = error
        with self.lock:
            while lines:
                for i, reply in zip(list(lines), self.exchange(list(lines.values()))):
                    answers[i] = reply
                    del lines[i]
        return answers

    def exchange(self, lines):
        """Returns what the process answers to these requests, up to the first that ends it, and a
        UserError for that one."""
        if self.process is None or self.owner != os.getpid():
            self.start()

        # One answer for each request, as long as the process answers.
        replies = []
        try:
            self.process.stdin.write(b'[' + b','.join(lines) + b']\n')
            self.process.stdin.flush()
            for _ in lines:
                reply = json.loads(self.process.stdout.readline())
                if 'error' in reply:
                    reply = UserError(f"the model's chat template {reply['error']}")
                replies.append(reply)
        except (OSError, ValueError):
            self.end()
            replies.append(UserError(
                f"the model's chat template does not end within {chat_worker.SECONDS} s and "
                f'{chat_worker.MEMORY // 2**20:,} MB; take another template'))
        except BaseException:  # Ctrl-C: the answers that are still to come are no one's
            self.end()
            raise
        return replies

    def start(self):
        """Starts the process, in a group of its own: Ctrl-C in a terminal is not for it."""
        command = [sys.executable, '-P', chat_worker.__file__]
        self.owner = os.getpid()
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.DEVNULL, process_group=0)

    def end(self):
        """Ends the process."""
        process, self.process = self.process, None
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.kill()
        process.wait()
        process.stdout.close()


def encode_request(request):
    """Returns the JSON of a request. Raises UserError for what is not JSON, or has a character that
    is used here."""
    try:
        text = json.dumps(request, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f'messages, tools and chat_template_kwargs must be JSON ({error})') from None
    if any(mark in text for mark in chat_worker.GENERATION_MARKS + chat_worker.MARK):
        raise UserError('there is a character from U+FDD0 to U+FDD2, which stands for nothing; '
                        'remove it')
    return text.encode('utf-8', 'surrogatepass')


PROCESS = TemplateProcess()


class ChatTemplate:
    """The programs in Jinja that write a conversation as a text, as a model has learned it."""

    def __init__(self, sources, special):
        """sources: {name: template}, as of read_chat_templates. special: {name: text} of the tokens
        that they may write, such as 'bos_token'."""
        self.sources = sources
        self.special = special
        self.next_ends = {}  # see find_next_end

    def choose(self, tools):
        """Returns the source for a chat with these tools. Raises UserError without one."""
        if not self.sources:
            raise UserError('the model has no chat template: there is none beside its '
                            'tokenizer.json')
        name = 'default'
        if tools is not None and 'tool_use' in self.sources:
            name = 'tool_use'
        if name not in self.sources:
            raise UserError(f'the model has the chat templates {", ".join(self.sources)}, and none '
                            'that is named default')

        # A template that is too long to be one.
        source = self.sources[name]
        if len(source) > MAX_SOURCE:
            raise UserError(f"the model's chat template has {len(source):,} characters, more than "
                            f"a template "
                            'needs; take another one')
        return source

    def request(self, chat, want, **more):
        """Returns the request to chat_worker.answer for a Chat. Raises UserError."""
        variables = {**self.special, 'documents': None, **chat.variables, 'tools': chat.tools}
        return {'source': self.choose(chat.tools), 'variables': variables,
                'messages': chat.messages, 'want': want, **more}

    def ask(self, chat, want, **more):
        """Returns what chat_worker.answer gives for a Chat. Raises UserError."""
        reply, = PROCESS.ask([self.request(chat, want, **more)])
        if isinstance(reply, UserError):
            raise reply
        return reply

    def render(self, chat, *, add_generation_prompt):
        """Returns the text of a Chat, followed by the beginning of the next answer if
        add_generation_prompt. Raises UserError if the template refuses it, fails, or takes too long
        or too much memory."""
        return self.ask(chat, 'text', add_generation_prompt=add_generation_prompt)['text']


# -----------------------------------------------------------------------------
# training

BATCH = 32  # conversations that are rendered together


def encode_training_chat(tokenizer, chat, counted=None):
    """Returns (ids, mask) of a conversation by the chat template of an HFTokenizer; the mask, as
    long as the ids, is 1 for the tokens that count in training.

    chat: a Chat. counted: the numbers of the assistant's messages that count, None for all. Of
    those count the tokens that the template marks by {% generation %}; without such marks the whole
    answer, from the end of the request for it (the generation prompt) to the special token that
    ends it. If the template leaves that token to the message that follows, the last answer gets it
    here.

    Raises UserError if the template refuses the messages, writes an answer where it does not ask
    for one, or if the tokenizer does not keep what an answer says."""
    encoded, = encode_training_chats(tokenizer, [(chat, counted)])
    if isinstance(encoded, UserError):
        raise encoded
    return encoded


def encode_training_chats(tokenizer, chats):
    """Yields for each (chat, counted) what encode_training_chat returns, or the UserError that it
    raises. The next conversations are rendered, in another process, while these become ids."""
    chats = ((chat, find_counted(chat, counted)) for chat, counted in chats)

    def render_batch():
        batch = list(itertools.islice(chats, BATCH))
        return batch, pool.submit(request_answers, tokenizer.template, batch)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        # While a batch becomes ids, the next one is rendered.
        batch, replies = render_batch()
        while batch:
            ahead = render_batch()

            # An error is that of one conversation; the others go on.
            for (chat, counted), reply in zip(batch, replies.result()):
                try:
                    if isinstance(reply, UserError):
                        raise reply
                    encoded = encode_reply(tokenizer, chat, counted, reply)
                except UserError as error:
                    encoded = error
                yield encoded
            batch, replies = ahead


def find_counted(chat, counted):
    """Returns the numbers of the assistant's messages in a Chat, of those in `counted` if that is
    not None."""
    answers = [i for i, message in enumerate(chat.messages) if message['role'] == 'assistant']
    if counted is None:
        return answers
    return [i for i in answers if i in counted]


def request_answers(template, batch):
    """Returns the answers of chat_worker.answer, or UserErrors, for [(chat, counted)]."""
    try:
        return PROCESS.ask([template.request(chat, 'answers', counted=counted)
                            for chat, counted in batch])
    except UserError as error:  # no template
        return [error] * len(batch)


def encode_reply(tokenizer, chat, counted, reply):
    """Returns (ids, mask) of a Chat, given what chat_worker.answer says of it, see
    encode_training_chat. Raises UserError."""
    text = reply['text']
    encoding = tokenizer.tokenizer.encode(text, add_special_tokens=False)
    ids = encoding.ids
    # np.array of a list of pairs takes twice as long
    offsets = itertools.chain.from_iterable(encoding.offsets)
    starts, ends = np.fromiter(offsets, np.int64, count=2 * len(ids)).reshape(-1, 2).T
    special_ids = tokenizer.special_ids.union(tokenizer.stop_tokens)
    special_places = [at for at, id in enumerate(ids) if id in special_ids]
    is_special = np.zeros(len(ids), bool)
    is_special[special_places] = True

    # the parts of the text that count: as the template marks them, or else the answers with their
    # ends
    spans = reply.get('spans')
    if spans is None:
        specials = [(int(starts[at]), int(ends[at]), ids[at]) for at in special_places]
        spans = []
        for answer, i in zip(reply['answers'], counted):
            has_calls = bool(chat.messages[i].get('tool_calls'))
            spans.append(find_end(answer, text, specials, tokenizer.stop_tokens, has_calls))

    # their tokens
    mask = np.zeros(len(ids), np.uint8)
    for start, end in spans:
        # a special token that takes in the spaces after it belongs to what it follows
        counts = (starts < end) & (ends > start) & ~(is_special & (starts < start))
        mask[counts] = 1
        places = np.flatnonzero(counts)
        said, said_ids = text[start:end], []
        if len(places):
            first, last = places[0], places[-1]
            said = text[min(start, int(starts[first])):max(end, int(ends[last]))]
            said_ids = ids[first:last + 1]
            if len(said_ids) != len(places):  # one between them does not count
                said_ids = [ids[at] for at in places]
        check_kept(tokenizer, said, said_ids)

    # the token that ends the last answer, if the template leaves it to the next message
    is_last = bool(counted) and counted[-1] == len(chat.messages) - 1
    if is_last and 'answers' in reply and spans[-1][1] == len(text) and ids[-1:]:
        has_calls = bool(chat.messages[-1].get('tool_calls'))
        # another special token may close a call, but ends any other answer
        if ids[-1] not in tokenizer.stop_tokens and (has_calls or not is_special[-1]):
            more = find_next_end(tokenizer, chat, text[reply['answers'][-1][1]:])
            ids = ids + more
            mask = np.append(mask, np.ones(len(more), np.uint8))
    return ids, mask


def find_end(answer, text, specials, stop_tokens, has_calls):
    """Returns (start, end) of an answer, as it counts in training, in the text of all messages.

    answer: what chat_worker.find_answer says of it.
    specials: (start, end, id) of the special tokens of the text.
    An answer that calls tools may have special tokens around the calls; others end with the
    first behind what they say."""
    # The special tokens behind what it says, in order; the first that can end it does.
    start, said, limit, is_whole = answer
    behind = [special for special in specials if special[0] >= start and special[1] > said]
    for special_start, special_end, id in behind:
        is_stop = id in stop_tokens
        if special_end <= limit:
            if is_stop or not has_calls:
                return start, special_end
            continue
        follows = not text[limit if has_calls else said:special_start].strip()
        if follows and (is_stop or not is_whole and not has_calls):
            # the first token of the next message (GLM), or another one than at the end of a
            # conversation (gpt-oss)
            return start, special_end
        break

    # Without one: the last that the template writes behind the answer, or all that it writes there.
    last = [special_end for _, special_end, _ in behind if special_end <= limit][-1:]
    if last:
        return start, last[0]
    return start, limit if is_whole else said


def find_next_end(tokenizer, chat, behind):
    """Returns encode_next_end's ids, which are the same for all chats with a template that end with
    a call, or without one."""
    template = tokenizer.template
    key = template.choose(chat.tools), bool(chat.messages[-1].get('tool_calls'))
    if key not in template.next_ends:
        template.next_ends[key] = encode_next_end(tokenizer, chat, behind)
    return template.next_ends[key]


def encode_next_end(tokenizer, chat, behind):
    """Returns the ids that end the last answer of a chat if the template writes them at the
    beginning of a message that follows: what a model generates there before it stops. [] if there
    are none.

    behind: what the template writes behind the answer now."""
    # Render the conversation with a message that follows.
    has_calls = bool(chat.messages[-1].get('tool_calls'))
    follower = {'role': 'tool' if has_calls else 'user', 'content': 'x'}
    try:
        longer = dataclasses.replace(chat, messages=[*chat.messages, follower])
        text = tokenizer.template.ask(longer, 'next', answer=len(chat.messages) - 1)['text']
    except UserError:  # a template may allow nothing there
        return []

    # What is new behind the answer, and whether it begins with a token at which sampling stops.
    if not text.startswith(behind):
        return []
    text = text[len(behind):]
    n_spaces = len(text) - len(text.lstrip())
    for id in tokenizer.stop_tokens:
        token = tokenizer.tokenizer.id_to_token(id)
        if token and text.startswith(token, n_spaces):
            return tokenizer.tokenizer.encode(text[:n_spaces] + token, add_special_tokens=False).ids
    return []


def check_kept(tokenizer, said, ids):
    """Raises UserError unless the ids decode to what an answer says: a tokenizer without a token
    for unknown characters leaves them out, and gives the place of the others wrongly."""
    decoded = tokenizer.tokenizer.decode(ids, skip_special_tokens=False)
    if decoded == said or is_kept(tokenizer, said, decoded, ids):
        return

    # Which characters are gone, for the message.
    lost = sorted(set(said) - set(decoded) - {' '})
    hint = f'it has no token for {" ".join(map(repr, lost[:5]))}; ' if lost else ''
    raise UserError(f'the tokenizer does not keep an answer: {said!r:.60} becomes {decoded!r:.60}; '
                    f'{hint}take a tokenizer that knows all characters, or change the text')


def is_kept(tokenizer, said, decoded, ids):
    """Whether a text that became these ids, and these became `decoded`, differs only as a tokenizer
    changes texts on purpose: by a token for what it does not know, or by a character of which it
    shares bytes with a neighbor."""
    # The token for what the tokenizer does not know.
    probe = tokenizer.tokenizer.encode(chat_worker.MARK, add_special_tokens=False)
    unknown = [id for id, token in zip(probe.ids, probe.tokens) if token != '\u2581']
    if len(unknown) == 1 and unknown[0] in ids:
        return True

    # The same text, up to what tokenizers change on purpose.
    said, decoded = simplified(tokenizer, said), simplified(tokenizer, decoded)
    whole = decoded.strip('\ufffd')
    return decoded == said or whole != decoded and whole in said


def simplified(tokenizer, text):
    """Returns the text without what a tokenizer may change on purpose: spaces, forms and case of
    characters, accents."""
    # As the tokenizer itself changes it, then what others change.
    normalizer = tokenizer.tokenizer.raw.normalizer
    if normalizer is not None:
        text = tokenizer.tokenizer.call(normalizer.normalize_str, text)
    text = unicodedata.normalize('NFKD', text).casefold()

    # Without spaces and accents.
    kept = []
    for c in text:
        is_space = c.isspace() or c == '\u2581'
        is_accent = unicodedata.combining(c)
        if not is_space and not is_accent:
            kept.append(c)
    return ''.join(kept)


def final_answer(text):
    """Returns what of an answer belongs to the conversation. gpt-oss writes
    <|channel|>analysis<|message|>...<|end|> first, which its template takes for an error in a
    message. (The other models' templates drop <think>...</think>.)"""
    if '<|channel|>' not in text:
        return text
    return text.partition('<|channel|>final<|message|>')[2].partition('<|end|>')[0]
