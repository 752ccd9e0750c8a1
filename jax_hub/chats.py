"""Conversations as text and token ids: chat templates, and what of a conversation counts in
training."""
import contextlib
import os
import signal
import threading
from typing import NamedTuple

import numpy as np

from jax_flags import UserError, whole_characters

SECONDS = 5  # limit of a chat template, a stranger's program, for one text
MARK = '\ufdd2'  # in place of an answer, to see where a template writes it: no character


class Chat(NamedTuple):
    """A conversation as a chat template takes it."""
    messages: list  # [{'role': ..., 'content': text, 'tool_calls': [...]}]
    tools: list | None = None  # JSON schemas of the functions that the assistant may call
    variables: dict = {}  # others of the template, as {'enable_thinking': False}


def read_chat(messages, tools=None, variables=None):
    """Returns the Chat of what a user gives. Raises UserError for what is no conversation."""
    if not isinstance(messages, list) or not messages:
        raise UserError('messages must be a list of {"role": ..., "content": text} with at least '
                        'one')
    return Chat([read_message(i, message) for i, message in enumerate(messages)], tools,
                variables or {})


def read_message(i, message):
    """Returns message number i with its content as one text, where it is parts of text: many
    templates take nothing else. Raises UserError."""
    if not isinstance(message, dict) or not isinstance(message.get('role'), str):
        raise UserError(f'message {i} is not {{"role": ..., "content": text}}')
    message = {key: value for key, value in message.items() if value is not None}
    content = message.get('content')
    calls = message.get('tool_calls')
    if isinstance(content, list):
        parts = [part.get('text') if isinstance(part, dict) else part for part in content]
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


def is_call(call):
    """Whether this is a call of a tool, {'function': {'name': text, ...}} or {'name': text}."""
    function = call.get('function', call) if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get('name'), str)


def call_of(message, n=-1):
    """Returns call number n of a tool in a message, {'name': ..., 'arguments': ...}."""
    call = message['tool_calls'][n]
    return call.get('function', call)


def render(tokenizer, chat, *, add_generation_prompt=False):
    """Returns the text of a Chat by the chat template of an HFTokenizer, followed by the beginning
    of the next answer if add_generation_prompt. Raises UserError: see within_limits."""
    return within_limits(
        tokenizer.hf.apply_chat_template, chat.messages, tools=chat.tools,
        tokenize=False, add_generation_prompt=add_generation_prompt, **chat.variables)


def render_marked(tokenizer, chat):
    """Returns (text of a Chat, [(start, end)] of what its template marks by {% generation %}, in
    characters). Raises UserError: see within_limits."""
    from transformers.utils.chat_template_utils import render_jinja_template
    hf = tokenizer.hf
    texts, spans = within_limits(
        render_jinja_template, [chat.messages], tools=chat.tools,
        chat_template=hf.get_chat_template(tools=chat.tools), return_assistant_tokens_mask=True,
        **{**hf.special_tokens_map, **chat.variables})
    return texts[0], spans[0]


def within_limits(function, *args, **options):
    """Returns the result of a function that runs a chat template.

    Raises UserError for one that fails, refuses the messages, or does not end within SECONDS (in the
    main thread)."""
    try:
        with time_limit(SECONDS):
            return function(*args, **options)
    except (Exception, MemoryError) as error:  # a template is a program
        kind = type(error).__name__
        verdict = 'refuses' if kind == 'TemplateError' else f'fails: {kind}'  # raise_exception
        raise UserError(f"the model's chat template {verdict}: {error!s:.300}") from None


