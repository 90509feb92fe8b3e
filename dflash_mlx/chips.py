"""Apple's chips: memory bandwidth and arithmetic, read from `bench/chips.toml`, which names the source of each row."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from .resources import find
from .toml_files import read_toml

GIGA, TERA = 10**9, 10**12


@dataclass(frozen=True)
class Chip:
    """A row of the table, in the table's own units.

    Attributes:
        gpu_cores: the counts that are sold with this bandwidth, increasing.
        bandwidth_gb_s: 10^9 bytes per second.
        memory_gb: sizes that are sold.
        fp32_tflops: of the largest count of cores, without matrix units.
        approximate: the TFLOPS were worked out, not stated by Apple.
    """

    name: str
    generation: int
    gpu_cores: tuple[int, ...]
    bandwidth_gb_s: float
    memory_gb: tuple[int, ...]
    fp32_tflops: float
    approximate: bool
    neural_accelerators: bool
    source: str
    tflops_source: str

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return self.bandwidth_gb_s * GIGA

    @property
    def flops(self) -> float:
        """Floating-point operations per second."""
        return self.fp32_tflops * TERA


@cache
def chips() -> tuple[Chip, ...]:
    """All rows, oldest family first."""
    rows = read_toml(find("bench/chips.toml"))["chip"]
    lists = ("gpu_cores", "memory_gb")
    return tuple(Chip(**row | {name: tuple(row[name]) for name in lists}) for row in rows)


def find_chip(name: str, gpu_cores: int | None = None) -> Chip | None:
    """The chip of this name, with or without "Apple"; `None` where the table has none.

    Where a name has several bandwidths the count of cores decides, and without it the larger.
    """
    rows = [chip for chip in chips() if chip.name == name.removeprefix("Apple").strip()]
    fitting = [chip for chip in rows if gpu_cores in chip.gpu_cores]
    return max(fitting or rows, key=lambda chip: chip.bandwidth_gb_s, default=None)
