"""Plays the automatic draft length against fixed ones on published cost curves and acceptance, with a simulated clock.

A forward costs what was published for its rows; the draft's cost is counted by the cost model, since no source gives
it. A text is a chain of tokens, each easier or harder to draft than the text's acceptance: the same tokens are hit or
missed whatever the policy. The policy starts knowing nothing, and sees noisy times; the clock runs on the true ones.

Command: python bench/policy_simulator.py
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from dflash_mlx.block_width import BlockWidth
from dflash_mlx.chips import find_chip
from dflash_mlx.config import TargetConfig
from dflash_mlx.costs import Costs, Speeds, quantised_bytes
from dflash_mlx.draft_length import AutoDraftLength, Draft, Experience, FixedDraftLength
from dflash_mlx.drafter_config import DrafterConfig
from dflash_mlx.resources import find
from dflash_mlx.round_costs import RoundCosts, cost_of_whole_blocks
from dflash_mlx.stats import Round
from dflash_mlx.toml_files import read_toml

MOST = 15
TOKENS, SEEDS = 1500, (1, 2, 3)
NOISE, PAUSES, PAUSE = 0.04, 0.01, 20  # relative spread of measured times; share of rounds with a pause; its factor
PROMPT = 1000
RECENT = 16  # rounds that the published rule looks back
SWITCHING = "switching: "
RAW = read_toml(find("bench/muse_glimmer_30b.toml"))
TARGET, DRAFTER = TargetConfig.from_dict(RAW["target"]), DrafterConfig.from_dict(RAW["drafter"])


class Machine(NamedTuple):
    """A chip with a published curve of verification.

    Attributes:
        plain_ms: of one row; a curve of a single matrix is scaled to it.
        curve: which of the published ones: (chip, engine).
        drafter_bits: how the drafter is stored.
    """

    chip: str
    plain_ms: float
    curve: tuple[str, str]
    drafter_bits: int = 16


MACHINES = {
    "M4 Pro, stock": Machine("M4 Pro", 71.4, ("M4 Pro", "MLX, stock"), 4),
    "M4 Max, mlx-serve": Machine("M4 Max", 33.0, ("M4 Max", "mlx-serve on MLX 0.31")),
    "M5 Max, stock": Machine("M5 Max", 32.9, ("M5 Max", "MLX 0.31.2, stock")),
    "M5 Max, row-exact": Machine("M5 Max", 46.8, ("M5 Max", "TensorFold, own kernels"), 4),
    "M3 Ultra, stock": Machine("M3 Ultra", 26.3, ("M3 Max", "MLX, stock"), 4),
}


def acceptance_of(mean_length: float, draft_length: int) -> float:
    """The share of accepted drafts, the same in every slot, that gives a mean length."""
    low, high = 0.0, 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        length = sum(middle**slot for slot in range(draft_length + 1))
        low, high = (middle, high) if length < mean_length else (low, middle)
    return low


def published_acceptance(text: str, drafter: str) -> float:
    """Of a row of `bench/published.toml`."""
    rows = read_toml(find("bench/published.toml"))["acceptance"]
    row = next(row for row in rows if row["text"] == text and row["drafter"] == drafter)
    return acceptance_of(row["mean_length"], row["draft_length"])


CODE, CHAT = published_acceptance("HumanEval", "v1"), published_acceptance("MT-Bench", "v1")
MATHS, PROSE = published_acceptance("GSM8K", "DFlash-2"), published_acceptance("prose", "v1")
UNDRAFTABLE = published_acceptance("reasoning off", "DFlash-2")
# Name -> pieces of (tokens, acceptance of a draft), repeated.
TEXTS = {
    "code": [(1, CODE)],
    "chat": [(1, CHAT)],
    "maths": [(1, MATHS)],
    "prose": [(1, PROSE)],
    "reasoning off": [(1, UNDRAFTABLE)],
    "hopeless": [(1, 0.1)],
    "switching: code, chat": [(300, CODE), (300, CHAT)],
    "switching: maths, reasoning off": [(300, MATHS), (300, UNDRAFTABLE)],
    "switching: code, prose, hopeless": [(250, CODE), (250, PROSE), (250, 0.1)],
}


def tokens_of(text: str, count: int, seed: int) -> list[bool]:
    """For each token of a text, whether a draft of it would be accepted."""
    noise, pieces, hits = random.Random(f"{text} {seed}"), TEXTS[text], []
    while len(hits) < count:
        for length, share in pieces:
            hits += [noise.random() < share for _ in range(length)]
    return hits[:count]


class Clock:
    """What rounds cost on one machine."""

    def __init__(self, machine: str):
        chip, plain_ms, (curve_chip, engine), bits = MACHINES[machine]
        found = find_chip(chip)
        assert found is not None
        self.speeds = Speeds.of(found)
        self.costs = Costs(TARGET, DRAFTER, quantised_bytes(4), 2 if bits == 16 else quantised_bytes(bits))
        curves = read_toml(find("bench/published.toml"))["verify"]
        points = next(row["ms"] for row in curves if (row["chip"], row["engine"]) == (curve_chip, engine))
        known = sorted((int(rows), ms) for rows, ms in points.items())
        self._curve = [(rows, ms / known[0][1] * plain_ms / 1000) for rows, ms in known]
        self._drafts: dict[tuple[int, int], float] = {}

    def verify(self, rows: int) -> float:
        """Seconds of a forward: as published, straight between the rows given and beyond the last two."""
        at = next((i for i, (known, _) in enumerate(self._curve) if known >= rows), len(self._curve) - 1)
        (a, low), (b, high) = self._curve[max(at, 1) - 1], self._curve[max(at, 1)]
        return low + (high - low) * (rows - a) / (b - a)

    def draft(self, slots: int, streams: int) -> float:
        """Seconds of a draft of so many slots in all, counted."""
        if (slots, streams) not in self._drafts:
            parts = self.costs.draft(max(2, slots // streams), max(1, slots // streams - 1), 2048, streams)
            self._drafts[slots, streams] = sum(map(self.speeds.seconds, parts.values()))
        return self._drafts[slots, streams]

    def seconds(self, drafts: Sequence[Draft], context: int) -> float:
        """True seconds of a round in which each stream drafts so."""
        lengths = [draft.length for draft in drafts]
        keys = TARGET.full_layers * 1024 * context * len(lengths) / self.speeds.bandwidth
        slots = [slots_of(draft) for draft in drafts if draft.length]
        draft = self.draft(sum(slots), len(slots)) if slots else 0.0
        return self.verify(sum(lengths) + len(lengths)) + keys + draft

    def predicted(self, length: int, context: int, streams: int) -> float:
        """What the cost model says, which is all that the policy starts with."""
        return self.costs.round_seconds(self.speeds, length, context, streams)


clock_of = cache(Clock)


def slots_of(draft: Draft) -> int:
    """Slots of the drafter's block."""
    return (MOST + 1 if draft.whole else draft.length + 1) if draft.length else 0


