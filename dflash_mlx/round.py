"""The step: draft, verify, accept, commit, for one session or for several, with one read by the host.

A session's tokens t0..tn are committed; its caches hold the first of them, the others wait. While a prompt is fed many
wait; afterwards one does, the anchor tn. A step feeds waiting tokens of every session, all rows in one forward. Where
no more wait, k drafts go with them, and the target's own choices come out: that is a round, and with k = 0 plain
decoding. Source: Leviathan et al. 2023, with the target's own choice in place of the ratio test: a drafted token is
kept if and only if the target chooses it itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from .cache import Part
from .choice import Choice
from .output import Output
from .state import HostReads, State
from .stats import Round

NOTHING = mx.array([], dtype=mx.uint32)


@dataclass(frozen=True)
class Work:
    """What one session brings to a step.

    Attributes:
        state: its caches and tokens advance by what is committed.
        choice: the target's and the drafter's rule for a token.
        output: takes the tokens and cuts them at an end.
        rows: waiting tokens to feed.
        length: tokens to draft after them, k; 0 where more tokens wait.
        whole: the drafter fills its whole block; else one of k + 1 slots.
    """

    state: State
    choice: Choice
    output: Output
    rows: int = 1
    length: int = 0
    whole: bool = False

    @property
    def slots(self) -> int:
        """Slots of the drafter's block, the anchor's included; 0 where nothing is drafted."""
        return (self.state.pair.block_size if self.whole else self.length + 1) if self.length else 0

    @property
    def scored(self) -> int:
        """Rows whose logits are wanted: the last waiting one's and the drafts'; none where more tokens wait."""
        return self.length + 1 if self.rows == self.state.waiting else 0


def step(work: Sequence[Work], reads: HostReads, split: bool = False) -> list[Round | Exception]:
    """Run one step; each session commits what it gives.

    Args:
        work: of one session or of several of one pair.
        reads: the host's reads; one is made here, and one before it where drafts must be seen or timed.
        split: time drafting and verifying apart, at the price of that second read.
    Returns:
        For each session its round, or the error that ends its generation and no other's.
    """
    started, cpu, before = time.perf_counter(), time.thread_time(), reads.seconds
    copies = [copy for each in work for copy in each.state.secure(each.rows + max(0, each.slots - 1))]
    if copies:  # rarely: the read of the step before has made those that a round could need
        reads.read(mx.zeros((1,)), copies)
    proposals, draft_s = [draft(each, reads) for each in work], None
    if any(each.length and (split or each.choice.reads_drafts) for each in work):
        contexts = [array for each in work if each.state.context for array in each.state.context.arrays]
        reads.read(_joined(proposals), [*proposals, *contexts])
        draft_s = reads.seconds - before
    chosen, taps = verify(work, proposals)
    found = [tokens for pair in zip(proposals, chosen, strict=True) for tokens in pair]
    along = [array for each, rows in zip(work, taps, strict=True) for array in (*each.state.arrays, *rows)]
    along += [copy for each in work for copy in each.state.secure_ahead()]
    numbers = reads.read(_joined(found), along)
    waited = reads.seconds - before
    fed = sum(each.rows + each.length for each in work)
    streams = sum(1 for each in work if each.output.tokens)
    prompt_rows = sum(each.rows for each in work if not each.output.tokens)
    rounds: list[Round | Exception] = []
    for each, kept in zip(work, taps, strict=True):
        count = each.length + each.scored
        rounds.append(commit(each, kept, numbers[:count]))
        numbers = numbers[count:]
    total, cpu = time.perf_counter() - started, time.thread_time() - cpu
    for done in rounds:
        if isinstance(done, Round):
            done.rows, done.prompt_rows, done.streams = fed, prompt_rows, streams
            done.total_s, done.host_s, done.cpu_s = total, total - waited, cpu
            done.draft_s, done.verify_s = draft_s, None if draft_s is None else waited - draft_s
    return rounds


def draft(work: Work, reads: HostReads) -> mx.array:
    """The drafter's proposal for the next k positions, [k] uint32, submitted."""
    state, length = work.state, work.length
    drafter, context = state.pair.drafter, state.context
    if not length or drafter is None or context is None:
        return NOTHING
    state.project_backlog()
    masks = [drafter.config.mask_token_id] * (work.slots - 1)
    block = mx.array([state.tokens[-1], *masks], dtype=mx.uint32)
    slots = drafter.draft(block, context, state.pair.target, length)
    proposal = work.choice.proposal(slots, len(state.tokens), state.tokens, reads)
    mx.async_eval(proposal)  # the device drafts while the host builds the target's graph
    return proposal


def verify(work: Sequence[Work], proposals: Sequence[mx.array]) -> tuple[list[mx.array], list[list[mx.array]]]:
    """The target's own tokens after each session's rows, [k+1] uint32 or [0], and the rows' taps; lazy."""
    wanted: tuple[int, ...] = ()
    tokens, parts = [], []
    for each, proposal in zip(work, proposals, strict=True):
        state, begin = each.state, each.state.cache.offset
        tokens += [mx.array(state.tokens[begin : begin + each.rows], dtype=mx.uint32), proposal]
        parts.append(Part(state.cache, each.rows + each.length, each.scored))
        wanted = wanted or state.wanted_taps(each.rows)
    forward = work[0].state.pair.target(_joined(tokens), parts, wanted)
    chosen, taps, row, scored = [], [], 0, 0
    for each, part, proposal in zip(work, parts, proposals, strict=True):
        own, history = NOTHING, each.state.tokens
        if part.logits:
            assert forward.logits is not None
            logits = forward.logits[scored : scored + part.logits]
            own = each.choice.target(logits, len(history), history, proposal)
        chosen.append(own)
        # A copy of a session's own rows: the slice alone would keep the whole forward's rows in memory.
        rows = [tap[row : row + part.rows] for tap in forward.taps]
        taps.append(rows if len(parts) == 1 else [mx.contiguous(tap) for tap in rows])
        row, scored = row + part.rows, scored + part.logits
    return chosen, taps


def accept(drafted: Sequence[int], own: Sequence[int]) -> int:
    """How many leading drafted tokens the target chose itself; `own` has one token more, or none where none was."""
    pairs = enumerate(zip(drafted, own, strict=False))
    return next((count for count, (draft, chosen) in pairs if draft != chosen), len(drafted))


def _joined(tokens: Sequence[mx.array]) -> mx.array:
    """All tokens one after the other, [N] uint32: no work on the device where one array has them all."""
    some = [each for each in tokens if each.size]
    return some[0] if len(some) == 1 else mx.concatenate(some) if some else NOTHING


def commit(work: Work, taps: Sequence[mx.array], numbers: Sequence[int]) -> Round | Exception:
    """Commit what the host has read: the drafts, and the target's own tokens."""
    drafted, own = numbers[: work.length], numbers[work.length :]
    accepted = accept(drafted, own)
    try:
        committed = work.output.take(work.choice.confirmed(own[: accepted + 1])) if own else []
        work.state.commit(work.rows + max(0, len(committed) - 1), committed, taps)
    except Exception as error:  # of this session alone: a user's processor, a tokenizer
        return error
    accepted = min(accepted, len(committed))
    return Round(work.length, accepted, len(committed), list(drafted), committed, slots=work.slots)
