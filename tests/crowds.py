"""Several requests at once: random jobs from a seed, what each of them gives alone, and a drafter that is often right.

Alone means the target without a drafter, in a session of its own.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import grids
import mlx.core as mx

from dflash_mlx import generate
from dflash_mlx.slots import Slots

SHAPE = "window 11"
PROMPT = grids.prompts(SHAPE)["5 windows"]
SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "top_p": 0.9, "seed": 5},
    {"temperature": 1.3, "top_k": 40, "seed": 6, "repetition_penalty": 1.2},
    {"repetition_penalty": 1.5, "repetition_context": 5, "logit_bias": {3: 2.5}},
)


@dataclass(frozen=True)
class Job:
    """One request.

    Attributes:
        cancel_after: tokens after which its client goes away; `None`: it stays.
        arrives: the step before which it comes.
    """

    prompt: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]
    choice_index: int
    cancel_after: int | None
    arrives: int

    @property
    def asked(self) -> dict[str, Any]:
        """The options by name."""
        return dict(self.options)


def jobs(seed: int, count: int, kind: str = "float32") -> list[Job]:
    """Prompts of 1 to 90 tokens, all kinds of sampling and draft lengths, arrivals over 20 steps; a quarter leaves."""
    draw, vocab = random.Random(seed), grids.pair(SHAPE, kind).target.config.vocab_size
    found = []
    for _ in range(count):
        options = {
            "max_tokens": draw.randrange(1, 32),
            "draft_length": draw.choice((0, 1, 4, 7, 15, "auto", "auto")),
            "prefill_step_size": draw.choice((1, 7, 16, 2048)),
            **draw.choice(SAMPLING),
        }
        prompt = tuple(draw.randrange(vocab) for _ in range(draw.choice((1, 2, 9, 11, 12, 40, 90))))
        leaves = draw.randrange(0, 20) if draw.random() < 0.25 else None
        items = tuple((name, value if name != "logit_bias" else Bias(value)) for name, value in options.items())
        found.append(Job(prompt, items, draw.choice((0, 0, 0, 1, 2)), leaves, draw.randrange(20)))
    return found


class Bias(dict):
    """A logit bias that can be a key of a cache."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


def alone(job: Job, kind: str = "float32") -> list[int]:
    """The tokens of a job, decoded plainly by itself."""
    return list(_alone(job.prompt, job.options, job.choice_index, kind))


@cache
def _alone(prompt: tuple[int, ...], options: tuple[tuple[str, Any], ...], index: int, kind: str) -> tuple[int, ...]:
    asked = {**dict(options), "draft_length": 0, "prefill_step_size": 2048}
    pair = grids.pair(SHAPE, kind).without_drafter()
    return tuple(generate(pair, list(prompt), choice_index=index, **asked).tokens)


class Guide(grids.Tutor):
    """A tutor for many histories: it takes the first that has the anchor where this session has it."""

    def __init__(self, drafter: Any, histories: Sequence[Sequence[int]], right: float = 0.8):
        super().__init__(drafter, [], right)
        self._histories = histories

    def draft(self, block: mx.array, context: Any, target: Any, rows: int) -> Slots:
        """As the tutor's."""
        at, anchor = context.offset, block[0].item()
        known = (each for each in self._histories if at < len(each) and each[at] == anchor)
        self._tokens = list(next(known, ()))
        return super().draft(block, context, target, rows)


def guided(found: Sequence[Job], kind: str = "float32", right: float = 0.8) -> Any:
    """The pair, with a drafter that knows what the jobs will give."""
    pair = grids.pair(SHAPE, kind)
    histories = [[*job.prompt, *alone(job, kind)] for job in found]
    return grids.replace(pair, drafter=Guide(pair.drafter, histories, right))


def solo(prompt: Sequence[int], **options: Any) -> list[int]:
    """The tokens of a prompt, decoded plainly by itself."""
    return generate(grids.pair(SHAPE).without_drafter(), list(prompt), **{**options, "draft_length": 0}).tokens


class Gate:
    """A logits processor that stops the engine in each step until the test lets it pass."""

    def __init__(self) -> None:
        self.open, self.reached, self.passed = threading.Semaphore(0), threading.Semaphore(0), 0

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        self.reached.release()
        assert self.open.acquire(timeout=60)
        self.passed += 1
        return logits

    def wait(self) -> None:
        """Until the engine stands in a step."""
        assert self.reached.acquire(timeout=60)

    def leave(self) -> None:
        """Let all steps pass from now on."""
        self.open.release(10_000)


def gated(engine: Any, prompt: Sequence[int] = PROMPT[:5], **options: Any) -> tuple[Gate, Any]:
    """A request of 500 plain tokens that a gate stops in each step."""
    gate = Gate()
    options = {"max_tokens": 500, "draft_length": 0, **options}
    return gate, engine.submit(prompt, logits_processors=[gate], **options)


def read(ticket: Any) -> tuple[list[int], str, Any]:
    """A ticket's tokens, its chunks' text, and the last chunk."""
    chunks = list(ticket)
    return [token for chunk in chunks for token in chunk.tokens], "".join(chunk.text for chunk in chunks), chunks[-1]
