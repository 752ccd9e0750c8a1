"""A model that takes and gives text, from a run, a Hugging Face folder or name, or a nanoGPT ckpt.pt.

    from jax_text import load
    model = load('out-mine')
    print(model.generate(['Once upon a time'], max_new_tokens=100)[0])
"""
import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jax_devices.parallel import DataParallel, setup_distributed_training
from jax_devices.setup import Lap, Stopwatch, setup_jax_environment
from jax_files.checkpoints import checkpoint_steps, load_run
from jax_files.data import load_dataset_meta
from jax_files.tokenizers import describe_tokenizer, final_answer, load_tokenizer, same_tokens, strip_partial_utf8
from jax_files.weight_files import local_path
from jax_flags import UserError
from jax_generate import (
    PrefixCache, convert_params_for_decoding, generate_stream, order_columns_by_rank, transpose_kernels)
from jax_pretrained import load_pretrained
from jax_transformer import GPTConfig

SAMPLING = dict(temperature=0.8, top_k=200, top_p=1.0, min_p=0.0, repetition_penalty=1.0)  # nanoGPT's
STREAM_CHUNK = 8  # tokens generated between two updates of a text that is shown while it grows
SLOW_TOKEN = 0.05  # seconds: a text with slower tokens is updated after each
STOP_CHUNK = 64  # tokens generated between two searches for the stop text


def load(source: str, *, checkpoint: str = '', base: str = '', dataset: str = '', draft: str = '',
         device: str = 'auto', dtype: str = 'auto', quantize: str = '', tensor: int = 1,
         expert: int = 1) -> 'TextModel':
    """The model of a run's out_dir, a Hugging Face folder or name ('gpt2', 'owner/name'), or a nanoGPT ckpt.pt, with
    its parameters converted for decoding.

    checkpoint: of a run, 'best' (lowest validation loss; the default) or 'latest'. base: where the pretrained
    model of a LoRA run is now, if it has moved. dataset: the folder under data/ whose meta.json describes the tokenizer
    of a ckpt.pt. draft: a smaller model with the same tokens, for n_draft.
    device, dtype: see setup_jax_environment. quantize: 'int8' or '' (off). tensor, expert: the number of devices over
    which heads, MLP width and vocabulary, or the experts, are sharded; several processes must take all devices.

    Raises UserError for what is not there, is damaged, or does not fit."""
    devices, dtype, reason = setup_jax_environment(device, dtype)
    clock = Stopwatch()
    n_devices = tensor * expert
    if not 1 <= n_devices <= len(devices):
        raise UserError(f'tensor={tensor} x expert={expert}, and there are {len(devices)} devices')
    if jax.process_count() > 1 and n_devices < len(devices):
        raise UserError(f'tensor={tensor} x expert={expert} must be {len(devices)}, all devices of the '
                        f'{jax.process_count()} processes')
    parallel = setup_distributed_training(devices[:n_devices], tensor=tensor, expert=expert)

    def place(path, array):
        """Moves one parameter to its devices, sharded and as decoding reads it, before the next one is read: no memory
        ever holds the model in float32 that is to be int8."""
        part = unflatten_dict({path: array})
        if n_devices == 1 and devices[0].platform == 'cpu':
            part = transpose_kernels(part)  # views: the device takes over kernels that the file stores [out, in]
        part = parallel.device_put(part)
        return flatten_dict(convert_params_for_decoding(part, dtype, quantize))[path]

    def read(source, checkpoint='', base=''):
        """(params for decoding on the mesh, config, description of the tokenizer or None, name, warning)."""
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
            path = local_path(source)
            config, params = load_pretrained(path, 'stored' if quantize else dtype, place)
            description, name = describe_tokenizer(path, config.vocab_size), str(source)
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
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(f'the tokenizer has {tokenizer.vocab_size} tokens, the model only {config.vocab_size}')
    draft_model = None
    if draft:
        *draft_model, draft_description, _, _ = read(draft)
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
        """The texts, each with its continuation, all in one batch; num_samples of each if that is given.

        A continuation depends on the text, the options and the number of the sample only, not on the batch: equal texts
        have equal continuations. Raises UserError for a text or an option that makes no sense."""
        return Generation(self, [self.encode(text) for text in texts], **options).finish().texts

    def stream(self, prompt: str | list[dict[str, str]], **options) -> Iterator[str]:
        """Yields the text that generate returns in pieces while it is generated; of the messages of a chat, the
        answer alone. Raises UserError as generate does."""
        generation = Generation(self, [self.encode(prompt)], streaming=True, **options)
        return generation.pieces(with_prompt=isinstance(prompt, str))

    def chat(self, messages: list[dict[str, str]], **options) -> str:
        """The answer to the messages of a chat, [{'role': 'system', 'user' or 'assistant', 'content': text}]; of
        gpt-oss's, the final channel. Raises UserError as generate does, and without a chat template."""
        generation = Generation(self, [self.encode(messages)], **options).finish()
        return final_answer(generation.texts[0][len(generation.prompt_texts[0]):])

    def encode(self, prompt: str | list[dict[str, str]]) -> list[int]:
        """The token ids of a text, or of the messages of a chat with the beginning of the next answer. Raises UserError
        for what the tokenizer or the chat template does not know."""
        if not isinstance(prompt, str):
            if self.tokenizer.chat_template is None:
                raise UserError('the model has no chat template')
            return self.tokenizer.encode_chat(prompt)
        ids = self.tokenizer.encode(prompt)
        if not ids:
            raise UserError('the prompt is empty; give at least one character, as in --start="A"')
        return ids


