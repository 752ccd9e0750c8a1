"""A model that takes and gives text, from a run, a Hugging Face folder or name, or a ckpt.pt.

    from jax_text import load
    model = load('out-mine')
    print(model.generate(['Once upon a time'], max_new_tokens=100)[0])
"""
import bisect
import contextlib
import dataclasses
import functools
import itertools
import secrets
import sys
import zlib
from collections.abc import Generator, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jax_devices.choose import config_for_decoding
from jax_devices.layout import Layout, setup_distributed_training
from jax_devices.processes import check_agreement
from jax_devices.setup import Lap, Stopwatch, setup_jax_environment
from jax_flags import TextSampling, UserError, check_ranges, shows_fields
from jax_generate import (
    PrefixCache, Prompts, fold_in_each, right_padded, score_in_pieces, start_rows)
from jax_hub.folders import local_path
from jax_hub.tokenizers import (
    CharTokenizer, check_template, decoder_kinds, describe_tokenizer, limit_vocabulary,
    load_tokenizer, strip_partial_utf8)
from jax_ops.decode_weights import (
    convert_params_for_decoding, order_columns_by_rank, transpose_kernels)
from jax_ops.matmul import without_scales
from jax_run.checkpoints import describe_checkpoint, is_run
from jax_run.restore import restore_run
from jax_transformer import GPTConfig, count_params

SAMPLING = {'temperature': 0.8, 'top_k': 200}  # nanoGPT's; the other controls are off
# tokens generated between two updates of a text that is shown while it grows
STREAM_CHUNK = 8
SLOW_TOKEN = 0.05  # seconds: a text with slower tokens is updated after each
# tokens generated between two searches for stop texts; an eighth of those so far, if that is more
STOP_CHUNK = 8


def load(source: str, *, checkpoint: str = '', base: str = '', dataset: str = '',
         device: str = 'auto', dtype: str = 'auto', quantize: str = '', tensor: int = 1,
         expert: int = 1) -> 'TextModel':
    """Returns the TextModel of a run's out_dir, a Hugging Face folder or name ('gpt2',
    'owner/name'), or a ckpt.pt.

    checkpoint: which checkpoint of a run, 'best' (lowest validation loss; the default) or 'latest'.
    base: the new place of a LoRA run's pretrained model, if that model has moved.
    dataset: the folder under data/ whose meta.json describes the tokenizer of a ckpt.pt.
    device, dtype: see setup_jax_environment.
    quantize: 'int8' or '' (off).
    tensor: the number of devices over which heads, MLP width and vocabulary are sharded. expert:
    the number of devices over which experts are sharded. With several processes, tensor * expert
    must be the number of all devices.

    Raises UserError for a source that is missing or damaged, and for options that do not fit the
    source or the devices."""
    devices, dtype, reason = setup_jax_environment(device, dtype)
    clock = Stopwatch()
    # the first tensor * expert devices
    n_devices = tensor * expert
    if not 1 <= n_devices <= len(devices):
        raise UserError(f'tensor={tensor} x expert={expert} needs {n_devices} devices, and there '
                        f'are {len(devices)}')
    if jax.process_count() > 1 and n_devices < len(devices):
        raise UserError(f'tensor={tensor} x expert={expert} must be {len(devices)}, all devices of '
                        f'the {jax.process_count()} processes')
    devices = devices[:n_devices]
    layout = setup_distributed_training(devices, tensor=tensor, expert=expert)

    # the model, and its tokenizer
    if dataset and is_run(source):
        raise UserError(f'dataset={dataset} describes the tokenizer of a ckpt.pt; the checkpoints '
                        f'of the run {source} have their own: leave it out')
    found = read_model(source, checkpoint=checkpoint, base=base, with_tokenizer=not dataset,
                       layout=layout, dtype=dtype, quantize=quantize)
    description = found.tokenizer
    if dataset:
        from jax_run.data import dataset_folder, load_dataset_meta
        folder = dataset_folder(dataset)
        description = load_dataset_meta(folder)['tokenizer']
    tokenizer = load_fitting_tokenizer(description, source, found.config)

    title = f'{found.name}; {tensor} x {devices[0].device_kind}, compute in {dtype} ({reason})'
    loading = clock.lap()
    return TextModel(found.params, found.config, tokenizer, layout, title=title,
                     clock=clock, loading=loading, about=found.about)


