"""A pair whose every number is known: the accepted counts are exactly what theory says, round for round."""

from __future__ import annotations

import known
import pytest

from dflash_mlx import Session, generate

PROMPT = known.chain(known.permutation(), 5, 20)  # so many that every head of the drafter has its row
COUNT = 34


def found_rounds(out):
    return [{"drafted": r.drafted, "accepted": r.accepted, "committed": r.committed} for r in out.stats.rounds]


def check(pair, depth, length, count=COUNT, prompt=PROMPT):
    """Tokens, rounds and means against theory."""
    tokens, rounds = known.expected_rounds(known.permutation(), prompt[-1], count, length, depth)
    out = Session(pair).generate(prompt, max_tokens=count, draft_length=length)
    assert out.tokens == tokens
    assert found_rounds(out) == rounds
    drafted = [each for each in rounds if each["drafted"]]
    stats = out.stats
    assert stats.generated_tokens == count == 1 + sum(each["committed"] for each in rounds)
    if drafted:
        assert stats.mean_accepted == pytest.approx(sum(each["accepted"] for each in drafted) / len(drafted))
        assert stats.mean_length == pytest.approx(sum(each["committed"] for each in drafted) / len(drafted))
        total = sum(each["drafted"] for each in drafted)
        assert stats.acceptance_rate == pytest.approx(sum(each["accepted"] for each in drafted) / total)
    else:
        assert (stats.mean_accepted, stats.mean_length, stats.acceptance_rate) == (0, 0, 0)
    return out


@pytest.mark.parametrize("right", [0, 1, 2, 5, 14, 15])
def test_a_drafter_with_so_many_right_slots_has_so_many_accepted(right, tmp_path):
    pair = known.known_pair(tmp_path, lambda anchor: right)
    for length in (2, 7, 15):
        check(pair, lambda anchor: right, length)


def test_a_drafter_that_is_never_right_costs_a_round_for_each_token(tmp_path):
    out = check(known.known_pair(tmp_path, lambda anchor: 0), lambda anchor: 0, 7)
    assert [round_.accepted for round_ in out.stats.rounds] == [0] * (COUNT - 1)
    assert all(token == known.MASK for round_ in out.stats.rounds for token in round_.proposal)


def test_a_drafter_that_is_always_right_fills_every_block(tmp_path):
    out = check(known.known_pair(tmp_path, lambda anchor: 15), lambda anchor: 15, 15, count=49)
    assert [round_.committed for round_ in out.stats.rounds] == [16, 16, 16]
    assert out.stats.mean_length == 16
    assert out.stats.acceptance_rate == 1


def test_counts_follow_when_every_anchor_has_its_own(tmp_path):
    """Another number of right slots after each token: each round's count is the one of its anchor."""

    def depth(anchor):
        return (7 * anchor + 3) % 16

    pair = known.known_pair(tmp_path, depth)
    out = check(pair, depth, 15, count=90)
    assert len({round_.accepted for round_ in out.stats.rounds}) > 5
    check(pair, depth, 4, count=90)


@pytest.mark.parametrize("right", [0, 3, 10, 15])
def test_a_drafter_that_reads_the_context_sees_its_last_row_in_every_round(right, tmp_path):
    """Its proposals come from the newest feature of the second tap: one row too old or too new and none is right."""
    pair = known.known_pair(tmp_path, lambda anchor: right, context=True)
    for length in (4, 15):
        check(pair, lambda anchor: right, length, count=45)


def test_shuffled_weights_make_the_same_drafter_never_right(tmp_path):
    """What the accepted counts measure is the drafter, and what the tokens are is not."""
    good = check(known.known_pair(tmp_path / "good", lambda anchor: 15), lambda anchor: 15, 7)
    mixed = generate(
        known.known_pair(tmp_path / "mixed", lambda anchor: 15, shuffle=1), PROMPT, max_tokens=COUNT, draft_length=7
    )
    assert mixed.tokens == good.tokens
    assert mixed.stats.mean_accepted < 0.5 < good.stats.mean_accepted
    assert len(mixed.stats.rounds) > 4 * len(good.stats.rounds)


def test_the_proposal_and_the_tokens_of_each_round_are_recorded(tmp_path):
    out = check(known.known_pair(tmp_path, lambda anchor: 3), lambda anchor: 3, 7)
    at = 1
    for round_ in out.stats.rounds:
        right = known.chain(known.permutation(), out.tokens[at - 1], len(round_.proposal))
        assert round_.proposal[:3] == right[:3]
        assert set(round_.proposal[3:]) <= {known.MASK}
        assert round_.tokens == out.tokens[at : at + round_.committed]
        at += round_.committed
    assert at == COUNT
