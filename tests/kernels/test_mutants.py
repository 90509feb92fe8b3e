"""The tests notice deliberate faults in the kernels, so they are wide enough; the kernels themselves pass them."""

from __future__ import annotations

import attention_mutants
import fusion_mutants
import pytest
from mutants import Mutant, Subject

from dflash_mlx.kernels.launch import parse_kernels
from metal.cpu import KernelFault

pytestmark = [pytest.mark.mutants, pytest.mark.slow]

SUBJECTS = (attention_mutants.SUBJECT, fusion_mutants.SUBJECT)
ALL = [(subject, mutant) for subject in SUBJECTS for mutant in subject.mutants()]


def caught_by(subject: Subject, text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the cases with a changed file; gives the first report or wrong result, or "" where there is none."""
    kernels = parse_kernels(subject.launcher.FILE, text)
    monkeypatch.setattr(subject.launcher, "read_kernels", lambda file: kernels)
    try:
        return subject.broken()
    except KernelFault as error:
        return str(error.faults[0])


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.launcher.FILE)
def test_the_kernel_itself_passes(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    assert caught_by(subject, subject.text, monkeypatch) == ""


@pytest.mark.parametrize(
    ("subject", "mutant"), ALL, ids=[f"{subject.launcher.FILE}: {mutant.name}" for subject, mutant in ALL]
)
def test_mutant_is_caught(subject: Subject, mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    caught = caught_by(subject, mutant.text, monkeypatch)
    if mutant.name in subject.equivalent:
        assert caught == "", f"not equivalent after all: {subject.equivalent[mutant.name]}"
    else:
        assert caught != ""
