"""The host waits for the device once per round and once per prefill step, and everything that waits is counted."""

from __future__ import annotations

import ast
import math
import sys
from collections import Counter
from pathlib import Path

import grids
import mlx.core as mx
import pytest

import dflash_mlx
from dflash_mlx import Session
from dflash_mlx.cache import Part
from dflash_mlx.processors import Guide

PACKAGE = Path(dflash_mlx.__file__).parent
# The modules that a round runs through: in them nobody waits but the one function that counts.
ON_THE_PATH = (
    "round.py", "state.py", "prefill.py", "stream.py", "session.py", "choice.py", "cache.py", "rows.py", "output.py",
    "text.py", "checkpoint.py", "noise.py", "filters.py", "processors.py", "slots.py", "models/dflash.py",
    "models/dflash2.py", "models/muse_glimmer.py", "models/layers.py", "kernels/serving.py",
    "kernels/block_attention.py", "kernels/launch.py", "kernels/feature_fusion.py",
)  # fmt: skip
READER = {("state.py", "HostReads.read", "mx.eval"), ("state.py", "HostReads.read", ".tolist")}
ON_HOST = {("processors.py", "Processors._tokens", "np.array")}  # of a history that is on the host already
METHODS = {"item", "tolist", "__array__", "__bool__", "__float__", "__int__"}  # of an array: each waits for it
MODULES = {"mx": {"eval", "synchronize"}, "np": {"array", "asarray", "asanyarray"}}


