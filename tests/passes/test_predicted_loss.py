"""The predicted loss of pruning: exact for one block of columns and for several."""

from __future__ import annotations

import pytest
import torch
from random_moments import random_matrix, random_moment

from ciuic_cli.passes import predicted_loss
from ciuic_cli.passes.feedback import INPUT_DAMPING
from ciuic_cli.passes.fisher import KroneckerFisher


@pytest.mark.parametrize("columns", [32, 64, 100, 1024])
def test_the_loss_of_pruning_a_row_is_its_quadratic_form(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predicted_loss, "MULTIPLIED_COLUMNS", columns)
    weight, h = random_matrix(24, 100, 1), random_moment(100, 2)
    g = torch.linspace(0.5, 1.5, 24)
    damped = h.double() + INPUT_DAMPING * h.double().diagonal().mean() * torch.eye(100)
    energy = ((weight.double() @ damped) * weight.double()).sum(1)
    expected = 0.5 * g.clamp_min(float(g.mean())) * energy
    found = predicted_loss.pruning_loss(weight, KroneckerFisher(h, g))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0.0)
