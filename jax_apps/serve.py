"""Serves a page to talk to a model, and OpenAI's API: sample_jax.py --serve=8000.

There are two kinds of threads. Each connection has a thread, in which a Handler reads the request,
puts the request into the queue as a Job, and writes the answer. The main thread has the model and
makes the answers (Server.run). It puts the pieces of an answer into the queue of its Job, and
checks before each piece whether the client is still connected.

Answers take turns: in each turn, one answer gets its next chunk of tokens. Requests for one answer
(one prompt, n=1) share a batch, in which each answer is a row (batching.py). If a row needs tokens
in its turn, a chunk is decoded for all rows of the batch. The other rows then find their tokens
ready in their own turns. A request for several answers, or with echo, has a batch of its own.

Standard library only; JAX and the model are behind jax_text. Limits: docs/models.md#serve"""
import collections
import contextlib
import dataclasses
import itertools
import json
import math
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
from urllib.parse import unquote

from jax_apps.batching import Batch
from jax_flags import CONTROLS, UserError
from jax_generate import PrefixCache
from jax_hub.chats import final_answer
from jax_hub.tokenizers import strip_partial_utf8
from jax_text import Generation

PAGE = Path(__file__).with_name('page.html')
BODY_BYTES = 2**20  # of a request, at most
CONNECTIONS = 256  # and threads, at a time; one more is closed
QUEUED = 128  # requests that wait for the model, at most; one more is refused with 429
BATCH_SIZE = 16  # answers that are made at a time
ECHO_ROWS = 4  # rows of a request with echo that are scored at a time
ROWS = 64  # of one request, prompts times n, at most
SILENCE = 5  # seconds after which a connection without a request is closed: it takes a place
PATIENCE = 30  # seconds without a byte of a request after which its client counts as gone
PAUSE = 0.05  # seconds between two pieces of an answer, at least, because sending takes time
WAITING = 15  # seconds after which a stream that waits says so: nginx ends a silent one after 60
RETURN = 0.03  # seconds to wait for the next request of a client that has its answer
LINGER = 1  # seconds without a byte from a client before its connection is closed

# what the page may do: nothing but its own script and style, and requests to this server
PAGE_POLICY = ("default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
               "img-src data:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; "
               "form-action 'none'")


class Refusal(Exception):
    """An error that is sent as the answer, in OpenAI's form."""

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

# fields of OpenAI, vLLM and llama.cpp that would change an answer and are not supported, with the
# value that changes nothing (a tuple: each of several); unknown fields are ignored
UNSUPPORTED = {
    'best_of': 1, 'suffix': '', 'logit_bias': {}, 'top_logprobs': 0, 'presence_penalty': 0,
    'frequency_penalty': 0, 'tools': [], 'functions': [], 'response_format': {'type': 'text'},
    'chat_template_kwargs': {}, 'chat_template': '', 'ignore_eos': False, 'min_tokens': 0,
    'guided_json': None, 'guided_regex': None, 'guided_choice': None, 'guided_grammar': None,
    'guided_decoding': None, 'structural_tag': None, 'structured_outputs': None,
    'grammar': '', 'json_schema': {}, 'bad_words': [],
    'use_beam_search': False, 'num_beams': 1, 'no_repeat_ngram_size': 0, 'logits_processors': [],
    'length_penalty': 1, 'allowed_token_ids': [], 'typical_p': 1, 'mirostat': 0,
    'dynatemp_range': 0, 'xtc_probability': 0, 'dry_multiplier': 0, 'reasoning_effort': None,
    'tool_choice': ('none', 'auto'), 'function_call': ('none', 'auto'), 'verbosity': 'medium',
    'web_search_options': None, 'thinking_token_budget': None, 'return_token_ids': False,
    'prompt_logprobs': None, 'n_probs': 0, 'n_indent': 0, 't_max_predict_ms': (-1, 0),
    'adaptive_target': -1, 'prediction': None, 'modalities': ['text'],
    'include_stop_str_in_output': False,
    'skip_special_tokens': True, 'add_special_tokens': None, 'documents': [], 'prompt_embeds': None,
    'n_predict': -1, 'repeat_penalty': 1, 'top_n_sigma': -1, 'typ_p': 1, 'samplers': None,
    'lora': [], 'input_extra': []}
# controls that other servers switch off by -1
OFF_AT_MINUS_1 = ('top_k', 'seed')


def read_field(body, name, *kinds):
    """Returns the field `name` of a request, or None if the request lacks the field. body: the
    request's JSON object. kinds: the allowed types of the value; a bool does not count as a number.
    Raises Refusal for a value of another type."""
    value = body.get(name)
    if value is not None and type(value) not in kinds:
        names = ' or '.join(kind.__name__ for kind in kinds)
        raise Refusal(400, f'{name} must be of type {names}', name)
    return value


