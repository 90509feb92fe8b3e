"""``dflash-mlx generate``: one prompt in, text on stdout as it comes, one summary line on stderr."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import DFlashError, InputError, must
from ..round_log import TIMED_EVERY, write_rounds
from .interrupt import Interrupts
from .render import PrefillBar, TextWriter, note, summary_line
from .shared import (
    OutFile,
    generation_flags,
    generation_options,
    load_arguments,
    load_pair,
    model_flags,
    output_flags,
    say_which,
)

if TYPE_CHECKING:
    from ..pair import Pair
    from ..stats import Generation

EXAMPLES = """\b
Examples:
  dflash-mlx generate "def fibonacci(n):"
  dflash-mlx generate "class Stack:" --max-tokens 64 --temperature 0.7 --seed 7
  cat module.py | dflash-mlx generate - --stop $'\\n\\n'
  dflash-mlx generate "import os" --json | python3 -m json.tool
  dflash-mlx generate "import os" --rounds rounds.jsonl
  dflash-mlx generate "Once" --model ./target-4bit --draft ./drafter
  dflash-mlx generate "Once" --model ./target-4bit --no-draft
"""


@click.command(epilog=EXAMPLES, short_help="Continue a prompt; text streams to stdout.")
@click.argument("prompt", required=False)
@model_flags
@generation_flags
@click.option(
    "--rounds",
    type=OutFile(),
    metavar="FILE",
    help="Write every round as a JSON line: counts, tokens, times.",
)
@output_flags
def generate(prompt: str | None, as_json: bool, quiet: bool, rounds: Path | None, **flags: Any) -> None:
    """Continue PROMPT, or what comes on standard input where PROMPT is "-".

    Text goes to stdout as it is generated, everything else to stderr. Exit code 0: done, 1: failed, 2: bad input,
    130: interrupted with Ctrl-C (what was generated is printed first).
    """
    arguments = load_arguments(flags)
    options = generation_options(flags)
    text = _read_prompt(prompt)
    say_which(flags, quiet)
    writer = _JsonWriter() if as_json else TextWriter()
    try:
        pair = load_pair(arguments, quiet)
        generation = _run(pair, text, options, writer, quiet, TIMED_EVERY if rounds else 0)
    except KeyboardInterrupt:
        generation = _nothing()
    writer.finish(generation)
    if rounds:
        write_rounds(generation, rounds)
    note(summary_line(generation), quiet)
    if generation.finish_reason == "cancelled":
        raise KeyboardInterrupt


def _read_prompt(prompt: str | None) -> str:
    """Give the prompt's text, from the command line or from standard input."""
    if prompt is None:
        raise click.UsageError("Missing argument 'PROMPT'. Give a text, or - to read it from standard input.")
    try:
        if prompt == "-":
            return sys.stdin.buffer.read().decode("utf-8")
        prompt.encode("utf-8")  # bytes of the command line that are no text arrive as lone surrogates
        return prompt
    except UnicodeError as error:
        todo = "Convert it first, for example with iconv."
        raise InputError(must("generate", "prompt", "UTF-8 text", f"other bytes ({error})", todo)) from error


class _JsonWriter:
    """Writes one JSON object when all is done."""

    def write(self, text: str) -> None:
        """Leave the text for the object."""

    def finish(self, generation: Generation) -> None:
        """Write the object on one line."""
        click.echo(json.dumps(generation.to_dict(), ensure_ascii=False))


def _run(
    pair: Pair, prompt: str, options: dict[str, Any], writer: TextWriter | _JsonWriter, quiet: bool, timed_every: int
) -> Generation:
    """Generate and write as it comes; an interrupted generation says that it was cancelled."""
    from .. import Session

    session = Session(pair)
    with Interrupts() as interrupts, PrefillBar(quiet) as bar:

        def on_prefill(done: int, total: int) -> None:
            bar(done, total)
            interrupts.raise_if_asked()

        stream: Any = session.stream_generate(prompt, **options, on_prefill=on_prefill, timed_every=timed_every)
        try:
            for chunk in stream:
                writer.write(chunk.text)
                if interrupts.asked:
                    break
        except DFlashError as error:
            writer.finish(error.partial or _nothing())
            raise
        finally:
            # An unfinished stream that is closed records what was generated up to here.
            stream.close()
    return session.last_generation or _nothing()


def _nothing() -> Generation:
    """Give the generation that was cancelled before its first token."""
    from ..stats import Generation, Stats

    return Generation("", [], "cancelled", Stats(speculation="off: cancelled before the first token"))
