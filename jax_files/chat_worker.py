"""A process of its own that runs chat templates, with limits: a template is a stranger's program.

Each line on stdin is a JSON list of requests; it answers each of them by a line on stdout, see
`answer`, until stdin ends. It imports nothing of the project, so that it starts at once. What runs
longer than SECONDS ends the process, and whoever asks sees that the answer is missing.
"""
import contextlib
import faulthandler
import json
import os
import re
import signal
import sys
import time

SECONDS = 5  # for one request, and MESSAGE_SECONDS for each message that it makes a template write
MESSAGE_SECONDS = 0.002
MEMORY = 2**30  # bytes of address space of this process
TOO_MUCH_MEMORY = f'is not used: it takes more than {MEMORY // 2**20:,} MB of memory'
TEXT = 2**20  # characters of a rendered chat, and TEXT_GROWTH for each character of the request
TEXT_GROWTH = 10

# around what {% generation %} marks: noncharacters, which no text has
GENERATION_MARKS = '\ufdd0\ufdd1'
MARK = '\ufdd2'  # in place of an answer, to see where a template writes it


class ChatError(Exception):
    """What is wrong with a template or with the messages for it, as the end of a sentence about the
    template."""


def create_jinja():
    """Returns the environment of chat templates. What {% generation %} ... {% endgeneration %}
    marks is between marks."""
    import jinja2.ext
    import jinja2.sandbox

    # The tag {% generation %}, which Jinja does not know.
    class GenerationTag(jinja2.ext.Extension):
        tags = {'generation'}

        def parse(self, parser):
            next(parser.stream)
            begin, end = map(output_of, GENERATION_MARKS)
            return [begin, *parser.parse_statements(['name:endgeneration'], drop_needle=True), end]

    def output_of(text):
        return jinja2.nodes.Output([jinja2.nodes.TemplateData(text)])

    # What templates call.
    def raise_exception(message):
        raise ChatError(f'refuses: {message}')

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                          sort_keys=sort_keys)

    # The sandbox, with the settings of transformers.
    jinja = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=['jinja2.ext.loopcontrols', GenerationTag])
    jinja.filters['tojson'] = tojson
    jinja.globals['raise_exception'] = raise_exception
    jinja.globals['strftime_now'] = time.strftime
    return jinja


class Renderer:
    """A chat template with the variables of a request: its text for any messages."""

    def __init__(self, template, variables, max_length):
        """template: of Jinja. variables: {name: value} besides the messages. max_length: characters
        of a text."""
        self.template = template
        self.variables = variables
        self.max_length = max_length

    def render(self, messages, *, add_generation_prompt=False):
        """Returns the text of the messages, with GENERATION_MARKS. Raises ChatError if the template
        refuses or fails."""
        try:
            text = self.template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self.variables)
        except ChatError:
            raise
        except MemoryError:
            raise ChatError(TOO_MUCH_MEMORY) from None
        except Exception as error:  # a template is a program
            raise ChatError(f'cannot be rendered: {type(error).__name__}: {error}') from None

        # A short template can write a text without end.
        if len(text) > self.max_length:
            raise ChatError(f'is not used: it makes a text of {len(text):,} characters of so few')
        return text


def mark_answer(message):
    """Returns the message with MARK in place of what it says, or in the name of its last call of a
    tool if it has any: many templates write no text beside a call."""
    if not message.get('tool_calls'):
        return {**message, 'content': MARK}
    *calls, last = message['tool_calls']
    if isinstance(last.get('function'), dict):
        last = {**last, 'function': {**last['function'], 'name': MARK}}
    else:
        last = {**last, 'name': MARK}
    return {**message, 'tool_calls': [*calls, last]}


def find_answer(renderer, messages, i, text):
    """Returns where answer i is in `text`, the rendering of all messages: [start, marked, limit,
    is_whole].

    start: the end of the request for it. marked: the end of what it says, or of the name of its
    last call. limit: up to where the template writes the same behind it whether messages follow or
    not. is_whole: whether nothing but that is written behind it at the end of a conversation.

    Other renderings, with a mark in place of the answer, tell what the template writes around it,
    whatever it says and whatever the template rewrites of earlier turns. Raises ChatError for an
    answer that is elsewhere than it is asked for."""
    refusal = ChatError(f'does not write answer {i} where it asks for it; mark what the assistant '
                        'says in it by {% generation %} ... {% endgeneration %}')
    # what the template writes around a mark in its place: among all messages, and at the end
    marked = [*messages[:i], mark_answer(messages[i])]
    around = renderer.render(marked + messages[i + 1:]).split(MARK)
    around_last = renderer.render(marked).split(MARK)
    n_marks = len(around_last) - 1
    # a call's name may be written again where its result is
    has_calls = bool(messages[i].get('tool_calls'))
    is_there = 1 <= n_marks < len(around)
    is_repeated = not has_calls and len(around) > 2
    if not is_there or is_repeated:
        raise refusal
    # what is written before and behind the answer, among all messages and at the end
    before = around[0]
    before_last = around_last[0]
    after = MARK.join(around[n_marks:])
    after_last = around_last[-1]
    if has_calls:
        after = after.replace(MARK, call_name(messages[i]))
    if not text.endswith(after):
        raise refusal
    content_end = len(text) - len(after)
    request = renderer.render(messages[:i], add_generation_prompt=True)

    # Where the answer begins: behind the request for it.
    start = len(request)
    # the template writes earlier turns differently when others follow
    if not text.startswith(request):
        prompt = request.removeprefix(renderer.render(messages[:i]))
        # what the template writes between request and answer
        introduction = before_last.removeprefix(request)
        if not text.startswith(before) or not before.endswith(prompt + introduction):
            raise refusal
        start = len(before) - len(introduction)
    if start > content_end:
        raise refusal
    shared = len(os.path.commonprefix([after, after_last]))
    return [start, content_end, content_end + shared, shared == len(after_last)]


