"""Which generation a drafter is, its checkpoint's own fields tell; half the one and half the other is refused."""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest
from faults import BAD, WHOLE, changed, drafted, edit_config, put, told
from mlx.utils import tree_flatten
from stored import Quantisation
from tiny import drafter_weights, tiny_pair, tiny_specs, write_drafter, write_target

from dflash_mlx import CheckpointError, generate, load
from dflash_mlx.cache import DrafterContext
from dflash_mlx.costs import drafter_parameters
from dflash_mlx.drafter_config import drafter_config
from dflash_mlx.loading.layouts import dflash2_name, dflash2_published
from dflash_mlx.models.dflash2 import DFlash2

SECOND = WHOLE | {"generation": 2, "drafter_rank": 64}
PUBLISHED = {
    "architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "hidden_size": 6656, "intermediate_size": 19968,
    "num_hidden_layers": 5, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "layer_types": ["sliding_attention"] * 5, "sliding_window": 2048, "use_sliding_window": True,
    "max_window_layers": 5, "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
    "max_position_embeddings": 131072, "num_target_layers": 52, "vocab_size": 202048, "attention_bias": False,
    "is_causal": False, "dtype": "bfloat16",
    "dflash_config": {
        "block_size": 16, "conv_group_size": 16, "conv_kernel_size": 2, "final_logit_softcapping": 20.0,
        "mask_token_id": 201818, "output_multiplier": 0.19611613513818404, "selector_rank": 256, "selector_top_k": 16,
        "target_layer_ids": [1, 13, 25, 37, 49],
    },
}  # fmt: skip


def test_the_published_config_asks_for_the_published_number_of_weights():
    """81 tensors and 2,772,159,744 parameters, counted from the published file's size; nothing is allocated."""
    config = drafter_config(PUBLISHED)
    tensors = tree_flatten(DFlash2(config).parameters())
    assert len(tensors) == 81
    assert sum(array.size for _, array in tensors) == 2_772_159_744
    assert sum(drafter_parameters(config).values()) == 2_772_159_744
    names = {dflash2_published(name) for name, _ in tensors}
    assert {dflash2_name(name) for name in names} == {name for name, _ in tensors}
    assert {"fc.weight", "hidden_norm.weight", "candidate_selector.predecessor_codebook"} < names
    assert "layers.4.mlp_conv.kernel_projection.weight" in names
    assert (config.span, config.causal, config.embedding_scale) == (2048, False, 1.0)


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("suffix", ["", ".weight"], ids=["codebooks as published", "codebooks with a suffix"])
def test_names_with_and_without_prefix_and_suffix_are_the_same_drafter(prefix, suffix, tmp_path):
    target, drafter = tiny_specs(**SECOND)
    weights = drafter_weights(drafter)
    other = {prefix + name + (suffix if name.endswith("_codebook") else ""): w for name, w in weights.items()}
    first, plain = write_target(tmp_path / "target", target), write_drafter(tmp_path / "plain", drafter)
    second = write_drafter(tmp_path / "other", drafter, weights=other, shards=2)
    assert np.array_equal(drafted(first, plain), drafted(first, second))


@pytest.mark.parametrize("generation", [1, 2])
def test_load_says_which_drafter_it_took(generation, tmp_path):
    pair = load(*tiny_pair(tmp_path, **(SECOND if generation == 2 else WHOLE)))
    kind = {1: "DFlash v1", 2: "DFlash-2"}[generation]
    assert pair.drafter_kind == kind
    assert [note for note in pair.notes if "DFlash-2" in note] == (
        ["The drafter is a DFlash-2, as its config's own fields say."] if generation == 2 else []
    )
    stats = generate(pair, [1, 2, 3], max_tokens=8, draft_length=3).stats
    assert stats.speculation == "on"
    assert any(round_.drafted for round_ in stats.rounds)
    assert pair.without_drafter().drafter_kind is None


@pytest.mark.parametrize(
    "edit",
    [
        lambda config, _: config.pop("architectures"),
        lambda config, _: config.update(config.pop("dflash_config")),
        lambda config, _: config.update(model_type="anything"),
    ],
    ids=["by its fields alone", "flat", "whatever its model_type"],
)
def test_a_dflash2_config_is_known_by_either_sign(edit, tmp_path):
    folders = tiny_pair(tmp_path, **SECOND)
    expected = drafted(*folders)
    edit_config(folders[1], edit)
    assert load(*folders).drafter_kind == "DFlash-2"
    assert np.array_equal(drafted(*folders), expected)


