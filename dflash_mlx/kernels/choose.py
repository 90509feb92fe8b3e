"""What serves a pair's operations: what was asked for, what this machine has qualified, or else stock, and why."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..errors import InputError, must, one_of
from .apart import METAL_DEVICE, load_device, qualify_apart, trial_of
from .launch import Device
from .places import KINDS, OPERATIONS, Place, as_data
from .qualify import ROWS, Range, Verdict
from .serving import STOCK, Kernels
from .verdicts import Verdicts, place_key

CHOICES = ("auto", "stock", "metal")
ALL_ROWS: Range = (ROWS[0], ROWS[-1])


@dataclass(frozen=True)
class Chosen:
    """What serves.

    Attributes:
        kernels: for the models.
        operations: operation -> "metal" or "stock: why", or both where rows or places differ.
        notes: what went another way than it should.
    """

    kernels: Kernels
    operations: dict[str, str]
    notes: tuple[str, ...] = ()


def device_here() -> tuple[str, str]:
    """The device for kernels as "module:name", or "" and why there is none."""
    if not mx.metal.is_available():
        return "", "this machine has no Metal"
    if mx.default_device().type.name == "cpu":
        return "", "MLX's default device is the CPU"
    # A program packed into one file is not a Python that could qualify kernels.
    return (
        ("", "this program has no Python interpreter to qualify with") if hasattr(sys, "frozen") else (METAL_DEVICE, "")
    )


def choose(choice: str, places: Sequence[Place], unfit: str = "", left_out: Mapping[str, str] | None = None) -> Chosen:
    """Find what serves at each place; qualifies what has no verdict yet, which takes some seconds, once.

    Args:
        choice: "auto": kernels where they agree and are not slower. "metal": wherever they agree. "stock": nowhere.
        places: of the pair.
        unfit: why no kernel is made for this pair, or "".
        left_out: places of the pair for which no kernel is made -> why.
    Raises:
        InputError: the choice is unknown, or "metal" where a kernel cannot serve.
    """
    check_choice(choice)
    if choice == "stock":
        return _stock("asked for")
    name, why_not = device_here()
    if not name or unfit:
        why_not = why_not or unfit
        if choice == "metal":
            raise InputError(must("load", "kernels", "'auto' or 'stock'", "'metal'", f"No kernel can run: {why_not}."))
        return _stock(why_not)
    verdicts, notes = verdicts_for(places, name)
    if choice == "metal":
        _require(verdicts)
    ranges = {v.place["name"]: ALL_ROWS if choice == "metal" else v.rows for v in verdicts}
    device = load_device(name)
    notes += _warm(places, ranges, verdicts, device)
    served = {place: rows for place, rows in ranges.items() if rows[0] <= rows[1]}
    return Chosen(Kernels(served, device), _operations(places, verdicts, served, left_out or {}), tuple(notes))


def check_choice(choice: str) -> None:
    """Refuse an unknown choice.

    Raises:
        InputError: it is none of the three.
    """
    if choice not in CHOICES:
        expected = one_of(CHOICES)
        raise InputError(must("load", "kernels", expected, repr(choice), "Leave it out to let the runtime choose."))


def verdicts_for(places: Sequence[Place], device: str, anew: bool = False) -> tuple[list[Verdict], list[str]]:
    """Give each place's verdict, stored or made now, and notes.

    Args:
        places: of the pair.
        device: "module:name".
        anew: make all of them, whatever is stored.
    """
    store = Verdicts()
    known = {} if anew else store.read()
    missing = [place for place in places if place_key(as_data(place)) not in known]
    made = qualify_apart(missing, device)
    notes = []
    if made and (failed := store.add(made)):
        notes.append(f"The kernels' verdicts could not be stored: {failed}. The next load will qualify them again.")
    known |= {place_key(verdict.place): verdict for verdict in made}
    verdicts = [known[place_key(as_data(place))] for place in places]
    notes += [
        f"Kernel for the {verdict.place['name']}: stock operations serve, since {verdict.why}. "
        "Please report the output of 'dflash-mlx doctor --kernels --json'."
        for verdict in verdicts
        if not verdict.agrees
    ]
    return verdicts, notes


def _stock(why: str) -> Chosen:
    return Chosen(STOCK, dict.fromkeys(OPERATIONS, f"stock: {why}"))


def _require(verdicts: Sequence[Verdict]) -> None:
    """With "metal" a kernel that cannot serve is an error."""
    for verdict in verdicts:
        if not verdict.agrees:
            todo = f"The kernel for the {verdict.place['name']} cannot serve: {verdict.why}."
            raise InputError(must("load", "kernels", "'auto' or 'stock'", "'metal'", todo))


def _warm(places: Sequence[Place], ranges: dict[str, Range], verdicts: Sequence[Verdict], device: Device) -> list[str]:
    """Make the pipelines of all that serves now, not in the first round; what fails here does not serve."""
    notes = []
    for place, verdict in zip(places, verdicts, strict=True):
        if ranges[place.name][0] > ranges[place.name][1]:
            continue
        try:
            mx.eval(trial_of(place).warm(device))
        except Exception as error:  # whatever a driver refuses with
            verdict.why = f"it was refused at load: {str(error).strip().splitlines()[0]}"
            ranges[place.name] = (1, 0)
            notes.append(f"Kernel for the {place.name}: stock operations serve, since {verdict.why}.")
    return notes


def _operations(
    places: Sequence[Place], verdicts: Sequence[Verdict], served: dict[str, Range], left_out: Mapping[str, str]
) -> dict[str, str]:
    """Say per operation what serves: one word where it is the same for all rows and places."""
    found = {}
    for operation in OPERATIONS:
        mine = [(p.name, v.why) for p, v in zip(places, verdicts, strict=True) if p.operation == operation]
        mine += [(name, why) for name, why in left_out.items() if KINDS[name].operation == operation]
        ranges = {served.get(name) for name, _ in mine}
        if not mine:
            found[operation] = "stock: no drafter"
        elif ranges == {ALL_ROWS}:
            found[operation] = "metal"
        elif ranges == {None}:
            whys = dict.fromkeys(why for _, why in mine)
            found[operation] = f"stock: {'; '.join(whys)}"
        else:
            found[operation] = "; ".join(_said(name, served.get(name), why) for name, why in mine)
    return found


def _said(name: str, rows: Range | None, why: str) -> str:
    """One place in words."""
    if rows is None:
        return f"stock at the {name}: {why}"
    return f"metal at the {name}" + ("" if rows == ALL_ROWS else f" for {rows[0]} to {rows[1]} rows")
