"""Gives the kernels' tests their compiler, and a cache of compiled kernels that outlives a run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from metal.cpu import compiler


@pytest.fixture(autouse=True)
def _clang(users_environment: dict[str, str]) -> compiler.Compiler:
    """Find or install the compiler; without one every test here fails with what was tried."""
    compiler.use_environment(users_environment)
    return compiler.find_compiler()


_NOTES: list[str] = []


@pytest.fixture(scope="session")
def notes() -> list[str]:
    """Lines for the summary of the run."""
    return _NOTES


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which compiler ran the kernels, and what its code cannot show."""
    for found in compiler.found():
        terminalreporter.write_line(f"kernels: {found.name}")
        if found.not_checked:
            terminalreporter.write_line(f"kernels: not checked with this compiler: {', '.join(found.not_checked)}")
    for line in _NOTES:
        terminalreporter.write_line(f"kernels: {line}")
