"""Draws benchmark results: one self-contained HTML page and the same tables in Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..whole_files import write_whole
from .markdown import markdown
from .page import page


def write_report(results: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Write report.html and report.md for validated results; returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "report.html", folder / "report.md"]
    for path, text in zip(paths, (page(results), markdown(results)), strict=True):
        write_whole(path, text)
    return paths
