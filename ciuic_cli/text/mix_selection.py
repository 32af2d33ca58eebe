"""Which passages of the package's mix complete a user's calibration text, or passages at even distances.

The mix has many kinds of text, and the user's text is often one of them. Passages of that kind add little, and a few
passages at even distances can miss a kind (measured: docs/experiments/statistics/narrow-text.md). So those are chosen
that, with the others, give the tokens of the whole mix the highest likelihood, if every token is drawn by itself.
"""

from __future__ import annotations

import heapq

import numpy as np
import torch
from numpy.typing import NDArray

SMOOTHING = 0.5
"""Added to the count of every token, so that tokens without an occurrence have a likelihood (Krichevsky and Trofimov
1981)."""


def complementing(candidates: torch.Tensor, own: torch.Tensor, count: int, vocab_size: int) -> torch.Tensor:
    """Indices (LongTensor) of the `count` candidates that complete `own` best, the best one first.

    The first k of them are the result for a count of k.

    The sum over the mix's tokens t of log(SMOOTHING + occurrences of t) grows by less with each passage that is
    added (it is submodular), so adding the best one at a time comes within 1 - 1/e of the largest sum (Nemhauser,
    Wolsey and Fisher 1978). What a passage added to fewer others is a bound of what it adds now, so few are looked at
    again for each choice (Minoux 1978).

    candidates: LongTensor (n, length), passages of the mix, with n >= count. own: LongTensor (m, any) of what is to be
    completed. Tokens are below `vocab_size`.
    """
    passage = np.repeat(np.arange(len(candidates)), candidates.shape[1])
    # One entry for each token of each candidate: (candidate, token) and how often it occurs there.
    pairs, occurrences = np.unique(passage * vocab_size + candidates.numpy().reshape(-1), return_counts=True)
    token = pairs % vocab_size
    bounds = np.searchsorted(pairs // vocab_size, np.arange(len(candidates) + 1))
    of_the_mix = _counts(candidates, vocab_size)
    present = _counts(own, vocab_size) + SMOOTHING

    def gain(number: int) -> float:
        part = slice(bounds[number], bounds[number + 1])
        terms = of_the_mix[token[part]] * np.log1p(occurrences[part] / present[token[part]])
        return float(
            terms.cumsum()[-1]
        )  # in this order: a library's product rounds differently on other processors

    # (-gain, candidate) when it was computed. The heap's first entry is the largest gain.
    heap = [(-gain(number), number) for number in range(len(candidates))]
    heapq.heapify(heap)
    chosen: list[int] = []
    while len(chosen) < count:
        stale, number = heap[0]
        now = -gain(number)
        if now > stale:
            heapq.heapreplace(heap, (now, number))
            continue
        heapq.heappop(heap)
        chosen.append(number)
        part = slice(bounds[number], bounds[number + 1])
        present[token[part]] += occurrences[part]
    return torch.tensor(chosen, dtype=torch.long)


def _counts(tokens: torch.Tensor, vocab_size: int) -> NDArray[np.float64]:
    return np.bincount(tokens.numpy().reshape(-1), minlength=vocab_size).astype(np.float64)
