"""What a drafter says about a block's slots, and how a selector's candidates become one path through them.

A selector scores a slot's candidates by the token before it, so its walk is sequential: slot 1's choice decides slot
2's scores. But a slot has K candidates, and so its predecessor is one of K: the best successor of each is found for
all slots at once, [M, K], and walking is then only following indices. Chains of them are joined pairwise, so M slots
take log2(M) steps on the device and none on the host. Letters: M slots, K candidates, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

Transitions = Callable[[mx.array], mx.array]


class Slots(NamedTuple):
    """What a drafter says about the slots after the anchor.

    Attributes:
        logits: [M, V] float32; row i is slot i + 1's.
        multiplier: what the target's logits were multiplied by and these were not.
        transitions: of a drafter with a selector: from candidate ids [M, K] uint32 to float32 [M, K, K], what is added
            to the score of candidate c of a row where candidate a of the row before was chosen, at [row, a, c]. In
            row 0 it is the same for all a, as there the anchor comes before.
        candidates: how many a slot has, 0 without a selector.
    """

    logits: mx.array
    multiplier: float = 1.0
    transitions: Transitions | None = None
    candidates: int = 0


def walk(scores: mx.array, transitions: mx.array) -> mx.array:
    """The path that takes, slot by slot, the best candidate after the one taken before.

    Args:
        scores: [M, K] of the candidates themselves.
        transitions: [M, K, K], as in `Slots`.
    Returns:
        [M] uint32, the column taken in each row. Lazy.
    """
    after = mx.argmax(scores[:, None] + transitions, axis=-1)  # [M, K]: from the candidate before to the one taken
    reach = 1
    while reach < after.shape[0]:
        # Row i maps from row i - reach; joined with that row's own map it reaches twice as far back.
        joined = mx.take_along_axis(after[reach:], after[:-reach], axis=-1)
        after = mx.concatenate([after[:reach], joined])
        reach *= 2
    return after[:, 0]
