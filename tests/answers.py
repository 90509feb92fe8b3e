"""Answers for tests: written in the layout, read in pieces, read again by brute force, and made at random."""

from __future__ import annotations

import random
import re

from dflash_mlx.chat.answer import Answer, AnswerReader
from dflash_mlx.chat.values import value_of

TOOLS = {
    "box.open": {"type": "object", "properties": {"item": {"type": "integer"}, "note": {"type": "string"}}},
    "write_file": {"properties": {"path": {"type": "string"}, "content": {"type": "string"}, "mode": {}}},
}
EOT = 5


def invoke(name: str, **values: str) -> str:
    lines = [f'<atem:parameter name="{key}">{value}</atem:parameter>\n' for key, value in values.items()]
    return f'<atem:invoke name="{name}">\n{"".join(lines)}</atem:invoke>\n'


def block(*invokes: str) -> str:
    return "<atem:function_calls>\n" + "".join(invokes) + "</atem:function_calls>"


def call(name: str, **values: str) -> str:
    return block(invoke(name, **values))


def read(tokenizer, text, sizes=(10**9,), schemas=TOOLS, stops=(), cut=False, tokens=None) -> Answer:
    """Read a text's tokens in pieces of the given sizes, the last one repeating."""
    left = tokenizer.encode(text, add_special_tokens=False) if tokens is None else list(tokens)
    reader, answer, sizes = AnswerReader(tokenizer, {2, EOT}, schemas, stops), Answer(), list(sizes)
    while left:
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        answer.add(reader.feed(left[:size]))
        left = left[size:]
    answer.add(reader.finish(cut))
    return answer


def twin(tokenizer, tokens: list[int]) -> tuple[str, str, list[tuple[str, dict]]]:
    """Reasoning, text and calls of a whole answer with well-formed blocks, by splitting and regular expressions."""
    reasoning, texts, calls = [], [], []
    spelled = " ".join(map(str, tokens)) + " "
    for message in re.split(rf"(?:\b4 6 |\b{EOT} )", spelled):
        if " 7 " not in message:
            continue
        header, body = (tokenizer.decode([int(x) for x in part.split()]) for part in message.split(" 7 ", 1))
        if "to=self" in header:
            reasoning.append(body)
            continue
        parts = re.split(r"\s*<atem:function_calls>(.*?)</atem:function_calls>\s*", body, flags=re.DOTALL)
        if "".join(parts[::2]):
            texts.append("".join(parts[::2]))
        for inner in parts[1::2]:
            for name, rest in re.findall(r'<atem:invoke name="(.*?)">(.*?)</atem:invoke>', inner, re.DOTALL):
                found = re.findall(r'<atem:parameter name="(.*?)">(.*?)</atem:parameter>', rest, re.DOTALL)
                known = TOOLS.get(name, {}).get("properties", {})
                calls.append((name, {k: value_of(v, known.get(k), {}) for k, v in found}))
    return "\n\n".join(reasoning), "\n\n".join(texts), calls


WORDS = ["a", "ü", "🙂", " ", "\n", "{", '"', "<", "<atem", "</atem:", ">", "to=user", "<|eot", "7", "\n\n", "null"]


def random_answer(chance: random.Random) -> str:
    def words(most: int) -> str:
        return "".join(chance.choices(WORDS, k=chance.randrange(most)))

    def one_block() -> str:
        values = [
            {key: words(5) for key in ("item", "note")[: chance.randrange(3)]} for _ in range(chance.randrange(1, 4))
        ]
        return block(*(invoke(chance.choice([*TOOLS, "other"]), **value) for value in values))

    messages = []
    for _ in range(chance.randrange(1, 5)):
        if chance.random() < 0.3:
            messages.append(f" to=self<|message|>x{words(8)}")
        else:
            parts = [
                chance.choice(["", f"x{words(6)}y"]),
                chance.choice(["", "\n", " \n\n"]) + one_block() if chance.random() < 0.6 else "",
                chance.choice(["", "y"]),
            ]
            messages.append(f" to=user<|message|>{''.join(parts)}")
    return "<|eom|><|start|>assistant".join(messages) + "<|eot|>"
