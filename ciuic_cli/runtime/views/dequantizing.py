"""Turns a loaded artifact into the dense model: `model.dequantize()`, and `from_pretrained` with `dequantize=True`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ciuic_cli.checkpoint.architecture import fixed_dtypes, initialise_buffers, stored_tensors
from ciuic_cli.checkpoint.compressible import file_shape, stack_flat_experts
from ciuic_cli.checkpoint.roles import classify
from ciuic_cli.errors import UsageError
from ciuic_cli.runtime import products
from ciuic_cli.runtime.blobs import drop_stale, stack_of, weight_of
from ciuic_cli.runtime.mixed_classes import Mixin, original_class
from ciuic_cli.runtime.routing import mask_router, routers

_PIECE_WEIGHTS = 1 << 22
"""Weights that are decoded at a time; bounds scratch memory. Chosen, not tuned."""


def dequantize(model: Any, dtype: torch.dtype, pruned: Mapping[str, torch.Tensor]) -> None:
    """Replace all modules of a loaded artifact by the dense ones of transformers, in place.

    The memory of a weight's codes is freed when the weight is decoded.

    Args:
        model: a transformers model whose compressed weights are in memory, on any device.
        dtype: of the decoded weights.
        pruned: name of the experts module -> mask (E,) of its pruned experts. Routers keep excluding them.

    Raises:
        UsageError: a weight is not in memory (offloaded to disk).
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise UsageError(
                "a model with weights on disk cannot be dequantized",
                tensor=name,
                remedy="load it without offloading, or write a dense copy with `ciuic export`",
            )
    cls: Any = original_class(model) if isinstance(model, Mixin) else type(model)
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        dense = cls._from_config(config, dtype=dtype)
    stack_flat_experts(dense)
    initialise_buffers(dense, model.device)
    fixed = fixed_dtypes(dense, dtype, dtype)
    transposed = {name for name, (found, _) in classify(dense).items() if found.transposed}
    loaded: dict[torch.Tensor, torch.Tensor] = {}  # tied parameters stay one
    for owner, short, name, is_buffer in list(stored_tensors(dense, "")):
        stored, expected = _stored(model, name), getattr(owner, short)
        if stored not in loaded:
            if stored.dtype == torch.uint8 and stored.dim() == 1 and expected.is_floating_point():
                value = _decoded(stored, expected.dim(), fixed.get(name, dtype), name in transposed)
                stored.data = stored.data[:0].clone()  # frees the codes
                drop_stale(stored)
            else:
                value = stored.detach().to(fixed.get(name, dtype)) if stored.is_floating_point() else stored
            loaded[stored] = (
                value if is_buffer else nn.Parameter(value, requires_grad=value.is_floating_point())
            )
        setattr(owner, short, loaded[stored])
    for name, parameter in dense.named_parameters():
        parameter.data = parameter.data.view(file_shape(dense, name, tuple(parameter.shape)))
    dense.train(model.training)
    model.__class__ = cls
    model._modules = dense._modules
    for router, mask in routers(model, pruned):
        mask_router(router, mask)


def _stored(model: nn.Module, name: str) -> torch.Tensor:
    """The parameter or buffer itself, also where its module presents the blob as a dense weight."""
    owner_name, _, short = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    found = owner._parameters.get(short)
    return owner._buffers[short] if found is None else found  # type: ignore[return-value]


def _decoded(blob: torch.Tensor, dimensions: int, dtype: torch.dtype, transposed: bool) -> torch.Tensor:
    """The weight in a blob: a matrix, or a stack if it has three dimensions; in the model's orientation."""
    if dimensions == 3:
        stack = stack_of(blob)
        matrices = [stack.expert(index) for index in range(stack.count)]
    else:
        matrices = [weight_of(blob).matrix]
    rows, cols = matrices[0].rows, matrices[0].cols
    shape = (cols, rows) if transposed else (rows, cols)
    values = torch.empty((len(matrices), *shape), dtype=dtype, device=blob.device)
    step = max(1, _PIECE_WEIGHTS // cols)
    for matrix, value in zip(matrices, values, strict=True):
        in_rows = value.mT if transposed else value
        for begin in range(0, rows, step):
            numbers = torch.arange(begin, min(begin + step, rows), device=blob.device)
            in_rows[begin : begin + step] = products.rows_of(matrix, numbers)
    return values if dimensions == 3 else values[0]