class Generation:
    """A batch of prompts and their continuations, while they grow: iterating over it generates chunk by chunk.

    prompts: lists of token ids, each prompt num_samples times. texts: prompt and continuation so far, up to the stop
    text. stopped: whether each has met the stop text. result: the GenerationResult. laps: the seconds of each chunk;
    the first is the prefill and the first decode step."""

    def __init__(self, model: TextModel, prompts: list[list[int]], *, num_samples: int = 1, first_sample: int = 0,
                 max_new_tokens: int = 500, stop: str = '', seed: int = 1337, cache_dtype: str = 'auto',
                 n_draft: int = 0, streaming: bool = False, prefix_cache: PrefixCache | None = None, **sampling: float):
        """num_samples: of each prompt. first_sample: the number of the random stream of a prompt's first sample.
        max_new_tokens: of each sample. stop: a sample ends before this text; '' is off. streaming: in small chunks.
        sampling: temperature, top_k, top_p, min_p, repetition_penalty; those not given are as the model's
        generation_config.json says, else as SAMPLING. The others: see jax_generate.generate_stream.

        What makes no sense raises UserError when the first chunk is generated."""
        self.model, self.stop, self.max_new_tokens, self.streaming = model, stop, max_new_tokens, streaming
        self.prompts = [prompt for prompt in prompts for _ in range(num_samples)]
        self.prompt_texts = [model.tokenizer.decode(prompt) for prompt in self.prompts]
        self.lengths = [len(prompt) for prompt in self.prompts]
        self.laps = []
        idx = np.zeros((len(self.prompts), max(self.lengths, default=0)), np.int32)  # right-padded
        for row, prompt in zip(idx, self.prompts):
            row[:len(prompt)] = prompt
        self.results = generate_stream(
            model.params, model.config, idx, max_new_tokens, rng=jax.random.key(seed), prompt_lengths_B=self.lengths,
            sample_index_B=list(range(first_sample, first_sample + num_samples)) * len(prompts),
            n_vocab=model.tokenizer.vocab_size, stop_tokens=model.tokenizer.stop_tokens, cache_dtype=cache_dtype,
            n_draft=n_draft, draft=model.draft, chunk=self.choose_chunk, prefix_cache=prefix_cache,
            **SAMPLING | model.tokenizer.sampling | sampling)

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
        """Generates, and yields what is new of the first text after each chunk, but for what later tokens may still
        change."""
        n_shown = 0 if with_prompt else len(self.prompt_texts[0])
        with contextlib.closing(iter(self)) as chunks:
            for _ in chunks:
                text = self.texts[0]
                if not self.stopped[0]:  # its end may be an incomplete character, or the beginning of the stop text
                    text = strip_partial_utf8(text)
                    text = text[:max(0, len(text) - len(self.stop))]
                yield text[n_shown:]
                n_shown = max(n_shown, len(text))
        yield self.texts[0][n_shown:]

    def was_cut(self, i: int) -> bool:
        """Whether sample i ends because it has max_new_tokens tokens."""
        is_full = self.result.lengths[i] == self.lengths[i] + self.max_new_tokens
        last = self.result.tokens[i, self.result.lengths[i] - 1]
        return bool(is_full and not self.stopped[i] and last not in self.model.tokenizer.stop_tokens)

    def choose_chunk(self):
        """Number of tokens to generate until the texts are looked at again. For a reader 1, until one took less than
        SLOW_TOKEN, then STREAM_CHUNK, as always in several processes, whose clocks differ."""
        if self.streaming:
            fastest = min((lap.running for lap in self.laps[1:]), default=SLOW_TOKEN)
            return STREAM_CHUNK if fastest < SLOW_TOKEN or jax.process_count() > 1 else 1
        return STOP_CHUNK if self.stop else self.max_new_tokens

    def read_texts(self):
        """Sets texts and stopped; a stop text counts after the prompt."""
        self.texts, self.stopped = [], []
        for row, length, prompt_text in zip(self.result.tokens.tolist(), self.result.lengths, self.prompt_texts):
            text = self.model.tokenizer.decode(row[:length])
            end = text.find(self.stop, len(prompt_text)) if self.stop else -1
            self.texts.append(text if end < 0 else text[:end])
            self.stopped.append(end >= 0)
