"""`convert`: the folder it writes is complete or absent, loads everywhere, and holds exactly the quantised weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import agreement
import mlx.core as mx
import numpy as np
import pytest
from faults import TOKENS, WHOLE, drafted, edit_config, logits_of, told
from tiny import (
    Quantisation,
    TargetSpec,
    drafter_weights,
    target_weights,
    tiny_specs,
    vision_tensors,
    write_drafter,
    write_target,
)

from dflash_mlx import CheckpointError, DFlashError, InputError, load
from dflash_mlx.convert import Form, convert
from dflash_mlx.loading import save

SPEC = TargetSpec(**WHOLE)


def tensors(folder: Path) -> dict[str, mx.array]:
    return {name: array for file in sorted(folder.glob("*.safetensors")) for name, array in mx.load(str(file)).items()}


def left_behind(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("layout", "bits", "group_size", "shards"),
    [
        ("transformers", 4, 64, 1),
        ("legacy", 6, 32, 1),
        ("mlx-vlm", 8, 128, 3),
        ("flat", 4, 32, 2),
        ("mlx-lm", 8, 64, 1),
    ],
)
def test_a_converted_target_is_the_same_model_quantised(layout, bits, group_size, shards, tmp_path):
    """Bit for bit what mx.quantize makes of the weights, written by hand."""
    source = write_target(tmp_path / "source", SPEC, layout, "bfloat16", shards)
    done = convert(source, tmp_path / "out", Form(bits, group_size))
    byhand = write_target(
        tmp_path / "byhand", SPEC, "mlx-lm", "bfloat16", quantisation=Quantisation(bits, group_size, True, True)
    )
    assert np.array_equal(logits_of(tmp_path / "out", "bfloat16"), logits_of(byhand, "bfloat16"))
    stored = tensors(byhand)
    assert done.after.weights_bytes == sum(array.nbytes for array in stored.values())
    assert done.kind == "target"
    assert done.quantised == sum(name.endswith(".scales") for name in stored)
    assert load(tmp_path / "out", draft=None).dtype == mx.bfloat16


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("generation", [1, 2])
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_a_converted_drafter_is_the_same_drafter_quantised(bits, generation, prefix, tmp_path):
    sizes = {"drafter_rank": 32} if generation == 2 else {}
    target, drafter = tiny_specs(**WHOLE, drafter_intermediate=384, generation=generation, **sizes)
    first = write_target(tmp_path / "target", target)
    source = write_drafter(tmp_path / "source", drafter, prefix=prefix)
    done = convert(source, tmp_path / "out", Form(bits, 32))
    byhand = write_drafter(tmp_path / "byhand", drafter, quantisation=Quantisation(bits, 32))
    assert np.array_equal(drafted(first, tmp_path / "out"), drafted(first, byhand))
    assert done.kind == "drafter"
    assert done.whole == ()
    published = {name.removesuffix(".weight") for name in tensors(byhand)}
    assert {name.removesuffix(".weight") for name in tensors(tmp_path / "out")} == published


def test_quantised_weights_are_near_the_source_and_whole_modules_are_the_source(tmp_path):
    """Half a step of each group at most, by the scales that are in the file; kept modules to the bit."""
    source = write_target(tmp_path / "source", SPEC)
    done = convert(source, tmp_path / "out", Form(4, 64, keep=("lm_head", "*.o_proj")))
    found, weights = tensors(tmp_path / "out"), target_weights(SPEC)
    assert set(done.whole) == {"lm_head", *(f"layers.{i}.self_attn.o_proj" for i in range(SPEC.layers))}
    for name, array in weights.items():
        written = f"language_model.{name}"
        module = written.removesuffix(".weight")
        if module + ".scales" not in found:
            assert array.ndim == 1 or name.removesuffix(".weight").removeprefix("model.") in done.whole
            assert np.array_equal(np.array(found[written]), array)
            continue
        parts = (found[written], found[module + ".scales"], found[module + ".biases"])
        step = np.repeat(np.abs(np.array(parts[1])), 64, axis=-1)
        assert (np.abs(np.array(mx.dequantize(*parts, 64, 4)) - array) <= 1.01 * step).all()


def test_mlx_lm_reads_a_converted_target_and_computes_the_same(tmp_path):
    pytest.importorskip("mlx_lm.models.muse_glimmer")
    from mlx_lm.utils import load_model

    for layout in ("transformers", "legacy"):
        source = write_target(tmp_path / layout, SPEC, layout)
        out = tmp_path / f"{layout}-out"
        convert(source, out, Form(4, 32, keep=("lm_head", "layers.1.*")))
        theirs, _ = load_model(out)
        logits = np.array(theirs(mx.array([TOKENS]))[0].astype(mx.float32))
        agreement.agree(logits, logits_of(out))


def test_vision_tensors_go_along_under_mlx_vlms_names(tmp_path):
    source = write_target(tmp_path / "source", SPEC, "transformers")
    done = convert(source, tmp_path / "out", Form(8))
    found = tensors(tmp_path / "out")
    count = len(vision_tensors("", SPEC.hidden))
    text = "vision tensors are copied, not quantised; the sizes are those of the text model."
    assert done.notes == (f"{count} {text}",)
    for name, array in vision_tensors("", SPEC.hidden).items():
        assert np.array_equal(np.array(found[name]), array)
    others = {name for name in found if not name.startswith("vision_") and not name.startswith("perception_")}
    assert all(name.startswith(("language_model.model.", "language_model.lm_head.")) for name in others)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vision_config"]


def test_another_dtype_rounds_every_weight_once(tmp_path):
    source = write_target(tmp_path / "source", SPEC, "flat")
    done = convert(source, tmp_path / "out", Form(dtype="bfloat16"))
    found = tensors(tmp_path / "out")
    for name, array in target_weights(SPEC).items():
        assert mx.array_equal(found[f"language_model.{name}"], mx.array(array).astype(mx.bfloat16))
    assert (done.quantised, done.after.bits_per_weight, done.before.bits_per_weight) == (0, 16, 32)
    text = json.loads((tmp_path / "out" / "config.json").read_text())["text_config"]
    assert text["dtype"] == "bfloat16"


def test_a_quantised_source_is_made_whole_or_quantised_anew_and_the_report_says_so(tmp_path):
    first = write_target(tmp_path / "source", SPEC, "mlx-lm", quantisation=Quantisation(8, 64, True, True))
    whole = convert(first, tmp_path / "whole", Form(dtype="float32"))
    assert np.array_equal(logits_of(tmp_path / "whole"), logits_of(write_again(first, tmp_path)))
    assert whole.notes == ()
    fewer = convert(first, tmp_path / "fewer", Form(4))
    assert fewer.notes == ("The source was quantised already: its rounding stays in the weights.",)
    assert 5 < fewer.after.bits_per_weight < 6 < 9 < fewer.before.bits_per_weight < 10  # scales are float32


def write_again(source: Path, folder: Path) -> Path:
    """The values that a quantised folder stands for, as a float32 checkpoint."""
    found, weights = tensors(source), {}
    for name in target_weights(SPEC):
        module = name.removesuffix(".weight")
        parts = [found.get(f"{module}.{part}") for part in ("weight", "scales", "biases")]
        weights[name] = np.array(found[name] if parts[1] is None else mx.dequantize(*parts, 64, 8))
    return write_target(folder / "again", SPEC, weights=weights)


def test_modules_that_the_group_does_not_divide_stay_whole_with_a_note(tmp_path):
    spec = TargetSpec(**WHOLE | {"intermediate": 96})
    done = convert(write_target(tmp_path / "source", spec, "flat"), tmp_path / "out", Form(4, 64))
    assert set(done.whole) == {f"layers.{i}.mlp.down_proj" for i in range(spec.layers)}
    assert done.notes == (f"{spec.layers} modules stay whole: groups of 64 do not divide their width.",)
    assert np.isfinite(logits_of(tmp_path / "out")).all()


def test_large_checkpoints_are_written_in_parts_with_little_memory(tmp_path, monkeypatch):
    spec = TargetSpec(**WHOLE | {"vocab": 4001, "layers": 8})
    source = write_target(tmp_path / "source", spec)
    size = (source / "model.safetensors").stat().st_size
    monkeypatch.setattr(save, "SHARD_BYTES", 300_000)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    convert(source, tmp_path / "out", Form(8))
    table = 4001 * 128 * 4
    assert mx.get_peak_memory() - before < 300_000 + 1.5 * table < size / 2
    files = sorted((tmp_path / "out").glob("model-*-of-*.safetensors"))
    assert len(files) > 3
    byhand = write_target(tmp_path / "byhand", spec, quantisation=Quantisation(8, 64, True, True))
    assert np.array_equal(logits_of(tmp_path / "out"), logits_of(byhand))


def test_the_tokenizer_the_template_and_the_end_tokens_go_along(tmp_path):
    done = convert("pocket", tmp_path / "out", Form(8))
    pair, before = load(tmp_path / "out", draft=None), load("pocket", draft=None)
    assert pair.eos_token_ids == before.eos_token_ids
    messages = [{"role": "user", "content": "Write a function that adds."}]
    texts = [p.tokenizer.apply_chat_template(messages, tokenize=False) for p in (pair, before)]
    assert texts[0] == texts[1]
    assert done.before.weights_bytes == before.plan.parts["target weights"]
    assert done.after.weights_bytes == pair.plan.parts["target weights"]


@pytest.mark.parametrize("bytes_seen", [0, 1, 40_000])
def test_an_interrupt_leaves_nothing(bytes_seen, tmp_path):
    source = write_target(tmp_path / "source", SPEC)

    def stop(done: int, total: int) -> None:
        assert done <= total
        if done >= bytes_seen:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", Form(4), stop)
    assert left_behind(tmp_path) == ["source"]


def test_an_error_half_way_leaves_nothing(tmp_path, monkeypatch):
    source = write_target(tmp_path / "source", SPEC)

    def broken(*_: object) -> None:
        raise OSError("the disk went away")

    monkeypatch.setattr(shutil, "copyfile", broken)
    (source / "generation_config.json").write_text("{}")
    with pytest.raises(DFlashError) as error:
        convert(source, tmp_path / "out", Form(4))
    told(error, "out", "writable", "the disk went away")
    assert left_behind(tmp_path) == ["source"]


def test_a_broken_source_leaves_nothing(tmp_path):
    source = write_target(tmp_path / "source", SPEC)
    edit_config(source, lambda _, text: text.update(num_attention_heads=7))
    with pytest.raises(CheckpointError):
        convert(source, tmp_path / "out", Form(4))
    assert left_behind(tmp_path) == ["source"]


def test_a_folder_that_is_not_empty_is_refused_and_an_empty_one_is_taken(tmp_path):
    source = write_target(tmp_path / "source", SPEC)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("also")
    for name, found in (("full", "a folder with files in it"), ("file", "a file"), ("source", "a folder")):
        with pytest.raises(InputError) as error:
            convert(source, tmp_path / name, Form(4))
        told(error, name, "free", found)
    assert (tmp_path / "full" / "thesis.txt").read_text() == "years of work"
    (tmp_path / "empty").mkdir()
    convert(source, tmp_path / "empty", Form(4))
    assert np.isfinite(logits_of(tmp_path / "empty")).all()
    assert left_behind(tmp_path) == ["empty", "file", "full", "source"]


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(tmp_path, monkeypatch):
    source = write_target(tmp_path / "source", SPEC)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(InputError) as error:
        convert(source, tmp_path / "out", Form(4))
    told(error, "free space", "1000 bytes")
    assert left_behind(tmp_path) == ["source"]


@pytest.mark.parametrize(
    ("form", "parts"),
    [
        ({"bits": 5}, ("bits", "4, 6, 8", "5")),
        ({"bits": 4, "group_size": 48}, ("group_size", "32, 64, 128", "48")),
        ({"dtype": "int8"}, ("dtype", "float32, float16, bfloat16", "'int8'")),
        ({}, ("bits or dtype", "given", "neither")),
    ],
)
def test_a_wrong_form_is_told(form, parts):
    with pytest.raises(InputError) as error:
        Form(**form)
    told(error, *parts)


def test_a_pattern_that_names_no_module_is_told(tmp_path):
    source = write_target(tmp_path / "source", SPEC)
    with pytest.raises(InputError) as error:
        convert(source, tmp_path / "out", Form(4, keep=("lm_head", "experts")))
    told(error, "keep", "q_proj", "'experts'")
    assert left_behind(tmp_path) == ["source"]


def test_a_drafters_patterns_use_the_published_names(tmp_path):
    _, drafter = tiny_specs(**WHOLE, generation=2)
    source = write_drafter(tmp_path / "source", drafter)
    done = convert(source, tmp_path / "out", Form(8, keep=("fc", "candidate_selector.*")))
    assert set(done.whole) == {
        "fc", "candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook",
        "candidate_selector.hidden_projection",
    }  # fmt: skip
    found, weights = tensors(tmp_path / "out"), drafter_weights(drafter)
    for name in ("fc.weight", "candidate_selector.successor_codebook", "layers.0.mlp_conv.base_kernel"):
        assert np.array_equal(np.array(found[name]), weights[name])
