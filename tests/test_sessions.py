"""Reuse changes nothing but the time, streams do not disturb each other, and what is wrong is said at once."""

from __future__ import annotations

import grids
import mlx.core as mx
import pytest
from tiny import tiny_pair
from usable import OPTIONS, PROMPT, SHAPE, check_usable, fresh

from dflash_mlx import DFlashError, Session, generate, load
from dflash_mlx.errors import InputError


@pytest.fixture
def pair():
    return grids.pair(SHAPE)


@pytest.fixture
def prompt():
    return PROMPT


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
    check_usable(session)


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
    ([True, 2], {}, "[generate] prompt must be text, token ids or chat messages but got a list of bool and int. "
                    "Mixed lists are not understood."),
    ([1, "a"], {}, "[generate] prompt must be text, token ids or chat messages but got a list of int and str. "
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
    with pytest.raises(InputError, match=r"^\[generate\] prompt must be .* but got a list of array\. "):
        generate(pair, mx.array([3, 1, 4]), max_tokens=3)
