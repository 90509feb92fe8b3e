"""Counts where drafted decoding first differs from plain decoding on this machine's default device.

On MLX's CPU backend a row has the same bits alone and in a block, so there is no difference. On a GPU a row may round
differently, and where two tokens are nearly equal the texts may part: docs/sampling.md says what that means.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..pair import Pair

PROMPTS = ("def fibonacci(n):", "class TestQueue(unittest.TestCase):")
SAMPLING: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 0.7, "seed": 7})
TOKENS, DRAFT_LENGTH = 24, 4


def first_difference(plain: list[int], drafted: list[int]) -> int | None:
    """The first place where two lists of tokens differ, or None where they are equal."""
    places = (i for i, (a, b) in enumerate(zip(plain, drafted, strict=False)) if a != b)
    shorter = min(len(plain), len(drafted))
    return next(places, None if len(plain) == len(drafted) else shorter)


def count_differences(pair: Pair) -> dict[str, Any]:
    """Decode each prompt plainly and drafted, greedy and sampled; give how many are equal, and the rest's places."""
    from .. import generate

    found = []
    for prompt in PROMPTS:
        for sampling in SAMPLING:
            plain, drafted = (
                generate(pair, prompt, max_tokens=TOKENS, draft_length=length, **sampling).tokens
                for length in (0, DRAFT_LENGTH)
            )
            place = first_difference(plain, drafted)
            if place is not None:
                found.append({"prompt": prompt, "temperature": sampling["temperature"], "token": place})
    runs = len(PROMPTS) * len(SAMPLING)
    return {"runs": runs, "equal": runs - len(found), "tokens_each": TOKENS, "first_differences": found}
