"""Golden files of random DFlash-2 drafters from dflash's own torch classes, for the live oracle suite.

    python tests/oracle/make_dflash2.py --live 7 --count 6 --out D   random cases from seed 7, into D

Needs torch, transformers and dflash (0.1.0 was used), not MLX. As in make_golden.py, weights are rebuilt from seeds on
both sides, and truth is torch run wholly in float64; what float32 loses there is recorded beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import dflash.model as dflash_code
import numpy as np
import torch
from make_golden import CODE, distance, precision
from transformers import DynamicCache, Qwen3Config
from transformers.models.qwen3 import modeling_qwen3 as qwen_code

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from layouts import drafter_config
from specs import Drafter2Spec, TargetSpec, drafter_weights, spec_dict, target_weights, tiny_specs
from stored import as_stored, write_safetensors

CODE += [dflash_code, qwen_code]
CODEBOOK = "_codebook"


def build(target: TargetSpec, drafter: Drafter2Spec, dtype: torch.dtype) -> tuple[Any, torch.Tensor, torch.nn.Linear]:
    """The drafter, the target's raw table and its raw head, in a dtype."""
    config = Qwen3Config(**drafter_config(drafter), num_target_layers=target.layers)
    model = dflash_code.DFlash2DraftModel(config)
    weights = {name: torch.from_numpy(array) for name, array in drafter_weights(drafter).items()}
    model.load_state_dict({f"{name}.weight" if name.endswith(CODEBOOK) else name: w for name, w in weights.items()})
    whole = target_weights(target)
    head = torch.nn.Linear(target.hidden, target.vocab, bias=False)
    head.weight.data = torch.from_numpy(whole["lm_head.weight"])
    return model.to(dtype).eval(), torch.from_numpy(whole["model.embed_tokens.weight"]).to(dtype), head.to(dtype)


@torch.inference_mode()
def rounds(
    parts: tuple[Any, torch.Tensor, torch.nn.Linear], spec: Drafter2Spec, tokens: Any, features: Any, rows: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Logits [rounds, S-1, V] and greedy paths [rounds, S-1]: each round feeds the next rows, then drafts a block."""
    model, table, head = parts
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    logits, paths, position = [], [], 0
    for count in rows:
        end = position + count
        ids = torch.tensor([[int(tokens[end])] + [spec.mask_token] * (spec.block - 1)])
        hidden = model(
            target_hidden=torch.from_numpy(features[None, position:end]).to(table.dtype),
            noise_embedding=torch.nn.functional.embedding(ids, table) * (spec.embedding_scale or 1.0),
            position_ids=torch.arange(position, end + spec.block)[None],
            past_key_values=cache,
            use_cache=True,
        )[:, 1 - spec.block :]
        dflash_code._crop_to(cache, end)
        logits.append(model.compute_logits(hidden, head)[0].double().numpy())
        paths.append(model.propose(hidden, ids[:, 0], head, 0.0)[0][0].numpy())
        position = end
    return np.stack(logits), np.stack(paths)


def record(sizes: dict[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Run one case; the arrays for its file and the facts for the index."""
    sizes = dict(sizes)
    rows = sizes.pop("rows")
    target, drafter = tiny_specs(**sizes)
    draw = np.random.RandomState(target.seed + 100)
    tokens = draw.randint(0, target.vocab, sum(rows) + 1)
    features = draw.standard_normal((sum(rows), target.hidden * len(drafter.taps))).astype(np.float32)
    results = {}
    for name in ("float64", "float32"):
        with precision(name) as dtype:
            results[name] = rounds(build(target, drafter, dtype), drafter, tokens, features, rows)
    logits, paths = results["float64"]
    facts = spec_dict(target, drafter) | {"rows": rows}
    facts["float32_error"] = {"blocks": distance(results["float32"][0], logits)}
    facts["float32_agrees"] = bool((results["float32"][1] == paths).all())
    return {"blocks": logits, "paths": paths, "features": features, "tokens": tokens}, facts


def random_sizes(seed: int) -> dict[str, Any]:
    """A random case: rounds of 1, 3, 8 and other numbers of new rows, far past a window that is often small."""
    random = np.random.RandomState(seed)

    def pick(*options: Any) -> Any:
        return options[random.randint(len(options))]

    hidden = pick(64, 96, 160)
    first = int(random.randint(1, 90))
    return {
        "generation": 2, "seed": seed, "vocab": pick(101, 131, 149), "hidden": hidden, "layers": 6,
        "taps": pick((0, 2, 4), (1, 3), (2,)), "drafter_layers": pick(1, 2, 4), "drafter_intermediate": pick(112, 208),
        "drafter_heads": pick((4, 2), (32, 8), (6, 3)), "drafter_head_dim": pick(16, 32), "theta": pick(1e4, 5e5),
        "drafter_window": pick(6, 11, 16, 40), "block": pick(4, 8, 16),
        "drafter_causal": pick(None, True, False, False), "drafter_kernel": pick(1, 2, 3),
        "drafter_group": pick(8, 16, hidden), "drafter_rank": pick(8, 24),
        "drafter_candidates": pick(2, 7, 16), "drafter_multiplier": pick(0.3, 0.8, 1.0),
        "drafter_softcap": pick(None, 6.0, 20.0), "drafter_embedding_scale": pick(None, 1.7),
        "rows": [first, 1, 3, 1, 1, 8, 1, 3, 8, 8, 1, 30, 1, 1, 3, 8],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--live", type=int, required=True, help="seed of the first case")
    parser.add_argument("--count", type=int, default=6)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    index: dict[str, Any] = {"cases": {}}
    for number in range(options.count):
        name = f"dflash2_{options.live + number}"
        for again in range(20):  # a walk that float32 cannot repeat would hang on a rounding
            arrays, facts = record(random_sizes(options.live + number) | {"seed": options.live + number + 1000 * again})
            if facts["float32_agrees"]:
                break
        kinds = {"tokens": "int32", "paths": "int32"}
        stored = {key: as_stored(array, kinds.get(key, "float32")) for key, array in arrays.items()}
        write_safetensors(options.out / f"{name}.safetensors", stored)
        index["cases"][name] = facts
        print(f"{name}: float32 {facts['float32_error']}", file=sys.stderr)
    (options.out / "cases.json").write_text(json.dumps(index) + "\n")


if __name__ == "__main__":
    main()
