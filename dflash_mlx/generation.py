"""The two public functions: a fresh session for one prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .pair import Pair
from .session import Session
from .stats import Chunk, Generation
from .text import Prompt


def generate(pair: Pair, prompt: Prompt, **options: Any) -> Generation:
    """Generate to the end.

    Args:
        pair: from `load`.
        prompt: text, token ids or chat messages.
        options: see `Options`, and `tools`, `reasoning`, `on_prefill` of `Session.stream_generate`.
    Returns:
        Text, tokens, why it ended, and the statistics.
    Raises:
        InputError: the prompt or an option is wrong.
    """
    return Session(pair).generate(prompt, **options)


def stream_generate(pair: Pair, prompt: Prompt, **options: Any) -> Iterator[Chunk]:
    """As `generate`, in chunks: one for the first token, one for each round; the last has the statistics."""
    return Session(pair).stream_generate(prompt, **options)
