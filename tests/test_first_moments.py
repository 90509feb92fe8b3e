"""Ctrl-C in the first moments of a command, while Python imports: exit code 130 and one line, never a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib import import_module

import pytest
from command import ROOT

from dflash_mlx.toml_files import read_toml

# Presses Ctrl-C from inside when a given module is first looked for: a real signal at a known place.
PRESS = """
import os, signal, sys
class Press:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Press())
"""
START = {
    "command": "from dflash_mlx.__main__ import main; main()",
    "module": "import runpy; runpy.run_module('dflash_mlx', run_name='__main__', alter_sys=True)",
}
EARLY = ["dflash_mlx.cli", "click", "click.core", "dflash_mlx.cli.bench", "dflash_mlx.cli.verify"]
LATER = ["dflash_mlx.options", "dflash_mlx.pair", "mlx.core", "mlx_lm.tokenizer_utils", "transformers"]


def interrupted(start: str, module: str, *arguments: str, ignored: bool = False) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own that presses Ctrl-C when it imports a module."""
    code = PRESS.format(module=module) + ("signal.signal(signal.SIGINT, signal.SIG_IGN)\n" * ignored) + START[start]
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        # A shell starts its background jobs with SIGINT ignored; here it interrupts, as at a terminal.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


@pytest.mark.parametrize("start", START)
@pytest.mark.parametrize("module", EARLY)
def test_an_interrupt_while_the_command_line_is_imported_is_one_line(start: str, module: str) -> None:
    done = interrupted(start, module, "doctor")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "Interrupted.\n")


@pytest.mark.parametrize("module", LATER)
def test_an_interrupt_while_a_command_imports_what_it_needs_is_no_traceback(module: str) -> None:
    done = interrupted("command", module, "generate", "import os", "--max-tokens", "2", "--quiet")
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "Interrupted.\n"


def test_an_interrupt_that_the_caller_lets_ignore_is_ignored() -> None:
    done = interrupted("command", "click", "--version", ignored=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_installed_command_is_the_one_that_is_tested_here() -> None:
    scripts = read_toml(ROOT / "pyproject.toml")["project"]["scripts"]
    module, _, name = scripts["dflash-mlx"].partition(":")
    assert (module, name) == ("dflash_mlx.__main__", "main")
    assert callable(getattr(import_module(module), name))


def test_what_is_imported_before_the_handler_is_little() -> None:
    """Each module more is time in which Ctrl-C is Python's own traceback."""
    code = (
        "import sys; before = set(sys.modules); import dflash_mlx.__main__; print(*sorted(set(sys.modules) - before))"
    )
    found = subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert {name for name in found.stdout.split() if name.startswith("dflash_mlx")} == {
        "dflash_mlx",
        "dflash_mlx.__main__",
    }
    assert not {"typing", "click"} & set(found.stdout.split())
