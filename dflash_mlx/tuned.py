"""What `dflash-mlx tune` found, stored in the user's cache folder by pair and machine, for `load` to start from.

The file is one JSON object: `key_of` a pair and this machine -> a list of results, one for each setup.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from platformdirs import user_cache_path

from .kernels.serving import Kernels
from .machine import chip, gpu_cores, memory_bytes, system
from .resources import DISTRIBUTION
from .whole_files import update_whole

FILE = "tuned.json"
MOST = 1 << 32  # tokens that no context has: a larger number was not counted
SAMPLES, SAMPLE_BYTES = 16, 4096  # of each file of weights: a training changes all of it
AGAIN = "Run dflash-mlx tune again."


class Whole(NamedTuple):
    """Rounds in which the drafter fills its whole block, over those in which it fills k + 1 slots.

    Attributes:
        gain: how often a draft is accepted if those before it are.
        cost: seconds of a round.
        tokens_per_s: committed ones, which decide.
    """

    gain: float
    cost: float
    tokens_per_s: float


@dataclass(frozen=True)
class Tuned:
    """Measured on this machine for one pair in one setup.

    Attributes:
        draft_length: with the most committed tokens per second on the prompts; 0 where drafting loses.
        speedup: over plain decoding, 1 where `draft_length` is 0.
        acceptance: share of the drafts that were accepted, of those whose slot was judged.
        rounds: (draft length, context, seconds) of measured rounds.
        when: the date.
        setup: of the pair that was measured, as `setup_of` gives it.
        whole: whole blocks at the best draft length above 0; `None` where they were not measured.
    """

    draft_length: int
    speedup: float
    acceptance: float
    rounds: list[tuple[int, int, float]]
    when: str
    setup: Mapping[str, Any]
    whole: Whole | None = None

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Tuned:
        """A stored result; one of a version that stored no setup has an empty one.

        Raises:
            KeyError, TypeError, ValueError: it is damaged.
        """
        rounds = [(int(length), int(context), float(seconds)) for length, context, seconds in data["rounds"]]
        found = cls(
            draft_length=int(data["draft_length"]),
            speedup=float(data["speedup"]),
            acceptance=float(data["acceptance"]),
            rounds=rounds,
            when=str(data["when"]),
            setup=dict(data.get("setup", {})),
            whole=Whole(*map(float, data["whole"])) if data.get("whole") else None,
        )
        counts = (found.draft_length, *(count for length, context, _ in rounds for count in (length, context)))
        times = (found.speedup, *(found.whole or ()), *(seconds for _, _, seconds in rounds))
        possible = all(0 <= count < MOST for count in counts) and all(
            math.isfinite(time) and time > 0 for time in times
        )
        if not possible or not 0 <= found.acceptance <= 1:
            raise ValueError("a number that cannot be")
        return found

    @property
    def note(self) -> str:
        """One line for the user."""
        if not self.draft_length:
            return f"Tuned on this machine on {self.when}: drafting did not pay on the prompts that were given."
        gain = f"draft length {self.draft_length} gave {self.speedup:.2f} times the plain speed"
        return f"Tuned on this machine on {self.when}: {gain}; the automatic draft length starts from that."

    def note_for(self, setup: Mapping[str, Any]) -> str:
        """One line on why it is not used where a pair has another setup."""
        found = f"Tuned on this machine on {self.when}, but"
        if not self.setup:
            return f"{found} the result does not say with which cache and kernels: it is not used. {AGAIN}"
        theirs, ours = _in_words(self.setup), _in_words(setup)
        other = ", ".join(f"with {theirs[what]} and not {ours[what]}" for what in ours if theirs[what] != ours[what])
        return f"{found} {other}: it is not used. Run dflash-mlx tune with this run's flags."


def setup_of(kv_bits: int | None, kernels: Kernels) -> dict[str, Any]:
    """What times and acceptance hold for besides the checkpoints: the cache, MLX's device, what serves where."""
    served = {place: list(rows) for place, rows in sorted(kernels.rows.items())}
    return {"kv_bits": kv_bits, "device": mx.default_device().type.name, "kernels": served}


def _in_words(setup: Mapping[str, Any]) -> dict[str, str]:
    bits, served = setup.get("kv_bits"), setup.get("kernels") or {}
    places = "; ".join(f"{place} for {first} to {last} rows" for place, (first, last) in served.items())
    return {
        "cache": f"a cache of {bits} bits" if bits else "a cache of the model's own type",
        "device": f"the device {setup.get('device')}",
        "kernels": f"the kernels {places}" if places else "stock operations alone",
    }


def key_of(target: Path, drafter: Path) -> str:
    """What a result holds for: both checkpoints (configs, samples of the weights), the machine, and MLX's version."""
    machine = [system(), chip(), gpu_cores(), memory_bytes(), metadata.version("mlx")]
    digest = hashlib.sha256(json.dumps(machine).encode())
    for folder in (target, drafter):
        digest.update((folder / "config.json").read_bytes())
        for file in sorted(folder.glob("*.safetensors")):
            digest.update(f"{file.name} {file.stat().st_size}\n".encode() + _sample(file))
    return digest.hexdigest()


def _sample(file: Path) -> bytes:
    """Bytes from several places of a file of weights: other weights of the same sizes differ there."""
    size, found = file.stat().st_size, b""
    with file.open("rb") as stream:
        for part in range(SAMPLES):
            stream.seek(size * part // SAMPLES)
            found += stream.read(SAMPLE_BYTES)
    return found


def path() -> Path:
    """The file with all results."""
    return user_cache_path(DISTRIBUTION, appauthor=False) / FILE


def read_tuned(target: Path, drafter: Path, setup: Mapping[str, Any]) -> tuple[Tuned | None, str]:
    """What was found for this pair and setup on this machine, and a line for the user.

    Returns:
        `None` where nothing was found; the line says why where there is something that cannot be used, else it is "".
    """
    try:
        stored = _read()
        found = _results(stored.get(key_of(target, drafter), [])) if stored else []
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return None, f"Tuned results in {path()} cannot be used ({type(error).__name__}: {error}). {AGAIN}"
    same = next((tuned for tuned in found if tuned.setup == setup), None)
    if same:
        return same, same.note
    return None, found[-1].note_for(setup) if found else ""


def write_tuned(target: Path, drafter: Path, tuned: Tuned) -> Path:
    """Store a result beside those of other pairs and setups; the file takes its place whole.

    Raises:
        OSError: the folder cannot be written.
    """
    key = key_of(target, drafter)

    def with_this() -> str:
        try:
            stored = dict(_read())
        except (OSError, ValueError, RecursionError):
            stored = {}  # a damaged file holds nothing to keep
        try:
            others = [old for old in _results(stored.get(key, [])) if old.setup and old.setup != tuned.setup]
        except (ValueError, TypeError, KeyError, AttributeError):
            others = []
        return json.dumps(stored | {key: [asdict(each) for each in (*others, tuned)]}, indent=1)

    update_whole(path(), with_this)
    return path()


def _results(stored: Any) -> list[Tuned]:
    """The results of one pair; before there were setups, one stood alone."""
    return [Tuned.from_data(each) for each in ([stored] if isinstance(stored, Mapping) else stored)]


def _read() -> Mapping[str, Any]:
    """All that is stored; nothing where there is no file."""
    try:
        stored = json.loads(path().read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    if not isinstance(stored, dict):
        raise ValueError(f"a {type(stored).__name__} and no object")
    return stored
