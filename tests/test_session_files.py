"""A session read from its file goes on as if it had never left memory; a file that is not whole changes nothing."""

from __future__ import annotations

import json
import resource
import signal
from dataclasses import replace
from pathlib import Path

import grids
import mlx.core as mx
import pytest
from usable import PROMPT, SHAPE

from dflash_mlx import Session
from dflash_mlx.errors import InputError, SessionFileError

LONG, OPTIONS = ({"max_tokens": count, "draft_length": 4} for count in (50, 20))


@pytest.fixture
def pair():
    return grids.pair(SHAPE)


@pytest.fixture(scope="module")
def long_session():
    """A session whose rings have wrapped and that has copied a checkpoint."""
    session = Session(grids.pair(SHAPE))
    session.generate(PROMPT, **LONG)
    session.generate([*session.tokens, 5, 6], **LONG)
    assert session._state.checkpoints.nbytes > 0
    return session


@pytest.fixture
def saved(long_session, tmp_path):
    """A copy of the long session that may go on, and its file."""
    long_session.save(tmp_path / "a.session")
    return long_session.fork(), tmp_path / "a.session"


def told(session, tokens, **options):
    """What a generation says, but for its times."""
    out = session.generate(tokens, **options)
    rounds = [(r.proposal, r.accepted, r.tokens) for r in out.stats.rounds]
    return out.tokens, out.stats.reused_tokens, rounds


@pytest.mark.parametrize(
    "edit",
    [lambda t: [*t, 7], lambda t: t[:95], lambda t: t[:60], lambda t: t[:42], lambda t: t[:5], lambda t: PROMPT],
    ids=["appended", "cut a little", "cut in the first answer", "cut at the first turn", "cut short", "a repeat"],
)
def test_a_loaded_session_goes_on_as_the_saved_one(edit, saved, pair):
    session, path = saved
    tokens, loaded = edit(session.tokens), Session.load(pair, path)
    assert loaded.tokens == session.tokens
    assert told(loaded, tokens, **OPTIONS) == told(session, tokens, **OPTIONS)
    assert told(loaded, [*loaded.tokens, 1], **OPTIONS) == told(session, [*session.tokens, 1], **OPTIONS)


@pytest.mark.parametrize("kind", ["bfloat16", "4-bit"])
def test_all_kinds_of_numbers_come_back_bit_for_bit(kind, tmp_path):
    pair = grids.pair("window 35", kind)
    session = Session(pair)
    session.generate(grids.prompts("window 35", kind)["5 windows"], max_tokens=20, draft_length=4)
    session.save(tmp_path / "a.session")
    loaded = Session.load(pair, tmp_path / "a.session")
    for found, history in zip(loaded._state.histories, session._state.histories, strict=True):
        assert (found.offset, found.start) == (history.offset, history.start)
        pairs = zip(
            found.ring_copies(found.start, found.offset), history.ring_copies(found.start, found.offset), strict=True
        )
        assert all(bool(mx.array_equal(a, b)) for a, b in pairs)
    tokens = [*session.tokens, 7]
    assert told(loaded, tokens, **OPTIONS) == told(session, tokens, **OPTIONS)


def test_an_empty_session_and_one_of_one_token_can_be_saved(pair, tmp_path):
    session = Session(pair)
    session.save(tmp_path / "empty")
    assert Session.load(pair, tmp_path / "empty").tokens == []
    session.generate([3], max_tokens=1)
    session.save(tmp_path / "one")
    assert told(Session.load(pair, tmp_path / "one"), [3, 4], max_tokens=4)[1] == 1


def refused(pair, path, *parts):
    with pytest.raises(SessionFileError) as caught:
        Session.load(pair, path)
    assert str(caught.value).startswith("[session] ")
    for part in (path.name, *parts):
        assert part in str(caught.value)
    assert isinstance(caught.value, InputError)


