"""``dflash-mlx verify``: equal texts are equal, and a difference comes with its place, its margin and what it means."""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest
from command import run

import dflash_mlx
from dflash_mlx import Session, verification

PROMPT, TOKENS = "def fibonacci(n):", 12


@pytest.fixture(scope="module")
def pair():
    return dflash_mlx.load("pocket")


@pytest.fixture(scope="module")
def plain(pair):
    """The plain tokens, and the float32 logits that each was chosen from, row by row."""
    rows = []

    def record(tokens, logits):
        rows.append(np.array(logits[0].astype(mx.float32)))
        return logits

    options = {"max_tokens": TOKENS, "draft_length": 0, "logits_processors": [record]}
    return Session(pair).generate(PROMPT, **options).tokens, rows


def fault(monkeypatch, place, token):
    """Let drafted decoding give another token at a place; `None` ends the text there."""
    generate = Session.generate

    def faulty(self, prompt, **options):
        out = generate(self, prompt, **options)
        if options["draft_length"]:
            out.tokens[place:] = [] if token is None else [token, *out.tokens[place + 1 :]]
        return out

    monkeypatch.setattr(Session, "generate", faulty)


def test_plain_and_drafted_texts_are_equal_here():
    report = json.loads(run("verify", PROMPT, "import os", "--max-tokens", "12", "--json", "--quiet").stdout)
    assert (report["runs"], report["equal"]) == (6, 6)
    assert {each["draft_length"] for each in report["comparisons"]} == {1, 4, 15}
    assert all(each["tokens"] == 12 for each in report["comparisons"])
    assert report["near_tie_is"].endswith(" roundings of bfloat16 at the best score")


def test_a_difference_in_a_chat_shows_its_messages_as_json(pair, monkeypatch):
    fault(monkeypatch, 2, 5)
    messages = [{"role": "user", "content": "größe"}]
    (found,) = verification.compare(pair, messages, [4], max_tokens=4)
    assert json.loads(found.prompt) == messages
    assert "größe" in found.prompt


def test_a_difference_has_its_place_and_its_margin(pair, plain, monkeypatch):
    tokens, rows = plain
    worst = int(rows[5].argmin())
    fault(monkeypatch, 5, worst)
    (found,) = verification.compare(pair, PROMPT, [4], max_tokens=TOKENS)
    assert (found.token, found.plain, found.drafted) == (5, tokens[5], worst)
    assert found.margin == pytest.approx(float(rows[5][tokens[5]] - rows[5][worst]), abs=1e-5)
    assert not found.near_tie


def test_a_sampled_difference_counts_the_noise(pair, monkeypatch):
    """The chosen token's score is the best of all, so every margin is positive, and that of itself is 0."""
    tokens = Session(pair).generate(PROMPT, max_tokens=TOKENS, temperature=0.8, seed=3, draft_length=0).tokens
    for wrong in (5, 77, 1234):
        with monkeypatch.context() as patch:
            fault(patch, 4, wrong)
            (found,) = verification.compare(pair, PROMPT, [4], max_tokens=TOKENS, temperature=0.8, seed=3)
        assert found.plain == tokens[4]
        assert found.margin > 0


def test_the_second_best_token_by_a_hair_is_a_near_tie(pair, plain, monkeypatch):
    _, rows = plain
    margins = [np.diff(np.sort(row)[-2:])[0] for row in rows]
    place = int(np.argmin(margins))
    fault(monkeypatch, place, int(np.argsort(rows[place])[-2]))
    (found,) = verification.compare(pair, PROMPT, [4], max_tokens=TOKENS)
    bound = 2 * 2**-7 * np.abs(rows[place]).max()
    assert found.near_tie == bool(margins[place] <= bound)
    assert found.margin == pytest.approx(margins[place], abs=1e-5)


def test_near_ties_of_a_plain_text_are_counted(pair, plain):
    tokens, rows = plain
    expected = 0
    for row in rows:
        second, best = np.sort(row)[-2:]
        expected += best - second <= 2 * 2**-7 * max(abs(best), abs(second))
    session = Session(pair)
    session.generate(PROMPT, max_tokens=1)
    ids = session.tokens[:-1]
    assert verification.near_ties(pair, ids, tokens) == expected
    assert expected > 0


def test_a_text_that_ends_early_is_a_difference_without_a_margin(pair, monkeypatch):
    fault(monkeypatch, 6, None)
    (found,) = verification.compare(pair, PROMPT, [4], max_tokens=TOKENS)
    assert (found.token, found.drafted, found.margin, found.near_tie) == (6, None, None, False)


def test_a_real_difference_fails_and_a_near_tie_only_when_strict(pair, plain, monkeypatch):
    _, rows = plain
    monkeypatch.setattr(dflash_mlx, "load", lambda **_: pair)
    arguments = ("verify", PROMPT, "--max-tokens", str(TOKENS), "--draft-length", "4", "--quiet")
    assert run(*arguments, "--strict").exit_code == 0
    with monkeypatch.context() as patch:
        fault(patch, 3, int(rows[3].argmin()))
        result = run(*arguments)
    assert (result.exit_code, result.stdout.count("DIFFERENT: ")) == (1, 1)
    with monkeypatch.context() as patch:
        fault(patch, 3, int(np.argsort(rows[3])[-2]))
        patch.setattr(verification, "ROUNDINGS", 10**6)
        assert run(*arguments).exit_code == 0
        strict = run(*arguments, "--strict")
    assert (strict.exit_code, strict.stdout.count("near-tie: ")) == (1, 1)


def test_prompts_come_from_a_file_and_a_wrong_line_is_named(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('"import os"\n\n{"prompt": "class A:"}\n{"messages": [{"role": "user", "content": "Add."}]}\n')
    arguments = ("--max-tokens", "4", "--draft-length", "2", "--json", "--quiet")
    report = json.loads(run("verify", "--prompts", str(file), *arguments).stdout)
    assert [each["prompt"] for each in report["comparisons"]][:2] == ["import os", "class A:"]
    assert report["equal"] == 3
    file.write_text('"import os"\nimport os\n')
    wrong = run("verify", "--prompts", str(file), *arguments)
    assert wrong.exit_code == 2
    assert f"[prompts] line 2 of {file} must be JSON" in wrong.stderr
    file.write_text('{"text": 3}\n')
    assert 'must be a text, {"prompt": TEXT}' in run("verify", "--prompts", str(file), *arguments).stderr


def test_without_a_drafter_there_is_nothing_to_compare():
    result = run("verify", "--no-draft", "--quiet")
    assert result.exit_code == 2
    assert "[verify] the pair must be a target with a drafter but got a target alone" in result.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\xff\n", "must be UTF-8 text"), (b"[" * 100_000, "must be JSON"), (b"5", "must be a text")],
    ids=["bytes", "deep", "number"],
)
def test_a_file_of_prompts_that_cannot_be_read_is_bad_input(tmp_path, content, message):
    (tmp_path / "mine.jsonl").write_bytes(content)
    done = run("verify", "--prompts", str(tmp_path / "mine.jsonl"))
    assert done.exit_code == 2
    assert message in done.stderr
