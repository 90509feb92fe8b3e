"""The DFlash-2 drafter: v1 with a small convolution around attention and MLP, and a selector of tokens that fit.

Only a block's own rows are convolved: the context is projected as in v1. Letters: S block, E model width, K taps of a
convolution, G its channels per group, M slots, C candidates, R the selector's rank. Source: dflash 0.1.0, `model.py`.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from ..cache import Rows
from ..drafter_config import DFlash2Config
from ..kernels.serving import STOCK, Kernels, Reach
from ..slots import Slots, Transitions
from .dflash import DFlash, Layer, projected
from .layers import merge_heads
from .muse_glimmer import MuseGlimmer


class Convolution(nn.Module):
    """Mixes each row of a block with the K - 1 before it, in front of a sublayer and after it.

    A coefficient is a learned one per channel and one per group of G channels, made from the sublayer's normed input:
    for both sides from the same row. Before the anchor there are zeros.
    """

    def __init__(self, config: DFlash2Config):
        super().__init__()
        self.base_kernel = mx.zeros((2, config.kernel_size, config.hidden_size))
        groups = config.hidden_size // config.group_size
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * config.kernel_size * groups, bias=False)
        self.group_size = config.group_size

    def coefficients(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Those in front of a sublayer and those after it, [K, S, E] each, from its normed input [S, E]."""
        size, width = x.shape
        _, taps, _ = self.base_kernel.shape
        shape = (size, 2, taps, width // self.group_size, self.group_size)
        by_group = self.kernel_projection(x).reshape(*shape[:-1], 1)
        both = (self.base_kernel.astype(x.dtype).reshape(shape[1:]) + by_group).reshape(*shape[:3], width)
        front, after = (both[:, side].swapaxes(0, 1) for side in range(2))
        return front, after

    @staticmethod
    def mixed(x: mx.array, coefficients: mx.array) -> mx.array:
        """Sum over t of coefficients[t] times the row t before, [S, E] -> [S, E]."""
        taps, size = coefficients.shape[0], x.shape[0]
        padded = mx.pad(x, [(taps - 1, 0), (0, 0)])
        result = coefficients[0] * x
        for back in range(1, taps):
            result = result + coefficients[back] * padded[taps - 1 - back : taps - 1 - back + size]
        return result


class Layer2(Layer):
    """v1's layer with each sublayer between the two sides of a convolution."""

    def __init__(self, config: DFlash2Config, kernels: Kernels):
        super().__init__(config, kernels)
        self.attention_conv = Convolution(config)
        self.mlp_conv = Convolution(config)

    def __call__(self, x: mx.array, rows: Rows, offset: int, reach: Reach) -> mx.array:
        normed = self.input_layernorm(x)
        front, after = self.attention_conv.coefficients(normed)
        attention = self.self_attn
        block = projected(Convolution.mixed(normed, front), attention.projections, attention.norms, attention.sizes)
        attended = merge_heads(attention(*block, rows, offset, reach))
        x = x + Convolution.mixed(attention.o_proj(attended), after)
        normed = self.post_attention_layernorm(x)
        front, after = self.mlp_conv.coefficients(normed)
        return x + Convolution.mixed(self.mlp(Convolution.mixed(normed, front)), after)


class Selector(nn.Module):
    """Scores how a candidate follows the token before it: sum over r of A[before][r] * u[r] * B[candidate][r].

    u is the slot's last hidden row, projected. In float32, whatever the codes are stored in.
    """

    def __init__(self, config: DFlash2Config, vocab: int):
        super().__init__()
        self.predecessor_codebook = nn.Embedding(vocab, config.rank)
        self.successor_codebook = nn.Embedding(vocab, config.rank)
        self.hidden_projection = nn.Linear(config.hidden_size, config.rank, bias=False)

    def transitions(self, x: mx.array, anchor: mx.array) -> Transitions:
        """The scores that `Slots.transitions` gives, for last hidden rows [M, E] after the anchor [1]."""
        query = self.hidden_projection(x).astype(mx.float32)[:, None]

        def scored(ids: mx.array) -> mx.array:
            before = mx.concatenate([mx.broadcast_to(anchor, (1, ids.shape[1])), ids[:-1]])
            codes = self.predecessor_codebook(before).astype(mx.float32) * query
            return codes @ self.successor_codebook(ids).astype(mx.float32).swapaxes(-1, -2)

        return scored


class DFlash2(DFlash):
    """The drafter; everything that is not here is v1's."""

    generation = "DFlash-2"
    layer = Layer2
    config: DFlash2Config

    def __init__(self, config: DFlash2Config, kernels: Kernels = STOCK):
        super().__init__(config, kernels)
        assert config.vocab_size is not None  # the codebooks have a row for each token
        self.candidate_selector = Selector(config, config.vocab_size)

    def embedded(self, x: mx.array) -> mx.array:
        """The block's first hidden rows, from the target's raw table's, [S, E]."""
        scale = self.config.embedding_scale
        return x if scale == 1 else x * scale

    def slots(self, x: mx.array, anchor: mx.array, target: MuseGlimmer) -> Slots:
        """What the last hidden rows [M, E] say: head logits, multiplied, then capped; and the selector's part."""
        logits = target.head(x).astype(mx.float32) * self.config.output_multiplier
        cap = self.config.softcap
        if cap:
            logits = cap * mx.tanh(logits / cap)
        transitions = self.candidate_selector.transitions(x, anchor)
        return Slots(logits, transitions=transitions, candidates=self.config.candidates)
