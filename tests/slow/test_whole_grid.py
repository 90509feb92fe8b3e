"""The whole grid of rounds, of which the default run takes a sample: greedy DFlash equals plain decoding."""

from __future__ import annotations

from itertools import groupby

import grids
import pytest

from dflash_mlx.state import State

pytestmark = pytest.mark.slow
NAMES = grids.PAIRS if grids.has_pocket() else tuple(grids.SHAPES)
CASES = {
    key: list(cases) for key, cases in groupby(grids.grid(NAMES), lambda case: (case.pair, case.kind, case.prompt))
}


def test_the_grid_is_whole():
    """Pairs, kinds of weights, prompts, prefill steps and draft lengths, each with each."""
    assert sum(map(len, CASES.values())) == len(NAMES) * 3 * 6 * 6 * 8


@pytest.mark.parametrize("key", CASES, ids=", ".join)
def test_greedy_rounds_equal_plain_decoding_in_every_case(key):
    """48 cases: the prefill steps with the draft lengths. The pocket pair goes back to a prompt that it holds."""
    wrong, state, step = [], None, None
    for case in CASES[key]:
        if case.pair == grids.POCKET and (state is None or step != case.step):
            state, step = State(grids.drafting(case)), case.step
        if grids.run(case, state) != grids.plain(case.pair, case.kind, case.prompt):
            wrong.append(str(case))
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
