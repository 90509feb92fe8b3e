"""Where a generation ends: at every end token, at max_tokens exactly, before a stop string; nothing after it exists."""

from __future__ import annotations

import json

import known
import pytest
import scripts

from dflash_mlx import Session, generate, load
from dflash_mlx.errors import InputError

LENGTHS = (0, 1, 2, 3, 4, 7, 15)
TEXT = "abc é.\n漢🙂d"


def script_of(text, *then):
    return [*scripts.ids_of(text), *then]


@pytest.fixture(scope="module")
def speaker(tmp_path_factory):
    """Says TEXT again and again, drafts it right; no end token."""
    return scripts.scripted_pair(tmp_path_factory.mktemp("speaker"), script_of(TEXT))


def check_counts(out, session, prompt):
    """What holds for every generation, counted from its rounds."""
    stats = out.stats
    assert stats.generated_tokens == len(out.tokens) == 1 + sum(r.committed for r in stats.rounds)
    assert out.tokens[1:] == [token for r in stats.rounds for token in r.tokens]
    for round_ in stats.rounds:
        assert round_.committed == len(round_.tokens)
        assert round_.accepted <= min(round_.committed, round_.drafted)
        assert round_.committed <= round_.accepted + 1
        assert round_.tokens[: round_.accepted] == round_.proposal[: round_.accepted]
        assert len(round_.proposal) == round_.drafted
    assert session.tokens == [*prompt, *out.tokens]
    assert session.last_generation is out


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("count", [1, 2, 3, 8, 17])
def test_max_tokens_is_exact(count, length, speaker):
    """Not one more for a block that fits badly, and no round drafts more than may still come."""
    prompt, session = scripts.ids_of(TEXT), Session(speaker)
    out = session.generate(prompt, max_tokens=count, draft_length=length)
    assert (len(out.tokens), out.finish_reason) == (count, "length")
    assert out.tokens == (scripts.ids_of(TEXT) * 2)[:count]
    check_counts(out, session, prompt)
    left = count - 1
    for round_ in out.stats.rounds:
        assert round_.drafted == min(length, left - 1)
        left -= round_.committed
    assert left == 0


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("end", scripts.ENDS)
@pytest.mark.parametrize("after", [0, 1, 4])
def test_every_end_token_ends_wherever_in_a_block_it_stands(after, end, length, tmp_path):
    """The first token, or in the middle of a block whose later drafts are accepted too: they do not exist."""
    said = "fghi"[:after]
    script = script_of(TEXT + said, end, *scripts.ids_of("jklmno"))
    session = Session(scripts.scripted_pair(tmp_path, script, eos=scripts.ENDS))
    prompt = scripts.ids_of(TEXT)
    out = session.generate(prompt, max_tokens=40, draft_length=length)
    assert out.tokens == [*scripts.ids_of(said), end]
    assert (out.text, out.finish_reason) == (said, "stop")
    check_counts(out, session, prompt)
    cut = out.stats.rounds[-1:]
    if after == 4 and length >= 7:
        assert (cut[0].drafted, cut[0].accepted, cut[0].committed) == (length, 4, 4)
        assert end in cut[0].proposal
        assert cut[0].proposal[-1] != end  # the block went on after it


def test_a_session_goes_on_after_an_end_token_as_a_fresh_one(tmp_path):
    """The rows after the end are gone from the caches: the next turn finds only what was handed out."""
    end = scripts.ENDS[1]
    script = script_of("abcdef", end, *scripts.ids_of("ghijkl"))
    pair = scripts.scripted_pair(tmp_path, script, eos=scripts.ENDS)
    prompt = scripts.ids_of("lab")
    session = Session(pair)
    first = session.generate(prompt, draft_length=15)
    assert first.tokens == [*scripts.ids_of("cdef"), end]
    turn = [*prompt, *first.tokens, *scripts.ids_of("jk")]
    again, fresh = session.generate(turn, draft_length=15), generate(pair, turn, draft_length=15)
    assert again.stats.reused_tokens == len(prompt) + len(first.tokens) - 1
    assert again.tokens == fresh.tokens
    assert [r.proposal for r in again.stats.rounds] == [r.proposal for r in fresh.stats.rounds]


@pytest.mark.parametrize(
    ("general", "config", "expected"),
    [([57, 59], 58, {57, 59}), (58, 57, {58}), (None, 57, {57}), (None, None, set())],
    ids=["a list", "one id", "only in config", "none"],
)
def test_end_tokens_come_from_the_generation_config_first(general, config, expected, tmp_path):
    first, _ = known.write_pair(tmp_path, lambda anchor: 0)
    raw = json.loads((first / "config.json").read_text())
    raw["text_config"]["eos_token_id"] = config
    (first / "config.json").write_text(json.dumps(raw))
    if general is not None:
        (first / "generation_config.json").write_text(json.dumps({"eos_token_id": general}))
    assert load(str(first), draft=None).eos_token_ids == expected


