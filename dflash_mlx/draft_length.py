"""The policy behind `draft_length="auto"`: the smallest integer above the recent mean length.

Source: the rule published with the DFlash-2 drafters. It follows acceptance alone and does not weigh what a round
costs on this machine; a fixed `draft_length` overrides it. Its choices change time, never tokens.
"""

from __future__ import annotations

from collections import deque

FIRST = 4  # drafted before anything is known: the length that most published Macs do best with
RECENT = 16  # rounds


class AutoDraftLength:
    """Draft length from the mean committed tokens of the recent drafted rounds."""

    def __init__(self, most: int):
        self._most = most
        self._committed: deque[int] = deque(maxlen=RECENT)

    def next(self) -> int:
        """Tokens to draft in the next round, 1 to the most that the block allows."""
        if not self._committed:
            return min(FIRST, self._most)
        return min(int(sum(self._committed) / len(self._committed)) + 1, self._most)

    def saw(self, drafted: int, committed: int) -> None:
        """Learn from a round; plain ones say nothing."""
        if drafted:
            self._committed.append(committed)


class FixedDraftLength:
    """The same length every round."""

    def __init__(self, length: int):
        self._length = length

    def next(self) -> int:
        return self._length

    def saw(self, drafted: int, committed: int) -> None:
        """Nothing to learn."""
