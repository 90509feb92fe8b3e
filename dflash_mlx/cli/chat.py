"""``dflash-mlx chat``: a conversation in the terminal, or one line after the other from a pipe."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from ..chat.template import STRENGTHS
from ..errors import DFlashError, InputError, must
from .chat_commands import HELP, Leave, Settings, obey
from .interrupt import Interrupts
from .render import PrefillBar, TextWriter, note, summary_line
from .shared import generation_flags, generation_options, load_arguments, load_pair, model_flags, say_which

if TYPE_CHECKING:
    from ..chat.conversation import Conversation

PROMPT, MORE = "> ", ". "
OWN_FLAGS = ("system", "reasoning")
EXAMPLES = """\b
Examples:
  dflash-mlx chat
  dflash-mlx chat --system "Answer briefly." --reasoning low --max-tokens 1000
  printf 'What is a ring buffer?\\nIn Python, please.\\n' | dflash-mlx chat --quiet
"""


@click.command(epilog=EXAMPLES, short_help="Talk with the model in the terminal.")
@click.option("--system", metavar="TEXT", help="The system message. Without it, the template's own.")
@click.option("--reasoning", type=click.Choice(STRENGTHS), help="Reasoning strength. Without it, the template's own.")
@model_flags
@generation_flags
@click.option("--quiet", "-q", is_flag=True, help="No reasoning and no figures on stderr, errors only.")
def chat(system: str | None, reasoning: str | None, quiet: bool, **flags: Any) -> None:
    """Talk with the model; it keeps its caches from one message to the next.

    Answers go to stdout, reasoning and all else to stderr. A line that begins with / is a command: /help lists them. A
    line that ends in \\ goes on in the next one. Ctrl-C stops an answer and keeps the conversation; Ctrl-D leaves.
    From a pipe each line is a message, and the first error ends the run.
    """
    arguments = load_arguments(flags)
    options = generation_options(flags)
    say_which(flags, quiet)
    pair = load_pair(arguments, quiet)
    from .. import Session
    from ..chat.conversation import Conversation

    talk, settings = Conversation(Session(pair), system, reasoning), Settings(options)
    talking = sys.stdin.isatty()
    if talking:
        note(f"{HELP[0]} Ctrl-C stops an answer, Ctrl-D leaves.", quiet)
    for line in _lines(talking):
        try:
            if line.startswith("/") and not line.startswith("//"):
                obey(line, talk, settings)
            elif line.strip():
                _answer(talk, line.removeprefix("/") if line.startswith("//") else line, settings.options, quiet)
        except Leave:
            return
        except DFlashError as error:
            if not talking:
                raise
            click.echo(f"Error: {error}", err=True)


def _lines(talking: bool) -> Iterator[str]:
    """Messages and commands, as they are typed or come from the pipe; lines that end in \\ are joined."""
    begun = ""
    while True:
        try:
            line = _line(MORE if begun else PROMPT) if talking else sys.stdin.readline()
            line.encode("utf-8")  # bytes that are no text may arrive as lone surrogates
        except KeyboardInterrupt:
            if not talking:
                raise
            click.echo("\n(/quit or Ctrl-D leaves.)", err=True)
            begun = ""
            continue
        except UnicodeError as error:
            todo = "Convert it first, for example with iconv."
            raise InputError(must("chat", "the message", "UTF-8 text", f"other bytes ({error})", todo)) from error
        if not line:
            break
        line = line.removesuffix("\n")
        if line.endswith("\\"):
            begun += line[:-1] + "\n"
            continue
        yield begun + line
        begun = ""
    if begun:
        yield begun


def _line(prompt: str) -> str:
    """One typed line with its newline, edited as shells do where readline is there; "" at the end."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (input() uses it once it is imported)
    try:
        if sys.stdout.isatty():
            return input(prompt) + "\n"
        click.echo(prompt, err=True, nl=False)  # stdout is somebody else's: the answers alone go there
        return sys.stdin.readline()
    except EOFError:
        click.echo("", err=True)
        return ""


def _answer(talk: Conversation, text: str, options: dict[str, Any], quiet: bool) -> None:
    """Ask, and write the answer as it comes; Ctrl-C stops it after the round at hand."""
    writer = TextWriter()
    thought = ""
    with Interrupts() as interrupts, PrefillBar(quiet) as bar:

        def on_prefill(done: int, total: int) -> None:
            bar(done, total)
            interrupts.raise_if_asked()

        stream: Any = talk.ask(text, on_prefill, **options)
        try:
            for piece in stream:
                if piece.kind == "reasoning":
                    thought = piece.text or thought
                    if not quiet:
                        click.secho(piece.text, err=True, dim=True, nl=False)
                else:
                    if thought and not quiet:
                        click.echo("" if thought.endswith("\n") else "\n", err=True, nl=True)
                    thought = ""
                    writer.write(piece.text)
                if interrupts.asked:
                    break
        except KeyboardInterrupt:
            pass  # during the prefill, or a second time: the conversation is what it was
        finally:
            stream.close()
    writer.finish()
    for problem in talk.answer.problems:
        note(f"({problem})", quiet)
    if talk.finish_reason == "length":
        note("(cut off: --max-tokens, or the end of the context)", quiet)
    if talk.session.last_generation is not None:
        note(summary_line(talk.session.last_generation), quiet)
