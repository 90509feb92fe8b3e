"""Builds a model around a checkpoint: every name, shape and dtype is checked before a weight is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..config import TargetConfig
from ..drafter_config import DFlash2Config, DrafterConfig, drafter_config
from ..errors import CheckpointError, must
from ..fields import SAME_RELEASE
from ..kernels.launch import dtype_name
from ..kernels.serving import STOCK, Kernels
from ..models.dflash import DFlash
from ..models.dflash2 import DFlash2
from ..models.muse_glimmer import MuseGlimmer
from .files import Tensor, read_json, read_tensors
from .layouts import (
    canonical,
    dflash2_module,
    dflash2_name,
    dflash2_published,
    drafter_name,
    is_vision,
    target_name,
)
from .legacy import is_legacy, modern_config, modern_name
from .quantisation import Quantisation, module_quantisation

FLOATS = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}


class Checkpoint(NamedTuple):
    """A checkpoint's headers, read and renamed; no weight has been read.

    Attributes:
        tensors: canonical name -> (name in its file, tensor).
        quantised: canonical module path -> how it is quantised.
        skipped: names that are left out on purpose (vision).
        published: from a canonical name to the one that users know, for what is missing.
    """

    folder: Path
    raw: dict[str, Any]
    tensors: dict[str, tuple[str, Tensor]]
    quantised: dict[str, Quantisation]
    skipped: list[str]
    published: Callable[[str], str] = str

    @property
    def nbytes(self) -> int:
        """Bytes of the weights that will be loaded."""
        return sum(tensor.nbytes for _, tensor in self.tensors.values())

    @property
    def float_types(self) -> set[str]:
        """The float types that its tensors have, such as "bfloat16"."""
        return {dtype_name(FLOATS[tensor.dtype]) for _, tensor in self.tensors.values() if tensor.dtype in FLOATS}

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype that activations and caches take: that of the final norm."""
        found = self.tensors.get("norm.weight")
        return FLOATS.get(found[1].dtype, mx.float32) if found else mx.float32


def read_checkpoint(
    folder: Path, raw: dict[str, Any], rename: Callable[[str], str], module: Callable[[str], str] | None = None
) -> Checkpoint:
    """Read a folder's headers.

    Args:
        raw: its config file.
        rename: from its tensors' names to canonical ones.
        module: from its modules' names, where that is another rule.
    """
    found = read_tensors(folder)
    name = (lambda given: modern_name(rename(given))) if is_legacy(found) else rename
    tensors = canonical(found, name)
    quantised = module_quantisation(raw, tensors, module or name)
    return Checkpoint(folder, raw, tensors, quantised, [given for given in found if is_vision(given)])


def _quantise(model: nn.Module, quantised: Mapping[str, Quantisation]) -> None:
    """Swap the modules that the files hold quantised; their random weights are lazy and never made."""
    modules = dict(model.named_modules())
    for path, how in quantised.items():
        module = modules.get(path)
        if not isinstance(module, (nn.Linear, nn.Embedding)):
            raise CheckpointError(
                must("load", f"{path}.scales", "of a linear layer or embedding", "another's", SAME_RELEASE + ".")
            )
        width = module.weight.shape[-1]
        if width % how.group_size:
            expected = f"divisible by the group size {how.group_size}"
            raise CheckpointError(must("load", f"the input width of {path}", expected, width, SAME_RELEASE + "."))
    if quantised:
        nn.quantize(model, class_predicate=lambda path, _: quantised[path]._asdict() if path in quantised else False)


