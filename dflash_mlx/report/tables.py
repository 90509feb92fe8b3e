"""The tables of a report as rows of strings: HTML, Markdown and the terminal show the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..bench.summary import rows

Table = tuple[list[str], list[list[str]]]  # header, rows
SUMMARY = (
    "suite", "mode", "turns", "generate tok/s", "predicted**", "times plain", "read tok/s", "first token s",
    "accepted share", "mean length*", "same tokens as plain", "peak memory GB",
)  # fmt: skip
FOOTNOTE = (
    "* tokens committed per drafted round, the target's own token included. "
    "** not measured: tok/s that the cost model gives for these rounds on this chip, where it knows the chip."
)


def summary(found: Sequence[dict[str, Any]]) -> Table:
    """Give the rows of `bench.summary.rows` as text; medians, with the least and the most where they differ."""
    return list(SUMMARY), [
        [
            row["suite"],
            row["mode"],
            str(row["turns"]),
            spread(row["generate_tokens_per_s"], 1),
            spread(row["predicted_tokens_per_s"], 1),
            spread(row["speed_up"], 2),
            spread(row["read_tokens_per_s"], 0),
            spread(row["time_to_first_token_s"], 2),
            share(row["acceptance_rate"]),
            number(row["mean_length"], 2),
            "–" if row["equal_to_plain"] is None else "{} of {}".format(*row["equal_to_plain"]),
            number(row["peak_memory_bytes"] / 1e9, 2),
        ]
        for row in found
    ]


def summary_table(found: Sequence[dict[str, Any]]) -> str:
    """Lay the summary out for a terminal."""
    header, body = summary(found)
    widths = [max(len(row[column]) for row in [header, *body]) for column in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) if column < 2 else cell.rjust(width) for column, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in [header, *body])
    ]
    return "\n".join([*lines, FOOTNOTE])


def conditions(result: dict[str, Any]) -> Table:
    """Give what a result was measured on and with."""
    facts = result["manifest"]
    machine, power, target = facts["machine"], facts["power"], facts["target"]
    memory = machine["memory_bytes"]
    strengths = sorted({record["reasoning"] or "none given" for record in result["records"]})
    shown = [
        ("measured", facts["time"] + ("" if result["complete"] else " (ended early)")),
        ("chip", machine["chip"] + (f", {machine['gpu_cores']} GPU cores" if machine["gpu_cores"] else "")),
        ("memory", f"{memory / 2**30:.0f} GiB" if memory else "unknown"),
        ("system", machine["system"]),
        ("device", machine["device"]),
        ("power", " ".join(filter(None, [power["source"] or "not told", _percent(power["battery_percent"])]))),
        ("thermal limit", _percent(power["thermal"]) or "not told"),
        ("versions", ", ".join(f"{name} {value}" for name, value in facts["versions"].items() if value)),
        ("source", _source(facts["source"])),
        ("target", model(target)),
        *((f"drafter of {mode}", model(drafter)) for mode, drafter in facts["drafters"].items()),
        ("activations and caches", facts["dtype"]),
        *((f"kernel: {name}", served) for name, served in facts["kernels"].items()),
        ("reasoning strength", ", ".join(strengths)),
        ("repeats, rest before each run", f"{facts['flags']['repeats']}, {facts['flags']['cool_down']} s"),
        ("left out", "; ".join(f"{o['suite']} {o['case']}: {o['why']}" for o in result["left_out"]) or "nothing"),
    ]
    return ["what", "value"], [list(row) for row in shown]


def published(found: Sequence[dict[str, Any]]) -> Table:
    """Give published rows; they are other people's measurements, each with its source."""
    header = [
        "model",
        "engine",
        "quantisation",
        "context",
        "prompt",
        "streams",
        "plain tok/s",
        "drafted tok/s",
        "source",
    ]
    keys = (
        "model", "engine", "quantisation", "context", "prompt", "streams", "plain_tok_s", "drafted_tok_s", "source",
    )  # fmt: skip
    return header, [[_text(row.get(key)) for key in keys] for row in found]


def summary_of(result: dict[str, Any]) -> Table:
    """Give the summary of one result."""
    return summary(rows(result["records"]))


def model(facts: dict[str, Any]) -> str:
    """Name a model with its quantisation, bytes and revision."""
    bits = facts["quantisation"]
    kind = f"{bits['bits']} bits in groups of {bits['group_size']}" if bits else "not quantised"
    revision = f", revision {facts['revision'][:12]}" if facts["revision"] else ""
    return f"{facts['name']} ({facts['architecture']}, {kind}, {facts['bytes'] / 1e9:.3g} GB{revision})"


def spread(values: dict[str, float] | None, digits: int) -> str:
    """Write median (least to most)."""
    if values is None:
        return "–"
    texts = [f"{values[key]:.{digits}f}" for key in ("median", "least", "most")]
    return texts[0] if len(set(texts)) == 1 else f"{texts[0]} ({texts[1]} to {texts[2]})"


def number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def _percent(value: int | None) -> str:
    return "" if value is None else f"{value} %"


def _source(facts: dict[str, Any]) -> str:
    if facts["commit"] is None:
        return "an installed package"
    return facts["commit"][:12] + (" with changes" if facts["changed"] else "")


def _text(value: Any) -> str:
    return "–" if value in (None, "") else str(value)
