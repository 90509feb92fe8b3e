"""Golden files from transformers' own classes, for the default tests and for the live oracle suite.

    python tests/oracle/make_golden.py                            the committed cases, into tests/golden
    python tests/oracle/make_golden.py --live 7 --count 6 --out D   random cases from seed 7, into D

Needs torch and transformers (5.24 was used), not MLX. Weights are rebuilt from seeds by tests/specs.py on both sides: a
file holds inputs and outputs only. Truth is transformers run wholly in float64; what its float32 and bfloat16 lose
against that is recorded, since that is the yardstick for others.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import (
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
    MuseGlimmerConfig,
    MuseGlimmerForConditionalGeneration,
)
from transformers.cache_utils import DFlashCache
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator
from transformers.models.muse_glimmer import modeling_muse_glimmer as target_code
from transformers.models.muse_glimmer_assistant import modeling_muse_glimmer_assistant as drafter_code

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from layouts import drafter_config, target_config
from specs import (
    FULL,
    SLIDING,
    DrafterSpec,
    TargetSpec,
    drafter_weights,
    spec_dict,
    target_weights,
    tiny_specs,
)
from stored import as_stored, rounded, write_safetensors

MARGIN = 1e-3  # least gap between the best two logits of a greedy run that another runtime has to repeat
CODE = [target_code, drafter_code]  # modules that mention a precision of their own
NEW_TOKENS = 48  # of an assisted run
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
ODD_TYPES = (SLIDING, FULL, SLIDING, SLIDING, SLIDING, FULL)
THIRTY_B_HEADS = {"heads": (32, 2), "head_dim": 128, "drafter_heads": (32, 8), "drafter_head_dim": 128}
# A run's precision -> that which the weights were rounded to; "exact" is float64 with bfloat16's weights.
RUNS = {"float64": "float32", "float32": "float32", "exact": "bfloat16", "bfloat16": "bfloat16"}
CASES: dict[str, dict[str, Any]] = {
    "window_below_prompt": {"vocab": 131, "window": 8, "length": 115},
    "window_above_prompt": {"vocab": 509, "window": 64, "length": 37, "seed": 11, "rows": [21, 5, 1, 9]},
    "many_heads": {"vocab": 127, "layers": 8, "heads": (32, 8), "drafter_heads": (32, 8), "window": 16, "seed": 12},
    "odd_layer_count": {
        "vocab": 113, "layers": 6, "layer_types": ODD_TYPES, "rope_layers": (True, False, True, True, False, False),
        "window": 10, "theta": 10007.0, "taps": (1, 2, 4), "block": 8, "seed": 13, "length": 107,
    },
    "twelve_layers": {
        "vocab": 151, "hidden": 64, "layers": 12, "taps": (1, 3, 5, 8, 10), "drafter_layers": 5, "window": 21,
        "drafter_window": 13, "softcap": 7.0, "seed": 14, "length": 109,
    },
    "head_geometry_of_30b": {
        "vocab": 137, "hidden": 96, "intermediate": 160, "window": 33, "length": 60, "seed": 15, **THIRTY_B_HEADS,
    },
    "tied_head": {"vocab": 139, "layers": 5, "window": 12, "tied": True, "qk_scale": 2.5, "seed": 16},
}  # fmt: skip


class Doubled:
    """`torch` as a module sees it, where every mention of float32 means float64."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float", "float32") else getattr(torch, name)


@contextmanager
def precision(name: str) -> Iterator[torch.dtype]:
    """Within it, models built have this dtype; for float64 the upcasts inside the models are float64 too."""
    real, plain = torch.Tensor.float, [code.torch for code in CODE]
    if name == "float64":
        torch.Tensor.float = torch.Tensor.double
        for code in CODE:
            code.torch = Doubled()
    try:
        yield DTYPES[name]
    finally:
        torch.Tensor.float = real
        for code, own in zip(CODE, plain, strict=True):
            code.torch = own


def build(target: TargetSpec, drafter: DrafterSpec, dtype: torch.dtype, stored: str) -> tuple[Any, Any]:
    """Both models in a dtype, with weights that were rounded to `stored` first."""
    names = {"model.": "model.language_model.", "lm_head.": "lm_head."}
    config = MuseGlimmerConfig(**target_config(target), attn_implementation="eager")
    model = MuseGlimmerForConditionalGeneration(config)
    state = {}
    for name, array in target_weights(target).items():
        first = next(prefix for prefix in names if name.startswith(prefix))
        state[names[first] + name.removeprefix(first)] = torch.from_numpy(rounded(array, stored))
    missing, unexpected = model.load_state_dict(state, strict=False)
    unset = [name for name in missing if "vision" not in name and not (target.tied and name == "lm_head.weight")]
    assert (unset, unexpected) == ([], [])
    model.tie_weights()
    draft = MuseGlimmerAssistantModel(
        MuseGlimmerAssistantConfig(**drafter_config(drafter), attn_implementation="eager")
    )
    draft.load_state_dict({name: torch.from_numpy(rounded(w, stored)) for name, w in drafter_weights(drafter).items()})
    return model.to(dtype).eval(), draft.to(dtype).eval()


