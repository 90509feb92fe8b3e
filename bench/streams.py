"""Tokens per second with 1, 2, 4 and 8 requests at once, in total and for each, plain and drafted, on the pocket pair.

Every cell submits its requests together to one engine and waits for all; greedy, different prompts. Plain and drafted
runs of one count follow each other. "auto" is the policy that a server uses, which may stop drafting by itself.

Usage: python bench/streams.py [--streams 1,2,4,8] [--lengths 0,3,auto] [--tokens 96] [--repeats 2] [--draft NAME]
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import mlx.core as mx

from dflash_mlx import load
from dflash_mlx.bench.order import orders
from dflash_mlx.engine import Engine
from dflash_mlx.pair import Pair
from dflash_mlx.text import encode

PROMPTS = (
    "def read_lines(path):\n", "class TestQueue(unittest.TestCase):\n", "import os\nimport sys\n\n\ndef main(",
    "def parse(self, text):\n", "for name in sorted(", "class Handler:\n    def __init__(self", "try:\n    import ",
    "def test_empty(self):\n",
)  # fmt: skip


def rate(pair: Pair, prompts: list[list[int]], tokens: int, length: int | str) -> tuple[float, float]:
    """Generated tokens per second of all together, and the share of rounds that drafted."""
    engine = Engine(pair, max_streams=len(prompts))
    begun = time.perf_counter()
    tickets = [engine.submit(prompt, max_tokens=tokens, draft_length=length) for prompt in prompts]
    done = [ticket.result() for ticket in tickets]
    seconds = time.perf_counter() - begun
    engine.close()
    rounds = [one for generation in done for one in generation.stats.rounds]
    return sum(len(generation.tokens) for generation in done) / seconds, sum(one.drafted > 0 for one in rounds) / len(
        rounds
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,2,4,8")
    parser.add_argument("--lengths", default="0,3,auto")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--draft", default="auto", help="as for load(): v1, dflash2, a folder")
    arguments = parser.parse_args()
    mx.set_default_device(mx.cpu)
    pair = load("pocket", arguments.draft)
    prompts = [encode(pair.tokenizer, text) for text in PROMPTS]
    lengths = arguments.lengths.split(",")
    rate(pair, prompts[:1], 16, 3)  # warm-up
    print("| streams | draft length | tok/s in total | tok/s each | rounds that drafted |\n|---|---|---|---|---|")
    for count in map(int, arguments.streams.split(",")):
        found: dict[str, list[tuple[float, float]]] = {length: [] for length in lengths}
        for order in orders(lengths, arguments.repeats):
            for length in order:
                asked = length if length == "auto" else int(length)
                found[length].append(rate(pair, prompts[:count], arguments.tokens, asked))
        for length, cells in found.items():
            total, drafted = (median(column) for column in zip(*cells, strict=True))
            print(f"| {count} | {length} | {total:.1f} | {total / count:.1f} | {100 * drafted:.0f} % |", flush=True)


if __name__ == "__main__":
    main()
