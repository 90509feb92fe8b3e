"""The errors that the library raises: one base and its few kinds.

Every message has the form ``[where] name must be <expected> but got <value>. <What to do>.``
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .stats import Generation


class DFlashError(Exception):
    """Base of all errors of this package.

    Attributes:
        partial: what had been generated before the failure, or ``None``.
    """

    partial: Generation | None = None


class InputError(DFlashError, ValueError):
    """An option, a prompt or a path that the caller has to change."""


class CheckpointError(DFlashError, ValueError):
    """A config, a tensor or a file of a checkpoint that cannot be used as it is."""


class SessionFileError(InputError):
    """A session's file that is damaged, of another version or of another model; or one that cannot be written."""


class MemoryPlanError(InputError):
    """The memory plan does not fit the machine or ``max_memory``."""


class ProcessorError(DFlashError):
    """A user's logits processor raised, or returned something that is no row of logits."""


class EngineError(DFlashError):
    """A step of an engine failed under a request: the device, a tokenizer, a callback; the cause is attached."""


class EngineClosed(DFlashError):
    """An engine that was closed takes no more requests."""


class QueueFull(DFlashError):
    """As many requests wait as may.

    Attributes:
        retry_after_s: seconds until a place is likely free.
    """

    def __init__(self, text: str, retry_after_s: float):
        super().__init__(text)
        self.retry_after_s = retry_after_s


def must(where: str, name: str, expected: str, value: object, todo: str) -> str:
    """Format the one form that all messages have."""
    return f"[{where}] {name} must be {expected} but got {value}. {todo}"


def one_of(values: Iterable[object]) -> str:
    """What is expected where there are only these."""
    return f"one of {', '.join(map(str, values))}"


def check_characters(name: str, text: str) -> None:
    """A text for a model is Unicode: JSON can spell half a character ("\\ud800"), which no tokenizer takes.

    Raises:
        InputError: it is not.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        found = f"the half character {text[error.start]!r}"
        raise InputError(must("generate", name, "Unicode text", found, "Correct the text.")) from error
