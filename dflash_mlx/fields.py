"""Typed access to a config file's fields; what is missing, contradictory or of a wrong kind is told by name."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from .errors import CheckpointError, must

MOST = 1 << 24  # no size of these models comes near; a product of two still fits where MLX keeps shapes
LARGEST = sys.float_info.max
SAME_RELEASE = "Check that config and weights are from the same release"


class Fields:
    """Typed access to a config's fields, nested under one key or flat, with errors that name the field."""

    def __init__(self, raw: Mapping[str, Any], nested_key: str | None = None):
        nested = raw.get(nested_key) if nested_key else None
        if nested is not None and not isinstance(nested, Mapping):
            raise CheckpointError(must("config", str(nested_key), "an object", repr(nested), SAME_RELEASE + "."))
        self._outer: Mapping[str, Any] = raw
        self._inner: Mapping[str, Any] = nested or {}

    def get(self, name: str, default: Any = None) -> Any:
        """The field's value, or `default`; both places contradicting is an error."""
        inner, outer = self._inner.get(name), self._outer.get(name)
        if name in self._inner and name in self._outer and None not in (inner, outer) and inner != outer:
            expected = "the same at the top level and in the nested text config"
            raise CheckpointError(must("config", name, expected, f"{outer!r} and {inner!r}", "Remove the wrong one."))
        value = inner if inner is not None else outer
        return default if value is None else value

    def require(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise CheckpointError(must("config", name, "present", "nothing", SAME_RELEASE + "."))
        return value

    def typed(self, name: str, kind: type | tuple[type, ...], expected: str) -> Any:
        """The field, which is of this kind where it is present."""
        value = self.get(name)
        if value is not None and not isinstance(value, kind):
            raise CheckpointError(must("config", name, expected, repr(value), SAME_RELEASE + "."))
        return value

    def integer(self, name: str, least: int = 1) -> int:
        value = self.require(name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
            expected = f"an integer between {least} and {MOST}"
            raise CheckpointError(must("config", name, expected, repr(value), SAME_RELEASE + "."))
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.require(name) if default is None else self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= LARGEST:
            raise CheckpointError(must("config", name, "a number above 0", repr(value), SAME_RELEASE + "."))
        return float(value)

    def expect(self, name: str, supported: Any) -> None:
        """The field, where it is present, has the one value that the models' code implements."""
        value = self.get(name, supported)
        if value != supported:
            todo = "This runtime implements no other value."
            raise CheckpointError(must("config", name, repr(supported), repr(value), todo))

    def integers(self, name: str) -> tuple[int, ...]:
        value = self.require(name)
        if not isinstance(value, (list, tuple)) or not all(isinstance(i, int) and i >= 0 for i in value):
            raise CheckpointError(must("config", name, "a list of integers", repr(value), SAME_RELEASE + "."))
        return tuple(value)

    def token(self, name: str, vocab: int) -> int | None:
        """A token id inside the vocabulary, or `None` where the field is absent."""
        value = self.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab):
            expected = f"a token below {vocab}"
            raise CheckpointError(must("config", name, expected, repr(value), SAME_RELEASE + "."))
        return value

    def rope_theta(self) -> float:
        """The rotary base: from `rope_parameters`, or from a flat `rope_theta`; both must agree."""
        parameters = self.typed("rope_parameters", Mapping, "an object") or {}
        scaling = self.typed("rope_scaling", Mapping, "an object") or {}
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        scaled = scaling.get("rope_type", scaling.get("type", "default"))
        for name, found in (("rope_parameters.rope_type", kind), ("rope_scaling.rope_type", scaled)):
            if found != "default":
                raise CheckpointError(must("config", name, "'default'", repr(found), "Scaled RoPE is not supported."))
        values = {"rope_parameters.rope_theta": parameters.get("rope_theta"), "rope_theta": self.get("rope_theta")}
        found_values = {name: value for name, value in values.items() if value is not None}
        if not found_values:
            todo = "Libraries default to 10000 or to 500000, so the checkpoint has to say it."
            raise CheckpointError(must("config", "rope_parameters.rope_theta", "present", "nothing", todo))
        for name, theta in found_values.items():
            if isinstance(theta, bool) or not isinstance(theta, (int, float)) or not 0 < theta <= LARGEST:
                raise CheckpointError(must("config", name, "a number above 0", repr(theta), SAME_RELEASE + "."))
        if len(set(found_values.values())) > 1:
            text = " and ".join(f"{name}={value}" for name, value in found_values.items())
            raise CheckpointError(must("config", "rope_theta", "one value", text, "Remove the wrong one."))
        return float(next(iter(found_values.values())))
