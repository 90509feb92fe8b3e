"""The benchmark suites in bench/suites: prompts as data, each file with what it rebuilds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from ..chat.template import STRENGTHS
from ..errors import InputError, must, one_of
from ..options import Options
from ..resources import find
from ..toml_files import read_toml

FOLDER = "bench/suites"
KINDS = ("turns", "text", "fill_tokens")
CASE = {"name": str, "turns": list, "text": str, "fill_tokens": int}
SUITE = {
    "name": str,
    "about": str,
    "rebuilds": str,
    "max_tokens": int,
    "temperature": (int, float),
    "reasoning": str,
    "case": list,
}
KIND_NAMES = {str: "a text", int: "an integer", (int, float): "a number", list: "a list"}
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


def read_suites(names: Sequence[str]) -> list[Suite]:
    """Read several suites.

    Raises:
        InputError: as `read_suite`; or two have one name, and their records could not be told apart.
    """
    suites = [read_suite(name) for name in names]
    found = [suite.name for suite in suites]
    if len(set(found)) < len(found):
        raise InputError(must("bench", "suites", "of different names", ", ".join(found), "Give each suite once."))
    return suites


def parse_suite(raw: Mapping[str, Any], where: str) -> Suite:
    """Check what a suite's file holds.

    Raises:
        InputError: a field is missing, unknown or wrong; options of generations are checked as `generate` does.
    """
    _check(raw, SUITE, ("name", "about", "rebuilds", "max_tokens", "case"), where)
    options = Options(max_tokens=raw["max_tokens"], temperature=raw.get("temperature", 0))
    if raw.get("reasoning", STRENGTHS[0]) not in STRENGTHS:
        expected = one_of(STRENGTHS)
        raise InputError(must("bench", f"reasoning in {where}", expected, repr(raw["reasoning"]), "Correct it."))
    cases = tuple(_case(case, where) for case in raw["case"])
    names = [case.name for case in cases]
    if len(set(names)) < len(names):
        raise InputError(must("bench", f"case names in {where}", "all different", ", ".join(names), "Rename one."))
    return Suite(
        name=raw["name"],
        about=raw["about"],
        rebuilds=raw["rebuilds"],
        temperature=float(options.temperature),
        max_tokens=options.max_tokens,
        cases=cases,
        reasoning=raw.get("reasoning"),
    )


def _case(raw: Mapping[str, Any], where: str) -> Case:
    _check(raw, CASE, ("name",), where)
    given = [kind for kind in KINDS if raw.get(kind)]
    if len(given) != 1:
        expected = f"a name and one of {', '.join(KINDS)}"
        raise InputError(must("bench", f"a case in {where}", expected, dict(raw), "Correct the file."))
    if not all(isinstance(turn, str) and turn for turn in raw.get("turns", ())):
        raise InputError(must("bench", f"turns in {where}", "texts", repr(raw["turns"]), "Correct the file."))
    return Case(raw["name"], tuple(raw.get("turns", ())), raw.get("text", ""), raw.get("fill_tokens", 0))


def _check(raw: Any, kinds: Mapping[str, Any], needed: Sequence[str], where: str) -> None:
    """Hold a table to its fields: all that are needed, each of its kind and not empty, and no others."""
    if not isinstance(raw, Mapping):
        raise InputError(must("bench", f"a case in {where}", "a table", repr(raw), "Write [[case]]."))
    for field in raw:
        if field not in kinds:
            known = one_of(kinds)
            raise InputError(must("bench", f"a field in {where}", known, repr(field), "Correct the file."))
    for field in dict.fromkeys((*needed, *raw)):
        value, kind = raw.get(field), kinds[field]
        if isinstance(value, bool) or not isinstance(value, kind) or (field in needed and not value):
            raise InputError(must("bench", f"{field} in {where}", KIND_NAMES[kind], repr(value), "Correct the file."))
        if field == "fill_tokens" and value < 1:
            raise InputError(must("bench", f"{field} in {where}", "at least 1", repr(value), "Correct the file."))


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
