"""A server for tests: uvicorn on a free port in a thread, the pocket pair behind it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn

from dflash_mlx.engine import Engine
from dflash_mlx.pair import Pair
from dflash_mlx.prefix_store import PrefixStore
from dflash_mlx.server.app import Api, Limits
from dflash_mlx.server.worker import Service

MODEL = "pocket"
QUESTION = [{"role": "user", "content": "Write a function that adds."}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "box.open",
            "description": "Opens a box.",
            "parameters": {
                "type": "object",
                "properties": {"item": {"type": "integer"}, "colour": {"type": "string", "enum": ["red", "blue"]}},
                "required": ["item", "colour"],
            },
        },
    },
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}},
]


class Served:
    """A running server and clients for it."""

    def __init__(self, url: str, service: Service):
        self.url, self.service = url, service
        self.http = httpx.Client(base_url=url, timeout=120)

    def openai(self, **options: Any) -> Any:
        from openai import OpenAI

        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120, **options)

    def chat(self, messages: Any = None, **body: Any) -> httpx.Response:
        asked = {"model": MODEL, "messages": messages or QUESTION, "max_tokens": 16} | body
        return self.http.post("/v1/chat/completions", json=asked)

    def idle(self, seconds: float = 20) -> None:
        """Wait until no request runs or waits."""
        end = time.monotonic() + seconds
        while any(self.service.engine.figures()[name] for name in ("running", "waiting")):
            assert time.monotonic() < end, "requests are still there"
            time.sleep(0.01)


@contextmanager
def serving(pair: Pair, limits: Limits | None = None, **engine: Any) -> Iterator[Served]:
    """A server as `dflash-mlx serve` makes it, in this process."""
    store = PrefixStore(pair, 2**26)
    with Engine(pair, store=store, **engine) as running:
        service = Service(running, MODEL, {}, store)
        app = Api(service, limits or Limits()).app()
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        served = Served(f"http://127.0.0.1:{port}", service)
        try:
            yield served
        finally:
            served.http.close()
            server.should_exit = True
            thread.join(30)
            running.close(finish=False)
