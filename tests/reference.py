"""Brute-force float64 versions of the target and of the drafter, written from the published formulas.

Whole sequences, explicit masks, no caches, no tricks: slow and easy to check by eye. Weights come under the canonical
names of `tiny.py`. Letters: T rows, E model width, H and Hk query and key/value heads, D head size, L taps, S block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray
Weights = Mapping[str, Array]


def rms(x: Array, eps: float) -> Array:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def rope(x: Array, positions: Array, theta: float) -> Array:
    """Rotate split halves (NeoX) of [heads, T, D] by absolute positions [T]."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles), np.sin(angles)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def heads(x: Array, count: int) -> Array:
    """[T, count*D] -> [count, T, D]."""
    return x.reshape(len(x), count, -1).swapaxes(0, 1)


def attention(q: Array, k: Array, v: Array, visible: Array) -> Array:
    """q [H, T, D], k and v [Hk, Tk, D], visible [T, Tk] bool -> [T, H*D]."""
    group = len(q) // len(k)
    k, v = np.repeat(k, group, axis=0), np.repeat(v, group, axis=0)
    scores = np.where(visible, q @ k.swapaxes(1, 2) * q.shape[-1] ** -0.5, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out = weights / weights.sum(axis=-1, keepdims=True) @ v
    return out.swapaxes(0, 1).reshape(q.shape[1], -1)


def in_double(weights: Weights) -> dict[str, Array]:
    return {name: np.asarray(array, np.float64) for name, array in weights.items()}


def _target_layer(h: Array, w: Weights, config: Mapping[str, Any], i: int) -> Array:
    """One target layer over a whole sequence [T, E], positions 0..T-1."""
    eps, post_eps = config["rms_norm_eps"], config["post_norm_eps"]
    at = f"model.layers.{i}."
    position = np.arange(len(h))
    visible = position[None] <= position[:, None]
    if config["layer_types"][i] == "sliding_attention":
        visible &= position[:, None] - position[None] < config["sliding_window"]

    def linear(x: Array, name: str) -> Array:
        return x @ w[f"{at}{name}.weight"].T

    def centred(x: Array, name: str, epsilon: float) -> Array:
        return rms(x, epsilon) * (1 + w[f"{at}{name}_layernorm.weight"])

    a = centred(h, "input", eps)
    q = rms(heads(linear(a, "self_attn.q_proj"), config["num_attention_heads"]), eps) * config["qk_scale_factor"]
    k = rms(heads(linear(a, "self_attn.k_proj"), config["num_key_value_heads"]), eps)
    v = heads(linear(a, "self_attn.v_proj"), config["num_key_value_heads"])
    if config["layer_rope_theta"][i]:
        theta = config["rope_parameters"]["rope_theta"]
        q, k = rope(q, position, theta), rope(k, position, theta)
    gate = 1 / (1 + np.exp(-linear(a, "self_attn.gate_proj")))
    h = h + centred(linear(attention(q, k, v, visible) * gate, "self_attn.o_proj"), "post_attention", post_eps)
    f = centred(h, "pre_feedforward", eps)
    m = linear(silu(linear(f, "mlp.gate_proj")) * linear(f, "mlp.up_proj"), "mlp.down_proj")
    return h + centred(m, "post_feedforward", post_eps)


def target_forward(
    config: Mapping[str, Any], weights: Weights, tokens: Sequence[int], taps: Sequence[int] = ()
) -> tuple[Array, list[Array]]:
    """The target over a whole sequence from position 0.

    Args:
        config: the transformers `text_config`.
        weights: canonical names, any float dtype.
        tokens: T ids.
        taps: layers whose output is wanted, in this order.
    Returns:
        logits [T, V] float64, and one [T, E] float64 per tap: the residual stream after that layer.
    """
    w = in_double(weights)
    h = rms(w["model.embed_tokens.weight"][np.asarray(tokens)], config["rms_norm_eps"])
    outputs = []
    for i in range(config["num_hidden_layers"]):
        h = _target_layer(h, w, config, i)
        outputs.append(h)
    out = rms(h, config["rms_norm_eps"]) * w["model.norm.weight"]
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    cap = config["final_logit_softcapping"]
    return cap * np.tanh(out @ head.T * config["output_multiplier"] / cap), [outputs[i] for i in taps]


def drafter_forward(
    config: Mapping[str, Any],
    weights: Weights,
    table: Array,
    head: Array,
    features: Array,
    block_ids: Sequence[int],
    start: int = 0,
) -> Array:
    """A drafter's logits for a block after a whole context; arguments as in `drafter_hidden`.

    Args:
        head: [V, E] the target's raw head.
    Returns:
        [S-1, V] float64 of slots 1..S-1: v1's raw, DFlash-2's multiplied and capped.
    """
    hidden = drafter_hidden(config, weights, table, features, block_ids, start)
    logits = hidden @ np.asarray(head, np.float64).T
    if "dflash_config" in config:
        said = config["dflash_config"]
        logits = logits * said.get("output_multiplier", 1.0)
        cap = said.get("final_logit_softcapping")
        logits = cap * np.tanh(logits / cap) if cap else logits
    return logits


def drafter_hidden(
    config: Mapping[str, Any],
    weights: Weights,
    table: Array,
    features: Array,
    block_ids: Sequence[int],
    start: int = 0,
) -> Array:
    """A drafter's last hidden rows for a block after a whole context, v1's or DFlash-2's.

    Args:
        config: the drafter's `config.json`.
        weights: names without prefix, any float dtype.
        table: [V, E] the target's raw embedding table.
        features: [n, L*E] taps of positions start..start+n-1, joined on the last axis.
        block_ids: S ids at the positions after them: the anchor, then mask tokens.
        start: the first position that there is any context of.
    Returns:
        [S-1, E] float64 of slots 1..S-1, after the final norm.
    """
    w, said = in_double(weights), config.get("dflash_config", {})
    second = bool(said)
    eps, window, theta = config["rms_norm_eps"], config["sliding_window"], config["rope_parameters"]["rope_theta"]
    query_heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    fused = np.asarray(features, np.float64) @ w["fc.weight" if second else "encoder.fc.weight"].T
    context = rms(fused, eps) * w["hidden_norm.weight" if second else "encoder.output_norm_enc.weight"]
    x = np.asarray(table, np.float64)[np.asarray(block_ids)] * said.get("input_embedding_scale", 1.0)
    keys = start + np.arange(len(context) + len(x))
    rows = keys[len(context) :]
    distance = rows[:, None] - keys[None]
    visible = np.abs(distance) < window if second else np.abs(distance) <= window
    if second and config.get("is_causal", True):
        visible &= distance >= 0
    for i in range(config["num_hidden_layers"]):
        at = f"layers.{i}."
        n = rms(x, eps) * w[f"{at}input_layernorm.weight"]
        given = convolved(n, n, w, f"{at}attention_conv", 0) if second else n
        both = np.concatenate([context, given])
        q = heads(given @ w[f"{at}self_attn.q_proj.weight"].T, query_heads)
        q = rms(q, eps) * w[f"{at}self_attn.q_norm.weight"]
        k = rms(heads(both @ w[f"{at}self_attn.k_proj.weight"].T, kv_heads), eps) * w[f"{at}self_attn.k_norm.weight"]
        v = heads(both @ w[f"{at}self_attn.v_proj.weight"].T, kv_heads)
        mixed = attention(rope(q, rows, theta), rope(k, keys, theta), v, visible) @ w[f"{at}self_attn.o_proj.weight"].T
        x = x + (convolved(mixed, n, w, f"{at}attention_conv", 1) if second else mixed)
        n = rms(x, eps) * w[f"{at}post_attention_layernorm.weight"]
        given = convolved(n, n, w, f"{at}mlp_conv", 0) if second else n
        gated = silu(given @ w[f"{at}mlp.gate_proj.weight"].T) * (given @ w[f"{at}mlp.up_proj.weight"].T)
        mixed = gated @ w[f"{at}mlp.down_proj.weight"].T
        x = x + (convolved(mixed, n, w, f"{at}mlp_conv", 1) if second else mixed)
    return (rms(x, eps) * w["norm.weight"])[1:]


def convolved(y: Array, n: Array, w: Weights, at: str, side: int) -> Array:
    """One side of a DFlash-2 convolution of y [S, E], row by row and channel by channel, as the formula stands."""
    base, projection = w[f"{at}.base_kernel"], w[f"{at}.kernel_projection.weight"]
    _, taps, width = base.shape
    groups = len(projection) // (2 * taps)
    dynamic = (n @ projection.T).reshape(len(n), 2, taps, groups)
    out = np.zeros_like(y)
    for t in range(len(y)):
        for back in range(min(taps, t + 1)):
            for c in range(width):
                coefficient = base[side, back, c] + dynamic[t, side, back, c // (width // groups)]
                out[t, c] += coefficient * y[t - back, c]
    return out


def selected(
    config: Mapping[str, Any], weights: Weights, hidden: Array, logits: Array, anchor: int
) -> tuple[list[int], float]:
    """A DFlash-2 selector's greedy walk over slots' hidden rows [M, E] and logits [M, V], slot after slot.

    Returns:
        The M tokens, and the smallest lead of a slot's best candidate over its second.
    """
    w, count = in_double(weights), config["dflash_config"]["selector_top_k"]
    before, found, lead = anchor, [], np.inf
    for row, scores in zip(hidden @ w["candidate_selector.hidden_projection.weight"].T, logits, strict=True):
        ids = np.argsort(-scores)[:count]
        code = w["candidate_selector.predecessor_codebook"][before] * row
        total = scores[ids] + w["candidate_selector.successor_codebook"][ids] @ code
        order = np.argsort(-total)
        lead = min(lead, total[order[0]] - total[order[1]], scores[ids[-1]] - np.sort(scores)[-count - 1])
        before = int(ids[order[0]])
        found.append(before)
    return found, float(lead)


def greedy(config: Mapping[str, Any], weights: Weights, prompt: Sequence[int], count: int) -> list[int]:
    """Plain greedy decoding by whole forwards."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(target_forward(config, weights, tokens)[0][-1].argmax()))
    return tokens[len(prompt) :]
