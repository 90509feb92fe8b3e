"""Whatever stands in a config file, loading it works or raises one of the project's errors: nothing else, ever."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults import WHOLE
from tiny import Quantisation, tiny_pair

from dflash_mlx import DFlashError, load

VALUES = [None, True, -1, 0, 1.5, 7, 99991, math.nan, "x", "", [], [1], ["x"] * 4, [None] * 4, [[1]] * 4, {}, {"a": 1}]
MIXED = {"model.layers.0.mlp.up_proj": {"bits": 8, "group_size": 32}, "lm_head": False}
FILES = ["target/config.json", "target/generation_config.json", "drafter/config.json"]
SAMPLE = 60


def places(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every field of a config, nested ones too; the vision tower's are not read."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        if key != "vision_config":
            yield (*path, key)
            yield from places(inner, (*path, key))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    tiny_pair(folder, layout="mlx-lm", quantisation=Quantisation(4, 64, overrides=MIXED), eos=(3, 4), **WHOLE)
    return folder


def every_change(folder: Path) -> list[tuple[str, tuple[str, ...], Any]]:
    found = []
    for file in FILES:
        fields = places(json.loads((folder / file).read_text()))
        found += [(file, place, value) for place in fields for value in VALUES]
    return found


def check(folder: Path, changes: list[tuple[str, tuple[str, ...], Any]]) -> None:
    """Load with each change in turn; outcomes are an error of the project or a pair, and both occur."""
    outcomes, wrong = {"loaded": 0, "refused": 0}, []
    for file, place, value in changes:
        path = folder / file
        original = path.read_text()
        config = json.loads(original)
        inner = config
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = value
        if place[0] == "quantization":
            config["quantization_config"] = copy.deepcopy(config["quantization"])
        path.write_text(json.dumps(config))
        try:
            load(folder / "target", draft=folder / "drafter", max_context=64)
            outcomes["loaded"] += 1
        except DFlashError as error:
            outcomes["refused"] += str(error).startswith("[")
        except Exception as error:
            wrong.append(f"{file} {'.'.join(place)} = {value!r} gives {type(error).__name__}: {error}")
        finally:
            path.write_text(original)
    print(f"{len(changes)} changes: {outcomes}")
    assert wrong == []
    assert sum(outcomes.values()) == len(changes)
    assert all(outcomes.values())


def test_a_value_of_any_kind_in_a_config_is_an_error_of_the_project_or_works(folder):
    """A seeded sample; the fuzz suite takes every value in every field."""
    changes = every_change(folder)
    assert len(changes) > 10 * SAMPLE
    check(folder, random.Random(5).sample(changes, SAMPLE))


@pytest.mark.fuzz
def test_every_value_in_every_field_of_a_config_is_an_error_of_the_project_or_works(folder):
    check(folder, every_change(folder))
