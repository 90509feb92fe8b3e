"""Runs the shipped `.metal` files on the processor: the text that a Mac's compiler gets, with every access checked.

`CpuDevice` stands where `dflash_mlx.kernels.launch.MetalDevice` stands on a Mac. docs/kernels.md says what it proves.
"""

from .compiler import Compiler, CompilerMissing, find_compiler
from .device import CpuDevice
from .report import CompileError, Counts, Fault, KernelFault

__all__ = [
    "CompileError",
    "Compiler",
    "CompilerMissing",
    "Counts",
    "CpuDevice",
    "Fault",
    "KernelFault",
    "find_compiler",
]
