"""A stream: one generation in progress, and the step that brings one stream or several forward."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from .choice import Choice
from .draft_length import AutoDraftLength, FixedDraftLength
from .errors import InputError, must
from .options import Options
from .output import Output
from .pair import Pair
from .prefill import Progress, reuse
from .round import Work, step
from .state import HostReads, State
from .stats import Chunk, Generation, Round, Stats
from .text import Prompt, TextStream, encode


class Stream:
    """One generation in progress.

    Args:
        pair: from `load`.
        prompt: token ids, as `check_request` passed them.
        options: of the generation.
        choice_index: which answer to one request this is, 0 for the only one.
        on_prefill: called with (tokens fed, tokens of the prompt) after each prefill step.
        timed_every: every so many rounds one is read twice, for the split of its time; 0 for none.

    Attributes:
        generation: what there was, once the stream has ended.
    """

    def __init__(
        self,
        pair: Pair,
        prompt: Sequence[int],
        options: Options,
        choice_index: int = 0,
        on_prefill: Progress | None = None,
        timed_every: int = 0,
    ):
        self.pair, self.prompt, self.options = pair, list(prompt), options
        self._on_prefill, self._timed_every = on_prefill, timed_every
        self._started = self._ended = 0.0
        seed = secrets.randbits(63) if options.seed is None else options.seed
        self.stats = Stats(
            prompt_tokens=len(self.prompt),
            seed=seed,
            speculation=_speculation(pair, options),
            kernels=dict(pair.kernels),
            notes=list(pair.notes),
        )
        limit = min(options.max_tokens, pair.max_context - len(self.prompt) + 1)
        self.output = Output(TextStream(pair.tokenizer, options.stops), pair.eos_token_ids, limit)
        self.generation: Generation | None = None
        self._choice = Choice(options, seed, choice_index)
        self._policy = _policy(pair, options)
        self._state: State | None = None

    def begin(self, state: State) -> None:
        """Go on from what `state` holds of the prompt; the rest of it waits from now on."""
        self._state, self._started = state, time.perf_counter()
        self.stats.notes += state.notes
        state.notes = []
        self.stats.reused_tokens = reuse(state, self.prompt)
        state.tokens[self.stats.reused_tokens :] = self.prompt[self.stats.reused_tokens :]

    def release(self) -> None:
        """Let go of the state: no step follows."""
        self._state = None

    @property
    def state(self) -> State:
        """The session's; there is one from `begin` on."""
        assert self._state is not None
        return self._state

    @property
    def to_prefill(self) -> int:
        """Tokens of the prompt that wait; 0 once the first token has been chosen."""
        return 0 if self.output.tokens else self.state.waiting

    @property
    def timed(self) -> bool:
        """Whether the next round is one of those whose time is split."""
        return self._timed_every > 0 and len(self.stats.rounds) % self._timed_every == 0

    def work(self, rows: int | None = None, streams: int = 1) -> Work:
        """What this stream brings to the next step: a piece of the prompt, or a round.

        Args:
            rows: most tokens of the prompt; `None` for as many as the options and the caches allow.
            streams: how many streams decode in that step.
        """
        state = self.state
        if not self.output.tokens:
            most = min(self.options.prefill_step_size, state.cache.max_rows, state.stop - state.cache.offset)
            return Work(state, self._choice, self.output, most if rows is None else min(most, rows))
        room = self.pair.max_context - state.cache.offset - 1
        length, whole = self._policy.next(state.cache.offset, streams)
        length = max(0, min(length, self.output.wanted - 1, room))
        return Work(state, self._choice, self.output, 1, length, whole)

    def took(self, done: Round) -> Chunk | None:
        """Record what a step gave; returns what to hand out, nothing while the prompt is fed."""
        now, stats = time.perf_counter(), self.stats
        fed, first = self.state.cache.offset, len(self.output.tokens) == done.committed
        if not first:
            done.rest_s = now - done.total_s - self._ended
            self._policy.saw(done, fed, done.streams)
            stats.rounds.append(done)
        elif done.committed:
            stats.time_to_first_token_s = now - self._started
            prefilled = stats.prompt_tokens - stats.reused_tokens
            stats.prompt_tokens_per_s = prefilled / stats.time_to_first_token_s
        self._ended = now
        if first and self._on_prefill:
            self._on_prefill(fed, len(self.prompt))
        if not done.committed:
            return None
        text, reason = self.output.new_text(), self.output.finish_reason
        if reason is None:
            return Chunk(text, done.tokens)
        self.close()
        return Chunk(text, done.tokens, reason, stats)

    def close(self) -> Generation:
        """The generation as it stands; one that has not met its end is cancelled here."""
        self.output.cancel()
        stats, output = self.stats, self.output
        stats.generated_tokens = len(output.tokens)
        seconds = sum(round_.total_s for round_ in stats.rounds)
        stats.generated_tokens_per_s = sum(r.committed for r in stats.rounds) / seconds if seconds else 0.0
        stats.peak_memory_bytes = int(mx.get_peak_memory())
        self.generation = Generation(output.text, list(output.tokens), output.finish_reason or "cancelled", stats)
        return self.generation


