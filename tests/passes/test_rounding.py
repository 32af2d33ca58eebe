"""The bits pass: predicted against measured loss, with feedback on both sides and along rows; degenerate matrices."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from random_moments import random_contexts, random_matrix, random_moment

from ciuic_cli.allocation.probes import with_rounding_noise
from ciuic_cli.codecs.rate_distortion import MSE_BY_L
from ciuic_cli.codecs.transform import TILE
from ciuic_cli.codecs.trellis import decode, decode_dense
from ciuic_cli.passes.feedback import INPUT_DAMPING, OUTPUT_DAMPING
from ciuic_cli.passes.fisher import KroneckerFisher
from ciuic_cli.passes.predicted_loss import group_sums, predicted_loss, pruning_loss
from ciuic_cli.passes.prepare import PreparedMatrix, prepare
from ciuic_cli.passes.rounding import round_prepared, round_without_feedback


def _damped(moment: torch.Tensor, share: float) -> torch.Tensor:
    """H or G as the passes use it."""
    return moment + share * moment.diagonal().mean() * torch.eye(len(moment))


def _loss(error: torch.Tensor, outputs: torch.Tensor, inputs: torch.Tensor) -> float:
    """½ tr(Eᵀ G E H), from the definition."""
    g = outputs if outputs.dim() == 2 else torch.diag(outputs)
    return 0.5 * float(torch.trace(error.T @ g @ error @ inputs))


def _rounded(weight: torch.Tensor, fisher: KroneckerFisher, bits: int, L: int) -> tuple[torch.Tensor, float]:
    """The decoded matrix and its predicted loss."""
    prepared = prepare(weight, fisher)
    row_bits = np.full(len(group_sums(prepared.row_sensitivity)), bits, np.uint8)
    packed = round_prepared(prepared, row_bits, L=L)
    sensitivity = group_sums(prepared.row_sensitivity)
    predicted = predicted_loss(sensitivity, np.zeros(len(row_bits)), (bits,), L).sum()
    return decode(packed, original_basis=True), float(predicted)


@pytest.mark.parametrize("shape", [(128, 192), (37, 83)])
@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("L", [12, 16])
def test_the_measured_loss_equals_the_predicted_one(shape: tuple[int, int], bits: int, L: int) -> None:
    rows, cols = shape
    h, g = random_moment(cols, 4), random_moment(rows, 5)
    predicted = measured = undamped = no_feedback = 0.0
    for seed in range(3):
        weight = random_matrix(rows, cols, seed)
        decoded, expected = _rounded(weight, KroneckerFisher(h, g), bits, L)
        predicted += expected
        measured += _loss(weight - decoded, _damped(g, OUTPUT_DAMPING), _damped(h, INPUT_DAMPING))
        undamped += _loss(weight - decoded, g, h)
        without = decode(round_without_feedback(weight, bits, L=L), original_basis=True)
        no_feedback += _loss(weight - without, g, h)
    assert abs(measured / predicted - 1) < 0.1
    assert undamped < 0.8 * no_feedback


@pytest.mark.parametrize("bits", [3, 4])
def test_prediction_with_only_the_diagonal_of_g(bits: int) -> None:
    h, g = random_moment(96, 6), torch.rand(64, generator=torch.Generator().manual_seed(7)) + 0.1
    weight = random_matrix(64, 96, 8)
    decoded, predicted = _rounded(weight, KroneckerFisher(h, g), bits, 14)
    assert abs(_loss(weight - decoded, g, _damped(h, INPUT_DAMPING)) / predicted - 1) < 0.1
    without = decode(round_without_feedback(weight, bits, L=14), original_basis=True)
    assert _loss(weight - decoded, g, h) < 0.8 * _loss(weight - without, g, h)


def test_feedback_on_both_sides_beats_feedback_on_one() -> None:
    h, g = random_moment(96, 9), random_moment(64, 10)
    weight = random_matrix(64, 96, 11)
    both, _ = _rounded(weight, KroneckerFisher(h, g), 3, 14)
    one, _ = _rounded(weight, KroneckerFisher(h, g.diagonal().clone()), 3, 14)
    assert _loss(weight - both, g, h) < 0.95 * _loss(weight - one, g, h)


def test_pruning_loss_equals_the_loss_of_zeroed_rows() -> None:
    """Rows count as at least average ones."""
    h, g = random_moment(48, 12), torch.rand(40, generator=torch.Generator().manual_seed(13)) + 0.1
    weight = random_matrix(40, 48, 14)
    losses = group_sums(pruning_loss(weight, KroneckerFisher(h, g)))
    assert len(losses) == 3
    for group, loss in enumerate(losses):
        error = torch.zeros_like(weight)
        error[group * TILE : (group + 1) * TILE] = weight[group * TILE : (group + 1) * TILE]
        floored = g.clamp_min(float(g.mean()))
        assert loss == pytest.approx(_loss(error, floored, _damped(h, INPUT_DAMPING)), rel=1e-4)
        assert loss >= _loss(error, g, h)


def test_groups_with_0_bits_are_exactly_zero_and_take_no_bytes() -> None:
    weight = random_matrix(37, 83, 15)
    prepared = prepare(weight, KroneckerFisher(torch.eye(83), torch.ones(37)))
    packed = round_prepared(prepared, np.array([4, 0, 2], np.uint8), L=12)
    assert packed.codes.size == (4 + 0 + 2) * 32 * 6
    decoded = decode(packed, original_basis=True)
    assert decoded.shape == (37, 83)
    assert not decoded[16:32].any()
    error = (weight - decoded).square().mean(1)
    assert float(error[:16].mean()) < 0.02
    assert float(error[32:].mean()) < 0.3


def test_predicted_loss_by_bits() -> None:
    sensitivity, pruning = np.array([2.0, 1.0]), np.array([5.0, 7.0])
    loss = predicted_loss(sensitivity, pruning, (0, 2, 4), 16)
    assert loss.shape == (2, 3)
    assert loss[:, 0].tolist() == [5.0, 7.0]
    # At these bits the code is within 15 % of Shannon's distortion 4⁻ᴷ, and never below it.
    assert (loss[:, 1] >= sensitivity / 16).all()
    assert (loss[:, 2] <= 1.15 * sensitivity / 256).all()
    assert np.allclose(loss[0] / loss[1], [5 / 7, 2.0, 2.0])


@pytest.mark.parametrize("value", [0.0, 0.5, -3e-5, 1e4])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_23_constant_weights_stay_finite(value: float, bits: int) -> None:
    weight = torch.full((37, 83), value)
    fisher = KroneckerFisher(random_moment(83, 18), random_moment(37, 19))
    prepared = prepare(weight, fisher)
    assert np.isfinite(group_sums(prepared.row_sensitivity)).all()
    assert torch.isfinite(pruning_loss(weight, fisher)).all()
    packed = round_prepared(prepared, np.full(3, bits, np.uint8), L=12)
    decoded = decode(packed, original_basis=True)
    assert np.isfinite(packed.header.scales).all()
    assert torch.isfinite(decoded).all()
    if value:
        relative = float((decoded - weight).square().mean().sqrt()) / abs(value)
        assert relative < 2 * 2.0**-bits + 0.01


def test_zero_statistics_stay_finite() -> None:
    weight = random_matrix(32, 48, 20)
    prepared = prepare(weight, KroneckerFisher(torch.zeros(48, 48), torch.zeros(32, 32)))
    assert np.isfinite(group_sums(prepared.row_sensitivity)).all()
    packed = round_prepared(prepared, np.full(2, 4, np.uint8), L=12)
    assert float((weight - decode(packed, original_basis=True)).square().mean()) < 0.01


def test_a_row_of_zeros_among_others_stays_close_to_zero() -> None:
    weight = random_matrix(48, 64, 21)
    weight[5] = 0.0
    decoded = decode(round_without_feedback(weight, 4, L=12), original_basis=True)
    assert float(decoded[5].square().mean().sqrt()) < 0.1


def _loss_with_contexts(error: torch.Tensor, fisher: KroneckerFisher) -> float:
    """½ Σ_r g_r e_r H_r e_rᵀ, H_r = H + v_r v_rᵀ, for a diagonal G and damped H."""
    assert fisher.contexts is not None
    along = (error * fisher.contexts.float32()).sum(1).square()
    h = _damped(fisher.inputs, INPUT_DAMPING)
    return float(0.5 * (fisher.outputs * (((error @ h) * error).sum(1) + along)).sum())


@pytest.mark.parametrize(("rows", "cols"), [(48, 96), (37, 83)])
def test_the_measured_loss_with_row_feedback_equals_the_predicted_one(rows: int, cols: int) -> None:
    """Row feedback removes most of the loss along the contexts."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(rows, cols, generator=generator)
    contexts = random_contexts(rows, cols, cols**-0.5)  # as much energy as all of H
    fisher = KroneckerFisher(random_moment(cols, 18) / cols, torch.rand(rows, generator=generator), contexts)
    prepared = prepare(weight, fisher)
    bits = np.full(prepared.weight.shape[0] // 16, 4, np.uint8)
    error = MSE_BY_L[14][4] / 256

    def measured(prepared: PreparedMatrix) -> float:
        packed = round_prepared(prepared, bits, L=14)
        return _loss_with_contexts(decode_dense(packed) - weight, fisher)

    predicted = error * float(prepared.row_sensitivity.sum())
    assert measured(prepared) == pytest.approx(predicted, rel=0.12)
    assert measured(dataclasses.replace(prepared, row_feedback=None)) > 1.5 * predicted
    plain = prepare(weight, dataclasses.replace(fisher, contexts=None))
    without, with_contexts = float(plain.row_sensitivity.sum()), float(prepared.row_sensitivity.sum())
    assert without < with_contexts < 1.4 * without
    noise = []
    for seed in range(8):
        noisy = with_rounding_noise(prepared, bits, 14, torch.Generator().manual_seed(seed))
        noise.append(_loss_with_contexts(noisy - weight, fisher))
    assert sum(noise) / 8 == pytest.approx(predicted, rel=0.08)


def test_contexts_follow_their_rows() -> None:
    generator = torch.Generator().manual_seed(6)
    weight = torch.randn(37, 83, generator=generator)
    outputs = torch.rand(37, generator=generator)
    fisher = KroneckerFisher(random_moment(83, 18), outputs, random_contexts(37, 83))
    order = torch.randperm(37, generator=generator)
    prepared = prepare(weight[order], fisher.reordered(order))
    in_order = prepare(weight, fisher).row_sensitivity[:37][order]
    torch.testing.assert_close(in_order, prepared.row_sensitivity[:37])
    plain = prepare(weight, dataclasses.replace(fisher, contexts=None))
    assert not torch.allclose(plain.row_sensitivity[order], prepared.row_sensitivity[:37])
