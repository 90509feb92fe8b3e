"""A session survives whatever ends a generation, and reuse changes nothing but the time."""

from __future__ import annotations

from functools import cache

import grids
import mlx.core as mx
import pytest

import dflash_mlx.round as round_module
from dflash_mlx import DFlashError, Session, generate
from dflash_mlx.errors import InputError, ProcessorError
from dflash_mlx.state import HostReads

SHAPE = "window 11"
OPTIONS = {"max_tokens": 10, "draft_length": 4}


@cache
def fresh_once(tokens, options):
    return generate(grids.pair(SHAPE), list(tokens), **dict(options))


def fresh(tokens, **options):
    """What a fresh session gives."""
    return fresh_once(tuple(tokens), tuple(sorted(options.items())))


@pytest.fixture
def pair():
    return grids.pair(SHAPE)


@pytest.fixture
def prompt():
    return grids.prompts(SHAPE)["5 windows"][:40]


def check_usable(session, prompt):
    """The next generations equal those of a fresh session: one that goes on from what is held, and the same prompt."""
    for tokens in ([*session.tokens, 7], prompt):
        found, expected = session.generate(tokens, **OPTIONS), fresh(tokens, **OPTIONS)
        assert found.tokens == expected.tokens
        assert [r.proposal for r in found.stats.rounds] == [r.proposal for r in expected.stats.rounds]
        assert session.tokens == [*tokens, *found.tokens]


@pytest.mark.parametrize("after", [0, 1, 2, 4])
def test_closing_a_stream_early_leaves_a_usable_session(after, pair, prompt):
    session, whole = Session(pair), fresh(prompt, **OPTIONS)
    stream, taken = session.stream_generate(prompt, **OPTIONS), []
    for _ in range(after):
        taken += next(stream).tokens
    stream.close()
    if after:
        out = session.last_generation
        assert (out.tokens, out.finish_reason) == (taken, "cancelled")
        assert out.tokens == whole.tokens[: len(taken)]
        assert out.stats.generated_tokens == len(taken)
        assert session.tokens == [*prompt, *taken]
    else:
        assert session.tokens == []
    check_usable(session, prompt)


def test_a_stream_that_is_dropped_is_closed(pair, prompt):
    session = Session(pair)
    for chunk in session.stream_generate(prompt, **OPTIONS):
        assert chunk.tokens
        break
    assert session.last_generation.finish_reason == "cancelled"
    check_usable(session, prompt)


class Stop(KeyboardInterrupt):
    """Ctrl-C."""


@pytest.mark.parametrize("at", [7, 14, 40])
def test_ctrl_c_during_the_prefill_leaves_a_usable_session(at, pair, prompt):
    """In the callback after a step; no token was generated. What was fed stays where the drafter has its part too."""
    session, seen = Session(pair), []

    def on_prefill(done, total):
        seen.append((done, total))
        if done >= at:
            raise Stop

    with pytest.raises(Stop):
        session.generate(prompt, prefill_step_size=7, on_prefill=on_prefill, **OPTIONS)
    assert seen[-1] == (at, 40)
    out = session.last_generation
    assert (out.tokens, out.finish_reason) == ([], "cancelled")
    assert out.stats.rounds == []
    again = session.generate(prompt, **OPTIONS)
    assert again.stats.reused_tokens in (0, min(at, 39))
    assert again.tokens == fresh(prompt, **OPTIONS).tokens
    check_usable(session, prompt)


