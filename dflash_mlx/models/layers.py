"""Layers that two models use. Norms compute in float32 and return the input's dtype."""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import mlx.nn as nn

from ..config import Shape


def rms(x: mx.array, eps: float) -> mx.array:
    """RMS norm without a weight over the last axis."""
    return mx.fast.rms_norm(x, None, eps)


class RMSNorm(nn.Module):
    """x * (mean(x^2) + eps)^-1/2 * weight over the last axis."""

    def __init__(self, dims: int, eps: float):
        super().__init__()
        self.weight = mx.ones((dims,))
        self.eps = eps

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.weight, self.eps).astype(x.dtype)


class CentredRMSNorm(nn.Module):
    """RMS norm whose weight is stored around 0 and used as 1 + weight.

    The sum is formed in float32: rounding 1 + weight to bfloat16 changes which token is chosen.
    """

    def __init__(self, dims: int, eps: float):
        super().__init__()
        self.weight = mx.zeros((dims,))
        self.eps = eps
        self._gain: tuple[mx.array, mx.array] | None = None

    def __call__(self, x: mx.array) -> mx.array:
        if self._gain is None or self._gain[0] is not self.weight:
            self._gain = (self.weight, 1 + self.weight.astype(mx.float32))
        return mx.fast.rms_norm(x, self._gain[1], self.eps).astype(x.dtype)


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
    """down(silu(gate x) * up x), [.., E] -> [.., E]."""

    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


@partial(mx.compile, shapeless=True)  # one launch in place of two
def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """silu(gate) * up."""
    return nn.silu(gate) * up


@partial(mx.compile, shapeless=True)
def gated(x: mx.array, gate: mx.array) -> mx.array:
    """x * sigmoid(gate)."""
    return x * mx.sigmoid(gate)


def heads(x: mx.array, count: int) -> mx.array:
    """[1, T, count * D] -> [1, count, T, D]."""
    _, rows, width = x.shape
    return x.reshape(1, rows, count, width // count).transpose(0, 2, 1, 3)


def joined(x: mx.array) -> mx.array:
    """[1, H, T, D] -> [1, T, H * D]."""
    _, count, rows, size = x.shape
    return x.transpose(0, 2, 1, 3).reshape(1, rows, count * size)


def rope(x: mx.array, theta: float, offset: int) -> mx.array:
    """Rotate [1, H, T, D] at positions offset..offset+T-1: split halves, the whole head."""
    return mx.fast.rope(x, x.shape[-1], traditional=False, base=theta, scale=1.0, offset=offset)
