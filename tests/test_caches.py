"""Rings and growing buffers: which position sits in which row, which rows a query sees, and how far back one may go."""

from __future__ import annotations

import random

import mlx.core as mx
import numpy as np
import pytest
from tiny import FULL, SLIDING, drafter_config, target_config, tiny_specs

from dflash_mlx.cache import GROWTH_ROWS, DrafterContext, History, Rows, TargetCache, ring_mask
from dflash_mlx.config import TargetConfig, ring_rows
from dflash_mlx.drafter_config import DrafterConfig
from dflash_mlx.errors import DFlashError, InputError


def target_cache(window=11, max_context=2000, **sizes):
    spec, _ = tiny_specs(window=window, **sizes)
    return TargetCache(TargetConfig.from_dict(target_config(spec)), mx.float32, max_context)


@pytest.mark.parametrize(
    ("window", "rows"), [(1, 48), (5, 48), (11, 48), (16, 48), (17, 64), (32, 64), (33, 80), (128, 256), (2048, 4096)]
)
def test_a_ring_is_twice_the_window_and_has_room_for_a_block(window, rows):
    """Counted by hand: at least window + 32, rounded up to 16."""
    assert ring_rows(window) == rows


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize(("capacity", "span"), [(48, 11), (48, 12), (48, 1), (64, 24), (80, 36)])
def test_the_mask_of_a_ring_is_what_a_set_of_positions_says(capacity, span, causal):
    """Rows are filled one after the other in a dictionary; a query sees a row if its position is near enough."""
    draw = random.Random(span)
    for _ in range(40):
        rows = draw.randint(1, capacity - span + 1 if span > 1 else 16)
        offset = draw.choice([0, 1, draw.randint(0, capacity), draw.randint(0, 5 * capacity)])
        start = draw.randint(max(0, offset - capacity), offset)
        held = min(capacity, -(-(offset + rows) // 16) * 16)
        ring = {position % capacity: position for position in range(offset + rows)}
        expected = np.zeros((rows, held), bool)
        for query in range(offset, offset + rows):
            for row in range(held):
                if row not in ring or ring[row] < start:
                    continue
                behind = query - ring[row]
                expected[query - offset, row] = behind < span if behind >= 0 else not causal and -behind < span
        found = np.array(ring_mask(offset, rows, held, capacity, span, causal, start))
        assert (found == expected).all(), (offset, rows, start)


def test_a_mask_that_reaches_past_the_written_rows_shows_none_of_them():
    """A ring that has not wrapped: rows of the future, and of before position 0, are invisible."""
    found = np.array(ring_mask(offset=3, rows=2, held=32, capacity=48, span=48, causal=True))
    assert found.nonzero()[1].max() == 4
    assert found.sum(axis=1).tolist() == [4, 5]


def numbered(begin, count, size=3):
    """Keys [1, 2, count, size] that hold their position, and values that hold its negative."""
    keys = mx.broadcast_to(mx.arange(begin, begin + count, dtype=mx.float32)[None, None, :, None], (1, 2, count, size))
    return keys, -keys


@pytest.mark.parametrize("offset", [0, 1, 31, 32, 33, 47, 48, 49, 95, 96, 1000])
@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 48])
def test_writes_wrap_at_the_end_of_the_ring(offset, count):
    """Position p is found in row p mod 48 and the rows of other positions stay as they were."""
    rows = Rows(2, 3, mx.float32, 48)
    rows.write(offset, *numbered(offset, count))
    expected = np.zeros(48)
    for position in range(offset, offset + count):
        expected[position % 48] = position
    assert (np.array(rows.keys) == expected[None, None, :, None]).all()
    assert (np.array(rows.values) == -expected[None, None, :, None]).all()


def test_a_fresh_cache_is_zero_everywhere():
    """Not whatever memory held: a masked row is multiplied by 0, and 0 times NaN is NaN."""
    _, drafter = tiny_specs()
    for cache in (target_cache(), DrafterContext(DrafterConfig.from_dict(drafter_config(drafter)), mx.bfloat16)):
        assert cache.arrays
        for array in cache.arrays:
            assert not np.array(array.astype(mx.float32)).any()


