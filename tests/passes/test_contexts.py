"""Contexts of a head's rows, kept in bfloat16."""

from __future__ import annotations

import torch
from random_moments import random_contexts

from ciuic_cli.passes.fisher import Contexts


def test_factors_apply_to_rows_and_columns() -> None:
    columns = torch.arange(1.0, 6.0)
    contexts = Contexts(random_contexts(7, 5).vectors, torch.arange(7.0), columns)
    v = contexts.float32()
    assert torch.equal(v, contexts.vectors.float() * torch.arange(7.0)[:, None] * columns)
    order = torch.tensor([6, 0, 3])
    assert torch.equal(contexts.rows(order).float32(), v[order])
    assert torch.equal(contexts.rows(slice(2, 4)).float32(), v[2:4])
