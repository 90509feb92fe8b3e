"""The launcher refuses what does not fit a kernel, and is the only way to one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from snippets import Snippet

from dflash_mlx.errors import DFlashError
from dflash_mlx.kernels import launch as launcher
from dflash_mlx.kernels.launch import parse_kernels, read_kernels, run
from dflash_mlx.resources import find
from metal.cpu import CpuDevice

pytestmark = pytest.mark.kernels

ROOT = Path(__file__).resolve().parents[2]
GOOD = Snippet("o[thread_index_in_threadgroup] = x[0];").launch()
REFUSED = {
    "an input too few": (
        replace(GOOD, inputs=()),
        "[snippet] inputs must be 1 (x) but got 0. Pass each.",
    ),
    "an output too many": (
        replace(GOOD, outputs=GOOD.outputs * 2),
        "[snippet] outputs must be 1 (o) but got 2. Pass each.",
    ),
    "too many threads": (
        replace(GOOD, threadgroup=(32, 33, 1)),
        "[snippet] threads per threadgroup must be between 1 and 1024 but got 1056. Use fewer simdgroups.",
    ),
    "an empty grid": (
        replace(GOOD, grid=(32, 0, 1)),
        "[snippet] the grid must be at least 1 in each direction but got (32, 0, 1). Check shapes.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_launch_is_refused(name: str) -> None:
    launch, message = REFUSED[name]
    with pytest.raises(DFlashError) as caught:
        run(CpuDevice(), launch)
    assert str(caught.value) == message


def test_file_without_kernels_is_refused() -> None:
    with pytest.raises(DFlashError) as caught:
        parse_kernels("empty.metal", "// only words\n")
    assert str(caught.value).startswith("[kernels] empty.metal must be a file with kernel sections but got none.")


def test_sections_keep_their_text_and_lines() -> None:
    lines = (find("metal") / "block_attention.metal").read_text().splitlines()
    for kernel in read_kernels("block_attention.metal").values():
        body = kernel.source.splitlines()
        assert lines[kernel.source_line - 1 : kernel.source_line - 1 + len(body)] == body
        assert not any("====" in line for line in body)


def test_helpers_go_before_each_kernel_and_end_a_line() -> None:
    helpers, one = "// ==== helpers\nint one() { return 1; }\n", "// ==== kernel a(x) -> o\no[0] = 1;\n"
    text = helpers + one + "// ==== kernel b(x, y) -> o, p\np[0] = 2;\n"
    kernels = parse_kernels("two.metal", text)
    assert {kernel.header for kernel in kernels.values()} == {"int one() { return 1; }\n"}
    assert kernels["b"].inputs == ("x", "y")
    assert kernels["b"].outputs == ("o", "p")
    assert (kernels["a"].source, kernels["b"].source) == ("o[0] = 1;\n", "p[0] = 2;\n")


def test_only_the_launcher_makes_kernels() -> None:
    callers = [path for path in (ROOT / "dflash_mlx").rglob("*.py") if "metal_kernel(" in path.read_text()]
    assert callers == [Path(launcher.__file__)]


def test_names_of_kernels_are_unique_among_all_files() -> None:
    names = [name for file in find("metal").glob("*.metal") for name in read_kernels(file.name)]
    assert len(names) == len(set(names)) >= 2
