"""Logits of long sequences exist in parts: how many tokens at a time, and what tells the parts apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

LOGIT_BYTES = 12 << 20
"""Most bytes of logits that exist at a time, unless LEAST_TOKENS have more; longer sequences go through the head in
parts. Below the size from which the C library maps every block anew (`process/memory.py`), so that the pages of earlier
logits are reused (measured: docs/experiments/scale/freed-memory.md)."""
LEAST_TOKENS = 128
"""Tokens of a part where LOGIT_BYTES has room for fewer. The head's weights are read and reordered once for each part
(measured: docs/experiments/scale/head-sums.md)."""


class TokenSpan(NamedTuple):
    """Consecutive tokens of one sequence: the chunk, the sequence in it, and the first of the tokens."""

    chunk: int
    sequence: int
    begin: int

    @property
    def name(self) -> str:
        """A file name."""
        return f"{self.chunk}.{self.sequence}.{self.begin}"


VisitLogits = Callable[[TokenSpan, torch.Tensor, torch.Tensor], None]
"""Called with a span, its hidden states (1, tokens, n), and the logits (1, tokens, vocabulary) made of them. The hidden
states require a gradient where gradients are enabled."""
LogitsOfChunk = Callable[[int], Iterator[tuple[TokenSpan, torch.Tensor, torch.Tensor]]]
"""Yields all spans of a chunk in order, each with what `VisitLogits` gets."""


def logit_tokens(vocabulary: int, dtype: torch.dtype = torch.float32) -> int:
    """The most tokens whose logits exist at a time. dtype: of the head's product."""
    return max(LEAST_TOKENS, LOGIT_BYTES // (dtype.itemsize * vocabulary))
