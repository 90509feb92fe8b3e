"""The README's two commands, and the run of everything that takes the second from it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from from_file import script

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```\w*\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
NO_BASH = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not here")


@pytest.fixture
def summary() -> ModuleType:
    return script(".ci/summary.py")


@pytest.mark.parametrize("number", [0, 1])
def test_each_of_the_first_two_commands_is_one_line_that_works_alone(number: int) -> None:
    command = BLOCKS[number]
    assert command.count("\n") == 1
    parts = command.strip().split(" && ")
    assert parts[0] == "python3 -m venv .venv"
    assert re.match(r"\.venv/bin/pip install -q ", parts[1])
    assert all(part.startswith(".venv/bin/") for part in parts[1:])


def test_the_first_command_runs_the_pocket_pair() -> None:
    assert re.search(r"&& \.venv/bin/dflash-mlx generate ['\"]", BLOCKS[0])
    assert "--model" not in BLOCKS[0]


def test_the_second_command_installs_the_test_extra_and_runs_pytest() -> None:
    assert '".[test]"' in BLOCKS[1]
    assert BLOCKS[1].strip().endswith("&& .venv/bin/python -m pytest")


def test_the_commands_stand_on_the_first_screen() -> None:
    assert README[: README.index(BLOCKS[1])].count("\n") < 30


@NO_BASH
def test_ci_runs_the_test_command_as_it_stands_in_the_readme() -> None:
    run = subprocess.run(
        ["bash", ".ci/run", "--show"], cwd=ROOT, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
    )
    assert run.stdout == BLOCKS[1]
    assert 'step default bash -c "$(test_command)"' in (ROOT / ".ci" / "run").read_text()


def test_readme_says_whose_name_dflash_mlx_is() -> None:
    assert "dflash-mlx-muse" in README
    assert re.search(r"dflash-mlx`? on PyPI (is|belongs to) another project", README)


def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    [example] = [block for block in BLOCKS if block.startswith("import dflash_mlx\n")]
    names: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), names)
    assert capsys.readouterr().out.strip()
    assert names["session"].last_generation.stats.generated_tokens > 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
def test_links_lead_to_files(page: str) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / page).read_text())
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (ROOT / page).parent.joinpath(link).exists()] == []


def test_readme_tree_lists_what_exists() -> None:
    tree = next(block for block in BLOCKS if "pyproject.toml" in block and "dflash_mlx/" in block)
    folder, missing = ROOT, []
    for line in tree.splitlines():
        indent, name = re.match(r"( *)(\S+)", line).groups()  # type: ignore[union-attr]
        folder = ROOT if not indent else folder
        if name.endswith("/") and not indent:
            folder = ROOT / name
        place = ROOT / name if not indent else folder / name
        if not place.exists():
            missing.append(line)
    assert missing == []


def test_readme_tree_leaves_no_part_of_the_package_out() -> None:
    tree = next(block for block in BLOCKS if "pyproject.toml" in block and "dflash_mlx/" in block)
    listed = set(re.findall(r"^  (\S+)", tree.split("dflash_mlx/")[1], re.MULTILINE))
    files = {path.name for path in (ROOT / "dflash_mlx").glob("*.py")}
    folders = {f"{path.parent.name}/" for path in (ROOT / "dflash_mlx").glob("*/__init__.py")}
    assert (files | folders) - listed == set()


def test_summary_adds_up_the_suites(summary: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "default").write_text(
        "tests/a.py ..\n===== 310 passed, 2 skipped, 40 deselected, 1 warning in 300.50s (0:05:00) =====\n"
    )
    (tmp_path / "slow").write_text("== 1 failed, 39 passed, 312 deselected in 60.25s (0:01:00) ==\n")
    (tmp_path / "oracle").write_text("====== 352 deselected in 0.25s ======\n")
    (tmp_path / "failures").write_text("slow failed with exit code 1\n")
    lines, last = summary.add_up(tmp_path)
    assert last.strip("=") == " 1 failed, 349 passed, 2 skipped, 1 warning in 361.00s "
    assert lines[1] == "slow     1 failed, 39 passed, 312 deselected in 60.25s"


def test_summary_shows_a_linter_that_failed_as_an_error(summary: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "default").write_text("===== 3 passed in 1.00s =====\n")
    (tmp_path / "ruff").write_text("Found 1 error.\n")
    (tmp_path / "failures").write_text("ruff failed with exit code 1\n")
    assert summary.add_up(tmp_path)[1].strip("=") == " 3 passed, 1 error in 1.00s "


def test_summary_says_where_a_suite_left_no_summary(summary: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "default").write_text("Segmentation fault\n")
    (tmp_path / "failures").write_text("default failed with exit code 139\n")
    lines, last = summary.add_up(tmp_path)
    assert lines[0] == "default  no summary line"
    assert last.strip("=") == " 1 error in 0.00s "
