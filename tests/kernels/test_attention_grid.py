"""The whole grid of block attention, of which test_block_attention.py runs a sample."""

from __future__ import annotations

import itertools

import attention_cases as cases
import pytest

from dflash_mlx.kernels.block_attention import HEAD_SIZES

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("dtype", "size", "group"), list(itertools.product(cases.DTYPES, HEAD_SIZES, cases.GROUPS)))
def test_block_attention_keeps_its_promises_everywhere(dtype: str, size: int, group: int) -> None:
    chosen = [case for case in cases.grid() if (case.dtype, case.size, case.group) == (dtype, size, group)]
    assert len(chosen) == 32
    broken = {str(case): what for case in chosen if (what := cases.broken_promise(case, range(case.rows)))}
    assert broken == {}