def read_sampling(body, sampling, n_vocab):
    """Returns the TextSampling that a request asks for. body: the request's JSON object. sampling:
    the server's TextSampling. Its fields are the defaults for the fields that the request leaves
    out, and its max_new_tokens is the upper limit for the length of an answer. n_vocab: the number
    of token ids. Raises Refusal for fields that are not supported or out of range."""
    for name, off in UNSUPPORTED.items():
        without_effect = off if isinstance(off, tuple) else (off,)
        if body.get(name) not in (None, *without_effect):
            raise Refusal(400, f'{name} is not supported here', name)
    changes = {}
    for name, kinds in SAMPLED.items():
        value = read_field(body, name, *kinds)
        if name in OFF_AT_MINUS_1 and value == -1:
            value = 0 if name == 'top_k' else None
        limit = 2 if name == 'temperature' else 2**32 - 1
        if value is not None and value > limit:
            raise Refusal(400, f'{name} must be at most {limit}', name)
        if value is not None:
            changes[name] = value

    # the length of the answer, at most that of the server: finish_reason says 'length' there. With
    # echo it may be 0, for the log-probabilities of the prompt alone
    least = 0 if body.get('echo') else 1
    for name in ('max_completion_tokens', 'max_tokens', 'max_new_tokens'):
        n = read_field(body, name, int)
        if n is not None and n < least:
            raise Refusal(400, f'{name} must be at least {least}', name)
        if n is not None:
            changes.setdefault('max_new_tokens', min(n, sampling.max_new_tokens))

    # the tokens and the texts that end it
    tokens = read_field(body, 'stop_token_ids', list) or []
    if not all(type(token) is int and 0 <= token < n_vocab for token in tokens):
        raise Refusal(400, f'stop_token_ids must be a list of token ids, 0 to {n_vocab - 1}',
                      'stop_token_ids')
    changes['stop_tokens'] = (*sampling.stop_tokens, *tokens)
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
    """The text of one sample of an answer, why the sample ended, and its numbers of tokens. A
    request may ask for several samples. Once all of them have ended, a list of their Ends is put
    into Job.events."""
    text: str  # all of it
    finish_reason: str  # 'stop' or 'length'
    n_prompt: int  # tokens
    n_new: int
    logprobs: dict | None


def read_prompts(body, is_chat):
    """Returns the list of a request's prompts. A chat has one prompt, its list of messages. A
    request for completions has one or more prompts, each a text or a list of token ids. body: the
    request's JSON object. Raises Refusal for anything else."""
    name, kinds = ('messages', [list]) if is_chat else ('prompt', [str, list])
    prompt = read_field(body, name, *kinds)
    if prompt is None:
        raise Refusal(400, f'{name} is missing', name)
    if is_chat:
        return [prompt]

    def is_one(prompt):
        is_ids = isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt)
        return isinstance(prompt, str) or is_ids

    prompts = [prompt] if is_one(prompt) else prompt
    for each in prompts:
        if not is_one(each):
            raise Refusal(400, 'prompt must be a text, token ids, or a list of either', 'prompt')
    if not prompts:
        raise Refusal(400, 'prompt is an empty list', 'prompt')
    return prompts


