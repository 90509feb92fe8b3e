"""What `dflash-mlx tune` stored is used for the pair, machine and setup that it was measured with alone."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import dflash_mlx
from dflash_mlx import convert, tuned
from dflash_mlx.convert import Form
from dflash_mlx.kernels.serving import DRAFTER, STOCK, TARGET_SLIDING, Kernels
from dflash_mlx.resources import find
from dflash_mlx.tuned import Tuned, read_tuned, setup_of, write_tuned

PAIR = find("models/pocket/target"), find("models/pocket/drafter")
PLAIN = setup_of(None, STOCK)
FOUND = Tuned(3, 1.5, 0.7, [(3, 0, 0.05)], "2026-01-01", PLAIN)
NOTHING = None, ""


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(tuned, "user_cache_path", lambda *_, **__: tmp_path / "cache")


def test_what_was_stored_is_found_with_a_line_that_says_what_and_from_when():
    file = write_tuned(*PAIR, FOUND)
    found, note = read_tuned(*PAIR, PLAIN)
    assert found == FOUND
    assert note == (
        "Tuned on this machine on 2026-01-01: draft length 3 gave 1.50 times the plain speed; "
        "the automatic draft length starts from that."
    )
    assert [path.name for path in file.parent.iterdir()] == ["tuned.json"]


OTHERS = [
    (setup_of(8, STOCK), "with a cache of the model's own type and not a cache of 8 bits"),
    (PLAIN | {"device": "gpu"}, "with the device cpu and not the device gpu"),
    (
        setup_of(None, Kernels({TARGET_SLIDING: (1, 16)})),
        "with stock operations alone and not the kernels target, sliding layers for 1 to 16 rows",
    ),
]


@pytest.mark.parametrize(("setup", "why"), OTHERS, ids=["cache", "device", "kernels"])
def test_another_setup_gets_its_own_result_or_a_line_that_says_how_it_differs(setup, why):
    write_tuned(*PAIR, FOUND)
    nothing, note = read_tuned(*PAIR, setup)
    assert nothing is None
    assert note == (
        f"Tuned on this machine on 2026-01-01, but {why}: it is not used. Run dflash-mlx tune with this run's flags."
    )
    other = replace(FOUND, draft_length=1, setup=setup)
    write_tuned(*PAIR, other)
    assert read_tuned(*PAIR, setup)[0] == other
    assert read_tuned(*PAIR, PLAIN)[0] == FOUND


def test_a_drafter_that_was_trained_on_does_not_take_over_the_result(tmp_path):
    """Same config, same names and sizes, other numbers."""
    write_tuned(*PAIR, FOUND)
    other = tmp_path / "drafter"
    shutil.copytree(PAIR[1], other)
    assert read_tuned(PAIR[0], other, PLAIN)[0] == FOUND
    for file in other.glob("*.safetensors"):
        content = bytearray(file.read_bytes())
        begin = 8 + int.from_bytes(content[:8], "little")
        content[begin:] = bytes(byte ^ 1 for byte in content[begin:])
        file.write_bytes(content)
    assert read_tuned(PAIR[0], other, PLAIN) == NOTHING


def test_rows_that_a_kernel_serves_are_part_of_the_setup():
    first, second = (setup_of(None, Kernels({DRAFTER: rows})) for rows in ((1, 16), (2, 16)))
    write_tuned(*PAIR, replace(FOUND, setup=first))
    assert read_tuned(*PAIR, second)[0] is None


@pytest.mark.parametrize("flag", [None, 8])
def test_a_pair_is_loaded_with_the_result_of_its_own_cache(flag):
    other = 8 if flag is None else None
    write_tuned(*PAIR, replace(FOUND, setup=setup_of(other, STOCK)))
    pair = dflash_mlx.load("pocket", kv_bits=flag)
    assert pair.tuned is None
    assert sum("it is not used" in note for note in pair.notes) == 1
    write_tuned(*PAIR, replace(FOUND, draft_length=2, setup=pair.setup))
    again = dflash_mlx.load("pocket", kv_bits=flag)
    assert again.tuned.draft_length == 2
    assert any("draft length 2 gave 1.50 times" in note for note in again.notes)


def test_a_pair_that_gets_another_drafter_says_what_was_found_for_that():
    other = find("models/pocket/drafter2")
    write_tuned(PAIR[0], other, replace(FOUND, draft_length=5))
    pair = dflash_mlx.load("pocket")
    assert pair.tuned is None
    assert any("draft length 5 gave" in note for note in pair.with_drafter("dflash2").notes)


def test_another_drafter_other_bits_and_another_machine_find_nothing(monkeypatch, tmp_path):
    write_tuned(*PAIR, FOUND)
    assert read_tuned(PAIR[0], find("models/pocket/drafter2"), PLAIN) == NOTHING
    convert.convert(PAIR[1], tmp_path / "drafter-4bit", Form(bits=4))
    assert read_tuned(PAIR[0], tmp_path / "drafter-4bit", PLAIN) == NOTHING
    monkeypatch.setattr(tuned, "chip", lambda: "another chip")
    assert read_tuned(*PAIR, PLAIN) == NOTHING


def old_file() -> str:
    """As it was written before there were setups: one result of a pair, alone."""
    data = asdict(FOUND)
    del data["setup"]
    return json.dumps({tuned.key_of(*PAIR): data})


def test_a_result_from_before_there_were_setups_is_told_and_not_used():
    tuned.path().parent.mkdir()
    tuned.path().write_text(old_file())
    assert read_tuned(*PAIR, PLAIN) == (
        None,
        "Tuned on this machine on 2026-01-01, but the result does not say with which cache and kernels: "
        "it is not used. Run dflash-mlx tune again.",
    )
    assert dflash_mlx.load("pocket").tuned is None
    write_tuned(*PAIR, FOUND)
    assert read_tuned(*PAIR, PLAIN)[0] == FOUND


def with_result(**changed: object) -> str:
    return json.dumps({tuned.key_of(*PAIR): [asdict(FOUND) | changed]})


DAMAGED = [
    "", "{", "[]", "3", "[" * 100_000, "\xff",
    json.dumps({tuned.key_of(*PAIR): 3}), json.dumps({tuned.key_of(*PAIR): "text"}),
    json.dumps({tuned.key_of(*PAIR): [3]}), json.dumps({tuned.key_of(*PAIR): {"draft_length": 3}}),
    with_result(draft_length=-1), with_result(draft_length="many"), with_result(speedup=float("nan")),
    with_result(acceptance=2), with_result(rounds=3), with_result(rounds=[[1, 2]]), with_result(setup=[3]),
    with_result(rounds=[[1, 0, 0.0]]), with_result(rounds=[[1, 10**400, 0.1]]), with_result(rounds=[[-1, 0, 0.1]]),
]  # fmt: skip


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_file_is_told_not_used_and_written_anew(text):
    tuned.path().parent.mkdir()
    tuned.path().write_text(text, encoding="latin-1")
    nothing, note = read_tuned(*PAIR, PLAIN)
    assert nothing is None
    assert note.startswith(f"Tuned results in {tuned.path()} cannot be used (")
    write_tuned(*PAIR, FOUND)
    assert read_tuned(*PAIR, PLAIN)[0] == FOUND


def test_where_there_can_be_no_cache_folder_nothing_was_stored(tmp_path: Path):
    (tmp_path / "cache").write_text("a file, not a folder")
    assert read_tuned(*PAIR, PLAIN) == NOTHING


def test_a_folder_in_the_files_place_is_told(tmp_path: Path):
    tuned.path().mkdir(parents=True)
    assert "cannot be used (IsADirectoryError" in read_tuned(*PAIR, PLAIN)[1]
    with pytest.raises(OSError, match=r"tuned\.json"):
        write_tuned(*PAIR, FOUND)


def _store(folder: Path, number: int) -> None:
    """In a process of its own: store a result of each of ten setups."""
    tuned.user_cache_path = lambda *_, **__: folder
    for count in range(10):
        write_tuned(*PAIR, replace(FOUND, setup=PLAIN | {"device": f"{number}.{count}"}))


def test_two_processes_that_store_at_once_lose_no_result(tmp_path: Path):
    started = multiprocessing.get_context("spawn")
    both = [started.Process(target=_store, args=(tmp_path / "cache", number)) for number in range(2)]
    for each in both:
        each.start()
    for each in both:
        each.join(120)
    stored = json.loads(tuned.path().read_text())[tuned.key_of(*PAIR)]
    devices = {each["setup"]["device"] for each in stored}
    assert devices == {f"{number}.{count}" for number in range(2) for count in range(10)}
