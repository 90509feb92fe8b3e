"""Rows that a round rejects leave no trace: logits and features are, bit for bit, those of a run that never drafted."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from functools import cache

import grids
import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.cache import Part
from dflash_mlx.choice import Choice
from dflash_mlx.options import Options
from dflash_mlx.output import Output
from dflash_mlx.round import Work, draft
from dflash_mlx.state import HostReads, State

COUNT = 130  # tokens: the ring of 48 rows wraps twice
MIXES = {
    "the block's sizes": (15, 2, 8, 1, 0),
    "plain between blocks": (0, 0, 0, 15, 0, 15, 0),
    "one row after a rejected block": (15, 0),
    "as long as a forward can be": (36, 3, 36, 0, 11),
}
KINDS = ("float32", "bfloat16", "4-bit")
HUGE = 1e30


def array(values):
    return np.array(values.astype(mx.float32))


@dataclass
class Walk:
    """A fixed text walked through in rounds: which rows were kept, and what the forward said about them."""

    logits: np.ndarray
    taps: np.ndarray
    state: State


def walk(pair, text, widths, accepts, poison=False):
    """Commit a fixed text whatever the target chooses: of each block's drafts, some lead, the rest is junk."""
    draw = random.Random(3)
    state = State(pair)
    state.tokens = text[:1]
    logits, taps = [], []
    for width in widths:
        at, left = state.cache.offset, len(text) - 1 - state.cache.offset
        if not left:
            break
        good = min(accepts(width), left - 1, width)
        junk = [draw.randrange(pair.target.config.vocab_size) for _ in range(width - good)]
        rows = text[at : at + 1 + good] + junk
        forward = pair.target(mx.array(rows, mx.uint32), [Part(state.cache, len(rows), len(rows))], state.taps)
        if width and state.context is not None:
            length = min(width, pair.block_size - 1)
            work = Work(state, Choice(Options(), 0), Output(None, (), 1), 1, length, whole=draw.random() < 0.5)
            draft(work, HostReads())
        state.commit(1 + good, text[at + 1 : at + 2 + good], forward.taps)
        mx.eval(forward.logits, state.arrays)
        logits.append(array(forward.logits)[: good + 1])
        taps.append(array(mx.concatenate(forward.taps, axis=-1))[: good + 1])
        if poison:
            spoil(state.cache, state.cache.offset, at + len(rows))
            if state.context is not None:
                spoil(state.context, state.context.offset, state.context.offset + pair.block_size)
    return Walk(np.concatenate(logits), np.concatenate(taps), state)


def spoil(cache, begin, end):
    """Make the rows of positions begin..end-1 huge in every layer; they are past the offset, and nothing sees them."""
    for layer in cache.layers:
        for position in range(begin, end):
            if position < layer.capacity or layer.capacity == cache.ring:
                row = position % layer.capacity
                layer.keys[:, :, row] = HUGE
                layer.values[:, :, row] = -HUGE
    mx.eval(cache.arrays)


@cache
def undrafted(kind):
    """The text walked through by single rows."""
    pair = grids.pair("window 11", kind)
    return walk(pair, text_of(pair), itertools.repeat(0), lambda width: 0)


