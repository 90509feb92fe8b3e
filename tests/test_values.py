"""An argument of a tool call is text or JSON as the tool's schema says."""

from __future__ import annotations

import pytest

from dflash_mlx.chat.values import value_of

VALUES = [
    ("5", {"type": "string"}, "5"),
    ('"5"', {"type": "string"}, '"5"'),
    ("5", {"type": "integer"}, 5),
    ("5", None, 5),
    ("5", {"type": ["string", "null"]}, "5"),
    ("null", {"type": ["string", "null"]}, None),
    ("5", {"type": ["string", "integer"]}, 5),
    ("five", {"type": "integer"}, "five"),
    ("5", {"enum": ["5", "6"]}, "5"),
    ("6", {"anyOf": [{"type": "string"}, {"type": "boolean"}]}, "6"),
    ("true", {"anyOf": [{"type": "string"}, {"type": "boolean"}]}, True),
    ("[1]", {"$ref": "#/$defs/name"}, "[1]"),
    ("[1]", {"$ref": "#/$defs/loop"}, [1]),
    ("NaN", {"type": "number"}, "NaN"),
    ("[" * 100_000, {}, "[" * 100_000),
    ("", {}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("text", "schema", "expected"), VALUES)
def test_value_is_what_the_schema_says(text, schema, expected):
    root = {"$defs": {"name": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}}
    found = value_of(text, schema, root)
    assert (type(found), found) == (type(expected), expected)
