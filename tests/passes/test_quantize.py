"""The bits pass: the block factorisation, the predicted loss against the measured one, and matrices without energy."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from ciuic_cli.allocation.probes import rounding_noise
from ciuic_cli.codecs.rate_distortion import MSE_BY_L
from ciuic_cli.codecs.trellis import decode, decode_dense
from ciuic_cli.passes.quantize import (
    BLOCK,
    INPUT_DAMPING,
    OUTPUT_DAMPING,
    OUTPUT_SHRINKAGE,
    KroneckerFisher,
    Prepared,
    block_ldl,
    pad_square,
    per_group,
    predicted_loss,
    prepare,
    removal_loss,
    round_plain,
    round_prepared,
)


def _random(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


def _moment(size: int, seed: int, decay: float = 4.0) -> torch.Tensor:
    """A second moment with unit mean diagonal, eigenvalues falling by e^decay, and no axis of its own."""
    basis = torch.linalg.qr(_random(size, size, seed)).Q
    values = torch.exp(-decay * torch.arange(size) / size)
    moment = basis * (values / values.mean()) @ basis.T
    return 0.5 * (moment + moment.T)


def _believed(outputs: torch.Tensor) -> torch.Tensor:
    """G as the pass uses it: shrunk towards its diagonal, and damped."""
    g = (1 - OUTPUT_SHRINKAGE) * outputs
    g.diagonal().copy_(outputs.diagonal() + OUTPUT_DAMPING * outputs.diagonal().mean())
    return g


def _damped(inputs: torch.Tensor) -> torch.Tensor:
    """H as the pass uses it."""
    return inputs + INPUT_DAMPING * inputs.diagonal().mean() * torch.eye(len(inputs))


def _loss(error: torch.Tensor, outputs: torch.Tensor, inputs: torch.Tensor) -> float:
    """½ tr(Eᵀ G E H), from the definition."""
    g = outputs if outputs.dim() == 2 else torch.diag(outputs)
    return 0.5 * float(torch.trace(error.T @ g @ error @ inputs))


def _rounded(weight: torch.Tensor, fisher: KroneckerFisher, bits: int, L: int) -> tuple[torch.Tensor, float]:
    """The decoded matrix and its predicted loss."""
    prepared = prepare(weight, fisher)
    row_bits = np.full(len(per_group(prepared.row_loss)), bits, np.uint8)
    packed = round_prepared(prepared, row_bits, L=L)
    predicted = predicted_loss(per_group(prepared.row_loss), np.zeros(len(row_bits)), (bits,), L).sum()
    return decode(packed, original_basis=True), float(predicted)


def test_the_block_factorisation_reproduces_the_moment() -> None:
    moment = _moment(80, 1)
    found = block_ldl(moment)
    assert found.factor is not None
    lower = found.factor.double()
    # D = L⁻¹ H L⁻ᵀ must be block diagonal, and `noise` its diagonal.
    inverse = torch.linalg.inv(lower)
    middle = inverse @ moment.double() @ inverse.T
    outside = ~torch.block_diag(*[torch.ones(BLOCK, BLOCK) for _ in range(5)]).bool()
    assert float(middle[outside].abs().max()) < 1e-5
    assert torch.allclose(middle.diagonal().float(), found.noise, rtol=1e-4)
    # L is unit block lower triangular: identities on the diagonal, zeros above.
    for row in range(5):
        for col in range(row, 5):
            block = lower[row * BLOCK : (row + 1) * BLOCK, col * BLOCK : (col + 1) * BLOCK]
            expected = torch.eye(BLOCK) if row == col else torch.zeros(BLOCK, BLOCK)
            assert torch.allclose(block.float(), expected, atol=1e-5)
    # Feedback removes what inputs share: the noise weighs less than H's own diagonal, never more.
    assert (found.noise <= moment.diagonal() * 1.00001).all()
    assert float(found.noise.sum()) < 0.9 * float(moment.trace())


@pytest.mark.parametrize("rank", [1, 20])
def test_a_singular_moment_is_damped_and_still_factored(rank: int) -> None:
    x = _random(rank, 64, 2)
    moment = x.T @ x / rank
    found = block_ldl(moment)
    assert found.factor is not None
    assert torch.isfinite(found.factor).all()
    assert torch.isfinite(found.noise).all()
    assert (found.noise > 0).all()
    assert float(found.noise.sum()) < float(moment.trace())


def test_what_cannot_be_factored_falls_back_to_the_diagonal() -> None:
    indefinite = torch.eye(32)
    indefinite[0, 1] = indefinite[1, 0] = 5.0
    found = block_ldl(indefinite)
    assert found.factor is None
    assert torch.equal(found.noise, torch.ones(32))
    nothing = block_ldl(torch.zeros(32, 32))
    assert nothing.factor is None
    assert torch.equal(nothing.noise, torch.zeros(32))


def test_padding_a_moment_keeps_it_and_stays_positive() -> None:
    padded = pad_square(_moment(37, 3))
    assert padded.shape == (48, 48)
    assert torch.equal(padded[:37, :37], _moment(37, 3))
    assert not padded[37:, :37].any()
    assert (padded.diagonal()[37:] > 0).all()
    assert block_ldl(padded).factor is not None
    assert pad_square(_moment(32, 3)).shape == (32, 32)


@pytest.mark.parametrize("shape", [(128, 192), (37, 83)])
@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("L", [12, 16])
def test_the_measured_loss_is_the_predicted_one(shape: tuple[int, int], bits: int, L: int) -> None:
    rows, cols = shape
    h, g = _moment(cols, 4), _moment(rows, 5)
    predicted = measured = true = plain = 0.0
    for seed in range(3):
        weight = _random(rows, cols, seed)
        decoded, expected = _rounded(weight, KroneckerFisher(h, g), bits, L)
        predicted += expected
        measured += _loss(weight - decoded, _believed(g), _damped(h))
        true += _loss(weight - decoded, g, h)
        without = decode(round_plain(weight, bits, L=L), original_basis=True)
        plain += _loss(weight - without, g, h)
    assert abs(measured / predicted - 1) < 0.1
    assert true < 0.8 * plain


@pytest.mark.parametrize("bits", [3, 4])
def test_prediction_with_only_the_diagonal_of_g(bits: int) -> None:
    h, g = _moment(96, 6), torch.rand(64, generator=torch.Generator().manual_seed(7)) + 0.1
    weight = _random(64, 96, 8)
    decoded, predicted = _rounded(weight, KroneckerFisher(h, g), bits, 14)
    assert abs(_loss(weight - decoded, g, _damped(h)) / predicted - 1) < 0.1
    without = decode(round_plain(weight, bits, L=14), original_basis=True)
    assert _loss(weight - decoded, g, h) < 0.8 * _loss(weight - without, g, h)


def test_feedback_on_both_sides_beats_feedback_on_one() -> None:
    h, g = _moment(96, 9), _moment(64, 10)
    weight = _random(64, 96, 11)
    both, _ = _rounded(weight, KroneckerFisher(h, g), 3, 14)
    one, _ = _rounded(weight, KroneckerFisher(h, g.diagonal().clone()), 3, 14)
    assert _loss(weight - both, g, h) < 0.95 * _loss(weight - one, g, h)


def test_removal_is_the_loss_of_zero_rows() -> None:
    """Each group's price of width 0 is what its rows cost, a row that looks free counted as an average one."""
    h, g = _moment(48, 12), torch.rand(40, generator=torch.Generator().manual_seed(13)) + 0.1
    weight = _random(40, 48, 14)
    prices = per_group(removal_loss(weight, KroneckerFisher(h, g)))
    assert len(prices) == 3
    for group, price in enumerate(prices):
        error = torch.zeros_like(weight)
        error[group * BLOCK : (group + 1) * BLOCK] = weight[group * BLOCK : (group + 1) * BLOCK]
        floored = g.clamp_min(float(g.mean()))
        assert price == pytest.approx(_loss(error, floored, _damped(h)), rel=1e-4)
        assert price >= _loss(error, g, h)


