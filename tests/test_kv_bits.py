"""A cache of 8 bits: what it stores, how far off attention is, and that drafting loses nothing against plain with it.

Expected numbers are numpy's, from the stored bytes themselves or from what rounding in groups must do on average.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import grids
import mlx.core as mx
import numpy as np
import pytest
from command import run
from dealt import dealt
from tiny import tiny_pair

import dflash_mlx
from dflash_mlx import Engine, Session
from dflash_mlx.cache import TargetCache
from dflash_mlx.costs import Costs
from dflash_mlx.errors import InputError, MemoryPlanError, SessionFileError
from dflash_mlx.kernels.block_attention import Block
from dflash_mlx.kernels.serving import Reach, stock_attention
from dflash_mlx.rows import QuantisedRows

SHAPE = "window 35"  # heads of 32, a ring of 80 rows
KINDS = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
WIDE = {
    "vocab": 113, "hidden": 64, "intermediate": 96, "heads": (4, 2), "head_dim": 64, "window": 11, "layers": 4,
    "drafter_layers": 1, "drafter_heads": (6, 1), "drafter_head_dim": 16, "drafter_intermediate": 32,
}  # fmt: skip


def eight(kind="float32", seed=0):
    """A pair of the grid with its full layers' cache in 8 bits."""
    return replace(grids.pair(SHAPE, kind, seed), kv_bits=8)


def plain(pair, prompt, count, **options):
    """What the target alone gives, the prompt in the largest steps."""
    alone = replace(pair.without_drafter(), eos_token_ids=frozenset())
    return Session(alone).generate(prompt, max_tokens=count, **options).tokens


def random_rows(count, heads=2, size=64, seed=0):
    keys = mx.random.split(mx.random.key(seed))
    return tuple(mx.random.normal((1, heads, count, size), key=key) for key in keys)


def filled(dtype, size, pieces, seed=0):
    """A buffer of 8 bits with rows written in pieces, and the rows as they were given."""
    rows, group = QuantisedRows(2, size, dtype, 256, 64 if size % 64 == 0 else 32), random_rows(sum(pieces), 2, size)
    begin = 0
    for count in pieces:
        rows.write(begin, *(array[:, :, begin : begin + count] for array in group))
        begin += count
    return rows, [np.array(array.astype(dtype).astype(mx.float32), np.float64) for array in group]


def widened(rows, held):
    """Keys and values in float64, by numpy from the stored bytes: a number is its byte * scale + bias."""
    found = []
    for name in ("keys", "values"):
        packed, scales, biases = (getattr(part, name)[:, :, :held] for part in rows.parts)
        numbers = np.array(packed).view(np.uint8).astype(np.float64)
        scales, biases = (np.array(array.astype(mx.float32), np.float64) for array in (scales, biases))
        groups = numbers.reshape(*scales.shape, -1)
        found.append((groups * scales[..., None] + biases[..., None]).reshape(numbers.shape))
    return found


def steps(array, group):
    """The width of a step of each number's group, as the largest and the smallest number of it say."""
    groups = array.reshape(*array.shape[:-1], -1, group)
    return np.repeat((groups.max(-1) - groups.min(-1)) / 255, group, axis=-1)


