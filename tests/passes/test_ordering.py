"""The order in which blocks of columns are rounded."""

from __future__ import annotations

import pytest
import torch

from ciuic_cli.passes.ordering import PIVOTS, rounding_order
from ciuic_cli.passes.quantize import BLOCK, block_ldl


def moment(n: int, spread: float, seed: int = 0) -> torch.Tensor:
    """A second moment whose columns differ in size and share a few directions."""
    generator = torch.Generator().manual_seed(seed)
    samples = torch.randn(4 * n, n, generator=generator)
    samples += 3 * torch.randn(4 * n, 2, generator=generator) @ torch.randn(2, n, generator=generator)
    sizes = torch.exp(spread * torch.randn(n // BLOCK, generator=generator)).repeat_interleave(BLOCK)
    return (samples * sizes).T @ (samples * sizes) / (4 * n)


def trace_in(order: torch.Tensor, h: torch.Tensor) -> float:
    columns = (order[:, None] * BLOCK + torch.arange(BLOCK)).reshape(-1)
    return float(block_ldl(h[columns][:, columns]).noise.sum())


@pytest.mark.parametrize("blocks", [1, 2, 7, PIVOTS, 3 * PIVOTS])
def test_an_order_names_every_block_once(blocks: int) -> None:
    assert sorted(rounding_order(moment(BLOCK * blocks, 0.5)).tolist()) == list(range(blocks))


@pytest.mark.parametrize("spread", [0.0, 0.5, 1.5])
@pytest.mark.parametrize("blocks", [6, 3 * PIVOTS])
def test_the_order_leaves_less_than_any_that_knows_nothing(blocks: int, spread: float) -> None:
    h = moment(BLOCK * blocks, spread)
    chosen = trace_in(rounding_order(h), h)
    generator = torch.Generator().manual_seed(1)
    assert all(chosen < trace_in(torch.randperm(blocks, generator=generator), h) for _ in range(5))


def test_two_blocks() -> None:
    """The smaller one is rounded last: what both share is taken off the larger one."""
    h = torch.eye(2 * BLOCK)
    h[:BLOCK, :BLOCK] *= 4
    h[:BLOCK, BLOCK:] = h[BLOCK:, :BLOCK] = torch.eye(BLOCK)
    order = rounding_order(h)
    assert order.tolist() == [1, 0]
    assert trace_in(order, h) == pytest.approx(BLOCK * (1 + 3))
    assert trace_in(order.flip(0), h) == pytest.approx(BLOCK * (4 + 0.75))


def test_what_is_alike_stays_in_its_order() -> None:
    assert rounding_order(torch.eye(5 * BLOCK)).tolist() == list(range(5))


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_moment_without_a_factor_still_has_an_order(value: float) -> None:
    h = moment(20 * BLOCK, 0.5)
    h[40:80] = h[:, 40:80] = value
    assert sorted(rounding_order(h).tolist()) == list(range(20))
