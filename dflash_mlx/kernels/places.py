"""The places where a kernel may serve a pair: an operation with this pair's shapes and types, as plain data.

A place is what a verdict is about. It goes to another process and into a file as JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import mlx.core as mx

from ..config import TargetConfig, ring_rows
from ..drafter_config import DrafterConfig
from ..loading.quantisation import Quantisation
from .block_attention import EVERYTHING
from .launch import dtype_name
from .serving import CONTEXT_ROWS, DRAFTER, FEATURE, TARGET_FULL, TARGET_SLIDING

FULL_ROWS = 16384  # positions of a full layer's buffer in trials, or the model's most
ATTENTION, FUSION = "block_attention", "feature_fusion"
OPERATIONS = (ATTENTION, FUSION)


@dataclass(frozen=True)
class AttentionPlace:
    """Attention of one kind of layer.

    Attributes:
        name: as in serving.py.
        dtype: of queries, keys and values.
        heads, kv_heads, size: H, Hk, D.
        capacity: rows of a buffer.
        span, causal: as in `Block`.
        scale: of the scores.
        layers: how many of them a forward runs through.
    """

    operation: ClassVar[str] = ATTENTION
    name: str
    dtype: str
    heads: int
    kv_heads: int
    size: int
    capacity: int
    span: int
    causal: bool
    scale: float
    layers: int


@dataclass(frozen=True)
class FeaturePlace:
    """Taps to the drafter's context feature: `taps` arrays of `width`, times a weight of this format."""

    operation: ClassVar[str] = FUSION
    name: str
    dtype: str
    taps: int
    width: int
    bits: int
    group: int
    eps: float


@dataclass(frozen=True)
class ContextPlace:
    """The context feature to keys and values of all the drafter's layers."""

    operation: ClassVar[str] = FUSION
    name: str
    dtype: str
    width: int
    layers: int
    kv_heads: int
    size: int
    theta: float
    bits: int
    group: int
    eps: float


Place = AttentionPlace | FeaturePlace | ContextPlace
KINDS: dict[str, type[Place]] = {
    TARGET_SLIDING: AttentionPlace,
    TARGET_FULL: AttentionPlace,
    DRAFTER: AttentionPlace,
    FEATURE: FeaturePlace,
    CONTEXT_ROWS: ContextPlace,
}


def as_data(place: Place) -> dict[str, Any]:
    """A place as JSON."""
    return asdict(place)


def from_data(data: Mapping[str, Any]) -> Place:
    """The place that `as_data` wrote."""
    return KINDS[data["name"]](**data)


def target_places(config: TargetConfig, dtype: mx.Dtype) -> Iterator[Place]:
    """Where a kernel may serve a target."""
    shared = {
        "dtype": dtype_name(dtype),
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "size": config.head_dim,
        "causal": True,
        "scale": config.qk_scale * config.head_dim**-0.5,
    }
    sliding = config.num_layers - config.full_layers
    if sliding:
        ring = ring_rows(config.window)
        yield AttentionPlace(TARGET_SLIDING, capacity=ring, span=config.window, layers=sliding, **shared)
    if config.full_layers:
        rows = min(FULL_ROWS, -(-config.max_position // 256) * 256)
        yield AttentionPlace(TARGET_FULL, capacity=rows, span=EVERYTHING, layers=config.full_layers, **shared)


def drafter_places(config: DrafterConfig, dtype: mx.Dtype, quantised: Mapping[str, Quantisation]) -> Iterator[Place]:
    """Where a kernel may serve a drafter.

    Args:
        config: the drafter's.
        dtype: of its activations.
        quantised: module path -> how it is quantised.
    """
    name, ring = dtype_name(dtype), ring_rows(config.window)
    yield AttentionPlace(
        DRAFTER,
        name,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        ring,
        config.span,
        config.causal,
        config.head_dim**-0.5,
        config.num_layers,
    )
    eps = config.rms_norm_eps
    found = quantised.get("encoder.fc")
    bits, group = (found.bits, found.group_size) if found else (0, 0)
    yield FeaturePlace(FEATURE, name, len(config.taps), config.hidden_size, bits, group, eps)
    found = quantised.get("layers.0.self_attn.k_proj")
    bits, group = (found.bits, found.group_size) if found else (0, 0)
    shape = (config.num_layers, config.num_kv_heads, config.head_dim, config.rope_theta)
    yield ContextPlace(CONTEXT_ROWS, name, config.hidden_size, *shape, bits, group, eps)
