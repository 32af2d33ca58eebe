"""Predictions in 16 bits: what rounding does to probabilities and to KL divergences."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ciuic_cli.evaluation.divergence import kl_divergence
from ciuic_cli.evaluation.stored_predictions import StoredPredictions

CPU = torch.device("cpu")


def _stored(predictions: StoredPredictions, tokens: int) -> torch.Tensor:
    """The log-probabilities of the first tokens under the name "a"."""
    return torch.cat([*predictions.blocks("a", CPU, tokens)])


def _logits(tokens: int, scale: float) -> torch.Tensor:
    return scale * torch.randn(tokens, 5000, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0, 12.0])
def test_logarithms_are_off_by_half_a_step(tmp_path: Path, scale: float) -> None:
    logits = _logits(37, scale)
    predictions = StoredPredictions(tmp_path)
    predictions.put("a", logits)
    found, exact = _stored(predictions, 37), logits.log_softmax(-1)
    likely = exact > -32
    assert (found - exact)[likely].abs().max() < 2.1 / 4096  # and once more, for the sum of all
    assert float(found[~likely].exp().sum()) < 5000 * 37 * 2e-14
    assert torch.allclose(found.exp().sum(-1), torch.ones(37), atol=1e-5)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) == 2 * logits.numel()


@pytest.mark.parametrize("loss", [0.0, 0.003, 0.03, 0.3])
@pytest.mark.parametrize("scale", [1.0, 4.0, 12.0])
def test_divergences_are_those_of_exact_predictions(tmp_path: Path, scale: float, loss: float) -> None:
    """With a scale of 12, many predictions are nearly certain. A loss of 0.003 is about 5e-6 nats."""
    logits = _logits(64, scale)
    change = loss * torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    changed = (logits + change).double().log_softmax(-1)
    predictions = StoredPredictions(tmp_path)
    predictions.put("a", logits)
    found = float(kl_divergence(_stored(predictions, 64).double(), changed).mean())
    exact = float(kl_divergence(logits.double().log_softmax(-1), changed).mean())
    assert abs(found - exact) < 1e-6 + 0.005 * exact


def test_the_first_tokens_and_other_dtypes(tmp_path: Path) -> None:
    logits = _logits(20, 3.0)
    predictions = StoredPredictions(tmp_path)
    predictions.put("a", logits.bfloat16())
    assert torch.equal(_stored(predictions, 7), _stored(predictions, 20)[:7])


def test_impossible_tokens_become_unlikely_ones(tmp_path: Path) -> None:
    logits = _logits(3, 1.0)
    logits[:, 5] = -torch.inf
    predictions = StoredPredictions(tmp_path)
    predictions.put("a", logits)
    assert bool(((_stored(predictions, 3)[:, 5] + 32).abs() < 0.01).all())
