"""Finds a clang that can build the kernels, and gets one where there is none.

In this order: clang++ from the PATH, if new enough; on Debian and its relatives, as root, the package; else the clang
inside PyPI's ziglang, installed into a cache folder. Without any of them the tests fail and list what was tried.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

OLDEST_CLANG, OLDEST_APPLE_CLANG, NEWEST_CLANG = 19, 17, 30
PACKAGE = "clang-19"
ZIG = "ziglang>=0.16"
INSTALL_SECONDS = 600
# Kinds of fault that code built by zig's clang does not show: none is known. Tests report what stands here as not
# checked, and expect all others to be caught.
ZIG_BLIND: tuple[str, ...] = ()


class CompilerMissing(RuntimeError):
    """No compiler can be had here."""


@dataclass(frozen=True)
class Compiler:
    """A clang++ command.

    Attributes:
        command: how it is started.
        name: what it calls itself.
        zig: the clang inside zig, which links and names processors in its own way.
        not_checked: kinds of fault that code built by it does not show.
    """

    command: tuple[str, ...]
    name: str
    zig: bool = False
    not_checked: tuple[str, ...] = ()


_environment: dict[str, str] = dict(os.environ)
_found: list[Compiler] = []
_failed: list[str] = []


def use_environment(environment: dict[str, str]) -> None:
    """Look for compiler and cache in another environment than the process's: tests have moved the home there."""
    _environment.clear()
    _environment.update(environment)


def found() -> list[Compiler]:
    """Give the compiler if one has been looked for and found, as a list of none or one."""
    return _found


def cache_folder() -> Path:
    """Give the folder for compiled kernels and for a downloaded compiler; it is outside the tree."""
    base = _environment.get("XDG_CACHE_HOME") or Path(_environment.get("HOME", "~")).expanduser() / ".cache"
    folder = Path(base) / "dflash-mlx-metal-cpu"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@cache
def find_compiler() -> Compiler:
    """Give the compiler to use, and install one where there is none.

    Raises:
        CompilerMissing: there is none, and none could be installed.
    """
    if _failed:  # trying again for each test would take minutes and fail again
        raise CompilerMissing(_failed[0])
    tried: list[str] = []
    with open(cache_folder() / "compiler.lock", "w") as lock:  # two test processes must not install at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        for way in (from_path, from_debian, from_zig):
            compiler = way(tried)
            if compiler is not None:
                _found[:] = [compiler]
                return compiler
    _failed.append(
        f"[metal/cpu] the compiler must be clang++ {OLDEST_CLANG} or newer but none was found: {'; '.join(tried)}. "
        f"Install clang ({PACKAGE} on Debian) or let pip reach a package index."
    )
    raise CompilerMissing(_failed[0])


def from_path(tried: list[str]) -> Compiler | None:
    """Look for a new enough clang++ on the PATH."""
    names = ["clang++", *(f"clang++-{major}" for major in range(NEWEST_CLANG, OLDEST_CLANG - 1, -1))]
    for name in names:
        path = shutil.which(name, path=_environment.get("PATH"))
        if path is None:
            continue
        version = first_line([path, "--version"])
        major = re.search(r"version (\d+)", version)
        oldest = OLDEST_APPLE_CLANG if "Apple" in version else OLDEST_CLANG
        if major and int(major[1]) >= oldest:
            return Compiler((path,), version)
        tried.append(f"{path} is too old ({version or 'no version'})")
    tried.append("no new enough clang++ on the PATH")
    return None


def from_debian(tried: list[str]) -> Compiler | None:
    """Install the Debian package, where that is possible."""
    apt = shutil.which("apt-get", path=_environment.get("PATH"))
    if apt is None or os.geteuid() != 0:
        tried.append("no apt-get" if apt is None else f"not root, so {PACKAGE} cannot be installed")
        return None
    _environment["DEBIAN_FRONTEND"] = "noninteractive"
    for arguments in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", PACKAGE]):
        failure = run([apt, *arguments])
        if failure:
            tried.append(f"apt-get {arguments[0]} failed: {failure}")
            return None
    return from_path(tried)


def from_zig(tried: list[str]) -> Compiler | None:
    """Install ziglang into the cache folder, and take the clang inside it."""
    folder = cache_folder() / "zig"
    zig = folder / "ziglang" / ("zig.exe" if sys.platform == "win32" else "zig")
    if not zig.exists():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        failure = run([*pip, "--target", str(folder), ZIG])
        if failure or not zig.exists():
            tried.append(f"pip install {ZIG} failed: {failure}")
            return None
    command = (str(zig), "c++")
    return Compiler(command, first_line([*command, "--version"]), zig=True, not_checked=ZIG_BLIND)


def first_line(command: list[str]) -> str:
    """Run a command and give the first line that it prints."""
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return output.splitlines()[0].strip() if output.strip() else ""


def run(command: list[str]) -> str:
    """Run a command; returns "" or, in short, why it failed."""
    try:
        done = subprocess.run(
            command, env=_environment, capture_output=True, text=True, check=False, timeout=INSTALL_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    lines = (done.stderr or done.stdout).strip().splitlines()
    return "" if done.returncode == 0 else (lines[-1] if lines else f"exit code {done.returncode}")
