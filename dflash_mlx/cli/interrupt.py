"""Ctrl-C while text is generated: the first asks the round to finish, the second stops at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """Counts Ctrl-C inside a ``with`` block.

    The first press only sets `asked`, so that no round is cut in the middle and what was generated is complete;
    the second raises ``KeyboardInterrupt``, for the case that nobody looks at `asked` any more.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        # Python lets the main thread alone set handlers; elsewhere an interrupt is not ours to catch.
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def raise_if_asked(self) -> None:
        """Raise ``KeyboardInterrupt`` where a press was seen: for callbacks that have no other way to stop."""
        if self.asked:
            raise KeyboardInterrupt

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
