"""Reads conversations in the common forms of data sets, such as "messages", ShareGPT's
"conversations", or "instruction" and "output". Decides which messages count in the loss."""
import itertools
from typing import NamedTuple

from jax_flags import UserError, parse_json

# keys of a message that say whether it counts
WEIGHTS = ('weight', 'train', 'loss', 'train_on_turn', 'training')
SYSTEMS = ('system', 'system_prompt')  # keys of a row with the text of a system message
INPUTS = ('input', 'context')  # keys of a row with a text that is put below the question
# keys that would change the question or the answers of a row. They are not read, so a row with one
# of them is refused (with "functions" only if it has no "tools"). readme.md has functions that make
# messages of such rows
UNREAD = ('history', 'functions', 'rejected_response')
LABELS = {  # whether the answers of a row are good ones
    'true': 1, '1': 1, '1.0': 1, 'false': 0, '0': 0, '0.0': 0}
ROLES = {  # ShareGPT's "from"
    'human': 'user', 'user': 'user', 'gpt': 'assistant', 'assistant': 'assistant',
    'function_call': 'assistant', 'system': 'system', 'tool': 'tool', 'observation': 'tool'}
TEXTS = (  # names of a question and of the answer to it
    ('instruction', 'output'), ('instruction', 'response'), ('prompt', 'completion'),
    ('prompt', 'response'), ('question', 'answer'), ('question', 'response'))
LISTS = ('messages', 'conversations', 'conversation')  # keys that hold messages
QUESTIONS = (*LISTS, 'prompt', 'instruction', 'question')  # keys of what the two answers answer


class Example(NamedTuple):
    """A conversation, or a pair of conversations. In a pair, the conversation with the chosen
    answer comes first."""
    conversations: list[list[dict]]  # lists of messages, as a chat template takes them
    counted: list[list[int]]  # each conversation: indices of messages that count in the loss
    form: str  # what the row is, for the user; '' if it is "messages"
    tools: list | None = None  # for the template
    variables: dict | None = None
    unread: set = frozenset()  # the names of the columns that were not read


class Row(dict):
    """A row that knows which of its columns were read."""

    def __init__(self, values):
        super().__init__(values)
        self.was_read = set()

    def __getitem__(self, name):
        self.was_read.add(name)
        return super().__getitem__(name)

    def get(self, name, default=None):
        self.was_read.add(name)
        return super().get(name, default)

    def unread(self):
        """Returns the names of the columns that hold something and were not read."""
        return {name for name, value in self.items()
                if name not in self.was_read and value not in ('', [], {})}


def read_example(row):
    """Returns the Example of a row. Raises UserError if the row cannot be read. The text of the
    error has no subject ('has no "messages"'), because the number of the row is put in front."""
    if isinstance(row, list) and row and all(isinstance(each, dict) for each in row):
        row = {'messages': row}  # a line that has the messages alone
    if not isinstance(row, dict):
        why = ''
        if isinstance(row, list):
            why = ' (a row of a table has another number of fields than the header)'
        raise UserError(f'has no "messages": it is no object{why}')
    row = Row({key: value for key, value in row.items() if value is not None})
    for name in UNREAD:
        is_known = name == 'functions' and row.get('tools')
        if row.get(name) and not is_known:
            raise UserError(f'has "{name}", which is not read; "Other forms" in '
                            'data/chat/readme.md has a function that makes messages of such rows')
    if 'chosen' in row or 'rejected' in row:
        asked, answers, form = read_pair(row)
    else:
        asked, answers, form = read_conversation(row)

    # Which messages count, of those after the question.
    conversations = [asked + answer for answer in answers]
    counted = []
    for messages in conversations:
        if not any(message['role'] == 'assistant' for message in messages[len(asked):]):
            raise UserError('has no message with the role "assistant", so there is nothing to '
                            'learn')
        counted.append([i for i, message in enumerate(messages)
                        if counts(i, message) and i >= len(asked)])

    label = LABELS.get(str(row.get('label')).lower())
    if label == 0:
        counted = [[] for _ in counted]
    if label is None:
        row.was_read.discard('label')  # it has another meaning

    # What the template takes: not the weights.
    conversations = [[for_template(message) for message in each] for each in conversations]
    tools, variables = (parsed(row.get(name), name) for name in ('tools', 'chat_template_kwargs'))
    check_all_is_asked(row)
    return Example(conversations, counted, form, without_nulls(tools) or None,
                   without_nulls(variables), row.unread())


