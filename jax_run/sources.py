"""Turns token files into batches. Each kind of data is a class with these methods (a Mixture of
data sets has only draw and count_passes):

    draw(numbers, rows)         returns a training batch: the sequences numbers[rows] of the stream
    evaluation(n_rows, ...)     chooses the n_rows sequences that are read whenever the model is
                                evaluated; returns them as an Evaluation
    read(places)                returns the batch of the sequences at these places in the files, as
                                in Evaluation.places
    count_passes(n_sequences)   returns how many passes a run makes over the data if it draws
                                n_sequences sequences

and these attributes:

    block_size                  the number of tokens of a sequence
    is_packed                   whether a sequence can hold several conversations
    byte_scale                  the factor from bytes of tokens to bytes of text, see byte_scale

The stream is the endless sequence of all training sequences of a run, shuffled again in each pass
over the data. `numbers` has, for each sequence of an iteration, its position in the stream. `rows`
selects the positions that this process needs.

A batch depends only on the seed and the numbers of its sequences. So a run that is resumed
continues with the next sequence, and the same run on more devices sees the same data."""
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jax_devices.processes import gather_texts, in_all_processes
from jax_flags import UserError
from jax_hub.tokenizers import load_token_bytes
from jax_run.data import (
    byte_scale, check_not_cut, load_dataset, load_dataset_meta, load_ends, load_masks,
    relative_path)

DATA = 0  # goes into the seed of the random numbers for data; those of dropout have DROPOUT

# the values of a mask, a byte for each token
COUNTS = 1  # it counts in the loss, as an assistant's tokens do
STARTS = 2  # in packed rows: a conversation, or the padding, starts here


# -----------------------------------------------------------------------------
# the order of reading

class Order(NamedTuple):
    """Describes an endless stream of n rows or windows, shuffled again in each epoch.

    An epoch has each of them once. Row or window i begins at position offset + stride * i of the
    data. The offset is drawn for each epoch from 0 .. n_offsets - 1; it is 0 if n_offsets is 0."""
    n: int
    seed: int
    stride: int = 1
    n_offsets: int = 0

    def locate(self, numbers: np.ndarray) -> np.ndarray:
        """Returns where each sequence begins in the data, int64 [B]. numbers: the numbers of the
        sequences in the stream, int64 [B].

        An epoch has n sequences. Sequence k of the stream is number k % n of epoch k // n. It is
        row or window i = permutation[k % n] of the data, and begins at offset + stride * i. The
        offset and the permutation are those of shuffle_epoch for this epoch."""
        epochs, index = np.divmod(numbers, self.n)
        places = np.empty(len(numbers), np.int64)
        for epoch in np.unique(epochs):
            is_here = epochs == epoch
            offset, order = epochs_of(self)(int(epoch))
            places[is_here] = offset + self.stride * order[index[is_here]].astype(np.int64)
        return places


@functools.lru_cache(maxsize=1024)
def epochs_of(order: Order) -> Callable:
    """Returns a function f(epoch) with the result of shuffle_epoch(order, epoch). The function
    caches its last two results, because an iteration that crosses the end of an epoch reads from
    two epochs."""
    return functools.lru_cache(maxsize=2)(functools.partial(shuffle_epoch, order))


def shuffle_epoch(order: Order, epoch: int) -> tuple[int, np.ndarray]:
    """Shuffles an epoch of an Order. Returns (offset; permutation). offset: the position in the
    data at which window or row 0 of the epoch begins. permutation: the order in which the epoch
    reads its windows or rows, a permutation of 0 .. order.n - 1 in the smallest unsigned integer
    type that holds order.n."""
    rng = np.random.default_rng([order.seed, DATA, epoch])
    offset = int(rng.integers(order.n_offsets)) if order.n_offsets else 0
    return offset, rng.permutation(np.arange(order.n, dtype=np.min_scalar_type(order.n)))


