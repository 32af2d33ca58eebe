"""Input scales: they lower what rounding really costs, pay for their bytes, and do not depend on threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ciuic_cli.codecs.scales import input_factors
from ciuic_cli.codecs.trellis import decode_dense
from ciuic_cli.passes import unevenness
from ciuic_cli.passes.quantize import KroneckerFisher, per_group, predicted_loss, prepare, round_prepared
from ciuic_cli.passes.scale import input_scales, scaled

ROWS, COLS = 64, 192


def uneven(seed: int = 0) -> tuple[torch.Tensor, KroneckerFisher]:
    """A matrix whose columns differ in size, and inputs that do, in other columns."""
    draw = torch.Generator().manual_seed(seed)
    basis = torch.randn(COLS, COLS, generator=draw) * torch.exp(torch.randn(COLS, generator=draw))
    moment = basis.T @ basis
    weight = torch.randn(ROWS, COLS, generator=draw) * torch.exp(0.7 * torch.randn(COLS, generator=draw))
    return weight, KroneckerFisher((moment + moment.T) / (2 * moment.trace()), torch.ones(ROWS))


def chosen(weight: torch.Tensor, fisher: KroneckerFisher) -> np.ndarray | None:
    return input_scales(weight, fisher, prepare(weight, fisher).inputs)


def real_loss(weight: torch.Tensor, fisher: KroneckerFisher, codes: np.ndarray | None) -> tuple[float, float]:
    """Predicted and real loss of rounding to 3 bits."""
    prepared = prepare(*scaled(weight.clone(), fisher, codes))
    bits = np.full(ROWS // 16, 3, np.uint8)
    error = decode_dense(round_prepared(prepared, bits, input_scale=codes, L=12)) - weight
    predicted = predicted_loss(per_group(prepared.row_loss), np.zeros(ROWS // 16), (3,), 12)
    return float(predicted.sum()), float(0.5 * ((error @ fisher.inputs) * error).sum())


def test_the_loss_falls_as_predicted() -> None:
    weight, fisher = uneven()
    codes = chosen(weight, fisher)
    assert codes is not None and codes.shape == (COLS,)
    plain, better = real_loss(weight, fisher, None), real_loss(weight, fisher, codes)
    assert better[0] < plain[0] / 4
    assert better[1] < plain[1] / 4
    assert better[1] / plain[1] == pytest.approx(better[0] / plain[0], rel=0.4)  # 3 bits: see `unevenness`


def test_no_other_powers_are_better() -> None:
    weight, fisher = uneven()
    codes = chosen(weight, fisher)
    assert codes is not None
    best = real_loss(weight, fisher, codes)[0]
    for power in (0.6, 1.5):
        other = np.rint(128 - power * (128 - codes.astype(float))).clip(0).astype(np.uint8)
        assert real_loss(weight, fisher, other)[0] > best


def test_alike_columns_have_none() -> None:
    weight = torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(0))
    assert chosen(weight, KroneckerFisher(torch.eye(COLS) / COLS, torch.ones(ROWS))) is None


def test_few_rows_do_not_pay_for_them() -> None:
    weight, fisher = uneven()
    found = [
        chosen(weight[:rows], KroneckerFisher(fisher.inputs, torch.ones(rows))) is not None
        for rows in (1, 2, 16, 32)
    ]
    assert found == [False, False, True, True]


def test_loud_rows_do_not_decide_for_the_others() -> None:
    """Each row has the bits that it needs: scales that suit a few important rows cost all others theirs."""
    draw = torch.Generator().manual_seed(3)
    weight = torch.randn(256, COLS, generator=draw)
    weight[:8] *= 10 * torch.exp(torch.randn(COLS, generator=draw))
    assert chosen(weight, KroneckerFisher(torch.eye(COLS) / COLS, torch.ones(256))) is None


def test_the_same_for_any_number_of_threads() -> None:
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


def test_contexts_are_scaled_too() -> None:
    weight, fisher = uneven()
    contexts = torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(1))
    fisher = KroneckerFisher(fisher.inputs, fisher.outputs, contexts.clone())
    codes = np.arange(COLS).astype(np.uint8)
    stored, moved = scaled(weight.clone(), fisher, codes)
    factors = input_factors(codes)
    error = torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(2))
    before = ((error @ fisher.inputs) * error).sum() + ((error * contexts).sum(1) ** 2).sum()
    assert moved.contexts is not None
    error = error / factors
    after = ((error @ moved.inputs) * error).sum() + ((error * moved.contexts).sum(1) ** 2).sum()
    assert float(after) == pytest.approx(float(before), rel=1e-3)
    assert torch.allclose(stored * factors, weight, rtol=1e-5)


def test_scales_keep_blocks_of_the_transform_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs that are loud in a block of the transform and quiet in the others, as one attention head may be: scales
    that made up for all of that would have each row's weights leave the code's range there, or waste its levels."""
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
    # By the moments' ratio of 900 alone the loud columns would be divided by 900^(1/4) = 5.5 less than the others.
    assert 1.2 < float(factors[128:].mean() / factors[64:128].mean()) < 2.5
    predicted, real = real_loss(weight, fisher, codes)
    assert real == pytest.approx(predicted, rel=0.4)
    assert real < real_loss(weight, fisher, None)[1]
    monkeypatch.setattr(unevenness, "POWER", 1)
    assert real < 0.7 * real_loss(weight, fisher, chosen(weight, fisher))[1]
