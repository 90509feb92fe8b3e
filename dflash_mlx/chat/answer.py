"""The model's tokens, read into reasoning, text and tool calls while they come.

An answer is one message or several: `[<|start|>assistant] to=RECIPIENT<|message|>BODY<|eom|>`, the first without the
start, which the prompt ends with. What goes to `self` is reasoning; blocks of calls are calls; the rest is text. The
markers are found by their ids, so neither a marker cut into pieces nor one spelled out by ordinary tokens can be
mistaken.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..text import TextStream
from .calls import Call, CallReader, Found, Refused
from .markers import Markers

REASONING, TEXT = "reasoning", "text"
BETWEEN = "\n\n"  # stands between two messages of one kind
MOST_HEADER_TOKENS = 64  # more than that before `<|message|>` is no header
RECIPIENT = re.compile(r"(?:^|\s)to=(\S+)")
CUT = "the answer was cut off before the call was complete"
ENDED = "the message ended before the call was complete"


@dataclass(frozen=True)
class Piece:
    """One piece of an answer: text of a kind, or a call.

    Attributes:
        kind: "reasoning" or "text"; of no matter where there is a call.
        problem: why text is text, where it should have been something else.
    """

    kind: str
    text: str = ""
    call: Call | None = None
    problem: str | None = None


@dataclass
class Answer:
    """A whole answer, collected from its pieces."""

    reasoning: str = ""
    text: str = ""
    calls: list[Call] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, pieces: Sequence[Piece]) -> None:
        """Take the next pieces."""
        for piece in pieces:
            if piece.call:
                self.calls.append(piece.call)
            elif piece.kind == REASONING:
                self.reasoning += piece.text
            else:
                self.text += piece.text
            if piece.problem:
                self.problems.append(piece.problem)


class AnswerReader:
    """Reads an answer token by token.

    Args:
        tokenizer: mlx-lm's wrapper; without the layout's markers all tokens are text.
        ends: ids that end the generation; they are no text.
        schemas: tool -> JSON schema of its parameters; `None` where no tools were given: then nothing is a call.
        stops: strings that end the answer before them where the text (not the reasoning, not a call) comes to them.

    Attributes:
        stopped: a stop string was met; no later token counts.
        count: tokens taken, up to the one that completed a stop string.
        thought: of these, tokens of reasoning.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        ends: Collection[int],
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
        stops: Sequence[str] = (),
    ):
        self._tokenizer, self._ends, self._schemas, self._stops = tokenizer, frozenset(ends), schemas, tuple(stops)
        self._markers = Markers.of(tokenizer)
        self._header: list[int] | None = []  # tokens of the header being read; `None` inside a body
        self._prefix = "assistant"  # what the prompt wrote of the header
        self._pieces: list[Piece] = []
        self._told: set[str] = set()  # kinds that have had text
        self.stopped, self.count, self.thought = False, 0, 0
        if self._markers is None:
            self._begin("user")

    def feed(self, tokens: Sequence[int]) -> list[Piece]:
        """Take the next tokens; returns the pieces that are new and certain."""
        for token in tokens:
            if self.stopped:
                break
            self.count += 1
            self._token(token)
        if self._header is None:
            self._take(self._stream.take())
        return self._given()

    def finish(self, cut: bool = False) -> list[Piece]:
        """The answer is over; returns the rest.

        Args:
            cut: by `max_tokens` or a cancel, not by the model.
        """
        self._end(CUT if cut else ENDED)
        return self._given()

    def _token(self, token: int) -> None:
        markers = self._markers
        if token in self._ends or (markers and token in (markers.start, markers.end_of_message, markers.end_of_turn)):
            self._end(ENDED)
        elif markers and token == markers.message:
            if self._header is None:
                self._take(self._stream.take())
                self._pieces.append(Piece(TEXT, problem="a second <|message|> stood inside a message"))
            else:
                self._begin_after_header()
        elif self._header is None:
            self.thought += self._kind == REASONING
            self.stopped = self._stream.add(token)
        else:
            self._header.append(token)
            if len(self._header) > MOST_HEADER_TOKENS:
                self._headless()

    def _begin_after_header(self) -> None:
        header = self._decoded(self._header or [])
        role = self._prefix or "".join(header.split(maxsplit=1)[:1])
        recipients = RECIPIENT.findall(header)
        self._begin(recipients[-1] if recipients else "user")
        if role != "assistant":
            self._pieces.append(Piece(TEXT, problem=f"a message of {role or 'nobody'} and not of the assistant"))

    def _begin(self, recipient: str) -> None:
        """A body begins."""
        self._header, self._prefix = None, ""
        self._kind = REASONING if recipient == "self" else TEXT
        self._recipient = recipient
        self._calls = CallReader(self._schemas) if self._schemas is not None and self._kind == TEXT else None
        self._stream = TextStream(self._tokenizer, self._stops if self._kind == TEXT else ())
        self._fresh = True

    def _headless(self) -> None:
        """What was read is no header: it is text."""
        tokens, self._header = self._header or [], []
        if not self._decoded(tokens).strip():
            return
        self._begin("user")
        self._pieces.append(Piece(TEXT, problem="text without <|message|> before it"))
        for token in tokens:
            self.stopped = self.stopped or self._stream.add(token)

    def _end(self, why: str) -> None:
        """A message ends, or what might have become its header."""
        if self._header is not None:
            self._headless()
        if self._header is None:
            self._take(self._stream.finish())
            if self._calls:
                for found in self._calls.finish(why):
                    self._deliver(found)
                if not self._calls.calls and self._recipient not in ("user", "commentary"):
                    problem = f"a message to {self._recipient} without a call"
                    self._pieces.append(Piece(TEXT, problem=problem))
        self._header, self._prefix = [], ""

    def _take(self, text: str) -> None:
        for found in self._calls.feed(text) if self._calls else [text]:
            self._deliver(found)

    def _deliver(self, found: Found) -> None:
        if isinstance(found, Call):
            self._pieces.append(Piece(TEXT, call=found))
            return
        text, problem = (found.text, found.reason) if isinstance(found, Refused) else (found, None)
        if not text:
            return
        if self._fresh and self._kind in self._told:
            text = BETWEEN + text
        self._fresh = False
        self._told.add(self._kind)
        self._pieces.append(Piece(self._kind, text, problem=problem))

    def _given(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _decoded(self, tokens: Sequence[int]) -> str:
        if not tokens or self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))
