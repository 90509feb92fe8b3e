"""What rounds cost on this machine, in seconds by draft length, context and streams: predicted, then measured.

A prediction gives the shape; what is measured corrects it, length by length. A length that was not measured yet takes
the correction of its measured neighbours, a new context that of the nearest one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import pairwise

from .chips import find_chip
from .costs import Costs, Speeds
from .machine import chip, gpu_cores

USUAL_LENGTH = 4  # drafts, for which the two widths of a block are compared beforehand
USUAL_CHIP = "M4 Max"  # whose shape a machine that the table does not have is guessed to share
KEPT = 7  # newest measurements of a cell; their median shrugs off three that a pause of the machine spoilt
FAR = 65536  # tokens of context: the other end of the predictions' lines
BAND = 1024  # tokens of context; the bands double from there


def speeds_here() -> Speeds:
    """What a forward is expected to reach on this machine's chip."""
    here = find_chip(chip(), gpu_cores()) or find_chip(USUAL_CHIP)
    assert here is not None
    return Speeds.of(here)


def first_guess(counted: Costs, speeds: Speeds, most: int) -> RoundCosts:
    """Costs that start from the cost model."""
    return RoundCosts(lambda length, context, streams: counted.round_seconds(speeds, length, context, streams), most)


def cost_of_whole_blocks(counted: Costs, speeds: Speeds, block: int, context: int = BAND) -> float:
    """Seconds of a round with the drafter's whole block over one with a slot per draft, from the same model."""
    at = speeds, min(USUAL_LENGTH, block - 1), context
    return counted.round_seconds(*at, slots=block) / counted.round_seconds(*at)


class RoundCosts:
    """Seconds of a round; learned by all sessions of a pair.

    Args:
        predicted: (draft length, context, streams) -> seconds; only its shape matters once something is measured.
        most: the longest draft length.
    """

    def __init__(self, predicted: Callable[[int, int, int], float], most: int):
        self.most = most
        self._predicted = predicted
        self._newest = 0.0
        self._lines: dict[int, list[tuple[float, float]]] = {}  # streams -> (at no context, per token of it) by length
        self._cells: dict[tuple[int, int], _Cells] = {}

    def saw(self, length: int, context: int, streams: int, seconds: float) -> None:
        """Learn that a round with this draft length took so long; once, though each of its streams tells."""
        if seconds == self._newest:
            return
        self._newest, first = seconds, not self._cells
        self._at(context, streams).add(length, seconds / self._prediction(length, context, streams), trusted=first)

    def seconds(self, context: int, streams: int) -> list[float]:
        """What a round costs with each draft length from 0 on."""
        ratios = self._at(context, streams).ratios
        return [ratio * second for ratio, second in zip(ratios, self._predictions(context, streams), strict=True)]

    def measured(self, length: int, context: int, streams: int) -> int:
        """How many measurements there are of this length, at about this context."""
        return self._at(context, streams).count[length]

    def plain_rounds(self, streams: int) -> int:
        """How many plain rounds of so many streams were measured, at any context."""
        return sum(cells.count[0] for (known, _), cells in self._known_cells() if known == streams)

    def table(self) -> dict[tuple[int, int], list[float]]:
        """(streams, smallest context of the band) -> measured over predicted seconds by length; for a report."""
        return {
            (streams, BAND << (band - 1) if band else 0): list(cells.ratios)
            for (streams, band), cells in self._known_cells()
        }

    def _at(self, context: int, streams: int) -> _Cells:
        """The cells of a context's band; new ones start from the nearest known."""
        key = streams, (context // BAND).bit_length()
        if key not in self._cells:
            found = self._known_cells()
            found.sort(key=lambda item: (abs(item[0][0] - key[0]), abs(item[0][1] - key[1])))
            self._cells[key] = _Cells(found[0][1].ratios if found else [1.0] * (self.most + 1))
        return self._cells[key]

    def _known_cells(self) -> list[tuple[tuple[int, int], _Cells]]:
        """A copy, as sessions in other threads may add some meanwhile."""
        return list(self._cells.items())

    def _predictions(self, context: int, streams: int) -> list[float]:
        """The predictions by draft length, as lines in the context, which they very nearly are."""
        return [near + slope * context for near, slope in self._lines_of(streams)]

    def _prediction(self, length: int, context: int, streams: int) -> float:
        near, slope = self._lines_of(streams)[length]
        return near + slope * context

    def _lines_of(self, streams: int) -> list[tuple[float, float]]:
        if streams not in self._lines:
            lengths = range(self.most + 1)
            near, far = ([self._predicted(length, at, streams) for length in lengths] for at in (0, FAR))
            self._lines[streams] = [(a, (b - a) / FAR) for a, b in zip(near, far, strict=True)]
        return self._lines[streams]


class _Cells:
    """Measured over predicted seconds by draft length, for one band of contexts and one number of streams."""

    def __init__(self, start: Iterable[float]):
        self.start = list(start)
        self.ratios = list(start)
        self.count = [0] * len(self.ratios)
        self._known: dict[int, float] = {}  # draft length -> median over start
        self._samples: list[deque[float]] = [deque(maxlen=KEPT) for _ in self.ratios]

    def add(self, length: int, ratio: float, trusted: bool) -> None:
        """Add a measurement; beside the first stands what was expected, so that one bad one rules no length out."""
        samples = self._samples[length]
        if not samples and not trusted:
            samples.append(self.ratios[length])
        samples.append(ratio)
        self.count[length] += 1
        self._known[length] = sorted(samples)[(len(samples) - 1) // 2] / self.start[length]
        self._fill()

    def _fill(self) -> None:
        """Medians where something was measured; between them and beyond, their change of the start."""
        lengths = sorted(self._known)
        changes = [self._known[lengths[0]]] * lengths[0]
        for a, b in pairwise(lengths):
            step = (self._known[b] - self._known[a]) / (b - a)
            changes += [self._known[a] + step * at for at in range(b - a)]
        changes += [self._known[lengths[-1]]] * (len(self.start) - lengths[-1])
        self.ratios = [start * change for start, change in zip(self.start, changes, strict=True)]
