"""A round's times are parts of the wall clock: none is missing and none is counted twice."""

from __future__ import annotations

import time

import grids
import mlx.core as mx
import pytest

from dflash_mlx import Session

SHAPE, PAUSE = "window 11", 0.04
PROMPT = grids.prompts(SHAPE)["window"]
OPTIONS = {"max_tokens": 24, "draft_length": 3}


@pytest.fixture
def pair():
    return grids.pair(SHAPE)


def test_rounds_and_rests_sum_to_the_clock_on_the_wall(pair):
    """Measured here from the first chunk to the last, with a caller who takes his time."""
    session = Session(pair)
    stream = session.stream_generate(PROMPT, **OPTIONS)
    next(stream)
    started = time.perf_counter()
    for _ in stream:
        ended = time.perf_counter()
        time.sleep(PAUSE)
    rounds = session.last_generation.stats.rounds
    assert sum(r.total_s + r.rest_s for r in rounds) == pytest.approx(ended - started, rel=0.05, abs=0.005)
    assert all(r.rest_s >= PAUSE for r in rounds[1:])
    assert all(0 < r.host_s < r.total_s for r in rounds)
    assert all(0 < r.cpu_s < r.total_s + 0.001 for r in rounds)


def test_a_timed_round_is_drafting_verifying_and_the_host(pair):
    """Every third is read twice, and says so; on the others the two are not known apart."""
    stats = Session(pair).generate(PROMPT, timed_every=3, **OPTIONS).stats
    timed = [r for r in stats.rounds if r.draft_s is not None]
    assert [stats.rounds.index(r) % 3 for r in timed] == [0] * len(timed)
    assert len(timed) == len([r for r in stats.rounds[::3] if r.drafted]) >= 4
    for round_ in timed:
        assert round_.draft_s > 0
        assert round_.verify_s > 0
        assert round_.draft_s + round_.verify_s + round_.host_s == pytest.approx(round_.total_s)
    assert all(r.verify_s is None for r in stats.rounds if r not in timed)
    assert stats.syncs == 1 + len(stats.rounds) + len(timed)


def test_no_round_is_read_twice_unless_asked(pair):
    stats = Session(pair).generate(PROMPT, **OPTIONS).stats
    assert {(r.draft_s, r.verify_s) for r in stats.rounds} == {(None, None)}
    assert stats.syncs == 1 + len(stats.rounds)


def test_timing_changes_no_token(pair):
    out = [Session(pair).generate(PROMPT, timed_every=every, **OPTIONS) for every in (0, 1)]
    assert out[0].tokens == out[1].tokens
    assert [r.proposal for r in out[0].stats.rounds] == [r.proposal for r in out[1].stats.rounds]


@pytest.mark.parametrize("slow", ["drafting", "verifying", "the host"])
def test_what_is_slow_is_where_the_time_goes(slow, pair, monkeypatch):
    """A pause in one part of each round appears in that part's seconds, and in no other's."""
    evaluate, count = mx.eval, [0]

    def slow_eval(*arrays):
        count[0] += 1
        if count[0] > 1 and (count[0] % 2 == 0) == (slow == "drafting"):
            time.sleep(PAUSE)
        evaluate(*arrays)

    def slow_processor(tokens, logits):
        time.sleep(PAUSE)
        return logits

    options = {"logits_processors": [slow_processor]} if slow == "the host" else {}
    if slow != "the host":
        monkeypatch.setattr(mx, "eval", slow_eval)
    rounds = Session(pair).generate(PROMPT, timed_every=1, **{**OPTIONS, "max_tokens": 12}, **options).stats.rounds
    parts = {"drafting": "draft_s", "verifying": "verify_s", "the host": "host_s"}
    drafted = [r for r in rounds if r.drafted == 3]
    assert len(drafted) >= 4
    for round_ in drafted:
        assert getattr(round_, parts[slow]) >= PAUSE
    for part in set(parts.values()) - {parts[slow]}:
        assert min(getattr(round_, part) for round_ in drafted) < PAUSE


def test_processor_time_counts_the_hosts_work_and_not_its_waiting(pair):
    def works(tokens, logits):
        ends = time.thread_time() + PAUSE
        while time.thread_time() < ends:
            pass
        return logits

    def sleeps(tokens, logits):
        time.sleep(PAUSE)
        return logits

    found = {}
    for processor in (works, sleeps):
        options = {"max_tokens": 8, "draft_length": 0, "logits_processors": [processor]}
        rounds = Session(pair).generate(PROMPT, **options).stats.rounds
        assert min(r.host_s for r in rounds) >= PAUSE
        found[processor] = sorted(r.cpu_s for r in rounds)[len(rounds) // 2]
    assert found[works] >= PAUSE
    assert found[works] - found[sleeps] > PAUSE / 2
