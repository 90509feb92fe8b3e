"""The cost model: bytes and operations of a round, counted from the configs, and the seconds that a chip should need.

The counts follow from the architecture. The seconds are predictions: a part of the work takes the time to read its
bytes or to do its operations, whichever is longer, softened where the two are close, at the shares of the chip's
speeds that published runs reach (docs/measuring.md holds the comparison).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from .chips import Chip
from .config import KV_BITS, Shape, TargetConfig, kv_group
from .drafter_config import DFlash2Config, DrafterConfig

LOGIT_BYTES = 4  # logits are float32
# Both were fitted to published runs of stock MLX and others; what they leave unexplained stands in docs/measuring.md.
BANDWIDTH_SHARE = 0.78  # of the memory's bandwidth that a decoding forward reaches
COMPUTE_SHARE = 0.4  # of the shader cores' fp32 rate that products of 2 to 16 quantised rows reach


class Work(NamedTuple):
    """Bytes that are read or written, each counted once, and floating-point operations."""

    nbytes: float
    flops: float


class Speeds(NamedTuple):
    """What a machine reaches: bytes and operations per second."""

    bandwidth: float
    compute: float

    @classmethod
    def of(cls, chip: Chip) -> Speeds:
        """What a forward is expected to reach on this chip."""
        return cls(chip.bandwidth * BANDWIDTH_SHARE, chip.flops * COMPUTE_SHARE)

    def seconds(self, work: Work) -> float:
        """Predicted seconds: reading and computing overlap, and hide each other but for where they are alike."""
        return math.hypot(work.nbytes / self.bandwidth, work.flops / self.compute)


def quantised_bytes(bits: int, group_size: int = 64) -> float:
    """Bytes of a weight in MLX's affine groups: its bits, and a group's scale and bias of 16 bits each."""
    return (bits + 32 / group_size) / 8


def cache_row_bytes(shape: Shape, item: int) -> int:
    """Bytes of one position's keys and values in one layer."""
    return 2 * shape.num_kv_heads * shape.head_dim * item


def full_row_bytes(shape: Shape, item: int, kv_bits: int | None) -> int:
    """As `cache_row_bytes` in a full layer, which may be quantised: each group has a scale and a bias besides."""
    if kv_bits is None:
        return cache_row_bytes(shape, item)
    group = kv_group(shape.head_dim)
    return 2 * shape.num_kv_heads * shape.head_dim // group * (group * KV_BITS // 8 + 2 * item)


def target_parameters(config: TargetConfig) -> dict[str, int]:
    """Parameters by part; a tied head has none of its own."""
    width, layers, vocab = config.hidden_size, config.num_layers, config.vocab_size
    return {
        "attention": layers * (_attention(config) + width * config.num_heads * config.head_dim),  # and its output gate
        "mlp": layers * _mlp(config),
        "norms": (4 * layers + 1) * width,
        "table": vocab * width,
        "head": 0 if config.tie_word_embeddings else vocab * width,
    }


