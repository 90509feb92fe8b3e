"""The routes: who may ask, how large a request may be, and what happens when a client goes away."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from ..errors import must
from .hosts import is_loopback
from .metrics import metrics_text
from .problems import ApiError, api_error
from .replies import Reply, event
from .schema import Asked, read_chat, read_completion
from .worker import Choice, Service, merged

LOG = logging.getLogger("dflash_mlx.server")
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Limits:
    """Who may ask, and how much.

    Attributes:
        api_key: that requests have to show; `None` for none, on loopback alone.
        body_bytes: most bytes of a request.
        origins: of web pages that may ask (CORS).
    """

    api_key: str | None = None
    body_bytes: int = 32 * 2**20
    origins: tuple[str, ...] = ()


class Api:
    """The handlers of one server."""

    def __init__(self, service: Service, limits: Limits):
        self.service, self.limits = service, limits

    def app(self) -> Starlette:
        """The application, for any ASGI server."""
        routes = [
            Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
            Route("/v1/completions", self._guarded(self._completions), methods=["POST"]),
            Route("/v1/models", self._guarded(self._models)),
            Route("/v1/models/{name:path}", self._guarded(self._model)),
            Route("/metrics", self._guarded(self._metrics)),
            Route("/health", self._health),
        ]
        cors = Middleware(
            CORSMiddleware, allow_origins=self.limits.origins, allow_methods=["GET", "POST"], allow_headers=["*"]
        )
        app = Starlette(routes=routes, middleware=[cors] if self.limits.origins else [])
        app.add_exception_handler(HTTPException, _http_error)
        app.add_exception_handler(Exception, _http_error)
        return app

    def _guarded(self, handler: Handler) -> Handler:
        """Only for those who may ask; errors in OpenAI's shape."""

        async def guarded(request: Request) -> Response:
            try:
                self._admit(request)
                return await handler(request)
            except Exception as error:
                return error_reply(error)

        return guarded

    def _admit(self, request: Request) -> None:
        """Check the key; without one, that no web page asks under another name (DNS rebinding)."""
        key = self.limits.api_key
        if key is not None:
            shown = request.headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(shown.encode(), key.encode()):
                text = must(
                    "server", "the API key", "the server's", "another or none", "Send Authorization: Bearer KEY."
                )
                raise ApiError(401, text, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        elif not is_loopback(request.url.hostname):
            todo = "Ask http://127.0.0.1, or start the server with --api-key."
            text = must("server", "the Host header", "this machine's own name", repr(request.url.hostname), todo)
            raise ApiError(403, text, code="wrong_host")

    async def _body(self, request: Request) -> Any:
        """The request's JSON, no larger than may be."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # a web page can send other kinds anywhere without asking first
            text = must("server", "Content-Type", "application/json", repr(kind), "Set the header.")
            raise ApiError(415, text, code="wrong_content_type")
        most, pieces, size = self.limits.body_bytes, [], 0
        async for piece in request.stream():
            size += len(piece)
            if size > most:
                text = must("server", "the body", f"at most {most} bytes", f"more ({size} and on)", "Send less.")
                raise ApiError(413, text, code="body_too_large")
            pieces.append(piece)
        try:
            return json.loads(b"".join(pieces))
        except (ValueError, RecursionError) as error:
            text = must("server", "the body", "JSON", f"something else ({error})", "Correct it.")
            raise ApiError(400, text, code="invalid_json") from error

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, read_chat(await self._body(request)))

    async def _completions(self, request: Request) -> Response:
        return await self._answer(request, read_completion(await self._body(request)))

    async def _answer(self, request: Request, asked: Asked) -> Response:
        choices = await asyncio.to_thread(self.service.choices, asked)
        reply = Reply(asked, self.service.pair.tokenizer)
        if asked.stream:
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            return StreamingResponse(self._events(choices, reply), media_type="text/event-stream", headers=headers)
        try:
            parts = await _unless_gone(request, _collected(choices))
        finally:
            self.service.done(choices)
        return Response(status_code=499) if parts is None else JSONResponse(reply.whole(choices, parts))

    async def _events(self, choices: Sequence[Choice], reply: Reply) -> AsyncIterator[str]:
        """The stream; when its client goes away, this is cancelled and the places are free."""
        try:
            if reply.chat:
                for choice in choices:
                    yield event(reply.first(choice))
            async for part in merged(choices):
                for chunk in reply.chunks(part):
                    yield event(chunk)
            yield event(reply.last(choices))
        except Exception as error:
            yield event(_logged(error).body())
        finally:
            self.service.done(choices)
        yield event("[DONE]")

    async def _models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _model(self, request: Request) -> Response:
        if request.path_params["name"] != self.service.name:
            text = must(
                "server", "model", repr(self.service.name), repr(request.path_params["name"]), "See /v1/models."
            )
            raise ApiError(404, text, param="model", code="model_not_found")
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        context = self.service.pair.max_context
        return {"id": self.service.name, "object": "model", "created": 0, "owned_by": "local", "max_context": context}

    async def _metrics(self, _request: Request) -> Response:
        return PlainTextResponse(metrics_text(self.service), media_type="text/plain; version=0.0.4")

    async def _health(self, _request: Request) -> Response:
        closing = self.service.closing
        return JSONResponse({"status": "shutting down" if closing else "ok"}, status_code=503 if closing else 200)


async def _collected(choices: Sequence[Choice]) -> list[Any]:
    return [part async for part in merged(choices)]


async def _unless_gone(request: Request, work: Any) -> Any:
    """The result of `work`; `None` where the client went away before, and `work` is cancelled."""
    working = asyncio.ensure_future(work)

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    watching = asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


def error_reply(error: BaseException) -> JSONResponse:
    """The reply to an error."""
    found = _logged(error)
    return JSONResponse(found.body(), status_code=found.status, headers=found.headers)


def _logged(error: BaseException) -> ApiError:
    found = api_error(error)
    if found.status == 500:
        LOG.error("a request failed", exc_info=error)
    return found


async def _http_error(_request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        todo = "See docs/serving.md for the routes."
        text = must("server", "the route", "one that this server has", error.detail, todo)
        return error_reply(ApiError(error.status_code, text, code="no_such_route"))
    return error_reply(error)
