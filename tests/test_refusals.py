"""A flag that no model could make right is refused before a model is looked for, and a wrong length before any work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from command import run

import dflash_mlx
from dflash_mlx import InputError, Session
from dflash_mlx.tuning import tune
from dflash_mlx.verification import verify

LEVELS = "'huge' is not one of 'low', 'medium', 'high', 'xhigh'"
TEMPERATURE = "temperature must be a number of at least 0 but got"
SEED = "seed must be None or an integer between 0 and 2**64 - 1 but got -1"
LENGTH = "'-1' is neither 'auto' nor a number of tokens"
FLAGS = [
    ("generate x --temperature nan", f"{TEMPERATURE} nan"),
    ("generate x --seed -1", SEED),
    ("generate x --draft-length -1", LENGTH),
    ("chat --reasoning huge", LEVELS),
    ("chat --temperature inf", f"{TEMPERATURE} inf"),
    ("serve --top-p nan", "top_p must be a number between 0 and 1 but got nan"),
    ("serve --draft-length -1", LENGTH),
    ("serve --port 99999", "99999 is not in the range 0<=x<=65535"),
    ("serve --shutdown-seconds nan", "'nan' is no number of seconds"),
    ("tune --temperature nan", f"{TEMPERATURE} nan"),
    ("tune --seed -1", SEED),
    ("tune --max-tokens 1", "1 is not in the range x>=2"),
    ("tune --context 0", "0 is not in the range x>=1"),
    ("verify --temperature -1", f"{TEMPERATURE} -1.0"),
    ("verify --seed -1", SEED),
    ("verify --draft-length -1", LENGTH),
    ("bench --draft-length -1", LENGTH),
    ("bench --draft-length 0", "draft length must be 'auto' or at least 1 but got 0"),
    ("bench --draft-length 3 --draft-length 3", "draft lengths must be all different but got 3, 3"),
    ("convert pocket out --bits 5", "bits must be one of 4, 6, 8 but got 5"),
    ("convert pocket out --bits 4 --group-size 48", "group_size must be one of 32, 64, 128 but got 48"),
    ("convert pocket out --dtype int8", "dtype must be one of float32, float16, bfloat16 but got 'int8'"),
]
LIMITS = [
    ("--kernels cuda", "kernels must be one of auto, stock, metal but got 'cuda'"),
    ("--kv-bits 4", "kv_bits must be 8 but got 4"),
    ("--max-context 0", "max_context must be an integer of at least 1 but got 0"),
    ("--max-memory 0", "max_memory must be an integer of at least 1 but got 0"),
]


@pytest.mark.parametrize(("line", "message"), FLAGS, ids=[line for line, _ in FLAGS])
def test_a_flag_that_is_wrong_for_any_model_is_refused_before_one_is_loaded(line, message, monkeypatch) -> None:
    for name in ("dflash_mlx.load", "dflash_mlx.convert.resolve", "dflash_mlx.convert.find"):
        monkeypatch.setattr(name, lambda *_, **__: pytest.fail("a model was looked for"))
    done = run(*line.split())
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr


@pytest.mark.parametrize("command", ["generate x", "chat", "tune", "verify", "bench --suite pocket"])
@pytest.mark.parametrize(("flag", "message"), LIMITS, ids=[flag for flag, _ in LIMITS])
def test_a_wrong_limit_is_refused_before_a_model_is_downloaded(command, flag, message, monkeypatch) -> None:
    monkeypatch.setattr("dflash_mlx.pair.resolve", lambda *_: pytest.fail("a model was looked for"))
    done = run(*command.split(), "--model", "org/name", *flag.split())
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr


@pytest.fixture(scope="module")
def pair():
    return dflash_mlx.load("pocket")


@pytest.fixture
def _no_work(monkeypatch) -> None:
    monkeypatch.setattr(Session, "generate", lambda *_, **__: pytest.fail("something was decoded"))


@pytest.mark.usefixtures("_no_work")
@pytest.mark.parametrize("context", [0, 4088, 5000, 10**30])
def test_tune_refuses_a_context_that_the_pair_cannot_hold_and_says_what_it_holds(context, pair) -> None:
    """The pocket pair holds 4096; the longest draft and some tokens more are generated there: 3 and 6."""
    with pytest.raises(InputError, match=rf"between 1 and 4087 \(4096 that the pair holds.* but got {context}\. Ask"):
        tune(pair, ["a"], contexts=(40, context), lengths=(3,))


@pytest.mark.usefixtures("_no_work")
def test_tune_says_how_much_context_the_model_itself_has() -> None:
    small = dflash_mlx.load("pocket", max_context=100)
    with pytest.raises(InputError, match=r"but got 200\. .*\(--max-context\), at most the model's 4096\."):
        tune(small, ["a"], contexts=(200,))


def test_the_longest_context_that_tune_takes_is_measured_with_every_length(pair) -> None:
    report, _ = tune(pair, ["a"], contexts=(4087,), lengths=(3,), repeats=1, max_tokens=4)
    assert {cost["draft_length"] for cost in report["costs"] if cost["context"] == 4087} == {0, 3}


def test_tune_names_the_usual_contexts_that_it_leaves_out(pair) -> None:
    said: list[str] = []
    tune(dflash_mlx.load("pocket", max_context=600), ["a"], lengths=(1,), repeats=1, max_tokens=4, say=said.append)
    left_out = [line for line in said if line.startswith("left out")]
    assert left_out == [f"left out rounds at {n} tokens of context: the pair holds 600" for n in (4096, 16384)]


@pytest.mark.usefixtures("_no_work")
@pytest.mark.parametrize("measure", [lambda *a: tune(*a[:2], lengths=a[2]), verify], ids=["tune", "verify"])
@pytest.mark.parametrize(
    ("prompts", "lengths", "message"),
    [
        (["a"], [1, 16], "draft_length must be 'auto' or between 0 and 15"),
        (["a", "b " * 5000], [1], "prompt 2 must be at most 4096 tokens but got"),
        (["a", [5, 4096 * 4]], [1], "prompt 2 must be tokens between 0 and"),
        ([[]], [1], "prompt must be at least one token but got none"),
        (["a", [{"role": "boss"}]], [1], "role must be one of"),
    ],
)
def test_a_prompt_or_length_that_does_not_fit_is_told_before_the_first_is_decoded(
    measure, prompts, lengths, message, pair
) -> None:
    with pytest.raises(InputError, match=message):
        measure(pair, prompts, lengths)


def test_texts_that_end_at_once_leave_nothing_to_tune() -> None:
    ends = replace(dflash_mlx.load("pocket"), eos_token_ids=frozenset(range(4096 * 4)))
    with pytest.raises(InputError, match="prompts must be followed by at least 2 tokens"):
        tune(ends, ["a"], contexts=(), lengths=(1,))


@pytest.mark.parametrize("command", ["tune", "verify"])
def test_a_file_without_prompts_is_not_replaced_by_others(command, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    done = run(command, "--prompts", str(tmp_path / "empty.jsonl"))
    assert done.exit_code == 2
    assert "empty.jsonl must be a file with prompts but got none" in done.stderr


def test_a_bench_of_which_nothing_fits_fails_and_says_why(tmp_path: Path) -> None:
    lines = ['name = "long"', 'about = "a"', 'rebuilds = "b"', "max_tokens = 8"]
    for name, prompt in (("filled", "fill_tokens = 5000"), ("read", f'text = "{"x = 1 " * 3000}"')):
        lines += ["[[case]]", f'name = "{name}"', prompt]
    (tmp_path / "long.toml").write_text("\n".join(lines))
    done = run("bench", "--suite", str(tmp_path / "long.toml"), "--out", str(tmp_path / "result.json"), "--quiet")
    assert done.exit_code == 2
    assert "suites must be with a case that this pair can run but got long filled needs 5008 tokens" in done.stderr
    assert "; long read needs" in done.stderr
    assert not (tmp_path / "result.json").exists()
