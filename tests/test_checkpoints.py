"""What is wrong with a config or a file of a checkpoint is told by name, expected and found."""

from __future__ import annotations

import json

import numpy as np
import pytest
from faults import WHOLE, edit_config, logits_of, put, told
from tiny import TargetSpec, text_config, tiny_pair, write_target

from dflash_mlx import CheckpointError, load

CONFIG_FAULTS = [
    ("a window of 0", put(sliding_window=0), ["sliding_window", "between 1 and", "0"]),
    ("no window", put(sliding_window=None), ["sliding_window", "present", "nothing"]),
    ("a window in words", put(sliding_window="24"), ["sliding_window", "integer", "'24'"]),
    ("two bases", put(rope_theta=10000.0), ["rope_theta", "500000", "10000"]),
    ("no base", put(rope_parameters=None), ["rope_theta", "present", "nothing"]),
    ("a base of 0", put(rope_parameters={"rope_type": "default", "rope_theta": 0}), ["rope_theta", "above 0", "0"]),
    ("scaled RoPE", put(rope_parameters={"rope_type": "yarn", "rope_theta": 5e5}), ["rope_type", "default", "yarn"]),
    ("rope_scaling", put(rope_scaling={"rope_type": "linear", "factor": 2}), ["rope_scaling", "default", "linear"]),
    ("a layer's own base", put(layer_rope_theta=[7, 5e5, 5e5, 0]), ["layer_rope_theta", "500000", "7"]),
    ("too few bases", put(layer_rope_theta=[5e5, 0]), ["layer_rope_theta", "4 entries", "500000"]),
    ("too few layer types", put(layer_types=["full_attention"]), ["layer_types", "4 entries", "full_attention"]),
    ("an unknown layer type", put(layer_types=["chunked"] * 4), ["layer_types", "sliding_attention", "chunked"]),
    ("heads that do not group", put(num_attention_heads=9), ["num_attention_heads", "multiple", "9"]),
    ("another activation", put(hidden_activation="gelu"), ["hidden_activation", "silu", "gelu"]),
    ("attention biases", put(attention_bias=True), ["attention_bias", "False", "True"]),
    ("a soft cap of 0", put(final_logit_softcapping=0), ["final_logit_softcapping", "above 0", "0"]),
    ("an end token outside", put(eos_token_id=61), ["eos_token_id", "below 61", "61"]),
    ("a first token outside", put(bos_token_id=61), ["bos_token_id", "61", "61"]),
    ("another family", lambda c, _: c.update(model_type="llama"), ["model_type", "muse_glimmer", "llama"]),
    ("no family", lambda c, _: c.pop("model_type"), ["model_type", "muse_glimmer", "None"]),
    ("two sizes", lambda c, _: c.update(hidden_size=96), ["hidden_size", "same", "96", "128"]),
    ("a text config that is none", lambda c, _: c.update(text_config=7), ["text_config", "object", "7"]),
]  # fmt: skip
REQUIRED = sorted(
    set(text_config(TargetSpec()))
    - {"model_type", "hidden_activation", "attention_bias", "attention_dropout", "bos_token_id", "eos_token_id"}
    - {"pad_token_id", "dtype", "tie_word_embeddings", "layer_types", "layer_rope_theta", "rope_parameters"}
)


@pytest.mark.parametrize(("edit", "parts"), [row[1:] for row in CONFIG_FAULTS], ids=[row[0] for row in CONFIG_FAULTS])
def test_a_faulty_field_of_the_target_is_named(edit, parts, tmp_path):
    first, second = tiny_pair(tmp_path, **WHOLE)
    edit_config(first, edit)
    with pytest.raises(CheckpointError) as error:
        load(first, draft=second)
    told(error, *parts)


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_field_of_the_target_is_named_and_not_guessed(name, tmp_path):
    first, _ = tiny_pair(tmp_path, **WHOLE)
    edit_config(first, put(**{name: None}))
    with pytest.raises(CheckpointError) as error:
        load(first, draft=None)
    told(error, f"[config] {name}", "present", "nothing")


def test_layer_kinds_are_not_guessed_where_the_libraries_disagree(tmp_path):
    """Six layers: transformers counts full layers from the last, mlx-lm from the first."""
    first, _ = tiny_pair(tmp_path, layers=6)
    edit_config(first, put(layer_types=None))
    with pytest.raises(CheckpointError) as error:
        load(first, draft=None)
    told(error, "layer_types", "present", "nothing", "6 layers")
    spec = TargetSpec(**WHOLE)
    second = write_target(tmp_path / "four", spec)
    expected = logits_of(second)
    edit_config(second, put(layer_types=None, layer_rope_theta=None))
    assert np.array_equal(logits_of(second), expected)


DRAFTER_FAULTS = [
    ("another hidden size", {"hidden_size": 96}, ["hidden_size", "128", "96"]),
    ("a tap past the target", {"target_layer_ids": [0, 1, 4]}, ["target_layer_ids", "below 4", "[0, 1, 4]"]),
    ("no taps", {"target_layer_ids": []}, ["target_layer_ids", "non-empty", "[]"]),
    ("taps out of order", {"target_layer_ids": [1, 0, 2]}, ["target_layer_ids", "increasing", "[1, 0, 2]"]),
    ("a tap twice", {"target_layer_ids": [1, 1, 2]}, ["target_layer_ids", "increasing", "[1, 1, 2]"]),
    ("a negative tap", {"target_layer_ids": [-1, 0, 2]}, ["target_layer_ids", "integers", "-1"]),
    ("another vocabulary", {"mask_token_id": 61}, ["mask_token_id", "vocabulary of 61", "61"]),
    ("a window of 0", {"sliding_window": 0}, ["sliding_window", "between 1 and", "0"]),
    ("no window", {"sliding_window": None}, ["sliding_window", "present", "nothing"]),
    ("a block of 1", {"block_size": 1}, ["block_size", "between 2 and", "1"]),
    ("no mask token", {"mask_token_id": None}, ["mask_token_id", "present", "nothing"]),
    ("no taps field", {"target_layer_ids": None}, ["target_layer_ids", "present", "nothing"]),
    ("two bases", {"rope_theta": 1e4}, ["rope_theta", "500000", "10000"]),
    ("layers that do not slide", {"layer_types": ["full_attention"] * 2}, ["layer_types", "sliding", "full"]),
    ("two blocks", {"dflash_config": {"block_size": 8}}, ["block_size", "same", "16", "8"]),
    ("another family", {"model_type": "qwen3"}, ["model_type", "muse_glimmer_assistant", "qwen3"]),
]


