"""Attention of a block's rows over a ring or a growing buffer: the launcher, and its twin in stock operations.

Letters: B batch, H query heads, Hk key/value heads, M rows of the block (1..16), R rows of the buffer, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx

from ..errors import DFlashError, must, one_of
from .launch import METAL, Device, Launch, dtype_name, read_kernels, run

FILE, CHUNKS, MERGE = "block_attention.metal", "block_attention_chunks", "block_attention_merge"
# The first four are the file's own constants.
TILE = 8
KEYS = 16
GROUP_TILES = 16
HEAD_SIZES = (16, 32, 64, 128)
MAX_ROWS = 16
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
EVERYTHING = 1 << 30  # a span without a window
WINDOW_CHUNK, FULL_CHUNK = 256, 512  # keys per chunk; functions of the layer alone, so that no row's bits change
SIMDGROUPS = 8  # of a threadgroup: 256 threads, below what any Mac's pipeline allows; more tiles than that take turns
MERGE_ROWS = 4  # rows per threadgroup of the second pass
SLICE_ROWS = 64  # the twin reads a buffer that has not wrapped up to the next multiple of this


@dataclass(frozen=True)
class Block:
    """Where the rows of a block lie, and what they see.

    Attributes:
        first: position of the first row, per batch entry; all rows are written already.
        span: a row at q sees positions p with |q - p| < span: the target's window W, the v1 drafter's W + 1.
        causal: only p <= q is visible; else the whole block is.
        start: the oldest valid position, per batch entry; empty means 0 everywhere.
        chunk: keys per chunk, a multiple of 16; 0 takes the constant for this span. Other values are for tests.
    """

    first: tuple[int, ...]
    span: int = EVERYTHING
    causal: bool = True
    start: tuple[int, ...] = ()
    chunk: int = 0

    @property
    def starts(self) -> tuple[int, ...]:
        return self.start or (0,) * len(self.first)

    @property
    def chunk_keys(self) -> int:
        return self.chunk or (FULL_CHUNK if self.span == EVERYTHING else WINDOW_CHUNK)

    def oldest(self) -> list[int]:
        """The oldest position that the first row sees, per batch entry."""
        return [max(start, first - self.span + 1) for first, start in zip(self.first, self.starts, strict=True)]


@lru_cache(maxsize=64)
def _dims(block: Block, rows: int) -> tuple[mx.array, int]:
    """Give the kernel's scalars, [B, 8], and the most chunks that a batch entry needs. Layers share them."""
    table, chunks = [], 1
    for first, start, oldest in zip(block.first, block.starts, block.oldest(), strict=True):
        begin = oldest // block.chunk_keys
        chunks = max(chunks, (first + rows - 1) // block.chunk_keys - begin + 1)
        table.append([first, start, block.span, int(block.causal), begin, block.chunk_keys, 0, 0])
    return mx.array(table, mx.int32), chunks


@lru_cache(maxsize=16)
def _scale(value: float) -> mx.array:
    """Give the scale as an array without dimensions."""
    return mx.array(value, mx.float32)


def block_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    block: Block,
    scale: float,
    *,
    device: Device = METAL,
    simdgroups: int = SIMDGROUPS,
) -> mx.array:
    """Attend the rows of a block with the Metal kernel, in two launches.

    Args:
        queries: [B, H, M, D] f32, f16 or bf16, RoPE applied.
        keys, values: [B, Hk, R, D], same type: whole buffers. Position p is in row p mod R, and rows that were
            never written are finite.
        block: positions and visibility.
        scale: of the scores before softmax.
        device: where it runs.
        simdgroups: at most so many per threadgroup; no bit of the result depends on it.
    Returns:
        [B, H, M, D] of the queries' type. Lazy: nothing is evaluated here.
    Raises:
        DFlashError: sizes or types that the kernel is not made for.
    """
    _check(queries, keys, values, block)
    batch, heads, rows, size = queries.shape
    kv_heads = keys.shape[1]
    packed = heads // kv_heads * rows
    tiles = -(-packed // TILE)
    dims, chunks = _dims(block, rows)
    kernels = read_kernels(FILE)
    template = templates(queries.dtype, size)
    together = min(simdgroups, tiles, GROUP_TILES)
    slots = (batch * kv_heads, chunks, packed)
    partial, state = run(
        device,
        Launch(
            kernels[CHUNKS],
            (queries, keys, values, dims, _scale(scale)),
            template,
            (32 * kv_heads * -(-tiles // GROUP_TILES), together, batch * chunks),
            (32, together, 1),
            (((*slots, size), mx.float32), ((*slots, 2), mx.float32)),
        ),
    )
    [output] = run(
        device,
        Launch(
            kernels[MERGE],
            (partial, state),
            template,
            (32, packed, batch * kv_heads),
            (32, min(MERGE_ROWS, packed), 1),
            ((queries.shape, queries.dtype),),
        ),
    )
    return output


def block_attention_ops(queries: mx.array, keys: mx.array, values: mx.array, block: Block, scale: float) -> mx.array:
    """Attend the rows of a block with stock operations: the twin of `block_attention`, same arguments and result."""
    _check(queries, keys, values, block)
    rows, capacity = queries.shape[2], keys.shape[2]
    newest = max(block.first) + rows
    held = min(capacity, -(-newest // SLICE_ROWS) * SLICE_ROWS)
    mask = mx.stack([_mask(block, entry, rows, held, capacity) for entry in range(len(block.first))])
    return mx.fast.scaled_dot_product_attention(
        queries, keys[:, :, :held], values[:, :, :held], scale=scale, mask=mask[:, None]
    )


def templates(dtype: mx.Dtype, size: int) -> tuple[tuple[str, mx.Dtype | int | bool], ...]:
    """Give the template of both kernels: one pipeline each per type and head size, and no other."""
    return (("T", dtype), ("D", size))


def _mask(block: Block, entry: int, rows: int, held: int, capacity: int) -> mx.array:
    """Which of the leading `held` buffer rows the rows of one batch entry see, bool [M, held]."""
    first, start = block.first[entry], block.starts[entry]
    last = first + rows - 1
    position = last - (last - mx.arange(held)) % capacity  # the newest one up to `last` that lives in the row
    distance = mx.arange(first, first + rows)[:, None] - position[None]
    near = (distance >= 0) & (distance < block.span) if block.causal else mx.abs(distance) < block.span
    return near & (position >= start)[None]


def _check(queries: mx.array, keys: mx.array, values: mx.array, block: Block) -> None:
    """Refuse what the kernel is not made for."""
    batch, heads, rows, size = queries.shape
    _, kv_heads, capacity, _ = keys.shape
    reach = max(first + rows - oldest for first, oldest in zip(block.first, block.oldest(), strict=True))
    late = [first for first, start in zip(block.first, block.starts, strict=True) if start > first or start < 0]
    entries, kinds = len(block.first), [dtype_name(array.dtype) for array in (queries, keys, values)]
    problems = [
        (keys.shape != values.shape, "values", f"of the keys' shape {keys.shape}", values.shape),
        (keys.shape[0] != batch or keys.shape[3] != size, "keys", f"[{batch}, Hk, R, {size}]", keys.shape),
        (heads % kv_heads != 0, "query heads", f"a multiple of the {kv_heads} key/value heads", heads),
        (size not in HEAD_SIZES, "head size", one_of(HEAD_SIZES), size),
        (not 1 <= rows <= MAX_ROWS, "rows", f"between 1 and {MAX_ROWS}", rows),
        (queries.dtype not in DTYPES, "type", "float32, float16 or bfloat16", kinds[0]),
        (len(set(kinds)) > 1, "types", f"all {kinds[0]}", ", ".join(kinds[1:])),
        (capacity % KEYS != 0, "buffer rows", f"a multiple of {KEYS}", capacity),
        (block.chunk_keys % KEYS != 0, "keys per chunk", f"a multiple of {KEYS}", block.chunk_keys),
        (entries != batch, "first positions", f"{batch}, one per batch entry", entries),
        (late != [], "start", "between 0 and the block's first position", block.starts),
        (reach > capacity, "visible positions", f"at most the buffer's {capacity} rows", reach),
    ]
    for wrong, name, expected, value in problems:
        if wrong:
            raise DFlashError(must("block_attention", name, expected, value, "Use stock attention for this shape."))
