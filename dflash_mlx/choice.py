"""The target's choice at a position, and the drafter's proposal for it; greedy is the case without noise.

The choice at position p is argmax_v(log P_p(v) / temperature + g_p(v)) over the tokens that the filters keep,
with Gumbel noise g_p drawn from a key that depends on (seed, choice index, p) alone. That is an exact sample of
the filtered P_p (the Gumbel-max identity, Gumbel 1954), and it does not depend on what was drafted.
Letters: M rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx

from .errors import ProcessorError, must
from .options import Options

MASK64 = 2**64 - 1
SMALLEST = 2.0**-33  # half the smallest step of MLX's 32-bit uniform: keeps the noise finite


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


def gumbel(keys: mx.array, vocab: int) -> mx.array:
    """Standard Gumbel noise, [M, V] float32, a row for each key.

    -log(E) with E = -log1p(-u): u near 0 has all of its 32 bits there, so large values, which decide, are fine.
    """
    uniform = mx.vmap(lambda key: mx.random.uniform(shape=(vocab,), key=key))(keys)
    return -mx.log(-mx.log1p(-mx.maximum(uniform, SMALLEST)))


def keep_top_p(logprobs: mx.array, top_p: float) -> mx.array:
    """Drop tokens past the mass `top_p`; tokens as likely as the last kept one are kept (mlx-lm's rule)."""
    ordered = mx.sort(logprobs, axis=-1)
    probabilities = mx.exp(ordered)
    above = mx.cumsum(probabilities, axis=-1, reverse=True, inclusive=False)
    total = above[..., :1] + probabilities[..., :1]
    dropped = mx.sum(above >= top_p * total, axis=-1, keepdims=True)
    threshold = mx.take_along_axis(ordered, dropped, axis=-1)
    return mx.where(logprobs < threshold, -math.inf, logprobs)


def keep_min_p(logprobs: mx.array, min_p: float) -> mx.array:
    """Drop tokens less likely than `min_p` times the most likely one."""
    least = mx.max(logprobs, axis=-1, keepdims=True) + math.log(min_p)
    return mx.where(logprobs < least, -math.inf, logprobs)


def keep_top_k(logprobs: mx.array, top_k: int) -> mx.array:
    """Drop all but `top_k` tokens: a partition, not a sort; exactly top_k stay (mlx-lm's rule)."""
    drop = mx.argpartition(-logprobs, kth=top_k - 1, axis=-1)[..., top_k:]
    return mx.put_along_axis(logprobs, drop, mx.array(-math.inf, logprobs.dtype), axis=-1)


class Choice:
    """Chooses tokens for one generation.

    Args:
        options: of the generation.
        seed: of the noise.
        index: which answer to one request this is, 0 for the only one.
    """

    def __init__(self, options: Options, seed: int, index: int = 0):
        self.options, self.seed, self.index = options, seed, index

    @property
    def reads_drafts(self) -> bool:
        """Whether the host must see the drafts before the target chooses: a user's processor may read them."""
        return bool(self.options.logits_processors)

    def target(
        self, logits: mx.array, position: int, history: Sequence[int], drafted: mx.array | None = None
    ) -> mx.array:
        """The target's own tokens for consecutive positions.

        Args:
            logits: [M, V] float32, row i scoring position + i.
            position: of row 0.
            history: the committed tokens, all before `position`.
            drafted: [M-1], what row i has in its history beyond the committed tokens: the first i of it.
        Returns:
            [M] uint32. Lazy.
        Raises:
            ProcessorError: a user's processor raised or returned no row of logits.
        """
        if self.options.logits_processors:
            rows = [self._processed(logits[row : row + 1], history, drafted, row) for row in range(logits.shape[0])]
            logits = mx.concatenate(rows)
        logits = self._penalised(self._biased(logits), history, drafted)
        return self._pick(logits, position)

    def proposal(self, logits: mx.array, position: int, history: Sequence[int]) -> mx.array:
        """The drafter's tokens for consecutive positions, [M] uint32: any rule is lossless.

        The noise is the target's own, so that both agree more often than with independent draws.
        """
        logits = self._penalised(self._biased(logits), history, None)
        return self._pick(logits, position)

    def _biased(self, logits: mx.array) -> mx.array:
        bias = self.options.logit_bias
        if not bias:
            return logits
        return logits.at[:, mx.array(list(bias))].add(mx.array(list(bias.values()), dtype=mx.float32))

    def _penalised(self, logits: mx.array, history: Sequence[int], drafted: mx.array | None) -> mx.array:
        """Repetition penalty over the newest tokens before each row (Keskar et al. 2019)."""
        penalty, context, rows = self.options.repetition_penalty, self.options.repetition_context, logits.shape[0]
        if penalty == 1:
            return logits
        recent = mx.array(list(history[-context:]), dtype=mx.uint32)
        width = recent.shape[0]
        if drafted is None:
            seen = mx.broadcast_to(recent[None], (rows, width))
        else:
            # Row i sees the newest `context` of history + drafted[:i]; a short history grows with the row, and the
            # first token stands in for the rows it has not got: penalising a token twice changes nothing.
            known = mx.concatenate([mx.full((context - width,), history[0], dtype=mx.uint32), recent, drafted])
            seen = known[mx.arange(rows)[:, None] + mx.arange(context)[None]]
        picked = mx.take_along_axis(logits, seen, axis=-1)
        picked = mx.where(picked < 0, picked * penalty, picked / penalty)
        return mx.put_along_axis(logits, seen, picked, axis=-1)

    def _pick(self, logits: mx.array, position: int) -> mx.array:
        """argmax of the logits, or of the filtered log-probabilities over the temperature plus the noise."""
        temperature = self.options.temperature
        if temperature == 0:
            return mx.argmax(logits, axis=-1)
        rows, vocab = logits.shape
        logprobs = self._filtered(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        noise = gumbel(position_keys(self.seed, self.index, position, rows), vocab)
        # From the maximum down, and a finite factor: a temperature tending to 0 tends to the argmax.
        below = logprobs - mx.max(logprobs, axis=-1, keepdims=True)
        return mx.argmax(below * min(1 / temperature, 1e30) + noise, axis=-1)

    def _filtered(self, logprobs: mx.array) -> mx.array:
        """top-p, min-p, top-k in that order, with mlx-lm's edge rules."""
        options = self.options
        if 0 < options.top_p < 1:
            logprobs = keep_top_p(logprobs, options.top_p)
        if options.min_p > 0:
            logprobs = keep_min_p(logprobs, options.min_p)
        if 0 < options.top_k < logprobs.shape[-1]:
            logprobs = keep_top_k(logprobs, options.top_k)
        return logprobs

    def _processed(self, logits: mx.array, history: Sequence[int], drafted: mx.array | None, row: int) -> mx.array:
        """One row, [1, V], through the user's processors with the history that belongs to it."""
        tokens = mx.array(list(history), dtype=mx.uint32)
        if drafted is not None and row:
            tokens = mx.concatenate([tokens, drafted[:row]])
        for processor in self.options.logits_processors:
            name = getattr(processor, "__name__", type(processor).__name__)
            try:
                result = processor(tokens, logits)
            except Exception as error:
                text = must("generate", f"logits processor {name}", "a function that returns", repr(error), "Mend it.")
                raise ProcessorError(text) from error
            if not isinstance(result, mx.array) or result.shape != logits.shape:
                found = f"shape {list(result.shape)}" if isinstance(result, mx.array) else type(result).__name__
                expected = f"returning logits of shape {list(logits.shape)}"
                raise ProcessorError(must("generate", f"logits processor {name}", expected, found, "Mend it."))
            logits = result.astype(mx.float32)
            if bool(mx.all(mx.isnan(logits))):
                todo = "Mend it."
                raise ProcessorError(
                    must("generate", f"logits processor {name}", "returning numbers", "only NaN", todo)
                )
        return logits
