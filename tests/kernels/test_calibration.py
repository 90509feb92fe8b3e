"""A kernel that Apple's compiler has accepted, MLX's own attention for one row, runs on the harness as it is.

Its text is read from the installed wheel at test time. Function constants get values, which Metal does when it makes
the pipeline, and `Limits`, which stands in another file, is supplied; the kernel itself is untouched.
"""

from __future__ import annotations

import re
from pathlib import Path

import mlx
import mlx.core as mx
import pytest

from dflash_mlx.kernels.launch import Kernel, Launch, run
from metal.cpu import CpuDevice, KernelFault
from metal.cpu.assemble import unit
from metal.cpu.build import audit, typecheck

pytestmark = pytest.mark.kernels

FILE = "include/mlx/backend/metal/kernels/sdpa_vector.h"
FUNCTION_CONSTANT = re.compile(r"constant (bool|int) (\w+) \[\[function_constant\(\d+\)\]\];")
VALUES = {"bool": "false", "int": "4"}
# On one line, so that the file's lines keep their numbers.
LIMITS = (
    "template <class U> struct Limits { static constexpr constant U finite_min = U(-3e38f); "
    "static constexpr constant U finite_max = U(3e38f); }; "
)
CALL = """
sdpa_vector<T, D>(queries, keys, values, out, gqa, length, k_head, k_row, v_head, v_row, scale, nullptr, nullptr,
                  length, length, length, nullptr, length, threadgroup_position_in_grid, threadgroups_per_grid,
                  simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
"""
INPUTS = ("queries", "keys", "values", "gqa", "length", "k_head", "k_row", "v_head", "v_row", "scale")
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
HEADS, KV_HEADS, THREADS = 8, 2, 1024
# MLX's CPU result has rounded as often as the kernel has: one unit in the last place of the largest values apart.
ALLOWED = {mx.float32: 2e-6, mx.float16: 2.0**-9, mx.bfloat16: 2.0**-6}


def text() -> str:
    """The kernel's file, with function constants set."""
    [file] = [path for folder in mlx.__path__ if (path := Path(folder) / FILE).exists()]
    source = file.read_text().replace("#include <metal_simdgroup>", "")
    source, set_constants = FUNCTION_CONSTANT.subn(
        lambda match: f"constant constexpr {match[1]} {match[2]} = {VALUES[match[1]]};", source
    )
    assert set_constants >= 6
    return LIMITS + source


def launch(dtype: mx.Dtype, size: int, length: int, header: str) -> Launch:
    """One row of 8 heads over `length` keys of 2 heads."""
    mx.random.seed(length)
    shapes = ((1, HEADS, 1, size), (1, KV_HEADS, length, size), (1, KV_HEADS, length, size))
    arrays = [mx.random.normal(shape).astype(dtype) for shape in shapes]
    numbers = [mx.array(value, mx.int32) for value in (HEADS // KV_HEADS, length)]
    strides = [mx.array(value, mx.uint64) for value in (length * size, size) * 2]
    kernel = Kernel("sdpa", "sdpa_vector.h", INPUTS, ("out",), header, CALL, 1, 1)
    inputs = (*arrays, *numbers, *strides, mx.array(size**-0.5))
    grid, threadgroup = (HEADS * THREADS, 1, 1), (THREADS, 1, 1)
    return Launch(kernel, inputs, (("T", dtype), ("D", size)), grid, threadgroup, (((1, HEADS, 1, size), dtype),))


@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize(("size", "length"), [(64, 77), (128, 300)])
def test_kernel_of_mlx_runs_without_a_report_and_agrees_with_mlx(dtype: mx.Dtype, size: int, length: int) -> None:
    one = launch(dtype, size, length, text())
    expected = mx.fast.scaled_dot_product_attention(*one.inputs[:3], scale=size**-0.5).astype(mx.float32)
    for device in (CpuDevice(), CpuDevice(checked=False), CpuDevice(seed=7), CpuDevice(private=True)):
        [output] = run(device, one)
        assert mx.abs(output.astype(mx.float32) - expected).max().item() <= ALLOWED[dtype]
    assert typecheck(unit(one, typecheck=True)) == ""
    assert audit(unit(one, typecheck=False)) == []


@pytest.mark.parametrize("number", range(3))
def test_barrier_taken_out_of_mlx_is_caught(number: int) -> None:
    parts = text().split(BARRIER)
    assert len(parts) > 3
    broken = BARRIER.join(parts[: number + 1]) + BARRIER.join(parts[number + 1 :])
    assert broken.count(BARRIER) == len(parts) - 2
    with pytest.raises(KernelFault) as caught:
        run(CpuDevice(), launch(mx.float32, 64, 77, broken))
    assert {fault.kind for fault in caught.value.faults} & {"race", "uninitialised read"}
    assert "sdpa_vector.h:" in str(caught.value)


def test_bytes_of_mlx_are_the_least_possible() -> None:
    device = CpuDevice()
    run(device, launch(mx.float16, 64, 77, text()))
    [counts] = device.counts
    assert counts.unique["keys"] == counts.unique["values"] == KV_HEADS * 77 * 64 * 2
    assert counts.per_group["keys"] == HEADS * 77 * 64 * 2  # each head reads them again: 4 to a key/value head
    assert counts.threadgroup_bytes == (32 * 32 + 32 + 32) * 4
    assert counts.groups == HEADS
