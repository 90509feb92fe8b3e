"""Prefill: what a session need not compute again of a prompt. The rest is fed as any waiting tokens are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .state import State

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
