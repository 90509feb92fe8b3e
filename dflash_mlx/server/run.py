"""Runs the application on uvicorn, and ends it in order."""

from __future__ import annotations

import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from ..errors import InputError, must
from .worker import Service

LAST_WORDS_S = 3.0  # for streams to tell their clients that they were cut off


class _Server(uvicorn.Server):
    """A server that tells the service when its end begins."""

    def __init__(self, config: uvicorn.Config, service: Service, seconds: float):
        super().__init__(config)
        self._service, self._seconds = service, seconds

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: the first lets requests finish, the second does not wait for them."""
        self._service.shut_down(0.0 if self.should_exit else self._seconds)
        super().handle_exit(sig, frame)


def run_server(app: Any, service: Service, host: str, port: int, seconds: float, say: Callable[[str], None]) -> None:
    """Serve until a signal comes; then requests have `seconds` to finish, and the rest is cancelled.

    Raises:
        InputError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        todo = "Choose another --port or --host."
        raise InputError(must("serve", f"{host}:{port}", "a free address", error.strerror, todo)) from error
    shown = f"[{host}]" if family == socket.AF_INET6 else host
    say(f"Serving {service.name} at http://{shown}:{listening.getsockname()[1]}/v1")
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, lifespan="off",
        timeout_graceful_shutdown=round(seconds + LAST_WORDS_S),
    )  # fmt: skip
    with listening:
        _Server(config, service, seconds).run(sockets=[listening])
    service.engine.close(finish=False)
