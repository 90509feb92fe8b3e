"""Qualifies kernels in a process of its own, so that one that hangs or dies takes nothing with it.

A GPU that waits for itself cannot be called back from within a process: the other process gets a time for each step,
and is ended when it needs longer.
"""

from __future__ import annotations

import importlib
import json
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

import mlx.core as mx

from .fusion_trials import ContextTrial, FeatureTrial
from .places import AttentionPlace, FeaturePlace, Place, as_data, from_data
from .qualify import REPEATS, Trial, TrialDevice, Verdict, qualify
from .trials import AttentionTrial

START_SECONDS = 60.0  # for the other process to begin
STEP_SECONDS = 60.0  # for one comparison, or for timing one number of rows; a pipeline is compiled in the first
METAL_DEVICE = "dflash_mlx.kernels.launch:METAL"
# Nothing but the path is needed to find this package: `python -c` runs no code of the user's program.
BEGIN = """
import json, sys
request = json.load(sys.stdin)
sys.path[:] = request["path"]
from dflash_mlx.kernels.apart import answer
answer(request)
"""


def qualify_apart(places: Sequence[Place], device: str = METAL_DEVICE, repeats: int = REPEATS) -> list[Verdict]:
    """Give a verdict for each place, in order.

    Args:
        places: what to try.
        device: "module:name" of the device, for the other process.
        repeats: of each timed chain.
    """
    verdicts: list[Verdict] = []
    while len(verdicts) < len(places):
        # A process that ended early leaves the rest to the next one.
        verdicts += _one_process([as_data(place) for place in places[len(verdicts) :]], device, repeats)
    return verdicts


def trial_of(place: Place) -> Trial:
    """What is tried at a place."""
    if isinstance(place, AttentionPlace):
        return AttentionTrial(place)
    return FeatureTrial(place) if isinstance(place, FeaturePlace) else ContextTrial(place)


def load_device(name: str) -> TrialDevice:
    """The device "module:name"."""
    module, _, attribute = name.partition(":")
    found: TrialDevice = getattr(importlib.import_module(module), attribute)
    return found


def answer(request: Mapping[str, Any]) -> None:
    """In the other process: qualify the request's places, with a line of JSON before each step and for each verdict."""
    out, sys.stdout = sys.stdout, sys.stderr  # what else is printed here must not look like an answer

    def tell(**line: Any) -> None:
        print(json.dumps(line), file=out, flush=True)

    mx.set_default_device(mx.cpu if request["mlx_device"] == "cpu" else mx.gpu)
    device = load_device(request["device"])
    for data in request["places"]:
        trial = trial_of(from_data(data))
        tell(verdict=qualify(data, trial, device, lambda step: tell(step=step), request["repeats"]).as_data())


def _one_process(places: list[dict[str, Any]], device: str, repeats: int) -> list[Verdict]:
    """Run one process until it has judged all places, or fails at one: its verdict says how."""
    mlx_device = mx.default_device().type.name
    request = {"path": sys.path, "mlx_device": mlx_device, "device": device, "places": places, "repeats": repeats}
    verdicts: list[Verdict] = []
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", BEGIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            lines = _lines(process)
            _give(process, json.dumps(request))
            step, seconds = "its start", START_SECONDS
            while len(verdicts) < len(places):
                try:
                    line = lines.get(timeout=seconds)
                except queue.Empty:
                    why = f"no answer within {seconds:g} s: {step}"
                    break
                if line is None:
                    why = f"the process ended ({process.wait()}) at {step}: {_last_line(errors)}"
                    break
                said, seconds = json.loads(line), STEP_SECONDS
                step = said.get("step", "the next place")
                if "verdict" in said:
                    verdicts.append(Verdict.from_data(said["verdict"]))
            else:
                return verdicts
        finally:
            process.kill()
    return [*verdicts, Verdict(places[len(verdicts)], why)]


def _lines(process: subprocess.Popen[str]) -> queue.Queue[str | None]:
    """The lines that a process prints, as they come, then `None`; a thread reads them, so that waiting can end."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read(out: IO[str]) -> None:
        for line in out:
            lines.put(line)
        lines.put(None)

    assert process.stdout is not None
    threading.Thread(target=read, args=(process.stdout,), daemon=True).start()
    return lines


def _give(process: subprocess.Popen[str], text: str) -> None:
    """Write a process's input; one that has gone already is noticed by what it does not print."""
    assert process.stdin is not None
    try:
        with process.stdin as file:
            file.write(text)
    except BrokenPipeError:
        pass


def _last_line(errors: IO[str]) -> str:
    """The last line that a process wrote to stderr."""
    errors.seek(0)
    lines = errors.read().strip().splitlines()
    return lines[-1] if lines else "nothing on stderr"
