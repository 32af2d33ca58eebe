"""Compressed linears, embeddings and heads in vLLM."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearMethodBase

from ciuic_cli.codecs.layout import read_header
from ciuic_cli.errors import InputError
from ciuic_cli.runtime import ops, products
from ciuic_cli.runtime.attention.mla_products import HeadShape
from ciuic_cli.serving.vllm.weights import PendingWeight


class CompressedMatrixMethod(LinearMethodBase):
    """Products and lookups with the codes of a module's weight, or of the parts of its merged weight.

    After loading, the module's parameter `weight` is the first part and `weight_1`, `weight_2` ... are the others:
    blobs, uint8 (nbytes,), or dense parts (rows, cols).

    Args:
        tensors: names of the parts in the artifact, in the order of the rows; none for a head that will be tied.
    """

    def __init__(self, tensors: tuple[str, ...]) -> None:
        self.tensors = tensors

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        layer.register_parameter("weight", PendingWeight())
        layer.compressed_shape = (sum(output_partition_sizes), input_size)
        layer.rows_dtype = params_dtype

    def process_weights_after_loading(self, layer: Any) -> None:
        """Put the loaded parts in. Raises InputError if one is missing or has another number of columns."""
        tied = getattr(layer, "tied_to", None)
        if tied is not None:
            layer.weight = tied.weight
            return
        pending = layer.weight
        if not isinstance(pending, PendingWeight):
            return  # processed before
        tensors = self.tensors or ("lm_head.weight",)
        parts = [nn.Parameter(part, requires_grad=False) for part in pending.collected(tensors)]
        layer.part_rows = [self._rows(layer, part, name) for part, name in zip(parts, tensors, strict=True)]
        layer.part_names = ["weight", *(f"weight_{number}" for number in range(1, len(parts)))]
        for name, part in zip(layer.part_names, parts, strict=True):
            layer.register_parameter(name, part)

    @staticmethod
    def _rows(layer: Any, part: torch.Tensor, name: str) -> int:
        """The number of rows of a part."""
        if _is_blob(part):
            header = read_header(part, where=name)
            rows, cols = header.rows, header.cols
        else:
            rows, cols = part.shape
        most_rows, wanted = layer.compressed_shape
        if cols != wanted or rows > most_rows:  # vLLM pads the vocabulary, so a head may have fewer rows
            raise InputError(
                f"the matrix has shape {(rows, cols)}, vLLM's module {(most_rows, wanted)}",
                tensor=name,
                remedy="the artifact belongs to another model; compress it again",
            )
        return rows

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x (..., cols) -> (..., rows of all parts), in the dtype of x."""
        source: Any = getattr(layer, "tied_to", layer)
        outputs = [
            _product(x, getattr(source, name), rows)
            for name, rows in zip(source.part_names, source.part_rows, strict=True)
        ]
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        return y if bias is None else y + bias

    def embedding(self, layer: Any, input_: torch.Tensor) -> torch.Tensor:
        """input_ (...) integer -> rows (..., cols)."""
        return ops.embedding(input_, layer.weight, layer.compressed_shape[1], layer.rows_dtype)

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """Make a head compute with the codes of the embedding."""
        layer.weight = embed_tokens.weight
        # Not a submodule: the embedding's parameters belong to the embedding alone.
        object.__setattr__(layer, "tied_to", embed_tokens)
        return layer


class LatentProjectionMethod(CompressedMatrixMethod):
    """`kv_b_proj` where vLLM runs MLA: keys and values of prompts from the cached latents.

    They are computed as transformers' models do with ciuic, from decoded rows in the transformed basis. Another product
    would round other numbers, and after a few layers of bfloat16 the two programs would differ by twice as much
    (docs/experiments/runtime/vllm-agreement.md). For single tokens vLLM makes two dense factors of the product with the
    identity: in the basis its numbers are powers of 2, or of the square root of 2, which bfloat16 rounds by 1e-4.
    """

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        shape = HeadShape(heads=1, nope=0, dtype=products.multiply_dtype(x))
        up = ops.up_projection(layer.weight, None, shape)
        y = nn.functional.linear(up.into_basis(x), up.weight[0]).to(x.dtype)
        return y if bias is None else y + bias


def _is_blob(part: torch.Tensor) -> bool:
    return part.dtype == torch.uint8 and part.dim() == 1


def _product(x: torch.Tensor, part: torch.Tensor, rows: int) -> torch.Tensor:
    return ops.linear(x, part, rows) if _is_blob(part) else nn.functional.linear(x, part.to(x.dtype))
