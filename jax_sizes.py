"""Sizes of what is compiled: few different ones, because each shape is a program of its own."""
from jax_flags import ceil_div

PIECE = 512  # prompts are prefilled in pieces of at most this many tokens


def power_of_two(n):
    """Returns the least power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def piece_length(n_tokens, least):
    """Returns the width of the pieces in which the prompts of generation are prefilled.

    16 (unless `least` is more) or 64 for short prompts, PIECE for long ones."""
    # a piece is computed with its padding, so that a short prompt has a narrow one
    if n_tokens <= 256:
        return max(least, 16 if n_tokens <= 16 else 64)
    return PIECE


def row_width(n_tokens):
    """Returns the width of the equal pieces in which rows that are scored are fed.

    It is at most PIECE, one of four sizes per octave, from 4 on: rows are often short, and padding
    to the next power of two would double their work."""
    # as few pieces as PIECE allows, of equal widths, rounded up to the sizes
    width = ceil_div(n_tokens, ceil_div(n_tokens, PIECE))
    step = max(4, power_of_two(width) // 8)
    return ceil_div(width, step) * step


def filled(rows, most):
    """Returns the rows and copies of the first: a power of two of them, or `most`."""
    n_rows = min(most, power_of_two(len(rows)))
    return rows + rows[:1] * (n_rows - len(rows))


def round_up_slots(n):
    """Returns the first of 512, 2048, 8192, ... that is at least n: slots of a KV cache."""
    n_slots = 512
    while n_slots < n:
        n_slots *= 4
    return n_slots


def choose_slots(needed, longest, block_size):
    """Returns the slots of a KV cache that needs `needed` now and `longest` at the end.

    That is all of them at once if they are at most twice round_up_slots(needed), else
    round_up_slots(needed), and the cache grows later. Never more than block_size."""
    # the slots at the end in steps of 32: a cache that never grows need not be a power of two
    n_slots = round_up_slots(needed)
    at_end = 32 * ceil_div(min(longest, block_size), 32)
    if at_end <= 2 * n_slots:
        n_slots = at_end
    return min(block_size, n_slots)
