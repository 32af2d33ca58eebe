"""The low-rank pass: factors against the exact SVD, energies and bytes of the parts, the coded product."""

from __future__ import annotations

import pytest
import torch

from ciuic_cli.codecs.trellis import decode
from ciuic_cli.passes.lowrank import encode, factor, factor_bytes, parts, residual_energies


def _random(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


def _steep(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    """A matrix whose singular values fall like 1/k, as those of query and key projections do."""
    rank = min(rows, cols)
    left = torch.linalg.qr(_random(rows, rank, seed)).Q
    right = torch.linalg.qr(_random(cols, rank, seed + 1)).Q
    return left * (10.0 / torch.arange(1, rank + 1)) @ right.T


def _importance(rows: int, seed: int = 0) -> torch.Tensor:
    """Importance of rows over two orders of magnitude."""
    return torch.exp(4.6 * torch.rand(rows, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("shape", [(96, 160), (160, 96), (37, 83)])
@pytest.mark.parametrize("rank", [16, 32])
@pytest.mark.parametrize("flat", [False, True])
def test_factors_reach_the_truncated_svd(shape: tuple[int, int], rank: int, flat: bool) -> None:
    weight = _random(*shape, seed=3) if flat else _steep(*shape, seed=3)
    importance = _importance(shape[0])
    left, right = factor(weight, importance, rank)
    assert left.shape == (shape[0], rank)
    assert right.shape == (rank, shape[1])
    root = importance.sqrt()[:, None]
    found = float((root * (weight - left @ right)).square().sum())
    best = float(torch.linalg.svdvals(root * weight)[rank:].square().sum())
    assert best * (1 - 1e-4) <= found <= 1.02 * best


def test_factors_do_not_depend_on_the_global_generator() -> None:
    weight, importance = _steep(64, 96), _importance(64)
    torch.manual_seed(1)
    first = factor(weight, importance, 16)
    torch.manual_seed(2)
    second = factor(weight, importance, 16)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_remaining_is_the_share_of_energy_that_truncation_leaves() -> None:
    weight, importance = _steep(72, 112, 5), _importance(72, 6)
    offered = parts(residual_energies(weight, importance, (16, 32)), importance, 112)
    assert [part.rank for part in offered] == [16, 32]
    for part in offered:
        # From the exact SVD: the share of weighted energy that the truncation leaves in each group.
        root = importance.sqrt()[:, None]
        u, s, vh = torch.linalg.svd(root * weight, full_matrices=False)
        residual = (u[:, part.rank :] * s[part.rank :]) @ vh[part.rank :]
        for group, remaining in enumerate(part.remaining):
            rows = slice(16 * group, 16 * (group + 1))
            exact = float(residual[rows].square().sum() / (root * weight)[rows].square().sum())
            assert remaining == pytest.approx(exact, rel=0.05)
    assert (offered[1].remaining < offered[0].remaining).all()
    assert len(offered[0].remaining) == 5  # 72 rows: the last group has eight


def test_a_low_rank_matrix_leaves_nothing_and_a_zero_matrix_stays_finite() -> None:
    exact = _random(64, 16, 7) @ _random(16, 96, 8)
    assert (
        float(parts(residual_energies(exact, torch.ones(64), (16,)), torch.ones(64), 96)[0].remaining.max())
        < 1e-8
    )
    zero = parts(residual_energies(torch.zeros(64, 96), torch.ones(64), (16,)), torch.ones(64), 96)[
        0
    ].remaining
    assert (zero == 1.0).all()


def test_ranks_above_the_full_rank_are_not_offered() -> None:
    weight = _random(40, 24)
    offered = parts(residual_energies(weight, torch.ones(40), (16, 32, 64)), torch.ones(40), 24)
    assert [part.rank for part in offered] == [16]
    assert parts(residual_energies(_random(16, 200), torch.ones(16), (16, 32)), torch.ones(16), 200) == []


def test_rows_without_weight_stay_finite_and_cost_the_others_nothing() -> None:
    """Their part of the product is arbitrary; the other rows are approximated as if they were alone."""
    weight, importance = _steep(64, 96, 11), _importance(64, 12)
    importance[10:20] = 0.0
    left, right = factor(weight, importance, 16)
    assert torch.isfinite(left).all() and torch.isfinite(right).all()
    root = importance.sqrt()[:, None]
    found = float((root * (weight - left @ right)).square().sum())
    best = float(torch.linalg.svdvals(root * weight)[16:].square().sum())
    assert best * (1 - 1e-4) <= found <= 1.02 * best


@pytest.mark.parametrize(("rows", "cols", "rank"), [(37, 83, 16), (128, 96, 32)])
def test_the_coded_product_equals_the_decoded_one(rows: int, cols: int, rank: int) -> None:
    weight, importance = _steep(rows, cols, 9), _importance(rows, 10)
    (right, left), product = encode(weight, importance, rank, L=12)
    assert (right.rows, right.cols) == (rank, cols)
    assert (left.rows, left.cols) == (rank, rows)
    assert (
        right.nbytes + left.nbytes
        == factor_bytes(rows, cols, rank)
        == len(right.to_bytes() + left.to_bytes())
    )
    decoded = decode(left, original_basis=True).T @ decode(right, original_basis=True)
    assert torch.equal(product, decoded)
    # Coding with six bits loses little against the truncation.
    l_exact, r_exact = factor(weight, importance, rank)
    root = importance.sqrt()[:, None]
    coded = float((root * (weight - product)).square().sum())
    exact = float((root * (weight - l_exact @ r_exact)).square().sum())
    whole = float((root * weight).square().sum())
    assert coded - exact < 2e-3 * whole
