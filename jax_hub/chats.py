"""Turns conversations into text and token ids by chat templates, and finds the tokens that count in
training."""
import contextlib
import ctypes
import json
import os
import re
import threading
import time
from typing import Any, NamedTuple

import numpy as np

from jax_flags import UserError, whole_characters

SECONDS = 5  # limit of a chat template, an untrusted program, for one text
MARK = '\ufdd2'  # in place of an answer, to see where a template writes it: no text has this code
# what transformers takes beside a template's variables, so that no variable may have these names
OPTIONS = {
    'messages', 'conversation', 'conversations', 'tools', 'chat_template', 'tokenize',
    'add_generation_prompt', 'continue_final_message', 'sanitize_control_tokens', 'padding',
    'truncation', 'max_length', 'return_tensors', 'return_dict', 'return_assistant_tokens_mask',
    'tokenizer_kwargs'}


class Chat(NamedTuple):
    """A conversation as a chat template takes it."""
    messages: list  # [{'role': ..., 'content': text, 'tool_calls': [...]}]
    tools: list | None = None  # JSON schemas of the functions that the assistant may call
    variables: dict = {}  # other variables of the template, as {'enable_thinking': False}


def read_chat(messages, tools=None, variables=None):
    """Turns a user's messages into a Chat. tools, variables: see Chat. Raises UserError if
    `messages` are no conversation, `tools` no list, or `variables` no object of variables."""
    if not isinstance(messages, list) or not messages:
        raise UserError('messages must be a list of {"role": ..., "content": text} with at least '
                        'one')
    variables = variables or {}
    if not isinstance(variables, dict) or not OPTIONS.isdisjoint(variables):
        raise UserError('chat_template_kwargs must be an object with variables of the chat '
                        f'template, and without {", ".join(sorted(OPTIONS))}')
    if not isinstance(tools or [], list):
        raise UserError('tools must be a list of JSON schemas')
    return Chat([read_message(i, message) for i, message in enumerate(messages)], tools, variables)


def read_message(i, message):
    """Checks message number i of a chat. Returns the message without the keys that are None. If its
    content is a list of text parts, they are joined to one text, because many templates take
    nothing else. Raises UserError, which names i, if `message` is not a message of text or tool
    calls."""
    if not isinstance(message, dict) or not isinstance(message.get('role'), str):
        raise UserError(f'message {i} is not {{"role": ..., "content": text}}')
    message = {key: value for key, value in message.items() if value is not None}
    content = message.get('content')
    calls = message.get('tool_calls')
    if isinstance(content, list):
        parts = [text_of_part(part) for part in content]
        content = ''.join(parts) if all(isinstance(part, str) for part in parts) else parts
        message = {**message, 'content': content}
    is_text = isinstance(content, str) or content is None and calls
    if not is_text:
        raise UserError(f'message {i} has no "content" that is a text, and no "tool_calls"')
    are_calls = isinstance(calls, list) and all(map(is_call, calls))
    if calls and not are_calls:
        raise UserError(f'message {i} has a call of a tool that is not {{"type": "function", '
                        '"function": {"name": ..., "arguments": ...}}')
    return message


def text_of_part(part):
    """Returns the text of a part of a message's content; None for a part of another type than text.
    A part that is not a dict is returned unchanged."""
    if not isinstance(part, dict):
        return part
    return part.get('text') if part.get('type', 'text') == 'text' else None


def is_call(call):
    """Returns whether `call` is a tool call, {'function': {'name': text, ...}} or {'name':
    text}."""
    function = call.get('function', call) if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get('name'), str)


def call_of(message, n=-1):
    """Returns tool call number n of a message, by default the last, as {'name': ..., 'arguments':
    ...}."""
    call = message['tool_calls'][n]
    return call.get('function', call)


