"""The DFlash v1 drafter in torch, shaped for training: many anchors per sequence, each with its own window.

Letters: B sequences, T their tokens, N anchors per sequence, S block, E width, W window, D head size, V vocabulary.
The maths are those of the published muse_glimmer_assistant layout; weights carry its names.
"""

import torch
import torch.nn.functional as F
from lean import MLP, Matrix, angles, attend, rms, rotate
from target import TOKEN
from torch import nn

DRAFTER_CONFIG = {
    "architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant", "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 32, "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 4096, "sliding_window": 128, "layer_types": ["sliding_attention"] * 3,
    "hidden_act": "silu", "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3,
    "block_size": 16, "mask_token_id": TOKEN["mask"], "target_layer_ids": [1, 4, 6], "dtype": "bfloat16",
}  # fmt: skip


class Norm(nn.Module):
    """Plain RMS norm: the stored weight is the factor."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return (rms(x) * self.weight).to(x.dtype)


class BlockAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.size, E = c["head_dim"], c["hidden_size"]
        wide, narrow = c["num_attention_heads"] * self.size, c["num_key_value_heads"] * self.size
        self.q_proj, self.o_proj = Matrix(wide, E), Matrix(E, wide)
        self.k_proj, self.v_proj = Matrix(narrow, E), Matrix(narrow, E)
        self.q_norm, self.k_norm = Norm(self.size), Norm(self.size)

    def keys_values(self, x, turn):
        shape = (*x.shape[:-1], -1, self.size)
        return rotate(self.k_norm(self.k_proj(x).view(shape)), *turn).to(x.dtype), self.v_proj(x).view(shape)

    def forward(self, n, context, context_turn, rows, mask, block_turn):
        """n [B*N, S, E] block rows, context [B, T, E], rows [B*N, W] indices into B*T; returns [B*N, S, E]."""
        q = rotate(self.q_norm(self.q_proj(n).view(*n.shape[:2], -1, self.size)), *block_turn).to(n.dtype)
        ck, cv = (x.flatten(0, 1).flatten(1) for x in self.keys_values(context, context_turn))
        bk, bv = self.keys_values(n, block_turn)
        ck, cv = (x[rows].view(*rows.shape, -1, self.size) for x in (ck, cv))
        o = attend(q, torch.cat([ck, bk], 1), torch.cat([cv, bv], 1), mask)
        return self.o_proj(o.reshape(*n.shape[:2], -1))


class BlockLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(c["hidden_size"]), Norm(c["hidden_size"])
        self.self_attn, self.mlp = BlockAttention(c), MLP(c["hidden_size"], c["intermediate_size"])

    def forward(self, x, dtype, *rest):
        x = x + self.self_attn(self.input_layernorm(x).to(dtype), *rest)
        return x + self.mlp(self.post_attention_layernorm(x).to(dtype))


class Encoder(nn.Module):
    """Projected context C = RMS(Wfc F, w) of the tapped features."""

    def __init__(self, c):
        super().__init__()
        self.fc = Matrix(c["hidden_size"], len(c["target_layer_ids"]) * c["hidden_size"])
        self.output_norm_enc = Norm(c["hidden_size"])

    def forward(self, features):
        return self.output_norm_enc(self.fc(features))


class Drafter(nn.Module):
    """Drafts blocks at many anchors; the table and head are the target's and are passed in, never trained."""

    layer, reach = BlockLayer, 0  # kind of layer; context is seen up to W + reach positions back

    def __init__(self, c=None, dtype=torch.float32):
        super().__init__()
        self.c, self.dtype = c or DRAFTER_CONFIG, dtype
        self.build_encoder()
        self.layers = nn.ModuleList(self.layer(self.c) for _ in range(self.c["num_hidden_layers"]))
        self.norm = Norm(self.c["hidden_size"])

    def build_encoder(self):
        self.encoder = Encoder(self.c)

    def context(self, features):
        """Projected context [B, T, E] of the features [B, T, L*E]."""
        return self.encoder(features)

    def hidden(self, features, ids, anchors, widths, table):
        """Final-norm rows of every block.

        Args:
            features: [B, T, L*E], tapped layer outputs of the target for ids.
            ids: [B, T] int64.   anchors: [B, N] int64, positions P with 0 < P < T.
            widths: [B, N] int64 in 2..S, slots that exist in each block.   table: [V, E], raw rows.
        Returns: [B, N, S, E]. Rows past a block's width are meaningless.
        """
        B, T = ids.shape
        N, S, W = anchors.shape[1], self.c["block_size"], self.c["sliding_window"]
        theta, size = self.c["rope_parameters"]["rope_theta"], self.c["head_dim"]
        flat = anchors.reshape(-1, 1)
        slots = flat + torch.arange(S)  # [B*N, S] absolute positions
        past = flat - W + torch.arange(W)  # [B*N, W] context positions, all left of the anchor
        rows = past.clamp(min=0) + torch.arange(B).repeat_interleave(N)[:, None] * T
        seen = (past[:, None] >= 0) & (slots[:, :, None] - past[:, None] <= W + self.reach)
        own = (torch.arange(S) < widths.reshape(-1, 1))[:, None].expand(-1, S, -1)
        mask = torch.cat([seen, own], 2)[:, None]
        x = table[TOKEN["mask"]].expand(B * N, S, -1).clone()
        x[:, 0] = table[torch.gather(ids, 1, anchors).flatten()]
        context = self.context(features.to(self.dtype))
        turns = angles(torch.arange(T), size, theta), angles(slots, size, theta)
        for layer in self.layers:
            x = layer(x, self.dtype, context, turns[0], rows, mask, turns[1])
        return self.norm(x).view(B, N, S, -1)

    def logits(self, hidden, head):
        """Raw head logits in float32: no multiplier, no softcap."""
        return F.linear(hidden.to(self.dtype), head.to(self.dtype)).float()

    @staticmethod
    def cross_entropy(logits, label):
        return F.cross_entropy(logits.flatten(0, -2), label.flatten(), reduction="none").view_as(label)

    def losses(self, hidden, head, before, label):
        """What training minimises in every slot, and what the drafter says there.

        Args:
            hidden: [..., E], final-norm rows.   head: [V, E].
            before: [...] int64, the text's token before each slot.   label: [...] int64, the target's choice.
        Returns: losses [...] float32, tokens [...] int64.
        """
        logits = self.logits(hidden, head)
        return self.cross_entropy(logits, label), logits.argmax(-1)

    def draft(self, hidden, head, anchors):
        """Greedy tokens [..., S - 1] of the rows [..., S - 1, E] behind the anchors [...]."""
        return self.logits(hidden, head).argmax(-1)
