"""The operators that compressed modules call, registered with torch.library so that torch.compile works.

    ciuic::linear(x, blob, rows)                  x (..., cols) -> (..., rows)
    ciuic::grouped_linear(x, blob, groups, rows)  x (..., groups, cols) -> (..., groups, rows)
    ciuic::embedding(ids, blob, cols, dtype)      ids (...) -> (..., cols)
    ciuic::routed_linear(x, blob, ids, rows)      x (T, cols), ids (T, k) -> (T, k, rows)

grouped_linear multiplies group g by rows g * rows to (g + 1) * rows - 1 of W. routed_linear multiplies x[t] by the
matrix of expert ids[t, j].

Blobs are uint8 (nbytes,). Outputs have the dtype of x; sums are float32. Gradients flow to x, not to the codes. In
eager inference the functions below skip torch's dispatcher, which costs as much per call as the product of a small
matrix.
"""

from __future__ import annotations

from typing import Any

import torch

from ciuic_cli.runtime import products
from ciuic_cli.runtime.attention import mla_products
from ciuic_cli.runtime.blobs import stack_of, weight_of

ROWS_WITH_ALL_GROUPS = 32
"""grouped_linear multiplies up to so many rows (tokens times groups) by all groups at once, straight from the codes,
and keeps a part. More rows meet the decoded rows of their own group. Chosen: a few rows cost little more than one."""


def linear(x: torch.Tensor, blob: torch.Tensor, rows: int) -> torch.Tensor:
    """x (..., cols) times W^T: (..., rows) in the dtype of x. Raises InputError if the blob is damaged."""
    if _skips_dispatcher(x):
        return _linear(x, blob, rows)
    return torch.ops.ciuic.linear(x, blob, rows)


def grouped_linear(x: torch.Tensor, blob: torch.Tensor, groups: int, rows: int) -> torch.Tensor:
    """x (..., groups, cols), W (groups * rows, cols): (..., groups, rows) in the dtype of x. Raises as `linear`."""
    if _skips_dispatcher(x):
        return _grouped_linear(x, blob, groups, rows)
    return torch.ops.ciuic.grouped_linear(x, blob, groups, rows)


