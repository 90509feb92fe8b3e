"""The verdicts of this machine, in one file of the user's cache folder.

A verdict holds for a chip, a system, a version of MLX, and the kernels' own text: when one of them is another, or the
file is damaged, all are made again. A file is written beside the old one and then takes its place.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from ..machine import chip, system
from ..resources import DISTRIBUTION, PACKAGE_FOLDER, find
from ..whole_files import update_whole
from .qualify import Verdict

FILE = "kernels.json"
# What decides what runs, and how it is judged. The launchers choose grids; a change of the rules is a new judgement.
SOURCES = ("block_attention.py", "feature_fusion.py", "launch.py", "qualify.py", "trials.py", "fusion_trials.py")


@cache
def facts() -> dict[str, Any]:
    """What verdicts hold for: chip, system, MLX, and a hash of each source."""
    files = [*sorted(find("metal").glob("*.metal")), *(PACKAGE_FOLDER / "kernels" / name for name in SOURCES)]
    hashes = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    return {"chip": chip(), "system": system(), "mlx": metadata.version("mlx"), "sources": hashes}


def place_key(place: Mapping[str, Any]) -> str:
    """The name of a place's verdict: the place itself, in one line."""
    return json.dumps(place, sort_keys=True)


class Verdicts:
    """The stored verdicts.

    Args:
        folder: where the file is; default the user's cache folder for this package.
    """

    def __init__(self, folder: Path | None = None):
        self.path = (folder or user_cache_path(DISTRIBUTION, appauthor=False)) / FILE

    def read(self) -> dict[str, Verdict]:
        """Verdicts by `place_key`; none where the file is missing, damaged, or made for other facts."""
        try:
            stored = json.loads(self.path.read_text(encoding="utf-8"))
            if stored["facts"] != facts():
                return {}
            verdicts = [Verdict.from_data(data) for data in stored["verdicts"]]
            return {place_key(verdict.place): verdict for verdict in verdicts}
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return {}

    def add(self, made: list[Verdict]) -> str:
        """Store verdicts beside those that still hold; returns why that failed, or ""."""

        def with_these() -> str:
            kept = self.read() | {place_key(verdict.place): verdict for verdict in made}
            return json.dumps({"facts": facts(), "verdicts": [one.as_data() for one in kept.values()]}, indent=1)

        try:
            update_whole(self.path, with_these)
        except OSError as error:
            return f"{error.strerror or error} ({self.path})"
        return ""
