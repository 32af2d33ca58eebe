"""Compressed weights as their dense selves, for model code that reads `module.weight` instead of calling the module.

A `DenseView` has the shape, dtype and device of the dense weight. Products and lookups with it use the codes; any other
operation decodes the weight first. It lives as long as the expression that reads it, so nothing decoded stays.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ciuic_cli.runtime import ops, products
from ciuic_cli.runtime.blobs import stack_of, weight_of
from ciuic_cli.runtime.matrices import Matrix


@dataclass(frozen=True)
class Presentation:
    """How a blob is presented: the shape of the model's parameter, its dtype, and whether it is (inputs, outputs)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    transposed: bool = False


@dataclass(frozen=True)
class Codes:
    """What a view shows: a blob, one expert of a stack (None: all of it), and whether it is transposed."""

    blob: nn.Parameter
    is_stack: bool
    transposed: bool
    expert: int | None = None

    def matrices(self) -> list[Matrix]:
        """The matrix, or one per expert."""
        if not self.is_stack:
            return [weight_of(self.blob).matrix]
        stack = stack_of(self.blob)
        return [stack.expert(e) for e in ([self.expert] if self.expert is not None else range(stack.count))]

    def decode(self, dtype: torch.dtype) -> torch.Tensor:
        """The dense weight as it is shown."""
        with torch.no_grad():
            device = self.blob.device
            parts = [
                products.rows_of(matrix, torch.arange(matrix.rows, device=device)).to(dtype)
                for matrix in self.matrices()
            ]
            value = torch.stack(parts) if self.is_stack and self.expert is None else parts[0]
            return value.mT.contiguous() if self.transposed else value

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., inputs) times the transpose of the stored matrix, or of the one expert: (..., outputs)."""
        rows = self.matrices()[0].rows
        if not self.is_stack:
            return ops.linear(x, self.blob, rows)
        flat = x.reshape(-1, x.shape[-1])
        assert self.expert is not None
        ids = torch.full((len(flat), 1), self.expert, device=x.device)
        return ops.routed_linear(flat, self.blob, ids, rows).reshape(*x.shape[:-1], rows)


class DenseView(torch.Tensor):
    """A compressed weight that looks dense; see the module's docstring. It cannot be written to.

    It counts as an nn.Parameter, like the weight that it stands for.
    """

    _is_param = True
    codes: Codes

    @staticmethod
    def __new__(cls, codes: Codes, shape: tuple[int, ...], dtype: torch.dtype) -> DenseView:
        view: DenseView = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=codes.blob.device
        )
        view.codes = codes
        return view

    def __init__(self, *arguments: Any) -> None:
        super().__init__()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DenseView(shape={tuple(self.shape)}, dtype={self.dtype}, bytes={self.codes.blob.numel()})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return DenseView, (self.codes, tuple(self.shape), self.dtype)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name.endswith("_") and not name.startswith("_") and args and isinstance(args[0], DenseView):
            raise TypeError(f"{name} would write to a compressed weight, which cannot be changed")
        handler = _HANDLERS.get(func)
        result = handler(*args, **kwargs) if handler is not None else NotImplemented
        if result is not NotImplemented:
            return result
        dense_args = [_dense(value) for value in args]
        return func(*dense_args, **{key: _dense(value) for key, value in kwargs.items()})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        return func(*map(_dense, args), **{key: _dense(value) for key, value in (kwargs or {}).items()})


PARAMETER_READERS = ("accelerate.", "torch.distributed.")
"""Modules that move, divide and replace parameters by attribute; they get the blob, not the view."""


def view_of(blob: nn.Parameter, presented: Presentation) -> DenseView:
    """The view of a blob. Its device is the blob's."""
    codes = Codes(blob, len(presented.shape) == 3, presented.transposed)
    return DenseView(codes, presented.shape, presented.dtype)


def reads_parameter_itself(depth: int) -> bool:
    """True if the function `depth` frames up the call stack is one of PARAMETER_READERS."""
    name = str(sys._getframe(depth).f_globals.get("__name__", ""))
    return name.startswith(PARAMETER_READERS)


def _dense(value: Any) -> Any:
    if isinstance(value, DenseView):
        return value.codes.decode(value.dtype)
    if isinstance(value, list | tuple) and any(isinstance(part, DenseView) for part in value):
        return type(value)(_dense(part) for part in value)
    return value


def _shown(
    view: DenseView, codes: Codes, shape: tuple[int, ...], dtype: torch.dtype | None = None
) -> DenseView:
    return DenseView(codes, shape, dtype or view.dtype)


def _transposed(view: Any, *dims: int) -> Any:
    """The view with its last two dimensions exchanged, or NotImplemented."""
    last_two = {view.dim() - 1, view.dim() - 2}
    if dims and {dim % view.dim() for dim in dims} != last_two:
        return NotImplemented
    codes = replace(view.codes, transposed=not view.codes.transposed)
    return _shown(view, codes, (*view.shape[:-2], view.shape[-1], view.shape[-2]))


def _transposed_matrix(view: Any) -> Any:
    return _transposed(view) if view.dim() == 2 else NotImplemented


def _item(view: Any, index: Any) -> Any:
    """One expert of a stack."""
    if not isinstance(view, DenseView) or view.dim() != 3 or isinstance(index, bool):
        return NotImplemented
    if isinstance(index, torch.Tensor) and (index.dim() or index.is_floating_point()):
        return NotImplemented
    if not isinstance(index, int | torch.Tensor):
        return NotImplemented
    expert = int(index)
    if not -len(view) <= expert < len(view):
        raise IndexError(f"index {expert} is out of bounds for dimension 0 with size {len(view)}")
    return _shown(view, replace(view.codes, expert=expert % len(view)), tuple(view.shape[1:]))


