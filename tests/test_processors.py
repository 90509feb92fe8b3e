"""Users' logits processors, bias and penalties: each row sees its own history, a failure leaves a usable session."""

from __future__ import annotations

from functools import cache, partial

import grids
import mlx.core as mx
import mlx_lm.sample_utils as mlx_lm
import numpy as np
import pytest
import sampled

from dflash_mlx import ProcessorError, Session, generate
from dflash_mlx.choice import Choice
from dflash_mlx.options import Options

VOCAB = 97
PROMPT = [3, 14, 15, 9, 2, 6]
OPTIONS = {"temperature": 0.9, "seed": 12, "max_tokens": 18}


@pytest.fixture(scope="module")
def pair():
    return sampled.small_pair()


@cache
def plain_tokens():
    """What plain decoding without a processor gives."""
    return generate(sampled.small_pair().without_drafter(), PROMPT, **OPTIONS).tokens


def no_repeat(tokens, logits):
    """Ban the 5 newest tokens: depends on history, reads no value."""
    return mx.put_along_axis(logits, tokens[-5:][None], mx.array(-mx.inf), axis=-1)


def read_values(tokens, logits):
    """Raise one token picked by the history's sum, in numpy: needs values on the host."""
    found = np.array(logits)
    found[0, int(np.array(tokens).sum()) % VOCAB] += 4
    return mx.array(found)


def count_down(tokens, logits):
    """A grammar of sorts: even tokens at even positions, odd ones at odd positions."""
    wrong = mx.arange(VOCAB) % 2 != tokens.shape[0] % 2
    return mx.where(wrong[None], -mx.inf, logits)


class Recorder:
    """A processor that changes nothing and keeps what it was shown."""

    def __init__(self):
        self.calls: list[tuple[tuple[int, ...], np.ndarray]] = []

    def __call__(self, tokens, logits):
        assert tokens.dtype == mx.uint32
        assert logits.dtype == mx.float32
        self.calls.append((tuple(tokens.tolist()), np.array(logits)))
        return logits


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("processors", [(no_repeat,), (read_values,), (count_down,), (no_repeat, read_values)])
def test_rounds_with_processors_equal_plain_decoding_with_them(pair, processors, temperature):
    options = {**OPTIONS, "temperature": temperature, "logits_processors": processors}
    expected = generate(pair.without_drafter(), PROMPT, **options).tokens
    assert expected != generate(pair.without_drafter(), PROMPT, **{**options, "logits_processors": ()}).tokens
    for right, length in ((0.8, 4), (0.8, 15), (1.0, 7), (0.0, 3)):
        tutored = grids.tutored(pair, PROMPT + expected, right=right)
        assert generate(tutored, PROMPT, **options, draft_length=length).tokens == expected, (right, length)


def test_each_row_sees_the_history_with_the_drafts_before_it(pair):
    """Call by call, in prefill and in rounds with right and with wrong drafts."""
    plain, recorder = plain_tokens(), Recorder()
    tutored = grids.tutored(pair, PROMPT + plain, right=0.7)
    out = generate(tutored, PROMPT, **OPTIONS, draft_length=6, logits_processors=[recorder], prefill_step_size=4)
    assert out.tokens == plain
    expected, history = [tuple(PROMPT)], [*PROMPT, out.tokens[0]]
    for round_ in out.stats.rounds:
        expected += [(*history, *round_.proposal[:row]) for row in range(round_.drafted + 1)]
        history += round_.tokens
    assert [tokens for tokens, _ in recorder.calls] == expected
    assert 0 < out.stats.acceptance_rate < 1


