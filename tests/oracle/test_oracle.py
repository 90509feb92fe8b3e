"""Live against transformers: random pairs that no file knows, run there in one process and here in another.

`ORACLE_SEED=7 pytest -m oracle` repeats a run.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import agreement
import numpy as np
import pytest
from environment import run_script

pytestmark = [pytest.mark.oracle, pytest.mark.timeout(3600)]
CASES = 6
SCRIPT = Path(__file__).with_name("make_golden.py")


@pytest.fixture(scope="session")
def live(oracle_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fresh random cases with transformers' answers."""
    seed = int(os.environ.get("ORACLE_SEED") or secrets.randbelow(10**6))
    out = tmp_path_factory.mktemp("live")
    run_script(oracle_python, SCRIPT, out, "--live", str(seed), "--count", str(CASES))
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
    run_script(oracle_python, SCRIPT, tmp_path)
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
