"""How a round's time and memory grow with the context and with the draft length, on the pocket pair, in float32.

The pair's context is lifted to 131,072 positions (full layers have no positions, so only the sizes matter), and each
context is made up: caches of that length with noise in them, as a round's time does not depend on what was written.
Every cell is a run of rounds with one draft length; the medians are printed, and beside them the bytes that a round
reads as the cost model counts them. Host time is processor time of the host's thread (`Round.cpu_s`): nothing on the
host may grow with the history.

Usage: python bench/scale.py [--contexts 1024,8192,..] [--lengths 0,4,15] [--rounds 10] [--out FILE]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from dflash_mlx import load
from dflash_mlx.choice import Choice
from dflash_mlx.costs import Costs
from dflash_mlx.options import Options
from dflash_mlx.output import Output
from dflash_mlx.pair import Pair
from dflash_mlx.round import Work, step
from dflash_mlx.state import HostReads, State
from dflash_mlx.text import TextStream

LONGEST = 131072
CONTEXTS = (1024, 4096, 16384, 65536, LONGEST)
LENGTHS = (0, 1, 3, 7, 15)


def lifted_pair() -> Pair:
    """The pocket pair in float32, with room for the longest context and its last rounds."""
    pair = load("pocket", max_context=4096)
    for model in (pair.target, pair.drafter):
        assert model is not None
        model.update(tree_map(lambda array: array.astype(mx.float32), model.parameters()))
        mx.eval(model.parameters())
    plan = dataclasses.replace(pair.plan, context=LONGEST + 4096)
    return dataclasses.replace(pair, dtype=mx.float32, plan=plan, eos_token_ids=frozenset())


def made_up_state(pair: Pair, context: int) -> State:
    """A session that holds `context` positions of noise."""
    state = State(pair)
    state.tokens = [5 + position % 1000 for position in range(context + 1)]
    state.cache.offset = context - 1
    state.cache.reserve(1)  # grows the full layers
    state.cache.offset = context
    assert state.context is not None
    state.context.skip_to(max(0, context - state.context.window))
    state.context.advance(context - state.context.offset)
    for history in (state.cache, state.context):
        for rows in history.layers:
            rows.keys, rows.values = (mx.random.normal(array.shape) for array in (rows.keys, rows.values))
            mx.eval(rows.keys, rows.values)
    return state


def measure(pair: Pair, context: int, length: int, rounds: int) -> dict[str, float]:
    """Medians over the rounds of one draft length behind one context."""
    state = made_up_state(pair, context)
    options = Options(max_tokens=LONGEST)
    output, choice = Output(TextStream(None), frozenset(), LONGEST), Choice(options, 0, 0)
    reads, found = HostReads(), []
    held = 0
    for number in range(rounds + 2):
        if number == 2:  # the first rounds pay for what is kept afterwards
            held = mx.get_active_memory()
            mx.reset_peak_memory()
        (done,) = step([Work(state, choice, output, 1, length)], reads)
        if isinstance(done, Exception):
            raise done
        found.append(done)
    kept = found[2:]
    return {
        "round_ms": 1000 * median(done.total_s for done in kept),
        "host_ms": 1000 * median(done.cpu_s for done in kept),
        "held_mb": held / 1e6,
        "peak_mb": (mx.get_peak_memory() - held) / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", default=",".join(map(str, CONTEXTS)))
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, help="write the cells as JSON")
    arguments = parser.parse_args()
    mx.set_default_device(mx.cpu)
    pair = lifted_pair()
    assert pair.drafter is not None
    costs = Costs(pair.target.config, pair.drafter.config, 4, 4, 4)
    cells: list[dict[str, Any]] = []
    print("| context | draft length | round ms | host ms | MB read (counted) | MB held | MB more at peak |")
    print("|---|---|---|---|---|---|---|")
    for context in map(int, arguments.contexts.split(",")):
        for length in map(int, arguments.lengths.split(",")):
            cell = measure(pair, context, length, arguments.rounds)
            read = sum(work.nbytes for work in costs.round(length, context).values()) / 1e6
            cells.append({"context": context, "draft_length": length, "read_mb": read, **cell})
            figures = f"{cell['round_ms']:.1f} | {cell['host_ms']:.2f} | {read:.0f} | {cell['held_mb']:.0f}"
            print(f"| {context} | {length} | {figures} | {cell['peak_mb']:.1f} |", flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(cells, indent=1) + "\n")


if __name__ == "__main__":
    main()
