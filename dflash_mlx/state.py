"""One session's state: tokens, the target's cache, the drafter's context. All rollback is here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import copy

import mlx.core as mx

from .cache import DrafterContext, History, TargetCache
from .checkpoint import MOST_CHECKPOINTS, Checkpoints
from .pair import Pair

BACKLOG_ROWS = 64  # rows decoded without drafting are projected for the drafter in batches of this


class HostReads:
    """The only place where the host waits for the device; it counts how often, and for how many seconds."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0

    def read(self, array: mx.array, along: Sequence[mx.array] = ()) -> list[int]:
        """Evaluate `array` [N] of integers together with `along`, and give its numbers to the host."""
        started = time.perf_counter()
        mx.eval(array, *along)
        values: list[int] = array.tolist()  # type: ignore[assignment]
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
        checkpoints: the positions that one can go back to.
        turn_start: the least position that a prompt goes back to if it belongs to the newest turn, or goes on from it.
        notes: what the next generation should tell the user.
        fork_at: a position of the prompt where a prompt left the history before: the drafter sees it too; or `None`.
    """

    def __init__(self, pair: Pair, checkpoints: int = MOST_CHECKPOINTS):
        self.pair = pair
        self.checkpoints = Checkpoints(checkpoints)
        self.notes: list[str] = []
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        pair = self.pair
        self.tokens: list[int] = []
        self.cache = TargetCache(pair.target.config, pair.dtype, pair.max_context, pair.kv_bits)
        self.context = DrafterContext(pair.drafter.config, pair.dtype) if pair.drafter else None
        self.checkpoints = Checkpoints(self.checkpoints.most)
        self.fork_at: int | None = None
        self.turn_start = 0
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
    def histories(self) -> list[History]:
        """The caches: the target's, and the drafter's context where there is one."""
        return [self.cache, self.context] if self.context else [self.cache]

    @property
    def nbytes(self) -> int:
        """Bytes of the caches and of what was copied for checkpoints."""
        return sum(history.nbytes for history in self.histories) + self.checkpoints.nbytes

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

    @property
    def stop(self) -> int:
        """Where the tokens that wait end, or the place among them at which a checkpoint is left."""
        return self.fork_at if self.fork_at and self.cache.offset < self.fork_at else len(self.tokens)

    def _unseen(self, rows: int) -> int:
        """How many of the next `rows` rows the drafter will never see, nor anything before them."""
        return min(rows, max(0, self.seen_from(self.stop) - self.cache.offset))

    def wanted_taps(self, rows: int) -> tuple[int, ...]:
        """The taps of a forward of `rows` waiting tokens: none where the drafter will see none of these rows."""
        return self.taps if self._unseen(rows) < rows else ()

    def commit(self, rows: int, tokens: Sequence[int], taps: Sequence[mx.array]) -> None:
        """Keep the first `rows` rows of the last forward, and the tokens that came after those that waited."""
        self.keep(rows, taps, self._unseen(rows))
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
        other.checkpoints = self.checkpoints.fork()
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

    def secure(self, rows: int) -> list[mx.array]:
        """Copies of what checkpoints need of the rows that a forward of `rows` rows overwrites; evaluate them first."""
        unseen = self._unseen(rows)
        return self._copies(self.cache.offset + rows, self.cache.offset + unseen if unseen else 0)

    def secure_ahead(self) -> list[mx.array]:
        """As `secure` for the round after this step, to be evaluated with this step's read.

        At that time all that the step writes is written and nothing of the next: so a copy costs no further read, and
        the next writes find buffers that nothing older holds.
        """
        return self._copies(self.cache.end + self.pair.block_size)

    def _copies(self, end: int, seen_from: int = 0) -> list[mx.array]:
        """What checkpoints need before rows up to `end` are written and the drafter's context begins at `seen_from`."""
        if self.context and any(self.context.offset < at <= self.cache.offset for at in self.checkpoints.positions):
            self.project_backlog()  # later it might overwrite the window of this checkpoint, or be thrown away
        kept_from = [max(end - history.ring, at) for history, at in zip(self.histories, (0, seen_from), strict=False)]
        return self.checkpoints.secure(self.histories, kept_from)

    def shared(self, prompt: Sequence[int]) -> int:
        """How many leading tokens of the prompt the target's cache was fed, at most all but the prompt's last."""
        count, most = 0, min(len(prompt) - 1, self.cache.offset, len(self.tokens))
        while count < most and self.tokens[count] == prompt[count]:
            count += 1
        return count

    def reachable(self, shared: int, end: int) -> int:
        """The largest position, at most `shared`, that one can go back to for a prompt of `end` tokens; else 0."""
        self.project_backlog()
        positions = {shared, min(shared, self.held), *(min(shared, at) for at in self.checkpoints.positions)}
        return next((at for at in sorted(positions, reverse=True) if self._can_go_back(at, end)), 0)

    def _needed(self, position: int, end: int) -> list[History]:
        """The caches that must go back too: not the drafter's context where the prompt is so long that it sees none."""
        return self.histories[:1] if self.seen_from(end) >= position else self.histories

    def _can_go_back(self, position: int, end: int) -> bool:
        return all(
            history.can_trim_to(position) or self.checkpoints.window(cache, history, position)
            for cache, history in enumerate(self._needed(position, end))
        )

    def go_back(self, position: int, end: int) -> None:
        """Go back to `position` rows, as `reachable` gave it for a prompt of `end` tokens; 0 forgets everything."""
        if position == 0:
            self.reset()
            return
        self.project_backlog()
        needed = self._needed(position, end)
        for cache, history in enumerate(needed):
            window = self.checkpoints.window(cache, history, position)
            if history.can_trim_to(position):
                history.trim_to(position)
            elif window is not None:
                history.put_back(window.first, position, window.copies)
        if self.context and self.context not in needed:
            self.context.skip_to(position)
        self.checkpoints.go_back(position, self.cache)
        del self.tokens[position:]
