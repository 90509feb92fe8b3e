"""What a generation has handed out: tokens and text, cut exactly at its end."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .text import TextStream

STOP, LENGTH, CANCELLED = "stop", "length", "cancelled"


class Output:
    """Collects tokens until an end token, a stop string or the limit.

    Args:
        text: decodes the tokens.
        ends: ids that end the generation; they are tokens of it and no text.
        limit: most tokens.

    Attributes:
        tokens: all tokens taken.
        finish_reason: "stop" or "length" once the end was met, else `None`.
    """

    def __init__(self, text: TextStream, ends: Collection[int], limit: int):
        self._text, self._ends, self._limit = text, ends, limit
        self.tokens: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None

    @property
    def wanted(self) -> int:
        """How many more tokens may come."""
        return self._limit - len(self.tokens)

    def take(self, tokens: Sequence[int]) -> list[int]:
        """Take tokens up to the end; returns those taken. What comes after the end does not exist."""
        taken: list[int] = []
        for token in tokens:
            taken.append(token)
            self.tokens.append(token)
            if token in self._ends or self._text.add(token):
                self.finish_reason = STOP
            elif not self.wanted:
                self.finish_reason = LENGTH
            if self.finish_reason:
                break
        return taken

    def new_text(self) -> str:
        """The text that is new and can no longer change; after the end, all that is left."""
        text = self._text.finish() if self.finish_reason else self._text.take()
        self.text += text
        return text

    def cancel(self) -> None:
        """End here; the text that was held back is handed out."""
        if self.finish_reason is None:
            self.finish_reason = CANCELLED
        self.new_text()
