"""PEFT's LoRA layers for compressed linears and for fused expert stacks.

The adapter has the names and shapes that PEFT gives it on the dense model, so it can be loaded there by plain PEFT. The
base weights stay compressed: the low-rank paths run beside the products with the codes, and no delta of a weight's
size is ever made. `runtime.registration` imports this module when PEFT's LoRA is imported, and calls `register`.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora import model as lora_model
from peft.tuners.lora.layer import Linear, ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from ciuic_cli.errors import UsageError
from ciuic_cli.runtime import ops
from ciuic_cli.runtime.experts import CompressedExperts
from ciuic_cli.runtime.modules import CompressedEmbedding, CompressedGroupedLinear, CompressedLinear
from ciuic_cli.runtime.products import multiply_dtype

INITIALISATIONS = (True, False, "gaussian", "orthogonal")
"""Values of `init_lora_weights` that do not read or change the base weight."""


class LoraCompressedLinear(Linear):
    """x W^T + scaling · dropout(x) A^T B^T, where W stays compressed. x (..., in_features)."""

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        linear: Any = self.get_base_layer()
        return linear.in_features, linear.out_features

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As PEFT's layer; without biases and variants, each path is added in place, in `path_dtype`."""
        active = [adapter for adapter in self.active_adapters if adapter in self.lora_A]
        if kwargs or self.disable_adapters or not all(map(self._is_plain, active)):
            return super().forward(x, *args, **kwargs)
        y = self.base_layer(x)
        if active and y._is_view():  # as products from panels are; autograd refuses to change it in place
            y = y.clone()
        for adapter in active:
            a, b = self.lora_A[adapter].weight, self.lora_B[adapter].weight
            y = AddLowRank.apply(y, self.lora_dropout[adapter](x), a, b, self.scaling[adapter])
        return y

    def _is_plain(self, adapter: str) -> bool:
        """Whether the adapter adds scaling · dropout(x) A^T B^T, and nothing else."""
        return self.lora_B[adapter].bias is None and adapter not in self.lora_variant

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        raise _no_merging()

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        """False: the conversion computes with the base weight."""
        return False


def path_dtype(x: torch.Tensor, factor: torch.Tensor) -> torch.dtype:
    """The dtype in which a low-rank path multiplies x by its factors.

    bfloat16 for bfloat16 activations where such products are fast: their sums are float32, and one rounding of A and B
    is smaller than that of the activations. Otherwise the dtype of the factors, as in PEFT; also for float16, in which
    gradients of factors, sums over all tokens, could overflow.
    """
    return x.dtype if x.dtype == torch.bfloat16 == multiply_dtype(x) else factor.dtype


class AddLowRank(torch.autograd.Function):
    """y += scaling · x A^T B^T, in place. y (..., out), x (..., in), A (r, in), B (out, r) -> y.

    Products are computed in `path_dtype`; gradients of A and B have the factors' dtype. Kept for the backward pass: x
    as it is given, which the layers that share x keep once, and x A^T. autograd would keep the copy of x in A's dtype
    (float32): twice the bytes of x, once for each layer.
    """

    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        dtype = path_dtype(x, a)
        inner = x.reshape(-1, x.shape[-1]).to(dtype) @ a.to(dtype).T
        rows = y.view(-1, y.shape[-1])
        if y.dtype == dtype:
            rows.addmm_(inner, b.to(dtype).T, alpha=scaling)
        else:
            rows.add_(inner @ b.to(dtype).T, alpha=scaling)
        ctx.mark_dirty(y)
        ctx.save_for_backward(x, a, b, inner)
        ctx.scaling = scaling
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, a, b, inner = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1]).to(inner.dtype)
        of_inner = (rows @ b.to(inner.dtype)).mul_(ctx.scaling)
        of_x = of_a = of_b = None
        if ctx.needs_input_grad[1]:
            of_x = (of_inner @ a.to(inner.dtype)).to(x.dtype).reshape(x.shape)
        if ctx.needs_input_grad[2]:
            of_a = (of_inner.T @ x.reshape(-1, x.shape[-1]).to(inner.dtype)).to(a.dtype)
        if ctx.needs_input_grad[3]:
            of_b = (rows.T @ inner).to(b.dtype).mul_(ctx.scaling)
        return grad, of_x, of_a, of_b, None


