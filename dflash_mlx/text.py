"""Prompts to token ids, and token ids to a text stream that ends before a stop string.

Tokenizers and chat templates are mlx-lm's; what is here is the part that must not lose or break a character.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .chat.template import encode_messages
from .errors import CheckpointError, InputError, check_characters, must

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "tiktoken.model")
BROKEN = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet one


def load_tokenizer(folder: Path) -> Any | None:
    """The folder's tokenizer, wrapped by mlx-lm; `None` where the folder has none.

    Raises:
        CheckpointError: there are tokenizer files, and they cannot be read.
    """
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    from mlx_lm.tokenizer_utils import load

    try:
        return load(folder)
    except Exception as error:  # the libraries below raise many kinds
        todo = "Download the tokenizer files again."
        raise CheckpointError(
            must("load", f"the tokenizer in {folder}", "readable", f"{type(error).__name__}: {error}", todo)
        ) from error


def encode(
    tokenizer: Any | None,
    prompt: Prompt,
    *,
    tools: Sequence[Message] | None = None,
    reasoning: str | None = None,
) -> list[int]:
    """A prompt's token ids.

    Args:
        tokenizer: mlx-lm's wrapper, or `None` for a pair that works with ids only.
        prompt: text (a begin token is put before it), token ids, or chat messages (through the chat template).
        tools: JSON schemas, for messages only.
        reasoning: the template's reasoning strength, for messages only.
    Raises:
        InputError: the prompt is of none of these kinds, or needs a tokenizer or a template that is not there.
    """
    if isinstance(prompt, str):
        if tools is not None or reasoning is not None:
            todo = "Give the prompt as [{'role': 'user', 'content': …}]."
            raise InputError(must("generate", "prompt", "chat messages with tools or reasoning", "text", todo))
        return _encode_text(_needed(tokenizer), prompt)
    items = list(prompt)
    if items and all(isinstance(item, Mapping) for item in items):
        return encode_messages(_needed(tokenizer), items, tools, reasoning)  # type: ignore[arg-type]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        kinds = sorted({type(item).__name__ for item in items})
        todo = "Mixed lists are not understood."
        raise InputError(
            must("generate", "prompt", "text, token ids or chat messages", f"a list of {' and '.join(kinds)}", todo)
        )
    return [int(item) for item in items]  # type: ignore[call-overload]


def _needed(tokenizer: Any | None) -> Any:
    if tokenizer is None:
        todo = "The model's folder has no tokenizer: give token ids."
        raise InputError(must("generate", "prompt", "token ids", "text or messages", todo))
    return tokenizer


def _encode_text(tokenizer: Any, text: str) -> list[int]:
    check_characters("prompt", text)
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    begin = tokenizer.bos_token_id
    return ids if begin is None or ids[:1] == [begin] else [begin, *ids]


class TextStream:
    """Decodes tokens one by one; hands out text that can no longer change or turn out to be a stop string.

    Args:
        tokenizer: mlx-lm's wrapper, or `None`: then every text is empty.
        stops: strings that end the text before them.
    """

    def __init__(self, tokenizer: Any | None, stops: Sequence[str] = ()):
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._tokens: list[int] = []
        self._read = self._seen = 0  # text of tokens[:seen] is in self._text; decoding starts at `read`
        self._text, self._given = "", 0
        self.stopped = False

    def add(self, token: int) -> bool:
        """Decode one more token; returns whether it completed a stop string."""
        self._tokens.append(token)
        if self._tokenizer is not None:
            segment = self._segment()
            if not segment.endswith(BROKEN):  # else a character may be half there: wait
                self._accept(segment)
        return self.stopped

    def take(self) -> str:
        """The text that is new and final."""
        end = len(self._text) if self.stopped else len(self._text) - self._held()
        return self._give(end)

    def finish(self) -> str:
        """The rest of the text; a broken character at the end is handed out as the decoder writes it."""
        if self._tokenizer is not None and not self.stopped and self._seen < len(self._tokens):
            self._accept(self._segment())
        return self._give(len(self._text))

    def _segment(self) -> str:
        """What the tokens since `seen` add. The tokens before them are decoded too, as decoders look back."""
        before = self._decode(self._tokens[self._read : self._seen])
        return self._decode(self._tokens[self._read :])[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        if not tokens or self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False))

    def _accept(self, segment: str) -> None:
        longest = max((len(stop) for stop in self._stops), default=0)
        start = max(0, len(self._text) - longest)
        self._text += segment
        self._read, self._seen = self._seen, len(self._tokens)
        found = [at for at in (self._text.find(stop, start) for stop in self._stops) if at >= 0]
        if found:
            self._text, self.stopped = self._text[: min(found)], True

    def _held(self) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        for length in range(max((len(stop) for stop in self._stops), default=1) - 1, 0, -1):
            if any(len(stop) > length and self._text.endswith(stop[:length]) for stop in self._stops):
                return length
        return 0

    def _give(self, end: int) -> str:
        text = self._text[self._given : end]
        self._given = max(self._given, end)
        return text
