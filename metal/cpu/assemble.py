"""Builds what MLX would build around a kernel's body: the signature, and for the processor an entry point.

The rules are MLX's (0.32): an input of fewer than 8 elements is `constant`, one without dimensions a reference, and
shapes, strides and attributes become parameters where their names occur in the body, even in a comment. A test
compares the signature with the text that MLX itself generates.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import mlx.core as mx

from dflash_mlx.kernels.launch import Launch

CONSTANT_ELEMENTS = 8
TYPES = {
    mx.float32: "float",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.int32: "int32_t",
    mx.uint32: "uint32_t",
    mx.int16: "int16_t",
    mx.uint16: "uint16_t",
    mx.int8: "int8_t",
    mx.uint8: "uint8_t",
    mx.int64: "int64_t",
    mx.uint64: "uint64_t",
    mx.bool_: "bool",
}
# Metal's names of a thread's place, the type, and what gives it here.
ATTRIBUTES = {
    "dispatch_simdgroups_per_threadgroup": ("uint", "self->full_simdgroups"),
    "dispatch_threads_per_threadgroup": ("uint3", "self->full_threads_per_group"),
    "grid_size": ("uint3", "self->threads_per_grid"),
    "simdgroup_index_in_threadgroup": ("uint", "self->simdgroup"),
    "simdgroups_per_threadgroup": ("uint", "self->simdgroups"),
    "thread_execution_width": ("uint", "32u"),
    "thread_index_in_simdgroup": ("uint", "self->lane"),
    "thread_index_in_threadgroup": ("uint", "self->index_in_group"),
    "thread_position_in_grid": ("uint3", "self->position_in_grid"),
    "thread_position_in_threadgroup": ("uint3", "self->position_in_group"),
    "threadgroup_position_in_grid": ("uint3", "self->group_in_grid"),
    "threadgroups_per_grid": ("uint3", "self->groups_per_grid"),
    "threads_per_grid": ("uint3", "self->threads_per_grid"),
    "threads_per_simdgroup": ("uint", "32u"),
    "threads_per_threadgroup": ("uint3", "self->threads_per_group"),
}
# `threadgroup T name[N];` declares storage; `threadgroup T* name` qualifies a pointer and is left alone. What this
# misses, two names in one declaration, the type check refuses.
STORAGE = re.compile(r"\bthreadgroup\s+([A-Za-z_][\w:]*(?:\s*<[^;{}()]*?>)?)\s+(\w+)\s*((?:\[[^\]]*\]\s*)*);")


@dataclass(frozen=True)
class Parameter:
    """A buffer of the signature.

    Attributes:
        name: as the kernel knows it.
        type: "const device float*", and so on.
        role: "input", "shape", "strides", "ndim" or "output".
        array: index of the input or the output that it belongs to.
    """

    name: str
    type: str
    role: str
    array: int


def buffers(launch: Launch) -> list[Parameter]:
    """List the signature's buffers, in MLX's order."""
    source, result = launch.kernel.source, []
    for index, (name, array) in enumerate(zip(launch.kernel.inputs, launch.inputs, strict=True)):
        space = "constant" if array.size < CONSTANT_ELEMENTS else "device"
        mark = "&" if array.ndim == 0 else "*"
        result.append(Parameter(name, f"const {space} {TYPES[array.dtype]}{mark}", "input", index))
        if array.ndim == 0:
            continue
        for role, kind in (("shape", "int*"), ("strides", "int64_t*"), ("ndim", "int&")):
            if f"{name}_{role}" in source:
                result.append(Parameter(f"{name}_{role}", f"const constant {kind}", role, index))
    for index, (name, (_, dtype)) in enumerate(zip(launch.kernel.outputs, launch.outputs, strict=True)):
        result.append(Parameter(name, f"device {TYPES[dtype]}*", "output", index))
    return result


def signature(launch: Launch) -> list[str]:
    """List the parameters, "type name" each, in MLX's order."""
    attributes = [f"{kind} {name}" for name, (kind, _) in ATTRIBUTES.items() if name in launch.kernel.source]
    return [f"{parameter.type} {parameter.name}" for parameter in buffers(launch)] + attributes


def template(launch: Launch) -> tuple[list[str], list[str]]:
    """List the template's parameters and their values."""
    parameters, values = [], []
    for name, value in launch.template:
        if isinstance(value, bool):
            parameters.append(f"bool {name}")
            values.append(str(value).lower())
        elif isinstance(value, int):
            parameters.append(f"int {name}")
            values.append(str(value))
        else:
            parameters.append(f"typename {name}")
            values.append(TYPES[value])
    return parameters, values


def place_storage(text: str, typecheck: bool) -> str:
    """Give `threadgroup` storage its place: static for the type check, else in the runtime's threadgroup memory."""

    def replace(match: re.Match[str]) -> str:
        kind, name, size = match.groups()
        if typecheck:
            return f"static threadgroup {kind} {name}{size};"
        lines = "\n" * match[0].count("\n")
        return (
            f"typedef {kind} {name}_storage {size}; {name}_storage& {name} = *({name}_storage*)gpu_threadgroup_memory("
            f'__COUNTER__, sizeof({name}_storage), alignof({name}_storage), "{name}");{lines}'
        )

    return STORAGE.sub(replace, text)


def unit(launch: Launch, typecheck: bool) -> str:
    """Write the file that is compiled for a launch."""
    kernel = launch.kernel
    arguments = []
    for index, parameter in enumerate(buffers(launch)):
        kind, star = parameter.type[:-1], "*" if parameter.type.endswith("&") else ""
        arguments.append(f"{star}({kind}*)buffers[{index}]")
    for name, (kind, value) in ATTRIBUTES.items():
        if name in kernel.source:
            arguments.append(f"uint3({value}[0], {value}[1], {value}[2])" if kind == "uint3" else value)
    parameters, values = template(launch)
    head = f"template <{', '.join(parameters)}>\n" if parameters else ""
    chosen = f"<{', '.join(values)}>" if values else ""
    return "\n".join(
        [
            '#include "msl.h"',
            "using namespace metal;",
            f'#line {kernel.header_line} "{kernel.file}"',
            place_storage(kernel.header, typecheck),
            f"{head}__attribute__((noinline)) void kernel_{kernel.name}({', '.join(signature(launch))}) {{",
            f'#line {kernel.source_line} "{kernel.file}"',
            place_storage(kernel.source, typecheck),
            "}",
            'extern "C" __attribute__((disable_sanitizer_instrumentation, visibility("default")))',
            "void entry(void** buffers) {",
            "  GpuThread* self = gpu_self();",
            "  (void)self;",
            f"  kernel_{kernel.name}{chosen}({', '.join(arguments)});",
            "}",
            "",
        ]
    )
