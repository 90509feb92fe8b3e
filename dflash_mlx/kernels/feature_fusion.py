"""From a block's taps to the drafter's context: the launchers, and their twins in stock operations.

Two steps, each with a twin of the same signature: `feature_fusion` joins the taps into the context feature, and
`context_rows` makes the keys and values of all layers from it. Letters: M rows (1..16), E model width, L taps, Hk
key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx
import mlx.nn as nn

from ..errors import DFlashError, must, one_of
from .launch import METAL, Device, Launch, dtype_name, read_kernels, run

FILE, PRODUCT, NORM, KEYS_VALUES = "feature_fusion.metal", "fusion_product", "fusion_norm", "fusion_keys_values"
# These four are the file's own constants.
TILE = 8
ROW_TILES = 2
COLUMN_TILES = 4
SLICES = 8
MAX_ROWS = TILE * ROW_TILES
MAX_TAPS = 8
GROUPS = (32, 64, 128)
BITS = (4, 8)
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
NORM_THREADS = 256
HEADS_TOGETHER = 4  # heads per threadgroup of the last launch
STOCK = "Use the stock operations for it."


@dataclass(frozen=True)
class Weight:
    """The matrix of a linear layer, [N, K]: as floats, or in MLX's affine groups.

    Attributes:
        array: [N, K] of the activations' type, or [N, K * bits / 32] uint32.
        scales, biases: [N, K / group] of the activations' type; None for floats.
        group: inputs that share a scale, 0 for floats.
        bits: per weight, 0 for floats.
    """

    array: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    group: int = 0
    bits: int = 0

    @classmethod
    def of(cls, layer: nn.Linear | nn.QuantizedLinear) -> Weight:
        """Take the weight of a layer without an output bias; nothing is copied.

        Raises:
            DFlashError: the layer has an output bias, or groups that are not affine.
        """
        if "bias" in layer:
            raise DFlashError(must("feature_fusion", "the layer", "without an output bias", "one with it", STOCK))
        if not isinstance(layer, nn.QuantizedLinear):
            return cls(layer.weight)
        if layer.mode != "affine":
            raise DFlashError(must("feature_fusion", "quantisation", "affine", layer.mode, STOCK))
        return cls(layer.weight, layer.scales, layer.biases, layer.group_size, layer.bits)

    @classmethod
    def stack(cls, weights: Sequence[Weight]) -> Weight:
        """Join matrices over their rows, once at load; `part` gives views of it to put in the layers' place.

        Raises:
            DFlashError: they differ in width or format.
        """
        formats = {(part.inputs, part.array.dtype, part.group, part.bits) for part in weights}
        if len(formats) != 1:
            found = ", ".join(str(one) for one in sorted(formats, key=str))
            raise DFlashError(must("feature_fusion", "stacked weights", "of one width and format", found, STOCK))
        array, scales, biases = (
            _joined([getattr(part, name) for part in weights]) for name in ("array", "scales", "biases")
        )
        assert array is not None
        return cls(array, scales, biases, weights[0].group, weights[0].bits)

    @property
    def outputs(self) -> int:
        return int(self.array.shape[0])

    @property
    def inputs(self) -> int:
        width = int(self.array.shape[1])
        return width * 32 // self.bits if self.bits else width

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.array, self.scales, self.biases) if part is not None)

    def part(self, begin: int, end: int) -> Weight:
        """Give the rows begin..end-1, as views."""
        scales = None if self.scales is None else self.scales[begin:end]
        biases = None if self.biases is None else self.biases[begin:end]
        return Weight(self.array[begin:end], scales, biases, self.group, self.bits)

    def times(self, x: mx.array) -> mx.array:
        """Multiply in stock operations: [M, K] -> [M, N]."""
        if self.scales is None:
            return x @ self.array.T
        return mx.quantized_matmul(x, self.array, self.scales, self.biases, True, self.group, self.bits)


def _joined(arrays: list[mx.array | None]) -> mx.array | None:
    """Concatenate the arrays that are there: all or none."""
    there = [array for array in arrays if array is not None]
    return mx.concatenate(there) if there else None


@dataclass(frozen=True)
class ContextWeights:
    """What makes keys and values of all the drafter's layers from one feature; made once at load.

    Attributes:
        weight: [layers * 2 * Hk * D, E]: per layer the rows of its K projection, then of its V projection.
        gains: [layers, D], weights of the key norms.
        kv_heads: Hk.
        theta: RoPE's base.
        eps: of the key norms.
    """

    weight: Weight
    gains: mx.array
    kv_heads: int
    theta: float
    eps: float

    @property
    def frequencies(self) -> mx.array:
        """[D / 2] float32, radians per position."""
        return _frequencies(self.theta, int(self.gains.shape[1]))


@lru_cache(maxsize=8)
def _frequencies(theta: float, size: int) -> mx.array:
    """Give theta^(-2 i / D), rounded once."""
    return mx.array([theta ** (-2 * i / size) for i in range(size // 2)], mx.float32)


@lru_cache(maxsize=16)
def _scalar(value: float, dtype: mx.Dtype) -> mx.array:
    """Give a number as an array without dimensions."""
    return mx.array(value, dtype)


@lru_cache(maxsize=4)
def _nothing(dtype: mx.Dtype) -> mx.array:
    """Stand in for scales and biases where the weights are floats; never read."""
    return mx.zeros((8,), dtype)


def feature_fusion(
    taps: Sequence[mx.array], fc: Weight, gain: mx.array, eps: float, *, device: Device = METAL
) -> mx.array:
    """Join the taps into the context feature, RMSNorm(fc [tap 1 | .. | tap L]), in two launches.

    Args:
        taps: L arrays [M, E] f32, f16 or bf16, L in 1..8, M in 1..16; nothing is concatenated.
        fc: [E, L * E]; floats of the taps' type, or affine groups of 32, 64 or 128 with 4 or 8 bits.
        gain: [E] of the taps' type, the norm's weight.
        eps: the norm's, added to the mean square.
        device: where it runs.
    Returns:
        [M, E] of the taps' type. Row i has the same bits for every M. Lazy: nothing is evaluated here.
    Raises:
        DFlashError: sizes or types that the kernel is not made for.
    """
    _check_product(taps, fc)
    _check_shapes(taps[0].dtype, gain=(gain, (fc.outputs,)))
    rows, dtype = taps[0].shape[0], taps[0].dtype
    product = _product(taps, fc, device)
    launch = Launch(
        read_kernels(FILE)[NORM],
        (product, gain, _scalar(eps, mx.float32)),
        (("T", dtype),),
        (NORM_THREADS, rows, 1),
        (NORM_THREADS, 1, 1),
        (((rows, fc.outputs), dtype),),
    )
    return run(device, launch)[0]


def feature_fusion_ops(taps: Sequence[mx.array], fc: Weight, gain: mx.array, eps: float) -> mx.array:
    """Join the taps with stock operations: the twin of `feature_fusion`, same arguments and result."""
    _check_product(taps, fc)
    _check_shapes(taps[0].dtype, gain=(gain, (fc.outputs,)))
    return mx.fast.rms_norm(fc.times(mx.concatenate(list(taps), axis=-1)), gain, eps)


def context_rows(
    feature: mx.array, weights: ContextWeights, offset: int, *, device: Device = METAL
) -> tuple[mx.array, mx.array]:
    """Make the keys and values of all layers from the context feature, in two launches.

    A kernel of `mx.fast.metal_kernel` cannot write into its inputs, so the rings are not written here: layer i of the
    results goes to its ring with one slice update per buffer (two where the ring wraps), which MLX does in place. Take
    it as `keys[i : i + 1]`, [1, Hk, M, D], which is a view; `keys[i]` would be a copy.

    Args:
        feature: [M, E] f32, f16 or bf16, M in 1..16.
        weights: of the drafter.
        offset: position of row 0; row i is at offset + i.
        device: where it runs.
    Returns:
        keys (normed, RoPE applied) and values, each [layers, Hk, M, D] of the feature's type. Row i has the same bits
        for every M. Lazy: nothing is evaluated here.
    Raises:
        DFlashError: sizes or types that the kernel is not made for.
    """
    _check_context(feature, weights)
    rows, (layers, size), dtype = feature.shape[0], weights.gains.shape, feature.dtype
    heads = 2 * layers * weights.kv_heads
    shape = (layers, weights.kv_heads, rows, size)
    launch = Launch(
        read_kernels(FILE)[KEYS_VALUES],
        (
            _product([feature], weights.weight, device),
            weights.gains,
            weights.frequencies,
            mx.array(offset, mx.int32),
            _scalar(weights.eps, mx.float32),
        ),
        (("T", dtype),),
        (32, heads, rows),
        (32, min(HEADS_TOGETHER, heads), 1),
        ((shape, dtype), (shape, dtype)),
    )
    keys, values = run(device, launch)
    return keys, values


def context_rows_ops(feature: mx.array, weights: ContextWeights, offset: int) -> tuple[mx.array, mx.array]:
    """Make keys and values with stock operations: the twin of `context_rows`, same arguments and result."""
    _check_context(feature, weights)
    rows, (layers, size) = feature.shape[0], weights.gains.shape
    product = weights.weight.times(feature).reshape(rows, layers, 2, weights.kv_heads, size).transpose(2, 1, 3, 0, 4)
    keys, values = product[0], product[1]
    normed = mx.fast.rms_norm(keys, None, weights.eps) * weights.gains[:, None, None]
    turned = mx.fast.rope(normed, size, traditional=False, base=weights.theta, scale=1.0, offset=offset)
    return turned, mx.contiguous(values)


def templates(weight: Weight, dtype: mx.Dtype, width: int) -> tuple[tuple[str, mx.Dtype | int | bool], ...]:
    """Give the template of the product for a weight and taps of this width: one pipeline per type and format."""
    group = weight.group or next(size for size in (64, 32) if width % size == 0)
    return (("T", dtype), ("W", weight.array.dtype), ("BITS", weight.bits), ("GROUP", group))


def _product(taps: Sequence[mx.array], weight: Weight, device: Device) -> mx.array:
    """Multiply [tap 1 | .. | tap L] with a weight: [M, N] float32, one launch."""
    rows, width, dtype = *taps[0].shape, taps[0].dtype
    scales, biases = (_nothing(dtype) if array is None else array for array in (weight.scales, weight.biases))
    launch = Launch(
        read_kernels(FILE)[PRODUCT],
        (*taps, *[taps[-1]] * (MAX_TAPS - len(taps)), weight.array, scales, biases),
        templates(weight, dtype, width),
        (32 * SLICES * -(-weight.outputs // (TILE * COLUMN_TILES)), 1, 1),
        (32 * SLICES, 1, 1),
        (((rows, weight.outputs), mx.float32),),
    )
    return run(device, launch)[0]


def _check_product(taps: Sequence[mx.array], weight: Weight) -> None:
    """Refuse what the product is not made for."""
    if not 1 <= len(taps) <= MAX_TAPS:
        raise DFlashError(must("feature_fusion", "taps", f"1 to {MAX_TAPS} arrays", len(taps), STOCK))
    if len(taps[0].shape) != 2:
        raise DFlashError(must("feature_fusion", "taps", "of shape [M, E]", taps[0].shape, STOCK))
    (rows, width), dtype = taps[0].shape, taps[0].dtype
    shapes, kinds = {tap.shape for tap in taps}, sorted({dtype_name(tap.dtype) for tap in taps})
    group = weight.group if weight.bits else GROUPS[0]
    stored = mx.uint32 if weight.bits else dtype
    problems: list[tuple[bool, str, str, object]] = [
        (len(shapes) > 1, "taps", f"all of shape {taps[0].shape}", sorted(shapes)),
        (not 1 <= rows <= MAX_ROWS, "rows", f"between 1 and {MAX_ROWS}", rows),
        (dtype not in DTYPES or len(kinds) > 1, "type", "float32, float16 or bfloat16 for all taps", ", ".join(kinds)),
        (weight.bits not in (0, *BITS), "bits", one_of(BITS), weight.bits),
        (group not in GROUPS, "group", one_of(GROUPS), group),
        (not group or width % group != 0, "width", f"a multiple of {group}", width),
        (weight.inputs != width * len(taps), "inputs of the weight", f"{width * len(taps)}", weight.inputs),
        (weight.array.dtype != stored, "type of the weight", dtype_name(stored), dtype_name(weight.array.dtype)),
    ]
    for wrong, name, expected, value in problems:
        if wrong:
            raise DFlashError(must("feature_fusion", name, expected, value, STOCK))
    if weight.bits:
        shape = (weight.outputs, weight.inputs // weight.group)
        _check_shapes(dtype, scales=(weight.scales, shape), biases=(weight.biases, shape))


def _check_context(feature: mx.array, weights: ContextWeights) -> None:
    """Refuse what the keys and values are not made for."""
    _check_product([feature], weights.weight)
    layers, size = weights.gains.shape
    outputs = layers * 2 * weights.kv_heads * size
    if size % 2:
        raise DFlashError(must("feature_fusion", "head size", "even", size, STOCK))
    if weights.weight.outputs != outputs:
        raise DFlashError(must("feature_fusion", "rows of the stack", f"{outputs}", weights.weight.outputs, STOCK))
    _check_shapes(feature.dtype, gains=(weights.gains, (layers, size)))


def _check_shapes(dtype: mx.Dtype, **arrays: tuple[mx.array | None, tuple[int, ...]]) -> None:
    """Compare shapes and types, by name."""
    for name, (array, shape) in arrays.items():
        if array is None or (array.shape, array.dtype) != (shape, dtype):
            found = None if array is None else f"{array.shape} and {dtype_name(array.dtype)}"
            raise DFlashError(must("feature_fusion", name, f"of shape {shape} and {dtype_name(dtype)}", found, STOCK))