def call_name(message):
    """Returns the name of the last call of a tool in a message."""
    last = message['tool_calls'][-1]
    if isinstance(last.get('function'), dict):
        return last['function']['name']
    return last['name']


def find_marked_answers(renderer, messages, counted, pieces):
    """Returns [[start, end]] of what the template marks by {% generation %}, without that of
    answers that do not count.

    pieces: the rendering of all messages, split at the marks. counted: the numbers of the answers
    that count."""
    # every second piece is between two marks
    spans = []
    start = 0
    for number, piece in enumerate(pieces):
        end = start + len(piece)
        if number % 2:
            spans.append([start, end])
        start = end

    # where the answers are that do not count
    answers = [i for i, message in enumerate(messages) if message['role'] == 'assistant']
    left_out = set()
    for i in set(answers).difference(counted):
        marked = [*messages[:i], mark_answer(messages[i]), *messages[i + 1:]]
        found = re.split(f'[{GENERATION_MARKS}]', renderer.render(marked))
        places = [number for number, piece in enumerate(found) if MARK in piece]
        is_apart = len(found) == len(pieces) and len(places) == 1 and places[0] % 2 == 1
        if not is_apart:
            raise ChatError(f'does not mark answer {i}, which does not count, apart from the '
                            'others')
        left_out.add(places[0] // 2)
    return [span for number, span in enumerate(spans) if number not in left_out]


def answer(jinja_templates, request):
    """Returns what a request asks for, as a dict for JSON.

    The keys of a request: 'source' of the
    template, 'variables', 'messages', 'want'.

    want='text': {'text': ...}, with 'add_generation_prompt' of the request. want='answers':
    {'text', 'answers': as find_answer's of each answer in 'counted'} or {'text', 'spans': [[start,
    end]] that the template marks}. want='next': {'text': what the template writes behind answer
    number 'answer'}. {'error': ...} if there is none."""
    try:
        # The compiled template, and how long a text may become.
        source = request['source']
        if source not in jinja_templates:
            jinja_templates[source] = compile_template(source)
        messages = request['messages']
        max_length = TEXT + TEXT_GROWTH * len(str(messages))
        renderer = Renderer(jinja_templates[source], request['variables'], max_length)
        if request['want'] == 'text':
            text = renderer.render(messages, add_generation_prompt=request['add_generation_prompt'])
            return {'text': without_marks(text)}

        # What is written behind an answer.
        if request['want'] == 'next':
            i = request['answer']
            marked = [*messages[:i], mark_answer(messages[i]), *messages[i + 1:]]
            text = without_marks(renderer.render(marked))
            _, _, behind = text.rpartition(MARK)
            return {'text': behind}

        # Where the answers are: as the template marks them, or found by renderings with a mark in
        # their place.
        pieces = re.split(f'[{GENERATION_MARKS}]', renderer.render(messages))
        text = ''.join(pieces)
        counted = request['counted']
        if len(pieces) > 1:
            spans = find_marked_answers(renderer, messages, counted, pieces)
            return {'text': text, 'spans': spans}
        answers = [find_answer(renderer, messages, i, text) for i in counted]
        return {'text': text, 'answers': answers}
    except ChatError as error:
        return {'error': str(error)[:500]}


def without_marks(text):
    """Returns the text without GENERATION_MARKS."""
    return re.sub(f'[{GENERATION_MARKS}]', '', text)


def compile_template(source):
    """Returns the template of a source. Raises ChatError if it is malformed."""
    try:
        return create_jinja().from_string(source)
    except MemoryError:
        raise ChatError(TOO_MUCH_MEMORY) from None
    except Exception as error:
        raise ChatError(f'cannot be rendered: {type(error).__name__}: {error}') from None


@contextlib.contextmanager
def time_limit(seconds):
    """Ends this process unless the body ends in time, also within a single operation of Python."""
    if hasattr(signal, 'setitimer'):
        signal.setitimer(signal.ITIMER_REAL, seconds)  # nothing handles SIGALRM
        yield
        signal.setitimer(signal.ITIMER_REAL, 0)
    else:  # Windows
        faulthandler.dump_traceback_later(seconds, exit=True)
        yield
        faulthandler.cancel_dump_traceback_later()


def main():
    """Answers the requests on stdin."""
    with contextlib.suppress(ImportError):  # Windows, which has no such limit
        import resource
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard)
        with contextlib.suppress(ValueError, OSError):  # macOS has no such limit either
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))

    # A line has several requests; each has its own time.
    jinja_templates = {}
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    for line in requests:
        for request in json.loads(line):
            n_rendered = len(request['messages']) * (3 * len(request.get('counted', ())) + 1)
            with time_limit(SECONDS + MESSAGE_SECONDS * n_rendered):
                reply = json.dumps(answer(jinja_templates, request))
            answers.write(reply.encode() + b'\n')
            answers.flush()


if __name__ == '__main__':
    main()
