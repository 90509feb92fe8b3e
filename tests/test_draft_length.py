"""The automatic draft length, played by the simulator on published cost curves and acceptance, with fixed seeds."""

from __future__ import annotations

import itertools

import pytest
from dealt import dealt
from from_file import script

from dflash_mlx.draft_length import AutoDraftLength, Draft, Experience
from dflash_mlx.round_costs import RoundCosts
from dflash_mlx.stats import Round

MACHINES = ("M4 Pro, stock", "M4 Max, mlx-serve", "M5 Max, stock", "M3 Ultra, stock")
STEADY = ("code", "chat", "reasoning off", "hopeless")
SWITCHING = ("switching: maths, reasoning off", "switching: code, prose, hopeless")


simulator = script("bench/policy_simulator.py")


def told(drafted, accepted, seconds, streams=1, rows=None):
    """A round as a session tells of it."""
    rows = streams * (drafted + 1) if rows is None else rows
    return Round(drafted, accepted, accepted + 1, [], [], total_s=seconds, streams=streams, rows=rows)


def flat(length, context, streams):
    """A machine on which drafting is nearly free."""
    return 0.03 + 0.001 * length


@pytest.mark.parametrize(("machine", "text"), dealt(MACHINES, STEADY, of=2))
def test_a_steady_text_runs_as_with_its_best_length(machine, text):
    found = simulator.rates(machine, text)
    best = simulator.best_fixed(found)
    assert found["auto"] >= (0.97 if best == "fixed 0" else 0.95) * found[best]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("text", SWITCHING)
def test_a_text_that_switches_runs_faster_than_with_any_one_length(machine, text):
    found = simulator.rates(machine, text)
    best = found[simulator.best_fixed(found)]
    gain = simulator.ideal(machine, text) / best
    # Where even switching at once would gain nothing there is nothing to beat.
    assert found["auto"] > best if gain > 1.02 else found["auto"] >= 0.95 * best
    assert gain > 1.02 or text == SWITCHING[0]


@pytest.mark.parametrize(("machine", "text"), [("M4 Max, mlx-serve", "code"), ("M5 Max, stock", "prose")])
def test_four_streams_run_as_with_their_best_length(machine, text):
    found = simulator.rates(machine, text, streams=4, tokens=1200)
    best = simulator.best_fixed(found)
    assert found["auto"] >= (0.97 if best == "fixed 0" else 0.95) * found[best]


def test_a_text_that_never_pays_is_tried_ever_more_rarely_and_never_for_good():
    """At 6 % for ever a probe costs more than the drafter gains elsewhere."""
    (policy,) = simulator.auto("M4 Max, mlx-serve")
    drafted, at = [], 0
    while at < 12_000:
        length = policy.next(at).length
        drafted += [at] if length else []
        policy.saw(told(length, 0, simulator.clock_of("M4 Max, mlx-serve").seconds([Draft(length)], at)), at)
        at += 1
    assert len([at for at in drafted if at >= 6000]) / 6000 < 0.01
    gaps = [b - a for a, b in itertools.pairwise(drafted) if b - a > 1]
    assert max(gaps) <= 260
    assert gaps == sorted(gaps)
    assert drafted[-1] > 11_000


def test_a_text_that_becomes_easy_is_drafted_again():
    (policy,) = simulator.auto("M4 Max, mlx-serve")
    clock, lengths = simulator.clock_of("M4 Max, mlx-serve"), []
    for at in range(1200):
        length = policy.next(at).length
        lengths.append(length)
        policy.saw(told(length, length if at >= 600 else 0, clock.seconds([Draft(length)], at)), at)
    assert sum(map(bool, lengths[550:600])) <= 2
    assert min(lengths[-50:]) >= 3


def test_one_slow_measurement_rules_no_length_out():
    costs = RoundCosts(flat, 5)
    for length in (0, 2, 0):
        costs.saw(length, 100, 1, flat(length, 100, 1) * 1.01)
    costs.saw(4, 100, 1, 7.0)  # a pause of the machine
    assert costs.seconds(100, 1)[4] < 0.05
    for number in range(5):
        costs.saw(4, 100, 1, 0.034 + number * 1e-6)
    assert costs.seconds(100, 1)[4] == pytest.approx(0.034, rel=1e-3)


def test_costs_follow_a_machine_that_slows_down():
    costs = RoundCosts(flat, 5)
    for number in range(20):
        costs.saw(3, 100, 1, 0.033 + number * 1e-6)
    for number in range(7):
        costs.saw(3, 100, 1, 0.066 + number * 1e-6)
    assert costs.seconds(100, 1)[3] == pytest.approx(0.066, rel=1e-3)


def test_a_length_never_measured_takes_its_neighbours_correction():
    costs = RoundCosts(flat, 6)
    costs.saw(2, 100, 1, 2 * flat(2, 0, 1))
    assert costs.seconds(100, 1) == pytest.approx([2 * flat(k, 0, 1) for k in range(7)])
    for number in range(7):
        costs.saw(4, 100, 1, (3 + number * 1e-9) * flat(4, 0, 1))
    assert costs.seconds(100, 1)[3] == pytest.approx(2.5 * flat(3, 0, 1))
    assert costs.seconds(100, 1)[6] == pytest.approx(3 * flat(6, 0, 1))
    assert costs.seconds(70_000, 1)[2] == pytest.approx(2 * flat(2, 0, 1))  # another band starts from the nearest


def test_the_streams_of_a_round_choose_alike_and_its_time_counts_once():
    experience = Experience(RoundCosts(flat, 7))
    policies = [AutoDraftLength(experience) for _ in range(3)]
    for at in range(40):
        lengths = {policy.next(at, 3).length for policy in policies}
        assert len(lengths) == 1
        (length,) = lengths
        before = experience.costs.measured(length, at, 3)
        for policy in policies:
            policy.saw(told(length, length, 0.03 + at * 1e-6, streams=3), at, 3)
        assert experience.costs.measured(length, at, 3) == before + 1


def test_a_round_that_fed_another_streams_prompt_says_nothing_of_costs():
    experience = Experience(RoundCosts(flat, 7))
    policy = AutoDraftLength(experience)
    policy.next(10)
    policy.saw(told(0, 0, 9.0, rows=513), 10)
    assert experience.costs.measured(0, 10, 1) == 0


def test_no_length_passes_the_longest():
    policy = AutoDraftLength(Experience(RoundCosts(flat, 4)))
    seen = set()
    for at in range(300):
        length = policy.next(at).length
        seen.add(length)
        policy.saw(told(length, length, flat(length, at, 1) + at * 1e-9), at)
    assert max(seen) == 4
