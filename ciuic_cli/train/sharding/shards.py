"""Shards a model of transformers by layer, and checks that it is sharded."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers.modeling_layers import GradientCheckpointingLayer

from ciuic_cli.codecs.blockcode.code import BlockCode
from ciuic_cli.train.sharding.wire import (
    WIRE_CODE,
    CompressedAllGather,
    CompressedReduceScatter,
    CountedAllGather,
    CountedReduceScatter,
    Traffic,
)

COMM = ("fp32", "bf16", "int8")
"""What crosses the wire: parameters and gradients in float32; parameters (and computation) in bfloat16; both in 8
bits. Gradients are summed in float32."""


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    comm: str = "fp32",
    *,
    code: BlockCode = WIRE_CODE,
    feedback: bool = True,
) -> Traffic:
    """Divide every layer's parameters among the processes of a one-dimensional mesh.

    A layer is whole only while it computes. So are the embedding and the head, unless they share a weight: then they
    are whole from the forward pass to the end of the backward pass, as is what is in no layer.

    Args:
        comm: one of COMM.
        code, feedback: of "int8".

    Returns:
        Counters of the bytes on the wire.

    Raises:
        RuntimeError: a parameter is not sharded.
    """
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if comm == "bf16"
        else MixedPrecisionPolicy()
    )
    for module in (*_layers(model), *_ends(model)):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    traffic = Traffic()
    for module in model.modules():
        if isinstance(module, FSDPModule) and comm == "int8":
            module.set_custom_all_gather(CompressedAllGather(traffic, code))
            module.set_custom_reduce_scatter(CompressedReduceScatter(traffic, code, feedback))
        elif isinstance(module, FSDPModule):
            module.set_custom_all_gather(CountedAllGather(traffic))
            module.set_custom_reduce_scatter(CountedReduceScatter(traffic))
    check_sharded(model)
    return traffic


def _layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _ends(model: Any) -> list[nn.Module]:
    """The embedding and the head, if no other module has their parameters."""
    if not hasattr(model, "get_input_embeddings"):
        return []
    found = [end for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None]
    owners = Counter(
        id(parameter) for module in model.modules() for parameter in set(module.parameters(recurse=False))
    )
    return [end for end in found if all(owners[id(parameter)] == 1 for parameter in end.parameters())]


def check_sharded(model: nn.Module) -> None:
    """Raises RuntimeError if a parameter is whole on this process. (Some launchers replicate without a word.)"""
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor) or parameter.placements != (Shard(0),):
            raise RuntimeError(f"{name} is not sharded: {type(parameter).__name__}")
        size = parameter.device_mesh.size()
        most = -(-parameter.shape[0] // size) * parameter.shape[1:].numel()
        if parameter.to_local().numel() > most:
            raise RuntimeError(f"{name} has {parameter.to_local().numel()} of {parameter.numel()} elements")


def local_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of parameters and states on this process, and of rounding errors of the wire."""
    residuals = 0
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                found = getattr(group._reduce_scatter_comm, "residuals", None)
                residuals += sum(encoded.nbytes for encoded in found or ())
    return {
        "parameters": sum(local_part(parameter).nbytes for parameter in model.parameters()),
        "states": sum(
            local_part(value).nbytes
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ),
        "residuals": residuals,
    }


def gradient_bytes(model: nn.Module) -> int:
    """Bytes of the gradients on this process."""
    return sum(local_part(one.grad).nbytes for one in model.parameters() if one.grad is not None)


def local_part(tensor: Any) -> torch.Tensor:
    """This process's part of a tensor; a tensor that is not divided, itself."""
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local
