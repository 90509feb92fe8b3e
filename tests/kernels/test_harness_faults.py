"""The harness reports each kind of fault, at its line, and nothing where there is none."""

from __future__ import annotations

import pytest
from snippets import HERE, Snippet, faults, results

from metal.cpu.compiler import find_compiler

pytestmark = pytest.mark.kernels

TID = "const uint t = thread_index_in_threadgroup; const uint lane = thread_index_in_simdgroup;\n"
WRITE = "o[t] = x[t];\n"
FLAGS = "mem_flags::mem_threadgroup"
BARRIER = f"threadgroup_barrier({FLAGS});"
SHARED = TID + "threadgroup float s[64];\ns[t] = x[t];\n"
REVERSED = f"o[t] = s[63 - t]; {HERE}\n"
HELPER = "__attribute__((noinline)) float total(float v) { return simd_sum(v); } " + HERE
INLINED = HELPER.replace("noinline", "always_inline")

CASES = {
    "read past a buffer": ("out of bounds", Snippet(TID + f"o[t] = x[t + 1]; {HERE}")),
    "read before a buffer": ("out of bounds", Snippet(TID + f"o[t] = x[int(t) - 1]; {HERE}")),
    "read far outside a buffer": ("out of bounds", Snippet(TID + f"o[t] = x[t + 100000000]; {HERE}")),
    "write past a buffer": ("out of bounds", Snippet(TID + f"o[t + 1] = x[t]; {HERE}")),
    "write through a cast to an input": (
        "write to an input",
        Snippet(TID + WRITE + f"((device float*)x)[t] = 1.0f; {HERE}"),
    ),
    "threadgroup memory past the end by pointer": (
        "out of bounds",
        Snippet(SHARED + f"{BARRIER}\nthreadgroup float* p = s + t;\no[t] = p[1]; {HERE}"),
    ),
    "index outside a threadgroup array": ("undefined", Snippet(SHARED + f"{BARRIER}\no[t] = s[t + 1]; {HERE}")),
    "index outside a private array": (
        "undefined",
        Snippet(
            TID + "float a[4] = {0, 0, 0, 0};\n"
            f"for (int i = 0; i <= int(x[4]); i++) a[i] = 1.0f; {HERE}\no[t] = a[t % 4];"
        ),
    ),
    "missing barrier": ("race", Snippet(SHARED + REVERSED)),
    "barrier for the other memory": (
        "race",
        Snippet(SHARED + "threadgroup_barrier(mem_flags::mem_device);\n" + REVERSED),
    ),
    "barrier for no memory": ("race", Snippet(SHARED + "threadgroup_barrier(mem_flags::mem_none);\n" + REVERSED)),
    "simdgroup barrier between simdgroups": ("race", Snippet(SHARED + f"simdgroup_barrier({FLAGS});\n" + REVERSED)),
    "missing barrier before a second write": (
        "race",
        Snippet(SHARED + f"{BARRIER}\nfloat v = s[63 - t];\ns[t] = v; {HERE}\n{BARRIER}\no[t] = s[t];"),
    ),
    "shuffle instead of a barrier": (
        "race",
        Snippet(SHARED + f"float v = simd_sum(x[t]);\no[t] = s[t ^ 1] + v; {HERE}"),
    ),
    "missing barrier on a buffer": (
        "race",
        Snippet(TID + f"o[t] = x[t];\nfloat v = o[63 - t]; {HERE}\n{BARRIER}\no[t] = v;"),
    ),
    "two threadgroups write one element": (
        "race",
        Snippet(f"uint i = thread_position_in_grid.x;\no[i % 32] = x[i]; {HERE}\nif (i >= 32) o[i] = 0.0f;", group=32),
    ),
    "read of threadgroup memory that nobody wrote": (
        "uninitialised read",
        Snippet(TID + f"threadgroup float s[64];\nif (t < 63) s[t] = x[t];\n{BARRIER}\no[t] = s[t]; {HERE}"),
    ),
    "read of an output that nobody wrote": ("uninitialised read", Snippet(TID + f"o[t] = o[t] + x[t]; {HERE}")),
    "barrier in a branch": ("barrier diverges", Snippet(TID + WRITE + f"if (t < 40) {BARRIER} {HERE}")),
    "two barriers on one line": (
        "barrier diverges",
        Snippet(TID + WRITE + f"if (t < 32) {{ {BARRIER} }} else {{ {BARRIER} }} {HERE}"),
    ),
    "return before a barrier": ("barrier diverges", Snippet(TID + WRITE + f"if (t == 5) return;\n{BARRIER} {HERE}")),
    "unequal numbers of turns": (
        "barrier diverges",
        Snippet(TID + WRITE + f"for (uint i = 0; i < 1 + t / 32; i++) {{ {BARRIER} }} {HERE}"),
    ),
    "simdgroup operation in a branch": (
        "simdgroup operation diverges",
        Snippet(TID + f"float v = 0.0f;\nif (lane < 9) v = simd_max(x[t]); {HERE}\no[t] = v;"),
    ),
    "two simdgroup operations on one line": (
        "simdgroup operation diverges",
        Snippet(TID + f"float v;\nif (lane < 16) v = simd_sum(x[t]); else v = simd_sum(x[t]); {HERE}\no[t] = v;"),
    ),
    "a helper called from two places": (
        "simdgroup operation diverges",
        Snippet(TID + "float v;\nif (lane < 16) v = total(x[t]);\nelse v = total(x[t]) + 1.0f;\no[t] = v;", HELPER),
    ),
    "an inlined helper called from two places": (
        "simdgroup operation diverges",
        Snippet(TID + "float v;\nif (lane < 16) v = total(x[t]);\nelse v = total(x[t]) + 1.0f;\no[t] = v;", INLINED),
    ),
    "lanes that returned": (
        "simdgroup operation diverges",
        Snippet(TID + WRITE + f"if (lane == 3) return;\no[t] = simd_sum(x[t]); {HERE}"),
    ),
    "more than 32 KiB": (
        "threadgroup memory",
        Snippet(TID + f"threadgroup float s[8193]; {HERE}\ns[t] = x[t];\no[t] = s[t];"),
    ),
    "lane outside the simdgroup": ("bad lane", Snippet(TID + f"o[t] = simd_broadcast(x[t], 40); {HERE}")),
    "matrix in half a simdgroup": (
        "bad lane",
        Snippet(
            TID + f"simdgroup_matrix<float, 8, 8> m;\nsimdgroup_load(m, x, 8); {HERE}\n"
            "o[2 * t] = m.thread_elements()[0];\no[2 * t + 1] = m.thread_elements()[1];\no[t + 32] = 0.0f;",
            threads=16,
            group=16,
        ),
    ),
    "division by zero": ("undefined", Snippet(TID + f"o[t] = float(7 / int(x[t])); {HERE}")),
    "shift by the width": ("undefined", Snippet(TID + f"o[t] = float(1u << uint(x[t])); {HERE}")),
    "float outside the integers": ("undefined", Snippet(TID + f"o[t] = float(int(x[t] * 1e9f)); {HERE}")),
}


