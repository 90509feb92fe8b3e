"""One canonical name per tensor, whatever library wrote the checkpoint.

Canonical is transformers' name without the prefix: `embed_tokens`, `layers.0.self_attn.q_proj`, `norm`, `lm_head`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from ..errors import CheckpointError, must

VISION = re.compile(r"^(model\.)?(vision_tower|vision_adapter|vision_projection|perception_emb_norm)\.")
DERIVED = re.compile(r"rotary_emb\.inv_freq$")
TARGET_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
DFLASH2_PARTS = {"fc": "encoder.fc", "hidden_norm": "encoder.output_norm_enc"}  # DFlash-2's names -> v1's
CODEBOOK = "_codebook"  # published without the suffix `.weight`
T = TypeVar("T")


def target_name(name: str) -> str:
    """A target tensor's or module's canonical name."""
    for prefix in TARGET_PREFIXES:  # the longest first: each is tried once
        if name.startswith(prefix):
            return name[len(prefix) :]
    return name


def drafter_name(name: str) -> str:
    """A drafter tensor's or module's canonical name."""
    return name.removeprefix("model.")


def dflash2_module(name: str) -> str:
    """A DFlash-2 drafter's module's canonical name: that of the same part in v1."""
    part, dot, rest = drafter_name(name).partition(".")
    return DFLASH2_PARTS.get(part, part) + dot + rest


def dflash2_name(name: str) -> str:
    """A DFlash-2 drafter's tensor's canonical name."""
    short = dflash2_module(name)
    return f"{short}.weight" if short.endswith(CODEBOOK) else short


def dflash2_published(name: str) -> str:
    """The name that the canonical name of a DFlash-2 drafter's tensor is published under."""
    for published, short in DFLASH2_PARTS.items():
        name = name.replace(f"{short}.", f"{published}.")
    return name.replace(f"{CODEBOOK}.weight", CODEBOOK)


def is_vision(name: str) -> bool:
    """Whether a tensor belongs to the vision tower, which this runtime does not read."""
    return VISION.match(name) is not None


def canonical(tensors: Mapping[str, T], rename: Callable[[str], str]) -> dict[str, tuple[str, T]]:
    """Map canonical names to (name in the file, tensor), without vision and derived tensors.

    Raises:
        CheckpointError: two names of the checkpoint mean the same tensor.
    """
    result: dict[str, tuple[str, T]] = {}
    for name, tensor in tensors.items():
        if is_vision(name) or DERIVED.search(name):
            continue
        short = rename(name)
        if short in result:
            found = f"{result[short][0]} and {name}"
            raise CheckpointError(must("load", short, "present once", found, "Remove one of the two layouts."))
        result[short] = (name, tensor)
    return result
