"""The chi-square tests of tests/test_distribution.py with real sessions for every sample, and with far more samples."""

from __future__ import annotations

from collections import Counter

import exact
import pytest

from dflash_mlx import Session
from dflash_mlx.options import Options

pytestmark = pytest.mark.slow
SESSIONS, SAMPLES, RIGHT = 1000, 100_000, 1e-3


@pytest.mark.parametrize("draft_length", [0, 1, 3])
@pytest.mark.parametrize("name", exact.SAMPLING)
def test_sessions_have_the_exact_distribution(name, draft_length):
    """1,000 generations of four tokens, of which three are counted; one session is reused for all."""
    sampling, counts = exact.SAMPLING[name], Counter()
    session = Session(exact.Sampler(Options()).pair)
    for seed in range(1_000_000 * draft_length, 1_000_000 * draft_length + SESSIONS):
        prompt = list(exact.PROMPT)
        out = session.generate(prompt, **sampling, seed=seed, max_tokens=4, draft_length=draft_length)
        counts[tuple(out.tokens[: exact.LENGTH])] += 1
    assert exact.p_value(counts, exact.distribution(Options(**sampling))) > RIGHT


@pytest.mark.parametrize("drafted", [False, True], ids=["plain", "drafted"])
@pytest.mark.parametrize("name", exact.SAMPLING)
def test_many_samples_have_the_exact_distribution(name, drafted):
    """100,000 of each: a frequent sequence that is off by a few per cent would show."""
    options = Options(**exact.SAMPLING[name])
    counts: Counter[tuple[int, ...]] = Counter()
    for begin in range(0, SAMPLES, 20_000):
        first = 5_000_000 + begin + SAMPLES * drafted
        counts.update(exact.Sampler(options).draw(range(first, first + 20_000), drafted).values())
    assert exact.p_value(counts, exact.distribution(options)) > RIGHT
