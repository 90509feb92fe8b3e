"""Buffers for one layer's keys and values: in the model's own type, or packed to 8 bits.

Both have the same few methods, so caches and models need not know which they hold. Letters: Hk key/value heads,
D head size, T rows of this call, G numbers that share a scale and a bias.
"""

from __future__ import annotations

from copy import copy

import mlx.core as mx

from .config import KV_BITS

GROWTH_ROWS = 256  # first size of a growing buffer, and the unit that its sizes are rounded up to


class Rows:
    """Keys and values of one layer in one zero-filled buffer, [1, Hk, capacity, D].

    Zeros, not uninitialised memory: a masked row is multiplied by 0, and 0 times NaN is NaN.
    """

    def __init__(self, kv_heads: int, head_dim: int, dtype: mx.Dtype, capacity: int):
        shape = (1, kv_heads, capacity, head_dim)
        self.keys, self.values = mx.zeros(shape, dtype), mx.zeros(shape, dtype)

    @property
    def parts(self) -> list[Rows]:
        """The buffers that it consists of: itself."""
        return [self]

    @property
    def capacity(self) -> int:
        return int(self.keys.shape[2])

    def fork(self) -> Rows:
        """Another buffer with the same rows; memory is shared until one of the two is written."""
        other = copy(self)
        other.keys, other.values = self.keys[:], self.values[:]  # arrays of their own: a write changes its array only
        return other

    def write(self, offset: int, keys: mx.array, values: mx.array) -> None:
        """Write T rows, [1, Hk, T, D], for positions offset..offset+T-1; T is at most the capacity."""
        rows, first = keys.shape[2], offset % self.capacity
        head = self.capacity - first  # what fits before a ring's end; the rest starts at row 0
        if rows <= head:
            self._put(first, keys, values)
            return
        self._put(first, keys[:, :, :head], values[:, :, :head])
        self._put(0, keys[:, :, head:], values[:, :, head:])

    def _put(self, row: int, keys: mx.array, values: mx.array) -> None:
        end = row + keys.shape[2]
        self.keys[:, :, row:end] = keys.astype(self.keys.dtype)
        self.values[:, :, row:end] = values.astype(self.values.dtype)

    def attended(self, held: int) -> tuple[mx.array, mx.array]:
        """Keys and values for attention that looks at `held` rows: the whole buffers, as kernels want them."""
        return self.keys, self.values

    def grow(self, needed: int, limit: int) -> None:
        """Double the capacity until `needed` rows fit, to at most `limit` rounded up."""
        if needed <= self.capacity:
            return
        capacity = self.capacity
        while capacity < needed:
            capacity *= 2
        capacity = min(capacity, -(-limit // GROWTH_ROWS) * GROWTH_ROWS)
        _, heads, old, size = self.keys.shape
        extra = mx.zeros((1, heads, capacity - old, size), self.keys.dtype)
        self.keys = mx.concatenate([self.keys, extra], axis=2)
        self.values = mx.concatenate([self.values, extra], axis=2)


class QuantisedRows:
    """As `Rows`, in MLX's affine 8 bits: the packed numbers, and a scale and a bias for each G of them.

    Groups lie along D, so a row's bytes do not depend on the rows it was written with. Attention gets the rows made
    wide again: that is a number's work of its own, so there too a row's bits depend on nothing beside it.

    Args:
        dtype: of keys and values as attention sees them, and of scales and biases.
        group: G; divides D.
    """

    def __init__(self, kv_heads: int, head_dim: int, dtype: mx.Dtype, capacity: int, group: int):
        self._dtype, self._group = dtype, group
        packed = Rows(kv_heads, head_dim * KV_BITS // 32, mx.uint32, capacity)
        scales, biases = (Rows(kv_heads, head_dim // group, dtype, capacity) for _ in range(2))
        self.parts: list[Rows] = [packed, scales, biases]

    @property
    def capacity(self) -> int:
        return self.parts[0].capacity

    def fork(self) -> QuantisedRows:
        """As `Rows.fork`."""
        other = copy(self)
        other.parts = [part.fork() for part in self.parts]
        return other

    def write(self, offset: int, keys: mx.array, values: mx.array) -> None:
        """As `Rows.write`."""
        packed = (mx.quantize(rows.astype(self._dtype), self._group, KV_BITS) for rows in (keys, values))
        for part, of_keys, of_values in zip(self.parts, *packed, strict=True):
            part.write(offset, of_keys, of_values)

    def attended(self, held: int) -> tuple[mx.array, mx.array]:
        """The first `held` rows of keys and values made wide, [1, Hk, held, D]; lazy, and gone after the layer."""
        keys = [part.keys[:, :, :held] for part in self.parts]
        values = [part.values[:, :, :held] for part in self.parts]
        return self._wide(*keys), self._wide(*values)

    def _wide(self, packed: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        return mx.dequantize(packed, scales, biases, self._group, KV_BITS)

    def grow(self, needed: int, limit: int) -> None:
        """As `Rows.grow`."""
        for part in self.parts:
            part.grow(needed, limit)