class Job:
    """A request for an answer, on its way from the thread of its connection to the main thread, and
    the answer on its way back."""

    def __init__(self, connection, is_chat, body, server):
        """Checks the options of a request, and keeps them. connection: the client's socket.
        is_chat: whether the request is a chat, instead of completions. body: the JSON object of the
        request's body, a dict. server: the Server. Raises Refusal for an invalid body."""
        self.connection = connection
        self.is_chat = is_chat
        self.model = server.name
        if read_field(body, 'model', str) not in (None, server.name):
            raise Refusal(404, f'the model here is {server.name}', 'model', 'model_not_found')

        # the prompts, and n answers to each; n_kept: how many tokens at the end of a prompt are
        # kept, -1 for as many as fit
        self.prompts = read_prompts(body, is_chat)
        n = read_field(body, 'n', int)
        self.n = 1 if n is None else n
        self.n_rows = self.n * len(self.prompts)
        if not 1 <= self.n_rows <= ROWS:
            raise Refusal(400, f'a request may have 1 to {ROWS} answers: prompts times n', 'n')
        self.continues = is_chat and read_field(body, 'continue_final_message', bool)
        if read_field(body, 'add_generation_prompt', bool) is False and not self.continues:
            raise Refusal(400, 'add_generation_prompt may be false only with '
                          'continue_final_message', 'add_generation_prompt')
        self.n_kept = read_field(body, 'truncate_prompt_tokens', int)
        if self.n_kept is not None and self.n_kept < 1 and self.n_kept != -1:
            raise Refusal(400, 'truncate_prompt_tokens must be -1 or at least 1')

        # how it is answered
        n_vocab = server.model.tokenizer.vocab_size
        self.sampling = read_sampling(body, server.sampling, n_vocab)
        self.has_seed = body.get('seed') not in (None, -1)
        self.echo = bool(read_field(body, 'echo', bool))
        logprobs = read_field(body, 'logprobs', bool if is_chat else int)
        if logprobs and not is_chat and not (self.echo and logprobs == 1):
            raise Refusal(400, 'logprobs must be 0, for the log-probabilities of the tokens '
                          'themselves, or 1 with echo', 'logprobs')
        self.wants_logprobs = logprobs if is_chat else logprobs is not None
        self.is_stream = read_field(body, 'stream', bool)
        options = read_field(body, 'stream_options', dict) or {}
        self.wants_usage = read_field(options, 'include_usage', bool)
        if self.is_stream and self.n_rows > 1:
            raise Refusal(400, 'a stream has one answer: n must be 1, with one prompt', 'stream')
        if self.echo and (is_chat or self.is_stream or not self.wants_logprobs or self.n > 1):
            raise Refusal(400, 'echo gives the log-probabilities of a prompt: it needs a completion '
                          'with logprobs, n of 1 and no stream', 'echo')

        # requests for one answer share a batch; a request for several answers, or with echo, has a
        # batch of its own
        self.has_own_batch = self.n_rows > 1 or self.echo

        # the answer; its steps (Server.answer), and its Row in the shared batch, are those of the main
        # thread
        self.steps = None
        self.row = None
        self.id = secrets.token_hex(12)
        self.created = int(time.time())
        self.events = queue.Queue()  # its pieces, then a Refusal or the list of Ends
        self.ends = None

    @property
    def has_tokens(self):
        """Whether the model has made tokens for this answer that self.steps has not read yet."""
        return self.row is not None and self.row.has_unread

    def is_gone(self):
        """Returns whether the client has closed its connection."""
        try:
            ready, _, _ = select.select([self.connection], [], [], 0)
            return bool(ready) and not self.connection.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):  # it was reset, or is closed here
            return True

    def pieces(self):
        """Yields the pieces of the answer as they are made, and '' whenever WAITING seconds pass
        without a piece. At the end sets `ends` to the list of Ends; if the client has gone, `ends`
        stays None. If the answer fails, raises the Refusal that says why."""
        while True:
            try:
                event = self.events.get(timeout=WAITING)
            except queue.Empty:
                yield ''
                continue
            if event is None:
                return
            if isinstance(event, Refusal):
                raise event
            if isinstance(event, list):
                self.ends = event
                return
            yield event

    # OpenAI's forms

    def describe(self, text=None, *, is_first=False, is_chunk=False):
        """Returns the whole answer, or, if is_chunk, one piece of a stream, in the form of OpenAI's
        API. text: the piece; None for the whole answer. is_first: whether the piece is the first
        one, which names the role. Once the answer has ended, the result has the finish_reason."""
        rows = self.ends or [None]
        choices = []
        for index, end in enumerate(rows):
            choice = {'index': index, 'finish_reason': None, 'logprobs': None}
            if end:
                choice.update(finish_reason=end.finish_reason, logprobs=end.logprobs)
            said = end.text if text is None else text
            if not self.is_chat:
                choice['text'] = said
            elif not is_chunk:
                choice['message'] = {'role': 'assistant', 'content': said}
            else:
                choice['delta'] = {'role': 'assistant'} if is_first else {}
                if not self.ends:
                    choice['delta']['content'] = said
            choices.append(choice)
        kind = 'text_completion'
        if self.is_chat:
            kind = 'chat.completion.chunk' if is_chunk else 'chat.completion'
        return {'id': f'{"chatcmpl" if self.is_chat else "cmpl"}-{self.id}', 'object': kind,
                'created': self.created, 'model': self.model, 'choices': choices}

    def usage(self):
        """Returns {'prompt_tokens', 'completion_tokens', 'total_tokens'}, numbers of tokens. The
        tokens of each prompt count once, even if the request asks for n > 1 answers to it."""
        n_prompt = sum(end.n_prompt for end in self.ends[::self.n])
        n_new = sum(end.n_new for end in self.ends)
        return {'prompt_tokens': n_prompt, 'completion_tokens': n_new,
                'total_tokens': n_prompt + n_new}


# -----------------------------------------------------------------------------
# the main thread: the queue, and the model

