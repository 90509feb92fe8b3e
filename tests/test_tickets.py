"""What a client holds: a ticket gives its chunks, ends early when nobody wants it, and outlives its engine."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading

import crowds
import grids
import mlx.core as mx
import pytest
import scripts
from crowds import PROMPT, gated, read, solo

from dflash_mlx import Engine, Session
from dflash_mlx.errors import EngineClosed, InputError, ProcessorError
from dflash_mlx.state import State


@pytest.fixture
def pair():
    return grids.pair(crowds.SHAPE)


@pytest.fixture
def engine(pair):
    with Engine(pair, max_streams=4, max_queue=20, prefill_rows=16) as running:
        yield running


def test_the_last_chunk_has_the_end_and_the_text_is_whole(tmp_path):
    pair = scripts.scripted_pair(tmp_path, scripts.ids_of("abc é.\n漢🙂d"))
    with Engine(pair) as engine:
        found = [
            read(ticket)
            for ticket in [
                engine.submit(scripts.ids_of(start), max_tokens=40, stop=stop, draft_length=length)
                for start, stop, length in (("abc", "d", 3), ("d", "\n漢", 0), ("c é", (), 7))
            ]
        ]
    texts = [text for _, text, _ in found]
    assert texts[:2] == [" é.\n漢🙂", "abc é."]
    assert texts[2].startswith(".\n漢🙂dabc é.")
    assert [last.finish_reason for _, _, last in found] == ["stop", "stop", "length"]


@pytest.mark.parametrize("how", ["cancel", "with", "dropped"])
def test_a_client_that_goes_away_frees_its_place_within_one_step(how, pair):
    with Engine(pair, max_streams=1) as engine:
        gate, ticket = gated(engine)
        waiting = engine.submit(PROMPT[:9], max_tokens=4)
        for _ in range(3):
            gate.wait()
            gate.open.release()
        gate.wait()
        if how == "cancel":
            ticket.cancel()
        elif how == "with":
            with ticket:
                pass
        else:
            del ticket
            gc.collect()
        passed = gate.passed
        gate.leave()
        assert waiting.result().tokens == solo(PROMPT[:9], max_tokens=4)
        assert gate.passed == passed + 1  # the step in which it stood
        assert engine.figures()["cancelled"] == 1
        if how != "dropped":
            tokens, _, last = read(ticket)
            assert tokens == solo(PROMPT[:5], max_tokens=4)
            assert last.finish_reason == ticket.generation.finish_reason == "cancelled"


def test_a_request_that_is_cancelled_while_it_waits_never_runs(pair):
    with Engine(pair, max_streams=1) as engine:
        gate, ticket = gated(engine)
        gate.wait()
        waiting = engine.submit(PROMPT, max_tokens=4)
        waiting.cancel()
        gate.leave()
        tokens, _, last = read(waiting)
        assert (tokens, last.finish_reason, last.stats.syncs) == ([], "cancelled", 0)
        ticket.cancel()


@pytest.mark.parametrize("finish", [True, False])
def test_closing_finishes_or_cancels_what_was_taken(finish, pair):
    engine = Engine(pair, max_streams=2)
    tickets = [engine.submit(PROMPT[at:], max_tokens=40, draft_length=2) for at in range(4)]
    next(tickets[0])
    engine.close(finish=finish)
    for at, ticket in enumerate(tickets):
        expected = solo(PROMPT[at:], max_tokens=40)
        tokens = ticket.result().tokens
        assert tokens == (expected if finish else expected[: len(tokens)])
        assert ticket.generation.finish_reason == ("length" if finish else "cancelled")
    with pytest.raises(EngineClosed, match="must be open but got closed"):
        engine.submit(PROMPT)
    assert not engine._thread.is_alive()


def test_closing_cancels_what_does_not_end_in_time(pair):
    engine = Engine(pair)
    ticket = engine.submit(PROMPT, max_tokens=100_000)
    next(ticket)
    engine.close(timeout=0.2)
    assert ticket.result().finish_reason == "cancelled"


def test_an_engine_that_nobody_closed_ends_with_its_process():
    """In the middle of a request; MLX aborts a process that goes while one of its threads computes."""
    folder = grids.pair(crowds.SHAPE).target_path
    code = f"""
