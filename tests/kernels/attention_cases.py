"""Cases of block attention: the grid, the data of a case, and what it must give, by brute force in float64."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from dflash_mlx.config import ring_rows
from dflash_mlx.kernels import block_attention as launcher
from dflash_mlx.kernels.block_attention import EVERYTHING, GROUP_TILES, HEAD_SIZES, TILE, Block, block_attention
from dflash_mlx.kernels.launch import Launch
from metal.cpu import Counts, CpuDevice

DTYPES = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}
# Largest error, in units in the last place of the largest value: float32 sums up to 128 products and 200 keys in a row;
# the half types round the weights once and the result once.
ALLOWED = {"f32": 32 * 2.0**-23, "f16": 2 * 2.0**-10, "bf16": 2 * 2.0**-7}
# Root mean square error, in that of rounding the exact result: weights rounded to the half type come to 1.15, one
# more rounding of total or sums to 1.4 and more.
ROUNDINGS = 1.27
GROUPS = (16, 4)
KV_HEADS = 2
WINDOW = 40
RING = ring_rows(WINDOW)
CHUNK = 32
GARBAGE = 30.0  # size of what lies in rows that nobody may see: rejected drafts, and positions past the window
SEED, SAMPLE = 23, 48
# Each pair is two kernels to compile in two builds.
SAMPLED_PAIRS = (("f32", 16), ("f16", 32), ("bf16", 64), ("f32", 128), ("f16", 128), ("bf16", 128))
Arrays = tuple[mx.array, mx.array, mx.array]


@dataclass(frozen=True)
class Situation:
    """Where a block stands; positions are drawn from `first`, a range that may end with -M.

    Attributes:
        capacity: rows of the buffer.
        firsts: from which the first position is drawn; one that fits the rows is made by `place`.
        place: "any", or the residue mod 16 that the position after the block has ("end 0", "end 1") or the oldest that
            the first row sees ("oldest 0"), or "wrap".
        start: how far before the first position the oldest valid one lies; None means position 0.
    """

    capacity: int
    span: int
    causal: bool
    firsts: tuple[int, int]
    place: str = "any"
    start: int | None = None
    chunk: int = CHUNK
    batch: int = 1


SITUATIONS = {
    "target, ring not wrapped": Situation(RING, WINDOW, True, (0, 48)),
    "target, first position": Situation(RING, WINDOW, True, (0, 0)),
    "target, ring wrapped": Situation(RING, WINDOW, True, (90, 400)),
    "target, ring wraps in the block": Situation(RING, WINDOW, True, (90, 400), place="wrap"),
    "target, last step full": Situation(RING, WINDOW, True, (90, 400), place="end 0"),
    "target, last step of one key": Situation(RING, WINDOW, True, (90, 400), place="end 1", chunk=48),
    "target, window starts a step": Situation(RING, WINDOW, True, (90, 400), place="oldest 0"),
    "target, two sessions": Situation(RING, WINDOW, True, (3, 400), batch=2),
    "full layer": Situation(192, EVERYTHING, True, (0, 170), chunk=64),
    "full layer, two sessions": Situation(192, EVERYTHING, True, (0, 170), chunk=48, batch=2),
    "v1 drafter": Situation(RING, WINDOW + 1, False, (90, 400)),
    "v1 drafter, ring wraps in the block": Situation(RING, WINDOW + 1, False, (90, 400), place="wrap"),
    "v1 drafter, context skipped": Situation(RING, WINDOW + 1, False, (90, 400), start=13),
    "v1 drafter, no context": Situation(RING, WINDOW + 1, False, (90, 400), start=0),
    "DFlash-2 drafter": Situation(RING, WINDOW, False, (90, 400)),
    "drafter with a window below the block": Situation(ring_rows(5), 5, False, (0, 99)),
    "real chunk": Situation(ring_rows(300), 300, True, (600, 900), chunk=0),
}


@dataclass(frozen=True)
class Case:
    """One point of the grid. `number` draws its data, its position, the simdgroups and the order of threads."""

    dtype: str
    size: int
    group: int
    rows: int
    situation: str
    number: int

    def __str__(self) -> str:
        return f"{self.dtype}, D {self.size}, {self.group} heads, {self.rows} rows, {self.situation}, {self.number}"

    @property
    def block(self) -> Block:
        place = SITUATIONS[self.situation]
        draw = random.Random(self.number)
        firsts = tuple(self._first(place, draw.randint(*place.firsts)) for _ in range(place.batch))
        starts = () if place.start is None else tuple(max(0, first - place.start) for first in firsts)
        return Block(firsts, place.span, place.causal, starts, place.chunk)

    @property
    def large(self) -> bool:
        """Whether scores are so large that their exponential alone would overflow."""
        return self.number % 4 == 3

    @property
    def scale(self) -> float:
        return (60.0 if self.large else 1.3) * self.size**-0.5

    @property
    def allowed(self) -> float:
        """The largest error for values of size 1. A score of hundreds is rounded as a float32 of that size."""
        return ALLOWED[self.dtype] + (2.0**-14 if self.large else 0.0)

    def device(self, checked: bool) -> CpuDevice:
        return CpuDevice(checked=checked, seed=self.number)

    @property
    def simdgroups(self) -> int:
        return (1, 2, 3, 8, 16)[self.number % 5]

    def _first(self, place: Situation, first: int) -> int:
        if place.place == "wrap":
            return first // place.capacity * place.capacity + place.capacity - self.rows // 2
        if place.place == "oldest 0":
            return first // 16 * 16 + place.span - 1
        if place.place.startswith("end"):
            return first // 16 * 16 + 16 + int(place.place[4:]) - self.rows + (16 if self.rows > 15 else 0)
        return min(first, place.capacity - self.rows) if place.span == EVERYTHING else first


def grid() -> list[Case]:
    """All cases: each type, head size, number of heads and of rows, with two situations dealt out in turn."""
    settings = list(itertools.product(DTYPES, HEAD_SIZES, GROUPS, range(1, 17)))
    names = list(SITUATIONS)
    return [
        Case(*values, names[(number * 7 + turn * 5 + number // 16) % len(names)], 2 * number + turn)
        for number, values in enumerate(settings)
        for turn in (0, 1)
    ]


def sample() -> list[Case]:
    """Some of the grid, from a seed: each situation and each of six pairs of type and head size, or more."""
    cases = [case for case in grid() if (case.dtype, case.size) in SAMPLED_PAIRS]
    random.Random(SEED).shuffle(cases)
    chosen = {(case.dtype, case.size): case for case in cases}
    by_situation = {case.situation: case for case in cases}
    first = list(dict.fromkeys([*chosen.values(), *by_situation.values()]))
    rest = [case for case in cases if case not in first]
    return first + rest[: SAMPLE - len(first)]


def data(case: Case) -> Arrays:
    """Queries, and buffers in which every row that some query may see is a draw, and all others garbage or zeros."""
    place, block = SITUATIONS[case.situation], case.block
    rng = np.random.default_rng(case.number)
    heads = case.group * KV_HEADS
    queries = rng.standard_normal((place.batch, heads, case.rows, case.size))
    queries[:, case.number % heads] = 0  # a head whose scores are all 0
    keys, values = (rng.standard_normal((place.batch, KV_HEADS, place.capacity, case.size)) for _ in range(2))
    for entry in range(place.batch):
        seen = {p % place.capacity for row in visible(block, entry, case.rows) for p in row}
        for row in set(range(place.capacity)) - seen:
            written = row < block.first[entry] or row % 3 == 0
            keys[entry, :, row] *= GARBAGE * written
            values[entry, :, row] *= GARBAGE * written
    dtype = DTYPES[case.dtype]
    return tuple(mx.array(part.astype(np.float32)).astype(dtype) for part in (queries, keys, values))  # type: ignore[return-value]


def visible(block: Block, entry: int, rows: int) -> list[list[int]]:
    """List the positions that each row of a batch entry sees, from the rules as they are told."""
    first, start = block.first[entry], block.starts[entry]
    return [
        [p for p in range(start, first + rows) if abs(q - p) < block.span and (p <= q or not block.causal)]
        for q in range(first, first + rows)
    ]


def exact(queries: mx.array, keys: mx.array, values: mx.array, block: Block, scale: float) -> np.ndarray:
    """Attention row by row in float64."""
    q, k, v = (np.array(part.astype(mx.float32)).astype(np.float64) for part in (queries, keys, values))
    batch, heads, rows, _ = q.shape
    group, capacity, result = heads // k.shape[1], k.shape[2], np.zeros(q.shape)
    for entry in range(batch):
        for row, positions in enumerate(visible(block, entry, rows)):
            held = [p % capacity for p in positions]
            for head in range(heads):
                scores = k[entry, head // group, held] @ q[entry, head, row] * scale
                weights = np.exp(scores - scores.max())
                result[entry, head, row] = weights @ v[entry, head // group, held] / weights.sum()
    return result


def error(case: Case, output: mx.array, expected: np.ndarray) -> float:
    """The largest difference, in parts of what is allowed; infinite where a value is no number."""
    given = np.array(output.astype(mx.float32)).astype(np.float64)
    if not np.isfinite(given).all():
        return float("inf")
    return float(np.abs(given - expected).max() / (case.allowed * max(1.0, np.abs(expected).max())))


def bits(array: mx.array) -> np.ndarray:
    """The bits of an array of floats."""
    return np.array(array.view({4: mx.uint32, 2: mx.uint16}[array.dtype.size]))


def alone(case: Case, row: int, arrays: Arrays, checked: bool) -> mx.array:
    """The result of one row as a block of its own, or, where a row sees later ones, beside other queries."""
    queries, keys, values = arrays
    block, device = case.block, case.device(checked)
    if block.causal:
        one = replace(block, first=tuple(first + row for first in block.first))
        return block_attention(queries[:, :, row : row + 1], keys, values, one, case.scale, device=device)
    others = mx.where((mx.arange(case.rows) == row)[:, None], queries, -3 * queries[:, :, ::-1])
    return block_attention(others, keys, values, block, case.scale, device=device)[:, :, row : row + 1]


def broken_promise(case: Case, rows: Iterable[int], mistrust: bool = False) -> str:
    """Run a case and give the first promise that it breaks, or "".

    Args:
        rows: those that are also run alone.
        mistrust: all runs are checked, not the first only: a faulty kernel in the fast build would end the process.
    Raises:
        KernelFault: the harness found a fault.
    """
    arrays = data(case)
    checked = case.device(checked=True)
    output = block_attention(*arrays, case.block, case.scale, device=checked, simdgroups=case.simdgroups)
    parts = error(case, output, exact(*arrays, case.block, case.scale))
    if not parts <= 1:
        return f"error is {parts:.3g} times what is allowed"
    again = block_attention(*arrays, case.block, case.scale, device=case.device(mistrust))
    if not np.array_equal(bits(output), bits(again)):
        return "bits depend on the build or on the number of simdgroups"
    for row in rows:
        if not np.array_equal(bits(alone(case, row, arrays, mistrust))[:, :, 0], bits(output)[:, :, row]):
            return f"row {row} has other bits alone"
    return wasted_bytes(case, *checked.counts)


def blind_row() -> str:
    """Merge two chunks in which one row sees nothing and the other sees one: gives what is broken, or ""."""
    partial = mx.stack([mx.zeros((2, 16)), mx.array([[0.0], [3.0]]) * mx.ones((2, 16))])[None]
    state = mx.array([[[[-1e30, 0.0], [-1e30, 0.0]], [[-1e30, 0.0], [7.0, 1.5]]]])
    kernel = launcher.read_kernels(launcher.FILE)[launcher.MERGE]
    template = launcher.templates(mx.float32, 16)
    outputs = (((1, 1, 2, 16), mx.float32),)
    [output] = CpuDevice().run(Launch(kernel, (partial, state), template, (32, 2, 1), (32, 2, 1), outputs))
    wanted = mx.array([[0.0], [2.0]]) * mx.ones((2, 16))
    return "" if mx.array_equal(output[0, 0], wanted) else f"rows that see nothing, and one thing: {output.tolist()}"


def lost_precision() -> str:
    """Compare the error of the half types with that of rounding the exact result once: gives what is broken, or ""."""
    for dtype in ("f16", "bf16"):
        case = Case(dtype, 16, 16, 16, "target, ring wrapped", 4)
        arrays = data(case)
        wanted = exact(*arrays, case.block, case.scale)
        rounded = mx.array(wanted.astype(np.float32)).astype(DTYPES[dtype])
        given = block_attention(*arrays, case.block, case.scale, device=CpuDevice())
        squares = [((np.array(part.astype(mx.float32)) - wanted) ** 2).mean() for part in (given, rounded)]
        ratio = float(np.sqrt(squares[0] / squares[1]))
        if not ratio < ROUNDINGS:
            return f"{dtype}: the error is {ratio:.3f} times that of one rounding"
    return ""


def wasted_bytes(case: Case, chunks: Counts, merge: Counts) -> str:
    """Compare the bytes with the least possible: K and V once per KV head and group of 16 tiles of rows, in steps of
    16 keys of which some row sees one; the partial results written and read once."""
    block = case.block
    steps = sum(
        -(-(first + case.rows) // 16) - oldest // 16 for first, oldest in zip(block.first, block.oldest(), strict=True)
    )
    row_bytes = case.size * DTYPES[case.dtype].size
    least = steps * 16 * row_bytes * KV_HEADS
    packed = case.group * case.rows
    tiles, groups = -(-packed // TILE), -(-packed // (TILE * GROUP_TILES))
    result = packed * KV_HEADS * len(block.first)
    table = {
        "unique bytes of K": (chunks.unique["k"], least),
        "unique bytes of V": (chunks.unique["v"], least),
        "bytes of K per threadgroup": (chunks.per_group["k"], groups * least),
        "bytes of V per threadgroup": (chunks.per_group["v"], groups * least),
        "bytes of K that the lanes ask for": (chunks.read["k"], tiles * least),
        "bytes of V that the lanes ask for": (chunks.read["v"], tiles * least),
        "bytes of the result": (merge.written["out"], result * row_bytes),
        "bytes of partial results": (chunks.written["partial"], chunks.written["state"] * case.size // 2),
        "threadgroup memory": (chunks.threadgroup_bytes + merge.threadgroup_bytes, 0),
    }
    return "".join(f"{what}: {given} and not {wanted}. " for what, (given, wanted) in table.items() if given != wanted)
