"""A model that takes and gives text, from a run, a Hugging Face folder or name, a ckpt.pt or .gguf.

    from jax_text import load
    model = load('out-mine')
    print(model.generate(['Once upon a time'], max_new_tokens=100)[0])
"""
import bisect
import contextlib
import dataclasses
import functools
import inspect
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.experimental import multihost_utils

from jax_devices.parallel import DataParallel, setup_distributed_training
from jax_devices.setup import Lap, Stopwatch, setup_jax_environment
from jax_files.chats import final_answer
from jax_files.checkpoints import checkpoint_steps, is_run
from jax_files.data import dataset_folder, load_dataset_meta
from jax_files.tokenizers import (
    CharTokenizer, describe_tokenizer, limit_vocabulary, load_tokenizer, refuse_dropped,
    same_tokens, strip_partial_utf8)
from jax_files.weight_files import local_path
from jax_flags import UserError, check_ranges, nearest_names
from jax_generate import PrefixCache, generate_stream
from jax_inside import look_inside
from jax_lora import load_run, merge_updates, without_scales
from jax_ops.choose_experts import choose_experts
from jax_ops.decode_weights import (
    convert_params_for_decoding, order_columns_by_rank, transpose_kernels)
from jax_pretrained import load_pretrained
from jax_score import right_padded, score
from jax_transformer import GPTConfig, count_params

SAMPLING = {'temperature': 0.8, 'top_k': 200}  # nanoGPT's; the other controls are off
# tokens generated between two updates of a text that is shown while it grows
STREAM_CHUNK = 8
SLOW_TOKEN = 0.05  # seconds: a text with slower tokens is updated after each
SAMPLE_TOKENS = 100  # of a sample while training
# tokens generated until stop texts are searched for: this many, later an eighth of those so far
STOP_CHUNK = 8


def suggest_options(function: Callable) -> Callable:
    """Returns the function such that an option that it does not have raises a TypeError that names
    the nearest ones that it has."""
    options = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args, **given):
        for name in given:
            near = nearest_names(name, options)
            if name not in options and near:
                raise TypeError(f'{function.__name__} has no option {name}: did you mean '
                                f'{" or ".join(near)}?')
        return function(*args, **given)

    return call


@suggest_options
def load(source: str, *, checkpoint: str = '', base: str = '', dataset: str = '', draft: str = '',
         device: str = 'auto', dtype: str = 'auto', quantize: str = '', tensor: int = 1,
         expert: int = 1) -> 'TextModel':
    """Returns the model of a run's out_dir, a Hugging Face folder or name ('gpt2', 'owner/name'), a
    ckpt.pt or .gguf.

    checkpoint: which one of a run, 'best' (lowest validation loss; the default) or 'latest'.
    base: where the pretrained model of a LoRA run or of an adapter of peft is now, if it has moved.
    dataset: the folder under data/ whose meta.json describes the tokenizer of a ckpt.pt.
    draft: a smaller model with the same tokens, for n_draft.
    device, dtype: as in setup_jax_environment.
    quantize: 'int8' or '' (off).
    tensor, expert: the number of devices over which heads, MLP width and vocabulary, or the
    experts, are sharded; several processes must take all devices.

    Raises UserError for what is not there, is damaged, or does not fit."""
    # the devices, of which tensor * expert are taken
    devices, dtype, reason = setup_jax_environment(device, dtype)
    clock = Stopwatch()
    check_layout(devices, tensor, expert)
    devices = devices[:tensor * expert]
    parallel = setup_distributed_training(devices, tensor=tensor, expert=expert)
    loader = Loader(parallel, devices, dtype, quantize)

    # the model, and its tokenizer
    found = loader.read(source, checkpoint, base, with_tokenizer=not dataset)
    description = found.tokenizer
    if dataset and not is_run(source):
        folder = dataset_folder(dataset, Path(__file__).parent / 'data')
        description = load_dataset_meta(folder)['tokenizer']
    tokenizer = load_fitting_tokenizer(description, source, found.config)

    # a model that drafts for it
    draft_model = None
    if draft:
        drafting = loader.read(draft, with_tokenizer=False)
        if is_run(draft) and not same_tokens(drafting.tokenizer, description):
            raise UserError(f'{draft} was trained with other tokens than {found.name}: it cannot '
                            'draft for it')
        draft_model = (drafting.params, drafting.config)

    title = f'{found.name}; {tensor} x {devices[0].device_kind}, compute in {dtype} ({reason})'
    loading = clock.lap()
    return TextModel(found.params, found.config, tokenizer, parallel, draft_model, title,
                     found.warning, clock, loading)


