"""`generate --rounds FILE`: every round as a line, and a ledger that adds up to the wall clock."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dflash_mlx import Session, load
from dflash_mlx.cli import cli
from dflash_mlx.round_log import ledger, lines, split_cost
from dflash_mlx.stats import Round

PARTS = ("draft", "verify", "undivided", "host", "rest", "unexplained")
ASKED: dict[str, Any] = {"max_tokens": 60, "draft_length": 3}


def generate(*flags: str) -> list[dict[str, Any]]:
    path = Path("rounds.jsonl")
    done = CliRunner().invoke(cli, ["generate", "def read_lines(path):", "--rounds", str(path), *flags])
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_rounds_file_has_a_line_for_each_round_and_the_ledger_last() -> None:
    plain = Session(load("pocket")).generate("def read_lines(path):", **ASKED)
    found = generate("--max-tokens", "60", "--draft-length", "3")
    *rounds, last = found
    assert [line["round"] for line in rounds] == list(range(len(rounds)))
    assert [line["tokens"] for line in rounds] == [done.tokens for done in plain.stats.rounds]
    assert [line["committed"] for line in rounds] == [len(line["tokens"]) for line in rounds]
    assert set(last) == {"ledger", "split_cost_s"}


def test_rounds_say_how_many_positions_were_before_them() -> None:
    *rounds, _ = generate("--max-tokens", "40")
    prompt = 1 + len(load("pocket").tokenizer.encode("def read_lines(path):", add_special_tokens=False))
    committed = [line["committed"] for line in rounds]
    assert [line["context"] for line in rounds] == [prompt + sum(committed[:n]) for n in range(len(rounds))]


def test_one_round_in_eight_is_split_into_drafting_and_verifying() -> None:
    *rounds, _ = generate("--max-tokens", "90", "--draft-length", "3")
    assert len(rounds) > 16
    split = [number for number, line in enumerate(rounds) if line["draft_s"] is not None]
    assert split == list(range(0, len(rounds), 8))
    for line in (rounds[number] for number in split):
        assert line["draft_s"] > 0
        assert line["verify_s"] > 0


def test_ledger_parts_add_up_to_the_wall_clock() -> None:
    session = Session(load("pocket"))
    stream = session.stream_generate("def read_lines(path):", timed_every=4, **ASKED)
    next(stream)
    started = time.perf_counter()
    for _ in stream:
        time.sleep(0.002)  # the caller's own work between two rounds
    wall = time.perf_counter() - started
    generation = session.last_generation
    assert generation is not None
    found = ledger(generation.stats.rounds)
    assert sum(found[part] for part in PARTS) == pytest.approx(found["wall"], rel=1e-9)
    assert found["wall"] == pytest.approx(wall, abs=0.02)
    assert found["rest"] >= 0.002 * (len(generation.stats.rounds) - 1)
    assert abs(found["unexplained"]) < 1e-6


def test_ledger_counts_by_hand() -> None:
    split = Round(3, 1, 2, [], [], draft_s=0.2, verify_s=0.5, host_s=0.1, total_s=0.9, rest_s=0.05)
    whole = Round(3, 1, 2, [], [], host_s=0.1, total_s=0.7, rest_s=0.05)
    found = ledger([split, whole])
    expected = {"draft": 0.2, "verify": 0.5, "undivided": 0.6, "host": 0.2, "rest": 0.1, "unexplained": 0.1}
    assert found == pytest.approx(expected | {"wall": 1.7})


def test_cost_of_the_split_compares_rounds_of_one_draft_length() -> None:
    def rounds(length: int, split: bool, *totals: float) -> list[Round]:
        apart = 0.1 if split else None
        return [Round(length, 0, 1, [], [], draft_s=apart, verify_s=apart, total_s=total) for total in totals]

    found = split_cost([*rounds(3, True, 1.3, 1.2, 9.0), *rounds(3, False, 1.0, 1.0, 1.1), *rounds(5, True, 7.0)])
    assert found == pytest.approx(0.3)
    assert split_cost(rounds(3, False, 1.0)) is None
    assert split_cost(rounds(0, False, 1.0) + rounds(0, True, 1.0)) is None


def test_lines_are_plain_json(tmp_path: Path) -> None:
    session = Session(load("pocket"))
    generation = session.generate("import os", **ASKED)
    assert json.loads(json.dumps(list(lines(generation)))) == list(lines(generation))
