"""What the two generations of drafters say in their config files; which one it is, their own fields tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .config import SLIDING, Shape, TargetConfig, check_family, max_rows, shape_fields
from .errors import CheckpointError, must
from .fields import SAME_RELEASE, Fields

DRAFTER_MODEL_TYPES = ("muse_glimmer_assistant",)
DFLASH2_ARCHITECTURE = "DFlash2DraftModel"
# What only a DFlash-2 config has; the model_type that they are published with ("qwen3") tells nothing.
DFLASH2_FIELDS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def _block(fields: Fields) -> dict[str, Any]:
    """What both drafters' configs say: `Shape`, and the fields of the block, flat or under `dflash_config`."""
    fields.expect("hidden_act", "silu")
    shape, block, taps = shape_fields(fields), fields.integer("block_size", 2), fields.integers("target_layer_ids")
    layers, window = shape["num_layers"], shape["window"]
    types = fields.typed("layer_types", (list, tuple), "a list")
    if types is not None and (len(types) != layers or any(kind != SLIDING for kind in types)):
        todo = "Only drafters whose layers all slide are supported."
        raise CheckpointError(must("config", "layer_types", f"{layers} times '{SLIDING}'", repr(types), todo))
    if not taps or list(taps) != sorted(set(taps)):
        expected = "a non-empty increasing list of target layers"
        raise CheckpointError(must("config", "target_layer_ids", expected, list(taps), SAME_RELEASE + "."))
    if block > max_rows(window):
        expected = f"at most {max_rows(window)} with a window of {window}"
        raise CheckpointError(must("config", "block_size", expected, block, SAME_RELEASE + "."))
    runtime = fields.integer("runtime_block_size", 2) if fields.get("runtime_block_size") is not None else block
    if runtime > block:
        todo = SAME_RELEASE + "."
        raise CheckpointError(must("config", "runtime_block_size", f"at most block_size ({block})", runtime, todo))
    return {
        **shape,
        "block_size": block,
        "runtime_block_size": runtime,
        "mask_token_id": fields.integer("mask_token_id", 0),
        "taps": taps,
        "vocab_size": fields.get("vocab_size"),
        "num_target_layers": fields.get("num_target_layers"),
    }


@dataclass(frozen=True)
class DrafterConfig(Shape):
    """A DFlash v1 drafter. Source: transformers 5.24, `muse_glimmer_assistant`.

    Attributes:
        runtime_block_size: the most slots that `draft_length="auto"` may use.
        taps: the target's layers that the drafter reads.
        vocab_size, num_target_layers: checked against the target where the file says them.
    """

    block_size: int
    runtime_block_size: int
    mask_token_id: int
    taps: tuple[int, ...]
    vocab_size: int | None
    num_target_layers: int | None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> DrafterConfig:
        """Parse a drafter's `config.json`: flat, or with block fields nested under `dflash_config`.

        Raises:
            CheckpointError: a field is missing, contradictory or unsupported, or another family's.
        """
        check_family(raw, DRAFTER_MODEL_TYPES, "DFlash drafter")
        return cls(**_block(Fields(raw, "dflash_config")))

    @property
    def span(self) -> int:
        """How far a slot sees: |q - p| < span. The window counts from each slot and includes its far edge."""
        return self.window + 1

    @property
    def causal(self) -> bool:
        """Whether a slot sees only what is before it in the block."""
        return False

    def check_fits(self, target: TargetConfig) -> None:
        """The drafter reads this target's features, table and head.

        Raises:
            CheckpointError: hidden size, taps or mask token do not fit the target.
        """
        todo = "This drafter belongs to another target."
        if self.hidden_size != target.hidden_size:
            expected = f"the target's {target.hidden_size}"
            raise CheckpointError(must("config", "hidden_size of the drafter", expected, self.hidden_size, todo))
        if self.taps[-1] >= target.num_layers:
            expected = f"layers below {target.num_layers}"
            raise CheckpointError(must("config", "target_layer_ids", expected, list(self.taps), todo))
        if self.num_target_layers not in (None, target.num_layers):
            expected = f"the target's {target.num_layers}"
            raise CheckpointError(must("config", "num_target_layers", expected, self.num_target_layers, todo))
        if self.vocab_size not in (None, target.vocab_size):
            expected = f"the target's {target.vocab_size}"
            raise CheckpointError(must("config", "vocab_size of the drafter", expected, self.vocab_size, todo))
        if self.mask_token_id >= target.vocab_size:
            expected = f"a token below the target's vocabulary of {target.vocab_size}"
            raise CheckpointError(must("config", "mask_token_id", expected, self.mask_token_id, todo))
        if self.block_size > target.max_rows:
            expected = f"at most {target.max_rows} with the target's window of {target.window}"
            raise CheckpointError(must("config", "block_size", expected, self.block_size, todo))


