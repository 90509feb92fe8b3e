"""Position-keyed Gumbel noise: what makes a sample depend on (seed, choice index, position) and on nothing else.

No state is shared or advanced: a position's noise is a function of its key, whoever asks for it, how often, and
with how many neighbours. Letters: M rows, V vocabulary.
"""

from __future__ import annotations

import mlx.core as mx

MASK64 = 2**64 - 1
HALF_STEP = 2.0**-33  # half the step of MLX's 32-bit uniform numbers


def _splitmix64(value: int) -> int:
    """One step of SplitMix64 (Steele, Lea, Flood 2014): 64 well-mixed bits from 64 bits."""
    value = (value + 0x9E3779B97F4A7C15) & MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


def position_keys(seed: int, index: int, position: int, rows: int) -> mx.array:
    """Keys of `rows` positions from `position` on, [rows, 2] uint32."""
    stream = _splitmix64(_splitmix64(seed) ^ index)
    words = [_splitmix64(stream ^ _splitmix64(position + row)) for row in range(rows)]
    return mx.array([[word >> 32, word & 0xFFFFFFFF] for word in words], dtype=mx.uint32)


def uniform(keys: mx.array, vocab: int) -> mx.array:
    """-u for u uniform in (0, 1), [M, V] float32, a row for each key [M, 2].

    u is (b + 1/2) / 2^32 for 32 random bits b. Near 0 all 32 bits count; near 1 float32 leaves 24 of them, and the
    nearest is 1 - 2^-24. The sign and the half step are part of the range asked for, which costs nothing.
    """
    return mx.vmap(lambda key: mx.random.uniform(-HALF_STEP, -1.0, (vocab,), key=key))(keys)


def gumbel(minus_u: mx.array) -> mx.array:
    """Standard Gumbel noise -log(-log(1 - u)), from -2.8 to 22.9, of the same shape.

    Small u gives large noise, which decides: that is the end where u has its 32 bits.
    """
    return -mx.log(-mx.log1p(minus_u))
