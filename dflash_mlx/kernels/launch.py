"""Finds the kernels in metal/, and launches them on a device; the only caller of `mx.fast.metal_kernel`.

A `.metal` file starts with a header for the reader, then has sections, each opened by one line:

    // ==== helpers
    // ==== kernel name(input, input) -> output, output

The helpers go before each kernel of the file, and a kernel's section is the body that MLX puts a signature around.
On a Mac the device is `METAL`; in the tests it is the harness in metal/cpu, which gets the same text.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import mlx.core as mx

from ..errors import DFlashError, must
from ..resources import find

MAX_THREADS = 1024  # of a threadgroup, on any Mac; a pipeline's own limit may be lower and shows at evaluation
SECTION = re.compile(r"^// ==== (?:(helpers)|kernel (\w+)\(([\w, ]*)\) -> ([\w, ]+))$")
Size = tuple[int, int, int]


def dtype_name(dtype: mx.Dtype) -> str:
    """Such as "bfloat16"."""
    return str(dtype).rpartition(".")[2]


@dataclass(frozen=True)
class Kernel:
    """One kernel of a `.metal` file, as `mx.fast.metal_kernel` takes it.

    Attributes:
        name: unique among all files.
        file: the file's name.
        inputs, outputs: parameter names in order.
        header: the helpers, with a newline at the end (MLX puts the kernel right after it).
        source: the body.
        header_line, source_line: where they start in the file, from 1.
    """

    name: str
    file: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    header: str
    source: str
    header_line: int
    source_line: int


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    Attributes:
        inputs: one array per input name; MLX copies those that are not row-contiguous.
        template: names and values: a dtype, an int or a bool. Each combination is a pipeline of its own.
        grid: threads, all of them.
        threadgroup: threads of one threadgroup.
        outputs: shape and dtype per output name.
        init_value: what outputs are filled with before, or None: they start undefined.
    """

    kernel: Kernel
    inputs: tuple[mx.array, ...]
    template: tuple[tuple[str, mx.Dtype | int | bool], ...]
    grid: Size
    threadgroup: Size
    outputs: tuple[tuple[tuple[int, ...], mx.Dtype], ...]
    init_value: float | None = None


class Device(Protocol):
    """What can run a launch."""

    def run(self, launch: Launch) -> list[mx.array]:
        """Run it and give its outputs; they may be lazy."""
        ...


@cache
def read_kernels(file: str) -> dict[str, Kernel]:
    """Read the kernels of a file in metal/, by name.

    Raises:
        DFlashError: the file is missing, or has no kernel section.
    """
    return parse_kernels(file, (find("metal") / file).read_text(encoding="utf-8"))


def parse_kernels(file: str, text: str) -> dict[str, Kernel]:
    """Split the text of a `.metal` file into its kernels, by name."""
    lines = text.splitlines()
    opened = [(number, match) for number, line in enumerate(lines, start=1) if (match := SECTION.match(line))]
    ends = [number - 1 for number, _ in opened[1:]] + [len(lines)]
    header, header_line, kernels = "", 1, {}
    for (number, match), end in zip(opened, ends, strict=False):  # a file without sections has an end all the same
        body = "\n".join(lines[number:end]) + "\n"
        if match[1]:
            header, header_line = body, number + 1
            continue
        inputs, outputs = (tuple(re.findall(r"\w+", names)) for names in (match[3], match[4]))
        kernels[match[2]] = Kernel(match[2], file, inputs, outputs, header, body, header_line, number + 1)
    if not kernels:
        raise DFlashError(must("kernels", Path(file).name, "a file with kernel sections", "none", "Install again."))
    return kernels


def check(launch: Launch) -> None:
    """Refuse a launch that does not fit its kernel.

    Raises:
        DFlashError: with the kernel's name and the number that is wrong.
    """
    kernel = launch.kernel
    for what, names, given in (("inputs", kernel.inputs, launch.inputs), ("outputs", kernel.outputs, launch.outputs)):
        if len(names) != len(given):
            raise DFlashError(must(kernel.name, what, f"{len(names)} ({', '.join(names)})", len(given), "Pass each."))
    threads = launch.threadgroup[0] * launch.threadgroup[1] * launch.threadgroup[2]
    if not 0 < threads <= MAX_THREADS:
        todo = "Use fewer simdgroups."
        raise DFlashError(must(kernel.name, "threads per threadgroup", f"between 1 and {MAX_THREADS}", threads, todo))
    if min(launch.grid) < 1:
        raise DFlashError(must(kernel.name, "the grid", "at least 1 in each direction", launch.grid, "Check shapes."))


def run(device: Device, launch: Launch) -> list[mx.array]:
    """Check a launch and run it on a device.

    Raises:
        DFlashError: the launch does not fit its kernel.
    """
    check(launch)
    return device.run(launch)


class MetalDevice:
    """A Mac's GPU. Pipelines are made once per kernel and template; nothing here waits for the GPU."""

    clock = staticmethod(time.perf_counter)  # what its trials are timed with

    def __init__(self) -> None:
        self._made: dict[Kernel, object] = {}

    def run(self, launch: Launch) -> list[mx.array]:
        """Add the launch to MLX's graph."""
        kernel = launch.kernel
        if kernel not in self._made:
            self._made[kernel] = mx.fast.metal_kernel(
                name=kernel.name,
                input_names=kernel.inputs,
                output_names=kernel.outputs,
                source=kernel.source,
                header=kernel.header,
                compile_options={"math_mode": "safe"},  # exp2(-inf) is 0
            )
        return self._made[kernel](  # type: ignore[operator]
            inputs=launch.inputs,
            template=launch.template,
            grid=launch.grid,
            threadgroup=launch.threadgroup,
            output_shapes=[shape for shape, _ in launch.outputs],
            output_dtypes=[dtype for _, dtype in launch.outputs],
            init_value=launch.init_value,
        )


METAL = MetalDevice()
