"""Row classes, and when sorting rows pays for their bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ciuic_cli.codecs.row_order import stored_order
from ciuic_cli.passes.fisher import KroneckerFisher
from ciuic_cli.passes.predicted_loss import group_sums
from ciuic_cli.passes.prepare import prepare
from ciuic_cli.passes.row_sorting import row_classes, sorting_pays


def test_classes_are_octaves_below_the_highest_sensitivity() -> None:
    loss = torch.tensor([1.0, 0.51, 0.49, 0.26, 2.0**-14.5, 2.0**-15.5, 2.0**-40, 0.0])
    assert row_classes(loss).tolist() == [15, 15, 14, 14, 1, 0, 0, 0]


@pytest.mark.parametrize("loss", [torch.zeros(5), torch.full((5,), 3.0)])
def test_equal_rows_are_in_one_class_and_not_sorted(loss: torch.Tensor) -> None:
    row_class = row_classes(loss)
    assert len(set(row_class.tolist())) == 1
    assert not sorting_pays(loss, row_class, 4096)


def test_sorting_pays_where_rows_differ_and_are_long() -> None:
    loss = torch.randn(320, generator=torch.Generator().manual_seed(0)).mul(1.5).exp()
    row_class = row_classes(loss)
    assert sorting_pays(loss, row_class, 576)
    assert not sorting_pays(loss, row_class, 4)  # four bits per row, for rows of four weights
    in_order = loss.sort().values
    assert not sorting_pays(in_order, row_classes(in_order), 576)


def test_the_predicted_saving_equals_the_gain_of_the_optimal_allocation() -> None:
    """With real-valued bits, the loss at a given budget follows the mean logarithm of the groups."""
    generator = torch.Generator().manual_seed(1)
    loss = torch.randn(640, generator=generator).mul(1.2).exp()
    order = torch.from_numpy(stored_order(row_classes(loss)))

    def least(groups: torch.Tensor, bits: float) -> float:
        """Sum of S 4^-b over groups, at the best b with this mean."""
        logs = groups.double().log() / np.log(4.0)
        return float((groups.double() * 4.0 ** -(bits + logs - logs.mean())).sum())

    natural, in_order = (x.reshape(-1, 16).sum(1) for x in (loss, loss[order]))
    saved = float((natural.log().mean() - in_order.log().mean()) / np.log(4.0))
    assert least(in_order, 4.0 - saved) == pytest.approx(least(natural, 4.0), rel=1e-6)
    assert saved > 0.2


def test_reordering_the_fisher_information_follows_the_rows() -> None:
    generator = torch.Generator().manual_seed(2)
    weight, x, g = (torch.randn(*shape, generator=generator) for shape in ((40, 24), (90, 24), (90, 40)))
    fisher = KroneckerFisher(x.T @ x / 90, g.T @ g / 90)
    order = torch.randperm(40, generator=generator)
    moved = fisher.reordered(order)
    assert torch.equal(moved.outputs, fisher.outputs[order][:, order])
    assert torch.equal(
        KroneckerFisher(moved.inputs, torch.arange(40.0)).reordered(order).outputs, order.float()
    )
    natural, in_order = prepare(weight, fisher), prepare(weight[order], moved)
    losses = [group_sums(prepared.row_sensitivity).sum() for prepared in (natural, in_order)]
    assert losses[1] != pytest.approx(losses[0], rel=1e-4)
    log_determinants = [
        float(prepared.outputs.d_diagonal[:40].double().log().sum()) for prepared in (natural, in_order)
    ]
    assert log_determinants[0] == pytest.approx(log_determinants[1], abs=0.1)  # about that of G
