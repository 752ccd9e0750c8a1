"""The forms in which people keep conversations, and what of them is taught."""
import json
import re
from typing import NamedTuple

from jax_files.chats import Chat, read_chat
from jax_flags import UserError

# what says of a message whether it counts: OpenAI, axolotl, ms-swift, slime and their like
WEIGHTS = ('weight', 'train', 'training', 'train_on_turn', 'trainable', 'loss', 'loss_mask',
           'step_loss_mask')
DETAILS = ('train_detail', 'training_detail')  # of axolotl: parts of an answer
ROLES = {  # of ShareGPT's "from"
    'human': 'user', 'user': 'user', 'gpt': 'assistant', 'assistant': 'assistant',
    'chatgpt': 'assistant', 'bing': 'assistant', 'bard': 'assistant', 'model': 'assistant',
    'bot': 'assistant', 'function_call': 'assistant', 'system': 'system',
    'developer': 'developer', 'tool': 'tool', 'tool_response': 'tool', 'observation': 'tool',
    'function': 'tool', 'function_response': 'tool'}
TEXTS = (  # names of a question and of the answer to it
    ('instruction', 'output'), ('instruction', 'response'), ('prompt', 'completion'),
    ('prompt', 'response'),
    ('question', 'answer'), ('question', 'response'), ('query', 'response'))
QUESTIONS = ('prompt', 'instruction', 'question', 'query')  # that "chosen" and "rejected" answer
LISTS = ('messages', 'conversations', 'conversation')  # of messages
KEYS = (*LISTS, 'chosen', *QUESTIONS)  # of any row
# of a transcript, as Anthropic's hh-rlhf has them
SPEAKERS = {'Human': 'user', 'Assistant': 'assistant'}


class Example(NamedTuple):
    """A conversation, or a pair of which the first has the answer that was chosen."""
    chats: list[Chat]
    counted: list[list[int]]  # the numbers of the messages that count, of each
    form: str  # what the row is, for the user; '' if it is "messages"


def read_example(row):
    """Returns the Example of a row, a dict. Raises UserError, with a text that follows the number
    of the row."""
    if not isinstance(row, dict):
        raise UserError('has no "messages": it is no object')
    row = {key: value for key, value in row.items() if value is not None}

    # What stands beside the messages, for the template.
    tools = read_tools(row)
    variables = row.get('chat_template_kwargs')
    if isinstance(variables, str):  # parquet has no column of any objects
        variables = parse(variables, '"chat_template_kwargs"')

    # The conversations, and how many messages at their beginning are given.
    if 'rejected_response' in row or 'rejected_messages' in row:
        conversations, n_given, form = read_swift_pair(row)
    elif 'rejected' in row or 'chosen' in row:
        conversations, n_given, form = read_pair(row)
    else:
        messages, n_given, form = read_conversation(row)
        if not any(role_of(message) == 'assistant' for message in messages[n_given:]):
            raise UserError('has no message with the role "assistant", so there is nothing to '
                            'learn')
        conversations = [messages]

    # Which of the other messages count, and the messages as the template takes them.
    chats = []
    counted = []
    for messages in conversations:
        counted.append([i for i in find_counted(messages) if i >= n_given])
        messages = [without_weights(message) for message in messages]
        chats.append(read_chat(messages, tools, variables))
    return Example(chats, counted, form)


