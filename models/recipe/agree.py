"""Check the saved pair in transformers: assisted greedy generation against plain, and its accepted drafts.

Loads both models with transformers' own classes and runs generate(..., speculation_type="dflash"); a round is one
target forward after the prefill. The same prompts are walked with acceptance.py's method for comparison.

Command: python agree.py --work WORK
"""

import argparse
import os

import torch
from acceptance import held_prompts, predictions, walk
from blocks import DRAFTER_CONFIG
from continuations import continuations
from publish import load_drafter, load_target
from target import HERE, TOKEN
from tokenizers import Tokenizer
from transformers import AutoModel, MuseGlimmerForConditionalGeneration

NEW = 96


def rounds_of(truth, draft, prompt):
    """(tokens, target forwards after the prefill) of one assisted greedy generation."""
    calls = []
    hook = truth.register_forward_hook(lambda *_: calls.append(1))
    ids = torch.tensor([prompt])
    out = truth.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=draft, speculation_type="dflash",
                         max_new_tokens=NEW, do_sample=False)  # fmt: skip
    hook.remove()
    return out[0].tolist(), len(calls) - 1


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", required=True)
    parser.add_argument("--out", default=os.path.join(HERE, "..", "pocket"))
    parser.add_argument("--prompts", type=int, default=6)
    args = parser.parse_args()
    torch.set_num_threads(2)
    folders = [os.path.join(args.out, name) for name in ("target", "drafter")]
    truth = MuseGlimmerForConditionalGeneration.from_pretrained(folders[0], dtype=torch.float32).eval()
    draft = AutoModel.from_pretrained(folders[1], dtype=torch.float32).eval()
    target, drafter = load_target(folders[0]), load_drafter(folders[1])
    tokenizer = Tokenizer.from_file(os.path.join(folders[0], "tokenizer.json"))
    table, head, S = target.embed_tokens.weight, target.lm_head.weight, DRAFTER_CONFIG["block_size"]
    theirs, ours, equal = [0, 0], [0, 0], 0
    for prompt in held_prompts(args.work, tokenizer)["code"][: args.prompts]:
        ids = torch.tensor([prompt])
        plain = truth.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)[
            0
        ].tolist()
        text, rounds = rounds_of(truth, draft, prompt)
        equal += text == plain
        theirs[0] += len(text) - len(prompt) - 1 - rounds
        theirs[1] += rounds
        row, features, _ = continuations(
            target, [prompt], len(plain) + S, torch.zeros(1), DRAFTER_CONFIG["target_layer_ids"], torch.Generator()
        )
        first, last = len(prompt), len(plain) - 1
        if any(t in (TOKEN["end_of_text"], TOKEN["eot"]) for t in plain[first:]):
            continue
        found = walk(
            predictions(drafter, features[0], row[0], first, last, S, table, head),
            row[0][: len(plain)],
            first,
            last,
            S - 1,
        )
        ours[0] += sum(a for _, a in found)
        ours[1] += len(found)
    print(f"assisted equals plain on {equal} of {args.prompts} prompts")
    rates = [f"{accepted / max(1, rounds):.3f} ({rounds} rounds)" for accepted, rounds in (theirs, ours)]
    print(f"accepted per round: transformers {rates[0]}, our walk {rates[1]}")


if __name__ == "__main__":
    main()