@dataclass(frozen=True)
class DFlash2Config(DrafterConfig):
    """A DFlash-2 drafter. Source: dflash 0.1.0, `DFlash2DraftModel`, whose defaults are taken.

    Attributes:
        kernel_size, group_size: rows that a convolution mixes, and the channels that share a coefficient.
        rank, candidates: of the selector: width of its codes, and tokens of a slot that it chooses from.
        is_causal: whether a slot sees only what is before it in the block.
        output_multiplier, softcap: of the drafter's logits; a cap of 0 is none.
        embedding_scale: of the target's raw table rows.
    """

    kernel_size: int
    group_size: int
    rank: int
    candidates: int
    is_causal: bool
    output_multiplier: float
    softcap: float
    embedding_scale: float

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> DFlash2Config:
        """Parse a DFlash-2 drafter's `config.json`; its own fields are flat or under `dflash_config`.

        Raises:
            CheckpointError: a field is missing, contradictory or unsupported.
        """
        fields = Fields(raw, "dflash_config")
        fields.expect("attention_bias", False)
        kernel, group, rank, candidates = (fields.integer(name) for name in DFLASH2_FIELDS)
        block = _block(fields)
        if fields.get("layer_types") is None or fields.get("use_sliding_window") is not True:
            # Without either, the library that trained it gives the layers no window at all.
            expected = f"true, with layer_types all '{SLIDING}'"
            found = f"{fields.get('use_sliding_window')!r} with {fields.get('layer_types')!r}"
            raise CheckpointError(must("config", "use_sliding_window", expected, found, SAME_RELEASE + "."))
        if block["hidden_size"] % group:
            expected = f"a divisor of hidden_size ({block['hidden_size']})"
            raise CheckpointError(must("config", "conv_group_size", expected, group, SAME_RELEASE + "."))
        if candidates > fields.integer("vocab_size"):
            expected = f"at most vocab_size ({block['vocab_size']})"
            raise CheckpointError(must("config", "selector_top_k", expected, candidates, SAME_RELEASE + "."))
        causal = fields.typed("is_causal", bool, "true or false")
        return cls(
            **block,
            kernel_size=kernel,
            group_size=group,
            rank=rank,
            candidates=candidates,
            is_causal=True if causal is None else causal,
            output_multiplier=fields.number("output_multiplier", 1.0),
            softcap=0.0 if fields.get("final_logit_softcapping", 0) == 0 else fields.number("final_logit_softcapping"),
            embedding_scale=fields.number("input_embedding_scale", 1.0),
        )

    @property
    def span(self) -> int:
        """How far a slot sees: |q - p| < span. Here the window excludes its far edge."""
        return self.window

    @property
    def causal(self) -> bool:
        return self.is_causal


def drafter_config(raw: Mapping[str, Any]) -> DrafterConfig:
    """The config of whichever drafter the file's own fields describe: its architecture, or DFlash-2's fields.

    Raises:
        CheckpointError: as the two `from_dict`, or the file is one drafter's by one sign and the other's by another.
    """
    fields = Fields(raw, "dflash_config")
    found = [name for name in DFLASH2_FIELDS if fields.get(name) is not None]
    second = DFLASH2_ARCHITECTURE in (fields.typed("architectures", (list, tuple), "a list") or ())
    if found and raw.get("model_type") in DRAFTER_MODEL_TYPES:
        todo = f"The config says {raw['model_type']} (v1) and {DFLASH2_ARCHITECTURE}'s fields; remove the wrong ones."
        raise CheckpointError(must("config", found[0], "absent from a v1 drafter", repr(fields.get(found[0])), todo))
    return DFlash2Config.from_dict(raw) if found or second else DrafterConfig.from_dict(raw)
