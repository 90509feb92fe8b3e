"""A lean torch forward of the Muse Glimmer text model, for training on a CPU; transformers is the truth.

Letters: B batch, T tokens, D head size, E width, W window. Weights carry the names of the published
layout without the prefix `model.language_model.`, so a state dict moves between the two classes by renaming.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn


def rms(x, eps=1e-5):
    """Scaleless root-mean-square norm of the last axis, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


class Centred(nn.Module):
    """Norm whose stored weight is used as 1 + w."""

    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(width)), eps

    def forward(self, x, dtype):
        return (rms(x, self.eps) * (1 + self.weight)).to(dtype)


class Matrix(nn.Module):
    """A bias-free projection kept in float32 and applied in the dtype of its input."""

    def __init__(self, rows, columns, std=0.02):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns) * std)

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


def rotate(x, cos, sin):
    """Split-half rotary position on [B, T, heads, D]."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def angles(positions, size, theta):
    """Cosine and sine, each [..., 1, D/2], of absolute positions [...]."""
    rate = theta ** (-torch.arange(0, size, 2).float() / size)
    angle = positions[..., None, None].float() * rate
    return angle.cos(), angle.sin()


class Attention(nn.Module):
    def __init__(self, c, full):
        super().__init__()
        self.c, self.full = c, full
        wide, narrow = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
        self.q_proj, self.gate_proj = Matrix(wide, c["hidden_size"]), Matrix(wide, c["hidden_size"])
        self.k_proj, self.v_proj = Matrix(narrow, c["hidden_size"]), Matrix(narrow, c["hidden_size"])
        self.o_proj = Matrix(c["hidden_size"], wide)

    def heads(self, a, cos, sin):
        """Queries, keys, values [B, T, heads, D] of the rows a, normed and (sliding layers) rotated."""
        shape = (*a.shape[:2], -1, self.c["head_dim"])
        q = rms(self.q_proj(a).view(shape)) * self.c["qk_scale_factor"]
        k, v = rms(self.k_proj(a).view(shape)), self.v_proj(a).view(shape)
        if not self.full:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return q.to(a.dtype), k.to(a.dtype), v

    def forward(self, a, cos, sin, mask):
        q, k, v = self.heads(a, cos, sin)
        if self.full:
            o = attend(q, k, v, causal=True)
        else:
            o = banded(q.float(), k.float(), v.float(), mask, self.c["sliding_window"])  # float32 is faster here
        return self.o_proj(o.reshape(*a.shape[:2], -1).to(a.dtype) * torch.sigmoid(self.gate_proj(a)))


def attend(q, k, v, mask=None, causal=False):
    """Softmax attention of q [N, T, H, D] over k, v [N, Tk, Hk, D]; returns [N, T, H, D]."""
    groups = q.shape[2] // k.shape[2]
    q, k, v = (
        q.transpose(1, 2),
        k.repeat_interleave(groups, 2).transpose(1, 2),
        v.repeat_interleave(groups, 2).transpose(1, 2),
    )
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal).transpose(1, 2)


def banded(q, k, v, mask, window):
    """Window attention in blocks of W queries, each over its own and the previous block of keys."""
    B, T = q.shape[:2]
    n = T // window
    if T % window or n < 2:
        return attend(q, k, v, window_mask(T, window))
    q = q.reshape(B * n, window, *q.shape[2:])
    k, v = (torch.cat([F.pad(x, (0, 0, 0, 0, window, 0))[:, :T].reshape(B * n, window, *x.shape[2:]),
                       x.reshape(B * n, window, *x.shape[2:])], 1) for x in (k, v))  # fmt: skip
    return attend(q, k, v, mask.repeat(B, 1, 1, 1)).reshape(B, T, *q.shape[2:])


def window_mask(T, window):
    """[T, T] bool, true where the key is visible: 0 <= query - key < W."""
    gap = torch.arange(T)[:, None] - torch.arange(T)[None]
    return (gap >= 0) & (gap < window)


def band_mask(T, window):
    """[T/W, 1, W, 2W] bool for `banded`; the first block has no previous keys."""
    gap = torch.arange(window)[:, None] + window - torch.arange(2 * window)[None]
    seen = ((gap >= 0) & (gap < window)).repeat(max(T // window, 1), 1, 1, 1)
    seen[0, ..., :window] = False
    return seen


class MLP(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = Matrix(inner, width), Matrix(inner, width), Matrix(width, inner)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c, full):
        super().__init__()
        width = c["hidden_size"]
        self.input_layernorm, self.pre_feedforward_layernorm = Centred(width, 1e-5), Centred(width, 1e-5)
        self.post_attention_layernorm, self.post_feedforward_layernorm = Centred(width, 1e-8), Centred(width, 1e-8)
        self.self_attn, self.mlp = Attention(c, full), MLP(width, c["intermediate_size"])

    def forward(self, h, cos, sin, mask, dtype):
        a = self.input_layernorm(h, dtype)
        h = h + self.post_attention_layernorm(self.self_attn(a, cos, sin, mask), h.dtype)
        f = self.pre_feedforward_layernorm(h, dtype)
        return h + self.post_feedforward_layernorm(self.mlp(f), h.dtype)


class Plain(nn.Module):
    """A bare weight under a name, as in the published layout."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)


class Target(nn.Module):
    """The text model with its head. `dtype` is what the matrix products run in."""

    def __init__(self, c, dtype=torch.float32):
        super().__init__()
        self.c, self.dtype, count = c, dtype, c["num_hidden_layers"]
        self.embed_tokens = Plain(torch.randn(c["vocab_size"], c["hidden_size"]) * 0.02)
        self.layers = nn.ModuleList(Layer(c, (count - 1 - i) % 4 == 0) for i in range(count))
        self.norm = Plain(torch.ones(c["hidden_size"]))
        self.lm_head = Matrix(c["vocab_size"], c["hidden_size"])

    def trunk(self, ids, stream=torch.float32):
        """Residual stream after every layer, a list of [B, T, E]."""
        T, W = ids.shape[1], self.c["sliding_window"]
        cos, sin = angles(torch.arange(T), self.c["head_dim"], self.c["rope_parameters"]["rope_theta"])
        h, mask, outs = rms(self.embed_tokens.weight[ids]).to(stream), band_mask(T, W), []
        for layer in self.layers:
            h = layer(h, cos, sin, mask, self.dtype)
            outs.append(h)
        return outs

    def logits(self, h):
        """Float32 logits of rows h: final norm, head, multiplier, softcap."""
        cap = self.c["final_logit_softcapping"]
        raw = self.lm_head((rms(h) * self.norm.weight).to(self.dtype)).float()
        return cap * torch.tanh(raw * (self.c["output_multiplier"] / cap))

    def loss(self, ids, labels):
        """Mean cross-entropy in nats of labels [B, T]."""
        logits = self.logits(self.trunk(ids)[-1])
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


TABLES = ("embed_tokens", "lm_head", "codebook")


def parameters_by_kind(model):
    """(matrices for Muon, the rest for AdamW): the hidden projections against tables, head, norms and kernels."""
    names = dict(model.named_parameters())
    matrices = [p for n, p in names.items() if p.ndim == 2 and not any(part in n for part in TABLES)]
    chosen = {id(p) for p in matrices}
    return matrices, [p for p in names.values() if id(p) not in chosen]


def warm_stable_decay(step, total, warm, decay_share):
    """Learning-rate factor at a step: linear warm-up, flat, then linear to 0 over the last share."""
    decay = max(1, int(total * decay_share))
    return min(1.0, (step + 1) / warm, max(0.0, (total - step) / decay))


def bits(nats):
    return nats / math.log(2)