def embedding(ids: torch.Tensor, blob: torch.Tensor, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of W: ids (...) to (..., cols) in `dtype`.

    An id out of range raises IndexError, but gives zeros where the CUDA kernels run, which do not wait for the host.
    """
    if _skips_dispatcher(ids):
        return _embedding(ids, blob, cols, dtype)
    return torch.ops.ciuic.embedding(ids, blob, cols, dtype)


def routed_linear(x: torch.Tensor, blob: torch.Tensor, ids: torch.Tensor, rows: int) -> torch.Tensor:
    """x (T, cols), expert ids (T, k): (T, k, rows) in the dtype of x; zeros where an id names no expert."""
    if _skips_dispatcher(x):
        return _routed_linear(x, blob, ids, rows)
    return torch.ops.ciuic.routed_linear(x, blob, ids, rows)


def latent_attention(
    inputs: mla_products.AttentionInputs,
    blob: torch.Tensor,
    decoded: torch.Tensor | None,
    *,
    nope: int,
    v: int,
    is_causal: bool,
) -> torch.Tensor:
    """MLA over cached latents: `mla_products.attention`, [b, s, heads, v] in the dtype of the query.

    blob: the codes of `kv_b_proj`. decoded: None, or the result of `decoded_rows` for it.
    """
    skips = _skips_dispatcher(inputs.query)
    operator = _latent_attention if skips else torch.ops.ciuic.latent_attention
    tensors = (inputs.query, inputs.latents, inputs.rotary_keys, inputs.mask, blob, decoded)
    out: torch.Tensor = operator(*tensors, nope, v, inputs.scaling, is_causal)
    return out


def decoded_rows(blob: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The rows of a matrix in the transformed basis, as `latent_attention` takes them: [rows, cols_padded]."""
    return mla_products.decoded_rows(weight_of(blob).matrix, dtype)


def up_projection(
    blob: torch.Tensor, decoded: torch.Tensor | None, shape: mla_products.HeadShape
) -> mla_products.UpProjection:
    """The rows of `kv_b_proj` by head. decoded: None, or the result of `decoded_rows`."""
    return mla_products.UpProjection.of(weight_of(blob).matrix, shape, decoded)


def _skips_dispatcher(x: torch.Tensor) -> bool:
    needs_graph = torch.is_grad_enabled() and x.requires_grad
    return type(x) is torch.Tensor and not needs_graph and not torch.compiler.is_compiling()


def _linear(x: torch.Tensor, blob: torch.Tensor, rows: int) -> torch.Tensor:
    return weight_of(blob).product(x)


def _linear_backward(grad: torch.Tensor, blob: torch.Tensor, cols: int) -> torch.Tensor:
    gx = products.gradient(weight_of(blob).matrix, grad.reshape(-1, grad.shape[-1]))
    return gx.to(grad.dtype).reshape(*grad.shape[:-1], cols)


def _grouped_linear(x: torch.Tensor, blob: torch.Tensor, groups: int, rows: int) -> torch.Tensor:
    weight = weight_of(blob)
    matrix = weight.matrix
    by_group = x.reshape(-1, groups, x.shape[-1])
    if 0 < by_group.shape[0] * groups <= ROWS_WITH_ALL_GROUPS:
        with_all = weight.product(by_group).reshape(-1, groups, groups, rows)
        return with_all.diagonal(dim1=1, dim2=2).mT.contiguous().reshape(*x.shape[:-1], rows)
    parts = [products.product(matrix, by_group[:, g], g * rows, (g + 1) * rows) for g in range(groups)]
    return torch.stack(parts, dim=1).to(x.dtype).reshape(*x.shape[:-1], rows)


def _grouped_linear_backward(grad: torch.Tensor, blob: torch.Tensor, cols: int) -> torch.Tensor:
    matrix, (groups, rows) = weight_of(blob).matrix, grad.shape[-2:]
    by_group = grad.reshape(-1, groups, rows)
    parts = [products.gradient(matrix, by_group[:, g], g * rows, (g + 1) * rows) for g in range(groups)]
    return torch.stack(parts, dim=1).to(grad.dtype).reshape(*grad.shape[:-1], cols)


def _embedding(ids: torch.Tensor, blob: torch.Tensor, cols: int, dtype: torch.dtype) -> torch.Tensor:
    return weight_of(blob).lookup(ids, dtype)


def _routed_linear(x: torch.Tensor, blob: torch.Tensor, ids: torch.Tensor, rows: int) -> torch.Tensor:
    return stack_of(blob).product(x, ids)


def _routed_linear_backward(
    grad: torch.Tensor, blob: torch.Tensor, ids: torch.Tensor, cols: int
) -> torch.Tensor:
    stack = stack_of(blob)
    tokens, k = ids.shape
    gx = torch.zeros((tokens, cols), dtype=torch.float32, device=grad.device)
    by_pair, flat = grad.reshape(tokens * k, -1), ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    used, counts = torch.unique_consecutive(flat[order], return_counts=True)
    for expert, pairs in zip(used.tolist(), order.split(counts.tolist()), strict=True):
        if 0 <= expert < stack.count and not stack.expert(expert).is_zero:
            of_expert = products.gradient(stack.expert(expert), by_pair[pairs])
            gx.index_add_(0, pairs // k, of_expert.to(torch.float32))
    return gx.to(grad.dtype)


def _latent_attention(
    query: torch.Tensor,
    latents: torch.Tensor,
    rotary_keys: torch.Tensor,
    mask: torch.Tensor | None,
    blob: torch.Tensor,
    decoded: torch.Tensor | None,
    nope: int,
    v: int,
    scaling: float,
    is_causal: bool,
) -> torch.Tensor:
    shape = mla_products.HeadShape(query.shape[1], nope, products.multiply_dtype(query))
    up = up_projection(blob, decoded, shape)
    inputs = mla_products.AttentionInputs(query, latents, rotary_keys, mask, scaling)
    out = mla_products.attention(up, inputs, is_causal=is_causal)
    return out.transpose(1, 2).contiguous()


_library = torch.library.Library("ciuic", "DEF")
_SCHEMAS = {
    "linear(Tensor x, Tensor blob, SymInt rows) -> Tensor": _linear,
    "linear_backward(Tensor grad, Tensor blob, SymInt cols) -> Tensor": _linear_backward,
    "grouped_linear(Tensor x, Tensor blob, SymInt groups, SymInt rows) -> Tensor": _grouped_linear,
    "grouped_linear_backward(Tensor grad, Tensor blob, SymInt cols) -> Tensor": _grouped_linear_backward,
    "embedding(Tensor ids, Tensor blob, SymInt cols, ScalarType dtype) -> Tensor": _embedding,
    "routed_linear(Tensor x, Tensor blob, Tensor ids, SymInt rows) -> Tensor": _routed_linear,
    "routed_linear_backward(Tensor grad, Tensor blob, Tensor ids, SymInt cols) -> Tensor": (
        _routed_linear_backward
    ),
    (
        "latent_attention(Tensor query, Tensor latents, Tensor rotary_keys, Tensor? mask, Tensor blob, "
        "Tensor? decoded, SymInt nope, SymInt v, float scaling, bool is_causal) -> Tensor"
    ): _latent_attention,
}
for _schema, _kernel in _SCHEMAS.items():
    _library.define(_schema)
    _library.impl(_schema.partition("(")[0], _kernel, "CompositeExplicitAutograd")


def _empty_like_x(x: torch.Tensor, last: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], last))


