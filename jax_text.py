"""A model that takes and gives text, from a run, a Hugging Face folder or name, a ckpt.pt or .gguf.

    from jax_text import load
    model = load('out-mine')
    print(model.generate(['Once upon a time'], max_new_tokens=100)[0])
"""
import bisect
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.experimental import multihost_utils

from jax_devices.parallel import DataParallel, setup_distributed_training
from jax_devices.setup import Lap, Stopwatch, setup_jax_environment
from jax_files.chats import final_answer
from jax_files.checkpoints import checkpoint_steps
from jax_files.data import load_dataset_meta
from jax_files.tokenizers import (
    describe_tokenizer, limit_vocabulary, load_tokenizer, refuse_dropped, same_tokens, strip_partial_utf8)
from jax_files.weight_files import local_path
from jax_flags import UserError
from jax_generate import PrefixCache, generate_stream
from jax_ops.decode_weights import (
    convert_params_for_decoding, order_columns_by_rank, transpose_kernels)
from jax_lora import load_run, merge_updates
from jax_pretrained import load_pretrained
from jax_score import right_padded, score
from jax_transformer import GPTConfig

SAMPLING = {'temperature': 0.8, 'top_k': 200}  # nanoGPT's; the other controls are off
STREAM_CHUNK = 8  # tokens generated between two updates of a text that is shown while it grows
SLOW_TOKEN = 0.05  # seconds: a text with slower tokens is updated after each
SAMPLE_TOKENS = 100  # of a sample while training
STOP_CHUNK = 64  # tokens generated between two searches for the stop text


def load(source: str, *, checkpoint: str = '', base: str = '', dataset: str = '', draft: str = '',
         device: str = 'auto', dtype: str = 'auto', quantize: str = '', tensor: int = 1,
         expert: int = 1) -> 'TextModel':
    """The model of a run's out_dir, a Hugging Face folder or name ('gpt2', 'owner/name'), a ckpt.pt
    or .gguf.

    checkpoint: of a run, 'best' (lowest validation loss; the default) or 'latest'. base: where the
    pretrained model of a LoRA run or of an adapter of peft is now, if it has moved. dataset: the
    folder under data/ whose meta.json describes the tokenizer of a ckpt.pt. draft: a smaller model
    with the same tokens, for n_draft.
    device, dtype: see setup_jax_environment. quantize: 'int8' or '' (off). tensor, expert: the
    number of devices over which heads, MLP width and vocabulary, or the experts, are sharded;
    several processes must take all devices.

    Raises UserError for what is not there, is damaged, or does not fit."""
    devices, dtype, reason = setup_jax_environment(device, dtype)
    clock = Stopwatch()
    n_devices = tensor * expert
    if not 1 <= n_devices <= len(devices):
        raise UserError(f'tensor={tensor} x expert={expert} needs {n_devices} devices, and there are {len(devices)}')
    if jax.process_count() > 1 and n_devices < len(devices):
        raise UserError(f'tensor={tensor} x expert={expert} must be {len(devices)}, all devices of the '
                        f'{jax.process_count()} processes')
    parallel = setup_distributed_training(devices[:n_devices], tensor=tensor, expert=expert)

    def place(path, array):
        """Moves one parameter to its devices, sharded and as decoding reads it, before the next one
        is read: no memory ever holds the model in float32 that is to be int8."""
        part = unflatten_dict({path: array})
        if n_devices == 1 and devices[0].platform == 'cpu':
            # views: the device takes over kernels that the file stores [out, in]
            part = transpose_kernels(part)
        part = parallel.device_put(part)
        return flatten_dict(convert_params_for_decoding(part, dtype, quantize))[path]

    def read(source, checkpoint='', base='', is_draft=False):
        """(params for decoding on the mesh, config, description of the tokenizer or None, name,
        warning)."""
        warning = ''
        if is_run(source) or checkpoint:
            config, params, meta = load_run(source, checkpoint or 'best', parallel, base)
            params = convert_params_for_decoding(params, dtype, quantize)
            description, taken, latest = meta['tokenizer'], meta['iter_num'], checkpoint_steps(source)[0]
            name = f'{source}, checkpoint of iteration {taken}'
            if checkpoint != 'latest' and latest > taken:
                warning = (f'taking the best checkpoint, iteration {taken}; a later one, {latest}, is there: '
                           '--checkpoint=latest')
        else:
            path = local_path(source, base=base)
            config, params = load_pretrained(path, 'stored' if quantize else dtype, place)
            # a tokenizer beside the weights, which may not be readable, is not asked
            is_told = dataset or is_draft
            description = None if is_told else describe_tokenizer(path, config.vocab_size)
            name = str(source)
        parallel.validate(config)
        with parallel.mesh_context():
            params = order_columns_by_rank(params, config)
        return params, dataclasses.replace(config, dtype=dtype), description, name, warning

    params, config, description, name, warning = read(source, checkpoint, base)
    if dataset and not is_run(source):
        description = load_dataset_meta(Path(__file__).parent / 'data' / dataset)['tokenizer']
    if description is None:
        raise UserError(f"{source} has a vocabulary of {config.vocab_size}, which is not GPT-2's: put its "
                        'tokenizer.json beside it, or name the data set that it was trained on, --dataset=...')
    tokenizer = load_tokenizer(description)
    limit_vocabulary(tokenizer, config.vocab_size)
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(f'the tokenizer has {tokenizer.vocab_size} tokens, the model only {config.vocab_size}')
    draft_model = None
    if draft:
        *draft_model, draft_description, _, _ = read(draft, is_draft=True)
        if is_run(draft) and not same_tokens(draft_description, description):
            raise UserError(f'{draft} was trained with other tokens than {name}: it cannot draft for it')
    title = f'{name}; {tensor} x {devices[0].device_kind}, compute in {dtype} ({reason})'
    return TextModel(params, config, tokenizer, parallel, draft_model, title, warning, clock, clock.lap())


