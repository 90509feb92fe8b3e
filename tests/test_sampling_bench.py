"""The two measurements of sampling count what they say they count."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from from_file import script


@pytest.fixture(scope="module")
def rules():
    return script("bench/proposal_rules.py")


@pytest.fixture(scope="module")
def costs():
    return script("bench/sampling_costs.py")


def test_certain_acceptance_gives_the_rounds_of_a_walk(rules):
    """Where each slot's draft is accepted for sure or never, the expectation is the count."""
    accepted = np.random.RandomState(0).randint(0, 5, 200)
    kept = np.zeros((200, 5))
    for anchor, count in enumerate(accepted):
        kept[anchor, : min(count, 200 - anchor)] = 1
        kept[anchor, count + 1 :] = 1  # what lies behind a rejected slot has no part in it
    assert rules.expected_rounds(kept) == pytest.approx(rules.rounds_of(accepted))


def test_expected_rounds_are_the_mean_of_drawn_ones(rules):
    random = np.random.RandomState(1)
    kept = random.random_sample((60, 4))
    for slot in range(4):
        kept[60 - slot :, slot] = 0
    drawn = []
    for _ in range(3000):
        alive = np.cumprod(random.random_sample((60, 4)) < kept, axis=1)
        drawn.append(rules.rounds_of(alive.sum(1)))
    assert rules.expected_rounds(kept) == pytest.approx(np.mean(drawn), abs=4 * np.std(drawn) / 3000**0.5)


def test_the_rules_scale_raw_logits(rules):
    """Raw at c and multiplied at c / m are one rule; argmax stands once."""
    found = dict(zip(((rule.multiplied, rule.c) for rule in rules.RULES), rules.scales(0.5, 2.0).ravel(), strict=True))
    assert found[False, 0.5] == found[True, 0.25] == 1
    assert found[True, 1.0] == 0.25
    assert len(rules.RULES) == 11


def test_launches_and_bytes_leave_views_out(costs):
    def graph(x):
        return mx.exp(x.reshape(6, 2)[None] + mx.broadcast_to(mx.array(1.0), (1, 6, 2)))

    found = costs.cost(graph, mx.zeros((3, 4)))
    assert found.launches == 2
    assert found.nbytes == (48 + 4 + 48) + (48 + 48)
    assert costs.cost(mx.sort, mx.zeros((3, 4))).sorted_rows == [4]
