"""The whole grid of feature fusion, of which test_feature_fusion.py runs a sample."""

from __future__ import annotations

import itertools

import fusion_cases as cases
import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("dtype", "form"), list(itertools.product(cases.DTYPES, cases.FORMATS)))
def test_feature_fusion_keeps_its_promises_everywhere(dtype: str, form: str) -> None:
    chosen = [case for case in cases.grid() if (case.dtype, case.format) == (dtype, form)]
    assert len(chosen) == 16
    broken = {str(case): what for case in chosen if (what := cases.broken_promise(case, range(case.rows)))}
    assert broken == {}