def with_arguments(tokenizer, chat):
    """Returns a Chat with tool calls in the form that the tokenizer's template takes. A content is
    empty or missing (see with_contents). The arguments are objects or JSON text: tries objects
    first, decoded from OpenAI's JSON text. If the template fails with objects or writes them as
    Python dicts, tries JSON text. If the template fails with JSON text, returns objects."""
    chat = with_contents(tokenizer, chat)
    decoded = chat._replace(messages=[decode_arguments(message) for message in chat.messages])
    if not objects_of(decoded):
        return decoded
    # the arguments with a mark: without it they may also be in a tool's result, written by Python;
    # but a template may fail with a mark, which is none of the tool's parameters
    marked = chat._replace(messages=[map_arguments(message, mark_arguments)
                                     for message in decoded.messages])
    is_fit = takes_objects(tokenizer, marked)
    if is_fit is None:
        is_fit = takes_objects(tokenizer, decoded)
    if is_fit:
        return decoded
    as_text = chat._replace(messages=[encode_arguments(message) for message in chat.messages])
    try:
        render(tokenizer, as_text)
    except UserError:
        return decoded
    return as_text


def with_contents(tokenizer, chat):
    """Returns a Chat. A message that has calls of tools and no text may have no content, or ''.
    Some templates, such as Qwen3's, fail with one of these, or then leave the calls out. If the
    template does not write the calls of `chat`, such messages get a content with which it does."""
    blank = [i for i, message in enumerate(chat.messages)
             if message.get('tool_calls') and not message.get('content')]
    if not blank:
        return chat
    rendered = None
    for content in ({}, {'content': ''}):  # transformers drops a content of None
        messages = [{**message, **content} if i in blank else message
                    for i, message in enumerate(chat.messages)]
        marked = [mark_answer(message) if i in blank else message
                  for i, message in enumerate(messages)]
        with contextlib.suppress(UserError):
            text = render(tokenizer, chat._replace(messages=marked))
            if MARK in text:
                return chat._replace(messages=messages)
            rendered = rendered or chat._replace(messages=messages)
    return rendered or chat


def objects_of(chat):
    """Returns a list of the arguments of all tool calls in a Chat that are objects, without the
    empty ones."""
    found = [call_of(message, n).get('arguments') for message in chat.messages
             for n in range(len(message.get('tool_calls') or ()))]
    return [arguments for arguments in found if isinstance(arguments, dict) and arguments]


def takes_objects(tokenizer, chat):
    """Returns whether the chat template takes arguments of tool calls that are objects: False if it
    writes one of those in `chat` as a Python dict, None if it fails."""
    try:
        text = render(tokenizer, chat)
    except UserError:
        return None
    return not any(str(arguments) in text for arguments in objects_of(chat))


def map_arguments(message, function):
    """Returns a message with `function` applied to the arguments of each of its tool calls."""
    calls = []
    for call in message.get('tool_calls') or ():
        inner = call.get('function', call)
        if 'arguments' in inner:
            inner = {**inner, 'arguments': function(inner['arguments'])}
        calls.append({**call, 'function': inner} if 'function' in call else inner)
    return {**message, 'tool_calls': calls} if calls else message


def mark_arguments(arguments):
    """Returns the arguments of a call with one more, MARK. Arguments that are empty or no object
    stay unchanged."""
    return {**arguments, MARK: MARK} if isinstance(arguments, dict) and arguments else arguments


def decode_arguments(message):
    """Returns a message whose tool calls have objects as arguments, decoded from JSON text.
    Arguments that are not the text of an object stay as they are."""
    def decode(arguments):
        try:
            value = json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError:
            return arguments
        return value if isinstance(value, dict) else arguments
    return map_arguments(message, decode)


def encode_arguments(message):
    """Returns a message with the arguments of all calls encoded as JSON text."""
    return map_arguments(message, lambda arguments: arguments if isinstance(arguments, str)
                         else json.dumps(arguments, ensure_ascii=False))


def render(tokenizer, chat, *, add_generation_prompt=False):
    """Renders a Chat by the chat template of an HFTokenizer, and returns the text. With
    add_generation_prompt, the beginning of the next answer follows. Raises UserError as
    within_limits does."""
    return within_limits(
        tokenizer.hf.apply_chat_template, chat.messages, tools=chat.tools,
        tokenize=False, add_generation_prompt=add_generation_prompt, **chat.variables)


