"""Muse Glimmer's text model: sliding layers with RoPE, full layers without, sandwich norms, gated attention.

Letters: T tokens of a forward (of one session or of several), E model width, H query heads, Hk key/value
heads, D head size, V vocabulary. Source of the architecture: transformers 5.24, `muse_glimmer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import is_
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..cache import Lane, Part, lanes
from ..config import FULL, TargetConfig
from ..kernels.serving import STOCK, TARGET_FULL, TARGET_SLIDING, Kernels
from .layers import (
    CentredRMSNorm,
    Matrix,
    Norm,
    Projections,
    RMSNorm,
    SwiGLU,
    heads,
    linear,
    matrix,
    merge_heads,
    normed,
    product,
    rms,
    rope,
    split_heads,
    stack,
    swiglu,
)

SUBMIT_LAYERS = 4  # after so many layers the device gets what there is of the graph, and works while the rest is built


class Forward(NamedTuple):
    """What a forward returns: logits of the rows asked for, [N, V], and the tapped layers' rows, [T, E] each."""

    logits: mx.array | None
    taps: list[mx.array]


class Attention(Projections):
    """Grouped-query attention with scaleless QK norm and an output gate from the layer's input."""

    def __init__(self, config: TargetConfig, index: int, kernels: Kernels):
        super().__init__(config)
        self.kernels = kernels
        self.gate_proj = nn.Linear(config.hidden_size, config.num_heads * config.head_dim, bias=False)
        self.index, self.config = index, config
        self._stacked: tuple[Matrix, Matrix] | None = None  # queries and keys as one matrix, and the views of it
        self.sizes = config.num_heads, config.num_kv_heads, config.head_dim
        self.full = config.layer_types[index] == FULL
        # q * qk_scale / sqrt(D): RoPE is linear, so the query's factor joins the softmax scale.
        self.scale = config.qk_scale * config.head_dim**-0.5

    def stack(self) -> None:
        """Put the matrices of queries and keys into one: then one product, one norm and one rotation serve both."""
        whole = stack((self.q_proj, self.k_proj))
        self._stacked = None if whole is None else (whole, (*matrix(self.q_proj), *matrix(self.k_proj)))

    @property
    def queries_keys(self) -> tuple[Matrix, ...]:
        """What gives queries and keys: one matrix where they are stacked, two where a view of it was replaced."""
        q, k, stacked = matrix(self["q_proj"]), matrix(self["k_proj"]), self._stacked
        if stacked is None:
            return q, k
        whole, views = stacked
        if all(map(is_, (*q, *k), views)):
            return (whole,)
        self._stacked = None  # it would keep memory alive
        return q, k

    def __call__(self, both: mx.array, values: mx.array, lanes: Sequence[Lane]) -> mx.array:
        """Attention of all sessions' rows: queries and keys [1, H + Hk, T, D], values [1, Hk, T, D] -> [1, H, T, D]."""
        if len(lanes) == 1:
            return self._attend(lanes[0], both, values)
        each = (self._attend(lane, both[:, :, lane.rows], values[:, :, lane.rows]) for lane in lanes)
        return mx.concatenate(list(each), axis=2)

    def _attend(self, lane: Lane, both: mx.array, values: mx.array) -> mx.array:
        """Attention of one session's rows: arguments and result as `__call__`."""
        if self.config.rope_layers[self.index]:
            both = rope(both, self.config.rope_theta, lane.offset)
        queries, keys = both[:, : self.config.num_heads], both[:, self.config.num_heads :]
        keys, values, reach = lane.write(self.index, self.full, keys, values)
        place = TARGET_FULL if self.full else TARGET_SLIDING
        return self.kernels.attend(place, queries, keys, values, reach, self.scale)


class Layer(nn.Module):
    """Attention and MLP, each between a norm before it and a norm after it."""

    def __init__(self, config: TargetConfig, index: int, kernels: Kernels):
        super().__init__()
        self.self_attn = Attention(config, index, kernels)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)
        self.input_layernorm = CentredRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = CentredRMSNorm(config.hidden_size, config.post_norm_eps)
        self.pre_feedforward_layernorm = CentredRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = CentredRMSNorm(config.hidden_size, config.post_norm_eps)

    def __call__(self, x: mx.array, lanes: Sequence[Lane]) -> mx.array:
        attention = self["self_attn"]
        queries_keys, values, gate = before_attention(
            x,
            self["input_layernorm"].norm,
            attention.queries_keys,
            matrix(attention["v_proj"]),
            matrix(attention["gate_proj"]),
            attention.sizes,
        )
        return after_attention(
            x,
            attention(queries_keys, values, lanes),
            gate,
            matrix(attention["o_proj"]),
            self["post_attention_layernorm"].norm,
            self["pre_feedforward_layernorm"].norm,
            self["mlp"].matrices,
            self["post_feedforward_layernorm"].norm,
        )


