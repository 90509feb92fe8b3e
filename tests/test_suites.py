"""Suites of prompts: those that ship are whole, and a wrong file of one's own is told by the field."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import run
from small_suite import SUITE

from dflash_mlx import DFlashError, InputError
from dflash_mlx.bench.suites import parse_suite, read_suite, suite_names


def test_every_suite_that_ships_is_readable_and_says_what_it_rebuilds() -> None:
    expected = {"breakout", "greedy", "japanese", "long_context", "pocket", "prefill_heavy", "prose", "short_answers"}
    assert set(suite_names()) == expected
    suites = {name: read_suite(name) for name in suite_names()}
    assert all(suite.name == name and suite.about and suite.rebuilds for name, suite in suites.items())
    assert len(suites["breakout"].cases[0].turns) == 4
    fills = [case.fill_tokens for case in suites["long_context"].cases]
    assert fills[0] == 2048
    assert 128_000 <= fills[-1] <= 131_072 - suites["long_context"].max_tokens


def test_a_suite_with_two_prompts_in_a_case_is_refused() -> None:
    raw = {
        "name": "s",
        "about": "a",
        "rebuilds": "n",
        "max_tokens": 4,
        "case": [{"name": "c", "text": "t", "turns": ["u"]}],
    }
    with pytest.raises(DFlashError, match=r"a case in here must be a name and one of turns, text, fill_tokens"):
        parse_suite(raw, "here")


WRONG_SUITES = [
    ("max_tokens = 12", 'max_tokens = "12"', "max_tokens in wrong.toml must be an integer but got '12'"),
    ("max_tokens = 12", "max_tokens = true", "max_tokens in wrong.toml must be an integer but got True"),
    ("max_tokens = 12", "max_tokens = -4", "max_tokens must be an integer of at least 1 but got -4"),
    ("max_tokens = 12", 'max_tokens = 12\ntemperature = "hot"', "temperature in wrong.toml must be a number"),
    ("max_tokens = 12", "max_tokens = 12\ntemperature = nan", "temperature must be a number of at least 0 but got nan"),
    ("max_tokens = 12", "max_tokens = 12\ntemprature = 1.0", "but got 'temprature'"),
    ('reasoning = "low"', 'reasoning = "huge"', "reasoning in wrong.toml must be one of low, medium, high, xhigh"),
    ('text = "def read_lines(path):"', "text = 5", "text in wrong.toml must be a text but got 5"),
    ('text = "def read_lines(path):"', 'turns = "abc"', "turns in wrong.toml must be a list but got 'abc'"),
    ('text = "def read_lines(path):"', 'turns = ["a", 1]', "turns in wrong.toml must be texts but got ['a', 1]"),
    ("fill_tokens = 8192", 'fill_tokens = "z"', "fill_tokens in wrong.toml must be an integer but got 'z'"),
    ("fill_tokens = 8192", "fill_tokens = -5", "fill_tokens in wrong.toml must be at least 1 but got -5"),
]


@pytest.mark.parametrize(("right", "wrong", "message"), WRONG_SUITES, ids=[case[1] for case in WRONG_SUITES])
def test_a_wrong_field_of_a_suite_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: str, wrong: str, message: str
) -> None:
    assert right in SUITE
    (tmp_path / "wrong.toml").write_text(SUITE.replace(right, wrong))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as caught:
        read_suite("wrong.toml")
    assert message in str(caught.value)


def test_cases_that_are_no_tables_are_refused() -> None:
    raw = {"name": "s", "about": "a", "rebuilds": "n", "max_tokens": 4, "case": ["x"]}
    with pytest.raises(InputError, match=r"a case in here must be a table but got 'x'"):
        parse_suite(raw, "here")


def test_one_suite_given_twice_is_refused() -> None:
    done = run("bench", "--suite", "pocket", "--suite", "pocket")
    assert done.exit_code == 2
    assert "suites must be of different names but got pocket, pocket" in done.output