torch.library.register_fake("ciuic::linear", lambda x, blob, rows: _empty_like_x(x, rows))
torch.library.register_fake("ciuic::linear_backward", lambda grad, blob, cols: _empty_like_x(grad, cols))
torch.library.register_fake("ciuic::grouped_linear", lambda x, blob, groups, rows: _empty_like_x(x, rows))
torch.library.register_fake(
    "ciuic::grouped_linear_backward", lambda grad, blob, cols: _empty_like_x(grad, cols)
)
torch.library.register_fake(
    "ciuic::embedding", lambda ids, blob, cols, dtype: ids.new_empty((*ids.shape, cols), dtype=dtype)
)
torch.library.register_fake(
    "ciuic::routed_linear", lambda x, blob, ids, rows: x.new_empty((*ids.shape, rows))
)
torch.library.register_fake(
    "ciuic::routed_linear_backward", lambda grad, blob, ids, cols: grad.new_empty((ids.shape[0], cols))
)
torch.library.register_fake(
    "ciuic::latent_attention",
    lambda query, latents, rotary_keys, mask, blob, decoded, nope, v, scaling, is_causal: query.new_empty(
        (query.shape[0], query.shape[2], query.shape[1], v)
    ),
)


def _save_for_backward(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    ctx.cols = inputs[0].shape[-1]
    ctx.save_for_backward(*(value for value in inputs[1:] if isinstance(value, torch.Tensor)))


def _backward_linear(ctx: Any, grad: torch.Tensor) -> tuple:
    return torch.ops.ciuic.linear_backward(grad, *ctx.saved_tensors, ctx.cols), None, None


def _backward_grouped(ctx: Any, grad: torch.Tensor) -> tuple:
    return torch.ops.ciuic.grouped_linear_backward(grad, *ctx.saved_tensors, ctx.cols), None, None, None


def _backward_routed(ctx: Any, grad: torch.Tensor) -> tuple:
    return torch.ops.ciuic.routed_linear_backward(grad, *ctx.saved_tensors, ctx.cols), None, None, None


torch.library.register_autograd("ciuic::linear", _backward_linear, setup_context=_save_for_backward)
torch.library.register_autograd("ciuic::grouped_linear", _backward_grouped, setup_context=_save_for_backward)
torch.library.register_autograd("ciuic::routed_linear", _backward_routed, setup_context=_save_for_backward)
