"""Decodes several answers together, although each begins and ends at its own time.

Without a Batch, a Generation gets its tokens from a Decoder of its own. With a Batch, each
Generation has one row of the Batch, and gets its tokens from a Row, which has the same methods as a
Decoder. The Generations take turns, in one thread. The Batch has a shared Decoder, which decodes
several rows together: the first Generation that asks for more tokens decodes a chunk for all rows,
and the others then find their tokens ready. In addition, each Row has a Decoder of its own, which
decodes the row while it is alone in the Batch. (A Batch that was made for a fixed number of rows
above 1, n_rows, uses the shared Decoder even then.) A row joins and leaves between two chunks, and
nobody waits for the end of another answer.

Each row has its own random numbers (jax_text.py) and its own sampling controls (stack_controls).
The other rows can influence a row's text only through the rounding of the row's logits. If the
logits are rounded differently, a token can, rarely, change. In the prefill, the rounding depends on
the number of rows and the padded length of the prompts that are prefilled together. In decoding,
the rounding depends on the number of rows, and on the number of slots of the KV cache that
attention reads. The longest row decides this number of slots (attend_to_used_slots)."""
import collections
import functools
import math
import time

import jax
import jax.numpy as jnp
import numpy as np

from jax_flags import UserError
from jax_generate import (
    Decoder, Unread, commit, copy_result, create_decode_state, filled, power_of_two, right_padded,
    stack_controls)
from jax_transformer import select_rows

CHUNK = 8  # tokens that each row gets before rows may join or leave again
SLOW_STEP = 0.05  # seconds: while steps take longer, a chunk is one
# the fields of a DecodeState that decoding changes, beside the cache and its counts
CHANGED = ('tokens_BxN', 'length_B', 'n_generated_B', 'done_B', 'logprob_BxN',
           'sampling_logprob_BxN')


class Row:
    """One row of a Batch. A Generation uses the Row as if it were a Decoder.

    The attribute `decoder` is the row's own Decoder. While the row has no place in the batch, this
    Decoder has the row's whole state. While the row has a place, this Decoder has only a copy of
    the row's state on the host, without the KV cache."""

    def __init__(self, batch, decoder):
        self.batch = batch
        self.decoder = decoder
        self.place = None  # the index of its row in the state of the batch
        self.n_read = 0  # new tokens that the caller has seen

    def advance(self, n_new):
        """Decodes more tokens and returns the GenerationResult of the row so far (see
        Batch.advance). Rows that share a Decoder are decoded together, so the call for one row may
        also have decoded tokens of this row. If there are such tokens that this method has not
        returned yet, decodes nothing and returns them. n_new: the largest number of tokens to
        decode, if the row is decoded by its own Decoder; rows that share a Decoder always decode
        one chunk."""
        result = self.batch.advance(self, n_new)
        self.n_read = self.n_generated
        self.decoder.n_end = self.n_generated
        return result

    def end_rows(self, is_over_B):
        """Ends the row if is_over_B, bool [1], says that the caller wants no more tokens."""
        self.decoder.end_rows(is_over_B)

    @property
    def has_unread(self):
        """Whether the row has tokens that its caller has not seen."""
        return self.n_generated > self.n_read

    @property
    def is_over(self):
        """Whether the row has ended and its caller has seen all tokens."""
        return self.decoder.is_over and not self.has_unread

    def close(self):
        """Leaves the batch."""
        self.batch.leave(self)

    @property
    def n_generated(self):
        return int(np.asarray(self.decoder.state.n_generated_B)[0])

    @property
    def length(self):
        return int(np.asarray(self.decoder.state.length_B)[0])

    @property
    def is_shared(self):
        """Whether the row can be decoded together with other rows. This is so if the row has not
        ended and fits into a KV cache. With learned position embeddings, a row longer than
        block_size has no cache, and gains nothing by sharing."""
        is_done = bool(np.asarray(self.decoder.state.done_B)[0])
        has_room = self.n_generated < self.decoder.sampling.max_new_tokens
        return not is_done and has_room and self.length <= self.decoder.max_cached

    def end_of_chunk(self, n_new):
        """Returns how many tokens the row will have generated in all after a chunk of n_new tokens.
        The chunk is shorter if the row reaches max_new_tokens or the end of the cache."""
        n_prompt = self.length - self.n_generated
        return min(self.n_generated + n_new, self.decoder.sampling.max_new_tokens,
                   self.decoder.max_cached + 1 - n_prompt)

    @property
    def kind(self):
        """The options that all rows of a batch must have in common: (options of the KV cache; size
        of the vocabulary)."""
        return self.decoder.cache_options, self.decoder.controls.n_vocab


