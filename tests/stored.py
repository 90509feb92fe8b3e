"""How tensors lie on disk: safetensors files, shards with an index, MLX's affine quantisation.

Written by hand and not with a library, so that files can also be written wrong. Needs numpy alone, and MLX where
something is quantised.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Weights = dict[str, np.ndarray]
Stored = dict[str, tuple[str, tuple[int, ...], bytes]]  # name -> safetensors dtype, shape, bytes
SAFETENSORS_NAMES = {"int32": "I32", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True)
class Quantisation:
    """MLX affine quantisation of the linear layers; `overrides` maps canonical module paths to a form or to False."""

    bits: int = 4
    group_size: int = 64
    embedding: bool = True
    head: bool = True
    overrides: Mapping[str, Any] = field(default_factory=dict)


def as_stored(array: np.ndarray, dtype: str) -> tuple[str, tuple[int, ...], bytes]:
    """A float32 array as safetensors dtype, shape and bytes; bfloat16 rounds to nearest even."""
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
        data = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    else:
        data = np.ascontiguousarray(array.astype(dtype))
    return SAFETENSORS_NAMES[dtype], array.shape, data.tobytes()


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    """The float32 values that an array has after being stored in a dtype."""
    if dtype == "bfloat16":
        stored = np.frombuffer(as_stored(array, dtype)[2], np.uint16).astype(np.uint32) << 16
        return stored.view(np.float32).reshape(array.shape)
    return array.astype(dtype).astype(np.float32)


def write_safetensors(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    """One safetensors file from dtype, shape and bytes per name."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    blobs = [data for _, _, data in tensors.values()]
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


def _quantised(array: np.ndarray, bits: int, group_size: int, dtype: str) -> dict[str, Any]:
    import mlx.core as mx

    parts = mx.quantize(mx.array(array).astype(getattr(mx, dtype)), group_size=group_size, bits=bits)
    packed, scales, biases = (np.array(part if part.dtype == mx.uint32 else part.astype(mx.float32)) for part in parts)
    stored = ("U32", packed.shape, packed.tobytes())
    return {"weight": stored, "scales": as_stored(scales, dtype), "biases": as_stored(biases, dtype)}


def pack(
    weights: Weights, dtype: str, quantisation: Quantisation | None, name_of: Callable[[str], str]
) -> tuple[Stored, dict[str, Any]]:
    """Stored tensors in a layout's names, and what its config says about their quantisation."""
    stored: Stored = {}
    said: dict[str, Any] = {}
    if quantisation is not None:
        said = {"group_size": quantisation.group_size, "bits": quantisation.bits, "mode": "affine"}
    for name, array in weights.items():
        module = name.removesuffix(".weight")
        form: Any = said if array.ndim == 2 else False
        if quantisation is not None and module in quantisation.overrides:
            form = said[name_of(name).removesuffix(".weight")] = quantisation.overrides[module]
        elif quantisation is not None and not {
            "model.embed_tokens": quantisation.embedding,
            "lm_head": quantisation.head,
        }.get(module, True):
            form = False
        if not form:
            stored[name_of(name)] = as_stored(array, dtype)
            continue
        for part, value in _quantised(array, form["bits"], form["group_size"], dtype).items():
            stored[name_of(f"{module}.{part}")] = value
    return stored, {"quantization": said, "quantization_config": said} if said else {}


def write_folder(folder: Path, config: Mapping[str, Any], stored: Mapping[str, Any], shards: int = 1) -> Path:
    """A checkpoint folder: config.json and one file, or several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    if shards == 1:
        write_safetensors(folder / "model.safetensors", stored)
        return folder
    names = list(stored)
    files = {f"model-{i + 1:05d}-of-{shards:05d}.safetensors": names[i::shards] for i in range(shards)}
    for file, held in files.items():
        write_safetensors(folder / file, {name: stored[name] for name in held})
    where = {name: file for file, held in files.items() for name in held}
    total = sum(len(data) for _, _, data in stored.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