def parse(text, name):
    """Returns the value of JSON in a text. Raises UserError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f'{name} is a text that is not JSON ({error})') from None


def read_tools(row):
    """Returns the JSON schemas of the tools of a row, None without any. Raises UserError."""
    tools = row.get('tools')
    if isinstance(tools, str):
        tools = parse(tools, '"tools"') if tools.strip() else None
    if tools is None and 'functions' in row:  # OpenAI's older form
        functions = row['functions']
        if not isinstance(functions, list):
            raise UserError('"functions" must be a list of JSON schemas')
        tools = [{'type': 'function', 'function': function} for function in functions]
    return tools


# -----------------------------------------------------------------------------
# messages

def role_of(message):
    """Returns the role of a message, None if it has none."""
    return message.get('role') if isinstance(message, dict) else None


def read_turns(turns, name):
    """Returns the messages of a list of messages in OpenAI's form, or in ShareGPT's. Raises
    UserError."""
    if isinstance(turns, str):  # of a table
        turns = parse(turns, f'"{name}"')
    if not isinstance(turns, list):
        raise UserError(f'"{name}" must be a list of {{"role": ..., "content": text}}')
    return [read_turn(i, turn) for i, turn in enumerate(turns)]


def read_turn(i, turn):
    """Returns the message that a turn is, in OpenAI's form. Raises UserError."""
    if not isinstance(turn, dict):
        raise UserError(f'message {i} is not {{"role": ..., "content": text}}')
    turn = {key: value for key, value in turn.items() if value is not None}
    if 'from' in turn and 'role' not in turn:
        turn = read_sharegpt(i, turn)
    if 'function_call' in turn:  # OpenAI's older form
        call = {'type': 'function', 'function': turn.pop('function_call')}
        turn['tool_calls'] = [call]
    if not isinstance(turn.get('role'), str):
        raise UserError(f'message {i} is not {{"role": ..., "content": text}}')
    if turn['role'] == 'function':
        turn['role'] = 'tool'
    return turn


def read_sharegpt(i, turn):
    """Returns the message that a turn of ShareGPT is. Raises UserError for one that has another
    role or no text."""
    turn = dict(turn)
    speaker = turn.pop('from')
    text = turn.pop('value', None)
    role = ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise UserError(f'message {i} is from {speaker!r}, and those are known: {", ".join(ROLES)}')
    if not isinstance(text, str):
        raise UserError(f'message {i} has no text as its "value"')

    # A text, or the call of a function in JSON.
    if speaker != 'function_call':
        return {'role': role, 'content': text, **turn}
    calls = parse(text, f'the call of a function in message {i}')
    if not isinstance(calls, list):
        calls = [calls]
    calls = [{'type': 'function', 'function': call} for call in calls]
    return {'role': role, 'tool_calls': calls, **turn}


def find_counted(messages):
    """Returns the numbers of the messages that count in training: the assistant's, without those of
    the weight 0. Raises UserError for other weights than 0 and 1, and for what counts and is no
    answer."""
    counted = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            continue

        # What the message says of its weight, by any of the names.
        weights = {name: message[name] for name in WEIGHTS if message.get(name) is not None}
        for name, weight in weights.items():
            if not isinstance(weight, (bool, int, float)) or weight not in (0, 1):
                raise UserError(f'message {i} has "{name}": {json.dumps(weight):.50}, and an '
                                'answer counts or not: it must be 0 or 1, false or true')
            if weight and role_of(message) != 'assistant':
                raise UserError(f'message {i} has "{name}": {json.dumps(weight)} and the role '
                                f'"{role_of(message)}", and only answers of the role "assistant" '
                                'can count')

        # Parts of an answer cannot be left out here.
        for name in DETAILS:
            if message.get(name) is not None:
                raise UserError(f'message {i} has "{name}", and only whole answers can be left '
                                'out: by "train": false')
        if role_of(message) == 'assistant' and all(weights.values()):
            counted.append(i)
    return counted


def without_weights(message):
    """Returns the message without what says whether it counts, which is not for the template."""
    if not isinstance(message, dict):
        return message
    return {key: value for key, value in message.items() if key not in WEIGHTS + DETAILS}


# -----------------------------------------------------------------------------
# rows

