"""The target decides: drafting changes the time that a generation takes, and not one of its tokens."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import grids
import mlx.core as mx
import numpy as np
import pytest
import reference
from mlx.utils import tree_flatten, tree_unflatten
from tiny import target_weights, text_config, tiny_pair, tiny_specs

from dflash_mlx import Session, generate, load
from dflash_mlx.choice import PROPOSAL
from dflash_mlx.slots import Slots

SEED, SAMPLE, SAMPLE_OF_POCKET = 7, 27, 2  # a case of the pocket pair takes as long as ten others
CASES = grids.grid(tuple(grids.SHAPES))
POCKET_CASES = grids.grid((grids.POCKET,)) if grids.has_pocket() else []
SAMPLED = random.Random(SEED).sample(CASES, SAMPLE)
SAMPLED += random.Random(SEED).sample(POCKET_CASES, min(SAMPLE_OF_POCKET, len(POCKET_CASES)))


def test_the_sample_of_the_grid_says_its_size(capsys):
    with capsys.disabled():
        whole = len(CASES) + len(POCKET_CASES)
        print(f"\ngrid of rounds: {len(SAMPLED)} of {whole:,} cases, seed {SEED}; the whole under the mark slow")
    assert len(set(SAMPLED)) == len(SAMPLED) >= SAMPLE
    assert {case.kind for case in SAMPLED} == set(grids.KINDS)
    assert len({case.length for case in SAMPLED}) >= 5


@pytest.mark.parametrize("case", SAMPLED, ids=str)
def test_greedy_rounds_equal_plain_decoding(case):
    assert grids.run(case) == grids.plain(case.pair, case.kind, case.prompt)


@pytest.mark.parametrize("name", grids.SHAPES)
def test_the_grid_accepts_all_some_and_none_of_a_block(name):
    """A grid in which every draft were wrong, or none, would prove little; the rings wrap in it too."""
    case = grids.Case(name, "float32", "5 windows", "all at once", 7)
    prompt = grids.prompts(name)["5 windows"]
    done = grids.drive(grids.drafting(case), prompt, grids.schedule(7))
    seen = Counter(round_.accepted for round_ in done.rounds)
    assert len(seen) >= 3
    assert done.state.cache.offset > done.state.cache.ring
    varied = grids.drive(grids.drafting(case), prompt, grids.schedule("falling and rising"))
    assert len({round_.drafted for round_ in varied.rounds}) >= 4


@pytest.mark.parametrize("length", [3, 15])
def test_rounds_go_on_through_several_wraps_of_the_ring(length):
    """150 tokens from one: rows 0 and 47 of a ring of 48 are written by one block, at every phase."""
    prompt, count = grids.prompts("window 11")["1 token"], 150
    expected = grids.plain("window 11", "float32", "1 token", count)
    pair = grids.tutored(grids.pair("window 11"), prompt + list(expected), right=0.7)
    done = grids.drive(pair, prompt, grids.schedule(length), count)
    assert tuple(done.tokens) == expected
    assert done.state.cache.offset > 3 * done.state.cache.ring


@pytest.mark.parametrize("prompt", ["1 token", "5 windows"])
def test_plain_decoding_is_what_the_formulas_give(prompt):
    """Whole sequences in float64 without a cache. The tokens can be compared as the best one leads by far enough."""
    spec, _ = tiny_specs(**grids.SHAPES["window 11"])
    tokens = grids.prompts("window 11")[prompt]
    found = grids.plain("window 11", "float32", prompt)
    whole = tokens + list(found)
    logits, _ = reference.target_forward(text_config(spec), target_weights(spec), whole[:-1])
    rows = logits[len(tokens) - 1 :]
    best, second = np.sort(rows)[:, ::-1][:, :2].T
    assert (best - second).min() > 1e-4
    assert tuple(rows.argmax(axis=-1)) == found


def shuffled(drafter, seed):
    """The drafter with every weight's numbers in another order."""
    order = np.random.RandomState(seed)
    mixed = []
    for name, array in tree_flatten(drafter.parameters()):
        numbers = np.array(array.astype(mx.float32)).ravel()
        mixed.append((name, mx.array(order.permutation(numbers)).reshape(array.shape).astype(array.dtype)))
    other = type(drafter)(drafter.config)
    other.update(tree_unflatten(mixed))
    return other


