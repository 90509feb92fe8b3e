"""Train a drafter of the pocket target, v1 or DFlash-2, on the target's own continuations.

First a pool of continuations with the target's features is made (pool.pt), then blocks are trained at random
anchors in it. Both steps resume after a kill; all that is random follows from the seed and a step number.

Commands: python drafter.py --work WORK --make 0 2 &     (optional: two processes of one thread make the pool faster)
          python drafter.py --work WORK --make 1 2
          python drafter.py --work WORK
          python drafter.py --work WORK --drafter drafter2
"""

import argparse
import json
import os
import random
import time

import numpy as np
import torch
import torch.nn.functional as F
from blocks import DRAFTER_CONFIG
from continuations import chat_prompts, continuations, looping
from lean import parameters_by_kind, warm_stable_decay
from publish import DRAFTERS, load_target, save_drafter
from target import HERE, LENGTH, Windows, load_checkpoint, save_checkpoint
from tokenizers import Tokenizer

SEED = 23
POOL, ROWS, SPAN = 32, 128, 384  # batches of sequences, sequences per batch, tokens per sequence
PROMPT_SIZES = [24, 64, 128, 200]
TEMPERATURES = [0.0, 0.3, 0.7, 1.0]  # by row
CHAT_SHARE = 8  # every CHAT_SHARE-th batch continues chat prompts
TOTAL, WARM, DECAY_SHARE = 2400, 40, 0.4  # steps
BATCH, ANCHORS = 8, 32  # sequences per step, anchors per sequence
MUON_RATE, ADAM_RATE = 0.02, 3e-3
FADE = 5.0  # the loss of slot j weighs exp(-(j - 1) / FADE)
LOOP_CHANCE, PROMPT_CHANCE = 0.15, 0.25  # of an anchor in looping text or in the prompt, against 1 elsewhere
OFF_PATH = 0.25  # weight of slots behind a token that the target would not have chosen
SAVE_SECONDS = 120


def make_pool(work, target, tokenizer, batches):
    """Write one file of continuations for each of the batches; those that exist are kept."""
    windows = Windows(np.load(os.path.join(work, "train.npy")), tokenizer, LENGTH, 1, SEED)
    with open(os.path.join(work, "chat_train.json")) as file:
        chats = [p for p in chat_prompts(json.load(file), tokenizer) if len(p) < SPAN - 64]
    random.Random(SEED).shuffle(chats)
    for batch in batches:
        path = os.path.join(work, f"pool_{batch}.pt")
        if os.path.exists(path):
            continue
        began = time.time()
        if batch % CHAT_SHARE == CHAT_SHARE - 1:
            first = batch // CHAT_SHARE * ROWS
            prompts = (chats * 2)[first % len(chats) :][:ROWS]
        else:
            size = PROMPT_SIZES[batch % len(PROMPT_SIZES)]
            prompts = [windows.sequence(batch * ROWS + i)[:size].tolist() for i in range(ROWS)]
        heat = torch.tensor([TEMPERATURES[i % len(TEMPERATURES)] for i in range(ROWS)])
        generator = torch.Generator().manual_seed(SEED * 1000 + batch)
        ids, features, choice = continuations(
            target, prompts, SPAN, heat, DRAFTER_CONFIG["target_layer_ids"], generator
        )
        sizes = torch.tensor([len(p) for p in prompts])
        torch.save({"ids": ids, "features": features, "choice": choice, "sizes": sizes}, path + ".part")
        os.replace(path + ".part", path)
        print(f"{time.strftime('%H:%M:%S')} batch {batch} of the pool, {time.time() - began:.0f} s", flush=True)


def read_pool(work):
    parts = [torch.load(os.path.join(work, f"pool_{i}.pt"), weights_only=True) for i in range(POOL)]
    pool = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    pool["worth"] = worth(pool["ids"], pool["sizes"])
    return pool


def worth(ids, sizes):
    """Chance of every position to be an anchor: most in the target's own text where it does not loop."""
    chance = torch.where(torch.from_numpy(looping(ids.numpy())), LOOP_CHANCE, 1.0)
    place = torch.arange(SPAN)
    chance = torch.where(place < sizes[:, None] - 1, PROMPT_CHANCE, chance)
    return torch.where((place >= 8) & (place < SPAN - DRAFTER_CONFIG["block_size"]), chance, 0.0)


