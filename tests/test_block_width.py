"""Whole blocks or k + 1 slots: the same tokens either way, and the automatic draft length finds what gives more."""

from __future__ import annotations

import itertools

import grids
import pytest
from from_file import script

from dflash_mlx import Session, stream
from dflash_mlx.block_width import BlockWidth
from dflash_mlx.draft_length import AutoDraftLength, Draft, Experience
from dflash_mlx.errors import InputError
from dflash_mlx.round_costs import RoundCosts
from dflash_mlx.stats import Round

SHAPE = "window 11"
SHARES = [0.7] * 7  # acceptance of a slot if those before it were accepted


simulator = script("bench/policy_simulator.py")


def looked(width, rounds, accepted, seconds, length=4):
    """Let so many looks accept `accepted[number % len]` drafts and take `seconds` times the usual, until a change."""
    costs, before = [0.03 + 0.002 * k for k in range(8)], width.whole
    for number in range(rounds):
        if width.whole != before:
            return
        width.saw(length, accepted[number % len(accepted)], SHARES, seconds)
        width.judge(SHARES, costs)


@pytest.mark.parametrize("prompt", ["1 token", "5 windows"])
@pytest.mark.parametrize("whole", [False, True])
def test_either_width_decodes_what_plain_decoding_does(whole, prompt):
    pair, tokens = grids.pair(SHAPE), grids.prompts(SHAPE)[prompt]
    plain = Session(pair).generate(tokens, max_tokens=60, draft_length=0).tokens
    done = Session(pair).generate(tokens, max_tokens=60, draft_length=3, whole_block=whole)
    assert done.tokens == plain
    assert {round_.slots for round_ in done.stats.rounds[:-3]} == {pair.block_size if whole else 4}
    assert {round_.rows for round_ in done.stats.rounds[:-3]} == {4}  # only what is used is verified


class Scripted:
    """A policy of given drafts, over and over."""

    def __init__(self, *drafts):
        self._drafts = itertools.cycle(drafts)

    def next(self, context, streams=1):
        return next(self._drafts)

    def saw(self, round, context, streams=1):
        pass


@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_a_text_drafted_in_blocks_of_both_widths_in_turn_stays_the_same(right, monkeypatch):
    pair, tokens = grids.pair(SHAPE), grids.prompts(SHAPE)["window"]
    plain = list(grids.plain(SHAPE, "float32", "window", 110))
    drafts = Draft(3), Draft(3, True), Draft(0), Draft(1, True), Draft(15), Draft(2)
    monkeypatch.setattr(stream, "_policy", lambda *_: Scripted(*drafts))
    done = Session(grids.tutored(pair, tokens + plain, right)).generate(tokens, max_tokens=110)
    assert done.tokens == plain
    assert [round_.slots for round_ in done.stats.rounds[:6]] == [4, 16, 0, 16, 16, 3]


@pytest.mark.parametrize("machine", ["M4 Max, mlx-serve", "M5 Max, row-exact"])
def test_a_drafter_that_guesses_worse_in_short_blocks_ends_with_whole_ones(machine):
    """Of the drafts that a whole block gets right, short ones get seven in ten."""
    draft, best, short, auto = simulator.widths(machine, 0.7)
    assert draft.whole
    assert auto >= 0.94 * best > 1.1 * short


@pytest.mark.parametrize("machine", simulator.MACHINES)
def test_a_drafter_that_guesses_as_well_in_short_blocks_keeps_them(machine):
    experience = simulator.experience_on(machine)
    for seed in range(4):
        simulator.play(machine, [simulator.tokens_of("chat", 1500, seed)], [AutoDraftLength(experience)], seed)
        assert not experience.width.whole


def test_a_change_needs_more_tokens_per_second_not_more_tokens():
    width = BlockWidth(16, cost=1.1)
    looked(width, 400, [4], 3.0)  # every draft accepted, at three times the time: 8 tokens against 3.1
    assert not width.whole
    looked(width, 40, [4], 1.1)
    assert width.whole


def test_a_lucky_look_changes_nothing():
    width = BlockWidth(16, cost=1.1)
    looked(width, 1, [4], 1.1)
    assert not width.whole


def test_pauses_of_the_machine_do_not_hide_a_gain():
    width = BlockWidth(16, cost=1.1)
    for number in range(60):
        if not width.whole:
            looked(width, 1, [4], 50.0 if number % 5 == 0 else 1.1)
    assert width.whole


def test_the_way_back_is_looked_at_too():
    width = BlockWidth(16, cost=1.1, gain=1.4, whole=True)
    assert width.next(4)
    looked(width, 60, [4, 2, 3, 4], 1 / 1.1)  # short blocks accept as much, and take less
    assert not width.whole


@pytest.mark.parametrize(("block", "length"), [(0, 4), (16, 0), (16, 15)])
def test_there_is_nothing_to_choose_without_a_block_without_drafts_or_at_the_full_length(block, length):
    width = BlockWidth(block)
    assert not any(width.next(length) for _ in range(100))
    assert not length or not width.is_look(length, max(length + 1, block))


@pytest.mark.parametrize("whole", [False, True])
def test_streams_that_share_a_forward_do_not_look(whole):
    """All of them would pay for one look."""
    experience = Experience(RoundCosts(lambda length, context, streams: 0.03 + 0.001 * length, 15))
    experience.width = BlockWidth(16, whole=whole)
    policies, seen = [AutoDraftLength(experience) for _ in range(2)], set()
    for at in range(200):
        drafts = [policy.next(at, 2) for policy in policies]
        seen |= {draft.whole for draft in drafts if 0 < draft.length < 15}
        for policy, (length, wide) in zip(policies, drafts, strict=True):
            slots = (16 if wide else length + 1) if length else 0
            counts = {"total_s": 0.03 + at * 1e-6, "streams": 2, "rows": 2 * length + 2, "slots": slots}
            policy.saw(Round(length, length // 2, length // 2 + 1, [], [], **counts), at, 2)
    assert seen == {whole}


def test_looks_become_rarer():
    width, looks = BlockWidth(16), []
    for number in range(4000):
        looks += [number] if width.next(4) else []
    assert looks[0] <= 16
    gaps = [b - a for a, b in itertools.pairwise(looks)]
    assert gaps == sorted(gaps)
    assert 150 <= gaps[-1] <= 192


@pytest.mark.parametrize("asked", [{"whole_block": True}, {"whole_block": 1, "draft_length": 3}])
def test_a_whole_block_that_cannot_be_meant_is_an_error(asked):
    with pytest.raises(InputError, match="whole_block must be False, or True with a fixed draft_length"):
        Session(grids.pair(SHAPE)).generate([1, 2, 3], max_tokens=4, **asked)