@pytest.mark.parametrize("name", CASES)
def test_harness_reports(name: str) -> None:
    kind, snippet = CASES[name]
    found = faults(snippet)
    if name in find_compiler().not_checked:
        return  # the summary of the run says so
    assert (kind, snippet.here) in [(fault.kind, fault.place) for fault in found], found
    assert found[0].kernel == "snippet"


CLEAN = {
    "reversal with a barrier": Snippet(SHARED + BARRIER + "\n" + REVERSED),
    "reversal inside a simdgroup": Snippet(SHARED + f"simdgroup_barrier({FLAGS});\no[t] = s[t ^ 31];"),
    "barrier in a branch that all take": Snippet(TID + WRITE + f"if (x[1] > 0.0f) {{ {BARRIER} }}"),
    "loop of barriers": Snippet(
        SHARED
        + f"for (int i = 0; i < 3; i++) {{ {BARRIER}\nfloat v = s[63 - t];\n{BARRIER}\ns[t] = v; }}\no[t] = s[t];"
    ),
    "helper called twice by all": Snippet(TID + "o[t] = total(x[t]) + total(x[t] + 1.0f);", HELPER),
    "simdgroups that differ": Snippet(TID + "float v = x[t];\nif (t < 32) v = simd_sum(v);\no[t] = v;"),
    "last threadgroup smaller": Snippet("uint i = thread_position_in_grid.x;\no[i] = simd_sum(x[i]);", group=48),
}


