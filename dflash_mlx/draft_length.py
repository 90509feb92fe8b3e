"""The policy behind `draft_length="auto"`: the smallest integer above the recent mean length.

Source: the rule published with the DFlash-2 drafters. It follows acceptance alone and does not weigh what a round
costs on this machine; a fixed `draft_length` overrides it. With several streams in one forward each stream's block
takes rows from the others': two streams draft half as many tokens, three a third, and from PLAIN_STREAMS on none is
drafted (elsewhere measured for a 30B target at 4 streams: 104 tokens per second plain, 35 to 49 drafted). Its choices
change time, never tokens.
"""

from __future__ import annotations

from collections import deque

from .stats import Round

FIRST = 4  # drafted before anything is known: the length that most published Macs do best with
RECENT = 16  # rounds
PLAIN_STREAMS = 4  # with so many streams plain rows give more tokens per second


class AutoDraftLength:
    """Draft length from the mean committed tokens of the recent drafted rounds."""

    def __init__(self, most: int):
        self._most = most
        self._committed: deque[int] = deque(maxlen=RECENT)

    def next(self, context: int, streams: int = 1) -> int:
        """Tokens to draft in the next round, at most what the block allows.

        Args:
            context: positions that the caches hold.
            streams: how many streams decode in the round's forward.
        """
        if streams >= PLAIN_STREAMS:
            return 0
        mean = sum(self._committed) / len(self._committed) if self._committed else FIRST - 1
        return min(int(mean) + 1, self._most) // streams

    def saw(self, round: Round, context: int, streams: int = 1) -> None:
        """Learn from a round; plain ones say nothing."""
        if round.drafted:
            self._committed.append(round.committed)


class FixedDraftLength:
    """The same length every round."""

    def __init__(self, length: int):
        self._length = length

    def next(self, context: int, streams: int = 1) -> int:
        """The length, whatever the context and however many streams there are."""
        return self._length

    def saw(self, round: Round, context: int, streams: int = 1) -> None:
        """Nothing to learn."""
