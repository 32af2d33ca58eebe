"""Routed experts against a loop over (token, expert) pairs in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from emulation import Emulator, stack_on_device

from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.codecs.testing import MIXED_BITS, exact_stored, random_matrix, relative_error
from ciuic_cli.errors import UsageError
from ciuic_cli.kernels import DeviceStack, experts

COUNT, ROWS, COLS = 5, 50, 80
PRUNED = 2


@pytest.fixture
def packed(rng: np.random.Generator) -> list[PackedMatrix]:
    bits = [MIXED_BITS[i:] + MIXED_BITS[:i] for i in range(COUNT)]
    bits[PRUNED] = (0,)
    return [random_matrix(ROWS, COLS, bits_of_expert, rng=rng) for bits_of_expert in bits]


@pytest.fixture
def stack(emulator: Emulator, packed: list[PackedMatrix]) -> DeviceStack:
    return stack_on_device(emulator, packed)


def pairwise(packed: list[PackedMatrix], x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    matrices = [exact_stored(expert) for expert in packed]
    out = torch.zeros(*ids.shape, ROWS, dtype=torch.float64)
    for token, row in enumerate(ids.tolist()):
        for slot, expert in enumerate(row):
            if 0 <= expert < COUNT:
                out[token, slot] = matrices[expert] @ x[token].double()
    return out


@pytest.mark.parametrize(
    ("tokens", "k", "kernel", "bound"),
    [
        (1, 3, "linear_bytes_n4", 6e-5),
        (16, 3, "linear_bytes_n4", 6e-5),  # more tokens share an expert than a fragment holds
        (30, 3, "linear_half_n16", 4e-4),
        (300, 2, "decode_rows", 4e-3),
    ],
)
def test_pairs(
    emulator: Emulator,
    packed: list[PackedMatrix],
    stack: DeviceStack,
    tokens: int,
    k: int,
    kernel: str,
    bound: float,
) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, COLS, generator=generator)
    ids = torch.randint(-1, COUNT + 2, (tokens, k), generator=generator)
    ids[0] = torch.arange(k) + 1  # a pruned one among them
    y = experts(stack, emulator.tensor(x), emulator.tensor(ids))
    assert kernel in emulator.launched
    assert relative_error(y, pairwise(packed, x, ids)) < bound
    absent = (ids < 0) | (ids >= COUNT) | (ids == PRUNED)
    assert absent.any() and not y[absent].any()


@pytest.mark.parametrize(("tokens", "k"), [(9, 3), (300, 2)])
def test_rows_are_put_into_the_experts_order(
    emulator: Emulator, stack: DeviceStack, tokens: int, k: int
) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, COLS, generator=generator)
    ids = torch.randint(0, COUNT, (tokens, k), generator=generator)
    positions = torch.stack([torch.randperm(ROWS, generator=generator) for _ in range(COUNT)])
    stored = experts(stack, emulator.tensor(x), emulator.tensor(ids))
    y = experts(stack, emulator.tensor(x), emulator.tensor(ids), positions=positions.to(torch.int32))
    assert torch.equal(y, stored.gather(2, positions[ids]))


def test_all_tokens_at_one_expert(emulator: Emulator, packed: list[PackedMatrix], stack: DeviceStack) -> None:
    x = torch.randn(11, COLS, generator=torch.Generator().manual_seed(1))
    ids = torch.full((11, 1), 4)
    y = experts(stack, emulator.tensor(x), ids, torch.float32)
    assert relative_error(y, pairwise(packed, x, ids)) < 6e-5


def test_refusals(emulator: Emulator, stack: DeviceStack) -> None:
    with pytest.raises(UsageError, match="tokens, k"):
        experts(stack, torch.zeros(2, COLS), torch.zeros(3, 1, dtype=torch.int64))
    with pytest.raises(UsageError, match="integers"):
        experts(stack, torch.zeros(2, COLS), torch.zeros(2, 1))
    with pytest.raises(UsageError, match="columns"):
        experts(stack, torch.zeros(2, COLS + 1), torch.zeros(2, 1, dtype=torch.int64))
    with pytest.raises(UsageError, match="low-rank"):
        stack_on_device(emulator, [random_matrix(32, 32, rank=2), random_matrix(32, 32)])
    assert emulator.launched == []
    assert experts(stack, torch.zeros(0, COLS), torch.zeros(0, 2, dtype=torch.int64)).shape == (0, 2, ROWS)
