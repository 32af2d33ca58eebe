"""Modules with compressed weights that replace nn.Linear and nn.Embedding.

The compressed weight is a blob, a parameter of dtype uint8 and one dimension. It has the name of the dense weight, so
that state dicts, device moves, saving and tying work as for any module. Outputs have the dtype of the activations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ciuic_cli.errors import UsageError
from ciuic_cli.runtime import ops
from ciuic_cli.runtime.attention.mla_products import HeadShape
from ciuic_cli.runtime.blobs import drop_stale
from ciuic_cli.runtime.views.dense_views import DenseView, Presentation, reads_parameter_itself, view_of


def blob_parameter(nbytes: int, device: torch.device | str | None = None) -> nn.Parameter:
    """An empty parameter for a blob of `nbytes` bytes: uint8, shape (nbytes,), without gradient."""
    return nn.Parameter(torch.empty(nbytes, dtype=torch.uint8, device=device), requires_grad=False)


class BlobModule(nn.Module):
    """Base class of modules with blobs among their parameters.

    presented: parameter -> how code outside the module sees the blob when it reads the parameter as an attribute; see
    dense_views.py. The module's own code, state dicts, device moves, saving and accelerate use the blob.
    """

    presented: dict[str, Presentation] | None = None

    def __getattr__(self, name: str) -> Any:
        presented = self.presented
        if presented is None or name not in presented or reads_parameter_itself(2):
            return super().__getattr__(name)
        return view_of(self._parameters[name], presented[name])  # type: ignore[arg-type]

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register as nn.Module does. A view registers its blob, so that weights can be tied."""
        super().register_parameter(name, param.codes.blob if isinstance(param, DenseView) else param)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> BlobModule:
        """As nn.Module._apply, which `to`, `cpu` and `cuda` call; then frees what was parsed on the old device."""
        super()._apply(fn, recurse)
        for parameter in self._parameters.values():
            if parameter is not None:
                drop_stale(parameter)
        if self.presented is not None:  # a view has the dtype that a dense weight would have now
            self.presented = {
                name: replace(shown, dtype=fn(torch.empty(0, dtype=shown.dtype)).dtype)
                for name, shown in self.presented.items()
            }
        return self


class CompressedLinear(BlobModule):
    """y = x W^T + bias, where W (out_features, in_features) is decoded inside the product.

    `weight` is the blob of a PackedMatrix, (nbytes,) uint8. `bias` is None or floating (out_features,).
    """

    def __init__(
        self, in_features: int, out_features: int, weight: nn.Parameter, bias: nn.Parameter | None = None
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = weight
        self.bias: nn.Parameter | None
        self.register_parameter("bias", bias)
        self.decoded: torch.Tensor | None
        self.register_buffer("decoded", None, persistent=False)

    @property
    def blob(self) -> torch.Tensor:
        """The parameter `weight`, also after `present`."""
        return self._parameters["weight"]  # type: ignore[return-value]

    def forward(self, x: torch.Tensor | HeadShape) -> Any:
        """x (..., in_features) floating -> (..., out_features) in the dtype of x.

        Called with a `HeadShape`, it returns its rows by head instead (`UpProjection`). That is a call, because
        accelerate brings the blob of an offloaded module only for calls of the module.
        """
        if isinstance(x, HeadShape):
            return ops.up_projection(self.blob, self.decoded, x)
        # Attribute lookup through nn.Module would take a tenth of the time of a small product.
        bias = self._parameters["bias"]
        y = ops.linear(x, self.blob, self.out_features)
        return y if bias is None else y + bias.to(y.dtype)

    def keep_decoded(self, dtype: torch.dtype) -> None:
        """Decode the rows once, for `ops.latent_attention`: `decoded`, (out_features, in_features padded) of `dtype`.

        It is a buffer that no state dict contains, so it moves with the module and counts as resident memory.
        """
        self.register_buffer("decoded", ops.decoded_rows(self.blob, dtype), persistent=False)

    def present(self, dtype: torch.dtype) -> None:
        """Let other code read `weight` as a dense matrix of `dtype`."""
        self.presented = {"weight": Presentation((self.out_features, self.in_features), dtype)}

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, bytes={self.blob.numel()}"
        )


class CompressedGroupedLinear(CompressedLinear):
    """Block-diagonal projection (DeepSeek V4's `o_a_proj`): group g of the input is multiplied by group g of the rows.

    The weight is (out_features, in_features), where out_features = n_groups * rows per group and in_features is the
    number of columns of one group.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        n_groups: int,
        weight: nn.Parameter,
        bias: nn.Parameter | None = None,
    ) -> None:
        super().__init__(in_features, out_features, weight, bias)
        self.n_groups = n_groups

    def forward(self, x: Any) -> torch.Tensor:
        """x (..., n_groups, in_features) -> (..., n_groups, out_features / n_groups)."""
        # No bias: the dense module has none and ignores one, too.
        return ops.grouped_linear(x, self.blob, self.n_groups, self.out_features // self.n_groups)


class CompressedEmbedding(BlobModule):
    """Rows of a compressed table (num_embeddings, embedding_dim). Only the requested rows are decoded.

    `scale` multiplies the rows (Gemma's scaled embeddings). It is rounded to the dtype of the output, as in the dense
    module.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        weight: nn.Parameter,
        dtype: torch.dtype,
        scale: float | None = None,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__()
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx
        self.scale = scale
        self.weight = weight
        # An empty buffer that holds the model's floating dtype: `model.to(dtype)` changes it with all other floats.
        self.register_buffer(
            "dtype_of_rows", torch.empty(0, dtype=dtype, device=weight.device), persistent=False
        )
        self.dtype_of_rows: torch.Tensor

    @property
    def blob(self) -> torch.Tensor:
        """The parameter `weight`, also after `present`."""
        return self._parameters["weight"]  # type: ignore[return-value]

    def present(self) -> None:
        """Let other code read `weight` as a dense table."""
        shape = (self.num_embeddings, self.embedding_dim)
        self.presented = {"weight": Presentation(shape, self.dtype_of_rows.dtype)}

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids (...) integer -> (..., embedding_dim). Raises UsageError in torch.jit.trace."""
        if torch.jit.is_tracing():
            raise UsageError(
                "torch.jit.trace does not record products with compressed weights", remedy="use torch.compile"
            )
        dtype = self.dtype_of_rows.dtype
        rows = ops.embedding(input_ids, self.blob, self.embedding_dim, dtype)
        return rows if self.scale is None else rows * torch.tensor(self.scale, dtype=dtype)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, bytes={self.blob.numel()}"
