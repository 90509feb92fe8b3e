"""The flags that several commands share, and how they become arguments of the library.

A flag that is not given is not passed on: the defaults and the limits stand in `dflash_mlx.options` alone.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .render import hide_downloads, note

if TYPE_CHECKING:
    from ..pair import Pair

Command = TypeVar("Command", bound=Callable[..., Any])

UNITS = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("", 1000), ("B", 1000), ("IB", 1024))
}
POCKET_NOTE = "No --model given: running the pocket pair, a small model of Python code that comes with the package."
LOAD_FLAGS = ("model", "draft", "no_draft", "max_context", "max_memory", "kernels", "kv_bits")


class Size(click.ParamType):
    """A number of bytes, with or without a unit: ``24GB``, ``512MiB``, ``1000000``."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Give the number of bytes."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
        if match is None or match[2].upper() not in UNITS:
            self.fail(f"{value!r} is not a number of bytes; write 24GB, 512MiB or 1000000.", param, ctx)
        return int(Decimal(match[1]) * UNITS[match[2].upper()])  # a float would overflow


class DraftLength(click.ParamType):
    """``auto`` or a number of tokens; the library knows the drafter's block and checks the upper end."""

    name = "auto|N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """Give ``"auto"`` or the number."""
        if value == "auto" or isinstance(value, int):
            return value
        try:
            length = int(value)
        except ValueError:
            length = -1
        if length < 0:
            self.fail(f"{value!r} is neither 'auto' nor a number of tokens.", param, ctx)
        return length


class OutFile(click.Path):
    """A file to write: a place where that cannot be is refused before the work, not after it."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Give the path."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not path.name:
            self.fail(f"{str(value)!r} is no name of a file.", param, ctx)
        folder = path.parent
        if not path.exists() and not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
            self.fail(f"{str(folder)!r} is no folder that may be written in.", param, ctx)
        return path


class Seconds(click.ParamType):
    """A time that can be waited."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Give the seconds."""
        seconds: float = click.FLOAT.convert(value, param, ctx)
        if not (math.isfinite(seconds) and seconds >= 0):  # click's ranges let nan pass
            self.fail(f"{value!r} is no number of seconds.", param, ctx)
        return seconds


class LibraryOption(click.Option):
    """A flag whose default stands in `Options` and is applied there; ``--help`` looks it up."""

    def get_help_extra(self, ctx: click.Context) -> Any:
        """Add the default to what ``--help`` says."""
        from ..options import Options

        extra = super().get_help_extra(ctx)
        default = next(item.default for item in fields(Options) if item.name == self.name)
        if default is not None:
            extra["default"] = str(default)
        return extra


def limit_flags(command: Command) -> Command:
    """Add the flags that say into how much memory a pair is loaded, and what may serve it."""
    return _add(
        command,
        click.option(
            "--max-context",
            type=int,
            metavar="TOKENS",
            help="The context that memory is planned for. Without it, what fits, at most the model's own.",
        ),
        click.option(
            "--max-memory",
            type=Size(),
            metavar="SIZE",
            help="Memory that may be used: 24GB, 512MiB, or bytes. Without it, what the machine recommends.",
        ),
        click.option("--kernels", metavar="auto|stock|metal", help="Which kernels may serve.  [default: auto]"),
        click.option(
            "--kv-bits",
            type=int,
            metavar="8",
            help="Bits of the full layers' keys and values: 8 takes about half the memory, at some loss of accuracy. "
            "Without it, the model's own type.",
        ),
    )


def model_flags(command: Command) -> Command:
    """Add the flags that say which pair is loaded, and into how much memory."""
    return _add(
        command,
        click.option(
            "--model",
            metavar="FOLDER|HUB-ID",
            help="The target: a folder or a hub id. Without it, the pocket pair that comes with the package.",
        ),
        click.option(
            "--draft",
            metavar="FOLDER|HUB-ID|NAME",
            help="The drafter: a folder, a hub id, or v1 or dflash2 for a known target. Without it, the default "
            "of a known target; models/known.toml lists them.",
        ),
        click.option("--no-draft", is_flag=True, help="Decode plainly, with the target alone."),
        limit_flags,
    )


def generation_flags(command: Command) -> Command:
    """Add the flags that are options of `dflash_mlx.generate`, with the same names."""
    return _add(
        command,
        _option("--max-tokens", int, "Tokens to generate at most."),
        _option("--temperature", float, "0 takes the likeliest token; above 0, sampling."),
        _option("--top-p", float, "Sample from the likeliest tokens that have this share together; 1 is all."),
        _option("--top-k", int, "Sample from this many of the likeliest tokens; 0 is all."),
        _option("--min-p", float, "Drop tokens below this share of the likeliest one; 0 drops none."),
        _option("--repetition-penalty", float, "Penalty on tokens that occurred lately; 1 is none."),
        _option("--repetition-context", int, "How many of the last tokens the penalty looks at."),
        _option("--seed", int, "Seed of the sampling: the same seed gives the same text."),
        click.option(
            "--stop",
            multiple=True,
            metavar="TEXT",
            help="Stop where this text is generated. May be given several times.",
        ),
        _option("--draft-length", DraftLength(), "Tokens to draft in a round; 0 is plain decoding."),
        click.option(
            "--whole-block",
            is_flag=True,
            help="With a fixed --draft-length: the drafter fills its whole block, of which so many drafts are used.",
        ),
        _option("--prefill-step-size", int, "Tokens of the prompt to work on at once, at most."),
    )


def output_flags(command: Command) -> Command:
    """Add ``--json`` and ``--quiet``."""
    return _add(
        command,
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text."),
        click.option("--quiet", "-q", is_flag=True, help="Nothing on stderr but errors."),
    )


def load_arguments(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Give the arguments of `dflash_mlx.load` that the flags ask for."""
    if flags["draft"] is not None and flags["no_draft"]:
        raise click.UsageError("--draft and --no-draft exclude each other. Leave one of them out.")
    arguments = {name: flags[name] for name in ("max_context", "max_memory", "kernels", "kv_bits", "draft")}
    arguments = {name: value for name, value in arguments.items() if value is not None}
    if flags["no_draft"]:
        arguments["draft"] = None
    return {"target": "pocket" if flags["model"] is None else flags["model"]} | arguments


def generation_options(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Give the options of `dflash_mlx.generate` that the flags ask for, checked before anything is loaded."""
    return checked_options(flags, *(name for name in flags if name not in LOAD_FLAGS))


def checked_options(flags: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Give those of the named options that the flags ask for, checked before anything is loaded."""
    from ..options import Options

    options = {name: flags[name] for name in names if flags[name] is not None and flags[name] != ()}
    Options(**options)
    return options


def say_which(flags: Mapping[str, Any], quiet: bool) -> None:
    """Say that the pocket pair runs, where no other was asked for."""
    if flags["model"] is None:
        note(POCKET_NOTE, quiet)


def load_pair(arguments: dict[str, Any], quiet: bool) -> Pair:
    """Load the pair, and pass on what there is to know about it."""
    from .. import load

    if quiet:
        hide_downloads()
    pair = load(**arguments)
    for line in pair.notes:
        note(line, quiet)
    return pair


def _option(flag: str, kind: Any, text: str) -> Callable[[Command], Command]:
    """Make the flag of an option of `dflash_mlx.generate`."""
    return click.option(flag, type=kind, help=text, cls=LibraryOption)


def _add(command: Command, *flags: Callable[[Command], Command]) -> Command:
    """Apply decorators so that ``--help`` lists the flags in the order in which they are given here."""
    for flag in reversed(flags):
        command = flag(command)
    return command
