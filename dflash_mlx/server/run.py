"""Runs the application on uvicorn, and ends it in order."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn

from ..errors import InputError, must
from .worker import Service

LAST_WORDS_S = 3.0  # for streams to tell their clients that they were cut off


class _Server(uvicorn.Server):
    """A server that tells the service when its end begins, and returns at its end, whatever the signal."""

    def __init__(self, config: uvicorn.Config, service: Service, seconds: float):
        super().__init__(config)
        self._service, self._seconds = service, seconds

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: the first lets requests finish, the second does not wait for them."""
        self._service.shut_down(0.0 if self.should_exit else self._seconds)
        super().handle_exit(sig, frame)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while the server runs; uvicorn's own way would raise them again at the end."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def listen(host: str, port: int) -> socket.socket:
    """A socket at an address; port 0 takes a free one.

    Raises:
        InputError: the address cannot be used.
    """
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        todo = "Choose another --port or --host."
        raise InputError(must("serve", f"{host}:{port}", "a free address", error.strerror, todo)) from error
    return listening


def address(listening: socket.socket) -> str:
    """The URL of a socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run_server(app: Any, service: Service, listening: socket.socket, seconds: float) -> None:
    """Serve until SIGINT or SIGTERM; then requests have `seconds` to finish, and the rest is cancelled."""
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, lifespan="off",
        timeout_graceful_shutdown=round(seconds + LAST_WORDS_S),
    )  # fmt: skip
    _Server(config, service, seconds).run(sockets=[listening])
    service.engine.close(finish=False)
