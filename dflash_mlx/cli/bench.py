"""``dflash-mlx bench``: plain and drafted decoding in turn, written as one JSON result; ``report`` draws results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import InputError, must
from .render import note
from .shared import DraftLength, OutFile, Seconds, limit_flags, load_arguments, load_pair

if TYPE_CHECKING:
    from ..pair import Pair

EXAMPLES = """\b
Examples:
  dflash-mlx bench --suite pocket --out result.json
  dflash-mlx bench --model ./target-4bit --draft ./drafter --suite breakout --suite prose --repeats 4 --cool-down 20
  dflash-mlx bench --model ./target-4bit --draft ./v1 --draft ./dflash2 --draft-length auto --draft-length 4
  dflash-mlx bench report result.json other.json --out report
"""

REPORT_EXAMPLES = """\b
Examples:
  dflash-mlx bench report bench.json
  dflash-mlx bench report m4-max.json m3-ultra.json --out report
"""


@click.group(invoke_without_command=True, epilog=EXAMPLES, short_help="Measure plain and drafted decoding in turn.")
@click.option("--model", metavar="FOLDER|HUB-ID", help="The target. Without it, the pocket pair.")
@click.option("--draft", multiple=True, metavar="FOLDER|HUB-ID", help="A drafter; several are compared.")
@click.option("--suite", "suites", multiple=True, metavar="NAME|FILE.toml", help="Prompts; --list names them.")
@click.option("--list", "list_suites", is_flag=True, help="List the suites and exit.")
@click.option("--draft-length", "lengths", multiple=True, type=DraftLength(), help="To compare. [default: auto]")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Runs of each case in each mode.")
@click.option("--cool-down", type=Seconds(), default=0.0, metavar="SECONDS", help="Rest before every run.")
@click.option("--energy", is_flag=True, help="Measure joules with powermetrics (a Mac, as root).")
@click.option("--chip", metavar="NAME", help="The chip that you expect; another one is an error.")
@limit_flags
@click.option("--out", type=OutFile(), default=Path("bench.json"), show_default=True, help="The result.")
@click.option("--quiet", "-q", is_flag=True, help="Nothing on stderr but errors.")
@click.pass_context
def bench(ctx: click.Context, **flags: Any) -> None:
    """Run suites of prompts with the target alone and with each drafter, in one process, in turn.

    Writes one JSON result with all that is needed to repeat it, and prints a table. A run that was not what its label
    says (drafting off, another chip) is refused. Ctrl-C keeps what was measured, marked as incomplete.
    """
    if ctx.invoked_subcommand is not None:
        return
    if flags["list_suites"]:
        _list()
        return
    _bench(flags)


def _list() -> None:
    from ..bench.suites import read_suite, suite_names

    for name in suite_names():
        suite = read_suite(name)
        click.echo(f"{name:<14} {suite.about}\n{'':<14} {suite.rebuilds}")


def _bench(flags: dict[str, Any]) -> None:
    from ..bench.manifest import manifest
    from ..bench.modes import check_lengths, modes
    from ..bench.power import check_energy
    from ..bench.result import check_chip, make_result, validator, write_result
    from ..bench.run import Bench
    from ..bench.suites import read_suites
    from ..machine import chip

    validator()
    check_chip(flags["chip"], chip())
    if flags["energy"]:
        check_energy()
    chosen = flags["suites"] or (("pocket",) if flags["model"] is None else ("prose", "breakout"))
    suites = read_suites(chosen)
    check_lengths(lengths := flags["lengths"] or ("auto",))
    pairs = _load(flags)
    compared = modes(pairs, lengths)
    facts = manifest({mode.name: mode.pair for mode in compared}, _plain(flags) | {"suites": list(chosen)})
    quiet = flags["quiet"]
    run = Bench(compared, flags["repeats"], flags["cool_down"], flags["energy"], lambda line: note(line, quiet))
    complete = False
    try:
        run.run(suites)
        complete = True
    finally:
        if run.records:
            write_result(make_result(facts, run.records, run.left_out, complete), flags["out"])
            _table(run.records)
            note(f"Written to {flags['out']}{'' if complete else ' (incomplete)'}.", quiet)
        for case in run.left_out:
            note(f"Left out: {case['suite']} {case['case']}: {case['why']}.", quiet)
    if not run.records:
        found = "; ".join(f"{case['suite']} {case['case']} {case['why']}" for case in run.left_out)
        raise InputError(must("bench", "suites", "with a case that this pair can run", found, "Give another --suite."))


def _load(flags: dict[str, Any]) -> list[Pair]:
    """Load the target once, with each drafter."""
    drafts = flags["draft"] or ("auto",)
    first = load_pair(load_arguments(flags | {"draft": drafts[0], "no_draft": False}), flags["quiet"])
    others = [first.with_drafter(draft) for draft in drafts[1:]]
    for line in (line for pair in others for line in pair.notes):
        note(line, flags["quiet"])
    return [first, *others]


def _plain(flags: dict[str, Any]) -> dict[str, Any]:
    """Give the flags as JSON has them."""
    return {
        key: str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
        for key, value in flags.items()
        if key not in ("list_suites", "suites", "quiet")
    }


def _table(records: list[dict[str, Any]]) -> None:
    """Print a row per suite and mode on stdout."""
    from ..bench.summary import rows
    from ..report.tables import summary_table

    click.echo(summary_table(rows(records)))


@bench.command(epilog=REPORT_EXAMPLES, short_help="Draw results as one HTML page and Markdown.")
@click.argument("results", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("report"), show_default=True,
              help="The folder for the two files.")
def report(results: tuple[Path, ...], out: Path) -> None:
    """Make report.html (self-contained) and report.md from RESULTS, any number of files of `dflash-mlx bench`."""
    from ..bench.result import read_result
    from ..report import write_report

    for path in write_report([read_result(path) for path in results], out):
        click.echo(path)
