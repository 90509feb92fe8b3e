"""One argument of a tool call: text that is a string, or JSON, as the tool's schema says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

KINDS: dict[type, tuple[str, ...]] = {
    str: ("string",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}
MOST_REFERENCES = 16


def value_of(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """What a parameter's text stands for.

    Where the schema allows strings alone it is the text itself, also if it reads like a number. Where it allows
    strings among other kinds, JSON of one of those kinds wins. Where it says nothing, JSON wins over text.

    Args:
        text: as it stands between the tags.
        schema: of this parameter; `None` where there is none.
        root: the schema that `$ref` refers to.
    """
    kinds = allowed(schema, root)
    if kinds == {"string"}:
        return text
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text
    fits = kinds is None or not kinds.isdisjoint(KINDS[type(value)])
    return text if not fits and kinds is not None and "string" in kinds else value


def allowed(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str] | None:
    """The kinds of values that a schema allows; `None` where it leaves them open."""
    if not isinstance(schema, Mapping) or depth > MOST_REFERENCES:
        return None
    if "$ref" in schema:
        return allowed(_referred(schema["$ref"], root), root, depth + 1)
    if "type" in schema:
        given = schema["type"]
        return {given} if isinstance(given, str) else set(given)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        return {kind for value in values for kind in KINDS[type(value)]}
    for name in ("anyOf", "oneOf", "allOf"):
        if name in schema:
            parts = [allowed(part, root, depth + 1) for part in schema[name]]
            return None if None in parts else {kind for part in parts for kind in part or ()}
    return None


def _referred(reference: Any, root: Mapping[str, Any]) -> Any:
    """What a reference inside the same schema points to, or `None`."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = root
    for name in reference[1:].split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
