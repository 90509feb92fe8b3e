"""The exact distribution of three tokens by brute force, and many samples of them from the package's own parts.

Samples are cheap because histories repeat: with 5 tokens there are 31 of them. Each forward of the pair is made once
for each history and block; the choice, the proposal and the acceptance are made for every seed, all seeds that stand
at one place together. That this is what a session does is tested seed by seed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import grids
import mlx.core as mx
import numpy as np
import reference
import sampled
from scipy import stats
from tiny import target_weights, text_config, tiny_specs

from dflash_mlx import choice
from dflash_mlx.cache import Part
from dflash_mlx.choice import Choice
from dflash_mlx.filters import Kept
from dflash_mlx.options import Options
from dflash_mlx.round import accept
from dflash_mlx.slots import Slots
from dflash_mlx.state import HostReads, State

Tokens = tuple[int, ...]
VOCAB, PROMPT, LENGTH, DRAFTED = 5, (1, 3), 3, 2
SHAPE: dict[str, Any] = {
    "vocab": VOCAB, "layers": 1, "hidden": 32, "intermediate": 48, "heads": (2, 1), "head_dim": 16, "window": 11,
    "multiplier": 0.15, "drafter_layers": 1, "drafter_heads": (2, 1), "drafter_head_dim": 8,
    "drafter_intermediate": 16, "taps": (0,), "block": 4,
}  # fmt: skip
SAMPLING = {
    "temperature alone": {"temperature": 1.0},
    "all at once": {
        "temperature": 1.3, "top_p": 0.9, "min_p": 0.03, "top_k": 4, "repetition_penalty": 1.4,
        "repetition_context": 2, "logit_bias": {0: 0.8, 4: -0.5},
    },
}  # fmt: skip


def filtered(logits: np.ndarray, history: Sequence[int], options: Options) -> np.ndarray:
    """Probabilities [V] float64 that the options make of one row of logits; written from their definitions."""
    logits = logits.astype(np.float64).copy()
    for token, bias in (options.logit_bias or {}).items():
        logits[token] += bias
    for token in set(history[-options.repetition_context :]):
        by = options.repetition_penalty
        logits[token] *= by if logits[token] < 0 else 1 / by
    probabilities = np.exp(logits - logits.max())
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities)
    mass_above = np.concatenate([[0], np.cumsum(probabilities[order])[:-1]])
    kept = np.ones(len(logits), bool)
    if 0 < options.top_p < 1:
        kept[order[mass_above >= options.top_p]] = False
    kept &= probabilities >= options.min_p * probabilities.max()
    if options.top_k:
        kept[order[options.top_k :]] = False
    weights = np.where(kept, probabilities ** (1 / options.temperature), 0)
    return weights / weights.sum()


def distribution(options: Options) -> dict[tuple[int, ...], float]:
    """Probability of every sequence of three tokens after the prompt, from float64 forwards of whole sequences."""
    spec, _ = tiny_specs(**SHAPE)
    config, weights = text_config(spec), target_weights(spec)
    found = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for tokens, probability in found.items():
            history = [*PROMPT, *tokens]
            logits = reference.target_forward(config, weights, history)[0][-1]
            for token, share in enumerate(filtered(logits, history, options)):
                longer[(*tokens, token)] = probability * float(share)
        found = longer
    return found


def p_value(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Of the chi-square test; cells expected fewer than 5 times are one cell, impossible ones must stay empty."""
    total = sum(counts.values())
    if any(expected[cell] == 0 for cell in counts):
        return 0.0
    rows = [(counts[cell], total * share) for cell, share in expected.items()]
    large = [row for row in rows if row[1] >= 5]
    rest = [row for row in rows if 0 < row[1] < 5]
    if rest:
        large.append((sum(count for count, _ in rest), sum(share for _, share in rest)))
    observed, wanted = np.array(large).T
    return float(stats.chisquare(observed, wanted * (observed.sum() / wanted.sum())).pvalue)


