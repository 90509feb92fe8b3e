"""``dflash-mlx verify``: the same prompts plain and drafted on this machine; equal, or where and how closely not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ..errors import InputError, must
from .prompts import prompt_flags, prompts_of
from .render import note
from .shared import DraftLength, checked_options, load_arguments, load_pair, model_flags, say_which

EXAMPLES = """\b
Examples:
  dflash-mlx verify
  dflash-mlx verify "def add(a, b):" --temperature 0.7 --seed 3 --draft-length 4 --draft-length auto
  dflash-mlx verify --model ./target-4bit --draft ./drafter --prompts mine.jsonl --json > verify.json
"""


@click.command(epilog=EXAMPLES, short_help="Compare plain and drafted decoding on this machine.")
@prompt_flags
@model_flags
@click.option("--draft-length", "lengths", multiple=True, type=DraftLength(), help="To compare. [default: 1, 4, most]")
@click.option("--max-tokens", type=click.IntRange(1), default=64, show_default=True, help="Tokens of each text.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the likeliest token.")
@click.option("--seed", type=int, help="Seed of the sampling.  [default: 7]")
@click.option("--strict", is_flag=True, help="Let a near-tie fail too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
@click.option("--quiet", "-q", is_flag=True, help="Nothing on stderr but errors.")
def verify(texts: tuple[str, ...], file: Path | None, lengths: tuple[Any, ...], **flags: Any) -> None:
    """Decode each PROMPT plainly and drafted, and compare the tokens.

    A difference where the two tokens' scores are within the rounding of the activations is a near-tie: on a GPU it may
    happen. Exit code 0: equal, or near-ties only; 1: another difference, or with --strict any; 2: bad input.
    """
    from ..verification import verify as compare_all

    options = checked_options(flags, "max_tokens", "temperature", "seed")
    prompts = prompts_of(texts, file)
    say_which(flags, flags["quiet"])
    pair = load_pair(load_arguments(flags), flags["quiet"])
    if pair.drafter is None:
        todo = "Give one with --draft."
        raise InputError(must("verify", "the pair", "a target with a drafter", "a target alone", todo))
    most = pair.block_size - 1
    report = compare_all(pair, prompts, lengths or sorted({1, min(4, most), most}), **options)
    click.echo(json.dumps(report, indent=2, ensure_ascii=False) if flags["as_json"] else as_text(report))
    wrong = report["other_differences"] + (report["near_tie_differences"] if flags["strict"] else 0)
    if wrong:
        note("Plain and drafted decoding differ by more than rounding: please report this.", flags["quiet"])
        click.get_current_context().exit(1)


def as_text(report: dict[str, Any]) -> str:
    """Write the report for people: a line per difference, then the counts."""
    lines = []
    for each in report["comparisons"]:
        if not each["equal"]:
            margin = "a text had ended" if each["margin"] is None else f"margin {each['margin']:.3g}"
            kind = "near-tie" if each["near_tie"] else "DIFFERENT"
            where = f"draft length {each['draft_length']}, token {each['token']}"
            lines.append(f"{kind}: {each['prompt']!r}, {where}: {each['plain']} / {each['drafted']}, {margin}")
    lines.append(f"{report['equal']} of {report['runs']} texts equal to plain decoding")
    if report["near_ties_in_plain_text"] is not None:
        lines.append(f"{report['near_ties_in_plain_text']} near-ties in the plain texts ({report['near_tie_is']})")
    return "\n".join(lines)
