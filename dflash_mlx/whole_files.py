"""Writes text files whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from .errors import DFlashError, must


def write_whole(path: Path, text: str) -> None:
    """Write a file beside its place, then rename it; what is no plain file (a pipe, /dev/stdout) is written straight.

    Raises:
        DFlashError: the system refuses; a file of that name is as it was.
    """
    try:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            path.write_text(text, encoding="utf-8")
        else:
            replace_whole(path, text)
    except OSError as error:
        todo = "Check the folder, its permissions and the room on the disk."
        found = error.strerror or str(error)
        raise DFlashError(must("write", str(path), "a file that can be written", found, todo)) from error


def replace_whole(path: Path, text: str) -> None:
    """Put a plain file in a path's place, all of it at once.

    It is written in a folder of its own: two runs do not meet there, and the file gets its usual permissions.

    Raises:
        OSError: the system refuses; a file of that name is as it was.
    """
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.", suffix=".part") as folder:
        beside = Path(folder) / path.name
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)


def update_whole(path: Path, changed: Callable[[], str]) -> None:
    """Put `changed()`, which reads the old file, in a path's place; other processes that update it wait meanwhile.

    The folder is made where there is none, and is what is locked: no file is left behind. Where the file system knows
    no locks, the file is still whole, but of two updates at once one may be lost.

    Raises:
        OSError: the system refuses; a file of that name is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_EX)
        replace_whole(path, changed())
    finally:
        os.close(folder)  # which lets go of the lock