def load_fitting_tokenizer(description, source, config):
    """Returns the tokenizer that `description` describes.

    If the model has no rows for the last tokens, and these are special tokens, the tokenizer loses
    them (limit_vocabulary). If it has more tokens than the model otherwise, raises UserError.
    Raises UserError also if `description` is None; the message names `source`. config: the model's
    GPTConfig."""
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
    """The result of read_model."""
    params: dict  # on the mesh, as decoding reads them
    config: GPTConfig  # its dtype is the compute dtype
    tokenizer: dict | None  # description of it; None if it is unknown or was not asked for
    name: str  # for the user
    about: dict | None = None  # for a run: see describe_checkpoint


def read_model(source, *, checkpoint, base, with_tokenizer, layout, dtype, quantize):
    """Returns the LoadedModel of a source; see load.

    with_tokenizer: whether to read the tokenizer of pretrained weights. A caller with another
    tokenizer passes False, because the tokenizer of the weights may be unreadable. For a run,
    with_tokenizer has no effect, because a run's checkpoint always describes the tokenizer."""
    if is_run(source) or checkpoint:
        found = read_run(source, checkpoint, base, layout, dtype, quantize)
    elif base:
        raise UserError(f'base is for a LoRA run, and {source} is none')
    else:
        found = read_pretrained(source, with_tokenizer, layout, dtype, quantize)

    # the model computes in `dtype`, whatever dtype it was stored in; with tensor parallelism the
    # columns of c_attn are ordered by rank
    config = config_for_decoding(found.config, layout, dtype)
    params = found.params
    if layout.sizes.tensor > 1:
        with layout.mesh_context():
            params = order_columns_by_rank(params, found.config)
    return found._replace(params=params, config=config)


def read_run(source, checkpoint, base, layout, dtype, quantize):
    """Returns the LoadedModel of the run in the folder `source`. The arguments are those of
    read_model. checkpoint='' takes the best checkpoint."""
    # the checkpoint, as decoding reads it
    config, params, lora, meta = restore_run(source, checkpoint or 'best', layout, base)
    if lora:
        from jax_run.load import load_merged  # it reads pretrained models
        params = load_merged(lora, config, layout, params)
    params = convert_params_for_decoding(params, dtype, quantize)
    taken = meta['iter_num']
    name = f'{source}, checkpoint of iteration {taken}'
    about = describe_checkpoint(source, taken, meta)
    if jax.process_count() > 1:  # each process reads its own files
        check_agreement('checkpoints', about)
    return LoadedModel(params, config, meta['tokenizer'], name, about)


def read_pretrained(source, with_tokenizer, layout, dtype, quantize):
    """Loads pretrained weights, and returns a LoadedModel. source: a folder or hub name of Hugging
    Face, or the path of a ckpt.pt. The other arguments are those of read_model."""
    is_one_cpu = len(layout.devices) == 1 and layout.devices[0].platform == 'cpu'

    def place(path, array):
        """Returns one parameter on its devices, in the form that decoding reads. The next parameter
        is read only after this one is placed. So a model that becomes int8 is never in memory as a
        whole in float32."""
        part = unflatten_dict({path: array})
        if is_one_cpu:
            # views: the device takes over kernels that the file stores [out, in]
            part = transpose_kernels(part)
        part = layout.device_put(part)
        return flatten_dict(convert_params_for_decoding(part, dtype, quantize))[path]

    # a matrix that becomes int8 is read as it is stored
    from jax_pretrained import load_together  # here, because our own runs do not need it
    folder = local_path(source)
    config, params = load_together(folder, 'stored' if quantize else dtype, place)
    description = None
    if with_tokenizer:
        description = describe_tokenizer(folder, config.vocab_size)
    return LoadedModel(params, config, description, str(source))


