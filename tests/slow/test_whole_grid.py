"""The whole grid of rounds, of which the default run takes a sample: greedy DFlash equals plain decoding."""

from __future__ import annotations

from itertools import groupby

import dealt
import grids
import pytest

from dflash_mlx.state import State

pytestmark = pytest.mark.slow
NAMES = grids.PAIRS if grids.has_pocket() else tuple(grids.SHAPES)
CASES = {
    key: list(cases) for key, cases in groupby(grids.grid(NAMES), lambda case: (case.pair, case.kind, case.prompt))
}


def test_the_grid_is_whole():
    """Any three settings of the random pairs meet, prefill steps included; of the pocket pair each step and length."""
    settings = ("pair", "kind", "prompt", "step", "length")
    cases = grids.grid(tuple(grids.SHAPES))
    assert len(cases) == 3 * 3 * 6 * 8
    assert {case.step for case in cases} == set(grids.steps("window 11"))
    assert dealt.unmet(cases, settings, 3) == []
    assert sum(map(len, CASES.values())) == len(NAMES) * 3 * 6 * 8
    pocket = [case for cases in CASES.values() for case in cases if case.pair == grids.POCKET]
    assert dealt.unmet(pocket, ("kind", "step", "length"), 2) == []


@pytest.mark.parametrize("key", CASES, ids=", ".join)
def test_greedy_rounds_equal_plain_decoding_in_every_case(key):
    """Eight cases: the draft lengths. The pocket pair goes back to a prompt that it holds."""
    state = State(grids.drafting(CASES[key][0])) if key[0] == grids.POCKET else None
    wrong = [
        str(case) for case in CASES[key] if grids.run(case, state) != grids.plain(case.pair, case.kind, case.prompt)
    ]
    assert wrong == []


@pytest.mark.skipif(not grids.has_pocket(), reason="the pocket pair is not in this tree")
@pytest.mark.parametrize("kind", grids.KINDS)
@pytest.mark.parametrize("length", [3, 15, "drawn"])
def test_the_pocket_pairs_ring_wraps_inside_a_block(length, kind):
    """The prompt ends a few rows before the ring does."""
    pair = grids.pair(grids.POCKET, kind)
    prompt = (grids.prompts(grids.POCKET, kind)["5 windows"])[
        : pair.target.config.max_rows + pair.target.config.window - 5
    ]
    plain, drafted = (grids.drive(pair, prompt, grids.schedule(each), 24) for each in (0, length))
    assert drafted.tokens == plain.tokens
    assert drafted.state.cache.offset > drafted.state.cache.ring