def _check_tensors(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Names, shapes and dtypes of the files are exactly those that the config asks for."""
    expected = dict(tree_flatten(model.parameters()))
    missing = sorted(checkpoint.published(name) for name in set(expected) - set(checkpoint.tensors))
    unknown = sorted(checkpoint.tensors[name][0] for name in set(checkpoint.tensors) - set(expected))
    for word, names in (("no", missing), ("also", unknown)):
        if names:
            found = f"{word} {', '.join(names[:5])}" + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            where = f"the tensors in {checkpoint.folder.name}"
            raise CheckpointError(must("load", where, f"the {len(expected)} of the config", found, SAME_RELEASE + "."))
    for canonical_name, array in expected.items():
        name, tensor = checkpoint.tensors[canonical_name]
        if tensor.shape != tuple(array.shape):
            found = f"{list(tensor.shape)} in {tensor.file.name}"
            raise CheckpointError(must("load", name, f"of shape {list(array.shape)}", found, SAME_RELEASE + "."))
        if (tensor.dtype == "U32") != (array.dtype == mx.uint32) or tensor.dtype not in (*FLOATS, "U32"):
            wanted = "uint32 (packed)" if array.dtype == mx.uint32 else "F32, F16 or BF16"
            found = f"{tensor.dtype} in {tensor.file.name}"
            raise CheckpointError(must("load", name, f"of dtype {wanted}", found, SAME_RELEASE + "."))


def _read_weights(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Hand the lazy, memory-mapped tensors to the model; look at norms and scales only."""
    paths = {tensor.file for _, tensor in checkpoint.tensors.values()}
    files: dict[Path, Any] = {path: mx.load(str(path)) for path in paths}
    weights = [(short, files[tensor.file][name]) for short, (name, tensor) in checkpoint.tensors.items()]
    small = [(short, w) for short, w in weights if w.ndim == 1 or short.endswith((".scales", ".biases"))]
    bad = mx.stack([mx.any(~mx.isfinite(weight)) for _, weight in small])
    for (short, _), broken in zip(small, bad.tolist(), strict=True):  # type: ignore[arg-type]
        if broken:
            name, tensor = checkpoint.tensors[short]
            found = f"NaN or infinity in {tensor.file.name}"
            raise CheckpointError(must("load", name, "finite", found, "Download or convert the checkpoint again."))
    model.load_weights(weights, strict=True)
    model.eval()


def build(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Give a model its checkpoint's weights.

    Raises:
        CheckpointError: a tensor is missing, unknown, of the wrong shape or dtype, or not finite.
    """
    _quantise(model, checkpoint.quantised)
    _check_tensors(model, checkpoint)
    _read_weights(model, checkpoint)


def read_target(folder: Path) -> tuple[Checkpoint, TargetConfig]:
    """A target's headers and config; no weight is read."""
    raw = read_json(folder / "config.json")
    # Another family's folder is told by its config, not by its tensors.
    config = TargetConfig.from_dict(modern_config(raw))
    return read_checkpoint(folder, raw, target_name), config


def read_drafter(folder: Path, target: TargetConfig | None) -> tuple[Checkpoint, DrafterConfig]:
    """A drafter's headers and config, checked against its target where there is one; no weight is read."""
    raw = read_json(folder / "config.json")
    config = drafter_config(raw)
    if target is not None:
        config.check_fits(target)
    if not isinstance(config, DFlash2Config):
        return read_checkpoint(folder, raw, drafter_name), config
    return read_checkpoint(folder, raw, dflash2_name, dflash2_module)._replace(published=dflash2_published), config


def load_target(folder: Path) -> MuseGlimmer:
    """The target of a folder, its weights lazy."""
    checkpoint, config = read_target(folder)
    model = MuseGlimmer(config)
    build(model, checkpoint)
    return model


def drafter_model(config: DrafterConfig, kernels: Kernels = STOCK) -> DFlash:
    """An empty drafter of the config's generation, its operations served by these kernels."""
    return DFlash2(config, kernels) if isinstance(config, DFlash2Config) else DFlash(config, kernels)


def load_drafter(folder: Path, target: TargetConfig) -> DFlash:
    """The drafter of a folder, its weights lazy."""
    checkpoint, config = read_drafter(folder, target)
    model = drafter_model(config)
    build(model, checkpoint)
    return model
