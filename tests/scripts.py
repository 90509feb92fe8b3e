"""Pairs that say a given text: a tokenizer of single bytes, and a known pair whose next token is read from a script.

A script is a sequence of token ids. The next token depends on the last one alone, so a script that uses a token twice
must go on the same way after both.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import known
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel

import dflash_mlx

ENDS = (57, 58, 59)  # three ids that end a text: special tokens of the tokenizer
LETTERS = "abcdefghijklmnop .\n"
WIDE = "éß漢🙂"  # two, two, three and four bytes


def byte_names() -> dict[int, str]:
    """Byte -> the character that stands for it in byte-level BPE (GPT-2's table)."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names = {byte: chr(byte) for byte in visible}
    others = [byte for byte in range(256) if byte not in names]
    return names | {byte: chr(256 + i) for i, byte in enumerate(others)}


def byte_ids() -> dict[int, int]:
    """Byte -> token id, for the bytes of the letters and of the wide characters."""
    needed = sorted(set((LETTERS + WIDE).encode()))
    return {byte: i for i, byte in enumerate(needed)}


def ids_of(text: str) -> list[int]:
    """One token per byte."""
    ids = byte_ids()
    return [ids[byte] for byte in text.encode()]


def _save(tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end 57>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))


def write_byte_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer whose tokens are single bytes, with three special end tokens."""
    names = byte_names()
    vocab = {names[byte]: i for byte, i in byte_ids().items()}
    vocab |= {f"<spare {i}>": i for i in range(len(vocab), ENDS[0])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    assert set(pre_tokenizers.ByteLevel.alphabet()) >= set(names.values()), "the table of names is not GPT-2's"
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([f"<end {i}>" for i in ENDS])
    _save(tokenizer, folder)


def write_fallback_tokenizer(folder: Path) -> dict[str, int]:
    """A sentencepiece-like tokenizer: words that begin with a space mark, and bytes for all else; returns its ids."""
    words = ["▁the", "▁cat", "▁sat", "▁", "s", "at", "é", ".", "▁caf", "the"]
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    vocab |= {word: 257 + i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<end 57>"])
    _save(tokenizer, folder)
    return vocab


def following(script: Sequence[int]) -> list[int]:
    """Token -> the next token of the script; after its last one the script begins again."""
    table: dict[int, int] = {}
    for token, then in zip(script, [*script[1:], script[0]], strict=True):
        assert table.setdefault(token, then) == then, f"after token {token} the script goes on in two ways"
    return [table.get(token, script[0]) for token in range(known.TOKENS)]


def scripted_pair(folder: Path, script: Sequence[int], right: int = 15, eos: Sequence[int] = (), **options: Any) -> Any:
    """A pair with a byte tokenizer that says `script` after its last token, and drafts `right` tokens of it right."""
    table = following(script)
    paths = known.write_pair(folder, lambda anchor: right, following=table, eos=tuple(eos), **options)
    write_byte_tokenizer(paths[0])
    return dflash_mlx.load(str(paths[0]), draft=str(paths[1]))
