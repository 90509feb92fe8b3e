"""Reads TOML files; tomllib is in Python from 3.11 on, and tomli is the same code for 3.10."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from .errors import InputError, must

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_toml(path: Path) -> dict[str, Any]:
    """Read a file.

    Raises:
        InputError: it is not TOML; the message has the line.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(must("load", path.name, "TOML", str(error), "Correct the file.")) from error
