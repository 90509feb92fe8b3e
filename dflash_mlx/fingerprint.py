"""Fingerprints: what says whether two loaded pairs would compute the same keys and values for the same tokens.

The weights are read as they are in memory, all of them: however a checkpoint is laid out on disk, what counts is what
runs. It takes as long as reading the weights twice.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from .pair import Pair
from .text import TOKENIZER_FILES

TEXT_FILES = (*TOKENIZER_FILES, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
WORDS = {4: mx.uint32, 2: mx.uint16, 1: mx.uint8}


def fingerprint(pair: Pair) -> dict[str, str | None]:
    """SHA-256 of "target", "drafter" (`None` without one) and "tokenizer" with its template; the caches' kinds."""
    return {
        "target": of_model(pair.target),
        "drafter": of_model(pair.drafter) if pair.drafter else None,
        "tokenizer": of_files(pair.target_path),
        "dtype": str(pair.dtype),
        "kv_bits": str(pair.kv_bits),
    }


def of_model(model: Any) -> str:
    """Config, and each tensor's name, dtype, shape and sums over its rows and over its columns."""
    digest = hashlib.sha256(repr(model.config).encode())
    tensors: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    for name, array in sorted(tensors.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        for sums in _sums(array):
            digest.update(np.array(sums).tobytes())
    return digest.hexdigest()


def _sums(array: mx.array) -> list[mx.array]:
    """Sums of the bits, modulo 2^32, along rows and along columns: a change of any single number changes both."""
    width = array.shape[-1] * array.dtype.size
    word = next(size for size in WORDS if width % size == 0)
    bits = array.reshape(-1, array.shape[-1]).view(WORDS[word]).astype(mx.uint32)
    return [mx.sum(bits, axis=1), mx.sum(bits, axis=0)]


def of_files(folder: Path) -> str:
    """The names and contents of the files that turn text into ids."""
    digest = hashlib.sha256()
    for name in sorted(TEXT_FILES):
        path = folder / name
        if path.is_file():
            content = path.read_bytes()
            digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()
