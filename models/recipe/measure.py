"""Measure the finished pairs with the project's own runtime: accepted drafts and tokens per second.

Every prompt is decoded plainly and with each drafter and draft length, one after the other, so that all of them meet
the same load of the machine. Texts should be equal. A round counts as looping when the text up to its anchor repeats
itself; rounds that the token budget cut short are left out of the acceptance figures. Times cover decoding only.

Commands: python measure.py --work WORK                              writes WORK/measure.json
          python measure.py --work WORK --quantised WORK/converted   writes WORK/measure_quantised.json
The second measures drafters that `dflash-mlx convert` wrote, FOLDER/NAME each, and only what they get accepted.
"""

import argparse
import json
import os
import time

import numpy as np
from acceptance import held_prompts
from continuations import looping
from target import HERE
from tokenizers import Tokenizer

import dflash_mlx

DRAFTERS = {"v1": "drafter", "dflash2": "drafter2"}
LENGTHS = {"code": [2, 3, 4, 6, 7], "code_sampled_0.7": [4, 7], "chat": [4, 6, 7]}
NEW = 128


def generate(pair, prompt, length, temperature, seed):
    sampled = {"temperature": temperature, "seed": seed} if temperature else {}
    return dflash_mlx.generate(pair, prompt, draft_length=length, max_tokens=NEW, **sampled)


def full_rounds(result, prompt, length):
    """[(looping, accepted)] of the rounds that could draft `length` tokens."""
    marks, at, found = looping(np.array([[*prompt, *result.tokens]]))[0], len(prompt), []
    for entry in result.stats.rounds:
        if entry.drafted == length:
            found.append((marks[at], entry.accepted))
        at += entry.committed
    return found


def accepted(found, length):
    """Mean accepted, by position and rounds: all, in text that does not loop, in text that does."""
    table = {}
    for name, keep in (("all", (True, False)), ("not_looping", (False,)), ("looping", (True,))):
        counts = np.array([count for loop, count in found if loop in keep])
        if len(counts):
            by = [round(float((counts > j).mean()), 3) for j in range(length)]
            mean = float(counts.mean())
            table[name] = {"rounds": len(counts), "mean_accepted": round(mean, 3), "mean_length": round(mean + 1, 3)}
            table[name] |= {"accepted_share": round(mean / length, 3), "by_position": by}
    return table


def measure(pairs, prompts, temperature, lengths):
    """Acceptance and speed by drafter and draft length; on every prompt all take turns, plain decoding first."""
    ways = [("plain", 0), *((name, k) for k in lengths for name in pairs)]
    runs = {way: [] for way in ways}
    for i, prompt in enumerate(prompts):
        for name, k in ways:
            pair = pairs.get(name) or next(iter(pairs.values()))
            runs[name, k].append(generate(pair, prompt, k, temperature, i))
        print(f"temperature {temperature} prompt {i + 1} of {len(prompts)}", flush=True)
    plain, table = runs["plain", 0], {}
    for (name, k), results in runs.items():
        tokens = sum(entry.committed for result in results for entry in result.stats.rounds)
        seconds = sum(entry.total_s for result in results for entry in result.stats.rounds)
        row = {"tokens_per_s": round(tokens / seconds, 1), "tokens": tokens}
        if k:
            row["equal_to_plain"] = sum(a.tokens == b.tokens for a, b in zip(results, plain, strict=True))
            row |= accepted([r for p, x in zip(prompts, results, strict=True) for r in full_rounds(x, p, k)], k)
        table.setdefault(name, {})[str(k)] = row
        brief = {n: row[n].get("mean_accepted") if isinstance(row[n], dict) else row[n] for n in row}
        print(temperature, name, k, brief, flush=True)
    fresh = [m for p, r in zip(prompts, plain, strict=True) for m in looping(np.array([[*p, *r.tokens]]))[0, len(p) :]]
    return {"prompts": len(prompts), "looping_share": round(float(np.mean(fresh)), 3), "by_drafter": table}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", required=True)
    parser.add_argument("--out", default=os.path.join(HERE, "..", "pocket"))
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--quantised", metavar="FOLDER", help="measure the converted drafters in it, at length 7")
    args = parser.parse_args()
    began, target = time.time(), os.path.join(args.out, "target")
    folders = {name: os.path.join(args.out, folder) for name, folder in DRAFTERS.items()}
    if args.quantised:
        folders |= {name: os.path.join(args.quantised, name) for name in sorted(os.listdir(args.quantised))}
    pairs = {name: dflash_mlx.load(target, draft=folder) for name, folder in folders.items()}
    prompts = held_prompts(args.work, Tokenizer.from_file(os.path.join(target, "tokenizer.json")))
    prompts["code"] = prompts["code"][:: max(1, len(prompts["code"]) // args.prompts)]
    path = os.path.join(args.work, "measure_quantised.json" if args.quantised else "measure.json")
    parts = {"code": [7], "chat": [7]} if args.quantised else LENGTHS
    result = {}
    for name, lengths in parts.items():
        kind, temperature = name.split("_")[0], 0.7 if "sampled" in name else 0.0
        result[name] = measure(pairs, prompts[kind][: args.prompts], temperature, lengths)
        with open(path, "w") as file:
            json.dump(result, file, indent=1)
    print(f"{time.time() - began:.0f} s")


if __name__ == "__main__":
    main()
