"""Medians and spreads over the records of a result; the only arithmetic on them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from .modes import PLAIN

Record = dict[str, Any]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Give median, least and most of some figures."""
    return {"median": median(values), "least": min(values), "most": max(values), "count": len(values)}


def acceptance_by_position(rounds: Iterable[Record]) -> list[float]:
    """Share of drafts kept at position 1, 2, .. among the rounds that drafted so far.

    Args:
        rounds: each with the lists `drafted` and `accepted`. A round that an end token cut counts up to the cut.
    """
    kept: dict[int, int] = defaultdict(int)
    tried: dict[int, int] = defaultdict(int)
    for columns in rounds:
        for drafted, accepted in zip(columns["drafted"], columns["accepted"], strict=True):
            for position in range(drafted):
                tried[position] += 1
                kept[position] += accepted > position
    return [kept[position] / tried[position] for position in sorted(tried)]


def rows(records: Sequence[Record]) -> list[Record]:
    """Give a row per suite and mode: speed, length and acceptance over all its cases, turns and repeats.

    `speed_up` is the median of drafted over plain, turn by turn and repeat by repeat.
    """
    plain = {_place(record): record for record in records if record["mode"] == PLAIN}
    groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        groups[record["suite"], record["mode"]].append(record)
    return [_row(suite, mode, group, plain) for (suite, mode), group in groups.items()]


def _place(record: Record) -> tuple[Any, ...]:
    return tuple(record[key] for key in ("suite", "case", "turn", "repeat"))


def _row(suite: str, mode: str, group: list[Record], plain: dict[tuple[Any, ...], Record]) -> Record:
    stats = [record["stats"] for record in group]
    rates = [one["generated_tokens_per_s"] for one in stats if one["generated_tokens_per_s"]]
    predicted = [one for record in group if (one := record["predicted_tokens_per_s"])]
    rounds = [record["rounds"] for record in group]
    drafted, accepted = (sum(sum(columns[key]) for columns in rounds) for key in ("drafted", "accepted"))
    lengths = [
        committed
        for columns in rounds
        for was, committed in zip(columns["drafted"], columns["committed"], strict=True)
        if was
    ]
    twins = [(record, plain[_place(record)]) for record in group if _place(record) in plain and mode != PLAIN]
    ratios = [
        ours["stats"]["generated_tokens_per_s"] / theirs["stats"]["generated_tokens_per_s"]
        for ours, theirs in twins
        if ours["stats"]["generated_tokens_per_s"] and theirs["stats"]["generated_tokens_per_s"]
    ]
    return {
        "suite": suite,
        "mode": mode,
        "turns": len(group),
        "generate_tokens_per_s": spread(rates) if rates else None,
        "predicted_tokens_per_s": spread(predicted) if predicted else None,
        "read_tokens_per_s": spread([one["prompt_tokens_per_s"] for one in stats]),
        "time_to_first_token_s": spread([one["time_to_first_token_s"] for one in stats]),
        "acceptance_rate": accepted / drafted if drafted else None,
        "mean_length": sum(lengths) / len(lengths) if lengths else None,
        "speed_up": spread(ratios) if ratios else None,
        "equal_to_plain": [sum(a["tokens_sha256"] == b["tokens_sha256"] for a, b in twins), len(twins)]
        if twins
        else None,
        "peak_memory_bytes": max(one["peak_memory_bytes"] for one in stats),
        "energy_j_per_token": _energy(group),
    }


def _energy(group: list[Record]) -> float | None:
    """Joules per generated token, where every run was measured."""
    joules = [record["energy_j"] for record in group]
    tokens = sum(record["stats"]["generated_tokens"] for record in group)
    return sum(joules) / tokens if tokens and None not in joules else None