@torch.no_grad()
def forward(model: Any, tokens: np.ndarray, taps: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Logits [T, V] and joined taps [T, L*E] of a whole sequence; index L would be the last layer's after the norm."""
    out = model(input_ids=torch.from_numpy(tokens)[None], output_hidden_states=True)
    features = torch.cat([out.hidden_states[i + 1][0] for i in taps], dim=-1)
    return out.logits[0].double().numpy(), features.double().numpy()


@torch.no_grad()
def blocks(model: Any, draft: Any, spec: DrafterSpec, tokens: np.ndarray, features: np.ndarray, rows: list[int]) -> Any:
    """Drafter logits [rounds, S-1, V]: each round feeds the next rows of context, then one block after them."""
    raw = torch.nn.Embedding.from_pretrained(model.get_input_embeddings().weight)
    cache = DFlashCache(config=draft.config)
    cache.activate_past_recording()
    found, position = [], 0
    for round_index, count in enumerate(rows):
        cache.set_previous_accepted_tokens(count)
        if round_index:
            cache.crop(-spec.block)
        end = position + count
        ids = torch.tensor([[int(tokens[end])] + [spec.mask_token] * (spec.block - 1)])
        hidden = draft(
            noise_embeds=raw(ids),
            context_hidden_states=torch.from_numpy(features[None, position:end]).to(draft.dtype),
            position_ids=torch.arange(position, end + spec.block)[None],
            attention_mask=torch.ones(1, end + spec.block, dtype=torch.long),
            cache=cache,
        ).last_hidden_state
        found.append(model.get_output_embeddings()(hidden[0, 1:]).double().numpy())
        position = end
    return np.stack(found)


class Rounds:
    """What assisted generation did in each round: a streamer for the commits, a wrapper for the proposals."""

    def __init__(self) -> None:
        self.committed: list[list[int]] = []
        self.proposals: list[list[int]] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.committed.append(tokens.flatten().tolist())

    def end(self) -> None:
        pass

    @contextmanager
    def watching(self) -> Iterator[None]:
        real = DFlashTokenCandidateGenerator.get_candidates

        def watched(generator: Any, input_ids: torch.Tensor, **options: Any) -> Any:
            candidates, logits = real(generator, input_ids, **options)
            self.proposals.append(candidates[0, input_ids.shape[1] :].tolist())
            return candidates, logits

        DFlashTokenCandidateGenerator.get_candidates = watched
        try:
            yield
        finally:
            DFlashTokenCandidateGenerator.get_candidates = real


def assisted(model: Any, draft: Any, prompt: np.ndarray, count: int, eos: list[int]) -> dict[str, Any]:
    """A full greedy assisted run: its tokens, each round's proposal and commit, and the smallest logit margin."""
    rounds = Rounds()
    ids = torch.from_numpy(prompt)[None]
    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": eos or None, "pad_token_id": 0}
    with rounds.watching():  # without a mask of ones, a pad token inside the prompt would be masked out
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), assistant_model=draft, speculation_type="dflash",
            streamer=rounds, output_logits=True, return_dict_in_generate=True, **options,
        )  # fmt: skip
    best = torch.cat([row.double().topk(2, dim=-1).values for row in out.logits])
    return {
        "prompt": prompt.tolist(),
        "eos": eos,
        "tokens": out.sequences[0, len(prompt) :].tolist(),
        "committed": [len(tokens) for tokens in rounds.committed[2:]],  # not the prompt, not the prefill's own token
        "proposals": rounds.proposals[1:],
        "margin": float((best[:, 0] - best[:, 1]).min()),
    }


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max())


