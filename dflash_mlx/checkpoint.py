"""Checkpoints: positions of a history that a session can go back to after its rings have moved on.

A checkpoint is a position first, and costs nothing while the rings still hold the window before it. Only when a
forward is about to overwrite that window are the rows copied: the window, not the ring. Full layers need no copy, as
their rows stay where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import mlx.core as mx

from .cache import History

MOST_CHECKPOINTS = 4  # of a session; more would rarely be used, and each costs about half of the rings
SLACK_ROWS = 16  # a checkpoint also serves the positions just before its own: an exact repeat, another tokenisation


class Window(NamedTuple):
    """Ring rows of one cache, copied.

    Attributes:
        first: the position of the oldest row.
        copies: as `History.ring_copies` gives them.
    """

    first: int
    copies: list[mx.array]


@dataclass
class Checkpoint:
    """One position, and what has been copied for it.

    Attributes:
        position: rows held when one goes back to it.
        windows: one for each cache, `None` where nothing was copied.
    """

    position: int
    windows: list[Window | None] = field(default_factory=lambda: [None, None])

    def window(self, cache: int, history: History, position: int) -> Window | None:
        """The copied window that lets this cache go back to `position`, if there is one."""
        window = self.windows[cache]
        reaches = window is not None and window.first <= max(0, position - history.window)
        return window if reaches and position <= self.position else None


class Checkpoints:
    """The checkpoints of one session, oldest first.

    Args:
        most: how many are kept. Where there are more, the one goes that costs least to compute again: it follows
            most closely on the one before it. The newest always stays.
    """

    def __init__(self, most: int = MOST_CHECKPOINTS):
        self.most = most
        self.points: list[Checkpoint] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(copy.nbytes for point in self.points for window in point.windows if window for copy in window.copies)

    @property
    def positions(self) -> list[int]:
        return [point.position for point in self.points]

    def mark(self, position: int, histories: Sequence[History]) -> None:
        """Remember a position, the newest of all; it makes those superfluous that lie just before it."""
        if position == 0 or (self.points and self.points[-1].position == position):
            return
        oldest = [max(0, position - history.window - SLACK_ROWS) for history in histories]
        if all(history.start <= first for history, first in zip(histories, oldest, strict=True)):
            self.points = [point for point in self.points if point.position < position - SLACK_ROWS]
        self.points.append(Checkpoint(position))
        while len(self.points) > max(0, self.most):
            before = [0, *self.positions]
            gaps = [own - previous for own, previous in zip(self.positions[:-1], before, strict=False)]
            del self.points[gaps.index(min(gaps)) if gaps else 0]

    def secure(self, histories: Sequence[History], lost_below: Sequence[int]) -> list[mx.array]:
        """Copy the windows that are about to be overwritten, lazily; returns the copies, to be evaluated soon.

        Args:
            histories: the session's caches.
            lost_below: for each, the position below which rows may be gone after the next forward.
        """
        copies: list[mx.array] = []
        for cache, (history, bound) in enumerate(zip(histories, lost_below, strict=True)):
            for point in self.points:
                first = max(0, point.position - history.window - SLACK_ROWS)
                held = history.can_trim_to(point.position)
                if point.windows[cache] is None and held and bound > first:
                    first = max(history.start, first)
                    window = Window(first, history.ring_copies(first, point.position))
                    point.windows[cache] = window
                    copies += window.copies
        return copies

    def window(self, cache: int, history: History, position: int) -> Window | None:
        """A copied window that lets the cache go back to `position`."""
        found = (point.window(cache, history, position) for point in self.points)
        return next((window for window in found if window), None)

    def go_back(self, position: int, target: History) -> None:
        """Forget the checkpoints past `position`; one that reaches down to it stays, as one of `position`."""
        kept = [point for point in self.points if point.position <= position]
        if not (kept and kept[-1].position == position):
            later = (point for point in self.points if point.position > position)
            reaching = (point for point in later if point.window(0, target, position))
            kept += [replace(point, position=position) for point in reaching][:1]
        self.points = kept

    def fork(self) -> Checkpoints:
        """The same checkpoints once more; copied rows are never written, so both share them."""
        other = Checkpoints(self.most)
        other.points = [replace(point, windows=list(point.windows)) for point in self.points]
        return other
