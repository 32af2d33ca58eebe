"""Which sequences of the package's mix complete a user's calibration text.

The mix has many kinds of text, and the user's text is often one of them. Sequences of that kind add little, and a few
sequences at even distances can miss a kind that the user's text lacks (measured:
docs/experiments/statistics/narrow-text.md). So those are chosen that, with the user's sequences, give the tokens of the
whole mix the highest likelihood, if every token is drawn by itself.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

SMOOTHING = 0.5
"""Added to the count of every token, so that tokens without an occurrence have a likelihood (Krichevsky and Trofimov
1981)."""


def complementing(candidates: torch.Tensor, own: torch.Tensor, count: int, vocab_size: int) -> torch.Tensor:
    """Indices (LongTensor) of the `count` candidates that complete `own` best, the best one first.

    The first k of them are the result for a count of k.

    The sum over the mix's tokens t of log(SMOOTHING + occurrences of t) grows by less with each sequence that is
    added (it is submodular), so adding the best one at a time comes within 1 - 1/e of the largest sum (Nemhauser,
    Wolsey and Fisher 1978).

    candidates: LongTensor (n, length), sequences of the mix, with n >= count. own: LongTensor (m, length) of the user's
    sequences. Tokens are below `vocab_size`.
    """
    length = candidates.shape[1]
    sequence = np.repeat(np.arange(len(candidates)), length)
    # One entry for each token of each candidate: (candidate, token) and how often it occurs there.
    pairs, occurrences = np.unique(sequence * vocab_size + candidates.numpy().reshape(-1), return_counts=True)
    candidate, token = pairs // vocab_size, pairs % vocab_size
    of_the_mix = _counts(candidates, vocab_size)
    present = _counts(own, vocab_size) + SMOOTHING
    chosen: list[int] = []
    for _ in range(count):
        gains = of_the_mix[token] * np.log1p(occurrences / present[token])
        gain = np.bincount(candidate, weights=gains, minlength=len(candidates))
        gain[chosen] = -1.0  # every gain is positive
        chosen.append(int(gain.argmax()))
        added = candidate == chosen[-1]
        present[token[added]] += occurrences[added]
    return torch.tensor(chosen, dtype=torch.long)


def _counts(tokens: torch.Tensor, vocab_size: int) -> NDArray[np.float64]:
    return np.bincount(tokens.numpy().reshape(-1), minlength=vocab_size).astype(np.float64)
