"""Hooks on the products with a layer's weights, for code that needs a matrix's inputs and output gradients."""

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
"""A weight matrix: the in-memory name of its parameter, and the number of the expert in a stack."""
Hook = Callable[[torch.Tensor], None]
"""Called with the gradient of a product's outputs, which has their shape."""


@dataclass(frozen=True)
class WatchedLinear:
    """A parameter to watch: its in-memory name, and the tensor (m, n) or (E, m, n) that the layer computes with."""

    name: str
    tensor: torch.Tensor


def linears_of(layer: nn.Module, prefix: str, parameters: Mapping[str, Parameter]) -> list[WatchedLinear]:
    """All compressible matrices of a layer, whose parameters' names begin with `prefix`."""
    return [
        WatchedLinear(prefix + name, tensor)
        for name, tensor in layer.named_parameters()
        if (parameter := parameters.get(prefix + name)) is not None and parameter.compress
    ]


@dataclass(frozen=True)
class Product:
    """One product of inputs with a watched weight, or with some of its rows. No tensor requires a gradient.

    shape: (m, n) of the whole weight. rows: which of its rows were multiplied. weight: (rows, n). x: (.., n).
    outputs: (.., rows), with the bias if `has_bias`. The layer goes on with the same tensors, so they must not be
    changed.
    """

    key: Key
    shape: torch.Size
    rows: slice
    weight: torch.Tensor
    x: torch.Tensor
    outputs: torch.Tensor
    has_bias: bool = False


class LinearHook(TorchFunctionMode, ABC):
    """While active, `watch` is called for every product with a watched weight whose output requires a gradient.

    Products are `F.linear`, or the grouped `torch.bmm` of DeepSeek-V4. What `watch` returns is called with the gradient
    of the product's outputs. Experts of a stack (E, m, n) are recognised by the memory address of their slice.
    """

    def __init__(self, watched: Sequence[WatchedLinear]) -> None:
        super().__init__()
        self._key_by_address: dict[int, Key] = {}
        for item in watched:
            experts = enumerate(item.tensor) if item.tensor.dim() == 3 else [(None, item.tensor)]
            self._key_by_address |= {part.data_ptr(): (item.name, expert) for expert, part in experts}

    @abstractmethod
    def watch(self, product: Product) -> Hook:
        """Function that is called with the gradient of the product's outputs."""

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
            key = self._key_by_address.get(weight.data_ptr())
            if key is not None and weight.dim() == 2:
                all_rows = slice(0, weight.shape[0])
                x, outputs = given["input"].detach(), output.detach()
                product = Product(key, weight.shape, all_rows, weight, x, outputs, has_bias)
                output.register_hook(self.watch(product))
        return output

    def _watch_groups(self, x: torch.Tensor, weight: torch.Tensor, output: torch.Tensor) -> None:
        """A grouped linear (DeepSeek-V4's o_a_proj): x (G, t, n) times a view (G, n, m / G) of the weight (m, n).

        Each group is a product with m / G of the rows.
        """
        key = self._key_by_address.get(weight.data_ptr())
        if key is None:
            return
        groups, cols, rows_per_group = weight.shape
        shape, outputs = torch.Size((groups * rows_per_group, cols)), output.detach()
        hooks = []
        for group in range(groups):
            rows = slice(group * rows_per_group, (group + 1) * rows_per_group)
            hooks.append(self.watch(Product(key, shape, rows, weight[group].T, x[group], outputs[group])))

        def call_hooks(gradient: torch.Tensor) -> None:
            for hook, part in zip(hooks, gradient, strict=True):
                hook(part)

        output.register_hook(call_hooks)
