"""Live against dflash's torch classes: random DFlash-2 drafters, far past their windows.

`ORACLE_SEED=7 pytest -m oracle` repeats a run.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import agreement
import mlx.core as mx
import pytest
from environment import run_script

from dflash_mlx.choice import Choice
from dflash_mlx.options import Options

pytestmark = [pytest.mark.oracle, pytest.mark.timeout(3600)]
CASES = 8
SCRIPT = Path(__file__).with_name("make_dflash2.py")


@pytest.fixture(scope="session")
def live(oracle_python: Path, dflash_packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fresh random cases with dflash's answers."""
    seed = int(os.environ.get("ORACLE_SEED") or secrets.randbelow(10**6))
    out = tmp_path_factory.mktemp("dflash2")
    run_script(oracle_python, SCRIPT, out, "--live", str(seed), "--count", str(CASES), packages=dflash_packages)
    print(f"random cases from ORACLE_SEED={seed}")
    return out


@pytest.fixture(params=range(CASES))
def case(request: pytest.FixtureRequest, live: Path) -> agreement.Case:
    found = agreement.read(agreement.names(live)[request.param], live)
    print(f"{found.name}: {found.target} {found.drafter}")
    return found


def test_random_drafters_agree_with_dflash_in_every_round(case, tmp_path):
    """Rounds that feed 1, 3, 8 and more rows: each draws one whole block, in float32 against float64 there."""
    target, drafter = agreement.load(case, tmp_path)
    found = agreement.run_blocks(target, drafter, case.arrays["tokens"], case.arrays["features"], case.facts["rows"])
    assert {1, 3, 8} <= set(case.facts["rows"])
    assert sum(case.facts["rows"]) > 2 * drafter.config.window
    agreement.agree(found, case.arrays["blocks"], agreement.allowed(case, "blocks"))


def test_greedy_proposals_are_the_paths_of_dflash(case, tmp_path):
    """The selector's walk over the same candidates, token for token."""
    target, drafter = agreement.load(case, tmp_path)
    tokens, slots = (
        case.arrays["tokens"],
        agreement.run_slots(target, drafter, case.arrays["tokens"], case.arrays["features"], case.facts["rows"]),
    )
    choice, plain = Choice(Options(), 0), 0
    for said, path in zip(slots, case.arrays["paths"], strict=True):
        assert choice.proposal(said, 1, [int(tokens[0])]).tolist() == path.tolist()
        plain += mx.argmax(said.logits, axis=-1).tolist() == path.tolist()
    assert plain < len(slots), "the selector never had a say"
