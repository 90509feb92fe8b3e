"""The DFlash-2 drafter in torch: v1's blocks with a local convolution around both sublayers and a path selector.

Letters as in blocks.py, and R rank of the selector, C candidates, K taps and G channels per group of a convolution.
The maths and the weights' names are those of the published DFlash2DraftModel layout.
"""

import torch
import torch.nn.functional as F
from blocks import DRAFTER_CONFIG, BlockLayer, Drafter, Norm
from lean import Matrix
from target import TEXT_CONFIG
from torch import nn

SHARED = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "rope_parameters", "max_position_embeddings", "sliding_window", "layer_types", "hidden_act",
    "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id", "dtype",
)  # fmt: skip
DFLASH2_CONFIG = {
    "architectures": ["DFlash2DraftModel"], "model_type": "qwen3",
    **{key: DRAFTER_CONFIG[key] for key in SHARED},
    "use_sliding_window": True, "max_window_layers": DRAFTER_CONFIG["num_hidden_layers"], "is_causal": False,
    "attention_bias": False, "num_target_layers": TEXT_CONFIG["num_hidden_layers"],
    "vocab_size": TEXT_CONFIG["vocab_size"], "tie_word_embeddings": False,
    "dflash_config": {
        **{key: DRAFTER_CONFIG[key] for key in ("block_size", "mask_token_id", "target_layer_ids")},
        "conv_group_size": 16, "conv_kernel_size": 2, "selector_rank": 64, "selector_top_k": 16,
        "output_multiplier": TEXT_CONFIG["output_multiplier"],
        "final_logit_softcapping": TEXT_CONFIG["final_logit_softcapping"],
    },
}  # fmt: skip


class Convolution(nn.Module):
    """A causal convolution over the slots, before and after a sublayer; its coefficients depend on the row.

    It begins as the identity: the newest tap is 1, the others and the row's share are 0.
    """

    def __init__(self, c):
        super().__init__()
        self.taps, E = c["conv_kernel_size"], c["hidden_size"]
        self.groups = E // c["conv_group_size"]
        self.base_kernel = nn.Parameter(torch.zeros(2, self.taps, E))
        self.base_kernel.data[:, 0] = 1
        self.kernel_projection = Matrix(2 * self.taps * self.groups, E, std=0.0)

    def forward(self, n, sublayer, *rest):
        """n [B*N, S, E], the normed input of a sublayer; returns the sublayer's convolved output."""
        rows = self.kernel_projection(n).view(*n.shape[:2], 2, self.taps, self.groups, 1)
        return self.mix(sublayer(self.mix(n, rows, 0), *rest), rows, 1)

    def mix(self, x, rows, side):
        """Sum of the row itself and the K - 1 before it; zeros stand before the anchor."""
        x = x.unflatten(-1, (self.groups, -1))
        base = self.base_kernel[side].unflatten(-1, (self.groups, -1)).to(x.dtype)
        before = [F.pad(x, (0, 0, 0, 0, t, 0))[:, : x.shape[1]] for t in range(self.taps)]
        return sum(v * (base[t] + rows[:, :, side, t]) for t, v in enumerate(before)).flatten(-2)


class ConvolvedLayer(BlockLayer):
    """v1's layer with a convolution around attention and one around the MLP."""

    def __init__(self, c):
        super().__init__(c)
        self.attention_conv, self.mlp_conv = Convolution(c), Convolution(c)

    def forward(self, x, dtype, *rest):
        x = x + self.attention_conv(self.input_layernorm(x).to(dtype), self.self_attn, *rest)
        return x + self.mlp_conv(self.post_attention_layernorm(x).to(dtype), self.mlp)


class Selector(nn.Module):
    """Scores each candidate of a slot by its logit and by how it follows the token before.

    It begins without a say: the successors' codes are 0.
    """

    def __init__(self, c):
        super().__init__()
        R, V, E = c["selector_rank"], c["vocab_size"], c["hidden_size"]
        self.count = c["selector_top_k"]
        self.predecessor_codebook = nn.Parameter(torch.randn(V, R) * 0.5)
        self.successor_codebook = nn.Parameter(torch.zeros(V, R))
        self.hidden_projection = Matrix(R, E, std=E**-0.5)

    def scores(self, hidden, logits, candidates, before):
        """[..., C] of hidden [..., E], logits [..., V], candidates [..., C] and the token before each slot [...]."""
        query = self.predecessor_codebook[before] * self.hidden_projection(hidden).float()
        return logits.gather(-1, candidates) + (self.successor_codebook[candidates] * query[..., None, :]).sum(-1)


class Drafter2(Drafter):
    """DFlash-2: the first C candidates of every slot, of which a walk picks one after the other."""

    layer, reach = ConvolvedLayer, -1  # exclusive window

    def __init__(self, c=None, dtype=torch.float32):
        c = c or DFLASH2_CONFIG
        super().__init__(c | c["dflash_config"], dtype)
        self.candidate_selector = Selector(self.c)

    def build_encoder(self):
        self.fc = Matrix(self.c["hidden_size"], len(self.c["target_layer_ids"]) * self.c["hidden_size"])
        self.hidden_norm = Norm(self.c["hidden_size"])

    def context(self, features):
        return self.hidden_norm(self.fc(features))

    def logits(self, hidden, head):
        """Head logits with the target's multiplier and softcap."""
        cap = self.c["final_logit_softcapping"]
        return cap * torch.tanh(super().logits(hidden, head) * (self.c["output_multiplier"] / cap))

    def losses(self, hidden, head, before, label):
        """As v1's, plus the selector's cross-entropy over the candidates and the label, given the true token before."""
        logits, selector = self.logits(hidden, head), self.candidate_selector
        best = logits.detach().topk(selector.count, sorted=False).indices
        candidates = torch.cat([best, label[..., None]], -1)
        scores = selector.scores(hidden.to(self.dtype), logits, candidates, before)
        known = best == label[..., None]
        twice = F.pad(known.any(-1, keepdim=True), (selector.count, 0))  # the label is its own last candidate
        spread = scores.masked_fill(twice, -torch.inf).logsumexp(-1)
        picks = best.gather(-1, scores[..., :-1].argmax(-1, keepdim=True))[..., 0]
        return super().cross_entropy(logits, label) + spread - scores[..., -1], picks

    def draft(self, hidden, head, anchors):
        """Greedy walk: the best candidate of every slot, given the one chosen before it."""
        logits, tokens, before = self.logits(hidden, head), [], anchors
        best = logits.topk(self.candidate_selector.count, sorted=False).indices
        for j in range(hidden.shape[-2]):
            row = hidden[..., j, :].to(self.dtype), logits[..., j, :], best[..., j, :], before
            choice = self.candidate_selector.scores(*row).argmax(-1, keepdim=True)
            before = best[..., j, :].gather(-1, choice)[..., 0]
            tokens.append(before)
        return torch.stack(tokens, -1)
