"""The report as Markdown: tables only."""

from __future__ import annotations

from typing import Any

from . import tables
from .published import published_for

TITLE = "# dflash-mlx: measurements"


def markdown(results: list[dict[str, Any]]) -> str:
    """Write all results, a section for each."""
    parts = [TITLE]
    for number, result in enumerate(results, start=1):
        parts += [f"## {number}. {heading(result)}", _table(tables.summary_of(result)), tables.FOOTNOTE]
        parts += ["Measured under:", _table(tables.conditions(result))]
        if found := published_for(result["manifest"]["machine"]["chip"]):
            parts += ["Published by others for this chip (not measured here):", _table(tables.published(found))]
    return "\n\n".join(parts) + "\n"


def heading(result: dict[str, Any]) -> str:
    """Name a result by its chip and its target."""
    facts = result["manifest"]
    return f"{facts['machine']['chip']}, {facts['target']['name']}"


def _table(table: tables.Table) -> str:
    header, rows = table
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
