"""Error feedback for a GGUF file that llama-quantize has rounded: other codes, with the same types, sizes and scales.

llama-quantize rounds every weight of a row on its own. The loss tr(E H Eᵀ) of the row's error E also depends on the
correlations of the inputs, so a column's error is made up for in the columns that are rounded after it (Frantar et al.
2022, GPTQ). The columns with the largest mean squares come first. Any reader of GGUF decodes the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ciuic_cli.allocation.matrices import fisher_of
from ciuic_cli.export.gguf.blocks import Bytes, CodeLayout, layout_of
from ciuic_cli.export.gguf.grids import GridLayout, grid_of
from ciuic_cli.export.gguf.header import tensor_places
from ciuic_cli.export.gguf.tensors import GgufFile, GgufTensor
from ciuic_cli.export.gguf.types import GgufType
from ciuic_cli.passes.feedback import damp
from ciuic_cli.passes.fisher import KroneckerFisher
from ciuic_cli.passes.linear_algebra import damped_cholesky, inverse_lower
from ciuic_cli.statistics.files import Statistics
from ciuic_cli.statistics.head_fisher import context_moment

_ROWS = 4096
"""Rows that are rounded at a time; bounds the temporaries (chosen, not tuned)."""
_PANEL = 64
"""Columns whose errors are subtracted from the following panels in one product (chosen, not tuned)."""
_SCALES = torch.linspace(0.25, 0.75, 9)
"""Tried steps of a block, as shares of its largest weight (chosen)."""
_CANDIDATES = 8
"""Points of a grid that are compared in the whole metric of their columns, after a search in its diagonal (chosen)."""
_SIGN_GROUP = 8
"""Weights of a grid's types that share a condition on their signs."""


@dataclass(frozen=True)
class Feedback:
    """How errors of columns are made up for.

    Attributes:
        order: (n,) int64, the columns in the order of rounding.
        factor: U, (n, n) float32 upper triangular with Uᵀ U = H⁻¹ in this order; None: no feedback.
    """

    order: torch.Tensor
    factor: torch.Tensor | None


def feedback_of(fisher: KroneckerFisher, group: int = 1) -> Feedback:
    """The order and factor of one matrix, from its damped H; with contexts, from the mean H of its rows.

    group: neighbouring columns that stay together in the order.
    """
    h = fisher.inputs.clone()
    if fisher.contexts is not None:
        h += context_moment(fisher.contexts, fisher.outputs / fisher.outputs.sum())
    damp(h)
    groups = torch.argsort(h.diagonal().reshape(-1, group).sum(1), descending=True, stable=True)
    order = (group * groups[:, None] + torch.arange(group)).reshape(-1)
    # With the last column first, H = L Lᵀ has the lower factor whose inverse, turned back, is U.
    turned = order.flip(0)
    lower, _ = damped_cholesky(h[turned][:, turned])
    factor = None if lower is None else inverse_lower(lower).flip(0, 1)
    return Feedback(order, factor)


