"""Contexts of a head's rows, kept in bfloat16."""

from __future__ import annotations

import torch
from random_moments import random_contexts

from ciuic_cli.passes.chunk_size import SCRATCH_ROWS
from ciuic_cli.passes.fisher import Contexts


def test_factors_apply_to_rows_and_columns() -> None:
    columns = torch.arange(1.0, 6.0)
    contexts = Contexts(random_contexts(7, 5).vectors, torch.arange(7.0), columns)
    v = contexts.float32()
    assert torch.equal(v, contexts.vectors.float() * torch.arange(7.0)[:, None] * columns)
    order = torch.tensor([6, 0, 3])
    assert torch.equal(contexts.rows(order).float32(), v[order])
    assert torch.equal(contexts.rows(slice(2, 4)).float32(), v[2:4])


def test_the_second_moment_is_that_of_all_rows() -> None:
    contexts = random_contexts(SCRATCH_ROWS + 5, 6)
    weights = torch.rand(SCRATCH_ROWS + 5, generator=torch.Generator().manual_seed(3))
    v = contexts.float32()
    expected = (v * weights[:, None]).T @ v
    torch.testing.assert_close(contexts.second_moment(weights), expected, rtol=1e-5, atol=1e-3)
