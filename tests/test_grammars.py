"""A grammar masks what it forbids, whatever is drafted; drafts are picked from what it allows."""

from __future__ import annotations

import json
import random
import re

import mlx.core as mx
import numpy as np
import pytest

import dflash_mlx
from dflash_mlx.chat.calls import read_invoke
from dflash_mlx.errors import InputError
from dflash_mlx.server.grammar import Grammar, answer_grammar, grammar_tokenizer

PROMPT = "def colour(x):\n    return "
WORDS = ["red", "reddish", "green ü", "blue-green"]
LIST = 'start: word (", " word)*\nword: ' + " | ".join(map(json.dumps, WORDS)) + "\n"
WHOLE = re.compile("(?:{0})(?:, (?:{0}))*".format("|".join(WORDS)))


@pytest.fixture(scope="module")
def pair():
    return dflash_mlx.load("pocket")


@pytest.fixture(scope="module")
def tokenizer(pair):
    return grammar_tokenizer(pair)


@pytest.fixture(scope="module")
def prompt(pair):
    return [pair.tokenizer.bos_token_id, *pair.tokenizer.encode(PROMPT, add_special_tokens=False)]


def begins(text: bytes) -> bool:
    """Whether a list of the words begins with this text, by trying all lists that are long enough."""
    lists = [word.encode() for word in WORDS]
    while lists:
        if any(each.startswith(text) for each in lists):
            return True
        lists = [each + b", " + word.encode() for each in lists if text.startswith(each) for word in WORDS]
    return False


def texts_of(pair) -> list[bytes]:
    """What each token writes."""
    pieces = [pair.tokenizer.convert_ids_to_tokens(token) for token in range(pair.target.config.vocab_size)]
    bytes_of = [re.fullmatch(r"<0x(..)>", piece) for piece in pieces]
    return [
        bytes([int(byte[1], 16)]) if byte else piece.replace("▁", " ").encode()
        for piece, byte in zip(pieces, bytes_of, strict=True)
    ]


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (3, 4, 5))])
def test_mask_allows_what_trying_every_token_finds(seed, pair, tokenizer):
    """Along a random walk: nothing wrong is allowed, and no way on is lost.

    Where a text can go on in one way only, the library allows one spelling of it, so not each token that would fit.
    """
    texts, chance, history, said = texts_of(pair), random.Random(seed), [], b""
    grammar = Grammar(tokenizer, LIST, 0, 4096)
    while len(said) < 40:
        row = np.array(grammar(mx.array(history, dtype=mx.uint32), mx.zeros((1, 4096))))[0]
        allowed = [token for token in np.flatnonzero(row == 0).tolist() if token not in pair.eos_token_ids]
        fitting = [token for token in range(13, 4096) if begins(said + texts[token])]
        assert set(allowed) <= set(fitting)
        for token in fitting:
            assert any(texts[token].startswith(texts[t]) or texts[t].startswith(texts[token]) for t in allowed)
        assert (row[5] == 0) == bool(WHOLE.fullmatch(said.decode(errors="replace")))
        history.append(chance.choice(allowed))
        said += texts[history[-1]]


@pytest.mark.parametrize("options", [{}, {"temperature": 1.2, "seed": 3, "top_p": 0.9}], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "length", [4, pytest.param(1, marks=pytest.mark.slow), pytest.param(15, marks=pytest.mark.slow), "auto"]
)
def test_drafting_under_a_grammar_equals_plain_decoding(length, options, pair, tokenizer, prompt):
    def out(draft_length):
        processors = [Grammar(tokenizer, LIST, len(prompt), 4096)]
        return dflash_mlx.generate(
            pair, prompt, max_tokens=24, draft_length=draft_length, logits_processors=processors, **options
        )

    drafted = out(length)
    assert drafted.tokens == out(0).tokens
    proposed = [token for each in drafted.stats.rounds for token in each.proposal]
    assert proposed
    assert drafted.stats.mean_accepted > 0


def test_every_draft_is_what_the_grammar_allows(pair, tokenizer, prompt):
    grammar = Grammar(tokenizer, LIST, len(prompt), 4096)
    out = dflash_mlx.generate(pair, prompt, max_tokens=30, draft_length=7, logits_processors=[grammar])
    said: list[int] = out.tokens[:1]
    for each in out.stats.rounds:
        for count in range(1, len(each.proposal) + 1):
            tokens = [token for token in said + each.proposal[:count] if token not in pair.eos_token_ids]
            if len(tokens) == len(said) + count:
                text = pair.tokenizer.decode(tokens)
                assert begins(text.rstrip("\ufffd").encode())
        said += each.tokens


