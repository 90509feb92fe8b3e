"""The grid of cases for rounds: pairs, kinds of weights, prompts, prefill steps and draft lengths.

Also the two instruments that the tests of rounds share: a loop that drafts a given length each round, and a drafter
whose proposals are right or wrong by a script, so that every accepted count happens whatever the weights are.
"""

from __future__ import annotations

import atexit
import itertools
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from tiny import Quantisation, tiny_pair

import dflash_mlx
from dflash_mlx import Session
from dflash_mlx.choice import Choice
from dflash_mlx.options import Options
from dflash_mlx.output import Output
from dflash_mlx.prefill import reuse
from dflash_mlx.resources import find
from dflash_mlx.round import Work
from dflash_mlx.round import step as one_step
from dflash_mlx.slots import Slots
from dflash_mlx.state import HostReads, State
from dflash_mlx.stats import Round
from dflash_mlx.text import TextStream

GENERATED, GENERATED_BY_POCKET = 26, 9  # tokens in each case of the grid; the pocket pair takes ten times as long
KINDS = ("float32", "bfloat16", "4-bit")
FIXED = (1, 2, 3, 4, 7, 15)
MIXED = {"falling and rising": (15, 1, 7, 0, 2, 8, 0, 0, 15, 3), "drawn": ()}
LENGTHS: tuple[int | str, ...] = (*FIXED, *MIXED)
ALL_AT_ONCE = 1 << 20
# Odd sizes that differ from each other. Rings of 48 rows (37 in a forward) and of 80 (45): both wrap inside blocks.
SHAPES: dict[str, dict[str, Any]] = {
    "window 11": {
        "vocab": 97, "hidden": 64, "intermediate": 96, "heads": (4, 2), "head_dim": 16, "window": 11, "layers": 4,
        "drafter_layers": 1, "drafter_heads": (8, 1), "drafter_head_dim": 8, "drafter_intermediate": 32,
    },
    "window 35": {
        "vocab": 131, "hidden": 96, "intermediate": 64, "heads": (6, 1), "head_dim": 32, "window": 35, "layers": 5,
        "drafter_layers": 2, "drafter_heads": (4, 2), "drafter_head_dim": 16, "drafter_intermediate": 64,
        "drafter_window": 13, "taps": (0, 3),
    },
    "DFlash-2": {
        "vocab": 113, "hidden": 64, "intermediate": 96, "heads": (4, 2), "head_dim": 16, "window": 17, "layers": 4,
        "drafter_layers": 2, "drafter_heads": (6, 2), "drafter_head_dim": 16, "drafter_intermediate": 32,
        "drafter_window": 15, "drafter_rank": 32, "generation": 2,
    },
}  # fmt: skip
POCKET = "pocket"
PAIRS = (*SHAPES, POCKET)
PROMPTS = ("1 token", "2 tokens", "window - 1", "window", "window + 1", "5 windows")
STEPS = ("1", "7", "window - 1", "window", "window + 1", "all at once")
_FOLDER = tempfile.TemporaryDirectory(prefix="dflash-mlx-grids-")
atexit.register(_FOLDER.cleanup)


def has_pocket() -> bool:
    """Whether the embedded pair is there with both of its models."""
    try:
        return all((find(f"models/pocket/{part}") / "config.json").is_file() for part in ("target", "drafter"))
    except Exception:
        return False


def pair(name: str, kind: str = "float32", seed: int = 0) -> Any:
    """One of the grid's pairs with one kind of weights, loaded once."""
    return _pair(name, kind, seed)


@cache
def _pair(name: str, kind: str, seed: int) -> Any:
    if name == POCKET:
        return _pocket(kind)
    dtype, quantisation = ("float32", Quantisation(4, 32)) if kind == "4-bit" else (kind, None)
    folder = Path(_FOLDER.name) / f"{name} {kind} {seed}".replace(" ", "-")
    parts = tiny_pair(
        folder, dtype=dtype, quantisation=quantisation, drafter_quantisation=quantisation, seed=seed, **SHAPES[name]
    )
    return dflash_mlx.load(parts[0], draft=parts[1])