@pytest.mark.parametrize(
    ("where", "error", "number"),
    [
        ("draft", Stop, 2),
        ("verify", Stop, 1),
        ("verify", MemoryError, 3),
        ("accept", Stop, 3),
        ("accept", MemoryError, 1),
    ],
)
def test_an_interrupt_inside_a_round_leaves_a_usable_session(where, error, number, pair, prompt, monkeypatch):
    """Right after a step of the round, when the caches' arrays are already others."""
    step, count = getattr(round_module, where), [0]

    def failing(*arguments):
        result = step(*arguments)
        count[0] += 1
        if count[0] == number:
            raise error
        return result

    session, whole = Session(pair), fresh(prompt, **OPTIONS)
    monkeypatch.setattr(round_module, where, failing)
    with pytest.raises(error):
        session.generate(prompt, **OPTIONS)
    monkeypatch.undo()
    out = session.last_generation
    assert out.finish_reason == "cancelled"
    assert len(out.stats.rounds) == number - 1
    assert out.tokens == whole.tokens[: 1 + sum(r.committed for r in out.stats.rounds)]
    check_usable(session, prompt)


def test_a_failed_evaluation_leaves_nothing_that_could_be_used(pair, prompt, monkeypatch):
    """Out of memory in the middle of a round: what the caches hold then is not known, here it is NaN."""
    read, count = HostReads.read, [0]

    def failing(reads, array, along=()):
        count[0] += 1
        if count[0] == 4:
            for layer in [*session._state.cache.layers, *session._state.context.layers]:
                layer.keys *= mx.nan
                layer.values *= mx.nan
            raise RuntimeError("out of memory")
        return read(reads, array, along)

    session = Session(pair)
    monkeypatch.setattr(HostReads, "read", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        session.generate(prompt, **OPTIONS)
    monkeypatch.undo()
    assert session.last_generation.finish_reason == "cancelled"
    assert session.tokens == []
    check_usable(session, prompt)


@pytest.mark.parametrize("where", ["cache", "context", "tokens"])
def test_an_interrupt_inside_a_commit_leaves_a_usable_session(where, pair, prompt, monkeypatch):
    """Between the target's cache, the drafter's context and the tokens: none of the three is ahead afterwards."""
    from dflash_mlx.cache import TargetCache
    from dflash_mlx.models.dflash import DFlash
    from dflash_mlx.state import State

    owner, name = {"cache": (TargetCache, "advance"), "context": (DFlash, "extend"), "tokens": (State, "keep")}[where]
    method, count = getattr(owner, name), [0]

    def failing(*arguments, **named):
        result = method(*arguments, **named)
        count[0] += 1
        if count[0] == 4:
            raise Stop
        return result

    session = Session(pair)
    monkeypatch.setattr(owner, name, failing)
    with pytest.raises(Stop):
        session.generate(prompt, **OPTIONS)
    monkeypatch.undo()
    assert session.last_generation.finish_reason == "cancelled"
    assert session.generate([*session.tokens, 7], max_tokens=1).stats.reused_tokens >= len(prompt)
    check_usable(session, prompt)


@pytest.mark.parametrize("at", [0, 1, 9])
def test_an_exception_in_a_processor_carries_what_was_generated(at, pair, prompt):
    count = [0]

    def processor(tokens, logits):
        if tokens.shape[0] >= len(prompt) + at:
            count[0] += 1
            raise RuntimeError("out of ideas")
        return logits

    session, whole = Session(pair), fresh(prompt, **OPTIONS)
    with pytest.raises(ProcessorError, match="out of ideas") as caught:
        session.generate(prompt, logits_processors=[processor], **OPTIONS)
    partial = caught.value.partial
    assert count[0]
    assert partial.finish_reason == "cancelled"
    assert partial.tokens == whole.tokens[: len(partial.tokens)]
    assert len(partial.tokens) <= at
    assert session.last_generation.tokens == partial.tokens
    check_usable(session, prompt)


REUSE = {
    "append": (lambda prompt, out: [*prompt, *out, 3, 4, 5], lambda prompt, out: len(prompt) + len(out) - 1),
    "exact repeat": (lambda prompt, out: prompt, lambda prompt, out: len(prompt) - 1),
    "the whole history": (lambda prompt, out: [*prompt, *out], lambda prompt, out: len(prompt) + len(out) - 1),
    "shorter": (lambda prompt, out: prompt[:33], lambda prompt, out: 32),
    "an edit near the end": (lambda prompt, out: [*prompt[:-4], 1, 2, 3], lambda prompt, out: len(prompt) - 4),
    "an edit in what was generated": (lambda prompt, out: [*prompt, *out[:5], 90], lambda prompt, out: len(prompt) + 5),
    "another first token": (lambda prompt, out: [96, *prompt[1:]], lambda prompt, out: 0),
    # The target's rows before the edit are kept; the drafter sees none of them again in so long a prompt.
    "an edit before the window": (lambda prompt, out: [*prompt[:3], 96, *prompt[4:]], lambda prompt, out: 3),
    "one token": (lambda prompt, out: prompt[:1], lambda prompt, out: 0),
}


@pytest.mark.parametrize(("how", "length"), [*((how, 4) for how in REUSE), ("append", 0), ("shorter", 0)])
def test_reuse_gives_what_a_fresh_session_gives(how, length, pair, prompt):
    change, expected = REUSE[how]
    options = {"max_tokens": 7, "draft_length": length}
    session = Session(pair)
    first = session.generate(prompt, **options)
    assert first.tokens[5:6] != [90]
    tokens = change(prompt, first.tokens)
    found, alone = session.generate(tokens, **options), fresh(tokens, **options)
    assert found.tokens == alone.tokens
    assert [r.proposal for r in found.stats.rounds] == [r.proposal for r in alone.stats.rounds]
    assert (alone.stats.reused_tokens, found.stats.prompt_tokens) == (0, len(tokens))
    assert found.stats.reused_tokens == expected(prompt, first.tokens)
    assert session.tokens == [*tokens, *found.tokens]


def test_many_turns_equal_one_fresh_prompt_each(pair):
    """A chat of six turns: drafting, plain and sampled turns in one history."""
    session, history = Session(pair), []
    for turn in range(6):
        history += grids.prompts(SHAPE)["window"][: 3 + turn]
        options = {"max_tokens": 9, "draft_length": (4, 0, 15)[turn % 3], "seed": 5, "temperature": 0.7 * (turn % 2)}
        found = session.generate(history, **options)
        assert found.tokens == fresh(history, **options).tokens, turn
        assert found.stats.reused_tokens == (len(history) - (3 + turn) - 1 if turn else 0)
        history += found.tokens


def test_two_sessions_that_take_turns_do_not_disturb_each_other(pair, prompt):
    prompts = prompt, grids.prompts(SHAPE)["window"]
    alone = [fresh(tokens, **OPTIONS).tokens for tokens in prompts]
    streams = [Session(pair).stream_generate(tokens, **OPTIONS) for tokens in prompts]
    found = [[], []]
    for _ in range(OPTIONS["max_tokens"]):
        for stream, tokens in zip(streams, found, strict=True):
            tokens += [token for chunk in [next(stream, None)] if chunk for token in chunk.tokens]
    assert found == alone


def test_a_second_stream_on_a_session_ends_the_first_with_an_error(pair, prompt):
    session = Session(pair)
    first = session.stream_generate(prompt, **OPTIONS)
    taken = next(first).tokens
    second = session.stream_generate(prompt[:-2], **OPTIONS)
    tokens = next(second).tokens
    with pytest.raises(DFlashError) as caught:
        next(first)
    assert str(caught.value) == (
        "[generate] the stream must be the session's newest but got an older one. "
        "A session runs one generation at a time."
    )
    assert caught.value.partial.tokens == taken
    tokens += [token for chunk in second for token in chunk.tokens]
    assert tokens == fresh(prompt[:-2], **OPTIONS).tokens
    assert session.last_generation.tokens == tokens
    check_usable(session, prompt)


def test_a_stream_that_was_not_begun_is_outdated_too(pair, prompt):
    session = Session(pair)
    first, second = session.stream_generate(prompt[:5], **OPTIONS), session.stream_generate(prompt, **OPTIONS)
    tokens = next(second).tokens
    with pytest.raises(DFlashError, match="the session's newest"):
        next(first)
    tokens += [token for chunk in second for token in chunk.tokens]
    assert tokens == fresh(prompt, **OPTIONS).tokens
    assert session.last_generation.tokens == tokens


def test_reset_forgets_the_history_and_ends_a_running_stream(pair, prompt):
    session = Session(pair)
    stream = session.stream_generate(prompt, **OPTIONS)
    next(stream)
    session.reset()
    assert session.tokens == []
    with pytest.raises(DFlashError, match="the session's newest"):
        next(stream)
    assert session.generate(prompt, **OPTIONS).stats.reused_tokens == 0


WRONG = [
    ([], {}, "[generate] prompt must be at least one token but got none. Give some text."),
    ([1, 97], {}, "[generate] prompt must be tokens between 0 and 96 but got 97. Another model's tokenizer was used."),
    ([-1], {}, "[generate] prompt must be tokens between 0 and 96 but got -1. Another model's tokenizer was used."),
    ([True, 2], {}, "[generate] prompt must be text, token ids or chat messages but got a list of ['bool', 'int']. "
                    "Mixed lists are not understood."),
    ([1, "a"], {}, "[generate] prompt must be text, token ids or chat messages but got a list of ['int', 'str']. "
                   "Mixed lists are not understood."),
    ([1], {"draft_length": 16}, "[generate] draft_length must be 'auto' or between 0 and 15 (the drafter's block of 16 "
                                "less its anchor) but got 16. Leave it out to let the runtime choose."),
    ([1], {"max_tokens": 0}, "[generate] max_tokens must be an integer of at least 1 but got 0. Correct the option."),
    ([1], {"max_tokens": True}, "[generate] max_tokens must be an integer of at least 1 but got True. "
                                "Correct the option."),
    ([1], {"prefill_step_size": 0}, "[generate] prefill_step_size must be an integer of at least 1 but got 0. "
                                    "Correct the option."),
    ([1], {"temperature": -0.1}, "[generate] temperature must be a number of at least 0 but got -0.1. "
                                 "Correct the option."),
    ([1], {"stop": ["a", ""]}, "[generate] stop must be a non-empty string or a sequence of them but got ['a', '']. "
                               "Correct the option."),
]  # fmt: skip


@pytest.mark.parametrize(("tokens", "options", "text"), WRONG, ids=lambda value: str(value)[:40])
def test_what_is_wrong_is_said_before_anything_happens(tokens, options, text, pair, prompt):
    session = Session(pair)
    session.generate(prompt, max_tokens=2)
    before = session.tokens
    with pytest.raises(InputError) as caught:
        session.stream_generate(tokens, **options)
    assert str(caught.value) == text
    assert isinstance(caught.value, ValueError)
    assert session.tokens == before


def test_a_prompt_longer_than_the_context_is_refused(tmp_path):
    from tiny import tiny_pair

    from dflash_mlx import load

    first, second = tiny_pair(tmp_path, **grids.SHAPES[SHAPE])
    session = Session(load(str(first), draft=str(second), max_context=50))
    with pytest.raises(InputError) as caught:
        session.generate([1] * 51)
    assert str(caught.value) == (
        "[generate] prompt must be at most 50 tokens but got 51. Shorten it, or load with a larger max_context."
    )
    assert session.generate([1] * 50, max_tokens=5).finish_reason == "length"


def test_prefill_tells_of_every_step(pair, prompt):
    seen = []
    Session(pair).generate(prompt, prefill_step_size=9, on_prefill=lambda *done: seen.append(done), max_tokens=1)
    assert seen == [(9, 40), (18, 40), (27, 40), (36, 40), (40, 40)]


def test_any_sequence_of_ids_is_a_prompt_and_an_array_is_refused_by_name(pair):
    expected = fresh([3, 1, 4], max_tokens=3).tokens
    assert generate(pair, (3, 1, 4), max_tokens=3).tokens == expected
    with pytest.raises(InputError, match=r"^\[generate\] prompt must be .* but got a list of \['array'\]\. "):
        generate(pair, mx.array([3, 1, 4]), max_tokens=3)
