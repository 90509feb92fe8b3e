"""What a person reads: text on stdout; on stderr notes, the progress of the prefill, and the summary line of a run."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ..stats import Generation, Stats

SEPARATOR = " · "


def note(text: str, quiet: bool) -> None:
    """Write one line to stderr, dimmed on a terminal."""
    if not quiet:
        click.secho(text, err=True, dim=True)


def hide_downloads() -> None:
    """Switch off the hub's progress bars, which show themselves on a terminal."""
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()


def size(count: float) -> str:
    """Write a number of bytes for people, in powers of 1000."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.2f} GB" if count < 1000 else f"{count / 1000:.2f} TB"


def summary_line(generation: Generation) -> str:
    """Write the one line that follows a generation.

    ``mean accepted`` counts drafted tokens only; ``mean length`` counts the target's own token too, and says so.
    """
    stats = generation.stats
    parts = [
        f"{stats.generated_tokens} token{'' if stats.generated_tokens == 1 else 's'}",
        f"{_number(stats.generated_tokens_per_s, 1)} tok/s",
        f"first token {_number(stats.time_to_first_token_s, 2)} s",
        *_speculation(stats),
        f"peak memory {size(stats.peak_memory_bytes)}",
    ]
    if generation.finish_reason == "cancelled":
        parts.insert(0, "cancelled")
    return SEPARATOR.join(parts)


def _speculation(stats: Stats) -> list[str]:
    """Write what drafting gave, or why there was none."""
    if stats.speculation != "on":
        return [f"speculation {stats.speculation}"]
    return [
        f"mean accepted {stats.mean_accepted:.2f}",
        f"mean length {stats.mean_length:.2f} (with the target's own token)",
    ]


def _number(value: float, digits: int) -> str:
    """Write a figure; 0 stands for nothing to measure, as where a run ended with its first token."""
    return f"{value:.{digits}f}" if value else "–"


class PrefillBar:
    """A progress bar for the prompt: on a terminal alone, and only where the prefill takes several steps.

    An instance is the callable that ``on_prefill`` takes; leaving its ``with`` block removes the bar.
    """

    def __init__(self, quiet: bool) -> None:
        self._wanted = not quiet and sys.stderr.isatty()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> PrefillBar:
        return self

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` prompt tokens are in the cache."""
        if done >= total:
            self._remove()
        elif self._wanted:
            self._show(done, total)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _show(self, done: int, total: int) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("prompt"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("prompt", total=total)
            self._bar.start()
        self._bar.update(self._task, completed=done)

    def _remove(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class TextWriter:
    """Writes text to stdout as it comes."""

    def __init__(self) -> None:
        self._last = ""
        # A terminal that cannot show a character gets a replacement, not an error in the middle of a text.
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]

    def write(self, text: str) -> None:
        """Write a piece of text at once."""
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()
            self._last = text[-1]

    def finish(self, _generation: Generation | None = None) -> None:
        """End the last line, as text files and shells expect."""
        if self._last not in ("", "\n"):
            self.write("\n")