def render_marked(tokenizer, chat):
    """Renders a Chat. Returns (text; [(start, end)]). The pairs are the spans, in characters, that
    the template marks by {% generation %}; without marks the list is empty. Raises UserError as
    within_limits does."""
    from transformers.utils.chat_template_utils import render_jinja_template
    hf = tokenizer.hf
    texts, spans = within_limits(
        render_jinja_template, [chat.messages], tools=chat.tools,
        chat_template=hf.get_chat_template(tools=chat.tools), return_assistant_tokens_mask=True,
        **{**hf.special_tokens_map, **chat.variables})
    return texts[0], spans[0]


def within_limits(function, *args, **options):
    """Returns function(*args, **options). function: one that runs a chat template.

    Raises UserError if the template fails, refuses the messages, or computes for longer than
    SECONDS."""
    try:
        with time_limit(SECONDS):
            return function(*args, **options)
    except Exception as error:  # a template is a program
        kind = type(error).__name__
        verdict = 'refuses' if kind == 'TemplateError' else f'fails: {kind}'  # raise_exception
        raise UserError(f"the model's chat template {verdict}: {error!s:.300}") from None


class Watch(threading.Thread):
    """Raises TimeoutError in a thread that computes for too long. Only the CPU time of that thread
    counts. The time in which the process is stopped, or in which other threads run, does not
    count."""
    INTERVAL = 0.1  # seconds between two looks

    def __init__(self):
        super().__init__(daemon=True)
        self.lock = threading.Lock()
        self.has_work = threading.Event()
        self.limits = {}  # {thread: (clock, when it must end by that clock)}
        self.ended = set()  # threads that have got their TimeoutError

    def run(self):
        while True:
            self.has_work.wait()
            time.sleep(self.INTERVAL)
            with self.lock:
                for thread, (clock, end) in self.limits.items():
                    if thread not in self.ended and time.clock_gettime(clock) > end:
                        self.ended.add(thread)
                        raise_in(thread, TimeoutError)
                if not self.limits:
                    self.has_work.clear()

    def begin(self, seconds):
        """Limits the calling thread to `seconds` of CPU time from now on."""
        thread = threading.get_ident()
        clock = time.pthread_getcpuclockid(thread)
        with self.lock:
            self.limits[thread] = clock, time.clock_gettime(clock) + seconds
            self.has_work.set()

    def end(self):
        """Removes the time limit of the calling thread. Returns whether the thread exceeded it."""
        thread = threading.get_ident()
        with self.lock:
            del self.limits[thread]
            is_over = thread in self.ended
            self.ended.discard(thread)
            if is_over:
                raise_in(thread, None)  # cancels the error if it has not been raised yet
        return is_over


def raise_in(thread, error):
    """Raises `error` in another thread, at its next Python instruction.

    thread: its number, as threading.get_ident() returns it. error: an exception class, or None to
    cancel an earlier error that has not been raised yet."""
    error = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)


watches = []  # the Watch of this process


@contextlib.contextmanager
def time_limit(seconds):
    """Raises TimeoutError if the block of the `with` statement uses more than `seconds` of this
    thread's CPU time. On Windows, where threads have no such clock, there is no limit."""
    if not hasattr(time, 'pthread_getcpuclockid'):
        yield
        return
    if not watches or not watches[-1].is_alive():  # none lives on after a fork
        watches[:] = [Watch()]
        watches[-1].start()
    watch = watches[-1]
    watch.begin(seconds)
    is_over = False
    try:
        try:
            yield
        finally:
            is_over = watch.end()
    except TimeoutError:
        if not is_over:
            raise
    if is_over:
        raise TimeoutError(f'it does not end within {seconds} s')


# -----------------------------------------------------------------------------
# training

class Encoded(NamedTuple):
    """A conversation for training: arrays or lists [n_tokens]."""
    ids: list
    mask: np.ndarray  # uint8, 1 for the tokens that count in the loss
    n_bytes: np.ndarray  # bytes of the text in UTF-8 that each token stands for, 0 of special ones


