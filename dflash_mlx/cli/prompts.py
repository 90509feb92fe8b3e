"""The prompts of ``verify`` and ``tune``: from the command line, from a file, or a few that come with the package."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ..errors import InputError, must

POCKET_PROMPTS = (
    "def fibonacci(n):",
    "class TestQueue(unittest.TestCase):",
    "import os\nimport sys\n\n\ndef main(argv):",
    "def read_lines(path):\n    with open(path) as file:",
)


def prompt_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the argument and the flag that give prompts."""
    flag = click.option(
        "--prompts",
        "file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help='A file of prompts: JSON lines, each a text, {"prompt": TEXT} or {"messages": [...]}.',
    )
    return click.argument("texts", metavar="[PROMPT]...", nargs=-1)(flag(command))


def prompts_of(texts: tuple[str, ...], file: Path | None) -> list[Any]:
    """All prompts that were given; where there were none, four lines of Python, which the pocket pair knows.

    Raises:
        InputError: the file cannot be read, holds none, or a line of it is no prompt.
    """
    given: list[Any] = list(texts)
    lines = _lines(file) if file else []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            given.append(_parsed(line, f"line {number} of {file}"))
    if file and len(given) == len(texts):
        raise InputError(must("prompts", str(file), "a file with prompts", "none", "Write one JSON value a line."))
    return given or list(POCKET_PROMPTS)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").split("\n")  # JSON may hold other line ends, such as U+2028
    except UnicodeDecodeError as error:
        raise InputError(must("prompts", str(file), "UTF-8 text", str(error), "Convert it first.")) from error


def _parsed(line: str, where: str) -> Any:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(must("prompts", where, "JSON", str(error), "Write one JSON value a line.")) from error
    chat = isinstance(value, dict) and "prompt" not in value
    value = value.get("messages" if chat else "prompt") if isinstance(value, dict) else value
    if not value or not isinstance(value, list if chat else (str, list)):
        expected = 'a text, {"prompt": TEXT} or {"messages": [...]}'
        raise InputError(must("prompts", where, expected, line[:80], "Correct the line."))
    return value
