"""Expert stacks that stay in main memory in their own dtype: each expert is moved and converted while it is multiplied.

A layer of DeepSeek-V3 has 11.3 billion expert weights, 23 GB in bfloat16: more than most devices can hold beside
everything else. Forward and backward each bring one expert at a time to the device; autograd keeps no copy of it.
`expert_transfer.py` brings experts to a GPU while it computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from ciuic_cli.layerwise.expert_transfer import ExpertTransfer, transfer_to
from ciuic_cli.layerwise.linear_hooks import MATMULS
from ciuic_cli.process.memory import limit_freed_memory


class ExpertsOnUse(TorchFunctionMode):
    """While active, products with an expert of one of the module's stacks work on any device and in any dtype.

    Products are `F.linear`, `@` and its named forms, and `torch.bmm` with all experts of a stack.

    Args:
        device: where the products are computed. transfer: the way of the experts to it; default: that of the device.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device | None = None,
        transfer: ExpertTransfer | None = None,
    ) -> None:
        super().__init__()
        stacks = [parameter.detach() for parameter in module.parameters() if parameter.dim() == 3]
        self._experts = {expert.data_ptr() for stack in stacks for expert in stack}
        self._transfer = transfer or transfer_to(stacks, device or torch.device("cpu"))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._transfer is not None:
            self._transfer.close()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.baddbmm and not kwargs and args[2].data_ptr() in self._experts:
            return args[0] + self.__torch_function__(torch.bmm, types, args[1:])
        if kwargs or len(args) != 2 or not isinstance(args[1], torch.Tensor):
            pass
        elif (func is linear or func in MATMULS) and args[1].data_ptr() in self._experts:
            weight = args[1] if func is linear else args[1].mT
            return _ExpertProduct.apply(args[0], weight, self._transfer)
        elif func is torch.bmm and args[1].data_ptr() in self._experts:
            products = [
                _ExpertProduct.apply(x, expert.mT, self._transfer) for x, expert in zip(*args, strict=True)
            ]
            return torch.stack(products)
        return func(*args, **(kwargs or {}))


class _ExpertProduct(torch.autograd.Function):
    """x Wᵀ for x (t, n) and W (m, n), which may be on any device; W gets no gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, transfer: ExpertTransfer | None
    ) -> torch.Tensor:
        limit_freed_memory()
        ctx.weight, ctx.dtype, ctx.transfer = weight, x.dtype, transfer
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        return linear(x, _fetched(weight, transfer).to(device=x.device, dtype=dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        gradient = gradients[0]
        weight = _fetched(ctx.weight, ctx.transfer)
        product = gradient @ weight.to(device=gradient.device, dtype=gradient.dtype)
        return product.to(ctx.dtype), None, None


def _fetched(weight: torch.Tensor, transfer: ExpertTransfer | None) -> torch.Tensor:
    """The weight, on the device if there is a transfer."""
    return weight if transfer is None else transfer.get(weight)