import mlx.core as mx
mx.set_default_device(mx.cpu)
from dflash_mlx import Engine, load
ticket = Engine(load({str(folder)!r}, draft=None)).submit([5, 9, 2], max_tokens=5000)
print(len(next(ticket).tokens))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "1\n", "")


def test_a_state_goes_from_request_to_request_and_back_to_this_thread(engine):
    """What it has not computed yet when it is handed over is computed first: no other thread could."""
    session = Session(engine.pair)
    session.generate(PROMPT[:-1], max_tokens=1)
    state = session._state
    state.project_backlog()
    first = engine.submit(PROMPT, state=state, max_tokens=8, draft_length=3).result()
    assert first.tokens == solo(PROMPT, max_tokens=8)
    turn = [*PROMPT, *first.tokens, 4, 5]
    gate, _ticket = gated(engine)
    gate.wait()
    ticket = engine.submit(turn, state=state, max_tokens=8, draft_length=3)
    with pytest.raises(InputError, match="state must be in no other request"):
        engine.submit(turn, state=state)
    gate.leave()
    second = ticket.result()
    assert second.stats.reused_tokens == len(PROMPT) + 7
    assert second.tokens == solo(turn, max_tokens=8)
    assert state.tokens == [*turn, *second.tokens]
    mx.eval(state.arrays)
    assert state.fork().cache.offset == len(state.tokens) - 1


class OneState:
    """A store that keeps the last state."""

    def __init__(self, pair):
        self.state, self.threads, self.taken, self.put_back = State(pair), set(), 0, 0

    def take(self, tokens):
        self.threads.add(threading.current_thread().name)
        self.taken += 1
        state, self.state = self.state, None
        return state

    def put(self, state):
        self.threads.add(threading.current_thread().name)
        self.put_back += 1
        self.state = state


def test_a_store_is_asked_and_given_back_on_the_engines_thread(pair):
    store = OneState(pair)
    mx.eval(store.state.arrays)  # made in this thread, used in the engine's
    with Engine(pair, max_streams=1, store=store) as engine:
        first = engine.submit(PROMPT, max_tokens=8).result()
        again = engine.submit([*PROMPT, *first.tokens, 7], max_tokens=8).result()
    assert again.stats.reused_tokens == len(PROMPT) + 7
    assert again.tokens == solo([*PROMPT, *first.tokens, 7], max_tokens=8)
    assert store.threads == {"dflash-mlx engine"}
    assert store.taken == store.put_back == 2


def test_a_store_gets_back_what_it_gave_and_nothing_else(pair):
    """One of three answers took a state; the others are forks. A request that fails gives it back too, emptied."""
    store = OneState(pair)

    def failing(tokens, logits):
        raise RuntimeError("out of ideas")

    with Engine(pair, store=store) as engine:
        for ticket in engine.submit_all(PROMPT, 3, max_tokens=8):
            ticket.result()
        assert (store.taken, store.put_back) == (1, 1)
        with pytest.raises(ProcessorError):
            engine.submit(PROMPT, logits_processors=[failing]).result()
        waiting = engine.submit(PROMPT, max_tokens=3)
        assert waiting.result().tokens == solo(PROMPT, max_tokens=3)
    assert store.taken == store.put_back == 3


def test_an_event_loop_reads_several_tickets_at_once(engine):
    async def client(at):
        tokens = []
        async with engine.submit(PROMPT[at:], max_tokens=20) as ticket:
            async for chunk in ticket:
                tokens += chunk.tokens
        return tokens

    async def everyone():
        return await asyncio.gather(*(client(at) for at in range(6)))

    for at, tokens in enumerate(asyncio.run(everyone())):
        assert tokens == solo(PROMPT[at:], max_tokens=20)


def test_a_reader_whose_task_is_cancelled_frees_the_place(pair):
    """As a web server does it when its client has gone."""

    async def leaving(engine):
        gate, ticket = gated(engine)

        async def reading():
            async with ticket:
                async for _ in ticket:
                    pass

        task = asyncio.create_task(reading())
        await asyncio.to_thread(gate.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.leave()

    with Engine(pair, max_streams=1) as engine:
        asyncio.run(leaving(engine))
        assert engine.submit(PROMPT, max_tokens=3).result().tokens == solo(PROMPT, max_tokens=3)
        assert engine.figures()["cancelled"] == 1
