"""Muse Glimmer's text model: sliding layers with RoPE, full layers without, sandwich norms, gated attention.

Letters: T tokens of a forward (of one session or of several), E model width, H query heads, Hk key/value
heads, D head size, V vocabulary. Source of the architecture: transformers 5.24, `muse_glimmer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..cache import Lane, Part, lanes
from ..config import FULL, TargetConfig
from ..kernels.serving import STOCK, TARGET_FULL, TARGET_SLIDING, Kernels
from .layers import CentredRMSNorm, Projections, RMSNorm, SwiGLU, gated, heads, joined, rms, rope

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
        self.full = config.layer_types[index] == FULL
        # q * qk_scale / sqrt(D): RoPE is linear, so the query's factor joins the softmax scale.
        self.scale = config.qk_scale * config.head_dim**-0.5

    def __call__(self, x: mx.array, lanes: Sequence[Lane]) -> mx.array:
        config = self.config
        queries = rms(heads(self.q_proj(x), config.num_heads), config.rms_norm_eps)
        keys = rms(heads(self.k_proj(x), config.num_kv_heads), config.rms_norm_eps)
        values = heads(self.v_proj(x), config.num_kv_heads)
        outputs = [self._attend(lane, *(rows[:, :, lane.rows] for rows in (queries, keys, values))) for lane in lanes]
        output = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)
        return self.o_proj(gated(joined(output), self.gate_proj(x)))

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
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), lanes))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


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
        x = rms(self.embed_tokens(tokens), self.config.rms_norm_eps)[None]
        sessions = lanes(parts)
        tapped = []
        for index, layer in enumerate(self.layers):
            x = layer(x, sessions)
            if index in taps:
                tapped.append(x[0])
            if (index + 1) % SUBMIT_LAYERS == 0:
                mx.async_eval(x)
        wanted = [
            x[0, lane.rows.stop - part.logits : lane.rows.stop]
            for lane, part in zip(sessions, parts, strict=True)
            if part.logits
        ]
        if not wanted:
            return Forward(None, tapped)
        rows = wanted[0] if len(wanted) == 1 else mx.concatenate(wanted)
        return Forward(self._logits(self.norm(rows)), tapped)

    def _logits(self, rows: mx.array) -> mx.array:
        """multiplier first, then the soft cap, in float32."""
        cap = self.config.softcap
        scaled = self.head(rows).astype(mx.float32) * (self.config.output_multiplier / cap)
        return cap * mx.tanh(scaled)
