"""Routed experts in vLLM: compressed stacks, expert parallelism, and routers that avoid pruned experts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from ciuic_cli.codecs.stack import ExpertStack
from ciuic_cli.errors import UsageError
from ciuic_cli.runtime.routing import MASKED_SCORE, mask_for, pruned_experts
from ciuic_cli.serving.vllm.local_experts import local_stack, routed_sum
from ciuic_cli.serving.vllm.weights import PendingWeight

_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda gate: nn.functional.gelu(gate, approximate="tanh"),
}
"""vLLM's names of the functions of the gate that `apply` computes."""


class CompressedExpertsMethod(FusedMoEMethodBase):
    """One layer's routed experts as two stacks, `w13` (E, 2 I, H) and `w2` (E, H, I): blobs, uint8 (nbytes,).

    With expert parallelism, a process keeps the matrices of its own experts.

    Args:
        moe: vLLM's configuration of the layer.
        stacks: parameter -> name of the stack in the artifact.
    """

    def __init__(self, moe: FusedMoEConfig, stacks: Mapping[str, str]) -> None:
        super().__init__(moe)
        self.stacks = dict(stacks)
        self.tensors = tuple(stacks.values())
        self.pruned: torch.Tensor | None = None
        """Mask of the layer's pruned experts, bool (E,); None before loading."""
        self._layers = get_current_vllm_config().compilation_config.static_forward_context

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        """Raises UsageError for experts that need more than a gate's activation between the two products."""
        fault = None
        if layer.activation.value not in _ACTIVATIONS:
            fault = f"the activation {layer.activation.value}"
        elif layer.swiglu_limit is not None or self.moe.has_bias or layer.apply_router_weight_on_input:
            fault = "clamped activations, biases, or router weights on the input of the experts"
        if fault is not None:
            raise UsageError(
                f"vLLM cannot run these compressed experts: {fault}",
                remedy="use transformers: `ciuic serve`, `ciuic generate`",
            )
        layer.register_parameter("w13", PendingWeight(lambda blob: self._local(layer, blob, "w13")))
        layer.register_parameter("w2", PendingWeight(lambda blob: self._local(layer, blob, "w2")))
        layer.expert_sizes = (2 * intermediate_size_per_partition, hidden_size)
        # vLLM's own loader of experts expects one tensor per expert, and drops others without a word.
        layer.load_weights = lambda weights: _load_stacks(layer, weights)

    def _local(self, layer: Any, blob: torch.Tensor, parameter: str) -> torch.Tensor:
        """The experts of this process out of a whole stack's blob, as a blob."""
        stack = ExpertStack.from_buffer(blob, where=self.stacks[parameter])
        if parameter == "w2":
            self.pruned = pruned_experts(stack.experts)
        return local_stack(stack, blob, layer._expert_map)

    def process_weights_after_loading(self, layer: Any) -> None:
        for parameter, name in self.stacks.items():
            pending = getattr(layer, parameter)
            if isinstance(pending, PendingWeight):
                (blob,) = pending.collected((name,))
                layer.register_parameter(parameter, nn.Parameter(blob, requires_grad=False))
        if self.pruned is not None and self.pruned.any():
            self._mask_router(layer, self.pruned)

    def _mask_router(self, layer: Any, pruned: torch.Tensor) -> None:
        """As `runtime.routing.mask_router`, for vLLM's routers."""
        grouped = layer.use_grouped_topk
        groups = int(layer.num_expert_group or 1) if grouped else 1
        chosen = int(layer.topk_group or 1) if grouped else 1
        mask = mask_for(pruned, top_k=layer.top_k, groups=groups, chosen_groups=chosen)
        bias = layer.e_score_correction_bias
        if bias is not None:
            bias.data[mask.to(bias.device)] = MASKED_SCORE
            return
        router: Any = self._layers[layer.layer_name].router
        if not hasattr(router, "masked_logits"):
            original: Any = type(router)
            router.__class__ = _masked_class(original)
        router.masked_logits = torch.where(mask, MASKED_SCORE, 0.0).to(layer.w2.device)

    def get_fused_moe_quant_config(self, layer: nn.Module) -> None:
        return None

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x (T, H), topk_weights and topk_ids (T, k) -> (T, H): the sum over the experts of this process.

        vLLM's runner computes the shared experts itself.
        """
        stacks, activation = (layer.w13, layer.w2), _ACTIVATIONS[layer.activation.value]
        return routed_sum(
            x, stacks, layer.expert_sizes, topk_ids, topk_weights, activation, layer._expert_map
        )


def _load_stacks(layer: Any, weights: Any) -> Any:
    """Load the stacks among `weights`; yields the names of the parameters, as vLLM's loaders do."""
    for name, tensor in weights:
        parameter = name.removeprefix("routed_experts.")
        getattr(layer, parameter).weight_loader(getattr(layer, parameter), tensor)
        yield parameter


@functools.cache
def _masked_class(original: Any) -> Any:
    """A class of routers without a correction bias, which adds `masked_logits` (E,) to the logits.

    It derives from the original alone, because Python changes an object's class only to one of the same layout.
    """

    def select_experts(
        self: Any, hidden_states: torch.Tensor, router_logits: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        masked = router_logits + self.masked_logits.to(router_logits.dtype)
        return original.select_experts(self, hidden_states, masked, *args, **kwargs)

    return type(original.__name__, (original,), {"select_experts": select_experts})
