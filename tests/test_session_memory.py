"""What sessions cost in memory: copies as the formula says, at most four of them, and no buffer lost to them."""

from __future__ import annotations

import gc

import grids
import mlx.core as mx
import pytest
from tiny import target_config, tiny_specs
from usable import PROMPT, SHAPE, fresh

from dflash_mlx import Session
from dflash_mlx.cache import TargetCache
from dflash_mlx.checkpoint import Checkpoints
from dflash_mlx.config import TargetConfig

# Bytes of a checkpoint, by hand from docs/sessions.md: 2 * (window + 16) * 4 * heads * head size, for three sliding
# layers of 2 heads of 16 and one drafter layer of 1 head of 8, all with a window of 11.
TARGET, DRAFTER = 2 * 27 * 4 * 3 * 2 * 16, 2 * 27 * 4 * 1 * 1 * 8


@pytest.fixture
def pair():
    return grids.pair(SHAPE)


def test_a_checkpoint_costs_what_the_formula_says(pair):
    session = Session(pair)
    session.generate(PROMPT, max_tokens=50, draft_length=4)
    assert session._state.checkpoints.nbytes == TARGET + DRAFTER
    alone = Session(pair.without_drafter())
    alone.generate(PROMPT, max_tokens=50)
    assert alone._state.checkpoints.nbytes == TARGET
    parts = pair.plan.parts
    assert (parts["checkpoints"], parts["drafter's checkpoints"]) == (4 * TARGET, 4 * DRAFTER)


def test_nothing_is_copied_while_the_rings_hold_everything(pair):
    session = Session(pair)
    for _ in range(3):
        session.generate([*session.tokens, 1, 2], max_tokens=4, draft_length=4)
    assert session._state.checkpoints.nbytes == 0
    assert session.generate(session.tokens[:3], max_tokens=4).stats.reused_tokens == 2


@pytest.mark.parametrize("length", [4, pytest.param(0, marks=pytest.mark.slow)])
def test_memory_is_flat_over_many_turns(length, pair):
    """Thirty turns within one growth of the full layers' buffers: at most four checkpoints, nothing else is kept."""
    session, sizes, peaks = Session(pair), [], []
    for turn in range(30):
        history = [*PROMPT[:20], *[turn] * 90]
        mx.reset_peak_memory()
        session.generate(history, max_tokens=10, draft_length=length)
        gc.collect()
        sizes.append(mx.get_active_memory())
        peaks.append(mx.get_peak_memory() - sizes[-1])
        assert len(session._state.checkpoints.points) <= 4
        assert session._state.checkpoints.nbytes <= 4 * (TARGET + DRAFTER)
    assert max(sizes[8:]) <= max(sizes[:8]) + 4096
    # What is in flight at once depends on the moment; rows of one kept turn would be as much each turn, 22 times.
    assert max(peaks[8:]) <= max(peaks[:8]) + 16384


def test_the_checkpoint_goes_that_is_nearest_to_the_one_before_it():
    points = Checkpoints(most=3)
    for position in (100, 200, 240, 500, 530, 1000):
        points.mark(position, [])
    assert points.positions == [200, 500, 1000]
    none = Checkpoints(most=0)
    none.mark(100, [])
    assert none.positions == []


def test_a_copied_checkpoint_leaves_the_buffers_to_the_rounds():
    """Rings of 4,096 rows: a round after the copy writes in place, and the copy itself is no larger than its window."""
    spec, _ = tiny_specs(window=2048, heads=(4, 1))
    cache = TargetCache(TargetConfig.from_dict(target_config(spec)), mx.float32, 8192)
    checkpoints, ring = Checkpoints(), cache.rings[0].keys.nbytes
    mx.eval(cache.arrays)

    def write(rows, *along):
        cache.reserve(rows)
        for layer in cache.rings:
            new = mx.ones((1, 1, rows, layer.keys.shape[3]))
            layer.write(cache.offset, new, new)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(cache.arrays, *(copies() for copies in along))
        cache.advance(rows)
        return mx.get_peak_memory() - before

    for _ in range(2):
        write(2000)
    checkpoints.mark(4000, [cache])
    write(8)
    quiet = write(8)
    copying = write(8, lambda: checkpoints.secure([cache], [4000]))
    assert checkpoints.nbytes == 2 * len(cache.rings) * ring * (2048 + 16) // 4096
    assert copying <= quiet + checkpoints.nbytes + ring // 8
    assert write(8) <= quiet + 4096 < ring / 2


def test_a_fork_goes_its_own_way(pair):
    """Both go on as fresh sessions would, in turn, whoever writes first."""
    session = Session(pair)
    session.generate(PROMPT, max_tokens=30, draft_length=4)
    before = mx.get_active_memory()
    other = session.fork()
    assert mx.get_active_memory() - before < session._state.nbytes / 4
    options = {"max_tokens": 12, "draft_length": 4}
    for turn in range(3):
        for each, token in ((session, 1), (other, 2)):
            prompt = [*each.tokens, token, turn]
            found = each.generate(prompt, **options)
            assert found.tokens == fresh(prompt, **options).tokens
            assert found.stats.reused_tokens == len(prompt) - 3
    assert session.tokens != other.tokens


def test_a_fork_that_goes_back_takes_no_checkpoint_from_the_other(pair):
    session, options = Session(pair), {"max_tokens": 50, "draft_length": 4}
    first = session.generate(PROMPT, **options).tokens
    other = session.fork()
    other.generate([*PROMPT[:30], *first, *first], **options)
    prompt = [*PROMPT, *[token for token in range(97) if token not in first][:3]]
    found = session.generate(prompt, **options)
    assert found.stats.reused_tokens == 40
    assert found.tokens == fresh(prompt, **options).tokens
