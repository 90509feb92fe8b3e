"""The policy behind `draft_length="auto"`: as many drafts as give the most committed tokens per second.

It weighs what rounds cost (`round_costs.py`) against how often drafts are accepted, both learned while decoding.
Drafting nothing is among its choices: where drafting loses it stops, and tries again after a while, each time a longer
one. Streams that share a forward share the choice too, since the rows of all cost together. Whether the drafter is
given its whole block is learned beside (`block_width.py`). Its choices change time, never tokens; a fixed
`draft_length` overrides it.
"""

from __future__ import annotations

from typing import NamedTuple

from .block_width import BlockWidth, tokens
from .round_costs import RoundCosts
from .stats import Round

HOPE = 0.75  # acceptance of a slot before anything is known: that of chat, as published for the 30B pair
MEMORY = 0.95  # weight that the past keeps from one drafted round to the next: about 20 rounds count
RESCALE = 1e9  # weight at which all is scaled back, long before digits are lost
POOLED = 24.0  # rounds that all block widths together count for when one width is judged
LOOK_FIRST, LOOK_MOST = 24, 192  # drafted rounds between two looks at another length
PAUSE_FIRST, PAUSE_MOST = 8, 256  # plain rounds before drafting is tried again
GROWTH = 1.25  # of the pause from one try to the next
YARDSTICK = 2  # plain rounds that are measured before anything is drafted
MARGIN = 0.98  # of the plain rate: below it drafting stops
TRIAL = 2  # rounds of such a try
FADED = 0.25  # weight that older rounds keep in it
SETTLED = 12  # drafted rounds after which a stop has nothing to do with the one before
CARRIED = 4.0  # rounds that the text before counts for when a text begins


class Draft(NamedTuple):
    """How a round drafts: `length` tokens, in the drafter's whole block or in one of just length + 1 slots."""

    length: int
    whole: bool = False


class Acceptance:
    """How often the draft in a slot is accepted when those before it were, by block width; newer rounds weigh more.

    A round's weight grows from one to the next, which is the same as fading all that was seen, and cheaper.
    """

    def __init__(self, most: int, hope: float = HOPE):
        self._weight, self._hope = 1.0, hope
        self._all = _Counts(most)
        self._by_width: dict[int, _Counts] = {}

    def carried_on(self) -> Acceptance:
        """For another text: it starts from what is known here, and soon knows better."""
        other, judged = Acceptance(len(self._all.tries), self._hope), self._all.tries[0]
        if judged:
            other._all.tries, other._all.hits = list(self._all.tries), list(self._all.hits)
            other._all.scale(min(CARRIED / judged, 1 / self._weight))
        return other

    def saw(self, drafted: int, accepted: int) -> None:
        """Learn from a round that drafted something."""
        self.fade(MEMORY)
        for counts in (self._all, self._by_width.setdefault(drafted, _Counts(drafted))):
            for slot in range(min(accepted + 1, drafted)):
                counts.tries[slot] += self._weight
                counts.hits[slot] += self._weight * (slot < accepted)

    def fade(self, weight: float) -> None:
        """Let what was seen so far count less."""
        self._weight /= weight
        if self._weight > RESCALE:
            for counts in (self._all, *self._by_width.values()):
                counts.scale(1 / self._weight)
            self._weight = 1.0

    def shares(self) -> list[float]:
        """How often the draft in each slot is accepted if those before it are; expected, of all widths together."""
        one, share, shares = self._weight, self._hope, []
        for hits, tries in zip(self._all.hits, self._all.tries, strict=True):
            share = (hits + one * share) / (tries + one)  # a slot that was seldom reached is like the one before it
            shares.append(share)
        return shares

    def expected(self) -> list[float]:
        """Tokens that a round with each draft length is expected to commit; 1 for a plain one."""
        shares = self.shares()
        expected, pooled = tokens(shares), POOLED * self._weight
        for width, counts in self._by_width.items():
            run = total = 1.0
            for share, hits, tries in zip(shares, counts.hits, counts.tries, strict=False):
                run *= (hits + pooled * share) / (tries + pooled)
                total += run
            expected[width] = total
        return expected


class _Counts:
    """Weights of the drafts in each slot that were judged, and of those that were accepted."""

    def __init__(self, slots: int):
        self.tries, self.hits = [0.0] * slots, [0.0] * slots

    def scale(self, factor: float) -> None:
        self.tries = [factor * tries for tries in self.tries]
        self.hits = [factor * hits for hits in self.hits]


