"""Measures a server that answers OpenAI's API (such as sample_jax.py --serve) with several clients
at a time. Prints a row for each number of clients.

$ python sample_jax.py --out_dir=out-mine --serve=8000
$ python tools/clients.py http://localhost:8000 --clients=1,8,1,8 --requests=16 --max_tokens=64

A row says how many tokens per second all clients get together, also as a multiple of the first row;
how long the first piece of an answer takes; and how many texts differ from those of the first row.
All rows send the same requests: request i has seed i, and a prompt of its own. Before the first
row, each number of clients runs once without being measured, so that the server compiles.
"""
import argparse
import json
import statistics
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple


class Answer(NamedTuple):
    """The text of an answer, its number of tokens, and the time until its first piece."""
    text: str
    n_tokens: int
    first_s: float  # seconds until the first piece


def ask(url, prompt, seed, max_tokens, temperature):
    """Asks the server at `url` for a streamed completion of the text `prompt`. Returns the
    Answer."""
    body = {'prompt': prompt, 'seed': seed, 'max_tokens': max_tokens, 'temperature': temperature,
            'stream': True, 'stream_options': {'include_usage': True}}
    request = urllib.request.Request(
        f'{url}/v1/completions', json.dumps(body).encode(), {'Content-Type': 'application/json'})
    started = time.perf_counter()
    text, n_tokens, first_s = '', 0, None
    with urllib.request.urlopen(request) as response:
        for line in response:
            data = line.decode().strip().removeprefix('data: ')
            if not data.startswith('{'):
                continue
            chunk = json.loads(data)
            if chunk['choices']:
                text += chunk['choices'][0]['text']
                if first_s is None and text:
                    first_s = time.perf_counter() - started
            if chunk.get('usage'):
                n_tokens = chunk['usage']['completion_tokens']
    return Answer(text, n_tokens, first_s or time.perf_counter() - started)


def measure(n_clients, n_requests, make):
    """Calls make(i), which returns an Answer, for each request i from 0 to n_requests - 1,
    n_clients at a time. Returns (tokens per second of all requests together; list of the
    Answers)."""
    with ThreadPoolExecutor(n_clients) as clients:
        started = time.perf_counter()
        answers = list(clients.map(make, range(n_requests)))
        seconds = time.perf_counter() - started
    return sum(answer.n_tokens for answer in answers) / seconds, answers


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('url')
    parser.add_argument('--clients', default='1,8', help='numbers of them, a row each')
    parser.add_argument('--requests', type=int, default=16, help='of a row')
    parser.add_argument('--prompt', default='Once upon a time', help='of each request, and its number')
    parser.add_argument('--max_tokens', type=int, default=64)
    parser.add_argument('--temperature', type=float, default=0.8)
    args = parser.parse_args()

    def make(i):
        return ask(args.url, f'{args.prompt} {i}', i, args.max_tokens, args.temperature)

    rows = [int(number) for number in args.clients.split(',')]
    for n_clients in sorted(set(rows)):
        measure(n_clients, args.requests, make)
    print('clients  tokens/s  ratio  first piece: median, longest  texts that differ')
    first = None
    for n_clients in rows:
        speed, answers = measure(n_clients, args.requests, make)
        first = first or (speed, answers)
        waits = [answer.first_s for answer in answers]
        n_other = sum(a.text != b.text for a, b in zip(answers, first[1]))
        print(f'{n_clients:7}  {speed:8.1f}  {speed / first[0]:5.2f}  {statistics.median(waits):12.3f} s, '
              f'{max(waits):7.3f} s  {n_other:9} of {args.requests}', flush=True)


if __name__ == '__main__':
    sys.exit(main())