def nested(**fields):
    """An edit of `dflash_config`: None removes a field."""

    def edit(config, _):
        inner = config["dflash_config"] | fields
        config["dflash_config"] = {name: value for name, value in inner.items() if value is not None}

    return edit


FAULTS = [
    ("no kernel size", nested(conv_kernel_size=None), ["conv_kernel_size", "present", "nothing"]),
    ("no group size", nested(conv_group_size=None), ["conv_group_size", "present", "nothing"]),
    ("no rank", nested(selector_rank=None), ["selector_rank", "present", "nothing"]),
    ("no candidates", nested(selector_top_k=None), ["selector_top_k", "present", "nothing"]),
    ("a kernel of 0", nested(conv_kernel_size=0), ["conv_kernel_size", "between 1 and", "0"]),
    ("a group that does not divide", nested(conv_group_size=24), ["conv_group_size", "divisor", "128", "24"]),
    ("more candidates than tokens", nested(selector_top_k=62), ["selector_top_k", "at most", "61", "62"]),
    ("another rank than the files", nested(selector_rank=32), ["candidate_selector.", "[61, 32]", "[61, 64]"]),
    ("another kernel than the files", nested(conv_kernel_size=3), ["attention_conv.base_kernel", "[2, 3, 128]"]),
    ("a negative cap", nested(final_logit_softcapping=-1), ["final_logit_softcapping", "above 0", "-1"]),
    ("a multiplier of 0", nested(output_multiplier=0), ["output_multiplier", "above 0", "0"]),
    ("an embedding scale in words", nested(input_embedding_scale="1"), ["input_embedding_scale", "above 0", "'1'"]),
    ("two caps", put(final_logit_softcapping=3.0), ["final_logit_softcapping", "same", "3.0", "20.0"]),
    ("a runtime block too wide", nested(runtime_block_size=17), ["runtime_block_size", "(16)", "17"]),
    ("a runtime block of 1", nested(runtime_block_size=1), ["runtime_block_size", "between 2 and", "1"]),
    ("causal in words", put(is_causal="no"), ["is_causal", "true or false", "'no'"]),
    ("no window in use", put(use_sliding_window=False), ["use_sliding_window", "true", "False"]),
    ("a window that nobody asks for", put(use_sliding_window=None), ["use_sliding_window", "true", "None"]),
    ("no layer types", put(layer_types=None), ["use_sliding_window", "layer_types", "None"]),
    ("layers that do not slide", put(layer_types=["full_attention"] * 2), ["layer_types", "sliding", "full"]),
    ("attention biases", put(attention_bias=True), ["attention_bias", "False", "True"]),
    ("no vocabulary", put(vocab_size=None), ["vocab_size", "present", "nothing"]),
    ("another vocabulary", put(vocab_size=62), ["vocab_size", "61", "62"]),
    ("v1 by its model_type", put(model_type="muse_glimmer_assistant"), ["conv_kernel_size", "absent", "2", "v1"]),
    (
        "neither sign",
        lambda config, _: (config.pop("architectures"), [config["dflash_config"].pop(name) for name in (
            "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")]),
        ["model_type of the DFlash drafter", "muse_glimmer_assistant", "qwen3"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "parts"), [row[1:] for row in FAULTS], ids=[row[0] for row in FAULTS])
def test_a_faulty_or_missing_field_is_named(edit, parts, tmp_path):
    folders = tiny_pair(tmp_path, **SECOND)
    edit_config(folders[1], edit)
    with pytest.raises(CheckpointError) as error:
        load(*folders)
    told(error, *parts)


TENSOR_FAULTS = [
    ("no convolution", "layers.1.mlp_conv.base_kernel", None, ["no layers.1.mlp_conv.base_kernel"]),
    ("no codebook", "candidate_selector.successor_codebook", None, ["no candidate_selector.successor_codebook."]),
    ("no projection of the taps", "fc.weight", None, ["no fc.weight"]),
    ("no norm of the taps", "hidden_norm.weight", None, ["no hidden_norm.weight"]),
    ("a third codebook", "candidate_selector.third_codebook", np.ones((61, 64)), ["also", "third_codebook"]),
    ("half a codebook", "candidate_selector.predecessor_codebook", np.ones((60, 64)), ["[61, 64]", "[60, 64]"]),
    (
        "NaN in the codes",
        "candidate_selector.predecessor_codebook",
        np.full((61, 64), BAD),
        ["selector's first", "NaN"],
    ),
    ("NaN in a kernel", "layers.0.attention_conv.base_kernel", np.full((2, 2, 128), BAD), ["first logits", "NaN"]),
]


@pytest.mark.parametrize(("name", "value", "parts"), [r[1:] for r in TENSOR_FAULTS], ids=[r[0] for r in TENSOR_FAULTS])
def test_a_faulty_tensor_is_named_as_it_is_published(name, value, parts, tmp_path):
    target, drafter = tiny_specs(**SECOND)
    weights = changed(drafter_weights(drafter), name, None if value is None else value.astype(np.float32))
    folders = write_target(tmp_path / "target", target), write_drafter(tmp_path / "drafter", drafter, weights=weights)
    with pytest.raises(CheckpointError) as error:
        load(*folders)
    told(error, *parts)


def test_files_of_the_other_generation_are_told_by_what_is_missing_and_what_is_too_much(tmp_path):
    """v1's config with DFlash-2's weights, and the other way round."""
    (target, second), (_, v1) = tiny_specs(**SECOND), tiny_specs(**WHOLE)
    folder = write_target(tmp_path / "target", target)
    mixed = write_drafter(tmp_path / "v1", v1, weights=drafter_weights(second))
    with pytest.raises(CheckpointError) as error:
        load(folder, draft=mixed)
    told(error, "tensors in v1", "encoder.fc.weight")
    mixed = write_drafter(tmp_path / "second", second, weights=drafter_weights(v1))
    with pytest.raises(CheckpointError) as error:
        load(folder, draft=mixed)
    told(error, "tensors in second", "candidate_selector.hidden_projection.weight", "more")


def test_an_override_of_a_codebooks_bits_is_read_by_the_modules_name(tmp_path):
    name = "candidate_selector.predecessor_codebook"
    form = Quantisation(4, 64, overrides={name: {"bits": 8, "group_size": 32}})
    pair = load(*tiny_pair(tmp_path, drafter_quantisation=form, **SECOND))
    found = pair.drafter.candidate_selector
    assert (found.predecessor_codebook.bits, found.predecessor_codebook.group_size) == (8, 32)
    assert (found.successor_codebook.bits, found.successor_codebook.group_size) == (4, 64)


def test_the_memory_plan_counts_the_drafters_codebooks_and_convolutions(tmp_path):
    target, drafter = tiny_pair(tmp_path, **SECOND)
    data = (drafter / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    plan = load(target, draft=drafter).plan
    assert plan.parts["drafter weights"] == len(data) - header
    assert "candidate_selector.successor_codebook" in json.loads(data[8:header])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_half_precision_drafter_keeps_its_dtype(dtype, tmp_path):
    """A float32 kernel or scale inside must not lift it; logits and scores are float32."""
    pair = load(*tiny_pair(tmp_path, dtype=dtype, drafter_embedding_scale=1.5, **SECOND))
    drafter, kind = pair.drafter, getattr(mx, dtype)
    context = DrafterContext(drafter.config, kind)
    block = mx.array([3, 60, 60], mx.uint32)
    x = drafter.embedded(pair.target.embed_tokens(block).astype(drafter.dtype))
    assert drafter.hidden(x, context).dtype == x.dtype == kind
    slots = drafter.draft(block, context, pair.target, 2)
    ids = mx.array([[1, 2], [3, 4]], mx.uint32)
    assert slots.logits.dtype == slots.transitions(ids).dtype == mx.float32
    assert slots.transitions(ids).shape == (2, 2, 2)


def test_a_runtime_block_bounds_the_automatic_draft_length_and_not_one_that_is_asked_for(tmp_path):
    folders = tiny_pair(tmp_path, **SECOND)
    edit_config(folders[1], nested(runtime_block_size=3))
    pair = load(*folders)
    prompt, longest = [1, 2, 3], {}
    for length in ("auto", 15):
        rounds = generate(pair, prompt, max_tokens=40, draft_length=length).stats.rounds
        longest[length] = max(round_.drafted for round_ in rounds)
    assert longest == {"auto": 2, 15: 15}
