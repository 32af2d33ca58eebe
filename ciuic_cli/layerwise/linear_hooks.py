"""Products with a layer's weights, noticed while the layer runs, for what needs the gradients of their outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ciuic_cli.checkpoint.model_map import Parameter

Key = tuple[str, int | None]
"""A parameter by its in-memory name, and which expert of it where it is a stack."""
Hook = Callable[[torch.Tensor], None]
"""Called with the gradient of a product's outputs, of their shape."""


@dataclass(frozen=True)
class WatchedLinear:
    """One parameter to watch: its in-memory name and the tensor that the layer computes with."""

    name: str
    tensor: torch.Tensor


def linears_of(layer: nn.Module, prefix: str, parameters: Mapping[str, Parameter]) -> list[WatchedLinear]:
    """The matrices of a layer that are compressed; prefix: of its parameters' names."""
    return [
        WatchedLinear(prefix + name, tensor)
        for name, tensor in layer.named_parameters()
        if (parameter := parameters.get(prefix + name)) is not None and parameter.compress
    ]


@dataclass(frozen=True)
class Product:
    """Inputs x (.., n) times some rows of a weight.

    shape: (m, n) of the whole weight; rows: which of its rows `weight` (rows, n) are; outputs: (.., rows), the bias
    included where it `has_bias`. The layer goes on with the same tensors: they are not to be changed.
    """

    key: Key
    shape: torch.Size
    rows: slice
    weight: torch.Tensor
    x: torch.Tensor
    outputs: torch.Tensor
    has_bias: bool = False


class LinearHook(TorchFunctionMode, ABC):
    """While active, every `F.linear` or grouped product on a watched weight whose output requires a gradient is
    watched: what `watch` returns is called with that gradient.

    Expert stacks (E, m, n) are recognised by the slice of the stack that is multiplied with.
    """

    def __init__(self, watched: Sequence[WatchedLinear]) -> None:
        super().__init__()
        self._address: dict[int, Key] = {}
        for item in watched:
            experts = enumerate(item.tensor) if item.tensor.dim() == 3 else [(None, item.tensor)]
            self._address |= {part.data_ptr(): (item.name, expert) for expert, part in experts}

    @abstractmethod
    def watch(self, product: Product) -> Hook:
        """What to do with the gradient of the product's outputs; nothing of the product needs a gradient."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is torch.bmm and output.requires_grad:
            self._watch_groups(args[0].detach(), args[1], output)
        elif func is torch.nn.functional.linear and output.requires_grad:
            given = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **(kwargs or {})}
            weight, has_bias = given["weight"], given.get("bias") is not None
            key = self._address.get(weight.data_ptr())
            if key is not None and weight.dim() == 2:
                every = slice(0, weight.shape[0])
                x, outputs = given["input"].detach(), output.detach()
                product = Product(key, weight.shape, every, weight, x, outputs, has_bias)
                output.register_hook(self.watch(product))
        return output

    def _watch_groups(self, x: torch.Tensor, weight: torch.Tensor, output: torch.Tensor) -> None:
        """A grouped linear (DeepSeek-V4's o_a_proj): x (G, t, n) times a view (G, n, m / G) of the weight (m, n).

        Each group is a product with some of the rows.
        """
        key = self._address.get(weight.data_ptr())
        if key is None:
            return
        groups, cols, share = weight.shape
        shape, outputs = torch.Size((groups * share, cols)), output.detach()
        hooks = []
        for group in range(groups):
            rows = slice(group * share, (group + 1) * share)
            hooks.append(self.watch(Product(key, shape, rows, weight[group].T, x[group], outputs[group])))

        def each(gradient: torch.Tensor) -> None:
            for hook, part in zip(hooks, gradient, strict=True):
                hook(part)

        output.register_hook(each)