@partial(mx.compile, shapeless=True)
def before_attention(
    x: mx.array, norm: Norm, queries_keys: tuple[Matrix, ...], v: Matrix, gate: Matrix, sizes: tuple[int, int, int]
) -> tuple[mx.array, mx.array, mx.array]:
    """Queries and keys [1, H + Hk, T, D], values [1, Hk, T, D], and the gate before its sigmoid [T, H * D]."""
    (num_heads, num_kv_heads, size), (_, eps) = sizes, norm
    x = normed(x, *norm)
    both = rms(split_heads(product(x, queries_keys), num_heads + num_kv_heads, size), eps)
    return heads(both), heads(split_heads(linear(x, v), num_kv_heads, size)), linear(x, gate)


@partial(mx.compile, shapeless=True)
def after_attention(
    x: mx.array,
    attended: mx.array,
    gate: mx.array,
    o: Matrix,
    post_attention: Norm,
    pre_feedforward: Norm,
    mlp: tuple[Matrix, ...],
    post_feedforward: Norm,
) -> mx.array:
    """The layer's output [T, E] from its input [T, E] and what attention gave, [1, H, T, D]."""
    x = x + normed(linear(merge_heads(attended) * mx.sigmoid(gate), o), *post_attention)
    return x + normed(swiglu(normed(x, *pre_feedforward), *mlp), *post_feedforward)


class MuseGlimmer(nn.Module):
    """The target. One forward serves prefill, plain decoding and verification."""

    def __init__(self, config: TargetConfig, kernels: Kernels = STOCK):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [Layer(config, index, kernels) for index in range(config.num_layers)]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def stack(self) -> None:
        """Once the weights are there: put those into one that one product can serve."""
        for layer in self.layers:
            layer.self_attn.stack()

    def head(self, x: mx.array) -> mx.array:
        """The raw head, [.., E] -> [.., V]: no multiplier, no soft cap (the drafter reads it like this)."""
        return self.embed_tokens.as_linear(x) if self.config.tie_word_embeddings else self.lm_head(x)

    def __call__(self, tokens: mx.array, parts: Sequence[Part], taps: Sequence[int] = ()) -> Forward:
        """Run the parts' rows; they are written past each cache's offset. Work is submitted, nothing is waited for.

        Args:
            tokens: [T] uint32, the parts' tokens one part after the other.
            parts: whose rows they are; the rows sum to T.
            taps: layers whose output rows are wanted, increasing.
        Returns:
            logits [N, V] float32 of the rows asked for, part after part (`None` where N is 0), and the taps.
        """
        x = rms(self.embed_tokens(tokens), self.config.rms_norm_eps)
        sessions = lanes(parts)
        tapped = []
        for index, layer in enumerate(self.layers):
            x = layer(x, sessions)
            if index in taps:
                tapped.append(x)
            if (index + 1) % SUBMIT_LAYERS == 0:
                mx.async_eval(x)
        wanted = [
            x[lane.rows.stop - part.logits : lane.rows.stop]
            for lane, part in zip(sessions, parts, strict=True)
            if part.logits
        ]
        if not wanted:
            return Forward(None, tapped)
        rows = wanted[0] if len(wanted) == 1 else mx.concatenate(wanted)
        return Forward(self._logits(self.norm(rows)), tapped)

    def _logits(self, rows: mx.array) -> mx.array:
        """multiplier first, then the soft cap, in float32."""
        return soft_cap(self.head(rows), self.config.output_multiplier / self.config.softcap, self.config.softcap)


@partial(mx.compile, shapeless=True)
def soft_cap(x: mx.array, factor: float, cap: float) -> mx.array:
    """cap * tanh(factor * x) in float32."""
    return cap * mx.tanh(x.astype(mx.float32) * factor)
