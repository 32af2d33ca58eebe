"""The experts of one process under expert parallelism. Needs no vLLM."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ciuic_cli.codecs.stack import ExpertStack
from ciuic_cli.runtime import ops


def local_stack(stack: ExpertStack, blob: torch.Tensor, expert_map: torch.Tensor | None) -> torch.Tensor:
    """The blob of a process's own experts.

    Args:
        stack: the layer's experts, as they lie in `blob`.
        expert_map: int (E,), an expert's number in this process, or -1; None if the process has all of them.
    """
    if expert_map is None:
        return blob.clone()
    numbers = expert_map.tolist()
    mine = sorted((number, expert) for expert, number in enumerate(numbers) if number >= 0)
    kept = ExpertStack(tuple(stack.experts[expert] for _, expert in mine))
    return torch.frombuffer(bytearray(kept.to_bytes()), dtype=torch.uint8)


def routed_sum(
    x: torch.Tensor,
    stacks: tuple[torch.Tensor, torch.Tensor],
    sizes: tuple[int, int],
    ids: torch.Tensor,
    weights: torch.Tensor,
    activation: Callable[[torch.Tensor], torch.Tensor],
    expert_map: torch.Tensor | None,
) -> torch.Tensor:
    """The weighted sum of the outputs of a process's own experts, (T, H) in the dtype of x.

    Args:
        x: (T, H).
        stacks: blobs of the stacks (E, 2 I, H), the gate's rows first, and (E, H, I), of the process's experts.
        sizes: (2 I, H).
        ids, weights: (T, k), the numbers of the chosen experts in the whole layer, and their weights.
        activation: of the gate.
        expert_map: as in `local_stack`.
    """
    tokens, k = ids.shape
    ids = ids.long()
    if expert_map is not None:
        local = expert_map.to(ids.device)[ids].long()
        ids = torch.where(local < 0, len(expert_map), local)  # an id beyond the stack adds nothing
    gate_up = ops.routed_linear(x, stacks[0], ids, sizes[0])
    gate, up = gate_up.reshape(tokens * k, -1).chunk(2, dim=-1)
    out = ops.routed_linear(activation(gate) * up, stacks[1], ids.reshape(-1, 1), sizes[1])
    return (out.reshape(tokens, k, -1) * weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)
