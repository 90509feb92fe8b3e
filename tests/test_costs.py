"""The cost model against counts made by hand, against real files, and against the published figures."""

from __future__ import annotations

import math

import pytest
from from_file import script
from tiny import tiny_pair

from dflash_mlx.chips import Chip, find_chip
from dflash_mlx.costs import Costs, Speeds, Work, drafter_parameters, quantised_bytes, target_parameters
from dflash_mlx.loading.build import read_drafter, read_target
from dflash_mlx.resources import find


@pytest.fixture(scope="module")
def comparison():
    return script("bench/cost_model.py")


@pytest.fixture(scope="module")
def muse(comparison):
    return comparison.pair()


def numbers(checkpoint):
    """Parameters of an unquantised checkpoint, from the shapes in its files."""
    return sum(math.prod(tensor.shape) for _, tensor in checkpoint.tensors.values())


def test_parameters_of_the_30b_pair_are_the_published_ones(muse):
    target, drafter = muse
    # q, gate and o; k and v; the MLP; four norms
    layer = 3 * 4096 * 6656 + 2 * 256 * 6656 + 3 * 19968 * 6656 + 4 * 6656
    assert sum(target_parameters(target).values()) == 52 * layer + 2 * 202048 * 6656 + 6656
    assert sum(target_parameters(target).values()) == pytest.approx(27.855e9, rel=1e-4)
    assert sum(drafter_parameters(drafter).values()) == 2_555_985_152


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_those_of_the_files(tmp_path, tied):
    paths = tiny_pair(tmp_path, tied=tied)
    checkpoint, target = read_target(paths[0])
    drafter_checkpoint, drafter = read_drafter(paths[1], target)
    assert sum(target_parameters(target).values()) == numbers(checkpoint)
    assert sum(drafter_parameters(drafter).values()) == numbers(drafter_checkpoint)


def test_bytes_of_the_pocket_pair_are_those_of_its_files():
    checkpoint, target = read_target(find("models/pocket/target"))
    drafter_checkpoint, drafter = read_drafter(find("models/pocket/drafter"), target)
    assert sum(target_parameters(target).values()) == 8_659_200
    costs = Costs.of_files(target, drafter, checkpoint.nbytes, drafter_checkpoint.nbytes, 2)
    assert costs.weight_bytes == costs.drafter_weight_bytes == 2


def test_a_4_bit_forward_of_the_30b_reads_and_computes_what_was_counted_by_hand(muse):
    work = Costs(*muse, quantised_bytes(4)).forward(16, 32768)
    # 52 layers of 30.7 (q, k, v) + 27.3 (gate) + 27.3 (o) + 398.7 (MLP) = 484 M weights; 4.5 bits each.
    assert work["attention"].nbytes + work["mlp"].nbytes == pytest.approx(52 * 484e6 * 0.5625, rel=2e-3)
    assert work["head"].nbytes == pytest.approx(0.757e9, rel=2e-3)
    assert sum(work[part].flops for part in ("attention", "mlp", "head")) == pytest.approx(
        32 * (52 * 484e6 + 1345e6), rel=2e-3
    )
    assert work["logits"].nbytes == 16 * 202048 * 4


def test_keys_and_values_of_the_30b_take_a_kibibyte_a_token_and_layer(muse):
    work = Costs(*muse, quantised_bytes(4)).forward(8, 32768)
    assert work["KV, full layers"].nbytes == 13 * 1024 * (32768 + 8)
    assert work["KV, sliding layers"].nbytes == 39 * 1024 * (2047 + 8)
    assert work["KV, full layers"].flops == pytest.approx(13 * 4.3e9, rel=1e-2)


def test_a_short_context_fills_no_window(muse):
    work = Costs(*muse, quantised_bytes(4)).forward(1, 100)
    assert work["KV, sliding layers"].nbytes == 39 * 1024 * 101


def test_a_draft_reads_the_drafter_and_the_targets_head(muse):
    work = Costs(*muse, quantised_bytes(4)).draft(4, 3, 5000)
    projection = 5 * 6656 * 6656
    assert work["projection"] == Work(2 * projection, 2 * projection * 3)
    norms = 5 * (2 * 6656 + 2 * 128) + 2 * 6656
    assert work["drafter"].nbytes == 2 * (2_555_985_152 - projection - norms)
    assert work["drafter"].flops == 4 * work["drafter"].nbytes
    assert work["drafter's head"] == Work(202048 * 6656 * 0.5625, 2 * 202048 * 6656 * 3)
    assert work["drafter's KV"].nbytes == 5 * 2 * 8 * 128 * 2 * (2048 + 4)


def test_a_whole_block_costs_operations_and_no_weights(muse):
    costs = Costs(*muse, quantised_bytes(4))
    narrow, whole = costs.round(3, 5000), costs.round(3, 5000, slots=16)
    assert whole["drafter"].nbytes == narrow["drafter"].nbytes
    assert whole["drafter"].flops == 4 * narrow["drafter"].flops
    assert whole["drafter's head"] == narrow["drafter's head"]


def test_streams_share_weights_and_nothing_else(muse):
    costs = Costs(*muse, quantised_bytes(4))
    alone, four = costs.round(2, 1000), costs.round(2, 1000, streams=4)
    for part in ("attention", "mlp", "head", "drafter", "projection", "drafter's head"):
        assert four[part] == Work(alone[part].nbytes, 4 * alone[part].flops)
    for part in ("KV, full layers", "KV, sliding layers", "logits", "drafter's KV", "drafter's logits"):
        assert four[part] == Work(4 * alone[part].nbytes, 4 * alone[part].flops)


def test_a_plain_round_does_no_drafter_work(muse):
    costs = Costs(*muse, quantised_bytes(4))
    assert costs.round(0, 777) == costs.forward(1, 777)


def test_seconds_are_those_of_reading_or_of_computing():
    speeds = Speeds(bandwidth=100, compute=1000)
    assert speeds.seconds(Work(500, 0)) == 5
    assert speeds.seconds(Work(0, 12000)) == 12
    assert speeds.seconds(Work(500, 12000)) == 13  # 5, 12, 13: a right triangle


def test_a_max_with_fewer_cores_has_less_bandwidth():
    assert find_chip("Apple M4 Max", 32).bandwidth == 410e9
    assert find_chip("Apple M4 Max", 40).bandwidth == find_chip("M4 Max").bandwidth == 546e9
    assert isinstance(find_chip("M1"), Chip)
    assert find_chip("AMD EPYC") is None


def test_predictions_of_plain_decoding_meet_the_published_rates(comparison):
    """On the geometric mean, which docs/measuring.md gives with all rows; single rows are up to 1.7 times off."""
    from dflash_mlx.toml_files import read_toml

    published = read_toml(find("bench/published.toml"))
    plain = list(comparison.plain_rows(published))
    assert len(plain) >= 20
    assert 0.9 < comparison.geometric_mean(plain) < 1.1
    assert 0.85 < comparison.geometric_mean(list(comparison.verify_rows(published))) < 1.15
