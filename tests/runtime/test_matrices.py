"""CpuMatrix and TorchMatrix decode to the same values as the reference decoder."""

from __future__ import annotations

import pytest
import torch
from packed_weights import as_tensor, dense, random_codes

from ciuic_cli.codecs import reference
from ciuic_cli.codecs.bits import BITS
from ciuic_cli.codecs.transform import inverse_transform
from ciuic_cli.runtime.matrices import CpuMatrix, TorchMatrix


@pytest.mark.parametrize("L", [12, 13, 14, 15, 16])
@pytest.mark.parametrize("bits", BITS[1:])
def test_torch_operations_decode_as_the_reference(bits: int, L: int) -> None:
    packed = random_codes(21, 37, bits, L=L)
    matrix = TorchMatrix.on_device(packed.header, as_tensor(packed))
    assert torch.equal(matrix.decode(0, 21), torch.from_numpy(reference.decode(packed)))


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("kind", ["cpu", "torch"])
def test_ranges_and_single_rows(kind: str, rank: int) -> None:
    packed = random_codes(100, 70, [4, 0, 8, 3, 2], rank=rank)
    matrix = CpuMatrix(packed) if kind == "cpu" else TorchMatrix.on_device(packed.header, as_tensor(packed))
    expected = torch.from_numpy(reference.decode(packed))
    assert torch.equal(matrix.decode(0, 100), expected)
    for begin, end in ((0, 1), (15, 17), (16, 48), (31, 100), (99, 100)):
        assert torch.equal(matrix.decode(begin, end), expected[begin:end])
        half = matrix.decode(begin, end, torch.bfloat16)
        assert torch.equal(half, expected[begin:end].to(torch.bfloat16)) and half.dtype == torch.bfloat16
    rows = torch.tensor([99, 0, 17, 98, 17, 40])
    assert torch.equal(matrix.decode_rows(rows), expected[rows])
    assert not expected[16:32].any() and not matrix.is_zero
    if rank:
        assert matrix.lowrank is not None
        right, left = (
            inverse_transform(part.decode(0, part.rows), part.cols, part.seed) for part in matrix.lowrank
        )
        assert torch.allclose(inverse_transform(expected, 70, 0) + left.T @ right, dense(packed), atol=1e-5)


def test_single_rows_by_torch_operations_in_bounded_memory() -> None:
    """The rows lie in more row groups than one step decodes."""
    packed = random_codes(16 * 40, 2048, [2, 3])
    matrix = TorchMatrix.on_device(packed.header, as_tensor(packed))
    rows = torch.randperm(640, generator=torch.Generator().manual_seed(0))
    assert torch.equal(matrix.decode_rows(rows), CpuMatrix(packed).decode_rows(rows))


def test_a_matrix_without_codes_is_zero() -> None:
    packed = random_codes(20, 40, 0)
    assert CpuMatrix(packed).is_zero and TorchMatrix.on_device(packed.header, as_tensor(packed)).is_zero
    assert not CpuMatrix(random_codes(20, 40, 0, rank=2)).is_zero
