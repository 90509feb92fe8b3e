"""What is tried when attention qualifies: this pair's shapes, in all situations that its caches can be in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import mlx.core as mx
import numpy as np

from ..cache import DRAFTER_SLICE, TARGET_SLICE, full_reach, ring_reach
from .block_attention import EVERYTHING, MAX_ROWS, Block, block_attention
from .launch import Device
from .places import AttentionPlace
from .qualify import Case
from .serving import DRAFTER, Reach, stock_attention

GARBAGE = 30.0  # size of what lies in rows that nobody may see: rejected drafts, and positions past the window
LARGE = 40.0  # deviation of scores whose exponential alone would overflow; an ordinary one is 1 to 4
CACHE_BYTES = 1 << 29  # most memory of the buffers that a chain rotates through
LEAST_LINKS = 4  # calls in a chain
Arrays = tuple[mx.array, mx.array, mx.array]


class AttentionTrial:
    """Trials of one place of attention.

    Args:
        place: its shapes.
    Attributes:
        contexts: positions of the first row in timed chains.
    """

    def __init__(self, place: AttentionPlace):
        self.place, self.dtype = place, place.dtype
        self._kind: mx.Dtype = getattr(mx, place.dtype)
        full = place.span == EVERYTHING
        last = place.capacity - MAX_ROWS
        self.contexts: Sequence[int] = (last // 8, last) if full else (3 * place.capacity + 5,)
        self._buffers: list[tuple[mx.array, mx.array]] = []

    def _block(self, first: int, start: int = 0) -> Block:
        return Block((first,), self.place.span, self.place.causal, (start,))

    def _reach(self, block: Block, rows: int) -> Reach:
        """As the caches make it."""
        place = self.place
        if place.span == EVERYTHING:
            return full_reach(block.first[0], rows)
        return ring_reach(block, rows, place.capacity, DRAFTER_SLICE if place.name == DRAFTER else TARGET_SLICE)

    def situations(self) -> Iterator[tuple[str, int, int, int, float]]:
        """Name, first position, start, rows, and a factor of the queries."""
        place = self.place
        ring, full = place.capacity, place.span == EVERYTHING
        far = ring - MAX_ROWS if full else 5 * ring
        for rows in (1, 5, 8, MAX_ROWS):
            yield "first position", 0, 0, rows, 1.0
            yield "far on", far - (rows if full else -3), 0, rows, 1.0
        yield "large magnitudes", far - 9, 0, 6, LARGE / (place.scale * place.size**0.5)
        if full:
            return
        yield "ring not wrapped", min(37, place.span), 0, 7, 1.0
        for rows in (2, MAX_ROWS):
            yield "ring wraps in the block", far - rows // 2, 0, rows, 1.0
        chunk = self._block(0).chunk_keys
        # The first row sees one key of a chunk, the others none of it.
        yield "a chunk that is empty for most rows", (far // chunk + 1) * chunk - 2 + place.span, 0, 5, 1.0
        if not place.causal:
            yield "context skipped", far + 9, far, 8, 1.0
            yield "no context", far, far, 8, 1.0

    def cases(self, device: Device) -> Iterator[Case]:
        """All situations, each against float64."""
        for number, (name, first, start, rows, factor) in enumerate(self.situations()):
            block = self._block(first, start)
            arrays = self._data(block, rows, factor, number)
            reach, scale = self._reach(block, rows), self.place.scale

            def alone(row: int, arrays: Arrays = arrays, block: Block = block) -> mx.array:
                query = arrays[0][:, :, row : row + 1]
                one = self._block(block.first[0] + row, block.starts[0])
                return block_attention(query, *arrays[1:], one, self.place.scale, device=device)

            yield Case(
                name,
                rows,
                partial(block_attention, *arrays, block, scale, device=device),
                partial(stock_attention, *arrays, reach, scale),
                partial(self._exact, arrays, block, rows),
                alone if self.place.causal and rows > 1 else None,
            )

    def _data(self, block: Block, rows: int, factor: float, seed: int) -> Arrays:
        """Queries and buffers; what no row may see is large."""
        place, rng = self.place, np.random.default_rng(seed)
        queries = rng.standard_normal((1, place.heads, rows, place.size), np.float32) * factor
        shape = (1, place.kv_heads, place.capacity, place.size)
        unseen = np.full((place.capacity,), True)
        unseen[np.arange(block.oldest()[0], block.first[0] + rows) % place.capacity] = False
        size = np.where(unseen, GARBAGE, 1.0).astype(np.float32)[:, None]
        keys, values = (rng.standard_normal(shape, np.float32) * size for _ in range(2))
        arrays = (mx.array(part).astype(self._kind) for part in (queries, keys, values))
        return next(arrays), next(arrays), next(arrays)

    def _exact(self, arrays: Arrays, block: Block, rows: int) -> np.ndarray:
        """Attention in float64, by position."""
        q, k, v = (np.array(part.astype(mx.float32)).astype(np.float64)[0] for part in arrays)
        [first], [oldest], place = block.first, block.oldest(), self.place
        seen, asks = np.arange(oldest, first + rows), np.arange(first, first + rows)[:, None]
        k, v = k[:, seen % place.capacity], v[:, seen % place.capacity]
        distance = asks - seen
        near = (distance < place.span) & (distance >= 0 if place.causal else -distance < place.span)
        grouped = q.reshape(place.kv_heads, -1, rows, place.size)
        scores = np.einsum("hgmd,hpd->hgmp", grouped, k) * place.scale
        scores = np.where(near, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        result = np.einsum("hgmp,hpd->hgmd", weights / weights.sum(-1, keepdims=True), v)
        return result.reshape(1, place.heads, rows, place.size)

    def chain(self, rows: int, context: int, device: Device | None) -> list[mx.array]:
        """One call per layer: each takes the last one's output as queries, and the next layer's buffers."""
        place = self.place
        if not self._buffers:
            shape = (1, place.kv_heads, place.capacity, place.size)
            one = 2 * place.kv_heads * place.capacity * place.size * self._kind.size
            count = max(1, min(place.layers, CACHE_BYTES // one))
            made = [mx.random.normal(shape).astype(self._kind) for _ in range(2 * count)]
            mx.eval(made)
            self._buffers = list(zip(made[::2], made[1::2], strict=True))
        block = self._block(context)
        reach = self._reach(block, rows)
        x, links = mx.ones((1, place.heads, rows, place.size), self._kind), []
        for link in range(max(LEAST_LINKS, len(self._buffers))):
            keys, values = self._buffers[link % len(self._buffers)]
            if device is None:
                x = stock_attention(x, keys, values, reach, place.scale)
            else:
                x = block_attention(x, keys, values, block, place.scale, device=device)
            links.append(x)
        return links

    def warm(self, device: Device) -> mx.array:
        """The smallest call that makes this place's pipelines."""
        place = self.place
        buffer = mx.zeros((1, place.kv_heads, 16, place.size), self._kind)
        query = mx.zeros((1, place.heads, 1, place.size), self._kind)
        return block_attention(query, buffer, buffer, Block((0,)), 1.0, device=device)
