"""Launches compiled kernels: the device that stands for a Mac's GPU in the tests."""

from __future__ import annotations

import ctypes
from functools import cache

import mlx.core as mx
import numpy as np

from dflash_mlx.kernels.launch import Launch

from .assemble import Parameter, buffers, unit
from .build import compiled, runtime_library
from .report import KINDS, Counts, Fault, KernelFault, Places, name_buffers

# These mirror state.h.
MAX_BUFFERS, MAX_THREADS, MESSAGE_BYTES = 64, 1024, 240
THREADGROUP_LIMIT = 32 * 1024
BUILD_NUMBERS = ("fast", "checked", "private")
BITS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
PLAIN_COUNTS = (
    *("threadgroup_bytes", "threadgroup_read", "threadgroup_written", "barriers", "simdgroup_barriers"),
    *("simd_operations", "groups"),
)


class _Description(ctypes.Structure):
    _fields_ = [
        ("entry", ctypes.c_void_p),
        ("buffers", ctypes.c_int32),
        ("build", ctypes.c_int32),
        ("base", ctypes.c_uint64 * MAX_BUFFERS),
        ("size", ctypes.c_uint64 * MAX_BUFFERS),
        ("writable", ctypes.c_int32 * MAX_BUFFERS),
        ("filled", ctypes.c_int32 * MAX_BUFFERS),
        ("grid", ctypes.c_uint32 * 3),
        ("threadgroup", ctypes.c_uint32 * 3),
        ("threadgroup_limit", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("cpu_seconds", ctypes.c_uint32),
    ]


class _Counts(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint64 * MAX_BUFFERS) for name in ("read", "written", "unique", "per_group")),
        *((name, ctypes.c_uint64) for name in PLAIN_COUNTS),
        ("reports", ctypes.c_int32),
    ]


class _Report(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int32),
        ("group", ctypes.c_uint32),
        ("thread", ctypes.c_uint32),
        ("pc", ctypes.c_uint64),
        ("other_pc", ctypes.c_uint64),
        ("message", ctypes.c_char * MESSAGE_BYTES),
    ]


class _Symbol(ctypes.Structure):  # Dl_info
    _fields_ = [(name, ctypes.c_void_p) for name in ("file", "base", "name", "address")]


@cache
def runtime() -> ctypes.CDLL:
    """Load the runtime; kernels that are loaded later find its functions."""
    library = ctypes.CDLL(str(runtime_library()), mode=ctypes.RTLD_GLOBAL)
    library.gpu_buffer.restype = ctypes.c_void_p
    library.gpu_buffer.argtypes = [ctypes.c_int, ctypes.c_size_t]
    library.gpu_launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.gpu_report.restype = ctypes.POINTER(_Report)
    return library


@cache
def loaded(path: str) -> tuple[ctypes.CDLL, int, Places]:
    """Load a kernel: the library, its entry, and what finds lines in it."""
    runtime()
    library = ctypes.CDLL(path)
    entry = ctypes.cast(library.entry, ctypes.c_void_p).value or 0
    symbol = _Symbol()
    ctypes.CDLL(None).dladdr(ctypes.c_void_p(entry), ctypes.byref(symbol))
    return library, entry, Places(path, symbol.base or 0)


def to_bytes(array: mx.array) -> np.ndarray:
    """Give the bits of an array, row-contiguous."""
    return np.ascontiguousarray(np.array(array.view(BITS[array.dtype.size])))


