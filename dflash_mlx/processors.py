"""A user's logits processors, `f(tokens [N], logits [1, V]) -> [1, V]` as in mlx-lm, over the rows of a block.

Row i sees the history with the drafts before it. Plain decoding shows a processor only histories that come true; a
block shows others too, whose drafts are rejected. So a failure counts only where the row is reached: until then it
is a code in the place of the row's token, and the round hands out what comes before it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from .errors import ProcessorError, must

if TYPE_CHECKING:
    from .options import LogitsProcessor

TODO = "Mend the processor."


class Guide(ABC):
    """A processor that also picks what is drafted: what it would forbid the target need not be proposed."""

    @abstractmethod
    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """As any processor."""

    @abstractmethod
    def choose(self, history: Sequence[int], candidates: Sequence[Sequence[int]]) -> list[int]:
        """The proposal.

        Args:
            history: the committed tokens.
            candidates: for each drafted row its likeliest tokens, the likeliest first.
        Returns:
            One token for each row; any choice is lossless.
        """


class Processors:
    """The processors of one generation.

    Args:
        functions: the user's.
    """

    def __init__(self, functions: Sequence[LogitsProcessor]):
        self._functions = functions
        self._history = array("I")  # grows with the generation: a long history is not converted again every round
        # One failure per processor for rows without a token to choose; those that raise are added as they come.
        self._unusable = [
            ProcessorError(must("generate", _name(functions, i), "returning logits to choose from", UNUSABLE, TODO))
            for i in range(len(functions))
        ]
        self._failures = self._unusable

    def __len__(self) -> int:
        return len(self._functions)

    def __call__(self, logits: mx.array, history: Sequence[int], drafted: mx.array | None) -> tuple[mx.array, mx.array]:
        """Process the rows one after the other: that is what a processor's signature asks for.

        Args:
            logits: [M, V] float32.
            history: the committed tokens.
            drafted: [M-1] tokens; row i sees the first i of them.
        Returns:
            logits [M, V] float32, and per row 0 or the code of a failure, [M] uint32; nothing is evaluated here.
        """
        tokens = self._tokens(history, drafted)
        self._failures = list(self._unusable)
        rows, codes = [], []
        for row in range(logits.shape[0]):
            try:
                processed, code = self._row(tokens[: len(history) + row], logits[row : row + 1])
            except ProcessorError as error:  # what lies behind this row would have to be decided first
                self._failures.append(error)
                rows.append(logits[row:])
                codes.append(mx.full((logits.shape[0] - row,), len(self._failures), dtype=mx.uint32))
                break
            rows.append(processed)
            codes.append(code)
        return mx.concatenate(rows), mx.concatenate(codes)

    def failure(self, code: int) -> ProcessorError:
        """The error of a code from the newest call."""
        return self._failures[code - 1]

    def _tokens(self, history: Sequence[int], drafted: mx.array | None) -> mx.array:
        self._history.extend(history[len(self._history) :])
        tokens = mx.array(np.array(self._history, dtype=np.uint32))
        return tokens if drafted is None else mx.concatenate([tokens, drafted])

    def _row(self, tokens: mx.array, logits: mx.array) -> tuple[mx.array, mx.array]:
        """One row [1, V] through all processors, and its code [1]: the first that left nothing to choose from."""
        code = mx.zeros((1,), dtype=mx.uint32)
        for number, function in enumerate(self._functions):
            name = _name(self._functions, number)
            try:
                result: Any = function(tokens, logits)
            except Exception as error:
                text = must("generate", name, "a function that returns logits", f"a {_shown(error)}", TODO)
                raise ProcessorError(text) from error
            if not isinstance(result, mx.array) or result.shape != logits.shape:
                found = f"shape {list(result.shape)}" if isinstance(result, mx.array) else type(result).__name__
                expected = f"returning logits of shape {list(logits.shape)}"
                raise ProcessorError(must("generate", name, expected, found, TODO))
            logits = result.astype(mx.float32)
            unusable = ~mx.all(logits < mx.inf) | ~mx.any(logits > -mx.inf)
            code = mx.where((code == 0) & unusable, mx.array(number + 1, dtype=mx.uint32), code)
        return logits, code


UNUSABLE = "NaN, +inf, or -inf for every token"


def _name(functions: Sequence[LogitsProcessor], number: int) -> str:
    """How an error calls a processor: its place and its name."""
    function: Any = functions[number]
    while isinstance(function, partial):
        function = function.func
    return f"logits_processors[{number}] ({getattr(function, '__name__', type(function).__name__)})"


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
