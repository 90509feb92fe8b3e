"""The filters keep what mlx-lm's own functions keep, and cost no sort where a partition does."""

from __future__ import annotations

import itertools
import math

import mlx.core as mx
import mlx_lm.sample_utils as mlx_lm
import numpy as np
import pytest

from dflash_mlx.choice import Choice
from dflash_mlx.errors import InputError
from dflash_mlx.filters import keep
from dflash_mlx.options import Options
from dflash_mlx.slots import Slots

VOCAB, ROWS = 211, 16


def rows_of(kind, seed=0):
    """Logits [16, 211]: peaked and flat ones, with many ties, with banned tokens, nearly one-hot."""
    random = np.random.RandomState(seed)
    spread = np.linspace(0.1, 8, ROWS)[:, None]
    logits = random.standard_normal((ROWS, VOCAB)) * spread
    if kind == "tied":
        logits = np.round(logits * 2) / 2
    elif kind == "all equal":
        logits[:] = 3.25
    elif kind == "banned":
        logits[random.random_sample(logits.shape) < 0.3] = -np.inf
    elif kind == "one":
        logits[:, 7] += 60
    return mx.array(logits.astype(np.float32))


KINDS = ("random", "tied", "all equal", "banned", "one")
GRID = [
    Options(temperature=1.0, top_p=top_p, min_p=min_p, top_k=top_k)
    for top_p, min_p, top_k in itertools.product((0.0, 1e-9, 0.3, 0.9, 0.999, 1.0), (0.0, 0.05, 1.0), (0, 1, 17, 210))
]


@pytest.fixture(scope="module", autouse=True)
def _without_compilation():
    """mlx-lm's filters are compiled functions; on the CPU that would start a C++ compiler for each."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def kept_here(logits, options):
    """Row by row the ids that stay."""
    kept = keep(logits - mx.max(logits, axis=-1, keepdims=True), options)
    ids = np.broadcast_to(np.arange(logits.shape[-1]), logits.shape) if kept.ids is None else np.array(kept.ids)
    stays = np.array(kept.below) > -np.inf
    return [set(row[mask].tolist()) for row, mask in zip(ids, stays, strict=True)]


def kept_by_mlx_lm(logits, options):
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    if 0 < options.top_p < 1:
        logprobs = mlx_lm.apply_top_p(logprobs, options.top_p)
    if options.min_p != 0:
        logprobs = mlx_lm.apply_min_p(logprobs, options.min_p)
    if options.top_k > 0:
        logprobs = mlx_lm.apply_top_k(logprobs, options.top_k)
    return [set(np.flatnonzero(row > -np.inf).tolist()) for row in np.array(logprobs)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_kept_tokens_are_those_of_mlx_lm(kind):
    """72 settings on 16 rows. Where equals meet top-k's edge any of them may stay: then their logits are compared."""
    logits = rows_of(kind)
    values = np.array(logits)
    for options in GRID:
        pairs = zip(kept_here(logits, options), kept_by_mlx_lm(logits, options), strict=True)
        for row, (mine, theirs) in enumerate(pairs):
            if kind in ("tied", "all equal") and options.top_k:
                assert sorted(values[row, list(mine)]) == sorted(values[row, list(theirs)]), (options, row)
            else:
                assert mine == theirs, (options, row)


@pytest.mark.parametrize("vocab", [2048, 2049, 5003, 4096])
@pytest.mark.parametrize("top_k", [1, 40, 512, 513, 2047])
def test_a_row_in_pieces_keeps_the_same_tokens(vocab, top_k):
    """Rows longer than a piece, that are whole pieces or not; with ties, and with fewer possible tokens than K."""
    random = np.random.RandomState(vocab + top_k)
    logits = random.standard_normal((5, vocab)).astype(np.float32) * 3
    logits[1] = np.round(logits[1])
    logits[2, random.permutation(vocab)[7:]] = -np.inf
    logits[3, :-3] = -np.inf
    options = Options(temperature=1.0, top_k=top_k, top_p=0.99)
    mine, theirs = kept_here(mx.array(logits), options), kept_by_mlx_lm(mx.array(logits), options)
    assert sorted(logits[1, list(mine[1])]) == sorted(logits[1, list(theirs[1])])
    for row in (0, 2, 3, 4):
        mass = mass_above(logits[row])
        for token in mine[row] ^ theirs[row]:  # a sum of thousands in float32 is right to a few units of 1e-6
            assert mass[token] == pytest.approx(0.99, abs=1e-5)


