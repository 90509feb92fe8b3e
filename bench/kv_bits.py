"""What a cache of 8 bits does to drafting: accepted share and mean length by turn, against the model's own type.

Each conversation is one session per cache, so the 8 bits of all earlier turns are seen. A turn adds a few lines of code
to the history and decodes an answer. Both caches get the same history, that of the wide cache: so their turns can be
compared, also after answers that differed. Nothing here is a time.

Command: python bench/kv_bits.py --tokens 96 --draft-length 7
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

import dflash_mlx
from dflash_mlx.cache import Part, TargetCache
from dflash_mlx.stats import Generation
from dflash_mlx.text import encode

CONVERSATIONS = [
    [
        "def fibonacci(n):\n",
        "\n\ndef factorial(n):\n",
        "\n\nclass TestFactorial(unittest.TestCase):\n",
        "\n\nif __name__",
    ],
    [
        "class Queue:\n    def __init__(self",
        "\n\n    def put(self, item",
        "\n\n    def get(self",
        "\n\n    def __repr__(",
    ],
    [
        "import os\nimport sys\n\n\ndef main(argv):\n",
        "\n\ndef read_lines(path):\n",
        "\n\ndef usage(",
        "\n\nclass Error(",
    ],
    [
        "async def copy(reader, writer):\n",
        "\n\nasync def serve(host, port",
        "\n\nclass Server:\n",
        "\n\ndef run(",
    ],
    [
        "class TestParser(unittest.TestCase):\n    def test_empty(self):\n",
        "\n\n    def test_error(self",
        "\n\n    def setUp(",
        "\n\nclass TestWriter(",
    ],
    [
        "    def __repr__(self):\n        return",
        "\n\n    def __eq__(self, other",
        "\n\n    def __iter__(",
        "\n\n    def close(",
    ],
    [
        "for name, value in sorted(",
        "\n\nwith open(path",
        "\n\ntry:\n",
        "\n\nwhile ",
    ],
    [
        "import re\n\n_pattern = re.compile(",
        "\n\ndef match(text, pattern",
        "\n\ndef split(",
        "\n\n__all__ = [",
    ],
]
HEADS = (
    *("drafter", "temperature", "turn", "prompt", "accepted", "mean length"),
    *("8 bits: accepted", "mean length", "same", "equal"),
)
BITS = (None, 8)


@dataclass
class Tally:
    """Counts over one turn of all conversations; drafted rounds by bits."""

    drafted: Counter[int | None] = field(default_factory=Counter)
    accepted: Counter[int | None] = field(default_factory=Counter)
    committed: Counter[int | None] = field(default_factory=Counter)
    rounds: Counter[int | None] = field(default_factory=Counter)
    answers: int = 0
    prompt: int = 0
    tokens: int = 0
    same: int = 0
    equal: int = 0

    def add(self, bits: int | None, generation: Generation) -> None:
        """Count the drafted rounds of an answer."""
        for done in generation.stats.rounds:
            if done.drafted:
                self.drafted[bits] += done.drafted
                self.accepted[bits] += done.accepted
                self.committed[bits] += done.committed
                self.rounds[bits] += 1

    def cells(self) -> list[str]:
        """The cells of its row from the prompt on."""
        drafting = [
            cell
            for bits in BITS
            for cell in (
                f"{self.accepted[bits] / self.drafted[bits]:.1%}",
                f"{self.committed[bits] / self.rounds[bits]:.2f}",
            )
        ]
        shares = [f"{part / self.tokens:.1%}" for part in (self.same, self.equal)]
        return [f"{self.prompt / self.answers:.0f}", *drafting, *shares]


def leading(one: list[int], two: list[int]) -> int:
    """How many tokens two answers share from their start."""
    return next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def likeliest(pair: Any, tokens: list[int], begin: int) -> mx.array:
    """What the target finds likeliest after each token from position `begin` - 1 to the last but one."""
    cache, found = TargetCache(pair.target.config, pair.dtype, pair.max_context, pair.kv_bits), []
    for at in range(0, len(tokens) - 1, cache.max_rows):
        rows = tokens[at : min(at + cache.max_rows, len(tokens) - 1)]
        logits = pair.target(mx.array(rows, dtype=mx.uint32), [Part(cache, len(rows), len(rows))]).logits
        cache.advance(len(rows))
        found.append(mx.argmax(logits, axis=-1))
        mx.eval(found[-1], cache.arrays)
    return mx.concatenate(found)[begin - 1 :]


def row(*cells: object) -> None:
    """Print one row."""
    print("|", " | ".join(map(str, cells)), "|", flush=True)


def compare(draft: str, asked: argparse.Namespace, temperature: float) -> None:
    """Print a row for each turn of one drafter.

    `prompt` is its mean tokens; `same` the share of the answer that is equal from its start; `equal` the share of its
    positions where both caches find the same token likeliest, given the same text.
    """
    pairs = {bits: dflash_mlx.load(asked.model, draft=draft, kv_bits=bits) for bits in BITS}
    turns = max(map(len, CONVERSATIONS))
    tallies = [Tally() for _ in range(turns + 1)]  # the last one counts all
    for number, texts in enumerate(CONVERSATIONS):
        sessions = {bits: dflash_mlx.Session(pair) for bits, pair in pairs.items()}
        for turn, text in enumerate(texts):
            prompt = [*sessions[None].tokens, *encode(pairs[None].tokenizer, text)[1 if turn else 0 :]]
            options = {"max_tokens": asked.tokens, "draft_length": asked.draft_length, "temperature": temperature}
            answers = {bits: each.generate(prompt, **options, seed=number) for bits, each in sessions.items()}
            answer = answers[None].tokens
            one, two = (likeliest(pair, prompt + answer, len(prompt)) for pair in pairs.values())
            equal = int(mx.sum(one == two).item())
            for tally in (tallies[turn], tallies[-1]):
                for bits, generation in answers.items():
                    tally.add(bits, generation)
                tally.answers += 1
                tally.prompt += len(prompt)
                tally.tokens += len(answer)
                tally.same += leading(answer, answers[8].tokens)
                tally.equal += equal
    for turn, tally in enumerate(tallies, start=1):
        row(draft, temperature, turn if turn <= turns else "all", *tally.cells())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--draft", nargs="+", default=["v1", "dflash2"])
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--draft-length", type=int, default=7)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    asked = parser.parse_args()
    row(*HEADS)
    row(*["---"] * len(HEADS))
    for temperature in asked.temperature:
        for draft in asked.draft:
            compare(draft, asked, temperature)


if __name__ == "__main__":
    main()
