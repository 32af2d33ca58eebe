"""Routed experts whose fused weights stay compressed.

transformers 5 stores a layer's experts as two 3-D parameters: `gate_up_proj` (E, 2 I, H), with the gate's rows first,
and `down_proj` (E, H, I). The model calls `experts(hidden_states (T, H), top_k_index (T, k), top_k_weights (T, k))`
and gets (T, H). The class's `_apply_gate` computes the step between the two products (activation function, clamps);
the compressed module calls the same function.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ciuic_cli.checkpoint.compressible import experts_fault
from ciuic_cli.errors import InputError
from ciuic_cli.runtime import ops
from ciuic_cli.runtime.modules import BlobModule


class CompressedExperts(BlobModule):
    """One layer's experts as two expert stacks. Only experts that a token is routed to are decoded.

    Args:
        dense: the module to replace. Its configuration, activation and `_apply_gate` are copied, its weights are not.
        gate_up_proj: blob of the ExpertStack (E, 2 I, H), (nbytes,) uint8.
        down_proj: blob of the ExpertStack (E, H, I), (nbytes,) uint8.

    Raises:
        InputError: expert stacks cannot express the layout of the module's experts.
    """

    def __init__(self, dense: nn.Module, gate_up_proj: nn.Parameter, down_proj: nn.Parameter) -> None:
        reason = experts_fault(dense)
        if reason is not None:
            raise InputError(f"{type(dense).__name__} cannot hold compressed experts: {reason}")
        super().__init__()
        module_state = set(self.__dict__)
        self.__dict__.update({k: value for k, value in dense.__dict__.items() if k not in module_state})
        for name, child in dense.named_children():
            self.add_module(name, child)
        shape = dense.get_parameter("gate_up_proj").shape
        self.num_experts, self.intermediate_dim, self.hidden_dim = shape[0], shape[1] // 2, shape[2]
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj
        # A plain function, not a bound method: copies of this module must pass themselves.
        self.gate_function: Callable[..., torch.Tensor] = getattr(type(dense), "_apply_gate")  # noqa: B009

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states (T, H), top_k_index (T, k), top_k_weights (T, k) -> (T, H), hidden_states' dtype.

        An index of num_experts or more (padding in expert parallelism) contributes nothing.
        """
        tokens, k = top_k_index.shape
        gate_up = ops.routed_linear(hidden_states, self.gate_up_proj, top_k_index, 2 * self.intermediate_dim)
        hidden = self.gate_function(self, gate_up.reshape(tokens * k, -1))
        out = ops.routed_linear(hidden, self.down_proj, top_k_index.reshape(-1, 1), self.hidden_dim)
        weighted = out.reshape(tokens, k, self.hidden_dim) * top_k_weights.unsqueeze(-1)
        return weighted.sum(dim=1).to(hidden_states.dtype)

    def extra_repr(self) -> str:
        nbytes = self.gate_up_proj.numel() + self.down_proj.numel()
        return (
            f"num_experts={self.num_experts}, hidden_dim={self.hidden_dim}, "
            f"intermediate_dim={self.intermediate_dim}, bytes={nbytes}"
        )
