"""Session files: a session's state in one safetensors file, for the same pair on another day.

The header's metadata say what the file is; a SHA-256 over the whole file, its own digits read as zeros, says that it
is whole. What is held goes in (rows of full layers, rows that the rings still have, checkpoints), so the loaded session
goes on exactly as the one that was saved.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from .cache import History, TargetCache
from .checkpoint import Checkpoint, Window
from .errors import SessionFileError, must
from .fingerprint import fingerprint
from .pair import Pair
from .state import State

FORMAT, VERSION = "dflash_mlx session", 1
ZEROS = "0" * 64  # stands where the digest will be while it is computed
CHUNK = 1 << 22  # bytes
NAMES = {mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16", mx.int32: "I32", mx.uint32: "U32"}
DAMAGED = "The file is damaged: start from the text, or from another copy."


def save(state: State, path: str | Path) -> None:
    """Write a state to a file, all of it or nothing.

    Raises:
        SessionFileError: it cannot be written; a file of that name is as it was.
    """
    path = Path(path)
    state.project_backlog()
    arrays: dict[str, mx.array] = {"tokens": mx.array(state.tokens, dtype=mx.int32)}
    facts: dict[str, Any] = {"fingerprint": fingerprint(state.pair), "turn_start": state.turn_start}
    facts |= {"caches": [], "checkpoints": []}
    for number, history in enumerate(state.histories):
        facts["caches"].append({"offset": history.offset, "start": history.start})
        _name(arrays, f"cache.{number}", history.ring_copies(history.start, history.offset))
        if isinstance(history, TargetCache):
            parts = [part for layer in history.full_layers for part in layer.parts]
            buffers = [array for part in parts for array in (part.keys, part.values)]
            _name(arrays, f"full.{number}", [array[:, :, : history.offset] for array in buffers])
    for number, point in enumerate(state.checkpoints.points):
        firsts = [None if window is None else window.first for window in point.windows]
        facts["checkpoints"].append({"position": point.position, "firsts": firsts})
        for cache, window in enumerate(point.windows):
            _name(arrays, f"checkpoint.{number}.{cache}", window.copies if window else [])
    try:
        _write(path, arrays, json.dumps(facts))
    except OSError as error:
        todo = "Check the folder, its permissions and the room on the disk."
        raise SessionFileError(must("session", str(path), "a file that can be written", str(error), todo)) from error


def load(pair: Pair, path: str | Path) -> State:
    """Read a state, for the pair it was saved with; with another drafter it has a note, and no context.

    Raises:
        SessionFileError: the file is missing, damaged, of another version or of another model.
    """
    path = Path(path)
    try:
        header = _read_header(path)
        facts = json.loads(header["facts"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        if isinstance(error, SessionFileError):
            raise
        todo = "Check the path." if isinstance(error, OSError) else DAMAGED
        raise SessionFileError(must("session", str(path), "a session file", _why(error), todo)) from error
    same_drafter = _check_pair(pair, facts["fingerprint"], path)
    arrays: dict[str, mx.array] = mx.load(str(path), format="safetensors")  # type: ignore[assignment]
    tokens: list[int] = arrays["tokens"].tolist()  # type: ignore[assignment]
    if len(tokens) > pair.max_context + 1:
        todo = "Load the model with a larger max_context."
        expected = f"at most {pair.max_context} tokens"
        raise SessionFileError(must("session", f"the history in {path}", expected, len(tokens), todo))
    state = State(pair)
    state.tokens, state.turn_start = tokens, facts["turn_start"]
    _restore(state, facts, arrays, same_drafter)
    mx.eval(state.arrays, [window.copies for p in state.checkpoints.points for window in p.windows if window])
    if pair.drafter and not same_drafter:
        state.notes.append("The session was saved without this drafter: what the drafter has to see is fed again.")
    return state


def _why(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def _name(arrays: dict[str, mx.array], group: str, values: list[mx.array]) -> None:
    arrays.update({f"{group}.{number}": value for number, value in enumerate(values) if value.size})


def _named(arrays: dict[str, mx.array], group: str) -> list[mx.array]:
    found: list[mx.array] = []
    while f"{group}.{len(found)}" in arrays:
        found.append(arrays[f"{group}.{len(found)}"])
    return found


def _restore(state: State, facts: dict[str, Any], arrays: dict[str, mx.array], same_drafter: bool) -> None:
    """Put the rows back where they were. Another drafter's context stays empty, and reuse counts with that."""
    histories: list[History] = state.histories if same_drafter else state.histories[:1]
    for number, (history, said) in enumerate(zip(histories, facts["caches"], strict=False)):
        if not said["offset"]:
            continue
        if isinstance(history, TargetCache):
            rows = _named(arrays, f"full.{number}")
            parts = [part for layer in history.full_layers for part in layer.parts]
            for part, keys, values in zip(parts, rows[::2], rows[1::2], strict=True):
                part.grow(said["offset"], history.max_context)
                part.write(0, keys, values)
        history.put_back(said["start"], said["offset"], _named(arrays, f"cache.{number}"))
    for number, said in enumerate(facts["checkpoints"]):
        point = Checkpoint(said["position"])
        for cache, first in enumerate(said["firsts"]):
            if first is not None and cache < len(histories):
                point.windows[cache] = Window(first, _named(arrays, f"checkpoint.{number}.{cache}"))
        state.checkpoints.points.append(point)


