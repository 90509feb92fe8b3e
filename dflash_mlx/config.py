"""What a target's config file says, and what all models' files say, parsed and checked once into frozen dataclasses.

Nothing is guessed: a field that is missing, contradictory or outside what the models support is a
`CheckpointError` that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import CheckpointError, must
from .fields import SAME_RELEASE, Fields

SLIDING = "sliding_attention"
FULL = "full_attention"
KV_BITS = 8  # of a quantised cache
RING_ALIGNMENT = 16  # rows; a kernel's key tile never crosses the end of a ring
TARGET_MODEL_TYPES = ("muse_glimmer", "muse_glimmer_text")


def ring_rows(window: int) -> int:
    """Rows of a ring for a window: twice the window, at least 32 more than it, rounded up to 16.

    The floor of 32 rows keeps a block of 16 inside one forward for tiny windows too.
    """
    rows = window + max(window, 32)
    return -(-rows // RING_ALIGNMENT) * RING_ALIGNMENT


def max_rows(window: int) -> int:
    """Most rows that one forward may write into a ring: more would overwrite what the window still needs."""
    return ring_rows(window) - window


def kv_group(head_dim: int) -> int:
    """Numbers of a head that share a scale in a quantised cache: 64, else 32; 0 where neither divides the head."""
    return next((size for size in (64, 32) if head_dim % size == 0), 0)


def _default_types(layers: int) -> tuple[str, ...]:
    """transformers' rule: every fourth layer is full, counted from the last one."""
    return tuple(FULL if (layers - 1 - i) % 4 == 0 else SLIDING for i in range(layers))


def _layer_types(fields: Fields, layers: int) -> tuple[str, ...]:
    """The kind of each layer; without the field only where both known default rules agree.

    Source: transformers counts every fourth layer full from the last one, mlx-lm from the first.
    """
    given = fields.typed("layer_types", (list, tuple), "a list")
    if given is None:
        if layers % 4:
            todo = f"With {layers} layers the default rules of transformers and mlx-lm differ."
            raise CheckpointError(must("config", "layer_types", "present", "nothing", todo))
        return _default_types(layers)
    if len(given) != layers or any(kind not in (SLIDING, FULL) for kind in given):
        expected = f"{layers} entries of '{SLIDING}' or '{FULL}'"
        raise CheckpointError(must("config", "layer_types", expected, repr(given), SAME_RELEASE + "."))
    return tuple(given)


def _rope_layers(fields: Fields, types: tuple[str, ...], theta: float) -> tuple[bool, ...]:
    """Which layers rotate: `layer_rope_theta` is 0 on a NoPE layer and the base elsewhere."""
    given = fields.typed("layer_rope_theta", (list, tuple), "a list")
    layers = len(types)
    if given is None:
        if types != _default_types(layers):
            todo = "With this layer_types the libraries disagree about which layers have no RoPE."
            raise CheckpointError(must("config", "layer_rope_theta", "present", "nothing", todo))
        return tuple(kind == SLIDING for kind in types)
    if len(given) != layers or any(base not in (0, theta) for base in given):
        expected = f"{layers} entries, each 0 (no RoPE) or the base {theta:g}"
        raise CheckpointError(must("config", "layer_rope_theta", expected, repr(given), "The RoPE fields contradict."))
    return tuple(base != 0 for base in given)


def check_family(raw: Mapping[str, Any], known: tuple[str, ...], what: str) -> None:
    found = raw.get("model_type")
    if found not in known:
        expected = " or ".join(f"'{name}'" for name in known)
        todo = f"This folder holds no {what}; check --model and --draft."
        raise CheckpointError(must("config", f"model_type of the {what}", expected, repr(found), todo))


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


@dataclass(frozen=True)
class Shape:
    """What both models' configs say."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    window: int


def shape_fields(fields: Fields) -> dict[str, Any]:
    """The fields of `Shape`, checked."""
    heads, kv_heads = fields.integer("num_attention_heads"), fields.integer("num_key_value_heads")
    if heads % kv_heads:
        expected = f"a multiple of num_key_value_heads ({kv_heads})"
        raise CheckpointError(must("config", "num_attention_heads", expected, heads, SAME_RELEASE + "."))
    return {
        "hidden_size": fields.integer("hidden_size"),
        "intermediate_size": fields.integer("intermediate_size"),
        "num_layers": fields.integer("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": fields.integer("head_dim", 2),
        "rms_norm_eps": fields.number("rms_norm_eps"),
        "rope_theta": fields.rope_theta(),
        "window": fields.integer("sliding_window"),
    }


@dataclass(frozen=True)
class TargetConfig(Shape):
    """Muse Glimmer's text model. Source: formats as published with transformers 5.24, `muse_glimmer`."""

    vocab_size: int
    post_norm_eps: float
    layer_types: tuple[str, ...]
    rope_layers: tuple[bool, ...]
    qk_scale: float
    output_multiplier: float
    softcap: float
    tie_word_embeddings: bool
    max_position: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> TargetConfig:
        """Parse a `config.json`, nested under `text_config` or flat.

        Raises:
            CheckpointError: a field is missing, contradictory or unsupported, or another family's.
        """
        check_family(raw, TARGET_MODEL_TYPES, "Muse Glimmer target")
        fields = Fields(raw, "text_config")
        fields.expect("hidden_activation", "silu")
        fields.expect("attention_bias", False)
        shape, vocab = shape_fields(fields), fields.integer("vocab_size")
        types = _layer_types(fields, shape["num_layers"])
        return cls(
            **shape,
            vocab_size=vocab,
            post_norm_eps=fields.number("post_norm_eps"),
            layer_types=types,
            rope_layers=_rope_layers(fields, types, shape["rope_theta"]),
            qk_scale=fields.number("qk_scale_factor"),
            output_multiplier=fields.number("output_multiplier"),
            softcap=fields.number("final_logit_softcapping"),
            tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
            max_position=fields.integer("max_position_embeddings"),
            bos_token_id=fields.token("bos_token_id", vocab),
            eos_token_ids=_token_ids(fields.get("eos_token_id")),
        )

    @property
    def max_rows(self) -> int:
        """Most rows that one forward may write."""
        return max_rows(self.window)

    @property
    def full_layers(self) -> int:
        return sum(kind == FULL for kind in self.layer_types)
