"""Compiles kernels and the runtime: the builds of a kernel, and the audit of what the checker cannot see.

typecheck: the front end alone, with address spaces as types of their own.
fast: optimised, raw pointers.
checked: every access calls the checker, private variables start as a pattern that is not a number.
private: the use of a private value that was never set is reported.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from .compiler import Compiler, cache_folder, find_compiler
from .report import CompileError

HERE = Path(__file__).resolve().parent
HEADERS = ("interface.h", "msl.h", "simdgroup.h")
RUNTIME = ("runtime.cpp", "memory.cpp", "private.cpp")
FIBER = {"x86_64": "fiber_x86_64.S", "arm64": "fiber_arm64.S", "aarch64": "fiber_arm64.S"}
MACHINE = platform.machine()
LANGUAGE = ["-x", "c++", "-std=c++17", "-I", str(HERE)]
# Frames must stay walkable, and calls of helpers apart: they are the identity of an operation. Half floats round after
# each operation, and nothing is contracted to a fused multiply-add that the text does not write.
COMMON = [
    *("-fno-exceptions", "-fno-rtti", "-fno-omit-frame-pointer", "-fno-optimize-sibling-calls", "-fPIC"),
    *("-Xclang", "-fconvergent-functions"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-strict-aliasing", "-fwrapv"),
    *("-Wall", "-Wno-unknown-attributes", "-Wno-unknown-pragmas"),
    *("-Wno-unused-variable", "-Wno-unused-function", "-Wno-unused-const-variable"),
]
X86_ROUNDING = [*("-Xclang", "-ffloat16-excess-precision=none"), *("-Xclang", "-fbfloat16-excess-precision=none")]
UNDEFINED = "array-bounds,shift-base,shift-exponent,integer-divide-by-zero,float-cast-overflow"
BUILDS = {
    "typecheck": [
        "-DMSL_TYPECHECK",
        *("-Werror=return-type", "-Werror=vla-extension"),
        *("-Werror=uninitialized", "-Werror=sometimes-uninitialized", "-Werror=conditional-uninitialized"),
    ],
    "fast": ["-O2"],
    "checked": [
        *("-O1", "-gline-tables-only", "-gdwarf-4", "-fno-vectorize", "-fno-slp-vectorize"),
        # Given to the compiler proper: zig's driver takes "thread" and drops the others without a word.
        *("-fsanitize=thread", "-Xclang", f"-fsanitize={UNDEFINED}", "-Xclang", f"-fsanitize-recover={UNDEFINED}"),
        *("-Xclang", "-fsanitize-minimal-runtime"),
        *("-mllvm", "-tsan-instrument-func-entry-exit=0", "-mllvm", "-tsan-instrument-read-before-write=1"),
        "-ftrivial-auto-var-init=pattern",
    ],
    "private": [
        *("-DMSL_PRIVATE", "-O1", "-gline-tables-only", "-gdwarf-4", "-fno-vectorize", "-fno-slp-vectorize"),
        "-fsanitize=kernel-memory",
    ],
}
# Kernel-address mode writes the size of each access that has no function of its own into the call.
AUDIT = [
    *("-O1", "-fno-vectorize", "-fno-slp-vectorize", "-fsanitize=kernel-address"),
    *("-mllvm", "-asan-instrumentation-with-call-threshold=0", "-mllvm", "-asan-stack=0", "-mllvm", "-asan-globals=0"),
]
SIZED = re.compile(r"call void @__asan_(load|store)N\w*\(i64 [^,]+, i64 ([^)]+)\)")
ATOMIC = re.compile(r"call \w+ @(__tsan_(?:atomic|volatile)\w*)")
SEEN_BYTES = 16


def processor(compiler: Compiler) -> list[str]:
    """Give the flags for the processor: one level for all machines, so that the cache can be shared."""
    if MACHINE != "x86_64":
        return []
    return [*X86_ROUNDING, "-march=x86_64_v3" if compiler.zig else "-march=x86-64-v3"]


def link(libraries: bool) -> list[str]:
    """Give the flags that make a library: the runtime, or a kernel, whose open names are found when it is loaded.

    Neither uses C++'s own library, which zig would have to build first.
    """
    if platform.system() == "Darwin":
        return ["-shared", "-nostdlib++"] if libraries else ["-shared", "-undefined", "dynamic_lookup"]
    if libraries:
        return ["-shared", "-nostdlib++", "-Wl,--no-as-needed", "-lm", "-ldl", "-lpthread"]
    return ["-shared", "-nostdlib", "-Wl,-z,undefs"]


def run(command: list[str]) -> str:
    """Run the compiler; returns its warnings.

    Raises:
        CompileError: with what it printed.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(done.stderr)
    return done.stderr