def _check_pair(pair: Pair, saved: dict[str, str | None], path: Path) -> bool:
    """The file's model is the pair's; returns whether the drafter is as well."""
    own = fingerprint(pair)
    names = {"target": "the target", "tokenizer": "the tokenizer and its template", "dtype": "the dtype of the caches"}
    for part, what in names.items():
        if saved[part] != own[part]:
            todo = "Load the model that the session was saved with; another model cannot go on from it."
            wanted, found = (_short(said[part]) for said in (own, saved))
            raise SessionFileError(must("session", f"{what} of {path}", wanted, found, todo))
    bits = saved.get("kv_bits", "None")  # a file without it was saved before there was a choice
    if bits != own["kv_bits"]:
        todo = "Load with the kv_bits that the session was saved with; rows of other bits cannot be gone on from."
        raise SessionFileError(must("session", f"kv_bits of {path}", str(own["kv_bits"]), bits, todo))
    return own["drafter"] is not None and saved["drafter"] == own["drafter"]


def _short(said: str | None) -> str:
    """A part of a fingerprint for people: the beginning of a hash, or a dtype's plain name."""
    return str(said).removeprefix("mlx.core.")[:12]


def _write(path: Path, arrays: dict[str, mx.array], facts: str) -> None:
    """Write beside the path, hash, then take the path's place."""
    entries: dict[str, Any] = {
        "__metadata__": {"format": FORMAT, "version": str(VERSION), "sha256": ZEROS, "facts": facts}
    }
    at = 0
    for name, array in arrays.items():
        shape = list(array.shape)
        entries[name] = {"dtype": NAMES[array.dtype], "shape": shape, "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "w+b") as file:
            digest = hashlib.sha256()
            for piece in _pieces(text, arrays):
                digest.update(piece)
                file.write(piece)
            file.seek(8 + text.index(ZEROS.encode()))
            file.write(digest.hexdigest().encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _pieces(header: bytes, arrays: dict[str, mx.array]) -> Iterator[bytes]:
    """The bytes of a safetensors file: the header's length, the header, the data."""
    yield struct.pack("<Q", len(header))
    yield header
    for array in arrays.values():
        if array.size:
            yield np.array(mx.contiguous(array).view(mx.uint8)).tobytes()


def _read_header(path: Path) -> dict[str, str]:
    """The metadata of a session file that is whole and of this version."""
    size = path.stat().st_size
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        text = file.read(min(length, size))
        metadata: dict[str, str] = json.loads(text)["__metadata__"]
        if metadata["format"] != FORMAT:
            raise ValueError(f"format {metadata['format']!r}")
        if metadata["version"] != str(VERSION):
            todo = "Another version of this package wrote it; save it anew from the text."
            expected = f"of version {VERSION}"
            raise SessionFileError(must("session", str(path), expected, metadata["version"], todo))
        digits = metadata["sha256"].encode()
        digest = hashlib.sha256(struct.pack("<Q", length) + text.replace(digits, ZEROS.encode(), 1))
        while piece := file.read(CHUNK):
            digest.update(piece)
    if digest.hexdigest().encode() != digits:
        found = f"{size} bytes with SHA-256 {digest.hexdigest()[:12]}"
        raise SessionFileError(must("session", str(path), f"with SHA-256 {digits[:12].decode()}", found, DAMAGED))
    return metadata
