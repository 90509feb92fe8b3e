"""What the harness computes is right, what Metal refuses is refused, and what the checker cannot see is found."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from snippets import Snippet, results

from dflash_mlx.kernels.launch import run
from metal.cpu import CompileError, CpuDevice, compiler
from metal.cpu.assemble import unit
from metal.cpu.build import audit, typecheck

pytestmark = pytest.mark.kernels

TID = "const uint t = thread_index_in_threadgroup; const uint lane = thread_index_in_simdgroup;\n"
LANE = np.arange(64) % 32
X = np.arange(64, dtype=np.float64)

VALUES = {
    "simd_sum(x[t])": np.repeat([496, 1520], 32),
    "simd_max(x[t])": np.repeat([31, 63], 32),
    "simd_min(x[t])": np.repeat([0, 32], 32),
    "simd_broadcast(x[t], 5)": np.repeat([5, 37], 32),
    "simd_broadcast_first(x[t])": np.repeat([0, 32], 32),
    "simd_shuffle(x[t], ushort(31 - lane))": X - LANE + 31 - LANE,
    "simd_shuffle_xor(x[t], ushort(8))": X - LANE + (LANE ^ 8),
    "simd_shuffle_down(x[t], ushort(3))": np.where(LANE < 29, X + 3, X),
    "simd_shuffle_up(x[t], ushort(3))": np.where(LANE >= 3, X - 3, X),
    "simd_prefix_inclusive_sum(float(lane))": LANE * (LANE + 1) / 2,
    "simd_prefix_exclusive_sum(float(lane))": LANE * (LANE - 1) / 2,
    "float(simd_any(x[t] == 40.0f))": np.repeat([0, 1], 32),
    "float(simd_all(x[t] < 32.0f))": np.repeat([1, 0], 32),
    "float(max(int(t), 9) + min(3, int(t)))": np.maximum(np.arange(64), 9) + np.minimum(np.arange(64), 3),
    "exp2(float(t % 8)) + fma(2.0f, x[t], 1.0f)": 2.0 ** (np.arange(64) % 8) + 2 * X + 1,
    "exp2(-INFINITY)": np.zeros(64),
    "dot(float4(1.0f, 2.0f, x[t], 0.0f), float4(1.0f))": X + 3,
    "float(as_type<uint>(1.0f) >> 23)": np.full(64, 127),
    "float(thread_position_in_grid.x + threads_per_threadgroup.x)": np.arange(64) + 64,
}


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "fast"])
def test_values_are_as_the_language_says(checked: bool) -> None:
    body = TID + "".join(f"float v{i} = {text};\n" for i, text in enumerate(VALUES)) + "o[t] = 0.0f;\n"
    body += "".join(f"o[t] += v{i} * {i + 1}.0f;\n" for i in range(len(VALUES)))
    total = sum((i + 1) * np.asarray(expected) for i, expected in enumerate(VALUES.values()))
    if results(Snippet(body), checked=checked) == total.tolist():
        return
    for text, expected in VALUES.items():  # something is wrong: say what
        assert results(Snippet(TID + f"o[t] = {text};"), checked=checked) == expected.tolist(), text
    pytest.fail("each value is right alone, and their sum is not")


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_matrices_multiply(dtype: mx.Dtype) -> None:
    body = """
