"""A session: one history with its caches, kept from one generation to the next."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx

from .choice import Choice
from .draft_length import AutoDraftLength, FixedDraftLength
from .errors import DFlashError, InputError, must
from .options import Options
from .output import Output
from .pair import Pair
from .prefill import Progress, prefill, reuse
from .round import decode_round
from .state import HostReads, State
from .stats import Chunk, Generation, Stats
from .text import Message, Prompt, TextStream, encode


class Session:
    """Keeps the caches of one history across generations; a prompt reuses what it shares with the history.

    Args:
        pair: from `load`.
    """

    def __init__(self, pair: Pair):
        self.pair = pair
        self._state = State(pair)
        self._run = 0  # number of the newest stream: an older one can no longer go on
        self.last_generation: Generation | None = None

    @property
    def tokens(self) -> list[int]:
        """The committed history: prompt and generated tokens."""
        return list(self._state.tokens)

    def reset(self) -> None:
        """Forget the history."""
        self._run += 1
        self._state.reset()

    def generate(self, prompt: Prompt, **options: Any) -> Generation:
        """Generate to the end; arguments as `stream_generate`."""
        for _ in self.stream_generate(prompt, **options):
            pass
        assert self.last_generation is not None
        return self.last_generation

    def stream_generate(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[Message] | None = None,
        reasoning: str | None = None,
        on_prefill: Progress | None = None,
        choice_index: int = 0,
        **options: Any,
    ) -> Iterator[Chunk]:
        """Generate, a chunk for the first token and one for each round.

        Args:
            prompt: text, token ids or chat messages: the whole of it, not only what is new.
            tools, reasoning: for the chat template.
            on_prefill: called with (tokens fed, tokens of the prompt) after each prefill step.
            choice_index: which answer to one request this is: each has noise of its own, and 0 is the only answer's.
            options: see `Options`.
        Returns:
            An iterator. Closing it early leaves the session usable, and `last_generation` says what there was.
        Raises:
            InputError: the prompt or an option is wrong; nothing has changed then.
            ProcessorError: a user's processor failed; `.partial` holds what was generated before.
        """
        asked = Options.of(options)
        tokens = encode(self.pair.tokenizer, prompt, tools=tools, reasoning=reasoning)
        self._check(tokens, asked)
        if not isinstance(choice_index, int) or choice_index < 0:
            todo = "Correct the argument."
            raise InputError(must("generate", "choice_index", "an integer of at least 0", repr(choice_index), todo))
        self._run += 1
        return self._stream(tokens, asked, self._run, on_prefill, choice_index)

    def _check(self, tokens: Sequence[int], options: Options) -> None:
        """The prompt and the options fit this pair."""
        vocab, context = self.pair.target.config.vocab_size, self.pair.max_context
        if not tokens:
            raise InputError(must("generate", "prompt", "at least one token", "none", "Give some text."))
        wrong = next((token for token in tokens if not 0 <= token < vocab), None)
        if wrong is not None:
            todo = "Another model's tokenizer was used."
            raise InputError(must("generate", "prompt", f"tokens between 0 and {vocab - 1}", wrong, todo))
        wrong = next((token for token in options.logit_bias or {} if not 0 <= token < vocab), None)
        if wrong is not None:
            raise InputError(must("generate", "logit_bias", f"for tokens below {vocab}", wrong, "Correct the id."))
        if sum(value == -math.inf for value in (options.logit_bias or {}).values()) == vocab:
            todo = "Leave at least one token possible."
            raise InputError(must("generate", "logit_bias", "above -inf for some token", "-inf for all", todo))
        if len(tokens) > context:
            todo = "Shorten it, or load with a larger max_context."
            raise InputError(must("generate", "prompt", f"at most {context} tokens", len(tokens), todo))
        if options.stops and self.pair.tokenizer is None:
            todo = "The model's folder has no tokenizer."
            raise InputError(must("generate", "stop", "empty without a tokenizer", options.stops, todo))
        if self.pair.drafter:
            options.fixed_draft_length(self.pair.block_size)

    def _stream(
        self, prompt: list[int], options: Options, run: int, on_prefill: Progress | None, choice_index: int
    ) -> Iterator[Chunk]:
        """The loop: prefill, then rounds; the record is complete whichever way it ends."""
        limit = min(options.max_tokens, self.pair.max_context - len(prompt) + 1)
        output = Output(TextStream(self.pair.tokenizer, options.stops), self.pair.eos_token_ids, limit)
        record = Recorder(self.pair, prompt, options)
        choice = Choice(options, record.stats.seed, choice_index)
        try:
            self._check_newest(run)
            for tokens in self._tokens(prompt, choice, output, record, on_prefill):
                text = output.new_text()
                if output.finish_reason:
                    self.last_generation = record.close(output)
                    yield Chunk(text, tokens, output.finish_reason, record.stats)
                    return
                yield Chunk(text, tokens)
                self._check_newest(run)
        except BaseException as error:
            output.cancel()
            generation = record.close(output)
            if run == self._run:
                self.last_generation = generation
                if isinstance(error, Exception) and not isinstance(error, DFlashError):
                    self.reset()  # an operation failed half way: what the caches hold is not known
            if isinstance(error, DFlashError):
                error.partial = generation
            raise

    def _check_newest(self, run: int) -> None:
        """No other stream has been made on this session since."""
        if run != self._run:
            todo = "A session runs one generation at a time."
            raise DFlashError(must("generate", "the stream", "the session's newest", "an older one", todo))

    def _tokens(
        self, prompt: list[int], choice: Choice, output: Output, record: Recorder, on_prefill: Progress | None
    ) -> Iterator[list[int]]:
        """Committed tokens, piece by piece."""
        state, reads, options = self._state, record.reads, choice.options
        record.stats.reused_tokens = reuse(state, prompt)
        first = prefill(state, prompt, choice, options.prefill_step_size, reads, on_prefill)
        record.first_token()
        yield output.take([first])
        policy = _policy(self.pair, options)
        while True:
            room = self.pair.max_context - state.cache.offset - 1
            length = max(0, min(policy.next(), output.wanted - 1, room))
            done = decode_round(state, choice, length, output, reads)
            policy.saw(done.drafted, done.committed)
            record.stats.rounds.append(done)
            yield done.tokens


def _policy(pair: Pair, options: Options) -> AutoDraftLength | FixedDraftLength:
    if pair.drafter is None:
        return FixedDraftLength(0)
    fixed = options.fixed_draft_length(pair.block_size)
    return AutoDraftLength(pair.block_size - 1) if fixed is None else FixedDraftLength(fixed)


class Recorder:
    """Times and counts of one generation, made into its `Stats`."""

    def __init__(self, pair: Pair, prompt: Sequence[int], options: Options):
        mx.reset_peak_memory()
        self._started = time.perf_counter()
        self.reads = HostReads()
        seed = secrets.randbits(63) if options.seed is None else options.seed
        off = "off: no drafter" if pair.drafter is None else "off: draft_length is 0"
        on = pair.drafter is not None and options.draft_length != 0
        self.stats = Stats(
            prompt_tokens=len(prompt),
            seed=seed,
            speculation="on" if on else off,
            kernels=dict(pair.kernels),
            notes=list(pair.notes),
        )

    def first_token(self) -> None:
        """The prefill is done."""
        stats = self.stats
        stats.time_to_first_token_s = time.perf_counter() - self._started
        stats.prompt_tokens_per_s = (stats.prompt_tokens - stats.reused_tokens) / stats.time_to_first_token_s

    def close(self, output: Output) -> Generation:
        """The generation as it stands."""
        stats = self.stats
        stats.generated_tokens = len(output.tokens)
        seconds = sum(round_.total_s for round_ in stats.rounds)
        stats.generated_tokens_per_s = sum(r.committed for r in stats.rounds) / seconds if seconds else 0.0
        stats.syncs = self.reads.count
        stats.peak_memory_bytes = int(mx.get_peak_memory())
        return Generation(output.text, list(output.tokens), output.finish_reason or "cancelled", stats)
