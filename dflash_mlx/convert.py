"""`convert`: a target or a drafter, from any layout that `load` reads, in other bits or another dtype.

The folder it writes is read by `load`, mlx-lm (targets) and mlx-vlm: mlx-vlm's tensor names, a nested config for a
target, the published names for a drafter, and MLX's affine quantisation. Quantising is `mlx.nn.quantize`.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from .config import TARGET_MODEL_TYPES, TargetConfig
from .drafter_config import DrafterConfig
from .errors import InputError, must, one_of
from .loading.build import Checkpoint, build, drafter_model, read_drafter, read_target
from .loading.files import read_json, read_tensors
from .loading.hub import resolve
from .loading.legacy import modern_config
from .loading.quantisation import BITS, GROUP_SIZES
from .loading.save import carry_over, complete_or_absent, write_tensors
from .memory import Sizes, drafter_rings
from .models.muse_glimmer import MuseGlimmer
from .resources import find, user_path

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
MEMORY_CONTEXT = 8192  # tokens that the memory in the report is for, at most the model's own
QUANTISABLE = (nn.Linear, nn.Embedding)
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Side:
    """A checkpoint before or after: bytes of its weights on disk, bits a weight takes, bytes of memory to run it."""

    weights_bytes: int
    bits_per_weight: float
    memory_bytes: int


@dataclass(frozen=True)
class Conversion:
    """What `convert` did.

    Attributes:
        kind: "target" or "drafter".
        before, after: sizes, after from the files that were written.
        context: tokens that `memory_bytes` is planned for.
        quantised: how many modules are quantised now.
        whole: the modules that could be quantised and are not.
        notes: one line for each thing that the user should know.
    """

    kind: str
    folder: Path
    before: Side
    after: Side
    context: int
    quantised: int
    whole: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Form:
    """What the weights become.

    Attributes:
        bits: 4, 6 or 8, or `None` for no quantisation.
        group_size: weights that share a scale: 32, 64 or 128.
        keep: patterns of modules that stay whole, such as "lm_head" or "*.o_proj".
        dtype: of everything that is not quantised, and of the scales; `None` keeps the source's.
    """

    bits: int | None = None
    group_size: int = 64
    keep: tuple[str, ...] = ()
    dtype: str | None = None

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            InputError: a value is not one of those that are supported, or nothing is asked for.
        """
        for name, value, known in (
            ("bits", self.bits, (None, *BITS)),
            ("group_size", self.group_size, GROUP_SIZES),
            ("dtype", self.dtype, (None, *DTYPES)),
        ):
            if value not in known:
                expected = one_of(item for item in known if item is not None)
                raise InputError(must("convert", name, expected, repr(value), "Correct the option."))
        if self.bits is None and self.dtype is None:
            todo = "Say what the weights shall become: --bits 4, or --dtype bfloat16."
            raise InputError(must("convert", "bits or dtype", "given", "neither", todo))


def convert(
    source: str | Path, folder: str | Path, form: Form, progress: Progress = lambda done, total: None
) -> Conversion:
    """Write a checkpoint anew.

    Args:
        source: "pocket" (its target), a folder or a hub id, of a target or of a drafter.
        folder: where it goes; complete when this returns, absent when it raises.
        progress: called with bytes done and bytes to do.
    Raises:
        InputError: an option is wrong, the folder is taken, a pattern names no module, or the disk is too small.
        CheckpointError: the source cannot be used.
        DFlashError: the system refuses to write there.
    """
    path = find("models/pocket/target") if str(source) == "pocket" else resolve(source)
    out = user_path(folder)
    with complete_or_absent(out) as beside:
        work = _Work(path, form)
        tensors = work.tensors()
        _check_room(beside, sum(array.nbytes for array in tensors.values()))
        write_tensors(beside, tensors, progress)
        (beside / "config.json").write_text(json.dumps(work.new_config(), indent=1), encoding="utf-8")
        carry_over(path, beside)
        return work.report(out, _read(beside)[0])


def _read(folder: Path) -> tuple[Checkpoint, nn.Module, TargetConfig | DrafterConfig]:
    """A folder's model, checked, with lazy weights."""
    checkpoint: Checkpoint
    config: TargetConfig | DrafterConfig
    if read_json(folder / "config.json").get("model_type") in TARGET_MODEL_TYPES:
        checkpoint, config = read_target(folder)
        model: nn.Module = MuseGlimmer(config)
    else:
        checkpoint, config = read_drafter(folder, None)
        model = drafter_model(config)
    build(model, checkpoint)
    return checkpoint, model, config


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        todo = "Free some space, or write to another disk."
        raise InputError(must("convert", "the disk's free space", f"at least {needed} bytes", f"{free} bytes", todo))