@dataclass
class PublishedRule:
    """The smallest integer above the mean length of the recent rounds."""

    lengths: list[int]

    def next(self, context: int, streams: int = 1) -> Draft:
        recent = self.lengths[-RECENT:]
        return Draft(min(int(statistics.fmean(recent)) + 1, MOST) if recent else 4)

    def saw(self, round: Round, context: int, streams: int = 1) -> None:
        self.lengths.append(round.committed)


def play(
    machine: str, texts: Sequence[list[bool]], policies: Sequence[Any], seed: int = 0, narrow: float = 1.0
) -> float:
    """Tokens per second of all streams together, each with its text and its policy, until the first text ends.

    Args:
        narrow: of the drafts that a whole block gets right, the share that a block of k + 1 slots does.
    """
    clock, noise, elapsed = clock_of(machine), random.Random(seed), 0.0
    chance = random.Random(f"narrow {seed}")
    weak = [[chance.random() > narrow for _ in text] for text in texts]
    done = [0] * len(texts)
    while all(at < len(text) for at, text in zip(done, texts, strict=True)):
        context, streams = PROMPT + done[0], len(texts)
        left = [len(text) - at - 1 for at, text in zip(done, texts, strict=True)]
        asked = [policy.next(context, streams) for policy in policies]
        drafts = [Draft(min(draft.length, most), draft.whole) for draft, most in zip(asked, left, strict=True)]
        seconds = clock.seconds(drafts, context)
        elapsed += seconds
        seen = seconds * noise.lognormvariate(0, NOISE) * (PAUSE if noise.random() < PAUSES else 1)
        rows = sum(draft.length + 1 for draft in drafts)
        for i, (text, draft) in enumerate(zip(texts, drafts, strict=True)):
            slots = range(done[i], done[i] + draft.length)
            missed = (at for at in slots if not text[at] or (weak[i][at] and not draft.whole))
            accepted = next(missed, slots.stop) - done[i]
            done[i] += accepted + 1
            counts = {"total_s": seen, "streams": streams, "rows": rows, "slots": slots_of(draft)}
            policies[i].saw(Round(draft.length, accepted, accepted + 1, [], [], **counts), context, streams)
    return sum(done) / elapsed


def experience_on(machine: str) -> Experience:
    """Of a pair that knows nothing of this machine but what the cost model says."""
    clock = clock_of(machine)
    cost = cost_of_whole_blocks(clock.costs, clock.speeds, MOST + 1, PROMPT)
    return Experience(RoundCosts(clock.predicted, MOST), width=BlockWidth(MOST + 1, cost))


def auto(machine: str, streams: int = 1) -> list[AutoDraftLength]:
    """The policies of sessions that know nothing of this machine; they share what they learn of its costs."""
    experience = experience_on(machine)
    return [AutoDraftLength(experience) for _ in range(streams)]


