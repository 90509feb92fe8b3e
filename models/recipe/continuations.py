"""The target's own continuations of corpus and chat prompts: what the drafter learns from and is measured on.

Batched decoding with a key/value cache per layer; every row of a batch has the same position, so the
cache is a plain slice. Keeps the tapped features and the target's argmax of every position.
"""

import numpy as np
import torch
from lean import angles, attend, rms


class Decoder:
    """Decodes a batch in step with the lean target; buffers hold `length` positions."""

    def __init__(self, model, batch, length, taps):
        self.model, self.taps, c = model, taps, model.c
        shape = (batch, length, c["num_key_value_heads"], c["head_dim"])
        self.keys = [torch.zeros(shape, dtype=model.dtype) for _ in model.layers]
        self.values = [torch.zeros(shape, dtype=model.dtype) for _ in model.layers]
        self.turn = angles(torch.arange(length), c["head_dim"], c["rope_parameters"]["rope_theta"])
        self.offset = 0

    def extend(self, ids):
        """Append ids [B, T]; returns float32 logits [B, T, V] and features [B, T, L*E]."""
        T, start, model, kept = ids.shape[1], self.offset, self.model, []
        end = self.offset = start + T
        h = rms(model.embed_tokens.weight[ids])
        for i, layer in enumerate(model.layers):
            a = layer.input_layernorm(h, model.dtype)
            o = self.attention(i, layer.self_attn, a, start, end)
            o = layer.self_attn.o_proj(
                o.reshape(*a.shape[:2], -1).to(a.dtype) * torch.sigmoid(layer.self_attn.gate_proj(a))
            )
            h = h + layer.post_attention_layernorm(o, h.dtype)
            f = layer.pre_feedforward_layernorm(h, model.dtype)
            h = h + layer.post_feedforward_layernorm(layer.mlp(f), h.dtype)
            if i in self.taps:
                kept.append(h)
        return model.logits(h), torch.cat(kept, -1)

    def attention(self, i, layer, a, start, end):
        """Write the new rows of layer i and attend over what they may see."""
        q, k, v = layer.heads(a, self.turn[0][start:end], self.turn[1][start:end])
        self.keys[i][:, start:end], self.values[i][:, start:end] = k, v
        window = end if layer.full else layer.c["sliding_window"]
        first = max(0, start - window + 1)
        gap = torch.arange(start, end)[:, None] - torch.arange(first, end)[None]
        k, v = self.keys[i][:, first:end], self.values[i][:, first:end]
        if end - start > 1:
            return attend(q, k, v, (gap >= 0) & (gap < window))
        B, _, heads, size = q.shape  # one row: the query heads of a key head become rows, so no key is repeated
        rows = q.view(B, k.shape[2], -1, size).transpose(1, 2)
        return attend(rows, k, v).transpose(1, 2).reshape(B, 1, heads, size)


@torch.no_grad()
def continuations(model, prompts, length, temperatures, taps, generator):
    """Continue prompts to `length` tokens.

    Args:
        prompts: list of B lists of tokens, each shorter than length.
        temperatures: [B] float, 0 for greedy.
    Returns: ids [B, length] int64, features [B, length, L*E] bfloat16, choice [B, length] int64 (the target's
        argmax after each position). Tokens after a stop token are whatever the target says next.
    """
    B, sizes = len(prompts), torch.tensor([len(p) for p in prompts])
    ids = torch.zeros(B, length, dtype=torch.int64)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    decoder = Decoder(model, B, length, taps)
    features = torch.zeros(B, length, len(taps) * model.c["hidden_size"], dtype=torch.bfloat16)
    choice = torch.zeros(B, length, dtype=torch.int64)
    warm, at, end = temperatures.clamp(min=1e-3)[:, None], 0, int(sizes.min())
    while at < length:
        logits, kept = decoder.extend(ids[:, at:end])
        features[:, at:end], choice[:, at:end] = kept.to(torch.bfloat16), logits.argmax(-1)
        if end < length:
            drawn = torch.multinomial(torch.softmax(logits[:, -1] / warm, -1), 1, generator=generator)[:, 0]
            said = torch.where(temperatures > 0, drawn, choice[:, end - 1])
            ids[:, end] = torch.where(end < sizes, ids[:, end], said)
        at, end = end, end + 1
    return ids, features, choice


def looping(ids, longest=64):
    """[B, T] bool of ids [B, T]: does the text up to and including a position repeat itself?

    A position loops when, for some period p <= longest, its last max(2p, 16) tokens equal those p before,
    that is, when a stretch stands there for the third time in a row.
    """
    B, T = ids.shape
    marks = np.zeros((B, T), dtype=bool)
    for p in range(1, min(longest, T - 1) + 1):
        same, run = ids[:, p:] == ids[:, :-p], np.zeros(B, dtype=np.int64)
        for t in range(T - p):
            run = (run + 1) * same[:, t]
            marks[:, t + p] |= run >= max(2 * p, 16)
    return marks


def chat_prompts(items, tokenizer):
    """Chat documents cut after their first or last `<|start|>assistant`: lists of tokens."""
    head, prompts = "<|start|>assistant", []
    for i, item in enumerate(items):
        text = item["text"].split(head)[0] if i % 2 else item["text"].rsplit(head, 1)[0]
        prompts.append(tokenizer.encode(text + head, add_special_tokens=False).ids)
    return prompts
