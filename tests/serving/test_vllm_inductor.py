"""The repair of torch's compiler that the plug-in for vLLM makes."""

from __future__ import annotations

from typing import Any

import pytest
from torch._inductor.dependencies import ReadWrites, StarDep
from torch._inductor.scheduler import SchedulerNode
from torch.utils._ordered_set import OrderedSet

from ciuic_cli.errors import UsageError
from ciuic_cli.serving.vllm.inductor import keep_order_of_writes


class Node:
    """A kernel that reads a buffer after an operator wrote into it. The buffer `logits` is then called `written`."""

    def __init__(self) -> None:
        self.mutation_renames = {"logits": "written"}
        self.read_writes = _reads("written")

    def set_read_writes(self, found: ReadWrites) -> None:
        self.read_writes = found


def _reads(name: str) -> ReadWrites:
    return ReadWrites(OrderedSet([StarDep(name)]), OrderedSet(), OrderedSet())


def _recompute(node: Any, *args: Any, **options: Any) -> None:
    """Stands for the function of torch 2.13, which sets what the kernel reads and forgets the new name."""
    node.set_read_writes(_reads("logits"))


def test_a_recomputed_kernel_still_waits_for_the_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SchedulerNode, "recompute_size_and_body", _recompute)
    keep_order_of_writes()
    repaired = SchedulerNode.recompute_size_and_body
    keep_order_of_writes()
    assert SchedulerNode.recompute_size_and_body is repaired
    node: Any = Node()
    repaired(node)
    assert [dependency.name for dependency in node.read_writes.reads] == ["written"]


def test_a_torch_without_the_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(SchedulerNode, "recompute_size_and_body")
    with pytest.raises(UsageError, match="not known whether"):
        keep_order_of_writes()
