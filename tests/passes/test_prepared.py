"""Matrices prepared for rounding: the order of column blocks changes no result; half bits lose what is predicted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ciuic_cli.codecs.bits import BITS, stored_bits
from ciuic_cli.codecs.transform import TILE
from ciuic_cli.codecs.trellis import decode_dense
from ciuic_cli.passes.feedback import INPUT_DAMPING
from ciuic_cli.passes.fisher import KroneckerFisher
from ciuic_cli.passes.predicted_loss import group_sums, predicted_loss, pruning_loss
from ciuic_cli.passes.prepare import prepare
from ciuic_cli.passes.rounding import round_prepared


def _random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("cols", [96, 112, 192])
def test_the_spread_of_rows_does_not_depend_on_the_order_of_their_blocks(cols: int) -> None:
    """Blocks of columns differ in energy, and the order is no permutation that undoes itself."""
    sizes = torch.exp(2 * _random(cols, seed=1))
    weight = _random(40, cols, seed=2) * sizes
    plain = prepare(weight, KroneckerFisher(torch.eye(cols), torch.ones(40)))
    in_place = replace(plain, block_order=None).with_weight(weight)
    moved = replace(plain, block_order=torch.arange(cols // TILE).roll(1)).with_weight(weight)
    assert not torch.equal(moved.weight, in_place.weight)
    torch.testing.assert_close(moved.rms, in_place.rms)
    assert torch.equal(moved.in_natural_order(moved.weight.clone()), in_place.weight)


@pytest.mark.parametrize("bits", [1.5, 2.5, 3.5, 4.5])
def test_half_bits_cost_what_is_predicted(bits: float) -> None:
    rows, cols = 64, 96
    samples = _random(4 * cols, cols, seed=3) + 2 * _random(4 * cols, 3, seed=4) @ _random(3, cols, seed=5)
    outputs = _random(rows, seed=10).abs() + 0.1
    fisher = KroneckerFisher(samples.T @ samples / (4 * cols), outputs)
    damped = fisher.inputs + INPUT_DAMPING * fisher.inputs.diagonal().mean() * torch.eye(cols)
    predicted = measured = 0.0
    for seed in range(3):
        weight = _random(rows, cols, seed=6 + seed)
        prepared = prepare(weight, fisher)
        groups = rows // TILE
        packed = round_prepared(prepared, np.full(groups, stored_bits(bits), np.uint8), L=12)
        error = decode_dense(packed) - weight
        measured += 0.5 * float((fisher.outputs * ((error @ damped) * error).sum(1)).sum())
        predicted += float(
            predicted_loss(group_sums(prepared.row_sensitivity), np.zeros(groups), (bits,), 12).sum()
        )
    assert measured == pytest.approx(predicted, rel=0.12)


def test_more_bits_cost_less_at_every_width_and_for_every_row_group() -> None:
    prepared = prepare(_random(40, 48, seed=9), KroneckerFisher(torch.eye(48), torch.ones(40)))
    pruning = pruning_loss(_random(40, 48, seed=9), KroneckerFisher(torch.eye(48), torch.ones(40)))
    for L in (12, 16):
        loss = predicted_loss(group_sums(prepared.row_sensitivity), group_sums(pruning), BITS, L)
        assert (np.diff(loss, axis=1) < 0).all()
