"""Prefill: a prompt through the target in steps, with logits for its last row only.

The drafter gets features only of the positions that it can still see, and of a few more for a short rollback.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from .cache import Part
from .choice import Choice
from .state import HostReads, State

Progress = Callable[[int, int], None]


def reuse(state: State, prompt: Sequence[int]) -> int:
    """Bring the state to the longest part of the prompt that its caches hold; returns its length.

    At least the prompt's last token is left to be fed, as its logits are needed.
    """
    shared = 0
    most = min(len(prompt) - 1, state.cache.offset, len(state.tokens))
    while shared < most and state.tokens[shared] == prompt[shared]:
        shared += 1
    # Where so much is to be fed that the drafter will see nothing of what is shared, its context does not matter.
    unseen = state.seen_from(len(prompt)) >= shared
    position = shared if unseen else min(shared, state.held)
    if position and state.roll_back(position, keep_context=not unseen):
        return position
    state.reset()
    return 0


def prefill(
    state: State,
    prompt: Sequence[int],
    choice: Choice,
    step: int,
    reads: HostReads,
    progress: Progress | None = None,
) -> int:
    """Feed what the state does not hold of the prompt; returns the target's first token, which is committed.

    Args:
        state: holds a part of the prompt, as `reuse` left it.
        prompt: token ids.
        choice: chooses the first token.
        step: most tokens in one forward.
        reads: counts the host's waits, one a step.
        progress: called with (tokens fed, tokens of the prompt) after each step.
    """
    target, cache, end = state.pair.target, state.cache, len(prompt)
    step = min(step, cache.max_rows)
    seen_from = state.seen_from(end)
    while True:
        begin = cache.offset
        rows = min(step, end - begin)
        last = begin + rows == end
        tokens = mx.array(list(prompt[begin : begin + rows]), dtype=mx.uint32)
        wanted = state.taps if begin + rows > seen_from else ()
        forward = target(tokens, [Part(cache, rows, int(last))], wanted)
        state.tokens[begin:] = prompt[begin : begin + rows]
        state.keep(rows, forward.taps, unseen=min(rows, max(0, seen_from - begin)))
        if last:
            state.project_backlog()
            assert forward.logits is not None
            chosen = reads.read(choice.target(forward.logits, end, prompt), state.arrays)
            (token,) = choice.confirmed(chosen)
            state.tokens.append(token)
        else:
            reads.read(mx.zeros((1,)), state.arrays)
        if progress:
            progress(begin + rows, end)
        if last:
            return token
