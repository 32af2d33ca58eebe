"""FSDP2's two collectives with numbers in 8 bits on the wire.

Parameters are gathered, and gradients summed, as codes of the block code with their scales. Each process adds the
rounding error of a gradient that it sent to the next gradient (error feedback: Seide et al. 2014, Karimireddy et al.
2019), so that no part of a gradient is lost. The errors themselves are kept in 8 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from ciuic_cli.codecs.blockcode.code import BlockCode, Encoded, decode, encode

WIRE_CODE = BlockCode(bits=8, block=128)
"""The code on the wire: 0.254 of float32's bytes."""

RESIDUAL_CODE = BlockCode(bits=8, block=128)
"""The code in which rounding errors wait for the next step: 1.02 bytes per parameter."""


@dataclass
class Traffic:
    """Bytes that this process handed to the collectives, and those that the numbers have in their own dtype."""

    gathered: int = 0
    gathered_uncompressed: int = 0
    reduced: int = 0
    reduced_uncompressed: int = 0

    def sent(self, processes: int) -> int:
        """Bytes that this process sent: its share to every other process, and of each sum the others' parts."""
        return (processes - 1) * (self.gathered + self.reduced // processes)

    def forget(self) -> None:
        """Count from now on."""
        self.gathered = self.gathered_uncompressed = self.reduced = self.reduced_uncompressed = 0


class _Allocating:
    """Buffers of FSDP2's collectives."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A new tensor."""
        return torch.empty(*size, dtype=dtype, device=device)


class CountedAllGather(_Allocating, AllGather):
    """Gathers shards as they are, and counts their bytes. FSDP2 gathers shards of several dtypes as bytes."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill `output_tensor` with the shards of all processes, in order of rank."""
        self._traffic.gathered += input_tensor.nbytes
        self._traffic.gathered_uncompressed += input_tensor.nbytes
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class CompressedAllGather(CountedAllGather):
    """Gathers shards as codes; every process, the shard's owner included, computes with the decoded numbers.

    Bytes are gathered as they are.
    """

    def __init__(self, traffic: Traffic, code: BlockCode = WIRE_CODE) -> None:
        super().__init__(traffic)
        self._code = code

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill `output_tensor` with the shards of all processes, in order of rank."""
        if not input_tensor.is_floating_point():
            return super().__call__(output_tensor, input_tensor, group, async_op)
        self._traffic.gathered_uncompressed += input_tensor.nbytes
        count = input_tensor.numel()
        sent = _packed(encode(input_tensor, self._code))
        self._traffic.gathered += sent.nbytes
        received = sent.new_empty(sent.numel() * group.size())
        dist.all_gather_into_tensor(received, sent, group=group)
        for part, out in zip(received.chunk(group.size()), output_tensor.chunk(group.size()), strict=True):
            decode(_unpacked(part, self._code, count), out=out)
        return None


class CountedReduceScatter(_Allocating, ReduceScatter):
    """Sums gradients as they are, and counts the bytes that this process gives."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill `output_tensor` with this process's part of the sum, or of the mean."""
        self._traffic.reduced += input_tensor.nbytes
        self._traffic.reduced_uncompressed += input_tensor.nbytes
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


class CompressedReduceScatter(CountedReduceScatter):
    """Sends each process its part of the gradient as codes, and sums what arrives in float32. One object per layer.

    Args:
        feedback: add rounding errors to the next step's gradient.
    """

    def __init__(self, traffic: Traffic, code: BlockCode = WIRE_CODE, feedback: bool = True) -> None:
        super().__init__(traffic)
        self._code, self._feedback = code, feedback
        self.residuals: list[Encoded] | None = None

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill `output_tensor` with this process's part of the sum, or of the mean."""
        size = group.size()
        parts = [part.float() for part in input_tensor.chunk(size)]
        if self.residuals is not None:
            parts = [part + decode(old) for part, old in zip(parts, self.residuals, strict=True)]
        encoded = [encode(part, self._code) for part in parts]
        if self._feedback:
            self.residuals = [
                encode(part - decode(code), RESIDUAL_CODE) for part, code in zip(parts, encoded, strict=True)
            ]
        sent = torch.cat([_packed(code) for code in encoded])
        self._traffic.reduced += sent.nbytes
        self._traffic.reduced_uncompressed += input_tensor.nbytes
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        count = output_tensor.numel()
        total = torch.zeros(count, device=output_tensor.device)
        for part in received.chunk(size):
            total += decode(_unpacked(part, self._code, count))
        output_tensor.copy_(total / size if op == dist.ReduceOp.AVG else total)
        return None


def _packed(encoded: Encoded) -> torch.Tensor:
    """uint8: codes, then scales."""
    return torch.cat((encoded.codes, encoded.scales.view(torch.uint8)))


def _unpacked(packed: torch.Tensor, code: BlockCode, count: int) -> Encoded:
    scales = 2 * code.blocks(count)
    codes, tail = packed.split((packed.numel() - scales, scales))
    return Encoded(code, codes.clone(), tail.clone().view(torch.bfloat16), count)