@dataclasses.dataclass(repr=False)
class TextModel:
    """A model for texts.

    Methods that continue texts take a TextSampling (sampling=...), fields of TextSampling by name
    (temperature=0), or both. A field given by name overrides the field of `sampling`."""
    params: dict  # as decoding reads them
    config: GPTConfig  # its dtype is the compute dtype
    tokenizer: Any
    layout: Layout
    title: str = ''  # a line for the user: where the model is from, and how it computes
    clock: Stopwatch = dataclasses.field(default_factory=Stopwatch)
    loading: Lap | None = None  # how long loading took, in seconds
    about: dict | None = None  # for a run: iteration, digests of its manifest and of its files

    def __repr__(self):
        n_params = count_params(without_scales(self.params), non_embedding=False)
        return (f'{self.title}; {n_params:,} parameters, context of '
                f'{self.config.block_size:,} tokens')

    @property
    def defaults(self) -> dict[str, float]:
        """Returns the sampling controls that apply where a call gives none: those of the model's
        generation_config.json, else nanoGPT's."""
        return {**SAMPLING, **self.tokenizer.sampling}

    @shows_fields(TextSampling)
    def generate(self, texts: str | list[str], *, sampling: TextSampling = TextSampling(),
                 num_samples: int = 1, first_sample: int = 0,
                 prefix_cache: PrefixCache | None = None, **changes) -> list[str] | str:
        """Continues each text num_samples times, all in one batch. Returns a list with num_samples
        results per text, in order. Each result is the text followed by a continuation. If `texts`
        is a single text and num_samples is 1, returns a text, not a list.

        A continuation depends only on the text, the options and the index of the sample, not on the
        batch: generate([text] * 8) gives eight equal results, generate(text, num_samples=8) eight
        different ones. A text longer than the context is continued from its last tokens, with a
        warning on stderr.
        sampling: a TextSampling. changes: fields of TextSampling by name, as max_new_tokens=100.
        For the other parameters see Generation. Raises UserError for an invalid text or option."""
        is_one = isinstance(texts, str)
        texts = list_of_texts(texts, 'generate')
        prompts = [self.encode(text) for text in texts]
        generation = self.continue_prompts(
            prompts, sampling, changes, num_samples=num_samples, first_sample=first_sample,
            prefix_cache=prefix_cache)
        generated = generation.finish().texts
        return generated[0] if is_one and num_samples == 1 else generated

    @shows_fields(TextSampling)
    def stream(self, prompt: str | list[dict[str, str]], *,
               sampling: TextSampling = TextSampling(), first_sample: int = 0,
               prefix_cache: PrefixCache | None = None, **changes) -> Iterator[str]:
        """Yields the text that generate returns, piece by piece while it is generated. If `prompt`
        is the messages of a chat, yields the answer only.

        The options are those of generate. Raises UserError as generate does. Also raises UserError
        if `prompt` is a list of texts, or messages for a model without a chat template."""
        is_chat = not isinstance(prompt, str)
        if is_chat and not is_list_of(prompt, dict):
            raise UserError('stream takes one text, or the messages of one chat; for several texts '
                            'call generate')
        generation = self.continue_prompts(
            [self.encode(prompt)], sampling, changes, first_sample=first_sample, streaming=True,
            prefix_cache=prefix_cache)
        return generation.pieces(with_prompt=not is_chat)

    @shows_fields(TextSampling)
    def chat(self, messages: str | list[dict[str, Any]], *, tools: list[dict] | None = None,
             chat_template_kwargs: dict[str, Any] | None = None,
             sampling: TextSampling = TextSampling(), first_sample: int = 0,
             prefix_cache: PrefixCache | None = None, **changes) -> str:
        """Returns the answer to the messages of a chat, a list of {'role': role, 'content': text};
        a role is 'system', 'user' or 'assistant'. A text stands for one message of the user. For
        gpt-oss, returns the final channel only.

        tools: JSON schemas of functions that the model may call.
        chat_template_kwargs: more variables of the chat template, as {'enable_thinking': False}.
        The other options are those of generate. Raises UserError as generate does, and if the model
        has no chat template."""
        # the answer is the generated text after the prompt
        if isinstance(messages, str):
            messages = [{'role': 'user', 'content': messages}]
        prompt = self.encode(messages, tools=tools, chat_template_kwargs=chat_template_kwargs)
        generation = self.continue_prompts(
            [prompt], sampling, changes, first_sample=first_sample, prefix_cache=prefix_cache)
        generation.finish()
        from jax_hub.chats import final_answer
        return final_answer(generation.texts[0][len(generation.prompt_texts[0]):])

    @shows_fields(TextSampling)
    def serve(self, requests: Iterable[str | list[dict[str, Any]] | dict[str, Any]], *,
              batch_size: int = 8, sampling: TextSampling = TextSampling(),
              **changes) -> Iterator[dict[str, Any]]:
        """Yields the answer to each request as soon as the answer is finished: a dict of 'number',
        the index of the request, and the keys of Generation.describe. At most batch_size answers
        are generated at a time. When an answer ends, the next request starts.

        requests: texts, lists of chat messages, or dicts. A dict has 'prompt', a text or messages.
        It may also have fields of TextSampling by name, and 'first_sample': requests with the same
        prompt but different values of 'first_sample' get different random numbers. The next request
        is read only when its answer can start. So `requests` may be a generator that makes a
        request from answers that were yielded before.
        sampling, changes: the values of options that a request does not set.
        If a request is a text, the answer's 'text' is the continuation that generate makes, without
        the prompt. If a request is messages, 'text' is what chat returns. Raises UserError as
        generate and chat do; answers that were yielded before the error are complete."""
        check_ranges({'batch_size': batch_size})
        if requests is None or isinstance(requests, (str, dict)):
            raise UserError('serve takes a list of requests, or another iterable of them')
        from jax_apps.batching import Batch  # here, because a single text does not need it
        batch = Batch(batch_size)
        sampling = dataclasses.replace(sampling, **changes)
        waiting = enumerate(requests)
        answers = []  # unfinished ones
        while True:
            # all new answers join the batch before the others continue
            new = []
            for number, request in itertools.islice(waiting, batch_size - len(answers)):
                answer = self.make_answer(number, request, sampling, batch)
                next(answer)
                new.append(answer)
            answers = [*new, *answers]
            if not answers:
                return
            # each answer gets a chunk
            unfinished = []
            for answer in answers:
                finished = next(answer)
                if finished is None:
                    unfinished.append(answer)
                else:
                    yield finished
            answers = unfinished

    def make_answer(self, number, request, sampling, batch):
        """Generates the answer to a request of serve. Yields None when the answer has joined the
        batch, and again after each chunk of tokens except the last one. After the last chunk,
        yields the answer, a dict.

        number: the index of the request. sampling: a TextSampling with the options that the request
        does not set. batch: the Batch that decodes the answer."""
        if not isinstance(request, dict):
            request = {'prompt': request}
        names = [field.name for field in dataclasses.fields(TextSampling)]
        unknown = request.keys() - {'prompt', 'first_sample', *names}
        if unknown or 'prompt' not in request:
            raise UserError(f'request {number} needs a prompt, and may have first_sample and fields '
                            f'of TextSampling, not {sorted(unknown)}')
        first_sample = request.get('first_sample', 0)
        if not isinstance(first_sample, (int, np.integer)):
            raise UserError(
                f'request {number}: first_sample must be a number, not {first_sample!r}')
        changes = {name: request[name] for name in names if name in request}
        prompt = request['prompt']
        generation = self.continue_prompts(
            [self.encode(prompt)], sampling, changes, logprobs=True, batch=batch,
            first_sample=first_sample)
        generation.begin()
        yield None
        with contextlib.closing(iter(generation)) as chunks:
            for _ in chunks:
                if not generation.decoder.is_over:  # else the answer makes room at once
                    yield None
        answer = {'number': number, **generation.describe(0)}
        if not isinstance(prompt, str):
            from jax_hub.chats import final_answer
            answer['text'] = final_answer(answer['text'])
        yield answer

    def continue_prompts(self, prompts, sampling, changes, **options):
        """Returns the Generation that continues `prompts`, lists of token ids. Warns on stderr if a
        prompt is longer than the context. changes: {field of TextSampling: value}. options: see
        Generation."""
        warn_if_too_long(self, prompts)
        return Generation(self, prompts, dataclasses.replace(sampling, **changes), **options)

    def logprobs(self, texts: str | list[str], *, max_length: int = 0, batch_size: int = 16,
                 cache_dtype: str = 'auto') -> list[tuple] | tuple:
        """Returns for each text the pair (ids of the scored tokens; their natural
        log-probabilities, float32 [n]). For a text that is not in a list, returns one pair, not a
        list.

        The token that begins a document is put in front of each text, or the token that ends a
        document if the tokenizer has no other. So the text's first token is scored, too. If the
        tokenizer has neither, as one of characters, the first token is not scored. For the options
        see jax_generate.score. Raises UserError for an empty text, and for a text of one token
        that nothing precedes."""
        # an item of one row for each text; all tokens but the first are scored
        is_one = isinstance(texts, str)
        texts = list_of_texts(texts, 'logprobs')
        rows = [self.encode_document(text) for text in texts]
        for text, ids in zip(texts, rows):
            if len(ids) < 2:
                raise UserError(f'{text!r:.40} is too short: it has no token to score')
        items = [[(ids, 1)] for ids in rows]
        scores = self.score(
            items, max_length=max_length, batch_size=batch_size, cache_dtype=cache_dtype)
        results = []
        for ids, [(logprobs, _)] in zip(rows, scores):
            results.append((ids[1:], logprobs))
        return results[0] if is_one else results

    def score(self, items: list, *, max_length: int = 0, batch_size: int = 16,
              cache_dtype: str = 'auto', with_top: bool = False) -> list[list[tuple]]:
        """Returns the log-probabilities of given tokens by this model; see jax_generate.score."""
        *_, results = self.score_in_pieces(
            items, max_length=max_length, batch_size=batch_size, cache_dtype=cache_dtype,
            with_top=with_top)
        return results

    def score_in_pieces(self, items: list, **options: Any) -> Iterator[list[list[tuple]]]:
        """Computes score(items, **options). Yields the results, still incomplete, after each piece,
        so that the caller can do other work in between. The results that are yielded last are
        complete."""
        pieces = score_in_pieces(self.params, self.config, items, **options)
        while True:
            with self.layout.mesh_context():
                results = next(pieces, None)
            if results is None:
                return
            yield results

    def logits(self, text: str) -> np.ndarray:
        """Returns the logits of the token after each token of a text, float32 [T, V].

        The tokens are encode(text), as for generate. Raises UserError if the model is on several
        devices, or the text is longer than the model's context."""
        return self.look_inside(text, 'logits')

    def hidden_states(self, text: str) -> np.ndarray:
        """Returns the input of the first layer and the output of each layer, float32 [n_layer + 1,
        T, D]. The output of the last layer is taken after the final norm, as in transformers'
        output_hidden_states. `text` and the errors are as in logits()."""
        return self.look_inside(text, 'hidden_states')

    def attention(self, text: str) -> np.ndarray:
        """Returns the attention probabilities of each head, float32 [n_layer, H, T (queries), T
        (keys)], as transformers' output_attentions. `text` and the errors are as in logits()."""
        return self.look_inside(text, 'attention')

    def look_inside(self, text: str, part: str) -> np.ndarray:
        """Returns an intermediate result for a text, see jax_run/inside.py."""
        from jax_run.inside import look_inside  # here, because generating does not need it
        return look_inside(self, self.encode(text), part)

    def encode_document(self, text: str) -> list[int]:
        """Returns the token ids of a text, preceded by the token that begins a document. If the
        tokenizer has no such token, the token that ends a document precedes the text. If the
        tokenizer has neither token, nothing precedes the text."""
        # a tokenizer may put the token there by itself
        ids = self.tokenizer.encode(text)
        start = self.tokenizer.start_token
        has_start = self.tokenizer.encode('')[:1] == [start]
        if start is None or has_start:
            return ids
        return [start, *ids]

    def encode(self, prompt: str | list[dict[str, Any]], *, tools: list[dict] | None = None,
               chat_template_kwargs: dict[str, Any] | None = None) -> list[int]:
        """Returns the token ids of a text. For the messages of a chat, returns the ids of the
        messages and of the beginning of the next answer.

        tools, chat_template_kwargs: see chat.
        Raises UserError for an empty prompt, for anything that the tokenizer or the chat template
        does not know, and for what the template leaves out (see check_is_written)."""
        if not isinstance(prompt, str | list | tuple):
            raise UserError(f'a prompt is a text or a list of messages, not {prompt!r:.60}')
        # the chat template makes a text of messages, with all special tokens
        if not isinstance(prompt, str):
            check_template(self.tokenizer)
            from jax_hub.chats import check_is_written
            ids = self.tokenizer.encode_chat(prompt, tools=tools, variables=chat_template_kwargs)
            check_is_written(self.tokenizer, prompt, tools, chat_template_kwargs)
            return ids
        ids = self.tokenizer.encode(prompt)
        if not ids:
            raise UserError('the prompt is empty; give at least one character, as in --start="A"')
        return ids

    def encode_answer(self, messages: list[dict[str, Any]]) -> tuple[list[int], int]:
        """Returns (ids, start), a row that score() accepts. ids[:start] are all messages but the
        last, followed by the beginning of an answer. ids[start:], which are scored, are the last
        message and the token that ends it.

        Raises UserError as encode does, and if the template leaves the answer out."""
        before = self.encode(messages[:-1])
        encoded = self.tokenizer.encode_training_chat(messages, counted=[len(messages) - 1])
        answer = [id for id, counts in zip(encoded.ids, encoded.mask) if counts]
        if not answer:
            raise UserError('the chat template writes nothing of the answer')
        return [*before, *answer], len(before)

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], int]:
        """Returns a row for score, (ids, start). ids[start:] are the tokens to score, those of the
        continuation.

        Without a context, the row begins with the tokenizer's start token (see encode_document). If
        the tokenizer has no such token, the first token of the continuation is not scored, because
        no token precedes it.

        Texts are divided into tokens as in lm-eval: spaces at the end of the context belong to the
        continuation. Raises UserError if there is no token to score, for example because the
        continuation is empty."""
        # the context alone has `start` tokens. Of both texts together, all tokens after the first
        # `start` are scored, even if a token lies across the border
        before = context.rstrip()
        text = context + continuation
        tokenizer = self.tokenizer
        if before:
            # a text that already begins with the text of the start token gets no second one
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


