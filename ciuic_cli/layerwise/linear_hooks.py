"""Hooks on the products with a layer's weights, for code that needs a matrix's inputs and output gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ciuic_cli.checkpoint.model_map import Parameter

Key = tuple[str, int | None]
"""A weight matrix: the in-memory name of its parameter, and the number of the expert in a stack."""
Hook = Callable[[torch.Tensor], None]
"""Called with the gradient of a product's outputs, which has their shape."""


MATMULS = (
    torch.matmul,
    torch.mm,
    torch.addmm,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.Tensor.mm,
)
"""The functions of torch for the product of two matrices."""


def matmul_factors(func: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, Any]:
    """Both factors, of the positional arguments of one of MATMULS."""
    first = 1 if func is torch.addmm else 0
    return args[first], args[first + 1]


@dataclass(frozen=True)
class WatchedLinear:
    """A parameter to watch: its in-memory name, and the tensor (m, n) or (E, m, n) that the layer computes with.

    transposed: the layer's tensor is (n, m) or (E, n, m), and it computes x W instead of x Wᵀ. role: of the parameter.
    """

    name: str
    tensor: torch.Tensor
    transposed: bool = False
    role: str = ""


def linears_of(layer: nn.Module, prefix: str, parameters: Mapping[str, Parameter]) -> list[WatchedLinear]:
    """All compressible matrices of a layer, whose parameters' names begin with `prefix`."""
    return [
        WatchedLinear(prefix + name, tensor, parameter.transposed, parameter.role)
        for name, tensor in layer.named_parameters()
        if (parameter := parameters.get(prefix + name)) is not None and parameter.compress
    ]


Submodules = tuple[tuple[str, type[nn.Module]], ...]
"""Names and classes of a layer's submodules, which decide how it computes."""


def submodules_of(layer: nn.Module) -> Submodules:
    return tuple((name, type(module)) for name, module in layer.named_modules())


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
    """While active, `watch` is called for every product with a watched weight whose output requires a gradient, or for
    all products if the class does not need gradients.

    Products are `F.linear`, `@` and its named forms, and `torch.bmm` with the groups of DeepSeek-V4's linear or with
    all experts of a stack. What `watch` returns, if anything, is called with the gradient of the product's outputs.
    Experts of a stack (E, m, n) are recognised by the memory address of their slice.

    Attributes:
        needs_gradients: of the class: whether products are left out whose output requires no gradient.
    """

    needs_gradients = True

    def __init__(self, watched: Sequence[WatchedLinear]) -> None:
        super().__init__()
        self._key_by_address: dict[int, Key] = {}
        self._transposed = {item.name for item in watched if item.transposed}
        for item in watched:
            experts = enumerate(item.tensor) if item.tensor.dim() == 3 else [(None, item.tensor)]
            self._key_by_address |= {part.data_ptr(): (item.name, expert) for expert, part in experts}

    @abstractmethod
    def watch(self, product: Product) -> Hook | None:
        """Function that is called with the gradient of the product's outputs; None without gradients."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if not isinstance(output, torch.Tensor) or (self.needs_gradients and not output.requires_grad):
            return output
        if func in (torch.bmm, torch.baddbmm):
            x, weight = args[-2:]
            self._watch_groups(x.detach(), weight, output)
        elif func in MATMULS:
            self._watch_columns(*matmul_factors(func, args), output, has_bias=func is torch.addmm)
        elif func is torch.nn.functional.linear:
            given = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **(kwargs or {})}
            weight, has_bias = given["weight"], given.get("bias") is not None
            key = self._key_by_address.get(weight.data_ptr())
            if key is not None and weight.dim() == 2 and key[0] not in self._transposed:
                all_rows = slice(0, weight.shape[0])
                x, outputs = given["input"].detach(), output.detach()
                self._watch_one(Product(key, weight.shape, all_rows, weight, x, outputs, has_bias), output)
        return output

    def _watch_columns(
        self, x: torch.Tensor, weight: torch.Tensor, output: torch.Tensor, *, has_bias: bool
    ) -> None:
        """A product x W with a transposed weight W (n, m), or with the transpose of a weight (m, n)."""
        key = self._key_by_address.get(weight.data_ptr()) if isinstance(weight, torch.Tensor) else None
        if key is None or weight.dim() != 2:
            return
        if key[0] in self._transposed or weight.mT.is_contiguous():
            rows = weight.detach().mT
            product = Product(
                key, rows.shape, slice(0, len(rows)), rows, x.detach(), output.detach(), has_bias
            )
            self._watch_one(product, output)

    def _watch_groups(self, x: torch.Tensor, weight: torch.Tensor, output: torch.Tensor) -> None:
        """A grouped linear (DeepSeek-V4's o_a_proj): x (G, t, n) times a view (G, n, m / G) of the weight (m, n).

        Each group is a product with m / G of the rows.
        """
        key = self._key_by_address.get(weight.data_ptr())
        if key is None:
            return
        if key[1] is not None:
            self._watch_stack(key[0], x, weight, output)
            return
        groups, cols, rows_per_group = weight.shape
        shape, outputs = torch.Size((groups * rows_per_group, cols)), output.detach()
        products = []
        for group in range(groups):
            rows = slice(group * rows_per_group, (group + 1) * rows_per_group)
            products.append(Product(key, shape, rows, weight[group].T, x[group], outputs[group]))
        self._watch_parts(products, output)

    def _watch_stack(self, name: str, x: torch.Tensor, weight: torch.Tensor, output: torch.Tensor) -> None:
        """All experts of a transposed stack at once (Llama 4): x (E, t, n) times W (E, n, m)."""
        if name not in self._transposed:
            return
        outputs = output.detach()
        products = [
            Product((name, expert), rows.shape, slice(0, len(rows)), rows, x[expert], outputs[expert])
            for expert, rows in enumerate(weight.detach().mT)
        ]
        self._watch_parts(products, output)

    def _watch_one(self, product: Product, output: torch.Tensor) -> None:
        """Watch the only product of a call with this output."""
        if (hook := self.watch(product)) is not None:
            output.register_hook(hook)

    def _watch_parts(self, products: Sequence[Product], output: torch.Tensor) -> None:
        """Watch all products of a call. Each has a part of the output and of its gradient."""
        hooks = [self.watch(product) for product in products]

        def call_hooks(gradient: torch.Tensor) -> None:
            for hook, part in zip(hooks, gradient, strict=True):
                if hook is not None:
                    hook(part)

        if any(hooks):
            output.register_hook(call_hooks)


class SkippedProducts(TorchFunctionMode):
    """While active, `F.linear` with these weights computes no product: the outputs are NaN. Gradients of the inputs are
    computed from those of the outputs, as ever.

    For products whose outputs no gradient depends on. A result that depends on them becomes NaN.
    """

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._addresses = {weight.data_ptr() for weight in weights}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is not torch.nn.functional.linear:
            return func(*args, **(kwargs or {}))
        weight = args[1] if len(args) > 1 else (kwargs or {})["weight"]
        with _NoProducts() if weight.data_ptr() in self._addresses else nullcontext():
            return func(*args, **(kwargs or {}))


class _NoProducts(TorchDispatchMode):
    """While active, products of two matrices are NaN."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            left, right = args[-2:]
            return left.new_full((left.shape[0], right.shape[1]), torch.nan)
        return func(*args, **(kwargs or {}))