def is_run(source):
    """Whether the folder is the out_dir of a run."""
    return Path(source, 'ckpt').is_dir()


@dataclasses.dataclass
class TextModel:
    """A model for texts. The methods' options are those of Generation."""
    params: dict  # as decoding reads them
    config: GPTConfig  # its dtype is the compute dtype
    tokenizer: Any
    parallel: DataParallel
    draft: tuple | None  # (params, config) of the draft model
    title: str  # a line for the user: where the model is from, and how it computes
    warning: str  # another one, or ''
    clock: Stopwatch
    loading: Lap  # seconds

    def generate(self, texts: list[str], **options) -> list[str]:
        """The texts, each with its continuation, all in one batch; num_samples of each if that is
        given.

        A continuation depends on the text, the options and the number of the sample only, not on
        the batch: equal texts have equal continuations. Raises UserError for a text or an option
        that makes no sense."""
        if isinstance(texts, str):
            raise UserError('generate takes a list of texts: [text]')
        return Generation(self, [self.encode(text) for text in texts], **options).finish().texts

    def stream(self, prompt: str | list[dict[str, str]], **options) -> Iterator[str]:
        """Yields the text that generate returns in pieces while it is generated; of the messages of
        a chat, the answer alone. Raises UserError as generate does."""
        generation = Generation(self, [self.encode(prompt)], streaming=True, **options)
        return generation.pieces(with_prompt=isinstance(prompt, str))

    def chat(self, messages: list[dict[str, Any]], *, tools: list[dict] | None = None,
             chat_template_kwargs: dict[str, Any] | None = None, **options) -> str:
        """The answer to the messages of a chat, [{'role': 'system', 'user' or 'assistant',
        'content': text}]; of gpt-oss's, the final channel. tools: JSON schemas of functions that it
        may call. chat_template_kwargs: more variables of the chat template, as {'enable_thinking':
        False}. Raises UserError as generate does, and without a chat template."""
        prompt = self.encode(messages, tools=tools, chat_template_kwargs=chat_template_kwargs)
        generation = Generation(self, [prompt], **options).finish()
        return final_answer(generation.texts[0][len(generation.prompt_texts[0]):])

    def logprobs(self, texts: list[str], **options) -> list[tuple[list[int], np.ndarray]]:
        """For each text (ids, the natural log-probability of each). A text follows the token that
        begins or else ends a document; of a tokenizer without either (characters), the first token
        is left out. options: of score. Raises UserError for a text of fewer than two tokens."""
        rows = [self.encode_document(text) for text in texts]
        if any(len(self.tokenizer.encode(text)) < 2 for text in texts):
            raise UserError('a text needs at least two tokens')
        return [(ids[1:], logprobs) for ids, [(logprobs, _)] in
                zip(rows, self.score([[(ids, 1)] for ids in rows], **options))]

    def score(self, items, **options):
        """The log-probabilities of tokens, see the function score, whose other arguments are the
        options."""
        with self.parallel.mesh_context():
            return score(self.params, self.config, items, **options)

    def encode_document(self, text: str) -> list[int]:
        """The token ids of a text after the token that begins or else ends a document, if there is
        one."""
        ids, start = self.tokenizer.encode(text), self.tokenizer.start_token
        return ids if start is None or self.tokenizer.encode('')[:1] == [start] else [start, *ids]

    def encode(self, prompt: str | list[dict[str, Any]], *, tools: list[dict] | None = None,
               chat_template_kwargs: dict[str, Any] | None = None) -> list[int]:
        """The token ids of a text, or of the messages of a chat with the beginning of the next
        answer; tools and chat_template_kwargs as for chat. Raises UserError for what the tokenizer
        or the chat template does not know."""
        if not isinstance(prompt, str):
            if self.tokenizer.chat_template is None:
                raise UserError('the model has no chat template')
            return self.tokenizer.encode_chat(prompt, tools=tools, variables=chat_template_kwargs)
        refuse_dropped(self.tokenizer.count_dropped(prompt))
        ids = self.tokenizer.encode(prompt)
        if not ids:
            raise UserError('the prompt is empty; give at least one character, as in --start="A"')
        return ids

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], int]:
        """A row for score, (ids, start): the continuation is scored. Divided into tokens as by
        lm-eval: spaces at the end of the context belong to the continuation. Raises UserError if
        the continuation has no token of its own."""
        before = context.rstrip()
        text = context + continuation
        tokenizer = self.tokenizer
        if before:
            # a text that begins with the name of the token that begins a document gets no second
            # one
            begin = tokenizer.start_text is None or not before.startswith(tokenizer.start_text)
            ids = tokenizer.encode(before, begin)
            row, start = ids + tokenizer.encode(text, begin)[len(ids):], len(ids)
        elif tokenizer.start_token is None:
            row, start = tokenizer.encode(text), 1
        else:
            ids = tokenizer.encode(text, begin=False)
            has_begun = ids[:1] == [tokenizer.start_token]
            row, start = ids if has_begun else [tokenizer.start_token, *ids], 1
        if len(row) <= start:
            raise UserError('a continuation has no token of its own')
        return row, start


