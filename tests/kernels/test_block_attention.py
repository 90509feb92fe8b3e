"""Block attention on the harness: right, the same for a row alone, and no byte read twice."""

from __future__ import annotations

import re

import attention_cases as cases
import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.cache import ring_mask
from dflash_mlx.config import ring_rows
from dflash_mlx.errors import DFlashError
from dflash_mlx.kernels import block_attention as launcher
from dflash_mlx.kernels.block_attention import EVERYTHING, Block, block_attention, block_attention_ops
from dflash_mlx.kernels.launch import Launch, read_kernels
from dflash_mlx.resources import find
from metal.cpu import CpuDevice
from metal.cpu.assemble import signature, unit
from metal.cpu.build import audit
from metal.cpu.generated import generate

pytestmark = pytest.mark.kernels


bits = cases.bits


@pytest.mark.parametrize("case", cases.sample(), ids=str)
def test_block_attention_keeps_its_promises(case: cases.Case) -> None:
    rows = range(case.rows) if case.rows < 6 else (0, case.rows - 1)
    assert cases.broken_promise(case, rows) == ""


def test_sample_has_every_kind(notes: list[str]) -> None:
    sample, grid = cases.sample(), cases.grid()
    notes.append(f"block attention: {len(sample)} of {len(grid)} cases, from seed {cases.SEED}")
    for kind in ("dtype", "size", "group", "rows", "situation"):
        assert {getattr(case, kind) for case in sample} == {getattr(case, kind) for case in grid}, kind


def test_twin_agrees_and_takes_the_same_arguments() -> None:
    for case in cases.sample()[:12]:
        arrays = cases.data(case)
        expected = cases.exact(*arrays, case.block, case.scale)
        wide = tuple(part.astype(mx.float32) for part in arrays)
        error = np.abs(np.array(block_attention_ops(*wide, case.block, case.scale)) - expected).max()
        assert error < 2e-5 * max(1.0, np.abs(expected).max()), str(case)


def test_twin_sees_what_the_caches_mask_says() -> None:
    for first, rows, span, causal, start in ((0, 5, 11, True, 0), (77, 16, 11, True, 60), (77, 3, 12, False, 70)):
        capacity = ring_rows(11)
        mask = launcher._mask(Block((first,), span, causal, (start,)), 0, rows, capacity, capacity)
        assert mx.array_equal(mask, ring_mask(first, rows, capacity, capacity, span, causal, start))


@pytest.mark.parametrize("window", [0, 40], ids=["full", "ring"])
def test_rounds_of_mixed_lengths_equal_single_steps(window: int) -> None:
    """40 rounds: rows are written, some are rejected and stay; every kept row has the bits of a single step."""
    size, group, heads, dtype = 16, 16, 1, mx.bfloat16
    capacity = ring_rows(window) if window else 512
    rng = np.random.default_rng(5)
    draw = lambda *shape: mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)  # noqa: E731
    blocks, steps = (mx.zeros((2, 1, heads, capacity, size), dtype) for _ in range(2))
    offset, compared = 0, 0
    for _ in range(40):
        rows, span = int(rng.integers(1, 17)), window or EVERYTHING
        kept = int(rng.integers(1, rows + 1))
        queries, fresh = draw(1, group * heads, rows, size), draw(2, 1, heads, rows, size)
        where = mx.array([(offset + i) % capacity for i in range(rows)])
        blocks[:, :, :, where] = fresh * mx.where(mx.arange(rows) < kept, 1, cases.GARBAGE)[:, None].astype(dtype)
        block = Block((offset,), span, True, chunk=32)
        wide = bits(block_attention(queries, *blocks, block, 0.3, device=CpuDevice(checked=False)))
        for row in range(kept):
            steps[:, :, :, where[row : row + 1]] = fresh[:, :, :, row : row + 1]
            single = Block((offset + row,), span, True, chunk=32)
            query = queries[:, :, row : row + 1]
            narrow = bits(block_attention(query, *steps, single, 0.3, device=CpuDevice(checked=False)))
            assert np.array_equal(narrow[:, :, 0], wide[:, :, row]), (offset, rows, row)
            compared += 1
        offset += kept
    assert compared > 150


def test_reads_of_a_real_window_are_within_a_tenth_of_the_visible_rows() -> None:
    window, rows, size = 2048, 8, 16
    arrays = [mx.random.normal(shape) for shape in ((1, 16, rows, size), *((1, 1, ring_rows(window), size),) * 2)]
    device = CpuDevice()
    block_attention(*arrays, Block((9001,), window), 0.25, device=device)
    visible = (window + rows - 1) * size * 4
    assert device.counts[0].per_group["k"] <= 1.1 * visible
    assert device.counts[0].per_group["v"] <= 1.1 * visible