def test_groups_of_width_zero_are_exactly_zero_and_take_no_bytes() -> None:
    weight = _random(37, 83, 15)
    prepared = prepare(weight, KroneckerFisher(torch.eye(83), torch.ones(37)))
    packed = round_prepared(prepared, np.array([4, 0, 2], np.uint8), L=12)
    assert packed.codes.size == (4 + 0 + 2) * 32 * 6
    decoded = decode(packed, original_basis=True)
    assert decoded.shape == (37, 83)
    assert not decoded[16:32].any()
    error = (weight - decoded).square().mean(1)
    assert float(error[:16].mean()) < 0.02
    assert float(error[32:].mean()) < 0.3


def test_prices_per_width() -> None:
    sensitivity, removal = np.array([2.0, 1.0]), np.array([5.0, 7.0])
    loss = predicted_loss(sensitivity, removal, (0, 2, 4), 16)
    assert loss.shape == (2, 3)
    assert loss[:, 0].tolist() == [5.0, 7.0]
    # The code is within 15 % of Shannon's distortion 4⁻ᴷ at these widths, and never below it.
    assert (loss[:, 1] >= sensitivity / 16).all()
    assert (loss[:, 2] <= 1.15 * sensitivity / 256).all()
    assert np.allclose(loss[0] / loss[1], [5 / 7, 2.0, 2.0])


