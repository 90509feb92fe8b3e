"""Feature fusion on the harness: right, the same for a row alone, each weight read once, and few launches."""

from __future__ import annotations

import fusion_cases as cases
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from dflash_mlx.errors import DFlashError
from dflash_mlx.kernels import feature_fusion as launcher
from dflash_mlx.kernels.feature_fusion import (
    ContextWeights,
    Weight,
    context_rows,
    context_rows_ops,
    feature_fusion,
    feature_fusion_ops,
)
from dflash_mlx.kernels.launch import Launch
from dflash_mlx.resources import find
from metal.cpu import CpuDevice
from metal.cpu.assemble import signature, unit
from metal.cpu.build import audit
from metal.cpu.generated import generate

pytestmark = pytest.mark.kernels


class Recorder(CpuDevice):
    """Keeps the launches that it runs."""

    def __init__(self) -> None:
        super().__init__(checked=False)
        self.launches: list[Launch] = []

    def run(self, launch: Launch) -> list[mx.array]:
        self.launches.append(launch)
        return super().run(launch)


@pytest.mark.parametrize("case", cases.sample(), ids=str)
def test_feature_fusion_keeps_its_promises(case: cases.Case) -> None:
    assert cases.broken_promise(case, range(case.rows)) == ""


def test_sample_has_every_kind(notes: list[str]) -> None:
    sample, grid = cases.sample(), cases.grid()
    notes.append(f"feature fusion: {len(sample)} of {len(grid)} cases, from seed {cases.SEED}")
    assert {case.dtype for case in sample} == set(cases.DTYPES)
    assert {cases.FORMATS[case.format][0] for case in sample} == {0, 4, 8}
    assert {cases.FORMATS[case.format][1] for case in sample} == {32, 64, 128}
    assert {case.taps for case in grid} == set(range(1, 9))
    assert min(case.rows for case in sample) < 8 < max(case.rows for case in sample)


def test_width_of_a_real_fc_keeps_the_promises() -> None:
    """Five taps of 6,656 in 4 bits: 520 groups, 65 per slice."""
    rng = np.random.default_rng(1)
    case = cases.Case("bf16", "4 bits, 64", 8, 1)
    fc = cases.weight(rng, case, 32, 5 * 6656)
    taps = [mx.array(rng.standard_normal((8, 6656)).astype(np.float32)).astype(mx.bfloat16) for _ in range(5)]
    device, gain = CpuDevice(checked=False), mx.ones((32,), mx.bfloat16)
    output = feature_fusion(taps, fc, gain, 1e-5, device=device)
    joined = np.concatenate([cases.double(tap) for tap in taps], axis=-1)
    truth = cases.norm(*cases.product(joined, fc), np.ones(32), 1e-5)
    assert cases.error(case, output, truth) <= 1
    alone = feature_fusion([tap[7:] for tap in taps], fc, gain, 1e-5, device=device)
    assert np.array_equal(cases.bits(alone)[0], cases.bits(output)[7])


@pytest.mark.parametrize("form", cases.FORMATS)
def test_twins_agree_and_take_the_same_arguments(form: str) -> None:
    case = cases.Case("f32", form, 5, 7)
    given = cases.data(case)
    feature = feature_fusion_ops(given.taps, given.fc, given.gain, case.eps)
    keys, values = context_rows_ops(given.feature, given.context, case.offset)
    truths = [cases.feature_truth(case, given), *cases.context_truth(case, given)]
    for output, (expected, _) in zip((feature, keys, values), truths, strict=True):
        assert output.shape == expected.shape
        assert np.abs(cases.double(output) - expected).max() < 2e-3 * max(1.0, np.abs(expected).max())


def test_half_types_are_rounded_by_the_twin_more_often_than_by_the_kernel() -> None:
    case = cases.Case("bf16", "floats, 64", 9, 264)
    given = cases.data(case)
    expected, _ = cases.feature_truth(case, given)
    kernel = cases.results(case, given, CpuDevice(checked=False))[0]
    twin = feature_fusion_ops(given.taps, given.fc, given.gain, case.eps)
    errors = [np.abs(cases.double(output) - expected).max() for output in (kernel, twin)]
    assert errors[0] <= errors[1]


