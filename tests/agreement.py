"""Runs dflash_mlx on what a golden file holds and measures how far it is from transformers.

A case is one entry of `cases.json` with its arrays: sizes and seeds to rebuild the weights from, inputs, and what
transformers computed in float64 from them. The same functions serve the committed files and the live suite.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from specs import DrafterSpec, TargetSpec, specs_from
from tiny import write_drafter, write_target

from dflash_mlx.cache import DrafterContext, Part, TargetCache
from dflash_mlx.loading import load_drafter, load_target
from dflash_mlx.slots import Slots

GOLDEN = Path(__file__).parent / "golden"
SHARE = 2e-5  # of the largest reference value: what float32 may lose


@dataclass(frozen=True)
class Case:
    """One golden case: the two specs, the recorded facts and the recorded arrays."""

    name: str
    target: TargetSpec
    drafter: DrafterSpec
    facts: dict[str, Any]
    arrays: dict[str, np.ndarray]


def names(folder: Path = GOLDEN) -> list[str]:
    return sorted(json.loads((folder / "cases.json").read_text())["cases"])


def read(name: str, folder: Path = GOLDEN) -> Case:
    facts = json.loads((folder / "cases.json").read_text())["cases"][name]
    arrays = {key: np.array(value) for key, value in mx.load(str(folder / f"{name}.safetensors")).items()}
    return Case(name, *specs_from(facts), facts, arrays)


def load(case: Case, folder: Path, dtype: str = "float32") -> tuple[Any, Any]:
    """Write the case's checkpoints, and load them as a user's would be."""
    target = load_target(write_target(folder / "target", case.target, dtype=dtype))
    drafter = load_drafter(write_drafter(folder / "drafter", case.drafter, dtype=dtype), target.config)
    return target, drafter


def run_target(
    target: Any, tokens: Sequence[int], taps: Sequence[int], steps: Sequence[int] = (), dtype: mx.Dtype = mx.float32
) -> tuple[np.ndarray, np.ndarray]:
    """Logits [T, V] and joined taps [T, L*E], fed in these steps and then in the largest that the cache takes."""
    cache = TargetCache(target.config, dtype, len(tokens) + 16)
    logits, features, wanted = [], [], list(steps)
    while cache.offset < len(tokens):
        rows = min(wanted.pop(0) if wanted else cache.max_rows, len(tokens) - cache.offset)
        fed = mx.array(np.asarray(tokens[cache.offset : cache.offset + rows], np.uint32))
        out = target(fed, [Part(cache, rows, rows)], taps)
        cache.advance(rows)
        logits.append(np.array(out.logits.astype(mx.float32)))
        features.append(np.array(mx.concatenate(out.taps, axis=-1).astype(mx.float32)))
    return np.concatenate(logits), np.concatenate(features)


def run_blocks(
    target: Any,
    drafter: Any,
    tokens: np.ndarray,
    features: np.ndarray,
    rows: Sequence[int],
    dtype: mx.Dtype = mx.float32,
) -> np.ndarray:
    """Drafter logits [rounds, S-1, V]: each round adds context rows, then drafts one whole block after them."""
    return np.stack([np.array(slots.logits) for slots in run_slots(target, drafter, tokens, features, rows, dtype)])


def run_slots(
    target: Any,
    drafter: Any,
    tokens: np.ndarray,
    features: np.ndarray,
    rows: Sequence[int],
    dtype: mx.Dtype = mx.float32,
) -> list[Slots]:
    """What a drafter says of each round's block; the next round's rows overwrite the block's own."""
    config, context = drafter.config, DrafterContext(drafter.config, dtype)
    found = []
    for count in rows:
        for part in range(0, count, context.max_rows):
            step = min(context.max_rows, count - part)
            fed = mx.array(features[context.offset : context.offset + step]).astype(dtype)
            drafter.extend(context, mx.split(fed, len(config.taps), axis=-1))
            context.advance(step)
        block = [int(tokens[context.offset])] + [config.mask_token_id] * (config.block_size - 1)
        found.append(drafter.draft(mx.array(block, mx.uint32), context, target, len(block) - 1))
        mx.eval(found[-1].logits)
    return found


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference between two arrays of the same shape; NaN where either holds one."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    return float(np.abs(found.astype(np.float64) - expected).max())


def agree(found: np.ndarray, expected: np.ndarray, limit: float | None = None) -> None:
    """Within `limit`, or within 2e-5 of the largest expected value."""
    limit = SHARE * float(np.abs(expected).max()) if limit is None else limit
    gap = distance(found, expected)
    assert gap <= limit, f"the largest difference is {gap:.2e}, allowed is {limit:.2e}"


def allowed(case: Case, what: str) -> float:
    """The largest difference allowed in float32: 2e-5 of the largest value, or four times the reference's own.

    Two orders of summing round differently: the largest of many errors came out 2.3 times the reference's where both
    were right. A fault is off by far more.
    """
    return max(SHARE * float(np.abs(case.arrays[what]).max()), 4 * case.facts["float32_error"][what])


def favouring(case: Case, run: str) -> Case:
    """The case's pair with the head of its assisted run, where few tokens win and random drafts hit."""
    return replace(case, target=replace(case.target, favoured=case.facts[run]["favoured"]))


def check_assisted(case: Case, run: str, folder: Path) -> None:
    """Tokens, proposals and committed counts of a greedy run are those of transformers' assisted generation.

    Near the end of the budget a round verifies fewer rows here than there: those rounds' splits are not compared.
    """
    from dflash_mlx import Session
    from dflash_mlx import load as load_pair

    case, facts = favouring(case, run), case.facts[run]
    first = write_target(folder / "target", case.target, eos=tuple(facts["eos"]))
    pair = load_pair(str(first), draft=str(write_drafter(folder / "drafter", case.drafter)))
    wanted = 48
    out = Session(pair).generate(facts["prompt"], max_tokens=wanted, draft_length=case.drafter.block - 1)
    assert list(out.tokens) == facts["tokens"]
    assert out.finish_reason == ("stop" if facts["eos"] else "length")
    rounds, left, compared = list(out.stats.rounds), wanted - 1, 0
    for mine, committed, proposal in zip(rounds, facts["committed"], facts["proposals"], strict=False):
        if left < case.drafter.block:
            break
        assert (mine.committed, mine.drafted, list(mine.proposal)) == (committed, len(proposal), proposal)
        if mine is not rounds[-1] or not facts["eos"]:  # cut at an end token, the last one may itself be a draft
            assert mine.accepted == committed - 1
        left, compared = left - committed, compared + 1
    assert compared >= min(2, len(facts["committed"])), "too few rounds were compared to mean anything"
