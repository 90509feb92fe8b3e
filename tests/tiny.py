"""Random small targets and drafters on disk, in every layout, and loaded.

`tiny_pair` writes a pair and returns its two folders, `tiny_models` loads it; sizes are plain keyword arguments, which
`tiny_specs` lists. The parts are in `specs.py` (sizes, weights), `layouts.py` (configs, names) and `stored.py` (files).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from layouts import LAYOUTS, PREFIXES, drafter_config, layout_name, target_config, text_config, vision_tensors
from specs import FULL, SLIDING, Drafter2Spec, DrafterSpec, TargetSpec, drafter_weights, target_weights, tiny_specs
from stored import Quantisation, Weights, as_stored, pack, rounded, write_folder, write_safetensors

__all__ = [
    "FULL", "LAYOUTS", "SLIDING", "Drafter2Spec", "DrafterSpec", "Quantisation", "TargetSpec", "drafter_config",
    "drafter_weights", "rounded", "target_config", "target_weights", "text_config", "tiny_models", "tiny_pair",
    "tiny_specs", "vision_tensors", "write_drafter", "write_safetensors", "write_target",
]  # fmt: skip


def write_target(
    folder: Path,
    spec: TargetSpec,
    layout: str = "transformers",
    dtype: str = "float32",
    shards: int = 1,
    quantisation: Quantisation | None = None,
    eos: tuple[int, ...] = (),
    weights: Weights | None = None,
) -> Path:
    """Write a target in one layout; `eos` goes to config (the first) and generation_config.json (all)."""
    given = target_weights(spec) if weights is None else weights
    stored, said = pack(given, dtype, quantisation, lambda name: layout_name(name, layout))
    vision = PREFIXES[layout][2]
    if vision is not None:
        stored |= {name: as_stored(array, dtype) for name, array in vision_tensors(vision, spec.hidden).items()}
    config = target_config(spec, layout, dtype) | said
    if eos:
        config.get("text_config", config)["eos_token_id"] = eos[0]
    write_folder(folder, config, stored, shards)
    if eos:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(eos)}))
    return folder


def write_drafter(
    folder: Path,
    spec: DrafterSpec,
    dtype: str = "float32",
    shards: int = 1,
    quantisation: Quantisation | None = None,
    prefix: str = "",
    weights: Weights | None = None,
) -> Path:
    """Write a drafter, its tensor names with or without the prefix `model.`."""
    given = drafter_weights(spec) if weights is None else weights
    stored, said = pack(given, dtype, quantisation, lambda name: prefix + name)
    return write_folder(folder, drafter_config(spec, dtype) | said, stored, shards)


def tiny_pair(
    folder: Path,
    dtype: str = "float32",
    layout: str = "transformers",
    quantisation: Quantisation | None = None,
    drafter_quantisation: Quantisation | None = None,
    eos: tuple[int, ...] = (),
    edit: Callable[[Weights, Weights], None] | None = None,
    **sizes: Any,
) -> tuple[Path, Path]:
    """Write a random pair below `folder` and return its two folders.

    `sizes` as in `tiny_specs`; `edit` may change the two dicts of canonical float32 weights before they are written.
    """
    target, drafter = tiny_specs(**sizes)
    target_tensors, drafter_tensors = target_weights(target), drafter_weights(drafter)
    if edit is not None:
        edit(target_tensors, drafter_tensors)
    first = write_target(folder / "target", target, layout, dtype, 1, quantisation, eos, target_tensors)
    second = write_drafter(folder / "drafter", drafter, dtype, 1, drafter_quantisation, "", drafter_tensors)
    return first, second


def tiny_models(folder: Path, **options: Any) -> tuple[Any, Any]:
    """A random pair as loaded models with evaluated weights; options as in `tiny_pair`."""
    import mlx.core as mx

    from dflash_mlx.loading import load_drafter, load_target

    first, second = tiny_pair(folder, **options)
    target = load_target(first)
    drafter = load_drafter(second, target.config)
    mx.eval(target.parameters(), drafter.parameters())
    return target, drafter
