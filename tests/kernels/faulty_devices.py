"""Devices that qualification has to judge: the harness as it is, and the harness with one fault each.

They are looked up by name, also from the process in which kernels are qualified.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace

import mlx.core as mx

from dflash_mlx.kernels.launch import Launch
from metal.cpu import CpuDevice

RESULTS = {"block_attention_merge", "fusion_norm", "fusion_keys_values"}  # launches whose output a caller gets


class Harness(CpuDevice):
    """The harness without its checks, and with a clock of its own making: a launch takes a millisecond, and a chain of
    stock operations a second.

    Attributes:
        pipelines: what a Mac would have compiled: kernel and template.
    """

    def __init__(self) -> None:
        super().__init__(checked=False)
        self.pipelines: set[tuple[str, str]] = set()
        self._now, self._spent, self._reads = 0.0, 0.0, 0

    def clock(self) -> float:
        """Trials read it twice, before and after they evaluate a chain that was built just before."""
        self._reads += 1
        if self._reads % 2 == 0:
            self._now += self._spent or 1.0
            self._spent = 0.0
        return self._now

    def cost(self, launch: Launch) -> float:
        """Seconds of a launch."""
        return 1e-3

    def run(self, launch: Launch) -> list[mx.array]:
        self.pipelines.add((launch.kernel.name, str(launch.template)))
        self._spent += self.cost(launch)
        outputs = super().run(launch)
        return [self.spoil(launch, out) for out in outputs] if launch.kernel.name in RESULTS else outputs

    def spoil(self, launch: Launch, output: mx.array) -> mx.array:
        """What the fault makes of a result."""
        return output


class WrongRow(Harness):
    """The first row of each result is wrong."""

    def spoil(self, launch: Launch, output: mx.array) -> mx.array:
        first = (mx.arange(output.shape[-2]) == 0)[:, None]
        return mx.where(first, output + 0.5, output)


class WrongBeyond8(Harness):
    """Right up to 8 rows; in larger calls the last row is stale."""

    def spoil(self, launch: Launch, output: mx.array) -> mx.array:
        rows = output.shape[-2]
        last = (mx.arange(rows) == rows - 1)[:, None]
        return mx.where(last, output[..., :1, :], output) if rows > 8 else output


class NotANumber(Harness):
    """One NaN, in large calls."""

    def spoil(self, launch: Launch, output: mx.array) -> mx.array:
        return mx.where(mx.arange(output.shape[-1]) == 3, float("nan"), output) if output.shape[-2] > 4 else output


class Slow(Harness):
    """Right, and slow."""

    def cost(self, launch: Launch) -> float:
        return 10.0


class SlowForFewRows(Harness):
    """Right, and slow below 4 rows."""

    def cost(self, launch: Launch) -> float:
        [(shape, _)] = launch.outputs if launch.kernel.name in RESULTS else [((4, 4), None)]
        return 10.0 if shape[-2] < 4 else 1e-3


class Refuses(Harness):
    """Refuses when the result is evaluated, as a pipeline with too few threads does."""

    def spoil(self, launch: Launch, output: mx.array) -> mx.array:
        half = mx.ones((1, 32, 32), mx.float16)
        refused = mx.gather_mm(half, half, mx.array([0]), mx.array([0]))  # MLX's CPU has it for float32 alone
        return output + refused[0, 0, 0].astype(output.dtype)


class DoesNotCompile(Harness):
    """The kernel's text has a fault."""

    def run(self, launch: Launch) -> list[mx.array]:
        kernel = replace(launch.kernel, source=launch.kernel.source + "\nint broken = nowhere;\n")
        return super().run(replace(launch, kernel=kernel))


class Hangs(Harness):
    """Never comes back."""

    def run(self, launch: Launch) -> list[mx.array]:
        while True:
            time.sleep(3600)


class Dies(Harness):
    """Takes its process along, as a driver may."""

    def run(self, launch: Launch) -> list[mx.array]:
        print("the driver gave up", file=sys.stderr, flush=True)
        os._exit(7)


class DiesLater(Harness):
    """Dies at the drafter's fusion; attention before it is right."""

    def run(self, launch: Launch) -> list[mx.array]:
        if launch.kernel.name.startswith("fusion"):
            os._exit(9)
        return super().run(launch)


HARNESS, HANGS, DIES, DIES_LATER, WRONG_ROW = Harness(), Hangs(), Dies(), DiesLater(), WrongRow()