def test_a_file_that_was_cut_anywhere_is_refused(saved, pair):
    _, path = saved
    whole = path.read_bytes()
    for size in [*range(0, 40, 3), 100, 500, 1000, 3000, len(whole) // 2, len(whole) - 5, len(whole) - 1]:
        path.write_bytes(whole[:size])
        refused(pair, path)
    path.write_bytes(whole + b"x")
    refused(pair, path, "SHA-256")


def test_a_file_with_a_flipped_bit_anywhere_is_refused(saved, pair):
    _, path = saved
    whole = path.read_bytes()
    for at in [*range(0, 130, 3), *range(130, len(whole), len(whole) // 60)]:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        refused(pair, path)
    path.write_bytes(whole)
    Session.load(pair, path)


def test_other_files_are_refused_by_what_they_are(saved, pair, tmp_path):
    _, path = saved
    refused(pair, tmp_path / "none", "No such file or directory. Check the path.")
    (tmp_path / "text").write_text(json.dumps({"a": 1}) * 20)
    refused(pair, tmp_path / "text", "a session file")
    other = tmp_path / "other version"
    other.write_bytes(path.read_bytes().replace(b'"version": "1"', b'"version": "2"'))
    refused(pair, other, "of version 1 but got 2")
    mx.save_safetensors(str(tmp_path / "weights.safetensors"), {"a": mx.zeros(3)}, {"format": "mlx"})
    refused(pair, tmp_path / "weights.safetensors", "'mlx'")


def test_a_session_of_another_target_or_dtype_is_refused(saved):
    _, path = saved
    refused(grids.pair(SHAPE, seed=1), path, "the target of ")
    refused(grids.pair(SHAPE, "4-bit"), path, "the target of ")
    refused(
        replace(grids.pair(SHAPE), dtype=mx.bfloat16),
        path,
        "the dtype of the caches of ",
        "must be bfloat16 but got float32.",
    )


def test_one_changed_weight_or_tokenizer_file_is_another_model(saved, tmp_path):
    _, path = saved
    changed = grids._pair.__wrapped__(SHAPE, "float32", 0)  # loaded anew, as it is changed here
    weight = changed.target.layers[1].mlp.up_proj.weight
    weight[17, 5] = weight[17, 5] + 1e-3
    refused(changed, path, "the target of ")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    refused(replace(grids.pair(SHAPE), target_path=tmp_path), path, "the tokenizer and its template of ")


def test_another_drafter_begins_anew_and_says_so(saved, pair):
    """The tokens are the target's either way; proposals are those of a drafter that has seen the whole prompt."""
    session, path = saved
    other = replace(pair, drafter=grids.pair(SHAPE, seed=1).drafter)
    loaded, tokens = Session.load(other, path), [*session.tokens, 7]
    out, alone = loaded.generate(tokens, **OPTIONS), Session(other).generate(tokens, **OPTIONS)
    assert [r.proposal for r in out.stats.rounds] == [r.proposal for r in alone.stats.rounds]
    assert out.tokens == alone.tokens == session.generate(tokens, **OPTIONS).tokens
    assert [note for note in out.stats.notes if "saved without this drafter" in note]
    assert not [note for note in loaded.generate(tokens).stats.notes if "saved" in note]


def test_a_target_alone_goes_on_from_a_session_that_had_a_drafter(saved, pair):
    session, path = saved
    tokens = [*session.tokens, 7]
    out = Session.load(pair.without_drafter(), path).generate(tokens, max_tokens=20)
    assert out.stats.reused_tokens == len(tokens) - 2
    assert out.tokens == session.generate(tokens, **OPTIONS).tokens


def test_a_history_longer_than_the_context_is_refused(saved, pair):
    session, path = saved
    short = replace(pair, plan=replace(pair.plan, context=60))
    refused(short, path, "at most 60 tokens", str(len(session.tokens)))


def unwritable(session, path):
    with pytest.raises(SessionFileError, match=r"^\[session\] .* must be a file that can be written but got "):
        session.save(path)


def test_what_cannot_be_written_leaves_the_old_file_and_nothing_beside_it(saved, tmp_path):
    session, path = saved
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, hard))  # as a full disk: the write itself fails
    try:
        unwritable(session, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    unwritable(session, tmp_path / "no such folder" / "a")
    unwritable(session, tmp_path)
    assert path.read_bytes() == before
    assert list(tmp_path.rglob("*.part")) == []
    assert [found.name for found in Path(tmp_path).parent.glob(".*.part")] == []
