"""`load`: a target and its drafter, checked and planned, as a `Pair`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from .block_width import GAIN, BlockWidth
from .cache import DrafterContext, Part, TargetCache
from .config import KV_BITS, TargetConfig, kv_group
from .costs import Costs
from .draft_length import Experience
from .drafter_config import DrafterConfig
from .errors import CheckpointError, InputError, must
from .kernels.choose import Chosen, check_choice, choose
from .kernels.places import Place, drafter_places, target_places
from .kernels.serving import CONTEXT_ROWS, TARGET_FULL, Kernels
from .known import AUTO, drafter_for
from .loading.build import Checkpoint, build, drafter_model, read_drafter, read_target
from .loading.files import read_json
from .loading.hub import resolve
from .memory import MemoryPlan, Sizes, keep_resident, plan_memory
from .models.dflash import DFlash
from .models.muse_glimmer import MuseGlimmer
from .resources import find, is_folder, user_path
from .round_costs import cost_of_whole_blocks, first_guess, speeds_here
from .text import load_tokenizer
from .tuned import Tuned, read_tuned, setup_of

POCKET = "pocket"


@dataclass(frozen=True, eq=False)
class Pair:
    """A target with its drafter, or without one.

    Attributes:
        tokenizer: mlx-lm's wrapper, or `None` where the folder has no tokenizer.
        eos_token_ids: every id that ends a generation.
        dtype: of activations and caches.
        plan: the memory plan that was checked before the weights were read.
        kernels: operation -> "metal" or "stock: why".
        notes: one line for each thing that the user should know about how the pair was loaded.
        name: the target as it was given to `load`.
        kernel_choice, kv_bits: as they were given to `load`.
        setup: what measured rounds hold for besides the two checkpoints (`tuned.setup_of`).
        tuned: what `dflash-mlx tune` found for this pair and setup on this machine, if it was run.
    """

    target: MuseGlimmer
    drafter: DFlash | None
    tokenizer: Any | None
    eos_token_ids: frozenset[int]
    dtype: mx.Dtype
    plan: MemoryPlan
    target_path: Path
    drafter_path: Path | None
    kernels: dict[str, str]
    notes: tuple[str, ...] = field(default=())
    name: str = ""
    kernel_choice: str = AUTO
    kv_bits: int | None = None
    setup: Mapping[str, Any] = field(default_factory=dict)
    tuned: Tuned | None = None

    @property
    def max_context(self) -> int:
        return self.plan.context

    @property
    def block_size(self) -> int:
        """Slots of the drafter's block, the anchor's included; 1 without a drafter."""
        return self.drafter.config.block_size if self.drafter else 1

    @property
    def costs(self) -> Costs:
        """Counts the work of this pair's rounds."""
        parts, drafter = self.plan.parts, self.drafter.config if self.drafter else None
        stored = parts["target weights"], parts.get("drafter weights", 0)
        counted = Costs.of_files(self.target.config, drafter, *stored, self.dtype.size)
        return replace(counted, kv_bits=self.kv_bits)

    @cached_property
    def experience(self) -> Experience:
        """What this pair's sessions have learned of their rounds on this machine, for the automatic draft length."""
        assert self.drafter is not None
        costs, speeds, tuned = self.costs, speeds_here(), self.tuned
        guess = first_guess(costs, speeds, self.drafter.config.runtime_block_size - 1)
        cost_of_whole = cost_of_whole_blocks(costs, speeds, self.block_size)
        if tuned is None:
            return Experience(guess, width=BlockWidth(self.block_size, cost_of_whole))
        gain, cost, speed = tuned.whole or (1.0, cost_of_whole, 1.0)
        width = BlockWidth(self.block_size, cost, gain, whole=speed > GAIN)
        more, slower = (gain, cost) if width.whole else (1.0, 1.0)  # than the rounds of k + 1 slots that were measured
        for length, context, seconds in tuned.rounds:
            if length <= guess.most:
                guess.saw(length, context, 1, seconds * (slower if 0 < length < self.block_size - 1 else 1.0))
        return Experience(guess, min(1.0, more * tuned.acceptance), width)

    @property
    def drafter_kind(self) -> str | None:
        """ "DFlash v1" or "DFlash-2", as the checkpoint's own fields say; `None` without a drafter."""
        return self.drafter.generation if self.drafter else None

    def without_drafter(self) -> Pair:
        """The same target for plain decoding: no drafter work at all."""
        return replace(self, drafter=None, drafter_path=None, plan=self.plan.without_drafter(), tuned=None)

    def with_drafter(self, draft: str | Path) -> Pair:
        """The same target, which is not loaded again, with another drafter.

        Args:
            draft: as for `load`.
        Raises:
            InputError, CheckpointError: as `load`.
        """
        notes: list[str] = []
        _, path = _paths(self.name, draft, notes)
        if path is None:
            raise InputError(must("load", "draft", f"a drafter of {self.name}", repr(draft), "Give a folder or an id."))
        limits = self.plan.context, self.plan.limit
        return _joined(self, _prepare(self.target_path, path, self.kernel_choice, self.kv_bits, *limits), path, notes)


