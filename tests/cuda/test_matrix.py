"""The kernels' view of a blob: offsets that lead to the codes, and blobs that are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from random_matrices import packed

from ciuic_cli.codecs.packing import bits_of
from ciuic_cli.codecs.stack import ExpertStack
from ciuic_cli.errors import UsageError
from ciuic_cli.kernels import DeviceMatrix, DeviceStack


def blob_of(matrix) -> torch.Tensor:
    return torch.frombuffer(bytearray(matrix.to_bytes()), dtype=torch.uint8).clone()


def test_offsets_lead_to_the_codes(random: np.random.Generator) -> None:
    matrix = packed(random, 115, 144, rank=9)
    blob = blob_of(matrix)
    view = DeviceMatrix(matrix, blob)
    for group, offset in enumerate(view.group_offset.tolist()):
        begin = int(matrix.group_offset[group])
        size = int(32 * bits_of(matrix.row_bits[group])) * 9
        stored = blob[16 * offset : 16 * offset + size].numpy()
        assert np.array_equal(stored, matrix.codes[begin : begin + size])
    assert view.lowrank is not None
    for factor, original in zip(view.lowrank, matrix.lowrank or (), strict=True):
        assert bytes(factor.blob.numpy()) == original.to_bytes()
        assert factor.blob.data_ptr() - blob.data_ptr() < blob.numel()


def test_experts_of_a_stack(random: np.random.Generator) -> None:
    stack = ExpertStack(tuple(packed(random, 40, 48, bits) for bits in ((2,), (0,), (5.5, 3))))
    view = DeviceStack(stack, blob_of(stack))
    assert (view.count, view.rows, view.cols, view.max_units) == (3, 40, 48, 6)
    assert view.group_offset.shape == (3, 3)
    for index, original in enumerate(stack.experts):
        assert bytes(view.expert(index).blob.numpy()) == original.to_bytes()
        assert torch.equal(view.expert(index).group_offset, view.group_offset[index])


def test_resident_bytes_grow_by_little(random: np.random.Generator) -> None:
    matrix = packed(random, 576, 576, (4,))
    view = DeviceMatrix(matrix, blob_of(matrix))
    assert view.group_offset.nbytes < 0.002 * matrix.nbytes


def test_refusals(random: np.random.Generator) -> None:
    matrix = packed(random, 32, 48)
    blob = blob_of(matrix)
    unaligned = torch.empty(blob.numel() + 1, dtype=torch.uint8)[1:].copy_(blob)
    for wrong, message in (
        (blob[:-16], "contiguous uint8"),
        (blob.to(torch.int8), "contiguous uint8"),
        (unaligned, "multiple of 16"),
    ):
        with pytest.raises(UsageError, match=message):
            DeviceMatrix(matrix, wrong)
    with pytest.raises(UsageError, match="one seed"):
        mixed = ExpertStack((packed(random, 32, 48), packed(random, 32, 48, seed=1)))
        DeviceStack(mixed, blob_of(mixed))
