"""Memory stays flat over thousands of rounds: no graph, no cache copy and no tap outlives its round."""

from __future__ import annotations

import gc
import random
import resource

import grids
import mlx.core as mx
import pytest

from dflash_mlx import Session

pytestmark = pytest.mark.soak
ROUNDS, LAP = 10_000, 1_000
KILOBYTE = 1024


def resident_bytes() -> int:
    """Memory of this process now where the system says it, else the most that it ever had."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KILOBYTE


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("length", [0, 4, 15])
def test_memory_is_flat_over_ten_thousand_rounds(length):
    """Laps of 1,000 rounds in one session, each a new prompt, so that the context ends equally long every time."""
    session, draw, laps, done = Session(grids.pair("window 11")), random.Random(2), [], 0
    while done < ROUNDS:
        prompt = [draw.randrange(97) for _ in range(20)]
        out = session.generate(prompt, max_tokens=LAP + 1, draft_length=length)
        done += len(out.stats.rounds)
        assert out.stats.syncs <= len(out.stats.rounds) + 1
        del out
        session.last_generation = None
        gc.collect()
        laps.append((mx.get_active_memory(), resident_bytes()))
    active, resident = zip(*laps, strict=True)
    assert max(active[1:]) - min(active[1:]) < 16 * KILOBYTE  # taps of the last round, some of which are still held
    half = len(resident) // 2
    assert max(resident[half:]) - resident[1] < 8 * KILOBYTE**2


@pytest.mark.timeout(3600)
def test_active_memory_within_a_generation_is_that_of_its_caches():
    """Looked at after every round of one long stream: what is added is what the full layers grew by."""
    session = Session(grids.pair("window 11"))
    stream = session.stream_generate([1, 2, 3], max_tokens=2000, draft_length=4)
    next(stream)
    next(stream)
    state = session._state
    base, worst = mx.get_active_memory() - state.cache.nbytes, 0
    for _ in stream:
        backlog = sum(array.nbytes for taps in state._backlog for array in taps)
        extra = mx.get_active_memory() - base - state.cache.nbytes - backlog
        worst = max(worst, extra)
    assert worst < 256 * KILOBYTE
