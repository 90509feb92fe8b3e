"""``dflash-mlx tune``: what rounds cost on this machine, and which draft length suits a pair and the user's prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import DFlashError, InputError, must
from .prompts import prompt_flags, prompts_of
from .render import note
from .shared import checked_options, load_arguments, load_pair, model_flags, say_which

if TYPE_CHECKING:
    from ..tuned import Tuned

EXAMPLES = """\b
Examples:
  dflash-mlx tune
  dflash-mlx tune --model ./target-4bit --draft ./drafter --prompts mine.jsonl
  dflash-mlx tune --context 1024 --context 32768 --dry-run --json > tune.json
"""
COUNT = click.IntRange(1)


@click.command(epilog=EXAMPLES, short_help="Find the draft length for this machine and your prompts.")
@prompt_flags
@model_flags
@click.option("--max-tokens", type=click.IntRange(2), default=96, show_default=True, help="Tokens of each text.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the likeliest token.")
@click.option("--seed", type=int, default=7, show_default=True, help="Seed of the sampling.")
@click.option("--repeats", type=COUNT, default=2, show_default=True, help="Times that each draft length runs.")
@click.option(
    "--context",
    "contexts",
    multiple=True,
    type=COUNT,
    help="Time rounds here. [default: 512, 4096, 16384, if they fit]",
)
@click.option("--draft-length", "lengths", multiple=True, type=click.IntRange(0), help="To try. [default: 9 or more]")
@click.option("--dry-run", is_flag=True, help="Store nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option("--quiet", "-q", is_flag=True, help="Nothing on stderr but errors.")
def tune(texts: tuple[str, ...], file: Path | None, **flags: Any) -> None:
    """Time rounds by draft length and context, run each PROMPT with each draft length, and choose.

    The choice is the most committed tokens per second; 0 where drafting does not pay. It is stored in the user's cache
    folder for this pair and machine: `load` finds it, and the automatic draft length starts from it. Let the machine be
    otherwise idle.
    """
    from ..tuning import tune as measure

    quiet = flags["quiet"]
    options = checked_options(flags, "max_tokens", "temperature", "seed")
    options |= {name: flags[name] for name in ("contexts", "lengths") if flags[name]} | {"repeats": flags["repeats"]}
    prompts = prompts_of(texts, file)
    say_which(flags, quiet)
    pair = load_pair(load_arguments(flags), quiet)
    if pair.drafter is None or pair.drafter_path is None:
        todo = "Give one with --draft."
        raise InputError(must("tune", "the pair", "a target with a drafter", "a target alone", todo))
    report, tuned = measure(pair, prompts, **options, say=lambda line: note(line, quiet))
    try:
        if not flags["dry_run"]:  # first: a reader of stdout may leave in the middle
            note(f"Stored in {_store(pair.target_path, pair.drafter_path, tuned)}.", quiet)
    finally:
        click.echo(json.dumps(report, indent=2) if flags["as_json"] else as_text(report))


def _store(target: Path, drafter: Path, tuned: Tuned) -> Path:
    from ..tuned import path, write_tuned

    try:
        return write_tuned(target, drafter, tuned)
    except OSError as error:
        todo = "Nothing was stored; --dry-run does without."
        raise DFlashError(must("tune", str(path()), "writable", error.strerror or str(error), todo)) from error


def as_text(report: dict[str, Any]) -> str:
    """Write the report for people: rounds by context and draft length, speeds on the prompts, the choice."""
    lines = [f"Rounds, median milliseconds (weights {report['weights']}):", "  context  length   draft  verify   round"]
    for cost in report["costs"]:
        times = (_ms(cost[name]) for name in ("draft_s", "verify_s", "total_s"))
        lines.append(f"  {cost['context']:>7}  {cost['draft_length']:>6}  {'  '.join(times)}")
    plain = report["speeds"][0]["tokens_per_s"]
    lines += ["", "Your prompts:", "  length   tok/s  of plain  mean length  accepted"]
    for speed in report["speeds"]:
        share = "" if not speed["draft_length"] else f"{speed['acceptance_rate']:>8.0%}"
        rate = speed["tokens_per_s"]
        row = f"{speed['draft_length']:>6}  {rate:>6.1f}  {rate / plain:>8.2f}  {speed['mean_length']:>11.2f}  {share}"
        lines.append(f"  {row}".rstrip())
    if report["blocks"]:
        lines += ["", "The drafter's block:", "  slots   length   tok/s  accepted   round ms"]
    for block in report["blocks"]:
        rate, share = block["tokens_per_s"], block["acceptance_rate"]
        row = f"{block['slots']:>5}  {block['draft_length']:>7}  {rate:>6.1f}  {share:>8.0%}"
        lines.append(f"  {row}   {_ms(block['round_s']).rjust(8)}")
    length = report["draft_length"]
    chosen = f"draft length {length}, {report['speedup']:.2f} times plain" if length else "0: drafting does not pay"
    return "\n".join([*lines, "", f"Chosen: {chosen}."])


def _ms(seconds: float | None) -> str:
    return "     –" if seconds is None else f"{seconds * 1000:>6.2f}"