class Seeds(Choice):
    """The choice for many seeds at once: every row's noise is drawn for each of them, seed after seed."""

    def __init__(self, options: Options, seeds: Sequence[int]):
        super().__init__(options, 0)
        self._seeds = seeds

    def _scores(self, logits: mx.array, position: int, temperature: float, spare: int = 0) -> Kept:
        self._block = logits.shape[0]
        return super()._scores(mx.tile(logits, (len(self._seeds), 1)), position, temperature, spare)

    def _keys(self, position: int, rows: int) -> mx.array:
        return mx.concatenate([choice.position_keys(seed, self.index, position, self._block) for seed in self._seeds])


@dataclass
class Sampler:
    """Draws sequences of three tokens, plain or drafted, for many seeds at once.

    Args:
        options: of the generation.
        keep_drafts: a wrong rule, to be caught: the drafter's tokens are kept unseen.
    """

    options: Options
    keep_drafts: bool = False
    _rows: dict[Any, mx.array] = field(default_factory=dict)

    @cached_property
    def pair(self) -> Any:
        return sampled.small_pair(**SHAPE)

    def _state(self, tokens: Tokens) -> State:
        """A session's state after the prompt and these tokens, the last of which is the anchor."""
        state = State(self.pair)
        grids.prefill(state, [*PROMPT, *tokens][:-1], Choice(Options(), 0), 2048, HostReads())
        state.tokens[-1] = tokens[-1]
        return state

    def target_rows(self, tokens: Tokens, drafted: Tokens) -> mx.array:
        """The target's logits for one block, or for the prompt where no token was generated yet."""
        key = ("target", tokens, drafted)
        if key not in self._rows:
            state = self._state(tokens) if tokens else State(self.pair)
            fed = [tokens[-1], *drafted] if tokens else list(PROMPT)
            wanted = len(fed) if tokens else 1
            self._rows[key] = self.pair.target(mx.array(fed, mx.uint32), [Part(state.cache, len(fed), wanted)]).logits
            mx.eval(self._rows[key])
        return self._rows[key]

    def draft_rows(self, tokens: Tokens) -> mx.array:
        """The drafter's raw logits for the block after these tokens."""
        key = ("drafter", tokens)
        if key not in self._rows:
            state, drafter = self._state(tokens), self.pair.drafter
            state.project_backlog()
            count = LENGTH - len(tokens)  # a round that drafts k fills a block of k + 1 slots
            block = mx.array([tokens[-1]] + [drafter.config.mask_token_id] * count, mx.uint32)
            self._rows[key] = drafter.draft_logits(block, state.context, self.pair.target, count)
            mx.eval(self._rows[key])
        return self._rows[key]

    def draw(self, seeds: Sequence[int], drafted: bool) -> dict[int, Tokens]:
        """The first three tokens of each seed's text, as a session with draft length 0 or 2 gives them."""
        found: dict[int, Tokens] = dict.fromkeys(seeds, ())
        while any(len(tokens) < LENGTH for tokens in found.values()):
            for tokens, group in _groups(found).items():
                if len(tokens) < LENGTH:
                    self._round(tokens, group, found, drafted and tokens != ())
        return {seed: tokens[:LENGTH] for seed, tokens in found.items()}

    def _round(self, tokens: Tokens, seeds: Sequence[int], found: dict[int, Tokens], drafted: bool) -> None:
        """One round for seeds that stand at the same place."""
        history, proposals = [*PROMPT, *tokens], dict.fromkeys(seeds, ())
        if drafted:
            slots = Slots(self.draft_rows(tokens), self.pair.target.config.output_multiplier)
            drawn = Seeds(self.options, seeds).proposal(slots, len(history), history)
            proposals = dict(zip(seeds, map(tuple, drawn.reshape(len(seeds), -1).tolist()), strict=True))
        for proposal, group in _groups(proposals).items():
            block, rows = mx.array(proposal, dtype=mx.uint32), self.target_rows(tokens, proposal)
            drawn = Seeds(self.options, group).target(rows, len(history), history, block)
            chosen = drawn.reshape(len(group), -1)
            for seed, own in zip(group, chosen.tolist(), strict=True):
                kept = len(proposal) if self.keep_drafts else accept(proposal, own)
                found[seed] += (*proposal[:kept], *own[kept : kept + 1])


def _groups(found: dict[int, Tokens]) -> dict[Tokens, list[int]]:
    """Seeds by what they have."""
    groups: dict[Tokens, list[int]] = {}
    for seed, tokens in found.items():
        groups.setdefault(tokens, []).append(seed)
    return groups
