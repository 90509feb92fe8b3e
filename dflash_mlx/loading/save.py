"""Writes a checkpoint folder that is complete or absent: filled beside its place, then renamed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx

from ..errors import DFlashError, InputError, must
from .files import INDEX

SHARD_BYTES = 4_000_000_000  # of a file, and so of the memory that writing takes
CARRIED = ("tokenizer*", "*.jinja", "*.tiktoken", "*.txt", "*.json")  # what a source folder hands on
REWRITTEN = ("config.json", INDEX)


@contextmanager
def complete_or_absent(folder: Path) -> Iterator[Path]:
    """A folder to fill; it takes the name `folder` where the block ends well, and is removed where it does not.

    Raises:
        InputError: there is a file or a folder with something in it already.
        DFlashError: the system refuses to write there.
    """
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        found = "a file" if folder.is_file() else "a folder with files in it"
        todo = "Give another name, or remove what is there."
        raise InputError(must("convert", str(folder), "a name that is free", found, todo))
    beside = folder.absolute().parent / f".{folder.name}.{os.getpid()}.part"
    try:
        beside.mkdir(parents=True)
        yield beside
        for path in beside.iterdir():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
        beside.rename(folder)  # an empty folder of that name is replaced
    except OSError as error:
        todo = "Check the disk and who may write there; nothing was left."
        raise DFlashError(must("convert", str(folder), "writable", f"an error ({error})", todo)) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def write_tensors(folder: Path, tensors: dict[str, mx.array], progress: Callable[[int, int], None]) -> None:
    """Evaluate and write tensors, one file after the other; `tensors` is emptied on the way.

    Args:
        folder: where model.safetensors goes, or several files with their index.
        tensors: name -> array; lazy ones are made one by one, so that a file's worth is in memory at most.
        progress: called with the bytes done and all bytes, once before the first tensor and after each.
    """
    total, done = sum(array.nbytes for array in tensors.values()), 0
    parts = _parts(tensors, SHARD_BYTES)
    where: dict[str, str] = {}
    progress(done, total)
    for number, names in enumerate(parts, start=1):
        several = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        file = several if len(parts) > 1 else "model.safetensors"
        held = {}
        for name in names:
            held[name] = tensors.pop(name)
            mx.eval(held[name])
            done += held[name].nbytes
            progress(done, total)
        mx.save_safetensors(str(folder / file), held, metadata={"format": "mlx"})
        where |= dict.fromkeys(names, file)
        held.clear()
        mx.clear_cache()
    if len(parts) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")


def _parts(tensors: dict[str, mx.array], shard_bytes: int) -> list[list[str]]:
    """The names of each file: as many, in their order, as fit into `shard_bytes`, at least one."""
    parts: list[list[str]] = [[]]
    room = shard_bytes
    for name, array in tensors.items():
        if parts[-1] and array.nbytes > room:
            parts.append([])
            room = shard_bytes
        parts[-1].append(name)
        room -= array.nbytes
    return parts


def carry_over(source: Path, folder: Path) -> None:
    """Copy the tokenizer, chat template, generation config and their like."""
    found = {path for pattern in CARRIED for path in source.glob(pattern) if path.is_file()}
    for path in sorted(found):
        if path.name not in REWRITTEN:
            shutil.copyfile(path, folder / path.name)