def load(
    target: str | Path,
    draft: str | Path | None = AUTO,
    *,
    max_context: int | None = None,
    max_memory: int | None = None,
    kernels: str = "auto",
    kv_bits: int | None = None,
) -> Pair:
    """Load a target and its drafter.

    Args:
        target: "pocket" (the embedded pair), a folder, or a hub id.
        draft: a folder or a hub id; "auto" takes the target's known drafter, "v1" or "dflash2" the known one of
            that kind (models/known.toml); `None` decodes plainly.
        max_context: tokens that the memory plan is made for; default the most that fits, at most the model's.
        max_memory: bytes that may be used; default what the machine recommends.
        kernels: "auto": a Metal kernel where this machine has qualified it, which takes some seconds at the first load;
            "metal": wherever it agrees, also where it is slower; "stock": nowhere.
        kv_bits: 8 keeps the full layers' keys and values in 8 bits: about half the memory, at some loss of accuracy.
            Drafting loses nothing against plain decoding with the same `kv_bits`.
    Raises:
        InputError: a name or an option is wrong, or the plan does not fit (`MemoryPlanError`).
        CheckpointError: a config, tensor or file cannot be used; nothing stays loaded.
    """
    check_choice(kernels)
    _check_limits(max_context, max_memory, kv_bits)
    notes: list[str] = []
    target_path, drafter_path = _paths(target, draft, notes)
    ready = _prepare(target_path, drafter_path, kernels, kv_bits, max_context, max_memory)
    checkpoint, config = ready.checkpoint, ready.config
    if checkpoint.skipped:
        notes.append(f"{len(checkpoint.skipped)} vision tensors skipped: this runtime reads text only.")
    keep_resident(ready.plan)

    model = MuseGlimmer(config, ready.serving.kernels)
    build(model, checkpoint)
    model.stack()
    alone = Pair(
        target=model,
        drafter=None,
        tokenizer=load_tokenizer(target_path),
        eos_token_ids=_end_tokens(target_path, config),
        dtype=checkpoint.dtype,
        plan=ready.plan,
        target_path=target_path,
        drafter_path=None,
        kernels=ready.serving.operations,
        name=str(target),
        kernel_choice=kernels,
        kv_bits=kv_bits,
    )
    return _joined(alone, ready, drafter_path, notes)


class Ready(NamedTuple):
    """What is known of a pair from its files' headers, before a weight is read.

    Attributes:
        found: the drafter's headers and config, where there is a drafter.
        serving: what serves its operations.
    """

    checkpoint: Checkpoint
    config: TargetConfig
    found: tuple[Checkpoint, DrafterConfig] | None
    plan: MemoryPlan
    serving: Chosen


def _prepare(
    target: Path,
    drafter: Path | None,
    kernels: str,
    kv_bits: int | None,
    max_context: int | None,
    max_memory: int | None,
) -> Ready:
    """Read the headers, plan the memory, and find what serves; arguments and errors as `load`."""
    checkpoint, config = read_target(target)
    if kv_bits and not kv_group(config.head_dim):
        expected = f"left out for a head size of {config.head_dim}"
        raise InputError(must("load", "kv_bits", expected, kv_bits, "Groups are of 64 or of 32 numbers of a head."))
    found = read_drafter(drafter, config) if drafter else None
    drafter_bytes = found[0].nbytes if found else 0
    sizes = Sizes(config, found[1] if found else None, checkpoint.nbytes, drafter_bytes, checkpoint.dtype.size, kv_bits)
    plan = plan_memory(sizes, max_context, max_memory)
    return Ready(checkpoint, config, found, plan, _kernels(kernels, checkpoint, config, found, kv_bits))


def _joined(pair: Pair, ready: Ready, drafter_path: Path | None, notes: list[str]) -> Pair:
    """The pair with the drafter that was found, or without one; proved, and with what `tune` found for it."""
    notes.extend(ready.serving.notes)
    drafter = _drafter(ready.found, notes, ready.serving.kernels) if ready.found else None
    setup = setup_of(pair.kv_bits, ready.serving.kernels)
    tuned, note = read_tuned(pair.target_path, drafter_path, setup) if drafter_path else (None, "")
    notes.extend([note] if note else [])
    _prove(pair.target, drafter, pair.dtype)
    return replace(
        pair,
        drafter=drafter,
        drafter_path=drafter_path,
        plan=ready.plan,
        kernels=ready.serving.operations,
        notes=tuple(notes),
        setup=setup,
        tuned=tuned,
    )


def _drafter(found: tuple[Checkpoint, DrafterConfig], notes: list[str], kernels: Kernels) -> DFlash:
    """Build a drafter from its files, and say which one it is where it is not the usual one."""
    drafter = drafter_model(found[1], kernels)
    build(drafter, found[0])
    if CONTEXT_ROWS in kernels.rows:
        drafter.stack_context()
    if drafter.generation != DFlash.generation:
        notes.append(f"The drafter is a {drafter.generation}, as its config's own fields say.")
    return drafter


