"""What is tried when feature fusion qualifies: random weights of this drafter's sizes and format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import mlx.core as mx
import numpy as np

from .feature_fusion import (
    MAX_ROWS,
    ContextWeights,
    Weight,
    context_rows,
    feature_fusion,
    feature_fusion_ops,
)
from .launch import Device
from .places import ContextPlace, FeaturePlace
from .qualify import Case

ROWS = (1, 5, 8, MAX_ROWS)
ROTATED_BYTES = 1 << 28  # of weights that a chain runs through, where one alone would stay in the processor's caches
MOST_WEIGHTS, LINKS = 8, 4
EXACT_COLUMNS = 512  # of a weight that are widened to float64 at a time
OFFSET = 100_003  # a late position, where a rotation by a rounded angle is worst


def draw(shape: tuple[int, ...], dtype: mx.Dtype, seed: int) -> mx.array:
    """Normal numbers."""
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def draw_weight(outputs: int, inputs: int, bits: int, group: int, dtype: mx.Dtype, seed: int = 0) -> Weight:
    """A random weight, as floats or in groups, evaluated."""
    array = draw((outputs, inputs), dtype, seed) * mx.array(inputs**-0.5, dtype)
    weight = Weight(*mx.quantize(array, group_size=group, bits=bits), group, bits) if bits else Weight(array)
    mx.eval([part for part in (weight.array, weight.scales, weight.biases) if part is not None])
    return weight


def exact_product(x: np.ndarray, weight: Weight) -> np.ndarray:
    """x [M, K] times a weight in float64, some columns at a time."""
    columns = []
    for begin in range(0, weight.outputs, EXACT_COLUMNS):
        part = weight.part(begin, min(begin + EXACT_COLUMNS, weight.outputs))
        wide = part.array
        if part.scales is not None and part.biases is not None:
            scales, biases = part.scales.astype(mx.float32), part.biases.astype(mx.float32)
            wide = mx.dequantize(part.array, scales, biases, group_size=part.group, bits=part.bits)
        columns.append(x @ widened(wide).T)
    return np.concatenate(columns, axis=1)


def widened(array: mx.array) -> np.ndarray:
    """An array in float64."""
    return np.array(array.astype(mx.float32)).astype(np.float64)


def exact_norm(x: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
    """RMS norm over the last axis."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * gain