def is_list_of(values, kind):
    """Returns whether `values` is a list, tuple or array of at least one value, all of type
    `kind`."""
    is_list = isinstance(values, (list, tuple, np.ndarray)) and len(values) > 0
    return is_list and all(isinstance(value, kind) for value in values)


def list_of_texts(texts, method):
    """Returns `texts`, one text or a list, tuple or array of texts, as a list.

    Raises UserError, which names the method, for anything else."""
    if isinstance(texts, str):
        return [texts]
    if is_list_of(texts, dict):
        raise UserError(f'{method} takes texts, and these are messages: call chat, or stream')
    if not is_list_of(texts, str):
        raise UserError(f'{method} takes a text or a list of texts, not {texts!r:.60}')
    return list(texts)


class Generation:
    """Prompts and their continuations so far. Each step of an iteration over a Generation generates
    the next chunk.

    prompts: for each row, the token ids of its prompt. Each prompt has num_samples rows.
    texts: for each row, its prompt and its continuation so far, without the stop text and what
    follows it.
    stopped: for each row, whether its text has met a stop text.
    result: the GenerationResult.
    laps: a Lap for each chunk. The first chunk is the prefill and the first decode step."""

    def __init__(self, model: TextModel, prompts: list[list[int]], sampling: TextSampling, *,
                 num_samples: int = 1, first_sample: int | list[int] = 0, streaming: bool = False,
                 prefix_cache: PrefixCache | None = None, logprobs: bool = False, batch=None):
        """Prepares num_samples rows for each prompt, without generating anything. Some invalid
        options raise UserError only when the first chunk is generated.

        prompts: lists of token ids.
        sampling: a TextSampling. Controls that are None get the value of the model's
        generation_config.json, else of SAMPLING.
        num_samples: the number of different samples of each prompt. A prompt that is given twice
        has the same samples twice.
        first_sample: the index of each prompt's first sample; the next samples have the next
        indices. If num_samples is 1, first_sample may be a list with one index for each prompt. A
        sample's random numbers depend on the seed, the prompt and the index.
        streaming: whether chunks are small (see choose_chunk).
        prefix_cache, logprobs: see jax_generate.generate_stream.
        batch: a Batch (jax_apps/batching.py) that decodes the row of this Generation together with
        the rows of other Generations; None decodes it alone. With a Batch there must be exactly one
        row, that is, one prompt and num_samples=1."""
        check_ranges({'num_samples': num_samples})
        sampling.check()
        self.model = model
        self.batch = batch
        self.streaming = streaming
        tokenizer = model.tokenizer
        stop = [sampling.stop] if isinstance(sampling.stop, str) else sampling.stop
        self.stops = [text for text in (*stop, *tokenizer.stop_texts) if text]
        # a stop text that is one token ends a row in the compiled loop; others are searched for
        stop_tokens = [token_of_letter(text, tokenizer) for text in self.stops]
        self.must_search = None in stop_tokens
        stop_tokens = [token for token in stop_tokens if token is not None]
        self.prompts = [prompt for prompt in prompts for _ in range(num_samples)]
        # new tokens may complete a character in which token ids of a caller end
        self.prompt_texts = [
            strip_partial_utf8(tokenizer.decode(prompt)) for prompt in self.prompts]
        self.lengths = [len(prompt) for prompt in self.prompts]
        self.laps = []
        self.texts = list(self.prompt_texts)
        self.stopped = [False] * len(self.prompts)
        self.n_read = list(self.lengths)  # number of tokens of each row that texts has

        # how to sample: the caller's values, else those of generation_config.json, else nanoGPT's
        defaults = {
            **model.defaults, 'n_vocab': tokenizer.vocab_size, 'seed': secrets.randbelow(2**32)}
        missing = {name: value for name, value in defaults.items()
                   if getattr(sampling, name) is None}
        self.sampling = dataclasses.replace(
            sampling, **missing,
            stop_tokens=(*sampling.stop_tokens, *tokenizer.stop_tokens, *stop_tokens))

        # a sample's random numbers are a function of the seed, its prompt (the CRC-32 of the ids,
        # int32 in little-endian order) and its number: equal prompts have equal samples, and
        # samples of different prompts are independent
        key = jax.random.key(self.sampling.seed)
        prompt_numbers = np.array(
            [zlib.crc32(np.array(ids, '<i4').tobytes()) for ids in self.prompts], np.uint32)
        key_B = fold_in_each(jnp.broadcast_to(key, len(self.prompts)), prompt_numbers)
        sample_numbers = first_sample
        if not isinstance(first_sample, list):
            sample_numbers = [*range(first_sample, first_sample + num_samples)] * len(prompts)
        self.start = functools.partial(
            start_rows, model.params, model.config,
            Prompts(right_padded(self.prompts), key_B, self.lengths, sample_numbers),
            self.sampling, prefix_cache=prefix_cache, logprobs=logprobs)
        self.decoder: Any = None  # a Decoder, or with a batch a Row, from begin() on

    def begin(self) -> None:
        """Prefills the prompts, if this Generation has no shared Batch.

        With a Batch, this Generation has one row, and only adds the row to the Batch. The Batch
        prefills the row's prompt when it next generates tokens, together with the prompts of other
        rows that have joined meanwhile."""
        with self.model.layout.mesh_context():
            decoder = self.start(reads=self.batch is None)
        self.decoder = decoder if self.batch is None else self.batch.join(decoder)

    def __iter__(self) -> Generator['Generation', None, None]:
        """Generates, and yields this Generation after each chunk. Can be called once."""
        clock, layout = self.model.clock, self.model.layout
        clock.lap()
        if self.decoder is None:
            self.begin()
        decoder = self.decoder
        with contextlib.closing(decoder):
            n_new = 1  # the first lap is the prefill and one token
            while True:
                with layout.mesh_context():
                    self.result = decoder.advance(n_new)
                self.laps.append(clock.lap())
                self.read_texts()
                # continue the rows that have not met a stop text
                if any(self.stopped):
                    with layout.mesh_context():
                        decoder.end_rows(self.stopped)
                yield self

                clock.lap()
                if decoder.is_over:
                    return
                n_new = self.choose_chunk()

    def finish(self) -> 'Generation':
        """Generates all tokens, and returns this Generation."""
        for _ in self:
            pass
        return self

    def pieces(self, *, with_prompt: bool = True) -> Iterator[str]:
        """Generates the tokens, and yields the text of the first row piece by piece. After each
        chunk of tokens, yields the new text that later tokens cannot change. At the end, yields the
        rest. with_prompt: whether the prompt is yielded, too."""
        # text that was shown cannot change; text that may still become a stop text is held back
        n_shown = 0 if with_prompt else len(self.prompt_texts[0])
        longest_stop = max(map(len, self.stops), default=0)
        with contextlib.closing(iter(self)) as chunks:
            for _ in chunks:
                text = self.texts[0]
                if not self.stopped[0]:
                    # the end may be an incomplete character, or the beginning of a stop text
                    text = strip_partial_utf8(text)
                    text = text[:max(0, len(text) - longest_stop)]
                yield text[n_shown:]
                n_shown = max(n_shown, len(text))
        # the end, which nothing can change any more
        yield self.texts[0][n_shown:]

    def was_cut(self, i: int) -> bool:
        """Returns whether sample i ended because it has max_new_tokens new tokens."""
        return self.result.finish_reasons[i] == 'length' and not self.stopped[i]

    def describe(self, i: int) -> dict:
        """Returns {'prompt', 'text', 'finish_reason', 'logprob'} of sample i, which was generated
        with logprobs.

        prompt, text: the texts of the prompt and of the continuation. finish_reason: 'stop' (a stop
        text), 'end' (a stop token) or 'length'. logprob: the sum of the log-probabilities of the
        generated tokens. If a stop text ended the continuation, the sum leaves out the tokens after
        the last token of `text`."""
        if self.stopped[i]:
            reason = 'stop'
        elif self.was_cut(i):
            reason = 'length'
        else:
            reason = 'end'
        end = self.result.lengths[i]
        if self.stopped[i]:
            end = self.tokens_to_the_end(i)
        logprobs = self.result.logprobs[i, self.lengths[i]:end]
        return {
            'prompt': self.prompt_texts[i], 'text': self.texts[i][len(self.prompt_texts[i]):],
            'finish_reason': reason, 'logprob': float(logprobs.sum(dtype=np.float64))}

    def tokens_to_the_end(self, i):
        """Returns the number of tokens of sample i up to the token that completes the text
        self.texts[i]. This text ends before the stop text. The tokens of the prompt are counted,
        too."""
        # once the text is complete, more tokens only continue it: a binary search finds the least
        # number of tokens. Before, its last character may be an incomplete one
        tokens = self.result.tokens[i, :self.result.lengths[i]].tolist()
        text = self.texts[i]

        def is_complete(n):
            return self.model.tokenizer.decode(tokens[:n]).startswith(text)

        return bisect.bisect_left(range(len(tokens)), True, lo=self.lengths[i], key=is_complete)

    def choose_chunk(self):
        """Returns the number of tokens to generate in the next chunk. After each chunk, read_texts
        decodes the new tokens and searches the texts for stop texts.

        With streaming, chunks have 1 token until a step takes less than SLOW_TOKEN seconds. From
        then on they have STREAM_CHUNK tokens. With several processes they always have STREAM_CHUNK
        tokens, because the clocks of the processes differ.
        Without streaming, the chunk is max_new_tokens if no stop texts must be searched for.
        Otherwise it is STOP_CHUNK or an eighth of the tokens generated so far, whichever is more.
        This bounds both the tokens after the stop text and the number of searches in a long
        text."""
        if self.streaming:
            fastest = min((lap.running for lap in self.laps[1:]), default=SLOW_TOKEN)
            if fastest < SLOW_TOKEN or jax.process_count() > 1:
                return STREAM_CHUNK
            return 1
        if self.must_search:
            n_generated = int(np.max(self.result.lengths - self.lengths))
            return max(STOP_CHUNK, n_generated // 8)
        return self.sampling.max_new_tokens

    def read_texts(self):
        """Updates self.texts and self.stopped for the samples that have new tokens. A text is cut
        before its stop text. If several stop texts are found, the text is cut before the one that
        ends first; if several end at the same place, before the longest. Stop texts that begin in
        the prompt are ignored."""
        for i, length in enumerate(self.result.lengths.tolist()):
            # a row that has ended has no new tokens
            if length == self.n_read[i]:
                continue
            self.n_read[i] = length
            text = self.model.tokenizer.decode(self.result.tokens[i, :length].tolist())
            # (end, start) of each stop text; the first to be complete counts, whatever the chunks
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


def token_of_letter(text, tokenizer):
    """Returns the id of the token that stands for the character `text`, if no other token can write
    this character; else None. Generation asks this for each stop text. If a stop text has such a
    token, rows stop at the token. Otherwise, Generation searches the decoded texts for the stop
    text.

    Returns None in these cases:
    - `text` is not one character.
    - No token has this text, or several tokens have it.
    - The token is a special token, which decoding leaves out.
    - The tokenizer may have tokens of several characters, which could contain `text`."""
    if len(text) != 1:
        return None
    if isinstance(tokenizer, CharTokenizer):
        is_unique = tokenizer.chars.count(text) == 1
        return tokenizer.ids[text] if is_unique else None
    # a Hugging Face folder of characters, as write_char_tokenizer makes it
    is_of_letters = getattr(tokenizer, 'has_letters_only', False)
    if not is_of_letters or decoder_kinds(tokenizer.tokenizer) != {'Fuse'}:
        return None
    token = tokenizer.ids.get(text)
    if token in tokenizer.special_ids:  # decoding leaves special tokens out
        return None
    return token


def rendered_prompt(model, prompt):
    """Decodes `prompt`, a list of token ids, to the text that the chat template produced, including
    the special tokens."""
    return model.tokenizer.tokenizer.decode(prompt, skip_special_tokens=False)


def split_rows(prompts, num_samples, batch_size, done=()):
    """Divides the samples that are still to be generated into batches. Returns a list of batches,
    each a list of at most batch_size rows. A row is (index of the prompt, index of the sample).

    prompts: lists of token ids. num_samples: the number of rows of each prompt. done: the rows that
    already have a sample, and are left out. Rows with prompts of similar length share a batch.
    Within a batch, rows are sorted by their indices."""
    rows = [(number, index) for number in range(len(prompts)) for index in range(num_samples)
            if (number, index) not in done]
    rows.sort(key=lambda row: len(prompts[row[0]]))  # stable
    return [sorted(rows[i:i + batch_size]) for i in range(0, len(rows), batch_size)]


def warn_if_too_long(model, prompts):
    """Warns on stderr if a prompt has more tokens than the context of the model. prompts: lists of
    token ids."""
    block_size = model.config.block_size
    longest = max(len(prompt) for prompt in prompts)
    if longest > block_size:
        print(f'the prompt has {longest:,} tokens, the context of the model {block_size:,}: the '
              f'text is continued from the last {block_size:,}', file=sys.stderr)