class Batch:
    """A batch that decodes the rows of several answers together.

    With n_rows above 0, each step computes exactly n_rows rows, even if fewer are being decoded,
    and at most n_rows rows can be decoded together. The logits of a row then have the same bits, no
    matter how many other rows are decoded with it, as long as attention reads the same number of
    slots of the KV cache.

    With n_rows=0, each step computes as many rows as are being decoded, rounded up to a power of
    two. When rows leave, the batch does not shrink at once, because its whole state must be copied
    for this. Until it shrinks, a step computes up to twice as many rows as the remaining rows need.

    With n_rows=0 or n_rows=1, a row that is alone is not decoded by the Decoder of the Batch, but
    by the row's own Decoder, as without a Batch. Only this Decoder of one row may use drafts
    (speculative decoding)."""

    def __init__(self, n_rows=0):
        self.n_rows = n_rows
        self.rows = []
        self.places = []  # the Row in each place of the decoder, None if it is free
        self.decoder = None  # of the rows that have a place
        self.fastest = math.inf  # seconds of a step with this number of places

    def join(self, decoder):
        """Adds a Decoder of one row to the batch, and returns its Row. The row's prompt need not be
        prefilled yet, because advance() prefills it. Raises UserError if the row cannot be decoded
        together with the present rows."""
        row = Row(self, decoder)
        if self.rows and self.rows[0].kind != row.kind:
            raise UserError('answers that are made together need the same cache_dtype, drafts and '
                            'vocabulary')
        self.rows.append(row)
        return row

    def advance(self, row, n_new):
        """Returns the GenerationResult of a row so far. Before that, decodes more tokens if the
        row's caller has seen all tokens of the row.

        Usually decodes a chunk for all rows that can share the batch (Row.is_shared), see decode.
        In two cases decodes up to n_new tokens of this row alone, by the row's own Decoder:
        - the row cannot share the batch;
        - it is the only row that can share the batch, and the batch was made with n_rows=0 or
          n_rows=1.

        row: a Row. n_new: the largest number of tokens in these two cases, without effect
        otherwise. Raises RuntimeError if the row is not in the batch, as after an error in
        decode."""
        if row not in self.rows:
            raise RuntimeError('the decoding of several answers together has failed')
        if not row.has_unread:
            self.read_prompts()
            shared = [other for other in self.rows if other.is_shared]
            if row not in shared or len(shared) == 1 and self.n_rows <= 1:
                self.take_out(row)
                return row.decoder.advance(n_new)
            self.decode(shared)
        return copy_result(
            row.decoder.state, row.decoder.n_columns, row.decoder.sampling.max_new_tokens)

    def read_prompts(self):
        """Prefills the KV caches of the rows that have joined since the last call. Prompts of
        similar length are prefilled together. A prompt with a prefix in a PrefixCache is prefilled
        alone. If the Batch has a fixed number of rows (n_rows), every prompt is prefilled alone, so
        that a row gets the same bits whatever the other rows are."""
        groups = collections.defaultdict(list)
        for i, row in enumerate(self.rows):
            unread = row.decoder.unread
            if unread is None:
                continue
            fits = row.length <= row.decoder.max_cached
            together = fits and not unread.n_held and not self.n_rows
            groups[power_of_two(row.length) if together else -i].append(row.decoder)
        for decoders in groups.values():
            if len(decoders) == 1:
                decoders[0].read_prompts()
            else:
                read_together(decoders)

    def leave(self, row):
        """Removes a Row and frees its place. If the row has a PrefixCache, gives the row's KV cache
        back to the PrefixCache."""
        if row not in self.rows:
            return
        if row.decoder.prefix_cache is not None:
            self.take_out(row)
        elif row.place is not None:
            self.places[row.place] = None
        self.rows.remove(row)
        row.decoder.close()
        if not self.rows:
            self.clear()

    def clear(self):
        """Drops all rows, and the memory that they share."""
        self.rows = []
        self.places = []
        self.decoder = None

    def decode(self, rows):
        """Adds a chunk of at most CHUNK tokens to each of `rows`. The chunk is one token if a row
        has no token yet, so that its first token is there soon. The chunk is also one token if
        every step so far took longer than SLOW_STEP, so that clients see each token at once. With
        several processes, SLOW_STEP has no effect: their times differ, and they must choose the
        same chunk."""
        # the others make room
        for other in self.rows:
            if other not in rows:
                self.take_out(other)
        is_slow = self.fastest > SLOW_STEP and jax.process_count() == 1
        is_first = any(row.n_generated == 0 for row in rows)
        n_new = 1 if is_first or is_slow else CHUNK
        try:
            self.place_rows(rows)
            n_end_B = np.zeros(len(self.places), np.int32)
            for row in rows:
                n_end_B[row.place] = row.end_of_chunk(n_new)
            n_before = int(self.decoder.state.steps)
            started = time.perf_counter()
            self.decoder.decode_until(n_end_B)
            n_steps = int(self.decoder.state.steps) - n_before
            self.fastest = min(self.fastest, (time.perf_counter() - started) / n_steps)
        except BaseException:
            self.clear()  # the state may be incomplete
            raise

        # each row gets its part of the new state
        new = {name: np.array(getattr(self.decoder.state, name)) for name in CHANGED}
        for row in rows:
            state = row.decoder.state
            width = state.tokens_BxN.shape[1]
            parts = {}
            for name, x_B in new.items():
                if getattr(state, name) is not None:
                    parts[name] = x_B[row.place:row.place + 1]
                    if x_B.ndim == 2:
                        parts[name] = parts[name][:, :width]
            row.decoder.state = state.replace(**parts)

    def place_rows(self, rows):
        """Gives each of `rows` a place in the batch. The caller must first take all other rows out
        of the batch (take_out). Makes the Decoder of the batch if there is none.

        The number of places that fits the rows is n_places. If self.n_rows is set, n_places is
        self.n_rows. Otherwise n_places is len(rows), rounded up to a power of two, at least 2. The
        batch keeps its present number of places, and is resized to n_places in only three cases:
        - it has fewer places than there are rows;
        - it has more than 2 * n_places places;
        - a row needs more columns (one for each token) than the batch has; the batch then gets as
          many columns as that row needs."""
        n_places = self.n_rows or max(2, power_of_two(len(rows)))
        n_columns = max(row.decoder.state.tokens_BxN.shape[1] for row in rows)
        if self.decoder is None:
            self.start(rows[0].decoder, n_places, n_columns)
        # to shrink the state copies it, too: not before more than half of the places are free
        fits = len(rows) <= len(self.places) <= 2 * n_places
        if not fits or n_columns > self.decoder.n_columns:
            self.resize(n_places, max(n_columns, self.decoder.n_columns))
        for row in rows:
            if row.place is None:
                self.put(row)
        # a free place has one token: attention reads as many slots as the longest row has
        state = self.decoder.state
        is_free_B = [row is None for row in self.places]
        length_B = np.where(is_free_B, np.int32(1), state.length_B)
        self.decoder.state = state.replace(length_B=commit(length_B, self.decoder.params))
        self.decoder.controls = stack_controls(
            [row and row.decoder.controls for row in self.places])

    def start(self, decoder, n_places, n_columns):
        """Makes the Decoder of the batch, with the options of `decoder`. The new Decoder has
        n_places free places for rows, each with space for n_columns tokens."""
        state = create_decode_state(
            np.zeros((n_places, 1), np.int32), np.ones(n_places, np.int32),
            jnp.broadcast_to(decoder.state.key_B, n_places), n_columns, logprobs=True)
        self.decoder = Decoder(
            decoder.params, decoder.config, state, decoder.controls, decoder.sampling,
            longest=decoder.longest, n_columns=n_columns)
        self.decoder.drop_drafts()
        self.places = [None] * n_places
        self.fastest = math.inf

    def resize(self, n_places, n_columns):
        """Changes the number of places in the batch to n_places, each with space for n_columns
        tokens. Makes a new state for the batch's Decoder, and moves the present rows to its first
        places."""
        placed = [row for row in self.places if row]
        old_places = [row.place for row in placed]
        state = self.decoder.state
        parts = {name: getattr(state, name) for name in (*CHANGED, 'key_B', 'cache')}
        parts = select_rows(parts, np.array(old_places + [0] * (n_places - len(placed)), np.int32))
        for name in CHANGED:
            if parts[name].ndim == 2:
                n_more = n_columns - parts[name].shape[1]
                parts[name] = jnp.pad(parts[name], ((0, 0), (0, n_more)))
        self.decoder.state = commit(state.replace(**parts), self.decoder.params)
        self.decoder.n_columns = n_columns
        self.places = placed + [None] * (n_places - len(placed))
        self.fastest = math.inf
        for place, row in enumerate(placed):
            row.place = place

    def put(self, row):
        """Copies the state of a Row into a free place of the batch, and drops the row's own KV
        cache. The batch must have a free place."""
        decoder = row.decoder
        self.decoder.longest = max(self.decoder.longest, decoder.longest)
        self.decoder.grow(decoder.n_slots, len(self.places))
        state = decoder.state
        if state.logprob_BxN is None:
            zeros_BxN = np.zeros(state.tokens_BxN.shape, np.float32)
            state = state.replace(logprob_BxN=zeros_BxN, sampling_logprob_BxN=zeros_BxN)
        place = self.places.index(None)
        self.decoder.state = put_row(self.decoder.state, state, np.int32(place))
        self.places[place] = row
        row.place = place
        decoder.state = decoder.state.replace(cache=None)

    def take_out(self, row):
        """Takes away a row's place in the batch, if the row has one. The row's own Decoder gets the
        row's whole state back."""
        if row.place is None:
            return
        copy_cache(self.decoder, row.place, row.decoder)
        self.places[row.place] = None
        row.place = None