def rotated(width_bytes: int) -> int:
    """How many weights a chain runs through."""
    return max(1, min(MOST_WEIGHTS, ROTATED_BYTES // max(1, width_bytes)))


class FeatureTrial:
    """Trials of the taps' way to the context feature."""

    contexts: Sequence[int] = (0,)

    def __init__(self, place: FeaturePlace):
        self.place, self.dtype = place, place.dtype
        self._kind: mx.Dtype = getattr(mx, place.dtype)
        self._weights: list[Weight] = []

    def _weight(self, seed: int = 0) -> Weight:
        place = self.place
        return draw_weight(place.width, place.width * place.taps, place.bits, place.group, self._kind, seed)

    def cases(self, device: Device) -> Iterator[Case]:
        """Rows of ordinary, large and no size, against float64."""
        place = self.place
        weight, gain = self._weight(), 1 + draw((place.width,), self._kind, 1) / 8
        taps = [draw((MAX_ROWS, place.width), self._kind, 2 + tap) for tap in range(place.taps)]
        size = mx.array([0.0 if row == 3 else 100.0 if row == 4 else 1.0 for row in range(MAX_ROWS)], self._kind)
        taps = [tap * size[:, None] for tap in taps]
        exact = exact_product(np.concatenate([widened(tap) for tap in taps], axis=1), weight)
        exact = exact_norm(exact, widened(gain), place.eps)

        def fused(begin: int, end: int) -> mx.array:
            return feature_fusion([tap[begin:end] for tap in taps], weight, gain, place.eps, device=device)

        def stock(rows: int) -> mx.array:
            return feature_fusion_ops([tap[:rows] for tap in taps], weight, gain, place.eps)

        for rows in ROWS:
            yield Case(
                "rows of many sizes",
                rows,
                partial(fused, 0, rows),
                partial(stock, rows),
                partial(exact.__getitem__, slice(rows)),
                lambda row: fused(row, row + 1),
            )

    def chain(self, rows: int, context: int, device: Device | None) -> list[mx.array]:
        """Each call takes the last one's feature as its taps, and the next weight."""
        place = self.place
        if not self._weights:
            first = self._weight()
            self._weights = [first, *(self._weight(seed) for seed in range(1, rotated(first.nbytes)))]
        gain = mx.ones((place.width,), self._kind)
        x, links = mx.ones((rows, place.width), self._kind), []
        for link in range(max(LINKS, len(self._weights))):
            taps, weight = [x] * place.taps, self._weights[link % len(self._weights)]
            if device is None:
                x = feature_fusion_ops(taps, weight, gain, place.eps)
            else:
                x = feature_fusion(taps, weight, gain, place.eps, device=device)
            links.append(x)
        return links

    def warm(self, device: Device) -> mx.array:
        """The smallest call that makes this place's pipelines: a square weight as wide as a tap."""
        place = self.place
        weight = draw_weight(place.width, place.width, place.bits, place.group, self._kind)
        x = mx.zeros((1, place.width), self._kind)
        return feature_fusion([x], weight, mx.ones((place.width,), self._kind), place.eps, device=device)


class ContextTrial:
    """Trials of the feature's way to the keys and values of all the drafter's layers."""

    contexts: Sequence[int] = (OFFSET,)

    def __init__(self, place: ContextPlace):
        self.place, self.dtype = place, place.dtype
        self._kind: mx.Dtype = getattr(mx, place.dtype)
        self._weights: list[ContextWeights] = []

    def _make(self, seed: int = 0) -> ContextWeights:
        place = self.place
        outputs = 2 * place.layers * place.kv_heads * place.size
        weight = draw_weight(outputs, place.width, place.bits, place.group, self._kind, seed)
        gains = 1 + draw((place.layers, place.size), self._kind, 1) / 8
        return ContextWeights(weight, gains, place.kv_heads, place.theta, place.eps)

    def cases(self, device: Device) -> Iterator[Case]:
        """Keys and values as one array, against float64."""
        place, weights = self.place, self._make()
        feature = draw((MAX_ROWS, place.width), self._kind, 2)
        exact = self._exact(feature, weights)

        def fused(begin: int, end: int) -> mx.array:
            return mx.stack([*context_rows(feature[begin:end], weights, OFFSET + begin, device=device)])

        def stock(rows: int) -> mx.array:
            return mx.stack([*layer_by_layer(feature[:rows], weights, OFFSET)])

        for rows in ROWS:
            yield Case(
                "keys and values",
                rows,
                partial(fused, 0, rows),
                partial(stock, rows),
                partial(exact.__getitem__, (..., slice(rows), slice(None))),
                lambda row: fused(row, row + 1),
            )

    def _exact(self, feature: mx.array, weights: ContextWeights) -> np.ndarray:
        """[2, layers, Hk, M, D] in float64: keys normed and rotated, and values."""
        place = self.place
        shape = (MAX_ROWS, place.layers, 2, place.kv_heads, place.size)
        keys, values = exact_product(widened(feature), weights.weight).reshape(shape).transpose(2, 1, 3, 0, 4)
        normed = exact_norm(keys, widened(weights.gains)[:, None, None], place.eps)
        half = place.size // 2
        angles = (OFFSET + np.arange(MAX_ROWS))[:, None] * place.theta ** (-np.arange(half) / half)
        low, high = normed[..., :half], normed[..., half:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.stack([np.concatenate([low * cos - high * sin, low * sin + high * cos], axis=-1), values])

    def chain(self, rows: int, context: int, device: Device | None) -> list[mx.array]:
        """Each call's feature hangs on all of the last one's keys and values."""
        place = self.place
        if not self._weights:
            first = self._make()
            self._weights = [first, *(self._make(seed) for seed in range(1, rotated(first.weight.nbytes)))]
        x, links = mx.ones((rows, place.width), self._kind), []
        for link in range(max(LINKS, len(self._weights))):
            weights = self._weights[link % len(self._weights)]
            if device is None:
                keys, values = layer_by_layer(x, weights, context)
            else:
                keys, values = context_rows(x, weights, context, device=device)
            x = x * (1 + 1e-6 * mx.mean(keys + values, axis=(0, 1, 3)))[:, None].astype(x.dtype)
            links.append(x)
        return links

    def warm(self, device: Device) -> mx.array:
        """One row through weights of this size."""
        keys, _ = context_rows(mx.zeros((1, self.place.width), self._kind), self._make(), 0, device=device)
        return keys


def layer_by_layer(feature: mx.array, weights: ContextWeights, offset: int) -> tuple[mx.array, mx.array]:
    """Keys and values as the drafter's layers make them in stock operations, stacked: each [layers, Hk, M, D]."""
    layers, size = weights.gains.shape
    width, rows, made = weights.kv_heads * size, feature.shape[0], []
    for layer in range(layers):
        begin = 2 * layer * width
        keys, values = (
            weights.weight.part(start, start + width).times(feature).reshape(1, rows, -1, size).transpose(0, 2, 1, 3)
            for start in (begin, begin + width)
        )
        keys = mx.fast.rms_norm(keys, weights.gains[layer], weights.eps)
        keys = mx.fast.rope(keys, size, traditional=False, base=weights.theta, scale=1.0, offset=offset)
        made.append((keys[0], values[0]))
    return mx.stack([keys for keys, _ in made]), mx.stack([values for _, values in made])
