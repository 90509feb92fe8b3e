"""Block-diffusion speculative decoding of Muse Glimmer with DFlash drafters, on MLX."""

from .errors import CheckpointError, DFlashError, InputError, MemoryPlanError, ProcessorError
from .generate import generate, stream_generate
from .load import Pair, load
from .options import Options
from .session import Session
from .stats import Chunk, Generation, Round, Stats

__all__ = [
    "CheckpointError",
    "Chunk",
    "DFlashError",
    "Generation",
    "InputError",
    "MemoryPlanError",
    "Options",
    "Pair",
    "ProcessorError",
    "Round",
    "Session",
    "Stats",
    "generate",
    "load",
    "stream_generate",
]
