"""From a load to a round: what qualified serves and gives stock's tokens; what did not is said, and stays stock."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faults
import faulty_devices as devices
import mlx.core as mx
import pytest
from command import run
from tiny import tiny_pair

import dflash_mlx
from dflash_mlx import Session
from dflash_mlx.cli.kernel_report import published_places
from dflash_mlx.errors import InputError
from dflash_mlx.kernels import apart, choose, verdicts
from dflash_mlx.kernels.places import AttentionPlace, FeaturePlace
from dflash_mlx.kernels.serving import FEATURE, TARGET_SLIDING

pytestmark = pytest.mark.kernels

SIZES: dict[str, Any] = {
    "vocab": 97, "hidden": 64, "intermediate": 96, "heads": (4, 2), "head_dim": 16, "window": 11, "layers": 4,
    "drafter_layers": 2, "drafter_heads": (8, 1), "drafter_head_dim": 16, "drafter_intermediate": 32, "taps": (0, 2),
}  # fmt: skip
PROMPT = [5, 9, 2, 40, 41, 3, 3, 18, 77, 60, 1, 2, 90, 14, 15, 16, 17, 6, 25]
SLIDING = AttentionPlace(TARGET_SLIDING, "float32", 4, 2, 16, 48, 11, True, 0.5, 1)
FUSED = FeaturePlace(FEATURE, "float32", 2, 64, 0, 0, 1e-5)
Load = Callable[..., dflash_mlx.Pair]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    parts = tiny_pair(tmp_path_factory.mktemp("pair"), **SIZES)
    faults.edit_config(parts[0], lambda _, text: text.update(max_position_embeddings=512))  # full layers tried at that
    return parts


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, users_environment: dict[str, str]) -> None:
    """Other processes find what the harness has compiled."""
    base = users_environment.get("XDG_CACHE_HOME") or str(
        Path(users_environment.get("HOME", "~")).expanduser() / ".cache"
    )
    monkeypatch.setenv("XDG_CACHE_HOME", base)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, compiled: None, tmp_path: Path) -> Callable[[str], None]:
    """Make a device of faulty_devices the machine's, with verdicts in a folder of the test's own."""
    monkeypatch.setattr(verdicts, "user_cache_path", lambda *_, **__: tmp_path / "cache")

    def use(name: str) -> None:
        monkeypatch.setattr(choose, "device_here", lambda: (f"faulty_devices:{name}", ""))

    return use


@pytest.fixture
def load(folders: tuple[Path, Path]) -> Load:
    return lambda **options: dflash_mlx.load(folders[0], draft=folders[1], **options)


def tokens(pair: dflash_mlx.Pair, **options: Any) -> list[int]:
    return Session(pair).generate(PROMPT, max_tokens=24, **options).tokens


def test_a_qualified_pair_decodes_stocks_tokens_with_its_kernels(here: Callable[[str], None], load: Load) -> None:
    """Qualified in a process of its own, stored, served; the launches of a round are counted by hand."""
    here("HARNESS")
    devices.HARNESS.pipelines.clear()
    pair, stock = load(), load(kernels="stock")
    at_load = set(devices.HARNESS.pipelines)
    assert {name for name, _ in at_load} == {
        "block_attention_chunks", "block_attention_merge", "fusion_product", "fusion_norm", "fusion_keys_values",
    }  # fmt: skip
    assert pair.kernels == {"block_attention": "metal", "feature_fusion": "metal"}
    assert pair.notes == stock.notes
    assert set(stock.kernels.values()) == {"stock: asked for"}
    for options in ({"draft_length": 4}, {"draft_length": 0}, {"draft_length": 7, "temperature": 0.8, "seed": 3}):
        assert tokens(pair, **options) == tokens(stock, **options)

    stream = Session(pair).stream_generate(PROMPT, max_tokens=20, draft_length=4)
    next(stream)
    devices.HARNESS.counts.clear()
    next(stream)  # a round whose context is up to date already: the prompt's rows were projected with it
    launched = [count.kernel for count in devices.HARNESS.counts]
    attention = 4 + 2  # layers of the target and of the drafter, each with two launches
    assert launched.count("block_attention_chunks") == launched.count("block_attention_merge") == attention
    assert len(launched) == 2 * attention
    devices.HARNESS.counts.clear()
    next(stream)  # and one that projects the rows that the last round kept
    launched = [count.kernel for count in devices.HARNESS.counts]
    assert launched.count("fusion_norm") == launched.count("fusion_keys_values") == 1
    assert launched.count("fusion_product") == 2
    assert len(launched) == 2 * attention + 4
    assert devices.HARNESS.pipelines == at_load
    stream.close()


def test_a_verdict_is_made_once_and_again_when_its_facts_change(
    here: Callable[[str], None], load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    here("HARNESS")
    asked: list[int] = []

    def made(places: Any, _: str) -> list[apart.Verdict]:
        asked.append(len(places))
        return [quick(place) for place in places]

    monkeypatch.setattr(choose, "qualify_apart", made)
    assert load().kernels == load().kernels
    assert asked == [5, 0]
    path = verdicts.Verdicts().path
    assert {*json.loads(path.read_text())["facts"]} == {"chip", "system", "mlx", "sources"}
    assert [file.name for file in path.parent.iterdir()] == ["kernels.json"]
    for fact in ("chip", "system", "mlx", "sources"):
        stored = json.loads(path.read_text())
        stored["facts"][fact] = "another"
        path.write_text(json.dumps(stored))
        assert verdicts.Verdicts().read() == {}
        stored["facts"][fact] = verdicts.facts()[fact]
        path.write_text(json.dumps(stored))
        assert len(verdicts.Verdicts().read()) == 5


@pytest.mark.parametrize("text", ["", "{", "[]", '{"facts": 1}', "null", "\udcff", "[" * 100_000])
def test_a_damaged_file_counts_as_none(here: Callable[[str], None], text: str) -> None:
    store = verdicts.Verdicts()
    verdict = apart.Verdict({"name": "x"}, "slower")
    assert store.add([verdict]) == ""
    assert list(store.read().values()) == [verdict]
    store.path.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert store.read() == {}
    assert store.add([verdict]) == ""
    assert list(store.read().values()) == [verdict]


def test_a_verdict_with_a_broken_field_counts_as_none(here: Callable[[str], None]) -> None:
    store = verdicts.Verdicts()
    store.add([apart.Verdict({"name": "x"}, "", True, (1, 16))])
    stored = json.loads(store.path.read_text())
    for broken in ({"rows": ["1", 16]}, {"rows": [1]}, {"why": "a reason beside rows"}, {"unknown": 1}, {"rows": None}):
        changed = stored | {"verdicts": [stored["verdicts"][0] | broken]}
        store.path.write_text(json.dumps(changed))
        assert store.read() == {}, broken


def test_a_folder_that_cannot_be_written_is_a_note(
    here: Callable[[str], None], load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here("HARNESS")
    monkeypatch.setattr(choose, "qualify_apart", lambda places, _: [quick(place) for place in places])
    (tmp_path / "cache").write_text("a file where the folder should be")
    [note] = load().notes[-1:]
    assert note.startswith("The kernels' verdicts could not be stored: ")


def quick(place: Any, why: str = "it is slower", agrees: bool = True) -> apart.Verdict:
    return apart.Verdict(apart.as_data(place), why, agrees)


def test_a_wrong_kernel_is_told_in_notes_statistics_and_stays_out(here: Callable[[str], None], load: Load) -> None:
    here("WRONG_ROW")
    pair = load()
    assert all(text.startswith("stock: error ") for text in pair.kernels.values())
    told = [note for note in pair.notes if "stock operations serve, since error " in note]
    assert len(told) == 5
    devices.WRONG_ROW.counts.clear()
    out = Session(pair).generate(PROMPT, max_tokens=6, draft_length=3)
    assert out.stats.kernels == pair.kernels
    assert devices.WRONG_ROW.counts == []


def test_a_hang_ends_in_stock_and_names_the_step(compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "STEP_SECONDS", 3.0)
    [verdict] = apart.qualify_apart([SLIDING], "faulty_devices:HANGS")
    assert verdict.why == "no answer within 3 s: first position, 1 rows"
    assert (verdict.agrees, verdict.rows) == (False, (1, 0))


def test_a_process_that_dies_costs_only_the_place_it_died_at(compiled: None) -> None:
    first, second = apart.qualify_apart([FUSED, SLIDING], "faulty_devices:DIES_LATER", repeats=1)
    assert first.why.startswith("the process ended (9) at rows of many sizes, 1 rows")
    assert (second.why, second.rows) == ("", (1, 16))


def test_the_last_words_of_a_process_that_dies_are_kept(compiled: None) -> None:
    [verdict] = apart.qualify_apart([SLIDING], "faulty_devices:DIES")
    assert verdict.why == "the process ended (7) at first position, 1 rows: the driver gave up"


def test_a_kernel_that_fails_at_load_only_does_not_serve(
    here: Callable[[str], None], load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    here("HANGS")
    monkeypatch.setattr(
        choose, "qualify_apart", lambda places, _: [apart.Verdict(apart.as_data(p), "", True, (1, 16)) for p in places]
    )
    monkeypatch.setattr(devices.HANGS, "run", lambda launch: 1 / 0)
    pair = load()
    assert all(text.startswith("stock: it was refused at load: division") for text in pair.kernels.values())
    assert sum("refused at load" in note for note in pair.notes) == 5


def test_ranges_and_places_that_differ_are_said(here: Callable[[str], None], load: Load, monkeypatch: Any) -> None:
    """The dispatcher looks at the rows of a call and at nothing else."""
    here("HARNESS")

    def made(places: Any, _: str) -> list[apart.Verdict]:
        rows = {TARGET_SLIDING: (3, 8), FEATURE: (1, 16)}
        return [
            apart.Verdict(apart.as_data(p), "" if p.name in rows else "it is slower", True, rows.get(p.name, (1, 0)))
            for p in places
        ]

    monkeypatch.setattr(choose, "qualify_apart", made)
    pair = load()
    assert pair.kernels["block_attention"] == (
        "metal at the target, sliding layers for 3 to 8 rows; stock at the target, full layers: it is slower; "
        "stock at the drafter: it is slower"
    )
    assert pair.kernels["feature_fusion"] == (
        "metal at the context feature; stock at the context keys and values: it is slower"
    )
    for length, launches in ((0, 0), (1, 0), (2, 3), (7, 3), (8, 0)):
        stream = Session(pair).stream_generate(PROMPT, max_tokens=40, draft_length=length)
        next(stream)
        devices.HARNESS.counts.clear()
        next(stream)
        found = [count.kernel for count in devices.HARNESS.counts]
        assert found.count("block_attention_chunks") == launches, length  # three of four layers slide
        stream.close()


def test_a_cache_of_8_bits_is_for_stock_and_says_so(here: Any, tmp_path: Path, monkeypatch: Any) -> None:
    here("HARNESS")
    monkeypatch.setattr(choose, "qualify_apart", lambda places, _: [quick(place) for place in places])
    folders = tiny_pair(tmp_path, **{**SIZES, "head_dim": 32})
    pair, stock = (dflash_mlx.load(*folders, kernels=kernels, kv_bits=8) for kernels in ("metal", "stock"))
    assert pair.kernels["block_attention"] == (
        "metal at the target, sliding layers; metal at the drafter; "
        "stock at the target, full layers: its cache is in 8 bits"
    )
    assert tokens(pair, draft_length=4) == tokens(stock, draft_length=4)


def test_metal_is_an_error_where_a_kernel_cannot_serve(
    here: Callable[[str], None], load: Load, monkeypatch: Any
) -> None:
    here("HARNESS")
    monkeypatch.setattr(choose, "qualify_apart", lambda places, _: [quick(p, "error 3 where 1", False) for p in places])
    with pytest.raises(InputError) as caught:
        load(kernels="metal")
    assert str(caught.value) == (
        "[load] kernels must be 'auto' or 'stock' but got 'metal'. "
        "The kernel for the target, sliding layers cannot serve: error 3 where 1."
    )


def test_metal_serves_where_kernels_agree_and_are_slower(
    here: Callable[[str], None], load: Load, monkeypatch: Any
) -> None:
    here("HARNESS")
    monkeypatch.setattr(choose, "qualify_apart", lambda places, _: [quick(place) for place in places])
    assert set(load(kernels="metal").kernels.values()) == {"metal"}
    assert set(load().kernels.values()) == {"stock: it is slower"}


def test_a_pair_of_two_float_types_is_served_by_stock(here: Callable[[str], None], tmp_path: Path) -> None:
    from tiny import tiny_specs, write_drafter, write_target

    here("HARNESS")
    target, drafter = tiny_specs(**SIZES)
    parts = write_target(tmp_path / "t", target, dtype="bfloat16"), write_drafter(tmp_path / "d", drafter)
    pair = dflash_mlx.load(parts[0], draft=parts[1])
    assert set(pair.kernels.values()) == {"stock: the pair's tensors are of several types (bfloat16, float32)"}


def test_without_metal_stock_serves_and_says_why(load: Load) -> None:
    if mx.metal.is_available():
        assert choose.device_here() == ("", "MLX's default device is the CPU")
    else:
        assert choose.device_here() == ("", "this machine has no Metal")
    why = choose.device_here()[1]
    pair = load()
    assert set(pair.kernels.values()) == {f"stock: {why}"}
    with pytest.raises(InputError) as caught:
        load(kernels="metal")
    assert str(caught.value) == f"[load] kernels must be 'auto' or 'stock' but got 'metal'. No kernel can run: {why}."


def test_doctor_qualifies_anew_and_gives_a_file_to_send(
    here: Callable[[str], None], folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    here("HARNESS")
    rows = [{"rows": 8, "context": 37, "kernel_s": 2e-6, "stock_s": 7e-6}]
    asked: list[str] = []

    def made(places: Any, _: str) -> list[apart.Verdict]:
        asked.extend(place.name for place in places)
        found = [apart.Verdict(apart.as_data(place), "", True, (1, 16), True, [], rows) for place in places]
        found[1] = quick(places[1], "error 3 where 1 is allowed", agrees=False)
        return found

    monkeypatch.setattr(choose, "qualify_apart", made)
    arguments = ("doctor", "--kernels", "--model", str(folders[0]), "--draft", str(folders[1]))
    for turn in (1, 2):
        result = run(*arguments, "--json")
        report = json.loads(result.stdout)
        assert len(asked) == 5 * turn  # whatever is stored
    assert result.exit_code == 1
    assert [verdict["rows"] for verdict in report["verdicts"][str(folders[0])]] == [[1, 16], [1, 0], *[[1, 16]] * 3]
    assert report["problems"][0]["what"].endswith("Please report the output of 'dflash-mlx doctor --kernels --json'.")
    assert {"block_attention.metal", "feature_fusion.metal", "qualify.py"} <= report["sources"].keys()
    assert report["machine"].keys() >= {"system", "chip", "gpu_cores", "memory_bytes"}
    text = run(*arguments).stdout
    assert "  target, sliding layers (float32): metal for 1 to 16 rows\n" in text
    assert "     8 rows at position 37: kernel 2 µs, stock 7 µs\n" in text
    assert "  target, full layers (float32): stock: error 3 where 1 is allowed\n" in text


def test_doctor_says_why_no_kernel_was_tried() -> None:
    result = run("doctor", "--kernels")
    assert result.exit_code == 0
    assert result.stdout.endswith(f"No kernel was tried: {choose.device_here()[1]}. Stock operations serve.\n")


def test_doctor_tries_the_shapes_of_the_published_pair() -> None:
    """Numbers of the published configs: 39 sliding and 13 full layers of 32 heads, a drafter of 5 layers and 5 taps."""
    sliding, full, drafter, feature, context = published_places()
    assert isinstance(sliding, AttentionPlace)
    assert isinstance(full, AttentionPlace)
    assert (sliding.layers, sliding.heads, sliding.kv_heads, sliding.size) == (39, 32, 2, 128)
    assert (sliding.span, sliding.capacity, sliding.causal) == (2048, 4096, True)
    assert (full.layers, full.capacity) == (13, 16384)
    assert isinstance(drafter, AttentionPlace)
    assert (drafter.span, drafter.kv_heads, drafter.causal, drafter.layers) == (2049, 8, False, 5)
    assert feature == FeaturePlace(FEATURE, "bfloat16", 5, 6656, 4, 64, 1e-5)
    assert (context.operation, context.dtype) == ("feature_fusion", "bfloat16")