@pytest.mark.parametrize(("fields", "parts"), [row[1:] for row in DRAFTER_FAULTS], ids=[r[0] for r in DRAFTER_FAULTS])
def test_a_drafter_that_does_not_fit_names_the_field(fields, parts, tmp_path):
    first, second = tiny_pair(tmp_path, **WHOLE)
    edit_config(second, put(**fields))
    with pytest.raises(CheckpointError) as error:
        load(first, draft=second)
    told(error, *parts)


def test_target_and_drafter_folders_are_not_taken_for_one_another(tmp_path):
    first, second = tiny_pair(tmp_path, **WHOLE)
    with pytest.raises(CheckpointError) as error:
        load(second, draft=None)
    told(error, "model_type of the Muse Glimmer target", "muse_glimmer", "muse_glimmer_assistant")
    with pytest.raises(CheckpointError) as error:
        load(first, draft=first)
    told(error, "model_type of the DFlash drafter", "muse_glimmer_assistant", "'muse_glimmer'")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{} {}"], ids=repr)
@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_a_broken_json_file_is_named(file, text, tmp_path):
    folder = write_target(tmp_path / "target", TargetSpec(**WHOLE), shards=2)
    (folder / file).write_text(text)
    with pytest.raises(CheckpointError) as error:
        load(folder, draft=None)
    told(error, file)


def test_a_folder_without_config_or_without_weights_says_which(tmp_path):
    folder = write_target(tmp_path / "target", TargetSpec(**WHOLE))
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError) as error:
        load(folder, draft=None)
    told(error, "safetensors", "none")
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError) as error:
        load(folder, draft=None)
    told(error, "config.json", "no such file")


@pytest.mark.parametrize(
    ("text", "parts"),
    [("{", ["generation_config.json"]), ('{"eos_token_id": [3, 61]}', ["eos_token_id", "below 61", "61"])],
    ids=["broken", "outside"],
)
def test_a_faulty_generation_config_is_named(text, parts, tmp_path):
    folder = write_target(tmp_path / "target", TargetSpec(**WHOLE))
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError) as error:
        load(folder, draft=None)
    told(error, *parts)


@pytest.mark.parametrize("index", [True, False], ids=["with index", "without index"])
def test_a_missing_shard_is_named(index, tmp_path):
    folder = write_target(tmp_path / "target", TargetSpec(**WHOLE), shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    if not index:
        (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError) as error:
        load(folder, draft=None)
    told(error, "model-00002-of-00003.safetensors", "no such file")


def test_an_index_that_the_shards_contradict_names_the_tensor(tmp_path):
    folder = write_target(tmp_path / "target", TargetSpec(**WHOLE), shards=2)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    places = index["weight_map"]
    name = "model.language_model.norm.weight"
    places[name] = next(file for file in places.values() if file != places[name])
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as error:
        load(folder, draft=None)
    told(error, name, places[name], "no such tensor")
    places["lm_head.bias"] = places[name] = "model-00003-of-00002.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as error:
        load(folder, draft=None)
    told(error, "model-00003-of-00002.safetensors", "no such file")


@pytest.mark.parametrize("which", ["target", "drafter"])
def test_a_file_cut_anywhere_is_told_with_both_sizes(which, tmp_path):
    """An interrupted download: empty, inside the length, inside the header, inside the data, one byte short."""
    pair = dict(zip(("target", "drafter"), tiny_pair(tmp_path, **WHOLE), strict=True))
    path = pair[which] / "model.safetensors"
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for size in (0, 5, 8, 100, header - 1, header, header + 1000, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError) as error:
            load(pair["target"], draft=pair["drafter"])
        told(error, "model.safetensors", "bytes", f"{size if size < header else size - header} bytes")
    path.write_bytes(whole)
    load(pair["target"], draft=pair["drafter"])


@pytest.mark.parametrize("damage", ["not json", "a list", "no dtype", "no offsets", "odd dtype", "long", "shape"])
def test_a_damaged_header_is_an_error_of_the_checkpoint(damage, tmp_path):
    folder = write_target(tmp_path / "target", TargetSpec(**WHOLE))
    path = folder / "model.safetensors"
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    entry = header["lm_head.weight"]
    if damage in ("no dtype", "no offsets"):
        del entry["dtype" if damage == "no dtype" else "data_offsets"]
    elif damage == "odd dtype":
        entry["dtype"] = "F4"
    elif damage == "long":
        entry["data_offsets"][1] += 2**40
    elif damage == "shape":
        entry["shape"][0] += 1
    text = {"not json": b"{" * 64, "a list": b"[1, 2, 3]"}.get(damage, json.dumps(header).encode())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
    with pytest.raises(CheckpointError) as error:
        load(folder, draft=None)
    told(error, "lm_head.weight" if damage in ("odd dtype", "shape") else "model.safetensors")
