"""Block-diffusion speculative decoding of Muse Glimmer with DFlash drafters, on MLX.

The names are loaded when they are first used: `dflash-mlx --help` must not wait for MLX.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # checkers take it for typing's; importing that takes longer than all else here, before `main`
if TYPE_CHECKING:
    from typing import Any

    from .engine import Engine
    from .errors import (
        CheckpointError,
        DFlashError,
        EngineClosed,
        EngineError,
        InputError,
        MemoryPlanError,
        ProcessorError,
        QueueFull,
    )
    from .generation import generate, stream_generate
    from .options import Options
    from .pair import Pair, load
    from .session import Session
    from .stats import Chunk, Generation, Round, Stats
    from .ticket import Ticket

PLACES = {
    "engine": ("Engine",),
    "errors": (
        "CheckpointError", "DFlashError", "EngineClosed", "EngineError", "InputError", "MemoryPlanError",
        "ProcessorError", "QueueFull",
    ),
    "generation": ("generate", "stream_generate"),
    "pair": ("Pair", "load"),
    "options": ("Options",),
    "session": ("Session",),
    "stats": ("Chunk", "Generation", "Round", "Stats"),
    "ticket": ("Ticket",),
}  # fmt: skip

__all__ = [
    "CheckpointError",
    "Chunk",
    "DFlashError",
    "Engine",
    "EngineClosed",
    "EngineError",
    "Generation",
    "InputError",
    "MemoryPlanError",
    "Options",
    "Pair",
    "ProcessorError",
    "QueueFull",
    "Round",
    "Session",
    "Stats",
    "Ticket",
    "generate",
    "load",
    "stream_generate",
]


def __getattr__(name: str) -> Any:
    for module, names in PLACES.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
