"""The KL divergence of predictions against exact values, and where floating-point care is needed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ciuic_cli.evaluation.divergence import kl_divergence


def test_divergence_has_its_direction_and_is_in_nats() -> None:
    p, q = torch.tensor([[0.75, 0.25]]), torch.tensor([[0.5, 0.5]])
    forward = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    backward = 0.5 * math.log(2 / 3) + 0.5 * math.log(2)
    assert float(kl_divergence(p.log(), q.log())) == pytest.approx(forward, abs=1e-7)
    assert float(kl_divergence(q.log(), p.log())) == pytest.approx(backward, abs=1e-7)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-11)])
def test_small_divergences_over_a_large_vocabulary(dtype: torch.dtype, tolerance: float) -> None:
    """Terms of both signs cancel to about 1e-4 nats; the reference is numpy's in float64."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(5, 50_000, generator=generator, dtype=torch.float64)
    others = logits + 0.01 * torch.randn(5, 50_000, generator=generator, dtype=torch.float64)
    p, q = (
        each.numpy() - np.logaddexp.reduce(each.numpy(), axis=1, keepdims=True) for each in (logits, others)
    )
    expected = (np.exp(p) * (p - q)).sum(1)
    found = kl_divergence(logits.log_softmax(-1).to(dtype), others.log_softmax(-1).to(dtype))
    assert found.dtype == torch.float64 and found.shape == (5,)
    assert 1e-5 < expected.max() < 1e-3
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=tolerance)


def test_probabilities_that_underflow_cost_nothing() -> None:
    log_p, log_q = (
        torch.tensor([logits]).log_softmax(-1) for logits in ([0.0, 0.0, -300.0], [0.0, 1.0, -200.0])
    )
    assert float(log_p[0, 2].exp()) == 0.0
    expected = float(kl_divergence(log_p[:, :2], log_q[:, :2]))
    assert float(kl_divergence(log_p, log_q)) == expected > 0.1


def test_probabilities_may_be_given_and_the_sums_dtype_chosen() -> None:
    generator = torch.Generator().manual_seed(1)
    log_p, log_q = (torch.randn(4, 30, generator=generator).log_softmax(-1) for _ in range(2))
    found = kl_divergence(log_p, log_q, p=log_p.exp(), sum_dtype=torch.float32)
    assert found.dtype == torch.float32
    assert torch.equal(found, (log_p.exp() * (log_p - log_q)).sum(-1))
