"""Qualifies a kernel on this machine: agreement with the exact result, then time, then the rows it may serve.

Two rules. A kernel agrees where its error is at most twice the stock operation's, both against float64. It serves where
it is not slower, in chains in which each call needs the last one's result and takes the next layer's buffers: one
buffer again and again would time the processor's caches.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from .launch import Device
from .serving import Range

ROWS = (1, 2, 4, 6, 8, 12, 16)  # numbers of rows that are timed
WARM_UPS, REPEATS = 1, 5
ONE_COUNT_MAY_LOSE = 1.10  # of the stock time, where all rows together win: one law for all rows is worth that
# The least error that counts, in units in the last place of the largest value: sums of 128 products and of
# some thousand keys in float32, the rounding of the result in the half types.
FLOOR = {"float32": 32 * 2.0**-23, "float16": 2.0**-11, "bfloat16": 2.0**-8}
Say = Callable[[str], None]


class TrialDevice(Device, Protocol):
    """A device with the clock that its trials are timed with."""

    def clock(self) -> float:
        """Seconds from some moment on."""
        ...


class Case(NamedTuple):
    """One comparison.

    Attributes:
        name: what is special about it.
        rows: of the call.
        kernel, stock: give the two results, lazy.
        exact: the result in float64.
        alone: gives the kernel's result for one row of it as a call of its own, or `None` where there is none.
    """

    name: str
    rows: int
    kernel: Callable[[], mx.array]
    stock: Callable[[], mx.array]
    exact: Callable[[], np.ndarray]
    alone: Callable[[int], mx.array] | None = None


class Trial(Protocol):
    """What is tried at one place."""

    dtype: str
    contexts: Sequence[int]

    def cases(self, device: Device) -> Iterator[Case]:
        """All comparisons."""
        ...

    def chain(self, rows: int, context: int, device: Device | None) -> list[mx.array]:
        """A chain of calls, lazy: with the kernel on a device, or with stock operations (None)."""
        ...

    def warm(self, device: Device) -> mx.array:
        """A small call that makes the place's pipelines, lazy."""
        ...


