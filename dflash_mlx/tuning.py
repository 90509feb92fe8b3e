"""Measures rounds by draft length and context on this machine, and which length suits the user's own prompts.

A forward reads all weights, so those of a model that is larger than the chip's caches come from memory each time; a
small one's stay in the caches, and the report says so. Lengths take turns, in an order that is turned round each time,
so that a machine that warms up slows all of them alike. Each length runs once before anything is counted.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any

from .errors import InputError, must
from .pair import Pair
from .session import Session
from .stats import Round
from .stream import check_requests
from .text import Prompt
from .tuned import Tuned, Whole

CACHES_BYTES = 200_000_000  # more than any chip's last cache
KEPT_ROUNDS = 7  # of a length and context, for `load` to start from
CONTEXTS = (512, 4096, 16384)  # tokens at which rounds are timed where none are asked for
SPARE = 6  # tokens generated at a context besides the longest draft: some rounds of each length
Said = Callable[[str], None]


@dataclass(frozen=True)
class Cost:
    """Median seconds of a round; `draft` and `verify` from those rounds that were split."""

    context: int
    draft_length: int
    draft_s: float | None
    verify_s: float | None
    total_s: float


@dataclass(frozen=True)
class Speed:
    """One draft length on all prompts: committed tokens per second of rounds."""

    draft_length: int
    tokens_per_s: float
    mean_length: float
    acceptance_rate: float


@dataclass(frozen=True)
class BlockSpeed(Speed):
    """One width of the drafter's block; `judged_rate` is the share of accepted drafts among those that were judged."""

    slots: int
    round_s: float
    judged_rate: float


def lengths_of(pair: Pair) -> list[int]:
    """The draft lengths that are measured: 0, all up to 8, and some above."""
    assert pair.drafter is not None
    most = pair.drafter.config.runtime_block_size - 1
    return [length for length in (*range(9), 10, 12, 15) if length < most] + [most]


def _contexts(pair: Pair, asked: Sequence[int] | None, longest: int, say: Said) -> list[int]:
    """Where rounds are timed: what was asked for, or what fits of the usual ones."""
    most = pair.max_context - longest - SPARE
    if asked is None:
        for context in (context for context in CONTEXTS if context > most):
            say(f"left out rounds at {context} tokens of context: the pair holds {pair.max_context}")
        return [context for context in CONTEXTS if context <= most]
    for context in asked:
        if not 1 <= context <= most:
            held, model = pair.max_context, pair.target.config.max_position
            expected = f"between 1 and {most} ({held} that the pair holds, less {longest + SPARE} that are generated)"
            todo = f"Ask for less, or load with a larger max_context (--max-context), at most the model's {model}."
            raise InputError(must("tune", "context", expected, context, todo if held < model else "Ask for less."))
    return sorted(set(asked))


def tune(
    pair: Pair,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int = 128,
    repeats: int = 2,
    contexts: Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
    say: Said = lambda _line: None,
    **options: Any,
) -> tuple[dict[str, Any], Tuned]:
    """Measure, and choose.

    Args:
        pair: with a drafter.
        prompts: what the pair is used for.
        max_tokens: of each text, at least 2: the first comes from the prompt, without a round.
        repeats: times that each length runs on each prompt and at each context.
        contexts: tokens of context at which rounds are timed besides; default those of `CONTEXTS` that fit.
        lengths: draft lengths; default `lengths_of`.
        say: takes a line when a part is done.
        options: of `generate`: a temperature, a seed.
    Returns:
        A report, plain data ready for JSON, and what `load` should start from.
    Raises:
        InputError: a prompt, a context, a length or an option does not fit the pair: told before anything is measured;
            or every text ended with its first token.
    """
    if max_tokens < 2:
        raise InputError(must("tune", "max_tokens", "at least 2", max_tokens, "The first token comes without a round."))
    lengths = sorted({0, *(lengths_of(pair) if lengths is None else lengths)})
    asked = {"max_tokens": max_tokens, **options}
    tokens = check_requests(pair, prompts, lengths, asked)
    rounds: list[tuple[int, int, Round]] = []
    for context in _contexts(pair, contexts, lengths[-1], say):
        rounds += _at_context(pair, context, lengths, repeats)
        say(f"measured rounds at {context} tokens of context")
    costs, at_contexts = _costs(rounds), len(rounds)
    by_length: dict[int, list[Round]] = {length: [] for length in lengths}
    for number, ids in enumerate(tokens, start=1):
        for context, length, done in _on_prompt(pair, ids, lengths, repeats, asked):
            by_length[length].append(done)
            rounds.append((context, length, done))
        say(f"ran prompt {number} of {len(prompts)}")
    if not by_length[0]:
        expected, todo = "followed by at least 2 tokens", "Give others."
        raise InputError(must("tune", "prompts", expected, "texts that ended with their first token", todo))
    speeds = [_speed(length, done) for length, done in by_length.items() if done]
    blocks = []
    drafted = [speed for speed in speeds if 0 < speed.draft_length < pair.block_size - 1]
    if drafted:
        length = max(drafted, key=lambda speed: speed.tokens_per_s).draft_length
        blocks = _blocks(pair, tokens, length, repeats, asked)
        say(f"compared the two widths of a block at draft length {length}")
    tuned = _choice(speeds, rounds[at_contexts:], rounds, _whole(blocks), pair.setup)
    weights = sum(size for part, size in pair.plan.parts.items() if part.endswith("weights"))
    report = {
        "weights": "read from memory" if weights > CACHES_BYTES else "small enough to stay in caches",
        "costs": [asdict(cost) for cost in costs],
        "speeds": [asdict(speed) for speed in speeds],
        "blocks": [asdict(block) for block in blocks],
        "draft_length": tuned.draft_length,
        "speedup": tuned.speedup,
        "settings": {"max_tokens": max_tokens, "repeats": repeats, "prompts": len(prompts), **options},
        "kernels": pair.kernels,
    }
    return report, tuned


