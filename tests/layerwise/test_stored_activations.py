"""Tensors in files: their dtype, and files that were cut off."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ciuic_cli.layerwise.activation_store import ActivationStore

CPU = torch.device("cpu")


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.int16])
def test_files_have_the_dtype_of_the_store(tmp_path: Path, stored: torch.dtype) -> None:
    """2,100,000 numbers are written in three parts; a column of a matrix does not lie in one piece."""
    whole = (1000 * torch.randn(2_100_000)).round()
    tensors = {"whole": whole, "column": whole.reshape(-1, 3)[:, 1:2], "none": whole[:0]}
    store = ActivationStore(tmp_path, stored)
    for name, tensor in tensors.items():
        store.put(name, tensor)
        assert (tmp_path / name).stat().st_size == tensor.numel() * stored.itemsize
        assert torch.equal(store.get(name, CPU), tensor.to(stored).float())
        assert torch.equal(store.get(name, CPU, stored), tensor.to(stored))
    assert store.is_intact(store.state())


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_file_that_was_cut_off_is_an_error(tmp_path: Path, stored: torch.dtype) -> None:
    store = ActivationStore(tmp_path, stored)
    store.put("a", torch.randn(5, 7))
    (tmp_path / "a").write_bytes((tmp_path / "a").read_bytes()[:-1])
    with pytest.raises(OSError, match="shorter than it was written"):
        store.get("a", CPU)
    assert not store.is_intact(store.state())