def mass_above(logits):
    """Of each token, in float64."""
    shares = np.exp(logits.astype(np.float64) - logits.max())
    shares /= shares.sum()
    order = np.argsort(-shares)
    found = np.empty(len(shares))
    found[order] = np.concatenate([[0], np.cumsum(shares[order])[:-1]])
    return found


def test_the_filters_leave_the_likelihoods_of_what_they_keep():
    logits = rows_of("random")
    below = np.array(logits - mx.max(logits, axis=-1, keepdims=True))
    kept = keep(mx.array(below), Options(temperature=1.0, top_p=0.9, top_k=40))
    found, ids = np.array(kept.below), np.array(kept.ids)
    stays = found > -np.inf
    assert stays.any()
    assert np.array_equal(found[stays], np.take_along_axis(below, ids, axis=-1)[stays])


def chosen(logits, **options):
    """The 16 rows' tokens at positions 5 to 20, with seed 3."""
    return np.array(Choice(Options(**{"temperature": 1.0, **options}), 3).target(logits, 5, [1, 2, 3])).tolist()


EQUALS = {
    "top_p 0 keeps all": ({"top_p": 0.0}, {}),
    "top_p 1 keeps all": ({"top_p": 1.0}, {}),
    "top_k 0 keeps all": ({"top_k": 0}, {}),
    "top_k of the vocabulary keeps all": ({"top_k": VOCAB}, {}),
    "top_k beyond the vocabulary keeps all": ({"top_k": 10**9}, {}),
    "min_p 0 keeps all": ({"min_p": 0.0}, {}),
    "a min_p below all tokens keeps all": ({"min_p": 1e-300}, {}),
    "top_k 1 is greedy": ({"top_k": 1}, {"temperature": 0.0}),
    "min_p 1 without ties is greedy": ({"min_p": 1.0}, {"temperature": 0.0}),
    "the smallest top_p is greedy": ({"top_p": 5e-324}, {"temperature": 0.0}),
    "the smallest temperature is greedy": ({"temperature": 5e-324}, {"temperature": 0.0}),
    "a small temperature is greedy": ({"temperature": 1e-9}, {"temperature": 0.0}),
    "the smallest temperature with filters": ({"temperature": 5e-324, "top_p": 0.9, "top_k": 9}, {"temperature": 0.0}),
}


@pytest.mark.parametrize(("one", "other"), EQUALS.values(), ids=EQUALS)
def test_an_edge_value_means_what_it_says(one, other):
    logits = rows_of("random")
    assert chosen(logits, **one) == chosen(logits, **other)


def test_top_p_drops_what_begins_exactly_at_its_mass():
    """Of shares 1/2, 1/4, 1/4 the first alone has the mass 1/2; a little more needs another, and takes both equals."""
    logits = mx.array([[0.0, -math.inf, -math.log(2), -math.log(2)]])
    for top_p, kept in ((0.5, {0}), (0.500001, {0, 2, 3}), (0.75, {0, 2, 3}), (0.4, {0})):
        assert kept_here(logits, Options(temperature=1.0, top_p=top_p)) == [kept]


def test_min_p_1_keeps_all_of_the_most_likely():
    logits = mx.array([[5.0, 1.0, 5.0, 5.0, 4.999]] * 4000)
    assert set(np.unique(Choice(Options(temperature=1.0, min_p=1.0), 0).target(logits, 0, [0]))) == {0, 2, 3}


def test_equals_share_even_as_the_temperature_tends_to_0():
    """The noise decides among equals at any temperature; at 0 itself the first one wins, as argmax has it."""
    logits = mx.array([[2.0, 7.0, 7.0]] * 4000)
    tokens = np.array(Choice(Options(temperature=1e-30), 0).target(logits, 0, [0]))
    assert set(np.unique(tokens)) == {1, 2}
    assert 1800 < (tokens == 1).sum() < 2200
    assert set(np.array(Choice(Options(), 0).target(logits, 0, [0])).tolist()) == {1}


