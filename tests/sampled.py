"""The grid of sampling: kinds of weights, temperatures, filters, penalties and seeds.

Each case also has a pair (with a v1 or a DFlash-2 drafter), a prompt, a prefill step and a schedule of draft lengths,
dealt out so that every one of them meets every other setting somewhere. The case is run plainly, and with drafts that
a tutor makes right in 6 of 7 positions.
"""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import grids
import mlx.core as mx
from tiny import tiny_pair

import dflash_mlx

PAIRS = ("window 11", "DFlash-2")
TEMPERATURES = (0.3, 0.7, 1.0, 1.5)
FILTERS: dict[str, dict[str, Any]] = {
    "no filter": {},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.1},
    "top-k": {"top_k": 12},
    "all filters": {"top_p": 0.95, "min_p": 0.02, "top_k": 30},
}
PENALTIES: dict[str, dict[str, Any]] = {
    "no penalty": {},
    "penalty over 4": {"repetition_penalty": 1.4, "repetition_context": 4},
    "penalty over 20 and bias": {
        "repetition_penalty": 1.2, "repetition_context": 20, "logit_bias": {5: 3.0, 60: -2.5, 96: float("-inf")},
    },
}  # fmt: skip
SEEDS = (0, 1, 2, 3, 1234567, 2**32, 2**63 + 5, 2**64 - 1)
LENGTHS = (1, 2, 4, 7, 15, "falling and rising", "drawn")
PROMPTS = ("1 token", "2 tokens", "window + 1", "5 windows")
STEPS = (1, 7, grids.ALL_AT_ONCE)


@cache
def small_pair(**sizes: Any) -> Any:
    """A pair of two layers, for tests whose promise does not depend on the model's size."""
    shape: dict[str, Any] = {
        "vocab": 97, "hidden": 32, "intermediate": 48, "heads": (2, 1), "head_dim": 16, "window": 11, "layers": 2,
        "drafter_layers": 1, "drafter_heads": (2, 1), "drafter_head_dim": 8, "drafter_intermediate": 32,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        pair = dflash_mlx.load(*map(str, tiny_pair(Path(folder), **(shape | sizes))))
        mx.eval(pair.target.parameters(), pair.drafter.parameters())
    return pair


@dataclass(frozen=True)
class Case:
    """One point of the grid; `number` deals out what is not part of it."""

    kind: str
    temperature: float
    filters: str
    penalty: str
    seed: int
    number: int

    def __str__(self) -> str:
        settings = f"{self.kind}, temperature {self.temperature}, {self.filters}, {self.penalty}, seed {self.seed}"
        return f"{self.pair}, {settings}, prompt of {self.prompt}, draft length {self.length}"

    @property
    def options(self) -> dict[str, Any]:
        sampling = {"temperature": self.temperature, "seed": self.seed}
        return sampling | FILTERS[self.filters] | PENALTIES[self.penalty]

    @property
    def prompt(self) -> str:
        return PROMPTS[self.number * 5 // 7 % len(PROMPTS)]

    @property
    def length(self) -> int | str:
        return LENGTHS[self.number % len(LENGTHS)]

    @property
    def pair(self) -> str:
        return PAIRS[self.number % len(PAIRS)]

    @property
    def step(self) -> int:
        return STEPS[self.number // 2 % len(STEPS)]


def grid() -> list[Case]:
    """All cases, in a fixed order: each setting with each, and with two of the seeds, dealt out in turn."""
    settings = list(itertools.product(grids.KINDS, TEMPERATURES, FILTERS, PENALTIES))
    return [
        Case(*values, SEEDS[seed], number=number * len(SEEDS) + seed)
        for number, values in enumerate(settings)
        for seed in (number % len(SEEDS), (number + 3) % len(SEEDS))
    ]


@dataclass
class Outcome:
    """Tokens of both ways, and how the drafts fared."""

    plain: list[int]
    drafted: list[int]
    proposed: int
    accepted: int


def run(case: Case, count: int = grids.GENERATED) -> Outcome:
    """Both ways of decoding."""
    pair, prompt = grids.pair(case.pair, case.kind), grids.prompts(case.pair)[case.prompt]
    plain = grids.drive(pair.without_drafter(), prompt, grids.schedule(0), count, **case.options)
    tutored = grids.tutored(pair, prompt + plain.tokens, right=6 / 7, seed=case.number)
    done = grids.drive(tutored, prompt, grids.schedule(case.length), count, case.step, **case.options)
    proposed = sum(round_.drafted for round_ in done.rounds)
    return Outcome(plain.tokens, done.tokens, proposed, sum(round_.accepted for round_ in done.rounds))
