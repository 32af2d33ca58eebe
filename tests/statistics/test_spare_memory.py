"""Sums of moments in memory that other sums have used."""

from __future__ import annotations

import pytest
import torch

from ciuic_cli.statistics.moments import Moments, vector_norms
from ciuic_cli.statistics.recorder import OutputRecorder
from ciuic_cli.statistics.spare_memory import SpareMemory

CPU = torch.device("cpu")
KEY = ("w", None)


def test_memory_of_the_same_shape_is_used_again_and_cleared() -> None:
    spare = SpareMemory()
    kept = Moments(torch.full((4, 4), 7.0), torch.full((6,), torch.nan))
    spare.keep(kept.inputs, kept.outputs)
    again, other = spare.zeros((4, 4), CPU), spare.zeros((4, 4), CPU)
    assert again.data_ptr() == kept.inputs.data_ptr() != other.data_ptr()
    assert spare.zeros((6,), CPU).data_ptr() == kept.outputs.data_ptr()
    assert not again.any() and not kept.outputs.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_do_not_depend_on_what_was_in_the_memory(dtype: torch.dtype) -> None:
    x, gradient = torch.randn(64, 48), torch.randn(64, 32)
    spare = SpareMemory()
    spare.keep(torch.full((32, 32), torch.nan))
    found = []
    for memory in (None, spare):
        recorder = OutputRecorder([], dtype, memory)
        recorder._record(KEY, torch.Size((32, 48)), vector_norms(x), gradient)
        found.append(recorder.moments[KEY])
    assert torch.equal(found[0].outputs.tril(), found[1].outputs.tril())