def _check_limits(max_context: int | None, max_memory: int | None, kv_bits: int | None) -> None:
    """What can be said of them before a model is looked for, which may be a download."""
    if kv_bits is not None and (type(kv_bits) is not int or kv_bits != KV_BITS):
        todo = "Leave it out to keep the cache in the model's own type."
        raise InputError(must("load", "kv_bits", f"{KV_BITS}", repr(kv_bits), todo))
    for name, value, todo in (
        ("max_context", max_context, "Leave it out to take what fits."),
        ("max_memory", max_memory, "Leave it out to take what the machine recommends."),
    ):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InputError(must("load", name, "an integer of at least 1", repr(value), todo))


def _kernels(
    choice: str,
    checkpoint: Checkpoint,
    config: TargetConfig,
    found: tuple[Checkpoint, DrafterConfig] | None,
    kv_bits: int | None,
) -> Chosen:
    """What serves the pair's operations; needs no weight."""
    types = checkpoint.float_types | found[0].float_types if found else checkpoint.float_types
    if len(types) != 1:
        return choose(choice, (), f"the pair's tensors are of several types ({', '.join(sorted(types))})")
    left_out = {TARGET_FULL: f"its cache is in {kv_bits} bits"} if kv_bits and config.full_layers else {}
    places = [place for place in _places(config, checkpoint.dtype, found) if place.name not in left_out]
    return choose(choice, places, left_out=left_out)


def _places(config: TargetConfig, dtype: mx.Dtype, found: tuple[Checkpoint, DrafterConfig] | None) -> list[Place]:
    """Where a kernel may serve the pair."""
    places = list(target_places(config, dtype))
    return places + list(drafter_places(found[1], dtype, found[0].quantised)) if found else places


def places_of(target: str | Path, draft: str | Path | None = AUTO) -> list[Place]:
    """Where a kernel may serve a pair, from its files' headers: nothing is loaded. Arguments and errors as `load`."""
    target_path, drafter_path = _paths(target, draft, [])
    checkpoint, config = read_target(target_path)
    return _places(config, checkpoint.dtype, read_drafter(drafter_path, config) if drafter_path else None)


def _paths(target: str | Path, draft: str | Path | None, notes: list[str]) -> tuple[Path, Path | None]:
    """Folders of target and drafter; "auto" and names such as "dflash2" find a drafter that is known."""
    pocket = str(target) == POCKET
    target_path = find("models/pocket/target") if pocket else resolve(target)
    if draft is None:
        return target_path, None
    local = not pocket and is_folder(user_path(target))
    known = drafter_for(str(target), draft) if isinstance(draft, str) and not local else None
    if known is not None:
        return target_path, resolve(known)
    if str(draft) != AUTO:
        return target_path, resolve(draft)
    notes.append(f"No drafter is known for {target}: it decodes plainly. Give one with draft= (--draft).")
    return target_path, None


def _end_tokens(folder: Path, config: TargetConfig) -> frozenset[int]:
    """All end tokens: generation_config.json's where it names any, else the config's (as in mlx-lm)."""
    path = folder / "generation_config.json"
    given = read_json(path).get("eos_token_id") if path.is_file() else None
    ids = config.eos_token_ids if given is None else tuple(given) if isinstance(given, list) else (given,)
    for token in ids:
        if not isinstance(token, int) or not 0 <= token < config.vocab_size:
            expected = f"token ids below {config.vocab_size}"
            raise CheckpointError(must("config", "eos_token_id", expected, repr(ids), "Correct the config."))
    return frozenset(ids)


def _prove(target: MuseGlimmer, drafter: DFlash | None, dtype: mx.Dtype) -> None:
    """One token through both models: their first logits are finite, and the weights are there."""
    config = target.config
    cache = TargetCache(config, dtype, config.max_position)
    token = mx.array([config.bos_token_id or 0], dtype=mx.uint32)
    forward = target(token, [Part(cache, 1, 1)], drafter.config.taps if drafter else ())
    proofs = {"the target's first logits": forward.logits}
    if drafter:
        context = DrafterContext(drafter.config, dtype)
        drafter.extend(context, forward.taps)
        context.advance(1)
        block = mx.full((drafter.config.block_size,), drafter.config.mask_token_id, dtype=mx.uint32)
        slots = drafter.draft(block, context, target, 1)
        proofs["the drafter's first logits"] = slots.logits
        if slots.transitions:
            proofs["the selector's first scores"] = slots.transitions(token[None])
    for name, logits in proofs.items():
        if logits is None or not bool(mx.all(mx.isfinite(logits))):
            todo = "A weight is broken: download or convert the checkpoint again."
            raise CheckpointError(must("load", name, "finite", "NaN or infinity", todo))
    # Views of stacked weights that no forward reads: what is not evaluated here, no other thread can use.
    mx.eval(target.parameters(), drafter.parameters() if drafter else {})