def window_order(n_tokens: int, block_size: int, seed: int) -> Order:
    """Returns the Order of the windows in a text of n_tokens tokens. A window has block_size + 1
    tokens. The last token of a window is the first token of the next window.

    Each epoch has a random offset of its own, the position at which its leftmost window starts. The
    offset is drawn from 0, 1, ..., n_spare, where n_spare is the number of tokens that are in no
    window of the epoch.

    The text has room for (n_tokens - 1) // block_size windows, but an epoch has one window fewer.
    So n_spare is at least block_size, and over many epochs a window can start at any position. If
    the text has room for only one window, an epoch has this window, and n_spare is less than
    block_size."""
    n = max(1, (n_tokens - 1) // block_size - 1)
    return Order(n, seed, stride=block_size, n_offsets=n_tokens - n * block_size)


def get_batch_jax(tokens: np.ndarray, block_size: int, n_rows: int, seed: int, iteration: int,
                  rows: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Draws sequences of one iteration, which has n_rows of them. Returns (x; y), int32 [len(rows),
    block_size]. y is x shifted by one token: the next tokens. The result depends on the arguments
    alone.

    tokens: an array [n_tokens]. rows: the indices, below n_rows, of the sequences to return; by
    default all.

    The sequences come from an endless shuffled stream, in which an epoch holds every window once.
    An iteration begins at sequence number iteration * n_rows of the stream, so with another n_rows
    the same iteration has other sequences. nanoGPT draws windows at random instead, and an epoch's
    worth of draws misses 1/e of the tokens."""
    rows = np.arange(n_rows) if rows is None else rows
    windows = Windows(tokens, block_size=block_size, seed=seed)
    return windows.get(tokens, windows.locate(iteration * n_rows + rows))


# -----------------------------------------------------------------------------
# the kinds of data

class Evaluation(NamedTuple):
    """The sequences that every evaluation reads. They are the same for any seed and number of
    devices, so that curves can be compared."""
    places: np.ndarray  # of the sequences in the split, as Windows.locate returns them
    share: float = 1.0  # share of their targets that count in the loss
    n_bytes: float | None = None  # bytes of the targets that count; None: nobody asks for them
    has_special: bool = False  # whether a target that counts has no bytes (a special token)


class Windows:
    """A split of one long text: its sequences are windows of block_size tokens.

    tokens: an array [n_tokens]. mask: an array with the constant COUNTS for each token that counts
    and 0 for each other token (see load_masks); None if all tokens count. split: the name of the
    split, for messages. vocab_size: the size of the data set's vocabulary, for checks."""
    byte_scale = 1  # see data.byte_scale; open_texts sets it

    def __init__(self, tokens: np.ndarray, mask: np.ndarray | None = None, *, block_size: int,
                 seed: int, split: str = 'train', vocab_size: int = 2**32):
        self.tokens = tokens
        self.mask = mask
        self.block_size = block_size
        self.split = split
        self.vocab_size = vocab_size
        self.order = self.make_order(seed)

    @property
    def is_packed(self) -> bool:
        """Whether a row can hold several conversations, so that one can start in its middle."""
        return False

    def make_order(self, seed: int) -> Order:
        return window_order(len(self.tokens), self.block_size, seed)

    def get(self, array: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (x, y), each int32 [B, block_size]. x has the windows of `array` that start at
        `places`. y has the windows that start one token later. array: the tokens or their mask."""
        check_not_cut(array)
        windows = array[places[:, None] + np.arange(self.block_size + 1)].astype(np.int32)
        return windows[:, :-1], windows[:, 1:]

    def read(self, places: np.ndarray) -> dict[str, np.ndarray]:
        """Reads a batch of sequences. places: where they are in the split, [B], see locate().

        Returns {'x', 'y' int32 [B, block_size]} and, if there is a mask, 'weight' float32: 1 for
        targets that count, 0 for other targets. Raises UserError for an id outside the
        vocabulary."""
        x, y = self.get(self.tokens, places)
        check_ids(x, y, self.vocab_size, self.split)
        batch = {'x': x, 'y': y}
        if self.mask is not None:
            batch.update(self.read_mask(places))
        return batch

    def read_mask(self, places: np.ndarray) -> dict[str, np.ndarray]:
        """Reads the mask of the windows that start at `places`. Returns {'weight': float32 [B,
        block_size]}, see read()."""
        _, mask_y = self.get(self.mask, places)
        return {'weight': (mask_y == COUNTS).astype(np.float32)}

    def locate(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the place of each sequence in the split, int64 [B]. A place here is the index of
        a window's first token. In Rows, a place is the index of a row; in Pairs, the index of a
        conversation. numbers: the numbers of the sequences in the run's stream, int64 [B]."""
        return self.order.locate(numbers)

    def count(self, places: np.ndarray) -> int:
        """Returns how many targets of the sequences at `places` count in the loss."""
        _, mask_y = self.get(self.mask, places)
        return (mask_y == COUNTS).sum()

    def draw(self, numbers: np.ndarray,
             rows: np.ndarray | slice = slice(None)) -> dict[str, np.ndarray] | None:
        """Draws the sequences at the positions numbers[rows] of the run's stream. numbers: the
        positions of all sequences of an iteration, int64. rows: which of these sequences to return.

        Returns a batch as read() does, but scales its weights, if there is a mask. The weights then
        have a mean of 1 over the targets of the whole iteration, that is, of all sequences in
        `numbers`. So the mean of the weighted losses is the mean over the tokens that count,
        however the batch is split into micro-batches and over devices. Returns None if the whole
        iteration has no target that counts."""
        places = self.locate(numbers)
        batch = self.read(places[rows])
        if 'weight' not in batch:
            return batch
        return scale_weights(batch, self.count(places), len(numbers) * self.block_size)

    def count_passes(self, n_sequences: float) -> float:
        """Returns the number of passes over the split, if n_sequences sequences are drawn from
        it."""
        return n_sequences / self.order.n

    def spread(self, n_rows: int) -> np.ndarray:
        """Returns the start positions of n_rows windows that are spread evenly over the split, from
        its first to its last window."""
        last = len(self.tokens) - 1 - self.block_size  # the start of the last window
        return np.arange(n_rows) * last // max(1, n_rows - 1)

    def evaluation(self, n_rows: int, token_bytes: np.ndarray | None = None) -> Evaluation:
        """Returns the Evaluation: the n_rows sequences that every evaluation reads, the share of
        their targets that counts in the loss, and the number of bytes of the targets that count.

        token_bytes: the number of bytes of each token id, for bits per byte. With None, the
        Evaluation has no number of bytes. Raises UserError if no target is part of the loss."""
        places = self.spread(n_rows)
        if self.mask is None and token_bytes is None:  # nothing to count: a start reads no windows
            return Evaluation(places)
        batch = self.read(places)
        counts = np.ones(batch['y'].shape, bool)
        if self.mask is not None:
            counts = batch['weight'] > 0
        if not counts.any():
            raise UserError(
                f'none of the {n_rows} {self.split} windows of an evaluation has a token that '
                "counts, such as an assistant's: use more eval_iters or a larger block_size")
        if token_bytes is None:
            return Evaluation(places, counts.mean())
        n_bytes = token_bytes[batch['y']]
        return Evaluation(
            places, counts.mean(),
            n_bytes=max(1, int((counts * n_bytes).sum()) * self.byte_scale),
            has_special=bool((counts & (n_bytes == 0)).any()))


class Rows(Windows):
    """A split that was prepared in rows of block_size + 1 tokens, each read as a whole.

    tokens and mask: [n_rows, block_size + 1]. If there is a mask, each row has several
    conversations, one after the other (packed rows). Batches then have the entries 'weight',
    'start' and 'padding' (see read_mask)."""

    @property
    def is_packed(self) -> bool:
        return self.mask is not None

    def make_order(self, seed: int) -> Order:
        return Order(len(self.tokens), seed)

    def get(self, array: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        check_not_cut(array)
        rows = array[places].astype(np.int32)
        return rows[:, :-1], rows[:, 1:]

    def read_mask(self, places: np.ndarray) -> dict[str, np.ndarray]:
        """Reads the mask of the rows with the indices `places`. Returns a dict of arrays [B,
        block_size]:
        - 'weight' float32: 1 for targets that count, 0 for other targets;
        - 'start' int32: where the conversation of each token starts in its row (see find_starts);
        - 'padding' bool: whether a token is padding."""
        mask = self.mask[places]
        weight = (mask[:, 1:] == COUNTS).astype(np.float32)
        padding = find_padding(mask)[:, :-1]
        return {'weight': weight, 'start': find_starts(mask[:, :-1]), 'padding': padding}

    def spread(self, n_rows: int) -> np.ndarray:
        """Returns the indices of n_rows rows that are spread evenly over the split, or of all rows
        if there are fewer."""
        n = min(n_rows, len(self.tokens))
        return np.arange(n) * len(self.tokens) // n


def scale_weights(batch: dict, n_counted: int, n_targets: int) -> dict | None:
    """Multiplies batch['weight'] by n_targets / n_counted, and returns the batch. The weights of
    all targets of the iteration then have a mean of 1. Returns None if no target counts. batch: all
    or a part of the iteration, changed in place. n_targets: the number of targets of the iteration.
    n_counted: how many of these targets count in the loss."""
    if not n_counted:
        return None
    batch['weight'] = (batch['weight'] * (n_targets / n_counted)).astype(np.float32)
    return batch


def find_starts(mask_x: np.ndarray) -> np.ndarray:
    """Returns where the conversation of each token starts, int32 [n_rows, T], as a position in the
    token's row.

    mask_x: the mask of packed rows [n_rows, T], with STARTS at the first token of a conversation or
    of the padding. A token before the first STARTS of its row gets 0."""
    position = np.arange(mask_x.shape[1], dtype=np.int32)
    return np.maximum.accumulate(np.where(mask_x == STARTS, position, 0), axis=1)


def find_padding(mask: np.ndarray) -> np.ndarray:
    """Returns which tokens of packed rows are padding, bool [n_rows, T]. mask: the mask of the
    rows. Its value is STARTS at the first token of each conversation and of the padding (see
    find_starts).

    Only the last part of a row can be padding. This part begins at the last position of the row
    where the mask is STARTS. It is padding if none of its tokens counts in the loss, because each
    conversation has a token that counts."""
    last_start = find_starts(mask)[:, -1:]
    is_last = np.arange(mask.shape[1]) >= last_start
    has_counts = (is_last & (mask == COUNTS)).any(1, keepdims=True)
    return is_last & ~has_counts


def check_ids(x: np.ndarray, y: np.ndarray, vocab_size: int, split: str) -> None:
    """Raises UserError if the sequences x and y of a split have an id outside the vocabulary of
    vocab_size tokens. load_dataset has not checked the ids, because it trusts meta.json."""
    if max(x.view(np.uint32).max(), y.view(np.uint32).max()) >= vocab_size:
        raise UserError(f'the {split} tokens have an id outside the vocabulary of {vocab_size}, '
                        'but meta.json says that they have none: they have been changed; run the '
                        'prepare.py of the data set again')


class Pairs(Windows):
    """The pairs of answers of a split, for DPO. Leaves out a pair if one of its two conversations
    does not fit in a row of block_size positions.

    In the data, conversations 2 i and 2 i + 1 are pair i: the same prompt, with the chosen answer
    and with the rejected answer. The stream shuffles whole pairs. Its sequences 2 p and 2 p + 1 are
    the chosen and the rejected conversation of one pair. Each sequence is padded at its end.

    ends: where each conversation ends in the tokens. mask: an array with the constant COUNTS for
    each token of an answer, and 0 for each other token. length_normalized: whether the weight of an
    answer's token is 1 / (number of tokens of the answer), instead of 1. Raises UserError if no
    pair fits."""
    def __init__(self, tokens: np.ndarray, mask: np.ndarray, ends: np.ndarray, *,
                 length_normalized: bool, block_size: int, split: str, **options: Any):
        self.bounds = np.append(0, ends)
        self.length_normalized = length_normalized
        longest = np.diff(self.bounds).reshape(-1, 2).max(1) - 1  # positions of a row
        self.fitting = np.flatnonzero(longest <= block_size)
        if not len(self.fitting):
            raise UserError(f'all {split} pairs are longer than block_size={block_size}: use at '
                            f'least {longest.min()}')
        n_left_out = len(longest) - len(self.fitting)
        if n_left_out:
            print(f'{n_left_out} of {len(longest)} {split} pairs are longer than '
                  f'block_size={block_size}: left out')
        super().__init__(tokens, mask, block_size=block_size, split=split, **options)

    def make_order(self, seed: int) -> Order:
        return Order(len(self.fitting), seed)

    def read(self, conversations: np.ndarray) -> dict[str, np.ndarray]:
        """Reads conversations by their numbers, an array [B], and pads each to a row.

        Returns {'x', 'y' int32, 'weight' float32, 'padding' bool}, each [B, block_size]."""
        check_not_cut(self.tokens)
        check_not_cut(self.mask)
        ids = np.zeros((len(conversations), self.block_size + 1), np.int32)
        counts = np.zeros(ids.shape, np.float32)
        is_padding = np.ones(ids.shape, bool)
        for i, conversation in enumerate(conversations):
            start, end = self.bounds[conversation:conversation + 2]
            ids[i, :end - start] = self.tokens[start:end]
            counts[i, :end - start] = self.mask[start:end]
            is_padding[i, :end - start] = False
        x, y = ids[:, :-1], ids[:, 1:]
        check_ids(x, y, self.vocab_size, self.split)
        weight = counts[:, 1:]
        if self.length_normalized:
            weight /= np.maximum(weight.sum(1, keepdims=True), 1)
        return {'x': x, 'y': y, 'weight': weight, 'padding': is_padding[:, :-1]}

    def locate(self, numbers: np.ndarray) -> np.ndarray:
        pair, is_rejected = np.divmod(numbers, 2)
        return 2 * self.fitting[self.order.locate(pair)] + is_rejected

    def count_passes(self, n_sequences: float) -> float:
        return n_sequences / (2 * self.order.n)

    def draw(self, numbers: np.ndarray,
             rows: np.ndarray | slice = slice(None)) -> dict[str, np.ndarray]:
        """Draws the sequences at the positions numbers[rows] of the run's stream. numbers: the
        positions of all sequences of an iteration, int64. rows: which of these sequences to return.

        Returns the batch as read() does. Unlike Windows.draw, does not scale batch['weight'], the
        weights of the targets in the loss, because scaling would change the margins of DPO."""
        return self.read(self.locate(numbers[rows]))

    def evaluation(self, n_rows: int, token_bytes: np.ndarray | None = None) -> Evaluation:
        """Returns the Evaluation: the n_rows // 2 pairs of conversations that every evaluation
        reads, or all pairs if there are fewer. token_bytes has no effect: pairs have no bits per
        byte."""
        n = min(n_rows // 2, len(self.fitting))
        chosen = self.fitting[np.arange(n) * len(self.fitting) // n]
        return Evaluation((2 * chosen[:, None] + [0, 1]).ravel())


class Mixture:
    """A mixture of several data sets. A fixed fraction of the sequences is drawn from each.

    parts: the data sets, each with its own stream of sequences. Either all parts have a mask, or no
    part has one. fractions: one for each part, with a sum of 1."""
    def __init__(self, parts: list[Windows], fractions: list[float]):
        self.parts = parts
        self.fractions = fractions
        self.block_size = parts[0].block_size

    @property
    def is_packed(self) -> bool:
        return any(part.is_packed for part in self.parts)

    def draw(self, numbers: np.ndarray,
             rows: np.ndarray | slice = slice(None)) -> dict[str, np.ndarray] | None:
        """Draws a batch, as Windows.draw does."""
        which, own = assign(numbers, self.fractions)
        batch = {}
        for k in np.unique(which[rows]):
            is_here = which[rows] == k
            part = self.parts[k].read(self.parts[k].locate(own[rows][is_here]))
            for name, values in part.items():
                # zeros: only packed rows have 'start' and 'padding'; in other rows the first token
                # is the start, and nothing is padding
                zeros = np.zeros((len(is_here), self.block_size), values.dtype)
                batch.setdefault(name, zeros)[is_here] = values
        if 'weight' not in batch:
            return batch
        if self.is_packed:
            # a compiled step expects the same names in every batch, also in one without packed rows
            for name, dtype in (('start', np.int32), ('padding', bool)):
                batch.setdefault(name, np.zeros(batch['x'].shape, dtype))
        n_counted = 0
        for k in np.unique(which):
            n_counted += self.parts[k].count(self.parts[k].locate(own[which == k]))
        return scale_weights(batch, n_counted, len(numbers) * self.block_size)

    def count_passes(self, n_sequences: float) -> float:
        """Returns the number of passes over the most repeated part of the mixture, if n_sequences
        sequences are drawn from the mixture."""
        passes = []
        for part, fraction in zip(self.parts, self.fractions):
            passes.append(part.count_passes(fraction * n_sequences))
        return max(passes)


def assign(numbers: np.ndarray, fractions: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """Assigns the sequences of a run, given by their numbers, to the parts of a mixture.

    Returns (index of the part; number of the sequence in the part's own stream), each int64 [B].
    For every N, each part gets its fraction of the first N sequences, with an error of at most
    len(fractions) sequences. For example, with fractions 0.5, 0.25, 0.25:

        number    0  1  2  3  4  5  6  7
        part      2  1  0  0  2  1  0  0
        own       0  0  0  1  1  1  2  3

    The loop goes from the last part to the first. Part k takes its share of the sequences that are
    still unassigned, and leaves the rest to the parts 0 .. k - 1."""
    # Whole numbers, so that all processes come to the same parts.
    ends = np.rint(np.cumsum(fractions) * 10**6).astype(np.int64)  # in millionths
    which = np.zeros_like(numbers)
    own = numbers  # of an unassigned sequence: the number of unassigned sequences before it
    for k in range(len(ends) - 1, 0, -1):
        # how many of these part k leaves to other parts; and the same with the sequence itself
        n_left = own * ends[k - 1] // ends[k]
        n_left_with_it = (own + 1) * ends[k - 1] // ends[k]
        is_unassigned = which == 0
        is_here = is_unassigned & (n_left == n_left_with_it)
        own = np.where(is_here, own - n_left, np.where(is_unassigned, n_left, own))
        which = np.where(is_here, k, which)
    return which, own


# -----------------------------------------------------------------------------
# the data of a run

class DataSet(NamedTuple):
    name: str
    fraction: float  # share of a run's sequences
    splits: dict  # {'train', 'val'}: a source
    files: dict  # {name of a file in its folder: its numbers as an array}
    digests: dict  # {name of a file: SHA-256 as meta.json says}; {} if it does not


class Data(NamedTuple):
    """The data of a run. The run trains on sequences of `train`. It evaluates the model on the
    splits of each DataSet in `sets`."""
    sets: list[DataSet]
    train: Windows | Mixture
    token_bytes: np.ndarray | None = None  # bytes of each token id; None: not known
    # 'tokens' or 'text': the bytes that the metric "bits per byte" counts. It is 'text' if the text
    # of a split has another number of bytes than its tokens.
    bpb_bytes: str = 'tokens'

    def check(self, n_rows: int) -> None:
        """Raises UserError if a split has no token that counts in the loss among the n_rows
        sequences of an evaluation."""
        for one in self.sets:
            for source in one.splits.values():
                source.evaluation(n_rows)


def open_data(shares: dict[Path, float], meta: dict, *, block_size: int, seed: int,
              length_normalized: bool = False) -> Data:
    """Opens the data sets of a run. Returns Data.

    shares, meta: what load_mixture_meta returns. length_normalized: see Pairs. All processes call
    this function; open_manifest compares the data of the processes. Raises UserError for files that
    are missing or damaged."""
    options = dict(block_size=block_size, seed=seed, vocab_size=meta['vocab_size'])
    with in_all_processes():
        if meta['kind'] == 'pairs':
            folder, = shares
            sets = [open_pairs(folder, length_normalized, options)]
        else:
            sets = open_texts(shares, options)

    # The training set: the only set, or a mixture of all.
    train = sets[0].splits['train']
    if len(sets) > 1:
        train = Mixture([one.splits['train'] for one in sets], [one.fraction for one in sets])

    # For bits per byte: how many bytes each token stands for.
    token_bytes = None
    if meta['kind'] != 'pairs':
        token_bytes = load_token_bytes(meta['tokenizer'], meta['vocab_size'])
        known = gather_texts('known' if token_bytes is not None else '')
        if not all(known):  # all processes have them, or none
            token_bytes = None

    bpb_bytes = 'tokens'
    for one in sets:
        for source in one.splits.values():
            if source.byte_scale != 1 and token_bytes is not None:
                bpb_bytes = 'text'

    return Data(sets, train, token_bytes, bpb_bytes)


def open_texts(shares: dict[Path, float], options: dict) -> list[DataSet]:
    """Opens data sets of texts or conversations. Returns a list of DataSets. If any data set has
    masks, each split without a mask gets a mask in which every token counts. shares: {folder:
    fraction}. options: keyword arguments of Windows."""
    tokens = {}
    masks = {}
    for folder in shares:
        tokens[folder] = load_dataset(folder, options['block_size'])
        masks[folder] = load_masks(folder, tokens[folder])

    # If others have masks, a set without one gets a mask of ones: all its tokens count.
    is_masked = any(masks.values())
    sets = []
    for folder, fraction in shares.items():
        meta = load_dataset_meta(folder)
        splits = {}
        files = {f'{split}.bin': array for split, array in tokens[folder].items()}
        files |= {f'{split}_mask.bin': array for split, array in masks[folder].items()}
        for split, array in tokens[folder].items():
            mask = masks[folder].get(split)
            if is_masked and mask is None:
                mask = np.broadcast_to(np.uint8(COUNTS), array.shape)
            splits[split] = open_source(array, mask, split=split, **options)
            splits[split].byte_scale = byte_scale(meta, split)
        sets.append(DataSet(folder.name, fraction, splits, files, meta['digests'] or {}))
    return sets


def open_source(tokens: np.ndarray, mask: np.ndarray | None = None, **options: Any) -> Windows:
    """Returns a source of tokens. The source is a Rows, a subclass of Windows, if the tokens were
    prepared in rows, [n_rows, block_size + 1]. The source is a Windows if the tokens are one long
    text, [n_tokens]. mask, options: the other arguments of Rows and Windows."""
    kind = Rows if tokens.ndim == 2 else Windows
    return kind(tokens, mask, **options)


def open_pairs(folder: Path, length_normalized: bool, options: dict) -> DataSet:
    """Opens a data set of pairs. Returns a DataSet. length_normalized: see Pairs. options: further
    keyword arguments of Pairs."""
    tokens = load_dataset(folder, 0)  # sequences of any length
    masks = load_masks(folder, tokens)
    splits = {}
    files = {}
    for split, array in tokens.items():
        ends = load_ends(relative_path(folder) / f'{split}_ends.bin', len(array))
        files |= {f'{split}.bin': array, f'{split}_mask.bin': masks[split],
                  f'{split}_ends.bin': ends}
        splits[split] = Pairs(array, masks[split], ends, length_normalized=length_normalized,
                              split=split, **options)
    return DataSet(folder.name, 1.0, splits, files, load_dataset_meta(folder)['digests'] or {})
