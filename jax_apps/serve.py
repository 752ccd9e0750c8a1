"""A page to talk to a model, and OpenAI's API: sample_jax.py --serve=8000.

Two kinds of threads. Each connection has one, in which a Handler reads the request, puts it into
the queue as a Job, and writes the answer. The main thread has the model and makes the answers, one
after the other (Server.run): the time limit of a chat template works there only. It hands over each
piece of an answer as it is made, and looks before the next whether the client is still there.

Standard library only; JAX and the model are behind jax_text. What this is not: docs/models.md#serve
"""
import contextlib
import dataclasses
import itertools
import json
import queue
import re
import secrets
import select
import socket
import sys
import threading
import time
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

from jax_flags import CONTROLS, UserError
from jax_generate import PrefixCache
from jax_hub.chats import final_answer
from jax_hub.tokenizers import strip_partial_utf8
from jax_text import Generation

PAGE = Path(__file__).with_name('page.html')
BODY_BYTES = 2**20  # of a request, at most
QUEUED = 16  # requests that wait for the model, at most; one more is refused with 429
CONNECTIONS = 128  # and threads, at a time; one more is closed
PATIENCE = 30  # seconds without a byte after which a client counts as gone
PAUSE = 0.05  # seconds between two pieces of an answer, at least: to send one takes time, too
LINGER = 1  # seconds for which what a client still sends is read, so that it can read the answer

# what the page may do: nothing but its own script and style, and requests to this server
PAGE_POLICY = ("default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
               "img-src data:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; "
               "form-action 'none'")


class Refusal(Exception):
    """An answer that is an error, in OpenAI's form."""

    def __init__(self, status, message, param=None, code=None):
        super().__init__(message)
        self.status = status
        kind = 'invalid_request_error'
        if status == 429:
            kind = 'rate_limit_error'
        if status >= 500:
            kind = 'server_error'
        self.body = {'error': {'message': message, 'type': kind, 'param': param, 'code': code}}


# -----------------------------------------------------------------------------
# what a request asks for

# the fields that change a TextSampling, and their types
SAMPLED = {
    **dict.fromkeys(CONTROLS, (int, float)),
    'top_k': (int,),
    'seed': (int,)}

# fields that are not supported, with the values that ask for nothing; unknown ones are ignored
UNSUPPORTED = {
    'n': 1, 'best_of': 1, 'echo': False, 'suffix': '', 'logit_bias': {}, 'top_logprobs': 0,
    'presence_penalty': 0, 'frequency_penalty': 0, 'tools': [], 'functions': [],
    'response_format': {'type': 'text'}, 'chat_template_kwargs': {}}


def read_field(body, name, *kinds):
    """Returns a field of a request, None if it is not given. Raises Refusal unless it is of one of
    these types; true is no number."""
    value = body.get(name)
    if value is not None and type(value) not in kinds:
        names = ' or '.join(kind.__name__ for kind in kinds)
        raise Refusal(400, f'{name} must be of type {names}', name)
    return value


def read_sampling(body, sampling):
    """Returns the TextSampling that a request asks for; `sampling` says the rest, and how long an
    answer may be. Raises Refusal."""
    for name, off in UNSUPPORTED.items():
        if body.get(name) not in (None, off):
            raise Refusal(400, f'{name} is not supported here', name)
    changes = {}
    for name, kinds in SAMPLED.items():
        value = read_field(body, name, *kinds)
        limit = 2 if name == 'temperature' else 2**32 - 1
        if value is not None and value > limit:
            raise Refusal(400, f'{name} must be at most {limit}', name)
        if value is not None:
            changes[name] = value

    # the length of the answer
    most = sampling.max_new_tokens
    for name in ('max_completion_tokens', 'max_tokens'):
        n = read_field(body, name, int)
        if n is not None and not 1 <= n <= most:
            raise Refusal(400, f'{name} must be between 1 and {most}, the --max_new_tokens of this '
                          'server', name)
        if n is not None:
            changes.setdefault('max_new_tokens', n)

    # the texts that end it
    stop = read_field(body, 'stop', str, list)
    if isinstance(stop, list):
        if len(stop) > 4 or not all(isinstance(text, str) for text in stop):
            raise Refusal(400, 'stop must be a text or a list of at most 4', 'stop')
        stop = tuple(stop)
    if stop:
        changes['stop'] = stop
    sampling = dataclasses.replace(sampling, **changes)
    try:
        sampling.check()
    except UserError as error:
        raise Refusal(400, str(error)) from None
    return sampling


