"""What the oracle suite runs others' code in: a virtual environment of its own, kept in the user's cache by version."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TORCH, TRANSFORMERS = "2.13.0", "5.24.0"
PACKAGES = [f"torch=={TORCH}", f"transformers=={TRANSFORMERS}", "numpy"]
DFLASH = "0.1.0"
INSTALL = ["-m", "pip", "install", "--quiet", "--retries", "2"]


def cache_folder(environment: dict[str, str]) -> Path:
    """Where the environment is kept: by version, Python and machine, outside the repository."""
    home = Path(environment.get("HOME", "~")).expanduser()
    default = home / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    root = Path(environment.get("XDG_CACHE_HOME") or default) / "dflash-mlx-muse"
    python = ".".join(platform.python_version_tuple()[:2])
    return root / f"oracle-torch{TORCH}-transformers{TRANSFORMERS}-python{python}-{platform.machine()}"


def build_environment(folder: Path, environment: dict[str, str]) -> None:
    """Make the virtual environment of torch and transformers."""
    building = _beside(folder)
    python = str(building / "bin" / "python")
    create = [sys.executable, "-m", "venv", "--clear", str(building)]
    _build(folder, building, [create, [python, *INSTALL, *PACKAGES]], environment)


def build_dflash(folder: Path, python: Path, environment: dict[str, str]) -> None:
    """Put dflash alone into a folder of its own: its model needs nothing but torch and transformers."""
    building = _beside(folder)
    step = [str(python), *INSTALL, "--no-deps", "--target", str(building), f"dflash=={DFLASH}"]
    _build(folder, building, [step], environment)


def _beside(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.{os.getpid()}")


def _build(folder: Path, building: Path, steps: list[list[str]], environment: dict[str, str]) -> None:
    """Build a folder beside its place and move it there whole: a half-built one is never found."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        for step in steps:
            done = subprocess.run(step, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
                pytest.fail(
                    f"the oracle needs {folder.name}, and {' '.join(step[1:])} failed. "
                    f"Connect to the network once (they are kept there afterwards). It said:\n{last}",
                    pytrace=False,
                )
        building.rename(folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def run_script(python: Path, script: Path, out: Path, *options: str, packages: Path | None = None) -> None:
    """Run a script on its cases; its environment knows nothing of this process's packages, but of those in a folder."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    if packages:
        environment["PYTHONPATH"] = str(packages)
    command = [str(python), str(script), "--out", str(out), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stderr[-3000:]}"
