"""Whether the drafter is given its whole block, or one of just the k + 1 slots that a draft of k tokens needs.

The slots of a block see one another, and a drafter is trained on whole blocks: in shorter ones it may guess worse. A
whole block costs the operations of all its slots. Which gives more is the drafter's and the machine's nature, not the
text's: so all texts of a pair are counted together. Once in a while a round of a stream that is alone is drafted the
other way, and what it gave and took is set against what is expected of a round that is drafted as usual.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

LOOK_FIRST, LOOK_MOST = 16, 192  # drafted rounds between two looks at the other width
GROWTH = 1.1  # of that number from look to look
DOUBT = 16.0  # accepted drafts that the first guess counts for: that in the other width as many are accepted
GAIN = 1.03  # of the tokens per second: less is not worth a change
KEPT = 15  # newest looks whose time is kept; their median shrugs off pauses of the machine


class BlockWidth:
    """Chooses the width of blocks for the sessions of a pair.

    Args:
        block: slots of the drafter's whole block; 0 for a drafter that is never given it.
        cost: seconds of a round with a whole block over one with k + 1 slots, predicted.
        gain: how often a draft is accepted in such rounds, likewise.
        whole: what to begin with.

    Attributes:
        whole: whether blocks are whole ones, looks apart.
    """

    def __init__(self, block: int, cost: float = 1.0, gain: float = 1.0, whole: bool = False):
        self._block, self.whole = block, whole
        self._seconds: list[float] = []
        self._begin(*((1 / cost, 1 / gain) if whole else (cost, gain)))
        self._every = float(LOOK_FIRST)
        self._until_look = LOOK_FIRST

    def next(self, length: int, may_look: bool = True) -> bool:
        """Whether the next round's block is a whole one."""
        if not length or length + 1 >= self._block:
            return False
        if not may_look:
            return self.whole
        self._until_look -= 1
        if self._until_look > 0:
            return self.whole
        self._every = min(GROWTH * self._every, LOOK_MOST)
        self._until_look = round(self._every)
        return not self.whole

    def is_look(self, length: int, slots: int) -> bool:
        """Whether a round of so many slots was drafted the other way."""
        return length + 1 < self._block and (slots > length + 1) != self.whole

    def saw(self, length: int, accepted: int, shares: Sequence[float], seconds: float) -> None:
        """Learn from a look.

        Args:
            length: tokens drafted in it.
            accepted: of these.
            shares: how often each slot is expected to be accepted, if those before it are, in the usual width.
            seconds: that the round took, over what is expected in the usual width.
        """
        self._hits += accepted
        self._expected += sum(shares[: min(accepted + 1, length)])
        self._seconds = [*self._seconds, seconds][-KEPT:]

    def judge(self, shares: Sequence[float], seconds: Sequence[float]) -> None:
        """Change the usual width where the other gives more tokens per second.

        Args:
            shares: as in `saw`.
            seconds: of a round with each draft length from 0 on, in the usual width.
        """
        gain, cost = self._hits / self._expected, median(self._seconds)
        other = tokens([min(1.0, gain * share) for share in shares])
        if _best(other, seconds) > GAIN * cost * _best(tokens(shares), seconds):
            self.whole = not self.whole
            self._begin(1 / cost, 1 / gain)

    def _begin(self, cost: float, gain: float) -> None:
        """Know of the other width what was predicted, or found when it was the usual one."""
        self._hits, self._expected, self._seconds = DOUBT * gain, DOUBT, [cost]


def tokens(shares: Sequence[float]) -> list[float]:
    """Tokens that a round with each draft length commits, where drafts are accepted so often; 1 for a plain one."""
    run = total = 1.0
    expected = [1.0]
    for share in shares:
        run *= share
        total += run
        expected.append(total)
    return expected


def _best(expected: Sequence[float], seconds: Sequence[float]) -> float:
    """Tokens per second of the best draft length above 0."""
    return max(each / time for each, time in zip(expected[1:], seconds[1:], strict=True))
