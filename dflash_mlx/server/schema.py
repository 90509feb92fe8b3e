"""Requests: which parameters there are, and what each may be.

A parameter is used, or ignored because it changes nothing here (`IGNORED`), or accepted with its neutral value alone
(`NEUTRAL`); any other name is refused, so that nobody believes in a setting that does nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..chat.template import STRENGTHS, schemas_of
from ..errors import one_of
from .problems import ApiError, bad

SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "repetition_context",
    "seed",
    "draft_length",
)
COMMON = {"model", "stream", "stream_options", "n", "stop", "logit_bias", "max_tokens", "logprobs", *SAMPLING}
CHAT = COMMON | {
    "messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "reasoning_effort",
    "max_completion_tokens", "top_logprobs",
}  # fmt: skip
COMPLETION = COMMON | {"prompt"}
IGNORED = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
}
NEUTRAL: dict[str, Any] = {
    "frequency_penalty": 0, "presence_penalty": 0, "best_of": 1, "echo": False, "suffix": None, "audio": None,
    "modalities": ["text"], "prediction": None, "web_search_options": None, "verbosity": "medium",
}  # fmt: skip
EFFORTS = {"minimal": "low"} | {strength: strength for strength in STRENGTHS}
MOST_CHOICES, MOST_TOP_LOGPROBS = 16, 20


@dataclass
class Asked:
    """A request, checked.

    Attributes:
        options: for `Options`; `max_tokens` is there only if the request names it.
        stops: strings that end the text.
        top_logprobs: how many alternatives to each token; `None` for no logprobs.
        schemas: tool -> schema of its parameters; `None` without tools, or where none may be called.
        forced: names one of which must be called.
        single: at most one call.
        format: JSON schema of the text, or `None`.
    """

    model: str
    stream: bool
    include_usage: bool
    n: int
    options: dict[str, Any]
    stops: tuple[str, ...]
    top_logprobs: int | None
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    prompts: list[str | list[int]] = field(default_factory=list)
    tools: list[Mapping[str, Any]] | None = None
    schemas: dict[str, Mapping[str, Any]] | None = None
    forced: tuple[str, ...] = ()
    single: bool = False
    format: Mapping[str, Any] | None = None
    reasoning: str | None = None


def read_chat(body: Any) -> Asked:
    """A request to /v1/chat/completions.

    Raises:
        ApiError: a parameter is missing, unknown or of the wrong kind.
    """
    given = _known(body, CHAT)
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise bad("messages", "a non-empty list of messages", messages)
    asked = _common(given, _top_logprobs(given))
    asked.messages, asked.format = messages, _format(given.get("response_format"))
    if given.get("reasoning_effort") is not None:
        asked.reasoning = EFFORTS.get(str(given["reasoning_effort"]))
        if asked.reasoning is None:
            raise bad("reasoning_effort", one_of(EFFORTS), given["reasoning_effort"])
    limit = given.get("max_completion_tokens")
    if limit is not None:
        asked.options["max_tokens"] = limit
    _tools(given, asked)
    return asked


def read_completion(body: Any) -> Asked:
    """A request to /v1/completions."""
    given = _known(body, COMPLETION)
    prompt, top = given.get("prompt"), given.get("logprobs")
    if top is not None and (isinstance(top, bool) or not isinstance(top, int) or not 0 <= top <= MOST_TOP_LOGPROBS):
        raise bad("logprobs", f"an integer between 0 and {MOST_TOP_LOGPROBS}", top)
    prompts = [prompt] if isinstance(prompt, str) or _are_tokens(prompt) else prompt
    if not isinstance(prompts, list) or not prompts or not all(isinstance(p, str) or _are_tokens(p) for p in prompts):
        raise bad("prompt", "text, token ids, or a list of them", prompt)
    if len(prompts) > MOST_CHOICES:
        raise bad("prompt", f"at most {MOST_CHOICES} prompts", len(prompts))
    asked = _common(given, top)
    asked.prompts = prompts
    return asked


def _known(body: Any, names: set[str]) -> dict[str, Any]:
    """The parameters that are given, `null` left out."""
    if not isinstance(body, dict):
        raise bad("the body", "a JSON object", type(body).__name__)
    given = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
    for name, value in given.items():
        if name in NEUTRAL and value != NEUTRAL[name]:
            raise bad(name, f"{NEUTRAL[name]!r} or left out", value, "This server has no such setting.")
        if name not in NEUTRAL and name not in names:
            text = f"[server] {name} must be left out. This server knows: {', '.join(sorted(names))}."
            raise ApiError(400, text, param=name, code="unknown_parameter")
    return given


def _common(given: Mapping[str, Any], top_logprobs: int | None) -> Asked:
    """What both kinds of requests have."""
    model = given.get("model")
    if not isinstance(model, str):
        raise bad("model", "a model's name", model, "GET /v1/models lists it.")
    stream_options = given.get("stream_options") or {}
    if not isinstance(stream_options, dict) or (not given.get("stream") and stream_options):
        raise bad("stream_options", "an object, in a request with stream", stream_options)
    options = {name: given[name] for name in (*SAMPLING, "max_tokens") if name in given}
    if "logit_bias" in given:
        options["logit_bias"] = _bias(given["logit_bias"])
    n = given.get("n", 1)
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MOST_CHOICES:
        raise bad("n", f"an integer between 1 and {MOST_CHOICES}", n)
    stop = given.get("stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > 16 or not all(isinstance(each, str) and each for each in stops):
        raise bad("stop", "a text or a list of at most 16, none empty", stop)
    return Asked(
        model=model,
        stream=_flag(given, "stream"),
        include_usage=_flag(stream_options, "include_usage"),
        n=n,
        options=options,
        stops=tuple(stops),
        top_logprobs=top_logprobs,
    )


def _bias(given: Any) -> dict[int, float]:
    """Token ids arrive as text; OpenAI's -100 bans a token."""
    if not isinstance(given, dict):
        raise bad("logit_bias", "an object of token ids and numbers", given)
    bias: dict[int, float] = {}
    for token, value in given.items():
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and -100 <= value <= 100
        if not token.isdecimal() or len(token) > 9 or not good:
            raise bad("logit_bias", "an object of token ids and numbers between -100 and 100", {token: value})
        bias[int(token)] = -math.inf if value == -100 else float(value)
    return bias


