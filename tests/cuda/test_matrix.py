"""DeviceMatrix and DeviceStack: offsets that lead to the codes, and blobs that are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ciuic_cli.codecs.bits import bits_of
from ciuic_cli.codecs.stack import ExpertStack
from ciuic_cli.codecs.testing import MIXED_BITS, blob_of, random_matrix
from ciuic_cli.errors import UsageError
from ciuic_cli.kernels import DeviceMatrix, DeviceStack


def test_offsets_lead_to_the_codes(rng: np.random.Generator) -> None:
    matrix = random_matrix(115, 144, MIXED_BITS, rng=rng, rank=9)
    blob = blob_of(matrix)
    view = DeviceMatrix.on_device(matrix.header, blob)
    for group, offset in enumerate(view.group_offset.tolist()):
        begin = int(matrix.header.group_offset[group])
        size = int(32 * bits_of(matrix.header.row_bits[group])) * 9
        stored = blob[16 * offset : 16 * offset + size].numpy()
        assert np.array_equal(stored, matrix.codes[begin : begin + size])
    assert view.lowrank is not None
    for factor, original in zip(view.lowrank, matrix.lowrank or (), strict=True):
        assert bytes(factor.blob.numpy()) == original.to_bytes()
        assert factor.blob.data_ptr() - blob.data_ptr() < blob.numel()


def test_experts_of_a_stack(rng: np.random.Generator) -> None:
    stack = ExpertStack(tuple(random_matrix(40, 48, bits, rng=rng) for bits in ((2,), (0,), (5.5, 3))))
    view = DeviceStack.on_device(stack.header, blob_of(stack))
    assert (view.count, view.rows, view.cols, view.max_words) == (3, 40, 48, 6)
    assert view.group_offset.shape == (3, 3)
    for index, original in enumerate(stack.experts):
        assert bytes(view.experts[index].blob.numpy()) == original.to_bytes()
        assert torch.equal(view.experts[index].group_offset, view.group_offset[index])


def test_resident_bytes_grow_by_little(rng: np.random.Generator) -> None:
    matrix = random_matrix(576, 576, 4, rng=rng)
    view = DeviceMatrix.on_device(matrix.header, blob_of(matrix))
    assert view.group_offset.nbytes < 0.002 * matrix.nbytes


def test_refusals(rng: np.random.Generator) -> None:
    matrix = random_matrix(32, 48, MIXED_BITS, rng=rng)
    blob = blob_of(matrix)
    unaligned = torch.empty(blob.numel() + 1, dtype=torch.uint8)[1:].copy_(blob)
    for wrong, message in (
        (blob[:-16], "contiguous uint8"),
        (blob.to(torch.int8), "contiguous uint8"),
        (unaligned, "multiple of 16"),
    ):
        with pytest.raises(UsageError, match=message):
            DeviceMatrix.on_device(matrix.header, wrong)
    with pytest.raises(UsageError, match="one seed"):
        mixed = ExpertStack((random_matrix(32, 48, rng=rng), random_matrix(32, 48, rng=rng, seed=1)))
        DeviceStack.on_device(mixed.header, blob_of(mixed))
