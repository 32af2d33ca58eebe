"""Input scales: they lower the real loss of rounding, pay for their bytes, and do not depend on threads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from random_moments import random_contexts, random_moment

from ciuic_cli.codecs.scales import input_factors
from ciuic_cli.codecs.trellis import decode_dense
from ciuic_cli.passes import effective_variance, scale
from ciuic_cli.passes.feedback import input_damping
from ciuic_cli.passes.fisher import KroneckerFisher
from ciuic_cli.passes.predicted_loss import group_sums, predicted_loss
from ciuic_cli.passes.prepare import prepare
from ciuic_cli.passes.rounding import round_prepared
from ciuic_cli.passes.scale import input_scales, scaled

ROWS, COLS = 64, 192


def uneven(seed: int = 0) -> tuple[torch.Tensor, KroneckerFisher]:
    """A matrix whose columns differ in size, and inputs that differ in size independently of it."""
    draw = torch.Generator().manual_seed(seed)
    basis = torch.randn(COLS, COLS, generator=draw) * torch.exp(torch.randn(COLS, generator=draw))
    moment = basis.T @ basis
    weight = torch.randn(ROWS, COLS, generator=draw) * torch.exp(0.7 * torch.randn(COLS, generator=draw))
    return weight, KroneckerFisher((moment + moment.T) / (2 * moment.trace()), torch.ones(ROWS))


def chosen(weight: torch.Tensor, fisher: KroneckerFisher) -> np.ndarray | None:
    return input_scales(weight, fisher)


def scaled_copy(
    weight: torch.Tensor, fisher: KroneckerFisher, codes: np.ndarray | None
) -> tuple[torch.Tensor, KroneckerFisher]:
    """As `scaled`, which overwrites both."""
    return scaled(weight.clone(), replace(fisher, inputs=fisher.inputs.clone()), codes)


def real_loss(weight: torch.Tensor, fisher: KroneckerFisher, codes: np.ndarray | None) -> tuple[float, float]:
    """Predicted and real loss of rounding to 3 bits."""
    prepared = prepare(*scaled_copy(weight, fisher, codes))
    bits = np.full(ROWS // 16, 3, np.uint8)
    error = decode_dense(round_prepared(prepared, bits, input_scale=codes, L=12)) - weight
    predicted = predicted_loss(group_sums(prepared.row_sensitivity), np.zeros(ROWS // 16), (3,), 12)
    return float(predicted.sum()), float(0.5 * ((error @ fisher.inputs) * error).sum())


@pytest.mark.parametrize("cols", [64, 100, 300])
def test_the_diagonal_of_the_inverse(cols: int) -> None:
    moment = random_moment(cols, 2 * cols)
    found = scale._inverse_diagonal(moment)
    damped = moment.double()
    damped.diagonal().add_(input_damping(damped.diagonal().mean()))
    assert found is not None
    torch.testing.assert_close(found, torch.linalg.inv(damped).diagonal(), rtol=1e-4, atol=0.0)


def test_the_inverse_of_many_inputs_is_that_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "BLOCK_INPUTS", 100)
    moment = random_moment(250, 500)
    found = scale._inverse_diagonal(moment)
    damped = moment.double()
    damped.diagonal().add_(input_damping(damped.diagonal().mean()))
    blocks = [damped[part, part] for part in (slice(0, 96), slice(96, 192), slice(192, 250))]
    expected = torch.cat([torch.linalg.inv(block).diagonal() for block in blocks])
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0.0)


def test_the_loss_falls_as_predicted() -> None:
    weight, fisher = uneven()
    codes = chosen(weight, fisher)
    assert codes is not None and codes.shape == (COLS,)
    plain, better = real_loss(weight, fisher, None), real_loss(weight, fisher, codes)
    assert better[0] < plain[0] / 4
    assert better[1] < plain[1] / 4
    assert better[1] / plain[1] == pytest.approx(
        better[0] / plain[0], rel=0.4
    )  # see effective_variance.py on 3 bits


def test_no_other_powers_are_better() -> None:
    weight, fisher = uneven()
    codes = chosen(weight, fisher)
    assert codes is not None
    best = real_loss(weight, fisher, codes)[0]
    for power in (0.6, 1.5):
        other = np.rint(128 - power * (128 - codes.astype(float))).clip(0).astype(np.uint8)
        assert real_loss(weight, fisher, other)[0] > best


def test_equal_columns_get_no_scales() -> None:
    weight = torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(0))
    assert chosen(weight, KroneckerFisher(torch.eye(COLS) / COLS, torch.ones(ROWS))) is None


def test_few_rows_do_not_pay_for_the_scales_bytes() -> None:
    weight, fisher = uneven()
    found = [
        chosen(weight[:rows], KroneckerFisher(fisher.inputs, torch.ones(rows))) is not None
        for rows in (1, 2, 16, 32)
    ]
    assert found == [False, False, True, True]


def test_loud_rows_do_not_decide_the_scales() -> None:
    """Every row gets the bits that it needs, so scales that suit a few loud rows would harm all others."""
    draw = torch.Generator().manual_seed(3)
    weight = torch.randn(256, COLS, generator=draw)
    weight[:8] *= 10 * torch.exp(torch.randn(COLS, generator=draw))
    assert chosen(weight, KroneckerFisher(torch.eye(COLS) / COLS, torch.ones(256))) is None


def test_scales_do_not_depend_on_the_number_of_threads() -> None:
    weight, fisher = uneven()
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(chosen(weight, fisher))
    finally:
        torch.set_num_threads(threads)
    assert all(np.array_equal(codes, found[0]) for codes in found)


def test_columns_of_zeros_and_dead_inputs_stay_finite() -> None:
    weight, fisher = uneven()
    weight[:, 5] = 0
    fisher.inputs[7], fisher.inputs[:, 7] = 0, 0
    codes = chosen(weight, fisher)
    assert codes is not None
    assert np.isfinite(real_loss(weight, fisher, codes)[1])
    assert chosen(torch.zeros(ROWS, COLS), fisher) is None


def test_scaling_keeps_the_loss_with_contexts() -> None:
    weight, fisher = uneven()
    contexts = random_contexts(ROWS, COLS)
    fisher = KroneckerFisher(fisher.inputs, fisher.outputs, contexts)
    codes = np.arange(COLS).astype(np.uint8)
    stored, moved = scaled_copy(weight, fisher, codes)
    factors = input_factors(codes)
    error = torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(2))
    before = ((error @ fisher.inputs) * error).sum() + ((error * contexts.float32()).sum(1) ** 2).sum()
    assert moved.contexts is not None
    error = error / factors
    after = ((error @ moved.inputs) * error).sum() + ((error * moved.contexts.float32()).sum(1) ** 2).sum()
    assert float(after) == pytest.approx(float(before), rel=1e-3)
    assert torch.allclose(stored * factors, weight, rtol=1e-5)


def test_scales_do_not_make_transform_blocks_unequal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs are loud in one block of the transform, as one attention head may be. Scales that compensated for all of
    that would push the row's weights out of the code's range in that block."""
    draw = torch.Generator().manual_seed(4)
    sizes = torch.ones(COLS)
    sizes[64:128] = 30.0
    basis = torch.randn(2 * COLS, COLS, generator=draw) * sizes
    weight = torch.randn(ROWS, COLS, generator=draw)
    moment = basis.T @ basis
    fisher = KroneckerFisher(moment / moment.trace(), torch.ones(ROWS))
    codes = chosen(weight, fisher)
    assert codes is not None
    factors = input_factors(codes)
    # From the ratio of the moments alone, 900, the factors would differ by 900^(1/4) = 5.5.
    assert 1.2 < float(factors[128:].mean() / factors[64:128].mean()) < 2.5
    predicted, real = real_loss(weight, fisher, codes)
    assert real == pytest.approx(predicted, rel=0.4)
    assert real < real_loss(weight, fisher, None)[1]
    monkeypatch.setattr(effective_variance, "POWER", 1)
    assert real < 0.7 * real_loss(weight, fisher, chosen(weight, fisher))[1]
