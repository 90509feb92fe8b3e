"""A hub id downloads, loads, and works offline afterwards; the hub is a server on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_pair

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SCRIPT = """
import json, sys
import mlx.core as mx
mx.set_default_device(mx.cpu)
import dflash_mlx
try:
    pair = dflash_mlx.load(sys.argv[1], draft=sys.argv[2] if len(sys.argv) > 2 else None)
    print(json.dumps(dflash_mlx.generate(pair, [1, 2, 3], max_tokens=8).tokens))
except dflash_mlx.DFlashError as error:
    sys.exit(str(error))
"""


class Hub(ThreadingHTTPServer):
    """Serves folders as repositories; `cut` names a file whose transfer breaks off half way."""

    def __init__(self, repositories: dict[str, Path]):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories = repositories
        self.cut: str | None = None
        self.requested: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.server.requested.append(path)
        for name, folder in self.server.repositories.items():
            if path.startswith(f"/api/models/{name}"):
                files = [{"rfilename": file.name, "size": file.stat().st_size} for file in sorted(folder.iterdir())]
                tree = [{"type": "file", "path": f["rfilename"], "size": f["size"], "oid": COMMIT} for f in files]
                about = {"id": name, "sha": COMMIT, "siblings": files, "tags": [], "downloads": 0, "private": False}
                return self.answer(json.dumps(tree if "/tree/" in path else about).encode(), "application/json")
            file = folder / path.rpartition("/")[2]
            if path.startswith(f"/{name}/resolve/") and file.is_file():
                return self.answer(file.read_bytes(), "application/octet-stream", file.name == self.server.cut)
        return self.answer(b'{"error": "Repository not found"}', "application/json", status=404)

    def answer(self, body: bytes, kind: str, cut: bool = False, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        self.close_connection = self.close_connection or cut


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    target, drafter = tiny_pair(tmp_path / "served", vocab=61, window=9)
    server = Hub({"someone/target": target, "someone/drafter": drafter})
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def run(home: Path, endpoint: str, *names: str, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {"HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub"), "HF_ENDPOINT": endpoint, "NO_PROXY": "*"}
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"), "")
    root = str(Path(__file__).resolve().parents[1])
    path = {"PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, *names],
        env=os.environ | proxies | settings | path | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_hub_id_downloads_loads_and_works_offline_afterwards(hub, tmp_path):
    online = run(tmp_path / "home", hub.address, "someone/target", "someone/drafter")
    assert online.returncode == 0, online.stderr
    assert len(json.loads(online.stdout)) == 8
    assert any(path.endswith("/model.safetensors") for path in hub.requested)
    assert "\r" not in online.stderr, "no progress bar in a pipe"
    hub.shutdown()
    hub.server_close()
    unreachable = run(tmp_path / "home", hub.address, "someone/target", "someone/drafter")
    assert unreachable.stdout == online.stdout, unreachable.stderr
    offline = run(tmp_path / "home", hub.address, "someone/target", "someone/drafter", HF_HUB_OFFLINE="1")
    assert offline.stdout == online.stdout, offline.stderr


def test_an_id_that_the_hub_does_not_know_is_an_error_in_the_projects_form(hub, tmp_path):
    done = run(tmp_path / "home", hub.address, "someone/nothing")
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("[load] someone/nothing must be on the hub")
    assert "Traceback" not in done.stderr


@pytest.mark.slow  # the hub's client tries five more times, a second apart
def test_a_download_that_breaks_off_is_told_and_can_be_taken_up_again(hub, tmp_path):
    hub.cut = "model.safetensors"
    broken = run(tmp_path / "home", hub.address, "someone/target")
    assert broken.returncode == 1
    assert "Traceback" not in broken.stderr
    assert "[load] someone/target must be" in broken.stderr
    hub.cut = None
    again = run(tmp_path / "home", hub.address, "someone/target")
    assert again.returncode == 0, again.stderr
