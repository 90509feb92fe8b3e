"""Which proposal rule makes drafter and target agree most often: c, and Q from raw or from multiplied logits.

One plain generation per prompt, seed and temperature is enough. A drafted generation has the same tokens, so at every
position of it the block that a rule would propose is accepted up to the first token that differs, and walking from
round to round gives the mean that a real run has (the script checks that against real runs).

The bound is the classical rejection rule (Leviathan et al. 2023) with drafts drawn apart from the target's noise, on
the same P and Q: given the token x that comes out, its draft was accepted with probability min(1, Q(x)/P(x)), so the
expected rounds along the same text follow by a recursion from its end. Nothing is drawn for it.

Command: python bench/proposal_rules.py --tokens 100 --seeds 2
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

import dflash_mlx
from dflash_mlx.cache import DrafterContext, Part, TargetCache
from dflash_mlx.choice import PROPOSAL, Choice, ProposalRule
from dflash_mlx.noise import gumbel, position_keys, uniform
from dflash_mlx.options import Options
from dflash_mlx.slots import Slots
from dflash_mlx.text import encode

PROMPTS = [
    "def fibonacci(n):\n",
    "class Queue:\n    def __init__(self",
    "import os\nimport sys\n\n\ndef main(argv):\n",
    "def read_lines(path):\n    with open(path) as file:\n",
    "class TestParser(unittest.TestCase):\n    def test_empty(self):\n",
    "async def copy(reader, writer):\n",
    "    def __repr__(self):\n        return",
    "for name, value in sorted(",
]
MULTIPLES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5)
RULES = [ProposalRule(c, multiplied) for multiplied in (False, True) for c in MULTIPLES if c or multiplied]
SHARED, CLASSICAL, EQUAL = "shared noise", "classical rejection", "drawn apart, kept where equal"


@dataclass
class Text:
    """One generation and what the pair says about it.

    Attributes:
        tokens: the prompt's and the generated ones.
        start: position of the first anchor, the first generated token.
        target: log P at the temperature of each position's token, [N] float64; 0 before the generated ones.
    """

    tokens: list[int]
    start: int
    target: np.ndarray


def features(pair: Any, tokens: Sequence[int]) -> tuple[np.ndarray, list[mx.array]]:
    """The target's logits [N, V] for the token after each position, and its taps, each [N, E]."""
    cache, taps = TargetCache(pair.target.config, pair.dtype, len(tokens)), pair.drafter.config.taps
    logits, tapped = [], []
    while cache.offset < len(tokens):
        rows = min(cache.max_rows, len(tokens) - cache.offset)
        fed = mx.array(tokens[cache.offset : cache.offset + rows], dtype=mx.uint32)
        forward = pair.target(fed, [Part(cache, rows, rows)], taps)
        cache.advance(rows)
        mx.eval(forward.logits, forward.taps, cache.arrays)
        logits.append(np.array(forward.logits))
        tapped.append(forward.taps)
    return np.concatenate(logits), [mx.concatenate(layer) for layer in zip(*tapped, strict=True)]