def check_layout(devices, tensor, expert):
    """Raises UserError unless tensor x expert devices are there, and are all in several
    processes."""
    n_devices = tensor * expert
    if not 1 <= n_devices <= len(devices):
        raise UserError(f'tensor={tensor} x expert={expert} needs {n_devices} devices, and there '
                        f'are {len(devices)}')
    if jax.process_count() > 1 and n_devices < len(devices):
        raise UserError(f'tensor={tensor} x expert={expert} must be {len(devices)}, all devices of '
                        f'the {jax.process_count()} processes')


def load_fitting_tokenizer(description, source, config):
    """Returns the tokenizer of a description, for the model of this config.

    Raises UserError if the description is None, or the tokenizer has more tokens than the model."""
    if description is None:
        raise UserError(f"{source} has a vocabulary of {config.vocab_size}, which is not GPT-2's: "
                        'put its tokenizer.json beside it, or name the data set that it was '
                        'trained on, --dataset=...')
    tokenizer = load_tokenizer(description)
    limit_vocabulary(tokenizer, config.vocab_size)
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(f'the tokenizer has {tokenizer.vocab_size} tokens, the model only '
                        f'{config.vocab_size}')
    return tokenizer


class LoadedModel(NamedTuple):
    """What Loader.read returns."""
    params: dict  # on the mesh, as decoding reads them
    config: GPTConfig  # its dtype is the compute dtype
    tokenizer: dict | None  # its description, None if it is unknown or was not asked for
    name: str  # for the user
    warning: str  # for the user, or ''


@dataclasses.dataclass(frozen=True)
class Loader:
    """Reads models for decoding."""
    parallel: DataParallel
    devices: list  # those of `parallel`
    dtype: str  # the compute dtype
    quantize: str  # 'int8' or ''

    def read(self, source, checkpoint='', base='', *, with_tokenizer):
        """Returns the LoadedModel of a source; see load.

        with_tokenizer: whether to look for the tokenizer beside pretrained weights, which may not
        be readable; a run's checkpoint describes it in any case."""
        if is_run(source) or checkpoint:
            found = self.read_run(source, checkpoint, base)
        else:
            found = self.read_pretrained(source, base, with_tokenizer)
        # regardless of how it was stored, it computes in this dtype, on a mesh in columns by device
        self.parallel.validate(found.config)
        with self.parallel.mesh_context():
            params = order_columns_by_rank(found.params, found.config)
        config = dataclasses.replace(found.config, dtype=self.dtype)
        experts, _ = choose_experts(config, self.devices[0])
        config = dataclasses.replace(config, experts=experts)
        return found._replace(params=params, config=config)

    def read_run(self, source, checkpoint, base):
        """Returns the LoadedModel of a run. It warns where the best checkpoint is taken and a later
        one is there."""
        # the checkpoint, as decoding reads it
        config, params, meta = load_run(source, checkpoint or 'best', self.parallel, base)
        params = convert_params_for_decoding(params, self.dtype, self.quantize)
        # a run that overfits has a best checkpoint long before the latest
        taken = meta['iter_num']
        latest = checkpoint_steps(source)[0]
        warning = ''
        if checkpoint != 'latest' and latest > taken:
            warning = (f'taking the best checkpoint, iteration {taken}; a later one, {latest}, is '
                       'there: --checkpoint=latest')
        name = f'{source}, checkpoint of iteration {taken}'
        return LoadedModel(params, config, meta['tokenizer'], name, warning)

    def read_pretrained(self, source, base, with_tokenizer):
        """Returns the LoadedModel of anything that load_pretrained reads, or of an adapter."""
        path = local_path(source, base=base)
        # a matrix that becomes int8 is read as it is stored
        stored_dtype = 'stored' if self.quantize else self.dtype
        config, params = load_pretrained(path, stored_dtype, self.place)
        description = None
        if with_tokenizer:
            description = describe_tokenizer(path, config.vocab_size)
        return LoadedModel(params, config, description, str(source), '')

    def place(self, path, array):
        """Moves one parameter to its devices, sharded and as decoding reads it, before the next one
        is read: no memory ever holds the model in float32 that is to be int8."""
        part = unflatten_dict({path: array})
        if len(self.devices) == 1 and self.devices[0].platform == 'cpu':
            # views: the device takes over kernels that the file stores [out, in]
            part = transpose_kernels(part)
        part = self.parallel.device_put(part)
        converted = convert_params_for_decoding(part, self.dtype, self.quantize)
        return flatten_dict(converted)[path]


