"""Many clients that come and go: nothing leaks, and who stays gets what he would get alone."""

from __future__ import annotations

import gc
import random
import threading

import crowds
import mlx.core as mx
import pytest

from dflash_mlx import Engine

pytestmark = pytest.mark.soak
REQUESTS, CLIENTS, KINDS_OF_JOB = 200, 8, 25


@pytest.mark.timeout(1800)
def test_two_hundred_requests_of_eight_clients_leave_nothing_behind():
    """A quarter of them leaves early, by cancelling, by a `with` that ends, or by dropping the ticket."""
    jobs = crowds.jobs(77, KINDS_OF_JOB)
    pair, wrong, used = crowds.guided(jobs), [], []
    todo = iter(range(REQUESTS))
    for job in jobs:
        crowds.alone(job)

    def client(engine, number):
        draw = random.Random(number)
        for _ in todo:
            job = draw.choice(jobs)
            ticket = engine.submit(job.prompt, choice_index=job.choice_index, **job.asked)
            tokens, leaves = [], job.cancel_after is not None
            with ticket:
                for chunk in ticket:
                    tokens += chunk.tokens
                    if leaves and len(tokens) > job.cancel_after:
                        break
            del ticket
            expected = crowds.alone(job)
            if tokens != (expected[: len(tokens)] if leaves else expected):
                wrong.append((job, tokens))

    def lap(engine, seed):
        clients = [threading.Thread(target=client, args=(engine, seed + number)) for number in range(CLIENTS)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join()
        gc.collect()
        used.append(mx.get_active_memory())

    with Engine(pair, max_streams=5, max_queue=CLIENTS, prefill_rows=32) as engine:
        todo = iter(range(REQUESTS // 4))
        lap(engine, 0)
        todo = iter(range(REQUESTS - REQUESTS // 4))
        lap(engine, 100)
        threads = threading.active_count()
    figures = engine.figures()
    assert wrong == []
    assert figures["requests"] == REQUESTS
    assert figures["completed"] + figures["cancelled"] == REQUESTS
    assert figures["failed"] == figures["refused"] == figures["running"] == figures["waiting"] == 0
    assert threads == threading.active_count() + 1
    assert used[1] - used[0] < 2**20  # of caches that a request whose client just left may still hold