def encode_training_chat(tokenizer, chat, counted=None):
    """Returns a conversation as Encoded, by the chat template of an HFTokenizer.

    chat: a Chat. counted: the indices of the answers (the assistant's messages) that count in the
    loss, None for all answers. If the template marks parts by {% generation %}, the tokens of these
    parts count in the loss, but not in an answer with an index that `counted` lacks. If the
    template has no marks, the whole answers count, from the end of the generation prompt to the
    special token that ends the answer. Some templates write this token only at the beginning of the
    next message. For such a template, the function adds the token to the last answer.

    Raises UserError if the template refuses the messages, or if the tokens that count include text
    of a message that is no answer. Raises UserError also if the template breaks one of two rules:
    - A template without marks must write each answer in `counted` after the generation prompt.
    - A template with marks must mark each other answer as exactly one part, because this part is
      left out of the loss."""
    # the parts of the text that count: as the template marks them, or the answers with their ends
    answers = [i for i, message in enumerate(chat.messages) if message['role'] == 'assistant']
    chosen = [i for i in answers if counted is None or i in counted]
    text, spans = render_marked(tokenizer, chat)
    tokenizer.check_characters(text)
    encoding = tokenizer.tokenizer.encode(whole_characters(text), add_special_tokens=False)
    ids = encoding.ids
    starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
    is_special = np.isin(ids, list(tokenizer.special_ids.union(tokenizer.stop_tokens)))
    last = None  # the last of the chosen answers, where the template has no marks
    if spans:
        left_out = [i for i in answers if i not in chosen]
        spans = leave_out(tokenizer, chat, spans, left_out)
    else:
        specials = [Special(int(starts[at]), int(ends[at]), ids[at])
                    for at in np.flatnonzero(is_special)]
        for i in chosen:
            last = find_answer(tokenizer, chat, i, text)
            spans.append(find_end(last, text, specials, tokenizer.stop_tokens))

    check_spans(tokenizer, chat, text, spans, chosen)

    # the tokens of these parts; a special token may take in spaces of the part behind it, and does
    # not belong to that part
    mask = np.zeros(len(ids), np.uint8)
    for start, end in spans:
        mask |= (starts < end) & (ends > start) & ~(is_special & (starts < start))
    n_bytes = bytes_of_spans(whole_characters(text), starts, ends)
    n_bytes[np.isin(ids, list(tokenizer.special_ids))] = 0

    # the token that ends the last answer, if the template leaves it to the next message
    is_last = last is not None and chosen[-1] == len(chat.messages) - 1
    if is_last and spans[-1][1] == len(text) and ids:
        # another special token may close a call, but ends any other answer
        may_end = last.has_calls or not is_special[-1]
        if ids[-1] not in tokenizer.stop_tokens and may_end:
            more = find_next_end(tokenizer, chat, text[last.said:])
            ids = ids + more
            mask = np.append(mask, np.ones(len(more), np.uint8))
            n_bytes = np.append(n_bytes, np.zeros(len(more), n_bytes.dtype))
    return Encoded(ids, mask, n_bytes)


def bytes_of_spans(text, starts, ends):
    """Returns the number of UTF-8 bytes of each of n spans of a text, int64 [n]. The spans are
    those of tokens. starts, ends: the characters at which the spans start and end, int64 [n],
    ascending. Several spans may have the same character, because a token can be a part of a
    character's bytes. All bytes of this character then count for the first of these spans."""
    codes = np.frombuffer(text.encode('utf-32-le'), np.uint32)
    sizes = 1 + sum((codes >= first).astype(np.int64) for first in (0x80, 0x800, 0x10000))
    reached = np.concatenate([[0], np.cumsum(sizes)])  # bytes before each character
    before = np.maximum.accumulate(np.concatenate([[0], ends]))[:-1]
    return reached[ends] - reached[np.minimum(np.maximum(starts, before), ends)]


def leave_out(tokenizer, chat, spans, left_out):
    """Removes the spans of answers that do not count in the loss. Returns a list of the remaining
    spans.

    spans: [(start, end)], as render_marked returns them. left_out: the indices of the messages that
    are answers and do not count. Raises UserError if the template does not mark each answer in
    `left_out` by one span."""
    kept = list(spans)
    for i in left_out:
        marked = [*chat.messages[:i], mark_answer(chat.messages[i]), *chat.messages[i + 1:]]
        text, others = render_marked(tokenizer, chat._replace(messages=marked))
        places = [n for n, (start, end) in enumerate(others) if MARK in text[start:end]]
        if len(others) != len(spans) or len(places) != 1:
            raise UserError(f'the marks of the chat template do not separate answer {i}, which does '
                            'not count, from the other answers')
        kept.remove(spans[places[0]])
    return kept


