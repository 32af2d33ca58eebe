"""The order in which blocks of columns are rounded."""

from __future__ import annotations

import pytest
import torch

from ciuic_cli.codecs.transform import TILE
from ciuic_cli.passes.column_order import PIVOTS, rounding_order
from ciuic_cli.passes.feedback import block_ldl, columns_of


def moment(n: int, spread: float, seed: int = 0) -> torch.Tensor:
    """A second moment whose columns differ in size and share a few directions."""
    generator = torch.Generator().manual_seed(seed)
    samples = torch.randn(4 * n, n, generator=generator)
    samples += 3 * torch.randn(4 * n, 2, generator=generator) @ torch.randn(2, n, generator=generator)
    sizes = torch.exp(spread * torch.randn(n // TILE, generator=generator)).repeat_interleave(TILE)
    return (samples * sizes).T @ (samples * sizes) / (4 * n)


def trace_of_d(order: torch.Tensor, h: torch.Tensor) -> float:
    columns = columns_of(order)
    return float(block_ldl(h[columns][:, columns]).d_diagonal.sum())


@pytest.mark.parametrize("blocks", [1, 2, 7, PIVOTS, 3 * PIVOTS])
def test_an_order_is_a_permutation(blocks: int) -> None:
    assert sorted(rounding_order(moment(TILE * blocks, 0.5)).tolist()) == list(range(blocks))


@pytest.mark.parametrize("spread", [0.0, 0.5, 1.5])
@pytest.mark.parametrize("blocks", [6, 3 * PIVOTS])
def test_the_order_has_a_lower_trace_than_random_orders(blocks: int, spread: float) -> None:
    h = moment(TILE * blocks, spread)
    chosen = trace_of_d(rounding_order(h), h)
    generator = torch.Generator().manual_seed(1)
    assert all(chosen < trace_of_d(torch.randperm(blocks, generator=generator), h) for _ in range(5))


def test_two_blocks() -> None:
    """The smaller block is rounded last: it compensates for the common part of the larger one."""
    h = torch.eye(2 * TILE)
    h[:TILE, :TILE] *= 4
    h[:TILE, TILE:] = h[TILE:, :TILE] = torch.eye(TILE)
    order = rounding_order(h)
    assert order.tolist() == [1, 0]
    assert trace_of_d(order, h) == pytest.approx(TILE * (1 + 3))
    assert trace_of_d(order.flip(0), h) == pytest.approx(TILE * (4 + 0.75))


def test_equal_blocks_keep_their_order() -> None:
    assert rounding_order(torch.eye(5 * TILE)).tolist() == list(range(5))


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_moment_without_a_factor_still_has_an_order(value: float) -> None:
    h = moment(20 * TILE, 0.5)
    h[40:80] = h[:, 40:80] = value
    assert sorted(rounding_order(h).tolist()) == list(range(20))
