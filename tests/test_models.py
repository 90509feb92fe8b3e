"""The models compute what transformers computes, and what the formulas say."""

from __future__ import annotations

import agreement
import mlx.core as mx
import numpy as np
import pytest
import reference
from dealt import dealt
from tiny import (
    FULL,
    SLIDING,
    Quantisation,
    drafter_config,
    drafter_weights,
    rounded,
    target_weights,
    text_config,
    tiny_models,
    tiny_specs,
    write_target,
)

from dflash_mlx.loading import load_target
from dflash_mlx.models.layers import CentredRMSNorm

CASES = agreement.names()


@pytest.mark.parametrize("name", CASES)
def test_the_reference_is_transformers_in_float64(name):
    """The brute-force version, written from the formulas, is what the other tests lean on."""
    case = agreement.read(name)
    tokens, weights = case.arrays["tokens"], target_weights(case.target)
    logits, taps = reference.target_forward(text_config(case.target), weights, tokens, case.drafter.taps)
    draft = drafter_weights(case.drafter)
    blocks = _reference_blocks(case, weights, draft, case.arrays["features"], case.facts["rows"])
    found = {"logits": logits, "features": np.concatenate(taps, axis=-1), "blocks": blocks}
    for what, array in found.items():  # the files hold float32
        agreement.agree(array, case.arrays[what], 1e-6 * np.abs(array).max())


@pytest.mark.parametrize("name", CASES)
def test_target_logits_and_taps_are_those_of_transformers(name, tmp_path):
    case = agreement.read(name)
    target, _ = agreement.load(case, tmp_path)
    logits, features = agreement.run_target(target, case.arrays["tokens"], case.drafter.taps)
    agreement.agree(logits, case.arrays["logits"], agreement.allowed(case, "logits"))
    agreement.agree(features, case.arrays["features"], agreement.allowed(case, "features"))


@pytest.mark.parametrize("name", CASES)
def test_drafted_blocks_are_those_of_transformers_in_every_round(name, tmp_path):
    """Rounds of many rows, of a few, and of exactly one after the window has wrapped."""
    case = agreement.read(name)
    target, drafter = agreement.load(case, tmp_path)
    found = agreement.run_blocks(target, drafter, case.arrays["tokens"], case.arrays["features"], case.facts["rows"])
    agreement.agree(found, case.arrays["blocks"], agreement.allowed(case, "blocks"))


