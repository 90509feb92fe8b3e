"""``dflash-mlx tune``: it chooses what was fastest, and `load` starts from what it found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from command import run

import dflash_mlx
from dflash_mlx import Session, tuned
from dflash_mlx.cli import checks
from dflash_mlx.draft_length import AutoDraftLength
from dflash_mlx.kernels.serving import STOCK
from dflash_mlx.stats import Generation, Round, Stats
from dflash_mlx.tuning import lengths_of, tune

SMALL = ("--max-tokens", "10", "--repeats", "1", "--context", "40", "--draft-length", "2", "--draft-length", "3")


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(tuned, "user_cache_path", lambda *_, **__: tmp_path / "cache")


@pytest.fixture(scope="module")
def pair():
    return dflash_mlx.load("pocket")


def pretend(monkeypatch, seconds, accepted, more=0, longer=1.0):
    """Let a round take `seconds[length]` and accept at most `accepted` drafts, without decoding.

    With whole blocks it accepts `more` and takes `longer` times the time.
    """

    def generate(self, prompt, *, max_tokens, draft_length, timed_every=0, whole_block=False, **options):
        kept, rounds = min(accepted + whole_block * more, draft_length), []
        for number in range(6):
            split = (0.001, 0.002) if timed_every and number % timed_every == 0 else (None, None)
            took = seconds[draft_length] * (1 + number * 1e-6) * (longer if whole_block else 1.0)
            rounds.append(Round(draft_length, kept, kept + 1, [], [], *split, total_s=took))
        return Generation("", [], "length", Stats(rounds=rounds))

    monkeypatch.setattr(Session, "generate", generate)


@pytest.mark.parametrize(
    ("accepted", "chosen", "speedup"),
    [(3, 4, 4 * 0.030 / 0.045), (0, 0, 1.0), (1, 1, 2 * 0.030 / 0.040)],
)
def test_the_choice_has_the_most_committed_tokens_per_second(pair, monkeypatch, accepted, chosen, speedup):
    pretend(monkeypatch, {0: 0.030, 1: 0.040, 4: 0.045, 8: 0.090}, accepted)
    report, found = tune(pair, ["a", "b"], contexts=(64,), lengths=(1, 4, 8))
    assert (found.draft_length, report["draft_length"]) == (chosen, chosen)
    assert found.speedup == pytest.approx(speedup, rel=1e-3)
    rates = {speed["draft_length"]: speed["tokens_per_s"] for speed in report["speeds"]}
    assert rates[4] == pytest.approx((min(accepted, 4) + 1) / 0.045, rel=1e-3)
    costs = {cost["draft_length"]: cost for cost in report["costs"]}
    assert costs[8]["total_s"] == pytest.approx(0.090, rel=1e-3)
    assert (costs[8]["draft_s"], costs[8]["verify_s"]) == (0.001, 0.002)


def test_acceptance_is_that_of_the_slots_that_were_judged(pair, monkeypatch):
    pretend(monkeypatch, {0: 0.03, 4: 0.05}, 1)  # of 4 drafts the first is right, the second wrong, two unjudged
    _, found = tune(pair, ["a"], contexts=(), lengths=(4,))
    assert found.acceptance == 0.5


def test_lengths_reach_from_none_to_the_longest(pair):
    assert lengths_of(pair) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15]


def test_load_finds_the_choice_and_the_automatic_length_starts_from_it(pair, monkeypatch):
    assert not any("Tuned" in note for note in pair.notes)
    with monkeypatch.context() as patch:
        pretend(patch, {0: 0.030, 2: 0.031, 3: 0.090}, 2)
        _, found = tune(pair, ["a"], contexts=(64,), lengths=(2, 3))
    tuned.write_tuned(pair.target_path, pair.drafter_path, found)
    again = dflash_mlx.load("pocket")
    assert found.note in again.notes
    assert "draft length 2 gave 2.90 times the plain speed" in found.note
    seconds = again.experience.costs.seconds(64, 1)
    assert [seconds[0], seconds[2], seconds[3]] == pytest.approx([0.030, 0.031, 0.090], rel=1e-2)
    assert again.experience.latest.shares() == pytest.approx([found.acceptance] * 15)
    assert AutoDraftLength(again.experience).next(64).length == 2


def test_a_pair_for_which_drafting_loses_starts_plain(pair, monkeypatch):
    with monkeypatch.context() as patch:
        pretend(patch, {0: 0.030, 2: 0.080}, 0)
        _, found = tune(pair, ["a"], contexts=(64,), lengths=(2,))
    tuned.write_tuned(pair.target_path, pair.drafter_path, found)
    again = dflash_mlx.load("pocket")
    assert "drafting did not pay" in found.note
    assert AutoDraftLength(again.experience).next(64).length == 0


def test_a_tuned_length_that_the_automatic_one_may_not_use_is_left_out(pair):
    """A drafter may have more slots than it names for running."""
    config = replace(pair.drafter.config, runtime_block_size=4)
    setup = tuned.setup_of(None, STOCK)
    found = tuned.Tuned(9, 1.5, 0.7, [(9, 0, 0.05), (3, 0, 0.02)], "2026-01-01", setup)
    small = replace(pair, drafter=SimpleNamespace(config=config), tuned=found)
    assert small.experience.costs.seconds(0, 1)[3] == pytest.approx(0.02, rel=1e-6)


def test_the_command_measures_the_pocket_pair_and_stores_the_choice(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "count_differences", lambda *_: {})
    result = run("tune", "import os", *SMALL)
    assert result.exit_code == 0, result.output
    assert "weights small enough to stay in caches" in result.stdout
    assert f"Stored in {tmp_path / 'cache' / 'tuned.json'}." in result.stderr
    assert result.stdout.splitlines()[-1].startswith("Chosen: ")
    assert any("Tuned on this machine" in note for note in dflash_mlx.load("pocket").notes)
    assert json.loads(run("doctor", "--json").stdout)["pocket"]["tuned"].startswith("Tuned on this machine")


def test_a_dry_run_stores_nothing_and_prints_the_report(tmp_path):
    report = json.loads(run("tune", "import os", *SMALL, "--dry-run", "--json", "--quiet").stdout)
    assert [speed["draft_length"] for speed in report["speeds"]] == [0, 2, 3]
    assert {cost["context"] for cost in report["costs"]} == {40}
    assert all(cost["total_s"] > 0 for cost in report["costs"])
    drafted = [cost for cost in report["costs"] if cost["draft_length"]]
    assert all(cost["draft_s"] > 0 and cost["verify_s"] > 0 for cost in drafted)
    assert not (tmp_path / "cache").exists()


def test_without_a_drafter_and_where_nothing_can_be_stored_it_says_so(monkeypatch, tmp_path):
    result = run("tune", "--no-draft", "--quiet")
    assert (result.exit_code, "[tune] the pair must be a target with a drafter" in result.stderr) == (2, True)
    Path(tmp_path / "cache").write_text("a file, not a folder")
    result = run("tune", "import os", *SMALL, "--quiet")
    assert result.exit_code == 1
    assert "tuned.json must be writable but got" in result.stderr


@pytest.mark.parametrize(("longer", "whole"), [(1.1, True), (1.5, False)])
def test_whole_blocks_are_compared_and_the_automatic_length_starts_with_what_paid(pair, monkeypatch, longer, whole):
    """Of 4 drafts 2 are accepted in short blocks, 3 in whole ones: 4 tokens a round for 3."""
    with monkeypatch.context() as patch:
        pretend(patch, {0: 0.030, 4: 0.040}, 2, more=1, longer=longer)
        report, found = tune(pair, ["a"], contexts=(64,), lengths=(4,))
    assert [block["slots"] for block in report["blocks"]] == [5, 16]
    assert found.whole == pytest.approx((3 / 4 / (2 / 3), longer, 4 / 3 / longer), rel=1e-3)
    tuned.write_tuned(pair.target_path, pair.drafter_path, found)
    again = dflash_mlx.load("pocket")
    assert again.experience.width.whole == whole
    seconds, shares = again.experience.costs.seconds(64, 1), again.experience.latest.shares()
    assert (seconds[0], seconds[4]) == pytest.approx((0.030, 0.040 * (longer if whole else 1.0)), rel=1e-2)
    assert shares[0] == pytest.approx(3 / 4 if whole else 2 / 3, rel=1e-3)
    assert AutoDraftLength(again.experience).next(64).whole == whole
