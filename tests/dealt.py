"""Fewer cases than each with each: how they are chosen, and whether the settings still meet."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def dealt(*axes: Sequence[Any], of: int | None = None) -> list[Any]:
    """Each value with each as test parameters, of which the default run has some and the slow suite the others.

    The default run has each combination of all axes but the last with one value of the last, dealt out in turn; with
    `of`, it has each `of`-th value.
    """
    parameters = []
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        by_default = (sum(places[:-1]) - places[-1]) % (of or len(axes[-1])) == 0
        values = (axis[at] for axis, at in zip(axes, places, strict=True))
        parameters.append(pytest.param(*values, marks=() if by_default else pytest.mark.slow))
    return parameters


def unmet(cases: Sequence[Any], settings: Sequence[str], together: int) -> list[tuple[Any, ...]]:
    """The values of any `together` settings that no case has at once; the values are those that the cases have."""
    missing = []
    for names in itertools.combinations(settings, together):
        met = {tuple(getattr(case, name) for name in names) for case in cases}
        values = [sorted({getattr(case, name) for case in cases}, key=str) for name in names]
        missing += [each for each in itertools.product(*values) if each not in met]
    return missing