def test_the_rows_that_decide_show_a_processor_what_plain_decoding_shows(pair):
    """The same histories in the same order with the same logits, bit for bit; other calls are drafts that failed."""
    alone, drafted = Recorder(), Recorder()
    plain = generate(pair.without_drafter(), PROMPT, **OPTIONS, logits_processors=[alone])
    tutored = grids.tutored(pair, PROMPT + plain.tokens, right=0.8)
    generate(tutored, PROMPT, **OPTIONS, draft_length=5, logits_processors=[drafted])
    shown = dict(drafted.calls)
    assert len(alone.calls) == len(plain.tokens)
    for tokens, logits in alone.calls:
        assert np.array_equal(shown[tokens], logits)
    true = {tokens for tokens, _ in alone.calls}
    assert [tokens for tokens in dict.fromkeys(tokens for tokens, _ in drafted.calls) if tokens in true] == [
        tokens for tokens, _ in alone.calls
    ]


def test_a_processor_that_writes_into_its_row_changes_that_row_only(pair):
    def overwrite(tokens, logits):
        logits[:, 50] = 100.0 if tokens.shape[0] % 3 == 0 else -100.0
        return logits

    options = {**OPTIONS, "logits_processors": [overwrite]}
    expected = generate(pair.without_drafter(), PROMPT, **options).tokens
    assert [token == 50 for token in expected] == [position % 3 == 0 for position in range(6, 24)]
    assert generate(pair, PROMPT, **options, draft_length=7).tokens == expected


@pytest.mark.parametrize("context", [4, 20])
@pytest.mark.parametrize("prompt", [[7], list(range(30))], ids=["1 token", "30 tokens"])
def test_bias_and_penalty_are_those_of_mlx_lm(pair, context, prompt):
    """mlx-lm's own processors, given as a user's, against the options of the same meaning; plain and drafted."""
    bias = {5: 2.0, 80: -3.0, 41: 1.5}
    theirs = mlx_lm.make_logits_processors(bias, 1.5, context)
    expected = generate(pair.without_drafter(), prompt, **OPTIONS, logits_processors=theirs).tokens
    options = {**OPTIONS, "logit_bias": bias, "repetition_penalty": 1.5, "repetition_context": context}
    assert generate(pair.without_drafter(), prompt, **options).tokens == expected
    tutored = grids.tutored(pair, prompt + expected, right=0.8)
    for length in (3, 15):
        assert generate(tutored, prompt, **options, draft_length=length).tokens == expected
        assert generate(tutored, prompt, **OPTIONS, logits_processors=theirs, draft_length=length).tokens == expected


@pytest.mark.parametrize("context", [1, 3, 4, 9, 40, 2**40])
@pytest.mark.parametrize("held", [1, 3, 8, 50])
def test_a_row_is_penalised_for_the_newest_tokens_before_it(context, held):
    """By hand: contexts shorter and longer than the history, than the block, and than both together."""
    random = np.random.RandomState((context + held) % 2**32)
    history, drafted = random.randint(0, 13, held).tolist(), random.randint(0, 13, 5)
    logits = (random.standard_normal((6, 13)) * 3).astype(np.float32)
    expected = logits.copy()
    for row in range(6):
        for token in set([*history, *drafted[:row].tolist()][-context:]):
            value = expected[row, token]
            expected[row, token] = value * np.float32(1.7) if value < 0 else value / np.float32(1.7)
    options = Options(repetition_penalty=1.7, repetition_context=context)
    found = Choice(options, 0)._penalised(mx.array(logits), history, mx.array(drafted.astype(np.uint32)))
    np.testing.assert_allclose(np.array(found), expected, rtol=1e-6)
    alone = Choice(options, 0)._penalised(mx.array(logits[:1]), history, None)
    np.testing.assert_allclose(np.array(alone), expected[:1], rtol=1e-6)


def fail_at(position, how, tokens, logits):
    """Fail from a position on, in one of the ways."""
    if tokens.shape[0] < position:
        return logits
    if how == "raises":
        raise KeyError("no such rule")
    wrong = {
        "the wrong shape": logits[0],
        "too many rows": mx.concatenate([logits, logits]),
        "no array": None,
        "only NaN": logits * mx.nan,
        "one NaN": mx.where(mx.arange(VOCAB) == 4, mx.nan, logits),
        "an infinity": mx.where(mx.arange(VOCAB) == 4, mx.inf, logits),
        "nothing left": logits - mx.inf,
    }
    return wrong[how]


