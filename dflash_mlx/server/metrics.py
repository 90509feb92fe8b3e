"""Figures in Prometheus' text format."""

from __future__ import annotations

import mlx.core as mx

from .worker import Service

COUNTERS = {
    "requests": "Requests taken.",
    "completed": "Requests that came to their end.",
    "cancelled": "Requests whose client left, or that a stop string ended.",
    "failed": "Requests that failed.",
    "refused": "Requests refused for a full queue.",
    "steps": "Forwards of the target.",
    "rounds": "Rounds of all requests.",
    "prompt_tokens": "Tokens of prompts.",
    "reused_tokens": "Tokens of prompts that were held already.",
    "generated_tokens": "Tokens generated.",
    "drafted_tokens": "Tokens drafted.",
    "accepted_tokens": "Drafted tokens that were accepted.",
    "syncs": "Reads of the device by the host.",
}
GAUGES = {
    "running": "Requests that run now.",
    "waiting": "Requests that wait for a place.",
    "reserved_bytes": "Bytes that the caches of running requests may take.",
}


def metrics_text(service: Service) -> str:
    """All figures as they are now."""
    figures: dict[str, int] = dict(service.engine.figures())
    lines: list[str] = []
    for name, text in COUNTERS.items():
        _add(lines, f"dflash_{name}_total", "counter", text, figures[name])
    for name, text in GAUGES.items():
        _add(lines, f"dflash_{name}", "gauge", text, figures[name])
    if service.store:
        held = service.store.figures()
        _add(lines, "dflash_store_hits_total", "counter", "Prompts of which the store held a part.", held.hits)
        _add(lines, "dflash_store_evicted_total", "counter", "Histories dropped for the budget.", held.evicted)
        _add(lines, "dflash_store_histories", "gauge", "Histories held.", held.states)
        _add(lines, "dflash_store_bytes", "gauge", "Bytes of the histories held.", held.nbytes)
    _add(lines, "dflash_memory_active_bytes", "gauge", "Bytes that MLX holds in arrays.", mx.get_active_memory())
    _add(lines, "dflash_memory_peak_bytes", "gauge", "Most bytes since the engine was last idle.", mx.get_peak_memory())
    _add(lines, "dflash_memory_limit_bytes", "gauge", "Bytes that may be used.", service.pair.plan.limit)
    return "\n".join(lines) + "\n"


def _add(lines: list[str], name: str, kind: str, text: str, value: float) -> None:
    lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", f"{name} {value}"]
