"""What noise, filters and choice add to a round: launches and bytes counted from its graph, and time on this CPU.

A launch is an operation that is not a view of its input. Its bytes are those of its inputs and outputs, each counted
once; a sort or a partition that passes over its data several times moves more than that. Counts do not depend on the
device; times do, and the bandwidths' column is a prediction from the bytes alone.

Command: python bench/sampling_costs.py
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import mlx_lm.sample_utils as mlx_lm

from dflash_mlx.choice import Choice
from dflash_mlx.noise import gumbel, position_keys, uniform
from dflash_mlx.options import Options
from dflash_mlx.processors import Processors
from dflash_mlx.slots import Slots

VIEWS = {"Broadcast", "BroadcastAxes", "Reshape", "Flatten", "Unflatten", "ExpandDims", "Squeeze", "Slice", "Transpose"}
ROWS, VOCAB = 16, 202_048
BANDWIDTHS = {"M4 Pro": 273, "M4 Max": 546}  # GB/s
ALL = {"top_p": 0.95, "min_p": 0.02, "top_k": 40}
SETTINGS = {
    "greedy": {},
    "temperature": {"temperature": 0.7},
    "min_p": {"temperature": 0.7, "min_p": 0.02},
    "top_k": {"temperature": 0.7, "top_k": 40},
    "top_p": {"temperature": 0.7, "top_p": 0.95},
    "top_p, min_p, top_k": {"temperature": 0.7, **ALL},
    "the same, bias and penalty": {
        "temperature": 0.7, **ALL, "repetition_penalty": 1.1, "logit_bias": {7: 1.0, 9: -2.0},
    },
}  # fmt: skip
Graph = Callable[..., object]


@dataclass
class Cost:
    """Counts of one graph."""

    launches: int
    nbytes: int
    sorted_rows: list[int]  # row lengths that are sorted or partitioned


def cost(graph: Graph, *inputs: mx.array) -> Cost:
    """Count the operations of a graph."""
    stored: dict[str, int] = {}  # bytes that a name stands for; a view stands for its input's
    found = Cost(0, 0, [])

    def note(item: dict) -> None:
        if item["type"] == "inputs":
            stored.update({name: math.prod(shape) * dtype.size for name, shape, dtype in item["inputs"]})
        elif item["type"] == "constants":
            stored.update({name: array.nbytes for name, array in item["constants"]})
        elif item["type"] == "primitive":
            read = sum(stored[name] for name in {name for name, _, _ in item["inputs"]})
            written = {name: math.prod(shape) * dtype.size for name, shape, dtype in item["outputs"]}
            if item["name"] in VIEWS:
                written = {name: min(size, read) for name, size in written.items()}
            else:
                found.launches += 1
                found.nbytes += read + sum(written.values())
            if "Sort" in item["name"] or "Partition" in item["name"]:
                found.sorted_rows.append(item["inputs"][0][1][-1])
            stored.update(written)

    mx.export_function(note, graph, *inputs)
    return found


def milliseconds(graph: Graph, *inputs: mx.array, repeats: int) -> float:
    """Median of several evaluations after one for warm-up."""
    mx.eval(graph(*inputs))
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        mx.eval(graph(*inputs))
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


def a_round(options: Options, rows: int) -> Graph:
    """Proposal of rows - 1 drafts and choice of `rows` tokens from both models' logits; a plain step for one row."""
    history = list(range(100))

    def graph(draft: mx.array, logits: mx.array) -> list[mx.array]:
        choice = Choice(options, 1)
        if rows == 1:
            return [choice.target(logits, 100, history)]
        proposal = choice.proposal(Slots(draft, 0.2), 100, history)
        return [proposal, choice.target(logits, 100, history, proposal)]

    return graph


def as_mlx_lm(draft: mx.array, logits: mx.array) -> list[mx.array]:
    """The same filters by mlx-lm's own functions in their order, on all rows, with the noise drawn twice."""
    found = []
    for raw in (draft, logits):
        x = raw - mx.logsumexp(raw, axis=-1, keepdims=True)
        x = mlx_lm.apply_top_k(mlx_lm.apply_min_p(mlx_lm.apply_top_p(x, ALL["top_p"]), ALL["min_p"]), ALL["top_k"])
        noise = gumbel(uniform(position_keys(1, 0, 100, raw.shape[0]), raw.shape[1]))
        found.append(mx.argmax(x * (1 / 0.7) + noise, axis=-1))
    return found


def line(name: str, graph: Graph, rows: int, repeats: int) -> str:
    """One row of the table."""
    draft, logits = (mx.random.normal((count, VOCAB)) * 3 for count in (max(1, rows - 1), rows))
    counted = cost(graph, draft, logits)
    predicted = " / ".join(f"{counted.nbytes / speed / 1e6:.2f}" for speed in BANDWIDTHS.values())
    measured = milliseconds(graph, draft, logits, repeats=repeats)
    sorts = ", ".join(f"{length:,}" for length in sorted(set(counted.sorted_rows))) or "none"
    cells = (name, rows, counted.launches, f"{counted.nbytes / 1e6:.0f}", sorts, predicted, f"{measured:.0f}")
    return f"| {' | '.join(map(str, cells))} |"


def processors(repeats: int) -> list[str]:
    """Time that the loop over users' processors takes by itself: one that changes nothing, on 16 rows."""
    lines = []
    for length in (1_000, 131_072):
        run, history = Processors([lambda tokens, logits: logits]), list(range(length))
        logits, drafted = mx.zeros((ROWS, VOCAB)), mx.zeros((ROWS - 1,), dtype=mx.uint32)
        mx.eval(logits, drafted)
        run(logits, history, drafted)
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            run(logits, history, drafted)
            times.append((time.perf_counter() - started) * 1e3)
        lines.append(f"| {length:,} | {statistics.median(times):.2f} |")
    return lines


def main() -> None:
    """Count, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    mx.set_default_device(mx.cpu)
    mx.disable_compile()  # mlx-lm's filters are compiled: that would hide their operations
    print(f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; MLX")
    print(f"{mx.__version__} on the CPU; V = {VOCAB:,}; median of {asked.repeats} after one for warm-up\n")
    heads = ("options", "rows", "launches", "MB", "sorted or partitioned", f"predicted ms, {' / '.join(BANDWIDTHS)}")
    print(f"| {' | '.join(heads)} | CPU ms |\n|{'---|' * (len(heads) + 1)}")
    for rows in (1, ROWS):
        for name, options in SETTINGS.items():
            print(line(name, a_round(Options(**options), rows), rows, asked.repeats), flush=True)
    print(line("top_p, min_p, top_k as in mlx-lm", as_mlx_lm, ROWS, asked.repeats))
    print("\n| history | host ms of a processor that changes nothing, 16 rows |\n|---|---|")
    print("\n".join(processors(asked.repeats)))


if __name__ == "__main__":
    main()