def create_sampler(prompt: str, config: GPTConfig, description: dict, device) -> TextModel | None:
    """The model without parameters, on one device of the kind of `device`, for
    sample_while_training; None without a prompt. Raises UserError for a prompt that it cannot
    continue."""
    if not prompt:
        return None
    parallel = setup_distributed_training(jax.local_devices(backend=device.platform)[:1])
    sampler = TextModel({}, config, load_tokenizer(description), parallel, None, '', '', Stopwatch(), None)
    sampler.encode(prompt)
    return sampler


def sample_while_training(sampler: TextModel, state, lora: dict | None, prompt: str, seed: int) -> str:
    """The beginning of the first sample that sample_jax.py gives of the parameters of this
    TrainState, which stay as they are. lora: what the checkpoint says of LoRA. All processes call
    this, and all have the text."""
    whole = lambda x: np.asarray(x if x.is_fully_addressable or x.is_fully_replicated else
                                 multihost_utils.process_allgather(x, tiled=True))
    params = jax.tree.map(whole, state.params)
    if lora:
        params = merge_updates(jax.tree.map(whole, state.frozen['weights']), lora, params)
    params = convert_params_for_decoding(sampler.parallel.device_put(params), sampler.config.dtype)
    model = dataclasses.replace(sampler, params=params)
    return model.generate([prompt], max_new_tokens=SAMPLE_TOKENS, seed=seed)[0]