def test_integers_are_taken_out_of_words_as_mlx_does() -> None:
    case = cases.Case("f32", "8 bits, 32", 1, 1)
    drawn = cases.weight(np.random.default_rng(0), case, 5, 96)
    wanted = mx.dequantize(drawn.array, drawn.scales, drawn.biases, drawn.group, drawn.bits)
    assert np.allclose(cases.unpacked(drawn)[0], np.array(wanted), atol=1e-6)


@pytest.mark.parametrize("case", cases.sample()[::3], ids=str)
def test_no_private_value_is_used_before_it_is_set(case: cases.Case) -> None:
    given = cases.data(case)
    outputs, again = (cases.results(case, given, CpuDevice(**kind)) for kind in ({"private": True}, {"checked": False}))
    assert all(np.array_equal(cases.bits(one), cases.bits(two)) for one, two in zip(outputs, again, strict=True))


def test_inputs_that_are_not_contiguous_give_the_same_bits() -> None:
    case = cases.sample()[0]
    given = cases.data(case)
    turned = [mx.contiguous(tap.T).T for tap in given.taps]
    one, two = (
        feature_fusion(taps, given.fc, given.gain, case.eps, device=CpuDevice(checked=False))
        for taps in (given.taps, turned)
    )
    assert np.array_equal(cases.bits(one), cases.bits(two))


@pytest.mark.parametrize("case", cases.sample()[::3], ids=str)
def test_text_of_mlx_has_the_signature_and_no_access_escapes_the_checker(case: cases.Case) -> None:
    device = Recorder()
    cases.results(case, cases.data(case), device)
    names = [launch.kernel.name for launch in device.launches]
    assert names == [launcher.PRODUCT, launcher.NORM, launcher.PRODUCT, launcher.KEYS_VALUES]
    for launch in device.launches:
        generated = generate(launch)
        assert generated.typecheck() == ""
        assert generated.parameters() == signature(launch)
        assert audit(unit(launch, typecheck=False)) == []


def test_pipelines_do_not_depend_on_the_rows() -> None:
    """MLX writes another text for inputs of fewer than 8 elements, so all that grow with the rows have more."""
    case = cases.Case("f32", "4 bits, 32", 16, 1)
    given, device = cases.data(case), Recorder()
    for rows in (1, 3, 16):
        cases.results(case, given, device, slice(0, rows))
    units = {(launch.kernel.name, unit(launch, typecheck=False)) for launch in device.launches}
    assert sorted(name for name, _ in units) == sorted([launcher.PRODUCT, launcher.NORM, launcher.KEYS_VALUES])


def test_constants_of_file_and_launcher_are_equal() -> None:
    text = (find("metal") / launcher.FILE).read_text()
    for name in ("TILE", "ROW_TILES", "COLUMN_TILES", "SLICES"):
        assert f"constexpr int {name} = {getattr(launcher, name)};" in text
    assert f"constexpr int SIMDGROUPS = {launcher.NORM_THREADS // 32};" in text


def test_stack_multiplies_as_its_parts_do_and_parts_are_views() -> None:
    layers = [nn.Linear(64, size, bias=False) for size in (5, 7)]
    for made in (layers, [nn.QuantizedLinear.from_linear(layer, 32, 4) for layer in layers]):
        stack = Weight.stack([Weight.of(layer) for layer in made])
        x = mx.random.normal((3, 64))
        wanted = mx.concatenate([layer(x) for layer in made], axis=1)
        assert mx.allclose(stack.times(x), wanted, atol=1e-5)
        assert mx.allclose(stack.part(5, 12).times(x), wanted[:, 5:], atol=1e-5)
        assert (stack.outputs, stack.inputs) == (12, 64)
        assert stack.nbytes == sum(Weight.of(layer).nbytes for layer in made)


