"""Launches and bytes of a drafter's context, stock operations against the kernels, counted in MLX's own graph.

The published drafter's sizes, 8 rows, and no weights: a graph is traced while it is exported, and never evaluated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from dflash_mlx.cache import DrafterContext
from dflash_mlx.drafter_config import DrafterConfig
from dflash_mlx.kernels.feature_fusion import MAX_ROWS, ContextWeights, Weight
from dflash_mlx.kernels.serving import CONTEXT_ROWS, FEATURE, STOCK, Kernels
from dflash_mlx.models.dflash import DFlash

pytestmark = pytest.mark.kernels

ROWS, WIDTH = 8, 6656
PUBLISHED = {
    "model_type": "muse_glimmer_assistant",
    "architectures": ["MuseGlimmerAssistantModel"],
    "hidden_size": WIDTH,
    "intermediate_size": 19968,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "max_position_embeddings": 131072,
    "sliding_window": 2048,
    "layer_types": ["sliding_attention"] * 5,
    "hidden_act": "silu",
    "block_size": 16,
    "mask_token_id": 201818,
    "target_layer_ids": [1, 13, 25, 37, 49],
}
# What gives no work to a GPU: other views of the same memory, and what was there before.
VIEWS = {"Transpose", "Slice", "Reshape", "ExpandDims", "Squeeze", "Flatten", "Unflatten", "Broadcast", "Full"}
KERNELS = Kernels({FEATURE: (1, MAX_ROWS), CONTEXT_ROWS: (1, MAX_ROWS)})
DOCS = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"


def counted(kernels: Kernels, bits: int, offset: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Trace one `DFlash.extend`; gives how many operations do work, and the bytes that they read and write.

    An operation reads each of its arrays once and writes its result; a slice update reads and writes the update alone.
    MLX's norm and rotation are one launch each on a GPU, but many operations where there is none: here they are one.
    """
    monkeypatch.setattr(mx.fast, "rms_norm", lambda x, weight, eps: mx.abs(x))
    monkeypatch.setattr(mx.fast, "rope", lambda x, *args, **options: mx.negative(x))
    config = DrafterConfig.from_dict(PUBLISHED)
    drafter = DFlash(config, kernels)
    drafter.update(tree_map(lambda array: mx.zeros(array.shape, mx.bfloat16), drafter.parameters()))
    if bits:
        nn.quantize(drafter, 64, bits)
    flat = tree_flatten(drafter.parameters())
    projections = [part for one in drafter.layers for part in (one.self_attn.k_proj, one.self_attn.v_proj)]
    stack = Weight.stack([Weight.of(part) for part in projections])
    gains = mx.zeros((config.num_layers, config.head_dim), mx.bfloat16)
    held = [array for array in (stack.array, stack.scales, stack.biases) if array is not None]
    context = DrafterContext(config, mx.bfloat16)
    context.skip_to(offset)
    taps = [mx.zeros((ROWS, WIDTH), mx.bfloat16) for _ in range(5)]

    def call(*inputs: mx.array) -> list[mx.array]:
        """Everything is an input, so that equal zeros are not taken for one array."""
        given = list(inputs)
        drafter.update(tree_unflatten([(name, given.pop(0)) for name, _ in flat]))
        for rows in context.layers:
            rows.keys, rows.values = given.pop(0), given.pop(0)
        weight = Weight(*given[5:], group=stack.group, bits=stack.bits)
        drafter.context_weights = ContextWeights(
            weight, gains, config.num_kv_heads, config.rope_theta, config.rms_norm_eps
        )
        drafter.extend(context, given[:5])
        return context.arrays

    steps: list[dict[str, Any]] = []
    mx.disable_compile()  # what was traced before holds MLX's own operations
    try:
        mx.export_function(steps.append, call, *(array for _, array in flat), *context.arrays, *taps, *held)
    finally:
        mx.enable_compile()
    work = [step for step in steps if step["type"] == "primitive" and step["name"] not in VIEWS]
    return len(work), sum(_bytes(step) for step in work)


def _bytes(step: dict[str, Any]) -> int:
    """The bytes of one operation."""
    sizes = {name: mx.zeros(shape, dtype).nbytes for name, shape, dtype in (*step["inputs"], *step["outputs"])}
    if step["name"] == "SliceUpdate":
        return 2 * sizes[step["inputs"][1][0]]
    return sum(sizes.values())


@pytest.mark.parametrize(("offset", "wrapped"), [(5000, 0), (4090, 10)], ids=["plain", "ring wraps"])
@pytest.mark.parametrize("bits", [0, 4])
def test_kernels_take_fewer_launches_and_bytes(
    bits: int, offset: int, wrapped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, stock_bytes = counted(STOCK, bits, offset, monkeypatch)
    ours, our_bytes = counted(KERNELS, bits, offset, monkeypatch)
    # concatenation, product and norm; per layer two products, norm, rotation, and two slice updates
    assert stock == 3 + 5 * 6 + wrapped
    assert ours == 4 + 5 * 2 + wrapped
    assert our_bytes < stock_bytes
    if not wrapped:
        kind = f"{bits} bits" if bits else "bfloat16"
        row = f"| {kind} | {stock} | {ours} | {stock_bytes:,} | {our_bytes:,} |"
        assert row in DOCS.read_text(), row
