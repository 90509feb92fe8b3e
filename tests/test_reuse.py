"""Whatever becomes of a history, a session gives what a fresh one gives, and computes no more than it has to.

The pair's window is 11 and its ring 48 rows, so a history of 60 tokens has lost its beginning; a checkpoint also serves
the 16 positions before it. The expected counts are written down by hand from that.
"""

from __future__ import annotations

import random
from functools import cache

import grids
import mlx.core as mx
import numpy as np
import pytest
from dealt import dealt
from usable import PROMPT, SHAPE, fresh

from dflash_mlx import Session
from dflash_mlx.checkpoint import SLACK_ROWS

LONG = 50  # tokens of an answer that takes the rings far past the window before it


@pytest.fixture
def pair():
    return grids.pair(SHAPE)


def check(session, tokens, reused=None, **options):
    """One turn: tokens, proposals and accepted counts of a fresh session; returns the tokens."""
    found, alone = session.generate(tokens, **options), fresh(tokens, **options)
    assert found.tokens == alone.tokens
    for name in ("proposal", "accepted", "committed"):
        assert [getattr(r, name) for r in found.stats.rounds] == [getattr(r, name) for r in alone.stats.rounds]
    assert session.tokens == [*tokens, *found.tokens]
    if reused is not None:
        assert found.stats.reused_tokens == reused
    return found.tokens


def others(tokens, count=6):
    """Tokens that none of the given ones is, to continue a history in another way."""
    return [token for token in range(97) if token not in tokens][:count]


EDITS = {
    # The first turn is a prompt of 40 and an answer of 50: positions 0 to 40 at least have lost their rows at its end.
    "reasoning dropped": (lambda prompt, out: [*prompt, *others(out)], 40),
    "exact repeat": (lambda prompt, out: prompt, 39),
    "a few tokens shorter": (lambda prompt, out: prompt[:30], 29),
    "an edit just before the answer": (lambda prompt, out: [*prompt[:35], *others(prompt)], 35),
    "an edit before what the checkpoint serves": (lambda prompt, out: [*prompt[:23], *others(prompt)], 0),
    "an edit early in the answer": (lambda prompt, out: [*prompt, *out[:2], *others(out)], 40),
    "an edit late in the answer": (lambda prompt, out: [*prompt, *out[:35], *others(out)], 75),
    "appended": (lambda prompt, out: [*prompt, *out, 3, 4], 89),
    "appended, more than the ring": (lambda prompt, out: [*prompt, *out, *PROMPT, *PROMPT], 89),
    "nothing in common": (lambda prompt, out: others(prompt[:1]), 0),
}


@cache
def first_turn(length):
    """A session after a long answer, to be forked, and the answer."""
    session = Session(grids.pair(SHAPE))
    return session, check(session, PROMPT, 0, max_tokens=LONG, draft_length=length)


@pytest.mark.parametrize(("edit", "length"), dealt(tuple(EDITS), (0, 4, 15)))
def test_an_edited_history_goes_back_to_the_nearest_checkpoint(edit, length):
    change, expected = EDITS[edit]
    session, first = first_turn(length)
    check(session.fork(), change(PROMPT, first), expected, max_tokens=9, draft_length=length)


@pytest.mark.parametrize("kind", ["bfloat16", "4-bit"])
def test_checkpoints_serve_all_kinds_of_weights(kind):
    """A wider ring than the drafter's, and numbers that round."""
    pair, prompt = grids.pair("window 35", kind), grids.prompts("window 35", kind)["5 windows"][:100]
    session = Session(pair)
    first = session.generate(prompt, max_tokens=70, draft_length=4)
    tokens = [*prompt, *others(first.tokens)]
    found, alone = (s.generate(tokens, max_tokens=9, draft_length=4) for s in (session, Session(pair)))
    assert found.stats.reused_tokens == 100
    assert found.tokens == alone.tokens
    assert [r.proposal for r in found.stats.rounds] == [r.proposal for r in alone.stats.rounds]


def test_a_chat_whose_reasoning_is_dropped_feeds_only_what_is_new(pair):
    """Eight turns; of each answer's 30 tokens only the last 3 stay: a turn feeds these and what is new."""
    session, history, start = Session(pair), PROMPT[:20], 0
    for turn in range(8):
        out = check(session, history, start, max_tokens=30, draft_length=(4, 0)[turn % 2])
        kept = out[-3:]  # they may begin as the whole answer does
        start = len(history) + next((i for i, (a, b) in enumerate(zip(kept, out, strict=False)) if a != b), 3)
        history = [*history, *kept, *PROMPT[turn : turn + 5]]