@pytest.mark.parametrize("size", [32, 64, 96, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_have_the_same_bytes_in_one_call_or_in_many(kind, size):
    whole, _ = filled(KINDS[kind], size, [70])
    for pieces in ([1] * 70, [3, 40, 27], [69, 1]):
        other, _ = filled(KINDS[kind], size, pieces)
        for one, two in zip(whole.parts, other.parts, strict=True):
            assert bool(mx.array_equal(one.keys, two.keys))
            assert bool(mx.array_equal(one.values, two.values))


@pytest.mark.parametrize("size", [32, 64, 96, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stored_number_is_off_by_a_step_of_its_group_and_the_rounding_of_scale_and_bias(kind, size):
    """One step: MLX moves the scale so that the far end of a group is exact, which moves the other end by up to one."""
    rows, given = filled(KINDS[kind], size, [70])
    unit = {"float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8}[kind]
    wide = [np.array(array.astype(mx.float32)) for array in rows.attended(70)]
    for exact, stored, seen in zip(given, widened(rows, 70), wide, strict=True):
        step = steps(exact, 64 if size % 64 == 0 else 32)
        rounding = unit * (255 * step + np.abs(exact).max())
        assert (np.abs(exact - stored) <= 1.01 * step + rounding).all()
        assert np.abs(exact - stored).max() > 0.4 * step.min()  # and it is no wider than 8 bits
        assert (np.abs(seen - stored) <= 2 * rounding + 1e-6).all()


def exact_attention(queries, keys, values, scale):
    """Causal attention in float64, the queries last: weights [H, T, Tk] and output [H, T, D]."""
    share, (_, rows, held) = queries.shape[1] // keys.shape[1], (0, queries.shape[2], keys.shape[2])
    keys, values = (np.repeat(array[0], share, axis=0) for array in (keys, values))
    scores = scale * queries[0] @ keys.transpose(0, 2, 1)
    scores += np.where(np.arange(held)[None] > np.arange(held - rows, held)[:, None], -np.inf, 0)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights, weights @ values


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_off_by_as_much_as_rounding_in_groups_predicts(kind, count):
    """Two checks: against numpy over the stored bytes; and the error that is left, against its own size on average.

    A number rounded to steps of s is off by s / sqrt(12) on average. So a score is off by scale * |q| * s / sqrt(12),
    and the output by its weight times what that moves, and by its weight times the value's own error.
    """
    rows, given = filled(KINDS[kind], 64, [200])
    queries, scale = mx.random.normal((1, 6, count, 64), key=mx.random.key(9)).astype(KINDS[kind]), 64**-0.5
    reach = Reach(Block((200 - count,)), 200, "causal" if count > 1 else None)
    found = np.array(stock_attention(queries, *rows.attended(200), reach, scale)[0].astype(mx.float32), np.float64)
    asked = np.array(queries.astype(mx.float32), np.float64)
    _, stored = exact_attention(asked, *widened(rows, 200), scale)
    tolerance = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[kind]
    assert np.abs(found - stored).max() < tolerance
    if kind == "float32":
        weights, exact = exact_attention(asked, *given, scale)
        per_head = [np.repeat(array[0], 3, axis=0) for array in (*given, *(steps(one, 64) for one in given))]
        _, values, key_step, value_step = per_head
        score_off = (scale * np.linalg.norm(asked[0], axis=-1))[..., None] * key_step[:, None, :, 0] / 12**0.5
        moved = score_off[..., None] * (values[:, None] - exact[:, :, None])
        predicted = weights[..., None] ** 2 * (moved**2 + value_step[:, None] ** 2 / 12)
        assert 0.8 < np.sqrt(((found - exact) ** 2).mean() / predicted.sum(2).mean()) < 1.25


CASES = list(
    itertools.product(
        ("1 token", "window + 1", "5 windows"),
        ("7", "window", "all at once"),
        (1, 4, 15, "falling and rising"),
        (0.0, 0.8),
    )
)[::7]


@pytest.mark.parametrize(("case", "kind"), dealt(CASES, ("float32", "bfloat16")), ids=str)
def test_drafted_equals_plain_with_the_same_bits(case, kind):
    """Random drafts under a tutor: all, some and none of a block are kept, so rows are overwritten."""
    prompt, step, length, temperature = case
    pair, tokens = eight(kind), grids.prompts(SHAPE, kind)[prompt]
    options = {"temperature": temperature, "seed": 3}
    expected = plain(pair, tokens, grids.GENERATED, **options)
    taught = grids.tutored(pair, tokens + expected, seed=len(prompt))
    size = grids.steps(SHAPE, kind)[step]
    done = grids.drive(taught, tokens, grids.schedule(length), step=size, **options)
    assert done.tokens == expected


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_drafted_equals_plain_while_buffers_grow_and_rings_wrap(kind):
    """From 175 tokens to 305: the full layers' buffers double at 256, the rings of 80 wrap."""
    pair, tokens = eight(kind), grids.prompts(SHAPE, kind)["5 windows"]
    expected = plain(pair, tokens, 130)
    done = grids.drive(grids.tutored(pair, tokens + expected), tokens, grids.schedule("drawn"), 130)
    assert done.tokens == expected
    assert done.state.cache.full_layers[0].capacity == 512
    assert len({round_.accepted for round_ in done.rounds}) > 4


def test_heads_of_64_draft_without_loss_too(tmp_path):
    pair = dflash_mlx.load(*tiny_pair(tmp_path, dtype="bfloat16", **WIDE), kv_bits=8)
    prompt = list(range(3, 63))
    expected = plain(pair, prompt, 40)
    assert grids.drive(grids.tutored(pair, prompt + expected), prompt, grids.schedule(7), 40).tokens == expected


def test_only_full_layers_are_quantised_and_it_changes_logits():
    pair, tokens = eight(), grids.prompts(SHAPE)["5 windows"]
    found = []
    for each in (pair, grids.pair(SHAPE)):
        session = Session(each)
        session.generate(tokens, max_tokens=2)
        found.append(session._state)
    quantised, wide = found
    kinds = [type(layer).__name__ for layer in quantised.cache.layers]
    assert kinds == ["QuantisedRows" if full else "Rows" for full in quantised.cache._full]
    assert 0 < kinds.count("QuantisedRows") < len(kinds)
    last = len(kinds) - 1 - kinds[::-1].index("Rows")
    assert not mx.array_equal(quantised.cache.layers[last].keys, wide.cache.layers[last].keys)
    assert {type(layer).__name__ for layer in quantised.context.layers} == {"Rows"}


def test_a_fork_and_the_engine_go_on_as_fresh_sessions_would():
    pair, tokens = eight(), grids.prompts(SHAPE)["5 windows"]
    session, options = Session(pair), {"max_tokens": 10, "draft_length": 4}
    session.generate(tokens, **options)
    other = session.fork()
    for each, token in ((session, 1), (other, 2), (session, 3)):
        prompt = [*each.tokens, token]
        expected = Session(pair).generate(prompt, **options).tokens
        assert each.generate(prompt, **options).tokens == expected
    with Engine(pair) as engine:
        tickets = [engine.submit(prompt, **options) for prompt in (tokens, tokens[:50])]
        for ticket, prompt in zip(tickets, (tokens, tokens[:50]), strict=True):
            assert ticket.result().tokens == Session(pair).generate(prompt, **options).tokens


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_a_session_file_holds_the_bytes_as_they_are(kind, tmp_path):
    pair, tokens = eight(kind), grids.prompts(SHAPE, kind)["5 windows"]
    session, options = Session(pair), {"max_tokens": 12, "draft_length": 4}
    session.generate(tokens + tokens[:85], **options)
    session.save(tmp_path / "a.session")
    loaded, offset = Session.load(pair, tmp_path / "a.session"), session._state.cache.offset
    assert offset > 256
    for one, two in zip(loaded._state.cache.full_layers, session._state.cache.full_layers, strict=True):
        assert one.capacity == two.capacity
        for part, other in zip(one.parts, two.parts, strict=True):
            assert bool(mx.array_equal(part.keys[:, :, :offset], other.keys[:, :, :offset]))
            assert bool(mx.array_equal(part.values[:, :, :offset], other.values[:, :, :offset]))
    prompt = [*session.tokens, 7]
    assert loaded.generate(prompt, **options).tokens == session.generate(prompt, **options).tokens


@pytest.mark.parametrize("saved_with", [None, 8])
def test_a_session_of_other_bits_is_refused(saved_with, tmp_path):
    pairs = {None: grids.pair(SHAPE), 8: eight()}
    session = Session(pairs.pop(saved_with))
    session.generate([1, 2, 3], max_tokens=2)
    session.save(tmp_path / "a.session")
    ((mine, pair),) = pairs.items()
    with pytest.raises(SessionFileError) as caught:
        Session.load(pair, tmp_path / "a.session")
    assert str(caught.value) == (
        f"[session] kv_bits of {tmp_path / 'a.session'} must be {mine} but got {saved_with}. "
        "Load with the kv_bits that the session was saved with; rows of other bits cannot be gone on from."
    )


def test_writes_take_no_copy_of_the_buffers_and_attention_takes_what_the_plan_says():
    """A buffer of 8,192 rows: a write of 8 is done in place, unless something holds the old buffer.

    Half a buffer is left for what the allocator rounds up: it may reuse a block that is two pages larger.
    """
    config, rows = grids.pair(SHAPE).target.config, 8000
    cache = TargetCache(config, mx.bfloat16, 8192, kv_bits=8)
    layer = cache.full_layers[0]
    layer.grow(rows, 8192)
    mx.eval(cache.arrays)
    buffer = layer.parts[0].keys.nbytes
    assert buffer == 8192 * config.num_kv_heads * config.head_dim

    def write(attended=False):
        given = random_rows(8, config.num_kv_heads, config.head_dim)
        mx.eval(given)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        layer.write(rows - 8, *given)
        mx.eval(cache.arrays, layer.attended(rows) if attended else [])
        return mx.get_peak_memory() - before

    write()
    assert write() < buffer / 2
    assert write(attended=True) < layer_made_wide(config, rows, 2) + buffer / 2
    assert write() < buffer / 2
    kept = layer.parts[0].keys[:, :, :1]
    assert write() >= buffer
    del kept


def layer_made_wide(config, context, item):
    """By hand, on the CPU: keys and values of one layer, and 8 bytes in passing for each number."""
    return 2 * context * config.num_kv_heads * config.head_dim * (item + 8)


def test_the_plan_counts_packed_rows_by_hand(tmp_path):
    """Heads of 64 in bfloat16: a row of 64 numbers takes 64 bytes, and 4 for its scale and bias."""
    folders = tiny_pair(tmp_path, dtype="bfloat16", **WIDE)
    wide, packed = (dflash_mlx.load(*folders, max_context=1000, kv_bits=bits) for bits in (None, 8))
    full = packed.target.config.full_layers
    assert full == 1
    assert wide.plan.parts["full layers' cache"] == full * 1000 * 2 * 2 * 64 * 2
    assert packed.plan.parts["full layers' cache"] == full * 1000 * 2 * 2 * (64 + 4)
    assert packed.plan.parts["its growth"] == 1000 * 2 * 2 * (64 + 4) // 2
    assert packed.plan.parts["a full layer made wide"] == layer_made_wide(packed.target.config, 1000, 2)
    changed = {name for name in packed.plan.parts if packed.plan.parts[name] != wide.plan.parts.get(name)}
    assert changed == {"full layers' cache", "its growth", "a full layer made wide"}
    cache = TargetCache(packed.target.config, mx.bfloat16, 1000, 8)
    held = sum(array.nbytes for part in cache.full_layers[0].parts for array in (part.keys, part.values))
    assert held == 256 * 2 * 2 * (64 + 4)
    with pytest.raises(MemoryPlanError, match="a full layer made wide"):
        dflash_mlx.load(*folders, max_context=1000, kv_bits=8, max_memory=packed.plan.total - 1)


@pytest.mark.parametrize("value", [4, 16, 0, "8", 8.0, True])
def test_other_bits_are_refused(value):
    with pytest.raises(InputError) as caught:
        dflash_mlx.load("pocket", kv_bits=value)
    assert str(caught.value) == (
        f"[load] kv_bits must be 8 but got {value!r}. Leave it out to keep the cache in the model's own type."
    )


def test_heads_that_no_group_divides_are_refused(tmp_path):
    folders = tiny_pair(tmp_path, **{**WIDE, "head_dim": 16})
    with pytest.raises(InputError) as caught:
        dflash_mlx.load(*folders, kv_bits=8)
    assert str(caught.value) == (
        "[load] kv_bits must be left out for a head size of 16 but got 8. Groups are of 64 or of 32 numbers of a head."
    )


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "bench"])
def test_the_flag_is_there_and_other_values_end_with_2(command):
    assert "--kv-bits" in run(command, "--help").stdout
    if command == "generate":
        done = run(command, "def f(n):", "--kv-bits", "4", "--max-tokens", "2")
        assert done.exit_code == 2
        assert "[load] kv_bits must be 8 but got 4." in done.stderr


def test_the_flag_reaches_the_pair(monkeypatch):
    given = []
    load = dflash_mlx.load
    monkeypatch.setattr(dflash_mlx, "load", lambda *args, **options: given.append(load(*args, **options)) or given[0])
    done = run("generate", "def f(n):", "--kv-bits", "8", "--max-tokens", "3")
    assert done.exit_code == 0
    assert given[0].kv_bits == 8


def test_the_cost_model_counts_three_passes_over_packed_rows():
    """Packed rows are read, wide ones written and read again; 64 bytes and 4 for each 64 numbers of the 30B's 512."""
    target, drafter = (grids.pair(SHAPE).target.config, None)
    costs = Costs(replace(target, num_kv_heads=2, head_dim=128), drafter, 0.5625)
    full = target.full_layers
    work, packed = (replace(costs, kv_bits=bits).forward(8, 1000)["KV, full layers"] for bits in (None, 8))
    assert work.nbytes == full * 1008 * 1024
    assert packed == (full * 1008 * (2 * 1024 + 8 * 68), work.flops)
