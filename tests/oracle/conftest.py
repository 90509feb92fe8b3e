"""The environments of the oracle suite, built where they are missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from environment import DFLASH, build_dflash, build_environment, cache_folder


@pytest.fixture(scope="session")
def oracle_python(users_environment: dict[str, str]) -> Path:
    """The Python that has torch and transformers."""
    folder = cache_folder(users_environment)
    if not (folder / "bin" / "python").exists():
        build_environment(folder, users_environment)
    return folder / "bin" / "python"


@pytest.fixture(scope="session")
def dflash_packages(oracle_python: Path, users_environment: dict[str, str]) -> Path:
    """The folder that has dflash, for that Python."""
    whole = cache_folder(users_environment)
    folder = whole.with_name(f"{whole.name}-dflash{DFLASH}")
    if not (folder / "dflash").exists():
        build_dflash(folder, oracle_python, users_environment)
    return folder
