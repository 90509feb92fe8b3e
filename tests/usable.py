"""A session is usable when it gives what a fresh one gives: the fixed prompt, options and check for that."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import grids

from dflash_mlx import Generation, Session, generate

SHAPE = "window 11"
PROMPT = grids.prompts(SHAPE)["5 windows"][:40]
OPTIONS: dict[str, Any] = {"max_tokens": 10, "draft_length": 4}


@cache
def _fresh(tokens: tuple[int, ...], options: tuple[tuple[str, Any], ...]) -> Generation:
    return generate(grids.pair(SHAPE), list(tokens), **dict(options))


def fresh(tokens: Sequence[int], **options: Any) -> Generation:
    """What a fresh session gives."""
    return _fresh(tuple(tokens), tuple(sorted(options.items())))


def check_usable(session: Session) -> None:
    """The next generations equal those of a fresh session: one that goes on from what is held, and the same prompt."""
    for tokens in ([*session.tokens, 7], PROMPT):
        found, expected = session.generate(tokens, **OPTIONS), fresh(tokens, **OPTIONS)
        assert found.tokens == expected.tokens
        assert [r.proposal for r in found.stats.rounds] == [r.proposal for r in expected.stats.rounds]
        assert session.tokens == [*tokens, *found.tokens]
