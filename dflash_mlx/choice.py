"""The target's choice at a position, and the drafter's proposal for it; greedy is the case without noise.

The choice at position p is argmax_v(log P_p(v) / temperature + g_p(v)) over the tokens that the filters keep,
with Gumbel noise g_p drawn from a key that depends on (seed, choice index, p) alone. That is an exact sample of
the filtered P_p (the Gumbel-max identity, Gumbel 1954), and it does not depend on what was drafted.
Letters: M rows, V vocabulary, N kept tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

from .filters import Kept, keep
from .noise import gumbel, position_keys, uniform
from .options import Options
from .processors import Guide, Processors
from .slots import Slots, walk

if TYPE_CHECKING:
    from .state import HostReads


@dataclass(frozen=True)
class ProposalRule:
    """How a drafter's logits become a proposal: argmax(log Q / τ + g), with the target's own noise g.

    Any rule is lossless; it decides only how often target and drafter agree. The default was chosen by measurement:
    docs/sampling.md has the table, bench/proposal_rules.py makes it.

    Attributes:
        c: τ as a multiple of the temperature; 0 is the drafter's argmax.
        multiplied: Q from logits times the target's output multiplier, as P's are; else from raw head logits.
    """

    c: float = 1.0
    multiplied: bool = False


PROPOSAL = ProposalRule()
GUIDED_CANDIDATES = 32  # of a drafted row; not chosen by a measurement


class Choice:
    """Chooses tokens for one generation.

    Args:
        options: of the generation.
        seed: of the noise.
        index: which answer to one request this is, 0 for the only one.
        rule: for proposals.
    """

    def __init__(self, options: Options, seed: int, index: int = 0, rule: ProposalRule = PROPOSAL):
        self.options, self.seed, self.index, self.rule = options, seed, index, rule
        self._processors = Processors(options.logits_processors)
        self._guide = next((each for each in options.logits_processors if isinstance(each, Guide)), None)
        self._shared: tuple[int, mx.array, mx.array] | None = None  # position of the first row, its uniform and noise

    @property
    def reads_drafts(self) -> bool:
        """Whether the host must see the drafts before the target chooses: a user's processor may read them."""
        return len(self._processors) > 0

    def target(
        self, logits: mx.array, position: int, history: Sequence[int], drafted: mx.array | None = None
    ) -> mx.array:
        """The target's own tokens for consecutive positions.

        Args:
            logits: [M, V] float32, row i scoring position + i.
            position: of row 0.
            history: the committed tokens, all before `position`.
            drafted: [M-1], what row i has in its history beyond the committed tokens: the first i of it.
        Returns:
            [M] uint32, for `confirmed` once the host has read them. Lazy.
        """
        codes = None
        if len(self._processors):
            logits, codes = self._processors(logits, history, drafted)
        logits = self._penalised(self._biased(logits), history, drafted)
        chosen = self._scores(logits, position, self.options.temperature).best()
        self._shared = None
        self._vocab = logits.shape[-1]
        return chosen if codes is None else mx.where(codes > 0, self._vocab - 1 + codes, chosen)

    def confirmed(self, tokens: Sequence[int]) -> list[int]:
        """The target's tokens up to the first one where a processor failed.

        Raises:
            ProcessorError: that is the first of them all.
        """
        good = [token for token in tokens if token < self._vocab]
        if not good:
            raise self._processors.failure(tokens[0] - self._vocab + 1)
        return good

    def proposal(self, slots: Slots, position: int, history: Sequence[int], reads: HostReads | None = None) -> mx.array:
        """The drafter's tokens for consecutive positions.

        Args:
            slots: what the drafter says, row i about position + i.
            position: of row 0.
            history: the committed tokens.
            reads: the host's; a guide among the processors makes one.
        Returns:
            [M] uint32. Lazy, but for a guide's.
        """
        logits, temperature = slots.logits, self.options.temperature * self.rule.c
        if self.rule.multiplied and slots.multiplier != 1:
            logits = logits * slots.multiplier
        logits = self._penalised(self._biased(logits), history, None)
        scores = self._scores(logits, position, temperature, spare=1)
        if self._guide is not None:
            assert reads is not None
            return _guided(self._guide, scores, history, reads)
        if slots.transitions is None:
            return scores.best()
        ids, scored = scores.largest(slots.candidates)
        transitions = slots.transitions(ids)
        path = walk(scored, transitions if temperature == 0 else transitions * _factor(temperature))
        return mx.take_along_axis(ids, path[:, None], axis=-1)[:, 0]

    def _biased(self, logits: mx.array) -> mx.array:
        bias = self.options.logit_bias
        if not bias:
            return logits
        return logits.at[:, mx.array(list(bias))].add(mx.array(list(bias.values()), dtype=mx.float32))

    def _penalised(self, logits: mx.array, history: Sequence[int], drafted: mx.array | None) -> mx.array:
        """Repetition penalty over the newest tokens before each row (Keskar et al. 2019)."""
        penalty, rows = self.options.repetition_penalty, logits.shape[0]
        if penalty == 1:
            return logits
        context = min(self.options.repetition_context, len(history) + rows)
        recent = mx.array(list(history[-context:]), dtype=mx.uint32)
        width = recent.shape[0]
        if drafted is None:
            seen = mx.broadcast_to(recent[None], (rows, width))
        else:
            # Row i sees the newest `context` of history + drafted[:i]; a short history grows with the row, and the
            # first token stands in for the rows it has not got: penalising a token twice changes nothing.
            known = mx.concatenate([mx.full((context - width,), history[0], dtype=mx.uint32), recent, drafted])
            seen = known[mx.arange(rows)[:, None] + mx.arange(context)[None]]
        picked = mx.take_along_axis(logits, seen, axis=-1)
        picked = mx.where(picked < 0, picked * penalty, picked / penalty)
        return mx.put_along_axis(logits, seen, picked, axis=-1)

    def _scores(self, logits: mx.array, position: int, temperature: float, spare: int = 0) -> Kept:
        """What is compared: the logits, or the filtered logits over the temperature plus the noise."""
        if temperature == 0:
            return Kept(logits, None)
        # From the maximum down: so a temperature tending to 0 tends to the argmax, and what was dropped stays dropped.
        kept = keep(logits - mx.max(logits, axis=-1, keepdims=True), self.options)
        rows, vocab = logits.shape
        noise = self._noise(kept, position, rows, vocab, spare)
        return Kept(kept.below * _factor(temperature) + noise, kept.ids)

    def _noise(self, kept: Kept, position: int, rows: int, vocab: int, spare: int) -> mx.array:
        """The kept tokens' noise, [M, N]; a proposal's is kept for the target, which wants one row more (`spare`)."""
        if self._shared is None or self._shared[0] != position or self._shared[1].shape[0] < rows:
            minus_u = uniform(self._keys(position, rows + spare), vocab)
            self._shared = (position, minus_u, gumbel(minus_u))
        _, minus_u, noise = self._shared
        return noise[:rows] if kept.ids is None else gumbel(kept.take(minus_u[:rows]))

    def _keys(self, position: int, rows: int) -> mx.array:
        return position_keys(self.seed, self.index, position, rows)


def _factor(temperature: float) -> float:
    """1 / temperature, finite and not 0: a temperature without bounds tends to the noise alone."""
    return min(max(1 / temperature, 1e-30), 1e30)


def _guided(guide: Guide, scores: Kept, history: Sequence[int], reads: HostReads) -> mx.array:
    """What a guide picks of each row's likeliest tokens; the host waits here, not where it reads the drafts."""
    ids, scored = scores.largest(GUIDED_CANDIDATES)
    ids = mx.take_along_axis(ids, mx.argsort(-scored, axis=-1), axis=-1)
    read, width = reads.read(ids.reshape(-1)), ids.shape[-1]
    rows = [read[begin : begin + width] for begin in range(0, len(read), width)]
    return mx.array(guide.choose(history, rows), dtype=mx.uint32)
