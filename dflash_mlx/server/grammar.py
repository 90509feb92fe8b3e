"""What a grammar allows next: a logits processor that masks the target's rows, and picks what may be drafted.

The grammar library is llguidance; here is the grammar of an answer in Muse Glimmer's layout: reasoning if the model
wants and no call is forced, then text of a format, or calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from ..chat.values import allowed
from ..errors import InputError, must
from ..pair import Pair
from ..processors import Guide

Schema = Mapping[str, Any]
THOUGHT = '" to=self" <|message|> /(?s:.*)/ <|eom|> <|start|> "assistant"'


def grammar_tokenizer(pair: Pair) -> LLTokenizer:
    """The tokenizer as the grammar library wants it; made once, it takes some seconds for a large vocabulary.

    Raises:
        InputError: the pair has no tokenizer.json.
    """
    path = Path(pair.target_path) / "tokenizer.json"
    if not path.is_file():
        todo = "This model serves no formats and forced calls."
        raise InputError(must("server", "the model", "with a tokenizer.json", "without", todo))
    vocab = pair.target.config.vocab_size
    return LLTokenizer(path.read_text(encoding="utf-8"), n_vocab=vocab, eos_token=sorted(pair.eos_token_ids))


def answer_grammar(
    text: Schema | None, tools: Mapping[str, Schema], forced: bool = False, single: bool = False, layout: bool = True
) -> str:
    """The grammar of an answer, in llguidance's Lark.

    Args:
        text: JSON schema of the text; `None` for any text.
        tools: that may be called -> JSON schema of their parameters.
        forced: one of them must be called, and at once: reasoning could use up the tokens before the call.
        single: only one call.
        layout: the model writes messages to recipients; else the answer is the text alone.
    """
    body = f"%json {json.dumps(_compact(text))}" if text is not None else "/(?s:.*)/"
    if not layout:
        return f"start: body\nbody: {body}\n"
    rules: list[str] = []
    ways: list[str] = []
    if not forced:
        ways.append("answer")
        rules += [f"thought: {THOUGHT}", 'answer: " to=user" <|message|> body', f"body: {body}"]
    if tools:
        calls = [f"call{number}" for number in range(len(tools))]
        ways += calls
        for number, (name, schema) in enumerate(tools.items()):
            rules += _call(number, name, schema, single)
    start = f"start: {'' if forced else 'thought? '}({' | '.join(ways)})"
    return "\n".join([start, *rules]) + "\n"


def _call(number: int, name: str, schema: Schema, single: bool) -> list[str]:
    """The rules of a message with calls of one tool."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    invoke, rules, parts = f"invoke{number}", [], []
    for place, (key, item) in enumerate(properties.items()):
        rule = f"value{number}_{place}"
        parts.append(rule if key in required else f"{rule}?")
        rules += _parameter(rule, key, item, schema)
    opening = json.dumps(f'<atem:invoke name="{name}">\n')
    return [
        f'call{number}: {json.dumps(f" to={name}")} <|message|> "<atem:function_calls>\\n"'
        f' {invoke}{"" if single else "+"} "</atem:function_calls>"',
        f'{invoke}: {opening} {" ".join(parts)} "</atem:invoke>\\n"',
        *rules,
    ]


def _parameter(rule: str, key: str, item: Any, root: Schema) -> list[str]:
    """The rules of a parameter: strings as they are, other values as JSON."""
    opening = json.dumps(f'<atem:parameter name="{key}">')
    closing = json.dumps("</atem:parameter>\n")
    if allowed(item, root) == {"string"}:
        choices = item.get("enum") if isinstance(item, Mapping) else None
        if choices:
            texts = " | ".join(json.dumps(choice) for choice in choices)
            return [f"{rule}: {opening} ({texts}) {closing}"]
        return [f"{rule}: {opening} {rule}_text", f"{rule}_text[suffix={closing}]: /(?s:.*)/"]
    whole = {**_definitions(root), **item} if isinstance(item, Mapping) else item
    return [f"{rule}: {opening} {rule}_json {closing}", f"{rule}_json: %json {json.dumps(_compact(whole))}"]


def _definitions(root: Schema) -> dict[str, Any]:
    return {name: root[name] for name in ("$defs", "definitions") if name in root}


def _compact(schema: Any) -> Any:
    """Without white space between tokens: a model that is held to a grammar may otherwise write it for ever."""
    return {**schema, "x-guidance": {"whitespace_flexible": False}} if isinstance(schema, Mapping) else schema


class Grammar(Guide):
    """Masks what a grammar does not allow.

    Args:
        tokenizer: from `grammar_tokenizer`.
        text: in llguidance's Lark.
        begin: position of the first token that the grammar is about: the prompt's length.
        vocab: of the logits.
    Raises:
        InputError: the grammar is wrong, as with a schema that the library cannot follow.
    """

    def __init__(self, tokenizer: LLTokenizer, text: str, begin: int, vocab: int):
        self._matcher = LLMatcher(tokenizer, text)
        if self._matcher.is_error():
            todo = "Simplify it."
            found = self._matcher.get_error().splitlines()[0][:300]
            raise InputError(must("server", "the schema", "one that the grammar library follows", found, todo))
        self._begin, self._vocab = begin, vocab
        self._taken: list[int] = []

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """One row of the target [1, V]; a history that the grammar excludes is never reached, and left alone."""
        if not self._go_to(tokens[self._begin :].tolist()):  # type: ignore[arg-type]
            return logits
        return mx.where(mx.array(self._mask())[None], logits, -mx.inf)

    def choose(self, history: Sequence[int], candidates: Sequence[Sequence[int]]) -> list[int]:
        """For each row the first candidate that the grammar allows after those chosen before it."""
        said = list(history[self._begin :])
        chosen: list[int] = []
        for row in candidates:
            mask = self._mask() if self._go_to(said + chosen) else None
            fitting = [token for token in row if mask is None or mask[token]]
            if not fitting and mask is not None:  # the likely ones are all forbidden: what is allowed may be one token
                fitting = np.flatnonzero(mask)[:1].tolist()
            chosen.append((fitting or list(row))[0])
        return chosen

    def _mask(self) -> np.ndarray:
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        mask: np.ndarray = np.unpackbits(packed, bitorder="little").astype(bool)[: self._vocab]
        return np.pad(mask, (0, self._vocab - mask.size))

    def _go_to(self, tokens: list[int]) -> bool:
        """Bring the matcher to this history; returns whether the grammar allows it."""
        shared = 0
        while shared < min(len(tokens), len(self._taken)) and tokens[shared] == self._taken[shared]:
            shared += 1
        if shared < len(self._taken):
            self._matcher.rollback(len(self._taken) - shared)
            del self._taken[shared:]
        took = self._matcher.try_consume_tokens(tokens[shared:]) if shared < len(tokens) else 0
        self._taken += tokens[shared : shared + took]
        return len(self._taken) == len(tokens)
