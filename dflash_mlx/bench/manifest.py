"""What a result needs to be repeated: machine, versions, models, flags, state of the source."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from ..kernels.launch import dtype_name
from ..loading.files import read_json
from ..machine import machine_facts, output_of
from ..pair import Pair
from ..resources import DISTRIBUTION, PACKAGE_FOLDER
from .power import power_state
from .predict import MODEL

PACKAGES = (DISTRIBUTION, "mlx", "mlx-lm", "transformers", "huggingface_hub")


def manifest(pairs: Mapping[str, Pair], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Give everything but the runs.

    Args:
        pairs: mode -> pair, all with one target.
        flags: the command's, as given or as they default.
    """
    plain = next(iter(pairs.values()))
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine_facts(),
        "power": power_state(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "source": source_state(),
        "target": model_facts(plain.target_path),
        "drafters": {mode: model_facts(pair.drafter_path) for mode, pair in pairs.items() if pair.drafter_path},
        "dtype": dtype_name(plain.dtype),
        "kernels": dict(plain.kernels),
        "max_context": plain.max_context,
        "memory_plan_bytes": {mode: dict(pair.plan.parts) for mode, pair in pairs.items()},
        "predictions": MODEL,
        "flags": dict(flags),
    }


def model_facts(folder: Path) -> dict[str, Any]:
    """Say which model it is: name, revision (of a hub download), architecture, quantisation, bytes, config's hash."""
    config = read_json(folder / "config.json")
    quantisation = config.get("quantization") or config.get("quantization_config")
    parts = folder.parts
    snapshot = parts.index("snapshots") if "snapshots" in parts else None
    name = parts[snapshot - 1].removeprefix("models--").replace("--", "/") if snapshot else "/".join(parts[-2:])
    return {
        "name": name,
        "revision": parts[snapshot + 1] if snapshot else None,
        "architecture": (config.get("architectures") or [config.get("model_type")])[0],
        "quantisation": _quantisation(quantisation) if quantisation else None,
        "bytes": sum(file.stat().st_size for file in folder.glob("*.safetensors")),
        "config_sha256": hashlib.sha256((folder / "config.json").read_bytes()).hexdigest(),
    }


def source_state() -> dict[str, Any]:
    """Give the commit of a checkout and whether it has changes; `None` for an installed wheel."""
    where = ("git", "-C", str(PACKAGE_FOLDER))
    commit = output_of(*where, "rev-parse", "HEAD").strip()
    inside = output_of(*where, "ls-files", str(PACKAGE_FOLDER / "__init__.py")).strip()
    if not commit or not inside:
        return {"commit": None, "changed": None}
    return {"commit": commit, "changed": bool(output_of(*where, "status", "--porcelain").strip())}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _quantisation(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keep bits, group size and how many modules have their own."""
    own = sum(isinstance(value, Mapping) for value in given.values())
    return {"bits": given.get("bits"), "group_size": given.get("group_size"), "modules_of_their_own": own}
