"""What a launch tells: faults with kernel, file, line and thread, and counts of bytes and operations."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass, field

# In the order of `Kind` in state.h.
KINDS = {
    1: "out of bounds",
    2: "race",
    3: "uninitialised read",
    4: "barrier diverges",
    5: "simdgroup operation diverges",
    6: "threadgroup memory",
    7: "write to an input",
    8: "bad lane",
    9: "undefined",
    10: "endless",
    11: "never written",
}
RESOLVERS = ("addr2line", "llvm-addr2line", "llvm-addr2line-19")


class CompileError(Exception):
    """The compiler refused a kernel; the text is the compiler's."""


@dataclass(frozen=True)
class Fault:
    """One thing that a kernel did wrong.

    Attributes:
        kind: one of `KINDS`.
        kernel: the kernel's name.
        place: "file.metal:line", or "" where the fault belongs to no line.
        group: index of the threadgroup, x first.
        thread: index of the thread in it.
        text: what happened.
    """

    kind: str
    kernel: str
    place: str
    group: int
    thread: int
    text: str

    def __str__(self) -> str:
        where = f"{self.kernel} at {self.place}" if self.place else self.kernel
        return f"{self.kind} in {where}, threadgroup {self.group}, thread {self.thread}: {self.text}"


class KernelFault(Exception):
    """A launch had faults.

    Attributes:
        faults: all of them, one per place.
    """

    def __init__(self, faults: list[Fault]):
        super().__init__("\n".join(str(fault) for fault in faults))
        self.faults = faults


@dataclass(frozen=True)
class Counts:
    """What one launch did. Bytes are counted per buffer name, by a checked build only.

    Attributes:
        read: bytes as the lanes asked for them.
        unique: distinct bytes that were read.
        per_group: distinct bytes per threadgroup, summed over threadgroups; what a cache that holds one
            threadgroup's reads would fetch.
        written: bytes as the lanes wrote them.
        threadgroup_bytes: threadgroup memory of one threadgroup.
        threadgroup_read, threadgroup_written: bytes to and from it.
        barriers: threadgroup barriers, counted per thread; so are the next two.
        simdgroup_barriers: simdgroup barriers.
        simd_operations: reductions, shuffles and matrix operations.
        groups: threadgroups.
    """

    kernel: str
    threadgroup_bytes: int
    threadgroup_read: int
    threadgroup_written: int
    barriers: int
    simdgroup_barriers: int
    simd_operations: int
    groups: int
    read: dict[str, int] = field(default_factory=dict)
    unique: dict[str, int] = field(default_factory=dict)
    per_group: dict[str, int] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)


class Places:
    """Turns addresses in a compiled kernel into file and line."""

    def __init__(self, library: str, base: int):
        self.library, self.base = library, base

    def line_of(self, address: int) -> str:
        """Give "file:line" of the call before a return address, or "" where there is none."""
        resolver = next((path for name in RESOLVERS if (path := shutil.which(name))), None)
        if not address or resolver is None:
            return ""
        command = [resolver, "-e", self.library, hex(address - self.base - 1)]
        output = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        match = re.search(r"([^/\\]+:\d+)(?: |$)", output)
        return match[1] if match else ""


def name_buffers(text: str, names: list[str]) -> str:
    """Replace the numbers of buffers by their names."""
    return re.sub(r"'?buffer#(\d+)'?", lambda match: f"'{names[int(match[1])]}'", text)