@dataclasses.dataclass(repr=False)
class TextModel:
    """A model for texts. The options of its methods mean what they do in Generation."""
    params: dict  # as decoding reads them
    config: GPTConfig  # its dtype is the compute dtype
    tokenizer: Any
    parallel: DataParallel
    draft: tuple | None  # (params, config) of the draft model
    title: str  # a line for the user: where the model is from, and how it computes
    warning: str  # another one, or ''
    clock: Stopwatch
    loading: Lap  # seconds

    def __repr__(self):
        n_params = count_params(without_scales(self.params), non_embedding=False)
        return (f'{self.title}; {n_params:,} parameters, context of '
                f'{self.config.block_size:,} tokens')

    @property
    def defaults(self) -> dict[str, float]:
        """How tokens are sampled where a call does not say: as the model's generation_config.json
        says, else as nanoGPT does."""
        return {**SAMPLING, **self.tokenizer.sampling}

    @suggest_options
    def generate(self, texts: list[str], *, num_samples: int = 1, first_sample: int = 0,
                 max_new_tokens: int = 500, stop: str | Sequence[str] = '', seed: int = 1337,
                 temperature: float | None = None, top_k: int | None = None,
                 top_p: float | None = None, min_p: float | None = None,
                 repetition_penalty: float | None = None, cache_dtype: str = 'auto',
                 n_draft: int = 0, prefix_cache: PrefixCache | None = None) -> list[str]:
        """Returns the texts, each with its continuation, all in one batch; num_samples of each.

        A continuation depends on the text, the options and the number of the sample only, not on
        the batch: generate([text] * 8) is eight equal texts, num_samples=8 makes different ones.
        The options are explained in Generation.
        Raises UserError for a text or an option that makes no sense."""
        if isinstance(texts, str):
            raise UserError('generate takes a list of texts: [text]')
        generation = Generation(
            self, [self.encode(text) for text in texts], num_samples=num_samples,
            first_sample=first_sample, max_new_tokens=max_new_tokens, stop=stop, seed=seed,
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
            repetition_penalty=repetition_penalty, cache_dtype=cache_dtype, n_draft=n_draft,
            prefix_cache=prefix_cache)
        return generation.finish().texts

    @suggest_options
    def stream(self, prompt: str | list[dict[str, str]], *, first_sample: int = 0,
               max_new_tokens: int = 500, stop: str | Sequence[str] = '', seed: int = 1337,
               temperature: float | None = None, top_k: int | None = None,
               top_p: float | None = None, min_p: float | None = None,
               repetition_penalty: float | None = None, cache_dtype: str = 'auto',
               n_draft: int = 0, prefix_cache: PrefixCache | None = None) -> Iterator[str]:
        """Yields the text that generate returns in pieces while it is generated; of the messages of
        a chat, the answer alone.

        The options are explained in Generation. Raises UserError as generate does."""
        generation = Generation(
            self, [self.encode(prompt)], streaming=True, first_sample=first_sample,
            max_new_tokens=max_new_tokens, stop=stop, seed=seed, temperature=temperature,
            top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
            cache_dtype=cache_dtype, n_draft=n_draft, prefix_cache=prefix_cache)
        return generation.pieces(with_prompt=isinstance(prompt, str))

    @suggest_options
    def chat(self, messages: list[dict[str, Any]], *, tools: list[dict] | None = None,
             chat_template_kwargs: dict[str, Any] | None = None, first_sample: int = 0,
             max_new_tokens: int = 500, stop: str | Sequence[str] = '', seed: int = 1337,
             temperature: float | None = None, top_k: int | None = None,
             top_p: float | None = None, min_p: float | None = None,
             repetition_penalty: float | None = None, cache_dtype: str = 'auto',
             n_draft: int = 0, prefix_cache: PrefixCache | None = None) -> str:
        """Returns the answer to the messages of a chat, [{'role': 'system', 'user' or 'assistant',
        'content': text}]; of gpt-oss's answers, the final channel.

        tools: JSON schemas of functions that it may call.
        chat_template_kwargs: more variables of the chat template, as {'enable_thinking': False}.
        The other options are explained in Generation. Raises UserError as generate does, and
        without a chat template."""
        # of the text that is generated, what follows the prompt and is meant for the reader
        prompt = self.encode(messages, tools=tools, chat_template_kwargs=chat_template_kwargs)
        generation = Generation(
            self, [prompt], first_sample=first_sample, max_new_tokens=max_new_tokens, stop=stop,
            seed=seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
            repetition_penalty=repetition_penalty, cache_dtype=cache_dtype, n_draft=n_draft,
            prefix_cache=prefix_cache).finish()
        return final_answer(generation.texts[0][len(generation.prompt_texts[0]):])

    @suggest_options
    def logprobs(self, texts: list[str], *, max_length: int = 0, batch_size: int = 16,
                 cache_dtype: str = 'auto') -> list[tuple[list[int], np.ndarray]]:
        """Returns for each text (ids, the natural log-probability of each).

        A text follows the token that begins or else ends a document; of a tokenizer without either
        (characters), the first token is left out. The options are explained in jax_score.score.
        Raises UserError for a text of fewer than two tokens."""
        # an item of one row for each text, of which all tokens but the first are scored
        rows = [self.encode_document(text) for text in texts]
        if any(len(self.tokenizer.encode(text)) < 2 for text in texts):
            raise UserError('a text needs at least two tokens')
        items = [[(ids, 1)] for ids in rows]
        scores = self.score(
            items, max_length=max_length, batch_size=batch_size, cache_dtype=cache_dtype)
        results = []
        for ids, [(logprobs, _)] in zip(rows, scores):
            results.append((ids[1:], logprobs))
        return results

    @suggest_options
    def score(self, items, *, max_length: int = 0, batch_size: int = 16,
              cache_dtype: str = 'auto'):
        """Returns the log-probabilities of tokens, as the function jax_score.score does."""
        with self.parallel.mesh_context():
            return score(self.params, self.config, items, max_length=max_length,
                         batch_size=batch_size, cache_dtype=cache_dtype)

    def logits(self, text: str) -> np.ndarray:
        """Returns the logits of the token after each token of a text, float32 [T, V].

        Its tokens are encode(text), those that generate continues. Raises UserError for a model on
        several devices, and for a text that is longer than its context."""
        return self.look_inside(text, 'logits')

    def hidden_states(self, text: str) -> np.ndarray:
        """Returns the input of the first layer and the output of each, float32 [n_layer + 1, T, D];
        the last is after the final norm, as transformers' output_hidden_states. Text and errors as
        for logits."""
        return self.look_inside(text, 'hidden_states')

    def attention(self, text: str) -> np.ndarray:
        """Returns how much the head of a layer at each token of a text attends to each token,
        float32 [n_layer, H, T, T], as transformers' output_attentions. Text and errors as for
        logits."""
        return self.look_inside(text, 'attention')

    def look_inside(self, text, part):
        """Returns one of the parts of jax_inside.look_inside."""
        if len(self.parallel.devices) > 1:
            raise UserError(f'{part} is for a model on one device: load it without tensor and '
                            'expert')
        return look_inside(self.params, self.config, self.encode(text), part)

    def encode_document(self, text: str) -> list[int]:
        """Returns the token ids of a text after the token that begins or else ends a document, if
        there is one."""
        # a tokenizer may put the token there by itself
        ids = self.tokenizer.encode(text)
        start = self.tokenizer.start_token
        has_start = self.tokenizer.encode('')[:1] == [start]
        if start is None or has_start:
            return ids
        return [start, *ids]

    def encode(self, prompt: str | list[dict[str, Any]], *, tools: list[dict] | None = None,
               chat_template_kwargs: dict[str, Any] | None = None) -> list[int]:
        """Returns the token ids of a text, or of the messages of a chat with the beginning of the
        next answer.

        tools, chat_template_kwargs: as for chat.
        Raises UserError for what the tokenizer or the chat template does not know."""
        # messages become a text by the chat template, which writes all special tokens
        if not isinstance(prompt, str):
            if self.tokenizer.chat_template is None:
                raise UserError('the model has no chat template')
            return self.tokenizer.encode_chat(prompt, tools=tools, variables=chat_template_kwargs)
        # a text that the tokens would not show as it is, is refused
        refuse_dropped(self.tokenizer.count_dropped(prompt))
        ids = self.tokenizer.encode(prompt)
        if not ids:
            raise UserError('the prompt is empty; give at least one character, as in --start="A"')
        return ids

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], int]:
        """Returns a row for score, (ids, start), of which the continuation is scored.

        It is divided into tokens as by lm-eval: spaces at the end of the context belong to the
        continuation. Raises UserError if the continuation has no token of its own."""
        # the tokens of the context, then those of both texts together: what comes behind as many as
        # the context has is scored, also if a token lies across the border
        before = context.rstrip()
        text = context + continuation
        tokenizer = self.tokenizer
        if before:
            # a text that begins with the name of the token that begins a document gets no second
            # one
            has_name = (tokenizer.start_text is not None
                        and before.startswith(tokenizer.start_text))
            ids = tokenizer.encode(before, not has_name)
            start = len(ids)
            row = ids + tokenizer.encode(text, not has_name)[start:]
        elif tokenizer.start_token is None:
            start = 1
            row = tokenizer.encode(text)
        else:
            start = 1
            row = tokenizer.encode(text, begin=False)
            if row[:1] != [tokenizer.start_token]:
                row = [tokenizer.start_token, *row]
        if len(row) <= start:
            raise UserError('a continuation has no token of its own')
        return row, start


