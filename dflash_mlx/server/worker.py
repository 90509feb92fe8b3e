"""Between the routes and the engine: a checked request becomes tickets, and chunks become what clients read."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..chat.answer import Answer, AnswerReader, Piece
from ..chat.markers import Markers
from ..chat.template import encode_messages
from ..engine import Engine
from ..errors import EngineClosed, must
from ..prefix_store import PrefixStore
from ..stats import Stats
from ..text import encode
from ..ticket import Ticket
from .logprobs import Logprobs
from .problems import ApiError, bad
from .schema import Asked

DEFAULT_MAX_TOKENS = 4096
CUT_OFF = "[server] the answer was cut off: the server is shutting down."


@dataclass
class Part:
    """What a step gave one choice.

    Attributes:
        index: the choice's.
        pieces: of the answer; one piece with the plain text for a completion.
        logprobs: of the chunk's tokens, as `Logprobs.take` gives them.
        reason: why it ended, on the last part.
    """

    index: int
    pieces: list[Piece]
    logprobs: list[Any] = field(default_factory=list)
    reason: str | None = None


@dataclass
class Choice:
    """One answer in progress.

    Attributes:
        leads: it is the first answer to its prompt.
        generated: tokens so far, up to a stop string.
        stats: once it has ended.
    """

    index: int
    ticket: Ticket
    reader: AnswerReader | None
    recorder: Logprobs | None
    prompt_tokens: int
    leads: bool
    answer: Answer = field(default_factory=Answer)
    generated: int = 0
    stats: Stats | None = None

    async def parts(self) -> AsyncIterator[Part]:
        """The answer, chunk by chunk.

        Raises:
            DFlashError: the request failed.
            ApiError: the server ended it.
        """
        async with self.ticket:
            async for chunk in self.ticket:
                tokens, reason = chunk.tokens, chunk.finish_reason
                if self.reader:
                    pieces = self.reader.feed(tokens)
                    tokens = tokens[: self.reader.count - self.generated]
                    if self.reader.stopped:
                        reason = "stop"
                    if reason:
                        pieces += self.reader.finish(cut=reason != "stop")
                else:
                    pieces = [Piece("text", chunk.text)] if chunk.text else []
                self.generated += len(tokens)
                self.answer.add(pieces)
                if reason == "cancelled":
                    raise ApiError(503, CUT_OFF, code="shutting_down")
                if reason == "stop" and self.answer.calls:
                    reason = "tool_calls"
                yield Part(self.index, pieces, self.recorder.take(tokens) if self.recorder else [], reason)
                if reason:
                    break
            self.ticket.cancel()  # a stop string was met here, and the engine does not know
            async for _ in self.ticket:
                pass
        assert self.ticket.generation is not None
        self.stats = self.ticket.generation.stats


class Service:
    """The engine and what all requests share.

    Args:
        engine: takes the requests.
        name: of the model.
        defaults: options of requests that do not name them.
        store: the engine's, for its figures.
    """

    def __init__(self, engine: Engine, name: str, defaults: Mapping[str, Any], store: PrefixStore | None = None):
        self.engine, self.pair, self.name = engine, engine.pair, name
        self._defaults, self.store = dict(defaults), store
        self._grammars: Any = None
        self._lock = threading.Lock()
        self._open: weakref.WeakSet[Ticket] = weakref.WeakSet()  # a reader that was never started holds none
        self.closing = False

    def choices(self, asked: Asked) -> list[Choice]:
        """Start a request; blocks for as long as encoding takes.

        Raises:
            DFlashError, ApiError: it is wrong, or there is no place for it.
        """
        if self.closing:
            raise EngineClosed(must("server", "the server", "open", "shutting down", "Send the request to another."))
        if asked.model != self.name:
            text = must("server", "model", repr(self.name), repr(asked.model), "GET /v1/models lists it.")
            raise ApiError(404, text, param="model", code="model_not_found")
        tokenizer = self.pair.tokenizer
        if asked.messages:
            prompts = [encode_messages(tokenizer, asked.messages, asked.tools, asked.reasoning)]
        else:
            prompts = [encode(tokenizer, prompt) for prompt in asked.prompts]
        if asked.top_logprobs is not None and tokenizer is None:
            raise bad("logprobs", "left out with a model that has no tokenizer", asked.top_logprobs)
        started: list[Choice] = []
        try:
            for number, prompt in enumerate(prompts):
                started += self._start(asked, prompt, number * asked.n)
        except BaseException:
            for choice in started:
                choice.ticket.cancel()
            raise
        return started

    def _start(self, asked: Asked, prompt: list[int], first: int) -> list[Choice]:
        """The choices of one prompt."""
        options = {"max_tokens": DEFAULT_MAX_TOKENS} | self._defaults | asked.options
        if not asked.messages and asked.stops:
            options["stop"] = asked.stops
        text = self._grammar(asked)
        recorders: list[Logprobs | None] = [None] * asked.n
        if text is None and asked.top_logprobs is None:
            tickets = self.engine.submit_all(prompt, asked.n, **options)
        else:  # processors have a memory: each answer needs its own
            tickets = []
            for index in range(asked.n):
                processors: list[Any] = []
                if asked.top_logprobs is not None:
                    recorders[index] = Logprobs(asked.top_logprobs, len(prompt))
                    processors.append(recorders[index])
                if text is not None:
                    processors.append(self._masked(text, len(prompt)))
                mine = options | {"logits_processors": processors}
                tickets.append(self.engine.submit(prompt, choice_index=index, **mine))
        ends, stops = self.pair.eos_token_ids, asked.stops
        readers = [
            AnswerReader(self.pair.tokenizer, ends, asked.schemas, stops) if asked.messages else None for _ in tickets
        ]
        self._open.update(tickets)
        return [
            Choice(first + number, ticket, reader, recorder, len(prompt), leads=number == 0)
            for number, (ticket, reader, recorder) in enumerate(zip(tickets, readers, recorders, strict=True))
        ]

    def _grammar(self, asked: Asked) -> str | None:
        """The grammar that a request needs, or `None`."""
        if asked.format is None and not asked.forced and not asked.single:
            return None
        from .grammar import answer_grammar

        layout = Markers.of(self.pair.tokenizer) is not None
        if asked.schemas and not layout:
            raise bad("tools", "left to the model (tool_choice auto)", "a forced call", "This model has no layout.")
        schemas = asked.schemas or {}
        tools = {name: schemas[name] for name in asked.forced or schemas}
        return answer_grammar(asked.format, tools, bool(asked.forced), asked.single, layout)

    def _masked(self, text: str, begin: int) -> Any:
        from .grammar import Grammar, grammar_tokenizer

        with self._lock:
            if self._grammars is None:
                self._grammars = grammar_tokenizer(self.pair)
        return Grammar(self._grammars, text, begin, self.pair.target.config.vocab_size)

    def done(self, choices: Sequence[Choice]) -> None:
        """The reader of these has gone, or has all it wanted."""
        for choice in choices:
            choice.ticket.cancel()
            self._open.discard(choice.ticket)

    @property
    def open(self) -> int:
        """Answers that somebody still reads."""
        return len(self._open)

    def shut_down(self, seconds: float) -> None:
        """Take no more requests; cancel after `seconds` what is not done by then."""
        self.closing = True

        def cancel() -> None:
            for ticket in list(self._open):
                ticket.cancel()

        timer = threading.Timer(seconds, cancel)
        timer.daemon = True
        timer.start()


async def merged(choices: Sequence[Choice]) -> AsyncIterator[Part]:
    """The parts of several choices, as they come."""
    queue: asyncio.Queue[Part | BaseException | None] = asyncio.Queue()

    async def read(choice: Choice) -> None:
        try:
            async for part in choice.parts():
                queue.put_nowait(part)
            queue.put_nowait(None)
        except BaseException as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(read(choice)) for choice in choices]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
