"""Encoding: rounds one weight matrix and packs it as its plan says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from ciuic_cli.allocation.matrices import WeightMatrix, fisher_of, row_slices
from ciuic_cli.allocation.plan import MatrixPlan, Plan
from ciuic_cli.allocation.pool_factors import PoolFactors
from ciuic_cli.allocation.row_chunks import RowChunk, map_row_chunks, read_matrix
from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.codecs.header import MatrixHeader
from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.codecs.scales import decode_scales
from ciuic_cli.codecs.trellis import round_matrix
from ciuic_cli.passes import lowrank, prune
from ciuic_cli.passes.fisher import KroneckerFisher
from ciuic_cli.passes.rounding import Rounder, round_prepared, round_rows, row_scales
from ciuic_cli.passes.scale import scaled
from ciuic_cli.statistics.files import Statistics


def encode_matrix(
    model_map: ModelMap,
    statistics: Statistics,
    plan: Plan,
    matrix: WeightMatrix,
    *,
    pools: PoolFactors | None = None,
    rounder: Rounder = round_matrix,
) -> PackedMatrix:
    """Read, prune, scale and round one matrix.

    Args:
        pools: keeps factors from one matrix to the next, and says on which device to compute; None: on the CPU.
        rounder: for that device.
    """
    matrix_plan, pools = plan.matrices[matrix.key], pools or PoolFactors(statistics, for_coding=True)
    fisher = fisher_of(matrix, statistics).to(pools.device)
    weight = read_matrix(model_map, matrix).to(pools.device)
    pruned = prune.pruned_columns(plan.pruned_structures, matrix.key, matrix.cols)
    if pruned is not None:
        weight = prune.correct_kept(weight, fisher.inputs, pruned)
    weight, fisher = scaled(weight, fisher, matrix_plan.input_scale)
    if len(row_slices(matrix)) > 1:
        return _encode_in_chunks(weight, fisher, matrix_plan, pools, rounder)
    factored = pools.inputs(matrix, fisher)
    row_class = matrix_plan.row_class
    (chunk,) = map_row_chunks(
        lambda chunk: chunk, weight, fisher, matrix, row_class, factored=factored, pools=pools
    )
    prepared, factors = chunk.prepared, None
    if matrix_plan.rank:
        importance = prepared.outputs.d_diagonal[: matrix.rows]
        factors, product = lowrank.encode(
            chunk.weight, importance, matrix_plan.rank, L=matrix_plan.L, rounder=rounder
        )
        prepared = prepared.with_weight(chunk.weight - product)
    return round_prepared(
        prepared,
        matrix_plan.row_bits,
        lowrank=factors,
        row_class=matrix_plan.row_class,
        input_scale=matrix_plan.input_scale,
        L=matrix_plan.L,
        rounder=rounder,
    )


def _encode_in_chunks(
    weight: torch.Tensor,
    fisher: KroneckerFisher,
    matrix_plan: MatrixPlan,
    pools: PoolFactors,
    rounder: Rounder,
) -> PackedMatrix:
    """Encode an embedding or a head in row chunks. It has no low-rank part and no feedback between rows.

    All rows are prepared twice: first without contexts, for the rms from which the common base of the row scales
    follows, and then for rounding.
    """
    matrix, row_class, L = matrix_plan.matrix, matrix_plan.row_class, matrix_plan.L
    factored = pools.inputs(matrix, fisher)
    without_contexts = replace(fisher, contexts=None)
    all_rms = map_row_chunks(
        lambda chunk: chunk.prepared.rms[: len(chunk.rows)], weight, without_contexts, matrix, row_class,
        factored=factored, pools=pools,
    )  # fmt: skip
    base, codes = row_scales(torch.cat(list(all_rms)), matrix_plan.row_bits, L)
    scales = decode_scales(base, codes)

    def round_chunk(chunk: RowChunk) -> NDArray[np.uint8]:
        return round_rows(
            chunk.prepared, matrix_plan.row_bits[chunk.groups], scales[chunk.stored], L, rounder
        )

    tiles = map_row_chunks(round_chunk, weight, fisher, matrix, row_class, factored=factored, pools=pools)
    header = MatrixHeader(
        matrix.rows, matrix.cols, L, 0, base, matrix_plan.row_bits, codes,
        row_class=row_class, input_scale=matrix_plan.input_scale,
    )  # fmt: skip
    return PackedMatrix(header, np.concatenate(list(tiles)))
