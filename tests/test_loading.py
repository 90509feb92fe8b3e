"""Loading: nothing stays half loaded, a folder needs no network, and memory is planned before a weight is read."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from faults import BAD, WHOLE, changed, told
from tiny import (
    DrafterSpec,
    Quantisation,
    TargetSpec,
    drafter_weights,
    target_config,
    target_weights,
    tiny_pair,
    tiny_specs,
    write_drafter,
    write_target,
)

import dflash_mlx
from dflash_mlx import CheckpointError, InputError, MemoryPlanError, load, memory


def test_a_failed_load_leaves_nothing_behind(tmp_path):
    """No partly loaded model: the error is all that the caller gets, and the memory is given back."""
    target, drafter = tiny_specs(**WHOLE | {"vocab": 4001})
    weights = changed(drafter_weights(drafter), "norm.weight", np.full(128, BAD, np.float32))
    first = write_target(tmp_path / "target", target)
    second = write_drafter(tmp_path / "drafter", drafter, weights=weights)
    mx.clear_cache()
    before = mx.get_active_memory()
    with pytest.raises(CheckpointError) as error:
        load(first, draft=second)
    told(error, "norm.weight")
    del error
    assert mx.get_active_memory() - before < 100_000


def test_loading_a_pair_holds_each_weight_once(tmp_path):
    """No second copy in another dtype or layout: the peak is the weights and one token's work."""
    sizes = WHOLE | {"vocab": 20011, "layers": 8}
    first, second = tiny_pair(tmp_path, dtype="bfloat16", **sizes)
    files = sum((folder / "model.safetensors").stat().st_size for folder in (first, second))
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    pair = load(first, draft=second)
    assert pair.drafter is not None
    assert mx.get_peak_memory() - before < 1.25 * files


def test_a_local_folder_never_touches_the_network(tmp_path, monkeypatch):
    first, second = tiny_pair(tmp_path, **WHOLE)

    def refuse(*args, **kwargs):
        raise AssertionError("a socket was opened for a local folder")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    pair = load(str(first), draft=str(second))
    assert dflash_mlx.generate(pair, [1, 2, 3], max_tokens=3).stats.generated_tokens == 3


@pytest.mark.parametrize("offline", [True, False], ids=["told to be offline", "no connection"])
def test_a_hub_id_without_copy_and_without_network_is_a_clear_error(offline, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cold"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    with pytest.raises(CheckpointError) as error:
        load("someone/some-model", draft=None)
    told(error, "someone/some-model", "cache", "no connection", "local folder")


@pytest.mark.parametrize("name", ["no/such/folder/here", "nonsense", "./missing", "~/missing"])
def test_a_name_that_is_neither_folder_nor_hub_id_is_an_input_error(name):
    with pytest.raises(InputError) as error:
        load(name, draft=None)
    told(error, "folder", repr(name))


def headers_of_30b(folder: Path, layers: int = 52) -> Path:
    """A folder with the 30B's config and headers, its data a hole in the file."""
    spec = TargetSpec(202048, 6656, 19968, layers, (32, 2), 128, 2048)
    folder.mkdir()
    config = target_config(spec, "mlx-lm", "bfloat16")
    config["text_config"]["max_position_embeddings"] = 131072
    (folder / "config.json").write_text(json.dumps(config))
    wide = {"q_proj": (4096, 6656), "gate_proj": (4096, 6656), "k_proj": (256, 6656), "v_proj": (256, 6656)}
    shapes = {"model.embed_tokens": (202048, 6656), "model.norm": (6656,), "lm_head": (202048, 6656)}
    for i in range(layers):
        at = f"model.layers.{i}."
        shapes |= {f"{at}self_attn.{name}": shape for name, shape in wide.items()}
        shapes[f"{at}self_attn.o_proj"] = (6656, 4096)
        shapes |= {f"{at}mlp.gate_proj": (19968, 6656), f"{at}mlp.up_proj": (19968, 6656)}
        shapes[f"{at}mlp.down_proj"] = (6656, 19968)
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            shapes[f"{at}{norm}_layernorm"] = (6656,)
    header, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + 2 * int(np.prod(shape))
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    return folder


def test_the_memory_plan_comes_from_headers_before_any_weight_is_read(tmp_path, monkeypatch):
    """The 30B in bfloat16 is 51.88 GiB of weights: refused with the numbers, and no file was opened for its data."""
    folder = headers_of_30b(tmp_path / "thirty")
    monkeypatch.setattr(mx, "load", lambda *_: pytest.fail("a weight was read before the plan was made"))
    monkeypatch.setattr(memory, "machine_limit", lambda: 48 * 2**30)
    with pytest.raises(MemoryPlanError) as error:
        load(folder, draft=None)
    told(error, "the machine's limit", "target weights 51.8", "48.00 GiB", "Not even one token fits")
    monkeypatch.setattr(memory, "machine_limit", lambda: 64 * 2**30)
    with pytest.raises(MemoryPlanError) as error:
        load(folder, draft=None, max_memory=40 * 2**30)
    told(error, "max_memory", "target weights 51.8", "40.00 GiB")


def test_max_memory_holds_to_the_byte(tmp_path):
    first, second = tiny_pair(tmp_path, **WHOLE)
    plan = load(first, draft=second, max_context=300).plan
    assert plan.context == 300
    load(first, draft=second, max_context=300, max_memory=plan.total)
    with pytest.raises(MemoryPlanError) as error:
        load(first, draft=second, max_context=300, max_memory=plan.total - 1)
    told(error, "max_memory", "for a context of 300 tokens", "GiB", "would fit")
    fitting = int(re.search(r"A context of (\d+) tokens would fit", str(error.value)).group(1))
    assert 0 < fitting < 300
    assert load(first, draft=second, max_memory=plan.total - 1).plan.context == fitting
    with pytest.raises(MemoryPlanError):
        load(first, draft=second, max_context=fitting + 1, max_memory=plan.total - 1)


def test_the_plan_counts_weights_as_the_files_hold_them(tmp_path):
    """Bytes of the text tensors alone: vision is skipped, and quantised weights count packed."""
    spec = TargetSpec(**WHOLE)
    sizes = {}
    for layout in ("transformers", "mlx-lm"):
        sizes[layout] = load(write_target(tmp_path / layout, spec, layout), draft=None).plan.parts["target weights"]
    assert sizes["transformers"] == sizes["mlx-lm"] == sum(4 * w.size for w in target_weights(spec).values())
    packed = write_target(tmp_path / "packed", spec, "mlx-lm", quantisation=Quantisation(4, 64))
    assert load(packed, draft=None).plan.parts["target weights"] < sizes["mlx-lm"] / 6


@pytest.mark.parametrize(("context", "bound"), [(0, "at least 1"), (-1, "at least 1"), (4097, "the model's 4096")])
def test_a_context_outside_the_model_is_an_input_error(context, bound, tmp_path):
    first, _ = tiny_pair(tmp_path, **WHOLE)
    with pytest.raises(InputError) as error:
        load(first, draft=None, max_context=context)
    told(error, "max_context", bound, str(context))


def test_drafter_specs_fit_their_target_by_default():
    """The tests' own helper: what it writes is legal."""
    target, drafter = tiny_specs(vocab=131, layers=8, window=17)
    assert (drafter.mask_token, drafter.window, drafter.hidden) == (130, 17, target.hidden)
    assert isinstance(drafter, DrafterSpec)
    assert max(drafter.taps) < target.layers - 1