def read_together(decoders):
    """Prefills the KV caches of several Decoders in one batch. Each Decoder has one row, with a
    prompt that is not prefilled yet (Decoder.unread). The batch is filled up to a power of two with
    copies of the first row."""
    first = decoders[0]
    prompts = [decoder.unread.tokens_BxT[0, :decoder.unread.length_B[0]] for decoder in decoders]
    rows = filled(prompts, power_of_two(len(prompts)))
    tokens_BxT = right_padded(rows)
    length_B = np.array([len(row) for row in rows], np.int32)
    state = create_decode_state(
        tokens_BxT, length_B, jnp.broadcast_to(first.state.key_B, len(rows)), tokens_BxT.shape[1])
    together = Decoder(
        first.params, first.config, state, first.controls, first.sampling,
        longest=max(decoder.longest for decoder in decoders), n_columns=tokens_BxT.shape[1])
    together.unread = Unread(tokens_BxT, length_B)
    together.read_prompts()
    for i, decoder in enumerate(decoders):
        copy_cache(together, i, decoder)
        decoder.unread = None


def copy_cache(source, place, decoder):
    """Copies row `place` of the KV cache of the Decoder `source` to `decoder`, which has one
    row."""
    state = commit(decoder.state.replace(cache=None), decoder.params)
    decoder.state = state.replace(cache=take_row(source.state.cache, np.int32(place)))
    decoder.n_slots = source.n_slots


@jax.jit
def take_row(cache, place):
    """Returns the KV cache of the row at index `place` alone."""
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, place, 1), cache)


@functools.partial(jax.jit, donate_argnames='state')
def put_row(state, row, place):
    """Copies `row`, a DecodeState of one row, into the DecodeState `state` at row index `place`.
    Returns the new state. The arrays of `row` may be shorter than those of `state` (fewer tokens,
    fewer slots of the KV cache); zeros fill the rest. `state` is donated."""
    def put(x_B, x_1):
        if x_B.ndim == 0:  # counts of all steps
            return x_B
        missing = [(0, n - n_row) for n, n_row in zip(x_B.shape[1:], x_1.shape[1:])]
        if any(n for _, n in missing):
            x_1 = jnp.pad(x_1, [(0, 0), *missing])
        return jax.lax.dynamic_update_slice_in_dim(x_B, x_1, place, axis=0)

    return jax.tree.map(put, state, row)
