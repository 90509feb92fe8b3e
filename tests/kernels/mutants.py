"""Deliberate faults in a kernel: by hand, and by rule at every place where the rule applies.

A mutant counts as caught where the harness reports it or a result is wrong; a text that does not compile would prove
nothing, and is an error of the suite. Each kernel's file of mutants has a `Subject`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType

from dflash_mlx.kernels.launch import parse_kernels
from dflash_mlx.resources import find

# What a rule turns into what, where it stands in the code of a kernel.
RULES = (
    (r"(?<=[\w)\]]) < (?=[\w(])", " <= "),
    (r"(?<=[\w)\]]) > (?=[\w(])", " >= "),
    (r" \+ 1\b(?!\.)", ""),
    (r" - 1\b(?!\.)", ""),
    (r"\bmax\(", "min("),
    (r"\bmin\(", "max("),
    (r" \|\| ", " && "),
    (r" >= ", " > "),
    (r" == 0\.0f", " != 0.0f"),
    (r" % ", " / "),
    (r"(?<!32) / (?=[a-su-zA-Z]|tile)(?!float)", " % "),
    (r"\+= fade|\*= fade", "*= 1.0f"),
    (r"\bushort\(8\)", "ushort(2)"),
    (r"\bushort\(1\)", "ushort(4)"),
    (r"\bushort\((?:2|4|16)\)", "ushort(8)"),
    (r"threadgroup_barrier\(mem_flags::mem_threadgroup\);", ""),
    (r"mem_flags::mem_threadgroup\b", "mem_flags::mem_device"),
)


@dataclass(frozen=True)
class Mutant:
    """A changed file."""

    name: str
    text: str


@dataclass(frozen=True)
class Subject:
    """A kernel file whose mutants are to be caught.

    Attributes:
        launcher: the module that launches it; its FILE is the file's name.
        by_hand: per name what is replaced, with what, and which of its places (from 0).
        equivalent: what changes nothing, and why. Each is run, and must pass all cases.
        broken: runs the cases with the launcher as it is, and gives the first wrong result, or "" where there is none;
            it may raise KernelFault.
    """

    launcher: ModuleType
    by_hand: Mapping[str, tuple[str, str, int]]
    equivalent: Mapping[str, str]
    broken: Callable[[], str]

    @cached_property
    def text(self) -> str:
        return (find("metal") / self.launcher.FILE).read_text()

    def mutants(self) -> list[Mutant]:
        """All of them; each still has the file's kernels."""
        made = [*self._thought_of(), *self._by_rule()]
        names = parse_kernels(self.launcher.FILE, self.text).keys()
        assert all(parse_kernels(self.launcher.FILE, mutant.text).keys() == names for mutant in made)
        assert self.equivalent.keys() <= {mutant.name for mutant in made}
        return made

    def _thought_of(self) -> Iterator[Mutant]:
        """The faults by hand."""
        for name, (old, new, place) in self.by_hand.items():
            parts = self.text.split(old)
            assert len(parts) > place + 1, f"{name}: {old!r} is not in the file"
            yield Mutant(name, old.join(parts[: place + 1]) + new + old.join(parts[place + 1 :]))

    def _by_rule(self) -> Iterator[Mutant]:
        """One mutant per place where a rule applies."""
        seen: Counter[str] = Counter()
        for pattern, replacement in RULES:
            for begin, end in self._code():
                for match in re.finditer(pattern, self.text[begin:end]):
                    start, stop = begin + match.start(), begin + match.end()
                    line = self.text[self.text.rfind("\n", 0, start) + 1 : self.text.index("\n", start)].strip()
                    what = f"{line} : {match[0].strip()} becomes {replacement.strip() or 'nothing'}"
                    seen[what] += 1
                    name = what if seen[what] == 1 else f"{what}, place {seen[what]}"
                    yield Mutant(name, self.text[:start] + replacement + self.text[stop:])

    def _code(self) -> list[tuple[int, int]]:
        """The spans of the file that are code: not the header, not comments."""
        spans, at = [], self.text.index("// ==== ")
        for match in re.finditer(r"//.*", self.text[at:]):
            spans.append((spans[-1][2] if spans else at + match.start(), at + match.start(), at + match.end()))
        return [(begin, end) for begin, end, _ in spans] + [(spans[-1][2], len(self.text))]
