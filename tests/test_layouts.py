"""Every layout of a checkpoint, whole or quantised, gives the same model."""

from __future__ import annotations

from itertools import product

import agreement
import mlx.core as mx
import numpy as np
import pytest
import reference
from faults import TOKENS, WHOLE, drafted, edit_config, logits_of, put, told
from tiny import (
    LAYOUTS,
    Quantisation,
    TargetSpec,
    drafter_config,
    drafter_weights,
    rounded,
    target_config,
    target_weights,
    text_config,
    tiny_pair,
    tiny_specs,
    vision_tensors,
    write_drafter,
    write_target,
)

import dflash_mlx
from dflash_mlx import CheckpointError, load


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_bits(layout, dtype, tmp_path):
    spec = TargetSpec(**WHOLE)
    expected = logits_of(write_target(tmp_path / "first", spec, "transformers", dtype), dtype)
    found = logits_of(write_target(tmp_path / "other", spec, layout, dtype), dtype)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("layout", ["transformers", "mlx-lm", "mlx-vlm"])
def test_shards_with_an_index_give_the_same_bits_as_one_file(layout, tmp_path):
    target, drafter = tiny_specs(**WHOLE, drafter_intermediate=384)
    one, many = (write_target(tmp_path / str(n), target, layout, shards=n) for n in (1, 5))
    assert np.array_equal(logits_of(one), logits_of(many))
    parts = (write_drafter(tmp_path / f"drafter{n}", drafter, shards=n) for n in (1, 3))
    first, second = (drafted(one, part) for part in parts)
    assert np.array_equal(first, second)


GRID = [
    (layout, Quantisation(bits, group_size, embedding, head))
    for layout in ("transformers", "flat", "mlx-vlm")
    for bits, group_size in product((4, 6, 8), (32, 64, 128))
    for embedding, head in product((True, False), repeat=2)
]
SAMPLE = GRID[::5]  # 5 meets every layout, width, group and choice of embedding and head


def form(case):
    layout, how = case
    parts = [f"{how.bits}-bit", f"group {how.group_size}", how.embedding * "embedding", how.head * "head"]
    return " ".join(filter(None, [layout, *parts]))


def check_quantised(layout, how, tmp_path):
    spec = TargetSpec(**WHOLE)
    expected = logits_of(write_target(tmp_path / "first", spec, "mlx-lm", quantisation=how))
    found = logits_of(write_target(tmp_path / "other", spec, layout, quantisation=how))
    assert np.array_equal(found, expected)
    assert agreement.distance(found, logits_of(write_target(tmp_path / "plain", spec))) > 1e-2


