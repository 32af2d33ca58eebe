"""Fisher information of the input embedding's rows, from the gradients that arrive below the first layer.

An embedding row's error is the same wherever its token occurs in a sequence, so its effects add up before they are
squared (measured: docs/experiments/statistics/embedding-occurrences.md). For token v in one sequence let s_v be the sum
of the gradients g_t over its occurrences t. Over all sequences the following is recorded (`add_occurrences`) and then
made the fields of `EmbeddingUse` (`embedding_use` in `files.py` reads them):

    moment          Σ s_v s_vᵀ / |s_v|, to unit trace     (n, n); divided by |s_v|, so that each sum counts with its
                                                          norm, as a token does in `moments.py`
    token_fisher    Σ |s_v|² per occurrence of v          (vocabulary,); mixed with the mean over single occurrences of
                                                          all tokens, which counts for `PRIOR_OCCURRENCES`
"""

from __future__ import annotations

import torch

from ciuic_cli.process.threads import one_thread
from ciuic_cli.statistics.moments import Moments

PRIOR_OCCURRENCES = 8
"""Occurrences of a token that the mean over all tokens counts for in `token_fisher`. No measurement is on record."""


def empty_embedding_sums(vocabulary: int, cols: int, device: torch.device) -> Moments:
    """Sums of a segment of the text, in a `Moments` so that workers can add them up.

    inputs: (n, n) for the moment. outputs: (2, vocabulary), Σ |s_v|² and the number of occurrences by token. trace: Σ
    |g|² over single occurrences, unlike elsewhere.
    """
    return Moments(torch.zeros(cols, cols, device=device), torch.zeros(2, vocabulary, device=device))


def add_occurrences(sums: Moments, tokens: torch.Tensor, gradients: torch.Tensor) -> None:
    """Add one sequence: tokens (t,), and the gradients (t, n) float32 of the embedding's rows at their occurrences."""
    present = tokens.unique()
    occurs = (present[:, None] == tokens[None]).to(gradients.dtype)
    token_sums = occurs @ gradients
    weighted = token_sums / token_sums.norm(dim=1, keepdim=True).clamp_min(1e-30).sqrt()
    sums.inputs.addmm_(weighted.T, weighted)
    sums.outputs[0, present] += token_sums.square().sum(1)
    sums.outputs[1, present] += occurs.sum(1)
    with one_thread():
        sums.trace += float(gradients.square().sum())


def embedding_moment(sums: Moments) -> torch.Tensor:
    """`EmbeddingUse.moment` (n, n) of the whole text's sums."""
    with one_thread():
        return sums.inputs / sums.inputs.diagonal().sum().clamp_min(1e-30)


def token_fisher(sums: Moments, text_tokens: int) -> torch.Tensor:
    """`EmbeddingUse.token_fisher` (vocabulary,) of the whole text's sums; text_tokens: in the whole text."""
    squares, occurrences = sums.outputs
    with one_thread():
        mean = sums.trace / text_tokens
    return (squares + PRIOR_OCCURRENCES * mean) / (occurrences + PRIOR_OCCURRENCES)
