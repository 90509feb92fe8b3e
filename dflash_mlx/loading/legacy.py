"""The legacy flat export: other field names, other norm names, and a query factor that is not yet divided.

Source: vLLM's and SGLang's Muse Glimmer configs. There `qk_scale_factor` is 43.78 = 3.87 * sqrt(128) and the query
is multiplied by it over sqrt(head_dim); using it as it stands would scale twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import CheckpointError, must

FIELDS = {"hidden_act": "hidden_activation", "output_soft_cap_temp": "final_logit_softcapping"}
SWITCHES = ("use_qk_norm", "use_attn_output_gate", "normalize_tok_embeddings", "rope_is_neox_style")
NORMS = {
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "post_attn_norm": "post_attention_layernorm",
    "post_ffn_norm": "post_feedforward_layernorm",
}
MARKS = ("output_soft_cap_temp", "no_rope_layers", "hidden_act")  # fields that only the legacy config has
MARK = ".post_attn_norm."  # only the legacy export has it, and there the other norms' names mean other norms


def modern_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A legacy target's config with today's field names and the divided query factor; others come back as they are.

    Raises:
        CheckpointError: a switch asks for a variant of the architecture that this runtime has not got.
    """
    if "text_config" in raw or not any(mark in raw for mark in MARKS):
        return dict(raw)
    config = dict(raw)
    for switch in SWITCHES:
        value = config.pop(switch, None)
        if value not in (None, True):
            todo = "This runtime implements no other value."
            raise CheckpointError(must("config", switch, "true", repr(value), todo))
    for old, new in FIELDS.items():
        if old in config and new not in config:
            config[new] = config.pop(old)
    theta, rotates = config.get("rope_theta"), config.pop("no_rope_layers", None)
    if rotates is not None and "layer_rope_theta" not in config:  # despite its name, 1 is a layer with RoPE
        config["layer_rope_theta"] = [theta if rotate else 0 for rotate in rotates]
    return _divided(config)


def _divided(config: dict[str, Any]) -> dict[str, Any]:
    """`qk_scale_factor` as the factor of the normed query: a raw one is at least sqrt(head_dim)."""
    final, scale, size = config.pop("scale_query_by", None), config.get("qk_scale_factor"), config.get("head_dim")
    if final is not None:
        config["qk_scale_factor"] = final
    elif isinstance(scale, (int, float)) and isinstance(size, int) and size > 0 and scale >= math.sqrt(size):
        config["qk_scale_factor"] = scale / math.sqrt(size)
    return config


def is_legacy(names: Iterable[str]) -> bool:
    """Whether a checkpoint's tensors have the legacy names."""
    return any(MARK in name for name in names)


def modern_name(name: str) -> str:
    """A legacy tensor's canonical name, from its name without prefix."""
    parts = [NORMS.get(part, part) for part in name.split(".")]
    return ".".join(parts).replace("self_attn.output_gate_proj", "self_attn.gate_proj")
