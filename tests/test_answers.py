"""The model's answer arrives as reasoning, text and calls, however it was cut into pieces; nothing of it is lost."""

from __future__ import annotations

import json
import random

import pytest
from answers import EOT, TOOLS, block, call, invoke, random_answer, read, twin

from dflash_mlx.chat.answer import CUT, ENDED, AnswerReader
from dflash_mlx.chat.calls import Call
from dflash_mlx.resources import find
from dflash_mlx.text import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(find("models/pocket/target"))


QUOTES = 'say "it\'s {1: [2}]}" \\n, then </atem:invoke> and </atem:parameter> x'
CASES = {
    "text": (" to=user<|message|>Hello.<|eot|>", ("", "Hello.", [])),
    "no recipient": ("<|message|>Hello.<|eot|>", ("", "Hello.", [])),
    "reasoning, then text": (
        " to=self<|message|>Two and two.<|eom|><|start|>assistant to=user<|message|>4<|eot|>",
        ("Two and two.", "4", []),
    ),
    "two messages of each kind": (
        " to=self<|message|>a<|eom|><|start|>assistant to=commentary<|message|>b<|eom|>"
        "<|start|>assistant to=self<|message|>c<|eom|><|start|>assistant to=user<|message|>d<|eot|>",
        ("a\n\nc", "b\n\nd", []),
    ),
    "a call": (
        " to=box.open<|message|>" + call("box.open", item="3") + "<|eot|>",
        ("", "", [("box.open", {"item": 3})]),
    ),
    "several calls in one block": (
        " to=box.open<|message|>"
        + block(invoke("box.open", item="1"), invoke("write_file", path="a"), invoke("box.open", item="2"))
        + "<|eot|>",
        ("", "", [("box.open", {"item": 1}), ("write_file", {"path": "a"}), ("box.open", {"item": 2})]),
    ),
    "calls in several messages after reasoning and text": (
        " to=self<|message|>hm<|eom|><|start|>assistant to=user<|message|>Let me look.<|eom|><|start|>assistant"
        " to=box.open<|message|>"
        + call("box.open", item="1")
        + "<|eom|><|start|>assistant to=box.open<|message|>"
        + call("box.open", item="2")
        + "<|eot|>",
        ("hm", "Let me look.", [("box.open", {"item": 1}), ("box.open", {"item": 2})]),
    ),
    "a block between text": (
        " to=user<|message|>Before.\n" + call("box.open", item="1") + "\n\nAfter.<|eot|>",
        ("", "Before.After.", [("box.open", {"item": 1})]),
    ),
    "nested JSON": (
        " to=other<|message|>" + call("other", deep='{"a": [1, {"b": "}]"}], "ü": null}') + "<|eot|>",
        ("", "", [("other", {"deep": {"a": [1, {"b": "}]"}], "ü": None}})]),
    ),
    "strings are not JSON": (
        " to=write_file<|message|>" + call("write_file", path="007", content="true", mode="true") + "<|eot|>",
        ("", "", [("write_file", {"path": "007", "content": "true", "mode": True})]),
    ),
    "unicode, quotes, braces and tags in a string": (
        " to=write_file<|message|>" + call("write_file", path="ü/é.py", content=f"\n  {QUOTES}\n\n🙂") + "<|eot|>",
        ("", "", [("write_file", {"path": "ü/é.py", "content": f"\n  {QUOTES}\n\n🙂"})]),
    ),
    "no arguments": (" to=box.open<|message|>" + call("box.open") + "<|eot|>", ("", "", [("box.open", {})])),
    "nothing": ("<|eot|>", ("", "", [])),
    "text that looks like markup": (
        " to=user<|message|>a < b, <atem: and <atem:function_callz>\n <|eot|>",
        ("", "a < b, <atem: and <atem:function_callz>\n ", []),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_answer_is_read_apart(name, tokenizer):
    text, (reasoning, content, calls) = CASES[name]
    answer = read(tokenizer, text)
    assert (answer.reasoning, answer.text) == (reasoning, content)
    assert [(call.name, call.arguments) for call in answer.calls] == calls
    assert answer.problems == []


BROKEN = {
    "an opening tag swallowed": (
        block('<atem:invoke name="box.open">\nitem">3</atem:parameter>\n</atem:invoke>\n'),
        "in a call of box.open a parameter was expected, not 'item\">3</atem:parameter>\\n</atem:invoke>'",
    ),
    "a parameter twice": (
        block('<atem:invoke name="f">\n' + '<atem:parameter name="a">1</atem:parameter>\n' * 2 + "</atem:invoke>\n"),
        "in a call of f the parameter a stands twice",
    ),
    "no name": (
        block("<atem:invoke>\n</atem:invoke>\n"),
        "an invoke was expected, not '<atem:invoke>\\n</atem:invoke>'",
    ),
    "an empty block": ("<atem:function_calls>\n</atem:function_calls>", ENDED),
    "an unclosed call": ('<atem:function_calls>\n<atem:invoke name="f">\n<atem:parameter name="a">1', ENDED),
    "no block": ('{"item": 3}', "a message to box.open without a call"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_call_stays_text_with_a_reason(name, tokenizer):
    body, reason = BROKEN[name]
    answer = read(tokenizer, f" to=box.open<|message|>{body}<|eot|>")
    assert (answer.text, answer.calls) == (body, [])
    assert reason in answer.problems


def test_call_after_good_ones_stays_text_alone(tokenizer):
    bad = '<atem:invoke name="f">\nx</atem:invoke>\n</atem:function_calls> tail'
    body = "<atem:function_calls>\n" + invoke("box.open", item="1") + bad
    answer = read(tokenizer, f" to=box.open<|message|>{body}<|eot|>")
    assert [call.arguments for call in answer.calls] == [{"item": 1}]
    assert answer.text.strip() == bad
    assert len(answer.problems) == 1


def test_call_cut_off_at_any_token_is_text_or_whole(tokenizer):
    text = " to=write_file<|message|>" + call("write_file", path="a", content='{"b": "}"}') + "<|eot|>"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    body = tokens.index(7) + 1
    for end in range(body, len(tokens)):
        answer, so_far = read(tokenizer, "", tokens=tokens[:end], cut=True), tokenizer.decode(tokens[body:end])
        if "</atem:invoke>" in so_far:
            assert answer.calls == [Call("write_file", {"path": "a", "content": '{"b": "}"}'})]
            assert (answer.text, answer.problems) == ("", [])
        else:
            assert (answer.calls, answer.text) == ([], so_far)
            expected = [CUT] if so_far.startswith("<atem:function_calls>") else []
            assert answer.problems == [*expected, "a message to write_file without a call"]


HEADLESS = {
    "no message marker": (" I am not in the layout.<|eot|>", " I am not in the layout."),
    "a long header": ("word " * 200 + "<|eot|>", "word " * 200),
    "text after a message's end": (" to=user<|message|>a<|eom|>b<|eot|>", "a\n\nb"),
    "another role": (" to=user<|message|>a<|eom|><|start|>user<|message|>b<|eot|>", "a\n\nb"),
    "two markers": (" to=user<|message|>a<|message|>b<|eot|>", "ab"),
}


@pytest.mark.parametrize("name", HEADLESS)
def test_text_outside_the_layout_is_kept_with_a_reason(name, tokenizer):
    text, expected = HEADLESS[name]
    answer = read(tokenizer, text)
    assert (answer.text, answer.reasoning) == (expected, "")
    assert len(answer.problems) == 1


def test_markers_spelled_by_ordinary_tokens_are_text(tokenizer):
    """A model that writes about the markers does not end its message."""
    spelled = [
        token
        for part in ("<", "|eot|> and <", "|message|>")
        for token in tokenizer.encode(part, add_special_tokens=False)
    ]
    tokens = [*tokenizer.encode(" to=user<|message|>", add_special_tokens=False), *spelled, EOT]
    assert read(tokenizer, "", tokens=tokens).text == "<|eot|> and <|message|>"


def test_no_call_is_read_without_tools(tokenizer):
    body = call("box.open", item="3")
    answer = read(tokenizer, f" to=user<|message|>{body}<|eot|>", schemas=None)
    assert (answer.text, answer.calls, answer.problems) == (body, [], [])


def test_no_call_is_read_in_reasoning(tokenizer):
    body = call("box.open", item="3")
    answer = read(tokenizer, f" to=self<|message|>{body}<|eot|>")
    assert (answer.reasoning, answer.calls) == (body, [])


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_stop_string_ends_the_text_and_not_header_or_reasoning(size, tokenizer):
    text = " to=self<|message|>user END<|eom|><|start|>assistant to=user<|message|>Well, EN END more<|eot|>"
    answer = read(tokenizer, text, sizes=[size], stops=("assistant", "END"))
    assert (answer.reasoning, answer.text) == ("user END", "Well, EN ")


def test_stop_counts_the_tokens_up_to_it(tokenizer):
    head, tail = " to=user<|message|>a", "END more"
    tokens = [tokenizer.encode(part, add_special_tokens=False) for part in (head, tail)]
    reader = AnswerReader(tokenizer, {EOT}, None, ("E",))
    reader.feed(tokens[0] + tokens[1])
    assert reader.stopped
    assert len(tokens[0]) < reader.count <= len(tokens[0]) + len(tokenizer.encode("END", add_special_tokens=False))


@pytest.mark.parametrize("seed", range(30))
def test_any_cut_gives_what_the_whole_gives(seed, tokenizer):
    chance = random.Random(seed)
    tokens = tokenizer.encode(random_answer(chance), add_special_tokens=False)
    expected = twin(tokenizer, tokens)
    for sizes in ([len(tokens)], [1], [2], [chance.randrange(1, 9) for _ in range(len(tokens))]):
        answer = read(tokenizer, "", sizes, tokens=tokens)
        assert (answer.reasoning, answer.text) == expected[:2]
        assert [(call.name, call.arguments) for call in answer.calls] == expected[2]
        assert answer.problems == []


@pytest.mark.parametrize("seed", range(60))
def test_any_cut_of_a_damaged_answer_gives_the_same(seed, tokenizer):
    """Also where tokens are missing, doubled or swapped: pieces of any size, one result, and no text is lost."""
    chance = random.Random(seed)
    tokens = tokenizer.encode(random_answer(chance), add_special_tokens=False)
    for _ in range(chance.randrange(1, 6)):
        at = chance.randrange(len(tokens))
        tokens[at : at + chance.randrange(3)] = chance.choices([*tokens, 4, 6, 7], k=chance.randrange(3))
        tokens = tokens or [7]
    whole = read(tokenizer, "", tokens=tokens)
    for sizes in ([1], [3], [chance.randrange(1, 9) for _ in range(len(tokens))]):
        answer = read(tokenizer, "", sizes, tokens=tokens)
        assert (answer.reasoning, answer.text, answer.calls) == (whole.reasoning, whole.text, whole.calls)
        assert answer.problems == whole.problems


def test_pieces_of_a_stream_hold_no_marker_and_no_half_tag(tokenizer):
    text, _ = CASES["calls in several messages after reasoning and text"]
    reader = AnswerReader(tokenizer, {EOT}, TOOLS)
    pieces = [piece for token in tokenizer.encode(text, add_special_tokens=False) for piece in reader.feed([token])]
    shown = "".join(piece.text for piece in pieces)
    assert shown == "hmLet me look."
    assert sum(piece.call is not None for piece in pieces) == 2
    assert len([piece for piece in pieces if piece.kind == "text" and piece.text]) > 1  # it streams


def test_call_gives_its_arguments_as_json(tokenizer):
    text = " to=write_file<|message|>" + call("write_file", content=QUOTES + "ü") + "<|eot|>"
    (found,) = read(tokenizer, text).calls
    assert json.loads(found.json()) == {"content": QUOTES + "ü"}


def test_tokens_without_the_layout_are_text():
    class Plain:
        def get_added_vocab(self):
            return {"<eos>": 0}

        def decode(self, tokens, **_):
            return "".join(chr(token) for token in tokens)

    answer = read(Plain(), "", tokens=[97, 98, 99, EOT], sizes=[2])
    assert (answer.text, answer.problems) == ("abc", [])