def test_a_growing_buffer_keeps_its_rows_and_is_zero_past_them():
    rows = Rows(2, 3, mx.float32, 256)
    rows.write(0, *numbered(1, 256))
    sizes = []
    for needed in (256, 257, 600, 1025, 1999):
        rows.grow(needed, 1999)
        sizes.append(rows.capacity)
    assert sizes == [256, 512, 1024, 1999 // GROWTH_ROWS * GROWTH_ROWS + GROWTH_ROWS, 2048]
    held = np.array(rows.keys)[0, 1, :, 2]
    assert held[:256].tolist() == list(range(1, 257))
    assert not held[256:].any()
    assert np.array(rows.values)[0, 0, 255, 0] == -256


def test_full_layers_grow_and_sliding_layers_do_not():
    cache = target_cache(window=11, layer_types=(SLIDING, FULL, FULL, SLIDING), rope_layers=(True, False, False, True))
    assert [layer.capacity for layer in cache.layers] == [48, 256, 256, 48]
    for _ in range(10):
        cache.reserve(cache.max_rows)
        cache.advance(cache.max_rows)
    assert cache.offset == 370
    assert [layer.capacity for layer in cache.layers] == [48, 512, 512, 48]
    assert cache.nbytes == sum(array.nbytes for array in cache.arrays) == 2 * 4 * 2 * 16 * (48 + 512 + 512 + 48)


@pytest.mark.parametrize("window", [1, 11, 24, 40])
def test_going_back_is_allowed_exactly_where_the_window_is_still_held(window):
    """Random writes, commits and returns on a real ring whose rows hold their positions."""
    draw, returns, refusals = random.Random(window), 0, 0
    history = History(window)
    rows = Rows(1, 1, mx.float32, history.ring)
    written = {}
    for _ in range(400):
        count = draw.choice([1, 1, 2, 16, draw.randint(1, history.max_rows)])
        history.reserve(count)
        for position in range(history.offset, history.offset + count):
            written[position % history.ring] = position
        keys = mx.arange(history.offset, history.offset + count, dtype=mx.float32)[None, None, :, None]
        rows.write(history.offset, keys, keys)
        history.advance(draw.randint(1, count))
        position = draw.randint(max(1, history.offset - 2 * history.ring), history.offset)
        held = all(written.get(p % history.ring) == p for p in range(max(0, position - window), position))
        assert history.can_trim_to(position) == held
        if held and draw.random() < 0.3:
            history.trim_to(position)
            assert history.offset == position
            returns += 1
        elif not held:
            with pytest.raises(DFlashError):
                history.trim_to(position)
            refusals += 1
        stored = np.array(rows.keys).ravel()
        seen = range(max(0, history.offset - window), history.offset)
        assert all(stored[p % history.ring] == p for p in seen)
    assert returns > 20 < refusals


def test_going_back_too_far_says_which_rows_are_left():
    history = History(11)
    for _ in range(4):
        history.reserve(30)
        history.advance(30)
    with pytest.raises(DFlashError) as caught:
        history.trim_to(80)
    assert str(caught.value) == (
        "[cache] position to go back to must be at most 120, with the 11 positions before it still held but got 80. "
        "The oldest held position is 72; prefill again from the start."
    )
    assert history.offset == 120
    history.trim_to(83)
    assert history.offset == 83
    with pytest.raises(DFlashError, match=r"must be at most 83, .* but got 84\."):
        history.trim_to(84)


@pytest.mark.parametrize("rows", [0, 38, 1000])
def test_more_rows_than_a_ring_can_take_are_refused(rows):
    """A window of 11 in a ring of 48 leaves 37: one more would overwrite what the first row still sees."""
    cache = target_cache(window=11)
    cache.reserve(37)
    with pytest.raises(DFlashError) as caught:
        cache.reserve(rows)
    assert str(caught.value) == (
        f"[cache] rows of one forward must be between 1 and 37 but got {rows}. Feed the rows in smaller steps."
    )


def test_a_context_longer_than_planned_is_refused_before_anything_changes():
    cache = target_cache(max_context=40)
    cache.reserve(30)
    cache.advance(30)
    with pytest.raises(InputError) as caught:
        cache.reserve(11)
    assert str(caught.value) == (
        "[cache] the context must be at most 40 tokens but got 41. "
        "Load with a larger max_context, or shorten the prompt."
    )
    assert (cache.offset, cache.start) == (30, 0)
    cache.reserve(10)


def test_a_skipped_context_starts_where_it_was_told():
    _, spec = tiny_specs(window=11)
    context = DrafterContext(DrafterConfig.from_dict(drafter_config(spec)), mx.float32)
    context.skip_to(100)
    context.reserve(8)
    context.advance(8)
    assert (context.offset, context.start) == (108, 100)
    assert not context.can_trim_to(110)
    assert not context.can_trim_to(104)  # its window would begin at 93, which was never written
    assert not DrafterContext(DrafterConfig.from_dict(drafter_config(spec)), mx.float32).can_trim_to(1)