@pytest.mark.parametrize("name", CLEAN)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_harness_is_silent_on(name: str, seed: int) -> None:
    assert faults(CLEAN[name], seed=seed) == []


def test_a_report_names_kernel_file_line_and_thread() -> None:
    [fault] = faults(Snippet(TID + f"o[t] = x[t];\nif (t == 37) o[t] = x[t + 27]; {HERE}"))
    assert str(fault) == (
        "out of bounds in snippet at snippet.metal:6, threadgroup 0, thread 37: "
        "read of 4 bytes at byte 256 of 'x', which has 256"
    )


def test_a_divergence_names_both_places() -> None:
    body = TID + WRITE + f"if (t < 32) {{\n{BARRIER} {HERE}\n}} else {{\n{BARRIER}\n}}"
    [fault] = faults(Snippet(body))
    assert {fault.place, fault.text.rsplit(" ", 1)[-1]} == {"snippet.metal:7", "snippet.metal:9"}


def test_outputs_that_were_not_written_are_reported_unless_they_were_filled() -> None:
    snippet = Snippet(TID + "if (t < 60) o[t] = x[t];")
    [fault] = faults(snippet)
    assert (fault.kind, fault.text) == (
        "never written",
        "16 bytes of the output 'o' were never written, from byte 240",
    )
    assert faults(snippet, init_value=0.0) == []


def test_a_kernel_that_does_not_end_is_stopped() -> None:
    snippet = Snippet(TID + "int i = 0;\nwhile (x[i] < 1000.0f) i = (i + 1) % 64;\no[t] = float(i);")
    assert [fault.kind for fault in faults(snippet, cpu_seconds=1)] == ["endless"]


PRIVATE = {
    "element of an array": f"float a[4];\nfor (int i = 0; i < int(x[3]); i++) a[i] = x[i];\no[t] = a[t % 4]; {HERE}",
    "branch": f"float a[2];\na[0] = x[t];\no[t] = 1.0f;\nif (a[int(x[1])] > 1.0f) {HERE}\n  {BARRIER}",
    "index": f"int a[2];\na[0] = int(x[t]);\no[t] = x[a[int(x[1])] & 63]; {HERE}",
    "value for other lanes": f"float a[2];\na[0] = x[t];\nfloat v = simd_sum(a[int(x[1])]); {HERE}\no[t] = v;",
    "matrix": (
        "simdgroup_matrix<float, 8, 8> a, b, c = simdgroup_matrix<float, 8, 8>(0.0f);\nsimdgroup_load(b, x, 8);\n"
        f"if (x[1] > 2.0f) a = b;\nsimdgroup_multiply_accumulate(c, a, b, c); {HERE}\no[t] = c.thread_elements()[0];"
    ),
}


@pytest.mark.parametrize("name", PRIVATE)
def test_private_value_that_was_never_set_is_reported(name: str) -> None:
    snippet = Snippet(TID + PRIVATE[name])
    found = faults(snippet, private=True)
    assert ("uninitialised read", snippet.here) in [(fault.kind, fault.place) for fault in found], found


@pytest.mark.parametrize("name", CLEAN)
def test_private_check_is_silent_on(name: str) -> None:
    assert faults(CLEAN[name], private=True) == []


def test_private_values_that_were_never_set_are_no_numbers() -> None:
    snippet = Snippet(TID + "float a[4];\nfor (int i = 0; i < int(x[3]); i++) a[i] = x[i];\no[t] = a[t % 4];")
    values = results(snippet)
    assert [value != value for value in values[:4]] == [False, False, False, True]