def test_rows_that_were_never_written_must_be_finite() -> None:
    """Zeros are the caches' promise: the kernel multiplies masked rows by 0, and 0 times NaN is NaN."""
    queries, keys, values = (mx.ones(shape) for shape in ((1, 4, 1, 16), (1, 1, 32, 16), (1, 1, 32, 16)))
    unwritten = (mx.arange(32) > 4)[:, None]
    for filling, finite in ((0.0, True), (float("nan"), False)):
        output = block_attention(
            queries, keys, mx.where(unwritten, filling, values), Block((4,)), 1.0, device=CpuDevice(checked=False)
        )
        assert bool(mx.all(mx.isfinite(output))) is finite


def test_half_types_lose_little_more_than_one_rounding() -> None:
    assert cases.lost_precision() == ""


@pytest.mark.parametrize("case", cases.sample()[:3], ids=str)
def test_no_private_value_is_used_before_it_is_set(case: cases.Case) -> None:
    arrays = cases.data(case)
    output = block_attention(*arrays, case.block, case.scale, device=CpuDevice(private=True))
    again = block_attention(*arrays, case.block, case.scale, device=case.device(checked=False))
    assert np.array_equal(bits(output), bits(again))


def test_row_that_sees_nothing_is_zero() -> None:
    assert cases.blind_row() == ""


def test_inputs_that_are_not_contiguous_give_the_same_bits() -> None:
    case = cases.sample()[0]
    queries, keys, values = cases.data(case)
    turned = mx.contiguous(queries.swapaxes(1, 2)).swapaxes(1, 2)
    outputs = [
        block_attention(part, keys, values, case.block, case.scale, device=case.device(checked=False))
        for part in (queries, turned)
    ]
    assert np.array_equal(bits(outputs[0]), bits(outputs[1]))


class Recorder(CpuDevice):
    """Keeps the launches that it runs."""

    def __init__(self) -> None:
        super().__init__(checked=False)
        self.launches: list[Launch] = []

    def run(self, launch: Launch) -> list[mx.array]:
        self.launches.append(launch)
        return super().run(launch)


@pytest.mark.parametrize(("kind", "size"), cases.SAMPLED_PAIRS)
def test_text_of_mlx_has_the_signature_and_no_access_escapes_the_checker(kind: str, size: int) -> None:
    dtype = cases.DTYPES[kind]
    device = Recorder()
    arrays = [mx.zeros(shape, dtype) for shape in ((2, 8, 3, size), (2, 2, 96, size), (2, 2, 96, size))]
    block_attention(*arrays, Block((5, 95), 40, chunk=32), 1.0, device=device)
    for launch in device.launches:
        generated = generate(launch)
        assert generated.typecheck() == ""
        assert generated.parameters() == signature(launch)
        assert audit(unit(launch, typecheck=False)) == []
        assert launch.template == launcher.templates(dtype, size)  # so the list of pipelines is these two


def test_files_keep_the_rules_that_no_compiler_checks() -> None:
    """A literal without f is a double here and a float in Metal, and casts between address spaces pass here."""
    for file in find("metal").glob("*.metal"):
        code = re.sub(r"//.*", "", file.read_text())
        assert re.findall(r"(?<![\w.])\d+\.\d*(?:e-?\d+)?(?![\dfhe])", code) == [], file.name
        assert re.findall(r"\((?:const )?(?:device|threadgroup|constant) [\w<>, ]+\*\)", code) == [], file.name
        assert re.findall(r"\bthreadgroup [^;(]*,", code) == [], file.name


def test_constants_of_file_and_launcher_are_equal() -> None:
    source = read_kernels(launcher.FILE)[launcher.CHUNKS].source
    for name in ("TILE", "KEYS", "GROUP_TILES"):
        assert f"constexpr int {name} = {getattr(launcher, name)};" in source


REFUSED = {
    "rows": ({"rows": 17}, "rows must be between 1 and 16 but got 17"),
    "head size": ({"size": 80}, "head size must be one of 16, 32, 64, 128 but got 80"),
    "heads": ({"heads": 7}, "query heads must be a multiple of the 2 key/value heads but got 7"),
    "capacity": ({"capacity": 90}, "buffer rows must be a multiple of 16 but got 90"),
    "window": ({"block": Block((500,), 95)}, "visible positions must be at most the buffer's 96 rows but got 98"),
    "full": ({"block": Block((94,))}, "visible positions must be at most the buffer's 96 rows but got 98"),
    "start": (
        {"block": Block((5,), start=(6,))},
        "start must be between 0 and the block's first position but got (6,)",
    ),
    "entries": ({"block": Block((5, 6))}, "first positions must be 1, one per batch entry but got 2"),
    "type": ({"dtype": mx.int32}, "type must be float32, float16 or bfloat16 but got int32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    changed, message = REFUSED[name]
    given = {"rows": 4, "size": 16, "heads": 8, "capacity": 96, "dtype": mx.float32, "block": Block((5,))} | changed
    arrays = [
        mx.zeros(shape, given["dtype"])
        for shape in (
            (1, given["heads"], given["rows"], given["size"]),
            *((1, 2, given["capacity"], given["size"]),) * 2,
        )
    ]
    for attend in (block_attention, block_attention_ops):
        with pytest.raises(DFlashError) as caught:
            attend(*arrays, given["block"], 1.0)
        assert str(caught.value).startswith(f"[block_attention] {message}")
