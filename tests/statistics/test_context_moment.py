"""The second moment of a head's contexts."""

from __future__ import annotations

import pytest
import torch
from random_moments import random_contexts

from ciuic_cli.passes.chunk_size import SCRATCH_ROWS
from ciuic_cli.passes.fisher import Contexts
from ciuic_cli.statistics.head_fisher import context_moment


@pytest.mark.parametrize("cols", [6, 300])
@pytest.mark.parametrize("scaled_columns", [False, True])
def test_it_is_that_of_all_rows(cols: int, scaled_columns: bool) -> None:
    rows = SCRATCH_ROWS + 5
    draw = torch.Generator().manual_seed(3)
    columns = torch.rand(cols, generator=draw) + 0.5 if scaled_columns else None
    contexts = Contexts(random_contexts(rows, cols).vectors, torch.rand(rows, generator=draw), columns)
    weights = torch.rand(rows, generator=draw)
    v = contexts.float32().double()
    expected = (v * weights[:, None]).T @ v
    found = context_moment(contexts, weights)
    assert torch.equal(found, found.T) or scaled_columns
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-3)