class _Work:
    """One checkpoint on its way from one form to another; all its arrays are lazy."""

    def __init__(self, source: Path, form: Form):
        self.form = form
        self.checkpoint, self.model, self.config = _read(source)
        self.kind = "target" if isinstance(self.config, TargetConfig) else "drafter"
        self.notes = []
        if self.checkpoint.quantised:
            _dequantise(self.model)
            if form.bits:
                self.notes.append("The source was quantised already: its rounding stays in the weights.")
        if self.checkpoint.skipped:
            count = len(self.checkpoint.skipped)
            self.notes.append(
                f"{count} vision tensors are copied, not quantised; the sizes are those of the text model."
            )
        if form.dtype:
            self.model.set_dtype(DTYPES[form.dtype])
        self.weights = sum(array.size for array in _parameters(self.model).values())
        self.whole: tuple[str, ...] = ()
        self.quantised = 0
        if form.bits is not None:
            self._quantise(form.bits)

    def _quantise(self, bits: int) -> None:
        candidates = {path: module for path, module in self.model.named_modules() if isinstance(module, QUANTISABLE)}
        chosen = self._chosen(candidates)
        self.whole = tuple(sorted(self._published(path) for path in set(candidates) - chosen))
        self.quantised = len(chosen)
        nn.quantize(self.model, self.form.group_size, bits, class_predicate=lambda path, _: path in chosen)

    def _published(self, path: str) -> str:
        """The name of a module in the files' own naming, without a target's prefix."""
        return self.checkpoint.published(f"{path}.").removesuffix(".")

    def _chosen(self, candidates: Mapping[str, nn.Module]) -> set[str]:
        """The modules to quantise: those that no pattern keeps and whose width the groups divide."""
        kept: set[str] = set()
        for pattern in self.form.keep:
            found = {path for path in candidates if fnmatchcase(self._published(path), pattern)}
            if not found:
                names = sorted({self._published(path).split(".")[-1] for path in candidates})
                expected = f"a pattern of modules ({', '.join(names)})"
                todo = "Write for example lm_head, or '*.o_proj'."
                raise InputError(must("convert", "keep", expected, repr(pattern), todo))
            kept |= found
        odd = {path for path, module in candidates.items() if module.weight.shape[-1] % self.form.group_size}
        if odd - kept:
            note = f"{len(odd - kept)} modules stay whole: groups of {self.form.group_size} do not divide their width."
            self.notes.append(note)
        return set(candidates) - kept - odd

    def tensors(self) -> dict[str, mx.array]:
        """The new tensors under the names that they are written with, vision tensors as they were."""
        named = {self._written(name): array for name, array in _parameters(self.model).items()}
        self.model = nn.Module()  # the arrays are handed over: what is written can be freed
        found = read_tensors(self.checkpoint.folder) if self.checkpoint.skipped else {}
        for name in self.checkpoint.skipped:
            files: Any = mx.load(str(found[name].file))
            named[name.removeprefix("model.")] = self._cast(files[name])
        return named

    def _cast(self, array: mx.array) -> mx.array:
        floats = mx.issubdtype(array.dtype, mx.floating)
        return array.astype(DTYPES[self.form.dtype]) if self.form.dtype and floats else array

    def _written(self, name: str) -> str:
        if self.kind == "drafter":
            return self.checkpoint.published(name)
        return f"language_model.{name}" if name.startswith("lm_head.") else f"language_model.model.{name}"

    def new_config(self) -> dict[str, Any]:
        """The source's config, nested for a target, with the new dtype and quantisation."""
        config = copy.deepcopy(self.checkpoint.raw)
        if self.kind == "target":
            config = _nested(modern_config(config))
        for place in (config, config.get("text_config", {})):
            for key in ("quantization", "quantization_config"):
                place.pop(key, None)
            for key in ("dtype", "torch_dtype"):
                if self.form.dtype and key in place:
                    place[key] = self.form.dtype
        if self.quantised:
            said: dict[str, Any] = {"group_size": self.form.group_size, "bits": self.form.bits, "mode": "affine"}
            prefix = "model." if self.kind == "target" else ""
            said |= {name if name == "lm_head" else f"{prefix}{name}": False for name in self.whole}
            config |= {"quantization": said, "quantization_config": said}
        return config

    def report(self, folder: Path, after: Checkpoint) -> Conversion:
        """Sizes of the source and of what was written."""
        longest = self.config.max_position if isinstance(self.config, TargetConfig) else MEMORY_CONTEXT
        context = min(MEMORY_CONTEXT, longest)
        before, new = (self._side(checkpoint, context) for checkpoint in (self.checkpoint, after))
        return Conversion(self.kind, folder, before, new, context, self.quantised, self.whole, tuple(self.notes))

    def _side(self, checkpoint: Checkpoint, context: int) -> Side:
        stored, item = checkpoint.nbytes, checkpoint.dtype.size
        if isinstance(self.config, TargetConfig):
            memory = sum(Sizes(self.config, None, stored, 0, item).parts(context).values())
        else:
            memory = stored + drafter_rings(self.config, item)
        return Side(stored, 8 * stored / self.weights, memory)


def _parameters(model: nn.Module) -> dict[str, mx.array]:
    """All arrays of a model by name."""
    return dict(tree_flatten(model.parameters()))


def _dequantise(model: nn.Module) -> None:
    """Put whole modules in the place of quantised ones."""
    whole: list[tuple[str, nn.Module]] = []
    for path, module in model.named_modules():
        if not isinstance(module, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
            continue
        parts = module.weight, module.scales, module.get("biases"), module.group_size, module.bits
        fresh = nn.Linear(1, 1, bias=False) if isinstance(module, nn.QuantizedLinear) else nn.Embedding(1, 1)
        fresh.weight = mx.dequantize(*parts)
        whole.append((path, fresh))
    model.update_modules(tree_unflatten(whole))


def _nested(config: dict[str, Any]) -> dict[str, Any]:
    """A target's config with its text fields under `text_config`, where mlx-vlm and transformers look for them."""
    if "text_config" in config:
        return config
    text = {key: value for key, value in config.items() if key != "architectures"} | {"model_type": "muse_glimmer_text"}
    if "rope_parameters" not in text and "rope_theta" in text:
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": text["rope_theta"]}
    outer = {"architectures": ["MuseGlimmerForConditionalGeneration"], "model_type": "muse_glimmer"}
    return outer | {"text_config": text, "tie_word_embeddings": config.get("tie_word_embeddings", False)}
