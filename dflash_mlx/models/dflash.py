"""The DFlash v1 drafter: fills a block of mask tokens in one pass, from the target's own features.

It has no embedding and no head: it reads the target's raw table and raw head. Letters: S block, E model
width, L taps, T context rows. Source: transformers 5.24, `muse_glimmer_assistant`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import mlx.core as mx
import mlx.nn as nn

from ..cache import DRAFTER_SLICE, DrafterContext, ring_reach
from ..drafter_config import DrafterConfig
from ..kernels.block_attention import Block
from ..kernels.feature_fusion import ContextWeights, Weight
from ..kernels.serving import DRAFTER, STOCK, Kernels, Reach
from ..rows import Rows
from ..slots import Slots
from .layers import (
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
    put_views,
    rope,
    split_heads,
    swiglu,
)
from .muse_glimmer import MuseGlimmer


class Encoder(nn.Module):
    """Joins the taps into one context feature: norm(fc [tap 1 | .. | tap L]), [T, E]."""

    def __init__(self, config: DrafterConfig, kernels: Kernels):
        super().__init__()
        self.kernels = kernels
        self.fc = nn.Linear(len(config.taps) * config.hidden_size, config.hidden_size, bias=False)
        self.output_norm_enc = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def __call__(self, taps: Sequence[mx.array]) -> mx.array:
        norm = self.output_norm_enc
        return self.kernels.feature(taps, Weight.of(self.fc), norm.weight, norm.eps)


class Attention(Projections):
    """The block's queries over the projected context and the block's own keys."""

    def __init__(self, config: DrafterConfig, kernels: Kernels):
        super().__init__(config)
        self.kernels = kernels
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.config = config
        self.sizes = config.num_heads, config.num_kv_heads, config.head_dim

    def keys_values(self, x: mx.array, offset: int) -> tuple[mx.array, mx.array]:
        """Keys and values of [T, E] for positions offset..offset+T-1, each [1, Hk, T, D]."""
        config, k, v = self.config, matrix(self["k_proj"]), matrix(self["v_proj"])
        keys, values = keys_values(x, k, v, self["k_norm"].norm, config.num_kv_heads, config.head_dim)
        return rope(keys, self.config.rope_theta, offset), values

    @property
    def projections(self) -> tuple[Matrix, ...]:
        """What the block's normed rows are multiplied by: for queries, keys and values."""
        return matrix(self["q_proj"]), matrix(self["k_proj"]), matrix(self["v_proj"])

    @property
    def norms(self) -> tuple[Norm, Norm]:
        """Of queries and keys."""
        return self["q_norm"].norm, self["k_norm"].norm

    def __call__(
        self, queries: mx.array, keys: mx.array, values: mx.array, rows: Rows, offset: int, reach: Reach
    ) -> mx.array:
        """Attention of a block over the context and itself.

        Args:
            queries, keys, values: [1, H, S, D] and twice [1, Hk, S, D], as `projected` gives them.
            rows: the layer's context; the block's keys and values are written past it.
            offset: position of the block's first row.
            reach: what the rows see.
        Returns:
            [1, H, S, D], lazy.
        """
        config = self.config
        queries, keys = (rope(x, config.rope_theta, offset) for x in (queries, keys))
        rows.write(offset, keys, values)
        return self.kernels.attend(DRAFTER, queries, rows.keys, rows.values, reach, config.head_dim**-0.5)


@partial(mx.compile, shapeless=True)
def keys_values(
    x: mx.array, k: Matrix, v: Matrix, norm: Norm, num_kv_heads: int, size: int
) -> tuple[mx.array, mx.array]:
    """Keys without their positions and values of [T, E], each [1, Hk, T, D]."""
    keys, values = split_heads(linear(x, k), num_kv_heads, size), split_heads(linear(x, v), num_kv_heads, size)
    return heads(normed(keys, *norm)), heads(values)


@partial(mx.compile, shapeless=True)
def projected(
    x: mx.array, projections: tuple[Matrix, ...], norms: tuple[Norm, Norm], sizes: tuple[int, int, int]
) -> tuple[mx.array, mx.array, mx.array]:
    """Queries [1, H, S, D] and keys and values [1, Hk, S, D] of normed rows [S, E], without their positions."""
    (q, k, v), (num_heads, num_kv_heads, size) = projections, sizes
    queries = normed(split_heads(linear(x, q), num_heads, size), *norms[0])
    return heads(queries), *keys_values(x, k, v, norms[1], num_kv_heads, size)


@partial(mx.compile, shapeless=True)
def before_attention(
    x: mx.array, norm: Norm, projections: tuple[Matrix, ...], norms: tuple[Norm, Norm], sizes: tuple[int, int, int]
) -> tuple[mx.array, mx.array, mx.array]:
    """As `projected`, of rows before the layer's norm."""
    return projected(normed(x, *norm), projections, norms, sizes)


