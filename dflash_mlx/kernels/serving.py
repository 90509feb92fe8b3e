"""Which implementation serves each operation: the models call one function per operation, and it looks at rows alone.

Stock operations serve everywhere unless this machine has qualified a kernel (qualify.py). Letters as in
block_attention.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import mlx.core as mx

from .block_attention import Block, block_attention
from .launch import METAL, Device

TARGET_SLIDING, TARGET_FULL, DRAFTER = "target, sliding", "target, full", "drafter"  # the places of attention
Range = tuple[int, int]  # rows, both ends included
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
        first, last = self.rows.get(place, NO_ROWS)
        if first <= queries.shape[2] <= last:
            return block_attention(queries, keys, values, reach.block, scale, device=self.device)
        return stock_attention(queries, keys, values, reach, scale)


STOCK = Kernels()
