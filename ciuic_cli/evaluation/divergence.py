"""KL divergence between next-token predictions: the package's measure of what compression loses."""

from __future__ import annotations

import torch


def kl_divergence(
    log_p: torch.Tensor,
    log_q: torch.Tensor,
    *,
    p: torch.Tensor | None = None,
    sum_dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """KL(p || q) = Σ_v p_v (log p_v - log q_v) of every token, over the whole vocabulary, in nats per token.

    p is the original's prediction and q the changed model's; KL(q || p) is another number.

    Numerics:
    - Logarithms must be finite, so take them from `log_softmax`. The logarithm of a softmax that underflowed is -inf,
      and 0 · -inf is NaN.
    - Terms have the arguments' dtype. Their sum is far smaller than they are, so they are added in float64 unless
      `sum_dtype` says otherwise.
    - Where p and q nearly agree, rounding can make the result slightly negative. It is not clamped, because that would
      bias means over tokens.

    Args:
        log_p, log_q: (tokens, vocabulary) natural logarithms of probabilities, float32 or float64, of the same dtype.
        p: (tokens, vocabulary), for callers that have the probabilities and not only their logarithms; default
            exp(log_p).
        sum_dtype: of the sum over the vocabulary.

    Returns:
        (tokens,) of dtype `sum_dtype`.
    """
    p = log_p.exp() if p is None else p
    return (p * (log_p - log_q)).sum(-1, dtype=sum_dtype)