class Server(ThreadingHTTPServer):
    """A server of one model. The constructor opens the address, and run() answers requests. Each
    connection has a thread with a Handler, which puts its request into the queue as a Job. The
    thread that calls run() has the model and makes the answers."""
    daemon_threads = True  # an answer under way does not keep the process
    request_queue_size = CONNECTIONS

    def __init__(self, host, port, n_queued=QUEUED, allow='', batch_size=BATCH_SIZE):
        """Opens the address, but answers nothing before run().

        allow: a text of parts separated by commas. A part is a host name by which requests may
        address this server, or the origin (http://...) of pages that may send requests. n_queued:
        how many requests may wait. batch_size: how many answers are made at a time. Raises
        UserError if the server cannot listen on the address."""
        self.host = host
        allowed = [part.strip().lower().rstrip('/') for part in allow.split(',') if part.strip()]
        self.allowed_names = [part for part in allowed if '://' not in part]
        self.allowed_origins = [part for part in allowed if '://' in part]
        self.changed = threading.Condition()
        self.jobs = []  # those that wait
        self.is_ending = False
        self.n_queued = n_queued
        self.batch_size = batch_size
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

        model: a TextModel. sampling: a TextSampling. Its fields are the defaults for the fields
        that a request leaves out. No answer has more tokens than sampling.max_new_tokens. system:
        messages that are put in front of a chat which does not begin with a system message. name:
        the model's name in the API."""
        self.model = model
        self.sampling = sampling
        self.system = list(system)
        self.name = name
        self.description = repr(dataclasses.replace(model, title=name))
        self.prefix_cache = PrefixCache()  # of the text before; a chat goes on where it was
        self.batch = Batch()
        self.own_batch_is_there = False  # one at a time, which bounds the memory
        self.n_answers = 0  # that had no seed
        threading.Thread(target=self.serve_forever, daemon=True).start()
        try:
            self.take_turns()
        finally:
            self.shutdown()
            self.server_close()

    def take_turns(self):
        """Makes the answers in turns. In each turn, the first answer of a queue takes its next
        chunk, and then goes to the end of the queue. Returns once stop() was called and the answers
        under way have ended.

        Answers are decoded together, in one Batch: one call of the model makes the next chunk of
        all of them. If an answer's chunk is ready, the answer just takes it in its turn. If not,
        the server starts the answers to waiting requests, at the front of the queue, and then
        decodes the next chunk of all answers. Hence a new request waits for at most one chunk."""
        jobs = collections.deque()  # those with an answer under way
        n_ended = 0  # answers that ended since others could begin
        while jobs or not self.is_ending:
            if not (jobs and jobs[0].has_tokens):
                jobs.extendleft(reversed(self.begin_answers(len(jobs), n_ended)))
                n_ended = 0
            if not jobs:
                continue
            job = jobs.popleft()
            if next(job.steps, None):
                jobs.append(job)
            else:
                n_ended += 1

    def begin_answers(self, n_under_way, n_ended):
        """Begins the answers to waiting requests, so that at most batch_size answers are under way.
        Returns the Jobs of these new answers. The new answers that use the shared batch all join it
        before any of them is decoded, so that their prompts can be prefilled together.

        n_under_way: how many answers are under way. If there are none, waits for a request.
        n_ended: how many answers have just ended. Their clients may ask again at once, so this
        method waits up to RETURN seconds until n_ended requests have come."""
        begun = []
        ended_at = time.monotonic()
        while n_under_way + len(begun) < self.batch_size:
            seconds = 0
            if n_under_way + len(begun) == 0:
                seconds = math.inf
            elif len(begun) < n_ended:
                seconds = ended_at + RETURN - time.monotonic()
            job = self.next_job(seconds)
            if job is None:
                break
            job.steps = self.answer(job)
            if next(job.steps, None):
                begun.append(job)
        return begun

    def stop(self):
        """Makes run() return once the answers under way have ended. Is called from another
        thread."""
        with self.changed:
            self.is_ending = True
            self.changed.notify()

    def enter(self, job):
        """Puts a Job into the queue, and removes the jobs of clients that have gone. Raises Refusal
        if the queue is full."""
        with self.changed:
            for other in [other for other in self.jobs if other.is_gone()]:
                self.jobs.remove(other)
                other.events.put(None)
            if len(self.jobs) >= self.n_queued:
                raise Refusal(429, f'{self.n_queued} requests are waiting already: try again later',
                              code='rate_limit_exceeded')
            self.jobs.append(job)
            self.changed.notify()

    def next_job(self, seconds):
        """Removes from the queue the first Job that can begin, and returns that Job. A Job that is
        decoded by itself (has_own_batch) cannot begin while another such Job is under way. Returns
        None if no Job can begin, or if stop() was called. seconds: how long to wait while the queue
        is empty."""
        end = time.monotonic() + seconds
        with self.changed:
            while not self.jobs and not self.is_ending and time.monotonic() < end:
                # on Windows a longer wait would hold back Ctrl-C
                self.changed.wait(min(1, end - time.monotonic()))
            ready = [job for job in self.jobs
                     if not (job.has_own_batch and self.own_batch_is_there)]
            if self.is_ending or not ready:
                return None
            self.jobs.remove(ready[0])
            return ready[0]

    def answer(self, job):
        """Makes the answer to a Job. Yields True after each chunk; take_turns then continues with
        other answers. An answer in the shared batch also yields True once before its prompt is
        prefilled. Other new answers can then join the batch, and their prompts may be prefilled
        together with this one.

        Stops if the client goes away. Puts an exception into job.events as a Refusal. The client
        gets the Refusal; the server goes on."""
        try:
            if job.is_gone():
                return
            prompts = [self.encode(job, prompt) for prompt in job.prompts]
            if job.echo:
                yield from self.score(job, prompts)
                return
            number = 0  # index of the first sample; 0 with a seed, as in sample_jax.py
            if not job.has_seed:
                number = self.n_answers
                self.n_answers += job.n_rows
            make, shared = self.make_all, {}
            if not job.has_own_batch:
                make = self.make_pieces
                shared = {'batch': self.batch, 'prefix_cache': self.prefix_cache}
            generation = Generation(
                self.model, prompts, job.sampling, num_samples=job.n, first_sample=number,
                streaming=True, logprobs=bool(job.wants_logprobs), **shared)
            if not job.has_own_batch:
                generation.begin()
                job.row = generation.decoder
                yield True  # others may begin before the prompt is read
            has_stayed = yield from make(job, generation)
            if has_stayed:
                job.events.put([describe_end(job, generation, i) for i in range(job.n_rows)])
        except UserError as error:
            job.events.put(Refusal(400, str(error)))
        except Refusal as refusal:
            job.events.put(refusal)
        except Exception as error:
            traceback.print_exc()
            job.events.put(Refusal(500, f'{type(error).__name__}: {error!s:.300}'))
        finally:
            job.events.put(None)

    def score(self, job, prompts):
        """Answers a Job with echo: continues each prompt, then scores the prompt and its
        continuation. Yields True after each chunk of the continuations, and after each piece of the
        scoring; take_turns then continues with other answers.

        At the end puts a list of Ends, one for each prompt, into job.events. The text and the
        log-probabilities of an End are of the prompt and its continuation. prompts: lists of token
        ids."""
        generation = Generation(
            self.model, prompts, job.sampling, streaming=True, logprobs=True)
        if not (yield from self.make_all(job, generation)):
            return
        rows = [generation.result.tokens[i, :count_tokens(generation, i)].tolist()
                for i in range(len(prompts))]
        # few rows at a time, so that other answers wait for a short piece only
        items = [[(ids, 1)] for ids in rows]
        pieces = self.model.score_in_pieces(items, batch_size=ECHO_ROWS, with_top=True)
        scores = yield from self.make_all(job, pieces)
        if not scores:
            return
        ends = []
        decode = self.model.tokenizer.decode
        for i, (ids, [(logprobs, _, top, top_logprobs)]) in enumerate(zip(rows, scores)):
            texts = [decode([token]) for token in ids]
            likeliest = [{decode([token]): logprob}
                         for token, logprob in zip(top.tolist(), top_logprobs.tolist())]
            ends.append(describe_end(job, generation, i)._replace(
                text=generation.texts[i], logprobs={
                    'tokens': texts, 'token_logprobs': [None, *logprobs.tolist()],
                    'top_logprobs': [None, *likeliest],
                    'text_offset': find_ends(decode, ids)[:-1]}))
        job.events.put(ends)

    def make_all(self, job, chunks):
        """Computes all rows of a Job in a batch of their own. To be called with `yield from`:
        yields True after each chunk, so that take_turns goes on with other answers, and then
        returns the last item of `chunks`. If the client goes away, ends the computation and returns
        None. chunks: an iterable that computes a chunk in each step, such as a Generation."""
        self.own_batch_is_there = True
        result = None
        try:
            with contextlib.closing(iter(chunks)) as chunks:
                for result in chunks:
                    if job.is_gone():
                        return None
                    yield True
        finally:
            self.own_batch_is_there = False
        return result

    def encode(self, job, prompt):
        """Returns the token ids of a prompt of a Job. If the request asks for truncation, returns
        only the last ids. Raises UserError or Refusal if the prompt is not valid, and Refusal if
        there are more ids than the context has positions."""
        if job.is_chat:
            asked = [self.with_known_role(message) for message in prompt]
            first = asked[0] if asked else None
            has_system = isinstance(first, dict) and first.get('role') in ('system', 'developer')
            prompt = asked if has_system else [*self.system, *asked]
        are_ids = not job.is_chat and isinstance(prompt, list)
        ids = prompt if are_ids else self.encode_text(job, prompt)
        n_vocab = self.model.tokenizer.vocab_size
        if are_ids and not all(0 <= id < n_vocab for id in ids):
            raise Refusal(400, f'the ids of prompt must be 0 to {n_vocab - 1}', 'prompt')
        # sample_jax.py continues the end of a prompt that is too long; here the client has to ask
        most = self.model.config.block_size
        if job.n_kept:
            ids = ids[-(most if job.n_kept == -1 else min(job.n_kept, most)):]
        if len(ids) > most:
            raise Refusal(400, f'the prompt has {len(ids):,} tokens, the context {most:,}: shorten '
                          'it, or add "truncate_prompt_tokens": -1 to continue its end',
                          'messages' if job.is_chat else 'prompt', 'context_length_exceeded')
        return ids

    def with_known_role(self, message):
        """Returns a message of a request. OpenAI's role 'developer' becomes its older name
        'system', unless the chat template knows the new name, as gpt-oss's does."""
        is_developer = isinstance(message, dict) and message.get('role') == 'developer'
        if is_developer and 'developer' not in str(self.model.tokenizer.chat_template):
            return {**message, 'role': 'system'}
        return message

    def encode_text(self, job, prompt):
        """Returns the token ids of a text or of messages. If the request sets
        continue_final_message, its last message is the beginning of the answer."""
        if not job.continues:
            return self.model.encode(prompt)
        *messages, last = prompt
        said = last.get('content') if isinstance(last, dict) else None
        if not messages or not isinstance(said, str) or last.get('role') != 'assistant':
            raise Refusal(400, 'continue_final_message needs an answer as the last message',
                          'continue_final_message')
        return [*self.model.encode(messages), *self.model.tokenizer.encode(said, begin=False)]

    def make_pieces(self, job, generation):
        """Decodes the answer to a Job. Yields True after each chunk of tokens except the last;
        take_turns then continues with other answers. generation: the answer's Generation.

        If the client asked for a stream, puts new text into job.events after a chunk, but at most
        once every PAUSE seconds, and once more at the end. If not, puts the whole text into
        job.events at the end.

        Returns True if the client stayed connected to the end. If the client goes away, ends the
        decoding and returns False. The caller gets this value from `yield from`, because
        make_pieces is a generator."""
        text, n_shown, shown_at = '', 0, 0
        with contextlib.closing(generation.pieces(with_prompt=False)) as pieces:
            for piece in pieces:
                if job.is_gone():
                    return False
                text += piece
                if job.is_stream and time.monotonic() - shown_at >= PAUSE:
                    shown_at = time.monotonic()
                    n_shown = self.show(job, text, n_shown)
                if not generation.decoder.is_over:  # else the answer makes room at once
                    yield True
        self.show(job, text, n_shown)
        return True

    def show(self, job, text, n_shown):
        """Puts the new part of an answer into job.events. Returns the new n_shown, the number of
        characters of the answer that were put there so far.

        text: all that the model has written so far. In a chat, the answer is final_answer(text),
        which for gpt-oss is only the final channel; otherwise the answer is `text`. n_shown: the
        number of characters that earlier calls have put into job.events."""
        if job.is_chat:
            text = final_answer(text)
        if text[n_shown:]:
            job.events.put(text[n_shown:])
        return len(text)

    # connections

    def verify_request(self, request, client_address):
        """Returns whether the server accepts a new connection. If there are more than CONNECTIONS
        threads, closes the connection and returns False. request: the socket."""
        if threading.active_count() <= CONNECTIONS:
            return True
        request.close()
        return False

    def shutdown_request(self, request):
        """Closes a connection after reading what the client still sends. A connection that is
        closed with bytes unread is reset, and the client may lose the answer. request: the
        socket."""
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_WR)
            request.settimeout(LINGER)
            for _ in range(1000):
                if not request.recv(2**16):
                    break
        request.close()

    def handle_error(self, request, client_address):
        """Prints the traceback of an exception. Prints nothing for an OSError, which is a lost
        connection."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def count_tokens(generation, i):
    """Returns the number of tokens of row i of a Generation: its prompt and its text, without a stop
    text and the tokens that were generated after it."""
    if generation.stopped[i]:
        return generation.tokens_to_the_end(i)
    return int(generation.result.lengths[i])


def describe_end(job, generation, i):
    """Returns the End of row i of an answer: its text, its finish_reason, its numbers of tokens,
    and its log-probabilities if they are wanted. job: the answer's Job. generation: the answer's
    Generation."""
    n_prompt = generation.lengths[i]
    end = count_tokens(generation, i)
    text = generation.texts[i][len(generation.prompt_texts[i]):]
    if job.is_chat:
        text = final_answer(text)
    reason = 'length' if generation.was_cut(i) else 'stop'
    logprobs = None
    if job.wants_logprobs and not job.echo:
        logprobs = describe_logprobs(job, generation, i, end)
    return End(text, reason, n_prompt, end - n_prompt, logprobs)


def find_ends(decode, ids):
    """Returns the lengths of the texts of ids[:0], ids[:1] and so on up to all ids, in whole
    characters. decode: the function of a tokenizer.

    Decodes a few ids at a time: those behind the latest end of a character, together with the text
    before them, because a token may need a space in front."""
    ends = [0]
    n_before = n_whole = 0  # ids up to the latest two ends of characters
    for n in range(1, len(ids) + 1):
        known = len(decode(ids[n_before:n_whole]))
        text = decode(ids[n_before:n])
        whole = strip_partial_utf8(text)
        # a decoder may write U+FFFD for the character before an incomplete one, too
        ends.append(ends[n_whole] + max(0, len(whole) - known))
        if len(whole) == len(text):
            has_text = len(text) > known  # a special token has none
            n_before = n_whole if has_text else n_before
            n_whole = n
    return ends


def describe_logprobs(job, generation, i, end):
    """Returns the log-probabilities of the tokens of one answer, in OpenAI's form. The answer is
    row i of `generation`, without the prompt. The texts of the tokens add up to the generated text
    of this row. (The text of a chat's answer may be only a part of it, see final_answer.) A
    character made of several tokens belongs to the text of the last of these tokens, and so does an
    incomplete character at the end.

    job: the Job. generation: the Generation of the job. end: the number of tokens of row i up to
    the end of the answer, including the tokens of the prompt."""
    n_prompt = generation.lengths[i]
    tokens = generation.result.tokens[i, :end].tolist()
    logprobs = generation.result.logprobs[i, n_prompt:end].tolist()
    text = generation.texts[i][len(generation.prompt_texts[i]):]

    # where each token begins in the text; decoded together with the prompt's last character,
    # because the first new token may need a space in front
    decode = generation.model.tokenizer.decode
    first = n_prompt - 1
    while first > 0 and decode(tokens[first:n_prompt]).startswith('\ufffd'):
        first -= 1
    ends = find_ends(decode, tokens[first:end])[n_prompt - first:]
    starts = [length - ends[0] for length in ends]
    starts[-1] = len(text)
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
    """Answers one request, and closes the connection. A stream is sent in HTTP/1.1 chunks, which
    end with an empty one. Without the empty chunk, a client knows that the answer is incomplete."""
    timeout = SILENCE
    default_request_version = 'HTTP/1.0'
    protocol_version = 'HTTP/1.1'
    allow = None  # the method that the path takes, if the request has another one

    def parse_request(self):
        """Parses the first line and the headers of a request, and returns whether they are valid,
        as the base class does. Also sets the time limit of the connection to PATIENCE seconds
        without a byte. Before the first line has come, the limit is SILENCE."""
        self.connection.settimeout(PATIENCE)
        return super().parse_request()

    def do_GET(self):
        """Answers a request; do_POST and do_HEAD are the same function."""
        try:
            self.check_sender()
            self.path = re.sub('^https?://[^/]*', '', self.path.partition('?')[0]) or '/'
            models = '/v1/models/'
            is_model = self.path.startswith(models) and self.path != models
            path = models if is_model else self.path
            if path not in self.paths:
                raise Refusal(404, f'there is no {self.path:.100} here')
            command, answer = self.paths[path]
            if command != self.command and (command, self.command) != ('GET', 'HEAD'):
                self.allow = f'{command}, HEAD' if command == 'GET' else command
                raise Refusal(405, f'{self.path} takes {command}, not {self.command}')
            answer(self)
        except Refusal as refusal:
            self.send_json(refusal.body, refusal.status)

    do_POST = do_GET
    do_HEAD = do_GET

    def do_OPTIONS(self):
        """Answers a browser's preflight request, if --allow lists the origin of the page."""
        try:
            self.check_sender()
            if not self.origin:
                raise Refusal(405, 'OPTIONS is for pages of other origins')
            self.send(204, 'text/plain', b'')
        except Refusal as refusal:
            self.send_json(refusal.body, refusal.status)

    def check_sender(self):
        """Raises Refusal if the request comes from a page of another site and --allow does not name
        that site. The browser sends two headers: Origin is the site of the page, and Host is the
        name under which the page has found this machine. Host must be an address, a name of this
        server, or a name in --allow, because a site can point a name of its own to this machine
        (DNS rebinding)."""
        host = self.headers.get('Host', '')
        names = ('localhost', self.server.host, socket.gethostname(), *self.server.allowed_names)
        allowed = '|'.join([*map(re.escape, names), r'[0-9.]+', r'\[[0-9a-f:.]+\]'])
        if not re.fullmatch(f'({allowed})(:[0-9]+)?', host, re.IGNORECASE):
            name = host.rpartition(':')[0] or host
            remedy = f'--allow={name:.100} lets it in' if name else 'send the header Host'
            raise Refusal(403, f'the request came for the host {host!r:.100}, which is no name of '
                          f'this server: {remedy}')
        # the scheme does not count: a proxy may speak https
        origin = self.headers.get('Origin', '').lower()
        is_own = re.sub('^https?://', '', origin) == host.lower()
        if origin and not is_own and origin not in self.server.allowed_origins:
            raise Refusal(403, f'the request came from a page of {origin!r:.100}: '
                          f'--allow={origin:.100} lets it in')
        self.origin = origin if origin in self.server.allowed_origins else ''

    def send_page(self):
        self.send(200, 'text/html; charset=utf-8', PAGE.read_bytes())

    def describe_model(self):
        """Returns the entry of the model in /v1/models, with fields that the page needs."""
        server = self.server
        return {
            'id': server.name, 'object': 'model', 'created': 0, 'owned_by': 'local',
            'max_model_len': server.model.config.block_size, 'description': server.description,
            'has_chat_template': server.model.tokenizer.chat_template is not None,
            'max_tokens': server.sampling.max_new_tokens,
            'temperature': server.sampling.temperature}

    def send_models(self):
        self.send_json({'object': 'list', 'data': [self.describe_model()]})

    def send_model(self):
        if unquote(self.path.rpartition('/')[2]) != self.server.name:
            raise Refusal(404, f'the model here is {self.server.name}', 'model', 'model_not_found')
        self.send_json(self.describe_model())

    def send_health(self):
        self.send_json({'status': 'ok'})

    def complete(self):
        """Answers a chat, or continues texts."""
        is_chat = 'chat' in self.path
        job = Job(self.connection, is_chat, self.read_body(), self.server)
        self.server.enter(job)
        pieces = job.pieces()
        if not job.is_stream:
            for _ in pieces:
                pass
            if job.ends:
                self.send_json({**job.describe(), 'usage': job.usage()})
            return

        # wait for the first piece: a request that is refused at once then gets its error status
        first = next(pieces, '')
        self.send(200, 'text/event-stream')
        try:
            self.send_event(job.describe('', is_first=True, is_chunk=True))
            for piece in itertools.chain([first], pieces):
                if piece:
                    self.send_event(job.describe(piece, is_chunk=True))
                else:  # a comment, by which proxies see that the connection lives
                    self.send_part(': waiting\n\n')
            if not job.ends:
                return
            self.send_event(job.describe('', is_chunk=True))
            if job.wants_usage:
                usage = {'choices': [], 'usage': job.usage()}
                self.send_event({**job.describe('', is_chunk=True), **usage})
            self.send_part('data: [DONE]\n\n')
        except Refusal as refusal:
            self.send_event(refusal.body)
        self.send_part('')

    def read_body(self):
        """Returns the JSON object of a request. Raises Refusal if the request has no JSON object,
        or if the body is too large."""
        if self.headers.get_content_type() != 'application/json':
            raise Refusal(415, 'Content-Type must be application/json')
        if self.headers.get('Content-Encoding', 'identity').lower() != 'identity':
            raise Refusal(415, 'the body is compressed; send it as it is')
        if 'Transfer-Encoding' in self.headers:
            raise Refusal(411, 'the body comes in chunks; send it as a whole, with Content-Length')
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
        """Sends an answer: its HTTP status, the headers with `kind` as Content-Type, and `content`,
        bytes. If content is None, sends status and headers only; send_part then sends the parts of
        a stream."""
        if self.request_version == 'HTTP/0.9':
            self.request_version = 'HTTP/1.0'  # whatever was asked, a status comes first
        self.send_response(status)
        self.send_header('Connection', 'close')  # http.server closes it, too
        self.send_header('Content-Type', kind)
        self.send_header('Cache-Control', 'no-store')
        self.send_header('Content-Security-Policy', PAGE_POLICY)
        self.send_header('X-Content-Type-Options', 'nosniff')
        if getattr(self, 'origin', ''):
            self.send_header('Access-Control-Allow-Origin', self.origin)
            self.send_header('Access-Control-Allow-Headers', 'Authorization, Content-Type')
            self.send_header('Vary', 'Origin')
        if self.allow:
            self.send_header('Allow', self.allow)
        if status == 429:
            self.send_header('Retry-After', '1')
        self.is_chunked = content is None and self.request_version > 'HTTP/1.0'
        if content is not None:
            self.send_header('Content-Length', str(len(content)))
        else:
            self.send_header('X-Accel-Buffering', 'no')  # nginx would hold the stream back
        if self.is_chunked:
            self.send_header('Transfer-Encoding', 'chunked')
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(content or b'')

    def send_json(self, value, status=200):
        self.send(status, 'application/json', json.dumps(value).encode())

    def send_event(self, value):
        self.send_part(f'data: {json.dumps(value)}\n\n')

    def send_part(self, text):
        """Sends a part of a stream; '' ends the stream."""
        part = text.encode()
        if self.is_chunked:
            part = b'%x\r\n%s\r\n' % (len(part), part)
        self.wfile.write(part)

    paths = {
        '/': ('GET', send_page),
        '/health': ('GET', send_health),
        '/v1/models': ('GET', send_models),
        '/v1/models/': ('GET', send_model),
        '/v1/chat/completions': ('POST', complete),
        '/v1/completions': ('POST', complete)}

    def send_error(self, code, message=None, explain=None):
        """Sends an error that http.server has found: an unknown method or version, or broken
        headers."""
        status = {501: 405, 505: 400}.get(code, code)
        self.send_json(Refusal(status, message or 'this is not an HTTP request').body, status)

    def log_message(self, *args):
        """Prints nothing: requests are private."""


def no_number(name):
    """Raises ValueError. json.loads calls this function for NaN and Infinity, which are not
    JSON."""
    raise ValueError(f'{name} is no number')