class Chooser:
    """Chooses the draft length of rounds in which `streams` streams take part, the same for each of them.

    All streams of a round ask, and get one answer; then all tell what the round gave.
    """

    def __init__(self, experience: Experience, streams: int = 1):
        self._experience, self._costs, self._streams = experience, experience.costs, streams
        self._acceptance = experience.latest = experience.latest.carried_on()
        self._choice: Draft | None = None  # for the round that is being asked about
        self._accepted: int | None = None  # drafts in the last round, `None` where nothing was told since
        self._stopped, self._trial = False, 0  # rounds left of the try to draft again
        self._since_trial = 0  # drafted rounds
        self._pause = self._until_trial = float(PAUSE_FIRST)
        self._look, self._until_look, self._looked_at = LOOK_FIRST, LOOK_FIRST, 1  # the last: the best length then

    def next(self, context: int) -> Draft:
        """How to draft in the next round; the length is 0 to the most that the block allows."""
        if self._choice is None:
            rates = self._rates(context)
            if self._accepted is not None:
                self._advance(self._accepted, rates)
            length = self._choose(rates, context)
            whole = self._experience.width.next(length, may_look=self._streams == 1)  # else all pay for one look
            self._choice, self._accepted = Draft(length, whole), None
        return self._choice

    def saw(self, round: Round, context: int) -> None:
        """Learn what a round gave to one of its streams."""
        length, width = _mean_length(round, self._costs.most), self._experience.width
        if round.drafted and width.is_look(round.drafted, round.slots):
            if length is not None:
                shares, seconds = self._acceptance.shares(), self._costs.seconds(context, self._streams)
                width.saw(round.drafted, round.accepted, shares, round.total_s / seconds[length])
                width.judge(shares, seconds)
        else:
            if length is not None:
                self._costs.saw(length, context, self._streams, round.total_s)
            if round.drafted:
                self._acceptance.saw(round.drafted, round.accepted)
        self._accepted = (self._accepted or 0) + round.accepted
        self._choice = None

    def _rates(self, context: int) -> list[float]:
        """Tokens per second that each draft length is expected to give a stream."""
        expected, seconds = self._acceptance.expected(), self._costs.seconds(context, self._streams)
        return [tokens / time for tokens, time in zip(expected, seconds, strict=True)]

    def _advance(self, accepted: int, rates: list[float]) -> None:
        """Count the round that is over, and begin, judge or end a try to draft again."""
        self._until_look -= 1
        self._since_trial += 1
        if self._trial:
            self._trial = self._trial - 1 if accepted else 0
            if max(rates[1:]) > rates[0]:
                self._stopped, self._trial, self._since_trial = False, 0, 0
            elif not self._trial:
                self._pause = min(GROWTH * self._pause, PAUSE_MOST)
                self._until_trial = self._pause
        elif self._stopped:
            self._until_trial -= 1
            if self._until_trial <= 0:
                self._trial = TRIAL
                self._acceptance.fade(FADED)

    def _choose(self, rates: list[float], context: int) -> int:
        if self._costs.plain_rounds(self._streams) < YARDSTICK:
            return 0
        if self._trial:
            return _longest_hoped_for(self._costs.seconds(context, self._streams))
        best = max(range(1, len(rates)), key=rates.__getitem__)
        if rates[best] <= MARGIN * rates[0] and not self._stopped:
            # The pause is a longer one where the last was not long ago.
            self._pause = float(PAUSE_FIRST) if self._since_trial >= SETTLED else min(GROWTH * self._pause, PAUSE_MOST)
            self._stopped, self._until_trial = True, self._pause
        if self._stopped:
            return 0
        return self._another(best, context) if self._until_look <= 0 else best

    def _another(self, best: int, context: int) -> int:
        """Once in a while, the least measured of: some more, a draft less, nothing."""
        self._look = LOOK_FIRST if best > self._looked_at else min(self._look * 3 // 2, LOOK_MOST)
        self._until_look, self._looked_at = self._look, best
        near = min(best + 1 + best // 4, self._costs.most), best - 1, 0
        return min(near, key=lambda k: self._costs.measured(k, context, self._streams))


class Experience:
    """What the sessions of a pair share: what rounds cost, the latest text's acceptance, choices for several streams.

    Args:
        costs: predicted, or measured by `tune`.
        hope: acceptance of a slot before anything is known of a text.
        width: of the drafter's blocks; by default it stays at k + 1 slots.
    """

    def __init__(self, costs: RoundCosts, hope: float = HOPE, width: BlockWidth | None = None):
        self.costs, self.width = costs, width or BlockWidth(0)
        self.latest = Acceptance(costs.most, hope)  # of the text that began last
        self._together: dict[int, Chooser] = {}

    def together(self, streams: int) -> Chooser:
        """Chooses for rounds of so many streams."""
        if streams not in self._together:
            self._together[streams] = Chooser(self, streams)
        return self._together[streams]


class AutoDraftLength:
    """The draft length of one stream.

    Args:
        experience: of the pair; what this stream measures goes there too.
    """

    def __init__(self, experience: Experience):
        self._experience = experience
        self._alone = Chooser(experience)

    def next(self, context: int, streams: int = 1) -> Draft:
        """How to draft in the next round; the length is 0 to the most that the block allows.

        Args:
            context: positions that the caches hold.
            streams: how many streams decode in the round's forward.
        """
        return self._chooser(streams).next(context)

    def saw(self, round: Round, context: int, streams: int = 1) -> None:
        """Learn from a round; arguments as for `next`."""
        self._chooser(streams).saw(round, context)

    def _chooser(self, streams: int) -> Chooser:
        return self._alone if streams == 1 else self._experience.together(streams)


def _longest_hoped_for(seconds: list[float]) -> int:
    """The draft length to try where the text may have become as easy as hoped."""
    best, best_rate, tokens = 1, 0.0, 1.0
    for length in range(1, len(seconds)):
        tokens += HOPE**length
        if tokens / seconds[length] > best_rate:
            best, best_rate = length, tokens / seconds[length]
    return best


def _mean_length(round: Round, most: int) -> int | None:
    """Mean drafts per stream in the round's forward; `None` where another stream's prompt went with it."""
    if round.prompt_rows:
        return None
    length = -(-round.rows // round.streams) - 1  # rounded up: a plain round is one in which nobody drafts
    return length if length <= most else None


class FixedDraftLength:
    """The same length every round, and the same width of the block."""

    def __init__(self, length: int, whole: bool = False):
        self._draft = Draft(length, whole)

    def next(self, context: int, streams: int = 1) -> Draft:
        """The length, whatever the context and however many streams there are."""
        return self._draft

    def saw(self, round: Round, context: int, streams: int = 1) -> None:
        """Nothing to learn."""
