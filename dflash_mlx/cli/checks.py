"""The examinations behind ``dflash-mlx doctor``; each gives facts, and problems with what to do about them."""

from __future__ import annotations

import platform
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DFlashError
from ..machine import chip, memory_bytes, system
from ..resources import DISTRIBUTION, PACKAGE_FOLDER, find, version
from .differences import count_differences

if TYPE_CHECKING:
    from ..stats import Stats

OTHER = "dflash-mlx"
PACKAGES = ("mlx", "mlx-lm", "transformers", "huggingface_hub")
PROBE = "def fibonacci(n):"

Facts = dict[str, Any]
Problems = list[dict[str, str]]


def examine() -> Facts:
    """Run all examinations; the report is plain data, ready for JSON."""
    problems: Problems = []
    pair, serving = pocket(problems)
    report: Facts = {
        "versions": versions(problems),
        "machine": machine(problems),
        "names": names(problems),
        "pocket": pair,
        "kernels": kernels(problems) | serving,
    }
    return report | {"problems": problems}


def versions(problems: Problems) -> Facts:
    """Give the versions of Python, of this distribution and of what it stands on."""
    found: Facts = {"python": platform.python_version(), DISTRIBUTION: version()}
    for package in PACKAGES:
        found[package] = _installed(package)
        if found[package] is None:
            _add(problems, f"{package} is not installed.", f"Run: {sys.executable} -m pip install {package}")
    return found


def machine(problems: Problems) -> Facts:
    """Give the system, the chip, the memory, and the device that MLX takes."""
    facts: Facts = {"system": system(), "chip": chip(), "memory_bytes": memory_bytes(), "device": None}
    try:
        import mlx.core as mx

        from ..memory import machine_limit

        facts["device"] = mx.default_device().type.name
        # On a Mac this is the GPU's recommended working set, elsewhere the memory that this process may use.
        facts["usable_bytes"] = machine_limit()
    except Exception as error:  # whatever keeps MLX from starting is what is to be reported
        _add(problems, f"MLX does not start: {error}", "Install mlx again (on Linux: mlx[cpu]).")
    return facts


def names(problems: Problems) -> Facts:
    """Say whether the other project of almost this name is installed, and which one is imported."""
    facts: Facts = {"imported_from": str(PACKAGE_FOLDER), f"{OTHER}_installed": _installed(OTHER)}
    if facts[f"{OTHER}_installed"] is None:
        return facts
    facts["import_finds"] = _what_import_finds()
    ours = facts["import_finds"] == str(PACKAGE_FOLDER)
    taken = "this project" if ours else "another copy"
    _add(
        problems,
        f"{OTHER} {facts[f'{OTHER}_installed']} is installed beside {DISTRIBUTION}: another project with the same "
        f"import name and command. `import dflash_mlx` takes {taken} ({facts['import_finds']}).",
        f"Keep one in this environment: {sys.executable} -m pip uninstall {OTHER} {DISTRIBUTION}, "
        f"then install {DISTRIBUTION} again.",
    )
    return facts


def pocket(problems: Problems) -> tuple[Facts, dict[str, str]]:
    """Find the pocket pair and let it generate; give the facts, and what serves each operation."""
    facts: Facts = {"path": None, "target_bytes": None, "drafter_bytes": None, "runs": False}
    try:
        folder = find("models/pocket")
        facts["path"] = str(folder)
        facts["target_bytes"] = _folder_size(folder / "target")
        facts["drafter_bytes"] = _folder_size(folder / "drafter")
        kind, stats, compared = _generate_with_pocket()
    except (DFlashError, ImportError) as error:
        _add(problems, f"The pocket pair does not run: {error}", f"Install {DISTRIBUTION} again.")
        return facts, {}
    facts |= {"runs": True, "drafter": kind, "speculation": stats.speculation, "plain_and_drafted": compared}
    tuned = (note for note in stats.notes if note.startswith("Tuned"))
    facts["tuned"] = next(tuned, "no: dflash-mlx tune was not run for this pair here")
    return facts, stats.kernels


def kernels(problems: Problems) -> Facts:
    """Find the folder of kernels."""
    try:
        folder = find("metal")
    except DFlashError as error:
        _add(problems, str(error), f"Install {DISTRIBUTION} again.")
        return {"path": None}
    return {"path": str(folder), "files": len(list(folder.glob("*.metal")))}


def _add(problems: Problems, what: str, todo: str) -> None:
    problems.append({"what": what, "do": todo})


def _installed(package: str) -> str | None:
    """Give the installed version of a distribution, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _what_import_finds() -> str:
    """Ask a new interpreter, outside any checkout, which folder `import dflash_mlx` would take."""
    code = "import importlib.util as u, pathlib; print(pathlib.Path(u.find_spec('dflash_mlx').origin).resolve().parent)"
    with tempfile.TemporaryDirectory() as nowhere:
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=nowhere)
    return run.stdout.strip() or "nothing"


def _folder_size(folder: Path) -> int:
    """Add up the files of a folder, in bytes."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _generate_with_pocket() -> tuple[str | None, Stats, Facts]:
    """Load the pocket pair, say what its drafter is, generate with it, and compare plain with drafted decoding."""
    from .. import generate, load

    pair = load("pocket")
    return pair.drafter_kind, generate(pair, PROBE, max_tokens=8).stats, count_differences(pair)
