"""Sizes and weights of random small Muse Glimmer targets and DFlash drafters.

Weights come from seeds by integer arithmetic (MT19937 and IEEE division), so that another process, another numpy or
another machine rebuilds the same bits: golden files hold inputs and outputs only. Sizes are all different, so that a
transposed or swapped axis cannot hide. Needs numpy alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from stored import Weights

SLIDING, FULL = "sliding_attention", "full_attention"
THETA = 500000.0


@dataclass(frozen=True)
class TargetSpec:
    """Sizes of a tiny target.

    `favoured` (even, 0 for none): that many tokens win nearly always, so that random drafts are accepted now and then.
    """

    vocab: int = 509
    hidden: int = 128
    intermediate: int = 192
    layers: int = 4
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 16
    window: int = 24
    layer_types: tuple[str, ...] | None = None
    rope_layers: tuple[bool, ...] | None = None
    theta: float = THETA
    qk_scale: float = 3.87
    multiplier: float = 0.61
    softcap: float = 20.0
    tied: bool = False
    favoured: int = 0
    seed: int = 0

    @property
    def types(self) -> tuple[str, ...]:
        if self.layer_types is not None:
            return tuple(self.layer_types)
        return tuple(FULL if (self.layers - 1 - i) % 4 == 0 else SLIDING for i in range(self.layers))

    @property
    def ropes(self) -> tuple[bool, ...]:
        if self.rope_layers is not None:
            return tuple(self.rope_layers)
        return tuple(kind == SLIDING for kind in self.types)


@dataclass(frozen=True)
class DrafterSpec:
    """Sizes of a tiny drafter; `hidden` and `mask_token` have to fit the target."""

    hidden: int = 128
    intermediate: int = 320
    layers: int = 2
    heads: tuple[int, int] = (8, 2)
    head_dim: int = 16
    window: int = 24
    block: int = 16
    mask_token: int = 508
    taps: tuple[int, ...] = (0, 1, 2)
    theta: float = THETA
    seed: int = 1


@dataclass(frozen=True)
class Drafter2Spec(DrafterSpec):
    """Sizes of a tiny DFlash-2 drafter; `vocab` has to fit the target."""

    vocab: int = 509
    kernel: int = 2
    group: int = 16
    rank: int = 24
    candidates: int = 7
    causal: bool | None = False
    multiplier: float = 0.61
    softcap: float | None = 20.0
    embedding_scale: float | None = None


@lru_cache(maxsize=4096)
def _uniform(name: str, shape: tuple[int, ...], deviation: float, seed: int, mean: float) -> np.ndarray:
    random = np.random.RandomState(zlib.crc32(f"{seed}:{name}".encode()))
    return (mean + (random.random_sample(shape) - 0.5) * (deviation * 12**0.5)).astype(np.float32)


def uniform(name: str, shape: tuple[int, ...], deviation: float, seed: int, mean: float = 0.0) -> np.ndarray:
    """Float32 uniform numbers of this mean and standard deviation, the same bits on every machine."""
    return _uniform(name, shape, deviation, seed, mean).copy()


def target_weights(spec: TargetSpec) -> Weights:
    """The target's tensors under canonical names: `model.layers.0.self_attn.q_proj.weight`, `lm_head.weight`."""
    query, kv = (heads * spec.head_dim for heads in spec.heads)
    shapes = {"model.embed_tokens": (spec.vocab, spec.hidden), "model.norm": (spec.hidden,)}
    for i in range(spec.layers):
        block = f"model.layers.{i}."
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            shapes[f"{block}{norm}_layernorm"] = (spec.hidden,)
        for name, rows in (("q", query), ("k", kv), ("v", kv), ("gate", query)):
            shapes[f"{block}self_attn.{name}_proj"] = (rows, spec.hidden)
        shapes[f"{block}self_attn.o_proj"] = (spec.hidden, query)
        shapes[f"{block}mlp.gate_proj"] = shapes[f"{block}mlp.up_proj"] = (spec.intermediate, spec.hidden)
        shapes[f"{block}mlp.down_proj"] = (spec.hidden, spec.intermediate)
    if not spec.tied:
        shapes["lm_head"] = (spec.vocab, spec.hidden)
    weights = {f"{name}.weight": _draw(name, shape, spec.seed) for name, shape in shapes.items()}
    table = weights["model.embed_tokens.weight" if spec.tied else "lm_head.weight"]
    if spec.favoured:
        table[1 : spec.favoured : 2] = -table[0 : spec.favoured : 2]
        table[spec.favoured :] *= np.float32(0.03125)
    return weights


