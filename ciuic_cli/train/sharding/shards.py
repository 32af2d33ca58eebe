"""Shards a model of transformers by layer, and checks that it is sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers.modeling_layers import GradientCheckpointingLayer

from ciuic_cli.codecs.blockcode.code import BlockCode
from ciuic_cli.train.sharding.wire import WIRE_CODE, CompressedAllGather, CompressedReduceScatter, Traffic

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
    """Divide every layer's parameters, and the rest as one more group, among the processes of a one-dimensional mesh.

    Args:
        comm: one of COMM.
        code, feedback: of "int8".

    Returns:
        Counters of the bytes on the wire; they count only with "int8".

    Raises:
        RuntimeError: a parameter is not sharded.
    """
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if comm == "bf16"
        else MixedPrecisionPolicy()
    )
    for module in list(model.modules()):
        if isinstance(module, GradientCheckpointingLayer):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    traffic = Traffic()
    if comm == "int8":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(CompressedAllGather(traffic, code))
                module.set_custom_reduce_scatter(CompressedReduceScatter(traffic, code, feedback))
    check_sharded(model)
    return traffic


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


def local_part(tensor: Any) -> torch.Tensor:
    """This process's part of a tensor; a tensor that is not divided, itself."""
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local