def advance(streams: Sequence[Stream], work: Sequence[Work], reads: HostReads) -> list[Chunk | Exception | None]:
    """Bring the streams one step forward, all in one forward of the target.

    Args:
        streams: of one pair.
        work: of each of them.
        reads: counts the host's waits.
    Returns:
        For each stream its chunk, `None` where it has none yet, or the error that ended it.
    """
    before = reads.count
    rounds = step(work, reads, split=any(stream.timed for stream in streams))
    found: list[Chunk | Exception | None] = []
    for stream, done in zip(streams, rounds, strict=True):
        stream.stats.syncs += reads.count - before
        try:
            found.append(done if isinstance(done, Exception) else stream.took(done))
        except Exception as error:  # of this stream alone: its callback, its tokenizer
            found.append(error)
    return found


def check_requests(
    pair: Pair, prompts: Sequence[Prompt], draft_lengths: Sequence[int | str], options: Mapping[str, Any]
) -> list[list[int]]:
    """Token ids of prompts that will be decoded with several draft lengths: what is wrong is told before the first.

    Args:
        prompts, draft_lengths, options: as for `generate`.
    Raises:
        InputError: one of them does not fit this pair.
    """
    asked = [Options.of({**options, "draft_length": length}) for length in draft_lengths]
    found = []
    for number, prompt in enumerate(prompts, start=1):
        found.append(encode(pair.tokenizer, prompt))
        for each in asked:
            check_request(pair, found[-1], each, name="prompt" if len(prompts) == 1 else f"prompt {number}")
    return found


def check_request(
    pair: Pair, tokens: Sequence[int], options: Options, choice_index: int = 0, name: str = "prompt"
) -> None:
    """The prompt and the options fit this pair; `name` is the prompt's in messages.

    Raises:
        InputError: they do not; it says what would.
    """
    vocab, context = pair.target.config.vocab_size, pair.max_context
    if not tokens:
        raise InputError(must("generate", name, "at least one token", "none", "Give some text."))
    wrong = next((token for token in tokens if not 0 <= token < vocab), None)
    if wrong is not None:
        todo = "Another model's tokenizer was used."
        raise InputError(must("generate", name, f"tokens between 0 and {vocab - 1}", wrong, todo))
    wrong = next((token for token in options.logit_bias or {} if not 0 <= token < vocab), None)
    if wrong is not None:
        raise InputError(must("generate", "logit_bias", f"for tokens below {vocab}", wrong, "Correct the id."))
    if sum(value == -math.inf for value in (options.logit_bias or {}).values()) == vocab:
        todo = "Leave at least one token possible."
        raise InputError(must("generate", "logit_bias", "above -inf for some token", "-inf for all", todo))
    if len(tokens) > context:
        todo = "Shorten it, or load with a larger max_context."
        raise InputError(must("generate", name, f"at most {context} tokens", len(tokens), todo))
    if options.stops and pair.tokenizer is None:
        todo = "The model's folder has no tokenizer."
        raise InputError(must("generate", "stop", "empty without a tokenizer", options.stops, todo))
    if pair.drafter:
        options.fixed_draft_length(pair.block_size)
    if not isinstance(choice_index, int) or choice_index < 0:
        todo = "Correct the argument."
        raise InputError(must("generate", "choice_index", "an integer of at least 0", repr(choice_index), todo))


def _speculation(pair: Pair, options: Options) -> str:
    if pair.drafter is None:
        return "off: no drafter"
    return "off: draft_length is 0" if options.draft_length == 0 else "on"


def _policy(pair: Pair, options: Options) -> AutoDraftLength | FixedDraftLength:
    if pair.drafter is None:
        return FixedDraftLength(0)
    fixed = options.fixed_draft_length(pair.block_size)
    return AutoDraftLength(pair.experience) if fixed is None else FixedDraftLength(fixed, options.whole_block)