def drafter_parameters(config: DrafterConfig) -> dict[str, int]:
    """Parameters by part; "projection" joins the taps."""
    width, layers = config.hidden_size, config.num_layers
    second = {}
    if isinstance(config, DFlash2Config):
        assert config.vocab_size is not None
        kernels = 2 * config.kernel_size * width
        second = {
            "convolutions": layers * 2 * (kernels + kernels // config.group_size * width),
            "selector": config.rank * width,
            "codebooks": 2 * config.vocab_size * config.rank,  # of which a block reads a few rows
        }
    return second | {
        "projection": len(config.taps) * width * width,
        "attention": layers * _attention(config),
        "mlp": layers * _mlp(config),
        "norms": layers * (2 * width + 2 * config.head_dim) + 2 * width,
    }


def _attention(shape: Shape) -> int:
    """Parameters of a layer's four projections."""
    return 2 * shape.hidden_size * (shape.num_heads + shape.num_kv_heads) * shape.head_dim


def _mlp(shape: Shape) -> int:
    return 3 * shape.hidden_size * shape.intermediate_size


@dataclass(frozen=True)
class Costs:
    """Counts the work of a pair's rounds.

    Attributes:
        weight_bytes: mean bytes of one of the target's weights as it is stored; `drafter_weight_bytes` likewise.
        item: bytes of one cached number.
        kv_bits: 8 where the full layers' cache is quantised.
    """

    target: TargetConfig
    drafter: DrafterConfig | None
    weight_bytes: float
    drafter_weight_bytes: float = 2
    item: int = 2
    kv_bits: int | None = None

    @classmethod
    def of_files(
        cls, target: TargetConfig, drafter: DrafterConfig | None, target_bytes: int, drafter_bytes: int, item: int
    ) -> Costs:
        """For weights that take so many bytes in their files."""
        stored = target_bytes / sum(target_parameters(target).values())
        drafter_stored = drafter_bytes / sum(drafter_parameters(drafter).values()) if drafter else 0.0
        return cls(target, drafter, stored, drafter_stored, item)

    def forward(self, rows: int, context: int, streams: int = 1) -> dict[str, Work]:
        """One forward of the target.

        Args:
            rows: of each stream.
            context: positions that each stream holds before them.
            streams: sessions whose rows go through together: they share the weights and nothing else.
        Returns:
            Work by part. The table is not read as a whole and counts as nothing.
        """
        config, total = self.target, rows * streams
        parameters = target_parameters(config)
        head = config.vocab_size * config.hidden_size  # a tied head reads the table
        keys = {"KV, full layers": context + rows, "KV, sliding layers": min(context, config.window - 1) + rows}
        layers = {"KV, full layers": config.full_layers, "KV, sliding layers": config.num_layers - config.full_layers}
        work = {
            part: Work(numbers * self.weight_bytes, 2 * numbers * total)
            for part, numbers in (("attention", parameters["attention"]), ("mlp", parameters["mlp"]), ("head", head))
        }
        for part, seen in keys.items():
            work[part] = _attended(config, layers[part], rows, seen, self.item, streams)
        if self.kv_bits:  # read packed, written wide, read wide
            read, (nbytes, flops) = full_row_bytes(config, self.item, self.kv_bits), work["KV, full layers"]
            packed = config.full_layers * streams * keys["KV, full layers"] * read
            work["KV, full layers"] = Work(2 * nbytes + packed, flops)
        work["logits"] = Work(total * config.vocab_size * LOGIT_BYTES, 0)
        return work

    def draft(self, slots: int, scored: int, context: int, streams: int = 1) -> dict[str, Work]:
        """One draft: the block, and the projection of as many rows as were scored the last time.

        Args:
            slots: of the block, the anchor's included: the draft length and 1, or the whole block.
            scored: slots whose logits are wanted, the draft length.
            context: positions before the block.
            streams: sessions that draft together.
        """
        config = self.drafter
        assert config is not None
        parameters = drafter_parameters(config)
        layers = sum(parameters.get(part, 0) for part in ("attention", "mlp", "convolutions", "selector"))
        head = self.target.vocab_size * config.hidden_size
        return {
            "drafter": Work(layers * self.drafter_weight_bytes, 2 * layers * slots * streams),
            "projection": Work(
                parameters["projection"] * self.drafter_weight_bytes, 2 * parameters["projection"] * scored * streams
            ),
            "drafter's KV": _attended(
                config, config.num_layers, slots, min(context, config.window) + slots, self.item, streams
            ),
            "drafter's head": Work(head * self.weight_bytes, 2 * head * scored * streams),
            "drafter's logits": Work(scored * streams * self.target.vocab_size * LOGIT_BYTES, 0),
        }

    def round(self, draft_length: int, context: int, streams: int = 1, slots: int | None = None) -> dict[str, Work]:
        """A whole round: the draft, if any, and the forward that verifies it; `slots` as in `draft`."""
        work = self.forward(draft_length + 1, context, streams)
        if draft_length:
            work |= self.draft(slots or draft_length + 1, draft_length, context, streams)
        return work

    def round_seconds(
        self, speeds: Speeds, draft_length: int, context: int, streams: int = 1, slots: int | None = None
    ) -> float:
        """Predicted seconds of a round; `slots` as in `draft`."""
        return sum(map(speeds.seconds, self.round(draft_length, context, streams, slots).values()))


def _attended(shape: Shape, layers: int, rows: int, keys: int, item: int, streams: int) -> Work:
    """Attention of `rows` queries over `keys` positions: each key and value is read once, each score made once."""
    flops = 4 * rows * keys * shape.num_heads * shape.head_dim
    return Work(layers * streams * keys * cache_row_bytes(shape, item), layers * streams * flops)