def _top_logprobs(given: Mapping[str, Any]) -> int | None:
    top = given.get("top_logprobs", 0)
    if isinstance(top, bool) or not isinstance(top, int) or not 0 <= top <= MOST_TOP_LOGPROBS:
        raise bad("top_logprobs", f"an integer between 0 and {MOST_TOP_LOGPROBS}", top)
    if top and not _flag(given, "logprobs"):
        raise bad("top_logprobs", "left out without logprobs", top)
    return top if _flag(given, "logprobs") else None


def _format(given: Any) -> Mapping[str, Any] | None:
    """The JSON schema that a response format asks for."""
    kind = given.get("type") if isinstance(given, dict) else "text" if given is None else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    outer = given.get("json_schema") if kind == "json_schema" and isinstance(given, dict) else None
    schema = outer.get("schema") if isinstance(outer, dict) else None
    if not isinstance(schema, dict):
        expected = "of type text, json_object, or json_schema with json_schema.schema"
        raise bad("response_format", expected, given)
    return schema


def _tools(given: Mapping[str, Any], asked: Asked) -> None:
    """Tools, and which of them may or must be called."""
    tools, choice = given.get("tools") or None, given.get("tool_choice", "auto")
    if tools is not None and (not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools)):
        raise bad("tools", "a list of tools", tools)
    if any(tool.get("type", "function") != "function" for tool in tools or []):
        raise bad("tools", "of type function", [tool.get("type") for tool in tools or []])
    schemas, name = schemas_of(tools) or {}, None
    if isinstance(choice, dict):
        name = choice.get("function", choice)
        name = name.get("name") if isinstance(name, dict) else None
    if name not in schemas and choice not in ("none", "auto", "required"):
        expected = "none, auto, required, or the function of a tool that is given"
        raise bad("tool_choice", expected, choice)
    if not schemas and choice == "required":
        raise bad("tool_choice", "none or auto without tools", choice)
    asked.single = not _flag(given, "parallel_tool_calls", True) and bool(schemas)
    if schemas and choice != "none":
        asked.tools, asked.schemas = tools, schemas
        asked.forced = (name,) if name in schemas else tuple(schemas) if choice == "required" else ()


def _flag(given: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise bad(name, "true or false", value)
    return value


def _are_tokens(value: Any) -> bool:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        return False
    return all(isinstance(item, int) and not isinstance(item, bool) for item in value)
