"""Prefill: what a session need not compute again of a prompt. The rest is fed as any waiting tokens are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .state import State

FORK_ROWS = 64  # so much of a prompt is worth a checkpoint, where an earlier prompt shared it and it is not held

Progress = Callable[[int, int], None]


def reuse(state: State, prompt: Sequence[int]) -> int:
    """Bring the state to the longest part of the prompt that its caches hold; returns its length.

    At least the prompt's last token is left to be fed, as its logits are needed.
    """
    shared, end = state.shared(prompt), len(prompt)
    position = state.reachable(shared, end)
    state.go_back(position, end)
    state.checkpoints.mark(position, state.histories)
    # Here a prompt left the history before, and it will happen again (a system prompt that several chats share).
    state.fork_at = shared if shared - position >= FORK_ROWS else None
    if state.fork_at:
        state.checkpoints.mark(state.fork_at, state.histories)
    state.checkpoints.mark(end, state.histories)
    state.turn_start = end - 1
    return position