def read_conversation(row):
    """Returns (messages, how many of them at the beginning never count, form) of a row. Raises
    UserError."""
    messages, form = read_list(row)
    if messages is not None:
        return messages, 0, form
    for question, answer in TEXTS:
        if question in row and answer in row:
            asked = read_question(row, question)
            answered = read_answer(row[answer], answer)
            extra = ', "input"' if has_input(row) else ''
            return asked + answered, len(asked), f'"{question}"{extra} and "{answer}"'
    raise UserError('has no "messages"; other forms are "conversations", "instruction" and '
                    '"output", "prompt" and "completion", see data/chat/readme.md')


def read_pair(row):
    """Returns ((messages with the chosen answer, with the rejected one), how many of them at the
    beginning are the question, form). Raises UserError."""
    # What both fields hold: answers, transcripts, or whole conversations.
    is_asked = any(name in row for name in LISTS + QUESTIONS)
    are_transcripts = (not is_asked and is_transcript(row.get('chosen'))
                       and is_transcript(row.get('rejected')))
    answers = []
    for name in ('chosen', 'rejected'):
        if are_transcripts:
            answer = read_transcript(row[name], name)
        else:
            answer = read_answer(row.get(name), name)
        if not answer or all(is_empty(message) for message in answer):
            raise UserError(f'has no "{name}", or an empty one')
        answers.append(answer)

    # Which question they answer: that in front of both, or one that the row has separately.
    chosen, rejected = answers
    are_whole = [role_of(answer[0]) != 'assistant' for answer in answers]
    if all(are_whole):
        n_shared = count_shared(chosen, rejected)
        question = with_system(row, chosen[:n_shared])
        chosen = chosen[n_shared:]
        rejected = rejected[n_shared:]
        if are_transcripts:
            form = 'transcripts of "Human:" and "Assistant:" in "chosen" and "rejected"'
        else:
            form = 'whole conversations in "chosen" and "rejected"'
    elif any(are_whole):
        raise UserError('"chosen" and "rejected" must both begin with the question, or both with '
                        'the answer')
    else:
        question, form = read_asked(row)

    # There has to be a question, and two answers to it.
    if not question or role_of(question[-1]) == 'assistant':
        raise UserError('has no question in front of the answers "chosen" and "rejected": '
                        '"messages" must end with one, or there must be a "prompt"')
    for name, answer in (('chosen', chosen), ('rejected', rejected)):
        if not any(role_of(message) == 'assistant' for message in answer):
            raise UserError(f'has no answer of the role "assistant" in "{name}"')
    return (question + chosen, question + rejected), len(question), form


def read_swift_pair(row):
    """Returns what read_pair returns, of a pair in ms-swift's form: the answer that was chosen is
    "response", or ends the "messages"; the other one is "rejected_response", or ends
    "rejected_messages". Raises UserError."""
    # The answer that was rejected.
    row = dict(row)
    name = 'rejected_response' if 'rejected_response' in row else 'rejected_messages'
    row['rejected'] = row.pop(name)

    # The one that was chosen.
    if 'response' in row:
        answer = 'response'
        row['chosen'] = row.pop('response')
    elif 'messages' in row:
        answer = 'messages'
        messages = read_turns(row.pop('messages'), 'messages')
        if not messages or role_of(messages[-1]) != 'assistant':
            raise UserError(f'has "{name}" beside "messages" that do not end with an answer of the '
                            'role "assistant", the one that was chosen')
        if name == 'rejected_messages':
            row['chosen'] = messages
        else:
            row['chosen'] = messages[-1:]
            row['messages'] = messages[:-1]
    else:
        raise UserError(f'has "{name}", but neither "response" nor "messages" with the answer that '
                        'was chosen')

    # Under these names it is any pair.
    conversations, n_given, _ = read_pair(row)
    return conversations, n_given, f'"{answer}" and "{name}"'


def is_transcript(text):
    """Whether a value is a text of turns that begin with "Human: " and "Assistant: ", the first
    with "Human: "."""
    return isinstance(text, str) and text.lstrip().startswith('Human:') and '\n\nAssistant:' in text