@pytest.mark.skipif(not grids.has_pocket(), reason="the pocket pair is not in this tree")
def test_a_drafter_with_shuffled_weights_changes_the_time_and_not_one_token():
    pair = grids.pair("pocket", "bfloat16")
    mixed = grids.replace(pair, drafter=shuffled(pair.drafter, 3))
    prompt, options = "def read(path):\n    with open(path", {"max_tokens": 24, "draft_length": 7}
    trained, random_, alone = (generate(each, prompt, **options) for each in (pair, mixed, pair.without_drafter()))
    assert trained.tokens == random_.tokens == alone.tokens
    assert trained.text == random_.text == alone.text
    assert len(trained.stats.rounds) <= len(random_.stats.rounds)


@pytest.mark.parametrize(("name", "kind"), [*(("window 35", kind) for kind in grids.KINDS), ("DFlash-2", "float32")])
def test_whatever_the_drafter_is_the_tokens_are_the_targets(name, kind):
    """Another seed's drafter, one that is always right, always wrong, and one whose logits are all the same."""
    pair, other = grids.pair(name, kind), grids.pair(name, kind, seed=40)
    prompt, expected = grids.prompts(name)["window"], grids.plain(name, kind, "window")
    history = prompt + list(expected)
    flat = grids.tutored(pair, [])
    flat.drafter.draft = lambda block, context, target, rows: Slots(mx.zeros((rows, target.config.vocab_size)))
    drafters = {
        "its own": pair,
        "another's": grids.replace(pair, drafter=other.drafter),
        "right": grids.tutored(pair, history, right=1.0),
        "wrong": grids.tutored(pair, history, right=0.0),
        "flat": flat,
    }
    counts = {}
    for what, drafting in drafters.items():
        done = grids.drive(drafting, prompt, grids.schedule(7))
        assert tuple(done.tokens) == expected, what
        counts[what] = len(done.rounds)
    assert counts["right"] == 4  # 26 tokens: the prefill's own, three rounds of 8, and the last one
    assert counts["wrong"] == 25


@pytest.mark.parametrize("name", grids.SHAPES)
def test_the_automatic_draft_length_changes_no_token(name):
    prompt = grids.prompts(name)["window"]
    expected = grids.plain(name, "float32", "window", 60)
    pair = grids.tutored(grids.pair(name), prompt + list(expected), 0.8)
    out = Session(pair).generate(prompt, max_tokens=60)
    assert tuple(out.tokens) == expected
    assert len({round_.drafted for round_ in out.stats.rounds}) > 1


SAMPLING = [
    {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.02},
    {"temperature": 1.4, "top_k": 7, "repetition_penalty": 1.1, "logit_bias": {3: 2.5, 90: -4.0}},
    {"temperature": 0.0, "repetition_penalty": 1.5, "repetition_context": 5},
]


@pytest.mark.parametrize("name", ["window 11", "DFlash-2"])
@pytest.mark.parametrize(("options", "kind"), list(zip(SAMPLING, itertools.cycle(grids.KINDS), strict=False)), ids=str)
def test_seeded_rounds_equal_seeded_plain_decoding(options, kind, name):
    pair, prompt = grids.pair(name, kind), grids.prompts(name)["window + 1"]
    options = {**options, "seed": 20260729}
    plain = grids.drive(pair, prompt, grids.schedule(0), **options)
    greedy = grids.drive(pair, prompt, grids.schedule(0))
    assert plain.tokens != greedy.tokens
    tutored = grids.tutored(pair, prompt + plain.tokens, right=0.85)
    for length in (2, 15, "falling and rising"):
        done = grids.drive(tutored, prompt, grids.schedule(length), **options)
        assert done.tokens == plain.tokens, length
        if options["temperature"] == 0 or length == 15:
            assert done.rounds, "nothing was drafted"


