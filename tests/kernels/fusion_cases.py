"""Cases of feature fusion: the grid, the data of a case, and what it must give, in float64."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from dflash_mlx.kernels.feature_fusion import COLUMN_TILES, TILE, ContextWeights, Weight, context_rows, feature_fusion
from metal.cpu import Counts, CpuDevice

DTYPES = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}
# Bits and group of the weights; floats have a step of their own: 64, or 32 where only that divides the width.
FORMATS = {
    "floats, 64": (0, 64),
    "floats, 32": (0, 32),
    **{f"{bits} bits, {group}": (bits, group) for bits in (4, 8) for group in (32, 64, 128)},
}
# Rounding to a type once, relative, and the smallest error of a value near 0.
ROUNDED = {"f32": (2.0**-23, 2.0**-40), "f16": (2.0**-11, 2.0**-25), "bf16": (2.0**-8, 2.0**-40)}
SUMS = 2.0**-22  # of the sum of all products' sizes: float32 sums of up to 520 groups
SLACK = 2.0**-20  # of the result: mean, root, gain and rotation in float32
# Output sizes: less than a threadgroup's 32 columns, a multiple of it, one more, and primes.
OUTPUTS = (32, 33, 7, 71, 8, 64, 45)
LAYERS = ((2, 3, 10), (1, 2, 32), (3, 1, 70), (2, 1, 6), (1, 1, 128))  # layers, Hk, D
SEED = 3


@dataclass(frozen=True)
class Case:
    """One point of the grid. `number` draws its sizes, its data, and the order of threads."""

    dtype: str
    format: str
    rows: int
    number: int

    def __str__(self) -> str:
        return f"{self.dtype}, {self.format}, {self.rows} rows, {self.number}"

    @property
    def taps(self) -> int:
        return 1 + self.number * 3 % 8

    @property
    def width(self) -> int:
        group = FORMATS[self.format][1]
        return group * (1, 3 if group == 32 else 2, 13)[self.number % 3]  # odd for 32: no larger step divides it

    @property
    def outputs(self) -> int:
        return OUTPUTS[self.number % len(OUTPUTS)]

    @property
    def eps(self) -> float:
        return (0.3, 1e-5)[self.number % 2]

    @property
    def offset(self) -> int:
        return random.Random(self.number).choice((0, 1, 77, 1500, 4099))

    def device(self, checked: bool) -> CpuDevice:
        return CpuDevice(checked=checked, seed=self.number)


def grid() -> list[Case]:
    """All cases: each type, format and number of rows."""
    settings = itertools.product(DTYPES, FORMATS, range(1, 17))
    return [Case(*values, number) for number, values in enumerate(settings)]


def sample() -> list[Case]:
    """Some of the grid: three numbers of rows for a few pairs of type and format. Each pair is a kernel to compile."""
    pairs = (("f32", "floats, 32"), ("bf16", "floats, 64"), ("bf16", "4 bits, 32"), ("f16", "4 bits, 64"))
    chosen = random.Random(SEED)
    return [
        chosen.choice([case for case in grid() if (case.dtype, case.format) == pair and case.rows in rows])
        for pair in (*pairs, ("f32", "8 bits, 128"))
        for rows in (range(1, 8), range(8, 10), range(10, 17))
    ]


@dataclass(frozen=True)
class Data:
    """What a case runs on: the arguments of both steps."""

    taps: list[mx.array]
    fc: Weight
    gain: mx.array
    feature: mx.array
    context: ContextWeights


def weight(rng: np.random.Generator, case: Case, outputs: int, inputs: int) -> Weight:
    """Draw a matrix whose columns have unequal sizes and means, in the case's format."""
    bits, group = FORMATS[case.format]
    drawn = rng.standard_normal((outputs, inputs)) + rng.standard_normal((outputs, 1))
    dense = mx.array((drawn * inputs**-0.5).astype(np.float32)).astype(DTYPES[case.dtype])
    return Weight(*mx.quantize(dense, group, bits), group, bits) if bits else Weight(dense)


