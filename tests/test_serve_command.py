"""`dflash-mlx serve` as a process: where it listens, what it needs, how it ends, and the examples of its page."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from command import ROOT, run, start

PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
MESSAGES = [{"role": "user", "content": "Write a function that adds."}]


@contextmanager
def command(*flags: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The command on a free port; gives the process and its address."""
    process = start("serve", "--port", "0", *flags)
    try:
        assert process.stderr
        for line in process.stderr:
            found = re.search(r"Serving pocket at (http://\S+)/v1", line.decode())
            if found:
                break
        else:
            raise AssertionError("it never served")
        wait_until(lambda: httpx.get(f"{found[1]}/health").status_code == 200)
        yield process, found[1]
    finally:
        process.kill()
        process.wait()


def wait_until(true: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            if true():
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < end
        time.sleep(0.05)


def read(address: str, found: dict[str, Any], **body: Any) -> None:
    """Read a stream to its end."""
    asked = {"model": "pocket", "messages": MESSAGES, "stream": True, "draft_length": 0} | body
    found["lines"] = []
    with httpx.stream("POST", f"{address}/v1/chat/completions", json=asked, timeout=60) as reply:
        for line in reply.iter_lines():
            if line:
                found["lines"].append(line.removeprefix("data: "))


@contextmanager
def streaming(address: str, **body: Any) -> Iterator[dict[str, Any]]:
    """A client in a thread that has had its first text."""
    found: dict[str, Any] = {}
    thread = threading.Thread(target=read, args=(address, found), kwargs=body)
    thread.start()
    wait_until(lambda: len(found.get("lines", [])) > 2)
    yield found
    thread.join(60)


@pytest.mark.slow
def test_sigterm_lets_a_stream_finish() -> None:
    with command("--shutdown-seconds", "30") as (process, address):
        with streaming(address, max_tokens=60) as found:
            process.send_signal(signal.SIGTERM)
        assert found["lines"][-1] == "[DONE]"
        assert json.loads(found["lines"][-2])["usage"]["completion_tokens"] == 60
        assert process.wait(30) == 0


def test_sigterm_cuts_off_what_takes_too_long() -> None:
    with command("--shutdown-seconds", "0.2") as (process, address):
        with streaming(address, max_tokens=4000) as found:
            process.send_signal(signal.SIGTERM)
            begun = time.monotonic()
        assert time.monotonic() - begun < 15
        assert found["lines"][-1] == "[DONE]"
        assert json.loads(found["lines"][-2])["error"]["code"] == "shutting_down"
        assert process.wait(30) == 0


def test_examples_of_the_page_run() -> None:
    """The curl command and the client's program, as they stand there but for the port."""
    shell, python = (re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)[-1] for kind in ("sh", "python"))
    assert shell.startswith("curl")
    assert "OpenAI(" in python
    with command() as (_, address):
        port = address.rsplit(":", 1)[1]
        if shutil.which("curl"):
            out = subprocess.run(
                ["bash", "-c", shell.replace("8000", port)], capture_output=True, check=True, timeout=60
            )
            assert json.loads(out.stdout)["choices"][0]["message"]["content"]
        program = [sys.executable, "-c", python.replace("8000", port)]
        out = subprocess.run(program, capture_output=True, check=True, timeout=60)
        assert b"def " in out.stdout


def test_page_lists_every_route_and_parameter() -> None:
    from dflash_mlx.server.schema import CHAT, COMPLETION, IGNORED, NEUTRAL

    names = (CHAT | COMPLETION | IGNORED) - {"logprobs"}
    assert [name for name in sorted(names) if f"`{name}" not in PAGE and name != "stream_options"] == []
    assert "`stream_options.include_usage`" in PAGE
    assert "frequency_penalty" in NEUTRAL
    source = (ROOT / "dflash_mlx" / "server" / "app.py").read_text()
    for route in re.findall(r'Route\("(/[\w/]+)"', source):
        assert f"{route}`" in PAGE


@pytest.mark.parametrize(
    "flags", [["--host", "0.0.0.0"], ["--host", "::"], ["--host", "example.org"], ["--api-key", ""]]
)
def test_other_addresses_need_a_key(flags: list[str]) -> None:
    result = run("serve", *flags)
    assert result.exit_code == 2
    assert "--api-key is needed to listen at" in result.stderr


def test_taken_port_is_told() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = run("serve", "--port", port)
    assert result.exit_code == 2
    assert f"[serve] 127.0.0.1:{port} must be a free address but got Address already in use." in result.stderr


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else there(name))
    result = run("serve")
    assert result.exit_code == 1
    assert (
        "[serve] the extra [serve] must be installed but got no uvicorn. Install it: pip install '.[serve]'"
        in result.stderr
    )


def test_extra_holds_what_the_server_imports() -> None:
    from dflash_mlx.cli.serve import EXTRA

    text = (Path(ROOT) / "pyproject.toml").read_text()
    listed = re.search(r"^serve = \[(.*?)\]", text, re.DOTALL | re.MULTILINE)
    assert listed
    assert sorted(re.findall(r'"([a-z]+)>=', listed[1])) == sorted(EXTRA)
