"""The server for longer: 200 requests from 8 clients, some of which leave, and nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import json
import random
import threading
import time

import httpx
import mlx.core as mx
import pytest
from serving import MODEL, serving

import dflash_mlx
from dflash_mlx.chat.answer import Answer, AnswerReader

CLIENTS, REQUESTS = 8, 25  # of each
QUESTIONS = ["Add two numbers.", "Sort a list.", "Read a file.", "Open a socket.", "Count words.", "Copy a tree."]
SYSTEM = {"role": "system", "content": "You write Python."}


def body(chance: random.Random) -> dict:
    """A random request; few kinds, so that what each should give is computed once."""
    first = {"role": "user", "content": chance.choice(QUESTIONS)}
    more = [
        {"role": "assistant", "content": "def f():\n    pass"},
        {"role": "user", "content": chance.choice(QUESTIONS)},
    ]
    asked = {
        "messages": [SYSTEM, first, *(more if chance.random() < 0.5 else [])],
        "max_tokens": chance.choice([8, 24]),
    }
    return asked | chance.choice([{}, {"temperature": 0.8, "seed": 4}])


def expected(pair, asked: dict) -> str:
    options = dict(asked)
    out, answer = dflash_mlx.generate(pair, options.pop("messages"), **options), Answer()
    reader = AnswerReader(pair.tokenizer, pair.eos_token_ids)
    answer.add(reader.feed(out.tokens) + reader.finish(cut=True))
    return answer.text


def ask(url: str, asked: dict, chance: random.Random) -> str | None:
    """The answer's text; `None` where this client left before its end."""
    asked = {"model": MODEL, **asked, "stream": True}
    leaves = chance.random() < 0.3
    if leaves and chance.random() < 0.5:
        with contextlib.suppress(httpx.TimeoutException):
            httpx.post(f"{url}/v1/chat/completions", json=asked | {"stream": False}, timeout=chance.random())
        return None
    text = ""
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=asked, timeout=300) as reply:
        assert reply.status_code == 200
        for number, line in enumerate(line for line in reply.iter_lines() if line):
            if line == "data: [DONE]":
                return text
            if leaves and number > chance.randrange(6):
                return None
            event = json.loads(line.removeprefix("data: "))
            text += event["choices"][0]["delta"].get("content", "") if event["choices"] else ""
    raise AssertionError("the stream broke off")


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_many_clients_leave_nothing_behind():
    pair = dflash_mlx.load("pocket")
    found: list[tuple[dict, str | None]] = []
    failed: list[BaseException] = []
    with serving(pair, max_streams=4, max_queue=32) as served:

        def client(number: int, requests: int) -> None:
            chance = random.Random(number)
            try:
                for _ in range(requests):
                    asked = body(chance)
                    found.append((asked, ask(served.url, asked, chance)))
            except BaseException as error:
                failed.append(error)

        def crowd(first: int, requests: int) -> int:
            """Let them all ask; returns the bytes held afterwards."""
            threads = [threading.Thread(target=client, args=(first + n, requests)) for n in range(CLIENTS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(900)
            served.idle(60)
            time.sleep(0.2)
            assert served.service.open == 0
            served.service.store.clear()
            gc.collect()
            return int(mx.get_active_memory())

        before = crowd(100, 2)  # what is made once is there now
        threads_before = threading.active_count()
        after = crowd(0, REQUESTS)
        figures = served.service.engine.figures()
        store = served.service.store.figures()
        assert threading.active_count() <= threads_before + CLIENTS
    assert failed == []
    assert figures["failed"] == 0
    assert figures["requests"] == figures["completed"] + figures["cancelled"]
    assert store.in_use == 0
    assert after <= before + 2**20
    done = [(asked, text) for asked, text in found if text is not None]
    assert len(done) > CLIENTS * REQUESTS // 2
    assert len(done) < len(found)
    known: dict[str, str] = {}
    for asked, text in done:
        key = json.dumps(asked)
        if key not in known:
            known[key] = expected(pair, asked)
        assert text == known[key]
