"""A result: the manifest and the records in one JSON file, held to the schema in bench/result.schema.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import DFlashError, InputError, must
from ..resources import find
from ..whole_files import write_whole

FORMAT = "dflash-mlx-bench-1"
SCHEMA = "bench/result.schema.json"
EXTRA = "Install it: pip install '.[bench]' from a checkout."


def make_result(
    manifest: dict[str, Any], records: list[dict[str, Any]], left_out: list[dict[str, Any]], complete: bool
) -> dict[str, Any]:
    """Put a result together; `complete` is false where the run was ended early."""
    result = {
        "format": FORMAT,
        "complete": complete,
        "manifest": manifest,
        "records": records,
        "left_out": left_out,
    }
    validate(result, "this result")
    return result


def write_result(result: dict[str, Any], path: Path) -> None:
    """Write the file whole or not at all."""
    write_whole(path, json.dumps(result, indent=1, ensure_ascii=False) + "\n")


def read_result(path: Path) -> dict[str, Any]:
    """Read a file and hold it to the schema.

    Raises:
        InputError: no such file, no JSON, or not a result.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(must("bench", str(path), "a result of `dflash-mlx bench`", str(error), "Check it.")) from error
    validate(result, str(path))
    return dict(result)


def validator() -> Any:
    """Make what holds results to the schema; asked for before a run, so that none is lost for a missing library.

    Raises:
        DFlashError: the library for it is not installed.
    """
    try:
        from jsonschema import Draft202012Validator
    except ImportError as error:
        raise DFlashError(must("bench", "jsonschema", "installed", "no such package", EXTRA)) from error
    return Draft202012Validator(json.loads(find(SCHEMA).read_text(encoding="utf-8")))


def validate(result: Any, where: str) -> None:
    """Hold a result to the schema.

    Raises:
        InputError: with the place in the result that is wrong.
        DFlashError: the library for it is not installed.
    """
    wrong = next(validator().iter_errors(result), None)
    if wrong is not None:
        place = "/".join(map(str, wrong.absolute_path)) or "its top"
        expected = f"as {SCHEMA} says"
        raise InputError(must("bench", f"{place} in {where}", expected, wrong.message[:200], "It was changed or cut."))


def check_chip(asked: str | None, chip: str) -> None:
    """Refuse to label a run with another chip than it ran on.

    Raises:
        InputError: the machine's own name does not contain the asked one.
    """
    if asked is not None and (not asked.strip() or asked.casefold() not in chip.casefold()):
        todo = "Leave --chip out: the result names the machine that it ran on."
        raise InputError(must("bench", "--chip", f"this machine's ({chip})", repr(asked), todo))
