"""The text of a stream: whole characters only, nothing of a stop string, and together what the tokens decode to."""

from __future__ import annotations

import random

import pytest
import scripts

from dflash_mlx.errors import CheckpointError
from dflash_mlx.text import TextStream, load_tokenizer


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    scripts.write_byte_tokenizer(folder)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def fallback(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fallback")
    vocab = scripts.write_fallback_tokenizer(folder)
    return load_tokenizer(folder), vocab


def pieces(tokenizer, tokens, stops, draw):
    """Chunks of a stream that takes the tokens in pieces of random sizes, and whether a stop string ended it."""
    text, chunks, at = TextStream(tokenizer, stops), [], 0
    while at < len(tokens) and not text.stopped:
        size = draw.choice((1, 1, 2, 5, 16))
        for token in tokens[at : at + size]:
            if text.add(token):
                break
        at += size
        chunks.append(text.take())
    return [*chunks, text.finish()], text.stopped


@pytest.mark.parametrize("seed", range(8))
def test_chunks_join_to_the_whole_and_hold_no_broken_character(seed, byte_tokenizer):
    """Each byte of a character is a token of its own: a chunk may end inside one, what is shown may not."""
    draw = random.Random(seed)
    text = "".join(draw.choice(scripts.LETTERS + scripts.WIDE) for _ in range(60))
    tokens = scripts.ids_of(text)
    assert len(tokens) > len(text)
    chunks, stopped = pieces(byte_tokenizer, tokens, (), draw)
    assert not stopped
    assert "".join(chunks) == text == byte_tokenizer.decode(tokens)
    assert all("\ufffd" not in chunk for chunk in chunks)


def test_a_character_is_shown_with_its_last_byte(byte_tokenizer):
    text, shown = TextStream(byte_tokenizer), []
    for token in scripts.ids_of("a🙂b"):
        text.add(token)
        shown.append(text.take())
    assert shown == ["a", "", "", "", "🙂", "b"]


def test_half_a_character_at_the_end_is_shown_as_broken_and_not_lost(byte_tokenizer):
    text = TextStream(byte_tokenizer)
    for token in scripts.ids_of("a🙂")[:-1]:
        text.add(token)
    assert text.take() == "a"
    rest = text.finish()
    assert rest == byte_tokenizer.decode(scripts.ids_of("a🙂")[:-1])[1:]
    assert set(rest) == {"\ufffd"}


def naive(text, stops):
    """Where a reader who sees the text grow character by character would end it."""
    for end in range(len(text) + 1):
        found = [text[:end].find(stop) for stop in stops if stop in text[:end]]
        if found:
            return text[: min(found)], True
    return text, False


@pytest.mark.parametrize("seed", range(30))
def test_a_stop_string_ends_the_text_before_it_however_it_is_cut(seed, byte_tokenizer):
    """Stop strings that overlap, begin alike or contain each other, over few letters, so that they are met often."""
    draw = random.Random(seed)
    letters = "ab" if seed % 3 else "aé"
    text = "".join(draw.choice(letters) for _ in range(40))
    stops = ["".join(draw.choice(letters) for _ in range(draw.randint(2, 7))) for _ in range(draw.randint(1, 3))]
    expected, found = naive(text, stops)
    chunks, stopped = pieces(byte_tokenizer, scripts.ids_of(text), stops, draw)
    assert ("".join(chunks), stopped) == (expected, found)


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("abcabd", ["abd"], "abc"),
        ("aab", ["ab"], "a"),
        ("abcd", ["bcde", "cd"], "ab"),
        ("abcd", ["cd", "bc"], "a"),
        ("abc", ["abcdefghijklmnop"], "abc"),
        ("abc", ["c"], "ab"),
        ("abc", ["a"], ""),
        ("b漢a", ["漢"], "b"),
        ("b🙂🙂a", ["🙂a"], "b🙂"),
        ("a\n\nb", ["\n\n"], "a"),
    ],
    ids=repr,
)
def test_known_stop_strings(text, stops, expected, byte_tokenizer):
    for size in (1, 2, 99):
        out, shown = TextStream(byte_tokenizer, stops), ""
        tokens = scripts.ids_of(text)
        for at in range(0, len(tokens), size):
            any(out.add(token) for token in tokens[at : at + size])
            shown += out.take()
            assert expected.startswith(shown), "part of a stop string was shown"
            if out.stopped:
                break
        assert shown + out.finish() == expected


def test_half_of_a_stop_string_is_held_back_until_it_cannot_be_one(byte_tokenizer):
    out, shown = TextStream(byte_tokenizer, ["bcd"]), []
    for token in scripts.ids_of("abcbcabc"):
        out.add(token)
        shown.append(out.take())
    assert shown == ["a", "", "", "bc", "", "bca", "", ""]
    assert out.finish() == "bc"


def test_a_tokenizer_that_falls_back_to_bytes_streams_whole_characters(fallback):
    """Spaces that belong to words, words right after bytes, and characters of up to four byte tokens."""
    tokenizer, vocab = fallback
    smile = [vocab[f"<0x{byte:02X}>"] for byte in "🙂".encode()]
    tokens = [vocab["▁the"], vocab["▁cat"], *smile, vocab["▁caf"], vocab["é"], *smile, *smile, vocab["s"], vocab["."]]
    whole = tokenizer.decode(tokens)
    assert whole == "the cat🙂 café🙂🙂s."
    for seed in range(6):
        chunks, _ = pieces(tokenizer, tokens, (), random.Random(seed))
        assert "".join(chunks) == whole
        assert all("\ufffd" not in chunk for chunk in chunks)


def test_words_after_bytes_that_form_no_character_are_not_lost(fallback):
    """The decoder breaks every byte of a run that is no whole text, also those that a stream has shown: only the
    rest can be compared."""
    tokenizer, vocab = fallback
    words = [vocab[word] for word in ("▁the", "▁", "s", "the", ".")]
    broken = str.maketrans("", "", "\ufffdAé")
    for seed in range(40):
        draw = random.Random(seed)
        tokens = [draw.choice(words) if draw.random() < 0.6 else 1 + draw.choice((0xC3, 0xA9, 0x41)) for _ in range(25)]
        chunks, _ = pieces(tokenizer, tokens, (), draw)
        assert "".join(chunks).translate(broken) == tokenizer.decode(tokens).translate(broken), tokens


def test_without_a_tokenizer_every_text_is_empty():
    out = TextStream(None)
    assert not any(out.add(token) for token in (1, 2, 3))
    assert (out.take(), out.finish()) == ("", "")


def test_a_folder_without_a_tokenizer_has_none_and_a_broken_one_is_named(tmp_path):
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"^\[load\] the tokenizer in .* must be readable but got .*\. Download"):
        load_tokenizer(tmp_path)