def for_template(message):
    """Returns a message as a chat template takes it: without the keys WEIGHTS, which say whether
    the message counts in the loss, and without nulls in its tool calls."""
    message = {key: value for key, value in message.items() if key not in WEIGHTS}
    if 'tool_calls' in message:
        message['tool_calls'] = without_nulls(message['tool_calls'])
    return message


def without_nulls(value):
    """Returns a JSON value without the keys that have the value null. Such keys come from files of
    columns, such as parquet. All objects in a column have the same keys there, with null for each
    key that an object did not have before."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [without_nulls(each) for each in value]
    return value


def check_all_is_asked(row):
    """Raises UserError if a row has a text in the column 'context', 'instruction', 'system' or
    'system_prompt', and its reader did not use this column. Such a text may belong to the prompt,
    and training without it would teach something else. Call this function after the row was read.
    row: a Row."""
    unread = row.unread()
    for name in ('context', 'instruction', *SYSTEMS):
        if name in unread:
            raise UserError(f'has "{name}" beside what is read, and it is not clear where it '
                            'belongs: put it into "messages", see data/chat/readme.md')


def parsed(value, name):
    """Returns `value`, an entry of a row. If `value` is a text, it must be JSON, and is parsed,
    because a column of a CSV or parquet file cannot hold arbitrary objects. An empty or blank text
    gives None. name: the name of the column, for the message. Raises UserError if any other text is
    not JSON."""
    if isinstance(value, str):
        return parse_json(value, f'"{name}"') if value.strip() else None
    return value


# -----------------------------------------------------------------------------
# messages

def read_turns(turns, name):
    """Returns the messages of the list `turns` in OpenAI's form. The turns are in OpenAI's form or
    in ShareGPT's; the list may be given as JSON text. name: the name of the column that holds
    `turns`, for error messages. Raises UserError if `turns` is not such a list."""
    turns = parsed(turns, name)
    if not isinstance(turns, list):
        raise UserError(f'"{name}" must be a list of {{"role": ..., "content": text}}')
    return [read_turn(i, turn) for i, turn in enumerate(turns)]


def read_turn(i, turn):
    """Returns turn number i of a conversation as a message in OpenAI's form, with a "role". The
    turn is in OpenAI's form already, or in ShareGPT's form, with "from" and "value". Raises
    UserError if the turn has neither form."""
    if isinstance(turn, dict):
        turn = {key: value for key, value in turn.items() if value is not None}
        if 'from' in turn and 'role' not in turn:
            turn = read_sharegpt(i, turn)
        if isinstance(turn.get('role'), str):
            return turn
    raise UserError(f'message {i} is not {{"role": ..., "content": text}}')


def read_sharegpt(i, turn):
    """Returns turn number i, in ShareGPT's form, as a message. Raises UserError if its role is
    unknown or it has no text."""
    speaker = turn.pop('from')
    text = turn.pop('value', None)
    is_known = isinstance(speaker, str) and speaker in ROLES
    if not is_known or not isinstance(text, str):
        raise UserError(f'message {i} is not {{"from": ..., "value": text}} from one of '
                        f'{", ".join(ROLES)}')
    if speaker != 'function_call':
        return {'role': ROLES[speaker], 'content': text, **turn}

    # The call of a function, or a list of calls, in JSON.
    calls = parse_json(text, f'the call of a function in message {i}')
    calls = calls if isinstance(calls, list) else [calls]
    calls = [{'type': 'function', 'function': call} for call in calls]
    return {'role': 'assistant', 'tool_calls': calls, **turn}


def counts(i, message):
    """Returns whether a message counts in training: messages of the assistant count, except those
    with the weight 0. Raises UserError for other weights than 0 and 1, and if a message of another
    role has the weight 1."""
    is_answer = message['role'] == 'assistant'
    weights = {name: message[name] for name in WEIGHTS if name in message}
    for name, weight in weights.items():
        if weight not in (0, 1):
            raise UserError(f'message {i} has "{name}": {weight!r:.50}, and an answer counts or '
                            'not: it must be 0 or 1, false or true')
        if weight and not is_answer:
            raise UserError(f'message {i} has "{name}": {weight!r}, and only answers of the role '
                            '"assistant" can count')
    return is_answer and all(weights.values())


# -----------------------------------------------------------------------------
# rows: each reader returns (messages of the question, [messages of each answer], form)

def read_conversation(row):
    """Reads a row with one conversation. Returns (question; answers; form).

    question: a list of messages. answers: a list with one element, the list of the answer's
    messages. form: how the row is written, a text to print. Some rows have a question and an answer
    under two names. Others have the whole conversation in one list; then question is [], and the
    answer is the whole list. Raises UserError if the row has no conversation."""
    for name in LISTS:
        if name in row:
            return [], [read_question(row, name)], '' if name == 'messages' else f'"{name}"'
    for question, answer in TEXTS:
        if question in row and answer in row:
            asked = read_question(row, question)
            return asked, [read_answer(row[answer], answer)], f'"{question}" and "{answer}"'
    raise UserError('has no "messages"; other forms are "conversations", "instruction" and '
                    '"output", "prompt" and "completion", see data/chat/readme.md')


def read_pair(row):
    """Reads a row with two answers, "chosen" and "rejected". Returns (question; answers; form).
    question: the messages of the question. answers: a list of two lists of messages, the chosen
    answer and the rejected answer. form: a text that tells the user which form the row has. Raises
    UserError if an answer is missing, or if it is not clear which messages are the question."""
    answers = []
    for name in ('chosen', 'rejected'):
        if not str(row.get(name) or '').strip():
            raise UserError(f'has no "{name}", or an empty one')
        answers.append(read_answer(row[name], name))
    chosen, rejected = answers
    are_whole = [answer[0]['role'] != 'assistant' for answer in answers]
    if any(are_whole) and not all(are_whole):
        raise UserError('"chosen" and "rejected" must both begin with the question, or both with '
                        'the answer')

    # The question: what is equal at the beginning of both, or what the row has separately.
    named = next((name for name in QUESTIONS if name in row), '')
    if all(are_whole):
        n = count_shared(chosen, rejected)
        question = with_system(row, chosen[:n])
        answers = [chosen[n:], rejected[n:]]
    else:
        question = read_question(row, named) if named else []
    if not question or question[-1]['role'] == 'assistant':
        raise UserError('has no question in front of the answers "chosen" and "rejected": '
                        '"messages" must end with one, or there must be a "prompt"')
    return question, answers, '' if named == 'messages' else '"chosen" and "rejected"'


def count_shared(chosen, rejected):
    """Returns the number of messages in the question with which both conversations of a pair begin.

    Counts the equal messages at the beginning of the two conversations. Leaves out the last message
    of each conversation, which belongs to the answer. If the equal messages end with messages of
    the assistant, leaves out these, too, because the answers begin there. Example: if both
    conversations have the messages user, assistant, user, assistant, and differ only in the last
    message, returns 3."""
    both = zip(chosen[:-1], rejected[:-1])
    n = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], both))

    # A question ends before an answer begins.
    while n and chosen[n - 1]['role'] == 'assistant':
        n -= 1
    return n


def read_question(row, name):
    """Returns the messages in the column `name`, with the row's "system" in front. The column holds
    a list of messages, or a text. If it holds a text, "input" or "context" is put below the text.
    Raises UserError if the column holds anything else."""
    asked = row[name]
    if name in LISTS or not isinstance(asked, str):
        return with_system(row, read_turns(asked, name))
    for key in INPUTS:
        text = row.get(key)
        if not text:
            continue
        if not isinstance(text, str):
            raise UserError(f'has "{key}", which is no text: put it into "messages"')
        asked = f'{asked}\n{text}'
    return with_system(row, [{'role': 'user', 'content': asked}])


def with_system(row, messages):
    """Puts a row's "system" or "system_prompt" in front of its messages, as a system message,
    unless they begin with that system message already. Returns the messages. Raises UserError if
    they begin with a different system message, or if the two fields differ. A row with neither
    field keeps its messages."""
    texts = [row[name] for name in SYSTEMS if row.get(name)]
    if not texts:
        return messages
    if texts[0] != texts[-1]:
        raise UserError(f'has {" and ".join(SYSTEMS)} with different texts')
    if messages and messages[0]['role'] == 'system':
        if messages[0].get('content') not in texts:
            raise UserError('has a "system" beside "messages" that begin with another one')
        return messages
    return [{'role': 'system', 'content': texts[0]}, *messages]


def read_answer(answer, name):
    """Returns the list of the messages of an answer. answer: a text, a message, or a list of
    messages. name: the answer's column, for error messages. Raises UserError if `answer` is
    anything else."""
    if isinstance(answer, str):
        return [{'role': 'assistant', 'content': answer}]
    if isinstance(answer, dict):
        return [read_turn(0, answer)]
    return read_turns(answer, name)
