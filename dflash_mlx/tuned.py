"""What `dflash-mlx tune` found, stored in the user's cache folder by pair and machine, for `load` to start from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from .machine import chip, gpu_cores, memory_bytes, system
from .resources import DISTRIBUTION
from .whole_files import replace_whole

FILE = "tuned.json"


@dataclass(frozen=True)
class Tuned:
    """Measured on this machine for one pair.

    Attributes:
        draft_length: with the most committed tokens per second on the prompts; 0 where drafting loses.
        speedup: over plain decoding, 1 where `draft_length` is 0.
        acceptance: share of the drafts that were accepted, of those whose slot was judged.
        rounds: (draft length, context, seconds) of measured rounds.
        when: the date.
    """

    draft_length: int
    speedup: float
    acceptance: float
    rounds: list[tuple[int, int, float]]
    when: str

    @property
    def note(self) -> str:
        """One line for the user."""
        if not self.draft_length:
            return f"Tuned on this machine on {self.when}: drafting did not pay on the prompts that were given."
        gain = f"draft length {self.draft_length} gave {self.speedup:.2f} times the plain speed"
        return f"Tuned on this machine on {self.when}: {gain}; the automatic draft length starts from that."


def key_of(target: Path, drafter: Path) -> str:
    """What a result holds for: both checkpoints, the machine, and the version of MLX."""
    machine = [system(), chip(), gpu_cores(), memory_bytes(), metadata.version("mlx")]
    digest = hashlib.sha256(json.dumps(machine).encode())
    for folder in (target, drafter):
        digest.update((folder / "config.json").read_bytes())
        weights = sorted((file.name, file.stat().st_size) for file in folder.glob("*.safetensors"))
        digest.update(json.dumps(weights).encode())
    return digest.hexdigest()


def path() -> Path:
    """The file with all results."""
    return user_cache_path(DISTRIBUTION, appauthor=False) / FILE


def read_tuned(target: Path, drafter: Path) -> Tuned | None:
    """What was found for this pair on this machine; `None` where nothing was, or the file is damaged."""
    try:
        data = _read()[key_of(target, drafter)]
        rounds = [(int(length), int(context), float(seconds)) for length, context, seconds in data.pop("rounds")]
        return Tuned(**data, rounds=rounds)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write_tuned(target: Path, drafter: Path, tuned: Tuned) -> Path:
    """Store a result beside those of other pairs; the file takes its place whole.

    Raises:
        OSError: the folder cannot be written.
    """
    file = path()
    text = json.dumps(dict(_read()) | {key_of(target, drafter): asdict(tuned)}, indent=1)
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_whole(file, text)
    return file


def _read() -> Mapping[str, Any]:
    try:
        stored = json.loads(path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}
