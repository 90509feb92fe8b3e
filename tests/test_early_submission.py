"""The device gets the graph while it is built; that waits for nothing and copies no cache."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest
from tiny import tiny_pair

import dflash_mlx
from dflash_mlx import Session
from dflash_mlx.models.muse_glimmer import SUBMIT_LAYERS

# Buffers of 2 MB each beside rows of 64 numbers: one copied buffer is more than all else that a round works with.
SIZES = {
    "vocab": 97, "hidden": 64, "intermediate": 96, "heads": (2, 2), "head_dim": 64, "window": 2048, "layers": 9,
    "drafter_heads": (2, 2), "drafter_head_dim": 64, "drafter_window": 2048,
}  # fmt: skip
ROUNDS, SLIDING_LAYER = 12, 1


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dflash_mlx.Pair:
    parts = tiny_pair(tmp_path_factory.mktemp("pair"), **SIZES)
    return dflash_mlx.load(parts[0], draft=parts[1])


def working_bytes(session: Session, holding: bool) -> Iterator[int]:
    """Memory that each round took beyond what was there before it; `holding` keeps an old buffer of a cache alive."""
    stream = session.stream_generate([5, 9, 2], max_tokens=200, draft_length=4)
    next(stream)
    next(stream)
    for _ in range(ROUNDS):
        rows = session._state.cache.layers[SLIDING_LAYER]
        held = rows.keys[:, :, :1] if holding else None  # a view of the buffer
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        next(stream)
        yield int(mx.get_peak_memory()) - before
        del held
    stream.close()


def test_rounds_copy_no_cache(pair: dflash_mlx.Pair) -> None:
    session = Session(pair)
    working = list(working_bytes(session, holding=False))
    buffer = session._state.cache.layers[SLIDING_LAYER].keys.nbytes
    assert buffer == 4096 * 2 * 64 * 4
    assert max(working) < buffer / 4


def test_a_copied_cache_would_be_noticed(pair: dflash_mlx.Pair) -> None:
    session = Session(pair)
    assert min(working_bytes(session, holding=True)) >= session._state.cache.layers[SLIDING_LAYER].keys.nbytes


def test_drafts_are_submitted_and_the_residual_stream_is_every_few_layers(
    pair: dflash_mlx.Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[tuple[int, ...]] = []
    submit = mx.async_eval

    def counted(*arrays: mx.array) -> None:
        submitted.extend(array.shape for array in arrays)
        submit(*arrays)

    monkeypatch.setattr(mx, "async_eval", counted)
    out = Session(pair).generate([5, 9, 2], max_tokens=9, draft_length=2)
    forwards = 1 + len(out.stats.rounds)
    streams = [shape for shape in submitted if len(shape) == 2]
    assert len(streams) == forwards * (SIZES["layers"] // SUBMIT_LAYERS)
    assert set(streams) <= {(rows, SIZES["hidden"]) for rows in (1, 2, 3)}
    drafts = [shape for shape in submitted if len(shape) == 1]
    assert drafts == [(round_.drafted,) for round_ in out.stats.rounds if round_.drafted]
    assert out.stats.syncs == forwards
