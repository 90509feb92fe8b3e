"""The prefix store hands each prompt the state that holds most of it, within its budget of bytes."""

from __future__ import annotations

import threading

import grids
import pytest
from usable import PROMPT, SHAPE, fresh

from dflash_mlx import Engine
from dflash_mlx.errors import InputError
from dflash_mlx.prefix_store import PrefixStore
from dflash_mlx.state import HostReads, State

OPTIONS = {"max_tokens": 6, "draft_length": 4}
OTHERS = [[token + shift for token in range(20)] for shift in (0, 20, 40, 60)]  # nothing in common


@pytest.fixture
def pair():
    return grids.pair(SHAPE)


def turn(store, prompt, count=6):
    """One generation on the state that the store gives; returns what it reused and the whole history."""
    state = store.take(prompt)
    before = state.cache.offset
    drive = grids.drive(store.pair, prompt, grids.schedule(4), count, state=state)
    assert drive.tokens == fresh(prompt, max_tokens=count, draft_length=4).tokens
    state.settle(HostReads())
    store.put(state)
    return before, [*prompt, *drive.tokens]


def test_clients_with_different_histories_each_find_their_own(pair):
    store = PrefixStore(pair, 1 << 30)
    histories = [turn(store, prompt)[1] for prompt in OTHERS]
    for history in histories:
        held, _ = turn(store, [*history, 1, 2])
        assert held == len(history) - 1
    figures = store.figures()
    assert (figures.taken, figures.hits, figures.forked, figures.states, figures.in_use) == (8, 4, 0, 4, 0)
    assert figures.reused_tokens == 4 * 25
    assert figures.asked_tokens == 4 * 20 + 4 * 28


def test_the_longest_prefix_wins_and_a_shared_beginning_is_copied(pair):
    """Two chats have 30 tokens in common; the second gets a copy, and the first still goes on from where it was."""
    store = PrefixStore(pair, 1 << 30)
    first = turn(store, [*PROMPT[:30], 7, 8])[1]
    second = turn(store, [*PROMPT[:30], 9, 10])[1]
    assert store.figures().forked == 1
    for history in (first, second):
        taken = store.take([*history, 5])
        assert taken.shared([*history, 5]) == len(history) - 1
        store.put(taken)
    assert store.figures().states == 2


def test_a_state_in_use_is_given_to_nobody_else_and_never_dropped(pair):
    store = PrefixStore(pair, State(pair).nbytes * 3 // 2)  # room for one
    _, history = turn(store, PROMPT)
    taken = store.take([*history, 1])
    assert store.take([*history, 1]) is not taken
    turn(store, OTHERS[1])
    turn(store, OTHERS[2])
    figures = store.figures()
    assert (figures.states, figures.evicted) == (1, 1)
    assert figures.nbytes <= store.budget
    assert taken.tokens == history
    store.put(taken)
    assert store.figures().evicted == 2
    assert store.take([*history, 1]) is taken


def test_the_least_recently_used_state_goes_first(pair):
    store = PrefixStore(pair, State(pair).nbytes * 7 // 2)  # room for three
    histories = [turn(store, prompt)[1] for prompt in OTHERS[:3]]
    turn(store, [*histories[0], 1])  # used again: now the second is the oldest
    turn(store, OTHERS[3])
    held = [turn(store, [*history, 2])[0] > 0 for history in (histories[2], histories[1])]
    assert held == [True, False]


def test_a_budget_of_nothing_keeps_nothing(pair):
    store = PrefixStore(pair, 0)
    turn(store, PROMPT)
    assert (store.figures().states, store.figures().nbytes) == (0, 0)


@pytest.mark.parametrize("budget", [-1, 1.5, True])
def test_a_wrong_budget_is_refused(budget, pair):
    with pytest.raises(InputError, match=r"^\[store\] budget must be bytes, at least 0 but got "):
        PrefixStore(pair, budget)


def test_an_engine_with_a_store_reuses_what_its_clients_send_again(pair):
    """Three clients at once, three turns each; every answer is that of a fresh session."""
    store, wrong = PrefixStore(pair, 1 << 30), []
    with Engine(pair, max_streams=2, max_queue=8, store=store) as engine:

        def client(history):
            for _ in range(3):
                answer = engine.submit(history, **OPTIONS).result()
                if answer.tokens != fresh(history, **OPTIONS).tokens:
                    wrong.append(history)
                history = [*history, *answer.tokens, 3]

        threads = [threading.Thread(target=client, args=(prompt,)) for prompt in OTHERS[:3]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert engine.figures()["reused_tokens"] == 3 * (25 + 32)
    assert wrong == []
    assert store.figures().reused_tokens == 3 * (25 + 32)
    assert store.figures().in_use == 0