@pytest.mark.parametrize("value", [0.0, 0.5, -3e-5, 1e4])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_23_constant_weights_stay_finite(value: float, bits: int) -> None:
    weight = torch.full((37, 83), value)
    fisher = KroneckerFisher(_moment(83, 18), _moment(37, 19))
    prepared = prepare(weight, fisher)
    assert np.isfinite(per_group(prepared.row_loss)).all()
    assert torch.isfinite(removal_loss(weight, fisher)).all()
    packed = round_prepared(prepared, np.full(3, bits, np.uint8), L=12)
    decoded = decode(packed, original_basis=True)
    assert np.isfinite(packed.scales).all()
    assert torch.isfinite(decoded).all()
    if value:
        relative = float((decoded - weight).square().mean().sqrt()) / abs(value)
        assert relative < 2 * 2.0**-bits + 0.01


def test_zero_statistics_stay_finite() -> None:
    weight = _random(32, 48, 20)
    prepared = prepare(weight, KroneckerFisher(torch.zeros(48, 48), torch.zeros(32, 32)))
    assert np.isfinite(per_group(prepared.row_loss)).all()
    packed = round_prepared(prepared, np.full(2, 4, np.uint8), L=12)
    assert float((weight - decode(packed, original_basis=True)).square().mean()) < 0.01


def test_a_row_of_zeros_among_others_stays_close_to_zero() -> None:
    weight = _random(48, 64, 21)
    weight[5] = 0.0
    decoded = decode(round_plain(weight, 4, L=12), original_basis=True)
    assert float(decoded[5].square().mean().sqrt()) < 0.1


def _cost(error: torch.Tensor, fisher: KroneckerFisher) -> float:
    """½ Σ_r g_r e_r H_r e_rᵀ, H_r = H + v_r v_rᵀ, for a diagonal G, with H as the pass uses it."""
    assert fisher.contexts is not None
    along = (error * fisher.contexts).sum(1).square()
    return float(0.5 * (fisher.outputs * (((error @ _damped(fisher.inputs)) * error).sum(1) + along)).sum())


@pytest.mark.parametrize(("rows", "cols"), [(48, 96), (37, 83)])
def test_rows_with_contexts_of_their_own_cost_what_is_predicted(rows: int, cols: int) -> None:
    """Feedback along each row's own direction leaves hardly more than there would be without it."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(rows, cols, generator=generator)
    contexts = (
        torch.randn(rows, cols, generator=generator) / cols**0.5
    )  # a direction costs as much as all of H
    fisher = KroneckerFisher(_moment(cols, 18) / cols, torch.rand(rows, generator=generator), contexts)
    prepared = prepare(weight, fisher)
    bits = np.full(prepared.weight.shape[0] // 16, 4, np.uint8)
    error = MSE_BY_L[14][4] / 256

    def measured(changed: Prepared) -> float:
        packed = round_prepared(changed, bits, L=14)
        return _cost(decode_dense(packed) - weight, fisher)

    predicted = error * float(prepared.row_loss.sum())
    assert measured(prepared) == pytest.approx(predicted, rel=0.12)
    assert measured(dataclasses.replace(prepared, own=None)) > 1.5 * predicted
    plain = prepare(weight, dataclasses.replace(fisher, contexts=None))
    assert float(plain.row_loss.sum()) < float(prepared.row_loss.sum()) < 1.4 * float(plain.row_loss.sum())
    noise = [
        _cost(rounding_noise(prepared, bits, 14, torch.Generator().manual_seed(seed)) - weight, fisher)
        for seed in range(8)
    ]
    assert sum(noise) / 8 == pytest.approx(predicted, rel=0.08)


def test_contexts_follow_their_rows() -> None:
    generator = torch.Generator().manual_seed(6)
    weight, contexts = torch.randn(37, 83, generator=generator), torch.randn(37, 83, generator=generator)
    fisher = KroneckerFisher(_moment(83, 18), torch.rand(37, generator=generator), contexts)
    order = torch.randperm(37, generator=generator)
    moved = prepare(weight, fisher).reordered(fisher, order)
    made = prepare(weight[order], fisher.reordered(order))
    torch.testing.assert_close(moved.row_loss, made.row_loss)
    assert moved.own is None and made.own is not None
    plain = prepare(weight, dataclasses.replace(fisher, contexts=None))
    assert not torch.allclose(plain.row_loss[order], made.row_loss[:37])