class Waits:
    """Counts what makes the host wait: evaluations asked for, and values read out of arrays that were not evaluated."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.evaluations = 0
        self.values = Counter()
        evaluate = mx.eval

        def counted(*arrays):
            self.evaluations += 1
            evaluate(*arrays)

        monkeypatch.setattr(mx, "eval", counted)
        for name in METHODS:
            monkeypatch.setattr(mx.array, name, self._counting(name, getattr(mx.array, name)))

    def _counting(self, name, method):
        def counted(array, *args, **kwargs):
            caller = Path(sys._getframe(1).f_code.co_filename).name
            self.values[name, caller] += 1
            return method(array, *args, **kwargs)

        return counted


@pytest.fixture
def waits(monkeypatch):
    grids.pair("window 11")  # loading waits too, and is not what is counted
    return Waits(monkeypatch)


def test_the_counter_sees_every_way_to_wait(waits):
    """The instrument first: each of these is one wait."""
    mx.eval(mx.ones(3))
    assert waits.evaluations == 1
    for wait in (lambda a: a.item(), lambda a: a.tolist(), bool, float, int, lambda a: 1 if a else 0):
        before = waits.values.total()
        wait(mx.ones(()) + 1)
        assert waits.values.total() == before + 1


@pytest.mark.parametrize("length", [0, 1, 4, 15])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 3}])
def test_a_round_evaluates_once_and_a_prefill_step_once(length, options, waits):
    """Counted here and apart from the runtime; its own statistic says the same."""
    pair, prompt = grids.pair("window 11"), grids.prompts("window 11")["5 windows"]
    session = Session(pair)
    out = session.generate(prompt, max_tokens=30, draft_length=length, prefill_step_size=10, **options)
    steps = math.ceil(len(prompt) / 10)
    assert waits.evaluations == steps + len(out.stats.rounds)
    assert out.stats.syncs == waits.evaluations
    assert {name for name, _ in waits.values} <= {"tolist"}
    assert waits.values.total() <= waits.evaluations
    waits.evaluations = 0
    again = session.generate([*session.tokens, 5], max_tokens=6, draft_length=length, **options)
    assert again.stats.syncs == waits.evaluations == 1 + len(again.stats.rounds)


def test_no_round_of_changing_lengths_waits_twice(waits):
    prompt = grids.prompts("window 11")["window"]
    done = grids.drive(grids.pair("window 11"), prompt, grids.schedule("falling and rising"), 60)
    assert waits.evaluations == done.reads == 1 + len(done.rounds)


@pytest.mark.parametrize("length", [0, 4])
def test_only_a_users_processor_costs_a_second_read(length, waits):
    """The host shows it the drafts, so it reads them first; a plain step has none to show."""
    prompt, seen = grids.prompts("window 11")["window"], []

    def processor(tokens, logits):
        seen.append(tokens.shape[0])
        return logits

    out = Session(grids.pair("window 11")).generate(
        prompt, max_tokens=20, draft_length=length, logits_processors=[processor]
    )
    drafted = sum(round_.drafted > 0 for round_ in out.stats.rounds)
    assert seen
    assert (drafted > 0) == (length > 0)
    assert out.stats.syncs == waits.evaluations == 1 + len(out.stats.rounds) + drafted
    assert {name for name, _ in waits.values} <= {"tolist"}


def test_a_second_wait_in_a_round_would_be_noticed(waits, monkeypatch):
    """A forward that looks at its own logits: the count above is not the sum that it should be any more."""
    pair, prompt = grids.pair("window 11"), grids.prompts("window 11")["window"]

    class Nosy:
        config, embed_tokens, head = pair.target.config, pair.target.embed_tokens, pair.target.head

        def __call__(self, tokens, parts, taps=()):
            forward = pair.target(tokens, parts, taps)
            mx.eval(forward.logits)
            return forward

    nosy = grids.replace(pair, target=Nosy())
    out = Session(nosy).generate(prompt, max_tokens=10, draft_length=3)
    assert waits.evaluations == 2 * out.stats.syncs


class Likeliest(Guide):
    """Allows all, and proposes what the drafter likes most."""

    def __call__(self, tokens, logits):
        return logits

    def choose(self, history, candidates):
        return [row[0] for row in candidates]


def test_what_a_guide_reads_is_counted(waits):
    """The candidates, then the drafts, then the round."""
    prompt, options = grids.prompts("window 11")["window"], {"max_tokens": 20, "draft_length": 4}
    out = Session(grids.pair("window 11")).generate(prompt, logits_processors=[Likeliest()], **options)
    drafted = sum(round_.drafted > 0 for round_ in out.stats.rounds)
    assert drafted > 3
    assert out.stats.syncs == waits.evaluations == 1 + len(out.stats.rounds) + 2 * drafted
    assert {name for name, _ in waits.values} <= {"tolist"}
    assert waits.values.total() <= waits.evaluations
    free = Session(grids.pair("window 11")).generate(prompt, **options)
    assert [r.proposal for r in out.stats.rounds] == [r.proposal for r in free.stats.rounds]


def test_nothing_is_left_to_compute_after_a_round():
    """All caches were evaluated with the read: their arrays are there without any further work."""
    pair, prompt = grids.pair("window 11"), grids.prompts("window 11")["window"]
    state = grids.drive(pair, prompt, grids.schedule(4)).state
    before = mx.get_active_memory()
    mx.eval(state.arrays)
    assert mx.get_active_memory() == before
    state.project_backlog()
    forward = pair.target(mx.array([1], mx.uint32), [Part(state.cache, 1, 1)])
    mx.eval(forward.logits)


def calls_of(path: Path) -> list[tuple[str, str]]:
    """Calls that could make the host wait, as (function that holds them, what is called)."""
    found = []

    def visit(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                visit(child, f"{name}.{child.name}".lstrip("."))
                continue
            if isinstance(child, ast.Call):
                called = child.func
                if isinstance(called, ast.Attribute):
                    owner = called.value.id if isinstance(called.value, ast.Name) else ""
                    if called.attr in METHODS:
                        found.append((name, f".{called.attr}"))
                    elif called.attr in MODULES.get(owner, ()):
                        found.append((name, f"{owner}.{called.attr}"))
                elif isinstance(called, ast.Name) and called.id in ("bool", "float") and child.args:
                    found.append((name, called.id))
            visit(child, name)

    visit(ast.parse(path.read_text()), "")
    return found


def test_only_the_counted_reader_waits_on_the_path_of_a_round():
    found = {(name, *call) for name in ON_THE_PATH for call in calls_of(PACKAGE / name)}
    assert found - ON_HOST == READER


def test_the_scan_finds_calls_in_methods_and_nested_functions(tmp_path):
    code = "class A:\n    def f(self, x):\n        def g():\n            return bool(x), x[0].item(), np.array(x)"
    (tmp_path / "a.py").write_text(code)
    assert sorted(calls_of(tmp_path / "a.py")) == [("A.f.g", ".item"), ("A.f.g", "bool"), ("A.f.g", "np.array")]


def test_every_module_that_a_round_runs_through_is_scanned():
    """Files of the package that ran during a generation, seen by a profiler: none of them is missing above."""
    ran = set()

    def profile(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if PACKAGE in path.parents:
            ran.add(path.relative_to(PACKAGE).as_posix())

    pair, prompt = grids.pair("window 11"), grids.prompts("window 11")["window"]
    sys.setprofile(profile)
    try:
        grids.drive(pair, prompt, grids.schedule(3), 8)
        Session(pair).generate(prompt, max_tokens=8, draft_length=3, temperature=0.5)
    finally:
        sys.setprofile(None)
    silent = {
        "config.py",
        "drafter_config.py",
        "pair.py",
        "options.py",
        "stats.py",
        "draft_length.py",
        "errors.py",
        "__init__.py",
    }
    assert ran - silent <= set(ON_THE_PATH)
