"""Accepted drafts per round on held-out prompts, greedy, computed from one plain continuation per prompt.

The target's greedy text does not depend on the drafts, so it is made once with its features; the drafter is run at
every anchor of it, and rounds are walked over the result for each draft length. The block has all 16 slots
(`full`) or only the anchor and the drafted ones (`narrow`). A round loops when the text up to its anchor does.

Commands: python acceptance.py --work WORK                         writes WORK/acceptance_drafter.json
          python acceptance.py --work WORK --drafter drafter2      writes WORK/acceptance_drafter2.json
"""

import argparse
import json
import os

import numpy as np
import torch
from blocks import DRAFTER_CONFIG
from continuations import chat_prompts, continuations, looping
from publish import DRAFTERS, load_drafter, load_target
from target import HERE, TOKEN, Windows
from tokenizers import Tokenizer

SEED = 24
PROMPTS, CHATS, NEW = 60, 20, 160  # held-out code prompts, chat prompts, tokens to continue
SIZES = [32, 96, 160, 224]
LENGTHS = [1, 2, 3, 4, 6, 7, 15]
NARROW = [4, 6, 7]  # lengths that are also tried with a block of only length + 1 slots


def held_prompts(work, tokenizer):
    """{"code": prompts from held-out files at line starts, "chat": held-out chat prompts}; the end is not aligned."""
    prompts = {"code": [], "chat": []}
    for kind, count in (("library", PROMPTS // 2), ("test", PROMPTS // 2)):
        windows = Windows(np.load(os.path.join(work, f"held_{kind}.npy")), tokenizer, 256, 1, SEED)
        rows = [windows.sequence(i) for i in range(windows.count)]
        rows = [row for row in rows if row[0] == TOKEN["begin_of_text"]][:count]
        prompts["code"] += [row[: SIZES[i % len(SIZES)]].tolist() for i, row in enumerate(rows)]
    with open(os.path.join(work, "chat_held.json")) as file:
        prompts["chat"] = [p for p in chat_prompts(json.load(file), tokenizer) if len(p) < 200][:CHATS]
    return prompts


def predictions(drafter, features, ids, first, last, width, table, head):
    """Drafted tokens [last - first, S - 1] at the anchors first..last-1 of one sequence."""
    anchors = torch.arange(first, last)[None]
    hidden = drafter.hidden(features[None], ids[None], anchors, torch.full_like(anchors, width), table)
    return drafter.draft(hidden[0, :, 1:], head, ids[anchors[0]])


def walk(drafts, ids, first, last, length):
    """Rounds of one text as (anchor, accepted)."""
    at, rounds = first, []
    while at < last:
        room = min(length, len(ids) - 1 - at)
        same = drafts[at - first, :room] == ids[at + 1 : at + 1 + room]
        accepted = int(same.int().cumprod(0).sum())
        rounds.append((at, accepted))
        at += accepted + 1
    return rounds


@torch.no_grad()
def measure(target, drafter, prompts):
    """{(block, length): [(looping, accepted), ...]} over all rounds of all prompts, and example token lists."""
    table, head, S = target.embed_tokens.weight, target.lm_head.weight, DRAFTER_CONFIG["block_size"]
    length = max(map(len, prompts)) + NEW
    ids, features, _ = continuations(
        target,
        prompts,
        length,
        torch.zeros(len(prompts)),
        DRAFTER_CONFIG["target_layer_ids"],
        torch.Generator().manual_seed(SEED),
    )
    rounds, texts = {}, []
    for row, feature, prompt in zip(ids, features, prompts, strict=True):
        first, last = len(prompt), len(prompt) + NEW
        stops = [i for i in range(first, last) if row[i] in (TOKEN["end_of_text"], TOKEN["eot"])]
        row = row[: stops[0] + 1 if stops else last]
        marks, last = looping(row[None].numpy())[0], max(first, len(row) - S)
        texts.append((row.tolist(), marks))
        if first == last:
            continue
        full = predictions(drafter, feature[: len(row)], row, first, last, S, table, head)
        blocks = [("full", k, full) for k in LENGTHS]
        for k in NARROW:
            slots = predictions(drafter, feature[: len(row)], row, first, last, k + 1, table, head)
            blocks.append(("narrow", k, slots))
        for block, k, drafts in blocks:
            found = walk(drafts, row, first, last, k)
            rounds.setdefault((block, k), []).extend((marks[at], accepted) for at, accepted in found)
    return rounds, texts


def summary(rounds):
    """Figures per block form and draft length: mean accepted, by position, rounds; looping and not apart."""
    table = {}
    for (block, k), found in rounds.items():
        entry = {}
        for name, keep in (("all", (True, False)), ("not_looping", (False,)), ("looping", (True,))):
            accepted = np.array([a for loop, a in found if loop in keep])
            if len(accepted):
                by = [round(float((accepted > j).mean()), 3) for j in range(k)]
                entry[name] = {
                    "rounds": len(accepted),
                    "mean_accepted": round(float(accepted.mean()), 3),
                    "mean_length": round(float(accepted.mean()) + 1, 3),
                    "accepted_share": round(float(accepted.mean()) / k, 3),
                    "by_position": by,
                }
        table.setdefault(block, {})[str(k)] = entry
    return table


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", required=True)
    parser.add_argument("--out", default=os.path.join(HERE, "..", "pocket"))
    parser.add_argument("--drafter", default="drafter", choices=DRAFTERS, help="v1 or, as drafter2, DFlash-2")
    args = parser.parse_args()
    torch.set_num_threads(2)
    target = load_target(os.path.join(args.out, "target"), torch.bfloat16)
    drafter = load_drafter(os.path.join(args.out, args.drafter), torch.bfloat16)
    tokenizer = Tokenizer.from_file(os.path.join(args.out, "target", "tokenizer.json"))
    result = {}
    for kind, prompts in held_prompts(args.work, tokenizer).items():
        rounds, texts = measure(target, drafter, prompts)
        result[kind] = {"prompts": len(prompts), "new_tokens": NEW, "greedy": summary(rounds)}
        fresh = [mark for (_, marks), p in zip(texts, prompts, strict=True) for mark in marks[len(p) :]]
        result[kind]["looping_share"] = round(float(np.mean(fresh)), 3)
        print(kind, "prompts", len(prompts), "share of looping tokens", result[kind]["looping_share"])
        for block, rows in result[kind]["greedy"].items():
            for k, entry in rows.items():
                print(f"  {block} block, draft length {k}:", {n: e["mean_accepted"] for n, e in entry.items()})
    with open(os.path.join(args.work, f"acceptance_{args.drafter}.json"), "w") as file:
        json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
