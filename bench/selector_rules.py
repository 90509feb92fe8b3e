"""Which proposal rule makes a DFlash-2 drafter agree most often with the target: c, and where its candidates come from.

As in proposal_rules.py, one plain generation per prompt, seed and temperature is enough: at every position of it, the
block that a rule would propose is accepted up to the first token that differs. At most as many drafts as
`--draft-length` says.

Command: python bench/selector_rules.py --tokens 100 --seeds 2
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from proposal_rules import PROMPTS, Tally, features, rounds_of

import dflash_mlx
from dflash_mlx.cache import DrafterContext
from dflash_mlx.choice import Choice, ProposalRule
from dflash_mlx.options import Options
from dflash_mlx.slots import Slots
from dflash_mlx.text import encode

MULTIPLES = (0.0, 0.5, 0.75, 1.0, 1.5, 2.0)


def by_score(slots: Slots) -> Slots:
    """Candidates are the tokens of the largest logit over τ plus noise: what the package does."""
    return slots


def by_logit(slots: Slots) -> Slots:
    """Candidates are the tokens of the largest logits, as in dflash's own sampling."""
    edge = mx.sort(slots.logits, axis=-1)[:, -slots.candidates, None]
    return slots._replace(logits=mx.where(slots.logits < edge, -mx.inf, slots.logits))


def alone(slots: Slots) -> Slots:
    """No selector: every slot's token by itself, as v1 proposes."""
    return Slots(slots.logits)


SHORTLISTS: dict[str, Callable[[Slots], Slots]] = {"score": by_score, "logit": by_logit, "no selector": alone}
RULES = [(name, c) for name in SHORTLISTS for c in MULTIPLES if c or name != "logit"]  # without noise both are one


def accepted(pair: Any, options: Options, tokens: list[int], start: int, length: int) -> np.ndarray:
    """Accepted drafts of a block at every generated position, [rules, anchors]."""
    drafter, target = pair.drafter, pair.target
    _, taps = features(pair, tokens)
    context = DrafterContext(drafter.config, drafter.dtype)
    found = []
    for anchor in range(start, len(tokens) - 1):
        while context.offset < anchor:
            rows = min(context.max_rows, anchor - context.offset)
            drafter.extend(context, [tap[context.offset : context.offset + rows] for tap in taps])
            context.advance(rows)
        own = mx.array(tokens[anchor + 1 : anchor + 1 + length])
        block = mx.array([tokens[anchor], *[drafter.config.mask_token_id] * length], dtype=mx.uint32)
        slots = drafter.draft(block, context, target, own.shape[0])
        proposals = []
        for name, c in RULES:
            choice = Choice(options, options.seed or 0, rule=ProposalRule(c))
            proposals.append(choice.proposal(SHORTLISTS[name](slots), anchor + 1, tokens[: anchor + 1]))
        same = (mx.stack(proposals) == own[None]).astype(mx.int32)
        counts = mx.sum(mx.cumprod(same, axis=-1), axis=-1)
        mx.eval(counts, context.arrays)
        found.append(np.array(counts))
    return np.stack(found, axis=1)


def measure(pair: Any, sampling: dict[str, Any], seeds: int, count: int, prompts: Sequence[str], length: int) -> Any:
    """All rules with one way of sampling: a tally for each."""
    tallies = {rule: Tally([], []) for rule in RULES}
    for number, prompt in enumerate(prompts):
        for seed in range(seeds):
            options = Options(seed=1000 * seed + number, max_tokens=count, **sampling)
            ids = encode(pair.tokenizer, prompt)
            asked = {"seed": options.seed, "max_tokens": count, **sampling}
            tokens = ids + dflash_mlx.generate(pair.without_drafter(), ids, **asked).tokens
            if len(tokens) < len(ids) + 3:
                continue
            for rule, row in zip(RULES, accepted(pair, options, tokens, len(ids), length), strict=True):
                tallies[rule].tokens.append(len(row))
                tallies[rule].rounds.append(rounds_of(row))
    return tallies


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--draft", default="dflash2")
    parser.add_argument("--tokens", type=int, default=100, help="generated tokens per text")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--draft-length", type=int, default=7)
    asked = parser.parse_args()
    mx.set_default_device(mx.cpu)  # counts do not depend on the device, bits do
    pair, started = dflash_mlx.load(asked.model, draft=asked.draft), time.perf_counter()
    kinds: dict[str, dict[str, Any]] = {f"T = {t:g}": {"temperature": t} for t in (0.3, 0.7, 1.0, 1.5)}
    kinds["T = 1, top-p 0.95, top-k 64"] = {"temperature": 1.0, "top_p": 0.95, "top_k": 64}
    found = {
        name: measure(pair, sampling, asked.seeds, asked.tokens, PROMPTS[: asked.prompts], asked.draft_length)
        for name, sampling in kinds.items()
    }
    first = next(iter(next(iter(found.values())).values()))
    print(f"{asked.model}, {pair.drafter_kind}: mean accepted of {asked.draft_length} drafts a round")
    seconds = time.perf_counter() - started
    print(f"{len(first.tokens)} texts, {sum(first.tokens)} tokens in the first column; {seconds:.0f} s\n")
    print(f"| candidates by | c | {' | '.join(found)} |\n|---|---|{'---|' * len(found)}")
    for name, c in RULES:
        cells = [f"{tallies[name, c].mean:.2f} ± {tallies[name, c].error:.2f}" for tallies in found.values()]
        print(f"| {name} | {c:g} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
