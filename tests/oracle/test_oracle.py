"""Live against transformers: random pairs that no file knows, run there in one process and here in another.

transformers and torch live in a virtual environment of their own, built once and kept in the user's cache by version.
`ORACLE_SEED=7 pytest -m oracle` repeats a run.
"""

from __future__ import annotations

import os
import platform
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import agreement
import numpy as np
import pytest

pytestmark = [pytest.mark.oracle, pytest.mark.timeout(3600)]
TORCH, TRANSFORMERS = "2.13.0", "5.24.0"
PACKAGES = [f"torch=={TORCH}", f"transformers=={TRANSFORMERS}", "numpy"]
CASES = 6
SCRIPT = Path(__file__).with_name("make_golden.py")


def cache_folder(environment: dict[str, str]) -> Path:
    """Where the environment is kept: by version, Python and machine, outside the repository."""
    home = Path(environment.get("HOME", "~")).expanduser()
    default = home / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    root = Path(environment.get("XDG_CACHE_HOME") or default) / "dflash-mlx-muse"
    python = ".".join(platform.python_version_tuple()[:2])
    return root / f"oracle-torch{TORCH}-transformers{TRANSFORMERS}-python{python}-{platform.machine()}"


def build_environment(folder: Path, environment: dict[str, str]) -> None:
    """Make the virtual environment beside its place and move it there whole: a half-built one is never found."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = folder.with_name(f"{folder.name}.{os.getpid()}")
    python = building / "bin" / "python"
    steps = [[sys.executable, "-m", "venv", "--clear", str(building)]]
    steps.append([str(python), "-m", "pip", "install", "--quiet", "--retries", "2", *PACKAGES])
    try:
        for step in steps:
            done = subprocess.run(step, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
                pytest.fail(
                    f"the oracle needs {' and '.join(PACKAGES[:2])} in {folder}, and {' '.join(step[1:4])} failed. "
                    f"Connect to the network once (they are kept there afterwards). It said:\n{last}",
                    pytrace=False,
                )
        building.rename(folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)


@pytest.fixture(scope="session")
def oracle_python(users_environment: dict[str, str]) -> Path:
    """The Python that has torch and transformers."""
    folder = cache_folder(users_environment)
    if not (folder / "bin" / "python").exists():
        build_environment(folder, users_environment)
    return folder / "bin" / "python"


def run_script(python: Path, out: Path, *options: str) -> None:
    """Run transformers on the cases; its environment knows nothing of this process's packages."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [str(python), str(SCRIPT), "--out", str(out), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stderr[-3000:]}"


@pytest.fixture(scope="session")
def live(oracle_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fresh random cases with transformers' answers."""
    seed = int(os.environ.get("ORACLE_SEED") or secrets.randbelow(10**6))
    out = tmp_path_factory.mktemp("live")
    run_script(oracle_python, out, "--live", str(seed), "--count", str(CASES))
    print(f"random cases from ORACLE_SEED={seed}")
    return out


@pytest.fixture(params=range(CASES))
def case(request: pytest.FixtureRequest, live: Path) -> agreement.Case:
    found = agreement.read(agreement.names(live)[request.param], live)
    print(f"{found.name}: {found.target} {found.drafter}")
    return found


def test_random_targets_agree_with_transformers(case, tmp_path):
    target, _ = agreement.load(case, tmp_path)
    logits, features = agreement.run_target(target, case.arrays["tokens"], case.drafter.taps)
    agreement.agree(logits, case.arrays["logits"], agreement.allowed(case, "logits"))
    agreement.agree(features, case.arrays["features"], agreement.allowed(case, "features"))


def test_random_drafters_agree_with_transformers_in_every_round(case, tmp_path):
    target, drafter = agreement.load(case, tmp_path)
    found = agreement.run_blocks(target, drafter, case.arrays["tokens"], case.arrays["features"], case.facts["rows"])
    agreement.agree(found, case.arrays["blocks"], agreement.allowed(case, "blocks"))


@pytest.mark.parametrize("run", ["assisted", "ended"])
def test_random_greedy_runs_repeat_assisted_generation(case, run, tmp_path):
    agreement.check_assisted(case, run, tmp_path)


def test_the_committed_files_are_what_the_script_writes(oracle_python, tmp_path):
    """Another processor may round the last bit of float32 differently, and no token."""
    run_script(oracle_python, tmp_path)
    assert agreement.names(tmp_path) == agreement.names()
    for name in agreement.names():
        fresh, kept = agreement.read(name, tmp_path), agreement.read(name)
        assert fresh.target == kept.target
        assert fresh.drafter == kept.drafter
        for what, array in kept.arrays.items():
            agreement.agree(fresh.arrays[what], array, 1e-6 * float(np.abs(array).max()))
        for run in ("assisted", "ended"):
            for what in ("tokens", "committed", "proposals"):
                assert fresh.facts[run][what] == kept.facts[run][what]
