"""A kernel serves only where it was found right and not slower; each fault ends in stock, with its reason."""

from __future__ import annotations

from dataclasses import replace

import faulty_devices as devices
import pytest

from dflash_mlx.kernels import apart, qualify
from dflash_mlx.kernels.block_attention import EVERYTHING
from dflash_mlx.kernels.places import AttentionPlace, ContextPlace, FeaturePlace, Place, as_data, from_data
from dflash_mlx.kernels.serving import CONTEXT_ROWS, DRAFTER, FEATURE, TARGET_FULL, TARGET_SLIDING

pytestmark = pytest.mark.kernels

SLIDING = AttentionPlace(TARGET_SLIDING, "bfloat16", 4, 2, 16, 48, 11, True, 0.5, 3)
PLACES: dict[str, Place] = {
    "sliding": SLIDING,
    "full, f16": AttentionPlace(TARGET_FULL, "float16", 16, 1, 32, 256, EVERYTHING, True, 0.2, 1),
    "drafter, f32": AttentionPlace(DRAFTER, "float32", 8, 2, 16, 48, 12, False, 0.25, 2),
    "feature, f32": FeaturePlace(FEATURE, "float32", 3, 64, 0, 0, 1e-5),
    "feature, 4 bits": FeaturePlace(FEATURE, "bfloat16", 2, 64, 4, 32, 1e-5),
    "context": ContextPlace(CONTEXT_ROWS, "float32", 64, 2, 2, 16, 5e5, 0, 0, 1e-5),
}


def judged(place: Place, device: devices.Harness, steps: list[str] | None = None) -> qualify.Verdict:
    """The verdict on a place, in this process."""
    said = [] if steps is None else steps
    return qualify.qualify(as_data(place), apart.trial_of(place), device, said.append, repeats=1)


@pytest.mark.parametrize("name", PLACES)
def test_the_shipped_kernels_qualify_for_all_rows(name: str) -> None:
    verdict = judged(PLACES[name], devices.Harness())
    assert (verdict.why, verdict.agrees, verdict.rows) == ("", True, (1, 16))
    assert verdict.row_bits_equal is (None if name.startswith("drafter") else True)
    assert {entry["rows"] for entry in verdict.times} == set(qualify.ROWS)
    assert all(entry["error"] <= entry["allowed"] for entry in verdict.errors)
    assert {1, 16} <= {entry["rows"] for entry in verdict.errors}


@pytest.mark.parametrize(
    ("device", "why"),
    [
        (devices.WrongRow, "error 0.5 where "),
        (devices.WrongBeyond8, "rows"),
        (devices.NotANumber, "NaN or infinity at "),
        (devices.Slow, "it is slower: "),
        (devices.Refuses, "it was refused: [GatherMM::eval] Currently only supports float32."),
        (devices.DoesNotCompile, "it was refused: "),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("name", ["sliding", "feature, f32"])
def test_a_fault_ends_in_stock_with_its_reason(name: str, device: type[devices.Harness], why: str) -> None:
    verdict = judged(PLACES[name], device())
    assert verdict.rows == (1, 0)
    assert why in verdict.why
    assert verdict.agrees is (device is devices.Slow)


@pytest.mark.parametrize("device", [devices.WrongRow, devices.NotANumber])
def test_wrong_keys_and_values_of_the_context_are_caught(device: type[devices.Harness]) -> None:
    verdict = judged(PLACES["context"], device())
    assert verdict.why.startswith(("error ", "NaN or infinity at "))
    assert (verdict.agrees, verdict.rows, verdict.times) == (False, (1, 0), [])


def test_a_kernel_that_is_wrong_beyond_8_rows_is_caught_at_16() -> None:
    verdict = judged(SLIDING, devices.WrongBeyond8())
    assert verdict.why.endswith(", 16 rows")
    assert verdict.why.startswith("error ")
    assert max(entry["rows"] for entry in verdict.errors[:-1]) <= 8


def test_a_kernel_that_loses_at_few_rows_serves_the_others() -> None:
    verdict = judged(SLIDING, devices.SlowForFewRows())
    assert (verdict.why, verdict.agrees, verdict.rows) == ("", True, (4, 16))


def test_each_step_is_named_before_it_runs() -> None:
    steps: list[str] = []
    judged(SLIDING, devices.Harness(), steps)
    assert steps[0] == "first position, 1 rows"
    assert any(step.startswith("a chunk that is empty for most rows") for step in steps)
    assert steps[-1] == f"timing, 16 rows, context {3 * 48 + 5}"


def timed(kernel: dict[int, float], stock: dict[int, float]) -> list[dict[str, float]]:
    return [{"rows": rows, "context": 0, "kernel_s": kernel[rows], "stock_s": stock[rows]} for rows in qualify.ROWS]


EVEN = dict.fromkeys(qualify.ROWS, 1.0)


@pytest.mark.parametrize(
    ("kernel", "rows"),
    [
        (EVEN, (1, 16)),  # not slower
        (EVEN | {1: 1.09, 16: 0.5}, (1, 16)),  # one law for all rows is worth 9 % at one of them
        (EVEN | {1: 1.2, 8: 0.2}, (2, 16)),
        (EVEN | {1: 9.0, 4: 0.5, 6: 0.5, 8: 0.5, 12: 9.0, 16: 0.9}, (2, 8)),
        (EVEN | {1: 0.9, 2: 9.0, 4: 0.8, 6: 9.0, 8: 9.0, 12: 9.0, 16: 9.0}, (4, 4)),
        (dict.fromkeys(qualify.ROWS, 1.01), (1, 0)),
    ],
)
def test_the_range_of_rows_follows_the_times(kernel: dict[int, float], rows: tuple[int, int]) -> None:
    assert qualify.best_range(timed(kernel, EVEN)) == rows


def test_the_exact_result_is_not_made_by_the_operations_that_are_judged() -> None:
    """Attention with a key per window is that key's value; a fused row of equal numbers has the size of its norm."""
    place = replace(SLIDING, span=1, dtype="float32")
    trial = apart.trial_of(place)
    case = next(case for case in trial.cases(devices.Harness()) if case.name == "far on")
    exact = case.exact()
    queries, _, values = case.stock.args[:3]  # type: ignore[attr-defined]
    position = case.stock.args[3].block.first[0]  # type: ignore[attr-defined]
    for row in range(case.rows):
        for head in range(place.heads):
            seen = values[0, head // 2, (position + row) % place.capacity].tolist()
            assert exact[0, head, row].tolist() == pytest.approx(seen)
    assert queries.shape[2] == case.rows


@pytest.mark.parametrize("name", PLACES)
def test_a_place_comes_back_from_its_data(name: str) -> None:
    assert from_data(as_data(PLACES[name])) == PLACES[name]
