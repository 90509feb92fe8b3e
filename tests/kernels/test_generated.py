"""MLX's own text around a kernel: it type-checks, and has the signature that the harness assumes."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest

from dflash_mlx.kernels.launch import Launch, parse_kernels
from metal.cpu import CompileError
from metal.cpu.assemble import ATTRIBUTES, signature
from metal.cpu.generated import generate

pytestmark = pytest.mark.kernels

ALL = """
// ==== helpers
inline float twice(float v) { return 2.0f * v; }
// ==== kernel everything(q, few, none, flags) -> o, p
// strides of a comment count too: few_strides
const uint i = thread_position_in_grid.x;
threadgroup float s[32];
s[thread_index_in_simdgroup] = twice(float(q[i])) + float(q_shape[0]) + float(flags_ndim) + none;
threadgroup_barrier(mem_flags::mem_threadgroup);
o[i] = T(s[31u - thread_index_in_simdgroup] + float(few[0]) + (FLAG ? float(D) : 0.0f));
p[i] = int(flags[i]);
"""


def launch(dtype: mx.Dtype, few: int = 3) -> Launch:
    inputs = (mx.zeros((32,), dtype), mx.zeros((few,), mx.int32), mx.array(1.0), mx.zeros((4, 8), mx.uint8))
    kernel = parse_kernels("everything.metal", ALL)["everything"]
    template = (("T", dtype), ("D", 64), ("FLAG", True))
    return Launch(kernel, inputs, template, (32, 1, 1), (32, 1, 1), (((32,), dtype), ((32,), mx.int32)))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("few", [1, 7, 8])
def test_signature_is_the_one_that_mlx_writes(dtype: mx.Dtype, few: int) -> None:
    one = launch(dtype, few)
    assert signature(one) == generate(one).parameters()


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attribute_is_the_one_that_mlx_writes(name: str) -> None:
    one = launch(mx.float32)
    one = replace(one, kernel=replace(one.kernel, source=one.kernel.source + f"// {name}\n"))
    assert signature(one) == generate(one).parameters()


def test_text_of_mlx_is_checked_as_it_is() -> None:
    generated = generate(launch(mx.bfloat16))
    assert "inline float twice" in generated.text
    assert generated.typecheck() == ""


def test_fault_in_the_text_of_mlx_is_refused() -> None:
    text = ALL.replace("const uint i", "const device int* pointer = few;\nconst uint i").replace("few[0]", "pointer[0]")
    kernel = parse_kernels("everything.metal", text)["everything"]
    with pytest.raises(CompileError):  # few has 3 elements, so it is in constant memory
        generate(replace(launch(mx.float32), kernel=kernel)).typecheck()
    assert generate(replace(launch(mx.float32, few=8), kernel=kernel)).typecheck() == ""


def test_text_of_mlx_is_checked_with_the_values_of_its_template() -> None:
    text = ALL.replace("const uint i", "static_assert(D == 65);\nconst uint i")
    with pytest.raises(CompileError):
        generate(replace(launch(mx.float32), kernel=parse_kernels("everything.metal", text)["everything"])).typecheck()
