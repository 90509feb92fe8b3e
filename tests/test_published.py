"""The tables of chips and published figures: each row has its source, known fields, and figures that can be."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_mlx.chips import chips, find_chip
from dflash_mlx.resources import find
from dflash_mlx.toml_files import read_toml

PUBLISHED = read_toml(find("bench/published.toml"))
TEXT, NUMBER, COUNT = (str,), (int, float), (int,)
NEEDED = {
    "figure": {"chip": TEXT, "engine": TEXT, "model": TEXT, "quantisation": TEXT, "prompt": TEXT, "source": TEXT},
    "verify": {"chip": TEXT, "engine": TEXT, "model": TEXT, "quantisation": TEXT, "ms": (dict,), "source": TEXT},
    "acceptance": {
        "text": TEXT,
        "drafter": TEXT,
        "draft_length": COUNT,
        "mean_length": NUMBER,
        "setting": TEXT,
        "source": TEXT,
    },
}
ALLOWED = {
    "figure": {
        "gpu_cores": COUNT,
        "memory_gb": COUNT,
        "bits": COUNT,
        "file_gb": NUMBER,
        "context": COUNT,
        "note": TEXT,
        "plain_tok_s": NUMBER,
        "drafted_tok_s": NUMBER,
        "drafter": TEXT,
        "draft_length": COUNT,
        "mean_length": NUMBER,
        "streams": COUNT,
        "first_token_s": NUMBER,
    },
    "verify": {"bits": COUNT, "note": TEXT},
    "acceptance": {},
}
ROWS = [(kind, row) for kind in NEEDED for row in PUBLISHED[kind]]


def test_there_are_no_other_tables():
    assert set(PUBLISHED) == set(NEEDED)
    assert all(PUBLISHED[kind] for kind in NEEDED)


@pytest.mark.parametrize(("kind", "row"), ROWS, ids=[f"{kind} {n}" for n, (kind, _) in enumerate(ROWS)])
def test_a_published_row_has_a_source_and_known_fields(kind, row):
    known = NEEDED[kind] | ALLOWED[kind]
    assert set(NEEDED[kind]) <= set(row) <= set(known)
    assert all(type(value) in known[key] for key, value in row.items())
    assert row["source"].strip()
    if "chip" in row:
        assert find_chip(row["chip"], row.get("gpu_cores")) is not None


def test_a_published_rate_says_how_it_was_drafted():
    for row in PUBLISHED["figure"]:
        assert "plain_tok_s" in row or "drafted_tok_s" in row
        assert ("drafted_tok_s" in row) == ("drafter" in row)
        assert not ("bits" in row and "file_gb" in row)


def test_mean_lengths_are_between_one_and_the_block():
    for row in [*PUBLISHED["acceptance"], *(row for row in PUBLISHED["figure"] if "mean_length" in row)]:
        assert 1 <= row["mean_length"] <= row["draft_length"] + 1


def test_chips_have_sources_and_cover_the_families_m1_to_m5():
    assert {chip.generation for chip in chips()} == {1, 2, 3, 4, 5}
    for chip in chips():
        assert chip.name.startswith(f"M{chip.generation}")
        assert chip.source.strip()
        assert chip.tflops_source.strip()
        assert chip.neural_accelerators == (chip.generation == 5)
        assert list(chip.gpu_cores) == sorted(chip.gpu_cores)
        assert 60 <= chip.bandwidth_gb_s <= 1300
    variants = [(chip.name, cores) for chip in chips() for cores in chip.gpu_cores]
    assert len(variants) == len(set(variants))


def test_bandwidth_and_arithmetic_grow_within_a_family():
    for generation in range(1, 6):
        family = [chip for chip in chips() if chip.generation == generation]
        family.sort(key=lambda chip: max(chip.gpu_cores))
        assert [chip.bandwidth_gb_s for chip in family] == sorted(chip.bandwidth_gb_s for chip in family)
        assert [chip.fp32_tflops for chip in family] == sorted(chip.fp32_tflops for chip in family)


def test_the_tables_stand_where_the_wheel_takes_them_from():
    assert find("bench/chips.toml").parent == Path(__file__).resolve().parent.parent / "bench"