def _runs(
    pair: Pair, prompt: list[int], ways: Sequence[dict[str, Any]], repeats: int
) -> Iterator[tuple[dict[str, Any], list[Round]]]:
    """Rounds of a prompt with each way of options: a first time for warm-up, not given, then forth and back in turn."""
    session = Session(pair)
    for way in ways:
        session.generate(prompt, **way)
    for turn in range(repeats):
        for way in ways if turn % 2 else ways[::-1]:
            yield way, session.generate(prompt, **way).stats.rounds


def _at_context(pair: Pair, context: int, lengths: Sequence[int], repeats: int) -> list[tuple[int, int, Round]]:
    """Rounds after `context` random tokens, some of them split."""
    noise, vocab = random.Random(context), pair.target.config.vocab_size
    prompt = [noise.randrange(vocab) for _ in range(context)]
    ways = [{"draft_length": length, "max_tokens": length + SPARE, "timed_every": 2} for length in lengths]
    runs = ((way["draft_length"], rounds) for way, rounds in _runs(pair, prompt, ways, repeats))
    return [(context, length, done) for length, rounds in runs for done in rounds if done.drafted == length]


def _on_prompt(
    pair: Pair, ids: list[int], lengths: Sequence[int], repeats: int, options: dict[str, Any]
) -> list[tuple[int, int, Round]]:
    """Rounds of a prompt's text with each length, with the positions before each."""
    found = []
    for way, rounds in _runs(pair, ids, [{**options, "draft_length": length} for length in lengths], repeats):
        context = len(ids)
        for done in rounds:
            found.append((context, way["draft_length"], done))
            context += done.committed
    return found


def _blocks(
    pair: Pair, prompts: Sequence[list[int]], length: int, repeats: int, options: dict[str, Any]
) -> list[BlockSpeed]:
    """Blocks of length + 1 slots and whole ones, on all prompts; nothing where no text had a round."""
    found: dict[bool, list[Round]] = {False: [], True: []}
    ways = [{**options, "draft_length": length, "whole_block": whole} for whole in found]
    for ids in prompts:
        for way, rounds in _runs(pair, ids, ways, repeats):
            found[way["whole_block"]] += [done for done in rounds if done.drafted == length]
    if not all(found.values()):
        return []
    return [
        BlockSpeed(
            **asdict(_speed(length, done)),
            slots=pair.block_size if whole else length + 1,
            round_s=statistics.median(each.total_s for each in done),
            judged_rate=_judged_rate(done),
        )
        for whole, done in found.items()
    ]


def _whole(blocks: Sequence[BlockSpeed]) -> Whole | None:
    """The second of the two widths over the first; `None` where nothing was accepted, which compares nothing."""
    if not blocks or not all(block.judged_rate for block in blocks):
        return None
    narrow, whole = blocks
    return Whole(
        whole.judged_rate / narrow.judged_rate,
        whole.round_s / narrow.round_s,
        whole.tokens_per_s / narrow.tokens_per_s,
    )


def _judged_rate(rounds: Sequence[Round]) -> float:
    """Share of accepted drafts among those whose slot was judged: all before them were accepted."""
    judged = sum(min(done.accepted + 1, done.drafted) for done in rounds)
    return sum(done.accepted for done in rounds) / judged if judged else 0.0


def _costs(rounds: Sequence[tuple[int, int, Round]]) -> list[Cost]:
    """Medians by context and draft length; rounds that were split are slower and count for the split alone."""
    found = []
    for context, length in sorted({(context, length) for context, length, _ in rounds}):
        here = [done for at, drafted, done in rounds if (at, drafted) == (context, length)]
        split = [done for done in here if done.draft_s is not None]
        whole = [done.total_s for done in here if done.draft_s is None] or [done.total_s for done in here]
        draft_s, verify_s = None, None
        if split:
            draft_s = statistics.median(done.draft_s or 0.0 for done in split)
            verify_s = statistics.median(done.verify_s or 0.0 for done in split)
        found.append(Cost(context, length, draft_s, verify_s, statistics.median(whole)))
    return found


def _speed(length: int, rounds: Sequence[Round]) -> Speed:
    drafted = [done for done in rounds if done.drafted]
    proposed = sum(done.drafted for done in drafted)
    return Speed(
        length,
        sum(done.committed for done in rounds) / sum(done.total_s for done in rounds),
        statistics.fmean(done.committed for done in drafted) if drafted else 1.0,
        sum(done.accepted for done in drafted) / proposed if proposed else 0.0,
    )


def _choice(
    speeds: Sequence[Speed],
    texts: Sequence[tuple[int, int, Round]],
    rounds: Sequence[tuple[int, int, Round]],
    whole: Whole | None,
    setup: Mapping[str, Any],
) -> Tuned:
    """The fastest length on the prompts, their acceptance, and the newest rounds of all that was measured."""
    best = max(speeds, key=lambda speed: speed.tokens_per_s)
    plain = next(speed for speed in speeds if speed.draft_length == 0)
    kept: dict[tuple[int, int], list[float]] = {}
    for context, length, done in rounds:
        if done.drafted == length and done.draft_s is None:
            kept.setdefault((length, context - context % 1024), []).append(done.total_s)
    return Tuned(
        draft_length=best.draft_length,
        speedup=best.tokens_per_s / plain.tokens_per_s,
        acceptance=_judged_rate([done for _, _, done in texts]),
        rounds=[(*where, s) for where, seconds in kept.items() for s in seconds[-KEPT_ROUNDS:]],
        when=date.today().isoformat(),
        setup=setup,
        whole=whole,
    )
