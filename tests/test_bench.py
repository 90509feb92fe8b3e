"""`dflash-mlx bench`: runs are balanced, complete, held to a schema, and never called what they were not."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import command
import pytest
from click.testing import Result
from small_suite import SUITE

from dflash_mlx import DFlashError, generate, load
from dflash_mlx.bench.modes import Mode, modes
from dflash_mlx.bench.order import latin_square, orders
from dflash_mlx.bench.power import _linux, _mac, joules
from dflash_mlx.bench.result import read_result, validate
from dflash_mlx.bench.run import Bench, check_label
from dflash_mlx.bench.suites import filling
from dflash_mlx.bench.summary import acceptance_by_position, rows
from dflash_mlx.text import encode


def run(*arguments: str) -> Result:
    return command.run("bench", *arguments)


@pytest.fixture(scope="module")
def result_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    (folder / "small.toml").write_text(SUITE)
    out = folder / "result.json"
    flags = ["--draft-length", "3", "--draft-length", "auto", "--repeats", "2", "--out", str(out)]
    done = run("--suite", str(folder / "small.toml"), *flags)
    assert done.exit_code == 0, done.output
    return out


@pytest.fixture(scope="module")
def result(result_path: Path) -> dict[str, Any]:
    return json.loads(result_path.read_text())


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8])
def test_orders_put_every_mode_at_every_place_equally_often(count: int) -> None:
    names = [f"mode {number}" for number in range(count)]
    square = len(latin_square(count))
    places = Counter((name, place) for order in orders(names, square) for place, name in enumerate(order))
    assert set(places.values()) == {square // count}
    assert len(places) == count * count


@pytest.mark.parametrize("count", [2, 3, 4, 6, 7])
def test_orders_let_every_mode_follow_every_other_equally_often(count: int) -> None:
    follows = Counter(pair for order in latin_square(count) for pair in pairwise(order))
    assert len(follows) == count * (count - 1)
    assert len(set(follows.values())) == 1


def test_result_has_every_case_turn_mode_and_repeat_once(result: dict[str, Any]) -> None:
    found = Counter(tuple(one[key] for key in ("case", "turn", "mode", "repeat")) for one in result["records"])
    turns = [("talk", 0), ("talk", 1), ("text", 0)]
    expected = {(*turn, mode, n) for turn in turns for mode in ("plain", "v1@3", "v1@auto") for n in (0, 1)}
    assert set(found) == expected
    assert set(found.values()) == {1}
    assert result["complete"] is True


def test_result_names_the_cases_that_it_left_out(result: dict[str, Any]) -> None:
    why = "needs 8204 tokens, the context holds 4096"
    assert result["left_out"] == [{"suite": "small", "case": "long", "why": why}]


def test_modes_of_a_greedy_suite_give_the_same_tokens(result: dict[str, Any]) -> None:
    by_turn: dict[tuple[str, int], set[str]] = {}
    for record in result["records"]:
        by_turn.setdefault((record["case"], record["turn"]), set()).add(record["tokens_sha256"])
    assert [len(found) for found in by_turn.values()] == [1, 1, 1]


def test_plain_runs_did_no_drafter_work_and_planned_no_memory_for_it(result: dict[str, Any]) -> None:
    plain = [record for record in result["records"] if record["mode"] == "plain"]
    assert all(record["stats"]["speculation"] == "off: no drafter" for record in plain)
    plans = result["manifest"]["memory_plan_bytes"]
    drafters = {"drafter weights", "drafter's rings", "drafter's checkpoints", "taps"}
    assert set(plans["v1@3"]) - set(plans["plain"]) == drafters


def test_later_turns_of_a_conversation_reuse_the_session(result: dict[str, Any]) -> None:
    second = [record["stats"] for record in result["records"] if (record["case"], record["turn"]) == ("talk", 1)]
    assert all(stats["reused_tokens"] > 10 for stats in second)


def test_reasoning_strength_is_recorded_where_a_chat_template_took_it(result: dict[str, Any]) -> None:
    assert {(one["case"], one["reasoning"]) for one in result["records"]} == {("talk", "low"), ("text", None)}


def test_rates_follow_from_the_rounds(result: dict[str, Any]) -> None:
    for record in result["records"]:
        committed, seconds = sum(record["rounds"]["committed"]), sum(record["rounds"]["total_s"])
        assert record["stats"]["generated_tokens_per_s"] == pytest.approx(committed / seconds)
        assert record["stats"]["generated_tokens"] == committed + 1  # the first token is the prefill's


def test_predictions_are_absent_on_a_machine_that_the_table_of_chips_does_not_know(
    result: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import dflash_mlx.bench.predict as predict

    pair = load("pocket")
    stats = generate(pair, [5, 6, 7], max_tokens=16, draft_length=3).stats
    monkeypatch.setattr(predict, "chip", lambda: "A chip of another maker")
    assert predict.Predictor(pair).tokens_per_s(stats) is None
    monkeypatch.setattr(predict, "chip", lambda: "Apple M4 Max")
    slow, fast = (predict.Predictor(pair).tokens_per_s(stats), None)
    monkeypatch.setattr(predict, "chip", lambda: "Apple M3 Ultra")
    fast = predict.Predictor(pair).tokens_per_s(stats)
    assert slow is not None
    assert fast is not None
    assert fast > slow > 0


def test_summary_counts_by_hand() -> None:
    def record(mode: str, rate: float, drafted: list[int], accepted: list[int], repeat: int) -> dict[str, Any]:
        stats = {
            "generated_tokens_per_s": rate, "prompt_tokens_per_s": 10.0, "time_to_first_token_s": 0.5,
            "peak_memory_bytes": 7, "generated_tokens": 9,
        }  # fmt: skip
        committed = [count + 1 for count in accepted]
        columns = {"drafted": drafted, "accepted": accepted, "committed": committed, "total_s": [0.1] * len(drafted)}
        place = {"suite": "s", "case": "c", "turn": 0, "repeat": repeat, "mode": mode, "tokens_sha256": str(repeat)}
        return place | {"stats": stats, "rounds": columns, "energy_j": 18.0, "predicted_tokens_per_s": None}

    found = rows(
        [
            record("plain", 10.0, [0, 0], [0, 0], 0),
            record("plain", 20.0, [0, 0], [0, 0], 1),
            record("v1@3", 30.0, [3, 3, 0], [3, 1, 0], 0),
            record("v1@3", 30.0, [3, 2], [0, 2], 1),
        ]
    )
    plain, drafted = found
    assert plain["speed_up"] is None
    assert drafted["speed_up"] == {"median": 2.25, "least": 1.5, "most": 3.0, "count": 2}
    assert drafted["acceptance_rate"] == 6 / 11  # the plain round in between drafted nothing
    assert drafted["mean_length"] == (4 + 2 + 1 + 3) / 4
    assert drafted["equal_to_plain"] == [2, 2]
    assert drafted["energy_j_per_token"] == 2.0
    assert drafted["generate_tokens_per_s"] == {"median": 30.0, "least": 30.0, "most": 30.0, "count": 2}


def test_acceptance_by_position_counts_only_rounds_that_drafted_so_far() -> None:
    rounds = [{"drafted": [3, 1, 0], "accepted": [2, 1, 0]}, {"drafted": [2], "accepted": [0]}]
    assert acceptance_by_position(rounds) == [2 / 3, 1 / 2, 0.0]


def test_a_drafted_mode_whose_speculation_is_off_is_refused() -> None:
    plain = load("pocket", draft=None)
    generation = generate(plain, [5, 6, 7], max_tokens=8)
    with pytest.raises(DFlashError, match=r"speculation in mode v1@4 must be on but got off: no drafter"):
        check_label(Mode("v1@4", load("pocket"), 4), generation)


def test_a_plain_mode_that_drafted_is_refused() -> None:
    pair = load("pocket")
    generation = generate(pair, [5, 6, 7], max_tokens=8, draft_length=3)
    with pytest.raises(DFlashError, match=r"a plain run must be without drafts but got \d+ drafted rounds"):
        check_label(Mode("plain", pair.without_drafter(), 0), generation)


def test_a_drafted_mode_that_never_drafted_is_refused() -> None:
    pair = load("pocket")
    generation = generate(pair, [5, 6, 7], max_tokens=8, draft_length=0)
    generation.stats.speculation = "on"  # as a report would have it that does not look at the rounds
    with pytest.raises(DFlashError, match=r"rounds of mode v1@4 must be drafted but got none was"):
        check_label(Mode("v1@4", pair, 4), generation)


def test_bench_refuses_the_name_of_another_chip() -> None:
    done = run("--chip", "M4 Max", "--suite", "pocket")
    assert done.exit_code == 2
    assert "--chip must be this machine's" in done.output


def test_bench_refuses_a_draft_length_outside_the_block() -> None:
    done = run("--draft-length", "16", "--suite", "pocket")
    assert done.exit_code == 2
    assert "draft length must be 'auto' or between 1 and 15 but got 16" in done.output


def test_bench_keeps_what_was_measured_when_it_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small.toml").write_text(SUITE)
    out, case = tmp_path / "result.json", Bench._case

    def interrupted(self: Bench, *arguments: Any) -> Any:
        if len(self.records) >= 2:
            raise KeyboardInterrupt
        return case(self, *arguments)

    monkeypatch.setattr(Bench, "_case", interrupted)
    done = run("--suite", str(tmp_path / "small.toml"), "--repeats", "1", "--out", str(out))
    assert done.exit_code == 130
    kept = read_result(out)
    assert kept["complete"] is False
    assert len(kept["records"]) == 2


def test_a_conversation_that_outgrows_the_context_ends_there_and_all_else_is_kept(tmp_path: Path) -> None:
    """The answer of the first turn leaves no room for the question of the second."""
    (tmp_path / "small.toml").write_text(SUITE)
    question = [{"role": "user", "content": "Write a function read_line."}]
    context = len(encode(load("pocket").tokenizer, question, reasoning="low")) + 12
    out = tmp_path / "result.json"
    flags = ["--max-context", str(context), "--draft-length", "3", "--repeats", "1", "--out", str(out)]
    done = run("--suite", str(tmp_path / "small.toml"), *flags)
    assert done.exit_code == 0, done.output
    kept = read_result(out)
    assert kept["complete"] is True
    found = Counter((one["case"], one["turn"], one["mode"]) for one in kept["records"])
    assert found == {(case, 0, mode): 1 for case in ("talk", "text") for mode in ("plain", "v1@3")}
    talk, long = kept["left_out"]
    assert (talk["case"], long["case"]) == ("talk", "long")
    why = re.fullmatch(rf"from turn 2 on it needs (\d+) tokens, the context holds {context}", talk["why"])
    assert why
    assert int(why[1]) > context
    assert f"Left out: small talk: {talk['why']}." in done.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r["records"][0].pop("stats"), "'stats' is a required property"),
        (lambda r: r["records"][0].update(mode="turbo"), "'turbo' does not match"),
        (lambda r: _drafted(r)["stats"].update(speculation="off: failed"), "'on' was expected"),
        (lambda r: _plain(r)["rounds"].update(drafted=[4]), "0 was expected"),
        (lambda r: r.update(format="other"), "'dflash-mlx-bench-1' was expected"),
        (lambda r: r["manifest"]["machine"].update(chip=""), "'' should be non-empty"),
    ],
)
def test_a_changed_result_is_refused_with_the_place(result: dict[str, Any], change: Any, message: str) -> None:
    changed = json.loads(json.dumps(result))
    change(changed)
    with pytest.raises(DFlashError) as caught:
        validate(changed, "r.json")
    assert message in str(caught.value)


def _drafted(result: dict[str, Any]) -> dict[str, Any]:
    return next(one for one in result["records"] if one["mode"] == "v1@3")


def _plain(result: dict[str, Any]) -> dict[str, Any]:
    return next(one for one in result["records"] if one["mode"] == "plain")


@pytest.mark.parametrize("chip", ["", " "])
def test_an_empty_name_of_a_chip_is_no_chip(chip: str) -> None:
    assert run("--chip", chip, "--suite", "pocket").exit_code == 2


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1"])
def test_a_cool_down_that_cannot_be_waited_is_refused(seconds: str) -> None:
    done = run("--suite", "pocket", "--cool-down", seconds)
    assert done.exit_code == 2
    assert f"'{seconds}' is no number of seconds" in done.output


def test_a_missing_library_is_told_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    monkeypatch.setattr(Bench, "run", lambda *_: pytest.fail("it ran"))
    done = run("--suite", "pocket")
    assert done.exit_code == 1
    assert "jsonschema must be installed but got no such package" in done.output


def test_filling_is_exactly_as_long_as_asked_and_does_not_repeat_itself() -> None:
    tokenizer = load("pocket").tokenizer
    ids = filling(3000, tokenizer)
    assert len(ids) == 3000
    assert filling(1000, tokenizer) == ids[:1000]
    text = tokenizer.decode(ids[1:])
    lines = text.splitlines()
    assert len(set(lines)) == len(lines)


def test_modes_are_plain_and_each_length_and_differ() -> None:
    pair = load("pocket")
    assert [mode.name for mode in modes([pair], [2, "auto"])] == ["plain", "v1@2", "v1@auto"]
    with pytest.raises(DFlashError, match="modes must be all different"):
        modes([pair], [2, 2])


def test_power_is_read_from_what_a_mac_prints() -> None:
    battery = "Now drawing from 'Battery Power'\n -InternalBattery-0 (id=1)\t83%; discharging; 4:10 remaining\n"
    assert _mac(battery, "CPU_Speed_Limit \t= 72\n") == {"source": "battery", "battery_percent": 83, "thermal": 72}
    calm = "Note: No thermal warning level has been recorded\n"
    assert _mac("Now drawing from 'AC Power'\n", calm) == {"source": "mains", "battery_percent": None, "thermal": 100}
    assert _mac("", "") == {"source": None, "battery_percent": None, "thermal": None}


def test_power_is_read_from_what_linux_keeps(tmp_path: Path) -> None:
    for name, files in {"AC": {"type": "Mains", "online": "0"}, "BAT0": {"type": "Battery", "capacity": "41"}}.items():
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).write_text(text + "\n")
    assert _linux(tmp_path) == {"source": "battery", "battery_percent": 41, "thermal": None}
    (tmp_path / "AC" / "online").write_text("1\n")
    assert _linux(tmp_path)["source"] == "mains"
    assert _linux(tmp_path / "absent") == {"source": None, "battery_percent": None, "thermal": None}


def test_energy_adds_up_the_samples() -> None:
    sample = "Combined Power (CPU + GPU + ANE): {} mW\n"
    assert joules(sample.format(20000) + "GPU Power: 5 mW\n" + sample.format(10000)) == 15.0  # two halves of a second
    assert joules("") is None


def test_two_drafters_are_compared_on_one_loaded_target(tmp_path: Path) -> None:
    pair = load("pocket", "v1")
    other = pair.with_drafter("dflash2")
    assert other.target is pair.target
    assert other.plan.parts["drafter weights"] != pair.plan.parts["drafter weights"]
    names = [mode.name for mode in modes([pair, other], [3])]
    assert names == ["plain", "v1@3", "dflash2@3"]
    alone = load("pocket", "dflash2")
    asked: dict[str, Any] = {"max_tokens": 24, "draft_length": 3}
    assert generate(other, "import os", **asked).to_dict()["tokens"] == generate(alone, "import os", **asked).tokens
    assert other.plan.parts == alone.plan.parts