def drafter_weights(spec: DrafterSpec) -> Weights:
    """The drafter's tensors as published, without prefix."""
    query, kv = (heads * spec.head_dim for heads in spec.heads)
    shapes = {"encoder.fc": (spec.hidden, len(spec.taps) * spec.hidden)}
    shapes["encoder.output_norm_enc"] = shapes["norm"] = (spec.hidden,)
    for i in range(spec.layers):
        block = f"layers.{i}."
        shapes[f"{block}input_layernorm"] = shapes[f"{block}post_attention_layernorm"] = (spec.hidden,)
        for name, rows in (("q", query), ("k", kv), ("v", kv)):
            shapes[f"{block}self_attn.{name}_proj"] = (rows, spec.hidden)
        shapes[f"{block}self_attn.o_proj"] = (spec.hidden, query)
        shapes[f"{block}self_attn.q_norm"] = shapes[f"{block}self_attn.k_norm"] = (spec.head_dim,)
        shapes[f"{block}mlp.gate_proj"] = shapes[f"{block}mlp.up_proj"] = (spec.intermediate, spec.hidden)
        shapes[f"{block}mlp.down_proj"] = (spec.hidden, spec.intermediate)
    weights = {f"{name}.weight": _draw(name, shape, spec.seed, centred=False) for name, shape in shapes.items()}
    return weights | _second(weights, spec) if isinstance(spec, Drafter2Spec) else weights


def _second(first: Weights, spec: Drafter2Spec) -> Weights:
    """A DFlash-2 drafter's own tensors as published, in place of those with v1's names (which are taken out)."""
    weights = {"fc.weight": first.pop("encoder.fc.weight")}
    weights["hidden_norm.weight"] = first.pop("encoder.output_norm_enc.weight")
    groups = spec.hidden // spec.group
    for conv in (f"layers.{i}.{name}_conv" for i in range(spec.layers) for name in ("attention", "mlp")):
        base = uniform(f"{conv}.base_kernel", (2, spec.kernel, spec.hidden), 0.3, spec.seed)
        base[:, 0] += 1
        weights[f"{conv}.base_kernel"] = base
        name = f"{conv}.kernel_projection"
        weights[f"{name}.weight"] = _draw(name, (2 * spec.kernel * groups, spec.hidden), spec.seed)
    selector = "candidate_selector."
    for name in ("predecessor_codebook", "successor_codebook"):
        weights[selector + name] = uniform(selector + name, (spec.vocab, spec.rank), 0.7, spec.seed)
    name = f"{selector}hidden_projection"
    weights[f"{name}.weight"] = _draw(name, (spec.rank, spec.hidden), spec.seed)
    return weights


def _draw(name: str, shape: tuple[int, ...], seed: int, centred: bool = True) -> np.ndarray:
    if len(shape) == 1:
        return uniform(name, shape, 0.25, seed, 0.0 if centred and name != "model.norm" else 1.0)
    if name == "model.embed_tokens":
        return uniform(name, shape, 0.7, seed)
    return uniform(name, shape, (5.0 if name == "lm_head" else 1.0) * shape[1] ** -0.5, seed)


def tiny_specs(**sizes: Any) -> tuple[TargetSpec, DrafterSpec]:
    """Two specs that fit each other, from plain sizes: target fields by name, drafter fields as `drafter_...`.

    `block`, `taps` and `mask_token` are the drafter's; window and hidden size are shared unless given apart.
    `generation` 2 is a DFlash-2 drafter.
    """
    mine, kind = {"block", "taps", "mask_token"}, DrafterSpec if sizes.pop("generation", 1) == 1 else Drafter2Spec
    drafter = {name: sizes.pop(name) for name in list(sizes) if name in mine}
    drafter |= {name.removeprefix("drafter_"): sizes.pop(name) for name in list(sizes) if name.startswith("drafter_")}
    target = TargetSpec(**sizes)
    last = max(0, target.layers - 2)  # transformers gives the last layer's output only after the final norm
    fitting: dict[str, Any] = {
        "hidden": target.hidden,
        "window": target.window,
        "mask_token": target.vocab - 1,
        "taps": tuple(sorted({0, target.layers // 2 - 1, last})),
        "seed": target.seed + 1,
    }
    if kind is Drafter2Spec:
        fitting["vocab"] = target.vocab
    return target, kind(**(fitting | drafter))


def spec_dict(target: TargetSpec, drafter: DrafterSpec) -> dict[str, Any]:
    """Both specs as JSON, to go into a golden file or to another process."""
    return {"target": asdict(target), "drafter": asdict(drafter)}


def specs_from(data: Mapping[str, Any]) -> tuple[TargetSpec, DrafterSpec]:
    """The specs that `spec_dict` wrote."""

    def tuples(values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}

    kind = Drafter2Spec if "kernel" in data["drafter"] else DrafterSpec
    return replace(TargetSpec(), **tuples(data["target"])), replace(kind(), **tuples(data["drafter"]))
