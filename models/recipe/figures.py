"""Gather what was measured into ../pocket/figures.json, beside the card, so that tests can read it.

Command: python figures.py --work WORK
"""

import argparse
import json
import math
import os

import drafter
import target
from blocks import DRAFTER_CONFIG
from publish import DRAFTERS
from safetensors import safe_open


def parameters(folder):
    """Number of weights in a folder's model.safetensors."""
    with safe_open(os.path.join(folder, "model.safetensors"), "pt") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", required=True)
    parser.add_argument("--out", default=os.path.join(target.HERE, "..", "pocket"))
    args = parser.parse_args()
    result = {
        "target": {"parameters": parameters(os.path.join(args.out, "target")), "steps": target.TOTAL,
                   "tokens_per_step": target.BATCH * target.LENGTH},
        "drafters": {name: parameters(os.path.join(args.out, name)) for name in DRAFTERS},
        "training": {"steps": drafter.TOTAL, "blocks_per_step": drafter.BATCH * drafter.ANCHORS,
                     "taps": DRAFTER_CONFIG["target_layer_ids"],
                     "continuation_tokens": drafter.POOL * drafter.ROWS * drafter.SPAN},
    }  # fmt: skip
    names = ["evaluation_target", "evaluation_baselines", *(f"acceptance_{name}" for name in DRAFTERS)]
    for name in [*names, "measure", "measure_quantised"]:
        path = os.path.join(args.work, f"{name}.json")
        if os.path.exists(path):
            with open(path) as file:
                result[name] = json.load(file)
    with open(os.path.join(args.out, "figures.json"), "w") as file:
        json.dump(result, file, separators=(",", ":"))
        file.write("\n")


if __name__ == "__main__":
    main()
