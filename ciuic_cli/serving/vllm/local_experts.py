"""The experts of one process under expert parallelism. Needs no vLLM."""

from __future__ import annotations

import torch

from ciuic_cli.codecs.stack import ExpertStack


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
