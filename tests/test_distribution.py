"""Samples have the distribution that they should have: chi-square tests over all 125 sequences of three tokens.

6,000 samples for each of: plain and drafted, temperature alone and all options together. A right sampler would fail a
test once in 1,000 choices of seeds; the seeds are fixed, so it passes or fails for good. Every wrong sampler below has
to fail the same test with a p-value under 1e-6.
"""

from __future__ import annotations

from collections import Counter

import exact
import numpy as np
import pytest

from dflash_mlx import Session
from dflash_mlx import choice as choice_module
from dflash_mlx.options import Options

SAMPLES, RIGHT, WRONG = 6000, 1e-3, 1e-6


@pytest.fixture(scope="module", params=exact.SAMPLING)
def sampling(request):
    options = Options(**exact.SAMPLING[request.param])
    return options, exact.distribution(options)


def test_the_exact_distribution_is_one_and_far_from_trivial(sampling):
    _, expected = sampling
    shares = np.array(list(expected.values()))
    assert len(expected) == 125
    assert shares.sum() == pytest.approx(1)
    assert shares.max() < 0.5
    assert (shares * SAMPLES >= 5).sum() >= 30


@pytest.mark.parametrize("drafted", [False, True], ids=["plain", "drafted"])
def test_samples_have_the_exact_distribution(sampling, drafted):
    options, expected = sampling
    seeds = range(SAMPLES, 2 * SAMPLES) if drafted else range(SAMPLES)
    counts = Counter(exact.Sampler(options).draw(seeds, drafted).values())
    assert exact.p_value(counts, expected) > RIGHT


@pytest.mark.parametrize("draft_length", [0, exact.DRAFTED])
def test_the_samples_are_what_a_session_gives(sampling, draft_length):
    """Seed by seed; some rounds accept all drafts and some none."""
    options, _ = sampling
    sampler = exact.Sampler(options)
    asked = {name: getattr(options, name) for name in exact.SAMPLING["all at once"]}
    session, accepted, found = Session(sampler.pair), set(), {}
    for seed in range(60):
        out = session.generate(list(exact.PROMPT), **asked, seed=seed, max_tokens=4, draft_length=draft_length)
        found[seed] = tuple(out.tokens[: exact.LENGTH])
        accepted.add(out.stats.rounds[0].accepted)
    assert found == sampler.draw(range(60), bool(draft_length))
    assert accepted == ({0, 1, 2} if draft_length else {0})


def biased(monkeypatch, what):
    """A sampler that looks right at a glance, and its options."""
    options = dict(exact.SAMPLING["temperature alone"])
    keys, scores = choice_module.position_keys, choice_module.Choice._scores
    if what == "one noise for all positions":
        monkeypatch.setattr(
            choice_module, "position_keys", lambda seed, index, position, rows: keys(seed, index, 0, 1)[[0] * rows]
        )
    elif what == "a temperature that is a fifth too low":
        options["temperature"] = 0.8
    elif what == "drafts kept unseen":
        return exact.Sampler(Options(**options), keep_drafts=True)
    elif what == "noise that is not Gumbel":
        monkeypatch.setattr(choice_module, "gumbel", lambda minus_u: -minus_u * 4)
    elif what == "half a unit of the log-probability for the greedy token":

        def favour(self, logits, position, temperature, spare=0):
            best = choice_module.mx.max(logits, axis=-1, keepdims=True)
            return scores(self, logits + 0.5 * (logits == best), position, temperature, spare)

        monkeypatch.setattr(choice_module.Choice, "_scores", favour)
    return exact.Sampler(Options(**options))


@pytest.mark.parametrize(
    "what",
    [
        "one noise for all positions",
        "a temperature that is a fifth too low",
        "drafts kept unseen",
        "noise that is not Gumbel",
        "half a unit of the log-probability for the greedy token",
    ],
)
def test_a_biased_sampler_fails_the_same_test(monkeypatch, what):
    expected = exact.distribution(Options(**exact.SAMPLING["temperature alone"]))
    counts = Counter(biased(monkeypatch, what).draw(range(SAMPLES), drafted=what == "drafts kept unseen").values())
    assert exact.p_value(counts, expected) < WRONG


def test_filters_after_the_temperature_fail_the_same_test():
    """The order of the options matters, and the test sees it."""
    options = Options(**exact.SAMPLING["all at once"])
    expected = exact.distribution(options)
    warm = Options(**{**exact.SAMPLING["all at once"], "temperature": 1.0})
    counts = Counter(exact.Sampler(warm).draw(range(SAMPLES), drafted=False).values())
    assert exact.p_value(counts, expected) < WRONG
