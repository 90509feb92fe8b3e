"""Configs and tensor names of every layout that checkpoints come in.

Canonical is mlx-lm's naming: `model.layers.0.self_attn.q_proj.weight`, `lm_head.weight`.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from specs import SLIDING, Drafter2Spec, DrafterSpec, TargetSpec, uniform
from stored import Weights

LAYOUTS = ("transformers", "flat", "legacy", "mlx-lm", "mlx-vlm")
# Where a layout keeps the text model, its head and its vision tensors (None: it has none).
PREFIXES: dict[str, tuple[str, str, str | None]] = {
    "transformers": ("model.language_model.", "lm_head.", "model."),
    "flat": ("model.", "lm_head.", None),
    "legacy": ("model.", "lm_head.", None),
    "mlx-lm": ("model.", "lm_head.", None),
    "mlx-vlm": ("language_model.model.", "language_model.lm_head.", ""),
}
VISION = {
    "model_type": "muse_glimmer_vision",
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 2,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}
LEGACY_NAMES = {  # the older export's post_attention_layernorm is today's pre_feedforward_layernorm
    "post_attention_layernorm": "post_attn_norm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_ffn_norm",
}


def text_config(spec: TargetSpec, dtype: str = "float32") -> dict[str, Any]:
    """The target's `text_config` as transformers writes it."""
    return {
        "model_type": "muse_glimmer_text",
        "vocab_size": spec.vocab,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads[0],
        "num_key_value_heads": spec.heads[1],
        "head_dim": spec.head_dim,
        "hidden_activation": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "post_norm_eps": 1e-8,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "sliding_window": spec.window,
        "qk_scale_factor": spec.qk_scale,
        "output_multiplier": spec.multiplier,
        "final_logit_softcapping": spec.softcap,
        "tie_word_embeddings": spec.tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.theta},
        "layer_types": list(spec.types),
        "layer_rope_theta": [spec.theta if rope else 0 for rope in spec.ropes],
        "bos_token_id": 0,
        "eos_token_id": None,
        "pad_token_id": None,
        "dtype": dtype,
    }


def target_config(spec: TargetSpec, layout: str = "transformers", dtype: str = "float32") -> dict[str, Any]:
    """A whole `config.json` in one of the layouts."""
    text = text_config(spec, dtype)
    if layout in ("transformers", "mlx-lm", "mlx-vlm"):
        return {
            "architectures": ["MuseGlimmerForConditionalGeneration"],
            "model_type": "muse_glimmer",
            "text_config": text,
            "vision_config": VISION,
            "image_token_id": 200092,
            "video_token_id": 200091,
            "out_hidden_size": 192,
            "projector_hidden_size": 40,
            "tie_word_embeddings": spec.tied,
        }
    flat = text | {"architectures": ["MuseGlimmerForCausalLM"], "model_type": "muse_glimmer"}
    if layout == "legacy":
        rope = flat.pop("rope_parameters")
        del flat["layer_rope_theta"]
        flat |= {
            "rope_theta": rope["rope_theta"],
            "hidden_act": flat.pop("hidden_activation"),
            "output_soft_cap_temp": flat.pop("final_logit_softcapping"),
            "no_rope_layers": [int(rotates) for rotates in spec.ropes],
            "qk_scale_factor": spec.qk_scale * spec.head_dim**0.5,  # the older schema's raw factor
        }
    return flat


def drafter_config(spec: DrafterSpec, dtype: str = "float32") -> dict[str, Any]:
    """The drafter's `config.json` as published: v1's is flat, DFlash-2's has a nested part."""
    if isinstance(spec, Drafter2Spec):
        return _second_config(spec, dtype)
    return {
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": "muse_glimmer_assistant",
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads[0],
        "num_key_value_heads": spec.heads[1],
        "head_dim": spec.head_dim,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.theta},
        "max_position_embeddings": 4096,
        "sliding_window": spec.window,
        "layer_types": [SLIDING] * spec.layers,
        "hidden_act": "silu",
        "block_size": spec.block,
        "mask_token_id": spec.mask_token,
        "target_layer_ids": list(spec.taps),
        "dtype": dtype,
    }


def _second_config(spec: Drafter2Spec, dtype: str) -> dict[str, Any]:
    """A DFlash-2 drafter's; fields whose value is `None` are left out."""
    flat = drafter_config(
        DrafterSpec(**{field.name: getattr(spec, field.name) for field in fields(DrafterSpec)}), dtype
    )
    nested = {name: flat.pop(name) for name in ("block_size", "mask_token_id", "target_layer_ids")} | {
        "conv_group_size": spec.group,
        "conv_kernel_size": spec.kernel,
        "selector_rank": spec.rank,
        "selector_top_k": spec.candidates,
        "output_multiplier": spec.multiplier,
        "final_logit_softcapping": spec.softcap,
        "input_embedding_scale": spec.embedding_scale,
    }
    flat |= {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "use_sliding_window": True,
        "max_window_layers": spec.layers,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": spec.vocab,
        "is_causal": spec.causal,
        "dflash_config": {name: value for name, value in nested.items() if value is not None},
    }
    return {name: value for name, value in flat.items() if value is not None}


def vision_tensors(prefix: str, hidden: int) -> Weights:
    """All tensors of a one-layer vision tower under their published names; the text model has to skip them."""
    width, inner, merged, projector = VISION["hidden_size"], VISION["intermediate_size"], 192, 40
    tower = "vision_tower."
    shapes: dict[str, tuple[int, ...]] = {
        f"{tower}patch_embedder.patch_embedding.weight": (width, 24),
        f"{tower}patch_embedder.position_embedding_table.weight": (16, width),
        "vision_adapter.fc1.weight": (projector, merged),
        "vision_adapter.fc2.weight": (projector, projector),
        "vision_projection.weight": (hidden, projector),
    }
    for name in ("ln_pre", "ln_post", "layers.0.norm1", "layers.0.norm2"):
        shapes[f"{tower}{name}.weight"] = shapes[f"{tower}{name}.bias"] = (width,)
    linears = {f"attn.{name}": (width, width) for name in ("q_proj", "k_proj", "v_proj", "proj")}
    for name, shape in (linears | {"mlp.fc1": (inner, width), "mlp.fc2": (width, inner)}).items():
        shapes[f"{tower}layers.0.{name}.weight"] = shape
        shapes[f"{tower}layers.0.{name}.bias"] = shape[:1]
    return {prefix + name: uniform(name, shape, 0.02, 7) for name, shape in shapes.items()}


def layout_name(canonical: str, layout: str) -> str:
    """A canonical tensor name or module path in one layout's naming."""
    text, head, _ = PREFIXES[layout]
    if canonical.startswith("lm_head"):
        return head.removesuffix("lm_head.") + canonical
    name = text + canonical.removeprefix("model.")
    if layout == "legacy":
        *start, module, last = name.split(".")
        name = ".".join([*start, LEGACY_NAMES.get(module, module), last])
    return name