class Special(NamedTuple):
    """A special token in a text."""
    start: int  # characters
    end: int
    id: int


class Answer(NamedTuple):
    """Where an answer is in the text of a conversation, in characters."""
    start: int  # the end of the request for it, the generation prompt
    said: int  # the end of its text, or of the name of its last call
    limit: int  # the template writes the same up to here, with or without later messages
    is_whole: bool  # whether a conversation that ends with this answer ends at `limit`
    has_calls: bool  # whether it calls tools


def find_answer(tokenizer, chat, i, text):
    """Finds an answer in `text`, and returns it as an Answer. The answer is message i of the Chat;
    `text` is the rendered Chat.

    Renders the Chat again, with a mark in place of the answer. The text before and after the mark
    is the text that the template writes around the answer. Rendering only the messages before the
    answer would not be enough, because some templates write earlier turns in another way when later
    messages follow.

    Raises UserError if it is not clear where the answer is. One example is a template that does not
    write its generation prompt, such as "<|im_start|>assistant", before this answer."""
    refusal = UserError(f'the chat template does not write answer {i} where it asks for it; mark '
                        'what the assistant says in it by {% generation %}, and give that file as '
                        '--template=FILE')

    def text_of(messages, **options):
        return render(tokenizer, chat._replace(messages=messages), **options)

    # the text around a mark in place of the answer: with all messages, and without later ones
    messages = chat.messages
    has_calls = bool(messages[i].get('tool_calls'))
    marked = [*messages[:i], mark_answer(messages[i])]
    around = text_of(marked + messages[i + 1:]).split(MARK)
    try:
        around_last = text_of(marked).split(MARK)
    except UserError as error:
        raise UserError(f'{error} (in a conversation that ends with answer {i}; with "weight": 0 '
                        'this answer does not count)') from None
    n_marks = len(around_last) - 1
    # a call's name may be written again where its result is
    is_repeated = not has_calls and len(around) > 2
    if has_calls and not n_marks:
        raise UserError(NO_CALLS.format(i))
    if not 1 <= n_marks < len(around) or is_repeated:
        raise refusal
    before, before_last = around[0], around_last[0]
    after = MARK.join(around[n_marks:])
    if has_calls:
        after = after.replace(MARK, call_of(messages[i])['name'])
    if not text.endswith(after):
        raise refusal
    said = len(text) - len(after)

    # where the answer begins: behind the request for it; a first message has no request
    request = text_of(messages[:i], add_generation_prompt=True) if i else before
    start = len(request)
    if not text.startswith(request):  # the template rewrites earlier turns when others follow
        prompt = request.removeprefix(text_of(messages[:i]))
        introduction = ''  # between request and answer
        is_request = before_last.startswith(request)
        if is_request:
            introduction = before_last.removeprefix(request)
        elif not ends_alike(request, before, messages[i - 1]):
            raise refusal
        is_asked = before.endswith(prompt + introduction) or not is_request
        if not text.startswith(before) or not is_asked:
            raise refusal
        start = len(before) - len(introduction)
    if start > said:
        raise refusal
    n_shared = len(os.path.commonprefix([after, around_last[-1]]))
    is_whole = n_shared == len(around_last[-1])

    # without later messages, the text behind the calls may differ: from a special token on
    if has_calls:
        n_shared, is_special = find_difference(tokenizer, around_last[-1], n_shared)
        if not is_special:
            raise UserError(f'the chat template writes the calls of answer {i} in another way at '
                            'the end of a conversation, so it is not clear where they end; mark '
                            'what the assistant says by {% generation %}, and give that file as '
                            '--template=FILE')
    return Answer(start, said, said + n_shared, is_whole, has_calls)


