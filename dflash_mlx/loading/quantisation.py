"""What a config's `quantization` says of each module, checked against the shapes in the files.

Source of the form: mlx-lm 0.32, `{"group_size": g, "bits": b, "<module path>": {..} | true | false}`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from ..errors import CheckpointError, must, one_of

BITS = (4, 6, 8)
GROUP_SIZES = (32, 64, 128)
FIELDS = {"group_size", "bits", "mode", "quant_method", "linear_class", "quantize_activations"}


class Quantisation(NamedTuple):
    """Affine groups along a module's input: `bits` a weight, one scale and one bias a group."""

    group_size: int
    bits: int


def _parse(where: str, entry: Mapping[str, Any]) -> Quantisation:
    mode, method = entry.get("mode", "affine"), entry.get("quant_method")
    todo = "Convert the checkpoint with mlx-lm to affine quantisation."
    if mode != "affine":
        raise CheckpointError(must("config", f"{where}.mode", "'affine'", repr(mode), todo))
    if method not in (None, "affine"):
        raise CheckpointError(must("config", f"{where}.quant_method", "absent", repr(method), todo))
    bits, group = entry.get("bits"), entry.get("group_size")
    if bits not in BITS:
        raise CheckpointError(must("config", f"{where}.bits", one_of(BITS), repr(bits), todo))
    if group not in GROUP_SIZES:
        raise CheckpointError(must("config", f"{where}.group_size", one_of(GROUP_SIZES), repr(group), todo))
    return Quantisation(group, bits)


def _section(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The `quantization` section, wherever the writer put it; two different ones are an error."""
    places = (raw, raw.get("text_config") or {})
    found = [place[key] for place in places for key in ("quantization", "quantization_config") if place.get(key)]
    if found and not isinstance(found[0], Mapping):
        raise CheckpointError(must("config", "quantization", "an object", repr(found[0]), "Restore it in config.json."))
    if any(section != found[0] for section in found):
        expected = "the same in quantization and quantization_config"
        raise CheckpointError(must("config", "quantization", expected, "two that differ", "Remove the wrong one."))
    return found[0] if found else None


def module_quantisation(
    raw: Mapping[str, Any], names: Collection[str], rename: Callable[[str], str]
) -> dict[str, Quantisation]:
    """Which modules are quantised and how.

    Args:
        raw: the config file.
        names: canonical tensor names of the checkpoint; a quantised module is one that has `.scales`.
        rename: from the file's module paths to canonical ones.
    Raises:
        CheckpointError: files and config contradict, or a mode, width or group is not supported.
    """
    modules = sorted(name.removesuffix(".scales") for name in names if name.endswith(".scales"))
    section = _section(raw)
    if not modules and section is None:
        return {}
    if section is None:
        found = f"none, while {modules[0]}.scales is in the files"
        raise CheckpointError(must("config", "quantization", "present", found, "Restore it in config.json."))
    if not modules:
        found = f"{dict(section)!r}, while no tensor is quantised"
        raise CheckpointError(must("config", "quantization", "absent", found, "Remove it from config.json."))
    overrides = {rename(key): value for key, value in section.items() if key not in FIELDS}
    result = {}
    for module in modules:
        override = overrides.get(module, True)
        if override is False:
            found = f"false, while {module}.scales is in the files"
            raise CheckpointError(must("config", f"quantization.{module}", "absent", found, "Correct config.json."))
        if override is not True and not isinstance(override, Mapping):
            name = f"quantization.{module}"
            raise CheckpointError(must("config", name, "an object", repr(override), "Correct config.json."))
        entry = section if override is True else {**section, **override}
        result[module] = _parse("quantization" if override is True else f"quantization.{module}", entry)
    return result
