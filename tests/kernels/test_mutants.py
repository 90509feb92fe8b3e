"""The tests notice deliberate faults in the kernel, so they are wide enough; the kernel itself passes them."""

from __future__ import annotations

import attention_cases as cases
import mutants
import pytest

from dflash_mlx.kernels import block_attention as launcher
from dflash_mlx.kernels.launch import parse_kernels
from metal.cpu import KernelFault

pytestmark = [pytest.mark.mutants, pytest.mark.slow]

# What changes nothing, and why. Each is run, and must pass all cases: a mutant that is caught is not equivalent.
GUARDED = "more turns than a row has elements; each further one is stopped by d < D"
EQUIVALENT = {
    "state by another lane": "the four lanes of a row hold the same maximum and total",
    "for (int i = 0; i < PER_LANE; i++) { : < becomes <=": GUARDED,
    "for (int i = 0; i < PER_LANE; i++) { : < becomes <=, place 2": GUARDED,
    "constexpr int PER_LANE = (D + LANES - 1) / LANES;  // elements of a row per lane : - 1 becomes nothing": GUARDED,
    "constexpr int PER_LANE = (D + LANES - 1) / LANES;  // elements of a row per lane : / becomes %": GUARDED,
}
# Most cases are of one type and size, to save time; the rules do not touch what depends on them.
TYPE, SIZE = "f32", 32


def killers() -> list[cases.Case]:
    """Small cases, one per situation, with 3 to 16 rows and both numbers of heads; one type and size to save time."""
    rows = (8, 3, 16, 5, 9, 1, 11, 7)
    return [
        cases.Case(TYPE, SIZE, cases.GROUPS[number % 2], rows[number % len(rows)], name, number)
        for number, name in enumerate(cases.SITUATIONS)
        if name != "real chunk"
    ] + [cases.Case("bf16", 16, 16, 12, "target, ring wrapped", 4)]


def caught_by(text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the cases with a changed file; gives the first report or wrong result, or "" where there is none."""
    kernels = parse_kernels(mutants.FILE, text)
    monkeypatch.setattr(launcher, "read_kernels", lambda file: kernels)
    try:
        if broken := cases.blind_row() or cases.lost_precision():
            return broken
    except KernelFault as error:
        return str(error.faults[0])
    for case in killers():
        rows = (0, case.rows - 1) if case.rows > 1 else (0,)
        try:
            broken = cases.broken_promise(case, rows, mistrust=True)
        except KernelFault as error:
            return f"{case}: {error.faults[0]}"
        if broken:
            return f"{case}: {broken}"
    return ""


def test_the_kernel_itself_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert caught_by(mutants.TEXT, monkeypatch) == ""


@pytest.mark.parametrize("mutant", mutants.mutants(), ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: mutants.Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    caught = caught_by(mutant.text, monkeypatch)
    if mutant.name in EQUIVALENT:
        assert caught == "", f"not equivalent after all: {EQUIVALENT[mutant.name]}"
    else:
        assert caught != ""
