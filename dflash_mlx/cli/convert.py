"""``dflash-mlx convert``: a target or a drafter in other bits or another dtype; a table of before and after."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, Any

import click

from .render import hide_downloads, note, size
from .shared import output_flags

if TYPE_CHECKING:
    from ..convert import Conversion

EXAMPLES = """\b
Examples:
  dflash-mlx convert meta-models/Muse-Glimmer-30B glimmer-4bit --bits 4
  dflash-mlx convert z-lab/Muse-Glimmer-30B-DFlash2 drafter-8bit --bits 8 --keep 'candidate_selector.*'
  dflash-mlx convert ./glimmer-f32 ./glimmer-bf16 --dtype bfloat16
  dflash-mlx convert pocket ./pocket-6bit --bits 6 --group-size 32 --keep lm_head --keep '*.o_proj'
"""


@click.command(epilog=EXAMPLES, short_help="Quantise a target or a drafter, or change its dtype.")
@click.argument("model")
@click.argument("folder")
@click.option("--bits", type=int, metavar="4|6|8", help="Quantise to this many bits. Without it, nothing is quantised.")
@click.option("--group-size", type=int, metavar="32|64|128", help="Weights that share a scale.  [default: 64]")
@click.option(
    "--keep",
    multiple=True,
    metavar="PATTERN",
    help="Modules that stay whole, such as lm_head or '*.o_proj'. May be given several times.",
)
@click.option(
    "--dtype",
    metavar="float32|float16|bfloat16",
    help="Of scales and of all that is not quantised. Without it, the source's.",
)
@output_flags
def convert(model: str, folder: str, as_json: bool, quiet: bool, **flags: Any) -> None:
    """Write MODEL (a folder, a hub id, or pocket) to FOLDER, quantised or in another dtype.

    MODEL may be a target or a drafter, in any layout that the other commands read. FOLDER is complete when the command
    is done and absent otherwise. Exit code 0: done, 1: failed, 2: bad input, 130: interrupted with Ctrl-C.
    """
    from ..convert import Form
    from ..convert import convert as write

    if quiet:
        hide_downloads()
    form = Form(**{name: value for name, value in flags.items() if value is not None})
    with ConvertBar(quiet) as bar:
        result = write(model, folder, form, bar)
    for line in result.notes:
        note(line, quiet)
    click.echo(json.dumps(_as_dict(result), ensure_ascii=False) if as_json else _as_table(result))


def _as_dict(result: Conversion) -> dict[str, Any]:
    """Give the report as JSON values."""
    return asdict(result) | {"folder": str(result.folder)}


def _as_table(result: Conversion) -> str:
    """Write the sizes before and after, and what was quantised."""
    rows = [
        ("weights on disk", size(result.before.weights_bytes), size(result.after.weights_bytes)),
        ("bits per weight", f"{result.before.bits_per_weight:.2f}", f"{result.after.bits_per_weight:.2f}"),
        (f"memory, context {result.context}", size(result.before.memory_bytes), size(result.after.memory_bytes)),
    ]
    lines = [f"{name:<24}{before:>12}{after:>12}" for name, before, after in [("", "before", "after"), *rows]]
    whole = f"; whole: {', '.join(result.whole)}" if result.whole else ""
    lines.append(f"{result.kind}: {result.quantised} modules quantised{whole}")
    lines.append(f"written to {result.folder}")
    return "\n".join(line.rstrip() for line in lines)


class ConvertBar:
    """A progress bar of bytes, on a terminal alone; an instance is the callable that `convert` takes."""

    def __init__(self, quiet: bool) -> None:
        self._bar: Any = None
        if not quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("convert"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("convert", total=None)

    def __enter__(self) -> ConvertBar:
        if self._bar is not None:
            self._bar.start()
        return self

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` bytes are made."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