class End(NamedTuple):
    """How an answer has ended."""
    finish_reason: str  # 'stop' or 'length'
    n_prompt: int  # tokens
    n_new: int
    logprobs: dict | None


class Job:
    """A request for an answer, on its way from the thread of its connection to the main thread, and
    the answer on its way back."""

    def __init__(self, connection, is_chat, body, server):
        """Checks the body. Raises Refusal."""
        self.connection = connection
        self.is_chat = is_chat
        self.model = server.name
        if read_field(body, 'model', str) not in (None, server.name):
            raise Refusal(404, f'the model here is {server.name}', 'model', 'model_not_found')

        # messages, or a text; of one that is too long, how many tokens are kept, -1 is all that fit
        name, kind = ('messages', list) if is_chat else ('prompt', str)
        self.prompt = read_field(body, name, kind)
        if self.prompt is None:
            raise Refusal(400, f'{name} is missing', name)
        self.n_kept = read_field(body, 'truncate_prompt_tokens', int)
        if self.n_kept is not None and self.n_kept < 1 and self.n_kept != -1:
            raise Refusal(400, 'truncate_prompt_tokens must be -1 or at least 1')

        # how it is answered
        self.sampling = read_sampling(body, server.sampling)
        self.has_seed = body.get('seed') is not None
        logprobs = read_field(body, 'logprobs', bool if is_chat else int)
        if logprobs and not is_chat:
            raise Refusal(400, 'logprobs must be 0: those of the tokens themselves', 'logprobs')
        self.wants_logprobs = logprobs if is_chat else logprobs is not None
        self.is_stream = read_field(body, 'stream', bool)
        options = read_field(body, 'stream_options', dict) or {}
        self.wants_usage = read_field(options, 'include_usage', bool)

        # the answer
        self.id = secrets.token_hex(12)
        self.created = int(time.time())
        self.events = queue.Queue()  # its pieces, then a Refusal or the End
        self.end = None

    def is_gone(self):
        """Whether the client has closed its connection."""
        try:
            ready, _, _ = select.select([self.connection], [], [], 0)
            return bool(ready) and not self.connection.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):  # it was reset, or is closed here
            return True

    def pieces(self):
        """Yields the pieces of the answer as they are made; then `end` is set. Raises Refusal."""
        for event in iter(self.events.get, None):
            if isinstance(event, Refusal):
                raise event
            if isinstance(event, End):
                self.end = event
                return
            yield event

    # OpenAI's forms

    def describe(self, text, *, is_first=False, is_chunk=False):
        """Returns an answer, or a piece of one: the text, and once it has ended, how."""
        choice = {'index': 0, 'finish_reason': None, 'logprobs': None}
        if self.end:
            choice.update(finish_reason=self.end.finish_reason, logprobs=self.end.logprobs)
        if not self.is_chat:
            kind = 'text_completion'
            choice['text'] = text
        elif not is_chunk:
            kind = 'chat.completion'
            choice['message'] = {'role': 'assistant', 'content': text}
        else:
            kind = 'chat.completion.chunk'
            choice['delta'] = {'role': 'assistant'} if is_first else {}
            if not self.end:
                choice['delta']['content'] = text
        return {'id': f'{"chatcmpl" if self.is_chat else "cmpl"}-{self.id}', 'object': kind,
                'created': self.created, 'model': self.model, 'choices': [choice]}

    def usage(self):
        """Returns the numbers of tokens."""
        _, n_prompt, n_new, _ = self.end
        return {'prompt_tokens': n_prompt, 'completion_tokens': n_new,
                'total_tokens': n_prompt + n_new}


# -----------------------------------------------------------------------------
# the main thread: the queue, and the model

