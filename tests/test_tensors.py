"""What is wrong with a tensor or its quantisation is told by name, expected and found."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from faults import BAD, WHOLE, changed, edit_config, told
from tiny import (
    Quantisation,
    TargetSpec,
    drafter_weights,
    target_weights,
    tiny_specs,
    write_drafter,
    write_safetensors,
    write_target,
)

from dflash_mlx import CheckpointError, load

TENSOR_FAULTS = [
    ("missing", "model.layers.2.self_attn.gate_proj.weight", None, ["layers.2.self_attn.gate_proj.weight"]),
    ("no head", "lm_head.weight", None, ["lm_head.weight"]),
    ("unknown", "model.layers.1.self_attn.q_norm.weight", np.ones(32), ["also", "layers.1.self_attn.q_norm.weight"]),
    ("a layer too many", "model.layers.4.mlp.up_proj.weight", np.ones((256, 128)), ["layers.4.mlp.up_proj.weight"]),
    ("shape", "model.layers.3.self_attn.k_proj.weight", np.ones((128, 64)), ["k_proj.", "[64, 128]", "[128, 64]"]),
    ("vocabulary", "lm_head.weight", np.ones((62, 128)), ["lm_head.weight", "[61, 128]", "[62, 128]"]),
    ("NaN in a norm", "model.norm.weight", np.full(128, BAD), ["norm.weight", "finite", "NaN"]),
    ("infinity", "model.layers.0.input_layernorm.weight", np.full(128, np.inf), ["input_layernorm", "finite", "inf"]),
    ("NaN in a matrix", "model.layers.1.mlp.down_proj.weight", np.full((128, 256), BAD), ["first logits", "NaN"]),
]


@pytest.mark.parametrize("layout", ["transformers", "mlx-vlm"])
@pytest.mark.parametrize(("name", "value", "parts"), [r[1:] for r in TENSOR_FAULTS], ids=[r[0] for r in TENSOR_FAULTS])
def test_a_faulty_tensor_of_the_target_is_named(name, value, parts, layout, tmp_path):
    spec = TargetSpec(**WHOLE)
    value = value if value is None else value.astype(np.float32)
    weights = changed(target_weights(spec), name, value)
    folder = write_target(tmp_path / "target", spec, layout, weights=weights)
    with pytest.raises(CheckpointError) as error:
        load(folder, draft=None)
    told(error, *parts)


DRAFTER_TENSOR_FAULTS = [
    ("missing", "layers.1.self_attn.k_norm.weight", None, ["layers.1.self_attn.k_norm.weight"]),
    ("unknown", "layers.2.mlp.up_proj.weight", np.ones((320, 128)), ["layers.2.mlp.up_proj.weight"]),
    ("shape", "encoder.fc.weight", np.ones((128, 256)), ["encoder.fc.weight", "[128, 384]", "[128, 256]"]),
    ("NaN in a norm", "encoder.output_norm_enc.weight", np.full(128, BAD), ["output_norm_enc", "finite", "NaN"]),
    ("NaN in a matrix", "layers.0.mlp.up_proj.weight", np.full((320, 128), BAD), ["drafter's first logits", "NaN"]),
]


@pytest.mark.parametrize(
    ("name", "value", "parts"), [r[1:] for r in DRAFTER_TENSOR_FAULTS], ids=[r[0] for r in DRAFTER_TENSOR_FAULTS]
)
def test_a_faulty_tensor_of_the_drafter_is_named(name, value, parts, tmp_path):
    target, drafter = tiny_specs(**WHOLE)
    value = value if value is None else value.astype(np.float32)
    weights = changed(drafter_weights(drafter), name, value)
    first = write_target(tmp_path / "target", target)
    second = write_drafter(tmp_path / "drafter", drafter, weights=weights)
    with pytest.raises(CheckpointError) as error:
        load(first, draft=second)
    told(error, *parts)


def test_a_tensor_of_integers_is_named(tmp_path):
    folder = write_target(tmp_path / "target", TargetSpec(**WHOLE))
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(re.sub(rb'(language_model\.norm\.weight": \{"dtype": )"F32"', rb'\1"I32"', data))
    with pytest.raises(CheckpointError) as error:
        load(folder, draft=None)
    told(error, "norm.weight", "F32", "I32")


def test_two_checkpoints_in_one_folder_are_refused(tmp_path):
    spec = TargetSpec(**WHOLE)
    folder = write_target(tmp_path / "target", spec)
    other = write_target(tmp_path / "other", spec, "mlx-vlm")
    (other / "model.safetensors").rename(folder / "model-again.safetensors")
    with pytest.raises(CheckpointError) as error:
        load(folder, draft=None)
    told(error, "once", "language_model.model.", "model.language_model.")


def test_one_tensor_in_two_files_names_both(tmp_path):
    folder = write_target(tmp_path / "target", TargetSpec(**WHOLE))
    (folder / "model-copy.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError) as error:
        load(folder, draft=None)
    told(error, "in one file", "model-copy.safetensors and model.safetensors")


def said(**fields):
    """An edit of the quantisation section, in both places where it stands; None removes the section."""

    def edit(config, _):
        for key in ("quantization", "quantization_config"):
            config[key] = config.get(key, {}) | fields
            if None in fields.values():
                del config[key]

    return edit


QUANTISATION_FAULTS = [
    ("other bits", said(bits=8), ["weight", "[", "["]),
    ("another group", said(group_size=32), ["[", "["]),
    ("no section", said(bits=None), ["quantization", "present", ".scales"]),
    ("3 bits", said(bits=3), ["quantization.bits", "one of 4, 6, 8", "3"]),
    ("a group of 48", said(group_size=48), ["quantization.group_size", "one of 32, 64, 128", "48"]),
    ("another mode", said(mode="mxfp4"), ["quantization.mode", "affine", "mxfp4"]),
    ("another method", said(quant_method="awq"), ["quant_method", "awq"]),
    ("false where there are scales", said(**{"model.layers.0.mlp.up_proj": False}), ["layers.0.mlp.up_proj", "scales"]),
    ("other bits for one", said(**{"model.layers.0.mlp.up_proj": {"bits": 8}}), ["layers.0.mlp.up_proj", "[", "["]),
    ("two sections", lambda c, _: c.update(quantization={"bits": 8, "group_size": 64}), ["quantization", "same"]),
]


@pytest.mark.parametrize(
    ("edit", "parts"), [r[1:] for r in QUANTISATION_FAULTS], ids=[r[0] for r in QUANTISATION_FAULTS]
)
def test_a_quantisation_that_contradicts_the_files_is_named(edit, parts, tmp_path):
    folder = write_target(tmp_path / "target", TargetSpec(**WHOLE), "mlx-lm", quantisation=Quantisation(4, 64))
    edit_config(folder, edit)
    with pytest.raises(CheckpointError) as error:
        load(folder, draft=None)
    told(error, *parts)


def test_a_quantisation_of_files_that_hold_none_is_named(tmp_path):
    folder = write_target(tmp_path / "target", TargetSpec(**WHOLE), "mlx-lm")
    edit_config(folder, lambda config, _: config.update(quantization={"group_size": 64, "bits": 4}))
    with pytest.raises(CheckpointError) as error:
        load(folder, draft=None)
    told(error, "quantization", "bits", "no tensor is quantised")


@pytest.mark.parametrize("part", ["scales", "biases"])
@pytest.mark.parametrize("fault", ["NaN", "missing"])
def test_a_broken_scale_is_named(part, fault, tmp_path):
    folder = write_target(tmp_path / "target", TargetSpec(**WHOLE), "mlx-lm", quantisation=Quantisation(4, 64))
    name = f"model.layers.2.mlp.down_proj.{part}"
    path = folder / "model.safetensors"
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    stored = {}
    for key, entry in header.items():
        if key == "__metadata__" or (key == name and fault == "missing"):
            continue
        begin, stop = (end + offset for offset in entry["data_offsets"])
        blob = data[begin:stop] if key != name else np.full((stop - begin) // 4, BAD).tobytes()
        stored[key] = (entry["dtype"], tuple(entry["shape"]), blob)
    write_safetensors(path, stored)
    with pytest.raises(CheckpointError) as error:
        load(folder, draft=None)
    told(error, "layers.2.mlp.down_proj")
    assert fault == "missing" or (name in str(error.value) and "NaN" in str(error.value))
