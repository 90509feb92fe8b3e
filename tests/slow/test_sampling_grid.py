"""The whole grid of sampling, of which tests/test_sampling.py runs a sample."""

from __future__ import annotations

import itertools

import grids
import pytest
import sampled

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("kind", "temperature"), list(itertools.product(grids.KINDS, sampled.TEMPERATURES)))
def test_seeded_rounds_equal_seeded_plain_decoding_everywhere(kind, temperature):
    cases = [case for case in sampled.grid() if (case.kind, case.temperature) == (kind, temperature)]
    assert len(cases) == len(sampled.FILTERS) * len(sampled.PENALTIES) * len(sampled.SEEDS)
    different = []
    texts = set()
    for case in cases:
        done = sampled.run(case)
        texts.add(tuple(done.plain))
        if done.drafted != done.plain:
            different.append(str(case))
    assert different == []
    assert len(texts) > 0.4 * len(cases)  # the settings do change what is said, at 0.3 too