def _pocket(kind: str) -> Any:
    """The embedded pair with its weights widened or packed: what it computes changes, what it promises does not."""
    loaded = dflash_mlx.load(POCKET)
    dtype = mx.bfloat16 if kind == "bfloat16" else mx.float32
    for model in (loaded.target, loaded.drafter):
        model.set_dtype(dtype)
        if kind == "4-bit":
            nn.quantize(model, group_size=32, bits=4)
    return replace(loaded, dtype=dtype)


def prompts(name: str, kind: str = "float32") -> dict[str, list[int]]:
    """From one token to five windows, tokens drawn from the whole vocabulary."""
    config = pair(name, kind).target.config
    window, draw = config.window, random.Random(len(name))
    counts = {
        "1 token": 1,
        "2 tokens": 2,
        "window - 1": window - 1,
        "window": window,
        "window + 1": window + 1,
        "5 windows": 5 * window,
    }
    return {what: [draw.randrange(config.vocab_size) for _ in range(count)] for what, count in counts.items()}


def steps(name: str, kind: str = "float32") -> dict[str, int]:
    """Prefill steps; one larger than a forward may be is cut by the runtime to the largest."""
    window = pair(name, kind).target.config.window
    edges = {"window - 1": window - 1, "window": window, "window + 1": window + 1}
    return {"1": 1, "7": 7, **edges, "all at once": ALL_AT_ONCE}


@dataclass(frozen=True)
class Case:
    """One point of the grid."""

    pair: str
    kind: str
    prompt: str
    step: str
    length: int | str

    def __str__(self) -> str:
        return f"{self.pair}, {self.kind}, prompt of {self.prompt}, step {self.step}, draft length {self.length}"


def grid(names: Sequence[str] = PAIRS) -> list[Case]:
    """All cases, in a fixed order: pairs, kinds of weights, prompts and draft lengths, each with each.

    Steps are dealt out: any three settings of the random pairs meet. With the pocket pair, which takes ten times as
    long, a prompt has one step for each kind of weights, so that one prefill serves all draft lengths.
    """
    settings = itertools.product(names, KINDS, PROMPTS, LENGTHS)
    return [
        Case(name, kind, prompt, _step(name, kind, prompt, length), length) for name, kind, prompt, length in settings
    ]


def _step(name: str, kind: str, prompt: str, length: int | str) -> str:
    at, weights = PROMPTS.index(prompt), KINDS.index(kind)
    dealt = 2 * weights if name == POCKET else 3 * weights + PAIRS.index(name) + LENGTHS.index(length)
    return STEPS[(at + dealt) % len(STEPS)]


def schedule(length: int | str) -> Iterator[int]:
    """The draft length of each round."""
    if isinstance(length, int):
        return itertools.repeat(length)
    if MIXED[length]:
        return itertools.cycle(MIXED[length])
    draw = random.Random(5)
    return (draw.choice((0, 0, 1, 2, 5, 14, 15)) for _ in itertools.count())


