"""The drafter's context stays in step: whatever happened before, it proposes what it would after a fresh prefill."""

from __future__ import annotations

import grids
import mlx.core as mx
import numpy as np
import pytest
import reference
from dealt import dealt
from tiny import drafter_config, drafter_weights, target_weights, text_config, tiny_specs

from dflash_mlx import Session
from dflash_mlx.choice import Choice
from dflash_mlx.options import Options
from dflash_mlx.output import Output
from dflash_mlx.round import Work, draft
from dflash_mlx.state import BACKLOG_ROWS, HostReads, State

SHAPE, SECOND = "window 11", "DFlash-2"
STRETCHES = (1, BACKLOG_ROWS - 1, BACKLOG_ROWS, 2 * BACKLOG_ROWS + 9)
EITHER = pytest.mark.parametrize("shape", [SHAPE, SECOND])


def block_logits(state):
    """The drafter's logits for its whole block after what a state holds."""
    state.project_backlog()
    drafter = state.pair.drafter
    masks = [drafter.config.mask_token_id] * (drafter.config.block_size - 1)
    block = mx.array([state.tokens[-1], *masks], mx.uint32)
    return np.array(drafter.draft_logits(block, state.context, state.pair.target, len(masks)))


def fresh(pair, tokens, step=grids.ALL_AT_ONCE):
    """A new state that was given all tokens but the last one, which it must choose itself."""
    state = State(pair)
    grids.prefill(state, tokens[:-1], Choice(Options(), 0), step, HostReads())
    assert state.tokens == tokens, "the text is not what the target says, so the states cannot be compared"
    return state


def drafted(state, length, whole=False):
    """The tokens that a round would draft."""
    work = Work(state, Choice(Options(), 0), Output(None, (), 1), 1, length, whole)
    return draft(work, HostReads()).tolist()


def check(state, step=grids.ALL_AT_ONCE):
    """The state's proposal, its logits and the drafter's context equal those of a fresh one, bit for bit."""
    other = fresh(state.pair, state.tokens, step)
    found, expected = block_logits(state), block_logits(other)
    assert (found == expected).all()
    assert state.context.offset == other.context.offset == state.cache.offset == len(state.tokens) - 1
    ids = [drafted(each, 15) for each in (state, other)]
    assert ids[0] == ids[1]
    if state.pair.drafter_kind == "DFlash v1":
        assert ids[0] == found.argmax(axis=-1).tolist()


@EITHER
def test_proposals_after_many_rounds_are_those_of_the_formulas(shape):
    """Features and block in float64, without a cache, after rounds of every width and two wraps of the ring."""
    pair, prompt = grids.pair(shape), grids.prompts(shape)["window"]
    target, drafter = tiny_specs(**grids.SHAPES[shape])
    history = prompt + list(grids.plain(shape, "float32", "window", 110))
    state = grids.drive(grids.tutored(pair, history), prompt, grids.schedule("falling and rising"), 110).state
    state.pair = pair
    weights = target_weights(target)
    _, taps = reference.target_forward(text_config(target), weights, state.tokens[:-1], drafter.taps)
    block = [state.tokens[-1], *[drafter.mask_token] * (drafter.block - 1)]
    table, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    features = np.concatenate(taps, axis=-1)
    draft_weights = drafter_weights(drafter)
    expected = reference.drafter_forward(drafter_config(drafter), draft_weights, table, head, features, block)
    assert np.abs(block_logits(state) - expected).max() <= 5e-5 * np.abs(expected).max()


@pytest.mark.parametrize(("shape", "kind", "prompt"), dealt((SHAPE, SECOND), grids.KINDS, ("1 token", "5 windows")))
def test_proposals_after_rounds_of_all_widths(shape, kind, prompt):
    """Every draft right, wrong, and a mix: after each of them the context holds the same rows."""
    tokens = grids.prompts(shape, kind)[prompt]
    history = tokens + list(grids.plain(shape, kind, prompt))
    for right in (0.0, 0.7, 1.0):
        pair = grids.tutored(grids.pair(shape, kind), history, right)
        state = grids.drive(pair, tokens, grids.schedule("falling and rising")).state
        state.pair = grids.pair(shape, kind)
        check(state)


@EITHER
@pytest.mark.parametrize("step", [1, 7, 10, 11, 12, 37])
def test_proposals_after_a_prompt_in_chunks(shape, step):
    """A prompt of five windows; the chunks end inside, at and past the last window."""
    state = State(grids.pair(shape))
    grids.prefill(state, grids.prompts(shape)["5 windows"], Choice(Options(), 0), step, HostReads())
    check(state)


