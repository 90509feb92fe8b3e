"""Replies in OpenAI's shapes, whole or as the chunks of a stream."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from ..chat.answer import REASONING, Piece
from ..stats import Stats
from .logprobs import chat_entries, text_entries
from .schema import Asked
from .worker import Choice, Part


class Reply:
    """Shapes one request's answers.

    Args:
        asked: the request.
        tokenizer: for logprobs.
    """

    def __init__(self, asked: Asked, tokenizer: Any):
        self.asked, self._tokenizer, self.chat = asked, tokenizer, bool(asked.messages)
        kind = "chat.completion" if self.chat else "text_completion"
        prefix = "chatcmpl-" if self.chat else "cmpl-"
        self._base = {"id": prefix + secrets.token_hex(12), "object": kind, "created": int(time.time())}
        self._calls: dict[int, int] = {}  # choice -> calls told
        self._lengths: dict[int, int] = {}  # choice -> characters told

    def whole(self, choices: Sequence[Choice], parts: Sequence[Part]) -> dict[str, Any]:
        """The reply to a request without `stream`."""
        shown = []
        for choice in choices:
            own = [part for part in parts if part.index == choice.index]
            found = [entry for part in own for entry in part.logprobs]
            item: dict[str, Any] = {"index": choice.index, "finish_reason": own[-1].reason, "logprobs": None}
            if self.chat:
                item["message"] = self._message(choice)
            else:
                item["text"] = choice.answer.text
            if choice.recorder:
                item["logprobs"] = self._logprobs(found, 0)
            shown.append(item)
        figures = {"usage": usage(choices), "dflash": summaries(choices)}
        return {**self._base, "model": self.asked.model, "choices": shown, **figures}

    def _message(self, choice: Choice) -> dict[str, Any]:
        answer = choice.answer
        message: dict[str, Any] = {"role": "assistant", "content": answer.text or None, "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [_call(call.name, call.json()) for call in answer.calls]
        elif message["content"] is None:
            message["content"] = ""
        return message

    def first(self, choice: Choice) -> dict[str, Any]:
        """The chunk that a chat answer begins with."""
        return self._chunk(choice.index, {"delta": {"role": "assistant", "content": ""}})

    def chunks(self, part: Part) -> list[dict[str, Any]]:
        """What a stream tells of a part, the reason of its end in a chunk of its own."""
        found = [self._piece(part.index, piece) for piece in part.pieces if piece.text or piece.call]
        if part.logprobs:
            if not found:  # tokens without text: their logprobs are told all the same
                found = [self._piece(part.index, Piece("text"))]
            found[0]["choices"][0]["logprobs"] = self._logprobs(part.logprobs, self._lengths.get(part.index, 0))
        self._lengths[part.index] = self._lengths.get(part.index, 0) + sum(len(piece.text) for piece in part.pieces)
        if part.reason:
            found.append(self._chunk(part.index, {"delta": {}} if self.chat else {"text": ""}, part.reason))
        return found

    def last(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The chunk after all choices: the summary, and the usage where it was asked for."""
        chunk = {**self._base, "model": self.asked.model, "choices": [], "dflash": summaries(choices)}
        return chunk | {"usage": usage(choices)}

    def _piece(self, index: int, piece: Piece) -> dict[str, Any]:
        if not self.chat:
            return self._chunk(index, {"text": piece.text})
        if piece.call:
            number = self._calls[index] = self._calls.get(index, -1) + 1
            call = {"index": number} | _call(piece.call.name, piece.call.json())
            return self._chunk(index, {"delta": {"tool_calls": [call]}})
        return self._chunk(
            index, {"delta": {"reasoning_content" if piece.kind == REASONING else "content": piece.text}}
        )

    def _chunk(self, index: int, item: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": index, **item, "logprobs": None, "finish_reason": reason}
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        chunk = {**self._base, "object": kind, "model": self.asked.model, "choices": [choice]}
        return chunk | ({"usage": None} if self.asked.include_usage else {})

    def _logprobs(self, found: Sequence[Any], at: int) -> dict[str, Any]:
        if self.chat:
            return {"content": chat_entries(found, self._tokenizer), "refusal": None}
        return text_entries(found, self._tokenizer, at)


def _call(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """Tokens of a request; a prompt counts once, however many answers it has."""
    firsts = [choice for choice in choices if choice.leads]
    prompt = sum(choice.prompt_tokens for choice in firsts)
    cached = sum(choice.stats.reused_tokens for choice in firsts if choice.stats)
    generated = sum(choice.generated for choice in choices)
    thought = sum(choice.reader.thought for choice in choices if choice.reader)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": thought},
    }


def summaries(choices: Sequence[Choice]) -> list[dict[str, Any]]:
    """What drafting gave to each choice, and what of its text should have been something else."""
    return [
        {"index": choice.index, **_speculation(choice.stats or Stats()), "problems": choice.answer.problems}
        for choice in choices
    ]


def _speculation(stats: Stats) -> dict[str, Any]:
    return {
        "speculation": stats.speculation,
        "rounds": len(stats.rounds),
        "drafted": stats.drafted_tokens,
        "accepted": stats.accepted_tokens,
        "mean_accepted": stats.mean_accepted,
        "mean_length": stats.mean_length,
        "generated_tokens_per_s": stats.generated_tokens_per_s,
        "time_to_first_token_s": stats.time_to_first_token_s,
        "seed": stats.seed,
    }


def event(value: Any) -> str:
    """One event of a stream."""
    return f"data: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}\n\n"