class Layer(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, config: DrafterConfig, kernels: Kernels):
        super().__init__()
        self.self_attn = Attention(config, kernels)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def __call__(self, x: mx.array, rows: Rows, offset: int, reach: Reach) -> mx.array:
        attention = self["self_attn"]
        block = before_attention(
            x, self["input_layernorm"].norm, attention.projections, attention.norms, attention.sizes
        )
        attended = attention(*block, rows, offset, reach)
        norm, mlp = self["post_attention_layernorm"].norm, self["mlp"].matrices
        return after_attention(x, attended, matrix(attention["o_proj"]), norm, mlp)


@partial(mx.compile, shapeless=True)
def after_attention(x: mx.array, attended: mx.array, o: Matrix, norm: Norm, mlp: tuple[Matrix, ...]) -> mx.array:
    """The layer's output [S, E] from its input [S, E] and what attention gave, [1, H, S, D]."""
    x = x + linear(merge_heads(attended), o)
    return x + swiglu(normed(x, *norm), *mlp)


class DFlash(nn.Module):
    """The drafter. Its context lives in a `DrafterContext`, one per session."""

    generation = "DFlash v1"
    layer: type[Layer] = Layer

    def __init__(self, config: DrafterConfig, kernels: Kernels = STOCK):
        super().__init__()
        self.config, self.kernels = config, kernels
        self.context_weights: ContextWeights | None = None
        self.encoder = Encoder(config, kernels)
        self.layers = [self.layer(config, kernels) for _ in range(config.num_layers)]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    @property
    def dtype(self) -> mx.Dtype:
        """Of the drafter's activations; the target's may be another."""
        return self.norm.weight.dtype

    def extend(self, context: DrafterContext, taps: Sequence[mx.array]) -> None:
        """Project the taps of the next positions and write them past the context's offset.

        Args:
            context: the session's; the caller advances it by the rows it keeps.
            taps: L arrays [T, E] for positions offset..offset+T-1, T at most the ring's rows less its window.
        """
        context.reserve(taps[0].shape[0])
        # The features are not passed through the layers' input norm; only the block's rows are.
        features, offset = self.encoder([tap.astype(self.dtype) for tap in taps]), context.offset
        made = self.kernels.context_rows(
            features,
            self.context_weights,
            offset,
            lambda: [layer.self_attn.keys_values(features, offset) for layer in self.layers],
        )
        for rows, (keys, values) in zip(context.layers, made, strict=True):
            rows.write(offset, keys, values)

    def stack_context(self) -> None:
        """Put the K and V projections of all layers into one array, as `Kernels.context_rows` wants them.

        The layers' own weights become views of it, so that nothing is held twice.
        """
        config = self.config
        projections = [each for layer in self.layers for each in (layer.self_attn.k_proj, layer.self_attn.v_proj)]
        stack = Weight.stack([Weight.of(each) for each in projections])
        gains = mx.stack([layer.self_attn.k_norm.weight for layer in self.layers])
        put_views(projections, (stack.array, stack.scales, stack.biases))
        self.context_weights = ContextWeights(stack, gains, config.num_kv_heads, config.rope_theta, config.rms_norm_eps)

    def draft(self, block: mx.array, context: DrafterContext, target: MuseGlimmer, rows: int) -> Slots:
        """Draft one block after the context; nothing is kept and nothing is evaluated.

        Args:
            block: [S] uint32, the anchor and the mask tokens.
            context: holds the positions before the anchor's.
            target: whose raw table and raw head are read.
            rows: how many slots to score, M.
        Returns:
            What it says of slots 1..M; slot i is the token at offset + i.
        """
        x = self.hidden(self.embedded(target.embed_tokens(block).astype(self.dtype)), context)
        return self.slots(x[1 : 1 + rows], block[:1], target)

    def draft_logits(self, block: mx.array, context: DrafterContext, target: MuseGlimmer, rows: int) -> mx.array:
        """The logits of `draft`, [M, V] float32."""
        return self.draft(block, context, target, rows).logits

    def embedded(self, x: mx.array) -> mx.array:
        """The block's first hidden rows, from the target's raw table's, [S, E]."""
        return x

    def slots(self, x: mx.array, anchor: mx.array, target: MuseGlimmer) -> Slots:
        """What the last hidden rows [M, E] say: raw head logits. `anchor` is [1]."""
        return Slots(target.head(x).astype(mx.float32), target.config.output_multiplier)

    def hidden(self, x: mx.array, context: DrafterContext) -> mx.array:
        """The block's last hidden rows, [S, E] -> [S, E]."""
        size, offset, config = x.shape[0], context.offset, self.config
        context.reserve(size)
        block = Block((offset,), config.span, config.causal, (context.start,))
        reach = ring_reach(block, size, context.ring, DRAFTER_SLICE)
        for layer, rows in zip(self.layers, context.layers, strict=True):
            x = layer(x, rows, offset, reach)
        return self.norm(x)