def test_an_edit_of_an_older_turn_finds_that_turns_checkpoint(pair):
    """Three turns of 20 new and 30 generated tokens: they start at 20, 70, 120 and end at 49, 99, 149."""
    session, history, ends = Session(pair), [], []
    for turn in range(3):
        history = [*history, *PROMPT[turn : turn + 20]]
        history += check(session, history, max_tokens=30, draft_length=4)
        ends.append(len(history) - 1)
    assert ends == [49, 99, 149]
    # Of the four newest the one at 20 went: it was the nearest to the one before it, the beginning.
    check(session, [*history[:80], *others(history)], 70, max_tokens=30, draft_length=4)
    check(session, [*history[:60], *others(history)], 49, max_tokens=30, draft_length=4)
    check(session, [*history[:30], *others(history)], 0, max_tokens=5, draft_length=4)


def test_a_checkpoint_of_what_was_overwritten_is_forgotten(pair):
    """Positions 89 and 100 had checkpoints; the history then went another way from 40 on, and has others there."""
    session, options = Session(pair), {"max_tokens": LONG, "draft_length": 4}
    first = check(session, PROMPT, 0, **options)
    check(session, [*PROMPT, *first, *PROMPT[:11]], 89, **options)
    new = others(first, 1) * 120
    check(session, [*PROMPT, *new], 40, **options)
    check(session, [*PROMPT, *new[:55], *others([*new, *PROMPT])], 40, **options)


def test_where_histories_part_a_checkpoint_is_left_for_the_next(pair):
    """Three chats share 80 tokens; the second computes them again, and the third finds them."""
    system, session = (PROMPT * 2)[:80], Session(pair)
    for turn, expected in enumerate([0, 0, 80, 80]):
        prompt = [*system, 90 + turn, *PROMPT, *PROMPT[turn:]]
        check(session, prompt, expected, max_tokens=30, draft_length=4)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_random_edits_of_a_history_change_nothing_but_the_time(seed, pair):
    """Appended, cut, edited, repeated and shortened in turn; prefill steps, draft lengths and sampling change too."""
    draw, session, history = random.Random(seed), Session(pair), list(PROMPT)
    starts, reused = [], 0
    for turn in range(14):
        options = {
            "max_tokens": draw.choice([1, 9, 50]), "draft_length": draw.choice([0, 1, 4, 15]), "seed": 3,
            "temperature": draw.choice([0.0, 0.8]), "prefill_step_size": draw.choice([5, 37, 2048]),
        }  # fmt: skip
        before = session.tokens
        out = check(session, history, **options)
        shared = next((i for i, (a, b) in enumerate(zip(before, history, strict=False)) if a != b), len(before))
        found = session.last_generation.stats.reused_tokens
        assert found <= min(shared, len(history) - 1), turn
        newest = [start for start in starts[-1:] if start <= shared < len(history)]
        assert found >= max(newest, default=0), turn  # the newest turn's start is never lost
        starts, reused = [start for start in starts if start <= found] + [len(history)], reused + found
        history = edited(draw, history, out)
    assert reused > 200


def edited(draw, prompt, out):
    """The next prompt: one of the things that happen to a chat."""
    cut = draw.randint(1, len(prompt))
    new = [draw.randrange(97) for _ in range(draw.choice([1, 7, 60]))]
    ways = [
        [*prompt, *out, *new], [*prompt, *out, *new], [*prompt, *out[-3:], *new], [*prompt, *new], list(prompt),
        [*prompt[:cut], *new, *prompt[cut + 1 :]], prompt[:cut], [*prompt[:-5], *new], [*prompt, *out[:-2]],
    ]  # fmt: skip
    return draw.choice(ways)[:220]


def rows_of(cache):
    """Per ring of a cache: the keys of the positions that a query sees, by row."""
    seen = range(max(0, cache.offset - cache.window), cache.offset)
    at = [position % cache.ring for position in seen]
    return [np.array(array)[:, :, at] for ring in cache.rings for array in (ring.keys, ring.values)]


def test_a_restored_ring_holds_the_same_keys_in_the_same_rows(pair):
    """Every row of the window before the checkpoint, of the target and of the drafter, bit for bit."""
    session, once = Session(pair), Session(pair)
    session.generate(PROMPT, max_tokens=LONG, draft_length=4)
    once.generate([*PROMPT, 5], max_tokens=1)
    state, end = session._state, len(PROMPT) + 1
    assert state.reachable(40, end) == 40
    assert not state.cache.can_trim_to(40), "the ring itself would have been enough, so nothing was restored"
    state.go_back(40, end)
    once._state.project_backlog()
    for found, expected in zip(state.histories, once._state.histories, strict=True):
        expected.trim_to(40)
        assert all((a == b).all() for a, b in zip(rows_of(found), rows_of(expected), strict=True))
        assert found.start == 40 - 11 - SLACK_ROWS
        assert all(mx.isfinite(array).all() for array in found.arrays)
