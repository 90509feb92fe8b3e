"""``dflash-mlx doctor``: what is installed, what the machine has, and whether the pocket pair runs."""

from __future__ import annotations

import json
from typing import Any

import click

from .checks import examine
from .kernel_report import as_text, examine_kernels
from .render import size

EXAMPLES = """\b
Examples:
  dflash-mlx doctor
  dflash-mlx doctor --json > doctor.json
  dflash-mlx doctor --kernels --json > kernels.json
"""


@click.command(epilog=EXAMPLES, short_help="Examine the installation and the machine.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
@click.option("--kernels", "only_kernels", is_flag=True, help="Qualify the Metal kernels anew on this machine.")
@click.option("--model", metavar="FOLDER|HUB-ID", help="With --kernels: the target whose shapes are tried.")
@click.option("--draft", metavar="FOLDER|HUB-ID", help="With --kernels: its drafter.")
def doctor(as_json: bool, only_kernels: bool, model: str | None, draft: str | None) -> None:
    """Say what is installed, what the machine has, and whether the pocket pair runs.

    With --kernels: compare and time each Metal kernel on this machine, for the shapes of the pocket pair and of the
    30B pair or for those of --model, and store the verdicts. It may take some minutes.

    Exit code 0: all is well, 1: something is broken; then each problem comes with what to do.
    """
    if (model or draft) and not only_kernels:
        raise click.UsageError("--model and --draft go with --kernels.")
    report = examine_kernels(model, draft) if only_kernels else examine()
    shown = as_text if only_kernels else _as_text
    click.echo(json.dumps(report, indent=2, ensure_ascii=False) if as_json else shown(report))
    if report["problems"]:
        click.get_current_context().exit(1)


def _as_text(report: dict[str, Any]) -> str:
    """Write the report for people: a block per subject, then the problems."""
    lines: list[str] = []
    for title in ("versions", "machine", "names", "pocket", "kernels"):
        lines.append(title)
        lines += [f"  {_label(name):<20} {_value(name, value)}" for name, value in report[title].items()]
    if not report["problems"]:
        return "\n".join([*lines, "", "No problems found."])
    lines += ["", "problems"]
    for problem in report["problems"]:
        lines += [f"  {problem['what']}", f"    {problem['do']}"]
    return "\n".join(lines)


def _label(name: str) -> str:
    """Write a key of the report for people."""
    return name.removesuffix("_bytes").replace("_", " ") if name != "huggingface_hub" else name


def _value(name: str, value: Any) -> str:
    """Write one value; what counts bytes is shown as a size."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name == "plain_and_drafted":
        differing = ", ".join(f"{d['prompt']!r} at token {d['token']}" for d in value["first_differences"])
        return f"{value['equal']} of {value['runs']} texts equal" + (
            f"; first differences: {differing}" if differing else ""
        )
    return size(value) if name.endswith("_bytes") else str(value)
