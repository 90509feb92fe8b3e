"""Far from the start: long prompts, many wraps, full layers that grow, and the bits that must not notice."""

from __future__ import annotations

import random

import grids
import mlx.core as mx
import pytest
from tiny import tiny_pair

from dflash_mlx import load
from dflash_mlx.choice import Choice
from dflash_mlx.options import Options
from dflash_mlx.state import HostReads, State

pytestmark = pytest.mark.slow
CASES = [("window 11", "float32"), ("window 11", "4-bit"), ("DFlash-2", "bfloat16")]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_rounds_after_a_long_prompt_equal_plain_decoding(name, kind):
    """2,500 tokens: full layers have doubled three times, the ring has wrapped fifty times."""
    pair, draw = grids.pair(name, kind), random.Random(1)
    prompt = [draw.randrange(97) for _ in range(2500)]
    plain = grids.drive(pair, prompt, grids.schedule(0), 40)
    tutored = grids.tutored(pair, prompt + plain.tokens, 0.75)
    for length in (2, 7, 15, "drawn"):
        assert grids.drive(tutored, prompt, grids.schedule(length), 40).tokens == plain.tokens


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_long_generation_equals_plain_decoding(name, kind):
    prompt = grids.prompts(name, kind)["2 tokens"]
    plain = grids.drive(grids.pair(name, kind), prompt, grids.schedule(0), 1100).tokens
    tutored = grids.tutored(grids.pair(name, kind), prompt + plain, 0.8)
    done = grids.drive(tutored, prompt, grids.schedule("drawn"), 1100)
    assert done.tokens == plain


@pytest.mark.parametrize("window", [1, 2, 16, 17, 31, 64])
def test_other_windows_hold_too(window, tmp_path):
    """Windows whose rings are rounded up by much, by little or not at all; the smallest sees only itself."""
    sizes = {**grids.SHAPES["window 11"], "window": window, "drafter_window": max(1, window - 1)}
    first, second = tiny_pair(tmp_path, **sizes)
    pair, draw = load(str(first), draft=str(second)), random.Random(window)
    for count in (1, 3 * window + 40):
        prompt = [draw.randrange(97) for _ in range(count)]
        plain = grids.drive(pair, prompt, grids.schedule(0), 60).tokens
        tutored = grids.tutored(pair, prompt + plain, 0.75)
        for length in (3, 15, "falling and rising"):
            assert grids.drive(tutored, prompt, grids.schedule(length), 60, step=13).tokens == plain


def test_prefill_steps_leave_the_same_bits_everywhere():
    """The target's cache after a long prompt, in steps of all kinds: each visible row, and each row of full layers."""
    pair, draw = grids.pair("window 35", "bfloat16"), random.Random(3)
    prompt = [draw.randrange(131) for _ in range(900)]
    states = []
    for step in (1, 7, 35, 44, 45):
        state = State(pair)
        grids.prefill(state, prompt, Choice(Options(), 0), step, HostReads())
        states.append(state)
    first = states[0].cache
    visible = [p % first.ring for p in range(first.offset - first.window, first.offset)]
    for state in states[1:]:
        assert state.tokens == states[0].tokens
        for mine, other in zip(state.cache.layers, first.layers, strict=True):
            rows = mx.array(visible if mine.capacity == first.ring else list(range(first.offset)))
            for a, b in ((mine.keys, other.keys), (mine.values, other.values)):
                assert bool(mx.all(a[:, :, rows] == b[:, :, rows]))