def round_again(
    path: Path,
    tensors: Sequence[GgufTensor],
    types: Sequence[GgufType],
    source: GgufFile,
    statistics: Statistics,
) -> None:
    """Replace the codes of a file of llama-quantize by codes with error feedback, in place.

    Args:
        path: the file. tensors: those to round again. types: the type of each in the file.
        source: the file that was quantized.
        statistics: of the model.
    """
    places = tensor_places(path)
    for tensor, kind in zip(tensors, types, strict=True):
        layout = layout_of(kind.name) or grid_of(kind.name)
        if layout is None:
            continue
        group = _SIGN_GROUP if isinstance(layout, GridLayout) else 1
        stored = np.memmap(path, np.uint8, "r+", places[tensor.name], (kind.nbytes(tensor.weights),))
        matrices = stored.reshape(len(tensor.parts), -1, tensor.cols // kind.block, kind.block_bytes)
        for number, part in enumerate(tensor.parts):
            fisher = fisher_of(part.matrix, statistics).reordered(torch.from_numpy(part.rows))
            weight = source.matrix(tensor.name, number)
            feedback = feedback_of(fisher, group)
            importance = fisher.inputs.diagonal()
            for first in range(0, len(weight), _ROWS):
                rows = slice(first, first + _ROWS)
                _round_rows(matrices[number, rows], weight[rows], layout, feedback, importance)
        stored.flush()
        del stored, matrices


def _round_rows(
    stored: Bytes,
    weight: torch.Tensor,
    layout: CodeLayout | GridLayout,
    feedback: Feedback,
    importance: torch.Tensor,
) -> None:
    """Round some rows again: stored (m, blocks, bytes) is changed, weight (m, n) is not."""
    blocks = np.ascontiguousarray(stored.reshape(-1, layout.kind.block_bytes))
    if isinstance(layout, GridLayout):
        step = torch.from_numpy(layout.steps(blocks)).reshape(weight.shape)
        points, negative = rounded_to_grid(weight, step, layout, feedback)
        layout.set_codes(
            blocks,
            points.numpy().astype(np.uint16).reshape(len(blocks), -1),
            negative.numpy().reshape(len(blocks), -1),
        )
        stored[:] = blocks.reshape(stored.shape)
        return
    if layout.searches_scale:
        _search_scales(blocks, weight, layout, importance)
    step, offset = (
        torch.from_numpy(values).reshape(weight.shape) for values in layout.steps_and_offsets(blocks)
    )
    codes = rounded(weight, step, offset, torch.from_numpy(layout.levels), feedback)
    layout.set_codes(blocks, codes.numpy().reshape(len(blocks), layout.kind.block))
    stored[:] = blocks.reshape(stored.shape)


def rounded(
    weight: torch.Tensor,
    step: torch.Tensor,
    offset: torch.Tensor,
    levels: torch.Tensor,
    feedback: Feedback,
) -> torch.Tensor:
    """The codes (m, n) uint8 of a matrix with error feedback.

    Args:
        weight, step, offset: (m, n) float32; a code c stands for step * levels[c] + offset.
        levels: (codes,) float32.
    """
    order = feedback.order
    target, step, offset = (values[:, order].T.contiguous() for values in (weight, step, offset))
    step = torch.where(step == 0, 1.0, step)
    values, code_of = levels.sort()
    middles = (values[1:] + values[:-1]) / 2
    codes = torch.empty(target.shape, dtype=torch.uint8)
    factor = feedback.factor
    for begin in range(0, len(target), _PANEL):
        end = min(begin + _PANEL, len(target))
        errors = torch.empty_like(target[begin:end])
        for column in range(begin, end):
            nearest = torch.bucketize((target[column] - offset[column]) / step[column], middles)
            codes[column] = code_of[nearest]
            error = target[column] - (step[column] * values[nearest] + offset[column])
            if factor is None:
                continue
            errors[column - begin] = error / factor[column, column]
            target[column + 1 : end].addr_(factor[column, column + 1 : end], errors[column - begin], alpha=-1)
        if factor is not None:
            target[end:].addmm_(factor[begin:end, end:].T, errors, alpha=-1)
    natural = torch.empty_like(codes)
    natural[order] = codes
    return natural.T.contiguous()


def rounded_to_grid(
    weight: torch.Tensor, step: torch.Tensor, layout: GridLayout, feedback: Feedback
) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes of a matrix in a type with a grid, with error feedback from one group of columns to the next.

    The error e of a group, made up for as well as the later columns allow, costs e M eᵀ with M = (Vᵀ V)⁻¹ for the
    group's diagonal block V of the factor.

    Args:
        weight, step: (m, n) float32; a point's coordinate c stands for ± step * c, one step for each group.
        feedback: with columns in groups of _SIGN_GROUP.

    Returns:
        points (m, n / width) int64; negative (m, n) bool, the signs.
    """
    order, width = feedback.order, layout.width
    n = len(order)
    target = weight[:, order]
    factor = torch.eye(n) if feedback.factor is None else feedback.factor
    grid = torch.from_numpy(layout.grid)
    points = torch.empty((len(weight), n // width), dtype=torch.int64)
    negative = torch.empty(weight.shape, dtype=torch.bool)
    for start in range(0, n, _SIGN_GROUP):
        place = int(order[start])
        for begin in range(start, start + _SIGN_GROUP, width):
            columns, column = slice(begin, begin + width), place + begin - start
            here = slice(column, column + width)
            root = torch.linalg.inv(factor[columns, columns])
            if begin == start or not layout.even:
                stop = start + _SIGN_GROUP if layout.even else begin + width
                signs = _signs(target[:, begin:stop], factor[begin:stop, begin:stop], layout.even)
                negative[:, column : column + stop - begin] = signs
            sign = torch.where(negative[:, here], -1.0, 1.0)
            scale = step[:, column, None] * sign
            chosen = _nearest(target[:, columns], scale, grid, root)
            points[:, column // width] = chosen
            error = target[:, columns] - scale * grid[chosen]
            target[:, begin + width :].addmm_(error @ root, factor[columns, begin + width :], alpha=-1)
    return points, negative


def _signs(target: torch.Tensor, factor: torch.Tensor, even: bool) -> torch.Tensor:
    """Which weights (m, k) are negative; if `even`, an even number per row, for the least cost of a wrong sign."""
    negative = target < 0
    if even:
        root = torch.linalg.inv(factor)
        cheapest = (target.square() * root.square().sum(1)).argmin(1, keepdim=True)
        odd = negative.sum(1, keepdim=True) % 2 == 1
        negative = negative.scatter(1, cheapest, negative.gather(1, cheapest) ^ odd)
    return negative


def _nearest(
    target: torch.Tensor, scale: torch.Tensor, grid: torch.Tensor, root: torch.Tensor
) -> torch.Tensor:
    """The point (m,) of the grid (points, width) with the least |(target - scale * point) root|².

    scale: (m, width), steps with signs. root: (width, width).
    """
    metric = root.square().sum(1)
    costs = (scale.square() * metric) @ grid.square().T - 2 * (scale * target * metric) @ grid.T
    candidates = costs.topk(_CANDIDATES, dim=1, largest=False).indices
    errors = target[:, None] - scale[:, None] * grid[candidates]
    best = (errors @ root).square().sum(2).argmin(1, keepdim=True)
    return candidates.gather(1, best)[:, 0]


def _search_scales(blocks: Bytes, weight: torch.Tensor, layout: CodeLayout, importance: torch.Tensor) -> None:
    """Put the step with the least weighted squared error into the first two bytes of every block, in place.

    importance: (n,) of every column.
    """
    values = weight.reshape(len(blocks), -1)
    weights = importance.expand(weight.shape).reshape(values.shape)
    levels = torch.from_numpy(layout.levels)
    middles = (levels[1:] + levels[:-1]) / 2
    largest = values.abs().amax(1, keepdim=True)
    best = torch.full((len(blocks), 1), torch.inf)
    found = torch.zeros_like(best)
    for sign in (-1.0, 1.0):
        for share in _SCALES.tolist():
            step = (sign * share * largest).half().float()
            codes = torch.bucketize(values / torch.where(step == 0, 1.0, step), middles)
            loss = ((values - step * levels[codes]).square() * weights).sum(1, keepdim=True)
            better = loss < best
            best, found = torch.where(better, loss, best), torch.where(better, step, found)
    blocks[:, :2] = found.half().numpy().view(np.uint8)
