"""``dflash-mlx convert``: the table, the object, the progress bar, and exit codes with nothing left behind."""

from __future__ import annotations

import io
import json
import sys

import pytest
from command import run
from faults import WHOLE
from tiny import TargetSpec, write_target

from dflash_mlx.cli.convert import ConvertBar
from dflash_mlx.loading import save


@pytest.fixture
def source(tmp_path):
    return str(write_target(tmp_path / "source", TargetSpec(**WHOLE | {"layers": 4}), "flat", "bfloat16"))


def test_the_table_has_sizes_before_and_after(tmp_path):
    """Pocket: 8,659,200 weights of 2 bytes; all but head and norms go to 4.5 bits, a group's scale and bias counted."""
    result = run("convert", "pocket", str(tmp_path / "out"), "--bits", "4", "--keep", "lm_head")
    assert result.exit_code == 0, result.stderr
    head = 4096 * 256
    norms = 256 * (8 * 4 + 1)
    expected = (8_659_200 - head - norms) * 4.5 / 8 + (head + norms) * 2
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["before", "after"]
    assert lines[1].split() == ["weights", "on", "disk", "17", "MB", f"{expected / 1e6:.0f}", "MB"]
    assert lines[2].split() == ["bits", "per", "weight", "16.00", f"{expected * 8 / 8_659_200:.2f}"]
    assert lines[3].startswith("memory, context 4096 ")
    assert lines[4] == "target: 65 modules quantised; whole: lm_head"
    assert lines[5] == f"written to {tmp_path / 'out'}"
    assert result.stderr == ""


def test_json_holds_the_same_in_numbers(source, tmp_path):
    result = run("convert", source, str(tmp_path / "out"), "--bits", "8", "--group-size", "32", "--json", "--quiet")
    report = json.loads(result.stdout)
    assert report["kind"] == "target"
    stored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    assert stored == {"group_size": 32, "bits": 8, "mode": "affine"}
    assert report["after"]["weights_bytes"] < report["before"]["weights_bytes"]
    assert report["before"]["memory_bytes"] - report["after"]["memory_bytes"] == (
        report["before"]["weights_bytes"] - report["after"]["weights_bytes"]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bits", "5"], "[convert] bits must be one of 4, 6, 8 but got 5. Correct the option."),
        ([], "[convert] bits or dtype must be given but got neither."),
        (["--bits", "4", "--keep", "router"], "[convert] keep must be a pattern of modules ("),
        (["--bits", "four"], "Invalid value for '--bits'"),
    ],
)
def test_wrong_options_end_with_2_and_no_folder(arguments, message, source, tmp_path):
    result = run("convert", source, str(tmp_path / "out"), *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_interrupt_ends_with_130_and_no_folder(source, tmp_path, monkeypatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(save.mx, "save_safetensors", interrupted)
    result = run("convert", source, str(tmp_path / "out"), "--bits", "4")
    assert (result.exit_code, result.stdout) == (130, "")
    assert "Interrupted." in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


class Terminal(io.StringIO):
    """Text that passes for a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("terminal", "quiet"), [(True, False), (True, True), (False, False)])
def test_the_progress_bar_is_on_stderr_of_a_terminal_alone(terminal, quiet, monkeypatch):
    stderr = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    with ConvertBar(quiet) as bar:
        bar(0, 2_000_000)
        bar(500_000, 2_000_000)
    assert ("0.5/2.0 MB" in stderr.getvalue()) == (terminal and not quiet)