def find_difference(tokenizer, text, n_shared):
    """Looks at the first token of a text that ends behind its first n_shared characters and is no
    white space. Returns (n_shared, or the start of this token if the token is special and begins
    before; whether it is special). Without such a token, returns (n_shared, True)."""
    encoding = tokenizer.tokenizer.encode(text, add_special_tokens=False)
    for id, (start, end) in zip(encoding.ids, encoding.offsets):
        if text[max(start, n_shared):end].strip():
            is_special = id in tokenizer.special_ids.union(tokenizer.stop_tokens)
            return min(start, n_shared) if is_special else n_shared, is_special
    return n_shared, True


def ends_alike(request, before, question):
    """Compares two renderings of the messages before an answer. Returns whether both texts are
    equal from the question on. Returns False if the question has no text.

    request: the rendering of these messages alone, with the generation prompt. before: the
    rendering of the complete conversation, cut where the answer begins. question: the last message
    before the answer.

    find_answer calls this function for templates that write a message in another way if later
    messages follow. For example, some templates write the system message only into the last turn of
    a user. `request` and `before` then begin differently, although both end alike."""
    asked = question.get('content')
    if not isinstance(asked, str) or not asked.strip():
        return False
    same = os.path.commonprefix([request[::-1], before[::-1]])[::-1]
    return asked.strip() in same


def find_places(tokenizer, chat, text):
    """Finds where the messages of a Chat are in `text`, the rendered Chat. Returns {index of a
    message: (start, end) of its content} in characters. Leaves out messages that the template
    leaves out or rewrites."""
    says = {i: message['content'] for i, message in enumerate(chat.messages)
            if isinstance(message.get('content'), str) and message['content'].strip()}
    places = {}
    for i, content in says.items():
        marked = [*chat.messages]
        marked[i] = {**marked[i], 'content': MARK}
        try:
            parts = render(tokenizer, chat._replace(messages=marked)).split(MARK)
        except UserError:  # a template may look into a content
            continue
        if len(parts) != 2 or not text.startswith(parts[0]) or not text.endswith(parts[1]):
            continue
        start, end = len(parts[0]), len(text) - len(parts[1])
        if start < end and text[start:end].strip() in content:
            places[i] = start, end
    return places


def check_spans(tokenizer, chat, text, spans, chosen):
    """Raises UserError if a part of `text` that counts in the loss contains the text of a message
    that does not count in the loss. This happens if the template writes that message into an
    answer.

    text: the rendered Chat. spans: the parts of `text` that count in the loss, [(start, end)].
    chosen: the indices of the messages that count in the loss."""
    others = [i for i in range(len(chat.messages)) if i not in chosen]
    # finding their places is slow: only if a span has their words
    words = [chat.messages[i].get('content') for i in others]
    words = [each.strip() for each in words if isinstance(each, str) and each.strip()]
    if not any(each in text[start:end] for start, end in spans for each in words):
        return
    places = find_places(tokenizer, chat, text)
    for i in others:
        at, to = places.get(i, (0, 0))
        if any(start < to and at < end for start, end in spans):
            raise UserError(f'the chat template writes message {i}, of the role '
                            f'"{chat.messages[i]["role"]}", into an answer, so that it would count; '
                            'mark what the assistant says in it by {% generation %}, and give that file '
                            'as --template=FILE')


THOUGHTS = ('reasoning_content', 'reasoning', 'thinking')  # keys of a message


NO_CALLS = ('the chat template does not write each call of message {}: the model would learn to '
            'answer without it; take a template that does, as --template=FILE, or leave such rows '
            'out')
OTHER_PROMPT = ('the tokens that ask for an answer differ from those before it in training, so the '
                'model may answer badly')


