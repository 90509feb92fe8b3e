"""Held-out bits per byte of the target, of an n-gram model on the same tokens, and of two compressors.

Every byte of the held-out files counts; end tokens are scored too, begin tokens are not. The target reads up to
its training length: windows overlap by half, each token is scored once with at least half a window before it.

Commands: python evaluate.py target --work WORK       writes WORK/evaluation_target.json
          python evaluate.py baselines --work WORK    writes WORK/evaluation_baselines.json
"""

import argparse
import json
import lzma
import math
import os
import zlib

import numpy as np
import torch
import torch.nn.functional as F
from publish import load_target
from target import HERE, LENGTH, TOKEN

ORDER = 5  # 4096 tokens are 12 bits, five of them fit one uint64
KINDS = ("library", "test", "chat")


@torch.no_grad()
def target_nats(model, stream, batch=8):
    """Negative log-likelihood of every token but the first, [len - 1], in nats."""
    ids, half = torch.from_numpy(stream.astype(np.int64)), LENGTH // 2
    starts = list(range(0, max(1, len(ids) - 1 - half), half))
    scores = torch.zeros(len(ids) - 1)
    for i in range(0, len(starts), batch):
        rows = [F.pad(ids[s : s + LENGTH + 1], (0, max(0, s + LENGTH + 1 - len(ids)))) for s in starts[i : i + batch]]
        rows = torch.stack(rows)
        logits = model.logits(model.trunk(rows[:, :-1])[-1])
        losses = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none").view(len(rows), -1)
        for s, row in zip(starts[i : i + batch], losses, strict=True):
            skip = 0 if s == 0 else half
            end = min(len(scores), s + LENGTH)
            scores[s + skip : end] = row[skip : end - s]
    return scores.numpy()


class KneserNey:
    """Interpolated Kneser-Ney over tokens, one discount per order, continuation counts below the top order."""

    def __init__(self, stream, order=ORDER):
        grams, counts = np.unique(pack(stream, order), return_counts=True)
        self.levels = []
        for n in range(order, 0, -1):
            self.levels.append(self.level(grams, counts, n))
            grams, counts = np.unique(grams & np.uint64((1 << 12 * (n - 1)) - 1), return_counts=True)
        self.levels.reverse()

    @staticmethod
    def level(grams, counts, n):
        ones, twos = (counts == 1).sum(), (counts == 2).sum()
        heads, first = np.unique(grams >> np.uint64(12), return_index=True)
        totals, kinds = np.add.reduceat(counts, first), np.diff(np.append(first, len(grams)))
        return {
            "grams": grams,
            "counts": counts,
            "discount": ones / (ones + 2 * twos),
            "heads": heads,
            "totals": totals,
            "kinds": kinds,
        }

    def nats(self, stream):
        """Negative log-likelihood of every token but the first, each with the up to ORDER - 1 tokens before it."""
        p = np.full(len(stream) - 1, 1 / 4096)
        for n, level in enumerate(self.levels, 1):
            keys = pack(np.concatenate([np.zeros(max(n - 2, 0), stream.dtype), stream]) if n > 1 else stream[1:], n)
            count, total, kinds = (np.zeros(len(p)) for _ in range(3))
            at, hit = find(level["grams"], keys)
            count[hit] = level["counts"][at[hit]]
            at, hit = find(level["heads"], keys >> np.uint64(12))
            total[hit], kinds[hit] = level["totals"][at[hit]], level["kinds"][at[hit]]
            known, d = total > 0, level["discount"]
            mixed = (np.maximum(count - d, 0) + d * kinds * p) / np.maximum(total, 1)
            p = np.where(known, mixed, p)
        return -np.log(p)


def unique_documents(stream):
    """The stream with every document once: repeats would spoil the estimate of the discounts."""
    starts = np.flatnonzero(stream == TOKEN["begin_of_text"])
    documents = {part.tobytes(): part for part in np.split(stream, starts)[1:]}
    return np.concatenate(list(documents.values()))


def pack(stream, n):
    """All n-grams of a stream as uint64, the newest token in the low bits."""
    parts = [stream[i : len(stream) - n + 1 + i].astype(np.uint64) << np.uint64(12 * (n - 1 - i)) for i in range(n)]
    return np.bitwise_or.reduce(parts)


def find(table, keys):
    at = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    return at, table[at] == keys


def score(kind, work, nats_of):
    """Bits per byte of one held-out stream under a function from stream to nats per token."""
    with open(os.path.join(work, "bytes.json")) as file:
        size = json.load(file)[f"held_{kind}"]
    stream = np.load(os.path.join(work, f"held_{kind}.npy"))
    scored = stream[1:] != TOKEN["begin_of_text"]
    return {"bytes": size, "bits_per_byte": float(nats_of(stream)[scored].sum()) / math.log(2) / size}


def compressors(work):
    with open(os.path.join(work, "held.json"), encoding="utf-8") as file:
        text = "\n".join(item["text"] for item in json.load(file)).encode()
    return {
        "xz": 8 * len(lzma.compress(text, preset=9)) / len(text),
        "zlib": 8 * len(zlib.compress(text, 9)) / len(text),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["target", "baselines"])
    parser.add_argument("--work", required=True)
    parser.add_argument("--out", default=os.path.join(HERE, "..", "pocket"))
    args = parser.parse_args()
    torch.set_num_threads(2)
    if args.what == "target":
        model = load_target(os.path.join(args.out, "target"), torch.bfloat16)
        result = {kind: score(kind, args.work, lambda stream: target_nats(model, stream)) for kind in KINDS}
    else:
        model = KneserNey(unique_documents(np.load(os.path.join(args.work, "train.npy"))))
        result = {kind: score(kind, args.work, model.nats) for kind in KINDS}
    code = [result[kind] for kind in ("library", "test")]
    total = sum(row["bytes"] for row in code)
    result["code"] = {"bytes": total, "bits_per_byte": sum(r["bits_per_byte"] * r["bytes"] for r in code) / total}
    if args.what == "baselines":
        result["code"] |= compressors(args.work)
    print(json.dumps(result, indent=1))
    with open(os.path.join(args.work, f"evaluation_{args.what}.json"), "w") as file:
        json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