class Tutor:
    """A drafter whose proposal for a position is the target's own token, or a wrong one, by a script.

    The real drafter runs all the same, so that its context is written and read as in any round.

    Args:
        drafter: the real one.
        tokens: the whole history as plain decoding gives it, by position.
        right: share of positions proposed right.
        seed: of the script; which positions are right also depends on where the round begins.
    """

    def __init__(self, drafter: Any, tokens: Sequence[int], right: float = 0.8, seed: int = 0):
        self._drafter, self._tokens, self._right, self._seed = drafter, list(tokens), right, seed
        self.config, self.dtype, self.extend = drafter.config, drafter.dtype, drafter.extend

    def draft(self, block: mx.array, context: Any, target: Any, rows: int) -> Slots:
        """What the real drafter says, with the scripted token's logit raised above all others."""
        slots = self._drafter.draft(block, context, target, rows)
        draw = random.Random(f"{self._seed} {context.offset}")
        vocab, first = slots.logits.shape[-1], context.offset + 1
        known = [*self._tokens, *[0] * (first + rows)][first : first + rows]
        wrong = [0 if draw.random() < self._right else draw.randrange(1, vocab) for _ in known]
        scripted = mx.array([(token + by) % vocab for token, by in zip(known, wrong, strict=True)])
        raised = mx.arange(vocab)[None] == scripted[:, None]
        return slots._replace(logits=mx.where(raised, 1e4, slots.logits))


def tutored(loaded: Any, tokens: Sequence[int], right: float = 0.8, seed: int = 0) -> Any:
    """The pair with its drafter under a tutor."""
    return replace(loaded, drafter=Tutor(loaded.drafter, tokens, right, seed))


@dataclass
class Drive:
    """What a driven generation gave."""

    tokens: list[int]
    rounds: list[Round]
    state: State
    reads: int


def prefill(
    state: State,
    prompt: Sequence[int],
    choice: Choice,
    step: int,
    reads: HostReads,
    output: Output | None = None,
) -> int:
    """Feed what the state does not hold of a prompt, in steps of at most `step`; returns the target's first token."""
    output = output or Output(TextStream(None), (), 1)
    state.tokens[state.cache.offset :] = prompt[state.cache.offset :]
    while not output.tokens:
        rows = min(step, state.cache.max_rows, state.waiting)
        one_step([Work(state, choice, output, rows)], reads)
    return output.tokens[-1]


def drive(
    loaded: Any,
    prompt: Sequence[int],
    lengths: Iterator[int],
    count: int = GENERATED,
    step: int = ALL_AT_ONCE,
    state: State | None = None,
    **options: Any,
) -> Drive:
    """The session's loop with a draft length given for each round; no end token stops it."""
    state, reads = state or State(loaded), HostReads()
    asked = Options(max_tokens=count, **options)
    choice = Choice(asked, asked.seed or 0)
    output = Output(TextStream(None), (), count)
    reuse(state, prompt)
    prefill(state, prompt, choice, step, reads, output)
    rounds = []
    while not output.finish_reason:
        length = min(next(lengths), output.wanted - 1)
        rounds += one_step([Work(state, choice, output, 1, length)], reads)
    return Drive(output.tokens, rounds, state, reads.count)


@cache
def plain(name: str, kind: str, prompt: str, count: int | None = None) -> tuple[int, ...]:
    """What the target alone generates, without a drafter, the prompt fed in the largest steps."""
    count = count or (GENERATED_BY_POCKET if name == POCKET else GENERATED)
    alone = replace(pair(name, kind).without_drafter(), eos_token_ids=frozenset())
    return tuple(Session(alone).generate(prompts(name, kind)[prompt], max_tokens=count).tokens)


def run(case: Case, state: State | None = None) -> tuple[int, ...]:
    """The tokens of a case, from a state of its own or from one that may hold the prompt already.

    Random pairs draft under a tutor, else hardly a draft of theirs would be accepted.
    """
    prompt, step = prompts(case.pair, case.kind)[case.prompt], steps(case.pair, case.kind)[case.step]
    count = GENERATED_BY_POCKET if case.pair == POCKET else GENERATED
    return tuple(drive(drafting(case), prompt, schedule(case.length), count, step, state).tokens)


def drafting(case: Case) -> Any:
    """The pair that a case drafts with."""
    loaded = pair(case.pair, case.kind)
    if case.pair == POCKET:
        return loaded
    history = prompts(case.pair, case.kind)[case.prompt] + list(plain(case.pair, case.kind, case.prompt))
    return tutored(loaded, history, seed=len(str(case)))