def create_sampler(prompt: str, config: GPTConfig, description: dict, device) -> TextModel | None:
    """Returns the model without parameters, on one device of the kind of `device`, for
    sample_while_training; None without a prompt.

    Raises UserError for a prompt that it cannot continue."""
    if not prompt:
        return None
    parallel = setup_distributed_training(jax.local_devices(backend=device.platform)[:1])
    tokenizer = load_tokenizer(description)
    experts, _ = choose_experts(config, device)
    config = dataclasses.replace(config, experts=experts)
    sampler = TextModel({}, config, tokenizer, parallel, None, '', '', Stopwatch(), None)
    sampler.encode(prompt)
    return sampler


def sample_while_training(sampler: TextModel, state, lora: dict | None, prompt: str,
                          seed: int) -> str:
    """Returns the beginning of the first sample that sample_jax.py gives of the parameters of this
    TrainState, which stay as they are. All processes call this, and all have the text.

    lora: what the checkpoint says of LoRA."""
    # the parameters as decoding reads them, on one device
    params = jax.tree.map(whole_array, state.params)
    if lora:
        base = jax.tree.map(whole_array, state.frozen['weights'])
        params = merge_updates(base, lora, params)
    params = sampler.parallel.device_put(params)
    params = convert_params_for_decoding(params, sampler.config.dtype)
    model = dataclasses.replace(sampler, params=params)
    return model.generate([prompt], max_new_tokens=SAMPLE_TOKENS, seed=seed)[0]


