"""Rounds as JSON lines, and the ledger of where a generation's time went; what it cannot explain is its own part."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from .stats import Generation, Round
from .whole_files import write_whole

TIMED_EVERY = 8  # rounds; on one of so many drafting and verifying are timed apart, at the price of a second wait


def lines(generation: Generation) -> Iterator[dict[str, Any]]:
    """Give an object for each round, then one for the ledger.

    A round has its number, the positions before it, and all fields of `Round`.
    """
    stats = generation.stats
    context = stats.prompt_tokens
    for number, done in enumerate(stats.rounds):
        yield {"round": number, "context": context} | asdict(done)
        context += done.committed
    yield {"ledger": ledger(stats.rounds), "split_cost_s": split_cost(stats.rounds)}


def write_rounds(generation: Generation, path: Path) -> None:
    """Write the lines to a file."""
    write_whole(path, "".join(json.dumps(line) + "\n" for line in lines(generation)))


def ledger(rounds: Sequence[Round]) -> dict[str, float]:
    """Add up where the wall time went, in seconds; all parts but `wall` add up to it.

    draft, verify: waits for the device on rounds that were timed apart. undivided: waits on the others. host: building
    graphs and bookkeeping. rest: between rounds: text, the caller, other streams' steps. unexplained: what a round's
    parts leave of its total.
    """
    parts: dict[str, float] = dict.fromkeys(("draft", "verify", "undivided", "host", "rest", "unexplained"), 0.0)
    for done in rounds:
        waited = done.total_s - done.host_s
        if done.draft_s is None or done.verify_s is None:
            parts["undivided"] += waited
        else:
            parts["draft"] += done.draft_s
            parts["verify"] += done.verify_s
            parts["unexplained"] += waited - done.draft_s - done.verify_s
        parts["host"] += done.host_s
        parts["rest"] += done.rest_s
    return parts | {"wall": sum(done.total_s + done.rest_s for done in rounds)}


def split_cost(rounds: Sequence[Round]) -> float | None:
    """Seconds that timing drafting and verifying apart added to a round: the difference of medians, as measured here.

    Compares timed with other rounds of the same draft length, and takes the length with the most pairs; `None` where
    there are none to compare.
    """
    totals: dict[tuple[int, bool], list[float]] = defaultdict(list)
    for done in rounds:
        totals[done.drafted, done.draft_s is not None].append(done.total_s)
    lengths = [length for length, timed in totals if timed and length and (length, False) in totals]
    if not lengths:
        return None
    length = max(lengths, key=lambda one: min(len(totals[one, True]), len(totals[one, False])))
    return median(totals[length, True]) - median(totals[length, False])
