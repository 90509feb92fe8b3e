"""Layers that two models use. Norms compute in float32 and return the input's dtype.

What a layer does between two attentions is one compiled function, `shapeless` as rows differ: MLX traces it once for
each set of dtypes and numbers among its arguments, whatever the model, and Python then builds as good as nothing of it.
So such functions get arrays and numbers, not modules, and may take no size from a shape: the trace would keep it.
Letters: T rows, E model width, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..config import Shape

Matrix = tuple[Any, ...]  # of a linear layer: (weight,), or what `mx.quantized_matmul` takes
Norm = tuple[mx.array, float]  # the factor per channel, and epsilon


def rms(x: mx.array, eps: float) -> mx.array:
    """RMS norm without a weight over the last axis."""
    return mx.fast.rms_norm(x, None, eps)


def normed(x: mx.array, gain: mx.array, eps: float) -> mx.array:
    """x * (mean(x^2) + eps)^-1/2 * gain over the last axis."""
    return mx.fast.rms_norm(x, gain, eps).astype(x.dtype)


class RMSNorm(nn.Module):
    """RMS norm with a weight."""

    def __init__(self, dims: int, eps: float):
        super().__init__()
        self.weight = mx.ones((dims,))
        self.eps = eps

    @property
    def norm(self) -> Norm:
        return self["weight"], self.eps

    def __call__(self, x: mx.array) -> mx.array:
        return normed(x, *self.norm)


class CentredRMSNorm(nn.Module):
    """RMS norm whose weight is stored around 0 and used as 1 + weight.

    The sum is formed in float32: rounding 1 + weight to bfloat16 changes which token is chosen.
    """

    def __init__(self, dims: int, eps: float):
        super().__init__()
        self.weight = mx.zeros((dims,))
        self.eps = eps
        self._gain: tuple[mx.array, mx.array] | None = None

    @property
    def norm(self) -> Norm:
        weight, gain = self["weight"], self.get("_gain")
        if gain is None or gain[0] is not weight:
            self._gain = gain = (weight, 1 + weight.astype(mx.float32))
        return gain[1], self.eps

    def __call__(self, x: mx.array) -> mx.array:
        return normed(x, *self.norm)


def matrix(linear: nn.Linear | nn.QuantizedLinear) -> Matrix:
    """The matrix of a linear layer, for `linear`: plain arrays and numbers, as a compiled function takes them."""
    if isinstance(linear, nn.QuantizedLinear):
        arrays = linear["weight"], linear["scales"], linear.get("biases")
        return *arrays, linear.group_size, linear.bits, linear.mode
    return (linear["weight"],)


def linear(x: mx.array, matrix: Matrix) -> mx.array:
    """x times the transposed matrix of a linear layer, [T, E] -> [T, N]."""
    if len(matrix) == 1:
        return x @ matrix[0].T
    weight, scales, biases, group, bits, mode = matrix
    return mx.quantized_matmul(x, weight, scales, biases, True, group, bits, mode)


def stack(linears: Sequence[nn.Linear | nn.QuantizedLinear]) -> Matrix | None:
    """The matrices of linear layers over the same input as rows of one, lazy; `None` where their formats differ.

    The layers' own arrays become views of it, so that nothing is held twice.
    """
    matrices = [matrix(linear) for linear in linears]
    formats = {tuple((x.dtype, x.shape[1:]) if isinstance(x, mx.array) else x for x in each) for each in matrices}
    if len(formats) > 1:
        return None
    whole = tuple(mx.concatenate(list(x)) if isinstance(x[0], mx.array) else x[0] for x in zip(*matrices, strict=True))
    put_views(linears, whole)
    return whole


def put_views(linears: Sequence[nn.Linear | nn.QuantizedLinear], whole: Matrix) -> None:
    """Put views of a stacked matrix into the layers whose rows it has, one after the other."""
    end = 0
    for linear in linears:
        begin, end = end, end + linear["weight"].shape[0]
        for name, array in zip(("weight", "scales", "biases"), whole, strict=False):
            if isinstance(array, mx.array):
                linear[name] = array[begin:end]


def product(x: mx.array, matrices: tuple[Matrix, ...]) -> mx.array:
    """x times several matrices, the results side by side as a stacked matrix gives them: [T, E] -> [T, N + N' + ..]."""
    results = [linear(x, each) for each in matrices]
    return results[0] if len(results) == 1 else mx.concatenate(results, axis=1)


class Projections(nn.Module):
    """The four projections of an attention: E -> H * D, twice E -> Hk * D, and H * D -> E."""

    def __init__(self, shape: Shape):
        super().__init__()
        width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)


class SwiGLU(nn.Module):
    """down(silu(gate x) * up x), [T, E] -> [T, E]."""

    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return matrix(self["gate_proj"]), matrix(self["up_proj"]), matrix(self["down_proj"])

    def __call__(self, x: mx.array) -> mx.array:
        return swiglu(x, *self.matrices)


@partial(mx.compile, shapeless=True)
def swiglu(x: mx.array, gate: Matrix, up: Matrix, down: Matrix) -> mx.array:
    """down(silu(gate x) * up x)."""
    return linear(nn.silu(linear(x, gate)) * linear(x, up), down)


def split_heads(x: mx.array, count: int, size: int) -> mx.array:
    """[T, count * size] -> [T, count, size]: here a norm finds its rows without gaps, and copies nothing."""
    return mx.unflatten(x, 1, (count, size))


def heads(x: mx.array) -> mx.array:
    """[T, H, D] -> [1, H, T, D]."""
    return x.swapaxes(0, 1)[None]


def merge_heads(x: mx.array) -> mx.array:
    """[1, H, T, D] -> [T, H * D]."""
    return x.squeeze(0).swapaxes(0, 1).flatten(1)


def rope(x: mx.array, theta: float, offset: int) -> mx.array:
    """Rotate [1, H, T, D] at positions offset..offset+T-1: split halves, the whole head."""
    return mx.fast.rope(x, x.shape[-1], traditional=False, base=theta, scale=1.0, offset=offset)