def whole_array(x):
    """Returns a device array as a numpy array, gathered from all processes if it is sharded over
    them."""
    is_here = x.is_fully_addressable or x.is_fully_replicated
    if not is_here:
        x = multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


class Generation:
    """A batch of prompts and their continuations, while they grow: iterating over it generates
    chunk by chunk.

    prompts: lists of token ids, each prompt num_samples times.
    texts: prompt and continuation so far, up to the stop text.
    stopped: whether each has met the stop text.
    result: the GenerationResult.
    laps: the seconds of each chunk; the first is the prefill and the first decode step."""

    def __init__(self, model: TextModel, prompts: list[list[int]], *, num_samples: int = 1,
                 first_sample: int = 0, max_new_tokens: int = 500, stop: str | Sequence[str] = '',
                 seed: int = 1337, temperature: float | None = None, top_k: int | None = None,
                 top_p: float | None = None, min_p: float | None = None,
                 repetition_penalty: float | None = None, cache_dtype: str = 'auto',
                 n_draft: int = 0, streaming: bool = False,
                 prefix_cache: PrefixCache | None = None):
        """Prepares the batch; what makes no sense raises UserError when the first chunk is
        generated.

        num_samples: the number of samples of each prompt, which differ. A prompt that is given
        twice has the same samples twice.
        first_sample: the number of the random stream of a prompt's first sample.
        max_new_tokens: the length at which a sample ends.
        stop: a sample ends before this text, or before the first of several; '' is off.
        seed: of the samples, with the prompt and the number of the sample; below 2^32.
        temperature, top_k, top_p, min_p, repetition_penalty: controls of sampling, see
        jax_generate.generate; those that are None are as generation_config.json says, else as
        SAMPLING.
        streaming: whether chunks are small, for a reader.
        The other options are those of jax_generate.generate_stream."""
        self.model = model
        self.max_new_tokens = max_new_tokens
        self.streaming = streaming
        stops = [stop] if isinstance(stop, str) else stop
        self.stops = [text for text in stops if text]
        # a stop text that is one token ends a row in the compiled loop; others are searched for
        tokenizer = model.tokenizer
        stop_tokens = [token_of_letter(text, tokenizer) for text in self.stops]
        self.must_search = None in stop_tokens
        stop_tokens = [token for token in stop_tokens if token is not None]
        self.prompts = [prompt for prompt in prompts for _ in range(num_samples)]
        self.prompt_texts = [model.tokenizer.decode(prompt) for prompt in self.prompts]
        self.lengths = [len(prompt) for prompt in self.prompts]
        self.laps = []

        # how to sample: as the caller says, else as the model's makers do, else as nanoGPT does
        controls = model.defaults
        given = {
            'temperature': temperature, 'top_k': top_k, 'top_p': top_p, 'min_p': min_p,
            'repetition_penalty': repetition_penalty}
        for name, value in given.items():
            if value is not None:
                controls[name] = value

        # a sample's random numbers are a function of the seed, its prompt and its number: equal
        # prompts have equal samples, samples of different prompts are independent
        check_ranges({'seed': seed})
        key = jax.random.key(seed)
        key_B = jax.vmap(jax.random.fold_in, (None, 0))(key, prompt_numbers(self.prompts))
        sample_numbers = list(range(first_sample, first_sample + num_samples)) * len(prompts)
        self.results = generate_stream(
            model.params, model.config, right_padded(self.prompts), max_new_tokens,
            rng=key_B, prompt_lengths_B=self.lengths,
            n_vocab=tokenizer.vocab_size, stop_tokens=[*tokenizer.stop_tokens, *stop_tokens],
            sample_index_B=sample_numbers, cache_dtype=cache_dtype, n_draft=n_draft,
            draft=model.draft, chunk=self.choose_chunk, prefix_cache=prefix_cache, **controls)

    def __iter__(self) -> Iterator['Generation']:
        """Generates, and yields itself after each chunk. It can be done once."""
        self.texts = list(self.prompt_texts)
        self.stopped = [False] * len(self.prompts)
        self.n_read = list(self.lengths)  # of each row, the number of tokens of which texts tells
        is_over = None  # the rows that have met a stop text; the first result needs none
        with contextlib.closing(self.results):
            while True:
                self.model.clock.lap()
                try:
                    with self.model.parallel.mesh_context():
                        result = self.results.send(is_over)
                except StopIteration:
                    return
                self.laps.append(self.model.clock.lap())
                self.result = result
                self.read_texts()
                yield self
                if all(self.stopped):
                    return
                is_over = self.stopped

    def finish(self) -> 'Generation':
        """Generates all, and returns itself."""
        for _ in self:
            pass
        return self

    def pieces(self, *, with_prompt: bool = True) -> Iterator[str]:
        """Generates, and yields what is new of the first text, and will not change, after each
        chunk."""
        # what was shown stays; what may still become a stop text is held back
        n_shown = 0 if with_prompt else len(self.prompt_texts[0])
        longest_stop = max(map(len, self.stops), default=0)
        with contextlib.closing(iter(self)) as chunks:
            for _ in chunks:
                text = self.texts[0]
                if not self.stopped[0]:
                    # its end may be an incomplete character, or the beginning of the stop text
                    text = strip_partial_utf8(text)
                    text = text[:max(0, len(text) - longest_stop)]
                yield text[n_shown:]
                n_shown = max(n_shown, len(text))
        # the end, which nothing can change any more
        yield self.texts[0][n_shown:]

    def was_cut(self, i: int) -> bool:
        """Whether sample i ends because it has max_new_tokens tokens."""
        # a row may have met its end with the last token that it could have
        length = self.result.lengths[i]
        is_full = length == self.lengths[i] + self.max_new_tokens
        last = self.result.tokens[i, length - 1]
        has_ended = self.stopped[i] or last in self.model.tokenizer.stop_tokens
        return bool(is_full and not has_ended)

    def describe(self, i: int) -> dict:
        """Returns sample i: its prompt, text, finish reason ('stop' text, 'end' token or 'length')
        and log-probability, which is that of the tokens that reach the end of the text."""
        # the log-probability of the text that is shown
        tokens = self.result.tokens[i, :self.result.lengths[i]].tolist()
        n_prompt = self.lengths[i]
        if self.stopped[i]:
            tokens = self.tokens_to_the_end(i, tokens)
        (logprobs, _), = self.model.score([[(tokens, n_prompt)]])[0]
        if self.stopped[i]:
            reason = 'stop'
        elif self.was_cut(i):
            reason = 'length'
        else:
            reason = 'end'
        return {
            'prompt': self.prompt_texts[i], 'text': self.texts[i][len(self.prompt_texts[i]):],
            'finish_reason': reason, 'logprob': float(logprobs.sum(dtype=np.float64))}

    def tokens_to_the_end(self, i, tokens):
        """Returns the first of the tokens of sample i: as many as reach the end of its text, which
        is before the stop text."""
        # more tokens have a longer text, so that the first number that reaches it is searched by
        # halving
        length = len(self.texts[i])

        def reaches_the_end(n):
            return len(self.model.tokenizer.decode(tokens[:n])) >= length

        n = bisect.bisect_left(
            range(len(tokens)), True, lo=self.lengths[i], key=reaches_the_end)
        return tokens[:n]

    def choose_chunk(self):
        """Returns the number of tokens to generate until the texts are looked at again.

        For a reader it is 1, until one took less than SLOW_TOKEN, then STREAM_CHUNK, as always in
        several processes, whose clocks differ. Where a stop text is searched for, it is STOP_CHUNK,
        or an eighth of the tokens so far, which bounds both what is generated past the stop text
        and how often a long text is searched. Else it is all."""
        if self.streaming:
            fastest = min((lap.running for lap in self.laps[1:]), default=SLOW_TOKEN)
            if fastest < SLOW_TOKEN or jax.process_count() > 1:
                return STREAM_CHUNK
            return 1
        if self.must_search:
            n_generated = int(np.max(self.result.lengths - self.lengths))
            return max(STOP_CHUNK, n_generated // 8)
        return self.max_new_tokens

    def read_texts(self):
        """Sets texts and stopped; a stop text counts after the prompt."""
        for i, length in enumerate(self.result.lengths.tolist()):
            # a row that has ended is as it was
            if length == self.n_read[i]:
                continue
            self.n_read[i] = length
            text = self.model.tokenizer.decode(self.result.tokens[i, :length].tolist())
            # (end, start) of each stop text; the one that is complete first counts, in any chunks
            found = []
            for stop in self.stops:
                start = text.find(stop, len(self.prompt_texts[i]))
                if start >= 0:
                    found.append((start + len(stop), start))
            if found:
                _, start = min(found)
                text = text[:start]
            self.texts[i] = text
            self.stopped[i] = bool(found)


def prompt_numbers(prompts):
    """Returns a number for each prompt, uint32 [B], which is that of its token ids alone: their
    CRC-32 as int32 in little-endian order."""
    return np.array([zlib.crc32(np.array(ids, '<i4').tobytes()) for ids in prompts], np.uint32)


def token_of_letter(text, tokenizer):
    """Returns the id of the token that is this character, if every token is a character of the
    text, so that no other one can bring it; else None."""
    if len(text) != 1:
        return None
    if isinstance(tokenizer, CharTokenizer):
        is_unique = tokenizer.chars.count(text) == 1
        return tokenizer.ids[text] if is_unique else None
    # a Hugging Face folder of characters, as write_char_tokenizer makes it
    is_of_letters = getattr(tokenizer, 'has_letters_only', False)
    if not is_of_letters or tokenizer.tokenizer.decoder_kinds() != {'Fuse'}:
        return None
    token = tokenizer.ids.get(text)
    if token in tokenizer.special_ids:  # which decoding leaves out
        return None
    return token
