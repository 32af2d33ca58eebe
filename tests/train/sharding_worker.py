"""Runs in each process of test_sharding.py, under torchrun; process 0 prints one line of JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from ciuic_cli.codecs.blockcode.code import BlockCode
from ciuic_cli.process.workers import join_workers
from ciuic_cli.train.sharding.shards import check_sharded, local_bytes, shard
from ciuic_cli.train.sharding.wire import CompressedAllGather, Traffic


def model_of(layers: int = 2) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=263, hidden_size=48, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=4,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def losses(model: Any, optimizer: torch.optim.Optimizer, rank: int, size: int, steps: int) -> list[float]:
    """The same 4 rows per step, whatever the number of processes."""
    found = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step % 3)
        rows = torch.randint(0, 250, (4, 24), generator=generator).chunk(size)[rank]
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        found.append(float(mean) / size)
    return found


class Whole:
    """The most bytes of parameters that this process held whole at once, and those of the largest group of them."""

    def __init__(self, model: Any) -> None:
        self.most = self.largest = 0
        self._groups = [
            [
                parameter
                for group in module._get_fsdp_state()._fsdp_param_groups
                for parameter in group.fsdp_params
            ]
            for module in model.modules()
            if isinstance(module, FSDPModule)
        ]
        for module in model.modules():
            if not list(module.children()):
                module.register_forward_hook(self._after)

    def _after(self, module: Any, arguments: Any, output: Any) -> None:
        self._count()
        if torch.is_tensor(output) and output.requires_grad:
            output.register_hook(lambda gradient: self._count())

    def _count(self) -> None:
        found = [
            sum(out.untyped_storage().nbytes() for parameter in group for out in parameter.all_gather_outputs)
            for group in self._groups
        ]
        self.most, self.largest = max(self.most, sum(found)), max(self.largest, *found)


def shares(mesh: Any, rank: int, size: int) -> dict[str, Any]:
    """Bytes of a model with 8 layers, after a step: all of it, and what this process held."""
    model = model_of(8)
    total = sum(parameter.nbytes for parameter in model.parameters())
    shard(model, mesh)
    whole = Whole(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses(model, optimizer, rank, size, 2)
    return {"total": total, "whole": whole.most, "largest": whole.largest, **local_bytes(model, optimizer)}


def main(only_shares: bool) -> None:
    torch.set_num_threads(1)
    with join_workers() as workers:
        if only_shares:
            mesh = init_device_mesh("cpu", (workers.size,))
            found = workers.gather(shares(mesh, workers.number, workers.size))
            if workers.is_leader:
                print(json.dumps({"shares": found}))
            return
        rank, size = workers.number, workers.size
        mesh = init_device_mesh("cpu", (size,))
        result: dict[str, Any] = {}
        for comm in ("fp32", "bf16", "int8"):
            model = model_of()
            traffic = shard(model, mesh, comm)
            optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
            result[comm] = losses(model, optimizer, rank, size, 6)
            result[f"{comm} bytes"] = workers.gather(local_bytes(model, optimizer))
            result[f"{comm} traffic"] = vars(traffic)
        for name, comm, feedback in (
            ("exact", "fp32", False), ("feedback", "int8", True), ("no feedback", "int8", False),
        ):  # fmt: skip
            result[name] = distance_after_training(mesh, comm, feedback)
        result["shares"] = workers.gather(shares(mesh, rank, size))
        result["frozen bytes"] = frozen_bytes_arrive(mesh)
        model = model_of()
        fully_shard(model.model.layers[0], mesh=mesh)
        try:
            check_sharded(model)
            result["refused"] = ""
        except RuntimeError as error:
            result["refused"] = str(error)
        if workers.is_leader:
            print(json.dumps(result))


class Quadratic(torch.nn.Module):
    """Pulls all weights but one column to 1; that column has gradients that are 100 times larger and change sign."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(16, 64))

    def forward(self, sign: int) -> Any:
        return 0.5 * ((self.weight[:, 1:] - 1) ** 2).sum() + 100 * sign * self.weight[:, 0].sum()


def distance_after_training(mesh: Any, comm: str, feedback: bool) -> float:
    """The quadratic part of the loss after 200 steps of SGD, gradients in 4 bits; it begins with 504."""
    model = Quadratic()
    shard(model, mesh, comm, code=BlockCode(bits=4, block=1024), feedback=feedback)
    if comm == "int8":
        model.set_custom_all_gather(CompressedAllGather(Traffic()))  # only gradients are coarse
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    for step in range(200):
        model(1 if step % 2 else -1).backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(0.5 * ((model.weight.full_tensor()[:, 1:] - 1) ** 2).sum())


def frozen_bytes_arrive(mesh: Any) -> bool:
    """Whether a frozen parameter of bytes is gathered without a change, while floats beside it are trained."""
    blob = (torch.arange(1001) % 251).to(torch.uint8)

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(16, 16)
            self.blob = torch.nn.Parameter(blob.clone(), requires_grad=False)
            self.equal = False

        def forward(self, x: torch.Tensor) -> Any:
            self.equal = torch.equal(self.blob, blob)
            return self.linear(x)

    layer = Layer()
    shard(layer, mesh, "int8")
    layer(torch.ones(2, 16)).sum().backward()
    local = layer.blob.to_local().numel()
    return layer.equal and local < len(blob) and layer.linear.weight.grad is not None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] == ["shares"]))