@pytest.mark.parametrize("count", [5 * 11, 47, 48, 49, 33])
def test_proposals_after_a_long_prompt_have_the_whole_window(count):
    """The drafter is given the last part of the prompt only: as much as it can see."""
    prompt = (grids.prompts(SHAPE)["5 windows"] * 2)[:count]
    state = State(grids.pair(SHAPE))
    grids.prefill(state, prompt, Choice(Options(), 0), 7, HostReads())
    check(state, step=1)
    lonely = State(grids.pair(SHAPE))
    grids.prefill(lonely, prompt[-11:], Choice(Options(), 0), 7, HostReads())
    assert not (block_logits(lonely) == block_logits(state)).all()  # the comparison can tell contexts apart


@pytest.mark.parametrize(("shape", "plain"), dealt((SHAPE, SECOND), STRETCHES, of=2))
def test_proposals_after_a_plain_stretch(shape, plain):
    """Rows that were decoded without drafting reach the drafter in batches, before its next block."""
    prompt = grids.prompts(shape)["window"]
    state = grids.drive(grids.pair(shape), prompt, grids.schedule(0), 1 + plain).state
    assert len(state.tokens) == len(prompt) + 1 + plain
    check(state)


def test_drafting_goes_on_after_a_plain_stretch_as_if_it_had_never_stopped():
    prompt = grids.prompts(SHAPE)["window"]
    expected = grids.plain(SHAPE, "float32", "window", 110)
    pair = grids.tutored(grids.pair(SHAPE), prompt + list(expected), 1.0)
    lengths = iter([3, 3, *[0] * 80, *[3] * 40])
    done = grids.drive(pair, prompt, lengths, 110)
    assert tuple(done.tokens) == expected
    assert all(round_.accepted == round_.drafted for round_ in done.rounds)
    done.state.pair = grids.pair(SHAPE)
    check(done.state)


@EITHER
@pytest.mark.parametrize("kept", [30, 33, 40], ids=lambda kept: f"{kept} of 40 tokens kept")
def test_proposals_after_a_session_was_reused(shape, kept):
    """The history is cut in the middle, and another prompt goes on from there."""
    session = Session(grids.pair(shape))
    prompt = grids.prompts(shape)["5 windows"][:40]
    session.generate(prompt, max_tokens=9, draft_length=4)
    out = session.generate([*prompt[:kept], 3, 1, 4, 1, 5], max_tokens=1)
    assert out.stats.reused_tokens == kept
    check(session._state)


def test_proposals_after_going_back_within_the_ring_and_beyond_it():
    """Back by less than a ring holds goes at once; further back starts again. Both end in the same context."""
    session = Session(grids.pair(SHAPE))
    prompt = grids.prompts(SHAPE)["5 windows"]
    for cut, reused in ((40, 40), (5, 0)):
        session.reset()
        session.generate(prompt, max_tokens=5, draft_length=4)
        out = session.generate([*prompt[:cut], 9, 8, 7], max_tokens=1)
        assert out.stats.reused_tokens == reused
        check(session._state)


@pytest.mark.parametrize("fed", [7, 35, 210, 265, 280])
def test_proposals_after_a_long_prefill_was_interrupted(fed):
    """The rows that the target holds are used again; whether the drafter's are depends on what it will see."""
    session, prompt = Session(grids.pair(SHAPE)), (grids.prompts(SHAPE)["5 windows"] * 6)[:300]

    def stop(done, total):
        if done >= fed:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.generate(prompt, prefill_step_size=7, on_prefill=stop)
    for tokens in (prompt, [*prompt, 4, 5, 6], prompt[:290]):
        session.generate(tokens, max_tokens=1)
        check(session._state)


def test_plain_decoding_without_a_drafter_keeps_no_context():
    pair = grids.pair(SHAPE).without_drafter()
    session = Session(pair)
    session.generate(grids.prompts(SHAPE)["window"], max_tokens=5)
    assert session._state.context is None
    assert session._state.taps == ()


def test_a_whole_block_gives_its_first_drafts_and_a_short_one_may_give_others():
    """Later mask tokens are seen by earlier slots: so the width matters."""
    pair, shorter = grids.pair("window 11"), []
    for prompt in grids.prompts("window 11").values():
        state = State(pair)
        grids.prefill(state, prompt, Choice(Options(), 0), grids.ALL_AT_ONCE, HostReads())
        whole = drafted(state, 15)
        for length in (1, 4, 14):
            assert drafted(state, length, whole=True) == whole[:length]
            shorter.append(drafted(state, length) == whole[:length])
    assert not all(shorter)