def read_transcript(text, name):
    """Returns the messages of a transcript. Raises UserError for one that does not end with an
    answer."""
    parts = re.split('(?:^|\n\n)(Human|Assistant):', '\n\n' + text.strip())
    messages = []
    for speaker, content in zip(parts[1::2], parts[2::2], strict=True):
        messages.append({'role': SPEAKERS[speaker], 'content': content.strip()})
    if role_of(messages[-1]) != 'assistant' or is_empty(messages[-1]):
        raise UserError(f'has a transcript in "{name}" that does not end with an answer after '
                        '"Assistant:"')
    return messages


def read_asked(row):
    """Returns (messages, form) of the question that "chosen" and "rejected" answer. Raises
    UserError."""
    messages, form = read_list(row)
    if messages is not None:
        return messages, form
    for name in QUESTIONS:
        if name in row:
            return read_question(row, name), f'"{name}", "chosen" and "rejected"'
    return [], ''


def count_shared(chosen, rejected):
    """Returns how many messages at the beginning of two conversations are their question: those
    that are equal in both, but not the last of either."""
    # As far as both are equal, but for the last message of each.
    n = 0
    longest = min(len(chosen), len(rejected)) - 1
    while n < longest and chosen[n] == rejected[n]:
        n += 1

    # A question ends before an answer begins.
    while n and role_of(chosen[n - 1]) == 'assistant':
        n -= 1
    return n


def read_list(row):
    """Returns (messages, form) of a row that has a list of them; (None, '') of another. Raises
    UserError."""
    if 'messages' in row:
        return with_system(row, read_turns(row['messages'], 'messages')), ''
    for name in LISTS[1:]:
        if name in row:
            turns = row[name]
            is_sharegpt = 'from' in str(turns)[:20]
            if is_sharegpt:
                form = f'ShareGPT: "{name}" of "from" and "value"'
            else:
                form = f'"{name}" of "role" and "content"'
            return with_system(row, read_turns(turns, name)), form
    return None, ''


def with_system(row, messages):
    """Returns the messages after the row's "system", if it has one beside them."""
    system = row.get('system')
    if not isinstance(system, str) or not system or messages and role_of(messages[0]) == 'system':
        return messages
    return [{'role': 'system', 'content': system}, *messages]


def has_input(row):
    """Whether a row has a text as its "input", which belongs to the question."""
    return isinstance(row.get('input'), str) and row['input'] != ''


def read_question(row, name):
    """Returns the messages of a question that is a text, with the row's "input" in the next line
    and its "history" of pairs before it, or that is a list of messages. Raises UserError."""
    asked = row[name]
    if not isinstance(asked, str):
        return with_system(row, read_turns(asked, name))

    # The turns before it.
    messages = []
    history = row.get('history', [])
    if not isinstance(history, list):
        raise UserError('"history" must be a list of [question, answer]')
    for pair in history:
        if not isinstance(pair, list) or len(pair) != 2:
            raise UserError('"history" must be a list of [question, answer]')
        messages.append({'role': 'user', 'content': pair[0]})
        messages.append({'role': 'assistant', 'content': pair[1]})

    # The question itself.
    if has_input(row):
        asked = f'{asked}\n{row["input"]}'
    messages.append({'role': 'user', 'content': asked})
    return with_system(row, messages)


def read_answer(answer, name):
    """Returns the messages of an answer: a text, a message, or a list of them. Raises UserError."""
    if isinstance(answer, str):
        return [{'role': 'assistant', 'content': answer}]
    if isinstance(answer, dict):
        return [read_turn(0, answer)]
    if answer is None:
        return []
    return read_turns(answer, name)


def is_empty(message):
    """Whether a message says nothing, and calls nothing."""
    content = message.get('content')
    if message.get('tool_calls'):
        return False
    return content is None or isinstance(content, str) and not content.strip()
