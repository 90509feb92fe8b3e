"""Peak memory of a long prompt: features made in steps for the drafter's window, against features kept for all of it.

The pair is random and small (no file is read): 6 sliding layers of 512 numbers a row, 5 taps, windows of 512, float32,
so that features weigh what they would beside a real target's caches. The second way keeps the taps of every step, joins
them into one array after the prompt and projects that, as a runtime does that has the prompt's hidden states at once.

Command: python bench/prefill_memory.py [--tokens N]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import mlx.core as mx

import dflash_mlx
from dflash_mlx.cache import DrafterContext, Part, TargetCache
from dflash_mlx.config import TargetConfig
from dflash_mlx.drafter_config import DrafterConfig
from dflash_mlx.memory import Sizes, plan_memory
from dflash_mlx.models.dflash import DFlash
from dflash_mlx.models.muse_glimmer import MuseGlimmer
from dflash_mlx.pair import Pair

LAYERS, THETA, STEP, MIB = 6, 500000.0, 512, 2**20
SHARED: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
    "rms_norm_eps": 1e-5, "sliding_window": 512, "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
}  # fmt: skip
TARGET = SHARED | {
    "model_type": "muse_glimmer_text", "vocab_size": 256, "num_hidden_layers": LAYERS, "post_norm_eps": 1e-8,
    "layer_types": ["sliding_attention"] * LAYERS, "layer_rope_theta": [THETA] * LAYERS, "qk_scale_factor": 3.87,
    "output_multiplier": 0.7, "final_logit_softcapping": 20.0, "max_position_embeddings": 1 << 17,
}  # fmt: skip
DRAFTER = SHARED | {
    "model_type": "muse_glimmer_assistant", "num_hidden_layers": 1, "block_size": 16, "mask_token_id": 255,
    "target_layer_ids": [0, 1, 2, 3, 4],
}  # fmt: skip


def random_pair() -> Pair:
    """A pair of random weights."""
    config, drafter_config = TargetConfig.from_dict(TARGET), DrafterConfig.from_dict(DRAFTER)
    target, drafter = MuseGlimmer(config), DFlash(drafter_config)
    mx.eval(target.parameters(), drafter.parameters())
    plan = plan_memory(Sizes(config, drafter_config, 0, 0, 4), None, None)
    return Pair(target, drafter, None, frozenset(), mx.float32, plan, Path(), None, {})


def in_steps(pair: Pair, prompt: list[int]) -> int:
    """Bytes at the peak of the prefill as it is."""
    out = dflash_mlx.Session(pair).generate(prompt, max_tokens=1, prefill_step_size=STEP)
    return out.stats.peak_memory_bytes


def kept(pair: Pair, prompt: list[int]) -> int:
    """Bytes at the peak where all taps are kept, joined and projected at the end."""
    assert pair.drafter is not None
    drafter, config = pair.drafter, pair.drafter.config
    mx.reset_peak_memory()
    cache, context = TargetCache(pair.target.config, pair.dtype, len(prompt)), DrafterContext(config, pair.dtype)
    taps: list[list[mx.array]] = []
    for begin in range(0, len(prompt), STEP):
        tokens = mx.array(prompt[begin : begin + STEP], dtype=mx.uint32)
        rows = tokens.shape[0]
        taps.append(pair.target(tokens, [Part(cache, rows, 0)], config.taps).taps)
        cache.advance(rows)
        mx.eval(taps[-1], cache.arrays)
    features = drafter.encoder([mx.concatenate(list(part)) for part in zip(*taps, strict=True)])
    context.skip_to(len(prompt) - STEP)
    for layer, rows in zip(drafter.layers, context.layers, strict=True):
        rows.write(context.offset, *layer.self_attn.keys_values(features[None, -STEP:], context.offset))
    mx.eval(context.arrays)
    return int(mx.get_peak_memory())


def main() -> None:
    """Print both, and what the weights and caches take of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1 << 15)
    tokens = parser.parse_args().tokens
    pair = random_pair()
    base = mx.get_active_memory()
    prompt = [(7 * i + i // 97) % 251 for i in range(tokens)]
    for name, way in (("in steps, for the window", in_steps), ("kept for the whole prompt", kept)):
        print(f"{name:<26} {(way(pair, prompt) - base) / MIB:8.1f} MiB beside {base / MIB:.1f} MiB of weights")
        mx.clear_cache()


if __name__ == "__main__":
    main()
