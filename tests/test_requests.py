"""What a request may say: each wrong parameter is named, in the shape that OpenAI's clients read."""

from __future__ import annotations

import math

import pytest

from dflash_mlx.errors import EngineClosed, InputError, MemoryPlanError, QueueFull
from dflash_mlx.server.problems import ApiError, api_error
from dflash_mlx.server.schema import read_chat, read_completion

BODY = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}

WRONG = [
    ({"messages": []}, "messages", "a non-empty list of messages but got []"),
    ({"messages": "hi"}, "messages", "a non-empty list of messages but got 'hi'"),
    ({"messages": ["hi"]}, "messages", "a non-empty list of messages"),
    ({"model": 5}, "model", "a model's name but got 5"),
    ({"model": None}, "model", "a model's name but got None"),
    ({"stream": "yes"}, "stream", "true or false but got 'yes'"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "an object, in a request with stream"),
    ({"n": 0}, "n", "an integer between 1 and 16 but got 0"),
    ({"n": True}, "n", "an integer between 1 and 16 but got True"),
    ({"stop": ["a", ""]}, "stop", "a text or a list of at most 16, none empty"),
    ({"stop": 5}, "stop", "a text or a list of at most 16"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "an object of token ids and numbers between -100 and 100"),
    ({"logit_bias": {"1": 101}}, "logit_bias", "an object of token ids and numbers between -100 and 100"),
    ({"top_logprobs": 2}, "top_logprobs", "left out without logprobs but got 2"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "an integer between 0 and 20 but got 21"),
    ({"response_format": {"type": "xml"}}, "response_format", "of type text, json_object, or json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema with json_schema.schema"),
    ({"response_format": "json"}, "response_format", "of type text, json_object, or json_schema"),
    ({"reasoning_effort": "most"}, "reasoning_effort", "one of minimal, low, medium, high, xhigh but got 'most'"),
    ({"tools": "f"}, "tools", "a list of tools but got 'f'"),
    ({"tools": [{"type": "web_search"}]}, "tools", "of type function but got ['web_search']"),
    ({"tool_choice": "required"}, "tool_choice", "none or auto without tools"),
    ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice", "none, auto, required, or the function of a tool"),
    ({"tools": [TOOL], "tool_choice": {"function": {"name": "g"}}}, "tool_choice", "the function of a tool"),
    ({"frequency_penalty": 0.5}, "frequency_penalty", "0 or left out but got 0.5"),
    ({"echo": True}, "echo", "False or left out but got True"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "param", "text"), WRONG, ids=[str(case[0])[:50] for case in WRONG])
def test_wrong_parameter_is_named(change, param, text):
    with pytest.raises(ApiError) as caught:
        read_chat(BODY | change)
    body = caught.value.body()["error"]
    assert (caught.value.status, body["param"], body["type"]) == (400, param, "invalid_request_error")
    assert body["message"].startswith(f"[server] {param} must be ")
    assert text in body["message"]


def test_unknown_parameter_is_refused_with_the_known_ones():
    with pytest.raises(ApiError) as caught:
        read_chat(BODY | {"tempature": 1})
    assert caught.value.code == "unknown_parameter"
    assert "tempature must be left out" in str(caught.value)
    assert "temperature" in str(caught.value)


def test_body_must_be_an_object():
    with pytest.raises(ApiError, match="the body must be a JSON object but got 'list'"):
        read_chat([])


def test_tool_without_a_name_is_the_librarys_error():
    with pytest.raises(InputError, match=r"tools\[0\].function.name must be a name"):
        read_chat(BODY | {"tools": [{"type": "function", "function": {}}]})


def test_parameters_arrive_as_options():
    asked = read_chat(
        BODY
        | {
            "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "max_tokens": 7, "draft_length": 2,
            "repetition_penalty": 1.1, "logit_bias": {"5": -100, "6": 2}, "stop": "x", "n": 2, "user": "me",
            "frequency_penalty": 0, "metadata": {}, "reasoning_effort": "minimal",
        }
    )  # fmt: skip
    assert asked.options == {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "max_tokens": 7, "draft_length": 2,
        "repetition_penalty": 1.1, "logit_bias": {5: -math.inf, 6: 2.0},
    }  # fmt: skip
    assert (asked.stops, asked.n, asked.reasoning) == (("x",), 2, "low")


def test_newer_name_of_the_limit_wins():
    assert read_chat(BODY | {"max_tokens": 1, "max_completion_tokens": 2}).options["max_tokens"] == 2


CHOICES = [
    ("auto", ({"f": {"type": "object", "properties": {}}}, ())),
    ("none", (None, ())),
    ("required", ({"f": {"type": "object", "properties": {}}}, ("f",))),
    ({"type": "function", "function": {"name": "f"}}, ({"f": {"type": "object", "properties": {}}}, ("f",))),
]


@pytest.mark.parametrize(("choice", "expected"), CHOICES)
def test_tool_choice_says_what_may_and_what_must_be_called(choice, expected):
    asked = read_chat(BODY | {"tools": [TOOL], "tool_choice": choice})
    assert (asked.schemas, asked.forced) == expected
    assert (asked.tools is None) == (choice == "none")


PROMPTS = [("x", ["x"]), ([1, 2], [[1, 2]]), (["x", "y"], ["x", "y"]), ([[1], [2, 3]], [[1], [2, 3]])]


@pytest.mark.parametrize(("prompt", "expected"), PROMPTS)
def test_completion_takes_text_tokens_and_lists(prompt, expected):
    assert read_completion({"model": "m", "prompt": prompt}).prompts == expected


@pytest.mark.parametrize("prompt", [None, 5, [], [[]], ["x", 5], [1, True]])
def test_completion_refuses_other_prompts(prompt):
    with pytest.raises(ApiError, match="prompt must be text, token ids, or a list of them"):
        read_completion({"model": "m", "prompt": prompt})


ERRORS = [
    (InputError("[a] b"), 400, "invalid_value", "invalid_request_error"),
    (MemoryPlanError("[a] b"), 400, "memory_exceeded", "invalid_request_error"),
    (QueueFull("[a] b", 2.5), 429, "queue_full", "rate_limit_error"),
    (EngineClosed("[a] b"), 503, "shutting_down", "server_error"),
    (KeyError("secret"), 500, None, "server_error"),
]


@pytest.mark.parametrize(("error", "status", "code", "kind"), ERRORS)
def test_error_has_the_status_of_its_kind(error, status, code, kind):
    found = api_error(error)
    assert (found.status, found.code, found.body()["error"]["type"]) == (status, code, kind)
    assert "secret" not in str(found)
    assert found.headers == ({"Retry-After": "3"} if status == 429 else {})
