"""Which implementation serves each operation: the models call one function per operation, and it looks at rows alone.

Stock operations serve everywhere unless this machine has qualified a kernel (qualify.py). Letters as in
block_attention.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import mlx.core as mx

from .block_attention import Block, block_attention
from .feature_fusion import ContextWeights, Weight, context_rows, feature_fusion
from .launch import METAL, Device

# The places where a kernel may serve: attention of three kinds of layers, and the two steps of the drafter's context.
TARGET_SLIDING, TARGET_FULL, DRAFTER = "target, sliding layers", "target, full layers", "drafter"
FEATURE, CONTEXT_ROWS = "context feature", "context keys and values"
Range = tuple[int, int]  # rows, both ends included
LayerRows = list[tuple[mx.array, mx.array]]  # keys and values per layer
NO_ROWS = (1, 0)


class Reach(NamedTuple):
    """What the rows of a forward see, said for the kernel and for stock attention; all layers of a kind share it.

    Attributes:
        block: positions and visibility.
        held: leading rows of the buffer that stock attention reads.
        mask: for these rows, as `mx.fast.scaled_dot_product_attention` takes it.
    """

    block: Block
    held: int
    mask: mx.array | str | None


def stock_attention(queries: mx.array, keys: mx.array, values: mx.array, reach: Reach, scale: float) -> mx.array:
    """Attend with MLX's own operation: any number of rows, same arguments and result as `Kernels.attend`."""
    held = reach.held
    return mx.fast.scaled_dot_product_attention(
        queries, keys[:, :, :held], values[:, :, :held], scale=scale, mask=reach.mask
    )


class Kernels:
    """What serves a pair's operations.

    Args:
        rows: place -> the numbers of rows that the kernel serves there; stock serves all others.
        device: where kernels run.
    """

    def __init__(self, rows: Mapping[str, Range] | None = None, device: Device = METAL):
        self.rows, self.device = dict(rows or {}), device

    def serves(self, place: str, rows: int) -> bool:
        """Whether the kernel serves a call with so many rows."""
        first, last = self.rows.get(place, NO_ROWS)
        return first <= rows <= last

    def attend(
        self, place: str, queries: mx.array, keys: mx.array, values: mx.array, reach: Reach, scale: float
    ) -> mx.array:
        """Attend the rows of a forward; all its keys and values are written already.

        Args:
            place: which layers ask, one of the three places above.
            queries: [1, H, T, D], RoPE applied.
            keys, values: [1, Hk, R, D], whole buffers.
            reach: what the rows see.
            scale: of the scores before softmax.
        Returns:
            [1, H, T, D], lazy.
        """
        if self.serves(place, queries.shape[2]):
            return block_attention(queries, keys, values, reach.block, scale, device=self.device)
        return stock_attention(queries, keys, values, reach, scale)

    def feature(self, taps: Sequence[mx.array], fc: Weight, gain: mx.array, eps: float) -> mx.array:
        """Join the taps into the context feature: L arrays [T, E] to [T, E], lazy; arguments as `feature_fusion`."""
        if self.serves(FEATURE, taps[0].shape[0]):
            return feature_fusion(taps, fc, gain, eps, device=self.device)
        return mx.fast.rms_norm(fc.times(mx.concatenate(list(taps), axis=-1)), gain, eps).astype(taps[0].dtype)

    def context_rows(
        self, feature: mx.array, weights: ContextWeights | None, offset: int, stock: Callable[[], LayerRows]
    ) -> LayerRows:
        """Make the keys and values of the drafter's layers, each [1, Hk, T, D], lazy.

        Args:
            feature: [T, E].
            weights: of all layers, stacked; `None` where no kernel serves this.
            offset: position of the first row.
            stock: makes them layer by layer.
        """
        if weights is None or not self.serves(CONTEXT_ROWS, feature.shape[0]):
            return stock()
        keys, values = context_rows(feature, weights, offset, device=self.device)
        # slices are views; an index would be a copy
        return [(keys[i : i + 1], values[i : i + 1]) for i in range(keys.shape[0])]


STOCK = Kernels()
