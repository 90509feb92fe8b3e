"""Whatever ends a generation early, at whatever point, leaves a session that can be used."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import grids
import mlx.core as mx
import pytest
from usable import OPTIONS, PROMPT, SHAPE, check_usable, fresh

import dflash_mlx
import dflash_mlx.round as round_module
from dflash_mlx import Session
from dflash_mlx.cache import TargetCache
from dflash_mlx.errors import ProcessorError
from dflash_mlx.models.dflash import DFlash
from dflash_mlx.state import HostReads, State

PACKAGE = str(Path(dflash_mlx.__file__).parent)
SEED, SAMPLE = 11, 24


@pytest.fixture
def pair():
    return grids.pair(SHAPE)


@pytest.fixture
def prompt():
    return PROMPT


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
    check_usable(session)


def test_a_stream_that_is_dropped_is_closed(pair, prompt):
    session = Session(pair)
    for chunk in session.stream_generate(prompt, **OPTIONS):
        assert chunk.tokens
        break
    assert session.last_generation.finish_reason == "cancelled"
    check_usable(session)


class Stop(KeyboardInterrupt):
    """Ctrl-C."""


@pytest.mark.parametrize("at", [7, 14, 40])
def test_ctrl_c_during_the_prefill_leaves_a_usable_session(at, pair, prompt):
    """In the callback after a step; the last one gave the first token. What was fed stays where the drafter has it."""
    session, seen = Session(pair), []

    def on_prefill(done, total):
        seen.append((done, total))
        if done >= at:
            raise Stop

    with pytest.raises(Stop):
        session.generate(prompt, prefill_step_size=7, on_prefill=on_prefill, **OPTIONS)
    assert seen[-1] == (at, 40)
    out = session.last_generation
    assert (out.tokens, out.finish_reason) == (fresh(prompt, **OPTIONS).tokens[: at == 40], "cancelled")
    assert out.stats.rounds == []
    again = session.generate(prompt, **OPTIONS)
    assert again.stats.reused_tokens in (0, min(at, 39))
    assert again.tokens == fresh(prompt, **OPTIONS).tokens
    check_usable(session)


@pytest.mark.parametrize(
    ("where", "error", "number"),
    [
        ("draft", Stop, 4),
        ("verify", Stop, 1),
        ("verify", MemoryError, 5),
        ("accept", Stop, 5),
        ("accept", MemoryError, 2),
    ],
)
def test_an_interrupt_inside_a_round_leaves_a_usable_session(where, error, number, pair, prompt, monkeypatch):
    """Right after a part of a step, when the caches' arrays are already others. Two steps feed the prompt."""
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
    assert len(out.stats.rounds) == max(0, number - 3)
    assert out.tokens == whole.tokens[: (number > 2) + sum(r.committed for r in out.stats.rounds)]
    check_usable(session)


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
    check_usable(session)


@pytest.mark.parametrize("where", ["cache", "context", "tokens"])
def test_an_interrupt_inside_a_commit_leaves_a_usable_session(where, pair, prompt, monkeypatch):
    """Between the target's cache, the drafter's context and the tokens: none of the three is ahead afterwards."""
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
    check_usable(session)


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
    check_usable(session)


def run_to_line(number, prompt):
    """Generate, and press Ctrl-C at this line of the package's code (0: at none); the session, and the lines run."""
    session, lines = Session(grids.pair(SHAPE)), [0]

    def each_line(frame, event, argument):
        if event == "line":
            lines[0] += 1
            if lines[0] == number:
                sys.settrace(None)
                raise Stop
        return each_line

    def each_call(frame, event, argument):
        return each_line if frame.f_code.co_filename.startswith(PACKAGE) else None

    sys.settrace(each_call)
    try:
        session.generate(prompt, prefill_step_size=21, **{**OPTIONS, "max_tokens": 4})
    except Stop:
        pass
    finally:
        sys.settrace(None)
    return session, lines[0]


def interrupt_at(numbers, prompt):
    """The lines at which an interrupt spoils the session."""
    wrong = []
    for number in numbers:
        session, reached = run_to_line(number, prompt)
        assert reached == number
        try:
            check_usable(session)
        except AssertionError as error:
            wrong.append((number, str(error).splitlines()[0]))
    return wrong


def test_ctrl_c_at_any_line_leaves_a_usable_session(prompt, capsys):
    _, lines = run_to_line(0, prompt)
    numbers = random.Random(SEED).sample(range(1, lines + 1), SAMPLE)
    with capsys.disabled():
        print(f"\ninterrupts: {SAMPLE} of {lines:,} lines, seed {SEED}; every eleventh under the mark slow")
    assert interrupt_at(numbers, prompt) == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_ctrl_c_at_every_eleventh_line_leaves_a_usable_session(part, prompt):
    """In four parts, each a quarter of the generation: begin, prefill, rounds, end."""
    _, lines = run_to_line(0, prompt)
    numbers = range(1, lines + 1, 11)
    assert interrupt_at(numbers[part * len(numbers) // 4 : (part + 1) * len(numbers) // 4], prompt) == []
