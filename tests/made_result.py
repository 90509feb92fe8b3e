"""A result with figures that a test can add up in its head, as from a Mac."""

from __future__ import annotations

from typing import Any

MODEL = {
    "name": "org/Target-4bit",
    "revision": "0123456789abcdef",
    "architecture": "MuseGlimmerForConditionalGeneration",
    "quantisation": {"bits": 4, "group_size": 64, "modules_of_their_own": 0},
    "bytes": 15_700_000_000,
    "config_sha256": "a" * 64,
}
POWER = {"source": "battery", "battery_percent": 83, "thermal": 72}


def made_result() -> dict[str, Any]:
    """Three repeats: plain at 10, 20 and 30 tokens per second, drafted twice as fast."""
    records = [
        _record(mode, repeat, rate * (repeat + 1))
        for repeat in range(3)
        for mode, rate in (("plain", 10.0), ("v1@4", 20.0))
    ]
    manifest = {
        "time": "2026-01-02T03:04:05+00:00",
        "machine": {
            "system": "macOS 26.4 arm64", "chip": "Apple M4 Max", "gpu_cores": 40, "memory_bytes": 128 * 2**30,
            "device": "gpu",
        },
        "power": dict(POWER),
        "versions": {"python": "3.12.1", "mlx": "0.32.4"},
        "source": {"commit": None, "changed": None},
        "target": dict(MODEL),
        "drafters": {"v1@4": MODEL | {"name": "org/Drafter", "architecture": "MuseGlimmerAssistantModel"}},
        "dtype": "bfloat16",
        "kernels": {"block_attention": "metal"},
        "max_context": 32768,
        "memory_plan_bytes": {"plain": {"target weights": 15_700_000_000}, "v1@4": {"target weights": 15_700_000_000}},
        "predictions": "cost model",
        "flags": {"repeats": 3, "cool_down": 20.0},
    }  # fmt: skip
    return {"format": "dflash-mlx-bench-1", "complete": True, "manifest": manifest, "records": records, "left_out": []}


def _record(mode: str, repeat: int, rate: float) -> dict[str, Any]:
    drafted, accepted = ([0] * 4, [0] * 4) if mode == "plain" else ([4, 4], [3, 1])
    committed = [count + 1 for count in accepted]
    stats = {
        "prompt_tokens": 20, "reused_tokens": 0, "generated_tokens": sum(committed) + 1, "time_to_first_token_s": 0.5,
        "prompt_tokens_per_s": 40.0, "generated_tokens_per_s": rate, "mean_accepted": sum(accepted) / len(accepted),
        "mean_length": sum(committed) / len(committed), "acceptance_rate": 0.5 if mode != "plain" else 0,
        "syncs": 5, "peak_memory_bytes": 17 * 10**9, "seed": 0, "kernels": {},
        "speculation": "off: no drafter" if mode == "plain" else "on",
    }  # fmt: skip
    seconds = sum(committed) / rate / len(committed)
    return {
        "suite": "greedy", "case": "code", "turn": 0, "repeat": repeat, "place": 0, "mode": mode,
        "draft_length": 0 if mode == "plain" else 4, "reasoning": "low", "finish_reason": "length",
        "tokens_sha256": "b" * 64, "wall_s": 1.0, "predicted_tokens_per_s": 25.0, "energy_j": None,
        "power": dict(POWER), "stats": stats,
        "rounds": {
            "drafted": drafted, "accepted": accepted, "committed": committed, "total_s": [seconds] * len(committed)
        },
    }  # fmt: skip
