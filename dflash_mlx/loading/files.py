"""Reads what a checkpoint folder holds, from JSON files and safetensors headers alone: no weight is read.

Source of the format: a safetensors file is 8 bytes of header length, a JSON header, then the data.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CheckpointError, must

INDEX = "model.safetensors.index.json"
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U32": 4, "F64": 8, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1}
ITEM_BYTES |= {"BOOL": 1, "U16": 2, "U64": 8, "F8_E4M3": 1, "F8_E5M2": 1}
DOWNLOAD_AGAIN = "Download it again: the copy stopped half way or was changed."


class Tensor(NamedTuple):
    """One tensor of a file: its shape, the file's dtype name (such as "BF16") and where it is."""

    shape: tuple[int, ...]
    dtype: str
    file: Path

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the checkpoint.

    Raises:
        CheckpointError: the file is missing, empty or no JSON object.
    """
    if not path.is_file():
        raise CheckpointError(must("load", path.name, f"in {path.parent}", "no such file", "Check the folder."))
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(must("load", str(path), "JSON", str(error), DOWNLOAD_AGAIN)) from None
    if not isinstance(value, dict):
        raise CheckpointError(must("load", str(path), "a JSON object", type(value).__name__, DOWNLOAD_AGAIN))
    return value


def read_header(path: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file.

    Raises:
        CheckpointError: the file is missing, shorter than its header says, or no safetensors file.
    """
    if not path.is_file():
        raise CheckpointError(must("load", path.name, f"in {path.parent}", "no such file", DOWNLOAD_AGAIN))
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if 8 + length > size:
            expected = f"at least {8 + length} bytes"
            raise CheckpointError(must("load", path.name, expected, f"{size} bytes", DOWNLOAD_AGAIN))
        text = file.read(length)
    try:
        header = json.loads(text)
        return {
            name: _tensor(path, name, entry, size - 8 - length) for name, entry in header.items() if name[:2] != "__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        found = f"a broken header ({error})"
        raise CheckpointError(must("load", path.name, "a safetensors file", found, DOWNLOAD_AGAIN)) from None


def _tensor(path: Path, name: str, entry: Mapping[str, Any], data_bytes: int) -> Tensor:
    """One header entry, checked against the file's size and its own shape."""
    begin, end = entry["data_offsets"]
    if end > data_bytes:
        expected = f"{end} bytes of data (up to {name})"
        raise CheckpointError(must("load", path.name, expected, f"{data_bytes} bytes", DOWNLOAD_AGAIN))
    if entry["dtype"] not in ITEM_BYTES:
        todo = "Convert the checkpoint to float or to MLX's affine quantisation."
        raise CheckpointError(must("load", name, "of a float dtype", f"{entry['dtype']} in {path.name}", todo))
    tensor = Tensor(tuple(entry["shape"]), entry["dtype"], path)
    if tensor.nbytes != end - begin:
        expected = f"{tensor.nbytes} bytes for shape {list(tensor.shape)} {tensor.dtype}"
        raise CheckpointError(must("load", name, expected, f"{end - begin} bytes in {path.name}", DOWNLOAD_AGAIN))
    return tensor


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint: through the index where there is one, else from `model*.safetensors`.

    Raises:
        CheckpointError: a shard is missing or broken, or two files hold the same tensor.
    """
    if (folder / INDEX).is_file():
        return _indexed(folder)
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        todo = "Check the folder; a download may have stopped before the weights came."
        raise CheckpointError(must("load", str(folder), "a folder with model*.safetensors", "none", todo))
    _check_numbering(folder, files)
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in read_header(file).items():
            if name in tensors:
                where = f"{tensors[name].file.name} and {file.name}"
                raise CheckpointError(must("load", name, "in one file", where, "Remove the file that is left over."))
            tensors[name] = tensor
    return tensors


def _check_numbering(folder: Path, files: list[Path]) -> None:
    """Files numbered `-00001-of-0000N` without an index: all N are there."""
    for match in filter(None, (re.search(r"-(\d+)-of-(\d+)\.safetensors$", file.name) for file in files)):
        for number in range(1, int(match[2]) + 1):
            name = f"model-{number:0{len(match[1])}d}-of-{match[2]}.safetensors"
            if not (folder / name).is_file():
                raise CheckpointError(must("load", name, f"in {folder}", "no such file", DOWNLOAD_AGAIN))


def _indexed(folder: Path) -> dict[str, Tensor]:
    places = read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(must("load", INDEX, "an object with a weight_map", "none", DOWNLOAD_AGAIN))
    headers = {file: read_header(folder / file) for file in sorted(set(places.values()))}
    for name, file in places.items():
        if name not in headers[file]:
            raise CheckpointError(must("load", name, f"in {file}, as {INDEX} says", "no such tensor", DOWNLOAD_AGAIN))
    strangers = [(name, file) for file, header in headers.items() for name in header if places.get(name) != file]
    if strangers:
        name, file = strangers[0]
        raise CheckpointError(must("load", name, f"listed in {INDEX}", f"only in {file}", DOWNLOAD_AGAIN))
    return {name: headers[file][name] for name, file in places.items()}
