"""The operators call the GPU kernels correctly. The kernels are replaced by stand-ins; tests/cuda tests the kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from packed_weights import as_tensor, dense, random_codes, relative_error

from ciuic_cli import kernels
from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.codecs.stack import ExpertStack
from ciuic_cli.runtime import blobs, gpu, ops
from ciuic_cli.runtime.weights import PlainStack

X = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
IDS = torch.tensor([[0, 1], [1, 5], [1, 0]])


def decoded(matrix: kernels.DeviceMatrix) -> torch.Tensor:
    """The stored rows, decoded from the device's blob."""
    return as_stored(PackedMatrix.from_buffer(matrix.blob, where="device"))


def as_stored(packed: PackedMatrix) -> torch.Tensor:
    return dense(replace(packed, header=replace(packed.header, row_class=None)))


class Kernels:
    """Stand-in for `ciuic_cli.kernels` that records the calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def available(self, device: torch.device) -> tuple[bool, str]:
        return True, ""

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def linear(
            weights: Any, x: torch.Tensor, dtype: Any = None, *, bare: bool = False
        ) -> list[torch.Tensor]:
            self.calls.append("linear")
            assert not bare
            return [(x.float() @ decoded(weights[0]).T).to(dtype or x.dtype)]

        def embedding(
            matrix: Any, ids: torch.Tensor, dtype: torch.dtype, *, transformed: bool = False
        ) -> torch.Tensor:
            self.calls.append("embedding")
            assert ids.dtype == torch.int64 and not transformed
            table = decoded(matrix)
            table = torch.cat([table, torch.zeros(100, table.shape[1])])
            return table[ids].to(dtype)

        def experts(
            stack: Any, x: torch.Tensor, ids: torch.Tensor, *, positions: torch.Tensor | None
        ) -> torch.Tensor:
            self.calls.append("experts")
            whole = ExpertStack.from_buffer(stack.blob, where="device").experts
            zero = torch.zeros(stack.rows, stack.cols)
            table = torch.stack([*map(as_stored, whole), *[zero] * 8])
            y = torch.einsum("tc,tkrc->tkr", x, table[ids])
            return (
                y
                if positions is None
                else y.gather(2, positions[ids.clamp(0, len(whole) - 1)].to(torch.int64))
            )

        monkeypatch.setattr(kernels, "linear", linear)
        monkeypatch.setattr(kernels, "embedding", embedding)
        monkeypatch.setattr(kernels, "experts", experts)
        monkeypatch.setattr(kernels, "available", self.available)
        monkeypatch.setitem(blobs.WEIGHTS, "cpu", blobs.WEIGHTS["cuda"])
        monkeypatch.setitem(blobs.STACKS, "cpu", blobs.STACKS["cuda"])


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    built = Kernels()
    built.install(monkeypatch)
    return built


def aligned(packed: PackedMatrix | ExpertStack) -> torch.Tensor:
    """The blob at a multiple of 64 bytes, as on a GPU."""
    stored = as_tensor(packed)
    room = torch.empty(stored.numel() + 64, dtype=torch.uint8)
    begin = -room.data_ptr() % 64
    return room[begin : begin + stored.numel()].copy_(stored)


@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize("rank", [0, 4])
def test_linear(stand_in: Kernels, rank: int, is_sorted: bool) -> None:
    packed = random_codes(48, 40, [4, 2, 6], rank=rank, is_sorted=is_sorted, is_scaled=is_sorted)
    y = ops.linear(X.to(torch.bfloat16), aligned(packed), 48)
    assert y.dtype == torch.bfloat16 and relative_error(y, X @ dense(packed).T) < 1e-2
    assert stand_in.calls == ["linear"]


@pytest.mark.parametrize("is_sorted", [False, True])
def test_embedding(stand_in: Kernels, is_sorted: bool) -> None:
    packed = random_codes(48, 40, [4, 2, 6], is_sorted=is_sorted, is_scaled=is_sorted)
    ids = torch.tensor([[3, 47, 60]], dtype=torch.int32)  # row 60 does not exist; the host does not check
    rows = ops.embedding(ids, aligned(packed), 40, torch.float32)
    assert torch.equal(rows[:, :2], dense(packed)[ids[:, :2]]) and not rows[:, 2].any()
    assert stand_in.calls == ["embedding"]


@pytest.mark.parametrize("is_sorted", [False, True])
def test_experts_with_equal_settings_take_one_launch(stand_in: Kernels, is_sorted: bool) -> None:
    stack = ExpertStack((random_codes(24, 40, 4), random_codes(24, 40, 3, is_sorted=is_sorted)))
    y = ops.routed_linear(X, aligned(stack), IDS, 24)
    assert stand_in.calls == ["experts"]
    assert torch.allclose(y[0, 0], X[0] @ dense(stack.experts[0]).T, atol=1e-5)
    assert torch.allclose(y[0, 1], X[0] @ dense(stack.experts[1]).T, atol=1e-5) and not y[1, 1].any()
    assert gpu.stack(stack.header, aligned(stack)).expert(1).rows == 24


@pytest.mark.parametrize("options", [{"rank": 3}, {"seed": 8}, {"L": 14}])
def test_experts_with_different_settings_are_multiplied_one_by_one(
    stand_in: Kernels, options: dict[str, int]
) -> None:
    stack = ExpertStack((random_codes(24, 40, 4), random_codes(24, 40, 3, **options)))
    assert isinstance(gpu.stack(stack.header, aligned(stack)), PlainStack)


def test_torch_operations_replace_unusable_kernels(
    stand_in: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "available", lambda device: (False, "no compiler"))
    packed = random_codes(48, 40, [4, 2, 6], rank=4)
    stack = ExpertStack((random_codes(24, 40, 4), random_codes(24, 40, 3)))
    assert relative_error(ops.linear(X, aligned(packed), 48), X @ dense(packed).T) < 1e-5
    y = ops.routed_linear(X, aligned(stack), IDS, 24)
    assert torch.allclose(y[0, 1], X[0] @ dense(stack.experts[1]).T, atol=1e-5)
    assert stand_in.calls == []
