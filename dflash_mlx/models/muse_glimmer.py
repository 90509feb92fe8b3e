"""Muse Glimmer's text model: sliding layers with RoPE, full layers without, sandwich norms, gated attention.

Letters: T tokens of a forward (of one session or of several), E model width, H query heads, Hk key/value
heads, D head size, V vocabulary. Source of the architecture: transformers 5.24, `muse_glimmer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
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
    joined,
    matrix,
    normed,
    rms,
    rope,
    split,
    swiglu,
    times,
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
        self.sizes = config.num_heads, config.num_kv_heads, config.head_dim
        self.full = config.layer_types[index] == FULL
        # q * qk_scale / sqrt(D): RoPE is linear, so the query's factor joins the softmax scale.
        self.scale = config.qk_scale * config.head_dim**-0.5

    @property
    def projections(self) -> tuple[Matrix, ...]:
        """What the layer's input is multiplied by: for queries, keys, values and the gate."""
        return matrix(self["q_proj"]), matrix(self["k_proj"]), matrix(self["v_proj"]), matrix(self["gate_proj"])

    def __call__(self, queries: mx.array, keys: mx.array, values: mx.array, lanes: Sequence[Lane]) -> mx.array:
        """Attention of all sessions' rows: queries [1, H, T, D], keys and values [1, Hk, T, D] -> [1, H, T, D]."""
        if len(lanes) == 1:
            return self._attend(lanes[0], queries, keys, values)
        each = (self._attend(lane, *(x[:, :, lane.rows] for x in (queries, keys, values))) for lane in lanes)
        return mx.concatenate(list(each), axis=2)

    def _attend(self, lane: Lane, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        """Attention of one session's rows: queries [1, H, T, D], keys and values [1, Hk, T, D]."""
        if self.config.rope_layers[self.index]:
            queries = rope(queries, self.config.rope_theta, lane.offset)
            keys = rope(keys, self.config.rope_theta, lane.offset)
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
        queries, keys, values, gate = before_attention(
            x, self["input_layernorm"].norm, attention.projections, attention.sizes
        )
        return after_attention(
            x,
            attention(queries, keys, values, lanes),
            gate,
            matrix(attention["o_proj"]),
            self["post_attention_layernorm"].norm,
            self["pre_feedforward_layernorm"].norm,
            self["mlp"].matrices,
            self["post_feedforward_layernorm"].norm,
        )


@partial(mx.compile, shapeless=True)
def before_attention(
    x: mx.array, norm: Norm, projections: tuple[Matrix, ...], sizes: tuple[int, int, int]
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Queries [1, H, T, D], keys and values [1, Hk, T, D], and the gate before its sigmoid [T, H * D], of x [T, E]."""
    (q, k, v, gate), (num_heads, num_kv_heads, size), (_, eps) = projections, sizes, norm
    x = normed(x, *norm)
    queries, keys = rms(split(times(x, q), num_heads, size), eps), rms(split(times(x, k), num_kv_heads, size), eps)
    return heads(queries), heads(keys), heads(split(times(x, v), num_kv_heads, size)), times(x, gate)


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
    x = x + normed(times(joined(attended) * mx.sigmoid(gate), o), *post_attention)
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
