"""How many launches a draft takes, v1 against DFlash-2: counted from the graph of block and proposal.

A launch is an operation that is not a view of its input (bench/sampling_costs.py). The context's projection is not
counted: it is the same code for both. On the CPU, MLX makes its fused norm, RoPE and attention of smaller operations,
and what is compiled into one launch is counted apart here, so a GPU has fewer; what DFlash-2 adds has none of these in
it, so the difference holds there too.

Command: python bench/drafter_launches.py
"""

from __future__ import annotations

import argparse
from typing import Any

import mlx.core as mx
from sampling_costs import cost

import dflash_mlx
from dflash_mlx.cache import DrafterContext
from dflash_mlx.choice import Choice
from dflash_mlx.options import Options
from dflash_mlx.slots import Slots


def launches(pair: Any, length: int, options: Options) -> tuple[int, int]:
    """Of the block up to its logits, and of the whole draft with the proposal."""
    drafter = pair.drafter
    block = mx.array([1, *[drafter.config.mask_token_id] * length], dtype=mx.uint32)

    def slots(block: mx.array) -> Slots:
        context = DrafterContext(drafter.config, pair.dtype)
        context.skip_to(100)
        return drafter.draft(block, context, pair.target, length)

    def logits(block: mx.array) -> mx.array:
        return slots(block).logits

    def proposal(block: mx.array) -> mx.array:
        return Choice(options, 1).proposal(slots(block), 101, list(range(101)))

    return cost(logits, block).launches, cost(proposal, block).launches


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--drafts", nargs="+", default=["v1", "dflash2"])
    asked = parser.parse_args()
    mx.set_default_device(mx.cpu)
    mx.disable_compile()  # an exported graph holds single operations only
    lengths = (1, 4, 7, 15)
    print(f"| drafter | layers | options | {' | '.join(f'k = {length}' for length in lengths)} |")
    print(f"|---|---|---|{'---|' * len(lengths)}")
    for draft in asked.drafts:
        pair = dflash_mlx.load(asked.model, draft=draft)
        for name, options in (("greedy", Options()), ("sampled", Options(temperature=0.7))):
            cells = ["{}, {}".format(*launches(pair, length, options)) for length in lengths]
            print(f"| {pair.drafter_kind} | {pair.drafter.config.num_layers} | {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
