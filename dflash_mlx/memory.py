"""The memory plan: what a pair will take, computed from configs and headers before a weight is read."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx

from .checkpoint import MOST_CHECKPOINTS, SLACK_ROWS
from .config import TargetConfig, ring_rows
from .costs import cache_row_bytes, full_row_bytes
from .drafter_config import DrafterConfig
from .errors import MemoryPlanError, must

PREFILL_STEP = 2048  # tokens; the default upper bound of one prefill forward
FLOAT32 = 4  # bytes
GROWING = ("full layers' cache", "its growth")  # parts of a plan that each session has, by its context
# Parts that each session has, whatever its context.
FIXED = ("sliding layers' rings", "drafter's rings", "checkpoints", "drafter's checkpoints", "logits")
DRAFTERS = ("drafter weights", "drafter's rings", "drafter's checkpoints", "taps")
GIB = 2**30


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by part, for a session of `context` tokens.

    Attributes:
        context: tokens that the plan is made for.
        parts: part -> bytes.
        limit: bytes that may be used.
    """

    context: int
    parts: dict[str, int]
    limit: int

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def shared_bytes(self) -> int:
        """What all sessions share: weights, and the working set of one forward."""
        return self.total - self.session_bytes(self.context)

    def session_bytes(self, context: int) -> int:
        """What one session of `context` tokens takes besides; a full layer's buffer doubles, at most to the plan's."""
        rows = min(1 << max(8, (context - 1).bit_length()), self.context)
        growing = sum(self.parts[name] for name in GROWING)
        return -(-growing * rows // self.context) + sum(self.parts.get(name, 0) for name in FIXED)

    def without_drafter(self) -> MemoryPlan:
        """The same plan for plain decoding."""
        return replace(self, parts={name: size for name, size in self.parts.items() if name not in DRAFTERS})

    def table(self) -> str:
        """One line for a message: each part in GiB."""
        parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in self.parts.items())
        return f"{self.total / GIB:.2f} GiB ({parts}) for a context of {self.context} tokens"


@dataclass(frozen=True)
class Sizes:
    """What a plan is computed from.

    Attributes:
        target_bytes, drafter_bytes: of the weights, from the files' headers.
        item: bytes of one cached number.
        kv_bits: 8 where the full layers' cache is quantised.
    """

    target: TargetConfig
    drafter: DrafterConfig | None
    target_bytes: int
    drafter_bytes: int
    item: int
    kv_bits: int | None = None

    def parts(self, context: int) -> dict[str, int]:
        """Bytes by part for a session of `context` tokens."""
        target, drafter = self.target, self.drafter
        row = cache_row_bytes(target, self.item)
        full = target.full_layers * full_row_bytes(target, self.item, self.kv_bits)
        sliding = (target.num_layers - target.full_layers) * row
        step = min(PREFILL_STEP, target.max_rows, context)
        width = max(3 * target.intermediate_size, 4 * target.num_heads * target.head_dim, 4 * target.hidden_size)
        rows = max(16, drafter.block_size if drafter else 0)
        parts = {
            "target weights": self.target_bytes,
            "drafter weights": self.drafter_bytes,
            "full layers' cache": full * context,
            "its growth": full * context // 2 // max(1, target.full_layers),  # one layer's old buffer at a time
            "sliding layers' rings": sliding * ring_rows(target.window),
            "checkpoints": sliding * _checkpoint_rows(target.window, context),
            "prefill working set": step * width * FLOAT32,
            "logits": 4 * rows * target.vocab_size * FLOAT32,
        }
        if self.kv_bits:
            numbers = row // self.item * context if target.full_layers else 0
            parts["a full layer made wide"] = numbers * _widening(self.item)
        if drafter:
            held = cache_row_bytes(drafter, self.item) * drafter.num_layers
            parts["drafter's rings"] = drafter_rings(drafter, self.item)
            parts["drafter's checkpoints"] = held * _checkpoint_rows(drafter.window, context)
            parts["taps"] = 2 * step * len(drafter.taps) * target.hidden_size * self.item
        return parts


def _widening(item: int) -> int:
    """Bytes per number of a quantised layer while attention looks at it.

    MLX's CPU goes through two numbers of 32 bits; Metal makes it in one pass, but may have two layers in flight.
    """
    return item + 8 if mx.default_device().type.name == "cpu" else 2 * item


def _checkpoint_rows(window: int, context: int) -> int:
    """Most rows of a ring that the checkpoints of one session hold."""
    return MOST_CHECKPOINTS * min(window + SLACK_ROWS, context)


def drafter_rings(drafter: DrafterConfig, item: int) -> int:
    """Bytes of a drafter's context, for cached numbers of `item` bytes."""
    return cache_row_bytes(drafter, item) * drafter.num_layers * ring_rows(drafter.window)


def machine_limit() -> int:
    """Bytes that this machine lets a model use.

    On a Mac the GPU's recommended working set (28 of 36 GiB, 112 of 128), elsewhere the memory, or the control
    group's share of it.
    """
    info = mx.device_info() if mx.metal.is_available() else {}
    recommended = info.get("max_recommended_working_set_size")
    if recommended:
        return int(recommended)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    group = Path("/sys/fs/cgroup/memory.max")
    share = group.read_text().strip() if group.is_file() else "max"
    return min(physical, int(share)) if share.isdigit() else physical


def keep_resident(plan: MemoryPlan) -> None:
    """On a Mac, let the GPU keep the planned memory wired, as mlx-lm does: paged-out weights cost seconds a token."""
    if mx.metal.is_available():
        mx.set_wired_limit(min(plan.total, machine_limit()))


def plan_memory(sizes: Sizes, max_context: int | None, max_memory: int | None) -> MemoryPlan:
    """Plan for the asked context, or for the largest that fits, at most the model's.

    Raises:
        MemoryPlanError: it does not fit; the message says what would.
    """
    limit = machine_limit() if max_memory is None else min(max_memory, machine_limit())
    most = sizes.target.max_position
    if max_context is not None and not 1 <= max_context <= most:
        expected = f"between 1 and the model's {most}"
        raise MemoryPlanError(must("load", "max_context", expected, max_context, "Ask for less."))
    fits = _largest_fitting(sizes, limit, max_context or most)
    plan = MemoryPlan(max_context or max(fits, 1), sizes.parts(max_context or max(fits, 1)), limit)
    if plan.total > limit:
        name = "max_memory" if max_memory is not None and limit == max_memory else "the machine's limit"
        advice = f"A context of {fits} tokens would fit." if fits else "Not even one token fits: use fewer bits."
        expected = f"at least {plan.table()}"
        raise MemoryPlanError(must("load", name, expected, f"{limit / GIB:.2f} GiB", advice))
    return plan


def _largest_fitting(sizes: Sizes, limit: int, most: int) -> int:
    """The largest context up to `most` whose plan fits, 0 where none does (the plan grows with it)."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if sum(sizes.parts(middle).values()) <= limit else (low, middle - 1)
    return low
