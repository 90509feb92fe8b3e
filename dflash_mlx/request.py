"""A request in an engine, the store that it may take a state from, and how prompts share the rows of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .errors import EngineError, must
from .state import State
from .stream import Stream
from .ticket import Channel


class Store(Protocol):
    """Keeps states from one request to the next; called on the engine's thread only."""

    def take(self, tokens: Sequence[int]) -> State:
        """A state for a prompt: nobody else may use it until it is put back."""

    def put(self, state: State) -> None:
        """Take back a state when its request has ended; it is evaluated."""


@dataclass(eq=False)
class Request:
    """A request in the engine.

    Attributes:
        state: given by the caller, forked from the leader's or taken from the store; `None` for a new one.
        given, taken: the state is the caller's, or the store's, and goes back there.
        nbytes: what its caches will take at most.
        leader: the answer to the same prompt whose prefill this one waits for.
        started: when it left the queue.
    """

    stream: Stream
    nbytes: int
    state: State | None = None
    given: bool = False
    taken: bool = False
    leader: Request | None = None
    channel: Channel = field(default_factory=Channel)
    started: float = 0.0


def failure(error: Exception) -> EngineError:
    """The error of a request whose step failed, with its cause."""
    text = must("engine", "a step", "possible", f"{type(error).__name__}: {error}", "Send the request again.")
    found = EngineError(text)
    found.__cause__ = error
    return found


def shares(waiting: dict[int, int], rows: int) -> dict[int, int]:
    """Share `rows` among prompts: equal pieces, and what a short prompt leaves over goes to the others.

    Args:
        waiting: tokens that wait, by prompt.
        rows: at least as many as there are prompts that wait.
    """
    pieces, left = {}, sum(tokens > 0 for tokens in waiting.values())
    for key, tokens in sorted(waiting.items(), key=lambda item: item[1]):
        pieces[key] = min(tokens, rows // left) if tokens else 0
        rows, left = rows - pieces[key], left - (tokens > 0)
    return pieces
