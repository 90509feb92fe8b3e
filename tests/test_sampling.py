"""Sampling equals plain sampling, token for token: a token depends on (seed, choice index, position, history) alone."""

from __future__ import annotations

import random

import grids
import mlx.core as mx
import numpy as np
import pytest
import sampled

from dflash_mlx import InputError, Session, generate, stream_generate
from dflash_mlx.choice import Choice, ProposalRule
from dflash_mlx.options import Options
from dflash_mlx.slots import Slots

SEED, SAMPLE = 11, 20
CASES = sampled.grid()
SAMPLED = random.Random(SEED).sample(CASES, SAMPLE)
PROMPT = [3, 14, 15, 9, 2, 6]
OPTIONS = {"temperature": 0.9, "top_p": 0.97, "max_tokens": 20}


@pytest.fixture(scope="module")
def pair():
    return sampled.small_pair()


def test_the_sample_of_the_grid_says_its_size(capsys):
    with capsys.disabled():
        print(f"\ngrid of sampling: {SAMPLE} of {len(CASES):,} cases, seed {SEED}; the whole under the mark slow")
    assert {case.kind for case in SAMPLED} == set(grids.KINDS)
    assert {case.temperature for case in SAMPLED} == set(sampled.TEMPERATURES)
    assert {case.filters for case in SAMPLED} == set(sampled.FILTERS)
    assert {case.penalty for case in SAMPLED} == set(sampled.PENALTIES)


@pytest.mark.parametrize("case", SAMPLED, ids=str)
def test_seeded_rounds_equal_seeded_plain_decoding(case):
    done = sampled.run(case)
    assert done.drafted == done.plain
    assert 0 < done.accepted <= done.proposed


def plain_tokens(pair, prompt=PROMPT, **options):
    return generate(pair.without_drafter(), prompt, **{**OPTIONS, **options}).tokens


@pytest.mark.parametrize("draft_length", [0, 1, 5, 15, "auto"])
@pytest.mark.parametrize("temperature", [0.3, 1.5])
def test_any_draft_length_gives_the_tokens_of_plain_decoding(pair, draft_length, temperature):
    """The pair's own drafter, with the proposal rule as shipped."""
    expected = plain_tokens(pair, seed=5, temperature=temperature)
    out = generate(pair, PROMPT, **{**OPTIONS, "temperature": temperature}, seed=5, draft_length=draft_length)
    assert out.tokens == expected


@pytest.mark.parametrize("right", [0.0, 0.5, 1.0])
def test_any_drafter_gives_the_tokens_of_plain_decoding(pair, right):
    expected = plain_tokens(pair, seed=6)
    tutored = grids.tutored(pair, PROMPT + expected, right=right)
    out = generate(tutored, PROMPT, **OPTIONS, seed=6, draft_length=7)
    assert out.tokens == expected
    assert out.stats.acceptance_rate == {0.0: 0.0, 1.0: 1.0}.get(right, pytest.approx(0.3, abs=0.25))


@pytest.mark.parametrize("step", [1, 2, 13, 2048])
def test_any_prefill_step_gives_the_same_tokens(pair, step):
    prompt = grids.prompts("window 11")["5 windows"]
    expected = plain_tokens(pair, prompt, seed=8, repetition_penalty=1.2)
    out = generate(pair, prompt, **OPTIONS, seed=8, repetition_penalty=1.2, draft_length=4, prefill_step_size=step)
    assert out.tokens == expected


def test_a_reused_session_gives_the_tokens_of_a_fresh_one(pair):
    """Turn after turn on the same caches, also back to an earlier place and with another draft length."""
    session, history = Session(pair), list(PROMPT)
    for turn, length in enumerate((3, 0, 15, 1)):
        out = session.generate(history, **OPTIONS, seed=turn, draft_length=length)
        assert out.tokens == plain_tokens(pair, history, seed=turn), turn
        assert bool(out.stats.reused_tokens) == (turn > 0)
        history = history + out.tokens[: 12 - turn] + [40 + turn]
    again = session.generate(PROMPT, **OPTIONS, seed=0, draft_length=6)
    assert again.tokens == plain_tokens(pair, seed=0)


def test_streams_that_run_at_once_do_not_touch_each_other(pair):
    """Two answers in turns, with other options, while the process draws and seeds random numbers of its own."""
    asked = [{**OPTIONS, "seed": 21}, {**OPTIONS, "seed": 22, "temperature": 1.3, "top_k": 9, "top_p": 1.0}]
    expected = [plain_tokens(pair, **options) for options in asked]
    streams = [stream_generate(pair, PROMPT, draft_length=3 + n, **options) for n, options in enumerate(asked)]
    found: list[list[int]] = [[], []]
    while any(len(tokens) < 20 for tokens in found):
        for stream, tokens in zip(streams, found, strict=True):
            chunk = next(stream, None)
            tokens += chunk.tokens if chunk else []
            mx.random.seed(len(tokens))
            mx.eval(mx.random.normal((3,)))
            random.seed(1)
            np.random.seed(1)
    assert found == expected