def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    if isinstance(x, DenseView) or not isinstance(weight, DenseView):
        return NotImplemented
    if weight.dim() != 2 or weight.codes.transposed:
        return NotImplemented
    y = weight.codes.product(x)
    bias = _dense(bias)
    return y if bias is None else y + bias.to(y.dtype)


def _matmul(left: Any, right: Any) -> Any:
    if isinstance(right, DenseView) and isinstance(left, torch.Tensor) and not isinstance(left, DenseView):
        if right.dim() == 3:
            return _bmm(left, right)
        return right.codes.product(left) if right.codes.transposed and left.dim() > 0 else NotImplemented
    if isinstance(left, DenseView) and isinstance(right, torch.Tensor) and not isinstance(right, DenseView):
        if left.dim() != 2 or left.codes.transposed:
            return NotImplemented
        return left.codes.product(right.mT).mT if right.dim() > 1 else left.codes.product(right)
    return NotImplemented


def _addmm(bias: Any, left: Any, right: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    y = _matmul(left, right) if beta == 1 and alpha == 1 else NotImplemented
    return y if y is NotImplemented else y + _dense(bias).to(y.dtype)


def _bmm(left: Any, right: Any) -> Any:
    """x (E, t, inputs) times all experts of a transposed stack."""
    if isinstance(left, DenseView) or not isinstance(right, DenseView) or not right.codes.transposed:
        return NotImplemented
    if left.dim() != 3 or right.dim() != 3:
        return NotImplemented
    experts, tokens, _ = left.shape
    ids = torch.arange(experts, device=left.device).repeat_interleave(tokens)[:, None]
    y = ops.routed_linear(left.reshape(experts * tokens, -1), right.codes.blob, ids, right.shape[-1])
    return y.reshape(experts, tokens, -1)


def _baddbmm(bias: Any, left: Any, right: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    y = _bmm(left, right) if beta == 1 and alpha == 1 else NotImplemented
    return y if y is NotImplemented else y + _dense(bias).to(y.dtype)


def _embedding(ids: Any, weight: Any, *args: Any, **options: Any) -> Any:
    if (
        not isinstance(weight, DenseView)
        or weight.dim() != 2
        or weight.codes.transposed
        or weight.codes.is_stack
    ):
        return NotImplemented
    if options.get("max_norm") is not None or (len(args) > 1 and args[1] is not None):
        return NotImplemented
    return ops.embedding(ids, weight.codes.blob, weight.shape[1], weight.dtype)


def _converted(view: Any, *args: Any, **kwargs: Any) -> Any:
    """`to` with another dtype, on the same device: a view of that dtype."""
    if not isinstance(view, DenseView):
        return NotImplemented
    wanted = [*args, *kwargs.values()]
    dtypes = [value.dtype if isinstance(value, torch.Tensor) else value for value in wanted]
    dtypes = [value for value in dtypes if isinstance(value, torch.dtype)]
    devices = [value.device if isinstance(value, torch.Tensor) else value for value in wanted]
    devices = [torch.device(value) for value in devices if isinstance(value, torch.device | str)]
    if any(device != view.device for device in devices):
        return NotImplemented
    return _shown(view, view.codes, tuple(view.shape), dtypes[0] if dtypes else None)


def _itself(view: Any, *_: Any, **__: Any) -> Any:
    return view


def _viewed(view: Any, *sizes: Any, **others: Any) -> Any:
    """`view` with the shape that it has: DBRX takes experts out of such a view."""
    if not isinstance(view, DenseView) or others or isinstance(sizes[0], torch.dtype):
        return NotImplemented
    wanted = torch.empty(view.shape, device="meta").view(*sizes).shape
    return view if wanted == view.shape else NotImplemented


_METADATA = {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.element_size,
    torch.Tensor.is_floating_point,
    torch.Tensor.__len__,
    torch.Tensor.__hash__,
    torch.is_floating_point,
    *(
        getattr(torch.Tensor, name).__get__
        for name in (
            *("shape", "dtype", "device", "ndim", "layout", "requires_grad", "grad", "grad_fn", "is_leaf"),
            *("is_meta", "is_cuda", "is_cpu", "is_quantized", "is_sparse", "nbytes", "itemsize"),
        )
    ),
}
"""What is answered without the codes."""
_HANDLERS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    torch.bmm: _bmm,
    torch.addmm: _addmm,
    torch.baddbmm: _baddbmm,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.mm: _matmul,
    torch.Tensor.bmm: _bmm,
    torch.Tensor.__matmul__: _matmul,
    torch.Tensor.__rmatmul__: lambda right, left: _matmul(left, right),
    torch.Tensor.__getitem__: _item,
    torch.Tensor.T.__get__:  # type: ignore[attr-defined]
    _transposed_matrix,
    torch.Tensor.mT.__get__:  # type: ignore[attr-defined]
    _transposed,
    torch.Tensor.t: _transposed_matrix,
    torch.t: _transposed_matrix,
    torch.Tensor.transpose: _transposed,
    torch.transpose: _transposed,
    torch.Tensor.view: _viewed,
    torch.Tensor.to: _converted,
    torch.Tensor.type_as: _converted,
    torch.Tensor.float: lambda view: _converted(view, torch.float32),
    torch.Tensor.bfloat16: lambda view: _converted(view, torch.bfloat16),
    torch.Tensor.half: lambda view: _converted(view, torch.float16),
    torch.Tensor.detach: _itself,
    torch.Tensor.contiguous: _itself,
    torch.Tensor.data.__get__:  # type: ignore[attr-defined]
    _itself,
}
"""Operations that use the codes, or give another view. They return NotImplemented where the weight must be decoded."""
