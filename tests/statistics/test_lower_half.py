"""Matrices of which only the lower half is kept: what is above the diagonal is neither read nor written."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from ciuic_cli.codecs import native
from ciuic_cli.statistics import lower_half

SIZES = (1, 100, 256, 257, 600)


def _garbage(size: int) -> torch.Tensor:
    return torch.full((size, size), torch.nan)


@pytest.mark.parametrize("size", SIZES)
def test_halves_are_cleared_added_and_scaled(size: int) -> None:
    first, second = (torch.randn(size, size) for _ in range(2))
    total = lower_half.cleared(_garbage(size))
    assert not total.tril().any()
    lower_half.add(total, first)
    lower_half.add(total, second)
    lower_half.scale(total, 3.0)
    assert torch.equal(total.tril(), ((first + second) * 3.0).tril())
    if size > 256:
        assert bool(total[0, 256:].isnan().all())


@pytest.mark.parametrize("size", SIZES)
def test_bytes(size: int) -> None:
    assert lower_half.bytes_of(size) == sum(4 * block.numel() for block in lower_half.blocks(_garbage(size)))


@pytest.mark.skipif(
    not native.interface().ciuic_has_symmetric_sums(0), reason="torch's products are whole matrices"
)
def test_the_upper_half_takes_no_memory() -> None:
    """8,000 rows have 256 MB, and each takes a page more than its half. In a process of its own, where nothing else is
    freed or taken."""
    code = (
        "import torch\n"
        "from ciuic_cli.process.memory import resident_bytes\n"
        "from ciuic_cli.statistics import lower_half\n"
        "from ciuic_cli.statistics.symmetric_product import add_symmetric_product\n"
        "torch.set_num_threads(1)\n"
        "vectors = torch.randn(8, 8000)\n"
        "add_symmetric_product(torch.zeros(48, 48), *2 * (torch.randn(8, 48),))\n"
        "before = resident_bytes()\n"
        "moments = [lower_half.zeros(8000, torch.device('cpu')) for _ in range(2)]\n"
        "for moment in moments: add_symmetric_product(moment, vectors, vectors)\n"
        "lower_half.add(*moments)\n"
        "print((resident_bytes() - before) / 2 / 256e6)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.5 < float(run.stdout) < 0.7
