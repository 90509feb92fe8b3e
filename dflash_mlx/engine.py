"""The engine: one thread that owns the device, and steps that several requests share.

In each step the streams that decode bring a round each, and the prompts that wait bring a piece each: one forward, one
read by the host, whatever their number. A request's tokens are what they would be alone.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from .errors import DFlashError, EngineClosed, EngineError, InputError, MemoryPlanError, QueueFull, must
from .memory import GIB, PREFILL_STEP
from .options import Options
from .pair import Pair
from .request import Request, Store, failure, shares
from .state import HostReads, State
from .stats import Chunk, Stats
from .stream import Stream, advance, check_request
from .ticket import Ticket

RECENT = 32  # ended requests whose time says how long the next ones will take


class Engine:
    """Serves several requests at once from one pair.

    Args:
        pair: from `load`.
        max_streams: requests that run at once.
        max_queue: requests that may wait for a place; one more is refused with `QueueFull`.
        prefill_rows: most prompt tokens in a step in which others decode, shared among the prompts that wait: what
            a long prompt may cost the others per token. Not chosen by a measurement.
        store: keeps states from one request to the next.
        kept_bytes: memory set aside for what the store keeps.
    """

    def __init__(
        self,
        pair: Pair,
        *,
        max_streams: int = 8,
        max_queue: int = 64,
        prefill_rows: int = 256,
        store: Store | None = None,
        kept_bytes: int = 0,
    ):
        _check_count("max_streams", max_streams, 1, PREFILL_STEP)
        _check_count("max_queue", max_queue, 0)
        _check_count("prefill_rows", prefill_rows, max_streams, PREFILL_STEP)
        _check_count("kept_bytes", kept_bytes, 0)
        self.pair, self.max_streams, self.max_queue = pair, max_streams, max_queue
        self._prefill_rows, self._store = prefill_rows, store
        self._room = pair.plan.limit - pair.plan.shared_bytes - kept_bytes
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._changed = threading.Condition()
        self._closing = False
        self._counts: Counter[str] = Counter()
        self._times: deque[float] = deque(maxlen=RECENT)
        self._reads = HostReads()
        self._device = mx.default_device()
        self._thread = threading.Thread(target=self._serve, name="dflash-mlx engine", daemon=True)
        self._thread.start()
        atexit.register(self._abandon)  # a thread inside MLX while the interpreter goes would abort the process

    def submit(
        self, prompt: Sequence[int], *, state: State | None = None, choice_index: int = 0, **options: Any
    ) -> Ticket:
        """Take a request.

        Args:
            prompt: token ids.
            state: a session's, to go on from and to leave the history in; in one request at a time. Default: the
                store's, or a new one.
            choice_index: which answer to one request this is.
            options: see `Options`.
        Raises:
            InputError: the request is wrong, or too large for the context or the memory (`MemoryPlanError`).
            QueueFull: as many wait as may.
            EngineClosed: the engine takes no more.
        """
        request = self._request(prompt, choice_index, options)
        request.state, request.given = state, state is not None
        return self._take([request])[0]

    def submit_all(self, prompt: Sequence[int], n: int, **options: Any) -> list[Ticket]:
        """Take a request for `n` answers; the first is what `submit` gives, and the others reuse its prefill."""
        _check_count("n", n, 1, self.max_streams + self.max_queue)
        requests = [self._request(prompt, index, options) for index in range(n)]
        for request in requests[1:]:
            request.leader = requests[0]
        return self._take(requests)

    def close(self, finish: bool = True, timeout: float | None = None) -> None:
        """Take no more requests and end the thread.

        Args:
            finish: let what was taken come to its end; else it is cancelled.
            timeout: seconds after which the rest is cancelled.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if finish:
            self._thread.join(timeout)
        with self._changed:
            for request in (*self._waiting, *self._running):
                request.channel.cancel()
        self._thread.join()
        atexit.unregister(self._abandon)

    def _abandon(self) -> None:
        self.close(finish=False)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close(finish=not any(error))

    def figures(self) -> dict[str, int]:
        """Counts since the start (requests, tokens, rounds, steps), and how many run and wait now."""
        names = (
            "requests", "completed", "cancelled", "failed", "refused", "steps", "rounds", "prompt_tokens",
            "reused_tokens", "generated_tokens", "drafted_tokens", "accepted_tokens",
        )  # fmt: skip
        with self._changed:
            counts = {name: self._counts[name] for name in names}
            held = sum(request.nbytes for request in self._running)
            now = {"running": len(self._running), "waiting": len(self._waiting), "reserved_bytes": held}
        return {**counts, "syncs": self._reads.count, **now}

    def _request(self, prompt: Sequence[int], choice_index: int, options: dict[str, Any]) -> Request:
        """A request that fits this pair and its memory."""
        asked, plan = Options.of(options), self.pair.plan
        check_request(self.pair, prompt, asked, choice_index)
        context = min(len(prompt) + asked.max_tokens, plan.context)
        nbytes = plan.session_bytes(context)
        if nbytes > self._room:
            expected = f"at most {self._room / GIB:.2f} GiB of caches"
            found = f"{nbytes / GIB:.2f} GiB for {len(prompt)} + {asked.max_tokens} tokens"
            raise MemoryPlanError(must("engine", "the request", expected, found, "Ask for fewer tokens."))
        return Request(Stream(self.pair, prompt, asked, choice_index), nbytes)

    def _take(self, requests: list[Request]) -> list[Ticket]:
        """Put requests into the queue, all or none."""
        with self._changed:
            if self._closing:
                raise EngineClosed(must("engine", "the engine", "open", "closed", "Send the request to another."))
            present = (*self._waiting, *self._running)
            if any(request.given and request.state is other.state for request in requests for other in present):
                todo = "Wait for its end: a session runs one generation at a time."
                raise InputError(must("engine", "state", "in no other request", "one that is in use", todo))
            places = self.max_streams + self.max_queue
            if len(present) + len(requests) > places:
                self._counts["refused"] += len(requests)
                found = f"{len(present) + len(requests)}"
                todo = f"Send the request again in {self._retry_after():.0f} seconds."
                text = must("engine", "requests", f"at most {places} ({self.max_queue} waiting)", found, todo)
                raise QueueFull(text, self._retry_after())
            for request in requests:
                if request.state is not None:  # evaluated here: what a thread has not evaluated, no other can
                    request.state.settle(reads := HostReads())
                    request.stream.stats.syncs += reads.count
            self._counts["requests"] += len(requests)
            self._waiting.extend(requests)
            self._changed.notify_all()
        return [Ticket(request.channel) for request in requests]

    def _retry_after(self) -> float:
        """Seconds until one of those that run is likely to end, from the times of those that ended."""
        now = time.perf_counter()
        times = [*self._times] or [now - request.started for request in self._running] or [0.0]
        return max(1.0, sum(times) / len(times) / self.max_streams)

    def _serve(self) -> None:
        """The thread: drop what is no longer wanted, let in what fits, make a step."""
        mx.set_default_device(self._device)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._running or self._closing)
                if not (self._waiting or self._running):
                    mx.clear_streams()  # the thread's own; one that is left may abort the process at its end
                    return
            if not self._running:
                mx.reset_peak_memory()
            for request in self._present(lambda each: each.channel.cancelled):
                self._end(request)
            self._admit()
            if self._running:
                self._step()

    def _present(self, wanted: Callable[[Request], bool]) -> list[Request]:
        """Those that wait or run of which something holds, in the order in which they came."""
        with self._changed:
            return [request for request in (*self._running, *self._waiting) if wanted(request)]

    def _admit(self) -> None:
        """First come, first served: the first that does not fit keeps those behind it waiting."""
        for request in self._present(lambda each: not each.started and each.leader is None):
            reserved = sum(other.nbytes for other in self._running)
            if len(self._running) == self.max_streams or reserved + request.nbytes > self._room:
                return
            with self._changed:
                self._waiting.remove(request)
                self._running.append(request)
            request.started = time.perf_counter()
            try:
                if request.state is None:
                    request.state = self._store.take(request.stream.prompt) if self._store else State(self.pair)
                    request.taken = self._store is not None
                request.stream.begin(request.state)
            except Exception as error:
                self._end(request, error)

    def _step(self) -> None:
        """One step for all that run."""
        prompts = {id(request): request.stream.to_prefill for request in self._running}
        decoding = sum(not waiting for waiting in prompts.values())
        pieces = shares(prompts, self._prefill_rows if decoding else PREFILL_STEP)
        running, streams = list(self._running), [request.stream for request in self._running]
        self._counts["steps"] += 1
        try:
            work = [request.stream.work(pieces[id(request)] or None, max(1, decoding)) for request in running]
            found = advance(streams, work, self._reads)
        except Exception as error:  # the device's, or a fault of ours
            for request in running:
                self._end(request, failure(error))
            return
        for request, item in zip(running, found, strict=True):
            if isinstance(item, Exception):
                self._end(request, item)
            elif item is not None:
                self._hand_out(request, item)

    def _hand_out(self, request: Request, chunk: Chunk) -> None:
        for other in self._present(lambda each: each.leader is request):
            other.state, other.leader = request.stream.state.fork(), None
        if chunk.finish_reason:
            self._end(request, last=chunk)
        else:
            request.channel.put(chunk)

    def _end(self, request: Request, error: Exception | None = None, last: Chunk | None = None) -> None:
        """End a request: by its last chunk, an error, or because nobody wants the rest."""
        stream = request.stream
        if last is None and error is None:
            shown = len(stream.output.text)
            generation = stream.close()
            last = Chunk(generation.text[shown:], [], generation.finish_reason, stream.stats)
        if error is not None and not isinstance(error, DFlashError):
            error = failure(error)
        try:
            self._give_back(request, error)
        except Exception as late:
            error = error or failure(late)
        generation = stream.generation or stream.close()
        with self._changed:
            (self._running if request in self._running else self._waiting).remove(request)
            if request.started:
                self._times.append(time.perf_counter() - request.started)
            ending = "failed" if error else "cancelled" if generation.finish_reason == "cancelled" else "completed"
            self._count(ending, stream.stats)
        for other in self._present(lambda each: each.leader is request):
            other.leader = None
        if error is None and last is not None:
            request.channel.put(last)
        elif error is not None:
            error.partial = generation
        request.channel.end(generation, error)

    def _give_back(self, request: Request, error: DFlashError | None) -> None:
        """Leave the state so that it can be used again, in any thread; after a failure what it holds is not known."""
        state, request.state = request.state, None
        request.stream.release()
        if state is None or not (request.given or request.taken):
            return
        if isinstance(error, EngineError):
            state.reset()
        state.settle(self._reads)
        if self._store and request.taken:
            self._store.put(state)

    def _count(self, ending: str, stats: Stats) -> None:
        counts = self._counts
        counts[ending] += 1
        counts["rounds"] += len(stats.rounds)
        counts["drafted_tokens"] += stats.drafted_tokens
        counts["accepted_tokens"] += stats.accepted_tokens
        counts["prompt_tokens"] += stats.prompt_tokens
        counts["reused_tokens"] += stats.reused_tokens
        counts["generated_tokens"] += stats.generated_tokens


def _check_count(name: str, value: Any, least: int, most: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        expected = f"an integer of at least {least}" if most is None else f"an integer between {least} and {most}"
        raise InputError(must("engine", name, expected, repr(value), "Correct the argument."))
