"""What a generation returns: text, tokens, and where its time went, round by round."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Round:
    """One round. Counts are taken after the cut at an end token, a stop string or `max_tokens`.

    Attributes:
        drafted: tokens drafted, 0 for a plain step.
        accepted: drafted tokens that were kept.
        committed: tokens handed out, the target's own one included.
        proposal: the drafted ids.
        tokens: the committed ids.
        draft_s, verify_s: seconds that the host waited for the device's drafting and verifying. They are apart only
            where it read twice, so that nothing overlapped; `None` on other rounds.
        host_s: seconds of the round in which the host did not wait for a result: building the graph, handing it over
            (where a device that is behind makes it wait), bookkeeping.
        cpu_s: processor seconds of the host's thread in the round, reads included: its work without any waiting.
        total_s: wall seconds of the round: host_s and the waits.
        rest_s: wall seconds from the end of this stream's previous round, or of its prefill, to the begin of this one:
            text, the caller's own work, steps without this stream.
        streams: streams that decoded in the round's forward.
        rows: rows of that forward, of all streams.
        prompt_rows: of these, the rows of prompts that were fed in it.
        slots: of the drafter's block, the anchor's included; 0 for a plain step.
    """

    drafted: int
    accepted: int
    committed: int
    proposal: list[int]
    tokens: list[int]
    draft_s: float | None = None
    verify_s: float | None = None
    host_s: float = 0.0
    cpu_s: float = 0.0
    total_s: float = 0.0
    rest_s: float = 0.0
    streams: int = 1
    rows: int = 1
    prompt_rows: int = 0
    slots: int = 0


@dataclass
class Stats:
    """Counts and times of one generation; times are wall seconds, rates are tokens per second.

    Attributes:
        prompt_tokens: tokens of the prompt, those reused included.
        reused_tokens: prompt tokens whose rows were already cached.
        prompt_tokens_per_s: prefilled (not reused) tokens per second until the first token.
        generated_tokens_per_s: tokens after the first one per second of rounds; 0 where there are none.
        syncs: reads of the device by the host.
        seed: of the noise, given or drawn.
        speculation: "on", or "off: why".
        kernels: operation -> "metal" or "stock: why".
        notes: one line for each thing that went another way than asked.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    time_to_first_token_s: float = 0.0
    prompt_tokens_per_s: float = 0.0
    generated_tokens_per_s: float = 0.0
    syncs: int = 0
    peak_memory_bytes: int = 0
    seed: int = 0
    speculation: str = "on"
    kernels: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)

    @property
    def _drafted_rounds(self) -> list[Round]:
        return [round_ for round_ in self.rounds if round_.drafted]

    @property
    def drafted_tokens(self) -> int:
        """Tokens drafted in all rounds."""
        return sum(round_.drafted for round_ in self.rounds)

    @property
    def accepted_tokens(self) -> int:
        """Of these, how many were kept."""
        return sum(round_.accepted for round_ in self.rounds)

    @property
    def mean_accepted(self) -> float:
        """Drafted tokens accepted per drafted round; 0 where nothing was drafted."""
        drafted = self._drafted_rounds
        return self.accepted_tokens / len(drafted) if drafted else 0.0

    @property
    def mean_length(self) -> float:
        """Tokens committed per drafted round, the target's own one included; 0 where nothing was drafted."""
        drafted = self._drafted_rounds
        return sum(round_.committed for round_ in drafted) / len(drafted) if drafted else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens, 0 to 1; 0 where nothing was drafted."""
        drafted = self.drafted_tokens
        return self.accepted_tokens / drafted if drafted else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All fields and the three means, ready for JSON."""
        means = {name: getattr(self, name) for name in ("mean_accepted", "mean_length", "acceptance_rate")}
        values = asdict(self)
        rounds = values.pop("rounds")
        return {**values, **means, "rounds": rounds}


@dataclass
class Chunk:
    """A piece of a stream; `finish_reason` and `stats` come with the last one."""

    text: str
    tokens: list[int]
    finish_reason: str | None = None
    stats: Stats | None = None


@dataclass
class Generation:
    """A whole generation.

    Attributes:
        text: the decoded tokens, without the end token and up to a stop string.
        tokens: generated ids, an end token or the token that completes a stop string included.
        finish_reason: "stop", "length" or "cancelled".
    """

    text: str
    tokens: list[int]
    finish_reason: str
    stats: Stats

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "text": self.text,
            "tokens": self.tokens,
            "finish_reason": self.finish_reason,
            "stats": self.stats.to_dict(),
        }
