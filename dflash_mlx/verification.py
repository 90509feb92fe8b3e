"""Decodes the same prompts plainly and drafted on this machine, and says where they first differ and how close it was.

On MLX's CPU backend a row has the same bits alone and in a block, so any difference there is a fault. On a GPU a row
may round differently, and where two tokens are nearly equal the texts may part: a near-tie. docs/sampling.md says more.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx

from .cache import Part, TargetCache
from .kernels.launch import dtype_name
from .noise import gumbel, position_keys, uniform
from .pair import Pair
from .session import Session
from .stream import check_requests
from .text import Prompt, encode

ROUNDINGS = 2  # steps of the activations' dtype at the size of the best score: a margin of so many is a near-tie
SCORED_ROWS = 64  # whose logits are held at once
SEED = 7  # of sampled comparisons where none is given
EPSILON = {mx.float32: 2**-23, mx.float16: 2**-10, mx.bfloat16: 2**-7}


@dataclass(frozen=True)
class Comparison:
    """One prompt, plain against one draft length.

    Attributes:
        tokens: compared.
        token: the first place where they differ, `None` where they are equal.
        plain, drafted: the tokens there; `None` where a text had ended.
        margin: the plain token's score above the drafted one's, from one more forward; scores are logits, at a
            temperature divided by it and with the noise. `None` where they are equal or a text had ended.
        near_tie: the margin is within the rounding of the activations.
    """

    prompt: str
    draft_length: int | str
    tokens: int
    token: int | None = None
    plain: int | None = None
    drafted: int | None = None
    margin: float | None = None
    near_tie: bool = False

    @property
    def equal(self) -> bool:
        return self.token is None


def first_difference(plain: Sequence[int], drafted: Sequence[int]) -> int | None:
    """The first place where two lists of tokens differ, or None where they are equal."""
    places = (i for i, (a, b) in enumerate(zip(plain, drafted, strict=False)) if a != b)
    shorter = min(len(plain), len(drafted))
    return next(places, None if len(plain) == len(drafted) else shorter)


def compare(pair: Pair, prompt: Prompt, draft_lengths: Sequence[int | str], **options: Any) -> list[Comparison]:
    """Decode a prompt plainly and with each draft length.

    Args:
        pair: with a drafter.
        prompt: as for `generate`.
        draft_lengths: numbers, or "auto".
        options: of `generate`: a temperature, filters, a seed, `max_tokens`. No penalties and no bias.
    """
    options, ids = _seeded(options), encode(pair.tokenizer, prompt)
    return _differences(pair, prompt, ids, _plain(pair, ids, options), draft_lengths, options)


def _plain(pair: Pair, ids: Sequence[int], options: Mapping[str, Any]) -> list[int]:
    """The plain text's tokens."""
    return Session(pair).generate(ids, **options, draft_length=0).tokens


def _differences(
    pair: Pair,
    prompt: Prompt,
    ids: Sequence[int],
    plain: Sequence[int],
    draft_lengths: Sequence[int | str],
    options: Mapping[str, Any],
) -> list[Comparison]:
    """Decode `ids` with each draft length, and compare with the plain text."""
    found, name = [], prompt if isinstance(prompt, str) else json.dumps(list(prompt), ensure_ascii=False, default=str)
    for length in draft_lengths:
        drafted = Session(pair).generate(ids, **options, draft_length=length).tokens
        place = first_difference(plain, drafted)
        if place is None:
            found.append(Comparison(name, length, len(plain)))
            continue
        ours, theirs = (tokens[place] if place < len(tokens) else None for tokens in (plain, drafted))
        margin, near = None, False
        if ours is not None and theirs is not None:
            margin, near = _margin(pair, [*ids, *plain[:place]], (ours, theirs), options)
        found.append(Comparison(name, length, len(plain), place, ours, theirs, margin, near))
    return found


def near_ties(pair: Pair, prompt: Sequence[int], tokens: Sequence[int]) -> int:
    """How many of the tokens that followed a prompt were greedy choices between two nearly equal logits."""
    count = 0
    for logits in _logits(pair, [*prompt, *tokens][:-1], len(prompt) - 1):
        best = mx.topk(logits, 2)
        margin = mx.abs(best[:, 0] - best[:, 1])
        count += int(mx.sum(margin <= _rounding(pair) * mx.abs(best).max(axis=1)))
    return count


def _logits(pair: Pair, history: Sequence[int], first: int) -> Iterator[mx.array]:
    """Logits [M, V] after the tokens of a history from number `first` on, some rows at a time."""
    cache = TargetCache(pair.target.config, pair.dtype, pair.max_context)
    while cache.offset < len(history):
        begin, before = cache.offset, first - cache.offset
        piece = list(history[begin : begin + min(cache.max_rows, before if before > 0 else SCORED_ROWS)])
        scored = 0 if before > 0 else len(piece)
        logits = pair.target(mx.array(piece, dtype=mx.uint32), [Part(cache, len(piece), scored)]).logits
        cache.advance(len(piece))
        mx.eval(cache.arrays)
        if logits is not None:
            yield logits


def verify(pair: Pair, prompts: Sequence[Prompt], draft_lengths: Sequence[int | str], **options: Any) -> dict[str, Any]:
    """Compare every prompt with every draft length; the report is plain data, ready for JSON.

    Raises:
        InputError: a prompt, a draft length or an option is wrong; nothing was decoded then.
    """
    options = _seeded(options)
    comparisons, ties = [], 0
    for prompt, ids in zip(prompts, check_requests(pair, prompts, draft_lengths, options), strict=True):
        plain = _plain(pair, ids, options)
        comparisons += _differences(pair, prompt, ids, plain, draft_lengths, options)
        if not options.get("temperature"):
            ties += near_ties(pair, ids, plain)
    differing = [each for each in comparisons if not each.equal]
    return {
        "runs": len(comparisons),
        "equal": len(comparisons) - len(differing),
        "near_tie_differences": sum(each.near_tie for each in differing),
        "other_differences": sum(not each.near_tie for each in differing),
        "near_ties_in_plain_text": None if options.get("temperature") else ties,
        "near_tie_is": f"a margin of at most {ROUNDINGS} roundings of {dtype_name(pair.dtype)} at the best score",
        "options": options,
        "comparisons": [asdict(each) | {"equal": each.equal} for each in comparisons],
    }


def _seeded(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, with a seed where there is noise: both runs need the same."""
    return {"seed": SEED, **options} if options.get("temperature") else dict(options)


def _rounding(pair: Pair) -> float:
    return ROUNDINGS * EPSILON[pair.dtype]


def _margin(
    pair: Pair, history: Sequence[int], tokens: tuple[int, int], options: Mapping[str, Any]
) -> tuple[float, bool]:
    """The first token's score above the second's after `history`, and whether that is a near-tie."""
    [logits] = _logits(pair, history, len(history) - 1)
    scores, temperature = logits[0], options.get("temperature") or 0
    bound = _rounding(pair) * float(mx.abs(scores).max())
    if temperature:
        keys = position_keys(options["seed"], 0, len(history), 1)
        scores, bound = scores / temperature + gumbel(uniform(keys, scores.size))[0], bound / temperature
    plain, drafted = (float(scores[token]) for token in tokens)
    return plain - drafted, abs(plain - drafted) <= bound
