"""Rows that matter alike together: classes, and when they pay for themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ciuic_cli.codecs.packing import stored_order
from ciuic_cli.passes.quantize import KroneckerFisher, per_group, prepare
from ciuic_cli.passes.sort import row_classes, sorting_pays


def test_classes_are_a_factor_of_two_apart_from_the_highest_down() -> None:
    loss = torch.tensor([1.0, 0.51, 0.49, 0.26, 2.0**-14.5, 2.0**-15.5, 2.0**-40, 0.0])
    assert row_classes(loss).tolist() == [15, 15, 14, 14, 1, 0, 0, 0]


@pytest.mark.parametrize("loss", [torch.zeros(5), torch.full((5,), 3.0)])
def test_rows_that_are_all_alike_are_of_one_class_and_not_worth_sorting(loss: torch.Tensor) -> None:
    row_class = row_classes(loss)
    assert len(set(row_class.tolist())) == 1
    assert not sorting_pays(loss, row_class, 4096)


def test_sorting_pays_where_rows_differ_and_are_long() -> None:
    loss = torch.randn(320, generator=torch.Generator().manual_seed(0)).mul(1.5).exp()
    row_class = row_classes(loss)
    assert sorting_pays(loss, row_class, 576)
    assert not sorting_pays(loss, row_class, 4)  # four bits per row, for rows of four weights
    already = loss.sort().values
    assert not sorting_pays(already, row_classes(already), 576)


def test_what_sorting_promises_is_what_the_budget_gains() -> None:
    """With widths that may be any number, the loss of a budget follows the groups' mean logarithm."""
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


def test_importance_follows_the_rows() -> None:
    generator = torch.Generator().manual_seed(2)
    weight, x, g = (torch.randn(*shape, generator=generator) for shape in ((40, 24), (90, 24), (90, 40)))
    fisher = KroneckerFisher(x.T @ x / 90, g.T @ g / 90)
    order = torch.randperm(40, generator=generator)
    moved = fisher.reordered(order)
    assert torch.equal(moved.outputs, fisher.outputs[order][:, order])
    assert torch.equal(
        KroneckerFisher(moved.inputs, torch.arange(40.0)).reordered(order).outputs, order.float()
    )
    whole, sorted_ = prepare(weight, fisher), prepare(weight[order], moved)
    assert per_group(sorted_.row_loss).sum() != pytest.approx(per_group(whole.row_loss).sum(), rel=1e-4)
    product = lambda made: float(made.outputs.noise[:40].double().log().sum())  # noqa: E731
    assert product(whole) == pytest.approx(product(sorted_), abs=0.1)  # about the determinant of G
