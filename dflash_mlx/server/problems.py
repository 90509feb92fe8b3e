"""What goes wrong with a request, in the shape that OpenAI's clients read."""

from __future__ import annotations

import math
from typing import Any

from ..errors import EngineClosed, InputError, MemoryPlanError, QueueFull, must

BAD_REQUEST = "invalid_request_error"


class ApiError(Exception):
    """A request that is answered with an error.

    Args:
        status: of HTTP.
        message: for the user.
        param: the parameter at fault.
        code: a short name for programs.
        headers: of the reply.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers or {}

    def body(self) -> dict[str, Any]:
        """The JSON of the reply."""
        kind = "rate_limit_error" if self.status == 429 else "server_error" if self.status >= 500 else BAD_REQUEST
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def bad(name: str, expected: str, value: object, todo: str = "Correct the parameter.") -> ApiError:
    """The error of a parameter."""
    shown = repr(value)
    shown = shown if len(shown) <= 200 else shown[:200] + "…"
    return ApiError(400, must("server", name, expected, shown, todo), param=name, code="invalid_value")


def api_error(error: BaseException) -> ApiError:
    """The reply to an error of the library; what it does not expect is told without its insides."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        seconds = str(max(1, math.ceil(error.retry_after_s)))
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": seconds})
    if isinstance(error, EngineClosed):
        return ApiError(503, str(error), code="shutting_down")
    if isinstance(error, MemoryPlanError):
        return ApiError(400, str(error), code="memory_exceeded")
    if isinstance(error, InputError):
        return ApiError(400, str(error), code="invalid_value")
    if isinstance(error, RecursionError):
        return ApiError(400, must("server", "the request", "less deeply nested", "more", "Flatten it."))
    return ApiError(500, f"[server] the request failed: {type(error).__name__}. The server's log has the rest.")
