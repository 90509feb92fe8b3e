"""The caches: rings for sliding layers and for the drafter, growing buffers for full layers.

A position always sits in the same row (ring: position mod rows), so results do not depend on how the
history was fed, and rollback is a smaller offset, never a copy. Letters: Hk key/value heads, D head size,
T rows of this call, Tk rows attended.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import mlx.core as mx

from .config import FULL, TargetConfig, kv_group, max_rows, ring_rows
from .drafter_config import DrafterConfig
from .errors import DFlashError, InputError, must
from .kernels.block_attention import Block
from .kernels.serving import Reach
from .rows import GROWTH_ROWS, QuantisedRows, Rows

if TYPE_CHECKING:
    from typing_extensions import Self

# A ring that has not wrapped is attended up to the next multiple of this.
TARGET_SLICE, DRAFTER_SLICE = 64, 16


def ring_mask(offset: int, rows: int, held: int, capacity: int, span: int, causal: bool, start: int = 0) -> mx.array:
    """Which ring rows each query sees, as bool [rows, held].

    Args:
        offset: position of the first query; its row and all later ones are written already.
        rows: queries, at positions offset..offset+rows-1.
        held: leading ring rows that are attended.
        capacity: rows of the ring.
        span: positions p with |q - p| < span are visible.
        causal: only p <= q is visible.
        start: the oldest valid position.
    """
    last = offset + rows - 1
    query, back = mx.arange(offset, last + 1), mx.arange(last, last - held, -1)
    return _visible(query, back, mx.array(last), mx.array(start), capacity, span, causal)


@partial(mx.compile, shapeless=True)
def _visible(
    query: mx.array, back: mx.array, last: mx.array, start: mx.array, capacity: int, span: int, causal: bool
) -> mx.array:
    """`ring_mask` of queries at these positions, over the rows 0, 1, .. that lie `back` rows before the row `last`."""
    key = last - back % capacity  # the newest position <= last that lives in the row
    distance = query[:, None] - key[None]
    near = (distance >= 0) & (distance < span) if causal else mx.abs(distance) < span
    return near & (key >= start)[None]


def ring_reach(block: Block, rows: int, capacity: int, slice_rows: int) -> Reach:
    """What a block's rows see of a ring: its leading rows up to the next multiple of `slice_rows`, and a mask."""
    [first], [start] = block.first, block.starts
    held = min(capacity, -(-(first + rows) // slice_rows) * slice_rows)
    return Reach(block, held, ring_mask(first, rows, held, capacity, block.span, block.causal, start))


def full_reach(first: int, rows: int) -> Reach:
    """What rows from position `first` on see of a layer that keeps all rows."""
    return Reach(Block((first,)), first + rows, "causal" if rows > 1 else None)


class History:
    """What all caches share: how many rows are held, and how far back they may be taken.

    Attributes:
        offset: position of the next row to be written; rows past it are leftovers to be overwritten.
        start: the oldest position whose ring row has not been overwritten.
        end: the position after the newest row that was written, kept or not.
    """

    layers: Sequence[Rows | QuantisedRows]

    def __init__(self, window: int):
        self.window, self.ring = window, ring_rows(window)
        self.offset = self.start = self.end = 0

    @property
    def rings(self) -> list[Rows]:
        """The layers that are rings; these are never quantised."""
        return [layer for layer in self.layers if isinstance(layer, Rows)]

    def fork(self) -> Self:
        """Another history with the same rows, to go on from here on its own."""
        other = copy(self)
        other.layers = [layer.fork() for layer in self.layers]
        return other

    @property
    def arrays(self) -> list[mx.array]:
        """All keys and values, to be evaluated together with what a round reads."""
        return [array for layer in self.layers for part in layer.parts for array in (part.keys, part.values)]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    @property
    def max_rows(self) -> int:
        """Most rows that may be written at once and attended."""
        return max_rows(self.window)

    def reserve(self, rows: int) -> None:
        """Make room for `rows` rows past the offset; they may overwrite what no query can see any more."""
        if not 0 < rows <= self.max_rows:
            todo = "Feed the rows in smaller steps."
            raise DFlashError(must("cache", "rows of one forward", f"between 1 and {self.max_rows}", rows, todo))
        self.end = self.offset + rows
        self.start = max(self.start, self.end - self.ring)

    def advance(self, rows: int) -> None:
        """Keep `rows` rows that were written past the offset."""
        self.offset += rows

    def can_trim_to(self, position: int) -> bool:
        """Whether every row that a query at `position` sees is still there."""
        return position <= self.offset and self.start <= max(0, position - self.window)

    def trim_to(self, position: int) -> None:
        """Go back to `position` rows.

        Raises:
            DFlashError: the window before `position` has been overwritten.
        """
        if not self.can_trim_to(position):
            expected = f"at most {self.offset}, with the {self.window} positions before it still held"
            todo = f"The oldest held position is {self.start}; prefill again from the start."
            raise DFlashError(must("cache", "position to go back to", expected, position, todo))
        self.offset = position

    def ring_copies(self, first: int, position: int) -> list[mx.array]:
        """Copies of the ring rows of positions first..position-1, oldest first; lazy.

        Returns:
            Keys and values of each ring in turn, [1, Hk, position - first, D].
        """
        rows = mx.arange(first, position) % self.ring
        # Taken by index, which always copies: a slice would keep the whole ring alive, and rounds would copy it.
        return [mx.take(array, rows, axis=2) for ring in self.rings for array in (ring.keys, ring.values)]

    def put_back(self, first: int, position: int, copies: Sequence[mx.array]) -> None:
        """Hold the positions first..position-1 again, each in its own row; `copies` as `ring_copies` gave them."""
        rows = position - first
        for ring, keys, values in zip(self.rings if rows else (), copies[::2], copies[1::2], strict=True):
            ring.write(first, keys[:, :, :rows], values[:, :, :rows])
        self.start, self.offset = first, position


class TargetCache(History):
    """The target's keys and values of one session.

    Args:
        config: the target's.
        dtype: of keys and values.
        max_context: most positions that the full layers may hold.
        kv_bits: 8 quantises the full layers; `None` does not.
    """

    def __init__(self, config: TargetConfig, dtype: mx.Dtype, max_context: int, kv_bits: int | None = None):
        super().__init__(config.window)
        self.max_context = max_context
        self._full = [kind == FULL for kind in config.layer_types]
        first = min(GROWTH_ROWS, -(-max_context // GROWTH_ROWS) * GROWTH_ROWS)
        shape, group = (config.num_kv_heads, config.head_dim, dtype), kv_group(config.head_dim)

        def layer(full: bool) -> Rows | QuantisedRows:
            if full and kv_bits:
                return QuantisedRows(*shape, first, group)
            return Rows(*shape, first if full else self.ring)

        self.layers = [layer(full) for full in self._full]

    @property
    def rings(self) -> list[Rows]:
        kinds = zip(self.layers, self._full, strict=True)
        return [layer for layer, full in kinds if not full and isinstance(layer, Rows)]

    @property
    def full_layers(self) -> list[Rows | QuantisedRows]:
        """The layers whose rows no later position overwrites."""
        return [layer for layer, full in zip(self.layers, self._full, strict=True) if full]

    def reserve(self, rows: int) -> None:
        """As `History.reserve`; the full layers grow too.

        Raises:
            InputError: the context would be longer than `max_context`.
        """
        needed = self.offset + rows
        if needed > self.max_context:
            todo = "Load with a larger max_context, or shorten the prompt."
            raise InputError(must("cache", "the context", f"at most {self.max_context} tokens", needed, todo))
        super().reserve(rows)
        for layer, full in zip(self.layers, self._full, strict=True):
            if full:
                layer.grow(needed, self.max_context)


class DrafterContext(History):
    """The drafter's projected context of one session: keys and values of the last window per layer.

    A block's own rows are written past the offset as scratch and overwritten by the next context rows.
    """

    def __init__(self, config: DrafterConfig, dtype: mx.Dtype):
        super().__init__(config.window)
        self.layers: list[Rows] = [
            Rows(config.num_kv_heads, config.head_dim, dtype, self.ring) for _ in range(config.num_layers)
        ]

    def skip_to(self, position: int) -> None:
        """Leave out the positions before `position`: what was held is dropped."""
        self.offset = self.start = position


@dataclass(frozen=True)
class Part:
    """The rows of one session in a forward.

    Attributes:
        cache: the session's cache; the rows are written past its offset.
        rows: how many of the forward's tokens are this session's.
        logits: for how many of its last rows logits are wanted.
    """

    cache: TargetCache
    rows: int
    logits: int


class Lane:
    """One part during a forward: where its rows lie, and what they see (made once, used by all layers)."""

    def __init__(self, part: Part, begin: int):
        cache = part.cache
        cache.reserve(part.rows)
        self.rows = slice(begin, begin + part.rows)
        self.offset = cache.offset
        self._cache = cache
        self._sliding = ring_reach(Block((cache.offset,), cache.window), part.rows, cache.ring, TARGET_SLICE)
        self._full = full_reach(cache.offset, part.rows)

    def write(self, layer: int, full: bool, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array, Reach]:
        """Write T rows of a layer; returns keys and values as attention takes them, and what the rows see of them."""
        rows, reach = self._cache.layers[layer], self._full if full else self._sliding
        rows.write(self.offset, keys, values)
        return *rows.attended(reach.held), reach


def lanes(parts: Sequence[Part]) -> list[Lane]:
    """Lay the parts' rows one after the other."""
    result, begin = [], 0
    for part in parts:
        result.append(Lane(part, begin))
        begin += part.rows
    return result
