"""What the cost model predicts for a run, from its own rounds: shown beside what was measured, and labelled so."""

from __future__ import annotations

from itertools import accumulate

from ..chips import find_chip
from ..costs import Speeds
from ..machine import chip, gpu_cores
from ..pair import Pair
from ..stats import Stats

MODEL = "cost model: bandwidth and arithmetic of the chip, dflash_mlx/costs.py"


class Predictor:
    """Predicts the speed of one pair on this machine; it has nothing to say on a chip that the table does not know."""

    def __init__(self, pair: Pair):
        found = find_chip(chip(), gpu_cores())
        self._speeds = Speeds.of(found) if found else None
        self._costs = pair.costs

    def tokens_per_s(self, stats: Stats) -> float | None:
        """Give committed tokens per predicted second, for the rounds as they were drafted and accepted."""
        if self._speeds is None or not stats.rounds:
            return None
        committed = [round_.committed for round_ in stats.rounds]
        contexts = [stats.prompt_tokens + before for before in (0, *accumulate(committed[:-1]))]
        seconds = sum(
            self._costs.round_seconds(self._speeds, round_.drafted, context)
            for round_, context in zip(stats.rounds, contexts, strict=True)
        )
        return sum(committed) / seconds
