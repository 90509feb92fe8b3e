"""Sessions that share a forward give what each of them gives alone, in whatever mix, with one read for all."""

from __future__ import annotations

import gc
import itertools
import random
from collections import Counter

import crowds
import grids
import mlx.core as mx
import numpy as np
import pytest
from dealt import dealt
from tiny import tiny_pair

from dflash_mlx import Session, load
from dflash_mlx.cache import Part, TargetCache
from dflash_mlx.errors import ProcessorError
from dflash_mlx.options import Options
from dflash_mlx.state import HostReads, State
from dflash_mlx.stream import Stream, advance

SEEDS, MORE_SEEDS = 2, 15
PROMPT = grids.prompts(crowds.SHAPE)["5 windows"]


def started(pair, prompt, choice_index=0, state=None, **options):
    stream = Stream(pair, prompt, Options.of(options), choice_index)
    stream.begin(state or State(pair))
    return stream


def run(jobs, pair, seed):
    """Bring the jobs to their ends in steps that some of those present take part in; the tokens, and what was seen."""
    draw, reads, seen = random.Random(seed), HostReads(), Counter()
    present, found, done = {}, {number: [] for number in range(len(jobs))}, set()
    for at in itertools.count():
        for number, job in enumerate(jobs):
            if job.arrives == at:
                present[number] = started(pair, job.prompt, job.choice_index, **job.asked)
        chosen = [number for number in present if number not in done and draw.random() < 0.8]
        if len(done) == len(jobs):
            return found, seen
        if not chosen:
            continue
        streams = [present[number] for number in chosen]
        work = [stream.work(draw.choice((1, 5, 16, None)), streams=draw.choice((1, len(chosen)))) for stream in streams]
        before = reads.count
        for number, item in zip(chosen, advance(streams, work, reads), strict=True):
            assert not isinstance(item, Exception), item
            found[number] += item.tokens if item else []
            left = jobs[number].cancel_after is not None and len(found[number]) > jobs[number].cancel_after
            if left or (item and item.finish_reason):
                done.add(number)
        assert reads.count == before + 1
        seen["steps"] += 1
        seen["mixed"] += len({(each.rows > 1, each.length > 0) for each in work}) > 1
        seen["drafted"] += sum(each.length for each in work)
        seen["most"] = max(seen["most"], len(work))
    return None


def check(seed, kind, count=7):
    jobs = crowds.jobs(seed, count, kind)
    found, seen = run(jobs, crowds.guided(jobs, kind), seed)
    for number, job in enumerate(jobs):
        expected = crowds.alone(job, kind)
        if job.cancel_after is None:
            assert found[number] == expected, (seed, number, job)
        else:
            assert found[number] == expected[: len(found[number])], (seed, number, job)
    return seen


@pytest.mark.parametrize(("kind", "seed"), dealt(grids.KINDS, range(SEEDS)))
def test_sessions_in_shared_steps_give_what_each_gives_alone(kind, seed):
    """Prompts, lengths, sampling, seeds, draft lengths, arrivals and departures drawn; some of those present step."""
    seen = check(seed, kind)
    assert seen["mixed"] > 3
    assert seen["most"] >= 4
    assert seen["drafted"] > 20


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS, SEEDS + MORE_SEEDS))
def test_many_more_mixes_give_what_each_session_gives_alone(seed):
    check(seed, grids.KINDS[seed % 3], 9)


def test_one_forward_gives_each_session_the_logits_of_its_own():
    """Two histories of other lengths in one forward, against each alone: prompt pieces, one row, and a block."""
    pair, prompts = grids.pair(crowds.SHAPE), (PROMPT[:23], PROMPT[20:29], PROMPT[30:31])
    alone = []
    for prompt in prompts:
        cache = TargetCache(pair.target.config, pair.dtype, pair.max_context)
        alone.append(pair.target(mx.array(prompt, mx.uint32), [Part(cache, len(prompt), len(prompt))], (1,)))
    caches = [TargetCache(pair.target.config, pair.dtype, pair.max_context) for _ in prompts]
    parts = [Part(cache, len(prompt), len(prompt)) for cache, prompt in zip(caches, prompts, strict=True)]
    whole = pair.target(mx.array([token for prompt in prompts for token in prompt], mx.uint32), parts, (1,))
    assert (np.array(whole.logits) == np.concatenate([np.array(each.logits) for each in alone])).all()
    assert (np.array(whole.taps[0]) == np.concatenate([np.array(each.taps[0]) for each in alone])).all()


def test_a_session_drafts_after_shared_steps_what_it_drafts_alone():
    """Its drafter context is its own rows, however many strangers' rows stood in the forward."""
    pair = grids.pair(crowds.SHAPE)
    expected = Session(pair).generate(PROMPT, max_tokens=24, draft_length=5).stats.rounds
    reads = HostReads()
    stream = started(pair, PROMPT, max_tokens=24, draft_length=5)
    others = [started(pair, PROMPT[at : at + 30], max_tokens=60, draft_length=2) for at in (3, 9)]
    while stream.generation is None:
        streams = [others[0], stream, others[1]]
        advance(streams, [each.work(8) for each in streams], reads)
    assert [r.proposal for r in stream.stats.rounds] == [r.proposal for r in expected]
    assert stream.output.tokens[1:] == [token for r in expected for token in r.tokens]