def test_history_may_go_back_and_forth(tokenizer, pair):
    """Rows of rejected drafts come and go: the mask depends on the history alone."""
    tokens = pair.tokenizer.encode("red, green ü, blue-green, reddish", add_special_tokens=False)
    wandering, chance = Grammar(tokenizer, LIST, 0, 4096), random.Random(5)
    logits = mx.zeros((1, 4096))
    for _ in range(60):
        history = tokens[: chance.randrange(len(tokens))] + chance.choices(range(4096), k=chance.randrange(3))
        found = wandering(mx.array(history, dtype=mx.uint32), logits)
        fresh = Grammar(tokenizer, LIST, 0, 4096)(mx.array(history, dtype=mx.uint32), logits)
        assert np.array_equal(np.array(found), np.array(fresh))


SCHEMA = {
    "$defs": {"size": {"enum": [1, 2, 3]}},
    "type": "object",
    "properties": {"path": {"type": "string"}, "size": {"$ref": "#/$defs/size"}, "kind": {"enum": ["a b", "<c>"]}},
    "required": ["size", "kind"],
}
BLOCKS = [
    ({"size": 3, "kind": "<c>"}, True),
    ({"path": 'any "thing" {\n', "size": 1, "kind": "a b"}, True),
    ({"size": 4, "kind": "a b"}, False),
    ({"kind": "a b"}, False),
    ({"size": 1, "kind": "d"}, False),
    ({"size": 1, "kind": "a b", "more": 1}, False),
]


@pytest.mark.parametrize(("arguments", "good"), BLOCKS)
def test_forced_call_is_held_to_its_schema(arguments, good, pair, tokenizer):
    invoke = '<atem:invoke name="f.g">\n' + "".join(
        f'<atem:parameter name="{key}">{value}</atem:parameter>\n' for key, value in arguments.items()
    ) + "</atem:invoke>\n"  # fmt: skip
    text = f" to=f.g<|message|><atem:function_calls>\n{invoke}</atem:function_calls>"
    tokens = pair.tokenizer.encode(text, add_special_tokens=False)
    grammar = Grammar(tokenizer, answer_grammar(None, {"f.g": SCHEMA}, forced=True), 0, 4096)
    ends = grammar(mx.array([*tokens], dtype=mx.uint32), mx.zeros((1, 4096)))
    allowed = [token for token in pair.eos_token_ids if float(ends[0, token]) == 0 and float(mx.min(ends)) < 0]
    assert bool(allowed) == good
    if good:
        read = read_invoke(invoke, {"f.g": SCHEMA})
        assert read
        assert read[0].arguments == arguments


LOOK = '<atem:function_calls>\n<atem:invoke name="look">\n</atem:invoke>\n</atem:function_calls>'
WAYS = [
    ("to=user<|message|>hello", False, True),
    ("to=self<|message|>hm<|eom|><|start|>assistant to=user<|message|>hello", False, True),
    (f"to=look<|message|>{LOOK}", False, True),
    ("to=self<|message|>hm", True, False),
    ("to=user<|message|>hello", True, False),
    ("to=nobody<|message|>hello", False, False),
]


@pytest.mark.parametrize(("text", "forced", "good"), WAYS)
def test_answer_goes_only_the_ways_that_are_open(text, forced, good, pair, tokenizer):
    grammar = Grammar(tokenizer, answer_grammar(None, {"look": {}}, forced=forced, single=True), 0, 4096)
    ends = grammar(
        mx.array(pair.tokenizer.encode(" " + text, add_special_tokens=False), dtype=mx.uint32), mx.zeros((1, 4096))
    )
    assert (any(float(ends[0, token]) == 0 for token in pair.eos_token_ids) and float(mx.min(ends)) < 0) == good


def test_wrong_grammar_is_told(tokenizer):
    with pytest.raises(InputError, match="the schema must be one that the grammar library follows but got"):
        Grammar(tokenizer, answer_grammar({"type": "nonsense"}, {}), 0, 4096)
