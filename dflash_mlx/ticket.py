"""A ticket: what a client holds of a request, read in its own thread or event loop while the engine works."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import Any

from .stats import Chunk, Generation


class Channel:
    """The engine's end of a ticket: chunks go in here, and whether they are still wanted is asked here.

    Attributes:
        cancelled: nobody wants the rest.
        generation: what there was, once the request has ended in whatever way.
    """

    def __init__(self) -> None:
        self.cancelled = False
        self.generation: Generation | None = None
        self._items: deque[Chunk | Exception | None] = deque()  # `None` after the last chunk
        self._changed = threading.Condition()
        self._loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def cancel(self) -> None:
        """Ask for the end."""
        self.cancelled = True

    def put(self, chunk: Chunk) -> None:
        """Hand out a chunk."""
        self._put(chunk)

    def end(self, generation: Generation, error: Exception | None = None) -> None:
        """Nothing comes after this."""
        self.generation = generation
        self._put(error)

    def get(self, timeout: float | None = None) -> Chunk | Exception | None:
        """The next item, as soon as there is one.

        Raises:
            TimeoutError: none came within `timeout` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._items, timeout):
                raise TimeoutError
            return self._items.popleft()

    async def wait(self) -> Chunk | Exception | None:
        """As `get`, in an event loop; a reader that is stopped while it waits loses nothing."""
        while True:
            with self._changed:
                if self._items:
                    return self._items.popleft()
                event = asyncio.Event()
                self._loops.append((asyncio.get_running_loop(), event))
            await event.wait()

    def _put(self, item: Chunk | Exception | None) -> None:
        with self._changed:
            self._items.append(item)
            self._changed.notify_all()
            loops, self._loops = self._loops, []
        for loop, event in loops:
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)


class Ticket:
    """A request that an engine has taken: iterate over it, with `for` or `async for`, for its chunks.

    It is cancelled by `cancel()`, at the end of a `with` or `async with`, and when nobody holds it any more.
    The last chunk has the finish reason ("cancelled" too) and the statistics; a request that failed raises instead.
    """

    def __init__(self, channel: Channel):
        self._channel, self._over = channel, False
        weakref.finalize(self, channel.cancel).atexit = False

    @property
    def generation(self) -> Generation | None:
        """What there was, once the request has ended in whatever way."""
        return self._channel.generation

    def cancel(self) -> None:
        """Free the request's place within one step; its last chunk follows."""
        self._channel.cancel()

    def result(self) -> Generation:
        """Wait for the end, read what is left, and return the whole.

        Raises:
            DFlashError: the request failed; `.partial` holds what was generated before.
        """
        for _ in self:
            pass
        assert self.generation is not None
        return self.generation

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        item = None if self._over else self._channel.get()
        if isinstance(item, Chunk):
            return item
        self._over = True
        raise item or StopIteration

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        item = None if self._over else await self._channel.wait()
        if isinstance(item, Chunk):
            return item
        self._over = True
        raise item or StopAsyncIteration

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *error: Any) -> None:
        self.cancel()

    async def __aenter__(self) -> Ticket:
        return self

    async def __aexit__(self, *error: Any) -> None:
        self.cancel()
