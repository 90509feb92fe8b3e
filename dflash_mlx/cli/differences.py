"""What ``dflash-mlx doctor`` compares: a few short texts of the pocket pair, greedy and sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..pair import Pair

PROMPTS = ("def fibonacci(n):", "class TestQueue(unittest.TestCase):")
SAMPLING: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 0.7, "seed": 7})
TOKENS, DRAFT_LENGTH = 24, 4


def count_differences(pair: Pair) -> dict[str, Any]:
    """Decode each prompt plainly and drafted, greedy and sampled; give how many are equal, and the rest's places."""
    from ..verification import compare

    found = []
    for prompt in PROMPTS:
        for sampling in SAMPLING:
            (compared,) = compare(pair, prompt, [DRAFT_LENGTH], max_tokens=TOKENS, **sampling)
            if not compared.equal:
                found.append({"prompt": prompt, "temperature": sampling["temperature"], "token": compared.token})
    runs = len(PROMPTS) * len(SAMPLING)
    return {"runs": runs, "equal": runs - len(found), "tokens_each": TOKENS, "first_differences": found}