@pytest.mark.parametrize(("name", "run"), dealt(CASES, ("ended", "assisted")))
def test_a_greedy_run_repeats_the_rounds_of_assisted_generation(name, run, tmp_path):
    agreement.check_assisted(agreement.read(name), run, tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_loses_at_most_twice_what_transformers_loses(name, tmp_path):
    """Against float64 with the same rounded weights, so that only the arithmetic is judged."""
    case = agreement.read(name)
    tokens, taps, rows = case.arrays["tokens"], case.drafter.taps, case.facts["rows"]
    weights = {key: rounded(array, "bfloat16") for key, array in target_weights(case.target).items()}
    exact, exact_taps = reference.target_forward(text_config(case.target), weights, tokens, taps)
    target, drafter = agreement.load(case, tmp_path, "bfloat16")
    logits, features = agreement.run_target(target, tokens, taps, dtype=mx.bfloat16)
    lost = case.facts["bfloat16_error"]
    agreement.agree(logits, exact, 2 * lost["logits"])
    agreement.agree(features, np.concatenate(exact_taps, axis=-1), 2 * lost["features"])

    fed = rounded(case.arrays["features"], "bfloat16")
    draft = {key: rounded(array, "bfloat16") for key, array in drafter_weights(case.drafter).items()}
    exact_blocks = _reference_blocks(case, weights, draft, fed, rows)
    blocks = agreement.run_blocks(target, drafter, tokens, fed, rows, mx.bfloat16)
    agreement.agree(blocks, exact_blocks, 2 * lost["blocks"])


def _reference_blocks(case, weights, draft, features, rows):
    table = weights["model.embed_tokens.weight"]
    head = weights.get("lm_head.weight", table)
    found = []
    for end in np.cumsum(rows):
        block = [int(case.arrays["tokens"][end])] + [case.drafter.mask_token] * (case.drafter.block - 1)
        config = drafter_config(case.drafter)
        found.append(reference.drafter_forward(config, draft, table, head, features[:end], block))
    return np.stack(found)


STEPS = {"whole": [], "single": [1] * 120, "mixed": [7, 1, 3, 13, 1, 1, 8, 30, 1, 2, 1, 25, 1]}


@pytest.mark.parametrize(("window", "steps"), dealt((1, 2, 5, 39, 200), tuple(STEPS), of=2))
def test_the_window_reaches_exactly_as_far_as_the_formula_says(window, steps, tmp_path):
    """Window 1 sees only itself; the rings of the small windows wrap twice."""
    sizes = {"vocab": 61, "hidden": 48, "intermediate": 80, "heads": (6, 3), "head_dim": 8}
    spec, _ = tiny_specs(**sizes, window=window, layers=5)
    tokens = np.random.RandomState(3).randint(0, spec.vocab, 120)
    expected, taps = reference.target_forward(text_config(spec), target_weights(spec), tokens, (0, 4))
    target = load_target(write_target(tmp_path / "target", spec))
    logits, features = agreement.run_target(target, tokens, (0, 4), STEPS[steps])
    agreement.agree(logits, expected)
    agreement.agree(features, np.concatenate(taps, axis=-1), 2e-5 * np.abs(features).max())


@pytest.mark.parametrize("window", [1, 3, 11, 50])
def test_the_drafter_sees_its_window_from_each_slot_inclusively(window, tmp_path):
    """Context whose edge lies inside the block's reach, at it and beyond it, drafted after 1, 2, ... rows."""
    sizes = {"vocab": 67, "hidden": 48, "intermediate": 80, "heads": (6, 3), "head_dim": 8, "window": 9}
    target, drafter = tiny_models(tmp_path, **sizes, drafter_window=window, drafter_heads=(4, 2), block=13, taps=(1, 2))
    spec, draft_spec = tiny_specs(**sizes, drafter_window=window, drafter_heads=(4, 2), block=13, taps=(1, 2))
    tokens = np.random.RandomState(4).randint(0, spec.vocab, 130)
    features = np.random.RandomState(5).standard_normal((130, 96)).astype(np.float32)
    weights, draft = target_weights(spec), drafter_weights(draft_spec)
    rows = [1, 1, 2, window, 1, 13, 1, 1, 30, 1, 1, 3, 16, 1]  # the small windows' rings wrap
    found = agreement.run_blocks(target, drafter, tokens, features, rows)
    for logits, end in zip(found, np.cumsum(rows), strict=True):
        block = [int(tokens[end])] + [draft_spec.mask_token] * 12
        table, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
        expected = reference.drafter_forward(drafter_config(draft_spec), draft, table, head, features[:end], block)
        agreement.agree(logits, expected)


@pytest.mark.parametrize("first", [5, 40, 1000])
def test_a_drafter_whose_context_starts_late_sees_nothing_before_it(first, tmp_path):
    """Rows that were never written are no context, and positions stay absolute."""
    sizes = {"vocab": 67, "hidden": 48, "intermediate": 80, "heads": (6, 3), "head_dim": 8, "taps": (1, 2)}
    target, drafter = tiny_models(tmp_path, **sizes, drafter_window=21, block=5)
    spec, draft_spec = tiny_specs(**sizes, drafter_window=21, block=5)
    features = np.random.RandomState(5).standard_normal((4, 96)).astype(np.float32)
    context = agreement.DrafterContext(drafter.config, mx.float32)
    context.skip_to(first)
    drafter.extend(context, mx.split(mx.array(features), 2, axis=-1))
    context.advance(4)
    block = [9] + [draft_spec.mask_token] * 4
    found = np.array(drafter.draft_logits(mx.array(block, mx.uint32), context, target, 4))
    weights, draft, config = target_weights(spec), drafter_weights(draft_spec), drafter_config(draft_spec)
    table, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    agreement.agree(found, reference.drafter_forward(config, draft, table, head, features, block, first))


def test_a_centred_norm_keeps_weights_that_bfloat16_loses_beside_one():
    """1 + 0.0015 is 1 in bfloat16: the sum is formed in float32."""
    norm = CentredRMSNorm(64, 1e-5)
    norm.weight = mx.full((64,), 0.0015, mx.bfloat16)
    x = rounded(np.random.RandomState(1).standard_normal((40, 64)).astype(np.float32), "bfloat16")
    gain = 1 + float(norm.weight[0].astype(mx.float32))
    exact = reference.rms(x.astype(np.float64), 1e-5)
    found = np.array(norm(mx.array(x).astype(mx.bfloat16)).astype(mx.float32))
    expected, wrong = (rounded((exact * factor).astype(np.float32), "bfloat16") for factor in (gain, 1.0))
    assert np.mean(found == expected) > 0.99
    assert np.mean(found == wrong) < 0.9


@pytest.mark.parametrize(
    "change",
    [
        {"layer_types": (FULL, SLIDING, SLIDING, SLIDING)},
        {"rope_layers": (True, True, True, True)},
        {"rope_layers": (False, True, True, False)},
        {"theta": 10000.0},
        {"qk_scale": 1.0},
        {"multiplier": 0.1},
        {"softcap": 3.0},
        {"tied": True},
        {"heads": (4, 4)},
        {"heads": (4, 1)},
    ],
    ids=str,
)
def test_every_field_of_the_config_reaches_the_numbers(change, tmp_path):
    """Each field alone changes the logits, and changes them as the formula says."""
    sizes = {"vocab": 61, "hidden": 48, "intermediate": 80, "head_dim": 12, "window": 7}
    if "layer_types" in change:
        change = change | {"rope_layers": (False, True, True, True)}
    spec, plain = tiny_specs(**sizes | change)[0], tiny_specs(**sizes)[0]
    tokens = np.random.RandomState(6).randint(0, spec.vocab, 30)
    expected, _ = reference.target_forward(text_config(spec), target_weights(spec), tokens)
    unchanged, _ = reference.target_forward(text_config(plain), target_weights(plain), tokens)
    found, _ = agreement.run_target(load_target(write_target(tmp_path / "target", spec)), tokens, (0,))
    agreement.agree(found, expected)
    assert agreement.distance(found, unchanged) > 1e-2 * np.abs(expected).max()


@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (6, 64), (8, 64)])
def test_a_quantised_target_computes_with_its_dequantised_weights(bits, group_size, tmp_path):
    """The norm of the embedding, the gate and the head hold where their weights are packed."""
    spec, _ = tiny_specs(vocab=61, window=9)
    target = load_target(write_target(tmp_path / "target", spec, quantisation=Quantisation(bits, group_size)))
    weights = target_weights(spec)
    for name, array in weights.items():
        if array.ndim == 2:
            parts = mx.quantize(mx.array(array), group_size, bits)
            weights[name] = np.array(mx.dequantize(*parts, group_size, bits))
    tokens = np.random.RandomState(8).randint(0, spec.vocab, 30)
    expected, _ = reference.target_forward(text_config(spec), weights, tokens)
    found, _ = agreement.run_target(target, tokens, (0,))
    agreement.agree(found, expected)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_activations_keep_the_dtype_of_the_checkpoint(dtype, tmp_path):
    """A float32 norm weight or scale inside must not lift a half-precision model, and taps stay as they are."""
    target, drafter = tiny_models(tmp_path, dtype=dtype)
    kind = getattr(mx, dtype)
    cache = agreement.TargetCache(target.config, kind, 64)
    out = target(mx.array([5, 6, 7], mx.uint32), [agreement.Part(cache, 3, 1)], (0, 3))
    assert [tap.dtype for tap in out.taps] == [kind, kind]
    assert all(array.dtype == kind for array in cache.arrays)
    context = agreement.DrafterContext(drafter.config, kind)
    assert all(array.dtype == kind for array in context.arrays)