@dataclass
class Verdict:
    """What was found at one place.

    Attributes:
        place: as data.
        why: why stock operations serve, or "" where the kernel serves some rows.
        agrees: whether the kernel passed all comparisons.
        rows: numbers of rows that the kernel serves, both ends included; first above last: none.
        row_bits_equal: whether a row had the same bits alone and among others; `None` where it was not compared.
        errors: per comparison: case, rows, error, stock_error, allowed; `None` for infinity.
        times: per number of rows and context: kernel_s, stock_s of one call.
    """

    place: dict[str, Any]
    why: str = ""
    agrees: bool = False
    rows: Range = (1, 0)
    row_bits_equal: bool | None = None
    errors: list[dict[str, Any]] = field(default_factory=list)
    times: list[dict[str, Any]] = field(default_factory=list)

    def as_data(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Verdict:
        """The verdict that `as_data` wrote.

        Raises:
            TypeError, ValueError: it is another thing.
        """
        verdict = cls(**data)
        first, last = verdict.rows
        if not (isinstance(first, int) and isinstance(last, int) and isinstance(verdict.why, str)):
            raise ValueError("rows are two integers, why is a text")
        if not isinstance(verdict.place, dict) or (first > last) != bool(verdict.why):
            raise ValueError("a verdict without a place, or without a reason")
        verdict.rows = (first, last)
        return verdict


def qualify(place: dict[str, Any], trial: Trial, device: TrialDevice, say: Say, repeats: int = REPEATS) -> Verdict:
    """Compare, time and judge one place; whatever goes wrong becomes the verdict's reason.

    Args:
        place: as data, for the verdict.
        trial: makes the calls.
        device: where the kernel runs.
        say: is told what comes next, so that a hang can be named.
        repeats: of each timed chain.
    """
    verdict = Verdict(place)
    try:
        verdict.why = _compare(trial, device, say, verdict)
        if not verdict.why:
            verdict.agrees = True
            _time(trial, device, say, verdict, repeats)
            verdict.rows = best_range(verdict.times)
            if verdict.rows[0] > verdict.rows[1]:
                verdict.why = slower(verdict.times)
    except Exception as error:  # a compiler, a pipeline or a driver that refuses: each has errors of its own
        lines = str(error).strip().splitlines() or [type(error).__name__]
        verdict.why, verdict.rows = f"it was refused: {lines[0]}", (1, 0)
    return verdict


def _compare(trial: Trial, device: TrialDevice, say: Say, verdict: Verdict) -> str:
    """Run all comparisons; gives the first reason against the kernel, or ""."""
    for case in trial.cases(device):
        say(f"{case.name}, {case.rows} rows")
        exact = case.exact()
        output = case.kernel()
        error, stock = (_error(result, exact) for result in (output, case.stock()))
        largest = max(1.0, float(np.abs(exact).max()))
        allowed = 2 * max(stock, FLOOR[trial.dtype] * largest)
        numbers = {"error": error, "stock_error": stock, "allowed": allowed}
        finite = {
            name: value if np.isfinite(value) else None for name, value in numbers.items()
        }  # JSON has no infinity
        verdict.errors.append({"case": case.name, "rows": case.rows, **finite})
        if error == float("inf"):
            return f"NaN or infinity at {case.name}, {case.rows} rows"
        if not error <= allowed:
            return f"error {error:.2g} where {allowed:.2g} is allowed, at {case.name}, {case.rows} rows"
        if case.alone is not None:
            equal = _rows_equal(case, output)
            verdict.row_bits_equal = equal and verdict.row_bits_equal is not False
    return ""


def _error(result: mx.array, exact: np.ndarray) -> float:
    """The largest difference; infinite where a value is no number."""
    given = np.array(result.astype(mx.float32)).astype(np.float64)
    return float(np.abs(given - exact).max()) if np.isfinite(given).all() else float("inf")


def _rows_equal(case: Case, output: mx.array) -> bool:
    """Whether the case's first, middle and last rows have the bits that they have alone."""
    assert case.alone is not None
    rows = sorted({0, case.rows // 2, case.rows - 1})
    return all(bool(mx.array_equal(case.alone(row), output[..., row : row + 1, :])) for row in rows)


def _time(trial: Trial, device: TrialDevice, say: Say, verdict: Verdict, repeats: int) -> None:
    """Time both in turn; a sample is the evaluation of a chain that was built before."""
    for context in trial.contexts:
        for rows in ROWS:
            say(f"timing, {rows} rows, context {context}")
            samples: tuple[list[float], list[float]] = ([], [])
            for turn in range(WARM_UPS + repeats):
                for kept, chosen in zip(samples, (device, None), strict=True):
                    links = trial.chain(rows, context, chosen)
                    started = device.clock()
                    mx.eval(links[-1])
                    if turn >= WARM_UPS:
                        kept.append((device.clock() - started) / len(links))
            kernel, stock = (statistics.median(kept) for kept in samples)
            verdict.times.append({"rows": rows, "context": context, "kernel_s": kernel, "stock_s": stock})


def best_range(times: Sequence[dict[str, Any]]) -> Range:
    """The numbers of rows that the kernel serves: all, if it wins by the sum and loses nowhere by much; else the
    neighbouring ones with the largest gain, among those where it is not slower.
    """
    sums = {rows: _sums(times, rows) for rows in ROWS}
    kernel, stock = (sum(pair[i] for pair in sums.values()) for i in (0, 1))
    if kernel <= stock and all(mine <= ONE_COUNT_MAY_LOSE * theirs for mine, theirs in sums.values()):
        return ROWS[0], ROWS[-1]
    best, most = (1, 0), (0.0, 0)
    for begin in range(len(ROWS)):
        for end in range(begin + 1, len(ROWS) + 1):
            part = [sums[rows] for rows in ROWS[begin:end]]
            gain = (sum(theirs - mine for mine, theirs in part), end - begin)
            if gain[0] > 0 and gain > most and all(mine <= theirs for mine, theirs in part):
                best, most = (ROWS[begin], ROWS[end - 1]), gain
    return best


def slower(times: Sequence[dict[str, Any]]) -> str:
    """Say by how much the kernel is slower, at the number of rows where it does best."""
    rows = min(ROWS, key=lambda count: _sums(times, count)[0] / max(_sums(times, count)[1], 1e-12))
    mine, theirs = _sums(times, rows)
    return f"it is slower: {mine * 1e3:.3g} ms against {theirs * 1e3:.3g} at {rows} rows, where it does best"


def _sums(times: Sequence[dict[str, Any]], rows: int) -> tuple[float, float]:
    """Seconds of kernel and stock for one number of rows, over all contexts."""
    chosen = [entry for entry in times if entry["rows"] == rows]
    return sum(entry["kernel_s"] for entry in chosen), sum(entry["stock_s"] for entry in chosen)
