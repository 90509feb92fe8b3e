"""What the tests of loading share: sizes that every quantisation divides, edits of a folder, the form of a message."""

from __future__ import annotations

import json
import re
from pathlib import Path

import agreement
import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.loading import load_drafter, load_target

BAD = np.float32("nan")
WHOLE = {"vocab": 61, "hidden": 128, "intermediate": 256, "heads": (8, 2), "head_dim": 32, "window": 9}  # 128 divides
TOKENS = [3, 5, 8, 13, 21, 34, 55, 60, 1, 2, 0, 7, 9]


def logits_of(folder: Path, dtype: str = "float32") -> np.ndarray:
    return agreement.run_target(load_target(folder), TOKENS, (0,), dtype=getattr(mx, dtype))[0]


def drafted(target_folder: Path, drafter_folder: Path, dtype: str = "float32") -> np.ndarray:
    target = load_target(target_folder)
    drafter = load_drafter(drafter_folder, target.config)
    width = len(drafter.config.taps) * drafter.config.hidden_size
    features = np.random.RandomState(1).standard_normal((len(TOKENS), width)).astype(np.float32)
    return agreement.run_blocks(target, drafter, np.array(TOKENS), features, [4, 1, 7], getattr(mx, dtype))


def told(error: pytest.ExceptionInfo[BaseException], *parts: str) -> None:
    """The message has the one form of this project, and these parts in this order."""
    text = str(error.value)
    assert re.fullmatch(r"\[\w+\] .+ must be .+ but got .+\. .+\.", text, re.DOTALL), text
    assert re.search(".*".join(re.escape(part) for part in parts), text, re.DOTALL), text


def edit_config(folder: Path, edit) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    edit(config, config.get("text_config", config))
    path.write_text(json.dumps(config))


def put(**fields):
    """An edit of the text fields: None removes one."""

    def edit(_, text):
        for name, value in fields.items():
            text.pop(name) if value is None else text.update({name: value})

    return edit


def changed(weights: dict[str, np.ndarray], name: str, value) -> dict[str, np.ndarray]:
    """The weights with one tensor removed (None), replaced or added."""
    result = {key: array for key, array in weights.items() if key != name}
    return result if value is None else result | {name: value}