def log_probability(logits: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
    """Of each row's own token, [N, V] -> [N] float64."""
    logits = logits.astype(np.float64)
    top = logits.max(-1, keepdims=True)
    whole = top[:, 0] + np.log(np.exp(logits - top).sum(-1))
    return logits[np.arange(len(tokens)), list(tokens)] - whole


def scales(multiplier: float, temperature: float) -> np.ndarray:
    """What each rule multiplies raw head logits by, [rules, 1, 1]; the drafter's argmax is a very large one."""
    found = [(multiplier if r.multiplied else 1.0) / (r.c * temperature) if r.c else 1e6 for r in RULES]
    return np.array(found, dtype=np.float32)[:, None, None]


@dataclass
class Walk:
    """Per rule and anchor of one text: accepted drafts with shared noise, and acceptance by slot drawn apart.

    Attributes:
        accepted: [rules, anchors].
        kept: [rules, anchors, S-1] probability that the slot's draft is accepted by the classical rule.
        equal: the same for drafts drawn apart and kept where they are the target's own token.
    """

    accepted: np.ndarray
    kept: np.ndarray
    equal: np.ndarray


def walk(pair: Any, options: Options, seed: int, text: Text, taps: list[mx.array]) -> Walk:
    """Draft a whole block at every generated position."""
    drafter, target = pair.drafter, pair.target
    slots, size = drafter.config.block_size - 1, len(text.tokens)
    scale, rule_of = np.unique(scales(target.config.output_multiplier, options.temperature), return_inverse=True)
    scale, rule_of = scale[:, None, None], rule_of.ravel()  # raw and multiplied rules share some scales
    context = DrafterContext(drafter.config, drafter.dtype)
    anchors = range(text.start, size - 1)
    accepted = np.zeros((len(RULES), len(anchors)), int)
    kept, equal = (np.zeros((len(RULES), len(anchors), slots)) for _ in range(2))
    noise = gumbel(uniform(position_keys(seed, 0, 0, size), target.config.vocab_size))
    for column, anchor in enumerate(anchors):
        while context.offset < anchor:
            rows = min(context.max_rows, anchor - context.offset)
            drafter.extend(context, [tap[context.offset : context.offset + rows] for tap in taps])
            context.advance(rows)
        block = mx.array([text.tokens[anchor], *[drafter.config.mask_token_id] * slots], dtype=mx.uint32)
        own = mx.array(text.tokens[anchor + 1 : anchor + 1 + slots])
        logits = drafter.draft_logits(block, context, target, own.shape[0])
        below = (logits - mx.max(logits, axis=-1, keepdims=True))[None] * mx.array(scale)
        proposed = mx.argmax(below + noise[None, anchor + 1 : anchor + 1 + slots], axis=-1)
        same = mx.sum(mx.cumprod((proposed == own[None]).astype(mx.int32), axis=-1), axis=-1)
        at_own = mx.take_along_axis(below, mx.broadcast_to(own[None, :, None], (len(scale), own.shape[0], 1)), axis=-1)
        log_q = at_own[..., 0] - mx.logsumexp(below, axis=-1)
        mx.eval(same, log_q, proposed, [array for layer in context.layers for array in (layer.keys, layer.values)])
        if column == 0:
            mine = np.array(proposed)[rule_of]
            check_rules(options, seed, logits, text.tokens[: anchor + 1], target.config.output_multiplier, mine)
        accepted[:, column] = np.array(same)[rule_of]
        log_q = np.array(log_q, dtype=np.float64)[rule_of]
        log_p = text.target[anchor + 1 : anchor + 1 + slots]
        kept[:, column, : own.shape[0]] = np.exp(np.minimum(0, log_q - log_p))
        equal[:, column, : own.shape[0]] = np.exp(log_q)
    return Walk(accepted, kept, equal)


def check_rules(
    options: Options, seed: int, logits: mx.array, history: list[int], multiplier: float, proposed: np.ndarray
) -> None:
    """The proposals here are those of the package; rounding may turn one near tie."""
    for rule, mine in zip(RULES, proposed, strict=True):
        package = Choice(options, seed, rule=rule).proposal(Slots(logits, multiplier), len(history), history)
        if np.sum(np.array(package) != mine) > 1:
            raise AssertionError(f"{rule}: {package.tolist()} from the package but {mine.tolist()} here")


def rounds_of(accepted: np.ndarray) -> float:
    """Rounds that a rule takes along one text, [anchors] -> count."""
    at, count = 0, 0
    while at < len(accepted):
        at += int(accepted[at]) + 1
        count += 1
    return float(count)


def expected_rounds(kept: np.ndarray) -> float:
    """Expected rounds where each slot's draft is accepted with a probability of its own, [anchors, S-1] -> count."""
    size, slots = kept.shape
    after = np.zeros(size + slots + 2)
    for at in range(size - 1, -1, -1):
        reach = np.concatenate([[1.0], np.cumprod(kept[at])])  # P(accepted >= i); slots past the end are 0
        exactly = reach - np.concatenate([reach[1:], [0.0]])
        after[at] = 1 + sum(p * after[min(at + 1 + i, size)] for i, p in enumerate(exactly) if p > 0)
    return float(after[0])


@dataclass
class Tally:
    """Tokens and rounds of each text for one rule, with the bootstrap's standard error of the mean accepted."""

    tokens: list[int]
    rounds: list[float]

    @property
    def mean(self) -> float:
        return sum(self.tokens) / sum(self.rounds) - 1

    @property
    def error(self) -> float:
        random, tokens, rounds = np.random.RandomState(0), np.array(self.tokens), np.array(self.rounds)
        picks = random.randint(0, len(tokens), (400, len(tokens)))
        return float((tokens[picks].sum(1) / rounds[picks].sum(1)).std())


def measure(pair: Any, temperature: float, seeds: int, count: int, prompts: Sequence[str]) -> dict[Any, Tally]:
    """All rules at one temperature."""
    tallies: dict[Any, Tally] = {}
    for number, prompt in enumerate(prompts):
        for seed in range(seeds):
            options = Options(temperature=temperature, seed=1000 * seed + number, max_tokens=count)
            asked = {"temperature": temperature, "seed": options.seed, "max_tokens": count}
            ids = encode(pair.tokenizer, prompt)
            tokens = ids + dflash_mlx.generate(pair.without_drafter(), ids, **asked).tokens
            if len(tokens) < len(ids) + 3:
                continue
            logits, taps = features(pair, tokens)
            text = Text(tokens, len(ids), np.zeros(len(tokens)))
            text.target[1:] = log_probability(logits[:-1] / temperature, tokens[1:])
            walked = walk(pair, options, options.seed or 0, text, taps)
            for row, rule in enumerate(RULES):
                for name, rounds in (
                    (SHARED, rounds_of(walked.accepted[row])),
                    (CLASSICAL, expected_rounds(walked.kept[row])),
                    (EQUAL, expected_rounds(walked.equal[row])),
                ):
                    tally = tallies.setdefault((name, rule), Tally([], []))
                    tally.tokens.append(walked.accepted.shape[1])
                    tally.rounds.append(rounds)
            if number == 0 and seed == 0:
                check_walk(pair, ids, asked, rounds_of(walked.accepted[RULES.index(PROPOSAL)]))
    return tallies


def check_walk(pair: Any, ids: list[int], asked: dict[str, Any], rounds: float) -> None:
    """A real run takes as many rounds as the walk says; two more or fewer are left for its shorter last blocks."""
    real = dflash_mlx.generate(pair, ids, **asked, draft_length=pair.block_size - 1)
    if abs(len(real.stats.rounds) - rounds) > 2:
        raise AssertionError(f"a real run takes {len(real.stats.rounds)} rounds, the walk {rounds:.0f}")


def name_of(rule: ProposalRule) -> str:
    """A rule in the table's words."""
    if rule.c == 0:
        return "argmax (c = 0)"
    return f"{'multiplied' if rule.multiplied else 'raw'}, c = {rule.c:g}"


def table(results: dict[float, dict[Any, Tally]]) -> str:
    """Mean accepted drafts per round, as Markdown."""
    heads = [f"T = {temperature:g}" for temperature in results]
    lines = [f"| rule | Q | {' | '.join(heads)} |", f"|---|---|{'---|' * len(heads)}"]
    best = max(RULES, key=lambda rule: sum(each[EQUAL, rule].mean for each in results.values()))
    for name in (SHARED, CLASSICAL, EQUAL):
        for rule in RULES:
            if (name == CLASSICAL and rule.c == 0) or (name == EQUAL and rule != best):
                continue
            cells = [f"{each[name, rule].mean:.2f} ± {each[name, rule].error:.2f}" for each in results.values()]
            default = " (default)" if name == SHARED and rule == PROPOSAL else ""
            lines.append(f"| {name}{default} | {name_of(rule)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--tokens", type=int, default=100, help="generated tokens per text")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.3, 0.7, 1.0, 1.5])
    parser.add_argument("--json", type=Path, help="write the figures here too")
    asked = parser.parse_args()
    mx.set_default_device(mx.cpu)  # counts do not depend on the device, bits do
    pair = dflash_mlx.load(asked.model, draft=asked.draft)
    started, results = time.perf_counter(), {}
    for temperature in asked.temperatures:
        results[temperature] = measure(pair, temperature, asked.seeds, asked.tokens, PROMPTS[: asked.prompts])
    some = next(iter(results[asked.temperatures[0]].values()))
    print(f"{asked.model}: mean accepted drafts per round, blocks of {pair.block_size - 1} drafts, output multiplier")
    print(f"{pair.target.config.output_multiplier:g}; {len(some.tokens)} texts, {sum(some.tokens)} tokens at the first")
    print(f"temperature; ± one standard error over texts; {time.perf_counter() - started:.0f} s\n")
    print(table(results))
    if asked.json:
        rows = [
            {"temperature": t, "rule": name, "c": rule.c, "multiplied": rule.multiplied, "mean_accepted": tally.mean,
             "standard_error": tally.error, "tokens": sum(tally.tokens), "rounds": sum(tally.rounds)}
            for t, tallies in results.items() for (name, rule), tally in tallies.items()
        ]  # fmt: skip
        asked.json.write_text(json.dumps([row for row in rows if math.isfinite(row["mean_accepted"])], indent=1))


if __name__ == "__main__":
    main()
