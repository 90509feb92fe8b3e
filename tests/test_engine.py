"""Requests to one engine: each gives its solo run, waits its turn and harms no other, whatever they are."""

from __future__ import annotations

import gc
import random
import threading
import time

import crowds
import grids
import mlx.core as mx
import pytest
from crowds import PROMPT, gated, read, solo

import dflash_mlx.stream as stream_module
from dflash_mlx import Engine
from dflash_mlx.draft_length import Draft
from dflash_mlx.errors import EngineError, InputError, MemoryPlanError, ProcessorError, QueueFull
from dflash_mlx.request import shares
from dflash_mlx.state import HostReads, State


@pytest.fixture
def pair():
    return grids.pair(crowds.SHAPE)


@pytest.fixture
def engine(pair):
    with Engine(pair, max_streams=4, max_queue=20, prefill_rows=16) as running:
        yield running


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_each_request_gives_its_solo_run(seed):
    """Clients come in threads of their own, a quarter of them goes away; nobody notices the others."""
    jobs, wrong, draw = crowds.jobs(seed, 16), [], random.Random(seed)
    with Engine(crowds.guided(jobs), max_streams=5, max_queue=16, prefill_rows=20) as engine:

        def client(job, pause):
            time.sleep(pause)
            with engine.submit(job.prompt, choice_index=job.choice_index, **job.asked) as ticket:
                tokens = []
                for chunk in ticket:
                    tokens += chunk.tokens
                    if job.cancel_after is not None and len(tokens) > job.cancel_after:
                        ticket.cancel()
            expected = crowds.alone(job)
            if tokens != expected[: len(tokens)] or (chunk.finish_reason != "cancelled" and tokens != expected):
                wrong.append((job, tokens, expected))
            if chunk.stats.generated_tokens != len(tokens):
                wrong.append((job, chunk.stats))

        threads = [threading.Thread(target=client, args=(job, draw.random() / 5)) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        figures = engine.figures()
    assert wrong == []
    assert figures["completed"] + figures["cancelled"] == figures["requests"] == len(jobs)
    assert figures["syncs"] == figures["steps"]
    assert figures["accepted_tokens"] > 20
    assert figures["running"] == figures["waiting"] == figures["reserved_bytes"] == 0


def test_a_long_prompt_costs_the_others_one_piece_a_step(engine):
    """350 tokens in pieces of at most 16: the stream that decodes gets a token in each of those steps."""
    gate, decoding = gated(engine, max_tokens=60)
    gate.wait()
    long = engine.submit((PROMPT * 7)[:350], max_tokens=1, draft_length=0)
    gate.leave()
    rounds = read(decoding)[2].stats.rounds
    assert long.result().tokens == solo((PROMPT * 7)[:350], max_tokens=1)
    assert len(rounds) == 59
    shared = [round_.rows for round_ in rounds if round_.prompt_rows]
    assert max(shared) == 1 + 16
    assert {round_.rows - round_.prompt_rows for round_ in rounds} == {1}
    assert len(shared) == 22  # 350 = 21 * 16 + 14
    assert long.generation.stats.syncs == 22


def test_prompts_share_the_rows_of_a_step():
    assert shares({1: 100, 2: 100, 3: 0}, 16) == {1: 8, 2: 8, 3: 0}
    assert shares({1: 3, 2: 100, 3: 100}, 16) == {1: 3, 2: 6, 3: 7}
    assert shares({1: 1, 2: 1}, 2) == {1: 1, 2: 1}
    assert shares({1: 0}, 16) == {1: 0}


def test_a_short_prompt_does_not_wait_for_a_long_one(engine):
    """Both are fed at once: the short one's first token comes while the long one still has most of its pieces to go."""
    gate, _ticket = gated(engine, max_tokens=100)
    gate.wait()
    long = engine.submit((PROMPT * 7)[:350], max_tokens=1)
    short = engine.submit(PROMPT[:20], max_tokens=3, draft_length=0)
    gate.leave()
    assert short.result().stats.syncs == 3 + 2  # 20 tokens in pieces of 8, then two rounds
    assert long.result().stats.syncs >= 22


def test_a_full_queue_refuses_and_says_when_to_come_again(pair):
    with Engine(pair, max_streams=1, max_queue=2) as engine:
        gate, ticket = gated(engine, max_tokens=5)
        others = [engine.submit(PROMPT[:9], max_tokens=4) for _ in range(2)]
        with pytest.raises(QueueFull) as caught:
            engine.submit(PROMPT[:9])
        with pytest.raises(QueueFull):
            engine.submit_all(PROMPT[:9], 2)
        gate.leave()
        assert str(caught.value) == (
            "[engine] requests must be at most 3 (2 waiting) but got 4. Send the request again in 1 seconds."
        )
        assert caught.value.retry_after_s >= 1
        for each in (ticket, *others):
            each.result()
        assert engine.figures()["refused"] == 3
        assert engine.submit(PROMPT[:9], max_tokens=4).result().tokens == others[0].generation.tokens


def test_a_request_over_a_limit_is_refused_with_the_numbers(pair):
    """Of the context, and of the memory beside the weights; one that fits alone waits until it does."""
    room = pair.plan.session_bytes(155)
    cut = grids.replace(pair, plan=grids.replace(pair.plan, limit=pair.plan.shared_bytes + room))
    with Engine(cut, max_streams=4) as engine:
        with pytest.raises(InputError, match=rf"prompt must be at most {pair.max_context} tokens but got"):
            engine.submit([1] * (pair.max_context + 1))
        with pytest.raises(MemoryPlanError) as caught:
            engine.submit(PROMPT, max_tokens=pair.max_context)
        assert f"GiB for {len(PROMPT)} + {pair.max_context} tokens. Ask for fewer tokens." in str(caught.value)
        with pytest.raises(InputError, match="temperature"):
            engine.submit(PROMPT, temperature=-1)
        gate, first = gated(engine, max_tokens=5)
        gate.wait()
        large = engine.submit(PROMPT, max_tokens=100)
        for _ in range(3):
            gate.open.release()
            gate.wait()
        assert engine.figures()["running"] == 1
        assert 0 < engine.figures()["reserved_bytes"] <= room
        gate.leave()
        assert first.result().tokens == solo(PROMPT[:5], max_tokens=5)
        assert large.result().tokens == solo(PROMPT, max_tokens=100)


def test_an_error_in_one_request_harms_no_other(engine):
    def failing(tokens, logits):
        if tokens.shape[0] > 26:
            raise RuntimeError("out of ideas")
        return logits

    wrong = engine.submit(PROMPT[:24], max_tokens=20, draft_length=3, logits_processors=[failing])
    others = [engine.submit(PROMPT[at:], max_tokens=20, draft_length=3) for at in (1, 2)]
    with pytest.raises(ProcessorError, match="out of ideas") as caught:
        wrong.result()
    assert caught.value.partial.tokens == wrong.generation.tokens == solo(PROMPT[:24], max_tokens=3)
    for at, ticket in zip((1, 2), others, strict=True):
        assert ticket.result().tokens == solo(PROMPT[at:], max_tokens=20)
    assert engine.figures()["failed"] == 1


def test_a_failure_of_the_device_ends_what_runs_with_its_text_so_far(engine, monkeypatch):
    expected = {len(prompt): solo(prompt, max_tokens=30) for prompt in (PROMPT[:5], PROMPT)}
    gate, first = gated(engine, max_tokens=30)
    gate.wait()
    second = engine.submit(PROMPT, max_tokens=30, draft_length=0)
    for _ in range(9):
        gate.open.release()
        gate.wait()

    def failing(reads, array, along=()):
        raise RuntimeError("no memory is left")

    monkeypatch.setattr(HostReads, "read", failing)
    gate.leave()
    for ticket, prompt in ((first, PROMPT[:5]), (second, PROMPT)):
        with pytest.raises(EngineError, match="no memory is left") as caught:
            ticket.result()
        tokens = caught.value.partial.tokens
        assert tokens == expected[len(prompt)][: len(tokens)]
        assert caught.value.partial.finish_reason == "cancelled"
    assert len(first.generation.tokens) == 9
    monkeypatch.undo()
    assert engine.submit(PROMPT, max_tokens=5).result().tokens == solo(PROMPT, max_tokens=5)


def test_caches_are_released_with_their_request(engine):
    def held():
        gc.collect()
        return mx.get_active_memory()

    engine.submit(PROMPT, max_tokens=30).result()
    before = held()
    for _ in range(3):
        tickets = [engine.submit(PROMPT[at:], max_tokens=30, draft_length=at) for at in range(6)]
        tickets[0].cancel()
        for ticket in tickets:
            ticket.result()
    size = sum(array.nbytes for array in State(engine.pair).arrays)
    patience = time.monotonic() + 10  # the thread is still in the step that gave the last chunk
    while held() - before > size / 2 and time.monotonic() < patience:
        time.sleep(0.01)
    assert held() - before < size / 2
    assert tickets[1].generation.tokens == solo(PROMPT[1:], max_tokens=30)


def test_answers_to_one_request_share_its_prefill(engine):
    """The first is the solo run; each other one reuses all but the prompt's last token, and is what it is alone."""
    options = {"temperature": 1.0, "seed": 3, "max_tokens": 15, "draft_length": 3}
    tickets = engine.submit_all(PROMPT, 6, **options)
    found = [ticket.result() for ticket in tickets]
    for index, out in enumerate(found):
        assert out.tokens == solo(PROMPT, choice_index=index, **options), index
    assert len({tuple(out.tokens) for out in found}) == 6
    assert [out.stats.reused_tokens for out in found] == [0] + [len(PROMPT) - 1] * 5


def test_answers_whose_first_is_cancelled_go_on_alone(engine):
    options = {"temperature": 1.0, "seed": 3, "max_tokens": 9}
    gate, ticket = gated(engine)
    gate.wait()
    tickets = engine.submit_all(PROMPT, 3, **options)
    tickets[0].cancel()
    gate.leave()
    ticket.cancel()
    for index in (1, 2):
        assert tickets[index].result().tokens == solo(PROMPT, choice_index=index, **options)
    assert tickets[0].result().finish_reason == "cancelled"


class Watched:
    """A policy that drafts less with more streams, and notes what it is asked and told."""

    def __init__(self):
        self.asked, self.told = [], []

    def next(self, context, streams=1):
        self.asked.append((context, streams))
        return Draft(6 // streams)

    def saw(self, round, context, streams=1):
        self.told.append((context - round.committed, streams))
        assert (round.streams, round.committed) == (streams, len(round.tokens))


def test_the_policy_of_a_draft_length_knows_how_many_streams_decode(pair, monkeypatch):
    """A stream that is still fed its prompt is not one of them."""
    policies = []
    monkeypatch.setattr(stream_module, "_policy", lambda *_: policies.append(Watched()) or policies[-1])
    with Engine(pair, max_streams=3, prefill_rows=16) as engine:
        gate, first = gated(engine, max_tokens=60, draft_length="auto")
        gate.wait()
        _others = [engine.submit(prompt, max_tokens=20) for prompt in (PROMPT, PROMPT[:20])]
        gate.leave()
        rounds = first.result().stats.rounds
    assert policies[0].asked == policies[0].told
    streams = [streams for _, streams in policies[0].asked]
    assert streams == [round_.streams for round_ in rounds]
    assert set(streams) == {1, 2, 3}
    assert [round_.drafted for round_ in rounds[:-7]] == [6 // each for each in streams[:-7]]
    fed = [round_.streams for round_ in rounds if round_.rows > round_.streams * (round_.drafted + 1)]
    assert len(fed) >= 5  # 55 tokens in pieces of at most 16 beside another prompt
    assert fed == sorted(fed)
    assert fed[0] == 1


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_streams", 0, "an integer between 1 and 2048"),
        ("max_queue", -1, "an integer of at least 0"),
        ("prefill_rows", 7, "an integer between 8 and 2048"),
        ("kept_bytes", "x", "an integer of at least 0"),
    ],
)
def test_a_wrong_limit_is_named(name, value, expected, pair):
    with pytest.raises(InputError) as caught:
        Engine(pair, **{name: value})
    assert str(caught.value) == f"[engine] {name} must be {expected} but got {value!r}. Correct the argument."