def find_lost(tokenizer, chat, ids, counted):
    """Returns a list of warnings about a conversation. Each warning is a sentence. There is one
    warning for each kind of content that the template leaves out. The model would be trained
    without this content. Raises UserError if the template leaves out the tool calls of an answer
    that counts in the loss, because the model would learn to end its answer instead of the call.

    One more warning says that the prompt differs between sampling and training. The prompt in
    sampling is the rendering of the messages before the last answer that counts in the loss. The
    prompt in training is the beginning of `ids`, the tokens of the whole conversation. The warning
    is added if `ids` do not begin with the tokens of the prompt in sampling.

    counted: the indices of the messages that are answers and count in the loss."""
    parts = [Part(i, *part) for i, message in enumerate(chat.messages)
             for part in parts_of(message)]
    left_out = left_out_parts(tokenizer, chat, parts)
    for part in left_out:
        if part.key == 'tool_calls' and part.number in counted:
            raise UserError(NO_CALLS.format(part.number))
    lost = [f'the template leaves out {part.kind}' for part in left_out]
    if chat.tools and leaves_out_tools(tokenizer, chat):
        lost.append('the template leaves out the descriptions of tools')
    last = counted[-1]
    if last:
        prompt = render(tokenizer, chat._replace(messages=chat.messages[:last]),
                        add_generation_prompt=True)
        prompt = tokenizer.tokenizer.encode(whole_characters(prompt), add_special_tokens=False).ids
        if list(ids[:len(prompt)]) != prompt:
            lost.append(OTHER_PROMPT)
    return sorted(set(lost))


def leaves_out_tools(tokenizer, chat):
    """Returns whether the template writes the same text without the descriptions of a Chat's
    tools."""
    try:
        return render(tokenizer, chat) == render(tokenizer, chat._replace(tools=None))
    except UserError:  # it refuses calls of tools that nobody has described
        return False


class Part(NamedTuple):
    """A piece of a message's content, such as its text or a call of a tool. A template may leave
    the piece out of the prompt; find_lost warns of that, or refuses it."""
    number: int  # the index of the message
    kind: str  # its name in a warning
    key: str  # the message's key whose value has the part
    value: Any  # this value, with MARK in place of the part


def parts_of(message):
    """Yields (kind, key, value) for each Part of a message. The caller adds the Part's first field,
    the index of the message."""
    content = message.get('content')
    if not isinstance(content, str):
        content = ''
    thought = re.match(r'\s*<think>(.*?)</think>', content, re.S)
    if thought and thought[1].strip():
        yield 'the reasoning of answers', 'content', content.replace(thought[1], MARK, 1)
    elif content.strip():
        beside = ' beside a call' if message.get('tool_calls') else ''
        yield f'messages of the role "{message["role"]}"{beside}', 'content', MARK
    for name in THOUGHTS:
        if isinstance(message.get(name), str) and message[name].strip():
            yield 'the reasoning of answers', name, MARK
    if message.get('tool_calls'):
        yield 'the calls of tools', 'tool_calls', mark_answer(message)['tool_calls']


def left_out_parts(tokenizer, chat, parts):
    """Returns a list of those Parts in `parts` that the template leaves out. parts: a list of Parts
    of a Chat.

    Puts a different mark into each Part, renders the Chat, and looks for the marks. For each mark
    that is missing, renders the Chat again with that mark alone, because several marks at once may
    mislead a template."""
    if not parts:
        return []
    messages = [dict(message) for message in chat.messages]
    marks = [f'{MARK}{n}{MARK}' for n in range(len(parts))]
    for part, mark in zip(parts, marks):
        value = json.dumps(part.value, ensure_ascii=False).replace(MARK, mark)
        messages[part.number][part.key] = json.loads(value)
    try:
        text = render(tokenizer, chat._replace(messages=messages))
        missing = [part for part, mark in zip(parts, marks) if mark not in text]
    except UserError:  # a template may look into a content
        missing = parts if len(parts) > 1 else []
    if len(parts) == 1:
        return missing
    return [part for part in missing if left_out_parts(tokenizer, chat, [part])]


def check_is_written(tokenizer, messages, tools=None, variables=None):
    """Raises UserError if the chat template leaves out the descriptions of tools, or the text of a
    message of another role than 'user' and 'assistant', such as 'system'. messages: a conversation
    that the template takes. tools, variables: see Chat."""
    chat = read_chat(messages, tools, variables)
    parts = [Part(i, *part) for i, message in enumerate(chat.messages)
             for part in parts_of(message) if message['role'] not in ('user', 'assistant')]
    kinds = [part.kind for part in left_out_parts(tokenizer, chat, parts)]
    if chat.tools and leaves_out_tools(tokenizer, chat):
        kinds.append('the descriptions of tools')
    if kinds:
        raise UserError(f"the model's chat template leaves out {kinds[0]}: write the text into a "
                        'message of the user')


