"""The DFlash-2 drafter computes what its formulas say, and its selector walks as if it looked at one slot at a time."""

from __future__ import annotations

import agreement
import grids
import mlx.core as mx
import numpy as np
import pytest
import reference
from tiny import Quantisation, drafter_config, drafter_weights, target_weights, tiny_models, tiny_specs

from dflash_mlx import generate, load
from dflash_mlx.choice import Choice
from dflash_mlx.noise import gumbel, position_keys, uniform
from dflash_mlx.options import Options
from dflash_mlx.slots import Slots, walk

SIZES = {
    "vocab": 67, "hidden": 48, "intermediate": 80, "heads": (6, 3), "head_dim": 8, "window": 9, "generation": 2,
    "drafter_heads": (4, 2), "drafter_group": 12, "block": 13, "taps": (1, 2),
}  # fmt: skip


def run(folder, rows, quantisation=None, **sizes):
    """A pair's drafted blocks, and what they are made from: specs, weights, tokens and context features."""
    sizes = SIZES | sizes
    target, drafter = tiny_models(folder, **sizes, drafter_quantisation=quantisation)
    spec, draft_spec = tiny_specs(**sizes)
    width, count = spec.hidden * len(draft_spec.taps), sum(rows) + 1
    tokens = np.random.RandomState(4).randint(0, spec.vocab, count)
    features = np.random.RandomState(5).standard_normal((count, width)).astype(np.float32)
    found = agreement.run_blocks(target, drafter, tokens, features, rows)
    return found, spec, draft_spec, tokens, features


def expected(spec, draft_spec, tokens, features, rows, weights=None):
    """The same blocks by brute force."""
    whole, draft = target_weights(spec), weights or drafter_weights(draft_spec)
    table, head = whole["model.embed_tokens.weight"], whole["lm_head.weight"]
    masks = [draft_spec.mask_token] * (draft_spec.block - 1)
    config = drafter_config(draft_spec)
    blocks = [
        reference.drafter_forward(config, draft, table, head, features[:end], [int(tokens[end]), *masks])
        for end in np.cumsum(rows)
    ]
    return np.stack(blocks)


@pytest.mark.parametrize("causal", [False, True], ids=["whole block", "causal"])
@pytest.mark.parametrize("window", [1, 3, 11, 50])
def test_blocks_are_those_of_the_formulas_for_any_window_and_any_number_of_new_rows(window, causal, tmp_path):
    """Rounds that feed 1, 2, 3, 8 and more rows; the small windows' rings wrap. A window excludes its far edge."""
    rows = [1, 1, 2, window, 8, 13, 1, 3, 30, 1, 8, 3, 16, 1]
    found, *made = run(tmp_path, rows, drafter_window=window, drafter_causal=causal)
    agreement.agree(found, expected(*made, rows))


@pytest.mark.parametrize(
    "change",
    [
        {"drafter_kernel": 1}, {"drafter_kernel": 3}, {"drafter_group": 4}, {"drafter_group": 48},
        {"drafter_causal": None}, {"drafter_multiplier": 0.2}, {"drafter_softcap": 3.0}, {"drafter_softcap": None},
        {"drafter_embedding_scale": 2.5}, {"drafter_window": 8},
    ],
    ids=str,
)  # fmt: skip
def test_every_field_of_the_config_reaches_the_numbers(change, tmp_path):
    """Each alone changes the logits, as the formula says; without `is_causal` a sliding layer is causal."""
    rows = [14, 1, 3]
    found, *made = run(tmp_path, rows, **change)
    agreement.agree(found, expected(*made, rows))
    unchanged = expected(*tiny_specs(**SIZES), *made[2:], rows)
    assert agreement.distance(found, unchanged) > 1e-3 * np.abs(unchanged).max()


