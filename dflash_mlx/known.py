"""Which drafters are known for a target: reads ``models/known.toml``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .resources import find
from .toml_files import read_toml

AUTO = "auto"


def drafter_for(target: str, draft: str) -> Path | str | None:
    """The drafter of a known target.

    Args:
        target: as it is given to `load`: "pocket" or a hub id, in any case of letters.
        draft: "auto" for the target's default, or a drafter's name in the file, such as "dflash2".
    Returns:
        A folder that comes with the package, a hub id, or `None` where the file knows none.
    """
    known = _target(target)
    drafter = known["drafters"].get(known["default"] if draft == AUTO else draft) if known else None
    if drafter is None:
        return None
    return find(drafter["folder"]) if "folder" in drafter else str(drafter["hub"])


def _target(name: str) -> dict[str, Any] | None:
    targets = read_toml(find("models/known.toml"))["target"]
    return next((entry for entry in targets if entry["name"].lower() == name.lower()), None)
