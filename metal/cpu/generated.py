"""The Metal text that MLX itself generates for a launch, on a machine without Metal.

A kernel that is called outside of tracing raises without Metal. While MLX exports a function it records the call
instead, and the exported file holds the whole source as a string with its length before it.
"""

from __future__ import annotations

import re
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from dflash_mlx.kernels.launch import METAL, Launch, check

from .assemble import place_storage
from .build import typecheck

SIGNATURE = re.compile(rb"\[\[kernel\]\] void (custom_kernel_\w+)\(")
INSTANCE = re.compile(r'template \[\[host_name\("[^"]*"\)\]\] \[\[kernel\]\] decltype\((.*)\) .*;')
LONGEST = 1 << 20


@dataclass(frozen=True)
class Generated:
    """A kernel as MLX writes it."""

    name: str
    text: str

    def parameters(self) -> list[str]:
        """List the signature's parameters, "type name" each."""
        match = re.search(rf"void {self.name}\((.*?)\) {{", self.text, re.DOTALL)
        assert match is not None
        plain = re.sub(r"\[\[.*?\]\]", "", match[1])
        return [" ".join(parameter.split()) for parameter in plain.split(",")]

    def typecheck(self) -> str:
        """Check the text with the address spaces as types; returns the warnings.

        Raises:
            CompileError: the front end refuses it.
        """
        body = INSTANCE.sub(r"template decltype(\1) \1;", place_storage(self.text, typecheck=True))
        return typecheck(f'#include "msl.h"\nusing namespace metal;\n#line 1 "{self.name}.generated"\n{body}\n')


def generate(launch: Launch) -> Generated:
    """Give the text that MLX generates for a launch; it is made through the launcher that a Mac uses."""
    check(launch)

    def call(*inputs: mx.array) -> list[mx.array]:
        traced = Launch(**{**vars(launch), "inputs": inputs})
        return METAL.run(traced)

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "launch.mlxfn"
        mx.export_function(str(file), call, *launch.inputs)
        [found] = _texts(file.read_bytes())
    return found


def _texts(exported: bytes) -> Iterator[Generated]:
    """Find the kernels' sources in an exported file."""
    for match in SIGNATURE.finditer(exported):
        for start in range(match.start(), max(8, match.start() - LONGEST), -1):
            (length,) = struct.unpack_from("<Q", exported, start - 8)
            text = exported[start : start + length]
            if match.end() - start < length < LONGEST and len(text) == length and b"\0" not in text:
                yield Generated(match[1].decode(), text.decode())
                break
