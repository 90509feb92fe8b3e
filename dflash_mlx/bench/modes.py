"""What is compared: the target alone, and the target with each drafter at each draft length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import InputError, must
from ..pair import Pair

PLAIN = "plain"
KINDS = {"DFlash v1": "v1", "DFlash-2": "dflash2"}


@dataclass(frozen=True)
class Mode:
    """One column of a comparison.

    Attributes:
        name: "plain", or the drafter's kind and the draft length: "v1@4", "dflash2@auto".
    """

    name: str
    pair: Pair
    draft_length: int | str

    @property
    def plain(self) -> bool:
        return self.pair.drafter is None


def check_lengths(lengths: Sequence[int | str]) -> None:
    """What can be said of draft lengths before a drafter is loaded.

    Raises:
        InputError: one is 0, or given twice.
    """
    if 0 in lengths:
        expected = "'auto' or at least 1"
        raise InputError(must("bench", "draft length", expected, 0, "Plain decoding always runs."))
    if len(set(lengths)) < len(lengths):
        found = ", ".join(map(str, lengths))
        raise InputError(must("bench", "draft lengths", "all different", found, "Give each once."))


def modes(pairs: Sequence[Pair], lengths: Sequence[int | str]) -> list[Mode]:
    """Give plain decoding (no drafter work at all) and every pair with a drafter at every length.

    Raises:
        InputError: a length does not fit a drafter's block, or two modes would have one name.
    """
    found = [Mode(PLAIN, pairs[0].without_drafter(), 0)]
    for pair in pairs:
        if pair.drafter is None:
            continue
        for length in lengths:
            if length != "auto" and not (isinstance(length, int) and 0 < length < pair.block_size):
                expected = f"'auto' or between 1 and {pair.block_size - 1}"
                raise InputError(must("bench", "draft length", expected, repr(length), "Plain decoding always runs."))
            found.append(Mode(f"{KINDS[pair.drafter_kind or '']}@{length}", pair, length))
    names = [mode.name for mode in found]
    if len(set(names)) < len(names):
        todo = "Give each drafter and length once."
        raise InputError(must("bench", "modes", "all different", ", ".join(names), todo))
    return found
