"""What every test stands on: MLX's CPU device, a home of its own, fixed seeds, and no network beyond this machine."""

from __future__ import annotations

import os
import random
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

USERS_ENVIRONMENT = dict(os.environ)
_HOME = tempfile.TemporaryDirectory(prefix="dflash-mlx-tests-")
# Set before anything is imported that reads them at import time, as huggingface_hub does.
os.environ |= {
    "HOME": _HOME.name,
    "XDG_CACHE_HOME": f"{_HOME.name}/.cache",
    "XDG_CONFIG_HOME": f"{_HOME.name}/.config",
    "XDG_DATA_HOME": f"{_HOME.name}/.local/share",
    "HF_HOME": f"{_HOME.name}/.cache/huggingface",
    "HF_HUB_CACHE": f"{_HOME.name}/.cache/huggingface/hub",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
for name in ("HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE", "HUGGING_FACE_HUB_TOKEN"):
    os.environ.pop(name, None)

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

# Equality bit for bit was measured on this device; on a Mac too the tests run here unless they say otherwise.
mx.set_default_device(mx.cpu)
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class NetworkForbidden(OSError):
    """A test tried to leave this machine."""


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    mx.random.seed(0)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections to other machines fail at once, and so do look-ups of their names."""
    connect, look_up = socket.socket.connect, socket.getaddrinfo

    def guarded_connect(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in LOOPBACK:
            raise NetworkForbidden(f"a test must not connect to {address[0]}")
        connect(self, address)

    def guarded_look_up(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host not in (*LOOPBACK, None, ""):
            raise NetworkForbidden(f"a test must not look up {host}")
        return look_up(host, *args, **kwargs)

    monkeypatch.setattr(socket.socket, "connect", guarded_connect)
    monkeypatch.setattr(socket, "getaddrinfo", guarded_look_up)


@pytest.fixture(scope="session")
def users_environment() -> dict[str, str]:
    """The environment as it was before the tests moved the home: where caches that outlive a run may go."""
    return dict(USERS_ENVIRONMENT)


@pytest.fixture(scope="session", autouse=True)
def _home() -> Iterator[Path]:
    with _HOME:
        yield Path(_HOME.name)
