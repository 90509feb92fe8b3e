"""The pocket pair's card: every figure of its drafting tables is the one that was measured, in figures.json."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_mlx.loading.files import read_header
from dflash_mlx.resources import find

POCKET = Path(find("models/pocket"))
FIGURES: dict[str, Any] = json.loads((POCKET / "figures.json").read_text())
CARD = (POCKET / "README.md").read_text()
FOLDERS = {"v1": "drafter", "DFlash-2": "drafter2"}
NAMES = {"v1": "v1", "DFlash-2": "dflash2"}
PARTS = {"code": "Code prompts, greedy", "chat": "Chat prompts, greedy", "code_sampled_0.7": "Code prompts at temp"}


def rows(heading: str) -> Iterator[list[str]]:
    """The cells of the table's rows that follows the line beginning with `heading`."""
    table = CARD[CARD.index(f"\n{heading}") :].split("\n|---", 1)[1].split("\n\n", 1)[0]
    for line in table.splitlines()[1:]:
        yield [cell.strip() for cell in line.strip("| \n").split("|")]


def counted(entry: dict[str, Any]) -> str:
    return f"{entry['mean_accepted']:.2f} ({entry['rounds']})"


def share(entry: dict[str, Any]) -> str:
    return f"{100 * entry['accepted_share']:.0f}%"


@pytest.mark.parametrize("kind", ["code", "chat"])
def test_acceptance_is_what_was_measured(kind: str) -> None:
    found = 0
    for k, drafter, *cells in rows({"code": "60 held-out code", "chat": "20 held-out chat"}[kind]):
        block = FIGURES[f"acceptance_{FOLDERS[drafter]}"][kind]["greedy"]["narrow" if int(k) < 15 else "full"][k]
        expected = [
            text
            for part in ("all", "not_looping")
            for text in (counted(block[part]), f"{block[part]['mean_length']:.2f}", share(block[part]))
        ]
        assert cells == expected, (k, drafter)
        found += 1
    assert found == 8


def test_acceptance_by_slot_is_what_was_measured() -> None:
    found = 0
    for prompts, drafter, cells in rows("By position at draft length 15"):
        kind, _, looping = prompts.partition(", ")
        entry = FIGURES[f"acceptance_{FOLDERS[drafter]}"][kind]["greedy"]["full"]["15"]
        shares = entry["not_looping" if looping else "all"]["by_position"]
        assert cells == " ".join(f"{value:.2f}" for value in shares)
        found += 1
    assert found == 8


@pytest.mark.parametrize("part", PARTS)
def test_rates_are_what_was_measured(part: str) -> None:
    measured = FIGURES["measure"][part]["by_drafter"]
    plain = measured["plain"]["0"]["tokens_per_s"]
    found = list(rows(PARTS[part]))
    assert found[0][:4] == ["0", "none", str(plain), "1.00"]
    for k, drafter, rate, ratio, *cells in found[1:]:
        entry = measured[NAMES[drafter]][k]
        assert (rate, ratio) == (str(entry["tokens_per_s"]), f"{entry['tokens_per_s'] / plain:.2f}")
        whole = entry["all"]
        parts = [counted(entry[name]) for name in ("not_looping", "looping")]
        assert cells == [counted(whole), f"{whole['mean_length']:.2f}", share(whole), *parts]
        assert entry["equal_to_plain"] == FIGURES["measure"][part]["prompts"]
    assert len(found) == 1 + 2 * len(measured["v1"])


QUANTISED = {"16 (bf16)": "", "8": "-8bit", "4": "-4bit", "4, selector whole": "-4bit-selector-whole"}


def test_what_quantising_a_drafter_costs_is_what_was_measured() -> None:
    found = 0
    for drafter, bits, _, *cells in rows("`dflash-mlx convert` with groups"):
        expected = []
        for kind in ("code", "chat"):
            entry = FIGURES["measure_quantised"][kind]["by_drafter"][NAMES[drafter] + QUANTISED[bits]]["7"]
            expected += [counted(entry["all"]), f"{entry['all']['mean_length']:.2f}", counted(entry["not_looping"])]
        assert cells == expected, (drafter, bits)
        found += 1
    assert found == 7


def test_sizes_are_those_of_the_files() -> None:
    for folder in ("target", "drafter", "drafter2"):
        path = POCKET / folder / "model.safetensors"
        count = sum(math.prod(tensor.shape) for tensor in read_header(path).values())
        [line] = re.findall(rf"^\| `{folder}/` .*$", CARD, re.MULTILINE)
        assert line.split("|")[3:5] == [f" {count:,} ", f" {path.stat().st_size:,} "]
