"""Fisher information of the input embedding's rows, from the gradients that arrive below the first layer.

An embedding row has the same error wherever its token occurs in a sequence, so the gradients of the occurrences add up
before they are squared (measured: docs/experiments/statistics/embedding-occurrences.md). For token v in one sequence
let s_v be the sum of the gradients g_t over its occurrences t. `add_occurrences` sums over all sequences. From its sums
come two fields of `EmbeddingUse` in `files.py`:

    moment          Σ s_v s_vᵀ / |s_v|, to unit trace     (n, n). Divided by |s_v|, so that each s_v counts with its
                                                          norm, as a token does in `moments.py`.
    token_fisher    Σ |s_v|² per occurrence of v          (vocabulary,). Mixed with the mean of |g_t|² over all tokens,
                                                          which counts for `PRIOR_OCCURRENCES` occurrences.
"""

from __future__ import annotations

import torch

from ciuic_cli.layerwise.operations.stable_bits import stable_bits
from ciuic_cli.process.threads import one_thread
from ciuic_cli.statistics.moments import Moments

PRIOR_OCCURRENCES = 8
"""Occurrences of a token that the mean over all tokens counts for in `token_fisher`. No measurement is on record."""


def empty_embedding_sums(vocabulary: int, cols: int, device: torch.device) -> Moments:
    """Sums of a segment of the text, in a `Moments` so that workers can add them up.

    inputs: (n, n) for the moment. outputs: (2, vocabulary), Σ |s_v|² and the number of occurrences of each token.
    trace: Σ |g_t|² over all tokens of the text; it is not the trace of `inputs`.
    """
    return Moments(torch.zeros(cols, cols, device=device), torch.zeros(2, vocabulary, device=device))


def add_occurrences(sums: Moments, tokens: torch.Tensor, gradients: torch.Tensor) -> None:
    """Add one sequence: tokens (t,), and the gradients (t, n) float32 of the embedding's rows at their occurrences."""
    present = tokens.unique()
    occurs = (present[:, None] == tokens[None]).to(gradients.dtype)
    with stable_bits(gradients.device):
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
