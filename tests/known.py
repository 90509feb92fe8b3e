"""A pair built by hand, of which theory says everything: the target's next token, and how many drafts are right.

The target's layers write nothing, its embeddings are unit vectors and its head sends token t to a chosen `following`
token. The drafter has a head for each slot: head i looks exactly i rows back (RoPE with a sharp peak there), reads
which token stands in that row and writes the token that follows it i steps on. Slots whose head is silenced for a
token keep the mask token's vector, which the target never chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tiny import DrafterSpec, TargetSpec, drafter_weights, target_weights, write_drafter, write_target

import dflash_mlx

VOCAB, WIDTH, SIZE, BLOCK = 61, 128, 64, 16  # SIZE: of a drafter's head, room for one axis per token
MASK, CONSTANT = 60, 61  # the mask token, and the axis that every context feature points along
READ = 64  # where the axes of the tokens begin in a context feature that is read
TOKENS = 60  # ordinary ones: 0..59
SHARPNESS, THETA = 100.0, 4.0
Depth = Callable[[int], int]


def target_spec(**sizes: Any) -> TargetSpec:
    fixed: dict[str, Any] = {"vocab": VOCAB, "hidden": WIDTH, "intermediate": 32, "layers": 2, "heads": (2, 1)}
    return TargetSpec(**{**fixed, "head_dim": 16, "window": 24, "softcap": 20.0, "multiplier": 1.0, **sizes})


def drafter_spec() -> DrafterSpec:
    return DrafterSpec(
        hidden=WIDTH, intermediate=32, layers=1, heads=(BLOCK - 1, 1), head_dim=SIZE, window=40, block=BLOCK,
        mask_token=MASK, taps=(0, 1), theta=THETA,
    )  # fmt: skip


def permutation(seed: int = 3) -> list[int]:
    """One cycle through all ordinary tokens."""
    order = np.random.RandomState(seed).permutation(TOKENS).tolist()
    following = [0] * TOKENS
    for token, then in zip(order, order[1:] + order[:1], strict=True):
        following[token] = then
    return following


def chain(following: Sequence[int], token: int, count: int) -> list[int]:
    """The `count` tokens after `token`."""
    found = []
    for _ in range(count):
        token = following[token]
        found.append(token)
    return found


def _target(spec: TargetSpec, following: Sequence[int]) -> dict[str, np.ndarray]:
    weights = {name: np.zeros_like(array) for name, array in target_weights(spec).items()}
    weights["model.norm.weight"][:] = 1
    for token in range(VOCAB):
        weights["model.embed_tokens.weight"][token, token] = 1
    weights["lm_head.weight"][MASK, MASK] = 1
    for token, then in enumerate(following):
        weights["lm_head.weight"][then, token] += 1
    return weights


def _drafter(spec: DrafterSpec, following: Sequence[int], depth: Depth, context: bool) -> dict[str, np.ndarray]:
    weights = {name: np.zeros_like(array) for name, array in drafter_weights(spec).items()}
    for name in ("encoder.output_norm_enc", "norm", "layers.0.input_layernorm", "layers.0.post_attention_layernorm"):
        weights[f"{name}.weight"][:] = 1
    attention = "layers.0.self_attn."
    weights[f"{attention}q_norm.weight"][:] = SHARPNESS
    weights[f"{attention}k_norm.weight"][:] = 1
    half = SIZE // 2
    frequencies = THETA ** (-np.arange(half) / half)
    weights[f"{attention}k_proj.weight"][:half] = 1  # every row's key is the same vector, turned by its position
    feature = weights["encoder.fc.weight"]
    axes = np.arange(TOKENS)
    if context:
        feature[READ + axes, WIDTH + axes] = 1  # its token, from the second tap only
    else:
        feature[CONSTANT] = 1  # the same for every row
    weights[f"{attention}v_proj.weight"][axes, axes + READ * context] = 1
    for slot in range(1, BLOCK):
        back = slot + context  # from the slot to the anchor, or to the last row of the context
        head = slice((slot - 1) * SIZE, slot * SIZE)
        turned = np.concatenate([np.cos(back * frequencies), -np.sin(back * frequencies)])
        weights[f"{attention}q_proj.weight"][head, MASK] = turned
        output = weights[f"{attention}o_proj.weight"][:, head]
        for token in range(TOKENS):
            anchor = following[token] if context else token
            if slot <= depth(anchor):
                output[[anchor, *chain(following, anchor, slot - 1)][-1], token] += 100
    return weights


def write_pair(
    folder: Path,
    depth: Depth,
    following: Sequence[int] | None = None,
    context: bool = False,
    shuffle: int | None = None,
    eos: tuple[int, ...] = (),
    **sizes: Any,
) -> tuple[Path, Path]:
    """Write a known pair.

    Args:
        folder: for both models.
        depth: anchor -> how many of the slots after it are right, 0 to 15.
        following: token -> the token that the target says next; a permutation unless given.
        context: the drafter reads the last context feature (from the second tap) in place of the anchor; the depth
            must be the same for all anchors then.
        shuffle: a seed that mixes each of the drafter's tensors.
        eos: end tokens.
        sizes: of the target.
    """
    following = permutation() if following is None else following
    target, drafter = target_spec(**sizes), drafter_spec()
    drafted = _drafter(drafter, following, depth, context)
    if shuffle is not None:
        order = np.random.RandomState(shuffle)
        drafted = {name: order.permutation(array.ravel()).reshape(array.shape) for name, array in drafted.items()}
    first = write_target(folder / "target", target, eos=eos, weights=_target(target, following))
    return first, write_drafter(folder / "drafter", drafter, weights=drafted)


def known_pair(folder: Path, depth: Depth, **options: Any) -> Any:
    """A known pair, loaded as a user's would be; arguments as in `write_pair`."""
    first, second = write_pair(folder, depth, **options)
    return dflash_mlx.load(str(first), draft=str(second))


def expected_rounds(
    following: Sequence[int], last: int, count: int, length: int, depth: Depth
) -> tuple[list[int], list[Mapping[str, int]]]:
    """Tokens and rounds that theory predicts after a prompt that ends with `last`."""
    tokens, rounds = chain(following, last, 1), []
    while len(tokens) < count:
        drafted = min(length, count - len(tokens) - 1)
        accepted = min(depth(tokens[-1]), drafted)
        tokens += chain(following, tokens[-1], accepted + 1)
        rounds.append({"drafted": drafted, "accepted": accepted, "committed": accepted + 1})
    return tokens, rounds
