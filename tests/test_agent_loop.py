"""An agent on OpenAI's client: calls, results, answers, turn after turn, each computing only what is new."""

from __future__ import annotations

import json

import pytest
from serving import MODEL, TOOLS, serving

import dflash_mlx
from dflash_mlx.chat.answer import Answer, AnswerReader
from dflash_mlx.chat.template import encode_messages, schemas_of

SYSTEM = {"role": "system", "content": "You open boxes."}
SLACK = 24  # rows before a checkpoint that may be computed again, and tokens that another tokenisation may move


def run_tool(name: str, arguments: dict) -> str:
    return json.dumps({"tool": name, "inside": f"a ball, ü, number {arguments.get('item')}"}, ensure_ascii=False)


def alone(pair, messages, tools, max_tokens) -> Answer:
    """The answer of a session of its own."""
    prompt, answer = encode_messages(pair.tokenizer, messages, tools), Answer()
    out = dflash_mlx.generate(pair, prompt, max_tokens=max_tokens)
    reader = AnswerReader(pair.tokenizer, pair.eos_token_ids, schemas_of(tools))
    answer.add(reader.feed(out.tokens) + reader.finish(cut=out.finish_reason != "stop"))
    return answer


@pytest.mark.parametrize("turns", [4, pytest.param(22, marks=pytest.mark.slow)])
def test_agent_goes_on_for_many_turns(turns):
    pair = dflash_mlx.load("pocket")
    messages: list[dict] = [SYSTEM, {"role": "user", "content": "Open the red box."}]
    called = prompt_before = 0
    with serving(pair) as served, served.openai() as client:
        for turn in range(turns):
            forced = turn % 2 == 0
            asked = {"model": MODEL, "messages": messages, "tools": TOOLS[:1], "max_tokens": 110 if forced else 16}
            reply = client.chat.completions.create(**asked, tool_choice="required" if forced else "auto",
                                                   parallel_tool_calls=not forced)  # fmt: skip
            choice, used = reply.choices[0], reply.usage
            assert used.prompt_tokens > prompt_before
            assert used.prompt_tokens_details.cached_tokens >= prompt_before - SLACK
            if turn % 10 == 1:  # from scratch, now and then
                expected = alone(pair, messages, TOOLS[:1], 16)
                assert (choice.message.content or "") == expected.text
            prompt_before = used.prompt_tokens
            said = choice.message.model_dump(exclude_none=True, exclude={"refusal"})
            messages.append(said)
            for call in choice.message.tool_calls or []:
                arguments = json.loads(call.function.arguments)
                assert isinstance(arguments["item"], int)
                called += 1
                result = {"role": "tool", "tool_call_id": call.id, "content": run_tool(call.function.name, arguments)}
                messages.append(result)
            if not choice.message.tool_calls:
                assert not forced
                messages.append({"role": "user", "content": f"Once more, number {turn}."})
    assert called >= turns // 2
