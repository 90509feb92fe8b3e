"""Runs suites: every case in every mode, in turn, and refuses to call a run what it was not."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx

from ..errors import DFlashError, must
from ..pair import Pair
from ..session import Session
from ..stats import Generation
from ..text import encode
from .modes import Mode
from .order import orders
from .power import Energy, power_state
from .predict import Predictor
from .suites import Case, Suite, filling

WARM_UP_TOKENS = 8
Record = dict[str, Any]
Watch = Callable[[str], None]


class Bench:
    """One run of suites.

    Args:
        modes: what is compared, plain decoding among it.
        repeats: how often every case runs in every mode.
        cool_down: seconds of rest before every run.
        energy: measure joules with powermetrics.
        watch: called with a line before every run.
    """

    def __init__(
        self, modes: Sequence[Mode], repeats: int, cool_down: float = 0, energy: bool = False, watch: Watch = print
    ):
        self.modes = {mode.name: mode for mode in modes}
        self.repeats, self.cool_down, self.energy, self.watch = repeats, cool_down, energy, watch
        self.predictors = {mode.name: Predictor(mode.pair) for mode in modes}
        self.records: list[Record] = []
        self.left_out: list[Record] = []

    def run(self, suites: Sequence[Suite]) -> None:
        """Run all; `records` and `left_out` hold what there is also where it ends early."""
        self._warm_up()
        for suite in suites:
            for case in suite.cases:
                if reason := self._unfit(suite, case):
                    self._leave_out(suite, case, reason)
                    continue
                for repeat, order in enumerate(orders(list(self.modes), self.repeats)):
                    for place, name in enumerate(order):
                        self.watch(f"{suite.name} {case.name} · repeat {repeat + 1} of {self.repeats} · {name}")
                        time.sleep(self.cool_down)
                        where = {"suite": suite.name, "case": case.name, "repeat": repeat, "place": place}
                        for record in self._case(self.modes[name], suite, case):
                            self.records.append(where | record)

    def _warm_up(self) -> None:
        """Run each mode for some tokens, unrecorded: weights are read, graphs and kernels are built."""
        for mode in self.modes.values():
            length = {} if mode.plain else {"draft_length": mode.draft_length}
            Session(mode.pair).generate([0, 1, 2, 3], max_tokens=WARM_UP_TOKENS, **length)

    def _unfit(self, suite: Suite, case: Case) -> str | None:
        """Say why a case cannot run with this pair."""
        pair = next(iter(self.modes.values())).pair
        if pair.tokenizer is None:
            return "the target has no tokenizer"
        if case.turns and getattr(pair.tokenizer, "chat_template", None) is None:
            return "the target has no chat template"
        opening: Any = [{"role": "user", "content": case.turns[0]}] if case.turns else case.text
        return _too_long(pair, suite, case.fill_tokens or _length(pair, suite, opening))

    def _leave_out(self, suite: Suite, case: Case, why: str) -> None:
        """Note it once for a case, however many modes and repeats it holds for."""
        where = {"suite": suite.name, "case": case.name}
        if not any(where.items() <= known.items() for known in self.left_out):
            self.left_out.append(where | {"why": why})

    def _case(self, mode: Mode, suite: Suite, case: Case) -> Iterator[Record]:
        """Run the turns of a case in a session of their own, a record for each, until one does not fit the context."""
        session, messages = Session(mode.pair), []
        for turn in range(max(1, len(case.turns))):
            prompt: Any = case.text
            if case.fill_tokens:
                prompt = filling(case.fill_tokens, mode.pair.tokenizer)
            elif case.turns:
                messages.append({"role": "user", "content": case.turns[turn]})
                prompt = messages
            if turn and (reason := _too_long(mode.pair, suite, _length(mode.pair, suite, prompt))):
                self._leave_out(suite, case, f"from turn {turn + 1} on it {reason}")
                break
            record, generation = self._turn(mode, suite, session, prompt)
            yield {"turn": turn} | record
            messages.append({"role": "assistant", "content": generation.text})
        mx.clear_cache()

    def _turn(self, mode: Mode, suite: Suite, session: Session, prompt: Any) -> tuple[Record, Generation]:
        options: Record = {"max_tokens": suite.max_tokens, "temperature": suite.temperature, "seed": 0}
        if not mode.plain:
            options["draft_length"] = mode.draft_length
        options |= _reasoning(suite, prompt)
        with Energy(self.energy) as energy:
            started = time.perf_counter()
            generation = session.generate(prompt, **options)
            wall = time.perf_counter() - started
        check_label(mode, generation)
        stats = generation.stats.to_dict()
        rounds = stats.pop("rounds")
        columns = {key: [round_[key] for round_ in rounds] for key in ("drafted", "accepted", "committed", "total_s")}
        record = {
            "mode": mode.name,
            "draft_length": mode.draft_length,
            "reasoning": options.get("reasoning"),
            "finish_reason": generation.finish_reason,
            "tokens_sha256": digest(generation.tokens),
            "wall_s": wall,
            "predicted_tokens_per_s": self.predictors[mode.name].tokens_per_s(generation.stats),
            "energy_j": energy.joules,
            "power": power_state(),
            "stats": stats,
            "rounds": columns,
        }
        return record, generation


def _reasoning(suite: Suite, prompt: Any) -> Record:
    """The suite's strength as an option, where a chat template takes it."""
    chat = isinstance(prompt, list) and isinstance(prompt[0], dict)
    return {"reasoning": suite.reasoning} if suite.reasoning and chat else {}


def _length(pair: Pair, suite: Suite, prompt: Any) -> int:
    """Tokens of a prompt, as its turn will have them."""
    return len(encode(pair.tokenizer, prompt, **_reasoning(suite, prompt)))


def _too_long(pair: Pair, suite: Suite, tokens: int) -> str | None:
    """Say why a prompt of so many tokens does not fit the context together with its answer."""
    needed = tokens + suite.max_tokens
    return f"needs {needed} tokens, the context holds {pair.max_context}" if needed > pair.max_context else None


def check_label(mode: Mode, generation: Generation) -> None:
    """Refuse a run that was not what its mode says.

    Raises:
        DFlashError: drafting was asked for and was off, or plain decoding drafted.
    """
    stats = generation.stats
    drafted = sum(round_.drafted > 0 for round_ in stats.rounds)
    todo = "The run is not recorded: find out why with `dflash-mlx doctor`."
    if mode.plain and drafted:
        raise DFlashError(must("bench", "a plain run", "without drafts", f"{drafted} drafted rounds", todo))
    if mode.plain:
        return
    if stats.speculation != "on":
        raise DFlashError(must("bench", f"speculation in mode {mode.name}", "on", stats.speculation, todo))
    could = [round_ for round_ in stats.rounds[:-1] if round_.committed]  # the last one may have no room for a draft
    if mode.draft_length != "auto" and could and not drafted:
        raise DFlashError(must("bench", f"rounds of mode {mode.name}", "drafted", "none was", todo))


def digest(tokens: Sequence[int]) -> str:
    """Give a fingerprint of generated ids, to compare modes and machines."""
    return hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()
