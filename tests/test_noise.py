"""The noise behind sampling: right in distribution, independent between keys, and a function of its key alone.

All draws have fixed keys, so a test passes or fails for good; the thresholds say how rarely right noise would fail.
"""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest
from scipy import stats

from dflash_mlx.noise import gumbel, position_keys, uniform

RARELY = 1e-4  # share of right generators that a test with a p-value would turn down


def noise(seed, index=0, position=0, rows=1, vocab=4096):
    return np.array(gumbel(uniform(position_keys(seed, index, position, rows), vocab)), dtype=np.float64)


@pytest.mark.parametrize("vocab", [1, 2, 97, 509, 4099])
def test_a_position_has_the_same_noise_alone_and_in_any_block(vocab):
    """Odd widths: the row of a block begins anywhere in the vector unit's stride."""
    block = noise(7, 1, 30, 16, vocab)
    for row in (0, 1, 6, 15):
        assert np.array_equal(noise(7, 1, 30 + row, 1, vocab)[0], block[row])
    assert np.array_equal(noise(7, 1, 35, 4, vocab), block[5:9])


def test_noise_neither_reads_nor_moves_the_process_wide_random_state():
    mx.random.seed(1)
    before = [np.array(part) for part in mx.random.state]
    first = noise(3)
    assert all(np.array_equal(old, new) for old, new in zip(before, map(np.array, mx.random.state), strict=True))
    mx.random.seed(99)
    mx.eval(mx.random.uniform(shape=(5,)))
    assert np.array_equal(noise(3), first)


def test_uniform_numbers_are_uniform_inside_their_ends():
    drawn = -np.array(uniform(position_keys(11, 0, 0, 64), 50_000), dtype=np.float64).ravel()
    assert drawn.min() >= 2.0**-33
    assert drawn.max() <= 1 - 2.0**-24
    assert stats.kstest(drawn, "uniform").pvalue > RARELY


def test_uniform_numbers_near_zero_have_all_of_their_32_bits():
    """Of 24 bits, the largest noise would be 16.6 and a likely token's rivals would tie."""
    drawn = -np.array(uniform(position_keys(12, 0, 0, 16), 50_000), dtype=np.float64).ravel()
    small = drawn[drawn < 2.0**-8]
    assert len(small) > 1000
    finer = small * 2.0**24 % 1 != 0
    assert finer.mean() > 0.99
    halves = small[small < 2.0**-9] * 2.0**33
    assert (halves % 2 == 1).all()  # in the middle of their steps: never 0


def test_the_largest_and_the_least_noise_are_finite():
    ends = np.array(gumbel(mx.array([-(2.0**-33), -(1 - 2.0**-24)])))
    assert ends == pytest.approx([33 * math.log(2), -math.log(24 * math.log(2))], rel=1e-6)


def test_noise_has_the_gumbel_distribution_and_its_tail():
    drawn = noise(13, rows=64, vocab=50_000).ravel()
    count = len(drawn)
    assert stats.kstest(drawn, "gumbel_r").pvalue > RARELY
    assert drawn.mean() == pytest.approx(np.euler_gamma, abs=4 * math.pi / math.sqrt(6 * count))
    for level in (6, 8, 10, 12):
        share = -math.expm1(-math.exp(-level))
        assert stats.binomtest(int((drawn > level).sum()), count, share).pvalue > RARELY, level


def test_no_two_of_seed_index_and_position_share_a_key():
    seeds = [0, 1, 2, 3, 255, 2**32, 2**32 + 1, 2**63, 2**64 - 1]
    words = []
    for seed in seeds:
        for index in range(8):
            keys = np.array(position_keys(seed, index, 0, 300)).astype(np.uint64)
            words.append((keys[:, 0] << np.uint64(32)) | keys[:, 1])
    words = np.concatenate(words)
    assert len(np.unique(words)) == len(seeds) * 8 * 300


NEIGHBOURS = {
    "the next position": ((5, 0, 40), (5, 0, 41)),
    "the next seed": ((5, 0, 40), (6, 0, 40)),
    "the next index": ((5, 0, 40), (5, 1, 40)),
    "seed and index swapped": ((5, 6, 40), (6, 5, 40)),
    "seed and position swapped": ((5, 0, 40), (40, 0, 5)),
    "a seed that differs in its top bit": ((5, 0, 40), (5 + 2**63, 0, 40)),
}


@pytest.mark.parametrize("pair", NEIGHBOURS.values(), ids=NEIGHBOURS)
def test_neighbouring_keys_give_unrelated_noise(pair):
    """Correlation of ranks, in place and shifted by one, over 200,000 tokens."""
    first, second = (noise(*key, vocab=200_000)[0] for key in pair)
    for one, other in ((first, second), (first[1:], second[:-1]), (first[:-1], second[1:])):
        assert stats.spearmanr(one, other).pvalue > RARELY


def winners(keys, vocab=5):
    return np.array(mx.argmax(gumbel(uniform(keys, vocab)), axis=-1))


@pytest.mark.parametrize("what", ["position", "seed", "index"])
def test_winners_of_neighbours_are_independent_and_fair(what):
    """What sampling uses: who wins among 5 equal tokens, here and next door, over 20,000 keys."""
    count = 20_000
    if what == "position":
        won = winners(position_keys(3, 0, 0, count + 1))
    else:
        keys = [position_keys(n if what == "seed" else 3, n if what == "index" else 0, 17, 1) for n in range(count + 1)]
        won = winners(mx.concatenate(keys))
    table = np.zeros((5, 5))
    np.add.at(table, (won[:-1], won[1:]), 1)
    assert stats.chi2_contingency(table).pvalue > RARELY
    assert stats.chisquare(np.bincount(won, minlength=5)).pvalue > RARELY
