"""The plots of a report, as SVG text that takes the page's colours, light or dark."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from ..bench.modes import PLAIN
from ..bench.summary import acceptance_by_position
from ..errors import DFlashError, must

INK = "#010203"  # stands for the page's text colour; replaced in the SVG
COLOURS = (
    "#7a7f87",
    "#3b82c4",
    "#d97a1f",
    "#2f9e6b",
    "#b0529b",
    "#c2453f",
    "#8a7a2b",
    "#5b63c9",
    "#4aa3a3",
    "#a06a45",
)  # readable on both grounds
EXTRA = "Install it: pip install '.[bench]' from a checkout."
Records = Sequence[dict[str, Any]]


def plots(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Give title and SVG of every plot that the result has figures for."""
    records = result["records"]
    modes = list(dict.fromkeys(record["mode"] for record in records))
    drawings: list[tuple[str, Callable[[Any, Records, list[str]], bool]]] = [
        ("Speed so far over the answer, every turn", _over_tokens),
        ("Generate tokens per second, every turn", _distribution),
        ("Answer length against speed, every turn", _scatter),
        ("Share of drafts accepted, by position in the block", _by_position),
        ("Generate tokens per second, by draft length", _by_length),
    ]
    found = [(title, svg) for title, draw in drawings if (svg := _draw(draw, records, modes))]
    memory = _draw(lambda axes, _records, _modes: _memory(axes, result["manifest"]), records, modes)
    return [*found, *([("Memory by part, as planned (GB)", memory)] if memory else [])]


def _draw(draw: Callable[[Any, Records, list[str]], bool], records: Records, modes: list[str]) -> str | None:
    """Let `draw` fill axes; `None` where it had nothing to draw."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DFlashError(must("report", "matplotlib", "installed", "no such package", EXTRA)) from error
    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": "dflash-mlx",  # the same figures give the same file
        "font.family": "sans-serif",
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    }
    with rc_context(style):
        figure = Figure(figsize=(7, 3.4), layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.subplots()
        axes.patch.set_alpha(0)
        if not draw(axes, records, modes):
            return None
        if axes.get_legend_handles_labels()[0]:
            figure.legend(frameon=False, fontsize=9, loc="outside right upper")
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None})
    svg = written.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    return re.sub(r'(<svg[^>]*?) width="[^"]*"', r'\1 width="100%"', re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg))


def _colour(modes: list[str], mode: str) -> str:
    return COLOURS[modes.index(mode) % len(COLOURS)]


def _over_tokens(axes: Any, records: Records, modes: list[str]) -> bool:
    """Draw tokens generated so far against the speed so far; the first token is the prefill's and not counted."""
    drawn = False
    for mode in modes:
        for number, record in enumerate(one for one in records if one["mode"] == mode):
            tokens = list(accumulate(record["rounds"]["committed"]))
            seconds = list(accumulate(record["rounds"]["total_s"]))
            pairs = [(n, n / s) for n, s in zip(tokens, seconds, strict=True) if s and n]
            if pairs:
                label = {} if number else {"label": mode}
                axes.plot(*zip(*pairs, strict=True), color=_colour(modes, mode), alpha=0.45, linewidth=1, **label)
                drawn = True
    axes.set(xlabel="tokens generated", ylabel="tok/s so far", ylim=(0, None))
    return drawn


def _rates(records: Records, mode: str) -> list[float]:
    rates = [one["stats"]["generated_tokens_per_s"] for one in records if one["mode"] == mode]
    return [rate for rate in rates if rate]


def _distribution(axes: Any, records: Records, modes: list[str]) -> bool:
    shown = [mode for mode in modes if _rates(records, mode)]
    for place, mode in enumerate(shown):
        rates = _rates(records, mode)
        axes.boxplot([rates], positions=[place], widths=0.5, showfliers=False, **_box(_colour(modes, mode)))
        axes.plot([place] * len(rates), rates, "o", color=_colour(modes, mode), alpha=0.6, markersize=4)
    axes.set_xticks(range(len(shown)), shown)
    axes.set(ylabel="tok/s", ylim=(0, None))
    return bool(shown)


def _box(colour: str) -> dict[str, Any]:
    return {f"{part}props": {"color": colour} for part in ("box", "whisker", "cap", "median")}


def _scatter(axes: Any, records: Records, modes: list[str]) -> bool:
    for mode in modes:
        mine = [one["stats"] for one in records if one["mode"] == mode and one["stats"]["generated_tokens_per_s"]]
        points = [(one["generated_tokens"], one["generated_tokens_per_s"]) for one in mine]
        if points:
            axes.plot(*zip(*points, strict=True), "o", color=_colour(modes, mode), alpha=0.7, markersize=5, label=mode)
    axes.set(xlabel="tokens in the answer", ylabel="tok/s", ylim=(0, None))
    return bool(axes.lines)


def _by_position(axes: Any, records: Records, modes: list[str]) -> bool:
    for mode in modes:
        shares = acceptance_by_position(one["rounds"] for one in records if one["mode"] == mode)
        if shares:
            axes.plot(range(1, len(shares) + 1), shares, "o-", color=_colour(modes, mode), label=mode)
    axes.set(xlabel="position in the block", ylabel="share accepted", ylim=(0, 1))
    axes.xaxis.get_major_locator().set_params(integer=True)
    return bool(axes.lines)


def _by_length(axes: Any, records: Records, modes: list[str]) -> bool:
    """Draw the median of every fixed length; "auto" and plain decoding have no place on this axis but 0."""
    from statistics import median

    kinds = list(dict.fromkeys(mode.split("@")[0] for mode in modes if mode != PLAIN))
    plain = _rates(records, PLAIN)
    drawn = False
    for kind in kinds:
        fixed = sorted(int(mode.split("@")[1]) for mode in modes if re.fullmatch(rf"{kind}@\d+", mode))
        points = [(length, median(rates)) for length in fixed if (rates := _rates(records, f"{kind}@{length}"))]
        if points:
            first = [(0, median(plain))] if plain else []
            axes.plot(*zip(*first, *points, strict=True), "o-", color=_colour(kinds, kind), label=kind)
            drawn = True
    axes.set(xlabel="draft length (0 is plain)", ylabel="median tok/s", ylim=(0, None))
    axes.xaxis.get_major_locator().set_params(integer=True)
    return drawn


def _memory(axes: Any, facts: dict[str, Any]) -> bool:
    """Draw the memory plan of each mode as one bar by part."""
    plans = facts["memory_plan_bytes"]
    parts = list(dict.fromkeys(part for plan in plans.values() for part in plan))
    left = [0.0] * len(plans)
    for number, part in enumerate(parts):
        sizes = [plan.get(part, 0) / 1e9 for plan in plans.values()]
        axes.barh(list(plans), sizes, left=left, color=COLOURS[number % len(COLOURS)], label=part, height=0.5)
        left = [begin + size for begin, size in zip(left, sizes, strict=True)]
    axes.set(xlabel="GB")
    axes.invert_yaxis()
    return bool(parts)