def mark_answer(message):
    """Returns the message with MARK in place of its text. If the message has tool calls, MARK
    replaces the name of the last call instead, because many templates write no text beside a
    call."""
    if not message.get('tool_calls'):
        return {**message, 'content': MARK}
    *calls, last = message['tool_calls']
    marked = {**call_of(message), 'name': MARK}
    if 'function' in last:
        marked = {**last, 'function': marked}
    return {**message, 'tool_calls': [*calls, marked]}


def find_end(answer, text, specials, stop_tokens):
    """Finds the end of an answer. Returns (start, end) in characters, the part of `text` that
    counts in training. This part goes from the end of the generation prompt to the end of the
    answer.

    answer: an Answer, the place of the answer in `text`. text: the text of all messages. specials:
    the Specials of `text`. stop_tokens: the ids that stop sampling.

    An answer ends with the first stop token that the template writes after the words of the answer.
    Other special tokens may come before it, such as Command R's <|END_RESPONSE|>. Without a stop
    token there, the answer ends with the first special token; but the special tokens around tool
    calls do not end an answer."""
    # take the first special token behind the text of the answer that can end it
    start, said, limit, is_whole, has_calls = answer
    behind = [special for special in specials if special.start >= start and special.end > said]
    has_stop = any(special.id in stop_tokens and special.end <= limit for special in behind)
    for special in behind:
        is_stop = special.id in stop_tokens
        if special.end <= limit:
            if is_stop or not (has_stop or has_calls):
                return start, special.end
            continue
        follows = not text[limit if has_calls else said:special.start].strip()
        if follows and (is_stop or not is_whole and not has_calls):
            # the first token of the next message (GLM), or another one than at the end of a
            # conversation (gpt-oss)
            return start, special.end
        break

    # without such a token: the last special token that the template writes behind the answer, else
    # all that it writes there
    last = [special.end for special in behind if special.end <= limit][-1:]
    if last:
        return start, last[0]
    return start, limit if is_whole or has_calls else said


def find_next_end(tokenizer, chat, behind):
    """Returns the ids of the stop token that a template writes between an answer and the next
    message. If the template writes it only there, the last answer of a Chat has no stop token. But
    the model must learn it in order to stop.

    To find the token, renders the conversation with one more message. In the result, the answer is
    followed by the text `behind`, and then by the stop token. If the template writes spaces in
    front of the token, the ids of the spaces come first. Returns [] if the template writes no stop
    token there.

    behind: the text that the template writes after a last answer, for example a newline. The ids of
    the conversation already include this text."""
    # render the conversation with a message that follows
    *messages, last = chat.messages
    follower = {'role': 'tool' if last.get('tool_calls') else 'user', 'content': 'x'}
    try:
        text = render(tokenizer, chat._replace(
            messages=[*messages, mark_answer(last), follower])).rpartition(MARK)[2]
    except UserError:  # a template may allow nothing there
        return []

    # the new text behind the answer, and whether it begins with a token that stops sampling
    if not text.startswith(behind):
        return []
    ids = tokenizer.tokenizer.encode(text[len(behind):], add_special_tokens=False).ids
    is_space = [not tokenizer.tokenizer.decode([id], skip_special_tokens=False).strip() for id in ids]
    n_spaces = (is_space + [False]).index(False)
    is_stop = ids[n_spaces:] and ids[n_spaces] in tokenizer.stop_tokens
    return ids[:n_spaces + 1] if is_stop else []


def final_answer(text):
    """Returns the part of a model's answer that belongs to the conversation: all of it, or for
    gpt-oss the text of its final channel ('' before that channel begins). gpt-oss first writes
    <|channel|>analysis<|message|>...<|end|>, and its template refuses messages with this text. (The
    other models' templates drop <think>...</think>.)"""
    if '<|channel|>' not in text:
        return text
    return text.partition('<|channel|>final<|message|>')[2].partition('<|end|>')[0]