def data(case: Case) -> Data:
    """Draw a case: some inputs are large in every row, as activations are, and one row is all zeros."""
    rng, dtype = np.random.default_rng(case.number), DTYPES[case.dtype]
    cast = lambda values: mx.array(values.astype(np.float32)).astype(dtype)  # noqa: E731
    taps = rng.standard_normal((case.taps, case.rows, case.width))
    taps[:, :, rng.integers(0, case.width, 2)] *= 30
    taps[:, case.number % 16 : case.number % 16 + 1] = 0
    fc = weight(rng, case, case.outputs, case.taps * case.width)
    layers, kv_heads, size = LAYERS[case.number % len(LAYERS)]
    gain, gains = 1 + 0.3 * rng.standard_normal(case.outputs), 1 + 0.3 * rng.standard_normal((layers, size))
    stack = weight(rng, case, layers * 2 * kv_heads * size, case.width)
    context = ContextWeights(stack, cast(gains), kv_heads, 500000.0, case.eps)
    feature = rng.standard_normal((case.rows, case.width))
    return Data([cast(tap) for tap in taps], fc, cast(gain), cast(feature), context)


def double(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def unpacked(matrix: Weight) -> tuple[np.ndarray, np.ndarray]:
    """The weights in float64, and the sizes of what they are added from; integers are taken out of the words here."""
    if not matrix.bits:
        dense = double(matrix.array)
        return dense, np.abs(dense)
    words = np.array(matrix.array)
    places = np.arange(32 // matrix.bits, dtype=np.uint32) * matrix.bits
    integers = (words[:, :, None] >> places) & (2**matrix.bits - 1)
    assert matrix.scales is not None
    assert matrix.biases is not None
    scales, biases = (np.repeat(double(part), matrix.group, axis=1) for part in (matrix.scales, matrix.biases))
    products = integers.reshape(len(words), -1) * scales
    return products + biases, np.abs(products) + np.abs(biases)


def product(x: np.ndarray, matrix: Weight) -> tuple[np.ndarray, np.ndarray]:
    """The product in float64, and how far float32 sums may be from it."""
    values, sizes = unpacked(matrix)
    return x @ values.T, SUMS * np.abs(x) @ sizes.T


def norm(x: np.ndarray, off: np.ndarray, gain: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """RMSNorm over the last axis in float64, and how far the result may be off."""
    inverse = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + eps)
    spread = np.sqrt((off**2).mean(-1, keepdims=True)) * inverse  # relative, of the root mean square
    return x * inverse * gain, (off * inverse + np.abs(x) * inverse * spread) * np.abs(gain)


def feature_truth(case: Case, given: Data) -> tuple[np.ndarray, np.ndarray]:
    """The context feature, and the bound of its error before it is rounded."""
    joined = np.concatenate([double(tap) for tap in given.taps], axis=-1)
    return norm(*product(joined, given.fc), double(given.gain), case.eps)


def context_truth(case: Case, given: Data) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Keys with their bound, and values with theirs, [layers, Hk, M, D] each."""
    weights = given.context
    gains, heads = double(weights.gains), weights.kv_heads
    layers, size = gains.shape
    values, off = (
        part.reshape(case.rows, layers, 2, heads, size).transpose(2, 1, 3, 0, 4)
        for part in product(double(given.feature), weights.weight)
    )
    keys, bound = norm(values[0], off[0], gains[:, None, None], weights.eps)
    half = size // 2
    angles = (case.offset + np.arange(case.rows))[:, None] * weights.theta ** (-2 * np.arange(half) / size)
    cosine, sine = np.cos(angles), np.sin(angles)
    low, high = keys[..., :half], keys[..., half:]
    turned = np.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1)
    pair = bound[..., :half] + bound[..., half:] + (np.abs(low) + np.abs(high)) * (2 * angles * 2.0**-23 + SLACK)
    return (turned, np.concatenate([pair, pair], axis=-1)), (values[1], off[1])


def error(case: Case, output: mx.array, truth: tuple[np.ndarray, np.ndarray]) -> float:
    """The largest difference, in parts of what is allowed there; infinite where a value is no number."""
    given, (expected, bound) = double(output), truth
    if output.dtype != DTYPES[case.dtype] or given.shape != expected.shape or not np.isfinite(given).all():
        return float("inf")
    relative, least = ROUNDED[case.dtype]
    return float((np.abs(given - expected) / (bound + np.abs(expected) * (relative + SLACK) + least)).max())


def bits(array: mx.array) -> np.ndarray:
    """The bits of an array of floats."""
    return np.array(array.view({4: mx.uint32, 2: mx.uint16}[array.dtype.size]))


def results(case: Case, given: Data, device: CpuDevice, rows: slice = slice(None)) -> list[mx.array]:
    """Run both steps on some rows: feature [M, N], keys and values."""
    feature = feature_fusion([tap[rows] for tap in given.taps], given.fc, given.gain, case.eps, device=device)
    offset = case.offset + (rows.start or 0)
    return [feature, *context_rows(given.feature[rows], given.context, offset, device=device)]


def broken_promise(case: Case, rows: Iterable[int], mistrust: bool = False) -> str:
    """Run a case and give the first promise that it breaks, or "".

    Args:
        rows: those that are also run alone.
        mistrust: all runs are checked, not the first only: a faulty kernel in the fast build would end the process.
    Raises:
        KernelFault: the harness found a fault.
    """
    given, device = data(case), case.device(checked=True)
    outputs = results(case, given, device)
    truths = [feature_truth(case, given), *context_truth(case, given)]
    for name, output, truth in zip(("feature", "keys", "values"), outputs, truths, strict=True):
        if not (parts := error(case, output, truth)) <= 1:
            return f"the {name}'s error is {parts:.3g} times what is allowed"
    if wasted := wasted_bytes(case, given, device.counts):
        return wasted
    again = results(case, given, CpuDevice(checked=mistrust))
    if not all(np.array_equal(bits(one), bits(two)) for one, two in zip(outputs, again, strict=True)):
        return "bits depend on the build or on the order of threads"
    for row in rows:
        alone = results(case, given, case.device(mistrust), slice(row, row + 1))
        for one, all_rows in zip(alone, outputs, strict=True):
            if not np.array_equal(np.take(bits(one), 0, -2), np.take(bits(all_rows), row, -2)):
                return f"row {row} has other bits alone"
    return ""


def wasted_bytes(case: Case, given: Data, counts: list[Counts]) -> str:
    """Compare the bytes of both steps with the least possible."""
    first, norm, second, last = counts
    size, rows = DTYPES[case.dtype].size, case.rows
    table = {
        **_product_bytes("fc", first, given.fc, rows, case.taps * case.width, size),
        **_product_bytes("K and V", second, given.context.weight, rows, case.width, size),
        "read by the norm": (norm.unique["product"], 4 * rows * case.outputs),
        "read by the norm, twice": (norm.read["product"], 8 * rows * case.outputs),
        "written by the norm": (norm.written["feature"], size * rows * case.outputs),
        "read for K, twice, and V": (last.read["product"], 6 * rows * given.context.weight.outputs),
        "keys and values": (
            last.written["keys"] + last.written["values"],
            size * rows * given.context.weight.outputs,
        ),
    }
    return "".join(f"{what}: {given} and not {wanted}. " for what, (given, wanted) in table.items() if given != wanted)


def _product_bytes(
    name: str, counts: Counts, matrix: Weight, rows: int, inputs: int, size: int
) -> dict[str, tuple[int, int]]:
    """What a product reads and writes, beside the least: each weight once, the inputs once per threadgroup."""
    groups = -(-matrix.outputs // (TILE * COLUMN_TILES))
    taps = [f"tap{i}" for i in range(8)]
    scales = sum(part.nbytes for part in (matrix.scales, matrix.biases) if part is not None)
    row_tiles = -(-rows // TILE)
    # Products of 8x8 matrices, and the sum of the inputs of a group: 3 shuffles for each of a lane's 2 rows.
    operations = inputs // TILE * COLUMN_TILES + (6 * inputs // matrix.group if matrix.bits else 0)
    asked = matrix.array.nbytes // matrix.outputs * groups * TILE * COLUMN_TILES  # past the end the last row again
    return {
        f"{name}: weights": (counts.unique["w"], matrix.array.nbytes),
        f"{name}: weights per threadgroup": (counts.per_group["w"], matrix.array.nbytes),
        f"{name}: weights that the lanes ask for": (counts.read["w"], asked),
        f"{name}: scales and biases": (counts.per_group["scales"] + counts.per_group["biases"], scales),
        f"{name}: inputs": (sum(counts.unique[tap] for tap in taps), rows * inputs * size),
        f"{name}: inputs per threadgroup": (sum(counts.per_group[tap] for tap in taps), groups * rows * inputs * size),
        f"{name}: product": (counts.written["product"], 4 * rows * matrix.outputs),
        f"{name}: inputs that the lanes ask for": (
            sum(counts.read[tap] for tap in taps),
            groups * row_tiles * TILE * inputs * size,
        ),
        f"{name}: operations of simdgroups": (counts.simd_operations, 32 * groups * row_tiles * operations),
        f"{name}: threadgroup memory": (counts.threadgroup_bytes, 8192),
        f"{name}: written there": (counts.threadgroup_written, groups * row_tiles * 8192),
    }