@cache
def rates(
    machine: str, text: str, streams: int = 1, tokens: int = TOKENS, seeds: tuple[int, ...] = SEEDS
) -> dict[str, float]:
    """Tokens per second of every policy, means over the seeds."""
    makers: dict[str, Callable[[], Sequence[Any]]] = {
        "auto": lambda: auto(machine, streams),
        "published rule": lambda: [PublishedRule([]) for _ in range(streams)],
    }
    for length in range(MOST + 1):
        makers[f"fixed {length}"] = lambda length=length: [FixedDraftLength(length)] * streams
    return {
        name: statistics.harmonic_mean(
            play(machine, [tokens_of(text, tokens, seed * 100 + i) for i in range(streams)], make(), seed)
            for seed in seeds
        )
        for name, make in makers.items()
    }


def ideal(machine: str, text: str) -> float:
    """Tokens per second of whoever knows each piece's best fixed length beforehand and switches at once."""
    pieces = TEXTS[text]
    total = sum(length for length, _ in pieces)
    return total / sum(
        length / max(_steady(machine, share, draft) for draft in range(MOST + 1)) for length, share in pieces
    )


@cache
def _steady(machine: str, share: float, length: int) -> float:
    """Expected tokens per second of a fixed length."""
    tokens = sum(share**slot for slot in range(length + 1))
    return tokens / clock_of(machine).seconds([Draft(length)], PROMPT + TOKENS // 2)


def best_fixed(found: dict[str, float]) -> str:
    """The name of the best fixed length, 0 among them."""
    return max((name for name in found if name.startswith("fixed")), key=lambda name: found[name])


def table(cases: Iterable[tuple[str, str, int]]) -> Iterator[str]:
    """The table as Markdown, a line at a time."""
    heads = (
        "machine",
        "text",
        "streams",
        "plain",
        "fixed 4",
        "fixed 6",
        "published rule",
        "best fixed",
        "auto",
        "ratio",
    )
    yield f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}"
    for machine, text, streams in cases:
        found = rates(machine, text, streams)
        best = best_fixed(found)
        cells = [f"{found[name]:.1f}" for name in ("fixed 0", "fixed 4", "fixed 6", "published rule")]
        cells += [f"{found[best]:.1f} ({best.removeprefix('fixed ')})", f"{found['auto']:.1f}"]
        yield f"| {machine} | {text} | {streams} | {' | '.join(cells)} | {found['auto'] / found[best]:.3f} |"


def widths(machine: str, narrow: float, texts: int = 8) -> tuple[Draft, float, float, float]:
    """A drafter of which short blocks get `narrow` of what whole ones get right, on one text of code after the other.

    Returns:
        The best fixed way to draft and its tokens per second, those of the best with short blocks, and those of auto
        on the last text.
    """
    experience, rate, seed = experience_on(machine), 0.0, texts - 1
    for number in range(texts):
        rate = play(machine, [tokens_of("code", TOKENS, number)], [AutoDraftLength(experience)], number, narrow)
    found = {}
    for draft in (Draft(length, whole) for length in range(MOST) for whole in (False, True)):
        found[draft] = play(machine, [tokens_of("code", TOKENS, seed)], [FixedDraftLength(*draft)], seed, narrow)
    best = max(found, key=found.__getitem__)
    return best, found[best], max(rate for draft, rate in found.items() if not draft.whole), rate


def microseconds(rounds: int = 2000) -> float:
    """Processor time of the policy itself, per round."""
    (policy,) = auto("M4 Max, mlx-serve")
    started = time.process_time()
    for at in range(rounds):
        draft = policy.next(at, 1)
        length, counts = draft.length, {"slots": slots_of(draft), "rows": draft.length + 1}
        policy.saw(Round(length, length // 2, length // 2 + 1, [], [], total_s=0.05 + at % 7 / 1000, **counts), at, 1)
    return (time.process_time() - started) / rounds * 1e6


def main() -> None:
    """Print the tables."""
    print("Tokens per second by the simulated clock, of all streams together; the ratio is auto over best fixed.\n")
    for line in table((machine, text, 1) for machine in MACHINES for text in TEXTS):
        print(line)
    print()
    for line in table(
        (machine, text, streams) for machine in MACHINES for text in ("code", "prose") for streams in (2, 4)
    ):
        print(line)
    print("\nWhere a text switches: the most that knowing it beforehand could give, over the best fixed length.\n")
    for machine in MACHINES:
        for text in TEXTS:
            if text.startswith(SWITCHING):
                found = rates(machine, text)
                print(f"- {machine}, {text}: {ideal(machine, text) / found[best_fixed(found)]:.3f}")
    print("\nWhole blocks: a drafter that gets fewer drafts right in short ones, on the eighth text of code.\n")
    print("| machine | of the drafts right | best fixed | best with short blocks | auto |\n|---|---|---|---|---|")
    for machine in MACHINES:
        for narrow in (1.0, 0.85, 0.7):
            draft, best, short, rate = widths(machine, narrow)
            way = f"{draft.length}, {'whole' if draft.whole else 'short'}"
            print(f"| {machine} | {narrow:.0%} | {best:.1f} ({way}) | {short:.1f} | {rate:.1f} |")
    print(f"\nThe policy itself takes {microseconds():.0f} us of this processor a round.")


if __name__ == "__main__":
    main()
