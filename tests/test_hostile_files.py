"""Files and names that nobody means well with are a message, never a traceback, and nothing that was found is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from command import run

from dflash_mlx import CheckpointError, InputError, load
from dflash_mlx.cli import cli
from dflash_mlx.config import TargetConfig
from dflash_mlx.drafter_config import drafter_config
from dflash_mlx.loading.files import read_header, read_json
from dflash_mlx.resources import find
from dflash_mlx.toml_files import read_toml

DEEP = "[" * 100_000
NOBODY = "~no-such-user/x"
LONG = "x" * 300  # more than a file system takes


def test_json_and_toml_of_any_depth_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(DEEP)
    with pytest.raises(CheckpointError, match=r"config\.json must be JSON"):
        read_json(tmp_path / "config.json")
    (tmp_path / "model.safetensors").write_bytes(len(DEEP).to_bytes(8, "little") + DEEP.encode())
    with pytest.raises(CheckpointError, match=r"model\.safetensors must be a safetensors file"):
        read_header(tmp_path / "model.safetensors")
    (tmp_path / "suite.toml").write_text("a = " + DEEP)
    with pytest.raises(InputError, match=r"suite\.toml must be TOML"):
        read_toml(tmp_path / "suite.toml")


@pytest.mark.parametrize("name", [NOBODY, LONG])
@pytest.mark.parametrize("part", ["target", "draft"])
def test_a_name_that_no_folder_can_have_is_no_model(name: str, part: str) -> None:
    with pytest.raises(InputError, match="the model must be an existing folder or a hub id"):
        load(**({"target": "pocket"} | {part: name}))


def test_a_home_that_nobody_has_is_an_ordinary_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("chat", stdin=f"/save {NOBODY}\n").exit_code == 1
    done = run("chat", stdin=f"/load {NOBODY}\n")
    assert (done.exit_code, f"{NOBODY} must be a conversation" in done.stderr) == (2, True)


@pytest.mark.parametrize("command", ["save", "load"])
def test_a_name_with_a_zero_byte_is_no_file(command: str) -> None:
    done = run("chat", stdin=f"/{command} a\0b\n")
    assert (done.exit_code, f"/{command} must be followed by a file" in done.stderr) == (2, True)


def raw_config(name: str) -> dict:
    return json.loads((find("models/pocket") / name / "config.json").read_text())


@pytest.mark.parametrize("value", [10**30, 10**400, True, 1.5])
@pytest.mark.parametrize("field", ["num_attention_heads", "intermediate_size", "vocab_size", "num_hidden_layers"])
def test_a_size_that_no_model_has_is_refused_by_name(field: str, value: object) -> None:
    raw = raw_config("target")
    raw.get("text_config", raw)[field] = value
    with pytest.raises(CheckpointError, match=rf"{field} must be an integer between 1 and 16777216"):
        TargetConfig.from_dict(raw)


@pytest.mark.parametrize("value", [10**400, float("inf"), float("nan"), 0])
def test_a_number_that_no_float_holds_is_refused_by_name(value: object) -> None:
    raw = raw_config("target")
    raw.get("text_config", raw)["rms_norm_eps"] = value
    with pytest.raises(CheckpointError, match="rms_norm_eps must be a number above 0"):
        TargetConfig.from_dict(raw)


@pytest.mark.parametrize("value", [7, "DFlash2DraftModel", True])
def test_architectures_that_are_no_list_are_refused(value: object) -> None:
    with pytest.raises(CheckpointError, match="architectures must be a list"):
        drafter_config(raw_config("drafter2") | {"architectures": value})


@pytest.mark.parametrize("line", ['{"messages": "text"}', '{"prompt": 3}', '{"messages": {}}', "3", "null", "{}"])
def test_a_line_that_is_no_prompt_is_refused_with_its_number(line: str, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text(f'"a"\n{line}\n')
    done = run("verify", "--prompts", str(tmp_path / "mine.jsonl"))
    assert (done.exit_code, "line 2 of" in done.stderr) == (2, True)


def test_half_a_character_in_a_prompt_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text('"\\ud800"\n')
    done = run("verify", "--prompts", str(tmp_path / "mine.jsonl"))
    assert done.exit_code == 2
    assert "prompt must be Unicode text but got the half character" in done.stderr


def test_a_reader_that_leaves_does_not_cost_what_tune_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object, **__: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("dflash_mlx.tuned.user_cache_path", lambda *_, **__: tmp_path)
    monkeypatch.setattr("dflash_mlx.tuning.CONTEXTS", ())
    monkeypatch.setattr("click.echo", gone)
    flags = ("--max-tokens", "4", "--repeats", "1", "--draft-length", "1", "--quiet")
    CliRunner().invoke(cli, ["tune", "import os", *flags])
    assert (tmp_path / "tuned.json").is_file()