class Server(ThreadingHTTPServer):
    """Listens from the beginning, and answers in run()."""
    daemon_threads = True  # an answer under way does not keep the process
    request_queue_size = CONNECTIONS

    def __init__(self, host, port, n_queued=QUEUED):
        """Raises UserError for an address on which it cannot listen."""
        self.host = host
        self.changed = threading.Condition()
        self.jobs = []  # those that wait; a None ends run()
        self.n_queued = n_queued
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            self.address_family, _, _, _, address = found[0]
            super().__init__(address[:2], Handler)
        except (OSError, OverflowError, UnicodeError) as error:
            raise UserError(f'cannot listen on {host}:{port} ({error}): name another port, as in '
                            '--serve=8001, or another --host') from None

    @property
    def url(self):
        name = f'[{self.host}]' if ':' in self.host else self.host
        return f'http://{name}:{self.server_port}'

    def run(self, model, sampling, system=(), name='model'):
        """Answers requests until stop(), or until an exception such as KeyboardInterrupt.

        model: a TextModel. sampling: what a request does not say; no answer has more than its
        max_new_tokens. system: messages in front of a chat that has no such message. name: of the
        model, in the API."""
        self.model = model
        self.sampling = sampling
        self.system = list(system)
        self.name = name
        self.description = repr(model)
        self.prefix_cache = PrefixCache()  # of the text before; a chat goes on where it was
        self.n_answers = 0  # that had no seed
        threading.Thread(target=self.serve_forever, daemon=True).start()
        try:
            for job in iter(self.next_job, None):
                self.answer(job)
        finally:
            self.shutdown()
            self.server_close()

    def stop(self):
        """Ends run() after the answer under way, from another thread."""
        with self.changed:
            self.jobs.insert(0, None)
            self.changed.notify()

    def enter(self, job):
        """Puts a Job into the queue. Raises Refusal if it is full of clients that are still
        there."""
        with self.changed:
            for other in [other for other in self.jobs if other and other.is_gone()]:
                self.jobs.remove(other)
                other.events.put(None)
            if len(self.jobs) >= self.n_queued:
                raise Refusal(429, f'{self.n_queued} requests are waiting already: try again later',
                              code='rate_limit_exceeded')
            self.jobs.append(job)
            self.changed.notify()

    def next_job(self):
        """Waits for a Job and takes it out of the queue."""
        with self.changed:
            while not self.jobs:
                self.changed.wait(1)  # on Windows a longer one would hold back Ctrl-C
            return self.jobs.pop(0)

    def answer(self, job):
        """Makes the answer of a Job, unless the client goes away; whatever happens, the server goes
        on."""
        try:
            if job.is_gone():
                return
            prompt = self.encode(job)
            number = 0  # of a sample; with a seed the first, as sample_jax.py makes it
            if not job.has_seed:
                number = self.n_answers
                self.n_answers += 1
            generation = Generation(
                self.model, [prompt], job.sampling, first_sample=number, streaming=True,
                prefix_cache=self.prefix_cache, logprobs=bool(job.wants_logprobs))
            if self.make_pieces(job, generation):
                job.events.put(describe_end(job, generation))
        except UserError as error:
            job.events.put(Refusal(400, str(error)))
        except Refusal as refusal:
            job.events.put(refusal)
        except Exception as error:
            traceback.print_exc()
            job.events.put(Refusal(500, f'{type(error).__name__}: {error!s:.300}'))
        finally:
            job.events.put(None)

    def encode(self, job):
        """Returns the token ids of the prompt of a Job. Raises UserError or Refusal."""
        prompt = job.prompt
        if job.is_chat:
            first = prompt[0] if prompt else None
            has_system = isinstance(first, dict) and first.get('role') == 'system'
            prompt = prompt if has_system else [*self.system, *prompt]
        ids = self.model.encode(prompt)
        # of a longer one than the context sample_jax.py continues the end; here it is asked first
        most = self.model.config.block_size
        if job.n_kept:
            ids = ids[-(most if job.n_kept == -1 else min(job.n_kept, most)):]
        if len(ids) > most:
            raise Refusal(400, f'the prompt has {len(ids):,} tokens, the context {most:,}: shorten '
                          'it, or add "truncate_prompt_tokens": -1 to continue its end',
                          'messages' if job.is_chat else 'prompt', 'context_length_exceeded')
        return ids

    def make_pieces(self, job, generation):
        """Hands over the pieces of an answer, and returns whether the client has stayed to its
        end."""
        text, n_shown, shown_at = '', 0, 0
        with contextlib.closing(generation.pieces(with_prompt=False)) as pieces:
            for piece in pieces:
                if job.is_gone():
                    return False
                text += piece
                if job.is_stream and time.monotonic() - shown_at >= PAUSE:
                    shown_at = time.monotonic()
                    n_shown = self.show(job, text, n_shown)
        self.show(job, text, n_shown)
        return True

    def show(self, job, text, n_shown):
        """Hands over what of the text so far comes behind its first n_shown characters, and returns
        how many there are now; of gpt-oss's answers, the final channel alone."""
        if job.is_chat:
            text = final_answer(text)
        job.events.put(text[n_shown:])
        return len(text)

    # connections

    def verify_request(self, request, client_address):
        """Closes a connection that is one too many; returns whether it is not."""
        if threading.active_count() <= CONNECTIONS:
            return True
        request.close()
        return False

    def shutdown_request(self, request):
        """Closes a connection when the client has read all: closed before, with bytes of it unread,
        it would be reset."""
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_WR)
            request.settimeout(LINGER)
            for _ in range(1000):
                if not request.recv(2**16):
                    break
        request.close()

    def handle_error(self, request, client_address):
        """Prints what is no fault of a connection."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def describe_end(job, generation):
    """Returns the End of a generation."""
    n_prompt = generation.lengths[0]
    end = int(generation.result.lengths[0])
    if generation.stopped[0]:
        end = generation.tokens_to_the_end(0)
    reason = 'length' if generation.was_cut(0) else 'stop'
    logprobs = describe_logprobs(job, generation, end) if job.wants_logprobs else None
    return End(reason, n_prompt, end - n_prompt, logprobs)


def describe_logprobs(job, generation, end):
    """Returns the log-probabilities of the tokens of an answer, in OpenAI's form. Their texts add
    up to that of the answer: a character that is several tokens belongs to the last."""
    n_prompt = generation.lengths[0]
    tokens = generation.result.tokens[0, :end].tolist()
    logprobs = generation.result.logprobs[0, n_prompt:end].tolist()
    text = generation.texts[0][len(generation.prompt_texts[0]):]

    # where each token begins in the text, read after the prompt's last token, as it may need a
    # space in front
    decode = generation.model.tokenizer.decode
    starts = [len(strip_partial_utf8(decode(tokens[n_prompt - 1:n])))
              for n in range(n_prompt, end + 1)]
    starts = [start - starts[0] for start in starts]
    texts = [text[start:stop] for start, stop in itertools.pairwise(starts)]
    if not job.is_chat:
        return {'tokens': texts, 'token_logprobs': logprobs, 'text_offset': starts[:-1],
                'top_logprobs': None}
    return {'refusal': None, 'content': [
        {'token': text, 'logprob': logprob, 'bytes': list(text.encode()), 'top_logprobs': []}
        for text, logprob in zip(texts, logprobs)]}


# -----------------------------------------------------------------------------
# the thread of a connection

class Handler(BaseHTTPRequestHandler):
    """Answers one request. It speaks HTTP/1.0, in which the end of a stream is that of the
    connection."""
    timeout = PATIENCE
    default_request_version = 'HTTP/1.0'

    def do_GET(self):
        """Answers, also as do_POST."""
        try:
            self.check_sender()
            self.path = self.path.partition('?')[0]
            if self.path not in self.paths:
                raise Refusal(404, f'there is no {self.path:.100} here')
            command, answer = self.paths[self.path]
            if command != self.command:
                raise Refusal(405, f'{self.path} takes {command}, not {self.command}')
            answer(self)
        except Refusal as refusal:
            self.send_json(refusal.body, refusal.status)

    do_POST = do_GET

    def check_sender(self):
        """Raises Refusal for a request of another site's page. The browser names the site in
        Origin; and in Host the name under which the page has found this machine, which is neither
        an address nor one of its own if the site has pointed it here (DNS rebinding)."""
        host = self.headers.get('Host', '')
        names = ('localhost', self.server.host, socket.gethostname())
        allowed = '|'.join([*map(re.escape, names), r'[0-9.]+', r'\[[0-9a-f:.]+\]'])
        if not re.fullmatch(f'({allowed})(:[0-9]+)?', host, re.IGNORECASE):
            raise Refusal(403, 'Host is no name of this server: add --host=NAME')
        origin = self.headers.get('Origin')
        if origin is not None and origin.lower() != f'http://{host}'.lower():
            raise Refusal(403, "requests of other sites' pages are refused")

    def send_page(self):
        self.send(200, 'text/html; charset=utf-8', PAGE.read_bytes())

    def send_models(self):
        """Sends the one model, with what the page needs to know of it."""
        server = self.server
        model = {
            'id': server.name, 'object': 'model', 'created': 0, 'owned_by': 'local',
            'description': server.description,
            'has_chat_template': server.model.tokenizer.chat_template is not None,
            'temperature': server.sampling.temperature}
        self.send_json({'object': 'list', 'data': [model]})

    def complete(self):
        """Answers a chat, or continues a text."""
        is_chat = 'chat' in self.path
        job = Job(self.connection, is_chat, self.read_body(), self.server)
        self.server.enter(job)
        pieces = job.pieces()
        if not job.is_stream:
            text = ''.join(pieces)
            if job.end:
                self.send_json({**job.describe(text), 'usage': job.usage()})
            return

        # what is refused is so before the stream begins, with its status
        first = next(pieces, '')
        self.send(200, 'text/event-stream')
        try:
            self.send_event(job.describe('', is_first=True, is_chunk=True))
            for piece in itertools.chain([first], pieces):
                if piece:
                    self.send_event(job.describe(piece, is_chunk=True))
            if not job.end:
                return
            self.send_event(job.describe('', is_chunk=True))
            if job.wants_usage:
                usage = {'choices': [], 'usage': job.usage()}
                self.send_event({**job.describe('', is_chunk=True), **usage})
            self.wfile.write(b'data: [DONE]\n\n')
        except Refusal as refusal:
            self.send_event(refusal.body)

    def read_body(self):
        """Returns the JSON object of a request. Raises Refusal."""
        if self.headers.get_content_type() != 'application/json':
            raise Refusal(415, 'Content-Type must be application/json')
        length = self.headers.get('Content-Length', '')
        if not re.fullmatch('[0-9]{1,15}', length):
            raise Refusal(411, 'Content-Length is missing')
        if int(length) > BODY_BYTES:
            raise Refusal(413, f'a request has at most {BODY_BYTES:,} bytes')
        try:
            body = json.loads(self.rfile.read(int(length)), parse_constant=no_number)
        except (ValueError, RecursionError) as error:
            raise Refusal(400, f'the body is not JSON ({error!s:.200})') from None
        if not isinstance(body, dict):
            raise Refusal(400, 'the body is not a JSON object')
        return body

    def send(self, status, kind, content=None):
        """Sends an answer; without content, all but its content."""
        self.request_version = 'HTTP/1.0'  # whatever was asked, a status comes first
        self.send_response(status)
        self.send_header('Content-Type', kind)
        self.send_header('Cache-Control', 'no-store')
        self.send_header('Content-Security-Policy', PAGE_POLICY)
        self.send_header('X-Content-Type-Options', 'nosniff')
        if content is not None:
            self.send_header('Content-Length', str(len(content)))
        self.end_headers()
        self.wfile.write(content or b'')

    def send_json(self, value, status=200):
        self.send(status, 'application/json', json.dumps(value).encode())

    def send_event(self, value):
        self.wfile.write(f'data: {json.dumps(value)}\n\n'.encode())

    paths = {
        '/': ('GET', send_page),
        '/v1/models': ('GET', send_models),
        '/v1/chat/completions': ('POST', complete),
        '/v1/completions': ('POST', complete)}

    def send_error(self, code, message=None, explain=None):
        """Sends what http.server refuses by itself: an unknown method, version, broken headers."""
        status = {501: 405, 505: 400}.get(code, code)
        self.send_json(Refusal(status, message or 'this is no request').body, status)

    def log_message(self, *args):
        """Prints nothing: requests are their senders' business."""


def no_number(name):
    """Refuses NaN and Infinity, which are not JSON."""
    raise ValueError(f'{name} is no number')
