"""Files that commands write: whole or not at all, and a place that cannot be written is told before the work."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import pytest
from command import run

from dflash_mlx import DFlashError, InputError, load
from dflash_mlx.bench.result import write_result

COMMANDS = {"rounds": ("generate", "a", "--rounds"), "bench": ("bench", "--suite", "pocket", "--out")}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize("place", ["", ".", "missing/file", "taken/file"])
def test_a_place_that_cannot_be_written_is_told_before_anything_is_loaded(
    command: tuple[str, ...], place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dflash_mlx.load", lambda *_, **__: pytest.fail("it was loaded"))
    (tmp_path / "taken").write_text("a file")
    done = run(*command, place)
    assert done.exit_code == 2
    assert "Invalid value for" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["taken"]


def test_a_report_with_no_place_is_a_message_and_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "taken").write_text("a file")
    monkeypatch.setattr("dflash_mlx.bench.result.read_result", lambda path: {})
    done = run("bench", "report", "result.json", "--out", str(tmp_path / "taken" / "report"))
    assert done.exit_code == 1
    assert "taken/report must be usable but got Not a directory" in done.stderr


def test_an_error_of_the_system_is_a_message_with_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "some/file")

    monkeypatch.setattr(sys.modules["dflash_mlx.cli.doctor"], "examine", full)
    done = run("doctor")
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1] == (
        "Error: [dflash-mlx] some/file must be usable but got No space left on device. "
        "Check the path, its permissions and the room on the disk."
    )


def test_a_result_that_cannot_be_written_whole_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(DFlashError, match=r"result.json must be a file that can be written but got No space left"):
        write_result({"new": True}, path)
    assert [found.name for found in tmp_path.iterdir()] == ["result.json"]
    assert path.read_text() == "old"


def test_two_runs_that_write_one_file_leave_one_whole_file(tmp_path: Path) -> None:
    path, failed = tmp_path / "result.json", []

    def write(number: int) -> None:
        try:
            for _ in range(50):
                write_result({"run": [number] * 2000}, path)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert json.loads(path.read_text())["run"] in ([0] * 2000, [1] * 2000)
    assert [found.name for found in tmp_path.iterdir()] == ["result.json"]


def test_a_link_stays_a_link_and_a_pipe_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_result({"a": 1}, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert json.loads((tmp_path / "target").read_text()) == {"a": 1}
    os.mkfifo(tmp_path / "pipe")
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append((tmp_path / "pipe").read_text()), daemon=True)
    reader.start()
    write_result({"a": 1}, tmp_path / "pipe")
    reader.join(timeout=10)
    assert json.loads(got[0]) == {"a": 1}
    assert (tmp_path / "pipe").is_fifo()


def test_a_written_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("")
    write_result({}, tmp_path / "result.json")
    assert (tmp_path / "result.json").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize("wrong", [{"target": ""}, {"target": "pocket", "draft": ""}])
def test_an_empty_name_is_no_model(wrong: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"the model must be an existing folder or a hub id \(org/name\) but got ''"):
        load(**wrong)


@pytest.mark.parametrize("command", [("generate", "a"), ("bench", "--suite", "pocket")])
def test_an_empty_model_on_the_command_line_is_not_the_pocket_pair(command: tuple[str, ...]) -> None:
    done = run(*command, "--model", "")
    assert done.exit_code == 2
    assert "but got ''" in done.stderr
