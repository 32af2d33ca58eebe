"""Compact moments: exact diagonals, bounded errors of correlations, a quarter of the bytes."""

from __future__ import annotations

import pytest
import torch

from ciuic_cli.statistics.compact import compact, compact_bytes, expanded


def _moment(size: int, seed: int = 0) -> torch.Tensor:
    """A second moment whose inputs have variances from 1e-6 to 1e6."""
    generator = torch.Generator().manual_seed(seed)
    scales = 10 ** torch.linspace(-3, 3, size)[torch.randperm(size, generator=generator)]
    vectors = torch.randn(2 * size, size, generator=generator) * scales
    return vectors.T @ vectors / len(vectors)


@pytest.mark.parametrize("size", [1, 16, 63, 64, 65, 200])
def test_every_entry_is_close_relative_to_the_two_inputs_that_it_couples(size: int) -> None:
    moment = _moment(size)
    moment = (moment + moment.T) / 2
    restored = expanded(**compact(moment))
    assert torch.equal(restored.diagonal(), moment.diagonal())
    assert torch.equal(restored, restored.T)
    root = moment.diagonal().double().sqrt()
    error = (restored.double() - moment.double()).abs() / torch.outer(root, root)
    assert float(error.max()) <= 1.02 * 2**-16
    assert size < 16 or float(error.max()) > 2**-18  # the bound is not idle


def test_inputs_that_are_always_zero_stay_zero() -> None:
    moment = _moment(80)
    moment[3], moment[:, 3] = 0, 0
    restored = expanded(**compact(moment))
    assert float(restored[3].abs().max()) == float(restored[:, 3].abs().max()) == 0
    assert bool(torch.isfinite(restored).all())


def test_one_large_direction_leaves_the_others_positive() -> None:
    """A direction with 98.6 % of the trace; in bfloat16 such a moment had eigenvalues of -12 % of the mean."""
    generator = torch.Generator().manual_seed(0)
    size = 1024
    vectors = torch.randn(4 * size, size, generator=generator)
    large = torch.randn(4 * size, 1, generator=generator) * torch.randn(size, generator=generator)
    vectors += large * (0.986 / 0.014) ** 0.5
    moment = vectors.T @ vectors / len(vectors)
    mean = float(moment.diagonal().mean())
    least = float(torch.linalg.eigvalsh(expanded(**compact(moment)).double())[0])
    exact = float(torch.linalg.eigvalsh(moment.double())[0])
    assert abs(least - exact) < 1e-3 * mean  # damping adds 0.08
    assert float(torch.linalg.eigvalsh(moment.bfloat16().double())[0]) < -0.01 * mean


def test_the_bytes_are_a_quarter() -> None:
    moment = _moment(1024)
    stored = sum(tensor.numel() * tensor.element_size() for tensor in compact(moment).values())
    assert stored == compact_bytes(1024) < 0.27 * 4 * moment.numel()