def test_a_temperature_without_bounds_draws_evenly_from_what_the_filters_keep():
    logits = mx.broadcast_to(mx.array([9.0, 8.0, 7.0, -50.0, -60.0]), (6000, 5))
    counts = np.bincount(Choice(Options(temperature=1e308, min_p=0.01), 0).target(logits, 0, [0]), minlength=5)
    assert counts[3:].tolist() == [0, 0]
    assert counts[:3].min() > 1800


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.5}, {"top_k": 6, "top_p": 0.99}])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1e308])
def test_a_banned_token_never_comes(options, temperature):
    """Also where it was the most likely by far, and where fewer tokens are left than top-k asks for."""
    logits = mx.broadcast_to(mx.array([90.0, 3.0, 2.0, 80.0, 1.0, 70.0, 60.0]), (300, 7))
    banned = dict.fromkeys((0, 3, 5, 6), -math.inf)
    asked = Options(temperature=temperature, logit_bias=banned, **options)
    assert set(np.unique(Choice(asked, 1).target(logits, 0, [0]))) <= {1, 2, 4}


BAD = {
    "temperature": ([-0.1, math.inf, math.nan, "warm", True, None], "a number of at least 0"),
    "top_p": ([-0.01, 1.01, math.nan, None], "a number between 0 and 1"),
    "min_p": ([-0.01, 1.01, "0.1"], "a number between 0 and 1"),
    "top_k": ([-1, 2.0, True, None], "an integer of at least 0"),
    "repetition_penalty": ([0, -1, 1e7, math.inf], "a number between 1e-6 and 1e6"),
    "repetition_context": ([0, -4, 1.5], "an integer of at least 1"),
    "logit_bias": (
        [{1: math.nan}, {1: math.inf}, {1: 1e300}, {"1": 2.0}, {1: None}, [1, 2], 0],
        "a mapping of token ids to numbers between -1e30 and 1e30, or -inf",
    ),
    "logits_processors": ([(3,), len, "ab"], "a sequence of functions"),
    "seed": ([-1, 2**64, 1.0, True, "7"], "None or an integer between 0 and 2**64 - 1"),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, (values, _) in BAD.items() for value in values])
def test_a_bad_value_is_an_error_that_names_the_range(name, value):
    with pytest.raises(InputError) as caught:
        Options(**{name: value})
    assert str(caught.value).startswith(f"[generate] {name} must be {BAD[name][1]} but got {value!r}. ")


def primitives(options, rows, vocab=VOCAB):
    """Names and output shapes of the operations of one round's proposal and choice."""
    found = []

    def note(item):
        if item["type"] == "primitive":
            found.append((item["name"], item["outputs"][0][1]))

    def sample(draft, logits):
        choice = Choice(options, 1)
        proposal = choice.proposal(Slots(draft, 0.5), 9, [1, 2, 3])
        return proposal, choice.target(logits, 9, [1, 2, 3], proposal)

    mx.export_function(note, sample, mx.zeros((rows - 1, vocab)), mx.zeros((rows, vocab)))
    return found


ALL = {"top_p": 0.9, "min_p": 0.02, "top_k": 20, "repetition_penalty": 1.2, "logit_bias": {3: 1.0}}


@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 20}, {"min_p": 0.1}, {"top_k": 20, "min_p": 0.1}, {"top_k": 20, "top_p": 0.9}, ALL],
    ids=lambda options: " ".join(options) or "none",
)
def test_no_row_of_the_vocabulary_is_sorted_where_a_partition_does(options):
    sorts = [shape for name, shape in primitives(Options(temperature=0.7, **options), 6) if "Sort" in name]
    assert all(shape[-1] == 20 for shape in sorts)
    assert bool(sorts) == ("top_p" in options)


def test_a_large_vocabulary_is_partitioned_in_pieces():
    """A GPU sorts 2,048 numbers in one launch; of a longer row its partition is a sort in many passes."""
    found = primitives(Options(temperature=0.7, top_k=40, top_p=0.9), 6, 202_048)
    shapes = [shape for name, shape in found if "Partition" in name or "Sort" in name]
    assert shapes
    assert max(shape[-1] for shape in shapes) <= 2048


def test_top_p_alone_sorts_once_and_only_values():
    names = [name for name, _ in primitives(Options(temperature=0.7, top_p=0.9), 6)]
    assert names.count("Sort") == 2  # the drafter's rows and the target's
    assert "ArgSort" not in names


def test_the_graph_has_the_same_operations_for_three_rows_and_for_sixteen():
    """No loop over rows. A greedy round needs no noise at all."""
    few, many = ([name for name, _ in primitives(Options(temperature=0.7, **ALL), rows)] for rows in (3, 16))
    assert few == many
    assert "RandomBits" not in [name for name, _ in primitives(Options(), 16)]


def test_a_round_draws_its_noise_once():
    """Target and drafter share it."""
    drawn = [shape for name, shape in primitives(Options(temperature=0.7), 16) if name == "RandomBits"]
    assert drawn == [(16, VOCAB)]
