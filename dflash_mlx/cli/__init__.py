"""The command line ``dflash-mlx``: one file per command, errors turned into exit codes here and nowhere else.

Importing this package imports neither MLX nor a tokenizer library, so that ``--help`` answers at once.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import click

from ..errors import DFlashError, must
from ..resources import version
from .bench import bench
from .chat import chat
from .convert import convert
from .doctor import doctor
from .generate import generate
from .serve import serve
from .tune import tune
from .verify import verify

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130
NO_ROOM = errno.ENOSPC, errno.EDQUOT, errno.EFBIG

EXAMPLES = """\b
Examples:
  dflash-mlx generate "def fibonacci(n):"
  dflash-mlx chat
  dflash-mlx serve --port 8080
  dflash-mlx bench --suite pocket
  dflash-mlx doctor
  dflash-mlx convert pocket ./pocket-4bit --bits 4
"""


class Failed(click.ClickException):
    """An error of the library, shown with its own text, as click shows its usage errors."""

    exit_code = EXIT_FAILED


class BadInput(Failed):
    """An error of the library that the input is at fault for: an option, a prompt, a checkpoint."""

    exit_code = EXIT_BAD_INPUT


class Commands(click.Group):
    """The group of all commands; what one raises becomes an exit code here, also what --help and --version raise.

    A reader of stdout that leaves is click's to handle: exit code 1, no message.
    """

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        """Read the flags of the group itself, of which some print and stop."""
        with _exit_codes():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that was asked for."""
        with _exit_codes():
            return super().invoke(ctx)


@contextmanager
def _exit_codes() -> Iterator[None]:
    try:
        yield
    except DFlashError as error:
        kind = BadInput if isinstance(error, ValueError) else Failed
        raise kind(str(error)) from error
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise
        name, todo = error.filename, "Check the path, its permissions and the room on the disk."
        if not name and error.errno in NO_ROOM:  # whoever writes files says which: it is stdout
            name, todo = "stdout", "Send it where there is room."
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (what still waits to be written would fail at the exit)
        name = str(name or "what this command reads and writes")
        raise Failed(must("dflash-mlx", name, "usable", error.strerror or str(error), todo)) from error
    except KeyboardInterrupt:
        click.echo("Interrupted.", err=True)
        raise click.exceptions.Exit(EXIT_INTERRUPTED) from None


def _show_version(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    """Print the version of this distribution and stop."""
    if wanted and not ctx.resilient_parsing:
        click.echo(f"dflash-mlx (dflash-mlx-muse) {version()}")
        ctx.exit()


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EXAMPLES,
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
def cli() -> None:
    """Muse Glimmer on MLX with DFlash: the target model's own tokens, sooner."""


cli.add_command(generate)
cli.add_command(chat)
cli.add_command(serve)
cli.add_command(bench)
cli.add_command(tune)
cli.add_command(verify)
cli.add_command(doctor)
cli.add_command(convert)


def main() -> NoReturn:
    """Run the command line and exit: 0 done, 1 failed, 2 bad input, 130 interrupted."""
    _replace_closed_files()
    cli(prog_name="dflash-mlx")
    raise SystemExit(0)


def _replace_closed_files() -> None:
    """Open on nothing what the caller closed of stdin, stdout and stderr.

    Else the next file that is opened takes the free number, and MLX refuses a checkpoint whose file is number 0.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
            setattr(sys, name, os.fdopen(nowhere, "r" if number == 0 else "w"))