@pytest.mark.parametrize("case", SAMPLE, ids=form)
def test_quantised_layouts_give_the_same_bits(case, tmp_path):
    """A fifth of the grid; the slow suite runs all of it."""
    check_quantised(*case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", GRID, ids=form)
def test_quantised_layouts_give_the_same_bits_over_the_whole_grid(case, tmp_path):
    check_quantised(*case, tmp_path)


def test_the_sample_of_the_grid_meets_every_value():
    for of in (lambda c: c[0], lambda c: c[1].bits, lambda c: c[1].group_size, lambda c: (c[1].embedding, c[1].head)):
        assert {of(case) for case in SAMPLE} == {of(case) for case in GRID}
    print(f"{len(SAMPLE)} of {len(GRID)} cases")


def dequantised(weights: dict[str, np.ndarray], how: Quantisation, dtype: str) -> dict[str, np.ndarray]:
    """The float32 values that quantised weights stand for, module by module."""
    result = {}
    for name, array in weights.items():
        module = name.removesuffix(".weight")
        kept = {"model.embed_tokens": how.embedding, "lm_head": how.head}.get(module, True)
        form = how.overrides.get(module, {"bits": how.bits, "group_size": how.group_size} if kept else False)
        if array.ndim == 1 or not form:
            result[name] = rounded(array, dtype)
            continue
        parts = mx.quantize(mx.array(array).astype(getattr(mx, dtype)), form["group_size"], form["bits"])
        result[name] = np.array(mx.dequantize(*parts, form["group_size"], form["bits"]).astype(mx.float32))
    return result


OVERRIDES = {
    "model.layers.0.self_attn.o_proj": {"bits": 8, "group_size": 32},
    "model.layers.1.mlp.down_proj": {"bits": 6, "group_size": 128},
    "model.layers.2.self_attn.q_proj": False,
    "model.embed_tokens": {"bits": 8, "group_size": 64},
}


@pytest.mark.parametrize("layout", ["transformers", "flat", "mlx-lm", "mlx-vlm"])
def test_each_module_is_read_as_its_override_says(layout, tmp_path):
    """Paths in the layout's own naming, mixed bits, mixed groups, one module left whole."""
    spec, how = TargetSpec(**WHOLE), Quantisation(4, 64, head=False, overrides=OVERRIDES)
    weights = dequantised(target_weights(spec), how, "float32")
    expected, _ = reference.target_forward(text_config(spec), weights, TOKENS)
    found = logits_of(write_target(tmp_path / "target", spec, layout, quantisation=how))
    agreement.agree(found, expected)


@pytest.mark.parametrize(
    "how",
    [
        None,
        Quantisation(4, 64),
        Quantisation(8, 128),
        Quantisation(4, 64, overrides={"encoder.fc": {"bits": 8, "group_size": 32}, "layers.1.mlp.up_proj": False}),
    ],
    ids=["whole", "4-bit", "8-bit", "mixed"],
)
@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_drafter_loads_with_and_without_prefix_whole_and_quantised(prefix, how, tmp_path):
    target, spec = tiny_specs(**WHOLE, drafter_intermediate=384)
    folder = write_target(tmp_path / "target", target)
    found = drafted(folder, write_drafter(tmp_path / "drafter", spec, prefix=prefix, quantisation=how))
    weights = drafter_weights(spec) if how is None else dequantised(drafter_weights(spec), how, "float32")
    check_drafted(found, spec, weights, target_weights(target))


def check_drafted(found, spec, weights, target):
    """What `faults.drafted` drafts, by the formulas."""
    features = np.random.RandomState(1).standard_normal((len(TOKENS), 3 * spec.hidden)).astype(np.float32)
    for logits, end in zip(found, (4, 5, 12), strict=True):
        block = [TOKENS[end]] + [spec.mask_token] * (spec.block - 1)
        table, head = target["model.embed_tokens.weight"], target["lm_head.weight"]
        agreement.agree(
            logits, reference.drafter_forward(drafter_config(spec), weights, table, head, features[:end], block)
        )


@pytest.mark.parametrize(("embedding", "head"), [(True, False), (False, True), (True, True)])
def test_a_drafter_reads_the_raw_table_and_head_of_a_quantised_target(embedding, head, tmp_path):
    target, spec = tiny_specs(**WHOLE)
    how = Quantisation(4, 64, embedding, head)
    first = write_target(tmp_path / "target", target, "mlx-lm", quantisation=how)
    found = drafted(first, write_drafter(tmp_path / "drafter", spec))
    check_drafted(found, spec, drafter_weights(spec), dequantised(target_weights(target), how, "float32"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_drafter_in_half_precision_stays_near_its_float32_self(dtype, tmp_path):
    """Within 32 units of the dtype's rounding of the largest logit."""
    target, drafter = tiny_specs(**WHOLE)
    whole = drafted(write_target(tmp_path / "t32", target), write_drafter(tmp_path / "d32", drafter))
    halves = write_target(tmp_path / "t16", target, dtype=dtype), write_drafter(tmp_path / "d16", drafter, dtype)
    unit = {"float16": 2**-11, "bfloat16": 2**-8}[dtype]
    agreement.agree(drafted(*halves, dtype), whole, 32 * unit * np.abs(whole).max())


def test_a_drafter_of_another_dtype_drafts_and_changes_no_token(tmp_path):
    target, drafter = tiny_specs(**WHOLE, favoured=2)
    first = write_target(tmp_path / "target", target, dtype="bfloat16")
    pair = load(first, draft=write_drafter(tmp_path / "drafter", drafter, "float16"))
    found = dflash_mlx.generate(pair, [1, 2, 3], max_tokens=40, draft_length=15)
    assert found.tokens == dflash_mlx.generate(pair.without_drafter(), [1, 2, 3], max_tokens=40).tokens
    assert found.stats.mean_accepted > 0


def test_a_tied_target_needs_no_head_and_its_drafter_reads_the_table(tmp_path):
    target, drafter = tiny_specs(**WHOLE, tied=True)
    folder = write_target(tmp_path / "target", target)
    expected, _ = reference.target_forward(text_config(target), target_weights(target), TOKENS)
    agreement.agree(logits_of(folder), expected)
    assert np.isfinite(drafted(folder, write_drafter(tmp_path / "drafter", drafter))).all()


def test_a_layer_without_rope_keeps_none_and_the_config_decides_which(tmp_path):
    """NoPE on sliding layers and RoPE on full ones: `layer_rope_theta` is followed, not the layer's kind."""
    spec = TargetSpec(**WHOLE, rope_layers=(False, True, False, True))
    expected, _ = reference.target_forward(text_config(spec), target_weights(spec), TOKENS)
    agreement.agree(logits_of(write_target(tmp_path / "t", spec)), expected)


def test_a_raw_query_scale_is_never_applied_as_it_stands(tmp_path):
    """The older flat schema writes qk_scale_factor * sqrt(head_dim): today's factor is meant."""
    spec = TargetSpec(**WHOLE)
    raw = target_config(spec, "legacy")
    assert raw["qk_scale_factor"] > 5 * spec.qk_scale
    found = logits_of(write_target(tmp_path / "legacy", spec, "legacy"))
    assert np.array_equal(found, logits_of(write_target(tmp_path / "today", spec)))


def test_the_older_schema_may_state_the_final_query_factor(tmp_path):
    spec = TargetSpec(**WHOLE)
    folder = write_target(tmp_path / "legacy", spec, "legacy")
    edit_config(folder, put(scale_query_by=spec.qk_scale, qk_scale_factor=1.0))
    assert np.array_equal(logits_of(folder), logits_of(write_target(tmp_path / "today", spec)))


@pytest.mark.parametrize("layout", ["transformers", "flat", "mlx-lm"])
def test_a_large_query_factor_of_todays_schema_is_applied_as_it_stands(layout, tmp_path):
    """Larger than the root of the head size, as a raw one would be: the schema tells them apart, not the size."""
    spec = TargetSpec(**WHOLE, qk_scale=9.5)
    expected, _ = reference.target_forward(text_config(spec), target_weights(spec), TOKENS)
    agreement.agree(logits_of(write_target(tmp_path / "target", spec, layout)), expected)


@pytest.mark.parametrize("switch", ["use_qk_norm", "use_attn_output_gate", "normalize_tok_embeddings"])
def test_a_variant_of_the_older_schema_that_is_not_built_is_refused(switch, tmp_path):
    spec = TargetSpec(**WHOLE)
    folder = write_target(tmp_path / "legacy", spec, "legacy")
    edit_config(folder, lambda config, _: config.update({switch: None}))
    assert np.isfinite(logits_of(folder)).all()
    edit_config(folder, put(**{switch: False}))
    with pytest.raises(CheckpointError) as error:
        load(folder, draft=None)
    told(error, switch, "true", "False")


def test_vision_tensors_are_skipped_with_one_line_that_says_so(tmp_path):
    first, second = tiny_pair(tmp_path, **WHOLE)
    notes = [note for note in load(first, draft=second).notes if "vision" in note]
    assert len(notes) == 1
    assert f"{len(vision_tensors('', 128))} vision tensors skipped" in notes[0]
    assert "\n" not in notes[0]
    text_only = write_target(tmp_path / "text", TargetSpec(**WHOLE), "mlx-lm")
    assert not [note for note in load(text_only, draft=None).notes if "vision" in note]
