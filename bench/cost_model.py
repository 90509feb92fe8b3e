"""Compares the cost model's predictions with the published figures of Muse Glimmer 30B, row by row.

A prediction takes what a row says (chip, weights, context, draft length, streams) and, for a drafted rate, the mean
length that was published with it. Nothing here was measured by this project.

Command: python bench/cost_model.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from dflash_mlx.chips import GIGA, find_chip
from dflash_mlx.config import TargetConfig
from dflash_mlx.costs import BANDWIDTH_SHARE, COMPUTE_SHARE, Costs, Speeds, quantised_bytes, target_parameters
from dflash_mlx.drafter_config import DrafterConfig
from dflash_mlx.resources import find
from dflash_mlx.toml_files import read_toml

MUSE = "Muse Glimmer 30B"
SHORT = 512  # tokens of context where a row does not say how many


class Row(NamedTuple):
    """One comparison; both in tokens per second, or both in milliseconds."""

    what: str
    unit: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured

    @property
    def speed_ratio(self) -> float:
        """Predicted over measured speed."""
        return self.ratio if self.unit == "tok/s" else 1 / self.ratio


def pair() -> tuple[TargetConfig, DrafterConfig]:
    """The configs of the published pair."""
    raw = read_toml(find("bench/muse_glimmer_30b.toml"))
    return TargetConfig.from_dict(raw["target"]), DrafterConfig.from_dict(raw["drafter"])


def costs_of(row: dict[str, Any]) -> Costs:
    """The cost model for the weights that a row names; the drafter's in bf16."""
    target, drafter = pair()
    numbers = sum(target_parameters(target).values())
    stored = row["file_gb"] * GIGA / numbers if "file_gb" in row else quantised_bytes(row["bits"])
    return Costs(target, drafter, stored)


def plain_rows(published: dict[str, Any]) -> Iterator[Row]:
    """Plain decoding: every row that names its weights, and each published rate once."""
    seen = set()
    for row, costs, speeds, name in _usable(published["figure"]):
        measured = row.get("plain_tok_s")
        if measured is None or (name, measured) in seen:
            continue
        seen.add((name, measured))
        streams = row.get("streams", 1)
        seconds = costs.round_seconds(speeds, 0, row.get("context", SHORT), streams)
        yield Row(f"plain, {name}", "tok/s", streams / seconds, measured)


def verify_rows(published: dict[str, Any]) -> Iterator[Row]:
    """Forwards of several rows."""
    for row, costs, speeds, name in _usable(published["verify"]):
        for rows, measured in row["ms"].items():
            seconds = sum(map(speeds.seconds, costs.forward(int(rows), SHORT).values()))
            yield Row(f"{rows} rows, {name}", "ms", seconds * 1000, measured)


def drafted_rows(published: dict[str, Any]) -> Iterator[Row]:
    """Drafted decoding: the rows that give draft length and mean length, with a drafter of the counted size."""
    for row, costs, speeds, name in _usable(published["figure"]):
        if "mean_length" in row and row["drafter"] in ("v1", "DFlash-2"):
            streams = row.get("streams", 1)
            seconds = costs.round_seconds(speeds, row["draft_length"], row.get("context", SHORT), streams)
            what = f"{row['drafter']}, draft length {row['draft_length']}, {name}"
            yield Row(what, "tok/s", streams * row["mean_length"] / seconds, row["drafted_tok_s"])


def _usable(rows: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], Costs, Speeds, str]]:
    for row in rows:
        chip = find_chip(row["chip"], row.get("gpu_cores"))
        if row["model"] == MUSE and chip and ("bits" in row or "file_gb" in row):
            parts = [row["chip"], row["engine"], row["quantisation"]]
            parts += [f"{row['context']} tokens"] if "context" in row else []
            parts += [f"{row['streams']} streams"] if row.get("streams", 1) > 1 else []
            yield row, costs_of(row), Speeds.of(chip), ", ".join(parts)


def geometric_mean(rows: list[Row]) -> float:
    """Of predicted over measured speed."""
    return math.exp(sum(math.log(row.speed_ratio) for row in rows) / len(rows))


def main() -> None:
    """Print the comparison as Markdown."""
    published = read_toml(find("bench/published.toml"))
    print(f"Shares: {BANDWIDTH_SHARE} of the bandwidth, {COMPUTE_SHARE} of the fp32 rate; drafters in bf16.\n")
    print("| published | predicted | measured | unit | predicted / measured speed |\n|---|---|---|---|---|")
    for rows in (list(plain_rows(published)), list(verify_rows(published)), list(drafted_rows(published))):
        for row in rows:
            print(f"| {row.what} | {row.predicted:.1f} | {row.measured:g} | {row.unit} | {row.speed_ratio:.2f} |")
        print(f"| **geometric mean of {len(rows)}** | | | | **{geometric_mean(rows):.2f}** |")


if __name__ == "__main__":
    main()