@pytest.mark.parametrize("codebooks", [True, False], ids=["codebooks quantised", "codebooks in full"])
def test_a_quantised_drafter_computes_with_its_dequantised_weights(codebooks, tmp_path):
    """Projections of the convolutions too; the codebooks as embeddings, or as they are published."""
    names = [f"candidate_selector.{name}_codebook" for name in ("predecessor", "successor")]
    form = Quantisation(4, 32, overrides={} if codebooks else dict.fromkeys(names, False))
    sizes = {"hidden": 64, "drafter_group": 16, "drafter_rank": 32, "drafter_heads": (4, 2)}
    found, spec, draft_spec, tokens, features = run(tmp_path, [9, 3], form, **sizes)
    weights = drafter_weights(draft_spec)
    for name, array in weights.items():
        if array.ndim == 2 and (codebooks or name not in names):
            weights[name] = np.array(mx.dequantize(*mx.quantize(mx.array(array), 32, 4), 32, 4))
    agreement.agree(found, expected(spec, draft_spec, tokens, features, [9, 3], weights))
    slots, hidden, anchor = drafted(tmp_path / "again", form, **sizes)
    check_walk(slots, reference_scores(draft_spec, weights, hidden, slots, anchor), anchor)


def drafted(folder, quantisation=None, **sizes):
    """One block's slots, its last hidden rows [M, E], and its anchor."""
    target, drafter = tiny_models(folder, **SIZES | sizes, drafter_quantisation=quantisation)
    context = agreement.DrafterContext(drafter.config, mx.float32)
    width = target.config.hidden_size
    features = np.random.RandomState(6).standard_normal((9, 2 * width)).astype(np.float32)
    drafter.extend(context, mx.split(mx.array(features), 2, axis=-1))
    context.advance(9)
    block = mx.array([5] + [drafter.config.mask_token_id] * 12, mx.uint32)
    hidden = drafter.hidden(drafter.embedded(target.embed_tokens(block)), context)
    return drafter.draft(block, context, target, 12), np.array(hidden)[1:], 5


def reference_scores(spec, weights, hidden, slots, anchor):
    """A function (slot, token before, candidates) -> their scores, in float64 and one product at a time."""
    w = reference.in_double(weights)
    queries, logits = hidden @ w["candidate_selector.hidden_projection.weight"].T, np.array(slots.logits, np.float64)

    def scores(slot, before, ids):
        code = w["candidate_selector.predecessor_codebook"][before] * queries[slot]
        return [logits[slot, c] + w["candidate_selector.successor_codebook"][c] @ code for c in ids]

    return scores


def check_walk(slots, scores, anchor):
    """Greedy: slot by slot, of the K likeliest candidates the one whose score after the one before is best."""
    found = Choice(Options(), 0).proposal(slots, 9, [anchor]).tolist()
    before, path, plain = anchor, [], np.array(slots.logits).argmax(-1).tolist()
    for slot, row in enumerate(np.array(slots.logits)):
        ids = np.argsort(-row)[: slots.candidates]
        before = int(ids[np.argmax(scores(slot, before, ids))])
        path.append(before)
    assert found == path
    assert found != plain, "the selector never had a say"


@pytest.mark.parametrize("candidates", [1, 2, 7, 67])
def test_the_selector_takes_slot_by_slot_the_best_candidate_after_the_one_before(candidates, tmp_path):
    slots, hidden, anchor = drafted(tmp_path, drafter_candidates=candidates)
    assert slots.candidates == candidates
    weights = drafter_weights(tiny_specs(**SIZES)[1])
    scores = reference_scores(None, weights, hidden, slots, anchor)
    if candidates == 1:
        found = Choice(Options(), 0).proposal(slots, 9, [anchor])
        assert found.tolist() == np.array(slots.logits).argmax(-1).tolist()
        return
    check_walk(slots, scores, anchor)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 15, 16])
def test_a_walk_is_the_argmax_step_by_step(rows):
    """Against a loop, for every number of slots; and no path of three slots that is greedy at each is another."""
    draw = np.random.RandomState(rows)
    for count in (1, 2, 5, 16):
        scores = draw.standard_normal((rows, count)).astype(np.float32)
        transitions = draw.standard_normal((rows, count, count)).astype(np.float32)
        transitions[0] = transitions[0, 0]
        path, at = [], 0
        for row in range(rows):
            at = int(np.argmax(scores[row] + transitions[row, at]))
            path.append(at)
        assert walk(mx.array(scores), mx.array(transitions)).tolist() == path


