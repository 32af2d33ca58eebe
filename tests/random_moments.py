"""Random matrices, second moments and contexts."""

from __future__ import annotations

import torch

from ciuic_cli.passes.fisher import Contexts


def random_matrix(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


def random_moment(size: int, seed: int, decay: float = 4.0) -> torch.Tensor:
    """A second moment of unit mean diagonal, with eigenvalues falling by e^decay in a random basis."""
    basis = torch.linalg.qr(random_matrix(size, size, seed)).Q
    values = torch.exp(-decay * torch.arange(size) / size)
    moment = basis * (values / values.mean()) @ basis.T
    return 0.5 * (moment + moment.T)


def random_contexts(rows: int, cols: int, scale: float = 1.0) -> Contexts:
    """Contexts of random lengths of about scale √cols."""
    factors = scale * (0.5 + torch.rand(rows, generator=torch.Generator().manual_seed(2)))
    return Contexts(random_matrix(rows, cols, 1).bfloat16(), factors)