class Listener:
    """A target that keeps the logits that scored each position."""

    def __init__(self, target):
        self._target, self.scores = target, {}
        self.config, self.embed_tokens, self.head = target.config, target.embed_tokens, target.head

    def __call__(self, tokens, parts, taps=()):
        forward, (part,) = self._target(tokens, parts, taps), parts
        last = part.cache.offset + part.rows
        for row in range(part.logits):
            self.scores[last - part.logits + row + 1] = forward.logits[row]
        return forward


def test_a_drafter_that_knows_the_distribution_is_right_in_every_round_that_samples():
    """Both draw with the same noise at the same position: one position off, and they agree only by chance."""
    pair, prompt = grids.pair("window 11"), grids.prompts("window 11")["window"]
    listener = Listener(pair.target)
    options = {"temperature": 0.9, "seed": 4, "top_k": 50}
    plain = grids.drive(grids.replace(pair, target=listener), prompt, grids.schedule(0), 40, **options)
    knowing = grids.tutored(pair, [])

    def draft(block, context, target, rows):
        first = context.offset + 1
        scores = [listener.scores.get(first + row, mx.zeros((97,))) for row in range(rows)]
        return Slots(mx.stack(scores) * PROPOSAL.c)

    knowing.drafter.draft = draft
    done = grids.drive(knowing, prompt, grids.schedule(5), 40, **options)
    assert done.tokens == plain.tokens
    accepted = sum(round_.accepted for round_ in done.rounds)
    assert accepted >= 0.9 * sum(round_.drafted for round_ in done.rounds)


def test_another_seed_is_another_text_and_the_same_seed_the_same():
    pair, prompt = grids.pair("window 11"), grids.prompts("window 11")["window"]
    texts = [Session(pair).generate(prompt, temperature=1.0, seed=seed, max_tokens=20).tokens for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_the_first_output_equals_the_hundredth(tmp_path):
    """Nothing is computed with weights or caches that are not there yet."""
    sizes = grids.SHAPES["window 11"]
    pair = load(*map(str, tiny_pair(tmp_path, **sizes)))
    first = Session(pair).generate([5, 9, 2], max_tokens=4, draft_length=2)
    session, shared = Session(pair), Session(pair)
    for number in range(2, 101):
        again = shared if number % 2 else session
        if number % 3 == 0:
            again.reset()
        out = again.generate([5, 9, 2], max_tokens=4, draft_length=2)
        assert out.tokens == first.tokens, number
    assert out.stats.rounds[0].proposal == first.stats.rounds[0].proposal


def test_a_block_has_the_anchor_and_as_many_masks_as_tokens_are_drafted(tmp_path, monkeypatch):
    target, drafter = tiny_pair(tmp_path)
    loaded, blocks = load(target, drafter), []
    drafted = type(loaded.drafter).draft

    def watched(self, block, context, target, rows):
        blocks.append((block.tolist(), rows))
        return drafted(self, block, context, target, rows)

    monkeypatch.setattr(type(loaded.drafter), "draft", watched)
    mask = loaded.drafter.config.mask_token_id
    for length in (1, 5, loaded.block_size - 1):
        blocks.clear()
        rounds = [r for r in generate(loaded, [1, 2, 3], max_tokens=24, draft_length=length).stats.rounds if r.drafted]
        assert [len(block) for block, _ in blocks] == [r.drafted + 1 for r in rounds]
        assert all(set(block[1:]) == {mask} and rows == len(block) - 1 for block, rows in blocks)
