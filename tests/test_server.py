"""The server, over real connections: what clients get is what the library gives, and nobody disturbs another."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
from serving import MODEL, QUESTION, TOOLS, serving

import dflash_mlx
from dflash_mlx.chat.answer import Answer, AnswerReader
from dflash_mlx.server.app import Limits

LIMITS = Limits(body_bytes=100_000)


@pytest.fixture(scope="module")
def pair():
    return dflash_mlx.load("pocket")


@pytest.fixture(scope="module")
def served(pair):
    with serving(pair, LIMITS, max_streams=3, max_queue=1) as running:
        yield running


def solo(pair, messages=QUESTION, **options) -> tuple[Answer, dflash_mlx.Generation]:
    """The answer from a session of its own."""
    out, answer = dflash_mlx.generate(pair, messages, **options), Answer()
    reader = AnswerReader(pair.tokenizer, pair.eos_token_ids)
    answer.add(reader.feed(out.tokens) + reader.finish(cut=True))
    return answer, out


def events(response) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_answer_is_the_librarys(served, pair):
    reply = served.chat(max_tokens=24).json()
    answer, out = solo(pair, max_tokens=24)
    choice = reply["choices"][0]
    assert (reply["object"], choice["index"], choice["finish_reason"]) == ("chat.completion", 0, "length")
    assert choice["message"]["content"] == answer.text
    assert choice["message"].get("reasoning_content", "") == answer.reasoning
    used = reply["usage"]
    assert (used["prompt_tokens"], used["completion_tokens"]) == (out.stats.prompt_tokens, 24)
    assert used["total_tokens"] == out.stats.prompt_tokens + 24
    assert reply["dflash"][0]["accepted"] > 0


def test_stream_gives_the_same_in_pieces(served):
    whole = served.chat(max_tokens=24).json()
    found = events(served.chat(max_tokens=24, stream=True, stream_options={"include_usage": True}))
    deltas = [event["choices"][0]["delta"] for event in found if event["choices"]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == whole["choices"][0]["message"]["content"]
    assert len(deltas) > 3
    assert [event["choices"][0]["finish_reason"] for event in found[:-1]][-1] == "length"
    assert found[-1]["choices"] == []
    assert found[-1]["usage"]["completion_tokens"] == 24
    assert all(event["usage"] is None for event in found[:-1])


def test_openai_client_reads_answers_streams_and_errors(served, pair):
    from openai import BadRequestError, NotFoundError

    client, (answer, _) = served.openai(), solo(pair, max_tokens=12)
    with client:
        asked = {"model": MODEL, "messages": QUESTION, "max_tokens": 12}
        assert client.chat.completions.create(**asked).choices[0].message.content == answer.text
        stream = client.chat.completions.create(**asked, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == answer.text
        plain = client.completions.create(model=MODEL, prompt="import os", max_tokens=5)
        assert plain.choices[0].text == dflash_mlx.generate(pair, "import os", max_tokens=5).text
        assert [model.id for model in client.models.list()] == [MODEL]
        with pytest.raises(NotFoundError, match="model must be 'pocket' but got 'other'"):
            client.chat.completions.create(**(asked | {"model": "other"}))
        with pytest.raises(BadRequestError, match="temperature must be a number of at least 0"):
            client.chat.completions.create(**asked, temperature=-1)


def test_sampling_with_a_seed_and_several_answers(served, pair):
    options = {"temperature": 1.0, "seed": 5, "max_tokens": 10}
    alone = served.chat(**options).json()["choices"][0]["message"]
    three = served.chat(**options, n=3).json()
    found = {choice["index"]: choice["message"] for choice in three["choices"]}
    assert sorted(found) == [0, 1, 2]
    assert found[0] == alone
    for index in (1, 2):
        tokens = list(dflash_mlx.Session(pair).stream_generate(QUESTION, choice_index=index, **options))
        reader, answer = AnswerReader(pair.tokenizer, pair.eos_token_ids), Answer()
        answer.add(reader.feed([t for chunk in tokens for t in chunk.tokens]) + reader.finish(cut=True))
        assert found[index]["content"] == answer.text
    with_logprobs = served.chat(**options, n=3, logprobs=True).json()[
        "choices"
    ]  # each answer has processors of its own
    assert {choice["index"]: choice["message"] for choice in with_logprobs} == found
    assert three["usage"]["prompt_tokens"] == solo(pair, max_tokens=1)[1].stats.prompt_tokens  # one prompt
    assert three["usage"]["completion_tokens"] == 30


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_ends_the_text(stream, served, pair):
    text = solo(pair, max_tokens=40)[0].text
    stop = text[12:16]
    reply = served.chat(max_tokens=40, stop=[stop], stream=stream)
    if stream:
        deltas = [event["choices"][0] for event in events(reply) if event["choices"]]
        assert "".join(delta["delta"].get("content", "") for delta in deltas) == text[: text.index(stop)]
        assert deltas[-1]["finish_reason"] == "stop"
    else:
        assert reply.json()["choices"][0]["message"]["content"] == text[: text.index(stop)]
        assert reply.json()["choices"][0]["finish_reason"] == "stop"
        tokens = solo(pair, max_tokens=40)[1].tokens
        said = [pair.tokenizer.decode(tokens[:count]).partition("<|message|>")[2] for count in range(41)]
        needed = next(count for count in range(41) if stop in said[count])
        assert reply.json()["usage"]["completion_tokens"] == needed < 40
    served.idle()


def test_logprobs_are_the_targets_own(served, pair):
    """Against a forward over the whole, also where bias and temperature decide other tokens."""
    asked = {"max_tokens": 6, "logprobs": True, "top_logprobs": 3, "temperature": 1.3, "seed": 1, "top_k": 50}
    reply = served.chat(**asked, logit_bias={"40": 30}).json()
    entries = reply["choices"][0]["logprobs"]["content"]
    prompt = pair.tokenizer.encode(
        pair.tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False),
        add_special_tokens=False,
    )
    options = {"max_tokens": 6, "temperature": 1.3, "seed": 1, "top_k": 50, "logit_bias": {40: 30.0}}
    tokens = dflash_mlx.generate(pair, prompt, **options).tokens
    rows: dict[int, np.ndarray] = {}

    def keep(history, logits):
        rows[history.shape[0]] = np.array(logits[0], dtype=np.float64)
        return logits

    dflash_mlx.generate(pair, prompt, logits_processors=[keep], draft_length=0, **options)
    for place, (entry, token) in enumerate(zip(entries, tokens, strict=True)):
        row = rows[len(prompt) + place]
        row = row - row.max() - np.log(np.exp(row - row.max()).sum())
        assert entry["token"] == pair.tokenizer.decode([token])
        assert entry["logprob"] == pytest.approx(row[token], abs=1e-4)
        assert [top["logprob"] for top in entry["top_logprobs"]] == pytest.approx(sorted(row)[:-4:-1], abs=1e-4)


def test_completion_logprobs_and_prompts_in_a_list(served, pair):
    body = {"model": MODEL, "prompt": ["import os", "def f("], "max_tokens": 4, "logprobs": 2}
    reply = served.http.post("/v1/completions", json=body).json()
    for choice, prompt in zip(reply["choices"], body["prompt"], strict=True):
        out = dflash_mlx.generate(pair, prompt, max_tokens=4)
        assert choice["text"] == out.text
        assert choice["logprobs"]["tokens"] == [pair.tokenizer.decode([token]) for token in out.tokens]
        assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [2] * 4


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("draft_length", [0, "auto"])
def test_response_format_gives_json_of_the_schema(draft_length, served):
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    reply = served.chat(max_tokens=60, response_format=wanted, draft_length=draft_length).json()
    assert reply["choices"][0]["finish_reason"] == "stop"
    value = json.loads(reply["choices"][0]["message"]["content"])
    assert isinstance(value["a"], int)
    assert value["b"] in ("x", "y")
    assert sorted(value) == ["a", "b"]
    if draft_length:
        assert reply["dflash"][0]["accepted"] > 0  # what the grammar dictates is drafted


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "box.open"}}])
def test_forced_call_comes_with_arguments_of_its_schema(choice, served):
    reply = served.chat(max_tokens=150, tools=TOOLS, tool_choice=choice).json()["choices"][0]
    assert reply["finish_reason"] == "tool_calls"
    for call in reply["message"]["tool_calls"]:
        arguments = json.loads(call["function"]["arguments"])
        assert call["function"]["name"] in ("box.open", "look")
        if call["function"]["name"] == "box.open":
            assert isinstance(arguments["item"], int)
            assert arguments["colour"] in ("red", "blue")
    if choice != "required":
        assert {call["function"]["name"] for call in reply["message"]["tool_calls"]} == {"box.open"}


def test_forced_call_streams_and_one_is_one(served):
    asked = {"max_tokens": 150, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "stream": True}
    found = [event["choices"][0] for event in events(served.chat(**asked)) if event["choices"]]
    calls = [call for event in found for call in event["delta"].get("tool_calls", [])]
    assert [call["index"] for call in calls] == [0]
    assert found[-1]["finish_reason"] == "tool_calls"


def test_wrong_schema_is_a_bad_request(served):
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "nonsense"}}}
    reply = served.chat(response_format=wanted)
    assert reply.status_code == 400
    assert "the schema must be one that the grammar library follows" in reply.json()["error"]["message"]


BROKEN = [
    ("{", {"content-type": "application/json"}, 400, "invalid_json"),
    ("[" * 100_000, {"content-type": "application/json"}, 400, "invalid_json"),
    ("{}", {"content-type": "text/plain"}, 415, "wrong_content_type"),
    ("[]", {"content-type": "application/json"}, 400, "invalid_value"),
    ('"' + "x" * 100_001, {"content-type": "application/json"}, 413, "body_too_large"),
    ("{}", {"content-type": "application/json", "host": "evil.example"}, 403, "wrong_host"),
]


@pytest.mark.parametrize(("body", "headers", "status", "code"), BROKEN, ids=[f"{case[3]}{case[2]}" for case in BROKEN])
def test_broken_request_has_its_status(body, headers, status, code, served):
    reply = served.http.post("/v1/chat/completions", content=body, headers=headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)


def test_request_over_the_context_tells_the_numbers(served):
    reply = served.chat([{"role": "user", "content": "word " * 6000}])
    assert reply.status_code == 400
    assert "prompt must be at most 4096 tokens but got 12075" in reply.json()["error"]["message"]


def test_request_over_the_memory_tells_the_numbers(pair):
    plan = pair.plan
    kept = plan.limit - plan.shared_bytes - plan.session_bytes(200)
    with serving(pair, kept_bytes=kept) as served:
        assert served.chat(max_tokens=4).status_code == 200
        refused = served.chat(max_tokens=4000)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "memory_exceeded")
    assert "the request must be at most 0.00 GiB of caches but got 0.0" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "path", ["/nope", "/v1/models/../../etc/passwd", "/v1/models/%2e%2e%2fpyproject.toml", "/pyproject.toml"]
)
def test_no_path_reaches_a_file(path, served):
    reply = served.http.get(path)
    assert reply.status_code == 404
    assert set(reply.json()) == {"error"}


def test_a_client_that_leaves_frees_its_place(served):
    before = served.service.engine.figures()["cancelled"]
    body = {"model": MODEL, "messages": QUESTION, "max_tokens": 3000, "draft_length": 0, "stream": True}
    with served.http.stream("POST", "/v1/chat/completions", json=body) as reply:
        next(reply.iter_lines())
    served.idle()
    assert served.service.engine.figures()["cancelled"] == before + 1


def test_full_queue_is_told_with_a_time(served):
    body = {"model": MODEL, "messages": QUESTION, "max_tokens": 3000, "draft_length": 0, "stream": True, "n": 4}
    with served.http.stream("POST", "/v1/chat/completions", json=body) as reply:
        next(reply.iter_lines())
        refused = served.chat()
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
    served.idle()
    assert served.chat().status_code == 200


def test_requests_at_once_answer_as_alone(served, pair):
    prompts = [[{"role": "user", "content": text}] for text in ("Sort a list.", "Read a file.", "Add.", "Open it.")]
    expected = [solo(pair, messages, max_tokens=20)[0].text for messages in prompts]
    found: dict[int, str] = {}

    def ask(number: int) -> None:
        found[number] = served.chat(prompts[number], max_tokens=20).json()["choices"][0]["message"]["content"]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[number] for number in range(len(prompts))] == expected


def test_metrics_count_what_was_done(served):
    def figure(name: str) -> float:
        lines = served.http.get("/metrics").text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))

    names = ("requests", "completed", "generated_tokens", "rounds", "accepted_tokens", "prompt_tokens", "reused_tokens")
    before = {name: figure(f"dflash_{name}_total") for name in names}
    reply = served.chat(max_tokens=16).json()
    after = {name: figure(f"dflash_{name}_total") for name in names}
    grown = {name: after[name] - before[name] for name in names}
    assert (grown["requests"], grown["completed"], grown["generated_tokens"]) == (1, 1, 16)
    assert (grown["rounds"], grown["accepted_tokens"]) == (reply["dflash"][0]["rounds"], reply["dflash"][0]["accepted"])
    assert grown["prompt_tokens"] == reply["usage"]["prompt_tokens"]
    assert grown["reused_tokens"] == reply["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert figure("dflash_running") == figure("dflash_waiting") == 0
    assert figure("dflash_memory_active_bytes") > 1_000_000


def test_key_is_asked_for_where_there_is_one(pair):
    with serving(pair, Limits(api_key="k" * 20, origins=("http://page.example",))) as served:
        assert served.http.get("/health").status_code == 200
        for shown in ({}, {"authorization": "Bearer " + "k" * 19}, {"authorization": "Bearer ü"}):
            headers = {name: value.encode() for name, value in shown.items()}
            assert served.http.get("/v1/models", headers=headers).status_code == 401
        good = served.http.get(
            "/v1/models", headers={"authorization": "Bearer " + "k" * 20, "origin": "http://page.example"}
        )
        assert good.status_code == 200
        assert good.headers["access-control-allow-origin"] == "http://page.example"


def test_no_page_of_another_origin_is_let_in(served):
    reply = served.http.get("/v1/models", headers={"origin": "http://page.example"})
    assert not [name for name in reply.headers if name.startswith("access-control")]
