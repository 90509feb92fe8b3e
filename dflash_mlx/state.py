"""One session's state: tokens, the target's cache, the drafter's context. All rollback is here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import copy

import mlx.core as mx

from .cache import DrafterContext, TargetCache
from .pair import Pair

BACKLOG_ROWS = 64  # rows decoded without drafting are projected for the drafter in batches of this


class HostReads:
    """The only place where the host waits for the device; it counts how often, and for how many seconds."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0

    def read(self, array: mx.array, along: Sequence[mx.array] = ()) -> list[int]:
        """Evaluate `array` [N] together with `along`, and give its numbers to the host."""
        started = time.perf_counter()
        numbers = array.astype(mx.int32)
        mx.eval(numbers, *along)
        values: list[int] = numbers.tolist()  # type: ignore[assignment]
        self.count += 1
        self.seconds += time.perf_counter() - started
        return values


class State:
    """Tokens t0..tn are committed; the caches hold the first of them.

    The others wait: many while a prompt is fed, afterwards tn alone, the anchor.

    Attributes:
        tokens: the committed ids.
        cache: the target's keys and values.
        context: the drafter's, or `None` without a drafter.
    """

    def __init__(self, pair: Pair):
        self.pair = pair
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        pair = self.pair
        self.tokens: list[int] = []
        self.cache = TargetCache(pair.target.config, pair.dtype, pair.max_context)
        self.context = DrafterContext(pair.drafter.config, pair.dtype) if pair.drafter else None
        self._backlog: list[list[mx.array]] = []  # per plain step: the taps, each [T, E], not yet projected

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's layers whose rows the drafter wants."""
        return self.pair.drafter.config.taps if self.pair.drafter else ()

    @property
    def arrays(self) -> list[mx.array]:
        """What must be evaluated with each read, so that no graph outlives its round."""
        return self.cache.arrays + (self.context.arrays if self.context else [])

    @property
    def _unprojected(self) -> int:
        """Rows of the backlog."""
        return sum(taps[0].shape[0] for taps in self._backlog)

    @property
    def held(self) -> int:
        """Positions that both caches hold; less than the target's only after an interrupted commit."""
        return min(self.cache.offset, self.context.offset + self._unprojected) if self.context else self.cache.offset

    @property
    def waiting(self) -> int:
        """Committed tokens that the target's cache does not hold yet."""
        return len(self.tokens) - self.cache.offset

    def wanted_taps(self, rows: int) -> tuple[int, ...]:
        """The taps of a forward of `rows` waiting tokens: none where the drafter will see none of these rows."""
        return self.taps if self.cache.offset + rows > self.seen_from(len(self.tokens)) else ()

    def commit(self, rows: int, tokens: Sequence[int], taps: Sequence[mx.array]) -> None:
        """Keep the first `rows` rows of the last forward, and the tokens that came after those that waited."""
        unseen = self.seen_from(len(self.tokens)) - self.cache.offset
        self.keep(rows, taps, min(rows, max(0, unseen)))
        self.tokens.extend(tokens)

    def keep(self, rows: int, taps: Sequence[mx.array], unseen: int = 0) -> None:
        """Keep the first `rows` rows of the last forward; their taps are projected later, in batches.

        Args:
            rows: how many.
            taps: the forward's, each [T, E] with T at least `rows`.
            unseen: the first rows that the drafter will never see, nor anything before them.
        """
        self.cache.advance(rows)
        if self.context is None:
            return
        if unseen:
            self._backlog = []
            self.context.skip_to(self.cache.offset - rows + unseen)
        if unseen < rows:
            self._backlog.append([tap[unseen:rows] for tap in taps])
        if self._unprojected >= BACKLOG_ROWS:
            self.project_backlog()

    def project_backlog(self) -> None:
        """Bring the drafter's context up to date with the target's cache."""
        drafter, context = self.pair.drafter, self.context
        if not self._backlog or drafter is None or context is None:
            return
        joined = [mx.concatenate(list(rows)) if len(rows) > 1 else rows[0] for rows in zip(*self._backlog, strict=True)]
        self._backlog = []
        for begin in range(0, joined[0].shape[0], context.max_rows):
            piece = [rows[begin : begin + context.max_rows] for rows in joined]
            drafter.extend(context, piece)
            context.advance(piece[0].shape[0])

    def fork(self) -> State:
        """Another state with this history, to go on from here on its own; rows are shared until one of them writes."""
        other = copy(self)
        other.tokens, other._backlog = list(self.tokens), list(self._backlog)
        other.cache, other.context = self.cache.fork(), self.context.fork() if self.context else None
        return other

    def settle(self, reads: HostReads) -> None:
        """Leave nothing to be computed, so that another thread may go on; what waits of a prompt is forgotten.

        MLX computes an array in the thread that asked for it: what is not evaluated here, no other thread can use.
        """
        del self.tokens[self.cache.offset + 1 :]
        self.project_backlog()
        reads.read(mx.zeros((1,)), self.arrays)

    def seen_from(self, end: int) -> int:
        """The first position that the drafter is given of a prompt of `end` tokens: it can see no older one later.

        That is its ring's whole length less a block, or the end where there is no drafter.
        """
        return end - (self.context.ring - self.pair.block_size) if self.context else end

    def roll_back(self, position: int, keep_context: bool = True) -> bool:
        """Go back to `position` rows; returns whether that was possible (else nothing has changed).

        Args:
            position: rows to keep.
            keep_context: the drafter's context must go back too; else it starts anew at `position`.
        """
        self.project_backlog()
        kept = self.context if keep_context else None
        if not self.cache.can_trim_to(position) or (kept and not kept.can_trim_to(position)):
            return False
        self.cache.trim_to(position)
        if kept:
            kept.trim_to(position)
        elif self.context:
            self.context.skip_to(position)
        del self.tokens[position:]
        return True