simdgroup_matrix<T, 8, 8> a, b;
simdgroup_matrix<float, 8, 8> c = simdgroup_matrix<float, 8, 8>(1.0f);
simdgroup_load(a, x, 8);
simdgroup_load(b, x, 8, ulong2(0, 0), true);
simdgroup_multiply_accumulate(c, a, b, c);
simdgroup_matrix<T, 8, 8> d;
d.thread_elements()[0] = T(c.thread_elements()[0]);
d.thread_elements()[1] = T(c.thread_elements()[1]);
simdgroup_store(d, o, 8);
"""
    a = np.arange(64.0).reshape(8, 8)
    expected = mx.array((a @ a.T + np.eye(8)).astype(np.float32)).astype(dtype).astype(mx.float32)
    assert results(Snippet(body, threads=32, group=32), dtype) == expected.flatten().tolist()


def test_bytes_and_operations_are_counted() -> None:
    snippet = Snippet(
        TID + "threadgroup float s[64];\ns[t] = x[t / 2];\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup);\no[t] = simd_sum(s[63 - t]);"
    )
    device = CpuDevice()
    run(device, snippet.launch())
    [counts] = device.counts
    assert (counts.read["x"], counts.unique["x"], counts.per_group["x"], counts.written["o"]) == (256, 128, 128, 256)
    assert (counts.threadgroup_bytes, counts.threadgroup_read, counts.threadgroup_written) == (256, 256, 256)
    assert (counts.barriers, counts.simd_operations, counts.groups) == (64, 64, 1)


REFUSED = {
    "threadgroup pointer without its space": "threadgroup float s[4]; float* p = s;",
    "device pointer to threadgroup memory": "threadgroup float s[4]; device float* p = s;",
    "double": "double d = 1.0;",
    "arguments of two types": "o[0] = max(x[0], 0);",
    "exponential of an integer": "o[0] = exp2(3);",
    "write to an input": "x[0] = 1.0f;",
    "threadgroup array of a size known at run time": "threadgroup float s[int(x[0])]; s[0] = 1.0f;",
    "two threadgroup arrays in one declaration": "threadgroup float s[4], r[4]; s[0] = r[0];",
    "standard library": "o[0] = std::max(x[0], x[1]);",
    "three values for four": "float4 v = float4(1.0f, 2.0f, 3.0f); o[0] = v.x;",
    "a private value that was never set": "float v; o[0] = v;",
    "a private value set on one way only": "float v; if (x[0] > 1.0f) v = 1.0f; o[0] = v;",
}


@pytest.mark.parametrize("name", REFUSED)
def test_front_end_refuses(name: str) -> None:
    with pytest.raises(CompileError):
        typecheck(unit(Snippet(REFUSED[name]).launch(), typecheck=True))


def test_front_end_accepts_the_same_without_the_fault() -> None:
    body = "threadgroup float s[4]; threadgroup float* p = s; p[0] = max(x[0], 0.0f) * 0.1f; o[0] = p[0];"
    assert typecheck(unit(Snippet(body).launch(), typecheck=True)) == ""


def test_small_inputs_are_in_constant_memory() -> None:
    from dataclasses import replace

    launch = Snippet("const device float* p = x; o[0] = p[0];").launch()
    assert typecheck(unit(launch, typecheck=True)) == ""
    with pytest.raises(CompileError):
        typecheck(unit(replace(launch, inputs=(mx.zeros((7,)),)), typecheck=True))


def test_audit_finds_accesses_that_the_checker_does_not_see() -> None:
    wide = "((device long4*)o)[0] = ((const device long4*)x)[1];"
    found = audit(unit(Snippet(wide).launch(), typecheck=False))
    assert found == ["load of 32 bytes", "store of 32 bytes"]
    narrow = "((device float4*)o)[0] = ((const device float4*)x)[1];"
    assert audit(unit(Snippet(narrow).launch(), typecheck=False)) == []


def test_without_a_compiler_the_message_says_what_was_tried(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    old = tmp_path / "clang++"
    old.write_text("#!/bin/sh\necho clang version 14.0.6\n")
    old.chmod(0o755)
    monkeypatch.setattr(compiler, "_environment", {"PATH": str(tmp_path), "HOME": str(tmp_path)})
    monkeypatch.setattr(compiler, "_failed", [])
    monkeypatch.setattr(compiler, "run", lambda command: "no route to any host")
    compiler.find_compiler.cache_clear()
    try:
        with pytest.raises(compiler.CompilerMissing) as caught:
            compiler.find_compiler()
    finally:
        compiler.find_compiler.cache_clear()
    message = str(caught.value)
    assert message.startswith("[metal/cpu] the compiler must be clang++ 19 or newer but none was found: ")
    assert f"{old} is too old (clang version 14.0.6)" in message
    assert "pip install ziglang>=0.16 failed: no route to any host" in message