class CpuDevice:
    """Runs launches on the processor.

    Args:
        checked: with the checks of memory and divergence (slow), or fast.
        private: instead, with the check for private values that were never set.
        seed: of the order in which threads run; 0 is in turn. Results must not depend on it.
        threadgroup_limit: bytes of threadgroup memory that a threadgroup may have.
        cpu_seconds: processor time after which a launch counts as endless.
    Attributes:
        counts: one entry per launch, in order.
    """

    def __init__(
        self,
        checked: bool = True,
        seed: int = 0,
        threadgroup_limit: int = THREADGROUP_LIMIT,
        cpu_seconds: int = 60,
        private: bool = False,
    ):
        self.build, self.seed = "private" if private else "checked" if checked else "fast", seed
        self.threadgroup_limit, self.cpu_seconds = threadgroup_limit, cpu_seconds
        self.counts: list[Counts] = []

    def run(self, launch: Launch) -> list[mx.array]:
        """Run a launch and give its outputs.

        Raises:
            CompileError: the kernel does not compile.
            KernelFault: the checks found something.
        """
        library = compiled(unit(launch, typecheck=False), self.build)
        _, entry, places = loaded(str(library))
        parameters = buffers(launch)
        outputs = [np.full(shape, 0xFF, np.uint8).repeat(dtype.size, -1) for shape, dtype in launch.outputs]
        if launch.init_value is not None:
            outputs = [to_bytes(mx.full(shape, launch.init_value, dtype)) for shape, dtype in launch.outputs]
        description, addresses = self._describe(launch, parameters, entry, outputs)
        counts = _Counts()
        runtime().gpu_launch(ctypes.byref(description), ctypes.byref(counts))
        for parameter, address in zip(parameters, addresses, strict=True):
            if parameter.role == "output":
                output = outputs[parameter.array]
                ctypes.memmove(output.ctypes.data, address, output.nbytes)
        names = [parameter.name for parameter in parameters]
        self.counts.append(_counts(launch, counts, names))
        faults = [_fault(launch, runtime().gpu_report(i).contents, places, names) for i in range(counts.reports)]
        if faults:
            raise KernelFault(faults)
        return [
            mx.array(np.frombuffer(output.tobytes(), f"u{dtype.size}")).view(dtype).reshape(shape)
            for output, (shape, dtype) in zip(outputs, launch.outputs, strict=True)
        ]

    def _describe(
        self, launch: Launch, parameters: list[Parameter], entry: int, outputs: list[np.ndarray]
    ) -> tuple[_Description, list[int]]:
        """Fill in the description of a launch, and copy the buffers to where the runtime keeps them."""
        description, addresses = _Description(), []
        for index, parameter in enumerate(parameters):
            data = _contents(launch, parameter, outputs)
            address = runtime().gpu_buffer(index, data.nbytes)
            ctypes.memmove(address, data.ctypes.data, data.nbytes)
            addresses.append(address)
            description.base[index], description.size[index] = address, data.nbytes
            description.writable[index] = parameter.role == "output"
            description.filled[index] = launch.init_value is not None
        description.entry, description.buffers = entry, len(parameters)
        description.build = BUILD_NUMBERS.index(self.build)
        description.grid[:], description.threadgroup[:] = launch.grid, launch.threadgroup
        description.threadgroup_limit, description.seed = self.threadgroup_limit, self.seed
        description.cpu_seconds = self.cpu_seconds
        return description, addresses


def _contents(launch: Launch, parameter: Parameter, outputs: list[np.ndarray]) -> np.ndarray:
    """Give the bytes of one buffer before the launch."""
    if parameter.role == "output":
        return outputs[parameter.array]
    array = launch.inputs[parameter.array]
    if parameter.role == "input":
        return to_bytes(array)
    if parameter.role == "shape":
        return np.array(array.shape, np.int32)
    if parameter.role == "ndim":
        return np.array(array.ndim, np.int32)
    return np.array([int(np.prod(array.shape[axis + 1 :])) for axis in range(array.ndim)], np.int64)


def _fault(launch: Launch, report: _Report, places: Places, names: list[str]) -> Fault:
    """Translate a report of the runtime."""
    text = name_buffers(report.message.decode(), names)
    if "{other}" in text:
        text = text.replace("{other}", places.line_of(report.other_pc) or "another operation")
    place = places.line_of(report.pc)
    return Fault(KINDS[report.kind], launch.kernel.name, place, report.group, report.thread, text)


def _counts(launch: Launch, counts: _Counts, names: list[str]) -> Counts:
    """Translate the counts of the runtime."""
    per_buffer = {
        field: dict(zip(names, getattr(counts, field), strict=False))
        for field in ("read", "unique", "per_group", "written")
    }
    return Counts(launch.kernel.name, *(getattr(counts, name) for name in PLAIN_COUNTS), **per_buffer)
