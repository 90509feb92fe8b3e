"""The whole grid of sampling, of which tests/test_sampling.py runs a sample."""

from __future__ import annotations

import itertools

import dealt
import grids
import pytest
import sampled

pytestmark = pytest.mark.slow


def test_the_grid_is_whole():
    """Any three settings meet; but for the seed, each meets each pair, prompt, prefill step and draft length."""
    settings = ("kind", "temperature", "filters", "penalty", "seed")
    cases = sampled.grid()
    assert {case.seed for case in cases} == set(sampled.SEEDS)
    assert dealt.unmet(cases, settings, 3) == []
    others = ("kind", "temperature", "filters", "penalty", "pair", "prompt", "step", "length")
    assert dealt.unmet(cases, others, 2) == []


@pytest.mark.parametrize(("kind", "temperature"), list(itertools.product(grids.KINDS, sampled.TEMPERATURES)))
def test_seeded_rounds_equal_seeded_plain_decoding_everywhere(kind, temperature):
    cases = [case for case in sampled.grid() if (case.kind, case.temperature) == (kind, temperature)]
    assert len(cases) == len(sampled.FILTERS) * len(sampled.PENALTIES) * 2
    different = []
    texts = set()
    for case in cases:
        done = sampled.run(case)
        texts.add(tuple(done.plain))
        if done.drafted != done.plain:
            different.append(str(case))
    assert different == []
    assert len(texts) > 0.4 * len(cases)  # the settings do change what is said, at 0.3 too