def test_the_seed_alone_decides_and_every_seed_is_another_text(pair):
    texts = [tuple(plain_tokens(pair, seed=seed)) for seed in (0, 1, 2, 2**64 - 1, 0)]
    assert texts[0] == texts[4]
    assert len(set(texts)) == 4


def test_a_seed_that_was_not_given_is_drawn_and_reported(pair):
    """Twice the same seed would be a chance of 1 in 2^63; the process's own random numbers do not move or fix it."""
    outs = []
    for _ in range(2):
        random.seed(0)
        mx.random.seed(0)
        state = random.getstate()
        outs.append(generate(pair, PROMPT, **OPTIONS, draft_length=5))
        assert random.getstate() == state
    first, second = outs
    assert first.stats.seed != second.stats.seed
    assert first.tokens != second.tokens
    for out in outs:
        assert out.to_dict()["stats"]["seed"] == out.stats.seed
        assert plain_tokens(pair, seed=out.stats.seed) == out.tokens
    assert generate(pair, PROMPT, **OPTIONS, seed=77).stats.seed == 77


def test_further_answers_to_a_request_have_noise_of_their_own(pair):
    """Index 0 is the only answer's; each index is as reproducible as the first."""
    texts = []
    for index in range(3):
        out = Session(pair).generate(PROMPT, **OPTIONS, seed=30, draft_length=4, choice_index=index)
        assert out.tokens == plain_tokens(pair, seed=30, choice_index=index)
        texts.append(tuple(out.tokens))
    assert texts[0] == tuple(plain_tokens(pair, seed=30))
    assert len(set(texts)) == 3


@pytest.mark.parametrize("index", [-1, 1.5, None])
def test_a_choice_index_must_be_a_count(pair, index):
    with pytest.raises(InputError, match=r"choice_index must be an integer of at least 0 but got"):
        Session(pair).generate(PROMPT, choice_index=index)


def test_a_temperature_tending_to_0_tends_to_greedy(pair):
    greedy = generate(pair, PROMPT, max_tokens=20).tokens
    for temperature in (1e-300, 1e-20, 1e-6):
        assert generate(pair, PROMPT, max_tokens=20, temperature=temperature, seed=1, draft_length=3).tokens == greedy


def test_sampling_needs_no_second_read_by_the_host(pair):
    """One for the prefill and one for each round, whatever is asked for."""
    options = {"top_p": 0.9, "min_p": 0.01, "top_k": 40, "repetition_penalty": 1.1, "logit_bias": {4: 1.0}}
    out = generate(pair, PROMPT, max_tokens=20, temperature=0.8, seed=3, draft_length=4, **options)
    assert out.stats.syncs == 1 + len(out.stats.rounds)


def test_a_bias_that_bans_every_token_is_an_error(pair):
    everything = dict.fromkeys(range(97), float("-inf"))
    with pytest.raises(InputError, match=r"logit_bias must be above -inf for some token but got -inf for all"):
        generate(pair, PROMPT, logit_bias=everything)
    del everything[41]
    assert generate(pair, PROMPT, temperature=1.0, max_tokens=3, logit_bias=everything).tokens == [41] * 3


ONE, TWO = (np.random.RandomState(n).standard_normal((600, 40)).astype(np.float32) * 2 for n in (1, 2))


def agreement(rule, draft, temperature=1.0, multiplier=1.0):
    """Share of 600 positions at which proposal and choice are the same token."""
    choice = Choice(Options(temperature=temperature), 4, rule=rule)
    proposed = np.array(choice.proposal(Slots(mx.array(draft), multiplier), 0, [0]))
    chosen = np.array(Choice(Options(temperature=temperature), 4).target(mx.array(ONE), 0, [0]))
    return float((proposed == chosen).mean())


def test_a_drafter_that_knows_the_target_proposes_its_very_token():
    """The noise is shared, and so are scale and temperature."""
    same = ProposalRule(c=1.0, multiplied=True)
    assert agreement(same, ONE) == 1
    assert agreement(same, ONE / 0.25, 0.7, 0.25) == 1
    assert agreement(ProposalRule(c=1.0, multiplied=False), ONE, 1.0, 0.25) == 1
    assert agreement(ProposalRule(c=0.5, multiplied=True), ONE * 2, 1.0, 0.25) == 1
    assert agreement(ProposalRule(c=0.0), ONE) == float((ONE.argmax(-1) == np.array(target_tokens())).mean()) < 0.7


def target_tokens():
    return Choice(Options(temperature=1.0), 4).target(mx.array(ONE), 0, [0])


def test_sharing_the_noise_agrees_more_often_than_drawing_apart():
    """Half of what they know in common. Two independent draws agree with probability sum P Q."""
    draft = (ONE + TWO) / np.float32(2**0.5)
    p, q = (np.exp(x - np.logaddexp.reduce(x, axis=-1, keepdims=True)) for x in (ONE, draft))
    apart, best = (p * q).sum(-1).mean(), np.minimum(p, q).sum(-1).mean()
    shared = agreement(ProposalRule(c=1.0, multiplied=False), draft)
    assert 1.8 * apart < shared < best + 0.05
    assert shared > 0.85 * best
