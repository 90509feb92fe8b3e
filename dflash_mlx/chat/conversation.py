"""A conversation with the model: the messages so far, and one answer after the other from one session."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import InputError, SessionFileError, must
from ..options import Options
from ..prefill import Progress
from ..session import Session
from ..stream import check_request
from ..text import encode
from ..whole_files import write_whole
from .answer import Answer, AnswerReader, Piece
from .template import clean_message

FORMAT, VERSION = "dflash-mlx chat", 1
Message = dict[str, Any]


class Conversation:
    """The messages and the session that answers them.

    Args:
        session: its caches are reused from turn to turn.
        system: the system's message, or `None` for the template's own.
        reasoning: strength for the template; `None` for its default.

    Attributes:
        messages: as the chat template takes them, answers included.
        answer: the newest one.
        finish_reason: why the newest answer ended: "stop", "length" or "cancelled".
    """

    def __init__(self, session: Session, system: str | None = None, reasoning: str | None = None):
        self.session, self.system, self.reasoning = session, system, reasoning
        self.answer, self.finish_reason = Answer(), ""
        self.messages: list[Message] = []
        self.reset()

    def reset(self) -> None:
        """Forget all but the system's message."""
        self.session.reset()
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def ask(self, text: str, on_prefill: Progress | None = None, **options: Any) -> Iterator[Piece]:
        """Add a message and give the answer, piece by piece.

        Closing the stream early keeps the conversation: what there was of the answer becomes a message, or the
        question is taken back where there was nothing.

        Args:
            text: the user's message.
            on_prefill, options: as `Session.stream_generate`; `stop` ends the answer's text, not its reasoning.
        """
        stops = options.pop("stop", ())
        pair = self.session.pair
        reader = AnswerReader(pair.tokenizer, pair.eos_token_ids, None, (stops,) if isinstance(stops, str) else stops)
        self.answer, self.finish_reason = Answer(), "cancelled"
        asked = [*self.messages, {"role": "user", "content": text}]
        stream: Any = self.session.stream_generate(asked, reasoning=self.reasoning, on_prefill=on_prefill, **options)
        try:
            for chunk in stream:
                pieces = reader.feed(chunk.tokens)
                if chunk.finish_reason or reader.stopped:
                    self.finish_reason = "stop" if reader.stopped else chunk.finish_reason
                    pieces += reader.finish(cut=self.finish_reason == "length")
                self.answer.add(pieces)
                yield from pieces
                if reader.stopped:
                    return
        finally:
            stream.close()  # an unfinished stream that is closed leaves its record
            self.answer.add(reader.finish(cut=True))
            self._keep(asked)

    def _keep(self, asked: list[Message]) -> None:
        answer = self.answer
        if self.finish_reason == "cancelled" and not (answer.text or answer.reasoning):
            return
        said = {"role": "assistant", "content": answer.text}
        self.messages = [*asked, said | ({"reasoning_content": answer.reasoning} if answer.reasoning else {})]

    def save(self, path: Path) -> None:
        """Write the messages as JSON, and the session's caches beside them: `FILE` and `FILE.session`.

        Raises:
            DFlashError: one of the two cannot be written.
        """
        saved = {"format": FORMAT, "version": VERSION, "reasoning": self.reasoning, "messages": self.messages}
        write_whole(path, json.dumps(saved, ensure_ascii=False, indent=1) + "\n")
        if self.session.tokens:
            self.session.save(_caches(path))
        else:
            _caches(path).unlink(missing_ok=True)  # of another conversation that had this name

    def load(self, path: Path) -> str | None:
        """Go on from a saved conversation; it is checked whole first, and where it is wrong nothing changes.

        Returns:
            Why the caches have to be computed again; `None` where they were saved too and fit this model.
        Raises:
            InputError: it cannot be read, is no saved conversation, or one that this model cannot go on with.
        """
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise _no_conversation(path, getattr(error, "strerror", None) or "something else") from error
        if not isinstance(saved, dict) or saved.get("format") != FORMAT:
            raise _no_conversation(path, "something else")
        if saved.get("version") != VERSION:
            raise _no_conversation(path, f"version {saved.get('version')!r}")
        messages = saved.get("messages")
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise _no_conversation(path, "one without messages")
        reasoning = saved.get("reasoning")
        try:
            cleaned = [clean_message(message, f"messages[{n}]") for n, message in enumerate(messages)]
            self._check_next(cleaned, reasoning)
        except InputError as error:
            raise _no_conversation(path, f"one that cannot go on: {error}") from error
        session, why = self._saved_session(_caches(path), bool(cleaned))
        self.session, self.messages, self.reasoning = session, cleaned, reasoning
        self.system = next((m["content"] for m in self.messages[:1] if m["role"] == "system"), None)
        return why

    def _check_next(self, messages: list[Message], reasoning: Any) -> None:
        """One more message would be taken: by the template, with this reasoning, within the context."""
        asked = [*messages, {"role": "user", "content": "?"}]
        pair = self.session.pair
        check_request(pair, encode(pair.tokenizer, asked, reasoning=reasoning), Options())

    def _saved_session(self, path: Path, needed: bool) -> tuple[Session, str | None]:
        """A session with the saved caches, or a new one and why."""
        pair = self.session.pair
        if not path.exists():
            return Session(pair), f"there is no {path.name}." if needed else None
        try:
            return Session.load(pair, path), None
        except SessionFileError as error:
            return Session(pair), str(error)


def _caches(path: Path) -> Path:
    return path.with_name(path.name + ".session")


def _no_conversation(path: Path, found: Any) -> InputError:
    expected = f"a conversation that /save wrote (version {VERSION})"
    return InputError(must("chat", str(path), expected, found, "Give another file."))