@pytest.mark.parametrize("count", [1, 2, 7])
def test_a_step_reads_once_whatever_the_number_of_sessions(count, monkeypatch):
    """Counted at `mx.eval` itself."""
    pair, reads, evaluations = grids.pair(crowds.SHAPE), HostReads(), [0]
    streams = [started(pair, PROMPT[number : 20 + number], max_tokens=12, draft_length=3) for number in range(count)]
    evaluate = mx.eval
    monkeypatch.setattr(mx, "eval", lambda *arrays: (evaluations.__setitem__(0, evaluations[0] + 1), evaluate(*arrays)))
    for steps in range(1, 6):
        advance(streams, [stream.work() for stream in streams], reads)
        assert evaluations[0] == reads.count == steps
    assert {stream.stats.syncs for stream in streams} == {5}
    assert {round_.streams for stream in streams for round_ in stream.stats.rounds} == {count}
    assert {round_.rows for stream in streams for round_ in stream.stats.rounds} == {4 * count}


def test_processors_of_several_sessions_share_the_second_read():
    pair, reads = grids.pair(crowds.SHAPE), HostReads()
    options = {"max_tokens": 12, "draft_length": 3, "logits_processors": [lambda tokens, logits: logits]}
    streams = [started(pair, PROMPT[number : 20 + number], **options) for number in range(3)]
    for _ in range(3):
        advance(streams, [stream.work() for stream in streams], reads)
    assert reads.count == 1 + 2 + 2  # the prompts' step drafts nothing


def test_an_error_in_one_session_leaves_the_others_as_they_are():
    pair, reads = grids.pair(crowds.SHAPE), HostReads()

    def failing(tokens, logits):
        if tokens.shape[0] > 26:
            raise RuntimeError("out of ideas")
        return logits

    wrong = started(pair, PROMPT[:24], max_tokens=20, draft_length=3, logits_processors=[failing])
    right = [started(pair, PROMPT[at : at + 20], max_tokens=20, draft_length=3) for at in (1, 2)]
    failed, found, steps_of_wrong = None, [[], []], 0
    while not all(stream.generation for stream in right):
        streams = [stream for stream in (right[0], wrong, right[1]) if not stream.generation]
        steps_of_wrong += wrong in streams
        for stream, item in zip(streams, advance(streams, [each.work() for each in streams], reads), strict=True):
            if stream is wrong and isinstance(item, Exception):
                failed, _ = item, stream.close()
            elif stream is not wrong:
                found[right.index(stream)] += item.tokens
    assert isinstance(failed, ProcessorError)
    assert "out of ideas" in str(failed)
    assert wrong.stats.syncs == 2 * steps_of_wrong - 1  # a processor sees the drafts; the prompt's step has none
    for at, tokens in zip((1, 2), found, strict=True):
        assert tokens == Session(pair).generate(PROMPT[at : at + 20], max_tokens=20, draft_length=0).tokens
    assert wrong.output.tokens == Session(pair).generate(PROMPT[:24], max_tokens=20).tokens[: len(wrong.output.tokens)]


def test_rows_decoded_beside_a_long_prompt_do_not_keep_its_rows_in_memory(tmp_path):
    """What 20 plain rows leave for the drafter is 20 rows of taps, and not the rows of 20 forwards.

    Wide rows: MLX shares a buffer for what it calls a copy where that saves less than 16 KiB.
    """
    pair, reads = load(*tiny_pair(tmp_path, **{**grids.SHAPES[crowds.SHAPE], "hidden": 1024})), HostReads()
    plain = started(pair, PROMPT[:20], max_tokens=90, draft_length=0)
    advance([plain], [plain.work()], reads)
    before = mx.get_active_memory()
    long = started(pair, PROMPT * 12, max_tokens=1)
    for _ in range(20):
        advance([plain, long], [plain.work(), long.work(30)], reads)
    assert long.to_prefill
    del long
    gc.collect()
    taps = len(pair.drafter.config.taps) * pair.target.config.hidden_size * 4
    assert mx.get_active_memory() - before <= 2 * 20 * taps


def test_a_forked_state_goes_on_apart_from_its_origin():
    """Both write other rows at the same positions, in steps of their own, one after the other."""
    pair, reads = grids.pair(crowds.SHAPE), HostReads()
    edited = [*PROMPT[:50], 9, 8, 7]
    first = started(pair, PROMPT, max_tokens=20, draft_length=4)
    while not first.output.tokens:
        advance([first], [first.work()], reads)
    second = started(pair, edited, state=first.state.fork(), max_tokens=20, draft_length=4)
    assert second.stats.reused_tokens == 50
    while not (first.generation and second.generation):
        for stream in (first, second):
            if not stream.generation:
                advance([stream], [stream.work()], reads)
    for stream, prompt in ((first, PROMPT), (second, edited)):
        assert stream.output.tokens == Session(pair).generate(prompt, max_tokens=20, draft_length=0).tokens
