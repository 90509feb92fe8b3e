"""The target's own log-probabilities: of raw logits, before processors, bias, penalties, filters and temperature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

Found = tuple[int, float, list[tuple[int, float]]]  # token, its log-probability, and the likeliest tokens with theirs


class Logprobs:
    """A logits processor that changes nothing and remembers each row it is shown, until its token is known.

    It has to come before all other processors. Each row is read by the host.

    Args:
        top: alternatives wanted to each token.
        begin: the prompt's length.
    """

    def __init__(self, top: int, begin: int):
        self.top, self._at = top, begin
        self._rows: dict[int, np.ndarray] = {}  # position -> log-probabilities [V]; drafted rows are written again

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        row = logits[0].astype(mx.float32)
        self._rows[tokens.shape[0]] = np.array(row - mx.logsumexp(row))
        return logits

    def take(self, tokens: Sequence[int]) -> list[Found]:
        """What is known of the next committed tokens."""
        found = []
        for token in tokens:
            row = self._rows.pop(self._at)
            self._at += 1
            best = np.argsort(-row, kind="stable")[: self.top]
            found.append((token, float(row[token]), [(int(each), float(row[each])) for each in best]))
        return found


def chat_entries(found: Sequence[Found], tokenizer: Any) -> list[dict[str, Any]]:
    """The entries as /v1/chat/completions has them."""

    def entry(token: int, value: float) -> dict[str, Any]:
        text = tokenizer.decode([token])
        return {"token": text, "logprob": max(value, -9999.0), "bytes": list(text.encode())}

    return [entry(token, value) | {"top_logprobs": [entry(*each) for each in top]} for token, value, top in found]


def text_entries(found: Sequence[Found], tokenizer: Any, at: int) -> dict[str, Any]:
    """The entries as /v1/completions has them; `at` is where the first token's text begins."""
    texts = [tokenizer.decode([token]) for token, _, _ in found]
    offsets = [at + sum(map(len, texts[:n])) for n in range(len(texts))]
    return {
        "tokens": texts,
        "token_logprobs": [value for _, value, _ in found],
        "top_logprobs": [{tokenizer.decode([each]): value for each, value in top} for _, _, top in found],
        "text_offset": offsets,
    }