def record(sizes: dict[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Run one case; the arrays for its file and the facts for the index."""
    sizes = dict(sizes)
    length, rows, prompt_length = sizes.pop("length", 48), sizes.pop("rows", None), sizes.pop("prompt", 23)
    target, drafter = tiny_specs(**sizes)
    rows = rows or [length - 20, 1, 3, 1, 1, 9, 1, 2]
    tokens = np.random.RandomState(target.seed + 100).randint(0, target.vocab, length)
    results = {}
    for name, stored in RUNS.items():
        with precision("float64" if name == "exact" else name) as dtype:
            model, draft = build(target, drafter, dtype, stored)
            logits, features = forward(model, tokens, drafter.taps)
            if name == "float64":
                given = features.astype(np.float32)
            fed = rounded(given, stored).astype(np.float64)
            results[name] = (logits, features, blocks(model, draft, drafter, tokens, fed, rows))
    names = ("logits", "features", "blocks")
    arrays = dict(zip(names, results["float64"], strict=True))
    facts = spec_dict(target, drafter) | {"rows": rows}
    for lossy, exact in (("float32", "float64"), ("bfloat16", "exact")):
        lost = map(distance, results[lossy], results[exact])
        facts[f"{lossy}_error"] = dict(zip(names, lost, strict=True))
    facts["assisted"] = run_assisted(target, drafter, tokens[:prompt_length], [])
    first, *others = facts["assisted"]["tokens"]
    facts["ended"] = run_assisted(target, drafter, tokens[:prompt_length], [t for t in others if t != first][:1])
    return arrays | {"tokens": tokens}, facts


def run_assisted(target: TargetSpec, drafter: DrafterSpec, prompt: np.ndarray, eos: list[int]) -> Any:
    """The assisted run of a pair whose head favours few tokens, so that random drafts are accepted now and then."""
    runs = []
    favouring = TargetSpec(**(target.__dict__ | {"favoured": 2}))
    for name in ("float64", "float32"):
        with precision(name) as dtype:
            runs.append(assisted(*build(favouring, drafter, dtype, "float32"), prompt, NEW_TOKENS, eos))
    same = all(runs[0][key] == runs[1][key] for key in ("tokens", "committed", "proposals"))
    return runs[0] | {"favoured": 2, "float32_agrees": same}


def random_sizes(seed: int) -> dict[str, Any]:
    """A random case: sizes that differ from one another, windows on both sides of the prompt's length."""
    random = np.random.RandomState(seed)

    def pick(*options: Any) -> Any:
        return options[random.randint(len(options))]

    layers = int(random.randint(4, 13))
    heads, head_dim = pick(((4, 2), 16), ((8, 2), 32), ((32, 8), 16), ((32, 2), 64), ((2, 1), 128))
    taps = tuple(sorted(random.choice(layers - 1, size=random.randint(1, min(5, layers)), replace=False).tolist()))
    types = tuple(pick(SLIDING, FULL) for _ in range(layers))
    ropes = tuple(bool(pick(0, 1)) for _ in types)
    return {
        "vocab": pick(101, 131, 149), "hidden": pick(64, 96, 160), "intermediate": pick(112, 208), "layers": layers,
        "heads": heads, "head_dim": head_dim, "layer_types": types, "rope_layers": ropes,
        "window": pick(5, 9, 16, 30, 70), "drafter_window": pick(6, 11, 16, 80), "theta": pick(1e4, 5e5),
        "qk_scale": pick(1.5, 3.87), "multiplier": pick(0.3, 0.8), "softcap": pick(6.0, 20.0), "taps": taps,
        "drafter_heads": pick((4, 2), (32, 8), (6, 3)), "drafter_head_dim": pick(16, 32),
        "drafter_layers": pick(1, 2, 4), "block": pick(8, 16), "length": int(random.randint(30, 130)),
        "prompt": int(random.randint(1, 40)),
        "seed": seed,
    }  # fmt: skip


def write(folder: Path, cases: dict[str, dict[str, Any]]) -> None:
    """Write every case's arrays and one index of all facts; cases whose greedy run is too close to call are redrawn."""
    folder.mkdir(parents=True, exist_ok=True)
    index: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__, "cases": {}}
    for name, sizes in cases.items():
        for again in range(20):
            arrays, facts = record(sizes | {"seed": sizes.get("seed", 10) + 1000 * again})
            if facts["assisted"]["margin"] >= MARGIN and facts["assisted"]["float32_agrees"]:
                break
        stored = {key: as_stored(array, "int32" if key == "tokens" else "float32") for key, array in arrays.items()}
        write_safetensors(folder / f"{name}.safetensors", stored)
        index["cases"][name] = facts
        run = facts["assisted"]
        print(f"{name}: committed {run['committed']}, margin {run['margin']:.1e}", file=sys.stderr)
        print(f"  float32 {facts['float32_error']}\n  bfloat16 {facts['bfloat16_error']}", file=sys.stderr)
    (folder / "cases.json").write_text(json.dumps(index) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--live", type=int, help="seed of random cases, instead of the committed ones")
    parser.add_argument("--count", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[1] / "golden")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = CASES
    if options.live is not None:
        cases = {f"random_{options.live + i}": random_sizes(options.live + i) for i in range(options.count)}
    write(options.out, cases)


if __name__ == "__main__":
    main()