class LoraCompressedExperts(ParamWrapper):
    """A low-rank path for each expert of one stack (`gate_up_proj` or `down_proj`).

    As in PEFT, A is (rank · experts, in), expert by expert, and B is (out, rank · experts), rank by rank. A module that
    adapts both stacks is nested: the outer one computes, and reads the factors of the inner one.
    """

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        """(rows, columns) of one expert; PEFT exchanges them, because the dense stack is (experts, out, in)."""
        experts: Any = self.get_base_layer()
        self.num_experts, self._param_ndim = experts.num_experts, 3
        if self.parameter_name == "gate_up_proj":
            return 2 * experts.intermediate_dim, experts.hidden_dim
        return experts.hidden_dim, experts.intermediate_dim

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As `CompressedExperts.forward`: x (T, H), top_k_index (T, k), top_k_weights (T, k) -> (T, H)."""
        self._check_forward_args(x, *args, **kwargs)
        if kwargs.pop("adapter_names", None) is not None:
            raise UsageError(
                "compressed experts compute one adapter per batch", remedy="call without adapter_names"
            )
        layers = self._layers()
        experts = self.get_base_layer()
        if not layers:
            return experts(x, *args, **kwargs)
        return _adapted(experts, layers, x, *args, **kwargs)

    def _layers(self) -> dict[str, LoraCompressedExperts]:
        """The nested modules by stack, if their adapters are enabled."""
        found: dict[str, LoraCompressedExperts] = {}
        layer: Any = self
        while isinstance(layer, LoraCompressedExperts):
            if not layer.disable_adapters:
                found[layer.parameter_name] = layer
            layer = layer.base_layer
        return found

    def added(self, x: torch.Tensor, pairs: list[torch.Tensor]) -> torch.Tensor | None:
        """The sum of the active adapters' paths.

        Args:
            x: (n, in), one row per pair of token and expert.
            pairs: per expert, the int64 numbers of its rows of x; every row belongs to at most one expert.

        Returns:
            (n, out) in `path_dtype`, zeros in rows of no expert; None without an active adapter.
        """
        total = None
        for adapter in self.active_adapters:
            if adapter in self.lora_A:
                path = self._path(adapter, x, pairs)
                total = path if total is None else total + path
        return total

    def _path(self: Any, adapter: str, x: torch.Tensor, pairs: list[torch.Tensor]) -> torch.Tensor:
        a, b = self.lora_A[adapter].weight, self.lora_B[adapter].weight
        a = a.reshape(self.num_experts, -1, self.in_features)
        b = b.reshape(self.out_features, -1, self.num_experts).permute(2, 0, 1)
        dtype = path_dtype(x, a)
        x, a, b = x.to(dtype), a.to(dtype), b.to(dtype)
        parts = [(x[rows] @ a[e].T) @ b[e].T for e, rows in enumerate(pairs) if len(rows)]
        out = torch.zeros((x.shape[0], self.out_features), dtype=dtype, device=x.device)
        if parts:
            out = out.index_copy(0, torch.cat([rows for rows in pairs if len(rows)]), torch.cat(parts))
        return out * self.scaling[adapter]

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        raise _no_merging()


# PEFT recognises nested modules by the name of their class.
LoraCompressedExperts.__name__ = ParamWrapper.__name__


def _adapted(
    experts: Any,
    layers: dict[str, LoraCompressedExperts],
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """`CompressedExperts.forward` with the low-rank paths of `layers` added after each product."""
    tokens, k = top_k_index.shape
    flat = top_k_index.reshape(-1)
    pairs = [(flat == expert).nonzero()[:, 0] for expert in range(experts.num_experts)]
    gate_up = ops.routed_linear(
        hidden_states, experts.gate_up_proj, top_k_index, 2 * experts.intermediate_dim
    ).reshape(tokens * k, -1)
    gate_up = _with_path(layers.get("gate_up_proj"), gate_up, hidden_states.repeat_interleave(k, 0), pairs)
    hidden = experts.gate_function(experts, gate_up)
    out = ops.routed_linear(hidden, experts.down_proj, top_k_index.reshape(-1, 1), experts.hidden_dim)
    out = _with_path(layers.get("down_proj"), out.reshape(tokens * k, -1), hidden, pairs)
    weighted = out.reshape(tokens, k, experts.hidden_dim) * top_k_weights.unsqueeze(-1)
    return weighted.sum(dim=1).to(hidden_states.dtype)


def _with_path(
    layer: LoraCompressedExperts | None, y: torch.Tensor, x: torch.Tensor, pairs: list[torch.Tensor]
) -> torch.Tensor:
    added = None if layer is None else layer.added(x, pairs)
    return y if added is None else y + added.to(y.dtype)


def dispatch(
    target: nn.Module, adapter_name: str, config: Any, parameter_name: str | None = None, **kwargs: Any
) -> nn.Module | None:
    """The LoRA layer around `target`, or None if it is not compressed: a dispatcher of PEFT's `LoraModel`.

    Raises:
        UsageError: the option or the module cannot be adapted on codes; the error names it.
    """
    base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
    if isinstance(base, CompressedExperts):
        if parameter_name is None:
            raise UsageError(
                "experts are adapted by stack, not as modules",
                tensor=kwargs.get("target_name"),
                remedy='LoraConfig(target_parameters=["experts.gate_up_proj", "experts.down_proj"])',
            )
        _check(config, kwargs)
        return LoraCompressedExperts(
            target, adapter_name, parameter_name=parameter_name, config=config, **kwargs
        )
    if isinstance(base, CompressedGroupedLinear | CompressedEmbedding) or (
        isinstance(base, CompressedLinear) and parameter_name is not None
    ):
        kind = type(base).__name__
        raise UsageError(
            f"{kind} cannot be adapted this way: LoRA is for linear layers (target_modules) and expert stacks "
            "(target_parameters)",
            tensor=kwargs.get("target_name"),
            remedy="leave it out of the targets",
        )
    if isinstance(base, CompressedLinear):
        _check(config, kwargs)
        return LoraCompressedLinear(target, adapter_name, config=config, **kwargs)
    return None


REFUSED = {
    "use_dora": "DoRA needs the norm of every row of the adapted weight",
    "fan_in_fan_out": "compressed weights are (out, in)",
    "use_bdlora": "block-diagonal LoRA is for tensor-parallel dense layers",
    "arrow_config": "Arrow routes between merged adapters",
    "alora_invocation_tokens": "activated LoRA is not implemented on codes",
    "use_qalora": "QALoRA adds up inputs for weights with zero points",
    "kasa_config": "KaSA changes the base weight",
    "velora_config": "VeLoRA is not implemented on codes",
    "monteclora_config": "MonteCLoRA is not implemented on codes",
}
"""Options of LoraConfig that are refused when set, and why."""


def _check(config: Any, kwargs: dict[str, Any]) -> None:
    where = kwargs.get("target_name")
    for name, reason in REFUSED.items():
        if getattr(config, name, None):
            raise UsageError(
                f"LoraConfig.{name} does not work on a compressed weight: {reason}",
                tensor=where,
                remedy=f"leave {name} at its default",
            )
    initialisation = config.init_lora_weights
    if not any(initialisation is known or initialisation == known for known in INITIALISATIONS):
        raise UsageError(
            f"init_lora_weights={initialisation!r} reads or changes the base weight, which stays compressed",
            tensor=where,
            remedy=f"use one of {', '.join(map(repr, INITIALISATIONS))}",
        )


def _no_merging() -> UsageError:
    return UsageError(
        "an adapter cannot be merged into compressed weights",
        remedy="use `ciuic merge`, which makes a new artifact or a dense model",
    )


def register() -> None:
    """Put `dispatch` before PEFT's own choice of LoRA layers. Idempotent."""
    original = lora_model.dispatch_default
    if getattr(original, "knows_compressed", False):
        return

    def dispatch_compressed_first(target: nn.Module, adapter_name: str, config: Any, **kwargs: Any) -> Any:
        found = dispatch(target, adapter_name, config, **kwargs)
        return original(target, adapter_name, config=config, **kwargs) if found is None else found

    dispatch_compressed_first.knows_compressed = True  # type: ignore[attr-defined]
    vars(lora_model)["dispatch_default"] = dispatch_compressed_first


register()