DENSE = Weight(mx.zeros((64, 192)))
QUANTISED = Weight(mx.zeros((64, 24), mx.uint32), mx.zeros((64, 3)), mx.zeros((64, 3)), 64, 4)
REFUSED = {
    "no taps": ({"taps": []}, "taps must be 1 to 8 arrays but got 0"),
    "flat taps": ({"taps": [mx.zeros((64,))]}, "taps must be of shape [M, E] but got (64,)"),
    "unequal taps": (
        {"taps": [mx.zeros((4, 64)), mx.zeros((3, 64)), mx.zeros((4, 64))]},
        "taps must be all of shape (4, 64) but got [(3, 64), (4, 64)]",
    ),
    "rows": ({"taps": [mx.zeros((17, 64))] * 3}, "rows must be between 1 and 16 but got 17"),
    "type": (
        {"taps": [mx.zeros((4, 64), mx.int32)] * 3},
        "type must be float32, float16 or bfloat16 for all taps but got",
    ),
    "bits": ({"fc": Weight(mx.zeros((64, 36), mx.uint32), group=64, bits=6)}, "bits must be one of 4, 8 but got 6"),
    "group": (
        {"fc": Weight(mx.zeros((64, 24), mx.uint32), group=16, bits=4)},
        "group must be one of 32, 64, 128 but got 16",
    ),
    "no group": (
        {"fc": Weight(mx.zeros((64, 24), mx.uint32), bits=4)},
        "group must be one of 32, 64, 128 but got 0",
    ),
    "width": ({"taps": [mx.zeros((4, 48))] * 4}, "width must be a multiple of 32 but got 48"),
    "inputs": ({"taps": [mx.zeros((4, 64))] * 2}, "inputs of the weight must be 128 but got 192"),
    "type of the weight": (
        {"fc": Weight(mx.zeros((64, 192), mx.float16))},
        "type of the weight must be float32 but got float16",
    ),
    "scales": (
        {"fc": Weight(QUANTISED.array, None, QUANTISED.biases, 64, 4)},
        "scales must be of shape (64, 3) and float32 but got None",
    ),
    "gain": ({"gain": mx.zeros((63,))}, "gain must be of shape (64,) and float32 but got (63,) and float32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    changed, message = REFUSED[name]
    given = {"taps": [mx.zeros((4, 64))] * 3, "fc": DENSE, "gain": mx.zeros((64,))} | changed
    for fuse in (feature_fusion, feature_fusion_ops):
        with pytest.raises(DFlashError) as caught:
            fuse(given["taps"], given["fc"], given["gain"], 1e-5)
        assert str(caught.value).startswith(f"[feature_fusion] {message}")


STACK = Weight(mx.zeros((2 * 2 * 3 * 8, 64)))
REFUSED_CONTEXT = {
    "rows": (
        {"weights": ContextWeights(STACK, mx.zeros((2, 8)), 2, 1e4, 1e-5)},
        "rows of the stack must be 64 but got 96",
    ),
    "size": ({"weights": ContextWeights(STACK, mx.zeros((2, 9)), 3, 1e4, 1e-5)}, "head size must be even but got 9"),
    "gains": (
        {"weights": ContextWeights(STACK, mx.zeros((2, 8), mx.float16), 3, 1e4, 1e-5)},
        "gains must be of shape (2, 8) and float32 but got (2, 8) and float16",
    ),
}


@pytest.mark.parametrize("name", REFUSED_CONTEXT)
def test_context_is_refused(name: str) -> None:
    changed, message = REFUSED_CONTEXT[name]
    for make in (context_rows, context_rows_ops):
        with pytest.raises(DFlashError) as caught:
            make(mx.zeros((4, 64)), changed["weights"], 0)
        assert str(caught.value).startswith(f"[feature_fusion] {message}")


def test_layers_that_the_kernel_is_not_made_for_are_refused() -> None:
    layer = nn.Linear(64, 64, bias=False)
    refusals = {
        "the layer must be without an output bias": lambda: Weight.of(nn.Linear(64, 64)),
        "quantisation must be affine but got mxfp4": lambda: Weight.of(
            nn.QuantizedLinear.from_linear(layer, 32, 4, mode="mxfp4")
        ),
        "stacked weights must be of one width and format": lambda: Weight.stack([DENSE, QUANTISED]),
    }
    for message, refused in refusals.items():
        with pytest.raises(DFlashError) as caught:
            refused()
        assert str(caught.value).startswith(f"[feature_fusion] {message}")