def blocks_of(pool, step):
    """Rows, anchors [B, N], widths [B, N] of a step."""
    generator = torch.Generator().manual_seed(SEED * 1_000_003 + step)
    S = DRAFTER_CONFIG["block_size"]
    rows = torch.randint(len(pool["ids"]), (BATCH,), generator=generator)
    anchors = torch.multinomial(pool["worth"][rows], ANCHORS, generator=generator)
    narrow = torch.randint(2, S, (BATCH, ANCHORS), generator=generator)
    widths = torch.where(torch.rand(BATCH, ANCHORS, generator=generator) < 0.3, narrow, S)
    return rows, anchors, widths


def block_loss(drafter, pool, batch, table, head):
    """Weighted cross-entropy of the slots against the target's choices; and the mean accepted drafts."""
    rows, anchors, widths = batch
    S, ids = DRAFTER_CONFIG["block_size"], pool["ids"][rows]
    hidden = drafter.hidden(pool["features"][rows], ids, anchors, widths, table)[:, :, 1:]
    places = (anchors[:, :, None] + torch.arange(S - 1)).flatten(1)
    choice = torch.gather(pool["choice"][rows], 1, places).view(*anchors.shape, S - 1)
    before, said = (torch.gather(ids, 1, at).view_as(choice) for at in (places, places + 1))
    on_path = F.pad((said == choice).cumprod(-1)[..., :-1], (1, 0), value=1).bool()
    weight = torch.exp(-torch.arange(S - 1) / FADE) * torch.where(on_path, 1.0, OFF_PATH)
    weight = weight * (torch.arange(1, S) < widths[..., None])
    losses, tokens = drafter.losses(hidden, head, before, choice)
    hits = ((tokens == choice) & on_path).cumprod(-1).sum(-1).float().mean()
    return (losses * weight).sum() / weight.sum(), hits


def optimisers(model):
    matrices, rest = parameters_by_kind(model)
    muon = torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.05, momentum=0.95, adjust_lr_fn="original")
    return [muon, torch.optim.AdamW(rest, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0)]


def train(work, target, total, name):
    torch.manual_seed(SEED)
    drafter = DRAFTERS[name](dtype=torch.bfloat16)
    opts, path, pool = optimisers(drafter), os.path.join(work, f"{name}.pt"), read_pool(work)
    first = load_checkpoint(path, drafter, opts)
    table, head = target.embed_tokens.weight, target.lm_head.weight
    loss_of, every = torch.compile(block_loss), list(drafter.parameters())
    began, saved, mean, accepted = time.time(), time.time(), None, None
    for step in range(first, total):
        factor = warm_stable_decay(step, total, WARM, DECAY_SHARE)
        for opt, rate in zip(opts, (MUON_RATE, ADAM_RATE), strict=True):
            for group in opt.param_groups:
                group["lr"] = rate * factor
        loss, hits = loss_of(drafter, pool, blocks_of(pool, step), table, head)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(every, 1.0)
        for opt in opts:
            opt.step()
            opt.zero_grad(set_to_none=True)
        mean = loss.item() if mean is None else 0.97 * mean + 0.03 * loss.item()
        accepted = hits.item() if accepted is None else 0.97 * accepted + 0.03 * hits.item()
        if step % 20 == 0 or step == total - 1:
            speed = (step + 1 - first) / (time.time() - began)
            figures = f"loss {mean:.4f} accepted {accepted:.2f} rate x{factor:.3f} steps/s {speed:.2f}"
            print(f"{time.strftime('%H:%M:%S')} step {step} of {total} {figures}", flush=True)
        if time.time() - saved > SAVE_SECONDS or step == total - 1:
            save_checkpoint(path, drafter, opts, step + 1)
            saved = time.time()
    return drafter


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", required=True)
    parser.add_argument("--out", default=os.path.join(HERE, "..", "pocket"))
    parser.add_argument("--total", type=int, default=TOTAL)
    parser.add_argument("--drafter", default="drafter", choices=DRAFTERS, help="v1 or, as drafter2, DFlash-2")
    parser.add_argument("--make", nargs=2, type=int, metavar=("PART", "PARTS"), help="only make a part of the pool")
    args = parser.parse_args()
    torch.set_num_threads(1 if args.make else 2)
    target = load_target(os.path.join(args.out, "target"), torch.bfloat16)
    tokenizer = Tokenizer.from_file(os.path.join(args.out, "target", "tokenizer.json"))
    part, parts = args.make or (0, 1)
    make_pool(args.work, target, tokenizer, range(part, POOL, parts))
    if not args.make:
        save_drafter(train(args.work, target, args.total, args.drafter), os.path.join(args.out, args.drafter))


if __name__ == "__main__":
    main()
