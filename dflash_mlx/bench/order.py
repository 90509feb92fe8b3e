"""The order of modes over repeats: a Latin square, so that drift and carry-over fall on all of them alike."""

from __future__ import annotations


def latin_square(count: int) -> list[list[int]]:
    """Give rows of 0..count-1, each number once in every row and in every column.

    For an even count each number also follows each other one equally often; an odd count gets its mirror rows too.
    Source: Williams 1949, designs balanced for residual effects.
    """
    first, low, high = [0], 1, count - 1
    while low <= high:
        first.append(low)
        if low < high:
            first.append(high)
        low, high = low + 1, high - 1
    rows = [[(value + shift) % count for value in first] for shift in range(count)]
    return rows if count % 2 == 0 else rows + [row[::-1] for row in rows]


def orders(modes: list[str], repeats: int) -> list[list[str]]:
    """Give the order of the modes in each repeat; balanced where `repeats` is a multiple of the square's rows."""
    square = latin_square(len(modes))
    return [[modes[place] for place in square[repeat % len(square)]] for repeat in range(repeats)]