@cache
def headers_text() -> str:
    """Give the text of all that a kernel includes: a change of it makes all builds stale."""
    return "".join((HERE / name).read_text() for name in HEADERS)


def key(compiler: Compiler, text: str, flags: list[str]) -> str:
    """Name a build by everything that it depends on."""
    parts = (compiler.name, *compiler.command, *flags, headers_text(), text)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def typecheck(text: str) -> str:
    """Check a unit with the address spaces as types; returns the warnings.

    Raises:
        CompileError: the front end refuses it.
    """
    compiler = find_compiler()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "unit.cpp"
        file.write_text(text)
        wanted = ["-fsyntax-only"]
        if compiler.zig:  # it looks for an output even where only the syntax is wanted, and adds a -c of its own
            text_of_it = str(file.with_suffix(".ll"))
            wanted = ["-S", "-emit-llvm", "-o", text_of_it, "-Wno-unused-command-line-argument"]
        flags = [*LANGUAGE, *COMMON, *processor(compiler), *BUILDS["typecheck"], *wanted]
        return run([*compiler.command, *flags, str(file)])


def compiled(text: str, build: str) -> Path:
    """Give the library of a unit in one of the builds that run; compiled once and kept in the cache folder."""
    compiler = find_compiler()
    flags = [*LANGUAGE, *COMMON, *processor(compiler), *BUILDS[build]]
    library = cache_folder() / f"{key(compiler, text, flags)}.so"
    if library.exists():
        return library
    with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
        source, item, made = Path(folder) / "unit.cpp", Path(folder) / "unit.o", Path(folder) / "unit.so"
        source.write_text(text)
        run([*compiler.command, *flags, "-c", str(source), "-o", str(item)])
        run([*compiler.command, str(item), "-o", str(made), *link(libraries=False)])
        os.replace(made, library)  # other test processes see a whole file or none
    return library


def audit(text: str) -> list[str]:
    """List the accesses of a unit that the checker would not see: wider than 16 bytes, or atomic."""
    sized = SIZED.findall(assembly(text, AUDIT))
    wide = {f"{what} of {size} bytes" for what, size in sized if not size.isdigit() or int(size) > SEEN_BYTES}
    return sorted(wide | set(ATOMIC.findall(assembly(text, BUILDS["checked"]))))


def assembly(text: str, flags: list[str]) -> str:
    """Give a unit in LLVM's own assembly language."""
    compiler = find_compiler()
    with tempfile.TemporaryDirectory() as folder:
        source, item = Path(folder) / "unit.cpp", Path(folder) / "unit.ll"
        source.write_text(text)
        arguments = [*LANGUAGE, *COMMON, "-w", *processor(compiler), *flags, "-S", "-emit-llvm"]
        run([*compiler.command, *arguments, str(source), "-o", str(item)])
        return item.read_text()


def runtime_library() -> Path:
    """Give the runtime's library, compiled once per version of its files."""
    compiler = find_compiler()
    fiber = FIBER.get(MACHINE)
    if fiber is None:
        raise CompileError(f"[metal/cpu] the processor must be one of {', '.join(FIBER)} but got {MACHINE}.")
    files = [HERE / name for name in (*RUNTIME, fiber)]
    flags = ["-std=c++17", "-O2", "-g1", "-fPIC", "-fno-exceptions", "-fno-rtti"]
    flags += ["-fno-omit-frame-pointer", "-fno-optimize-sibling-calls", *processor(compiler)]
    text = "".join(file.read_text() for file in [*files, HERE / "state.h"])
    library = cache_folder() / f"runtime-{key(compiler, text, flags)}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
            items = [str(Path(folder) / f"{file.name}.o") for file in files]
            for file, item in zip(files, items, strict=True):
                run([*compiler.command, *flags, "-c", str(file), "-o", item])
            made = Path(folder) / "runtime.so"
            run([*compiler.command, *items, "-o", str(made), *link(libraries=True)])
            os.replace(made, library)
    return library
