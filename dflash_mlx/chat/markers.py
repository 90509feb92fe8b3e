"""The special tokens that hold a chat together, as the tokenizer has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SPELLINGS = {"start": "<|start|>", "message": "<|message|>", "end_of_message": "<|eom|>", "end_of_turn": "<|eot|>"}


@dataclass(frozen=True)
class Markers:
    """Ids of the layout `<|start|>ROLE to=RECIPIENT<|message|>BODY<|eom|>`, the last message ending in `<|eot|>`."""

    start: int
    message: int
    end_of_message: int
    end_of_turn: int

    @classmethod
    def of(cls, tokenizer: Any | None) -> Markers | None:
        """The tokenizer's markers, or `None` where it does not have all four: then an answer is text alone."""
        vocab = added_tokens(tokenizer)
        if any(spelling not in vocab for spelling in SPELLINGS.values()):
            return None
        return cls(**{name: vocab[spelling] for name, spelling in SPELLINGS.items()})


def added_tokens(tokenizer: Any | None) -> dict[str, int]:
    """Spelling -> id of the tokens that a tokenizer finds in a text before anything else."""
    return {} if tokenizer is None else dict(tokenizer.get_added_vocab())
