"""Known drafters: what draft="auto" and a drafter's name find, and that whatever is given explicitly wins."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from faults import WHOLE, told
from tiny import tiny_pair

import dflash_mlx
from dflash_mlx import InputError, load, pair
from dflash_mlx.resources import find
from dflash_mlx.toml_files import read_toml

GLIMMER = "meta-models/Muse-Glimmer-30B"
ROWS = read_toml(find("models/known.toml"))["target"]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Answers every hub id with a tiny target or drafter; gives what was asked for."""
    first, second = tiny_pair(tmp_path, **WHOLE)
    asked: list[str] = []

    def answer(name):
        if Path(name).is_dir():
            return Path(name)
        asked.append(str(name))
        return first if str(name) == GLIMMER or "Other" in str(name) else second

    monkeypatch.setattr(pair, "resolve", answer)
    return asked


def test_every_known_drafter_is_there_once_with_its_source():
    names = [row["name"].lower() for row in ROWS]
    assert len(set(names)) == len(names) >= 2
    for row in ROWS:
        assert row["default"] in row["drafters"]
        for drafter in row["drafters"].values():
            assert set(drafter) in ({"folder", "source"}, {"hub", "source"})
            assert "folder" not in drafter or (find(drafter["folder"]) / "model.safetensors").is_file()
            assert re.fullmatch(r"[\w.-]+/[\w.-]+", drafter.get("hub", "a/b"))
            assert drafter["source"].startswith("https://") or find(drafter["source"]).is_file()


def test_the_published_pairs_are_known():
    [glimmer] = [row for row in ROWS if row["name"] == GLIMMER]
    hubs = {name: drafter["hub"] for name, drafter in glimmer["drafters"].items()}
    assert hubs == {"v1": GLIMMER + "-assistant", "dflash2": "z-lab/Muse-Glimmer-30B-DFlash2"}


def test_the_pocket_target_finds_its_drafters_by_name_and_by_default():
    for row in (row for row in ROWS if row["name"] == "pocket"):
        for name, drafter in row["drafters"].items():
            assert load("pocket", draft=name).drafter_path == find(drafter["folder"])
        assert load("pocket").drafter_path == find(row["drafters"][row["default"]]["folder"])


@pytest.mark.parametrize(
    ("draft", "expected"),
    [
        ("auto", GLIMMER + "-assistant"),
        ("v1", GLIMMER + "-assistant"),
        ("dflash2", "z-lab/Muse-Glimmer-30B-DFlash2"),
        ("someone/My-Drafter", "someone/My-Drafter"),
    ],
)
def test_a_known_target_on_the_hub_asks_for_this_drafter(draft, expected, hub):
    found = load(GLIMMER, draft=draft)
    assert hub == [GLIMMER, expected]
    assert found.drafter is not None
    assert not [note for note in found.notes if "plainly" in note]


def test_a_folder_that_is_given_wins_over_the_known_drafter(hub, tmp_path):
    found = load(GLIMMER, draft=tmp_path / "drafter")
    assert hub == [GLIMMER]
    assert found.drafter_path == tmp_path / "drafter"


def test_no_drafter_is_loaded_where_none_is_wanted(hub):
    assert load(GLIMMER, draft=None).drafter is None
    assert hub == [GLIMMER]


def test_a_target_without_a_known_drafter_decodes_plainly_and_says_so(hub):
    found = load("someone/Other-30B")
    assert hub == ["someone/Other-30B"]
    [note] = [note for note in found.notes if "plainly" in note]
    assert note == "No drafter is known for someone/Other-30B: it decodes plainly. Give one with draft= (--draft)."
    stats = dflash_mlx.generate(found, [1, 2, 3], max_tokens=3).stats
    assert stats.speculation.startswith("off")


def test_a_local_copy_of_a_known_target_asks_nobody(hub, tmp_path, monkeypatch):
    """A folder never means the network, even where its path reads like a known id."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "meta-models").mkdir()
    (tmp_path / "target").rename(tmp_path / GLIMMER)
    found = load(GLIMMER)
    assert hub == []
    assert found.drafter is None


def test_a_name_that_the_target_has_no_drafter_of_is_an_input_error():
    with pytest.raises(InputError) as error:
        load("pocket", draft="dflash9")
    told(error, "folder", "'dflash9'")
