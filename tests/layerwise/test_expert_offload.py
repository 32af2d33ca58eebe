"""Experts that stay in their own dtype: the same products and gradients, no copy kept, copies ahead of use."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn

from ciuic_cli.layerwise.expert_offload import ExpertsOnUse
from ciuic_cli.layerwise.expert_transfer import SLOTS, ExpertTransfer, in_buffer


class Experts(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        value = torch.randn(3, 8, 12, generator=torch.Generator().manual_seed(0))
        self.stack = nn.Parameter(value.to(dtype), requires_grad=False)
        self.plain = nn.Parameter(torch.ones(12, 12), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.linear(x, self.plain)
        return sum((nn.functional.linear(x, self.stack[e]) for e in torch.tensor([0, 2])), torch.zeros(()))


def _offloaded_and_plain(
    module: Experts, x: torch.Tensor, dense: Experts, autocast: bool
) -> list[tuple[torch.Tensor, ...]]:
    found = []
    for model, is_offloaded in ((module, True), (dense, False)):
        leaf = x.clone().requires_grad_(True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            if is_offloaded:
                with ExpertsOnUse(model):
                    y = model(leaf)
            else:
                y = model(leaf)
        y.float().square().sum().backward()
        assert leaf.grad is not None
        found.append((y, leaf.grad))
    return found


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_and_gradients_are_those_of_a_float32_stack(dtype: torch.dtype, autocast: bool) -> None:
    module, dense = Experts(dtype), Experts(dtype)
    dense.stack = nn.Parameter(dense.stack.float(), requires_grad=False)
    (y, gradient), (expected, by_autograd) = _offloaded_and_plain(module, torch.randn(5, 12), dense, autocast)
    assert y.dtype == expected.dtype and torch.equal(y, expected)
    assert gradient.dtype == torch.float32 and torch.equal(gradient, by_autograd)


def test_no_expert_is_kept_for_the_backward_pass() -> None:
    module, kept = Experts(torch.bfloat16), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.shape), lambda unused: unused
    ):
        x = torch.randn(5, 12, requires_grad=True)
        with ExpertsOnUse(module), torch.autocast("cpu", torch.bfloat16):
            module(x)
    assert torch.Size((8, 12)) not in kept and torch.Size((12, 12)) in kept


def test_other_dtypes_are_an_error_without_it() -> None:
    with pytest.raises(RuntimeError):
        Experts(torch.bfloat16)(torch.randn(5, 12))


class _StandInLane:
    """A device whose copies take a while, and that computes only after `release`: then the slot's memory is spoiled.

    Work is enqueued in order, as on a stream. A slot that is filled while it is in use fails the test.
    """

    def __init__(self, nbytes: int, seconds: float = 0.0) -> None:
        self.buffers = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(SLOTS)]
        self.in_use = [False] * SLOTS
        self.seconds = seconds
        self.filled_while_computing = 0

    def fill(self, slot: int, expert: torch.Tensor) -> None:
        assert threading.current_thread() is not threading.main_thread()
        assert not self.in_use[slot]
        self.filled_while_computing += self.in_use[1 - slot]
        self.buffers[slot].fill_(255)
        time.sleep(self.seconds)
        self.buffers[slot][: expert.nbytes] = expert.reshape(-1).view(torch.uint8)

    def use(self, slot: int, like: torch.Tensor) -> torch.Tensor:
        self.in_use[slot] = True
        return in_buffer(self.buffers[slot], like)

    def release(self, slot: int) -> None:
        self.in_use[slot] = False


def test_experts_are_fetched_ahead_in_both_directions() -> None:
    gate, down = torch.randn(6, 8, 12).bfloat16(), torch.randn(6, 12, 8).bfloat16()
    lane = _StandInLane(2 * 8 * 12, seconds=0.01)
    transfer = ExpertTransfer([gate, down], lane)
    used = [expert for pair in zip(gate, down, strict=True) for expert in pair]
    chosen = [*used[:6], *used[8:]]  # no token chose the fourth expert
    for expert in (*chosen, *reversed(chosen)):
        assert torch.equal(transfer.get(expert), expert)
        time.sleep(0.02)  # the time of a product
        assert torch.equal(transfer.get(expert.mT), expert.mT)
    transfer.close()
    # Only the first expert, the ones after a gap and the first of a new direction are waited for.
    assert transfer.waited_for <= 4 and transfer.fetched_ahead >= 2 * len(chosen) * 2 - 4
    assert lane.filled_while_computing >= len(chosen)


def test_products_through_a_transfer_are_the_same_and_its_errors_are_raised() -> None:
    module, dense = Experts(torch.bfloat16), Experts(torch.float32)
    dense.stack = nn.Parameter(module.stack.float(), requires_grad=False)
    x = torch.randn(5, 12)
    found = []
    for each in (module, dense):
        leaf = x.clone().requires_grad_(True)
        transfer = (
            ExpertTransfer([module.stack.detach()], _StandInLane(2 * 8 * 12)) if each is module else None
        )
        with ExpertsOnUse(each, transfer=transfer):
            each(leaf).square().sum().backward()
        assert leaf.grad is not None
        found.append(leaf.grad)
    assert torch.equal(*found)
    with (
        pytest.raises(RuntimeError),
        ExpertsOnUse(module, transfer=ExpertTransfer([module.stack.detach()], _StandInLane(3))),
    ):
        module(x)
