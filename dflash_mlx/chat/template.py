"""Messages to token ids, through the model's chat template.

The template writes one text with the layout's markers in it. A marker that is spelled out in somebody's content must
not become one: such spellings are cut where they stand, and the text is encoded around the cuts.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from ..errors import InputError, check_characters, must, one_of
from .markers import added_tokens

Message = Mapping[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
STRENGTHS = ("low", "medium", "high", "xhigh")
STRENGTH = "reasoning_strength"  # the template's variable


def encode_messages(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Message] | None = None, reasoning: str | None = None
) -> list[int]:
    """Messages as token ids, up to where the assistant's answer begins.

    Args:
        tokenizer: mlx-lm's wrapper.
        messages: as in OpenAI's chat API: role, content, and `reasoning_content`, `tool_calls`, `tool_call_id`.
        tools: JSON schemas, as in OpenAI's chat API, or the inner functions alone.
        reasoning: strength: "low", "medium", "high" or "xhigh".
    Raises:
        InputError: there is no template, or it does not take these messages.
    """
    template = getattr(tokenizer, "chat_template", None)
    if template is None:
        todo = "Give text or token ids."
        raise InputError(must("generate", "prompt", "text or token ids", "messages, without a chat template", todo))
    if reasoning is not None and reasoning not in STRENGTHS:
        _fail("reasoning", one_of(STRENGTHS), repr(reasoning))
    if reasoning is not None and STRENGTH not in str(template):
        _fail("reasoning", "left out with this model", repr(reasoning), "Its chat template has no such setting.")
    cleaned = [clean_message(message, f"messages[{number}]") for number, message in enumerate(messages)]
    given = [cleaned, [dict(tool) for tool in tools] if tools else None]
    for text in _texts(given):
        check_characters("messages", text)
    cut, (cleaned, listed) = _cut_markers(given, added_tokens(tokenizer))
    extra = {} if reasoning is None else {STRENGTH: reasoning}
    try:
        text = tokenizer.apply_chat_template(cleaned, tools=listed, add_generation_prompt=True, tokenize=False, **extra)
    except Exception as error:  # templates raise through jinja
        todo = "Correct roles and contents."
        raise InputError(must("generate", "messages", "what the chat template takes", str(error), todo)) from error
    parts = text.split(cut) if cut else [text]  # the template writes the begin token itself
    return [token for part in parts for token in tokenizer.encode(part, add_special_tokens=False)]


def clean_message(message: Message, where: str) -> dict[str, Any]:
    """A message as templates take it: content as one text, arguments of calls as objects, no field with nothing in it.

    Raises:
        InputError: a field has the wrong kind; the message names it.
    """
    role = message.get("role")
    if role not in ROLES:
        _fail(f"{where}.role", one_of(ROLES), repr(role))
    cleaned = {"role": role, "content": _content(message.get("content"), f"{where}.content")}
    for name in ("reasoning_content", "tool_call_id", "name"):
        value = message.get(name)
        if name == "reasoning_content" and value is None:
            value = message.get("reasoning")  # as some clients call it
        if value is not None and not isinstance(value, str):
            _fail(f"{where}.{name}", "text", repr(value))
        if value:
            cleaned[name] = value
    calls = message.get("tool_calls")
    if calls is not None and (not isinstance(calls, Sequence) or isinstance(calls, str)):
        _fail(f"{where}.tool_calls", "a list", repr(calls))
    if calls:
        cleaned["tool_calls"] = [_call(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(calls)]
    return cleaned


def _content(content: Any, where: str) -> str:
    """Content as one text: parts are joined; what is no text is refused."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        _fail(where, "text or a list of parts", repr(content))
    texts = []
    for number, part in enumerate(content):
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
            _fail(f"{where}[{number}]", "text", f"a part of type {kind!r}", "This runtime reads text only.")
        texts.append(text)
    return "".join(texts)


def _call(call: Any, where: str) -> dict[str, Any]:
    """One call of an assistant's message; its arguments may be JSON text, as OpenAI's clients send them back."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        _fail(where, "a call with a function's name", repr(call))
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            _fail(f"{where}.function.arguments", "JSON text", repr(arguments))
    if not isinstance(arguments, Mapping):
        _fail(f"{where}.function.arguments", "an object", repr(arguments))
    cleaned: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}}
    if call.get("id") is not None:
        cleaned["id"] = str(call["id"])
    return cleaned


def schemas_of(tools: Sequence[Message] | None) -> dict[str, Mapping[str, Any]] | None:
    """Tool -> JSON schema of its parameters; `None` without tools.

    Raises:
        InputError: a tool has no name, or its parameters are no JSON schema of an object.
    """
    if not tools:
        return None
    schemas: dict[str, Mapping[str, Any]] = {}
    for number, tool in enumerate(tools):
        where = f"tools[{number}].function"
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not re.fullmatch(r"[^\s<>\"]+", name):
            _fail(f"{where}.name", "a name without spaces, quotes and angle brackets", repr(name))
        parameters = function.get("parameters") or {}
        properties = parameters.get("properties", {}) if isinstance(parameters, Mapping) else None
        if not isinstance(properties, Mapping):
            _fail(f"{where}.parameters", "a JSON schema of an object", repr(parameters))
        if name in schemas:
            _fail(f"{where}.name", "another than those before", repr(name))
        schemas[name] = parameters
    return schemas


def _cut_markers(given: Any, spellings: Mapping[str, int]) -> tuple[str | None, Any]:
    """Put a cut behind the first character of each marker that is spelled out; returns the cut, `None` without one."""
    marks = [spelling for spelling in spellings if spelling.startswith("<") and len(spelling) > 1]
    texts = list(_texts(given))
    if not any(mark in text for mark in marks for text in texts):
        return None, given
    cut = f"\ue000{secrets.token_hex(16)}\ue001"  # no text has this
    pattern = re.compile("|".join(re.escape(mark) for mark in sorted(marks, key=len, reverse=True)))
    return cut, _each_text(given, lambda text: pattern.sub(lambda found: found[0][0] + cut + found[0][1:], text))


def _texts(value: Any) -> Iterator[str]:
    """All texts of a structure, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts([*value, *value.values()])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """The same structure with each text changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_each_text(key, change): _each_text(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_each_text(item, change) for item in value]
    return value


def _fail(name: str, expected: str, value: str, todo: str = "Correct the message.") -> NoReturn:
    shown = value if len(value) <= 200 else value[:200] + "…"
    raise InputError(must("chat", name, expected, shown, todo))
