"""The filters top-p, min-p and top-k, with mlx-lm's order and edge rules, without a sort of the vocabulary where a
partition does, and without a partition of the whole where one of its pieces does.

All of them see `below`: logits less their row's largest, so 0 for the most likely token. Each keeps an upper part of
the row: every token that is more likely than some number. Letters: M rows, V vocabulary, K = top_k.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import mlx.core as mx

from .options import Options

PIECE = 2048  # a row this long is sorted in one launch on a GPU, in its fast memory; MLX's partition there is a sort


class Kept(NamedTuple):
    """What the filters keep: `below` [M, N] with -inf for what is dropped, of the tokens `ids` [M, N] (`None`: all).

    The tokens' scores, which are made from `below`, are kept in the same form.
    """

    below: mx.array
    ids: mx.array | None

    def take(self, rows: mx.array) -> mx.array:
        """Numbers of the kept tokens out of rows of the vocabulary, [M, V] -> [M, N]."""
        return rows if self.ids is None else mx.take_along_axis(rows, self.ids, axis=-1)

    def best(self) -> mx.array:
        """The token of each row's largest number, [M]."""
        columns = mx.argmax(self.below, axis=-1)
        return columns if self.ids is None else mx.take_along_axis(self.ids, columns[:, None], axis=-1)[:, 0]

    def largest(self, count: int) -> tuple[mx.array, mx.array]:
        """The tokens of each row's largest numbers, in no order, and these numbers, [M, K]; K is at most N."""
        numbers, columns = most_likely(self.below, min(count, self.below.shape[-1]))
        return columns if self.ids is None else mx.take_along_axis(self.ids, columns, axis=-1), numbers


def keep(below: mx.array, options: Options) -> Kept:
    """Apply what the options ask for to [M, V] float32.

    mlx-lm goes top-p, min-p, top-k. The first two keep a set that is closed under ties, and top-k keeps the K most
    likely of it: the same tokens, up to the choice among equals at its own edge, as the K most likely of all that lie
    in the set. So top-k goes first here, and where it is set, top-p sorts K numbers and not V.
    """
    top_k, ids = options.top_k, None
    total = None
    if 0 < top_k < below.shape[-1]:
        if 0 < options.top_p < 1:
            total = mx.exp(mx.logsumexp(below, axis=-1, keepdims=True))  # before anything is dropped
        below, ids = most_likely(below, top_k)
    least = None
    if 0 < options.top_p < 1:
        least = top_p_edge(below, options.top_p, total)
    if options.min_p > 0:
        edge = mx.array(math.log(options.min_p), dtype=below.dtype)
        least = edge if least is None else mx.maximum(least, edge)
    if least is not None:
        below = mx.where(below < least, -math.inf, below)
    return Kept(below, ids)


def most_likely(below: mx.array, top_k: int) -> tuple[mx.array, mx.array]:
    """The K largest of each row and their ids, [M, K] in no order: a partition, not a sort.

    Where K is small, the row is cut into pieces first: the K most likely of all are among the K most likely of each.
    """
    rows, width = below.shape
    ids = mx.broadcast_to(mx.arange(width, dtype=mx.uint32), (rows, width))
    while width > PIECE and top_k <= PIECE // 4:
        pieces = -(-width // PIECE)
        below = mx.pad(below, [(0, 0), (0, pieces * PIECE - width)], constant_values=-math.inf)
        found = largest(below.reshape(rows, pieces, PIECE), top_k)
        found = (found + PIECE * mx.arange(pieces, dtype=mx.uint32)[:, None]).reshape(rows, -1)
        below = mx.take_along_axis(below, found, axis=-1)
        # Where a row has fewer than K possible tokens, padding is found: its id stands for nothing, it stays at -inf.
        ids = mx.take_along_axis(ids, mx.minimum(found, width - 1), axis=-1)
        width = below.shape[-1]
    found = largest(below, top_k)
    return mx.take_along_axis(below, found, axis=-1), mx.take_along_axis(ids, found, axis=-1)


def largest(x: mx.array, count: int) -> mx.array:
    """Where the `count` largest numbers of the last axis are, in no order."""
    return mx.argpartition(x, kth=-count, axis=-1)[..., -count:]


def top_p_edge(below: mx.array, top_p: float, total: mx.array | None = None) -> mx.array:
    """The least likely token's `below` that top-p keeps, [M, 1]; all tokens as likely as that one stay.

    A token stays where the mass above it is less than `top_p` of the whole.

    Args:
        below: [M, N].
        top_p: between 0 and 1, both excluded.
        total: [M, 1], the whole mass where `below` is a part of the row; default that of `below`.
    """
    ordered = mx.sort(below, axis=-1)
    mass = mx.exp(ordered)
    above = mx.cumsum(mass, axis=-1, reverse=True, inclusive=False)
    if total is None:
        # From the same sum: where small terms are lost in it, they are lost on both sides of the comparison.
        total = above[..., :1] + mass[..., :1]
    dropped = mx.sum(above >= top_p * total, axis=-1, keepdims=True)
    # The most likely token always stays, also where top_p times the mass rounds to 0.
    return mx.take_along_axis(ordered, mx.minimum(dropped, ordered.shape[-1] - 1), axis=-1)
