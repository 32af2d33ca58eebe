"""The block LDL factorisation: exact where the moment is positive definite, finite where it is not."""

from __future__ import annotations

import pytest
import torch
from random_moments import random_matrix, random_moment

from ciuic_cli.codecs.transform import TILE, transform
from ciuic_cli.passes import chunk_size
from ciuic_cli.passes.feedback import (
    INPUT_DAMPING,
    OUTPUT_DAMPING,
    block_ldl,
    columns_of,
    damp,
    factor_inputs,
    factor_outputs,
    pad_square,
)


def factor_moment(g: torch.Tensor) -> torch.Tensor:
    """G as `factor_outputs` damps it."""
    return g + OUTPUT_DAMPING * g.diagonal().mean() * torch.eye(len(g))


def test_the_factors_reproduce_the_moment() -> None:
    moment = random_moment(80, 1)
    ldl = block_ldl(moment)
    assert ldl.factor is not None
    lower = ldl.factor.double()
    # D = L⁻¹ H L⁻ᵀ must be block diagonal with the diagonal `d_diagonal`.
    inverse = torch.linalg.inv(lower)
    d = inverse @ moment.double() @ inverse.T
    outside = ~torch.block_diag(*[torch.ones(TILE, TILE) for _ in range(5)]).bool()
    assert float(d[outside].abs().max()) < 1e-5
    assert torch.allclose(d.diagonal().float(), ldl.d_diagonal, rtol=1e-4)
    # L is unit block lower triangular: identities on the diagonal, zeros above.
    for row in range(5):
        for col in range(row, 5):
            block = lower[row * TILE : (row + 1) * TILE, col * TILE : (col + 1) * TILE]
            expected = torch.eye(TILE) if row == col else torch.zeros(TILE, TILE)
            assert torch.allclose(block.float(), expected, atol=1e-5)
    # Feedback never raises the weight of an error above H's diagonal, and lowers it for correlated inputs.
    assert (ldl.d_diagonal <= moment.diagonal() * 1.00001).all()
    assert float(ldl.d_diagonal.sum()) < 0.9 * float(moment.trace())


def test_float32_suffices_for_damped_moments() -> None:
    """As damped for rounding, with one direction that has 99.8 % of the trace: float64 factors differ by little."""
    h, direction = random_moment(600, 4), random_matrix(1, 600, 5)
    h += 500 * h.trace() / direction.square().sum() * direction.T @ direction
    h.diagonal().add_(INPUT_DAMPING * h.diagonal().mean())
    single, double = block_ldl(h), block_ldl(h.double())
    assert single.factor is not None and double.factor is not None
    assert single.damping == double.damping == 0.0
    torch.testing.assert_close(single.d_diagonal, double.d_diagonal, rtol=1e-3, atol=0.0)
    torch.testing.assert_close(single.factor, double.factor, rtol=0.0, atol=2e-3)
    # The factor does not take the memory of the blocks from which D is computed.
    g = random_moment(96, 6)
    expected = block_ldl(pad_square(factor_moment(g)).double()).d_diagonal
    torch.testing.assert_close(factor_outputs(g).d_diagonal, expected, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("size", [192, 100])
def test_inputs_are_factored_with_and_without_overwriting(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(chunk_size.PART_BYTES, "cpu", 4 * 40 * size)  # several parts
    h = random_moment(size, 7)
    kept = h.clone()
    order, ldl = factor_inputs(h)
    assert torch.equal(h, kept)
    overwritten = factor_inputs(h, overwrite=True)
    assert torch.equal(h, kept) == (size % TILE != 0)  # a moment that must be padded is copied
    assert torch.equal(overwritten.block_order, order)
    assert ldl.factor is not None and overwritten.ldl.factor is not None
    assert torch.equal(overwritten.ldl.factor, ldl.factor)
    # The factors are those of the transformed, damped moment in the chosen order.
    transformed = transform(transform(kept).T)
    damp(transformed)
    columns = columns_of(order)
    expected = block_ldl(transformed[columns][:, columns].double())
    torch.testing.assert_close(ldl.d_diagonal, expected.d_diagonal, rtol=1e-4, atol=0.0)
    torch.testing.assert_close(ldl.factor, expected.factor, rtol=0.0, atol=1e-4)


def test_outputs_are_factored_with_and_without_overwriting() -> None:
    g = random_moment(100, 8)
    kept = g.clone()
    plain = factor_outputs(g)
    assert torch.equal(g, kept)
    overwritten = factor_outputs(g, overwrite=True)
    assert plain.factor is not None and overwritten.factor is not None
    assert torch.equal(overwritten.factor, plain.factor)


@pytest.mark.parametrize("rank", [1, 20])
def test_a_singular_moment_is_damped_and_still_factored(rank: int) -> None:
    x = random_matrix(rank, 64, 2)
    moment = x.T @ x / rank
    ldl = block_ldl(moment)
    assert ldl.factor is not None
    assert torch.isfinite(ldl.factor).all()
    assert torch.isfinite(ldl.d_diagonal).all()
    assert (ldl.d_diagonal > 0).all()
    assert float(ldl.d_diagonal.sum()) < float(moment.trace())


def test_a_moment_that_cannot_be_factored_falls_back_to_its_diagonal() -> None:
    indefinite = torch.eye(32)
    indefinite[0, 1] = indefinite[1, 0] = 5.0
    ldl = block_ldl(indefinite)
    assert ldl.factor is None
    assert torch.equal(ldl.d_diagonal, torch.ones(32))
    zero = block_ldl(torch.zeros(32, 32))
    assert zero.factor is None
    assert torch.equal(zero.d_diagonal, torch.zeros(32))


def test_padding_keeps_the_moment_and_stays_positive_definite() -> None:
    padded = pad_square(random_moment(37, 3))
    assert padded.shape == (48, 48)
    assert torch.equal(padded[:37, :37], random_moment(37, 3))
    assert not padded[37:, :37].any()
    assert (padded.diagonal()[37:] > 0).all()
    assert block_ldl(padded).factor is not None
    assert pad_square(random_moment(32, 3)).shape == (32, 32)
