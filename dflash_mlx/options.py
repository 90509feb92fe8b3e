"""The options of a generation: one frozen dataclass, validated once, the same everywhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from .errors import InputError, must

if TYPE_CHECKING:
    import mlx.core as mx

    LogitsProcessor = Callable[[mx.array, mx.array], mx.array]

AUTO = "auto"


def _check(name: str, expected: str, value: Any, good: bool, todo: str = "Correct the option.") -> None:
    if not good:
        raise InputError(must("generate", name, expected, repr(value), todo))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_bias(value: Any) -> bool:
    return value == -math.inf or (_is_number(value) and abs(value) <= 1e30)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class Options:
    """What may be asked of a generation.

    Attributes:
        max_tokens: most tokens to generate, at least 1.
        temperature: 0 is greedy; the filters apply above 0 only.
        top_p: keep the most likely tokens up to this mass; 0 or 1 keeps all, as in mlx-lm.
        top_k: keep this many tokens; 0 keeps all, and so does the vocabulary's size or more.
        min_p: keep tokens at least this likely relative to the most likely one.
        repetition_penalty: divides positive and multiplies negative logits of recent tokens; 1 is none.
        repetition_context: how many of the newest tokens count as recent.
        logit_bias: token id -> number added to its logit; -inf bans the token.
        logits_processors: `f(tokens [N], logits [1, V]) -> [1, V]`, as in mlx-lm.
        seed: of the position-keyed noise; `None` draws one, and the statistics say which.
        stop: strings that end the text before them.
        draft_length: tokens drafted in a round, 0 (plain decoding) to block size less 1, or "auto".
        whole_block: with a fixed `draft_length`, the drafter fills its whole block, of which that many drafts are used;
            else a block of just so many slots and the anchor's. "auto" chooses itself.
        prefill_step_size: most prompt tokens in one forward.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    repetition_context: int = 20
    logit_bias: Mapping[int, float] | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    seed: int | None = None
    stop: str | Sequence[str] = ()
    draft_length: str | int = AUTO
    whole_block: bool = False
    prefill_step_size: int = 2048
    stops: tuple[str, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_sampling()
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        good = all(isinstance(stop, str) and stop for stop in stops)
        _check("stop", "a non-empty string or a sequence of them", self.stop, good)
        object.__setattr__(self, "stops", stops)

    def _check_counts(self) -> None:
        for name in ("max_tokens", "prefill_step_size", "repetition_context"):
            value = getattr(self, name)
            _check(name, "an integer of at least 1", value, _is_integer(value) and value >= 1)
        value = self.draft_length
        good = value == AUTO or (_is_integer(value) and int(value) >= 0)
        _check("draft_length", "'auto' or an integer of at least 0", value, good)
        good = isinstance(self.whole_block, bool) and not (self.whole_block and value == AUTO)
        _check("whole_block", "False, or True with a fixed draft_length", self.whole_block, good)
        good = self.seed is None or (_is_integer(self.seed) and 0 <= self.seed < 2**64)
        _check("seed", "None or an integer between 0 and 2**64 - 1", self.seed, good)
        _check("top_k", "an integer of at least 0", self.top_k, _is_integer(self.top_k) and self.top_k >= 0)

    def _check_sampling(self) -> None:
        value = self.temperature
        _check("temperature", "a number of at least 0", value, _is_number(value) and value >= 0)
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            _check(name, "a number between 0 and 1", value, _is_number(value) and 0 <= value <= 1)
        value = self.repetition_penalty
        good = _is_number(value) and 1e-6 <= value <= 1e6  # far beyond use; products stay finite in float32
        _check("repetition_penalty", "a number between 1e-6 and 1e6", value, good)
        bias = {} if self.logit_bias is None else self.logit_bias
        good = isinstance(bias, Mapping) and all(_is_integer(k) and _is_bias(v) for k, v in bias.items())
        _check("logit_bias", "a mapping of token ids to numbers between -1e30 and 1e30, or -inf", bias, good)
        good = isinstance(self.logits_processors, Sequence) and all(map(callable, self.logits_processors))
        _check("logits_processors", "a sequence of functions", self.logits_processors, good)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """Options from keyword arguments; an unknown name is an error that lists the known ones."""
        known = {item.name for item in fields(cls) if item.init}
        unknown = sorted(set(given) - known)
        if unknown:
            found = ", ".join(unknown)
            raise InputError(must("generate", "options", f"among {', '.join(sorted(known))}", found, "Remove it."))
        return cls(**given)

    def fixed_draft_length(self, block_size: int) -> int | None:
        """The draft length, or `None` for "auto".

        Raises:
            InputError: it is longer than the drafter's block less its anchor.
        """
        if self.draft_length == AUTO:
            return None
        length = int(self.draft_length)
        if length >= block_size:
            expected = f"'auto' or between 0 and {block_size - 1} (the drafter's block of {block_size} less its anchor)"
            _check("draft_length", expected, length, False, "Leave it out to let the runtime choose.")
        return length