def test_of_all_paths_the_walk_takes_the_only_one_that_is_best_at_every_step():
    """Four slots with three candidates each, all 81 paths written out."""
    draw = np.random.RandomState(2)
    for _ in range(20):
        scores, transitions = draw.standard_normal((4, 3)), draw.standard_normal((4, 3, 3))
        transitions[0] = transitions[0, 0]
        greedy = []
        for path in np.ndindex(3, 3, 3, 3):
            before = (0, *path[:-1])
            totals = [scores[i] + transitions[i, before[i]] for i in range(4)]
            if all(totals[i][path[i]] == max(totals[i]) for i in range(4)):
                greedy.append(list(path))
        assert [walk(mx.array(scores), mx.array(transitions)).tolist()] == greedy


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_sampled_proposals_walk_with_the_positions_noise(temperature, tmp_path):
    """A candidate's score is (logit + transition) / temperature + the position's noise, as a loop over slots says."""
    slots, hidden, anchor = drafted(tmp_path)
    scores = reference_scores(None, drafter_weights(tiny_specs(**SIZES)[1]), hidden, slots, anchor)
    different = 0
    for seed in range(10):
        found = Choice(Options(temperature=temperature), seed).proposal(slots, 9, [anchor]).tolist()
        noise = np.array(gumbel(uniform(position_keys(seed, 0, 9, 12), 67)), np.float64)
        before, path = anchor, []
        for slot, row in enumerate(np.array(slots.logits)):
            ids = np.argsort(-(row / temperature + noise[slot]))[: slots.candidates]
            before = int(ids[np.argmax(np.array(scores(slot, before, ids)) / temperature + noise[slot, ids])])
            path.append(before)
        assert found == path
        different += (
            found != Choice(Options(temperature=temperature), seed).proposal(Slots(slots.logits), 9, [anchor]).tolist()
        )
    assert different > 5, "the selector hardly had a say"


@pytest.mark.parametrize(
    "options",
    [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.4}, {"logit_bias": dict.fromkeys(range(64), -np.inf)}],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_proposals_keep_to_what_the_filters_and_biases_leave(options, temperature, tmp_path):
    slots, _, anchor = drafted(tmp_path)
    for seed in range(5):
        choice = Choice(Options(temperature=temperature, **options), seed)
        found = choice.proposal(slots, 9, [anchor]).tolist()
        if "logit_bias" in options:
            assert all(token >= 64 for token in found)
        elif temperature and "top_k" in options:
            likeliest = np.argsort(-np.array(slots.logits))[:, :3]
            assert all(token in row for token, row in zip(found, likeliest, strict=True))


def test_penalties_reach_the_selectors_candidates(tmp_path):
    slots, _, anchor = drafted(tmp_path)
    free = Choice(Options(), 0).proposal(slots, 9, [anchor]).tolist()
    found = Choice(Options(repetition_penalty=1e6), 0).proposal(slots, 9, [free[0], anchor]).tolist()
    assert free[0] not in found


@pytest.mark.skipif(not grids.has_pocket(), reason="the pocket pair is not in this tree")
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "top_p": 0.95, "top_k": 64, "seed": 5}], ids=str)
def test_the_pocket_pairs_second_drafter_changes_no_token_and_is_often_right(options):
    pair = load("pocket", draft="dflash2")
    assert pair.drafter_kind == "DFlash-2"
    prompt = "def read_lines(path):\n    with open(path) as file:\n"
    plain = generate(pair.without_drafter(), prompt, max_tokens=40, **options)
    drafted = generate(pair, prompt, max_tokens=40, draft_length=7, **options)
    assert drafted.tokens == plain.tokens
    assert drafted.stats.mean_accepted > 0.5
