"""What is compiled serves all models of a process: each gets the bits that it has without compiling, in any row count.

MLX keeps a trace for each set of dtypes and numbers. A size that a trace had kept would be the first model's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import numpy as np
import pytest
from dealt import dealt
from tiny import Quantisation, tiny_models

from dflash_mlx.cache import DrafterContext, Part, TargetCache

SIZES = {
    "usual": {},
    "width": {"hidden": 64, "intermediate": 96, "drafter_intermediate": 160},
    "heads": {"heads": (8, 1), "drafter_heads": (4, 4)},
    "head size": {"head_dim": 32, "drafter_head_dim": 64},
    "window": {"window": 8},
    "cap and scale": {"softcap": 5.0, "multiplier": 0.3, "qk_scale": 1.5},
}
FORMATS = [("float32", 0), ("bfloat16", 4), ("float16", 8)]
COUNT = 13


@contextmanager
def uncompiled() -> Iterator[None]:
    mx.disable_compile()
    try:
        yield
    finally:
        mx.enable_compile()


def outputs(target, drafter, steps):
    """Of a text fed in steps: the target's logits and taps, the drafter's logits of a short block and a whole one."""
    cache, context, found = TargetCache(target.config, mx.float32, 64), DrafterContext(drafter.config, mx.float32), []
    for rows in steps:
        tokens = mx.array([(7 * at + 3) % 97 for at in range(cache.offset, cache.offset + rows)], mx.uint32)
        forward = target(tokens, [Part(cache, rows, rows)], drafter.config.taps)
        drafter.extend(context, forward.taps)
        cache.advance(rows)
        context.advance(rows)
        found.append(mx.concatenate([x.astype(mx.float32) for x in (forward.logits, *forward.taps)], axis=1))
    blocks = [mx.array([5] + [drafter.config.mask_token_id] * more, mx.uint32) for more in (3, 15)]
    drafts = [drafter.draft(block, context, target, block.size - 1).logits for block in blocks]
    return [np.array(array) for array in (mx.concatenate(found), *drafts)]


@pytest.mark.parametrize(("generation", "form"), dealt((1, 2), FORMATS, of=2), ids=str)
def test_models_of_one_process_do_not_get_each_others_traces(generation, form, tmp_path):
    (dtype, bits), models = form, []
    how = Quantisation(bits, 32) if bits else None
    options = {"dtype": dtype, "quantisation": how, "drafter_quantisation": how, "generation": generation}
    options |= {"drafter_rank": 32} if generation == 2 else {}  # codebooks are quantised too
    for name, sizes in SIZES.items():
        models.append(tiny_models(tmp_path / name, **options, **sizes))
        models[-1][0].stack()
    compiled = [outputs(*pair, (1,) * COUNT) for pair in models]
    with uncompiled():
        plain = [outputs(*pair, (5, 7, 1)) for pair in models]
    for name, found, expected in zip(SIZES, compiled, plain, strict=True):
        assert all((a == b).all() for a, b in zip(found, expected, strict=True)), name
    assert all(np.isfinite(array).all() and array.std() > 0 for arrays in compiled for array in arrays)
