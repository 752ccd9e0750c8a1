"""Measures a server that answers OpenAI's API (such as sample_jax.py --serve) with several clients
at a time. Prints a row for each number of clients.

$ python sample_jax.py --out_dir=out-mine --serve=8000
$ python tools/clients.py http://localhost:8000 --clients=1,8,1,8 --requests=16 --max_tokens=64

A row says how many tokens per second all clients get together, also as a multiple of the first row;
how long the first piece of an answer takes; and how many texts differ from those of the first row.
The tokens per second are those of the time in which all clients had a request (speed_while_busy).
All rows send the same requests: request i has seed i, and its number is in the prompt. Before the
first row, each number of clients runs once without being measured, so that the server compiles.
"""
import argparse
import json
import statistics
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple


class Answer(NamedTuple):
    """The text of an answer, its number of tokens, and its times, by one clock in seconds."""
    text: str
    n_tokens: int
    asked_at: float
    first_at: float  # when its first piece came
    ended_at: float


def ask(url, prompt, seed, max_tokens, temperature):
    """Asks the server at `url` for a streamed completion of the text `prompt`. Returns the
    Answer."""
    body = {'prompt': prompt, 'seed': seed, 'max_tokens': max_tokens, 'temperature': temperature,
            'stream': True, 'stream_options': {'include_usage': True}}
    request = urllib.request.Request(
        f'{url}/v1/completions', json.dumps(body).encode(), {'Content-Type': 'application/json'})
    asked_at = time.perf_counter()
    text, n_tokens, first_at = '', 0, None
    with urllib.request.urlopen(request) as response:
        for line in response:
            data = line.decode().strip().removeprefix('data: ')
            if not data.startswith('{'):
                continue
            chunk = json.loads(data)
            if chunk['choices']:
                text += chunk['choices'][0]['text']
                if first_at is None and text:
                    first_at = time.perf_counter()
            if chunk.get('usage'):
                n_tokens = chunk['usage']['completion_tokens']
    ended_at = time.perf_counter()
    return Answer(text, n_tokens, asked_at, first_at or ended_at, ended_at)


def ask_all(n_clients, n_requests, make):
    """Calls make(i), which returns an Answer, for each request i from 0 to n_requests - 1,
    n_clients at a time. Returns the list of the Answers."""
    with ThreadPoolExecutor(n_clients) as clients:
        return list(clients.map(make, range(n_requests)))


def speed_while_busy(answers):
    """Computes the tokens per second of all Answers together, in the time in which every client had
    a request: from the first request until a client finds no further one. After this time the
    server has fewer clients, so its speed is not theirs. The answers that are then under way count
    in part: their tokens are taken to come evenly, from the first piece to the end."""
    last_asked_at = max(answer.asked_at for answer in answers)
    first_idle_at = min(answer.ended_at for answer in answers if answer.ended_at > last_asked_at)
    n_tokens = 0
    for answer in answers:
        if answer.ended_at <= first_idle_at:
            n_tokens += answer.n_tokens
        elif answer.first_at < first_idle_at:
            seconds = first_idle_at - answer.first_at
            n_tokens += answer.n_tokens * seconds / (answer.ended_at - answer.first_at)
    return n_tokens / (first_idle_at - min(answer.asked_at for answer in answers))


def positive(text):
    """Returns the whole number that a text says. Raises ArgumentTypeError unless it is at least
    1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'{text} is no whole number from 1 on')
    return int(text)


def positives(text):
    """Returns the list of whole numbers that a text such as '1,8' says. Raises as positive does."""
    return [positive(part) for part in text.split(',')]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('url')
    parser.add_argument('--clients', type=positives, default='1,8',
                        help='numbers of them, a row each')
    parser.add_argument('--requests', type=positive, default=16, help='of a row')
    parser.add_argument('--prompt', default='Once upon a time {}',
                        help='{} is the number of the request')
    parser.add_argument('--max_tokens', type=positive, default=64)
    parser.add_argument('--temperature', type=float, default=0.8)
    args = parser.parse_args()
    if args.requests < max(args.clients):
        parser.error(f'--requests={args.requests} leaves some of {max(args.clients)} clients '
                     'without one')

    def make(i):
        prompt = args.prompt.replace('{}', str(i))
        return ask(args.url, prompt, i, args.max_tokens, args.temperature)

    try:
        for n_clients in sorted(set(args.clients)):
            ask_all(n_clients, args.requests, make)
    except urllib.error.HTTPError as error:
        parser.error(f'{args.url} answers {error}: {error.read(500).decode(errors="replace")}')
    except (OSError, ValueError) as error:  # nobody answers, or this is no URL
        parser.error(f'{args.url} does not answer: {error}')
    print('clients  tokens/s  ratio  first piece: median, longest  texts that differ')
    first = None
    for n_clients in args.clients:
        answers = ask_all(n_clients, args.requests, make)
        speed = speed_while_busy(answers)
        if not speed:
            parser.error(f'{args.url} reports no usage: its tokens cannot be counted')
        first = first or (speed, answers)
        waits = [answer.first_at - answer.asked_at for answer in answers]
        n_other = sum(a.text != b.text for a, b in zip(answers, first[1]))
        print(f'{n_clients:7}  {speed:8.1f}  {speed / first[0]:5.2f}  {statistics.median(waits):12.3f} s, '
              f'{max(waits):7.3f} s  {n_other:9} of {args.requests}', flush=True)


if __name__ == '__main__':
    sys.exit(main())
