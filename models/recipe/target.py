"""Train the pocket target on the token stream and save it in the published layout.

Resumes after a kill: the data of a step follow from the seed and the step number, and the checkpoint in the
work folder holds weights, optimiser states and the step. The schedule is warm-up, flat, linear decay.

Command: python target.py --work WORK
"""

import argparse
import os
import time

import numpy as np
import torch
from lean import Target, parameters_by_kind, warm_stable_decay
from tokenizers import Tokenizer

SEED = 22
LENGTH, BATCH = 512, 6  # tokens per sequence, sequences per step
TOTAL, WARM, DECAY_SHARE = 1900, 60, 0.35  # steps
MUON_RATE, ADAM_RATE, MUON_DECAY, ADAM_DECAY = 0.02, 3e-3, 0.1, 0.01
START_SHARE = 0.3  # sequences that begin with the begin token at the start of a line
SAVE_SECONDS = 150
HERE = os.path.dirname(os.path.abspath(__file__))
TOKEN = {"begin_of_text": 1, "end_of_text": 2, "finetune_right_pad": 3, "eom": 4, "eot": 5, "start": 6, "message": 7,
         "image_start": 8, "image_end": 9, "video": 10, "patch": 11, "mask": 12}  # fmt: skip

TEXT_CONFIG = {
    "model_type": "muse_glimmer_text", "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32,
    "sliding_window": 128, "max_position_embeddings": 4096, "hidden_activation": "silu",
    "rms_norm_eps": 1e-5, "post_norm_eps": 1e-8, "qk_scale_factor": 3.87, "output_multiplier": 0.5,
    "final_logit_softcapping": 20.0, "attention_bias": False, "attention_dropout": 0.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3, "use_cache": True, "initializer_range": 0.02,
}  # fmt: skip


class Windows:
    """Training sequences of a stream: every epoch cuts it anew, in a seeded order."""

    def __init__(self, stream, tokenizer, length, batch, seed):
        self.stream, self.length, self.batch, self.seed = stream, length, batch, seed
        breaks = [tokenizer.token_to_id("\n"), tokenizer.token_to_id("\n\n")]
        pieces = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
        words = np.array([piece[0] in "@#_" or (piece[0].isascii() and piece[0].isalpha()) for piece in pieces])
        self.starts = 1 + np.flatnonzero(np.isin(stream[:-1], breaks) & words[stream[1:]])
        self.begin, self.count, self.epoch = tokenizer.token_to_id("<|begin_of_text|>"), len(stream) // length - 2, None

    def sequence(self, index):
        """The index-th sequence of the whole run, length + 1 tokens."""
        epoch, place = divmod(index, self.count)
        if epoch != self.epoch:
            rng = np.random.default_rng([self.seed, epoch])
            self.epoch, self.shift, self.order = epoch, rng.integers(self.length), rng.permutation(self.count)
            self.snap = rng.random(self.count) < START_SHARE
        at = int(self.shift + self.order[place] * self.length)
        if self.snap[place]:
            at = int(self.starts[min(np.searchsorted(self.starts, at), len(self.starts) - 1)])
            at = min(at, len(self.stream) - self.length - 1)
            return np.concatenate([[self.begin], self.stream[at : at + self.length]])
        return self.stream[at : at + self.length + 1]

    def step(self, step):
        """[batch, length + 1] int64 of one step."""
        rows = [self.sequence(step * self.batch + i) for i in range(self.batch)]
        return torch.from_numpy(np.stack(rows).astype(np.int64))


def optimisers(model):
    matrices, rest = parameters_by_kind(model)
    muon = torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=MUON_DECAY, momentum=0.95, adjust_lr_fn="original")
    tables, vectors = [p for p in rest if p.ndim == 2], [p for p in rest if p.ndim == 1]
    groups = [{"params": tables, "weight_decay": ADAM_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return [muon, torch.optim.AdamW(groups, lr=ADAM_RATE, betas=(0.9, 0.95), eps=1e-10)]


def load_checkpoint(path, model, opts=()):
    """Fill model and optimisers from the checkpoint; return the step to go on from (0 without one)."""
    if not os.path.exists(path):
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    for opt, saved in zip(opts, state["opts"], strict=False):
        opt.load_state_dict(saved)
    return state["step"]


def save_checkpoint(path, model, opts, step):
    """Write beside, then rename: a kill at any moment leaves a whole checkpoint."""
    state = {"model": model.state_dict(), "opts": [opt.state_dict() for opt in opts], "step": step}
    torch.save(state, path + ".part")
    os.replace(path + ".part", path)


def train(work, tokenizer, total):
    torch.manual_seed(SEED)
    model = Target(TEXT_CONFIG, torch.bfloat16)
    opts, path = optimisers(model), os.path.join(work, "target.pt")
    first = load_checkpoint(path, model, opts)
    windows = Windows(np.load(os.path.join(work, "train.npy")), tokenizer, LENGTH, BATCH, SEED)
    loss_of, every = torch.compile(model.loss), list(model.parameters())
    began, saved, mean = time.time(), time.time(), None
    for step in range(first, total):
        factor = warm_stable_decay(step, total, WARM, DECAY_SHARE)
        for opt, rate in zip(opts, (MUON_RATE, ADAM_RATE), strict=True):
            for group in opt.param_groups:
                group["lr"] = rate * factor
        rows = windows.step(step)
        loss = loss_of(rows[:, :-1], rows[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(every, 1.0)
        for opt in opts:
            opt.step()
            opt.zero_grad(set_to_none=True)
        mean = loss.item() if mean is None else 0.97 * mean + 0.03 * loss.item()
        if step % 10 == 0 or step == total - 1:
            speed = (step + 1 - first) * BATCH * LENGTH / (time.time() - began)
            figures = f"loss {mean:.4f} rate x{factor:.3f} tokens/s {speed:.0f}"
            print(f"{time.strftime('%H:%M:%S')} step {step} of {total} {figures}", flush=True)
        if time.time() - saved > SAVE_SECONDS or step == total - 1:
            save_checkpoint(path, model, opts, step + 1)
            saved = time.time()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", required=True)
    parser.add_argument("--out", default=os.path.join(HERE, "..", "pocket", "target"))
    parser.add_argument("--total", type=int, default=TOTAL)
    args = parser.parse_args()
    torch.set_num_threads(2)
    tokenizer = Tokenizer.from_file(os.path.join(args.out, "tokenizer.json"))
    train(args.work, tokenizer, args.total)


if __name__ == "__main__":
    main()
