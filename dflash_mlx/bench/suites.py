"""The benchmark suites in bench/suites: prompts as data, each file with what it rebuilds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from ..errors import InputError, must
from ..resources import find
from ..toml_files import read_toml

FOLDER = "bench/suites"
KINDS = ("turns", "text", "fill_tokens")
WORDS = ("amber", "birch", "cobalt", "delta", "ember", "fjord", "grove", "harbor", "inlet", "juniper", "kelp")
RECORDS = 64  # encoded at once
PRIME = 7919  # steps through the words of a record, so that neighbours differ


@dataclass(frozen=True)
class Case:
    """One thing to run; exactly one of the three kinds of prompt is set.

    Attributes:
        turns: the user's messages of one conversation.
        text: plain text to continue.
        fill_tokens: a prompt of so many tokens, made of numbered records.
    """

    name: str
    turns: tuple[str, ...] = ()
    text: str = ""
    fill_tokens: int = 0


@dataclass(frozen=True)
class Suite:
    """Cases with one set of options.

    Attributes:
        about: what it is, in a line.
        rebuilds: which published measurement it follows, or why it is there.
        reasoning: strength for the chat template; acceptance differs much with it.
    """

    name: str
    about: str
    rebuilds: str
    temperature: float
    max_tokens: int
    cases: tuple[Case, ...]
    reasoning: str | None = None


def suite_names() -> list[str]:
    """Name the suites that come with the package."""
    return sorted(path.stem for path in find(FOLDER).glob("*.toml"))


def read_suite(name: str) -> Suite:
    """Read a suite by its name, or a file of the user's own by its path (ending in .toml).

    Raises:
        InputError: there is none, or a field is missing or wrong.
    """
    path = Path(name) if name.endswith(".toml") else find(FOLDER) / f"{name}.toml"
    if not path.is_file():
        expected = f"one of {', '.join(suite_names())}, or a .toml file"
        raise InputError(must("bench", "suite", expected, repr(name), "Correct the name."))
    return parse_suite(read_toml(path), str(path))


def parse_suite(raw: Mapping[str, Any], where: str) -> Suite:
    """Check what a suite's file holds."""
    for field, kind in (("name", str), ("about", str), ("rebuilds", str), ("max_tokens", int), ("case", list)):
        value = raw.get(field)
        if not isinstance(value, kind) or not value:
            raise InputError(must("bench", f"{field} in {where}", f"a {kind.__name__}", repr(value), "Add it."))
    cases = tuple(_case(case, where) for case in raw["case"])
    names = [case.name for case in cases]
    if len(set(names)) < len(names):
        raise InputError(must("bench", f"case names in {where}", "all different", names, "Rename one."))
    return Suite(
        name=raw["name"],
        about=raw["about"],
        rebuilds=raw["rebuilds"],
        temperature=float(raw.get("temperature", 0)),
        max_tokens=raw["max_tokens"],
        cases=cases,
        reasoning=raw.get("reasoning"),
    )


def _case(raw: Mapping[str, Any], where: str) -> Case:
    given = [kind for kind in KINDS if raw.get(kind)]
    if len(given) != 1 or not raw.get("name"):
        expected = f"a name and one of {', '.join(KINDS)}"
        raise InputError(must("bench", f"a case in {where}", expected, dict(raw), "Correct the file."))
    return Case(raw["name"], tuple(raw.get("turns", ())), raw.get("text", ""), raw.get("fill_tokens", 0))


def filling(tokens: int, tokenizer: Any) -> list[int]:
    """Make a prompt of exactly so many tokens from numbered records, the same for the same tokenizer.

    The records differ from each other, so that neither a drafter nor a cache gets them for nothing.
    """
    ids: list[int] = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    for begin in count(0, RECORDS):
        ids += tokenizer.encode("".join(map(_record, range(begin, begin + RECORDS))), add_special_tokens=False)
        if len(ids) >= tokens:
            break
    return ids[:tokens]


def _record(number: int) -> str:
    words = (WORDS[(number * PRIME + place * (number % 13 + 1)) % len(WORDS)] for place in range(4))
    return f"record_{number} = ({number * PRIME % 10007}, {', '.join(map(repr, words))})\n"
