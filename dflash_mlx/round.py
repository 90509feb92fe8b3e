"""The round: draft, verify, accept, commit, with one read by the host.

Before it, tokens t0..tn are committed and the caches hold t0..t(n-1); tn is the anchor. k is the draft length;
a round with k = 0 is plain decoding. Source: Leviathan et al. 2023, with the target's own choice in place of the
ratio test: a drafted token is kept if and only if the target chooses it itself.
"""

from __future__ import annotations

import time

import mlx.core as mx

from .cache import Part
from .choice import Choice
from .output import Output
from .state import HostReads, State
from .stats import Round


def decode_round(state: State, choice: Choice, length: int, output: Output, reads: HostReads) -> Round:
    """Run one round and commit what it gives.

    Args:
        state: of the session; both caches and the tokens advance by what is committed.
        choice: the target's and the drafter's rule for a token.
        length: tokens to draft, k.
        output: takes the tokens and cuts them at an end.
        reads: the host's reads; one is made here, two where a user's processor must see the drafts.
    """
    started = time.perf_counter()
    proposal = draft(state, choice, length)
    if choice.reads_drafts and length:
        proposal = mx.array(reads.read(proposal), dtype=mx.uint32)
    chosen, taps = verify(state, choice, proposal)
    accepted = accept(proposal, chosen)
    numbers = reads.read(mx.concatenate([accepted, proposal, chosen]), state.arrays)
    drafted, tokens = numbers[1 : 1 + length], numbers[1 + length :]
    committed = output.take(choice.confirmed(tokens[: numbers[0] + 1]))
    state.commit(committed, taps)
    return Round(
        drafted=length,
        accepted=min(numbers[0], len(committed)),
        committed=len(committed),
        proposal=drafted,
        tokens=committed,
        draft_s=None,
        verify_s=None,
        total_s=time.perf_counter() - started,
    )


def draft(state: State, choice: Choice, length: int) -> mx.array:
    """The drafter's proposal for the next `length` positions, [k] uint32, lazy; the block has k + 1 slots."""
    drafter, context = state.pair.drafter, state.context
    if not length or drafter is None or context is None:
        return mx.zeros((0,), dtype=mx.uint32)
    state.project_backlog()
    masks = [drafter.config.mask_token_id] * length
    block = mx.array([state.tokens[-1], *masks], dtype=mx.uint32)
    logits = drafter.draft_logits(block, context, state.pair.target, length)
    multiplier = state.pair.target.config.output_multiplier
    return choice.proposal(logits, len(state.tokens), state.tokens, multiplier)


def verify(state: State, choice: Choice, proposal: mx.array) -> tuple[mx.array, list[mx.array]]:
    """The target's own tokens for the rows [anchor, proposal], [k+1] uint32, and the taps, each [k+1, E]; lazy."""
    anchor = mx.array(state.tokens[-1:], dtype=mx.uint32)
    rows = mx.concatenate([anchor, proposal])
    count = rows.shape[0]
    forward = state.pair.target(rows, [Part(state.cache, count, count)], state.taps)
    assert forward.logits is not None
    return choice.target(forward.logits, len(state.tokens), state.tokens, proposal), forward.taps


def accept(proposal: mx.array, chosen: mx.array) -> mx.array:
    """How many leading drafted tokens the target chose itself, [1] uint32; lazy."""
    same = proposal == chosen[: proposal.shape[0]]
    return mx.sum(mx.cumprod(same.astype(mx.uint32)), keepdims=True).astype(mx.uint32)