@pytest.mark.parametrize("length", [0, 1, 3, 7, 15])
@pytest.mark.parametrize(
    ("stop", "shown"),
    [
        ("d", "abc é.\n漢🙂"),
        ("c é", "ab"),
        ("🙂", "abc é.\n漢"),
        (".\n漢🙂", "abc é"),
        ("é", "abc "),
        ("da", "abc é.\n漢🙂"),
        (["z", "🙂d", "\n漢🙂dabc"], "abc é.\n漢"),
        ("a", ""),
    ],
    ids=repr,
)
def test_a_stop_string_is_met_across_rounds_chunks_and_bytes(stop, shown, length, speaker):
    """The prompt ends before `a`, so that the text begins with it."""
    prompt, session = scripts.ids_of(TEXT), Session(speaker)
    chunks = list(session.stream_generate(prompt, max_tokens=60, stop=stop, draft_length=length))
    out = session.last_generation
    assert (out.text, out.finish_reason) == (shown, "stop")
    assert "".join(chunk.text for chunk in chunks) == shown
    assert [token for chunk in chunks for token in chunk.tokens] == out.tokens
    stops = [stop] if isinstance(stop, str) else stop
    whole = (TEXT * 3).encode()[: len(out.tokens)].decode()
    assert any(whole.endswith(each) for each in stops)  # it ends with the token that completes the stop string
    check_counts(out, session, prompt)


@pytest.mark.parametrize("length", [0, 1, 3, 7, 15])
def test_no_chunk_holds_part_of_a_stop_string_or_of_a_character(length, speaker):
    seen = ""
    for chunk in Session(speaker).stream_generate(
        scripts.ids_of(TEXT), max_tokens=60, stop=["漢🙂dab", "🙂x"], draft_length=length
    ):
        assert "\ufffd" not in chunk.text
        seen += chunk.text
        assert "漢" not in seen
    assert seen == "abc é.\n"


@pytest.mark.parametrize("count", range(1, 20))
def test_a_text_cut_by_max_tokens_is_what_its_tokens_decode_to(count, speaker):
    """Inside a character too, whose half is shown as the tokenizer shows it, and with part of a stop string held."""
    chunks = list(
        Session(speaker).stream_generate(scripts.ids_of(TEXT), max_tokens=count, stop=["\n漢🙂x"], draft_length=4)
    )
    text = "".join(chunk.text for chunk in chunks)
    assert text == speaker.tokenizer.decode([token for chunk in chunks for token in chunk.tokens])
    assert all("\ufffd" not in chunk.text for chunk in chunks[:-1])
    assert chunks[-1].finish_reason == "length"
    assert all(chunk.finish_reason is None and chunk.stats is None for chunk in chunks[:-1])


@pytest.mark.parametrize("rounds", [0, 1, 2, 3, 4])
def test_a_cancelled_text_is_what_its_tokens_decode_to(rounds, speaker):
    """What was held back for a stop string, or for the rest of a character, is in the record of what there was."""
    session = Session(speaker)
    stream = session.stream_generate(scripts.ids_of(TEXT), max_tokens=60, stop=["漢🙂x", "c é!"], draft_length=2)
    shown = "".join(next(stream).text for _ in range(rounds + 1))
    stream.close()
    out = session.last_generation
    assert out.finish_reason == "cancelled"
    assert len(out.tokens) == 1 + 3 * rounds
    assert out.text == speaker.tokenizer.decode(out.tokens)
    assert out.text.startswith(shown)
    assert rounds != 1 or shown != out.text  # "c " was held back


def test_a_generation_becomes_json_with_all_that_it_says(speaker):
    out = generate(speaker, scripts.ids_of(TEXT), max_tokens=9, draft_length=4)
    found = json.loads(json.dumps(out.to_dict()))
    assert (found["text"], found["tokens"], found["finish_reason"]) == (out.text, out.tokens, "length")
    stats = found["stats"]
    assert [len(r["tokens"]) for r in stats["rounds"]] == [5, 3]
    assert (stats["generated_tokens"], stats["syncs"], stats["speculation"]) == (9, 3, "on")
    assert (stats["mean_accepted"], stats["mean_length"], stats["acceptance_rate"]) == (3.0, 4.0, 1.0)


def test_a_prompt_of_text_is_its_tokens(speaker):
    out = generate(speaker, TEXT, max_tokens=5, draft_length=2)
    assert out.tokens == generate(speaker, scripts.ids_of(TEXT), max_tokens=5, draft_length=2).tokens
    assert (out.text, out.stats.prompt_tokens) == ("abc \ufffd", len(TEXT.encode()))


def test_a_pair_without_a_tokenizer_works_with_ids_and_has_no_text(tmp_path):
    pair = known.known_pair(tmp_path, lambda anchor: 3)
    assert pair.tokenizer is None
    chunks = list(Session(pair).stream_generate([1, 2, 3], max_tokens=9, draft_length=4))
    assert [chunk.text for chunk in chunks] == [""] * len(chunks)
    assert sum(len(chunk.tokens) for chunk in chunks) == 9
    with pytest.raises(InputError) as caught:
        generate(pair, "abc")
    assert str(caught.value) == (
        "[generate] prompt must be token ids but got text or messages. "
        "The model's folder has no tokenizer: give token ids."
    )
    with pytest.raises(InputError) as caught:
        generate(pair, [1], stop="a")
    assert str(caught.value) == (
        "[generate] stop must be empty without a tokenizer but got ('a',). The model's folder has no tokenizer."
    )


def test_a_context_that_is_full_ends_the_text(tmp_path):
    """max_context counts prompt and generated tokens; the last one needs no row."""
    first, second = known.write_pair(tmp_path, lambda anchor: 15)
    pair = load(str(first), draft=str(second), max_context=30)
    for length in (0, 7, 15):
        out = Session(pair).generate([1] * 10, max_tokens=500, draft_length=length)
        assert (len(out.tokens), out.finish_reason) == (21, "length")
        assert Session(pair).generate([1] * 30, max_tokens=5, draft_length=length).finish_reason == "length"
