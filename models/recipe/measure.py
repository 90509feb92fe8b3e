"""Measure the finished pair with the project's own runtime: accepted drafts and tokens per second.

Every prompt is decoded plainly and with each draft length, one after the other, so that all of them meet the same
load of the machine. Texts should be equal. A round counts as looping when the text up to its anchor repeats itself;
rounds that the token budget cut short are left out of the acceptance figures. Times cover decoding only.

Command: python measure.py --work WORK     writes WORK/measure.json
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

LENGTHS = [0, 1, 2, 3, 4, 5, 7, 15]  # 0 is plain decoding
SAMPLED = [0, 4, 7]
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
            table[name] = {"rounds": len(counts), "mean_accepted": round(float(counts.mean()), 3), "by_position": by}
    return table


def measure(pair, prompts, temperature, lengths):
    """Acceptance and speed by draft length; on every prompt all lengths take turns, plain decoding first."""
    runs = {k: [] for k in lengths}
    for i, prompt in enumerate(prompts):
        for k in lengths:
            runs[k].append(generate(pair, prompt, k, temperature, i))
        print(f"temperature {temperature} prompt {i + 1} of {len(prompts)}", flush=True)
    table, plain = {}, runs[0]
    for k, results in runs.items():
        tokens = sum(entry.committed for result in results for entry in result.stats.rounds)
        seconds = sum(entry.total_s for result in results for entry in result.stats.rounds)
        row = {"tokens_per_s": round(tokens / seconds, 1), "tokens": tokens}
        if k:
            row["equal_to_plain"] = sum(a.tokens == b.tokens for a, b in zip(results, plain, strict=True))
            row |= accepted([r for p, x in zip(prompts, results, strict=True) for r in full_rounds(x, p, k)], k)
        table[str(k)] = row
        print(temperature, k, {n: row[n].get("mean_accepted") if isinstance(row[n], dict) else row[n] for n in row})
    fresh = [m for p, r in zip(prompts, plain, strict=True) for m in looping(np.array([[*p, *r.tokens]]))[0, len(p) :]]
    return {"prompts": len(prompts), "looping_share": round(float(np.mean(fresh)), 3), "by_draft_length": table}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", required=True)
    parser.add_argument("--out", default=os.path.join(HERE, "..", "pocket"))
    parser.add_argument("--prompts", type=int, default=8)
    args = parser.parse_args()
    folders = [os.path.join(args.out, name) for name in ("target", "drafter")]
    pair, began = dflash_mlx.load(folders[0], draft=folders[1]), time.time()
    prompts = held_prompts(args.work, Tokenizer.from_file(os.path.join(folders[0], "tokenizer.json")))
    code = prompts["code"][:: max(1, len(prompts["code"]) // args.prompts)][: args.prompts]
    path, result = os.path.join(args.work, "measure.json"), {}
    parts = {
        "code": (code, 0.0, LENGTHS), "code_sampled_0.7": (code, 0.7, SAMPLED),
        "chat": (prompts["chat"][: args.prompts], 0.0, SAMPLED),
    }  # fmt: skip
    for name, part in parts.items():
        result[name] = measure(pair, *part)
        with open(path, "w") as file:
            json.dump(result, file, indent=1)
    print(f"{time.time() - began:.0f} s")


if __name__ == "__main__":
    main()