NOTHING = "returning logits to choose from but got NaN, +inf, or -inf for every token"
FAILURES = {
    "raises": "a function that returns logits but got a KeyError: 'no such rule'",
    "the wrong shape": "returning logits of shape [1, 97] but got shape [97]",
    "too many rows": "returning logits of shape [1, 97] but got shape [2, 97]",
    "no array": "returning logits of shape [1, 97] but got NoneType",
    **dict.fromkeys(("only NaN", "one NaN", "an infinity", "nothing left"), NOTHING),
}


@pytest.mark.parametrize("draft_length", [0, 7])
@pytest.mark.parametrize("how", FAILURES)
@pytest.mark.parametrize("after", [0, 1, 9])
def test_a_failing_processor_is_named_and_leaves_the_session_usable(pair, how, after, draft_length):
    """In the prefill, in the first round, and in the middle of a block of drafts that are right."""
    expected = plain_tokens()
    session = Session(grids.tutored(pair, PROMPT + expected, right=1.0))
    processors = [no_change, partial(fail_at, len(PROMPT) + after, how)]
    with pytest.raises(ProcessorError) as caught:
        session.generate(PROMPT, **OPTIONS, draft_length=draft_length, logits_processors=processors)
    message = f"[generate] logits_processors[1] (fail_at) must be {FAILURES[how]}. Mend the processor."
    assert str(caught.value) == message
    assert caught.value.partial.tokens == expected[:after]
    assert caught.value.partial.finish_reason == "cancelled"
    assert isinstance(caught.value.__cause__, KeyError) == (how == "raises")
    again = session.generate(PROMPT, **OPTIONS, draft_length=draft_length)
    assert again.tokens == expected
    if after:
        assert again.stats.reused_tokens == len(PROMPT) - 1


def no_change(tokens, logits):
    return logits


@pytest.mark.parametrize("how", FAILURES)
def test_a_processor_that_fails_on_wrong_drafts_only_fails_nothing(pair, how):
    """Plain decoding never shows it such a history: so drafting must not make an error of it."""
    expected = plain_tokens()
    true, failed = PROMPT + expected, []

    def strict(tokens, logits):
        shown = tokens.tolist()
        if shown == true[: len(shown)]:
            return logits
        failed.append(shown)
        return fail_at(0, how, tokens, logits)

    tutored = grids.tutored(pair, true, right=0.6)
    out = generate(tutored, PROMPT, **OPTIONS, draft_length=6, logits_processors=[strict])
    assert out.tokens == expected
    assert failed


def test_a_round_with_processors_reads_twice_and_a_plain_step_once(pair):
    """The drafts have to be seen first; what a processor returned is judged in the round's own read."""
    for length, reads in ((0, 1), (4, 2)):
        options = {**OPTIONS, "draft_length": length, "logits_processors": [no_repeat, no_change]}
        out = generate(pair, PROMPT, **options)
        undrafted = sum(round_.drafted == 0 for round_ in out.stats.rounds)
        assert out.stats.syncs == 1 + reads * (len(out.stats.rounds) - undrafted) + undrafted


def test_processors_come_before_bias_and_penalty_and_all_before_the_filters():
    """By hand, with one row in which every other order would choose another token."""
    logits = mx.array([[4.0, 3.0, 2.0, 1.0]])

    def double(tokens, given):
        assert given.tolist() == logits.tolist()
        return given * 2

    options = Options(
        temperature=1.0, logits_processors=(double,), logit_bias={1: 10.0}, repetition_penalty=4.0, top_k=1
    )
    # doubled 8, 6, 4, 2; biased 8, 16, 4, 2; token 1 penalised to 4; top-1 is token 0
    assert Choice(options, 0).target(logits, 3, [1]).tolist() == [0]
    # without the penalty token 1 wins
    options = Options(temperature=1.0, logits_processors=(double,), logit_bias={1: 10.0}, top_k=1)
    assert Choice(options, 0).target(logits, 3, [1]).tolist() == [1]