class Generation:
    """A batch of prompts and their continuations, while they grow: iterating over it generates
    chunk by chunk.

    prompts: lists of token ids, each prompt num_samples times. texts: prompt and continuation so
    far, up to the stop text. stopped: whether each has met the stop text. result: the
    GenerationResult. laps: the seconds of each chunk; the first is the prefill and the first decode
    step."""

    def __init__(self, model: TextModel, prompts: list[list[int]], *, num_samples: int = 1, first_sample: int = 0,
                 max_new_tokens: int = 500, stop: str | Sequence[str] = '', seed: int = 1337, cache_dtype: str = 'auto',
                 n_draft: int = 0, streaming: bool = False, prefix_cache: PrefixCache | None = None, **sampling: float):
        """num_samples: of each prompt. first_sample: the number of the random stream of a prompt's
        first sample.
        max_new_tokens: of each sample. stop: a sample ends before this text, or before the first of
        several; '' is off. streaming: in small chunks. sampling: temperature, top_k, top_p, min_p,
        repetition_penalty; those not given are as generation_config.json says, else as SAMPLING.
        The others: see jax_generate.generate_stream.

        What makes no sense raises UserError when the first chunk is generated."""
        self.model, self.max_new_tokens, self.streaming = model, max_new_tokens, streaming
        self.stops = [text for text in ([stop] if isinstance(stop, str) else stop) if text]
        self.prompts = [prompt for prompt in prompts for _ in range(num_samples)]
        self.prompt_texts = [model.tokenizer.decode(prompt) for prompt in self.prompts]
        self.lengths = [len(prompt) for prompt in self.prompts]
        self.laps = []
        controls = dict(SAMPLING)
        controls.update(model.tokenizer.sampling)
        controls.update(sampling)
        self.results = generate_stream(
            model.params, model.config, right_padded(self.prompts), max_new_tokens, rng=jax.random.key(seed),
            prompt_lengths_B=self.lengths, n_vocab=model.tokenizer.vocab_size, stop_tokens=model.tokenizer.stop_tokens,
            sample_index_B=list(range(first_sample, first_sample + num_samples)) * len(prompts),
            cache_dtype=cache_dtype, n_draft=n_draft, draft=model.draft, chunk=self.choose_chunk,
            prefix_cache=prefix_cache, **controls)

    def __iter__(self) -> Iterator['Generation']:
        """Generates, and yields itself after each chunk. It can be done once."""
        with contextlib.closing(self.results):
            while True:
                self.model.clock.lap()
                with self.model.parallel.mesh_context():
                    result = next(self.results, None)
                if result is None:
                    return
                self.laps.append(self.model.clock.lap())
                self.result = result
                self.read_texts()
                yield self
                if all(self.stopped):
                    return

    def finish(self) -> 'Generation':
        """Generates all, and returns itself."""
        for _ in self:
            pass
        return self

    def pieces(self, *, with_prompt: bool = True) -> Iterator[str]:
        """Generates, and yields what is new of the first text, and will not change, after each
        chunk."""
        n_shown = 0 if with_prompt else len(self.prompt_texts[0])
        with contextlib.closing(iter(self)) as chunks:
            for _ in chunks:
                text = self.texts[0]
                # its end may be an incomplete character, or the beginning of the stop text
                if not self.stopped[0]:
                    text = strip_partial_utf8(text)
                    text = text[:max(0, len(text) - max(map(len, self.stops), default=0))]
                yield text[n_shown:]
                n_shown = max(n_shown, len(text))
        yield self.texts[0][n_shown:]

    def was_cut(self, i: int) -> bool:
        """Whether sample i ends because it has max_new_tokens tokens."""
        is_full = self.result.lengths[i] == self.lengths[i] + self.max_new_tokens
        last = self.result.tokens[i, self.result.lengths[i] - 1]
        return bool(is_full and not self.stopped[i] and last not in self.model.tokenizer.stop_tokens)

    def describe(self, i: int) -> dict:
        """Sample i: its prompt, text, finish reason ('stop' text, 'end' token or 'length') and
        log-probability, that of the tokens which reach the end of the text."""
        tokens, n_prompt = self.result.tokens[i, :self.result.lengths[i]].tolist(), self.lengths[i]
        if self.stopped[i]:
            reaches = lambda n: len(self.model.tokenizer.decode(tokens[:n])) >= len(self.texts[i])
            tokens = tokens[:bisect.bisect_left(range(len(tokens)), True, lo=n_prompt, key=reaches)]
        (logprobs, _), = self.model.score([[(tokens, n_prompt)]])[0]
        return {'prompt': self.prompt_texts[i], 'text': self.texts[i][len(self.prompt_texts[i]):],
                'finish_reason': 'stop' if self.stopped[i] else 'length' if self.was_cut(i) else 'end',
                'logprob': float(logprobs.sum(dtype=np.float64))}

    def choose_chunk(self):
        """Number of tokens to generate until the texts are looked at again. For a reader 1, until
        one took less than SLOW_TOKEN, then STREAM_CHUNK, as always in several processes, whose
        clocks differ."""
        if self.streaming:
            fastest = min((lap.running for lap in self.laps[1:]), default=SLOW_TOKEN)
            return STREAM_CHUNK if fastest < SLOW_TOKEN or jax.process_count() > 1 else 1
        return STOP_CHUNK if self.stops else self.max_new_tokens

    def read_texts(self):
        """Sets texts and stopped; a stop text counts after the prompt."""
        self.texts, self.stopped = [], []
        for row, length, prompt_text in zip(self.result.tokens.tolist(), self.result.lengths, self.prompt_texts):
            text = self.model.tokenizer.decode(row[:length])
            ends = [(at + len(stop), at) for stop in self.stops if (at := text.find(stop, len(prompt_text))) >= 0]
            # of the first to be complete, in any chunks
            self.texts.append(text[:min(ends)[1]] if ends else text)
            self.stopped.append(bool(ends))
