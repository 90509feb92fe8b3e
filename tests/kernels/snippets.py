"""Small kernels for the tests of the harness: a body, run on one input `x` and one output `o`."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from dflash_mlx.kernels.launch import Launch, parse_kernels, run
from metal.cpu import CpuDevice, Fault, KernelFault

HERE = "/*here*/"  # marks the line that a report must name


@dataclass(frozen=True)
class Snippet:
    """A kernel body with how it is launched.

    Attributes:
        body: statements; `x` is 64 values, `o` 64 results.
        helpers: functions before the kernel.
        threads, group: of the grid, and of a threadgroup.
    """

    body: str
    helpers: str = ""
    threads: int = 64
    group: int = 64

    @property
    def text(self) -> str:
        return f"// ==== helpers\n{self.helpers}\n// ==== kernel snippet(x) -> o\n{self.body}\n"

    @property
    def here(self) -> str:
        """The place of the mark."""
        lines = self.text.splitlines()
        return f"snippet.metal:{next(i for i, line in enumerate(lines, start=1) if HERE in line)}"

    def launch(self, dtype: mx.Dtype = mx.float32, init_value: float | None = None) -> Launch:
        kernel = parse_kernels("snippet.metal", self.text)["snippet"]
        x = mx.arange(64).astype(dtype)
        size = ((self.threads, 1, 1), (self.group, 1, 1))
        return Launch(kernel, (x,), (("T", dtype),), *size, (((64,), dtype),), init_value)


def results(snippet: Snippet, dtype: mx.Dtype = mx.float32, **options: object) -> list[float]:
    """Run a snippet and give its output."""
    [output] = run(CpuDevice(**options), snippet.launch(dtype))  # type: ignore[arg-type]
    return output.astype(mx.float32).tolist()


def faults(snippet: Snippet, init_value: float | None = None, **options: object) -> list[Fault]:
    """Run a snippet and give what was found."""
    try:
        run(CpuDevice(**options), snippet.launch(init_value=init_value))  # type: ignore[arg-type]
    except KernelFault as error:
        return error.faults
    return []
