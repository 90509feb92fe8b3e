"""``dflash-mlx doctor``: what it finds, and what it says where something is broken."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from command import run

from dflash_mlx.cli import checks
from dflash_mlx.verification import first_difference

doctor_module = sys.modules["dflash_mlx.cli.doctor"]  # the package has the command under this name

PACKAGES = ["python", "dflash-mlx-muse", "mlx", "mlx-lm", "transformers", "huggingface_hub"]
SUBJECTS = ["versions", "machine", "names", "pocket", "kernels"]


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """What it finds here, where nothing is broken."""
    result = run("doctor", "--json")
    assert result.exit_code == 0
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_json_says_what_is_there(report: dict[str, Any]) -> None:
    assert report["problems"] == []
    assert list(report["versions"]) == PACKAGES
    assert all(report["versions"].values())
    assert report["machine"]["memory_bytes"] >= report["machine"]["usable_bytes"] > 10**9
    assert report["pocket"]["runs"] is True
    assert report["pocket"]["speculation"] == "on"
    assert report["pocket"]["target_bytes"] > report["pocket"]["drafter_bytes"] > 10**5
    assert report["kernels"]["block_attention"].startswith("stock: ")


def test_text_has_a_block_per_subject(report: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_module, "examine", lambda: report)
    result = run("doctor")
    assert re.findall(r"^\w+$", result.stdout, re.MULTILINE) == SUBJECTS
    assert re.search(r"^  usable +[\d.]+ [GT]B$", result.stdout, re.MULTILINE)
    assert re.search(r"^  plain and drafted +4 of 4 texts equal$", result.stdout, re.MULTILINE)
    assert result.stdout.endswith("\nNo problems found.\n")


def test_the_other_project_of_almost_this_name_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "dflash_mlx-0.1.8.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: dflash-mlx\nVersion: 0.1.8\n")
    (tmp_path / "dflash_mlx").mkdir()
    (tmp_path / "dflash_mlx" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(checks, "pocket", lambda problems: ({}, {}))
    result = run("doctor")
    assert result.exit_code == 1
    assert "dflash-mlx 0.1.8 is installed beside dflash-mlx-muse" in result.stdout
    assert f"`import dflash_mlx` takes another copy ({tmp_path.resolve() / 'dflash_mlx'})" in result.stdout
    assert "pip uninstall dflash-mlx dflash-mlx-muse, then install dflash-mlx-muse again." in result.stdout


def test_a_pocket_pair_that_is_broken_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("target", "drafter"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr("dflash_mlx.pair.find", lambda name: tmp_path / Path(name).name)
    result = run("doctor", "--json")
    [problem] = json.loads(result.stdout)["problems"]
    assert problem["what"].startswith("The pocket pair does not run: [")
    assert problem["do"] == "Install dflash-mlx-muse again."
    assert result.exit_code == 1


def test_plain_and_drafted_decoding_are_compared_on_this_machine(report: dict[str, Any]) -> None:
    assert report["pocket"]["plain_and_drafted"] == {"runs": 4, "equal": 4, "tokens_each": 24, "first_differences": []}


@pytest.mark.parametrize(
    ("plain", "drafted", "place"),
    [([1, 2], [1, 2], None), ([1, 2, 3], [1, 5, 3], 1), ([1, 2], [1, 2, 3], 2), ([], [4], 0)],
)
def test_the_first_difference_is_the_first_token_that_is_not_the_same(plain, drafted, place) -> None:
    assert first_difference(plain, drafted) == place