@contextlib.contextmanager
def time_limit(seconds):
    """Raises TimeoutError in the body when the time is over. Without signals (Windows, another
    thread) there is no limit."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not hasattr(signal, 'setitimer'):
        yield
        return

    def stop(*args):
        raise TimeoutError(f'it does not end within {seconds} s')

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# -----------------------------------------------------------------------------
# training

def encode_training_chat(tokenizer, chat, counted=None):
    """Returns (ids, mask) of a conversation by the chat template of an HFTokenizer; the mask, as
    long as the ids, is 1 for the tokens that count in training.

    chat: a Chat. counted: the numbers of the assistant's messages that count, None for all. Of
    those count the tokens that the template marks by {% generation %}; without such marks the whole
    answer, from the end of the request for it (the generation prompt) to the special token that
    ends it. If the template leaves that token to the message that follows, the last answer gets it
    here.

    Raises UserError if the template refuses the messages, or writes an answer where it does not ask
    for one."""
    # the parts of the text that count: as the template marks them, or the answers with their ends
    answers = [i for i, message in enumerate(chat.messages) if message['role'] == 'assistant']
    chosen = [i for i in answers if counted is None or i in counted]
    text, spans = render_marked(tokenizer, chat)
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

    # their tokens; a special token that takes in the spaces after it belongs to what it follows
    mask = np.zeros(len(ids), np.uint8)
    for start, end in spans:
        mask |= (starts < end) & (ends > start) & ~(is_special & (starts < start))

    # the token that ends the last answer, if the template leaves it to the next message
    is_last = last is not None and chosen[-1] == len(chat.messages) - 1
    if is_last and spans[-1][1] == len(text) and ids:
        # another special token may close a call, but ends any other answer
        may_end = last.has_calls or not is_special[-1]
        if ids[-1] not in tokenizer.stop_tokens and may_end:
            more = find_next_end(tokenizer, chat, text[last.said:])
            ids = ids + more
            mask = np.append(mask, np.ones(len(more), np.uint8))
    return ids, mask


def leave_out(tokenizer, chat, spans, left_out):
    """Returns the spans of render_marked without those of the answers `left_out`, given by their
    numbers. Raises UserError for an answer that the template does not mark by itself."""
    kept = list(spans)
    for i in left_out:
        marked = [*chat.messages[:i], mark_answer(chat.messages[i]), *chat.messages[i + 1:]]
        text, others = render_marked(tokenizer, chat._replace(messages=marked))
        places = [n for n, (start, end) in enumerate(others) if MARK in text[start:end]]
        if len(others) != len(spans) or len(places) != 1:
            raise UserError(f'the chat template does not mark answer {i}, which does not count, '
                            'apart from the others')
        kept.remove(spans[places[0]])
    return kept


class Special(NamedTuple):
    """A special token in a text."""
    start: int  # characters
    end: int
    id: int


class Answer(NamedTuple):
    """Where an answer is in the text of a conversation, in characters."""
    start: int  # the end of the request for it
    said: int  # the end of what it says, or of the name of its last call
    limit: int  # up to which the template writes the same behind it, whether messages follow or not
    is_whole: bool  # whether nothing but that is behind it at the end of a conversation
    has_calls: bool  # whether it calls tools


def find_answer(tokenizer, chat, i, text):
    """Returns the Answer i in `text`, the rendering of a Chat.

    Other renderings, with a mark in place of the answer, tell what the template writes around it,
    whatever it says and whatever the template rewrites of earlier turns. Raises UserError for an
    answer that is elsewhere than it is asked for."""
    refusal = UserError(f'the chat template does not write answer {i} where it asks for it; mark '
                        'what the assistant says in it by {% generation %}')

    def text_of(messages, **options):
        return render(tokenizer, chat._replace(messages=messages), **options)

    # what is written around a mark in its place: among all messages, and at the end
    messages = chat.messages
    has_calls = bool(messages[i].get('tool_calls'))
    marked = [*messages[:i], mark_answer(messages[i])]
    around = text_of(marked + messages[i + 1:]).split(MARK)
    around_last = text_of(marked).split(MARK)
    n_marks = len(around_last) - 1
    # a call's name may be written again where its result is
    is_repeated = not has_calls and len(around) > 2
    if not 1 <= n_marks < len(around) or is_repeated:
        raise refusal
    before, before_last = around[0], around_last[0]
    after = MARK.join(around[n_marks:])
    if has_calls:
        after = after.replace(MARK, call_of(messages[i])['name'])
    if not text.endswith(after):
        raise refusal
    said = len(text) - len(after)

    # where the answer begins: behind the request for it, which the first message has not
    request = text_of(messages[:i], add_generation_prompt=True) if i else before
    start = len(request)
    if not text.startswith(request):  # earlier turns are written otherwise when others follow
        prompt = request.removeprefix(text_of(messages[:i]))
        introduction = before_last.removeprefix(request)  # between request and answer
        if not text.startswith(before) or not before.endswith(prompt + introduction):
            raise refusal
        start = len(before) - len(introduction)
    if start > said:
        raise refusal
    n_shared = len(os.path.commonprefix([after, around_last[-1]]))
    return Answer(start, said, said + n_shared, n_shared == len(around_last[-1]), has_calls)


def mark_answer(message):
    """Returns the message with MARK in place of what it says, or in the name of its last call of a
    tool if it has any: many templates write no text beside a call."""
    if not message.get('tool_calls'):
        return {**message, 'content': MARK}
    *calls, last = message['tool_calls']
    marked = {**call_of(message), 'name': MARK}
    if 'function' in last:
        marked = {**last, 'function': marked}
    return {**message, 'tool_calls': [*calls, marked]}


def find_end(answer, text, specials, stop_tokens):
    """Returns (start, end) of an Answer, as it counts in training, in the text of all messages.

    specials: the Specials of the text. An answer that calls tools may have special tokens around
    the calls; others end with the first behind what they say."""
    # the special tokens behind what it says, in order; the first that can end it does
    start, said, limit, is_whole, has_calls = answer
    behind = [special for special in specials if special.start >= start and special.end > said]
    for special in behind:
        is_stop = special.id in stop_tokens
        if special.end <= limit:
            if is_stop or not has_calls:
                return start, special.end
            continue
        follows = not text[limit if has_calls else said:special.start].strip()
        if follows and (is_stop or not is_whole and not has_calls):
            # the first token of the next message (GLM), or another one than at the end of a
            # conversation (gpt-oss)
            return start, special.end
        break

    # without one: the last that the template writes behind the answer, or all that it writes there
    last = [special.end for special in behind if special.end <= limit][-1:]
    if last:
        return start, last[0]
    return start, limit if is_whole else said


def find_next_end(tokenizer, chat, behind):
    """Returns the ids that end the last answer of a Chat if the template writes them at the
    beginning of a message that follows: what a model generates there before it stops. [] if there
    are none.

    behind: what the template writes behind the answer now."""
    # render the conversation with a message that follows
    *messages, last = chat.messages
    follower = {'role': 'tool' if last.get('tool_calls') else 'user', 'content': 'x'}
    try:
        text = render(tokenizer, chat._replace(
            messages=[*messages, mark_answer(last), follower])).rpartition(MARK)[2]
    except UserError:  # a template may allow nothing there
        return []

    # what is new behind the answer, and whether it begins with a token at which sampling stops
    if not text.startswith(behind):
        return []
    ids = tokenizer.tokenizer.encode(text[len(behind):], add_special_tokens=False).ids
    is_space = [not tokenizer.tokenizer.decode([id], skip_special_tokens=False).strip() for id in ids]
    n_spaces = (is_space + [False]).index(False)
    is_stop = ids[n_spaces:] and ids[n_spaces] in tokenizer.stop_tokens
    return ids[:n_spaces + 1] if is_stop else []


def final_answer(text):
    """Returns what of an answer belongs to the conversation. gpt-oss writes
    <|channel|>analysis<|message|>...<|end|> first, which its template takes for an error in a
    message. (The other models' templates drop <think>...</think>.)"""
    if '<|channel|>' not in text:
        return text
    return text.partition('<|channel|>final<|message|>')[2].partition('<|end|>')[0]
