"""The prefix store: the states of ended requests, kept in a budget of bytes for prompts that begin alike.

A state is handed out to one request at a time. A prompt that goes on from a state's newest turn takes it; one that
shares only an older part (a system prompt that several chats have) gets a copy that goes its own way.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .errors import InputError, must
from .pair import Pair
from .state import State


@dataclass
class StoreFigures:
    """Counts since the start, and what is held now.

    Attributes:
        taken: states asked for.
        hits: of these, how many held a part of the prompt.
        forked: of the hits, how many were copies.
        reused_tokens, asked_tokens: tokens of the prompts that were held; all their tokens.
        evicted: states dropped for the budget.
        states, nbytes: kept now and not in use.
        in_use: handed out and not yet put back.
    """

    taken: int = 0
    hits: int = 0
    forked: int = 0
    reused_tokens: int = 0
    asked_tokens: int = 0
    evicted: int = 0
    states: int = 0
    nbytes: int = 0
    in_use: int = 0


class PrefixStore:
    """Keeps states from one request to the next. Its methods may be called from any thread.

    Args:
        pair: from `load`.
        budget: bytes that the kept states may take; those in use are not counted, and never dropped.
    """

    def __init__(self, pair: Pair, budget: int):
        if not isinstance(budget, int) or isinstance(budget, bool) or budget < 0:
            raise InputError(must("store", "budget", "bytes, at least 0", repr(budget), "Correct the argument."))
        self.pair, self.budget = pair, budget
        self._states: list[State] = []  # the least recently used first
        self._lock = threading.Lock()
        self._figures = StoreFigures()

    def take(self, tokens: Sequence[int]) -> State:
        """The state that holds most of a prompt, or a new one; it belongs to the caller until it is `put` back."""
        with self._lock:
            best, held = None, 0
            for state in reversed(self._states):  # of equals the most recently used
                position = state.reachable(state.shared(tokens), len(tokens))
                if position > held:
                    best, held = state, position
            figures = self._figures
            figures.taken, figures.asked_tokens = figures.taken + 1, figures.asked_tokens + len(tokens)
            figures.reused_tokens, figures.in_use = figures.reused_tokens + held, figures.in_use + 1
            if best is None:
                return State(self.pair)
            figures.hits += 1
            self._states.remove(best)
            if held >= best.turn_start:
                return best
            figures.forked += 1
            self._states.append(best)  # it was used, so it is not the next to go
            return best.fork()

    def put(self, state: State) -> None:
        """Take a state back; the least recently used ones go where the budget asks for it."""
        with self._lock:
            self._figures.in_use = max(0, self._figures.in_use - 1)
            if state.tokens and state not in self._states:
                self._states.append(state)
            while self._states and self._nbytes() > self.budget:
                del self._states[0]
                self._figures.evicted += 1

    def clear(self) -> None:
        """Drop all that is kept."""
        with self._lock:
            self._states.clear()

    def figures(self) -> StoreFigures:
        """The counts as they are now."""
        with self._lock:
            return replace(self._figures, states=len(self._states), nbytes=self._nbytes())

    def _nbytes(self) -> int:
        return sum(state.nbytes for state in self._states)
