"""Runs the command line for tests: in this process, or as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from dflash_mlx.cli import cli

ROOT = Path(__file__).resolve().parent.parent
PROMPT = "def fibonacci(n):"
POCKET_LINE = "No --model given: running the pocket pair, a small model of Python code that comes with the package.\n"
PINNED = "import mlx.core as mx; mx.set_default_device(mx.cpu)\n"
MAIN = "from dflash_mlx.cli import main; main()"


def run(*arguments: str, stdin: str | bytes | None = None) -> Result:
    """Run a command in this process, where what was imported once is there."""
    return CliRunner().invoke(cli, list(arguments), input=stdin, prog_name="dflash-mlx")


def start(*arguments: str, before: str = "", main: str = MAIN, **pipes: Any) -> subprocess.Popen[bytes]:
    """Start the command line as a process of its own, on the CPU device, after the code `before`."""
    code = PINNED + before + "\n" + main if main == MAIN else main
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONUNBUFFERED", None)  # whether text comes at once is up to the command
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | pipes
    return subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=ROOT.anchor, env=environment, **streams)