def text_of(pair, count=COUNT, seed=1):
    draw = random.Random(seed)
    return [draw.randrange(pair.target.config.vocab_size) for _ in range(count + 1)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mix", MIXES)
def test_any_mix_of_block_widths_leaves_the_logits_of_a_run_that_never_drafted(mix, kind):
    pair = grids.pair("window 11", kind)
    text = text_of(pair)
    alone = undrafted(kind)
    draw = random.Random(2)
    mixed = walk(pair, text, itertools.cycle(MIXES[mix]), lambda width: draw.choice((0, width // 2, width)))
    assert len(alone.logits) == len(mixed.logits) == COUNT
    assert (alone.logits == mixed.logits).all()
    assert (alone.taps == mixed.taps).all()
    assert mixed.state.cache.offset == alone.state.cache.offset == COUNT


def test_the_other_shape_mixes_as_well():
    """Six query heads on one key head, a window of 35, a ring of 80 rows, a drafter with another window."""
    pair = grids.pair("window 35", "bfloat16")
    text = text_of(pair, 200)
    alone = walk(pair, text, itertools.repeat(0), lambda width: 0)
    mixed = walk(pair, text, itertools.cycle((15, 2, 8, 1, 0, 44)), lambda width: width // 3)
    assert (alone.logits == mixed.logits).all()
    assert (alone.taps == mixed.taps).all()


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_a_poisoned_rejected_row_changes_nothing_later(kind):
    """Rows of rejected drafts, and the drafter's scratch rows, are overwritten with 1e30 after every round."""
    pair = grids.pair("window 11", kind)
    text = text_of(pair, 90)
    clean, spoilt = (
        walk(pair, text, itertools.cycle((15, 2, 0, 8, 1)), lambda width: width // 4, poison)
        for poison in (False, True)
    )
    assert (clean.logits == spoilt.logits).all()
    assert (clean.taps == spoilt.taps).all()
    proposals = [draft_logits(walked.state) for walked in (clean, spoilt)]
    assert (proposals[0] == proposals[1]).all()
    poisoned = max(float(mx.abs(layer.keys.astype(mx.float32)).max()) for layer in spoilt.state.cache.layers)
    assert poisoned > 1e29, "nothing was poisoned, so nothing was proved"


def test_a_poisoned_row_that_is_visible_is_noticed():
    """The instrument itself: the same poison one row earlier changes the next logits."""
    pair = grids.pair("window 11")
    text = text_of(pair, 60)
    walked = walk(pair, text, itertools.repeat(0), lambda width: 0)
    state = walked.state
    spoil(state.cache, state.cache.offset - 1, state.cache.offset)
    rows = mx.array(text[-1:], mx.uint32)
    spoilt = array(pair.target(rows, [Part(state.cache, 1, 1)]).logits)
    again = walk(pair, text, itertools.repeat(0), lambda width: 0).state
    clean = array(pair.target(rows, [Part(again.cache, 1, 1)]).logits)
    assert not (clean == spoilt).all()


def draft_logits(state):
    """The drafter's logits for a whole block after what the state holds."""
    state.project_backlog()
    drafter = state.pair.drafter
    masks = [drafter.config.mask_token_id] * (drafter.config.block_size - 1)
    block = mx.array([state.tokens[-1], *masks], mx.uint32)
    return array(drafter.draft_logits(block, state.context, state.pair.target, len(masks)))


def test_two_sessions_in_one_forward_give_what_each_gives_alone():
    """Different histories, lengths and rows asked for; logits and features come part after part."""
    for kind in KINDS:
        pair = grids.pair("window 11", kind)
        texts = text_of(pair, 75, 4), text_of(pair, 20, 5)
        widths = [(1, 16), (16, 1), (5, 3), (16, 16), (2, 7)]
        alone = [State(pair), State(pair)]
        shared = [State(pair), State(pair)]
        feed(pair, alone, texts, 37, 11, together=False)
        feed(pair, shared, texts, 37, 11, together=True)
        for rows in widths:
            expected = feed(pair, alone, texts, *rows, together=False)
            found = feed(pair, shared, texts, *rows, together=True)
            assert all((a == b).all() for a, b in zip(expected, found, strict=True)), (kind, rows)


def feed(pair, states, texts, first, second, together):
    """Forward some rows of both sessions, in one forward or in two, and keep about half of each."""
    counts = (first, second)
    pieces = [
        [(text * 2)[state.cache.offset + i] for i in range(count)]
        for state, text, count in zip(states, texts, counts, strict=True)
    ]
    wanted = (first, max(1, second - 2))
    parts = [Part(state.cache, count, n) for state, count, n in zip(states, counts, wanted, strict=True)]
    if together:
        out = pair.target(mx.array(pieces[0] + pieces[1], mx.uint32), parts, (0, 2))
        logits, taps = out.logits, out.taps
    else:
        outs = [pair.target(mx.array(p, mx.uint32), [part], (0, 2)) for p, part in zip(pieces, parts, strict=True)]
        logits = mx.concatenate([out.logits for out in outs])
        taps = [mx.concatenate(rows) for rows in zip(*(out.taps for out in outs), strict=True)]
    for state, count in zip(states, counts, strict=True):
        state.cache.advance((count + 1) // 2)
    mx.eval(logits, taps, [state.cache.arrays for state in states])
    return [array(logits), *map(array, taps)]
