"""A session: one history with its caches, kept from one generation to the next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from . import session_file
from .errors import DFlashError, must
from .options import Options
from .pair import Pair
from .prefill import Progress
from .state import HostReads, State
from .stats import Chunk, Generation
from .stream import Stream, advance, check_request
from .text import Message, Prompt, encode


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

    def fork(self) -> Session:
        """Another session with the same history, to go on from here on its own; rows are shared until one writes."""
        other = Session(self.pair)
        other._state = self._state.fork()
        return other

    def save(self, path: str | Path) -> None:
        """Write history and caches to a file, all of it or nothing.

        Raises:
            SessionFileError: it cannot be written.
        """
        session_file.save(self._state, path)

    @classmethod
    def load(cls, pair: Pair, path: str | Path) -> Session:
        """The session that was saved with this pair; it goes on as if it had never left memory.

        Raises:
            SessionFileError: the file is missing, damaged, of another version or of another model.
        """
        session = cls(pair)
        session._state = session_file.load(pair, path)
        return session

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
        timed_every: int = 0,
        **options: Any,
    ) -> Iterator[Chunk]:
        """Generate, a chunk for the first token and one for each round.

        Args:
            prompt: text, token ids or chat messages: the whole of it, not only what is new.
            tools, reasoning: for the chat template.
            on_prefill: called with (tokens fed, tokens of the prompt) after each prefill step.
            choice_index: which answer to one request this is: each has noise of its own, and 0 is the only answer's.
            timed_every: every so many rounds one is read twice, so that `Round.draft_s` and `.verify_s` are known;
                0 for none.
            options: see `Options`.
        Returns:
            An iterator. Closing it early leaves the session usable, and `last_generation` says what there was.
        Raises:
            InputError: the prompt or an option is wrong; nothing has changed then.
            ProcessorError: a user's processor failed; `.partial` holds what was generated before.
        """
        asked = Options.of(options)
        tokens = encode(self.pair.tokenizer, prompt, tools=tools, reasoning=reasoning)
        check_request(self.pair, tokens, asked, choice_index)
        self._run += 1
        return self._stream(Stream(self.pair, tokens, asked, choice_index, on_prefill, timed_every), self._run)

    def _stream(self, stream: Stream, run: int) -> Iterator[Chunk]:
        """The loop: steps of one stream; the record is complete whichever way it ends."""
        reads = HostReads()
        try:
            self._check_newest(run)
            mx.reset_peak_memory()
            stream.begin(self._state)
            while True:
                (found,) = advance([stream], [stream.work()], reads)
                if isinstance(found, Exception):
                    raise found
                if found is None:
                    continue
                if found.finish_reason:
                    self.last_generation = stream.generation
                    yield found
                    return
                yield found
                self._check_newest(run)
        except BaseException as error:
            generation = stream.close()
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
