"""Figures that others published, from bench/published.toml: each row has its source."""

from __future__ import annotations

from functools import cache
from typing import Any

from ..resources import find
from ..toml_files import read_toml

FILE = "bench/published.toml"


def published_for(chip: str) -> list[dict[str, Any]]:
    """Give the rows for exactly this chip; "Apple M4 Max" is "M4 Max", and not "M4"."""
    name = chip.removeprefix("Apple ").strip()
    return [row for row in _rows() if row.get("chip") == name]


@cache
def _rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read_toml(find(FILE)).get("figure", [])
    return rows
