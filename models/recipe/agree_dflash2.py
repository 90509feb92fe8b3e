"""Check the saved DFlash-2 drafter: its torch form, which was trained, against this project's MLX form, in float32.

Both draft whole blocks at anchors of the pool's continuations, from the same features, far past the window too.

Command: python agree_dflash2.py --work WORK
"""

import argparse
import os

import mlx.core as mx
import numpy as np
import torch
from publish import load_drafter, load_target
from target import HERE

import dflash_mlx
from dflash_mlx.cache import DrafterContext
from dflash_mlx.choice import Choice
from dflash_mlx.options import Options

ROWS, ANCHORS, STEP = (3, 50, 77), (8, 40, 129, 200, 350), 64


def torch_block(target, drafter, features, ids, anchor):
    """Logits [S - 1, V] and greedy tokens of the block at an anchor."""
    at, size = torch.tensor([[anchor]]), drafter.c["block_size"]
    rows = drafter.hidden(features[None], ids[None], at, torch.full_like(at, size), target.embed_tokens.weight)
    head = target.lm_head.weight
    return drafter.logits(rows[0, 0, 1:], head).numpy(), drafter.draft(rows[0, :, 1:], head, ids[at[0]])[0].tolist()


def mlx_block(pair, features, ids, anchor):
    """The same from the runtime; the context is fed in steps, as rounds do."""
    drafter = pair.drafter
    config, size = drafter.config, drafter.config.hidden_size
    context, features = DrafterContext(config, mx.float32), mx.array(features.numpy())
    for first in range(0, anchor, STEP):
        rows = features[first : min(anchor, first + STEP)]
        drafter.extend(context, [rows[:, i * size : (i + 1) * size] for i in range(len(config.taps))])
        context.advance(rows.shape[0])
    block = [int(ids[anchor])] + [config.mask_token_id] * (config.block_size - 1)
    slots = drafter.draft(mx.array(block, dtype=mx.uint32), context, pair.target, config.block_size - 1)
    tokens = Choice(Options(), seed=0).proposal(slots, anchor + 1, ids[: anchor + 1].tolist())
    return np.array(slots.logits), tokens.tolist()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", required=True)
    parser.add_argument("--out", default=os.path.join(HERE, "..", "pocket"))
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    folders = [os.path.join(args.out, name) for name in ("target", "drafter2")]
    pair = dflash_mlx.load(folders[0], draft=folders[1])
    pair.target.set_dtype(mx.float32)
    pair.drafter.set_dtype(mx.float32)
    target, drafter = load_target(folders[0]), load_drafter(folders[1])
    pool = torch.load(os.path.join(args.work, "pool_2.pt"), weights_only=True)
    worst, same, count = 0.0, 0, 0
    for row in ROWS:
        ids, features = pool["ids"][row], pool["features"][row].float()
        for anchor in ANCHORS:
            ours, tokens = mlx_block(pair, features, ids, anchor)
            theirs, expected = torch_block(target, drafter, features, ids, anchor)
            worst = max(worst, float(np.abs(ours - theirs).max()))
            same += sum(a == b for a, b in zip(tokens, expected, strict=True))
            count += len(expected)
    print(f"largest difference of logits {worst:.1e}; {same} of {count} drafted tokens are the same")


if __name__ == "__main__":
    main()
